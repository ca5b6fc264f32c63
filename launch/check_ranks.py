"""Watch the ranks of any training script, unchanged, and say what is wrong between them.

    torchrun --nproc-per-node=2 launch/check_ranks.py train.py --epochs 3
    srun --ntasks=2 python launch/check_ranks.py train.py
    python launch/check_ranks.py 04_mnmc_ddp_mp.py     a script that starts its own processes

It runs the script for 20 training steps, compares what the ranks did, and prints a line that begins
with "found:" for each mistake that it sees, or one that begins with "ok:". Lines that begin with
"note:" say what is right only in some cases, and what was not seen. The exit code is 1 if something
was found. Data is compared by hashes. --before keeps first weights in a temporary folder.
"""

import argparse
import json
import os
import runpy
import shlex
import sys
from pathlib import Path

# torch reads it when it is imported: calls to remember
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")

# Behind the reader's own modules. mp.spawn gives this path to the processes that it starts.
sys.path.append(str(Path(__file__).resolve().parent))

from rank_watch import on_cpu, script
from rank_watch.before import VARIABLE
from rank_watch.recorder import Recorder, watch


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="training steps, after which the run ends; 0: let it end (default: 20)",
    )
    parser.add_argument(
        "--epoch-steps",
        type=int,
        default=0,
        metavar="N",
        help="end each pass over a DataLoader after N batches, to see several epochs, an "
        "evaluation and a checkpoint soon; 0: do not (default: 0)",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="run a script that asks for GPUs on the CPU: devices, nccl, mixed precision",
    )
    parser.add_argument(
        "--before",
        metavar="COMMAND",
        help="then run the script before it was converted, with its flags, in one process, and "
        "compare each training step; same: the script itself",
    )
    parser.add_argument(
        "--no-random",
        action="store_true",
        help="no dropout, and the same random crops of a sample in both runs, so that --before "
        "compares exactly",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m")
    parser.add_argument("script", help="the training script, and its own flags after it")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = parse_args()
    if not args.module:
        script.exit_unless_python(
            args.script, "torchrun --nproc-per-node=2 launch/check_ranks.py train.py"
        )
    if args.before is not None:
        note_before(args)
    # A run that ends after some steps leaves semaphores, of which Python would warn.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    if args.cpu:
        on_cpu.install()
    Recorder(args.steps, args.epoch_steps).install()
    sys.argv = [args.script, *args.flags]
    if args.module:
        sys.path[0] = os.getcwd()
        watch(lambda: runpy.run_module(args.script, run_name="__main__", alter_sys=True))
    else:
        watch(lambda: script.run(args.script))


def note_before(args):
    """Let the recorders of this run, and of processes that it starts, record for --before."""
    command = [*["-m"] * args.module, args.script, *args.flags]
    if args.before != "same":
        command = shlex.split(args.before)
        command = command[command[:1] == ["python"] :]
    if command[:1] != ["-m"]:
        old = command[0] if command else args.before
        script.exit_unless_python(old, '--before "train_old.py --batch-size 32"')
    if args.before == "same" and not any(name in os.environ for name in script.RANKS):
        script.say(
            "check_ranks.py: --before same: the script starts its processes itself: expected the "
            'flags with which it starts one, as in --before "train.py --nproc 1"'
        )
        sys.exit(2)
    options = {"command": command, "same": args.before == "same", "no_random": args.no_random}
    options["flags"] = ["--epoch-steps", str(args.epoch_steps), *["--cpu"] * args.cpu]
    os.environ[VARIABLE] = json.dumps(options)


if __name__ == "__main__":
    main()
