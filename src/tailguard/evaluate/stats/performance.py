"""Performance of an account: growth, risk, ratios, trading, and its regression on a benchmark.

Returns are simple and per bar; `periods` is the number of bars per year. Every ratio follows one rule: an account that never
moves has 0, a gain without any risk is infinite.
"""

import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from tailguard.evaluate.stats.dependence import newey_west_lags, variance_ratio
from tailguard.evaluate.stats.series import (
    ROUNDING,
    Floats,
    as_equity,
    as_series,
    require_finite,
    require_periods,
    require_solvent,
)
from tailguard.validation import require

# The largest number whose exponential is finite: a few minutes of gains, taken as a year's, can exceed it.
LARGEST_LOG = math.log(sys.float_info.max)


def cagr(equity: ArrayLike, periods: float) -> float:
    """Compute the compound annual growth rate (CAGR), (V_n / V_0)^(periods / n) - 1; infinite where no float can hold it.

    :param equity: ``[T]``, what the account is worth at each bar.
    :param periods: bars per year.
    """
    require_periods(periods)
    values = as_equity(equity)
    return _grown(math.log(values[-1] / values[0]) * periods / (len(values) - 1))


def volatility(returns: ArrayLike, periods: float, riskless: ArrayLike = 0.0) -> float:
    """Compute the annualised standard deviation of the excess returns.

    :param returns: ``[T]``, simple and per bar.
    :param periods: bars per year.
    :param riskless: return of the riskless asset per bar, one number or ``[T]``.
    """
    require_periods(periods)
    return _deviation(excess_returns(returns, riskless, 2)) * math.sqrt(periods)


def sharpe(returns: ArrayLike, periods: float, riskless: ArrayLike = 0.0) -> float:
    """Compute the annualised Sharpe ratio: mean over standard deviation (ddof 1) of the excess returns.

    :param returns: ``[T]``, at least 2.
    :param periods: bars per year; 1 gives the ratio per bar.
    :param riskless: return of the riskless asset per bar, one number or ``[T]``.
    """
    require_periods(periods)
    excess = excess_returns(returns, riskless, 2)
    return _gain_over_risk(float(excess.mean()), _deviation(excess)) * math.sqrt(periods)


def lo_sharpe(returns: ArrayLike, periods: float, horizon: int | None = None, riskless: ArrayLike = 0.0) -> float:
    """Compute the annualised Sharpe ratio of returns that are correlated in time, after Lo (2002).

    sqrt(q) assumes independent bars. Lo's factor q / sqrt(q + 2 sum_{k<q} (q - k) rho_k) does not: it is smaller where
    returns trend (smoothed equity) and larger where they revert.

    :param returns: ``[T]``, at least 2.
    :param periods: bars per year.
    :param horizon: q, the bars over which autocorrelation counts; bars further apart are taken as uncorrelated. Lo's own
        figure has ``round(periods)``, which for a year of daily or hourly bars is mostly noise. None takes one more than
        :func:`tailguard.evaluate.stats.dependence.newey_west_lags`.
    :param riskless: return of the riskless asset per bar, one number or ``[T]``.
    """
    plain = sharpe(returns, periods, riskless)
    excess = excess_returns(returns, riskless, 2)
    ratio = variance_ratio(excess, newey_west_lags(len(excess)) + 1 if horizon is None else horizon)
    return _gain_over_risk(plain, math.sqrt(ratio))


def sortino(returns: ArrayLike, periods: float, target: ArrayLike = 0.0) -> float:
    """Compute the annualised Sortino ratio: mean over downside deviation, whose squares are averaged over all bars.

    :param returns: ``[T]``.
    :param periods: bars per year.
    :param target: return per bar below which a bar counts as a shortfall, one number or ``[T]``.
    """
    require_periods(periods)
    excess = excess_returns(returns, target, 1)
    downside = math.sqrt(float(np.mean(np.minimum(excess, 0.0) ** 2)))
    return _gain_over_risk(float(excess.mean()), downside if downside > ROUNDING else 0.0) * math.sqrt(periods)


def drawdowns(equity: ArrayLike) -> Floats:
    """Return the drawdown at each bar ``[T]``: how far equity is below its highest so far, as a positive share of it.

    :param equity: ``[T]``, what the account is worth at each bar.
    """
    values = as_equity(equity)
    return 1.0 - values / np.maximum.accumulate(values)


def max_drawdown(equity: ArrayLike) -> float:
    """Return the largest drawdown, as a positive share; a fall from the start value counts.

    :param equity: ``[T]``, what the account is worth at each bar.
    """
    return float(drawdowns(equity).max())


def calmar(equity: ArrayLike, periods: float, riskless: ArrayLike = 0.0) -> float:
    """Compute the Calmar ratio: compound annual growth over the largest drawdown.

    :param equity: ``[T]``, what the account is worth at each bar.
    :param periods: bars per year.
    :param riskless: return of the riskless asset per bar, one number or ``[T - 1]``; the growth is that of the equity in units
        of the riskless account.
    """
    require_periods(periods)
    values = as_equity(equity)
    excess_returns(values[1:] / values[:-1] - 1.0, riskless, 1)  # checks the shape
    growth = math.log(values[-1] / values[0]) / (len(values) - 1) - float(np.log1p(riskless).mean())  # per bar
    growth = growth if abs(growth) > ROUNDING else 0.0
    return _gain_over_risk(_grown(growth * periods), max_drawdown(values))


def ulcer(equity: ArrayLike) -> float:
    """Compute the ulcer index: the root mean square of the drawdowns, so that long and deep ones count most.

    :param equity: ``[T]``, what the account is worth at each bar.
    """
    return math.sqrt(float(np.mean(drawdowns(equity) ** 2)))


def cdar(equity: ArrayLike, alpha: float) -> float:
    """Compute the conditional drawdown at risk (CDaR): the mean of the largest `alpha` share of the drawdowns, positive.

    :param equity: ``[T]``.
    :param alpha: in (0, 1]; 0.05 is usual. Towards 0 it becomes the largest drawdown, at 1 it is the mean.
    """
    return -cvar(-drawdowns(equity), alpha)


def cvar(returns: ArrayLike, alpha: float) -> float:
    """Compute the CVaR: the mean of the worst `alpha` share of the returns, negative for losses, exact for any sample size.

    With k = alpha n and i = floor(k): the i worst count fully and the next one with the remaining k - i.

    :param returns: ``[T]``.
    :param alpha: in (0, 1]; 0.05 is usual. Towards 0 it becomes the worst return, at 1 it is the mean.
    """
    require(0.0 < alpha <= 1.0, "alpha", alpha, "in (0, 1]")
    values = np.sort(as_series("returns", returns, 1))
    mass = alpha * len(values)
    weights = np.clip(mass - np.arange(len(values)), 0.0, 1.0)
    return float(values @ weights) / mass


def rolling_returns(returns: ArrayLike, bars: int) -> Floats:
    """Return the compounded returns ``[T - bars + 1]`` of every window of `bars` bars, such as 20 for the CVaR of a month.

    :param returns: ``[T]``, simple and per bar.
    :param bars: from 1 to T.
    """
    values = as_series("returns", returns, 1)
    require_solvent("returns", values)
    require(1 <= bars <= len(values), "bars", bars, f"from 1 to the number of returns, {len(values)}")
    growth = np.concatenate([[0.0], np.cumsum(np.log1p(values))])
    return np.asarray(np.expm1(growth[bars:] - growth[:-bars]))


def traded(weights: ArrayLike, asset_returns: ArrayLike) -> Floats:
    """Return the notional traded at each bar as a share of equity, ``[T]``; a weight that only drifted was not traded.

    :param weights: held after the trade of each bar, ``[T]`` for one asset or ``[T, A]``; the rest is cash.
    :param asset_returns: of the assets from each bar to the next, shaped as `weights` with one row less.
    """
    held, moves = _two_dimensional("weights", weights), _two_dimensional("asset_returns", asset_returns)
    legal = f"{(len(held) - 1, held.shape[1])}, one row less than weights"
    require(moves.shape == (len(held) - 1, held.shape[1]), "the shape of asset_returns", moves.shape, legal)
    growth = 1.0 + (held[:-1] * moves).sum(axis=1, keepdims=True)
    require(bool((growth > 0.0).all()), "the lowest growth of the account", float(growth.min(initial=1.0)), "positive")
    before = np.concatenate([np.zeros((1, held.shape[1])), held[:-1] * (1.0 + moves) / growth])
    return np.asarray(np.abs(held - before).sum(axis=1))


def turnover(shares: ArrayLike, periods: float) -> float:
    """Compute the traded notional per year, in multiples of equity.

    :param shares: ``[T]``, traded at each bar as a share of equity: :func:`traded`, or the turnover that
        :func:`tailguard.market.simulate` reports.
    :param periods: bars per year.
    """
    require_periods(periods)
    values = as_series("shares", shares, 1)
    require(bool((values >= 0.0).all()), "shares", float(values.min()), "nonnegative everywhere")
    return float(values.mean()) * periods


def exposure(weights: ArrayLike) -> float:
    """Compute the mean gross exposure as a share of equity: 1 is always fully invested, 0 is never in the market.

    :param weights: ``[T]`` for one asset or ``[T, A]``, held after the trade of each bar.
    """
    return float(np.abs(_two_dimensional("weights", weights)).sum(axis=1).mean())


def net_exposure(weights: ArrayLike) -> float:
    """Compute the mean net exposure, longs minus shorts, as a share of equity: the weight of a constant mix like it.

    :param weights: ``[T]`` for one asset or ``[T, A]``, held after the trade of each bar.
    """
    return float(_two_dimensional("weights", weights).sum(axis=1).mean())


def hit_rate(returns: ArrayLike) -> float:
    """Compute the share of winning bars among those in which the account moved; 0 if it never did.

    :param returns: ``[T]``, simple and per bar.
    """
    values = as_series("returns", returns, 1)
    moved = int((np.abs(values) > ROUNDING).sum())
    return float((values > ROUNDING).sum()) / moved if moved else 0.0


def cost_share(gain: float, costs: float) -> float:
    """Compute the share of the gross gain that costs took: 0 is none, 1 is all, infinite without a gross gain.

    :param gain: what the account gained after costs, in money.
    :param costs: fees, slippage and carry paid, in money, at least 0.
    """
    require(math.isfinite(gain), "gain", gain, "finite")
    require(0.0 <= costs < math.inf, "costs", costs, "finite and at least 0")
    gross = gain + costs
    return costs / gross if gross > 0.0 else (math.inf if costs > 0.0 else 0.0)


def excess_returns(returns: ArrayLike, reference: ArrayLike = 0.0, at_least: int = 1) -> Floats:
    """Return the returns ``[T]`` in excess of a reference, checked.

    :param returns: ``[T]``, simple and per bar.
    :param reference: such as the return of the riskless asset, one number or ``[T]``.
    :param at_least: the fewest bars.
    """
    values = as_series("returns", returns, at_least)
    below = np.asarray(reference, dtype=np.float64)
    legal = f"a number or of shape {values.shape}, as the returns"
    require(below.shape in ((), values.shape), "the shape of the reference return", below.shape, legal)
    require_finite("the reference return", np.atleast_1d(below))
    return np.asarray(values - below)


def _deviation(values: Floats) -> float:
    """Return the standard deviation, 0 for a constant despite rounding."""
    deviation = float(np.std(values, ddof=1))
    return deviation if deviation > ROUNDING else 0.0


def _grown(logarithm: float) -> float:
    """Return the growth of which this is the logarithm; infinite where no float can hold it."""
    return math.expm1(logarithm) if logarithm < LARGEST_LOG else math.inf


def _gain_over_risk(gain: float, risk: float) -> float:
    if risk > 0.0:
        return gain / risk
    return 0.0 if abs(gain) <= ROUNDING else math.copysign(math.inf, gain)


def _two_dimensional(name: str, values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    require(array.ndim in (1, 2) and array.size >= 1, name, array.shape, "of shape [T] or [T, A] with at least one entry")
    require_finite(name, array)
    return array[:, None] if array.ndim == 1 else array


@dataclass(frozen=True)
class AlphaBeta:
    """The regression returns = alpha + beta benchmark + noise, with Newey-West standard errors.

    :param alpha: per year (per bar times `periods`): the return that the benchmark does not explain.
    :param beta: move of the account per move of the benchmark.
    :param alpha_t: alpha over its standard error. 0 where a fit without residuals leaves an alpha of 0, infinite otherwise.
    :param beta_t: beta over its standard error.
    :param alpha_p: two-sided p-value of alpha = 0.
    :param r_squared: share of the variance that the benchmark explains.
    :param lags: autocorrelations in the standard errors.
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
    :param lags: number of autocorrelations to allow for, below T; None takes :func:`newey_west_lags`.
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
