"""The critics: what their outputs mean, how they learn it, and how they follow a change of the scale of returns.

A critic predicts the distribution of the return in normalised units. Whatever its outputs are, the rest of the engine sees
*atoms* ``[..., M]`` with masses ``[M]`` that are the same for every state; values, advantages, targets and tails follow from
atoms and masses alone. A :class:`ReturnDistribution` turns the outputs of a network into atoms, measures how far they are from
target atoms, and rescales the last layer when the scale of returns changes (PopArt).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from typing_extensions import override

from tailguard.ppo.config import CriticConfig
from tailguard.ppo.quantiles import (
    cumulative_gaps,
    equal_mass_atoms,
    level_masses,
    quantile_huber_loss,
    tail_levels,
    uniform_levels,
)
from tailguard.validation import require


class ReturnDistribution(nn.Module, ABC):
    """A parametric family of return distributions.

    :param n_outputs: outputs of a critic's network, its parameters.
    :param masses: ``[M]``, the mass of each atom.
    """

    masses: Tensor

    def __init__(self, n_outputs: int, masses: Tensor) -> None:
        super().__init__()
        self.n_outputs = n_outputs
        self.register_buffer("masses", masses, persistent=False)

    @abstractmethod
    def atoms(self, outputs: Tensor) -> Tensor:
        """Return the atoms ``[..., M]`` of outputs ``[..., n_outputs]``."""

    @abstractmethod
    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each prediction, ``[...]``.

        :param outputs: ``[..., n_outputs]``.
        :param targets: target atoms, ``[..., M]`` of the same masses, or ``[..., 1]``.
        """

    @abstractmethod
    def rescale(self, heads: Sequence[nn.Linear], ratio: Tensor, shift: Tensor) -> None:
        """Change the last layers of all critics so that every atom a becomes ratio a + shift (PopArt)."""


class AtomReturns(ReturnDistribution):
    """A family whose loss depends on its atoms only, which is what value clipping needs.

    Its outputs are its atoms, unless a subclass overrides it.
    """

    @override
    def atoms(self, outputs: Tensor) -> Tensor:
        return outputs

    @abstractmethod
    def distance(self, atoms: Tensor, targets: Tensor) -> Tensor:
        """Return the loss ``[...]`` of atoms ``[..., M]`` against target atoms."""

    @override
    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.distance(self.atoms(outputs), targets)

    @override
    def rescale(self, heads: Sequence[nn.Linear], ratio: Tensor, shift: Tensor) -> None:
        rescale_affine(heads, ratio, shift)


class MeanReturn(AtomReturns):
    """A single number, the mean, learnt by squared loss: the critic of ordinary PPO, with SB3's meaning of ``vf_coef``."""

    def __init__(self) -> None:
        super().__init__(1, torch.ones(1))

    @override
    def distance(self, atoms: Tensor, targets: Tensor) -> Tensor:
        return (atoms - targets).squeeze(-1).square()


class QuantileReturns(AtomReturns):
    """Quantiles at fixed levels, one output each, learnt by quantile regression (QR-DQN, Dabney et al. 2018).

    :param levels: ``[N]``.
    :param kappa: of the quantile Huber loss.
    :param mean_coef: weight of the squared error of the mean, which is added to it. A quantile feels on which side of it a
        return lies, and not how far away: alone, it learns large returns that are rare as slowly as small ones.
    """

    levels: Tensor

    def __init__(self, levels: Tensor, kappa: float, mean_coef: float = 0.0) -> None:
        super().__init__(len(levels), level_masses(levels.double()).float())
        self.register_buffer("levels", levels, persistent=False)
        self.kappa, self.mean_coef = kappa, mean_coef
        self.uniform = bool(torch.allclose(levels, uniform_levels(len(levels))))

    @override
    def distance(self, atoms: Tensor, targets: Tensor) -> Tensor:
        masses = None if self.uniform or targets.shape[-1] == 1 else self.masses
        loss = quantile_huber_loss(atoms, targets, self.levels, self.kappa, masses)
        if self.mean_coef == 0.0:
            return loss
        mean = targets.squeeze(-1) if targets.shape[-1] == 1 else targets @ self.masses
        return loss + self.mean_coef * (atoms @ self.masses - mean).square()


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
    """Probabilities of a fixed support (C51, Bellemare et al. 2017); for the engine, as many atoms of equal mass.

    Probabilities cannot follow a change of scale, so the support does: predictions in raw units do not change. Only when
    returns have moved so far that the support no longer fits them is it laid out anew.

    :param n: points of the support, at least 2.
    :param reach: the support spans -reach to reach, in standard deviations of the return.
    """

    ends: Tensor

    def __init__(self, n: int, reach: float) -> None:
        super().__init__(n, torch.full((n,), 1.0 / n))
        self.reach = reach
        self.register_buffer("ends", torch.tensor([-reach, reach], dtype=torch.float64))

    def support(self) -> Tensor:
        """Return the points whose probabilities are predicted, ``[n]``."""
        low, high = self.ends.tolist()
        return torch.linspace(low, high, self.n_outputs, device=self.ends.device)

    @override
    def atoms(self, outputs: Tensor) -> Tensor:
        return equal_mass_atoms(self.support().expand_as(outputs), outputs.softmax(-1), self.n_outputs)

    @override
    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(self.project(targets) * log_softmax(outputs, -1)).sum(-1)

    def project(self, targets: Tensor) -> Tensor:
        """Return the probabilities ``[..., n]`` of equal-mass atoms ``[..., M]``, each split between two neighbours (C51)."""
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

    This is PopArt (van Hasselt et al. 2016). The optimizer's moments stay: the gradient of the quantile loss does not depend on
    the scale, so the gradient of W' is that of W. A squared loss makes it sigma / sigma' times as large, which Adam's
    m / sqrt(v) soon divides out.

    :param heads: last layers, all different, with biases.
    :param ratio: sigma / sigma', the old standard deviation over the new one.
    :param shift: (mu - mu') / sigma', the change of the mean in new units.
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


def quantile_levels(config: CriticConfig) -> Tensor:
    """Return the levels of the quantiles, ``[N]``."""
    if config.n_tail == 0:
        return uniform_levels(config.num_quantiles)
    return tail_levels(config.num_quantiles, config.tail_alpha, config.n_tail)


def build_return_distribution(config: CriticConfig) -> ReturnDistribution:
    """Return the distribution that the outputs of the critics parametrise."""
    if config.distribution == "categorical":
        return CategoricalReturns(config.num_quantiles, config.reach)
    if config.num_quantiles == 1:
        return MeanReturn()
    kind = MonotoneQuantileReturns if config.distribution == "monotone" else QuantileReturns
    with torch.device("cpu"):  # also of a policy that has shapes and no storage: levels are checked
        return kind(quantile_levels(config), config.huber_kappa, config.mean_coef)


def aggregate_values(config: CriticConfig, values: Tensor) -> Tensor:
    """Return one value from those of the critics ``[K, ...]``: their mean, or their minimum (TD3, Fujimoto et al. 2018)."""
    return values.mean(0) if config.aggregate == "mean" else values.min(0).values


def critic_errors(
    clip: float | None, return_dist: ReturnDistribution, outputs: Tensor, targets: Tensor, old_atoms: Tensor | None
) -> Tensor:
    """Return the loss of each critic's outputs ``[K, ..., n]`` against its targets ``[K, ..., M]``, as ``[K, ...]``.

    With value clipping (Schulman et al. 2017), the larger of the losses with and without it, sample by sample and critic by
    critic: a critic that has moved beyond the range is only ever pulled back. Every quantile is clipped by itself, against the
    same critic's prediction before the update.

    :param clip: how far a prediction may move, in standard deviations of the return; None does not clip.
    :param old_atoms: ``[K, ..., M]`` predicted by each critic before the update; needed to clip only.
    """
    if old_atoms is None or clip is None or not isinstance(return_dist, AtomReturns):
        return return_dist.errors(outputs, targets)
    atoms = return_dist.atoms(outputs)
    clipped = old_atoms + (atoms - old_atoms).clamp(-clip, clip)
    return torch.maximum(return_dist.distance(atoms, targets), return_dist.distance(clipped, targets))
