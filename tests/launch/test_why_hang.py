"""launch/why_hang.py, on ranks that stand still, and on what ranks have recorded."""

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
import torch.distributed as dist
from processes import ROOT
from ranks import Ranks

from launch import why_hang
from launch.rank_watch import places
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
gloo_records = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"),
    reason="this torch does not record the calls of gloo",
)


@pytest.fixture
def hang(tmp_path, monkeypatch, capsys):
    """A function (case) that starts its ranks, and returns them and a function that asks them."""
    folder = tmp_path / "hang"
    monkeypatch.setattr(why_hang, "FOLDER", folder)
    monkeypatch.setattr(sys, "argv", ["why_hang.py", "ask"])
    started = []

    def ask():
        why_hang.main()
        return capsys.readouterr().out.splitlines()

    def hang(case):
        count = CASES[case][0]
        options = {"env": {"WHY_HANG": folder}, "script": "launch/why_hang.py"}
        started.append(Ranks(tmp_path, count, ["run", HANGS, case], **options))
        arrived = wait_until(lambda: len(list(folder.glob("started-*"))) == count, 120)
        assert arrived, started[0].output()
        return started[0], ask

    yield hang
    for ranks in started:
        ranks.end()


@gloo_records
def test_a_training_that_moves_is_told_apart_from_one_that_hangs(hang, tmp_path):
    _, ask = hang("stopped")  # which nobody has stopped
    # What a larger training has left in the folder, before.
    left = tmp_path / "hang/rank-2.json"
    left.write_text(json.dumps({"rank": 2, "world_size": 3, "pid": 1, "host": "node7"}))
    os.utime(left, (0, 0))
    lines = ask()
    assert len(lines) >= 3, lines
    first, *_, rank_0, rank_1 = lines
    assert first == "ranks 0, 1 made calls within a second: not all stand still"
    assert re.fullmatch(r"rank 0 is at \S*hangs.py:\d+ in stopped\(\)", rank_0)
    assert re.fullmatch(r"rank 1 is at \S*hangs.py:\d+ in stopped\(\)", rank_1)
    assert not any("node7" in line for line in lines), "the rank of an older training"


@pytest.mark.slow
@gloo_records
@pytest.mark.parametrize("case", CASES)
def test_the_first_line_names_the_ranks_and_the_lines(case, hang):
    ranks, ask = hang(case)
    if case == "stopped":
        ranks.signal(1, "SIGSTOP")
    for _ in range(5):  # until they stand still
        time.sleep(1)
        lines = ask()
        if "made calls within a second" not in lines[0]:
            break
    assert re.match(CASES[case][1], lines[0]), lines


@pytest.mark.slow
@gloo_records
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


# On records


def entry(number, name, shape, done=True, line=7, group="default_pg", **more):
    return {
        "process_group": ("0", group),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [shape],
        "retired": done,
        "state": "scheduled",
        "is_p2p": False,
        "frames": [
            {"filename": "/x/site-packages/torch/c10d.py", "line": 1, "name": "all_reduce"},
            {"filename": os.path.abspath("train.py"), "line": line, "name": "step"},
        ],
    } | more


def explain(*records):
    """Return the first line about ranks with these records."""
    answers = {
        rank: {"calls": why_hang.calls_of({"entries": entries}), "at": f"train.py:{90 + rank}"}
        for rank, entries in enumerate(records)
    }
    return why_hang.explain(answers, {})[0]


def test_calls_that_a_rank_no_longer_remembers_are_not_compared():
    """A rank that calls more, in other groups too, forgets its old calls sooner."""
    long = [entry(number, "all_reduce", [8]) for number in (3, 4, 5, 6)]
    waits = entry(7, "all_reduce", [8], done=False, line=20)
    assert explain([*long, waits], long[2:]) == (
        "rank 0 in call 7 of the group default_pg: all_reduce [8] at train.py:20 in step(); "
        "rank 1 did not call it: rank 1 is at train.py:91"
    )


def test_a_rank_without_a_call_is_missed_only_in_its_own_groups():
    waits = [entry(1, "barrier", [1], done=False)]
    assert explain(waits, []).endswith("rank 1 did not call it: rank 1 is at train.py:91")
    in_a_group = [entry(1, "all_reduce", [3], done=False, group="rows")]
    assert explain(in_a_group, in_a_group, []) == (
        "ranks 0, 1 in call 1 of the group rows: all_reduce [3] at train.py:7 in step(); "
        "all ranks that answer are there"
    )


def test_the_files_of_nccls_flight_recorder_are_compared(tmp_path, capsys, monkeypatch):
    """Such files as NCCL's watchdog writes; an all_to_all may have other shapes on each rank."""
    equal = [entry(4, "all_reduce", [9]), entry(5, "all_to_all", [1])]
    other = [entry(4, "all_reduce", [9]), entry(5, "all_to_all", [2])]
    files = {
        0: [*equal, entry(6, "all_reduce", [8], done=False, line=20)],
        1: [*other, entry(6, "all_reduce", [8], done=False, state="started", line=20)],
        # A send is between two ranks.
        2: [*other, entry(6, "send", [8], done=False, is_p2p=True)],
    }
    for rank, entries in files.items():
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps({"entries": entries}))
    monkeypatch.setattr(sys, "argv", ["why_hang.py", "read", *map(str, tmp_path.glob("rank_*"))])
    why_hang.main()
    assert capsys.readouterr().out.splitlines()[0] == (
        "ranks 0, 1 in call 6 of the group default_pg: all_reduce [8] at train.py:20 in step(); "
        "rank 2 did not call it: rank 2 is at an unknown place"
    )


@pytest.fixture
def torch_records(monkeypatch):
    """A function (gloo's entries, nccl's, nccl2's) that gives torch these records."""

    def dump(entries):
        return pickle.dumps({"entries": entries})

    def give(gloo=(), nccl=(), nccl2=None):
        def old_dump(includeCollectives=True):
            return dump(gloo)

        def dump_of(includeCollectives=True, backend="gloo"):
            return dump({"gloo": gloo, "nccl2": nccl2}[backend])

        calls = torch._C._distributed_c10d
        newest = old_dump if nccl2 is None else dump_of
        monkeypatch.setattr(calls, "_dump_fr_trace", newest, raising=False)
        monkeypatch.setattr(calls, "_dump_nccl_trace", lambda: dump(nccl), raising=False)
        return [call[:3] for call in places.recorded_calls()]

    return give


def test_the_records_of_gloo_and_of_both_kinds_of_nccl_are_read(torch_records):
    vote = entry(1, "all_reduce", [1], profiling_name="gloo:all_reduce")
    gradients = entry(4, "all_reduce", [9])
    newer = entry(4, "all_reduce", [9], profiling_name="nccl2:all_reduce")
    calls = [("default_pg", 1, "all_reduce"), ("default_pg", 4, "all_reduce")]
    assert torch_records([vote]) == calls[:1]
    assert torch_records([vote], nccl=[gradients]) == calls
    assert torch_records([vote], nccl2=[newer]) == calls
    assert torch_records([vote, newer], nccl=[vote, newer]) == calls, "one record under two names"


def test_nccl_without_a_record_is_said(torch_records, monkeypatch):
    """As with the new nccl in torch 2.14."""
    vote = entry(1, "all_reduce", [1], profiling_name="gloo:all_reduce")
    newer = entry(4, "all_reduce", [9], profiling_name="nccl2:all_reduce")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")

    def first_line(*ranks):
        answers = {rank: {"at": "train.py:9", "calls": []} for rank in range(len(ranks))}
        for rank, records in enumerate(ranks):
            torch_records(**records)
            answers[rank]["nccl_is_unrecorded"] = places.nccl_is_unrecorded()
        return why_hang.explain(answers, {})[0]

    unrecorded = "no record of NCCL's calls in this PyTorch, or none was made"
    assert first_line({"gloo": [vote]}, {"gloo": [vote]}).startswith(unrecorded)
    assert first_line({"gloo": [vote]}, {"nccl": [entry(4, "barrier", [9])]}).startswith("no rank")
    assert first_line({"gloo": [vote]}, {"nccl2": [newer]}).startswith("no rank waits")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert first_line({"gloo": [vote]}, {"gloo": [vote]}).startswith("no rank waits")


def test_a_rank_that_does_not_answer_is_explained(tmp_path, monkeypatch):
    process = subprocess.Popen(["sleep", "100"])
    here = {"pid": process.pid, "host": socket.gethostname()}
    who = f"process {process.pid} on {here['host']}"
    assert why_hang.why_silent(here) == f"{who} does not answer: its Python is busy"
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert why_hang.why_silent(here) == f"{who} is stopped: kill -CONT {process.pid}"
    process.kill()
    process.wait()
    assert why_hang.why_silent(here) == f"{who} has ended"
    there = why_hang.why_silent(here | {"host": "node7"})
    assert there.endswith("on node7 does not answer: look whether the machine can be reached")
    monkeypatch.setattr(why_hang, "LOOKS", 1)
    monkeypatch.setattr(why_hang, "FOLDER", tmp_path)
    why_hang.write(tmp_path / "rank-1.json", here | {"rank": 1, "world_size": 2})
    assert why_hang.ask() == ({}, {1: f"{who} has ended"})
    # It is the first line: the others wait for this rank.
    waiting = {"calls": why_hang.calls_of({"entries": [entry(1, "barrier", [1], done=False)]})}
    lines = why_hang.explain({0: waiting | {"at": "train.py:9"}}, {1: "has ended"})
    assert lines[0] == "rank 1: has ended" and lines[1].startswith("rank 0 in call 1 ")


def test_a_script_runs_as_it_would_alone(tmp_path):
    names = ["beside", "common", "launch", "tools", "store"]  # the last four are ours too
    for name in names:
        (tmp_path / f"{name}.py").write_text("")
    script = tmp_path / "train.py"
    imports = ", ".join(names)
    script.write_text(f"import sys, {imports}\nprint({imports})\nprint(__name__, sys.argv)\n")
    command = [sys.executable, ROOT / "launch/why_hang.py", "run", script, "--batch_size=8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.count(str(tmp_path)) == len(names) + 1, done
    assert done.stdout.endswith(f"__main__ {[str(script), '--batch_size=8']}\n")


def test_without_a_recorder_it_says_how_to_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(why_hang, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["why_hang.py", "ask"])
    with pytest.raises(SystemExit, match=r"start the training with why_hang\.py run"):
        why_hang.main()
    monkeypatch.setattr(sys, "argv", ["why_hang.py", "run"])
    with pytest.raises(SystemExit, match="2"):
        why_hang.main()
    assert "error: run: expected more after it" in capsys.readouterr().err
