"""Certificates: intervals that contain every output of a feed-forward network for all inputs in a box (IBP).

An affine layer maps a box of centre m and radius r into the box of centre W m + b and radius |W| r; a growing activation maps
the ends of an interval to the ends of its image. No attack can leave the result. It is loose where layers cancel each other,
so a large bound says nothing and a small one says everything.
"""

import torch
from torch import Tensor, nn

# Activations that grow everywhere; for any other the ends of an interval do not tell its image.
GROWING = (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Hardtanh, nn.Identity)


def certifiable(network: nn.Module) -> bool:
    """Whether :func:`interval_bounds` understands a network: affine layers and growing activations, one after the other."""
    layers = network if isinstance(network, nn.Sequential) else [network]
    return all(isinstance(layer, (nn.Linear, *GROWING)) for layer in layers)


def interval_bounds(network: nn.Module, inputs: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest that each output can become.

    :param network: a layer or an ``nn.Sequential`` of them.
    :param inputs: ``[..., D]``, centres of the boxes.
    :param radius: ``[D]`` or ``[..., D]``, at least 0; the box of an L2 ball contains it.
    :raises ValueError: for a layer that is not understood.
    """
    low, high = inputs - radius, inputs + radius
    for layer in network if isinstance(network, nn.Sequential) else [network]:
        if isinstance(layer, nn.Linear):
            centre, reach = 0.5 * (low + high), 0.5 * (high - low)
            centre, reach = layer(centre), reach @ layer.weight.abs().t()
            low, high = centre - reach, centre + reach
        elif isinstance(layer, GROWING):
            low, high = layer(low), layer(high)
        else:
            raise ValueError(f"no bounds for a {type(layer).__name__}; known are Linear and growing activations")
    return low, high


def largest_move(network: nn.Module, inputs: Tensor, radius: Tensor) -> Tensor:
    """How far each output can be moved at most, ``[..., outputs]``."""
    low, high = interval_bounds(network, inputs, radius)
    centre = network(inputs)
    return torch.maximum(high - centre, centre - low)


def gaussian_kl_bound(moves: Tensor, log_std: Tensor) -> Tensor:
    """The largest KL between Gaussians whose means are at most `moves` apart, ``[...]``: sum (move / sigma)^2 / 2."""
    return 0.5 * (moves * torch.exp(-log_std)).square().sum(-1)
