"""Is a Sharpe ratio more than luck? Bailey and Lopez de Prado's answers. Sharpe ratios here are per bar, not per year."""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from tailguard.evaluate.stats.performance import sharpe
from tailguard.evaluate.stats.series import ROUNDING, Floats, as_series
from tailguard.validation import require


def probabilistic_sharpe(returns: ArrayLike, hurdle: float = 0.0) -> float:
    """PSR: the confidence that the true Sharpe ratio exceeds `hurdle`, given the length and the shape of the sample.

    Phi((SR - hurdle) sqrt(n - 1) / sqrt(1 - g3 SR + (g4 - 1)/4 SR^2)), g3 skewness, g4 kurtosis (3 for a normal law).
    Assumes independent bars; where returns trend it is too sure (:mod:`tailguard.evaluate.stats.bootstrap` is not).

    :param returns: ``[T]``, at least 3, not constant.
    :param hurdle: Sharpe ratio per bar to exceed; an annual one divided by the root of the bars per year.
    """
    values = _varying(returns)
    require(math.isfinite(hurdle), "hurdle", hurdle, "finite")
    spread = math.sqrt(_shape(values))
    return float(ndtr((sharpe(values, 1.0) - hurdle) * math.sqrt(len(values) - 1) / spread))


def expected_max_sharpe(trials: int, deviation: float) -> float:
    """What the best of several trials without skill reaches by chance, on average.

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


def deflated_sharpe(returns: ArrayLike, trials: int, deviation: float | None = None) -> float:
    """DSR: the PSR of the chosen trial against what the best of all trials would reach by chance. Above 0.95 passes.

    With one trial it is the PSR against 0. With N independent trials it passes by luck less often than the 5 % it promises.

    :param returns: ``[T]`` of the chosen trial, at least 3, not constant.
    :param trials: everything that was tried, discarded runs included.
    :param deviation: standard deviation of the trials' Sharpe ratios per bar. None takes the one that trials without skill
        have, 1 / sqrt(T - 1); trials that really differ have more, copies of one another less.
    """
    values = _varying(returns)
    spread = 1.0 / math.sqrt(len(values) - 1) if deviation is None else deviation
    return probabilistic_sharpe(values, expected_max_sharpe(trials, spread))


def minimum_track_record(returns: ArrayLike, hurdle: float = 0.0, confidence: float = 0.95) -> float:
    """Bars needed for the PSR to reach `confidence`, if the sample's Sharpe ratio and shape are the true ones.

    1 + (1 - g3 SR + (g4 - 1)/4 SR^2) (z / (SR - hurdle))^2; infinite if the Sharpe ratio is not above the hurdle.

    :param returns: ``[T]``, at least 3, not constant.
    :param hurdle: Sharpe ratio per bar to exceed.
    :param confidence: in (0.5, 1); 0.95 is usual.
    """
    values = _varying(returns)
    require(math.isfinite(hurdle), "hurdle", hurdle, "finite")
    require(0.5 < confidence < 1.0, "confidence", confidence, "in (0.5, 1)")
    edge = sharpe(values, 1.0) - hurdle
    return 1.0 + _shape(values) * (float(ndtri(confidence)) / edge) ** 2 if edge > 0.0 else math.inf


def minimum_backtest_years(trials: int, annual_sharpe: float) -> float:
    """Years of data below which the best of several trials without skill is expected to show this Sharpe ratio by luck.

    (E[max of N standard normals] / annual_sharpe)^2, at most 2 ln N / annual_sharpe^2.

    :param trials: everything that was tried.
    :param annual_sharpe: what the best trial shows, per year, positive.
    """
    require(0.0 < annual_sharpe < math.inf, "annual_sharpe", annual_sharpe, "finite and positive")
    return (expected_max_sharpe(trials, 1.0) / annual_sharpe) ** 2


def _varying(returns: ArrayLike) -> Floats:
    values = as_series("returns", returns, 3)
    deviation = float(np.std(values))
    require(deviation > ROUNDING, "the deviation of returns", deviation, "positive: constant returns have no Sharpe ratio")
    return values


def _shape(values: Floats) -> float:
    """1 - g3 SR + (g4 - 1)/4 SR^2. The sample's own moments, without bias correction, keep it from turning negative."""
    ratio = sharpe(values, 1.0)
    scores = (values - values.mean()) / np.std(values)
    skewness, kurtosis = float((scores**3).mean()), float((scores**4).mean())
    factor = 1.0 - skewness * ratio + (kurtosis - 1.0) / 4.0 * ratio**2
    require(factor > 0.0, "the variance of the Sharpe ratio", factor, "positive: two values only, in a special proportion")
    return factor
