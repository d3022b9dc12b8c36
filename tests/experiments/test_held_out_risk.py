"""A risk-averse objective on held-out bars, against closed forms and by brute force."""

import numpy as np
import pandas as pd
import pytest

from tailguard.experiments.held_out_risk import MISSED, HeldOutRisk, held_out_risk
from tailguard.ppo.config import RiskConfig

BARS = 5


def scored(objective="cvar", **settings):
    return HeldOutRisk(RiskConfig(objective=objective, alpha=0.1, period=BARS, **settings), BARS)


def worst_tenth(sums):
    return np.sort(sums)[: len(sums) // 10].mean()


def test_samples_are_the_sums_of_every_window():
    returns = np.arange(12.0)
    np.testing.assert_allclose(scored().sums(returns), [returns[k : k + BARS].sum() for k in range(8)])


def test_the_objective_is_what_it_says():
    sums = np.random.default_rng(0).normal(0.01, 0.05, 1000)
    tail = worst_tenth(sums)
    assert scored().value(sums) == pytest.approx(tail)
    assert scored("mean_cvar", weight=0.3).value(sums) == pytest.approx(0.7 * sums.mean() + 0.3 * tail)
    assert scored("constrained", limit=tail - 0.01).value(sums) == pytest.approx(sums.mean())
    assert scored("constrained", limit=tail + 0.01).value(sums) == pytest.approx(sums.mean() - MISSED * 0.01)


def test_a_lead_is_as_sure_as_the_number_of_periods_allows():
    """Independent periods of one bar: the t-statistic of a difference of means, for an objective that is nearly the mean."""
    rng = np.random.default_rng(1)
    one, other = rng.normal(0.02, 0.1, 4000), rng.normal(0.0, 0.1, 4000)
    risk = HeldOutRisk(RiskConfig(objective="mean_cvar", weight=0.0, period=1), 1)
    difference = one - other
    assert risk.lead(one, other) == pytest.approx(difference.mean() / difference.std() * 4000**0.5)
    assert HeldOutRisk(risk.risk, 4).lead(one, other) == pytest.approx(risk.lead(one, other) / 2.0)  # a quarter of the periods
    assert risk.lead(one, one) == 0.0


def test_only_the_shape_of_an_account_is_compared():
    risk, sums = scored(), np.random.default_rng(2).normal(size=300)
    half, whole = (risk.account(size * sums, np.full((300, 1), size)) for size in (0.5, 1.0))
    np.testing.assert_allclose(half.sums, whole.sums)
    limited = scored("constrained", limit=0.0)  # a limit is in units of the account
    np.testing.assert_allclose(limited.account(0.5 * sums, np.full((300, 1), 0.5)).sums, 0.5 * sums)


def test_cash_comes_last_whatever_the_others_lose():
    risk, rng = scored(), np.random.default_rng(6)
    sums = rng.normal(-0.02, 0.05, 300)
    cash, invested = risk.account(1e-6 * sums, np.full((300, 1), 1e-6)), risk.account(sums, np.ones((300, 1)))
    assert (cash.idle, invested.idle) == (True, False)
    assert risk.value(cash.sums) > risk.value(invested.sums)  # which is why it must not be compared by its objective
    assert risk.lead_at_equal_exposure(invested, cash) == np.inf
    assert risk.lead_at_equal_exposure(cash, invested) == -np.inf
    assert risk.lead_at_equal_exposure(cash, cash) == 0.0
    # To be in cash may be the only way to keep a limit.
    assert not scored("constrained", limit=-0.01).account(1e-6 * sums, np.full((300, 1), 1e-6)).idle


@pytest.mark.parametrize(("mean", "exposure"), [(0.0005, 0.0), (0.02, 1.0)], ids=["an ordinary market", "Sharpe 4 a period"])
def test_the_constant_exposure_with_the_best_tail_is_none_or_all(mean, exposure):
    """The CVaR of normal returns is above 0 only if the Sharpe ratio of a period is above 1.75 at 10 %."""
    returns = np.random.default_rng(3).normal(mean, 0.01, 4000)
    assert scored().best_exposure(returns, 1.0) == exposure


@pytest.mark.parametrize("weight", [0.1, 0.4, 1.0])
def test_cash_is_best_below_the_sharpe_ratio_that_an_objective_asks_for(weight):
    """Normal returns of periods of one bar, standardised, so that their Sharpe ratio is known: the sign of the objective."""
    risk = HeldOutRisk(RiskConfig(objective="mean_cvar", weight=weight, alpha=0.05, period=1), 1)
    least = risk.least_sharpe(252.0) / 252.0**0.5
    draws = np.random.default_rng(5).normal(size=200_000)
    draws = (draws - draws.mean()) / draws.std()
    assert risk.value(draws + 0.97 * least) < 0.0 < risk.value(draws + 1.03 * least)
    monthly = HeldOutRisk(risk.risk, 21)
    assert monthly.least_sharpe(252.0) == pytest.approx(least * 12.0**0.5)
    assert monthly.words.endswith("at equal mean exposure")


def test_a_limit_is_used_up_by_the_constant_exposure():
    returns = np.random.default_rng(4).normal(0.001, 0.01, 4000)
    risk = scored("constrained", limit=-0.02)
    exposure = risk.best_exposure(returns, 2.0)
    tails = [worst_tenth(risk.sums(np.log1p(size * returns))) for size in (exposure, exposure + 0.1)]
    assert tails[0] >= -0.02 > tails[1]


def test_months_are_scored_over_as_many_bars_as_they_have():
    times = pd.bdate_range("2010-01-01", periods=1000, tz="UTC")
    assert held_out_risk(RiskConfig(objective="cvar", period="1M"), times, 200).bars in (21, 22)
    assert held_out_risk(RiskConfig(objective="cvar"), times, 200) is None
    assert held_out_risk(RiskConfig(objective="neutral", period="1M"), times, 200) is None
    with pytest.raises(ValueError, match="half of a held-out block"):
        held_out_risk(RiskConfig(objective="cvar", period="1Q"), times, 100)
