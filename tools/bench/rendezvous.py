"""Seconds until all ranks have joined: ours beside torch's own store, where names resolve quickly
and where not.

    python tools/bench/rendezvous.py
    python tools/bench/rendezvous.py --ranks 64 --repeats 1

The ranks are forked on this machine after torch was imported. torch looks up the host name of every
address that it connects to. In the one situation /etc/hosts answers at once, in the other the name
server never answers and a look-up takes 5 s. Each has its own view of /etc/hosts and
/etc/resolv.conf, which needs root and `unshare --mount`.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from common.distributed import (
    Address,
    cores_per_process,
    free_port,
    rendezvous,
    setup_distributed,
)
from common.records import device_name
from tools.records import append

WHO = ("ours", "torch")
# where a socket listens that never answers
NAME_SERVER = f"127.9.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}"
FILES = {  # what is added to /etc/hosts, and what replaces /etc/resolv.conf
    "quick": ("::ffff:127.0.0.1 localhost\n", ""),
    "slow": ("", f"nameserver {NAME_SERVER}\noptions timeout:5 attempts:1\n"),
}
TIMEOUT = datetime.timedelta(minutes=5)


def main(args):
    if args.inside:
        return measure(args)
    env = {
        "device_name": device_name(torch.device("cpu")),
        "cores": cores_per_process(1),
        "torch": torch.__version__,
    }
    env |= {"python": platform.python_version()}
    print(f"{'names':6} {'what':10} {'ranks':>5} {'ours':>9} {'torch':>9} {'ours/torch':>10}")
    for names in args.names:
        if reason := missing():
            print(f"{names:6} skipped: {reason}")
            continue
        for record in inside(names, args):
            ours, other = (
                statistics.median(times) if all(times := record[f"{who}_seconds"]) else None
                for who in WHO
            )
            texts = [f"{seconds:.2f} s" if seconds else "failed" for seconds in (ours, other)]
            ratio = f"{ours / other:.2f}" if ours and other else ""
            print(
                (
                    f"{names:6} {record['what']:10} {record['ranks']:5} {texts[0]:>9} "
                    f"{texts[1]:>9} {ratio:>10}"
                ),
                flush=True,
            )
            started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            append(
                args.log_file,
                env | {"started": started, "bench": "rendezvous", "names": names} | record,
            )


def missing():
    """Return why this machine cannot give a process its own /etc/hosts, or None."""
    if os.geteuid() != 0:
        return "needs root, for a private /etc/hosts"
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
    ):
        return "this machine permits no private mounts (unshare --mount)"
    return None


def inside(names, args):
    """Measure where names resolve like this; yield the records."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent,
    ):
        silent.bind((NAME_SERVER, 53))  # a name server that nobody reads from, so it never answers
        hosts, resolver = Path(folder, "hosts"), Path(folder, "resolv.conf")
        hosts.write_text(Path("/etc/hosts").read_text() + FILES[names][0])
        resolver.write_text(FILES[names][1] or Path("/etc/resolv.conf").read_text())
        mounts = f"mount --bind {hosts} /etc/hosts && mount --bind {resolver} /etc/resolv.conf &&"
        flags = [f"--start={args.start}", f"--repeats={args.repeats}", "--inside", "--ranks"]
        flags += [*map(str, args.ranks)]
        command = ["unshare", "--mount", "sh"]
        command += ["-c", f'{mounts} exec "$@"', "sh", sys.executable, __file__, *flags]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            yield from map(json.loads, process.stdout)


def measure(args):
    """Print a record for each number of ranks, then one for the whole start."""
    for what, ranks in [("rendezvous", ranks) for ranks in args.ranks] + [("start", args.start)]:
        record = {"what": what, "ranks": ranks} | {f"{who}_seconds": [] for who in WHO}
        for _ in range(args.repeats if ranks else 0):
            for who in WHO:
                record[f"{who}_seconds"].append(seconds_to_join(ranks, globals()[f"{what}_{who}"]))
        if ranks:
            print(json.dumps(record), flush=True)


def seconds_to_join(ranks, join):
    """Fork the ranks. Return the seconds until all have joined, or None if one failed.

    Args:
        ranks: int.
        join: function of (rank, ranks, port), called in each process.
    """
    port = free_port()
    reports, report = os.pipe()
    hold, release = os.pipe()
    begin = time.perf_counter()
    pids = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            os.dup2(2, 1)  # gloo of torch 2.9 prints where the records go
            with contextlib.suppress(BaseException):
                kept = join(rank, ranks, port)
                os.write(report, b"+")
                os.close(release)
                os.read(hold, 1)  # until the parent closes its end: rank 0 keeps the store
                del kept
            os._exit(0)
        pids.append(pid)
    os.close(report)
    joined = 0
    while joined < ranks and select.select([reports], [], [], TIMEOUT.total_seconds())[0]:
        if not (data := os.read(reports, ranks)):  # all have ended
            break
        joined += len(data)
    seconds = time.perf_counter() - begin
    for end in (release, hold, reports):
        os.close(end)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return seconds if joined == ranks else None


def rendezvous_ours(rank, ranks, port):
    return rendezvous(Address("127.0.0.1", port, ""), rank, ranks, TIMEOUT)


def rendezvous_torch(rank, ranks, port):
    return dist.TCPStore("127.0.0.1", port, ranks, rank == 0, TIMEOUT, wait_for_workers=True)


def set_variables(rank, ranks, port):
    values = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update(
        {name: str(value) for name, value in values.items()} | {"OMP_NUM_THREADS": "1"}
    )


def start_ours(rank, ranks, port):
    set_variables(rank, ranks, port)
    setup_distributed("gloo", timeout=TIMEOUT)
    dist.barrier()


def start_torch(rank, ranks, port):
    set_variables(rank, ranks, port)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    dist.barrier()


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--ranks",
        type=int,
        nargs="+",
        default=[16, 64, 128, 512],
        metavar="N",
        help="ranks of one rendezvous",
    )
    add(
        "--start",
        type=int,
        default=48,
        metavar="N",
        help="ranks of the whole start, to one barrier; 0: none",
    )
    add("--names", choices=FILES, nargs="+", default=list(FILES), help="how names resolve")
    add(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="runs of each, of which the median is shown",
    )
    add("--log-file", metavar="FILE", help="append one JSON line per row to FILE")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
