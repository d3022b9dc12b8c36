"""Round trips: by hand, and summed up to the gain of the account under every rule of filling."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.trades import TRADE_COLUMNS, Fills, round_trips
from tailguard.market import TradingRules, load_bars, random_walk

TIMES = pd.date_range("2024-01-01", periods=6)


def test_a_long_and_a_short_trip_by_hand():
    """Bought 2 at 10, one more at 12, turned to -1 at 13, bought back at 11; a fee of 1 % of what is traded."""
    units = np.array([[0.0], [2.0], [3.0], [-1.0], [-1.0], [0.0]])
    fills = np.array([[9.0], [10.0], [12.0], [13.0], [12.5], [11.0]])
    marks = fills + 0.5
    costs = 0.01 * np.array([0.0, 20.0, 12.0, 52.0, 0.0, 11.0])
    table = round_trips(TIMES, ["x"], Fills(units, marks, fills, costs, 100.0))
    assert list(table.columns) == list(TRADE_COLUMNS)
    long, short = table.to_dict("records")
    assert (long["side"], long["entry"], long["exit"], long["bars"]) == ("long", TIMES[1], TIMES[3], 2)
    assert long["gain"] == pytest.approx((3 * 13.0 - 2 * 10.0 - 12.0) / 100.0)
    assert long["cost"] == pytest.approx(0.01 * (20.0 + 12.0 + 39.0) / 100.0)
    assert (short["side"], short["entry"], short["exit"], short["bars"]) == ("short", TIMES[3], TIMES[5], 2)
    assert short["gain"] == pytest.approx((13.0 - 11.0) / 100.0)
    assert short["cost"] == pytest.approx(0.01 * (13.0 + 11.0) / 100.0)


def test_a_trip_that_is_open_ends_with_the_last_close():
    units = np.array([[0.0], [0.0], [1.0], [1.0], [1.0], [1.0]])
    prices = np.arange(10.0, 16.0)[:, None]
    table = round_trips(TIMES, ["x"], Fills(units, prices, prices, np.zeros(6), 1.0))
    assert pd.isna(table["exit"].iloc[0])
    assert (table["bars"].iloc[0], table["gain"].iloc[0]) == (4, 3.0)


def test_an_account_that_never_trades_has_no_trips():
    table = round_trips(TIMES, ["x"], Fills(np.zeros((6, 1)), np.ones((6, 1)), np.ones((6, 1)), np.zeros(6), 1.0))
    assert list(table.columns) == list(TRADE_COLUMNS)
    assert len(table) == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), fill=st.sampled_from(["next_open", "close", "next_close"]), assets=st.integers(1, 3))
def test_the_trips_sum_up_to_the_gain_of_the_account(seed, fill, assets):
    rng = np.random.default_rng(seed)
    tables = {str(a): random_walk(60, seed=int(seed + a)) for a in range(assets)}
    tables = {name: table.drop(table.index[rng.integers(5, 55, 3)]) for name, table in tables.items()}
    bars = load_bars(tables)
    window = BacktestWindow(bars, TradingRules(fee=0.002, slippage=0.001, fill=fill, cash=1000.0), (5, len(bars)))
    targets = rng.choice([-0.5, 0.0, 0.4, np.nan], (len(bars) - 6, assets)) / assets
    result = window.simulate(targets)
    trips = window.round_trips(result)
    gain = result.equity[-1] / 1000.0 - 1.0
    assert (trips["gain"] - trips["cost"]).sum() == pytest.approx(gain, abs=1e-10)
    assert trips["cost"].sum() == pytest.approx(result.costs.sum() / 1000.0, abs=1e-12)
    assert (trips["bars"] >= 1).all() or fill == "close"
    assert trips["entry"].is_monotonic_increasing
