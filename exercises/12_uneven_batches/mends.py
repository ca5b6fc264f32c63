"""Mends of exercise 12, right and wrong."""

LOOP = """\
for step, (batch, labels) in enumerate(loader):
    loss = nn.functional.cross_entropy(ddp(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step + 1} of {len(loader)}: loss {loss.item():.3f}")
"""
INDENTED = "".join(f"    {line}\n" for line in LOOP.splitlines())
FIRST_LINE = "for step, (batch, labels) in enumerate(loader):\n"
BACKWARD = "    loss.backward()\n"
END = "dist.barrier()  # the epoch is over\n"
AGREE = """\
steps = torch.tensor(len(loader))
dist.all_reduce(steps, op=dist.ReduceOp.MIN)
"""

RIGHT = {
    "a rank that has no more batches joins the messages of the others": [
        (LOOP, f"with ddp.join():\n{INDENTED}")
    ],
    "the smaller folder repeats images": [
        (
            FIRST_LINE,
            "import itertools\n\n"
            "lengths = [None, None]\n"
            "dist.all_gather_object(lengths, len(loader))\n"
            "batches = itertools.islice(itertools.cycle(loader), max(lengths))\n"
            "for step, (batch, labels) in enumerate(batches):\n",
        ),
    ],
    "empty batches for the rank that has no more": [
        (
            FIRST_LINE,
            f"{AGREE.replace('MIN', 'MAX')}"
            "batches = list(loader)\n"
            "batches += [(images[:0], targets[:0])] * (steps.item() - len(batches))\n"
            "for step, (batch, labels) in enumerate(batches):\n",
        ),
        ("cross_entropy(ddp(batch), labels)", 'cross_entropy(ddp(batch), labels, reduction="sum")'),
    ],
}

WRONG = {
    "the remaining steps without the other rank": (
        [
            (FIRST_LINE, AGREE + FIRST_LINE),
            ("ddp(batch)", "(ddp if step < steps else model)(batch)"),
        ],
        "The ranks took 6 and 4 training steps, and end with different weights",
    ),
    "all images on both ranks": (
        [("Subset(dataset, folder)", "dataset")],
        "150 images were trained on both ranks",
    ),
    "stop when the other rank is gone": (
        [
            (
                BACKWARD,
                "    try:\n        loss.backward()\n    except RuntimeError:\n        break\n",
            ),
            (END, ""),
        ],
        "one rank stopped waiting only because the other one had ended",
    ),
}
