"""Out-of-sample calibration of the critic: its predicted return distribution compared with realised returns.

The critic predicts, at every decision, the distribution of the discounted sum of future rewards (changes of log equity) of its
own policy. Out of sample, h bars later, that sum is known but for a remainder with weight gamma^h; h is the first number of
bars with gamma^h <= 5 %, 59 bars at gamma = 0.95. So the prediction at bar t is compared with sum_{k < h} gamma^k r_{t+k}.
Decisions that are h bars apart share no reward; only those are compared, because the tests take outcomes as independent.
The critics of an agent that is averse to the tail of a period predict the sum of the rewards to its end; then the predictions
at the first decisions of periods are compared with the sums over them.
"""

import math

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from tailguard.evaluate.record import Calibration
from tailguard.evaluate.stats import risk_tests
from tailguard.evaluate.stats.risk_tests import ShortfallTest
from tailguard.evaluate.stats.series import Floats
from tailguard.periods import Period
from tailguard.validation import require

REMAINDER = 0.05
TAILS = (0.05, 0.1)
FEWEST_OUTCOMES = 20


def outcome_horizon(gamma: float) -> int | None:
    """Return the bars after which a discounted sum is known but for :data:`REMAINDER`; None if it never is (gamma = 1)."""
    if gamma >= 1.0:
        return None
    return 1 if gamma <= REMAINDER else math.ceil(math.log(REMAINDER) / math.log(gamma))


def discounted_sums(rewards: ArrayLike, gamma: float, bars: int) -> Floats:
    """Compute sum_{k < bars} gamma^k r_{t+k} for every t that has as many rewards, ``[T - bars + 1]``.

    :param rewards: ``[T]``.
    :param gamma: discount in [0, 1].
    :param bars: of each sum, from 1 to T.
    """
    values = np.asarray(rewards, dtype=np.float64)
    require(1 <= bars <= len(values), "bars", bars, f"from 1 to the number of rewards, {len(values)}")
    weights = gamma ** np.arange(bars)
    return np.asarray(np.lib.stride_tricks.sliding_window_view(values, bars) @ weights)


def calibrate(
    times: pd.DatetimeIndex,
    rewards: ArrayLike,
    quantiles: ArrayLike,
    levels: ArrayLike,
    gamma: float,
    fold_rows: list[int],
    period: Period | None = None,
) -> Calibration | None:
    """Compare predictions with outcomes at every h-th decision of each fold, or at the first decision of every whole period.

    :param times: ``[n]`` of the bars after the decisions.
    :param rewards: ``[n]`` of the agent over these bars.
    :param quantiles: ``[n, N]`` predicted at the decisions; NaN after a ruin, where there are no decisions.
    :param levels: ``[N]``.
    :param gamma: discount of the agent.
    :param fold_rows: ``[F]`` number of rows of each fold; no outcome extends beyond the end of its fold.
    :param period: of an agent whose critics predict the sum of the rewards to its end; None for discounted rewards to come.
    :return: None if there are too few independent outcomes, or if gamma is 1 and there is no period.
    """
    earned, predicted = np.asarray(rewards, dtype=np.float64), np.asarray(quantiles, dtype=np.float64)
    require(sum(fold_rows) == len(earned), "the sum of fold_rows", sum(fold_rows), f"{len(earned)}, the number of rewards")
    if period is not None and period.unit:
        return _calibrate_calendar(times, earned, predicted, np.asarray(levels, dtype=np.float64), fold_rows, period)
    bars, gamma = (outcome_horizon(gamma), gamma) if period is None else (period.count, 1.0)
    if bars is None:
        return None
    rows: list[NDArray[np.int64]] = []
    outcomes: list[Floats] = []
    first = 0
    for n in fold_rows:
        if n >= bars:
            sums = discounted_sums(earned[first : first + n], gamma, bars)[::bars]
            rows.append(first + bars * np.arange(len(sums)))
            outcomes.append(sums)
        first += n
    chosen, values = np.concatenate([*rows, np.zeros(0, np.int64)]), np.concatenate([*outcomes, np.zeros(0)])
    predicts = np.isfinite(predicted[chosen]).all(axis=1)
    if predicts.sum() < FEWEST_OUTCOMES:
        return None
    chosen = chosen[predicts]
    return compare(bars, times[chosen], values[predicts], predicted[chosen], np.asarray(levels, dtype=np.float64))


def _calibrate_calendar(
    times: pd.DatetimeIndex, earned: Floats, predicted: Floats, levels: Floats, fold_rows: list[int], period: Period
) -> Calibration | None:
    """Compare predictions at the first decision of every whole period of the calendar inside a fold with its sum of rewards."""
    chosen: list[int] = []
    outcomes: list[float] = []
    first = 0
    for n in fold_rows:
        numbers = period.rows(times[first : first + n]).own
        begins = first + 1 + np.flatnonzero(numbers[1:] != numbers[:-1])  # before the first of these a period was cut
        sums = np.add.reduceat(earned, begins)[:-1] if len(begins) > 1 else np.zeros(0)
        chosen += begins[: len(sums)].tolist()
        outcomes += sums.tolist()
        first += n
    rows, values = np.array(chosen, np.int64), np.array(outcomes)
    predicts = np.isfinite(predicted[rows]).all(axis=1)
    if predicts.sum() < FEWEST_OUTCOMES:
        return None
    rows, usual = rows[predicts], round(float(np.median(np.diff(rows))))
    return compare(usual, times[rows], values[predicts], predicted[rows], levels)


def compare(bars: int, times: pd.DatetimeIndex, outcomes: Floats, quantiles: Floats, levels: Floats) -> Calibration:
    """Compare predicted quantiles with independent outcomes.

    :param bars: that an outcome spans.
    :param times: ``[n]`` of the predictions.
    :param outcomes: ``[n]``.
    :param quantiles: ``[n, N]``.
    :param levels: ``[N]``.
    """
    ordered = np.sort(quantiles, axis=1)
    tails = [tail for tail in TAILS if tail > levels[0]]
    transforms = risk_tests.probability_transform(outcomes, ordered, levels)
    return Calibration(
        horizon=bars,
        levels=levels,
        times=times,
        outcomes=outcomes,
        quantiles=ordered,
        transforms=transforms,
        realised=risk_tests.realised_levels(outcomes, ordered, levels),
        coverage={tail: risk_tests.kupiec(outcomes, _quantile_column(ordered, levels, tail), tail) for tail in tails},
        shortfall={tail: test for tail in tails if (test := _shortfall(outcomes, ordered, levels, tail)) is not None},
        uniformity=risk_tests.uniformity(transforms),
    )


def _quantile_column(quantiles: Floats, levels: Floats, tail: float) -> Floats:
    return np.array([np.interp(tail, levels, row) for row in quantiles])


def _shortfall(outcomes: Floats, quantiles: Floats, levels: Floats, tail: float) -> ShortfallTest | None:
    """Run the shortfall test; None if some predicted tail is no loss: the test divides losses by the predicted ones."""
    if bool((_quantile_column(quantiles, levels, tail) >= 0.0).any()):
        return None
    return risk_tests.acerbi_szekely(outcomes, quantiles, levels, tail)
