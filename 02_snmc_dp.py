"""02: single node, multi card.

Adds nn.DataParallel to 01: one process splits each batch over all GPUs and drives each from a thread.
One line does it, which is its charm; DistributedDataParallel (03) is the one to use, on one machine too.

    python 02_snmc_dp.py
"""

import torch
from torch import nn
from torch.utils.data import RandomSampler

from common.data import build_datasets, build_loader, build_transforms
from common.errors import one_line_errors
from common.flags import AMP_DTYPES, Parser
from common.models import build_model
from common.report import Report


def parse_args():
    parser = Parser(__doc__)
    return parser.parse_args()


def main(args):
    # 0. set up
    rank, world_size, local_world_size = 0, 1, 1  # which process this is, of how many, how many on this machine
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    global_batch = args.batch_size * world_size
    lr = args.lr * global_batch / 256 if args.lr_scaling == "linear" else args.lr
    report = Report(args, device, rank, world_size, local_world_size, lr)
    train_set, test_set = build_datasets(args)

    # 1. define network
    torch.manual_seed(args.seed)  # the same weights in every process
    net = build_model(args, train_set).to(device)
    report.header(net, train_set, test_set)
    if args.compile:
        net.compile()
    net = nn.DataParallel(net)  # copies the network to every GPU, anew for each batch
    report.show_split(len(net.device_ids))
    torch.manual_seed(2**16 * (args.seed + 1) + rank)  # but its own augmentation and dropout in each

    # 2. define dataloader
    order = torch.Generator()
    train_sampler = RandomSampler(train_set, generator=order)
    test_sampler = range(rank, len(test_set), world_size)
    train_loader = build_loader(train_set, train_sampler, args, local_world_size, train=True)
    test_loader = build_loader(test_set, test_sampler, args, local_world_size, train=False)
    augment, normalize = build_transforms(train_set, args, device)

    # 3. define loss and optimizer
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    warmup = max(1, round(args.warmup_epochs * len(train_loader)))  # steps
    autocast = torch.autocast(device.type, AMP_DTYPES[args.amp], enabled=args.amp != "none")
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")

    # 4. train and evaluate
    for epoch in range(args.epochs):
        net.train()
        order.manual_seed(args.seed + epoch)  # a new order every epoch
        totals = torch.zeros(3, device=device)  # loss, correct, images: summed there, so that no step waits
        for images, targets in report.batches(train_loader, epoch):
            images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            optimizer.param_groups[0]["lr"] = lr * min(1, (epoch * len(train_loader) + report.step) / warmup)
            with autocast:
                outputs = net(augment(images))
                loss = criterion(outputs, targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # note: fp16 waits for the device here, to look for overflow
            scaler.update()
            correct, n = (outputs.argmax(dim=1) == targets).sum(), len(targets)
            totals += torch.stack([loss.detach() * n, correct, torch.full_like(loss, n)])
            if report.due():
                report.show_step(totals)

        net.eval()
        correct = torch.zeros((), dtype=torch.int64, device=device)
        with torch.no_grad(), autocast:
            for images, targets in test_loader:
                images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
                correct += (net(normalize(images)).argmax(dim=1) == targets).sum()
        report.show_epoch(correct, len(test_set))

    # 5. tear down
    if args.save and rank == 0:
        torch.save(net.module.state_dict(), args.save)
    report.summary()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
