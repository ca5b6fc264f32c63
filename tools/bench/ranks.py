"""Measure what grows with the number of ranks: the cost of a vote, and starting, stopping and
resuming 06.

    python tools/bench/ranks.py
    python tools/bench/ranks.py --votes 4 --ranks 8

The ranks are forked on this machine after torch was imported. They share its cores, so only ratios
and growth carry over to a cluster.

    votes    training steps of --step-ms in which the CPU only waits, as beside a GPU: without
             votes, with a vote in every step, and with the Votes of 06, which votes less often if
             a vote costs more than 1 % of a step
    06       06_imagenet.py --dummy with small_net: seconds until rank 0 has done a training step,
             memory per rank, seconds from a signal until all ranks have saved and exited, seconds
             until the resumed run has done a step
"""

import contextlib
import datetime
import json
import os
import re
import runpy
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist

import imagenet.loader
import imagenet.model
import imagenet.progress  # noqa: F401  (imported before the ranks are forked, so that they start quickly)
from common.distributed import free_port
from common.errors import UserError, one_line_errors
from common.flags import Parser, output_file, whole_number
from common.records import environment
from imagenet.signals import EXIT_REQUEUE
from imagenet.votes import Votes
from tools.records import append

STEPS = 60  # training steps with votes
PATIENCE = 300  # seconds to wait for any event
FLAGS = (
    "--arch small_net --image-size 32 --epochs 1000 --eval-every 0 --print-every 1 "
    "--workers 0 --timeout 120"
)


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--votes",
        nargs="*",
        type=whole_number(2),
        default=[2, 4, 8, 16],
        metavar="N",
        help="ranks that vote",
    )
    add(
        "--ranks",
        nargs="*",
        type=whole_number(2),
        default=[2, 8, 32, 64],
        metavar="N",
        help="ranks of 06",
    )
    add(
        "--step-ms",
        type=whole_number(1),
        default=100,
        metavar="MS",
        help="milliseconds per step that votes",
    )
    add("--log-file", type=output_file, metavar="FILE", help="append one JSON line per row to FILE")
    return parser.parse_args()


def main(args):
    env = environment(torch.device("cpu"))
    print(f"{env['device_name']}, {env['cores']} cores | torch {env['torch']}")
    if args.votes:
        print(f"\nvotes, steps of {args.step_ms} ms; cost as a share of a step")
        print("ranks   one vote   if in every step   Votes in every k-th   cost")
    for n in args.votes:
        row = measure_votes(n, args.step_ms / 1000)
        print(
            f"{n:5}   {1000 * row['vote_seconds']:5.1f} ms   "
            f"{100 * row['cost_every_step']:14.2f} %   "
            f"{row['every']:19}   {100 * row['cost']:.2f} %",
            flush=True,
        )
        append(args.log_file, env | {"bench": "ranks", "what": "votes"} | row)
    if args.ranks:
        print("\n06: ranks   first step   memory per rank   saved and exited   resumed")
    for n in args.ranks:
        row = measure_script(n)
        print(
            f"{n:9}   {row['start_seconds']:8.1f} s   {row['memory_mib']:11.0f} MiB   "
            f"{row['stop_seconds']:14.1f} s   "
            f"{row['resume_seconds']:5.1f} s",
            flush=True,
        )
        append(args.log_file, env | {"bench": "ranks", "what": "06"} | row)


def fork(ranks, run):
    """Fork processes that call run(rank). Return their ids."""
    pids = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                run(rank)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException as error:  # the parent reports it
                print(f"rank {rank}: {error!r}", file=sys.stderr)
            sys.stdout.flush()
            os._exit(code)
        pids.append(pid)
    return pids


def exit_codes(pids, expected):
    """Wait until all processes have exited.

    Raise UserError if one exits with another code, and kill the others.
    """
    deadline = time.monotonic() + PATIENCE
    left = set(pids)
    try:
        while left:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    left.discard(pid)
                    if (code := os.waitstatus_to_exitcode(status)) != expected:
                        raise UserError(f"a rank exited with code {code}: expected {expected}")
            if time.monotonic() > deadline:
                raise UserError(
                    f"{len(left)} of {len(pids)} ranks have not exited within {PATIENCE} s"
                )
            time.sleep(0.01)
    finally:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def measure_votes(ranks, step):
    """Return a row: seconds of a vote, how often the ranks vote, and what votes add to a step, as a
    share of it.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        exit_codes(
            fork(ranks, lambda rank: vote(rank, ranks, port, step, Path(folder, "row"))), expected=0
        )
        return json.loads(Path(folder, "row").read_text())


def vote(rank, ranks, port, step, file):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=timeout
    )
    ballot = torch.zeros(3)
    votes = Votes(dist.group.WORLD)

    def none():
        time.sleep(step)

    def every_step():
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, async_op=True)
        time.sleep(step)
        work.wait()

    def ours():
        votes.cast(False)
        time.sleep(step)
        votes.count()

    mean = {}  # seconds of a step
    for kind in (none, every_step, ours):
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            kind()
            seconds.append(time.perf_counter() - start)
        # without the steps that were disturbed
        mean[kind] = statistics.mean(sorted(seconds)[: STEPS * 9 // 10])
        dist.barrier()
    if rank == 0:
        row = {
            "ranks": ranks,
            "step_seconds": step,
            "vote_seconds": votes.seconds,
            "every": votes.every,
        }
        row |= {
            "cost_every_step": mean[every_step] / mean[none] - 1,
            "cost": mean[ours] / mean[none] - 1,
        }
        file.write_text(json.dumps(row))


def measure_script(ranks):
    """Start, stop and resume 06. Return a row of seconds and memory."""
    with tempfile.TemporaryDirectory() as folder:
        row = {"ranks": ranks}
        for name, end, extra in (("start", "stop", []), ("resume", "stop_again", ["--resume"])):
            begin = time.perf_counter()
            outputs = Path(folder, name)
            port = free_port()
            outputs.mkdir()
            flags = [*FLAGS.split(), "--dummy", 40 * ranks, "--batch-size", 2 * ranks]
            flags += ["--checkpoints-path"]
            flags = [*map(str, flags), str(Path(folder, "checkpoints")), *extra]
            pids = fork(ranks, lambda rank: run_script(rank, ranks, port, flags, outputs))  # noqa: B023
            wait_for_line(outputs / "0", r"== step: ", pids)
            row[f"{name}_seconds"] = time.perf_counter() - begin
            row["memory_mib"] = statistics.mean(map(memory, pids)) / 2**20
            begin = time.perf_counter()
            for pid in pids:  # as torchrun and Slurm do
                os.kill(pid, signal.SIGTERM)
            exit_codes(pids, EXIT_REQUEUE)
            row[f"{end}_seconds"] = time.perf_counter() - begin
            if not re.search(
                r"stopped by a signal after step \d+: saved", (outputs / "0").read_text()
            ):
                raise UserError(
                    f"{ranks} ranks have not saved: {(outputs / '0').read_text()[-300:]}"
                )
        if "resumed from" not in (outputs / "0").read_text():
            raise UserError(f"{ranks} ranks have not resumed")
    return row


def run_script(rank, ranks, port, flags, outputs):
    file = os.open(outputs / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    values = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "OMP_NUM_THREADS": 1,
    }
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    torch.set_num_threads(1)
    sys.argv = ["06_imagenet.py", *flags]
    runpy.run_path(str(ROOT / "06_imagenet.py"), run_name="__main__")


def wait_for_line(file, pattern, pids):
    """Wait until a file contains a line. Raise UserError if a process exits before."""
    deadline = time.monotonic() + PATIENCE
    while not (file.exists() and re.search(pattern, file.read_text())):
        ended = [
            pid for pid in pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ]
        if ended or time.monotonic() > deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            reason = "a rank exited early" if ended else f"no training step within {PATIENCE} s"
            raise UserError(f"{reason}: {file.read_text()[-500:] if file.exists() else ''}")
        time.sleep(0.02)


def memory(pid):
    """Return the memory of a process in bytes; memory that processes share is counted in equal
    parts (PSS).
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+) kB", text, re.M)[1]) * 1024


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
