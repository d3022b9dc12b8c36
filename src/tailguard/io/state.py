"""State as data: the random numbers of this process, and the state of a batch of environments.

Both are trees of arrays and plain values that :mod:`tailguard.io.checkpoint` can save, so that a training resumes in the middle
of its episodes.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecMonitor, VecNormalize

from tailguard.envs.vec_env import RUNNING, GymVectorAdapter, Stateful
from tailguard.io import checkpoint
from tailguard.io.form import ARRAY, COUNT, INTEGER, MAPPING, NUMBER, TENSOR, TEXT, Leaf, Maybe, form_of, require_form
from tailguard.validation import require

NORMALIZATION = "normalization"  # the kind of a file with the statistics of a VecNormalize

MT19937_WORDS = 624
# The forms of these states in a file.
RANDOM = {"torch": TENSOR, "numpy": (TEXT, ARRAY, COUNT, COUNT, NUMBER), "python": (INTEGER, ARRAY, Maybe(NUMBER))}
ENVIRONMENTS = {"layers": [{"class": TEXT, "state": MAPPING}]}
FINITE = Leaf("finite numbers", lambda value: isinstance(value, np.ndarray) and bool(np.isfinite(value).all()))
MOMENTS = {"mean": FINITE, "var": FINITE, "count": NUMBER}


# ------------------------------------------------------------------------------------------------------------ random numbers


def random_state() -> dict[str, Any]:
    """Return the state of the global generators of torch, numpy and Python."""
    kind, words, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 (SB3 and its environments use it)
    py_version, py_words, py_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), words, int(position), int(has_gauss), float(gauss)],
        "python": [py_version, np.array(py_words, np.uint64), py_gauss],
    }


def load_random_state(state: Mapping[str, Any]) -> None:
    """Restore what :func:`random_state` returned."""
    require_form(state, RANDOM, "run.random")
    position = state["numpy"][2]
    require(position <= MT19937_WORDS, "run.random.numpy", position, f"a position up to {MT19937_WORDS}")  # numpy reads there
    py_version, py_words, py_gauss = state["python"]
    torch.set_rng_state(state["torch"])
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    random.setstate((py_version, tuple(py_words.tolist()), py_gauss))


class IsolatedRandomState:
    """A copy of the global generators for one of several learners in a process: none changes the random numbers of another."""

    def __init__(self) -> None:
        self._state = random_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this copy as the global generators inside a ``with`` statement; restore them afterwards."""
        outside = random_state()
        load_random_state(self._state)
        try:
            yield
        finally:
            self._state = random_state()
            load_random_state(outside)


# -------------------------------------------------------------------------------------------------------------- environments


def env_state(env: VecEnv) -> dict[str, Any] | None:
    """Return the state of the environments and of every wrapper around them; None when one of them has none to return."""
    layers = []
    for layer in _layers(env):
        state = _state_of(layer)
        if state is None:
            return None
        layers.append({"class": type(layer).__name__, "state": state})
    return {"layers": layers}


def load_env_state(env: VecEnv, state: Mapping[str, Any]) -> None:
    """Restore what :func:`env_state` returned.

    :raises ValueError: when the environments are not wrapped in the same way.
    """
    layers, saved = _layers(env), state["layers"]
    present, expected = [type(layer).__name__ for layer in layers], [entry["class"] for entry in saved]
    if present != expected:
        raise ValueError(f"the saved state belongs to environments made of {expected}, got {present}")
    for layer, entry in zip(layers, saved, strict=True):
        _load_into(layer, entry["state"])


def normalization_state(env: VecNormalize) -> dict[str, Any]:
    """Return the statistics of SB3's ``VecNormalize``, as arrays."""
    return {
        name: {"mean": np.asarray(m.mean), "var": np.asarray(m.var), "count": float(m.count)}
        for name, m in _running_moments(env).items()
    }


def _running_moments(env: VecNormalize) -> dict[str, RunningMeanStd]:
    """Return what a ``VecNormalize`` keeps: of returns, and of observations if it normalises them, one per key of a Dict."""
    of_obs = getattr(env, "obs_rms", {})  # without norm_obs there is none
    if isinstance(of_obs, dict):
        return {"ret": env.ret_rms} | {f"obs.{key}": moments for key, moments in of_obs.items()}
    return {"ret": env.ret_rms, "obs": of_obs}


def load_normalization_state(env: VecNormalize, state: Mapping[str, Any]) -> None:
    """Restore what :func:`normalization_state` returned."""
    running = _running_moments(env)
    for name, moments in state.items():
        require(name in running, "statistics", name, f"among {sorted(running)}, those of this VecNormalize")
        require_form(moments, MOMENTS, f"the statistics of {name}")
        target = running[name]
        if np.shape(target.mean) != np.shape(moments["mean"]):
            raise ValueError(f"statistics of shape {np.shape(moments['mean'])} do not fit {np.shape(target.mean)}")
        target.mean, target.var, target.count = moments["mean"].copy(), moments["var"].copy(), moments["count"]


def save_normalization(env: VecNormalize, path: str | Path) -> None:
    """Write the statistics of a ``VecNormalize`` as arrays. (``env.save(path)`` writes SB3's own pickle.)"""
    checkpoint.save(path, normalization_state(env), kind=NORMALIZATION)


def load_normalization(env: VecNormalize, path: str | Path) -> None:
    """Restore what :func:`save_normalization` wrote."""
    load_normalization_state(env, checkpoint.load(path, kind=NORMALIZATION))


def _layers(env: VecEnv) -> list[VecEnv]:
    layers = [env]
    while isinstance(layers[-1], VecEnvWrapper):
        layers.append(layers[-1].venv)
    return layers


def _state_of(layer: VecEnv) -> dict[str, Any] | None:
    if isinstance(layer, Stateful):
        return layer.state_dict()
    if isinstance(layer, VecNormalize):
        old = {"returns": layer.returns, "old_obs": layer.old_obs, "old_reward": layer.old_reward}
        return normalization_state(layer) | {"old": {name: np.array(v) for name, v in old.items() if v is not None and len(v)}}
    if isinstance(layer, VecMonitor):
        return {
            "returns": layer.episode_returns.copy(),
            "lengths": layer.episode_lengths.copy(),
            "count": layer.episode_count,
        }
    return None


def _load_into(layer: VecEnv, state: dict[str, Any]) -> None:
    if isinstance(layer, VecNormalize):
        load_normalization_state(layer, {name: moments for name, moments in state.items() if name != "old"})
        for name, value in state["old"].items():
            require(name in ("returns", "old_obs", "old_reward"), "the state of VecNormalize", name, "known")
            require(len(value) == layer.num_envs, f"the saved {name}", len(value), f"of {layer.num_envs} environments")
            setattr(layer, name, value.copy())
        return
    if isinstance(layer, GymVectorAdapter):  # files of earlier versions did not count running episodes
        state = {RUNNING: np.zeros((2, layer.num_envs)), **state}
    require_form(state, form_of(_state_of(layer)), f"the state of {type(layer).__name__}")
    if isinstance(layer, Stateful):
        layer.load_state_dict(state)
    else:
        monitor = cast(VecMonitor, layer)
        monitor.episode_returns, monitor.episode_lengths = state["returns"].copy(), state["lengths"].copy()
        monitor.episode_count = state["count"]
