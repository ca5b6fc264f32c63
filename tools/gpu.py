"""Prove and measure everything on NVIDIA GPUs.

    make gpu                           all parts that have not passed yet
    python tools/gpu.py --list         the parts, and how long they take
    python tools/gpu.py --rehearse     all parts in tiny sizes, also on a machine without a GPU
    python tools/gpu.py --minutes 9 --data cifar10.tar.xz --out gpu --tar gpu.tgz

Proofs answer yes or no; four run side by side. After them each speed is measured alone, first what
people compare most. The last command is for a machine that you have for ten minutes: it unpacks the
images that you carry there, begins no part that would not end in time, and packs all records into
one file.
"""

import math
import os
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torchvision

from common.errors import UserError, one_line_errors
from common.flags import Parser, number
from common.records import environment
from tools.bench.measure import pick_device
from tools.experiments import STOP_SIGNALS, Machine
from tools.lab.parts import Part, Runner
from tools.records import RESULTS

SIDE_BY_SIDE = 4  # proofs
DDP = "torchrun --nproc-per-node=$GPUS"
TESTS = "python -m pytest -q -p no:cacheprovider tests/core/test_on_gpu.py"
OTHERS = "not two_ranks and not bits and not first_step and not waits"
GPU_CODE = f"{TESTS} tests/core/test_gpus.py -k '{OTHERS}'"
# What srun tells the only task of a step.
ONE_TASK = (
    "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 "
    "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=1 "
    "SLURM_STEP_NODELIST=localhost CUDA_VISIBLE_DEVICES=0"
)
RUNGS = f"""
    python 01_snsc.py $QUICK
    python 02_snmc_dp.py $QUICK
    {DDP} 03_mnmc_ddp_launch.py $QUICK --sync-bn
    python 04_mnmc_ddp_mp.py $QUICK --nproc-per-node $GPUS
    {ONE_TASK} python 05_mnmc_ddp_slurm.py $QUICK
"""
SHARDS = f"""
    {DDP} 07_fsdp.py $QUICK --epochs 1 --checkpoints-path $DIR/shards
    {DDP} 07_fsdp.py $QUICK --checkpoints-path $DIR/shards --save $DIR/whole.pt | tee $DIR/log
    ! grep -F "[1/2]" $DIR/log || false  # its first epoch was loaded
    {DDP} 07_fsdp.py $QUICK $VIT --amp bf16 --clip-grad 1 --checkpoint-activations
"""
UNPACK = """
    [ -d $IMAGES ] || python -W ignore -m tarfile -e "$DATA" data/unpacked
    [ -d $IMAGES ] || mv data/unpacked/cifar10 $IMAGES
    rm -rf data/unpacked
"""
TRAIN = (
    "python tools/bench/train.py $RESNET50 --amp bf16 --channels-last "
    '--log-file "$OUT/train/$NAME.jsonl" --runs'
)
ALL = "bare dummy example example-amp"
INPUT = """
    python tools/bench/input.py --dataset folder --data-dir $IMAGES $INPUT \\
        --loops "classic, memory" 01 limit --log-file "$OUT/input/$NAME.jsonl"
"""
CIFAR10 = f"""
    {DDP} 06_imagenet.py $IMAGES $CIFAR10 --batch-size 256 --lr 0.1 --warmup-epochs 2 \\
        --weight-decay 5e-4 --label-smoothing 0.1 --amp bf16 --channels-last --eval-every 10 \\
        --checkpoints-path $DIR --log-file "$OUT/imagenet/$NAME.jsonl"
"""
MEMORY = """
    python tools/bench/memory.py $VIT --processes $COUNTS $MEMORY \\
        --log-file "$OUT/memory/$NAME.jsonl"
"""
SPEED = 'python tools/experiments.py speed --processes $COUNTS $SPEED --out "$OUT"'

PROOFS = [
    Part("data", 10, "the images of --data are unpacked", UNPACK),
    Part("rungs", 120, "01 to 05 train", RUNGS),
    Part("shards", 105, "07 trains, saves, continues, and computes in bf16", SHARDS),
    Part("tests", 95, "the other tests of GPU code", GPU_CODE),
    Part("resume", 60, "06, killed and resumed, has the bits of a whole run", f"{TESTS} -k bits"),
    Part("fp16", 55, "06 in fp16: no loss is nan, from the first step", f"{TESTS} -k first_step"),
    Part("waits", 55, "no line of 06 waits for the GPU in each step", f"{TESTS} -k waits"),
    Part("shared", 50, "two ranks on one GPU learn as on CPUs (gloo)", f"{TESTS} -k two_ranks"),
    Part("preflight", 15, "preflight finds no fault", f"{DDP} launch/preflight.py"),
]
SPEEDS = [
    Part("resnet50", 160, "06 beside the bare step and a plain loop", f"{TRAIN} {ALL}"),
    Part("input", 95, "01 on CIFAR-10 beside a classic loop and its limit", INPUT, "IMAGES"),
    Part("cifar10", 110, "06 on CIFAR-10: accuracy and seconds", CIFAR10, "IMAGES"),
    Part("compile", 115, "06 with --compile", f"{TRAIN} dummy --repeats 1 --compile"),
    Part("memory", 100, "memory of DDP and FSDP, beside tools/fit.py", MEMORY),
    Part("speed", 360, "images per second of 01 to 05", SPEED),
]

SIZES = {
    "IMAGES": "data/cifar10",
    "QUICK": "--limit 16000 --epochs 2",
    "VIT": "--arch vit_b_16",
    "RESNET50": "--arch resnet50 --batch-size 256 --steps 50 --repeats 2",
    "INPUT": "--limit 25000 --epochs 4 --repeats 2",
    "CIFAR10": "--arch resnet18 --image-size 128 --epochs 30",
    "MEMORY": "--arch vit_b_16 --batch-size 64 --steps 20",
    "SPEED": "--repeats 2",
}
TINY = {
    "IMAGES": "$REHEARSAL",
    "QUICK": "--dataset folder --data-dir $REHEARSAL --epochs 2 --batch-size 16 --arch small_net",
    "VIT": "--arch mnist_net",
    "RESNET50": "--arch small_net --batch-size 8 --steps 20 --repeats 1 --image-size 32",
    "INPUT": "--epochs 1 --repeats 1 --batch-size 16 --arch small_net",
    "CIFAR10": "--arch small_net --image-size 32 --epochs 1 --workers 1",
    "MEMORY": "--arch resnet18 --batch-size 2 --steps 1 --image-size 32",
    "SPEED": "--dry-run",
}


def write_images(folder):
    """Write an ImageFolder tree of random images of 32x32: 160 to train on, 32 to test."""
    for split, count in (("train", 160), ("test", 32)):
        for label in ("cat", "dog"):
            path = folder / split / label
            path.mkdir(parents=True)
            for k in range(count // 2):
                image = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
                torchvision.io.write_jpeg(image, str(path / f"{k}.jpg"))


def show_list(passed):
    for title, parts in (("Proofs, four at a time", PROOFS), ("Speeds, one at a time", SPEEDS)):
        print(f"{title}:")
        for part in parts:
            state = "passed" if part.name in passed else ""
            print(f"   {part.name:10} {part.seconds:4} s  {part.what:56} {state}".rstrip())


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help="parts to run, also if they have passed")
    add("--list", action="store_true", help="list the parts; run nothing")
    add("--rehearse", action="store_true", help="in tiny sizes, on any device; keep no records")
    add(
        "--minutes",
        type=number(above=0),
        default=math.inf,
        metavar="X",
        help="begin no part that would not end within this time (default: no limit)",
    )
    add("--data", default="", metavar="FILE", help="a tar file with cifar10/train/CLASS/*.jpg")
    add("--out", metavar="DIR", help="folder of the records (default: results)")
    add("--tar", metavar="FILE", help="also pack the records and logs into FILE")
    return parser.parse_args()


def main(args):
    if not (args.rehearse or args.list or torch.cuda.is_available()):
        raise UserError(
            "found no NVIDIA GPU that torch can use: expected one or more, and a torch built for "
            "CUDA; see nvidia-smi, or name another Python: PYTHON=/path/to/python make gpu; "
            "without a GPU: python tools/gpu.py --rehearse"
        )
    names = [part.name for part in PROOFS + SPEEDS]
    if unknown := [name for name in args.parts if name not in names]:
        raise UserError(f"no part {unknown[0]!r}: expected one or more of {', '.join(names)}")
    if args.data and not Path(args.data).is_file():
        raise UserError(f"--data {args.data}: no such file; expected a tar file of images")
    with tempfile.TemporaryDirectory() as folder:
        sizes = SIZES
        if args.rehearse:
            images = Path(folder, "images")
            write_images(images)
            sizes = {name: size.replace("$REHEARSAL", str(images)) for name, size in TINY.items()}
        out = Path(args.out or (folder if args.rehearse else RESULTS)).resolve()
        run(args, out, sizes)


def run(args, out, sizes):
    """Run the parts in these sizes, and record them in the folder `out`."""
    machine = Machine.here()
    devices = 1 if machine.device == "cpu" else min(8, machine.devices)
    counts = "1" if devices == 1 else f"1 {devices}"
    variables = sizes | {"GPUS": str(devices), "COUNTS": counts}
    variables |= {"DATA": os.path.abspath(args.data), "NAME": machine.name}
    variables |= {"OUT": os.path.relpath(out, ROOT)}  # for the commands in the records
    runner = Runner(
        name=machine.name,
        out=out,
        fields={"sizes": sizes} | environment(pick_device()),
        variables=variables,
        minutes=args.minutes,
        limit=lambda part: 900 if args.rehearse else 30 + 2 * part.seconds,
        tar=args.tar,
    )
    if args.list:
        show_list(runner.passed())
        return
    chosen = args.parts or {part.name for part in PROOFS + SPEEDS} - runner.passed()
    for name in ("train", "input", "imagenet", "memory"):
        (out / name).mkdir(parents=True, exist_ok=True)
    for stop_signal in STOP_SIGNALS:
        # exit through Runner.run(), which leaves no process behind
        signal.signal(stop_signal, lambda *_: sys.exit(143))
    try:
        for parts, at_once in ((PROOFS, SIDE_BY_SIDE), (SPEEDS, 1)):
            due = [part for part in parts if part.name in chosen]
            runner.run([part for part in due if args.data or part.name != "data"], at_once)
    finally:
        runner.show(PROOFS + SPEEDS)
    if runner.failed:
        again = f"python tools/gpu.py{' --rehearse' * args.rehearse}"
        again += f" --out {args.out}" if args.out else ""
        failed = " ".join(runner.failed)
        raise UserError(f"failed: {failed}; run again: {again} {failed}")


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
