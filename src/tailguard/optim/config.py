"""Settings of the scaler and of the optimizer, and the choice of noise that suits both."""

import logging
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tailguard.optim.adam import Adam
from tailguard.optim.fused import fits
from tailguard.optim.gate import Gate
from tailguard.optim.gradient_statistics import Estimator
from tailguard.optim.upgd import UPGD, UPGDW, AdaptiveUPGD
from tailguard.validation import require

logger = logging.getLogger(__name__)

Aggregate = Literal["ratio", "percentile"]
Action = Literal["auto", "gradient", "step"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]

RISKY_SIGMA = 1e-4  # fixed noise below this is harmless beside any gradient
VGS_SIGMA = 0.0005


class VGSConfig(BaseModel):
    """Settings of the scaler.

    :param enabled: False scales nothing and measures nothing.
    :param beta: memory of the statistics, in (0, 1): about 1 / (1 - beta) gradients count. 0.99 is typical.
    :param alpha: gain, at least 0. 1 is optimal on a noisy quadratic, the seeds' 0.1 brakes a tenth as much, 0 only monitors.
    :param eps: the signal counts as at least this share of the gradient's mean square, above 0: V never exceeds 1 / eps. It is
        relative, so that the factor does not depend on the scale of the loss.
    :param warmup_steps: steps without scaling, while the statistics gather; 100 suits the default beta.
    :param estimator: ``elementwise``, ``mean`` or ``norm``, see ``gradient_statistics.py``.
    :param aggregate: how tensors make a head: ``ratio`` divides the sum of variances by the sum of squared means, so large
        tensors count more; ``percentile`` takes the 90th percentile of the tensors' own V.
    :param min_scaling_factor: no factor is smaller, in (0, 1]. At 0.0001 noise can stop learning altogether.
    :param action: ``gradient``, ``step``, or ``auto``: by the optimizer.
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
    """Which optimizer, with what. None leaves the optimizer's own default; a setting that it does not have is refused.

    :param name: ``adam``, ``adamw``, ``sgd``, ``upgd``, ``adaptive_upgd`` (Adam with protected weights) or ``upgdw`` (the same
        with AdamW's defaults).
    :param weight_decay: decoupled, but in ``adam`` and ``sgd``.
    :param momentum: of ``sgd``.
    :param beta1: memory of the mean gradient, of all but ``sgd`` and ``upgd``.
    :param beta2: memory of the mean squared gradient, of the same.
    :param eps: added to its root. 1e-5 is usual in PPO and the default here.
    :param beta_utility: memory of utilities, of the three with protected weights, as the rest.
    :param sigma: noise; 0 is none. With variance-based gradient scaling the default is 0.0005.
    :param adaptive_noise: noise in units of the direction. True is recommended with variance-based gradient scaling, since
        fixed noise does not shrink with the gradients, and is the default there.
    :param min_noise_std: smallest adaptive noise.
    :param gate: how utility protects, see ``gate.py``.
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


MOMENTS = frozenset({"beta1", "beta2", "eps"})
PROTECTION = frozenset({"beta_utility", "sigma", "adaptive_noise", "min_noise_std", "gate"})
KNOWN = {
    "adam": MOMENTS,
    "adamw": MOMENTS,
    "sgd": frozenset({"momentum"}),
    "upgd": PROTECTION,
    "adaptive_upgd": PROTECTION | MOMENTS,
    "upgdw": PROTECTION | MOMENTS,
}
PPO_EPS = 1e-5


def build_optimizer(
    config: OptimizerConfig, params: ParamsT, lr: float, *, vgs: bool, generator: torch.Generator | None = None
) -> Optimizer:
    """The optimizer that the settings describe.

    :param config: the settings.
    :param params: what it moves.
    :param lr: learning rate.
    :param vgs: whether a :class:`VarianceGradientScaler` will act on it; noise then adapts unless the settings say otherwise.
    :param generator: of the noise.
    """
    name, known = config.name, KNOWN[config.name]
    options: dict[str, Any] = config.model_dump(exclude={"name"}, exclude_none=True)
    for option in options:
        require(option in known | {"weight_decay"}, option, options[option], f"left out for the optimizer {name}")
    if "eps" in known:
        options.setdefault("eps", PPO_EPS)
    if name in ("adam", "adamw", "upgdw"):
        options["betas"] = options.pop("beta1", 0.9), options.pop("beta2", 0.999)
    if name in ("adam", "adamw", "sgd"):
        given: list[Any] = list(params)
        compiled = name == "adam" and all(isinstance(one, torch.Tensor) for one in given) and fits(given)
        classes: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        made: Optimizer = (Adam if compiled else classes[name])(given, lr=lr, fused=True, **options)
        return made
    if vgs:
        options.setdefault("adaptive_noise", True)
        options.setdefault("sigma", VGS_SIGMA)
    own: dict[str, Any] = {"upgd": UPGD, "adaptive_upgd": AdaptiveUPGD, "upgdw": UPGDW}
    optimizer: Optimizer = own[name](params, lr=lr, generator=generator, **options)
    return optimizer


def warn_of_fixed_noise(optimizer: Optimizer) -> None:
    """Warn of noise that stays as it is while gradients are scaled down.

    :param optimizer: that a scaler is about to act on.
    """
    for group in optimizer.param_groups:
        if "adaptive_noise" in group and not group["adaptive_noise"] and group["sigma"] > RISKY_SIGMA:
            logger.warning(
                "VGS enabled with UPGD adaptive_noise=false and sigma=%s. This may cause excessive noise when VGS scales "
                "gradients down. Consider setting adaptive_noise=true for stability.",
                group["sigma"],
            )
