"""How a weight's utility becomes its protection, and the protection a factor of its step.

The utility of a weight is the running mean of u = -gradient * weight: the first-order estimate of how much the loss would rise
if the weight were 0 (Elsayed and Mahmood 2024). Every gate here has the form

    s = sigmoid(2 x),   x = (u^ - centre) * slope,   step = 2 (1 - s) * the ungated step,

with u^ the utility after bias correction. The factor 2 makes s = 1/2 the ungated optimizer. Since 2 (1 - sigmoid(2 x)) is
1 - tanh(x), a gate is two numbers and one tanh.

``minmax``: x runs from -1/2 for the least to 1/2 for the most useful weight of all parameters, so s from 0.269 to 0.731. The
extremes are taken after the same bias correction as the utilities, so the first steps are gated like all others. The seeds'
additive epsilon of 1e-8 is relative here: utilities of 1e-12 are gated like utilities of 1. Equal utilities give s = 1/2.

``reference``: the authors' published code, s = sigmoid(u^ / M) with M the largest utility *before* bias correction. In the
first steps its argument is up to 1 / (1 - beta) times too large, and useful weights stand still. Where no utility is above 0
the published code divides by 0 or turns the order round; here s = 1/2.

``none``: s = 1/2 everywhere, for comparisons.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Gate = Literal["minmax", "reference", "none"]

Scalar = Any  # a number or a tensor without dimensions; the formulas below hold for both

RELATIVE_EPS = 1e-8
TINY = 1.2e-38  # the smallest normal float32: keeps 0 / 0 from being NaN


class Extremes(NamedTuple):
    """The range of utilities over some parameters.

    ``low`` and ``high`` are bias-corrected, ``raw_high`` is not.
    """

    low: Scalar
    high: Scalar
    raw_high: Scalar


def merged(several: Sequence[Extremes]) -> Extremes:
    """The extremes of all of them together."""
    lows, highs, raw_highs = zip(*several, strict=True)
    if isinstance(lows[0], Tensor):
        return Extremes(torch.stack(lows).min(), torch.stack(highs).max(), torch.stack(raw_highs).max())
    return Extremes(min(lows), max(highs), max(raw_highs))


class GateScale(NamedTuple):
    """What turns a bias-corrected utility u into x = (u - centre) * slope."""

    centre: Scalar
    slope: Scalar


def gate_scale(gate: Gate, extremes: Extremes) -> GateScale:
    """The centre and the slope of a gate.

    :param gate: which gate.
    :param extremes: of all parameters together. Tensors stay tensors: nothing waits for the device.
    """
    if gate == "none":
        return GateScale(0.0, 0.0)
    low, high, raw_high = extremes
    if gate == "reference":
        return GateScale(0.0, (raw_high > 0.0) / (2.0 * raw_high + TINY))
    # A range of 0 must give a slope of 0, not one that magnifies the rounding of u - centre.
    spread = high - low + RELATIVE_EPS * (abs(low) + abs(high)) + TINY
    return GateScale((low + high) / 2.0, (high > low) / spread)


def step_share(corrected_utility: Tensor, scale: GateScale) -> Tensor:
    """The factor 2 (1 - s) of a step, from 0 (stands still) to 2."""
    return 1.0 - torch.tanh((corrected_utility - scale.centre) * scale.slope)


def protection(corrected_utility: Tensor, scale: GateScale) -> Tensor:
    """The protection s in [0, 1]; 1/2 leaves the step as it is."""
    return 1.0 - step_share(corrected_utility, scale) / 2.0
