"""Repair programs that train wrongly, and have your repairs checked.

    python exercises/check.py              list the exercises, and say which one is next
    python exercises/check.py 5            run exercise 5 on two ranks, and say what was seen
    python exercises/check.py 5 --hint     a hint, and the page to read
    python exercises/check.py 5 --watch    check again whenever you save the file

Your files are in exercises/mine/: edit them there. You need no GPU.
"""

import itertools
import json
import os
import shlex
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.flags import Parser, whole_number
from exercises.judge import runner
from exercises.sentences import say, text_of
from exercises.texts import FOLDERS, read_text, split_docstring

HERE = Path(__file__).resolve().parent
LINES = 24  # of output that are shown
POLL = 0.3  # seconds between two looks at a watched file


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    number = whole_number(1, max(FOLDERS))
    add("number", nargs="?", type=number, help=f"of an exercise, 1 to {max(FOLDERS)}")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--hint", action="store_true", help="print a hint and the page to read")
    what.add_argument("--solution", action="store_true", help="print what was wrong, and a repair")
    what.add_argument(
        "--reset", action="store_true", help="start again; your file is kept with the ending .old"
    )
    what.add_argument("--watch", action="store_true", help="check whenever the file is saved")
    what.add_argument("--all", action="store_true", help="check all exercises: for teachers")
    add("--folder", type=Path, default=HERE / "mine", help="where the repaired files are")
    add("--limit", type=float, default=runner.LIMIT, help="seconds for a program that computes")
    add("--zh", action="store_true", help="speak Chinese, as with LANG=zh_CN.UTF-8")
    args = parser.parse_args()
    if args.number is None and (args.hint or args.solution or args.reset):
        parser.error("expected the number of an exercise, as in: check.py 5 --hint")
    if args.number is not None and args.all:
        parser.error(f"expected --all or {args.number}, not both")
    return args


def main():
    args = parse_args()
    reader = Reader(args)
    if args.all:
        sys.exit(reader.check_all())
    number = args.number or reader.next_number()
    if args.hint:
        reader.print_hint(number)
    elif args.solution:
        reader.print_solution(number)
    elif args.reset:
        reader.reset(number)
    elif args.watch:
        reader.watch(number)
    elif args.number is None:
        reader.print_list(number)
    else:
        sys.exit(reader.check(number))


class Reader:
    """Somebody who does the exercises: a folder with files, and a language."""

    def __init__(self, args):
        locale = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
        self.language = "zh" if args.zh or locale.startswith("zh") else "en"
        self.texts = {n: read_text(folder, self.language) for n, folder in FOLDERS.items()}
        self.docs = "docs/zh" if self.language == "zh" else "docs"
        self.folder = args.folder
        self.limit = args.limit
        self.flags = ["--zh"] if args.zh else []  # to repeat in the commands that are shown
        if args.folder != HERE / "mine":
            self.flags += ["--folder", shlex.quote(str(args.folder))]

    def print(self, template, **values):
        """Print a sentence in the reader's language."""
        print(text_of(say(template, **values), self.language), flush=True)

    def command(self, number, *flags):
        """Return the command that checks an exercise, or does with it what the flags say."""
        return " ".join(["python exercises/check.py", str(number), *flags, *self.flags])

    # Files

    def path(self, number):
        """Return the path of the reader's file, which is created if there is none."""
        path = self.folder / name_of(number)
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            _, code = split_docstring((FOLDERS[number] / "program.py").read_text())
            path.write_text(f'"""{self.texts[number].task}\n"""{code}', encoding="utf-8")
        return path

    def passed(self):
        """Return the numbers of the exercises that were passed; [] if nobody can read them."""
        file = self.folder / "passed.json"
        try:
            return [n for n in json.loads(file.read_text()) if n in self.texts]
        except (OSError, ValueError, TypeError):
            return []

    def note(self, number, is_passed):
        """Note whether the file of an exercise, as it is now, has passed."""
        before = {*self.passed()}
        passed = before | {number} if is_passed else before - {number}
        if passed != before:
            (self.folder / "passed.json").write_text(json.dumps(sorted(passed)))

    def next_number(self, after=0):
        """Return the first exercise after this one that has not passed, or the first of all."""
        passed = self.passed()
        left = [number for number in self.texts if number not in passed] or [1]
        return next((number for number in left if number > after), left[0])

    def reset(self, number):
        path = self.path(number)
        names = (path.with_suffix(f".old{k or ''}") for k in itertools.count())
        old = next(name for name in names if not name.exists())
        path.rename(old)
        self.note(number, False)
        self.print(
            "{path} is as at the beginning; your file is now {old}",
            path=show(self.path(number)),
            old=show(old),
        )

    # What the reader sees

    def print_list(self, number):
        passed = self.passed()
        self.print(
            "Each program runs as two processes or more, called rank 0, rank 1, and so on. It does"
            " something\nwrongly: repair it. Programs 25 to 29 have a gap to fill.\nIf you have"
            " never seen such a program, read {page} first.\n",
            page=f"{self.docs}/ddp-in-12-lines.md",
        )
        for n, text in self.texts.items():
            print(f"{'*' if n in passed else ' '} {n:2} {text.title}")
        if len(passed) == len(self.texts):
            print()
            self.print("You have passed all exercises.")
            return
        print()
        self.print("The next one{marks}:", marks=say(" (* passed)") if passed else "")
        print()
        self.print_task(number)
        print()
        self.print("Edit your file, then check it: {command}", command=self.command(number))

    def print_task(self, number):
        text = self.texts[number]
        path = show(self.path(number))
        self.print("Exercise {number}: {title}", number=number, title=text.title)
        self.print("Your file: {path}", path=path)
        print(f"\n{text.task}")

    def print_hint(self, number):
        text = self.texts[number]
        file, section = text.page
        print(f"{text.hint}\n")
        self.print('Read "{section}" in {page}.', section=section, page=f"{self.docs}/{file}")

    def print_solution(self, number):
        print(self.texts[number].why + "\n")
        diff = (FOLDERS[number] / "solution.patch").read_text().splitlines()
        print("\n".join("..." if line.startswith("@@") else line for line in diff[2:]))

    # Checking

    def check(self, number):
        """Check the reader's file, and print the answer. Return 0 if it has passed, else 1."""
        text = self.texts[number]
        if (self.folder / name_of(number)).exists():
            self.print("Exercise {number}: {title}", number=number, title=text.title)
        else:
            self.print_task(number)
            print()
        path = self.path(number)
        self.print("running {path}", path=show(path))
        print()
        answer = runner.check(FOLDERS[number], path, self.limit)
        lines = answer.output.splitlines()
        if len(lines) > LINES:
            lines = [*lines[: LINES // 2], "...", *lines[-LINES // 2 :]]
        print("\n".join([*lines, ""] if lines else []))
        self.note(number, answer.passed)
        if not answer.passed:
            self.print("not yet: {sentence}", sentence=answer.sentence)
            self.print("A hint: {command}", command=self.command(number, "--hint"))
            self.print("One solution: {command}", command=self.command(number, "--solution"))
            return 1
        self.print("passed: {sentence}", sentence=answer.sentence)
        print(f"\n{text.why}\n")
        if len(self.passed()) == len(self.texts):
            self.print("You have passed all exercises.")
        else:
            command = self.command(self.next_number(number))
            self.print("The next one: {command}", command=command)
        return 0

    def check_all(self):
        """Check all files that are there. Return 0 if all have passed."""
        failed = 0
        for number in self.texts:
            path = self.folder / name_of(number)
            begin = time.monotonic()
            if path.exists():
                passed, sentence, _ = runner.check(FOLDERS[number], path, self.limit)
                mark = say("passed") if passed else say("not yet")
            else:
                passed, sentence, mark = False, say("no file"), "-"
            failed += not passed
            mark, text = (text_of(part, self.language) for part in (mark, sentence))
            print(f"{number:2} {mark:8} {time.monotonic() - begin:4.1f} s  {text}", flush=True)
        return int(failed > 0)

    def watch(self, number):
        """Check whenever the file is saved, exercise after exercise, until Ctrl-C."""
        while True:
            self.print_task(number)
            print()
            checked = self.path(number).read_bytes()
            while self.check(number):
                self.wait_for_change(self.path(number), checked)
                checked = self.path(number).read_bytes()
            if len(self.passed()) == len(self.texts):
                return
            number = self.next_number(number)
            print()

    def wait_for_change(self, path, checked):
        """Wait until a file has another text than the one that was checked."""
        self.print("waiting until you save the file ...")
        while not path.exists() or path.read_bytes() in (b"", checked):  # editors empty it first
            time.sleep(POLL)


def name_of(number):
    """Return the name of the reader's file."""
    return f"{FOLDERS[number].name}.py"


def show(path):
    """Return a path as a reader would type it."""
    return os.path.relpath(path)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the output went to head, or to a pager that was closed
        sys.stdout = None
