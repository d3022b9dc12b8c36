"""A model as data: the file that holds it, older versions of that file, and its spaces and policy settings as plain values.

A file holds data and no code, so loading one from a stranger cannot run anything.
"""

from collections.abc import Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import nn

from tailguard.io import checkpoint
from tailguard.io.checkpoint import Migrations
from tailguard.validation import require

KIND, SUFFIX = "model", ".safetensors"
# The audit reports' and SB3's names of parts of the agent's state.
PARAMETER_NAMES = {
    "kl_penalty_state": "kl",
    "vgs_state": "vgs",
    "optimizer_state": "optimizer",
    "policy.optimizer": "optimizer",
}
# The setting that may be a class of the user's own, which is code and is not saved.
ACTIVATION = "activation_fn"


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
    path = Path(path)
    named = path if path.exists() or path.suffix not in ("", ".zip") else path.with_suffix(SUFFIX)
    return checkpoint.load(named, kind=KIND, migrations=MIGRATIONS)


# ------------------------------------------------------------------------------------------------- spaces and settings


def space_tree(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as arrays and numbers."""
    if isinstance(space, spaces.Box):
        return {"class": "Box", "low": space.low, "high": space.high, "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"class": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"class": "MultiDiscrete", "nvec": space.nvec, "start": space.start}
    raise ValueError(f"a space of {type(space).__name__} cannot be saved")


def space_of(tree: Mapping[str, Any]) -> spaces.Space[Any]:
    """Return the space that gave `tree`."""
    kind = tree["class"]
    require(kind in ("Box", "Discrete", "MultiDiscrete"), "the saved space", kind, "a Box, Discrete or MultiDiscrete")
    if kind == "Box":
        return spaces.Box(tree["low"], tree["high"], dtype=np.dtype(tree["dtype"]).type)
    if kind == "Discrete":
        return spaces.Discrete(tree["n"], start=tree["start"])
    return spaces.MultiDiscrete(tree["nvec"], start=tree["start"])


def network_tree(policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``policy_kwargs`` as plain values; an activation becomes the name of its class."""
    return {
        name: f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value
        for name, value in policy_kwargs.items()
    }


def policy_kwargs_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``policy_kwargs`` that gave `tree`.

    :raises ValueError: when the activation is not one of torch's: a class of the user's own is code, and not in the file.
    """
    kwargs = dict(tree)
    name = kwargs.get(ACTIVATION)
    if isinstance(name, str):
        activations = [value for value in vars(nn.modules.activation).values() if isinstance(value, type)]
        known = {f"{activation.__module__}.{activation.__qualname__}": activation for activation in activations}
        if name not in known:
            raise ValueError(
                f"the model was built with the activation {name}, which is not torch's: load it with policy_kwargs=..."
            )
        kwargs[ACTIVATION] = known[name]
    return kwargs


# ---------------------------------------------------------------------------------------------------------- migrations
# From each older version of the file to the next. `tests/fixtures` holds a file of every version.


def _to_version_2(tree: dict[str, Any]) -> dict[str, Any]:
    """Add the adversary, and the ``VecNormalize`` that version 1 kept only with environments that know their state."""
    settings, run = tree["settings"] | {"adversary": None}, tree["run"] | {"adversary": None}
    return tree | {"settings": settings, "run": run, "vec_normalize": None}


def _to_version_3(tree: dict[str, Any]) -> dict[str, Any]:
    """Add the search for the best cap, which has found nothing yet."""
    objective = tree["agent"]["objective"]
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


MIGRATIONS: Migrations = {1: _to_version_2, 2: _to_version_3, 3: _to_version_4, 4: _to_version_5, 5: _to_version_6}
