"""The pages of the book: every command is taken and, where it can, runs; every snippet runs; every
link leads on.
"""

import ast
import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
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
from tools import steps
from tools.book import book, words
from tools.book.chinese import slugs
from tools.book.pages import chinese_pages
from tools.records import records

PAGES = book.pages()
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)


def relative(page):
    return str(page.relative_to(ROOT))


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


def test_no_block_of_commands_is_overlooked():
    for page in PAGES:
        assert len(fences(page, "sh")) == len(re.findall(r"^```sh$", page.read_text(), re.M)), (
            page.name
        )
        assert "```\n```sh" not in page.read_text() and not re.search(
            r"^ +```sh$", page.read_text(), re.M
        ), page.name


# What a page shows of the repository


@pytest.mark.parametrize("page", [*PAGES, *chinese_pages()], ids=relative)
def test_what_a_page_shows_of_code_and_results_is_fresh(page):
    fresh = book.render(page.read_text(), chinese=page in chinese_pages())
    assert fresh == page.read_text(), "stale: python tools/book/book.py"


def test_a_stale_page_is_named(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- diff: 05 -->\n\nold\n\n<!-- end -->\n")
    monkeypatch.setattr(book, "pages", lambda: [page])
    monkeypatch.setattr(book, "chinese_pages", list)
    monkeypatch.setattr(book, "ROOT", tmp_path)
    monkeypatch.setattr(book, "script", lambda number: "05_mnmc_ddp_slurm.py")
    monkeypatch.setattr("sys.argv", ["book.py", "--check"])
    with pytest.raises(SystemExit, match=r"page\.md is stale: python tools/book/book\.py"):
        book.main(book.parse_args())
    assert "old" in page.read_text()
    monkeypatch.setattr("sys.argv", ["book.py"])
    book.main(book.parse_args())
    assert "old" not in page.read_text() and "```diff\n@@" in page.read_text()


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ("table: nothing", "table nothing: expected one of ladder, "),
        ("picture: nothing", "expected one of diff, section, code, table, output"),
        ("code: common/models.py Nothing", "common/models.py has no function or class Nothing"),
        (
            "output: python nothing.py",
            "the output of `python nothing.py` is not recorded: python tools/book/book.py --record",
        ),
    ],
)
def test_a_block_that_cannot_be_filled_in_says_what_to_do(marker, expected):
    with pytest.raises(book.BookError, match=re.escape(expected)):
        book.render(f"<!-- {marker} -->\n<!-- end -->")


def test_every_script_has_a_chapter_with_its_code():
    """Every script has a chapter with its diff or its sections."""
    for script in ALL_SCRIPTS:
        text = (ROOT / f"docs/{script[:-3]}.md").read_text()
        if script in steps.STEPS and f"<!-- diff: {script[:2]} -->" not in text:
            shown = re.findall(rf"<!-- diff: {script[:2]} (.+) -->", text)
            assert {name for names in shown for name in names.split()} >= {*steps.changed(script)}
        assert f"<!-- diff: {script[:2]} " in text or f"<!-- section: {script[:2]} " in text
        assert re.search(r"^## Exercise", text, re.M) and "<summary>" in text
        assert "<!-- output: " in text, "what you should see"


def test_chapter_6_names_every_module_of_its_folder():
    text = (ROOT / "docs/06_imagenet.md").read_text()
    helpers = text.partition("Helpers are in")[2].partition("\n###")[0]
    modules = {path.stem for path in (ROOT / "imagenet").glob("[!_]*.py")}
    assert set(re.findall("`([a-z_]+)`", helpers)) == modules


def test_the_ten_questions_have_a_section_each():
    """The ten questions have a section each and the contents lead there."""
    contents = (ROOT / "docs/README.md").read_text()
    questions = re.findall(r"^\d+\. \[(.+\?)\]\((\w+\.md)#[\w-]+\)", contents, re.M)
    assert len(questions) == 10
    for question, page in questions:
        assert f"## {question}\n" in (ROOT / "docs" / page).read_text()


# Links and flags


@pytest.mark.parametrize("page", [*PAGES, *chinese_pages()], ids=relative)
def test_every_link_leads_to_a_file_or_a_heading(page):
    """Every link leads to a file and every anchor to a heading."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name}: {target}"
        assert there.is_relative_to(ROOT), f"{page.name}: {target} leads out of the repository"
        assert not anchor or anchor in slugs(there), f"{page.name}: {target}"


PROGRAMS = ("srun", "sbatch", "salloc", "scancel", "squeue", "sinfo", "mpirun")
ALLOW_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# Flags of programs whose parser is not at hand; each is explained where it stands.
OTHERS = {
    "--shm-size": "docker",
    "--ipc": "docker",
    "--gpus": "docker",
    "--tag": "docker",
    "--file": "docker",
    "--local-rank": "what torch.distributed.launch adds",
    "--use_env": "torch.distributed.launch",
    "--set-ntp": "timedatectl",
    "--logdir": "tensorboard",
    "--cap-add": "docker",
    "--network": "docker",
    "--device": "docker",
    "--ulimit": "docker",
    "--bind": "apptainer",
    "--nv": "apptainer",
    "--container-image": "srun with pyxis",
    "--container": "srun with pyxis",
    "--me": "squeue, whose help leaves it out",
    "--pid": "py-spy",
    "--test-only": "sbatch, whose help leaves it out",
    "--open-mode": "sbatch, whose help leaves it out",
    "--num_processes": "accelerate launch",
    "--batch_size": "read as --batch-size",
    "--local_rank": "read as --local-rank",
}


def helps(command, folder):
    """The flags that a launcher's own --help names.

    Slurm's commands want a configuration even for that.
    """
    (folder / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=none\n")
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")} | ALLOW_ROOT
    what = ["full"] if command == "mpirun" else []
    shown = subprocess.run(
        [command, "--help", *what], env=env, capture_output=True, text=True
    ).stdout
    return set(re.findall(r"--[a-z][a-z-]+", shown))


def known_flags(folder):
    """Every flag of our own programs and of the launchers."""
    known = set(OTHERS)
    ours = [
        *ALL_SCRIPTS,
        "common/flags.py",
        "common/ddp_flags.py",
        "imagenet/flags.py",
        "template/train.py",
        *(
            p.relative_to(ROOT)
            for name in ("tools", "launch", "exercises")
            for p in ROOT.glob(f"{name}/**/*.py")
        ),
    ]
    for file in ours:
        known |= set(re.findall(r'"(--[a-z][\w-]*)"', (ROOT / file).read_text()))
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    known |= {flag for action in get_args_parser()._actions for flag in action.option_strings}
    for command in PROGRAMS:
        known |= helps(command, folder)
    return known


def test_every_flag_in_the_text_is_one_that_some_program_takes(tmp_path):
    absent = [command for command in PROGRAMS if shutil.which(command) is None]
    need(
        f"not installed: {', '.join(absent)} (apt-get install slurm-wlm openmpi-bin)"
        if absent
        else None
    )
    known = known_flags(tmp_path)
    unknown = []
    for page in PAGES:
        theirs = r"^<!-- table: flags\w* -->.*?^<!-- end -->"  # the flags of other trainings
        text = re.sub(rf"^```.*?^```|{theirs}", "", page.read_text(), flags=re.M | re.S)
        for span in re.findall(r"`([^`\n]+)`", text):
            flags = re.findall(r"(?<![\w-])(--[a-z][\w-]*)", span)
            unknown += [f"{page.name}: {flag} in `{span}`" for flag in flags if flag not in known]
    assert not unknown, "\n".join(unknown)


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
        return
    if arguments[0] == "-m":
        assert arguments[1] in ("torch.distributed.run", "torch.distributed.launch", "pytest"), (
            arguments
        )
        return
    file, *given = arguments
    if file == "train.py":  # the reader's own
        return
    assert (ROOT / file).exists(), file
    if file.startswith("exercises/broken/"):  # takes no arguments
        assert not given
        return
    if given in (["--help"], ["-h"]):
        return
    if file == "tools/steps.py":
        assert not given or given[0] in ("02", "03", "04", "05", "07")
        return
    parse(monkeypatch, file, *given)


def check(text, monkeypatch, slurm_help):
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
    elif program == "srun":
        options, file, given = launched(arguments)
        known = slurm_help("srun")
        assert all(
            option.partition("=")[0] in known for option in options if option.startswith("--")
        ), options
        if "torchrun" in options:
            check(
                shlex.join(["torchrun", *options[options.index("torchrun") + 1 :], file, *given]),
                monkeypatch,
                None,
            )
        else:
            check_python([file, *given], monkeypatch)
    elif program == "sbatch":
        k = next(k for k, word in enumerate(arguments) if word.endswith(".sbatch"))
        known = slurm_help("sbatch") | set(OTHERS)
        assert all(option.partition("=")[0] in known for option in arguments[:k]), arguments
        script = Path(arguments[k]).name[:2]
        check_python(
            [next(name for name in ALL_SCRIPTS if name[:2] == script), *arguments[k + 1 :]],
            monkeypatch,
        )
        assert (ROOT / arguments[k]).exists()
    elif program == "mpirun":
        _, file, given = launched(arguments)
        check_python([file, *given], monkeypatch)
    elif program.startswith("launch/"):
        check_launch_file(program, arguments, monkeypatch)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert next(word for word in arguments if "=" not in word) in targets
    elif program == "kubectl" and arguments[0] == "apply":
        assert (ROOT / arguments[2]).exists()
    elif program == "docker" and "--file" in arguments:
        assert (ROOT / arguments[arguments.index("--file") + 1]).exists()
    elif program == "apptainer":
        assert arguments[0] == "build" and (ROOT / arguments[-1]).exists()
    elif program == "docker" and "torchrun" in arguments:
        check(shlex.join(arguments[arguments.index("torchrun") :]), monkeypatch, None)
    elif program in ("ssh", "pdsh"):  # %n is the number that pdsh gives to each host
        check(re.search(r"torchrun .*?\.py", text)[0].replace("%n", "0"), monkeypatch, None)
    else:
        known = (
            "",
            ".",
            "cd",
            "cp",
            "export",
            "mkdir",
            "rm",
            "truncate",
            "ss",
            "squeue",
            "docker",
            "kubectl",
            "sudo",
            "git",
            "pip",
            # of a batch file
            "#SBATCH",
            "for",
            "done",
            "wait",
            # of docs/health.md
            "nvidia-smi",
            "dcgmi",
            "ibstat",
            "ib_write_bw",
            "show_gids",
            "ulimit",
        )
        assert program in known, f"{text}: teach this test how to check {program}"


def check_launch_file(program, arguments, monkeypatch):
    assert os.access(ROOT / program, os.X_OK), program
    if program.endswith("06_static.sh"):  # which wants the node rank first
        assert arguments[0].isdigit()
        arguments = arguments[1:]
    own = [] if re.match(r"launch/(mpirun|sensecore)\.sh", program) else ["06_imagenet.py"]
    check_python([*own, *arguments], monkeypatch)


@pytest.fixture(scope="session")
def slurm_help(tmp_path_factory):
    """A function command -> the options that its --help names."""

    @functools.cache
    def options(command):
        need(
            None
            if shutil.which(command)
            else f"not installed: {command} (apt-get install slurm-wlm)"
        )
        return helps(command, tmp_path_factory.mktemp("help"))

    return options


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text}")
def test_every_command_is_one_that_is_taken(command, monkeypatch, slurm_help, capsys):
    try:
        check(command.text, monkeypatch, slurm_help)
    except SystemExit:  # the parsers look at the machine too
        said = capsys.readouterr().err
        assert command.reason and "GPU" in command.reason and "GPU" in said, said


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
ELSEWHERE = {  # what other tests run, in sizes of their own
    **{
        f"tools/bench/{name}.py": f"test_the_{name}_benchmark"
        for name in ("input", "ddp", "my_ddp", "memory", "train", "scaling")
    },
    "tools/experiments.py": "test_experiments.py",
    "launch/preflight.py": "test_preflight.py",
    "tools/plan.py": "test_plan.py",
    "tools/fit.py": "test_fit.py",
}


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
        and what[1] not in ELSEWHERE
    ]


def scaled(text, folder):
    """The command made short, with what it writes and reads in a folder."""
    text = re.sub(r"\bcheckpoints/", f"{folder}/checkpoints/", text)
    script = re.search(r"\b0(\d)_\w+\.(py|sh)", text)
    if script and script[1] == "6":
        text += f" {shlex.join(SHORT_06)}"
        text += "" if "--checkpoints-path" in text else f" --checkpoints-path {folder}/checkpoints"
    elif script:
        text += f" {shlex.join(SHORT)} {folder}"
    return text


def forms(output):
    """The lines of an output that report, with # for each number: what stays the same in a run of
    another size.
    """
    # The outputs in the book were recorded before an evaluation printed its loss.
    output = re.sub(r"(== test: \[\d+/\d+\]) \| loss: [\d.]+", r"\1", output)
    lines = [
        line for line in output.splitlines() if re.search(r"== |^done|global batch|error: ", line)
    ]
    return {re.sub(r"[\d.,]+%?", "#", " ".join(line.split())).replace("[ ", "[") for line in lines}


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
    code, out, err = typed(last, book_folder)
    assert code == 0 and f"after step {saved} of 160" in out and "done: top-1 " in out, out + err
    shown = [*map(recorded, runs)]
    assert forms(out) <= set().union(*map(forms, shown)), "what the page shows"

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


@pytest.mark.slow
def test_the_srun_of_the_chapter_prints_what_it_shows(slurm, book_folder):
    texts = [command.text for command in COMMANDS if re.match(r"srun .*05_mnmc", command.text)]
    text = next(text for text in texts if recorded(text))
    end = slurm.run(*shlex.split(scaled(text, book_folder)))
    assert (
        end.returncode == 0 and forms(end.stdout) and forms(end.stdout) <= forms(recorded(text))
    ), end.stdout + end.stderr


def test_no_output_is_recorded_of_a_command_that_failed():
    """No output is recorded of a command that failed but those that show an error."""
    for record in records("output"):
        fails = "error: " in record["output"] or "Traceback" in record["output"]
        assert fails == record["command"].startswith("RANK="), record["command"]


def test_every_reason_not_to_run_a_command_is_one_of_a_kind():
    """So that nothing is left out because it happened to fail: what needs what is not here, takes
    hours, or waits.
    """
    kinds = (
        r"needs |downloads |takes |waits |belongs |it runs until|shows what|installs |compares |"
        r"a docstring|sets up |for a machine with |runs these tests|SenseCore |train\.py is your"
    )
    odd = [
        command for command in COMMANDS if command.reason and not re.match(kinds, command.reason)
    ]
    assert not odd, odd


# Snippets run


SNIPPETS = [
    (page.name, block["text"])
    for page in PAGES
    for block in fences(page, "python")
    if not block["reason"]
]
ALONE = [(name, text) for name, text in SNIPPETS if not text.startswith("# torchrun")]
TOGETHER = [(name, text) for name, text in SNIPPETS if text.startswith("# torchrun")]


@pytest.mark.parametrize(
    ("page", "text"), ALONE, ids=[f"{name} {k}" for k, (name, _) in enumerate(ALONE)]
)
def test_every_snippet_runs_by_itself(page, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, page, "exec"), {"__name__": "__main__"})
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert not dist.is_initialized(), "it has left a process group"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "text"), TOGETHER, ids=[f"{name} {k}" for k, (name, _) in enumerate(TOGETHER)]
)
def test_every_snippet_for_torchrun_runs_on_two_processes(page, text, tmp_path):
    (tmp_path / "snippet.py").write_text(text)
    ranks = Ranks(tmp_path, 2, [], script=str(tmp_path / "snippet.py"), prepare=go_to)
    assert ranks.wait() == [0, 0], ranks.output(0) + ranks.output(1)


def go_to(rank):
    """Into the folder of the script, for what it writes."""
    os.chdir(Path(os.readlink("/proc/self/fd/1")).parent)


# Words


def test_a_word_with_two_meanings_is_found_in_prose_alone():
    """A word with two meanings is found in prose and nowhere else."""
    page = (
        "The network learns.\n\n```sh\nthe network learns\n```\n\n`rate`, learning\nrate, a rate,\n"
    )
    page += "64 images\na process\n"
    assert [(line, instead) for line, _, instead in words.find(page)] == [
        (1, "model"),
        (8, "learning rate"),
        (9, "per"),
    ]
