"""What preflight says about GPUs, Xid errors and InfiniBand, from recorded answers."""

import os
import re
import time

import pytest
from health_records import (
    FAILURES,
    GTX_1070,
    L4,
    MIG,
    NOT_ALLOWED,
    OTHER_LINES,
    XID_14,
    XID_31,
    XID_63,
    XID_79,
    XID_95,
    answer,
)
from processes import ROOT
from ranks import Ranks
from test_preflight import fact, failed, verdicts

from machine_checks import checks, commands, facts, gpu_health, infiniband, show, xids

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


def health(programs, output, **options):
    """Return the Check of a machine on which nvidia-smi prints this."""
    install(programs, "nvidia-smi", output, **options)
    return gpu_health.check_gpu_health([fact(0, gpu_health=gpu_health.ask_nvidia_smi()), fact(1)])


# GPU health


def test_healthy_gpus_are_described_in_one_line(programs):
    check = health(programs, answer(L4, SECOND.replace("45 C", "51 C").replace("2040", "1980")))
    expected = "2 GPU(s), 45 to 51 C, 1980 to 2040 MHz, 0 uncorrected memory error(s) ever counted"
    assert check == ("GPU health", "ok", expected, "")


def test_machines_without_gpus_are_not_asked(programs):
    install(programs, "nvidia-smi", code=1)
    check = gpu_health.check_gpu_health([fact(0), fact(1)])
    assert (check.verdict, check.found) == ("ok", "no NVIDIA GPU is used")


EVENT = "clocks_event_reason_"
UNCORRECTED = "<dram_uncorrectable>0<"


@pytest.mark.parametrize(
    ("before", "after", "verdict", "found"),
    [
        ("<temperature>", "<gpu_recovery_action>Reset</gpu_recovery_action><temperature>", "FAIL",
         "the driver asks for this recovery: Reset"),
        ("<reset_required>No", "<reset_required>Yes", "FAIL",
         "the driver asks for this recovery: Reset"),
        ("<remapped_row_failure>No", "<remapped_row_failure>Yes", "FAIL",
         "its memory has more errors than it can replace"),
        ("<sram_threshold_exceeded>No", "<sram_threshold_exceeded>Yes", "FAIL",
         "its memory has more errors than it can replace"),
        (UNCORRECTED, "<dram_uncorrectable>2<", "warn",
         "2 uncorrected memory error(s) since the driver started"),
        ("<sram_uncorrectable_parity>0<", "<sram_uncorrectable_parity>3<", "warn",
         "3 uncorrected memory error(s) since the driver started"),
        ("<remapped_row_pending>No", "<remapped_row_pending>Yes", "warn",
         "broken memory is replaced at the next reset"),
        ("<pending_retirement>N/A", "<pending_retirement>Yes", "warn",
         "broken memory is replaced at the next reset"),
        (f"<{EVENT}hw_slowdown>Not ", f"<{EVENT}hw_slowdown>", "warn",
         "slowed down, hardware slowdown (hw_slowdown): 45 C, 2040 MHz of 2040 MHz"),
        (f"<{EVENT}hw_thermal_slowdown>Not ", f"<{EVENT}hw_thermal_slowdown>", "warn",
         "slowed down, too hot (hw_thermal_slowdown): 45 C, 2040 MHz of 2040 MHz"),
        (f"<{EVENT}sw_thermal_slowdown>Not ", f"<{EVENT}sw_thermal_slowdown>", "warn",
         "slowed down, too hot (sw_thermal_slowdown): 45 C, 2040 MHz of 2040 MHz"),
        (f"<{EVENT}hw_power_brake_slowdown>Not ", f"<{EVENT}hw_power_brake_slowdown>", "warn",
         "slowed down, power brake (hw_power_brake_slowdown): 45 C, 2040 MHz of 2040 MHz"),
    ],
)  # fmt: skip
def test_a_sick_gpu_is_named_with_what_to_do(programs, before, after, verdict, found):
    check = health(programs, answer(L4, SECOND.replace(before, after, 1)))
    assert (check.verdict, check.found) == (verdict, f"n0, GPU 0000:3b:00.0: {found}")
    assert "n0" in check.change and "{" not in check.change


def test_the_power_limit_and_errors_of_the_past_are_no_fault(programs):
    """A busy GPU stays at its power limit. Memory that was replaced is as good as new."""
    busy = L4.replace(f"<{EVENT}sw_power_cap>Not ", f"<{EVENT}sw_power_cap>")
    past = UNCORRECTED.replace("0", "4").join(busy.rsplit(UNCORRECTED, 1))
    check = health(programs, answer(past))
    assert check.verdict == "ok" and "4 uncorrected memory error(s) ever counted" in check.found


def test_older_drivers_and_gpus_have_other_names(programs):
    reason = "clocks_throttle_reason_sw_thermal_slowdown"
    check = health(programs, answer(GTX_1070.replace(f"<{reason}>Not ", f"<{reason}>")))
    assert (check.verdict, "too hot (sw_thermal_slowdown): 49 C" in check.found) == ("warn", True)
    counted = GTX_1070.replace("<total>N/A</total></double", "<total>5</total></double", 1)
    assert "5 uncorrected memory error(s) since" in health(programs, answer(counted)).found


def test_what_a_gpu_does_not_know_is_no_fault(programs):
    check = health(programs, answer(GTX_1070, MIG))
    expected = "2 GPU(s), 49 C, 480 MHz, memory errors are not counted (no ECC)"
    assert (check.verdict, check.found) == ("ok", expected)


@pytest.mark.parametrize(("code", "output"), FAILURES)
def test_a_failure_of_nvidia_smi_is_one_line(programs, code, output):
    check = health(programs, output + "\n", code=code)
    assert check.verdict == "FAIL" and check.found == f"n0: nvidia-smi: {output.splitlines()[0]}"
    assert check.change == "reboot n0, or leave it out: sbatch --exclude=n0"


@pytest.mark.parametrize(
    ("output", "found"),
    [("", "exit code 3, no output"), ("<nvidia_smi_log><gpu></nvidia_smi_log>", "<nvidia_smi_log")],
)
def test_an_answer_that_nobody_can_read_is_a_failure(programs, output, found):
    check = health(programs, output, code=3)
    assert check.verdict == "FAIL" and check.found.startswith(f"n0: nvidia-smi: {found}")


def test_a_lost_gpu_is_named_beside_those_that_answer(programs):
    lost = "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error"
    check = health(programs, f"{lost}\n{answer(L4)}")
    assert (check.verdict, check.found) == ("FAIL", f"n0: nvidia-smi: {lost}")
    sick = L4.replace("<reset_required>No", "<reset_required>Yes")
    assert health(programs, f"{lost}\n{answer(sick)}").found.endswith(" (and 1 more)")


def test_a_warning_of_nvidia_smi_beside_its_answer_does_not_hide_it(programs):
    warning = "WARNING: infoROM is corrupted at gpu 0000:0B:00.0\n"
    assert health(programs, answer(L4) + warning, code=14).verdict == "ok"


def test_without_nvidia_smi_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    check = gpu_health.check_gpu_health([fact(0, gpu_health=gpu_health.ask_nvidia_smi())])
    assert (check.verdict, check.found) == (
        "warn",
        "n0: nvidia-smi is not installed, so nothing is known of its GPUs",
    )
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in check.change


def test_an_nvidia_smi_that_hangs_is_not_waited_for(programs, monkeypatch):
    """Even if it cannot be killed, as a process that waits for a broken driver."""
    monkeypatch.setattr(gpu_health, "PATIENCE", 0.3)
    processes = []
    monkeypatch.setattr(commands.subprocess.Popen, "kill", lambda it: processes.append(it))
    start = time.monotonic()
    check = health(programs, "", more="exec sleep 30")
    assert time.monotonic() - start < 10
    assert (check.verdict, check.found) == ("warn", "n0: nvidia-smi did not answer within 0.3 s")
    processes[0].send_signal(9)
    processes[0].communicate()


def test_the_name_of_a_process_may_be_anything(programs):
    """nvidia-smi prints it as it is."""
    process = "<processes><process_name>a && b < c</process_name></processes></gpu>"
    assert health(programs, answer(L4.replace("</gpu>", process))).verdict == "ok"


def test_only_the_gpus_of_the_job_are_judged(programs):
    """Torch writes the name of a GPU without GPU-, and gives MIG devices names of their own."""
    install(programs, "nvidia-smi", answer(L4, SECOND.replace("pending>No", "pending>Yes")))
    told = gpu_health.ask_nvidia_smi()
    first = "c5533cd4-5a60-059e-348d-b6d7466932e4"
    for device, verdict in ((first, "ok"), ("MIG-1", "warn"), (None, "warn")):
        ranks = [fact(0, gpu_health=told, device_id=device), fact(2, device_id="0d1e")]
        assert gpu_health.check_gpu_health(ranks).verdict == verdict, device


def test_a_driver_of_another_version_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_health, "DRIVER", tmp_path / "version")
    assert gpu_health.driver_version() is None
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build"
    (tmp_path / "version").write_text(text)
    version = gpu_health.driver_version()
    same = checks.check_versions([fact(0, driver=version), fact(2, driver=version)])
    assert same.verdict == "ok" and same.found.endswith("driver 550.54.15 everywhere")
    check = checks.check_versions([fact(0, driver=version), fact(2, driver="535.161.08")])
    expected = "driver 550.54.15 on rank 0; driver 535.161.08 on rank 2"
    assert (check.verdict, check.found) == ("warn", expected)


# Xid errors


def xid_check(programs, *lines, code=0):
    install(programs, "dmesg", "\n".join(lines) + "\n", code=code)
    return xids.check_xids([fact(0, xids=xids.ask_kernel()), fact(1)])


def test_the_worst_xid_is_named_with_its_gpu_and_what_to_do(programs, monkeypatch):
    monkeypatch.setattr(xids.time, "monotonic", lambda: 1843.3 + 3 * 3600)
    check = xid_check(programs, XID_63, OTHER_LINES, XID_79, XID_79, XID_31)
    assert (check.verdict, check.found) == (
        "warn",
        "n0, GPU 0000:44:00: Xid 79 (the GPU has fallen off the bus), 2 times, 3 h ago "
        "(and 1 more)",
    )
    assert check.change == "reboot n0; if it comes back, leave n0 out (sbatch --exclude=n0)"


def test_xids_of_programs_and_silent_logs_are_no_fault(programs):
    assert xid_check(programs, OTHER_LINES).found == "none in the kernel's log"
    check = xid_check(programs, XID_31)
    assert (check.verdict, check.found) == ("ok", "none that points to hardware: 31")


def test_an_xid_that_is_not_in_the_table_has_the_address_of_the_catalogue(programs):
    check = xid_check(programs, XID_14)
    assert check.verdict == "warn" and "GPU 0000:03:00: Xid 14 (not listed here)" in check.found
    assert check.change == f"see {xids.CATALOGUE}"


def test_a_log_that_only_root_may_read_is_no_fault(programs, monkeypatch, tmp_path):
    check = xid_check(programs, NOT_ALLOWED, code=1)
    expected = f"not known on n0 ({NOT_ALLOWED}): sudo dmesg | grep Xid"
    assert (check.verdict, check.found) == ("ok", expected)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = xids.check_xids([fact(0, xids=xids.ask_kernel())])
    assert check.verdict == "ok" and "(dmesg is not installed)" in check.found


@pytest.mark.parametrize(
    ("seconds", "words"), [(-1, "0 min ago"), (600, "10 min ago"), (3e5, "3 days ago")]
)
def test_the_age_of_an_xid_is_told_in_words(seconds, words):
    assert xids.ago(seconds) == words
    [error] = xids.read_log(XID_95, 16450076.435595 + seconds)
    assert (error["number"], error["bus"]) == (95, "0000:01:00")
    assert error["age"] == pytest.approx(seconds)


def test_the_page_lists_the_xids_of_the_code():
    for page in ("docs/health.md", "docs/zh/health.md"):
        rows = re.findall(r"^\| ([\d, ]+) \|", (ROOT / page).read_text(), re.M)
        numbers = {int(number) for row in rows for number in row.split(",")}
        assert numbers == {*xids.HARDWARE, *xids.NOT_HARDWARE}, page


def test_the_page_shows_what_preflight_prints(programs):
    install(programs, "nvidia-smi", answer(L4, SECOND.replace("failure>No", "failure>Yes")))
    log = XID_95.replace("0000:01:00", "0000:3b:00")
    broken = {"ports": {"mlx5_0:1": "ACTIVE"}, "has_devices": True, "has_library": False}
    node7 = fact(
        0,
        host="node7",
        gpu_health=gpu_health.ask_nvidia_smi(),
        xids={"xids": xids.read_log(log, 16450076.4 + 3 * 3600), "problem": None},
        infiniband=broken,
    )
    done = [
        gpu_health.check_gpu_health([node7]),
        xids.check_xids([node7]),
        infiniband.check_infiniband([node7]),
    ]
    printed = "\n".join(show.as_text([node7], {}, done, None).splitlines()[3:-2])
    for page in ("docs/health.md", "docs/zh/health.md"):
        assert f"```text\n{printed}\n```" in (ROOT / page).read_text()


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
    for port, state, rate in (
        (1, "4: ACTIVE", "200 Gb/sec (4X HDR)"),
        (2, "1: DOWN", "40 Gb/sec (4X QDR)"),
    ):
        folder = tmp_path / f"class/mlx5_0/ports/{port}"
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")
        (folder / "rate").write_text(rate + "\n")
    return tmp_path


def both(*changes, **more):
    """Return the Check of two machines with the adapters of this one; changes are of the second."""
    ours = infiniband.infiniband_facts()
    second = ours | dict(changes)
    ranks = [fact(0, infiniband=ours, **more), fact(2, infiniband=second, **more)]
    return infiniband.check_infiniband(ranks)


def test_adapters_that_work_are_told_with_their_speed(adapters):
    """A port without a cable is DOWN on every machine."""
    check = both()
    expected = "ACTIVE, 200 Gb/sec (4X HDR); DOWN, 40 Gb/sec (4X QDR)"
    assert (check.verdict, check.found) == ("ok", expected)


def test_without_adapters_there_is_nothing_to_check(adapters, monkeypatch):
    monkeypatch.setattr(infiniband, "ADAPTERS", adapters / "missing")
    assert both().found == "no InfiniBand or RoCE adapter"


def test_ports_that_are_not_active_are_named(adapters):
    (adapters / "class/mlx5_0/ports/1/state").write_text("2: INIT\n")
    check = both()
    assert (check.verdict, check.found) == (
        "warn",
        "n0: no port is ACTIVE (mlx5_0:1 INIT, 200 Gb/sec (4X HDR); "
        "mlx5_0:2 DOWN, 40 Gb/sec (4X QDR)) (and 1 more)",
    )


def test_a_port_that_is_slower_on_one_machine_is_named(adapters):
    check = both(("ports", {"mlx5_0:1": "ACTIVE, 100 Gb/sec (2X HDR)"}))
    assert (check.verdict, check.found) == (
        "warn",
        "mlx5_0:1 is ACTIVE, 200 Gb/sec (4X HDR) on n0; ACTIVE, 100 Gb/sec (2X HDR) on n1",
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("ports", {}), "n1: no adapter, while another machine has one"),
        (("has_devices", False), "n1: no {}/uverbs*, so NCCL uses TCP"),
        (("has_library", False), "n1: libc.so.6 cannot be loaded, so NCCL uses TCP"),
    ],
)
def test_what_makes_nccl_use_tcp_in_silence_is_named(adapters, change, found):
    check = both(change)
    assert (check.verdict, check.found) == ("warn", found.format(infiniband.DEVICES))
    disabled = both(change, variables={"NCCL_IB_DISABLE": "1"})
    assert (disabled.verdict, disabled.found) == ("ok", "not used, because NCCL_IB_DISABLE=1")


def test_the_facts_of_an_adapter_are_read_from_the_machine(adapters, monkeypatch):
    ours = infiniband.infiniband_facts()
    assert (ours["has_devices"], ours["has_library"]) == (True, True)
    (adapters / "dev/uverbs0").unlink()
    monkeypatch.setattr(infiniband, "LIBRARY", "libmissing.so.1")
    ours = infiniband.infiniband_facts()
    assert (ours["has_devices"], ours["has_library"]) == (False, False)


def test_little_locked_memory_is_named_unless_no_limit_applies(adapters, monkeypatch):
    monkeypatch.setattr(infiniband.resource, "getrlimit", lambda _: (2**16, 2**16))
    check = both()
    assert check.verdict == "warn" and check.found.startswith(
        "n0: only 64 KiB may be locked in memory (ulimit -l), so NCCL may fail in ibv_reg_mr"
    )
    (adapters / "status").write_text("CapEff:\t0000000000004000\n")
    assert both().verdict == "ok", "no limit applies to root"


# Preflight itself


def preflight(folder, code, **variables):
    """Run preflight as two ranks on a machine with made GPUs and adapters. Return what it prints.

    Rank 0 ends with this code. Only one rank may ask the programs of a machine: they count calls.
    """
    (folder / "gpus/0000:01:00.0").mkdir(parents=True)
    env = {"FAKE": "machine", "FAKE_MACHINE": folder} | variables
    env["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ranks = Ranks(folder, 2, [], env=env, script="tests/helpers/faked_preflight.py")
    assert ranks.wait() == [code, 0], ranks.output()
    assert "Traceback" not in ranks.output() + ranks.output(1)
    assert (folder / "calls").read_text() == "asked\n" * 2
    return ranks.output()


def test_preflight_asks_the_programs_of_the_machine(adapters):
    counts = f"echo asked >> '{adapters / 'calls'}'"
    sick = SECOND.replace("failure>No", "failure>Yes")
    waits = L4.replace("pending>No", "pending>Yes")  # a warning, and it is not named first
    install(adapters / "bin", "nvidia-smi", answer(waits, sick), more=counts)
    install(adapters / "bin", "dmesg", f"{XID_31}\n{XID_95}\n", more=counts)
    output = preflight(adapters, code=1)
    found = verdicts(output)
    assert list(failed(output)) == ["GPU health"], output
    host = re.search(r"^0 +(\S+)", output, re.M)[1]
    assert found["GPU health"][1] == (
        f"{host}, GPU 0000:3b:00.0: its memory has more errors than it can replace (and 1 more)"
    )
    assert f"change this:   leave {host} out (sbatch --exclude={host}) and tell" in output
    assert found["Xid errors"][1].startswith(f"{host}, GPU 0000:01:00: Xid 95 (uncontained")
    assert found["InfiniBand"][1].startswith(f"{host}: only 64 KiB may be locked in memory")
    assert f"preflight: 1 of {len(found)} checks failed" in output


def test_preflight_does_not_wait_for_programs_that_hang(adapters):
    for name in ("nvidia-smi", "dmesg"):
        more = f"echo asked >> '{adapters / 'calls'}'; exec sleep 100"
        install(adapters / "bin", name, more=more)
    output = preflight(adapters, code=0, FAKE_PATIENCE="0.5")
    found = verdicts(output)
    assert not failed(output), output
    assert found["GPU health"][0] == "warn" and "did not answer within" in found["GPU health"][1]
    assert found["Xid errors"][0] == "ok" and "(dmesg did not answer)" in found["Xid errors"][1]


def test_gpus_that_are_hidden_are_not_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(facts, "NVIDIA", tmp_path)
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert facts.has_nvidia_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not facts.has_nvidia_gpus()
