"""Backtests: target weights in, a row of figures out, all under the accounting of :class:`BacktestWindow`."""

from dataclasses import dataclass

import pandas as pd
from numpy.typing import ArrayLike

from tailguard.evaluate import statistics
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.market.baselines import Strategy
from tailguard.market.rules import TradingRules


@dataclass(frozen=True)
class BacktestRow:
    """The figures of one account.

    :param strategy: its name.
    :param total_return: gain over the whole series, as a share of the starting cash.
    :param cagr: growth per year.
    :param volatility: standard deviation of the excess returns per year.
    :param sharpe: per year, of the returns in excess of those of cash.
    :param max_drawdown: deepest fall from a peak, as a share of it.
    :param cvar_5: mean of the worst 5 % of the returns per bar.
    :param turnover: traded notional per year, in multiples of equity.
    :param costs: fees and slippage paid, as a share of the starting cash.
    :param ruined: true if the account was liquidated.
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
    :param name: of the row.
    :param strategy: from bars to target weights.
    :param rules: costs, fills and limits.
    :param span: first and last-plus-one row; the first decision is taken at the close of the first, and the strategy sees the
        rows before as history. None is all of them.
    """
    window = BacktestWindow(bars, rules, span or (0, len(bars)))
    return backtest_row(window, name, window.targets_of(strategy))


def backtest_row(window: BacktestWindow, name: str, targets: ArrayLike) -> BacktestRow:
    """Trade target weights over a window and return their figures, which are those of an evaluation over the same window.

    :param window: bars and rules.
    :param name: of the row.
    :param targets: ``[n, assets]``, see :meth:`BacktestWindow.simulate`.
    """
    result, periods = window.simulate(targets), window.periods_per_year
    history = window.history(name, result)
    equity = history.equity
    return BacktestRow(
        strategy=name,
        total_return=history.total_return,
        cagr=statistics.cagr(equity, periods),
        volatility=statistics.volatility(history.excess, periods),
        sharpe=statistics.sharpe(history.excess, periods),
        max_drawdown=statistics.max_drawdown(equity),
        cvar_5=statistics.cvar(history.returns, 0.05),
        turnover=statistics.turnover(history.turnover, periods),
        costs=history.total_costs,
        ruined=result.ruined_at is not None,
    )
