"""The tasks of exercises 22 and 23 quote what why_hang and check_ranks say about their programs."""

import json
import re

import pytest
import ranks
import torch
from processes import ROOT, finished, start

from exercises.texts import FOLDERS, read_text


def tasks(number):
    """The task of an exercise in both languages, which must not move the lines of the program."""
    english, chinese = (read_text(FOLDERS[number], language).task for language in ("en", "zh"))
    assert english.count("\n") == chinese.count("\n")
    return english, chinese


def joined(text):
    return " ".join(text.split())


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"),
    reason="this torch does not record the calls of gloo",
)
def test_exercise_22_quotes_what_why_hang_says(tmp_path, monkeypatch):
    program = FOLDERS[22] / "program.py"
    monkeypatch.setenv("WHY_HANG", str(tmp_path))
    started = ranks.Ranks(tmp_path, 3, ["run", program], script="launch/why_hang.py")
    try:
        for _ in range(60):
            said = finished(start("launch/why_hang.py", "ask"))[1]
            if said.startswith("call 6 "):
                break
    finally:
        started.end()
    files = [tmp_path / f"rank-{rank}.json" for rank in range(3)]
    first, second, third = (calls(json.loads(file.read_text())) for file in files)
    assert first == second, started.output()
    rows = zip(range(1, 7), first, third, strict=True)
    record = " ".join(" ".join(map(str, row)) for row in rows)
    line = said.splitlines()[0].replace(str(program.relative_to(ROOT)), program.name)
    for task in tasks(22):
        assert line in joined(task) and record in joined(task)


def calls(answer):
    """The calls of a rank, as the task writes them."""
    texts = []
    for _, _, name, shapes, _, place in answer["calls"]:
        shape = f" {shapes[0]}" if shapes else ""
        texts.append(f"{name}{shape} at line {place.partition(':')[2]}")
    return texts


@pytest.mark.slow
def test_exercise_23_quotes_what_check_ranks_says():
    program = (FOLDERS[23] / "program.py").relative_to(ROOT)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    code, out, err = finished(start(*torchrun, "launch/check_ranks.py", program))
    (said,) = [line for line in (out + err).splitlines() if line.startswith("found: ")]
    assert code == 1
    for task in tasks(23):
        assert rounded(said.replace(str(program), program.name)) in rounded(joined(task))


def rounded(text):
    """A text whose numbers no other processor changes."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.3f}", text)
