"""Repair programs that train wrongly, and have your repairs checked.

    python exercises/check.py --watch      the way in: the next exercise, checked at each save
    python exercises/check.py              list the exercises, and say which one is next
    python exercises/check.py 5            run exercise 5 on two ranks, and say what was seen
    python exercises/check.py 5 --hint     a hint, then the next one, and the page to read

Your files are in exercises/mine/: edit them there. You need no GPU.
"""

import contextlib
import difflib
import itertools
import json
import os
import runpy
import select
import shlex
import signal
import sys
import termios
import time
import tty
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.flags import Parser, whole_number
from exercises.judge import runner, timeline
from exercises.sentences import say, text_of
from exercises.texts import COURSE, FOLDERS, read_text, split_docstring
from launch.rank_watch.colors import colored

HERE = Path(__file__).resolve().parent
LINES = 24  # of output that are shown
POLL = 0.3  # seconds between two looks at a watched file
WIDTH = 70  # of rules and bars
SHORT = 30  # lines of another repair that is shown
OTHERS = 2  # other repairs that are shown after a pass


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    number = whole_number(1, max(FOLDERS))
    add("number", nargs="?", type=number, help=f"of an exercise, 1 to {max(FOLDERS)}")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--hint", action="store_true", help="print the next hint and the page to read"
    )
    what.add_argument("--solution", action="store_true", help="print what was wrong, and a repair")
    what.add_argument(
        "--reset", action="store_true", help="start again; your file is kept with the ending .old"
    )
    what.add_argument("--watch", action="store_true", help="check at each save, and obey keys")
    what.add_argument("--all", action="store_true", help="check all exercises: for teachers")
    add("--folder", type=Path, default=HERE / "mine", help="where the repaired files are")
    add("--messages", action="store_true", help="draw who sent what when, and who waits")
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
        is_new = not (reader.folder / name_of(number)).exists()
        sys.exit(reader.check(number, is_new))


class Reader:
    """Somebody who does the exercises: a folder with files, and a language."""

    def __init__(self, args):
        locale = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
        self.language = "zh" if args.zh or locale.startswith("zh") else "en"
        self.texts = {n: read_text(folder, self.language) for n, folder in FOLDERS.items()}
        self.docs = "docs/zh" if self.language == "zh" else "docs"
        self.folder = args.folder
        self.limit = args.limit
        self.shows_messages = args.messages
        self.lanes = []  # of the last check: what the ranks did
        self.has_keys = False  # while it waits for the next save
        self.flags = ["--zh"] if args.zh else []  # to repeat in the commands that are shown
        if args.folder != HERE / "mine":
            self.flags += ["--folder", shlex.quote(str(args.folder))]

    def print(self, template, **values):
        """Print a sentence in the reader's language."""
        print(colored(text_of(say(template, **values), self.language)), flush=True)

    def command(self, number, *flags):
        """Return the command that checks an exercise, or does with it what the flags say."""
        if self.has_keys and flags:
            return say("the key {key}", key=flags[0][2])
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

    def noted(self, name, default):
        """Return what a file beside the reader's files holds, or this if nobody can read it."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.folder / name).read_text())
            return found if isinstance(found, type(default)) else default
        return default

    def passed(self):
        """Return the numbers of the exercises that were passed."""
        return [n for n in self.noted("passed.json", []) if n in [*self.texts]]

    def hints(self):
        """Return {number as a text: hints that were shown}; 0: the solution was asked for."""
        return self.noted("hints.json", {})

    def note(self, number, is_passed):
        """Note whether the file of an exercise, as it is now, has passed."""
        before = {*self.passed()}
        passed = before | {number} if is_passed else before - {number}
        if passed != before:
            (self.folder / "passed.json").write_text(json.dumps(sorted(passed)))

    def note_hints(self, number, count):
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "hints.json").write_text(json.dumps(self.hints() | {str(number): count}))

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
        self.print_beginning()
        self.print_groups(number)
        print()
        self.print_progress()
        print()
        if len(self.passed()) == len(self.texts):
            self.print("You have passed all exercises.")
            return
        self.print_task(number)
        print()
        command = " ".join(["python exercises/check.py --watch", *self.flags])
        self.print(
            "Check it at each save, with keys for hints and more: {command}", command=command
        )

    def print_beginning(self):
        self.print(
            "Each program runs as two processes or more, called rank 0, rank 1, and so on. It does"
            " something\nwrongly: repair it. Those by hand have a gap to fill.\nIf you have never"
            " seen such a program, read {page} first.\n",
            page=f"{self.docs}/ddp-in-12-lines.md",
        )

    def print_groups(self, number):
        """Print the list of the exercises, with a mark at this one."""
        passed = self.passed()
        parts = []
        for group in COURSE:
            texts = {n: text for n, text in self.texts.items() if str(n) in group["exercises"]}
            minutes = sum(text.minutes for text in texts.values())
            head = say("{title}, {minutes} minutes", title=group[self.language], minutes=minutes)
            lines = [text_of(head, self.language)]
            for n, text in texts.items():
                mark = "*" if n in passed else ">" if n == number else " "
                level = "●" * text.level + "○" * (3 - text.level)
                lines.append(f"  {mark} {n:2}  {level}  {text.title}")
            parts.append("\n".join(lines))
        print("\n\n".join(parts))

    def print_progress(self):
        passed, count = len(self.passed()), len(self.texts)
        done = WIDTH * passed // count
        bar = "━" * done + "─" * (WIDTH - done)
        self.print("{bar}  {passed} of {count}", bar=bar, passed=passed, count=count)

    def print_title(self, number):
        self.print("Exercise {number}: {title}", number=number, title=self.texts[number].title)

    def print_task(self, number):
        text = self.texts[number]
        path = show(self.path(number))
        self.print_title(number)
        self.print("Your file: {path}", path=path)
        print(f"\n{text.task}")

    def print_hint(self, number):
        """Print the next hint of an exercise, or the last one again."""
        text = self.texts[number]
        count = min(self.hints().get(str(number), 0) + 1, len(text.hints))
        self.note_hints(number, count)
        self.print("Hint {count} of {total}", count=count, total=len(text.hints))
        print(f"\n{text.hints[count - 1]}\n")
        file, section = text.page
        self.print('Read "{section}" in {page}.', section=section, page=f"{self.docs}/{file}")
        if count < len(text.hints):
            self.print("The next hint: {command}", command=self.command(number, "--hint"))
        else:
            self.print("One solution: {command}", command=self.command(number, "--solution"))

    def print_solution(self, number):
        if str(number) not in self.hints() and number not in self.passed():
            self.note_hints(number, 0)
            self.print(
                "A hint comes first: {command}. If you prefer the solution, ask again.",
                command=self.command(number, "--hint"),
            )
            return
        print(self.texts[number].why + "\n")
        diff = (FOLDERS[number] / "solution.patch").read_text().splitlines()
        print_diff(diff[2:])

    def print_other_repairs(self, number):
        """Print repairs that others have written, as diffs, unless they are long."""
        program = (FOLDERS[number] / "program.py").read_text()
        mine = self.path(number).read_text(encoding="utf-8")
        repairs = {}  # name: lines of a diff
        for name, replacements in runpy.run_path(FOLDERS[number] / "mends.py")["RIGHT"].items():
            text = program
            for old, new in replacements:
                text = text.replace(old, new)
            diff = difflib.unified_diff(program.splitlines(), text.splitlines(), lineterm="", n=0)
            lines = [*diff][3:]
            if split_docstring(text)[1] not in mine and len(lines) <= SHORT:
                repairs[name] = lines
        for name, lines in [*repairs.items()][:OTHERS]:
            self.print("Another repair: {name}", name=say(name))
            print_diff(lines)
            print()

    # Checking

    def check(self, number, is_new=False):
        """Check the reader's file, and print the answer. Return 0 if it has passed, else 1."""
        if is_new:
            self.print_task(number)
            print()
        else:
            self.print_title(number)
        path = self.path(number)
        self.print("running {path}", path=show(path))
        print()
        answer = runner.check(FOLDERS[number], path, self.limit)
        lines = answer.output.splitlines()
        if len(lines) > LINES:
            lines = [*lines[: LINES // 2], "...", *lines[-LINES // 2 :]]
        print("\n".join([*lines, ""] if lines else []))
        self.lanes = answer.lanes
        if self.shows_messages:
            self.print_messages()
            print()
        self.note(number, answer.passed)
        if not answer.passed:
            self.print("not yet: {sentence}", sentence=answer.sentence)
            if not self.has_keys:
                self.print("A hint: {command}", command=self.command(number, "--hint"))
            return 1
        self.print("passed: {sentence}", sentence=answer.sentence)
        text = self.texts[number]
        print(f"\n{text.why}\n")
        self.print_other_repairs(number)
        if text.scene:
            page = f"docs/see/index.html#{text.scene}/0/{self.language}"
            self.print("See it happen: open {page} in a browser.", page=page)
        else:
            file, section = text.page
            self.print('Why: "{section}" in {page}.', section=section, page=f"{self.docs}/{file}")
        if len(self.passed()) == len(self.texts):
            self.print("You have passed all exercises.")
        elif not self.has_keys:
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
                passed, sentence, *_ = runner.check(FOLDERS[number], path, self.limit)
                self.note(number, passed)
                mark = say("passed") if passed else say("not yet")
            else:
                passed, sentence, mark = False, say("no file"), "-"
            failed += not passed
            mark, text = (text_of(part, self.language) for part in (mark, sentence))
            mark = colored(f"{mark:8}")
            print(f"{number:2} {mark} {time.monotonic() - begin:4.1f} s  {text}", flush=True)
        return int(failed > 0)

    # Watching

    def watch(self, number):
        """Check whenever the file is saved, exercise after exercise, and obey keys meanwhile."""
        if not self.passed():
            self.print_beginning()
        with single_keys() as self.has_keys:
            while number:
                number = self.watch_one(number)
                print()

    def watch_one(self, number):
        """Check a file at each save. Return the number of the exercise that follows, or None."""
        is_new = True
        while True:
            checked = self.path(number).read_bytes()
            failed = self.check(number, is_new)
            if not self.has_keys and not failed:
                is_end = len(self.passed()) == len(self.texts)
                return None if is_end else self.next_number(number)
            key = self.wait_for_change(number, checked)
            if key == "q":
                return None
            if key == "n":
                return self.next_number(number)
            print("─" * WIDTH)
            is_new = False

    def wait_for_change(self, number, checked):
        """Wait until a file has another text than the one that was checked, and obey keys.

        Returns the key with which the reader leaves the exercise, or "".
        """
        keys = {
            "h": self.print_hint,
            "l": self.print_groups,
            "m": self.print_messages,
            "s": self.print_solution,
            "r": self.reset,
        }
        path = self.path(number)
        self.print_keys()
        while not path.exists() or path.read_bytes() in (b"", checked):  # editors empty it first
            key = self.read_key()
            if key in ("n", "q"):
                return key
            if key in keys:
                print()
                keys[key](number)
                self.print_keys()
        return ""

    def print_messages(self, *_):
        """Draw what the ranks did in the last check."""
        self.print(
            "Time goes down. ● is a message, with its line; ─ joins its ranks; ┊ waits for the"
            " others.\n"
        )
        print(timeline.draw(self.lanes, self.language))

    def print_keys(self):
        if self.has_keys:
            print()
            self.print_progress()
            self.print(
                "keys: n next, h hint, m messages, l list, s solution, r begin again, q quit"
            )
        self.print("waiting until you save the file ...")

    def read_key(self):
        """Return a key that was pressed, or "" after a while."""
        if not self.has_keys:
            time.sleep(POLL)
        elif select.select([sys.stdin], [], [], POLL)[0]:
            return os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q"  # it was closed
        return ""


@contextlib.contextmanager
def single_keys():
    """Get each key at once, without Enter. Yields whether standard input is a terminal.

    Afterwards the terminal is as before, whatever happens.
    """
    if not sys.stdin.isatty() or os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
        yield False  # a pipe, or a job in the background
        return

    def begin(*_):
        tty.setcbreak(sys.stdin, termios.TCSANOW)

    before = termios.tcgetattr(sys.stdin)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGCONT, begin)  # after Ctrl-Z, the shell has changed it
    try:
        begin()
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def name_of(number):
    """Return the name of the reader's file."""
    return f"{FOLDERS[number].name}.py"


def print_diff(lines):
    print(colored("\n".join("..." if line.startswith("@@") else line for line in lines)))


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
