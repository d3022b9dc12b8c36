"""Settings of the optimizer and of variance-based gradient scaling, without PyTorch."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from tailguard.validation import require

Estimator = Literal["elementwise", "mean", "norm"]
Aggregate = Literal["ratio", "percentile"]
Action = Literal["auto", "gradient", "step"]
Gate = Literal["minmax", "reference", "none"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]

# The settings that an optimizer has besides the decay of weights.
MOMENTS = frozenset({"beta1", "beta2", "eps"})
PROTECTION = frozenset({"beta_utility", "sigma", "adaptive_noise", "min_noise_std", "gate"})
SETTINGS = {
    "adam": MOMENTS,
    "adamw": MOMENTS,
    "sgd": frozenset({"momentum"}),
    "upgd": PROTECTION,
    "adaptive_upgd": PROTECTION | MOMENTS,
    "upgdw": PROTECTION | MOMENTS,
}


class VGSConfig(BaseModel):
    """Variance-based gradient scaling (VGS): shorter steps where gradients are noisy.

    :param enabled: False scales nothing and measures nothing.
    :param beta: decay of the running statistics, in (0, 1): about 1 / (1 - beta) gradients count. 0.99 is typical; more is
        steadier and slower to notice a change.
    :param alpha: gain, at least 0. 1 is optimal on a noisy quadratic, the audit reports' 0.1 brakes a tenth as much, 0 only
        monitors.
    :param eps: the signal counts as at least this share of the gradient's mean square, above 0: V never exceeds 1 / eps. It is
        relative, so that the factor does not depend on the scale of the loss.
    :param warmup_steps: steps without scaling, while the statistics gather; 100 suits the default beta.
    :param estimator: ``elementwise``, ``mean`` or ``norm``, see ``gradient_statistics.py``. Only ``elementwise`` sees noise
        that cancels inside a tensor.
    :param aggregate: how tensors make a head: ``ratio`` divides the sum of variances by the sum of squared means, so large
        tensors count more; ``percentile`` takes the 90th percentile of the tensors' own V.
    :param min_scaling_factor: no factor is smaller, in (0, 1]. 0.1 is typical; at 0.0001 noise can stop learning altogether.
    :param action: scale the ``gradient``, or the ``step`` that the optimizer makes of it; ``auto`` chooses by the optimizer.
        Adam divides a scaled gradient by itself again, so that only ``step`` has an effect there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = True
    beta: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.99
    alpha: NonNegativeFloat = 1.0
    eps: PositiveFloat = 1e-8
    warmup_steps: NonNegativeInt = 100
    estimator: Estimator = "elementwise"
    aggregate: Aggregate = "ratio"
    min_scaling_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    action: Action = "auto"


class OptimizerConfig(BaseModel):
    """The optimizer and its settings. None leaves the optimizer's own default; a setting that it does not have is refused.

    :param name: ``adam``, ``adamw``, ``sgd``, ``upgd``, ``adaptive_upgd`` (Adam with protected weights) or ``upgdw`` (the same
        with AdamW's defaults).
    :param weight_decay: pull of the weights towards 0, decoupled except in ``adam`` and ``sgd``. 0 is none, 0.01 is typical;
        more forgets what is not used.
    :param momentum: share of the last step that ``sgd`` repeats, in [0, 1). 0.9 is typical.
    :param beta1: decay of the mean gradient, of all but ``sgd`` and ``upgd``. 0.9 is typical; more is smoother and slower.
    :param beta2: decay of the mean squared gradient, of the same optimizers. 0.999 is typical.
    :param eps: added to the root of the mean square; 1e-5 is usual in PPO and the default here. More makes rare gradients count
        less.
    :param beta_utility: decay of the utilities, of the three optimizers with protected weights, as the keys that follow. 0.999
        is typical.
    :param sigma: standard deviation of the noise that is added to unprotected weights; 0 adds none. With variance-based
        gradient scaling the default is 0.0005, otherwise 0.001. More explores more and blurs what was learnt.
    :param adaptive_noise: noise in units of the direction. True is recommended with variance-based gradient scaling, since
        fixed noise does not shrink with the gradients, and is the default there.
    :param min_noise_std: smallest adaptive noise; keeps weights moving where gradients vanish.
    :param gate: how utility protects a weight, see ``upgd_step.py``: ``minmax``, ``reference`` (the authors' code) or ``none``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Literal["adam", "adamw", "sgd", "upgd", "adaptive_upgd", "upgdw"] = "adam"
    weight_decay: NonNegativeFloat | None = None
    momentum: Fraction | None = None
    beta1: Fraction | None = None
    beta2: Fraction | None = None
    eps: PositiveFloat | None = None
    beta_utility: Fraction | None = None
    sigma: NonNegativeFloat | None = None
    adaptive_noise: bool | None = None
    min_noise_std: NonNegativeFloat | None = None
    gate: Gate | None = None

    @model_validator(mode="after")
    def _known_to_the_optimizer(self) -> Self:
        for option, value in self.model_dump(exclude={"name", "weight_decay"}, exclude_none=True).items():
            require(option in SETTINGS[self.name], option, value, f"left out for the optimizer {self.name}")
        return self
