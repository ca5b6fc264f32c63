"""The planning formulas of goodput against simulated failures, and at their limits."""

import statistics

import pytest

from tools.book.goodput import (
    daly_interval,
    goodput,
    gpu_lifetimes,
    job_mtbf,
    simulate,
    young_interval,
)

HOUR = 3600
CASES = [  # mean time between failures, checkpoint, restart
    (100 * HOUR, 30, 300),
    (3 * HOUR, 60, 600),
    (HOUR, 120, 300),
    (600, 60, 60),
]


@pytest.mark.parametrize("write", [0, 150])
@pytest.mark.parametrize("case", CASES)
def test_the_formula_predicts_what_simulated_failures_leave(case, write):
    interval = daly_interval(*case[:2])
    simulated = [
        simulate(interval, *case, work=300 * case[0], seed=seed, write=write) for seed in range(20)
    ]
    spread = statistics.stdev(simulated) / len(simulated) ** 0.5
    predicted = goodput(interval, *case, write)
    assert predicted == pytest.approx(statistics.mean(simulated), abs=4 * spread)


def test_a_failure_loses_a_checkpoint_that_is_still_written(monkeypatch):
    """By hand: failures at 250 and, after a restart of 10 s, never again; intervals of 100 s."""
    times = [250, 1e9]
    monkeypatch.setattr("random.Random.expovariate", lambda self, rate: times.pop(0))
    assert simulate(100, 1e3, 0, 10, work=300, seed=0) == pytest.approx(300 / (250 + 10 + 100))
    times[:] = [250, 1e9]
    with_writing = simulate(100, 1e3, 0, 10, work=300, seed=0, write=60)
    assert with_writing == pytest.approx(300 / (250 + 10 + 200 + 60)), "the second is not safe"


@pytest.mark.parametrize("case", CASES)
def test_no_interval_is_much_better_than_the_recommended_one(case):
    """No other interval is much better than the recommended one."""
    best = max(goodput(case[0] * k / 1000, *case) for k in range(1, 3000))
    assert goodput(daly_interval(*case[:2]), *case) > best - 0.002
    assert goodput(4 * daly_interval(*case[:2]), *case) < best - 0.01 or case[0] > 50 * HOUR


def test_more_machines_fail_more_often_and_want_more_checkpoints():
    one, many = job_mtbf(1000 * HOUR, 1), job_mtbf(1000 * HOUR, 500)
    assert many == 2 * HOUR
    assert young_interval(many, 30) < young_interval(one, 30)
    assert goodput(HOUR, many, 30, 300) < goodput(HOUR, one, 30, 300)


def test_published_failure_rates_differ_by_a_factor():
    """419 interruptions in 54 days on 2,048 machines; 6.50 and 2.34 per 1,000 machine days."""
    days = {name: seconds / 8 / 24 / HOUR for name, seconds in gpu_lifetimes().items()}
    assert days == pytest.approx(
        {"Llama 3": 54 * 2048 / 419, "RSC-1": 1000 / 6.5, "RSC-2": 1000 / 2.34}
    )


def test_a_job_that_never_fails_loses_its_checkpoints_only():
    assert goodput(1000, 1e12, 10, 300) == pytest.approx(1000 / 1010)
    assert simulate(1000, 1e12, 10, 300, work=10_000, seed=0) == pytest.approx(1000 / 1010)


def test_a_checkpoint_longer_than_machines_live_is_no_plan():
    """A checkpoint that takes longer than machines live is no plan."""
    assert daly_interval(100, 300) == 100
    assert goodput(100, 100, 300, 0) < 0.02
    assert goodput(100, 0.001, 300, 0) == 0, "not an overflow"
