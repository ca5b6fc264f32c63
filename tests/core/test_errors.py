"""Errors as one line: which message, which exit code, and when the traceback stays."""

import sys
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from common import errors
from common.distributed import cleaned_up
from common.errors import UserError, lost_peer, one_line_errors


class Ended(BaseException):
    """The process would end now. Its argument is the exit code."""


@pytest.fixture
def a_rank_of_two(monkeypatch):
    """Let this process count as one of two ranks, whose exit would end pytest."""

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(errors.os, "_exit", end)
    monkeypatch.setattr(sys, "argv", ["folder/train.py"])


@one_line_errors()
def fail(error):
    raise error


def test_a_rank_shows_the_traceback_of_an_unknown_error(a_rank_of_two, capsys):
    with pytest.raises(Ended, match="1"):
        fail(ZeroDivisionError("by zero"))
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "in fail" in err and "ZeroDivisionError: by zero" in err
    assert "train.py: error" not in err


def test_a_rank_shows_the_mistake_of_a_user_in_one_line(a_rank_of_two, capsys):
    with pytest.raises(Ended, match="2"):
        fail(UserError("--lr 0: expected more"))
    assert capsys.readouterr().err == "train.py: error: --lr 0: expected more\n"


def test_a_rank_in_cleaned_up_does_not_wait_for_the_others(a_rank_of_two, monkeypatch, capsys):
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)  # which might hang
    monkeypatch.setattr("gc.collect", lambda: None)  # which takes a second here
    for error, code in ((OSError("disk full"), 1), (SystemExit("disk full"), 1)):
        with pytest.raises(Ended) as end, cleaned_up():
            raise error
        assert end.value.args == (code,)
        assert capsys.readouterr().err.endswith(f"{type(error).__name__}: disk full\n")
    for error, code in ((SystemExit(75), 75), (SystemExit(), 0)):
        with pytest.raises(Ended) as end, cleaned_up():
            raise error
        assert end.value.args == (code,)
        assert capsys.readouterr().err == ""


def test_ctrl_c_ends_a_process_and_those_that_it_started(a_rank_of_two, monkeypatch, capsys):
    child = Mock()
    monkeypatch.setattr("multiprocessing.active_children", lambda: [child])
    with pytest.raises(Ended, match="130"):
        fail(KeyboardInterrupt())
    assert capsys.readouterr().err == "train.py: stopped by Ctrl-C\n"
    child.kill.assert_called_once_with()


def test_one_process_keeps_the_traceback_of_an_unknown_error(capsys):
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        ("NCCL error: Connect to 127.0.1.1<40213> failed : Connection refused", "NCCL"),
        ("[/gloo/transport/tcp/pair.cc:144] no error: connect [127.0.1.1]: refused", "GLOO"),
        ("[/gloo/transport/tcp/pair.cc:144] connect [10.0.0.7]: No route to host", "GLOO"),
    ],
)
def test_an_address_that_others_do_not_reach_names_the_variable(text, variable):
    message = lost_peer(RuntimeError(text))
    assert f"need export {variable}_SOCKET_IFNAME=... on each, the interface" in message
    assert "/gloo/" not in message


def test_a_lost_connection_of_any_backend_is_a_lost_rank():
    text = "The client socket has timed out after 60s while trying to connect to (10.0.0.1, 29500)"
    assert lost_peer(dist.DistNetworkError(text)).startswith(f"lost another rank ({text})")
