"""Mends of exercise 18, right and wrong."""

TRY = """\
    try:
        if batch.isnan().any():
            raise ValueError("a damaged image")
        loss = nn.functional.cross_entropy(ddp(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except ValueError as error:
        print(f"skipping a batch: {error}")
"""
TRAIN = """\
    loss = nn.functional.cross_entropy(ddp(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
AGREE = """\
    damaged = batch.isnan().any().int()
    dist.all_reduce(damaged, op=dist.ReduceOp.MAX)
    if damaged:
"""
PRINT = '        print(f"skipping a batch: {error}")\n'

RIGHT = {
    "all ranks skip the batch": [(TRY, f"{AGREE}        continue\n{TRAIN}")],
    "without the damaged image": [
        (
            TRY,
            "    good = ~batch.isnan().any(dim=1)\n"
            f"    batch, labels = batch[good], labels[good]\n{TRAIN}",
        )
    ],
    "an error in Chinese": [('"a damaged image"', '"像素损坏"'), (PRINT, "        raise\n")],
    "an exit code that says failure": [(PRINT, f"{PRINT}        raise SystemExit(1)\n")],
}

WRONG = {
    "an exit code that says success": (
        [(PRINT, f"{PRINT}        raise SystemExit(0)\n")],
        "Rank 1 ended as if all was well",
    ),
    "the damaged image is trained": ([(TRY, TRAIN)], "The weights are not numbers (NaN)"),
    "both ranks end without an error": (
        [(TRY, f"{AGREE}        break\n{TRAIN}")],
        "The ranks ended without an error after training step 1",
    ),
}
