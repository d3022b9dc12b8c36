"""Where decisions become accounts: the agent, its seeds and the baselines all trade here, under one accounting."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from tailguard.evaluate.record import AccountHistory, Floats
from tailguard.market.accounting import SimulationResult, bar_array, simulate_bars
from tailguard.market.baselines import Strategy
from tailguard.market.data import iterate_symbols, periods_per_year
from tailguard.market.rules import TradingRules
from tailguard.validation import require

PRICE_COSTS = ("fee", "half_spread", "slippage", "impact")


@dataclass(frozen=True, eq=False)
class BacktestWindow:
    """A stretch of bars and the rules of trading on it.

    The first row is that of the first decision, at its close; nothing is earned over it. Each of the n rows after it is a bar
    of the tracks. An account starts in cash, so what the first decision costs is part of the first return.

    :param bars: a table from :func:`tailguard.market.load_bars`; rows before the stretch serve strategies as history.
    :param rules: costs, fills and limits.
    :param span: first and last-plus-one row, at least 2.
    """

    bars: pd.DataFrame
    rules: TradingRules
    span: tuple[int, int]

    def __post_init__(self) -> None:
        """Refuse a span that is not inside the bars."""
        first, last = self.span
        legal = f"first and last-plus-one row inside {len(self.bars)} bars, at least 2 rows"
        require(first >= 0 and first + 2 <= last <= len(self.bars), "span", self.span, legal)

    @cached_property
    def times(self) -> pd.DatetimeIndex:
        """``[n]`` of the bars that are earned."""
        return pd.DatetimeIndex(self.bars.index[self.span[0] + 1 : self.span[1]])

    @cached_property
    def periods_per_year(self) -> float:
        """Counted over the whole stretch."""
        return periods_per_year(pd.DatetimeIndex(self.bars.index[self.span[0] : self.span[1]]))

    @property
    def prices(self) -> pd.DataFrame:
        """Closes ``[n, assets]`` of the bars that are earned, the last known one where a bar is missing."""
        closes = {symbol or "close": table["close"].ffill() for symbol, table in iterate_symbols(self.bars)}
        return pd.DataFrame(closes).iloc[self.span[0] + 1 : self.span[1]].rename_axis(None)

    @property
    def moves(self) -> Floats:
        """``[n, assets]`` close-to-close returns of the prices; 0 before a symbol's first bar."""
        closes = pd.DataFrame({symbol: table["close"].ffill() for symbol, table in iterate_symbols(self.bars)})
        changes = closes.pct_change(fill_method=None).iloc[self.span[0] + 1 : self.span[1]]
        return np.asarray(np.nan_to_num(changes.to_numpy(dtype=np.float64)))

    @cached_property
    def _array(self) -> Floats:
        return bar_array(self.bars.iloc[self.span[0] : self.span[1]], self.rules)

    def trade(self, name: str, targets: ArrayLike) -> AccountHistory:
        """The account of somebody who wanted these weights.

        :param name: of the track.
        :param targets: ``[n, assets]``, or ``[n]`` for one asset; row i is decided at the close before bar i. NaN holds.
        """
        wanted = np.asarray(targets, dtype=np.float64)
        wanted = wanted[:, None] if wanted.ndim == 1 else wanted
        n = self.span[1] - self.span[0] - 1
        require(wanted.ndim == 2 and len(wanted) == n, "the shape of targets", wanted.shape, f"({n}, assets)")
        # Nothing is earned on a decision at the last close, so none is taken there.
        with_last = np.concatenate([wanted, np.full((1, wanted.shape[1]), np.nan)])
        return self._track(name, simulate_bars(self._array, with_last, self.rules))

    def follow(self, name: str, strategy: Strategy) -> AccountHistory:
        """The account of a baseline, which buys at the start what it would have held already."""
        return self.trade(name, self.targets_of(strategy))

    def targets_of(self, strategy: Strategy) -> Floats:
        """What a baseline wants, ``[n, assets]``; it has seen all bars before the stretch."""
        first, last = self.span
        weights = strategy(self.bars)
        columns = weights.reshape(len(self.bars), -1)
        standing = pd.DataFrame(columns[: first + 1]).ffill().to_numpy()[-1]
        return np.asarray(np.concatenate([standing[None], columns[first + 1 : last - 1]]), dtype=np.float64)

    def at_costs(self, multiple: float) -> "BacktestWindow":
        """The same with fee, spread, slippage and impact that many times as large."""
        require(multiple >= 0.0, "multiple", multiple, "at least 0")
        costs = {name: multiple * value for name, value in self.rules if name in PRICE_COSTS}
        rules = TradingRules(**self.rules.model_dump(include=set(TradingRules.model_fields)) | costs)
        return replace(self, rules=rules)

    def _track(self, name: str, result: SimulationResult) -> AccountHistory:
        equity = result.equity.copy()
        equity[0] = self.rules.cash  # with close fills the first trade is paid before the first bar: it is the first return's
        costs, turnover = result.costs[1:].copy(), result.turnover[1:].copy()
        costs[0] += result.costs[0]
        turnover[0] += result.turnover[0]
        # A trade at the open is held over its bar, one at a close over the next.
        held = result.weights[1:] if self.rules.fill == "next_open" else result.weights[:-1]
        return AccountHistory(name, self.times, equity[1:] / equity[:-1] - 1.0, np.array(held), turnover, costs / equity[:-1])
