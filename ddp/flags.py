"""The flags that 03, 04 and 05 add; 07 has these too."""

import argparse
import os
import re
import socket
import sys

import torch

from common.flags import SHARED, Parser, add_flags, launched_copies, whole_number
from ddp.errors import let_rank_0_speak, write_error_file


class RankParser(Parser):
    """A Parser of the processes of one run: one of them prints what all have found."""

    def exit(self, status=0, message=None):
        if status:
            let_rank_0_speak()
            write_error_file(ValueError(message), message.strip())
        super().exit(status, message)


def parse_ddp_args(doc):
    """Parse the flags of 03 and 05: those of 01, and --sync-bn."""
    parser = ddp_parser(doc)
    args = parser.parse_args()
    copies = launched_copies()
    check_batch(parser, args, copies.get("WORLD_SIZE") or copies.get("SLURM_STEP_NUM_TASKS", 1))
    warn_of_restarts(parser, "06_imagenet.py --resume continues")
    return args


def parse_spawn_args(doc):
    """Parse the flags of 04: those of 03, the number of processes, and the address of rank 0."""
    parser = ddp_parser(doc)
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
    check_batch(parser, args, args.nodes * args.nproc_per_node)
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


def ddp_parser(doc):
    """Return a parser of the flags of 03; see Parser."""
    parser = RankParser(doc)
    add_flags(parser, SHARED)
    sync_bn = ("--sync-bn", bool, False, "batch norm over the images of all processes")
    add_flags(parser, [sync_bn])
    # torch.distributed.launch passes --local-rank; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)
    return parser


def check_batch(parser, args, world_size):
    """Refuse a batch that is not one of equal parts, of two images or more, for all processes."""
    parts, rest = divmod(args.batch_size, world_size)
    if rest or parts < 2:  # batch norm cannot train on a single image
        fewer = max(2, parts) * world_size
        parser.error(
            f"--batch-size {args.batch_size} for {world_size} processes: expected a multiple of "
            f"{world_size}, such as {fewer} or {fewer + world_size}"
        )


def warn_of_restarts(parser, remedy):
    """Warn of torchrun's restarts if the script does not continue after one."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("RANK") == "0":
        found = f"{parser.prog}: --max-restarts={restarts}"
        print(f"{found}: each restart begins at epoch 1; {remedy}", file=sys.stderr)
