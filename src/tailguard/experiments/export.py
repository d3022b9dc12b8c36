"""Export an agent for other programs: one step as a graph of ONNX or TorchScript.

Inputs are the observation ``[batch, D]`` and, if the policy is recurrent, its hidden and cell states ``[layers, batch, H]``;
outputs are the most likely action as the environment expects it, and the states to pass in with the next observation. States
are zeros at the start. The normalisation of observations is part of the graph. The states of an ensemble's members follow each
other on the first axis, and the action is the one that asks for the mean of their weights.
"""

import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tailguard import __version__
from tailguard.experiments.ensemble import EnsemblePolicy
from tailguard.io.atomic import atomic
from tailguard.market.features import FeatureScaler
from tailguard.market.rules import TradingSettings
from tailguard.ppo.actions import ActionDistribution, Categorical, Gaussian
from tailguard.ppo.policy import DistributionalPolicy

Format = Literal["onnx", "torchscript"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torchscript": ".pt"}
# What an action asks for depends on these settings of the account.
STEERING = {"long_only", "leverage", "core", "active", "gain", "volatility_power", "scale_core"}


class ActingStep(nn.Module):
    """One step of a policy, from raw observations to actions.

    :param policy: of a trained model.
    :param scaler: of the first columns of an observation, if they come in as features that are not scaled.
    """

    shift: Tensor
    factor: Tensor

    def __init__(self, policy: DistributionalPolicy, scaler: FeatureScaler | None = None) -> None:
        super().__init__()
        self.policy = policy
        shift, factor = np.zeros(policy.obs_size), np.ones(policy.obs_size)
        if scaler is not None and scaler.mean.ndim > 1:
            raise ValueError(
                "this agent was trained on a pool: its features are scaled per instrument, which a graph cannot do"
            )
        if scaler is not None:
            shift[: len(scaler.mean)], factor[: len(scaler.mean)] = scaler.mean, scaler.factor
        self.register_buffer("shift", torch.from_numpy(shift))
        self.register_buffer("factor", torch.from_numpy(factor))
        self.action = _ModeAsAction(policy.action_dist)

    def forward(self, observation: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the action, and hidden and cell states if the policy is recurrent."""
        scaled = ((observation.double() - self.shift) * self.factor).float()
        before = (state[0], state[1]) if state else self.policy.initial_state(1)
        dist_params, after = self.policy.act(self.policy.inputs(scaled), before)
        return (self.action(dist_params), *after) if state else (self.action(dist_params),)


class EnsembleStep(nn.Module):
    """One step of an ensemble, from raw observations to actions; see :class:`ActingStep`.

    :param policy: of the ensemble.
    :param scaler: see :class:`ActingStep`.
    """

    def __init__(self, policy: EnsemblePolicy, scaler: FeatureScaler | None = None) -> None:
        super().__init__()
        self.steps = nn.ModuleList(ActingStep(member, scaler) for member in policy.members)
        self.low, self.high, self.gain = policy.trading.lowest_weight, policy.trading.leverage, policy.trading.gain

    def forward(self, observation: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the mean action, and hidden and cell states if the policies are recurrent."""
        own = zip(*(part.chunk(len(self.steps)) for part in state), strict=True) if state else [()] * len(self.steps)
        after = [step(observation, *member) for step, member in zip(self.steps, own, strict=True)]
        weights = torch.stack([self.low + 0.5 * (action + 1.0) * (self.high - self.low) for action, *_ in after])
        mean = self.capped(self.gain * self.capped(weights)).mean(0) / self.gain
        states = (torch.cat(parts) for parts in zip(*(states for _, *states in after), strict=True))
        return (2.0 * (mean - self.low) / (self.high - self.low) - 1.0, *states)

    def capped(self, weights: Tensor) -> Tensor:
        """Scale weights down where their gross exposure exceeds the leverage."""
        return weights * (self.high / weights.abs().sum(-1, keepdim=True).clamp(min=self.high))


class _ModeAsAction(nn.Module):
    """``mode`` and ``to_env`` of an action distribution, in operations that can be exported."""

    low: Tensor
    high: Tensor

    def __init__(self, action_dist: ActionDistribution) -> None:
        super().__init__()
        self.action_dist = action_dist
        if isinstance(action_dist, Gaussian):
            self.register_buffer("low", torch.from_numpy(action_dist.low.reshape(-1)))
            self.register_buffer("high", torch.from_numpy(action_dist.high.reshape(-1)))

    def forward(self, dist_params: Tensor) -> Tensor:
        mode = self.action_dist.mode(dist_params)
        if isinstance(self.action_dist, Categorical):
            chosen = mode.long() + torch.from_numpy(np.asarray(self.action_dist.start))
            return chosen[:, 0] if self.action_dist.single else chosen
        if isinstance(self.action_dist, Gaussian) and self.action_dist.squash:
            mode = self.low + 0.5 * (torch.tanh(mode) + 1.0) * (self.high - self.low)
        return torch.minimum(torch.maximum(mode, self.low), self.high).reshape(-1, *self.action_dist.action_shape)


def export(
    policy: DistributionalPolicy | EnsemblePolicy,
    path: str | Path,
    form: Format,
    scaler: FeatureScaler | None = None,
    columns: Sequence[str] = (),
    trading: TradingSettings | None = None,
) -> Path:
    """Write one step of a policy.

    :param policy: of an agent, or of an ensemble.
    :param path: of the file; its ending is added if it is missing.
    :param form: ``onnx`` needs the extra of that name.
    :param scaler: see :class:`ActingStep`.
    :param columns: names of the columns of an observation, written beside the graph.
    :param trading: what turns an action into target weights (:data:`STEERING`), written beside the graph as well.
    :raises ValueError: when its folder does not exist, or its ending is that of something else.
    """
    path = Path(path)
    path = path if path.suffix else path.with_suffix(SUFFIXES[form])
    if path.suffix != SUFFIXES[form]:
        raise ValueError(f"{path}: a file of the format {form} ends in {SUFFIXES[form]}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it, or name another file")
    step = EnsembleStep(policy, scaler) if isinstance(policy, EnsemblePolicy) else ActingStep(policy, scaler)
    step.eval()
    inputs, names = _example(policy)
    steering = {} if trading is None else {"trading": trading.model_dump(mode="json", include=STEERING)}
    facts = json.dumps({"tailguard": __version__, "inputs": names, "columns": list(columns), **steering})
    with warnings.catch_warnings(), torch.no_grad():
        # Both exporters warn of what they call themselves; there is nothing that a caller could do about it.
        warnings.simplefilter("ignore")
        if form == "onnx":
            graph = _onnx_graph(step, inputs, names, facts)
        else:
            frozen = torch.jit.freeze(torch.jit.trace(step, inputs, check_trace=False))
            graph = frozen.save_to_buffer(_extra_files={"tailguard.json": facts})
    with atomic(path) as file:
        file.write(graph)
    return path


def format_of(path: Path | None) -> Format:
    """Return the format that the ending of a file tells; without one it is that which needs no further package.

    :param path: of the file to write.
    """
    return next((form for form, suffix in SUFFIXES.items() if path is not None and path.suffix == suffix), "torchscript")


def observation_names(policy: DistributionalPolicy | EnsemblePolicy, features: Sequence[str]) -> list[str]:
    """Return the columns of an observation of a trading agent: features, account, and the running return of CVaR agents.

    :param features: names of the features.
    """
    policy = policy.members[0] if isinstance(policy, EnsemblePolicy) else policy
    assets = (policy.own_size - len(features) - 1) // 2
    account = [f"{what}_{asset}" for what in ("weight", "unrealised_gain") for asset in range(assets)]
    second = "left" if policy.budget.per_period else "discount"
    return [*features, *account, "drawdown", *("earned", second, "tail")[: policy.budget.columns]]


def _example(policy: DistributionalPolicy | EnsemblePolicy) -> tuple[tuple[Tensor, ...], list[str]]:
    if isinstance(policy, EnsemblePolicy):
        (observation, *state), names = _example(policy.members[0])
        return (observation, *(part.repeat(len(policy.members), 1, 1) for part in state)), names
    # Two rows: with one the exporters would take the batch for a constant.
    observation = torch.zeros(2, policy.obs_size)
    if not policy.recurrent:
        return (observation,), ["observation"]
    return (observation, *policy.initial_state(2)), ["observation", "hidden", "cell"]


def _onnx_graph(step: nn.Module, inputs: tuple[Tensor, ...], names: list[str], facts: str) -> bytes:
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch's exporter needs it and would say so less clearly)
    except ModuleNotFoundError as missing:
        raise ValueError(f"export to ONNX needs the package {missing.name}: pip install 'tailguard[onnx]'") from None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports operators of packages that nobody asked for
    batch = torch.export.Dim("batch")
    states: tuple[dict[int, Any], ...] = tuple({1: batch} for _ in names[1:])
    outputs = ["action", *(f"{name}_after" for name in names[1:])]
    program = torch.onnx.export(
        step,
        inputs,
        dynamo=True,
        verbose=False,
        input_names=names,
        output_names=outputs,
        dynamic_shapes={"observation": {0: batch}} | ({"state": states} if states else {}),
    )
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, {"tailguard": facts})
    return bytes(model.SerializeToString())
