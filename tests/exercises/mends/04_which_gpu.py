"""Mends of exercise 4, right and wrong."""

DEVICE = 'device = torch.device("cuda", rank)'

RIGHT = {
    "the rank, modulo the processes of a machine": [
        (
            DEVICE,
            'local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])\n'
            'device = f"cuda:{rank % local_world_size}"',
        )
    ],
    "the rank, modulo the GPUs of a machine": [
        (DEVICE, 'device = torch.device("cuda", rank % torch.cuda.device_count())')
    ],
    "the current GPU": [
        (DEVICE, 'torch.cuda.set_device(local_rank)\ndevice = torch.device("cuda")')
    ],
}

WRONG = {
    "modulo two": (
        [(DEVICE, 'device = torch.device("cuda", rank % 2)')],
        "With 3 processes on a machine, ranks 0 and 2 share cuda:0",
    ),
    "a GPU without a number": (
        [(DEVICE, 'device = torch.device("cuda")')],
        "Rank 0 chose cuda; I expected a GPU with its number",
    ),
    "all on the first GPU": (
        [(DEVICE, 'device = torch.device("cuda", 0)')],
        "ranks 0 and 1 share cuda:0 of one machine",
    ),
    "only two of the GPUs are visible": (
        [(DEVICE, f'os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"\n{DEVICE}')],
        "shows 2 GPUs",
    ),
}
