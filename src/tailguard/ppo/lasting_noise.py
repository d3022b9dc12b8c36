"""Exploration that lasts for several steps.

Noise that is drawn anew at every step moves a position back and forth: with costs of trading that is dear, and it tries hardly
anything, since the next step takes it back. Here a share of it, the memory, is carried on to the steps after:

    d_0 = 0,    d_{t+1} = memory (d_t + a_t - m_t).

The action a_t is drawn around its mean m_t and stored with its probability as always; the environment gets a_t + d_t. To the
learner d_t is a wind that belongs to the environment. So probabilities stay exact, and the advantage of an action contains what
its noise goes on to do. (Correlated noise whose density is taken for that of independent noise is biased as soon as
observations tell of earlier actions, as the position of a trader does.)
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class LastingNoise:
    """What earlier noise adds to the actions of B environments.

    :param n_envs: B.
    :param size: numbers in an action.
    :param memory: share of the noise that is left after a step, in [0, 1).
    """

    def __init__(self, n_envs: int, size: int, memory: float) -> None:
        self.memory = memory
        self.drift = np.zeros((n_envs, size), np.float32)

    def carry(self, actions: Floats, outputs: Floats) -> Floats:
        """What the environments get for actions ``[B, A]`` that were drawn around the first A of the outputs ``[B, n]``."""
        if self.memory == 0.0:
            return actions
        given = actions + self.drift
        self.drift = np.float32(self.memory) * (given - outputs[:, : actions.shape[1]])
        return given

    def begin(self, which: Any) -> None:
        """Start anew in some environments."""
        self.drift[which] = 0.0

    def state_dict(self) -> dict[str, Any]:
        """What is carried at present."""
        return {"drift": self.drift.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.drift[:] = state["drift"]
