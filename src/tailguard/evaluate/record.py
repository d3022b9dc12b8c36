"""The record of an evaluation: everything that a verdict rests on and a report shows, and nothing else.

One account is one :class:`Track`. The agent of a record is the ensemble of its training seeds: the mean of their target
weights, traded as one account over the out-of-sample folds one after another. It needs no choice of a seed by looking at the
test, can be traded as it stands, and the seeds alone are in the record beside it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.evaluate.stats.risk_tests import CoverageTest, ShortfallTest, UniformityTest
from tailguard.evaluate.stats.series import equity_of
from tailguard.evaluate.verdict import Verdict
from tailguard.validation import require

Floats = NDArray[np.float64]


class Figure(NamedTuple):
    """A statistic with its 95 % interval.

    :param value: of the data; may be infinite (a gain without risk) or NaN (not defined, such as alpha over a flat market).
    :param low: lower end; None where none is computed, as for turnover.
    :param high: upper end, likewise.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, eq=False)
class AccountHistory:
    """What one account did, bar by bar.

    :param name: of the agent, the seed or the baseline.
    :param times: ``[n]`` ends of the bars over which the returns were earned.
    :param returns: ``[n]`` simple, after all costs, each above -1.
    :param weights: ``[n, assets]`` held while the return was earned, as shares of equity; negative is short.
    :param turnover: ``[n]`` traded notional as a share of equity.
    :param costs: ``[n]`` fees and slippage as a share of the equity before the bar.
    """

    name: str
    times: pd.DatetimeIndex
    returns: Floats
    weights: Floats
    turnover: Floats
    costs: Floats

    def __post_init__(self) -> None:
        """Refuse columns of different lengths."""
        n = len(self.times)
        for label, column in (("returns", self.returns), ("turnover", self.turnover), ("costs", self.costs)):
            require(column.shape == (n,), f"the shape of {label}", column.shape, f"{(n,)}, one per time")
        legal = f"({n}, assets), one row per time"
        require(self.weights.ndim == 2 and len(self.weights) == n, "the shape of weights", self.weights.shape, legal)

    @property
    def equity(self) -> Floats:
        """``[n + 1]``, 1 at the start."""
        return equity_of(self.returns)


class CostPoint(NamedTuple):
    """The agent's own decisions at other costs.

    :param multiple: of fee, spread and slippage; 0 is free, 1 is as tested.
    :param sharpe: per year.
    :param total_return: over the whole test.
    """

    multiple: float
    sharpe: float
    total_return: float


class Delay(NamedTuple):
    """The agent's own decisions, each traded some bars later than decided.

    :param bars: extra bars of delay.
    :param sharpe: per year, with the delay.
    :param total_return: with the delay.
    :param sharpe_before: per year, as tested.
    :param total_return_before: as tested.
    """

    bars: int
    sharpe: float
    total_return: float
    sharpe_before: float
    total_return_before: float


class Dispersion(NamedTuple):
    """How far the training seeds are apart, in Sharpe ratios per year.

    :param median: of the seeds.
    :param low: lower quartile.
    :param high: upper quartile.
    :param worst: seed.
    :param best: seed.
    :param interquartile_mean: mean of the middle half of all (fold, seed) pairs.
    :param interquartile_low: lower end of its 95 % interval, seeds resampled within folds.
    :param interquartile_high: upper end.
    """

    median: float
    low: float
    high: float
    worst: float
    best: float
    interquartile_mean: float
    interquartile_low: float
    interquartile_high: float


@dataclass(frozen=True, eq=False)
class Sanity:
    """What an honest sceptic would try on the agent's decisions.

    :param cost_curve: at 0 to 5 times the costs.
    :param break_even_cost: cost per unit of traded notional that would have left nothing of the gross gain (0.001 is 10 basis
        points); negative if there was no gross gain, None if the agent never traded.
    :param delay: one extra bar between decision and trade.
    :param regimes: one row per regime: `kind` (year or volatility), `regime`, `bars`, `agent_return`, `agent_sharpe`,
        `market_return`, `market_sharpe`, `agent_max_drawdown`, `exposure`.
    :param dispersion: of the seeds; None with a single one.
    :param permutation_p: how often the agent's own positions, permuted in blocks, reach its Sharpe ratio.
    :param permutation_block: bars per block of that test.
    """

    cost_curve: list[CostPoint]
    break_even_cost: float | None
    delay: Delay
    regimes: pd.DataFrame
    dispersion: Dispersion | None
    permutation_p: float
    permutation_block: int


@dataclass(frozen=True, eq=False)
class Calibration:
    """What the critic predicted on test bars against what came.

    Outcomes are returns to come, in the units of the reward (changes of log equity), discounted; see
    :mod:`tailguard.evaluate.calibration` for what is compared. Overlapping outcomes are thinned for the tests, not here.

    :param horizon: bars that one outcome spans.
    :param levels: ``[N]`` of the predicted quantiles.
    :param times: ``[n]`` when each prediction was made.
    :param outcomes: ``[n]``.
    :param quantiles: ``[n, N]`` predicted.
    :param transforms: ``[n]`` probability integral transforms, uniform if the predictions are right.
    :param realised: ``[N]`` share of the outcomes at or below each predicted quantile; equal to `levels` if calibrated.
    :param coverage: Kupiec's test by tail, such as 0.05.
    :param shortfall: Acerbi and Szekely's test by tail; a tail is left out where the predicted shortfall is no loss.
    :param uniformity: Kolmogorov-Smirnov test of the transforms.
    """

    horizon: int
    levels: Floats
    times: pd.DatetimeIndex
    outcomes: Floats
    quantiles: Floats
    transforms: Floats
    realised: Floats
    coverage: dict[float, CoverageTest]
    shortfall: dict[float, ShortfallTest]
    uniformity: UniformityTest


@dataclass(frozen=True)
class Provenance:
    """Where the figures come from.

    :param config: the whole configuration as YAML.
    :param fingerprint: of the data, a checksum of its bars.
    :param versions: of Tailguard and what it stands on, by name.
    :param seeds: of the trainings.
    :param trials: agents that there were to choose from by looking at these test bars, discarded ones included.
    :param date: of the evaluation, as YYYY-MM-DD.
    """

    config: str
    fingerprint: str
    versions: Mapping[str, str]
    seeds: tuple[int, ...]
    trials: int
    date: str


@dataclass(frozen=True, eq=False)
class Evaluation:
    """An agent out of sample, with everything that it is compared with.

    :param title: one line.
    :param source: name of the data set or file.
    :param periods_per_year: bars per year.
    :param prices: closes over the out-of-sample time, one column per asset, one row per time of the tracks.
    :param agent: what the verdict is about: the ensemble of the seeds, the out-of-sample folds chained.
    :param seeds: the same for each training seed alone.
    :param baselines: under the same accounting, over the same bars; see :mod:`tailguard.evaluate.sanity` for those that are
        made from the agent's own positions.
    :param market: name of the baseline that merely holds the market.
    :param statistics: from the name of a track to the name of a statistic to its figure.
    :param verdict: in plain words.
    :param sanity: costs, delay, regimes, seeds, permutation.
    :param calibration: of the critic; None where there is none.
    :param folds: one row per fold: `fold`, `train_first`, `train_last`, `embargo`, `test_first`, `test_last` (rows, the last
        one excluded), `train_from`, `train_to`, `test_from`, `test_to` (times, the last one included).
    :param training: curves with the columns `fold`, `seed`, `step` and one per metric.
    :param warnings: what went wrong in training, as sentences.
    :param attack: one row per attack and strength: `attack`, `epsilon`, `statistic`, `value`, `low`, `high`; None if none ran.
    :param lineage: entries of a population's lineage.jsonl; None without a population.
    :param provenance: config, data, versions, seeds, trials, date.
    """

    title: str
    source: str
    periods_per_year: float
    prices: pd.DataFrame
    agent: AccountHistory
    seeds: list[AccountHistory]
    baselines: list[AccountHistory]
    market: str
    statistics: dict[str, dict[str, Figure]]
    verdict: Verdict
    sanity: Sanity
    calibration: Calibration | None
    folds: pd.DataFrame
    training: pd.DataFrame
    provenance: Provenance
    warnings: list[str] = field(default_factory=list)
    attack: pd.DataFrame | None = None
    lineage: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        """Refuse tracks over other bars than the agent's, and names that occur twice."""
        names = [track.name for track in self.tracks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        require(not repeated, "the names of the tracks", repeated, "all different")
        require(self.market in [track.name for track in self.baselines], "market", self.market, "the name of a baseline")
        for track in self.tracks:
            same = track.times.equals(self.agent.times)
            require(same, f"the times of {track.name}", len(track.times), f"those of the agent, {len(self.agent.times)}")
        require(len(self.prices) == len(self.agent.times), "the rows of prices", len(self.prices), "one per time")
        require(0.0 < self.periods_per_year < math.inf, "periods_per_year", self.periods_per_year, "finite and positive")

    @property
    def tracks(self) -> list[AccountHistory]:
        """The agent, its seeds and the baselines."""
        return [self.agent, *self.seeds, *self.baselines]

    def track(self, name: str) -> AccountHistory:
        """One of them by name."""
        found = {track.name: track for track in self.tracks}
        require(name in found, "track", name, f"one of {', '.join(found)}")
        return found[name]


__all__ = [
    "AccountHistory",
    "Calibration",
    "CostPoint",
    "Delay",
    "Dispersion",
    "Evaluation",
    "Figure",
    "Floats",
    "Provenance",
    "Sanity",
]
