"""What the critics predict and how they learn it."""

from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from tailguard.ppo.quantiles import tail_levels, uniform_levels
from tailguard.ppo.return_distribution import (
    AtomReturns,
    CategoricalReturns,
    MeanReturn,
    MonotoneQuantileReturns,
    QuantileReturns,
    ReturnDistribution,
)
from tailguard.ppo.scaling import ReturnScaleConfig
from tailguard.validation import require

# Quantiles that are placed in the tail where nothing else is said, and how many there must be in all: the others still have to
# tell the mean.
TAIL_QUANTILES, ENOUGH_FOR_A_TAIL = 5, 20


class CriticConfig(BaseModel):
    """Settings of the critics.

    :param num_quantiles: quantiles that each critic predicts; 32 is plenty for the mean, and for tails with `tail_quantiles`
        among them. 1 is an ordinary critic: it learns the mean return by squared loss, and knows nothing of tails.
    :param law: what they describe the return with. ``quantile``: free quantiles, sorted where order matters; ``monotone``:
        quantiles that cannot cross; ``categorical``: probabilities of `num_quantiles` fixed places (C51).
    :param twin: two independent critics instead of one.
    :param aggregate: the value of a state from both: ``mean`` or ``min`` of their means.
    :param huber_kappa: half-width of the quadratic zone of the loss, in normalised units. 0 learns true quantiles; 1, the usual
        choice elsewhere, pulls the tails inward by a fifth.
    :param target: ``distribution``: SR(lambda), which keeps the spread of the return; ``lambda_return``: a single number per
        sample, which does not.
    :param value_lambda: lambda of the targets.
    :param tail_quantiles: how many of the quantiles are placed in the lower tail; 0 spreads all evenly. None: 5 of 20 or more
        quantiles, which more than halves the error of the CVaR there, and none of fewer.
    :param tail_alpha: the tail that they share.
    :param reach: where the places of a categorical critic end, in standard deviations of the return.
    :param clip_range: how far a prediction may move in one update, in standard deviations of the return; beyond it, moving on
        towards the target pays nothing. None does not clip, which is right more often than not.
    :param clip_mode: what is clipped against the same critic's predictions before the update. ``per_quantile``: every quantile;
        ``mean_only``: the mean, quantiles move along; ``mean_and_variance``: the mean, and the spread to at most
        `clip_variance_factor` times the old one.
    :param clip_variance_factor: see there.
    :param ev_reserve: measure the explained variance once more after the update, with the final weights. It costs one pass over
        the rollout and changes nothing else.
    :param scale: how the scale of returns follows the data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_quantiles: Annotated[int, Field(ge=1, le=1000)] = 32
    law: Literal["quantile", "monotone", "categorical"] = "quantile"
    twin: bool = True
    aggregate: Literal["mean", "min"] = "mean"
    huber_kappa: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    target: Literal["distribution", "lambda_return"] = "distribution"
    value_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    tail_quantiles: Annotated[int, Field(ge=0)] | None = None
    tail_alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    reach: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 5.0
    clip_range: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    clip_mode: Literal["per_quantile", "mean_only", "mean_and_variance"] = "per_quantile"
    clip_variance_factor: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 2.0
    ev_reserve: bool = False
    scale: ReturnScaleConfig = Field(default_factory=ReturnScaleConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        n, tail = self.num_quantiles, self.n_tail
        require(tail < n, "tail_quantiles", tail, f"below num_quantiles {n}")
        if self.law == "categorical":
            require(n >= 2, "num_quantiles", n, "at least 2 places for a categorical critic")
            require(tail == 0, "tail_quantiles", tail, "0 for a categorical critic: it has places, not levels")
            require(self.clip_range is None, "clip_range", self.clip_range, "None: a categorical critic has no quantiles")
        return self

    @property
    def n_critics(self) -> int:
        """K."""
        return 2 if self.twin else 1

    @property
    def n_tail(self) -> int:
        """How many of the quantiles stand in the lower tail."""
        if self.tail_quantiles is not None:
            return self.tail_quantiles
        return TAIL_QUANTILES if self.law != "categorical" and self.num_quantiles >= ENOUGH_FOR_A_TAIL else 0

    def levels(self) -> Tensor:
        """The levels of the quantiles, ``[N]``."""
        if self.n_tail == 0:
            return uniform_levels(self.num_quantiles)
        return tail_levels(self.num_quantiles, self.tail_alpha, self.n_tail)

    def build_return_distribution(self) -> ReturnDistribution:
        """What the outputs of the critics mean."""
        if self.law == "categorical":
            return CategoricalReturns(self.num_quantiles, self.reach)
        if self.num_quantiles == 1:
            return MeanReturn()
        kind = MonotoneQuantileReturns if self.law == "monotone" else QuantileReturns
        return kind(self.levels(), self.huber_kappa)

    def aggregate_values(self, values: Tensor) -> Tensor:
        """One value from those of the critics ``[K, ...]``."""
        return values.mean(0) if self.aggregate == "mean" else values.min(0).values

    def errors(self, law: ReturnDistribution, outputs: Tensor, targets: Tensor, old_atoms: Tensor | None) -> Tensor:
        """The loss of each critic's outputs ``[K, ..., n]`` against its targets ``[K, ..., M]``, as ``[K, ...]``.

        With clipping, the larger of the losses with and without it, sample by sample and critic by critic: a critic that has
        moved beyond the range is only ever pulled back.

        :param old_atoms: ``[K, ..., M]`` what each critic predicted before the update; needed with `clip_range` only.
        """
        if old_atoms is None or not isinstance(law, AtomReturns):
            return law.errors(outputs, targets)
        atoms = law.atoms(outputs)
        return torch.maximum(law.distance(atoms, targets), law.distance(self._clipped(law, atoms, old_atoms), targets))

    def _clipped(self, law: ReturnDistribution, atoms: Tensor, old: Tensor) -> Tensor:
        assert self.clip_range is not None
        if self.clip_mode == "per_quantile":
            return old + (atoms - old).clamp(-self.clip_range, self.clip_range)
        mean, old_mean = (atoms @ law.masses).unsqueeze(-1), (old @ law.masses).unsqueeze(-1)
        clipped_mean = old_mean + (mean - old_mean).clamp(-self.clip_range, self.clip_range)
        if self.clip_mode == "mean_only":
            return atoms + clipped_mean - mean
        variances = (((x - m).square() @ law.masses).clamp(min=1e-12) for x, m in ((atoms, mean), (old, old_mean)))
        spread, old_spread = (variance.sqrt() for variance in variances)
        factor = (self.clip_variance_factor * old_spread / spread).clamp(max=1.0).unsqueeze(-1)
        return clipped_mean + factor * (atoms - mean)
