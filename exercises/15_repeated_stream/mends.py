"""Mends of exercise 15, right and wrong."""

RANGE = "range(rank, len(images), world_size)"
LOADER = (
    'loader = DataLoader(Stream(), batch_size=20, num_workers=2, multiprocessing_context="fork")\n'
)
INFO = "        info = torch.utils.data.get_worker_info()\n"
FOR = f"        for number in {RANGE}:\n"

RIGHT = {
    "the share of a rank is divided": [
        (
            FOR,
            f"{INFO}        mine = {RANGE}\n"
            "        for number in mine[info.id :: info.num_workers]:\n",
        )
    ],
    "in worker_init_fn": [
        (RANGE, "range(self.first, len(images), self.step)"),
        (
            LOADER,
            "def divide(worker):\n"
            "    info = torch.utils.data.get_worker_info()\n"
            "    info.dataset.first = rank + world_size * worker\n"
            "    info.dataset.step = world_size * info.num_workers\n\n\n"
            f"{LOADER[:-2]}, worker_init_fn=divide)\n",
        ),
    ],
}

WRONG = {
    "no workers": (
        [("num_workers=2", "num_workers=0"), (', multiprocessing_context="fork"', "")],
        "The loader of rank 0 has 0 workers",
    ),
    "divided by the workers only": (
        [(FOR, f"{INFO}        for number in range(info.id, len(images), info.num_workers):\n")],
        "Each rank trained on all 240 images",
    ),
    "for two ranks only": (
        [(FOR, f"{INFO}        for number in range(rank + 2 * info.id, len(images), 4):\n")],
        "With three ranks: 119 images were trained on several ranks",
    ),
}
