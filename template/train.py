"""A training to start from. Replace model and data; the rest works on any number of processes.

Copy this file and distributed.py into a folder of your own, and start it in one of these ways:

    python train.py
    torchrun --nproc-per-node=2 train.py
    srun --ntasks=2 --kill-on-bad-exit=1 python train.py
    torchrun --nproc-per-node=2 --max-restarts=3 train.py --resume

With --resume it continues after the last saved epoch. On several machines all must see the folder
of --checkpoints.
"""

import argparse
import math
import os
import re
import sys

import torch
import torch.distributed as dist
from distributed import cleaned_up, setup_distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def build_model():
    """REPLACE this model by yours."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


def build_datasets():
    """REPLACE these data sets by yours: training, validation, test (torch.utils.data.Dataset)."""
    inputs = torch.randn(12000, 20, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :5].argmax(dim=1)  # which of the first five numbers is the largest
    data = TensorDataset(inputs, targets)
    return (
        Subset(data, range(10000)),
        Subset(data, range(10000, 11000)),
        Subset(data, range(11000, 12000)),
    )


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    add(
        "--batch-size",
        type=int,
        default=64,
        help="examples per step of all processes together (default: %(default)s)",
    )
    add(
        "--lr",
        type=float,
        default=0.1,
        help="learning rate for this batch size (default: %(default)s)",
    )
    add("--workers", type=int, default=0, help="loader workers per process (default: %(default)s)")
    add(
        "--eval-every",
        type=int,
        default=1,
        help="validate after every N epochs; 0 is never (default: %(default)s)",
    )
    add(
        "--save-every",
        type=int,
        default=1,
        help="save last.pt every N epochs; 0: at the end (default: %(default)s)",
    )
    add(
        "--checkpoints",
        default="checkpoints",
        help="folder for last.pt and best.pt (default: %(default)s)",
    )
    add("--resume", action="store_true", help="continue from last.pt if it exists")
    add("--sync-bn", action="store_true", help="batch norm over all processes; needs GPUs")
    add("--amp", choices=("bf16", "fp16"), help="compute in 16 bits, with the weights in float32")
    add("--local-rank", help=argparse.SUPPRESS)  # from torch.distributed.launch
    add(
        "--seed",
        type=int,
        default=0,
        help="for the weights and the order of the examples (default: %(default)s)",
    )
    # --batch_size is --batch-size
    flags = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), a) for a in sys.argv[1:]]
    return parser.parse_args(flags)


@cleaned_up()
def main(args):
    d = setup_distributed()
    if args.batch_size % d.world_size:
        raise ValueError(
            f"--batch-size {args.batch_size}: expected a multiple of the {d.world_size} processes"
        )
    torch.manual_seed(args.seed)  # the same weights in every process
    model = build_model().to(d.device)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    # small gradients would be zero in fp16; otherwise it does nothing
    scaler = torch.amp.GradScaler(d.device.type, enabled=args.amp == "fp16")

    train_set, val_set, test_set = build_datasets()
    options = {"batch_size": args.batch_size // d.world_size, "num_workers": args.workers}
    options["pin_memory"] = d.device.type != "cpu"
    # Python 3.14 would start workers that outlive a killed training.
    if args.workers and sys.platform == "linux":
        options["multiprocessing_context"] = "fork"
    sampler = DistributedSampler(train_set, d.world_size, d.rank, seed=args.seed)
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **options)
    if not len(train_loader):
        raise ValueError(
            f"--batch-size {args.batch_size}: "
            f"expected at most the {len(train_set)} training examples"
        )
    # Every example counts once: DistributedSampler would repeat some if the processes do not divide
    # their number.
    val_loader, test_loader = (
        DataLoader(Subset(part, range(d.rank, len(part), d.world_size)), **options)
        for part in (val_set, test_set)
    )

    first = 0  # epoch
    best = -1.0  # accuracy, in %
    last_pt = os.path.join(args.checkpoints, "last.pt")
    best_pt = os.path.join(args.checkpoints, "best.pt")
    if args.resume and os.path.exists(last_pt):
        state = torch.load(last_pt, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if state.get("scaler"):  # of a training in fp16
            scaler.load_state_dict(state["scaler"])
        first = state["epoch"]
        best = state["best"]
    # Made after the optimizer was loaded, it continues at this epoch, also with another --epochs.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda epoch: (1 + math.cos(math.pi * epoch / args.epochs)) / 2,
        last_epoch=first - 1,
    )
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        # dropout and augmentation, the same after a resume
        torch.manual_seed(hash((args.seed, epoch, d.rank)))
        loss, accuracy = run_epoch(ddp, train_loader, d, args.amp, optimizer, scaler)
        scheduler.step()
        line = f"epoch {epoch + 1}/{args.epochs}: train loss {loss:.4f}, accuracy {accuracy:.2%}"
        if args.eval_every and ((epoch + 1) % args.eval_every == 0 or epoch + 1 == args.epochs):
            loss, accuracy = run_epoch(model, val_loader, d, args.amp)
            line += f" | validation loss {loss:.4f}, accuracy {accuracy:.2%}"
            if accuracy > best:
                best = accuracy
                save(best_pt, {"model": model.state_dict()}, d)
        if d.is_main:
            print(line, flush=True)
        if epoch + 1 == args.epochs or (args.save_every and (epoch + 1) % args.save_every == 0):
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "epoch": epoch + 1,
                "best": best,
            }
            save(last_pt, state, d)
    loss, accuracy = run_epoch(model, test_loader, d, args.amp)
    if d.is_main:
        print(f"done: test loss {loss:.4f}, accuracy {accuracy:.2%}")


def run_epoch(model, loader, d, amp, optimizer=None, scaler=None):
    """Train, or evaluate if there is no optimizer.

    Return (mean loss, accuracy) over the examples of all processes.
    """
    model.train(optimizer is not None)
    half = torch.float16 if amp == "fp16" else torch.bfloat16
    if not optimizer:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # the last step changed each one's statistics
    totals = torch.zeros(3, device=d.device)  # loss, correct answers, examples
    with torch.set_grad_enabled(optimizer is not None):
        for inputs, targets in loader:
            inputs = inputs.to(d.device, non_blocking=True)
            targets = targets.to(d.device, non_blocking=True)
            with torch.autocast(d.device.type, half, enabled=amp is not None):
                outputs = model(inputs)
                loss = nn.functional.cross_entropy(outputs, targets)
            if optimizer:
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            correct = (outputs.argmax(dim=1) == targets).sum()
            totals += torch.stack(
                [loss.detach() * len(targets), correct, torch.full_like(loss, len(targets))]
            )
    dist.all_reduce(totals)
    loss, correct, examples = totals.tolist()
    return loss / examples, correct / examples


def save(path, state, d):
    """Save a file as rank 0, whole or not at all.

    The file of that name is replaced when the new one is complete.
    """
    if d.is_main:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)


if __name__ == "__main__":
    main(parse_args())
