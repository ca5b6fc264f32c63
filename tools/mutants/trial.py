"""Run tests on a copy of the repository that has a fault.

The tests run in a process that is forked from one that has imported torch, which spares seconds for
each fault.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
import time
import traceback
import types
from pathlib import Path

import psutil

from common.errors import UserError, one_line

ROOT = Path(__file__).resolve().parents[2]
OURS = ("common", "imagenet", "tools", "launch", "ranks", "processes")  # packages, and test helpers
NOT_COPIED = (".git", ".venv*", "data", "checkpoints", "site", "__pycache__", ".*_cache")
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER in linux/prctl.h
CANNOT_START = "(the tests cannot be imported)"


def import_what_tests_need():
    """Import the packages that nearly every test needs, and none of this repository."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import PIL.Image
    import pytest
    import torch._dynamo
    import torch.distributed.nn
    import torchvision.transforms.v2

    return PIL, pytest, torch, torchvision


def make_copy(folder):
    """Copy the repository into a folder, and link .venv and .git."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    for name in (".venv", ".git"):
        (folder / name).symlink_to(ROOT / name)


def run_all(work, items, jobs, folder):
    """Yield (item, work(copy, item)) as they finish: `jobs` processes have a copy each.

    The processes are forked without the multiprocessing package: the tests look at whether that has
    started them. The results are sent as JSON through a pipe, a short line each.
    """
    reader, writer = os.pipe()
    pids = []
    ended = 0
    for job in range(jobs):
        pid = os.fork()
        if pid == 0:
            try:
                copy = Path(folder, f"copy-{job}")
                make_copy(copy)
                for index in range(job, len(items), jobs):
                    line = json.dumps([index, work(copy, items[index])])
                    os.write(writer, line.encode() + b"\n")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(writer)
    try:
        with open(reader) as lines:
            for line in lines:
                index, result = json.loads(line)
                ended += 1
                yield items[index], result
        if ended < len(items):
            raise UserError(f"{len(items) - ended} of {len(items)} trials failed: see above")
    finally:
        for pid in pids:
            end_process(pid)


def run_tests_on(copy, file, text, tests, seconds, most=0):
    """Run tests in a copy, one file of which has another text meanwhile; see run_tests()."""
    path = copy / file
    original = path.read_text()
    path.write_text(text)
    try:
        return run_tests(copy, tests, seconds, most)
    finally:
        path.write_text(original)


def run_tests(copy, tests, seconds, most=0):
    """Run tests in a copy until one fails.

    Args:
        copy: Path.
        tests: names as pytest prints them.
        seconds: float, after which a test that still runs counts as failed.
        most: float, seconds for all tests together, if that is more.

    Returns:
        the name of the test that failed, or None if all passed.
    """
    log = copy.with_name(f"{copy.name}.log")
    pid = os.fork()
    if pid == 0:
        become_pytest(copy, tests, seconds, log)
    deadline = time.monotonic() + 60 + max(2 * seconds, most)
    code = None
    while code is None and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.1)
    if code is None:
        end_process(pid)
        return "(no end)"
    if code in (0, 5):  # 5: no test, because a fault cannot be in the way
        return None
    text = log.read_text(errors="replace").replace(str(copy), str(ROOT))
    all_cases = list(dict.fromkeys(with_all_cases(test, text) for test in tests))
    if all_cases != tests:
        return run_tests(copy, all_cases, seconds, most)
    return failed_test(text, tests)


def with_all_cases(test, text):
    """Return a test without its case, if pytest has printed that it does not know the case.

    A fault can remove a case or change its name.
    """
    function = test.partition("[")[0]
    return function if f"ERROR: not found: {ROOT}/{function}\n" in text else test


def failed_test(text, tests):
    """Return the name of the first test that failed, from what pytest printed."""
    if "ERROR: not found" in text:
        raise UserError(f"pytest does not know a test: {one_line(text)[-300:]}")
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("FAILED", "ERROR"):
            known = [test for test in tests if rest == test or rest.startswith(f"{test} - ")]
            return max(known, key=len) if known else rest.partition(" - ")[0]
    return CANNOT_START


def become_pytest(copy, tests, seconds, log):
    """Run pytest in this process, a child, and exit."""
    code = 3
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SUBREAPER, 1)  # to find every process that a test leaves behind
        os.chdir(copy)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        for name in list(sys.modules):
            if name.partition(".")[0] in OURS:
                del sys.modules[name]
        sys.path[:] = [str(copy), *(p for p in sys.path if not Path(p).is_relative_to(ROOT))]
        sys.path.append(next((ROOT / ".venv").glob("lib/python*/site-packages")).as_posix())
        sys.modules["__main__"] = types.ModuleType("__main__")  # processes of tests import it again
        sys.argv = ["pytest"]
        import pytest

        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--durations=0"]
        options += [f"--timeout={seconds:.0f}", "--tb=line"]
        names = [test.replace(str(ROOT), str(copy)) for test in tests]  # a few name a path
        code = int(pytest.main([*options, *names]))
        sys.stdout.flush()
        sys.stderr.flush()
        kill_descendants(os.getpid())
    finally:
        os._exit(code)


def end_process(pid):
    """Kill a child process and the processes below it, unless it has ended."""
    kill_descendants(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def kill_descendants(pid):
    """Kill the processes that a process has started, and theirs."""
    for process in psutil.Process(pid).children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
