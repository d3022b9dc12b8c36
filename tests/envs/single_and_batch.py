"""A copy of a batch against the single environment that Gymnasium makes."""

from typing import Any

import gymnasium as gym
import numpy as np

from tailguard.envs.streams import StreamedEnv

SEED, COPIES, STEPS = 11, 5, 60


def assert_equal_to_the_bit(make: type[StreamedEnv], name: str, settings: dict[str, Any]) -> None:
    """Play random actions through several episodes in a batch, and in single environments with the seeds of its copies."""
    batch = make(COPIES, **settings)
    batch.action_space.seed(0)
    actions = [batch.action_space.sample() for _ in range(STEPS)]
    first, _ = batch.reset(seed=SEED)
    together = [batch.step(action) for action in actions]
    assert any(terminated.any() for _, _, terminated, _, _ in together[: STEPS // 2])
    for copy in range(COPIES):
        single = gym.make(name, **settings)
        obs, _ = single.reset(seed=SEED + copy)
        assert np.array_equal(obs, first[copy])
        for action, (next_obs, rewards, terminated, _, info) in zip(actions, together, strict=True):
            obs, reward, ended, _, _ = single.step(action[copy])
            assert np.array_equal(obs, info["final_obs"][copy] if ended else next_obs[copy])
            assert (reward, ended) == (rewards[copy], terminated[copy])
            if ended:
                assert np.array_equal(single.reset()[0], next_obs[copy])
