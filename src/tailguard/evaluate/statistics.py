"""Statistics of an equity curve. Returns are per bar; `periods` is the number of bars per year."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailguard.validation import require

Floats = NDArray[np.float64]


def returns_of(equity: ArrayLike) -> Floats:
    """Simple returns per bar of an equity curve ``[T]``, as ``[T - 1]``."""
    values = np.asarray(equity, dtype=np.float64)
    require(values.ndim == 1 and len(values) >= 2, "equity", values.shape, "one-dimensional with at least 2 entries")
    require(bool((values > 0).all()), "equity", float(values.min()), "positive everywhere")
    return values[1:] / values[:-1] - 1.0


def cagr(equity: ArrayLike, periods: float) -> float:
    """Compound growth per year: (V_n / V_0)^(periods / n) - 1."""
    returns = returns_of(equity)
    return math.expm1(float(np.log1p(returns).mean()) * periods)


def volatility(returns: ArrayLike, periods: float) -> float:
    """Standard deviation of the returns per year."""
    return float(np.std(np.asarray(returns, dtype=np.float64), ddof=1)) * math.sqrt(periods)


def sharpe(returns: ArrayLike, periods: float) -> float:
    """Mean over standard deviation of the returns, per year; 0 for an account that never moves."""
    values = np.asarray(returns, dtype=np.float64)
    deviation = float(np.std(values, ddof=1))
    return float(np.mean(values)) / deviation * math.sqrt(periods) if deviation > 0.0 else 0.0


def drawdowns(equity: ArrayLike) -> Floats:
    """How far each bar is below the highest equity so far, as a positive share of it."""
    values = np.asarray(equity, dtype=np.float64)
    return 1.0 - values / np.maximum.accumulate(values)


def max_drawdown(equity: ArrayLike) -> float:
    """The largest drawdown, as a positive share."""
    return float(drawdowns(equity).max())


def cvar(returns: ArrayLike, alpha: float) -> float:
    """Mean of the worst `alpha` share of the returns (negative when they are losses), exact for any sample size.

    With k = alpha n and i = floor(k): the i worst count fully and the next one with the remaining k - i.
    """
    require(0.0 < alpha <= 1.0, "alpha", alpha, "in (0, 1]")
    values = np.sort(np.asarray(returns, dtype=np.float64))
    mass = alpha * len(values)
    weights = np.clip(mass - np.arange(len(values)), 0.0, 1.0)
    return float(values @ weights) / mass
