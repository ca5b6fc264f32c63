"""The flags that 07 adds to those of 03."""

import os

from common.flags import add_flags, number, whole_number
from ddp.flags import check_batch, ddp_parser, warn_of_restarts


def parse_fsdp_args(doc):
    """Parse the flags of 07: those of 03, and those of a sharded model."""
    parser = ddp_parser(doc)
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
    check_batch(parser, args, world_size)
    args.shard_size = args.shard_size or world_size
    if world_size % args.shard_size:
        parser.error(
            f"--shard-size {args.shard_size} of {world_size} ranks: "
            "expected a number that divides the number of ranks"
        )
    if not args.checkpoints_path:
        warn_of_restarts(parser, "--checkpoints-path DIR continues")
    return args
