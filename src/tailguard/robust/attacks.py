"""The search for the worst observation within a ball: FGSM (Goodfellow et al. 2015) and PGD (Madry et al. 2018).

A perturbation is written as d = e u with the radii e of the features and u in the unit ball of the norm. So a radius per
feature, a mask (e = 0) and a grid of radii are the same thing, and projection does not depend on them. The search takes
gradients of its inputs only: no parameter's ``.grad`` is touched, no mode changed, and it has its own random numbers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tailguard.robust.config import PerturbationConfig
from tailguard.validation import require

# The adversarial objective, to be maximised: from inputs [..., D] to a number for each sample, or for each of the last axes.
Objective = Callable[[Tensor], Tensor]
# From inputs to parameters of the action distribution; and KL(first || second) of two such sets of parameters.
DistParams = Callable[[Tensor], Tensor]
Divergence = Callable[[Tensor, Tensor], Tensor]


class DifferentiableObjective(ABC):
    """An :data:`Objective` that computes its own gradient, without torch's autograd."""

    @abstractmethod
    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the objective for each sample, or for each of the last axes."""

    @abstractmethod
    def gradient(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of the summed objective in `inputs`, and the objective."""


class Perturbed(NamedTuple):
    """The result of a search.

    :param inputs: ``[..., D]``, perturbed.
    :param move: ``[..., D]``, the perturbation that was added.
    :param gain: the objective there, for each sample or sequence; None where the last point is returned without evaluation.
    """

    inputs: Tensor
    move: Tensor
    gain: Tensor | None


class StatePerturbation:
    """An adversary that perturbs observations within a ball so that an objective becomes large.

    :param config: the ball and the search.
    :param size: number of the environment's own columns, to which `perturbable` and `feature_scale` refer.
    :param extra: number of columns after them that no adversary can reach, such as the running return.
    :param generator: of the random starts; on the CPU.
    """

    def __init__(self, config: PerturbationConfig, size: int, extra: int = 0, generator: torch.Generator | None = None) -> None:
        self.config = config
        self.scale = torch.cat((_feature_scale(config, size), torch.zeros(extra, dtype=torch.float64)))
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator

    def radius(self, epsilon: float | Tensor | None = None) -> Tensor:
        """Return the radius of every feature, ``[..., D]``, in float64.

        :param epsilon: one number, or one for each sample ``[..., 1]``; None takes that of the settings.
        """
        return self.scale * (self.config.epsilon if epsilon is None else epsilon)

    def attack(self, inputs: Tensor, objective: Objective, epsilon: float | Tensor | None = None) -> Perturbed:
        """Return the worst inputs that the search finds.

        :param inputs: ``[..., D]``, clean.
        :param objective: to be maximised; gradients of parameters that it uses are not taken.
        :param epsilon: as in :meth:`radius`.
        """
        require(inputs.shape[-1] == len(self.scale), "inputs", tuple(inputs.shape), f"a shape that ends in {len(self.scale)}")
        clean = inputs.detach()
        radius = self.radius(epsilon).to(clean)
        search = self._fgsm if self.config.method == "fgsm" else self._pgd
        best = search(clean, radius, objective)
        for _ in range(self.config.restarts - 1):
            best = _better(best, search(clean, radius, objective), objective, clean, radius)
        unit, gain = best
        move = radius * unit
        return Perturbed(clean + move, move, gain)

    def random(self, inputs: Tensor, epsilon: float | Tensor | None = None) -> Perturbed:
        """Return a random perturbation: uniform in the ball (``linf``), or in a random direction (``l2``)."""
        move = self.radius(epsilon).to(inputs) * self._start(inputs.detach(), True)
        return Perturbed(inputs.detach() + move, move, None)

    def lengths(self, move: Tensor) -> Tensor:
        """Return the lengths of perturbations ``[..., D]``, in the norm of the ball."""
        return move.abs().amax(-1) if self.config.norm == "linf" else move.norm(dim=-1)

    def _start(self, clean: Tensor, random: bool) -> Tensor:
        if not random:
            return torch.zeros_like(clean)
        drawn: Tensor = (2.0 * torch.rand(clean.shape, generator=self.generator) - 1.0).to(clean)
        if self.config.norm == "linf":
            return drawn
        return self._project(drawn * (self.scale > 0.0).to(clean))

    def _pgd(self, clean: Tensor, radius: Tensor, objective: Objective) -> tuple[Tensor, Tensor | None]:
        config = self.config
        length = 2.5 / config.steps if config.step_size is None else config.step_size
        unit = self._start(clean, config.random_start)
        best, gain = unit, None
        for _ in range(config.steps):
            gradient, value = _gradient(clean, radius, unit, objective)
            if config.keep_best:
                best, gain = _keep(best, gain, unit, value)
            unit = self._project(unit + length * self._direction(gradient))
        if not config.keep_best:
            return unit, None
        with torch.no_grad():
            return _keep(best, gain, unit, objective(clean + radius * unit))

    def _fgsm(self, clean: Tensor, radius: Tensor, objective: Objective) -> tuple[Tensor, Tensor | None]:
        start = self._start(clean, self.config.random_start)
        gradient, value = _gradient(clean, radius, start, objective)
        unit = self._direction(gradient)
        if not self.config.keep_best:
            return unit, None
        with torch.no_grad():
            return _keep(start, value, unit, objective(clean + radius * unit))

    def _direction(self, gradient: Tensor) -> Tensor:
        """Return the point of the unit sphere in the direction of a gradient of any size."""
        gradient = gradient.nan_to_num(nan=0.0)  # infinities become the largest number there is
        if self.config.norm == "linf":
            return gradient.sign()
        tiny = torch.finfo(gradient.dtype).tiny
        gradient = gradient / gradient.abs().amax(-1, keepdim=True).clamp(min=tiny)  # squares cannot overflow
        length: Tensor = gradient.norm(dim=-1, keepdim=True)
        return gradient / length.clamp(min=tiny)

    def _project(self, unit: Tensor) -> Tensor:
        if self.config.norm == "linf":
            return unit.clamp(-1.0, 1.0)
        length: Tensor = unit.norm(dim=-1, keepdim=True)
        return unit / length.clamp(min=1.0)


def divergence(dist_params_of: DistParams, clean: Tensor, kl: Divergence) -> Objective:
    """Return KL(clean || perturbed) as an objective: the attack of maximal action difference (MAD, Zhang et al. 2020)."""
    target = clean.detach()
    return lambda inputs: kl(target, dist_params_of(inputs))


def low_value(value_of: Callable[[Tensor], Tensor]) -> Objective:
    """Return minus the critics' value as an objective: the critic attack (Pattanaik et al. 2018)."""
    return lambda inputs: -value_of(inputs)


def toward(dist_params_of: DistParams, log_prob: Divergence, actions: Tensor) -> Objective:
    """Return the log-probability of given actions as an objective: a targeted attack."""
    return lambda inputs: log_prob(dist_params_of(inputs), actions)


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make parameters constant for a while, so that a backward pass skips their gradients."""
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _feature_scale(config: PerturbationConfig, size: int) -> Tensor:
    scale = torch.tensor((1.0,) * size if config.feature_scale is None else config.feature_scale, dtype=torch.float64)
    require(
        len(scale) == size, "feature_scale", config.feature_scale, f"{size} numbers, one for each column of the environment"
    )
    if config.perturbable is not None:
        legal = f"columns below {size}, which are the environment's own"
        require(max(config.perturbable) < size, "perturbable", config.perturbable, legal)
        free = torch.zeros_like(scale)
        free[list(config.perturbable)] = 1.0
        scale = scale * free
    return scale


def _gradient(clean: Tensor, radius: Tensor, unit: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return the gradient of the objective in `unit`, and the objective."""
    if isinstance(objective, DifferentiableObjective):
        gradient, value = objective.gradient(clean + radius * unit)
        return gradient * radius, value
    with torch.enable_grad():
        point = (clean + radius * unit).requires_grad_()
        value = objective(point)
        (gradient,) = torch.autograd.grad(value.sum(), point)
    return gradient * radius, value.detach()


def _keep(best: Tensor, gain: Tensor | None, unit: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the better of two points, for each sample; NaN is worse than everything."""
    value = value.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if gain is None:
        return unit, value
    better = value > gain
    return torch.where(better.unsqueeze(-1), unit, best), torch.where(better, value, gain)


def _better(
    first: tuple[Tensor, Tensor | None],
    second: tuple[Tensor, Tensor | None],
    objective: Objective,
    clean: Tensor,
    radius: Tensor,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        gains = [objective(clean + radius * unit) if gain is None else gain for unit, gain in (first, second)]
    return _keep(first[0], gains[0], second[0], gains[1])
