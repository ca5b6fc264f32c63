"""Make faults in a Python file with the operators of a mutation-testing library.

The operators are those of mutmut, and two that it lacks: delete a call whose result nobody uses
(Deng, Offutt and Li, "Empirical Evaluation of the Statement Deletion Mutation Operator", 2013), and
negate a condition. Left out is what no test should hold fast: annotations, docstrings, the help of
flags, and the wording of messages, which are the texts with a space in them.
"""

import difflib
import random
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators


class Fault(NamedTuple):
    """One change of one place in a file."""

    file: str  # path below the root of the repository
    line: int  # counted from 1
    function: str  # name of the innermost function, as Class.method, or "" outside of functions
    operator: str
    before: str  # the lines that change, without indentation, joined by spaces
    after: str
    text: str  # of the whole file, with the fault


def delete_call(node):
    """Delete a statement that is a call whose result nobody uses."""
    statement = node.body[0]
    if isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Call):
        yield node.with_changes(body=[cst.Pass(), *node.body[1:]])


def negate_condition(node):
    """Negate the condition of if, while or assert."""
    condition = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=cst.UnaryOperation(cst.Not(), condition))


OPERATORS = [
    *mutation_operators,
    (cst.SimpleStatementLine, delete_call),
    (cst.If, negate_condition),
    (cst.While, negate_condition),
    (cst.IfExp, negate_condition),
]
TEXT_FOR_PEOPLE = ("help", "metavar", "description")  # keywords of argparse


class Places(cst.CSTVisitor):
    """Collect (line, function, operator, node, changed node) for every fault of a module."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self):
        super().__init__()
        self.found = []
        self.around = []  # the classes and functions around the current node

    def on_visit(self, node):
        if isinstance(node, cst.Annotation):
            return False
        if isinstance(node, cst.Arg) and node.keyword and node.keyword.value in TEXT_FOR_PEOPLE:
            return False
        if isinstance(node, cst.SimpleString) and (" " in node.value or '"""' in node.value):
            return False
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self.around.append(node)
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                self._add(node, operator)
        return True

    def on_leave(self, original_node):
        if isinstance(original_node, (cst.FunctionDef, cst.ClassDef)):
            self.around.pop()

    def _add(self, node, operator):
        position = self.get_metadata(PositionProvider, node, None)
        if position is None:  # an operator such as +, which has no place of its own
            return
        name = operator.__name__.removeprefix("operator_")
        for changed in operator(node):
            self.found.append((position.start.line, self._function(), name, node, changed))

    def _function(self):
        around = list(self.around)
        while around and isinstance(around[-1], cst.ClassDef):
            around.pop()
        return ".".join(node.name.value for node in around)


def changed_lines(before, after):
    """Return the lines that differ between two texts, each side as one line without indentation."""
    old = before.splitlines()
    new = after.splitlines()
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changes = [block for block in blocks if block[0] != "equal"]
    first = changes[0]
    last = changes[-1]
    old_lines = old[first[1] : last[2]]
    new_lines = new[first[3] : last[4]]
    return (
        " ".join(line.strip() for line in old_lines),
        " ".join(line.strip() for line in new_lines),
    )


def is_for_people(node, changed):
    """Return whether a call differs only in an argument such as help=..."""
    if not isinstance(node, cst.Call) or not isinstance(changed, cst.Call):
        return False
    gone = [arg for arg in node.args if not any(arg is other for other in changed.args)]
    keywords = [arg.keyword.value if arg.keyword else None for arg in gone]
    return bool(keywords) and set(keywords) <= set(TEXT_FOR_PEOPLE)


def is_python(text):
    try:
        compile(text, "fault", "exec")
    except SyntaxError:
        return False
    return True


def faults_in(root, file, seed):
    """Yield the faults of a file in a random order that depends on the seed and the file alone.

    First a random line, then a random fault of this line: a call with ten arguments, which has
    twenty faults, is as likely as a line that has one.
    """
    text = (root / file).read_text()
    module = MetadataWrapper(cst.parse_module(text))
    places = Places()
    module.visit(places)
    by_line = {}
    for place in places.found:
        by_line.setdefault(place[0], []).append(place)

    rng = random.Random(f"{seed} {file}")
    while by_line:
        line = rng.choice(sorted(by_line))
        place = by_line[line].pop(rng.randrange(len(by_line[line])))
        if not by_line[line]:
            del by_line[line]
        _, function, operator, node, changed = place
        if is_for_people(node, changed):
            continue
        new = module.module.deep_replace(node, changed).code
        if new != text and is_python(new):
            before, after = changed_lines(text, new)
            yield Fault(file, line, function, operator, before, after, new)


def sample(root, files, count, least, seed):
    """Return `count` random faults, at least `least` of them in every file that has as many.

    Beyond these, a file is drawn as often as it has lines.
    """
    sources = {file: faults_in(root, file, seed) for file in files}
    lines = {file: len((root / file).read_text().splitlines()) for file in files}
    chosen = []
    for file in files:
        for _ in range(least):
            fault = next(sources[file], None)
            if fault is not None:
                chosen.append(fault)
    rng = random.Random(seed)
    open_files = [file for file in files if lines[file]]
    while len(chosen) < count and open_files:
        file = rng.choices(open_files, [lines[f] for f in open_files])[0]
        fault = next(sources[file], None)
        if fault is None:
            open_files.remove(file)
        else:
            chosen.append(fault)
    return chosen
