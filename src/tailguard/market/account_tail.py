"""The tail of an account's return over the rest of its period: predicted at every close, and calibrated by its own past.

What :mod:`tailguard.market.tail_forecast` predicted at the first decision of each period is compared with what the period has
brought, as soon as it is over, and the lower half of all later predictions is widened or narrowed (adaptive
conformal prediction; Gibbs and Candès 2021, and the quantile tracking of Angelopoulos, Candès and Tibshirani 2023). With theta
the logarithm of the width, and q the quantiles that were shown:

    theta <- theta + RATE mean_a (1{outcome < q_a} - a) / sqrt(a (1 - a)),    a = 5 %, 10 %, 20 %.

So the shares of outcomes below the shown quantiles approach 5, 10 and 20 %, whatever is wrong with the forecast, or whatever
the account does within a period.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from tailguard.jit import decorators
from tailguard.market.bars import symbols_of
from tailguard.market.model_account import trade_weights
from tailguard.market.tail_forecast import LEVELS, Market, PredictionCache, forecast_returns, observe_market
from tailguard.periods import Period, PeriodRows
from tailguard.validation import require

Floats = NDArray[np.float64]

TRACKED = np.array([0.05, 0.1, 0.2])
# Steps of theta and psi, and their largest sizes. Ten times the step corrects faster, and costs 3 % of pinball loss.
RATE, WIDEST, TAIL_RATE, STEEPEST = 0.01, 0.7, 0.0075, 0.35
# What psi counts for at each level: 1 at 5 %, 0 at 10 %, -1 at 20 % and above, 2 at 2.5 % and below.
STEEPNESS = np.clip(np.log2(0.1 / LEVELS), -1.0, 2.0)
# Largest log return that is predicted: leverage over a long time must not leave the range of numbers.
LARGEST = 50.0
MEDIAN = int(np.searchsorted(LEVELS, 0.5))

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]
compiled, inlined = cast(tuple[Decorate, Decorate], decorators())


class AccountTail(NamedTuple):
    """The predicted return of an account from each close to the end of the period, by bar.

    :param period: that the tail is about.
    :param rows: its rows.
    :param quantiles: ``[T, L]`` of the simple return of the rest of the period, at :data:`LEVELS`, calibrated; NaN before there
        is a forecast.
    :param to_date: ``[T]`` simple return of the period so far; 0 at the first decision of a period.
    :param outcomes: ``[T]`` simple return that the rest of the period brought; NaN where it is not over.
    :param held: ``[T, A]`` weights after each decision.
    """

    period: Period
    rows: PeriodRows
    quantiles: Floats
    to_date: Floats
    outcomes: Floats
    held: Floats

    def value_at_risk(self, level: float) -> Floats:
        """Return the quantile ``[T]`` of the rest of the period at a level."""
        return quantile_at(self.quantiles, level)

    def cvar(self, level: float) -> Floats:
        """Return the average ``[T]`` of the worst share `level` of the rest of the period."""
        return tail_mean(self.quantiles, level)

    @property
    def expected(self) -> Floats:
        """The mean ``[T]`` of the rest of the period."""
        return tail_mean(self.quantiles, 1.0)


def quantile_at(quantiles: Floats, level: float) -> Floats:
    """Return the quantile ``[T]`` at any level, as ``np.interp`` does: linear between levels, constant beyond the outermost.

    :param quantiles: ``[T, L]`` at :data:`LEVELS`.
    :param level: in [0, 1].
    """
    k = int(np.searchsorted(LEVELS, level, side="right")) - 1
    if k < 0 or k == len(LEVELS) - 1 or LEVELS[k] == level:
        return quantiles[:, max(k, 0)].copy()
    slope = (quantiles[:, k + 1] - quantiles[:, k]) / (LEVELS[k + 1] - LEVELS[k])
    return np.asarray(slope * (level - LEVELS[k]) + quantiles[:, k])


def tail_mean(quantiles: Floats, level: float) -> Floats:
    """Average the quantile function up to a level: linear between levels, constant beyond the outermost.

    :param quantiles: ``[T, L]`` at :data:`LEVELS`, rising.
    :param level: in (0, 1].
    """
    require(0.0 < level <= 1.0, "level", level, "above 0 and at most 1")
    inside = np.less(LEVELS, level)
    edges = np.concatenate([[0.0], LEVELS[inside], [level]])
    last = quantile_at(quantiles, level)[:, None]
    values = np.concatenate([quantiles[:, :1], quantiles[:, inside], last], axis=1)
    return np.asarray(((values[:, 1:] + values[:, :-1]) / 2.0 * np.diff(edges)).sum(axis=1) / level)


def account_tail(
    bars: pd.DataFrame,
    targets: ArrayLike,
    period: Period,
    *,
    fee: ArrayLike = 0.001,
    first: int = 0,
    market: Market | None = None,
    horizons: NDArray[np.int64] | None = None,
    since: int = 0,
    rows: PeriodRows | None = None,
    cache: PredictionCache | None = None,
) -> AccountTail:
    """Predict the tail of an account at every close.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param targets: ``[T]`` or ``[T, A]`` weights decided at each close; NaN holds.
    :param period: over which returns count.
    :param fee: share of the amount traded, of all assets or ``[A]`` of each.
    :param first: row of the first decision, from which periods that are a number of bars count.
    :param market: from :func:`observe_market` of the same bars, if it is there already.
    :param horizons: ``[T]`` bars that the quantiles are for; None is the rest of the period.
    :param since: row from which every close gets a prediction; before it only the first decision of each period does.
    :param rows: of the period over the same bars, if they are there already.
    :param cache: of predictions that an earlier call has made for this account, when there were fewer bars.
    """
    weights = target_array(bars, targets)
    rows = period.rows(pd.DatetimeIndex(bars.index), first) if rows is None else rows
    market = observe_market(bars, int(rows.to_go.max())) if market is None else market
    account = trade_weights(market.moves.gaps, market.moves.returns, weights, fee)
    asked = rows.restarts | (np.arange(len(bars)) >= since)
    horizons = rows.to_go if horizons is None else horizons
    predicted = forecast_returns(market, account.held, horizons, first=first, rows=asked, cache=cache)
    outcomes, ends = period_outcomes(account.returns, rows)
    width = _log_widths(predicted, outcomes, ends, rows.restarts, LEVELS, STEEPNESS)
    return AccountTail(
        period, rows, np.expm1(_widened(predicted, width)), _to_date(account.returns, rows), np.expm1(outcomes), account.held
    )


def target_array(bars: pd.DataFrame, targets: ArrayLike) -> Floats:
    """Return target weights as ``[T, A]``, checked against the bars."""
    weights = np.asarray(targets, dtype=np.float64)
    weights = weights[:, None] if weights.ndim == 1 else weights
    shape = (len(bars), len(symbols_of(bars)))
    require(weights.shape == shape, "the shape of weights", weights.shape, f"{shape}, a row per bar and a column per symbol")
    require(not np.isinf(weights).any(), "weights", float("inf"), "finite, or NaN to hold")
    return weights


def period_outcomes(returns: Floats, rows: PeriodRows) -> tuple[Floats, NDArray[np.int64]]:
    """Return the log return ``[T]`` from each close to the end of the next bar's period, and the row where that ends.

    NaN where the period is not over, or brought no bar.
    """
    total, n = np.cumsum(returns), len(returns)
    ends = np.searchsorted(rows.own, rows.next, side="right") - 1
    over = (ends > np.arange(n)) & (ends < n - 1)
    return np.where(over, total[ends] - total, np.nan), ends


def _to_date(returns: Floats, rows: PeriodRows) -> Floats:
    """Return the simple return ``[T]`` of the period that the next bar belongs to, so far."""
    total = np.cumsum(returns)
    begun = np.searchsorted(rows.own, rows.next, side="left")  # row of the first bar of that period, or the next one
    before = np.where(begun > 0, total[np.maximum(begun - 1, 0)], 0.0)
    return np.asarray(np.expm1(np.where(begun <= np.arange(len(returns)), total - before, 0.0)))


def _widened(quantiles: Floats, width: Floats) -> Floats:
    """Return the quantiles with the lower half stretched about the median.

    :param quantiles: ``[T, L]``.
    :param width: ``[T, 2]`` theta and psi.
    """
    middle = quantiles[:, MEDIAN, None]
    lower = quantiles[:, :MEDIAN] - middle
    lower = middle + lower * np.exp(width[:, :1] + width[:, 1:] * STEEPNESS[:MEDIAN])
    lower = np.minimum.accumulate(lower[:, ::-1], axis=1)[:, ::-1]  # a tail that is less wide must not cross the middle
    return np.asarray(np.minimum(np.concatenate([lower, quantiles[:, MEDIAN:]], axis=1), LARGEST))


@compiled
def _log_widths(quantiles, outcomes, ends, restarts, levels, steepness):
    """Return theta and psi ``[T, 2]`` as they are known at each close, for bars whose periods end in order."""
    n = len(quantiles)
    width, waiting, used = np.zeros((n, 2)), np.full(n, -1), np.zeros((n, 2))
    theta, psi, first, last = 0.0, 0.0, 0, 0
    errors = np.zeros(len(TRACKED))
    for t in range(n):
        while first < last and ends[waiting[first]] < t:  # over as soon as a bar of a later period is there
            s = waiting[first]
            first += 1
            for i, level in enumerate(TRACKED):
                k = np.searchsorted(levels, level)
                stretch = math.exp(used[s, 0] + used[s, 1] * steepness[k])
                limit = quantiles[s, MEDIAN] + (quantiles[s, k] - quantiles[s, MEDIAN]) * stretch
                errors[i] = ((1.0 if outcomes[s] < limit else 0.0) - level) / math.sqrt(level * (1.0 - level))
            theta = min(max(theta + RATE * errors.mean(), -WIDEST), WIDEST)
            psi = min(max(psi + TAIL_RATE * 0.5 * (errors[0] - errors[-1]), -STEEPEST), STEEPEST)
        width[t, 0], width[t, 1] = theta, psi
        if restarts[t] and not math.isnan(outcomes[t]) and not math.isnan(quantiles[t, 0]) and quantiles[t, 0] < 0.0:
            used[t] = width[t]
            waiting[last] = t
            last += 1
    return width
