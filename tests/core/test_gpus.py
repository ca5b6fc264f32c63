"""What is different on GPUs, as far as a machine without one can test it."""

import copy
import os
import runpy
import sys
from pathlib import Path
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

from common import distributed, records
from common.errors import UserError, lost_peer
from common.syncbn import convert_sync_batchnorm
from imagenet import flags
from imagenet.checks import check_batches
from imagenet.datasets import DummyImages
from imagenet.loader import build_loader
from imagenet.model import AveragedModel, build_model
from imagenet.sampler import GlobalBatchSampler

# After the death of a peer, from the two implementations of NCCL in torch
LOST = [
    "NCCL error in: /pytorch/NCCLUtils.cpp:94, remote process exited or there was a network error, "
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.",
    "NCCL operation failed\nNCCL Last Error: socketProgress: Connection closed by remote peer host",
]


@pytest.mark.parametrize("text", LOST)
def test_the_loss_of_a_peer_is_one_line_in_both_kinds_of_nccl(text):
    message = lost_peer(RuntimeError(text))
    assert message.startswith("lost another rank (") and "\n" not in message
    assert "its own message, or its launcher's, says why" in message


def test_an_error_of_ours_in_cuda_is_not_a_lost_peer():
    of_cuda = "CUDA error: an illegal memory access was encountered"
    of_nccl = "NCCL error in: x.cpp:1, invalid usage, ncclInvalidUsage: Duplicate GPU"
    assert lost_peer(RuntimeError(of_cuda)) is None
    assert lost_peer(RuntimeError(of_nccl)) is None


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


def test_a_checkpoint_without_a_scaler_continues_as_fp16():
    """Such as one of --amp none or bf16: GradScaler.load_state_dict({}) raises an error."""
    run_class = runpy.run_path(str(ROOT / "06_imagenet.py"))["Run"]
    run = object.__new__(run_class)
    model = nn.Linear(2, 2)
    run.d = SimpleNamespace(is_main=False, device=torch.device("cpu"))
    run.ema = None
    run.model = model
    run.optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=False)
    run.scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1, fused=True)
    state = {
        "step": 3,
        "best": None,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    run.load_state_dict(state | {"scaler": {}}, "a checkpoint")
    assert run.steps_done == 3 and run.scaler.get_scale() == 2**16
    assert run.optimizer.param_groups[0]["fused"] is False, (
        "the checkpoint of a machine with GPUs may say True"
    )
    run.load_state_dict(
        state | {"scaler": run.scaler.state_dict() | {"scale": 8.0}}, "a checkpoint"
    )
    assert run.scaler.get_scale() == 8


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


# this machine may have fewer cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_loader_workers_leave_two_cores_to_a_process_with_a_gpu(monkeypatch, tmp_path):
    batches = GlobalBatchSampler(4, 2, 0, 1)
    monkeypatch.setattr("imagenet.loader.cores_per_process", lambda processes: 16 // processes)
    images = copy.copy(DummyImages(4, 16))
    images.__class__ = type("Images", (DummyImages,), {})
    monkeypatch.setattr("imagenet.loader.isinstance", lambda value, kind: False, raising=False)

    def workers(device, processes):
        return build_loader(images, batches, None, torch.device(device), processes).num_workers

    assert workers("cpu", 2) == 8
    assert workers("cuda", 2) == 6
    assert workers("cuda", 16) == 1
    assert build_loader(images, batches, 1, torch.device("cpu")).persistent_workers


def test_a_gpu_that_emulates_bf16_is_named(monkeypatch, capsys):
    d = SimpleNamespace(device=torch.device("cuda", 0), is_main=True, world_size=1)
    args = parse_06("--dummy", 2, "--amp", "bf16", "--batch-size", 4)
    hint = "--amp bf16: this GPU emulates bf16, which is slow; --amp fp16 is faster"
    for supported in (True, False):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda supported=supported, **_: supported
        )
        check_batches(args, d, nn.Linear(2, 2), GlobalBatchSampler(8, 4, 0, 1))
        assert (hint in capsys.readouterr().out) == (not supported)


def test_compiling_needs_the_compiler_that_is_named_or_any(monkeypatch):
    def can_compile(*installed, on_a_gpu=False):
        monkeypatch.setattr(flags.shutil, "which", lambda name: name in installed)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: on_a_gpu)
        return flags.can_compile()

    monkeypatch.setattr(flags.os.path, "exists", lambda _: True)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    assert can_compile("g++", "clang++")
    assert not can_compile("gcc") or sys.platform == "darwin"
    assert can_compile("gcc", on_a_gpu=True)
    monkeypatch.setenv("CXX", "mine")
    assert can_compile("mine")
    assert not can_compile("g++", "clang++")


TORCHRUN = torchrun(3)
URL = "tcp://10.0.0.1:29500"
# Of a job of four machines; its step has two.
JOB = {"SLURM_NODELIST": "n[1-4]", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": 4}
JOB |= {"SLURM_NPROCS": 16, "SLURM_NTASKS": 16, "SLURM_TASKS_PER_NODE": "4(x4)"}
GIVEN = {"MASTER_ADDR": "ib1", "MASTER_PORT": "29501"}
# The last rank of two machines with two GPUs each, and where it finds rank 0
RANK_3 = [
    ("03_mnmc_ddp_launch.py", TORCHRUN, ["node0", "29500"]),
    ("04_mnmc_ddp_mp.py", {}, [None, None]),
    ("05_mnmc_ddp_slurm.py", srun(3) | JOB, ["n01", "12007"]),
    ("05_mnmc_ddp_slurm.py", srun(3) | GIVEN, ["ib1", "29501"]),
    ("07_fsdp.py", TORCHRUN, ["node0", "29500"]),
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
def test_03_to_05_and_07_join_with_their_gpu_and_the_shared_timeout(
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


def test_setup_distributed_binds_the_process_group_to_its_gpu(joined, environment):
    environment(**TORCHRUN)
    gpu = torch.device("cuda", 1)
    for backend, device in ((None, gpu), ("nccl", gpu), ("gloo", None)):
        with pytest.raises(Reached):
            distributed.setup_distributed(backend)
        assert joined["backend"] == (backend or "nccl") and joined["device_id"] == device


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
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    world = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda _: Path()))
    monkeypatch.setattr(dist, "group", world)
    fields = records.gpu_software(device)
    assert fields["tf32_matmul"] is True and fields["nccl_class"] == type(Path()).__name__
