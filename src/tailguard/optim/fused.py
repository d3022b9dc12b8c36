"""One step of a utility-gated optimizer on float32 memory of the CPU: two or three compiled passes."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.optim import kernels
from tailguard.optim.gate import Extremes, GateScale, merged
from tailguard.optim.updates import Batch, noise_std

Array = NDArray[np.float32]


def fits(tensors: list[Tensor]) -> bool:
    """Whether the compiled passes can work on these."""
    return all(tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)


class _Arrays(NamedTuple):
    """A parameter, its gradient and its utility as flat arrays on the same memory."""

    weights: Array
    gradient: Array
    utility: Array


class Fused:
    """The same two functions as in ``updates.py``, to be called in turn.

    It holds a scratch buffer, since memory that is allocated anew in every step costs as much as a pass over it.
    """

    def __init__(self) -> None:
        self._scratch: Array = np.empty(0, np.float32)

    def update_utility(self, batch: Batch) -> Extremes:
        """As in :class:`tailguard.optim.updates.SingleTensor`."""
        beta = batch.group["beta_utility"]
        rates = rounded(beta, 1.0 - beta)
        found = []
        for i, weight in enumerate(batch.corrections(beta)):
            weights, gradient, utility = _arrays(batch, i)
            low, high = kernels.update_utility(utility, gradient, weights, *rates)
            # Rounded as the kernel rounds u / (1 - beta^t), so that the extremes are utilities that occur.
            correction = np.float32(1.0 / weight)
            found.append(Extremes(float(low * correction), float(high * correction), high))
        return merged(found)

    def move(self, batch: Batch, scale: GateScale, noise: list[Tensor] | None) -> None:
        """As in :class:`tailguard.optim.updates.SingleTensor`."""
        group = batch.group
        measure = noise is not None and group["adaptive_noise"]
        for i, weight in enumerate(batch.corrections(group["beta_utility"])):
            weights, gradient, utility = _arrays(batch, i)
            gate = (1.0 / weight, scale.centre, scale.slope, batch.keep)
            if batch.adaptive:
                direction, squares = self._adam(gradient, batch.states[i], group)
            else:
                direction, squares = gradient, kernels.sum_of_squares(gradient) if measure else 0.0
            std = 0.0 if noise is None else float(noise_std(batch.states[i], group, math.sqrt(squares / len(weights))))
            for span, factor in batch.pieces[i]:
                numbers = rounded(factor * group["lr"], *gate)
                if noise is None:
                    kernels.move(weights[span], direction[span], utility[span], *numbers)
                else:
                    own = flat_array(noise[i])[span]
                    kernels.move_with_noise(weights[span], direction[span], utility[span], own, np.float32(std), *numbers)

    def _adam(self, gradient: Array, state: dict[str, Any], group: dict[str, Any]) -> tuple[Array, float]:
        """Adam's direction and its sum of squares."""
        if len(self._scratch) < len(gradient):
            self._scratch = np.empty(len(gradient), np.float32)
        direction = self._scratch[: len(gradient)]
        beta1, beta2, step = group["beta1"], group["beta2"], state["step"]
        # first / w1 / (sqrt(second / w2) + eps) with both corrections moved out of the loop
        root = math.sqrt(1.0 - beta2**step)
        numbers = rounded(1.0 - beta1, beta2, 1.0 - beta2, root / (1.0 - beta1**step), group["eps"] * root)
        moments = flat_array(state["first_moment"]), flat_array(state["sec_moment"])
        return direction, kernels.adam_direction(direction, *moments, gradient, *numbers)


def _arrays(batch: Batch, i: int) -> _Arrays:
    return _Arrays(flat_array(batch.params[i].detach()), flat_array(batch.grads[i]), flat_array(batch.states[i]["avg_utility"]))


def flat_array(tensor: Tensor) -> Array:
    """The numbers of a contiguous tensor as one row, on the same memory."""
    array: Array = tensor.numpy()
    return array if array.ndim == 1 else array.reshape(-1)


def rounded(*numbers: float) -> list[Any]:
    """As float32: the kernels are compiled for it, and a float64 among them would slow all arithmetic down."""
    return [np.float32(number) for number in numbers]
