"""Flags that fit no other file of tests: each changes the result as its help promises."""

import contextlib
import datetime
import functools
import gzip
import hashlib
import http.server
import itertools
import json
import math
import os
import re
import runpy
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from imagenet_runs import final, new_folder, parse_06
from images import write_mnist
from launchers import srun
from processes import ROOT
from ranks import Ranks
from rungs import flags as shared_flags
from rungs import parse
from torchvision.datasets import MNIST

from common import data, distributed, folder, models
from common.distributed import Distributed, LaunchError, free_port
from common.flags import output_file
from imagenet import progress
from imagenet.launch_checks import check_launch
from imagenet.sampler import GlobalBatchSampler


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Compute on one core: the models of this file are too small for more."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# 01 to 05


def test_the_flags_of_a_quick_run_act(run, small_folder, tmp_path, monkeypatch):
    cropped, fetched = [], []

    def crop(images, *given, original=data.crop_and_flip):
        cropped.append(len(images))
        return original(images, *given)

    def fetch(self, indices, original=data.MemoryImages.__getitems__):
        fetched.append(len(indices))
        return original(self, indices)

    monkeypatch.setattr(data, "crop_and_flip", crop)
    monkeypatch.setattr(data.MemoryImages, "__getitems__", fetch)
    folder = ["--dataset", "folder", "--data-dir", small_folder]
    log, weights = tmp_path / "log.jsonl", tmp_path / "model.pt"
    given = ["--arch", "small_net", "--limit", 20, "--batch-size", 4, "--epochs", 2]
    given += ["--print-every", 2, "--no-augment", "--log-file", log, "--save", weights]
    end = run("01_snsc.py", *folder, *given)
    assert end.code == 0, end.err
    assert "folder: 20 train and 24 test images" in end.out
    assert "small_net, 0.2 M weights" in end.out
    assert fetched == [4] * (5 + 6) * 2, "training and test, twice"
    steps = re.findall(r"== step: \[ +(\d+)/5\] \[(\d)/2\]", end.out)
    assert steps == [(step, epoch) for epoch in "12" for step in "245"]
    assert cropped == []
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(record["epoch"], record["limit"]) for record in records] == [(1, 20), (2, 20)]
    models.SmallNet(3, 2).load_state_dict(torch.load(weights, weights_only=True))

    end = run("01_snsc.py", *folder, "--arch", "mnist_net")
    assert "folder: 24 train and 24 test images" in end.out
    assert "mnist_net, 1.6 M weights" in end.out
    assert cropped == [24] * 5, "one batch in each of five epochs"
    assert "done: test accuracy" in end.out
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["log.jsonl", "model.pt", "test", "train"], "nothing more"


def test_photographs_have_so_many_workers(run, large_folder, tmp_path, monkeypatch):
    """One process reads the training images, and another the test images."""

    def read_image(path, original=folder.read_image):
        (readers / str(os.getpid())).touch()
        return original(path)

    monkeypatch.setattr(folder, "read_image", read_image)
    given = ["--dataset", "folder", "--data-dir", large_folder, "--arch", "small_net"]
    given += ["--epochs", 1, "--batch-size", 4]
    for workers in (0, 1):
        readers = tmp_path / f"readers{workers}"
        readers.mkdir()
        end = run("01_snsc.py", *given, "--workers", workers)
        assert end.code == 0, end.err
        assert "24 train and 8 test images of 3x224x224, read from files, 2 classes" in end.out
        others = {path.name for path in readers.iterdir()} - {str(os.getpid())}
        assert len(others) == 2 * workers


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A file server that prints nothing."""

    def log_message(self, *_):
        pass


def test_missing_files_are_downloaded_if_asked_for(run, tmp_path, monkeypatch):
    """From a server on this machine, which takes the place of the mirror."""
    write_mnist(tmp_path / "raw", 30)
    (tmp_path / "mirror").mkdir()
    resources = []
    for file in sorted((tmp_path / "raw").iterdir()):
        packed = gzip.compress(file.read_bytes())
        (tmp_path / "mirror" / f"{file.name}.gz").write_bytes(packed)
        resources.append((f"{file.name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(MNIST, "resources", resources)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    given = ["--dataset", "mnist", "--data-dir", tmp_path / "new"]
    given += ["--arch", "mnist_net", "--epochs", 1]
    refused = run("01_snsc.py", *given)
    assert refused.code == 2 and "add --download" in refused.err and not (tmp_path / "new").exists()
    handler = functools.partial(QuietHandler, directory=tmp_path / "mirror")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        end = run("01_snsc.py", *given, "--download")
        server.shutdown()
    assert end.code == 0, end.err
    assert "mnist: 30 train and 30 test images of 1x28x28" in end.out
    assert (tmp_path / "new/MNIST/raw").is_dir()


class Reached(Exception):
    """The process group would be joined now."""


def test_04_starts_its_processes_and_numbers_them_over_machines(run, monkeypatch):
    joined = []

    def spawn(function, args, nprocs):
        for local_rank in range(nprocs):
            with contextlib.suppress(Reached):
                function.__wrapped__(local_rank, *args)

    def join(backend, **given):
        joined.append((given["rank"], given["world_size"], given["init_method"]))
        raise Reached

    monkeypatch.setattr("torch.multiprocessing.spawn", spawn)
    monkeypatch.setattr(dist, "init_process_group", join)
    assert run("04_mnmc_ddp_mp.py", "--nproc-per-node", 3).code == 0
    assert [(rank, world_size) for rank, world_size, _ in joined] == [(0, 3), (1, 3), (2, 3)]
    urls = {url for _, _, url in joined}
    assert len(urls) == 1 and re.fullmatch(r"tcp://127\.0\.0\.1:\d+", urls.pop())
    joined.clear()
    url = "tcp://10.0.0.1:29500"
    given = ["--nodes", 2, "--node-rank", 1, "--nproc-per-node", 3, "--dist-url", url]
    assert run("04_mnmc_ddp_mp.py", *given).code == 0
    assert joined == [(3, 6, url), (4, 6, url), (5, 6, url)]


def test_04_starts_two_processes_or_one_per_gpu(gpus, monkeypatch):
    for count, processes in ((0, 2), (4, 4)):
        gpus(count)
        assert parse(monkeypatch, "04_mnmc_ddp_mp.py").nproc_per_node == processes


def test_05_reads_its_ranks_and_its_address_from_its_slurm_step(environment, monkeypatch):
    """A step on two of the four machines of a job. MASTER_ADDR and MASTER_PORT may be given."""
    found = []

    def join(backend, **given):
        address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        found.append((given["rank"], given["world_size"], *address))
        raise Reached

    def setup_device(local_rank, local_size):
        found.append((local_rank, local_size))
        return torch.device("cpu")

    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(distributed, "setup_device", setup_device)
    job = {"SLURM_JOB_ID": 57_001, "SLURM_JOB_NUM_NODES": 4, "SLURM_JOB_NODELIST": "n[1-4]"}
    job |= {"SLURM_NODELIST": "n[1-4]", "SLURM_NNODES": 4, "SLURM_NPROCS": 16, "SLURM_NTASKS": 16}
    job |= {"SLURM_TASKS_PER_NODE": "4(x4)", "SLURM_NTASKS_PER_NODE": 4}
    step = srun(tasks=5, nodes="n[3-4]") | {"SLURM_STEP_TASKS_PER_NODE": "2,3"}
    step |= {"SLURM_PROCID": 3, "SLURM_LOCALID": 1, "SLURM_NODEID": 1}
    for given, address in (
        ({}, ("n3", "29001")),
        ({"MASTER_ADDR": "ib3", "MASTER_PORT": 29501}, ("ib3", "29501")),
    ):
        environment(**step | job | given)
        main = runpy.run_path(str(ROOT / "05_mnmc_ddp_slurm.py"))["main"]
        with pytest.raises(Reached):
            main(SimpleNamespace())
        assert found == [(1, 3), (3, 5, *address)]
        found.clear()


# 06


def lines_of(ranks, word):
    """What the first rank printed in lines `word JSON`."""
    return [json.loads(line) for line in re.findall(rf"^{word} (.*)$", ranks.output(), re.M)]


def tell(word, value):
    """Print a line for lines_of(), in one piece because loader workers write to the same file."""
    os.write(1, f"{word} {json.dumps(value)}\n".encode())


def with_a_clock_of_its_own(rank):
    """Let a second pass with each look of the checkpoints at the clock. Every step has a vote."""
    from imagenet import checkpoint, votes

    seconds = itertools.count()
    checkpoint.time = SimpleNamespace(monotonic=lambda: next(seconds))
    votes.MAX_COST = 1000


def test_06_prints_evaluates_and_saves_as_often_as_it_is_told(train, tmp_path):
    options = ["--dummy", 20, "--batch-size", 4, "--image-size", 16, "--arch", "mnist_net"]
    options += ["--keep", 20]
    by_steps = [*options, "--epochs", 3, "--print-every", 2, "--eval-every", 2]
    by_steps += ["--checkpoint-every", 4]
    by_seconds = [*options, "--epochs", 2, "--eval-every", 0, "--checkpoint-every", "3s"]
    steps = train("steps", 1, *by_steps)
    seconds = train("seconds", 1, *by_seconds, prepare=with_a_clock_of_its_own)
    assert steps.wait() == seconds.wait() == [0], steps.output() + seconds.output()
    printed = re.findall(r"== step: \[ +(\d)/5\] \[(\d)/3\]", steps.output())
    assert printed == [(step, epoch) for epoch in "123" for step in "245"]
    assert re.findall(r"== test: \[(\d)/3\]", steps.output()) == ["2", "3"], "the last epoch too"
    assert saved_steps(tmp_path / "steps") == [4, 5, 8, 10, 12, 15], "the end of an epoch too"
    assert "== test" not in seconds.output()
    # A look at the clock in each step, and one more to set it: 3 s are over in steps 3, 6 and 9.
    assert saved_steps(tmp_path / "seconds") == [3, 5, 6, 9, 10]


def saved_steps(folder):
    """The steps of the checkpoints in a folder."""
    paths = (folder / "checkpoints").glob("step-*.pt")
    return sorted(int(path.stem.removeprefix("step-")) for path in paths)


def tell_readers(rank):
    from imagenet import datasets

    def read_image(path, original=datasets.read_image):
        tell("reader", os.getpid())
        return original(path)

    datasets.read_image = read_image


def test_06_has_so_many_loader_processes_per_loader(train, one_each):
    options = [one_each, "--batch-size", 10, "--epochs", 1]
    started = []
    for workers in (0, 1):
        given = [*options, "--workers", workers]
        started.append(train(f"with{workers}", 1, *given, prepare=tell_readers))
    for workers, ranks in enumerate(started):
        assert ranks.wait() == [0], ranks.output()
        others = set(lines_of(ranks, "reader")) - {ranks.processes[0].pid}
        assert len(others) == 2 * workers, "one for training and one for evaluation"


def tell_how_it_computes(rank):
    from imagenet import model

    def build(args, dataset, original=model.build_model):
        built = original(args, dataset)
        built.register_forward_hook(hook)
        return built

    def hook(module, inputs, outputs):
        (images,) = inputs
        weights = next(weight for weight in module.parameters() if weight.ndim == 4)
        layout = torch.channels_last
        formats = [tensor.is_contiguous(memory_format=layout) for tensor in (images, weights)]
        types = [str(tensor.dtype) for tensor in (images, weights, outputs)]
        exact = [torch.are_deterministic_algorithms_enabled(), not torch.backends.cudnn.benchmark]
        found = {"training": module.training, "types": types, "formats": formats, "exact": exact}
        tell("computes", found)

    model.build_model = build


def test_06_computes_as_its_flags_say(train):
    """On a CPU --deterministic has torch refuse what is not. A GPU has kernels to choose from."""
    options = ["--dummy", 8, "--batch-size", 4, "--epochs", 1]
    plain = train("plain", 1, *options, prepare=tell_how_it_computes)
    options += ["--amp", "bf16", "--channels-last", "--deterministic"]
    other = train("other", 1, *options, prepare=tell_how_it_computes)
    for ranks, chosen, dtype in ((plain, False, "torch.float32"), (other, True, "torch.bfloat16")):
        assert ranks.wait() == [0], ranks.output()
        computed = lines_of(ranks, "computes")
        assert [line["training"] for line in computed] == [True, True, False]
        for line in computed:
            assert line["types"] == ["torch.float32", "torch.float32", dtype]
            assert line["formats"] == [chosen, chosen] and line["exact"] == [chosen, chosen]
        assert ("amp bf16, seed 0, channels last, deterministic" in ranks.output()) == chosen


def test_06_sync_bn_normalizes_over_the_images_of_all_ranks(train, tmp_path):
    """One training step of 24 images, on one rank and on two, that changes no weight."""
    options = ["--dummy", 24, "--batch-size", 24, "--epochs", 1, "--eval-every", 0]
    options += ["--arch", "small_net", "--lr", 1e-30, "--warmup-epochs", 0]
    one = train("one", 1, *options)
    synced = train("synced", 2, *options, "--sync-bn")
    assert one.wait() == [0] and synced.wait() == [0, 0], synced.output()
    expected, found = (final(tmp_path / name)["model"] for name in ("one", "synced"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def stop_rank_1_in_the_second_step(rank):
    def backward(self, *given, original=torch.Tensor.backward, **options):
        if rank == 1 and next(steps) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(self, *given, **options)

    steps = itertools.count()
    torch.Tensor.backward = backward


def test_06_waits_for_a_missing_rank_until_its_timeout(train):
    options = ["--dummy", 24, "--batch-size", 12, "--epochs", 9, "--eval-every", 0]
    options += ["--arch", "mnist_net", "--timeout", 2]
    ranks = train("run", 2, *options, prepare=stop_rank_1_in_the_second_step)
    ranks.processes[0].join(60)
    assert ranks.processes[0].exitcode == 1, ranks.output()
    assert "error: lost another rank (" in ranks.output() and "2000ms" in ranks.output()


LAUNCHERS = ["torchrun", "nodes", "srun", "mpirun", "python"]


def test_06_insists_on_a_launcher():
    of_method = {"auto": LAUNCHERS, "env": ["torchrun", "nodes"], "slurm": ["srun"]}
    for method, launchers in of_method.items():
        args = parse_06("--dummy", 8, "--dist-init-method", method)
        accepted = []
        for launcher in LAUNCHERS:
            with contextlib.suppress(LaunchError):
                check_launch(args, SimpleNamespace(launcher=launcher, is_main=True))
                accepted.append(launcher)
        assert accepted == launchers


def test_06_times_communication_on_gpus_only_if_asked_for(monkeypatch):
    """A GPU cannot be measured here, so the clock is a stand-in."""
    monkeypatch.setattr(progress, "CommunicationClock", lambda ddp, device: "a clock")
    monkeypatch.setattr("common.records.environment", lambda device: {})

    def clock(kind, world_size, *flags):
        args = parse_06("--dummy", 8, "--batch-size", 4, *flags)
        device = torch.device(kind)
        d = Distributed(0, world_size, 0, world_size, device, "gloo", "torchrun")
        return progress.Progress(
            args, d, GlobalBatchSampler(8, 4, 0, world_size), None
        ).communication

    assert clock("cuda", 2) is None and clock("cuda", 2, "--time-communication") == "a clock"
    assert clock("cpu", 2) == "a clock", "where it costs nothing"
    assert clock("cuda", 1, "--time-communication") is None, "nothing to time"


# The template


def tell_what_the_template_does(rank):
    sys.path.append(str(ROOT / "common"))  # for its copy of distributed.py

    def init(self, weights, *given, original=torch.optim.SGD.__init__, **options):
        weights = list(weights)
        tell("weights", [weight.double().sum().item() for weight in weights])
        original(self, weights, *given, **options)

    def step(self, *given, original=torch.optim.SGD.step):
        tell("lr", self.param_groups[0]["lr"])
        return original(self, *given)

    def fetch(self, index, original=torch.utils.data.Subset.__getitem__):
        tell("fetch", [os.getpid(), index])
        return original(self, index)

    def loss(outputs, targets, original=torch.nn.functional.cross_entropy):
        tell("type", str(outputs.dtype))
        return original(outputs, targets)

    def save(state, path, original=torch.save):
        where = [state.get("epoch"), state.get("step")]
        tell("save", [os.path.basename(path).removesuffix(".new"), *where])
        return original(state, path)

    torch.optim.SGD.__init__, torch.optim.SGD.step = init, step
    torch.utils.data.Subset.__getitem__, torch.nn.functional.cross_entropy = fetch, loss
    torch.save = save


@pytest.fixture
def templates(tmp_path):
    """A function (name, *flags) -> Ranks of the template, one rank, in the folder `name`."""
    started = []

    def start(name, *flags, script="template/train.py"):
        flags = [*flags, "--checkpoints", tmp_path / name / "saved"]
        folder = new_folder(tmp_path, name)
        started.append(Ranks(folder, 1, flags, script=script, prepare=tell_what_the_template_does))
        return started[-1]

    yield start
    for ranks in started:
        ranks.end()


def test_the_flags_of_the_template_act(templates, tmp_path):
    """There are 10000 examples to train on. The process that fetches one tells of it."""
    given = ["--epochs", 3, "--batch-size", 2000, "--lr", 0.2, "--eval-every", 2, "--seed", 1]
    often = templates("often", *given, "--save-every", 0, "--print-every", 2)
    given = ["--epochs", 2, "--batch-size", 5000, "--eval-every", 0, "--workers", 2]
    seldom = templates("seldom", *given, "--amp", "bf16")
    assert often.wait() == seldom.wait() == [0], often.output() + seldom.output()

    epochs = re.findall(r"^epoch (\d)/3: train loss (.*)$", often.output(), re.M)
    assert [epoch for epoch, _ in epochs] == ["1", "2", "3"]
    validated = ["validation loss" in line for _, line in epochs]
    assert validated == [False, True, True], "the last epoch too"
    assert "validation" not in seldom.output() and " step " not in seldom.output()
    steps = re.findall(r"^epoch (\d) \[(#*) *\] step (\d)/5: loss \d", often.output(), re.M)
    bars = [("#" * 8, "2"), ("#" * 16, "4")]
    assert steps == [(epoch, *bar) for epoch in "123" for bar in bars]
    rates = [0.2 * (1 + math.cos(math.pi * step / 15)) / 2 for step in range(15)]
    assert lines_of(often, "lr") == pytest.approx(rates)
    saved = [where for name, *where in lines_of(often, "save") if name == "last.pt"]
    assert saved == [[epoch, step] for epoch in range(3) for step in range(1, 6)] + [[3, 0]]
    assert lines_of(seldom, "save") == [["last.pt", 2, 0]]
    for name, files in (("often", ["best.pt", "last.pt"]), ("seldom", ["last.pt"])):
        assert sorted(path.name for path in (tmp_path / name / "saved").iterdir()) == files

    processes, order = zip(*lines_of(often, "fetch"), strict=True)
    assert set(processes) == {often.processes[0].pid}
    expected = torch.utils.data.DistributedSampler(range(10000), 1, 0, seed=1)
    assert list(order[:10000]) == list(expected)
    workers = {process for process, index in lines_of(seldom, "fetch") if index < 10000}
    assert len(workers) == 4 and seldom.processes[0].pid not in workers, "two in each epoch"
    assert set(lines_of(often, "type")) == {"torch.float32"}
    assert set(lines_of(seldom, "type")) == {"torch.bfloat16"}
    weights = torch.load(tmp_path / "seldom/saved/last.pt", weights_only=True)["model"].values()
    assert {weight.dtype for weight in weights} == {torch.float32}
    assert lines_of(often, "weights") != lines_of(seldom, "weights"), "with another seed"


def test_the_template_with_sync_bn_has_torchs_layers(templates, tmp_path):
    """torch refuses them on a CPU, if the template does not."""
    text = (ROOT / "template/train.py").read_text()
    for old, new in (
        ("nn.Linear(20, 64), ", "nn.Linear(20, 64), nn.BatchNorm1d(64), "),
        ('elif args.sync_bn and d.device.type == "cpu":', "elif False:"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    given = ["--epochs", 1, "--batch-size", 5000, "--sync-bn"]
    synced = templates("synced", *given, script=tmp_path / "train.py")
    assert synced.wait() == [1], synced.output()
    assert re.search(r"^\w+: SyncBatchNorm .* GPU", synced.output(), re.M), synced.output()


# launch/


def test_preflight_prints_json_if_asked_for(tmp_path):
    ranks = Ranks(tmp_path, 1, ["--json"], script="launch/preflight.py")
    ranks.wait()
    report = json.loads(ranks.output())
    verdicts = [check["verdict"] for check in report["checks"]]
    assert len(verdicts) == 15 and set(verdicts) <= {"ok", "warn", "FAIL"}


def test_two_ranks_may_try_the_same_new_file(tmp_path, monkeypatch):
    """Each removes it again; the second finds that it is gone."""
    original = os.remove

    def remove(path):
        original(path)
        original(path)

    monkeypatch.setattr(os, "remove", remove)
    path = str(tmp_path / "logs/new.jsonl")
    assert output_file(path) == path
    assert not os.path.exists(path)


def test_the_store_listens_on_its_port(tmp_path):
    port = free_port()
    ranks = Ranks(tmp_path, 1, ["--port", port], script="launch/store.py")
    try:
        ranks.wait_for(rf"store: .*:{port}, until Ctrl-C")
        timeout = datetime.timedelta(seconds=30)
        client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        client.set("greeting", "hello")
        assert client.get("greeting") == b"hello"
        ranks.signal(0, "SIGTERM")
        assert ranks.wait() == [0]
    finally:
        ranks.end()


# What recorded commands mean that do not name these flags
DEFAULTS = """--dataset shapes --data-dir data --epochs 5 --batch-size 256 --lr 0.01 --seed 0
--lr-scaling linear --warmup-epochs 0 --arch resnet18 --augment --print-every 50"""
DEFAULTS_06 = """--dummy 2 --image-size 224 --arch resnet18 --epochs 100 --batch-size 256 --lr 0.1
--accumulate 1 --schedule cosine --step-epochs 30 --warmup-epochs 5 --warmup-factor 0.1
--momentum 0.9 --weight-decay 5e-5 --label-smoothing 0 --ema 0 --seed 0 --eval-every 1 --keep 3
--timeout 60 --print-every 50 --amp none"""


def test_flags_that_a_recorded_command_leaves_out_keep_their_values():
    assert vars(shared_flags(*DEFAULTS.split())) == vars(shared_flags())
    assert vars(parse_06(*DEFAULTS_06.split())) == vars(parse_06("--dummy", 2))
