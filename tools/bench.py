"""Compare 06 or 08 with plain loops on one device. Each run is a process of its own; they run in
turn, --repeats times, and ratios compare runs that follow each other.

    python tools/bench.py images --arch resnet50 --amp bf16 --channels-last
        bare       forward, backward and optimizer step, always on the same batch
        dummy      06_imagenet.py --dummy: all of the script except reading images
    python tools/bench.py text --amp bf16
        plain      a loop as nanoGPT has it (karpathy/nanoGPT, train.py), with the model of 08: no
                   process group, AdamW, autocast with --amp
        compiled   the same with torch.compile
        08         08_gpt.py: all of the script
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import UserError, one_line_errors
from common.flags import Parser, whole_number
from common.records import environment, peak_memory
from common.report import synchronize, warmup_steps
from gpt.model import GPT
from gpt.report import flops_per_token, peak_of
from gpt.text import VOCABULARY
from imagenet.flags import AMP_DTYPES, add_machine_flags, check_machine_flags, output_file
from imagenet.model import build_model
from tools.machine import pick_device
from tools.records import ROOT, group, ratios, spread

RUNS = {"images": ("bare", "dummy"), "text": ("plain", "compiled", "08")}
SPEEDS = {"images": "images_per_second", "text": "tokens_per_second"}
SIZES = ("layers", "heads", "width", "context")  # of the model of 08


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    positive = whole_number(1)
    add("kind", choices=RUNS, help="what to train on")
    add("--runs", nargs="+", choices=sum(RUNS.values(), ()), metavar="RUN", help="see above")
    add("--steps", type=whole_number(20), default=40, metavar="N", help="steps of each run")
    add("--repeats", type=positive, default=5, metavar="N", help="runs of each kind")
    add("--log-file", type=output_file, metavar="FILE", help="append one JSON line per run to FILE")
    images = parser.add_argument_group("images")
    images.add_argument("--arch", default="resnet18", metavar="NAME", help="see 06")
    images.add_argument("--batch-size", type=positive, default=256, metavar="N", help="see 06")
    images.add_argument("--image-size", type=whole_number(16), default=224, metavar="N", help="too")
    text = parser.add_argument_group("text")
    text.add_argument("--batch-tokens", type=positive, default=1024, metavar="N", help="see 08")
    for name, size in zip(SIZES, (2, 4, 128, 64), strict=True):
        text.add_argument(f"--{name}", type=positive, default=size, metavar="N", help="see 08")
    add_machine_flags(parser)
    add("--inside", help=argparse.SUPPRESS)  # run it in this process
    args = parser.parse_args()
    check_machine_flags(parser, args)
    args.runs = args.runs or RUNS[args.kind]
    if unknown := [name for name in args.runs if name not in RUNS[args.kind]]:
        runs = " ".join(RUNS[args.kind])
        parser.error(f"{args.kind} --runs {unknown[0]}: expected some of --runs {runs}")
    if args.kind == "text":
        if args.amp == "fp16" or args.compile or args.channels_last:
            parser.error(
                "text: found --amp fp16, --compile or --channels-last, which 08 does not have; "
                "expected none of them, as in: python tools/bench.py text --amp bf16"
            )
        args.arch = "gpt"
        args.batch_size = args.batch_tokens // args.context  # windows
    return args


def main(args):
    if args.inside:
        speed = timed(*prepare(args)) * (args.context if args.kind == "text" else 1)
        print(json.dumps({"speed": speed, "peak_memory_mib": peak_memory() // 2**20}))
        return
    names = ["batch_size", "amp", "channels_last", "compile", "steps"]
    names += SIZES if args.kind == "text" else ["image_size"]
    known = {"command": shlex.join(["python", "tools/bench.py", *sys.argv[1:]])}
    known |= {"bench": args.kind, "model": args.arch} | {
        name: getattr(args, name) for name in names
    }
    known |= environment(pick_device())
    print(
        f"{known['device_name']}, {known['cores']} cores | torch {known['torch']} | "
        f"{args.repeats} runs of each, in turn"
    )
    records = []
    for repeat in range(args.repeats):
        for name in args.runs:
            speed, memory = run_alone(name, args)
            measured = {"repeat": repeat, "run": name, SPEEDS[args.kind]: speed}
            records.append(known | measured | {"peak_memory_mib": memory})
            if args.log_file:
                with open(args.log_file, "a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
            print(f"   run {repeat + 1}: {name:9} {speed:9.1f}", flush=True)
    show(args, group(records, "run"))


def show(args, runs):
    """Print the speed and memory of each kind of run, and its ratio to the first kind."""
    first = next(iter(runs))
    column = SPEEDS[args.kind]
    unit = {"images": "img/s", "text": "tok/s"}[args.kind]
    print(f"\n{'run':9} {unit + ', median (range)':>30} {'peak memory':>12}   {first} = 1")
    for name, same in runs.items():
        speeds = spread([run[column] for run in same], ".1f")
        memory = max(run["peak_memory_mib"] for run in same)
        ratio = spread(ratios(same, runs[first], column), ".3f")
        print(f"{name:9} {speeds:>30} {memory:8} MiB   {ratio}")
    script = next((name for name in ("dummy", "08") if name in runs), first)
    speed = median(run[column] for run in runs[script])
    line = f"{'06' if script == 'dummy' else script}: {speed:.0f} {unit}"
    peak = peak_of(runs[first][0]["device_name"])
    if args.kind == "text" and peak:
        line += f", MFU {speed * flops_per_token(args, GPT(**sizes(args))) / peak / 1e12:.1%}"
    for name in runs:
        if name != script:
            line += f", {median(ratios(runs[script], runs[name], column)):.2f} of {name}"
    print(line)


def run_alone(name, args):
    """Run one loop in a process of its own. Return its speed, and its peak memory in MiB."""
    flags = ["--amp", args.amp, *["--channels-last"] * args.channels_last]
    flags += ["--compile"] * args.compile
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        outputs = ["--epochs", 1, "--log-file", log]
        if name == "dummy":
            images = ["--dummy", args.steps * args.batch_size, "--workers", 0, "--eval-every", 0]
            images += ["--arch", args.arch, "--image-size", args.image_size]
            images += ["--batch-size", args.batch_size, "--checkpoint-every", 10**6]
            outputs += ["--checkpoints-path", Path(folder, "checkpoints")]
            command = ["06_imagenet.py", *flags, *images, *outputs]
        elif name == "08":
            # It trains on nine tenths of a text, and evaluates on the rest.
            text = Path(folder, "text")
            count = args.steps * args.batch_tokens * 10 // 9
            text.write_bytes(bytes(range(256)) * (count // 256 - 1))
            model = [word for size in SIZES for word in (f"--{size}", getattr(args, size))]
            model += ["--batch-tokens", args.batch_tokens, "--amp", args.amp]
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
            command = [*torchrun, "08_gpt.py", *model, *outputs, "--text", text, "--sample", 0]
        else:
            command = [*sys.argv, "--inside", name]
            command[0] = "tools/bench.py"
        env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        process = subprocess.run(
            [sys.executable, *map(str, command)], cwd=ROOT, env=env, stdout=subprocess.PIPE
        )
        if process.returncode != 0:
            raise UserError(f"the run {name} exited with code {process.returncode}; see above")
        record = json.loads((log.read_bytes() if log.exists() else process.stdout).splitlines()[-1])
    speed = record[SPEEDS[args.kind] if "speed" not in record else "speed"]
    return speed, record["peak_memory_mib"]


def timed(batches, step):
    """Return the samples per second of a loop over batches, without its first training steps."""
    device = pick_device()
    done = 0
    warmup = warmup_steps(len(batches))
    for k, (inputs, targets) in enumerate(batches, start=1):
        step(inputs, targets)
        done += len(targets)
        if k == warmup:
            synchronize(device)
            done = 0
            begin = time.perf_counter()
    synchronize(device)
    return done / (time.perf_counter() - begin)


def prepare(args):
    """Return the batches of a run, and its training step: a function of inputs and targets."""
    torch.manual_seed(0)
    if args.kind == "text":
        torch.set_float32_matmul_precision("high")
        return [draw_windows(args) for _ in range(args.steps)], text_step(args)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    targets = torch.randint(1000, (args.batch_size,))
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    pair = images.to(pick_device(), memory_format=layout), targets.to(pick_device())
    return [pair] * args.steps, bare_step(args)


def bare_step(args):
    """Return the training step of 06 alone."""
    device = pick_device()
    torch.backends.cudnn.benchmark = True
    args.deterministic = False  # as in the run of 06
    size = (args.image_size, args.image_size)
    dataset = SimpleNamespace(channels=3, image_size=size, num_classes=1000)
    model = build_model(args, dataset).to(device)
    if args.compile:
        model.compile()
    criterion = nn.CrossEntropyLoss()
    settings = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-5}
    fused = device.type != "cpu"  # as in 06
    optimizer = torch.optim.SGD(model.parameters(), fused=fused, **settings)
    autocast = torch.autocast(device.type, AMP_DTYPES[args.amp], enabled=args.amp != "none")
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")

    def step(images, targets):
        optimizer.zero_grad()
        with autocast:
            loss = criterion(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def sizes(args):
    """Return the sizes of the model of 08."""
    return {name: getattr(args, name) for name in SIZES}


def draw_windows(args):
    """Return int64 tokens and targets (windows, context) at random places of a text."""
    text = torch.randint(VOCABULARY, (args.batch_size, args.context + 1))
    pair = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return pair if pick_device().type == "cpu" else tuple(tokens.pin_memory() for tokens in pair)


def text_step(args):
    """Return a training step as nanoGPT has it."""
    device = pick_device()
    model = GPT(**sizes(args)).to(device)
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, 4e-3, betas=(0.9, 0.95), fused=device.type != "cpu")
    if args.inside == "compiled":
        model.compile()
    autocast = torch.autocast(device.type, AMP_DTYPES[args.amp], enabled=args.amp != "none")

    def step(tokens, targets):
        tokens = tokens.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        with autocast:
            outputs = model(tokens)
            loss = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
