"""The running return of an episode as part of the observation (return augmentation).

The action with the best CVaR depends on what has been earned already: an account that is ahead can take risks that one that is
behind cannot. So risk-averse (CVaR) agents see, beside the observation, the discounted sum of rewards since the episode began
and the discount of the next reward; and, where one agent is conditioned on alpha, the alpha of the episode.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize, is_vecenv_wrapped
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from tailguard.envs.vec_env import ArrayStepper, Stateful, StepArrays, step_with_arrays
from tailguard.validation import require


class RunningReturn:
    """Discounted returns of B running episodes: sum_k gamma^k r_k, and the discount of the next reward.

    :param n_envs: B.
    :param gamma: discount.
    """

    def __init__(self, n_envs: int, gamma: float) -> None:
        require(0.0 < gamma <= 1.0, "gamma", gamma, "in (0, 1]")
        self.gamma = gamma
        self.total, self.discount = np.zeros(n_envs), np.ones(n_envs)

    def add(self, rewards: NDArray[np.float64]) -> None:
        """Add the rewards of one step."""
        self.total += self.discount * rewards
        # Smaller discounts than this would leave the range of float32, in which observations travel.
        np.maximum(self.discount * self.gamma, 1e-30, out=self.discount)

    def begin(self, which: Any) -> None:
        """Start a new episode in some environments."""
        self.total[which], self.discount[which] = 0.0, 1.0

    def columns(self) -> NDArray[np.float32]:
        """Return ``[B, 2]``: the return so far and the discount."""
        return np.column_stack((self.total, self.discount)).astype(np.float32)


class ReturnObserver(VecEnvWrapper, ArrayStepper, Stateful):
    """A wrapper that appends the running return and its discount to the observations, and alpha where several are given.

    :param venv: the environments, with a one-dimensional Box of observations.
    :param gamma: discount of the agent.
    :param alphas: levels of CVaR, one of which is drawn for each episode; None appends none.
    :param seed: random seed of these draws.
    """

    def __init__(self, venv: VecEnv, gamma: float, alphas: Sequence[float] | None = None, seed: int | None = None) -> None:
        super().__init__(venv, augmented_space(venv.observation_space, alphas is not None))
        self.running = RunningReturn(venv.num_envs, gamma)
        self.generator = np.random.default_rng(seed)
        self.set_alphas(alphas)

    def set_alphas(self, alphas: Sequence[float] | None) -> None:
        """Draw the alphas of coming episodes from these, and new ones for the running episodes."""
        self.alphas = None if alphas is None else np.asarray(alphas, np.float64)
        self.alpha = self._draw(self.num_envs)

    def serves(self, gamma: float, alphas: Sequence[float] | None) -> bool:
        """Return True if the wrapper has these settings."""
        same = (self.alphas is None) == (alphas is None) and (alphas is None or np.array_equal(cast(Any, self.alphas), alphas))
        return self.running.gamma == gamma and bool(same)

    def reset(self) -> VecEnvObs:
        """Start all episodes."""
        obs = cast(NDArray[Any], self.venv.reset())
        self.running.begin(slice(None))
        self.alpha = self._draw(self.num_envs)
        return self._with_running_return(obs, slice(None))

    def step_wait(self) -> VecEnvStepReturn:
        """Step as SB3 does, with final observations in the dictionaries."""
        obs, rewards, dones, infos = self.venv.step_wait()
        self.running.add(np.asarray(rewards, np.float64))
        ended = np.flatnonzero(dones)
        if len(ended):
            finals = self._with_running_return(np.stack([infos[i]["terminal_observation"] for i in ended]), ended)
            for i, final in zip(ended, finals, strict=True):
                infos[i] = {**infos[i], "terminal_observation": final}
            self._begin(ended)
        return self._with_running_return(np.asarray(obs), slice(None)), rewards, dones, infos

    def step_with_arrays(self, actions: NDArray[Any]) -> tuple[StepArrays, list[dict[str, Any]]]:
        """Step and return arrays, with the dictionaries of the wrapped environments."""
        step, infos = step_with_arrays(self.venv, actions)
        self.running.add(step.rewards)
        if len(step.ended):
            step = step._replace(final_obs=self._with_running_return(step.final_obs, step.ended))
            self._begin(step.ended)
        return step._replace(obs=self._with_running_return(step.obs, slice(None))), infos

    def state_dict(self) -> dict[str, Any]:
        """Return the returns and alphas of the running episodes, and the state of the generator."""
        return {
            "total": self.running.total.copy(),
            "discount": self.running.discount.copy(),
            "alpha": self.alpha.copy(),
            "random": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.running.total, self.running.discount = state["total"].copy(), state["discount"].copy()
        self.alpha = state["alpha"].copy()
        self.generator.bit_generator.state = state["random"]

    def _begin(self, ended: NDArray[np.intp]) -> None:
        self.running.begin(ended)
        self.alpha[ended] = self._draw(len(ended))

    def _draw(self, n: int) -> NDArray[np.float64]:
        return np.ones(n) if self.alphas is None else self.generator.choice(self.alphas, n)

    def _with_running_return(self, obs: NDArray[Any], which: Any) -> NDArray[np.float32]:
        own = obs.shape[1]
        augmented = np.empty((len(obs), *cast(tuple[int, ...], self.observation_space.shape)), np.float32)
        augmented[:, :own] = obs
        augmented[:, own], augmented[:, own + 1] = self.running.total[which], self.running.discount[which]
        if self.alphas is not None:
            augmented[:, own + 2] = self.alpha[which]
        return augmented


class ReturnAugmentedEnv(gym.Wrapper[NDArray[Any], Any, NDArray[Any], Any]):
    """A single environment with its running return and discount appended to the observation.

    :param env: the environment.
    :param gamma: discount of the agent.
    """

    def __init__(self, env: gym.Env[NDArray[Any], Any], gamma: float) -> None:
        super().__init__(env)
        self.observation_space = augmented_space(env.observation_space, False)
        self.running = RunningReturn(1, gamma)

    def reset(self, **options: Any) -> tuple[NDArray[Any], dict[str, Any]]:
        """Start an episode."""
        obs, info = self.env.reset(**options)
        self.running.begin(slice(None))
        return self._with_running_return(obs), info

    def step(self, action: Any) -> tuple[NDArray[Any], Any, bool, bool, dict[str, Any]]:
        """Take a step, and add its reward to the running return."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.running.add(np.array([reward], np.float64))
        return self._with_running_return(obs), reward, terminated, truncated, info

    def _with_running_return(self, obs: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate((obs, self.running.columns()[0])).astype(np.float32)


def with_running_return(env: VecEnv, gamma: float, alphas: Sequence[float] | None, seed: int | None) -> VecEnv:
    """Wrap the environments in a :class:`ReturnObserver`, unless they have one with the same settings."""
    if not is_vecenv_wrapped(env, ReturnObserver):
        return ReturnObserver(env, gamma, alphas, seed)
    inner, changed = env, False
    while not isinstance(inner, ReturnObserver):
        changed |= isinstance(inner, VecNormalize) and inner.norm_obs
        inner = cast(VecEnvWrapper, inner).venv
    if changed or not inner.serves(gamma, alphas):
        raise ValueError(
            f"the environment brings its own ReturnObserver, which does not fit: it must have gamma = {gamma} and "
            f"alphas = {alphas}, and nothing may change its observations; leave it out, and the agent adds one"
        )
    return env


def augmented_space(space: spaces.Space[Any], with_alpha: bool) -> spaces.Box:
    """Return the observation space with the appended columns."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ValueError(f"the running return can be appended to a one-dimensional Box only, got {space}")
    low = [-np.inf, 0.0, 0.0][: 3 if with_alpha else 2]
    high = [np.inf, 1.0, 1.0][: 3 if with_alpha else 2]
    return spaces.Box(np.append(space.low, low).astype(np.float32), np.append(space.high, high).astype(np.float32))
