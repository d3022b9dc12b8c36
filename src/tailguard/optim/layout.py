"""Which tensors are watched, which head each belongs to, and whether they lie in one piece of memory.

A model may keep all its parameters, and all their gradients, as views of one flat tensor. A hundred operations on slices then
become a few on the whole; :func:`flat_memory` recognises such tensors by where they lie.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from tailguard.validation import require

Parameters = Iterable[Tensor] | Mapping[str, Iterable[Tensor]]
ALL = "all"  # the head of parameters that were given without heads


@dataclass(frozen=True)
class Heads:
    """Parameters in the order in which they were given, each in a head.

    :param names: of the heads.
    :param parameters: all P of them, the heads one after the other.
    :param head_of: ``[P]``, the head of each parameter.
    :param numel: ``[P]``, its number of elements.
    """

    names: tuple[str, ...]
    parameters: list[Tensor]
    head_of: NDArray[np.int64]
    numel: NDArray[np.int64]

    @classmethod
    def of(cls, parameters: Parameters) -> "Heads":
        """From parameters, which make one head, or from a mapping of heads to parameters."""
        given = parameters if isinstance(parameters, Mapping) else {ALL: parameters}
        heads = {name: list(members) for name, members in given.items()}
        every = list(chain.from_iterable(heads.values()))
        empty = [name for name, members in heads.items() if not members]
        require(bool(heads) and not empty, "parameters", f"empty in {empty or 'all'}", "at least one tensor in every head")
        require(len({id(one) for one in every}) == len(every), "parameters", "a tensor twice", "each tensor once, in one head")
        devices = {str(one.device) for one in every}
        require(len(devices) == 1, "the devices of the parameters", sorted(devices), "one")
        head_of = np.repeat(np.arange(len(heads)), [len(members) for members in heads.values()])
        return cls(tuple(heads), every, head_of.astype(np.int64), np.array([one.numel() for one in every], np.int64))


@dataclass(frozen=True)
class FlatMemory:
    """Tensors as slices of one.

    :param values: ``[n]``, from the first element of the first tensor to the last of the last.
    :param starts: ``[P]``, where each begins in it.
    """

    values: NDArray[np.float32]
    starts: NDArray[np.int64]


def flat_memory(tensors: Sequence[Tensor]) -> FlatMemory | None:
    """The memory that dense float32 tensors on the CPU share, or None if they do not lie in one storage."""
    first = tensors[0].untyped_storage()
    if not all(one.is_cpu and one.dtype == torch.float32 and one.is_contiguous() for one in tensors):
        return None
    if any(one.untyped_storage().data_ptr() != first.data_ptr() for one in tensors):
        return None
    offsets = np.array([one.storage_offset() for one in tensors], np.int64)
    begin, end = int(offsets.min()), max(one.storage_offset() + one.numel() for one in tensors)
    whole = torch.empty(0).set_(first, begin, (end - begin,))  # type: ignore[call-overload]
    return FlatMemory(whole.numpy(), offsets - begin)


class Owner(NamedTuple):
    """The optimizer's parameter that a weight is, or is part of; where in it the weight begins, and the number of its group."""

    param: Tensor
    start: int
    group: int

    @classmethod
    def of(cls, weight: Tensor, optimizer: Optimizer) -> "Owner":
        """Found by where the weight lies in memory."""
        begin, end = _span(weight)
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                low, high = _span(param)
                if low <= begin and end <= high:
                    return cls(param, (begin - low) // weight.element_size(), index)
        raise ValueError(f"the optimizer does not move a parameter of shape {tuple(weight.shape)} that the scaler watches")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's memory."""
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()
