"""The form of a saved model: what its tree must hold before anything is built from it.

Checksums say that a file is as it was written, not that Tailguard wrote it. So every part is checked for its type, and every
size that the settings name against the tensors that the file really has, on a policy without storage (torch's device ``meta``).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tailguard.io.form import (
    ANYTHING,
    ARRAY,
    COUNT,
    EXTENDED,
    FLAG,
    INTEGER,
    MAPPING,
    NUMBER,
    TENSOR,
    TEXT,
    Leaf,
    Maybe,
    array_like,
    form_of,
    require_form,
    tensor_like,
)
from tailguard.io.state import ENVIRONMENTS, RANDOM
from tailguard.ppo.networks import require_same_shapes
from tailguard.validation import require

# The largest rollout, in numbers of its observations, that is laid out because a file says so.
LARGEST_ROLLOUT = 2**26
# The only weights that may be infinite: a cap is, until there are enough episodes to estimate it from.
CAPS = "budget.caps"

EVERY_SETTING = {
    "policy": TEXT,
    "policy_kwargs": MAPPING,
    "n_steps": COUNT,
    "critic": MAPPING,
    "risk": MAPPING,
    "optimizer": MAPPING,
    "normalize_obs": Leaf("settings or false", lambda value: value is False or isinstance(value, Mapping)),
    "learning_rate": NUMBER,
    "batch_size": Maybe(COUNT),
    "n_epochs": COUNT,
    "gamma": NUMBER,
    "gae_lambda": NUMBER,
    "clip_range": NUMBER,
    "clip_range_vf": Maybe(NUMBER),
    "normalize_advantage": FLAG,
    "normalize_advantage_per_mini_batch": FLAG,
    "use_sde": FLAG,
    "sde_sample_freq": INTEGER,
    "max_grad_norm": EXTENDED,
    "vf_coef": NUMBER,
    "microbatch_size": Maybe(COUNT),
    "entropy": MAPPING,
    "kl": MAPPING,
    "vgs": MAPPING,
    "adversary": Maybe(MAPPING),
    "seed": Maybe(COUNT),
    "tensorboard_log": Maybe(TEXT),
    "verbose": INTEGER,
    "stats_window_size": COUNT,
}
OBJECTIVE = {
    "multiplier": NUMBER,
    "share": NUMBER,
    "recent": [(EXTENDED, EXTENDED)],
    "best": [(EXTENDED, EXTENDED)],
    "returns": [[([NUMBER], [[NUMBER]])]],
}
AGENT = {
    "policy": MAPPING,
    "optimizer": MAPPING,
    "vgs": MAPPING,
    "kl": {"kl_penalty_state": MAPPING, "lr_factor": NUMBER},
    "entropy": {
        "updates": COUNT,
        "decay_start": Maybe(COUNT),
        "boost": NUMBER,
        "bad_updates": COUNT,
        "window": [(COUNT, Leaf("a number", lambda value: isinstance(value, int | float)))],  # NaN before the first episode
    },
    "learning_rate": {"initial": Maybe(NUMBER), "final": Maybe(NUMBER)},
    "objective": OBJECTIVE,
}
RUN = {
    "counters": {
        "num_timesteps": COUNT,
        "_total_timesteps": COUNT,
        "_current_progress_remaining": NUMBER,
        "_n_updates": COUNT,
        "_episode_num": COUNT,
    },
    "n_envs": COUNT,
    "shuffler": TENSOR,
    "adversary": Maybe({"updates": COUNT, "generator": TENSOR}),
    "memory": (TENSOR, TENSOR, TENSOR, TENSOR),
    "last_obs": Maybe(Leaf("observations", lambda value: isinstance(value, np.ndarray | Mapping))),
    "last_episode_starts": Maybe(ARRAY),
    "episode_returns": {"running": ARRAY, "discount": ARRAY, "finished": [NUMBER]},
    "calibration": {"pending": [Maybe([NUMBER])], "transforms": [NUMBER], "scores": [NUMBER]},
    "episodes": ([{"r": NUMBER, "l": NUMBER}], [ANYTHING]),
    "environments": Maybe(ENVIRONMENTS),
    "random": RANDOM,
}


def require_saved_form(tree: Mapping[str, Any]) -> None:
    """Raise a :class:`ValueError` for a tree that is not that of a model; nothing is built.

    :param tree: of a file of the present version.
    """
    parts = {"settings": MAPPING, "spaces": {"observation": MAPPING, "action": MAPPING}, "agent": AGENT, "run": RUN}
    # Not in files of earlier versions, nor in those that are no checkpoints of a run.
    optional = {"functions": [TEXT], "identity": TEXT, "performance": EXTENDED}
    present = {name: form for name, form in optional.items() if name in tree}
    require_form(tree, parts | present | {"vec_normalize": Maybe(MAPPING)}, "")
    settings = tree["settings"]
    required = {"policy", "policy_kwargs", "n_steps", "critic", "risk", "optimizer", "normalize_obs"}  # save(exclude=...)
    kept = {name: form for name, form in EVERY_SETTING.items() if name in required or name in settings}
    require_form(settings, kept, "settings")
    n_envs = tree["run"]["n_envs"]
    require(n_envs >= 1, "run.n_envs", n_envs, "at least 1")
    for name in ("running", "discount"):
        values = tree["run"]["episode_returns"][name]
        sound = values.shape == (n_envs,) and values.dtype == np.float64 and bool(np.isfinite(values).all())
        require(sound, f"run.episode_returns.{name}", values.shape, f"{n_envs} finite numbers")
    pending = len(tree["run"]["calibration"]["pending"])
    require(pending == n_envs, "run.calibration.pending", f"a list of {pending}", f"one of {n_envs}")


def require_same_settings(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise a :class:`ValueError` for settings of another type than those that were made of them, such as text for a number.

    :param saved: of the file.
    :param own: of the model. Settings that only one of them has are those of another version, or were replaced.
    """
    for name in set(saved) & set(own):
        if isinstance(own[name], Mapping) and isinstance(saved[name], Mapping):
            require_same_settings(saved[name], own[name])
        elif not isinstance(own[name], list | tuple | Mapping):  # of lists their own classes know the form
            require_form(saved[name], Maybe(form_of(own[name])), f"settings.{name}")


def require_sizes(sketch: Callable[[], nn.Module], weights: Mapping[str, Any], network: Mapping[str, Any]) -> None:
    """Raise a :class:`ValueError` where settings and weights belong to networks of different sizes; no RAM is taken.

    :param sketch: builds the policy; called where tensors have shapes and no storage.
    :param weights: of the file.
    :param network: the policy's settings: they must not name more layers than there are weights.
    """
    for name, tensor in weights.items():
        finite = name != CAPS
        require_form(tensor, TENSOR, f"agent.policy.{name}")
        require_form(tensor, tensor_like(tensor, finite=finite), f"agent.policy.{name}")
    layers = network.get("net_arch") or []
    parts = list(layers.values()) if isinstance(layers, Mapping) else [layers]
    count = sum(len(part) for part in parts if isinstance(part, list | tuple)) + int(network.get("n_lstm_layers") or 0)
    require(count <= len(weights), "the number of layers", count, f"at most {len(weights)}, the number of weights")
    with torch.device("meta"):
        expected = sketch().state_dict()
    require_same_shapes(weights, expected)
    for name, tensor in expected.items():
        require(weights[name].dtype == tensor.dtype, f"the type of {name}", weights[name].dtype, str(tensor.dtype))


def require_rollout_size(n_steps: int, n_envs: int, obs_size: int) -> None:
    """Raise a :class:`ValueError` for a rollout that is too large to be laid out because a file says so."""
    size = n_steps * n_envs * obs_size
    require(
        size <= LARGEST_ROLLOUT,
        "n_steps",
        n_steps,
        f"given to load() as well: a rollout of {n_envs} environments would have {size:,} numbers",
    )


def require_optimizer_form(state: Mapping[str, Any], optimizer: Optimizer, known: Mapping[str, Any] | None) -> None:
    """Raise a :class:`ValueError` for a state that this optimizer cannot have.

    :param state: of the file.
    :param optimizer: as it was built, without a state.
    :param known: an example of what it keeps for a parameter of shape [2]; None if that is not known.
    """
    fresh = optimizer.state_dict()
    extra = {name: form_of(value) for name, value in fresh.items() if name not in ("state", "param_groups")}
    require_form(state, {"state": MAPPING, "param_groups": [MAPPING], **extra}, "agent.optimizer")
    for saved, group in zip(state["param_groups"], fresh["param_groups"], strict=True):
        require("lr" in saved and "params" in saved, "agent.optimizer.param_groups", sorted(saved), "complete")
        both = {name: form_of(group[name]) for name in group if name in saved}  # other versions of torch know other options
        require_form({name: saved[name] for name in both}, both, "agent.optimizer.param_groups")
    shapes = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    for index, entries in state["state"].items():
        require(index in shapes, "agent.optimizer.state", index, f"the number of one of {len(shapes)} parameters")
        require_form(entries, MAPPING, f"agent.optimizer.state.{index}")
        require_form(entries, _moments(entries if known is None else known, shapes[index]), f"agent.optimizer.state.{index}")


def _moments(known: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the form of an optimizer's entries for a parameter: numbers, or tensors of its shape."""
    forms: dict[str, Any] = {}
    for name, value in known.items():
        scalar = not isinstance(value, Tensor) or value.ndim == 0
        forms[name] = form_of(value) if scalar else tensor_like(parameter.detach())
    return forms


def require_run_form(run: Mapping[str, Any], states: tuple[Tensor, ...], observation: np.ndarray[Any, Any] | None) -> None:
    """Raise a :class:`ValueError` for recurrent states or observations that this model cannot have.

    :param run: the part ``run`` of a file.
    :param states: the recurrent states of a new model of as many environments.
    :param observation: observations of as many environments; None does not check them.
    """
    require_form(run["memory"], form_of(states), "the recurrent states")
    starts = np.zeros(run["n_envs"], np.bool_)
    require_form(run["last_episode_starts"], Maybe(array_like(starts)), "run.last_episode_starts")
    if observation is not None:
        require_form(run["last_obs"], Maybe(array_like(observation)), "run.last_obs")
