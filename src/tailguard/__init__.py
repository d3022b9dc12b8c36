"""Tailguard trains trading agents that know their own tail risk."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailguard.market.env import TradingEnv, TradingVecEnv
    from tailguard.ppo.algorithm import DistributionalPPO
    from tailguard.running_return import ReturnObserver, WatchedEnv

__version__ = version("tailguard")
__all__ = ["DistributionalPPO", "ReturnObserver", "TradingEnv", "TradingVecEnv", "WatchedEnv", "__version__"]

# Loaded on first use, so that `tailguard --help` does not wait for PyTorch.
_ON_FIRST_USE = {
    "DistributionalPPO": "tailguard.ppo.algorithm",
    "TradingEnv": "tailguard.market.env",
    "TradingVecEnv": "tailguard.market.env",
    "ReturnObserver": "tailguard.running_return",
    "WatchedEnv": "tailguard.running_return",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_FIRST_USE[name]), name)
