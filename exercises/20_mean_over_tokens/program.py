"""Train a model that tags each token of 96 sentences, of which some are short and some are long.

In each step, two ranks should train as one process does with the sentences of both: on the mean
over all tokens. Padding is no token. check.py also starts three ranks.

Nothing fails. What check.py sees: the tokens of a rank that has fewer weigh more.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PADDING = 0  # a token after the end of a sentence
IGNORED = -100  # its tag, which cross_entropy leaves out

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(0)
lengths = torch.randint(1, 25, (96, 1))
tokens = torch.randint(1, 40, (96, 24))
tokens[torch.arange(24) >= lengths] = PADDING
tags = (tokens % 4).masked_fill(tokens == PADDING, IGNORED)
dataset = TensorDataset(tokens, tags)

model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 4))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))

for step, (batch, labels) in enumerate(loader):
    outputs = ddp(batch)
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f} for {(labels != IGNORED).sum().item()} tokens")

dist.destroy_process_group()
