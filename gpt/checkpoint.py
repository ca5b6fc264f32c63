"""The checkpoints of 08: shards, saved in the middle of an epoch, which any mesh can load."""

import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from common.errors import UserError
from fsdp import sharded
from gpt.report import describe_sizes


def save_step(args, steps, train_set, model, optimizer, scheduler):
    """Save each --checkpoint-every training steps, and after the last of `steps`.

    Every rank must call it: each writes its own shards into --checkpoints-path/step-N. Then rank 0
    deletes the checkpoint before.
    """
    done = scheduler.last_epoch
    if not args.checkpoints_path or (done % args.checkpoint_every and done < steps):
        return
    folder = os.path.join(args.checkpoints_path, "step-{}")
    before = sharded.newest_epoch(args.checkpoints_path, "step")
    state = sharded.state_of(model, optimizer, scheduler)
    state["training"] = describe_training(args, train_set)
    dcp.save(state, checkpoint_id=folder.format(done))
    if before and dist.get_rank() == 0:
        shutil.rmtree(folder.format(before), ignore_errors=True)


def load_step(args, steps, train_set, model, optimizer, scheduler):
    """Load the newest complete checkpoint, which ranks on another mesh may have saved.

    Returns:
        int, the training steps that are done; 0 if there is no checkpoint.

    Raises:
        UserError: it is of another training, no step is left, or the ranks see different folders.
    """
    done = sharded.find_newest(args, "step")
    if not done:
        return 0
    folder = os.path.join(args.checkpoints_path, f"step-{done}")
    state = {"training": ""}
    dcp.load(state, checkpoint_id=folder)
    expected = describe_training(args, train_set)
    if state["training"] != expected:
        raise UserError(
            f"{folder} is of {state['training']}: expected {expected}; "
            "give the same flags, or another --checkpoints-path"
        )
    if done > steps or (done == steps and not args.save):
        raise UserError(
            f"{folder}: all {steps} training steps are done; give more --epochs, "
            "another --checkpoints-path, or --save FILE for the weights"
        )
    sharded.load_shards(folder, args, model, optimizer, scheduler)
    return done


def describe_training(args, train_set):
    """Return what must not change between two parts of a training, so that no window is lost."""
    return (
        f"a model of {describe_sizes(args)}, {args.batch_tokens} tokens per step, "
        f"{train_set.count} bytes to train on and seed {args.seed}"
    )


def save_weights(args, model):
    """Write the whole model to --save, with its sizes. A collective: all ranks call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole, on rank 0
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save({"sizes": args.sizes, "model": weights}, args.save)
