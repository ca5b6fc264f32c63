"""Every collective has the timeout of its job, so a peer that stands still ends the run."""

import os
import signal
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from imagenet_runs import SMALL_06, parse_06, script
from ranks import Ranks

from common import distributed
from machine_checks import all_reduce, messages

TIMEOUT = timedelta(seconds=33)  # the default of no function


def timeout_of(group):
    """The timeout of the collectives of a process group of gloo."""
    return group._get_backend(torch.device("cpu")).options._timeout


class Reached(Exception):
    """The process groups exist now."""


def test_both_groups_of_06_have_the_timeout_that_setup_distributed_is_given(
    environment, monkeypatch
):
    timeouts = []

    def barrier(group, timeout):
        timeouts.append(timeout_of(dist.group.WORLD))
        timeouts.append(timeout_of(group))
        raise Reached

    environment()
    monkeypatch.setattr(dist, "monitored_barrier", barrier)  # what follows the groups
    with pytest.raises(Reached):
        script.main(parse_06("--dummy", 2, "--timeout", 33))
    assert timeouts == [TIMEOUT, TIMEOUT]


def test_the_group_of_preflight_ends_after_three_silences(monkeypatch):
    monkeypatch.setattr(messages, "SILENCE", 11)
    monkeypatch.setattr(all_reduce, "SIZES", (4096,))
    pulse = SimpleNamespace(at=lambda stage: None)
    all_reduce.measure(pulse, dist.HashStore(), 0, 1, torch.device("cpu"))
    assert timeout_of(dist.group.WORLD) == TIMEOUT


def stop_in_the_first_step(rank):
    distributed.TIMEOUT = timedelta(seconds=10)

    def forward(self, outputs, targets, original=torch.nn.CrossEntropyLoss.forward):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(self, outputs, targets)

    torch.nn.CrossEntropyLoss.forward = forward


def stop_in_the_evaluation(rank):
    """There, the ranks wait for each other in votes alone, which have a group of their own."""
    from imagenet import votes

    def cast(self, original=votes.Votes.cast, **wishes):
        if "save" not in wishes and rank == 1:  # in an evaluation there is nothing to save
            os.kill(os.getpid(), signal.SIGSTOP)
        original(self, **wishes)

    votes.MAX_COST = 1000  # so that every step has a vote
    votes.Votes.cast = cast


FLAGS_03 = ["--arch", "mnist_net", "--batch-size", 8, "--limit", 32, "--epochs", 1]
FLAGS_06 = [*SMALL_06, "--dummy", 24, "--batch-size", 12, "--epochs", 1, "--timeout", 10]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rung", "flags", "stop"),
    [
        ("03_mnmc_ddp_launch.py", FLAGS_03, stop_in_the_first_step),
        ("06_imagenet.py", FLAGS_06, stop_in_the_evaluation),
    ],
)
def test_a_peer_that_stops_ends_the_run(rung, flags, stop, tmp_path):
    if rung == "06_imagenet.py":
        flags = [*flags, "--checkpoints-path", tmp_path / "checkpoints"]
    ranks = Ranks(tmp_path, 2, flags, prepare=stop, script=rung)
    try:
        ranks.processes[0].join(120)  # gloo alone would wait for 30 minutes
        assert ranks.processes[0].exitcode == 1, ranks.output()
        assert ranks.processes[1].exitcode is None, "it stands still"
    finally:
        ranks.end()
    assert "lost another rank (" in ranks.output()
