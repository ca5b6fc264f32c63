"""Choose a GPU. Each process should have a GPU of its own on its machine.

Two machines have two GPUs each, and torchrun starts four processes: ranks 0 and 1 on the first
machine, 2 and 3 on the second. You need no GPU: the program only names the device. On real GPUs,
ranks 2 and 3 would fail with "invalid device ordinal".
"""

import os

import torch

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])

device = torch.device("cuda", rank)
print(f"rank {rank} of {world_size}, local rank {local_rank}, would use {device}")
