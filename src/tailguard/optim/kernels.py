"""Compiled loops over flat float32 arrays on the CPU: one pass where PyTorch would make five to ten.

Everything compiled lives in this one file, because numba's cache on disk looks at the file of a function only. Sums may be
reordered, which vector code needs. Vector code also needs loops over whole arrays: a loop from a start to an end that come out
of an array stays scalar, so segments are sliced first.
"""

import math

import numpy as np
from numpy.typing import NDArray

from tailguard.jit import REORDER_SUMS, decorators

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]

# The comparisons of a running minimum cannot be reordered, but this many independent ones can run side by side.
LANES = 64

SMALLEST = np.float32(1.2e-38)  # normal float32

# Columns of the sums of a gradient tensor, and of the table of running means.
SUM, SQUARES, MEAN_SQUARES, LARGEST = range(4)
FIRST, SECOND, ENERGY, MASS, SIGNAL = range(5)
ELEMENTWISE, MEAN, NORM = range(3)
# rho is 1 after one gradient and about 1/2 after two.
SINGLE = 0.999


compiled, inlined = decorators(REORDER_SUMS)


@inlined
def _flushed(x: np.float32) -> np.float32:
    """Return 0 for a denormal number, which would make every operation on it a hundred times slower.

    The running means of a weight whose gradient stays 0 get there within a thousand steps.
    """
    return np.float32(0.0) if abs(x) < SMALLEST else x


# ------------------------------------------------------------------------------------------------------- optimizers


@compiled
def update_utility(
    utility: Floats, gradient: Floats, weights: Floats, beta: np.float32, rate: np.float32
) -> tuple[float, float]:
    """Update UPGD's utility u <- beta u - rate * gradient * weight, rate = 1 - beta; return the smallest and the largest u."""
    low, high = np.full(LANES, np.float32(np.inf)), np.full(LANES, np.float32(-np.inf))
    whole = len(utility) // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            i = start + lane
            u = _flushed(beta * utility[i] - rate * (gradient[i] * weights[i]))
            utility[i] = u
            low[lane] = min(low[lane], u)
            high[lane] = max(high[lane], u)
    for i in range(whole, len(utility)):
        u = _flushed(beta * utility[i] - rate * (gradient[i] * weights[i]))
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
    """Update both moments and fill direction = scale * first / (sqrt(second) + eps); return its sum of squares.

    The rates are 1 - beta, rounded once: a difference of two float32 would be wrong in the fifth digit.
    """
    squares = np.float32(0.0)
    for i in range(len(direction)):
        g = gradient[i]
        m = _flushed(first[i] + rate1 * (g - first[i]))
        v = _flushed(beta2 * second[i] + rate2 * (g * g))
        first[i], second[i] = m, v
        d = scale * m / (math.sqrt(v) + eps)
        direction[i] = d
        squares += d * d
    return float(squares)


@compiled
def adam(
    weights: Floats,
    gradient: Floats,
    first: Floats,
    second: Floats,
    size: np.float32,
    rate1: np.float32,
    beta2: np.float32,
    rate2: np.float32,
    eps: np.float32,
    decay: np.float32,
) -> None:
    """Update both moments and move: weight <- weight - size * first / (sqrt(second) + eps)."""
    for i in range(len(weights)):
        g = gradient[i] + decay * weights[i]
        m = _flushed(first[i] + rate1 * (g - first[i]))
        v = _flushed(beta2 * second[i] + rate2 * (g * g))
        first[i], second[i] = m, v
        weights[i] -= size * m / (math.sqrt(v) + eps)


@inlined
def _random_words(words: NDArray[np.uint64], key: np.uint64) -> None:
    """Fill words by SplitMix64 from the state `key`; word i depends on key and i alone, so the loop can be vectorised."""
    for i in range(len(words)):
        z = key + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words[i] = z ^ (z >> np.uint64(31))


@compiled
def normal_numbers(numbers: Floats, words: NDArray[np.uint64], key: np.uint64, quantiles: Floats) -> None:
    """Fill numbers with quantiles chosen by 16 random bits each; words is scratch for a quarter as many, rounded up."""
    _random_words(words, key)
    indices = words.view(np.uint16)
    for i in range(len(numbers)):
        numbers[i] = quantiles[indices[i]]


@compiled
def sum_of_squares(values: Floats) -> float:
    """Return the sum of squares."""
    total = np.float32(0.0)
    for i in range(len(values)):
        total += values[i] * values[i]
    return float(total)


@inlined
def _gate_factor(utility: np.float32, correction: np.float32, centre: np.float32, steepness: np.float32) -> np.float32:
    """Return UPGD's gate 1 - tanh(x) for |x| <= 1/2, by tanh's continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ..))) up to 9.

    The error is at most 5e-11.
    """
    x = (utility * correction - centre) * steepness
    z = x * x
    numerator = x * (np.float32(945.0) + z * (np.float32(105.0) + z))
    denominator = np.float32(945.0) + z * (np.float32(420.0) + np.float32(15.0) * z)
    return np.float32(1.0) - numerator / denominator


@compiled
def move(
    weights: Floats,
    direction: Floats,
    utility: Floats,
    lr: np.float32,
    correction: np.float32,
    centre: np.float32,
    steepness: np.float32,
    keep: np.float32,
) -> None:
    """Move weight <- keep * weight - lr * gate * direction."""
    for i in range(len(weights)):
        weights[i] = keep * weights[i] - lr * (_gate_factor(utility[i], correction, centre, steepness) * direction[i])


@compiled
def move_with_noise(
    weights: Floats,
    direction: Floats,
    utility: Floats,
    noise: Floats,
    noise_std: np.float32,
    lr: np.float32,
    correction: np.float32,
    centre: np.float32,
    steepness: np.float32,
    keep: np.float32,
) -> None:
    """Move weight <- keep * weight - lr * gate * (direction + noise_std * noise)."""
    for i in range(len(weights)):
        noisy = direction[i] + noise_std * noise[i]
        weights[i] = keep * weights[i] - lr * (_gate_factor(utility[i], correction, centre, steepness) * noisy)


# ----------------------------------------------------------------------------------------------- variance of gradients


@inlined
def _measure_one(gradient: Floats, mean: Floats, rate: np.float32) -> tuple[float, float, float]:
    """Update the running mean of every element; return the sums of g, of g^2 and of the mean's squares."""
    total, squares, mean_squares = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(len(gradient)):
        g = gradient[i]
        m = _flushed(mean[i] + rate * (g - mean[i]))
        mean[i] = m
        total += g
        squares += g * g
        mean_squares += m * m
    return float(total), float(squares), float(mean_squares)


@inlined
def _largest(gradient: Floats) -> float:
    """Return the largest absolute value."""
    top = np.zeros(LANES, np.float32)
    whole = len(gradient) // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            top[lane] = max(top[lane], abs(gradient[start + lane]))
    for i in range(whole, len(gradient)):
        top[0] = max(top[0], abs(gradient[i]))
    return float(top.max())


@inlined
def _sums_of_one(gradient: Floats) -> tuple[float, float]:
    """Return the sums of g and of g^2."""
    total, squares = np.float32(0.0), np.float32(0.0)
    for i in range(len(gradient)):
        total += gradient[i]
        squares += gradient[i] * gradient[i]
    return float(total), float(squares)


@compiled
def measure(sums: Doubles, gradients: Floats, starts: Integers, numel: Integers, mean: Floats, rate: np.float32) -> None:
    """Fill ``sums[P, 4]`` of the gradients that begin at `starts`; `mean`, unless empty, holds their running means in a row."""
    begin = 0
    for k in range(len(sums)):
        gradient = gradients[starts[k] : starts[k] + numel[k]]
        if len(mean):
            own = mean[begin : begin + numel[k]]
            sums[k, SUM], sums[k, SQUARES], sums[k, MEAN_SQUARES] = _measure_one(gradient, own, rate)
        else:
            sums[k, SUM], sums[k, SQUARES] = _sums_of_one(gradient)
        sums[k, LARGEST] = _largest(gradient)
        begin += numel[k]


@inlined
def _fold(row: Doubles, sums: Doubles, numel: int, estimator: int, rate: float) -> None:
    """Fold the sums of one gradient into a tensor's row of running means.

    x is the quantity whose variance is measured: the gradient element by element, its mean over the tensor, or its norm. The
    row holds the running means of x (SIGNAL is its square), of x^2, of the mean square that stands for the scale, and of 1.
    """
    squares = sums[SQUARES]
    x, second, energy = 0.0, squares, squares
    if estimator == MEAN:
        x, energy = sums[SUM] / numel, squares / numel
        second = x * x
    elif estimator == NORM:
        x = math.sqrt(squares)
    row[FIRST] += rate * (x - row[FIRST])
    row[SECOND] += rate * (second - row[SECOND])
    row[ENERGY] += rate * (energy - row[ENERGY])
    row[MASS] += rate * (1.0 - row[MASS])
    row[SIGNAL] = sums[MEAN_SQUARES] if estimator == ELEMENTWISE else row[FIRST] * row[FIRST]


@inlined
def _noise_and_signal(row: Doubles, beta: float) -> tuple[float, float, float]:
    """Return the variance of x, the square of its expectation, and the scale.

    With weights that sum to `mass`, m the mean of x and v that of x^2, rho the sum of squared weights over mass^2: E[m^2] is
    mu^2 + rho s^2 and E[v] is mu^2 + s^2. Solved for both, without bias; a single gradient says nothing of its variance.
    """
    mass = row[MASS]
    if mass == 0.0:
        return 0.0, 0.0, 0.0
    signal, second, energy = row[SIGNAL] / (mass * mass), row[SECOND] / mass, row[ENERGY] / mass
    rho = (1.0 - beta) * (2.0 - mass) / ((1.0 + beta) * mass)
    if rho > SINGLE:
        return 0.0, signal, energy
    return (second - signal) / (1.0 - rho), (signal - rho * second) / (1.0 - rho), energy


@compiled
def fold(
    table: Doubles, overall: Doubles, sums: Doubles, numel: Integers, present: Integers, estimator: int, rate: float
) -> int:
    """Fold one gradient into the rows of the tensors that have one, and into the running means for the whole gradient.

    The latter are of its mean, its spatial variance, its norm, its largest element and 1. Return the first tensor whose
    gradient is not finite, or -1.
    """
    total, squares, largest, elements = 0.0, 0.0, 0.0, 0
    for k in present:
        if not math.isfinite(sums[k].sum()):
            return int(k)
        _fold(table[k], sums[k], numel[k], estimator, rate)
        total, squares, largest = total + sums[k, SUM], squares + sums[k, SQUARES], max(largest, sums[k, LARGEST])
        elements += numel[k]
    mean = total / elements
    overall[0] += rate * (mean - overall[0])
    overall[1] += rate * (squares / elements - mean * mean - overall[1])
    overall[2] += rate * (math.sqrt(squares) - overall[2])
    overall[3] += rate * (largest - overall[3])
    overall[4] += rate * (1.0 - overall[4])
    return -1


@compiled
def evaluate(parts: Doubles, head_parts: Doubles, table: Doubles, head_of: Integers, beta: float) -> None:
    """Fill ``parts[P, 3]`` with variance, squared expectation and scale of every tensor, ``head_parts[H, 3]`` with sums."""
    head_parts[:] = 0.0
    for k in range(len(table)):
        parts[k, 0], parts[k, 1], parts[k, 2] = _noise_and_signal(table[k], beta)
        for column in range(3):  # a sum of arrays would be compiled with all that it may raise, for a second and a half
            head_parts[head_of[k], column] += parts[k, column]


# ------------------------------------------------------------------------------------------------------- step scaling


@compiled
def scale_steps(weights: Floats, saved: Floats, starts: Integers, ends: Integers, numbers: Floats) -> None:
    """Move weight <- keep * saved + factor * (weight - keep * saved); numbers: keep and factor of every segment, ``[2, K]``."""
    for k in range(len(starts)):
        end, start = weights[starts[k] : ends[k]], saved[starts[k] : ends[k]]
        keep, factor = numbers[0, k], numbers[1, k]
        for i in range(len(end)):
            base = keep * start[i]
            end[i] = base + factor * (end[i] - base)
