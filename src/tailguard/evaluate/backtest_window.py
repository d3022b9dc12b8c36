"""The backtest window: bars and rules under which the agent, its seeds and the baselines all trade."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from tailguard.evaluate.record import AccountHistory
from tailguard.evaluate.stats.series import Floats, require_finite
from tailguard.evaluate.trades import Fills, round_trips
from tailguard.market.account_tail import AccountTail, account_tail
from tailguard.market.accounting import SimulationResult, bar_array, simulate_bars
from tailguard.market.bars import YEAR, iterate_symbols, periods_per_year, symbols_of
from tailguard.market.baselines import Strategy
from tailguard.market.guard import Guarded, guard
from tailguard.market.kernel import MARK, TRADE_FIELDS
from tailguard.market.rules import TradingRules
from tailguard.market.tail_forecast import Market, observe_market
from tailguard.periods import Period
from tailguard.validation import require


@dataclass(frozen=True, eq=False)
class BacktestWindow:
    """A span of bars and the rules of trading on it.

    The first decision is taken at the close of the first row, over which nothing is earned. Each of the n rows after it is a
    bar of the account histories. An account starts in cash, so the cost of the first trade is part of the first return.

    :param bars: a table from :func:`tailguard.market.load_bars`; strategies see the rows before the span as past bars.
    :param rules: costs, fills and limits.
    :param span: first and last-plus-one row, at least 2.
    :param cash_rates: ``[n]`` interest per year on positive cash over each bar, in place of ``rules.cash_rate``, which is then
        0; None takes that one for all bars.
    """

    bars: pd.DataFrame
    rules: TradingRules
    span: tuple[int, int]
    cash_rates: Floats | None = None

    def __post_init__(self) -> None:
        """Refuse a span that is not inside the bars, and rates that do not fit them."""
        first, last = self.span
        legal = f"first and last-plus-one row inside {len(self.bars)} bars, at least 2 rows"
        require(first >= 0 and first + 2 <= last <= len(self.bars), "span", self.span, legal)
        if self.cash_rates is not None:
            n = last - first - 1
            require(self.cash_rates.shape == (n,), "the shape of cash_rates", self.cash_rates.shape, f"({n},), one per bar")
            require_finite("cash_rates", self.cash_rates)
            require(self.rules.cash_rate == 0.0, "rules.cash_rate", self.rules.cash_rate, "0 beside rates by bar")

    @cached_property
    def times(self) -> pd.DatetimeIndex:
        """The times ``[n]`` of the bars that are traded over."""
        return pd.DatetimeIndex(self.bars.index[self.span[0] + 1 : self.span[1]])

    @cached_property
    def periods_per_year(self) -> float:
        """Bars per year, counted over the whole span unless the rules say it."""
        return self.rules.bars_per_year or periods_per_year(pd.DatetimeIndex(self.bars.index[self.span[0] : self.span[1]]))

    @cached_property
    def riskless(self) -> Floats:
        """The returns ``[n]`` of an account that stays in cash."""
        return self._years * (self.rules.cash_rate if self.cash_rates is None else self.cash_rates)

    @cached_property
    def _years(self) -> Floats:
        """The length ``[n]`` of each bar."""
        return np.asarray(np.diff(self.bars.index[self.span[0] : self.span[1]].to_numpy()) / YEAR.to_timedelta64())

    @property
    def prices(self) -> pd.DataFrame:
        """The closes ``[n, assets]``, the last known one where a bar is missing."""
        return closes(self.bars).iloc[self.span[0] + 1 : self.span[1]].rename_axis(None)

    @property
    def moves(self) -> Floats:
        """The close-to-close returns ``[n, assets]``; 0 before a symbol's first bar."""
        changes = closes(self.bars).pct_change(fill_method=None).iloc[self.span[0] + 1 : self.span[1]]
        return np.asarray(np.nan_to_num(changes.to_numpy(dtype=np.float64)))

    @cached_property
    def _array(self) -> Floats:
        return bar_array(self.bars.iloc[self.span[0] : self.span[1]], self.rules)

    def trade(self, name: str, targets: ArrayLike) -> AccountHistory:
        """Return the account of somebody who asked for these weights; see :meth:`simulate`.

        :param name: of the account.
        """
        return self.history(name, self.simulate(targets))

    def simulate(self, targets: ArrayLike) -> SimulationResult:
        """Trade target weights; the result has an entry for the row of the first decision, too.

        :param targets: ``[n, assets]``, or ``[n]`` for one asset; row i is decided at the close before bar i. NaN holds.
        """
        weights = np.asarray(targets, dtype=np.float64)
        weights = weights[:, None] if weights.ndim == 1 else weights
        n = self.span[1] - self.span[0] - 1
        require(weights.ndim == 2 and len(weights) == n, "the shape of targets", weights.shape, f"({n}, assets)")
        # Nothing is earned after the last close, so no decision is taken there.
        with_last = np.concatenate([weights, np.full((1, weights.shape[1]), np.nan)])
        return simulate_bars(self._array, with_last, self.rules)

    def trade_strategy(self, name: str, strategy: Strategy) -> AccountHistory:
        """Return the account of a strategy, which buys at the start what it would have held already."""
        return self.trade(name, self.guarded(self.targets_of(strategy)))

    def guarded(self, targets: ArrayLike) -> Floats:
        """Return the target weights ``[n, assets]`` after the guard of the rules; as they are if there is none."""
        weights = np.asarray(targets, dtype=np.float64)
        if self.rules.guard is None:
            return weights
        return np.asarray(self.guard(weights).weights[self.span[0] : -1].reshape(weights.shape))

    def guard(self, targets: ArrayLike) -> Guarded:
        """Guard target weights ``[n, assets]`` by the limit of the rules; the result has a row for every bar up to the end.

        The account is flat before the span, and the forecast knows the bars before it.
        """
        assert self.rules.guard is not None
        return guard(
            self._since_first_bar(targets), self._known_bars, **self.rules.guard.model_dump(), fee=self._costs,
            first=self.span[0], market=self._tail_market,
        )  # fmt: skip

    def tail(self, targets: ArrayLike) -> AccountTail:
        """Predict the tail of the account with these target weights ``[n, assets]`` at the first decision of every period.

        The result has a row for every bar up to the end.
        """
        period = self.rules.shown_period(pd.DatetimeIndex(self._known_bars.index))
        weights = self._since_first_bar(targets)
        first = self.span[0]
        return account_tail(
            self._known_bars, weights, period, fee=self._costs, first=first, market=self._tail_market, since=len(weights)
        )

    @property
    def _costs(self) -> Floats:
        """The costs of trading ``[assets]`` by which guard and forecast trade their account."""
        return self.rules.costs_per_side(symbols_of(self.bars))

    @cached_property
    def _known_bars(self) -> pd.DataFrame:
        return self.bars.iloc[: self.span[1]]

    @cached_property
    def _tail_market(self) -> Market:
        """The variance forecasts of the bars, up to the longest period that is asked for."""
        times = pd.DatetimeIndex(self._known_bars.index)
        periods = [self.rules.shown_period(times)]
        periods += [] if self.rules.guard is None else [Period.parse(self.rules.guard.period)]
        longest = max(int(period.rows(times, self.span[0]).to_go.max()) for period in periods)
        return observe_market(self._known_bars, longest)

    def _since_first_bar(self, targets: ArrayLike) -> Floats:
        """Return target weights of the span as those of all bars up to its end: 0 before it, and hold at its last close."""
        weights = np.asarray(targets, dtype=np.float64)
        weights = weights[:, None] if weights.ndim == 1 else weights
        before = np.zeros((self.span[0], weights.shape[1]))
        return np.concatenate([before, weights, np.full((1, weights.shape[1]), np.nan)])

    def targets_of(self, strategy: Strategy) -> Floats:
        """Return the target weights ``[n, assets]`` of a strategy that has seen all bars before the span."""
        first, last = self.span
        weights = strategy(self.bars)
        columns = weights.reshape(len(self.bars), -1)
        standing = pd.DataFrame(columns[: first + 1]).ffill().to_numpy()[-1]
        return np.asarray(np.concatenate([standing[None], columns[first + 1 : last - 1]]), dtype=np.float64)

    def at_costs(self, multiple: float) -> "BacktestWindow":
        """Return the same window with fee, spread, slippage and impact multiplied."""
        require(multiple >= 0.0, "multiple", multiple, "at least 0")
        return replace(self, rules=self.rules.at_costs(multiple))

    def history(self, name: str, result: SimulationResult) -> AccountHistory:
        """Return what :meth:`simulate` returned as the history of an account.

        :param name: of the account.
        """
        equity = result.equity.copy()
        equity[0] = self.rules.cash  # with close fills the first trade is paid before the first bar: it is the first return's
        costs, turnover = result.costs[1:].copy(), result.turnover[1:].copy()
        costs[0] += result.costs[0]
        turnover[0] += result.turnover[0]
        # A trade at the open is held over its bar, one at a close over the next.
        held = result.weights[1:] if self.rules.fill == "next_open" else result.weights[:-1]
        returns = equity[1:] / equity[:-1] - 1.0
        if self.cash_rates is not None:  # paid on the cash at the close before, as the kernel pays a constant rate
            share = result.cash[:-1] / result.equity[:-1]
            on_loans = np.maximum(self.cash_rates - self.rules.loan_rate, 0.0)  # they cost at least as much as cash earns
            returns += self._years * np.where(share > 0.0, self.cash_rates, on_loans) * share
        return AccountHistory(name, self.times, returns, np.array(held), turnover, costs / equity[:-1], self.riskless)

    def round_trips(self, result: SimulationResult) -> pd.DataFrame:
        """Return the round trips of an account; see :func:`tailguard.evaluate.trades.round_trips`.

        :param result: from :meth:`simulate`.
        """
        field = TRADE_FIELDS[self.rules.fill]
        marks = self._array[:, :, MARK]
        prices = self._array[:, :, field]
        fills = np.where(np.isnan(prices), marks, prices)
        units = result.units if result.units.ndim == 2 else result.units[:, None]
        times = pd.DatetimeIndex(self.bars.index[self.span[0] : self.span[1]])
        symbols = [symbol or "asset" for symbol in symbols_of(self.bars)]
        return round_trips(times, symbols, Fills(units, marks, fills, result.costs, self.rules.cash))


def closes(bars: pd.DataFrame) -> pd.DataFrame:
    """Return the closes, one column per symbol, the last known one where a bar is missing."""
    return pd.DataFrame({symbol or "close": table["close"].ffill() for symbol, table in iterate_symbols(bars)})
