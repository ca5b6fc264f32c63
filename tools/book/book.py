"""Fill in what the book shows of the code and of results/, so that nothing of it is typed by hand.

    python tools/book/book.py             write it
    python tools/book/book.py --check     exit 1 and say which page is stale
    python tools/book/book.py --record    first run the commands whose output is shown and not recorded yet

The pages are README.md and docs/*.md. Between <!-- KIND: WHAT --> and <!-- end --> stands:

    table: NAME         a table of tools/book/tables.py
    diff: 03            what 03 changes in its parent
    section: 03 0       a section of a script, see tools/steps.py
    code: FILE NAME     a function, a class or the docstring of a file
    output: COMMAND     what a command printed, as recorded in results/output/; to run it again, remove its line there
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools import steps
from tools.book.tables import TABLES
from tools.records import RESULTS, ROOT, hardware, records

BLOCK = re.compile(r"^(<!-- (\w+): (.+?) -->\n)(.*?)^(<!-- end -->)$", re.M | re.S)


class BookError(ValueError):
    """A block that cannot be filled in; the message says why and what to do."""


def pages():
    """The files of the book."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def render(text):
    """A page with every block made anew."""

    def fill(found):
        begin, kind, what, _, end = found.groups()
        if kind not in KINDS:
            raise BookError(f"<!-- {kind}: {what} -->: expected one of {', '.join(KINDS)}")
        return f"{begin}\n{KINDS[kind](what)}\n\n{end}"

    return BLOCK.sub(fill, text)


def table(name):
    if name not in TABLES:
        raise BookError(f"table {name}: expected one of {', '.join(TABLES)}")
    return TABLES[name]()


def diff(number):
    return fenced("diff", "\n".join(steps.diff(script(number))))


def section(what):
    number, name = what.split()
    return fenced("python", "\n".join(steps.sections(script(number))[name]).strip("\n"))


def code(what):
    file, name = what.split()
    text = (ROOT / file).read_text()
    if name == "docstring":
        return fenced("text", ast.get_docstring(ast.parse(text)))
    for node in ast.walk(ast.parse(text)):
        if getattr(node, "name", None) == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return fenced("python", "\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    raise BookError(f"{file} has no function or class {name}")


def output(command):
    found = [r for r in records("output") if r["command"] == command]
    if not found:
        raise BookError(f"the output of `{command}` is not recorded: python tools/book/book.py --record")
    return f"On {hardware(found[-1])}:\n\n{fenced('text', found[-1]['output'])}"


KINDS = {"table": table, "diff": diff, "section": section, "code": code, "output": output}


def script(number):
    return next(path.name for path in ROOT.glob(f"{number}_*.py"))


def fenced(language, text):
    return f"```{language}\n{text}\n```"


# Recording


def shown_commands():
    """Every command whose output a page shows."""
    blocks = [block for page in pages() for block in BLOCK.findall(page.read_text())]
    return list(dict.fromkeys(what for _, kind, what, _, _ in blocks if kind == "output"))


def record(commands):
    """Run commands and write what they print to results/output/."""
    from common.report import environment
    from tools.bench.measure import pick_device
    from tools.experiments import Machine

    path = RESULTS / "output" / f"{Machine.here().name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    for command in commands:
        if command.startswith("srun") and not shutil.which("srun"):
            print(f"left out, as there is no Slurm: {command}")
            continue
        print(f"$ {command}", flush=True)
        text = run(command)
        print(text, flush=True)
        line = {"command": command, "output": text} | environment(pick_device())
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def run(command):
    """What a command prints, on both channels, with this Python's programs and without this machine's paths."""
    here = os.path.dirname(sys.executable)
    env = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    text = done.stdout.replace(f"{ROOT}/", "").replace(f"{sys.prefix}/", ".venv/")
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a page is stale")
    parser.add_argument("--record", action="store_true", help="run what is shown and not recorded yet")
    return parser.parse_args()


def main(args):
    if args.record:
        known = {r["command"] for r in records("output")}
        record([command for command in shown_commands() if command not in known])
    stale = []
    for page in pages():
        name, text = str(page.relative_to(ROOT)), page.read_text()
        try:
            fresh = render(text)
        except BookError as error:
            stale.append(f"{name}: {error}")
            continue
        if fresh != text and args.check:
            stale.append(f"{name} is stale: python tools/book/book.py")
        elif fresh != text:
            page.write_text(fresh)
    if stale:
        sys.exit("\n".join(f"book.py: error: {line}" for line in stale))


if __name__ == "__main__":
    main(parse_args())
