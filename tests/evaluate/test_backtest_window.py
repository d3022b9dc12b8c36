"""Accounts of anybody's decisions: returns, weights and costs that belong together."""

import numpy as np
import pandas as pd
import pytest

from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.market import TradingRules, load_bars, random_walk
from tailguard.market.baselines import strategy


@pytest.fixture(scope="module")
def bars():
    return random_walk(400, seed=3)


@pytest.fixture(scope="module")
def portfolio():
    return load_bars({"a": random_walk(400, seed=1), "b": random_walk(400, seed=2)})


def random_targets(n, assets, seed=0):
    return np.random.default_rng(seed).uniform(-1.0, 1.0, (n, assets)) / assets


@pytest.mark.parametrize("fill", ["close", "next_close"])
def test_weights_held_over_a_bar_times_its_moves_are_the_return(portfolio, fill):
    """With trades at closes and without costs nothing else can happen between two closes."""
    window = BacktestWindow(portfolio, TradingRules(fee=0.0, fill=fill), (100, 300))
    history = window.trade("random", random_targets(199, 2))
    np.testing.assert_allclose((history.weights * window.moves).sum(axis=1), history.returns, rtol=0, atol=1e-12)
    assert np.abs(history.returns).max() > 0.005


def test_a_trade_at_the_open_earns_open_to_close(bars):
    """One bar in the market: bought at its open, sold at the next open."""
    targets = np.zeros(199)
    targets[10] = 1.0
    window = BacktestWindow(bars, TradingRules(fee=0.0), (100, 300))
    history = window.trade("once", targets)
    bought, row = bars["open"].iloc[111], bars.iloc[111]
    assert history.returns[10] == pytest.approx(row["close"] / bought - 1.0)
    assert history.returns[11] == pytest.approx(bars["open"].iloc[112] / row["close"] - 1.0)
    assert np.flatnonzero(history.returns).tolist() == [10, 11]
    assert np.flatnonzero(history.weights[:, 0]).tolist() == [10]
    assert history.times[10] == bars.index[111]


@pytest.mark.parametrize("fill", ["next_open", "close", "next_close"])
def test_the_first_decision_is_paid_by_the_first_return(bars, fill):
    window = BacktestWindow(bars, TradingRules(fee=0.01, fill=fill, sizing="pre_cost"), (100, 300))
    free = window.at_costs(0.0).trade("hold", np.r_[0.5, np.full(198, np.nan)])
    paid = window.trade("hold", np.r_[0.5, np.full(198, np.nan)])
    assert paid.costs[0] == pytest.approx(0.005)  # a fee of 1 % on half of the equity
    assert free.costs.sum() == 0.0
    assert paid.turnover.sum() == pytest.approx(0.5)
    assert paid.returns[0] == pytest.approx(free.returns[0] - 0.005, abs=1e-12)


def test_costs_take_from_the_return_what_they_say(bars):
    """Gross return minus cost is the net return, bar by bar, when positions are the same units."""
    window = BacktestWindow(bars, TradingRules(fee=0.002, slippage=0.001, fill="next_close", sizing="pre_cost"), (100, 300))
    history = window.trade("random", random_targets(199, 1))
    earned = (history.weights * window.moves).sum(axis=1)
    np.testing.assert_allclose(history.returns, earned - history.costs, rtol=0, atol=1e-12)
    doubled = window.at_costs(2.0)
    assert (doubled.rules.fee, doubled.rules.slippage, doubled.rules.fill) == (0.004, 0.002, "next_close")


def test_a_strategy_brings_what_it_would_have_held(bars):
    whole = strategy("momentum", lookback=50, skip=5)(bars)
    first = 100 + int(np.flatnonzero(np.diff(whole[100:]))[0]) + 1  # the side changes here
    window = BacktestWindow(bars, TradingRules(fee=0.0), (first, 300))
    targets = window.targets_of(strategy("momentum", lookback=50, skip=5))
    np.testing.assert_array_equal(targets[:, 0], whole[first:299])
    window = BacktestWindow(bars, TradingRules(fee=0.0), (250, 300))
    hold = window.trade_strategy("hold", strategy("buy_and_hold"))
    assert hold.equity[-1] == pytest.approx(bars["close"].iloc[299] / bars["open"].iloc[251])


def test_nothing_after_the_stretch_matters(bars):
    changed = bars.copy()
    changed.iloc[300:, :4] *= 2.0
    targets = random_targets(199, 1)
    one, other = (BacktestWindow(table, TradingRules(), (100, 300)).trade("x", targets) for table in (bars, changed))
    np.testing.assert_array_equal(one.returns, other.returns)


def test_prices_carry_the_last_known_close():
    early, late = random_walk(50, seed=1), random_walk(50, seed=2)
    both = load_bars({"a": early, "b": late.drop(late.index[[20, 21]])})
    window = BacktestWindow(both, TradingRules(), (10, 40))
    assert list(window.prices.columns) == ["a", "b"]
    assert window.prices["b"].loc[early.index[21]] == late["close"].iloc[19]
    assert window.moves[20 - 11, 1] == window.moves[21 - 11, 1] == 0.0
    assert len(window.prices) == len(window.times) == len(window.moves) == 29
    assert isinstance(window.times, pd.DatetimeIndex)


def test_impossible_values_are_refused(bars):
    for span in ((-1, 10), (10, 11), (0, 401)):
        with pytest.raises(ValueError, match="span is"):
            BacktestWindow(bars, TradingRules(), span)
    window = BacktestWindow(bars, TradingRules(), (0, 100))
    with pytest.raises(ValueError, match="shape of targets"):
        window.trade("x", np.zeros(100))
    with pytest.raises(ValueError, match="multiple is -1"):
        window.at_costs(-1.0)
