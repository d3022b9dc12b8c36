"""The distribution of an account's return over the next bars, for the weights that it holds: predicted at every close.

Filtered historical simulation over the horizon itself. For tau bars ahead, with Z_s the returns of all assets over tau bars
from the close of bar s, each divided by the deviation that was forecast for it at s (:mod:`tailguard.market.volatility`):

    predicted return of weights w at t  =  sum_a w_a sigma_{t,a} Z_{s,a},    s one of the past bars.

All assets of a row s are taken together, so their dependence is that of the past. The quantiles are those of the past rows,
drawn towards a Student-t, which counts for `PRIOR_OUTCOMES` independent outcomes: short histories have its tails.

An account changes its positions within the horizon. Its exposure (variance of its positions relative to that of the market) is
taken as an AR(1) process, fitted to its past: the exposure over the horizon lies between today's and the usual one.

Every row uses bars and weights up to it only: the forecast of the first rows is the same whatever follows.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from tailguard.jit import decorators
from tailguard.market.volatility import Floats, Ints, Moves, forecast_variance, horizon_grid, measure, nearest_on_grid
from tailguard.validation import require

# Levels of the predicted quantiles: dense in the lower tail, which is what they are for.
LEVELS = np.array(
    [0.001, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99]
)  # fmt: skip
# Degrees of freedom of the Student-t of unit variance that the past rows are drawn towards.
PRIOR_FREEDOM = 6.0
PRIOR_OUTCOMES = 40.0
# Most past rows that a distribution is made of, a quarter of a horizon apart.
MOST_ROWS, ROWS_PER_HORIZON = 2000, 4
# Centres of mass, in bars, of the correlations and of the usual exposure.
CORRELATION_CENTRE, EXPOSURE_CENTRE = 100.0, 250.0
# Correlations begin at 1/2, which counts for a few bars; standardised returns beyond the outlier count as it.
FIRST_BARS, OUTLIER = 4.0, 4.0

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]
compiled, inlined = cast(tuple[Decorate, Decorate], decorators())


class Market(NamedTuple):
    """The bars, measured and with their variance forecasts: the part of a forecast that does not depend on weights.

    :param moves: of the bars.
    :param grid: ``[G]`` horizons in bars.
    :param deviation: ``[T, A, G]`` standard deviation of the return over each horizon, forecast at each close.
    :param outcomes: ``[T, A, G]`` return over the horizon that begins at each close, divided by its forecast deviation; NaN
        where the bars end before.
    :param standard: ``[T, A]`` returns of the bars, each divided by the deviation that was forecast for it.
    """

    moves: Moves
    grid: Ints
    deviation: Floats
    outcomes: Floats
    standard: Floats


def observe_market(bars: pd.DataFrame, longest: int) -> Market:
    """Measure the bars and forecast their variances.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param longest: horizon that will be asked for, in bars.
    """
    moves, grid = measure(bars), horizon_grid(longest)
    deviation = np.sqrt(forecast_variance(moves, grid) * grid)
    total = np.concatenate([np.zeros((1, moves.returns.shape[1])), np.cumsum(moves.returns, axis=0)])
    outcomes = np.full(deviation.shape, np.nan)
    for g, tau in enumerate(grid):
        outcomes[:-tau, :, g] = total[1 + tau :] - total[1:-tau]
    # Prices that have not moved yet have a deviation of 0, and say nothing about later outcomes.
    units = np.where(deviation > 0.0, deviation, np.nan)
    outcomes /= units
    standard = np.full(moves.returns.shape, np.nan)
    standard[1:] = moves.returns[1:] / units[:-1, :, 0]
    # One outlier must not decide the correlations of a hundred bars.
    return Market(moves, grid, deviation, outcomes, np.clip(standard, -OUTLIER, OUTLIER))


class PredictionCache:
    """Predictions of past closes, for live trading, where bars are added one by one.

    A prediction is made of all past outcomes, and is most of the work of a forecast; everything else is a pass over the bars.
    It depends on bars and weights up to its close only. So it stays as long as these do: what it was made from is compared,
    and from the first row that differs all are made anew.
    """

    def __init__(self) -> None:
        self._inputs: list[NDArray[Any]] = []  # [T, ...] each
        self._made: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._predicted: Floats = np.zeros((0, len(LEVELS)))

    def take(self, inputs: list[NDArray[Any]]) -> tuple[NDArray[np.bool_], Floats]:
        """Return what is known of the rows with these inputs: ``[T]`` true where there is a prediction, and ``[T, L]``.

        :param inputs: everything that a row is predicted from, ``[T, ...]`` each.
        """
        rows = len(inputs[0])
        same = min(len(self._made), rows)
        for before, now in zip(self._inputs, inputs, strict=False):
            if not same or before.shape[1:] != now.shape[1:]:
                same = 0
                break
            # Compared as bits: NaN is equal to itself.
            different = (before[:same].view(np.int64) != now[:same].view(np.int64)).reshape(same, -1).any(axis=1)
            same = int(np.argmax(different)) if different.any() else same
        made, predicted = np.zeros(rows, np.bool_), np.full((rows, len(LEVELS)), np.nan)
        made[:same], predicted[:same] = self._made[:same], self._predicted[:same]
        return made, predicted

    def keep(self, inputs: list[NDArray[Any]], made: NDArray[np.bool_], predicted: Floats) -> None:
        """Remember the predictions of rows with these inputs."""
        self._inputs, self._made, self._predicted = inputs, made, predicted


def forecast_returns(
    market: Market,
    weights: ArrayLike,
    horizons: ArrayLike,
    *,
    first: int = 0,
    rows: NDArray[np.bool_] | None = None,
    cache: PredictionCache | None = None,
) -> Floats:
    """Predict the log return of an account over the next bars: quantiles ``[T, L]`` at :data:`LEVELS`.

    :param market: from :func:`observe_market`.
    :param weights: ``[T, A]`` held after the decision at each close.
    :param horizons: ``[T]`` bars to predict, at least 1.
    :param first: row of the first decision: the usual exposure of the account is counted from there.
    :param rows: ``[T]`` true where a prediction is asked for; None is everywhere.
    :param cache: of predictions that an earlier call has made over the first of these bars; those are not made again.
    :return: NaN where none is asked for, and where there are too few bars before.
    """
    held, bars_ahead = np.ascontiguousarray(weights, np.float64), np.asarray(horizons, np.int64)
    shape = market.deviation.shape[:2]
    require(held.shape == shape, "the shape of weights", held.shape, f"{shape}, as the bars")
    require(bars_ahead.shape == shape[:1] and bool((bars_ahead >= 1).all()), "horizons", bars_ahead, "at least 1 per bar")
    prior = stdtrit(PRIOR_FREEDOM, LEVELS) / math.sqrt(PRIOR_FREEDOM / (PRIOR_FREEDOM - 2.0))
    places = nearest_on_grid(bars_ahead, market.grid)
    exposures = _exposures(held, market.standard, market.deviation, places, first)
    asked = np.ones(shape[0], np.bool_) if rows is None else rows
    fixed = (bars_ahead, places, market.grid, market.deviation, market.outcomes, *exposures, LEVELS, prior)
    if cache is None:
        return np.asarray(_predict(*fixed, asked))
    # Deviations and outcomes follow from returns and measured variances; the grid may have become longer.
    inputs = [bars_ahead, market.moves.returns, market.moves.variance, *exposures]
    made, known = cache.take(inputs)
    predicted = np.where((asked & ~made)[:, None], _predict(*fixed, asked & ~made), known)
    cache.keep(inputs, made | asked, predicted)
    return np.where(asked[:, None], predicted, np.nan)


@inlined
def _portfolio_variance(weights, deviation, products):
    """Return w' D C D w, with the correlations C that the averaged products of standardised returns stand for."""
    total, assets = 0.0, len(weights)
    for a in range(assets):
        if weights[a] != 0.0:
            scaled = weights[a] * deviation[a] / math.sqrt(products[a, a])
            for b in range(assets):
                if weights[b] != 0.0:
                    total += scaled * products[a, b] * weights[b] * deviation[b] / math.sqrt(products[b, b])
    return max(total, 0.0)


@compiled
def _exposures(held, standard, deviation, places, first):
    """Return, by bar, what a forecast needs of the positions.

    These are: the exposure, its persistence from bar to bar, and its usual value; the positions that are forecast, the usual
    ones for a flat account, and their variance over the horizon. Exposure is the variance of the positions divided by the mean
    variance of the assets. Correlations are exponential averages; only those of the present bar are kept.
    """
    n, assets = held.shape
    exposure, persistence, usual, variance = np.zeros(n), np.ones(n), np.zeros(n), np.zeros(n)
    forecast = np.zeros((n, assets))
    correlation_keep, keep = 1.0 - 1.0 / (1.0 + CORRELATION_CENTRE), 1.0 - 1.0 / (1.0 + EXPOSURE_CENTRE)
    products = np.full((assets, assets), 0.5 * FIRST_BARS)
    for a in range(assets):
        products[a, a] = FIRST_BARS
    mass, total, moved, pairs, before = 0.0, 0.0, 0.0, 0.0, 0.0
    gross = np.zeros(assets)
    for t in range(n):
        for a in range(assets):
            if not math.isnan(standard[t, a]):
                for b in range(assets):
                    if not math.isnan(standard[t, b]):
                        products[a, b] = correlation_keep * products[a, b] + standard[t, a] * standard[t, b]
        if t < first:
            continue
        market, known = 0.0, 0
        for a in range(assets):
            if not math.isnan(deviation[t, a, 0]):
                market += deviation[t, a, 0] ** 2
                known += 1
        value = before
        if known and market > 0.0:
            value = _portfolio_variance(held[t], deviation[t, :, 0], products) / (market / known)
            if math.isnan(value):
                value = before
        mass = keep * mass + 1.0
        total = keep * total + value
        mean = total / mass
        if t > first:
            moved = keep * moved + (value - mean) * (before - mean)
            pairs = keep * pairs + (before - mean) ** 2
        for a in range(assets):
            gross[a] = keep * gross[a] + held[t, a]
            forecast[t, a] = held[t, a] if value > 0.0 else gross[a] / mass
        exposure[t], usual[t] = value, mean
        variance[t] = _portfolio_variance(forecast[t], deviation[t, :, places[t]], products)
        if pairs > 1e-6 * mass * mean * mean and pairs > 0.0:
            persistence[t] = min(max(moved / pairs, 0.0), 1.0)
        before = value
    return exposure, persistence, usual, forecast, variance


@compiled
def _predict(
    horizons, places, grid, deviation, outcomes, exposure, persistence, usual, forecast, variances, levels, prior, asked
):  # fmt: skip
    """Return the predicted quantiles, ``[T, L]``."""
    n, assets = forecast.shape
    result = np.full((n, len(levels)), np.nan)
    rows = np.empty(MOST_ROWS)
    for t in range(n):
        if not asked[t]:
            continue
        g, tau = places[t], horizons[t]
        step = max(grid[g] // ROWS_PER_HORIZON, 1)
        # Deviations are forecast for the horizon of the grid, and grow with the root of time from there.
        stretch = math.sqrt(tau / grid[g])
        missing, convexity = False, 0.0
        direction, variance = forecast[t], variances[t]
        for a in range(assets):
            missing = missing or (direction[a] != 0.0 and math.isnan(deviation[t, a, g]))
        if missing:
            continue
        if variance == 0.0 or usual[t] == 0.0:
            result[t] = 0.0
            continue
        now = exposure[t] if exposure[t] > 0.0 else usual[t]
        decay = persistence[t]
        share = 1.0 if decay >= 1.0 else (1.0 - decay**tau) / (tau * (1.0 - decay))
        expected = usual[t] + (exposure[t] - usual[t]) * share
        scale = math.sqrt(variance) * stretch * math.sqrt(expected / now)
        for a in range(assets):
            if direction[a] != 0.0:
                convexity += direction[a] * deviation[t, a, g] ** 2
        convexity = 0.5 * (convexity - variance) * stretch**2 * expected / now
        count, s = 0, t - grid[g]
        while s >= 0 and count < MOST_ROWS:
            value = 0.0
            for a in range(assets):
                if direction[a] != 0.0 and deviation[t, a, g] > 0.0:  # what never moved has no outcomes, and no part in this
                    value += direction[a] * deviation[t, a, g] * outcomes[s, a, g]
            if math.isnan(value):
                break
            rows[count] = value / math.sqrt(variance)
            count += 1
            s -= step
        past = np.sort(rows[:count])
        independent = count * step / grid[g]
        trust = independent / (independent + PRIOR_OUTCOMES)
        for k in range(len(levels)):
            quantile = prior[k]
            if count:
                place = min(max(levels[k] * count - 0.5, 0.0), count - 1.0)
                left = int(place)
                right = min(left + 1, count - 1)
                seen = past[left] + (place - left) * (past[right] - past[left])
                quantile = trust * seen + (1.0 - trust) * prior[k]
            result[t, k] = scale * quantile + convexity
    return result
