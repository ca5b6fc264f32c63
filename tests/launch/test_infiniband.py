"""What preflight says about InfiniBand, from made answers of /sys, and about a rank that fails."""

import signal
import socket

import pytest
from ranks import Ranks
from test_preflight import assert_verdicts, fact, failed, report_of

from launch.checks import infiniband


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """A machine with one InfiniBand adapter of two ports, on which NCCL can use the first."""
    for name, folder in (("ADAPTERS", "class"), ("DEVICES", "dev"), ("STATUS", "status")):
        monkeypatch.setattr(infiniband, name, tmp_path / folder)
    monkeypatch.setattr(infiniband, "LIBRARY", "libc.so.6")  # any that every machine has
    monkeypatch.setattr(infiniband.resource, "getrlimit", lambda _: (infiniband.MEMLOCK, -1))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/uverbs0").touch()
    (tmp_path / "status").write_text("CapPrm:\t000001fffeffffff\nCapEff:\t0000000000000000\n")
    states = (1, "4: ACTIVE", "200 Gb/sec (4X HDR)"), (2, "1: DOWN", "40 Gb/sec (4X QDR)")
    for port, state, rate in states:
        folder = tmp_path / f"class/mlx5_0/ports/{port}"
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")
        (folder / "rate").write_text(rate + "\n")
    return tmp_path


def test_what_makes_nccl_use_tcp_in_silence_is_named(adapters, monkeypatch):
    """A port without a cable is DOWN on every machine."""

    def both(disable="0", **change):  # the second machine differs
        ours = infiniband.infiniband_facts()
        more = {"variables": {"NCCL_IB_DISABLE": disable}}
        ranks = [fact(0, infiniband=ours, **more), fact(2, infiniband=ours | change, **more)]
        return infiniband.check_infiniband(ranks)

    slower = {"mlx5_0:1": "ACTIVE, 100 Gb/sec (2X HDR)"}
    speeds = "ACTIVE, 200 Gb/sec (4X HDR) on n0; ACTIVE, 100 Gb/sec (2X HDR) on n1"
    second = infiniband.infiniband_facts()["ports"] | {"mlx5_1:1": "ACTIVE, 200 Gb/sec (4X HDR)"}
    missing = "mlx5_1:1 is missing on n0; ACTIVE, 200 Gb/sec (4X HDR) on n1"
    disabled = both(ports={}, disable="1")
    assert_verdicts(
        (both(), "ok", "ACTIVE, 200 Gb/sec (4X HDR); DOWN, 40 Gb/sec (4X QDR)", ""),
        (both(ports=slower), "warn", f"mlx5_0:1 is {speeds}", "ibstat"),
        (both(ports=second), "warn", missing, "ibstat"),
        (both(ports={}), "warn", "n1: no adapter, while another machine has", "NCCL_IB_DISABLE=1"),
        (disabled, "ok", "not used, because NCCL_IB_DISABLE=1", ""),
    )
    monkeypatch.setattr(infiniband.resource, "getrlimit", lambda _: (2**16, 2**16))
    little = both()
    (adapters / "status").write_text("CapEff:\t0000000000004000\n")
    root = both()
    monkeypatch.setattr(infiniband, "LIBRARY", "libmissing.so.1")
    library = both()
    (adapters / "dev/uverbs0").unlink()
    devices = both()
    (adapters / "class/mlx5_0/ports/1/state").write_text("2: INIT\n")
    ports = "mlx5_0:1 INIT, 200 Gb/sec (4X HDR); mlx5_0:2 DOWN, 40 Gb/sec (4X QDR)"
    assert_verdicts(
        (little, "warn", "n0: only 64 KiB may be locked in memory", "memlock=-1"),
        (root, "ok", "ACTIVE", ""),  # to whom no limit applies
        (library, "warn", "n0: libmissing.so.1 cannot be loaded", "libibverbs1"),
        (devices, "warn", f"n0: no {infiniband.DEVICES}/uverbs*", "--device=/dev"),
        (both(), "warn", f"n0: no port is ACTIVE ({ports}) (and 1 more)", "ibstat"),
    )
    monkeypatch.setattr(infiniband, "ADAPTERS", adapters / "missing")
    assert_verdicts((both(), "ok", "no InfiniBand or RoCE adapter", ""))


# Preflight itself


def preflight(folder, codes, **variables):
    """Run preflight as two ranks on a machine with made adapters.

    Returns:
        what rank 0 prints, and the name of the host.
    """
    env = {"FAKE_MACHINE": folder} | variables
    ranks = Ranks(folder, 2, [], env=env, script="tests/helpers/faked_preflight.py")
    assert ranks.wait() == codes, ranks.output()
    assert "Traceback" not in ranks.output() + ranks.output(1)
    return ranks.output(), socket.gethostname()


def test_preflight_names_what_is_wrong_on_a_machine_and_on_a_rank(adapters):
    output, host = preflight(adapters, [1, 0], FAKE="machine,torch,code,clock")
    found = report_of(output)
    assert list(failed(output)) == ["versions", "code", "clocks"], output
    assert failed(output)["versions"].endswith("; torch 2.6.0+cu124 on rank 1")
    assert failed(output)["code"].endswith(" on rank 0; 0badc0de on rank 1")
    assert failed(output)["clocks"] == f"rank 1 on {host} is 20 s ahead of rank 0"
    assert found["InfiniBand"][1].startswith(f"{host}: only 64 KiB may be locked in memory")
    assert found["all_reduce"][0] == "ok", "the failures are none of the network"
    assert f"preflight: 3 of {len(found)} checks failed" in output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_that_fails_when_first_used_is_a_line(adapters, rank):
    output, host = preflight(adapters, [1, 0], FAKE="machine,broken GPU", FAKE_RANK=str(rank))
    fails = failed(output)
    assert list(fails) == ["devices"], output
    error = "its GPU fails: CUDA error: uncorrectable ECC error encountered: expected"
    assert fails["devices"].startswith(f"rank {rank} on {host}: {error}")


def test_preflight_does_not_wait_for_a_dead_rank(adapters):
    given = {"FAKE": "machine,killed", "FAKE_SILENCE": "2"}
    output, host = preflight(adapters, [1, -signal.SIGKILL], **given)
    missing = f"rank 1 of 2 did not answer within 2 s ({host} has rank 0)"
    assert failed(output) == {"ranks": missing}, output
    assert report_of(output)["all_reduce"] == ("warn", "not measured, because a check above failed")
