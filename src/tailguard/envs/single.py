"""A batch of one copy as an ordinary Gymnasium environment."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from tailguard.envs.batched import BatchedEnv


class SingleEnv(gym.Env[NDArray[np.float32], NDArray[Any]]):
    """One copy of a batched environment.

    A batch begins the next episode at the end of one. :meth:`reset` continues with that episode, so a single environment and a
    copy in a batch go through the same episodes.

    :param batch: the environment, with one copy.
    """

    def __init__(self, batch: BatchedEnv) -> None:
        if batch.num_envs != 1:
            raise ValueError(f"num_envs is {batch.num_envs}, but it must be 1 for a single environment")
        self.batch = batch
        self.observation_space = batch.single_observation_space
        self.action_space = batch.single_action_space
        self._over = True
        self._next_obs: NDArray[np.float32] | None = None  # the first of the next episode, after the end of one

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode.

        :param seed: seeds this and all later episodes; ``None`` continues.
        :param options: there are none.
        """
        super().reset(seed=seed)
        obs, self._next_obs = self._next_obs, None
        if obs is None or seed is not None or options:
            obs = self.batch.reset(seed=seed, options=options)[0][0]
        self._over = False
        return obs, {}

    def step(self, action: NDArray[Any]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take one step.

        :param action: of ``action_space``.
        """
        if self._over:
            raise ResetNeeded("the episode is over: call reset()")
        observations, rewards, terminated, truncated, info = self.batch.step(np.asarray(action)[None])
        self._over = bool(terminated[0] | truncated[0])
        self._next_obs = observations[0] if self._over else None
        last = info["final_obs"][0] if self._over else observations[0]
        return last, float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}
