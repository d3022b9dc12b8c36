"""The compiled inside of the bootstrap. Everything numba compiles stands in this file, because its cache looks no further.

A resample is drawn by the stationary bootstrap of Politis and Romano (1994): blocks of geometric length that start anywhere
and wrap around the end. One draw of indices serves all strategies, so that they stay paired bar by bar.
"""

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from numpy.typing import NDArray

# The columns of what `resample_metrics` fills in.
SUM, SQUARES, DOWNSIDE, LOG_GROWTH, MAX_DRAWDOWN, ULCER_SQUARES, FIRST_TAIL = range(7)


def _draw(indices: NDArray[Any], restart: float, generator: np.random.Generator) -> None:
    """Fill ``indices[n]`` with one resample; at each bar a new block begins with probability `restart`."""
    n = len(indices)
    at = np.int64(generator.random() * n)
    for t in range(n):
        if t > 0:
            # One uniform number decides both: below `restart` it is uniform again after division.
            u = generator.random()
            at = np.int64(u / restart * n) if u < restart else at + 1
            if at >= n:
                at -= n
        indices[t] = at


_draw_compiled = cast(Callable[..., None], numba.njit(cache=True)(_draw))


def _indices(out: NDArray[Any], restart: float, generator: np.random.Generator) -> None:
    """Fill ``out[B, n]``."""
    for b in range(len(out)):
        _draw_compiled(out[b], restart, generator)


def _means(values: NDArray[Any], restart: float, generator: np.random.Generator, out: NDArray[Any]) -> None:
    """Means ``out[B, K]`` of resamples of ``values[n, K]``."""
    n, columns = values.shape
    indices = np.empty(n, np.int64)
    for b in range(len(out)):
        _draw_compiled(indices, restart, generator)
        out[b] = 0.0
        for t in range(n):
            row = values[indices[t]]
            for k in range(columns):
                out[b, k] += row[k]
        for k in range(columns):
            out[b, k] /= n


def _metrics(
    returns: NDArray[Any],
    centres: NDArray[Any],
    order: NDArray[Any],
    tails: NDArray[Any],
    restart: float,
    generator: np.random.Generator,
    out: NDArray[Any],
) -> None:
    """Fill ``out[B, S, FIRST_TAIL + A]``: one row of sums per resample and strategy.

    :param returns: ``[S, n]``.
    :param centres: ``[S]``, subtracted before squaring so that no digits cancel.
    :param order: ``[S, n]``, the bars of each strategy from its worst return to its best.
    :param tails: ``[A]``, tail shares; the tail mean is found from how often each bar was drawn, without sorting again.
    """
    strategies, n = returns.shape
    indices, counts = np.empty(n, np.int64), np.empty(n, np.int64)
    logs = np.log1p(returns)
    for b in range(len(out)):
        _draw_compiled(indices, restart, generator)
        counts[:] = 0
        for t in range(n):
            counts[indices[t]] += 1
        for s in range(strategies):
            total, squares, downside, growth = 0.0, 0.0, 0.0, 0.0
            below_peak, deepest, ulcer = 1.0, 1.0, 0.0  # equity over its highest so far
            for t in range(n):
                r = returns[s, indices[t]]
                below_peak = min(below_peak * (1.0 + r), 1.0)
                deepest = min(deepest, below_peak)
                ulcer += (1.0 - below_peak) ** 2
            for i in range(n):  # what does not depend on the order is summed over the bars in theirs
                c, r = counts[i], returns[s, i]
                x = r - centres[s]
                total += c * x
                squares += c * x * x
                growth += c * logs[s, i]
                low = min(r, 0.0)
                downside += c * low * low
            out[b, s, SUM], out[b, s, SQUARES], out[b, s, DOWNSIDE] = total, squares, downside
            out[b, s, LOG_GROWTH], out[b, s, MAX_DRAWDOWN], out[b, s, ULCER_SQUARES] = growth, 1.0 - deepest, ulcer
            for a in range(len(tails)):
                mass, left, tail = tails[a] * n, tails[a] * n, 0.0
                for i in range(n):
                    bar = order[s, i]
                    taken = min(float(counts[bar]), left)
                    tail += taken * returns[s, bar]
                    left -= taken
                    if left <= 0.0:
                        break
                out[b, s, FIRST_TAIL + a] = tail / mass


def _paths(logs: NDArray[Any], restart: float, generator: np.random.Generator, at: NDArray[Any], out: NDArray[Any]) -> None:
    """Log equity ``out[B, P]`` of resamples of ``logs[n]`` after ``at[P]`` bars each, increasing."""
    n = len(logs)
    indices = np.empty(n, np.int64)
    for b in range(len(out)):
        _draw_compiled(indices, restart, generator)
        total, t = 0.0, 0
        for p in range(len(at)):
            while t < at[p]:
                total += logs[indices[t]]
                t += 1
            out[b, p] = total


# Sums may be reordered, which vector code needs.
_compile = numba.njit(cache=True, fastmath={"reassoc", "nsz", "contract"})
resample_indices = cast(Callable[..., None], numba.njit(cache=True)(_indices))
resample_means = cast(Callable[..., None], _compile(_means))
resample_metrics = cast(Callable[..., None], _compile(_metrics))
resample_paths = cast(Callable[..., None], numba.njit(cache=True)(_paths))
