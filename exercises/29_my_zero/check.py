"""Each rank must keep about half of the momentum, and all must have the weights of plain SGD."""

from exercises.judge.judging import refuse, refuse_unfinished_messages, same, variable, weights_of
from exercises.judge.runner import Setup
from exercises.sentences import say

SETUPS = [Setup(), Setup(program="torch_sgd.py")]


def check(ranks, torch_ranks):
    refuse_unfinished_messages(ranks[0], begin="step", end="batch")
    truth = weights_of(variable(torch_ranks[0], "model"))
    weights = [weights_of(variable(rank, "model")) for rank in ranks]
    if not same(*weights):
        refuse("At the end, the ranks have different weights.")
    if not same(weights[0], truth):
        refuse("The ranks have equal weights, but not those of an ordinary SGD with momentum.")
    whole = momentum(torch_ranks[0])
    parts = [momentum(rank) for rank in ranks]
    if sum(parts) < whole:
        refuse(
            "The optimizers of torch keep {kept:,} bytes of momentum, of {whole:,}: please keep"
            " all of it there, so that I can count it.",
            kept=sum(parts),
            whole=whole,
        )
    for rank, part in enumerate(parts):
        if part > 0.65 * whole:
            refuse(
                "Rank {rank} keeps {part:,} bytes of momentum, of {whole:,}: expected about half.",
                rank=rank,
                part=part,
                whole=whole,
            )
    return say(
        "the ranks keep {parts[0]:,} and {parts[1]:,} bytes of momentum instead of {whole:,}, and"
        " the weights are those of an ordinary SGD, bit for bit.",
        parts=parts,
        whole=whole,
    )


def momentum(rank):
    """Return the bytes of momentum in all optimizers that took part in the last training step."""
    kinds = [event.kind for event in rank.events]
    last = len(kinds) - kinds[::-1].index("backward")
    return sum(event.value.state_bytes for event in rank.events[last:] if event.kind == "step")
