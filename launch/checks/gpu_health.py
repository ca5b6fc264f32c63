"""Whether the GPUs of a machine are healthy, as nvidia-smi reports it."""

import re
from xml.etree import ElementTree

from launch.checks import commands
from launch.checks.verdicts import Check, worst

# nvidia-smi -q -x prints all that it knows as XML. Its --query-gpu refuses a whole question if one
# field has another name in this version, as clocks_throttle_reasons and clocks_event_reasons.
NVIDIA_SMI = ["nvidia-smi", "-q", "-x"]
PATIENCE = 6  # seconds; less than messages.SILENCE, so that no rank counts as missing
# Why a GPU runs slower than it can. An idle GPU also lowers its clocks, and a busy GPU stays at its
# power limit (sw_power_cap): both are normal, so neither is in this list.
SLOWDOWNS = {
    "hw_thermal_slowdown": "too hot",
    "sw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "power brake",
    "hw_slowdown": "hardware slowdown",
}
# What nvidia-smi prints instead of a value if the driver cannot ask the GPU
ERRORS = re.compile("requires reset|is lost|Unknown Error|ERR!")
FALLEN_OFF = 15  # an exit code of nvidia-smi: a GPU has fallen off the bus
LEAVE_OUT = "leave {host} out (sbatch --exclude={host}) and tell its administrator"
RESET = (
    "nvidia-smi --gpu-reset -i {bus} on {host}, as root and with no process on the GPU; or reboot"
)


def ask_nvidia_smi():
    """Return what nvidia-smi reports about the GPUs of this machine, as a dict for JSON.

    "gpus" lists the dicts of read_gpu(). "problem" is None, or why GPUs are missing in the list;
    then "verdict" and "change" say how bad that is and what to do.
    """
    told = {"gpus": [], "verdict": "warn"}
    try:
        code, output = commands.run(NVIDIA_SMI, PATIENCE)
    except OSError:
        return told | {
            "problem": "nvidia-smi is not installed, so nothing is known of its GPUs",
            "change": "in a container: docker run --gpus=all "
            "-e NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        }
    if code is None:
        return told | {
            "problem": f"nvidia-smi did not answer within {PATIENCE} s",
            "change": "run nvidia-smi on {host}: if it is slow, nvidia-smi -pm 1 (as root); "
            "if it hangs, reboot {host} or leave it out",
        }
    gpus = read_gpus(output)
    # A GPU that is lost is a line beside the XML of the others.
    lost = re.search(r"^Unable to determine the device handle.*", output, re.MULTILINE)
    problem = None
    verdict = "FAIL"
    change = "reboot {host}, or leave it out: sbatch --exclude={host}"
    if lost:
        problem = f"nvidia-smi: {lost[0]}"
    elif not gpus:
        first_line = (output.strip() or f"exit code {code}, no output").splitlines()[0]
        problem = f"nvidia-smi: {first_line[:200]}"
    elif code:
        beside = re.sub(r"<\?xml.*</nvidia_smi_log>", "", output, flags=re.DOTALL).split("\n")
        lines = [f"exit code {code}", *filter(None, beside)]
        problem = f"nvidia-smi: {', '.join(lines)[:200]}"
        if code != FALLEN_OFF:
            verdict = "warn"
            change = "run nvidia-smi -q on {host}; if it stays, " + LEAVE_OUT
    return {"gpus": gpus, "verdict": verdict, "problem": problem, "change": change}


def read_gpus(output):
    """Return the dicts of read_gpu() for all GPUs in an answer of nvidia-smi."""
    # Names of processes may hold anything.
    output = re.sub(r"<processes>.*?</processes>", "", output, flags=re.DOTALL)
    xml = re.search(r"<nvidia_smi_log>.*</nvidia_smi_log>", output, re.DOTALL)
    if not xml:
        return []
    try:
        return [read_gpu(gpu) for gpu in ElementTree.fromstring(xml[0]).iter("gpu")]
    except ElementTree.ParseError:
        return []


def read_gpu(gpu):
    """Return the facts about one GPU.

    What its kind does not know is "N/A" in the XML, or missing there: it counts as no error.

    Args:
        gpu: Element of nvidia-smi's XML.
    """

    def text(path):
        return (gpu.findtext(path) or "").strip()

    def any_yes(*paths):
        return any(text(path) == "Yes" for path in paths)

    recovery = text("gpu_recovery_action")  # drivers from R565 on
    if any_yes("gpu_reset_status/reset_required"):
        recovery = "Reset"
    values = map(text, ("temperature/gpu_temp", "clocks/sm_clock", "ecc_mode/current_ecc"))
    active = {child.tag for child in gpu.iter() if (child.text or "").strip() == "Active"}
    return {
        "bus": gpu.get("id", "")[-12:],  # 0000:3b:00.0
        "uuid": text("uuid"),
        "temperature": text("temperature/gpu_temp"),
        "clock": text("clocks/sm_clock"),
        "max_clock": text("max_clocks/sm_clock"),
        # since the driver started, and in the life of this GPU
        "uncorrected": count_uncorrected(gpu.find("ecc_errors/volatile")),
        "uncorrected_ever": count_uncorrected(gpu.find("ecc_errors/aggregate")),
        "waits_for_reset": any_yes(
            "remapped_rows/remapped_row_pending",
            "retired_pages/pending_retirement",
            "ecc_errors/channel_repair_pending",  # newer drivers
            "ecc_errors/tpc_repair_pending",
        ),
        "is_worn_out": any_yes(
            "remapped_rows/remapped_row_failure",
            "ecc_errors/aggregate/sram_threshold_exceeded",
            "ecc_errors/unrepairable_memory",
        ),
        "error": next(filter(ERRORS.search, values), None),
        "recovery": recovery if re.search("Reset|Reboot|Drain", recovery) else None,
        "slowdowns": [
            name
            for name in SLOWDOWNS
            # clocks_event_reason_... or, in older drivers, clocks_throttle_reason_...
            if any(tag.endswith(f"_reason_{name}") for tag in active)
        ],
    }


def count_uncorrected(errors):
    """Return how many memory errors ECC has found but could not correct. None: it is not used.

    Args:
        errors: Element volatile or aggregate, or None.
    """
    if errors is None:
        return None
    # GPUs before Turing count double_bit errors by part of the chip, and their total.
    counts = [child for child in errors if "uncorrectable" in child.tag]
    counts = counts or errors.findall("double_bit/total")
    numbers = [int(child.text) for child in counts if (child.text or "").strip().isdigit()]
    return sum(numbers) if numbers else None


def check_gpu_health(all_facts):
    """No GPU of the job has failing memory, waits for a reset, or is slowed down."""
    faults = []
    gpus = []
    for fact in all_facts:
        health = fact["gpu_health"]
        if not health:
            continue
        host = fact["host"]
        if health["problem"]:
            change = health["change"].format(host=host)
            faults.append((health["verdict"], f"{host}: {health['problem']}", change))
        for gpu in used_gpus(health["gpus"], host, all_facts):
            gpus.append(gpu)
            for verdict, found, change in gpu_faults(gpu):
                change = change.format(host=host, bus=gpu["bus"])
                faults.append((verdict, f"{host}, GPU {gpu['bus']}: {found}", change))
    if faults:
        return worst("GPU health", faults)
    return Check("GPU health", "ok", describe(gpus) if gpus else "no NVIDIA GPU is used")


def used_gpus(gpus, host, all_facts):
    """Return the GPUs of the job on a host, or all if torch cannot name them (MIG, a failure)."""
    local = [fact for fact in all_facts if fact["host"] == host]
    if any(fact["problem"] for fact in local):
        return gpus
    names = [fact["device_id"] for fact in local if fact["device_id"]]
    used = [gpu for gpu in gpus if any(gpu["uuid"].endswith(name) for name in names)]
    return used or gpus


def gpu_faults(gpu):
    """Yield (verdict, what was found, what to do) for all that is wrong with a GPU."""
    if gpu["recovery"]:
        change = "reboot {host}" if gpu["recovery"] == "Reboot" else RESET
        yield "FAIL", f"the driver asks for this recovery: {gpu['recovery']}", change
    if gpu["error"]:
        yield "FAIL", f"nvidia-smi reports '{gpu['error']}' instead of a value", RESET
    if gpu["is_worn_out"]:
        yield "FAIL", "its memory has more errors than it can replace", LEAVE_OUT
    if gpu["uncorrected"]:
        found = f"{gpu['uncorrected']} uncorrected memory error(s) since the driver started"
        yield "warn", found, RESET
    elif gpu["waits_for_reset"]:
        yield "warn", "a repair waits for the next reset", RESET
    if gpu["slowdowns"]:
        name = gpu["slowdowns"][0]
        yield (
            "warn",
            f"slowed down, {SLOWDOWNS[name]} ({name}): {gpu['temperature']}, "
            f"{gpu['clock']} of {gpu['max_clock']}",
            "look again with nvidia-smi -q -d PERFORMANCE on {host}; if it stays, " + LEAVE_OUT,
        )


def describe(gpus):
    """Return number, temperatures and clocks of GPUs without a fault."""
    counts = [gpu["uncorrected_ever"] for gpu in gpus if gpu["uncorrected_ever"] is not None]
    memory = "memory errors are not counted (no ECC)"
    if counts:
        memory = f"{sum(counts)} uncorrected memory error(s) ever counted"
    parts = [
        f"{len(gpus)} GPU(s)",
        between([gpu["temperature"] for gpu in gpus]),
        between([gpu["clock"] for gpu in gpus]),
        memory,
    ]
    return ", ".join(part for part in parts if part)


def between(values):
    """Return "31 to 45 C" for ["45 C", "31 C", "N/A"], and "" if no value is a number."""
    pairs = [value.split() for value in values if re.match(r"\d+ \w+$", value)]
    if not pairs:
        return ""
    numbers = [int(number) for number, _ in pairs]
    least, most = min(numbers), max(numbers)
    span = f"{least}" if least == most else f"{least} to {most}"
    return f"{span} {pairs[0][1]}"
