"""Backtests of predicted quantiles: Kupiec, Acerbi-Szekely, probability integral transform, pinball loss.

Predictions are quantiles of the outcome itself, so a predicted loss is negative. The tests take outcomes as independent given
the predictions. Overlapping outcomes are not: of outcomes that span h bars, give every h-th.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaln, kolmogorov

from tailguard.coverage import kupiec_p_value, kupiec_ratio, log_likelihood
from tailguard.evaluate.stats.series import Floats, as_series, require_finite
from tailguard.validation import require

DRAWS_AT_ONCE = 2_000_000  # uniform numbers held in memory


@dataclass(frozen=True)
class CoverageTest:
    """The result of Kupiec's test that outcomes fall below a predicted quantile as often as they should.

    :param bars: number of outcomes.
    :param exceptions: outcomes below the prediction.
    :param expected: number of exceptions that was predicted.
    :param statistic: likelihood ratio, about chi-square with 1 degree of freedom.
    :param p_value: from that chi-square.
    :param exact_p_value: from the binomial distribution; use it when fewer than about 10 exceptions are expected.
    """

    bars: int
    exceptions: int
    expected: float
    statistic: float
    p_value: float
    exact_p_value: float


@dataclass(frozen=True)
class ShortfallTest:
    """The result of Acerbi and Szekely's test that losses beyond a predicted quantile are as frequent and large as predicted.

    :param statistic: Acerbi and Szekely's Z2: 0 on average if the prediction is right, negative if risk was underestimated;
        -1 is twice the predicted losses.
    :param p_value: one-sided, how often the predicted distribution itself gives a statistic that low.
    """

    statistic: float
    p_value: float


@dataclass(frozen=True)
class UniformityTest:
    """The result of the Kolmogorov-Smirnov test that probability integral transforms are uniform.

    :param statistic: the Kolmogorov-Smirnov distance, in [0, 1].
    :param p_value: how often uniform numbers are as far away or farther.
    """

    statistic: float
    p_value: float


def kupiec(outcomes: ArrayLike, value_at_risk: ArrayLike, alpha: float) -> CoverageTest:
    """Test P(outcome < predicted alpha-quantile) = alpha (Kupiec's proportion of failures).

    :param outcomes: ``[T]``.
    :param value_at_risk: the predicted alpha-quantile, negative for a loss, one number or ``[T]``.
    :param alpha: in (0, 1); 0.01 and 0.05 are usual.
    """
    values = as_series("outcomes", outcomes, 1)
    limits = _like("value_at_risk", value_at_risk, values)
    require(0.0 < alpha < 1.0, "alpha", alpha, "in (0, 1)")
    n, exceptions = len(values), int((values < limits).sum())
    counts = np.arange(n + 1, dtype=np.float64)
    ratios = kupiec_ratio(counts, n, alpha)
    statistic = float(ratios[exceptions])
    # Counts whose ratio is the same up to rounding are as extreme as the observed one.
    as_extreme = ratios >= statistic * (1.0 - 1e-9) - 1e-12
    ways = -betaln(n - counts + 1.0, counts + 1.0) - np.log(n + 1.0)  # logarithm of the binomial coefficient
    exact = float(np.exp(ways + log_likelihood(counts, n, alpha))[as_extreme].sum())
    return CoverageTest(n, exceptions, n * alpha, statistic, kupiec_p_value(exceptions, n, alpha), min(exact, 1.0))


def shortfall_statistic(outcomes: ArrayLike, value_at_risk: ArrayLike, expected_shortfall: ArrayLike, alpha: float) -> float:
    """Compute Acerbi and Szekely's (2014) second statistic, Z2 = 1 - sum_t r_t 1{r_t < VaR_t} / (T alpha ES_t).

    :param outcomes: ``[T]``.
    :param value_at_risk: the predicted alpha-quantile, one number or ``[T]``.
    :param expected_shortfall: the predicted mean of the worst alpha share (a CVaR), negative, one number or ``[T]``.
    :param alpha: in (0, 1).
    """
    values = as_series("outcomes", outcomes, 1)
    limits, shortfalls = _like("value_at_risk", value_at_risk, values), _like("expected_shortfall", expected_shortfall, values)
    require(0.0 < alpha < 1.0, "alpha", alpha, "in (0, 1)")
    legal = "negative everywhere: losses are measured in units of the predicted loss"
    require(bool((shortfalls < 0.0).all()), "expected_shortfall", float(shortfalls.max()), legal)
    beyond = np.where(values < limits, values / shortfalls, 0.0)
    return 1.0 - float(beyond.sum()) / (len(values) * alpha)


def acerbi_szekely(
    outcomes: ArrayLike, quantiles: ArrayLike, levels: ArrayLike, alpha: float, *, draws: int = 5000, seed: int = 0
) -> ShortfallTest:
    """Test predicted quantiles by the losses beyond their alpha-quantile (Acerbi and Szekely's Z2).

    The predicted quantile function is linear between its levels and ends at its outermost quantiles. VaR, expected shortfall
    and the distribution of the statistic all come from it.

    :param outcomes: ``[T]``.
    :param quantiles: ``[T, N]`` predicted for each outcome, in any order.
    :param levels: ``[N]`` increasing, in (0, 1).
    :param alpha: tail share, above the lowest level: below it nothing is predicted that could be tested.
    :param draws: simulated series of outcomes.
    :param seed: of the simulation.
    """
    values, predicted, tau = _predictions(outcomes, quantiles, levels)
    require(tau[0] < alpha < 1.0, "alpha", alpha, f"above the lowest level, {tau[0]}, and below 1")
    require(draws >= 2, "draws", draws, "at least 2")
    grid = np.append(tau[tau < alpha], alpha)
    at_alpha = _quantile(predicted, tau, np.full(len(values), alpha), np.arange(len(values)))
    tail = np.concatenate([predicted[:, : len(grid) - 1], at_alpha[:, None]], axis=1)  # [T, L], the quantiles up to alpha
    shortfalls = (grid[0] * tail[:, 0] + ((tail[:, 1:] + tail[:, :-1]) / 2.0 * np.diff(grid)).sum(axis=1)) / alpha
    statistic = shortfall_statistic(values, at_alpha, shortfalls, alpha)
    generator, simulated = np.random.default_rng(seed), np.empty(draws)
    rows = max(DRAWS_AT_ONCE // len(values), 1)
    for first in range(0, draws, rows):
        uniform = generator.random((min(rows, draws - first), len(values)))
        series, bar = np.nonzero(uniform < alpha)
        losses = _quantile(predicted, tau, uniform[series, bar], bar) / shortfalls[bar]
        simulated[first : first + len(uniform)] = 1.0 - np.bincount(series, losses, len(uniform)) / (len(values) * alpha)
    return ShortfallTest(statistic, (1.0 + float((simulated <= statistic).sum())) / (draws + 1.0))


def probability_transform(outcomes: ArrayLike, quantiles: ArrayLike, levels: ArrayLike, *, seed: int = 0) -> Floats:
    """Compute the probability integral transform (PIT) ``[T]``: uniform in (0, 1) if the predicted distributions are right.

    Between two predicted quantiles, beyond the outermost and on a point mass only the probability of the whole interval is
    predicted, so the place within it is drawn at random. That makes the PIT of right predictions exactly uniform.

    :param outcomes: ``[T]``.
    :param quantiles: ``[T, N]`` predicted for each outcome, in any order.
    :param levels: ``[N]`` increasing, in (0, 1).
    :param seed: of the draws.
    """
    values, predicted, tau = _predictions(outcomes, quantiles, levels)
    edges = np.concatenate([[0.0], tau, [1.0]])
    low = edges[(predicted < values[:, None]).sum(axis=1)]
    high = edges[(predicted <= values[:, None]).sum(axis=1) + 1]
    return np.asarray(low + (high - low) * np.random.default_rng(seed).random(len(values)))


def uniformity(transforms: ArrayLike) -> UniformityTest:
    """Test that probability integral transforms ``[T]`` are uniform (Kolmogorov-Smirnov).

    :param transforms: ``[T]``, in [0, 1]: where each outcome stands in the distribution that was predicted for it.
    """
    values = as_series("transforms", transforms, 1)
    require(bool(((values >= 0.0) & (values <= 1.0)).all()), "transforms", (values.min(), values.max()), "in [0, 1]")
    n, ordered = len(values), np.sort(values)
    ranks = np.arange(n + 1) / n
    distance = float(max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max()))
    # Stephens' correction: from 5 outcomes on, p-values below 0.1 are right to 0.002 and larger ones to 0.025.
    return UniformityTest(distance, float(kolmogorov(distance * (np.sqrt(n) + 0.12 + 0.11 / np.sqrt(n)))))


def realised_levels(outcomes: ArrayLike, quantiles: ArrayLike, levels: ArrayLike) -> Floats:
    """Return the share of the outcomes at or below each predicted quantile, ``[N]``: equal to `levels` if calibrated.

    :param outcomes: ``[T]``.
    :param quantiles: ``[T, N]`` predicted for each outcome, in any order.
    :param levels: ``[N]`` increasing, in (0, 1).
    """
    values, predicted, _ = _predictions(outcomes, quantiles, levels)
    return np.asarray((values[:, None] <= predicted).mean(axis=0))


def pinball_loss(outcomes: ArrayLike, quantiles: ArrayLike, levels: ArrayLike) -> Floats:
    """Compute the mean pinball loss u (tau - 1{u < 0}), u = outcome - quantile, ``[N]``: lowest for the right quantile.

    :param outcomes: ``[T]``.
    :param quantiles: ``[T, N]`` predicted for each outcome, in any order.
    :param levels: ``[N]`` increasing, in (0, 1).
    """
    values, predicted, tau = _predictions(outcomes, quantiles, levels)
    misses = values[:, None] - predicted
    return np.asarray((misses * (tau - (misses < 0.0))).mean(axis=0))


def _like(name: str, limits: ArrayLike, values: Floats) -> Floats:
    array = np.asarray(limits, dtype=np.float64)
    require(array.shape in ((), values.shape), f"the shape of {name}", array.shape, f"a number or {values.shape}")
    require_finite(name, np.atleast_1d(array))
    return np.broadcast_to(array, values.shape)


def _predictions(outcomes: ArrayLike, quantiles: ArrayLike, levels: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Return outcomes ``[T]``, sorted quantiles ``[T, N]`` and levels ``[N]``, checked."""
    values, tau = as_series("outcomes", outcomes, 1), as_series("levels", levels, 1)
    predicted = np.asarray(quantiles, dtype=np.float64)
    shape = (len(values), len(tau))
    require(predicted.shape == shape, "the shape of quantiles", predicted.shape, f"{shape}, a row per outcome")
    require_finite("quantiles", predicted)
    increasing = bool((np.diff(tau) > 0.0).all()) and tau[0] > 0.0 and tau[-1] < 1.0
    require(increasing, "levels", tau.tolist(), "increasing and inside (0, 1)")
    return values, np.sort(predicted, axis=1), tau


def _quantile(predicted: Floats, tau: Floats, shares: Floats, rows: np.ndarray) -> Floats:
    """Return the predicted quantiles of ``rows[K]`` at ``shares[K]``: linear between levels, constant beyond the outermost."""
    right = np.clip(np.searchsorted(tau, shares), 1, max(len(tau) - 1, 1))
    if len(tau) == 1:
        return np.asarray(predicted[rows, 0])
    weight = np.clip((shares - tau[right - 1]) / (tau[right] - tau[right - 1]), 0.0, 1.0)
    return np.asarray((1.0 - weight) * predicted[rows, right - 1] + weight * predicted[rows, right])
