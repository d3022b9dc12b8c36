"""Plant an edge of known strength into anybody's bars, from which every other edge is removed.

The moves of the bars, without their mean, are permuted in blocks, which keeps their sizes and the clusters of volatility, and
each bar gets a random sign, which leaves nothing that predicts a direction. Then the next return is made to depend on the last,

    r_{t+1} = noise_{t+1} + rho r_t.

A share s of a return's variance falls overnight, and the same share of its mean. Whoever decides at the close of t trades at
the next open and earns until the open after it: (1 - s) rho r_t + s rho^2 r_t on average, which an oracle knows.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.market.bars import periods_per_year, symbols_of
from tailguard.market.planted import BARS_PER_YEAR, best_threshold, net_sharpe, open_returns, oracle_weights
from tailguard.validation import require

Floats = NDArray[np.float64]
BLOCK = 20  # bars that stay together in a permutation
CALIBRATIONS = 8  # permutations over which the strength is found
STRONGEST = 0.95
FEWEST_BARS = 100


@dataclass(frozen=True, eq=False)
class PlantedBars:
    """Bars with a planted edge.

    :param bars: OHLCV on the times of the original.
    :param expected: ``[T, 1]`` expected log return from the open after each close to the open after that one.
    :param rho: dependence of a return on the one before.
    :param threshold: expected return below which trading does not pay, for the oracle.
    """

    bars: pd.DataFrame
    expected: Floats
    rho: float
    threshold: float

    @property
    def oracle(self) -> Floats:
        """The target weights ``[T, 1]`` of somebody who knows the edge."""
        return oracle_weights(self.expected, self.threshold)


def plant_edge(bars: pd.DataFrame, sharpe: float, *, fee: float, seed: int = 0) -> PlantedBars:
    """Return bars in which nothing but a planted edge predicts the next return.

    :param bars: one symbol, from :func:`tailguard.market.load_bars`.
    :param sharpe: annual Sharpe ratio of the oracle after costs, on average over permutations; 0 plants nothing.
    :param fee: per side, as a fraction; what the oracle pays.
    :param seed: of the permutation and the signs.
    :raises ValueError: if costs are too high for so strong an edge.
    """
    require(symbols_of(bars) == [""], "the symbols", symbols_of(bars), "one: an edge is planted into one series at a time")
    require(len(bars) >= FEWEST_BARS, "the number of bars", len(bars), f"at least {FEWEST_BARS}")
    require(sharpe >= 0.0, "sharpe", sharpe, "not negative")
    rho, threshold = _calibrated(bars, sharpe, fee)
    table, expected = _planted(bars, rho, np.random.default_rng(seed))
    return PlantedBars(table, expected, rho, threshold)


def _calibrated(bars: pd.DataFrame, sharpe: float, fee: float) -> tuple[float, float]:
    """Find the dependence at which the oracle reaches an annual Sharpe ratio, and its threshold."""
    years = math.sqrt(periods_per_year(pd.DatetimeIndex(bars.index)) / BARS_PER_YEAR)

    def reached(rho: float) -> tuple[float, float]:
        draws = [_planted(bars, rho, np.random.default_rng([seed, 1])) for seed in range(CALIBRATIONS)]
        expected = np.concatenate([known for _, known in draws])
        earned = np.concatenate([open_returns(table) for table, _ in draws])
        threshold = best_threshold(expected, earned, fee)
        return years * net_sharpe(oracle_weights(expected, threshold), earned, fee), threshold

    if sharpe == 0.0:
        return 0.0, 0.0
    most = reached(STRONGEST)[0]
    require(most >= sharpe, "sharpe", sharpe, f"at most {most:.2f} here: costs of {fee:g} per side eat what is stronger")
    low, high = 0.0, STRONGEST
    for _ in range(12):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if reached(middle)[0] < sharpe else (low, middle)
    return high, reached(high)[1]


def _planted(bars: pd.DataFrame, rho: float, rng: np.random.Generator) -> tuple[pd.DataFrame, Floats]:
    """Return permuted bars with a dependence, and the expected return of each decision ``[T, 1]``."""
    prices = np.log(bars[["open", "high", "low", "close"]].to_numpy(dtype=np.float64))
    opens, highs, lows, closes = prices.T
    overnight, intraday = opens[1:] - closes[:-1], (closes - opens)[1:]
    share = float(overnight.var() / max(overnight.var() + intraday.var(), 1e-300))
    up, down = (highs - np.maximum(opens, closes))[1:], (np.minimum(opens, closes) - lows)[1:]
    order = _blocks(len(overnight), rng)
    signs = rng.choice([-1.0, 1.0], len(order))
    gap, move = signs * (overnight - overnight.mean())[order], signs * (intraday - intraday.mean())[order]
    up, down = np.where(signs > 0.0, up[order], down[order]), np.where(signs > 0.0, down[order], up[order])
    surprises = np.empty(len(order))
    last = 0.0
    for t in range(len(order)):
        gap[t] += share * rho * last
        move[t] += (1.0 - share) * rho * last
        last = surprises[t] = gap[t] + move[t]
    close = closes[0] + np.cumsum(gap + move)
    opened = close - move
    high, low = np.maximum(opened, close) + up, np.minimum(opened, close) - down
    volume = bars["volume"].to_numpy(dtype=np.float64)
    table = pd.DataFrame(
        np.concatenate([np.exp(prices[:1]), np.exp(np.stack([opened, high, low, close], axis=1))]),
        index=bars.index,
        columns=["open", "high", "low", "close"],
    ).assign(volume=np.concatenate([volume[:1], volume[1:][order]]))
    known = np.concatenate([[0.0], surprises])
    return table, (((1.0 - share) * rho + share * rho**2) * known)[:, None]


def _blocks(n: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return a permutation of n rows in which blocks stay together."""
    rotated = (np.arange(n) + rng.integers(n)) % n
    blocks = [rotated[first : first + BLOCK] for first in range(0, n, BLOCK)]
    return np.concatenate([blocks[i] for i in rng.permutation(len(blocks))])
