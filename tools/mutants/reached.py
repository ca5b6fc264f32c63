"""Record which functions of the project each test executes, so that a fault needs few tests.

    python tools/mutants/reached.py                    the quick tests: ten minutes on two cores
    python tools/mutants/reached.py -m slow            the slow tests too, added to what is there
    python tools/mutants/reached.py tests/core/test_data.py    these tests again, after a change

The other arguments are those of pytest. The record is .venv/reached.json. coverage.py traces this
process, and every Python process that a test starts. A process that is killed leaves no trace.
"""

import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / ".venv/reached.json"
FOLDER = "REACHED_FOLDER"  # this environment variable names the folder of coverage's files
TEST = "REACHED_BY"  # and this one the test that runs, for the processes that the test starts
COPIED = {"distributed.py": "common/distributed.py", "train.py": "template/train.py"}  # by tests

# Processes that a test starts read this file, since COVERAGE_PROCESS_START names it.
SETTINGS = """\
[run]
data_file = {folder}/coverage
parallel = true
context = ${{{test}-}}
concurrency = multiprocessing, thread
patch = _exit
omit =
    */site-packages/*
    */lib/python*
    */tests/*
disable_warnings = no-data-collected, module-not-measured, module-not-imported, couldnt-parse
"""


# The plugin of pytest


class Recorder:
    """Tell coverage.py which test runs, and keep the seconds of each test."""

    def __init__(self, folder):
        import coverage

        self.folder = Path(folder)
        self.seconds = {}
        self.slow = set()
        self.coverage = coverage.Coverage(config_file=str(self.folder / "settings"))
        self.coverage.start()

    def set_test(self, name):
        os.environ[TEST] = name
        self.coverage.switch_context(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if item.get_closest_marker("slow"):
            self.slow.add(item.nodeid)
        self.set_test(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        """A fixture that several tests share belongs to all tests of the file."""
        if fixturedef.scope == "function":
            return (yield)
        before = os.environ.get(TEST, "")
        self.set_test(before.partition("::")[0])
        try:
            return (yield)
        finally:
            self.set_test(before)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration

    def pytest_sessionfinish(self):
        self.coverage.stop()
        self.coverage.save()
        record = {"seconds": self.seconds, "slow": sorted(self.slow)}
        (self.folder / f"tests-{os.getpid()}.json").write_text(json.dumps(record))


def pytest_configure(config):
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    is_controller = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not is_controller:
        config.pluginmanager.register(Recorder(folder))
        record_forked_ranks()


def record_forked_ranks():
    """Let the ranks of tests/helpers/ranks.py, which a server forks, know the test that runs."""
    import ranks

    original = ranks.Ranks.__init__

    def __init__(self, *args, env=None, **options):
        env = (env or {}) | {TEST: os.environ.get(TEST, "")}
        original(self, *args, env=env, **options)

    ranks.Ranks.__init__ = __init__
    ranks._run = run_rank


def run_rank(script, env, *args):
    """Run a rank of tests/helpers/ranks.py.

    The server that forked it was started by another test.
    """
    import coverage
    import ranks

    if running := coverage.Coverage.current():
        running.switch_context(env[TEST])
    ranks._run(script, env, *args)


# The record


def functions_of(text):
    """Return {line: name of the innermost function that executes it}.

    A def line is none of its own.
    """
    names = {}

    def visit(node, around):
        for child in ast.iter_child_nodes(node):
            inside = around
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = [*around, child.name]
            if isinstance(child, ast.FunctionDef):
                for line in range(child.body[0].lineno, child.end_lineno + 1):
                    names[line] = ".".join(inside)
            visit(child, inside)

    visit(ast.parse(text), [])
    return names


def reached_functions(data, tests):
    """Return {(file, function): tests that executed it}, from the data of coverage.py."""
    names = {}
    result = {}
    for path in data.measured_files():
        file = COPIED.get(os.path.basename(path))
        if Path(path).is_relative_to(ROOT):
            file = str(Path(path).relative_to(ROOT))
        if not file or file.startswith((".venv", "tests", "tools/mutants")):
            continue
        if not (ROOT / file).is_file():
            continue
        if file not in names:
            names[file] = functions_of((ROOT / file).read_text())
        for line, contexts in data.contexts_by_lineno(path).items():
            place = (file, names[file].get(line, ""))
            for context in contexts:
                test = context.rpartition("|")[2]
                of_file = [name for name in tests if name.startswith(f"{test}::")]
                result.setdefault(place, set()).update([test] if test in tests else of_file)
    return result


def merge(folder):
    """Add the files that the plugin and coverage.py have left in a folder to the record."""
    import coverage

    seconds = {}
    slow = set()
    for path in folder.glob("tests-*.json"):
        part = json.loads(path.read_text())
        seconds |= part["seconds"]
        slow |= set(part["slow"])
    combined = coverage.Coverage(config_file=str(folder / "settings"))
    combined.combine([str(folder)], strict=True)
    reached = reached_functions(combined.get_data(), seconds)

    record = read()
    for test, duration in seconds.items():
        record[test] = {"seconds": round(duration, 2), "slow": test in slow, "reaches": []}
    for (file, function), tests in reached.items():
        for test in tests:
            record[test]["reaches"].append(f"{file}::{function}")
    RECORD.write_text(json.dumps(record) + "\n")
    return record


def read():
    """Return {test: {"seconds", "slow", "reaches"}} as recorded; empty if nothing is."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(RECORD.read_text())
    return {}


def main(arguments):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = folder / "settings"
        settings.write_text(SETTINGS.format(folder=folder, test=TEST))
        env = os.environ | {FOLDER: name, "COVERAGE_PROCESS_START": str(settings), TEST: ""}
        command = [sys.executable, "-m", "pytest", "-p", "tools.mutants.reached"]
        command += ["-n", "2", "--dist", "loadfile", *(arguments or ["-m", "not slow"])]
        code = subprocess.run(command, cwd=ROOT, env=env).returncode
        record = merge(folder)
    print(f"{len(record)} tests in {RECORD}; pytest ended with {code}")


if __name__ == "__main__":
    main(sys.argv[1:])
