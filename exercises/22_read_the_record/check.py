"""The record must be read rightly, and the program must end with the results of one process."""

import torch
from torch import nn

from exercises.judge.judging import classes, evaluated, refuse, variable
from exercises.judge.runner import OTHER_IMAGES, THREE_RANKS
from exercises.sentences import say

SETUPS = [THREE_RANKS, OTHER_IMAGES._replace(local_ranks=(0, 1, 2))]
SKIPPING_RANK, SKIPPED_LINE = 2, 46
PARTS = ((0, 60), (60, 62), (62, 107))
IMAGES = 107


def check_run(ranks):
    results = torch.tensor(variable(ranks[0], "results"), dtype=torch.double)
    if results.shape != (len(PARTS), 2):
        refuse(
            "I expected the loss and the accuracy of {parts} parts in `results` of rank 0.",
            parts=len(PARTS),
        )
    data, model = ranks[0].data, variable(ranks[0], "model")
    for k, (begin, end) in enumerate(PARTS):
        outputs, right = model(data[begin:end]), classes(data[begin:end])
        expected = [nn.functional.cross_entropy(outputs, right).item()]
        expected += [(outputs.argmax(dim=1) == right).double().mean().item()]
        if not torch.allclose(results[k], torch.tensor(expected, dtype=torch.double), atol=1e-4):
            refuse(
                "The loss and the accuracy of part {part} are {found[0]:.4f} and {found[1]:.4f};"
                " expected {expected[0]:.4f} and {expected[1]:.4f}.",
                part=k,
                found=results[k].tolist(),
                expected=expected,
            )
    count = sum(len(evaluated(rank)) for rank in ranks)
    if count > 2 * IMAGES:
        refuse(
            "The ranks evaluated {count} images, for the loss and for the accuracy of {images}:"
            " each should take its own.",
            count=count,
            images=IMAGES,
        )
    rank, line = (variable(ranks[0], name) for name in ("skipping_rank", "skipped_line"))
    if (str(rank), str(line)) != (str(SKIPPING_RANK), str(SKIPPED_LINE)):
        refuse(
            "The program is right now, but not the answers, rank {rank} and line {line}. In the"
            " first call in which the lines of the record differ, which rank is alone? In which"
            " line do the others make the call that it leaves out?",
            rank=rank,
            line=line,
        )
    return say(
        "rank {rank} left out the call in line {line}, and now the results are those of one"
        " process.",
        rank=rank,
        line=line,
    )
