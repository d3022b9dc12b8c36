"""One step of UPGD (Elsayed and Mahmood 2024): the utility of a weight, the gate that it sets, the step.

**Utility.** u = -gradient * weight is the first-order estimate of how much the loss would rise if the weight were 0. Its
running mean with rate beta, after t steps, is bias-corrected by 1 - beta^t:

    U <- beta U + (1 - beta) u,    u^ = U / (1 - beta^t).

**Gate.** A weight's protection s in [0, 1] grows with its utility, and its step shrinks:

    s = sigmoid(2 x),   x = (u^ - centre) * steepness,   step = 2 (1 - s) * the ungated step.

The factor 2 makes s = 1/2 the ungated optimizer. Since 2 (1 - sigmoid(2 x)) is 1 - tanh(x), a gate is two numbers and one tanh.

``minmax``: x runs from -1/2 for the least to 1/2 for the most useful weight of all parameters, so s from 0.269 to 0.731. The
extremes are taken after the same bias correction as the utilities, so the first steps are gated like all others. The audit
reports' additive epsilon of 1e-8 is relative here: utilities of 1e-12 are gated like utilities of 1. With equal
utilities s = 1/2.

``reference``: the authors' published code, s = sigmoid(u^ / M) with M the largest utility *before* bias correction. In the
first steps its argument is up to 1 / (1 - beta) times too large, and useful weights stand still. Where no utility is above 0
the published code divides by 0 or turns the order round; here s = 1/2.

``none``: s = 1/2 everywhere, for comparisons.

**Step.** weight <- (1 - lr * weight_decay) weight - lr * 2 (1 - s) * (direction + noise), with the gradient or Adam's
direction.

The gate needs the utilities of all parameters, so a step has two halves: ``update_utility`` for every group, then ``move`` for
every group. Three classes implement both: :class:`SingleTensor` tensor by tensor, to be read; :class:`Foreach` on lists of
tensors, on any device; :class:`Fused` in two or three compiled passes over float32 memory of the CPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.optim import kernels
from tailguard.optim.config import Gate
from tailguard.optim.layout import as_float32, flat_array
from tailguard.optim.step_scaling import ScaledRange

Scalar = Any  # a number or a tensor without dimensions; the formulas below hold for both

RELATIVE_EPS = 1e-8
TINY = 1.2e-38  # the smallest normal float32: keeps 0 / 0 from being NaN


# -------------------------------------------------------------------------------------------------------------- the gate


class UtilityRange(NamedTuple):
    """The smallest and the largest utility of some parameters.

    ``low`` and ``high`` are bias-corrected, ``raw_high`` is not.
    """

    low: Scalar
    high: Scalar
    raw_high: Scalar


def joint_range(ranges: Sequence[UtilityRange]) -> UtilityRange:
    """Return the range of several ranges together."""
    lows, highs, raw_highs = zip(*ranges, strict=True)
    if isinstance(lows[0], Tensor):
        return UtilityRange(torch.stack(lows).min(), torch.stack(highs).max(), torch.stack(raw_highs).max())
    return UtilityRange(min(lows), max(highs), max(raw_highs))


class GateScale(NamedTuple):
    """The two numbers of a gate: x = (bias-corrected utility - centre) * steepness."""

    centre: Scalar
    steepness: Scalar


def gate_scale(gate: Gate, utilities: UtilityRange) -> GateScale:
    """Compute the centre and the steepness of a gate.

    :param gate: name of the gate.
    :param utilities: range over all parameters together. Tensors stay tensors: nothing waits for the device.
    """
    if gate == "none":
        return GateScale(0.0, 0.0)
    low, high, raw_high = utilities
    if gate == "reference":
        return GateScale(0.0, (raw_high > 0.0) / (2.0 * raw_high + TINY))
    # A range of 0 must give a steepness of 0, not one that magnifies the rounding of u - centre.
    spread = high - low + RELATIVE_EPS * (abs(low) + abs(high)) + TINY
    return GateScale((low + high) / 2.0, (high > low) / spread)


def gate_factor(corrected_utility: Tensor, scale: GateScale) -> Tensor:
    """Compute UPGD's gate 2 (1 - s) = 1 - tanh(x): the factor of a step, from 0 (fully protected) to 2."""
    return 1.0 - torch.tanh((corrected_utility - scale.centre) * scale.steepness)


def protection(corrected_utility: Tensor, scale: GateScale) -> Tensor:
    """Compute the protection s in [0, 1]; 1/2 leaves the step as it is."""
    return 1.0 - gate_factor(corrected_utility, scale) / 2.0


# -------------------------------------------------------------------------------------------------------- shared by all rules


@dataclass(frozen=True)
class GroupGradients:
    """The parameters of one group that have a gradient.

    :param params: the weights.
    :param grads: the direction of ascent, negated already where the group maximises.
    :param states: the optimizer's state of each, with its ``step`` counted already.
    :param group: the hyperparameters.
    :param ranges: of each parameter, the ranges of its elements and the factors of their steps.
    :param adaptive: True for Adam's direction, False for the gradient itself.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    group: dict[str, Any]
    ranges: list[Sequence[ScaledRange]]
    adaptive: bool

    def state_entries(self, key: str) -> list[Tensor]:
        """Return one entry of all states."""
        return [state[key] for state in self.states]

    def bias_corrections(self, beta: float) -> list[float]:
        """Return 1 - beta^t of each parameter: the total weight of a running mean after t steps."""
        return [1.0 - beta ** state["step"] for state in self.states]

    def scale_steps(self, steps: Sequence[Tensor]) -> None:
        """Multiply the step of every parameter by the factors of its ranges, in place."""
        for step, ranges in zip(steps, self.ranges, strict=True):
            if len(ranges) == 1:
                step.mul_(ranges[0].factor)
            else:
                for span, factor in ranges:
                    step.view(-1)[span].mul_(factor)

    @property
    def keep(self) -> float:
        """The share of a weight that decoupled decay leaves."""
        return 1.0 - float(self.group["lr"]) * float(self.group["weight_decay"])


def noise_std(state: dict[str, Any], group: dict[str, Any], rms: Tensor | float) -> Tensor | float:
    """Compute the standard deviation of the noise on a direction with this root mean square.

    Fixed noise is ``sigma``. Adaptive noise is sigma in units of the direction, at least ``min_noise_std``: the ratio of noise
    to signal then depends neither on the scale of gradients nor on the number of weights.
    """
    if not group["adaptive_noise"]:
        return float(group["sigma"])
    if "grad_norm_ema" not in state:  # a running mean that starts at its first value needs no correction
        state["grad_norm_ema"] = torch.as_tensor(rms).clone()
    mean: Tensor = state["grad_norm_ema"]
    mean.mul_(group["noise_beta"]).add_(rms, alpha=1.0 - group["noise_beta"])
    level = rms if group["instant_noise_scale"] else mean
    sigma, floor = float(group["sigma"]), float(group["min_noise_std"])
    return (sigma * level).clamp(min=floor) if isinstance(level, Tensor) else max(sigma * level, floor)


def utility_range(batch: GroupGradients) -> UtilityRange:
    """Return the range of utilities of a group."""
    corrections = batch.bias_corrections(batch.group["beta_utility"])
    ranges = [torch.aminmax(utility) for utility in batch.state_entries("avg_utility")]
    return joint_range(
        [UtilityRange(low / weight, high / weight, high) for (low, high), weight in zip(ranges, corrections, strict=True)]
    )


# ------------------------------------------------------------------------------------------------------------ the update rules


class SingleTensor:
    """The equations tensor by tensor, in plain PyTorch."""

    @staticmethod
    def update_utility(batch: GroupGradients) -> UtilityRange:
        """Update U <- beta U + (1 - beta) (-gradient * weight), before any weight moves; return its range."""
        beta = batch.group["beta_utility"]
        for param, grad, state in zip(batch.params, batch.grads, batch.states, strict=True):
            state["avg_utility"].mul_(beta).addcmul_(grad, param, value=-(1.0 - beta))
        return utility_range(batch)

    @staticmethod
    def move(batch: GroupGradients, scale: GateScale, noise: list[Tensor] | None) -> None:
        """Move weight <- (1 - lr * decay) weight - lr * 2 (1 - s) * (direction + noise)."""
        group = batch.group
        corrections = batch.bias_corrections(group["beta_utility"])
        steps = []
        for i, (grad, state) in enumerate(zip(batch.grads, batch.states, strict=True)):
            direction = SingleTensor._adam(grad, state, group) if batch.adaptive else grad
            if noise is not None:
                rms = direction.square().mean().sqrt()
                direction = direction + noise_std(state, group, rms) * noise[i]
            steps.append(gate_factor(state["avg_utility"] / corrections[i], scale) * direction)
        batch.scale_steps(steps)
        for param, step in zip(batch.params, steps, strict=True):
            param.mul_(batch.keep).add_(step, alpha=-group["lr"])

    @staticmethod
    def _adam(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        beta1, beta2, step = group["beta1"], group["beta2"], state["step"]
        first: Tensor = state["first_moment"]
        second: Tensor = state["sec_moment"]
        first.lerp_(grad, 1.0 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        direction: Tensor = first / (1.0 - beta1**step)
        direction /= (second / (1.0 - beta2**step)).sqrt() + group["eps"]
        return direction


class Foreach:
    """The equations on lists of tensors: one call per operation and not per tensor."""

    @staticmethod
    def update_utility(batch: GroupGradients) -> UtilityRange:
        """Do what :meth:`SingleTensor.update_utility` does."""
        beta, utilities = batch.group["beta_utility"], batch.state_entries("avg_utility")
        torch._foreach_mul_(utilities, beta)
        torch._foreach_addcmul_(utilities, batch.grads, batch.params, -(1.0 - beta))
        return utility_range(batch)

    @staticmethod
    def move(batch: GroupGradients, scale: GateScale, noise: list[Tensor] | None) -> None:
        """Do what :meth:`SingleTensor.move` does."""
        group = batch.group
        directions = Foreach._adam(batch) if batch.adaptive else batch.grads
        if noise is not None:
            # A norm that nobody asked for would cost a pass; fixed noise does not look at it.
            norms = list(torch._foreach_norm(directions)) if group["adaptive_noise"] else [torch.zeros(())] * len(directions)
            for i, (state, norm) in enumerate(zip(batch.states, norms, strict=True)):
                noise[i] = noise[i] * noise_std(state, group, norm / math.sqrt(directions[i].numel()))
            directions = list(torch._foreach_add(directions, noise))
        factors = torch._foreach_div(batch.state_entries("avg_utility"), batch.bias_corrections(group["beta_utility"]))
        torch._foreach_add_(factors, -scale.centre)
        torch._foreach_mul_(factors, scale.steepness)
        torch._foreach_tanh_(factors)
        torch._foreach_neg_(factors)
        torch._foreach_add_(factors, 1.0)
        batch.scale_steps(factors)
        torch._foreach_mul_(batch.params, batch.keep)
        torch._foreach_addcmul_(batch.params, factors, directions, -group["lr"])

    @staticmethod
    def _adam(batch: GroupGradients) -> list[Tensor]:
        group, first, second = batch.group, batch.state_entries("first_moment"), batch.state_entries("sec_moment")
        torch._foreach_lerp_(first, batch.grads, 1.0 - group["beta1"])
        torch._foreach_mul_(second, group["beta2"])
        torch._foreach_addcmul_(second, batch.grads, batch.grads, 1.0 - group["beta2"])
        mean_squares = torch._foreach_div(second, batch.bias_corrections(group["beta2"]))
        torch._foreach_sqrt_(mean_squares)
        torch._foreach_add_(mean_squares, group["eps"])
        directions = torch._foreach_div(first, batch.bias_corrections(group["beta1"]))
        torch._foreach_div_(directions, mean_squares)
        return list(directions)


class Fused:
    """The equations in compiled passes over float32 memory of the CPU.

    It holds a scratch buffer, since memory that is allocated anew in every step costs as much as a pass over it.
    """

    def __init__(self) -> None:
        self._scratch: NDArray[np.float32] = np.empty(0, np.float32)

    def update_utility(self, batch: GroupGradients) -> UtilityRange:
        """Do what :meth:`SingleTensor.update_utility` does."""
        beta = batch.group["beta_utility"]
        rates = as_float32(beta, 1.0 - beta)
        ranges = []
        for i, weight in enumerate(batch.bias_corrections(beta)):
            weights, gradient, utility = _arrays(batch, i)
            low, high = kernels.update_utility(utility, gradient, weights, *rates)
            # Rounded as the kernel rounds U / (1 - beta^t), so that the extremes are utilities that occur.
            correction = np.float32(1.0 / weight)
            ranges.append(UtilityRange(float(low * correction), float(high * correction), high))
        return joint_range(ranges)

    def move(self, batch: GroupGradients, scale: GateScale, noise: list[Tensor] | None) -> None:
        """Do what :meth:`SingleTensor.move` does."""
        group = batch.group
        measure = noise is not None and group["adaptive_noise"]
        for i, weight in enumerate(batch.bias_corrections(group["beta_utility"])):
            weights, gradient, utility = _arrays(batch, i)
            gate = (1.0 / weight, scale.centre, scale.steepness, batch.keep)
            if batch.adaptive:
                direction, squares = self._adam(gradient, batch.states[i], group)
            else:
                direction, squares = gradient, kernels.sum_of_squares(gradient) if measure else 0.0
            std = 0.0 if noise is None else float(noise_std(batch.states[i], group, math.sqrt(squares / len(weights))))
            for span, factor in batch.ranges[i]:
                numbers = as_float32(factor * group["lr"], *gate)
                if noise is None:
                    kernels.move(weights[span], direction[span], utility[span], *numbers)
                else:
                    own = flat_array(noise[i])[span]
                    kernels.move_with_noise(weights[span], direction[span], utility[span], own, np.float32(std), *numbers)

    def _adam(
        self, gradient: NDArray[np.float32], state: dict[str, Any], group: dict[str, Any]
    ) -> tuple[NDArray[np.float32], float]:
        """Return Adam's direction and its sum of squares."""
        if len(self._scratch) < len(gradient):
            self._scratch = np.empty(len(gradient), np.float32)
        direction = self._scratch[: len(gradient)]
        beta1, beta2, step = group["beta1"], group["beta2"], state["step"]
        # first / w1 / (sqrt(second / w2) + eps) with both corrections moved out of the loop
        root = math.sqrt(1.0 - beta2**step)
        numbers = as_float32(1.0 - beta1, beta2, 1.0 - beta2, root / (1.0 - beta1**step), group["eps"] * root)
        moments = flat_array(state["first_moment"]), flat_array(state["sec_moment"])
        return direction, kernels.adam_direction(direction, *moments, gradient, *numbers)


class _Arrays(NamedTuple):
    """A parameter, its gradient and its utility as flat arrays on the same memory."""

    weights: NDArray[np.float32]
    gradient: NDArray[np.float32]
    utility: NDArray[np.float32]


def _arrays(batch: GroupGradients, i: int) -> _Arrays:
    return _Arrays(flat_array(batch.params[i].detach()), flat_array(batch.grads[i]), flat_array(batch.states[i]["avg_utility"]))
