"""The numbers that a user acts on: what a run prints and records, computed here in another way.

Time is a clock that the test moves: reading a batch, computing and communicating take a known
number of seconds.
"""

import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import torchvision
from imagenet_runs import parse_06, script
from images import write_images
from PIL import Image
from ranks import Ranks
from torch.nn.functional import cross_entropy

from common import report
from common.memory import MemoryImages
from common.models import MnistNet, SmallNet
from ddp import report as ddp_report
from imagenet import clocks, datasets, progress
from imagenet.checkpoint_file import decode, read_file
from imagenet.sampler import GlobalBatchSampler

MIB = 2**20
EVALUATION = 50  # seconds of reading a batch of test images


class Clock:
    """A clock that stands still until the test moves it."""

    def __init__(self):
        self.now = 1000.0

    def add(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For small models more threads are slower, and a rank has one, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# 01 to 05

# Two ranks do not divide them: one image is trained on twice, and none is tested twice.
TRAIN_IMAGES, TEST_IMAGES = 63, 15
# Seconds.
FETCH = 0.0625
FIRST_STEP = 1.0
STEP = 0.125
BALLAST = 256 * MIB  # bytes that rank 0 holds for a moment, more than the training needs


def read_pictures(folder):
    """The pixels (N, H, W, 3) and the targets of an ImageFolder tree, read by Pillow."""
    files = sorted(folder.glob("*/*.png"))
    classes = sorted(path.name for path in folder.iterdir())
    pixels = np.stack([np.asarray(Image.open(file), dtype=np.float64) for file in files])
    return pixels, torch.tensor([classes.index(file.parent.name) for file in files])


def prepare_rank_of_03(folder, rank):
    """Let the clock tell known times, bind rank 0 to one core, and note its highest memory."""
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()
    clock = Clock()
    report.time = clock
    # As where torchrun starts a rank:
    ddp_report.multiprocessing = SimpleNamespace(parent_process=lambda: None)
    steps = []

    def fetch(self, indices, original=MemoryImages.__getitems__):
        clock.add(FETCH if len(self) == TRAIN_IMAGES else EVALUATION)
        return original(self, indices)

    def step(self, original=torch.optim.SGD.step):
        clock.add(STEP if steps else FIRST_STEP)
        steps.append(clock.now)
        return original(self)

    MemoryImages.__getitems__ = fetch
    torch.optim.SGD.step = step
    torch.nn.Dropout.forward = lambda self, x: x  # each rank would draw its own numbers
    if rank == 0:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        ballast = np.ones(BALLAST, dtype=np.uint8)
        (folder / "memory").write_text(str(psutil.Process().memory_info().rss))
        del ballast


@pytest.fixture(scope="module")
def of_03(tmp_path_factory):
    """A training of two ranks for two epochs of eleven steps: its folder, flags, console, records,
    and when it began and ended.
    """
    folder = tmp_path_factory.mktemp("of 03")
    for split, images in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
        write_images(folder, split, (12, 12), ["a", "b", "c"], images // 3)
    flags = ["--dataset", "folder", "--data-dir", folder, "--no-augment", "--arch", "mnist_net"]
    flags += ["--epochs", 2, "--batch-size", 6, "--lr", 0.8, "--warmup-epochs", 0.5, "--seed", 3]
    flags += ["--print-every", 4, "--log-file", folder / "log.jsonl"]
    options = {"prepare": functools.partial(prepare_rank_of_03, folder)}
    options |= {"script": "03_mnmc_ddp_launch.py", "env": {"OMP_NUM_THREADS": 3}}
    before = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    ranks = Ranks(folder, 2, flags, **options)
    assert ranks.wait() == [0, 0], ranks.output()
    after = datetime.datetime.now(datetime.timezone.utc)
    assert ranks.output(1) == "", "rank 0 alone prints and records"
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert len(records) == 2
    return SimpleNamespace(
        folder=folder,
        flags=[str(flag) for flag in flags],
        out=ranks.output(),
        records=records,
        times=(before, after),
    )


def train_as_03_does(folder):
    """Train the same in one process.

    Each step takes the three images of rank 0 and those of rank 1 as one batch. The last step has
    two and two.

    Returns:
        (loss, accuracy) of each line, and (loss, accuracy, test loss, test accuracy) of each epoch.
    """
    pixels, targets = read_pictures(folder / "train")
    test_pixels, test_targets = read_pictures(folder / "test")
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    images = torch.from_numpy((pixels - mean) / std).float().permute(0, 3, 1, 2)
    test_images = torch.from_numpy((test_pixels - mean) / std).float().permute(0, 3, 1, 2)
    torch.manual_seed(3)
    model = MnistNet(3, (12, 12), 3).eval()  # without dropout
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=1e-4, nesterov=True)
    lines = []
    epochs = []
    steps = 0
    for epoch in range(2):
        generator = torch.Generator().manual_seed(3 + epoch)
        order = torch.randperm(TRAIN_IMAGES, generator=generator).tolist()
        order += order[:1]
        losses, answers = [], []
        for step in range(11):
            batch = order[0::2][3 * step : 3 * step + 3] + order[1::2][3 * step : 3 * step + 3]
            warm_up = min(1, (steps + 1) / 6)  # half of 11 steps, rounded
            optimizer.param_groups[0]["lr"] = 0.8 * 6 / 256 * warm_up
            outputs = model(images[batch])
            optimizer.zero_grad()
            cross_entropy(outputs, targets[batch]).backward()
            optimizer.step()
            steps += 1
            losses += cross_entropy(outputs, targets[batch], reduction="none").tolist()
            answers += (outputs.argmax(1) == targets[batch]).tolist()
            if step + 1 in (4, 8, 11):
                lines.append((sum(losses) / len(losses), 100 * sum(answers) / len(answers)))
        outputs = model(test_images)
        test_loss = cross_entropy(outputs, test_targets).item()
        right = (outputs.argmax(1) == test_targets).sum().item()
        epochs.append((*lines[-1], test_loss, 100 * right / TEST_IMAGES))
    return lines, epochs


def test_loss_and_accuracy_of_two_ranks_are_those_of_one_loop(of_03):
    lines, epochs = train_as_03_does(of_03.folder)
    pattern = r"== step: \[ *(\d+)/(\d+)\] \[(\d)/(\d)\] \| loss: ([\d.]+) \| acc: +([\d.]+)%"
    printed = re.findall(pattern, of_03.out)
    places = ["/".join(line[:4]) for line in printed]
    of_epoch_1 = ["4/11/1/2", "8/11/1/2", "11/11/1/2"]
    of_epoch_2 = ["4/11/2/2", "8/11/2/2", "11/11/2/2"]
    assert places == of_epoch_1 + of_epoch_2
    for line, expected in zip(printed, lines, strict=True):
        assert [float(number) for number in line[4:]] == pytest.approx(expected, abs=1e-3)
    pattern = r"== test: \[(\d)/2\] \| loss: ([\d.]+) \| acc: +([\d.]+)%"
    tested = re.findall(pattern, of_03.out)
    for k, (loss, accuracy, test_loss, test_accuracy) in enumerate(epochs):
        record = of_03.records[k]
        assert record["epoch"] == k + 1
        assert record["train_loss"] == pytest.approx(loss, abs=2e-4)
        assert record["train_acc"] == pytest.approx(accuracy, abs=1e-3)
        assert record["test_acc"] == pytest.approx(test_accuracy, abs=1e-3)
        assert record["test_loss"] == pytest.approx(test_loss, abs=2e-4)
        number, printed_loss, printed_accuracy = tested[k]
        assert number == str(k + 1)
        assert float(printed_loss) == pytest.approx(record["test_loss"], abs=6e-4)
        assert printed_accuracy == f"{record['test_acc']:.3f}"
    assert 0 < epochs[0][3] < 100 and epochs[0][1] != epochs[0][3], "one is not the other"
    assert f"done: test accuracy {epochs[1][3]:.2f}% after 2 epochs" in of_03.out


def test_seconds_and_speed_of_two_ranks_are_those_of_the_clock(of_03):
    """Of 64 images per epoch. Images per second leave out the first of 11 steps, with 6 images."""
    first, second = of_03.records
    seconds = [11 * FETCH + FIRST_STEP + 10 * STEP, 11 * (FETCH + STEP)]
    assert [first["seconds"], second["seconds"]] == pytest.approx(seconds, abs=1e-3)
    speed = (64 - 6) / (10 * (FETCH + STEP))
    assert first["images_per_second"] == second["images_per_second"] == round(speed, 1)
    shares = [11 * FETCH / total for total in seconds]
    assert [first["data_wait_share"], second["data_wait_share"]] == pytest.approx(shares, abs=1e-4)
    speeds = [18 / (3 * (FETCH + STEP)), 24 / (4 * (FETCH + STEP)), 16 / (3 * (FETCH + STEP))]
    printed = re.findall(r"== step: .* \| (\d+) img/s", of_03.out)
    assert printed == [f"{speed:.0f}" for speed in speeds] * 2
    for total, share in zip(seconds, shares, strict=True):
        waiting = f"{100 * share:.1f}% waiting for data"
        assert f"| {total:.1f} s, {speed:.0f} img/s, {waiting}" in of_03.out
    evaluations = 2 * 3 * EVALUATION  # rank 0 tests eight images, three at a time
    assert f"| {sum(seconds) + evaluations:.0f} s | peak memory" in of_03.out


def test_peak_memory_is_the_most_that_the_process_held(of_03):
    most = int((of_03.folder / "memory").read_text())
    assert of_03.records[-1]["peak_memory_mib"] == pytest.approx(most / MIB, rel=0.03)
    printed = float(re.search(r"peak memory ([\d.]+) GiB", of_03.out)[1])
    assert printed == pytest.approx(most / 2**30, rel=0.03)


def test_the_header_and_the_record_name_every_size_and_how_the_run_was_made(of_03):
    record = of_03.records[0]
    expected = {
        "world_size": 2,
        "local_world_size": 2,
        "batch_size": 3,
        "global_batch": 6,
        "cores": 1,
        "cpu_threads": 3,
        "python": sys.version.split()[0],
        "seed": 3,
        "limit": None,
        "warmup_epochs": 0.5,
        "augment": False,
        "dataset": "folder",
        "data_dir": str(of_03.folder),
        "model": "mnist_net",
        "amp": "none",
        "backend": "gloo",
        "launcher": "torchrun",
        "script": "03_mnmc_ddp_launch.py",
        "sync_bn": False,
        "device": "cpu",
        "repeat": 0,
    }
    assert expected.items() <= record.items()
    assert record["lr"] == pytest.approx(0.8 * 6 / 256)
    start = ["torchrun", "--nnodes=1", "--nproc-per-node=2", "03_mnmc_ddp_launch.py"]
    assert shlex.split(record["command"]) == start + of_03.flags
    for name in ("torch", "torchvision"):
        assert record[name].partition("+")[0] == importlib.metadata.version(name).partition("+")[0]
    before, after = of_03.times
    assert before <= datetime.datetime.fromisoformat(record["started"]) <= after
    weights = (27 * 32 + 32) + (9 * 32 * 64 + 64) + (64 * 4 * 4 * 128 + 128) + (128 * 3 + 3)
    images = "63 train and 15 test images of 3x12x12, in memory, 3 classes"
    assert f"{images}\n" in of_03.out
    options = f"mnist_net, {weights / 1e6:.1f} M weights | seed 3, 0.5 epochs of warm-up"
    assert options in of_03.out
    assert "world size 2 (2 on this machine)" in of_03.out and "3 CPU threads each" in of_03.out
    assert "global batch = 3 x 2 = 6 | lr 0.8 -> 0.01875\n" in of_03.out


# 06

CLASSES = [f"{k:02}" for k in range(20)]
# Of 160 images: steps of 14 and 15, in four micro-batches.
STEPS = 11
BATCH = 15
PIECES = 4
# Seconds.
READ = 0.25
COMPUTE = 1.0
EXCHANGE = 0.75
COMPILE = 10.0  # more, in the first step of an epoch
SMOOTHING = 0.1
DECAY = 0.8
FLAGS_06 = ["--arch", "small_net", "--image-size", 32, "--workers", 0, "--batch-size", BATCH]
FLAGS_06 += ["--epochs", 2, "--lr", 3, "--warmup-epochs", 1, "--seed", 7, "--ema", DECAY]
FLAGS_06 += ["--label-smoothing", SMOOTHING, "--weight-decay", 0.01, "--momentum", 0.8]
FLAGS_06 += ["--clip-grad", 1, "--timeout", 60]


def prepare_rank_of_06(scaled, rank):
    """Let the clock tell known times. In float32, rounding errors would double in each step.

    --amp fp16 scales gradients on a GPU. Here they are scaled in float64, to the same result.
    """
    torch.set_default_dtype(torch.float64)
    if scaled:
        original = torch.amp.GradScaler
        torch.amp.GradScaler = lambda device, enabled: original(device, enabled=True)
    clock = Clock()
    report.time = progress.time = clocks.time = clock

    def read(self, keys, original=datasets.Images.__getitems__):
        clock.add(READ if self.seed is not None else EVALUATION)
        return original(self, keys)

    is_first = False  # whether the next micro-batch is the first of an epoch

    def set_epoch(self, epoch, first_step=0, original=GlobalBatchSampler.set_epoch):
        nonlocal is_first
        is_first = first_step == 0
        original(self, epoch, first_step)

    def loss(self, outputs, targets, original=torch.nn.CrossEntropyLoss.forward):
        nonlocal is_first
        clock.add(COMPUTE + (COMPILE if is_first else 0))
        is_first = False
        return original(self, outputs, targets)

    def backward_done(self, original=clocks.CommunicationClock.backward_done):
        clock.add(EXCHANGE)  # the last bucket is on its way
        original(self)

    datasets.Images.__getitems__ = read
    GlobalBatchSampler.set_epoch = set_epoch
    torch.nn.CrossEntropyLoss.forward = loss
    clocks.CommunicationClock.backward_done = backward_done


class Training06:
    """A training for two epochs: its console, its records, and how long its steps take."""

    def __init__(self, folder, world_size):
        self.folder = folder
        self.world_size = world_size
        self.pieces = PIECES // world_size
        self.read = self.pieces * READ
        self.exchange = EXCHANGE if world_size > 1 else 0
        self.seconds = self.read + self.pieces * COMPUTE + self.exchange
        self.out = ""
        self.records = []

    def run(self, *flags):
        flags = [self.folder, *FLAGS_06, "--accumulate", self.pieces, "--print-every", 4, *flags]
        flags += ["--checkpoints-path", self.folder / "checkpoints"]
        flags += ["--log-file", self.folder / "log"]
        prepare = functools.partial(prepare_rank_of_06, self.world_size == 1)
        ranks = Ranks(self.folder, self.world_size, flags, prepare=prepare)
        assert ranks.wait() == [0] * self.world_size, ranks.output()
        self.out = ranks.output()
        self.records = [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]
        return self


@pytest.fixture(scope="module", params=[1, 2])
def of_06(tmp_path_factory, request):
    """A training on one rank, with scaled gradients, and one on two."""
    folder = tmp_path_factory.mktemp("of-06")
    write_images(folder, "train", (40, 50), CLASSES, 8)
    write_images(folder, "val", (40, 50), CLASSES, 2)
    one_more = folder / "val/07/more.png"  # two ranks do not divide 41 images
    shutil.copy(folder / "train/07/003.png", one_more)
    flags = ["--checkpoint-every", 9]
    if request.param > 1:  # once is enough: importing it takes two seconds
        flags += ["--tensorboard", folder / "events"]
    return Training06(folder, request.param).run(*flags)


def cut(items, pieces):
    """Cut a list into pieces; the k-th begins at len * k / pieces, rounded down."""
    bounds = [len(items) * k // pieces for k in range(pieces + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(bounds)]


def ranking(logits):
    """The classes of one image, the likeliest first."""
    return sorted(range(len(logits)), key=lambda k: -logits[k])


def count_right(outputs, targets):
    """How many targets are the first answer, and how many are among the first five."""
    pairs = zip(outputs.tolist(), targets.tolist(), strict=True)
    places = [ranking(logits).index(target) for logits, target in pairs]
    return sum(place < 1 for place in places), sum(place < 5 for place in places)


def load_pictures(folder):
    """Images, prepared as torchvision's published weights expect but at 32 pixels, and targets."""
    published = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    transform = published.transforms(resize_size=36, crop_size=32)
    files = sorted(folder.glob("*/*.png"))
    images = [transform(Image.open(file)) for file in files]
    return torch.stack(images), torch.tensor([CLASSES.index(file.parent.name) for file in files])


@torch.no_grad()
def evaluation(weights, folder):
    """Loss, and top-1 and top-5 in %, of a model with these weights."""
    model = SmallNet(3, 20)
    model.load_state_dict(weights)
    images, targets = load_pictures(folder / "val")
    outputs = model.eval()(images)
    top1, top5 = count_right(outputs, targets)
    loss = cross_entropy(outputs, targets).item()
    return loss, 100 * top1 / len(targets), 100 * top5 / len(targets)


@pytest.fixture(scope="module")
def expected_06(of_06):
    """What train_as_06_does() returns."""
    torch.set_default_dtype(torch.float64)
    expected = train_as_06_does(of_06.folder, of_06.pieces)
    torch.set_default_dtype(torch.float32)
    return expected


def train_as_06_does(folder, pieces):
    """Train the same in one process, with an average of its own.

    Batch norm sees the images of one micro-batch. Its statistics are those of rank 0, which has the
    first `pieces` micro-batches of a step.

    Returns:
        what each step counted, and {step: the state after it}.
    """
    train_set = datasets.Images(folder / "train", 32, seed=7)
    mean = torch.tensor([123.675, 116.28, 103.53]).view(3, 1, 1)
    std = torch.tensor([58.395, 57.12, 57.375]).view(3, 1, 1)
    torch.manual_seed(7)
    model = SmallNet(3, 20)
    weights = [p for name, p in model.named_parameters() if p.ndim > 1]
    others = [p for name, p in model.named_parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.SGD(groups, 3 * BATCH / 256, momentum=0.8, nesterov=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=STEPS)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    scheduler = torch.optim.lr_scheduler.ChainedScheduler([warm_up, cosine])
    counts = []
    states = {}
    average = None
    for epoch in range(2):
        order = torch.randperm(160, generator=torch.Generator().manual_seed(7 + epoch)).tolist()
        for batch in cut(order, STEPS):
            optimizer.zero_grad()
            losses = []
            top1 = 0
            top5 = 0
            for k, piece in enumerate(cut(batch, PIECES)):
                pixels, targets, _ = train_set.__getitems__([(epoch, index) for index in piece])
                buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
                buffers = {} if k < pieces else buffers
                outputs = torch.func.functional_call(model, buffers, ((pixels - mean) / std,))
                loss = cross_entropy(outputs, targets, label_smoothing=SMOOTHING, reduction="none")
                (loss.sum() / len(batch)).backward()
                losses += loss.tolist()
                right, among_five = count_right(outputs, targets)
                top1, top5 = top1 + right, top5 + among_five
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()
            lr = optimizer.param_groups[0]["lr"]
            with torch.no_grad():
                now = {name: value.clone() for name, value in model.state_dict().items()}
                for name, value in now.items():
                    if average and value.is_floating_point():
                        value = DECAY * average[name] + (1 - DECAY) * value
                    now[name] = value
                average = now
            counts.append({"loss": sum(losses), "top1": top1, "top5": top5})
            counts[-1] |= {"images": len(batch), "lr": lr}
            momenta = [optimizer.state[weight]["momentum_buffer"] for weight in [*weights, *others]]
            states[len(counts)] = {
                "model": {name: value.clone() for name, value in model.state_dict().items()},
                "ema": average,
                "momentum": [momentum.clone() for momentum in momenta],
            }
            scheduler.step()
    return counts, states


def totals_of(counts):
    """The sums over some steps, in the order of a checkpoint."""
    return [sum(step[name] for step in counts) for name in ("loss", "top1", "top5", "images")]


def lines_of(training, counts):
    """What each line of the console tells: of four, four and three steps in each epoch."""
    lines = []
    begin = 0
    for end in (4, 8, 11, 15, 19, 22):
        steps = counts[begin:end]
        images = sum(step["images"] for step in steps)
        seconds = len(steps) * training.seconds + (COMPILE if begin in (0, STEPS) else 0)
        done = (end - 1) % STEPS + 1  # in this epoch
        lines.append(
            {
                "step": end,
                "train/loss": sum(step["loss"] for step in steps) / images,
                "train/top1": 100 * sum(step["top1"] for step in steps) / images,
                "train/top5": 100 * sum(step["top5"] for step in steps) / images,
                "train/lr": steps[-1]["lr"],
                "speed/images_per_second": images / seconds,
                "speed/data": len(steps) * training.read / seconds,
                "speed/communication": len(steps) * training.exchange / seconds,
                "left": (22 - end) * (done * training.seconds + COMPILE) / done,
            }
        )
        begin = end
    return lines


def words(seconds):
    """A time below two hours, in the words of the console."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def test_a_line_of_06_tells_all_ranks_since_the_last_line(of_06, expected_06):
    counts, _ = expected_06
    pattern = r"== step: \[ *(\d+)/11\] \[(\d)/2\] \| loss: ([\d.]+) \| top-1: +([\d.]+)% \| "
    pattern += r"(\d+) img/s\n +lr ([\d.e-]+) \| data ([\d.]+)%, compute ([\d.]+)%, "
    pattern += r"communication ([\d.]+)% \| (\d+ \w+) left"
    expected = []
    for line in lines_of(of_06, counts):
        epoch, step = divmod(line["step"] - 1, STEPS)
        place = [str(step + 1), str(epoch + 1)]
        means = [f"{line['train/loss']:.3f}", f"{line['train/top1']:.3f}"]
        speed = [f"{line['speed/images_per_second']:.0f}", f"{line['train/lr']:.4g}"]
        waiting, exchanging = line["speed/data"], line["speed/communication"]
        shares = [waiting, 1 - waiting - exchanging, exchanging]
        shares = [f"{100 * share:.1f}" for share in shares]
        expected.append((*place, *means, *speed, *shares, words(line["left"])))
    assert re.findall(pattern, of_06.out) == expected


@pytest.mark.parametrize("of_06", [2], indirect=True)
def test_tensorboard_shows_the_numbers_of_the_console(of_06, expected_06):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    counts, states = expected_06
    expected = {}
    for line in lines_of(of_06, counts):
        for name in line.keys() - {"step", "left"}:
            value = pytest.approx(line[name], rel=1e-5)
            expected.setdefault(name, []).append((line["step"], value))
    for step in (11, 22):
        loss, top1, top5 = evaluation(states[step]["ema"], of_06.folder)
        expected.setdefault("test/loss", []).append((step, pytest.approx(loss, abs=1e-3)))
        expected.setdefault("test/top1", []).append((step, pytest.approx(top1)))
        expected.setdefault("test/top5", []).append((step, pytest.approx(top5)))
    events = EventAccumulator(str(of_06.folder / "events")).Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert scalars == expected


def test_the_record_of_06_tells_the_whole_epoch(of_06, expected_06):
    counts, states = expected_06
    best = 0
    for epoch, record in enumerate(of_06.records):
        steps = counts[STEPS * epoch : STEPS * (epoch + 1)]
        loss, top1, top5 = evaluation(states[STEPS * (epoch + 1)]["ema"], of_06.folder)
        best = max(best, top1)
        seconds = STEPS * of_06.seconds + COMPILE
        speed = (160 - steps[0]["images"]) / (10 * of_06.seconds)  # the first step warms up
        expected = {
            "epoch": epoch + 1,
            "seconds": seconds,
            "images_per_second": round(speed, 1),
            "data_wait_share": round(STEPS * of_06.read / seconds, 4),
            "communication_share": round(STEPS * of_06.exchange / seconds, 4),
            "train_loss": round(sum(step["loss"] for step in steps) / 160, 4),
            "train_acc": round(100 * sum(step["top1"] for step in steps) / 160, 3),
            "test_loss": pytest.approx(loss, abs=1e-3),  # of weights in float64
            "test_acc": round(top1, 3),
            "test_top5": round(top5, 3),
        }
        assert {name: record[name] for name in expected} == expected
        share = f"{100 * STEPS * of_06.read / seconds:.1f}% waiting for data"
        line = f"top-1: {top1:6.3f}% | top-5: {top5:6.3f}% | 41 images\n"
        line += f"      {speed:.0f} img/s, {share}"
        pattern = rf"== test: \[{epoch + 1}/2\] \| loss: ([\d.]+) \| {re.escape(line)}"
        printed_loss = re.search(pattern, of_06.out)[1]
        assert float(printed_loss) == pytest.approx(record["test_loss"], abs=6e-4)
    # Each rank evaluates its pieces of three batches, twice.
    total = 2 * seconds + 2 * 3 * of_06.pieces * EVALUATION
    times = f"{words(total)} | {total:.0f} s | peak"
    assert f"done: top-1 {top1:.3f}%, best {best:.3f}% after 2 epochs | {times}" in of_06.out
    assert 0 < top1 < top5 < 100


@pytest.mark.parametrize("of_06", [2], indirect=True)
def test_the_header_of_06_and_its_record_name_every_size(of_06):
    weights = 9 * (3 * 16 + 16 * 32 + 32 * 64 + 64 * 128 + 128 * 128)
    weights += 2 * (16 + 32 + 64 + 128 + 128) + 129 * 20
    images = "160 train and 41 test images, 20 classes, seen at 32x32"
    assert f"{images}\n" in of_06.out
    pieces = f"3 to 4 images per process at a time in {of_06.pieces} micro-batches"
    assert f"global batch 15: {pieces}, 11 steps per epoch" in of_06.out
    options = "amp none, seed 7, averaged weights 0.8"
    lr = f"lr 3 -> {3 * 15 / 256:g}"
    assert f"small_net, {weights / 1e6:.1f} M weights | {lr} | {options}" in of_06.out
    expected = {
        "world_size": of_06.world_size,
        "local_world_size": of_06.world_size,
        "global_batch": 15,
        "accumulate": of_06.pieces,
        "lr": 3 * 15 / 256,
        "seed": 7,
        "ema": 0.8,
        "image_size": 32,
        "model": "small_net",
        "dataset": str(of_06.folder),
        "amp": "none",
    }
    assert expected.items() <= of_06.records[0].items()
    assert 100 < of_06.records[0]["peak_memory_mib"] < psutil.virtual_memory().total / MIB


def test_a_checkpoint_holds_the_state_of_a_plain_loop(of_06, expected_06):
    """After the first epoch, after seven steps of the second, and at the end."""
    for step in (11, 18, 22):
        check_checkpoint(of_06, *expected_06, step)


def check_checkpoint(of_06, counts, states, step):
    state = decode(read_file(of_06.folder / f"checkpoints/step-{step:08}.pt"))
    expected = states[step]
    epoch = counts[STEPS * ((step - 1) // STEPS) : step]
    best = None  # in the checkpoint of step 11, which is saved before its evaluation
    if step > 11:
        best = pytest.approx(evaluation(states[11]["ema"], of_06.folder)[1])
    numbers = {
        "step": step,
        "world_size": of_06.world_size,
        "images": 160,
        "accumulate": of_06.pieces,
        "micro_batch": 4,
        "best": best,
        "totals": pytest.approx(totals_of(epoch)),
    }
    assert {name: state[name] for name in numbers} | {"totals": state["totals"].tolist()} == numbers
    assert bool(state["scaler"]) == (of_06.world_size == 1)
    for part in ("model", "ema"):
        assert state[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            torch.testing.assert_close(state[part][name], value, rtol=1e-6, atol=1e-9)
    momentum = [state["optimizer"]["state"][k]["momentum_buffer"] for k in range(17)]
    torch.testing.assert_close(momentum, expected["momentum"], rtol=1e-6, atol=1e-9)
    weights, others = state["optimizer"]["param_groups"]
    assert (len(weights["params"]), len(others["params"])) == (6, 11)
    assert (weights["weight_decay"], others["weight_decay"], weights["momentum"]) == (0.01, 0, 0.8)
    assert weights["lr"] == others["lr"] == pytest.approx(counts[step - 1]["lr"])
    given = {"batch_size": "15", "epochs": "2", "lr": "3.0", "arch": "small_net", "ema": "0.8"}
    assert given.items() <= state["flags"].items()


@pytest.mark.parametrize("of_06", [2], indirect=True)
def test_evaluate_prints_the_accuracy_of_pillow_and_a_plain_loop(of_06, tmp_path):
    """Of the newest checkpoint and a state_dict. Two ranks do not divide 41 images."""
    checkpoints = of_06.folder / "checkpoints"
    newest = decode(read_file(checkpoints / "step-00000022.pt"))
    torch.save(newest["model"], tmp_path / "plain.pt")
    cases = {
        "plain": (newest["model"], ["--weights", tmp_path / "plain.pt"]),
        "newest": (newest["ema"], ["--resume"]),
    }
    runs = {}
    for name, (_, given) in cases.items():
        (tmp_path / name).mkdir()
        given = [of_06.folder, *FLAGS_06, "--checkpoints-path", checkpoints, "--evaluate", *given]
        runs[name] = Ranks(tmp_path / name, of_06.world_size, given)
    for name, (weights, _) in cases.items():
        assert runs[name].wait() == [0] * of_06.world_size, runs[name].output()
        loss, top1, top5 = evaluation(weights, of_06.folder)
        pattern = r"evaluated: loss ([\d.]+), top-1 ([\d.]+)%, top-5 ([\d.]+)%, 41 images"
        printed = re.search(pattern, runs[name].output()).groups()
        assert float(printed[0]) == pytest.approx(loss, abs=1e-3)
        assert printed[1:] == (f"{top1:.3f}", f"{top5:.3f}")


@pytest.mark.parametrize("of_06", [2], indirect=True)
def test_a_resumed_run_tells_the_whole_epoch_but_its_own_speed(of_06, expected_06, tmp_path):
    """After step 18: four steps of the second epoch are left. The first has a line of its own."""
    counts, states = expected_06
    resumed = Training06(tmp_path, of_06.world_size)
    for name in ("train", "val"):
        (tmp_path / name).symlink_to(of_06.folder / name)
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(of_06.folder / "checkpoints/step-00000018.pt", tmp_path / "checkpoints")
    resumed.run("--resume")
    assert "step-00000018.pt, after step 18 of 22" in resumed.out
    pattern = r"step: \[ *(\d+)/11\] .* loss: ([\d.]+) .* top-1: +([\d.]+)% .*\n.* (\d+ s) left"
    printed = re.findall(pattern, resumed.out)
    lines = [(8, counts[18:19], 3), (11, counts[19:22], 0)]
    for numbers, (step, steps, left) in zip(printed, lines, strict=True):
        images = sum(counts["images"] for counts in steps)
        loss = sum(counts["loss"] for counts in steps) / images
        top1 = 100 * sum(counts["top1"] for counts in steps) / images
        assert numbers == (str(step), f"{loss:.3f}", f"{top1:.3f}", words(left * resumed.seconds))
    (record,) = resumed.records
    loss, top1, _, images = totals_of(counts[11:])
    seconds = 4 * resumed.seconds
    images_here = totals_of(counts[18:])[3]
    whole = {
        "epoch": 2,
        "seconds": seconds,
        "images_per_second": round(images_here / seconds, 1),
        "train_loss": round(loss / images, 4),
        "train_acc": round(100 * top1 / images, 3),
        "test_acc": round(evaluation(states[22]["ema"], of_06.folder)[1], 3),
    }
    assert {name: record[name] for name in whole} == whole
    saved = decode(read_file(tmp_path / "checkpoints/step-00000022.pt"))
    assert saved["totals"].tolist() == pytest.approx(totals_of(counts[11:]))


def test_the_learning_rate_of_06_falls_by_steps_as_that_of_torch():
    """Twelve epochs: three of warm-up from a fifth of the peak; every four make a step.

    That of a cosine, train_as_06_does() compares. It may end above zero.
    """
    steps = 10
    flags = ["--dummy", 2, "--epochs", 12, "--lr", 0.3, "--warmup-epochs", 3]
    flags += ["--warmup-factor", 0.2, "--batch-size", 512, "--schedule"]
    args = parse_06(*flags, "step", "--step-epochs", 4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.6)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=3 * steps)
    fall = torch.optim.lr_scheduler.StepLR(optimizer, 4 * steps)
    scheduler = torch.optim.lr_scheduler.ChainedScheduler([warm_up, fall])
    for step in range(12 * steps):
        expected = optimizer.param_groups[0]["lr"]
        assert script.learning_rate(args, step / steps) == pytest.approx(expected), step
        optimizer.step()
        scheduler.step()
    args = parse_06(*flags, "cosine", "--final-lr", 0.1)
    assert script.learning_rate(args, 12) == pytest.approx(0.06)
