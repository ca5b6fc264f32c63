"""The exercises: programs that are broken on purpose, their checks, and the checker.

tests/mends/ has mends of each program, right and wrong, as a reader might write them. Each is run:
a check that passes a wrong mend is worse than none.
"""

import ast
import importlib.util
import json
import re
import shutil
import signal
import sys
import time

import psutil
import pytest
from processes import ROOT, finished, gone, read_until, start

from exercises import check as check_command
from exercises import chinese, english, runner

FOLDER = ROOT / "exercises"
CHECK = "exercises/check.py"
NUMBERS = sorted(english.TEXTS)
CHINESE = re.compile(r"[\u4e00-\u9fff]")
MINE = "01_same_images.py"


def file_of(folder, number):
    (path,) = folder.glob(f"{number:02}_*.py")
    return path


def numbers_in(folder):
    return sorted(int(path.name[:2]) for path in folder.glob("[0-9][0-9]_*.py"))


def mends(number):
    """The module with the mends of an exercise, which has RIGHT and WRONG."""
    path = file_of(ROOT / "tests/mends", number)
    spec = importlib.util.spec_from_file_location(f"mends_{number}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mended(number, replacements):
    """The broken program with some of its text replaced."""
    text = file_of(FOLDER / "broken", number).read_text()
    for old, new in replacements:
        assert text.count(old) == 1, f"{text.count(old)} times in the program: {old}"
        text = text.replace(old, new)
    return text


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """A function that runs a program as an exercise. Returns its Answers in English and Chinese."""

    def judge(number, text, **options):
        path = tmp_path / file_of(FOLDER / "broken", number).name
        path.write_text(text)
        in_chinese = []

        def ask(function, *arguments, original=runner.ask):
            if function == "judge":
                number, program, _, *rest = arguments
                in_chinese.append(runner.Answer(*original(function, number, program, "zh", *rest)))
            return original(function, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(runner, "ask", ask)
            answer = runner.check(number, path, **options)
        return answer, *in_chinese

    return judge


# The checks


def unexpected(judge, number, programs):
    """The programs that the check does not judge as expected: (name, answers).

    Each program is (name, text, words that the answer must contain, or None if it must pass).
    """
    found = []
    for name, text, words in programs:
        answer, in_chinese = judge(number, text)
        as_expected = answer.passed == (words is None) and (words or "") in answer.text
        in_both = answer.passed == in_chinese.passed and CHINESE.search(in_chinese.text)
        if not (as_expected and in_both and answer.text):
            found.append((name, answer, in_chinese))
    return found


@pytest.mark.parametrize("number", NUMBERS)
def test_a_check_refuses_the_broken_program_and_passes_the_solution(judge, number):
    solution = file_of(FOLDER / "solutions", number).read_text()
    programs = [("the broken program", mended(number, []), ""), ("the solution", solution, None)]
    assert unexpected(judge, number, programs) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_check_passes_right_mends_and_refuses_wrong_ones(judge, number):
    module = mends(number)
    programs = []
    for name, replacements in module.RIGHT.items():
        programs.append((f"right: {name}", mended(number, replacements), None))
    for name, (replacements, words) in module.WRONG.items():
        assert words, name
        programs.append((f"wrong: {name}", mended(number, replacements), words))
    assert unexpected(judge, number, programs) == []


@pytest.mark.parametrize("number", NUMBERS)
def test_each_exercise_has_two_right_mends_and_two_wrong_ones(number):
    module = mends(number)
    assert len(module.RIGHT) >= 2 and len(module.WRONG) >= 2
    programs = [mended(number, replacements) for replacements in module.RIGHT.values()]
    programs += [mended(number, replacements) for replacements, _ in module.WRONG.values()]
    assert len({*programs}) == len(programs)


def test_all_folders_have_the_same_exercises():
    assert numbers_in(FOLDER / "broken") == NUMBERS
    assert numbers_in(FOLDER / "solutions") == NUMBERS
    assert numbers_in(FOLDER / "checks") == NUMBERS
    assert numbers_in(ROOT / "tests/mends") == NUMBERS
    assert sorted(chinese.TEXTS) == NUMBERS
    for number in NUMBERS:
        names = {file_of(FOLDER / kind, number).name for kind in ("broken", "solutions", "checks")}
        assert names == {file_of(ROOT / "tests/mends", number).name}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_program_begins_with_its_task_and_is_short(number):
    for folder in ("broken", "solutions"):
        text = file_of(FOLDER / folder, number).read_text()
        docstring = ast.get_docstring(ast.parse(text), clean=False)
        assert docstring == f"{english.TEXTS[number].task}\n"
        code = [line for line in text.split('"""', 2)[2].splitlines() if line.strip()]
        assert len(code) <= (70 if number >= 19 else 40)
        assert number == 4 or len(code) >= 15  # 4 only chooses a device


@pytest.mark.parametrize("number", NUMBERS)
def test_the_page_to_read_has_this_section(number):
    for texts, folder in ((english.TEXTS, "docs"), (chinese.TEXTS, "docs/zh")):
        file, section = texts[number].page
        assert f"\n## {section}\n" in re.sub(r"\n#+ ", "\n## ", (ROOT / folder / file).read_text())


# Programs that fail or hang

LOOP = "for step, (batch, labels) in enumerate(loader):\n"


def solution_with(code, at=LOOP):
    """The solution of exercise 1 with more code before its loop."""
    text = (FOLDER / "solutions" / MINE).read_text()
    assert text.count(at) == 1
    return text.replace(at, f"{code}\n{at}")


LINE = solution_with("HERE").splitlines().index("HERE") + 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("if True", f"line {LINE}, `if True`: SyntaxError: expected ':'"),
        ("import no_such_module", f"line {LINE}, `import no_such_module`: ModuleNotFoundError"),
        ("raise ValueError('odd')", f"rank 0, line {LINE}, `raise ValueError('odd')`: ValueError"),
        ("import sys; sys.exit(3)", "The program failed: rank 0 has ended with exit code 3."),
        ("if rank: raise SystemExit(3)", "The program failed: rank 1 has ended with exit code 3."),
        ("import os; os.kill(os.getpid(), 9)", "The program failed: rank 0 was killed."),
        ("import os\nif rank: os.kill(os.getpid(), 9)", "The program failed: rank 1 was killed."),
        ("if rank: raise SystemExit", "but rank 1 has ended with exit code 0."),
        ("net = model; del model", "I expected a variable `model` at the end of the program"),
        ("raise SystemExit", "I see no image that is trained"),
    ],
)
def test_a_program_that_fails_is_refused_with_a_sentence(judge, code, words):
    answer, in_chinese = judge(1, solution_with(code))
    assert not answer.passed and words in answer.text, answer
    assert not in_chinese.passed and CHINESE.search(in_chinese.text)


def test_a_program_that_computes_forever_is_stopped_at_the_limit(judge):
    answer, in_chinese = judge(1, solution_with("while True: pass"), limit=3)
    assert not answer.passed
    place = f"in line {LINE}, `while True: pass`"
    places = f"rank 0 is {place}; rank 1 is {place}"
    assert answer.text == f"The program did not end within the time limit: {places}."
    assert CHINESE.search(in_chinese.text)
    assert ranks_left() == []


def test_a_program_that_hangs_is_stopped_and_leaves_no_process_behind(judge):
    answer, _ = judge(1, solution_with("if rank == 0:\n    dist.barrier()\n    dist.barrier()"))
    assert not answer.passed and "The ranks wait for each other forever" in answer.text
    assert ranks_left() == []


def test_the_page_shows_the_answer_to_exercise_5_and_lists_all_exercises(judge):
    answer, _ = judge(5, mended(5, []))
    for texts, page in (
        (english.TEXTS, "docs/exercises.md"),
        (chinese.TEXTS, "docs/zh/exercises.md"),
    ):
        text = (ROOT / page).read_text()
        assert f"not yet: {joined(answer.text)}" in joined(text)
        for number in NUMBERS:
            file, section = texts[number].page
            row = rf"^\| {number} \| {re.escape(texts[number].title)} "
            assert re.search(rf"{row}\| \[{re.escape(section)}\]\({file}#", text, re.M), number


def joined(text):
    return " ".join(text.split())


def ranks_left():
    """The processes that the fork server of this one has started, and that have not ended."""
    servers = [child for child in psutil.Process().children() if is_server(child)]
    assert servers
    below = [process for server in servers for process in server.children(recursive=True)]
    return [process for process in below if process.status() != psutil.STATUS_ZOMBIE]


def is_server(process):
    return "forkserver" in " ".join(process.cmdline())


@pytest.mark.timeout(120)
def test_a_judge_that_does_not_answer_is_stopped(monkeypatch):
    monkeypatch.setattr(runner, "LIMIT", 1)
    monkeypatch.setattr(runner, "answer", never)
    with pytest.raises(RuntimeError, match="did not answer within 1 seconds"):
        runner.ask("setups", 1)


def never(*arguments):
    time.sleep(1000)


def test_random_numbers_begin_differently_on_each_rank_as_in_processes_of_their_own(judge):
    lines = "import numpy as np\nprint('drawn', torch.rand(1).item(), np.random.rand())"
    text = solution_with(lines, at="torch.manual_seed(0)\n")
    answer, _ = judge(1, text)
    assert answer.passed, answer
    first, second = re.findall(r"drawn (\S+) (\S+)", answer.output)
    assert first[0] != second[0] and first[1] != second[1]


# The command line


@pytest.fixture
def english_locale(monkeypatch):
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)


@pytest.fixture
def check(english_locale, tmp_path, monkeypatch, capsys):
    """A function that runs check.py with these flags. Returns its exit code and its output.

    It runs in this process, which spares the seconds of importing torch for the ranks.
    """

    def check(*flags):
        monkeypatch.setattr(sys, "argv", ["check.py", *map(str, flags), "--folder", str(tmp_path)])
        code = 0
        try:
            check_command.main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out + err

    return check


def solve(folder, number):
    shutil.copy(file_of(FOLDER / "solutions", number), folder)


def test_the_first_call_lists_the_exercises_and_creates_the_file_of_the_first(check, tmp_path):
    code, out = check()
    assert code == 0
    for number, text in english.TEXTS.items():
        assert f"  {number:2} {text.title}\n" in out
    assert "Exercise 1: Sharing the images" in out and english.TEXTS[1].task in out
    assert [path.name for path in tmp_path.iterdir()] == [MINE]
    assert (tmp_path / MINE).read_text() == (FOLDER / "broken" / MINE).read_text()


def test_a_file_of_the_reader_is_checked_and_not_changed(check, tmp_path):
    mine = tmp_path / file_of(FOLDER / "broken", 4).name
    mine.write_text("device = None\n")
    code, out = check(4)
    assert code == 1 and "not yet: Rank 0 chose None" in out and "--hint" in out
    assert mine.read_text() == "device = None\n"
    check("4", "--hint")
    assert mine.read_text() == "device = None\n"


def test_an_exercise_that_has_passed_makes_the_next_one_next(english_locale, tmp_path):
    def command(*flags):
        code, out, err = finished(start(CHECK, *flags, "--folder", tmp_path))
        return code, out + err

    (tmp_path / "passed.json").write_text(json.dumps([1, 2, 3]))
    code, out = command()
    assert code == 0 and "Exercise 4: " in out
    solve(tmp_path, 4)
    code, out = command(4)
    assert code == 0 and "passed: on two machines with two GPUs" in out, out
    assert english.TEXTS[4].why in out
    assert json.loads((tmp_path / "passed.json").read_text()) == [1, 2, 3, 4]
    listed = command()[1]
    assert f"*  4 {english.TEXTS[4].title}\n" in listed and "Exercise 5: " in listed
    file_of(tmp_path, 4).write_text("device = None\n")
    assert command(4)[0] == 1 and command(99)[0] == 2
    assert json.loads((tmp_path / "passed.json").read_text()) == [1, 2, 3]


def test_reset_begins_again_and_keeps_the_files_of_the_reader(check, tmp_path):
    check()
    mine = tmp_path / MINE
    for name, text in (("old", "# a try\n"), ("old1", "# another\n")):
        mine.write_text(text)
        code, out = check(1, "--reset")
        assert code == 0 and f"01_same_images.{name}\n" in out
        assert mine.with_suffix(f".{name}").read_text() == text
        assert mine.read_text() == (FOLDER / "broken" / MINE).read_text()
    assert mine.with_suffix(".old").read_text() == "# a try\n"


def test_hint_and_solution_are_printed(check):
    code, out = check(1, "--hint")
    assert code == 0 and english.TEXTS[1].hint in out
    assert 'Read "Who gets which image" in docs/data-loading.md.' in out
    code, out = check(1, "--solution")
    assert code == 0 and english.TEXTS[1].why in out
    assert "\n-loader = DataLoader(dataset, batch_size=32, shuffle=True)\n" in out
    assert "\n+loader = DataLoader(dataset, batch_size=32, sampler=sampler)\n" in out


def test_a_wrong_command_ends_with_exit_code_2(check):
    for flags in (["--hint"], [99], [1, "--all"], [1, "--hint", "--solution"]):
        code, out = check(*flags)
        assert code == 2 and "check.py: error: " in out, flags


def test_chinese_is_spoken_if_asked_for_or_if_the_locale_is_chinese(check, tmp_path, monkeypatch):
    mine = tmp_path / MINE
    by_flag = check("--zh")
    assert by_flag[0] == 0 and chinese.TEXTS[1].title in by_flag[1]
    assert mine.read_text().startswith(f'"""{chinese.TEXTS[1].task}\n"""')
    mine.unlink()
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    out = check()[1]
    assert chinese.TEXTS[1].title in out and english.TEXTS[1].title not in out
    assert mine.read_text().startswith(f'"""{chinese.TEXTS[1].task}\n"""')
    code, out = check(4)
    assert code == 1 and "还不对：rank 2 选择了 cuda:2" in out
    assert chinese.TEXTS[1].hint in check(1, "--hint")[1]


def test_the_limit_stops_a_program(check, tmp_path):
    (tmp_path / MINE).write_text(solution_with("while True: pass"))
    code, out = check(1, "--limit", 1)
    assert code == 1 and "did not end within the time limit" in out


def test_a_file_with_a_chinese_docstring_runs(judge):
    text = (FOLDER / "solutions" / MINE).read_text()
    answer, _ = judge(1, text.replace(english.TEXTS[1].task, chinese.TEXTS[1].task))
    assert answer.passed, answer


def test_all_checks_the_files_that_exist(check, tmp_path):
    solve(tmp_path, 4)
    code, out = check("--all")
    assert code == 1 and re.search(r"^ 4 passed .* each process has its own GPU\.$", out, re.M)
    assert len(re.findall(r"^.. - .* no file$", out, re.M)) == len(NUMBERS) - 1


@pytest.mark.slow
def test_all_solutions_pass():
    code, out, err = finished(start(CHECK, "--all", "--folder", FOLDER / "solutions"))
    assert code == 0 and len(re.findall(r"^.. passed ", out, re.M)) == len(NUMBERS), out + err


def test_watch_notices_a_saved_mend_and_goes_on_to_the_next(english_locale, tmp_path):
    (tmp_path / "passed.json").write_text(json.dumps([1, 2, 3]))
    watching = start(CHECK, 4, "--watch", "--folder", tmp_path)
    assert "not yet: Rank 2 chose cuda:2" in read_until(watching, "waiting until you save")
    mine = tmp_path / file_of(FOLDER / "broken", 4).name
    mine.write_text("")  # as some editors do
    solve(tmp_path, 4)
    read_until(watching, "passed: on two machines")
    read_until(watching, "Exercise 5: ")
    watching.send_signal(signal.SIGINT)
    assert finished(watching)[0] == 130


def wait_for(look):
    """Look until there is something, and return it."""
    deadline = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_too(english_locale, tmp_path):
    shutil.copy(file_of(FOLDER / "broken", 5), tmp_path)
    checking = start(CHECK, 5, "--folder", tmp_path)
    read_until(checking, "running")
    server = wait_for(
        lambda: next(filter(is_server, psutil.Process(checking.pid).children()), None)
    )
    ranks = wait_for(lambda: server.children()[1:] and server.children())
    checking.send_signal(signal.SIGINT)
    assert finished(checking)[0] == 130
    assert gone([server, *ranks])
