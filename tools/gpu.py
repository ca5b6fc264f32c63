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

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torchvision

from common.errors import UserError, one_line_errors
from common.flags import Parser, number
from common.records import environment
from tools.machine import machine_name, pick_device
from tools.records import RESULTS, RecordError, read


class Part(NamedTuple):
    """A row of the list. Its script, for bash, finds an empty folder in $DIR."""

    name: str
    seconds: int  # that it takes, about
    what: str
    script: str
    needs: str = ""  # the variable of a folder


SIDE_BY_SIDE = 4  # proofs
PRELUDE = """
set -eo pipefail
python() { "$PYTHON" "$@"; }
torchrun() { "$PYTHON" -m torch.distributed.run --standalone "$@"; }
"""  # --standalone: before torch 2.12, each torchrun takes the same port without it
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
GPT = f"""
    {DDP} 08_gpt.py $GPT $TEXT --amp bf16 --checkpoints-path $DIR/gpt --save $DIR/gpt.pt
    {DDP} 08_gpt.py --weights $DIR/gpt.pt --epochs 0 --sample 100
"""
UNPACK = """
    [ -d $IMAGES ] || python -W ignore -m tarfile -e "$DATA" data/unpacked
    [ -d $IMAGES ] || mv data/unpacked/cifar10 $IMAGES
    rm -rf data/unpacked
"""
TRAIN = (
    "python tools/bench.py images $RESNET50 --amp bf16 --channels-last "
    '--log-file "$OUT/train/$NAME.jsonl" --runs'
)
TOKENS = 'python tools/bench.py text $GPT --amp bf16 --repeats 2 --log-file "$OUT/gpt/$NAME.jsonl"'
CIFAR10 = f"""
    {DDP} 06_imagenet.py $IMAGES $CIFAR10 --batch-size 256 --lr 0.1 --warmup-epochs 2 \\
        --weight-decay 5e-4 --label-smoothing 0.1 --amp bf16 --channels-last --eval-every 10 \\
        --checkpoints-path $DIR --log-file "$OUT/imagenet/$NAME.jsonl"
"""
SPEED = """
    all="--batch-size $((BATCH * GPUS))"
    for seed in 0 1; do
        flags="$SPEED --seed $seed --log-file $OUT/speed/$NAME.jsonl --epochs"
        python 01_snsc.py --batch-size $BATCH $flags $EPOCHS
        gpus=$(seq -s, 0 $((GPUS - 1)))
        CUDA_VISIBLE_DEVICES=$gpus python 02_snmc_dp.py $all $flags $EPOCHS
        for n in $COUNTS; do
            ddp="torchrun --nproc-per-node=$n 03_mnmc_ddp_launch.py $flags $((EPOCHS * n))"
            $ddp --batch-size $((BATCH * n))
            [ $n = 1 ] || $ddp --batch-size $BATCH
        done
        python 04_mnmc_ddp_mp.py --nproc-per-node $GPUS $all $flags $((EPOCHS * GPUS))
    done
"""

PROOFS = [
    Part("data", 10, "the images of --data are unpacked", UNPACK),
    Part("rungs", 120, "01 to 05 train", RUNGS),
    Part("shards", 105, "07 trains, saves, continues, and computes in bf16", SHARDS),
    Part("gpt", 60, "08 trains in bf16, with its MFU, and samples from what it saved", GPT),
    Part("tests", 95, "the other tests of GPU code", GPU_CODE),
    Part("resume", 60, "06, killed and resumed, has the bits of a whole run", f"{TESTS} -k bits"),
    Part("fp16", 55, "06 in fp16: no loss is nan, from the first step", f"{TESTS} -k first_step"),
    Part("waits", 55, "no line of 06 waits for the GPU in each step", f"{TESTS} -k waits"),
    Part("shared", 50, "two ranks on one GPU learn as on CPUs (gloo)", f"{TESTS} -k two_ranks"),
    Part("preflight", 15, "preflight finds no fault", f"{DDP} launch/preflight.py"),
]
SPEEDS = [
    Part("resnet50", 90, "06 beside the bare step", f"{TRAIN} bare dummy"),
    Part("tokens", 120, "08 beside a plain loop and a compiled one", TOKENS),
    Part("cifar10", 110, "06 on CIFAR-10: accuracy and seconds", CIFAR10, "IMAGES"),
    Part("compile", 115, "06 with --compile", f"{TRAIN} dummy --repeats 1 --compile"),
    Part("speed", 360, "images per second of 01 to 04", SPEED),
]

SIZES = {
    "IMAGES": "data/cifar10",
    "QUICK": "--limit 16000 --epochs 2",
    "VIT": "--arch vit_b_16",
    "GPT": "--layers 12 --heads 12 --width 768 --context 1024 --batch-tokens 65536",
    "TEXT": "--epochs 20",
    "RESNET50": "--arch resnet50 --batch-size 256 --steps 50 --repeats 2",
    "CIFAR10": "--arch resnet18 --image-size 128 --epochs 30",
    "SPEED": "--limit 50000",
    "BATCH": "256",  # images per process and training step
    "EPOCHS": "8",  # of one process: enough for ten seconds
}
TINY = {
    "IMAGES": "$REHEARSAL",
    "QUICK": "--dataset folder --data-dir $REHEARSAL --epochs 2 --batch-size 16 --arch small_net",
    "VIT": "--arch mnist_net",
    "GPT": "",
    "TEXT": "--text LICENSE --epochs 1",
    "RESNET50": "--arch small_net --batch-size 8 --steps 20 --repeats 1 --image-size 32",
    "CIFAR10": "--arch small_net --image-size 32 --epochs 1 --workers 1",
    "SPEED": "--dataset folder --data-dir $REHEARSAL --arch small_net",
    "BATCH": "16",
    "EPOCHS": "1",
}


class Running:
    """A part that runs, with its output in a file."""

    def __init__(self, part, variables, log):
        self.part = part
        self.log = log
        self.began = time.monotonic()
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        env = os.environ | variables | {"DIR": self.folder.name, "PYTHON": sys.executable}
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                ["bash", "-c", PRELUDE + part.script],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self):
        return time.monotonic() - self.began

    def output(self):
        """Return its last lines, without this machine's paths."""
        text = self.log.read_text(errors="replace").replace(f"{ROOT}/", "")
        return text.rstrip().splitlines()[-12:]

    def end(self, patience=30):
        """Kill every process that it has left, for `patience` seconds at most.

        torchrun's workers have sessions of their own, and when torchrun is killed they belong to
        nobody: to kill a process group, or a tree of processes, would miss them. But all of them
        have this part's folder as $DIR.
        """
        mark = f"DIR={self.folder.name}".encode()
        deadline = time.monotonic() + patience
        found = True
        while found and time.monotonic() < deadline:
            found = False
            for file in Path("/proc").glob("[0-9]*/environ"):
                with contextlib.suppress(OSError):  # it has just ended, or is another user's
                    if mark in file.read_bytes().split(b"\0"):
                        os.kill(int(file.parent.name), signal.SIGKILL)
                        found = True
            time.sleep(0.05)
        self.process.wait()
        self.folder.cleanup()


class Runner:
    """Runs parts, and keeps what they said.

    Args:
        name: str, this machine, for the names of files.
        out: Path of the folder of records.
        fields: dict, of a record of a part: the hardware and the sizes.
        variables: {name: str} for the scripts.
        minutes: float. No part begins that would not end within this time.
        limit: function from a part to the seconds after which it is ended.
        tar: path of a file into which the records and logs are packed after each part, or None.
    """

    def __init__(self, name, out, fields, variables, minutes, limit, tar):
        self.name = name
        self.out = out
        self.fields = fields
        self.variables = variables
        self.deadline = time.monotonic() + 60 * minutes
        self.limit = limit
        self.tar = tar
        self.path = out / f"gpu/{name}.jsonl"
        self.rows = {}  # {name of a part: (seconds, verdict or figure)}
        self.failed = {}  # {name of a part: the last lines of its output}

    def passed(self):
        """Return the names of the parts that have passed, in this run or before, in these sizes."""
        try:
            records = read(self.path) if self.path.exists() else []
        except RecordError as error:
            raise UserError(str(error)) from None
        sizes = self.fields["sizes"].items()

        def is_same(record):
            used = [(name, size) for name, size in sizes if f"${name}" in record["script"]]
            return all(record["sizes"].get(name) == size for name, size in used)

        return {record["part"] for record in records if record["passed"] and is_same(record)}

    def run(self, parts, at_once):
        """Run parts in order, so many at a time. If this process is stopped, they are too."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        waiting = list(parts)
        running = []
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    part = waiting.pop(0)
                    if reason := self.reason_to_skip(part):
                        self.rows[part.name] = (0, reason)
                        self.print_row(part.name)
                    else:
                        log = self.path.with_name(f"{self.name}-{part.name}.log")
                        running.append(Running(part, self.variables, log))
                time.sleep(0.1)
                for one in list(running):
                    is_late = one.seconds > self.limit(one.part)
                    is_late |= time.monotonic() > self.deadline
                    code = 124 if is_late else one.process.poll()
                    if code is not None:
                        running.remove(one)
                        one.end()
                        self.record(one, code)
        finally:
            for one in running:
                one.end()
                self.rows[one.part.name] = (one.seconds, "stopped")

    def reason_to_skip(self, part):
        folder = self.variables.get(part.needs, ".")
        if not (ROOT / folder).is_dir():
            return f"not run: no {folder}; see --data"
        if part.seconds > self.deadline - time.monotonic():
            return "not run: no time"
        return ""

    def record(self, one, code):
        """Record how a part ended, print a line, and pack the records."""
        part = one.part
        output = one.output()
        last = output[-1].strip("= ") if output else "no output"
        passed = code == 0
        verdict = f"passed: {last}"
        if code == 124:
            verdict = f"FAILED: not done after {one.seconds:.0f} s; {last}"
        elif code != 0:
            verdict = f"FAILED: {last}"
        elif " skipped" in last and " passed" not in last:  # pytest, without a GPU
            verdict = f"no answer: {last}"
            passed = False
        if verdict.startswith("FAILED"):
            self.failed[part.name] = output
        self.rows[part.name] = (one.seconds, verdict)
        self.print_row(part.name)
        script = textwrap.dedent(part.script).strip()
        record = {"part": part.name, "passed": passed, "verdict": verdict, "script": script}
        record |= {"seconds": round(one.seconds, 1), "output": output}
        with self.path.open("a") as file:
            file.write(json.dumps(record | self.fields) + "\n")
        if self.tar:
            self.pack()

    def pack(self):
        """Pack the records and logs of this machine, all of them or none."""
        new = f"{self.tar}.new"
        with tarfile.open(new, "w:gz") as tar:
            for file in sorted(self.out.glob(f"*/{self.name}*")):
                tar.add(file, file.relative_to(self.out))
        os.replace(new, self.tar)

    def show(self, parts):
        """Print the last lines of each part that failed, then a table of all parts in this run."""
        for name, output in self.failed.items():
            print(f"\n{name}:", *output, sep="\n")
        print(f"\n{self.name}, torch {self.fields['torch']}")
        for part in parts:
            if part.name in self.rows:
                self.print_row(part.name)

    def print_row(self, name):
        seconds, verdict = self.rows[name]
        print(f"{name:10} {seconds:4.0f} s  {verdict}", flush=True)


def write_images(folder, **counts):
    """Write an ImageFolder tree of two classes: so many random images of 32x32 per split."""
    for split, count in counts.items():
        for label in ("cat", "dog"):
            path = Path(folder, split, label)
            path.mkdir(parents=True)
            for k in range(count // 2):
                image = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
                torchvision.io.write_jpeg(image, str(path / f"{k}.jpg"))


def exit_on_signals():
    """Exit by an exception on SIGTERM and SIGHUP, unless nohup has told us to ignore it."""
    for stop in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(stop) is not signal.SIG_IGN:
            signal.signal(stop, lambda *_: sys.exit(143))


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
    text = "begin no part that would not end within this time (default: no limit)"
    add("--minutes", type=number(above=0), default=math.inf, metavar="X", help=text)
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
            write_images(images, train=160, test=32)
            sizes = {name: size.replace("$REHEARSAL", str(images)) for name, size in TINY.items()}
        out = Path(args.out or (folder if args.rehearse else RESULTS)).resolve()
        run(args, out, sizes)


def run(args, out, sizes):
    """Run the parts in these sizes, and record them in the folder `out`."""
    name = machine_name()
    # A number that divides the batch, as in tools/demo.py
    found = torch.accelerator.device_count()
    devices = max(n for n in (1, 2, 4, 8) if n <= max(1, found))
    counts = "1" if devices == 1 else f"1 {devices}"
    variables = sizes | {"GPUS": str(devices), "COUNTS": counts}
    variables |= {"DATA": os.path.abspath(args.data), "NAME": name}
    variables |= {"OUT": os.path.relpath(out, ROOT)}  # for the commands in the records
    runner = Runner(
        name=name,
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
    for folder in ("train", "gpt", "imagenet", "speed"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    exit_on_signals()  # through Runner.run(), which leaves no process behind
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
