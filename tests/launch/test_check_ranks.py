"""launch/check_ranks.py, on training scripts with a mistake, and on right ones."""

import functools
import json
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from processes import ROOT
from ranks import Ranks

from launch.rank_watch import monitor

# A right script: 64 samples in 8 steps per epoch on two ranks, then an evaluation.
RIGHT = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
test_data = TensorDataset(torch.randn(21, 8), torch.randint(2, (21,)))
net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
ddp = DistributedDataParallel(net)
torch.manual_seed(100 + rank)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
test_loader = DataLoader(test_data, batch_size=5, sampler=range(rank, 21, world_size))
for epoch in range(2):
    sampler.set_epoch(epoch)
    ddp.train()
    for x, y in loader:
        loss = nn.functional.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ddp.eval()
    for buffer in net.buffers():
        dist.broadcast(buffer, 0)
    total = torch.zeros(1)
    with torch.no_grad():
        for x, y in test_loader:
            total += nn.functional.cross_entropy(net(x), y, reduction="sum")
    dist.all_reduce(total)
    scheduler.step(total.item())
    if rank == 0:
        torch.save(net.state_dict(), "net.pt")
dist.destroy_process_group()
"""

AUGMENTED = """\
class Noisy(TensorDataset):
    def __getitem__(self, k):
        x, y = super().__getitem__(k)
        return x + 0.1 * torch.randn(8), y


def seed_worker(worker):
    torch.manual_seed(worker)


data = Noisy(torch.randn(64, 8), torch.randint(2, (64,)))"""

# What is replaced in several cases, by what
DATA = "data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))"
RANDOM_CROPS = (DATA, AUGMENTED)
RANDOM_BATCHES = (
    "for x, y in loader:",
    "for _ in range(8):\n        x, y = torch.randn(4, 8), torch.ones(4).long()",
)
FIND_UNUSED = ("Parallel(net)", "Parallel(net, find_unused_parameters=True)")

# name: (what is replaced in RIGHT, by what, what the checker finds)
MISTAKES = {
    "other shapes, which gloo adds up all the same": [
        (
            "for epoch in range(2):",
            "dist.all_reduce(torch.ones(4).view((4,) if rank else (2, 2)))\nfor epoch in range(2):",
        ),
        r"call \d+ of the group \S+ differs: rank 0: all_?reduce \[2, 2\] .* rank 1: \S+ \[4\] ",
    ],
    "net instead of ddp": [
        ("cross_entropy(ddp(x), y)", "cross_entropy(net(x), y)"),
        r"weights of the ranks differ after training step 1 \(SGD at \S+:\d+\): 0.weight, \S+ "
        r"and \d more. No forward pass of a DistributedDataParallel in training: at \S+:\d+ ",
    ],
    "jingyaogong/minimind#853: the forward pass through .module": [
        ("cross_entropy(ddp(x), y)", "cross_entropy(ddp.module(x), y)"),
        r"No forward pass of a DistributedDataParallel in training: at \S+:\d+ the model inside it",
    ],
    "a wrapper that nothing holds": [
        ("ddp = DistributedDataParallel(net)", "ddp = net"),
        ("cross_entropy(ddp(x), y)", "cross_entropy(DistributedDataParallel(net)(x), y)"),
        r"training step 1 .* The DistributedDataParallel that was called at \S+:\d+ is gone, so",
    ],
    "no wrap": [
        ("ddp = DistributedDataParallel(net)", "ddp = net"),
        r"No DistributedDataParallel was made",
    ],
    "a layer outside": [
        (
            "optimizer = torch.optim.SGD(net.parameters()",
            "head = nn.Linear(2, 2)\n"
            "optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()]",
        ),
        ("cross_entropy(ddp(x), y)", "cross_entropy(head(ddp(x)), y)"),
        r"No DistributedDataParallel holds these parameters",
    ],
    "weights changed after the wrap": [
        (
            "ddp = DistributedDataParallel(net)",
            "ddp = DistributedDataParallel(net)\nnet[0].weight.data += rank",
        ),
        r"0.weight. They differed before the first step",
    ],
    "optimizer state of one rank": [
        (
            "sampler = D",
            "if rank == 0:\n    for p in net.parameters():\n"
            "        optimizer.state[p]['momentum_buffer'] = torch.ones_like(p)\nsampler = D",
        ),
        r"Their gradients were equal: the optimizer's state differs",
    ],
    "a sharded optimizer that has its parameters in another order on each rank": [
        (
            "optimizer = torch.optim.SGD(net.parameters(), ",
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
            "optimizer = ZeroRedundancyOptimizer(\n"
            "    list(net.parameters())[:: 1 - 2 * rank], torch.optim.SGD, ",
        ),
        r"Their gradients were equal, but the optimizer has its parameters in another order",
    ],
    "clipped by rank": [
        (
            "        optimizer.step()",
            "        nn.utils.clip_grad_norm_(net.parameters(), 1e-3 "
            "* (1 + rank))\n        optimizer.step()",
        ),
        r"Their gradients differ: they were changed after they were averaged",
    ],
    "no_sync in the last": [
        (
            "        optimizer.step()",
            "        with ddp.no_sync():\n"
            "            nn.functional.cross_entropy(ddp(x), y).backward()\n"
            "        optimizer.step()",
        ),
        r"The last forward pass before the step, at \S+:\d+, is under no_sync\(\)",
    ],
    "learning rates": [
        ("lr=0.1,", "lr=0.1 / (1 + rank),"),
        r"the lr of the ranks differs in training step 1: 0.1 on rank 0, 0.05 on rank 1",
    ],
    "rmchurch/disruptcnn#3: ReduceLROnPlateau on a local loss": [
        ("    dist.all_reduce(total)\n", ""),
        r"ReduceLROnPlateau.step\(\) got \S+ on rank 0, \S+ on rank 1 at \S+:\d+",
    ],
    "no sampler": [
        ("sampler=sampler)", "shuffle=True)"),
        r"two ranks read the same samples: \d+ of 64 samples of epoch 1 \(RandomSampler at "
        r"\S+:\d+\), such as sample \d+. Give the loader sampler=DistributedSampler",
    ],
    "mehta-lab/VisCy#408: an epoch counter that never advances": [
        ("    sampler.set_epoch(epoch)\n", ""),
        r"epochs 1 and 2 have the same order of samples \(DistributedSampler at \S+:\d+\). Call "
        r"sampler.set_epoch",
    ],
    "NVlabs/LongLive#71: another sampler seed on each rank": [
        ("DistributedSampler(data)", "DistributedSampler(data, seed=rank)"),
        r"two ranks read the same samples: .*The seed of the DistributedSampler differs: 0 on "
        r"rank 0, 1 on rank 1",
    ],
    "half of the data": [
        ("DistributedSampler(data)", "DistributedSampler(data, num_replicas=4, rank=rank)"),
        r"no rank reads 32 of 64 samples in epoch 1 .*should read one half",
    ],
    "random split": [
        (
            "sampler = D",
            "torch.seed()\ndata, _ = torch.utils.data.random_split(data, [48, 16])\nsampler = D",
        ),
        r"each rank has another Subset of the data at \S+:\d+: 48 samples on rank 0, of which \d+ ",
    ],
    "weighted sampler": [
        ("sampler=sampler)", "sampler=torch.utils.data.WeightedRandomSampler(torch.ones(64), 64))"),
        r"each of the 2 ranks draws 64 samples per epoch from a data set of 64 \(WeightedRandom",
    ],
    "other data": [
        (
            "data = TensorDataset(torch.randn(64, 8)",
            "torch.seed()\ndata = TensorDataset(torch.randn(64, 8)",
        ),
        r"have other samples at the same index, and a DistributedSampler divides them",
    ],
    "huggingface/transformers#37932: the same worker seeds on all ranks": [
        RANDOM_CROPS,
        (
            "sampler=sampler)",
            "sampler=sampler, num_workers=1, multiprocessing_context='fork', "
            "worker_init_fn=seed_worker)",
        ),
        r"the loader workers of all ranks draw the same random numbers \(torch, loader at \S+\)",
    ],
    "mlcommons/training#844: the same noise on all ranks": [
        ("torch.manual_seed(100 + rank)\n", ""),
        RANDOM_BATCHES,
        ("ddp(x)", "ddp(input=x)"),
        r"ranks 0 and 1 have the same input in 16 of 16 forward passes of Sequential",
    ],
    "same dropout": [
        ("torch.manual_seed(100 + rank)\n", ""),
        r"all ranks draw the same random numbers in the forward pass \(dropout\), from torch:",
    ],
    "repeated evaluation": [
        ("sampler=range(rank, 21, world_size)", "sampler=DistributedSampler(test_data)"),
        r"of 21 samples, the ranks evaluate 1 twice, such as sample \d+ \(DistributedSampler",
    ],
    "forgotten in the evaluation": [
        (
            "sampler=range(rank, 21, world_size))",
            "sampler=range(rank, 21, world_size), drop_last=True)",
        ),
        r"of 21 samples, the ranks evaluate 1 on no rank, such as sample 20 .* out drop_last",
    ],
    "evaluation mode on one rank": [
        ("    ddp.train()\n", "    ddp.train(rank == 0 or epoch == 0)\n"),
        r"the model is in another mode on each rank in training step 9 \(training mode on rank 0, "
        r"evaluation mode on rank 1, train.py:\d+\)",
    ],
    "statistics of batch norm": [
        ("        dist.broadcast(buffer, 0)", "        pass"),
        r"batch norm's running statistics differ between the ranks in the evaluation after "
        r"training step 8 \(Sequential",
    ],
    "all micro-steps averaged": [
        (
            "    for x, y in loader:\n        loss",
            "    for k, (x, y) in enumerate(loader):\n        loss",
        ),
        ("        optimizer.zero_grad()\n", ""),
        (
            "        optimizer.step()",
            "        if k % 2:\n            optimizer.step()\n            optimizer.zero_grad()",
        ),
        r"the gradients are averaged in each of the 2 micro-steps of a training step \(\S+:\d+\)",
    ],
    "looks for unused": [
        FIND_UNUSED,
        r"find_unused_parameters=True of Sequential is not needed: .* each of 16 backward passes",
    ],
    "averaged weights of other beginnings": [
        ("torch.manual_seed(0)\n", "torch.manual_seed(0)\ngenerator = torch.Generator()\n"),
        (
            "ddp = DistributedDataParallel(net)",
            "for p in net.parameters():\n"
            "    p.data = torch.randn(p.shape, generator=generator.manual_seed(rank))\n"
            "average = torch.optim.swa_utils.AveragedModel(net)\n"
            "ddp = DistributedDataParallel(net)",
        ),
        ("cross_entropy(net(x)", "cross_entropy(average(x)"),
        ("    ddp.eval()", "    ddp.eval()\n    average.eval()"),
        r"the weights of the evaluated model differ between the ranks in the evaluation after "
        r"training step 8",
    ],
    "unfrozen after the wrap": [
        ("ddp = D", "net[0].requires_grad_(False)\nddp = D"),
        ("sampler = D", "net[0].requires_grad_(True)\nsampler = D"),
        r"0.weight.* in the model that a DistributedDataParallel wraps, but it does not hold them",
    ],
    "two writers": [
        ("    if rank == 0:\n        torch.save", "    torch.save"),
        r"ranks 0, 1 write one file, \S+/net.pt \(\S+:\d+\): they overwrite",
    ],
    "collective on rank 0": [
        ("    dist.all_reduce(total)", "    if rank == 0:\n        dist.all_reduce(total)"),
        r"the ranks wait for each other for ever: call \d+ of the group default_pg differs: rank "
        r"0: all_reduce \[1\] at \S+:\d+",
    ],
    "a forward pass of ddp on rank 0": [
        ("    ddp.eval()", "    if rank == 0:\n        ddp(x)\n    ddp.eval()"),
        r"(the ranks called different collectives: rank 0: a forward|the ranks wait for each)",
    ],
    "early stop of one rank": [
        (
            "    scheduler.step(total.item())",
            "    scheduler.step(total.item())\n    if rank == 1:\n        break",
        ),
        r"the ranks wait for each other for ever: rank 0 in call \d+ .*; rank 1 did not call it: "
        r"rank 1 is at its end: the script has ended",
    ],
    "huggingface/accelerate#2665: an optimizer that was made before fully_shard()": [
        ("ddp = DistributedDataParallel(net)", "ddp = net"),
        (
            "sampler = D",
            "from torch.distributed.fsdp import fully_shard\nfully_shard(net)\nsampler = D",
        ),
        ("batch_size=5", "batch_size=6"),  # as many batches on each rank
        ('torch.save(net.state_dict(), "net.pt")', "pass"),
        r"SGD at \S+:\d+ made 16 training steps, and none of its 6 parameters ever got a gradient",
    ],
    "shards of different models": [
        (
            "ddp = DistributedDataParallel(net)",
            "from torch.distributed.fsdp import fully_shard\nfor p in net.parameters():\n"
            "    p.data += rank\nddp = fully_shard(net)",
        ),
        ("batch_size=5", "batch_size=6"),
        ('torch.save(net.state_dict(), "net.pt")', "pass"),
        r"the ranks give fully_shard\(\) at \S+:\d+ models with different weights",
    ],
    "clipped before the average": [
        ("ddp = DistributedDataParallel(net)", "ddp = net"),
        (
            "        optimizer.step()",
            "        nn.utils.clip_grad_norm_(net.parameters(), 0.1)\n"
            "        for p in net.parameters():\n"
            "            dist.all_reduce(p.grad)\n            p.grad /= world_size\n"
            "        optimizer.step()",
        ),
        r"clip_grad_norm_\(\) at \S+:\d+ gets another norm on each rank in training step 1",
    ],
    "Lightricks/LTX-Video-Trainer#67: a scheduler that every rank steps": [
        ("sampler = D", "decay = torch.optim.lr_scheduler.StepLR(optimizer, 1000)\nsampler = D"),
        (
            "        optimizer.step()",
            "        optimizer.step()\n        for _ in range(world_size):\n"
            "            decay.step()",
        ),
        r"the scheduler is stepped 2 times in each training step, once per rank \(\S+:\d+\)",
    ],
    "a checkpoint with other names": [
        (
            "ddp = D",
            "weights = {f'module.{name}': x for name, x in net.state_dict().items()}\n"
            "net.load_state_dict(weights, strict=False)\nddp = D",
        ),
        r"load_state_dict\(\) of Sequential at \S+:\d+ loaded none of 9 tensors: expected names",
    ],
    "a loss that is averaged before its backward pass": [
        (
            "        loss.backward()",
            "        dist.all_reduce(loss)\n        loss = loss / world_size\n"
            "        loss.backward()",
        ),
        r"the loss was averaged over the ranks at \S+:\d+, before its backward pass",
    ],
    "karpathy/build-nanogpt: each rank goes on by its own batch": [
        (
            "    for x, y in loader:",
            "    for k in range(8):\n        at = 32.0 * (8 * epoch + k + rank)\n"
            "        x = torch.arange(at, at + 32).view(4, 8) / 600\n"
            "        y = torch.ones(4).long()",
        ),
        r"ranks 0 and 1 train on the same samples, 1 steps apart: 60 of 64 inputs of rank 0",
    ],
    "a stream that each rank shuffles whole": [
        (
            DATA,
            "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n"
            "        for k in torch.randperm(64).tolist():\n"
            "            yield torch.full((8,), k / 64), k % 2\n\n\ndata = Stream()",
        ),
        ("sampler = DistributedSampler(data)\n", ""),
        ("sampler=sampler)", ")"),
        ("    sampler.set_epoch(epoch)\n", ""),
        r"ranks 0 and 1 train on the same samples: \d\d of 64 inputs of rank 0",
    ],
    "NVIDIA-NeMo/Speech#16100: timesteps from a generator with one seed": [
        (
            "net = nn.Sequential(",
            "class Noised(nn.Sequential):\n    def forward(self, x, t=0):\n"
            "        return super().forward(x + t)\n\n\n"
            "generator = torch.Generator().manual_seed(1)\nnet = Noised(",
        ),
        ("ddp(x)", "ddp(x, torch.rand(4, 1, generator=generator))"),
        r"input 2 of Noised \(float32 \[4, 1\]\) is the same on two ranks in 16 of 16 forward",
    ],
    "StackOverflow 67180955: a data set that makes its own generator": [
        (
            DATA,
            AUGMENTED.replace("randn(8)", "randn(8, generator=self.generator)")
            + "\ndata.generator = torch.Generator().manual_seed(0)",
        ),
        r"all ranks draw the same random numbers while they load samples, from a generator that",
    ],
    "a split that differs between the ranks": [
        ("sampler = D", "data = Subset(data, range(61 + rank))\nsampler = D"),
        r"different data sets at \S+:\d+ \(61 samples on rank 0, 62 samples on rank 1\), and a",
    ],
    "batches of the script's own that know no rank": [
        (
            "loader = DataLoader(data, batch_size=4, sampler=sampler)",
            "class Batches:\n    def __len__(self):\n        return 1000\n\n"
            "    def __iter__(self):\n"
            "        yield from torch.randperm(4000).view(1000, 4).tolist()\n\n\n"
            "data = TensorDataset(torch.arange(4000.0).expand(8, -1).T, torch.ones(4000).long())\n"
            "loader = DataLoader(data, batch_sampler=Batches())",
        ),
        r"(the same samples|reads the whole data set).*Batches at .* Let Batches draw one order",
    ],
    "asteroid-team/asteroid#674: rank 0 decides on its part": [
        ("    dist.all_reduce(total)\n", ""),
        (
            "    scheduler.step(total.item())",
            "    dist.broadcast(total, 0)\n    if total.item() > 1e9:\n        break",
        ),
        r"each rank evaluates its own part of the data at \S+:\d+, and no all_reduce or gather",
    ],
}
# name: what is replaced in RIGHT, by what else is right
TWINS = {
    "a teacher, which has forward passes without gradients on the batches that train": [
        ("ddp = D", "teacher = nn.Linear(8, 2)\nddp = D"),
        (
            "        loss = nn",
            "        with torch.no_grad():\n            teacher(x)\n        loss = nn",
        ),
    ],
    "images that rank 0 generates after the evaluation": [
        (
            "    if rank == 0:\n        torch.save",
            "    if rank == 0:\n        with torch.no_grad():\n            net(torch.randn(4, 8))\n"
            "        torch.save",
        ),
    ],
    "a checkpoint of a part, a loss summed for printing, few samples drawn with replacement": [
        (
            "ddp = D",
            "net.load_state_dict({'0.weight': net[0].weight.clone()}, strict=False)\nddp = D",
        ),
        (
            "        loss.backward()",
            "        loss.backward()\n        dist.all_reduce(loss)\n        loss /= world_size",
        ),
        (
            "    for x, y in loader:",
            "    for _ in range(8):\n        x, y = data[torch.randint(64, (4,))]",
        ),
    ],
    "a stream in an order that all ranks share, with a generator of its own": [
        (
            DATA,
            "class Stream(torch.utils.data.IterableDataset):\n"
            "    generator = torch.Generator().manual_seed(0)\n\n    def __iter__(self):\n"
            "        order = torch.randperm(64, generator=self.generator)\n"
            "        for k in order[rank::world_size].tolist():\n"
            "            yield torch.full((8,), k / 64), k % 2\n\n\ndata = Stream()",
        ),
        ("sampler = DistributedSampler(data)\n", ""),
        ("sampler=sampler)", ")"),
        ("    sampler.set_epoch(epoch)\n", ""),
    ],
    "sharded by fully_shard(), from rank 0's weights": [
        (
            "ddp = DistributedDataParallel(net)",
            "from torch.distributed.checkpoint import state_dict\n"
            "from torch.distributed.fsdp import fully_shard\n"
            "whole = {} if rank else {k: x.clone() for k, x in net.state_dict().items()}\n"
            "for p in net.parameters():\n    p.data += rank\nddp = fully_shard(net)\n"
            "options = state_dict.StateDictOptions(full_state_dict=True, "
            "broadcast_from_rank0=True)\n"
            "state_dict.set_model_state_dict(net, whole, options=options)",
        ),
        ("batch_size=5", "batch_size=6"),  # as many batches on each rank
        ('torch.save(net.state_dict(), "net.pt")', "pass"),
    ],
    "no wrap, gradients averaged by hand": [
        ("ddp = DistributedDataParallel(net)", "ddp = net"),
        (
            "        optimizer.step()",
            "        for p in net.parameters():\n"
            "            dist.all_reduce(p.grad)\n            p.grad /= world_size\n"
            "        optimizer.step()",
        ),
    ],
    "no_sync in all micro-steps but the last": [
        (
            "    for x, y in loader:\n        loss = nn.functional.cross_entropy(ddp(x), y)\n"
            "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()",
            "    for k, (x, y) in enumerate(loader):\n"
            "        ddp.require_backward_grad_sync = k % 2\n"
            "        nn.functional.cross_entropy(ddp(x), y).backward()\n        if k % 2:\n"
            "            optimizer.step()\n            optimizer.zero_grad()",
        ),
    ],
    "a share by hand": [
        (
            "sampler = DistributedSampler(data)\n",
            "data = Subset(data, range(rank, 64, world_size))\n",
        ),
        ("sampler=sampler)", "shuffle=True)"),
        ("    sampler.set_epoch(epoch)\n", ""),
    ],
    "a share that is a data set of its own, and a sampler that was told so": [
        (
            "sampler = DistributedSampler(data)\n",
            "data = TensorDataset(*(tensor[rank::world_size] for tensor in data.tensors))\n"
            "sampler = DistributedSampler(data, num_replicas=1, rank=0)\n",
        ),
    ],
    "an optimizer that has its parameters in another order on each rank": [
        ("SGD(net.parameters()", "SGD(list(net.parameters())[:: 1 - 2 * rank]"),
    ],
    "a weighted sampler, divided": [
        ("sampler=sampler)", "sampler=torch.utils.data.WeightedRandomSampler(torch.ones(64), 32))"),
    ],
    "a seeded split": [
        (
            "sampler = D",
            "data, _ = torch.utils.data.random_split(data, [48, 16], "
            "torch.Generator().manual_seed(0))\nsampler = D",
        ),
    ],
    "a seed for each sample": [
        (
            DATA,
            AUGMENTED.replace(
                "        x, y", "        torch.manual_seed(k)\n        random.seed(k)\n        x, y"
            ).replace("x + 0.1", "x + random.random() + 0.1"),
        ),
        ("import torch\n", "import random\n\nimport torch\n"),
        ("sampler=sampler)", "sampler=sampler, num_workers=1, multiprocessing_context='fork')"),
    ],
    "workers with their own seeds": [
        RANDOM_CROPS,
        ("sampler=sampler)", "sampler=sampler, num_workers=1, multiprocessing_context='fork')"),
    ],
    "an evaluation of rank 0": [
        (
            "batch_size=5, sampler=range(rank, 21, world_size))",
            "batch_size=5) if rank == 0 else []",
        ),
    ],
    "a sharded optimizer": [
        (
            "optimizer = torch.optim.SGD(net.parameters(), ",
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
            "optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, ",
        ),
    ],
    "a frozen part, spectral norm and averaged weights": [
        (
            "net = nn.Sequential(nn.Linear(8, 8)",
            "net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))",
        ),
        (
            "ddp = D",
            "for p in net[1].parameters():\n    p.requires_grad = False\n"
            "average = torch.optim.swa_utils.AveragedModel(net)\nddp = D",
        ),
        (
            "        optimizer.step()",
            "        optimizer.step()\n        average.update_parameters(net)",
        ),
    ],
    "two models, a gradient penalty, a raw forward pass of the other model": [
        (
            "ddp = D",
            "other = nn.Linear(2, 1)\nddp_other = DistributedDataParallel(other)\n"
            "optimizer_other = torch.optim.Adam(other.parameters())\nddp = D",
        ),
        (
            "loss = nn.functional.cross_entropy(ddp(x), y)",
            "outputs = ddp(x)\n"
            "        loss = nn.functional.cross_entropy(outputs, y) + other(outputs).mean()",
        ),
        (
            "        optimizer.step()",
            "        optimizer.step()\n"
            "        real = torch.randn(4, 2, requires_grad=True)\n"
            "        total = ddp_other(real).sum()\n"
            "        (slope,) = torch.autograd.grad(total, real, create_graph=True)\n"
            "        score = ddp_other(ddp(x).detach()).mean() + (slope.norm(dim=1) - 1).mean()\n"
            "        optimizer_other.zero_grad()\n        score.backward()\n"
            "        optimizer_other.step()",
        ),
    ],
    "DistributedDataParallel.join(), and more steps on rank 0 than are watched": [
        (
            "    for x, y in loader:\n        loss",
            "    with ddp.join():\n      for x, y in list(loader) * (3 - rank):\n        loss",
        ),
    ],
    "find_unused_parameters, which are there": [
        FIND_UNUSED,
        ("nn.Linear(8, 2))", "nn.Linear(8, 2))\nnet[0].extra = nn.Linear(1, 1)"),
    ],
    "loader workers and one seed on all ranks, without random layers": [
        ("nn.Dropout(0.1), ", ""),
        ("torch.manual_seed(100 + rank)\n", ""),
        ("sampler=sampler)", "sampler=sampler, num_workers=1, multiprocessing_context='fork')"),
    ],
    "two loaders made at one line, of data that draws from its own generator": [
        (
            DATA,
            "generator = torch.Generator().manual_seed(rank)\n"
            + AUGMENTED.replace("randn(8)", "randn(8, generator=generator)"),
        ),
        (
            "loader = DataLoader(data, batch_size=4, sampler=sampler)",
            "samplers = sampler, DistributedSampler(data)\n"
            "loader, other = [DataLoader(data, 4, sampler=one) for one in samplers]",
        ),
        ("    for x, y in loader:", "    for (x, y), _ in zip(loader, other):"),
        ("range(2):", "range(1):"),
    ],
    "validation without eval(), and batches that are read before it": [
        ("    ddp.eval()\n", ""),
        ("batch_size=5, sampler=range(rank, 21, world_size)", "batch_size=7"),
        ("for epoch in range(2):", "next(iter(test_loader))\nfor epoch in range(2):"),
        (
            "    for x, y in loader:\n",
            "    for k, (x, y) in enumerate(loader):\n"
            "        with torch.no_grad():\n"
            "            for test_x, _ in test_loader if k % 4 == 3 else []:\n"
            "                net(test_x)\n",
        ),
    ],
    "batch norm evaluated through ddp, and a group of each rank's own": [
        ("rank, world", "own = [dist.new_group([k]) for k in range(2)]\nrank, world"),
        ("dist.broadcast(buffer, 0)", "dist.all_reduce(torch.ones(3 + rank), group=own[rank])"),
        ("batch_size=5", "batch_size=6"),  # as many batches on each rank
        ("cross_entropy(net(x)", "cross_entropy(ddp(x)"),
    ],
    "rank 0 evaluates more and trains a second model, a score that is NaN": [
        (
            "    if rank == 0:\n",
            "    if rank == 0:\n        probe = nn.Linear(8, 2)\n"
            "        probe_optimizer = torch.optim.SGD(probe.parameters(), lr=1)\n"
            "        probe(x).sum().backward()\n        probe_optimizer.step()\n",
        ),
        (
            "        optimizer.step()",
            "        optimizer.step()\n        if rank == 0:\n            net.eval()\n"
            "            net(x)\n            net.train()",
        ),
        ("scheduler.step(total.item())", "scheduler.step(torch.nan)"),
    ],
    "parameters sharded by FSDP, under their original names": [
        ("nn.BatchNorm1d(8), ", ""),
        (
            "ddp = DistributedDataParallel(net)",
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
            "ddp = FSDP(net, use_orig_params=True, device_id=torch.device('cpu'))",
        ),
        ("batch_size=5", "batch_size=6"),  # as many batches on each rank
        ("cross_entropy(net(x)", "cross_entropy(ddp(x)"),
        ('torch.save(net.state_dict(), "net.pt")', "pass"),
    ],
    "tensor parallelism in a group that init_device_mesh() makes": [
        ('dist.init_process_group("gloo")', "mesh = dist.init_device_mesh('cpu', (2,))"),
        (
            "ddp = DistributedDataParallel(net)",
            "from torch.distributed.tensor import parallel\n"
            "layers = {'0': parallel.ColwiseParallel(), '3': parallel.RowwiseParallel()}\n"
            "ddp = parallel.parallelize_module(net, mesh, layers)",
        ),
        ("nn.BatchNorm1d(8), ", "nn.ReLU(), "),
        ("torch.manual_seed(100 + rank)\n", ""),
        ("sampler=sampler)", "shuffle=True)"),
        ("batch_size=5, sampler=range(rank, 21, world_size)", "batch_size=5"),
    ],
    "a log for each rank": [
        ("for epoch in range(2):", "log = open(f'log-{rank}.txt', 'w')\nfor epoch in range(2):"),
    ],
}


QUICK = {  # one of each kind; the others are slow
    "jingyaogong/minimind#853: the forward pass through .module",
    "rmchurch/disruptcnn#3: ReduceLROnPlateau on a local loss",
    "no sampler",
    "huggingface/transformers#37932: the same worker seeds on all ranks",
    "mlcommons/training#844: the same noise on all ranks",
    "statistics of batch norm",
    "two writers",
    "a forward pass of ddp on rank 0",
    "loader workers and one seed on all ranks, without random layers",
    "a share by hand",
    "two models, a gradient penalty, a raw forward pass of the other model",
}


def cases(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def script_with(changes):
    text = RIGHT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def enter(folder, rank):
    os.chdir(folder)


@pytest.fixture
def check(tmp_path):
    """A function (text of a script, *flags) -> (exit codes, output of rank 0)."""

    def check(text, *flags):
        script = tmp_path / "train.py"
        script.write_text(text)
        command = [*flags, script]
        enter_folder = functools.partial(enter, tmp_path)  # where the script writes its files
        options = {"script": "launch/check_ranks.py", "prepare": enter_folder}
        ranks = Ranks(tmp_path, 2, command, **options)
        codes = ranks.wait(120)
        return codes, ranks.output() + ranks.output(1)

    return check


def test_a_right_script_gets_one_line(check):
    codes, output = check(RIGHT)
    assert codes == [0, 0], output
    assert "ok: 16 training steps on 2 ranks" in output
    assert "found" not in output and "note" not in output


@pytest.mark.parametrize("name", cases(MISTAKES))
def test_a_mistake_is_found(check, name):
    *changes, expected = MISTAKES[name]
    codes, output = check(script_with(changes))
    found = [line for line in output.splitlines() if line.startswith("found: ")]
    assert len(found) == 1, output
    assert re.match(r"found: (.*)" + expected, found[0]), output
    assert codes[0] == 1, output


@pytest.mark.parametrize("name", cases(TWINS))
def test_what_is_right_but_unusual_is_not_found(check, name):
    codes, output = check(script_with(TWINS[name]))
    assert codes == [0, 0], output
    assert "\nok: " in output and "found: " not in output, output


@pytest.mark.parametrize("name", ["a right one", "a wrapper that nothing holds"])
def test_a_script_trains_as_if_nobody_watched(check, name, tmp_path):
    *changes, _ = MISTAKES.get(name, [None])
    script = script_with(changes) + "torch.save(net.state_dict(), f'weights-{rank}.pt')\n"

    def weights():
        saved = [torch.load(tmp_path / f"weights-{rank}.pt") for rank in (0, 1)]
        return [{key: tensor.tolist() for key, tensor in of_rank.items()} for of_rank in saved]

    check(script, "--steps", "0")
    watched = weights()
    prepare = functools.partial(enter, tmp_path)
    alone = Ranks(tmp_path, 2, [], script=tmp_path / "train.py", prepare=prepare)
    assert alone.wait(120) == [0, 0], alone.output()
    assert weights() == watched
    assert (watched[0]["0.weight"] == watched[1]["0.weight"]) == (name == "a right one")


def test_data_that_main_has_read_are_compared_after_it(check):
    *changes, expected = MISTAKES["other data"]
    lines = script_with(changes).replace("\n", "\n    ")
    _, output = check(f"def main():\n    {lines}\n\n\nmain()\n")
    assert re.search("found: .*" + expected, output), output


ASKS_FOR_A_GPU = {
    "nccl": ('init_process_group("gloo")', 'init_process_group("nccl")'),
    "cuda": ("ddp = Dist", "net.cuda()\nddp = Dist"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script would get a GPU")
@pytest.mark.parametrize("name", ASKS_FOR_A_GPU)
def test_a_script_that_asks_for_a_gpu_gets_a_line_that_names_the_flag(check, name):
    codes, output = check(script_with([ASKS_FOR_A_GPU[name]]))
    assert codes == [1, 1] and "Traceback" not in output and "found: " not in output
    assert len(re.findall("check_ranks.py: .* asks for a GPU, and PyTorch sees none", output)) == 1
    assert "check_ranks.py --cpu train.py" in output


@pytest.mark.parametrize("tool", [["check_ranks.py"], ["why_hang.py", "run"]])
def test_what_is_not_a_script_gets_one_line(tool, tmp_path):
    (tmp_path / "model.pt").write_bytes(b"\x80\x02\x00")
    cases = {"none.py": "cannot be read (No such file or directory)"}
    cases |= {"": "is a folder", "model.pt": "is not Python text"}
    error_file = tmp_path / "error.json"
    options = {"script": f"launch/{tool[0]}", "env": {"TORCHELASTIC_ERROR_FILE": error_file}}
    for name, problem in cases.items():
        ranks = Ranks(tmp_path, 2, [*tool[1:], tmp_path / name], **options)
        assert ranks.wait(120) == [2, 2]
        line = f"{tool[0]}: {tmp_path / name} {problem}: expected a Python script, as in torchrun "
        assert ranks.output().startswith(line) and ranks.output().count("\n") == 1
        assert json.loads(error_file.read_text())["message"]["message"].startswith(line)
        assert ranks.output(1) == ""


def test_ranks_that_make_different_numbers_of_steps_are_named(check):
    """Without gradients to wait for, they do not hang."""
    alone = ("ddp = DistributedDataParallel(net)", "ddp = net")
    fewer = (
        "    for x, y in loader:\n        loss",
        "    for x, y in list(loader)[rank:]:\n        loss",
    )
    _, output = check(script_with([alone, fewer]))
    found = "different numbers of training steps: 16 on rank 0, 14 on rank 1"
    assert f"found: the ranks made {found}. Each rank needs the same number" in output


def test_the_line_of_the_script_is_named(check):
    *changes, _ = MISTAKES["net instead of ddp"]
    text = script_with(changes)
    _, output = check(text)
    lines = [text.splitlines()[int(k) - 1] for k in re.findall(r"train.py:(\d+)", output)]
    assert [line.strip() for line in lines] == [
        "optimizer.step()",
        "loss = nn.functional.cross_entropy(net(x), y)",
    ]


FAILS_ONCE = """\
class FailsOnce(torch.optim.SGD):
    failed = False

    def step(self):
        if not self.failed:
            self.failed = True
            raise RuntimeError
        return super().step()


optimizer = FailsOnce("""


def test_the_run_ends_after_the_steps_that_are_asked_for(check, tmp_path):
    text = script_with(
        [
            ("optimizer = torch.optim.SGD(", FAILS_ONCE),
            (
                "        optimizer.step()",
                "        try:\n            optimizer.step()\n"
                "        except RuntimeError:\n            continue",
            ),
            ("sampler = D", "log = open(f'log-{rank}.txt', 'w')\nsampler = D"),
            ("        loss.backward()", "        log.write('trains\\n')\n        loss.backward()"),
        ]
    )
    codes, output = check(text, "--steps", "3")
    assert codes == [0, 0], output
    assert "ok: 3 training steps on 2 ranks: " in output
    assert "note: only one epoch of the loader at" in output
    assert "note: no evaluation was seen" in output
    assert not (tmp_path / "net.pt").exists()
    assert (tmp_path / "log-0.txt").read_text() == 4 * "trains\n", "one step has failed"


def test_short_epochs_show_an_evaluation_soon(check):
    *changes, expected = MISTAKES["mehta-lab/VisCy#408: an epoch counter that never advances"]
    _, output = check(script_with(changes), "--steps", "8", "--epoch-steps", "4")
    assert re.search("found: " + expected, output), output
    assert "no evaluation was seen" not in output
    # its three batches on rank 0 are all of its share
    _, output = check(RIGHT, "--epoch-steps", "3")
    assert "no whole evaluation" not in output and "samples evaluated once" in output


def test_an_evaluation_on_one_rank_that_the_others_do_not_learn_of_is_a_note(check):
    alone = [
        ("sampler=range(rank, 21, world_size)", ""),
        ("y in test_loader:", "y in test_loader if rank == 0 else []:"),
    ]
    codes, output = check(script_with(alone))
    assert "only rank 0 evaluates" not in output, output
    silent = [("    dist.all_reduce(total)\n", ""), ("    scheduler.step(total.item())\n", "")]
    codes, output = check(script_with(alone + silent))
    assert codes == [0, 0] and re.search(r"note: only rank 0 evaluates \(\S+:\d+\), and", output)


def test_what_has_moved_in_torch_is_named(check):
    gone = "import sys\n\nhooks = sys.modules['rank_watch.hooks']\n"
    gone += "hooks.replace(sys.modules['torch'], '_moved', print)\n"
    codes, output = check(gone + RIGHT)
    assert codes == [0, 0] and "note: this torch has no torch._moved: not watched" in output, output


def test_without_an_optimizer_nothing_is_praised(check):
    update = "for p in net.parameters():\n            p.data -= 0.1 * p.grad"
    _, output = check(script_with([("optimizer.step()", update)]))
    assert "note: no step of an optimizer of torch.optim was seen, so weights, learning" in output
    assert "ok: " not in output and "found: " not in output, output


def test_samples_without_numbers_are_named(check):
    text = script_with(
        [
            ("loader = DataLoader(data, batch_size=4, sampler=sampler)", STREAM),
            ("    sampler.set_epoch(epoch)\n", ""),
        ]
    )
    codes, output = check(text)
    assert codes == [0, 0], output
    assert "note: the samples of the loader at " in output and "have no numbers" in output
    assert "different inputs (16 forward passes)" in output
    codes, output = check(text.replace("k % world_size == rank", "k < 32"))
    assert "found: ranks 0 and 1 have the same input in 16 of 16 forward passes" in output, output


STREAM = """\
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (data[k] for k in range(64) if k % world_size == rank)


loader = DataLoader(Stream(), batch_size=4)"""


OWN_GROUPS = """\
groups = [dist.new_group([k]) for k in range(world_size)]
if rank == 0:
    dist.all_reduce(torch.ones(1), group=groups[0])
else:
    dist.broadcast(torch.ones(1), 1, groups[1])
"""


def test_a_script_that_fails_shows_its_own_error(check):
    text = script_with(
        [
            ("    ddp.eval()", "    if rank == 1:\n        raise ValueError('no disk')"),
            ("sampler = D", f"{OWN_GROUPS}sampler = D"),
        ]
    )
    codes, output = check(text)
    assert "ValueError: no disk" in output and "rank_watch" not in output, output
    assert re.search(
        r"\nrank 1 failed after 8 training steps: ValueError: no disk \(\S+:34", output
    )
    assert codes[1] == 1 and "found: " not in output and "ok: " not in output
    assert re.search(r"\nrank 0 waited for it after 8 training steps, at \S+:36", output)
    assert "was killed" not in output


def test_a_rank_that_is_killed_is_named(check):
    text = script_with(
        [("    ddp.eval()", "    import os\n    if rank == 1:\n        os.kill(os.getpid(), 9)")]
    )
    codes, output = check(text)
    assert "rank 1 was killed or has aborted after 8 training steps" in output
    assert codes == [1, -9], output


def test_a_script_without_a_process_group_trains_alone(check):
    text = script_with([("ddp = DistributedDataParallel(net)", "ddp = net")])
    text = text.partition("scheduler =")[0].replace('dist.init_process_group("gloo")\n', "")
    text = text.replace("dist.get_rank(), dist.get_world_size()", "0, 1") + LOOP
    codes, output = check(text)
    assert "found: 20 training steps, and no process group: the script never called" in output
    assert codes[0] == 1


LOOP = """
for x, y in DataLoader(data, batch_size=2):
    nn.functional.cross_entropy(ddp(x), y).backward()
    optimizer.step()
"""


def launched(command, folder):
    """Run a command with the checker as a user does: (exit code, output)."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


CHECK = ROOT / "launch/check_ranks.py"


@pytest.mark.slow
def test_torchrun_prints_the_findings_last(tmp_path):
    (tmp_path / "train.py").write_text(script_with(MISTAKES["no sampler"][:-1]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    code, output = launched([*torchrun, CHECK, "train.py"], tmp_path)
    last = output.rstrip().splitlines()[-2]
    assert code == 1 and "  traceback : found: two ranks read the same samples" in last, output


EVALUATES = RIGHT[RIGHT.index("    for buffer in") : RIGHT.index("    if rank == 0:")]
ON_RANK_0 = """\
    if rank == 0:
        for buffer in list(net.buffers())[:2]:
            dist.broadcast(buffer, 0)
"""
BUSY = "        import time\n        time.sleep(60)\n"
# name: (what is replaced in RIGHT, by what, what the checker says)
ENDS = {
    "gloo aborts rank 1, whose forward pass meets a broadcast of the evaluation on rank 0": (
        (EVALUATES, ON_RANK_0 + BUSY),
        r"found: the ranks called different collectives: rank 0: broadcast at train.py:31; "
        r"rank 1: a forward pass of DistributedDataParallel at train.py:24",
    ),
    "a rank is killed": (
        (
            "    ddp.eval()",
            f"    if rank == 0:\n{BUSY}    import os\n    os.kill(os.getpid(), 9)",
        ),
        r"rank 1 was killed or has aborted after 8 training steps",
    ),
    "a rank exits": (
        ("    ddp.eval()", "    if rank == 1:\n        raise SystemExit(3)"),
        r"rank 1 failed after 8 training steps: exit code 3 \(train.py:29\)",
    ),
    "a rank ends early": (
        ("    ddp.eval()", "    if rank == 1:\n        raise SystemExit"),
        r"found: the ranks wait for each other for ever: rank 0 in call \d+ .*; rank 1 did not",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_ends_early_gets_a_verdict(name, tmp_path):
    change, expected = ENDS[name]
    (tmp_path / "train.py").write_text(script_with([change]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    code, output = launched([*torchrun, CHECK, "train.py"], tmp_path)
    assert code == 1 and re.search(f"^{expected}", output, re.M), output
    assert "ok: " not in output


@pytest.mark.slow
def test_processes_of_mp_spawn_are_watched(tmp_path):
    flags = ["--nproc-per-node", 2, "--arch", "small_net", "--limit", 2000]
    command = [sys.executable, CHECK, "--steps", 5, ROOT / "04_mnmc_ddp_mp.py", *flags]
    code, output = launched([*map(str, command)], tmp_path)
    assert code == 0 and "ok: 5 training steps on 2 ranks" in output, output


@pytest.mark.slow
def test_one_process_is_not_enough(tmp_path):
    (tmp_path / "train.py").write_text("print('trains')\n")
    code, output = launched([sys.executable, CHECK, "train.py"], tmp_path)
    assert code == 2 and "check_ranks.py: one process, so there are no ranks to compare" in output
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    (tmp_path / "train.py").write_text(RIGHT)
    code, output = launched([*torchrun, CHECK, "train.py"], tmp_path)
    assert code == 1 and "check_ranks.py: one process, so there are no ranks to compare" in output
    assert "found: " not in output and "ok: " not in output


RUNGS = {
    "03_mnmc_ddp_launch.py": ["--epoch-steps", 5],
    "06_imagenet.py": ["--steps", 0],
    "07_fsdp.py": ["--epoch-steps", 5],
    "08_gpt.py": ["--epoch-steps", 5],
}


@pytest.mark.slow
@pytest.mark.parametrize("rung", RUNGS)
def test_nothing_is_found_in_the_ladder(rung, tmp_path, small_folder):
    flags = ["--epochs", 3, "--batch-size", 8, "--arch", "small_net"]
    if rung.startswith("06"):
        flags += [small_folder, "--image-size", 32, "--workers", 1, "--checkpoints-path", tmp_path]
    elif rung.startswith("08"):
        flags = ["--epochs", 4, "--sample", 5]
    else:
        flags += ["--limit", 400]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", CHECK]
    code, output = launched([*map(str, [*torchrun, *RUNGS[rung], ROOT / rung, *flags])], tmp_path)
    assert code == 0 and "\nok: " in output, output


@pytest.mark.slow
def test_tasks_of_srun_are_watched(slurm, tmp_path):
    flags = ["--arch", "small_net", "--limit", "2000"]
    command = [sys.executable, CHECK, "--steps", "5", ROOT / "05_mnmc_ddp_slurm.py", *flags]
    done = slurm.run("srun", "--nodes=2", "--ntasks=2", *command)
    assert done.returncode == 0 and "ok: 5 training steps on 2 ranks" in done.stdout, done


def test_a_rank_that_never_connects_is_named(monkeypatch, capsys):
    monkeypatch.setattr(monitor, "ARRIVAL", 1)
    hello = {"kind": "hello", "token": "a", "rank": 0, "host": "a"}
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as stranger,
        socket.create_connection(listener.getsockname()) as rank_0,
    ):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        rank_0.sendall(json.dumps(hello).encode() + b"\n")
        rank_0.shutdown(socket.SHUT_WR)  # for which the monitor waits
        monitor.Monitor(listener, "a", world_size=3).run()
    assert "found: ranks 1, 2 did not connect to rank 0" in capsys.readouterr().out


def test_a_rank_that_waits_for_another_process_is_no_hang(monkeypatch, capsys):
    monkeypatch.setattr(monitor, "STILL", 0)
    waits = {"at": "train.py:5", "calls": [["default_pg", 1, "barrier", [], False, "train.py:5"]]}
    elsewhere = {"at": "train.py:4", "calls": [["rows", 1, "barrier", [], False, "train.py:4"]]}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watcher = monitor.Monitor(listener, "a", world_size=2)
        watcher.ranks = {rank: monitor.Rank(None) for rank in (0, 1)}

        def find_hang(rank_0):
            for rank, answer in enumerate((rank_0, waits)):
                watcher.ranks[rank].take(answer | {"cpu": 1})
            return [watcher.find_hang() for _ in range(2)]

        assert find_hang({"at": "train.py:4", "calls": []}) == [None, None]
        printed = capsys.readouterr().out
        assert printed.count("note: no progress for 0 seconds: rank 1 in call 1 of") == 1
        assert "; rank 0 did not call it: rank 0 is at train.py:4\n" in printed
        _, hang = find_hang(elsewhere)
        assert hang.startswith("the ranks wait for each other for ever: rank 1 in call 1 of")
