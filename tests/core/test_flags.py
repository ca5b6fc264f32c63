"""Flags that fit no other file of tests: each changes the result as its help promises."""

import itertools
import json
import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from imagenet_runs import final
from rungs import parse

from ddp.flags import parse_ddp_args, parse_spawn_args
from fsdp.flags import parse_fsdp_args

# 01 to 05


def test_04_starts_two_processes_or_one_per_gpu(run, gpus, monkeypatch):
    started = []

    def spawn(function, args, nprocs):
        started.append((nprocs, args[0].nproc_per_node))
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", args[0].dist_url)

    monkeypatch.setattr("torch.multiprocessing.spawn", spawn)
    for count in (0, 4):
        gpus(count)
        assert run("04_mnmc_ddp_mp.py").code == 0
    assert started == [(2, 2), (4, 4)]


# 06


def with_a_clock_of_its_own(rank):
    """Let a second pass with each look of the checkpoints at the clock. Every step has a vote."""
    from imagenet import checkpoint, votes

    seconds = itertools.count()
    checkpoint.time = SimpleNamespace(monotonic=lambda: next(seconds))
    votes.MAX_COST = 1000


def test_06_prints_evaluates_and_saves_as_often_as_it_is_told(train, tmp_path):
    options = ["--dummy", 20, "--batch-size", 4, "--image-size", 16, "--arch", "mnist_net"]
    options += ["--keep", 20]
    by_steps = [*options, "--epochs", 3, "--print-every", 2, "--eval-every", 2]
    by_steps += ["--checkpoint-every", 4]
    by_seconds = [*options, "--epochs", 2, "--eval-every", 0, "--checkpoint-every", "3s"]
    steps = train("steps", 1, *by_steps)
    seconds = train("seconds", 1, *by_seconds, prepare=with_a_clock_of_its_own)
    assert steps.wait() == seconds.wait() == [0], steps.output() + seconds.output()
    printed = re.findall(r"== step: \[ +(\d)/5\] \[(\d)/3\]", steps.output())
    assert printed == [(step, epoch) for epoch in "123" for step in "245"]
    assert re.findall(r"== test: \[(\d)/3\]", steps.output()) == ["2", "3"], "the last epoch too"
    assert saved_steps(tmp_path / "steps") == [4, 5, 8, 10, 12, 15], "the end of an epoch too"
    assert "== test" not in seconds.output()
    # A look at the clock in each step, and one more to set it: 3 s are over in steps 3, 6 and 9.
    assert saved_steps(tmp_path / "seconds") == [3, 5, 6, 9, 10]


def saved_steps(folder):
    """The steps of the checkpoints in a folder."""
    paths = (folder / "checkpoints").glob("step-*.pt")
    return sorted(int(path.stem.removeprefix("step-")) for path in paths)


def tell_how_it_computes(rank):
    from imagenet import model

    def build(args, dataset, original=model.build_model):
        built = original(args, dataset)
        built.register_forward_hook(hook)
        return built

    def hook(module, inputs, outputs):
        (images,) = inputs
        weights = next(weight for weight in module.parameters() if weight.ndim == 4)
        layout = torch.channels_last
        formats = [tensor.is_contiguous(memory_format=layout) for tensor in (images, weights)]
        types = [str(tensor.dtype) for tensor in (images, weights, outputs)]
        exact = [torch.are_deterministic_algorithms_enabled(), not torch.backends.cudnn.benchmark]
        found = {"training": module.training, "types": types, "formats": formats, "exact": exact}
        print("computes", json.dumps(found), flush=True)

    model.build_model = build


def test_06_computes_as_its_flags_say(train):
    """On a CPU --deterministic has torch refuse what is not. A GPU has kernels to choose from."""
    options = ["--dummy", 8, "--batch-size", 4, "--epochs", 1]
    plain = train("plain", 1, *options, prepare=tell_how_it_computes)
    options += ["--amp", "bf16", "--channels-last", "--deterministic"]
    other = train("other", 1, *options, prepare=tell_how_it_computes)
    for ranks, chosen, dtype in ((plain, False, "torch.float32"), (other, True, "torch.bfloat16")):
        assert ranks.wait() == [0], ranks.output()
        found = re.findall(r"^computes (.*)$", ranks.output(), re.M)
        computed = [json.loads(line) for line in found]
        assert [line["training"] for line in computed] == [True, True, False]
        for line in computed:
            assert line["types"] == ["torch.float32", "torch.float32", dtype]
            assert line["formats"] == [chosen, chosen] and line["exact"] == [chosen, chosen]
        assert ("amp bf16, seed 0, channels last, deterministic" in ranks.output()) == chosen


def test_06_sync_bn_normalizes_over_the_images_of_all_ranks(train, tmp_path):
    """One training step of 24 images, on one rank and on two, that changes no weight."""
    options = ["--dummy", 24, "--batch-size", 24, "--epochs", 1, "--eval-every", 0]
    options += ["--arch", "small_net", "--lr", 1e-30, "--warmup-epochs", 0]
    one = train("one", 1, *options)
    synced = train("synced", 2, *options, "--sync-bn")
    assert one.wait() == [0] and synced.wait() == [0, 0], synced.output()
    expected, found = (final(tmp_path / name)["model"] for name in ("one", "synced"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def stop_rank_1_in_the_second_step(rank):
    def backward(self, *given, original=torch.Tensor.backward, **options):
        if rank == 1 and next(steps) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(self, *given, **options)

    steps = itertools.count()
    torch.Tensor.backward = backward


def test_06_waits_for_a_missing_rank_until_its_timeout(train):
    options = ["--dummy", 24, "--batch-size", 12, "--epochs", 9, "--eval-every", 0]
    options += ["--arch", "mnist_net", "--timeout", 2]
    ranks = train("run", 2, *options, prepare=stop_rank_1_in_the_second_step)
    ranks.processes[0].join(60)
    assert ranks.processes[0].exitcode == 1, ranks.output()
    # gloo names the time only if this rank waited in a call when it was over
    assert re.search(r"error: lost another rank \(.*(2000ms|timeout)", ranks.output())


# All scripts


@pytest.mark.parametrize(
    ("parse_args", "variable", "flags"),
    [
        (parse_ddp_args, "WORLD_SIZE", []),
        (parse_ddp_args, "SLURM_STEP_NUM_TASKS", []),
        (parse_fsdp_args, "WORLD_SIZE", []),
        (parse_spawn_args, None, ["--nodes", "3", "--nproc-per-node"]),
    ],
)
def test_a_batch_that_the_processes_cannot_share_is_refused(
    parse_args, variable, flags, monkeypatch, capsys
):
    """Three parts of the default of 256 are not equal, and batch norm needs two images."""
    for processes, batch, others in ((3, 256, "255 or 258"), (6, 10, "12 or 18")):
        if variable:
            monkeypatch.setenv(variable, str(processes))
        given = [*flags, str(processes // 3)] if flags else []
        given += ["--batch-size", str(batch)] if batch != 256 else []
        monkeypatch.setattr(sys, "argv", ["train.py", *given])
        with pytest.raises(SystemExit) as end:
            parse_args("")
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == 2
        assert (
            f"--batch-size {batch} for {processes} processes: "
            f"expected a multiple of {processes}, such as {others}"
        ) in line


def test_an_underline_in_a_flag_is_a_hyphen(monkeypatch):
    args = parse(monkeypatch, "01_snsc.py", "--batch_size", 6, "--data_dir=my_data")
    assert (args.batch_size, args.data_dir) == (6, "my_data"), "values stay as they are"
    assert parse(monkeypatch, "06_imagenet.py", "--dummy", 8, "--print_every=3").print_every == 3
