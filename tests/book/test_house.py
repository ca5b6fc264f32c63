"""Which room of the house may import which: the rule at the top of CONTRIBUTING.md."""

import ast

from processes import ROOT

CORE = ("common", "imagenet", "template")
ROOMS = {  # folder, or beginning of its path: what it may import beside the core
    "0": (),
    "common/": (),
    "imagenet/": (),
    "template/": (),
    "launch/": ("launch",),
    "exercises/": ("exercises",),
    "tests/core/": ("launch",),
    "tests/launch/": ("launch", "tools.lab"),
    "tests/exercises/": ("exercises",),
    "tests/helpers/": ("launch", "tools.lab"),
}


def imported(path):
    """Yield the modules of this repository that a file imports, with dots."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            folder = ROOT / name.partition(".")[0]
            if folder.is_dir() and list(folder.glob("*.py")):
                yield name


def test_the_core_imports_nothing_else_and_no_other_room_imports_tools():
    wrong = []
    for room, also in ROOMS.items():
        files = ROOT.glob("0*.py") if room == "0" else (ROOT / room).rglob("*.py")
        for path in files:
            for name in imported(path):
                if not name.startswith(tuple(f"{allowed}." for allowed in (*CORE, *also))):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong
