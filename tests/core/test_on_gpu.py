"""What only a GPU can show. make gpu runs these tests, and nothing here needs more than pytest,
psutil and requirements.txt.
"""

import collections
import functools
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from imagenet_runs import final, same
from needs import needs_gpu, needs_gpus
from one_device import check_two_ranks_on_one_device, share_device
from rungs import QUICK
from test_sync_bn import batches, norm_for, train_and_test
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.machine import free_port
from common.setup_distributed import cleaned_up
from common.syncbn import SyncBatchNorm, convert_sync_batchnorm
from imagenet.flags import can_compile


@needs_gpu
def test_a_gpu_is_used_where_there_is_one(run, small_folder):
    end = run("01_snsc.py", *QUICK, small_folder, "--epochs", 1)
    assert end.code == 0 and "device: cuda" in end.out and "on the GPU" in end.out


@needs_gpus
def test_dataparallel_splits_batches_over_the_gpus(run, small_folder):
    gpus = torch.cuda.device_count()
    end = run("02_snmc_dp.py", *QUICK, small_folder)
    assert end.code == 0 and f"DataParallel over {gpus} GPUs" in end.out


@needs_gpu
def test_synchronized_batch_norm_agrees_with_pytorchs_own():
    torch.multiprocessing.spawn(compare_batch_norms, (2, free_port()), nprocs=2)


@cleaned_up()
def compare_batch_norms(rank, world_size, port):
    # Two processes may share one GPU with gloo, which PyTorch's own takes too.
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    for case in ("even", "uneven", "without weights", "without momentum"):
        images, gradients = (parts[rank].cuda() for parts in batches(case))
        norm = norm_for(case)
        ours = SyncBatchNorm.like(norm).cuda()
        theirs = convert_sync_batchnorm(norm.cuda())
        assert type(theirs) is nn.SyncBatchNorm
        (told, state), (want, wanted) = (
            train_and_test(n, images, gradients) for n in (ours, theirs)
        )
        torch.testing.assert_close((told, state), (want, wanted), rtol=1e-4, atol=1e-4)


@needs_gpu
def test_06_trains_in_fp16_and_resumes(train, one_each):
    flags = [one_each, "--batch-size", 20, "--amp", "fp16", "--channels-last", "--ema", 0.9]
    flags += ["--accumulate", 2]
    assert train("run", 1, *flags, "--epochs", 1).wait() == [0]
    ranks = train("run", 1, *flags, "--epochs", 2, "--resume", "--workers", 2)
    assert ranks.wait() == [0], ranks.output()
    assert "device: cuda:0" in ranks.output() and "after step 2 of 4" in ranks.output()


def share_device_without_tf32(rank):
    """TF32, with which a GPU computes convolutions, would differ from a CPU by more than it
    should.
    """
    share_device(rank)
    torch.backends.cudnn.allow_tf32 = False


@needs_gpu
@pytest.mark.parametrize("flags", [[], ["--compile"], ["--channels-last"]])
def test_two_ranks_on_one_gpu_learn_the_same_as_on_cpus(train, one_each, flags):
    if "--compile" in flags and not can_compile():
        pytest.skip("no C compiler")
    on_cpu = functools.partial(train, env={"CUDA_VISIBLE_DEVICES": ""})
    on_gpu = functools.partial(train, prepare=share_device_without_tf32)
    check_two_ranks_on_one_device(on_cpu, on_gpu, "cuda:0", one_each, *flags)


RESNET = ["--arch", "resnet18", "--image-size", 64]


@needs_gpu
@pytest.mark.parametrize("flags", [[], ["--amp", "bf16", "--channels-last"]])
def test_a_killed_06_ends_with_the_same_bits(train, one_each, tmp_path, flags):
    options = [one_each, *RESNET, "--epochs", 3, "--batch-size", 8, "--checkpoint-every", 2]
    options += ["--deterministic", "--ema", 0.9, *flags]
    assert train("whole", 1, *options).wait() == [0]
    assert train("killed", 1, *options, kill={0: 8}).wait() == [-9]
    resumed = train("killed", 1, *options, "--resume")
    assert resumed.wait() == [0], resumed.output()
    assert "resumed from" in resumed.output()
    whole, killed = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert whole["step"] == killed["step"] == 15
    for part in ("model", "ema", "optimizer", "scaler", "totals"):
        assert same(whole[part], killed[part]), part


@needs_gpu
@pytest.mark.parametrize("before", [[], ["--amp", "none"]])
def test_fp16_has_no_nan_from_the_first_step_on(train, before):
    """The scale of the loss begins so high that the first steps overflow; also in a run that trains
    without mixed precision before.
    """
    flags = ["--dummy", 640, *RESNET, "--batch-size", 32, "--eval-every", 0]
    if before:
        assert train("run", 1, *flags, *before, "--epochs", 1).wait() == [0]
    ranks = train("run", 1, *flags, "--amp", "fp16", "--epochs", 2, "--resume")
    assert ranks.wait() == [0], ranks.output()
    losses = [float(loss) for loss in re.findall(r"== step: .* loss: ([a-z0-9.]+)", ranks.output())]
    assert len(losses) == (20 if before else 40)
    assert all(map(math.isfinite, losses))


STEPS = 40
PRINTED = 4  # lines, each of which waits


def record_waits(file, rank):
    """Let torch warn of each operation that waits for the GPU, and record by line the training
    steps that wait. Moving the model, or saving it, waits often and in no step or one.

    The log of a rank, in helpers/ranks.py, reads the loss of each step, which waits too.
    """
    steps = collections.defaultdict(set)
    done = 0

    def count_step(*_):
        nonlocal done
        done += 1

    def record(message, category, filename, line, *_):
        if "synchroniz" in str(message) and Path(filename).name != "ranks.py":
            steps[f"{filename}:{line}"].add(done)
            lines = [f"{len(waiting)} {place}" for place, waiting in steps.items()]
            file.write_text("\n".join(lines))

    register_optimizer_step_post_hook(count_step)
    warnings.simplefilter("always")
    warnings.showwarning = record
    torch.cuda.set_sync_debug_mode("warn")


@needs_gpu
@pytest.mark.parametrize("flags", [[], ["--ema", 0.9, "--clip-grad", 1], ["--amp", "fp16"]])
def test_no_line_of_06_waits_for_the_gpu_in_each_step(train, tmp_path, flags):
    file = tmp_path / "waits"
    flags = ["--dummy", 16 * STEPS, *RESNET, "--batch-size", 16, "--epochs", 1, *flags]
    flags += ["--print-every", STEPS // PRINTED]
    ranks = train("run", 1, *flags, prepare=functools.partial(record_waits, file))
    assert ranks.wait() == [0], ranks.output()
    waits = file.read_text().splitlines()  # the printed lines wait
    often = [line for line in waits if int(line.split()[0]) >= STEPS // 2]
    assert not often, f"waits in so many of {STEPS} steps: {often}"
