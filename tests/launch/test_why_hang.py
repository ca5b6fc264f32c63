"""launch/why_hang.py, on ranks that stand still."""

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from processes import ROOT, start

from launch import why_hang
from tools.lab.slurm_cluster import wait_until

HANGS = ROOT / "tests/helpers/hangs.py"
# case: (ranks, the first line that `ask` prints)
CASES = {
    "rank_0_alone": (
        3,
        r"call 1 of the group default_pg differs: rank 0: all_reduce \[3\] at \S*hangs.py:\d+ in "
        r"rank_0_alone\(\); ranks 1, 2: barrier at \S*hangs.py:\d+ in rank_0_alone\(\)",
    ),
    "uneven_batches": (
        2,
        r"rank 1 in call \d+ of the group default_pg: all_reduce \[10\] at \S*hangs.py:\d+ in "
        r"uneven_batches\(\); rank 0 did not call it: rank 0 is at \S*hangs.py:\d+ in uneven_",
    ),
    "other_shapes": (
        2,
        r"call 1 of the group default_pg differs: rank 0: all_reduce \[3\] at \S*hangs.py:\d+ in "
        r"other_shapes\(\); rank 1: all_reduce \[4\] at \S*hangs.py:\d+ in other_shapes\(\)",
    ),
    "in_a_handler": (
        2,
        r"rank 0 in call 1 of the group default_pg: barrier at \S*hangs.py:\d+ in in_a_handler\(\)"
        r"; rank 1 did not call it: rank 1 is at \S*hangs.py:\d+ in in_a_handler\(\)",
    ),
    "not_at_all": (
        3,
        r"ranks 0, 2 in call 1 of the group default_pg: all_reduce \[3\] at \S*hangs.py:\d+ in "
        r"not_at_all\(\); rank 1 did not call it: rank 1 is at \S*hangs.py:\d+ in not_at_all\(\)",
    ),
    "stopped": (2, r"rank 1: process \d+ on \S+ is stopped: kill -CONT \d+"),
}
GLOO_RECORDS = hasattr(torch._C._distributed_c10d, "_dump_fr_trace")


@pytest.mark.slow
@pytest.mark.skipif(not GLOO_RECORDS, reason="this torch does not record the calls of gloo")
@pytest.mark.parametrize("case", CASES)
def test_the_first_line_names_the_ranks_and_the_lines(case, tmp_path, monkeypatch):
    ranks, expected = CASES[case]
    monkeypatch.setenv("WHY_HANG", str(tmp_path / "hang"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    job = start(*torchrun, "launch/why_hang.py", "run", HANGS, case)
    try:
        while len(list((tmp_path / "hang").glob("started-*"))) < ranks:
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.1)
        time.sleep(1)  # until they stand still
        if case == "stopped":
            stopped = json.loads((tmp_path / "hang/rank-1.json").read_text())["pid"]
            os.kill(stopped, signal.SIGSTOP)
        asked = subprocess.run(
            [sys.executable, "launch/why_hang.py", "ask"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        for path in (tmp_path / "hang").glob("rank-*.json"):
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
        job.kill()  # torchrun
    assert asked.returncode == 0, asked.stderr
    assert re.match(expected, asked.stdout), asked.stdout


@pytest.mark.slow
@pytest.mark.skipif(not GLOO_RECORDS, reason="this torch does not record the calls of gloo")
def test_a_host_that_is_lost_is_named(hosts, tmp_path):
    folder = tmp_path / "hang"
    variables = {"WHY_HANG": folder, "OMP_NUM_THREADS": 1}
    for k in (0, 1):
        torchrun = ["torchrun", "--nnodes=2", f"--node-rank={k}", "--master-addr=10.77.0.1"]
        command = [*torchrun, "launch/why_hang.py", "run", HANGS, "stopped"]
        hosts.popen(k, *command, variables=variables)
    assert wait_until(lambda: len(list(folder.glob("started-*"))) == 2, 120)
    hosts.cut(1)  # first, so that no process says goodbye
    hosts.kill(1)
    time.sleep(1)  # until rank 0 waits for rank 1
    asked = hosts.popen(0, "python", "launch/why_hang.py", "ask", variables=variables)
    lost, waits, where = asked.communicate(timeout=60)[0].splitlines()
    assert re.fullmatch(r"rank 1: process \d+ on host2 does not answer: look whether .*", lost)
    assert re.match(r"rank 0 in call \d+ of the group default_pg: all_reduce \[3\] at ", waits)
    assert where.startswith("rank 0 is at ") and "in stopped()" in where


def entry(number, name, shape, done=True, state="scheduled", line=7):
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [shape],
        "retired": done,
        "state": state,
        "is_p2p": False,
        "frames": [
            {"filename": "/x/site-packages/torch/c10d.py", "line": 1, "name": "all_reduce"},
            {"filename": os.path.abspath("train.py"), "line": line, "name": "step"},
        ],
    }


def test_the_files_of_nccls_flight_recorder_are_compared(tmp_path, capsys, monkeypatch):
    """Such files as NCCL's watchdog writes; an all_to_all may have other shapes on each rank."""
    equal = [entry(4, "all_reduce", [9]), entry(5, "all_to_all", [1])]
    other = [entry(4, "all_reduce", [9]), entry(5, "all_to_all", [2])]
    files = {
        0: [*equal, entry(6, "all_reduce", [8], done=False, line=20)],
        1: [*other, entry(6, "all_reduce", [8], done=False, state="started", line=20)],
        2: [*other],
    }
    for rank, entries in files.items():
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps({"entries": entries}))
    monkeypatch.setattr(sys, "argv", ["why_hang.py", "read", *map(str, tmp_path.glob("rank_*"))])
    why_hang.main()
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "ranks 0, 1 in call 6 of the group default_pg: all_reduce [8] at train.py:20 in step(); "
        "rank 2 did not call it: rank 2 is at an unknown place"
    )


def test_ranks_that_all_wait_in_the_same_call_are_told_of():
    waiting = why_hang.calls({"entries": [entry(1, "barrier", [1], done=False)]})
    lines = why_hang.explain({k: {"calls": waiting, "at": "train.py:1"} for k in range(2)}, {})
    assert lines[0].startswith("ranks 0, 1 in call 1") and lines[0].endswith("are there")
    done = why_hang.calls({"entries": [entry(1, "barrier", [1])]})
    lines = why_hang.explain({k: {"calls": done, "at": "train.py:1"} for k in range(2)}, {})
    assert lines[0].startswith("no rank waits in a collective")


def test_a_rank_that_never_calls_anything_is_told_of():
    waiting = why_hang.calls({"entries": [entry(1, "barrier", [1], done=False)]})
    silent = {"calls": [], "at": "train.py:9"}
    (first, *_) = why_hang.explain({0: {"calls": waiting, "at": "train.py:1"}, 1: silent}, {})
    assert first.endswith("rank 1 did not call it: rank 1 is at train.py:9")


def test_a_rank_that_does_not_answer_is_explained():
    process = subprocess.Popen(["sleep", "100"])
    here = {"pid": process.pid, "host": socket.gethostname()}
    assert why_hang.why_silent(here).endswith("its Python is busy")
    process.kill()
    process.wait()
    assert why_hang.why_silent(here) == f"process {process.pid} on {here['host']} has ended"
    there = why_hang.why_silent(here | {"host": "node7"})
    assert there.endswith("on node7 does not answer: look whether the machine can be reached")


def test_without_a_recorder_it_says_how_to_start(tmp_path):
    for command, code, expected in (
        ("ask", 1, "no rank in hang/: start the training with why_hang.py run"),
        ("run", 2, "error: run: expected more after it"),
    ):
        end = subprocess.run(
            [sys.executable, ROOT / "launch/why_hang.py", *command.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert end.returncode == code and expected in end.stderr
