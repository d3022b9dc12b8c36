"""A market that pays a premium for holding and crashes rarely, whose mean- and CVaR-optimal positions are known.

An episode is one decision: a position a in [0, 1] is held for one period. It earns the premium m a for certain. With
probability q the market crashes, and the position has to be sold into the fall: each unit sold moves the price against the
rest, so that the loss is k a^2 / 2. The tail depends on the position, and more than in proportion:

    R = m a - J k a^2 / 2,    J = 1 with probability q, else 0.

R has two values, and the worse one has probability q. Hence, with w = min(q / alpha, 1) the share of crashes in the tail,

    CVaR_alpha(R) = m a - w k a^2 / 2,

a parabola that is highest at a = m / (w k), or at 1 if that is less, with the value m a / 2 where it is inside. The mean is
alpha = 1, w = q. Tails no larger than q are all crash: for them the best position is m / k.
"""

from dataclasses import dataclass

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from tailguard.envs.batched import BatchedEnv, StepOutcome
from tailguard.validation import require


@dataclass(frozen=True)
class CrashSolution:
    """The position with the highest CVaR.

    :param alpha: the level of the CVaR; 1 is the mean.
    :param position: the position with the highest CVaR, in [0, 1].
    :param objective: that CVaR.
    """

    alpha: float
    position: float
    objective: float


class CrashMarket(BatchedEnv):
    """The market as an environment: every step is an episode.

    The action x in [-1, 1] is the position (x + 1) / 2, the reward R. The observation is a constant.

    :param num_envs: the number of copies.
    :param premium: m, the earnings of a whole position.
    :param crash_probability: q.
    :param impact: k, twice the loss of a whole position in a crash.
    :param seed: random seed.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        premium: float = 1.0,
        crash_probability: float = 0.05,
        impact: float = 25.0,
        seed: int | None = None,
    ) -> None:
        """Check the parameters, which the class explains."""
        require(0.0 < premium < np.inf, "premium", premium, "positive and finite")
        require(0.0 < crash_probability < 1.0, "crash_probability", crash_probability, "between 0 and 1")
        require(0.0 < impact < np.inf, "impact", impact, "positive and finite")
        super().__init__(num_envs, Box(0.0, 1.0, (1,)), Box(-1.0, 1.0, (1,)), seed)
        self.premium, self.crash_probability, self.impact = premium, crash_probability, impact

    def cvar(self, position: float, alpha: float = 1.0) -> float:
        """Return the CVaR of R.

        :param position: in [0, 1].
        :param alpha: the level of the CVaR; 1 is the mean.
        """
        require(0.0 <= position <= 1.0, "position", position, "between 0 and 1")
        return self.premium * position - self._crash_share(alpha) * self.impact * position**2 / 2.0

    def solve(self, alpha: float | None = None) -> CrashSolution:
        """Return the best position.

        :param alpha: the share of worst results that counts; ``None`` or 1 is the mean.
        """
        alpha = 1.0 if alpha is None else alpha
        position = min(self.premium / (self._crash_share(alpha) * self.impact), 1.0)
        return CrashSolution(alpha, position, self.cvar(position, alpha))

    def _crash_share(self, alpha: float) -> float:
        require(0.0 < alpha <= 1.0, "alpha", alpha, "above 0 and at most 1")
        return min(self.crash_probability / alpha, 1.0)

    def _begin(self, rows: NDArray[np.bool_]) -> None:
        """Do nothing: there is no state."""

    def _observe(self) -> NDArray[np.float32]:
        return np.ones((self.num_envs, 1), dtype=np.float32)

    def _advance(self, actions: NDArray[np.float64]) -> StepOutcome:
        position = (actions[:, 0] + 1.0) / 2.0
        crash = self.np_random.random(self.num_envs) < self.crash_probability
        rewards = self.premium * position - np.where(crash, self.impact * position**2 / 2.0, 0.0)
        return rewards, np.ones(self.num_envs, dtype=np.bool_), np.zeros(self.num_envs, dtype=np.bool_)
