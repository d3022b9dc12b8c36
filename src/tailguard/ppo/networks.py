"""The feed-forward parts, and all parameters of a model in one flat tensor."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(sizes: Sequence[int], activation: type[nn.Module], output_gain: float, orthogonal: bool = True) -> nn.Sequential:
    """A feed-forward network.

    :param sizes: input, hidden and output sizes.
    :param activation: the activation between layers.
    :param output_gain: gain of the orthogonal initialisation of the last layer.
    :param orthogonal: initialise orthogonally (the usual choice for PPO) and not as PyTorch does.
    """
    layers: list[nn.Module] = []
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        last = layer == len(sizes) - 2
        linear = nn.Linear(fan_in, fan_out)
        if orthogonal:
            nn.init.orthogonal_(linear.weight, output_gain if last else math.sqrt(2.0))
            nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, activation()]
    return nn.Sequential(*layers)


class FlatParameters:
    """All parameters of a module as one tensor, with gradients that live in one tensor too.

    The module's parameters become views of it. An optimizer over the one tensor makes one call where it made a dozen; so do
    clipping, zeroing and checking.

    ``slices`` says where each named parameter stands.

    :param module: the module; its parameters must be of one type and on one device.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        values = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.tensor = nn.Parameter(values)
        self.gradient = torch.zeros_like(values)
        self.slices: dict[str, slice] = {}
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        start = 0
        for name, parameter in module.named_parameters():
            end = start + parameter.numel()
            parameter.data = self.tensor.data[start:end].view_as(parameter)
            self.slices[name] = slice(start, end)
            self._views.append((parameter, self.gradient[start:end].view_as(parameter)))
            start = end
        self.zero_grad()

    def span(self, prefix: str) -> slice:
        """Where the parameters stand whose names begin with `prefix`; they must stand together."""
        parts = [part for name, part in self.slices.items() if name.startswith(prefix)]
        size = sum(part.stop - part.start for part in parts)
        assert parts[-1].stop - parts[0].start == size, f"parameters {prefix}* do not stand together"
        return slice(parts[0].start, parts[-1].stop)

    def zero_grad(self) -> None:
        """Set all gradients to 0, and back into their place if somebody has cleared them the usual way."""
        self.gradient.zero_()
        self.tensor.grad = self.gradient
        for parameter, view in self._views:
            parameter.grad = view


def require_same_shapes(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Refuse weights of a network that was built differently, before any is copied."""
    for name in sorted(set(given) ^ set(own)):
        raise ValueError(f"the weights do not fit this network: {name} is {'unknown' if name in given else 'missing'}")
    for name, tensor in own.items():
        if given[name].shape != tensor.shape:
            raise ValueError(
                f"the weights do not fit this network: {name} is {list(given[name].shape)}, not {list(tensor.shape)}"
            )
