"""How 06 resumes: the same bits, on other numbers of ranks, from the newest good checkpoint."""

import functools
import os
import random
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from imagenet_runs import CLASSES, SMALL_06, final, new_folder, parse_06, same
from images import write_images
from ranks import Ranks, training_log

from imagenet.checkpoint_file import decode, read_file
from imagenet.resume import check_same_run, micro_batches


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_run_killed_again_and_again_ends_with_the_same_bits(
    train, one_each, tmp_path, world_size
):
    """A run that is killed again and again ends with the bits of one that never was."""
    options = [one_each, "--epochs", 4, "--batch-size", 12, "--accumulate", 2, "--sync-bn"]
    options += ["--ema", 0.9]
    options += ["--amp", "bf16", "--checkpoint-every", 2, "--deterministic", "--lr", 0.5]
    options += ["--warmup-epochs", 1]
    options += ["--workers", 1 if world_size == 2 else 0]
    assert train("whole", world_size, *options).wait() == [0] * world_size
    steps = sorted(random.Random(world_size).sample(range(1, 16), 5 if world_size == 2 else 2))
    for k, step in enumerate(steps):
        codes = train(
            "killed", world_size, *options, "--resume", kill={k % world_size: step}
        ).wait()
        assert codes[k % world_size] == -9 and 0 not in codes
    last = train("killed", world_size, *options, "--resume")
    assert last.wait() == [0] * world_size, last.output()

    whole, killed = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert whole["step"] == killed["step"] == 16
    for part in ("model", "ema", "optimizer", "scaler", "best"):
        assert same(whole[part], killed[part]), part
    for folder in ("whole", "killed"):
        seen = training_log(tmp_path / folder)
        assert len(seen) == 16
        for epoch in range(4):
            images = [target for step in range(4) for target in seen[epoch, step]["targets"]]
            assert sorted(images) == list(range(40)), "each image of an epoch once"


@pytest.mark.slow
def test_the_training_is_the_same_while_the_world_changes(train, one_each, tmp_path):
    """4 ranks, then 2, then 3, by kills: the same images in each step and the same rate as in one
    that stays at 4.
    """
    options = [one_each, "--batch-size", 10, "--epochs", 3, "--sync-bn", "--checkpoint-every", 1]
    options += ["--warmup-epochs", 1, "--lr", 0.5, "--eval-every", 0]
    assert train("still", 4, *options).wait() == [0] * 4
    for world_size, kill in ((4, {3: 5}), (2, {0: 9})):  # in the middle of an epoch
        assert -9 in train("moving", world_size, *options, "--resume", kill=kill).wait()
    last = train("moving", 3, *options, "--resume")
    assert last.wait() == [0] * 3
    assert (
        "4 images per process" not in last.output() and "1 to 2 images per process" in last.output()
    )

    still, moving = training_log(tmp_path / "still"), training_log(tmp_path / "moving")
    assert still.keys() == moving.keys() and len(still) == 12
    ranks = [len(moving[divmod(step, 4)]["pieces"]) for step in range(12)]
    assert ranks[0] == 4 and ranks[6] == 2 * 2 and ranks[11] == 3 * 2, (
        "micro-batches stay as small as they were"
    )
    for step in still:
        assert sorted(still[step]["targets"]) == sorted(moving[step]["targets"]), "the same images"
        assert still[step]["lr"] == moving[step]["lr"]
    for epoch in range(3):
        assert sorted(t for step in range(4) for t in moving[epoch, step]["targets"]) == list(
            range(40)
        )
    # Dropout differs from rank to rank, and batch norm over micro-batches from that over whole
    # ones.
    losses = torch.tensor(
        [[run[step]["loss"] / 10 for step in sorted(run)] for run in (still, moving)]
    )
    assert (losses[0] - losses[1]).abs().max() < 0.5, losses


def test_the_counts_of_an_epoch_go_on_where_a_killed_run_stopped(train, one_each, tmp_path):
    options = [one_each, "--batch-size", 10, "--epochs", 1, "--checkpoint-every", 1, "--keep", 2]
    options += ["--deterministic", "--eval-every", 0]
    assert train("whole", 2, *options).wait() == [0, 0]
    assert -9 in train("killed", 2, *options, kill={1: 2}).wait()
    assert train("killed", 2, *options, "--resume").wait() == [0, 0]
    whole, killed = (final(tmp_path / name)["totals"] for name in ("whole", "killed"))
    assert whole[3] == 40 and same(whole, killed)
    assert len(list((tmp_path / "whole/checkpoints").glob("step-*.pt"))) == 2, "--keep"


def test_a_resumed_run_takes_the_optimizer_flags_of_today(train, one_each, tmp_path):
    options = [one_each, "--batch-size", 20, "--eval-every", 0, "--epochs"]
    assert train("run", 1, *options, 1).wait() == [0]
    flags = ["--resume", "--momentum", 0.5, "--weight-decay", 0.03]
    ranks = train("run", 1, *options, 2, *flags)
    assert ranks.wait() == [0]
    changes = "--epochs 1 -> 2, --momentum 0.9 -> 0.5, --weight-decay 5e-05 -> 0.03"
    assert f"resuming with other flags: {changes}\n" in ranks.output()
    groups = final(tmp_path / "run")["optimizer"]["param_groups"]
    assert [(group["momentum"], group["weight_decay"]) for group in groups] == [
        (0.5, 0.03),
        (0.5, 0.0),
    ]


def keep_states(folder, rank):
    from imagenet import checkpoint

    def save(self, state, *args, original=checkpoint.Checkpoints.save, **options):
        torch.save(state, folder / f"state{rank}.pt")
        original(self, state, *args, **options)

    checkpoint.Checkpoints.save = save


@pytest.mark.parametrize("ema", [0, 0.9])
def test_all_ranks_save_the_same_state_with_averaged_buffers_too(train, one_each, tmp_path, ema):
    options = [one_each, "--batch-size", 10, "--epochs", 1, "--eval-every", 0, "--ema", ema]
    assert train("run", 2, *options, prepare=functools.partial(keep_states, tmp_path)).wait() == [
        0,
        0,
    ]
    one, other = (torch.load(tmp_path / f"state{rank}.pt", weights_only=True) for rank in range(2))
    assert any("running_mean" in name for name in one["model"]) and (one["ema"] is None) == (
        ema == 0
    )
    assert all(same(one[part], other[part]) for part in one)


def go_home(where, rank):
    """Pretend that a rank is on a machine of its own: in a folder of its own."""
    (where / f"host{rank}").mkdir(exist_ok=True)
    os.chdir(where / f"host{rank}")


def test_machines_without_a_shared_folder_each_keep_all(train, one_each, tmp_path):
    """Machines without a shared folder each keep all and the newest good one of any wins."""
    options = [one_each, "--batch-size", 20, *SMALL_06, "--checkpoints-path", "here"]
    options += ["--checkpoint-every", 1]
    home = functools.partial(go_home, tmp_path)
    assert Ranks(
        new_folder(tmp_path, "one"), 2, [*options, "--epochs", 1], nodes=2, prepare=home
    ).wait() == [0, 0]
    first, second = (tmp_path / f"host{rank}/here" for rank in (0, 1))
    files = ["best.pt", "step-00000001.pt", "step-00000002.pt"]
    assert (
        sorted(p.name for p in first.iterdir()) == sorted(p.name for p in second.iterdir()) == files
    )
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    shutil.rmtree(first)  # this machine is lost, and comes back empty
    (second / files[2]).write_bytes(b"")
    ranks = Ranks(
        new_folder(tmp_path, "two"), 2, [*options, "--epochs", 2, "--resume"], nodes=2, prepare=home
    )
    assert ranks.wait() == [0, 0], ranks.output()
    assert "resumed from here/step-00000001.pt, after step 1 of 4" in ranks.output()
    assert (
        "step-00000002.pt on " in ranks.output()
        and "it is empty; using here/step-00000001.pt" in ranks.output()
    )
    assert final_step(first) == final_step(second) == 4


def final_step(folder):
    return decode(read_file(max(folder.glob("step-*.pt"))))["step"]


def test_folders_side_by_side_on_one_disk_are_not_shared(one_each, tmp_path):
    """Folders side by side on one disk are not taken for a shared one."""
    flags = [one_each, "--batch-size", 20, "--epochs", 1, "--eval-every", 0, *SMALL_06]
    ranks = Ranks(
        new_folder(tmp_path, "run"),
        2,
        flags,
        nodes=2,
        prepare=functools.partial(name_a_folder, tmp_path),
    )
    assert ranks.wait() == [0, 0], ranks.output()
    assert all((tmp_path / f"of-rank{rank}/step-00000002.pt").exists() for rank in (0, 1))


def name_a_folder(where, rank):
    sys.argv += ["--checkpoints-path", str(where / f"of-rank{rank}")]


def test_machines_with_a_shared_folder_write_each_file_once(train, one_each, tmp_path):
    """Machines with a shared folder write each checkpoint once."""
    flags = ["--batch-size", 20, "--epochs", 1, "--checkpoint-every", 1, "--eval-every", 0]
    ranks = train("run", 2, one_each, *flags, nodes=2, prepare=count_writes)
    assert ranks.wait() == [0, 0]
    assert [ranks.output(rank).count("writing") for rank in (0, 1)] == [2, 0]


def count_writes(rank):
    from imagenet import checkpoint

    def write(path, state, original=checkpoint.write_file):
        print("writing", path, flush=True)
        original(path, state)

    checkpoint.write_file = write


def test_another_network_other_data_and_a_second_run_are_refused(train, one_each, tmp_path):
    """A resumed run of another network or other data is refused and so is a second run."""
    options = [one_each, "--batch-size", 20, "--epochs", 1, "--eval-every", 0]
    assert train("run", 1, *options).wait() == [0]
    other = write_images(tmp_path / "other", "train", (40, 44), CLASSES, 2, ".jpg").parent / "other"
    write_images(other, "val", (40, 44), CLASSES, 1, ".jpg")
    refused = {
        "holds checkpoints already: add --resume to continue from the newest": options,
        "--batch-size 10, but": [*options, "--resume", "--batch-size", 10],
        "--seed 3, but": [*options, "--resume", "--seed", 3],
        "80 training images, but": [other, *options[1:], "--resume"],
        "--ema 0.9, but": [*options, "--resume", "--ema", 0.9],
    }
    running = {message: train("run", 1, *flags) for message, flags in refused.items()}
    for message, ranks in running.items():
        assert ranks.wait() == [2] and message in ranks.output(), ranks.output()
    other = [*options, *SMALL_06, "--resume", "--arch", "resnet18"]
    other += ["--checkpoints-path", tmp_path / "run/checkpoints"]
    ranks = Ranks(new_folder(tmp_path, "arch"), 1, other)
    assert (
        ranks.wait() == [2]
        and "of a run with --arch mobilenet_v3_small: expected the same" in ranks.output()
    )
    ranks = train("run", 2, *options)
    assert ranks.wait() == [2, 2], "no rank waits for one that has refused"
    assert all("holds checkpoints already" in ranks.output(rank) for rank in range(2))


def test_a_resumed_run_cuts_batches_as_flags_say_or_as_before(
    capsys,
):
    """A resumed run cuts batches as the flags say or into micro batches as small as before."""
    args = parse_06("--dummy", 100, "--batch-size", 24, "--accumulate", 2, "--resume")
    flags = {name: str(value) for name, value in vars(args).items()}
    state = {"flags": flags, "images": 100, "world_size": 4, "accumulate": 2, "micro_batch": 3}

    def pieces(world_size, args=args, **changes):
        d = SimpleNamespace(world_size=world_size, is_main=True)
        check_same_run(args, d, None, 100, state | changes, "step-1.pt")
        return micro_batches(args, world_size, state | changes)

    assert pieces(4) == (2, 3)
    assert [pieces(n) for n in (2, 3, 8)] == [(4, 3), (3, 3), (1, 3)]
    del flags["clip_grad"], flags["seed"]  # as if these flags were newer than the checkpoint
    assert pieces(4) == (2, 3) and capsys.readouterr().out == ""
    other = parse_06("--dummy", 100, "--batch-size", 24, "--accumulate", 3, "--resume")
    assert pieces(4, other) == (3, 2) and pieces(2, other) == (3, 4)
    assert "resuming with other flags: --accumulate 2 -> 3" in capsys.readouterr().out
