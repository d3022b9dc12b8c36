"""What the critics predict and how they learn it."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from tailguard.ppo.quantiles import level_masses, quantile_huber_loss, tail_levels, uniform_levels
from tailguard.ppo.scaling import ReturnScaleConfig


class CriticConfig(BaseModel):
    """Settings of the critics.

    :param num_quantiles: quantiles that each critic predicts; 32 is plenty for the mean, tails want `tail_quantiles`. 1 is an
        ordinary critic: it learns the mean return by squared loss, and knows nothing of tails.
    :param twin: two independent critics instead of one.
    :param aggregate: the value of a state from both: ``mean`` or ``min`` of their means.
    :param huber_kappa: half-width of the quadratic zone of the loss, in normalised units. 0 learns true quantiles; 1, the usual
        choice elsewhere, pulls the tails inward by a fifth.
    :param target: ``distribution``: SR(lambda), which keeps the spread of the return; ``lambda_return``: a single number per
        sample, which does not.
    :param value_lambda: lambda of the targets.
    :param tail_quantiles: how many of the quantiles are placed in the lower tail; 0 spreads all evenly.
    :param tail_alpha: the tail that they share.
    :param scale: how the scale of returns follows the data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_quantiles: Annotated[int, Field(ge=1, le=1000)] = 32
    twin: bool = True
    aggregate: Literal["mean", "min"] = "mean"
    huber_kappa: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    target: Literal["distribution", "lambda_return"] = "distribution"
    value_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    tail_quantiles: Annotated[int, Field(ge=0)] = 0
    tail_alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    scale: ReturnScaleConfig = Field(default_factory=ReturnScaleConfig)

    @model_validator(mode="after")
    def _some_above_the_tail(self) -> Self:
        if self.tail_quantiles >= self.num_quantiles:
            raise ValueError(f"tail_quantiles {self.tail_quantiles} must be below num_quantiles {self.num_quantiles}")
        return self

    @property
    def n_critics(self) -> int:
        """K."""
        return 2 if self.twin else 1

    def levels(self) -> Tensor:
        """The levels of the quantiles, ``[N]``."""
        if self.tail_quantiles == 0:
            return uniform_levels(self.num_quantiles)
        return tail_levels(self.num_quantiles, self.tail_alpha, self.tail_quantiles)

    def errors(self, quantiles: Tensor, targets: Tensor, levels: Tensor) -> Tensor:
        """The loss of each prediction ``[K, ..., N]`` against its target atoms ``[K, ..., M]``, as ``[K, ...]``."""
        if self.num_quantiles == 1:
            return 0.5 * (quantiles - targets).squeeze(-1).square()
        masses = None if self.tail_quantiles == 0 or self.target == "lambda_return" else level_masses(levels)
        return quantile_huber_loss(quantiles, targets, levels, self.huber_kappa, masses)
