"""Xid errors: what NVIDIA's driver has written into the kernel's log about broken GPUs."""

import re
import time

from launch.checks import commands
from launch.checks.verdicts import Check, worst

PATIENCE = 2  # seconds
LINE = re.compile(  # [ 4711.123456] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, ...
    r"(?:\[ *(?P<seconds>\d+\.\d+)\].*)?NVRM: Xid \((?:PCI:)?(?P<bus>[\da-fA-F:.]+)"
    r"[^)]*\): (?P<number>\d+)"  # behind the bus, the part of a GPU that MIG divides: GPU-I:05
)
CATALOGUE = "https://docs.nvidia.com/deploy/xid-errors/"
REBOOT = "reboot {host}; if it comes back, leave {host} out (sbatch --exclude={host})"
RESET = "reset GPU {bus} or reboot {host}; if it comes back, leave {host} out"
RESET_LATER = "start the job again; reset GPU {bus} when no process uses it"
GO_ON = "nothing now; reset GPU {bus} when no process uses it, and tell the administrator of {host}"
# Number: (what it is, what to do), from NVIDIA's catalogue, the worst first.
HARDWARE = {
    79: ("the GPU has fallen off the bus", REBOOT),
    95: ("uncontained memory error", RESET),
    64: ("memory could not be remapped", RESET),
    48: ("uncorrected memory error", RESET),
    74: ("NVLink error", RESET),
    119: ("the GPU's own processor (GSP) did not answer", RESET),
    120: ("error in the GPU's own processor (GSP)", RESET),
    94: ("contained memory error", RESET_LATER),
    92: ("many corrected memory errors", GO_ON),
    63: ("memory was remapped", GO_ON),
}
# Mostly the fault of a program that ran on the GPU: 13 and 31 wrong addresses, 43 and 45 its end.
# 154 repeats what the driver asks for, which nvidia-smi knows better.
NOT_HARDWARE = (13, 31, 43, 45, 154)


def ask_kernel():
    """Return the Xid errors in the kernel's log, as a dict for JSON.

    "xids" lists them; "problem" is None, or why the log cannot be read.
    """
    try:
        code, output = commands.run(["dmesg"], PATIENCE)
    except OSError:
        return {"xids": [], "problem": "dmesg is not installed"}
    if code is None:
        return {"xids": [], "problem": "dmesg did not answer"}
    if code != 0:  # in most systems, only root may read the log
        lines = output.strip().splitlines() or ["dmesg failed"]
        return {"xids": [], "problem": lines[-1][:200]}
    return {"xids": read_log(output, time.monotonic()), "problem": None}


def read_log(log, now):
    """Return the Xid errors of a log: one dict for each number and GPU, with the latest time.

    Args:
        log: str, as dmesg prints it.
        now: seconds since the machine started.
    """
    errors = {}
    for line in LINE.finditer(log):
        key = (int(line["number"]), line["bus"])
        age = now - float(line["seconds"]) if line["seconds"] else None
        errors.setdefault(key, {"number": key[0], "bus": key[1], "times": 0})
        errors[key]["times"] += 1
        errors[key]["age"] = age
    return list(errors.values())


def check_xids(all_facts):
    """The kernel's log names no broken GPU."""
    logs = {fact["host"]: fact["xids"] for fact in all_facts if fact["xids"]}
    if not logs:
        return Check("Xid errors", "ok", "no NVIDIA GPU is used")
    errors = [(host, error) for host, log in logs.items() for error in log["xids"]]
    broken = [pair for pair in errors if pair[1]["number"] not in NOT_HARDWARE]
    if broken:
        places = {number: place for place, number in enumerate(HARDWARE)}  # 0 for the worst
        broken.sort(key=lambda pair: places.get(pair[1]["number"], len(places)))
        return worst("Xid errors", [("warn", *describe(host, error)) for host, error in broken])
    hidden = [host for host, log in logs.items() if log["problem"]]
    if hidden:
        problem = logs[hidden[0]]["problem"]
        found = f"not known on {hidden[0]} ({problem}): sudo dmesg | grep Xid"
        return Check("Xid errors", "ok", found)
    if errors:
        numbers = sorted({str(error["number"]) for _, error in errors})
        return Check("Xid errors", "ok", f"none that points to hardware: {', '.join(numbers)}")
    return Check("Xid errors", "ok", "none in the kernel's log")


def describe(host, error):
    """Return (what was found, what to do) for an Xid error."""
    unknown = ("not listed here", f"see {CATALOGUE}")
    what, change = HARDWARE.get(error["number"], unknown)
    when = f", {ago(error['age'])}" if error["age"] is not None else ""
    times = f", {error['times']} times" if error["times"] > 1 else ""
    found = f"{host}, GPU {error['bus']}: Xid {error['number']} ({what}){times}{when}"
    return found, change.format(host=host, bus=error["bus"])


def ago(seconds):
    """Return "5 min ago", "3 h ago" or "2 days ago"."""
    minutes = max(0, seconds) / 60
    if minutes < 120:
        return f"{minutes:.0f} min ago"
    if minutes < 48 * 60:
        return f"{minutes / 60:.0f} h ago"
    return f"{minutes / 60 / 24:.0f} days ago"
