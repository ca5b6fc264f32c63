"""Votes: all ranks learn the wish of one rank at the same step, however seldom they vote."""

import time

import pytest
import torch
import torch.distributed as dist

from common.distributed import cleaned_up, free_port
from imagenet import elastic
from imagenet.elastic import Votes

STEPS, SAVE_AT, STOP_AT = 200, 33, 97


@cleaned_up()
def each_rank(rank, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    votes, heard = Votes(dist.group.WORLD), []
    votes.seconds = 0.001
    for step in range(STEPS):
        votes.cast(rank == 1 and step == STOP_AT, rank == 0 and step == SAVE_AT)
        time.sleep(0.004 if rank else 0.002)
        heard.append((*votes.count(), votes.every))
    torch.save(heard, f"{folder}/{rank}.pt")


def test_all_ranks_hear_a_wish_once_at_the_same_step(tmp_path):
    torch.multiprocessing.spawn(each_rank, (free_port(), tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second
    stops = [step for step, (stop, _, _) in enumerate(first) if stop]
    saves = [step for step, (_, save, _) in enumerate(first) if save]
    longest = max(every for _, _, every in first)
    assert len(stops) == len(saves) == 1
    assert STOP_AT <= stops[0] <= STOP_AT + longest and SAVE_AT <= saves[0] <= SAVE_AT + longest
    assert 1 < longest <= 50  # a step takes 0.004 s or more


@pytest.fixture
def votes():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Votes(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("vote", "step", "every"),
    [
        (0.08, 0.2, 40),  # 1,000 ranks with 40 microseconds per message: after 40 steps, or 8 s
        (0.08, 20, 1),
        (0.0001, 0.2, 1),
        (0.0001, 0.004, 3),
        (1.0, 0.25, 32),  # a wish is heard within 8 s, whatever a vote costs
        (1.0, 30, 1),
    ],
)
def test_a_vote_costs_a_hundredth_of_a_step_unless_a_wish_would_wait_too_long(votes, monkeypatch, vote, step, every):
    now = [0.0]
    monkeypatch.setattr(elastic.time, "perf_counter", lambda: now[0])
    votes.seconds = vote
    for k in range(1 + 2 * every):
        votes.cast(False)
        assert (votes.work is not None) == (k == 0 or k % every == 1 % every)
        assert votes.count() == (False, False)
        now[0] += step
    assert votes.every == every


def test_a_vote_is_timed_before_training(votes):
    assert 0 < votes.seconds < 60
