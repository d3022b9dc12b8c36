"""Forecasts of the variance of returns over the next bars, from the whole range of each bar and not only from its close.

The variance of a bar is measured by the gap before it and by its range (Garman and Klass), several times as precise as the
squared return. Its averages over 1 to 1024 bars forecast the variance of the next tau bars (Corsi's HAR, with exponential
averages as in Bollerslev, Hood, Huss and Pedersen, *Risk everywhere*). The weights of the averages start at a guess that
depends on tau only and are fitted to the past of the asset by ridge regression, bar by bar. Nothing looks at later bars.

Written out, for one asset, with v_t the measured variance of bar t and E_k its averages:

    v_t = (log O_t / C_{t-1})^2 + (log H_t / L_t)^2 / 2 - (2 log 2 - 1) (log C_t / O_t)^2,
    forecast_t(tau) = b_t sum_k beta_k(tau) E_{k,t},    b_t = sum r^2 / sum v, slowly averaged.

A missing bar (NaN) changes no average, and bars before the first that moves count for nothing from then on. Variances are per
bar.

The same forecast, over the next few bars, sets how much is held where an account is averse to its tail:

    scale_t = min(1, (median of all forecasts up to t / forecast_t)^power),    both as standard deviations,

so 1 while volatility is usual or low, and less the more it exceeds that. Power 2 is what maximises mean - c variance where the
mean return does not depend on volatility.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.jit import decorators
from tailguard.market.bars import PRICES, iterate_symbols

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Centres of mass of the averages, in bars; the last regressor is the mean of the whole past.
CENTRES = np.array([1.0, 4.0, 16.0, 64.0, 256.0, 1024.0])
# Share of the mean of the whole past in the first guess, and the width of the guess around its centre in logarithms.
LONG_RUN_SHARE, GUESS_WIDTH = 0.08, 1.3
# Bars that are measured before anything is forecast.
FEWEST_BARS = 60
# Independent outcomes that the first guess of the weights counts for.
RIDGE = 30.0
# Bars between two fits.
FIT_INTERVAL = 21
# A fit may move the forecast by this factor at most.
FIT_LIMIT = 2.5
# Centre of mass of the ratio of squared returns to measured variances.
BIAS_CENTRE = 250.0
# Measured variances of bars that do not move are raised to this share of their long-run mean.
QUIET = 1e-3
# Bars ahead of the forecast that scales exposure: one bar alone is noisier, and more trading.
SCALE_HORIZON = 4
# Exposure is raised only by more than this share of it, and lowered only by more than that: costs are part of the return.
RISE, FALL = 0.25, 0.1

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]
compiled, inlined = cast(tuple[Decorate, Decorate], decorators())


class Moves(NamedTuple):
    """The returns and measured variances of the bars, by asset.

    :param returns: ``[T, A]`` log returns from close to close, 0 for a bar that is missing and for the first.
    :param gaps: ``[T, A]`` the part of it before the open.
    :param variance: ``[T, A]`` measured by gap and range; NaN for a bar that is missing and for the first.
    """

    returns: Floats
    gaps: Floats
    variance: Floats


def measure(bars: pd.DataFrame) -> Moves:
    """Measure the returns and variances of bars.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    """
    columns = []
    for _, table in iterate_symbols(bars):
        prices = table[list(PRICES)].to_numpy(dtype=np.float64)
        there = (np.isfinite(prices) & (prices > 0.0)).all(axis=1)
        opens, high, low, close = np.log(np.where(there[:, None], prices, np.nan)).T
        before = pd.Series(close).ffill().shift(1).to_numpy()
        gap = opens - before
        inside = 0.5 * (high - low) ** 2 - (2.0 * math.log(2.0) - 1.0) * (close - opens) ** 2
        columns.append((np.nan_to_num(close - before), np.nan_to_num(gap), gap**2 + np.maximum(inside, 0.0)))
    return Moves(*(np.stack(parts, axis=1) for parts in zip(*columns, strict=True)))


def horizon_grid(longest: int) -> Ints:
    """Return the horizons that forecasts are made for: 1, 2, 3, 4, 6, 8, 11, ... up to the first that is not below the longest.

    So the neighbours of a horizon are the same whatever is the longest.
    """
    steps = np.unique(np.rint(2.0 ** (np.arange(2 * math.ceil(math.log2(longest)) + 2) / 2.0)).astype(np.int64))
    return np.asarray(steps[: np.searchsorted(steps, longest) + 1])


def nearest_on_grid(horizons: Ints, grid: Ints) -> Ints:
    """Return the place on the grid that is nearest to each horizon, in logarithms."""
    middles = np.sqrt(grid[1:] * grid[:-1].astype(np.float64))
    return np.asarray(np.searchsorted(middles, horizons))


def first_guess(grid: Ints) -> Floats:
    """Return the weights ``[G, K + 1]`` of the averages before anything is known: longer averages for longer horizons."""
    centre = np.log(1.5 + 0.4 * grid)[:, None]
    weights = np.exp(-0.5 * ((np.log(CENTRES + 0.5) - centre) / GUESS_WIDTH) ** 2)
    weights *= (1.0 - LONG_RUN_SHARE) / weights.sum(axis=1, keepdims=True)
    return np.concatenate([weights, np.full((len(grid), 1), LONG_RUN_SHARE)], axis=1)


def forecast_variance(moves: Moves, grid: Ints) -> Floats:
    """Forecast the variance per bar over the next bars, ``[T, A, G]``; NaN until there are enough bars.

    :param moves: from :func:`measure`.
    :param grid: ``[G]`` horizons in bars, rising.
    """
    assets = moves.variance.shape[1]
    guess = first_guess(grid)
    forecasts = [_forecast_asset(moves.variance[:, a].copy(), moves.returns[:, a].copy(), grid, guess) for a in range(assets)]
    return np.stack(forecasts, axis=1)


def exposure_scale(bars: pd.DataFrame, power: float | None) -> Floats | None:
    """Return the share ``[T, A]`` of every position that is held after each close, in [0, 1]: less where volatility is high.

    Row t depends on bars up to t only. Nothing is held before there is a forecast.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param power: see above; 0 or None scales nothing, and the result is None.
    """
    if not power:
        return None
    deviation = np.sqrt(forecast_variance(measure(bars), np.array([SCALE_HORIZON]))[:, :, 0])
    usual = pd.DataFrame(deviation).expanding().median().to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.minimum(1.0, (usual / deviation) ** power)
    share[deviation == 0.0] = 1.0
    return np.asarray(_without_small_changes(np.nan_to_num(share, nan=0.0), RISE, FALL))


@compiled
def _without_small_changes(shares, rise, fall):
    """Return shares ``[T, A]`` that stay as they are until they would change by enough, or to 0 or 1."""
    kept = shares.copy()
    for t in range(1, len(shares)):
        for a in range(shares.shape[1]):
            before, now = kept[t - 1, a], shares[t, a]
            moves = now < before * (1.0 - fall) or now > before * (1.0 + rise) or now == 0.0 or now == 1.0
            kept[t, a] = now if moves else before
    return kept


@compiled
def _forecast_asset(variance, returns, grid, guess):
    """Forecast one asset: averages, then one recursive ridge regression per horizon. ``[T, G]``."""
    n, horizons, k = len(variance), len(grid), guess.shape[1]
    averages = np.empty((n, k))
    total = np.zeros(n + 1)  # of the measured variances, or of a recent average where a bar is missing
    forecasts = np.full((n, horizons), np.nan)
    sums, masses = np.zeros(k), np.zeros(k)
    squares, measured, seen = 0.0, 0.0, 0
    keep = 1.0 - 1.0 / (1.0 + CENTRES)
    keep_bias = 1.0 - 1.0 / (1.0 + BIAS_CENTRE)
    beta = guess.copy()
    products, moments = np.zeros((horizons, k, k)), np.zeros((horizons, k))
    for t in range(n):
        v = variance[t]
        there = not math.isnan(v)
        if there:
            if v > 0.0 and sums[k - 1] == 0.0:  # the first bar that moves: those before, if any, say nothing about it
                seen = 0
                masses[:] = 0.0
            seen += 1
            if seen > 1:
                v = max(v, QUIET * sums[k - 1] / masses[k - 1])
            for j in range(k):
                factor = keep[j] if j < k - 1 else 1.0
                sums[j] = factor * sums[j] + v
                masses[j] = factor * masses[j] + 1.0
            squares = keep_bias * squares + returns[t] ** 2
            measured = keep_bias * measured + v
        total[t + 1] = total[t] + (v if there else (sums[2] / masses[2] if seen else 0.0))
        for j in range(k):
            averages[t, j] = sums[j] / masses[j] if seen else np.nan
        if seen < FEWEST_BARS:
            continue
        bias = (squares + 20.0 * measured / seen) / (measured + 20.0 * measured / seen) if measured > 0.0 else 1.0
        for g in range(horizons):
            tau = grid[g]
            origin = t - tau
            if origin >= FEWEST_BARS and not math.isnan(averages[origin, 0]):
                # The outcome of the forecast made at `origin`; errors are in units of what the guess said there.
                unit = 0.0
                for j in range(k):
                    unit += guess[g, j] * averages[origin, j]
                if unit > 0.0:
                    ratio = min((total[t + 1] - total[origin + 1]) / tau / unit, 10.0)
                    for i in range(k):
                        x = averages[origin, i] / unit
                        for j in range(i + 1):
                            products[g, i, j] += x * averages[origin, j] / unit
                        moments[g, i] += x * (ratio - 1.0)
                if t % FIT_INTERVAL == 0:
                    system = np.zeros((k, k))
                    for i in range(k):
                        for j in range(i + 1):
                            system[i, j] = system[j, i] = products[g, i, j]
                        system[i, i] += RIDGE * tau
                    beta[g] = guess[g] + np.linalg.solve(system, moments[g].copy())
            fitted, prior = 0.0, 0.0
            for j in range(k):
                fitted += beta[g, j] * averages[t, j]
                prior += guess[g, j] * averages[t, j]
            forecasts[t, g] = bias * min(max(fitted, prior / FIT_LIMIT), prior * FIT_LIMIT)
    return forecasts
