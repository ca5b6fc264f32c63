"""tools/mutants/: random faults, the tests that reach them, and what counts as noticed."""

import json
from types import SimpleNamespace

import pytest
from processes import ROOT

from common.errors import UserError
from tools.mutants import faults, reached, sample, trial

CODE = '''\
"""A text for people."""

STEPS = 3


class Meter:
    scale = 2

    def add(self, value: int = 1):
        """Add a value."""
        if value > 0:
            self.total += value * self.scale
        print("a text for people", value)


def parse(parser):
    parser.add_argument("--steps", help="words")
'''


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of one file and its tests, of which one fails without a fault."""
    root = tmp_path / "repository"
    (root / "tests").mkdir(parents=True)
    (root / ".venv/lib/python3/site-packages").mkdir(parents=True)
    (root / "code.py").write_text("def double(x):\n    y = x * 2\n    log = x\n    return y\n")
    (root / "tests/test_code.py").write_text(
        "import multiprocessing\n"
        "import os\n"
        "import time\n"
        "import runpy\n"
        "double = runpy.run_path('code.py')['double']\n"
        "def test_broken():\n    assert double(0) == 1\n"
        "def test_zero():\n    assert double(0) == 0\n"
        "def test_three():\n    assert double(3) == 6\n"
        "def test_main():\n    assert not multiprocessing.parent_process()\n"
        "def test_by_chance():\n"
        "    seen = os.path.exists('seen')\n"
        "    open('seen', 'w').close()\n"
        "    assert seen\n"
        "def test_hang():\n    time.sleep(100)\n"
    )
    monkeypatch.setattr(trial, "ROOT", root)
    return root


def entry(seconds, *places, slow=False):
    return {"seconds": seconds, "slow": slow, "reaches": list(places)}


# The faults


def test_faults_leave_out_what_no_test_should_hold_fast(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    made = list(faults.faults_in(tmp_path, "code.py", seed=0))
    changes = {(fault.function, fault.before, fault.after) for fault in made}
    expected = {
        ("", "STEPS = 3", "STEPS = 4"),
        ("", "scale = 2", "scale = None"),
        ("Meter.add", "def add(self, value: int = 1):", "def add(self, value: int = 2):"),
        ("Meter.add", "if value > 0:", "if value >= 0:"),
        ("Meter.add", "if value > 0:", "if not (value > 0):"),
        ("Meter.add", "self.total += value * self.scale", "self.total = value * self.scale"),
        ("Meter.add", 'print("a text for people", value)', "pass"),
        ("parse", 'parser.add_argument("--steps", help="words")', "pass"),
    }
    assert expected <= changes
    after = " ".join(after for _, _, after in changes)
    assert not any(text in after for text in ("XXwords", "XXa text", "help=None", '"--steps", )'))
    for fault in made:
        compile(fault.text, "code.py", "exec")
        old = CODE.splitlines()
        new = fault.text.splitlines()
        assert old[: fault.line - 1] == new[: fault.line - 1] and old != new


def test_a_sample_depends_on_its_seed_and_takes_every_file():
    files = ["common/models.py", "imagenet/signals.py"]
    first = faults.sample(ROOT, files, count=9, least=3, seed=4)
    assert first == faults.sample(ROOT, files, count=9, least=3, seed=4)
    assert first != faults.sample(ROOT, files, count=9, least=3, seed=5)
    counts = [sum(fault.file == file for fault in first) for file in files]
    assert sum(counts) == 9 and min(counts) >= 3


# The tests of a fault


def test_the_tests_of_a_fault_reach_it_cheapest_first():
    """The tests of a fault are those that reach it cheapest first."""
    record = {
        "tests/test_a.py::dear": entry(50, "code.py::f"),
        "tests/test_a.py::other": entry(1, "code.py::g"),
        "tests/test_b.py::case[1]": entry(2, "code.py::f"),
        "tests/test_b.py::case[2]": entry(2, "code.py::f"),
        "tests/test_b.py::last": entry(2, "code.py::f"),
        "tests/test_c.py::slow": entry(1, "code.py::f", slow=True),
    }
    inside = SimpleNamespace(file="code.py", function="f")
    cases = ["tests/test_b.py::case[1]", "tests/test_b.py::last", "tests/test_b.py::case[2]"]
    chosen = sample.tests_that_reach(inside, record, budget=1000)
    assert chosen == [*cases, "tests/test_a.py::dear", "tests/test_c.py::slow"]
    assert sample.tests_that_reach(inside, record, budget=5) == cases
    outside = SimpleNamespace(file="code.py", function="")
    assert set(sample.tests_that_reach(outside, record, budget=1000)) == record.keys()
    elsewhere = SimpleNamespace(file="code.py", function="h")
    assert sample.tests_that_reach(elsewhere, record, budget=1000) == []


def test_sections_of_a_rung_are_compared_with_its_parents():
    """The sections of a rung are compared with those of its parent."""
    compares = f"{sample.COMPARES_RUNGS}[04_mnmc_ddp_mp.py]"
    record = {compares: entry(1), "tests/core/test_ladder.py::dear": entry(50, "03.py::main")}
    rung = SimpleNamespace(file="03_mnmc_ddp_launch.py", function="main")
    assert sample.tests_that_reach(rung, record, budget=1000) == [compares]
    other = SimpleNamespace(file="06_imagenet.py", function="main")
    assert sample.tests_that_reach(other, record, budget=1000) == []


def test_lines_belong_to_the_innermost_function_that_runs_them():
    names = reached.functions_of(CODE)
    assert {names.get(line) for line in (3, 6, 7, 9)} == {None}, "import runs them"
    assert names[11] == names[13] == "Meter.add" and names[17] == "parse"


@pytest.mark.slow
def test_forked_ranks_and_started_processes_are_recorded_too(monkeypatch, tmp_path):
    monkeypatch.setattr(reached, "RECORD", tmp_path / "reached.json")
    signals = "tests/core/test_stop.py::test_a_signal_while_torch_is_imported"
    signals += "_asks_for_a_requeue"
    ranks = "tests/core/test_training.py::test_dropout_differs_in_every_micro_batch_of_every_rank"
    reached.main([signals, ranks])
    record = json.loads((tmp_path / "reached.json").read_text())
    assert "imagenet/signals.py::_note" in record[signals]["reaches"]
    assert "06_imagenet.py::train_epoch" in record[ranks]["reaches"]
    assert "06_imagenet.py::train_epoch" not in record[signals]["reaches"]
    assert record[ranks]["seconds"] > 0 and not record[ranks]["slow"]


# What counts as noticed


def fault_in(root, before, after):
    made = faults.faults_in(root, "code.py", seed=0)
    return next(fault for fault in made if (fault.before, fault.after) == (before, after))


def test_a_fault_is_noticed_by_a_test_that_fails_twice(repository, tmp_path):
    """A fault is noticed by a test that fails twice and passes without it."""
    tests = ["test_broken", "test_by_chance", "test_zero", "test_three", "test_main"]
    record = {f"tests/test_code.py::{name}": entry(1, "code.py::double") for name in tests}
    todo = [
        fault_in(repository, "y = x * 2", "y = x / 2"),
        fault_in(repository, "log = x", "log = None"),
    ]
    trials = sample.Trials(record, budget=100)
    results = dict(trial.run_all(trials, todo, jobs=2, folder=tmp_path))
    assert results[todo[0]][0] == "tests/test_code.py::test_three"
    assert results[todo[1]][0] == sample.SURVIVED
    original = (repository / "code.py").read_text()
    assert (tmp_path / "copy-0/code.py").read_text() == original
    nobody = sample.Trials({}, budget=100)
    assert nobody(tmp_path / "copy-0", todo[0])[0] == sample.NOT_REACHED


def test_a_fault_may_remove_a_case_of_a_test(repository, tmp_path):
    with open(repository / "tests/test_code.py", "a") as file:
        file.write("import pytest\n@pytest.mark.parametrize('x', [double(1), double(3)])\n")
        file.write("def test_cases(x):\n    assert x != 9\n")
    trial.make_copy(tmp_path / "copy")
    name = "tests/test_code.py::test_cases"
    text = (repository / "code.py").read_text()
    for after, noticed in ("x * 4", None), ("x * 3", f"{name}[9]"):
        fault = text.replace("x * 2", after)
        cases = [f"{name}[2]", f"{name}[6]"]
        assert trial.run_tests_on(tmp_path / "copy", "code.py", fault, cases, 30) == noticed


def test_a_trial_that_fails_is_no_noticed_fault(repository, tmp_path, capfd):
    def fail(copy, item):
        if item == "second":
            raise UserError("pytest does not know a test")
        return item

    trials = trial.run_all(fail, ["first", "second"], jobs=1, folder=tmp_path)
    assert next(trials) == ("first", "first")
    with pytest.raises(UserError, match="1 of 2 trials failed: see above"):
        next(trials)
    assert "pytest does not know a test" in capfd.readouterr().err


def test_a_test_that_hangs_has_noticed_the_fault(repository, tmp_path):
    trial.make_copy(tmp_path / "copy")
    hang = "tests/test_code.py::test_hang"
    zero = "tests/test_code.py::test_zero"
    assert trial.run_tests(tmp_path / "copy", [zero, hang], seconds=1) == hang
    assert trial.run_tests(tmp_path / "copy", [zero], seconds=30) is None
    (tmp_path / "copy/code.py").write_text("syntax error")
    failed = trial.run_tests(tmp_path / "copy", [zero], seconds=30)
    assert failed in ("tests/test_code.py", trial.CANNOT_START)


def test_names_of_tests_may_hold_spaces_and_must_be_known():
    name = "tests/test_code.py::test_mistakes[--lr - 1 - message]"
    text = f"...\nFAILED {name} - assert 1 == 2\n1 failed in 0.1s\n"
    assert trial.failed_test(text, ["tests/test_code.py::test_mistakes[--lr", name]) == name
    text = "ERROR tests/test_code.py - ImportError: no\n"
    assert trial.failed_test(text, [name]) == "tests/test_code.py"
    assert trial.failed_test("ImportError while loading conftest", [name]) == trial.CANNOT_START
    with pytest.raises(UserError, match="pytest does not know a test"):
        trial.failed_test(f"ERROR: not found: {name}\n", [name])


def test_survivors_are_found_again_after_the_code_has_moved(repository, monkeypatch, capsys):
    monkeypatch.setattr(sample, "ROOT", repository)
    old = {"file": "code.py", "line": 3, "before": "log = x", "noticed": sample.SURVIVED}
    lines = [
        old | {"after": "log = None"},
        old | {"after": "log = 7"},
        old | {"after": "log = None", "line": 2, "noticed": "a test"},
    ]
    code = (repository / "code.py").read_text()
    (repository / "code.py").write_text(f"import sys\n\n{code}")
    (fault,) = sample.survivors(lines)
    assert fault.line == lines[0]["line"] == 5 and fault.after == "log = None"
    assert "code.py: no longer in the code: log = x -> log = 7" in capsys.readouterr().out


def test_the_table_counts_noticed_explained_and_survived(monkeypatch, tmp_path, capsys):
    line = {"file": "code.py", "line": 1, "before": "a", "after": "b", "noticed": "a test"}
    lines = [line, line | {"noticed": sample.SURVIVED}]
    lines += [line | {"noticed": sample.NOT_REACHED, "after": "c"}]
    (tmp_path / "explained.jsonl").write_text(
        '{"file": "code.py", "before": "a", "after": "c", "why": "nobody sees it"}\n'
    )
    monkeypatch.setattr(sample, "EXPLAINED", tmp_path / "explained.jsonl")
    sample.show(lines)
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "3", "1", "1", "1"]


def test_a_sample_continues_and_tries_survivors_again(monkeypatch, tmp_path, capsys):
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(CODE)
    output = tmp_path / "sample.jsonl"
    tried = []

    def run_all(trials, faults, jobs, folder):
        tried.append((faults, jobs, trials.budget))
        for fault in faults:
            yield fault, (sample.SURVIVED if "None" in fault.after else "a test", 1.0)

    def run(*given):
        monkeypatch.setattr("sys.argv", ["sample.py", *map(str, given), "--output", str(output)])
        sample.main(sample.parse_args())
        return sample.read_lines(output)

    monkeypatch.setattr(sample, "ROOT", tmp_path)
    monkeypatch.setattr(trial, "run_all", run_all)
    monkeypatch.setattr(trial, "import_what_tests_need", lambda: None)
    monkeypatch.setattr(sample, "read_record", dict)
    files = ["one.py", "two.py"]
    flags = [*files, "--faults", 12, "--least", 5, "--seed", 2]
    stopped = run(*flags, "--minutes", 1e-9)
    assert len(stopped) == 1 and "stopped after 1e-09 minutes" in capsys.readouterr().out
    lines = run(*flags, "--jobs", 3, "--seconds", 7)
    assert lines[0] == stopped[0] and len(lines) == 12
    faults_tried, jobs, seconds = tried[-1]
    assert (len(faults_tried), jobs, seconds) == (11, 3, 7)
    expected = faults.sample(tmp_path, files, count=12, least=5, seed=2)
    assert {(line["line"], line["after"]) for line in lines} == {
        (f.line, f.after) for f in expected
    }
    survived = [line for line in lines if line["noticed"] == sample.SURVIVED]
    run("--again")
    assert 0 < len(tried[-1][0]) == len(survived) < 12


def test_every_explained_fault_is_still_in_the_code():
    for line in sample.read_lines(sample.EXPLAINED):
        code = " ".join(part.strip() for part in (ROOT / line["file"]).read_text().splitlines())
        assert line["before"] in code and line["why"], line
