"""Baselines: known weights on known prices, no look-ahead, legal weights everywhere."""

import numpy as np
import pandas as pd
import pytest

from tailguard.market import load_bars, load_dataset, random_walk, simulate
from tailguard.market.baselines import STRATEGIES, strategy


@pytest.fixture(scope="module")
def stocks():
    return load_dataset(["aapl-1d", "ibm-1d", "msft-1d"])


def rising(n=400, growth=0.001):
    close = 100.0 * np.exp(growth * np.arange(n))
    time = pd.date_range("2020-01-01", periods=n, freq="1D")
    return pd.DataFrame({"open": close, "high": close, "low": close, "close": close, "volume": 1.0}, index=time)


@pytest.mark.parametrize("name", STRATEGIES)
def test_weights_fit_the_bars_and_never_ask_for_a_loan(name, nasdaq, stocks):
    for bars, shape in ((nasdaq, (len(nasdaq),)), (stocks, (len(stocks), 3))):
        weights = strategy(name)(bars)
        assert weights.shape == shape
        assert not np.isinf(weights).any()
        gross = np.nansum(np.abs(weights.reshape(len(bars), -1)), axis=1)
        assert gross.max() <= 1.0 + 1e-12
        assert np.isfinite(weights).any()


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "random_positions"])
@pytest.mark.parametrize("t", [0, 100, 260, 400])
def test_weights_use_the_past_only(name, t, nasdaq):
    bars = nasdaq.iloc[:500]
    garbage = bars.copy()
    garbage.iloc[t + 1 :] = garbage.iloc[t + 1 :].to_numpy()[::-1] * 10.0
    weights = strategy(name)(bars)[: t + 1]
    np.testing.assert_array_equal(strategy(name)(garbage)[: t + 1], weights)
    np.testing.assert_array_equal(strategy(name)(bars.iloc[: t + 1]), weights)


def test_buy_and_hold_pays_one_entry_fee_and_follows_the_price(nasdaq):
    result = simulate(nasdaq, strategy("buy_and_hold")(nasdaq), fee=0.01)
    opened = nasdaq["open"].iloc[1]
    np.testing.assert_allclose(result.equity[1:], nasdaq["close"].to_numpy()[1:] / opened / 1.01, rtol=1e-12)
    assert np.count_nonzero(result.turnover) == 1


def test_buy_and_hold_waits_for_the_first_bar_of_each_symbol():
    bars = random_walk(50, seed=0)
    table = load_bars({"old": bars, "new": bars.iloc[20:]})
    weights = strategy("buy_and_hold")(table)
    np.testing.assert_array_equal(np.argwhere(np.isfinite(weights)), [[0, 0], [20, 1]])


def test_trend_followers_are_long_in_a_rise_and_out_or_short_in_a_fall():
    for name in ("moving_average", "momentum"):
        assert np.nanmin(strategy(name)(rising())) == 1.0
    assert np.nanmax(strategy("moving_average")(rising(growth=-0.001))) == 0.0
    assert np.nanmax(strategy("momentum")(rising(growth=-0.001))) == -1.0


def test_volatility_target_reaches_its_target():
    bars = random_walk(20_000, volatility=0.02, seed=3)
    weights = strategy("volatility_target", target=0.10, window=63)(bars)
    result = simulate(bars, weights, fee=0.0)
    realised = np.std(np.diff(np.log(result.equity[100:]))) * np.sqrt(365.25)
    assert realised == pytest.approx(0.10, rel=0.03)
    still = strategy("volatility_target", limit=0.7)(rising(growth=0.0))
    assert np.nanmax(still) == 0.7


@pytest.mark.parametrize("turnover", [0.02, 0.1, 0.5, 1.0])
def test_random_positions_have_the_turnover_asked_for(turnover):
    n = 40_000
    weights = strategy("random_positions", turnover=turnover, seed=5)(random_walk(n, seed=0))
    flip = turnover / 2  # each flip changes the weight by 2
    standard_error = 2.0 * np.sqrt(flip * (1.0 - flip) / n)
    assert np.abs(np.diff(weights)).mean() == pytest.approx(turnover, abs=4.0 * standard_error)
    assert abs(weights.mean()) < 0.1


def test_equal_weight_trades_only_when_it_rebalances(stocks):
    weights = strategy("equal_weight", every=10)(stocks)
    np.testing.assert_array_equal(np.isfinite(weights).all(axis=1), np.arange(len(stocks)) % 10 == 0)
    np.testing.assert_allclose(weights[0], 1 / 3)
