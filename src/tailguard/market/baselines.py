"""Baseline strategies. Each is a function from bars to target weights, NaN where it holds.

The weights of bar t use bars up to t only, and are traded under the same accounting as an agent's. With several symbols
each gets its share of the whole, so that a baseline never asks for more than full investment.
"""

import inspect
from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.market.bars import YEAR, iterate_symbols
from tailguard.validation import require

Weights = NDArray[np.float64]
Strategy = Callable[[pd.DataFrame], Weights]


def buy_and_hold(bars: pd.DataFrame) -> Weights:
    """Buy every symbol at its first bar, in equal parts, and never trade again."""

    def weights(close: pd.Series) -> Weights:
        targets = np.full(len(close), np.nan)
        first = close.notna().to_numpy().argmax()
        targets[first] = 1.0
        return targets

    return _share_out(bars, weights)


def constant_mix(bars: pd.DataFrame, weight: float = 0.5) -> Weights:
    """Rebalance to a fixed exposure at every bar.

    :param weight: the exposure, in [-1, 1].
    """
    require(-1.0 <= weight <= 1.0, "weight", weight, "in [-1, 1]")
    return _share_out(bars, lambda close: np.full(len(close), weight))


def equal_weight(bars: pd.DataFrame, every: int = 21) -> Weights:
    """Stay fully invested, with equal parts restored from time to time.

    :param every: bars between two rebalancings.
    """
    require(every >= 1, "every", every, "at least 1")
    return _share_out(bars, lambda close: np.where(np.arange(len(close)) % every == 0, 1.0, np.nan))


def moving_average(bars: pd.DataFrame, fast: int = 50, slow: int = 200) -> Weights:
    """Be invested while the fast moving average of the close is above the slow one, else in cash.

    :param fast: look-back of the fast average, in bars.
    :param slow: look-back of the slow average.
    """
    require(1 <= fast < slow, "fast", fast, f"at least 1 and below slow, which is {slow}")

    def weights(close: pd.Series) -> Weights:
        above = close.rolling(fast).mean() > close.rolling(slow).mean()
        return np.where(close.rolling(slow).count() == slow, above.astype(np.float64), np.nan)

    return _share_out(bars, weights)


def momentum(bars: pd.DataFrame, lookback: int = 252, skip: int = 21) -> Weights:
    """Be long after a rise and short after a fall, leaving out the most recent bars (time-series momentum).

    :param lookback: bars over which the rise is measured.
    :param skip: most recent bars left out.
    """
    require(0 <= skip < lookback, "skip", skip, f"at least 0 and below lookback, which is {lookback}")

    def weights(close: pd.Series) -> Weights:
        rise = close.shift(skip) / close.shift(lookback) - 1.0
        return np.asarray(np.sign(rise.to_numpy(dtype=np.float64)))

    return _share_out(bars, weights)


def volatility_target(bars: pd.DataFrame, target: float = 0.10, window: int = 63, limit: float = 1.0) -> Weights:
    """Hold the weight at which the volatility expected from the recent past equals a target.

    :param target: volatility per year.
    :param window: look-back of the volatility, in bars.
    :param limit: largest weight.
    """
    require(target > 0.0, "target", target, "positive")
    require(window >= 2, "window", window, "at least 2")
    require(0.0 < limit <= 1.0, "limit", limit, "in (0, 1]")

    def weights(close: pd.Series) -> Weights:
        years = (close.index - close.index[0]).to_numpy() / YEAR.to_timedelta64()
        volatility = close.pct_change().rolling(window).std().to_numpy(dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):  # a price that stands still may be held up to the limit
            bars_per_year = np.arange(len(close)) / years  # counted up to each bar, as the agent would have to
            return np.asarray(np.minimum(target / (volatility * np.sqrt(bars_per_year)), limit))

    return _share_out(bars, weights)


def random_positions(bars: pd.DataFrame, turnover: float = 0.1, seed: int = 0) -> Weights:
    """Be fully long or short at random: shows the cost of a given turnover without any skill.

    :param turnover: expected change of the weight per bar; a new side is drawn with this probability.
    :param seed: random seed.
    """
    require(0.0 < turnover <= 1.0, "turnover", turnover, "in (0, 1]")
    generator = np.random.default_rng(seed)

    def weights(close: pd.Series) -> Weights:
        drawn = generator.random(len(close)) < turnover
        drawn[0] = True
        sides = generator.choice([-1.0, 1.0], len(close))
        return sides[np.maximum.accumulate(np.where(drawn, np.arange(len(close)), 0))]

    return _share_out(bars, weights)


STRATEGIES: dict[str, Callable[..., Weights]] = {
    "buy_and_hold": buy_and_hold,
    "constant_mix": constant_mix,
    "equal_weight": equal_weight,
    "moving_average": moving_average,
    "momentum": momentum,
    "volatility_target": volatility_target,
    "random_positions": random_positions,
}


def strategy(name: str, **parameters: float) -> Strategy:
    """Return a baseline by name, with some of its parameters set.

    :raises ValueError: for an unknown name or parameter, listing the known ones.
    """
    if name not in STRATEGIES:
        raise ValueError(f"no strategy named {name!r}; known are {', '.join(STRATEGIES)}")
    function = STRATEGIES[name]
    known = [parameter for parameter in inspect.signature(function).parameters if parameter != "bars"]
    unknown = [parameter for parameter in parameters if parameter not in known]
    if unknown:
        raise ValueError(f"strategy {name} has no parameter {unknown[0]!r}; it takes {', '.join(known) or 'none'}")
    return lambda bars: function(bars, **parameters)


def _share_out(bars: pd.DataFrame, weights: Callable[[pd.Series], Weights]) -> Weights:
    """Return the weights of each symbol on its own bars, divided by the number of symbols; [T] for one, [T, A] for more."""
    columns = []
    for _, table in iterate_symbols(bars):
        close = table["close"].astype(np.float64)
        there = close.notna().to_numpy()
        column = np.full(len(bars), np.nan)
        if there.any():
            column[there] = weights(close[there])
        columns.append(column)
    return columns[0] if len(columns) == 1 else np.stack(columns, axis=1) / len(columns)
