"""The zip of a model of Stable-Baselines3 or sb3-contrib, read as data: weights and plain settings, without running code.

SB3 pickles whatever is not JSON into the file, and opening that runs code. Here only three things are read: the names and
tensors of ``policy.pth``, by torch's loader for weights, which knows no code; numbers of the JSON; and the readable text that
stands beside a pickle, where it names a class of torch's. The shape of the networks follows from their weights.
"""

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
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


class Sb3Model(NamedTuple):
    """The content of a zip that is read.

    :param policy: name of the policy.
    :param settings: arguments of the algorithm.
    :param policy_kwargs: arguments of the policy.
    :param weights: of the policy, by SB3's names.
    """

    policy: str
    settings: dict[str, Any]
    policy_kwargs: dict[str, Any]
    weights: dict[str, Tensor]


def read_sb3(path: str | Path) -> Sb3Model:
    """Read a zip of SB3's ``PPO`` or sb3-contrib's ``RecurrentPPO``.

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
    settings |= {name: _constant(data.get(name)) for name in SCHEDULES if _constant(data.get(name)) is not None}
    return Sb3Model(_policy_of(path, weights), settings, _policy_kwargs(data.get("policy_kwargs", {}), weights), weights)


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


def _policy_of(path: Path, weights: Mapping[str, Tensor]) -> str:
    recurrent = "Lstm" if any(name.startswith("lstm_actor.") for name in weights) else ""
    extractor = [name for name in weights if name.startswith("features_extractor.")]
    if any(name.startswith("features_extractor.extractors.") for name in extractor):
        return f"MultiInput{recurrent}Policy"
    require(
        not extractor or "features_extractor.cnn.0.weight" in extractor, "the zip", str(path), "one with SB3's own extractors"
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


def _constant(value: Any) -> float | None:
    """Return the number of a constant schedule; None for any other."""
    if isinstance(value, Mapping):
        text = re.search(r"ConstantSchedule\(val=([\d.e-]+)\)", str(value.get("value_schedule", "")))
        return float(text[1]) if text else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
