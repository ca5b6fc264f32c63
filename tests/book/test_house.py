"""Which room of the house may import which, and how large some are: see CONTRIBUTING.md."""

import ast
import subprocess
import sys

from processes import ROOT

CORE = ("common", "ddp", "fsdp", "gpt", "imagenet", "template")
ROOMS = {  # folder, or beginning of its path: what it may import beside the core
    "0": (),
    "common/": (),
    "ddp/": (),
    "fsdp/": (),
    "gpt/": (),
    "imagenet/": (),
    "template/": (),
    "launch/": ("launch",),
    "exercises/": ("exercises", "launch.rank_watch.colors"),
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


# What a learner of 01 may read: all that it imports. Other data sets are imported when they are
# needed.
BEHIND_01 = [
    "console",
    "data",
    "errors",
    "flags",
    "memory",
    "models",
    "records",
    "report",
    "shapes",
]


def test_01_stands_on_at_most_1200_lines_without_ranks():
    program = "import runpy, sys; runpy.run_path('01_snsc.py'); print(*sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / f"{name.replace('.', '/')}.py" for name in done.stdout.split()]
    reached = sorted(path for path in paths if path.exists())
    assert reached == [ROOT / f"common/{name}.py" for name in BEHIND_01]
    texts = [path.read_text() for path in (ROOT / "01_snsc.py", *reached)]
    assert sum(text.count("\n") for text in texts) <= 1200
    assert not any("torch.distributed" in text for text in texts)


def test_common_has_at_most_2000_lines():
    assert sum(path.read_text().count("\n") for path in (ROOT / "common").glob("*.py")) <= 2000
