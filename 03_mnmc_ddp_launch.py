"""03: one process per GPU, started by torchrun.

Adds DistributedDataParallel to 01. Each process, called a rank, trains a copy of the model on its
own images. The copies start equal, and the backward pass averages the gradients of all ranks, so
they stay equal. On one machine, and on two (host1 is the first; the other has --node-rank=1):

    torchrun --nproc-per-node=2 03_mnmc_ddp_launch.py
    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=host1 03_mnmc_ddp_launch.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DistributedSampler

from common.data import build_datasets, build_loader, build_transforms
from common.models import build_model
from common.report import batch_totals
from common.setup_distributed import TIMEOUT, setup_device
from common.syncbn import convert_sync_batchnorm
from ddp.errors import one_line_errors
from ddp.flags import parse_ddp_args
from ddp.report import DistributedReport


@one_line_errors()
def main(args):
    # 0. set up
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = setup_device(local_rank, local_size)  # GPU number local_rank, or the CPU
    backend = dist.get_default_backend_for_device(device)  # nccl between GPUs, gloo between CPUs
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=device.index)  # waits for all ranks
    report = DistributedReport(args, device, local_size)  # prints and keeps time, nothing else
    train_set, test_set = build_datasets(args)

    # 1. define model
    torch.manual_seed(args.seed)
    model = build_model(args, train_set).to(device)
    model = convert_sync_batchnorm(model) if args.sync_bn else model
    ddp = DistributedDataParallel(model)  # train ddp; evaluate and save model, which is inside it
    torch.manual_seed(2**16 * (args.seed + 1) + rank)  # ranks and seeds augment differently

    # 2. define dataloader
    train_sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    batch_size = args.batch_size // world_size  # of this rank; --batch-size is global
    train_loader = build_loader(train_set, args, train_sampler, batch_size, train=True)
    test_loader = build_loader(test_set, args, range(rank, len(test_set), world_size), batch_size)
    augment, normalize = build_transforms(train_set, args, device)

    # 3. define loss and optimizer
    criterion = nn.CrossEntropyLoss()
    lr = args.lr * args.batch_size / 256 if args.lr_scaling == "linear" else args.lr
    optimizer = SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    warmup_steps = max(1, round(args.warmup_epochs * len(train_loader)))
    scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / warmup_steps))

    # 4. train and evaluate
    report.header(model, train_set, test_set, lr)
    for epoch in range(args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)  # without it, every epoch has the same order
        totals = torch.zeros(3, device=device)  # loss, correct answers, images since the last line
        for step, (images, targets) in enumerate(report.timed(train_loader, epoch)):
            images = images.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            outputs = ddp(augment(images))
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            totals += batch_totals(loss, outputs, targets)  # the CPU does not wait for these
            if report.due(step):
                dist.all_reduce(totals)  # the sum over all ranks
                report.show_step(step, totals)
                totals.zero_()

        model.eval()
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # the last step changed each rank's batch norm statistics
        totals = torch.zeros(3, device=device)
        with torch.no_grad():
            for images, targets in report.with_bar(test_loader):
                images = images.to(device, non_blocking=True)
                targets = targets.to(device, non_blocking=True)
                outputs = model(normalize(images))
                totals += batch_totals(criterion(outputs, targets), outputs, targets)
        dist.all_reduce(totals)
        report.show_epoch(totals)

    # 5. tear down
    if args.save and rank == 0:
        torch.save(model.state_dict(), args.save)
    report.summary()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_ddp_args(__doc__))
