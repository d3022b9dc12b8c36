"""What an episode has earned so far, as part of the observation.

The best action for a tail depends on what has been earned already: a player who is ahead may dare what one who is behind must
not. So agents that are trained on a tail see, beside the observation, the discounted sum of rewards since the episode began and
the discount that the next reward gets; and, where one agent serves many tails, the tail it is asked to look at.
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
        """Count one step."""
        self.total += self.discount * rewards
        # Smaller discounts than this would leave the range of float32, in which observations travel.
        np.maximum(self.discount * self.gamma, 1e-30, out=self.discount)

    def begin(self, which: Any) -> None:
        """Start anew in some environments."""
        self.total[which], self.discount[which] = 0.0, 1.0

    def columns(self) -> NDArray[np.float32]:
        """``[B, 2]``: the return so far and the discount."""
        return np.column_stack((self.total, self.discount)).astype(np.float32)


class ReturnObserver(VecEnvWrapper, ArrayStepper, Stateful):
    """Append the running return and its discount to the observations; and a tail, where several are given.

    :param venv: the environments, with a one-dimensional Box of observations.
    :param gamma: discount, that of the agent.
    :param alphas: tails, one of which is drawn for each episode; None appends none.
    :param seed: of these draws.
    """

    def __init__(self, venv: VecEnv, gamma: float, alphas: Sequence[float] | None = None, seed: int | None = None) -> None:
        super().__init__(venv, augmented_space(venv.observation_space, alphas is not None))
        self.running = RunningReturn(venv.num_envs, gamma)
        self.generator = np.random.default_rng(seed)
        self.set_alphas(alphas)

    def set_alphas(self, alphas: Sequence[float] | None) -> None:
        """Draw the tails of coming episodes from these, and those of the running ones at once."""
        self.alphas = None if alphas is None else np.asarray(alphas, np.float64)
        self.alpha = self._draw(self.num_envs)

    def serves(self, gamma: float, alphas: Sequence[float] | None) -> bool:
        """Whether it shows an agent with these settings what it needs."""
        same = (self.alphas is None) == (alphas is None) and (alphas is None or np.array_equal(cast(Any, self.alphas), alphas))
        return self.running.gamma == gamma and bool(same)

    def reset(self) -> VecEnvObs:
        """Begin all episodes."""
        obs = cast(NDArray[Any], self.venv.reset())
        self.running.begin(slice(None))
        self.alpha = self._draw(self.num_envs)
        return self._watched(obs, slice(None))

    def step_wait(self) -> VecEnvStepReturn:
        """As SB3 wants it; final observations are in the dictionaries."""
        obs, rewards, dones, infos = self.venv.step_wait()
        self.running.add(np.asarray(rewards, np.float64))
        ended = np.flatnonzero(dones)
        if len(ended):
            finals = self._watched(np.stack([infos[i]["terminal_observation"] for i in ended]), ended)
            for i, final in zip(ended, finals, strict=True):
                infos[i] = {**infos[i], "terminal_observation": final}
            self._begin(ended)
        return self._watched(np.asarray(obs), slice(None)), rewards, dones, infos

    def step_with_arrays(self, actions: NDArray[Any]) -> tuple[StepArrays, list[dict[str, Any]]]:
        """As arrays, with the dictionaries of the wrapped environments."""
        step, infos = step_with_arrays(self.venv, actions)
        self.running.add(step.rewards)
        if len(step.ended):
            step = step._replace(final_obs=self._watched(step.final_obs, step.ended))
            self._begin(step.ended)
        return step._replace(obs=self._watched(step.obs, slice(None))), infos

    def state_dict(self) -> dict[str, Any]:
        """What the running episodes have earned, their tails, and the stream that tails are drawn from."""
        return {
            "total": self.running.total.copy(),
            "discount": self.running.discount.copy(),
            "alpha": self.alpha.copy(),
            "random": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.running.total, self.running.discount = state["total"].copy(), state["discount"].copy()
        self.alpha = state["alpha"].copy()
        self.generator.bit_generator.state = state["random"]

    def _begin(self, ended: NDArray[np.intp]) -> None:
        self.running.begin(ended)
        self.alpha[ended] = self._draw(len(ended))

    def _draw(self, n: int) -> NDArray[np.float64]:
        return np.ones(n) if self.alphas is None else self.generator.choice(self.alphas, n)

    def _watched(self, obs: NDArray[Any], which: Any) -> NDArray[np.float32]:
        own = obs.shape[1]
        shown = np.empty((len(obs), *cast(tuple[int, ...], self.observation_space.shape)), np.float32)
        shown[:, :own], shown[:, own], shown[:, own + 1] = obs, self.running.total[which], self.running.discount[which]
        if self.alphas is not None:
            shown[:, own + 2] = self.alpha[which]
        return shown


class ReturnAugmentedEnv(gym.Wrapper[NDArray[Any], Any, NDArray[Any], Any]):
    """The same for a single environment.

    :param env: the environment.
    :param gamma: discount, that of the agent.
    """

    def __init__(self, env: gym.Env[NDArray[Any], Any], gamma: float) -> None:
        super().__init__(env)
        self.observation_space = augmented_space(env.observation_space, False)
        self.running = RunningReturn(1, gamma)

    def reset(self, **options: Any) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin an episode."""
        obs, info = self.env.reset(**options)
        self.running.begin(slice(None))
        return self._watched(obs), info

    def step(self, action: Any) -> tuple[NDArray[Any], Any, bool, bool, dict[str, Any]]:
        """Step, and count the reward."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.running.add(np.array([reward], np.float64))
        return self._watched(obs), reward, terminated, truncated, info

    def _watched(self, obs: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate((obs, self.running.columns()[0])).astype(np.float32)


def watched(env: VecEnv, gamma: float, alphas: Sequence[float] | None, seed: int | None) -> VecEnv:
    """The environments with a :class:`ReturnObserver` around them, unless they bring one that fits."""
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
    """The space of observations with the columns that are appended to them."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ValueError(f"the running return can be appended to a one-dimensional Box only, got {space}")
    low = [-np.inf, 0.0, 0.0][: 3 if with_alpha else 2]
    high = [np.inf, 1.0, 1.0][: 3 if with_alpha else 2]
    return spaces.Box(np.append(space.low, low).astype(np.float32), np.append(space.high, high).astype(np.float32))
