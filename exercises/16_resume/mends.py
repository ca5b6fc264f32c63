"""Mends of exercise 16, right and wrong."""

LOOP = "    for batch, labels in loader:\n"
LOADER = "    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))\n"
TRAIN = "def train(checkpoint, last_step):\n"

RIGHT = {
    "a sampler without the images that were trained": [
        (
            LOADER,
            '    numbers = list(DistributedSampler(dataset))[16 * checkpoint["step"] :]\n'
            "    loader = DataLoader(dataset, batch_size=16, sampler=numbers)\n",
        )
    ],
    "all batches in a list, before the training": [
        (LOADER, ""),
        (TRAIN, f"batches = list({LOADER.partition('= ')[2].strip()})\n\n\n{TRAIN}"),
        (LOOP, "    for batch, labels in batches[step:]:\n"),
    ],
}

WRONG = {
    "three batches, wherever the job was killed": (
        [(LOOP, "    for batch, labels in list(loader)[3 if step else 0 :]:\n")],
        "64 images were trained before and after the restart at step 5",
    ),
    "one batch too many is skipped": (
        [
            (
                LOOP,
                "    for k, (batch, labels) in enumerate(loader):\n"
                '        if k <= checkpoint["step"]:\n'
                "            continue\n",
            )
        ],
        "The epoch had 7 training steps in all; expected 8",
    ),
    "an iterator that outlives the job": (
        [
            (LOADER, ""),
            (TRAIN, f"loader = iter({LOADER.partition('= ')[2].strip()})\n\n\n{TRAIN}"),
        ],
        "A job that starts again has no such iterator",
    ),
}
