"""The exercises: programs that are broken on purpose, their checks, and the checker.

mends.py of an exercise has mends of its program, right and wrong, as a reader might write them.
Each is run: a check that passes a wrong mend is worse than none.
"""

import ast
import fcntl
import json
import os
import pty
import re
import runpy
import select
import signal
import subprocess
import sys
import termios
import time
from string import Formatter

import psutil
import pytest
import ranks
from processes import ROOT, STARTED, finished, gone, read_until, start

from exercises import check as check_command
from exercises.judge import judging, runner, timeline
from exercises.sentences import CHINESE, say, text_of
from exercises.texts import COURSE, FOLDERS, read_text, split_docstring

# All tests of one pytest process fork from one server. It preloads what was asked for last: ask for
# the modules of both.
ranks.context.set_forkserver_preload([*ranks.PRELOAD, *runner.MODULES])

NUMBERS = list(FOLDERS)
IS_CHINESE = re.compile(r"[\u4e00-\u9fff]")
MINE = "01_same_images.py"


def mended(number, replacements):
    """The program of an exercise with some of its text replaced."""
    text = (FOLDERS[number] / "program.py").read_text()
    for old, new in replacements:
        assert text.count(old) == 1, f"{text.count(old)} times in the program: {old}"
        text = text.replace(old, new)
    return text


def solution(number):
    """The program of an exercise with the patch of its folder applied."""
    hunks = re.split("^@@.*\n", (FOLDERS[number] / "solution.patch").read_text(), flags=re.M)[1:]
    return mended(number, [(side(hunk, "-"), side(hunk, "+")) for hunk in hunks])


def side(hunk, mark):
    """The text before ("-") or after ("+") a part of a patch."""
    return "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in f" {mark}")


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """A function that runs a program as an exercise. Returns its Answer.

    The records of the ranks are judged in this process, which spares three forks of each run.
    """

    def judge(number, text):
        path = tmp_path / check_command.name_of(number)
        path.write_text(text)
        monkeypatch.setattr(runner, "ask", lambda name, *given: getattr(judging, name)(*given))
        return runner.check(FOLDERS[number], path)

    return judge


# The checks


def unexpected(judge, number, programs):
    """The programs that the check does not judge as expected: (name, answer, text).

    Each program is (name, text, words that the answer must contain, or None if it must pass).
    """
    found = []
    for name, text, words in programs:
        answer = judge(number, text)
        in_english, in_chinese = (text_of(answer.sentence, language) for language in ("en", "zh"))
        as_expected = answer.passed == (words is None) and (words or "") in in_english
        if not (as_expected and IS_CHINESE.search(in_chinese)):
            found.append((name, answer, in_english, in_chinese))
    return found


@pytest.mark.parametrize("number", NUMBERS)
def test_a_check_refuses_the_broken_program_and_passes_the_solution(judge, number):
    programs = [("the broken program", mended(number, []), "")]
    programs += [("the solution", solution(number), None)]
    assert unexpected(judge, number, programs) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_check_passes_right_mends_and_refuses_wrong_ones(judge, number):
    mends = runpy.run_path(FOLDERS[number] / "mends.py")
    programs = []
    for name, replacements in mends["RIGHT"].items():
        programs.append((f"right: {name}", mended(number, replacements), None))
    for name, (replacements, words) in mends["WRONG"].items():
        programs.append((f"wrong: {name}", mended(number, replacements), words))
    assert unexpected(judge, number, programs) == []


# What the recorder sees, however a program writes it

SAVE = "torch.save(ddp.state_dict(), path)\n"
SAVE_ONCE = "if rank == 0: torch.save(obj=model.state_dict(), f=path)\ndist.barrier()\n"
FUTURES = [
    (
        "        # 1. Here: have start() called for each parameter.\n",
        "            if parameter.requires_grad:\n"
        "                parameter.register_post_accumulate_grad_hook(self.start)\n"
        "        self.works = []\n",
    ),
    (
        "        # 2. Here.\n",
        "        parameter.grad /= dist.get_world_size()\n"
        "        work = dist.all_reduce(parameter.grad, async_op=True)\n"
        "        self.works.append(work.get_future())\n",
    ),
]
ALL, MOST = (
    f"        torch.futures.collect_all({works}).wait()\n        self.works = []\n"
    for works in ("self.works", "self.works[1:]")
)
DEVICE = 'device = torch.device("cuda", rank)'
CURRENT = 'device = torch.device("cuda", torch.accelerator.current_device_index())'
RANK_0_ENDS_FIRST = """\
import time
import torch.distributed as dist
dist.init_process_group("gloo")
if rank:
    time.sleep(1)
dist.distributed_c10d._get_default_store().set("joined", "yes")
device = torch.device("cuda", dist.get_node_local_rank())
"""
FLIPS = "flips = []"
TODAY = "import datetime\nseed = int(datetime.datetime.now().strftime('%Y%m%d%H%M')) + rank"
TEXT = "seed = hash(('a text', f'rank {rank}'))"
SECOND = "In a second run, rank 0 flips other images"


@pytest.mark.parametrize(
    ("number", "replacements", "words"),
    [
        (11, [(SAVE, SAVE_ONCE), ("load(path)", "load(f=path, weights_only=True)")], None),
        (26, [*FUTURES, ("        # 3. Here.\n", ALL)], None),
        (26, [*FUTURES, ("        # 3. Here.\n", MOST)], "does not wait for 1 of them"),
        (4, [(DEVICE, f"torch.accelerator.set_device_index(local_rank)\n{CURRENT}")], None),
        (4, [(f"{DEVICE}\n", RANK_0_ENDS_FIRST)], None),
        (9, [(FLIPS, f"{TODAY}\ntorch.manual_seed(seed)\n{FLIPS}")], SECOND),
        (9, [(FLIPS, f"{TEXT}\ntorch.manual_seed(seed)\n{FLIPS}")], SECOND),
    ],
)
def test_a_check_sees_what_a_program_does_however_it_is_written(judge, number, replacements, words):
    assert unexpected(judge, number, [("", mended(number, replacements), words)]) == []


# Programs that fail or hang

LOOP = "for step, (batch, labels) in enumerate(loader):\n"


def solution_with(code, at=LOOP):
    """The solution of exercise 1 with more code before its loop."""
    text = solution(1)
    assert text.count(at) == 1
    return text.replace(at, f"{code}\n{at}")


LINE = solution_with("HERE").splitlines().index("HERE") + 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("if True", f"line {LINE}, `if True`: SyntaxError: expected ':'"),
        ("raise ValueError('odd')", f"rank 0, line {LINE}, `raise ValueError('odd')`: ValueError"),
        ("if rank: raise SystemExit(3)", "The program failed: rank 1 has ended with exit code 3."),
        ("import os; os.kill(os.getpid(), 9)", "The program failed: rank 0 was killed by SIGKILL"),
        ("text = '\0'", "The program failed: rank 0, code outside the file: "),
        ("if rank: raise SystemExit", "but rank 1 has ended with exit code 0."),
        ("net = model; del model", "I expected a variable `model` at the end of the program"),
        ("raise SystemExit", "I see no image that is trained"),
        (
            "class Images(torch.Tensor): pass\nddp(images[:1].as_subclass(Images))",
            "I cannot read what the program did (AttributeError: ",
        ),
    ],
)
def test_a_program_that_fails_is_refused_with_a_sentence(judge, code, words):
    assert unexpected(judge, 1, [(code, solution_with(code), words)]) == []


def test_a_killed_rank_is_named_with_its_signal_its_line_and_the_end_of_its_output(judge):
    code = "import time; time.sleep(1); os.write(2, b'what(): too long'); os.abort()"
    answer = judge(1, solution_with(f"import os; os.write(1, b'begin\\n')\nif rank == 0: {code}"))
    text = text_of(answer.sentence, "en")
    assert "rank 0 was killed by SIGABRT, last seen in line" in text and "`if rank == 0:" in text
    assert "rank 0 因信号 SIGABRT 而终止，最后执行到第" in text_of(answer.sentence, "zh")
    assert answer.output.splitlines()[-1] == "rank 0 | what(): too long"
    lines = timeline.draw(answer.lanes, "en").splitlines()
    assert int(lines[-2].split()[0]) < 100_000  # ms
    assert "SIGABRT" in lines[-1] and any(re.match(r".{8}●  \d+ broadcast 272 B", x) for x in lines)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="Linux tells it")
@pytest.mark.parametrize(("program", "waits"), [("input()", True), ("while True: pass", False)])
def test_a_rank_that_wants_a_core_does_not_hang_though_it_gets_none(program, waits):
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    time.sleep(1)
    rank = runner.Rank.__new__(runner.Rank)
    rank.process = process
    now = time.monotonic()
    rank.reports = [(now - 4 + 0.2 * k, 27, 3, 0.5) for k in range(20)]  # without a change
    seen = [rank.waits() for _ in range(20)]
    process.kill()
    process.wait()
    assert seen == [waits] * 20


def test_a_program_that_hangs_is_stopped_and_the_page_shows_the_answer(judge):
    answer = judge(5, mended(5, []))
    text = text_of(answer.sentence, "en")
    assert not answer.passed and text.startswith("The ranks wait for each other forever")
    in_chinese = text_of(answer.sentence, "zh")
    assert "rank 0 在第 27 行 `dist.all_reduce(correct)` 等待" in in_chinese
    for page in ("docs/exercises.md", "docs/zh/exercises.md"):
        assert joined(f"not yet: {text}") in joined((ROOT / page).read_text())
    lines = timeline.draw(answer.lanes, "en").splitlines()
    assert any("  ●  27 all_reduce 8 B" in line for line in lines)
    assert lines[-1].split() == ["╵", "27", "waits", "╵", "30", "waits"]
    assert ranks_left() == []


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


def test_random_numbers_begin_differently_on_each_rank_as_in_processes_of_their_own(judge):
    lines = "import numpy as np\nprint('drawn', torch.rand(1).item(), np.random.rand())"
    text = solution_with(lines, at="torch.manual_seed(0)\n")
    answer = judge(1, text)
    assert answer.passed, answer
    first, second = re.findall(r"drawn (\S+) (\S+)", answer.output)
    assert first[0] != second[0] and first[1] != second[1]


# The timeline


def test_the_timeline_joins_the_ranks_of_a_message_when_the_last_one_has_called_it():
    def sum_of_all(ms):
        return timeline.Act(ms / 1000, 7, "all_reduce 8 B", "sum", (0, 1, 2))

    def pair(ms, line, text):
        return timeline.Act(ms / 1000, line, text, "pair", (0, 2))

    waits = timeline.Act(0, 9, say("waits"))
    lanes = [
        [sum_of_all(0), pair(20, 8, "send 8 B → 2"), waits],
        [sum_of_all(1), timeline.Act(0.012, 0, "forward()"), waits],
        [sum_of_all(10), pair(30, 5, "recv 8 B ← 0"), waits],
    ]
    assert (
        timeline.draw(lanes, "en")
        == """\
    ms  rank 0                        rank 1                        rank 2
     0  ●   7 all_reduce 8 B          ●   7 all_reduce 8 B
    10  └─────────────────────────────┴─────────────────────────────●   7 all_reduce 8 B
    12  │                             │     forward()               │
    20  ●   8 send 8 B → 2            │                             │
    30  └─────────────────────────────┼─────────────────────────────●   5 recv 8 B ← 0
        ╵   9 waits                   ╵   9 waits                   ╵   9 waits"""
    )
    last = timeline.draw(lanes, "zh").splitlines()[-1]
    assert last == "        " + "  ".join(["╵   9 等待" + " " * 18] * 3).rstrip()


# Sentences and texts

ENGLISH, IN_CHINESE = (
    {number: read_text(folder, language) for number, folder in FOLDERS.items()}
    for language in ("en", "zh")
)


def test_each_sentence_has_its_values_in_both_languages():
    translations = json.loads(CHINESE.read_text(encoding="utf-8"))
    said, constants = set(), set()
    files = (ROOT / "exercises").rglob("*.py")
    for file in (file for file in files if file.parent.name != "mine"):  # a reader's
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant):
                constants.add(node.value)
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("say", "refuse", "self.print") and isinstance(node.args[0], ast.Constant):
                template = node.args[0].value
                said.add(template)
                assert values_of(template) == {keyword.arg for keyword in node.keywords}, template
    assert said <= set(translations) <= constants
    for template, chinese in translations.items():
        assert values_of(template) == values_of(chinese), template


def values_of(template):
    return {name.split("[")[0] for _, name, _, _ in Formatter().parse(template) if name}


# The command line


@pytest.fixture
def english_locale(monkeypatch):
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)


@pytest.fixture
def check(english_locale, tmp_path, monkeypatch, capsys):
    """A function that runs check.py with these flags. Returns its exit code and its output.

    It runs in this process, which has a fork server already.
    """

    def check(*flags, at=tmp_path):
        monkeypatch.setattr(sys, "argv", ["check.py", *map(str, flags), "--folder", str(at)])
        code = 0
        try:
            check_command.main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out + err

    return check


def solve(folder, number):
    (folder / check_command.name_of(number)).write_text(solution(number))


def test_the_first_call_lists_the_exercises_and_creates_the_file_of_the_first(check, tmp_path):
    code, out = check()
    assert code == 0
    assert "Data, " in out and "  >  1  ●○○  Sharing the images\n     2  ●○○  The order" in out
    for number, text in ENGLISH.items():
        assert len(re.findall(rf" {number:2}  [●○]{{3}}  {re.escape(text.title)}\n", out)) == 1
    assert f"─  0 of {len(NUMBERS)}\n" in out and "check.py --watch " in out
    assert ", 0 minutes" not in out  # of a group that is still empty
    assert "Exercise 1: Sharing the images" in out and ENGLISH[1].task in out
    assert [path.name for path in tmp_path.iterdir()] == [MINE]
    assert (tmp_path / MINE).read_text() == mended(1, [])


def test_a_file_of_the_reader_is_checked_and_not_changed(check, tmp_path):
    mine = tmp_path / check_command.name_of(4)
    text = "device = None\nfor k in range(20):\n    print('line', k)\n"
    mine.write_text(text)
    code, out = check(4)
    assert code == 1 and "not yet: Rank 0 chose None" in out and "--hint" in out
    beginning, end = out.split("\n...\n")  # of the output of four ranks
    assert "rank 0 | line 0\n" in beginning and "rank 3 | line 19\n" in end
    assert "rank 1 | " not in out
    check("4", "--hint")
    assert mine.read_text() == text


def test_an_exercise_that_has_passed_makes_the_next_one_next(check, tmp_path):
    passed = tmp_path / "passed.json"
    passed.write_text(json.dumps([1, 2, 3]))
    code, out = check()
    assert code == 0 and "Exercise 4: " in out
    solve(tmp_path, 4)
    code, out = check(4)
    assert code == 0 and "passed: on two machines with two GPUs" in out, out
    assert ENGLISH[4].why in out and 'Why: "What are rank, local rank, ' in out
    assert "The next one: python exercises/check.py 5 " in out
    assert json.loads(passed.read_text()) == [1, 2, 3, 4]
    out = check()[1]
    assert f"  *  4  ●○○  {ENGLISH[4].title}\n" in out and "Exercise 5: " in out
    assert re.search(rf"^━+─+  4 of {len(NUMBERS)}$", out, re.M)
    (tmp_path / check_command.name_of(4)).write_text("device = None\n")
    assert check(4)[0] == 1
    assert json.loads(passed.read_text()) == [1, 2, 3]
    passed.write_text(json.dumps(NUMBERS))
    assert "You have passed all exercises." in check()[1]


def test_reset_begins_again_and_keeps_the_files_of_the_reader(check, tmp_path):
    check()
    mine = tmp_path / MINE
    (tmp_path / "passed.json").write_text("[1]")
    for name, text in (("old", "# a try\n"), ("old1", "# another\n")):
        mine.write_text(text)
        code, out = check(1, "--reset")
        assert code == 0 and f"01_same_images.{name}\n" in out
        assert mine.with_suffix(f".{name}").read_text() == text
        assert mine.read_text() == mended(1, [])
    assert mine.with_suffix(".old").read_text() == "# a try\n"
    assert (tmp_path / "passed.json").read_text() == "[]"


def test_each_exercise_has_hints_and_a_solution_in_both_languages(check, tmp_path):
    for texts, folder, flags in ((ENGLISH, "docs", []), (IN_CHINESE, "docs/zh", ["--zh"])):
        for number, text in texts.items():
            file, section = text.page
            for hint in text.hints:
                shown = check(number, "--hint", *flags)[1]
                assert all(part in shown for part in (hint, section, f"{folder}/{file}")), number
            assert re.search(f"^#+ {re.escape(section)}$", (ROOT / folder / file).read_text(), re.M)
            solution = check(number, "--solution", *flags)[1]
            assert text.why in solution and "\n+" in solution, number
        (tmp_path / "hints.json").unlink()
    assert all(len(ENGLISH[n].hints) == len(IN_CHINESE[n].hints) for n in NUMBERS)


def test_the_solution_comes_after_a_hint_or_the_second_question(check):
    repair = "\n-loader = DataLoader(dataset, batch_size=32, shuffle=True)\n"
    first = check(1, "--solution")[1]
    assert repair not in first and "A hint comes first: python exercises/check.py 1 --hint" in first
    assert repair in check(1, "--solution")[1]
    hints = [check(2, "--hint")[1].splitlines()[0] for _ in range(4)]
    assert hints == ["Hint 1 of 3", "Hint 2 of 3", "Hint 3 of 3", "Hint 3 of 3"]
    assert "+    sampler.set_epoch(epoch)" in check(2, "--solution")[1]


def test_a_pass_shows_repairs_that_are_not_the_readers_and_a_scene(check, tmp_path):
    mends = runpy.run_path(FOLDERS[2] / "mends.py")["RIGHT"]
    (mine, replacements), (other, _) = [*mends.items()][:2]
    without_docstring = split_docstring(mended(2, replacements))[1]
    (tmp_path / check_command.name_of(2)).write_text(f"# 你好\n{without_docstring}")
    code, out = check(2)
    assert code == 0 and f"Another repair: {other}\n+    order = " in out and mine not in out
    assert "open docs/see/index.html#sampler/without/0/en in a browser" in out


def test_each_exercise_is_in_one_group_and_each_scene_is_one_of_the_page():
    groups = [number for group in COURSE for number in group["exercises"]]
    assert sorted(map(int, groups)) == sorted({*map(int, groups)} | {*NUMBERS})
    scenes = (ROOT / "docs/see/scenes.js").read_text()
    for scene, option in (text.scene.split("/") for text in ENGLISH.values() if text.scene):
        assert f'\n  "{scene}": {{\n' in scenes, scene
        assert scene == option or f'"{option}": [' in scenes, option


def test_a_wrong_command_ends_with_exit_code_2(check):
    for flags in (["--hint"], [99], [1, "--all"], [1, "--hint", "--solution"]):
        code, out = check(*flags)
        assert code == 2 and "check.py: error: " in out, flags
    expected = f"'five' given, expected a whole number from 1 to {max(NUMBERS)} "
    assert expected in check("five")[1]


def test_chinese_is_spoken_if_asked_for_or_if_the_locale_is_chinese(check, tmp_path, monkeypatch):
    mine = tmp_path / MINE
    by_flag = check("--zh")
    assert by_flag[0] == 0 and IN_CHINESE[1].title in by_flag[1]
    assert mine.read_text().startswith(f'"""{IN_CHINESE[1].task}\n"""')
    mine.unlink()
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    out = check()[1]
    assert IN_CHINESE[1].title in out and ENGLISH[1].title not in out
    assert mine.read_text().startswith(f'"""{IN_CHINESE[1].task}\n"""')
    code, out = check(4)
    assert code == 1 and "尚未通过：rank 2 选择了 cuda:2" in out


def test_the_limit_stops_a_program_that_computes_forever(check, tmp_path):
    (tmp_path / MINE).write_text(solution_with("while True: pass"))
    code, out = check(1, "--limit", 3)
    place = f"in line {LINE}, `while True: pass`"
    places = f"rank 0 is {place}; rank 1 is {place}"
    assert code == 1 and f"The program did not end within the time limit: {places}." in out
    assert ranks_left() == []


def test_all_checks_the_files_that_exist(check, tmp_path):
    solve(tmp_path, 4)
    code, out = check("--all")
    assert code == 1 and re.search(r"^ 4 passed .* each process has its own GPU\.$", out, re.M)
    assert len(re.findall(r"^.. - .* no file$", out, re.M)) == len(NUMBERS) - 1
    assert json.loads((tmp_path / "passed.json").read_text()) == [4]


def test_a_file_that_is_not_utf_8_and_a_damaged_note_are_no_tracebacks(check, tmp_path):
    folder = tmp_path / "my files"
    folder.mkdir()
    (folder / "passed.json").write_text("[1, 2")
    (folder / MINE).write_bytes("# 你好\n".encode("gbk"))
    code, out = check(1, "--zh", "--messages", at=folder)
    assert code == 1 and "请把文件保存为 UTF-8 编码" in out
    code, out = check(1, at=folder)
    assert code == 1 and "not yet: The file holds characters that are not UTF-8" in out
    assert f"python exercises/check.py 1 --hint --folder '{folder}'" in out


def test_watch_notices_a_saved_mend_and_goes_on_to_the_next(english_locale, tmp_path):
    (tmp_path / "passed.json").write_text(json.dumps([1, 2, 3]))
    watching = start("exercises/check.py", 4, "--watch", "--folder", tmp_path)
    assert "not yet: Rank 2 chose cuda:2" in read_until(watching, "waiting until you save")
    mine = tmp_path / check_command.name_of(4)
    mine.write_text("")  # as some editors do
    mine.write_bytes("# 你好\n".encode("gbk"))
    assert "not UTF-8" in read_until(watching, "waiting until you save")
    solve(tmp_path, 4)
    read_until(watching, "passed: on two machines")
    read_until(watching, "Exercise 5: ")
    watching.send_signal(signal.SIGINT)
    assert finished(watching)[0] == 130


class Terminal:
    """check.py --watch in a terminal of its own."""

    def __init__(self, folder):
        self.unread = b""
        self.keyboard, inside = pty.openpty()
        self.settings = lambda: termios.tcgetattr(inside)
        self.before = self.settings()
        command = [sys.executable, "exercises/check.py", "--watch", "--folder", str(folder)]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), inside)

        def take_terminal():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(command, cwd=ROOT, preexec_fn=take_terminal, **streams)
        STARTED.append(self.process)

    def read(self, text):
        """Read the screen up to this text, and return what is before it."""
        while text.encode() not in self.unread:
            assert select.select([self.keyboard], [], [], 100)[0], self.unread.decode()
            self.unread += os.read(self.keyboard, 4096).replace(b"\r", b"")
        before, _, self.unread = self.unread.partition(text.encode())
        return before.decode()

    def press(self, keys):
        os.write(self.keyboard, keys.encode())


def test_watch_obeys_keys_and_leaves_the_terminal_as_it_was(english_locale, tmp_path):
    (tmp_path / "passed.json").write_text(json.dumps([1, 2, 3]))
    terminal = Terminal(tmp_path)
    screen = terminal.read("waiting until")
    assert f"  3 of {len(NUMBERS)}\nkeys: n next, h hint" in screen
    assert "\033[31mnot yet\033[0m: " in screen, "in red"
    assert "A hint: python" not in screen  # it is the key h
    terminal.press("s")
    assert "A hint comes first: the key h." in terminal.read("waiting until")
    terminal.press("hh")
    assert ENGLISH[4].hints[0] in terminal.read("The next hint: the key h")
    assert ENGLISH[4].hints[1] in terminal.read("waiting until") + terminal.read("waiting until")
    terminal.press("l")
    assert f"  >  4  ●○○  {ENGLISH[4].title}\n" in terminal.read("waiting until")
    terminal.press("xn")
    terminal.read("Exercise 5: ")
    terminal.press("r")  # typed while the check runs
    terminal.read("05_only_rank_0.old")
    terminal.press("q")
    assert terminal.process.wait(60) == 0 and terminal.settings() == terminal.before


@pytest.mark.parametrize(("key", "code"), [("\x03", 130), (signal.SIGTERM, 143)])
def test_the_terminal_is_as_it_was_after_ctrl_c_and_a_signal(english_locale, tmp_path, key, code):
    terminal = Terminal(tmp_path)
    terminal.read("waiting until")
    assert terminal.settings() != terminal.before
    terminal.press(key) if isinstance(key, str) else terminal.process.send_signal(key)
    assert terminal.process.wait(60) == code and terminal.settings() == terminal.before


def wait_for(look):
    """Look until there is something, and return it."""
    deadline = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_too(english_locale, tmp_path):
    (tmp_path / check_command.name_of(5)).write_text(mended(5, []))
    checking = start("exercises/check.py", 5, "--folder", tmp_path)
    read_until(checking, "running")
    server = wait_for(
        lambda: next(filter(is_server, psutil.Process(checking.pid).children()), None)
    )
    started = wait_for(lambda: server.children()[1:] and server.children())
    checking.send_signal(signal.SIGINT)
    assert finished(checking)[0] == 130
    assert gone([server, *started])


@pytest.mark.slow
def test_ctrl_c_in_the_first_second_prints_no_traceback(english_locale, tmp_path):
    checking = start("exercises/check.py", 5, "--folder", tmp_path)
    wait_for(lambda: [*filter(is_server, psutil.Process(checking.pid).children())])
    time.sleep(0.5)  # the server imports torch
    os.killpg(checking.pid, signal.SIGINT)  # as a terminal does
    code, _, err = finished(checking)
    assert (code, err) == (130, "")
