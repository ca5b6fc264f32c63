"""08: train a language model on two dimensions.

Replaces the images of 07 by text, and its mesh by one of (data, tensor). Along data, ranks read
different text, and fully_shard cuts the weights. Along tensor, ranks read the same text, and
each computes a part of each block: some attention heads, and some columns of the linear layers.

    torchrun --nproc-per-node=2 08_gpt.py
    torchrun --nproc-per-node=4 08_gpt.py --data 2 --tensor 2
"""

import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from common.data import build_loader
from common.setup_distributed import TIMEOUT, setup_device
from ddp.errors import one_line_errors
from fsdp import sharded
from gpt.checkpoint import load_step, save_step, save_weights
from gpt.flags import parse_gpt_args
from gpt.model import GPT, generate
from gpt.parallel import Replicated
from gpt.report import TextReport
from gpt.text import IGNORED, WindowSampler, build_windows


@one_line_errors()
def main(args):
    # 0. set up
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = setup_device(local_rank, local_size)  # GPU number local_rank, or the CPU
    backend = dist.get_default_backend_for_device(device)  # nccl between GPUs, gloo between CPUs
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=device.index)  # waits for all ranks
    shape = (args.data, args.tensor)  # neighbours share a batch, and talk the most
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    mesh._flatten("ranks")  # so that the norm of the gradients takes one all-reduce
    data_rank, data_group = mesh.get_local_rank("data"), mesh.get_group("data")
    report = TextReport(args, device, local_size)  # prints and keeps time, nothing else
    train_set, test_set = build_windows(args)

    # 1. define model
    torch.manual_seed(args.seed)
    model = GPT(**args.sizes)
    if args.weights:
        model.load_state_dict(args.weights)
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "positions": Replicated(),
        "blocks.*.norm1": Replicated(),
        "blocks.*.query_key_value": ColwiseParallel(),
        "blocks.*.output": RowwiseParallel(),  # its partial sums are added over the ranks
        "blocks.*.norm2": Replicated(),
        "blocks.*.expand": ColwiseParallel(),
        "blocks.*.contract": RowwiseParallel(),
        "norm": Replicated(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if args.tensor > 1:
        parallelize_module(model, mesh["tensor"], plan)
    compute, reduce = sharded.precision(args, model)  # bfloat16 and float32, or as the weights
    for block in sharded.blocks(model):
        fully_shard(block, mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(compute, reduce))
    # The last call takes the weights outside of the blocks. The outputs become float32 again.
    policy = MixedPrecisionPolicy(compute, reduce, reduce)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=True)

    # 2. define dataloader
    train_sampler = WindowSampler(train_set, args.data, data_rank, seed=args.seed)
    batch_size = args.batch_size // args.data  # windows of this rank; --batch-tokens is global
    train_loader = build_loader(train_set, args, train_sampler, batch_size, train=True)
    test_windows = range(data_rank, len(test_set), args.data)
    test_loader = build_loader(test_set, args, test_windows, batch_size)

    # 3. define loss and optimizer
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=IGNORED)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0},  # norms
    ]
    optimizer = AdamW(groups, args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    steps = args.epochs * len(train_loader)

    def factor(step):
        """Rise during the warm-up, then fall to a tenth along a cosine."""
        done = (step - args.warmup_steps) / max(1, steps - args.warmup_steps)
        cosine = 0.55 + 0.45 * math.cos(math.pi * min(1, max(0, done)))
        return min(1, (step + 1) / max(1, args.warmup_steps)) * cosine

    scheduler = LambdaLR(optimizer, factor)
    first_step = load_step(args, steps, train_set, model, optimizer, scheduler)

    # 4. train and evaluate
    report.header(model, train_set, test_set)
    for epoch in range(first_step // len(train_loader), args.epochs):
        model.train()
        first = max(0, first_step - epoch * len(train_loader))  # of this epoch
        train_sampler.set_epoch(epoch, first * batch_size)  # another order in every epoch
        totals = torch.zeros(2, device=device)  # loss, targets since the last line
        for step, (tokens, targets) in enumerate(report.timed(train_loader, epoch), first):
            tokens = tokens.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            count = (targets != IGNORED).sum()
            totals[1] += count
            dist.all_reduce(count, group=data_group)  # the targets of the global batch
            optimizer.zero_grad()
            for micro in range(args.accumulate):
                # Each rank keeps the sum of its gradients until the last micro-batch.
                model.set_requires_gradient_sync(micro + 1 == args.accumulate)
                outputs = model(tokens.chunk(args.accumulate)[micro])
                labels = targets.chunk(args.accumulate)[micro]
                loss = criterion(outputs.flatten(0, 1), labels.flatten())
                # The sum of all losses, divided by all targets. fully_shard divides the sum of the
                # gradients by the number of ranks along data, so multiply by it.
                (loss * args.data / count).backward()
                totals[0] += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)  # norm of all shards
            optimizer.step()
            scheduler.step()
            if report.due(step):
                dist.all_reduce(totals, group=data_group)  # the sum over all text
                report.show_step(step, totals, scheduler.get_last_lr()[0])
                totals.zero_()
            save_step(args, steps, train_set, model, optimizer, scheduler)

        model.eval()
        totals = torch.zeros(2, device=device)
        with torch.no_grad():
            for tokens, targets in report.with_bar(test_loader):
                tokens = tokens.to(device, non_blocking=True)
                targets = targets.to(device, non_blocking=True)
                outputs = model(tokens)
                totals[0] += criterion(outputs.flatten(0, 1), targets.flatten())
                totals[1] += (targets != IGNORED).sum()
        dist.all_reduce(totals, group=data_group)
        report.show_epoch(totals)

    # 5. tear down
    report.print(sharded.bytes_held(model, optimizer))
    if args.save:
        save_weights(args, model)
    prompt = torch.tensor([list(args.prompt.encode())], device=device)
    text = generate(model.eval(), prompt, args.sample, torch.Generator().manual_seed(args.seed))
    report.show_sample(bytes(text[0].tolist()))
    report.summary()
    dist.destroy_process_group()
    time.sleep(0.1)  # for gloo's threads, which outlive it: one that works while Python ends aborts


if __name__ == "__main__":
    main(parse_gpt_args(__doc__))
