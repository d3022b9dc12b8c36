"""Tests of many strategies against a benchmark: Hansen's SPA (2005) and the stepwise test of Romano and Wolf (2005).

Both are studentised: a strategy counts by its lead over the standard error of the lead. Mean returns are compared; scale
strategies of different risk to one volatility first, or compare Sharpe ratios with :func:`step_down` on bootstrap draws.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailguard.evaluate.stats.bootstrap import resample_means
from tailguard.evaluate.stats.dependence import FEWEST_BARS, autocovariances, optimal_block_length
from tailguard.evaluate.stats.series import ROUNDING, Floats, as_columns, as_series
from tailguard.validation import require


@dataclass(frozen=True)
class SuperiorAbility:
    """The result of the SPA test that no strategy has a higher mean return than the benchmark.

    :param statistic: the largest studentised lead, 0 if no strategy leads.
    :param p_value: Hansen's consistent p-value: strategies that are clearly bad do not count.
    :param p_lower: p-value as if the strategies that trail had never been tried; too small.
    :param p_upper: White's reality check, as if all strategies equalled the benchmark; too large with bad ones among them.
    :param best: name of the strategy with the largest lead.
    :param block: expected block length, in bars.
    """

    statistic: float
    p_value: float
    p_lower: float
    p_upper: float
    best: str
    block: float


@dataclass(frozen=True)
class _Leads:
    """Studentised leads of strategies over a benchmark.

    :param t: studentised leads ``[K]``.
    :param noise: studentised resampled leads minus the observed ones, ``[B, K]``: leads as they would be if there were none.
    :param hopeless: ``[K]``, strategies so far behind that more data would not bring them back (Hansen's threshold).
    :param block: expected block length.
    """

    t: Floats
    noise: Floats
    hopeless: NDArray[np.bool_]
    block: float

    def under_the_null(self) -> Floats:
        """Return resampled leads ``[B, K]`` if no strategy were better; hopeless ones do not affect the rest."""
        return self.noise + np.where(self.hopeless, self.t, 0.0)


def superior_ability(
    benchmark: ArrayLike,
    strategies: Mapping[str, ArrayLike],
    *,
    draws: int = 5000,
    block: float | None = None,
    seed: int = 0,
) -> SuperiorAbility:
    """Test superior predictive ability (SPA): is the best strategy better than the benchmark, given how many were tried?

    :param benchmark: returns ``[T]``, at least 8 bars.
    :param strategies: from names to returns ``[T]`` over the same bars; every one that was tried.
    :param draws: resamples.
    :param block: expected block length; None takes the longest optimal one of the differences to the benchmark.
    :param seed: of the draws.
    """
    leads = _leads(benchmark, strategies, draws, block, seed)
    statistic = max(float(leads.t.max()), 0.0)
    p_value = _p_value(leads.under_the_null(), statistic)
    p_lower = _p_value(leads.noise + np.minimum(leads.t, 0.0), statistic)
    p_upper = _p_value(leads.noise, statistic)
    return SuperiorAbility(statistic, p_value, p_lower, p_upper, list(strategies)[int(leads.t.argmax())], leads.block)


def superior_strategies(
    benchmark: ArrayLike,
    strategies: Mapping[str, ArrayLike],
    *,
    size: float = 0.05,
    draws: int = 5000,
    block: float | None = None,
    seed: int = 0,
) -> list[str]:
    """Return the strategies that beat the benchmark (StepM); the chance that any of them does not is at most `size`.

    :param benchmark: returns ``[T]``, at least 8 bars.
    :param strategies: from names to returns ``[T]`` over the same bars; every one that was tried.
    :param size: in (0, 1); 0.05 is usual.
    :param draws: resamples.
    :param block: expected block length; None takes the longest optimal one of the differences to the benchmark.
    :param seed: of the draws.
    """
    leads = _leads(benchmark, strategies, draws, block, seed)
    better = _stepwise(leads.t, leads.under_the_null(), size)
    return [name for name, is_better in zip(strategies, better, strict=True) if is_better]


def step_down(estimates: ArrayLike, draws: ArrayLike, size: float = 0.05) -> NDArray[np.bool_]:
    """Return which of several resampled statistics are above 0, with a chance of at most `size` that any is not.

    :param estimates: ``[K]``, such as differences of Sharpe ratios.
    :param draws: ``[B, K]``, the statistics of each resample. One that does not vary counts if it is above 0.
    :param size: in (0, 1).
    :return: ``[K]``.
    """
    values = as_series("estimates", estimates, 1)
    resampled = np.asarray(draws, dtype=np.float64)
    legal = f"of shape [B, {len(values)}] with B >= 2"
    require(resampled.ndim == 2 and resampled.shape[1] == len(values) and len(resampled) >= 2, "draws", resampled.shape, legal)
    t, noise = _studentised(values, resampled - values, resampled.std(axis=0, ddof=1))
    return _stepwise(t, noise, size)


def _leads(benchmark: ArrayLike, strategies: Mapping[str, ArrayLike], draws: int, block: float | None, seed: int) -> _Leads:
    reference = as_series("benchmark", benchmark, FEWEST_BARS)
    columns = as_columns("strategies", strategies, FEWEST_BARS)
    require(len(columns) == len(reference), "the length of strategies", len(columns), f"{len(reference)}, as the benchmark")
    require(draws >= 2, "draws", draws, "at least 2")
    differences = np.ascontiguousarray(columns - reference[:, None])
    n = len(differences)
    block = max(optimal_block_length(column) for column in differences.T) if block is None else block
    require(1.0 <= block <= n, "block", block, f"from 1 to the number of bars, {n}")
    means = differences.mean(axis=0)
    resampled = np.empty((draws, differences.shape[1]))
    resample_means(differences, 1.0 / block, np.random.default_rng(seed), resampled)
    errors = np.array([_standard_error(column, block) for column in differences.T])
    t, noise = _studentised(means, resampled - means, errors)
    return _Leads(t, noise, t < -math.sqrt(2.0 * math.log(math.log(n))), block)


def _standard_error(values: Floats, block: float) -> float:
    """Compute the standard error of the mean of a resample, in closed form (Politis and Romano 1994)."""
    n = len(values)
    lags = np.arange(1, n)
    stays = 1.0 - 1.0 / block  # chance that the next bar belongs to the same block
    weights = (1.0 - lags / n) * stays**lags + lags / n * stays ** (n - lags)
    covariances = autocovariances(values, n - 1)
    return math.sqrt(max(float(covariances[0] + 2.0 * weights @ covariances[1:]), 0.0) / n)


def _studentised(estimates: Floats, noise: Floats, errors: Floats) -> tuple[Floats, Floats]:
    """Divide both by the standard errors; a lead without an error is certain: infinite, or 0."""
    certain = errors <= ROUNDING
    scale = np.where(certain, 1.0, errors)
    sure = np.where(np.abs(estimates) <= ROUNDING, 0.0, np.copysign(np.inf, estimates))
    return np.where(certain, sure, estimates / scale), np.where(certain, 0.0, noise / scale)


def _stepwise(t: Floats, noise: Floats, size: float) -> NDArray[np.bool_]:
    """Reject, step by step, what exceeds the critical value of the maximum over the strategies not yet rejected."""
    require(0.0 < size < 1.0, "size", size, "in (0, 1)")
    better = np.zeros(len(t), dtype=np.bool_)
    while not better.all():
        critical = max(float(np.quantile(noise[:, ~better].max(axis=1), 1.0 - size)), 0.0)
        newly_better = ~better & (t > critical)
        if not newly_better.any():
            break
        better |= newly_better
    return better


def _p_value(leads: Floats, statistic: float) -> float:
    """Return how often the largest lead of a resample reaches the observed one; the data count as one more resample."""
    reached = np.maximum(leads.max(axis=1), 0.0) >= statistic
    return (1.0 + float(reached.sum())) / (len(leads) + 1.0)
