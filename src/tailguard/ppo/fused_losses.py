"""What the critics minimise, with its gradient, in one compiled pass over the samples; see laws.py and quantiles.py.

    mean:       sum_m w_m (v_m - y_m)^2 / 2
    quantiles:  sum_m w_m mean_i sum_j p_j u (tau_i - 1{u < 0}),   u = y_mj - q_mi

The second is the pinball loss, kappa = 0: tau S - S_below with S the mean of u and S_below that of min(u, 0), and the slope
in q_i is the mass of the targets below it times 1 - tau less the mass above it times tau. Targets that equal q_i count in
neither. Samples of weight 0 are not even looked at.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Function = TypeVar("Function", bound=Callable[..., Any])

ZERO, ONE = np.float32(0.0), np.float32(1.0)


def compiled(function: Function) -> Function:
    """Compile for vector units: sums may be reordered; NaN and infinities keep their meaning."""
    return cast(Function, numba.njit(cache=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"})(function))


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


@compiled
def quantile_loss(
    quantiles: Floats, targets: Floats, masses: Floats, levels: Floats, weights: Floats, scale: float, slopes: Floats
) -> float:
    """The pinball loss of ``quantiles[M, N]`` against ``targets[M, J]`` of masses ``[J]``; fills ``slopes[M, N]``."""
    (rows, n), whole, total = quantiles.shape, masses.sum(), 0.0
    below, above, negative = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.float32)
    for m in range(rows):
        weight, q, slope = weights[m], quantiles[m], slopes[m]
        below[:], above[:], negative[:] = ZERO, ZERO, ZERO
        if weight == ZERO:
            slope[:] = ZERO
            continue
        mean = ZERO
        for j in range(len(masses)):
            y, p = targets[m, j], masses[j]
            mean += p * y
            for i in range(n):
                u = y - q[i]
                low = p if u < ZERO else ZERO
                below[i] += low
                negative[i] += low * u
            for i in range(n):
                above[i] += p if y > q[i] else ZERO
        share, loss = np.float32(scale / n) * weight, ZERO
        for i in range(n):
            slope[i] = share * ((ONE - levels[i]) * below[i] - levels[i] * above[i])
        for i in range(n):
            loss += levels[i] * (mean - whole * q[i]) - negative[i]
        total += np.float64(weight) * loss / n
    return total


# Rows of outputs: means beside log standard deviations that all samples share.


@compiled
def beside_constant(left: Floats, constant: Floats, out: Floats) -> None:
    """``out = [left, constant]``, the same constants ``[A]`` in every row."""
    size = left.shape[1]
    for m in range(len(left)):
        for a in range(size):
            out[m, a], out[m, size + a] = left[m, a], constant[a]


@compiled
def draw_gaussian(means: Floats, log_std: Floats, noise: Floats, outputs: Floats, actions: Floats) -> None:
    """The row of a rollout: ``outputs = [means, log_std]`` and ``actions = means + exp(log_std) noise``."""
    beside_constant(means, log_std, outputs)
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
