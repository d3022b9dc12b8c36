"""Selling an order on paths that are made of observed bars: prices and volumes by the stationary bootstrap.

A step is a bar. Its return moves the price, its volume divides the temporary impact, and neither is known when the trade is
decided: the trader sees the volume of the bar before. Blocks of neighbouring bars keep the clusters of volatility and volume
(Politis and Romano 1994). No optimum is known here; schedules have no exact cost, but can be played.
"""

import math
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import ArrayLike, NDArray

from tailguard.envs.batched import StepOutcome
from tailguard.envs.optimal_execution import ExecutionSolution, Floats, OptimalExecution
from tailguard.validation import require

LARGEST_LOG_VOLUME = 5.0  # what is observed is clipped to this
FEWEST_BARS = 20


class BarExecution(OptimalExecution):
    """The sale of an order on resampled bars; action and reward are those of :class:`OptimalExecution`.

    The observation has one more column, at the end: the logarithm of the relative volume of the bar before.

    :param num_envs: the number of copies.
    :param returns: ``[K]``, log returns of the bars; their mean is removed, so that there is nothing to earn by waiting.
    :param volumes: ``[K]``, volumes of the same bars, positive; scaled to a mean of 1.
    :param bars_per_day: how many bars a day has; 1 for daily bars.
    :param mean_block: mean length of a block in bars; 1 keeps no dependence between bars.
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
        self.volumes, self.mean_block = sizes / sizes.mean(), mean_block
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

    def _observation_box(self) -> Box:
        orders = super()._observation_box()
        limit = np.float32(LARGEST_LOG_VOLUME)
        return Box(np.append(orders.low, -limit), np.append(orders.high, limit))

    def _begin(self, rows: NDArray[np.bool_]) -> None:
        super()._begin(rows)
        self._bar[rows] = (self._uniforms_of(rows, 1)[:, 0] * len(self.volumes)).astype(np.int64)

    def _observe(self) -> NDArray[np.float32]:
        seen = np.clip(np.log(self.volumes[self._bar]), -LARGEST_LOG_VOLUME, LARGEST_LOG_VOLUME)
        return np.column_stack((super()._observe(), seen)).astype(np.float32)

    def _advance(self, actions: Floats) -> StepOutcome:
        _, uniforms = self._draws(3)
        new_block = uniforms[:, 0] * self.mean_block < 1.0
        drawn = (uniforms[:, 1] * len(self.volumes)).astype(np.int64)
        self._bar = np.where(new_block, drawn, (self._bar + 1) % len(self.volumes))
        return self._trade(actions, self.returns_bps[self._bar], self.volumes[self._bar], uniforms[:, 2])
