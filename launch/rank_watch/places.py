"""Where in the reader's own code a call was made, and torch's record of collectives."""

import contextlib
import functools
import os
import pickle
import sys
import sysconfig
import traceback
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
WATCHERS = [
    str(FOLDER),
    *(str(FOLDER.with_name(name)) for name in ("check_ranks.py", "why_hang.py")),
]
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


@functools.cache
def is_own(file):
    """Return whether a file is the reader's own: neither a library nor this checker."""
    if file.startswith("<") or "site-packages" in file or "dist-packages" in file:
        return False
    folders = [*WATCHERS, STANDARD_LIBRARY]
    if torch := sys.modules.get("torch"):  # which may be built in a folder of its own
        folders.append(os.path.dirname(torch.__file__) + os.sep)
    return not os.path.abspath(file).startswith(tuple(folders))


def own_line():
    """Return "file:line" of the innermost frame in the reader's own code, or ""."""
    frame = sys._getframe(1)
    while frame:
        if is_own(frame.f_code.co_filename):
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def one_line(error):
    """Return the kind and the first line of an exception, as Python prints it."""
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0]


def own_line_of_error(error):
    """Return "file:line" of the innermost frame of an exception in the reader's code, or ""."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)
    ]
    return f"{short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


@functools.cache
def short(file):
    """Return a path as people write it: relative if it is below the working directory."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def records():
    """Return torch's flight records of this process, one per kind of group that it records."""
    torch = sys.modules.get("torch")
    found = []
    # gloo's, that of 2.15's nccl (which calls itself nccl2), and that of the older nccl
    for name, of in (
        ("_dump_fr_trace", {}),
        ("_dump_fr_trace", {"backend": "nccl2"}),
        ("_dump_nccl_trace", {}),
    ):
        dump = torch and getattr(torch._C._distributed_c10d, name, None)
        with contextlib.suppress(TypeError):  # torch before 2.15 has no record per backend
            record = pickle.loads(dump(**of)) if dump else {}
            if record and record not in found:
                found.append(record)
    return found


def recorded_calls():
    """Return the collectives that torch remembers of this process, of gloo's and NCCL's groups."""
    return [call for record in records() for call in calls_of(record)]


def nccl_is_unrecorded():
    """Return whether this process has a group of NCCL, and torch no record of a call of NCCL."""
    dist = sys.modules.get("torch.distributed")
    if not (dist and dist.is_available() and dist.is_initialized()):
        return False
    entries = [entry for record in records() for entry in record.get("entries", [])]
    recorded = any(entry["profiling_name"].startswith("nccl") for entry in entries)
    return "nccl" in dist.get_backend_config() and not recorded


def calls_of(record):
    """Return the calls of a flight record: (group, number, name, shapes, done, place) each."""
    return [
        (
            group_of(*entry["process_group"]),
            entry["collective_seq_id"],
            entry["profiling_name"].split(":")[-1],
            entry["input_sizes"],
            bool(entry["retired"] or entry["state"] == "completed"),
            place([(f["filename"], f["line"], f["name"]) for f in entry.get("frames", [])]),
        )
        for entry in record.get("entries", [])
        if not entry["is_p2p"]
    ]


def group_of(name, description):
    """Return the text by which the ranks know a group: several have the same description."""
    if description == "default_pg":
        return description
    return name if description == "undefined" else f"{name} {description}"


def place(frames):
    """Return the innermost place in the reader's own code in frames (file, line, function)."""
    for file, line, name in frames:
        if is_own(file):
            inside = "" if name == "<module>" else f" in {name}()"
            return f"{short(file)}:{line}{inside}"
    return "an unknown place"


def place_of_thread(ident):
    """Return the place in the reader's own code in which a thread is."""
    stack = traceback.extract_stack(sys._current_frames()[ident])
    return place([(frame.filename, frame.lineno, frame.name) for frame in reversed(stack)])
