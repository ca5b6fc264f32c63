"""The scripts on a pretend accelerator: what would differ or fail on a GPU, found without one.

They run unmodified and under their own launchers. What the accelerator pretends, and what it cannot
pretend, is in helpers/accelerator/pretend.py.
"""

import functools
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from imagenet_runs import SMALL_06, final, new_folder
from images import write_images
from on_accelerator import Accelerator, built, learned
from one_device import check_two_ranks_on_one_device, share_device
from processes import ROOT, without_gloo
from ranks import Ranks
from rungs import QUICK
from test_template import copy_template

from common import models

pytestmark = pytest.mark.slow
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]


@pytest.fixture(scope="session")
def folder_of_the_accelerator():
    return built()


@pytest.fixture
def accelerator(folder_of_the_accelerator, tmp_path):
    return Accelerator(folder_of_the_accelerator, tmp_path / "report.jsonl")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """An ImageFolder tree of 8x8 images: 40 to train on and 15 to evaluate."""
    root = tmp_path_factory.mktemp("images")
    write_images(root, "train", (8, 8), per_class=20)
    return write_images(root, "test", (8, 8), per_class=9)


def output_of(command, env, folder=ROOT):
    """Run a command in a folder, and return what it prints."""
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return without_gloo(done.stdout)


LAUNCHED = {
    "01": ["01_snsc.py"],
    "02": ["02_snmc_dp.py"],
    "03": [*TORCHRUN, "03_mnmc_ddp_launch.py"],
    "04": ["04_mnmc_ddp_mp.py", "--nproc-per-node=2"],
}


def on_cpus(folder, processes, *flags):
    """Return what 01 or 03 learns on so many processes without the accelerator."""
    script = "01_snsc.py" if processes == 1 else "03_mnmc_ddp_launch.py"
    ranks = Ranks(folder, processes, flags, script=script)
    assert ranks.wait() == [0] * processes, ranks.output()
    return learned(ranks.output())


@pytest.mark.parametrize("script", LAUNCHED)
def test_devices_learn_the_same_as_cpus(script, accelerator, images, tmp_path):
    devices = 1 if script in ("01", "02") else 2
    flags = [*QUICK, images, "--workers", 0]
    if devices == 2:
        flags += ["--arch", "small_net", "--sync-bn"]
    command = [sys.executable, *LAUNCHED[script], *flags]
    output = output_of(command, accelerator.environment(devices))
    assert ("device: pretend" if devices == 1 else "pretend:0-1") in output
    assert learned(output) == on_cpus(tmp_path, devices, *flags)


def build_on_the_device(rank):
    """fully_shard moves a model from the CPU to CUDA, but torch cannot move it so to a device of
    the kind that this accelerator is.
    """

    def build(args, dataset, original=models.build_model):
        return original(args, dataset).to(torch.accelerator.current_accelerator())

    models.build_model = build


def test_two_devices_train_shards_as_two_cpus(accelerator, images, tmp_path):
    """fully_shard orders its streams before it uses freed memory again, not when it frees it. The
    accelerator checks the latter, and would refuse mnist_net.
    """
    flags = [*QUICK, images, "--workers", 0, "--no-augment", "--sync-bn", "--arch", "small_net"]
    flags += ["--clip-grad", 1, "--checkpoint-activations", "--epochs", 1]
    flags += ["--checkpoints-path", tmp_path / "saved"]
    results = []
    for name in ("cpus", "devices"):
        (tmp_path / name).mkdir()
        options = {"script": "07_fsdp.py"}
        if name == "devices":
            options["prepare"] = functools.partial(on_accelerator, accelerator, build_on_the_device)
            options["env"] = accelerator.variables(2)
        given = [*flags, "--save", tmp_path / name / "model.pt"]
        ranks = Ranks(tmp_path / name, 2, given, **options)
        assert ranks.wait() == [0, 0], ranks.output()
        assert ("pretend:0-1" in ranks.output()) == (name == "devices")
        assert (tmp_path / "saved/epoch-1/.metadata").exists()
        shutil.rmtree(tmp_path / "saved")
        weights = torch.load(tmp_path / name / "model.pt", weights_only=True)
        results.append((learned(ranks.output()), weights))
    (on_cpus, weights_on_cpus), (on_devices, weights_on_devices) = results
    assert on_devices == on_cpus
    torch.testing.assert_close(weights_on_devices, weights_on_cpus, rtol=1e-3, atol=1e-4)


@pytest.fixture
def train_on(train, accelerator):
    """A function as `train`, whose ranks run on the accelerator."""

    def train_on(name, world_size, *flags, prepare=None, devices=None, **options):
        env = accelerator.variables(devices or world_size)
        prepare = functools.partial(on_accelerator, accelerator, prepare)
        return train(name, world_size, *flags, env=env, prepare=prepare, **options)

    return train_on


def on_accelerator(accelerator, prepare, rank):
    accelerator.prepare(rank)
    if prepare:
        prepare(rank)


EVERYTHING = ["--epochs", 2, "--batch-size", 20, "--accumulate", 2, "--ema", 0.9, "--sync-bn"]
EVERYTHING += ["--clip-grad", 1, "--lr", 0.5, "--warmup-epochs", 1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_06_learns_the_same_as_on_the_cpu(train, train_on, one_each, tmp_path, world_size):
    on_cpu = train("cpu", world_size, one_each, *EVERYTHING)
    on_device = train_on("device", world_size, one_each, *EVERYTHING, "--workers", 1)
    for ranks in (on_cpu, on_device):
        assert ranks.wait() == [0] * world_size, ranks.output()
    assert "pretend:0" in on_device.output()
    # Not asked for, and it would cost time. One rank has none.
    assert ("communication" in on_device.output()) == (world_size == 1)
    assert learned(on_device.output()) == learned(on_cpu.output())
    states = [final(tmp_path / name) for name in ("device", "cpu")]
    for part in ("model", "ema", "totals"):
        found, expected = (state[part] for state in states)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def overflow_at_first(rank):
    """Let the gradients of the first step overflow, as they often do in fp16."""

    def scale(self, loss, original=torch.amp.GradScaler.scale):
        factor = math.inf if self._scale is None else 1  # _scale is None until the first call
        return original(self, loss) * factor

    torch.amp.GradScaler.scale = scale


def test_06_in_fp16_trains_on_after_an_overflow(train_on, one_each, tmp_path):
    """Also from a checkpoint without the scale of the loss, of a run in float32."""
    flags = [one_each, "--batch-size", 8, "--lr", 0.1]
    assert train_on("run", 1, *flags, "--epochs", 1).wait() == [0]
    flags += ["--epochs", 3, "--amp", "fp16", "--resume"]
    ranks = train_on("run", 1, *flags, prepare=overflow_at_first)
    assert ranks.wait() == [0], ranks.output()
    losses = [float(loss) for loss in re.findall("== step: .* loss: ([a-z0-9.]+)", ranks.output())]
    assert len(losses) == 10 and all(map(math.isfinite, losses[1:]))
    state = final(tmp_path / "run")
    assert state["scaler"]["scale"] == 2**15, "halved once, by the overflow"
    momentum = [entry["momentum_buffer"] for entry in state["optimizer"]["state"].values()]
    assert all(tensor.isfinite().all() for tensor in momentum)


def test_06_resumes_on_other_ranks_in_another_memory_format(train, train_on, one_each):
    flags = [one_each, "--batch-size", 20, "--ema", 0.9, "--epochs"]
    outputs = []
    for start, name in ((train_on, "device"), (train, "cpu")):
        assert start(name, 2, *flags, 1).wait() == [0, 0]
        ranks = start(name, 1, *flags, 2, "--resume", "--channels-last")
        assert ranks.wait() == [0], ranks.output()
        assert "after step 2 of 4" in ranks.output()
        outputs.append(learned(ranks.output()))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("flags", [[], ["--ema", 0.9, "--clip-grad", 1], ["--amp", "fp16"]])
def test_a_step_of_06_does_not_wait_for_the_device(flags, accelerator, tmp_path):
    waits = []
    for steps in (4, 8):
        given = [*SMALL_06, "--dummy", 16 * steps, "--batch-size", 16, "--epochs", 1, *flags]
        given += ["--eval-every", 0, "--print-every", 1000]
        given += ["--checkpoints-path", tmp_path / f"steps-{steps}"]
        ranks = Ranks(
            tmp_path,
            1,
            given,
            env=accelerator.variables(1),
            prepare=accelerator.prepare,
            script=str(ROOT / "06_imagenet.py"),  # by this name, its losses are not logged
        )
        assert ranks.wait() == [0], ranks.output()
        waits.append(accelerator.reports()[0]["waits"])
    assert waits[0] == waits[1] > 0


def test_two_ranks_may_share_a_device(train, train_on, one_each):
    on_device = functools.partial(train_on, devices=1, prepare=share_device)
    check_two_ranks_on_one_device(train, on_device, "pretend:0", one_each)


def test_a_slurm_step_learns_the_same_as_two_cpus(accelerator, images, tmp_path, slurm):
    flags = [*QUICK, images, "--workers", 0]
    step = ["srun", "--nodes=1", "--ntasks=2", sys.executable, "05_mnmc_ddp_slurm.py", *flags]
    output = output_of(step, slurm.env | accelerator.environment(2))
    assert "pretend:0-1" in output
    assert learned(output) == on_cpus(tmp_path, 2, *flags)


def test_the_template_resumes_with_each_rank_on_its_own_device(accelerator, tmp_path):
    folders = [new_folder(tmp_path, name) for name in ("device", "cpu")]
    outputs = []
    for folder, env in zip(folders, (accelerator.environment(2), os.environ), strict=True):
        copy_template(folder)
        command = [sys.executable, *TORCHRUN, "train.py", "--batch-size", 500, "--epochs"]
        output_of([*command, 1], env, folder)
        outputs.append(output_of([*command, 2, "--resume"], env, folder))
    assert learned(outputs[0]) == learned(outputs[1])
    assert accelerator.reports()[1]["allocated"][0] == 0, (
        "nothing of rank 1 on the device of rank 0"
    )


def test_preflight_checks_the_devices(accelerator):
    command = [sys.executable, *TORCHRUN, "launch/preflight.py"]
    output = output_of(command, accelerator.environment(2))
    assert "preflight: 0 of 12 checks failed, 0 with a warning" in output
    assert "pretend:1 (pretend accelerator)" in output
