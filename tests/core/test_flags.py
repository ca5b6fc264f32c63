"""Flags that fit no other file of tests: each changes the result as its help promises."""

import concurrent.futures
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
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from imagenet_runs import CLASSES, final, new_folder, parse_06
from imagenet_runs import script as script_06
from images import write_images, write_mnist
from processes import ROOT, start
from ranks import Ranks
from rungs import flags as shared_flags
from rungs import parse
from torchvision.datasets import MNIST

from common import data, folder, models
from common.distributed import Distributed, LaunchError, free_port
from common.flags import output_file
from imagenet import progress
from imagenet.datasets import build_datasets
from imagenet.launch_checks import check_launch
from imagenet.sampler import GlobalBatchSampler
from tools import prepare_imagenet


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Compute on one core: the models of this file are too small for more."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# 01 to 05


KINDS = ["01_snsc.py", "03_mnmc_ddp_launch.py", "07_fsdp.py"]  # one process, several, shards


@pytest.mark.parametrize("script", KINDS)
def test_weights_order_and_augmentation_follow_the_seed(run, small_folder, monkeypatch, script):
    def build(args, dataset, original=models.build_model):
        model = original(args, dataset)
        seen["weights"] = [weight.double().sum().item() for weight in model.parameters()]
        return model

    def fetch(self, indices, original=data.MemoryImages.__getitems__):
        seen.setdefault("order", list(indices))  # of the first training step
        return original(self, indices)

    def crop(images, padding, top, left, mirror, original=data.crop_and_flip):
        seen.setdefault("augmentation", (top.tolist(), left.tolist(), mirror.tolist()))
        return original(images, padding, top, left, mirror)

    monkeypatch.setattr(models, "build_model", build)
    monkeypatch.setattr(data.MemoryImages, "__getitems__", fetch)
    monkeypatch.setattr(data, "crop_and_flip", crop)
    runs = []
    for seed in (5, 5, 6):
        seen = {}
        given = ["--arch", "small_net", "--batch-size", 24, "--epochs", 1, "--seed", seed]
        end = run(script, "--dataset", "folder", "--data-dir", small_folder, *given)
        assert end.code == 0 and f"seed {seed}" in end.out, end.err
        runs.append(seen)
    first, again, other = runs
    assert first == again and set(first) == {"weights", "order", "augmentation"}
    for what in first:
        assert first[what] != other[what], what


@pytest.mark.parametrize("script", KINDS)
def test_the_flags_of_a_quick_run_act(run, small_folder, tmp_path, monkeypatch, script):
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
    given += ["--print-every", 2]
    end = run(script, *folder, *given, "--no-augment", "--log-file", log, "--save", weights)
    assert end.code == 0, end.err
    assert "folder: 20 train and 24 test images" in end.out
    assert "small_net, 0.2 M weights" in end.out
    assert fetched == [4] * (5 + 6) * 2, "training and test, twice"
    steps = re.findall(r"== step: \[ +(\d+)/5\] \[(\d)/2\]", end.out)
    assert steps == [(step, epoch) for epoch in "12" for step in "245"]
    assert cropped == []
    assert [json.loads(line)["epoch"] for line in log.read_text().splitlines()] == [1, 2]
    models.SmallNet(3, 2).load_state_dict(torch.load(weights, weights_only=True))

    end = run(script, *folder, "--arch", "mnist_net")
    assert "folder: 24 train and 24 test images" in end.out
    assert "mnist_net, 1.6 M weights" in end.out
    assert cropped == [24] * 5, "one batch in each of five epochs"
    assert "done: test accuracy" in end.out
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["log.jsonl", "model.pt", "test", "train"], "nothing more"


@pytest.mark.parametrize("script", KINDS)
def test_photographs_have_so_many_workers(run, large_folder, tmp_path, monkeypatch, script):
    """One process reads the training images, and another the test images."""

    def read_image(path, original=folder.read_image):
        (readers / str(os.getpid())).touch()
        return original(path)

    monkeypatch.setattr(folder, "read_image", read_image)
    given = ["--dataset", "folder", "--data-dir", large_folder, "--arch", "small_net"]
    given += ["--epochs", 1, "--batch-size", 4, "--limit", 8]
    for workers in (0, 1):
        readers = tmp_path / f"readers{workers}"
        readers.mkdir()
        end = run(script, *given, "--workers", workers)
        assert end.code == 0, end.err
        others = {path.name for path in readers.iterdir()} - {str(os.getpid())}
        assert len(others) == 2 * workers


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A file server that prints nothing."""

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("script", KINDS)
def test_missing_files_are_downloaded_if_asked_for(run, tmp_path, monkeypatch, script):
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
    refused = run(script, *given)
    assert refused.code == 2 and "add --download" in refused.err and not (tmp_path / "new").exists()
    handler = functools.partial(QuietHandler, directory=tmp_path / "mirror")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        end = run(script, *given, "--download")
        server.shutdown()
    assert end.code == 0, end.err
    assert "mnist: 30 train and 30 test images of 1x28x28" in end.out
    assert (tmp_path / "new/MNIST/raw").is_dir()


def statistics(weights):
    """The means and variances of all batch norms in a state_dict, as one tensor."""
    return torch.cat([value.flatten() for name, value in weights.items() if "running_" in name])


def test_sync_bn_normalizes_over_the_images_of_all_processes(run, small_folder, tmp_path):
    """One training step of 24 images, in one process and in two, that changes no weight."""
    given = ["--dataset", "folder", "--data-dir", small_folder, "--arch", "small_net"]
    given += ["--epochs", 1, "--no-augment", "--lr", 1e-30]
    started = {}
    for name, flags in (("plain", []), ("synced", ["--sync-bn"])):
        all_flags = [*given, "--batch-size", 12, "--save", tmp_path / f"{name}.pt", *flags]
        new = new_folder(tmp_path, name)
        started[name] = Ranks(new, 2, all_flags, script="03_mnmc_ddp_launch.py")
    end = run("01_snsc.py", *given, "--batch-size", 24, "--save", tmp_path / "one.pt")
    assert end.code == 0, end.err
    for name, ranks in started.items():
        assert ranks.wait() == [0, 0], ranks.output()
        assert ("synchronized batch norm" in ranks.output()) == (name == "synced")
    found = {}
    for name in ("one", "plain", "synced"):
        found[name] = statistics(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    torch.testing.assert_close(found["synced"], found["one"], rtol=1e-4, atol=1e-6)
    assert (found["plain"] - found["one"]).abs().max() > 1e-3


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


@pytest.mark.parametrize(("count", "processes"), [(0, 2), (4, 4)])
def test_04_starts_two_processes_or_one_per_gpu(gpus, monkeypatch, count, processes):
    gpus(count)
    assert parse(monkeypatch, "04_mnmc_ddp_mp.py").nproc_per_node == processes


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


def tell_what_is_random(rank):
    from imagenet import datasets, model, sampler

    def build(args, dataset, original=model.build_model):
        built = original(args, dataset)
        tell("weights", [weight.double().sum().item() for weight in built.parameters()])
        return built

    def iterate(self, original=sampler.GlobalBatchSampler.__iter__):
        for batch in original(self):
            tell("order", batch)
            yield batch

    def fetch(self, keys, original=datasets.Images.__getitems__):
        images, *others = original(self, keys)
        tell("crops", [[key, image.sum().item()] for key, image in zip(keys, images, strict=True)])
        return images, *others

    def drop(self, inputs, original=torch.nn.Dropout.forward):
        if self.training:
            kept = original(self, torch.ones_like(inputs)).flatten().nonzero()
            tell("dropout", kept.sum().item())
        return original(self, inputs)

    model.build_model, sampler.GlobalBatchSampler.__iter__ = build, iterate
    datasets.Images.__getitems__, torch.nn.Dropout.forward = fetch, drop


def test_06_weights_order_crops_and_dropout_follow_the_seed(train, one_each):
    options = [one_each, "--batch-size", 20, "--epochs", 1, "--eval-every", 0]
    options += ["--arch", "mnist_net", "--seed"]
    started = []
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):
        started.append(train(name, 1, *options, seed, prepare=tell_what_is_random))
    runs = []
    for ranks in started:
        assert ranks.wait() == [0], ranks.output()
        seen = {what: lines_of(ranks, what) for what in ("weights", "order", "dropout")}
        # By image, and not in their order, which is another.
        seen["crops"] = sorted(image for batch in lines_of(ranks, "crops") for image in batch)
        runs.append(seen)
    first, again, other = runs
    assert first == again and all(first.values()) and len(first["crops"]) == 40
    for what in first:
        assert first[what] != other[what], what


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
    other = train(
        "other",
        1,
        *options,
        "--amp",
        "bf16",
        "--channels-last",
        "--deterministic",
        prepare=tell_how_it_computes,
    )
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
    worlds = {"one": (1, []), "plain": (2, []), "synced": (2, ["--sync-bn"])}
    started, found = {}, {}
    for name, (world_size, flags) in worlds.items():
        started[name] = train(name, world_size, *options, *flags)
    for name, ranks in started.items():
        assert set(ranks.wait()) == {0}, ranks.output()
        found[name] = statistics(final(tmp_path / name)["model"])
    torch.testing.assert_close(found["synced"], found["one"], rtol=1e-4, atol=1e-6)
    assert (found["plain"] - found["one"]).abs().max() > 1e-3


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


@pytest.mark.parametrize(
    ("method", "launchers"),
    [("auto", LAUNCHERS), ("env", ["torchrun", "nodes"]), ("slurm", ["srun"])],
)
def test_06_insists_on_a_launcher(method, launchers):
    args = parse_06("--dummy", 8, "--dist-init-method", method)
    accepted = []
    for launcher in LAUNCHERS:
        with contextlib.suppress(LaunchError):
            check_launch(args, SimpleNamespace(launcher=launcher, is_main=True))
            accepted.append(launcher)
    assert accepted == launchers


def test_06_warm_up_starts_at_its_share_of_the_peak():
    """A straight line up to 0.2 x 512 / 256: --schedule step changes nothing in these epochs."""
    options = ["--dummy", 8, "--batch-size", 512, "--lr", 0.2, "--schedule", "step"]
    options += ["--warmup-epochs", 4]
    args = parse_06(*options, "--warmup-factor", 0.5)
    rates = [script_06.learning_rate(args, epoch) for epoch in (0, 1, 2, 3.5, 4, 5)]
    assert rates == pytest.approx([0.2, 0.25, 0.3, 0.375, 0.4, 0.4])
    assert script_06.learning_rate(parse_06(*options, "--warmup-factor", 0), 0) == 0


def test_06_ends_at_its_share_of_the_peak():
    options = ["--dummy", 8, "--batch-size", 512, "--lr", 0.2, "--epochs", 10]
    args = parse_06(*options, "--warmup-epochs", 0, "--final-lr", 0.1)
    rates = [script_06.learning_rate(args, epoch) for epoch in (0, 5, 10)]
    assert rates == pytest.approx([0.4, 0.22, 0.04])


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


def test_06_reads_images_of_a_size_from_the_named_folders(one_each, tmp_path):
    write_images(tmp_path, "other", (40, 44), CLASSES, 2, ".jpg")
    for given, count in (([], 40), (["--val-path", tmp_path / "other"], 80)):
        train_set, val_set = build_datasets(parse_06(one_each, "--image-size", 48, *given))
        assert len(train_set) == 40 and len(val_set) == count
        for dataset in (train_set, val_set):
            assert dataset.image_size == (48, 48)
            assert dataset.__getitems__([(0, 3)])[0].shape == (1, 3, 48, 48)


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


def seeded_order(seed):
    return torch.utils.data.DistributedSampler(range(10000), num_replicas=1, rank=0, seed=seed)


def test_the_flags_of_the_template_act(templates, tmp_path):
    """There are 10000 examples to train on. The process that fetches one tells of it."""
    given = ["--epochs", 3, "--batch-size", 2000, "--lr", 0.2, "--eval-every", 2]
    often = templates("often", *given, "--save-every", 0, "--print-every", 2)
    never = ["--epochs", 2, "--batch-size", 5000, "--eval-every", 0]
    seldom = templates("seldom", *never, "--workers", 2, "--amp", "bf16")
    other = templates("other", *never, "--seed", 1)
    for ranks in (often, seldom, other):
        assert ranks.wait() == [0], ranks.output()

    epochs = re.findall(r"^epoch (\d)/3: train loss (.*)$", often.output(), re.M)
    assert [epoch for epoch, _ in epochs] == ["1", "2", "3"]
    validated = ["validation loss" in line for _, line in epochs]
    assert validated == [False, True, True], "the last epoch too"
    assert "validation" not in seldom.output() and " step " not in seldom.output()
    steps = re.findall(r"^epoch (\d) \[(#*) *\] step (\d)/5: loss \d", often.output(), re.M)
    assert steps == [
        (epoch, bar, n) for epoch in "123" for bar, n in (("#" * 8, "2"), ("#" * 16, "4"))
    ]
    rates = [0.2 * (1 + math.cos(math.pi * step / 15)) / 2 for step in range(15)]
    assert lines_of(often, "lr") == pytest.approx(rates)
    rates = [0.1 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert lines_of(seldom, "lr") == pytest.approx(rates)
    saved = [where for name, *where in lines_of(often, "save") if name == "last.pt"]
    assert saved == [[epoch, step] for epoch in range(3) for step in range(1, 6)] + [[3, 0]]
    assert lines_of(seldom, "save") == [["last.pt", 2, 0]]
    for name, files in (("often", ["best.pt", "last.pt"]), ("seldom", ["last.pt"])):
        assert sorted(path.name for path in (tmp_path / name / "saved").iterdir()) == files

    # the order of what one process fetches
    fetched = {ranks: lines_of(ranks, "fetch") for ranks in (often, seldom, other)}
    assert {process for process, _ in fetched[often]} == {often.processes[0].pid}
    orders = {ranks: [index for _, index in fetched[ranks][:5]] for ranks in (often, other)}
    assert orders[often] == list(seeded_order(0))[:5] and orders[other] == list(seeded_order(1))[:5]
    workers = {process for process, index in fetched[seldom] if index < 10000}
    assert len(workers) == 4 and seldom.processes[0].pid not in workers, "two in each epoch"
    assert set(lines_of(often, "type")) == {"torch.float32"}
    assert set(lines_of(seldom, "type")) == {"torch.bfloat16"}
    weights = torch.load(tmp_path / "seldom/saved/last.pt", weights_only=True)["model"].values()
    assert {weight.dtype for weight in weights} == {torch.float32}
    assert lines_of(often, "weights") == lines_of(seldom, "weights") != lines_of(other, "weights")


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
    given = ["--epochs", 1, "--batch-size", 5000]
    plain = templates("plain", *given, script=tmp_path / "train.py")
    synced = templates("synced", *given, "--sync-bn", script=tmp_path / "train.py")
    assert plain.wait() == [0] and "SyncBatchNorm" not in plain.output()
    assert synced.wait() == [1], synced.output()
    assert re.search(r"^\w+: SyncBatchNorm .* GPU", synced.output(), re.M), synced.output()


# launch/ and tools/


def test_preflight_prints_json_if_asked_for(tmp_path):
    as_text = Ranks(tmp_path, 1, [], script="launch/preflight.py")
    as_text.wait()
    text = as_text.output()
    # Read as a program would: `finished` would take lines of gloo away.
    printed = start("launch/preflight.py", "--json").communicate(timeout=300)[0]
    checks = json.loads(printed)["checks"]
    found = re.findall(r"^(ok  |warn|FAIL)  (\w+(?: \w+)?) {2,}", text, re.M)
    assert [(check["verdict"], check["name"]) for check in checks] == [
        (verdict.strip(), name) for verdict, name in found
    ]
    assert "{" not in text and len(found) == 15


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


def test_images_are_split_by_their_share_by_so_many_processes(tmp_path, monkeypatch, capsys):
    """Threads take the place of the processes."""
    pools = []

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, workers):
            pools.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Pool)
    write_images(tmp_path, "images", (8, 8), per_class=100, suffix=".jpg")
    for share, workers in ((0.1, 1), (0.5, 3)):
        given = [tmp_path / "images", tmp_path / f"by{share}"]
        given += ["--val-share", share, "--workers", workers]
        monkeypatch.setattr(sys, "argv", ["prepare_imagenet.py", *map(str, given)])
        prepare_imagenet.main(prepare_imagenet.parse_args())
        assert f"200 images, 0 of them done before | {workers} processes" in capsys.readouterr().out
        for label in ("cat", "dog"):
            count = len(list((tmp_path / f"by{share}/val" / label).iterdir()))
            # The names decide: the same in each run. Three standard deviations are allowed.
            assert count == pytest.approx(100 * share, abs=3 * 10 * math.sqrt(share * (1 - share)))
    assert pools == [1, 3]


# What recorded commands mean that do not name these flags
DEFAULTS = {
    "dataset": "shapes",
    "data_dir": "data",
    "epochs": 5,
    "batch_size": 256,
    "lr": 0.01,
    "lr_scaling": "linear",
    "warmup_epochs": 0,
    "workers": 2,
    "arch": "resnet18",
    "augment": True,
    "seed": 0,
    "print_every": 50,
    "limit": None,
}
DEFAULTS_06 = {
    "image_size": 224,
    "workers": None,
    "arch": "resnet18",
    "sync_bn": False,
    "epochs": 100,
    "batch_size": 256,
    "accumulate": 1,
    "lr": 0.1,
    "schedule": "cosine",
    "step_epochs": 30,
    "warmup_epochs": 5,
    "warmup_factor": 0.1,
    "momentum": 0.9,
    "weight_decay": 5e-5,
    "label_smoothing": 0,
    "clip_grad": None,
    "ema": 0,
    "seed": 0,
    "eval_every": 1,
    "keep": 3,
    "timeout": 60,
    "print_every": 50,
    "amp": "none",
}


def test_flags_that_a_recorded_command_leaves_out_keep_their_values():
    for defaults, args in ((DEFAULTS, shared_flags()), (DEFAULTS_06, parse_06("--dummy", 2))):
        assert {name: getattr(args, name) for name in defaults} == defaults
