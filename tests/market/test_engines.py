"""`simulate` and two public backtesters, fed the same orders on every shipped data set, hold the same account.

Both are oracles for the tests only. vectorbt is given targets in per cent and the fill price as its valuation price;
backtesting.py is given whole units as the differences of market orders.
"""

import functools

import numpy as np
import pandas as pd
import pytest
import vectorbt as vbt
from backtesting import Backtest, Strategy

from tailguard.market import list_datasets, load_dataset, simulate

DATASETS = [info.name for info in list_datasets()]
STOCKS = ("aapl-1d", "ibm-1d", "msft-1d")
FILLS = ["next_open", "close", "next_close"]
FEES_AND_SLIPPAGE = [(0.0, 0.0), (0.0005, 0.0008), (0.001, 0.0)]
# vectorbt takes amounts below 1e-12 for zero, and costs eat all but 1e-11 of some accounts here: begin with plenty.
CASH = 1e12
TOLERANCE = 1e-9

bars_of = functools.cache(load_dataset)


def field(bars, name):
    """One column of every symbol, as [T, A]."""
    columns = bars.xs(name, axis=1, level=1) if bars.columns.nlevels > 1 else bars[[name]]
    return columns.to_numpy()


def vectorbt_account(bars, weights, *, fill, fee, slippage):
    """Equity [T], units [T, A] and cash [T] of vectorbt."""
    price = field(bars, "open" if fill == "next_open" else "close")
    # vectorbt fills on the bar of the order, so that an order for the next bar is written there.
    size = weights if fill == "close" else np.vstack([np.full_like(weights[:1], np.nan), weights[:-1]])
    portfolio = vbt.Portfolio.from_orders(
        close=field(bars, "close"), size=size, size_type="targetpercent", price=price, val_price=price, fees=fee,
        slippage=slippage, init_cash=CASH, direction="both", freq="1D", cash_sharing=True, group_by=True, call_seq="auto",
    )  # fmt: skip
    return portfolio.value().to_numpy(), portfolio.assets().to_numpy(), portfolio.cash().to_numpy()


def assert_same_account(bars, result, equity, units, cash):
    """Everything within the tolerance, as a share of equity: a position or cash of zero has no relative error."""
    value_difference = (result.units.reshape(units.shape) - units) * field(bars, "close")
    differences = {
        "equity": float(np.max(np.abs(result.equity - equity) / equity)),
        "units": float(np.max(np.abs(value_difference) / equity[:, None])),
        "cash": float(np.max(np.abs(result.cash - cash) / equity)),
    }
    assert max(differences.values()) < TOLERANCE, differences


def long_short(rng, size):
    return rng.uniform(-1.0, 1.0, size)


def with_holds(rng, size):
    return np.where(rng.random(size) < 0.7, np.nan, rng.uniform(-1.0, 1.0, size))


def long_only(rng, size):
    return rng.choice([0.0, 0.3, 0.9999, 1.0], size)


@pytest.mark.parametrize(("fee", "slippage"), FEES_AND_SLIPPAGE)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("targets", [long_short, with_holds, long_only])
@pytest.mark.parametrize("dataset", DATASETS)
def test_one_asset_is_accounted_for_as_in_vectorbt(dataset, targets, fill, fee, slippage):
    bars = bars_of(dataset)
    weights = targets(np.random.default_rng(1), (len(bars), 1))
    result = simulate(bars, weights, fee=fee, slippage=slippage, fill=fill, cash=CASH, sizing="pre_cost")
    assert_same_account(bars, result, *vectorbt_account(bars, weights, fill=fill, fee=fee, slippage=slippage))


def shared_long_short(rng, bars):
    weights = rng.uniform(-1.0, 1.0, (bars, 3))
    return weights / np.abs(weights).sum(axis=1, keepdims=True)


def shared_with_holds(rng, bars):
    weights = shared_long_short(rng, bars)
    weights[rng.random(bars) < 0.7] = np.nan
    return weights


def fully_invested(rng, bars):
    """Weights that are whole numbers of 64ths, so that every row sums to exactly 1."""
    cuts = np.sort(rng.integers(0, 65, (bars, 2)), axis=1)
    weights = np.diff(cuts, axis=1, prepend=0, append=64) / 64.0
    assert (weights.sum(axis=1) == 1.0).all()
    return weights


@pytest.mark.parametrize(("fee", "slippage"), FEES_AND_SLIPPAGE)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("targets", [shared_long_short, shared_with_holds, fully_invested])
def test_three_assets_share_their_cash_as_in_vectorbt(targets, fill, fee, slippage):
    bars = bars_of(STOCKS)
    weights = targets(np.random.default_rng(2), len(bars))
    result = simulate(bars, weights, fee=fee, slippage=slippage, fill=fill, cash=CASH, sizing="pre_cost")
    assert_same_account(bars, result, *vectorbt_account(bars, weights, fill=fill, fee=fee, slippage=slippage))


@pytest.mark.parametrize("fill", FILLS)
def test_a_purchase_beside_a_position_that_is_held_is_cut_to_the_cash_as_in_vectorbt(fill):
    bars = bars_of(STOCKS)
    rng = np.random.default_rng(3)
    weights = fully_invested(rng, len(bars))
    weights[rng.random(weights.shape) < 0.5] = np.nan
    result = simulate(bars, weights, fee=0.001, fill=fill, cash=CASH, sizing="pre_cost")
    assert_same_account(bars, result, *vectorbt_account(bars, weights, fill=fill, fee=0.001, slippage=0.0))


def test_the_cash_clip_that_both_engines_apply_matters():
    bars = bars_of("aapl-1d")
    weights = np.ones(len(bars))
    clipped = simulate(bars, weights, fee=0.001, cash=CASH, sizing="pre_cost")
    price = field(bars, "open")[1, 0]
    assert clipped.cash[1] == 0.0
    assert clipped.units[1] == pytest.approx(CASH / price / 1.001, rel=1e-12)  # and not CASH / price


class HoldGivenUnits(Strategy):
    """Trades at the next open to ``target_units[t]``, whole units chosen at bar t."""

    target_units = None

    def init(self):
        self.held = 0

    def next(self):
        target_units = int(self.target_units[len(self.data) - 1])
        if target_units > self.held:
            self.buy(size=target_units - self.held)
        elif target_units < self.held:
            self.sell(size=self.held - target_units)
        self.held = target_units


def weights_of_units(target_units, opens, fee, cash):
    """Return each position as a share of equity before the trade, NaN where there is no trade."""
    weights, held = np.full(len(target_units), np.nan), 0.0
    for t in range(len(target_units) - 1):
        price, bought = opens[t + 1], target_units[t] - held
        if bought != 0.0:
            weights[t] = target_units[t] * price / (cash + held * price)
            cash -= bought * price + fee * abs(bought) * price
            held = target_units[t]
    return weights


@pytest.fixture
def no_progress_bar(monkeypatch):
    monkeypatch.setattr("backtesting.backtesting._tqdm", lambda bars, **_: bars)


@pytest.mark.usefixtures("no_progress_bar")
@pytest.mark.filterwarnings("ignore:DatetimeIndex.dayofweek is deprecated")  # in backtesting.py's statistics
@pytest.mark.parametrize("fee", [0.0, 0.0005, 0.001])
@pytest.mark.parametrize("dataset", DATASETS)
def test_whole_units_are_accounted_for_as_in_backtesting_py(dataset, fee):
    bars = bars_of(dataset)
    opens, cash = bars["open"].to_numpy(), 1e6 * bars["open"].iloc[0]
    rng = np.random.default_rng(4)
    target_units = np.where(rng.random(len(bars)) < 0.03, np.rint(rng.uniform(-0.4, 0.4, len(bars)) * cash / opens), np.nan)
    target_units[0], target_units[-2:] = 0.0, 0.0  # its first fill is on the third bar, and it warns about trades left open
    target_units = pd.Series(target_units).ffill().to_numpy()
    backtest = Backtest(
        bars.rename(columns=str.capitalize), HoldGivenUnits, cash=cash, commission=fee, hedging=False, exclusive_orders=False
    )
    equity = backtest.run(target_units=target_units)["_equity_curve"]["Equity"].to_numpy()
    result = simulate(bars, weights_of_units(target_units, opens, fee, cash), fee=fee, cash=cash, sizing="pre_cost")
    assert np.count_nonzero(np.diff(target_units)) > 70
    np.testing.assert_allclose(result.units[1:], target_units[:-1], rtol=0.0, atol=TOLERANCE * np.abs(target_units).max())
    np.testing.assert_allclose(result.equity, equity, rtol=TOLERANCE)


class EnterWithStops(Strategy):
    """Enters ``sizes[t]`` whole units at the next open with a stop-loss and a take-profit, and leaves where ``leave[t]``."""

    sizes, leave, opens, stop_loss, take_profit = None, None, None, 0.0, 0.0

    def init(self):
        pass

    def next(self):
        t = len(self.data) - 1
        if self.leave[t]:
            self.position.close()
        elif self.sizes[t]:
            entry, side = self.opens[t + 1], np.sign(self.sizes[t])
            levels = {"sl": entry * (1 - side * self.stop_loss), "tp": entry * (1 + side * self.take_profit)}
            (self.buy if side > 0 else self.sell)(size=abs(int(self.sizes[t])), **levels)


@pytest.mark.usefixtures("no_progress_bar")
@pytest.mark.filterwarnings("ignore:DatetimeIndex.dayofweek is deprecated")
@pytest.mark.parametrize(("stop_loss", "take_profit"), [(0.02, 0.03), (0.01, 0.2), (0.15, 0.015)])
@pytest.mark.parametrize("fee", [0.0, 0.001])
@pytest.mark.parametrize("dataset", ["nasdaq-1d", "aapl-1d"])
def test_stops_and_whole_lots_are_those_of_backtesting_py(dataset, fee, stop_loss, take_profit):
    bars = bars_of(dataset)
    opens, close, steps = bars["open"].to_numpy(), bars["close"].to_numpy(), len(bars)
    weights, leave = np.full(steps, np.nan), np.zeros(steps, bool)
    for t in range(20, steps - 40, 20):
        if abs(opens[t + 1] / close[t] - 1.0) < 0.005:  # else backtesting.py refuses levels on the wrong side of the close
            weights[t], leave[t + 15] = 0.4 if t % 40 else -0.4, True
    weights[leave] = 0.0
    cash = 1e6 * opens[0]
    stops = {"stop_loss": stop_loss, "take_profit": take_profit}
    result = simulate(bars, weights, fee=fee, cash=cash, sizing="pre_cost", lot=1.0, **stops)
    entries = np.flatnonzero(np.nan_to_num(weights) != 0.0)
    sizes = np.zeros(steps)
    sizes[entries] = np.trunc(weights[entries] * result.cash[entries] / opens[entries + 1])
    backtest = Backtest(bars.rename(columns=str.capitalize), EnterWithStops, cash=cash, commission=fee)
    run = backtest.run(sizes=sizes, leave=leave, opens=opens, **stops)
    np.testing.assert_allclose(result.equity, run["_equity_curve"]["Equity"].to_numpy(), rtol=TOLERANCE)
    early = run["_trades"]["ExitBar"].to_numpy() - run["_trades"]["EntryBar"].to_numpy() < 15
    assert early.sum() > 30
