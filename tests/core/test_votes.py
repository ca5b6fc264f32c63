"""Votes: all ranks learn the wish of one rank at the same step, however seldom they vote."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import context

from common.machine import free_port
from common.setup_distributed import cleaned_up
from imagenet import votes as votes_module
from imagenet.votes import Votes

STEPS = 200
SAVE_AT = 33
STOP_AT = 97


@cleaned_up()
def each_rank(rank, port, folder):
    """Save what a rank hears in each step: (stop, save, every)."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    votes = Votes(dist.group.WORLD)
    heard = []
    votes.seconds = 0.001
    for step in range(STEPS):
        votes.cast(rank == 1 and step == STOP_AT, rank == 0 and step == SAVE_AT)
        time.sleep(0.004 if rank else 0.002)
        heard.append((*votes.count(), votes.every))
    torch.save(heard, f"{folder}/{rank}.pt")


def test_all_ranks_hear_a_wish_once_at_the_same_step(tmp_path):
    options = {"nprocs": 2, "start_method": context.get_start_method()}
    torch.multiprocessing.start_processes(each_rank, (free_port(), tmp_path), **options)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second
    stops = [step for step, (stop, _, _) in enumerate(first) if stop]
    saves = [step for step, (_, save, _) in enumerate(first) if save]
    longest = max(every for _, _, every in first)
    assert len(stops) == len(saves) == 1
    assert STOP_AT <= stops[0] <= STOP_AT + longest and SAVE_AT <= saves[0] <= SAVE_AT + longest
    assert 1 < longest <= 50  # a step takes 0.004 s or more


@pytest.fixture
def votes(alone):
    return Votes(alone)


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
def test_a_vote_costs_a_hundredth_of_a_step(votes, monkeypatch, vote, step, every):
    """A vote costs a hundredth of a step unless a wish would wait too long."""
    now = [0.0]
    monkeypatch.setattr(votes_module.time, "perf_counter", lambda: now[0])
    votes.seconds = vote
    for k in range(1 + 2 * every):
        votes.cast(False)
        assert (votes.work is not None) == (k == 0 or k % every == 1 % every)
        assert votes.count() == (False, False)
        now[0] += step
    assert votes.every == every


def test_a_wish_after_an_evaluation_is_heard_at_once(votes, monkeypatch):
    """Its steps are short, so votes are seldom. 12 steps of training may take a minute."""
    now = [0.0]
    monkeypatch.setattr(votes_module.time, "perf_counter", lambda: now[0])
    votes.seconds = 0.004
    for _ in range(20):
        votes.cast(False)
        votes.count()
        now[0] += 0.032
    assert votes.every == 13
    votes.restart()
    votes.cast(stop=True)
    assert votes.count() == (True, False)
