"""The base class of the batched environments with a known optimum.

An environment here is ``num_envs`` independent copies of one game, stepped together with numpy. It follows the
same-step convention of Gymnasium: when a copy ends, the returned observation is already the first one of its next
episode, and the last one of the old episode is found in ``info["final_obs"]``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import Space
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from tailguard.envs.vec_env import Stateful
from tailguard.validation import require

StepOutcome = tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]


class BatchedEnv(VectorEnv[NDArray[np.float32], NDArray[Any], NDArray[Any]], Stateful, ABC):
    """A batch of copies of one game; a subclass implements reset, observation and step, and names the arrays of its state.

    :param num_envs: the number of copies.
    :param single_observation_space: the observation space of one copy.
    :param single_action_space: the action space of one copy.
    :param seed: random seed; ``None`` takes it from the operating system.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 (Gymnasium's own name)

    state_arrays: ClassVar[tuple[str, ...]] = ()  # names of the attributes that are the state of the copies

    def __init__(
        self, num_envs: int, single_observation_space: Space[Any], single_action_space: Space[Any], seed: int | None
    ) -> None:
        """Make the spaces and seed the generator."""
        require(num_envs >= 1, "num_envs", num_envs, "at least 1")
        self.num_envs = num_envs
        self.single_observation_space = single_observation_space
        self.single_action_space = single_action_space
        self.observation_space = batch_space(single_observation_space, num_envs)
        self.action_space = batch_space(single_action_space, num_envs)
        self._has_begun = False
        super().reset(seed=seed)

    @abstractmethod
    def _begin(self, rows: NDArray[np.bool_]) -> None:
        """Start an episode in the copies in `rows`."""

    @abstractmethod
    def _observe(self) -> NDArray[np.float32]:
        """Return a new array [num_envs, D] with the present observations."""

    @abstractmethod
    def _advance(self, actions: NDArray[Any]) -> StepOutcome:
        """Take one step with legal actions and return new arrays: rewards, terminated, truncated."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start a new episode in every copy.

        :param seed: seeds the generator anew; ``None`` continues with its present state.
        :param options: there are none; a non-empty dictionary is refused rather than ignored.
        """
        require(not options, "options", options, "None, since no options exist")
        super().reset(seed=seed)
        self._begin(np.ones(self.num_envs, dtype=np.bool_))
        self._has_begun = True
        return self._observe(), {}

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Take one step in every copy, and start a new episode where one ended.

        :param actions: one action per copy, in the shape of ``action_space``.
        """
        if not self._has_begun:
            raise ResetNeeded("call reset() before the first step()")
        rewards, terminated, truncated = self._advance(self._legal(actions))
        observations = self._observe()
        ended = terminated | truncated
        if not ended.any():
            return observations, rewards, terminated, truncated, {}
        self._begin(ended)
        info = {"final_obs": observations, "_final_obs": ended}
        return self._observe(), rewards, terminated, truncated, info

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every copy and of the generator."""
        arrays = {name: getattr(self, name).copy() for name in self.state_arrays}
        return {"begun": self._has_begun, "random": self.np_random.bit_generator.state, "arrays": arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._has_begun = state["begun"]
        self.np_random.bit_generator.state = state["random"]
        for name in self.state_arrays:
            saved, present = state["arrays"][name], getattr(self, name)
            require(saved.shape == present.shape, f"the saved {name}", saved.shape, f"an array of shape {present.shape}")
            setattr(self, name, saved.copy())

    def _legal(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return the actions checked, and clipped to the box where the action is continuous."""
        actions = np.asarray(actions)
        space = self.single_action_space
        require(actions.shape == self.action_space.shape, "actions.shape", actions.shape, f"{self.action_space.shape}")
        if isinstance(space, Discrete):
            integers = np.issubdtype(actions.dtype, np.integer)
            require(integers, "actions.dtype", str(actions.dtype), "an integer type")
            legal = ((actions >= 0) & (actions < space.n)).all()
            require(bool(legal), "actions", actions, f"between 0 and {space.n - 1}")
            return actions
        require(bool(np.isfinite(actions).all()), "actions", actions, "finite")
        assert isinstance(space, Box), "actions are discrete or in a box"
        return np.clip(actions.astype(np.float64), space.low, space.high)
