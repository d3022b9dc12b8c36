"""UPGD optimizers, which protect useful weights, and variance-based gradient scaling (VGS), for any PyTorch model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailguard.optim.upgd import UPGD, UPGDW, AdaptiveUPGD
    from tailguard.optim.vgs import VarianceGradientScaler

__all__ = ["UPGD", "UPGDW", "AdaptiveUPGD", "VarianceGradientScaler"]

# Loaded on first use, so that the settings can be read without PyTorch.
_ON_FIRST_USE = {
    "UPGD": "tailguard.optim.upgd",
    "UPGDW": "tailguard.optim.upgd",
    "AdaptiveUPGD": "tailguard.optim.upgd",
    "VarianceGradientScaler": "tailguard.optim.vgs",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_FIRST_USE[name]), name)
