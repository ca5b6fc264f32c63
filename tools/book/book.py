"""Generate the code, tables and outputs that the book shows, so that they are never typed by hand.

    python tools/book/book.py             update the pages
    python tools/book/book.py --record    first run the commands with no recorded output

The pages are README.md, CONTRIBUTING.md, docs/*.md and their Chinese translations. The text between
<!-- KIND: ARGUMENT --> and <!-- end --> is generated:

    table: NAME         a table from tools/book/tables.py
    table: NAME REST    the same, of a function that takes an argument
    diff: 03            the diff between 03 and its parent
    diff: 03 0 1        the diff of two of its sections, see tools/steps.py
    section: 03 0       a section of a script, see tools/steps.py
    code: FILE NAME     a function, a class or the docstring of a file
    exercises: list     the exercises in their groups
    output: COMMAND     the output of a command, recorded in results/output/; remove its line there
                        to record it again
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.flags import Parser
from exercises.texts import COURSE, FOLDERS, read_text
from tools import steps
from tools.book import comments
from tools.book.pages import BLOCK, chinese_pages, pages
from tools.book.phrases import Phrases
from tools.book.tables import TABLES
from tools.records import RESULTS, ROOT, hardware, records


class BookError(ValueError):
    """A block cannot be generated. The message says why and what to do."""


def render(text, chinese=False):
    """Return the text of a page with all blocks generated again, for a Chinese page with Chinese
    words and comments.
    """
    read = comments.read if chinese else steps.read

    def fill(match):
        begin, kind, argument, _, end = match.groups()
        if kind == "exercises":  # whose texts are in both languages
            return f"{begin}\n{exercises('zh' if chinese else 'en')}\n\n{end}"
        if kind in OF_CODE:
            block = OF_CODE[kind](argument, read)
        elif kind in OF_RECORDS:
            block = OF_RECORDS[kind](argument)
        else:
            expected = ", ".join([*OF_CODE, *OF_RECORDS])
            raise BookError(f"<!-- {kind}: {argument} -->: expected one of {expected}")
        return f"{begin}\n{translated(block) if chinese else block}\n\n{end}"

    return BLOCK.sub(fill, text)


def translated(block):
    """Return a block with the words outside code in Chinese: the cells of tables, and lines above
    or below them.

    The Chinese pages are one folder deeper than docs/.
    """
    words = Phrases(ROOT / "docs/zh/tables.json")
    lines = []
    code = False
    for line in block.splitlines():
        code ^= line.startswith("```")
        if line and not code and not line.startswith("```"):
            cells = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
            cells = [
                cell if re.fullmatch(r"[-:]+", cell) else words.translate(cell) for cell in cells
            ]
            line = f"| {' | '.join(cells)} |" if line.startswith("|") else cells[0]
            line = re.sub(r"(?<=\d) %", "%", line)
        lines.append(line)
    text = "\n".join(lines).replace("](../", "](../../")
    return text.replace("](figures/", "](../figures/zh/")


def table(argument):
    name, *rest = argument.split(maxsplit=1)
    if name not in TABLES:
        raise BookError(f"table {name}: expected one of {', '.join(TABLES)}")
    return TABLES[name](*rest)


def diff(argument, read):
    number, *names = argument.split()
    if names:
        lines = steps.section_diff(script(number), names, read)
    else:
        lines = steps.diff(script(number), read)
    return fenced("diff", "\n".join(lines).strip("\n"))


def section(argument, read):
    number, name = argument.split()
    lines = steps.sections(script(number), read)[name]
    return fenced("python", "\n".join(lines).strip("\n"))


def code(argument, read):
    file, name = argument.split()
    text = "\n".join(read(file))
    if name == "docstring":
        return fenced("text", ast.get_docstring(ast.parse(text)))
    for node in ast.walk(ast.parse(text)):
        if getattr(node, "name", None) == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return fenced("python", "\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    raise BookError(f"{file} has no function or class {name}")


def output(command):
    runs = [r for r in records("output") if r["command"] == command]
    if not runs:
        raise BookError(
            f"the output of `{command}` is not recorded: python tools/book/book.py --record"
        )
    return f"On {hardware(runs[-1])}:\n\n{fenced('text', runs[-1]['output'])}"


def exercises(language):
    """Return the table of the exercises, in their groups."""
    head = {"en": "| | exercise | minutes | read |", "zh": "| | 练习 | 分钟 | 阅读 |"}
    lines = [head[language], "| --- | --- | --- | --- |"]
    for group in COURSE:
        lines.append(f"| | **{group[language]}** | | |")
        for number in sorted({*map(int, group["exercises"])} & {*FOLDERS}):
            text = read_text(FOLDERS[number], language)
            file, section = text.page
            anchor = re.sub(r"[^\w\- ]", "", section.lower()).replace(" ", "-")
            link = f"[{file.removesuffix('.md')}]({file}#{anchor})"
            lines.append(f"| {number} | {text.title} | {text.minutes} | {link} |")
    return "\n".join(lines)


OF_CODE = {"diff": diff, "section": section, "code": code}
OF_RECORDS = {"table": table, "output": output}


def script(number):
    return next(path.name for path in ROOT.glob(f"{number}_*.py"))


def fenced(language, text):
    return f"```{language}\n{text}\n```"


# Recording


def shown_commands():
    """Return the commands whose output a page shows."""
    blocks = [block for page in pages() for block in BLOCK.findall(page.read_text())]
    return list(dict.fromkeys(argument for _, kind, argument, _, _ in blocks if kind == "output"))


def record(commands):
    """Run commands and record their output in results/output/."""
    from common.records import environment
    from tools.machine import machine_name, pick_device

    path = RESULTS / "output" / f"{machine_name()}.jsonl"
    path.parent.mkdir(exist_ok=True)
    for command in commands:
        if command.startswith("srun") and not shutil.which("srun"):
            print(f"skipped, because srun is not installed: {command}")
            continue
        print(f"$ {command}", flush=True)
        text = run(command)
        print(text, flush=True)
        line = {"command": command, "output": text} | environment(pick_device())
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def run(command):
    """Return the output and errors of a command, run in this Python environment, without this
    machine's paths.
    """
    programs = os.path.dirname(sys.executable)
    env = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "PYTHONUNBUFFERED": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    text = done.stdout.replace(f"{ROOT}/", "").replace(f"{sys.prefix}/", ".venv/")
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def parse_args():
    parser = Parser(__doc__)
    parser.add_argument(
        "--record", action="store_true", help="first run the commands that are not recorded"
    )
    return parser.parse_args()


def main(args):
    if args.record:
        recorded = {r["command"] for r in records("output")}
        record([command for command in shown_commands() if command not in recorded])
    errors = []
    translations = chinese_pages()
    for page in [*pages(), *filter(Path.exists, translations)]:
        try:
            page.write_text(render(page.read_text(), page in translations))
        except ValueError as error:  # BookError, RecordError, or a section that a script lacks
            errors.append(f"book.py: error: {page.relative_to(ROOT)}: {error}")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main(parse_args())
