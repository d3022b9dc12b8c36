"""Certificates by interval bound propagation (IBP, Gowal et al. 2018): intervals of all outputs for all inputs in a box.

An affine layer maps a box of centre m and radius r into the box of centre W m + b and radius |W| r; a monotone activation maps
the ends of an interval to the ends of its image. No attack can leave the result. It is loose where layers cancel each other:
a large bound proves nothing, a small one proves robustness.
"""

import torch
from torch import Tensor, nn

# Activations that increase everywhere; for any other the ends of an interval do not determine its image.
MONOTONE = (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Hardtanh, nn.Identity)


def certifiable(network: nn.Module) -> bool:
    """Return True if :func:`interval_bounds` covers a network: affine layers and monotone activations in a row."""
    layers = network if isinstance(network, nn.Sequential) else [network]
    return all(isinstance(layer, (nn.Linear, *MONOTONE)) for layer in layers)


def interval_bounds(network: nn.Module, inputs: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value that each output can take.

    :param network: a layer or an ``nn.Sequential`` of them.
    :param inputs: ``[..., D]``, centres of the boxes.
    :param radius: ``[D]`` or ``[..., D]``, at least 0; the box of an L2 ball contains it.
    :raises ValueError: for any other layer.
    """
    low, high = inputs - radius, inputs + radius
    for layer in network if isinstance(network, nn.Sequential) else [network]:
        if isinstance(layer, nn.Linear):
            centre, reach = 0.5 * (low + high), 0.5 * (high - low)
            centre, reach = layer(centre), reach @ layer.weight.abs().t()
            low, high = centre - reach, centre + reach
        elif isinstance(layer, MONOTONE):
            low, high = layer(low), layer(high)
        else:
            raise ValueError(f"no bounds for a {type(layer).__name__}; known are Linear and monotone activations")
    return low, high


def largest_move(network: nn.Module, inputs: Tensor, radius: Tensor) -> Tensor:
    """Return the largest possible change of each output, ``[..., outputs]``."""
    low, high = interval_bounds(network, inputs, radius)
    centre = network(inputs)
    return torch.maximum(high - centre, centre - low)


def gaussian_kl_bound(moves: Tensor, log_std: Tensor) -> Tensor:
    """Return the largest KL between Gaussians whose means are at most `moves` apart, ``[...]``: sum (move / sigma)^2 / 2."""
    return 0.5 * (moves * torch.exp(-log_std)).square().sum(-1)
