"""06 on three hosts of which something fails, and its launch files without Slurm."""

import json
import math
import os
import signal
import socket
import subprocess
import sys

import pytest
from needs import need
from processes import ROOT, finished, start

from tools.lab import hosts as lab_hosts
from tools.lab.drill import DRILLS, PATIENCE, new_job

TEN_STEPS = ["--dummy", "200", "--image-size", "16", "--arch", "mnist_net", "--batch-size", "20"]
TEN_STEPS += ["--epochs", "1", "--eval-every", "0", "--print-every", "1"]


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.timeout(3600)
def test_the_training_survives_every_drill(tmp_path):
    """Of each drill, tools/lab/drill.py says itself whether the training has done what it should.
    "cut" is the first half of "mend".
    """
    need(lab_hosts.missing())
    names = [name for name in DRILLS if name != "cut"]
    flags = ["--kills", 2, "--every", 30, "--log-file", tmp_path / "log.jsonl"]
    code, out, err = finished(start("tools/lab/drill.py", *names, *flags), timeout=3500)
    assert code == 0, out + err
    _, head, *rows = out.splitlines()
    assert head.split() == ["drill", "steps", "lost", "seconds", "processes"]
    assert [row.split()[0] for row in rows] == names
    assert all(row.endswith("   recovered") for row in rows)
    runs = {run["drill"]: run for run in map(json.loads, (tmp_path / "log.jsonl").open())}
    assert runs["blink"]["steps_lost"] == runs["join"]["steps_lost"] == 0
    assert all(runs[name]["steps_lost"] <= 30 for name in ("worker", "torchrun", "host"))
    assert [runs["host"]["after"], runs["join"]["before"], runs["join"]["after"]] == [2, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_stopped_training_goes_on_by_the_same_commands():
    need(lab_hosts.missing())
    with new_job() as job:
        job.start_all()
        for process in job.running.values():
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(PATIENCE) for process in job.running.values()]
        assert codes == [128 + signal.SIGTERM] * 3
        stopped = job.position
        assert f"stopped by a signal after step {stopped}: saved" in "".join(job.lines)
        job.flags += ["--epochs", math.ceil((stopped + 1) / 50)]
        job.start(0, 1, 2)
        assert [process.wait(PATIENCE) for process in job.running.values()] == [0, 0, 0]
        assert job.resumed[-1].number == stopped and job.position % 50 == 0
        assert not job.mistakes
        job.start(0)
        assert job.running[0].wait(PATIENCE) == 1
        said = "06_elastic.sh: job drill is closed: it has finished, or one machine has"
        job.wait_for(lambda: said in "".join(job.lines), "the reason why it does not start")


# Without a store


def with_variables(**variables):
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables


@pytest.mark.slow
def test_on_one_machine_a_training_goes_on_by_the_same_command(tmp_path):
    given = [ROOT / "launch/06_one_node.sh", *TEN_STEPS, "--checkpoints-path", tmp_path / "saved"]
    for processes, line in (("2", "== step: [  10/10] [1/1]"), ("1", "after step 10 of 10")):
        env = with_variables(PROCESSES=processes)
        options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
        end = subprocess.run(given, timeout=300, **options)
        assert end.returncode == 0, end.stderr
        assert f"world size {processes}" in end.stdout and line in end.stdout
        assert "done: not evaluated after 1 epochs" in end.stdout


@pytest.mark.slow
def test_on_two_machines_each_is_told_its_number(hosts, tmp_path):
    env = with_variables(MASTER=hosts.addresses[0], PROCESSES="1", INTERFACE="eth0")
    given = [*TEN_STEPS, "--checkpoints-path", tmp_path]
    second, first = (
        hosts.popen(k, ROOT / "launch/06_static.sh", k, *given, env=env) for k in (1, 0)
    )
    for process in (first, second):
        code, out, err = finished(process)
        assert code == 0, err
        assert ("world size 2 (1 on this machine)" in out) == (process is first)
    assert (tmp_path / "step-00000010.pt").exists()


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def test_a_launch_file_names_a_wrong_machine_number_and_a_taken_port():
    for given in ([], ["2"], ["--epochs"]):
        end = run(ROOT / "launch/06_static.sh", *given)
        found = f"06_static.sh: error: machine number '{''.join(given)}': expected 0 to 1 as the"
        assert end.returncode == 2 and end.stderr.startswith(found)
        assert len(end.stderr.splitlines()) == 1
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        end = run(sys.executable, ROOT / "launch/store.py", "--port", str(port))
    assert (end.returncode, end.stdout) == (1, "") and len(end.stderr.splitlines()) == 1
    assert end.stderr.startswith(
        f"store.py: error: port {port}: Address already in use; stop the process that uses it"
    )


def test_a_torchrun_is_started_again_a_limited_number_of_times(tmp_path):
    fake = tmp_path / "torchrun"
    fake.write_text("#!/bin/sh\necho started\nexit 3\n")
    fake.chmod(0o755)
    env = with_variables(TRIES="2", PAUSE="0") | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    end = run(ROOT / "launch/06_elastic.sh", env=env)
    assert (end.returncode, end.stdout) == (3, "started\n" * 3)
    again = "06_elastic.sh: torchrun exited with code 3; restarting in 0 s, {} more tries"
    up = "06_elastic.sh: error: torchrun exited with code 3; giving up after 2 restarts"
    assert end.stderr.splitlines() == [again.format(1), again.format(0), up]
