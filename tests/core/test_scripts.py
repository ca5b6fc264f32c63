"""The scripts as users run them: they learn, they agree with each other, they fail in one line."""

import contextlib
import json
import os
import re
import shutil
import signal
import time

import numpy as np
import psutil
import pytest
import torch
import torchvision
from images import write_images
from PIL import Image
from processes import ROOT, read_until, start
from rungs import IN_PROCESS, QUICK, flags

from common.data import build_datasets
from common.models import SmallNet


def losses(out):
    return [float(loss) for loss in re.findall(r"loss: ([\d.]+)", out)]


# They learn


def test_a_first_run_sees_loss_fall_and_test_accuracy_rise(run, tmp_path, monkeypatch):
    """A first run sees loss fall and test accuracy rise and needs no network."""
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(
            f"socket.socket.{name}", lambda *_: pytest.fail("it asked for the network")
        )
    log, weights = tmp_path / "log.jsonl", tmp_path / "net.pt"
    given = ["--arch", "small_net", "--lr", 0.2, "--epochs", 2, "--limit", 4000, "--batch-size", 64]
    end = run("01_snsc.py", *given, "--log-file", log, "--save", weights)
    assert (end.code, end.err) == (0, "")
    first, last = (json.loads(line) for line in log.read_text().splitlines())
    assert last["train_loss"] < first["train_loss"] and last["test_acc"] > first["test_acc"] + 3
    assert (
        "started by python | world size 1" in end.out
        and "global batch = 64 x 1 = 64 | lr 0.2 -> 0.05" in end.out
    )
    assert re.search(
        r"done: test accuracy [\d.]+% after 2 epochs \| \d+ s \| peak memory [\d.]+ GiB", end.out
    )

    # The weights that were saved are those that were tested.
    net = SmallNet(3, 10)
    net.load_state_dict(torch.load(weights, weights_only=True))
    train, test = build_datasets(flags(*given))
    mean, std = (s.float()[:, None, None] for s in train.channel_stats())
    with torch.no_grad():
        right = (net.eval()((test.images - mean) / std).argmax(1) == test.targets).sum().item()
    assert abs(100 * right / len(test) - last["test_acc"]) < 0.1


@pytest.mark.parametrize("script", IN_PROCESS)
def test_a_folder_of_small_images_is_learned(run, tmp_path, script):
    write_images(tmp_path, "train", (32, 32), per_class=40)
    write_images(tmp_path, "test", (32, 32))
    given = ["--dataset", "folder", "--data-dir", tmp_path, "--arch", "small_net"]
    given += ["--batch-size", 16]
    end = run(script, *given, "--lr", 0.1)
    assert end.code == 0
    assert "test accuracy 100.00%" in end.out


def test_a_folder_of_large_images_is_trained_on_with_workers(run, large_folder):
    given = ["--dataset", "folder", "--data-dir", large_folder, "--batch-size", 8, "--workers", 2]
    end = run("01_snsc.py", *given, "--epochs", 1, "--lr-scaling", "none")
    assert end.code == 0
    assert "24 train and 8 test images of 3x224x224, read from files, 2 classes" in end.out
    assert "step: [  3/3] [1/1]" in end.out


# They agree


def test_one_seed_gives_one_result_and_another_seed_another(run, small_folder):
    given = [*QUICK, small_folder, "--epochs", 2]
    first, again = run("01_snsc.py", *given), run("01_snsc.py", *given)
    other = run("01_snsc.py", *given, "--seed", 1)
    assert losses(first.out) == losses(again.out) != losses(other.out)


@pytest.mark.parametrize("script", IN_PROCESS)
def test_the_order_of_images_begins_as_distributed_samplers(run, small_folder, monkeypatch, script):
    """The order of images begins as distributed samplers and then changes."""
    seen = []

    def remember(self, indices):
        seen.append(indices)
        return self.images[indices], self.targets[indices]

    monkeypatch.setattr("common.memory.MemoryImages.__getitems__", remember)
    run(script, *QUICK, small_folder, "--epochs", 2, "--batch-size", 24, "--seed", 5)
    first, test, second, test_again = seen
    assert test == test_again == list(range(24)) == sorted(first)
    sampler = torch.utils.data.DistributedSampler(range(24), num_replicas=1, rank=0, seed=5)
    assert first == list(sampler)
    sampler.set_epoch(1)
    if script[:2] in ("03", "05"):
        assert second == list(sampler)
    assert second != first and sorted(second) == sorted(first)


@pytest.mark.parametrize("script", IN_PROCESS)
def test_a_last_batch_of_one_image_trains_nothing(run, tmp_path, script):
    """Batch norm could not train on it."""
    write_images(tmp_path, "train", (32, 32), per_class=9)
    write_images(tmp_path, "test", (32, 32), per_class=9)
    given = ["--dataset", "folder", "--data-dir", tmp_path, "--arch", "small_net", "--epochs", 1]
    end = run(script, *given, "--batch-size", 17)
    assert end.code == 0 and "step: [  1/1] [1/1]" in end.out, end.err
    assert "18 train and 18 test images" in end.out


@pytest.mark.skipif(torch.accelerator.is_available(), reason="exact on a CPU only")
def test_dataparallel_without_gpus_trains_exactly_as_01(run, small_folder, tmp_path):
    """Dataparallel without gpus trains exactly as 01 and says so."""
    given = [*QUICK, small_folder, "--epochs", 2, "--save"]
    plain = run("01_snsc.py", *given, tmp_path / "01.pt")
    parallel = run("02_snmc_dp.py", *given, tmp_path / "02.pt")
    assert losses(plain.out) == losses(parallel.out)
    assert "DataParallel over 0 GPUs\n" in parallel.out
    one, two = (torch.load(tmp_path / f"0{k}.pt", weights_only=True) for k in (1, 2))
    assert one.keys() == two.keys(), "no module. in front of a name"
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_saved_weights_fit_torchvisions_own_network(run, small_folder, tmp_path):
    run(
        "02_snmc_dp.py",
        *QUICK,
        small_folder,
        "--arch",
        "resnet18",
        "--epochs",
        1,
        "--save",
        tmp_path / "net.pt",
    )
    net = torchvision.models.resnet18(num_classes=2)
    net.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))


def test_01_trains_as_a_plain_pytorch_loop(run, tmp_path):
    """Pillow reads the images; statistics, rates and printed numbers are computed here; only the
    model is ours.
    """
    for split, per_class in (("train", 20), ("test", 15)):
        write_images(tmp_path, split, (32, 32), per_class=per_class)
    given = ["--dataset", "folder", "--data-dir", tmp_path, "--arch", "small_net"]
    given += ["--batch-size", 16, "--no-augment"]
    given += ["--lr", 0.8, "--seed", 3, "--epochs", 2, "--warmup-epochs", 1, "--print-every", 2]
    end = run("01_snsc.py", *given, "--save", tmp_path / "net.pt")
    assert end.code == 0, end.err

    def read(split):
        files = sorted(tmp_path.glob(f"{split}/*/*.png"))
        # (N, 32, 32, 3)
        pixels = np.stack([np.asarray(Image.open(file), dtype=np.float64) for file in files])
        return pixels, torch.tensor([int(file.parent.name == "dog") for file in files])

    (pixels, targets), (test_pixels, test_targets) = read("train"), read("test")
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    images, test_images = (
        torch.from_numpy((p - mean) / std).float().permute(0, 3, 1, 2)
        for p in (pixels, test_pixels)
    )
    torch.manual_seed(3)
    model = SmallNet(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=1e-4, nesterov=True)
    sampler = torch.utils.data.RandomSampler(range(40), generator=torch.Generator().manual_seed(3))
    trained = []
    tested = []
    step = 0
    for _ in range(2):
        model.train()
        loss_sum = correct = seen = 0
        for batch in torch.tensor(list(sampler)).split(16):
            optimizer.param_groups[0]["lr"] = 0.8 * 16 / 256 * min(1, (step + 1) / 3)
            outputs = model(images[batch])
            loss = torch.nn.functional.cross_entropy(outputs, targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step = step + 1
            seen = seen + len(batch)
            loss_sum += loss.item() * len(batch)
            correct += (outputs.argmax(1) == targets[batch]).sum().item()
            trained += [loss_sum / seen, 100 * correct / seen] if step % 3 != 1 else []
        model.eval()
        with torch.no_grad():
            outputs = model(test_images)
        tested.append(torch.nn.functional.cross_entropy(outputs, test_targets).item())
        tested.append(100 * (outputs.argmax(1) == test_targets).float().mean().item())
    for name, weight in torch.load(tmp_path / "net.pt", weights_only=True).items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=1e-4, atol=1e-5)
    printed = re.findall(r"== step: .* loss: ([\d.]+) \| acc: +([\d.]+)%", end.out)
    assert [float(number) for line in printed for number in line] == pytest.approx(
        trained, abs=1e-3
    )
    printed = re.findall(r"== test: .* loss: ([\d.]+) \| acc: +([\d.]+)%", end.out)
    assert [float(number) for line in printed for number in line] == pytest.approx(tested, abs=1e-3)


# Their options


def test_the_learning_rate_follows_the_batch_size(run, small_folder):
    """The learning rate follows the batch size unless told not to."""
    assert "lr 0.01 -> 0.0003125" in run("01_snsc.py", *QUICK, small_folder).out
    assert "lr 0.01 -> 0.01" in run("01_snsc.py", *QUICK, small_folder, "--lr-scaling", "none").out


@pytest.mark.parametrize("script", IN_PROCESS)
def test_the_learning_rate_climbs_to_its_peak_in_the_warm_up(
    run, small_folder, monkeypatch, script
):
    rates = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self))
    )
    given = [*QUICK, small_folder, "--lr", 0.3, "--lr-scaling", "none", "--epochs", 2]
    end = run(script, *given, "--warmup-epochs", 1.3)  # 4 of 6 steps
    assert "lr 0.3 -> 0.3 | seed 0, 1.3 epochs of warm-up\n" in end.out
    assert rates == pytest.approx([0.075, 0.15, 0.225, 0.3, 0.3, 0.3])
    del rates[:]
    assert "warm-up" not in run(script, *given).out and rates == [0.3] * 6


def test_a_test_folder_beside_val_is_said_to_be_unused(run, small_folder):
    given = ["01_snsc.py", *QUICK, small_folder, "--epochs", 1]
    said = f"{small_folder}/test is not used, because there is a val/ too\n"
    assert said not in run(*given).out
    shutil.copytree(small_folder / "test", small_folder / "val")
    assert said in run(*given).out


# They fail in one line


def one_class(folder):
    shutil.rmtree(folder / "train" / "dog")
    shutil.rmtree(folder / "test" / "dog")


def break_train(folder):
    (folder / "train").rename(folder / "training")


def empty_class(folder):
    (folder / "train" / "empty").mkdir()
    (folder / "test" / "empty").mkdir()


def truncate(folder):
    file = folder / "train" / "dog" / "003.png"
    file.write_bytes(file.read_bytes()[:500])


def write_text(folder):
    (folder / "test" / "cat" / "notes.jpg").write_text("not an image")


@pytest.mark.parametrize("script", IN_PROCESS)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--dataset", "imagenet21k"], "argument --dataset: invalid choice: 'imagenet21k'"),
        (
            ["--dataset", "folder", "--data-dir", "FOLDER", break_train],
            "--data-dir FOLDER has no train/: expected train/CLASS/*.jpg",
        ),
        (
            ["--dataset", "folder", "--data-dir", "FOLDER", empty_class],
            "FOLDER/train/empty has no images (.jpg, .png, ...): put some there",
        ),
        (
            ["--dataset", "folder", "--data-dir", "FOLDER", truncate],
            "train/dog/003.png cannot be read as an image",
        ),
        (
            ["--dataset", "folder", "--data-dir", "FOLDER", write_text],
            "test/cat/notes.jpg cannot be read as an image",
        ),
        (
            ["--dataset", "folder", "--data-dir", "FOLDER", one_class],
            "1 class in FOLDER/train: expected 2 or more, one folder for each",
        ),
        (
            ["--log-file", ROOT / "Makefile"],
            "Makefile holds lines that are not run records: name another file",
        ),
        (
            ["--seed", 2**33],
            "argument --seed: '8589934592' given, expected a whole number from 0 to 4294967296",
        ),
        (
            ["--dataset", "cifar10", "--data-dir", "FOLDER"],
            "cannot read cifar10 in FOLDER (Dataset not found",
        ),
        (
            ["--dataset", "mnist", "--data-dir", "FOLDER"],
            "cannot read mnist in FOLDER (Dataset not found",
        ),
        (
            ["--batch-size", 0],
            "argument --batch-size: '0' given, expected a whole number of 2 or more",
        ),
        (["--epochs", 0], "argument --epochs: '0' given, expected a whole number of 1 or more"),
        (
            ["--epochs", "many"],
            "argument --epochs: 'many' given, expected a whole number of 1 or more",
        ),
        (["--limit", 0], "argument --limit: '0' given, expected a whole number of 2 or more"),
        (["--limit", 1], "argument --limit: '1' given, expected a whole number of 2 or more"),
        (["--lr", "-0.1"], "argument --lr: '-0.1' given, expected a number above 0"),
        (["--lr", "nan"], "argument --lr: 'nan' given, expected a number above 0"),
        (["--arch", "resnet19"], "--arch resnet19: no such model in torchvision; try resnet18"),
        (["--log-file", "FOLDER/train/cat/000.png/log.jsonl"], "argument --log-file: cannot write"),
        (["--save", "/proc/no/net.pt"], "argument --save: cannot write"),
        (["--learning-rate", 1], "unrecognized arguments: --learning-rate 1"),
    ],
    ids=lambda value: (
        None if isinstance(value, str) else " ".join(getattr(v, "__name__", str(v)) for v in value)
    ),
)
def test_a_mistake_is_one_line_and_exit_code_2(run, small_folder, script, given, expected):
    for spoil in filter(callable, given):
        spoil(small_folder)
    end = run(
        script, *(str(v).replace("FOLDER", str(small_folder)) for v in given if not callable(v))
    )
    assert end.code == 2
    assert len(end.err.splitlines()) == 1 and end.out == ""
    assert (
        end.err.startswith(f"{script}: error: ")
        and expected.replace("FOLDER", str(small_folder)) in end.err
    )


def test_a_damaged_image_found_in_mid_run_is_one_line(large_folder):
    (large_folder / "train" / "dog" / "003.jpg").write_bytes(b"\xff\xd8 nothing")
    process = start("01_snsc.py", "--dataset", "folder", "--data-dir", large_folder, "--workers", 2)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and len(err.splitlines()) == 1
    assert err.startswith("01_snsc.py: error: ") and "dog/003.jpg cannot be read as an image" in err


# Ctrl-C


def session_members(sid):
    """The living processes of a session."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == sid and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the terminal's process group", "the main process alone"])
# quick steps, and steps of seconds that Python cannot interrupt
@pytest.mark.parametrize("batch", [2, 64])
def test_ctrl_c_ends_a_run_with_one_line_and_leaves_no_workers(tmp_path, to, batch):
    write_images(tmp_path, "train", (260, 300), per_class=130, suffix=".jpg")
    write_images(tmp_path, "val", (260, 300), per_class=4, suffix=".jpg")
    given = ["--dataset", "folder", "--data-dir", tmp_path, "--batch-size", batch, "--workers", 2]
    process = start("01_snsc.py", *given)
    read_until(process, "global batch")
    while len(session_members(process.pid)) < 3:  # until the workers are there
        time.sleep(0.1)
    time.sleep(2)  # into the first steps
    send = os.killpg if to.startswith("the terminal") else os.kill
    send(process.pid, signal.SIGINT)
    process.wait(300)
    deadline = time.monotonic() + 3  # killed: workers that are left to themselves notice after 5 s
    while session_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert session_members(process.pid) == []
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.strip() == "01_snsc.py: stopped by Ctrl-C" and "Traceback" not in out
