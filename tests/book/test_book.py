"""The book: its pages show today's code and records in both languages, every command is taken and,
where it can, runs, every snippet runs, and every link leads on.
"""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
import torch.distributed as dist
from images import write_images
from needs import need
from processes import ROOT, finished, read_until
from ranks import Ranks
from rungs import ALL_SCRIPTS, parse
from torch.distributed.run import get_args_parser

from imagenet.signals import EXIT_REQUEUE
from tools.book import book, chinese, comments
from tools.book.pages import SEE_LINK, chinese_pages
from tools.book.tables import published_on_gpus, speeds
from tools.records import group, records

PAGES = book.pages()
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
ALLOW_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Command(NamedTuple):
    """A line of a ```sh block; reason: why it does not run here, as the page says, or None."""

    page: str
    text: str
    reason: str | None


def fences(page, language):
    """The fenced blocks of a page in a language, as matches; what tools/book/book.py has filled in
    is left out.
    """
    text = book.BLOCK.sub("", page.read_text())
    return [found for found in FENCE.finditer(text) if found["language"] == language]


def lines_of(block):
    """The commands of a block, each on one line and without comments."""
    lines = re.sub(r"\s*\\\n\s*", " ", block["text"]).splitlines()
    return [line for line in (re.sub(r"(^|\s+)# .*", "", line).strip() for line in lines) if line]


def all_commands():
    found = [
        Command(str(page.relative_to(ROOT)), line, block["reason"])
        for page in PAGES
        for block in fences(page, "sh")
        for line in lines_of(block)
    ]
    for script in ALL_SCRIPTS:  # their docstrings show commands too, and say what they need
        doc = ast.get_docstring(ast.parse((ROOT / script).read_text()))
        doc = re.sub(r"\s*\\\n\s*", " ", doc)
        shown = re.findall(r"^ +((?:python|torchrun|srun|sbatch) .*?)(?:  +\S.*)?$", doc, re.M)
        found += [
            Command(script, " ".join(line.partition(" #")[0].split()), "a docstring")
            for line in shown
        ]
    return list(dict.fromkeys(found))


COMMANDS = all_commands()


# What a page shows of the repository


def test_pages_show_todays_code_and_records():
    stale = []
    for page in [*PAGES, *chinese_pages()]:
        text = page.read_text()
        if book.render(text, chinese=page in chinese_pages()) != text:
            stale.append(page.name)
    assert not stale, "run: python tools/book/book.py"


def test_a_changed_english_sentence_is_named():
    """As if a sentence had changed since its translation was looked at."""
    hashes = chinese.load_hashes()
    hashes["docs/zh/kaggle.md"] = hashes["docs/zh/kaggle.md"][1:]
    lines = chinese.check(ROOT / "docs/kaggle.md", hashes)
    assert lines[0].startswith("docs/zh/kaggle.md is stale: docs/kaggle.md:1: ")
    assert lines[1].endswith("python tools/book/chinese.py --done docs/zh/kaggle.md")


def test_code_with_chinese_comments_is_the_same_program():
    for path in chinese.quoted_files():
        translated = "\n".join(comments.read(path))
        assert program(translated) == program(path.read_text()), path.name


def program(code):
    """Return the syntax tree of code without its docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


def test_links_lead_to_a_file_or_a_heading():
    broken = []
    for page in [*PAGES, *chinese_pages(), ROOT / "llms.txt"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("https://"):
                continue
            file, _, anchor = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            leads_on = there.exists() and there.is_relative_to(ROOT)
            if there == ROOT / "docs/see/index.html":  # a scene, its switch, a frame, a language
                scene, switch, *_ = (anchor or "step/ddp").split("/")
                leads_on = scene in ("time", "fit", "scale") or switch in runs_to_see()[scene]
                anchor = ""
            if not leads_on or (anchor and anchor not in chinese.slugs(there)):
                broken.append(f"{page.name}: {target}")
        links = SEE_LINK.finditer(text)
        broken += [f"{page.name}: open it from where? {link[0]}" for link in links if not link[3]]
    assert not broken


def runs_to_see():
    """{scene: its runs} of docs/see/."""
    text = (ROOT / "docs/see/runs.js").read_text()
    return json.loads(text.partition("const RUNS = ")[2].rstrip(";\n"))


def test_no_line_of_a_page_is_a_comment_of_the_site():
    """MyST, which builds the site, leaves out a line that begins with %."""
    for page in [*PAGES, *chinese_pages()]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        assert not re.search(r"^\s*%.*", text, re.M), page.name


def test_pages_name_tests_that_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert not [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in tests]


def test_the_readme_shows_lines_of_the_shortest_script():
    script = (ROOT / "docs/ddp-in-12-lines.md").read_text()
    (diff,) = fences(ROOT / "README.md", "diff")
    added = re.findall(r"^\+ *(.+)", diff["text"], re.M)
    assert len(added) > 4 and all(line in script for line in added)


def test_the_pages_compare_speeds_on_a_gpu_as_recorded():
    runs = [run for run in records("train") if run["device"] != "cpu" and not run["compile"]]
    speed = {name: median(speeds(same)) for name, same in group(runs, "run").items()}
    ours, plain, bf16 = speed["dummy"], speed["example"], speed["example-amp"]
    (mlperf,) = (
        run["images_per_second"] for run in published_on_gpus()["resnet50"] if "H200" in run["gpu"]
    )
    shares = [f"{100 * share:.0f} ?%" for share in (ours / speed["bare"], plain / ours)]
    factors = [f"{mlperf / ours:.1f}", f"{bf16 / plain:.2f}", f"{ours / bf16:.2f}"]
    for readme, page in (("README", "docs/performance"), ("README.zh-CN", "docs/zh/performance")):
        text = (ROOT / f"{page}.md").read_text()
        (paragraph,) = re.findall(r"^\*\*(?:On one|在一块) H200.*?\n\n", text, re.M | re.S)
        assert all(re.search(number, paragraph) for number in (*shares, *factors))
        text = (ROOT / f"{readme}.md").read_text()
        assert all(
            re.search(n, text) for n in (f"{round(ours, -2):,.0f}", shares[0], f"{mlperf:,}")
        )


def test_what_the_tables_of_other_scripts_say_to_type_is_taken(monkeypatch):
    monkeypatch.setattr("imagenet.flags.can_compile", lambda: True)
    ours = None
    rows = 0
    for line in (ROOT / "docs/coming-from.md").read_text().splitlines():
        if head := re.fullmatch(r"\| [^|]+ \| `([0-9]\w+\.py)`.* \|", line):
            ours = head[1].replace("01_snsc", "03_mnmc_ddp_launch")  # it has all flags of 01 to 05
        elif not line.startswith("|"):
            ours = None
        elif ours and (row := re.fullmatch(r"\| .+ \| `([^`]+)` \|", line)):
            words = row[1].replace("HOST:PORT", "host1:29500").split()
            if ours == "06_imagenet.py" and not row[1].startswith("data/"):
                words.append("data/imagenet")
            parse(monkeypatch, ours, *words)
            rows += 1
    assert rows > 50


# Commands are taken


def split(text):
    """(environment variables, program, arguments) of a command, of nohup the one that it starts."""
    words = shlex.split(text)
    words = words[: words.index(">")] if ">" in words else words
    if words[0] == "timeout":
        words = words[next(k for k, word in enumerate(words) if word.isdigit()) + 1 :]
    variables = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    if words[:1] == ["nohup"]:
        words.pop(0)
    return variables, words[0] if words else "", words[1:]


def launched(arguments):
    """(launcher's options, file, its arguments) of what stands behind srun, mpirun or torchrun."""
    k = next(k for k, word in enumerate(arguments) if re.search(r"\.py$", word))
    return arguments[:k], arguments[k], arguments[k + 1 :]


def check_python(arguments, monkeypatch):
    """Arguments of python: a file of ours with what its own parser takes, or code that compiles."""
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
    # the reader's own, and TorchFT's
    if arguments[0] in ("-c", "-m", "train.py", "original.py", "train_ddp.py"):
        return
    file, *given = arguments
    assert (ROOT / file).exists(), file
    if file.startswith("exercises/") and file.endswith("/program.py"):  # takes no arguments
        assert not given
    elif given not in (["--help"], ["-h"]) and file != "tools/steps.py":
        parse(monkeypatch, file, *given)


def check(text, monkeypatch):
    """Check that the programs of a command take its arguments."""
    # of a batch file: a number, the flags of its user, the background
    text = re.sub(r'"\$(SLURM_ARRAY_TASK_ID|seed)"', "3", text)
    text = text.replace(' "$@"', "").removesuffix(" &")
    _, program, arguments = split(text)
    if program == "python":
        check_python(arguments, monkeypatch)
    elif program == "torchrun":
        options, file, given = launched(arguments)
        args = get_args_parser().parse_args([*options, file, *given])
        assert (args.training_script, args.training_script_args) == (file, given)
        with monkeypatch.context() as patch:
            if args.nproc_per_node.isdigit():  # 07 reads it before it trains
                patch.setenv("WORLD_SIZE", args.nproc_per_node)
            check_python([file, *given], patch)
    elif program in ("srun", "docker") and "torchrun" in arguments:
        check(shlex.join(arguments[arguments.index("torchrun") :]), monkeypatch)
    elif program in ("srun", "mpirun"):
        _, file, given = launched(arguments)
        check_python([file, *given], monkeypatch)
    elif program == "sbatch":
        k = next(k for k, word in enumerate(arguments) if word.endswith(".sbatch"))
        assert (ROOT / arguments[k]).exists(), arguments[k]
        number = Path(arguments[k]).name[:2]
        script = next(name for name in ALL_SCRIPTS if name[:2] == number)
        check_python([script, *arguments[k + 1 :]], monkeypatch)
    elif program.startswith("launch/"):
        check_launch_file(program, arguments, monkeypatch)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert next(word for word in arguments if "=" not in word) in targets, text
    elif program == "ssh":
        check(re.search(r"torchrun .*?\.py", text)[0], monkeypatch)


def check_launch_file(program, arguments, monkeypatch):
    assert os.access(ROOT / program, os.X_OK), program
    if program.endswith("06_static.sh"):  # which wants the node rank first
        assert arguments[0].isdigit()
        arguments = arguments[1:]
    own = [] if re.match(r"launch/(mpirun|sensecore)\.sh", program) else ["06_imagenet.py"]
    check_python([*own, *arguments], monkeypatch)


def test_programs_take_every_command_of_the_book(monkeypatch, capsys):
    refused = []
    for command in COMMANDS:
        try:
            check(command.text, monkeypatch)
        except AssertionError as error:
            refused.append(f"{command.page}: {command.text}: {error}")
        except SystemExit:  # the parsers look at the machine too
            said = capsys.readouterr().err
            if not (command.reason and "GPU" in command.reason and "GPU" in said):
                refused.append(f"{command.page}: {command.text}: {said}")
    assert not refused


@pytest.mark.slow
def test_every_sbatch_that_is_shown_would_be_queued(slurm):
    shown = {command.text for command in COMMANDS if command.text.startswith("sbatch ")}
    assert len(shown) >= 3
    for text in shown:
        # a page's nodes have 8 GPUs and 64 cores, ours have made-up GPUs
        text = re.sub(r"=(8|64)\b", "=2", text)
        end = slurm.run(
            "sbatch",
            "--test-only",
            *(word for word in shlex.split(text)[1:] if word != "--test-only"),
        )
        assert end.returncode == 0 and "to start at" in end.stderr, f"{text}: {end.stderr}"


# Commands run


# Flags that make a script short, on images that are a test's own; of a flag given twice the last
# one counts.
SHORT = ["--epochs=1", "--batch-size=8", "--arch=small_net", "--dataset=folder", "--data-dir"]
SHORT_06 = ["--epochs=1", "--batch-size=16", "--arch=mnist_net", "--image-size=32", "--dummy=64"]
LESSON = "06_imagenet.md"  # whose commands build on one another: a test of its own
ELSEWHERE = (  # run by other tests, in sizes of their own
    "launch/preflight.py",
    "tools/plan.py",
    "tools/fit.py",
)


def kind(command):
    """What a command starts, under what, with which variables and flags, without their values."""
    variables, program, arguments = split(command.text)
    if program not in ("python", "torchrun") or arguments[0] == "-c":
        return command.text, frozenset()
    options, file, given = launched(arguments)
    flags = frozenset(word.partition("=")[0] for word in options + given if word.startswith("--"))
    return (program, file, frozenset(variables)), flags


def to_run():
    """The commands to run here: all that the pages give no reason against, but for those of which
    another one has every flag and more. What those start is the same, and their flags have been
    parsed."""
    chosen = {}
    for command in COMMANDS:
        if (
            command.reason is None
            and split(command.text)[1] not in (".", "make")
            and "--help" not in command.text
        ):
            chosen.setdefault(kind(command), command)
    return [
        command
        for (what, flags), command in chosen.items()
        if not any(what == other and flags < more for other, more in chosen)
        and not what[1].startswith(ELSEWHERE)
    ]


def scaled(text, folder):
    """The command made short, with what it writes and reads in a folder."""
    text = re.sub(r"\bcheckpoints/", f"{folder}/checkpoints/", text)
    script = re.search(r"\b0(\d)_\w+\.(py|sh)", text)
    if "check_ranks.py" in text:
        return text  # it ends after 20 steps
    if script and script[1] == "6":
        text += f" {shlex.join(SHORT_06)}"
        text += "" if "--checkpoints-path" in text else f" --checkpoints-path {folder}/checkpoints"
    elif script and script[1] == "8":
        text += " --text LICENSE"  # a kilobyte
    elif script:
        text += f" {shlex.join(SHORT)} {folder}"
    return text


def forms(output):
    """The lines of an output that report, with # for each number: what stays the same in a run of
    another size.
    """
    lines = [
        line for line in output.splitlines() if re.search(r"== |^done|global batch|error: ", line)
    ]
    plain = [re.sub(r"[\d.,]+%?", "#", " ".join(line.split())).replace("[ ", "[") for line in lines]
    # a slow machine needs minutes where another one needs seconds
    return {re.sub(r"# (s|min|h # min) left", "# s left", line) for line in plain}


def recorded(text):
    """What a page shows as the output of a command, or None."""
    return next(
        (r["output"] for r in reversed(book.records("output")) if r["command"] == text), None
    )


@pytest.fixture
def book_folder(tmp_path):
    """Where the commands of a page write, and find what those before them wrote."""
    (tmp_path / "checkpoints").mkdir()
    write_images(tmp_path, "test", (32, 32))
    return write_images(tmp_path, "train", (32, 32))


def bash(text, **options):
    """The environment and the arguments of a shell that runs a command of the book."""
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        ["bash", "-c", text],
        cwd=ROOT,
        env=os.environ | ALLOW_ROOT | {"PATH": path},
        **pipes,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", sorted({command.page for command in to_run() if not command.page.endswith(LESSON)})
)
def test_the_commands_of_a_page_run_and_print_what_it_shows(page, book_folder, run):
    """The commands of a page run in their order and print what it shows."""
    for command in (command for command in to_run() if command.page == page):
        if "mpirun" in command.text:
            need(
                None
                if shutil.which("mpirun")
                else "not installed: mpirun (apt-get install openmpi-bin)"
            )
        text = scaled(command.text, book_folder)
        variables, program, arguments = split(text)
        if program == "python" and re.match(r"0[12]_", arguments[0]) and not variables:
            end = run(*arguments)
            code = end.code or 0
            out = end.out
            err = end.err
        else:
            code, out, err = finished(bash(text))
        wrong = "error: " in (recorded(command.text) or "")
        assert (code != 0) == wrong and "Traceback" not in out + err, f"{text}\n{out}{err}"
        if recorded(command.text):
            assert forms(out + err) and forms(out + err) <= forms(recorded(command.text)), (
                f"{out}{err}"
            )


# Chapter 6 is a lesson whose commands build on one another


def typed(text, folder, until=None):
    """Run a command of chapter 6 with a small network.

    `timeout` sends its signal at a step, not after seconds.
    """
    text = f"{text} --arch small_net --image-size 32".replace(
        "checkpoints/", f"{folder}/checkpoints/"
    )
    signal_name, text = re.fullmatch(r"(?:timeout --signal=(\w+) \d+ )?(.*)", text).groups()
    process = bash(text, start_new_session=True)
    if signal_name:
        out = read_until(process, until)
        os.killpg(process.pid, getattr(signal, f"SIG{signal_name}"))
    code, rest, err = finished(process)
    return code, (out if signal_name else "") + rest, err


@pytest.mark.slow
def test_chapter_6_as_a_reader_types_it(book_folder):
    """Chapter 6 as a reader types it kill resume resume and both exercises."""
    commands = [command.text for command in COMMANDS if command.page.endswith(LESSON)]
    runs = [text for text in commands if "checkpoints/lesson" in text and "06_imagenet.py" in text]
    killed, stopped, last, again = runs

    code, out, err = typed(killed, book_folder, until="== step: [  16/32] [1/5]")
    assert code == -signal.SIGKILL and ": starting from the beginning" in out, err
    code, out, err = typed(stopped, book_folder, until="== step: [   8/32] [3/5]")
    (resumed,) = re.findall(r"after step (\d+) of 160", out)
    (saved,) = re.findall(
        r"stopped by a signal after step (\d+): saved, and --resume continues", out
    )
    assert (
        code == EXIT_REQUEUE and int(resumed) >= 10 and int(resumed) % 5 == 0 and int(saved) >= 72
    ), out + err
    assert forms(out) <= forms(recorded(stopped)), out
    code, out, err = typed(last, book_folder)
    assert code == 0 and f"after step {saved} of 160" in out and "done: top-1 " in out, out + err

    file = book_folder / "checkpoints/lesson/step-00000160.pt"
    (cut,) = [text for text in commands if text.startswith("truncate ")]
    whole = file.stat().st_size
    assert bash(cut.replace("checkpoints/", f"{book_folder}/checkpoints/")).wait(300) == 0
    assert file.stat().st_size == whole - 1
    code, out, err = typed(again, book_folder)
    assert code == 0 and "after step 155 of 160" in out and file.stat().st_size == whole, out + err

    _, whole, killed = [
        text for text in commands if re.search(r"checkpoints/(whole|killed)", text)
    ][:3]
    (compare,) = [text for text in commands if text.startswith("python -c") and "killed" in text]
    assert typed(whole, book_folder)[0] == 0
    assert typed(killed, book_folder, until="== step: [   8/32] [2/3]")[0] == -signal.SIGKILL
    code, out, err = typed(killed.partition("timeout --signal=KILL 30 ")[2], book_folder)
    assert code == 0 and "resumed from " in out, out + err
    code, out, err = finished(bash(compare.replace("checkpoints/", f"{book_folder}/checkpoints/")))
    assert (code, out) == (0, "True\n"), err


# Chapter 3 breaks a copy of its script


@pytest.mark.slow
def test_the_broken_copy_of_chapter_3_is_found_as_it_shows(book_folder, monkeypatch):
    copy, check_it = [command.text for command in COMMANDS if "broken.py" in command.text]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the copy of a reader is beside common/
    assert finished(bash(copy.replace("broken.py", f"{book_folder}/broken.py")))[0] == 0
    text = check_it.replace("broken.py", f"{book_folder}/broken.py")
    code, out, err = finished(bash(f"{text} {shlex.join(SHORT)} {book_folder}"))
    shown = recorded(f"{copy}; {check_it} 2>/dev/null | grep ^found; rm broken.py")
    assert code == 1, out + err
    assert found(out.replace(f"{book_folder}/", "")) == found(shown) != [], out + err


def found(output):
    """What launch/check_ranks.py has found, with # for each number."""
    return [re.sub(r"\d+", "#", line) for line in re.findall(r"^found: .*", output, re.M)]


# Snippets run


SNIPPETS = [
    (page.name, block["text"])
    for page in PAGES
    for block in fences(page, "python")
    if not block["reason"]
]


def test_snippets_run_by_themselves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for page, text in SNIPPETS:
        if text.startswith("# torchrun"):
            continue
        before = dict(os.environ)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, page, "exec"), {"__name__": "__main__"})
        finally:
            os.environ.clear()
            os.environ.update(before)
        assert not dist.is_initialized(), f"{page} has left a process group"


@pytest.mark.slow
def test_snippets_for_torchrun_run_on_two_processes(tmp_path):
    for k, (page, text) in enumerate(SNIPPETS):
        if not text.startswith("# torchrun"):
            continue
        folder = tmp_path / str(k)
        folder.mkdir()
        (folder / "snippet.py").write_text(text)
        ranks = Ranks(folder, 2, [], script=str(folder / "snippet.py"), prepare=go_to)
        assert ranks.wait() == [0, 0], f"{page}: {ranks.output(0)}{ranks.output(1)}"


def go_to(rank):
    """Into the folder of the script, for what it writes."""
    os.chdir(Path(os.readlink("/proc/self/fd/1")).parent)
