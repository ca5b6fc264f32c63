"""launch/preflight.py under real launchers, on two hosts and on a Slurm cluster, with and without
something wrong.
"""

import json
import re
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from processes import finished
from ranks import Ranks

from launch.checks import all_reduce, facts, messages, network, show, verdicts

ALONE = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}
CHECKS = ["ranks", "launch", "devices", "addresses", "network", "port", "versions", "code"]
CHECKS += ["clocks", "shared memory", "threads", "all_reduce"]


def report_of(out):
    """{check: (verdict, what was found)} in what preflight prints."""
    lines = re.findall(r"^(ok  |warn|FAIL)  (\w+(?: \w+)?) {2,}(.*)$", out, re.M)
    return {name.strip(): (verdict.strip(), found) for verdict, name, found in lines}


def failed(out):
    return {name: found for name, (verdict, found) in report_of(out).items() if verdict == "FAIL"}


# On two hosts


def on_two(hosts, fake="", interface="eth0"):
    """Start it on both hosts as Kubernetes would, one process on each; returns rank 0's code,
    output and errors.

    Args:
        fake: str, the faults of faked_preflight.py.
        interface: str, GLOO_SOCKET_IFNAME of rank 1.
    """
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": 29500}
    shared["FAKE"] = fake
    ranks = []
    for rank, name in enumerate(("eth0", interface)):
        variables = shared | {"RANK": rank, "GLOO_SOCKET_IFNAME": name}
        command = ["python", "tests/helpers/faked_preflight.py"]
        ranks.append(hosts.popen(rank, *command, variables=variables))
    end = finished(ranks[0])
    hosts.kill(1)  # one that was stopped is still there
    ranks[1].communicate(timeout=300)
    return end


@pytest.mark.slow
def test_torchrun_on_two_hosts_has_a_verdict_for_each_check(hosts):
    torchrun = ["torchrun", "--nnodes=2", "--nproc-per-node=1"]
    torchrun.append(f"--master-addr={hosts.addresses[0]}")
    command = ["launch/preflight.py", "--json"]
    both = [hosts.popen(i, *torchrun, f"--node-rank={i}", *command) for i in range(2)]
    (code, out, err), (other, nothing, _) = map(finished, both)
    assert (code, other, nothing) == (0, 0, ""), err
    report = json.loads(out)
    assert [check["name"] for check in report["checks"]] == CHECKS
    assert all(check["verdict"] == "ok" for check in report["checks"] if check["name"] != "threads")
    assert [rank["addresses"]["gloo"][1] for rank in report["ranks"]] == hosts.addresses
    assert [rank["host"] for rank in report["ranks"]] == hosts.names
    assert [speed["bytes"] for speed in report["all_reduce"]] == list(all_reduce.SIZES)


@pytest.mark.slow
def test_a_wrong_interface_is_named_with_the_line_that_mends_it(hosts):
    code, out, err = on_two(hosts, interface="lo")
    found = "rank 1 on host2 listens at 127.0.0.1 (lo), which no other machine reaches"
    assert code == 1 and found in failed(out)["addresses"], out + err
    assert "change this:   export GLOO_SOCKET_IFNAME=eth0  # on host2" in out
    assert report_of(out)["all_reduce"][1].startswith("not measured")


@pytest.mark.slow
def test_a_rank_that_stands_still_in_all_reduce_is_named(hosts):
    code, out, err = on_two(hosts, fake="stopped in all_reduce")
    assert code == 1, err
    assert failed(out) == {
        "all_reduce": "no sign of life: rank 1 on host2, last at all_reduce of 4 KiB"
    }


# On this machine


def on_this_machine(folder, codes, **variables):
    """Run it as two ranks, with the faults of faked_preflight.py.

    Returns:
        what rank 0 prints, and the name of the host.
    """
    ranks = Ranks(folder, 2, [], env=variables, script="tests/helpers/faked_preflight.py")
    assert ranks.wait() == codes, ranks.output()
    assert "Traceback" not in ranks.output() + ranks.output(1)
    return ranks.output(), socket.gethostname()


def test_preflight_names_what_is_wrong_on_a_machine_and_on_a_rank(tmp_path):
    output, host = on_this_machine(tmp_path, [1, 0], FAKE="torch,code,clock")
    found = report_of(output)
    assert list(found) == CHECKS
    assert list(failed(output)) == ["versions", "code", "clocks"], output
    assert failed(output)["versions"].endswith("; torch 2.6.0+cu124 on rank 1")
    assert failed(output)["code"].endswith(" on rank 0; 0badc0de on rank 1")
    assert failed(output)["clocks"] == f"rank 1 on {host} is 20 s ahead of rank 0"
    assert found["all_reduce"][0] == "ok", "the failures are none of the network"
    assert "preflight: 3 of 12 checks failed" in output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_that_fails_when_first_used_is_a_line(tmp_path, rank):
    output, host = on_this_machine(tmp_path, [1, 0], FAKE="broken GPU", FAKE_RANK=rank)
    fails = failed(output)
    assert list(fails) == ["devices"], output
    error = "its GPU fails: CUDA error: uncorrectable ECC error encountered: expected"
    assert fails["devices"].startswith(f"rank {rank} on {host}: {error}")


def test_preflight_does_not_wait_for_a_dead_rank(tmp_path):
    codes = [1, -signal.SIGKILL]
    output, host = on_this_machine(tmp_path, codes, FAKE="killed", FAKE_SILENCE=2)
    missing = f"rank 1 of 2 did not answer within 2 s ({host} has rank 0)"
    assert failed(output) == {"ranks": missing}, output
    assert report_of(output)["all_reduce"] == ("warn", "not measured, because a check above failed")


# On a Slurm cluster


@pytest.mark.slow
def test_srun_on_two_nodes_prints_a_line_for_each_rank(slurm):
    nodes = ["--nodelist=n01,n02", "--ntasks-per-node=2"]
    end = slurm.run("srun", *nodes, "python", "launch/preflight.py")
    out = end.stdout
    assert end.returncode == 0 and not failed(out), out + end.stderr
    assert list(report_of(out)) == CHECKS
    found = re.findall(r"^(\d) +(n0\d) +\d+ +cpu ", out, re.M)
    assert found == [("0", "n01"), ("1", "n01"), ("2", "n02"), ("3", "n02")]
    assert re.search(r"^64 MiB +[\d.]+ ms +[\d.]+ GB/s$", out, re.M)
    assert out.splitlines()[-1].startswith("preflight: 0 of 12 checks failed, ")


@pytest.mark.slow
def test_a_torchrun_in_each_of_two_tasks_is_refused(slurm):
    command = ["srun", "--ntasks=2", "--nodes=1", "torchrun", "--standalone", "--nproc-per-node=2"]
    end = slurm.run(*command, "launch/preflight.py")
    found = "srun has started 2 tasks with a torchrun on 1 machine(s)"
    assert end.returncode != 0 and f"preflight.py: error: {found}" in end.stderr


# Verdicts on what ranks may say of themselves


def fact(rank, **more):
    """A rank on a machine with four cores, two ranks on each machine."""
    host = f"n{rank // 2}"
    return {
        "rank": rank,
        "world_size": 4,
        "local_rank": rank % 2,
        "launcher": "srun",
        "host": host,
        "pid": 100 + rank,
        "problem": None,
        "device": "cpu",
        "device_name": "cpu",
        "device_id": None,
        "gpus": 0,
        "backend": "gloo",
        "addresses": {"gloo": ("eth0", f"10.0.0.{rank // 2}")},
        "interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.1"},
        "python": "3.12.1",
        "torch": "2.9.0",
        "cuda": None,
        "nccl": None,
        "code": "abcdef01",
        "shared_memory": 2**33,
        "threads": 2,
        "cores": [0, 1, 2, 3],
        "driver": None,
        "variables": {},
    } | more


FOUR = [fact(rank) for rank in range(4)]


def assert_verdicts(*rows):
    """Compare rows of (Check, verdict, part of what was found, part of what to change)."""
    wrong = [
        (check, verdict, found, change)
        for check, verdict, found, change in rows
        if check.verdict != verdict or found not in check.found or change not in check.change
    ]
    assert wrong == []


def test_ranks_that_do_not_belong_together_are_named():
    ranks = verdicts.check_ranks
    twice = [*FOUR, fact(1, pid=77, host="n9")]
    missing = ranks([fact(0), fact(1), fact(3)], 4)
    world = verdicts.check_same_launch([fact(0), fact(1, world_size=2)])
    assert_verdicts(
        (missing, "FAIL", "rank 2 of 4 did not answer within", "MASTER_ADDR and MASTER_PORT"),
        (ranks(twice, 4), "FAIL", "process 101 on n0 and process 77 on n9", "its own node rank"),
        (world, "FAIL", "world_size 4 on rank 0; world_size 2 on rank 1", "number of machines"),
    )


def test_each_rank_needs_a_device_of_its_own():
    def check(*ranks):
        return verdicts.check_devices(ranks)

    nccl = {"backend": "nccl", "device": "cuda:0", "device_id": "GPU-1", "gpus": 8}
    other = nccl | {"device_id": "GPU-2"}
    each = [fact(rank, backend="nccl", device_id=f"GPU-{rank}", gpus=2) for rank in range(4)]
    refused = fact(1, problem="4 processes on this machine, 2 GPU(s)")
    shared = "ranks 0, 2 on n0, n1 share one GPU (GPU-1)"
    assert_verdicts(
        (check(fact(0)), "ok", "a CPU for each rank", ""),
        (check(*each), "ok", "a GPU for each rank", ""),
        (check(fact(0, **nccl), fact(1)), "FAIL", "nccl on rank 0; gloo on rank 1", "is_available"),
        (check(fact(0, **nccl), fact(2, **nccl)), "FAIL", shared, "--gpus-per-node=N"),
        (check(fact(0, **nccl), fact(1, **other)), "warn", "n0 has 8 GPUs and 2 rank(s)", "=8"),
        (check(fact(0), refused), "FAIL", "rank 1 on n0: 4 processes on this machine", ""),
    )


def test_versions_that_differ_are_named_with_the_machine_to_change():
    def check(**change):
        ours = {"driver": "550.54", "nccl": "2.26.2"}
        return verdicts.check_versions([fact(0, **ours), fact(2, **{"nccl": "2.26.2"} | change)])

    same = "the same on all machines: pip install torch==2.9.0 on n1"
    patch = "python 3.12.1 on rank 0; python 3.12.11 on rank 2"
    assert_verdicts(
        (check(nccl="2.27.5"), "FAIL", "nccl 2.26.2 on rank 0; nccl 2.27.5 on rank 2", same),
        (check(nccl=None), "ok", "torch 2.9.0, Python 3.12.1", ""),  # its GPU failed
        (check(python="3.12.11"), "warn", patch, "Python 3.12.1 on n1"),
        (check(driver="550.54"), "ok", "driver 550.54 everywhere", ""),
    )


def test_machines_that_do_not_reach_each_other_are_named_with_an_interface():
    """Gloo is checked beside NCCL, because 06 uses both. On Debian, the name of a machine resolves
    to 127.0.1.1.
    """
    missing = [fact(0), fact(1, addresses={"gloo": ("eth9", None)})]
    addresses = {"nccl": ("eth0", "10.0.0.0"), "gloo": ("lo", "127.0.1.1")}
    interfaces = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    two = [fact(0, backend="nccl", addresses=addresses), fact(2, interfaces=interfaces)]
    there = network.Attempt("n0", "n1", "gloo", "10.0.0.1", None)
    back = network.Attempt("n1", "n0", "nccl", "10.0.0.0", None)
    loopback = network.Attempt("n1", "n0", "gloo", "127.0.1.1", "Connection refused")
    refused = there._replace(error="Connection refused")
    check = verdicts.check_addresses
    eth0 = "export GLOO_SOCKET_IFNAME=eth0  # on n0"
    assert_verdicts(
        (check(missing, []), "FAIL", "rank 1 on n0 has no interface eth9", eth0),
        (check(two, [back, loopback]), "FAIL", "rank 0 on n0 listens at 127.0.1.1 (lo)", eth0),
        (check(two, [back]), "ok", "n0 10.0.0.0, n0 127.0.1.1, n1 10.0.0.1", ""),
    )
    check = verdicts.check_network
    lost = "n0 cannot reach n1 at 10.0.0.1 (eth0): Connection refused (and 1 more of 3 connections)"
    assert_verdicts(
        (check(two, [refused, back, loopback]), "FAIL", lost, "GLOO_SOCKET_IFNAME=ib0  # on n1"),
        (check(two, [there, back]), "ok", "each of 2 machines reaches every other", ""),
        (check(two, [there]), "warn", "not checked between all machines", ""),
    )


def test_clocks_threads_memory_and_ports_that_do_not_fit_are_named():
    def clocks(seconds):
        return verdicts.check_clocks(FOUR, {0: 0.0, 1: 0.3, 2: seconds, 3: -0.3})

    def threads(count, **more):
        return verdicts.check_threads([fact(rank, threads=count, **more) for rank in range(4)])

    def memory(free):
        return verdicts.check_shared_memory([fact(0), fact(2, shared_memory=free)])

    def port(number, **more):
        return verdicts.check_port([fact(0, variables={"MASTER_PORT": number}, **more)])

    bound = [fact(0, cores=[0, 1]), fact(1, cores=[2, 3])]
    least = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    assert_verdicts(
        (clocks(20.0), "FAIL", "rank 2 on n1 is 20 s ahead of rank 0", "set-ntp true  # on n1"),
        (clocks(0.0), "ok", "within 0.3 s", ""),
        (threads(4), "warn", "n0: 2 rank(s) with 4 thread(s) each on 4", "OMP_NUM_THREADS=2"),
        (threads(2), "ok", "2 per rank", ""),
        (threads(1, backend="nccl"), "ok", "1 per rank", ""),  # beside GPUs
        (verdicts.check_threads(bound), "ok", "2 per rank", ""),  # each has cores of its own
        (memory(2**26), "warn", "n1 has 64 MiB free in /dev/shm", "--shm-size=8g"),
        (port(least), "warn", f"Linux may give MASTER_PORT={least}", "MASTER_PORT=29500"),
        (port(least, launcher="torchrun"), "ok", least, ""),  # which has found it free
        (port(""), "ok", "chosen by the launcher", ""),  # one process needs no port
        (port("0"), "warn", "MASTER_PORT=0: expected", "MASTER_PORT=29500, or unset it"),
    )


def test_an_all_reduce_that_fails_names_the_ranks():
    def check(error=None):
        stages = {0: "done", 2: "all_reduce of 1 MiB"}
        outcome = all_reduce.Outcome(None, error, stages, ())
        return verdicts.check_all_reduce(outcome, [fact(0), fact(2)])

    lost = RuntimeError("[/x/gloo/pair.cc:534] Connection closed by peer [10.0.0.1]:4711")
    last = "s: rank 2 on n1, last at all_reduce of 1 MiB"
    assert_verdicts(
        (check(), "FAIL", f"no progress for {messages.SILENCE} {last}", "NCCL_P2P_DISABLE=1"),
        (check(error=lost), "FAIL", "lost another rank (Connection closed by", "NCCL_DEBUG=INFO"),
    )


# What ranks find out


def test_unusable_gpus_are_a_failure_unless_they_are_hidden(monkeypatch, tmp_path, gpus):
    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old. Please update it.")

    monkeypatch.setattr(facts, "NVIDIA", tmp_path)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert facts.unusable_gpus() is None, "no GPU in this machine"
    (tmp_path / "0000:07:00.0").mkdir()
    reasons = {too_old: "The NVIDIA driver on your system is too old", dict: "it finds none"}
    for init, reason in reasons.items():
        monkeypatch.setattr(torch.cuda, "init", init)
        check = verdicts.check_devices([facts.facts("python", **ALONE)])
        assert check.verdict == "FAIL"
        assert f"torch cannot use the GPUs here: {reason}; see nvidia-smi" in check.found
    for nothing in ("", "-1", "NoDevFiles"):  # the last is of older Slurm
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        hidden = facts.facts("python", **ALONE)
        assert verdicts.check_devices([hidden]).verdict == "ok"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    gpus(2)
    third = facts.facts("torchrun", rank=2, world_size=4, local_rank=2, local_world_size=4)
    assert third["problem"] == "local rank 2, 2 GPU(s): --nproc-per-node=2"


def test_a_rank_tells_only_the_listed_variables(monkeypatch):
    given = dict.fromkeys(facts.VARIABLES, "1")
    for name, value in (given | {"AWS_SECRET_ACCESS_KEY": "hunter3"}).items():
        monkeypatch.setenv(name, value)
    told = facts.facts("python", **ALONE)
    assert told["variables"] == given and "hunter" not in json.dumps(told)


def test_the_interface_of_a_backend_is_found_in_its_own_order(monkeypatch):
    for backend, wanted, names, expected in (
        ("nccl", None, "lo docker0 virbr0 eth0 eth1", "eth0"),
        ("nccl", None, "lo eth0 ib0", "ib0"),
        ("nccl", "=eth1", "lo eth10 eth1", "eth1"),
        ("nccl", "^eth0,lo,docker", "lo docker0 eth0 eth1", "eth1"),
        ("nccl", "ib", "lo eth0", None),
        ("gloo", "eth1,eth0", "lo eth0 eth1", "eth1"),
        ("gloo", "eth9", "lo eth0 eth1", None),
    ):
        addresses = {name: f"address of {name}" for name in names.split()}
        monkeypatch.setattr(facts, "interfaces", lambda addresses=addresses: addresses)
        monkeypatch.setenv(f"{backend.upper()}_SOCKET_IFNAME", wanted or "")
        name, address = facts.own_address(backend)
        assert address == (expected and f"address of {expected}"), (wanted, names)
        assert name in (expected, wanted)


def test_a_machine_connects_to_the_listeners_of_others():
    listener = network.Listener("n1", "127.0.0.1")
    other = socket.create_server(("127.0.0.1", 0))  # which is no listener of ours

    def answer():
        connection, _ = other.accept()
        with connection:
            connection.sendall(b"\xff hello")

    threading.Thread(target=answer, daemon=True).start()
    where = {
        "n0": {"gloo": ("127.0.0.1", 1, "itself")},
        "n1": {"gloo": ("127.0.0.1", listener.port, listener.name)},
        "n2": {"gloo": ("127.0.0.1", other.getsockname()[1], "n2 7")},
    }
    one, two = network.connect_to_all(where, "n0")
    assert one == ("n0", "n1", "gloo", "127.0.0.1", None)
    assert two == ("n0", "n2", "gloo", "127.0.0.1", "\ufffd hello answers there")


def test_an_all_reduce_is_timed_per_call_and_by_its_bytes(alone, monkeypatch):
    """A call takes 1 ms per MiB, and the first one a second more."""
    now = 0.0
    sizes = []
    stages = []
    speed = 1000  # MiB per second

    def take_time(tensor):
        nonlocal now
        now += tensor.nbytes / 2**20 / speed + (0 if sizes else 1)
        sizes.append(tensor.nbytes)

    def measure():
        pulse = SimpleNamespace(at=stages.append)
        return all_reduce.measure(pulse, None, 0, 1, torch.device("cpu"))

    monkeypatch.setattr(all_reduce.dist, "init_process_group", Mock())
    monkeypatch.setattr(all_reduce.dist, "all_reduce", take_time)
    monkeypatch.setattr(all_reduce.time, "perf_counter", lambda: now)
    monkeypatch.setattr(all_reduce, "SIZES", (2**20, 2**23))
    assert measure() == [(2**20, pytest.approx(0.001)), (2**23, pytest.approx(0.008))]
    assert sizes.count(2**20) == 1 + 1, "half a second in all, and the first call took longer"
    assert sizes.count(2**23) == 1 + 20, "20 at most"
    assert stages[1:3] == ["all_reduce of 1 MiB", "all_reduce of 1 MiB, 1 more"], "is progress"
    assert stages[4] == "all_reduce of 8 MiB, 20 more"
    speed = 1
    assert measure() == [(2**20, pytest.approx(1))], "a larger one could take longer than SILENCE"
    monkeypatch.setattr(all_reduce.dist, "all_reduce", lambda tensor: tensor[7:9].zero_())
    with pytest.raises(RuntimeError, match=r"all_reduce of 1 MiB gave \[0.0, 1.0\]"):
        measure()


# The report


def test_the_report_tells_ranks_verdicts_and_speeds():
    """Of four ranks: 64 MiB in 100 ms. The gradients of ResNet-50 take as much longer as they are
    larger.
    """
    times = [(4096, 0.00025), (2**26, 0.1)]
    speed = verdicts.check_all_reduce(all_reduce.Outcome(times, None, {}, []), FOUR)
    assert speed.found == "the gradients of ResNet-50 (102 MB) take 152.3 ms"
    behind = verdicts.Check("clocks", "FAIL", "20 s behind", "timedatectl set-ntp true")
    done = [behind, verdicts.Check("port", "warn", "busy"), speed]
    shown = show.as_text(FOUR[::-1], {0: 0.0, 1: -0.26}, done, times)
    heads, first, second, *_ = shown.splitlines()
    row = ["0", "n0", "100", "cpu", "10.0.0.0 (eth0)", "2.9.0", "abcdef01", "+0.0 s", "2"]
    assert re.split("  +", first) == row and second.index("-0.3 s") == heads.index("clock")
    # 4096 bytes * 1.5 / 0.25 ms: each of four ranks sends 1.5 bytes per byte.
    assert re.search(r"^4 KiB +0\.25 ms +0\.02 GB/s$", shown, re.M), shown
    assert shown.endswith("preflight: 1 of 3 checks failed, 1 with a warning")
    report = json.loads(show.as_json(FOUR, {"1": -0.26}, done, times))
    assert report["clocks"] == {"1": -0.26} and report["checks"][0] == behind._asdict()
    assert report["all_reduce"][1]["bus_bandwidth"] == pytest.approx(1.5 * 2**26 / 0.1)
