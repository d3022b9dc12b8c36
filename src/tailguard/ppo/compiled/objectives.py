"""What an adversary wishes of an actor's outputs, and what is learnt from it, with gradients, in one pass over the samples.

    means:    s sum_a (m_a - g_a)^2 / (2 sigma_a^2)              the KL from g for s = 1, log p(g) but for a constant for s = -1
    choices:  s sum_c -log q(g_c)                                the surprise at g for s = 1, log q(g) for s = -1

In the second, -log q_g = softplus(t) with t = logsumexp of the other logits - z_g, which keeps its digits and those of its
gradient where the actor is all but certain. What is learnt is to keep the KL between clean and moved outputs small:

    means:    sum_a (c_a - m_a)^2 / (2 sigma_a^2)                each mean clipped to the box first
    choices:  sum p (log p - log q)                              with the slopes p (log p - log q - KL) and q - p
"""

import math

import numpy as np
from numpy.typing import NDArray

from tailguard.ppo.compiled.kernels import RELU, compiled, inlined

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
ZERO, ONE, HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)


@compiled
def through_activation(values: Floats, activation: int, slopes: Floats) -> None:
    """Multiply ``slopes[M, n]`` by the derivative of the activation whose outputs are ``values[M, n]``."""
    for m in range(len(values)):
        y, slope = values[m], slopes[m]
        if activation == RELU:
            for j in range(len(y)):
                slope[j] = slope[j] if y[j] > ZERO else ZERO
        else:
            for j in range(len(y)):
                slope[j] *= ONE - y[j] * y[j]


@compiled
def from_means(
    means: Floats, goal: Floats, precision: Floats, sign: np.float32, weights: Floats, values: Floats, slopes: Floats
) -> None:
    """Fill ``values[M]`` and ``slopes[M, A]`` from ``means[M, A]``, the goal ``[M, A]`` and 1 / sigma^2 ``[A]``."""
    for m in range(len(means)):
        weight, total = sign * weights[m], ZERO
        for a in range(means.shape[1]):
            apart = means[m, a] - goal[m, a]
            pulled = precision[a] * apart
            total += HALF * pulled * apart
            slopes[m, a] = weight * pulled if weight != ZERO else ZERO
        values[m] = weight * total if weight != ZERO else ZERO


@compiled
def from_choices(
    logits: Floats, counts: Integers, goal: Floats, sign: np.float32, weights: Floats, values: Floats, slopes: Floats
) -> None:
    """Fill ``values[M]`` and ``slopes[M, n]`` from ``logits[M, n]`` of choices among `counts`; the goal is ``[M, choices]``."""
    for m in range(len(logits)):
        weight, total, first = sign * weights[m], ZERO, 0
        for c in range(len(counts)):
            z, slope, g = logits[m, first : first + counts[c]], slopes[m, first : first + counts[c]], int(goal[m, c])
            first += counts[c]
            top = np.float32(-np.inf)
            for j in range(len(z)):
                top = z[j] if j != g and z[j] > top else top
            mass = ZERO
            for j in range(len(z)):
                slope[j] = np.exp(z[j] - top) if j != g else ZERO
                mass += slope[j]
            if len(z) < 2 or weight == ZERO:  # where there is nothing to choose, or nothing to learn
                slope[:] = ZERO
                continue
            t = top + np.log(mass) - z[g]
            away = np.exp(-abs(t))
            total += (t if t > ZERO else ZERO) + np.float32(math.log1p(away))
            rate = weight * (ONE / (ONE + away) if t > ZERO else away / (ONE + away))  # sigmoid(t)
            for j in range(len(z)):
                slope[j] *= rate / mass
            slope[g] = -rate
        values[m] = weight * total


@compiled
def steady_means(
    clean: Floats,
    moved: Floats,
    low: Floats,
    high: Floats,
    precision: Floats,
    weights: Floats,
    scale: float,
    into_clean: Floats,
    into_moved: Floats,
) -> float:
    """The weighted sum of the KL of means ``[M, A]`` in a box ``[A]``; fills `scale` times its gradient in both."""
    sum_of_all = 0.0
    for m in range(len(clean)):
        for a in range(clean.shape[1]):
            one, other = min(max(clean[m, a], low[a]), high[a]), min(max(moved[m, a], low[a]), high[a])
            pulled = weights[m] * precision[a] * (one - other) if weights[m] != ZERO else ZERO
            into_clean[m, a] = np.float32(scale) * pulled if one == clean[m, a] else ZERO
            into_moved[m, a] = -np.float32(scale) * pulled if other == moved[m, a] else ZERO
            sum_of_all += 0.5 * pulled * (one - other) if weights[m] != ZERO else 0.0
    return sum_of_all


@inlined
def _log_softmax(logits: Floats, out: Floats) -> None:
    top = logits.max()
    mass = ZERO
    for j in range(len(logits)):
        mass += np.exp(logits[j] - top)
    shift = top + np.log(mass)
    for j in range(len(logits)):
        out[j] = logits[j] - shift


@compiled
def steady_choices(
    clean: Floats, moved: Floats, counts: Integers, weights: Floats, scale: float, into_clean: Floats, into_moved: Floats
) -> float:
    """The weighted sum of the KL of choices among `counts` with logits ``[M, n]``; fills `scale` times its gradient in both."""
    sum_of_all = 0.0
    for m in range(len(clean)):
        first = 0
        for c in range(len(counts)):
            last = first + counts[c]
            one, other = into_clean[m, first:last], into_moved[m, first:last]
            if weights[m] == ZERO:
                one[:], other[:], first = ZERO, ZERO, last
                continue
            _log_softmax(clean[m, first:last], one)
            _log_softmax(moved[m, first:last], other)
            kl = ZERO
            for j in range(len(one)):
                kl += np.exp(one[j]) * (one[j] - other[j])
            share = np.float32(scale) * weights[m]
            for j in range(len(one)):
                p, q, apart = np.exp(one[j]), np.exp(other[j]), one[j] - other[j]
                one[j], other[j] = share * p * (apart - kl), share * (q - p)
            sum_of_all += weights[m] * kl
            first = last
    return sum_of_all
