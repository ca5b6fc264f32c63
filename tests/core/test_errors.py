"""Errors as one line: which message, which exit code, and when the traceback stays."""

import re
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


ENDS = [
    (ZeroDivisionError("by zero"), 1, r"Traceback.* in fail\n.*ZeroDivisionError: by zero\n"),
    (UserError("--lr 0: expected more"), 2, r"train\.py: error: --lr 0: expected more\n"),
    (KeyboardInterrupt(), 130, r"train\.py: stopped by Ctrl-C\n"),
]


def test_a_rank_ends_itself_and_those_that_it_started(a_rank_of_two, monkeypatch, capsys):
    """A mistake of a user and Ctrl-C are one line; an unknown error shows its traceback."""
    for error, code, expected in ENDS:
        child = Mock()
        monkeypatch.setattr("multiprocessing.active_children", lambda child=child: [child])
        with pytest.raises(Ended) as end:
            fail(error)
        assert end.value.args == (code,)
        assert re.fullmatch(expected, capsys.readouterr().err, re.DOTALL)
        child.kill.assert_called_once_with()


def test_a_rank_in_cleaned_up_does_not_wait_for_the_others(a_rank_of_two, monkeypatch, capsys):
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)  # which might hang
    monkeypatch.setattr("gc.collect", lambda: None)  # which takes a second here
    for error, code, printed in (
        (OSError("disk full"), 1, "Traceback .*OSError: disk full\n"),
        (SystemExit("disk full"), 1, "disk full\n"),
        (SystemExit(75), 75, ""),
        (SystemExit(), 0, ""),
    ):
        with pytest.raises(Ended) as end, cleaned_up():
            raise error
        assert end.value.args == (code,)
        assert re.fullmatch(printed, capsys.readouterr().err, re.DOTALL)


def test_one_process_keeps_the_traceback_of_an_unknown_error(capsys):
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())
    assert capsys.readouterr().err == ""


NCCL = "NCCL error in: /pytorch/NCCLUtils.cpp:94, "
CAUSE = "its own message, or its launcher's, says why"
INTERFACE = "need export {}_SOCKET_IFNAME=... on each, the interface"
# An error of torch, and what ours says of it: None, if it is no lost peer.
LOST = {
    # After the death of a peer, from the two implementations of NCCL in torch:
    NCCL + "remote process exited or there was a network error, ncclRemoteError: A call": CAUSE,
    "NCCL operation failed\nNCCL Last Error: Connection closed by remote peer host": CAUSE,
    "NCCL error: Connect to 127.0.1.1<40213> failed : Connection refused": INTERFACE.format("NCCL"),
    "[/gloo/tcp/pair.cc:144] no error: connect [127.0.1.1]: refused": INTERFACE.format("GLOO"),
    "[/gloo/tcp/pair.cc:144] connect [10.0.0.7]: No route to host": INTERFACE.format("GLOO"),
    "CUDA error: an illegal memory access was encountered": None,
    NCCL + "invalid usage, ncclInvalidUsage: Duplicate GPU": None,
}


def test_the_loss_of_a_peer_is_one_line_that_says_what_to_do():
    for text, expected in LOST.items():
        message = lost_peer(RuntimeError(text))
        if expected is None:
            assert message is None, text
        else:
            assert message.startswith("lost another rank (") and expected in message, text
            assert "\n" not in message and "/gloo/" not in message


def test_a_lost_connection_of_any_backend_is_a_lost_rank():
    text = "The client socket has timed out after 60s while trying to connect to (10.0.0.1, 29500)"
    assert lost_peer(dist.DistNetworkError(text)).startswith(f"lost another rank ({text})")
