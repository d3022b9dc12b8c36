"""More series for `tail.py`, of other shapes than those of `tail_series.py`: other calendars, other bars, other breaks.

None of the settings of forecast and guard were first chosen on them. `unusual_series` draws each with a seed.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from tail_series import STEPS, bars_along, bars_from, daily, garch

from tailguard.market import align_bars, load_dataset

Floats = NDArray[np.float64]


def path_bars(
    volatility: Floats, drift: Floats, gaps: Floats, times: pd.DatetimeIndex, rng: np.random.Generator
) -> pd.DataFrame:
    """Draw bars from the volatility and drift inside each, and the gap before each."""
    n = len(volatility)
    moves = rng.standard_normal((n, STEPS)) * (volatility / np.sqrt(STEPS))[:, None] + (drift / STEPS)[:, None]
    return bars_along(np.cumsum(moves, axis=1), gaps, times)


def slow_volatility(n: int, rng: np.random.Generator, persistence: float, size: float) -> Floats:
    """Return exp of an AR(1), with a mean square of about 1."""
    level, levels = 0.0, np.empty(n)
    shocks = rng.standard_normal(n) * size * np.sqrt(1 - persistence**2)
    for t in range(n):
        level = persistence * level + shocks[t]
        levels[t] = level
    return np.exp(levels - size**2)


def hourly_crypto(seed: int) -> pd.DataFrame:
    """Every hour of every day; busy afternoons, quiet weekends, fat tails, slow volatility."""
    rng = np.random.default_rng([20, seed])
    n = 24 * 365 * 2
    times = pd.date_range("2021-01-01", periods=n, freq="h", name="time")
    season = (1.0 + 0.5 * np.sin(2 * np.pi * (times.hour.to_numpy() - 8) / 24)) * np.where(times.day_of_week >= 5, 0.7, 1.0)
    mixing = np.sqrt(3.0 / rng.chisquare(5, n))
    volatility = 0.006 * season * slow_volatility(n, rng, 0.998, 0.5) * mixing
    return path_bars(volatility, np.full(n, 3e-5), np.zeros(n), times, rng)


def hourly_fx(seed: int) -> pd.DataFrame:
    """Hours from Sunday night to Friday night, with the sessions of a day and gaps over weekends."""
    rng = np.random.default_rng([21, seed])
    times = pd.date_range("2020-01-05 22:00", periods=24 * 365 * 3, freq="h", name="time")
    hour, day = times.hour.to_numpy(), times.day_of_week.to_numpy()
    closed = (day == 5) | ((day == 4) & (hour >= 22)) | ((day == 6) & (hour < 22))
    times = times[~closed]
    n, hour = len(times), times.hour.to_numpy()
    season = np.where((hour >= 7) & (hour < 17), 1.3, 0.6)
    volatility = 0.0011 * season * slow_volatility(n, rng, 0.995, 0.3)
    weekend = np.append(False, np.diff(times.to_numpy()) > np.timedelta64(2, "h"))
    gaps = np.where(weekend, 0.003 * rng.standard_t(4, n), 0.0)
    return path_bars(volatility, np.zeros(n), gaps, times, rng)


def intraday_stock(seed: int) -> pd.DataFrame:
    """Half hours of a session, U-shaped volatility, large overnight gaps, a holiday now and then."""
    rng = np.random.default_rng([22, seed])
    days = pd.bdate_range("2016-01-04", periods=900)
    days = days[rng.random(len(days)) > 0.03]
    minutes = pd.to_timedelta(14 * 60 + 30 + 30 * np.arange(13), "min")
    times = pd.DatetimeIndex(np.add.outer(days.to_numpy(), minutes.to_numpy()).ravel(), name="time")
    n, place = len(times), np.tile(np.arange(13), len(days))
    daily_level = np.repeat(slow_volatility(len(days), rng, 0.97, 0.4), 13)
    season = 0.7 + 0.8 * ((place - 6) / 6.0) ** 2
    gaps = np.where(place == 0, 0.008 * daily_level * rng.standard_t(4, n) / np.sqrt(2), 0.0)
    return path_bars(0.003 * season * daily_level, np.full(n, 3e-5), gaps, times, rng)


def short_file(seed: int) -> pd.DataFrame:
    """A file of 1,000 daily bars of GARCH."""
    return garch(1000 + seed, n=1000)


def double_volatility(seed: int) -> pd.DataFrame:
    """A calm walk whose volatility is three times as large from the middle on, for good."""
    rng = np.random.default_rng([23, seed])
    n = 3000
    return bars_from(np.where(np.arange(n) < n // 2, 0.006, 0.018), np.full(n, 4e-4), np.zeros(n), rng)


def rough_volatility(seed: int) -> pd.DataFrame:
    """Log volatility of several time scales, as multifractal markets have; drift of the usual size."""
    rng = np.random.default_rng([24, seed])
    n = 4000
    scales = [slow_volatility(n, rng, 1 - 1 / scale, 0.25) for scale in (2, 8, 32, 128, 512, 2000)]
    return bars_from(0.011 * np.prod(scales, axis=0), np.full(n, 4e-4), np.zeros(n), rng)


def student_walk(seed: int) -> pd.DataFrame:
    """Independent returns with three degrees of freedom; the range of a bar says nothing about the next."""
    rng = np.random.default_rng([25, seed])
    n = 3500
    return bars_from(0.007 * np.sqrt(3.0 / rng.chisquare(3, n)), np.full(n, 4e-4), np.zeros(n), rng)


def rare_gaps(seed: int) -> pd.DataFrame:
    """A calm walk that gaps down by a tenth or more once in a year and a half."""
    rng = np.random.default_rng([26, seed])
    n = 4000
    fall = np.where(rng.random(n) < 1 / 380, -0.06 - rng.exponential(0.06, n), 0.0)
    return bars_from(np.full(n, 0.008), np.full(n, 8e-4), fall, rng)


def momentum(seed: int) -> pd.DataFrame:
    """Returns follow slow trends: months are more spread than days let expect."""
    rng = np.random.default_rng([27, seed])
    n = 4000
    drift = 0.0015 * np.log(slow_volatility(n, rng, 0.97, 1.0)) + 0.0015
    return bars_from(np.full(n, 0.009), drift, np.zeros(n), rng)


def mean_reversion(seed: int) -> pd.DataFrame:
    """A price that returns to a slow mean: months are less spread than days let expect."""
    rng = np.random.default_rng([28, seed])
    n = 4000
    noise, before, gaps = np.zeros(n), 0.0, np.empty(n)
    shocks = rng.standard_normal(n) * 0.012
    for t in range(n):
        noise[t] = 0.85 * before + shocks[t]
        gaps[t], before = noise[t] - before, noise[t]
    return bars_from(np.full(n, 0.006), np.full(n, 3e-4), gaps, rng)


def closes_only(seed: int) -> pd.DataFrame:
    """A file of closes: every bar opens, trades and closes at one price."""
    close = garch(2000 + seed, n=3500)["close"]
    return pd.DataFrame({name: close for name in ("open", "high", "low", "close")} | {"volume": 1e6})


def opens_at_close(seed: int) -> pd.DataFrame:
    """Bars that open at the close before, of ranges that are no wider than open and close."""
    close = garch(3000 + seed, n=3500)["close"]
    opened = close.shift(1).fillna(close.iloc[0])
    high, low = np.maximum(opened, close), np.minimum(opened, close)
    return pd.DataFrame({"open": opened, "high": high, "low": low, "close": close, "volume": 1e6})


def penny_stock(seed: int) -> pd.DataFrame:
    """A price of a few ticks: many bars do not move, and a move is at least 2 %."""
    bars = bars_from(np.full(3500, 0.025), np.zeros(3500), np.zeros(3500), np.random.default_rng([29, seed]))
    columns = ["open", "high", "low", "close"]
    prices = (bars[columns] / bars["close"].rolling(400, min_periods=1).mean().to_numpy()[:, None] * 50).round()
    return bars.assign(**{name: prices[name].clip(lower=1.0) / 100 for name in columns})


def halted(seed: int) -> pd.DataFrame:
    """A stock that does not trade for weeks, and jumps when it comes back."""
    rng = np.random.default_rng([30, seed])
    n = 3500
    halt = np.zeros(n, bool)
    for begin in rng.integers(100, n - 60, 12):
        halt[begin : begin + rng.integers(5, 40)] = True
    back = np.append(False, halt[:-1] & ~halt[1:])
    volatility, drift = np.where(halt, 0.0, 0.015), np.where(halt, 0.0, 5e-4)
    return bars_from(volatility, drift, np.where(back, rng.normal(0, 0.05, n), 0.0), rng)


def missing_bars(seed: int) -> pd.DataFrame:
    """Daily bars of which one in twelve is missing, and now and then three weeks."""
    rng = np.random.default_rng([31, seed])
    bars = garch(4000 + seed, n=4000, leverage=1.0)
    keep = rng.random(len(bars)) > 1 / 12
    for begin in rng.integers(0, len(bars) - 20, 8):
        keep[begin : begin + 15] = False
    return bars[keep]


def listed_one_by_one(seed: int) -> pd.DataFrame:
    """Four assets of which two are listed later and one is delisted, with holidays of their own."""
    rng = np.random.default_rng([32, seed])
    n = 3500
    market, level = rng.standard_normal(n), slow_volatility(n, rng, 0.98, 0.4)
    tables = {}
    for k, (name, begin, end) in enumerate((("A", 0, n), ("B", 700, n), ("C", 1500, n), ("D", 0, 2600))):
        shocks = 0.6 * market + 0.8 * rng.standard_normal(n)
        bars = bars_from(0.004 + 0.006 * level, 4e-4 + 0.006 * level * (1 + 0.3 * k) * shocks, np.zeros(n), rng)
        keep = (rng.random(n) > 0.02) & (np.arange(n) >= begin) & (np.arange(n) < end)
        tables[name] = bars[keep]
    return align_bars(tables)


def breaking_correlation(seed: int) -> pd.DataFrame:
    """Three assets that are independent, and fall together in bad phases."""
    rng = np.random.default_rng([33, seed])
    n = 4000
    bad, state = np.empty(n, bool), False
    draws = rng.random(n)
    for t in range(n):
        state = draws[t] > 1 / 40 if state else draws[t] < 1 / 200
        bad[t] = state
    market = rng.standard_normal(n)
    tables = {}
    for name in "XYZ":
        own = rng.standard_normal(n)
        returns = np.where(bad, 0.019 * (0.95 * market + 0.31 * own) - 8e-4, 0.009 * own + 7e-4)
        tables[name] = bars_from(np.full(n, 0.004), returns, np.zeros(n), rng)
    return align_bars(tables)


def blocks_of(name: str, seed: int, block: int, hourly: bool = False) -> pd.DataFrame:
    """Draw blocks of bars of a shipped series, each bar with its gap and range relative to the close before."""
    rng = np.random.default_rng([34, seed])
    bars = load_dataset(name)
    prices = np.log(bars[["open", "high", "low", "close"]].to_numpy())
    relative = prices[1:] - prices[:-1, 3:]
    n = len(relative)
    rows = (rng.integers(0, n, n // block + 1)[:, None] + np.arange(block)).ravel()[:n] % n
    drawn = relative[rows]
    before = np.log(100.0) + np.cumsum(drawn[:, 3]) - drawn[:, 3]
    table = pd.DataFrame(np.exp(before[:, None] + drawn), bars.index[1:], ["open", "high", "low", "close"])
    return daily(table.assign(volume=1e6)) if hourly else table.assign(volume=1e6)


def upside_down(name: str) -> pd.DataFrame:
    """Return a shipped series turned upside down: falls slowly, recovers in jumps."""
    bars = load_dataset(name)
    shift = np.log(bars["close"].iloc[0]) * 2 + 0.0009 * np.arange(len(bars))
    flip = {"open": "open", "high": "low", "low": "high", "close": "close"}
    return pd.DataFrame({new: np.exp(shift - np.log(bars[old])) for new, old in flip.items()} | {"volume": bars["volume"]})


UNUSUAL: dict[str, Callable[[int], pd.DataFrame]] = {
    "hourly crypto": hourly_crypto,
    "hourly fx": hourly_fx,
    "intraday stock": intraday_stock,
    "short file": short_file,
    "double volatility": double_volatility,
    "rough volatility": rough_volatility,
    "student walk": student_walk,
    "rare gaps": rare_gaps,
    "momentum": momentum,
    "mean reversion": mean_reversion,
    "closes only": closes_only,
    "opens at close": opens_at_close,
    "penny stock": penny_stock,
    "halted": halted,
    "missing bars": missing_bars,
    "listed one by one": listed_one_by_one,
    "breaking correlation": breaking_correlation,
    "blocks of nasdaq": lambda seed: blocks_of("nasdaq-1d", seed, 60),
    "blocks of ibm": lambda seed: blocks_of("ibm-1d", seed, 250),
    "blocks of bitcoin": lambda seed: blocks_of("btcusd-1h", seed, 24 * 14, hourly=True),
}


def unusual_series(seeds: tuple[int, ...]) -> dict[str, Callable[[], pd.DataFrame]]:
    """Return every family drawn with every seed, and the shipped daily series upside down."""
    drawn = {f"{name} {seed}": lambda draw=draw, seed=seed: draw(seed) for name, draw in UNUSUAL.items() for seed in seeds}
    turned = {f"{name} upside down": lambda name=name: upside_down(name) for name in ("nasdaq-1d", "ibm-1d")}
    return drawn | turned
