"""The errors that docs/troubleshooting.md quotes are those that are printed today: most are
provoked here.

A block of an entry is what a user would find in a terminal; … in it stands for anything.
"""

import argparse
import contextlib
import functools
import logging
import mmap
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import nbclient
import nbformat
import pytest
import slurm_errors
import torch
import torch.distributed as dist
from launchers import meet, slurm_step, torchrun
from needs import need
from processes import ROOT, start
from ranks import Ranks
from torch import nn
from torch.utils.data import DistributedSampler
from torchvision.transforms import v2

from common.ddp_flags import parse_spawn_args
from common.distributed import Address, free_port, rendezvous, setup_device, setup_distributed
from imagenet.launch_checks import check_restarts
from tools.lab import hosts as hosts_module
from tools.lab import slurm_cluster

PAGE = ROOT / "docs/troubleshooting.md"
# those that users report, in the order of how much they bite; there may be more entries
CASES = range(1, 34)
SHORT = timedelta(seconds=1)
NOT_HERE = "Not provoked here:"


def read_entries(text):
    """{number: entry}, each with its title, its text, and its quotes: those that must be provoked,
    and the others.
    """
    parts = re.split(r"^### (\d+)\. (.*)\n", text, flags=re.M)
    entries = {}
    for number, title, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        body = body.split("\n## ")[0]
        quotes = re.findall(r"^```text\n(.*?)^```\n(?=\s*(\S[^\n]*))", body, re.M | re.S)
        assert int(number) not in entries, f"entry {number} is there twice"
        entries[int(number)] = SimpleNamespace(
            title=title,
            body=body,
            provoked=[quote for quote, after in quotes if not after.startswith(NOT_HERE)],
            others=[(quote, after) for quote, after in quotes if after.startswith(NOT_HERE)],
        )
    return entries


ENTRIES = read_entries(PAGE.read_text()) if PAGE.exists() else {}
SHARDED = PAGE.read_text().partition("\n## Sharded models\n")[2] if PAGE.exists() else ""


def pattern(quote):
    """A quote as a regular expression for text on one line; … stands for at most a thousand
    characters.
    """
    return re.compile(re.escape(one_line(quote)).replace("…", ".{0,1000}?").replace(r"\ ", " "))


def one_line(text):
    return " ".join(text.replace("\0", "").split())


def missing_quotes(entry, printed):
    return [quote for quote in entry.provoked if not pattern(quote).search(one_line(printed))]


PROVOKED = {}  # entry: the tests that provoke it


def version(text):
    return tuple(map(int, re.search(r"\d+\.\d+", text)[0].split(".")))


def other_version(program):
    """Why what this program prints here may differ from the page, or None."""
    if program == "slurm":
        release = re.search(r"\d+\.\d+", subprocess.getoutput("srun --version"))
        if release and f"Slurm {release[0]}" not in PAGE.read_text():
            return f"the page does not quote Slurm {release[0]}"
    elif program == "fully_shard":
        if version(torch.__version__) < version(SHARDED):
            return "this part of the page quotes a newer PyTorch"
    elif version(torch.__version__) < version(PAGE.read_text()):
        # one that is newer than the page must be compared
        return "the page quotes a newer PyTorch"
    return None


def provokes(*numbers, program="torch"):
    """A decorator for a test that returns what was printed: all that these entries quote must be in
    it.
    """

    def decorate(test):
        for number in numbers:
            PROVOKED.setdefault(number, []).append(test.__name__)

        @functools.wraps(test)
        def compare(*args, **kwargs):
            printed = test(*args, **kwargs)
            if reason := other_version(program):
                pytest.skip(reason)
            for number in numbers:
                entry = ENTRIES[number]
                assert entry.provoked, f"entry {number} quotes nothing that could be provoked"
                assert missing_quotes(entry, printed) == [], printed

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


# The page


@pytest.mark.slow
def test_every_entry_is_provoked_or_says_why_not():
    """Every case has an entry that is provoked or says why not."""
    assert set(CASES) <= set(ENTRIES)
    for number, entry in ENTRIES.items():
        assert bool(entry.provoked) == (number in PROVOKED), f"entry {number}"
        says_why_not = NOT_HERE in entry.body
        names_a_test = re.search(r"`test_\w+`", entry.body)
        assert entry.provoked or says_why_not or names_a_test, f"entry {number}"
        assert "In this project: " in one_line(entry.body), f"entry {number}"


@pytest.mark.slow
def test_every_entry_names_tests_that_exist():
    """Every test that an entry names exists and every provoked entry names its own."""
    exist = set(
        re.findall(
            r"^def (test_\w+)", "".join(p.read_text() for p in ROOT.glob("tests/*/test_*.py")), re.M
        )
    )
    for number, entry in ENTRIES.items():
        named = set(re.findall(r"`(test_\w+)`", entry.body))
        assert named <= exist, f"entry {number}"
        assert set(PROVOKED.get(number, [])) <= named, f"entry {number}"


def test_the_index_leads_to_every_entry():
    index = PAGE.read_text().partition("## Find it by what you see")[2].partition("\n## ")[0]
    assert {int(n) for n in re.findall(r"\| \[(\d+)\]\(#\1-", index)} == set(ENTRIES)


def test_a_text_that_needs_a_gpu_is_in_an_installed_library():
    """Its fixed parts, at least, as they stand in the code."""
    site = Path(torch.__file__).parent
    files = [
        *site.glob("lib/libtorch_cuda.so"),
        *site.parent.glob("nvidia/nccl/lib/libnccl.so.2"),
        *site.parent.glob("nvidia/*/lib/libcudart.so.*"),
    ]
    if len(files) < 3:
        pytest.skip("this PyTorch was built without CUDA")
    if torch.__version__ < (2, 15):
        pytest.skip("the page quotes the texts of torch 2.15")
    parts = set()
    for entry in ENTRIES.values():
        for quote, after in entry.others:
            if "needs a GPU" in after:
                parts |= {
                    part.strip().encode()
                    for part in re.split("[…(),:]", one_line(quote))
                    if len(part) > 4
                }
    assert len(parts) > 8
    for file in files:
        with (
            file.open("rb") as code,
            mmap.mmap(code.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            parts -= {part for part in parts if content.find(part) >= 0}
    assert parts == set()


def test_a_quote_that_is_not_printed_would_be_noticed():
    for number, right, wrong in (
        (7, "address for: eth9", "address of: eth9"),
        (20, "prior iteration", "last iteration"),
    ):
        entry = read_entries(PAGE.read_text().replace(right, wrong))[number]
        printed = "\n".join(ENTRIES[number].provoked)
        assert missing_quotes(ENTRIES[number], printed) == []
        assert len(missing_quotes(entry, printed)) == 1


# What takes several processes: tests/helpers/provoke.py makes all mistakes of a kind in one run


def sections(text):
    """What was printed of each mistake, by its name."""
    parts = re.split(r"^== (.*)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def provoked(tmp_path_factory):
    """What two ranks print, and what torchrun prints: {name of a mistake: text}."""
    folder = tmp_path_factory.mktemp("provoked")
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {
        "PYTHONPATH": str(ROOT)
    }
    options = {
        "cwd": ROOT,
        "env": env,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    two = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--log-dir={folder}"]
    two += ["--redirects=3"]
    two.append(f"--master-port={free_port()}")  # torchrun of torch 2.9 would take 29500 for both
    ranks = subprocess.Popen(
        [sys.executable, *two, "tests/helpers/provoke.py"], start_new_session=True, **options
    )
    other = subprocess.Popen(
        [sys.executable, "tests/helpers/provoke.py", "launchers"], start_new_session=True, **options
    )
    try:
        said, printed = ranks.communicate(timeout=300)[0], other.communicate(timeout=300)[0]
    finally:
        for process in (ranks, other):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert ranks.returncode == 0, said
    texts = sections(printed)
    for log in sorted(folder.glob("*/attempt_0/*/stderr.log")):
        for name, text in sections(log.read_text()).items():
            texts[name] = texts.get(name, "") + text
    return texts


@pytest.mark.slow
@provokes(1)
def test_a_missing_rank_is_reported_by_those_that_wait(provoked):
    """A rank that does not come is reported by those that wait."""
    return provoked["a rank does not come"]


@pytest.mark.slow
@provokes(2)
def test_different_collectives_are_told_by_the_debug_level(provoked):
    """Collectives that differ are told apart by the debug level."""
    return provoked["rank 0 alone evaluates"]


@pytest.mark.slow
@provokes(5, 8, 19, 23, 36)
def test_torchrun_says_what_is_wrong_with_a_job(provoked):
    assert provoked["a job that ends"] == "work\n"
    names = ["failed", "failed and recorded", "killed", "two processes", "torch.distributed.launch"]
    return "\n".join(
        provoked[name] for name in [*names, "the same job again", "nobody keeps the store"]
    )


@pytest.mark.slow
def test_a_local_count_over_the_global_size_is_half_the_accuracy(provoked):
    """A local count over the global size is half the accuracy on two ranks."""
    text = provoked["local over global"]
    assert (
        text.count("accuracy of rank") == 2
        and text.count(": 45%") == 2
        and text.count("accuracy: 90%") == 2
    )


@pytest.mark.slow
@provokes(17)
def test_a_rank_that_dies_is_noticed_by_the_others(provoked):
    return provoked["a rank dies"]


@pytest.mark.slow
@provokes(20)
def test_a_parameter_without_a_gradient_stops_ddp(provoked):
    return provoked["no gradient"]


@pytest.mark.slow
@provokes(21)
def test_uneven_batches_end_in_a_timeout(provoked):
    return provoked["uneven batches"]


@pytest.mark.slow
@provokes(22)
def test_torchs_synchronised_batch_norm_refuses_cpus(provoked):
    return provoked["SyncBatchNorm in DDP"] + provoked["SyncBatchNorm"]


@pytest.mark.slow
@provokes(34)
def test_a_monitored_barrier_names_the_rank_that_does_not_come(provoked):
    return provoked["monitored barrier"]


@pytest.mark.slow
@provokes(40)
def test_nccl_without_a_gpu_is_refused(provoked, environment):
    need_no_gpu()
    plain = functools.partial(
        dist.init_process_group, "nccl", store=dist.HashStore(), rank=0, world_size=1
    )
    return provoked["no GPU to count"] + raised(plain, lambda: setup_distributed(backend="nccl"))


def need_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")


# What has to be a process of its own


@pytest.mark.slow
@provokes(7)
def test_a_host_whose_name_is_loopback_is_not_reached(monkeypatch):
    need(hosts_module.missing())
    with hosts_module.Hosts() as two:
        # As Debian writes it for the machine's own name; each of the two takes it for itself.
        Path(two.folder.name, "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 host1 host2\n")
        command = ["python", "tests/helpers/provoke.py", "join", two.addresses[0]]
        variables = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}
        ranks = [
            two.popen(k, *command, k, variables=variables, stderr=subprocess.STDOUT) for k in (0, 1)
        ]
        deadline = time.monotonic() + 90
        while all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        two.kill(0)  # one of them has been refused, and ended; the other waits longer
        two.kill(1)
        printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    return "".join(printed) + missing_interface(monkeypatch)


def missing_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    return raised(
        lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    )


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_named(monkeypatch):
    assert "Unable to find address for: eth9" in missing_interface(monkeypatch)


@pytest.mark.slow
@provokes(25)
def test_a_small_shared_memory_kills_loader_workers():
    need(hosts_module.missing())
    small = 'mount -t tmpfs -o size=1M tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh"]
    command += ["-c", small, "sh", sys.executable, "tests/helpers/provoke.py", "shared-memory"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    return done.stderr


@pytest.mark.slow
@provokes(29)
def test_ctrl_c_ends_torchrun_with_a_traceback_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    process = start(
        "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", tmp_path / "train.py"
    )
    assert process.stdout.readline() == "here\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    err = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    return err


def without_a_main_guard(folder):
    text = (
        "import "
        "multiprocessing\nmultiprocessing.get_context('spawn').Process(target=print).start()\n"
    )
    (folder / "train.py").write_text(text)
    return subprocess.run(
        [sys.executable, folder / "train.py"], capture_output=True, text=True, timeout=300
    ).stderr


def spawn_a_local_function():
    def train(rank):
        pass

    torch.multiprocessing.spawn(train, nprocs=1)


@pytest.mark.slow
@provokes(30)
def test_what_cannot_be_spawned_or_forked_says_so(provoked, tmp_path):
    return (
        raised(spawn_a_local_function)
        + provoked["CUDA in a forked process"]
        + without_a_main_guard(tmp_path)
    )


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


# What this process can do alone


@provokes(3)
def test_a_script_that_spawns_is_refused_in_a_step_of_tasks(environment, monkeypatch, capsys):
    """A script that spawns is refused in a step of several tasks."""
    environment(SLURM_STEP_NUM_TASKS=2)
    monkeypatch.setattr(sys, "argv", ["04_mnmc_ddp_mp.py"])
    with pytest.raises(SystemExit):
        parse_spawn_args("04")
    return capsys.readouterr().err


@provokes(4)
def test_a_world_larger_than_its_processes_ends_in_a_timeout(quick):
    url = f"tcp://127.0.0.1:{free_port()}"
    plain = functools.partial(
        dist.init_process_group, "gloo", init_method=url, rank=0, world_size=2, timeout=SHORT
    )
    return raised(plain, lambda: rendezvous(Address("127.0.0.1", free_port(), ""), 0, 2, SHORT))


@provokes(44)
def test_two_torchruns_on_a_machine_are_refused(environment):
    environment(**torchrun(), **slurm_step(tasks=4) | {"SLURM_STEP_NUM_NODES": 2})
    return raised(setup_distributed)


@provokes(45)
def test_a_rank_that_is_there_twice_is_named_with_the_way_out():
    return "\n".join(f"LaunchError: {result}" for result in meet(3, [0, 1, 1]))


@provokes(6)
def test_a_taken_port_is_an_error_of_torch_and_a_hint_of_ours():
    """A port that is taken is an error of torch and a hint of ours."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    url = f"tcp://127.0.0.1:{store.port}"
    plain = functools.partial(
        dist.init_process_group, "gloo", init_method=url, rank=0, world_size=2, timeout=SHORT
    )
    return raised(plain, lambda: rendezvous(Address("127.0.0.1", store.port, ""), 0, 2, SHORT))


@provokes(9)
def test_more_processes_than_gpus_are_refused_by_name(environment, gpus, monkeypatch):
    environment(TORCHELASTIC_RUN_ID="none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus(1)
    return raised(lambda: setup_device(1, 2))


@provokes(15)
def test_a_checkpoint_of_a_gpu_is_loaded_where_it_was(tmp_path, monkeypatch):
    """A checkpoint of a gpu is loaded where it was unless told otherwise."""
    need_no_gpu()
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    assert torch.load(tmp_path / "weights.pt", map_location="cpu")["weight"].device == torch.device(
        "cpu"
    )
    return raised(lambda: torch.load(tmp_path / "weights.pt"))


@provokes(16)
def test_restarts_without_resume_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    return raised(lambda: check_restarts(None, resume=False))


@provokes(35)
def test_restarts_that_share_a_store_are_warned_of(monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with caplog.at_level(logging.WARNING):
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


def test_a_wrapper_prefixes_the_names_of_weights():
    state = nn.DataParallel(nn.Linear(1, 1)).state_dict()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    nn.Linear(1, 1).load_state_dict(state)
    assert "module.weight" in raised(load_a_wrappers_weights)


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
    return raised(lambda: int(os.environ["LOCAL_RANK"]), setup_distributed)


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


@provokes(41)
def test_a_device_id_needs_an_index():
    options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    return raised(lambda: dist.init_process_group("gloo", **options, device_id=torch.device("cpu")))


@provokes(42)
def test_a_name_that_does_not_resolve_is_named(quick):
    url = "tcp://no-such-host.invalid:29500"
    plain = functools.partial(
        dist.init_process_group, "gloo", init_method=url, rank=1, world_size=2, timeout=SHORT
    )
    return raised(
        plain, lambda: rendezvous(Address("no-such-host.invalid", 29500, ""), 1, 2, 9 * SHORT)
    )


# What Slurm says


def reasons(number):
    """The reasons in the table of an entry."""
    cells = re.findall(r"^\| (`[^|]*`) \|", ENTRIES[number].body, re.M)
    return [reason.strip("`") for cell in cells for reason in cell.split("`, `")]


def assert_all_reasons(number, text):
    assert len(reasons(number)) > 5
    absent = [reason for reason in reasons(number) if not pattern(reason).search(one_line(text))]
    assert absent == [], text


@pytest.mark.slow
@provokes(51, program="slurm")
def test_slurm_says_why_it_refuses_a_job():
    need(slurm_cluster.missing())
    text = slurm_errors.provoke(slurm_errors.Strict, [slurm_errors.refused])
    assert_all_reasons(51, text)
    assert "srun: error: Unable to allocate resources: Invalid partition name specified" in text
    return text


@pytest.mark.slow
def test_slurm_says_why_a_job_waits():
    need(slurm_cluster.missing())
    text = slurm_errors.provoke(slurm_errors.Lenient, [slurm_errors.pending])
    if not other_version("slurm"):
        assert_all_reasons(52, text)
        assert "GPU 3 fell off the b" in text, "sinfo -R says why a node is drained"


@pytest.mark.slow
@provokes(53, 55, program="slurm")
def test_slurm_says_why_it_starts_no_step_and_requeues_no_job():
    """And which GPUs steps get that run side by side: docs/slurm.md says it."""
    need(slurm_cluster.missing())
    mistakes = [slurm_errors.not_again, slurm_errors.steps]
    text = slurm_errors.provoke(slurm_errors.Strict, mistakes)
    both, one_each = text.split("--gpus=1:")[1].split("--gpus-per-node=1:")
    assert sorted(re.findall("has GPU (.*)", both)) == ["0,1", "0,1"]
    assert sorted(re.findall("has GPU (.*)", one_each)) == ["0", "1"]
    return text


@pytest.mark.slow
@provokes(54, program="slurm")
def test_slurm_ends_a_job_at_its_limits():
    need(slurm_cluster.missing())
    if not slurm_errors.MEMORY.is_dir():
        pytest.skip("needs cgroups of version 1, with memory")
    mistakes = [slurm_errors.out_of_memory, slurm_errors.time_limit]
    return slurm_errors.provoke(slurm_errors.Confined, mistakes)


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


# What fully_shard prints or does: tests/helpers/provoke_sharded.py makes all mistakes in one run

PROVOKE_SHARDED = "tests/helpers/provoke_sharded.py"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What two ranks print, rank 0 first: {name of a mistake: text}. No remedy has an error."""
    folder = tmp_path_factory.mktemp("sharded")
    ranks = Ranks(folder, 2, [folder], script=PROVOKE_SHARDED)
    assert ranks.wait() == [0, 0], ranks.output(0) + ranks.output(1)
    texts = {}
    for rank in range(2):
        for name, text in sections(ranks.output(rank)).items():
            texts[name] = texts.get(name, "") + text
    for name, text in texts.items():
        assert not (name.startswith("remedy: ") and "Traceback" in text), f"{name}: {text}"
    return texts


def numbers(text, name):
    """The numbers with this name that ranks 0 and 1 printed, half of them each."""
    found = [float(number) for number in re.findall(rf"^{name}: (\S+)$", text, re.M)]
    assert found and len(found) % 2 == 0, text
    return found


def test_the_code_of_an_entry_about_shards_is_run():
    """Calls that the page shows are in the helper; so are the parts of titles, or in a quote."""
    code = "".join((ROOT / PROVOKE_SHARDED).read_text().split()).replace(",)", ")")
    entries = read_entries(SHARDED)
    assert len(entries) == 10
    for number, entry in entries.items():
        calls = re.findall(r"(?<!`)`(\w[\w.]*\([^`]+\))`", entry.body)
        assert [call for call in calls if "".join(call.split()) not in code] == [], number
        for part in re.findall(r"(?<!`)`([^`]+)`", entry.title):
            quoted = any(pattern(part).search(one_line(quote)) for quote in entry.provoked)
            assert quoted or part in code, f"entry {number}: {part}"


@pytest.mark.slow
@provokes(59, program="fully_shard")
def test_an_optimizer_made_before_fully_shard_trains_nothing(sharded):
    text = sharded["the optimizer before fully_shard"]
    assert numbers(text, "change of the weights") == [0, 0]
    assert len(set(numbers(text, "loss"))) == 2  # one per rank, in all training steps
    remedy = sharded["remedy: the optimizer after fully_shard"]
    assert min(numbers(remedy, "change of the weights")) > 0.1
    assert len(set(numbers(remedy, "loss"))) == 6
    return text


@pytest.mark.slow
@provokes(60, program="fully_shard")
def test_what_rank_0_does_alone_with_shards_ends_in_a_timeout(sharded):
    """Each of these calls prints the quote; what needs no other rank prints nothing of it."""
    names = ["a forward pass", "dcp.save", "get_model_state_dict"]
    names = [f"{name} on rank 0 alone" for name in names] + ["one forward pass more on rank 0"]
    if not other_version("fully_shard"):
        for name in names:
            assert missing_quotes(ENTRIES[60], sharded[name]) == [], name
    allowed = sharded["remedy: what rank 0 may do alone"]
    assert "rows of the shard: 4\n" in allowed and "placements=(Shard(dim=0),)" in allowed
    return "".join(sharded[name] for name in names)


@pytest.mark.slow
@provokes(61, program="fully_shard")
def test_only_forward_gathers_the_weights(sharded):
    names = ["model.encode", "model.features of a convolution", "a sharded block before its model"]
    if not other_version("fully_shard"):
        for name in names[:2]:
            assert pattern(ENTRIES[61].provoked[0]).search(one_line(sharded[name])), name
    assert numbers(sharded["remedy: register_fsdp_forward_method"], "difference") == [0, 0]
    return "".join(sharded[name] for name in names)


@pytest.mark.slow
@provokes(62, program="fully_shard")
def test_weights_outside_of_all_groups_drift_apart(sharded):
    text = sharded["no fully_shard of the model"]
    first, second = numbers(text, "sum of the last layer")
    assert abs(first - second) > 0.01
    first, second = numbers(sharded["remedy: fully_shard of the model"], "sum of the last layer")
    assert first == second
    if not other_version("fully_shard"):
        for option in ("foreach", "fused"):
            mixed = one_line(sharded[f"no fully_shard of the model, and {option}"])
            assert pattern(ENTRIES[61].provoked[0]).search(mixed), option
    return text


@pytest.mark.slow
def test_a_model_sharded_as_one_group_is_gathered_as_a_whole(sharded):
    text = sharded["fully_shard of the model alone"]
    assert set(numbers(text, "whole weights")) == {4 * 8 * 8}
    assert set(numbers(text, "sharded modules")) == {1}
    remedy = sharded["remedy: fully_shard of each block"]
    assert set(numbers(remedy, "whole weights")) == {8 * 8}
    assert set(numbers(remedy, "sharded modules")) == {5}


@pytest.mark.slow
@provokes(63, program="fully_shard")
def test_a_file_of_shards_is_not_the_model(sharded):
    copied = sharded["the shards of rank 0 on each rank"]
    assert "Traceback" not in copied and copied.count("equal halves: True") == 2
    assert numbers(copied, "wrong rows") == [4, 4]
    assert numbers(sharded["remedy: the whole weights in a file"], "difference") == [0, 0]
    half = sharded["weights on rank 0 alone"]
    assert "Traceback" not in half and numbers(half, "wrong rows") == [4, 4]
    assert numbers(sharded["remedy: set_model_state_dict"], "difference") == [0, 0]
    assert len(numbers(sharded["remedy: set_optimizer_state_dict"], "loss")) == 2
    unsharded = sharded["a file of shards in an unsharded model"]
    assert "While copying the parameter named" in unsharded
    if not other_version("fully_shard"):
        mixed = one_line(sharded["an unsharded state of the optimizer"])
        assert pattern(ENTRIES[61].provoked[0]).search(mixed)
    return sharded["a file of shards in one process"] + sharded["whole weights in a sharded model"]


@pytest.mark.slow
@provokes(64, program="fully_shard")
def test_tied_weights_in_two_groups_are_no_longer_tied(sharded):
    text = sharded["tied weights in two groups"]
    assert numbers(text, "parameters") == [4, 4]
    for name in ("the group of the model", "one group"):
        remedy = sharded[f"remedy: tied weights in {name}"]
        assert numbers(remedy, "parameters") == [3, 3]
        assert max(numbers(remedy, "difference")) < 1e-5
    return text


@pytest.mark.slow
def test_a_gradient_norm_and_batch_norm_differ_per_rank(sharded):
    first, second = numbers(sharded["the norm of a gradient"], "norm")
    norms = numbers(sharded["remedy: the norm of all shards"], "norm")
    assert norms == pytest.approx([norms[0]] * len(norms))
    assert first**2 + second**2 == pytest.approx(norms[0] ** 2)  # each has a part of the whole
    text, remedy = sharded["batch norm"], sharded["remedy: batch norm"]
    for name in ("running mean", "output"):
        first, second = numbers(text, name)
        assert abs(first - second) > 0.01
        assert numbers(remedy, name) == [first, first]
    saved = numbers(text, "running mean in the file")
    assert saved[0] == saved[1] and saved[0] in numbers(text, "running mean")


@pytest.mark.slow
@provokes(66, program="fully_shard")
def test_a_sharded_model_cannot_be_copied(sharded):
    assert numbers(sharded["remedy: a sharded average"], "average") == pytest.approx([0.1, 0.1])
    if not other_version("fully_shard"):
        assert missing_quotes(ENTRIES[66], sharded["AveragedModel"]) == []
        mixed = one_line(sharded["an unsharded average"])
        assert pattern(ENTRIES[61].provoked[0]).search(mixed)
    return sharded["deepcopy"]


@pytest.mark.slow
@provokes(67, program="fully_shard")
def test_a_sharded_model_on_meta_has_no_memory(sharded):
    assert numbers(sharded["remedy: on meta"], "difference") == [0, 0]
    assert numbers(sharded["remedy: on meta"], "running mean") == [1, 1]
    return sharded["on meta"] + sharded["to() on meta"]


@pytest.mark.slow
@provokes(68, program="fully_shard")
def test_norms_need_the_type_of_their_weights(sharded):
    assert "type: torch.bfloat16" in sharded["remedy: batch norm in float32"]
    assert "type: torch.float32" in sharded["remedy: float32 outputs of the model alone"]
    return sharded["batch norm in bfloat16"] + sharded["float32 between blocks"]


# What is no error, and wrong all the same


def test_distributed_sampler_repeats_images_and_03_does_not():
    """Distributed sampler repeats images and the range of 03 does not."""
    images = range(1003)
    ranks = 64
    padded = [
        i for rank in range(ranks) for i in DistributedSampler(images, ranks, rank, shuffle=False)
    ]
    assert len(padded) == 1024 and len(set(padded)) == 1003
    assert sorted(i for rank in range(ranks) for i in range(rank, len(images), ranks)) == list(
        images
    )


def test_without_set_epoch_every_epoch_has_the_same_order():
    sampler = DistributedSampler(range(100), num_replicas=2, rank=0)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_one_seed_gives_every_rank_the_same_crops():
    def crop(seed):
        torch.manual_seed(seed)
        return v2.RandomCrop(16)(torch.arange(64 * 64).reshape(1, 64, 64))

    assert crop(0).equal(crop(0))  # as two ranks would do it
    assert not crop(2**16).equal(crop(2**16 + 1))  # the seeds of ranks 0 and 1 in 03
