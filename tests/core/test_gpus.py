"""What is different on GPUs, as far as a machine without one can test it."""

import os
import runpy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from imagenet_runs import parse_06
from launchers import srun, torchrun
from processes import ROOT
from torch import nn
from torch.optim.swa_utils import AveragedModel as TorchsAveragedModel
from torch.optim.swa_utils import get_ema_multi_avg_fn

from common import records
from common import setup_distributed as distributed
from common.errors import UserError
from common.syncbn import convert_sync_batchnorm
from imagenet.datasets import DummyImages
from imagenet.model import AveragedModel, build_model


def model_with_batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


def test_averaged_weights_are_those_of_torch_bit_for_bit():
    model = model_with_batch_norm()
    ours = AveragedModel(model, 0.9)
    torchs = TorchsAveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        ours.update(first=step == 0)
        torchs.update_parameters(model)
    ours.copy_counters()
    expected = torchs.module.state_dict()
    start = model_with_batch_norm().state_dict()
    for name, tensor in ours.module.state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, expected[name]), name
            assert not torch.equal(tensor, model.state_dict()[name]) and not torch.equal(
                tensor, start[name]
            )
        else:
            assert torch.equal(tensor, model.state_dict()[name]), name


class BatchNormAct(nn.BatchNorm2d):
    """A batch norm that also applies an activation, as timm's BatchNormAct2d does."""

    def forward(self, images):
        return super().forward(images).relu()


def test_a_batch_norm_that_does_more_is_not_replaced():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct(4))
    with pytest.raises(
        UserError, match="BatchNormAct may do more than batch norm; leave out --sync-bn"
    ):
        convert_sync_batchnorm(model)
    twice = convert_sync_batchnorm(convert_sync_batchnorm(nn.BatchNorm2d(4)))
    assert type(twice).__name__ == "SyncBatchNorm"


def test_deterministic_models_have_no_pool_that_is_not(monkeypatch):
    images = DummyImages(2, 64)

    def build(*flags):
        return build_model(parse_06("--dummy", 2, *flags), images)

    def refused(*flags):
        with pytest.raises(UserError, match=r"alexnet .*AdaptiveAvgPool2d.*(6, 6).* as resnet18"):
            build(*flags)
        return True

    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda _: None)  # 58 million, four times
    exact = ["--arch", "alexnet", "--image-size", 64, "--deterministic"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert build(*exact)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert refused(*exact)
    assert build(*exact[:-1]) and build(*exact, "--evaluate", "--weights", "x.pt")
    assert build("--arch", "resnet18", *exact[2:])


TORCHRUN = torchrun(3)
URL = "tcp://10.0.0.1:29500"
GIVEN = {"MASTER_ADDR": "ib1", "MASTER_PORT": "29501"}
# The last rank of two machines with two GPUs each, and where it finds rank 0
RANK_3 = [
    ("03_mnmc_ddp_launch.py", TORCHRUN, ["node0", "29500"]),
    ("04_mnmc_ddp_mp.py", {}, [None, None]),
    ("05_mnmc_ddp_slurm.py", srun(3), ["n01", "12007"]),
    ("05_mnmc_ddp_slurm.py", srun(3) | GIVEN, ["ib1", "29501"]),
    ("07_fsdp.py", TORCHRUN, ["node0", "29500"]),
    ("08_gpt.py", TORCHRUN, ["node0", "29500"]),
]


class Reached(Exception):
    """The process group would be joined now."""


@pytest.fixture
def joined(monkeypatch):
    """What init_process_group is given on a machine with GPUs."""
    given = {}

    def join(backend, **options):
        given.update(options, backend=backend)
        raise Reached

    def setup_device(local_rank, *_):
        return torch.device("cuda", local_rank)

    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(distributed, "setup_device", setup_device)
    return given


@pytest.mark.parametrize(("script", "variables", "address"), RANK_3)
def test_03_to_05_07_and_08_join_with_their_gpu_and_the_shared_timeout(
    script, variables, address, joined, environment, monkeypatch
):
    environment(**variables)
    monkeypatch.setattr(distributed, "TIMEOUT", 33)
    main = runpy.run_path(str(ROOT / script))["main"]
    args = SimpleNamespace(nproc_per_node=2, nodes=2, node_rank=1, dist_url=URL)
    with pytest.raises(Reached):
        main(*[1] * (script[:2] == "04"), args)
    assert joined["backend"] == "nccl" and joined["device_id"] == 1
    assert joined["timeout"] == 33
    assert [joined.get("rank", 3), joined.get("world_size", 4)] == [3, 4]
    assert [os.environ.get(name) for name in GIVEN] == address
    assert joined.get("init_method") == (URL if script[:2] == "04" else None)


def test_setup_distributed_joins_with_its_gpu_and_the_timeout(joined, environment):
    environment(**TORCHRUN)
    gpu = torch.device("cuda", 1)
    for backend, device in ((None, gpu), ("nccl", gpu), ("gloo", None)):
        with pytest.raises(Reached):
            distributed.setup_distributed(backend, timeout=33)
        assert joined["backend"] == (backend or "nccl") and joined["device_id"] == device
        assert joined["timeout"].total_seconds() == 33


DRIVERS = [
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs)\n",
]


def test_a_record_names_the_gpu_and_its_software(monkeypatch):
    if torch.version.cuda is None:
        pytest.skip("this torch was built without CUDA")
    device = torch.device("cuda", 1)
    properties = SimpleNamespace(name="NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_properties", {device: properties}.get)
    assert records.device_name(device) == "NVIDIA X"
    monkeypatch.setattr(records.Path, "exists", lambda _: True)
    for text in DRIVERS:
        monkeypatch.setattr(records.Path, "read_text", lambda _, text=text: text)
        fields = records.gpu_software(device)
        assert fields["driver"] == "550.54.15"
    assert fields["cuda"] == torch.version.cuda
    assert fields["nccl"].count(".") == 2 and fields["nccl_class"] is None
    assert fields["tf32_matmul"] is False and fields["tf32_conv"] is True, "the defaults of torch"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert records.gpu_software(device)["tf32_matmul"] is True
