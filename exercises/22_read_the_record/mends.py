"""Mends of exercise 22, right and wrong."""

EARLY = "    if not numbers:\n        return total\n"
ANSWERS = [
    ("skipping_rank = None", "skipping_rank = 2"),
    ("skipped_line = None", "skipped_line = 46"),
]
BARRIER = "dist.barrier()  # the evaluation is over\n"

RIGHT = {
    "the call before the early return": [
        *ANSWERS,
        (EARLY, EARLY.replace("        return", "        dist.all_reduce(total)\n        return")),
    ],
}

WRONG = {
    "a program that only ends": (
        [(BARRIER, f"if rank == 2:\n    dist.all_reduce(torch.zeros(2))\n{BARRIER}")],
        "The loss and the accuracy of part 1 are 2.3030 and 1.3657; expected 2.3030 and 0.0000",
    ),
    "the line of the last call": (
        [ANSWERS[0], ("skipped_line = None", "skipped_line = 66"), (EARLY, "")],
        "not the answers, rank 2 and line 66",
    ),
}
