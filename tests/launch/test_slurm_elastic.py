"""06 on a real Slurm cluster: jobs are interrupted, queued again, and go on where they were."""

import re

import pytest
from processes import ROOT

from tools.lab.slurm_cluster import wait_until

STEPS = 100  # an epoch
FLAGS = (
    "--dummy 800 --batch-size 8 --arch mnist_net --image-size 16 --eval-every 0 "
    "--print-every 10 --workers 0"
)


class Job:
    """A job that trains, and would do so for weeks.

    Args:
        slurm: SlurmCluster.
        folder: Path, for its checkpoints and its flags.
        file: an sbatch file.
        options: of sbatch.
    """

    def __init__(self, slurm, folder, file, options=()):
        self.slurm = slurm
        self.checkpoints = folder / "checkpoints"
        self.recipe = folder / "recipe.args"
        self.set_epochs(1_000_000)
        small = ["--ntasks-per-node=1", "--cpus-per-task=1"]
        flags = [f"@{self.recipe}", "--checkpoints-path", self.checkpoints]
        self.id = slurm.sbatch(file, *flags, options=[*small, *options])
        self.starts = 0
        self.wait_for_steps()

    def set_epochs(self, epochs):
        """From the next start on."""
        self.recipe.write_text(f"{FLAGS} --epochs {epochs}\n")

    @property
    def output(self):
        return self.slurm.output(self.id)

    def wait_for_steps(self):
        """Wait until it trains, after its next start."""
        self.starts += 1

        def trains():
            starts = self.output.split("06_imagenet.py | started by ")[1:]
            return len(starts) == self.starts and "== step:" in starts[-1]

        assert wait_until(trains, 120), f"{self.slurm.show(self.id)}\n{self.output}"

    def restart(self):
        self.slurm.restart(self.id)
        self.wait_for_steps()

    def limit(self, time):
        self.slurm.run("scontrol", "update", f"jobid={self.id}", f"TimeLimit={time}")

    def saved(self):
        """After which steps it says that it has stopped and saved."""
        steps = re.findall(r"stopped by a signal after step (\d+): saved", self.output)
        return list(map(int, steps))

    def resumed(self):
        """After which steps it says that it goes on."""
        steps = re.findall(r"resumed from \S+, after step (\d+) of", self.output)
        return list(map(int, steps))


@pytest.fixture
def preempt(slurm, tmp_path):
    """Let a job of a higher partition take all machines, and end it when it has them."""

    def preempt():
        file = tmp_path / "high.sbatch"
        file.write_text("#!/bin/sh\nsleep 600\n")
        options = ["--partition=high", f"--nodes={len(slurm.nodes)}", "--exclusive"]
        high = slurm.sbatch(file, options=[*options, "--output=/dev/null"])
        assert wait_until(lambda: slurm.show(high)["JobState"] == "RUNNING", 120), slurm.show(high)
        slurm.cancel(high)
        slurm.wait(high)

    return preempt


def soon(run_time):
    """The shortest time limit, in minutes, of which Slurm can warn a running job: it looks every 30
    seconds.
    """
    hours, minutes, seconds = map(int, run_time.split(":"))
    return 60 * hours + minutes + (1 if seconds < 20 else 2)


@pytest.mark.slow
def test_a_preempted_and_requeued_job_goes_on_each_time(slurm, tmp_path, preempt):
    job = Job(slurm, tmp_path, ROOT / "launch/slurm/06_srun.sbatch", ["--partition=low"])
    preempt()
    job.restart()
    job.limit(soon(slurm.show(job.id)["RunTime"]))
    assert wait_until(lambda: len(job.saved()) == 2, 120), job.output
    job.limit("1-00:00:00")
    job.restart()
    slurm.run("scontrol", "requeue", job.id)
    assert wait_until(lambda: len(job.saved()) == 3, 120), job.output
    job.set_epochs(job.saved()[-1] // STEPS + 2)
    slurm.restart(job.id)
    assert slurm.wait(job.id) == ("COMPLETED", 0), job.output
    first, second, third = job.saved()
    assert 0 < first < second < third and job.resumed() == [first, second, third], job.output
    assert job.output.count("done: not evaluated") == 1 and slurm.show(job.id)["Restarts"] == "3"


@pytest.mark.slow
def test_a_job_asked_to_save_goes_on_unless_it_is_cancelled(slurm, tmp_path):
    job = Job(slurm, tmp_path, ROOT / "launch/slurm/06_srun.sbatch")
    slurm.run("scancel", "--signal=USR1", job.id)
    job.restart()
    slurm.cancel(job.id)
    assert slurm.wait(job.id) == ("CANCELLED", 75), "the batch file waits until all is saved"
    assert wait_until(lambda: not slurm.processes(), 120), slurm.processes()
    first, second = job.saved()
    assert job.resumed() == [first] and slurm.show(job.id)["Restarts"] == "1", job.output
    assert (job.checkpoints / f"step-{second:08}.pt").exists()


@pytest.mark.slow
def test_torchruns_in_a_job_save_and_go_on(slurm, tmp_path, preempt):
    """The shell by USR1, or, in a job that wants no such signal, torchrun by TERM."""
    text = (ROOT / "launch/slurm/06_torchrun.sbatch").read_text()
    file = tmp_path / "job.sbatch"
    for line, change in {
        "#SBATCH --cpus-per-task=2\n": "#SBATCH --cpus-per-task=1\n",
        "#SBATCH --signal=B:USR1@60\n": "",
    }.items():
        assert line in text
        text = text.replace(line, change)
    file.write_text(text)
    job = Job(slurm, tmp_path, file, ["--partition=low", f"--chdir={ROOT}"])
    preempt()
    job.restart()
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)
    assert wait_until(lambda: slurm.show(job.id)["JobState"] == "PENDING", 120), job.output
    assert len(job.saved()) == 2 and job.resumed() == job.saved()[:1], job.output
