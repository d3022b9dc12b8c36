"""Serial dependence: autocovariances, variance ratio, and the block length that a bootstrap needs."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailguard.evaluate.stats.series import ROUNDING, Floats, as_series
from tailguard.validation import require

FEWEST_BARS = 8  # fewer bars have no correlogram to speak of


def autocovariances(values: Floats, lags: int) -> Floats:
    """Compute gamma_k = sum_t (x_t - mean)(x_{t+k} - mean) / n, k = 0 .. lags; the n keeps the sequence positive definite.

    :param values: ``[T]``.
    :param lags: the last k, below T.
    """
    deviations = values - values.mean()
    size = 2 ** math.ceil(math.log2(len(values) + lags + 1))  # long enough that no product wraps around
    spectrum = np.fft.rfft(deviations, size)
    return np.asarray(np.fft.irfft(spectrum * spectrum.conj(), size)[: lags + 1] / len(values))


def newey_west_lags(n: int) -> int:
    """Return the usual number of Newey-West lags for n bars, floor(4 (n / 100)^(2/9)): 4 for 100 bars, 9 for 5,000.

    :param n: number of bars, at least 1.
    """
    return min(int(4.0 * (n / 100.0) ** (2.0 / 9.0)), n - 1)


def variance_ratio(returns: ArrayLike, horizon: int) -> float:
    """Compute the variance of a sum of `horizon` bars, as a multiple of that of independent bars.

    1 + 2 sum_{k < q} (1 - k/q) rho_k for q = horizon: above 1 where returns trend, below 1 where they revert, never negative.

    :param returns: ``[T]``.
    :param horizon: in bars, from 1 to T. Long horizons cost precision: the relative standard error is about
        sqrt(4 horizon / (3 T)).
    """
    values = as_series("returns", returns, 2)
    require(1 <= horizon <= len(values), "horizon", horizon, f"from 1 to the number of bars, {len(values)}")
    covariances = autocovariances(values, horizon - 1)
    if math.sqrt(max(covariances[0], 0.0)) <= ROUNDING:
        return 1.0
    weights = 1.0 - np.arange(1, horizon) / horizon
    return max(float(1.0 + 2.0 * weights @ covariances[1:] / covariances[0]), 0.0)


def variance_inflation(returns: ArrayLike) -> float:
    """Compute the variance of the mean as a multiple of that of independent bars, at least 1.

    Smoothed or trending returns make a Sharpe ratio less certain than their number of bars says. Returns that revert would make
    it more certain, which is not relied on.

    :param returns: ``[T]``, at least 2; autocorrelations count up to :func:`newey_west_lags`.
    """
    values = as_series("returns", returns, 2)
    return max(variance_ratio(values, newey_west_lags(len(values)) + 1), 1.0)


def optimal_block_length(returns: ArrayLike) -> float:
    """Compute the stationary bootstrap's block length after Politis and White (2004), corrected by Patton et al. (2009).

    b = (2 G^2 n / D)^(1/3) with G = sum lambda(k/M) |k| gamma_k, D = 2 (sum lambda(k/M) gamma_k)^2 over |k| <= M and the
    flat-top window lambda. M is twice the first lag of the first run of insignificant autocorrelations.

    :param returns: ``[T]``, at least 8 bars. A series that is constant or not autocorrelated has blocks of 1 bar.
    :return: between 1 and min(3 sqrt(T), T / 3).
    """
    values = as_series("returns", returns, FEWEST_BARS)
    n = len(values)
    run = max(5, math.ceil(math.log10(n)))
    last = min(math.ceil(math.sqrt(n)) + run, n - 1)
    covariances = autocovariances(values, last)
    if math.sqrt(max(covariances[0], 0.0)) <= ROUNDING:
        return 1.0
    significant = np.abs(covariances[1:]) / covariances[0] >= 2.0 * math.sqrt(math.log10(n) / n)
    m = min(2 * _first_insignificant_lag(significant, run), last)
    lags = np.arange(1, m + 1)
    flat_top = np.minimum(1.0, 2.0 * (1.0 - lags / m))
    g = 2.0 * float(flat_top * lags @ covariances[1 : m + 1])
    spectrum_at_0 = float(covariances[0] + 2.0 * flat_top @ covariances[1 : m + 1])
    longest = math.ceil(min(3.0 * math.sqrt(n), n / 3.0))
    if spectrum_at_0 == 0.0:
        return float(longest)
    return float(min(max((g**2 / spectrum_at_0**2 * n) ** (1.0 / 3.0), 1.0), longest))


def _first_insignificant_lag(significant: NDArray[np.bool_], run: int) -> int:
    """Return the first lag of the first `run` insignificant lags in a row, or the last lag if there is no such run."""
    quiet = 0
    for lag, loud in enumerate(significant, start=1):
        quiet = 0 if loud else quiet + 1
        if quiet == run:
            return lag - run + 1
    return len(significant)
