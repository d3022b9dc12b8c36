"""Causality: features, environments, simulations and impact up to bar t do not change when later bars do."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import get_args

import numpy as np
import pandas as pd
import pytest

from tailguard.market import FeatureConfig, TradingEnv, TradingRules, align_bars, build_features, load_dataset, simulate
from tailguard.market.accounting import bar_array
from tailguard.market.bars import symbols_of
from tailguard.market.kernel import IMPACT
from tailguard.market.rules import Fill
from tailguard.market.synthetic import random_walk

ROWS = 420
QUICK = FeatureConfig(
    horizons=(1, 3), volatility_window=3, slow_window=4, drawdown_window=30, rsi=3, macd=(2, 4, 2), atr=3, bollinger=3, cci=3
)
CONFIGS = {"default": FeatureConfig(), "quick": QUICK}

GARBAGE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tenfold": lambda bars: 10.0 * bars,
    "nan": lambda bars: np.full_like(bars, np.nan),
    "reversed": lambda bars: bars[::-1, ::-1],  # in time and in columns: the volume is the open now
    "negative": lambda bars: -bars,
}
every_garbage = pytest.mark.parametrize("garbage", GARBAGE)
every_fill = pytest.mark.parametrize("fill", get_args(Fill))


@cache
def table(name: str) -> pd.DataFrame:
    """A few hundred bars; ``stocks`` has three symbols, one that starts late and all with bars missing."""
    if name != "stocks":
        return load_dataset(name).iloc[2000 : 2000 + ROWS]
    rng = np.random.default_rng(0)
    stocks = {name: load_dataset(name).iloc[:ROWS] for name in ("aapl-1d", "ibm-1d", "msft-1d")}
    stocks["ibm-1d"] = stocks["ibm-1d"].iloc[90:]
    return align_bars({one: bars[rng.random(len(bars)) > 0.05] for one, bars in stocks.items()})


every_table = pytest.mark.parametrize("name", ["nasdaq-1d", "btcusd-1h", "eurusd-1h", "stocks"])


def with_garbage_after(bars: pd.DataFrame, t: int, garbage: str) -> pd.DataFrame:
    changed = bars.copy()
    changed.iloc[t + 1 :] = GARBAGE[garbage](bars.iloc[t + 1 :].to_numpy())
    assert not changed.iloc[t + 1 :].equals(bars.iloc[t + 1 :])
    return changed


def differing(one: np.ndarray, other: np.ndarray, names: tuple[str, ...]) -> list[str]:
    """The names of the columns that are not the same to the last bit."""
    assert one.shape == other.shape
    assert one.dtype == other.dtype == np.float32
    bits, other_bits = np.ascontiguousarray(one).view(np.uint32), np.ascontiguousarray(other).view(np.uint32)
    return [name for name, same in zip(names, (bits == other_bits).all(axis=0), strict=True) if not same]


def decisions(bars: pd.DataFrame, scale: float = 1.0) -> np.ndarray:
    """Target weights for every bar whose gross exposure stays below `scale`."""
    assets = len(symbols_of(bars))
    return np.random.default_rng(1).uniform(-scale / assets, scale / assets, (len(bars), assets))


# Features.


@every_table
@every_garbage
@pytest.mark.parametrize("config", CONFIGS)
def test_no_feature_up_to_t_changes_when_later_bars_do(name: str, garbage: str, config: str) -> None:
    bars = table(name)
    features = build_features(bars, CONFIGS[config])
    assert features.warmup < 200
    for t in (12, 70, 200, 333, len(bars) - 2):
        changed = build_features(with_garbage_after(bars, t, garbage), CONFIGS[config])
        assert differing(changed.values[: t + 1], features.values[: t + 1], features.names) == []


@every_table
@pytest.mark.parametrize("config", CONFIGS)
def test_the_last_row_of_a_prefix_is_the_row_of_the_whole(name: str, config: str) -> None:
    bars = table(name)
    features = build_features(bars, CONFIGS[config])
    for t in (0, 1, 2, 3, 4, 5, 11, 62, 63, 64, 90, 161, 162, 163, 250, 251, 252, 300, len(bars) - 1):
        prefix = build_features(bars.iloc[: t + 1], CONFIGS[config])
        assert prefix.names == features.names
        assert prefix.warmup == min(features.warmup, t + 1)
        assert differing(prefix.values[-1:], features.values[t : t + 1], features.names) == [], t


def test_a_feature_that_looks_ahead_would_be_found() -> None:
    bars = table("nasdaq-1d")
    t = 200
    changed = with_garbage_after(bars, t, "tenfold")

    def leaky(source: pd.DataFrame) -> np.ndarray:
        close = source["close"]
        columns = {"causal": close.diff(), "ahead": close.shift(-1), "whole": close / close.mean()}
        return pd.DataFrame(columns).to_numpy(np.float32)[1 : t + 1]

    assert differing(leaky(changed), leaky(bars), ("causal", "ahead", "whole")) == ["ahead", "whole"]


# Environments and simulations.

COSTS = {
    "fee": 0.001, "half_spread": 0.0005, "impact": 1.0, "participation": 0.1, "borrow_rate": 0.05, "cash_rate": 0.01,
    "loan_rate": 0.06, "maintenance_margin": 0.2, "cash": 1e5,
}  # fmt: skip


def play(bars: pd.DataFrame, fill: str, until: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Observations, rewards and equities of a fixed sequence of actions, from the first usable bar to bar `until`."""
    impact = 1.0 if len(symbols_of(bars)) == 1 else 0.0
    env = TradingEnv(bars, features=build_features(bars, QUICK), leverage=2.0, fill=fill, **COSTS | {"impact": impact})
    obs, info = env.reset(seed=0)
    observations, rewards, equities = [obs], [0.0], [info["equity"]]
    for action in decisions(bars)[info["row"] : until]:
        obs, reward, terminated, _, info = env.step(action)
        observations.append(obs)
        rewards.append(reward)
        equities.append(info["equity"])
        assert not terminated
    assert info["row"] == until
    return np.array(observations), np.array(rewards), np.array(equities)


@every_fill
@every_garbage
@pytest.mark.parametrize("name", ["nasdaq-1d", "btcusd-1h", "stocks"])
def test_what_an_environment_showed_up_to_t_does_not_change_when_later_bars_do(name: str, garbage: str, fill: str) -> None:
    bars = table(name)
    for t in (130, 250):
        seen, changed = play(bars, fill, t), play(with_garbage_after(bars, t, garbage), fill, t)
        assert [part.tobytes() for part in changed] == [part.tobytes() for part in seen]
        assert np.ptp(seen[2]) > 0.0


@every_fill
@every_garbage
@pytest.mark.parametrize("name", ["nasdaq-1d", "btcusd-1h"])
def test_what_a_simulation_did_up_to_t_does_not_change_when_later_bars_do(name: str, garbage: str, fill: str) -> None:
    bars = table(name)
    weights = decisions(bars, 2.0)
    for t in (1, 40, 250):
        done = simulate(bars, weights, fill=fill, **COSTS)
        changed = simulate(with_garbage_after(bars, t, garbage), weights, fill=fill, **COSTS)
        for field in done._fields[:-1]:
            assert getattr(changed, field)[: t + 1].tobytes() == getattr(done, field)[: t + 1].tobytes(), field
        assert done.turnover[: t + 1].any()


@every_garbage
def test_a_simulation_of_several_symbols_does_not_change_when_later_bars_do(garbage: str) -> None:
    bars = table("stocks")
    costs = COSTS | {"impact": 0.0}
    done = simulate(bars, decisions(bars, 2.0), **costs)
    for t in (40, 95, 250):
        changed = simulate(with_garbage_after(bars, t, garbage), decisions(bars, 2.0), **costs)
        assert changed.equity[: t + 1].tobytes() == done.equity[: t + 1].tobytes()
        assert changed.units[: t + 1].tobytes() == done.units[: t + 1].tobytes()


@every_table
@every_garbage
def test_the_impact_of_a_fill_depends_on_bars_before_it_only(name: str, garbage: str) -> None:
    bars = table(name)
    rules = TradingRules(impact=1.0, impact_window=10)
    coefficients = bar_array(bars, rules)[:, :, IMPACT]
    for t in (95, 100, 300):
        changed = bar_array(with_garbage_after(bars, t, garbage), rules)[:, :, IMPACT]
        assert changed[: t + 2].tobytes() == coefficients[: t + 2].tobytes()
    assert (coefficients[200:] > 0.0).all()
    assert np.isfinite(coefficients).all()


def test_the_impact_of_a_fill_does_depend_on_the_bar_before_it() -> None:
    bars = table("btcusd-1h")
    rules = TradingRules(impact=1.0, impact_window=10)
    before, after = (bar_array(table, rules)[:, 0, IMPACT] for table in (bars, with_garbage_after(bars, 100, "tenfold")))
    assert before[101] == after[101]
    assert before[102] != after[102]


# Skill: none on a random walk without the future, plenty with it.

VOLATILITY = 0.01
BARS = 1500


def log_growth(bars: pd.DataFrame, weights: np.ndarray, fill: str) -> float:
    return float(np.log(simulate(bars, weights, fee=0.0, fill=fill).equity[-1]))


def total_reward(env: TradingEnv, agent: Callable[[np.ndarray], np.ndarray]) -> float:
    obs, _ = env.reset(seed=0)
    total, over = 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(agent(obs))
        total += reward
        over = terminated or truncated
    return total


def handed_the_future(bars: pd.DataFrame, fill: str) -> np.ndarray:
    """The sign of the return that a position decided at the close of t and changed one bar later will earn."""
    if fill == "next_open":
        return np.sign(np.log(bars["close"] / bars["open"]).shift(-1).fillna(0.0).to_numpy())
    ahead = {"close": -1, "next_close": -2}[fill]
    return np.sign(np.log(bars["close"]).diff().shift(ahead).fillna(0.0).to_numpy())


@every_fill
def test_who_is_handed_the_next_return_gets_rich(fill: str) -> None:
    bars = random_walk(BARS, volatility=VOLATILITY, seed=0)
    assert log_growth(bars, handed_the_future(bars, fill), fill) > 0.4 * VOLATILITY * BARS


@every_fill
def test_who_is_handed_it_when_it_is_past_does_not_get_rich(fill: str) -> None:
    late = 2 if fill == "next_close" else 1
    growths = []
    for seed in range(10):
        bars = random_walk(BARS, volatility=VOLATILITY, seed=seed)
        growths.append(log_growth(bars, np.roll(handed_the_future(bars, fill), late), fill))
    assert abs(np.mean(growths)) < 4.0 * VOLATILITY * np.sqrt(BARS / 10)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@every_fill
def test_an_agent_that_acts_on_the_last_observed_return_does_not_get_rich_on_a_random_walk(sign: float, fill: str) -> None:
    growths = []
    for seed in range(5):
        bars = random_walk(BARS, volatility=VOLATILITY, seed=seed)
        features = build_features(bars, QUICK)
        assert features.names[0] == "return_1"
        env = TradingEnv(bars, features=features, fee=0.0, fill=fill)
        growths.append(total_reward(env, lambda obs: sign * np.sign(obs[:1])))
    assert abs(np.mean(growths)) < 4.0 * VOLATILITY * np.sqrt(BARS / 5)


def test_an_agent_with_tomorrow_in_its_observation_would_get_rich() -> None:
    bars = random_walk(BARS, volatility=VOLATILITY, seed=0)
    honest = build_features(bars, QUICK)
    leaked = honest.values.copy()
    leaked[:-1, 0] = handed_the_future(bars, "next_open")[:-1]
    env = TradingEnv(bars, features=replace(honest, values=leaked), fee=0.0)
    assert total_reward(env, lambda obs: obs[:1]) > 0.4 * VOLATILITY * BARS
