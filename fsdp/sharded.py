"""What 07 adds: the blocks of a model, its shards on disk, and what a rank holds."""

import functools
import os
import re
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from common.errors import UserError, one_line


def blocks(model):
    """Return the parts of a model to gather one at a time: the layers of its nn.Sequential's.

    These are the residual blocks of a ResNet, and the encoder blocks of a vision transformer. A
    nn.Sequential inside a block belongs to the block. Other weights belong to no block.

    Returns:
        list of nn.Module, each with weights, in the order in which the model defines them.
    """
    found = []
    for child in model.children():
        if isinstance(model, nn.Sequential) and type(child) is not nn.Sequential:
            if any(True for _ in child.parameters()):
                found.append(child)
        else:
            found += blocks(child)
    return found


def checkpoint_activations(model):
    """Let each block keep its input only, and compute its activations again in backward.

    Returns:
        nn.Module, the same model. A batch norm then updates its statistics twice per training step.
    """
    for block in blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def precision(args, model):
    """Return the types in which to gather and compute, and to average gradients.

    The shards that the optimizer updates stay in the type of the weights, float32.

    Returns:
        (torch.bfloat16, torch.float32) with --amp bf16; (None, None), the type of the weights,
        without.

    Raises:
        UserError: --amp bf16 for a model with batch norm: torch wants its weights in the type of
            its running statistics, float32.
    """
    if args.amp == "none":
        return None, None
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"--amp bf16: {name} is a batch norm, whose weights must be float32; leave out "
                "--amp, or use a model with layer norm, such as vit_b_16 or convnext_tiny"
            )
    return torch.bfloat16, torch.float32


def count_test_steps(test_set, args, world_size):
    """Return how many batches the largest share of the test set has.

    Raises:
        UserError: a rank has no image, so it could not take part in a forward pass.
    """
    if len(test_set) < world_size:
        raise UserError(
            f"{len(test_set)} test images for {world_size} ranks: expected one per rank or more; "
            f"start {len(test_set)} processes or fewer"
        )
    return -(-len(test_set) // args.batch_size)  # the quotient, rounded up


def save_shards(args, epoch, model, optimizer, scheduler):
    """Save the training after `epoch` epochs; then delete the checkpoint of the epoch before.

    Every rank must call it: each writes its own shards into --checkpoints-path/epoch-N. torch
    writes the file .metadata last, so a folder without it is incomplete.
    """
    if not args.checkpoints_path:
        return
    folder = os.path.join(args.checkpoints_path, "epoch-{}")
    dcp.save(state_of(model, optimizer, scheduler), checkpoint_id=folder.format(epoch))
    if dist.get_rank() == 0:
        shutil.rmtree(folder.format(epoch - 1), ignore_errors=True)


def load_newest(args, model, optimizer, scheduler):
    """Load the newest complete checkpoint, which any number of ranks may have saved.

    Returns:
        int, the number of epochs that are done; 0 if there is no checkpoint.

    Raises:
        UserError: the checkpoint is of another model, no epoch is left and no weights are to be
            saved, or the ranks see different folders.
    """
    epoch = find_newest(args)
    if not epoch:
        return 0
    folder = os.path.join(args.checkpoints_path, f"epoch-{epoch}")
    if epoch > args.epochs or (epoch == args.epochs and not args.save):
        raise UserError(
            f"{folder}: all {args.epochs} epochs are done; give --epochs {epoch + 1} or more, "
            f"another --checkpoints-path, or --epochs {epoch} --save FILE for the weights"
        )
    load_shards(folder, args, model, optimizer, scheduler)
    return epoch


def load_shards(folder, args, model, optimizer, scheduler):
    """Load a checkpoint into a model, its optimizer and its scheduler.

    Raises:
        UserError: it is of another model.
    """
    state = state_of(model, optimizer, scheduler)
    try:
        dcp.load(state, checkpoint_id=folder)
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))  # of each rank that failed
        raise UserError(
            f"{folder} does not fit --arch {args.arch} ({one_line(reason)}); "
            "give the same flags, or another --checkpoints-path"
        ) from None
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    # The learning rate follows the flags and the global batch size of this run.
    scheduler.last_epoch = state["steps"]
    for group, lr, factor in zip(
        optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = lr * factor(scheduler.last_epoch)


def find_newest(args, unit="epoch"):
    """Return the newest complete epoch, or `unit`, in --checkpoints-path, or 0. A collective.

    Raises:
        UserError: the ranks see different folders.
    """
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, newest_epoch(args.checkpoints_path, unit))
    if len(set(numbers)) > 1:
        raise UserError(
            f"--checkpoints-path {args.checkpoints_path}: the newest {unit} of each rank is "
            f"{numbers}: expected the same; name a folder that all machines share"
        )
    return numbers[0]


def newest_epoch(folder, unit="epoch"):
    """Return the newest complete epoch, or `unit`, in a folder of checkpoints, or 0."""
    if not folder or not os.path.isdir(folder):
        return 0
    complete = [
        int(name.removeprefix(f"{unit}-"))
        for name in os.listdir(folder)
        if re.fullmatch(rf"{unit}-\d+", name)  # a folder of another name is not ours
        and os.path.exists(os.path.join(folder, name, ".metadata"))
    ]
    return max(complete, default=0)


def state_of(model, optimizer, scheduler):
    """Return what a checkpoint holds: DTensors, of which each rank has its shard, and the steps."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": optimizer_state,
        "steps": scheduler.last_epoch,
    }


def bytes_held(model, optimizer):
    """Return a line with the bytes that this rank holds, and with those of the whole model."""
    parts = {
        "weights": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "optimizer state": [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ],
    }
    texts = [
        f"{name} {sum(local_bytes(t) for t in tensors) / 1e6:.2f} of "
        f"{sum(t.numel() * t.element_size() for t in tensors) / 1e6:.2f}"
        for name, tensors in parts.items()
    ]
    return f"MB on rank 0: {', '.join(texts)}"


def local_bytes(tensor):
    """Return the bytes of a tensor on this rank; of a DTensor, those of the local shard."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
