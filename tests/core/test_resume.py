"""How 06 resumes: the same bits, on other numbers of ranks, from the newest good checkpoint."""

import functools
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from imagenet_runs import SMALL_06, final, new_folder, parse_06, same
from ranks import Ranks, training_log

from imagenet.checkpoint_file import decode, read_file, write_file
from imagenet.checks import check_same_run
from imagenet.sampler import micro_batches
from imagenet.signals import EXIT_REQUEUE


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
    assert "4 images per process" not in last.output()
    assert "1 to 2 images per process" in last.output()

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


def keep_states(folder, rank):
    from imagenet import checkpoint

    def save(self, state, *args, original=checkpoint.Checkpoints.save, **options):
        torch.save(state, folder / f"state{rank}.pt")
        original(self, state, *args, **options)

    checkpoint.Checkpoints.save = save


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_run_ends_with_the_bits_of_one_that_never_was(
    train, one_each, tmp_path, world_size
):
    """And all ranks save the same, the batch norm of the averaged weights too. The sums of three
    ranks, unlike those of two, depend on the order.
    """
    options = [one_each, "--epochs", 1, "--batch-size", 16, "--accumulate", 2, "--ema", 0.9]
    options += ["--amp", "bf16", "--checkpoint-every", 1, "--keep", 2, "--deterministic"]
    options += ["--lr", 0.5]
    prepare = functools.partial(keep_states, tmp_path)
    ranks = train("whole", world_size, *options, prepare=prepare)
    assert ranks.wait() == [0] * world_size, ranks.output()
    one, other = (torch.load(tmp_path / f"state{rank}.pt", weights_only=True) for rank in range(2))
    assert any("running_mean" in name for name in one["ema"])
    assert all(same(one[part], other[part]) for part in one)
    codes = train("killed", world_size, *options, kill={1: 2}).wait()
    assert codes[1] == -9 and 0 not in codes
    last = train("killed", world_size, *options, "--resume")
    assert last.wait() == [0] * world_size, last.output()
    whole, killed = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert whole["step"] == killed["step"] == 3
    for part in ("model", "ema", "optimizer", "scaler", "best"):
        assert same(whole[part], killed[part]), part
    torch.testing.assert_close(whole["totals"], killed["totals"])
    seen = training_log(tmp_path / "killed")
    images = [target for step in range(3) for target in seen[0, step]["targets"]]
    assert sorted(images) == list(range(40)), "each image of an epoch once"
    assert len(list((tmp_path / "whole/checkpoints").glob("step-*.pt"))) == 2, "--keep"


def test_a_resumed_run_takes_the_optimizer_flags_of_today(run_06, tmp_path):
    assert run_06().code == 0
    end = run_06("--resume", "--epochs", 2, "--momentum", 0.5, "--weight-decay", 0.03)
    assert end.code == 0
    changes = "--epochs 1 -> 2, --warmup-epochs 0.05 -> 0.1, "
    changes += "--momentum 0.9 -> 0.5, --weight-decay 5e-05 -> 0.03"
    assert f"resuming with other flags: {changes}\n" in end.out
    groups = final(tmp_path)["optimizer"]["param_groups"]
    assert [(group["momentum"], group["weight_decay"]) for group in groups] == [
        (0.5, 0.03),
        (0.5, 0.0),
    ]


def test_a_resumed_run_remembers_its_best_accuracy(run_06, tmp_path):
    assert run_06("--eval-every", 1).code == 0
    last, best = (tmp_path / "checkpoints" / name for name in ("step-00000001.pt", "best.pt"))
    write_file(str(last), decode(read_file(last)) | {"best": 100.0})
    before = best.read_bytes()
    assert run_06("--eval-every", 1, "--epochs", 2, "--resume").code == 0
    assert final(tmp_path)["best"] == 100 and best.read_bytes() == before


def test_a_run_of_another_model_or_other_data_is_refused_by_name(run_06):
    assert run_06().code == 0
    for flag, before, now in (
        ("--arch", "mnist_net", "small_net"),
        ("--batch-size", "4", "2"),
        ("--image-size", "16", "32"),
        ("--seed", "0", "1"),
        ("--ema", "0", "0.5"),
        ("--freeze", "''", "0"),
    ):
        end = run_06("--resume", flag, now)
        (line,) = end.err.splitlines()
        assert end.code == 2 and line.startswith(f"06_imagenet.py: error: {flag} {now}, but ")
        assert f"step-00000001.pt is of a run with {flag} {before}: expected the same" in line
    end = run_06("--resume", "--dummy", 5)
    (line,) = end.err.splitlines()
    assert end.code == 2 and "error: 5 training images, but" in line and "with 4: expected" in line


@pytest.mark.parametrize("name", ["step-00000001.pt", "best.pt"])
def test_a_second_run_in_the_folder_of_another_is_refused(train, one_each, tmp_path, name):
    """On all ranks: none waits for one that has refused."""
    folder = new_folder(new_folder(tmp_path, "run"), "checkpoints")
    (folder / name).touch()
    ranks = train("run", 2, one_each, "--batch-size", 20, "--epochs", 1)
    assert ranks.wait() == [2, 2], ranks.output()
    for rank in range(2):
        assert "holds checkpoints already: add --resume to continue from" in ranks.output(rank)
    assert os.listdir(folder) == [name]


def test_a_run_of_which_only_the_best_is_left_is_not_overwritten(run_06, tmp_path):
    """Neither with --resume: the message names the command with which it continues."""
    assert run_06("--eval-every", 1).code == 0
    newest, best = (tmp_path / "checkpoints" / name for name in ("step-00000001.pt", "best.pt"))
    newest.unlink()
    before = best.read_bytes()
    end = run_06("--resume", "--epochs", 2)
    command = re.search(r"to continue from best\.pt, (cp \S+ \S+), or", end.err)[1]
    assert end.code == 2 and best.read_bytes() == before
    subprocess.run(command.split(), check=True)
    end = run_06("--resume", "--epochs", 2)
    assert end.code == 0 and "step-00000000.pt, after step 1 of 2" in end.out


def go_home(where, rank):
    """Pretend that a rank is on a machine of its own: in a folder of its own."""
    (where / f"host{rank}").mkdir(exist_ok=True)
    os.chdir(where / f"host{rank}")


def test_generated_images_leave_nothing_behind(tmp_path):
    """So the same command works again. A warm-up for two epochs is shorter than these."""
    flags = [*SMALL_06, "--dummy", 8, "--batch-size", 4, "--epochs", 2]

    def train(*more):
        folder = tmp_path / f"run{len(more)}"
        folder.mkdir(exist_ok=True)
        home = functools.partial(go_home, tmp_path)
        ranks = Ranks(folder, 2, [*flags, *more], prepare=home)
        if "1000" in more:
            ranks.wait_for(r"== step: \[ *2/2\] \[2/")
            ranks.signal(1, "SIGUSR1")
        return ranks.wait(), ranks.output()

    for _ in range(2):
        codes, output = train()
        assert codes == [0, 0], output
        assert "--dummy: no checkpoints are kept" in output and "--warmup-epochs" not in output
        rates = [float(lr) for lr in re.findall(r"\| lr (\S+)", output)]
        assert max(rates) > 0.8 * 0.1 * 4 / 256, "a peak of --lr 0.1 for 256 images"
    codes, output = train("--epochs", "1000")
    assert set(codes) == {EXIT_REQUEUE}, output
    assert re.search("stopped by a signal .*: (nothing is saved|the same command eval)", output)
    assert not any((tmp_path / "host0").iterdir())
    assert train("--resume")[0] == [0, 0]
    assert (tmp_path / "host0/checkpoints/best.pt").exists()


def test_machines_without_a_shared_folder_each_keep_all(train, one_each, tmp_path):
    """And the newest good one of any machine wins."""
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
    totals = decode(read_file(first / "step-00000002.pt"))["totals"]
    assert totals[3] == 40, "rank 0 alone adds those of the checkpoint, though both have read it"


def final_step(folder):
    return decode(read_file(max(folder.glob("step-*.pt"))))["step"]


def test_a_resumed_run_cuts_batches_as_flags_say_or_as_before(capsys):
    """Into micro-batches as small as before, unless --accumulate has changed."""
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
