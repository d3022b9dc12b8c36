"""The series and positions of `tail.py`: shipped data, their halves and portfolios, and markets drawn from known processes.

Synthetic bars are Brownian paths of 12 steps, each bar with its own volatility, so that open, high, low and close belong
together; a fifth of a bar's variance falls between the close before and the open.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.market import align_bars, load_dataset

Floats = NDArray[np.float64]
STEPS, OVERNIGHT = 12, 0.2
BARS = 4000


def bars_from(volatility: Floats, drift: Floats, jumps: Floats, rng: np.random.Generator) -> pd.DataFrame:
    """Draw bars on weekdays from the volatility, drift and jump (at the open) of each."""
    n = len(volatility)
    gap = np.sqrt(OVERNIGHT) * volatility * rng.standard_normal(n) + OVERNIGHT * drift + jumps
    moves = rng.standard_normal((n, STEPS)) * (np.sqrt((1 - OVERNIGHT) / STEPS) * volatility)[:, None]
    paths = np.cumsum(moves + ((1 - OVERNIGHT) * drift / STEPS)[:, None], axis=1)
    return bars_along(paths, gap, pd.bdate_range("1995-01-02", periods=n, name="time"))


def bars_along(paths: Floats, gaps: Floats, times: pd.DatetimeIndex) -> pd.DataFrame:
    """Return bars whose log prices move along a path ``[n, STEPS]`` each, after a gap from the close before."""
    log_close = np.log(100.0) + np.cumsum(gaps + paths[:, -1])
    log_open = log_close - paths[:, -1]
    inside = np.concatenate([np.zeros((len(paths), 1)), paths], axis=1)
    columns = {
        "open": np.exp(log_open),
        "high": np.exp(log_open + inside.max(axis=1)),
        "low": np.exp(log_open + inside.min(axis=1)),
        "close": np.exp(log_close),
        "volume": np.full(len(paths), 1e6),
    }
    return pd.DataFrame(columns, times)


def garch(seed: int, n: int = BARS, leverage: float = 0.0) -> pd.DataFrame:
    """Draw GARCH(1,1) with Student-t(5) shocks, or GJR-GARCH with a leverage effect."""
    rng = np.random.default_rng([1, seed])
    mixing = np.sqrt(3.0 / rng.chisquare(5, n))
    shocks = rng.standard_normal(n)
    volatility, variance = np.empty(n), 1.5e-4
    for t in range(n):
        volatility[t] = np.sqrt(variance)
        square = variance * (shocks[t] * mixing[t]) ** 2
        asymmetry = leverage * (2.0 if shocks[t] < 0 else 0.0)
        variance = 1.5e-6 + (0.09 * (1 - leverage) + 0.09 * asymmetry) * square + 0.90 * variance
    # The sign and size of the day's move drive the variance, so the path of the day is that of the shock itself.
    return _bars_of_returns(volatility * mixing * shocks, volatility * mixing, rng)


def _bars_of_returns(returns: Floats, volatility: Floats, rng: np.random.Generator) -> pd.DataFrame:
    """Draw bars whose close-to-close log returns are given: the path inside a bar is a Brownian bridge."""
    n = len(returns)
    times = np.concatenate([[OVERNIGHT], OVERNIGHT + (1 - OVERNIGHT) * np.arange(1, STEPS + 1) / STEPS])
    steps = rng.standard_normal((n, STEPS + 1)) * np.sqrt(np.diff(times, prepend=0.0)) * volatility[:, None]
    walk = np.cumsum(steps, axis=1)
    walk += times * (returns + 0.0004 - walk[:, -1])[:, None]
    log_close = np.log(100.0) + np.cumsum(walk[:, -1])
    before = log_close - walk[:, -1]
    columns = {
        "open": np.exp(before + walk[:, 0]),
        "high": np.exp(before + walk.max(axis=1)),
        "low": np.exp(before + walk.min(axis=1)),
        "close": np.exp(log_close),
        "volume": np.full(n, 1e6),
    }
    return pd.DataFrame(columns, pd.bdate_range("1995-01-02", periods=n, name="time"))


def stochastic_volatility(seed: int, n: int = BARS) -> pd.DataFrame:
    """Draw log volatility as an AR(1) whose shocks are correlated -0.5 with those of the price."""
    rng = np.random.default_rng([2, seed])
    level, volatility, shocks = 0.0, np.empty(n), rng.standard_normal(n)
    for t in range(n):
        volatility[t] = 0.011 * np.exp(level)
        level = 0.98 * level + 0.12 * (-0.5 * shocks[t] + np.sqrt(0.75) * rng.standard_normal())
    return _bars_of_returns(volatility * shocks, volatility, rng)


def regimes(seed: int, n: int = BARS) -> pd.DataFrame:
    """Draw calm and turbulent regimes of about 250 and 60 bars; the turbulent one falls."""
    rng = np.random.default_rng([3, seed])
    turbulent = _markov(rng, n, 1 / 250, 1 / 60)
    return bars_from(np.where(turbulent, 0.025, 0.008), np.where(turbulent, -0.001, 0.0007), np.zeros(n), rng)


def jumps(seed: int, n: int = BARS) -> pd.DataFrame:
    """Draw a calm walk with four jumps a year, of 5 % on average and mostly down."""
    rng = np.random.default_rng([4, seed])
    jump = (rng.random(n) < 4 / 252) * rng.normal(-0.02, 0.04, n)
    return bars_from(np.full(n, 0.009), np.full(n, 0.0006), jump, rng)


def crashes(seed: int, n: int = BARS) -> pd.DataFrame:
    """Draw a rising market with crashes of 8 % that come in a fragile state, which is seen in the volatility."""
    rng = np.random.default_rng([5, seed])
    fragile = _markov(rng, n, 1 / 150, 1 / 40)
    crash = np.where(fragile & (rng.random(n) < 0.03), -rng.gamma(4.0, 0.02, n), 0.0)
    return bars_from(np.where(fragile, 0.016, 0.008), np.where(fragile, 0.0015, 0.0008), crash, rng)


def walk(seed: int, n: int = BARS) -> pd.DataFrame:
    """Draw a random walk of constant volatility."""
    rng = np.random.default_rng([6, seed])
    return bars_from(np.full(n, 0.012), np.full(n, 0.0003), np.zeros(n), rng)


def _markov(rng: np.random.Generator, n: int, enter: float, leave: float) -> NDArray[np.bool_]:
    draws, state, states = rng.random(n), False, np.empty(n, np.bool_)
    for t in range(n):
        state = draws[t] >= leave if state else draws[t] < enter
        states[t] = state
    return states


def portfolio(seed: int, n: int = BARS) -> pd.DataFrame:
    """Draw three correlated assets with common stochastic volatility."""
    rng = np.random.default_rng([7, seed])
    level, market = 0.0, rng.standard_normal(n)
    volatility = np.empty(n)
    for t in range(n):
        volatility[t] = 0.012 * np.exp(level)
        level = 0.98 * level + 0.12 * (-0.4 * market[t] + np.sqrt(0.84) * rng.standard_normal())
    tables = {}
    for name, loading, scale in (("A", 0.8, 1.0), ("B", 0.6, 1.5), ("C", 0.1, 0.7)):
        shocks = loading * market + np.sqrt(1 - loading**2) * rng.standard_normal(n)
        tables[name] = _bars_of_returns(scale * volatility * shocks, scale * volatility, rng)
    return align_bars(tables)


def stocks() -> pd.DataFrame:
    """Load the three shipped stocks as a portfolio."""
    return align_bars({name: load_dataset(f"{name}-1d") for name in ("aapl", "ibm", "msft")})


def real_series() -> dict[str, Callable[[], pd.DataFrame]]:
    """Return the shipped data: each whole, the daily ones also in halves, and three stocks as a portfolio."""
    series: dict[str, Callable[[], pd.DataFrame]] = {}
    for name in ("nasdaq-1d", "aapl-1d", "ibm-1d", "msft-1d", "btcusd-1h", "eurusd-1h"):
        series[name] = lambda name=name: load_dataset(name)
    for name in ("nasdaq-1d", "aapl-1d", "ibm-1d", "msft-1d"):
        series[f"{name} first half"] = lambda name=name: (b := load_dataset(name)).iloc[: len(b) // 2]
        series[f"{name} second half"] = lambda name=name: (b := load_dataset(name)).iloc[len(b) // 2 :]
    series["btcusd-1h daily"] = lambda: daily(load_dataset("btcusd-1h"))
    series["three stocks"] = stocks
    return series


def daily(bars: pd.DataFrame) -> pd.DataFrame:
    """Make daily bars of hourly ones."""
    rules = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
    return bars.resample("1D").agg(rules).dropna()


SYNTHETIC: dict[str, Callable[[int], pd.DataFrame]] = {
    "garch-t": garch,
    "gjr-garch-t": lambda seed: garch(seed, leverage=1.0),
    "stochastic volatility": stochastic_volatility,
    "regimes": regimes,
    "jumps": jumps,
    "crashes": crashes,
    "walk": walk,
    "portfolio": portfolio,
}


def synthetic_series(seeds: tuple[int, ...]) -> dict[str, Callable[[], pd.DataFrame]]:
    """Return every process drawn with every seed."""
    return {f"{name} {seed}": lambda draw=draw, seed=seed: draw(seed) for name, draw in SYNTHETIC.items() for seed in seeds}


# --------------------------------------------------------------------------------------------------------- positions


def _per_asset(bars: pd.DataFrame, weigh: Callable[[pd.Series], Floats]) -> Floats:
    closes = bars["close"].to_frame() if not isinstance(bars.columns, pd.MultiIndex) else bars.xs("close", axis=1, level=1)
    columns = [weigh(closes[name].ffill()) for name in closes]
    return np.stack(columns, axis=1) / len(columns)


def holding(bars: pd.DataFrame) -> Floats:
    """Hold everything, all the time."""
    return _per_asset(bars, lambda close: np.ones(len(close)))


def trend(bars: pd.DataFrame) -> Floats:
    """Be invested above the moving average of 100 bars, else in cash."""
    return _per_asset(bars, lambda close: (close > close.rolling(100, min_periods=1).mean()).to_numpy(float))


def switcher(bars: pd.DataFrame) -> Floats:
    """Change between weights of 0, 1/2 and 1 every fifth bar on average, as an active agent does."""
    rng = np.random.default_rng(9)

    def weigh(close: pd.Series) -> Floats:
        drawn = rng.random(len(close)) < 0.2
        drawn[0] = True
        levels = rng.choice([0.0, 0.5, 1.0], len(close))
        return levels[np.maximum.accumulate(np.where(drawn, np.arange(len(close)), 0))]

    return _per_asset(bars, weigh)


def long_short(bars: pd.DataFrame) -> Floats:
    """Be long after a rise over 20 bars and short after a fall."""
    return _per_asset(bars, lambda close: np.where(close >= close.shift(20).fillna(close.iloc[0]), 1.0, -1.0))


POSITIONS: dict[str, Callable[[pd.DataFrame], Floats]] = {
    "holding": holding,
    "trend": trend,
    "switcher": switcher,
    "long/short": long_short,
}
