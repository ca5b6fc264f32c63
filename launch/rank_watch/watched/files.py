"""Files that several ranks write."""

import functools
import os
import sys

from rank_watch.calls import join
from rank_watch.hooks import replace
from rank_watch.places import own_line

torch = sys.modules.get("torch")


def install(recorder):
    replace(torch, "save", functools.partial(save, recorder))
    sys.addaudithook(functools.partial(audit, recorder))


def save(recorder, real, value, file, *args, **kwargs):
    if isinstance(file, str | os.PathLike):
        recorder.add("write", path=os.path.abspath(file), mode="w", line=own_line())
    return real(value, file, *args, **kwargs)


def audit(recorder, event, args):
    if event != "open" or os.getpid() != recorder.pid:
        return
    path, mode, _ = args
    if not isinstance(path, str) or not isinstance(mode, str) or mode[0] not in "wax":
        return
    private = ("/.cache/", "__pycache__", "torchinductor")
    system = path.startswith(("/dev/", "/proc/", "/sys/"))
    if not (system or any(part in path for part in private)) and (line := own_line()):
        recorder.add("write", path=os.path.abspath(path), mode=mode[0], line=line)


def judge(runs, judgment):
    """Say so if several ranks of one machine write one file."""
    writers = {}
    for run in runs:
        for write in run.writes:
            ranks, modes, _ = writers.setdefault((run.host, write["path"]), (set(), set(), write))
            ranks.add(run.rank)
            modes.add(write["mode"])
    by_line = {}
    for ranks, modes, write in writers.values():
        if len(ranks) > 1:
            by_line.setdefault((write["line"], modes == {"a"}), []).append((ranks, write["path"]))
    for (line, appends), files in by_line.items():
        ranks, path = files[0]
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        text = f"{join(ranks)} write one file, {path}{more} ({line})"
        if appends:
            judgment.notes.append(f"{text}: their lines mix")
        else:
            judgment.found.append(
                f"{text}: they overwrite each other, and a reader may see half a file. Write on "
                "rank 0 only (docs/03_mnmc_ddp_launch.md#saving-and-exit)"
            )
