"""What people type who come from other trainings: each error says what to type here."""

import re
import runpy
import subprocess
import sys

import pytest
from processes import ROOT
from rungs import ALL_SCRIPTS, parse

from common import other_flags

RUNGS = {
    "03_mnmc_ddp_launch.py": other_flags.OF_03_TO_05,
    "04_mnmc_ddp_mp.py": other_flags.OF_04,
    "06_imagenet.py": other_flags.OF_06,
}
ROWS = [
    (script, row) for script, tables in RUNGS.items() for rows in tables.values() for row in rows
]


@pytest.mark.parametrize(("script", "row"), ROWS)
def test_what_a_table_says_to_type_is_taken(script, row, monkeypatch):
    monkeypatch.setattr("imagenet.flags.can_compile", lambda: True)
    words = [] if other_flags.is_prose(row[1]) else row[1].split()
    if script.startswith("06") and not row[1].startswith("data/"):
        words.append("data/imagenet")
    if "tcp://HOST:PORT" in words:
        words[words.index("tcp://HOST:PORT")] = "tcp://host1:29500"
    parse(monkeypatch, script, *words)


@pytest.mark.parametrize(("script", "row"), ROWS)
def test_a_row_names_what_is_typed_there(script, row):
    """Or in words, what a script does without a flag."""
    assert other_flags.typed(row[0]) or row[0] == "divided by 10 every 30 epochs, no warm-up"


# What the users of five projects type, and what they read
TYPED = [
    ("06_imagenet.py", "--cfg config/resnet18.yaml", "@recipes/resnet18.args"),
    ("06_imagenet.py", "TRAIN.BATCH_SIZE 256", "--batch-size 8192 for TRAIN.BATCH_SIZE 128"),
    ("06_imagenet.py", "OPTIM.BASE_LR 6.4", "--lr 0.2"),
    ("06_imagenet.py", "-a resnet34", "--arch resnet34"),
    ("06_imagenet.py", "-b 64", "--batch-size 64 (there images of all GPUs of a machine"),
    ("06_imagenet.py", "-e", "--evaluate --resume"),
    ("06_imagenet.py", "--model resnet34", "--arch resnet34"),
    ("06_imagenet.py", "--lr-base-size 512", "nothing: always 256"),
    ("06_imagenet.py", "--syncBN True", "--sync-bn"),
    ("06_imagenet.py", "--data-path photos", "photos (there in WZMIAOMIAO, split by the script)"),
    ("06_imagenet.py", "--freeze-layers True", "--freeze conv1,bn1,layer"),
    ("06_imagenet.py", "--lrf 0.01", "--final-lr 0.01"),
    ("06_imagenet.py", "--num_classes 5", "nothing: the folders say it"),
    ("06_imagenet.py", "--test-only", "--evaluate --resume"),
    ("05_mnmc_ddp_slurm.py", "--log-interval=20", "--print-every 20"),
    ("05_mnmc_ddp_slurm.py", "--test-batch-size 1000", "nothing: as large as --batch-size"),
    ("05_mnmc_ddp_slurm.py", "--gamma 0.7", "nothing: the learning rate stays the same"),
    ("05_mnmc_ddp_slurm.py", "--no-cuda", "no flag: set CUDA_VISIBLE_DEVICES="),
    ("05_mnmc_ddp_slurm.py", "--save-model", "--save mnist.pt"),
    ("01_snsc.py", "--dry-run", "--epochs 1 --limit 64"),
    ("03_mnmc_ddp_launch.py", "--syncBN True", "--sync-bn"),
    ("04_mnmc_ddp_mp.py", "--ngpus_per_node=4", "--nproc-per-node 4"),
    ("04_mnmc_ddp_mp.py", "-nr 1", "--node-rank 1"),
]


def refused(script, *words, monkeypatch, capsys):
    """What a script prints that refuses these flags, before it does anything else."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("imagenet.signals.install", lambda: None)
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(("script", "given", "expected"), TYPED)
def test_an_error_says_what_to_type_here(script, given, expected, monkeypatch, capsys):
    line = refused(script, *given.split(), monkeypatch=monkeypatch, capsys=capsys)
    name, _, value = other_flags.dashed(given).replace("=", " ").partition(" ")
    shown = re.escape(f"{name} {value}".strip())
    found = re.fullmatch(rf"{script}: error: (.*) \(all flags: {script} --help\)", line)[1]
    assert re.match(rf"({shown}|{re.escape(name)}): here {re.escape(expected)}", found), line


def test_an_error_names_each_flag_and_the_page_shows_one(monkeypatch, capsys):
    words = ["data/imagenet", "-a", "resnet50", "--log-interval", "50"]
    line = refused("06_imagenet.py", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert line.count(": here ") == 2
    for page in ("docs/coming-from.md", "docs/zh/coming-from.md"):
        assert f"\n{line}\n" in (ROOT / page).read_text()


def test_a_flag_of_ours_is_never_taken_for_one_of_others(monkeypatch, capsys):
    """Even if it is wrong, and has the name of a flag of others."""
    words = ["data/imagenet", "--lr", "fast", "--epochs", "2"]
    line = refused("06_imagenet.py", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert "argument --lr: 'fast' given" in line and ": here " not in line
    words = ["data/imagenet", "--nonsense", "2"]
    line = refused("06_imagenet.py", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert "unrecognized arguments: --nonsense 2 (all flags" in line


@pytest.mark.parametrize("script", ALL_SCRIPTS)
def test_an_underline_in_a_flag_is_a_hyphen(script, monkeypatch):
    source = ["--dummy", 8] if script.startswith("06") else ["--data_dir=my_data"]
    args = parse(monkeypatch, script, *source, "--batch_size", 6, "--print_every=3")
    assert (args.batch_size, args.print_every) == (6, 3)
    assert script.startswith("06") or args.data_dir == "my_data", "values stay as they are"


def test_an_underline_is_a_hyphen_in_the_template_and_preflight():
    for command, expected in (
        (["launch/preflight.py", "--js_on"], "unrecognized arguments: --js-on"),
        (["template/train.py", "--batch_size=x"], "argument --batch-size: invalid int value"),
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT / "common"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and expected in done.stderr
