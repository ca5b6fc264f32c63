"""07: shard the model, for a model that does not fit into one GPU.

Replaces DistributedDataParallel in 03 by fully_shard (FSDP2). Each rank keeps a part, a shard, of
each weight, of its gradient and of its optimizer state. The ranks gather the weights of a block
just before it computes, and then free them. So every forward pass is a collective.

    torchrun --nproc-per-node=2 07_fsdp.py
    torchrun --nproc-per-node=4 07_fsdp.py --shard-size 2    # two copies, each in two shards
"""

import itertools
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DistributedSampler

from common.data import build_datasets, build_loader, build_transforms
from common.models import build_model
from common.report import batch_totals
from common.setup_distributed import TIMEOUT, setup_device
from common.syncbn import convert_sync_batchnorm
from ddp.errors import one_line_errors
from ddp.report import DistributedReport
from fsdp import sharded
from fsdp.flags import parse_fsdp_args


@one_line_errors()
def main(args):
    # 0. set up
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = setup_device(local_rank, local_size)  # GPU number local_rank, or the CPU
    backend = dist.get_default_backend_for_device(device)  # nccl between GPUs, gloo between CPUs
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=device.index)  # waits for all ranks
    shape = (world_size // args.shard_size, args.shard_size)  # copies of the model, shards of each
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "shards"))
    report = DistributedReport(args, device, local_size)  # prints and keeps time, nothing else
    train_set, test_set = build_datasets(args)

    # 1. define model
    torch.manual_seed(args.seed)
    model = build_model(args, train_set)  # in main memory; fully_shard moves one block at a time
    model = convert_sync_batchnorm(model, device) if args.sync_bn else model
    model = sharded.checkpoint_activations(model) if args.checkpoint_activations else model
    compute, reduce = sharded.precision(args, model)  # bfloat16 and float32, or as the weights
    for block in sharded.blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(compute, reduce))
    # The last call takes the weights outside of the blocks. The outputs become float32 again.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(compute, reduce, reduce))

    # 2. define dataloader
    train_sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    batch_size = args.batch_size // world_size  # of this rank; --batch-size is global
    train_loader = build_loader(train_set, args, train_sampler, batch_size, train=True)
    test_loader = build_loader(test_set, args, range(rank, len(test_set), world_size), batch_size)
    test_steps = sharded.count_test_steps(test_set, args, world_size)  # of rank 0, the most
    augment, normalize = build_transforms(train_set, args, device)

    # 3. define loss and optimizer
    criterion = nn.CrossEntropyLoss()
    lr = args.lr * args.batch_size / 256 if args.lr_scaling == "linear" else args.lr
    # After fully_shard, which replaces the parameters: the optimizer must know the shards.
    optimizer = SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    warmup_steps = max(1, round(args.warmup_epochs * len(train_loader)))
    scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / warmup_steps))
    first_epoch = sharded.load_newest(args, model, optimizer, scheduler)

    # 4. train and evaluate
    report.header(model, train_set, test_set, lr)
    for epoch in range(first_epoch, args.epochs):
        torch.manual_seed(2**16 * (args.seed + 1) + world_size * epoch + rank)  # for augmentation
        model.train()
        model.set_reshard_after_forward(args.reshard)  # or keep the weights for the backward pass
        train_sampler.set_epoch(epoch)  # without it, every epoch has the same order
        totals = torch.zeros(3, device=device)  # loss, correct answers, images since the last line
        for step, (images, targets) in enumerate(report.timed(train_loader, epoch)):
            images = images.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            outputs = model(augment(images))
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            if args.clip_grad:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)  # norm of all shards
            optimizer.step()
            scheduler.step()
            totals += batch_totals(loss, outputs, targets)  # the CPU does not wait for these
            if report.due(step):
                dist.all_reduce(totals)  # the sum over all ranks
                report.show_step(step, totals)
                totals.zero_()

        model.eval()
        model.set_reshard_after_forward(True)  # no backward pass comes to free them
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # the last step changed each rank's batch norm statistics
        totals = torch.zeros(3, device=device)
        batches = itertools.islice(itertools.chain(test_loader, test_loader), test_steps)
        with torch.no_grad():
            # Each forward pass needs all ranks: a rank with one batch fewer repeats its first.
            for step, (images, targets) in enumerate(report.with_bar(batches, test_steps)):
                images = images.to(device, non_blocking=True)
                targets = targets.to(device, non_blocking=True)
                outputs = model(normalize(images))
                if step < len(test_loader):
                    totals += batch_totals(criterion(outputs, targets), outputs, targets)
        dist.all_reduce(totals)
        report.show_epoch(totals)
        sharded.save_shards(args, epoch + 1, model, optimizer, scheduler)

    # 5. tear down
    report.print(sharded.bytes_held(model, optimizer))
    if args.save:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole, on rank 0
        weights = get_model_state_dict(model, options=options)  # a collective: all ranks call it
        if rank == 0:
            torch.save(weights, args.save)
    report.summary()
    dist.destroy_process_group()
    time.sleep(0.1)  # for gloo's threads, which outlive it: one that works while Python ends aborts


if __name__ == "__main__":
    main(parse_fsdp_args(__doc__))
