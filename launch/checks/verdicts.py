"""Verdicts on the facts that all ranks have told. Each function returns a Check."""

import contextlib
from pathlib import Path
from typing import NamedTuple

from ddp.errors import lost_peer
from launch.checks import messages

RESNET50 = 25_557_032 * 4  # bytes of its float32 gradients; number of weights: torchvision
CLOCKS = 5  # seconds that clocks may differ; torchrun's rendezvous drops a machine after 15
SHARED_MEMORY = 2**30  # bytes; a few loader workers with batches of photographs need as much
PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # that Linux gives to connections


class Check(NamedTuple):
    """The outcome of a check."""

    name: str
    verdict: str  # "ok", "warn" or "FAIL"
    found: str
    change: str = ""  # the line that mends it


def check_ranks(all_facts, world_size):
    """All ranks answered, and no two claim to be the same."""
    present = group(all_facts, "rank")
    missing = [rank for rank in range(world_size) if rank not in present]
    if missing:
        hosts = group(all_facts, "host")
        listed = "; ".join(f"{host} has {span(ranks)}" for host, ranks in hosts.items())
        return Check(
            "ranks",
            "FAIL",
            f"{span(missing)} of {world_size} did not answer "
            f"within {messages.SILENCE} s ({listed})",
            "on the machine that is not listed, check the command, MASTER_ADDR and MASTER_PORT",
        )
    for rank, claims in present.items():
        if len(claims) > 1:
            processes = [fact for fact in all_facts if fact["rank"] == rank]
            who = " and ".join(f"process {fact['pid']} on {fact['host']}" for fact in processes)
            return Check(
                "ranks",
                "FAIL",
                f"rank {rank} is claimed twice: {who}",
                "give each machine its own node rank; "
                "around torchrun, srun and mpirun start one task per machine",
            )
    return Check("ranks", "ok", f"{len(present)} of {world_size} answered")


def check_same_launch(all_facts):
    """All ranks were started in the same way."""
    for key in ("world_size", "launcher"):
        values = group(all_facts, key)
        if len(values) > 1:
            found = list_groups(values, key)
            change = "the same command and the same number of machines everywhere"
            return Check("launch", "FAIL", found, change)
    first = all_facts[0]
    found = f"started by {first['launcher']}, world size {first['world_size']}"
    return Check("launch", "ok", found)


def check_devices(all_facts):
    """Each rank has a device of its own, all of one kind, and no GPU is idle."""
    for fact in all_facts:
        if fact["problem"]:
            found = f"rank {fact['rank']} on {fact['host']}: {fact['problem']}"
            return Check("devices", "FAIL", found)
    for device, ranks in group(all_facts, "device_id").items():
        if device and len(ranks) > 1:
            hosts = sorted({fact["host"] for fact in all_facts if fact["device_id"] == device})
            return Check(
                "devices",
                "FAIL",
                f"{span(ranks)} on {', '.join(hosts)} share one GPU ({device})",
                "one process per GPU: torch.cuda.set_device(local_rank); "
                "with srun, --gpus-per-node=N instead of --gpus-per-task=1",
            )
    backends = group(all_facts, "backend")
    if len(backends) > 1:
        return Check(
            "devices",
            "FAIL",
            list_groups(backends),
            "GPUs for all ranks or for none: "
            "python -c 'import torch; print(torch.cuda.is_available())' on each machine",
        )
    for host, ranks in group(all_facts, "host").items():
        gpus = max(fact["gpus"] for fact in all_facts if fact["host"] == host)
        if gpus > len(ranks) and gpus > 1:
            found = f"{host} has {gpus} GPUs and {len(ranks)} rank(s)"
            change = f"--nproc-per-node={gpus}, or --ntasks-per-node={gpus}"
            return Check("devices", "warn", found, change)
    kind = "CPU" if all_facts[0]["backend"] == "gloo" else "GPU"
    return Check("devices", "ok", f"a {kind} for each rank")


def check_addresses(all_facts, attempts):
    """Each rank listens where others can connect.

    A loopback address is wrong if other machines fail to connect to it. On one machine it is fine.
    """
    unreached = {(attempt.backend, attempt.target) for attempt in attempts if attempt.error}
    for fact in all_facts:
        others = fact["interfaces"]
        usable = [name for name, other in others.items() if not other.startswith("127.")]
        listed = ", ".join(f"{name} ({address})" for name, address in others.items())
        who = f"rank {fact['rank']} on {fact['host']}"
        for backend, (interface, address) in fact["addresses"].items():
            if address is None:
                found = f"{who} has no interface {interface} with an address; it has {listed}"
            elif (backend, fact["host"]) in unreached and address.startswith(("127.", "::1")):
                found = (
                    f"{who} listens at {address} ({interface}), "
                    f"which no other machine reaches; it has {listed}"
                )
            else:
                continue
            variable = f"{backend.upper()}_SOCKET_IFNAME={usable[0] if usable else '...'}"
            return Check("addresses", "FAIL", found, f"export {variable}  # on {fact['host']}")
    pairs = [
        f"{fact['host']} {address}"
        for fact in all_facts
        for _, address in fact["addresses"].values()
    ]
    return Check("addresses", "ok", ", ".join(dict.fromkeys(pairs)))


def check_network(all_facts, attempts):
    """The connections between machines that the ranks attempted."""
    failed = [attempt for attempt in attempts if attempt.error]
    if failed:
        source, target, backend, address, error = failed[0]
        fact = next(fact for fact in all_facts if fact["host"] == target)
        interface = fact["addresses"][backend][0]
        others = [name for name in fact["interfaces"] if name not in ("lo", interface)]
        more = ""
        if len(failed) > 1:
            more = f" (and {len(failed) - 1} more of {len(attempts)} connections)"
        variable = f"{backend.upper()}_SOCKET_IFNAME={others[0] if others else '...'}"
        return Check(
            "network",
            "FAIL",
            f"{source} cannot reach {target} at {address} ({interface}): {error}{more}",
            f"export {variable}  # on {target}, or open the firewall between them for all ports",
        )
    hosts = len(group(all_facts, "host"))
    attempted = {(attempt.source, attempt.target) for attempt in attempts}
    if len(attempted) < hosts * (hosts - 1):
        found = "not checked between all machines, because another check failed"
        return Check("network", "warn", found)
    if not attempts:
        return Check("network", "ok", "one machine")
    return Check("network", "ok", f"each of {hosts} machines reaches every other")


def check_port(all_facts):
    """Linux gives the port of rank 0 to no other connection."""
    text = all_facts[0]["variables"].get("MASTER_PORT", "")
    port = int(text) if text.isdecimal() else 0
    if text and not 1 <= port <= 65535:  # one process alone does not use it
        found = f"MASTER_PORT={text}: expected a number from 1 to 65535"
        return Check("port", "warn", found, "export MASTER_PORT=29500, or unset it")
    with contextlib.suppress(OSError):
        first, last = map(int, PORTS.read_text().split())
        # torchrun picks a free one of these.
        if first <= port <= last and all_facts[0]["launcher"] != "torchrun":
            return Check(
                "port",
                "warn",
                f"Linux may give MASTER_PORT={port} to another connection, "
                f"as any port from {first} to {last}",
                "export MASTER_PORT=29500 on all machines",
            )
    return Check("port", "ok", f"MASTER_PORT={port}" if port else "chosen by the launcher")


def check_versions(all_facts):
    """All machines have the same versions."""
    first = all_facts[0]
    for key in ("torch", "cuda", "nccl", "python"):
        values = known(all_facts, key)
        if len(values) > 1:
            found = list_groups(values, key)
            fitting = (next(iter(values)), None)
            machines = sorted({fact["host"] for fact in all_facts if fact[key] not in fitting})
            what = f"pip install torch=={first['torch'].partition('+')[0]}"
            verdict = "FAIL"
            if key == "python":
                what = f"Python {first['python']}"
                minors = {version.rpartition(".")[0] for version in values}
                verdict = "FAIL" if len(minors) > 1 else "warn"  # 3.12.1 and 3.12.2 work together
            change = f"the same on all machines: {what} on {', '.join(machines)}"
            return Check("versions", verdict, found, change)
    drivers = known(all_facts, "driver")
    if len(drivers) > 1:  # a warning: CUDA runs with any driver that is new enough for it
        change = "the same NVIDIA driver on all machines, if one of them is slow or fails"
        return Check("versions", "warn", list_groups(drivers, "driver"), change)
    driver = f", driver {first['driver']}" if first["driver"] else ""
    found = f"torch {first['torch']}, Python {first['python']}{driver} everywhere"
    return Check("versions", "ok", found)


def check_code(all_facts):
    """All machines have the same scripts."""
    values = group(all_facts, "code")
    if len(values) > 1:
        found = f"the scripts differ: {list_groups(values)}"
        return Check("code", "FAIL", found, "git status; git rev-parse HEAD on each machine")
    return Check("code", "ok", f"the same everywhere ({all_facts[0]['code']})")


def check_clocks(all_facts, clocks):
    """The clocks agree.

    Args:
        clocks: {rank: seconds ahead of rank 0}, as exact as a message is quick.
    """
    rank, ahead = max(clocks.items(), key=lambda item: abs(item[1]))
    if abs(ahead) > CLOCKS:
        host = next(fact["host"] for fact in all_facts if fact["rank"] == rank)
        direction = "ahead of" if ahead > 0 else "behind"
        found = f"rank {rank} on {host} is {abs(ahead):.0f} s {direction} rank 0"
        return Check("clocks", "FAIL", found, f"timedatectl set-ntp true  # on {host}")
    return Check("clocks", "ok", f"within {max(0.1, abs(ahead)):.1f} s")


def check_shared_memory(all_facts):
    """Loader workers have room for their batches."""
    for fact in all_facts:
        if fact["shared_memory"] is not None and fact["shared_memory"] < SHARED_MEMORY:
            free = fact["shared_memory"] // 2**20
            return Check(
                "shared memory",
                "warn",
                f"{fact['host']} has {free} MiB free in /dev/shm, "
                "where loader workers put their batches",
                "docker run --shm-size=8g; in Kubernetes an emptyDir of medium Memory "
                "at /dev/shm; or --workers 0",
            )
    least = min((fact["shared_memory"] or 0) for fact in all_facts)
    found = f"{least / 2**30:.1f} GiB or more" if least else "not used on this system"
    return Check("shared memory", "ok", found)


def check_threads(all_facts):
    """The threads of a machine's ranks fit its cores."""
    for host, ranks in group(all_facts, "host").items():
        local = [fact for fact in all_facts if fact["host"] == host]
        # Each rank may be bound to cores of its own.
        usable = len(set().union(*(fact["cores"] for fact in local)))
        threads = local[0]["threads"]
        share = max(1, usable // len(ranks))
        # Beside a GPU, a CPU has little to do.
        is_too_few = threads < share and local[0]["backend"] == "gloo"
        if threads > share or is_too_few:
            found = (
                f"{host}: {len(ranks)} rank(s) with {threads} thread(s) each on {usable} core(s)"
            )
            return Check("threads", "warn", found, f"export OMP_NUM_THREADS={share}")
    return Check("threads", "ok", f"{all_facts[0]['threads']} per rank")


def check_all_reduce(outcome, all_facts):
    """All ranks have exchanged messages.

    Args:
        outcome: Outcome of measure().
    """
    hosts = {fact["rank"]: fact["host"] for fact in all_facts}

    def where(ranks):
        places = [f"rank {rank} on {hosts[rank]}, last at {outcome.stages[rank]}" for rank in ranks]
        return "; ".join(places)

    if outcome.times and len(hosts) == 1:
        return Check("all_reduce", "ok", "one rank, nothing to send")
    if outcome.times:
        size, seconds = outcome.times[-1]
        milliseconds = 1000 * seconds * RESNET50 / size
        found = f"the gradients of ResNet-50 (102 MB) take {milliseconds:.1f} ms"
        return Check("all_reduce", "ok", found)
    if outcome.silent:
        found = f"no sign of life: {where(outcome.silent)}"
        change = "read its own message, or dmesg there; "
        change += "py-spy dump --pid PID if the process still runs"
    elif outcome.error:
        found = lost_peer(outcome.error) or " ".join(str(outcome.error).split())[:300]
        change = "set NCCL_DEBUG=INFO, or TORCH_CPP_LOG_LEVEL=INFO for gloo, and start again"
    else:
        late = [rank for rank, stage in outcome.stages.items() if stage != "done"]
        found = f"no progress for {messages.SILENCE} s: {where(late)}"
        change = "NCCL_DEBUG=INFO; on one machine try NCCL_P2P_DISABLE=1"
    return Check("all_reduce", "FAIL", found, change)


def group(all_facts, key):
    """Return {value of this key: ranks}."""
    groups = {}
    for fact in all_facts:
        groups.setdefault(fact[key], []).append(fact["rank"])
    return groups


def known(all_facts, key):
    """Return the groups of group() without None, as a rank has whose GPU fails."""
    return {value: ranks for value, ranks in group(all_facts, key).items() if value}


def list_groups(groups, name=""):
    """Return "torch 2.9 on rank 0; torch 2.10 on ranks 1-3" for the groups of group()."""
    return "; ".join(f"{name} {value} on {span(ranks)}".strip() for value, ranks in groups.items())


def span(ranks):
    """Return "rank 3" for [3] and "ranks 0-2, 5" for [0, 1, 2, 5]."""
    parts = []  # [first, last] of ranks that follow each other
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"ranks {text}" if len(set(ranks)) > 1 else f"rank {text}"
