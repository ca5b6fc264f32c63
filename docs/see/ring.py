"""A ring all-reduce by send and receive: torchrun --nproc-per-node=4 docs/see/ring.py"""

import torch
import torch.distributed as dist


def ring_all_reduce(tensor, rank, n):
    pieces = list(tensor.chunk(n))  # views: to change a piece changes the tensor
    after, before = (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):  # reduce-scatter: each rank ends with one finished sum
        received = exchange(pieces[(rank - step) % n], after, before)
        pieces[(rank - step - 1) % n] += received
    for step in range(n - 1):  # all-gather: the sums go round
        received = exchange(pieces[(rank + 1 - step) % n], after, before)
        pieces[(rank - step) % n].copy_(received)


def exchange(piece, after, before):
    received = torch.zeros_like(piece)
    sending = dist.isend(piece.clone(), after)
    dist.recv(received, before)
    sending.wait()
    return received


def main():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10**rank  # a digit for each rank
    ring_all_reduce(tensor, rank, n)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
