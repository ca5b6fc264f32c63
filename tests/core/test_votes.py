"""Votes: all ranks learn the wish of one rank at the same step, however seldom they vote."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import context

from common.distributed import cleaned_up, free_port
from imagenet import votes as votes_module
from imagenet.votes import Votes

STEPS = 200
SAVE_AT = 33
STOP_AT = 97


def hear_wishes(rank):
    """What a rank hears in each step: (stop, save, every)."""
    votes = Votes(dist.group.WORLD)
    heard = []
    votes.seconds = 0.001
    for step in range(STEPS):
        votes.cast(rank == 1 and step == STOP_AT, rank == 0 and step == SAVE_AT)
        time.sleep(0.004 if rank else 0.002)
        heard.append((*votes.count(), votes.every))
    return heard


def vote_beside_a_slow_rank(rank):
    """How long a vote takes, and `every` after each step.

    A vote takes 0.1 s on rank 0 and 0.3 s on rank 1. A step takes 0.2 s and 0.4 s.
    """
    every = []
    now = 0.0
    votes_module.time.perf_counter = lambda: now
    original = dist.all_reduce

    def all_reduce(*args, **options):
        nonlocal now
        now += (0.1, 0.3)[rank]
        return original(*args, **options)

    dist.all_reduce = all_reduce
    votes = Votes(dist.group.WORLD)
    dist.all_reduce = original
    seconds = votes.seconds
    votes.seconds = 0.0579  # a hundredth of 15 steps of 0.4 s, of 29 of 0.2 s, or of 10 of 0.6 s
    for _ in range(40):
        votes.cast(False)
        votes.count()
        every.append(votes.every)
        now += (0.2, 0.4)[rank]
    return seconds, every


@cleaned_up()
def each_rank(rank, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.save((hear_wishes(rank), vote_beside_a_slow_rank(rank)), f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each_rank() saved on both ranks."""
    folder = tmp_path_factory.mktemp("votes")
    options = {"nprocs": 2, "start_method": context.get_start_method()}
    torch.multiprocessing.start_processes(each_rank, (free_port(), folder), **options)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_all_ranks_hear_a_wish_once_at_the_same_step(two_ranks):
    (first, _), (second, _) = two_ranks
    assert first == second
    stops = [step for step, (stop, _, _) in enumerate(first) if stop]
    saves = [step for step, (_, save, _) in enumerate(first) if save]
    longest = max(every for _, _, every in first)
    assert len(stops) == len(saves) == 1
    assert STOP_AT <= stops[0] <= STOP_AT + longest and SAVE_AT <= saves[0] <= SAVE_AT + longest
    assert 1 < longest <= 50  # a step takes 0.004 s or more


def test_the_slowest_rank_decides_how_often_all_vote(two_ranks):
    (_, first), (_, second) = two_ranks
    assert first == second
    seconds, every = first
    assert seconds == pytest.approx(0.3)
    assert every == [1] + 39 * [15]


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
