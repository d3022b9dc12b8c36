"""Tuned settings of rl-baselines3-zoo, read from its YAML files as they are, for ours and SB3's algorithms alike.

The files come with the package rl_zoo3, whose code is not imported. What they leave out has SB3's defaults, not ours.
"""

import ast
import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import yaml
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import nn

# Algorithms of the zoo, and the class whose defaults count.
PEERS = {"ppo": PPO, "ppo_lstm": RecurrentPPO}
# Velocities in the observations of each environment that has a form without them.
VELOCITIES = {
    "CartPole-v1": [1, 3],
    "MountainCar-v0": [1],
    "MountainCarContinuous-v0": [1],
    "Pendulum-v1": [2],
    "LunarLander-v3": [2, 3, 5],
}
# Keys of a YAML entry that are no arguments of the algorithm.
AROUND = ("n_envs", "n_timesteps", "policy", "normalize", "env_wrapper", "frame_stack", "callback")
NOT_DEFAULTS = ("self", "policy", "env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model")


class WithoutVelocities(gym.ObservationWrapper):
    """Velocities read as 0, as in the zoo's ``NoVel`` environments."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.mask = np.ones(env.observation_space.shape, np.float32)
        self.mask[VELOCITIES[env.unwrapped.spec.id]] = 0.0

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation * self.mask


@dataclass(frozen=True)
class ZooSettings:
    """An entry of the zoo.

    :param env_id: name of the environment, with ``NoVel`` for one without velocities.
    :param n_envs: environments side by side.
    :param steps: environment steps of the training.
    :param normalize: arguments of ``VecNormalize``; None for no such wrapper.
    :param arguments: of the algorithm, `policy` included; what the file leaves out has the peer's default.
    """

    env_id: str
    n_envs: int
    steps: int
    normalize: dict[str, Any] | None
    arguments: dict[str, Any]

    def environment(self, seed: int) -> VecEnv:
        """Return the environments to train in."""
        env = make_vec_env(lambda: make(self.env_id), self.n_envs, seed=seed)
        return env if self.normalize is None else VecNormalize(env, **self.normalize)

    def test_environment(self, trained_in: VecEnv, n_envs: int, seed: int) -> VecEnv:
        """Return the environments to test in: observations are scaled as at the end of the training, rewards are not."""
        env = make_vec_env(lambda: make(self.env_id), n_envs, seed=seed)
        if self.normalize is None:
            return env
        assert isinstance(trained_in, VecNormalize)
        scaled = VecNormalize(env, **self.normalize | {"training": False, "norm_reward": False})
        scaled.obs_rms = trained_in.obs_rms
        return scaled


def make(env_id: str) -> gym.Env:
    """Return one environment."""
    return WithoutVelocities(gym.make(env_id.replace("NoVel", ""))) if "NoVel" in env_id else gym.make(env_id)


def zoo_settings(algorithm: str, env_id: str, entry: str | None = None) -> ZooSettings:
    """Return the zoo's settings of an environment.

    :param algorithm: ``ppo`` or ``ppo_lstm``.
    :param env_id: the environment that is run.
    :param entry: its name in the file, where that is another version.
    """
    return translated(algorithm, env_id, yaml.safe_load(zoo_file(algorithm).read_text(encoding="utf-8"))[entry or env_id])


def zoo_file(algorithm: str) -> Path:
    """Return the file with the settings of an algorithm."""
    package = importlib.util.find_spec("rl_zoo3")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("rl_zoo3 is not installed: make bench-published installs it")
    return Path(package.submodule_search_locations[0]) / "hyperparams" / f"{algorithm}.yml"


def translated(algorithm: str, env_id: str, entry: dict[str, Any]) -> ZooSettings:
    """Translate an entry of a YAML file."""
    unknown = {"env_wrapper", "frame_stack", "callback"} & set(entry)
    if unknown:
        raise ValueError(f"{env_id}: {', '.join(sorted(unknown))} of the zoo is not supported")
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(PEERS[algorithm].__init__).parameters.items()
        if name not in NOT_DEFAULTS and parameter.default is not inspect.Parameter.empty and parameter.default is not None
    }
    given = {name: value for name, value in entry.items() if name not in AROUND}
    arguments = defaults | given | {"policy": entry["policy"]}
    for name in ("learning_rate", "clip_range"):
        arguments[name] = schedule(arguments[name])
    if isinstance(arguments.get("policy_kwargs"), str):
        arguments["policy_kwargs"] = literal(arguments["policy_kwargs"])
    normalize = entry.get("normalize", False)
    normalize = literal(normalize) if isinstance(normalize, str) else ({} if normalize is True else normalize or None)
    if normalize is not None:
        normalize = {"gamma": arguments["gamma"]} | normalize
    steps = int(float(entry["n_timesteps"]))
    return ZooSettings(env_id, int(entry.get("n_envs", 1)), steps, normalize, arguments)


def schedule(value: float | str) -> Any:
    """Return a number, or for ``lin_0.001`` the function that falls linearly from it to 0."""
    if isinstance(value, str):
        if not value.startswith("lin_"):
            raise ValueError(f"unknown schedule {value!r}")
        start = float(value.removeprefix("lin_"))
        return lambda remaining: remaining * start
    return float(value)


def literal(text: str) -> Any:
    """Evaluate ``dict(net_arch=[64], activation_fn=nn.ReLU)`` without running code: calls of dict, literals, classes of nn."""
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nn":
        layer = getattr(nn, node.attr)
        if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
            raise ValueError(f"nn.{node.attr} is no layer")
        return layer
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    return ast.literal_eval(node)
