"""Scripts under their real launchers on this machine, and on two: they run, they end, they leave
nothing behind.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launchers import TRAIN
from processes import ROOT, finished, gone, read_until, start, start_copy, workers
from rungs import QUICK, parse
from torch.distributed.run import get_args_parser

from common.ddp_flags import parse_ddp_args
from common.distributed import free_port
from common.flags import parse_args
from tools.book.translations import TORCHRUN as TORCHRUN_FLAGS

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
LAUNCH = {
    "torchrun": [*TORCHRUN, "03_mnmc_ddp_launch.py"],
    "mp.spawn": ["04_mnmc_ddp_mp.py", "--nproc-per-node=2"],
}
FOREVER = ["--epochs", 100000]


# They run


@pytest.mark.parametrize("spelling", ["--local-rank=1", "--local_rank=1"])
@pytest.mark.parametrize(
    "script",
    ["03_mnmc_ddp_launch.py", "05_mnmc_ddp_slurm.py", "06_imagenet.py", "launch/preflight.py"],
)
def test_scripts_take_the_flag_of_torch_distributed_launch(script, spelling, monkeypatch):
    """Scripts take the flag of torch distributed launch in both spellings."""
    assert parse(monkeypatch, script, spelling).local_rank == "1"


def test_the_table_of_torchruns_flags_names_every_flag():
    """The table of torchruns flags names every flag of the installed one."""

    def by_length(name):
        return name.startswith("--"), "-" in name[2:]

    spellings = [action.option_strings for action in get_args_parser()._actions]
    installed = {max(names, key=by_length) for names in spellings if names}
    installed -= {"--help", "--print-completion"}
    assert installed - set(TORCHRUN_FLAGS) == set()
    if torch.__version__ >= (2, 15):
        assert set(TORCHRUN_FLAGS) == installed


def test_a_rung_under_max_restarts_says_that_it_begins_again(monkeypatch, capsys):
    """A plain rung under max restarts says that it begins again."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setattr(sys, "argv", ["03_mnmc_ddp_launch.py"])
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        parse_ddp_args("")
        err = capsys.readouterr().err
        assert (
            err.count(
                "--max-restarts=3: each restart begins at epoch 1; "
                "06_imagenet.py --resume continues"
            )
            == lines
        )


LAUNCHED = [("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")]
LAUNCHED += [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")]


@pytest.mark.parametrize("names", LAUNCHED)
def test_several_copies_of_01_say_that_each_trains_alone(names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["01_snsc.py"])
    monkeypatch.setenv(names[0], "2")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv(names[1], rank)
        parse_args("")
        expected = f"{names[0]}=2: each copy trains alone; 03_mnmc_ddp_launch.py shares the work"
        assert capsys.readouterr().err.count(expected) == lines


@pytest.mark.slow
def test_torch_distributed_launch_may_pass_its_local_rank(small_folder):
    given = ["--nproc-per-node=2", "03_mnmc_ddp_launch.py", *QUICK, small_folder, "--epochs", 1]
    code, out, err = finished(start("-W", "ignore", "-m", "torch.distributed.launch", *given))
    assert code == 0, err
    assert "03_mnmc_ddp_launch.py | started by torchrun | world size 2 (2 on this machine)" in out
    assert out.count("done: test accuracy") == 1, "rank 0 alone prints"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCH)
def test_two_jobs_run_side_by_side_on_one_machine(launcher, small_folder, monkeypatch):
    """Two jobs run side by side on one machine and each shares the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # torchrun sets 1
    threads = max(1, len(os.sched_getaffinity(0)) // 2) if launcher == "mp.spawn" else 1
    each = f"{threads} CPU thread{'s' * (threads > 1)} each)"
    command = [*LAUNCH[launcher], *QUICK, small_folder, "--epochs", 2]
    if launcher == "torchrun":
        command.insert(2, "--standalone")
    jobs = [start(*command) for _ in range(2)]
    for code, out, err in map(finished, jobs):
        assert code == 0 and f"started by {launcher} | world size 2 (2 on this machine)" in out, err
        assert re.search(rf"^ranks 0-1 on .+: cpu \(.+, {re.escape(each)}$", out, re.M), out


@pytest.mark.slow
def test_every_rank_crops_and_mirrors_in_its_own_way(small_folder, tmp_path):
    """Every rank crops and mirrors in its own way and begins with the same weights."""
    probe = tmp_path / "probe"
    probe.mkdir()
    (probe / "sitecustomize.py").write_text(
        "import os, torch\n"
        "from common import data, models\n"
        "def tell(*what):\n"  # in one piece, since two processes write to one pipe
        "    os.write(1, (' '.join(map(str, what)) + '\\n').encode())\n"
        "def crop(images, padding, top, left, mirror, original=data.crop_and_flip):\n"
        "    tell('crops', top.tolist(), left.tolist())\n"
        "    return original(images, padding, top, left, mirror)\n"
        "def build(args, dataset, original=models.build_model):\n"
        "    net = original(args, dataset)\n"
        "    tell('weights', sum(p.double().sum().item() for p in "
        "net.parameters()))\n    return net\n"
        "data.crop_and_flip, models.build_model = crop, build\n"
    )
    env = os.environ | {"PYTHONPATH": f"{probe}:{ROOT}"}
    given = [*LAUNCH["torchrun"], *QUICK, small_folder, "--epochs", 1]
    end = subprocess.run(
        [sys.executable, *map(str, given)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert end.returncode == 0, end.stderr
    weights, crops = (re.findall(rf"{what} (.*)", end.stdout) for what in ("weights", "crops"))
    assert len(weights) == 2 and len(set(weights)) == 1
    assert len(crops) == 4 and len(set(crops)) == 4  # two ranks, two steps


@pytest.mark.slow
def test_no_thread_of_gloo_outlives_the_process_group(copy):
    """One that does may abort the interpreter on its way out, after all the work is done: exit code
    134. The model is part of a reference cycle, as with a trainer and a callback that know each
    other."""
    wrap = "    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))\n"
    wrap += (
        "    ddp(torch.ones(1, 4)).sum().backward()\n    cycle = [ddp]\n    "
        "cycle.append(cycle)\n    total = "
    )
    count = "import glob\nthreads = [open(f).read() for f in glob.glob('/proc/self/task/*/comm')]\n"
    train = TRAIN.replace("    total = ", wrap) + count + "print(len(threads), threads)\n"
    assert wrap in train
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


WAIT = """\
import pathlib, time
print("started")
while not pathlib.Path("continue").exists():
    time.sleep(0.1)
print("continued")
"""


@pytest.mark.slow
@pytest.mark.parametrize("survives", [True, False])
def test_torchrun_under_nohup_survives_its_terminal_without_its_own_sighup(tmp_path, survives):
    """As docs/launching.md says of a shared server."""
    (tmp_path / "wait.py").write_text(WAIT)
    torchrun = [sys.executable, *TORCHRUN, "--standalone"]
    torchrun += ["--signals-to-handle=SIGTERM,SIGINT"] if survives else []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(["nohup", *torchrun, "wait.py"], cwd=tmp_path, **pipes)
    lines = ""
    while lines.count("started") < 2:  # of both processes; two lines may arrive as one
        lines += read_until(process, "started")
    process.send_signal(signal.SIGHUP)
    if survives:
        (tmp_path / "continue").touch()
        code, out, err = finished(process)
        assert code == 0 and out.count("continued") == 2, err
    else:
        code, _, err = finished(process)
        assert code == 1 and re.search(r"SignalException: Process \d+ got signal: 1", err), err


STUCK = """\
import time, torch
import torch.distributed as dist
from distributed import cleaned_up, setup_distributed

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
@pytest.mark.parametrize("launcher", LAUNCH)
def test_a_mistake_is_one_line_from_every_process(launcher, tmp_path):
    """A mistake is a line from every process and no traceback of ours."""
    code, out, err = finished(
        start(*LAUNCH[launcher], "--dataset", "folder", "--data-dir", tmp_path)
    )
    script = LAUNCH[launcher][-1 if launcher == "torchrun" else 0]
    line = f"{script}: error: --data-dir {tmp_path} has no train/"
    assert code in (1, 2) and 1 <= err.count(line) <= 2 and out == ""
    assert "UserError" not in err


def test_03_without_torchrun_says_how_to_start_it(small_folder):
    code, _, err = finished(start("03_mnmc_ddp_launch.py"))
    assert code == 2 and len(err.splitlines()) == 1
    assert (
        "RANK is not set: expected torchrun to set it; torchrun --nproc-per-node=2 03_mnmc_ddp"
        in err
    )


def test_05_without_srun_says_how_to_start_it():
    code, _, err = finished(start("05_mnmc_ddp_slurm.py"))
    assert code == 2 and len(err.splitlines()) == 1
    assert (
        "SLURM_PROCID is not set: expected srun to set it; srun --ntasks=2 python 05_mnmc_ddp"
        in err
    )


@pytest.mark.parametrize(
    ("given", "variables", "expected"),
    [
        (
            ["--nodes", 2, "--node-rank", 2],
            {},
            "--node-rank 2 of --nodes 2: expected a node rank from 0 to 1",
        ),
        (
            ["--nodes", 2],
            {},
            "--nodes 2 without --dist-url: expected tcp://HOST:PORT, the machine of --node-rank 0",
        ),
        (["--dist-url", "localhost:1"], {}, "--dist-url localhost:1: expected tcp://HOST:PORT"),
        (
            ["--nproc-per-node", 0],
            {},
            "argument --nproc-per-node: '0' given, expected a whole number of 1 or more",
        ),
        (
            [],
            {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2},
            "WORLD_SIZE=2: a launcher started 2 copies of a script",
        ),
        (
            [],
            {"SLURM_STEP_NUM_TASKS": 2},
            "SLURM_STEP_NUM_TASKS=2: a launcher started 2 copies of a script that",
        ),
        (
            [],
            {"OMPI_COMM_WORLD_SIZE": 2},
            "OMPI_COMM_WORLD_SIZE=2: a launcher started 2 copies of a script that",
        ),
    ],
)
def test_04_refuses_what_cannot_work_before_it_starts_processes(
    run, monkeypatch, given, variables, expected
):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.multiprocessing.spawn", None)
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


@pytest.mark.slow
@pytest.mark.parametrize("script", ["03_mnmc_ddp_launch.py", "04_mnmc_ddp_mp.py"])
def test_two_hosts_train_by_the_command_of_the_docstring(hosts, script, small_folder):
    """Two hosts train together by the command of the docstring."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    second = hosts.popen(1, *command_of(script, 1, small_folder), env=env)
    first = hosts.popen(0, *command_of(script, 0, small_folder), env=env)
    for process in (first, second):
        code, out, err = finished(process)
        assert code == 0, err
        assert ("world size 4 (2 on this machine)" in out) == (process is first)
        assert ("done: test accuracy" in out) == (process is first)
        lines = re.findall(r"ranks (.+) on (\w+): cpu \(.+, 1 CPU thread each\)", out)
        assert lines == ([("0-1", "host1"), ("2-3", "host2")] if process is first else [])


@pytest.mark.slow
def test_a_host_that_dies_ends_the_other(hosts, small_folder):
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    script = "04_mnmc_ddp_mp.py"
    first, second = (
        hosts.popen(k, *command_of(script, k, small_folder), *map(str, FOREVER), env=env)
        for k in (0, 1)
    )
    read_until(first, "== test: [1/")
    hosts.kill(1)
    code, _, err = finished(first)
    assert code == 1 and "04_mnmc_ddp_mp.py: error: lost another rank (" in err
    second.wait(300)
