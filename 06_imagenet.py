"""06: ImageNet, elastic.

What a real training needs. After a crash or a signal it continues where it was, on however many
processes are left. The global batch, the learning rate and the order of the images stay the same.

    python 06_imagenet.py data/imagenet @recipes/resnet18.args
    torchrun --nproc-per-node=8 06_imagenet.py data/imagenet @recipes/resnet50.args --amp bf16

data/imagenet holds train/CLASS/*.jpg and val/CLASS/*.jpg. @FILE reads flags from a file; flags
after it win. It runs under every launcher that setup_distributed knows. On 1 to 4 machines, with up
to 3 restarts after failures:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:4 --nproc-per-node=8 --max-restarts=3 --rdzv-backend=c10d \\
        --rdzv-id=resnet50 --rdzv-endpoint=10.0.0.1:29400 \\
        06_imagenet.py data/imagenet @recipes/resnet50.args --resume

Launch files to edit, for machines with and without Slurm: launch/.
"""

from imagenet import signals

if __name__ == "__main__":
    signals.install()  # now, because a signal may arrive in the seconds that importing torch takes

import argparse
import contextlib
import dataclasses
import datetime
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.setup_distributed import Distributed, cleaned_up, setup_distributed
from common.syncbn import convert_sync_batchnorm
from ddp.errors import one_line_errors
from imagenet.checkpoint import BEST, Checkpoints, SaveTimer
from imagenet.checks import check_batches, check_launch, check_same_run
from imagenet.datasets import build_datasets
from imagenet.finetune import freeze, start_from, train_mode
from imagenet.flags import AMP_DTYPES, parse_args
from imagenet.loader import DeviceLoader, build_normalize
from imagenet.model import AveragedModel, build_model, make_deterministic
from imagenet.optimizer import build_optimizer, learning_rate, start_momentum
from imagenet.progress import Evaluation, Progress, batch_totals
from imagenet.sampler import GlobalBatchSampler, micro_batches
from imagenet.votes import Stopped, Votes
from imagenet.weights import load_into

SLOW_START = datetime.timedelta(minutes=30)  # to list images, read a checkpoint, download weights


@cleaned_up()
@one_line_errors()
def main(args):
    # 0. set up
    signals.exit_when_torchrun_dies()
    timeout = datetime.timedelta(seconds=args.timeout)
    make_deterministic(args.deterministic)  # before NCCL connects: torch gives it other algorithms
    d = setup_distributed(timeout=timeout)
    check_launch(args, d)
    cpu_group = dist.new_group(backend="gloo", timeout=timeout)  # for votes and checkpoints
    slow_group = dist.new_group(backend="gloo", timeout=SLOW_START)
    train_set, val_set = build_datasets(args)
    dist.monitored_barrier(slow_group)  # a slow disk lists its files for minutes
    patience = args.timeout / 2  # for a slow disk: the other ranks wait too
    checkpoints = Checkpoints(args.checkpoints_path, d, cpu_group, args.keep, patience)
    state, path = checkpoints.load(slow_group) if args.resume else (None, None)
    check_same_run(args, d, checkpoints, len(train_set), state, path)
    accumulate, micro_batch_size = micro_batches(args, d.world_size, state)

    # 1. define model
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = build_model(args, train_set).to(d.device)
    if args.weights and not state:
        start_from(model, args, len(train_set.classes), d.is_main)
    freeze(model, args.freeze)
    if args.sync_bn and d.world_size > 1:
        model = convert_sync_batchnorm(model)
    ema = AveragedModel(model, args.ema) if args.ema else None
    if args.compile:
        model.compile()
    ddp = wrap_model(model, args.deterministic) if d.world_size > 1 else model

    # 2. define dataloader
    # Evaluation has micro-batches too: a whole batch may not fit into the memory.
    train_sampler = GlobalBatchSampler(
        len(train_set), args.batch_size, d.rank, d.world_size, accumulate, seed=args.seed
    )
    val_sampler = GlobalBatchSampler(
        len(val_set), args.batch_size, d.rank, d.world_size, accumulate, seed=None
    )
    train_loader = DeviceLoader(train_set, train_sampler, args.workers, d, cpu_group)
    val_loader = DeviceLoader(val_set, val_sampler, args.workers, d, cpu_group)
    progress = Progress(args, d, train_sampler, ddp)
    progress.header(model, train_set, val_set)
    check_batches(args, d, model, train_sampler)

    # 3. define loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing, reduction="sum")
    optimizer = build_optimizer(model, args, d.device)
    scaler = torch.amp.GradScaler(d.device.type, enabled=args.amp == "fp16")
    run = Run(
        args=args,
        d=d,
        model=model,
        ema=ema,
        ddp=ddp,
        criterion=criterion,
        optimizer=optimizer,
        scaler=scaler,
        sampler=train_sampler,
        micro_batch_size=micro_batch_size,
        checkpoints=checkpoints,
        progress=progress,
        votes=Votes(cpu_group),
    )
    if state:
        run.load_state_dict(state, path)
        steps = args.epochs * run.steps_per_epoch
        progress.print(f"resumed from {path}, after step {run.steps_done} of {steps}")
        state = None  # its memory is free again
    start_momentum(optimizer)

    # 4. train and evaluate
    signals.stop.training = True  # from now on a signal does not end the process: see train_epoch
    evaluation, stopped = None, None
    try:
        if args.evaluate:
            evaluation = evaluate(run, val_loader)
        epochs = [] if args.evaluate else range(run.epoch, args.epochs)
        for epoch in epochs:
            train_epoch(run, epoch, train_loader)
            evaluation = evaluate(run, val_loader) if evaluation_due(args, epoch) else None
            progress.show_epoch(evaluation)
            if evaluation and (run.best is None or evaluation.top1 > run.best):
                run.best = evaluation.top1
                checkpoints.save(run.state_dict(), BEST, wait=True)
    except Stopped as error:
        stopped = f"stopped by a signal {error}"

    # 5. tear down
    checkpoints.finish()
    progress.close(stopped or progress.outcome(evaluation, run.best))
    if stopped:
        signals.exit_for_requeue(d.launcher)
    signals.ignore()  # on exit, Python restores the default handlers, which kill the process


def train_epoch(run, epoch, loader):
    """Train from the current step to the end of an epoch.

    Raises:
        Stopped: a signal reached some rank. All ranks agreed on this step, and the state is saved.
    """
    args = run.args
    d = run.d
    optimizer = run.optimizer
    progress = run.progress
    first_step = run.steps_done - epoch * run.steps_per_epoch  # above 0 in a resumed epoch
    if first_step == 0:
        run.totals.zero_()
    train_mode(run.model, args.freeze)
    run.votes.restart()
    run.sampler.set_epoch(epoch, first_step)
    batches = progress.timed(loader, epoch, first_step, run.totals)
    for step in range(first_step, run.steps_per_epoch):
        # A signal may reach one rank alone, and rank 0 alone looks at the clock. So all ranks vote,
        # and count the votes at the end of the step.
        run.votes.cast(stop=signals.stop.signal, save=d.is_main and run.save_timer.overdue())
        lr = learning_rate(args, epoch + step / run.steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        for micro_batch in range(run.accumulate):
            images, targets = next(batches)
            # Dropout depends on the position in the training: there is no random state to save.
            torch.manual_seed(hash((args.seed, epoch, step, micro_batch, d.rank)))
            more_follow = d.world_size > 1 and micro_batch + 1 < run.accumulate
            with run.ddp.no_sync() if more_follow else contextlib.nullcontext():
                with run.autocast():
                    outputs = run.ddp(run.prepare(images))
                    loss = run.criterion(outputs, targets)
                # The loss is a sum over images. DDP divides gradients by the world size. Undo this,
                # and divide by the images of the whole step: ranks may have one more or less.
                weight = d.world_size / run.sampler.step_size(step)
                run.scaler.scale(loss * weight).backward()
            run.totals += batch_totals(loss, outputs, targets)
        progress.backward_done()
        if args.clip_grad:
            run.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(run.model.parameters(), args.clip_grad)
        run.scaler.step(optimizer)  # after an overflow in fp16, the optimizer changes nothing
        run.scaler.update()
        if run.ema:
            run.ema.update(first=run.steps_done == 0)
        run.steps_done += 1

        stop, save = run.votes.count()
        save |= run.save_timer.planned(run.steps_done)
        last = stop or step + 1 == run.steps_per_epoch
        if progress.due(step):
            progress.show_step(step, run.totals_of_all_ranks(), lr)
            loader.report_damaged()
        if save or last:
            run.checkpoints.save(run.state_dict(), wait=last)
        if stop:
            saved = "saved, and --resume continues" if args.checkpoints_path else "nothing is saved"
            raise Stopped(f"after step {run.steps_done}: {saved}")


@torch.no_grad()
def evaluate(run, loader):
    """Evaluate on every image once, on any number of ranks, without label smoothing.

    Returns:
        Evaluation.

    Raises:
        Stopped: a signal reached some rank.
    """
    run.share_buffers()
    model = run.ema.module if run.ema else run.model
    model.eval()
    run.votes.restart()
    totals = torch.zeros(4, device=run.d.device)
    for images, targets in run.progress.with_bar(loader):
        run.votes.cast(stop=signals.stop.signal)
        if len(images):  # with more ranks than images, some ranks have none
            with run.autocast():
                outputs = model(run.prepare(images))
                loss = nn.functional.cross_entropy(outputs, targets, reduction="sum")
            totals += batch_totals(loss, outputs, targets)
        stop, _ = run.votes.count()
        if stop:
            trained = run.args.checkpoints_path and not run.args.evaluate
            again = "--resume" if trained else "the same command"
            raise Stopped(f"during an evaluation: {again} evaluates again")
    dist.all_reduce(totals)
    loss, top1, top5, images = totals.tolist()
    loader.report_damaged()
    return Evaluation(loss / images, 100 * top1 / images, 100 * top5 / images, int(images))


@dataclasses.dataclass
class Run:
    """One training, and what watches it. state_dict() holds all that another process needs."""

    args: argparse.Namespace  # the flags; nothing changes them
    d: Distributed
    model: nn.Module
    ema: AveragedModel | None
    ddp: nn.Module  # the model in DistributedDataParallel, or the model itself in a world of one
    criterion: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    sampler: GlobalBatchSampler  # of the training set
    micro_batch_size: int  # images in a micro-batch on one rank, at most
    checkpoints: Checkpoints
    progress: Progress
    votes: Votes
    steps_done: int = 0  # training steps, of all epochs
    best: float | None = None  # top-1 in %

    def __post_init__(self):
        self.steps_per_epoch = self.sampler.steps
        self.accumulate = self.sampler.accumulate
        self.save_timer = SaveTimer(self.args.checkpoint_every)
        self.normalize = build_normalize(self.args.channels_last, self.d.device)
        # Of this rank in this epoch: sum of losses, correct answers, correct among five, images.
        # (In a resumed epoch rank 0 also has the totals of all ranks from before.)
        self.totals = torch.zeros(4, device=self.d.device)

    @property
    def epoch(self):
        """The epoch to continue with: at the end of an epoch still that one, to evaluate it."""
        return max(0, self.steps_done - 1) // self.steps_per_epoch

    def autocast(self):
        enabled = self.args.amp != "none"
        return torch.autocast(self.d.device.type, AMP_DTYPES[self.args.amp], enabled=enabled)

    def prepare(self, images):
        """Turn uint8 images on the device into the input of the model."""
        images = self.normalize(images)
        if self.args.compile:  # or a rank with 31 images, not 32, would compile again, alone
            torch._dynamo.maybe_mark_dynamic(images, 0)
        return images

    def share_buffers(self):
        """Give all ranks the batch norm statistics of rank 0. Without --sync-bn they differ."""
        if self.ema:
            self.ema.copy_counters()
        for buffer in [*self.model.buffers(), *(self.ema.module.buffers() if self.ema else [])]:
            dist.broadcast(buffer, src=0)

    def totals_of_all_ranks(self):
        """Return the sum of the totals over all ranks. Those of this rank stay."""
        totals = self.totals.clone()
        dist.all_reduce(totals)
        return totals

    def state_dict(self):
        """Return the state after a step, the same on every rank. Every rank must call it."""
        self.share_buffers()
        return {
            "step": self.steps_done,
            "totals": self.totals_of_all_ranks(),
            "best": self.best,
            "accumulate": self.accumulate,
            "micro_batch": self.micro_batch_size,
            "world_size": self.d.world_size,
            "images": self.sampler.images,
            "flags": {name: str(value) for name, value in vars(self.args).items()},
            "model": self.model.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state, path):
        """Continue from the state of a checkpoint, on any number of ranks."""
        self.steps_done = state["step"]
        self.best = state["best"]
        if self.d.is_main:  # they are the sum over all ranks already
            self.totals += state["totals"].to(self.d.device)
        load_into(self.model, state["model"], path)
        if self.ema:
            load_into(self.ema.module, state["ema"], path)
        settings = [group.copy() for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)  # as the flags of this run say, not as in the checkpoint
        if state["scaler"]:  # empty unless the checkpoint is of --amp fp16
            self.scaler.load_state_dict(state["scaler"])


def wrap_model(model, deterministic):
    """Wrap the model in DistributedDataParallel.

    After its first step, DDP sorts the gradients into buckets again. A resumed run does so after
    another step, so with three or more ranks sums may be rounded differently. If DDP looks for
    unused parameters, it does not sort again, and warns that there are none.
    """
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    options = {"find_unused_parameters": deterministic, "gradient_as_bucket_view": True}
    ddp = DistributedDataParallel(model, **options)  # a view saves a copy of all gradients
    # share_buffers() does so before each evaluation and checkpoint. (Given to DDP as an argument,
    # which is deprecated, False would leave out the first broadcast too.)
    ddp.broadcast_buffers = False
    return ddp


def evaluation_due(args, epoch):
    last = epoch + 1 == args.epochs
    return args.eval_every > 0 and (last or (epoch + 1) % args.eval_every == 0)


if __name__ == "__main__":
    main(parse_args(__doc__))
