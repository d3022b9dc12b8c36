"""Relevance of features: the returns that follow a decision, robust t-statistics, and the weights that come of them."""

import math
from typing import get_args

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest
from sklearn.linear_model import Ridge

from tailguard.market import align_bars, random_walk, simulate
from tailguard.market.planted import planted_market
from tailguard.market.relevance import (
    FLOOR,
    OUTLIER,
    PENALTY,
    calibrated,
    fill_returns,
    held_out_forecast,
    relevance_weights,
    t_of_products,
    t_statistics,
    volatility_scaled,
)
from tailguard.market.rules import Fill
from tailguard.market.volatility import forecast_variance, measure

every_fill = pytest.mark.parametrize("fill", get_args(Fill))


def bars_of(opens: list[float], closes: list[float]) -> pd.DataFrame:
    index = pd.date_range("2020-01-01", periods=len(opens), freq="1D", unit="ns", name="time")
    prices = np.array([opens, closes])
    columns = {"open": opens, "high": prices.max(0), "low": prices.min(0), "close": closes, "volume": 1.0}
    return pd.DataFrame(columns, index=index)


def sample(n: int = 400, columns: int = 6, slope: float = 0.1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Predictors, and a return that leans on the first; its volatility grows with the size of the second."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, columns))
    noise = rng.uniform(-1.0, 1.0, n) * (1.0 + np.abs(values[:, 1]))
    return values, 0.02 + slope * values[:, 0] + noise


def statistics_of(values: np.ndarray, earned: np.ndarray) -> np.ndarray:
    """The t-statistics of columns ``[n, F]`` with the returns ``[n]`` of one asset."""
    return t_statistics(values[None], earned[:, None])


def lm_statistic(products: np.ndarray) -> float:
    """n R^2 of a regression of 1 on products of predictor and return: the robust LM (Davidson and MacKinnon 1985)."""
    return len(products) * float(sm.OLS(np.ones(len(products)), products).fit().rsquared)


# What a decision earns.


@pytest.mark.parametrize(
    ("fill", "expected"),
    [
        ("close", [math.log(12 / 10), math.log(15 / 12), math.log(6 / 15), math.nan]),
        ("next_open", [math.log(14 / 11), math.log(7 / 14), math.nan, math.nan]),
        ("next_close", [math.log(15 / 12), math.log(6 / 15), math.nan, math.nan]),
    ],
)
def test_a_decision_earns_from_its_fill_to_the_next_one(fill: Fill, expected: list[float]) -> None:
    earned = fill_returns(bars_of([9, 11, 14, 7], [10, 12, 15, 6]), fill)
    assert earned[:, 0] == pytest.approx(expected, abs=1e-15, nan_ok=True)


@every_fill
def test_earned_returns_are_those_of_an_account_that_holds_for_one_decision(fill: Fill) -> None:
    bars = random_walk(12, seed=3)
    earned = fill_returns(bars, fill)[:, 0]
    for row in range(10):
        targets = np.zeros(12)
        targets[row] = 1.0
        equity = simulate(bars, targets, fee=0.0, fill=fill).equity
        assert math.log(equity[-1]) == pytest.approx(earned[row], abs=1e-12)


@every_fill
def test_returns_of_missing_bars_are_unknown_and_those_of_other_assets_are_not(fill: Fill) -> None:
    whole, other = random_walk(8, seed=1), random_walk(8, seed=2)
    earned = fill_returns(align_bars({"holey": whole.drop(whole.index[4]), "other": other}), fill)
    alone = np.stack([fill_returns(table, fill)[:, 0] for table in (whole, other)], axis=1)
    delay = 0 if fill == "close" else 1
    unknown = [3 - delay, 4 - delay]  # those that end or begin at the missing bar
    assert np.isnan(earned[unknown, 0]).all()
    alone[unknown, 0] = np.nan
    assert np.array_equal(earned, alone, equal_nan=True)


@every_fill
@pytest.mark.parametrize("n_bars", [1, 2])
def test_a_handful_of_bars_says_nothing_of_the_last_decisions(fill: Fill, n_bars: int) -> None:
    earned = fill_returns(random_walk(n_bars, seed=0), fill)
    assert earned.shape == (n_bars, 1)
    assert np.isfinite(earned).sum() == (n_bars - 1 if fill == "close" else 0)


# The statistic.


def test_its_square_is_the_robust_lm_statistic_of_statsmodels() -> None:
    values, earned = sample()
    assert np.abs(earned - earned.mean()).max() < OUTLIER * earned.std()  # nothing is cut
    for column, statistic in zip(values.T, statistics_of(values, earned), strict=True):
        products = (column - column.mean()) * (earned - earned.mean())
        assert statistic**2 == pytest.approx(lm_statistic(products), rel=1e-10)
        assert np.sign(statistic) == np.sign(products.sum())


def test_weak_predictors_have_the_robust_t_values_of_statsmodels() -> None:
    """White's t-values; they take the residuals, and under the null these are the returns."""
    values, earned = sample(n=20_000, slope=0.01)
    for column, statistic in zip(values.T, statistics_of(values, earned), strict=True):
        regression = sm.OLS(earned, sm.add_constant(column)).fit(cov_type="HC0")
        assert statistic == pytest.approx(regression.tvalues[1], abs=0.02)


def test_columns_that_come_with_volatility_are_not_taken_for_predictors() -> None:
    """Where the volatility grows with the predictor, the usual t-value is beyond 1.96 three times as often as it should be."""
    rng = np.random.default_rng(0)
    robust, usual, trials, n = 0, 0, 1500, 300
    for _ in range(trials):
        column = rng.standard_normal(n)
        earned = rng.standard_normal(n) * np.abs(column)
        robust += int(abs(statistics_of(column[:, None], earned)[0]) > 1.96)
        usual += int(abs(np.corrcoef(column, earned)[0, 1]) * math.sqrt(n) > 1.96)
    assert binomtest(robust, trials, 0.05).pvalue > 0.001
    assert usual > 3 * 0.05 * trials


def test_a_return_beyond_four_standard_deviations_counts_as_four() -> None:
    values, earned = sample()
    earned[7] = -30.0
    limit = OUTLIER * earned.std()
    cut = np.maximum(earned - earned.mean(), -limit)
    assert (cut != earned - earned.mean()).sum() == 1
    for column, statistic in zip(values.T, statistics_of(values, earned), strict=True):
        products = (column - column.mean()) * cut
        assert statistic == pytest.approx(products.mean() / np.sqrt(np.mean(products**2) / len(products)), rel=1e-10)


def test_a_column_or_a_return_that_does_not_move_has_no_statistic() -> None:
    values, earned = sample()
    values[:, 2] = 3.0
    assert statistics_of(values, earned)[2] == 0.0
    assert statistics_of(values, np.full(len(values), 0.01)) == pytest.approx(np.zeros(6), abs=1e-9)


def test_the_scale_of_columns_and_returns_does_not_matter() -> None:
    values, earned = sample()
    scaled = statistics_of(5.0 + values * np.array([1e-3, 1.0, 10.0, 1e3, -1.0, 2.0]), 0.01 * earned)
    signs = np.array([1, 1, 1, 1, -1, 1])
    assert scaled * signs == pytest.approx(statistics_of(values, earned), rel=1e-6)


def test_the_instruments_of_a_pool_count_once_per_time() -> None:
    """Standardised returns; products of one time are one observation, since instruments move together."""
    rng = np.random.default_rng(2)
    common, own = rng.uniform(-1.0, 1.0, 500), rng.uniform(-1.0, 1.0, (500, 4))
    earned = (common[:, None] + own) * np.array([0.01, 0.02, 0.04, 0.08])
    values = rng.standard_normal((4, 500, 3)) + np.arange(4.0)[:, None, None]
    earned[:50, 1] = np.nan
    together = np.zeros((500, 3))
    for asset, columns in enumerate(values):
        known = slice(50 if asset == 1 else 0, None)
        returns = earned[known, asset]
        scores = (returns - returns.mean()) / returns.std()
        together[known] += (columns[known] - columns[known].mean(axis=0)) * scores[:, None]
    expected = [lm_statistic(products) for products in together.T]
    assert t_statistics(values, earned) ** 2 == pytest.approx(expected, rel=1e-10)


# The weights.


@pytest.mark.parametrize("threshold", [0.0, 1.0, 2.5])
def test_weights_are_those_of_the_non_negative_garrote(threshold: float) -> None:
    """The factor c >= 0 of each estimate t that minimises (t - c t)^2 / 2 + threshold^2 c (Breiman 1995)."""
    values, earned = sample(slope=0.3)
    statistics = statistics_of(values, earned)
    weights = relevance_weights(values[None], earned[:, None], threshold)
    for statistic, weight in zip(statistics, weights, strict=True):
        best = minimize_scalar(
            lambda c, t=statistic: 0.5 * (t - c * t) ** 2 + threshold**2 * c, bounds=(0.0, 1.0), options={"xatol": 1e-10}
        )
        assert weight == pytest.approx(max(best.x, FLOOR), abs=1e-6)
    if threshold > 0.0:
        assert weights[0] > 0.8
        assert weights.min() == FLOOR


def test_a_column_matters_if_it_matters_for_any_asset_and_more_assets_raise_the_bar() -> None:
    values, earned = sample(slope=0.3)
    noise = np.random.default_rng(5).standard_normal((len(values), 3))
    both = np.column_stack((noise[:, 0], earned, noise[:, 1:]))
    largest = np.abs([statistics_of(values, column) for column in both.T]).max(axis=0)
    expected = np.maximum(FLOOR, 1.0 - (2.0**2 + 2.0 * math.log(4.0)) / largest**2)
    assert relevance_weights(values[None], both, 2.0) == pytest.approx(expected, rel=1e-12)
    assert expected[0] > 0.7


def test_chance_alone_opens_few_columns_however_many_assets_there_are() -> None:
    rng = np.random.default_rng(1)
    for assets in (1, 4, 16):
        weights = relevance_weights(rng.standard_normal((1, 500, 1000)), rng.standard_normal((500, assets)), 2.5)
        assert (weights > FLOOR).mean() < 0.015  # P(|t| > 2.5) = 0.0124, and less is left above the floor


def test_returns_that_are_not_known_are_left_out_asset_by_asset() -> None:
    values, earned = sample(slope=0.3)
    two = np.column_stack((earned, np.full(len(earned), np.nan)))
    two[:100, 0] = np.nan
    bar = math.sqrt(2.0**2 + 2.0 * math.log(2.0))
    assert relevance_weights(values[None], two, 2.0) == pytest.approx(
        relevance_weights(values[None, 100:], earned[100:, None], bar)
    )
    nothing = np.full((len(values), 1), np.nan)
    assert relevance_weights(values[None], nothing, 2.0).tolist() == [FLOOR] * values.shape[1]


def test_the_columns_of_a_pool_are_weighted_by_what_they_say_about_all_of_it() -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((16, 600, 2))
    earned = 0.06 * values[:, :, 0].T + rng.standard_normal((600, 16))
    alone = [relevance_weights(values[[k]], earned[:, [k]], 2.5)[0] for k in range(16)]
    pooled = relevance_weights(values, earned, 2.5)
    statistics = t_statistics(values, earned)
    assert pooled == pytest.approx(np.maximum(FLOOR, 1.0 - (2.5 / statistics) ** 2), rel=1e-12)
    assert np.median(alone) == FLOOR
    assert pooled[0] > 0.7


# The linear forecast of held-out returns.


def test_the_forecast_is_a_ridge_regression_of_other_rows():
    values, earned = sample(600)
    seen, unseen = slice(0, 400), slice(400, 600)
    mean, scale = earned[seen].mean(), earned[seen].std()
    standard = np.clip((earned - mean) / scale, -OUTLIER, OUTLIER)
    model = Ridge(alpha=400 * PENALTY).fit(values[seen], standard[seen])
    forecast = model.predict(values[unseen]) - model.predict(values[seen].mean(axis=0, keepdims=True))
    products = held_out_forecast(values[None, seen], earned[seen, None], values[None, unseen], earned[unseen, None]).products
    np.testing.assert_allclose(products, forecast * standard[unseen], rtol=1e-9)


def test_the_t_statistic_of_products_is_that_of_a_robust_regression_through_the_mean():
    products = np.random.default_rng(0).standard_t(5, 300) * 0.1 + 0.01
    fit = sm.OLS(products, np.ones(300)).fit(cov_type="HC0")
    mean, error = fit.params[0], fit.bse[0]
    # Under the hypothesis that nothing is predicted the mean is 0, so that it is not taken out of the squares.
    assert t_of_products(products) == pytest.approx(mean / np.sqrt(error**2 + mean**2 / 300), rel=1e-12)
    assert t_of_products(np.zeros(10)) == 0.0


def test_the_calibration_is_the_slope_of_a_regression_through_the_origin_and_never_negative():
    values, earned = sample(900, slope=0.3)
    halves = (slice(0, 300), slice(300, 900)), (slice(300, 900), slice(0, 300))
    forecasts = [
        held_out_forecast(values[None, fit], earned[fit, None], values[None, test], earned[test, None]) for fit, test in halves
    ]
    forecast, outcome = (np.concatenate([getattr(part, name) for part in forecasts])[:, 0] for name in ("forecast", "outcome"))
    assert calibrated(forecasts) == pytest.approx(sm.OLS(outcome, forecast).fit().params[0], rel=1e-12)
    assert 0.7 < calibrated(forecasts) < 1.5
    assert calibrated([part._replace(outcome=-part.outcome) for part in forecasts]) == 0.0
    assert calibrated([part._replace(forecast=0.0 * part.forecast) for part in forecasts]) == 0.0


def test_forecasts_come_back_in_units_of_the_returns():
    values, earned = sample(600, slope=0.3)
    once, twice = (
        held_out_forecast(values[None, :400], size * earned[:400, None], values[None, 400:], size * earned[400:, None])
        for size in (1.0, 3.0)
    )
    np.testing.assert_allclose(twice.forecast, once.forecast, rtol=1e-9)
    np.testing.assert_allclose(twice.scale, 3.0 * once.scale, rtol=1e-12)


def test_assets_have_coefficients_of_their_own_and_instruments_of_a_pool_share_them():
    values, earned = sample(600, slope=0.3)
    both = np.stack([earned, -earned], axis=1)  # the second asset moves against the first
    shared = held_out_forecast(values[None, :400], both[:400], values[None, 400:], both[400:]).products
    alone = held_out_forecast(values[None, :400], earned[:400, None], values[None, 400:], earned[400:, None]).products
    np.testing.assert_allclose(shared, 2.0 * alone, rtol=1e-9)
    pool = np.stack([values, values])
    np.testing.assert_allclose(
        held_out_forecast(pool[:, :400], both[:400], pool[:, 400:], both[400:]).products, 0.0, atol=1e-12
    )
    same = np.stack([earned, earned], axis=1)
    together = held_out_forecast(pool[:, :400], same[:400], pool[:, 400:], same[400:]).products
    np.testing.assert_allclose(together, 2.0 * alone, rtol=1e-9)


def test_unknown_and_constant_returns_are_no_evidence():
    values, earned = sample(600)
    gaps = earned.copy()
    gaps[[10, 450]] = np.nan
    products = held_out_forecast(values[None, :400], gaps[:400, None], values[None, 400:], gaps[400:, None]).products
    assert np.isfinite(products).all()
    assert products[50] == 0.0
    nothing = np.full((600, 1), np.nan)
    assert (
        t_of_products(held_out_forecast(values[None, :400], nothing[:400], values[None, 400:], nothing[400:]).products) == 0.0
    )
    flat = np.zeros((600, 1))
    assert t_of_products(held_out_forecast(values[None, :400], flat[:400], values[None, 400:], flat[400:]).products) == 0.0


def test_forecasts_of_noise_are_seldom_significant_and_those_of_an_edge_are():
    def significance(slope: float, seed: int) -> float:
        values, earned = sample(800, columns=20, slope=slope, seed=seed)
        halves = (slice(0, 400), slice(400, 800))
        products = [
            held_out_forecast(values[None, fit], earned[fit, None], values[None, test], earned[test, None]).products
            for fit, test in (halves, halves[::-1])
        ]
        return t_of_products(np.concatenate(products))

    noise = np.array([significance(0.0, seed) for seed in range(200)])
    assert binomtest(int((noise > 1.645).sum()), 200, 0.05, alternative="greater").pvalue > 0.01
    assert np.mean([significance(0.25, seed) for seed in range(20)]) > 3.0


# Returns in units of their volatility.


@every_fill
def test_returns_are_divided_by_the_volatility_that_was_forecast_at_their_close(fill: Fill) -> None:
    bars = planted_market("volume", 400, seed=0).bars
    scaled, plain = volatility_scaled(bars, fill), fill_returns(bars, fill)
    forecast = np.sqrt(forecast_variance(measure(bars), np.array([1]))[:, :, 0])
    first = int(np.isfinite(forecast[:, 0]).argmax())
    assert 0 < first < 100
    np.testing.assert_allclose(scaled[first:], plain[first:] / forecast[first:], rtol=1e-12)
    np.testing.assert_allclose(scaled[:first], plain[:first] / forecast[first], rtol=1e-12)
    assert 0.8 < np.nanstd(scaled) < 1.25


def test_prices_that_never_move_have_returns_of_zero() -> None:
    bars = planted_market("none", 200, seed=0).bars
    bars[["open", "high", "low", "close"]] = 100.0
    assert (np.nan_to_num(volatility_scaled(bars, "next_open")) == 0.0).all()


def test_an_edge_is_seen_better_where_turbulent_times_count_less() -> None:
    """Generalised least squares: the t-statistic of what moves the mean grows, by a fifth or so; that of noise does not."""
    raw, scaled = [], []
    for seed in range(6):
        market = planted_market("volume", 3000, sharpe=1.0, seed=seed)
        columns = market.expected[None, 100:]
        for found, returns in ((raw, fill_returns), (scaled, volatility_scaled)):
            found.append(t_statistics(columns, returns(market.bars, "next_open")[100:])[0])
    assert np.mean(scaled) > 1.08 * np.mean(raw) > 3.0
