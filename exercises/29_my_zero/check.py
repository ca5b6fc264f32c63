"""Each rank must keep its share of the momentum, and all must have the weights of plain SGD."""

from exercises.judge.judging import (
    refuse,
    refuse_torchs_own,
    refuse_unfinished_messages,
    same,
    variable,
    weights_of,
)
from exercises.judge.parts import first_gradients, why_other_weights
from exercises.judge.runner import ODD_MODEL, Setup
from exercises.sentences import joined, say

TORCHS_SGD = Setup(program="../25_my_ddp/torch_ddp.py", environment={"LR": 0.1, "MOMENTUM": 0.9})
ODD_SGD = ODD_MODEL._replace(
    program=TORCHS_SGD.program, environment=ODD_MODEL.environment | TORCHS_SGD.environment
)
SETUPS = [Setup(), TORCHS_SGD, ODD_MODEL, ODD_SGD]


def check(ranks, torch_ranks, odd_ranks, torch_odd_ranks):
    refuse_torchs_own(ranks[0], allowed=["DistributedDataParallel"])
    refuse_unfinished_messages(ranks[0], begin="step", end="batch")
    for mine, torchs in ((ranks, torch_ranks), (odd_ranks, torch_odd_ranks)):
        run = say(" with {count} ranks", count=len(mine))
        if mine is odd_ranks:
            run = say(" with WORLD_SIZE=3 and ODD_MODEL=1 (tied, frozen and unused parameters)")
        refuse_other_weights(mine, torchs[0], run)
        refuse_other_shares([momentum(rank) for rank in mine], momentum(torchs[0]), run)
    return say(
        "the ranks keep {parts} bytes of momentum instead of {whole:,}, and the weights are those"
        " of an ordinary SGD, bit for bit.",
        parts=joined(
            "{before} + {after}", [say("{size:,}", size=momentum(rank)) for rank in ranks]
        ),
        whole=momentum(torch_ranks[0]),
    )


def refuse_other_weights(ranks, torch_rank, run):
    weights = [weights_of(variable(rank, "model")) for rank in ranks]
    if not all(same(weights[0], others) for others in weights):
        refuse("At the end{run}, the ranks have different weights.", run=run)
    if not same(weights[0], weights_of(variable(torch_rank, "model"))):
        refuse(
            "The ranks have equal weights{run}, but not those of an ordinary SGD with"
            " momentum{reason}.",
            run=run,
            reason=why_other_weights(ranks, first_gradients(torch_rank)),
        )


def refuse_other_shares(parts, whole, run):
    """Refuse momentum that is kept elsewhere, several times, or almost all by one rank."""
    if sum(parts) < whole:
        refuse(
            "The optimizers of torch keep {kept:,} bytes of momentum{run}, of {whole:,}: please"
            " keep all of it there, so that I can count it.",
            kept=sum(parts),
            run=run,
            whole=whole,
        )
    for rank, part in enumerate(parts):
        if part > 0.65 * whole or part == 0:
            refuse(
                "Rank {rank} keeps {part:,} bytes of momentum{run}, of {whole:,}: expected about"
                " 1/{count}.",
                rank=rank,
                part=part,
                run=run,
                whole=whole,
                count=len(parts),
            )


def momentum(rank):
    """Return the bytes of momentum in all optimizers that took part in the last training step."""
    kinds = [event.kind for event in rank.events]
    last = len(kinds) - kinds[::-1].index("backward")
    return sum(event.value.state_bytes for event in rank.events[last:] if event.kind == "step")
