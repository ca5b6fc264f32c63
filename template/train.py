"""A training to start from. Replace model and data; the rest works on any number of processes.

Copy this file and setup_distributed.py into a folder of your own. Start it in one of these ways:

    python train.py
    torchrun --nproc-per-node=2 train.py
    srun --ntasks=2 --kill-on-bad-exit=1 python train.py
    torchrun --nproc-per-node=2 --max-restarts=3 train.py --resume

With --resume it continues after the last saved training step. Without --resume it overwrites no
training. On SIGTERM and SIGUSR1 it saves and exits with code 75. On several machines all must see
the folder of --checkpoints, and --max-restarts needs the variable
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

sys.path.append(os.path.join(os.path.dirname(__file__), "../common"))  # if it is not copied
try:
    from setup_distributed import cleaned_up, setup_distributed
except ImportError:
    command = "cp template/train.py common/setup_distributed.py FOLDER"
    sys.exit(f"no setup_distributed.py beside train.py: {command}")

signals = []  # that have arrived at this process


def build_model(args):
    """REPLACE this model by yours."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


def build_datasets():
    """REPLACE these data sets by yours (torch.utils.data.Dataset): training, validation, test.

    If you have no test set, return None for it.
    """
    inputs = torch.randn(12000, 20, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :5].argmax(dim=1)  # which of the first five numbers is the largest
    data = TensorDataset(inputs, targets)
    parts = range(10000), range(10000, 11000), range(11000, 12000)
    return [Subset(data, part) for part in parts]


def forward(model, batch, args, d):
    """REPLACE loss and accuracy by yours. Return the loss, and sums over the examples."""
    inputs, targets = (tensor.to(d.device, non_blocking=True) for tensor in batch)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.amp)
    with torch.autocast(d.device.type, half, enabled=half is not None):
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
    correct = (outputs.argmax(dim=1) == targets).sum()
    examples = torch.full_like(loss, len(targets))
    return loss, torch.stack([loss.detach() * examples, correct, examples])


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the lines of the text above, and show defaults."""


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    parser.error = refuse
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="number of epochs")
    add("--batch-size", type=int, default=64, help="examples per step, of all processes together")
    add("--accumulate", type=int, default=1, help="pieces of a batch, one after the other")
    add("--lr", type=float, default=0.4, help="learning rate for 256 examples per step")
    scaling = "linear: --lr * --batch-size / 256; none: --lr"
    add("--lr-scaling", choices=("linear", "none"), default="linear", help=scaling)
    add("--clip-grad", type=float, help="largest norm of the gradient")
    add("--workers", type=int, default=0, help="loader workers per process")
    add("--eval-every", type=int, default=1, help="validate after every N epochs; 0: never")
    add("--print-every", type=int, default=50, help="print a line after every N steps")
    add("--save-every", type=float, default=10, help="save every N minutes, and at the end")
    add("--checkpoints", default="checkpoints", help="folder of last.pt and best.pt")
    add("--resume", action="store_true", help="continue a training if there is one")
    add("--sync-bn", action="store_true", help="batch norm over all processes; needs GPUs")
    add("--amp", choices=("bf16", "fp16"), help="compute in 16 bits, with the weights in float32")
    add("--seed", type=int, default=0, help="for the weights and the order of the examples")
    add("--local-rank", help=argparse.SUPPRESS)  # from torch.distributed.launch
    # --batch_size is --batch-size
    flags = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), a) for a in sys.argv[1:]]
    return parser.parse_args(flags)


def own_pieces(args, d, examples, epoch, first_step):
    """Yield this process's examples in each piece of a batch, from training step `first_step` on.

    Their order depends on seed and epoch alone. So a resumed training continues in it, and any
    number of processes trains on the same examples in a step. An incomplete last batch is left out.
    """
    generator = torch.Generator().manual_seed(args.seed + epoch)
    order = torch.randperm(examples, generator=generator)
    steps = examples // args.batch_size
    for batch in order.split(args.batch_size)[first_step:steps]:
        for k in range(args.accumulate):
            piece = batch[k :: args.accumulate]
            own = piece[d.rank :: d.world_size]
            yield [(epoch, index) for index in own.tolist()]


class Seeded(Dataset):
    """Examples with a seed for each, so that augmentation is the same after a resume."""

    def __init__(self, data, seed):
        self.data = data
        self.seed = seed

    def __getitem__(self, epoch_and_index):
        epoch, index = epoch_and_index
        # torch.manual_seed() would seed the GPUs too, which takes longer than reading an example.
        torch.default_generator.manual_seed(hash((self.seed, epoch, index)))
        return self.data[index]


class Run:
    """A training: model and optimizer, how far they are, and what one step does."""

    def __init__(self, args, d):
        self.args = args
        self.d = d
        torch.manual_seed(args.seed)  # the same weights in every process
        self.model = build_model(args).to(d.device)
        if args.sync_bn:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.ddp = nn.parallel.DistributedDataParallel(self.model)
        lr = args.lr * args.batch_size / 256 if args.lr_scaling == "linear" else args.lr
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]  # without schedule
        # Small gradients would be zero in fp16. Without fp16, the scaler does nothing.
        self.scaler = torch.amp.GradScaler(d.device.type, enabled=args.amp == "fp16")
        self.epoch = 0  # complete epochs
        self.step = 0  # complete steps of the next epoch
        self.totals = torch.zeros(3, device=d.device)  # of this process in this epoch
        self.best = -1.0  # validation accuracy
        self.parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        self.save_at = time.monotonic() + 60 * args.save_every
        self.cpus = dist.new_group(backend="gloo")  # for votes, which do not wait for the GPU

    def train_step(self, batches, lr_factor):
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * lr_factor
        self.optimizer.zero_grad()
        for piece in range(self.args.accumulate):
            batch = next(batches)
            # Dropout is the same after a resume, and another one in each process.
            torch.manual_seed(hash((self.args.seed, self.epoch, self.step, piece, self.d.rank)))
            last = piece + 1 == self.args.accumulate
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                loss, totals = forward(self.ddp, batch, self.args, self.d)
                self.scaler.scale(loss / self.args.accumulate).backward()
            self.totals += totals
        if self.args.clip_grad:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1

    @torch.no_grad()
    def evaluate(self, data, options):
        """Return the mean loss and the accuracy on a data set, which the processes share.

        `options` are keyword arguments of the DataLoader.
        """
        own = Subset(data, range(self.d.rank, len(data), self.d.world_size))  # each example once
        size = self.args.batch_size // (self.d.world_size * self.args.accumulate)
        self.model.eval()
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)  # the last step changed each one's statistics
        totals = torch.zeros_like(self.totals)
        for batch in DataLoader(own, batch_size=size, **options):
            totals += forward(self.model, batch, self.args, self.d)[1]
        self.model.train()
        return means(totals)

    def vote(self, *questions):
        """Return for each question whether the answer of any process is True."""
        votes = torch.tensor(questions, dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.cpus)
        return votes.bool().tolist()

    def save(self, name="last.pt"):
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"epoch": self.epoch, "step": self.step, "best": self.best}
        state |= {"batch_size": self.args.batch_size, "seed": self.args.seed}
        state["totals"] = self.totals.clone()
        dist.all_reduce(state["totals"])
        self.write(name, state)
        self.save_at = time.monotonic() + 60 * self.args.save_every

    def load(self):
        """With --resume, continue the training in the folder. Without it, exit if there is one."""
        folder = self.args.checkpoints
        # best.pt is alone if last.pt was deleted, or a kill came between the two.
        paths = [os.path.join(folder, name) for name in ("last.pt", "best.pt")]
        path = next(filter(os.path.exists, paths), None)
        seen, missed = self.vote(path is not None, path is None)
        if seen and not self.args.resume:
            remedy = "add --resume to continue it, or name another folder"
            refuse(f"--checkpoints {folder} holds a training already: {remedy}")
        if seen and missed:
            remedy = "name a folder that all share"
            refuse(f"--checkpoints {folder} is not one folder on all machines: {remedy}")
        if path:
            state = torch.load(path, map_location="cpu", weights_only=True)
            for name in ("batch_size", "seed"):  # with another, a step would have other examples
                value = state.get(name, getattr(self.args, name))
                if state["step"] and value != getattr(self.args, name):
                    flag = f"--{name.replace('_', '-')}"
                    remedy = f"finish it with {flag} {value}"
                    refuse(f"{path} is of an epoch with another {flag}: {remedy}")
            for name, part in self.parts.items():
                if state[name]:  # that of the scaler is empty unless it was saved with fp16
                    part.load_state_dict(state[name])
            self.epoch = state["epoch"]
            self.step = state["step"]
            self.best = state["best"]
            if self.d.is_main:
                self.totals += state["totals"].to(self.d.device)
            where = f"epoch {self.epoch} of {self.args.epochs}"
            if self.step:
                where = f"step {self.step} of epoch {self.epoch + 1}"
            self.say(f"resumed from {path}, after {where}")

    def write(self, name, state):
        """Let rank 0 write a file, whole or not at all. The other processes wait."""
        if self.d.is_main:
            path = os.path.join(self.args.checkpoints, name)
            os.makedirs(self.args.checkpoints, exist_ok=True)
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
        dist.barrier(self.cpus)

    def show(self, steps):
        """Print how far the epoch is, and rank 0's mean loss in it."""
        bar = "#" * (20 * self.step // steps)
        loss = self.totals[0] / self.totals[2]
        self.say(f"epoch {self.epoch + 1} [{bar:20}] step {self.step}/{steps}: loss {loss:.4f}")

    def say(self, line):
        if self.d.is_main:
            print(line, flush=True)


def means(totals):
    """Sum the totals over all processes, in place, and return the mean loss and the accuracy."""
    dist.all_reduce(totals)
    loss, correct, examples = totals.tolist()
    return loss / examples, correct / examples


def check(args, d, examples):
    """Exit with one line if the flags cannot work here."""
    given = f"--batch-size {args.batch_size}"
    parts = d.world_size * args.accumulate
    if min(args.batch_size, args.accumulate, args.print_every) < 1:
        error = "--batch-size, --accumulate, --print-every: expected 1 or more"
    elif args.batch_size % parts:
        error = f"{given}: expected a multiple of {parts}, the processes times --accumulate"
    elif args.batch_size > examples:
        error = f"{given}: expected at most the {examples} training examples"
    elif args.sync_bn and d.device.type == "cpu":
        error = "--sync-bn: torch's SyncBatchNorm needs GPUs, found none; leave the flag out"
    else:
        return
    refuse(error)


def refuse(error):
    """Exit on all ranks. Rank 0 prints what cannot work, and torchrun once more at the end."""
    extra = {"py_callstack": error, "timestamp": str(int(time.time()))}
    with open(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull), "w") as file:
        json.dump({"message": {"message": error, "extraInfo": extra}}, file)
    if os.environ.get("RANK", "0") == "0":
        print(f"train.py: {error}", file=sys.stderr)
    sys.exit(2)


@cleaned_up()
def main(args):
    d = setup_distributed()
    train_set, val_set, test_set = build_datasets()
    check(args, d, len(train_set))
    run = Run(args, d)
    run.load()
    steps = len(train_set) // args.batch_size  # of an epoch
    options = {"num_workers": args.workers, "pin_memory": d.device.type != "cpu"}
    if args.workers and sys.platform == "linux":
        # Python 3.14 would start workers that outlive a killed training.
        options["multiprocessing_context"] = "fork"
    # From here on, a signal is noted, and ends the training after a step. Before, it ends at once.
    for number in {signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)}:  # not on Windows
        signal.signal(number, lambda number, frame: signals.append(number))

    while run.epoch < args.epochs:
        pieces = own_pieces(args, d, examples=len(train_set), epoch=run.epoch, first_step=run.step)
        loader = DataLoader(Seeded(train_set, args.seed), batch_sampler=pieces, **options)
        batches = iter(loader)
        while run.step < steps:
            progress = (run.epoch + run.step / steps) / args.epochs
            run.train_step(batches, lr_factor=(1 + math.cos(math.pi * progress)) / 2)
            if d.is_main and run.step % args.print_every == 0:
                run.show(steps)
            stop, save = run.vote(bool(signals), d.is_main and time.monotonic() >= run.save_at)
            if stop or save:
                run.save()
            if stop:
                run.say(f"saved after step {run.step} of epoch {run.epoch + 1}, as a signal asked")
                sys.exit(75)  # EX_TEMPFAIL: the command that started it may queue it again
        loss, accuracy = means(run.totals)
        run.epoch += 1
        run.step = 0
        run.totals.zero_()
        line = f"epoch {run.epoch}/{args.epochs}: train loss {loss:.4f}, accuracy {accuracy:.2%}"
        if args.eval_every and (run.epoch % args.eval_every == 0 or run.epoch == args.epochs):
            loss, accuracy = run.evaluate(val_set, options)
            line += f" | validation loss {loss:.4f}, accuracy {accuracy:.2%}"
            if accuracy > run.best:
                run.best = accuracy
                run.save("best.pt")
                run.save()  # or a training that resumes from before would overwrite best.pt
        run.say(line)
    run.save()
    if test_set is not None:
        loss, accuracy = run.evaluate(test_set, options)
        run.say(f"done: test loss {loss:.4f}, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main(parse_args())
