"""Runs on the same bars: the best of many without skill is not called better, the one with skill is."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from evaluation_examples import example_evaluation

from tailguard.evaluate import statistics
from tailguard.evaluate.comparison import compare_runs

TIMES = pd.bdate_range("2015-01-01", periods=1000)


@pytest.fixture(scope="module")
def example():
    return example_evaluation(bars=1000, seeds=1, full=False)


def record(example, returns, times=TIMES, trials=1):
    """A record whose agent earned these returns and whose market did not move with them."""
    n = len(returns)
    moves = np.random.default_rng(99).normal(0.0, 0.01, 2000)[:n]
    empty = dict.fromkeys(("turnover", "costs", "riskless"), np.zeros(n))
    histories = [
        replace(history, times=times[:n], returns=column, weights=np.zeros((n, 1)), **empty)
        for history, column in ((example.agent, returns), (example.baselines[0], moves))
    ]
    prices = pd.DataFrame({"a": 1.0}, index=times[:n])
    provenance = replace(example.provenance, trials=trials)
    return replace(example, agent=histories[0], seeds=[], baselines=histories[1:], prices=prices, provenance=provenance)


def noise(seed, sharpe=0.0, n=1000):
    """Returns with exactly this annual Sharpe ratio."""
    values = np.random.default_rng(seed).normal(0.0, 0.01, n)
    values = (values - values.mean()) / values.std(ddof=1)
    return 0.01 * (values + sharpe / np.sqrt(252))


def test_skill_among_noise_is_found_and_ranked_first(example):
    runs = [record(example, noise(seed)) for seed in range(4)] + [record(example, noise(9, sharpe=4.0))]
    found = compare_runs(runs, ["a", "b", "c", "d", "skilled"], draws=500)
    first = found.ranking[0]
    assert (first.name, first.best, first.low_rank, first.high_rank) == ("skilled", 1.0, 1, 1)
    assert [run.name for run in found.ranking if run.beats_market] == ["skilled"]
    assert found.superior.p_value < 0.01
    assert found.superior.best == "skilled"
    assert found.deflated > 0.99
    assert found.pbo < 0.1
    assert (found.bars, found.different, found.trials) == (1000, 5, 5)
    assert len(found.differences) == 10
    assert all(one == "skilled" for one, _, _ in found.differences[:4])
    assert first.sharpe.estimate == pytest.approx(4.0 * np.sqrt(example.periods_per_year / 252), rel=1e-9)


def test_the_best_of_noise_is_no_better_and_the_ranking_says_how_little_it_knows(example):
    runs = [record(example, noise(seed, sharpe=0.1 * seed)) for seed in range(6)]
    found = compare_runs(runs, list("abcdef"), draws=500)
    assert [run.name for run in found.ranking] == list("fedcba")
    assert not any(run.beats_market for run in found.ranking)
    assert found.superior.p_value > 0.05
    assert found.deflated < 0.95
    assert found.pbo > 0.1
    assert sum(run.best for run in found.ranking) == pytest.approx(1.0)
    assert found.ranking[0].high_rank >= 4
    by_pair = {(one, two): lead for one, two, lead in found.differences}
    assert by_pair["f", "a"].estimate == pytest.approx(0.5, rel=1e-6)
    assert by_pair["f", "a"].low < 0.0 < by_pair["f", "a"].high


def test_the_same_run_twice_is_one_run_and_leverage_is_no_lead(example):
    one = noise(1, sharpe=1.0)
    runs = [record(example, one), record(example, 0.5 * one, trials=7), record(example, noise(2))]
    found = compare_runs(runs, ["one", "half", "other"], draws=200)
    assert found.different == 2
    assert found.trials == 7
    lead = next(lead for a, b, lead in found.differences if {a, b} == {"one", "half"})
    assert abs(lead.estimate) < 1e-9
    assert statistics.sharpe(one, 252) == pytest.approx(1.0)


def test_only_the_bars_that_all_share_count(example):
    late = pd.bdate_range("2016-01-01", periods=1000)
    found = compare_runs([record(example, noise(1)), record(example, noise(2), late)], ["a", "b"], draws=100)
    assert (found.first, found.last) == (late[0], TIMES[-1])
    assert found.bars == TIMES.isin(late).sum()
    longer = replace(record(example, noise(2)), periods_per_year=12.0)  # on the same dates, as the ends of months are
    assert compare_runs([record(example, noise(1)), longer], ["a", "b"]) is None
    never = pd.bdate_range("2030-01-01", periods=1000)
    assert compare_runs([record(example, noise(1)), record(example, noise(2), never)], ["a", "b"]) is None


def test_an_idle_run_can_be_compared(example):
    found = compare_runs([record(example, np.zeros(1000)), record(example, noise(2, sharpe=-1.0))], ["idle", "b"], draws=100)
    assert found.ranking[0].name == "idle"
    assert found.deflated is None
    assert found.different == 2
