"""Market data, features, accounting and environments.

Names are loaded on first use: a list of the shipped data should not wait for pandas, nor a data file for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailguard.envs.betting_game import BettingGame
    from tailguard.envs.crash_market import CrashMarket
    from tailguard.envs.guarded_maze import GuardedMaze
    from tailguard.envs.signal_market import SignalMarket
    from tailguard.market.accounting import SimulationResult, simulate
    from tailguard.market.bars import DataError, DataWarning, align_bars, periods_per_year
    from tailguard.market.checks import check_bars
    from tailguard.market.data import load_bars, load_dataset
    from tailguard.market.env import TradingEnv, TradingVecEnv
    from tailguard.market.features import FeatureConfig, FeatureScaler, FeatureSet, build_features
    from tailguard.market.files import FileConfig
    from tailguard.market.rules import TradingRules, TradingSettings
    from tailguard.market.shipped import list_datasets
    from tailguard.market.synthetic import ar1_returns, random_walk

_ON_FIRST_USE = {
    "BettingGame": "tailguard.envs.betting_game",
    "CrashMarket": "tailguard.envs.crash_market",
    "DataError": "tailguard.market.bars",
    "DataWarning": "tailguard.market.bars",
    "FeatureConfig": "tailguard.market.features",
    "FeatureScaler": "tailguard.market.features",
    "FeatureSet": "tailguard.market.features",
    "FileConfig": "tailguard.market.files",
    "GuardedMaze": "tailguard.envs.guarded_maze",
    "SignalMarket": "tailguard.envs.signal_market",
    "SimulationResult": "tailguard.market.accounting",
    "TradingEnv": "tailguard.market.env",
    "TradingRules": "tailguard.market.rules",
    "TradingSettings": "tailguard.market.rules",
    "TradingVecEnv": "tailguard.market.env",
    "align_bars": "tailguard.market.bars",
    "ar1_returns": "tailguard.market.synthetic",
    "build_features": "tailguard.market.features",
    "check_bars": "tailguard.market.checks",
    "list_datasets": "tailguard.market.shipped",
    "load_bars": "tailguard.market.data",
    "load_dataset": "tailguard.market.data",
    "periods_per_year": "tailguard.market.bars",
    "random_walk": "tailguard.market.synthetic",
    "simulate": "tailguard.market.accounting",
}

__all__ = [
    "BettingGame",
    "CrashMarket",
    "DataError",
    "DataWarning",
    "FeatureConfig",
    "FeatureScaler",
    "FeatureSet",
    "FileConfig",
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


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_FIRST_USE[name]), name)
