"""Agents that keep their behaviour when observations are wrong: attacks, the regulariser of SA-PPO, and certificates."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tailguard.robust.config import PerturbationConfig, SAPPOConfig

if TYPE_CHECKING:
    from tailguard.robust.attacks import StatePerturbation

__all__ = ["PerturbationConfig", "SAPPOConfig", "StatePerturbation"]


def __getattr__(name: str) -> Any:
    if name != "StatePerturbation":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Loaded on first use, so that the settings can be read without PyTorch.
    return import_module("tailguard.robust.attacks").StatePerturbation
