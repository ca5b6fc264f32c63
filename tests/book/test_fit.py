"""tools/fit.py: its formulas by hand, its counts beside real tensors, its memory as measured."""

import re
import sys

import pytest
import torch
import torchvision
from processes import ROOT
from torch import nn

from common.errors import one_line_errors
from tools import fit
from tools.records import group, records, select

# Formulas


BLOCK = fit.Part([torch.Size([1000])], activations=16000, inputs=1000, recomputed=15500)
FOUR_BLOCKS = fit.Model(fit.Part([], 0, 0), [BLOCK] * 4)  # 16000 bytes of weights
LIGHT = FOUR_BLOCKS._replace(blocks=[BLOCK._replace(activations=0)] * 4)


def peak(way, shards=1, model=FOUR_BLOCKS, optimizer="momentum", **options):
    setting = fit.Setting("", way, shards, **options)
    return fit.peak(model, setting, optimizer)


def test_each_row_can_be_computed_by_hand():
    assert peak("plain") == ("forward", 16000, 16000, 16000, 64000, 0)
    assert peak("ddp", 4) == ("forward", 16000, 32000, 16000, 64000, 0), "and the buckets"
    assert peak("zero1", 4) == ("forward", 16000, 32000, 4000, 64000, 0)
    assert peak("zero1", 3).optimizer == 8000, "whole tensors: the rank with two of the four"
    # FSDP: the last block is gathered into a buffer, and copied from it
    assert peak("fsdp", 4) == ("forward", 4000, 4000, 4000, 64000, 8000)
    assert peak("fsdp", 4, reshard=False) == ("forward", 4000, 4000, 4000, 64000, 20000)
    assert peak("fsdp", 3).weights == 4 * 4 * 334, "rank 0 has 334 of 1000 rows"
    for optimizer, states in (("sgd", 0), ("momentum", 1), ("adam", 2)):
        step = ("step", 16000, 16000, states * 16000, 0, 16000)
        assert peak("plain", model=LIGHT, optimizer=optimizer) == step, "a copy of the gradients"
    half = FOUR_BLOCKS._replace(bytes_to_compute=2)
    assert peak("fsdp", 4, model=half) == ("forward", 4000, 4000, 4000, 64000, 4000)
    # with DDP, autocast keeps a bf16 copy of the weights
    assert peak("ddp", 4, model=half) == ("forward", 16000, 32000, 16000, 64000, 8000)


def test_the_backward_pass_of_fsdp_holds_four_blocks():
    """The tensors and gradients of one block, the next block's buffer, the last one's gradients."""

    def temporary(model, moment, **options):
        setting = fit.Setting("", "fsdp", 4, **options)
        moments = fit.moments(model, setting, "momentum", True)
        return [memory.temporary for memory in moments if memory.moment == moment]

    backward = [8000, 12000, 12000, 16000, 12000, 16000, 8000, 12000]
    assert temporary(LIGHT, "backward") == backward
    assert temporary(LIGHT, "forward") == [8000, 8000, 12000, 8000, 12000, 8000, 12000, 8000]
    once = [16000, 20000, 16000, 20000, 12000, 16000, 8000, 12000]
    assert temporary(LIGHT, "backward", reshard=False) == once, "gathered once"
    outside = LIGHT._replace(outside=fit.Part([torch.Size([100])], 0, 0))
    # 400 bytes stay gathered, and their gradients too
    assert temporary(outside, "backward") == [size + 800 for size in backward]


def test_checkpointing_keeps_the_inputs_and_computes_one_block_again():
    def activations(way):
        setting = fit.Setting("", way, 4, checkpointed=True)
        moments = fit.moments(FOUR_BLOCKS, setting, "momentum", True)
        return [memory.activations for memory in moments if memory.moment == "backward"]

    assert activations("ddp") == [19500, 18500, 17500, 16500]
    assert activations("fsdp") == [19500, 3000, 18500, 2000, 17500, 1000, 16500, 0]


# Counting


def count(model, images):
    targets = torch.empty(len(images), dtype=torch.long, device="meta")
    return fit.count_model(model.to("meta"), images.to("meta"), targets)


def activations(counted):
    return sum(part.activations for part in [*counted.blocks, counted.outside])


def really_saved(model, images):
    """Return the bytes that autograd saves on the CPU, found by their addresses."""
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        outputs = model(images)
        nn.CrossEntropyLoss()(outputs, torch.zeros(len(images), dtype=torch.long))
    return sum(storage.nbytes() for storage in saved.values())


def vision_transformer():
    return torchvision.models.VisionTransformer(
        image_size=64, patch_size=8, num_layers=3, num_heads=4, hidden_dim=32, mlp_dim=64
    )


@pytest.mark.parametrize("build", [vision_transformer, torchvision.models.resnet18])
def test_as_many_bytes_are_counted_as_autograd_saves(build):
    images = torch.zeros(3, 3, 64, 64)
    assert activations(count(build(), images)) == really_saved(build(), images)


# Measured memory


def test_the_memory_that_was_measured_is_computed():
    """results/memory: of each variant, the peak on two CPU cores."""
    measured = select(records("memory"), device="cpu", model="resnet18", repeat=0)
    for (size, batch_size), runs in group(measured, "image_size", "batch_size").items():
        model = fit.count_arch("resnet18", size, batch_size)
        for run in runs:
            setting = fit.Setting(**{name: run[name] for name in fit.Setting._fields})
            computed = fit.peak(model, setting, "momentum", foreach=False)
            assert computed.total == pytest.approx(run["peak_bytes"], rel=0.1), run["variant"]


# The tool


@pytest.fixture
def printed(monkeypatch, capsys):
    """A function that runs tools/fit.py with these arguments, and returns what it prints."""

    def printed(arguments):
        monkeypatch.setattr(sys, "argv", ["fit.py", *arguments.split()])
        fit.main(fit.parse_args())
        return capsys.readouterr().out

    return printed


def test_the_page_shows_what_the_tool_prints(printed):
    recorded = {record["command"]: record["output"] for record in records("output")}
    page = (ROOT / "docs/07_fsdp.md").read_text()
    commands = re.findall(r"<!-- output: (python tools/fit\.py (.*)) -->", page)
    assert commands
    for command, arguments in commands:
        assert printed(arguments).rstrip() == recorded[command].rstrip()


NUMBERS = "--weights-m 1000 --activations-mb-per-image 160 --blocks 10 --batch-size 10 --gpus 16"


def test_the_smallest_change_that_fits_is_named(printed):
    def last(arguments):
        return printed(arguments).splitlines()[-1]

    zero = "smallest change that fits: DDP, ZeroRedundancyOptimizer"
    assert last(f"{NUMBERS} --memory-gb 20") == zero, "a margin of 10 % stays free"
    assert last(f"{NUMBERS} --memory-gb 22.4").endswith(" fits: DDP")
    several = printed(f"{NUMBERS} --gpus-per-machine 4 --memory-gb 9")
    assert re.search(
        r"^HSDP, 4 x 4 shards +1\.00 +1\.00 +1\.00 +1\.44 +1\.20 +5\.64 yes", several, re.M
    )
    large = "--weights-m 100 --activations-mb-per-image 1000 --batch-size 512 --gpus 8"
    wanted = "nothing fits; try --batch-size 128 (DDP, checkpointing)"
    assert last(f"{large} --memory-gb 16").startswith(wanted)
    heavy = "--weights-m 7000 --activations-mb-per-image 1 --batch-size 1 --gpus"
    for given, wanted in (("1", 8), ("3", 6), ("5", 8), ("2 --gpus-per-machine 2", 8)):
        said = last(f"{heavy} {given} --memory-gb 20")
        assert said.startswith(f"nothing fits; try --gpus {wanted} (FSDP"), given
    # batch normalization cannot train on one image of one pixel
    pixels = "--arch resnet50 --image-size 32 --batch-size 2 --gpus 8"
    assert last(f"{pixels} --memory-gb 0.125").startswith("nothing fits; try --gpus 16 (FSDP")
    assert last(f"{heavy} 2 --memory-gb 2").startswith("nothing fits; try tensor parallelism")
    assert last(f"{heavy} 1 --memory-gb 1e3") == "smallest change that fits: one GPU"


def test_models_that_need_their_own_arguments_are_counted(printed):
    for arch in ("regnet_x_400mf", "maxvit_t"):
        out = printed(f"--arch {arch} --batch-size 2 --gpus 2 --memory-gb 24")
        assert "smallest change that fits: DDP" in out, arch


def test_a_mistake_is_one_line(printed, capsys):
    for arguments, message in (
        ("--arch vit_b_17 --batch-size 2 --gpus 2", "--arch vit_b_17: no such model of images"),
        ("--arch vit_b_16 --image-size 30 --batch-size 2 --gpus 2", "images of 30x30 (Input shape"),
        ("--weights-m 5 --batch-size 2 --gpus 2", "give --arch, or both --weights-m and"),
        (
            "--arch vit_b_16 --batch-size 2 --gpus 12",
            "--gpus-per-machine 8 of --gpus 12: expected a number that divides",
        ),
    ):
        with pytest.raises(SystemExit) as end, one_line_errors():
            printed(f"{arguments} --memory-gb 24")
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and ".py: error: " in line and message in line
