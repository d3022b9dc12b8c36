"""Batched environments, the return observer, and test problems with known optima."""

from tailguard.envs.bar_execution import BarExecution
from tailguard.envs.market_making import MarketMaking
from tailguard.envs.optimal_execution import OptimalExecution

__all__ = [
    "BarExecution",
    "MarketMaking",
    "OptimalExecution",
]
