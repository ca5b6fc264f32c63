"""06: ImageNet, elastic.

Adds to 03 what a real training needs: it goes on where it was after a crash or a signal, on however many processes
are left, and the global batch, the learning rate and the order of the images stay what they were.

    python 06_imagenet.py data/imagenet @recipes/resnet18.args
    torchrun --nproc-per-node=8 06_imagenet.py data/imagenet @recipes/resnet50.args --amp bf16 --channels-last

data/imagenet holds train/CLASS/*.jpg and val/CLASS/*.jpg. A file of flags comes after an @; flags after it win.
Under any launcher that setup_distributed knows, here with up to 3 restarts after a failure, on 1 to 4 machines:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:4 --nproc-per-node=8 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=resnet50 \\
        --rdzv-endpoint=10.0.0.1:29400 06_imagenet.py data/imagenet @recipes/resnet50.args --resume

Files to edit and start, for machines with and without Slurm: launch/.
"""

from imagenet.signals import end_with_torchrun, stop  # isort: skip, before torch: a signal must not kill while that loads

import contextlib
import datetime
import math
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.distributed import LaunchError, cleaned_up, setup_distributed, sum_over_ranks
from common.errors import UserError, one_line_errors
from common.flags import AMP_DTYPES, BareParser, number, whole_number
from common.models import build_model, convert_sync_batchnorm
from imagenet.checkpoint import BEST, Checkpoints, Every, load_weights
from imagenet.data import Damage, build_datasets, build_loader, build_normalize, on_device
from imagenet.elastic import GlobalBatches, Votes, check_restarts, leave
from imagenet.progress import Progress


def parse_args():
    parser = BareParser(__doc__, fromfile_prefix_chars="@")
    data = parser.add_argument_group("data")
    add = data.add_argument
    add("train_path", nargs="?", metavar="TRAIN", help="folder with train/ and val/, or class folders to train on")
    add("--val-path", metavar="DIR", help="class folders to test on, if they are not beside those to train on")
    add("--dummy", type=whole_number(2), metavar="N", help="N made-up images instead, to measure speed")
    add("--image-size", type=whole_number(16), default=224, metavar="N", help="pixels a side of what the network sees")
    add("--workers", type=whole_number(0), metavar="N", help="loader processes of each rank; automatic: its cores")

    network = parser.add_argument_group("network")
    add = network.add_argument
    add("--arch", default="resnet18", metavar="NAME", help="a torchvision network, or timm:NAME if timm is installed")
    add("--weights", metavar="FILE", help="begin with those of a checkpoint or a state_dict")
    add("--sync-bn", action="store_true", help="batch norm over the images of all processes")

    recipe = parser.add_argument_group("recipe")
    add = recipe.add_argument
    add("--epochs", type=whole_number(1), default=100, metavar="N", help="passes over the training images")
    add("--batch-size", type=whole_number(1), default=256, metavar="N", help="images a step, over all processes")
    add("--accumulate", type=whole_number(1), default=1, metavar="N", help="take them in N micro-batches")
    add("--lr", type=number(above=0), default=0.1, metavar="RATE", help="peak rate for a batch of 256; scaled linearly")
    add("--schedule", choices=("cosine", "step"), default="cosine", help="step: a tenth every --step-epochs")
    add("--step-epochs", type=number(above=0), default=30, metavar="N", help="epochs between steps of the rate")
    add("--warmup-epochs", type=number(), default=5, metavar="N", help="epochs until the rate is at its peak")
    add("--warmup-factor", type=number(), default=0.1, metavar="X", help="share of the peak that warm-up begins with")
    add("--momentum", type=number(below=1), default=0.9, metavar="X", help="Nesterov momentum")
    add("--weight-decay", type=number(), default=5e-5, metavar="X", help="for weights, not for norms and biases")
    add("--label-smoothing", type=number(below=1), default=0, metavar="X", help="share of the target for all classes")
    add("--clip-grad", type=number(above=0), metavar="NORM", help="largest norm of a step's gradient")
    add("--ema", type=number(below=1), default=0, metavar="DECAY", help="average the weights and test those; 0 is off")
    add("--seed", type=whole_number(0, 2**32), default=0, metavar="N", help="of weights, order, crops, dropout")

    run = parser.add_argument_group("run")
    add = run.add_argument
    add("--evaluate", action="store_true", help="test only, the network of --weights or --resume")
    add("--eval-every", type=whole_number(0), default=1, metavar="N", help="test after every N epochs; 0 is never")
    add("--checkpoints-path", default="checkpoints", metavar="DIR", help="where they lie, shared by machines or not")
    add(
        "--checkpoint-every",
        type=Every,
        default="600s",
        metavar="N",
        help="steps, as 100, or seconds, as 600s; and each epoch",
    )
    add("--keep", type=whole_number(1), default=3, metavar="N", help="checkpoints to keep, beside the best")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--dist-init-method", choices=("auto", "env", "slurm"), default="auto", help="which launcher must have started")
    add("--timeout", type=number(above=0), default=60, metavar="SECONDS", help="for ranks that do not come or answer")
    add("--print-every", type=whole_number(1), default=50, metavar="N", help="steps between lines")
    add("--log-file", metavar="FILE", help="append one JSON line an epoch to FILE")
    add("--tensorboard", metavar="DIR", help="write event files for TensorBoard")
    add("--deterministic", action="store_true", help="the same bits every time, at the price of some speed")
    parser.add_machine_flags()
    args = parser.parse_args()
    if (args.train_path is None) == (args.dummy is None):
        parser.error("name a folder of images or --dummy N, one of the two: 06_imagenet.py data/imagenet")
    if args.evaluate and not (args.weights or args.resume):
        parser.error("--evaluate without a network to test: add --weights FILE or --resume")
    if args.evaluate and args.weights and args.resume:
        parser.error("--evaluate with both --weights and --resume: which network? leave out one of the two")
    return args


@cleaned_up()
def main(args):
    # 0. set up
    end_with_torchrun()
    d = setup_distributed(timeout=datetime.timedelta(seconds=args.timeout))
    check_restarts(d, args.resume or args.evaluate)
    expected = {"env": ("torchrun", "nodes"), "slurm": ("srun",)}.get(args.dist_init_method, (d.launcher,))
    if d.launcher not in expected:
        command = "srun python" if args.dist_init_method == "slurm" else "torchrun --nproc-per-node=2"
        raise LaunchError(f"--dist-init-method {args.dist_init_method}: found {d.launcher}; {command} 06_imagenet.py")
    torch.backends.cudnn.benchmark = not args.deterministic
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # Votes and checkpoints travel apart from gradients, and never through the GPU.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=args.timeout))
    train_set, val_set = build_datasets(args)
    steps = math.ceil(len(train_set) / args.batch_size)
    checkpoints = Checkpoints(args.checkpoints_path, d.rank, d.local_rank, group, args.keep, patience=args.timeout / 2)
    loaded = checkpoints.load() if args.resume else None
    state = check_resume(args, d, checkpoints, train_set, loaded)
    accumulate = state["accumulate"]
    progress = Progress(args, d, steps, accumulate)

    # 1. define network
    torch.manual_seed(args.seed)  # the same weights in every process
    net = build_model(args, train_set).to(d.device)
    if args.weights and not loaded:
        load_into(net, load_weights(args.weights), args.weights)
    if args.sync_bn and d.world_size > 1:
        net = convert_sync_batchnorm(net)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(args.ema), use_buffers=True) if args.ema else None
    if args.compile:
        net.compile()
    ddp = net
    if d.world_size > 1:
        # DDP sorts its buckets anew after the first step, which in a resumed run would be another one: with three ranks
        # or more another order of sums. Looking for unused parameters keeps it from that, and warns of finding none.
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        ddp = DistributedDataParallel(net, find_unused_parameters=args.deterministic)
        progress.communication.attach(ddp)

    # 2. define dataloader
    train_batches = GlobalBatches(len(train_set), args.batch_size, d.rank, d.world_size, accumulate, args.seed)
    val_batches = GlobalBatches(len(val_set), args.batch_size, d.rank, d.world_size, accumulate)
    train_loader = build_loader(train_set, train_batches, args.workers, d.local_world_size)
    val_loader = build_loader(val_set, val_batches, args.workers, d.local_world_size)
    normalize = build_normalize(args.channels_last, d.device)
    damage, val_damage = Damage(train_set, group), Damage(val_set, group)
    progress.header(net, train_set, val_set, train_batches.piece_sizes())
    check_batches(args, d, net, train_batches)

    # 3. define loss and optimizer
    criterion = nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=args.label_smoothing, reduction="sum")
    optimizer = torch.optim.SGD(parameter_groups(net, args), lr=0, momentum=args.momentum, nesterov=args.momentum > 0)
    autocast = torch.autocast(d.device.type, AMP_DTYPES[args.amp], enabled=args.amp != "none")
    scaler = torch.amp.GradScaler(d.device.type, enabled=args.amp == "fp16")
    if loaded:
        load_into(net, state["model"], loaded[1])
        if ema:
            load_into(ema.module, state["ema"], loaded[1])
            ema.n_averaged.fill_(state["step"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        progress.print(f"resumed from {loaded[1]}, after step {state['step']} of {args.epochs * steps}")
    tested = ema.module if ema else net
    votes = Votes(group)

    def test():
        """Top-1 and top-5 accuracy in %, and how many images they are of."""
        share_buffers(net, ema)
        counts = evaluate(tested, val_loader, val_damage, normalize, autocast, votes, d.device)
        if counts is None:
            checkpoints.finish()
            progress.close("stopped by a signal during a test: --resume tests again and goes on")
            leave(d.launcher, stop)
        val_damage.tell()
        return 100 * counts[0] / counts[2], 100 * counts[1] / counts[2], int(counts[2])

    def capture(step, totals, best):
        """All that a process must know to go on after a step; the same on every rank."""
        share_buffers(net, ema)
        return {
            "step": step,
            "totals": totals,  # of its epoch
            "best": best,
            "accumulate": accumulate,
            "micro_batch": state["micro_batch"],
            "world_size": d.world_size,
            "images": len(train_set),
            "flags": {name: str(value) for name, value in vars(args).items()},
            "model": net.state_dict(),
            "ema": ema.module.state_dict() if ema else None,
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }

    # 4. train and evaluate
    stop.training = True  # from now on a signal is noted, and no longer ends the process
    if args.evaluate:
        progress.close("tested: top-1 {:.3f}%, top-5 {:.3f}%, {} images".format(*test()))
        stop.ignore()
        return
    best, result = state["best"], None
    first_epoch = max(0, state["step"] - 1) // steps  # at the end of an epoch that one, which is still to be tested
    first_step = state["step"] - first_epoch * steps
    counted = state["totals"]  # in the epoch so far, by an earlier process
    for epoch in range(first_epoch, args.epochs):
        net.train()
        totals = counted.to(d.device) if d.is_main else torch.zeros(4, device=d.device)
        train_batches.set_epoch(epoch, first_step)
        batches = on_device(train_loader, d.device, damage)
        for step in progress.epoch_steps(epoch, first_step, counted):
            done = epoch * steps + step + 1  # steps of the whole run, when this one is
            save_due = step + 1 == steps or args.checkpoint_every.due(done)
            votes.cast(stop.signal, d.is_main and save_due)
            lr = learning_rate(args, epoch + step / steps)
            for weights in optimizer.param_groups:
                weights["lr"] = lr
            optimizer.zero_grad()
            for micro in range(accumulate):
                images, targets = progress.wait_for(batches)
                torch.manual_seed(hash((args.seed, epoch, step, micro, d.rank)))  # dropout: nothing to save for it
                last = micro + 1 == accumulate or d.world_size == 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    with autocast:
                        outputs = ddp(normalize(images))
                        loss = criterion(outputs, targets)
                    # DDP divides by the ranks, of which each may have another number of images.
                    scaler.scale(loss * (d.world_size / train_batches.step_size(step))).backward()
                totals += torch.cat([loss.detach()[None], count_correct(outputs, targets)])
            progress.communication.backward_done()
            if args.clip_grad:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
            scaler.step(optimizer)  # note: fp16 waits for the device here, to look for overflow
            scaler.update()
            if ema:
                ema.update_parameters(net)

            stopping, saving = votes.count()
            if progress.due():
                progress.show_step(sum_over_ranks(totals), lr)
                damage.tell()
            if stopping or saving:
                checkpoints.save(capture(done, sum_over_ranks(totals), best), last=stopping)
            if stopping:
                checkpoints.finish()
                progress.close(f"stopped by a signal after step {done}: saved, and --resume goes on")
                leave(d.launcher, stop)

        result = None
        if args.eval_every and ((epoch + 1) % args.eval_every == 0 or epoch + 1 == args.epochs):
            result = test()
        progress.show_epoch(result)
        if result and (best is None or result[0] > best):
            best = result[0]
            checkpoints.save(capture((epoch + 1) * steps, torch.zeros(4), best), BEST)
        first_step, counted = 0, torch.zeros(4)

    # 5. tear down
    checkpoints.finish()
    outcome = f"top-1 {result[0]:.3f}%, best {best:.3f}%" if result else "not tested"
    progress.close(f"done: {outcome} after {args.epochs} epochs")
    stop.ignore()


MUST_STAY = ("arch", "batch_size", "image_size", "seed", "ema")
MAY_CHANGE = ("epochs", "accumulate", "lr", "schedule", "step_epochs", "warmup_epochs", "warmup_factor", "momentum")
MAY_CHANGE += ("weight_decay", "label_smoothing", "clip_grad", "amp", "sync_bn")


def check_resume(args, d, checkpoints, train_set, loaded):
    """The state to begin with: the loaded one, if it is of this run, or that of a new one.

    Raises:
        UserError: there are checkpoints but no --resume; or they are of another network, or other data.
    """
    micro_batch = math.ceil(args.batch_size / (d.world_size * args.accumulate))
    if loaded is None:
        if args.evaluate and not args.weights:
            raise UserError(f"--evaluate --resume: no checkpoint in {args.checkpoints_path}; name the right folder")
        if not args.evaluate and not args.resume and checkpoints.exist():
            raise UserError(
                f"--checkpoints-path {args.checkpoints_path} holds checkpoints already: add --resume to go on from the "
                f"newest, or name another folder"
            )
        if args.resume and d.is_main:
            print(f"no checkpoint in {args.checkpoints_path}: beginning anew")
        return {
            "step": 0, "totals": torch.zeros(4), "best": None,
            "accumulate": args.accumulate, "micro_batch": micro_batch,
        }  # fmt: skip

    state, path = loaded
    now = {name: str(value) for name, value in vars(args).items()}
    for name in MUST_STAY:
        if state["flags"][name] != now[name]:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{flag} {now[name]}, but {path} is of a run with {flag} {state['flags'][name]}: expected the same; "
                f"say {flag} {state['flags'][name]}, or name another --checkpoints-path"
            )
    if state["images"] != len(train_set):
        raise UserError(
            f"{len(train_set)} training images, but {path} is of a run with {state['images']}: expected the same; "
            f"name its folder of images, or another --checkpoints-path"
        )
    changed = [name for name in MAY_CHANGE if state["flags"][name] != now[name]]
    if changed and d.is_main:
        changes = [f"--{name.replace('_', '-')} {state['flags'][name]} -> {now[name]}" for name in changed]
        print(f"resuming with other flags: {', '.join(changes)}")
    if "accumulate" in changed:
        state |= {"accumulate": args.accumulate, "micro_batch": micro_batch}
    elif d.world_size != state["world_size"]:  # as many micro-batches as keep them as small as they were
        state["accumulate"] = math.ceil(args.batch_size / (d.world_size * state["micro_batch"]))
    return state


def check_batches(args, d, net, batches):
    """Refuse a batch that is too small to be cut up, and say what --sync-bn does with one process."""
    fewest, most = batches.piece_sizes()
    batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
    together = args.sync_bn and d.world_size > 1
    need = 2 if batch_norm and not together else 1
    if fewest < need:
        raise UserError(
            f"--batch-size {args.batch_size} leaves {fewest} to {most} images for each of {d.world_size} processes in "
            f"{batches.accumulate} micro-batches: expected {need} or more; at least --batch-size "
            f"{need * d.world_size * batches.accumulate}, or fewer processes or micro-batches"
        )
    if args.sync_bn and d.world_size == 1 and d.is_main:
        print("--sync-bn with one process: ordinary batch norm, as there is nobody to share with")


def parameter_groups(net, args):
    """The weights, which decay, and the rest: norms and biases, whose size does not matter or is no complexity."""
    weights = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    return [{"params": weights, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]


def learning_rate(args, epoch):
    """The rate of a step; `epoch` counts with fractions.

    Linear scaling and warm-up as in Goyal et al., "Accurate, Large Minibatch SGD", 2017; the cosine of Loshchilov and
    Hutter, "SGDR", 2016, without restarts, which warm-up multiplies, as in pycls.
    """
    peak = args.lr * args.batch_size / 256
    if args.schedule == "cosine":
        rate = peak * (1 + math.cos(math.pi * epoch / args.epochs)) / 2
    else:
        rate = peak * 0.1 ** (epoch // args.step_epochs)
    if epoch < args.warmup_epochs:
        rate *= args.warmup_factor + (1 - args.warmup_factor) * epoch / args.warmup_epochs
    return rate


def count_correct(outputs, targets):
    """float (3,): how many answers are right, how many are among the first five, how many images there are."""
    answers = outputs.topk(min(5, outputs.size(1)), dim=1).indices == targets[:, None]
    return torch.stack([answers[:, 0].sum(), answers.sum(), (targets >= 0).sum()]).float()


def share_buffers(net, ema):
    """Give all ranks rank 0's batch norm statistics, which differ without --sync-bn; training takes those too."""
    for buffer in [*net.buffers(), *(ema.module.buffers() if ema else [])]:
        dist.broadcast(buffer, src=0)


@torch.no_grad()
def evaluate(net, loader, damage, normalize, autocast, votes, device):
    """Test on every image once: count_correct over all ranks, or None if a signal came."""
    net.eval()
    counts = torch.zeros(3, device=device)
    for images, targets in on_device(loader, device, damage):
        votes.cast(stop.signal)
        if len(images):  # with more ranks than images some have none
            with autocast:
                counts += count_correct(net(normalize(images)), targets)
        if votes.count()[0]:
            return None
    return sum_over_ranks(counts).tolist()


def load_into(net, weights, path):
    """Load a state_dict, or say what does not fit."""
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} does not fit this network ({reason}): expected weights of the same --arch") from None


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
