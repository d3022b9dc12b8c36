"""How much of an account is its benchmark, and how much is its own."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from tailguard.evaluate.stats.dependence import newey_west_lags
from tailguard.evaluate.stats.series import ROUNDING, as_series, require_periods
from tailguard.validation import require


@dataclass(frozen=True)
class AlphaBeta:
    """returns = alpha + beta benchmark + noise, with Newey-West standard errors.

    :param alpha: per year (per bar times `periods`): what is left after the benchmark's part.
    :param beta: what the account moves per move of the benchmark.
    :param alpha_t: alpha over its standard error. 0 where a fit without residuals leaves an alpha of 0, infinite otherwise.
    :param beta_t: beta over its standard error.
    :param alpha_p: two-sided p-value of alpha = 0.
    :param r_squared: share of the variance that the benchmark explains.
    :param lags: of the standard errors.
    """

    alpha: float
    beta: float
    alpha_t: float
    beta_t: float
    alpha_p: float
    r_squared: float
    lags: int


def alpha_beta(returns: ArrayLike, benchmark: ArrayLike, periods: float, lags: int | None = None) -> AlphaBeta:
    """Regress an account on a benchmark; standard errors allow for heteroscedasticity and autocorrelation.

    :param returns: ``[T]``, at least 3, in excess of the riskless rate if there is one.
    :param benchmark: ``[T]``, likewise; it has to vary.
    :param periods: bars per year.
    :param lags: autocorrelations that count, below T; None takes :func:`newey_west_lags`.
    """
    require_periods(periods)
    y, x = as_series("returns", returns, 3), as_series("benchmark", benchmark, 3)
    n = len(y)
    require(len(x) == n, "the length of benchmark", len(x), f"{n}, as the returns")
    lags = newey_west_lags(n) if lags is None else lags
    require(0 <= lags < n, "lags", lags, f"from 0 to {n - 1}")
    require(float(np.std(x)) > ROUNDING, "the deviation of benchmark", float(np.std(x)), "positive: it has no beta otherwise")

    centre = float(x.mean())
    design = np.stack([np.ones(n), x - centre], axis=1)  # centred: its columns are orthogonal, so nothing cancels
    squares = (design**2).sum(axis=0)
    coefficients = design.T @ y / squares
    residuals = y - design @ coefficients
    scores = design * residuals[:, None]
    meat = scores.T @ scores
    for lag in range(1, lags + 1):
        crossed = scores[lag:].T @ scores[:-lag]
        meat += (1.0 - lag / (lags + 1)) * (crossed + crossed.T)
    covariance = meat / np.outer(squares, squares)
    beta = float(coefficients[1])
    alpha = float(coefficients[0]) - beta * centre
    back = np.array([1.0, -centre])  # alpha = intercept of the centred fit - beta centre
    alpha_t = _t_value(alpha, float(back @ covariance @ back))
    total = float(((y - y.mean()) ** 2).sum())
    return AlphaBeta(
        alpha=alpha * periods,
        beta=beta,
        alpha_t=alpha_t,
        beta_t=_t_value(beta, float(covariance[1, 1])),
        alpha_p=float(2.0 * ndtr(-abs(alpha_t))),
        r_squared=1.0 - float(residuals @ residuals) / total if total > n * ROUNDING**2 else 0.0,
        lags=lags,
    )


def _t_value(value: float, variance: float) -> float:
    error = math.sqrt(max(variance, 0.0))
    if error > ROUNDING:
        return value / error
    return 0.0 if abs(value) <= ROUNDING else math.copysign(math.inf, value)
