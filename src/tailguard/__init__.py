"""Tailguard trains trading agents that know their own tail risk."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import register

if TYPE_CHECKING:
    from tailguard.envs.return_observer import ReturnAugmentedEnv, ReturnObserver
    from tailguard.evaluate.judge import judge, judge_strategy
    from tailguard.market.env import TradingEnv, TradingVecEnv
    from tailguard.market.guard import guard
    from tailguard.ppo.algorithm import DistributionalPPO

    __version__: str

__all__ = [
    "DistributionalPPO",
    "ReturnAugmentedEnv",
    "ReturnObserver",
    "TradingEnv",
    "TradingVecEnv",
    "__version__",
    "guard",
    "judge",
    "judge_strategy",
]

# Loaded on first use, so that `tailguard --help` waits neither for PyTorch nor for the reader of the package's metadata.
_ON_FIRST_USE = {
    "DistributionalPPO": "tailguard.ppo.algorithm",
    "TradingEnv": "tailguard.market.env",
    "TradingVecEnv": "tailguard.market.env",
    "ReturnObserver": "tailguard.envs.return_observer",
    "ReturnAugmentedEnv": "tailguard.envs.return_observer",
    "guard": "tailguard.market.guard",
    "judge": "tailguard.evaluate.judge",
    "judge_strategy": "tailguard.evaluate.judge",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tailguard")
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_FIRST_USE[name]), name)


# gymnasium.make("tailguard/Trading-v0", bars=..., fee=...); the environment itself is loaded when it is made.
register(id="tailguard/Trading-v0", entry_point="tailguard.market.env:TradingEnv")
register(
    id="tailguard/OptimalExecution-v0",
    entry_point="tailguard.envs.optimal_execution:single_order",
    vector_entry_point="tailguard.envs.optimal_execution:OptimalExecution",
)
register(
    id="tailguard/MarketMaking-v0",
    entry_point="tailguard.envs.market_making:single_maker",
    vector_entry_point="tailguard.envs.market_making:MarketMaking",
)
register(
    id="tailguard/OptionHedging-v0",
    entry_point="tailguard.envs.option_hedging:single_option_hedging",
    vector_entry_point="tailguard.envs.option_hedging:OptionHedging",
)
register(
    id="tailguard/BandHedging-v0",
    entry_point="tailguard.envs.option_hedging:single_band_hedging",
    vector_entry_point="tailguard.envs.option_hedging:BandHedging",
)
