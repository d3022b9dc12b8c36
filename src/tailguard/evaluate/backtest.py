"""Backtests: target weights in, a row of figures out, all under the same accounting."""

from dataclasses import dataclass

import pandas as pd

from tailguard.evaluate import statistics
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


def backtest(bars: pd.DataFrame, name: str, strategy: Strategy, rules: TradingRules) -> BacktestRow:
    """Trade a strategy over the whole series.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param name: what to call the row.
    :param strategy: from bars to target weights.
    :param rules: costs, fills and limits.
    """
    settings = rules.model_dump(include=set(TradingRules.model_fields))
    result = simulate(bars, strategy(bars), **settings)
    periods = periods_per_year(pd.DatetimeIndex(bars.index))
    returns = statistics.returns_of(result.equity)
    return BacktestRow(
        strategy=name,
        total_return=float(result.equity[-1]) / rules.cash - 1.0,
        cagr=statistics.cagr(result.equity, periods),
        volatility=statistics.volatility(returns, periods),
        sharpe=statistics.sharpe(returns, periods),
        max_drawdown=statistics.max_drawdown(result.equity),
        cvar_5=statistics.cvar(returns, 0.05),
        turnover=float(result.turnover.mean()) * periods,
        costs=float(result.costs.sum()) / rules.cash,
        ruined=result.ruined_at is not None,
    )
