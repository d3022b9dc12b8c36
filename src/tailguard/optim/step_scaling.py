"""Scaling an optimizer's step by one factor per head: per-range step scaling, and its fallback for any optimizer.

Several heads may share one flat parameter, which has one learning rate. An optimizer of this project
(:class:`RangeScaledOptimizer`) is told the ranges of elements and the factor of each, and scales each range's step as it
computes it: no pass over the weights is added (:class:`RangeStepScaling`).

For any other optimizer (:class:`FallbackStepScaling`) the weights are saved before the step and the step is scaled after it:

    saved = weight before the step,    weight <- saved + f * (weight - saved).

The step is then f times as long by construction: for Adam, whose step does not change when its gradients are scaled; for
several heads in one flat parameter; with momentum, fused kernels, anything. Neither gradients nor optimizer state are touched.

Decoupled weight decay is not a step along the gradient and is never scaled: where an optimizer first multiplies the weight by
1 - lr * weight_decay, `saved` is the weight after that.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from tailguard.optim import kernels
from tailguard.optim.layout import Heads, Owner, flat_buffer

# ---------------------------------------------------------------------------------------------------- per-range step scaling


class ScaledRange(NamedTuple):
    """A range of a parameter's flattened elements, and the factor of its step."""

    span: slice
    factor: float


WHOLE = (ScaledRange(slice(None), 1.0),)


class RangeScaledOptimizer(Optimizer):
    """An optimizer whose steps can be scaled range by range. Decoupled weight decay is not scaled.

    :attr:`scaled_ranges` holds, for each parameter whose steps are scaled, ranges that cover it once. The step of any other is
    that of :data:`WHOLE`.
    """

    scaled_ranges: Mapping[Tensor, Sequence[ScaledRange]] = {}


class HeadRange(NamedTuple):
    """Neighbouring elements of a parameter with the same head; None where they belong to no head."""

    start: int
    end: int
    head: int | None


class RangeStepScaling:
    """Tells a :class:`RangeScaledOptimizer` the factors of its next step.

    :param heads: the weights. The optimizer must own their memory: the same tensors, or a flat tensor that they are views of.
    :param optimizer: moves them.
    """

    def __init__(self, heads: Heads, optimizer: RangeScaledOptimizer) -> None:
        self._optimizer = optimizer
        owned: dict[Tensor, list[HeadRange]] = {}
        for weight, head in zip(heads.parameters, heads.head_of.tolist(), strict=True):
            owner = Owner.of(weight, optimizer)
            owned.setdefault(owner.param, []).append(HeadRange(owner.start, owner.start + weight.numel(), head))
        self._ranges = {param: _covering(ranges, param.numel()) for param, ranges in owned.items()}

    def set_factors(self, factors: list[float] | None) -> None:
        """Set the factors of the next step; None does not scale it.

        :param factors: one per head, in [0, 1].
        """
        if factors is None:
            self._optimizer.scaled_ranges = {}
            return
        factors = [*factors, 1.0]  # the last for elements without a head
        self._optimizer.scaled_ranges = {
            param: [ScaledRange(slice(start, end), factors[-1 if head is None else head]) for start, end, head in ranges]
            for param, ranges in self._ranges.items()
        }

    def before_step(self) -> None:
        """Do nothing: the optimizer scales its own step."""

    def after_step(self) -> None:
        """Do nothing: the optimizer has scaled its own step."""


def _covering(ranges: list[HeadRange], numel: int) -> list[HeadRange]:
    """Return the ranges in order, neighbours of the same head merged, with the gaps between them as ranges without a head."""
    covering: list[HeadRange] = []
    end = 0
    for head_range in (*sorted(ranges), HeadRange(numel, numel, None)):
        if head_range.start > end:
            covering.append(HeadRange(end, head_range.start, None))
        if covering and covering[-1].head == head_range.head and head_range.head is not None:
            covering[-1] = covering[-1]._replace(end=head_range.end)
        elif head_range.end > head_range.start:
            covering.append(head_range)
        end = head_range.end
    return covering


# ------------------------------------------------------------------------------------------------------------- the fallback


class Segment(NamedTuple):
    """Neighbouring weights with the same head and owner, as a range of a flat buffer."""

    start: int
    end: int
    head: int
    owner: Owner


class FallbackStepScaling:
    """Scales the step of any optimizer after it has moved the weights.

    :param heads: the weights. The optimizer must own their memory: the same tensors, or a flat tensor that they are views of.
    :param optimizer: its groups hold the weight decay.
    """

    def __init__(self, heads: Heads, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._decouples = isinstance(optimizer, AdamW)
        self._factors: list[float] | None = None
        self._weights = [parameter.detach() for parameter in heads.parameters]
        self._owners = [Owner.of(weight, optimizer) for weight in self._weights]
        self._head_of: list[int] = heads.head_of.tolist()
        self._flat = flat_buffer(self._weights)
        if self._flat is None:
            self._saved = [torch.empty_like(weight) for weight in self._weights]
        else:
            segments = self._segments(self._flat.starts.tolist(), heads.numel.tolist())
            self._starts = np.array([segment.start for segment in segments], np.int64)
            self._ends = np.array([segment.end for segment in segments], np.int64)
            self._owners = [segment.owner for segment in segments]
            self._head_of = [segment.head for segment in segments]
            self._saved_flat = np.empty_like(self._flat.values)
            self._keep_and_factor = np.empty((2, len(segments)), np.float32)

    def set_factors(self, factors: list[float] | None) -> None:
        """Set the factors of the next step; None does not scale it.

        :param factors: one per head, in [0, 1].
        """
        self._factors = factors

    def before_step(self) -> None:
        """Save the weights."""
        if self._flat is not None:
            np.copyto(self._saved_flat, self._flat.values)
        else:
            torch._foreach_copy_(self._saved, self._weights)

    def after_step(self) -> None:
        """Scale the step that the optimizer has made."""
        if self._factors is None:
            return
        keep_of = [self._keep(group) for group in self._optimizer.param_groups]
        # A parameter without a gradient was not moved, and has not decayed either.
        keep = [1.0 if owner.param.grad is None else keep_of[owner.group] for owner in self._owners]
        each = [self._factors[head] for head in self._head_of]
        if self._flat is not None:
            self._keep_and_factor[:] = keep, each
            kernels.scale_steps(self._flat.values, self._saved_flat, self._starts, self._ends, self._keep_and_factor)
        else:
            torch._foreach_mul_(self._saved, keep)
            torch._foreach_sub_(self._weights, self._saved)
            torch._foreach_mul_(self._weights, each)
            torch._foreach_add_(self._weights, self._saved)

    def _keep(self, group: dict[str, Any]) -> float:
        """Return the share of a weight that decoupled decay leaves in one step."""
        if not group.get("decoupled_weight_decay", self._decouples):
            return 1.0
        return 1.0 - float(group["lr"]) * float(group["weight_decay"])

    def _segments(self, starts: list[int], lengths: list[int]) -> list[Segment]:
        segments: list[Segment] = []
        for k in sorted(range(len(starts)), key=lambda k: starts[k]):
            new = Segment(starts[k], starts[k] + lengths[k], self._head_of[k], self._owners[k])
            last = segments[-1] if segments else None
            if last is not None and (last.end, last.head, last.owner.param is new.owner.param) == (new.start, new.head, True):
                segments[-1] = last._replace(end=new.end)
            else:
                segments.append(new)
        return segments
