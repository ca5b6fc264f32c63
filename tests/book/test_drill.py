"""06 on three hosts of which something fails, and its launch files without Slurm: the parts of
tools/lab/drill.py.
"""

import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from needs import need
from processes import ROOT, finished

from tools.lab import drill, hosts
from tools.lab import job as lab_job

TEN_STEPS = ["--dummy", 200, "--image-size", 16, "--arch", "mnist_net", "--batch-size", 20]
TEN_STEPS += ["--epochs", 1]
TEN_STEPS = list(map(str, [*TEN_STEPS, "--eval-every", 0, "--print-every", 1]))
EVERY = 30  # steps between checkpoints; each fault comes soon after one


@pytest.fixture(scope="module")
def training():
    """One training on three hosts, with the store on a fourth; each test leaves it running."""
    need(hosts.missing())
    with lab_job.new_job(every=EVERY) as job:
        yield job


@pytest.fixture
def job(training):
    """That training, on all three hosts, with a checkpoint to go back to."""
    training.start_all()
    return training


@pytest.mark.slow
def test_a_killed_process_costs_the_steps_since_a_checkpoint(job):
    """A killed process costs no more than the steps since a checkpoint."""
    assert job.recover(lambda: job.signal_worker(1), world=3).steps_lost <= EVERY


@pytest.mark.slow
def test_a_killed_torchrun_leaves_no_process_behind(job):
    """A torchrun that is killed leaves no process behind and its host comes back."""
    host = job.host_of(1)
    workers = set(job.workers(host).values())
    recovery = job.recover(lambda: job.kill_torchrun(host), world=3)
    assert workers and not workers & set(job.hosts.pids(host))
    assert recovery.steps_lost <= EVERY


@pytest.mark.slow
def test_a_link_that_is_gone_for_seconds_costs_no_step(job):
    host = job.host_of(2)
    restarts = len(job.transcript.resumed)
    job.hosts.cut(host)
    before = job.transcript.position
    time.sleep(3)
    assert job.transcript.position <= before + 1, "it trained on without a link"
    assert job.recover(lambda: job.hosts.mend(host), world=3, resumes=False).steps_lost == 0
    assert len(job.transcript.resumed) == restarts


@pytest.mark.slow
def test_the_host_of_rank_0_may_die_and_come_back(job):
    """The host of rank 0 may die and come back which costs no step."""
    host = job.host_of(0)
    assert job.recover(lambda: job.kill_host(host), world=2).steps_lost <= EVERY
    assert job.recover(lambda: job.start(host), world=3).steps_lost == 0


@pytest.mark.slow
def test_a_process_that_stands_still_is_replaced(job):
    pid = job.workers(job.host_of(1))[1]

    def stand_still():
        os.kill(pid, signal.SIGSTOP)
        # torchrun asks it to end, and would kill it after 30 s, which the test need not wait for.
        asked = f"Sending process {pid} closing signal SIGTERM"
        job.wait_for(lambda: job.transcript.has(asked), "the process to be asked to end")
        os.kill(pid, signal.SIGCONT)

    assert job.recover(stand_still, world=3).steps_lost <= EVERY


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mend", "store", "damage"])  # "cut" is the first half of "mend"
def test_a_drill_is_passed(job, name):
    # it fails by itself if the training does not do what its docstring says
    drill.DRILLS[name].run(job)


@pytest.mark.slow
def test_processes_may_be_killed_one_after_the_other(job):
    assert drill.kills(job, 2).after == 3


@pytest.mark.slow
def test_a_stopped_training_goes_on_by_the_same_commands(job):
    """A stopped training is saved and the same commands go on to the end."""
    assert job.stop() == [128 + signal.SIGTERM] * 3
    stopped = job.transcript.position
    assert job.transcript.has(f"stopped by a signal after step {stopped}: saved")
    job.flags += ["--epochs", math.ceil((stopped + 1) / 50)]
    job.start(0, 1, 2)
    assert [process.wait(lab_job.PATIENCE) for process in job.running.values()] == [0, 0, 0]
    assert job.transcript.resumed[-1].number == stopped and job.transcript.position % 50 == 0
    job.check()

    job.start(0)
    assert job.running[0].wait(lab_job.PATIENCE) == 1
    said = "06_elastic.sh: job drill is closed: it has finished, or one machine has"
    job.wait_for(lambda: job.transcript.has(said), "the reason why it does not start")


@pytest.mark.slow
def test_a_second_store_is_told_that_the_port_is_taken(training):
    command = ["python", "launch/store.py", "--port", lab_job.PORT]
    code, out, err = finished(training.hosts.popen(lab_job.STORE, *command))
    assert (code, out) == (1, "") and len(err.splitlines()) == 1
    assert err.startswith(
        "store.py: error: port 29400: Address already in use; stop the process that uses it"
    )
    with pytest.raises(lab_job.DrillFailed, match=r"^store\.py: error: port 29400: Address"):
        training.start_store()  # at once, in the words of the store


# Without a store


def with_variables(**variables):
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables


@pytest.mark.slow
def test_on_one_machine_a_training_goes_on_by_the_same_command(tmp_path):
    """On one machine a training is started and goes on by the same command."""
    given = [
        ROOT / "launch/06_one_node.sh",
        *TEN_STEPS,
        "--checkpoints-path",
        tmp_path / "checkpoints",
    ]
    for processes, line in (("2", "== step: [  10/10] [1/1]"), ("1", "after step 10 of 10")):
        end = subprocess.run(
            given,
            cwd=tmp_path,
            env=with_variables(PROCESSES=processes),
            capture_output=True,
            text=True,
            timeout=300,
        )
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [[], ["2"], ["--epochs"]])
def test_a_machine_without_a_right_number_is_told_so(number):
    end = subprocess.run([ROOT / "launch/06_static.sh", *number], capture_output=True, text=True)
    found = re.escape(number[0]) if number else ""
    assert end.returncode == 2 and len(end.stderr.splitlines()) == 1
    assert re.match(
        rf"06_static\.sh: error: machine number '{found}': expected 0 to 1 as the first", end.stderr
    )


@pytest.mark.slow
def test_a_torchrun_is_started_again_a_limited_number_of_times(tmp_path):
    """A torchrun that ends is started again a limited number of times."""
    fake = tmp_path / "torchrun"
    fake.write_text("#!/bin/sh\necho started\nexit 3\n")
    fake.chmod(0o755)
    env = with_variables(TRIES="2", PAUSE="0") | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    end = subprocess.run(
        [ROOT / "launch/06_elastic.sh"], env=env, capture_output=True, text=True, timeout=300
    )
    assert (end.returncode, end.stdout) == (3, "started\n" * 3)
    assert end.stderr.splitlines() == [
        "06_elastic.sh: torchrun exited with code 3; restarting in 0 s, 1 more tries",
        "06_elastic.sh: torchrun exited with code 3; restarting in 0 s, 0 more tries",
        "06_elastic.sh: error: torchrun exited with code 3; giving up after 2 restarts",
    ]
