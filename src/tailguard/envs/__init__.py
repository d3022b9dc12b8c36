"""Batched environments, the return observer, and test problems with known optima.

Names are loaded on first use: whoever needs one problem should not wait for the others to be compiled.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailguard.envs.bar_execution import BarExecution
    from tailguard.envs.heston import Heston
    from tailguard.envs.market_making import MarketMaking
    from tailguard.envs.optimal_execution import OptimalExecution
    from tailguard.envs.option_hedging import BandHedging, BlockBootstrap, GeometricBrownianMotion, Option, OptionHedging

_ON_FIRST_USE = {
    "BandHedging": "tailguard.envs.option_hedging",
    "BarExecution": "tailguard.envs.bar_execution",
    "BlockBootstrap": "tailguard.envs.option_hedging",
    "GeometricBrownianMotion": "tailguard.envs.option_hedging",
    "Heston": "tailguard.envs.heston",
    "MarketMaking": "tailguard.envs.market_making",
    "OptimalExecution": "tailguard.envs.optimal_execution",
    "Option": "tailguard.envs.option_hedging",
    "OptionHedging": "tailguard.envs.option_hedging",
}

__all__ = [
    "BandHedging",
    "BarExecution",
    "BlockBootstrap",
    "GeometricBrownianMotion",
    "Heston",
    "MarketMaking",
    "OptimalExecution",
    "Option",
    "OptionHedging",
]


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_FIRST_USE[name]), name)
