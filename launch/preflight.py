"""Check machines, network and launch before the real job. Start it as you will start that job:

    torchrun --nproc-per-node=2 launch/preflight.py
    srun --nodes=2 --ntasks-per-node=2 python launch/preflight.py
    mpirun -n 2 python launch/preflight.py
    python launch/preflight.py --json                # one JSON object, for programs

Rank 0 prints one line per rank, one verdict per check with the line to change, and the time of an
all_reduce. The exit code is 0 if no check failed, 1 if one did, 2 if the launch itself was refused.
A rank that does not answer is named after 10 s, or after 60 s with GPUs, whose first use takes
long. Of the environment, only a few variables are printed. The checks are in launch/checks/.
"""

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.flags import Parser
from common.setup_distributed import find_address, find_launcher
from ddp.errors import lost_peer, one_line_errors
from launch.checks import show, verdicts
from launch.checks.all_reduce import measure, watch
from launch.checks.facts import facts
from launch.checks.messages import Pulse, collect, wait_for
from launch.checks.network import Attempt, Listener, connect_to_all
from launch.checks.starting import check_start, open_store, processes_here
from launch.checks.verdicts import Check
from launch.rank_watch.colors import colored

ARRIVAL = datetime.timedelta(seconds=20)  # to connect to rank 0


def parse_args():
    parser = Parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    # from torch.distributed.launch
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = parse_args()
    if args.json:  # standard output is for the report alone: gloo of torch 2.9 writes there too
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    launcher, rank, world_size, local_rank = find_launcher()
    for warning in check_start(launcher):
        print(f"preflight.py: {warning}", file=sys.stderr)
    host, port = find_address(launcher, world_size)
    store, connect = open_stores(host, port, rank, world_size)
    pulse = Pulse(connect(), rank)

    me = facts(launcher, rank, world_size, local_rank, processes_here(launcher, local_rank))
    listeners = open_listeners(me)
    me["listeners"] = {name: [at, it.port, it.name] for name, (at, it) in listeners.items()}
    is_second = store.add(f"claims to rank {rank}", 1) > 1
    store.set(f"second {rank}" if is_second else f"facts {rank}", json.dumps(me))

    def work():
        return measure(pulse, connect(), rank, world_size, torch.device(me["device"]))

    if rank == 0 and not is_second:
        code = lead(store, me, world_size, work, args)
    else:
        follow(store, me, is_second, work, pulse)
        code = 0  # only rank 0 fails, or the launcher could end it before it has reported
    os._exit(code)  # do not wait for threads, nor for a collective that may never end


def open_stores(host, port, rank, world_size):
    """Return the store, and a function that opens another connection to it.

    Each thread needs a connection of its own.
    """
    if world_size == 1:
        store = dist.HashStore()
        return store, lambda: store
    server = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # a store that outlives restarts
        server = open_store(host, port, rank, world_size, ARRIVAL)
    prefix = f"preflight {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"

    def connect():
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        return dist.PrefixStore(prefix, client)

    return (dist.PrefixStore(prefix, server) if server else connect()), connect


def open_listeners(me):
    """Listen where each backend will. Return {backend: (address, Listener)}, on each first rank."""
    if me["local_rank"] > 0:
        return {}
    addresses = {backend: address for backend, (_, address) in me["addresses"].items() if address}
    return {
        backend: (address, Listener(me["host"], address)) for backend, address in addresses.items()
    }


def lead(store, me, world_size, work, args):
    """Collect the facts as rank 0, check them, measure if nothing failed, and report.

    Returns:
        the exit code.
    """
    answers = collect(store, "facts", range(world_size))
    twice = [rank for rank in answers if store.add(f"claims to rank {rank}", 0) > 1]
    all_facts = [*answers.values(), *collect(store, "second", twice).values()]
    listeners = {fact["host"]: fact["listeners"] for fact in answers.values() if fact["listeners"]}
    store.set("listeners", json.dumps(listeners))
    try_network(store, me, listeners)
    tried = collect(store, "tried", list(answers))
    clocks = {rank: tried[rank]["clock"] - tried[0]["clock"] for rank in tried}
    attempts = [Attempt(*attempt) for rank in tried for attempt in tried[rank]["attempts"]]

    done = [
        verdicts.check_ranks(all_facts, world_size),
        verdicts.check_same_launch(all_facts),
        verdicts.check_devices(all_facts),
        verdicts.check_addresses(all_facts, attempts),
        verdicts.check_network(all_facts, attempts),
    ]
    can_measure = all(check.verdict != "FAIL" for check in done) and len(tried) == world_size
    done += [
        verdicts.check_port(all_facts),
        verdicts.check_versions(all_facts),
        verdicts.check_code(all_facts),
        verdicts.check_clocks(all_facts, clocks),
        verdicts.check_shared_memory(all_facts),
        verdicts.check_threads(all_facts),
    ]
    store.set("plan", json.dumps("measure" if can_measure else "stop"))
    times = None
    if can_measure:
        outcome = watch(store, world_size, work)
        times = outcome.times if world_size > 1 else None
        done.append(verdicts.check_all_reduce(outcome, all_facts))
    else:
        done.append(Check("all_reduce", "warn", "not measured, because a check above failed"))
    report = show.as_json if args.json else show.as_text
    print(colored(report(all_facts, clocks, done, times)), flush=True)
    store.set("end", json.dumps(True))
    # The store ends with this process: the others read "end" first.
    collect(store, "end", [rank for rank in answers if rank > 0], silence=2)
    return int(any(check.verdict == "FAIL" for check in done))


def follow(store, me, is_second, work, pulse):
    """Do, as any other rank, what rank 0 says."""
    if not is_second:
        try_network(store, me, wait_for(store, "listeners"))
        if wait_for(store, "plan") == "measure":
            try:
                work()
            except Exception as error:  # rank 0 reads it in the last stage
                reason = lost_peer(error) or " ".join(str(error).split())[:200]
                pulse.at(f"{pulse.stage}: {reason}")
    wait_for(store, "end")
    store.set(f"end {me['rank']}", json.dumps(True))


def try_network(store, me, listeners):
    """Report the time, on all ranks at the same moment, and the connections from this machine."""
    now = time.time()
    attempts = connect_to_all(listeners, me["host"]) if me["listeners"] else []
    store.set(f"tried {me['rank']}", json.dumps({"clock": now, "attempts": attempts}))


if __name__ == "__main__":
    with one_line_errors():
        main()
