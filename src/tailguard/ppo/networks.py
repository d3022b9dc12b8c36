"""Feed-forward networks, and all parameters of a module as one flat tensor."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tailguard.ppo.config import LayersConfig, NetworkConfig

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
}


def network_kwargs(config: NetworkConfig) -> dict[str, Any]:
    """Return the settings as the ``policy_kwargs`` of :class:`DistributionalPolicy`."""
    kwargs = config.model_dump(exclude={"net_arch", "activation_fn"})
    layers = config.net_arch
    if isinstance(layers, LayersConfig):
        kwargs["net_arch"] = {"pi": list(layers.pi), "vf": list(layers.vf)}
    else:
        kwargs["net_arch"] = None if layers is None else list(layers)
    return kwargs | {"activation_fn": ACTIVATIONS[config.activation_fn]}


def mlp(sizes: Sequence[int], activation: type[nn.Module], output_gain: float, orthogonal: bool = True) -> nn.Sequential:
    """Return a feed-forward network.

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
    """All parameters of a module as one tensor, and all their gradients as another.

    The module's parameters become views of it. An optimizer over the one tensor makes one call instead of a dozen; so do
    clipping, zeroing and checking. ``slices`` holds the place of each named parameter.

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
            parameter.grad = view


def require_same_shapes(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise if weights belong to a network that was built differently, before any is copied."""
    for name in sorted(set(given) ^ set(own)):
        raise ValueError(f"the weights do not fit this network: {name} is {'unknown' if name in given else 'missing'}")
    for name, tensor in own.items():
        if given[name].shape != tensor.shape:
            raise ValueError(
                f"the weights do not fit this network: {name} is {list(given[name].shape)}, not {list(tensor.shape)}"
            )
