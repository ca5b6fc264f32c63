"""Make random faults in the code, one at a time, and see which the tests notice.

    python tools/mutants/sample.py common/data.py --faults 20 --seed 3     in one file
    python tools/mutants/sample.py --faults 480 --seed 1 --output results/mutants/seed-1.jsonl

A fault is noticed if a test fails twice that passes without it. The tests of a fault are those that
execute its function, cheapest files first; tools/mutants/reached.py has recorded which these are. A
fault that no test notices has survived: write a test, or delete the code, or, if the fault changes
nothing that anybody could see, say why in tools/mutants/explained.jsonl. With --output, the same
command continues where it was stopped.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.errors import UserError, one_line, one_line_errors
from common.flags import Parser, number, whole_number
from tools.mutants import reached, trial
from tools.mutants.faults import faults_in, sample

# What users run, and what they copy.
FILES = ["0?_*.py", "common/*.py", "imagenet/*.py", "template/train.py", "launch/*.py"]
FILES += ["launch/checks/*.py"]
FILES += ["tools/prepare_imagenet.py", "tools/records.py", "tools/steps.py", "tools/experiments.py"]
EXPLAINED = ROOT / "tools/mutants/explained.jsonl"
# Compares the rungs' sections with those of their parents, as text, and executes none of them
COMPARES_RUNGS = "tests/book/test_tools.py::"
COMPARES_RUNGS += "test_a_step_is_small_and_leaves_other_sections_as_they_are"
SURVIVED = "survived"
NOT_REACHED = "not reached"  # no test executes the function
UNNOTICED = (SURVIVED, NOT_REACHED)


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="files to make faults in; all if none is given")
    add("--faults", type=whole_number(1), default=480, metavar="N", help="number of faults")
    add("--least", type=whole_number(0), default=15, metavar="N", help="of these in every file")
    add("--seed", type=whole_number(0), default=1, metavar="N", help="for the random choice")
    add("--minutes", type=number(above=0), default=60, metavar="X", help="stop after this time")
    add_limits(parser)
    add(
        "--again",
        action="store_true",
        help="try only what has survived in --output, after a change",
    )
    return parser.parse_args()


def add_limits(parser):
    """Add the flags that listed.py takes too."""
    add = parser.add_argument
    add("--jobs", type=whole_number(1), default=2, metavar="N", help="faults at the same time")
    add("--seconds", type=number(above=0), default=240, metavar="X", help="of tests per fault")
    add("--output", metavar="FILE", help="append a JSON line per fault to FILE")


def find_files(given):
    files = given or [str(p.relative_to(ROOT)) for glob in FILES for p in sorted(ROOT.glob(glob))]
    for file in files:
        if not (ROOT / file).is_file():
            raise UserError(
                f"{file}: no such file; name files as they are called in the repository"
            )
    return [file for file in files if (ROOT / file).read_text().strip()]


def tests_that_reach(fault, record, budget):
    """Return the tests that execute the function of a fault, as a list: the cheapest files first.

    A fault outside of functions is met by every test that executes anything of its file. The first
    case of a test comes before its other cases. The list ends after `budget` seconds of tests.
    """
    place = f"{fault.file}::{fault.function}"
    by_file = {}
    for test, entry in record.items():
        key = entry["slow"], test.partition("::")[0]
        if fault.function:
            is_reached = place in entry["reaches"]
        else:
            is_reached = any(name.startswith(f"{fault.file}::") for name in entry["reaches"])
        if test.startswith(COMPARES_RUNGS) and re.match("0[1-5]_", fault.file):
            is_reached = True
            key = False, COMPARES_RUNGS
        if is_reached:
            by_file.setdefault(key, []).append(test)

    def cost(key):
        return key[0], sum(record[test]["seconds"] for test in by_file[key])

    tests = []
    for key in sorted(by_file, key=cost):
        cases = Counter()
        order = []
        for test in by_file[key]:
            function = test.partition("[")[0]
            order.append((cases[function], test))
            cases[function] += 1
        tests += [test for _, test in sorted(order, key=lambda pair: pair[0])]

    chosen = []
    for test in tests:
        if budget <= 0:
            break
        budget -= record[test]["seconds"]
        chosen.append(test)
    return chosen


class Trials:
    """What the trials of faults in one copy of the repository know of its tests."""

    def __init__(self, record, budget):
        self.record = record
        self.budget = budget  # seconds of tests per fault
        self.passing = set()  # tests that pass without a fault
        self.failing = set()  # tests that do not

    def __call__(self, copy, fault):
        """Return the test that noticed a fault, SURVIVED or NOT_REACHED; and the seconds."""
        start = time.monotonic()
        tests = tests_that_reach(fault, self.record, self.budget)
        noticed = None if tests else NOT_REACHED
        while tests and noticed is None:
            expected = [self.record[test]["seconds"] for test in tests]
            seconds = 40 + 5 * max(expected)  # several trials share the cores
            most = 10 * sum(expected)
            failed = trial.run_tests_on(copy, fault.file, fault.text, tests, seconds, most)
            if failed in self.record and not self.fails_because_of(fault, copy, failed):
                tests.remove(failed)
            else:
                noticed = failed or SURVIVED
        return noticed or SURVIVED, round(time.monotonic() - start, 1)

    def fails_because_of(self, fault, copy, test):
        """Return whether a test that has failed with a fault fails again, and passes without it."""
        if self.fails_anyway(copy, test):
            return False
        return bool(trial.run_tests_on(copy, fault.file, fault.text, [test], 600))

    def fails_anyway(self, copy, test):
        """Return whether a test fails without a fault too."""
        if test not in self.passing | self.failing:
            failed = trial.run_tests(copy, [test], 600)
            (self.failing if failed else self.passing).add(test)
        return test in self.failing


def identity(line):
    """Return what a fault keeps when lines above it change."""
    return line["file"], line["function"], line["before"], line["after"]


def read_lines(path):
    if not path or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_lines(path, lines):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


def explanations():
    """Return {(file, before, after): why the fault changes nothing that anybody could see}."""
    lines = read_lines(EXPLAINED)
    return {(line["file"], line["before"], line["after"]): line["why"] for line in lines}


def survivors(lines):
    """Return the faults of lines that are neither noticed nor explained, in the code of today.

    Their lines get today's line numbers.
    """
    known = explanations()
    wanted = []
    for line in lines:
        is_explained = (line["file"], line["before"], line["after"]) in known
        if line["noticed"] in UNNOTICED and not is_explained:
            wanted.append(line)
    faults = []
    for file in sorted({line["file"] for line in wanted}):
        by_text = {}
        for fault in faults_in(ROOT, file, seed=0):
            by_text.setdefault((fault.before, fault.after), []).append(fault)
        for line in [line for line in wanted if line["file"] == file]:
            same = by_text.get((line["before"], line["after"]), [])
            if not same:
                print(f"{file}: no longer in the code: {line['before']} -> {line['after']}")
                continue
            nearest = min(same, key=lambda fault, old=line["line"]: abs(fault.line - old))
            line["line"] = nearest.line
            faults.append(nearest)
    return faults


def show_line(line):
    place = f"{line['file']}:{line['line']}"
    print(f"{place:34} {line['operator']:20} {line['seconds']:4.0f} s  {line['noticed']}")
    print(f"    {line['before']}\n    {line['after']}", flush=True)


def show(lines):
    """Print a table: how many faults of each file were noticed, explained, and neither."""
    explained = explanations()
    table = {}
    for line in lines:
        row = table.setdefault(line["file"], Counter())
        if line["noticed"] not in UNNOTICED:
            row["noticed"] += 1
        elif (line["file"], line["before"], line["after"]) in explained:
            row["explained"] += 1
        else:
            row["survived"] += 1
    table["all"] = sum(table.values(), Counter())
    print(f"{'file':32} faults  noticed  explained  survived")
    for file, row in table.items():
        print(
            f"{file:32} {row.total():6} {row['noticed']:8} "
            f"{row['explained']:10} {row['survived']:9}"
        )


def read_record():
    """Return which functions each test of today executes."""
    record = reached.read()
    if not record:
        raise UserError("which tests execute what is not recorded: python tools/mutants/reached.py")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    tests = [line for line in collected.stdout.splitlines() if "::" in line]
    if collected.returncode:
        raise UserError(f"the tests cannot be imported: {one_line(collected.stdout)[-300:]}")
    new = sum(test not in record for test in tests)
    if new:
        print(f"{new} tests are not recorded: python tools/mutants/reached.py [FILE ...] [-m slow]")
    return {test: record[test] for test in tests if test in record}


def main(args):
    record = read_record()
    done = read_lines(args.output)
    if args.again:
        todo = survivors(done)
        print(f"{len(todo)} faults to try again", flush=True)
    else:
        before = {identity(line) for line in done}
        faults = sample(ROOT, find_files(args.files), args.faults, args.least, args.seed)
        todo = [f for f in faults if (f.file, f.function, f.before, f.after) not in before]
        print(f"seed {args.seed}: {len(faults)} faults, {len(todo)} to try", flush=True)
    trial.import_what_tests_need()
    end = time.monotonic() + 60 * args.minutes
    trials = Trials(record, args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        for fault, (noticed, seconds) in trial.run_all(trials, todo, args.jobs, folder):
            line = {name: getattr(fault, name) for name in fault._fields if name != "text"}
            line |= {"noticed": noticed, "seconds": seconds}
            show_line(line)
            done = [other for other in done if identity(other) != identity(line)]
            done.append(line)
            if args.output:
                write_lines(args.output, done)
            if time.monotonic() > end:
                print(f"stopped after {args.minutes:g} minutes")
                break
    show(done)


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
