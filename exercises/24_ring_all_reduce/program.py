"""Write an all-reduce: the sum of a tensor over all ranks, with messages between two ranks.

Use dist.isend and dist.irecv (or send and recv), and no collective. A rank that sends its whole
tensor to all n - 1 others sends too much: 2 (n - 1) / n of the tensor is enough. The function
should work with any number of ranks that divides the tensor; check.py tries three and four.

Nothing fails. What check.py sees: each rank keeps its own tensor.
"""

import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    """Replace a tensor by its sum over all ranks."""
    # Here.


dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(rank)
before = torch.randn(12_000)
result = before.clone()
ring_all_reduce(result)
print("the first number was", before[0].item(), "and is", result[0].item())

dist.barrier()  # a rank that ends earlier would close its connections
dist.destroy_process_group()
