"""Run the reader's script, or say in one line why it cannot run."""

import json
import os
import runpy
import sys
import time
import tokenize
from pathlib import Path

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # variables of launchers


def run(script):
    """Run a script as Python does, and return its variables."""
    sys.path[0] = str(Path(script).resolve().parent)
    return runpy.run_path(script, run_name="__main__")


def exit_unless_python(script, command):
    """Exit with code 2 if a path is not that of a Python script. `command` is one that works."""
    if problem := problem_of(Path(script)):
        tool = Path(sys.argv[0]).name
        say(f"{tool}: {script} {problem}: expected a Python script, as in {command}")
        sys.exit(2)


def problem_of(path):
    if path.is_dir():
        return "" if (path / "__main__.py").exists() else "is a folder"
    try:
        with tokenize.open(path) as file:
            return "is not Python text" * ("\0" in file.read())
    except (SyntaxError, UnicodeDecodeError):
        return "is not Python text"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def rank():
    return next((int(os.environ[name]) for name in RANKS if os.environ.get(name)), 0)


def say(text):
    """Print a line on rank 0, and let torchrun print it last, as the cause."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # a launcher that sees this process fail ends rank 0, before it prints
    write_error_file(text)


def write_error_file(text):
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
