"""Kupiec's likelihood-ratio test of the number of breaches of a predicted quantile, for training and for verdicts."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chdtrc, xlogy


def log_likelihood(breaches: ArrayLike, n: int, probability: ArrayLike) -> NDArray[np.float64]:
    """Return the log-likelihood of `breaches` in `n` independent trials, without the binomial coefficient."""
    counts = np.asarray(breaches, np.float64)
    return np.asarray(xlogy(counts, probability) + xlogy(n - counts, 1.0 - np.asarray(probability)))


def kupiec_ratio(breaches: ArrayLike, n: int, expected: float) -> NDArray[np.float64]:
    """Return Kupiec's ratio, at least 0: twice the log-likelihood of the observed less that of the expected share."""
    observed = np.asarray(breaches, np.float64) / n
    return np.maximum(2.0 * (log_likelihood(breaches, n, observed) - log_likelihood(breaches, n, expected)), 0.0)


def kupiec_p_value(breaches: int, n: int, expected: float) -> float:
    """Return the p-value of `breaches` in `n` where a share of `expected` was predicted.

    It is the asymptotic one: the ratio is chi-square with one degree of freedom.
    """
    return float(chdtrc(1, kupiec_ratio(breaches, n, expected)))
