"""The feed-forward parts: several small networks side by side, and all parameters of a model in one flat tensor."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn


class ParallelMlp(nn.Module):
    """K networks of the same shape on the same input, with nothing shared; one matrix product per layer serves all.

    :param n: number of networks K.
    :param sizes: input, hidden and output sizes.
    :param activation: the activation between layers.
    :param output_gain: gain of the orthogonal initialisation of the last layer.
    :param orthogonal: initialise orthogonally (the usual choice for PPO) and not as PyTorch does.
    """

    def __init__(
        self, n: int, sizes: Sequence[int], activation: type[nn.Module], output_gain: float, orthogonal: bool = True
    ) -> None:
        super().__init__()
        self.activation = activation()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            weight, bias = torch.empty(n, fan_out, fan_in), torch.zeros(n, fan_out)
            gain = output_gain if layer == len(sizes) - 2 else math.sqrt(2.0)
            for one in weight:  # a draw of its own for each network: identical twins would stay identical for ever
                if orthogonal:
                    nn.init.orthogonal_(one, gain)
                else:
                    nn.init.kaiming_uniform_(one, a=math.sqrt(5.0))
            if not orthogonal:
                nn.init.uniform_(bias, -1.0 / math.sqrt(fan_in), 1.0 / math.sqrt(fan_in))
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(bias))

    @property
    def output_layer(self) -> "AffineLayer":
        """The last layers of all networks together."""
        return AffineLayer(self.weights[-1], self.biases[-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """From ``[M, D]`` to ``[K, M, O]``."""
        n, width, _ = self.weights[0].shape
        # The first layers read the same input, so they are one wide layer.
        wide = nn.functional.linear(inputs, self.weights[0].flatten(0, 1), self.biases[0].flatten())
        outputs = wide.view(-1, n, width).transpose(0, 1)
        for weight, bias in zip(list(self.weights)[1:], list(self.biases)[1:], strict=True):
            outputs = torch.baddbmm(bias.unsqueeze(1), self.activation(outputs), weight.transpose(1, 2))
        return outputs


class AffineLayer(NamedTuple):
    """The weight and the bias of a layer, for those who change them from outside."""

    weight: Tensor
    bias: Tensor


class FlatParameters:
    """All parameters of a module as one tensor, with gradients that live in one tensor too.

    The module's parameters become views of it. An optimizer over the one tensor makes one call where it made a dozen; so do
    clipping, zeroing and checking.

    :param module: the module; its parameters must be of one type and on one device.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        values = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.tensor = nn.Parameter(values)
        self.gradient = torch.zeros_like(values)
        self.tensor.grad = self.gradient
        self.slices: dict[str, slice] = {}
        start = 0
        for name, parameter in module.named_parameters():
            end = start + parameter.numel()
            parameter.data = self.tensor.data[start:end].view_as(parameter)
            parameter.grad = self.gradient[start:end].view_as(parameter)
            self.slices[name] = slice(start, end)
            start = end
