"""One step of a utility-gated optimizer in plain PyTorch: tensor by tensor to read, and on lists of tensors to run.

A step has two halves, because the gate needs the utilities of all parameters: ``update_utility`` for every group, then ``move``
for every group. ``fused.py`` has the same two functions for flat memory on the CPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailguard.optim.gate import Extremes, GateScale, merged, step_share
from tailguard.optim.pieces import Piece


@dataclass(frozen=True)
class Batch:
    """The parameters of one group that have a gradient.

    :param params: the weights.
    :param grads: the direction of ascent, negated already where the group maximises.
    :param states: the optimizer's state of each, with its ``step`` counted already.
    :param group: the hyperparameters.
    :param pieces: in which each of the parameters moves.
    :param adaptive: whether the direction is Adam's or the gradient itself.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    group: dict[str, Any]
    pieces: list[Sequence[Piece]]
    adaptive: bool

    def column(self, key: str) -> list[Tensor]:
        """One entry of all states."""
        return [state[key] for state in self.states]

    def corrections(self, beta: float) -> list[float]:
        """1 - beta^t of each parameter: the weight that a running mean has gathered in t steps."""
        return [1.0 - beta ** state["step"] for state in self.states]

    def shorten(self, steps: Sequence[Tensor]) -> None:
        """Multiply the step of every parameter by the factors of its pieces."""
        for step, pieces in zip(steps, self.pieces, strict=True):
            if len(pieces) == 1:
                step.mul_(pieces[0].factor)
            else:
                for span, factor in pieces:
                    step.view(-1)[span].mul_(factor)

    @property
    def keep(self) -> float:
        """What decoupled decay leaves of a weight."""
        return 1.0 - float(self.group["lr"]) * float(self.group["weight_decay"])


def noise_std(state: dict[str, Any], group: dict[str, Any], rms: Tensor | float) -> Tensor | float:
    """Standard deviation of the noise on a direction with this root mean square.

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


def extremes(batch: Batch) -> Extremes:
    """The range of utilities of a batch."""
    corrections = batch.corrections(batch.group["beta_utility"])
    ranges = [torch.aminmax(utility) for utility in batch.column("avg_utility")]
    return merged(
        [Extremes(low / weight, high / weight, high) for (low, high), weight in zip(ranges, corrections, strict=True)]
    )


class SingleTensor:
    """The algorithm as one would write it down."""

    @staticmethod
    def update_utility(batch: Batch) -> Extremes:
        """u <- beta u + (1 - beta) (-gradient * weight), before any weight moves."""
        beta = batch.group["beta_utility"]
        for param, grad, state in zip(batch.params, batch.grads, batch.states, strict=True):
            state["avg_utility"].mul_(beta).addcmul_(grad, param, value=-(1.0 - beta))
        return extremes(batch)

    @staticmethod
    def move(batch: Batch, scale: GateScale, noise: list[Tensor] | None) -> None:
        """Weight <- (1 - lr * decay) weight - lr * 2 (1 - s) * (direction + noise)."""
        group = batch.group
        corrections = batch.corrections(group["beta_utility"])
        steps = []
        for i, (grad, state) in enumerate(zip(batch.grads, batch.states, strict=True)):
            direction = SingleTensor._adam(grad, state, group) if batch.adaptive else grad
            if noise is not None:
                rms = direction.square().mean().sqrt()
                direction = direction + noise_std(state, group, rms) * noise[i]
            steps.append(step_share(state["avg_utility"] / corrections[i], scale) * direction)
        batch.shorten(steps)
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
    """The same on lists: one call per operation and not per tensor."""

    @staticmethod
    def update_utility(batch: Batch) -> Extremes:
        """As in :class:`SingleTensor`."""
        beta, utilities = batch.group["beta_utility"], batch.column("avg_utility")
        torch._foreach_mul_(utilities, beta)
        torch._foreach_addcmul_(utilities, batch.grads, batch.params, -(1.0 - beta))
        return extremes(batch)

    @staticmethod
    def move(batch: Batch, scale: GateScale, noise: list[Tensor] | None) -> None:
        """As in :class:`SingleTensor`."""
        group = batch.group
        directions = Foreach._adam(batch) if batch.adaptive else batch.grads
        if noise is not None:
            # A norm that nobody asked for would cost a pass; fixed noise does not look at it.
            norms = list(torch._foreach_norm(directions)) if group["adaptive_noise"] else [torch.zeros(())] * len(directions)
            for i, (state, norm) in enumerate(zip(batch.states, norms, strict=True)):
                noise[i] = noise[i] * noise_std(state, group, norm / math.sqrt(directions[i].numel()))
            directions = list(torch._foreach_add(directions, noise))
        shares = torch._foreach_div(batch.column("avg_utility"), batch.corrections(group["beta_utility"]))
        torch._foreach_add_(shares, -scale.centre)
        torch._foreach_mul_(shares, scale.slope)
        torch._foreach_tanh_(shares)
        torch._foreach_neg_(shares)
        torch._foreach_add_(shares, 1.0)
        batch.shorten(shares)
        torch._foreach_mul_(batch.params, batch.keep)
        torch._foreach_addcmul_(batch.params, shares, directions, -group["lr"])

    @staticmethod
    def _adam(batch: Batch) -> list[Tensor]:
        group, first, second = batch.group, batch.column("first_moment"), batch.column("sec_moment")
        torch._foreach_lerp_(first, batch.grads, 1.0 - group["beta1"])
        torch._foreach_mul_(second, group["beta2"])
        torch._foreach_addcmul_(second, batch.grads, batch.grads, 1.0 - group["beta2"])
        mean_squares = torch._foreach_div(second, batch.corrections(group["beta2"]))
        torch._foreach_sqrt_(mean_squares)
        torch._foreach_add_(mean_squares, group["eps"])
        directions = torch._foreach_div(first, batch.corrections(group["beta1"]))
        torch._foreach_div_(directions, mean_squares)
        return list(directions)
