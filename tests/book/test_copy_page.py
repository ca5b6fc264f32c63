"""docs/copy-setup-distributed.md: a reader who applies its diffs to its script gets a training that
runs after each step, and the command of the page finds its losses to be those of the original.
"""

import re
import shutil

import pytest
from processes import ROOT, finished, start_copy

PAGE = (ROOT / "docs/copy-setup-distributed.md").read_text()
COPIED = re.search(r"Copy \[`(common/\w+\.py)`\]", PAGE)[1]
(BEFORE,) = re.findall(r"The script before:\n\n```python\n(.*?)```", PAGE, re.S)
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
STEPS, (SAME_MODEL,) = DIFFS[:5], DIFFS[5:]
(CHECK,) = re.findall(r"^torchrun .* (launch/check_ranks.py --before .*) train.py$", PAGE, re.M)


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


def train(folder, text, *command, processes=1):
    """Run a script beside a copy of our file, with python or torchrun; return its output."""
    shutil.copy(ROOT / COPIED, folder)
    (folder / "train.py").write_text(text)
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    launcher = [*torchrun, "--local-ranks-filter=0"] if processes > 1 else []
    code, out, err = finished(start_copy(folder, *launcher, *command, "train.py"))
    assert code == 0, err
    return out


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 6))
def test_the_script_of_the_page_runs_after_each_step(tmp_path, step):
    assert train(tmp_path, converted(step)).count("validation loss") == 3
    if step > 1:  # the first step alone trains two models
        assert train(tmp_path, converted(step), processes=2).count("validation loss") == 3
    assert (tmp_path / "net.pt").exists()


@pytest.mark.slow
def test_the_check_of_the_page_finds_the_training_of_the_original(tmp_path):
    (tmp_path / "original.py").write_text(patched(BEFORE, SAME_MODEL))
    script, *flags = CHECK.split()
    text = patched(converted(), SAME_MODEL)
    output = train(tmp_path, text, ROOT / script, *flags, processes=2)
    rounding = re.search(
        r"; as in original.py: same for 24 steps, up to (\S+); the same sch", output
    )
    assert rounding and float(rounding[1]) < 1e-5, output
