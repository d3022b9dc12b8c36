"""Where a batch of environments stands, layer by layer, so that a training can go on in the middle of its episodes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecMonitor, VecNormalize

from tailguard.envs.vec_env import Stateful
from tailguard.io import checkpoint

State = dict[str, Any]
KIND = "normalization"


def env_state(env: VecEnv) -> State | None:
    """The state of the environments and of every wrapper around them; None when they cannot say."""
    layers = []
    for layer in _layers(env):
        state = _state_of(layer)
        if state is None:
            return None
        layers.append({"class": type(layer).__name__, "state": state})
    return {"layers": layers}


def load_env_state(env: VecEnv, state: Mapping[str, Any]) -> None:
    """Put the environments where :func:`env_state` found them.

    :raises ValueError: when they are not wrapped in the same way.
    """
    layers, saved = _layers(env), state["layers"]
    present, expected = [type(layer).__name__ for layer in layers], [one["class"] for one in saved]
    if present != expected:
        raise ValueError(f"the saved state belongs to environments made of {expected}, got {present}")
    for layer, one in zip(layers, saved, strict=True):
        _load_into(layer, one["state"])


def normalization_state(env: VecNormalize) -> State:
    """The statistics of SB3's wrapper, as arrays."""
    moments = {"ret": env.ret_rms} | ({} if isinstance(env.obs_rms, dict) else {"obs": env.obs_rms})
    return {
        name: {"mean": np.asarray(m.mean), "var": np.asarray(m.var), "count": float(m.count)} for name, m in moments.items()
    }


def load_normalization_state(env: VecNormalize, state: Mapping[str, Any]) -> None:
    """Take over statistics that :func:`normalization_state` gave."""
    for name, moments in state.items():
        target = cast(RunningMeanStd, env.ret_rms if name == "ret" else env.obs_rms)
        if np.shape(target.mean) != np.shape(moments["mean"]):
            raise ValueError(f"statistics of shape {np.shape(moments['mean'])} do not fit {np.shape(target.mean)}")
        target.mean, target.var, target.count = moments["mean"].copy(), moments["var"].copy(), moments["count"]


def save_normalization(env: VecNormalize, path: str | Path) -> None:
    """Write the statistics of SB3's wrapper as arrays. (``env.save(path)`` writes SB3's own pickle, for those who want it.)"""
    checkpoint.save(path, normalization_state(env), kind=KIND)


def load_normalization(env: VecNormalize, path: str | Path) -> None:
    """Take over what :func:`save_normalization` wrote."""
    load_normalization_state(env, checkpoint.load(path, kind=KIND))


def _layers(env: VecEnv) -> list[VecEnv]:
    layers = [env]
    while isinstance(layers[-1], VecEnvWrapper):
        layers.append(layers[-1].venv)
    return layers


def _state_of(layer: VecEnv) -> State | None:
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


def _load_into(layer: VecEnv, state: State) -> None:
    if isinstance(layer, Stateful):
        layer.load_state_dict(state)
    elif isinstance(layer, VecNormalize):
        load_normalization_state(layer, {name: moments for name, moments in state.items() if name != "old"})
        for name, value in state["old"].items():
            setattr(layer, name, value.copy())
    else:
        monitor = cast(VecMonitor, layer)
        monitor.episode_returns, monitor.episode_lengths = state["returns"].copy(), state["lengths"].copy()
        monitor.episode_count = state["count"]
