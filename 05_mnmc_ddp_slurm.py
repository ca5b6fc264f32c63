"""05: multi node, multi card, processes from Slurm.

Changes in 03 who starts the processes: srun, on all machines of a job or of a part of it. Slurm's variables
tell each process who it is and where they all are; they meet on the first machine of the list.

    srun --nodes=2 --ntasks-per-node=2 --kill-on-bad-exit=1 python 05_mnmc_ddp_slurm.py

Without a GPU the processes share the cores. As a batch job, in whose file you say how many of what:

    sbatch launch/slurm/05_srun.sbatch
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from common.data import build_datasets, build_loader, build_transforms
from common.distributed import TIMEOUT, cleaned_up, read_ranks, rendezvous, setup_device, slurm_url, sum_over_ranks
from common.errors import one_line_errors
from common.flags import AMP_DTYPES, Parser
from common.models import build_model, convert_sync_batchnorm
from common.report import Report


def parse_args():
    parser = Parser(__doc__)
    parser.add_argument("--sync-bn", action="store_true", help="batch norm over the images of all processes")
    return parser.parse_args()


@cleaned_up()  # leaves the process group at the end, after an error too
def main(args):
    # 0. set up
    names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"  # not the job's
    rank, world_size, local_rank, local_world_size = read_ranks(*names)
    device = setup_device(local_rank, local_world_size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = rendezvous(slurm_url(), rank, world_size)  # on the first machine, at a port made from the job's id
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    global_batch = args.batch_size * world_size
    lr = args.lr * global_batch / 256 if args.lr_scaling == "linear" else args.lr
    report = Report(args, device, rank, world_size, local_world_size, lr)
    train_set, test_set = build_datasets(args)

    # 1. define network
    torch.manual_seed(args.seed)  # the same weights in every process
    net = build_model(args, train_set).to(device)
    if args.sync_bn:
        net = convert_sync_batchnorm(net)
    report.header(net, train_set, test_set)
    if args.compile:
        net.compile()
    ddp = DistributedDataParallel(net)  # for training; net, inside it, is what is tested and saved
    torch.manual_seed(2**16 * (args.seed + 1) + rank)  # but its own augmentation and dropout in each

    # 2. define dataloader
    train_sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
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
        train_sampler.set_epoch(epoch)  # a new order every epoch
        totals = torch.zeros(3, device=device)  # loss, correct, images: summed there, so that no step waits
        for images, targets in report.batches(train_loader, epoch):
            images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            optimizer.param_groups[0]["lr"] = lr * min(1, (epoch * len(train_loader) + report.step) / warmup)
            with autocast:
                outputs = ddp(augment(images))
                loss = criterion(outputs, targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # note: fp16 waits for the device here, to look for overflow
            scaler.update()
            correct, n = (outputs.argmax(dim=1) == targets).sum(), len(targets)
            totals += torch.stack([loss.detach() * n, correct, torch.full_like(loss, n)])
            if report.due():
                report.show_step(sum_over_ranks(totals))

        net.eval()
        for buffer in net.buffers():
            dist.broadcast(buffer, src=0)  # batch norm's statistics, of each rank's own images in the last step
        correct = torch.zeros((), dtype=torch.int64, device=device)
        with torch.no_grad(), autocast:
            for images, targets in test_loader:
                images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
                correct += (net(normalize(images)).argmax(dim=1) == targets).sum()
        correct = sum_over_ranks(correct)
        report.show_epoch(correct, len(test_set))

    # 5. tear down
    if args.save and rank == 0:
        torch.save(net.state_dict(), args.save)
    report.summary()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
