"""Kupiec's likelihood ratio: can this many breaches of a predicted quantile be chance? For training and for verdicts alike."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chdtrc, xlogy


def log_likelihood(breaches: ArrayLike, n: int, probability: ArrayLike) -> NDArray[np.float64]:
    """Of `breaches` in `n` independent tries of this probability, less the number of ways."""
    counts = np.asarray(breaches, np.float64)
    return np.asarray(xlogy(counts, probability) + xlogy(n - counts, 1.0 - np.asarray(probability)))


def kupiec_ratio(breaches: ArrayLike, n: int, expected: float) -> NDArray[np.float64]:
    """Twice the logarithm of how much likelier the observed share of breaches is than the expected one, at least 0."""
    observed = np.asarray(breaches, np.float64) / n
    return np.maximum(2.0 * (log_likelihood(breaches, n, observed) - log_likelihood(breaches, n, expected)), 0.0)


def kupiec_p_value(ratio: float) -> float:
    """How often chance gives a ratio as large, for many tries: chi-square with one degree of freedom."""
    return float(chdtrc(1, ratio))
