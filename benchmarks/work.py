"""The work that the speed benchmark measures: a batched random-walk market, cheap to step, with staggered episode ends, and
observations of other spaces that cost nothing to make.

64 environments share one series of 20,000 bars; an observation is 31 momentum features and the position; the action is the
next position in [-1, 1]; an episode is 512 steps, and the first one of each environment starts at a random age, so that ends
are spread over time as in any real task.
"""

import copy

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from tailguard.envs.vec_env import ArrayVecEnv, StepArrays

N_BARS, N_FEATURES, EPISODE, COST, VOLATILITY = 20_000, 31, 512, 1e-4, 1e-3


class WorkEnv(ArrayVecEnv):
    """The market as an SB3 VecEnv."""

    def __init__(self, n_envs: int = 64, seed: int = 0, stagger: bool = True) -> None:
        returns = np.random.default_rng(0).standard_normal(N_BARS) * VOLATILITY
        log_price = np.cumsum(returns)
        self.features = np.zeros((N_BARS, N_FEATURES), np.float32)
        for k in range(1, N_FEATURES + 1):
            self.features[k:, k - 1] = (log_price[k:] - log_price[:-k]) / (VOLATILITY * np.sqrt(k))
        self.next_return = np.append(returns[1:], 0.0)
        self.generator = np.random.default_rng(seed)
        self.stagger = stagger
        super().__init__(n_envs, spaces.Box(-1e6, 1e6, (N_FEATURES + 1,), np.float32), spaces.Box(-1.0, 1.0, (1,), np.float32))

    def reset(self):
        self.bar = self.generator.integers(0, N_BARS - EPISODE - 2, self.num_envs)
        self.age = self.generator.integers(0, EPISODE, self.num_envs) if self.stagger else np.zeros(self.num_envs, np.int64)
        self.position = np.zeros(self.num_envs)
        return self._observe()

    def step_arrays(self, actions):
        target = np.minimum(np.maximum(actions[:, 0], -1.0), 1.0)
        rewards = 100.0 * (target * self.next_return[self.bar] - COST * np.abs(target - self.position))
        self.position = target.astype(np.float64)
        self.bar += 1
        self.age += 1
        obs = self._observe()
        truncated = self.age >= EPISODE
        ended = np.flatnonzero(truncated)
        final_obs = obs[ended]
        if len(ended):
            self.bar[ended] = self.generator.integers(0, N_BARS - EPISODE - 2, len(ended))
            self.age[ended], self.position[ended] = 0, 0.0
            obs = self._observe()
        return StepArrays(obs, rewards, np.zeros(self.num_envs, np.bool_), truncated, ended, final_obs)

    def _observe(self):
        obs = np.empty((self.num_envs, N_FEATURES + 1), np.float32)
        obs[:, :-1], obs[:, -1] = self.features[self.bar], self.position
        return obs


NUMBERS, FRAMES = spaces.Box(-1.0, 1.0, (10,), np.float32), 64
# By name: images as Atari's, an image with numbers beside it, and what goal environments observe.
SPACES = {
    "images": spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "image and numbers": spaces.Dict({"image": spaces.Box(0, 255, (3, 36, 36), np.uint8), "numbers": NUMBERS}),
    "goals": spaces.Dict({"observation": NUMBERS, "achieved_goal": NUMBERS, "desired_goal": NUMBERS}),
}


class FramesEnv(gym.Env):
    """Observations of any space, drawn beforehand; four actions, of which the first pays; 64 steps an episode."""

    def __init__(self, space, first=0):
        self.observation_space, self.action_space, self.t = copy.deepcopy(space), spaces.Discrete(4), first
        self.observation_space.seed(first)
        self.frames = [self.observation_space.sample() for _ in range(FRAMES)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.frames[self.t % FRAMES], {}

    def step(self, action):
        self.t += 1
        return self.frames[self.t % FRAMES], float(action == 0), False, self.t % FRAMES == 0, {}


def frames_env(name, n_envs):
    """Return SB3's environments with observations of one of :data:`SPACES`."""
    return DummyVecEnv([lambda first=first: FramesEnv(SPACES[name], first) for first in range(n_envs)])
