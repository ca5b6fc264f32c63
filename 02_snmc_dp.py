"""02: one process, all GPUs of one machine.

Adds nn.DataParallel to 01: it splits each batch over the GPUs, one thread of this process per GPU.
It takes one line. Prefer DistributedDataParallel (03), even on one machine: it is faster.

    python 02_snmc_dp.py
"""

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import RandomSampler

from common.data import build_datasets, build_loader, build_transforms
from common.errors import one_line_errors
from common.flags import parse_args
from common.models import build_model
from common.report import Report, batch_totals


@one_line_errors()
def main(args):
    # 0. set up
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    report = Report(args, device)  # prints and keeps time, nothing else
    train_set, test_set = build_datasets(args)

    # 1. define model
    torch.manual_seed(args.seed)
    model = build_model(args, train_set).to(device)
    model = nn.DataParallel(model)  # copies the model to every GPU, again for each batch
    report.print(f"DataParallel over {len(model.device_ids)} GPUs")

    # 2. define dataloader
    train_sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(args.seed))
    train_loader = build_loader(train_set, args, train_sampler, train=True)
    test_loader = build_loader(test_set, args)
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
        totals = torch.zeros(3, device=device)  # loss, correct answers, images since the last line
        for step, (images, targets) in enumerate(report.timed(train_loader, epoch)):
            images = images.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            outputs = model(augment(images))
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            totals += batch_totals(loss, outputs, targets)  # the CPU does not wait for these
            if report.due(step):
                report.show_step(step, totals)
                totals.zero_()

        model.eval()
        totals = torch.zeros(3, device=device)
        with torch.no_grad():
            for images, targets in report.with_bar(test_loader):
                images = images.to(device, non_blocking=True)
                targets = targets.to(device, non_blocking=True)
                outputs = model(normalize(images))
                totals += batch_totals(criterion(outputs, targets), outputs, targets)
        report.show_epoch(totals)

    # 5. tear down
    if args.save:
        torch.save(model.module.state_dict(), args.save)
    report.summary()


if __name__ == "__main__":
    main(parse_args(__doc__))
