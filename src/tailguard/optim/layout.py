"""Memory layout of parameters: which head each belongs to, one flat tensor for all, and arrays for the compiled kernels.

A model may keep all its parameters, and all their gradients, as views of one flat tensor (:class:`FlatParameters`). A hundred
operations on slices then become a few on the whole; :func:`flat_buffer` recognises such tensors by their address.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from tailguard.validation import require

Parameters = Iterable[Tensor] | Mapping[str, Iterable[Tensor]]
ALL = "all"  # the head of parameters that were given without heads


@dataclass(frozen=True)
class Heads:
    """Parameters in the order in which they were given, each in a head.

    :param names: names of the heads.
    :param parameters: all P parameters, the heads one after the other.
    :param head_of: ``[P]``, the head of each parameter.
    :param numel: ``[P]``, its number of elements.
    """

    names: tuple[str, ...]
    parameters: list[Tensor]
    head_of: NDArray[np.int64]
    numel: NDArray[np.int64]

    @classmethod
    def of(cls, parameters: Parameters) -> "Heads":
        """Build from parameters, which make one head, or from a mapping of heads to parameters."""
        by_head = parameters if isinstance(parameters, Mapping) else {ALL: parameters}
        heads = {name: list(members) for name, members in by_head.items()}
        every = list(chain.from_iterable(heads.values()))
        empty = [name for name, members in heads.items() if not members]
        require(bool(heads) and not empty, "parameters", f"empty in {empty or 'all'}", "at least one tensor in every head")
        distinct = len({id(parameter) for parameter in every})
        require(distinct == len(every), "parameters", "a tensor twice", "each tensor once, in one head")
        devices = {str(parameter.device) for parameter in every}
        require(len(devices) == 1, "the devices of the parameters", sorted(devices), "one")
        head_of = np.repeat(np.arange(len(heads)), [len(members) for members in heads.values()])
        numel = np.array([parameter.numel() for parameter in every], np.int64)
        return cls(tuple(heads), every, head_of.astype(np.int64), numel)


class FlatParameters:
    """All parameters of a module as one tensor, and all their gradients as another.

    The module's parameters become views of it. An optimizer over the one tensor makes one call instead of a dozen; so do
    clipping, zeroing and checking. ``slices`` holds the place of each named parameter. After something has put other tensors in
    the place of the parameters, such as ``load_state_dict(assign=True)``, call :meth:`attach`.

    :param module: the module; its parameters must be of one type and on one device.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        values = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.tensor = nn.Parameter(values)
        self.gradient = torch.zeros_like(values)
        self.slices: dict[str, slice] = {}
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._places: list[tuple[nn.Module, str, nn.Parameter, Tensor]] = []
        start = 0
        for name, parameter in module.named_parameters():
            end = start + parameter.numel()
            values_of = self.tensor.data[start:end].view_as(parameter)
            parameter.data = values_of
            self.slices[name] = slice(start, end)
            self._views.append((parameter, self.gradient[start:end].view_as(parameter)))
            owner, _, leaf = name.rpartition(".")
            self._places.append((module.get_submodule(owner), leaf, parameter, values_of))
            start = end
        self.zero_grad()

    def attach(self) -> None:
        """Make the parameters views of the one tensor again, with the values that they have now."""
        for owner, leaf, parameter, values in self._places:
            present = owner._parameters[leaf]
            if present is None:
                raise ValueError(f"the parameter {leaf} of {type(owner).__name__} was removed: the optimizer still moves it")
            if present is not parameter or present.data_ptr() != values.data_ptr():
                values.copy_(present.data)
                parameter.data = values
                owner._parameters[leaf] = parameter

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer over the one tensor be used as one over the parameters: zero_grad, backward, step."""
        optimizer.zero_grad = self._zero_grad_of_optimizer  # type: ignore[method-assign]

    def _zero_grad_of_optimizer(self, set_to_none: bool = True) -> None:
        self.zero_grad()

    def frozen_spans(self) -> list[slice]:
        """Return the places of the parameters without a gradient (``requires_grad=False``)."""
        pairs = zip(self._views, self.slices.values(), strict=True)
        return [span for (parameter, _), span in pairs if not parameter.requires_grad]

    def span(self, prefix: str) -> slice:
        """Return the place of the parameters whose names begin with `prefix`; they must be contiguous."""
        parts = [part for name, part in self.slices.items() if name.startswith(prefix)]
        size = sum(part.stop - part.start for part in parts)
        assert parts[-1].stop - parts[0].start == size, f"parameters {prefix}* are not contiguous"
        return slice(parts[0].start, parts[-1].stop)

    def zero_grad(self) -> None:
        """Set all gradients to 0, and make them views of :attr:`gradient` again if a caller has set them to None."""
        self.gradient.zero_()
        self.tensor.grad = self.gradient
        for parameter, view in self._views:
            parameter.grad = view if parameter.requires_grad else None


@dataclass(frozen=True)
class FlatBuffer:
    """Tensors as slices of one array.

    :param values: ``[n]``, from the first element of the first tensor to the last of the last.
    :param starts: ``[P]``, the index at which each tensor begins.
    """

    values: NDArray[np.float32]
    starts: NDArray[np.int64]


def flat_buffer(tensors: Sequence[Tensor]) -> FlatBuffer | None:
    """Return the buffer that dense float32 tensors on the CPU share, or None if they do not lie in one storage."""
    first = tensors[0].untyped_storage()
    if not kernels_apply(tensors):
        return None
    if any(tensor.untyped_storage().data_ptr() != first.data_ptr() for tensor in tensors):
        return None
    offsets = np.array([tensor.storage_offset() for tensor in tensors], np.int64)
    begin, end = int(offsets.min()), max(tensor.storage_offset() + tensor.numel() for tensor in tensors)
    whole = torch.empty(0).set_(first, begin, (end - begin,))  # type: ignore[call-overload]
    return FlatBuffer(whole.numpy(), offsets - begin)


def kernels_apply(tensors: Sequence[Tensor]) -> bool:
    """Return True if the compiled kernels can work on these tensors: contiguous float32 on the CPU."""
    return all(tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)


def flat_array(tensor: Tensor) -> NDArray[np.float32]:
    """Return a contiguous tensor as a one-dimensional array on the same memory."""
    array: NDArray[np.float32] = tensor.numpy()
    return array if array.ndim == 1 else array.reshape(-1)


def as_float32(*numbers: float) -> list[Any]:
    """Round scalars to float32: the kernels are compiled for it, and one float64 would slow all arithmetic down."""
    return [np.float32(number) for number in numbers]


class Owner(NamedTuple):
    """The optimizer's parameter that holds a weight.

    :param param: the parameter that the weight is, or is part of.
    :param start: index in it at which the weight begins.
    :param group: number of its parameter group.
    """

    param: Tensor
    start: int
    group: int

    @classmethod
    def of(cls, weight: Tensor, optimizer: Optimizer) -> "Owner":
        """Find the owner by the weight's address.

        :raises ValueError: when the optimizer does not move the weight.
        """
        begin, end = _addresses(weight)
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                low, high = _addresses(param)
                if low <= begin and end <= high:
                    return cls(param, (begin - low) // weight.element_size(), index)
        raise ValueError(f"the optimizer does not move a parameter of shape {tuple(weight.shape)} that the scaler scales")


def _addresses(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()
