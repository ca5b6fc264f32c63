"""The planning formulas of goodput against simulated failures, and at their limits."""

import statistics

import pytest

from tools.book.goodput import daly_interval, goodput, job_mtbf, simulate, young_interval

HOUR = 3600
CASES = [  # mean time between failures, checkpoint, restart
    (100 * HOUR, 30, 300),
    (3 * HOUR, 60, 600),
    (HOUR, 120, 300),
    (600, 60, 60),
]


@pytest.mark.parametrize("case", CASES)
def test_the_formula_predicts_what_simulated_failures_leave(case):
    interval = daly_interval(*case[:2])
    simulated = [simulate(interval, *case, work=300 * case[0], seed=seed) for seed in range(20)]
    spread = statistics.stdev(simulated) / len(simulated) ** 0.5
    assert goodput(interval, *case) == pytest.approx(statistics.mean(simulated), abs=4 * spread)


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


def test_a_job_that_never_fails_loses_its_checkpoints_only():
    assert goodput(1000, 1e12, 10, 300) == pytest.approx(1000 / 1010)
    assert simulate(1000, 1e12, 10, 300, work=10_000, seed=0) == pytest.approx(1000 / 1010)


def test_a_checkpoint_longer_than_machines_live_is_no_plan():
    """A checkpoint that takes longer than machines live is no plan."""
    assert daly_interval(100, 300) == 100
    assert goodput(100, 100, 300, 0) < 0.02
