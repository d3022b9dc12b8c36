"""Selling an order on paths that are made of observed bars: prices and volumes by the stationary bootstrap.

A step is a bar. Its return moves the price, its volume divides the temporary impact, and neither is known when the trade is
decided: the trader sees the volume of the bar before, and what is usual at this time of the day. Blocks of neighbouring bars
keep the clusters of volatility and volume (Politis and Romano 1994), and a block begins at the time of day at which the one
before ended, which keeps the profile of the day. No optimum is known here; schedules have no exact cost, but can be played.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import ArrayLike, NDArray

from tailguard.envs.batched import StepOutcome
from tailguard.envs.optimal_execution import ExecutionSolution, Floats, OptimalExecution
from tailguard.validation import require

LARGEST_LOG_VOLUME = 5.0  # what is observed is clipped to this
FEWEST_BARS = 20
# Of the mean. Impact that is divided by the volume of a bar says nothing about a bar in which hardly anything was traded.
LEAST_VOLUME = 0.1


@dataclass(frozen=True, eq=False)
class VolumeForecast:
    """The knowledge of volumes beforehand: the profile of a day, and how long a deviation from it lasts.

    The logarithm of a volume less that of its time of day shrinks by the factor `persistence` with every bar.

    :param profile: ``[S]``, usual volume at each time of day, positive.
    :param persistence: from 0 to 1.
    """

    profile: Floats
    persistence: float

    @classmethod
    def fit(cls, volumes: ArrayLike, times: ArrayLike) -> Self:
        """Return the forecast that the volumes of the past suggest.

        :param volumes: ``[K]``, positive, in the order of time.
        :param times: ``[K]``, time of day of each bar, integers from 0 on.
        """
        logs, places = np.log(np.asarray(volumes, np.float64)), np.asarray(times, np.int64)
        counts = np.bincount(places)
        profile = np.bincount(places, logs) / np.maximum(counts, 1)
        deviations = logs - profile[places]
        scale = float(deviations @ deviations)
        persistence = float(deviations[1:] @ deviations[:-1]) / scale if scale > 0.0 else 0.0
        return cls(np.exp(profile), min(max(persistence, 0.0), 1.0))

    def ahead(self, volumes: Floats, times: NDArray[np.int64], steps: int) -> Floats:
        """Return the forecasts of the coming bars, ``[B, steps]``.

        :param volumes: ``[B]``, of the present bars.
        :param times: ``[B]``, their times of day.
        :param steps: how many bars.
        """
        bars = np.arange(1, steps + 1)
        deviations = np.log(volumes / self.profile[times])
        coming = self.profile[(times[:, None] + bars) % len(self.profile)]
        forecasts: Floats = coming * np.exp(deviations[:, None] * self.persistence**bars)
        return forecasts


class BarExecution(OptimalExecution):
    """The sale of an order on resampled bars; action and reward are those of :class:`OptimalExecution`.

    The observation has two more columns at the end: the logarithm of the relative volume of the bar before, and that of the
    pace of VWAP (:meth:`vwap_share`) over the even pace.

    :param num_envs: the number of copies.
    :param returns: ``[K]``, log returns of the bars; their mean is removed, so that there is nothing to earn by waiting.
    :param volumes: ``[K]``, volumes of the same bars, positive; scaled to a mean of 1, and at least a tenth of it.
    :param bars_per_day: how many bars a day has; 1 for daily bars.
    :param mean_block: mean length of a block in bars; 1 keeps no dependence between bars.
    :param times: ``[K]``, the time of day of each bar, an integer from 0 on; None is bars that are all alike.
    :param forecast: of volumes; None is fitted to these bars. Give that of the past to bars of a test.
    :param settings: the other parameters of :class:`OptimalExecution`; ``horizon`` and ``volatility`` follow from the bars.
    """

    state_arrays = (*OptimalExecution.state_arrays, "_bar")

    def __init__(
        self,
        num_envs: int = 1,
        *,
        returns: ArrayLike,
        volumes: ArrayLike,
        bars_per_day: float = 1.0,
        mean_block: float = 20.0,
        times: ArrayLike | None = None,
        forecast: VolumeForecast | None = None,
        **settings: Any,
    ) -> None:
        """Check the parameters, which the class explains."""
        moves, sizes = np.asarray(returns, np.float64), np.asarray(volumes, np.float64)
        enough = moves.ndim == 1 and len(moves) >= FEWEST_BARS and bool(np.isfinite(moves).all())
        require(enough, "returns", moves, f"at least {FEWEST_BARS} finite numbers")
        legal = sizes.shape == moves.shape and bool((sizes > 0.0).all() and np.isfinite(sizes).all())
        require(legal, "volumes", sizes, "one positive number for each return")
        require(0.0 < bars_per_day < math.inf, "bars_per_day", bars_per_day, "positive and finite")
        require(1.0 <= mean_block < math.inf, "mean_block", mean_block, "at least 1")
        for name in ("horizon", "volatility"):
            require(name not in settings, name, settings.get(name), "left out: it follows from the bars")
        self.returns_bps = 1e4 * (moves - moves.mean())
        self.volumes, self.mean_block = np.maximum(sizes / sizes.mean(), LEAST_VOLUME), mean_block
        self.times = np.zeros(len(moves), np.int64) if times is None else np.asarray(times, np.int64)
        legal = self.times.shape == moves.shape and bool((self.times >= 0).all())
        require(legal, "times", times, "one integer from 0 on for each return")
        self.forecast = VolumeForecast.fit(self.volumes, self.times) if forecast is None else forecast
        enough = len(self.forecast.profile) > int(self.times.max())
        require(
            enough, "times", int(self.times.max()), f"below {len(self.forecast.profile)}, as in the profile of the forecast"
        )
        # Bars by their time of day: where those of a time begin, and how many there are.
        self._by_time = np.argsort(self.times, kind="stable")
        self._bars_at = np.bincount(self.times)
        self._first_at = np.cumsum(self._bars_at) - self._bars_at
        steps = settings.get("steps", 20)
        volatility = float(self.returns_bps.std()) * math.sqrt(bars_per_day)
        super().__init__(num_envs, horizon=steps / bars_per_day, volatility=volatility, **settings)
        self._bar = np.zeros(num_envs, dtype=np.int64)

    def solve(self, risk_aversion: float | None = None, points: int = 1000) -> ExecutionSolution:
        """Raise: the optimum on resampled bars is not known.

        :param risk_aversion: see :class:`OptimalExecution`.
        :param points: see :class:`OptimalExecution`.
        """
        raise NotImplementedError("the optimum on resampled bars is not known; compare with twap() and almgren_chriss()")

    def vwap_share(self) -> Floats:
        """Return the share of what is left that VWAP sells next, of every copy: in proportion to the forecast volumes."""
        remaining = np.arange(self.steps) < np.maximum(self.steps - self._played, 1)[:, None]
        forecasts = self.forecast.ahead(self.volumes[self._bar], self.times[self._bar], self.steps)
        shares: Floats = forecasts[:, 0] / np.where(remaining, forecasts, 0.0).sum(axis=1)
        return shares

    def _observation_box(self) -> Box:
        orders = super()._observation_box()
        limits = np.full(2, LARGEST_LOG_VOLUME, np.float32)
        return Box(np.append(orders.low, -limits), np.append(orders.high, limits))

    def _begin(self, rows: NDArray[np.bool_]) -> None:
        super()._begin(rows)
        self._bar[rows] = (self._uniforms_of(rows, 1)[:, 0] * len(self.volumes)).astype(np.int64)

    def _observe(self) -> NDArray[np.float32]:
        pace = self.vwap_share() * np.maximum(self.steps - self._played, 1)
        seen = np.log(np.stack((self.volumes[self._bar], pace), axis=1)).clip(-LARGEST_LOG_VOLUME, LARGEST_LOG_VOLUME)
        return np.column_stack((super()._observe(), seen)).astype(np.float32)

    def _advance(self, actions: Floats) -> StepOutcome:
        _, uniforms = self._draws(3)
        new_block = uniforms[:, 0] * self.mean_block < 1.0
        following = (self._bar + 1) % len(self.volumes)
        time = self.times[following]
        drawn = self._by_time[self._first_at[time] + (uniforms[:, 1] * self._bars_at[time]).astype(np.int64)]
        self._bar = np.where(new_block, drawn, following)
        return self._trade(actions, self.returns_bps[self._bar], self.volumes[self._bar], uniforms[:, 2])
