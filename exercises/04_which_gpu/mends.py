"""Mends of exercise 4, right and wrong."""

DEVICE = 'device = torch.device("cuda", rank)'

RIGHT = {
    "the rank, modulo the GPUs of a machine": [
        (DEVICE, 'device = torch.device("cuda", rank % torch.cuda.device_count())')
    ],
    "the current GPU": [
        (DEVICE, 'torch.cuda.set_device(local_rank)\ndevice = torch.device("cuda")')
    ],
    "the only GPU that is visible": [
        (
            DEVICE,
            'os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)\ndevice = torch.device("cuda")',
        )
    ],
}

WRONG = {
    "modulo two": (
        [(DEVICE, 'device = torch.device("cuda", rank % 2)')],
        "With 3 processes on a machine, ranks 0 and 2 share cuda:0",
    ),
    "only two of the GPUs are visible": (
        [(DEVICE, f'os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"\n{DEVICE}')],
        "shows 2 GPUs",
    ),
    "the rank is the local one": (
        [('rank = int(os.environ["RANK"])', 'rank = int(os.environ["LOCAL_RANK"])')],
        "Rank 2 calls itself rank 0",
    ),
}
