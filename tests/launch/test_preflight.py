"""launch/preflight.py under real launchers, on two hosts and on a Slurm cluster, with and without
something wrong.
"""

import json
import re
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torchvision
from processes import finished

from common.distributed import Ranks
from launch import preflight
from machine_checks import all_reduce, checks, facts, messages, network, show

ALONE = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)

CHECKS = [
    "ranks",
    "launch",
    "devices",
    "addresses",
    "network",
    "port",
    "versions",
    "code",
    "clocks",
]
CHECKS += ["shared memory", "threads", "GPU health", "Xid errors", "InfiniBand", "all_reduce"]


def verdicts(out):
    """{check: (verdict, what was found)} of a report."""
    lines = re.findall(r"^(ok  |warn|FAIL)  (\w+(?: \w+)?) {2,}(.*)$", out, re.M)
    return {name.strip(): (verdict.strip(), found) for verdict, name, found in lines}


def failed(out):
    return {name: found for name, (verdict, found) in verdicts(out).items() if verdict == "FAIL"}


# On two hosts


def on_two(hosts, *flags, variables=({}, {}), fake=None):
    """Start it on both hosts as Kubernetes would, one process on each; returns rank 0's code,
    output and errors.
    """
    script = "tests/helpers/faked_preflight.py" if fake else "launch/preflight.py"
    common = {
        "WORLD_SIZE": 2,
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": 29500,
        "FAKE": fake,
    }
    common = {name: value for name, value in common.items() if value is not None}
    both = [
        hosts.popen(
            i, "python", script, *flags, variables=common | {"RANK": i} | dict(variables[i])
        )
        for i in range(2)
    ]
    end = finished(both[0])
    hosts.kill(1)  # one that was stopped is still there
    both[1].communicate(timeout=300)
    return end


@pytest.mark.slow
def test_torchrun_on_two_hosts_has_a_verdict_for_each_check(hosts):
    """Torchrun on two hosts passes with a verdict for each check and times by size."""
    torchrun = [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=1",
        f"--master-addr={hosts.addresses[0]}",
    ]
    secret = {"MY_SECRET_TOKEN": "hunter2", "AWS_SECRET_ACCESS_KEY": "hunter3"}
    both = [
        hosts.popen(
            i, *torchrun, f"--node-rank={i}", "launch/preflight.py", "--json", variables=secret
        )
        for i in range(2)
    ]
    (code, out, err), (other, nothing, _) = map(finished, both)
    assert (code, other, nothing) == (0, 0, ""), err
    report = json.loads(out)
    assert [check["name"] for check in report["checks"]] == CHECKS
    assert all(check["verdict"] == "ok" for check in report["checks"] if check["name"] != "threads")
    assert [rank["addresses"]["gloo"][1] for rank in report["ranks"]] == hosts.addresses
    assert [rank["host"] for rank in report["ranks"]] == hosts.names
    for size, speed in zip(all_reduce.SIZES, report["all_reduce"], strict=True):
        assert speed["bytes"] == size and speed["bus_bandwidth"] == pytest.approx(
            size / speed["seconds"]
        )
    assert "hunter" not in out + err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interface", "found"),
    [
        ("eth9", "rank 1 on host2 has no interface eth9"),
        ("lo", "rank 1 on host2 listens at 127.0.0.1 (lo), which no other machine reaches"),
    ],
)
def test_a_wrong_interface_is_named_with_the_line_that_mends_it(hosts, interface, found):
    """A wrong interface is named with the line that sets the right one."""
    code, out, err = on_two(hosts, variables=({}, {"GLOO_SOCKET_IFNAME": interface}))
    assert code == 1 and found in failed(out)["addresses"], out + err
    assert "change this:   export GLOO_SOCKET_IFNAME=eth0  # on host2" in out
    assert verdicts(out)["all_reduce"][1].startswith("not measured")


@pytest.mark.slow
def test_a_shared_gpu_versions_code_and_clock_are_each_named(hosts):
    """One gpu for two ranks other versions other code and a wrong clock are each named."""
    code, out, err = on_two(hosts, fake="gpu,torch,code,clock")
    assert code == 1, err
    assert failed(out) == {
        "devices": "ranks 0-1 on host1, host2 share one GPU (GPU-0d1e)",
        "versions": re.search(r"torch \S+ on rank 0; torch 2\.6\.0\+cu124 on rank 1", out)[0],
        "code": re.search(r"the scripts differ: \w{8} on rank 0; 0badc0de on rank 1", out)[0],
        "clocks": "rank 1 on host2 is 20 s ahead of rank 0",
    }


@pytest.mark.slow
def test_a_rank_that_never_answers_is_named(hosts):
    code, out, err = on_two(hosts, fake="stopped")
    assert code == 1, err
    assert failed(out) == {"ranks": "rank 1 of 2 did not answer within 10 s (host1 has rank 0)"}


@pytest.mark.slow
def test_a_rank_that_stands_still_in_all_reduce_is_named(hosts):
    code, out, err = on_two(hosts, fake="stopped in all_reduce")
    assert code == 1, err
    assert failed(out) == {
        "all_reduce": "no sign of life: rank 1 on host2, last at all_reduce of 4 KiB"
    }


@pytest.mark.slow
def test_without_rank_0_the_others_say_so_and_end(hosts):
    given = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": 29500}
    code, _, err = finished(hosts.popen(1, "python", "launch/preflight.py", variables=given))
    assert (
        code == 2 and "preflight.py: error: rank 1 could not reach rank 0 at 10.77.0.1:29500" in err
    )


# On a Slurm cluster


def srun(slurm, *options, fake=None, **variables):
    """Run it as two tasks on each of two nodes."""
    script = "tests/helpers/faked_preflight.py" if fake else "launch/preflight.py"
    env = variables | ({"FAKE": fake} if fake else {})
    end = slurm.run(
        "srun",
        "--nodelist=n01,n02",
        "--ntasks-per-node=2",
        *options,
        "python",
        script,
        env_extra=env,
    )
    return end.returncode, end.stdout, end.stderr


@pytest.mark.slow
def test_srun_on_two_nodes_prints_a_line_for_each_rank(slurm):
    """Srun on two nodes passes and prints a line for each rank."""
    code, out, err = srun(slurm)
    assert code == 0 and not failed(out), out + err
    assert list(verdicts(out)) == CHECKS
    assert re.findall(r"^(\d) +(n0\d) +\d+ +cpu ", out, re.M) == [
        ("0", "n01"),
        ("1", "n01"),
        ("2", "n02"),
        ("3", "n02"),
    ]
    assert re.search(r"^64 MiB +[\d.]+ ms +[\d.]+ GB/s$", out, re.M)
    assert (
        out.endswith("preflight: 0 of 15 checks failed, 0 with a warning\n")
        or "warn  threads" in out
    )


@pytest.mark.slow
def test_what_is_wrong_on_a_node_of_slurm_is_named(slurm):
    code, out, err = srun(slurm, fake="torch,clock", FAKE_RANK="3")
    assert code == 1, err
    assert set(failed(out)) == {"versions", "clocks"}
    assert failed(out)["clocks"] == "rank 3 on n02 is 20 s ahead of rank 0"
    code, out, err = srun(slurm, GLOO_SOCKET_IFNAME="eth9")
    assert code == 1 and "rank 0 on n01 has no interface eth9" in failed(out)["addresses"], err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fake", "check", "found"),
    [
        (
            "killed",
            "ranks",
            "rank 3 of 4 did not answer within 10 s (n01 has ranks 0-1; n02 has rank 2)",
        ),
        (
            "killed in all_reduce",
            "all_reduce",
            "no sign of life: rank 3 on n02, last at all_reduce of 4 KiB",
        ),
    ],
)
def test_a_task_that_dies_is_named(slurm, fake, check, found):
    code, out, err = srun(slurm, "--kill-on-bad-exit=0", fake=fake, FAKE_RANK="3")
    assert code != 0 and failed(out) == {check: found}, out + err


@pytest.mark.slow
def test_a_torchrun_in_each_of_two_tasks_is_refused(slurm):
    command = ["srun", "--ntasks=2", "--nodes=1", "torchrun", "--standalone", "--nproc-per-node=2"]
    end = slurm.run(*command, "launch/preflight.py")
    assert (
        end.returncode != 0
        and "srun has started 2 tasks with a torchrun on 1 machine(s): expected one" in end.stderr
    )


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
        "gpu_health": None,
        "xids": None,
        "infiniband": {"ports": {}, "has_devices": False, "has_library": False, "memlock": None},
        "variables": {},
    } | more


def test_a_rank_that_is_there_twice_is_named_with_both_processes():
    check = checks.check_ranks([fact(0), fact(1), fact(1, pid=77, host="n9"), fact(2), fact(3)], 4)
    assert (
        check.verdict == "FAIL"
        and check.found == "rank 1 is claimed twice: process 101 on n0 and process 77 on n9"
    )


def test_missing_ranks_are_named_with_what_to_check():
    """Ranks that are missing are named with what to check on their machine."""
    check = checks.check_ranks([fact(0), fact(1), fact(3)], 4)
    assert check.verdict == "FAIL" and check.found.startswith("rank 2 of 4 did not answer within ")
    assert check.found.endswith(" s (n0 has ranks 0-1; n1 has rank 3)")
    assert check.change.startswith(
        "on the machine that is not listed, check the command, MASTER_ADDR and"
    )


def test_sizes_are_told_in_the_largest_unit_that_fits():
    sizes = [2**10, 2**20 - 2**10, 2**20, 2**29]
    assert [all_reduce.text_of(size) for size in sizes] == ["1 KiB", "1023 KiB", "1 MiB", "512 MiB"]


def test_ranks_of_different_worlds_are_told_apart():
    check = checks.check_launch([fact(0), fact(1, world_size=2)])
    assert (check.verdict, check.found) == (
        "FAIL",
        "world_size 4 on rank 0; world_size 2 on rank 1",
    )


def test_gpus_on_some_ranks_alone_and_gpus_that_idle_are_told():
    nccl = {"backend": "nccl", "device": "cuda:0", "device_id": "GPU-1", "gpus": 8}
    assert (
        checks.check_devices([fact(0, **nccl), fact(1)]).found == "nccl on rank 0; gloo on rank 1"
    )
    check = checks.check_devices([fact(0, **nccl), fact(1, **nccl | {"device_id": "GPU-2"})])
    assert (check.verdict, check.found) == ("warn", "n0 has 8 GPUs and 2 rank(s)")
    refused = checks.check_devices([fact(0, problem="4 processes on this machine, 2 GPU(s)")])
    assert (refused.verdict, refused.found) == (
        "FAIL",
        "rank 0 on n0: 4 processes on this machine, 2 GPU(s)",
    )


def test_unusable_gpus_are_a_failure_unless_they_are_hidden(monkeypatch, tmp_path):
    """Gpus that torch cannot use are a failure unless they are hidden."""

    def too_old():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please update it."
        )

    monkeypatch.setattr(facts, "NVIDIA", tmp_path)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert facts.unusable_gpus() is None, "no GPU in this machine"
    (tmp_path / "0000:07:00.0").mkdir()
    check = checks.check_devices([facts.facts("python", ALONE)])
    assert (
        check.verdict == "FAIL"
        and "driver on your system is too old (found version 11040); see" in check.found
    )
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert "torch cannot use the GPUs here: it finds none; see nvidia-smi" in facts.unusable_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert checks.check_devices([facts.facts("python", ALONE)]).verdict == "ok"


def test_different_versions_are_a_failure_with_a_command():
    """Different versions are a failure with the command that mends it."""
    check = checks.check_versions([fact(0), fact(2, torch="2.9.1")])
    assert (check.verdict, check.found) == (
        "FAIL",
        f"torch {fact(0)['torch']} on rank 0; torch 2.9.1 on rank 2",
    )
    wanted = fact(0)["torch"].partition("+")[0]
    assert (
        check.change
        == f"the same on all machines: pip install torch=={wanted} on {fact(2)['host']}"
    )


def test_the_variables_of_the_network_are_among_the_facts(monkeypatch):
    given = {name: "1" for name in facts.VARIABLES}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert facts.facts("python", ALONE)["variables"] == given
    documented = {
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "NCCL_IB_DISABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_DEBUG",
    }
    assert documented <= given.keys()


def test_gloo_is_checked_beside_nccl_because_06_uses_both():
    """As on Debian, where a machine's own name resolves to 127.0.1.1."""
    both = {
        "backend": "nccl",
        "addresses": {"nccl": ("eth0", "10.0.0.1"), "gloo": ("lo", "127.0.1.1")},
    }
    attempts = [
        network.Attempt("n1", "n0", "gloo", "127.0.1.1", "Connection refused"),
        network.Attempt("n1", "n0", "nccl", "10.0.0.1", None),
    ]
    check = checks.check_addresses([fact(0, **both), fact(2)], attempts)
    assert check.verdict == "FAIL" and "rank 0 on n0 listens at 127.0.1.1 (lo)" in check.found
    assert check.change == "export GLOO_SOCKET_IFNAME=eth0  # on n0"
    assert checks.check_network([fact(0, **both), fact(2)], attempts).verdict == "FAIL"


def test_an_error_of_a_single_rank_fails_too():
    outcome = all_reduce.Outcome(
        None, RuntimeError("CUDA error: out of memory"), {0: "connecting"}, []
    )
    check = checks.check_all_reduce(outcome, [fact(0)])
    assert (check.verdict, check.found) == ("FAIL", "CUDA error: out of memory")


@pytest.mark.parametrize(("threads", "verdict"), [(4, "warn"), (2, "ok"), (1, "warn")])
def test_threads_must_fit_the_cores(threads, verdict):
    check = checks.check_threads([fact(rank, threads=threads) for rank in range(4)])
    assert check.verdict == verdict and check.change == (
        "export OMP_NUM_THREADS=2" if verdict == "warn" else ""
    )


def test_tasks_bound_to_cores_may_use_all_of_them():
    """Tasks that are bound to cores of their own may use all of them."""
    bound = [fact(0, cores=[0, 1]), fact(1, cores=[2, 3])]
    assert checks.check_threads(bound).verdict == "ok"


@pytest.mark.parametrize(("seconds", "words"), [(20.0, "20 s ahead of"), (-20.0, "20 s behind")])
def test_a_clock_that_is_ahead_or_behind_is_named(seconds, words):
    all_facts = [fact(rank) for rank in range(4)]
    check = checks.check_clocks(all_facts, {0: 0.0, 1: 0.3, 2: seconds, 3: -0.3})
    assert (check.verdict, check.found) == ("FAIL", f"rank 2 on n1 is {words} rank 0")
    assert check.change == "timedatectl set-ntp true  # on n1"
    assert checks.check_clocks(all_facts, {0: 0.0, 1: 0.3, 2: 0.0, 3: -0.3}).verdict == "ok"


def test_little_shared_memory_is_told_with_the_flag_of_docker():
    check = checks.check_shared_memory([fact(0), fact(2, shared_memory=2**26)])
    assert (check.verdict, check.found[:24]) == (
        "warn",
        "n1 has 64 MiB free in /d",
    ) and "--shm-size" in check.change


def test_a_port_that_linux_hands_out_itself_is_told(monkeypatch):
    least = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    assert checks.check_port([fact(0, variables={"MASTER_PORT": least})]).verdict == "warn"
    assert checks.check_port([fact(0, variables={"MASTER_PORT": "29500"})]).verdict == "ok"


@pytest.mark.parametrize(
    ("wanted", "names", "expected"),
    [
        (None, "lo docker0 virbr0 eth0 eth1", "eth0"),
        (None, "lo eth0 ib0", "ib0"),
        (None, "lo virbr0 docker0", "docker0"),
        (None, "virbr0 lo", "lo"),
        ("eth1", "lo eth0 eth1", "eth1"),
        ("=eth", "lo eth0 eth1", None),
        ("=eth1", "lo eth10 eth1", "eth1"),
        ("^eth0,lo,docker", "lo docker0 eth0 eth1", "eth1"),
        ("ib", "lo eth0", None),
    ],
)
def test_the_interface_of_nccl_is_found_in_its_own_order(monkeypatch, wanted, names, expected):
    monkeypatch.setattr(
        facts, "interfaces", lambda: {name: f"address of {name}" for name in names.split()}
    )
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if wanted:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", wanted)
    assert facts.own_address("nccl") == (
        expected or wanted,
        expected and f"address of {expected}",
    )


def test_bus_bandwidth_is_what_the_ring_sends():
    assert all_reduce.bandwidth(1e9, 1.0, 2) == 1e9 and all_reduce.bandwidth(1e9, 0.5, 4) == 3e9


def test_each_rank_of_a_ring_sends_what_the_bandwidth_counts():
    """A ring of n ranks, played: each chunk is summed on its way around, and then goes around as a
    sum.
    """
    for n in (2, 3, 8):
        # n chunks on each rank
        values = [[rank * 10 + chunk for chunk in range(n)] for rank in range(n)]
        sums = [sum(column) for column in zip(*values, strict=True)]
        sent = 0  # chunks, by rank 0
        for turn in range(2 * (n - 1)):
            moving = [
                (rank, (rank - turn) % n, values[rank][(rank - turn) % n]) for rank in range(n)
            ]
            for rank, chunk, value in moving:
                sent += rank == 0
                there = values[(rank + 1) % n]
                there[chunk] = there[chunk] + value if turn < n - 1 else value
        assert values == [sums] * n, "an all_reduce"
        size = 6000 * n
        seconds = 0.5
        assert all_reduce.bandwidth(size, seconds, n) == pytest.approx(sent * 6000 / seconds)


def test_an_all_reduce_is_timed_per_call_and_by_its_bytes(monkeypatch):
    """A call takes 1 ms per MiB, and the first one a second more."""
    now = 0.0
    sizes = []

    def take_time(tensor, group=None, original=torch.distributed.all_reduce):
        nonlocal now
        now += tensor.nbytes / 2**20 / 1000 + (0 if sizes else 1)
        sizes.append(tensor.nbytes)
        return original(tensor)

    monkeypatch.setattr(all_reduce.dist, "all_reduce", take_time)
    monkeypatch.setattr(all_reduce.time, "perf_counter", lambda: now)
    monkeypatch.setattr(all_reduce, "SIZES", (2**20, 2**23))
    pulse = SimpleNamespace(at=lambda stage: None)
    times = all_reduce.measure(pulse, torch.distributed.HashStore(), 0, 1, torch.device("cpu"))
    assert times == [(2**20, pytest.approx(0.001)), (2**23, pytest.approx(0.008))]
    assert sizes.count(2**20) == 1 + 1, "half a second in all, and the first call took longer"
    assert sizes.count(2**23) == 1 + 20, "20 at most"


def test_the_report_tells_ms_and_gb_per_second():
    """Of four ranks: 64 MiB in 100 ms.

    The gradients of ResNet-50 take as much longer as they are larger.
    """
    times = [(4096, 0.00025), (2**26, 0.1)]
    ranks = [fact(rank) for rank in range(4)]
    with torch.device("meta"):
        gradients = sum(weight.nbytes for weight in torchvision.models.resnet50().parameters())
    check = checks.check_all_reduce(all_reduce.Outcome(times, None, {}, []), ranks)
    expected = (
        f"the gradients of ResNet-50 ({gradients / 1e6:.0f} MB) take "
        f"{100 * gradients / 2**26:.1f} ms"
    )
    assert (check.verdict, check.found) == ("ok", expected)
    shown = show.as_text(ranks, {0: 0.0, 1: -0.26}, [check], times)
    assert re.search(r"^4 KiB +0\.25 ms +0\.02 GB/s$", shown, re.M)  # 4096 bytes * 1.5 / 0.25 ms
    assert re.search(r"^64 MiB +100\.00 ms +1\.01 GB/s$", shown, re.M)
    assert (
        re.search(r"^1 +n0 .* -0\.3 s +2$", shown, re.M)
        and "preflight: 0 of 1 checks failed, 0 with" in shown
    )
    heads = r"rank +host +pid +device +listens at +torch +NCCL +code +clock +threads"
    assert re.match(heads, shown)
    assert json.loads(show.as_json(ranks, {"1": -0.26}, [check], times))["clocks"] == {"1": -0.26}
    speeds = json.loads(show.as_json(ranks, {}, [check], times))["all_reduce"]
    assert speeds[1] == {
        "bytes": 2**26,
        "seconds": 0.1,
        "bus_bandwidth": pytest.approx(1.5 * 2**26 / 0.1),
    }


def test_the_facts_of_a_rank_are_those_of_psutil(monkeypatch):
    usage = {"/dev/shm": SimpleNamespace(total=2**33, used=5 * 2**30, free=3 * 2**30)}
    monkeypatch.setattr(facts.shutil, "disk_usage", usage.get)
    told = facts.facts("python", ALONE)
    process = psutil.Process()
    assert told["cores"] == sorted(process.cpu_affinity()) and told["pid"] == process.pid
    assert told["threads"] == torch.get_num_threads()
    assert told["shared_memory"] in (3 * 2**30, None)  # None: a system without it
    addresses = {
        name: next((a.address for a in found if a.family == socket.AF_INET), None)
        for name, found in psutil.net_if_addrs().items()
    }
    assert told["interfaces"] == {name: address for name, address in addresses.items() if address}
    check = checks.check_shared_memory([fact(0), fact(1, shared_memory=int(1.5 * 2**30))])
    assert (check.verdict, check.found) == ("ok", "1.5 GiB or more")


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [("rank", "host"), (123456, "a"), (2, "")]
    assert show.columns(rows) == ["rank    host", "123456  a", "2"]


def test_devices_that_fit_are_named_by_their_kind():
    on_gpus = [fact(rank, device=f"cuda:{rank % 2}", backend="nccl", gpus=2) for rank in range(4)]
    for ranks, kind in (([fact(0)], "CPU"), (on_gpus, "GPU")):
        check = checks.check_devices(ranks)
        assert (check.verdict, check.found) == ("ok", f"a {kind} for each rank")


def test_ranks_that_make_no_progress_are_named_with_what_to_try():
    ranks = [fact(rank) for rank in range(2)]
    stages = {0: "done", 1: "all_reduce of 1 MiB"}
    check = checks.check_all_reduce(all_reduce.Outcome(None, None, stages, []), ranks)
    assert check.verdict == "FAIL" and "rank 1 on n0, last at all_reduce of 1 MiB" in check.found
    assert check.change == "NCCL_DEBUG=INFO; on one machine try NCCL_P2P_DISABLE=1"


def test_a_pulse_writes_what_its_process_is_doing(monkeypatch):
    monkeypatch.setattr(messages, "PULSE", 0.01)
    store = torch.distributed.HashStore()
    pulse = messages.Pulse(store, 3)
    pulse.at("connecting")
    seen = set()
    while len(seen) < 5:
        seen.add(store.get("pulse 3").decode())
    assert {text.split(" ", 1)[1] for text in seen} <= {"start", "connecting"}
    assert pulse.daemon, "a process does not wait for it"


def test_rank_0_watches_until_its_measurement_ends(monkeypatch):
    monkeypatch.setattr(all_reduce, "PULSE", 0.01)
    store = torch.distributed.HashStore()
    messages.Pulse(store, 0)
    assert all_reduce.watch(store, 1, lambda: [(4096, 0.1)]).times == [(4096, 0.1)]

    def fail():
        raise RuntimeError("no network")

    monkeypatch.setattr(messages, "SILENCE", 0.1)
    outcome = all_reduce.watch(store, 1, fail)
    assert outcome.times is None and str(outcome.error) == "no network" and outcome.silent == []


def test_a_machine_connects_to_the_listeners_of_others():
    threads = threading.enumerate()
    listener = network.Listener("n1", "127.0.0.1")
    for thread in threading.enumerate():
        assert thread in threads or thread.daemon, "the process does not wait for a listener"
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


def test_the_code_differs_if_a_file_of_any_folder_does(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    hashes = {facts.code_hash()}
    for folder in (".", "common", "imagenet", "launch", "machine_checks"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.py").write_text(folder)
        hashes.add(facts.code_hash())
    assert len(hashes) == 6


def test_preflight_takes_no_beginning_of_a_flag(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["preflight.py", "--js"])
    with pytest.raises(SystemExit):
        preflight.parse_args()
    assert "unrecognized arguments: --js" in capsys.readouterr().err
