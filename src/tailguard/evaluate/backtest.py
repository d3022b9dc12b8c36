"""Backtests: target weights in, a row of figures out, all under the accounting of :class:`BacktestWindow`."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from tailguard.evaluate import statistics
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.record import AccountHistory
from tailguard.market.baselines import Strategy
from tailguard.market.rules import TradingRules
from tailguard.validation import require

FEWEST_BARS = 3  # two returns, which have a deviation


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
    first, last = span or (0, len(bars))
    require(last - first >= FEWEST_BARS, "the number of bars", last - first, f"at least {FEWEST_BARS} for a backtest")
    window = BacktestWindow(bars, rules, (first, last))
    return backtest_row(window, name, window.guarded(window.targets_of(strategy)))


def benchmark_history(window: BacktestWindow, name: str, bars: pd.DataFrame) -> AccountHistory:
    """Return the account of a benchmark over the times of a window: bought at its start, held, without any cost.

    :param window: whose times count.
    :param name: of the account.
    :param bars: of the benchmark, one symbol; its last known close counts at each time.
    :raises ValueError: when the benchmark has no price yet when the window begins, or none of its bars are inside.
    """
    closes = bars["close"] if "close" in bars.columns else None
    if closes is None:
        raise ValueError(f"{name} holds several symbols, but a benchmark is one")
    times = window.bars.index[window.span[0] : window.span[1]]
    equity = closes.reindex(closes.index.union(times)).ffill().reindex(times).to_numpy(dtype=float)
    if not equity[0] > 0.0:
        raise ValueError(f"{name} begins at {closes.index[0]}, after the first bar of {times[0]}: it needs earlier bars")
    if not closes.index[-1] > times[0]:
        raise ValueError(f"{name} ends at {closes.index[-1]}, before the first bar of {times[0]}: it needs later bars")
    n = len(times) - 1
    untraded = np.zeros((n, 0)), np.zeros(n), np.zeros(n)
    return AccountHistory(name, window.times, equity[1:] / equity[:-1] - 1.0, *untraded, window.riskless)


def benchmark_row(window: BacktestWindow, name: str, bars: pd.DataFrame) -> BacktestRow:
    """Return the figures of a benchmark over the times of a window; see :func:`benchmark_history`.

    :param window: whose times count.
    :param name: of the row.
    :param bars: of the benchmark.
    """
    return _row(benchmark_history(window, name, bars), window.periods_per_year, ruined=False)


def backtest_row(window: BacktestWindow, name: str, targets: ArrayLike) -> BacktestRow:
    """Trade target weights over a window and return their figures, which are those of an evaluation over the same window.

    :param window: bars and rules.
    :param name: of the row.
    :param targets: ``[n, assets]``, see :meth:`BacktestWindow.simulate`.
    """
    result = window.simulate(targets)
    return _row(window.history(name, result), window.periods_per_year, ruined=result.ruined_at is not None)


def _row(history: AccountHistory, periods: float, *, ruined: bool) -> BacktestRow:
    return BacktestRow(
        strategy=history.name,
        total_return=history.total_return,
        **_figures(history.equity, history.returns, history.excess, periods),
        turnover=statistics.turnover(history.turnover, periods),
        costs=history.total_costs,
        ruined=ruined,
    )


def _figures(equity: ArrayLike, returns: ArrayLike, excess: ArrayLike, periods: float) -> dict[str, float]:
    """Return the figures that follow from equity, returns, and returns in excess of the riskless ones."""
    return {
        "cagr": statistics.cagr(equity, periods),
        "volatility": statistics.volatility(excess, periods),
        "sharpe": statistics.sharpe(excess, periods),
        "max_drawdown": statistics.max_drawdown(equity),
        "cvar_5": statistics.cvar(returns, 0.05),
    }
