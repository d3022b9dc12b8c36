"""Heston's stochastic volatility model: prices of European options under it, and its calibration to returns.

dS = drift S dt + sqrt(v) S dW,    dv = kappa (theta - v) dt + xi sqrt(v) dB,    d<W, B> = rho dt.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailguard.validation import require

Complexes = NDArray[np.complex128]
# Gauss-Legendre nodes per unit interval of the integral over frequencies, and where it is cut, in units of 1 / sqrt(variance).
NODES = 256
CUT = 60.0
# Lags of squared returns, in bars, and speeds of mean reversion per year, that a calibration looks at.
LAGS = 60
SPEEDS = np.geomspace(0.25, 60.0, 120)
STRONGEST_CORRELATION = 0.95


@dataclass(frozen=True)
class Heston:
    """Heston's price process.

    :param variance: v at date 0; 0.04 is a volatility of 20 %.
    :param long_run_variance: theta, to which the variance returns.
    :param mean_reversion: kappa, the speed of that return per year; 2 is typical.
    :param vol_of_variance: xi; 0.5 is typical of equities, more makes the tails fatter.
    :param correlation: rho of price and variance, between -1 and 1; -0.7 is typical of equities.
    :param drift: of the price, per year; None is the rate.
    """

    variance: float = 0.04
    long_run_variance: float = 0.04
    mean_reversion: float = 2.0
    vol_of_variance: float = 0.5
    correlation: float = -0.7
    drift: float | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("variance", "long_run_variance", "mean_reversion", "vol_of_variance"):
            value = getattr(self, name)
            require(0.0 < value < np.inf, name, value, "positive and finite")
        require(-1.0 < self.correlation < 1.0, "correlation", self.correlation, "between -1 and 1")

    def mean_volatility(self, years: float) -> float:
        """Return the root of the average variance that is expected over the coming years.

        :param years: from date 0.
        """
        decay = self.mean_reversion * years
        excess = (self.variance - self.long_run_variance) * (1.0 - math.exp(-decay)) / decay
        return math.sqrt(self.long_run_variance + excess)


def heston_price(
    kind: Literal["call", "put"], spot: float, strike: float, years: float, process: Heston, rate: float = 0.0
) -> float:
    """Return the price of a European option from the characteristic function of the log price.

    :param kind: ``call`` or ``put``.
    :param spot: price of the underlying.
    :param strike: of the option.
    :param years: to its expiry.
    :param process: its parameters; prices do not depend on the drift.
    :param rate: interest rate.
    """
    forward, discount = spot * np.exp(rate * years), np.exp(-rate * years)
    # Lewis (2001): call = discount (F - sqrt(F K) / pi int_0^inf Re[exp(i u k) phi(u - i/2)] / (u^2 + 1/4) du), k = log(F / K).
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    last = CUT / np.sqrt(years * min(process.variance, process.long_run_variance))
    # Quadratically spaced: most of the integral lies near 0.
    share = 0.5 * (nodes + 1.0)
    u, du = last * share**2, last * share * weights
    integrand = np.exp(1j * u * np.log(forward / strike)) * _characteristic(u - 0.5j, years, process) / (u**2 + 0.25)
    call = discount * (forward - np.sqrt(forward * strike) / np.pi * float(integrand.real @ du))
    return float(call if kind == "call" else call - discount * (forward - strike))


def calibrate_heston(returns: ArrayLike, step: float) -> Heston:
    """Return Heston's process with the moments of observed returns, starting at its long-run variance.

    With r the demeaned returns over `step` years and l a lag,

        E[r^2] = theta step,    cov(r_t^2, r_{t+l}^2) = var(v) step^2 exp(-kappa l step),    var(v) = xi^2 theta / (2 kappa),
        E[r_t r_{t+l}^2] = rho xi theta step^2 exp(-kappa (l - 1/2) step) - var(v) step^2 exp(-kappa l step) / 2,

    where the last term is there because the mean of a log return falls with half the variance. The second line is fitted to the
    lags by least squares. These are moments of fourth order: some thousand bars give a rough idea.

    :param returns: log returns, one per bar.
    :param step: years between bars.
    :raises ValueError: if the squared returns show no clusters, so that there is nothing to calibrate.
    """
    r = np.asarray(returns, np.float64)
    require(r.ndim == 1 and len(r) > 2 * LAGS, "returns", r.shape, f"more than {2 * LAGS} numbers in one dimension")
    r = r - r.mean()
    squares, lags = r**2 - np.mean(r**2), np.arange(1, LAGS + 1)
    clusters = np.array([np.mean(squares[:-lag] * squares[lag:]) for lag in lags]) / step**2
    leverage = np.array([np.mean(r[:-lag] * squares[lag:]) for lag in lags]) / step**2
    shapes = np.exp(-SPEEDS[:, None] * lags * step)
    sizes = np.maximum(shapes @ clusters / (shapes**2).sum(axis=1), 0.0)
    best = int(((clusters - sizes[:, None] * shapes) ** 2).sum(axis=1).argmin())
    require(
        bool(sizes[best] > 0.0), "the covariance of squared returns", sizes[best], "positive; bootstrap these returns instead"
    )
    kappa, theta = float(SPEEDS[best]), float(np.mean(r**2) / step)
    xi = math.sqrt(2.0 * kappa * sizes[best] / theta)
    decay = np.exp(-kappa * (lags - 0.5) * step)
    leverage = leverage + 0.5 * sizes[best] * shapes[best]
    rho = float(decay @ leverage / (decay @ decay) / (xi * theta))
    return Heston(theta, theta, kappa, xi, min(max(rho, -STRONGEST_CORRELATION), STRONGEST_CORRELATION))


def _characteristic(u: Complexes, years: float, process: Heston) -> Complexes:
    """Return E[exp(i u log(S_T / F))], in the form of Albrecher et al. (2007), which is continuous in u."""
    kappa, theta, xi, rho = process.mean_reversion, process.long_run_variance, process.vol_of_variance, process.correlation
    beta = kappa - 1j * rho * xi * u
    root = np.sqrt(beta**2 + xi**2 * (u**2 + 1j * u))
    g, decay = (beta - root) / (beta + root), np.exp(-root * years)
    slow = kappa * theta / xi**2 * ((beta - root) * years - 2.0 * np.log((1.0 - g * decay) / (1.0 - g)))
    fast = process.variance / xi**2 * (beta - root) * (1.0 - decay) / (1.0 - g * decay)
    return np.asarray(np.exp(slow + fast))
