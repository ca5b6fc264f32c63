"""Checkpoints: whole or not there, checked, the newest good one found, and nothing but data in
them.
"""

import os
import re
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from needs import need
from ranks import context

from common.errors import UserError
from imagenet import checkpoint
from imagenet.checkpoint import BEST, Checkpoints
from imagenet.checkpoint_file import decode, read_file, write_file
from imagenet.weights import load_weights

RANK_0 = SimpleNamespace(rank=0, local_rank=0)


@pytest.fixture
def open_checkpoints(tmp_path, alone):
    """A function (folder, keep) -> the Checkpoints of a world of one process."""
    opened = []

    def open_checkpoints(folder=tmp_path / "checkpoints", keep=3, patience=30):
        opened.append(Checkpoints(str(folder), RANK_0, alone, keep, patience))
        return opened[-1]

    yield open_checkpoints
    for checkpoints in opened:
        checkpoints.thread.shutdown()


def state(step, size=1000):
    return {
        "step": step,
        "model": {"weight": torch.full((size,), float(step))},
        "ema": None,
        "flags": {"arch": "x"},
    }


def saved(checkpoints, *steps):
    for step in steps:
        checkpoints.save(state(step))
    checkpoints.finish()
    return Path(checkpoints.folder)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_save_is_one_file_that_plain_torch_load_reads_too(open_checkpoints):
    checkpoints = open_checkpoints()
    assert checkpoints.load() == (None, None) and not checkpoints.exist()
    folder = saved(checkpoints, 7)
    assert names(folder) == ["step-00000007.pt"]
    written = (folder / "step-00000007.pt").read_bytes()
    assert re.search(rb"sha256:[0-9a-f]{64}\Z", written), "a mark that later versions read"
    plain = torch.load(folder / "step-00000007.pt", weights_only=True)
    assert plain["step"] == 7 and torch.equal(plain["model"]["weight"], torch.full((1000,), 7.0))
    loaded, path = open_checkpoints(folder).load()
    assert loaded["step"] == 7 and path == str(folder / "step-00000007.pt")


def test_the_newest_few_are_kept_and_the_best(open_checkpoints):
    checkpoints = open_checkpoints(keep=2)
    checkpoints.save(state(1), BEST)
    for step in (1, 2, 3, 4):
        checkpoints.save(state(step))
    checkpoints.save(state(5), BEST)  # which is no reason to delete one of the others
    folder = saved(checkpoints)
    assert names(folder) == [BEST, "step-00000003.pt", "step-00000004.pt"]
    assert torch.equal(load_weights(str(folder / BEST))["weight"], torch.full((1000,), 5.0))


class Code:
    """A pickle that would write a file when it is loaded."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_one_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "no checksum at its end": cut_off,
    "its checksum does not match its content": flip_one_bit,
    "it is empty": lambda path: path.write_bytes(b""),
    "Is a directory": lambda path: (path.unlink(), path.mkdir()),
    "it would run code": lambda path: write_file(
        str(path), {"step": 3, "model": Code(path.parent / "it-ran")}
    ),
}


def test_a_damaged_checkpoint_is_named_and_an_older_one_used(open_checkpoints, tmp_path, caplog):
    for reason, damage in DAMAGE.items():
        folder = saved(open_checkpoints(tmp_path / reason), 1, 2, 3)
        damage(folder / "step-00000003.pt")
        caplog.clear()
        loaded, _ = open_checkpoints(folder).load()
        assert loaded["step"] == 2
        (line,) = caplog.messages
        assert f"{folder}/step-00000003.pt on " in line and reason in line
        assert line.endswith(f"using {folder}/step-00000002.pt")
        assert not (folder / "it-ran").exists()


def test_where_all_are_damaged_the_error_says_what_to_do(open_checkpoints):
    checkpoints = open_checkpoints()
    checkpoints.save(state(1), BEST)
    folder = saved(checkpoints, 1, 2)
    for path in folder.glob("step-*"):
        cut_off(path)
    hint = r"step-00000002.pt.*no checksum.*best.pt may do: cp .*best.pt"
    with pytest.raises(UserError, match=hint):
        open_checkpoints(folder).load()


def test_a_damaged_newer_file_does_not_cost_the_one_written_now(open_checkpoints):
    folder = saved(open_checkpoints(), 1, 9)
    cut_off(folder / "step-00000009.pt")
    checkpoints = open_checkpoints(folder, keep=1)
    saved(checkpoints, 2)
    assert names(folder) == ["step-00000002.pt", "step-00000009.pt"]


@pytest.fixture
def go_on(monkeypatch):
    """An event for which a disk waits before it writes."""
    go_on = threading.Event()
    write = checkpoint.write_file
    monkeypatch.setattr(checkpoint, "write_file", lambda *given: (go_on.wait(30), write(*given)))
    return go_on


def test_training_may_change_its_weights_at_once(open_checkpoints, go_on):
    """It waits for the copy alone."""
    checkpoints = open_checkpoints()
    live = state(1)
    live["optimizer"] = [{"momentum": torch.ones(3)}]
    checkpoints.save(live)
    assert names(checkpoints.folder) == [], "save() has returned, and nothing is written yet"
    live["model"]["weight"].zero_()
    live["optimizer"][0]["momentum"].zero_()
    go_on.set()
    checkpoints.finish()
    loaded, _ = open_checkpoints(checkpoints.folder).load()
    assert loaded["model"]["weight"].eq(1).all() and loaded["optimizer"][0]["momentum"].eq(1).all()


def test_a_slow_disk_costs_a_checkpoint_and_not_the_run(open_checkpoints, go_on, caplog):
    checkpoints = open_checkpoints(patience=0.1)
    for step in (1, 2):
        checkpoints.save(state(step))
    assert "still saving step-00000001.pt: step-00000002.pt is skipped" in caplog.text
    threading.Timer(0.5, go_on.set).start()
    checkpoints.save(state(3), BEST, wait=True)  # which training would not save again
    checkpoints.finish()
    assert names(checkpoints.folder) == [BEST, "step-00000001.pt"]


def write_for_ever(folder):
    for step in range(1, 10**6):
        write_file(f"{folder}/step-{step:08}.pt", state(step, size=500_000))


def test_a_process_killed_while_it_writes_leaves_whole_files(open_checkpoints, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for k in range(2):
        process = context.Process(target=write_for_ever, args=(folder,))
        process.start()
        deadline = time.monotonic() + 60
        while not (list(folder.glob("step-*")) and list(folder.glob(".*.tmp"))):
            assert time.monotonic() < deadline, "a file gets its name when it is complete"
            time.sleep(0.001)
        time.sleep(0.005 * k)
        process.kill()
        process.join()
        for path in folder.glob("step-*"):
            decode(read_file(path))
    checkpoints = open_checkpoints(folder)
    loaded, _ = checkpoints.load()
    assert loaded["model"]["weight"].eq(loaded["step"]).all()
    left, *_ = folder.glob(".*.tmp")
    (folder / "mine.tmp").touch()
    os.utime(folder / "mine.tmp", (0, 0))
    saved(checkpoints, 10**6)
    assert left.exists(), "it could be of a training that is writing it"
    os.utime(left, (0, 0))
    saved(open_checkpoints(folder), 10**6 + 1)
    assert not left.exists() and (folder / "mine.tmp").exists()


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """Or a power cut could leave the name without the content."""
    flushed = []

    def fsync(descriptor, original=os.fsync):
        original(descriptor)
        flushed.append(os.fstat(descriptor).st_size)

    def replace(old, new, original=os.replace):
        assert flushed == [os.path.getsize(old)]
        original(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_file(str(tmp_path / "a.pt"), state(5))
    assert len(flushed) == 2, "of the folder too, which holds the name"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    need("a small disk needs root" if os.geteuid() else None)
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True
    )
    need(mounted.stderr if mounted.returncode else None)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_checkpoints_before_it(open_checkpoints, small_disk, caplog):
    """And training goes on."""
    checkpoints = open_checkpoints(small_disk)
    checkpoints.save(state(1, size=100_000))
    checkpoints.save(state(2, size=250_000))  # does not fit beside the first one
    checkpoints.save(state(3, size=1000))
    assert "step-00000002.pt: No space left on device; training continues" in caplog.text
    checkpoints.finish()
    assert names(small_disk) == ["step-00000001.pt", "step-00000003.pt"]
    checkpoints = open_checkpoints(small_disk)
    checkpoints.save(state(4, size=250_000))
    full = "No space left on device; the checkpoints before it are complete: free"
    with pytest.raises(UserError, match=full):
        checkpoints.finish()
    assert open_checkpoints(small_disk).load()[0]["step"] == 3


def test_a_folder_that_cannot_be_written_is_refused_at_once(open_checkpoints, tmp_path):
    (tmp_path / "file").touch()
    message = r"cannot write to --checkpoints-path .*file/here.*name a folder of yours"
    with pytest.raises(UserError, match=message):
        open_checkpoints(tmp_path / "file/here")
    with pytest.raises(UserError, match="cannot write to --checkpoints-path /proc/self on"):
        open_checkpoints("/proc/self")  # which exists, and takes no file


def test_weights_come_from_a_checkpoint_or_a_state_dict(tmp_path):
    """And from nothing else."""
    weights = {"weight": torch.ones(3)}
    torch.save(weights, tmp_path / "plain.pt")
    write_file(str(tmp_path / "whole.pt"), state(5) | {"ema": weights})
    for name in ("plain.pt", "whole.pt"):
        loaded = load_weights(str(tmp_path / name))["weight"]
        assert torch.equal(loaded, torch.ones(3)), "averaged ones first"
    torch.save({"weight": Code(tmp_path / "it-ran")}, tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(UserError, match=r"list\.pt: it holds a list, not a state_dict; expected"):
        load_weights(str(tmp_path / "list.pt"))
    for name in ("code.pt", "text.pt", "missing.pt", "."):
        with pytest.raises(UserError, match=r"--weights .*expected a checkpoint of this script"):
            load_weights(str(tmp_path / name))
    assert not (tmp_path / "it-ran").exists()
