"""What people type who come from other trainings: each error says what to type here."""

import runpy
import sys

import pytest
from processes import ROOT
from rungs import ALL_SCRIPTS, parse

from common import other_flags

GROUPS = {  # of tables, which the errors of a script look into
    "03_mnmc_ddp_launch.py": ["01 to 05"],
    "04_mnmc_ddp_mp.py": ["04", "01 to 05"],
    "06_imagenet.py": ["06"],
    "08_gpt.py": ["08"],
}


def test_what_the_tables_say_to_type_is_taken(monkeypatch):
    monkeypatch.setattr("imagenet.flags.can_compile", lambda: True)
    faults = []
    for script, groups in GROUPS.items():
        for row in other_flags.read_rows(groups):
            ours = row.get("here", "")
            words = ours.split()
            if script.startswith("06") and not ours.startswith("data/"):
                words.append("data/imagenet")
            words = [word.replace("HOST:PORT", "host1:29500") for word in words]
            try:
                parse(monkeypatch, script, *words)
            except SystemExit:
                faults.append((script, ours))
    assert not faults


# What is typed, and what its error says
TYPED = {
    ("06_imagenet.py", "-e --model x"): "-e: here --evaluate --resume; --model x: here --arch x",
    ("06_imagenet.py", "TRAIN.BATCH_SIZE 256"): "TRAIN.BATCH_SIZE 256: here --batch-size 8192 for "
    "TRAIN.BATCH_SIZE 128 (there images per GPU, on 64 GPUs)",
    ("06_imagenet.py", "--num_classes 5"): "--num-classes 5: here nothing: the folders say it",
    ("03_mnmc_ddp_launch.py", "--syncBN True"): "--syncBN True: here --sync-bn",
    ("08_gpt.py", "--n_layer=6"): "--n-layer 6: here --layers 6",
    ("04_mnmc_ddp_mp.py", "--ngpus_per_node=4"): "--ngpus-per-node 4: here --nproc-per-node 4",
    # 04 starts its processes itself.
    ("04_mnmc_ddp_mp.py", "--gpus 4"): "--gpus 4: here --nproc-per-node 4",
    ("01_snsc.py", "--dry-run"): "--dry-run: here --epochs 1 --limit 64",
    ("01_snsc.py", "--gpus 2"): "--gpus 2: here no flag: torchrun --nproc-per-node=2 "
    "03_mnmc_ddp_launch.py",
    ("01_snsc.py", "--amp"): "--amp: here no flag: 06_imagenet.py and 07_fsdp.py have --amp bf16",
    ("01_snsc.py", "--resume"): "--resume: here no flag: 06_imagenet.py has --resume, and "
    "07_fsdp.py --checkpoints-path DIR",
    # 01 shares a table with 03, but it has no --sync-bn.
    ("01_snsc.py", "--syncBN True"): "unrecognized arguments: --syncBN True",
    # A flag of ours, even if it is wrong, is never taken for one of others.
    ("06_imagenet.py", "x --lr fast"): "argument --lr: 'fast' given, expected a number above 0",
    ("06_imagenet.py", "x --nonsense 2"): "unrecognized arguments: --nonsense 2",
}


def test_an_error_says_what_to_type_here_and_ours_is_never_taken_for_theirs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("imagenet.signals.install", lambda: None)
    for (script, given), expected in TYPED.items():
        monkeypatch.setattr(sys, "argv", [script, *given.split()])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(script, run_name="__main__")
        error = f"{script}: error: {expected} (all flags: {script} --help)\n"
        assert (end.value.code, capsys.readouterr().err) == (2, error)


def test_an_underline_in_a_flag_is_a_hyphen(monkeypatch):
    for script in ALL_SCRIPTS[:-1]:  # 08 counts in tokens
        source = ["--dummy", 8] if script.startswith("06") else ["--data_dir=my_data"]
        args = parse(monkeypatch, script, *source, "--batch_size", 6, "--print_every=3")
        assert (args.batch_size, args.print_every) == (6, 3)
        assert script.startswith("06") or args.data_dir == "my_data", "values stay as they are"
