"""The state of hedging environments, for policies that are functions of it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class HedgingState(NamedTuple):
    """The state of B copies of an option hedging environment.

    :param date: ``[B]`` dates since the start, from 0.
    :param spot: ``[B]`` price of the underlying.
    :param variance: ``[B]`` Heston's variance; constant for other processes.
    :param holding: ``[B]`` units of the underlying held.
    :param hedge: ``[B]`` units that a delta hedger would hold: minus the Black-Scholes delta of the book.
    :param gamma: ``[B]`` Black-Scholes gamma of the book.
    :param pnl: ``[B]`` sum of the rewards so far.
    :param alive: ``[B, L]`` False for legs that have been knocked out or settled.
    """

    date: NDArray[np.int64]
    spot: Floats
    variance: Floats
    holding: Floats
    hedge: Floats
    gamma: Floats
    pnl: Floats
    alive: NDArray[np.bool_]
