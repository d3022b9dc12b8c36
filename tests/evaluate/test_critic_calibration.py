"""Predicted against realised discounted returns, for rewards whose return distribution is known in closed form."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tailguard.evaluate.critic_calibration import FEWEST_OUTCOMES, calibrate, discounted_sums, outcome_horizon
from tailguard.periods import Period

LEVELS = (np.arange(32) + 0.5) / 32
GAMMA, SIGMA = 0.8, 0.01
TIMES = pd.date_range("2000-01-01", periods=4000, freq="D")
# sum_k gamma^k r_k of independent N(0, sigma^2) is N(0, sigma^2 / (1 - gamma^2)).
TRUE_QUANTILES = stats.norm(0.0, SIGMA / np.sqrt(1.0 - GAMMA**2)).ppf(LEVELS)


@given(gamma=st.floats(0.0, 0.999))
def test_the_horizon_is_the_first_that_leaves_so_little(gamma):
    bars = outcome_horizon(gamma)
    assert gamma**bars <= 0.05 * (1 + 1e-9)
    assert bars == 1 or gamma ** (bars - 1) > 0.05 * (1 - 1e-9)


def test_known_horizons():
    assert (outcome_horizon(0.95), outcome_horizon(0.0), outcome_horizon(0.5), outcome_horizon(1.0)) == (59, 1, 5, None)


def test_discounted_sums_by_a_slow_loop():
    rewards = np.random.default_rng(0).normal(size=50)
    expected = [sum(0.9**k * rewards[t + k] for k in range(7)) for t in range(44)]
    np.testing.assert_allclose(discounted_sums(rewards, 0.9, 7), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="bars is 51"):
        discounted_sums(rewards, 0.9, 51)


def compared(scale=1.0, folds=(2500, 1500), predicted=TRUE_QUANTILES, seed=0):
    rewards = np.random.default_rng(seed).normal(0.0, SIGMA, sum(folds))
    quantiles = np.tile(predicted * scale, (sum(folds), 1))
    return rewards, calibrate(TIMES[: sum(folds)], rewards, quantiles, LEVELS, GAMMA, list(folds))


def test_a_right_distribution_passes():
    rewards, result = compared()
    bars = outcome_horizon(GAMMA)
    assert bars == 14
    assert len(result.outcomes) == 2500 // bars + 1500 // bars
    rows = [*range(0, 2500 - bars + 1, bars), *range(2500, 4000 - bars + 1, bars)]
    assert result.times.equals(TIMES[rows])
    np.testing.assert_allclose(result.outcomes, [GAMMA ** np.arange(bars) @ rewards[t : t + bars] for t in rows])
    assert result.uniformity.p_value > 0.01
    assert all(test.exact_p_value > 0.01 for test in result.coverage.values())
    assert all(test.p_value > 0.01 for test in result.shortfall.values())
    assert set(result.coverage) == set(result.shortfall) == {0.05, 0.1}
    np.testing.assert_allclose(result.realised, LEVELS, atol=0.08)


@pytest.mark.parametrize("period", ["21", "1M"])
def test_predictions_of_periods_are_compared_with_their_sums(period):
    """Independent rewards of sigma: the sum of n of them is N(0, n sigma^2). Months that a fold has cut are left out."""
    folds, rewards = (2500, 1500), np.random.default_rng(0).normal(0.0, SIGMA, 4000)
    starts = pd.Series(range(4000), TIMES).groupby([TIMES.to_period("M"), np.arange(4000) < 2500]).agg(["first", "last"])
    whole = [
        (a, b + 1) for a, b in starts.sort_values("first").to_numpy().tolist() if a not in (0, 2500) and b not in (2499, 3999)
    ]
    if period == "21":
        whole = [(k, k + 21) for first, n in ((0, 2500), (2500, 1500)) for k in range(first, first + n - 20, 21)]
    quantiles = np.tile(stats.norm(0.0, SIGMA * np.sqrt(21 if period == "21" else 30.4)).ppf(LEVELS), (4000, 1))
    result = calibrate(TIMES, rewards, quantiles, LEVELS, 0.3, list(folds), Period.parse(period))
    assert result.times.equals(TIMES[[first for first, _ in whole]])
    np.testing.assert_allclose(result.outcomes, [rewards[slice(*span)].sum() for span in whole])
    assert result.horizon in (21, 30, 31)
    assert result.uniformity.p_value > 0.01


def test_too_narrow_a_distribution_is_found_out():
    _, result = compared(scale=0.5)
    assert result.uniformity.p_value < 0.001
    assert result.coverage[0.05].exact_p_value < 0.001
    assert result.shortfall[0.05].p_value < 0.001
    assert result.shortfall[0.05].statistic < -1.0


def test_too_wide_a_distribution_is_found_out_by_its_transforms():
    _, result = compared(scale=2.0)
    assert result.uniformity.p_value < 0.001
    assert result.coverage[0.05].exceptions < result.coverage[0.05].expected


def test_a_distribution_without_losses_has_no_shortfall_to_test():
    _, result = compared(predicted=np.linspace(0.001, 0.002, 32))
    assert result.shortfall == {}
    assert set(result.coverage) == {0.05, 0.1}


def test_nothing_is_said_on_too_little():
    bars = outcome_horizon(GAMMA)
    enough = FEWEST_OUTCOMES * bars
    assert compared(folds=(enough,))[1] is not None
    assert compared(folds=(enough - 1,))[1] is None
    assert compared(folds=(bars - 1,))[1] is None
    rewards, quantiles = np.zeros(500), np.tile(TRUE_QUANTILES, (500, 1))
    assert calibrate(TIMES[:500], rewards, quantiles, LEVELS, 1.0, [500]) is None


def test_predictions_after_a_ruin_are_left_out():
    rewards = np.random.default_rng(0).normal(0.0, SIGMA, 1000)
    quantiles = np.tile(TRUE_QUANTILES, (1000, 1))
    quantiles[700:] = np.nan
    result = calibrate(TIMES[:1000], rewards, quantiles, LEVELS, GAMMA, [1000])
    assert len(result.outcomes) == 50  # rows 0, 14, ..., 686
    assert result.times[-1] == TIMES[686]


def test_folds_must_add_up():
    with pytest.raises(ValueError, match="fold_rows"):
        calibrate(TIMES[:100], np.zeros(100), np.tile(TRUE_QUANTILES, (100, 1)), LEVELS, GAMMA, [50, 49])
