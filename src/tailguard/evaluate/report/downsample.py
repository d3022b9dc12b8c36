"""Long series cut down to what a screen can show, without losing a peak or a trough."""

import numpy as np
from numpy.typing import NDArray

from tailguard.evaluate.stats.series import Floats
from tailguard.validation import require

BUCKETS = 600  # up to twice as many points are drawn: one per pixel of a chart, and some to look closer


def keep(values: Floats, buckets: int = BUCKETS) -> NDArray[np.int64]:
    """Positions to draw: the first, the last, and the lowest and highest of each bucket, in order.

    :param values: ``[n]``; NaN is never the lowest or highest.
    :param buckets: stretches of about equal length, at least 1.
    """
    require(buckets >= 1, "buckets", buckets, "at least 1")
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n)
    edges = np.linspace(0, n, buckets + 1).astype(np.int64)
    starts, widths = edges[:-1], np.diff(edges)
    # Buckets differ by one in length: the shorter ones repeat their last entry to make a rectangle.
    inside = starts[:, None] + np.minimum(np.arange(widths.max()), widths[:, None] - 1)
    block = values[inside]
    lows = np.where(np.isnan(block), np.inf, block).argmin(axis=1)
    highs = np.where(np.isnan(block), -np.inf, block).argmax(axis=1)
    rows = np.arange(buckets)
    return np.unique(np.concatenate([[0, n - 1], inside[rows, lows], inside[rows, highs]]))


def envelope(values: Floats, buckets: int = BUCKETS) -> tuple[NDArray[np.int64], Floats, Floats, Floats]:
    """The middle position, mean, lowest and highest of each bucket, for series that jump, such as positions.

    :param values: ``[n]``, finite.
    :param buckets: at most as many as there are values are used.
    """
    require(buckets >= 1, "buckets", buckets, "at least 1")
    edges = np.linspace(0, len(values), min(buckets, len(values)) + 1).astype(np.int64)
    starts = edges[:-1]
    means = np.add.reduceat(values, starts) / np.diff(edges)
    return (starts + edges[1:] - 1) // 2, means, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
