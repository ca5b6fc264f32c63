"""The errors that docs/troubleshooting.md quotes are those that are printed today: those of one
process are provoked here.

A block of an entry is what a user would find in a terminal; … in it stands for anything.
"""

import argparse
import functools
import logging
import os
import re
import runpy
import signal
import sys
import traceback
from datetime import timedelta
from types import SimpleNamespace

import nbclient
import nbformat
import pytest
import torch
import torch.distributed as dist
from launchers import meet, slurm_step, torchrun
from processes import ROOT, start
from ranks import Ranks
from torch import nn
from torch.utils.data import WeightedRandomSampler

from common.machine import free_port
from common.setup_distributed import meet as meet_others
from common.setup_distributed import setup_device
from ddp.flags import parse_spawn_args
from imagenet.checks import check_restarts
from launch.checks.starting import check_start, open_store

PAGE = ROOT / "docs/troubleshooting.md"
SHORT = timedelta(seconds=1)
NOT_HERE = "Not provoked:"
# The lines that this project prints, whatever version of torch is installed
OURS = re.compile(
    r"LaunchError: |UserError: |torchrun was started without |found: |(?:…|\S+\.py): error: "
)


def read_entries(text):
    """{number: entry}, each with its text, and with the quotes that must be provoked."""
    parts = re.split(r"^### (\d+)\. .*\n", text, flags=re.M)
    entries = {}
    for number, body in zip(parts[1::2], parts[2::2], strict=True):
        body = body.split("\n## ")[0]
        quotes = re.findall(r"^```text\n(.*?)^```\n(?=\s*(\S[^\n]*|\Z))", body, re.M | re.S)
        provoked = [quote for quote, after in quotes if not after.startswith(NOT_HERE)]
        entries[int(number)] = SimpleNamespace(body=body, provoked=provoked)
    return entries


ENTRIES = read_entries(PAGE.read_text())


def pattern(quote):
    """A quote as a regular expression for text on one line; … stands for at most a thousand
    characters.
    """
    return re.compile(re.escape(one_line(quote)).replace("…", ".{0,1000}?").replace(r"\ ", " "))


def one_line(text):
    return " ".join(text.replace("\0", "").split())


def missing_quotes(quotes, printed):
    return [quote for quote in quotes if not pattern(quote).search(one_line(printed))]


PROVOKED = set()  # the entries that a test provokes


def version(text):
    return tuple(map(int, re.search(r"\d+\.\d+", text)[0].split(".")))


def other_version():
    """Why what torch prints here may differ from the page, or None."""
    if version(torch.__version__) < version(PAGE.read_text()):
        # one that is newer than the page must be compared
        return "the page quotes a newer PyTorch"
    return None


def assert_quoted(printed, *numbers):
    """All that these entries quote is printed. If the page quotes a newer torch, its words may
    differ, but not those of this project.
    """
    quotes = [quote for number in numbers for quote in ENTRIES[number].provoked]
    missing = missing_quotes(quotes, printed)
    if missing and (reason := other_version()):
        lines = "".join(quotes).splitlines()
        assert missing_quotes([line for line in lines if OURS.match(line)], printed) == [], printed
        pytest.skip(reason)
    assert missing == [], printed


def provokes(*numbers):
    """A decorator for a test that returns what was printed: what these entries quote is in it."""
    PROVOKED.update(numbers)

    def decorate(test):
        @functools.wraps(test)
        def compare(*args, **kwargs):
            assert_quoted(test(*args, **kwargs), *numbers)

        return compare

    return decorate


def raised(*functions):
    """What Python prints of the exceptions of these functions."""
    text = ""
    for function in functions:
        with pytest.raises(BaseException) as caught:
            function()
        text += "".join(traceback.format_exception(caught.value))
    return text


def test_every_entry_is_provoked_or_says_why_not():
    wrong = []
    for number, entry in ENTRIES.items():
        says_why_not = NOT_HERE in entry.body or "**provoked**" in entry.body
        names_a_test = re.search(r"`test_\w+`", entry.body)
        if bool(entry.provoked) != (number in PROVOKED):
            wrong.append(f"entry {number}: its quotes are not provoked")
        elif not (entry.provoked or says_why_not or names_a_test):
            wrong.append(f"entry {number}: it quotes nothing, and does not say why")
    assert wrong == []


# With several processes: quoted with the commit that provoked them
PROVOKED.update({1, 2, 5, 7, 8, 17, 19, 20, 22, 23, 25, 30, 40, 71, 72, 74, 80, 82, 86})
# With fully_shard, likewise
PROVOKED.update({59, 60, 61, 62, 63, 64, 66, 67, 68, 88, 89})


def need_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")


# What has to be a process of its own


@pytest.mark.slow
@provokes(29)
def test_ctrl_c_ends_torchrun_with_a_traceback_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    torchrun = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
    process = start(*torchrun, tmp_path / "train.py")
    assert process.stdout.readline() == "here\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    err = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    return err


SPAWN_IN_A_CELL = """
import torch.multiprocessing as mp

def train(rank):
    pass

mp.spawn(train, nprocs=2)
"""
POOL_IN_A_CELL = """
with mp.get_context("spawn").Pool(2) as pool:
    pool.map_async(train, range(2)).get(timeout=6)
"""


@pytest.mark.slow
@provokes(50)
def test_a_function_of_a_notebook_cannot_be_spawned():
    sources = (SPAWN_IN_A_CELL, POOL_IN_A_CELL)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    nbclient.NotebookClient(notebook, timeout=120, allow_errors=True).execute()
    errors = [cell.outputs[-1] for cell in notebook.cells]
    assert [error.ename for error in errors] == ["ProcessExitedException", "TimeoutError"]
    texts = [output.get("text", "") for output in notebook.cells[0].outputs]
    return "".join(texts) + f"{errors[0].ename}: {errors[0].evalue}"


# Two mistakes that no message of PyTorch reports
DIFFERENT_RANKS = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
net = nn.Linear(4, 1)
ddp = DistributedDataParallel(net)
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for _ in range(10):
    loss = net(torch.randn(8, 4)).square().mean()  # not ddp
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step(loss.item())  # of this rank
dist.destroy_process_group()
"""


@provokes(70)
def test_weights_and_learning_rates_that_differ_are_found(tmp_path):
    """With the causes: the model inside of the DDP is called, the scheduler gets its own loss."""
    script = tmp_path / "train.py"
    script.write_text(DIFFERENT_RANKS)
    ranks = Ranks(tmp_path, 2, [], script=script)
    assert ranks.wait(120) == [0, 0] and not ranks.output() + ranks.output(1)
    ranks = Ranks(tmp_path, 2, [script], script="launch/check_ranks.py")
    assert ranks.wait(120)[0] == 1
    found = ranks.output().replace(f"{tmp_path}/", "")
    causes = ["No forward pass of a DistributedDataParallel in training: at train.py:…"]
    causes += ["ReduceLROnPlateau.step() got … on rank 0, … on rank 1 at train.py:…"]
    assert missing_quotes(causes, found) == []
    return found


# What this process can do alone


@provokes(3)
def test_a_script_that_spawns_is_refused_in_a_step_of_tasks(environment, monkeypatch, capsys):
    environment(SLURM_STEP_NUM_TASKS=2)
    monkeypatch.setattr(sys, "argv", ["04_mnmc_ddp_mp.py"])
    with pytest.raises(SystemExit):
        parse_spawn_args("04")
    return capsys.readouterr().err


@provokes(4)
def test_a_world_larger_than_its_processes_ends_in_a_timeout():
    url = f"tcp://127.0.0.1:{free_port()}"
    plain = functools.partial(
        dist.init_process_group, "gloo", init_method=url, rank=0, world_size=2, timeout=SHORT
    )
    return raised(plain, lambda: meet_others("127.0.0.1", free_port(), 0, 2, SHORT))


@provokes(44)
def test_two_torchruns_on_a_machine_are_refused(environment):
    environment(**torchrun(), **slurm_step(tasks=4) | {"SLURM_STEP_NUM_NODES": 2})
    return raised(lambda: check_start("torchrun"))


@provokes(45)
def test_a_rank_that_is_there_twice_is_named_with_the_way_out():
    return "\n".join(f"LaunchError: {result}" for result in meet(3, [0, 1, 1], timeout=2))


@provokes(6)
def test_a_taken_port_is_an_error_of_torch_and_a_hint_of_ours():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    url = f"tcp://127.0.0.1:{store.port}"
    plain = functools.partial(
        dist.init_process_group, "gloo", init_method=url, rank=0, world_size=2, timeout=SHORT
    )
    return raised(plain, lambda: open_store("127.0.0.1", store.port, 0, 2, SHORT))


@provokes(9)
def test_more_processes_than_gpus_are_refused_by_name(environment, gpus, monkeypatch):
    environment(TORCHELASTIC_RUN_ID="none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus(1)
    return raised(lambda: setup_device(1, 2))


@provokes(15)
def test_a_checkpoint_of_a_gpu_is_loaded_where_it_was(tmp_path, monkeypatch):
    need_no_gpu()
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    assert torch.load(tmp_path / "weights.pt", map_location="cpu")["weight"].device == torch.device(
        "cpu"
    )
    return raised(lambda: torch.load(tmp_path / "weights.pt"))


def test_shares_of_a_weighted_draw_are_one_draw():
    """A WeightedRandomSampler per rank draws as many images as the data set has, each time."""
    weights = torch.tensor([0.0] + 9 * [1.0])
    torch.manual_seed(0)
    one = list(WeightedRandomSampler(weights, len(weights)))
    torch.manual_seed(0)
    assert one == list(WeightedRandomSampler(weights, len(weights))) and len(one) == 10
    (code,) = re.findall(r"^```python\n(.*?)^```", ENTRIES[77].body, re.M | re.S)
    names = {}
    exec(code, names)
    for world_size in (2, 3):
        shares = [names["share"](weights, 5, rank, world_size) for rank in range(world_size)]
        assert {len(part) for part in shares} == {10 // world_size}
        whole = names["share"](weights, 5, 0, 1)
        together = [index for indices in zip(*shares, strict=True) for index in indices]
        assert together == whole[: len(together)] and 0 not in whole
    assert names["share"](weights, 6, 0, 1) != whole, "another epoch, another draw"


@provokes(16)
def test_restarts_without_resume_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    return raised(lambda: check_restarts(None, resume=False))


@provokes(35)
def test_restarts_that_share_a_store_are_warned_of(monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with caplog.at_level(logging.WARNING):
        for machines in ("1", "2"):
            assert not caplog.text, "on one machine, restarts work"
            monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
            check_restarts(SimpleNamespace(is_main=True), resume=True)
    return caplog.text


def load_more_than_plain_types(folder):
    torch.save({"args": argparse.Namespace(lr=0.1)}, folder / "checkpoint.pt")
    torch.load(folder / "checkpoint.pt")


def load_a_wrappers_weights():
    nn.Linear(1, 1).load_state_dict(nn.DataParallel(nn.Linear(1, 1)).state_dict())


@provokes(27)
def test_a_checkpoint_of_more_than_plain_types_is_refused(tmp_path):
    return raised(lambda: load_more_than_plain_types(tmp_path), load_a_wrappers_weights)


@provokes(28)
def test_half_a_checkpoint_is_no_zip_archive(tmp_path):
    whole, half = tmp_path / "whole.pt", tmp_path / "half.pt"
    torch.save(nn.Linear(300, 300).state_dict(), whole)
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    return raised(lambda: torch.load(half))


@provokes(31)
def test_variables_that_count_machines_are_no_ranks(environment, gpus):
    environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="job-0", MASTER_PORT=23456)
    gpus(8)
    return raised(lambda: int(os.environ["LOCAL_RANK"]), lambda: setup_device(0, 1))


@provokes(39)
def test_a_script_for_torchrun_says_so_under_plain_python(environment, monkeypatch, capfd):
    environment()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["03_mnmc_ddp_launch.py"])
    text = raised(
        lambda: dist.init_process_group("gloo"),
        lambda: runpy.run_path("03_mnmc_ddp_launch.py", run_name="__main__"),
    )
    return text + capfd.readouterr().err


@provokes(42)
def test_a_name_that_does_not_resolve_is_named():
    url = "tcp://no-such-host.invalid:29500"
    plain = functools.partial(
        dist.init_process_group, "gloo", init_method=url, rank=1, world_size=2, timeout=SHORT
    )
    return raised(plain, lambda: meet_others("no-such-host.invalid", 29500, 1, 2, SHORT))


# Slurm


@pytest.mark.slow
def test_a_job_runs_the_code_of_its_folder_when_it_starts(slurm, tmp_path):
    """But its batch file is as it was submitted."""
    (tmp_path / "train.py").write_text("print('old train.py')\n")
    file = tmp_path / "job.sbatch"
    file.write_text("#!/bin/bash\necho old batch file\npython train.py\n")
    job = slurm.sbatch(file, options=["--hold", f"--chdir={tmp_path}"])
    (tmp_path / "train.py").write_text("print('new train.py')\n")
    file.write_text("#!/bin/bash\necho new batch file\n")
    slurm.run("scontrol", "release", job)
    assert slurm.wait(job) == ("COMPLETED", 0)
    assert slurm.output(job) == "old batch file\nnew train.py\n"
