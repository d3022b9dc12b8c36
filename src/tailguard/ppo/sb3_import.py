"""The zip of a model of Stable-Baselines3 or sb3-contrib, read as data: weights and plain settings, without running code.

SB3 pickles whatever is not JSON into the file, and opening that runs code. Here only three things are read: the names and
tensors of ``policy.pth``, by torch's loader for weights, which knows no code; numbers of the JSON; and the readable text that
stands beside a pickle, where it names a class of torch's, a schedule or a space. The shape of the networks follows from their
weights.
"""

import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.utils import LinearSchedule
from torch import Tensor

from tailguard.ppo.serialization import CLASSES
from tailguard.validation import require

# Settings with the same name and meaning here, if they are numbers or None.
SETTINGS = (
    "n_steps",
    "batch_size",
    "n_epochs",
    "gamma",
    "gae_lambda",
    "normalize_advantage",
    "ent_coef",
    "vf_coef",
    "max_grad_norm",
    "use_sde",
    "sde_sample_freq",
    "target_kl",
    "seed",
)
SCHEDULES = ("learning_rate", "clip_range", "clip_range_vf")
NETWORK = (
    "log_std_init",
    "squash_output",
    "full_std",
    "use_expln",
    "share_features_extractor",
    "normalize_images",
    "lstm_hidden_size",
    "n_lstm_layers",
    "shared_lstm",
    "enable_critic_lstm",
)
PLAIN = (int, float, bool, type(None))
NUMBERS = re.compile(r"[-+]?(?:inf|nan|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?)")
# A space in the text of a Dict space.
ENTRY = re.compile(r"'([^']+)': (Box|Discrete|MultiDiscrete|MultiBinary)\((.*?)\)(?=, '|[})]$)", re.DOTALL)


class Sb3Model(NamedTuple):
    """The content of a zip that is read.

    :param policy: name of the policy.
    :param settings: arguments of the algorithm.
    :param policy_kwargs: arguments of the policy.
    :param weights: of the policy, by SB3's names.
    :param described: what the JSON says of the spaces, and how many environments there were.
    """

    policy: str
    settings: dict[str, Any]
    policy_kwargs: dict[str, Any]
    weights: dict[str, Tensor]
    described: dict[str, Any]

    def space(self, name: str) -> spaces.Space[Any]:
        """Return the space that the text in the file describes.

        :param name: ``observation_space`` or ``action_space``.
        :raises ValueError: for one that it does not describe well enough.
        """
        try:
            return _space(self.described[name])
        except (KeyError, ValueError, TypeError, IndexError):
            raise ValueError(f"the {name} cannot be read from the text in the file, whose code is not run: give env") from None

    @property
    def n_envs(self) -> int:
        """Number of environments that the model was trained in."""
        n_envs = self.described.get("n_envs")
        return n_envs if isinstance(n_envs, int) and n_envs >= 1 else 1


def read_sb3(path: str | Path, *, own_extractor: bool = False) -> Sb3Model:
    """Read a zip of SB3's ``PPO`` or sb3-contrib's ``RecurrentPPO``.

    :param own_extractor: True if the user names the class of its feature extractor, which is not read from the file.
    :raises ValueError: for a file that is none, or whose networks are of the user's own making.
    """
    path = Path(path)
    path = path if path.exists() else path.with_suffix(".zip")
    try:
        with zipfile.ZipFile(path) as archive:
            data, content = json.loads(archive.read("data")), archive.read("policy.pth")
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a model of Stable-Baselines3: {error}") from None
    try:
        weights: dict[str, Tensor] = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):
        raise ValueError(f"{path} has weights that are more than tensors: reading them would run code of the file") from None
    settings = {name: data[name] for name in SETTINGS if isinstance(data.get(name, {}), PLAIN)}
    settings["normalize_advantage_per_mini_batch"] = True  # what SB3's normalize_advantage means
    for name in SCHEDULES:
        schedule = _schedule(data.get(name))
        if schedule is not None:
            settings[name] = schedule
        elif data.get(name) is not None:
            warnings.warn(
                f"{name} was a function, which is code and not read: give it to from_sb3({name}=...), or it has its default",
                stacklevel=3,
            )
    described = {name: data.get(name) for name in ("observation_space", "action_space", "n_envs")}
    kwargs = _policy_kwargs(data.get("policy_kwargs", {}), weights)
    return Sb3Model(_policy_of(path, weights, described, own_extractor), settings, kwargs, weights, described)


def weights_from_sb3(
    weights: Mapping[str, Tensor], own: Mapping[str, Tensor], action_space: spaces.Space[Any]
) -> dict[str, Tensor]:
    """Return SB3's weights by the names of a :class:`DistributionalPolicy`; every quantile of a critic begins as SB3's value.

    :param weights: SB3's.
    :param own: the policy's, which are kept where SB3 has none: statistics and the like.
    :param action_space: what the policy acts in.
    """
    actor_head, critic_head = f"actor.{2 * _depth(weights, 'policy')}.", f"critics.0.{2 * _depth(weights, 'value')}."
    places = {
        "mlp_extractor.policy_net.": "actor.",
        "mlp_extractor.value_net.": "critics.0.",
        "action_net.": actor_head,
        "value_net.": critic_head,
        "lstm_actor.": "actor_trunk.lstm.",
        "lstm_critic.": "critic_trunk.lstm.",
        "critic.": "critic_layer.",
        "features_extractor.": "features_extractor.",
        "pi_features_extractor.": None,  # a second name of the one before
        "vf_features_extractor.": "vf_features_extractor.",
        "log_std": "log_std",
    }
    found = dict(own)
    for name, tensor in weights.items():
        prefix = next((prefix for prefix in places if name.startswith(prefix)), None)
        if prefix is None:
            raise ValueError(f"the zip has a weight {name}, which SB3's own policies do not have: its network is the user's")
        place = places[prefix]
        renamed = None if place is None else place + name.removeprefix(prefix)
        # A critic's extractor that is the actor's has no name of its own here.
        if renamed is not None and (renamed in own or not renamed.startswith("vf_features_extractor.")):
            found[renamed] = tensor
    for kind in ("weight", "bias"):
        found[critic_head + kind] = weights[f"value_net.{kind}"].expand_as(own[critic_head + kind]).clone()
        if isinstance(action_space, spaces.MultiBinary):  # a logit per bit there, one for 0 and one for 1 here
            logits = weights[f"action_net.{kind}"]
            found[actor_head + kind] = torch.stack((torch.zeros_like(logits), logits), dim=1).flatten(0, 1)
    return found


def _depth(weights: Mapping[str, Tensor], part: str) -> int:
    """Return the number of hidden layers of the actor (``policy``) or of the critic (``value``)."""
    return sum(re.fullmatch(rf"mlp_extractor\.{part}_net\.\d+\.weight", name) is not None for name in weights)


def _policy_of(path: Path, weights: Mapping[str, Tensor], described: Mapping[str, Any], own_extractor: bool) -> str:
    recurrent = "Lstm" if any(name.startswith("lstm_actor.") for name in weights) else ""
    extractor = [name for name in weights if name.startswith("features_extractor.")]
    observed = str(described["observation_space"])  # a Dict of vectors has an extractor without weights
    if any(name.startswith("features_extractor.extractors.") for name in extractor) or "spaces.dict.Dict" in observed:
        return f"MultiInput{recurrent}Policy"
    if own_extractor:
        return f"Mlp{recurrent}Policy"
    require(
        not extractor or "features_extractor.cnn.0.weight" in extractor,
        "the zip",
        str(path),
        "one with SB3's own extractors; give the class of another, policy_kwargs={'features_extractor_class': ...}",
    )
    return f"{'Cnn' if extractor else 'Mlp'}{recurrent}Policy"


def _policy_kwargs(saved: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    kwargs = {name: _plain(saved[name]) for name in NETWORK if name in saved}
    parts = {"pi": "policy", "vf": "value"}
    kwargs["net_arch"] = {
        key: [weights[f"mlp_extractor.{part}_net.{2 * i}.weight"].shape[0] for i in range(_depth(weights, part))]
        for key, part in parts.items()
    }
    if "features_extractor.linear.0.weight" in weights:
        kwargs["features_extractor_kwargs"] = {"features_dim": len(weights["features_extractor.linear.0.weight"])}
    if "activation_fn" in saved:
        named = re.fullmatch(r"<class '([\w.]+)'>", str(saved["activation_fn"]))
        module, base, _ = CLASSES["activation_fn"]
        known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in vars(module).values() if isinstance(cls, type)}
        require(named is not None and named[1] in known, "activation_fn", saved["activation_fn"], "one of torch's")
        kwargs["activation_fn"] = known[named[1]] if named else base
    return kwargs


def _plain(value: Any) -> Any:
    """Return a value of the JSON; beside a pickle SB3 writes values as text."""
    words = {"True": True, "False": False, "None": None}
    if not isinstance(value, str) or value in words:
        return words.get(value, value) if isinstance(value, str) else value
    return float(value) if re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", value) else int(value)


def _schedule(value: Any) -> float | LinearSchedule | None:
    """Return a number or a linear schedule; None for any other, which is code."""
    if isinstance(value, Mapping):
        text = str(value.get("value_schedule", ""))
        constant = re.fullmatch(r"ConstantSchedule\(val=(\S+)\)", text)
        linear = {name: value[name] for name in ("start", "end", "end_fraction") if isinstance(value.get(name), int | float)}
        linear = linear or {name: float(number) for name, number in re.findall(r"(start|end|end_fraction)=([-\d.e]+)", text)}
        if "LinearSchedule" in f"{value.get(':type:')}{text}" and len(linear) == 3:
            return LinearSchedule(**linear)
        return float(constant[1]) if constant else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _space(described: Mapping[str, Any]) -> spaces.Space[Any]:
    """Return the space of an entry of the JSON, where its pickle stands beside a text of its attributes."""
    kind = str(described[":type:"]).removesuffix("'>").rpartition(".")[2]
    if kind == "Dict":
        text = str(described["spaces"])
        entries: dict[str, spaces.Space[Any]] = {key: _space_of_repr(of, parts) for key, of, parts in ENTRY.findall(text)}
        found = spaces.Dict(entries)
        # Whatever is written in another way than this space is, has not been understood.
        require(text in (str(dict(found.spaces)), str(found.spaces)), "spaces", text, "the text of a Dict")
        return found
    if kind == "Discrete":
        return spaces.Discrete(int(described["n"]), start=int(described.get("start", 0)))
    shape = tuple(int(size) for size in described["_shape"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(shape[0] if isinstance(described["n"], int) else shape)
    if kind == "MultiDiscrete":
        start = _array(described.get("start", 0), shape).astype(np.int64)
        return spaces.MultiDiscrete(_array(described["nvec"], shape).astype(np.int64), start=start)
    require(kind == "Box", "the space", kind, "one of SB3's")
    return _box(described["low"], described["high"], shape, str(described["dtype"]))


def _space_of_repr(kind: str, parts: str) -> spaces.Space[Any]:
    """Return the space of a text such as ``Box(-1.0, 1.0, (2,), float32)``."""
    if kind == "Box":
        low, high, rest = parts.split(", ", 2)
        shape, _, dtype = rest.rpartition(", ")
        return _box(low, high, tuple(map(int, re.findall(r"\d+", shape))), dtype)
    if kind == "Discrete":
        n, _, start = parts.partition(", start=")
        return spaces.Discrete(int(n), start=int(start or 0))
    sizes = [int(size) for size in re.findall(r"\d+", parts)]
    if kind == "MultiBinary":
        return spaces.MultiBinary(sizes if "(" in parts or "[" in parts else sizes[0])
    return spaces.MultiDiscrete(sizes)


def _box(low: Any, high: Any, shape: tuple[int, ...], dtype: str) -> spaces.Box:
    kind = np.dtype(dtype).type
    return spaces.Box(_array(low, shape).astype(kind), _array(high, shape).astype(kind), dtype=kind)


def _array(text: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the array of a text: of all its numbers, or, where numpy has shortened it, of the one number that it repeats."""
    numbers = np.array([float(number) for number in NUMBERS.findall(str(text))])
    if numbers.size == math.prod(shape) and "..." not in str(text):
        return numbers.reshape(shape)
    require(len(np.unique(numbers)) == 1, "the text of an array", text, "complete, or of one number")
    return np.full(shape, numbers[0])
