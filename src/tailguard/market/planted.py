"""Markets with a planted edge: daily OHLCV whose next return is partly predictable, with the best prediction known.

Close-to-close log returns are r_{t+1} = m_t + sigma_{t+1} e_{t+1}: m_t is what the bars up to t say about the next return (the
edge, a family of its own each), sigma follows a stochastic volatility, and e is Student-t. A share of each return, of its mean
and of its variance, falls overnight. Whoever decides at the close of t trades at the next open and earns until the open after
it, so the conditional mean of what can be earned is

    E_t[open_{t+2} / open_{t+1}] ~ (1 - share) m_t + share E_t[m_{t+1}],

which `PlantedMarket.expected` holds. An oracle that trades it is the most that any agent can reach.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.jit import decorators
from tailguard.market.relevance import fill_returns
from tailguard.validation import require

compiled, _ = decorators()

Floats = NDArray[np.float64]
Family = Literal["ar", "lag", "volume", "reversion", "drift", "volatility", "weekday", "lead_lag", "ending", "none"]
FAMILIES: tuple[Family, ...] = get_args(Family)

OVERNIGHT = 0.25  # share of a day's mean and variance between close and open
DAILY_VOLATILITY = 0.011
LOG_VOLATILITY_PERSISTENCE, LOG_VOLATILITY_NOISE = 0.97, 0.09
DEGREES_OF_FREEDOM = 5.0
BARS_PER_YEAR = 252.0
CALIBRATION_BARS, CALIBRATION_SEED = 60_000, 987_654_321
LAG = 7  # of the family `lag`: between the look-backs of the default features, so that only a recurrent policy can read it
DRIFT_PERSISTENCE, VOLUME_PERSISTENCE, REVERSION = 0.97, 0.6, 0.08
CALM, STAY = 0.55, 0.985  # regimes of volatility: that of the calm one, and the chance to stay in either
WEEKDAYS = np.array([-1.0, 0.4, 0.0, -0.4, 1.0])
ENDS_AT = 0.7  # the share of the bars after which the edge of the family `ending` is gone


@dataclass(frozen=True)
class PlantedMarket:
    """Bars with a planted edge, and what it is.

    :param bars: OHLCV, one symbol, or two for the family ``lead_lag``.
    :param expected: ``[T, assets]`` conditional mean, at the close of t, of the return from the next open to the one after it.
    :param family: of the edge.
    :param strength: scale of the edge; 0 has none.
    """

    bars: pd.DataFrame
    expected: Floats
    family: Family
    strength: float


def planted_market(
    family: Family, n_bars: int, *, sharpe: float = 1.0, fee: float = 0.0005, drift: float = 0.0, seed: int
) -> PlantedMarket:
    """Make bars in which the oracle earns a given Sharpe ratio after costs.

    :param family: what predicts the next return. ``ar``: the last one; ``lag``: that of seven bars ago; ``volume``: unusual
        volume; ``reversion``: the distance from a slow level; ``drift``: a hidden mean that changes slowly; ``volatility``:
        a premium in calm times and a loss in turbulent ones; ``weekday``; ``lead_lag``: the first of two assets leads the
        second; ``ending``: as ``ar``, until it is gone; ``none``.
    :param n_bars: number of bars.
    :param sharpe: annual Sharpe ratio of the oracle after costs on a long path; 0 has no edge.
    :param fee: per side, as a fraction; what the oracle pays.
    :param drift: mean log return per year of every asset beside the edge.
    :param seed: of this draw.
    """
    require(family in FAMILIES, "family", family, f"one of {', '.join(FAMILIES)}")
    require(n_bars >= 100, "n_bars", n_bars, "at least 100")
    require(sharpe >= 0.0, "sharpe", sharpe, "not negative")
    strength = 0.0 if family == "none" or sharpe == 0.0 else _strength(family, sharpe, fee)
    rng = np.random.default_rng([seed, FAMILIES.index(family)])
    path = _draw(family, n_bars, strength, drift, rng)
    index = pd.date_range("2000-01-03", periods=n_bars, freq="B", unit="ns", name="time")  # from a Monday
    tables = [_table(path, k, index, rng) for k in range(path.expected.shape[1])]
    bars = tables[0] if len(tables) == 1 else pd.concat(dict(zip("AB", tables, strict=True)), axis=1)
    return PlantedMarket(bars, path.expected, family, strength)


def oracle_weights(expected: Floats, threshold: float) -> Floats:
    """Return target weights ``[T, assets]``: long or short where the expected return exceeds the threshold, else unchanged.

    :param expected: of :class:`PlantedMarket`.
    :param threshold: expected return below which trading does not pay.
    """
    weights: Floats = _hold(expected, threshold)
    return weights


def open_returns(bars: pd.DataFrame) -> Floats:
    """Return ``[T, assets]`` log returns from the open after each bar to the open after that; 0 for the last two bars."""
    return np.nan_to_num(fill_returns(bars, "next_open"))


def _earned(log_open: Floats) -> Floats:
    earned = np.zeros_like(log_open)
    earned[:-2] = np.diff(log_open[1:], axis=0)
    return earned


def net_sharpe(weights: Floats, earned: Floats, fee: float) -> float:
    """Return the annual Sharpe ratio of target weights that earn `earned`, with a fee on what is traded (no compounding)."""
    traded = np.abs(np.diff(weights, axis=0, prepend=np.zeros((1, weights.shape[1])))).sum(1)
    returns = (weights * earned).sum(1) - fee * traded
    spread = returns.std()
    return float(returns.mean() / spread * np.sqrt(BARS_PER_YEAR)) if spread > 0.0 else 0.0


def best_threshold(expected: Floats, earned: Floats, fee: float) -> float:
    """Return the no-trade threshold that is best in hindsight, from a grid of quantiles of the expected returns."""
    grid = np.unique(np.concatenate(([0.0], np.quantile(np.abs(expected), np.linspace(0.0, 0.99, 60)))))
    return float(max(grid, key=lambda threshold: net_sharpe(oracle_weights(expected, threshold), earned, fee)))


@lru_cache(maxsize=256)
def _strength(family: Family, sharpe: float, fee: float) -> float:
    """Find the strength at which the oracle earns `sharpe` on a long path, by bisection."""
    low, high = 0.0, 4.0
    for _ in range(16):
        middle = 0.5 * (low + high)
        rng = np.random.default_rng([CALIBRATION_SEED, FAMILIES.index(family)])
        path = _draw("ar" if family == "ending" else family, CALIBRATION_BARS, middle, 0.0, rng)
        earned = _earned(np.cumsum(path.overnight + path.intraday, axis=0) - path.intraday)
        reached = net_sharpe(oracle_weights(path.expected, best_threshold(path.expected, earned, fee)), earned, fee)
        low, high = (middle, high) if reached < sharpe else (low, middle)
    return 0.5 * (low + high)


class _Path(NamedTuple):
    """Arrays ``[T, assets]``: the two log returns of each day, its volatility, its log volume, and the expected return."""

    overnight: Floats
    intraday: Floats
    sigma: Floats
    volume: Floats
    expected: Floats


def _draw(family: Family, n_bars: int, strength: float, drift: float, rng: np.random.Generator) -> _Path:
    assets = 2 if family == "lead_lag" else 1
    active = np.ones(n_bars)
    if family == "ending":
        active[round(ENDS_AT * n_bars) :] = 0.0
    sigma = np.stack([_volatility(family, n_bars, rng) for _ in range(assets)], axis=1)
    noise = rng.standard_t(DEGREES_OF_FREEDOM, (2, n_bars, assets)) / np.sqrt(DEGREES_OF_FREEDOM / (DEGREES_OF_FREEDOM - 2.0))
    shocks = rng.standard_normal((n_bars, assets))
    kind = FAMILIES.index("ar" if family == "ending" else family)
    days = np.arange(n_bars) % 5
    overnight, intraday, volume, expected = _simulate(
        kind, strength, drift / BARS_PER_YEAR, sigma, noise, shocks, active, days, WEEKDAYS
    )
    return _Path(overnight, intraday, sigma, volume, expected)


def _volatility(family: Family, n_bars: int, rng: np.random.Generator) -> Floats:
    """Daily volatility: an AR(1) of its logarithm; in the family ``volatility`` two regimes."""
    if family == "volatility":
        moves = rng.random(n_bars) > STAY
        turbulent = (np.cumsum(moves) + rng.integers(2)) % 2
        return np.asarray(DAILY_VOLATILITY * np.where(turbulent == 1, 1.0 / CALM, CALM), dtype=np.float64)
    noise = LOG_VOLATILITY_NOISE * rng.standard_normal(n_bars)
    noise[0] /= np.sqrt(1.0 - LOG_VOLATILITY_PERSISTENCE**2)
    logs = _recursion(noise, LOG_VOLATILITY_PERSISTENCE)
    return np.asarray(DAILY_VOLATILITY * np.exp(logs), dtype=np.float64)


@compiled
def _hold(expected: Any, threshold: float) -> Any:
    """1 / assets times the sign of the last expected return beyond the threshold."""
    n_bars, assets = expected.shape
    weights = np.zeros((n_bars, assets))
    for k in range(assets):
        held = 0.0
        for t in range(n_bars):
            if abs(expected[t, k]) > threshold:
                held = np.sign(expected[t, k]) / assets
            weights[t, k] = held
    return weights


@compiled
def _recursion(noise: Any, persistence: float) -> Any:
    """x_t = persistence x_{t-1} + noise_t."""
    values = noise.copy()
    for t in range(1, len(noise)):
        values[t] += persistence * values[t - 1]
    return values


@compiled
def _simulate(
    kind: int, strength: float, drift: float, sigmas: Any, noise: Any, shocks: Any, active: Any, days: Any, weekdays: Any
) -> Any:
    """Overnight and intraday log returns, log volume, and the expected return of each decision, ``[T, assets]`` each."""
    n_bars, assets = sigmas.shape
    overnight, intraday, expected = np.zeros((n_bars, assets)), np.zeros((n_bars, assets)), np.zeros((n_bars, assets))
    volume, surprises = np.zeros((n_bars, assets)), np.zeros((n_bars, assets))
    mean, level, hidden = np.zeros(assets), np.zeros(assets), np.zeros(assets)
    belief, variance = 0.0, 0.0
    step = strength * 0.011 * np.sqrt(1.0 - DRIFT_PERSISTENCE**2)  # of the hidden drift
    for t in range(n_bars):
        following = np.zeros(assets)  # E_t of the mean after the next one
        for k in range(assets):
            s = sigmas[t, k]
            total = mean[k] + drift - 0.5 * s * s
            overnight[t, k] = OVERNIGHT * total + np.sqrt(OVERNIGHT) * s * noise[0, t, k]
            intraday[t, k] = (1.0 - OVERNIGHT) * total + np.sqrt(1.0 - OVERNIGHT) * s * noise[1, t, k]
            surprises[t, k] = overnight[t, k] + intraday[t, k] - drift + 0.5 * s * s
            volume[t, k] = VOLUME_PERSISTENCE * (volume[t - 1, k] if t else 0.0) + shocks[t, k] * 0.8
        surprise = surprises[t, 0]
        scale = active[t] * strength
        if kind == 0:  # ar
            mean[0] = 0.2 * scale * surprise
            following[0] = 0.2 * scale * mean[0]
        elif kind == 1:  # lag
            mean[0] = 0.2 * scale * surprises[t - LAG + 1, 0] if t >= LAG else 0.0
            following[0] = 0.2 * scale * surprises[t - LAG + 2, 0] if t >= LAG else 0.0
        elif kind == 2:  # volume
            mean[0] = 0.002 * scale * volume[t, 0]
            following[0] = VOLUME_PERSISTENCE * mean[0]
        elif kind == 3:  # reversion: a stationary deviation from a level that is the cumulated rest of the returns
            level[0] = (1.0 - REVERSION) * level[0] + surprise - mean[0]
            mean[0] = -REVERSION * scale * level[0]
            following[0] = (1.0 - REVERSION) * mean[0]
        elif kind == 4:  # drift: the belief of a Kalman filter that knows the volatilities
            s = sigmas[t, 0]
            variance = DRIFT_PERSISTENCE**2 * variance + step * step if t else step * step / (1.0 - DRIFT_PERSISTENCE**2)
            gain = variance / (variance + s * s)
            belief = belief + gain * (surprise - belief)
            variance = (1.0 - gain) * variance
            hidden[0] = DRIFT_PERSISTENCE * hidden[0] + step * shocks[t, 0]
            belief = DRIFT_PERSISTENCE * belief
            mean[0] = hidden[0]
            following[0] = DRIFT_PERSISTENCE * belief
        elif kind == 5:  # volatility: of the next bar, which is that of this one but for the rare changes
            stays = 1.0 if sigmas[t, 0] < 0.011 else -1.0
            ahead = sigmas[min(t + 1, n_bars - 1), 0]
            mean[0] = 0.001 * strength * (1.0 if ahead < 0.011 else -1.0)
            following[0] = 0.001 * strength * stays * (2.0 * STAY - 1.0) ** 2
        elif kind == 6:  # weekday
            mean[0] = 0.002 * scale * weekdays[(days[t] + 1) % 5]
            following[0] = 0.002 * scale * weekdays[(days[t] + 2) % 5]
        elif kind == 7:  # lead_lag
            mean[1] = 0.2 * scale * surprise
        for k in range(assets):
            known = mean[k]
            if kind == 4:
                known = belief
            elif kind == 5:
                known = 0.001 * strength * (1.0 if sigmas[t, 0] < 0.011 else -1.0) * (2.0 * STAY - 1.0)
            expected[t, k] = drift + (1.0 - OVERNIGHT) * known + OVERNIGHT * following[k]
    return overnight, intraday, volume, expected


def _table(path: _Path, asset: int, index: pd.DatetimeIndex, rng: np.random.Generator) -> pd.DataFrame:
    """Make bars from the two parts of each return; extremes are those of a Brownian motion pinned at open and close."""
    overnight, intraday, sigma, volume = (part[:, asset] for part in path[:4])
    log_close = np.log(100.0) + np.cumsum(overnight + intraday)
    log_open = log_close - intraday
    middle, spread = 0.5 * (log_open + log_close), 2.0 * (1.0 - OVERNIGHT) * sigma**2
    high = middle + 0.5 * np.sqrt(intraday**2 + spread * rng.standard_exponential(len(sigma)))
    low = middle - 0.5 * np.sqrt(intraday**2 + spread * rng.standard_exponential(len(sigma)))
    opens, close = np.exp(log_open), np.exp(log_close)
    return pd.DataFrame(
        {
            "open": opens,
            "high": np.maximum(np.exp(high), np.maximum(opens, close)),
            "low": np.minimum(np.exp(low), np.minimum(opens, close)),
            "close": close,
            "volume": 1e6 * np.exp(0.3 * volume + 8.0 * np.abs(intraday)),
        },
        index=index,
    )
