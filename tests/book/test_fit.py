"""tools/fit.py: its formulas by hand, its counts beside real tensors, its memory as measured."""

import json
import re
import sys

import pytest
import torch
import torchvision
from processes import ROOT, start
from torch import nn
from torch.nn import functional as F

from common.errors import UserError, one_line_errors
from tools import fit
from tools.bench import memory as bench
from tools.book import pictures, tables
from tools.book.phrases import Phrases

# Formulas


BLOCK = fit.Part([torch.Size([1000])], activations=16000, inputs=1000, recomputed=15500)
FOUR_BLOCKS = fit.Model(fit.Part([], 0, 0), [BLOCK] * 4)  # 16000 bytes of weights


def peak(way, shards=1, model=FOUR_BLOCKS, optimizer="momentum", foreach=False, **options):
    setting = fit.Setting("", way, shards, **options)
    return fit.peak(model, setting, optimizer, foreach)


def test_each_row_can_be_computed_by_hand():
    assert peak("plain") == ("forward", 16000, 16000, 16000, 64000, 0)
    assert peak("ddp", 4) == ("forward", 16000, 32000, 16000, 64000, 0), "and the buckets"
    assert peak("zero1", 4) == ("forward", 16000, 32000, 4000, 64000, 0)
    # FSDP: the last block is gathered into a buffer, and copied from it
    assert peak("fsdp", 4) == ("forward", 4000, 4000, 4000, 64000, 8000)
    assert peak("fsdp", 4, reshard=False) == ("forward", 4000, 4000, 4000, 64000, 20000)


@pytest.mark.parametrize("shards", [1, 2, 5, 10])
def test_what_is_sharded_shrinks_with_the_ranks(shards):
    for way, columns in (("ddp", []), ("zero1", [3]), ("fsdp", [1, 2, 3])):
        one, many = (fit.held(FOUR_BLOCKS, fit.Setting("", way, n)) for n in (1, shards))
        for column in (1, 2, 3):
            share = shards if column in columns else 1
            if (way, column) == ("zero1", 3):  # whole tensors: the rank with the most of four
                share = 4 / -(-4 // shards)
            assert many[column] == pytest.approx(one[column] / share), (way, column)


def test_checkpointing_keeps_the_inputs_and_computes_one_block_again():
    moments = list(
        fit.ddp_moments(FOUR_BLOCKS, fit.Setting("", "ddp", checkpointed=True), "momentum", False)
    )
    backward = [memory for memory in moments if memory.moment == "backward"]
    assert [memory.activations for memory in backward] == [19500, 18500, 17500, 16500]
    assert [memory.gradients for memory in backward] == [16000, 20000, 24000, 28000]
    assert peak("ddp", 4, checkpointed=True).total < peak("ddp", 4).total - 40000


def test_the_backward_pass_of_fsdp_holds_four_blocks():
    """The tensors and gradients of one block, the next block's buffer, the last one's gradients."""
    heavy = FOUR_BLOCKS._replace(blocks=[BLOCK._replace(activations=0)] * 4)
    moments = list(fit.fsdp_moments(heavy, fit.Setting("", "fsdp", 4), "momentum", False))
    backward = [memory.temporary for memory in moments if memory.moment == "backward"]
    assert backward == [8000, 12000, 12000, 16000, 12000, 16000, 8000, 12000]
    forward = [memory.temporary for memory in moments if memory.moment == "forward"]
    assert forward == [8000, 8000, 12000, 8000, 12000, 8000, 12000, 8000]
    assert moments[-1] == ("step", 4000, 4000, 4000, 0, 2000), "copies a shard, twice"


def test_without_resharding_fsdp_gathers_once():
    """Each block's weights stay from its forward pass to the end of its backward pass."""
    setting = fit.Setting("", "fsdp", 4, reshard=False)
    moments = list(fit.fsdp_moments(FOUR_BLOCKS, setting, "momentum", False))
    forward = [memory.temporary for memory in moments if memory.moment == "forward"]
    assert forward == [8000, 8000, 16000, 12000, 20000, 16000, 24000, 20000]
    backward = [memory.temporary for memory in moments if memory.moment == "backward"]
    assert backward == [16000, 20000, 16000, 20000, 12000, 16000, 8000, 12000]


def test_weights_outside_of_the_blocks_stay_gathered():
    """In the backward pass, their gradients stay, too."""
    outside = fit.Part([torch.Size([100])], 0, 0)
    model = FOUR_BLOCKS._replace(outside=outside)
    setting = fit.Setting("", "fsdp", 4)
    ours, plain = (
        [memory.temporary for memory in fit.fsdp_moments(each, setting, "momentum", False)]
        for each in (model, FOUR_BLOCKS)
    )
    more = [a - b for a, b in zip(ours, plain, strict=True)]
    assert more[:8] == [800] + 7 * [400], "and its buffer, until the first block is gathered"
    assert more[8:16] == 8 * [800]


def test_fsdp_computes_a_checkpointed_block_again():
    setting = fit.Setting("", "fsdp", 4, checkpointed=True)
    moments = list(fit.fsdp_moments(FOUR_BLOCKS, setting, "momentum", False))
    backward = [memory.activations for memory in moments if memory.moment == "backward"]
    assert backward == [19500, 3000, 18500, 2000, 17500, 1000, 16500, 0]


@pytest.mark.parametrize(
    ("optimizer", "states", "one", "everything"),
    [("sgd", 0, 1, 1), ("momentum", 1, 2, 1), ("adam", 2, 2, 1)],
)
def test_an_optimizer_keeps_state_and_copies_tensors(optimizer, states, one, everything):
    model = FOUR_BLOCKS._replace(blocks=[BLOCK._replace(activations=0)] * 4)
    memory = peak("plain", model=model, optimizer=optimizer)
    assert memory == ("step", 16000, 16000, states * 16000, 0, one * 4000)
    memory = peak("plain", model=model, optimizer=optimizer, foreach=True)
    assert memory == ("step", 16000, 16000, states * 16000, 0, everything * 16000)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"weight_decay": 1e-4}),
        (torch.optim.SGD, {"weight_decay": 1e-4, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {}),
    ],
)
@pytest.mark.parametrize("foreach", [False, True])
def test_the_copies_of_an_optimizer_are_those_of_torch(optimizer, options, foreach):
    """Seen by Watch, which tools/bench/memory.py measures with."""
    name = "adam" if optimizer is torch.optim.Adam else "sgd"
    name = "momentum" if "momentum" in options else name
    with bench.Watch() as watch:
        weights = [nn.Parameter(torch.zeros(size)) for size in (50_000, 20_000, 30_000)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        ours = optimizer(weights, lr=0.1, foreach=foreach, **options)
        ours.step()
        held = watch.now()
        watch.is_counting = True
        ours.step()
    copies = fit.step_copies([weight.shape for weight in weights], name, foreach)
    assert watch.peak - held == pytest.approx(copies, rel=0.01)


def test_shards_and_shares_are_those_of_torch():
    assert fit.shard_of(torch.Size([10, 3]), 4) == (3, 3), "rank 0 has three rows of ten"
    assert fit.shard_of(torch.Size([1, 5]), 4) == (1, 5)
    shapes = [torch.Size([n]) for n in (2, 9, 4, 3)]
    assert fit.largest_share(shapes, 2) == [(9,)], "the others have 4 + 3 + 2"
    assert sum(shape.numel() for shape in fit.largest_share(shapes, 1)) == 18


def test_bf16_halves_what_is_gathered_but_not_what_is_kept():
    half = FOUR_BLOCKS._replace(bytes_to_compute=2)
    assert peak("fsdp", 4, model=half) == ("forward", 4000, 4000, 4000, 64000, 4000)
    # with DDP, autocast keeps a bf16 copy of the weights
    assert peak("ddp", 4, model=half) == ("forward", 16000, 32000, 16000, 64000, 8000)


# Counting


def count(model, images):
    targets = torch.empty(len(images), dtype=torch.long, device="meta")
    return fit.count_model(model.to("meta"), images.to("meta"), targets)


def loss_of(batch_size, classes):
    """The bytes that the loss saves: log-probabilities, targets, and the sum of the weights."""
    return batch_size * (4 * classes + 8) + 4


def test_the_activations_of_linear_layers_are_counted():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    counted = count(model, torch.zeros(3, 10))
    first, second = counted.blocks  # ReLU has no weights, so it is outside of the blocks
    assert first.weights == 10 * 20 + 20 and second.weights == 20 * 5 + 5
    assert first.activations == first.inputs == 4 * 3 * 10
    assert counted.outside.activations == 4 * 3 * 20 + loss_of(3, 5), "the output of ReLU, once"
    assert second.activations == 0 == second.inputs, "ReLU has saved its input"


def test_with_bf16_the_loss_stays_float32():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)).bfloat16()
    counted = count(model, torch.zeros(3, 10, dtype=torch.bfloat16))
    assert counted.bytes_to_compute == 2
    total = sum(part.activations for part in counted.parts)
    assert total == 2 * 3 * 10 + 2 * 3 * 20 + loss_of(3, 5)


def test_the_attention_that_is_counted_computes_attention():
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    mask = torch.randn(5, 5)
    for given in ({}, {"attn_mask": mask}, {"is_causal": True}, {"scale": 0.5}):
        ours = fit.fused_attention(query, key, value, **given)
        theirs = F.scaled_dot_product_attention(query, key, value, **given)
        torch.testing.assert_close(ours, theirs)


def test_the_activations_of_a_convolution_are_counted():
    """The ReLU works in place: its output is the output of batch norm."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 6 * 6, 5),
    )
    total = sum(part.activations for part in count(model, torch.zeros(2, 3, 6, 6)).parts)
    images = 2 * 3 * 36
    output = 2 * 8 * 36
    statistics = 2 * 8
    assert total == 4 * (images + output + output + statistics) + loss_of(2, 5)


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
    counted = count(build(), images)
    assert sum(part.activations for part in counted.parts) == really_saved(build(), images)


def test_checkpointing_keeps_the_input_of_each_block_of_a_transformer():
    counted = count(vision_transformer(), torch.zeros(5, 3, 64, 64))
    *encoder, head = counted.blocks
    tokens = 4 * 5 * (64 + 1) * 32  # bytes of one activation between two blocks
    assert [block.inputs for block in encoder] == [tokens] * 3
    assert all(block.recomputed > 5 * tokens for block in encoder)
    # its input is not computed again
    assert all(block.recomputed == block.activations - tokens for block in encoder)
    assert head.weights == 32 * 1000 + 1000
    kept = fit.kept(counted, fit.Setting("", "ddp", checkpointed=True))
    norm = tokens + 2 * 4 * 5 * (64 + 1)  # the last one: its input, means and deviations
    images = 4 * 5 * 3 * 64 * 64
    # the input of the head is a view of all tokens, so it keeps all of them
    assert kept == images + 3 * tokens + norm + tokens + loss_of(5, 1000)
    assert kept < fit.kept(counted, fit.Setting("", "ddp")) / 3


def test_activations_grow_with_the_batch_and_halve_in_bf16():
    def kept(*given):
        return fit.kept(fit.count_arch("resnet18", 64, *given), fit.Setting("", "ddp"))

    assert kept(8) == pytest.approx(2 * kept(4), rel=0.01)
    indices = 8 * 8 * 64 * 16 * 16  # of the max pool, in int64 with and without bf16
    assert kept(8, "bf16") - indices == pytest.approx((kept(8) - indices) / 2, rel=0.01)


@pytest.mark.parametrize("arch", ["regnet_x_400mf", "vit_b_32", "maxvit_t", "googlenet"])
def test_models_that_need_their_own_arguments_are_built(arch):
    model = fit.build_on_meta(arch, 224)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    images = torch.empty(2, 3, 224, 224, device="meta")
    assert model(images).shape == (2, 1000)


# Measured memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "size", "batch_size", "checkpointed"),
    [
        ("resnet18", 32, 32, False),
        ("squeezenet1_1", 64, 8, False),
        ("squeezenet1_1", 64, 8, True),
    ],
)
def test_one_process_needs_what_is_computed(
    arch, size, batch_size, checkpointed, monkeypatch, capsys
):
    """Without a launch: the benchmark of one process, with each kind of activations."""
    given = ["--arch", arch, "--image-size", size, "--batch-size", batch_size, "--steps", 1]
    monkeypatch.setattr(sys, "argv", ["memory.py", *map(str, given)])
    setting = fit.Setting("", "plain", checkpointed=checkpointed)
    bench.measure(bench.parse_args(), setting)
    measured = json.loads(capsys.readouterr().out)
    model = fit.count_arch(arch, size, batch_size)
    computed = fit.peak(model, setting, foreach=False)
    assert measured["peak_bytes"] == pytest.approx(computed.total, rel=0.03)
    held = fit.held(model, setting)
    for name in ("weights", "gradients", "optimizer"):
        assert measured["held_bytes"][name] == pytest.approx(getattr(held, name), rel=0.001)


@pytest.mark.slow
def test_the_memory_benchmark_of_two_ranks_measures_what_is_computed(tmp_path):
    log = tmp_path / "log.jsonl"
    given = ["--arch", "resnet18", "--image-size", 32, "--batch-size", 16, "--steps", 1]
    given += ["--processes", 1, 2, "--repeats", 1, "--seed", 1, "--log-file", log]
    out, err = (process := start("tools/bench/memory.py", *given)).communicate(timeout=900)
    assert process.returncode == 0, err
    records = [json.loads(line) for line in log.read_text().splitlines()]
    variants = list(bench.variants([1, 2]))
    assert [record["variant"] for record in records] == variants[::-1], "an odd seed"
    for record in records:
        assert record["peak_bytes"] == pytest.approx(record["computed_peak_bytes"], rel=0.1)
        for name, computed in record["computed_held_bytes"].items():
            if name == "gradients" and record["way"] in ("ddp", "zero1"):
                computed /= 2  # the buckets are among the others
                assert record["held_bytes"]["other"] == pytest.approx(computed, rel=0.02)
            assert record["held_bytes"][name] == pytest.approx(computed, rel=0.01), name
        assert re.search(rf"^{record['variant']} .* {record['peak_bytes'] / 1e6:.0f} ", out, re.M)
    sent = {record["variant"]: record["sent_bytes"] for record in records}
    ddp = sent["DDP, 2 ranks"]
    assert ddp == pytest.approx(4 * 11_689_512, rel=0.01), "2 (N - 1) / N of the gradients"
    for name, times in (
        ("1 process", 0),
        ("DDP, checkpointing, 2 ranks", 1),
        ("DDP, ZeroRedundancyOptimizer, 2 ranks", 1.5),  # broadcasts the weights, too
        ("FSDP, no resharding, 2 ranks", 1),
        ("FSDP, 2 ranks", 1.5),  # gathers the weights twice
    ):
        assert sent[name] == pytest.approx(times * ddp, rel=0.01), name


RECORD = {
    "device": "cpu",
    "device_name": "a CPU",
    "cores": 2,
    "torch": "2",
    "torchvision": "1",
    "model": "resnet18",
    "image_size": 32,
    "batch_size": 4,
    "sent_bytes": 10e6,
    "computed_peak_bytes": 110e6,
    "held_bytes": {"weights": 10e6, "gradients": 20e6, "optimizer": 30e6, "other": 15e6},
    "computed_held_bytes": {"weights": 11e6, "gradients": 34e6, "optimizer": 31e6},
}


@pytest.fixture
def recorded(monkeypatch):
    """Records of two repeats, of which the first ran in reverse order."""
    found = []
    for repeat in range(2):
        rows = list(enumerate(bench.variants([1, 2, 4]).items()))
        for row, (name, variant) in rows[:: 1 if repeat else -1]:
            run = RECORD | {"repeat": repeat, "row": row, "variant": name}
            run["name"] = variant.setting.name
            run["peak_bytes"] = 1e6 * (100 + row)
            run["images_per_second"] = 10.0 * (row + 1) + repeat
            found.append(run)
    monkeypatch.setattr(tables, "records", lambda name: found)
    monkeypatch.setattr(pictures, "ours", lambda name: found)
    return found


def test_the_table_of_the_book_compares_with_ddp(recorded):
    text = tables.memory()
    assert "`resnet18`, 4 images of 32x32 per process, 2 runs of each:" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    names = list(bench.variants([1, 2, 4]))
    assert [row[0] for row in rows[2:]] == names and len(names) == 9
    assert rows[2 + names.index("FSDP, 2 ranks")] == [
        "FSDP, 2 ranks",
        "105 MB",
        "110 MB, +4.8 %",
        "75 MB",
        "10 MB",
        "60.5 (60.0 to 61.0)",
        f"{(60 / 20 + 61 / 21) / 2:.2f} ({61 / 21:.2f} to 3.00)",
    ]
    words = Phrases(ROOT / "docs/zh/tables.json")
    for row in rows:
        assert all(words.translate(cell) for cell in row)


def test_the_figure_shows_measured_bytes_above_computed_bytes(recorded):
    fig = pictures.draw_memory()
    (ax,) = fig.axes
    names = list(bench.variants([1, 2, 4]))
    assert [tick.get_text() for tick in ax.get_yticklabels()] == names
    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches]
    assert len(bars) == 8 * len(names)
    assert bars[:8] == [
        (0, 10),
        (10, 35),  # with the buckets
        (45, 30),
        (75, 25),  # the rest of 100
        (0, 11),
        (11, 34),
        (45, 31),
        (76, 34),  # the rest of 110
    ]
    heights = [bar.get_y() for bar in ax.patches]
    assert heights[0] < heights[4] and ax.yaxis_inverted()
    words = Phrases(ROOT / "docs/zh/labels.json")
    for label in [*names, ax.get_title(), ax.get_xlabel(), fig.get_suptitle()]:
        assert words.translate(label)
    for label in fig.legends[0].get_texts():
        assert words.translate(label.get_text())
    pictures.plt.close(fig)


# The tool


def run_fit(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fit.py", *arguments.split()])
    fit.main(fit.parse_args())


def rows(arguments, monkeypatch, capsys):
    """Return what tools/fit.py prints: {setting: cells}, and the last line."""
    run_fit(arguments, monkeypatch)
    *lines, _, last = capsys.readouterr().out.splitlines()
    head = next(k for k, line in enumerate(lines) if line.startswith("GB per GPU"))
    split = (re.fullmatch(r"(.*?) +(\d+\.\d\d .*)", line).groups() for line in lines[head + 1 :])
    return {name: cells.split() for name, cells in split}, last


NUMBERS = "--weights-m 1000 --activations-mb-per-image 160 --blocks 10 --batch-size 10 --gpus 16"


def test_the_table_of_a_model_given_by_numbers(monkeypatch, capsys):
    """The sums of DDP and HSDP, computed by hand."""
    found, last = rows(f"{NUMBERS} --gpus-per-machine 4 --memory-gb 9", monkeypatch, capsys)
    # on GPUs, step() copies all gradients, but the activations of 10 images are more
    assert found["DDP"] == ["4.00", "8.00", "4.00", "0.00", "4.00", "20.00", "no", "step"]
    assert found["DDP, ckpt"][-2:] == ["no", "step"]
    # ten tensors for 16 ranks: a rank has one of them, or none
    zero1 = ["4.00", "8.00", "0.40", "1.60", "0.00", "14.00", "no", "forward"]
    assert found["DDP, ZeroRedundancyOptimizer"] == zero1
    # after the backward pass of the ninth of ten blocks: four blocks, eight blocks of activations
    fsdp = ["0.25", "0.03", "0.25", "1.28", "1.60", "3.40", "yes", "backward"]
    assert found["FSDP"] == fsdp
    # before the forward pass of the tenth: its tensors, and the buffers of two blocks
    hsdp = ["1.00", "1.00", "1.00", "1.44", "1.20", "5.64", "yes", "forward"]
    assert found["HSDP, 4 x 4 shards"] == hsdp
    assert last == "smallest change that fits: FSDP, no resharding"
    one_machine, _ = rows(f"{NUMBERS} --gpus-per-machine 16 --memory-gb 9", monkeypatch, capsys)
    assert len(one_machine) == 8 and not any(name.startswith("HSDP") for name in one_machine)


def test_a_margin_stays_free(monkeypatch, capsys):
    def simplest(more):
        return rows(f"{NUMBERS} {more}", monkeypatch, capsys)[1]

    assert simplest("--memory-gb 20") == "smallest change that fits: DDP, ZeroRedundancyOptimizer"
    assert simplest("--memory-gb 20.1 --margin-percent 0") == "smallest change that fits: DDP"
    assert "FSDP" in simplest("--memory-gb 20 --margin-percent 50")


def test_the_optimizer_and_bf16_change_their_columns(monkeypatch, capsys):
    def cells(more):
        return rows(f"{NUMBERS} --memory-gb 80 {more}", monkeypatch, capsys)[0]

    for optimizer, state in (("sgd", "0.00"), ("momentum", "0.25"), ("adam", "0.50")):
        assert cells(f"--optimizer {optimizer}")["FSDP"][2] == state
    # weights of two blocks, gradients of one, and the buffer of another, which stays float32
    assert [cells("")["FSDP"][4], cells("--amp bf16")["FSDP"][4]] == ["1.60", "1.00"]


def test_a_model_of_torchvision_brings_its_own_numbers(monkeypatch, capsys):
    def activations(size):
        given = f"--arch resnet18 --image-size {size} --batch-size 32 --gpus 2 --memory-gb 24"
        found, _ = rows(given, monkeypatch, capsys)
        assert found["DDP"][0] == "0.05", "11.7 million weights"
        return float(found["DDP"][3])

    assert activations(224) == pytest.approx(4 * activations(112), abs=0.02)
    # 22.2 MB per image, as autograd saves for one image on a CPU
    assert activations(224) == pytest.approx(32 * 0.0222, abs=0.01)


def test_if_nothing_fits_it_names_what_would(monkeypatch, capsys):
    given = "--weights-m 100 --activations-mb-per-image 1000 --batch-size 512 --gpus 8"
    _, last = rows(f"{given} --memory-gb 16", monkeypatch, capsys)
    assert last.startswith("nothing fits; try --batch-size 128 (DDP, checkpointing)")
    given = "--weights-m 7000 --activations-mb-per-image 1 --batch-size 1 --gpus 2"
    _, last = rows(f"{given} --memory-gb 16", monkeypatch, capsys)
    assert last.startswith("nothing fits; try --gpus 16 (FSDP")
    _, last = rows(f"{given} --memory-gb 2", monkeypatch, capsys)
    assert last.startswith("nothing fits; try tensor parallelism")
    _, last = rows(f"{given.replace('2', '1')} --memory-gb 1e3", monkeypatch, capsys)
    assert last == "smallest change that fits: one GPU"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--arch vit_b_17 --batch-size 2 --gpus 2", "--arch vit_b_17: no such model of images"),
        ("--arch vit_b_16 --batch-size 0 --gpus 2", "'0' given, expected a whole number of 1"),
        ("--arch vit_b_16 --image-size 30 --batch-size 2 --gpus 2", "images of 30x30 (Input shape"),
        ("--weights-m 5 --batch-size 2 --gpus 2", "give --arch, or both --weights-m and"),
        ("--batch-size 2 --gpus 2", "give --arch, or both --weights-m and"),
        ("--arch vit_b_16 --weights-m 5 --batch-size 2 --gpus 2", "give --arch, or both"),
        (
            "--arch vit_b_16 --batch-size 2 --gpus 12 --gpus-per-machine 8",
            "--gpus-per-machine 8 of --gpus 12: expected a number that divides",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end, one_line_errors():
        run_fit(f"{arguments} --memory-gb 24", monkeypatch)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ".py: error: " in line and message in line


def test_a_benchmark_of_a_model_that_does_not_exist_says_so():
    with pytest.raises(UserError, match="--arch nothing: no such model"):
        fit.count_arch("nothing", 32, 2)
