"""Forecasts of variance against processes whose variance is known, and without a look at later bars."""

import numpy as np
import pandas as pd
import pytest
from tail_series import bars_from, regimes, walk

from tailguard.market import align_bars, random_walk
from tailguard.market.volatility import (
    FALL,
    FEWEST_BARS,
    RISE,
    SCALE_HORIZON,
    exposure_scale,
    first_guess,
    forecast_variance,
    horizon_grid,
    measure,
    nearest_on_grid,
)


def test_the_measured_variance_of_a_random_walk_is_its_own() -> None:
    moves = measure(random_walk(6000, volatility=0.02, overnight_share=0.3, seed=1))
    assert np.nanmean(moves.variance) == pytest.approx(0.02**2, rel=0.03)
    # The range is more precise than the squared return, whose variance is twice the square of its mean.
    assert np.nanvar(moves.variance) < 0.6 * np.var(moves.returns**2)


def test_forecasts_of_a_constant_variance_are_near_it() -> None:
    moves, grid = measure(walk(3)), horizon_grid(21)
    forecast = forecast_variance(moves, grid)[2000:, 0]
    np.testing.assert_allclose(forecast.mean(axis=0), 0.012**2, rtol=0.1)
    assert (forecast.std(axis=0) < 0.25 * 0.012**2).all()


def test_forecasts_follow_regimes_and_return_to_the_mean_over_long_horizons() -> None:
    rng = np.random.default_rng(0)
    volatility = np.where(np.arange(3000) // 100 % 2 == 0, 0.008, 0.024)
    forecast = forecast_variance(measure(bars_from(volatility, np.zeros(3000), np.zeros(3000), rng)), np.array([1, 64]))[:, 0]
    in_regime = (np.arange(3000) % 100 > 40) & (np.arange(3000) > 1000)
    calm, wild = (forecast[in_regime & (volatility == level)].mean(axis=0) for level in (0.008, 0.024))
    assert wild[0] > 6.0 * calm[0]
    assert wild[1] / calm[1] < 0.5 * wild[0] / calm[0]


def test_forecasts_use_the_past_only_and_skip_missing_bars() -> None:
    bars, grid = regimes(0, 900), horizon_grid(23)
    holes = bars.copy()
    holes.iloc[[300, 301, 550]] = np.nan
    whole = forecast_variance(measure(holes), grid)
    np.testing.assert_array_equal(forecast_variance(measure(holes.iloc[:700]), grid), whole[:700])
    assert np.isnan(whole[: FEWEST_BARS - 1]).all()
    assert np.isfinite(whole[FEWEST_BARS + 1 :]).all()
    np.testing.assert_array_equal(whole[301], whole[299])


def test_assets_are_forecast_one_by_one() -> None:
    first, second = walk(0, 400), regimes(0, 400)
    both = forecast_variance(measure(align_bars({"A": first, "B": second})), np.array([1, 4]))
    for column, alone in enumerate((first, second)):
        np.testing.assert_array_equal(both[:, column], forecast_variance(measure(alone), np.array([1, 4]))[:, 0])


@pytest.mark.parametrize("longest", [1, 2, 5, 21, 22, 23, 700])
def test_the_grid_is_the_same_whatever_is_the_longest_horizon(longest: int) -> None:
    grid, long_grid, horizons = horizon_grid(longest), horizon_grid(2000), np.arange(1, longest + 1)
    np.testing.assert_array_equal(grid[nearest_on_grid(horizons, grid)], long_grid[nearest_on_grid(horizons, long_grid)])
    assert (np.abs(np.log(grid[nearest_on_grid(horizons, grid)] / horizons)) < 0.25).all()
    np.testing.assert_allclose(first_guess(grid).sum(axis=1), 1.0)


def test_bars_that_do_not_move_have_a_variance_of_zero() -> None:
    still = pd.DataFrame(100.0, pd.bdate_range("2020-01-01", periods=200), ["open", "high", "low", "close", "volume"])
    np.testing.assert_array_equal(forecast_variance(measure(still), np.array([1, 4]))[FEWEST_BARS + 1 :], 0.0)


def test_exposure_is_scaled_down_where_volatility_exceeds_its_past_median() -> None:
    bars = align_bars({"A": regimes(0, 900), "B": walk(0, 900)})
    deviation = np.sqrt(forecast_variance(measure(bars), np.array([SCALE_HORIZON]))[:, :, 0])
    scale = exposure_scale(bars, 2.0)
    assert (scale[: FEWEST_BARS - 1] == 0.0).all()  # nothing is known yet
    for t in (200, 500, 899):
        exact = np.minimum(1.0, (np.nanmedian(deviation[: t + 1], axis=0) / deviation[t]) ** 2)
        assert (scale[t] >= exact / (1.0 + RISE) - 1e-12).all()
        assert (scale[t] <= exact / (1.0 - FALL) + 1e-12).all()
    assert (scale.max(axis=0) == 1.0).all()
    assert scale[:, 0].min() < 0.3
    moves = np.diff(scale[FEWEST_BARS:, 0])
    assert (moves == 0.0).mean() > 0.3  # small changes are not traded


def test_the_scale_of_exposure_uses_the_past_only() -> None:
    bars = regimes(0, 900)
    np.testing.assert_array_equal(exposure_scale(bars.iloc[:700], 2.0), exposure_scale(bars, 2.0)[:700])


def test_without_a_power_nothing_is_scaled() -> None:
    assert exposure_scale(walk(0, 300), 0.0) is None
    assert exposure_scale(walk(0, 300), None) is None
    still = pd.DataFrame(100.0, pd.bdate_range("2020-01-01", periods=200), ["open", "high", "low", "close", "volume"])
    np.testing.assert_array_equal(exposure_scale(still, 2.0)[FEWEST_BARS + 1 :], 1.0)
