"""Action distributions in closed form: samples, log-probabilities, entropy and KL from distribution parameters.

A distribution here is stateless: its parameters, which the policy head predicts, are passed to every method. So those of a
whole rollout can be stored as one tensor and compared with new ones later. The stored action is always the one whose
log-probability is stored; :meth:`ActionDistribution.to_env` derives from it what the environment gets.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray
from stable_baselines3.common import distributions
from torch import Tensor
from torch.nn.functional import log_softmax, softplus
from torch.special import log_ndtr
from typing_extensions import override

# Bounds of a state-dependent log standard deviation: e^-5 to e^2 of the action's unit.
LOG_STD_LIMITS = (-5.0, 2.0)
HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
# The logit of an action that is masked out: its probability is exactly 0, and unlike infinity it makes no NaN.
MASKED = -1e8


class ActionDistribution(ABC):
    """A family of action distributions.

    :param n_params: parameters of one distribution, the outputs of the policy head.
    :param action_shape: shape of a stored action.
    """

    n_params: int
    action_shape: tuple[int, ...]

    def sample(self, dist_params: Tensor) -> Tensor:
        """Draw one action for each row of parameters."""
        return self.draw(dist_params, self.noise(dist_params))

    @abstractmethod
    def noise(self, dist_params: Tensor) -> Tensor:
        """Draw the noise that :meth:`draw` needs, for a whole rollout at once: only the shape of the parameters matters."""

    @abstractmethod
    def draw(self, dist_params: Tensor, noise: Tensor) -> Tensor:
        """Return the action of each row of parameters and noise (the reparametrised sample)."""

    @abstractmethod
    def mode(self, dist_params: Tensor) -> Tensor:
        """Return the most likely action of each row."""

    @abstractmethod
    def log_prob(self, dist_params: Tensor, actions: Tensor) -> Tensor:
        """Return the log-probability (density) of actions."""

    @abstractmethod
    def entropy(self, dist_params: Tensor) -> Tensor:
        """Return the entropy in nats; that of the Gaussian before squashing, since there is no closed form after it."""

    @abstractmethod
    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Return KL(old || new), differentiable in both."""

    def surprise(self, old: Tensor, new: Tensor) -> Tensor:
        """Return how unlikely `new` makes the mode of `old`, an adversarial objective, differentiable in `new`.

        For normal distributions of equal standard deviation this is their KL.
        """
        return self.kl(old, new)

    def sharp_kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Return KL(old || new), accurate, with its gradient in `new`, even where both are all but deterministic."""
        return self.kl(old, new)

    @abstractmethod
    def to_env(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return stored actions in the form of the action space."""

    @abstractmethod
    def to_sb3(self, dist_params: Tensor) -> distributions.Distribution:
        """Return the distribution as an object of SB3's, for code that asks a policy for one."""


class Gaussian(ActionDistribution):
    """Independent normal components; the parameters are means and log standard deviations, ``[..., 2 A]``.

    :param space: the action space.
    :param squash: map samples through tanh onto the box instead of clipping them to it.
    """

    def __init__(self, space: spaces.Box, squash: bool) -> None:
        self.low, self.high = space.low, space.high
        self.squash = squash
        self.action_shape = space.shape
        self.size = math.prod(space.shape)
        self.n_params = 2 * self.size
        # Ends of the box beyond which all draws are one action (CensoredGaussian): none here.
        self.edges = np.repeat([[-np.inf], [np.inf]], self.size, axis=1)
        if squash:
            _require_bounded("squash", space)

    @override
    def noise(self, dist_params: Tensor) -> Tensor:
        return torch.randn_like(dist_params[..., : self.size])

    @override
    def draw(self, dist_params: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = dist_params.chunk(2, dim=-1)
        return torch.addcmul(mean, log_std.exp(), noise)

    @override
    def mode(self, dist_params: Tensor) -> Tensor:
        return dist_params[..., : self.size]

    @override
    def log_prob(self, dist_params: Tensor, actions: Tensor) -> Tensor:
        mean, log_std = dist_params.chunk(2, dim=-1)
        standard = (actions - mean) * torch.exp(-log_std)
        density = (-0.5 * standard.square() - log_std).sum(-1) - self.size * HALF_LOG_TAU
        if self.squash:  # log |d tanh(u) / du| = 2 (log 2 - u - softplus(-2 u)), stable for any u
            density = density - (2.0 * (math.log(2.0) - actions - softplus(-2.0 * actions))).sum(-1)
        return density

    @override
    def entropy(self, dist_params: Tensor) -> Tensor:
        return dist_params[..., self.size :].sum(-1) + self.size * (HALF_LOG_TAU + 0.5)

    @override
    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        old_mean, old_log_std = old.chunk(2, dim=-1)
        new_mean, new_log_std = new.chunk(2, dim=-1)
        log_ratio = old_log_std - new_log_std
        moved = (old_mean - new_mean).square() * torch.exp(-2.0 * new_log_std)
        return (0.5 * (torch.exp(2.0 * log_ratio) + moved - 1.0) - log_ratio).sum(-1)

    @override
    def to_env(self, actions: NDArray[Any]) -> NDArray[Any]:
        shaped = actions.reshape(-1, *self.action_shape)
        if self.squash:
            shaped = self.low + 0.5 * (np.tanh(shaped) + 1.0) * (self.high - self.low)
        # Not np.clip, which takes several times as long for as few numbers as there are environments.
        return np.asarray(np.minimum(np.maximum(shaped, self.low), self.high), dtype=self.low.dtype)

    @override
    def to_sb3(self, dist_params: Tensor) -> distributions.Distribution:
        mean, log_std = dist_params.chunk(2, dim=-1)
        kind = distributions.SquashedDiagGaussianDistribution if self.squash else distributions.DiagGaussianDistribution
        return kind(self.size).proba_distribution(mean, log_std)


class CensoredGaussian(Gaussian):
    """A Gaussian censored at the ends of the box: a draw beyond an end counts as that end, which is what the environment gets.

    An end has the probability of all draws beyond it; inside there is a density. The expected policy gradient is the same, with
    less variance (clipped action policy gradient, Fujita and Maeda 2018): where all draws are the same action, which of them it
    was carries no information. Entropy and KL are those of the censored distribution, too.

    :param space: the action space, bounded.
    """

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space, squash=False)
        _require_bounded("censored", space)
        self.edges = np.stack((space.low.reshape(-1), space.high.reshape(-1))).astype(np.float64)

    @override
    def log_prob(self, dist_params: Tensor, actions: Tensor) -> Tensor:
        mean, log_std = dist_params.chunk(2, dim=-1)
        inverse, (low, high) = torch.exp(-log_std), self._ends(dist_params)
        inside = -0.5 * ((actions - mean) * inverse).square() - log_std - HALF_LOG_TAU
        above, below = log_ndtr((mean - high) * inverse), log_ndtr((low - mean) * inverse)
        return torch.where(actions >= high, above, torch.where(actions <= low, below, inside)).sum(-1)

    @override
    def entropy(self, dist_params: Tensor) -> Tensor:
        log_std = dist_params.chunk(2, dim=-1)[1]
        log_low, log_high, mass, _, square = self._moments(dist_params)
        ends = log_low.exp() * log_low + log_high.exp() * log_high
        return ((log_std + HALF_LOG_TAU) * mass + 0.5 * square - ends).sum(-1)

    @override
    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        (mean, log_std), (new_mean, new_log_std) = old.chunk(2, dim=-1), new.chunk(2, dim=-1)
        log_low, log_high, mass, first, square = self._moments(old)
        new_low, new_high = self._moments(new)[:2]
        ends = log_low.exp() * (log_low - new_low) + log_high.exp() * (log_high - new_high)
        std, moved = log_std.exp(), mean - new_mean
        distance = std.square() * square + 2.0 * std * moved * first + moved.square() * mass  # E (x - new mean)^2, inside
        inside = (new_log_std - log_std) * mass + 0.5 * (distance * torch.exp(-2.0 * new_log_std) - square)
        return (ends + inside).sum(-1)

    @override
    def surprise(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the KL of the uncensored Gaussians: beyond the same end the censored KL is 0, without a gradient."""
        return super().kl(old, new)

    @override
    def sharp_kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the KL of the uncensored Gaussians, as :meth:`surprise`."""
        return super().kl(old, new)

    def _ends(self, dist_params: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.from_numpy(self.edges).to(dist_params)
        return low, high

    def _moments(self, dist_params: Tensor) -> tuple[Tensor, ...]:
        """Return log-probabilities of both ends, and the integrals of 1, t and t^2 between them for a standard normal t."""
        mean, log_std = dist_params.chunk(2, dim=-1)
        low, high = ((end - mean) * torch.exp(-log_std) for end in self._ends(dist_params))
        log_low, log_high = log_ndtr(low), log_ndtr(-high)
        mass = 1.0 - log_low.exp() - log_high.exp()
        at_low, at_high = (torch.exp(-0.5 * end.square() - HALF_LOG_TAU) for end in (low, high))
        return log_low, log_high, mass, at_low - at_high, mass - (high * at_high - low * at_low)


class Categorical(ActionDistribution):
    """One or several independent choices; the parameters are all their logits side by side.

    :param counts: number of alternatives of each choice.
    :param single: the action is one integer (Discrete) and not a vector of them.
    :param start: the smallest value of each choice in the environment; here they count from 0.
    """

    def __init__(self, counts: list[int], single: bool, start: NDArray[Any]) -> None:
        self.counts, self.single, self.start = counts, single, start
        self.n_params = sum(counts)
        self.action_shape = (len(counts),)

    def masked(self, dist_params: Tensor, masks: NDArray[np.bool_]) -> Tensor:
        """Return the parameters without the actions that are masked out.

        Stored with the actions they also say what was masked: loss.py masks the new logits where the old ones are.

        :param dist_params: ``[B, n_params]``.
        :param masks: ``[B, n_params]``, false for actions that are not possible now; those of several choices side by side.
        :raises ValueError: if the shape is another one, or if nothing is left to choose from.
        """
        if masks.shape != tuple(dist_params.shape):
            raise ValueError(f"action masks must have the shape {tuple(dist_params.shape)}, got {masks.shape}")
        possible = np.stack([choice.any(-1) for choice in np.split(masks, np.cumsum(self.counts)[:-1], axis=-1)], axis=-1)
        if not possible.all():
            env, choice = np.argwhere(~possible)[0]
            raise ValueError(f"the action masks of env {env} leave nothing to choose from (choice {choice}): allow one action")
        return dist_params.masked_fill(torch.from_numpy(~masks).to(dist_params.device), MASKED)

    @override
    def noise(self, dist_params: Tensor) -> Tensor:
        return torch.empty_like(dist_params).exponential_().log()

    @override
    def draw(self, dist_params: Tensor, noise: Tensor) -> Tensor:
        # Gumbel-max trick: the argmax of logits plus Gumbel noise is a draw from their softmax.
        return self.mode(dist_params - noise)

    @override
    def mode(self, dist_params: Tensor) -> Tensor:
        return torch.stack([logits.argmax(-1) for logits in dist_params.split(self.counts, dim=-1)], dim=-1).float()

    @override
    def log_prob(self, dist_params: Tensor, actions: Tensor) -> Tensor:
        chosen = actions.long()
        parts = [
            log_softmax(logits, -1).gather(-1, chosen[..., i : i + 1]).squeeze(-1)
            for i, logits in enumerate(dist_params.split(self.counts, dim=-1))
        ]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    @override
    def entropy(self, dist_params: Tensor) -> Tensor:
        return -torch.stack([(log_p.exp() * log_p).sum(-1) for log_p in self._log_probs(dist_params)]).sum(0)

    @override
    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        pairs = zip(self._log_probs(old), self._log_probs(new), strict=True)
        return torch.stack([(log_p.exp() * (log_p - log_q)).sum(-1) for log_p, log_q in pairs]).sum(0)

    @override
    def surprise(self, old: Tensor, new: Tensor) -> Tensor:
        chosen = zip(old.split(self.counts, dim=-1), new.split(self.counts, dim=-1), strict=True)
        parts = [-_sharp_log_softmax(q).gather(-1, p.argmax(-1, keepdim=True)).squeeze(-1) for p, q in chosen]
        return torch.stack(parts).sum(0)

    @override
    def sharp_kl(self, old: Tensor, new: Tensor) -> Tensor:
        pairs = zip(old.split(self.counts, dim=-1), new.split(self.counts, dim=-1), strict=True)
        logs = [(_sharp_log_softmax(p), _sharp_log_softmax(q)) for p, q in pairs]
        return torch.stack([(log_p.exp() * (log_p - log_q)).sum(-1) for log_p, log_q in logs]).sum(0)

    @override
    def to_env(self, actions: NDArray[Any]) -> NDArray[Any]:
        chosen = actions.astype(np.int64) + self.start
        return np.asarray(chosen[:, 0] if self.single else chosen)

    @override
    def to_sb3(self, dist_params: Tensor) -> distributions.Distribution:
        if self.single:
            return distributions.CategoricalDistribution(self.counts[0]).proba_distribution(dist_params)
        return distributions.MultiCategoricalDistribution(self.counts).proba_distribution(dist_params)

    def _log_probs(self, dist_params: Tensor) -> list[Tensor]:
        return [log_softmax(logits, -1) for logits in dist_params.split(self.counts, dim=-1)]


def masked(action_dist: ActionDistribution, dist_params: Tensor, masks: ArrayLike | None) -> Tensor:
    """Return the parameters without the actions that are masked out; see :meth:`Categorical.masked`. None masks nothing."""
    if masks is None:
        return dist_params
    if not isinstance(action_dist, Categorical):
        raise ValueError("action masks are for Discrete, MultiDiscrete and MultiBinary actions")
    return action_dist.masked(dist_params, np.asarray(masks, np.bool_).reshape(len(dist_params), -1))


def _sharp_log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities that are accurate near 0: log q_i = -softplus(logsumexp of the others - z_i).

    The usual formula subtracts from 1 in effect: with logits more than 17 apart the largest is exactly 0 in float32.
    """
    n = logits.shape[-1]
    if n == 1:
        return torch.zeros_like(logits)
    if n == 2:
        return -softplus(logits.flip(-1) - logits)
    itself = torch.eye(n, dtype=torch.bool, device=logits.device)
    others = logits.unsqueeze(-2).expand(*logits.shape, n).masked_fill(itself, -math.inf).logsumexp(-1)
    return -softplus(others - logits)


def _require_bounded(what: str, space: spaces.Box) -> None:
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(f"{what} needs a bounded action space, got {space}")


def action_distribution(space: spaces.Space[Any], squash: bool = False, censored: bool = False) -> ActionDistribution:
    """Return the distribution for an action space: Box, Discrete, MultiDiscrete or MultiBinary.

    :param space: the action space.
    :param squash: tanh of a Gaussian for a bounded Box.
    :param censored: a :class:`CensoredGaussian` for a bounded Box.
    :raises ValueError: for any other space, and for options that do not fit it.
    """
    if isinstance(space, spaces.Box):
        if squash and censored:
            raise ValueError("squashed actions never leave the box: choose squash_output or censored")
        return CensoredGaussian(space) if censored else Gaussian(space, squash)
    if censored:
        raise ValueError(f"censored is for actions in a box, got {space}")
    if isinstance(space, spaces.Discrete):
        return Categorical([int(space.n)], single=True, start=np.array([space.start]))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return Categorical([int(n) for n in space.nvec], single=False, start=np.asarray(space.start))
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:  # a choice between 0 and 1 each
        return Categorical([2] * space.shape[0], single=False, start=np.zeros(space.shape, np.int64))
    raise ValueError(f"actions must be a Box, Discrete, or one-dimensional MultiDiscrete or MultiBinary space, got {space}")
