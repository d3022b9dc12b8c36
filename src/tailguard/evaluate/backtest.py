"""Backtests: target weights in, a row of figures out, all under the same accounting."""

from dataclasses import dataclass

import pandas as pd

from tailguard.evaluate import statistics
from tailguard.evaluate.record import AccountHistory
from tailguard.evaluate.statistics import Floats
from tailguard.market.accounting import simulate
from tailguard.market.baselines import Strategy
from tailguard.market.data import periods_per_year
from tailguard.market.rules import TradingRules


@dataclass(frozen=True)
class BacktestRow:
    """What a strategy did on one series.

    :param strategy: its name.
    :param total_return: gain over the whole series, as a share of the starting cash.
    :param cagr: growth per year.
    :param volatility: standard deviation of returns per year.
    :param sharpe: per year, against a riskless rate of 0.
    :param max_drawdown: deepest fall from a peak, as a share of it.
    :param cvar_5: mean of the worst 5 % of the returns per bar.
    :param turnover: traded notional per year, in multiples of equity.
    :param costs: fees and slippage paid, as a share of the starting cash.
    :param ruined: whether the account was liquidated.
    """

    strategy: str
    total_return: float
    cagr: float
    volatility: float
    sharpe: float
    max_drawdown: float
    cvar_5: float
    turnover: float
    costs: float
    ruined: bool


def backtest(
    bars: pd.DataFrame, name: str, strategy: Strategy, rules: TradingRules, span: tuple[int, int] | None = None
) -> BacktestRow:
    """Trade a strategy over a series.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param name: what to call the row.
    :param strategy: from bars to target weights.
    :param rules: costs, fills and limits.
    :param span: first and last-plus-one row to trade; the strategy sees the rows before as history. None is all of them.
    """
    first, last = span or (0, len(bars))
    weights = strategy(bars)
    # What the strategy would have held already is what it buys at the first bar of the span.
    standing = pd.DataFrame(weights[: first + 1].reshape(first + 1, -1)).ffill().to_numpy()[-1]
    weights = weights[first:last].copy()
    weights[0] = standing if weights.ndim == 2 else standing[0]
    settings = rules.model_dump(include=set(TradingRules.model_fields))
    result = simulate(bars.iloc[first:last], weights, **settings)
    index = pd.DatetimeIndex(bars.index[first:last])
    ruined = result.ruined_at is not None
    costs = float(result.costs.sum())
    return summarise(name, result.equity, float(result.turnover.mean()), costs, rules.cash, index, ruined)


def summarise(
    name: str, equity: Floats, turnover: float, costs: float, cash: float, index: pd.DatetimeIndex, ruined: bool
) -> BacktestRow:
    """The figures of an equity curve.

    :param equity: one entry per bar, the first before any trade has paid off.
    :param turnover: mean per bar.
    :param costs: paid in all.
    :param cash: what the account started with.
    :param index: times of the bars.
    :param ruined: whether it was liquidated.
    """
    periods = periods_per_year(index)
    returns = statistics.returns_of(equity)
    return BacktestRow(
        strategy=name,
        total_return=float(equity[-1]) / cash - 1.0,
        cagr=statistics.cagr(equity, periods),
        volatility=statistics.volatility(returns, periods),
        sharpe=statistics.sharpe(returns, periods),
        max_drawdown=statistics.max_drawdown(equity),
        cvar_5=statistics.cvar(returns, 0.05),
        turnover=turnover * periods,
        costs=costs / cash,
        ruined=ruined,
    )


def row_of(track: AccountHistory, periods: float, ruined: bool = False) -> BacktestRow:
    """The figures of a track.

    :param track: from :class:`tailguard.evaluate.backtest_window.BacktestWindow`.
    :param periods: bars per year.
    :param ruined: whether it was liquidated.
    """
    equity = track.equity
    return BacktestRow(
        strategy=track.name,
        total_return=float(equity[-1]) - 1.0,
        cagr=statistics.cagr(equity, periods),
        volatility=statistics.volatility(track.returns, periods),
        sharpe=statistics.sharpe(track.returns, periods),
        max_drawdown=statistics.max_drawdown(equity),
        cvar_5=statistics.cvar(track.returns, 0.05),
        turnover=statistics.turnover(track.turnover, periods),
        costs=float((track.costs * equity[:-1]).sum()),
        ruined=ruined,
    )
