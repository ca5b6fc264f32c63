"""Mends of exercise 11, right and wrong."""

SAVE = "torch.save(ddp.state_dict(), path)\n"
LOAD = "loaded.load_state_dict(torch.load(path))"

RIGHT = {
    "a checkpoint in an open file, and a message": [
        (
            SAVE,
            "if rank == 0:\n"
            '    with open(path, "wb") as file:\n'
            '        torch.save({"model": model.state_dict()}, file)\n'
            "done = torch.ones(1)\n"
            "dist.broadcast(done, src=0)\n",
        ),
        (LOAD, 'loaded.load_state_dict(torch.load(path)["model"])'),
    ],
}

WRONG = {
    "the prefix is removed by the reader": (
        [
            (SAVE, f"if rank == 0:\n    {SAVE}dist.barrier()\n"),
            (
                LOAD,
                'loaded.load_state_dict({k.removeprefix("module."): v for k, v in'
                " torch.load(path).items()})",
            ),
        ],
        "The file has the keys of a DDP object, such as `module.weight`",
    ),
    "no barrier": (
        [(SAVE, "if rank == 0:\n    torch.save(model.state_dict(), path)\n")],
        "The program failed: rank 1, line 26, `loaded.load_state_dict(torch.load(path))`",
    ),
    "a second of sleep in place of a barrier": (
        [
            (
                SAVE,
                "import time\n\n"
                "if rank == 0:\n"
                "    torch.save(model.state_dict(), path)\n"
                "time.sleep(1)\n",
            )
        ],
        "no collective told it that rank 0 had written it",
    ),
}
