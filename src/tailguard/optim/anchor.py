"""Make the steps of any optimizer of others shorter by a factor, head by head, without touching its gradients or its state.

Before the step remember where the weights are, after it go back part of the way:

    anchor = weight before the step,    weight <- anchor + f * (weight - anchor).

That the step is f times as long holds by construction: for Adam, whose step does not change when its gradients are scaled; for
several heads in one flat parameter, which have one learning rate; with momentum, fused kernels, anything. Decoupled weight
decay is not a step along the gradient and stays whole: where an optimizer first multiplies the weight by 1 - lr * weight_decay,
the anchor is the weight after that.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import AdamW, Optimizer

from tailguard.optim import kernels
from tailguard.optim.layout import Heads, Owner, flat_memory


class Segment(NamedTuple):
    """Neighbouring weights with the same head and owner, as a range of flat memory."""

    start: int
    end: int
    head: int
    owner: Owner


class Anchor:
    """Where the weights of an optimizer were before its step.

    :param heads: the weights. The optimizer must own their memory: the same tensors, or a flat tensor that they are views of.
    :param optimizer: its groups tell how much the weights decay.
    """

    def __init__(self, heads: Heads, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._decouples = isinstance(optimizer, AdamW)
        self._factors: list[float] | None = None
        self._weights = [one.detach() for one in heads.parameters]
        self._owners = [Owner.of(weight, optimizer) for weight in self._weights]
        self._head_of: list[int] = heads.head_of.tolist()
        self._flat = flat_memory(self._weights)
        if self._flat is None:
            self._anchors = [torch.empty_like(weight) for weight in self._weights]
        else:
            segments = self._segments(self._flat.starts.tolist(), heads.numel.tolist())
            self._starts = np.array([one.start for one in segments], np.int64)
            self._ends = np.array([one.end for one in segments], np.int64)
            self._owners, self._head_of = [one.owner for one in segments], [one.head for one in segments]
            self._anchor = np.empty_like(self._flat.values)
            self._numbers = np.empty((2, len(segments)), np.float32)

    def put(self, factors: list[float] | None) -> None:
        """Let the next step have these lengths; None leaves it whole.

        :param factors: one per head, in [0, 1].
        """
        self._factors = factors

    def before(self) -> None:
        """To be called before the step: remembers where the weights are."""
        if self._flat is not None:
            np.copyto(self._anchor, self._flat.values)
        else:
            torch._foreach_copy_(self._anchors, self._weights)

    def after(self) -> None:
        """To be called after the step: goes back part of the way."""
        if self._factors is None:
            return
        keep_of = [self._keep(group) for group in self._optimizer.param_groups]
        # What had no gradient was not moved, and has not decayed either.
        keep = [1.0 if owner.param.grad is None else keep_of[owner.group] for owner in self._owners]
        each = [self._factors[head] for head in self._head_of]
        if self._flat is not None:
            self._numbers[:] = keep, each
            kernels.shorten(self._flat.values, self._anchor, self._starts, self._ends, self._numbers)
        else:
            torch._foreach_mul_(self._anchors, keep)
            torch._foreach_sub_(self._weights, self._anchors)
            torch._foreach_mul_(self._weights, each)
            torch._foreach_add_(self._weights, self._anchors)

    def _keep(self, group: dict[str, Any]) -> float:
        """What decoupled decay leaves of a weight in one step."""
        if not group.get("decoupled_weight_decay", self._decouples):
            return 1.0
        return 1.0 - float(group["lr"]) * float(group["weight_decay"])

    def _segments(self, starts: list[int], lengths: list[int]) -> list[Segment]:
        segments: list[Segment] = []
        for k in sorted(range(len(starts)), key=lambda k: starts[k]):
            one = Segment(starts[k], starts[k] + lengths[k], self._head_of[k], self._owners[k])
            last = segments[-1] if segments else None
            if last is not None and (last.end, last.head, last.owner.param is one.owner.param) == (one.start, one.head, True):
                segments[-1] = last._replace(end=one.end)
            else:
                segments.append(one)
        return segments
