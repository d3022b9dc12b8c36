"""The guard: scale anybody's weights so that the worst share of periods loses no more than a limit, on average.

At every close the exposure k in [0, 1] is the largest for which the predicted tail stays inside the limit L. With C the
predicted average loss of the worst 5 % (CVaR, calibrated; :mod:`tailguard.market.account_tail`) of the weights as they are,
over a whole period and over the rest of this one, and R what the period has earned so far:

    k <= min(1,  f a L / C(whole period),  f r (L + R) / (1 + R) / C(rest of the period)).

The first figure bounds the exposure within a period, the second cuts it after losses. With r = 1 the second would hold the
limit at every close even if nothing could be sold any more; but a position that is cut after a loss loses less than it would
have, and only three quarters of the limit would be used. By how much less is r, which grows with the bars that are left to cut
in: 1 for the last bar, CUTS more for many. What no cut can avoid, such as a gap overnight, shows in the account's own record:
with m the average of the worst share of its losses over past periods, in units of what was predicted for each when it began,
a and r are both multiplied by

    f = (60 + n) / (60 + n m)     after n periods, between 0.5 and 1: a good record never loosens the limit.

So the prediction for the guarded account, cuts included, is

    (1 + R) (1 - k C(rest of the period) / (f r)) - 1,

never below -L unless the period has lost that much already. Small changes are not traded, since costs are part of the return:
a new exposure leaves a margin, and one that is allowed stays until it could be raised by a quarter.

Without a forecast (:data:`tailguard.market.volatility.FEWEST_BARS`) nothing is held; an asset that was listed later is left out
until there is one. Every row depends on bars and weights up
to it only, so that the last row of the past is what to trade now.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from tailguard.market.account_tail import account_tail, tail_mean, target_array
from tailguard.market.bars import symbols_of
from tailguard.market.model_account import (
    NO_FORECAST,
    REST_OF_PERIOD,
    WHOLE_PERIOD,
    fees_of,
    trade_guarded,
    trade_weights,
)
from tailguard.market.tail_forecast import Market, PredictionCache, observe_market
from tailguard.market.volatility import RISE
from tailguard.periods import Period, PeriodRows
from tailguard.validation import require

Floats = NDArray[np.float64]

# How far a and r exceed 1 for periods of many bars, and what a new exposure leaves below the largest that is allowed.
START_EXCESS, CUTS, MARGIN = 0.38, 0.26, 0.05
# Periods that r and a count for beside the account's own record, and the limits of what that changes.
RECORD = (60.0, 0.5, 1.0)
# Loss that is predicted at least, so that nothing is divided by 0 where nothing moves.
LEAST_LOSS = 1e-9


class Guarded(NamedTuple):
    """Weights inside a loss limit, by bar.

    :param weights: as they were given, times `exposure`; NaN holds.
    :param exposure: ``[T]`` k, from 0 to 1.
    :param predicted_cvar: ``[T]`` average return of the worst share of this period, predicted for the guarded account: what is
        earned so far and the rest, with the cuts that follow losses. It is above -max_loss unless `to_date` is below, and
        nothing is held then. NaN where there is no forecast.
    :param to_date: ``[T]`` return of the guarded account in this period so far.
    :param whole_cvar: ``[T]`` predicted for a whole period of the weights as they were given.
    :param rest_cvar: ``[T]`` predicted for the rest of this period of the weights as they were given.
    :param cause: ``[T]`` of the exposure: one of the numbers in :mod:`tailguard.market.model_account`.
    :param period: that the limit is for.
    :param max_loss: the limit.
    :param level: share of worst periods.
    :param unknown: ``[T, A]`` true for assets that were asked for and are not held: there are too few bars to forecast them.
    :param symbols: of the assets.
    """

    weights: Floats
    exposure: Floats
    predicted_cvar: Floats
    to_date: Floats
    whole_cvar: Floats
    rest_cvar: Floats
    cause: NDArray[np.int64]
    period: Period
    max_loss: float
    level: float
    unknown: NDArray[np.bool_]
    symbols: Sequence[str]

    def reason(self, row: int) -> str:
        """Say why the exposure after a bar is below 1; empty where it is not.

        :param row: of the bar; -1 is the last.
        """
        names = ", ".join(symbol for symbol, out in zip(self.symbols, self.unknown[row], strict=True) if out)
        return "; ".join(filter(None, (self._cut(row), f"{names} not held: too few bars for a forecast" if names else "")))

    def _cut(self, row: int) -> str:
        """Say why the exposure of all assets is below 1."""
        cause, exposure, words = int(self.cause[row]), self.exposure[row], self.period.words
        if cause == NO_FORECAST:
            return "nothing is held: there are too few bars for a forecast"
        limit = f"{self.predicted_cvar[row]:+.1%} for this {words} at this exposure, the limit is {-self.max_loss:.1%}"
        if cause == WHOLE_PERIOD:
            tail = f"the worst {self.level:.0%} of {_plural(words)}"
            return f"exposure {exposure:.2f}: {tail} would lose {-self.whole_cvar[row]:.1%} on average without a guard; {limit}"
        if cause == REST_OF_PERIOD:
            so_far = f"{self.to_date[row]:+.1%} so far this {words}"
            rest = f"{self.rest_cvar[row]:+.1%} predicted for the rest without a guard"
            return f"exposure {exposure:.2f}: {so_far} and {rest}; {limit}"
        return ""

    @property
    def reasons(self) -> list[str]:
        """The reason of every bar, see :meth:`reason`."""
        return [self.reason(row) for row in range(len(self.exposure))]


class GuardCache(NamedTuple):
    """Predictions that :func:`guard` has made, see :class:`tailguard.market.tail_forecast.PredictionCache`.

    :param rest: for the rest of each period.
    :param whole: for whole periods.
    """

    rest: PredictionCache
    whole: PredictionCache


def guard(
    weights: ArrayLike,
    bars: pd.DataFrame,
    *,
    max_loss: float,
    period: str | int,
    level: float = 0.05,
    fee: ArrayLike = 0.001,
    first: int = 0,
    market: Market | None = None,
    cache: GuardCache | None = None,
) -> Guarded:
    """Scale weights so that the worst share of periods loses at most `max_loss` on average.

    :param weights: ``[T]`` or ``[T, A]`` target weights, decided at the close of each bar; NaN holds.
    :param bars: a table from :func:`tailguard.market.load_bars`; history before the first weight may have weights of 0.
    :param max_loss: largest average loss of the worst periods, as a share of equity: 0.05 is 5 %.
    :param period: ``1M``, ``1W``, or a number of bars.
    :param level: share of periods that counts as worst.
    :param fee: share of the amount traded, of all assets or ``[A]`` of each; spread and slippage belong to it.
    :param first: row from which periods that are a number of bars count.
    :param market: what :func:`tailguard.market.tail_forecast.observe_market` made of the same bars, if it is there already.
    :param cache: of predictions that an earlier call has made for these weights, when there were fewer bars.
    """
    require(0.0 < max_loss < 1.0, "max_loss", max_loss, "a share of equity between 0 and 1, such as 0.05")
    require(0.0 < level < 1.0, "level", level, "a share of periods between 0 and 1, such as 0.05")
    length, targets = Period.parse(period), target_array(bars, weights)
    rows = length.rows(pd.DatetimeIndex(bars.index), first)
    whole_bars = _bars_of_whole(rows)
    market = observe_market(bars, int(max(rows.to_go.max(), whole_bars.max()))) if market is None else market
    targets, unknown = _without_unknown(targets, market, fee)
    cache = GuardCache(PredictionCache(), PredictionCache()) if cache is None else cache
    rest = account_tail(bars, targets, length, fee=fee, market=market, first=first, rows=rows, cache=cache.rest)
    whole = account_tail(
        bars, targets, length, fee=fee, market=market, first=first, horizons=whole_bars, rows=rows, cache=cache.whole
    )
    rest_cvar, whole_cvar = tail_mean(rest.quantiles, level), tail_mean(whole.quantiles, level)
    start = 1.0 + START_EXCESS * (1.0 - 1.0 / np.sqrt(whole_bars))
    cuts = 1.0 + CUTS * (1.0 - 1.0 / np.sqrt(rows.to_go))
    guarded, exposure, to_date, cause, record = trade_guarded(
        np.expm1(market.moves.gaps), np.expm1(market.moves.returns - market.moves.gaps), targets, rest.held,
        np.maximum(-whole_cvar, LEAST_LOSS), np.maximum(-rest_cvar, LEAST_LOSS), rows.own, rows.next,
        fees_of(targets, fee), max_loss, level, start, cuts, RISE, MARGIN, RECORD,
    )  # fmt: skip
    predicted = (1.0 + to_date) * (1.0 + exposure * rest_cvar / (cuts * record)) - 1.0
    shape = np.shape(weights)
    return Guarded(
        guarded.reshape(shape), exposure, predicted, to_date, whole_cvar, rest_cvar, cause, length, max_loss, level, unknown,
        symbols_of(bars),
    )  # fmt: skip


def _without_unknown(targets: Floats, market: Market, fee: ArrayLike) -> tuple[Floats, NDArray[np.bool_]]:
    """Return targets without assets that cannot be forecast yet, while others can, and which these are, ``[T, A]``.

    What was held all along is bought when there is a forecast.
    """
    known = np.isfinite(market.deviation[:, :, 0])
    unknown = ~known & known.any(axis=1, keepdims=True)
    if not unknown.any():
        return targets, unknown
    held = trade_weights(market.moves.gaps, market.moves.returns, targets, fee).held
    begins = np.zeros_like(unknown)
    begins[1:] = unknown[:-1] & ~unknown[1:]
    begun = np.where(begins & np.isnan(targets), held, targets)
    return np.where(unknown, 0.0, begun), unknown & (held != 0.0)


def _bars_of_whole(rows: PeriodRows) -> NDArray[np.int64]:
    """Return the bars ``[T]`` of a whole period, as expected at the first decision of the present one."""
    starts = np.maximum.accumulate(np.where(rows.restarts, np.arange(len(rows.own)), -1))
    return np.where(starts >= 0, rows.to_go[np.maximum(starts, 0)], rows.to_go)


def _plural(words: str) -> str:
    """Return a period in the plural: months, periods of 2 weeks."""
    return f"periods of {words}" if words[0].isdigit() else f"{words}s"
