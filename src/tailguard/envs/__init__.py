"""Batched environments, the return observer, and test problems with known optima."""

from tailguard.envs.heston import Heston
from tailguard.envs.option_hedging import BandHedging, BlockBootstrap, GeometricBrownianMotion, Option, OptionHedging

__all__ = [
    "BandHedging",
    "BlockBootstrap",
    "GeometricBrownianMotion",
    "Heston",
    "Option",
    "OptionHedging",
]
