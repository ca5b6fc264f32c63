"""Errors as one line: which message, which exit code, and when the traceback stays."""

import re
import sys
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from processes import ROOT, finished, start

from common.errors import UserError
from common.setup_distributed import cleaned_up
from ddp.errors import lost_peer, one_line_errors


class Ended(BaseException):
    """The process would end now. Its argument is the exit code."""


@pytest.fixture
def a_rank_of_two(monkeypatch):
    """Let this process count as one of two ranks, whose exit would end pytest."""

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch's begins with the rank
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
    """That it lost one of them is one line: that one's error is the cause."""
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)  # which might hang
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("gc.collect", lambda: None)  # which takes a second here
    for error, code, printed in (
        (OSError("disk full"), 1, "Traceback .*OSError: disk full\n"),
        (RuntimeError("closed by peer"), 1, "RuntimeError: closed by peer\n"),
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


# Under torchrun, which prints the cause last

LINES = 15  # of a terminal that a reader sees first
WRONG_FLAG = """\
import os, runpy, sys
from ddp import errors

errors.PATIENCE = {patience}
sys.argv = [{script!r}, "--epochs", "1", *(["--lr", "fast"] if {condition} else [])]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BROKEN_IMAGE = """\
import torch
from torch.distributed.elastic.multiprocessing.errors import record
import torch.distributed as dist
from common.setup_distributed import cleaned_up, setup_distributed

{decorator}
@cleaned_up()
def main():
    d = setup_distributed()
    for step in range(3):
        if step == 1 and d.rank == 1:
            raise ValueError("image 17 is broken")
        dist.all_reduce(torch.ones(2))

main()
"""


def torchrun(folder, text):
    """Run a text as a script with two ranks; returns all lines that a terminal shows."""
    script = folder / "train.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{text}")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    code, out, err = finished(start(*launch, script))
    assert code == 1, err
    return (out + err).splitlines()


MISTAKE = "error: argument --lr: 'fast' given, expected a number above 0"
MISTAKES = {  # who has the wrong flag, who prints it, and how long the other rank waits for that
    "both": ("True", 0, 100),
    "rank 1": ("os.environ['RANK'] == '1'", 1, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "who"),
    [("03_mnmc_ddp_launch.py", "both"), ("06_imagenet.py", "both"), ("07_fsdp.py", "rank 1")],
)
def test_torchrun_ends_with_a_mistake_of_flags_that_one_rank_prints(tmp_path, script, who):
    condition, rank, patience = MISTAKES[who]
    text = WRONG_FLAG.format(script=script, condition=condition, patience=patience)
    lines = torchrun(tmp_path, text)
    assert [line.startswith(f"{script}: {MISTAKE}") for line in lines].count(True) == 1
    end = "\n".join(lines[-LINES:])
    assert re.search(rf"rank +: {rank} .*\n.*exitcode  : 2 .*\n.*\n  traceback : .*{MISTAKE}", end)
    assert end.count(MISTAKE) == 1


ERRORS = {
    "cleaned_up": BROKEN_IMAGE.format(decorator=""),
    "record above cleaned_up": BROKEN_IMAGE.format(decorator="@record"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", ERRORS)
def test_torchrun_ends_with_the_error_of_the_rank_that_failed_first(tmp_path, script):
    """The rank that lost it says so in a line, and is not taken for the cause."""
    lines = torchrun(tmp_path, ERRORS[script])
    end = [line.strip() for line in lines if line.strip()][-2:]
    assert end == ["ValueError: image 17 is broken", 60 * "="]
    lost = [line for line in lines if "Connection " in line and "by peer" in line]
    assert all("lost another rank" in line for line in lost)
    tracebacks = [line for line in lines if line.startswith(("Traceback", "[rank1]: Traceback"))]
    assert len(tracebacks) == 2, "of rank 1 and of torchrun"
