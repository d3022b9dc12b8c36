"""What the outputs of a critic mean: a law of the return, in normalised units.

Whatever a critic predicts, the rest of the engine sees *atoms* ``[..., M]`` with masses ``[M]`` that are the same for every
state. Values, advantages, targets and tails follow from atoms and masses alone. A law knows how to read its atoms from the
outputs of a network, how far they are from target atoms, and how to carry the last layer over to another scale of returns.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from typing_extensions import override

from tailguard.ppo.quantiles import cumulative_gaps, equal_mass_atoms, level_masses, quantile_huber_loss, uniform_levels
from tailguard.validation import require


class ReturnDistribution(nn.Module, ABC):
    """How a critic describes the return.

    :param n_outputs: outputs of its network.
    :param masses: ``[M]``, the mass of each atom.
    """

    masses: Tensor

    def __init__(self, n_outputs: int, masses: Tensor) -> None:
        super().__init__()
        self.n_outputs = n_outputs
        self.register_buffer("masses", masses, persistent=False)

    @abstractmethod
    def atoms(self, outputs: Tensor) -> Tensor:
        """From outputs ``[..., n_outputs]`` to atoms ``[..., M]``."""

    @abstractmethod
    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each prediction, ``[...]``, against target atoms: ``[..., M]`` of the same masses, or ``[..., 1]``."""

    @abstractmethod
    def rescale(self, heads: Sequence[nn.Linear], ratio: Tensor, shift: Tensor) -> None:
        """Change the last layers of all critics so that every atom a becomes ratio a + shift."""


class AtomReturns(ReturnDistribution):
    """A law whose loss looks at its atoms only, which is what value clipping needs."""

    @abstractmethod
    def distance(self, atoms: Tensor, targets: Tensor) -> Tensor:
        """The loss of atoms ``[..., M]`` against target atoms, as ``[...]``."""

    @override
    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.distance(self.atoms(outputs), targets)


class MeanReturn(AtomReturns):
    """A single number, the mean, learnt by squared loss: the critic of ordinary PPO."""

    def __init__(self) -> None:
        super().__init__(1, torch.ones(1))

    @override
    def atoms(self, outputs: Tensor) -> Tensor:
        return outputs

    @override
    def distance(self, atoms: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (atoms - targets).squeeze(-1).square()

    @override
    def rescale(self, heads: Sequence[nn.Linear], ratio: Tensor, shift: Tensor) -> None:
        rescale_affine(heads, ratio, shift)


class QuantileReturns(AtomReturns):
    """Quantiles at fixed levels, one output each.

    :param levels: ``[N]``.
    :param kappa: of the quantile Huber loss.
    """

    levels: Tensor

    def __init__(self, levels: Tensor, kappa: float) -> None:
        super().__init__(len(levels), level_masses(levels.double()).float())
        self.register_buffer("levels", levels, persistent=False)
        self.kappa = kappa
        self.even = bool(torch.allclose(levels, uniform_levels(len(levels))))

    @override
    def atoms(self, outputs: Tensor) -> Tensor:
        return outputs

    @override
    def distance(self, atoms: Tensor, targets: Tensor) -> Tensor:
        masses = None if self.even or targets.shape[-1] == 1 else self.masses
        return quantile_huber_loss(atoms, targets, self.levels, self.kappa, masses)

    @override
    def rescale(self, heads: Sequence[nn.Linear], ratio: Tensor, shift: Tensor) -> None:
        rescale_affine(heads, ratio, shift)


class MonotoneQuantileReturns(QuantileReturns):
    """Quantiles that cannot cross: the first output is the lowest, the others are logarithms of the gaps above it."""

    @override
    def atoms(self, outputs: Tensor) -> Tensor:
        return cumulative_gaps(outputs[..., 0], outputs[..., 1:])

    @override
    def rescale(self, heads: Sequence[nn.Linear], ratio: Tensor, shift: Tensor) -> None:
        with torch.no_grad():
            for head in heads:
                bias = head.bias.double()
                bias[0] = bias[0] * ratio + shift
                bias[1:] += math.log(ratio)
                head.bias.copy_(bias)
                head.weight[0] = (head.weight[0].double() * ratio).to(head.weight)


class CategoricalReturns(ReturnDistribution):
    """Probabilities of fixed places (C51, Bellemare et al. 2017); for the engine, as many atoms of equal mass.

    Probabilities cannot follow a change of scale, so the places do: what is predicted in raw units stays as it is. Only when
    returns have moved so far that the places no longer fit them are they laid out anew.

    :param n: number of places, at least 2.
    :param reach: places span -reach to reach, in standard deviations of the return.
    """

    ends: Tensor

    def __init__(self, n: int, reach: float) -> None:
        super().__init__(n, torch.full((n,), 1.0 / n))
        self.reach = reach
        self.register_buffer("ends", torch.tensor([-reach, reach], dtype=torch.float64))

    def places(self) -> Tensor:
        """Where the probabilities stand, ``[n]``."""
        low, high = self.ends.tolist()
        return torch.linspace(low, high, self.n_outputs, device=self.ends.device)

    @override
    def atoms(self, outputs: Tensor) -> Tensor:
        return equal_mass_atoms(self.places().expand_as(outputs), outputs.softmax(-1), self.n_outputs)

    @override
    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(self.project(targets) * log_softmax(outputs, -1)).sum(-1)

    def project(self, targets: Tensor) -> Tensor:
        """Equal-mass atoms ``[..., M]`` as probabilities of the places: each is split between its two neighbours."""
        low, high = self.ends.tolist()
        place = (targets.clamp(low, high) - low) * ((self.n_outputs - 1) / (high - low))
        below = place.floor().clamp(0, self.n_outputs - 2)
        upper = (place - below) / targets.shape[-1]
        mass = targets.new_zeros(*targets.shape[:-1], self.n_outputs)
        mass.scatter_add_(-1, below.long(), 1.0 / targets.shape[-1] - upper)
        return mass.scatter_add_(-1, below.long() + 1, upper)

    @override
    def rescale(self, heads: Sequence[nn.Linear], ratio: Tensor, shift: Tensor) -> None:
        moved = self.ends * ratio + shift
        low, high = moved.tolist()
        fits = low <= -0.5 * self.reach and high >= 0.5 * self.reach and high - low <= 4.0 * self.reach
        self.ends.copy_(moved if fits else self.ends.new_tensor([-self.reach, self.reach]))


def rescale_affine(heads: Sequence[nn.Linear], ratio: Tensor, shift: Tensor) -> None:
    """Make every output v of linear layers ratio v + shift: W' = ratio W, b' = ratio b + shift.

    The optimizer's moments stay as they are: the slopes of the quantile loss do not depend on the scale, so the gradient of W'
    is that of W. A squared loss makes it s / s' times as large, which Adam's m / sqrt(v) soon divides out.

    :raises ValueError: for a layer without bias, or one that is given twice.
    """
    require(len({id(head.weight) for head in heads}) == len(heads), "heads", heads, "different layers")
    biased = all(head.bias is not None for head in heads)
    require(biased, "heads", heads, "layers with a bias, which takes up the shift of the mean")
    with torch.no_grad():
        for head in heads:
            # In float64, because the shift may be far larger than what remains of it.
            head.weight.copy_(head.weight.double() * ratio)
            head.bias.copy_(head.bias.double() * ratio + shift)
