"""Whether 06 can train as it was started: the launch, the run to resume, and the batches."""

import logging
import os

import torch
from torch import nn

from common.errors import UserError
from common.setup_distributed import LaunchError
from imagenet.datasets import unused_test_folder

# To resume, these flags must be the same.
MUST_STAY = ("arch", "batch_size", "image_size", "seed", "ema", "freeze")
# These may change, and the user is told.
MAY_CHANGE = (
    "epochs",
    "accumulate",
    "lr",
    "schedule",
    "step_epochs",
    "final_lr",
    "warmup_epochs",
    "warmup_factor",
    "momentum",
)
MAY_CHANGE += ("weight_decay", "label_smoothing", "clip_grad", "amp", "sync_bn")

log = logging.getLogger(__name__)


def check_launch(args, d):
    """Check that the launcher is the one of --dist-init-method, and that restarts can work.

    Raises:
        LaunchError, UserError: see the messages.
    """
    check_restarts(d, args.resume or args.evaluate)
    method = args.dist_init_method
    found = f"--dist-init-method {method} under {d.launcher}"
    if method == "env" and d.launcher not in ("torchrun", "nodes"):
        command = "torchrun --nproc-per-node=2 06_imagenet.py"
        raise LaunchError(f"{found}: expected torchrun; {command}")
    if method == "slurm" and d.launcher != "srun":
        raise LaunchError(f"{found}: expected srun; srun python 06_imagenet.py")


def check_restarts(d, resume):
    """Check that a restart by torchrun continues the training.

    torchrun's agents share one store over all restarts unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    Restarted workers then read the addresses of the workers before them, and wait for those, unless
    one machine has them all, where setup_distributed() sees to it. Only the agents can read the
    variable, so a script can only warn.

    Raises:
        UserError: each restart would train from the beginning.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0":
        return
    if not resume:
        raise UserError(
            f"--max-restarts={restarts} without --resume: "
            "each restart would begin at zero; add --resume"
        )
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"  # machines
    if several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and d.is_main:
        log.warning(
            "torchrun was started without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: "
            "a restart may hang, or fail for minutes; "
            "on each machine: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )


def check_same_run(args, d, checkpoints, images, state, path):
    """Check that a checkpoint belongs to this training, and print the flags that have changed.

    Args:
        d: Distributed.
        checkpoints: Checkpoints.
        images: int, the size of the training set.
        state: a loaded checkpoint, or None.
        path: where it was.

    Raises:
        UserError: there are checkpoints but no --resume; or the checkpoint is of another model or
            other data.
    """
    if state is None:
        check_new_run(args, d, checkpoints)
        return
    now = {name: str(value) for name, value in vars(args).items()}
    before = now | state["flags"]  # an old checkpoint may lack a flag
    for name in MUST_STAY:
        if before[name] != now[name]:
            flag = f"--{name.replace('_', '-')}"
            was = f"{flag} {before[name] or repr('')}"
            raise UserError(
                f"{flag} {now[name] or repr('')}, but {path} is of a run with {was}: "
                f"expected the same; use {was}, or name another --checkpoints-path"
            )
    if state["images"] != images:
        raise UserError(
            f"{images} training images, but {path} is of a run with {state['images']}: "
            "expected the same; name its folder of images, or another --checkpoints-path"
        )
    changed = [name for name in MAY_CHANGE if before[name] != now[name]]
    if changed and d.is_main:
        changes = [f"--{name.replace('_', '-')} {before[name]} -> {now[name]}" for name in changed]
        print(f"resuming with other flags: {', '.join(changes)}")


def check_new_run(args, d, checkpoints):
    """Check that there is nothing to resume, or that --resume says what to do."""
    if args.evaluate and not args.weights:
        raise UserError(
            f"--evaluate --resume: no checkpoint in {args.checkpoints_path}; name the right folder"
        )
    if not args.evaluate and checkpoints.exist():
        folder = args.checkpoints_path
        remedy = "add --resume to continue from the newest"
        if args.resume:  # there is no other file
            remedy = f"to continue from best.pt, cp {folder}/best.pt {folder}/step-00000000.pt"
        raise UserError(
            f"--checkpoints-path {folder} holds checkpoints already: "
            f"{remedy}, or name another folder"
        )
    if args.resume and d.is_main:
        print(f"no checkpoint in {args.checkpoints_path}: starting from the beginning")


def check_batches(args, d, model, sampler):
    """Refuse a batch that is too small for its micro-batches, and print hints."""
    fewest, most = sampler.micro_batch_sizes()
    batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    synchronized = args.sync_bn and d.world_size > 1
    least = 2 if batch_norm and not synchronized else 1
    if fewest < least:
        enough = least * d.world_size * sampler.accumulate
        raise UserError(
            f"--batch-size {args.batch_size} leaves {fewest} to {most} images for each of "
            f"{d.world_size} processes in {sampler.accumulate} micro-batches: "
            f"expected {least} or more; at least --batch-size {enough}, "
            "or fewer processes or micro-batches"
        )
    if d.is_main:
        print_hints(args, d)


def print_hints(args, d):
    """Print what is given and has no effect here, or not the one that people expect."""
    if args.warmup_epochs >= args.epochs and not args.evaluate:
        print(
            f"--warmup-epochs {args.warmup_epochs:g} of --epochs {args.epochs}: "
            "the learning rate never reaches its peak; "
            f"expected a shorter warm-up, as --warmup-epochs {args.epochs / 20:g}"
        )
    if args.checkpoints_path is None and not args.evaluate:
        print("--dummy: no checkpoints are kept, unless --checkpoints-path DIR names a folder")
    if args.train_path and not args.evaluate:
        test = unused_test_folder(args.train_path, args.val_path)
        if test:
            command = f"--evaluate --weights {args.checkpoints_path}/best.pt --val-path {test}"
            print(f"{test} is not used; to evaluate on it later: {command}")
    if args.sync_bn and d.world_size == 1:
        print(
            "--sync-bn with one process: ordinary batch norm, because there are no other processes"
        )
    is_gpu = d.device.type == "cuda"
    emulated = is_gpu and not torch.cuda.is_bf16_supported(including_emulation=False)
    if args.amp == "bf16" and emulated:
        print("--amp bf16: this GPU emulates bf16, which is slow; --amp fp16 is faster here")
