"""What the critics minimise, with its gradient, in one compiled pass over the samples; see laws.py and quantiles.py.

    mean:       sum_m w_m (v_m - y_m)^2 / 2
    quantiles:  sum_m w_m mean_i sum_j p_j u (tau_i - 1{u < 0}),   u = y_mj - q_mi

The second is the pinball loss, kappa = 0: tau S - S_below with S the mean of u and S_below that of min(u, 0), and the slope
in q_i is the mass of the targets below it times 1 - tau less the mass above it times tau. Targets that equal q_i count in
neither. Samples of weight 0 are not even looked at.

Every target meets every quantile. A search in sorted ones is slower: its steps cannot be told in advance, and a vector unit
does eight pairs meanwhile.
"""

import numpy as np
from numpy.typing import NDArray

from tailguard.optim.kernels import compiled, inlined

Floats = NDArray[np.float32]

ZERO, ONE = np.float32(0.0), np.float32(1.0)
# Targets that are looked at together, which spares three of four passes over the sums; and floats in a cache line.
TOGETHER, LINE = 4, 16


@compiled
def mean_loss(values: Floats, targets: Floats, weights: Floats, scale: float, slopes: Floats) -> float:
    """The squared loss of ``values[M, 1]`` against ``targets[M, 1]``; fills its derivative times `scale`, ``slopes[M, 1]``."""
    total = 0.0
    for m in range(len(weights)):
        error = values[m, 0] - targets[m, 0]
        slopes[m, 0] = np.float32(scale) * weights[m] * error if weights[m] != ZERO else ZERO
        if weights[m] != ZERO:
            total += weights[m] * np.float64(error) * error
    return 0.5 * total


@inlined
def _padded(values: Floats, multiple: int) -> Floats:
    """Followed by zeros up to a length that is a multiple of `multiple`."""
    longer = np.zeros(-(-len(values) // multiple) * multiple, np.float32)
    longer[: len(values)] = values
    return longer


@inlined
def _count(y: Floats, p: Floats, q: Floats, below: Floats, negative: Floats, above: Floats) -> None:
    """Add up for each q the mass of the targets below it, p min(y - q, 0), and the mass of the targets above it."""
    for j in range(0, len(y), TOGETHER):
        y0, y1, y2, y3 = y[j], y[j + 1], y[j + 2], y[j + 3]
        p0, p1, p2, p3 = p[j], p[j + 1], p[j + 2], p[j + 3]
        for i in range(len(q)):
            u0, u1, u2, u3 = y0 - q[i], y1 - q[i], y2 - q[i], y3 - q[i]
            low0, low1 = p0 if u0 < ZERO else ZERO, p1 if u1 < ZERO else ZERO
            low2, low3 = p2 if u2 < ZERO else ZERO, p3 if u3 < ZERO else ZERO
            below[i] += (low0 + low1) + (low2 + low3)
            negative[i] += (low0 * u0 + low1 * u1) + (low2 * u2 + low3 * u3)
        for i in range(len(q)):
            high0, high1 = p0 if y0 > q[i] else ZERO, p1 if y1 > q[i] else ZERO
            high2, high3 = p2 if y2 > q[i] else ZERO, p3 if y3 > q[i] else ZERO
            above[i] += (high0 + high1) + (high2 + high3)


@compiled
def quantile_loss(
    quantiles: Floats, targets: Floats, masses: Floats, levels: Floats, weights: Floats, scale: float, slopes: Floats
) -> float:
    """The pinball loss of ``quantiles[M, N]`` against ``targets[M, J]`` of masses ``[J]``; fills ``slopes[M, N]``."""
    (rows, n), whole, total = quantiles.shape, masses.sum(), 0.0
    p, q = _padded(masses, TOGETHER), _padded(quantiles[0], LINE)  # targets of no mass, quantiles that nobody reads
    y, below, negative, above = np.zeros_like(p), np.empty_like(q), np.empty_like(q), np.empty_like(q)
    for m in range(rows):
        weight, slope = weights[m], slopes[m]
        if weight == ZERO:
            slope[:] = ZERO
            continue
        below[:], negative[:], above[:], mean = ZERO, ZERO, ZERO, ZERO
        for i in range(n):
            q[i] = quantiles[m, i]
        for j in range(len(masses)):
            y[j] = targets[m, j]
            mean += p[j] * y[j]
        _count(y, p, q, below, negative, above)
        share, loss = np.float32(scale / n) * weight, ZERO
        for i in range(n):
            slope[i] = share * ((ONE - levels[i]) * below[i] - levels[i] * above[i])
        for i in range(n):
            loss += levels[i] * (mean - whole * q[i]) - negative[i]
        total += np.float64(weight) * loss / n
    return total


# Rows of outputs: means beside log standard deviations that all samples share.


@inlined
def _beside_constant(left: Floats, constant: Floats, out: Floats) -> None:
    """``out = [left, constant]``, the same constants ``[A]`` in every row."""
    size = left.shape[1]
    for m in range(len(left)):
        for a in range(size):
            out[m, a], out[m, size + a] = left[m, a], constant[a]


@compiled
def beside_constant(left: Floats, constant: Floats, out: Floats) -> None:
    """``out = [left, constant]``, the same constants ``[A]`` in every row."""
    _beside_constant(left, constant, out)


@compiled
def draw_gaussian(means: Floats, log_std: Floats, noise: Floats, outputs: Floats, actions: Floats) -> None:
    """The row of a rollout: ``outputs = [means, log_std]`` and ``actions = means + exp(log_std) noise``."""
    _beside_constant(means, log_std, outputs)
    for a in range(len(log_std)):
        std = np.exp(log_std[a])
        for b in range(len(means)):
            actions[b, a] = means[b, a] + std * noise[b, a]


@compiled
def apart_from_constant(slopes: Floats, into_left: Floats, into_constant: Floats) -> None:
    """The way back: the gradient of `left`, and that of the constants, which is a sum over all rows."""
    size = into_left.shape[1]
    for a in range(size):
        total = 0.0
        for m in range(len(slopes)):
            into_left[m, a] = slopes[m, a]
            total += slopes[m, size + a]
        into_constant[a] = total
