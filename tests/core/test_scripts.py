"""The scripts as users run them: they learn, they agree with each other, they fail in one line."""

import json
import os
import re
import shutil
import signal
import time

import psutil
import pytest
import torch
from images import write_images
from processes import ROOT, finished, gone, read_until, start
from rungs import IN_PROCESS, QUICK, SCRIPTS

from common import data
from common.memory import MemoryImages

# They learn


def test_a_first_run_sees_loss_fall_and_test_accuracy_rise(run, tmp_path, monkeypatch):
    """And needs no network."""
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(
            f"socket.socket.{name}", lambda *_: pytest.fail("it asked for the network")
        )
    log = tmp_path / "log.jsonl"
    given = ["--arch", "small_net", "--lr", 0.2, "--epochs", 2, "--limit", 2000, "--batch-size", 64]
    end = run("01_snsc.py", *given, "--log-file", log)
    assert (end.code, end.err) == (0, "")
    first, last = (json.loads(line) for line in log.read_text().splitlines())
    assert last["train_loss"] < first["train_loss"] and last["test_acc"] > first["test_acc"] + 3
    assert "done: test accuracy" in end.out


@pytest.mark.parametrize("script", [*IN_PROCESS, "07_fsdp.py"])
def test_images_are_learned_in_a_new_order_while_the_learning_rate_climbs(
    run, tmp_path, monkeypatch, script
):
    """Of 50 images, one is in no batch of seven: batch norm could not train on it alone.

    Training images alone are augmented, and nothing is written unless a flag asks for it.
    """
    write_images(tmp_path, "train", (32, 32), per_class=25)
    write_images(tmp_path, "test", (32, 32))
    fetched = {50: [], 24: []}
    rates = []
    cropped = []
    states = []  # of the random numbers, before each crop
    seeds = []

    def crop(images, *given, original=data.crop_and_flip):
        cropped.append(len(images))
        states.append(torch.get_rng_state().tolist())
        return original(images, *given)

    def fetch(self, indices, original=MemoryImages.__getitems__):
        fetched[len(self)] += indices
        return original(self, indices)

    def step(self, original=torch.optim.SGD.step):
        rates.append(self.param_groups[0]["lr"])
        return original(self)

    def manual_seed(seed, original=torch.manual_seed):
        seeds.append(seed)
        return original(seed)

    monkeypatch.setattr(torch, "manual_seed", manual_seed)
    monkeypatch.setattr(data, "crop_and_flip", crop)
    monkeypatch.setattr(MemoryImages, "__getitems__", fetch)
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    given = ["--dataset", "folder", "--data-dir", tmp_path, "--arch", "small_net"]
    given += ["--batch-size", 7, "--epochs", 3, "--seed", 5, "--lr", 4, "--warmup-epochs", 1.3]
    end = run(script, *given)
    assert end.code == 0, end.err
    assert "test accuracy 100.00%" in end.out
    assert "== step: [  7/7] [1/3]" in end.out
    assert "lr 4 -> 0.109375\n" in end.out and "| seed 5, 1.3 epochs of warm-up\n" in end.out
    assert rates == pytest.approx([0.109375 * min(1, (step + 1) / 9) for step in range(21)])

    if script[:2] in ("03", "05", "07"):
        sampler = torch.utils.data.DistributedSampler(range(50), 1, 0, seed=5)
    else:
        generator = torch.Generator().manual_seed(5)
        sampler = torch.utils.data.RandomSampler(range(50), generator=generator)
    for epoch in range(3):
        if script[:2] in ("03", "05", "07"):
            sampler.set_epoch(epoch)
        assert fetched[50][49 * epoch : 49 * (epoch + 1)] == list(sampler)[:49]
    assert fetched[24] == 3 * list(range(24))
    assert cropped == 21 * [7]
    assert len(set(map(tuple, states))) == 21, "each batch of each epoch is cropped in its own way"
    second = [2**16 * (5 + 1)] if script[:2] in ("03", "05", "07") else []  # and rank 0
    if script.startswith("07"):
        second = [second[0] + epoch for epoch in range(3)]
    assert seeds == [5, *second]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test", "train"]


# They agree


@pytest.mark.skipif(torch.accelerator.is_available(), reason="exact on a CPU only")
def test_dataparallel_trains_exactly_as_one_process(run, small_folder, tmp_path):
    """To the bit, however often each of them prints. test_ladder.py compares 03 to 05 and 07."""
    given = ["--dataset", "folder", "--data-dir", small_folder, "--arch", "small_net"]
    given += ["--batch-size", 8, "--lr", 0.1, "--lr-scaling", "none", "--seed", 3, "--epochs", 2]
    given += ["--save", tmp_path / "net.pt"]

    def train(script, print_every):
        end = run(script, *given, "--print-every", print_every)
        assert end.code == 0, end.err
        assert ("DataParallel over 0 GPUs\n" in end.out) == script.startswith("02")
        numbers = re.findall(r"== test: .*loss: ([\d.]+) .*acc: +([\d.]+)", end.out)
        assert len(numbers) == 2
        return numbers, torch.load(tmp_path / "net.pt", weights_only=True)

    printed, weights = train("02_snmc_dp.py", 1)
    expected, parents = train("01_snsc.py", 100)
    assert printed == expected
    assert weights.keys() == parents.keys(), "no module. in front of a name"
    assert all(torch.equal(weights[name], parents[name]) for name in weights)


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


def empty_class(folder):
    (folder / "train" / "empty").mkdir()
    (folder / "test" / "empty").mkdir()


def no_classes(folder):
    shutil.rmtree(folder / "train")
    (folder / "train").mkdir()


SEED = "'8589934592' given, expected a whole number from 0 to 4294967296"
FOLDER = ["--dataset", "folder", "--data-dir", "FOLDER"]
# What the error says, and the flags.
MISTAKES = {
    "argument --dataset: invalid choice: 'imagenet21k'": ["--dataset", "imagenet21k"],
    "--data-dir FOLDER/test has no train/: expected train/CLASS/*.jpg": [
        *FOLDER[:3],
        "FOLDER/test",
    ],
    "FOLDER/train has no class folders: expected": [*FOLDER, no_classes],
    "FOLDER/train/empty has no images (.jpg, .png, ...): put some": [*FOLDER, empty_class],
    "1 class in FOLDER/train: expected 2 or more, one folder for each": [*FOLDER, one_class],
    "Makefile holds lines that are not run records": ["--log-file", ROOT / "Makefile"],
    f"argument --seed: {SEED}": ["--seed", 2**33],
    "cannot read cifar10 in FOLDER (Dataset not found": ["--dataset", "cifar10", *FOLDER[2:]],
    "--batch-size: '1' given, expected a whole number of 2 or more": ["--batch-size", 1],
    "--epochs: 'many' given, expected a whole number of 1 or more": ["--epochs", "many"],
    "--lr: 'nan' given, expected a number above 0": ["--lr", "nan"],
    "--arch resnet19: no such model in torchvision; try resnet18": ["--arch", "resnet19"],
    "argument --log-file: cannot write": ["--log-file", "FOLDER/train/cat/000.png/log"],
    "argument --save: cannot write": ["--save", "/proc/no/net.pt"],
    "unrecognized arguments: --learning-rate 1 (all flags: 03_mnmc_ddp_launch.py --help; "
    "from another script: docs/coming-from.md)": ["--learning-rate", 1],
}


def test_a_mistake_is_one_line_and_exit_code_2(run, small_folder, tmp_path):
    """All of them in 03. The other scripts read the same flags and data: one of each kind."""
    faults = []
    for number, (expected, given) in enumerate(MISTAKES.items()):
        folder = tmp_path / f"mistake{number}"
        for split in ("train", "test"):
            shutil.copytree(small_folder / split, folder / split)
        for spoil in filter(callable, given):
            spoil(folder)
        words = [str(v).replace("FOLDER", str(folder)) for v in given if not callable(v)]
        # 04 would start processes, which find the data.
        scripts = {0: SCRIPTS, 1: IN_PROCESS}.get(number, SCRIPTS[2:3])
        for script in scripts:
            end = run(script, *words)
            is_right = end.code == 2 and end.out == "" and len(end.err.splitlines()) == 1
            is_right = is_right and end.err.startswith(f"{script}: error: ")
            if not (is_right and expected.replace("FOLDER", str(folder)) in end.err):
                faults.append((script, words, end))
    assert not faults


def test_a_damaged_image_found_in_mid_run_is_one_line(run, large_folder):
    (large_folder / "train" / "dog" / "003.jpg").write_bytes(b"\xff\xd8 nothing")
    given = ["--dataset", "folder", "--data-dir", large_folder, "--arch", "small_net"]
    end = run("01_snsc.py", *given, "--batch-size", 8, "--workers", 2)
    assert end.code == 2 and len(end.err.splitlines()) == 1, end.err
    assert end.err.startswith("01_snsc.py: error: ")
    assert "dog/003.jpg cannot be read as an image" in end.err
    assert "24 train and 8 test images of 3x224x224, read from files, 2 classes" in end.out


# Ctrl-C


@pytest.mark.slow
# quick steps, and steps of seconds that Python cannot interrupt
@pytest.mark.parametrize(
    ("to", "batch"), [("the terminal's process group", 2), ("the main process alone", 64)]
)
def test_ctrl_c_ends_a_run_with_one_line_and_leaves_no_workers(tmp_path, to, batch):
    write_images(tmp_path, "train", (260, 300), per_class=130, suffix=".jpg")
    write_images(tmp_path, "val", (260, 300), per_class=4, suffix=".jpg")
    given = ["--dataset", "folder", "--data-dir", tmp_path, "--batch-size", batch, "--workers", 2]
    process = start("01_snsc.py", *given)
    read_until(process, "global batch")
    workers = []
    while len(workers) < 2:
        workers = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.1)
    time.sleep(2)  # into the first steps
    send = os.killpg if to.startswith("the terminal") else os.kill
    send(process.pid, signal.SIGINT)
    code, out, err = finished(process)
    assert code == 130
    assert err.strip() == "01_snsc.py: stopped by Ctrl-C" and "Traceback" not in out
    assert gone(workers, 3), "killed: workers that are left to themselves notice after 5 s"
