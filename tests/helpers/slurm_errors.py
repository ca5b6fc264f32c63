"""Provoke the errors that a first user of Slurm meets, on clusters of their own.

The tests compare them with docs/troubleshooting.md.
"""

import tempfile
from pathlib import Path

from tools.lab import slurm_cluster
from tools.lab.slurm_cluster import SlurmCluster, wait_until

PARTITIONS = """\
PartitionName=short Nodes=ALL MaxTime=10 MaxNodes=1
PartitionName=lab Nodes=ALL AllowAccounts=lab
PartitionName=closed Nodes=ALL State=DOWN
Licenses=matlab:1
"""
MEMORY = Path("/sys/fs/cgroup/memory")  # of cgroup v1, which this cluster uses
# Takes 1 GB.
GREEDY = 'python3 -c "print(len(bytearray(10**9)))"'


class Two(SlurmCluster):
    """Has two nodes."""

    nodes = ("n01", "n02")


class Strict(Two):
    """Refuses at once what its partitions never allow, and queues no job again."""

    config = slurm_cluster.CONFIG + PARTITIONS + "EnforcePartLimits=ALL\nJobRequeue=0\n"


class Lenient(Two):
    """Accepts what its partitions never allow, as Slurm does by default."""

    config = slurm_cluster.CONFIG + PARTITIONS


class Confined(Two):
    """Kills a task that takes more memory than its job has."""

    config = slurm_cluster.CONFIG.replace("task/none", "task/cgroup").replace(
        "=CR_CPU\n", "=CR_CPU_Memory\n"
    )
    cgroup = "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\nConstrainSwapSpace=yes\n"


def job_file(cluster, *lines):
    """Write a batch file."""
    path = cluster.folder / "job.sbatch"
    path.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
    return path


def printed(cluster, *command):
    """Return what a command prints."""
    end = cluster.run(*command)
    return end.stdout + end.stderr


def submit(cluster, *options):
    """Submit a job that sleeps, and return what sbatch prints."""
    file = job_file(cluster, "sleep 600")
    return printed(cluster, "sbatch", "--parsable", "--output=/dev/null", *options, file)


def output(cluster, *lines, options=()):
    """Run a batch job, and return its output."""
    job = cluster.sbatch(job_file(cluster, *lines), options=options)
    cluster.wait(job, timeout=300)
    return cluster.output(job)


def refused(cluster):
    """Return what sbatch and srun say of jobs that cannot be."""
    wrong = [
        "--partition=gpus",
        "--partition=lab",
        "--cpus-per-task=8",
        "--mem=100G",
        "--gpus-per-node=8",
        "--gres=tpu:1",
        "--constraint=a100",
        "--nodelist=n99",
        "--time=soon",
    ]
    answers = [submit(cluster, option) for option in wrong]
    answers.append(submit(cluster, "--partition=short", "--time=20:00"))
    answers.append(submit(cluster, "--partition=short", "--nodes=2"))
    answers.append(submit(cluster, "--cpu-per-task=2"))
    answers.append(printed(cluster, "srun", "--partition=gpus", "true"))
    return "".join(answers)


def requeue(cluster):
    """Ask Slurm to queue a running job again, and return its answer."""
    job = cluster.sbatch(job_file(cluster, "sleep 600"))
    assert wait_until(lambda: cluster.show(job)["JobState"] == "RUNNING", 60)
    return printed(cluster, "scontrol", "requeue", job)


def not_again(cluster):
    """Return what Slurm says of a job that it may not queue again."""
    answer = requeue(cluster)
    cluster.clear()
    return answer


def steps(cluster):
    """Return what srun says of a step that is too large, and which GPUs two steps get."""
    options = ["--nodes=1", "--ntasks=2", "--gpus-per-node=2"]
    text = output(cluster, "srun --ntasks=8 true", options=options)
    say = "bash -c 'echo step $SLURM_STEP_ID has GPU $CUDA_VISIBLE_DEVICES; sleep 3'"
    for gpus in ("--gpus=1", "--gpus-per-node=1"):
        lines = f"for k in 0 1; do srun --exact --ntasks=1 {gpus} {say} & done; wait"
        text += f"{gpus}:\n" + output(cluster, lines, options=options)
    return text


def time_limit(cluster):
    """Return the output of a job that reaches its time limit, after a minute."""
    return output(cluster, "sleep 600", options=["--time=00:01"])


def pending(cluster):
    """Return what squeue and sinfo say of jobs that wait."""
    everything = f"--nodes={len(cluster.nodes)}"
    submit(cluster, everything, "--exclusive", "--job-name=busy")
    assert wait_until(lambda: "R" in printed(cluster, "squeue", "-h", "--format=%t"), 60)
    waiting = [
        ["--partition=short", "--time=20:00"],
        ["--partition=short", "--nodes=2"],
        ["--partition=lab"],
        ["--partition=closed"],
        ["--hold"],
        ["--begin=now+1hour"],
        [everything, "--job-name=resources"],
        ["--nodes=1", "--job-name=priority"],
    ]
    ids = [submit(cluster, *options).strip() for options in waiting]
    submit(cluster, f"--dependency=afterok:{ids[4]}")
    failed = submit(cluster, "--hold").strip()
    submit(cluster, f"--dependency=afterok:{failed}")
    cluster.run("scancel", failed)

    def reasons():
        return printed(cluster, "squeue", "--states=PENDING", "--noheader", "--format=%r")

    def wait_for(*words):
        wait_until(lambda: all(word in reasons() for word in words), 60)

    wait_for("Resources", "Priority", "DependencyNeverSatisfied", "PartitionDown")
    text = reasons()
    cluster.clear()
    for _ in range(2):
        submit(cluster, "--licenses=matlab:1")
    submit(cluster, "--array=0-1%1")
    wait_for("Licenses", "JobArrayTaskLimit")
    text += reasons()
    cluster.clear()
    requeue(cluster)
    wait_for("BeginTime")
    text += reasons()
    cluster.clear()
    drained = cluster.nodes[0]
    reason = "GPU 3 fell off the bus"
    cluster.run("scontrol", "update", f"nodename={drained}", "state=drain", f"reason={reason}")
    submit(cluster, f"--nodelist={drained}")
    wait_for("ReqNodeNotAvail")
    text += reasons() + printed(cluster, "sinfo", "-R")
    cluster.clear()
    submit(cluster, everything)
    wait_for("DRAINED")
    return text + reasons()


def out_of_memory(cluster):
    """Return what Slurm says of a task, and of a batch file, that takes too much memory."""
    options = ["--mem=200M"]
    return output(cluster, f"srun {GREEDY}", options=options) + output(
        cluster, GREEDY, options=options
    )


def provoke(cluster_class, mistakes):
    """Return what Slurm prints when these mistakes are made on a cluster of this class."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        cluster_class(folder) as cluster,
    ):
        return "".join(mistake(cluster) for mistake in mistakes)
