"""The flags of 08."""

import math
import os
import pickle

import torch

from common.errors import one_line
from common.flags import SHARED, add_flags, number, whole_number
from ddp.flags import RankParser, warn_of_restarts
from gpt.text import VOCABULARY

SAME = ("--seed", "--print-every", "--log-file", "--save")  # as in the other scripts


def parse_gpt_args(doc):
    """Parse the flags of 08. --help prints `doc`, the docstring of the script."""
    parser = RankParser(doc)
    # fmt: off
    add_flags(parser, [
        ("--text FILE", str, None, "train on the bytes of FILE; by default, on this book"),
        ("--epochs N", whole_number(0), 2, "passes over the text; 0 only samples from --weights"),
        ("--batch-tokens N", whole_number(1), 1024, "tokens per training step, of all ranks"),
        ("--accumulate N", whole_number(1), 1, "micro-batches per training step"),
        ("--layers N", whole_number(1), 2, "blocks of the model"),
        ("--heads N", whole_number(1), 4, "attention heads per block"),
        ("--width N", whole_number(1), 128, "size of the vector of a token"),
        ("--context N", whole_number(1), 64, "tokens that the model sees at once"),
        ("--lr X", number(above=0), 4e-3, "highest learning rate, whatever the batch is"),
        ("--warmup-steps N", whole_number(0), 50, "training steps of rising learning rate"),
        ("--weight-decay X", number(), 0.1, "of matrices; norms have none"),
        ("--clip-grad X", number(above=0), 1.0, "limit the norm of the gradients"),
        ("--data N", whole_number(1), None, "parts of the batch; by default, ranks / --tensor"),
        ("--tensor N", whole_number(1), 1, "parts of each block"),
        ("--amp", ("none", "bf16"), "none", "type to gather and compute in"),
        ("--checkpoints-path DIR", str, None,
         "save there, and continue from the newest checkpoint there"),
        ("--checkpoint-every N", whole_number(1), 100, "training steps between checkpoints"),
        ("--weights FILE", str, None, "begin with the model that --save wrote to FILE"),
        ("--prompt TEXT", str, "The ranks ", "begin of the text to sample"),
        ("--sample N", whole_number(0), 300, "bytes to sample in the end"),
    ])
    # fmt: on
    add_flags(parser, [row for row in SHARED if row[0].split()[0] in SAME])
    parser.set_defaults(print_every=100)
    args = parser.parse_args()
    args.sizes = {name: getattr(args, name) for name in ("layers", "heads", "width", "context")}
    if args.weights:
        content = read_weights(parser, args.weights)
        args.sizes, args.weights = content["sizes"], content["model"]
        vars(args).update(args.sizes)
    args.arch = "gpt"
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # an error of main if it is missing
    args.data = args.data or max(1, world_size // args.tensor)
    check_mesh(parser, args, world_size)
    args.batch_size, rest = divmod(args.batch_tokens, args.context)  # windows per training step
    parts = args.data * args.accumulate
    if rest or args.batch_size % parts:
        step = parts * args.context
        parser.error(
            f"--batch-tokens {args.batch_tokens}: expected a multiple of --context x --data x "
            f"--accumulate = {args.context} x {args.data} x {args.accumulate} = {step}; "
            f"--batch-tokens {max(1, round(args.batch_tokens / step)) * step}"
        )
    if not args.checkpoints_path:
        warn_of_restarts(parser, "--checkpoints-path DIR continues")
    return args


def read_weights(parser, file):
    """Return what --save wrote: a dict of the sizes and the weights of a model."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        if content["sizes"] and content["model"]:
            return content
        raise KeyError("model")
    except (OSError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        parser.error(
            f"--weights {file}: {one_line(error)[:80]}: expected a file that --save wrote; "
            f"torchrun --nproc-per-node=2 {parser.prog} --save gpt.pt"
        )


def check_mesh(parser, args, world_size):
    """Refuse a model that the mesh cannot cut, and a mesh that has not the size of the world."""
    if args.width % args.heads:
        width = max(1, round(args.width / args.heads)) * args.heads
        parser.error(
            f"--width {args.width} for --heads {args.heads}: expected a multiple; --width {width}"
        )
    for name, size in (("--heads", args.heads), ("a vocabulary of", VOCABULARY)):
        if size % args.tensor:
            parser.error(
                f"{name} {size} for --tensor {args.tensor}: expected a multiple of the parts; "
                f"--tensor {math.gcd(args.heads, VOCABULARY)} is the most for this model"
            )
    ranks = args.data * args.tensor
    if ranks != world_size:
        parser.error(
            f"--data {args.data} x --tensor {args.tensor} = {ranks} for {world_size} ranks: "
            f"expected the number of ranks; torchrun --nproc-per-node={ranks} {parser.prog} "
            f"--data {args.data} --tensor {args.tensor}"
        )
