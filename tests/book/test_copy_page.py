"""docs/copy-setup-distributed.md: a reader who applies its diffs to its script gets a training that
runs after each step, and whose losses are those of the original.
"""

import re
import shutil

import pytest
from processes import ROOT, finished, start_copy

PAGE = (ROOT / "docs/copy-setup-distributed.md").read_text()
COPIED = re.search(r"Copy \[`(common/\w+\.py)`\]", PAGE)[1]
(BEFORE,) = re.findall(r"The script before:\n\n```python\n(.*?)```", PAGE, re.S)
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
STEPS, (SAME_MODEL, PRINT_MEAN, ORIGINAL) = DIFFS[:5], DIFFS[5:]
COLUMN = re.search(r'grep -o "(.*)" > one.txt', PAGE)[1]


def patched(text, diff):
    """Apply a diff of the page. Each of its parts must fit in exactly one place."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert f"\n{text}".count(f"\n{old}") == 1, f"{old}\nis not once in\n{text}"
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}").removeprefix("\n")
    return text


def converted(steps=5):
    text = BEFORE
    for diff in STEPS[:steps]:
        text = patched(text, diff)
    return text


def train(folder, text, processes=1):
    """Run a script beside a copy of our file, with python or torchrun; return its output."""
    shutil.copy(ROOT / COPIED, folder)
    (folder / "train.py").write_text(text)
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    launcher = [*torchrun, "--local-ranks-filter=0"] if processes > 1 else []
    code, out, err = finished(start_copy(folder, *launcher, "train.py"))
    assert code == 0, err
    return out


def numbers(text):
    """Return the column of the page's check."""
    return [float(line.split()[1]) for line in re.findall(COLUMN, text, re.MULTILINE)]


def accumulating(text):
    """The script with two micro-steps per step, and a bar that shows the loss of its own rank."""
    zero, step = "        optimizer.zero_grad()\n", "        optimizer.step()\n"
    assert zero in text and step in text
    text = text.replace("batch_size = 0, 32", "batch_size = 0, 16")
    text = text.replace("for x, y in loader:", "for i, (x, y) in enumerate(loader):")
    text = text.replace(zero, f"        if i % 2 == 0:\n    {zero}")
    bar = "        print(f'\\r[{i}] Loss: {loss:.3f}, loss {loss:.3f}', end='')\n"
    return text.replace(step, f"        if i % 2 == 1:\n    {step}{bar}")


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 6))
def test_the_script_of_the_page_runs_after_each_step(tmp_path, step):
    assert len(numbers(train(tmp_path, converted(step)))) == 3
    if step > 1:  # the first step alone trains two models
        assert len(numbers(train(tmp_path, converted(step), processes=2))) == 3
    assert (tmp_path / "net.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("change", [str, accumulating])
def test_the_check_of_the_page_prints_three_equal_columns(tmp_path, change):
    before = change(patched(patched(BEFORE, SAME_MODEL), ORIGINAL))
    after = change(patched(patched(converted(), SAME_MODEL), PRINT_MEAN))
    original = numbers(train(tmp_path, before))
    one = numbers(train(tmp_path, after))
    two = numbers(train(tmp_path, after, processes=2))
    batches = 256 // 32 if change is str else 256 // 16
    assert len(original) == 3 * (batches + 1)  # each batch and validation
    assert one == pytest.approx(original, rel=0, abs=1e-9)
    assert two == pytest.approx(original, rel=0, abs=1e-9)
