"""A training step of FSDP: torchrun --nproc-per-node=2 docs/see/fsdp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def train(model, images):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(images).square().sum()
    loss.backward()
    optimizer.step()


def main():
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, images=torch.tensor([[1.0, 2.0]]) + dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
