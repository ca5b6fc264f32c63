"""What preflight says about GPUs, Xid errors and InfiniBand, from recorded answers."""

import os
import re
import signal
import socket
import time

import pytest
from health_records import (
    GTX_1070,
    L4,
    MIG,
    MISMATCH,
    NOT_ALLOWED,
    OTHER_LINES,
    XID_14,
    XID_31,
    XID_63,
    XID_79,
    XID_94,
    XID_95,
    answer,
)
from processes import ROOT
from ranks import Ranks
from test_preflight import assert_verdicts, fact, failed, report_of

from launch.checks import commands, gpu_health, infiniband, xids

SECOND = L4.replace("00000000:01:00.0", "00000000:3b:00.0").replace("c5533cd4", "0d1e0000")


def install(folder, name, output="", code=0, more=""):
    """Write an executable that prints a text and fails with a code."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.txt").write_text(output)
    program = folder / name
    program.write_text(f"#!/bin/sh\ncat '{folder / name}.txt'\n{more}\nexit {code}\n")
    program.chmod(0o755)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder in front of PATH: install() writes into it."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "bin"


# GPU health


@pytest.fixture
def health(programs):
    """A function that returns the Check of a machine on which nvidia-smi prints this."""

    def health(*gpus, output=None, **options):
        install(programs, "nvidia-smi", output or answer(*gpus), **options)
        told = gpu_health.ask_nvidia_smi()
        return gpu_health.check_gpu_health([fact(0, gpu_health=told), fact(1)])

    return health


def test_a_sick_gpu_is_named_with_what_to_do(health):
    asks = "the driver asks for this recovery"
    worn = "its memory has more errors than it can replace"
    waits = "a repair waits for the next reset"
    since = "uncorrected memory error(s) since the driver started"
    slow = "slowed down, {} ({}): 45 C, 2040 MHz of 2040 MHz".format
    drain = "<gpu_recovery_action>Drain P2P</gpu_recovery_action><temperature>"
    repair = "<{0}>Yes</{0}></ecc_errors>".format  # of newer drivers
    lost = "nvidia-smi reports '{}' instead of a value".format
    faults = [
        ("<temperature>", drain, "FAIL", f"{asks}: Drain P2P"),
        ("<reset_required>No", "<reset_required>Yes", "FAIL", f"{asks}: Reset"),
        ("<remapped_row_failure>No", "<remapped_row_failure>Yes", "FAIL", worn),
        ("<sram_threshold_exceeded>No", "<sram_threshold_exceeded>Yes", "FAIL", worn),
        ("<dram_uncorrectable>0<", "<dram_uncorrectable>2<", "warn", f"2 {since}"),
        ("<remapped_row_pending>No", "<remapped_row_pending>Yes", "warn", waits),
        ("<pending_retirement>N/A", "<pending_retirement>Yes", "warn", waits),
        ("</ecc_errors>", repair("channel_repair_pending"), "warn", waits),
        ("</ecc_errors>", repair("tpc_repair_pending"), "warn", waits),
        ("</ecc_errors>", repair("unrepairable_memory"), "FAIL", worn),
        ("45 C", "GPU requires reset", "FAIL", lost("GPU requires reset")),
        ("2040 MHz", "[Unknown Error]", "FAIL", lost("[Unknown Error]")),
        ("Enabled</current", "ERR!</current", "FAIL", lost("ERR!")),
    ]
    for name, why in gpu_health.SLOWDOWNS.items():
        reason = f"<clocks_event_reason_{name}>"
        faults.append((f"{reason}Not ", reason, "warn", slow(why, name)))
    second = "n0, GPU 0000:3b:00.0"
    rows = [
        (health(L4, SECOND.replace(before, after, 1)), verdict, f"{second}: {found}", "n0")
        for before, after, verdict, found in faults
    ]
    reboot = health(L4.replace("<temperature>", drain.replace("Drain P2P", "Reboot")))
    assert_verdicts((reboot, "FAIL", f"{asks}: Reboot", "reboot n0"))
    assert reboot.change == "reboot n0"
    waiting = L4.replace("pending>No", "pending>Yes")
    both = health(waiting, SECOND.replace("failure>No", "failure>Yes"))
    assert_verdicts(*rows, (both, "FAIL", f"{second}: {worn} (and 1 more)", "leave n0 out"))


def test_healthy_gpus_are_described_whatever_they_do_not_know(health):
    """A busy GPU stays at its power limit. Memory that was replaced is as good as new."""
    cap = "<clocks_event_reason_sw_power_cap>"
    ever = "<dram_uncorrectable>4<".join(L4.rsplit("<dram_uncorrectable>0<", 1))
    busy = ever.replace(f"{cap}Not ", cap).replace("2040", "1980")
    first = SECOND.replace("45 C", "51 C")
    process = "<processes><process_name>a && b < c</process_name></processes></gpu>"
    two = "2 GPU(s), 45 to 51 C, 1980 to 2040 MHz, 4 uncorrected memory error(s) ever counted"
    old = "2 GPU(s), 49 C, 480 MHz, memory errors are not counted (no ECC)"
    nobody = gpu_health.check_gpu_health([fact(0), fact(1)])
    assert_verdicts(
        (health(first, busy), "ok", two, ""),
        (health(GTX_1070, MIG), "ok", old, ""),
        (health(L4.replace("</gpu>", process)), "ok", "1 GPU(s), 45 C", ""),
        (nobody, "ok", "no NVIDIA GPU is used", ""),
    )


def test_older_drivers_and_gpus_have_other_names(health):
    reason = "<clocks_throttle_reason_sw_thermal_slowdown>"
    hot = GTX_1070.replace(f"{reason}Not ", reason)
    counted = GTX_1070.replace("<total>N/A</total></double", "<total>5</total></double", 1)
    assert_verdicts(
        (health(hot), "warn", "too hot (sw_thermal_slowdown): 49 C", "n0"),
        (health(counted), "warn", "5 uncorrected memory error(s) since", "n0"),
    )


def test_an_nvidia_smi_that_fails_is_one_line(health, monkeypatch, tmp_path):
    lost = "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error"
    reboot = "reboot n0, or leave it out: sbatch --exclude=n0"
    broken = "<nvidia_smi_log><gpu></nvidia_smi_log>"
    failures = [
        (health(output=f"{output}\n", code=code), output.splitlines()[0])
        for code, output in [MISMATCH, (3, broken), (0, f"{lost}\n{answer(L4)}")]
    ]
    assert_verdicts(
        *((check, "FAIL", f"n0: nvidia-smi: {line}", reboot) for check, line in failures),
        (health(output="\n", code=3), "FAIL", "n0: nvidia-smi: exit code 3, no output", reboot),
    )
    said = "WARNING: infoROM is corrupted at gpu 0000:0B:00.0"
    warning = health(output=f"{answer(L4)}{said}\n", code=14)
    assert_verdicts(
        (health(L4, code=15), "FAIL", "n0: nvidia-smi: exit code 15", reboot),
        (health(L4, code=4), "warn", "n0: nvidia-smi: exit code 4", "nvidia-smi -q on n0"),
        (warning, "warn", f"n0: nvidia-smi: exit code 14, {said}", "if it stays, leave n0 out"),
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    nothing = gpu_health.check_gpu_health([fact(0, gpu_health=gpu_health.ask_nvidia_smi())])
    change = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    assert_verdicts((nothing, "warn", "n0: nvidia-smi is not installed", change))


def test_an_nvidia_smi_that_hangs_is_not_waited_for(health, monkeypatch):
    """Even if it cannot be killed, as a process that waits for a broken driver."""
    monkeypatch.setattr(gpu_health, "PATIENCE", 0.3)
    processes = []
    monkeypatch.setattr(commands.subprocess.Popen, "kill", lambda it: processes.append(it))
    start = time.monotonic()
    check = health(more="exec sleep 30")
    assert time.monotonic() - start < 10
    assert_verdicts((check, "warn", "n0: nvidia-smi did not answer within 0.3 s", "reboot n0"))
    processes[0].send_signal(9)
    processes[0].communicate()


def test_only_the_gpus_of_the_job_are_judged(programs):
    """Torch writes the name of a GPU without GPU-, and gives MIG devices names of their own."""
    install(programs, "nvidia-smi", answer(L4, SECOND.replace("pending>No", "pending>Yes")))
    told = gpu_health.ask_nvidia_smi()
    first = "c5533cd4-5a60-059e-348d-b6d7466932e4"
    for device, verdict in ((first, "ok"), ("MIG-1", "warn"), (None, "warn")):
        ranks = [fact(0, gpu_health=told, device_id=device), fact(2, device_id="0d1e")]
        assert gpu_health.check_gpu_health(ranks).verdict == verdict, device
    ranks = [fact(0, gpu_health=told, device_id=first), fact(1, problem="its GPU fails")]
    assert gpu_health.check_gpu_health(ranks).verdict == "warn", "it may be the second GPU"


# Xid errors


def test_the_worst_xid_is_named_with_its_gpu_and_what_to_do(programs, monkeypatch):
    def check(*lines, code=0):
        install(programs, "dmesg", "\n".join(lines) + "\n", code=code)
        return xids.check_xids([fact(0, xids=xids.ask_kernel()), fact(1)])

    # Three hours after the first line of 79, ten minutes after the last
    monkeypatch.setattr(xids.time, "monotonic", lambda: 1843.3 + 3 * 3600)
    again = XID_79.replace("1843.3", "12043.3")
    worst = "n0, GPU 0000:44:00: Xid 79 (the GPU has fallen off the bus)"
    reboot = "reboot n0; if it comes back, leave n0 out (sbatch --exclude=n0)"
    assert_verdicts(
        (check(XID_63, OTHER_LINES, XID_79, XID_31), "warn", f"{worst}, 3 h ago (and 1", reboot),
        (check(XID_14, XID_79, again), "warn", f"{worst}, 2 times, 10 min ago (and 1", reboot),
        (check(XID_14), "warn", "GPU 0000:03:00: Xid 14 (not listed here)", xids.CATALOGUE),
        (check(XID_94), "warn", "n0, GPU 0000:01:00: Xid 94 (contained", "start the job again"),
        (check(OTHER_LINES), "ok", "none in the kernel's log", ""),
        (check(XID_31), "ok", "none that points to hardware: 31", ""),
        (check(NOT_ALLOWED, code=1), "ok", f"not known on n0 ({NOT_ALLOWED}): sudo dmesg", ""),
    )
    monkeypatch.setenv("PATH", str(programs))
    (programs / "dmesg").unlink()
    missing = xids.check_xids([fact(0, xids=xids.ask_kernel())])
    assert_verdicts((missing, "ok", "not known on n0 (dmesg is not installed)", ""))


# InfiniBand


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
    """Run preflight as two ranks on a machine with made GPUs and adapters.

    Returns:
        what rank 0 prints, and the name of the host.
    """
    (folder / "gpus/0000:01:00.0").mkdir(parents=True)
    env = {"FAKE_MACHINE": folder} | variables
    env["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ranks = Ranks(folder, 2, [], env=env, script="tests/helpers/faked_preflight.py")
    assert ranks.wait() == codes, ranks.output()
    assert "Traceback" not in ranks.output() + ranks.output(1)
    # Only one rank asks the programs of a machine.
    assert (folder / "calls").read_text() == "asked\n" * 2
    return ranks.output(), socket.gethostname()


def test_preflight_names_what_is_wrong_on_a_machine_and_on_a_rank(adapters):
    """It asks the programs of the machine. The page shows what it prints of them."""
    counts = f"echo asked >> '{adapters / 'calls'}'"
    sick = SECOND.replace("failure>No", "failure>Yes")
    install(adapters / "bin", "nvidia-smi", answer(L4, sick), more=counts)
    xid = XID_95.replace("0000:01:00", "0000:3b:00").partition("] ")[2]  # which has no time
    install(adapters / "bin", "dmesg", f"{XID_31}\n{xid}\n", more=counts)
    output, host = preflight(adapters, [1, 0], FAKE="machine,torch,code,clock")
    found = report_of(output)
    assert list(failed(output)) == ["versions", "code", "clocks", "GPU health"], output
    assert failed(output)["versions"].endswith("; torch 2.6.0+cu124 on rank 1")
    assert failed(output)["code"].endswith(" on rank 0; 0badc0de on rank 1")
    assert failed(output)["clocks"] == f"rank 1 on {host} is 20 s ahead of rank 0"
    page = (ROOT / "docs/health.md").read_text()
    shown = re.search(r"^FAIL  GPU health.*?(?=^warn  InfiniBand)", page, re.M | re.S)[0]
    assert shown.replace("node7", host).replace(", 3 h ago", "") in output
    assert found["InfiniBand"][1].startswith(f"{host}: only 64 KiB may be locked in memory")
    assert found["all_reduce"][0] == "ok", "the failures are none of the network"
    assert f"preflight: 4 of {len(found)} checks failed" in output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_that_fails_when_first_used_is_a_line(adapters, rank):
    """The programs of its machine are asked, and all its GPUs are judged."""
    counts = f"echo asked >> '{adapters / 'calls'}'"
    sick = SECOND.replace("failure>No", "failure>Yes")
    install(adapters / "bin", "nvidia-smi", answer(L4, sick), more=counts)
    install(adapters / "bin", "dmesg", f"{XID_95}\n", more=counts)
    output, host = preflight(adapters, [1, 0], FAKE="machine,broken GPU", FAKE_RANK=str(rank))
    fails = failed(output)
    assert list(fails) == ["devices", "GPU health"], output
    error = "its GPU fails: CUDA error: uncorrectable ECC error encountered: expected"
    assert fails["devices"].startswith(f"rank {rank} on {host}: {error}")
    assert "Xid 95" in report_of(output)["Xid errors"][1]


def test_preflight_waits_neither_for_programs_that_hang_nor_for_a_dead_rank(adapters):
    for name in ("nvidia-smi", "dmesg"):
        more = f"echo asked >> '{adapters / 'calls'}'; exec sleep 100"
        install(adapters / "bin", name, more=more)
    patience = {"FAKE_PATIENCE": "0.5", "FAKE_SILENCE": "2"}
    output, host = preflight(adapters, [1, -signal.SIGKILL], FAKE="machine,killed", **patience)
    found = report_of(output)
    missing = f"rank 1 of 2 did not answer within 2 s ({host} has rank 0)"
    assert failed(output) == {"ranks": missing}, output
    assert found["GPU health"][0] == "warn" and "did not answer within" in found["GPU health"][1]
    assert found["Xid errors"][0] == "ok" and "(dmesg did not answer)" in found["Xid errors"][1]
    assert found["all_reduce"] == ("warn", "not measured, because a check above failed")
