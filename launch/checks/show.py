"""The report of all checks, as text and as JSON."""

import json

from launch.checks.all_reduce import bandwidth, text_of


def as_text(all_facts, clocks, checks, times):
    """Return the report as text.

    Args:
        all_facts: list of dict, see facts().
        clocks: {rank: seconds ahead of rank 0}.
        checks: list of Check.
        times: list of (bytes, seconds) of an all_reduce, or None.
    """
    lines = [*columns(rank_rows(all_facts, clocks)), ""]
    for check in checks:
        lines.append(f"{check.verdict:4}  {check.name:13}  {check.found}")
        if check.change:
            lines.append(f"{'':6}change this:   {check.change}")
    if times:
        lines += ["", *columns(speed_rows(times, len(all_facts)))]
    failed = sum(check.verdict == "FAIL" for check in checks)
    warned = sum(check.verdict == "warn" for check in checks)
    lines += ["", f"preflight: {failed} of {len(checks)} checks failed, {warned} with a warning"]
    return "\n".join(lines)


def rank_rows(all_facts, clocks):
    head = ("rank", "host", "pid", "device", "listens at", "torch", "NCCL")
    rows = [(*head, "code", "clock", "threads")]
    for fact in sorted(all_facts, key=lambda fact: fact["rank"]):
        device = fact["device"]
        if device != "cpu":
            device += f" ({fact['device_name']})"
        addresses = [
            f"{address or 'nothing'} ({name})" for name, address in fact["addresses"].values()
        ]
        listens_at = ", ".join(dict.fromkeys(addresses))
        row = (fact["rank"], fact["host"], fact["pid"], device, listens_at, fact["torch"])
        clock = f"{clocks[fact['rank']]:+.1f} s" if fact["rank"] in clocks else ""
        rows.append((*row, fact["nccl"] or "", fact["code"], clock, fact["threads"]))
    return rows


def speed_rows(times, world_size):
    rows = [("all_reduce", "time", "bus bandwidth")]
    for size, seconds in times:
        speed = bandwidth(size, seconds, world_size) / 1e9
        rows.append((text_of(size), f"{1000 * seconds:.2f} ms", f"{speed:.2f} GB/s"))
    return rows


def columns(rows):
    """Return rows of cells as lines; each column is as wide as its widest cell."""
    widths = [max(len(str(row[k])) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def as_json(all_facts, clocks, checks, times):
    """Return the report as JSON. See as_text()."""
    speeds = [
        {
            "bytes": size,
            "seconds": seconds,
            "bus_bandwidth": bandwidth(size, seconds, len(all_facts)),
        }
        for size, seconds in times or []
    ]
    report = {
        "ranks": all_facts,
        "clocks": clocks,
        "checks": [check._asdict() for check in checks],
        "all_reduce": speeds,
    }
    return json.dumps(report)
