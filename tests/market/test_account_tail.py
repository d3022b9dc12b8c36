"""Predicted tails of accounts: against distributions that are known, calibrated, and without a look at later bars."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
from tail_series import POSITIONS, garch, holding, jumps, portfolio, switcher, walk

from tailguard.evaluate.stats.risk_tests import kupiec
from tailguard.market import align_bars, simulate, tail_forecast
from tailguard.market.account_tail import account_tail, quantile_at, tail_mean
from tailguard.market.model_account import trade_weights
from tailguard.market.tail_forecast import LEVELS, PredictionCache, _exposures, observe_market
from tailguard.market.volatility import measure
from tailguard.periods import Period

MONTH = Period.parse("1M")


def test_the_tail_of_a_random_walk_is_normal() -> None:
    bars = walk(3)
    tail = account_tail(bars, np.ones(len(bars)), Period.parse(10))
    last = slice(2000, None)
    spread, drift = 0.012 * np.sqrt(tail.rows.to_go[last]), 0.0003 * tail.rows.to_go[last]
    for level in (0.05, 0.1):
        expected = np.expm1(drift + spread * norm.ppf(level))
        assert np.mean(tail.value_at_risk(level)[last] / expected) == pytest.approx(1.0, abs=0.12)
    shortfall = np.expm1(drift - spread * norm.pdf(norm.ppf(0.05)) / 0.05)
    assert np.mean(tail.cvar(0.05)[last] / shortfall) == pytest.approx(1.0, abs=0.15)


def test_tail_mean_integrates_the_quantile_function() -> None:
    uniform = LEVELS[None]
    # Linear between levels, constant below the first: the mean of U up to a level is half of it, but for that corner.
    assert tail_mean(uniform, 0.1)[0] == pytest.approx(0.05 + 0.5 * LEVELS[0] ** 2 / 0.1)
    assert tail_mean(uniform, 0.07)[0] == pytest.approx(0.035 + 0.5 * LEVELS[0] ** 2 / 0.07)
    assert tail_mean(uniform, 1.0)[0] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("position", list(POSITIONS))
@pytest.mark.parametrize("draw", [garch, jumps], ids=["garch", "jumps"])
def test_tails_are_calibrated(draw, position) -> None:
    bars = draw(7)
    tail = account_tail(bars, POSITIONS[position](bars), Period.parse("1W"), since=len(bars))
    rows = np.flatnonzero(tail.rows.restarts & np.isfinite(tail.outcomes) & (tail.quantiles[:, 0] < 0.0))
    rows = rows[rows > 500]
    assert len(rows) > 600
    for level in (0.05, 0.1):
        assert kupiec(tail.outcomes[rows], tail.value_at_risk(level)[rows], level).exact_p_value > 0.01


def test_an_account_that_is_flat_for_now_is_expected_to_trade_again() -> None:
    bars = walk(0, 1500)
    tail = account_tail(bars, switcher(bars), MONTH)
    flat = (switcher(bars)[:, 0] == 0.0) & (np.arange(1500) > 500) & (tail.rows.to_go > 15)
    assert (tail.value_at_risk(0.05)[flat] < -0.01).all()
    never = account_tail(bars, np.zeros(1500), MONTH)
    np.testing.assert_array_equal(never.quantiles[100:], 0.0)


def test_a_short_position_mirrors_a_long_one() -> None:
    bars = walk(1, 1200)
    up, down = (account_tail(bars, np.full(1200, side), MONTH).value_at_risk(0.05)[-1] for side in (1.0, -1.0))
    assert up < 0.0
    assert down < 0.0
    assert up != down
    half = account_tail(bars, np.full(1200, 0.5), MONTH).value_at_risk(0.05)[-1]
    assert half / up == pytest.approx(0.5, abs=0.06)


def test_assets_are_predicted_jointly() -> None:
    one = walk(2, 1500)
    both = align_bars({"A": one, "B": one})
    hedged = account_tail(both, np.tile([1.0, -1.0], (1500, 1)), MONTH)
    np.testing.assert_allclose(hedged.cvar(0.05)[600:], 0.0, atol=6e-3)
    doubled, alone = (
        account_tail(*args, MONTH).cvar(0.05)[200:] for args in ((both, np.full((1500, 2), 0.5)), (one, np.ones(1500)))
    )
    np.testing.assert_allclose(doubled, alone, rtol=0.02)


@pytest.mark.parametrize("period", ["1M", "1W", 7])
def test_predictions_do_not_look_ahead(period) -> None:
    bars = portfolio(0, 700)
    bars.iloc[400, :5] = np.nan
    weights, length = switcher(bars), Period.parse(period)
    whole = account_tail(bars, weights, length, first=3)
    for rows in (501, 533, 600):
        part = account_tail(bars.iloc[:rows], weights[:rows], length, first=3)
        np.testing.assert_array_equal(part.quantiles, whole.quantiles[:rows])
        np.testing.assert_array_equal(part.to_date, whole.to_date[:rows])
    changed = bars.copy()
    changed.iloc[600:] *= 1.5
    np.testing.assert_array_equal(account_tail(changed, weights, length, first=3).quantiles[:600], whole.quantiles[:600])


def test_only_the_rows_that_are_asked_for_are_predicted() -> None:
    bars = walk(0, 400)
    everything, few = (account_tail(bars, holding(bars), MONTH, since=since) for since in (0, 399))
    rows = np.append(np.flatnonzero(everything.rows.restarts[:399]), 399)
    np.testing.assert_array_equal(few.quantiles[rows], everything.quantiles[rows])
    assert np.isnan(few.quantiles[350]).all() != everything.rows.restarts[350]


@pytest.mark.parametrize("level", [0.0, 0.0005, 0.04, 0.05, 0.33, 0.99, 1.0])
def test_quantiles_at_any_level_are_those_of_interp(level) -> None:
    rows = np.sort(np.random.default_rng(0).normal(size=(50, len(LEVELS))), axis=1)
    np.testing.assert_array_equal(quantile_at(rows, level), [np.interp(level, LEVELS, row) for row in rows])


def test_a_cache_predicts_every_close_once_and_changes_no_bit(monkeypatch) -> None:
    bars = portfolio(0, 500)
    bars.iloc[300, :5] = np.nan
    weights, asked, make = switcher(bars), [], tail_forecast._predict
    monkeypatch.setattr(tail_forecast, "_predict", lambda *inputs: (asked.append(int(inputs[-1].sum())), make(*inputs))[1])
    cache = PredictionCache()
    for rows in (460, 461, 480, 481, 500):
        fresh = account_tail(bars[:rows], weights[:rows], MONTH)
        kept = account_tail(bars[:rows], weights[:rows], MONTH, cache=cache)
        np.testing.assert_array_equal(kept.quantiles, fresh.quantiles)
    assert asked[1::2] == [460, 1, 19, 1, 19]
    weights[470] *= 0.5  # what follows another decision, or another bar, is predicted anew
    changed = account_tail(bars, weights, MONTH, cache=cache)
    np.testing.assert_array_equal(changed.quantiles, account_tail(bars, weights, MONTH).quantiles)
    assert asked[-2] == 30
    bars.iloc[480, 3] *= 1.001
    changed = account_tail(bars, weights, MONTH, cache=cache)
    np.testing.assert_array_equal(changed.quantiles, account_tail(bars, weights, MONTH).quantiles)
    assert asked[-2] == 20
    shorter = account_tail(bars[:450], weights[:450], Period.parse("1W"), cache=cache)  # another period, fewer bars
    np.testing.assert_array_equal(shorter.quantiles, account_tail(bars[:450], weights[:450], Period.parse("1W")).quantiles)


def test_period_to_date_and_outcome_add_up_to_the_period() -> None:
    bars = walk(0, 500)
    tail = account_tail(bars, np.ones(500), MONTH, fee=0.0)
    equity = simulate(bars, np.ones(500), fee=0.0).equity
    months = pd.Series(equity, bars.index).resample("ME").last().pct_change().to_numpy()[3]
    row = int(np.flatnonzero(bars.index >= "1995-04-12")[0])
    assert (1.0 + tail.to_date[row]) * (1.0 + tail.outcomes[row]) - 1.0 == pytest.approx(months, rel=1e-6)


@pytest.mark.parametrize("fee", [0.0, 0.001])
def test_the_model_account_is_near_the_accounting_kernel(fee: float) -> None:
    bars = portfolio(1, 800)
    weights = 0.6 * switcher(bars)  # so little that purchases are never limited by the cash
    weights[np.random.default_rng(0).random(weights.shape) < 0.5] = np.nan
    weights[0] = 0.2
    moves = measure(bars)
    followed = trade_weights(moves.gaps, moves.returns, weights, fee)
    result = simulate(bars, weights, fee=fee)
    np.testing.assert_allclose(np.cumsum(followed.returns), np.log(result.equity), atol=1e-9 + 0.1 * fee)
    decided = ~np.isnan(weights)
    np.testing.assert_array_equal(followed.held[decided], weights[decided])
    np.testing.assert_allclose(followed.held[~decided], result.weights[~decided], atol=1e-9 + 0.1 * fee)


def test_a_short_history_has_no_forecast() -> None:
    bars = walk(0, 50)
    tail = account_tail(bars, np.ones(50), MONTH)
    assert np.isnan(tail.quantiles).all()


def test_weights_must_fit_the_bars() -> None:
    with pytest.raises(ValueError, match="the shape of weights is"):
        account_tail(walk(0, 50), np.ones(49), MONTH)
    with pytest.raises(ValueError, match="finite, or NaN to hold"):
        account_tail(walk(0, 50), np.full(50, np.inf), MONTH)


def test_correlations_are_learnt() -> None:
    market = observe_market(portfolio(3, 1500), 5)
    deviation, places = market.deviation[:, :, 0], np.zeros(1500, np.int64)

    def correlation(a: int, b: int) -> float:
        """Of two assets, from the variance of an account that holds both."""
        held = np.zeros((1500, 3))
        held[:, [a, b]] = 1.0
        *_, variance = _exposures(held, market.standard, market.deviation, places, 0)
        excess = variance - deviation[:, a] ** 2 - deviation[:, b] ** 2
        return float((excess / (2.0 * deviation[:, a] * deviation[:, b]))[500:].mean())

    assert correlation(0, 1) == pytest.approx(0.48, abs=0.12)
    assert correlation(0, 2) == pytest.approx(0.08, abs=0.12)
