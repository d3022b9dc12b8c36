"""The optimizer that the settings describe, with the noise that suits variance-based gradient scaling."""

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tailguard.optim.adam import Adam
from tailguard.optim.config import MOMENTS, SETTINGS, OptimizerConfig
from tailguard.optim.layout import kernels_apply
from tailguard.optim.upgd import UPGD, UPGDW, AdaptiveUPGD

PPO_EPS = 1e-5
VGS_SIGMA = 0.0005
# Devices that torch has one call for a whole step on; on others it takes several.
FUSED = ("cpu", "cuda", "mps", "xpu")


def build_optimizer(
    config: OptimizerConfig, params: ParamsT, lr: float, *, vgs: bool, generator: torch.Generator | None = None
) -> Optimizer:
    """Return the optimizer that the settings describe.

    :param config: the settings.
    :param params: the parameters that it moves.
    :param lr: learning rate.
    :param vgs: True if a :class:`VarianceGradientScaler` will act on it; noise then adapts unless the settings say otherwise.
    :param generator: of the noise.
    """
    name = config.name
    options: dict[str, Any] = config.model_dump(exclude={"name"}, exclude_none=True)
    if SETTINGS[name] >= MOMENTS:
        options.setdefault("eps", PPO_EPS)
    if name in ("adam", "adamw", "upgdw"):
        options["betas"] = options.pop("beta1", 0.9), options.pop("beta2", 0.999)
    if name in ("adam", "adamw", "sgd"):
        every: list[Any] = list(params)
        compiled = name == "adam" and all(isinstance(param, torch.Tensor) for param in every) and kernels_apply(every)
        classes: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        fused = all(not isinstance(param, torch.Tensor) or param.device.type in FUSED for param in every)
        optimizer: Optimizer = (Adam if compiled else classes[name])(every, lr=lr, fused=fused, **options)
        return optimizer
    if vgs:
        options.setdefault("adaptive_noise", True)
        options.setdefault("sigma", VGS_SIGMA)
    own: dict[str, Any] = {"upgd": UPGD, "adaptive_upgd": AdaptiveUPGD, "upgdw": UPGDW}
    optimizer = own[name](params, lr=lr, generator=generator, **options)
    return optimizer


def build_custom_optimizer(kind: type[Optimizer], params: ParamsT, options: dict[str, Any] | None) -> Optimizer:
    """Return an optimizer of a class that the user names, as SB3 builds it; the learning rate is set with every update.

    :param kind: the class.
    :param params: the parameters that it moves.
    :param options: its arguments without the learning rate. None is ``eps=1e-5`` for Adam; arguments that are given leave the
        others at torch's defaults, as in SB3.
    """
    if options is None:
        options = {"eps": PPO_EPS} if kind is torch.optim.Adam else {}
    optimizer: Optimizer = kind(params, lr=0.0, **options)  # type: ignore[call-arg]
    return optimizer
