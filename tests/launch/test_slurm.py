"""On a real Slurm cluster of four machines: srun, the sbatch files, and what goes wrong there."""

import re
import shutil

import pytest
from images import write_mnist
from launchers import TRAIN
from needs import need
from processes import ROOT, finished, read_until
from rungs import QUICK

from tools.lab.slurm_cluster import wait_until

SBATCH = sorted(path.name for path in (ROOT / "launch/slurm").glob("*.sbatch"))


def batch(folder, *lines, options=""):
    """Write an sbatch file."""
    path = folder / "job.sbatch"
    path.write_text("\n".join(["#!/bin/bash", f"#SBATCH {options}", *lines]) + "\n")
    return path


# They check how a batch file calls a program that is not installed here, and run its command on the
# node itself.
STAND_INS = {
    "apptainer": """\
[ "$1 $2 $3" = "exec --nv ladder.sif" ] || { echo "apptainer $*: not expected"; exit 255; }
shift 3
exec "$@"
""",
    "srun": """\
for argument; do
    case $argument in
        --container-*) echo "$argument" >>"$(dirname "$0")/options" ;;
        *) kept+=("$argument") ;;
    esac
done
exec /usr/bin/srun "${kept[@]}"
""",
}


def with_lines(file, folder, *lines):
    """Write a copy of a file of launch/slurm with more lines before its first command, and with
    stand-ins for containers.
    """
    if file in ("05_apptainer.sbatch", "05_pyxis.sbatch"):
        program = "apptainer" if "apptainer" in file else "srun"
        stand_in = folder / "bin" / program
        stand_in.parent.mkdir()
        stand_in.write_text("#!/bin/bash\n" + STAND_INS[program])
        stand_in.chmod(0o755)
        lines = (*lines, f"export PATH={stand_in.parent}:$PATH")
    text = (ROOT / "launch/slurm" / file).read_text()
    first = "set -euo pipefail\n"
    assert text.count(first) == 1
    (folder / file).write_text(text.replace(first, "\n".join([*lines, first])))
    return folder / file


def ranks(text):
    """(launcher, rank, world size, local rank, local world size, sum), of every line of the
    ten-line script.
    """
    found = re.findall(r"(\w+) (\d+) of (\d+), (\d+) of (\d+), sum (\d+)", text)
    return sorted((line[0], *map(int, line[1:])) for line in found)


# srun


@pytest.mark.slow
def test_srun_starts_05_by_the_command_of_the_docstring(slurm, small_folder):
    text = (ROOT / "05_mnmc_ddp_slurm.py").read_text()
    command = next(line for line in text.splitlines() if "srun --nodes=2" in line).split()
    end = slurm.run(*command, *QUICK, small_folder, "--epochs", 2)
    assert end.returncode == 0, end.stderr
    assert "05_mnmc_ddp_slurm.py | started by srun | world size 4 (2 on this machine)" in end.stdout
    lines = re.findall(r"^ranks (.+) on (.+): cpu \(.+, 1 CPU thread each\)$", end.stdout, re.M)
    (first, host), (second, other) = lines
    assert (first, second) == ("0-1", "2-3") and len({host, other} & set(slurm.nodes)) == 2
    assert "global batch = 2 x 4 = 8" in end.stdout
    assert end.stdout.count("done: test accuracy") == 1


@pytest.mark.slow
def test_the_shell_of_a_batch_file_and_a_small_step_are_worlds_of_their_own(slurm, copy):
    lines = f"cd {copy}; python train.py; srun -n3 python train.py"
    job = slurm.sbatch(batch(copy, lines, options="-N3 --ntasks-per-node=2"))
    assert slurm.wait(job) == ("COMPLETED", 0)
    alone, *step = ranks(slurm.output(job))
    assert alone == ("python", 0, 1, 0, 1, 1)
    assert [line[:3] for line in step] == [("srun", rank, 3) for rank in range(3)]


HOLD = """\
    import glob, os, time
    open(f"here-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}", "w").close()
    deadline = time.monotonic() + 60
    while len(glob.glob("here-*")) < 2:  # until the other group is there as well
        assert time.monotonic() < deadline
        time.sleep(0.1)
"""


@pytest.fixture
def holding(copy):
    """The folder with a script that keeps its process group until another step has one too."""
    marker = "    total = "
    assert marker in TRAIN
    (copy / "train.py").write_text(TRAIN.replace(marker, HOLD + marker))
    return copy


@pytest.mark.slow
def test_two_steps_of_a_job_run_side_by_side(slurm, holding):
    step = "srun -N1 -n2 -w {} python train.py"
    lines = f"cd {holding}; {step.format('n02')} & {step.format('n03')} & wait -n && wait -n"
    job = slurm.sbatch(batch(holding, lines, options="-N3 --ntasks-per-node=2 -w n01,n02,n03"))
    assert slurm.wait(job) == ("COMPLETED", 0), slurm.output(job)
    assert ranks(slurm.output(job)) == [("srun", r, 2, r, 2, 3) for r in (0, 0, 1, 1)]


@pytest.mark.slow
def test_two_jobs_at_once_on_one_machine_do_not_meet(slurm, holding):
    jobs = [
        slurm.popen("srun", "-n2", "-w", "n01", "python", "train.py", cwd=holding) for _ in range(2)
    ]
    for job in jobs:
        out, err = job.communicate(timeout=300)
        assert job.returncode == 0, err
        assert ranks(out) == [("srun", r, 2, r, 2, 3) for r in (0, 1)]


# torchrun in a job


@pytest.mark.slow
def test_torchrun_in_a_step_has_distinct_ranks(slurm, copy):
    """All of its workers have the SLURM_PROCID of their torchrun."""
    torchrun = "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
    lines = (
        f"cd {copy}; srun -n2 --ntasks-per-node=1 {torchrun} "
        "--rdzv-endpoint=$(hostname):24999 train.py"
    )
    job = slurm.sbatch(batch(copy, lines, options="-N2 --ntasks-per-node=2"))
    assert slurm.wait(job) == ("COMPLETED", 0), slurm.output(job)
    assert ranks(slurm.output(job)) == [("torchrun", r, 4, r % 2, 2, 10) for r in range(4)]


@pytest.mark.slow
def test_mpirun_starts_one_world_in_a_job_and_in_a_step_of_one_task(slurm, copy):
    need(None if shutil.which("mpirun") else "not installed: mpirun (apt-get install openmpi-bin)")
    mpirun = "mpirun --allow-run-as-root --oversubscribe -n 2"
    lines = f"cd {copy}; export MASTER_ADDR=$(hostname); "
    lines += f"{mpirun} -x MASTER_ADDR --map-by node python train.py"
    job = slurm.sbatch(batch(copy, lines, options="-N2 --ntasks-per-node=1"))
    assert slurm.wait(job) == ("COMPLETED", 0), slurm.output(job)
    assert ranks(slurm.output(job)) == [("mpirun", 0, 2, 0, 1, 3), ("mpirun", 1, 2, 0, 1, 3)]
    end = slurm.run("srun", "-n1", *mpirun.split(), "python", "train.py", cwd=copy)
    assert end.returncode == 0, end.stderr
    assert ranks(end.stdout) == [("mpirun", r, 2, r, 2, 3) for r in (0, 1)]


# The sbatch files


@pytest.mark.slow
@pytest.mark.parametrize("file", SBATCH)
def test_an_sbatch_file_trains_as_it_stands(slurm, file, tmp_path, small_folder):
    given = [*QUICK, small_folder, "--epochs", 1]
    world, done = "world size 4 (2 on this machine)", "done: test accuracy"
    if file.startswith("06"):
        given = [small_folder, *QUICK[:4], "--image-size", 32, "--epochs", 1]
        given += ["--checkpoints-path", tmp_path / "saved"]
        done = "done: top-1"
    if file == "05_mnist_cpu.sbatch":
        write_mnist(tmp_path / "MNIST/raw", 64)
        given = ["--data-dir", tmp_path]
        world = "world size 2 (1 on this machine)"
    job = slurm.sbatch(with_lines(file, tmp_path), *given)
    assert slurm.wait(job) == ("COMPLETED", 0), slurm.output(job)
    out = slurm.output(job)
    assert world in out and out.count(done) == 1
    if file == "05_mnist_cpu.sbatch":
        assert "mnist: 64 train and 64 test images" in out and "mnist_net" in out
        tasks = [slurm.show(job)[key] for key in ("NumNodes", "NumTasks", "NumCPUs")]
        assert tasks == ["2", "2", "8"], "all cores of both machines"
    if file == "05_pyxis.sbatch":
        assert (tmp_path / "bin/options").read_text().splitlines() == [
            f"--container-image={ROOT}/ladder.sqsh",
            f"--container-mounts={ROOT}",
            f"--container-workdir={ROOT}",
        ]


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in SBATCH if file != "05_mnist_cpu.sbatch"])
def test_the_lines_for_gpus_give_every_process_its_gpus(slurm, file, tmp_path):
    path = with_lines(file, tmp_path, f"export PYTHONPATH={tmp_path}")
    enabled = path.read_text().replace("# SBATCH --gpus", "#SBATCH --gpus")
    assert enabled.count("#SBATCH --gpus") == 1
    path.write_text(enabled)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'torchrun' not in ' '.join(sys.orig_argv):\n"
        f"    with open('{tmp_path}/seen', 'a') as file:\n"
        "        file.write(f\"{os.environ['SLURMD_NODENAME']} "
        "{os.environ.get('CUDA_VISIBLE_DEVICES')}\\n\")\n"
        "    os._exit(0)\n"  # in place of a training, which the test above looks at
    )
    other = slurm.popen(
        "srun", "--nodes=1", "--ntasks=1", "--nodelist=n01", "--gpus=1", "sleep", "100"
    )
    try:
        wait_until(lambda: "R" in slurm.run("squeue", "--noheader", "--format=%t").stdout, 120)
        cores = ["--cpus-per-task=3"] * file.endswith("torchrun.sbatch")  # not as many as GPUs
        job = slurm.sbatch(path, options=["--nodelist=n01,n02", *cores])
        assert slurm.wait(job) == ("COMPLETED", 0), slurm.output(job)
    finally:
        other.terminate()
        other.communicate(timeout=300)
    assert sorted((tmp_path / "seen").read_text().splitlines()) == ["n01 1,2"] * 2 + ["n02 0,1"] * 2


@pytest.mark.slow
# each ends in its own way
@pytest.mark.parametrize("file", ["05_srun.sbatch", "06_srun.sbatch", "06_torchrun.sbatch"])
def test_an_sbatch_file_passes_its_flags_on_and_fails_with_them(slurm, file):
    job = slurm.sbatch(
        ROOT / "launch/slurm" / file, "--epochs", "none", options=["--nodes=1", "--cpus-per-task=1"]
    )
    state, code = slurm.wait(job)
    assert state == "FAILED" and code != 0
    assert "error: argument --epochs: 'none' given" in slurm.output(job)


# Mistakes and accidents


@pytest.mark.slow
@pytest.mark.parametrize("kill_on_bad_exit", [0, 1])
def test_a_killed_task_ends_the_others_and_srun_fails(slurm, kill_on_bad_exit, small_folder):
    options = ["-N2", "--ntasks-per-node=1", f"--kill-on-bad-exit={kill_on_bad_exit}"]
    script = ["python", "05_mnmc_ddp_slurm.py", *QUICK, small_folder, "--epochs", 100000]
    job = slurm.popen("srun", *options, *script)
    read_until(job, "== test: [1/")
    (second,) = [
        p for p in slurm.tasks() if p.environ()["SLURM_PROCID"] == "1" and "python" in p.name()
    ]
    second.kill()
    code, _, err = finished(job)
    assert code != 0
    assert "05_mnmc_ddp_slurm.py: error: lost another rank (" in err or kill_on_bad_exit
    assert "Killed" in err
    assert wait_until(lambda: not slurm.processes(), 60)
