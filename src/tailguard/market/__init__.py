"""Market data, features, accounting and environments.

Names that need Gymnasium or SB3 are loaded on first use: reading a data file should not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tailguard.market.accounting import SimulationResult, simulate
from tailguard.market.data import (
    DataError,
    DataWarning,
    align_bars,
    check_bars,
    list_datasets,
    load_bars,
    load_dataset,
    periods_per_year,
)
from tailguard.market.features import FeatureConfig, FeatureScaler, FeatureSet, build_features
from tailguard.market.rules import TradingRules, TradingSettings
from tailguard.market.synthetic import ar1_returns, random_walk

if TYPE_CHECKING:
    from tailguard.envs.betting_game import BettingGame
    from tailguard.envs.crash_market import CrashMarket
    from tailguard.envs.guarded_maze import GuardedMaze
    from tailguard.envs.signal_market import SignalMarket
    from tailguard.market.env import TradingEnv, TradingVecEnv

__all__ = [
    "BettingGame",
    "CrashMarket",
    "DataError",
    "DataWarning",
    "FeatureConfig",
    "FeatureScaler",
    "FeatureSet",
    "GuardedMaze",
    "SignalMarket",
    "SimulationResult",
    "TradingEnv",
    "TradingRules",
    "TradingSettings",
    "TradingVecEnv",
    "align_bars",
    "ar1_returns",
    "build_features",
    "check_bars",
    "list_datasets",
    "load_bars",
    "load_dataset",
    "periods_per_year",
    "random_walk",
    "simulate",
]

_ON_FIRST_USE = {
    "BettingGame": "tailguard.envs.betting_game",
    "CrashMarket": "tailguard.envs.crash_market",
    "GuardedMaze": "tailguard.envs.guarded_maze",
    "SignalMarket": "tailguard.envs.signal_market",
    "TradingEnv": "tailguard.market.env",
    "TradingVecEnv": "tailguard.market.env",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_FIRST_USE[name]), name)
