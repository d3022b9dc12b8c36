"""Normalisation of returns (PopArt) and observations: statistics change between rollouts and are constant within them.

Both classes merge weighted moments (Chan et al. 1979). With ``share`` = new mass / total mass::

    mean' = mean + share (mean_new - mean)
    var'  = (1 - share) var + share var_new + share (1 - share) (mean_new - mean)^2

The old mass may be decayed first. Then this is an exponential moving average that needs no bias correction: the first rollout
has a share of 1, and rollouts of unequal size are weighted by their size. All statistics are float64.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailguard.ppo.config import ObsNormConfig, ReturnScaleConfig
from tailguard.validation import require


def _moments(name: str, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted mean, the (population) variance and the total weight of ``values[N, ...]`` over N."""
    values = values.detach().double()
    mass = weights.detach().to(values)
    _require_all((mass >= 0.0) & mass.isfinite(), "weights", mass, "finite and at least 0")
    counted = mass > 0.0
    values, mass = values[counted], mass[counted]  # padding may hold anything, NaN included
    require(len(values) > 0, name, f"{len(counted)} samples of weight 0", "at least one sample with a positive weight")
    _require_all(values.isfinite(), name, values, "finite")
    total = mass.sum()
    mean = mass @ values / total
    return mean, mass @ (values - mean) ** 2 / total, total


def _require_all(good: Tensor, name: str, values: Tensor, legal: str) -> None:
    bad = values[~good].tolist()
    require(not bad, name, f"{bad[0]} in {len(bad)} of {values.numel()} places" if bad else "", legal)


def _merge(mean: Tensor, var: Tensor, new_mean: Tensor, new_var: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    gap = new_mean - mean
    return mean + share * gap, (1.0 - share) * var + share * new_var + share * (1.0 - share) * gap**2


class ReturnScale(nn.Module):
    """Mean and standard deviation of returns, by which critics predict in normalised units (PopArt, van Hasselt et al. 2016).

    ``mean`` and ``std`` are the running statistics, ``mean_snapshot`` and ``std_snapshot`` the active ones, which scale
    predictions and targets. Only :meth:`update` changes the first pair, only :meth:`activate` the second.

    :param config: how fast the statistics follow the data.
    """

    mean: Tensor
    std: Tensor
    mass: Tensor
    mean_snapshot: Tensor
    std_snapshot: Tensor

    def __init__(self, config: ReturnScaleConfig) -> None:
        super().__init__()
        self.config = config
        for name, value in {"mean": 0.0, "std": 1.0, "mass": 0.0, "mean_snapshot": 0.0, "std_snapshot": 1.0}.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))

    def update(self, returns: Tensor, weights: Tensor | None = None) -> None:
        """Fold the returns of one rollout into the running statistics; the snapshot does not change.

        The first rollout, and the first after constant returns, is taken over without the limit on a step.

        :param returns: raw returns of any shape.
        :param weights: of the same shape, at least 0; a mask counts as 0 and 1. None weighs all equally.
        :raises ValueError: on NaN or infinity among the returns that count, or when none counts.
        """
        weights = torch.ones_like(returns) if weights is None else weights
        legal = f"of the returns' shape {tuple(returns.shape)}"
        require(weights.shape == returns.shape, "weights", tuple(weights.shape), legal)
        new_mean, new_var, new_mass = _moments("returns", returns.reshape(-1), weights.reshape(-1))

        mass = (1.0 - self.config.beta) * self.mass + new_mass
        mean, var = _merge(self.mean, self.std**2, new_mean, new_var, new_mass / mass)
        std = var.sqrt()
        step = self.config.max_relative_step
        if step is not None and self.mass > 0.0 and self.std > self.config.min_std:
            mean = mean.clamp(self.mean - step * self.std, self.mean + step * self.std)
            std = std.clamp(self.std / (1.0 + step), self.std * (1.0 + step))
        self.mass.copy_(mass)
        self.mean.copy_(mean)
        self.std.copy_(std.clamp(min=self.config.min_std))

    def activate(self) -> tuple[Tensor, Tensor]:
        """Make the running statistics the active ones.

        :returns: ratio and shift that preserve raw predictions (PopArt): from ``sigma' v' + mu' = sigma v + mu`` follows
            ``v' = (sigma / sigma') v + (mu - mu') / sigma'``. See :meth:`tailguard.ppo.critic.ReturnDistribution.rescale`.
        """
        ratio = self.std_snapshot / self.std
        shift = (self.mean_snapshot - self.mean) / self.std
        self.mean_snapshot.copy_(self.mean)
        self.std_snapshot.copy_(self.std)
        return ratio, shift

    def encode(self, raw: Tensor) -> Tensor:
        """Return raw returns in the critics' units, (raw - mu) / sigma by the snapshot."""
        return ((raw - self.mean_snapshot) / self.std_snapshot).to(raw.dtype)

    def decode(self, normalised: Tensor) -> Tensor:
        """Return normalised predictions as raw returns, sigma v + mu by the snapshot."""
        return (normalised * self.std_snapshot + self.mean_snapshot).to(normalised.dtype)


class ObservationNormalizer(nn.Module):
    """Running mean and variance of observations, updated between rollouts only.

    Before the first update it only clips.

    :param size: number of columns, at least 1.
    :param config: half-life, clip, epsilon.
    :param mask: one entry per column, True for columns that pass unchanged, not even clipped (flags, positions).
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    mask: Tensor
    mean_drift: Tensor
    std_drift: Tensor
    _shift: Tensor
    _factor: Tensor
    _low: Tensor
    _high: Tensor

    def __init__(self, size: int, config: ObsNormConfig, mask: Sequence[bool] | Tensor | None = None) -> None:
        super().__init__()
        require(size >= 1, "size", size, "at least 1")
        left_alone = torch.zeros(size, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        if mask is not None:
            fits = left_alone.dtype == torch.bool and left_alone.shape == (size,)
            require(fits and not bool(left_alone.all()), "mask", mask, f"{size} booleans, not all of them True")
        self.size = size
        self.config = config
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("mask", left_alone.clone())
        for name in ("count", "mean_drift", "std_drift"):
            self.register_buffer(name, torch.tensor(0.0, dtype=torch.float64))
        for name in ("_shift", "_factor", "_low", "_high"):
            self.register_buffer(name, torch.zeros(size), persistent=False)
        self._precompute()
        self.register_load_state_dict_post_hook(_precompute_after_load)  # type: ignore[no-untyped-call]

    def update(self, batch: Tensor) -> None:
        """Fold the observations of one rollout into the statistics.

        :param batch: raw observations ``[..., size]``, at least one.
        :raises ValueError: on NaN or infinity.
        """
        require(batch.shape[-1:] == (self.size,), "batch", tuple(batch.shape), f"a shape that ends in {self.size}")
        samples = batch.reshape(-1, self.size)
        new_mean, new_var, new_count = _moments("batch", samples, torch.ones(len(samples)))

        half_life = self.config.half_life
        kept = self.count if half_life is None else self.count * 0.5 ** (new_count / half_life)
        count = kept + new_count
        mean, var = _merge(self.mean, self.var, new_mean, new_var, new_count / count)
        if self.count > 0.0:  # the first update has nothing to drift from
            self._measure_drift(mean, var)
        self.mean.copy_(mean)
        self.var.copy_(var)
        self.count.copy_(count)
        self._precompute()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``clip((x - mean) / sqrt(var + eps), -clip, clip)`` in float32, for ``x[..., size]``."""
        return torch.clamp((x.float() - self._shift) * self._factor, self._low, self._high)

    def rows(self, x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Fill `out` with :meth:`forward` of ``x[B, size]``, for acting: NumPy is twice as fast as torch at this size."""
        np.subtract(x, self._shift.numpy(), out=out)
        np.multiply(out, self._factor.numpy(), out=out)
        np.maximum(out, self._low.numpy(), out=out)
        np.minimum(out, self._high.numpy(), out=out)

    def units(self) -> Tensor:
        """Return the change of each raw column that changes its normalised value by 1, ``[size]``; 1 for masked columns."""
        return self._factor.reciprocal()

    def drift(self) -> tuple[float, float]:
        """Return how far the last update moved the mean and the standard deviation.

        Both are root mean squares over the normalised columns, in units of the standard deviation before that update; 0 before
        the second update.
        """
        return self.mean_drift.item(), self.std_drift.item()

    def _measure_drift(self, mean: Tensor, var: Tensor) -> None:
        std = (self.var + self.config.eps).sqrt()
        moved_mean = (mean - self.mean) / std
        moved_std = (var + self.config.eps).sqrt() / std - 1.0
        self.mean_drift.copy_(moved_mean[~self.mask].square().mean().sqrt())
        self.std_drift.copy_(moved_std[~self.mask].square().mean().sqrt())

    def _precompute(self) -> None:
        """Compute the constants of :meth:`forward`, once per change of the statistics instead of once per step."""
        self._shift.copy_(self.mean.masked_fill(self.mask, 0.0))
        self._factor.copy_((self.var + self.config.eps).rsqrt().masked_fill(self.mask, 1.0))
        self._high.fill_(self.config.clip).masked_fill_(self.mask, float("inf"))
        self._low.copy_(-self._high)


def _precompute_after_load(module: nn.Module, _: object) -> None:
    assert isinstance(module, ObservationNormalizer)
    module._precompute()
