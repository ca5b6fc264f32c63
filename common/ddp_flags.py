"""The flags that 03, 04, 05 and 07 add."""

import argparse
import os
import re
import socket

import torch

from common.flags import add_flags, launched_copies, number, shared_flags, warn, whole_number


def parse_ddp_args(doc):
    """Parse the flags of 03 and 05: those of 01, and --sync-bn."""
    parser = _ddp_flags(doc)
    args = parser.parse_args()
    copies = launched_copies()
    _check_batch(parser, args, copies.get("WORLD_SIZE") or copies.get("SLURM_STEP_NUM_TASKS", 1))
    _warn_of_restarts(parser, "06_imagenet.py --resume continues")
    return args


def parse_fsdp_args(doc):
    """Parse the flags of 07: those of 03, and those of a sharded model."""
    parser = _ddp_flags(doc)
    # fmt: off
    add_flags(parser, [
        ("--shard-size N", whole_number(1), None,
         "ranks that share one copy of the model; without it, all ranks share one"),
        ("--reshard-after-forward", bool, True,
         "free a block's weights between its forward and its backward pass"),
        ("--checkpoint-activations", bool, False,
         "keep only the inputs of the blocks, and compute the rest again in the backward pass"),
        ("--amp", ("none", "bf16"), "none", "type to gather and compute in"),
        ("--clip-grad X", number(above=0), None, "limit the norm of the gradients"),
        ("--checkpoints-path DIR", str, None,
         "save there after each epoch, and continue from the newest epoch there"),
    ])
    # fmt: on
    args = parser.parse_args()
    args.reshard = args.reshard_after_forward  # a shorter name for the script
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # an error of main if it is missing
    _check_batch(parser, args, world_size)
    args.shard_size = args.shard_size or world_size
    if world_size % args.shard_size:
        parser.error(
            f"--shard-size {args.shard_size} of {world_size} ranks: "
            "expected a number that divides the number of ranks"
        )
    if not args.checkpoints_path:
        _warn_of_restarts(parser, "--checkpoints-path DIR continues")
    return args


def _check_batch(parser, args, world_size):
    """Refuse a batch that is not one of equal parts, of two images or more, for all processes."""
    parts, rest = divmod(args.batch_size, world_size)
    if rest or parts < 2:  # batch norm cannot train on a single image
        fewer = max(2, parts) * world_size
        parser.error(
            f"--batch-size {args.batch_size} for {world_size} processes: expected a multiple of "
            f"{world_size}, such as {fewer} or {fewer + world_size}"
        )


def _warn_of_restarts(parser, remedy):
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("RANK") == "0":
        found = f"{parser.prog}: --max-restarts={restarts}"
        warn(f"{found}: each restart begins at epoch 1; {remedy}")


def parse_spawn_args(doc):
    """Parse the flags of 04: those of 03, the number of processes, and the address of rank 0."""
    parser = _ddp_flags(doc, ["04", "01 to 05"])
    gpus = torch.accelerator.device_count()
    # fmt: off
    add_flags(parser, [
        ("--nproc-per-node N", whole_number(1), gpus or 2, "processes, one per GPU"),
        ("--nodes N", whole_number(1), 1, "number of machines"),
        ("--node-rank N", whole_number(0), 0, "which machine this is, counted from 0"),
        ("--dist-url tcp://HOST:PORT", str, None,
         "the address of rank 0; on one machine, a free port by default"),
    ])
    # fmt: on
    args = parser.parse_args()
    for name, count in launched_copies().items():
        if count > args.nodes:
            problem = (
                f"{name}={count}: a launcher started {count} copies of a script that "
                "starts its own processes"
            )
            command = (
                f"python {parser.prog}, or srun --ntasks={args.nodes} --ntasks-per-node=1 "
                f"python {parser.prog}"
            )
            parser.error(f"{problem}, expected one per machine; {command}")
    _check_batch(parser, args, args.nodes * args.nproc_per_node)
    if args.node_rank > (last := args.nodes - 1):
        parser.error(
            f"--node-rank {args.node_rank} of --nodes {args.nodes}: "
            f"expected a node rank from 0 to {last}"
        )
    if args.dist_url is None and args.nodes > 1:
        parser.error(
            f"--nodes {args.nodes} without --dist-url: "
            "expected tcp://HOST:PORT, the machine of --node-rank 0"
        )
    if args.dist_url is None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            args.dist_url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    if not re.fullmatch(r"tcp://[^/]+:\d+", args.dist_url):
        parser.error(
            f"--dist-url {args.dist_url}: expected tcp://HOST:PORT, as in tcp://10.0.0.1:29500"
        )
    return args


def _ddp_flags(doc, others=("01 to 05",)):
    parser = shared_flags(doc, others)
    sync_bn = ("--sync-bn", bool, False, "batch norm over the images of all processes")
    add_flags(parser, [sync_bn])
    # torch.distributed.launch passes --local-rank; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)
    return parser
