"""Sharpe ratios and luck, after Bailey and Lopez de Prado: PSR, deflated Sharpe ratio, overfitting (PBO).

Sharpe ratios here are per bar, not per year.
"""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from tailguard.evaluate.stats.performance import sharpe
from tailguard.evaluate.stats.series import ROUNDING, Floats, as_series, require_finite
from tailguard.validation import require


def probabilistic_sharpe(returns: ArrayLike, hurdle: float = 0.0, inflation: float = 1.0) -> float:
    """Compute the probabilistic Sharpe ratio (PSR): the confidence that the true Sharpe ratio exceeds `hurdle`.

    Phi((SR - hurdle) sqrt((n - 1) / inflation) / sqrt(1 - g3 SR + (g4 - 1)/4 SR^2)), g3 skewness, g4 kurtosis (3 for a normal
    distribution).

    :param returns: ``[T]``, at least 3, not constant.
    :param hurdle: Sharpe ratio per bar to exceed; an annual one divided by the root of the bars per year.
    :param inflation: of the variance by autocorrelation, at least 1, from
        :func:`tailguard.evaluate.stats.dependence.variance_inflation`; 1 takes the bars as independent, as the paper does, and
        is too sure where returns trend.
    """
    values = _varying(returns)
    require(math.isfinite(hurdle), "hurdle", hurdle, "finite")
    _require_inflation(inflation)
    deviation = math.sqrt(_sharpe_variance(values))
    return float(ndtr((sharpe(values, 1.0) - hurdle) * math.sqrt((len(values) - 1) / inflation) / deviation))


def expected_max_sharpe(trials: int, deviation: float) -> float:
    """Compute the Sharpe ratio that the best of several trials without skill is expected to reach by chance.

    deviation ((1 - c) Phi^-1(1 - 1/N) + c Phi^-1(1 - 1/(N e))), c = 0.5772 (Euler); 0 for one trial.

    :param trials: N, everything that was tried, discarded runs included.
    :param deviation: standard deviation of the trials' Sharpe ratios, at least 0; the result has its unit.
    """
    require(trials >= 1, "trials", trials, "at least 1: count every run that was looked at")
    require(0.0 <= deviation < math.inf, "deviation", deviation, "finite and at least 0")
    if trials == 1:
        return 0.0
    c = float(np.euler_gamma)
    tail = -(1.0 - c) * ndtri(1.0 / trials) - c * ndtri(1.0 / (trials * math.e))
    return deviation * float(tail)


def deflated_sharpe(returns: ArrayLike, trials: int, deviation: float | None = None, inflation: float = 1.0) -> float:
    """Compute the deflated Sharpe ratio (DSR): the PSR against what the best of all trials would reach by chance.

    Above 0.95 passes. With one trial it is the PSR against 0. Of N trials without skill, the best passes by luck in
    less than 5 % of cases.

    :param returns: ``[T]`` of the chosen trial, at least 3, not constant.
    :param trials: everything that was tried, discarded runs included.
    :param deviation: standard deviation of the trials' Sharpe ratios per bar. None takes that of trials without skill,
        sqrt(inflation / (T - 1)); trials that really differ have more, near copies of one another less.
    :param inflation: see :func:`probabilistic_sharpe`.
    """
    values = _varying(returns)
    _require_inflation(inflation)
    spread = math.sqrt(inflation / (len(values) - 1)) if deviation is None else deviation
    return probabilistic_sharpe(values, expected_max_sharpe(trials, spread), inflation)


def minimum_track_record(returns: ArrayLike, hurdle: float = 0.0, confidence: float = 0.95, inflation: float = 1.0) -> float:
    """Compute the bars needed for the PSR to reach `confidence`, if the sample's Sharpe ratio and moments are the true ones.

    1 + inflation (1 - g3 SR + (g4 - 1)/4 SR^2) (z / (SR - hurdle))^2; infinite if the Sharpe ratio is not above the hurdle.

    :param returns: ``[T]``, at least 3, not constant.
    :param hurdle: Sharpe ratio per bar to exceed.
    :param confidence: in (0.5, 1); 0.95 is usual.
    :param inflation: see :func:`probabilistic_sharpe`.
    """
    values = _varying(returns)
    require(math.isfinite(hurdle), "hurdle", hurdle, "finite")
    _require_inflation(inflation)
    require(0.5 < confidence < 1.0, "confidence", confidence, "in (0.5, 1)")
    edge = sharpe(values, 1.0) - hurdle
    return 1.0 + inflation * _sharpe_variance(values) * (float(ndtri(confidence)) / edge) ** 2 if edge > 0.0 else math.inf


def minimum_backtest_years(trials: int, annual_sharpe: float) -> float:
    """Compute the years of data below which the best of several trials without skill is expected to reach this Sharpe ratio.

    (E[max of N standard normals] / annual_sharpe)^2, at most 2 ln N / annual_sharpe^2.

    :param trials: everything that was tried.
    :param annual_sharpe: what the best trial shows, per year, positive.
    """
    require(0.0 < annual_sharpe < math.inf, "annual_sharpe", annual_sharpe, "finite and positive")
    return (expected_max_sharpe(trials, 1.0) / annual_sharpe) ** 2


def _require_inflation(inflation: float) -> None:
    require(1.0 <= inflation < math.inf, "inflation", inflation, "finite and at least 1")


def _varying(returns: ArrayLike) -> Floats:
    values = as_series("returns", returns, 3)
    deviation = float(np.std(values))
    require(deviation > ROUNDING, "the deviation of returns", deviation, "positive: constant returns have no Sharpe ratio")
    return values


def _sharpe_variance(values: Floats) -> float:
    """Compute 1 - g3 SR + (g4 - 1)/4 SR^2 from moments without bias correction, which keep it from turning negative."""
    ratio = sharpe(values, 1.0)
    scores = (values - values.mean()) / np.std(values)
    skewness, kurtosis = float((scores**3).mean()), float((scores**4).mean())
    factor = 1.0 - skewness * ratio + (kurtosis - 1.0) / 4.0 * ratio**2
    require(factor > 0.0, "the variance of the Sharpe ratio", factor, "positive: two values only, in a special proportion")
    return factor


SPLITS_AT_ONCE = 1024  # bounds the memory for thousands of trials


@dataclass(frozen=True)
class Overfitting:
    """Out-of-sample performance of in-sample winners, over all ways to split the data into two halves.

    :param probability: PBO, the share of splits whose in-sample winner is at or below the out-of-sample median. About 0.5 where
        all trials are equally good (or bad), towards 0 where the best trial really is the best. It should be below 0.2.
    :param loss: share of splits whose winner has an out-of-sample Sharpe ratio of at most 0.
    :param slope: regression slope of the winner's out-of-sample on its in-sample Sharpe ratio; 0 if the latter never differs.
    :param logits: ln(omega / (1 - omega)) of each split, omega the winner's out-of-sample rank over N + 1.
    """

    probability: float
    loss: float
    slope: float
    logits: Floats


def overfitting(returns: ArrayLike, blocks: int = 16) -> Overfitting:
    """Compute the probability of backtest overfitting (PBO) of choosing the trial with the best Sharpe ratio.

    By combinatorially symmetric cross-validation (Bailey et al. 2017).

    :param returns: ``[T, N]``, all trials (at least 2) over the same bars, discarded ones included.
    :param blocks: contiguous blocks that make up the halves, even, from 2 to 20, of at least two bars each; 16 blocks make
        12,870 splits.
    """
    values = np.asarray(returns, dtype=np.float64)
    require(values.ndim == 2 and values.shape[1] >= 2, "returns", values.shape, "of shape [T, N] with at least 2 trials")
    require_finite("returns", values)
    require(2 <= blocks <= 20 and blocks % 2 == 0, "blocks", blocks, "even, from 2 to 20")
    require(len(values) >= 2 * blocks, "the number of bars", len(values), f"at least 2 per block, {2 * blocks}")

    centres = values.mean(axis=0)
    parts = np.array_split(values - centres, blocks)
    sizes = np.array([len(part) for part in parts], dtype=np.float64)
    sums = np.stack([part.sum(axis=0) for part in parts])  # [blocks, N]
    squares = np.stack([(part**2).sum(axis=0) for part in parts])
    halves = np.array(list(combinations(range(blocks), blocks // 2)))
    inside = np.zeros((len(halves), blocks))
    np.put_along_axis(inside, halves, 1.0, axis=1)

    omegas, in_sample, out_of_sample = [], [], []
    for chosen in np.array_split(inside, max(len(inside) // SPLITS_AT_ONCE, 1)):
        before = _sharpes(chosen, sizes, sums, squares, centres)  # [C, N]
        after = _sharpes(1.0 - chosen, sizes, sums, squares, centres)
        winners = before.argmax(axis=1)[:, None]
        mine = np.take_along_axis(after, winners, axis=1)
        ranks = (after < mine).sum(axis=1) + ((after == mine).sum(axis=1) + 1.0) / 2.0
        omegas.append(ranks / (values.shape[1] + 1.0))
        in_sample.append(np.take_along_axis(before, winners, axis=1)[:, 0])
        out_of_sample.append(mine[:, 0])
    omega, best, later = np.concatenate(omegas), np.concatenate(in_sample), np.concatenate(out_of_sample)
    logits = np.log(omega / (1.0 - omega))
    spread = float(best.var())
    slope = float(((best - best.mean()) * (later - later.mean())).mean()) / spread if spread > 0.0 else 0.0
    return Overfitting(float((logits <= 0.0).mean()), float((later <= 0.0).mean()), slope, logits)


def _sharpes(chosen: Floats, sizes: Floats, sums: Floats, squares: Floats, centres: Floats) -> Floats:
    """Compute the Sharpe ratios ``[C, N]`` of the blocks that ``chosen[C, blocks]`` marks with 1; 0 where nothing moves."""
    n = (chosen @ sizes)[:, None]
    total = chosen @ sums
    variance = (chosen @ squares - total**2 / n) / (n - 1.0)
    moves = variance > ROUNDING**2
    return np.where(moves, (centres + total / n) / np.sqrt(np.where(moves, variance, 1.0)), 0.0)
