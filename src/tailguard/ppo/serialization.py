"""A model as data: the file that holds it, older versions of that file, and its spaces and policy settings as plain values.

A file holds data and no code, so loading one from a stranger cannot run anything.
"""

from collections.abc import Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from pydantic import BaseModel
from stable_baselines3.common import torch_layers
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor, nn

from tailguard.io import checkpoint
from tailguard.io.checkpoint import Migrations
from tailguard.ppo.config import CriticConfig, ObsNormConfig, RiskConfig
from tailguard.validation import require

KIND, POLICY_KIND, SUFFIX = "model", "policy", ".safetensors"
# Arguments of a policy that are settings of their own.
CONFIGS: dict[str, type[BaseModel]] = {"critic": CriticConfig, "obs_norm": ObsNormConfig, "risk": RiskConfig}
# The audit reports' and SB3's names of parts of the agent's state.
PARAMETER_NAMES = {
    "kl_penalty_state": "kl",
    "vgs_state": "vgs",
    "optimizer_state": "optimizer",
    "policy.optimizer": "optimizer",
}
# Settings that are classes, and the modules whose classes a file may name. A class of the user's own is code and is not saved.
CLASSES = {
    "activation_fn": (nn.modules.activation, nn.Module, "torch's"),
    "features_extractor_class": (torch_layers, torch_layers.BaseFeaturesExtractor, "SB3's"),
    "optimizer_class": (torch.optim, torch.optim.Optimizer, "torch's"),
}


def write_model(path: str | Path | BufferedIOBase, tree: Mapping[str, Any]) -> None:
    """Write the state of a model into one file.

    :param path: a file to write to, or its name; ``.safetensors`` is added to a name without an ending.
    :param tree: :meth:`DistributionalPPO.state_tree`.
    """
    if isinstance(path, BufferedIOBase):
        path.write(checkpoint.to_bytes(tree, kind=KIND))
        return
    path = Path(path)
    checkpoint.save(path if path.suffix else path.with_suffix(SUFFIX), tree, kind=KIND)


def read_model(path: str | Path | BufferedIOBase) -> dict[str, Any]:
    """Return the state that :func:`write_model` wrote, of this version or of an older one.

    :param path: the file or its name; ``.safetensors`` is tried for a name that ends in ``.zip`` or has no ending.
    """
    if isinstance(path, BufferedIOBase):
        return checkpoint.from_bytes(path.read(), kind=KIND, name="the model", migrations=MIGRATIONS)
    return checkpoint.load(_existing(Path(path)), kind=KIND, migrations=MIGRATIONS)


def _existing(path: Path) -> Path:
    """Return the file that a name without its ending, or with SB3's, stands for; the name itself if there is none."""
    others = [path.with_suffix(SUFFIX), path.with_suffix(".zip")] if path.suffix in ("", ".zip") else []
    return next((candidate for candidate in (path, *others) if candidate.is_file()), others[0] if others else path)


class SavedPolicy(NamedTuple):
    """The content of a policy's file: the arguments that build it, and its weights."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    arguments: dict[str, Any]
    weights: dict[str, Any]


def write_policy(path: str | Path | BufferedIOBase, policy: BasePolicy, arguments: Mapping[str, Any]) -> None:
    """Write a policy alone into one file.

    :param arguments: of its constructor.
    """
    configs = {name: None if arguments.get(name) is None else arguments[name].model_dump() for name in CONFIGS}
    tree = {
        "spaces": {"observation": space_tree(policy.observation_space), "action": space_tree(policy.action_space)},
        "configs": configs,
        "network": network_tree({name: value for name, value in arguments.items() if name not in CONFIGS}),
        "weights": policy.state_dict(),
    }
    if isinstance(path, BufferedIOBase):
        path.write(checkpoint.to_bytes(tree, kind=POLICY_KIND))
    else:
        checkpoint.save(Path(path), tree, kind=POLICY_KIND)


def read_policy(path: str | Path | BufferedIOBase, changes: Mapping[str, Any]) -> SavedPolicy:
    """Return what :func:`write_policy` wrote.

    :param changes: arguments that shall differ, such as classes of the user's own.
    """
    if isinstance(path, BufferedIOBase):
        tree = checkpoint.from_bytes(path.read(), kind=POLICY_KIND, name="the policy", migrations=POLICY_MIGRATIONS)
    else:
        tree = checkpoint.load(Path(path), kind=POLICY_KIND, migrations=POLICY_MIGRATIONS)
    configs = {name: None if saved is None else CONFIGS[name](**saved) for name, saved in tree["configs"].items()}
    network = policy_kwargs_of({name: value for name, value in tree["network"].items() if name not in changes})
    observation, action = (space_of(tree["spaces"][name]) for name in ("observation", "action"))
    return SavedPolicy(observation, action, configs | network | dict(changes), tree["weights"])


# ------------------------------------------------------------------------------------------------- spaces and settings


def space_tree(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as arrays and numbers."""
    if isinstance(space, spaces.Box):
        return {"class": "Box", "low": space.low, "high": space.high, "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"class": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"class": "MultiDiscrete", "nvec": space.nvec, "start": space.start}
    if isinstance(space, spaces.MultiBinary):
        return {"class": "MultiBinary", "shape": list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"class": "Dict", "spaces": {key: space_tree(entry) for key, entry in space.spaces.items()}}
    raise ValueError(f"a space of {type(space).__name__} cannot be saved")


def space_of(tree: Mapping[str, Any]) -> spaces.Space[Any]:
    """Return the space that gave `tree`."""
    kind = tree["class"]
    legal = "a Box, Discrete, MultiDiscrete, MultiBinary or Dict"
    require(kind in ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict"), "the saved space", kind, legal)
    if kind == "Box":
        return spaces.Box(tree["low"], tree["high"], dtype=np.dtype(tree["dtype"]).type)
    if kind == "Discrete":
        return spaces.Discrete(tree["n"], start=tree["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(tree["shape"] if len(tree["shape"]) > 1 else tree["shape"][0])
    if kind == "Dict":
        return spaces.Dict({key: space_of(entry) for key, entry in tree["spaces"].items()})
    return spaces.MultiDiscrete(tree["nvec"], start=tree["start"])


def network_tree(policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``policy_kwargs`` as plain values; a class becomes its name."""
    return {
        name: f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value
        for name, value in policy_kwargs.items()
    }


def policy_kwargs_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``policy_kwargs`` that gave `tree`.

    :raises ValueError: for a class of the user's own, which is code, and not in the file.
    """
    kwargs = dict(tree)
    for setting, (module, base, whose) in CLASSES.items():
        name = kwargs.get(setting)
        if isinstance(name, str):
            classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, base)]
            known = {f"{value.__module__}.{value.__qualname__}": value for value in classes}
            if name not in known:
                raise ValueError(
                    f"the model was built with {setting} {name}, which is not {whose}: load it with policy_kwargs=..."
                )
            kwargs[setting] = known[name]
    return kwargs


# ---------------------------------------------------------------------------------------------------------- migrations
# From each older version of the file to the next. `tests/fixtures` holds a file of every version.


def _to_version_2(tree: dict[str, Any]) -> dict[str, Any]:
    """Add the adversary, and the ``VecNormalize`` that version 1 kept only with environments that know their state."""
    require("vec_normalize" not in tree, "the version", 1, "a later one: the file has what version 1 did not have")
    settings, run = tree["settings"] | {"adversary": None}, tree["run"] | {"adversary": None}
    return tree | {"settings": settings, "run": run, "vec_normalize": None}


def _to_version_3(tree: dict[str, Any]) -> dict[str, Any]:
    """Add the search for the best cap, which has found nothing yet."""
    objective = tree["agent"]["objective"]
    require("best" not in objective, "the version", "1 or 2", "a later one: the file has what version 2 did not have")
    n, nothing = len(objective["returns"]), float("-inf")
    found = {"recent": [[nothing] * 2] * n, "best": [[nothing] * 2] * n}
    return tree | {"agent": tree["agent"] | {"objective": objective | found}}


def _to_version_4(tree: dict[str, Any]) -> dict[str, Any]:
    """Turn returns that version 3 kept one by one, as a list of one number or of all atoms each, into one rollout."""
    objective = tree["agent"]["objective"]
    rollouts = [
        [[[atoms[0] for atoms in level if len(atoms) == 1], [atoms for atoms in level if len(atoms) > 1]]]
        for level in objective["returns"]
    ]
    return tree | {"agent": tree["agent"] | {"objective": objective | {"returns": rollouts}}}


def _to_version_5(tree: dict[str, Any]) -> dict[str, Any]:
    """Drop exploration that lasts for several steps; files of version 3 do not have it."""
    settings, run = ({**tree[part]} for part in ("settings", "run"))
    settings.pop("exploration_memory", None)
    run.pop("lasting_noise", None)
    return tree | {"settings": settings, "run": run}


def _to_version_6(tree: dict[str, Any]) -> dict[str, Any]:
    """Drop the PID rule of the KL penalty, and the ways to clip the critics by mean and variance."""
    removed = {"kl": ("penalty_rule", "k_p", "k_i", "k_d"), "critic": ("clip_mode", "clip_variance_factor")}
    kept = {
        group: {name: value for name, value in tree["settings"][group].items() if name not in names}
        for group, names in removed.items()
    }
    return tree | {"settings": tree["settings"] | kept}


def _to_version_7(tree: dict[str, Any]) -> dict[str, Any]:
    """Add the unit of the budget."""
    return tree | {"agent": tree["agent"] | {"policy": _with_unit(tree["agent"]["policy"])}}


def _policy_to_version_7(tree: dict[str, Any]) -> dict[str, Any]:
    """Add the unit of the budget."""
    return tree | {"weights": _with_unit(tree["weights"])}


def _with_unit(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights with the unit of the budget, which was the scale of the critics."""
    names = [f"return_scale.{name}_snapshot" for name in ("mean", "std")]
    scale = [weights[name] for name in names]
    sound = all(isinstance(part, Tensor) and part.shape == () for part in scale)
    require(sound, "agent.policy", names, "one number each")
    return {**weights, "budget.unit": torch.stack(scale).double()}


MIGRATIONS: Migrations = {
    1: _to_version_2,
    2: _to_version_3,
    3: _to_version_4,
    4: _to_version_5,
    5: _to_version_6,
    6: _to_version_7,
}
POLICY_MIGRATIONS: Migrations = {6: _policy_to_version_7}
