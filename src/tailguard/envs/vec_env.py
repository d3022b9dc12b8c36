"""Batched environments for Stable-Baselines3 that report the ends of episodes as arrays.

An SB3 ``VecEnv`` reports the end of an episode through a list of dictionaries, one per environment and step. An
:class:`ArrayVecEnv` gives the same facts as arrays through :meth:`ArrayVecEnv.step_arrays` and builds the dictionaries
from them only when it is stepped the SB3 way.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvObs, VecEnvStepReturn

# Method of an environment that returns which actions are possible, as sb3-contrib names it.
ACTION_MASKS = "action_masks"
# Returns and lengths of running episodes, in the saved state of an adapted environment.
RUNNING = "running_episodes"

# What a Gymnasium vector env says of episodes that have just ended, in its infos.
AT_THE_END = {"final_obs", "_final_obs", "final_info", "_final_info"}


class StepArrays(NamedTuple):
    """One step of a batch of B environments.

    :param obs: ``[B, ...]`` the observation to act on next, or a dict of such arrays; of a new episode where one has ended.
    :param rewards: ``[B]``.
    :param terminated: ``[B]`` the episode ended in a state of its own.
    :param truncated: ``[B]`` the episode was cut: bootstrap from its final observation.
    :param ended: ``[K]`` indices of the environments whose episode ended.
    :param final_obs: ``[K, ...]`` their last observations, or a dict of such arrays.
    :param sample_weights: ``[B]`` how much each step counts, 0 where the action could have no effect; None when all are 1.
    :param period_ended: ``[B]`` the period that returns are counted over ended with the step, which is no end of the episode;
        None where returns have no period.
    :param part_period: ``[B]`` the step belongs to a period of the calendar that had begun before the episode, so that its
        return will be that of a part of a period; None where there is none.
    """

    obs: NDArray[Any]
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    ended: NDArray[np.intp]
    final_obs: NDArray[Any]
    sample_weights: NDArray[np.float32] | None = None
    period_ended: NDArray[np.bool_] | None = None
    part_period: NDArray[np.bool_] | None = None


class Stateful(ABC):
    """Environments, or a wrapper of them, whose state can be saved and restored."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any] | None:
        """Return the state as arrays and plain values, without settings and wrapped environments; None if it has none."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class ArrayStepper(ABC):
    """A wrapper that passes arrays on."""

    @abstractmethod
    def step_with_arrays(self, actions: NDArray[Any]) -> tuple[StepArrays, list[dict[str, Any]]]:
        """Step the wrapped environments; return arrays, and the dictionaries that SB3 expects."""


class ArrayVecEnv(VecEnv):
    """An SB3 ``VecEnv`` whose batch steps in one call. Subclasses give ``reset`` and ``step_arrays``."""

    _actions: NDArray[Any]

    @abstractmethod
    def step_arrays(self, actions: NDArray[Any]) -> StepArrays:
        """Step all environments; those that end are reset at once."""

    def episode_info(self, index: int) -> dict[str, Any]:
        """Return the entries of ``info`` about the episode of environment `index` that has just ended."""
        return {}

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep the actions for :meth:`step_wait`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step, and describe the ends of episodes in the dictionaries that SB3 expects."""
        step = self.step_arrays(self._actions)
        dones = step.terminated | step.truncated if len(step.ended) else step.terminated
        return step.obs, step.rewards, dones, self.infos_of(step)

    def infos_of(self, step: StepArrays) -> list[dict[str, Any]]:
        """Return the dictionaries that SB3 expects of a step."""
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row, index in enumerate(step.ended.tolist()):
            infos[index] = {
                "terminal_observation": _row(step.final_obs, row),
                "TimeLimit.truncated": bool(step.truncated[index] and not step.terminated[index]),
                **self.episode_info(index),
            }
        if step.sample_weights is not None:
            for index in np.flatnonzero(step.sample_weights != 1.0).tolist():
                infos[index]["sample_weight"] = float(step.sample_weights[index])
        return infos

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def answers_at_once(self, method_name: str) -> bool:
        """Return True if one call of the method answers for all environments, False if each has to be asked."""
        return True

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return the batch's attribute, once for each of the indices."""
        value = None if attr_name == "render_mode" else getattr(self, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Raise: the environments of a batch share their attributes."""
        raise NotImplementedError(f"cannot set {attr_name!r}: the environments of a batch share their attributes")

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """Call a method of the batch once and return its result, once for each of the indices."""
        result = getattr(self, method_name)(*args, **kwargs)
        return [result for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        """Return False: no wrapper fits inside a batch."""
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """Return no images: a batch cannot be rendered."""
        return [None] * self.num_envs


class GymVectorAdapter(ArrayVecEnv, Stateful):
    """Any Gymnasium ``VectorEnv`` that resets in the same step, as an SB3 ``VecEnv``.

    :param env: a vector environment with ``metadata["autoreset_mode"] = AutoresetMode.SAME_STEP``.
    :param seed: seed of the first reset.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], seed: int | None = None) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            raise ValueError(
                f"the vector env must reset in the same step, but has {mode}: use gymnasium.make_vec(name, num_envs=..., "
                'vectorization_mode="sync", vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP})'
            )
        self.env = env
        # Environments of their own, with attributes and methods of their own; other vector environments are one object.
        batch = env.unwrapped
        self._separate = batch if isinstance(batch, SyncVectorEnv | AsyncVectorEnv) else None
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self._seeds = [seed] + [None] * (env.num_envs - 1)
        self._returns, self._lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)  # of the running episodes
        self._ended: dict[int, tuple[float, int]] = {}  # return and length of the episodes that ended in the last step
        self._infos: Mapping[str, Any] = {}  # of the last step, as Gymnasium batches them

    def reset(self) -> VecEnvObs:
        """Reset all environments, with the seed if one is waiting."""
        obs, _ = self.env.reset(seed=self._seeds[0], options=self._options[0] or None)
        self._reset_seeds()
        self._reset_options()
        self._returns[:], self._lengths[:] = 0.0, 0
        return cast(VecEnvObs, obs if isinstance(obs, dict) else np.asarray(obs))

    def step_arrays(self, actions: NDArray[Any]) -> StepArrays:
        """Step the vector environment."""
        obs, rewards, terminated, truncated, self._infos = self.env.step(actions)
        ended = np.flatnonzero(terminated | truncated)
        self._returns += rewards
        self._lengths += 1
        if len(ended):
            self._ended = {int(i): (float(self._returns[i]), int(self._lengths[i])) for i in ended}
            self._returns[ended], self._lengths[ended] = 0.0, 0
        finals = self._infos["final_obs"] if len(ended) else np.empty(0, object)
        # Gymnasium's own vector envs keep one observation per environment that ended.
        final_obs = final_observations(finals[ended].tolist(), obs) if finals.dtype == object else finals[ended]
        return StepArrays(obs, np.asarray(rewards, np.float64), terminated, truncated, ended, final_obs)

    def infos_of(self, step: StepArrays) -> list[dict[str, Any]]:
        """Return the dictionaries that SB3 expects, with what the environments say in theirs."""
        infos = super().infos_of(step)
        if self._infos.keys() - AT_THE_END:
            for index in set(range(self.num_envs)) - set(step.ended.tolist()):  # of the others it is about their next episode
                infos[index] |= _info_of(self._infos, index)
        return infos

    def episode_info(self, index: int) -> dict[str, Any]:
        """Return what the environment said at the end of the episode, with its return and length under SB3's keys."""
        total, length = self._ended[index]
        return {**_info_of(self._infos.get("final_info", {}), index), "episode": {"r": total, "l": length}}

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the vector environment and of the running episodes; None if it has none to return."""
        state = self.env.state_dict() if isinstance(self.env, Stateful) else None
        return None if state is None else {**state, RUNNING: np.stack((self._returns, self._lengths.astype(np.float64)))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        assert isinstance(self.env, Stateful), "only such environments give a state"
        self.env.load_state_dict({name: value for name, value in state.items() if name != RUNNING})
        self._returns, self._lengths = state[RUNNING][0].copy(), state[RUNNING][1].astype(np.int64)
        self._reset_seeds()  # a seed that waits for a reset would start the episodes' randomness anew

    def answers_at_once(self, method_name: str) -> bool:
        """Return True if one call of the method answers for all environments, False if each has to be asked."""
        return self._separate is None or hasattr(self.env, method_name)

    def has_attr(self, attr_name: str) -> bool:
        """Return True if the adapted env, or each of its environments, has the attribute."""
        # They are asked whether they have it: an AsyncVectorEnv does not survive being asked for what it has not.
        separate = self._separate
        return hasattr(self.env, attr_name) or (separate is not None and all(separate.call("has_wrapper_attr", attr_name)))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return the attribute of the adapted env, or of each of its environments, once for each of the indices."""
        if self._separate is None or hasattr(self.env, attr_name):
            value = getattr(self.env, attr_name)
            return [value for _ in self._get_indices(indices)]
        self._require_attr(attr_name)
        values = self._separate.get_attr(attr_name)
        return [values[index] for index in self._get_indices(indices)]

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """Call a method of the adapted env once, or of each of its environments; return a result for each of the indices."""
        if self._separate is None or hasattr(self.env, method_name):
            result = getattr(self.env, method_name)(*args, **kwargs)
            return [result for _ in self._get_indices(indices)]
        self._require_attr(method_name)
        if len(list(self._get_indices(indices))) < self.num_envs:
            raise ValueError(f"{method_name} can only be called in all environments of a vector env, not in {indices}")
        return list(self._separate.call(method_name, *args, **kwargs))

    def _require_attr(self, name: str) -> None:
        if not self.has_attr(name):
            raise AttributeError(f"neither the vector env nor its environments have {name!r}")

    def close(self) -> None:
        """Close the vector environment."""
        self.env.close()


def step_with_arrays(env: VecEnv, actions: NDArray[Any]) -> tuple[StepArrays, list[dict[str, Any]]]:
    """Step any SB3 ``VecEnv``; return the ends of episodes as arrays, besides the dictionaries."""
    if isinstance(env, ArrayStepper):
        return env.step_with_arrays(actions)
    if isinstance(env, ArrayVecEnv):
        step = env.step_arrays(actions)
        for name in ("rewards", "terminated", "truncated"):
            _require_one_each(name, getattr(step, name), env.num_envs)
        return step, env.infos_of(step)
    obs, rewards, dones, infos = env.step(actions)
    rewards, dones = np.asarray(rewards, np.float64), np.asarray(dones)
    _require_one_each("rewards", rewards, env.num_envs)
    _require_one_each("dones", dones, env.num_envs)
    ended = np.flatnonzero(dones)
    truncated = np.zeros(env.num_envs, np.bool_)
    truncated[ended] = [bool(infos[index].get("TimeLimit.truncated", False)) for index in ended]
    obs = obs if isinstance(obs, dict) else np.asarray(obs)
    final_obs = final_observations([infos[index]["terminal_observation"] for index in ended], obs)
    weights = np.array([info.get("sample_weight", 1.0) for info in infos], dtype=np.float32)
    over, part = (np.array([info.get(key, False) for info in infos], np.bool_) for key in ("period_ended", "part_period"))
    step = StepArrays(
        cast(Any, obs),
        np.asarray(rewards, np.float64),
        dones & ~truncated,
        truncated,
        ended,
        final_obs,
        None if (weights == 1.0).all() else weights,
        over if over.any() else None,
        part if part.any() else None,
    )
    return step, infos


def has_action_masks(env: VecEnv) -> bool:
    """Return True if the environments say which actions are possible, by a method ``action_masks`` as for ``MaskablePPO``."""
    return env.has_attr(ACTION_MASKS)


def action_masks(env: VecEnv) -> NDArray[np.bool_]:
    """Return ``[B, n]``, false for actions that are not possible now."""
    batch = env.unwrapped
    if isinstance(batch, ArrayVecEnv) and batch.answers_at_once(ACTION_MASKS):
        (masks,) = env.env_method(ACTION_MASKS, indices=0)
        return np.asarray(masks, np.bool_)
    return np.stack(env.env_method(ACTION_MASKS)).astype(np.bool_)


def final_observations(finals: list[Any], obs: Any) -> Any:
    """Return final observations ``[K, ...]`` in the form of `obs`: an array, or a dict of arrays."""
    if isinstance(obs, dict):
        return {key: _stacked([final[key] for final in finals], values) for key, values in obs.items()}
    return _stacked(finals, obs)


def _row(obs: Any, row: int) -> Any:
    """Return one observation of a batch of them."""
    return {key: values[row] for key, values in obs.items()} if isinstance(obs, dict) else obs[row]


def _info_of(infos: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return what one environment said in a batch of infos, where ``_key`` tells who has said something under ``key``."""
    said = {
        key: values for key, values in infos.items() if key not in AT_THE_END and f"_{key}" in infos and infos[f"_{key}"][index]
    }
    return {key: _info_of(values, index) if isinstance(values, Mapping) else values[index] for key, values in said.items()}


def _stacked(finals: list[Any], obs: NDArray[Any]) -> NDArray[Any]:
    """Return final observations as one array of the type of `obs` ``[B, ...]``."""
    if not finals:
        return np.empty((0, *obs.shape[1:]), obs.dtype)
    return np.stack([np.asarray(final, dtype=obs.dtype) for final in finals])


def _require_one_each(name: str, values: NDArray[Any], n_envs: int) -> None:
    if values.shape != (n_envs,):
        raise ValueError(f"the env returned {name} of shape {values.shape}, expected {(n_envs,)}")
