"""Our synchronised batch norm against PyTorch's BatchNorm2d, which sees the images of all ranks as
one batch.
"""

import re

import pytest
import torch
import torch.distributed as dist
from ranks import context
from torch import nn

from common.machine import free_port
from common.setup_distributed import cleaned_up
from common.syncbn import SyncBatchNorm, convert_sync_batchnorm

CHANNELS = 6

# name: images of each rank, shape of one, settings of the batch norm
CASES = {
    "even": ([4, 4, 4], (5, 5), {}),
    "uneven": ([2, 7, 1], (5, 5), {}),
    "batches of one image": ([1, 1, 1], (), {}),
    "vectors": ([3, 2, 5], (), {}),
    "sequences": ([3, 2, 5], (9,), {}),
    "volumes": ([2, 1, 3], (3, 4, 5), {}),
    "without weights": ([2, 7, 1], (5, 5), {"affine": False}),
    "without momentum": ([2, 7, 1], (5, 5), {"momentum": None}),
    "without running statistics": ([2, 7, 1], (5, 5), {"track_running_stats": False}),
    "large epsilon, other momentum": ([2, 7, 1], (5, 5), {"eps": 0.1, "momentum": 0.7}),
    "a mean far from zero": ([4, 4, 4], (5, 5), {}),
}
KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}


def batches(case):
    """The images of each rank, and what the gradient of its outputs is to be."""
    counts, shape, _ = CASES[case]
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(n, CHANNELS, *shape, generator=generator) * 3 + 2 for n in counts]
    if case.startswith("a mean"):
        images = [part + 1000 for part in images]
    return images, [torch.randn(part.shape, generator=generator) for part in images]


def norm_for(case):
    kind = KINDS[1 + len(CASES[case][1])]
    torch.manual_seed(2)
    norm = kind(CHANNELS, **CASES[case][2])
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2)
    return norm


def train_and_test(norm, images, gradients):
    """Two training steps and a test: outputs, gradients, then the state that is left.

    The images of the second step are others, or its statistics would be those of the first.
    """
    told = []
    for _ in range(2):
        images = (images.detach() / 2 + 1).requires_grad_()
        outputs = norm(images)
        norm.zero_grad()
        outputs.backward(gradients)
        told += [outputs.detach(), images.grad, *(p.grad.clone() for p in norm.parameters())]
    if norm.track_running_stats:
        told.append(norm.eval()(images).detach())
    return told, norm.state_dict()


@cleaned_up()
def each_rank(rank, world_size, port, folder):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    torch.set_num_threads(1)
    told = {}
    for case in CASES:
        images, gradients = batches(case)
        norm = convert_sync_batchnorm(nn.Sequential(norm_for(case)))[0]
        assert type(norm) is SyncBatchNorm
        told[case] = train_and_test(norm, images[rank], gradients[rank])
    double = convert_sync_batchnorm(nn.BatchNorm2d(CHANNELS).double())(
        torch.ones(2, CHANNELS, 3, 3).double()
    )
    assert double.dtype == torch.float64
    half = convert_sync_batchnorm(nn.BatchNorm2d(CHANNELS))(
        torch.ones(2, CHANNELS, 3, 3, dtype=torch.bfloat16)
    )
    assert half.dtype == torch.bfloat16
    torch.save(told, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def synced(tmp_path_factory):
    """What each of three ranks was told."""
    folder = tmp_path_factory.mktemp("sync_bn")
    options = {"nprocs": 3, "start_method": context.get_start_method()}
    torch.multiprocessing.start_processes(each_rank, (3, free_port(), folder), **options)
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


def test_sync_bn_is_batch_norm_over_the_images_of_all_ranks(synced):
    for case, (_, _, settings) in CASES.items():
        print(case)  # for the report of a failure
        images, gradients = batches(case)
        expected, state = train_and_test(norm_for(case), torch.cat(images), torch.cat(gradients))
        weights = 0 if settings.get("affine") is False else 2
        # Where the mean is large or the images are three, differences of them are less exact.
        atol = {"a mean far from zero": 1e-3, "batches of one image": 1e-4}.get(case, 1e-5)
        for k, want in enumerate(expected):
            is_weight = weights and k < 2 * (2 + weights) and k % (2 + weights) >= 2
            parts = [synced[rank][case][0][k] for rank in range(3)]
            # A weight's gradient is each rank's share: DistributedDataParallel adds them up.
            found = sum(parts) if is_weight else torch.cat(parts)
            torch.testing.assert_close(found, want, rtol=1e-5, atol=atol)
        for rank in range(3):
            found = synced[rank][case][1]
            torch.testing.assert_close(found, state, rtol=1e-5, atol=1e-5)


def test_conversion_keeps_all_but_the_kind_of_batch_norm():
    """Weights, statistics and settings stay, and so does all that is no batch norm."""
    net = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 1),
        nn.Sequential(norm_for("even"), nn.ReLU()),
        norm_for("without momentum"),
    )
    net[1].eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    converted = convert_sync_batchnorm(net)
    assert [type(m).__name__ for m in converted.modules()][1:] == [
        "Conv2d",
        "Sequential",
        "SyncBatchNorm",
        "ReLU",
        "SyncBatchNorm",
    ]
    assert converted[2].momentum is None and not converted[1][0].training and converted[2].training
    assert before.keys() == converted.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in converted.state_dict().items())


def test_a_shape_without_channels_is_named():
    norm = SyncBatchNorm(2).eval()
    with pytest.raises(ValueError, match=re.escape("expected (N, C) or (N, C, ...), got (2,)")):
        norm(torch.ones(2))


def test_one_value_over_all_ranks_is_refused_as_batch_norm_does(alone):
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        SyncBatchNorm(CHANNELS)(torch.ones(1, CHANNELS))
