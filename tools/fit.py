"""Does a model fit into a GPU? Compute the memory of a training step with DDP, ZeRO and FSDP.

    python tools/fit.py --arch vit_l_16 --batch-size 64 --gpus 8 --memory-gb 24
    python tools/fit.py --weights-m 7000 --activations-mb-per-image 900 --optimizer adam \\
        --amp bf16 --batch-size 4 --gpus 64 --memory-gb 80

The first counts the activations of a torchvision model: it runs the forward pass on the meta
device, which has shapes but no data, and adds up what autograd saves. The second takes your numbers
for any other model, and assumes equal blocks.

Each row is the moment of a training step that needs the most memory. The order is that of 03 and
07, where zero_grad() comes after the forward pass: the gradients of the previous step are still in
memory when the last activation is saved. results/memory holds what was measured beside it.

In the ZeRO paper (https://arxiv.org/abs/1910.02054), ZeroRedundancyOptimizer is stage 1, FSDP
without resharding after the forward pass is near stage 2, and FSDP is stage 3. HSDP shards within a
machine, and keeps one copy per machine.

Not counted: the CUDA context, workspaces of cuDNN and cuBLAS, buffers of NCCL, fragmentation,
tensors that an operation frees at once, and batches that the loader prefetches. A tenth of a GPU's
memory stays free for them.
"""

import functools
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from common.errors import UserError, one_line, one_line_errors
from common.flags import Parser, add_flags, number, whole_number
from fsdp import sharded
from tools.planning.layers import build_on_meta

FLOAT32 = 4  # bytes
STATES = {"sgd": 0, "momentum": 1, "adam": 2}  # numbers per weight that an optimizer keeps
MARGIN = 0.1  # share of a GPU's memory that stays free for what is not counted
MOST_GPUS = 4096  # when searching for a number of GPUs that fits


class Part(NamedTuple):
    """A block of a model, or everything outside of the blocks."""

    shapes: list  # torch.Size of each tensor of weights
    activations: float  # bytes that autograd saves in this part first
    inputs: float  # bytes that remain with activation checkpointing: the inputs of a block
    recomputed: float = 0  # bytes that the backward pass of a checkpointed block computes again

    @property
    def weights(self):
        return sum(shape.numel() for shape in self.shapes)


class Model(NamedTuple):
    """What the memory of a training step depends on, for one batch size."""

    outside: Part  # everything outside of the blocks
    blocks: list  # of Part, in the order of the forward pass
    bytes_to_compute: int = FLOAT32  # per number in the forward pass: 4, or 2 in bf16

    @property
    def shapes(self):
        return [shape for part in (*self.blocks, self.outside) for shape in part.shapes]

    @property
    def weights(self):
        return sum(shape.numel() for shape in self.shapes)


class Setting(NamedTuple):
    """A way to train."""

    name: str
    way: str  # "plain" (one process), "ddp", "zero1" (with ZeroRedundancyOptimizer) or "fsdp"
    shards: int = 1  # the number of ranks that share one copy of what is sharded
    reshard: bool = True  # for FSDP, whether a block's weights are freed after its forward pass
    checkpointed: bool = False  # whether the blocks keep their inputs only


class Memory(NamedTuple):
    """Bytes on one rank at one moment of a training step."""

    moment: str
    weights: float
    gradients: float
    optimizer: float
    activations: float = 0
    temporary: float = 0  # gathered weights, gradients that are not reduced yet, copies in step()

    @property
    def total(self):
        return sum(self[1:])


# Counting activations


def count_model(model, images, targets):
    """Return the Model of a nn.Module on the meta device, for one training step on a batch."""
    blocks = sharded.blocks(model)
    outside = len(blocks)  # index of the part outside of the blocks
    saved = [set() for _ in range(outside + 1)]  # storages, by the part that saves them first
    inputs = [set() for _ in blocks]  # storages of the inputs of each block
    known = {t.untyped_storage() for t in [*model.parameters(), *model.buffers()]}
    current = outside

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage not in known:
            known.add(storage)
            saved[current].add(storage)
        return tensor

    def enter(index, block, arguments):
        nonlocal current
        current = index
        inputs[index].update(t.untyped_storage() for t in arguments if torch.is_tensor(t))

    def leave(block, arguments, output):
        nonlocal current
        current = outside

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(functools.partial(enter, index))
        block.register_forward_hook(leave)
    # on the meta device, torch would choose the attention that saves the whole attention matrix
    with (
        mock.patch.object(F, "scaled_dot_product_attention", fused_attention),
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
    ):
        outputs = model(images)
        loss = nn.CrossEntropyLoss()(outputs.float(), targets)
    del loss  # it kept what autograd had saved, so that no storage was used twice

    parts = []
    kept = set(saved[outside])  # with checkpointing
    for index, block in enumerate(blocks):
        shapes = [weight.shape for weight in block.parameters()]
        recomputed = size(saved[index] - inputs[index])
        parts.append(Part(shapes, size(saved[index]), size(inputs[index] - kept), recomputed))
        kept |= inputs[index]
    in_blocks = {id(weight) for block in blocks for weight in block.parameters()}
    shapes = [weight.shape for weight in model.parameters() if id(weight) not in in_blocks]
    rest = Part(shapes, size(saved[outside]), size(saved[outside]))
    return Model(rest, parts, next(model.parameters()).element_size())


def size(storages):
    return sum(storage.nbytes() for storage in storages)


def fused_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
    """Attention that keeps its output and one number per query, as the kernels on GPUs do."""
    options = {"attn_mask": attn_mask, **more}
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, **options)[0]


def count_arch(arch, image_size, batch_size, amp="none"):
    """Count a torchvision model.

    Raises:
        UserError: there is no such model, or it cannot take such images.
    """
    if arch not in torchvision.models.list_models(module=torchvision.models):
        raise UserError(
            f"--arch {arch}: no such model of images in torchvision; try vit_b_16, or give "
            "--weights-m and --activations-mb-per-image"
        )
    dtype = torch.bfloat16 if amp == "bf16" else torch.float32
    try:
        model = build_on_meta(arch, image_size).to(dtype)
        shape = (batch_size, 3, image_size, image_size)
        images = torch.empty(shape, dtype=dtype, device="meta")
        targets = torch.empty(batch_size, dtype=torch.long, device="meta")
        return count_model(model, images, targets)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(
            f"--arch {arch} cannot train on {batch_size} images of {image_size}x{image_size} "
            f"({one_line(error)})"
        ) from None


def even_model(weights, activations, blocks, amp="none"):
    """Return a Model of equal blocks, with nothing outside of the blocks.

    A block's input is assumed to be a sixteenth of what the block saves, as in a transformer.
    """
    each = activations / blocks
    shape = torch.Size([max(1, round(weights / blocks))])
    block = Part([shape], each, each / 16, each * 15 / 16)
    return Model(Part([], 0, 0), [block] * blocks, 2 if amp == "bf16" else FLOAT32)


# Computing memory


def peak(model, setting, optimizer="momentum", foreach=True):
    """Return the Memory of the moment with the largest total.

    Args:
        foreach: whether step() computes all tensors at the same time, as is torch's default on
            GPUs, but not for the DTensors of FSDP.
    """
    return max(moments(model, setting, optimizer, foreach), key=lambda memory: memory.total)


def moments(model, setting, optimizer, foreach):
    if setting.way == "fsdp":
        return fsdp_moments(model, setting, optimizer)
    return ddp_moments(model, setting, optimizer, foreach)


def ddp_moments(model, setting, optimizer, foreach):
    """Yield the moments of a training step with one process or DDP.

    Every rank has all weights and gradients, and DDP copies the gradients into buckets. With
    ZeroRedundancyOptimizer (stage 1), each rank has the optimizer state of some of the tensors.
    """
    weights = FLOAT32 * model.weights
    buckets = 0 if setting.way == "plain" else weights
    gradients = weights + buckets
    mine = weights
    if setting.way == "zero1":
        mine = FLOAT32 * largest_share(model.shapes, setting.shards)
    state = STATES[optimizer] * mine
    casts = 0
    if model.bytes_to_compute < FLOAT32:  # autocast keeps bf16 copies until the step is done
        casts = model.bytes_to_compute * weights / FLOAT32

    yield Memory("forward", weights, gradients, state, kept(model, setting), casts)
    ready = FLOAT32 * model.outside.weights  # gradients that the backward pass has computed
    for index in reversed(range(len(model.blocks))):
        block = model.blocks[index]
        activations = kept(model, setting, index + 1)
        if setting.checkpointed:
            activations += block.recomputed
        yield Memory("backward", weights, ready + buckets, state, activations, casts)
        ready += FLOAT32 * block.weights
    copies = mine if foreach else 0  # of the gradients
    yield Memory("step", weights, gradients, state, temporary=copies)


def fsdp_moments(model, setting, optimizer):
    """Yield the moments of a training step with fully_shard, as 07 calls it.

    A rank has one shard of all that the optimizer needs. FSDP gathers the weights of a block into
    one buffer, and copies them from there into tensors. In the backward pass it has gathered the
    block before, and the gradients of the block after are on their way: each in a buffer.
    """
    weights = FLOAT32 * sharded_weights(model, setting.shards)
    state = STATES[optimizer] * weights
    outside = model.bytes_to_compute * model.outside.weights  # gathered during the whole pass
    sizes = [model.bytes_to_compute * block.weights for block in model.blocks]

    buffer_before = outside
    for index, buffer in enumerate(sizes):
        gathered = buffer if setting.reshard else sum(sizes[: index + 1])
        temporary = outside + gathered + buffer
        before = temporary + buffer_before  # which is freed now
        yield Memory("forward", weights, weights, state, kept(model, setting, index), before)
        activations = kept(model, setting, index + 1)
        yield Memory("forward", weights, weights, state, activations, temporary)
        buffer_before = buffer
    reduced = 0
    for index in reversed(range(len(sizes))):
        first = max(0, index - 1) if setting.reshard else 0
        gathered = sum(sizes[first : index + 1])  # this block and the block before
        after = model.blocks[index + 1 : index + 2]  # whose gradients are in a buffer
        buffer = FLOAT32 * sum(block.weights for block in after)
        temporary = outside + gathered + outside + buffer  # twice: with the gradients
        activations = kept(model, setting, index + 1)
        if setting.checkpointed:
            activations += model.blocks[index].recomputed
        yield Memory("backward", weights, reduced, state, activations, temporary)
        # at the end of the block, its gradients are there, and its activations are not
        temporary += sizes[index]
        activations = kept(model, setting, index)
        yield Memory("backward", weights, reduced, state, activations, temporary)
        reduced += FLOAT32 * sharded_weights(model.blocks[index], setting.shards)
    yield Memory("step", weights, weights, state)


def kept(model, setting, done=None):
    """Return the bytes of activations that `done` blocks keep, or all blocks."""
    parts = [model.outside, *model.blocks[:done]]
    if setting.checkpointed:
        return sum(part.inputs for part in parts)
    return sum(part.activations for part in parts)


def sharded_weights(part, shards):
    """Return how many weights rank 0 has: FSDP splits the first dimension, rounded up."""
    return sum(-(-shape[0] // shards) * shape[1:].numel() for shape in part.shapes)


def largest_share(shapes, shards):
    """Return the weights of the rank that has the most.

    ZeroRedundancyOptimizer gives each tensor, the largest first, to the rank with the least.
    """
    shares = [0] * shards
    for weights in sorted((shape.numel() for shape in shapes), reverse=True):
        shares[shares.index(min(shares))] += weights
    return max(shares)


# The table


def settings(gpus, gpus_per_machine):
    """Return the settings to compare, the simplest first: each without and with checkpointing."""
    ways = [Setting("one GPU", "plain")]
    if gpus > 1:
        ways = [
            Setting("DDP", "ddp", gpus),
            Setting("DDP, ZeroRedundancyOptimizer", "zero1", gpus),
            Setting("FSDP, no resharding", "fsdp", gpus, reshard=False),
            Setting("FSDP", "fsdp", gpus),
        ]
    if gpus > gpus_per_machine:
        name = f"HSDP, {gpus // gpus_per_machine} x {gpus_per_machine} shards"
        ways.append(Setting(name, "fsdp", gpus_per_machine))
    result = []
    for way in ways:
        name = f"{way.name}, checkpointing"
        result += [way, way._replace(name=name, checkpointed=True)]
    return result


def parse_args():
    parser = Parser(__doc__)
    required = {"type": whole_number(1), "required": True, "metavar": "N"}
    # fmt: off
    add_flags(parser, [
        ("--arch NAME", str, None, "a torchvision model, whose activations are counted"),
        ("--image-size N", whole_number(1), 224, "pixels per side, for --arch"),
        ("--weights-m M", number(above=0), None, "for other models: millions of weights"),
        ("--activations-mb-per-image MB", number(above=0), None,
         "for other models: activations of one image, or of one sequence of tokens"),
        ("--blocks N", whole_number(1), 32,
         "for other models: equal blocks that FSDP gathers one at a time"),
        ("--optimizer", tuple(STATES), "momentum",
         "momentum is SGD as in 03; sgd is without momentum"),
        ("--amp", ("none", "bf16"), "none",
         "bf16: weights stay float32; FSDP gathers, and all compute, in bf16"),
    ])
    # fmt: on
    parser.add_argument("--batch-size", **required, help="images per process and training step")
    parser.add_argument("--gpus", **required, help="of all machines together")
    row = ("--gpus-per-machine N", whole_number(1), 8, "GPUs of a machine: the shards of HSDP")
    add_flags(parser, [row])
    required |= {"type": number(above=0), "metavar": "GB"}
    parser.add_argument("--memory-gb", **required, help="memory of a GPU")
    args = parser.parse_args()
    by_numbers = (args.weights_m, args.activations_mb_per_image)
    if (args.arch is None) == (None in by_numbers) or (args.arch and any(by_numbers)):
        parser.error("give --arch, or both --weights-m and --activations-mb-per-image")
    if args.gpus > args.gpus_per_machine and args.gpus % args.gpus_per_machine:
        parser.error(
            f"--gpus-per-machine {args.gpus_per_machine} of --gpus {args.gpus}: "
            "expected a number that divides the number of GPUs"
        )
    return args


def describe_model(args, batch_size):
    """Return the Model for a batch size."""
    if args.arch:
        return count_arch(args.arch, args.image_size, batch_size, args.amp)
    activations = batch_size * args.activations_mb_per_image * 1e6
    return even_model(args.weights_m * 1e6, activations, args.blocks, args.amp)


def compare(args, model, gpus):
    """Return {name of a setting: (Memory, whether it fits)}."""
    available = args.memory_gb * 1e9 * (1 - MARGIN)
    rows = {}
    for setting in settings(gpus, args.gpus_per_machine):
        memory = peak(model, setting, args.optimizer)
        rows[setting.name] = (memory, memory.total <= available)
    return rows


def simplest(rows):
    """Return the name of the first setting that fits, or None."""
    return next((name for name, (_, fits) in rows.items() if fits), None)


def remedies(args):
    """Return what to do if no setting fits, as a text."""
    found = []
    batch_size = args.batch_size
    while batch_size > 1:
        batch_size //= 2
        try:
            smaller = describe_model(args, batch_size)
        except UserError:  # batch normalization may need more images
            break
        if name := simplest(compare(args, smaller, args.gpus)):
            found.append(f"--batch-size {batch_size} ({name})")
            break
    model = describe_model(args, args.batch_size)
    gpus = args.gpus
    while gpus < MOST_GPUS:
        is_part = gpus < args.gpus_per_machine
        gpus = min(2 * gpus, args.gpus_per_machine) if is_part else 2 * gpus
        if name := simplest(compare(args, model, gpus)):
            found.append(f"--gpus {gpus} ({name})")
            break
    if found:
        return " or ".join(found)
    return "tensor parallelism, which splits the layers: a block does not fit"


def table(rows):
    """Return the lines of the table, in GB."""
    head = ("weights", " grads", " optim", " activ", "  temp", "   sum")
    lines = [f"{'GB per GPU':20} {' '.join(head)} fits peak in"]
    for name, (memory, fits) in rows.items():
        gigabytes = [*memory[1:], memory.total]
        cells = [f"{x / 1e9:{len(column)}.2f}" for x, column in zip(gigabytes, head, strict=True)]
        label = name.replace("ZeroRedundancyOptimizer", "ZeRO-1")
        if name.endswith("checkpointing"):  # the row above, with checkpoints
            label = "  with ckpt"
        answer = "yes" if fits else "no"
        lines.append(f"{label:20} {' '.join(cells)} {answer:4} {memory.moment}")
    return lines


def main(args):
    model = describe_model(args, args.batch_size)
    weights = model.weights / 1e6
    compute = "float32" if args.amp == "none" else "bf16, weights in float32"
    print(f"model:   {args.arch or 'equal blocks'}, {weights:.1f} million weights, {compute}")
    print(f"step:    {args.batch_size} images per process, {args.optimizer}")
    print(
        f"GPUs:    {args.gpus} of {args.memory_gb:g} GB; {100 * MARGIN:g} % stay free for what is "
        "not counted (see --help)"
    )
    print("grads:   gradients; with DDP also its buckets, which are a second copy")
    print("activ:   activations, which the backward pass needs")
    print("temp:    gathered weights, gradients to reduce, copies in optimizer.step()")
    print("ckpt:    activation checkpointing, 07 --checkpoint-activations")
    print("ZeRO-1:  ZeroRedundancyOptimizer\n")
    rows = compare(args, model, args.gpus)
    print("\n".join(table(rows)))
    if name := simplest(rows):
        print(f"\nsmallest change that fits: {name}")
    else:
        print(f"\nnothing fits; try {remedies(args)}")


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
