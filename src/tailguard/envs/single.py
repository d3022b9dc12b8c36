"""A batch of one copy as an ordinary Gymnasium environment."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from tailguard.envs.batched import BatchedEnv


class SingleEnv(gym.Env[NDArray[np.float32], NDArray[Any]]):
    """One copy of a batched environment.

    :param batch: the environment, with one copy.
    """

    def __init__(self, batch: BatchedEnv) -> None:
        if batch.num_envs != 1:
            raise ValueError(f"num_envs is {batch.num_envs}, but it must be 1 for a single environment")
        self.batch = batch
        self.observation_space = batch.single_observation_space
        self.action_space = batch.single_action_space
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode.

        :param seed: seeds this and all later episodes; ``None`` continues.
        :param options: there are none.
        """
        super().reset(seed=seed)
        observations, info = self.batch.reset(seed=seed, options=options)
        self._over = False
        return observations[0], info

    def step(self, action: NDArray[Any]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take one step.

        :param action: of ``action_space``.
        """
        if self._over:
            raise ResetNeeded("the episode is over: call reset()")
        observations, rewards, terminated, truncated, info = self.batch.step(np.asarray(action)[None])
        self._over = bool(terminated[0] | truncated[0])
        last = info["final_obs"][0] if self._over else observations[0]
        return last, float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}
