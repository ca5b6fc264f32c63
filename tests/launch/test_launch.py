"""Scripts under their real launchers on this machine, and on two: they run, they end, they leave
nothing behind.
"""

import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
from launchers import TRAIN
from processes import ROOT, finished, gone, read_until, start, start_copy, workers
from rungs import QUICK, parse

from common.flags import parse_args
from common.machine import free_port
from ddp.flags import parse_ddp_args

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
LAUNCH = {
    "torchrun": [*TORCHRUN, "03_mnmc_ddp_launch.py"],
    "mp.spawn": ["04_mnmc_ddp_mp.py", "--nproc-per-node=2"],
}
FOREVER = ["--epochs", 100000]


# They run


def test_scripts_take_the_flag_of_torch_distributed_launch(monkeypatch):
    """Of this version of torch, and of older ones."""
    scripts = ["03_mnmc_ddp_launch.py", "05_mnmc_ddp_slurm.py", "06_imagenet.py"]
    for script in [*scripts, "launch/preflight.py"]:
        for spelling in ("--local-rank=1", "--local_rank=1"):
            assert parse(monkeypatch, script, spelling).local_rank == "1", script


def test_a_rung_under_max_restarts_says_that_it_begins_again(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setattr(sys, "argv", ["03_mnmc_ddp_launch.py"])
    expected = "--max-restarts=3: each restart begins at epoch 1; 06_imagenet.py --resume continues"
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        parse_ddp_args("")
        assert capsys.readouterr().err.count(expected) == lines


def test_several_copies_of_01_say_that_each_trains_alone(environment, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["01_snsc.py"])
    for size in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        environment(**{size: 2})
        parse_args("")
        expected = f"{size}=2: each copy trains alone; 03_mnmc_ddp_launch.py shares the work"
        assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_two_jobs_run_side_by_side_on_one_machine(small_folder, monkeypatch):
    """Two jobs run side by side on one machine and each shares the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    each = f"{threads} CPU thread{'s' * (threads > 1)} each)"
    command = [*LAUNCH["mp.spawn"], *QUICK, small_folder, "--epochs", 2]
    jobs = [start(*command) for _ in range(2)]
    for code, out, err in map(finished, jobs):
        assert code == 0 and "started by mp.spawn | world size 2 (2 on this machine)" in out, err
        assert re.search(rf"^ranks 0-1 on .+: cpu \(.+, {re.escape(each)}$", out, re.M), out


# The model is part of a reference cycle, as with a trainer and a callback that know each other.
CYCLE = """\
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    ddp(torch.ones(1, 4)).sum().backward()
    cycle = [ddp]
    cycle.append(cycle)
    total = """
COUNT = """\
import glob
threads = [open(file).read() for file in glob.glob("/proc/self/task/*/comm")]
print(len(threads), threads)
"""


@pytest.mark.slow
def test_no_thread_of_gloo_outlives_the_process_group(copy):
    """One that does may abort the interpreter on its way out, after all the work is done: exit code
    134."""
    train = TRAIN.replace("    total = ", CYCLE) + COUNT
    assert CYCLE in train
    (copy / "train.py").write_text(train)
    world = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    processes = [start_copy(copy, "train.py", RANK=r, LOCAL_RANK=r, **world) for r in (0, 1)]
    for code, out, err in map(finished, processes):
        assert code == 0, err
        assert out.splitlines()[-1].startswith("1 "), out


# They end


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCH)
def test_a_killed_rank_ends_the_others_and_is_named(launcher, small_folder):
    process = start(*LAUNCH[launcher], *QUICK, small_folder, *FOREVER)
    read_until(process, "== test: [1/")
    ranks = workers(process.pid)
    ranks[1].kill()
    code, _, err = finished(process)
    assert code == 1 and gone(ranks)
    if launcher == "mp.spawn":
        assert (
            "04_mnmc_ddp_mp.py: error: process 1 was killed by SIGKILL; the others were stopped"
            in err
        )
    else:
        assert "Signal 9 (SIGKILL)" in err and "rank      : 1 (local_rank: 1)" in err


STUCK = """\
import time, torch
import torch.distributed as dist
from setup_distributed import cleaned_up, setup_distributed

@cleaned_up()
def main():
    d = setup_distributed()
    if d.rank > 0:
        time.sleep(100)
    print("before the error")
    work = dist.all_reduce(torch.zeros(1), async_op=True)
    raise OSError("disk full")

main()
"""


@pytest.mark.slow
def test_a_rank_that_fails_while_others_answer_loses_no_message(copy, monkeypatch):
    """A rank that fails while others owe it an answer ends and loses no message."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (copy / "stuck.py").write_text(STUCK)
    code, out, err = finished(start_copy(copy, *TORCHRUN, "stuck.py"))
    assert code == 1
    assert out == "before the error\n" and "OSError: disk full" in err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCH)
def test_ctrl_c_ends_all_processes(launcher, small_folder):
    process = start(*LAUNCH[launcher], *QUICK, small_folder, *FOREVER)
    read_until(process, "== test: [1/")
    ranks = workers(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    code, _, err = finished(process)
    assert code != 0 and gone(ranks)
    if launcher == "mp.spawn":
        assert code == 130 and "Traceback" not in err


@pytest.mark.slow
def test_the_children_of_mp_spawn_end_with_their_parent(small_folder):
    process = start(*LAUNCH["mp.spawn"], *QUICK, small_folder, *FOREVER)
    read_until(process, "== test: [1/")
    ranks = workers(process.pid)
    process.kill()
    assert gone(ranks)


@pytest.mark.slow
def test_a_mistake_is_one_line_from_every_process(tmp_path):
    """A mistake is a line from every process and no traceback of ours."""
    process = start(*LAUNCH["mp.spawn"], "--dataset", "folder", "--data-dir", tmp_path)
    code, out, err = finished(process)
    line = f"04_mnmc_ddp_mp.py: error: --data-dir {tmp_path} has no train/"
    assert code == 2 and 1 <= err.count(line) <= 2 and out == ""
    assert "UserError" not in err


def test_05_without_srun_says_how_to_start_it(environment, monkeypatch, capsys):
    environment()
    monkeypatch.setattr(sys, "argv", ["05_mnmc_ddp_slurm.py"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "05_mnmc_ddp_slurm.py"), run_name="__main__")
    out, err = capsys.readouterr()
    expected = "SLURM_PROCID is not set: expected srun to set it; srun --ntasks=2 python 05_mnmc"
    assert out == "" and len(err.splitlines()) == 1 and expected in err


def test_04_refuses_what_cannot_work_before_it_starts_processes(run, monkeypatch):
    monkeypatch.setattr("torch.multiprocessing.spawn", None)
    two = ("--nodes", 2)
    mistakes = {
        (*two, "--node-rank", 2): "--node-rank 2 of --nodes 2: expected a node rank from 0 to 1",
        two: "--nodes 2 without --dist-url: expected tcp://HOST:PORT, the machine of --node-rank 0",
        ("--dist-url", "localhost:1"): "--dist-url localhost:1: expected tcp://HOST:PORT",
        ("--nproc-per-node", 0): "'0' given, expected a whole number of 1 or more",
    }
    for given, expected in mistakes.items():
        end = run("04_mnmc_ddp_mp.py", *given)
        assert end.code == 2 and len(end.err.splitlines()) == 1
        assert end.err.startswith("04_mnmc_ddp_mp.py: error: ") and expected in end.err


def test_04_takes_one_copy_per_machine(run, monkeypatch):
    started = []
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setattr(
        "torch.multiprocessing.spawn", lambda *_, **options: started.append(options)
    )
    end = run("04_mnmc_ddp_mp.py", "--nodes", 2, "--dist-url", "tcp://node0:29500")
    assert end.code == 0 and len(started) == 1, end.err


# On two hosts, by the commands of the docstrings


def command_of(script, node_rank, folder):
    """The command for two machines in a docstring, as it is for one of them."""
    text = (ROOT / script).read_text()
    command = next(line for line in text.splitlines() if "node-rank=0" in line).strip()
    assert command.count("host1") == 1
    command = command.replace("node-rank=0", f"node-rank={node_rank}")
    return [*command.split(), *map(str, [*QUICK, folder, "--epochs", 2])]


def start_on_both(hosts, script, folder, *flags):
    """Start the command on the second host, and on the first; return their processes."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    second, first = (
        hosts.popen(k, *command_of(script, k, folder), *map(str, flags), env=env) for k in (1, 0)
    )
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize("script", ["03_mnmc_ddp_launch.py", "04_mnmc_ddp_mp.py"])
def test_two_hosts_train_by_the_command_of_the_docstring(hosts, script, small_folder):
    (code, out, err), (code_2, out_2, err_2) = map(
        finished, start_on_both(hosts, script, small_folder)
    )
    assert (code, code_2) == (0, 0), err + err_2
    assert "world size 4 (2 on this machine)" in out and "done: test accuracy" in out
    lines = re.findall(r"ranks (.+) on (\w+): cpu \(.+, 1 CPU thread each\)", out)
    assert lines == [("0-1", "host1"), ("2-3", "host2")]
    assert "accuracy" not in out_2 and "ranks" not in out_2


@pytest.mark.slow
def test_a_host_that_dies_ends_the_other(hosts, small_folder):
    first, second = start_on_both(hosts, "04_mnmc_ddp_mp.py", small_folder, *FOREVER)
    read_until(first, "== test: [1/")
    hosts.kill(1)
    code, _, err = finished(first)
    assert code == 1 and "04_mnmc_ddp_mp.py: error: lost another rank (" in err
    second.wait(300)
