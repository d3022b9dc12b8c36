"""Compiled loops over flat float32 arrays on the CPU: one pass where PyTorch would make five to ten.

Everything compiled lives in this one file, because numba's cache on disk looks at the file of a function only. Sums may be
reordered, which vector code needs. Vector code also needs loops over whole arrays: a loop from a start to an end that come out
of an array stays scalar, so segments are sliced first.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

# The comparisons of a running minimum cannot be reordered, but this many independent ones can run side by side.
LANES = 64

# Columns of the sums of a gradient tensor, and of the table of running means.
SUM, SQUARES, MEAN_SQUARES, LARGEST = range(4)
FIRST, SECOND, ENERGY, MASS, SIGNAL = range(5)


def compiled(function: Function) -> Function:
    """Compile for vector units; NaN and infinities keep their meaning."""
    decorate = numba.njit(cache=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"})
    return cast(Function, decorate(function))


# ------------------------------------------------------------------------------------------------------- optimizers


@compiled
def update_utility(
    utility: Floats, gradient: Floats, weights: Floats, beta: np.float32, rate: np.float32
) -> tuple[float, float]:
    """u <- beta u - rate * gradient * weight, rate = 1 - beta; returns the smallest and the largest u."""
    low, high = np.full(LANES, np.float32(np.inf)), np.full(LANES, np.float32(-np.inf))
    whole = len(utility) // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            i = start + lane
            u = beta * utility[i] - rate * (gradient[i] * weights[i])
            utility[i] = u
            low[lane] = min(low[lane], u)
            high[lane] = max(high[lane], u)
    for i in range(whole, len(utility)):
        u = beta * utility[i] - rate * (gradient[i] * weights[i])
        utility[i] = u
        low[0] = min(low[0], u)
        high[0] = max(high[0], u)
    return float(low.min()), float(high.max())


@compiled
def adam_direction(
    direction: Floats,
    first: Floats,
    second: Floats,
    gradient: Floats,
    rate1: np.float32,
    beta2: np.float32,
    rate2: np.float32,
    scale: np.float32,
    eps: np.float32,
) -> float:
    """Update both moments and fill direction = scale * first / (sqrt(second) + eps); returns its sum of squares.

    The rates are 1 - beta, rounded once: a difference of two float32 would be wrong in the fifth digit.
    """
    squares = np.float32(0.0)
    for i in range(len(direction)):
        g = gradient[i]
        m = first[i] + rate1 * (g - first[i])
        v = beta2 * second[i] + rate2 * (g * g)
        first[i], second[i] = m, v
        d = scale * m / (math.sqrt(v) + eps)
        direction[i] = d
        squares += d * d
    return float(squares)


@compiled
def _random_words(words: NDArray[np.uint64], key: np.uint64) -> None:
    """SplitMix64 from the state `key`; word i depends on key and i alone, so that they can be made side by side."""
    for i in range(len(words)):
        z = key + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words[i] = z ^ (z >> np.uint64(31))


@compiled
def normal_numbers(numbers: Floats, words: NDArray[np.uint64], key: np.uint64, quantiles: Floats) -> None:
    """Fill numbers with quantiles chosen by 16 random bits each; words is scratch for a quarter as many, rounded up."""
    _random_words(words, key)
    pieces = words.view(np.uint16)
    for i in range(len(numbers)):
        numbers[i] = quantiles[pieces[i]]


@compiled
def sum_of_squares(values: Floats) -> float:
    """The sum of squares."""
    total = np.float32(0.0)
    for i in range(len(values)):
        total += values[i] * values[i]
    return float(total)


@compiled
def _step_share(utility: np.float32, correction: np.float32, centre: np.float32, slope: np.float32) -> np.float32:
    """1 - tanh(x) for |x| <= 1/2: tanh's continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ..))) up to 9, right to 5e-11."""
    x = (utility * correction - centre) * slope
    z = x * x
    above = x * (np.float32(945.0) + z * (np.float32(105.0) + z))
    below = np.float32(945.0) + z * (np.float32(420.0) + np.float32(15.0) * z)
    return np.float32(1.0) - above / below


@compiled
def move(
    weights: Floats,
    direction: Floats,
    utility: Floats,
    correction: np.float32,
    centre: np.float32,
    slope: np.float32,
    keep: np.float32,
    lr: np.float32,
) -> None:
    """Weight <- keep * weight - lr * share * direction."""
    for i in range(len(weights)):
        weights[i] = keep * weights[i] - lr * (_step_share(utility[i], correction, centre, slope) * direction[i])


@compiled
def move_with_noise(
    weights: Floats,
    direction: Floats,
    utility: Floats,
    noise: Floats,
    noise_std: np.float32,
    correction: np.float32,
    centre: np.float32,
    slope: np.float32,
    keep: np.float32,
    lr: np.float32,
) -> None:
    """Weight <- keep * weight - lr * share * (direction + noise_std * noise)."""
    for i in range(len(weights)):
        noisy = direction[i] + noise_std * noise[i]
        weights[i] = keep * weights[i] - lr * (_step_share(utility[i], correction, centre, slope) * noisy)
