"""How a model is built, as data: its settings and spaces in plain values, and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import nn

from tailguard.validation import require

# Settings that may be objects of the user's own, which are code and are not saved.
ACTIVATION = "activation_fn"


def space_tree(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as arrays and numbers."""
    if isinstance(space, spaces.Box):
        return {"class": "Box", "low": space.low, "high": space.high, "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"class": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"class": "MultiDiscrete", "nvec": space.nvec, "start": space.start}
    raise ValueError(f"a space of {type(space).__name__} cannot be saved")


def space_of(tree: Mapping[str, Any]) -> spaces.Space[Any]:
    """The space that gave `tree`."""
    kind = tree["class"]
    require(kind in ("Box", "Discrete", "MultiDiscrete"), "the saved space", kind, "a Box, Discrete or MultiDiscrete")
    if kind == "Box":
        return spaces.Box(tree["low"], tree["high"], dtype=np.dtype(tree["dtype"]).type)
    if kind == "Discrete":
        return spaces.Discrete(tree["n"], start=tree["start"])
    return spaces.MultiDiscrete(tree["nvec"], start=tree["start"])


def network_tree(policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``policy_kwargs`` as plain values; an activation becomes the name of its class."""
    return {
        name: f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value
        for name, value in policy_kwargs.items()
    }


def policy_kwargs_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The ``policy_kwargs`` that gave `tree`.

    :raises ValueError: when the activation is not one of torch's: a class of the user's own is code, and not in the file.
    """
    kwargs = dict(tree)
    name = kwargs.get(ACTIVATION)
    if isinstance(name, str):
        known = {
            f"{one.__module__}.{one.__qualname__}": one for one in vars(nn.modules.activation).values() if isinstance(one, type)
        }
        if name not in known:
            raise ValueError(
                f"the model was built with the activation {name}, which is not torch's: load it with policy_kwargs=..."
            )
        kwargs[ACTIVATION] = known[name]
    return kwargs
