"""Mends of exercise 19, right and wrong."""

SAMPLER = "sampler = WeightedRandomSampler(weights, 96, replacement=False)\n"
LOADER = "loader = DataLoader(dataset, batch_size=16, sampler=sampler)\n"
EPOCH = "for epoch in range(2):\n"
DRAW = "WeightedRandomSampler(weights, 96, replacement=False)"
SHARE = "    loader = DataLoader(dataset, batch_size=16, sampler=drawn[rank::world_size])\n"


def drawn_by(code):
    """Return the replacements that draw in each epoch, by this code."""
    return [(SAMPLER + LOADER, ""), (EPOCH, EPOCH + code)]


RIGHT = {
    "rank 0 draws": drawn_by(
        f"    drawn = torch.tensor(list({DRAW}))\n    dist.broadcast(drawn, src=0)\n"
        f"{SHARE.replace(']', '].tolist()')}"
    ),
    "a share of each global batch": [
        ("batch_size=16,", "batch_size=16 * world_size,"),
        (
            "        loss = nn",
            "        batch, labels = batch[rank::world_size], labels[rank::world_size]\n"
            "        loss = nn",
        ),
    ],
}

WRONG = {
    "unrelated draws": (
        [(SAMPLER, f"torch.manual_seed(rank)\n{SAMPLER}")],
        "the ranks trained on 192 images together",
    ),
    "one draw for both epochs": (
        [(SAMPLER, f"drawn = list({DRAW})\n"), ("=sampler)", "=drawn[rank::world_size])")],
        "Both epochs train on the same images",
    ),
    "without the weights": (
        drawn_by(
            "    generator = torch.Generator().manual_seed(epoch)\n"
            "    drawn = torch.randperm(240, generator=generator)[:96].tolist()\n"
            f"{SHARE}"
        ),
        "of the 30 images of the rare class were trained",
    ),
}
