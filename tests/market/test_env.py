"""The trading environments: a batch is its single environments, the account is `simulate`, and every end is told truly."""

import math
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
import torch
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from scipy.stats import chisquare
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.evaluate.play import target_weights
from tailguard.market import (
    BettingGame,
    FeatureSet,
    TradingEnv,
    TradingVecEnv,
    align_bars,
    build_features,
    load_dataset,
    random_walk,
    simulate,
)
from tailguard.market.rules import Fill, TradingSettings
from tailguard.market.volatility import exposure_scale

every_fill = pytest.mark.parametrize("fill", get_args(Fill))


@cache
def table(name: str) -> pd.DataFrame:
    if name == "stocks":
        stocks = {name: load_dataset(name).iloc[:400] for name in ("aapl-1d", "ibm-1d", "msft-1d")}
        stocks["ibm-1d"] = stocks["ibm-1d"].drop(stocks["ibm-1d"].index[[120, 200, 201]])
        return align_bars(stocks)
    return load_dataset(name).iloc[4000:5000] if name == "btcusd-1h" else load_dataset(name).iloc[:400]


@cache
def features_of(name: str) -> FeatureSet:
    return build_features(table(name))


def hand_made(*bars: tuple[float, float, float, float]) -> pd.DataFrame:
    """Bars given as (open, high, low, close)."""
    index = pd.date_range("2020-01-01", periods=len(bars), freq="1D", unit="ns", name="time")
    return pd.DataFrame(bars, columns=["open", "high", "low", "close"], index=index, dtype=float).assign(volume=1e6)


def still(price: float) -> tuple[float, float, float, float]:
    return (price, price, price, price)


def row_numbers(bars: pd.DataFrame) -> FeatureSet:
    """One feature, usable from the first bar on: the number of the row."""
    return FeatureSet(np.arange(len(bars), dtype=np.float32)[:, None], ("row",), pd.DatetimeIndex(bars.index), 0)


def hand_made_env(*bars: tuple[float, float, float, float], **settings: Any) -> TradingEnv:
    frame = hand_made(*bars)
    return TradingEnv(frame, features=row_numbers(frame), **{"fee": 0.0} | settings)


def random_actions(steps: int, size: int, assets: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1.3, 1.3, (steps, size, assets)).astype(np.float32)


def assets_of(bars: pd.DataFrame) -> int:
    return len(bars.columns) // 5


# A batch is its single environments.

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "next open": ("nasdaq-1d", {"episode_length": 25}),
    "close": ("nasdaq-1d", {"episode_length": 25, "fill": "close"}),
    "next close": ("nasdaq-1d", {"episode_length": 25, "fill": "next_close"}),
    "long only": ("nasdaq-1d", {"episode_length": 25, "long_only": True, "leverage": 1.5}),
    "three assets": ("stocks", {"episode_length": 40, "leverage": 2.0}),
    "three assets, long only": ("stocks", {"episode_length": 40, "long_only": True, "fill": "close"}),
    "ruin": ("btcusd-1h", {"episode_length": 50, "leverage": 3.0, "bankruptcy": 0.8}),
    "ruin by margin": ("btcusd-1h", {"episode_length": 50, "leverage": 3.0, "maintenance_margin": 0.32, "fill": "next_close"}),
    "no trade": ("nasdaq-1d", {"episode_length": 25, "no_trade": np.arange(400) % 3 == 0}),
    "all of the data": ("nasdaq-1d", {"span": (0, 110)}),
    "fixed start": ("nasdaq-1d", {"episode_length": 25, "random_start": False}),
    "every cost": (
        "btcusd-1h",
        {
            "episode_length": 30, "impact": 1.0, "participation": 0.01, "cash": 1e6, "half_spread": 1e-4, "borrow_rate": 0.1,
            "loan_rate": 0.1, "cash_rate": 0.02, "leverage": 2.0, "band": 0.05, "sizing": "pre_cost",
        },
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES)


def play_batch(env: TradingVecEnv, actions: np.ndarray) -> tuple[list[np.ndarray], dict[int, list[np.ndarray]]]:
    """Return all observations of each step, and the final observations of each environment."""
    shown, finals = [env.reset()], {index: [] for index in range(env.num_envs)}
    for action in actions:
        step = env.step_arrays(action)
        weights = np.ones(env.num_envs, np.float32) if step.sample_weights is None else step.sample_weights
        shown += [step.obs, step.rewards, step.terminated, step.truncated, weights]
        for index, final in zip(step.ended.tolist(), step.final_obs, strict=True):
            finals[index].append(final)
    return shown, finals


def play_singles(
    envs: list[TradingEnv], seed: int, actions: np.ndarray
) -> tuple[list[np.ndarray], dict[int, list[np.ndarray]]]:
    """Return the same arrays as a batch, from a loop over single environments."""
    starts = [env.reset(seed=seed + index)[0] for index, env in enumerate(envs)]
    shown, finals = [np.array(starts)], {index: [] for index in range(len(envs))}
    for action in actions:
        steps = []
        for index, env in enumerate(envs):
            obs, reward, terminated, truncated, info = env.step(action[index])
            if terminated or truncated:
                finals[index].append(obs)
                obs, _ = env.reset()
            steps.append((obs, reward, terminated, truncated, np.float32(info.get("sample_weight", 1.0))))
        shown += [np.array(part) for part in zip(*steps, strict=True)]
    return shown, finals


@every_case
def test_a_batch_is_its_single_environments_bit_for_bit(case: str) -> None:
    name, settings = CASES[case]
    settings = settings | {"features": features_of(name)}
    actions = random_actions(120, 4, assets_of(table(name)))
    batch, batch_finals = play_batch(TradingVecEnv(table(name), n_envs=4, seed=11, **settings), actions)
    singles, single_finals = play_singles([TradingEnv(table(name), **settings) for _ in range(4)], 11, actions)
    assert [part.tobytes() for part in batch] == [part.tobytes() for part in singles]
    assert [part.dtype for part in batch] == [part.dtype for part in singles]
    for index in range(4):
        assert np.array_equal(batch_finals[index], single_finals[index])
        assert len(batch_finals[index]) >= 2
    terminated = np.any(batch[3::5])
    assert terminated == case.startswith("ruin")


@every_case
def test_the_same_seed_gives_the_same_trajectory_bit_for_bit(case: str) -> None:
    name, settings = CASES[case]
    settings = settings | {"features": features_of(name), "n_envs": 3}
    actions = random_actions(60, 3, assets_of(table(name)))
    one, again, other = (play_batch(TradingVecEnv(table(name), seed=seed, **settings), actions)[0] for seed in (5, 5, 6))
    assert [part.tobytes() for part in one] == [part.tobytes() for part in again]
    moves = case not in ("all of the data", "fixed start")
    assert any(part.tobytes() != twin.tobytes() for part, twin in zip(one, other, strict=True)) == moves


def test_the_sb3_interface_says_the_same_as_the_arrays() -> None:
    settings = {"features": features_of("btcusd-1h"), "n_envs": 4, "seed": 3, **CASES["ruin"][1]}
    arrays, dictionaries = (TradingVecEnv(table("btcusd-1h"), **settings) for _ in range(2))
    assert np.array_equal(arrays.reset(), dictionaries.reset())
    endings = 0
    for action in random_actions(80, 4):
        step = arrays.step_arrays(action)
        obs, rewards, dones, infos = dictionaries.step(action)
        assert np.array_equal(obs, step.obs)
        assert np.array_equal(rewards, step.rewards)
        assert np.array_equal(dones, step.terminated | step.truncated)
        assert [index for index, info in enumerate(infos) if "terminal_observation" in info] == step.ended.tolist()
        for index, final in zip(step.ended.tolist(), step.final_obs, strict=True):
            assert np.array_equal(infos[index]["terminal_observation"], final)
            assert infos[index]["TimeLimit.truncated"] is bool(step.truncated[index])
            assert set(infos[index]["episode"]) == {"r", "l"}
        endings += len(step.ended)
    assert endings > 4


# Seeds.


def test_reset_with_a_seed_starts_the_same_episodes_after_any_history() -> None:
    env = TradingEnv(table("btcusd-1h"), features=features_of("btcusd-1h"), episode_length=20)

    def next_rows(first: dict[str, Any]) -> list[int]:
        return [first["row"]] + [env.reset()[1]["row"] for _ in range(5)]

    rows = next_rows(env.reset(seed=7)[1])
    assert len(set(rows)) > 3
    env.reset(seed=8)
    for action in random_actions(13, 1)[:, 0]:
        env.step(action)
    assert next_rows(env.reset(seed=7)[1]) == rows
    assert next_rows(env.reset(seed=9)[1]) != rows


def test_neighbouring_seeds_share_no_episodes() -> None:
    env = TradingEnv(table("btcusd-1h"), features=row_numbers(table("btcusd-1h")), episode_length=20)
    rows = {seed: [env.reset(seed=seed)[1]["row"]] + [env.reset()[1]["row"] for _ in range(9)] for seed in range(20)}
    for seed in range(19):
        shared = [one == other for shift in range(5) for one, other in zip(rows[seed][shift:], rows[seed + 1], strict=False)]
        assert sum(shared) < 3


def test_an_environment_without_a_seed_is_not_always_the_same() -> None:
    settings = {"features": features_of("btcusd-1h"), "episode_length": 20}
    rows = [TradingEnv(table("btcusd-1h"), **settings).reset()[1]["row"] for _ in range(6)]
    starts = [TradingVecEnv(table("btcusd-1h"), n_envs=2, **settings).reset().tobytes() for _ in range(6)]
    assert len(set(rows)) > 1
    assert len(set(starts)) > 1


@pytest.mark.parametrize("how", ["one episode of many seeds", "many episodes of one seed"])
def test_starts_are_uniform_over_all_that_fit(how: str) -> None:
    bars = hand_made(*[still(100.0)] * 50)
    env = TradingEnv(bars, features=row_numbers(bars), episode_length=10)
    env.reset(seed=1)
    seeds = range(4000) if how == "one episode of many seeds" else [None] * 4000
    rows = np.array([env.reset(seed=seed)[1]["row"] for seed in seeds])
    assert (rows.min(), rows.max()) == (0, 39)  # the last episode ends at the last bar
    assert chisquare(np.bincount(rows, minlength=40)).pvalue > 1e-3
    following = np.bincount(rows[:-1] % 5 * 5 + rows[1:] % 5, minlength=25)
    assert chisquare(following).pvalue > 1e-3


def test_seeding_a_batch_works_at_the_next_reset_and_means_it() -> None:
    settings = {"n_envs": 5, "features": features_of("btcusd-1h"), "episode_length": 20}
    expected = TradingVecEnv(table("btcusd-1h"), seed=42, **settings).reset()
    env = TradingVecEnv(table("btcusd-1h"), seed=0, **settings)
    assert not np.array_equal(env.reset(), expected)
    env.step(random_actions(1, 5)[0])
    assert env.seed(42) == [42, 43, 44, 45, 46]
    assert np.array_equal(env.reset(), expected)
    assert not np.array_equal(env.reset(), expected)  # the second episode of the seed


# Other people's checks and agents.


@pytest.mark.parametrize("name", ["nasdaq-1d", "stocks"])
def test_gymnasium_has_nothing_to_complain_about(name: str) -> None:
    gymnasium_check_env(TradingEnv(table(name), features=features_of(name), episode_length=20), skip_render_check=True)


@pytest.mark.parametrize("name", ["nasdaq-1d", "stocks"])
def test_sb3_has_nothing_to_complain_about(name: str) -> None:
    sb3_check_env(TradingEnv(table(name), features=features_of(name), episode_length=20))


def trading_batch() -> TradingVecEnv:
    return TradingVecEnv(table("nasdaq-1d"), n_envs=2, seed=0, features=features_of("nasdaq-1d"), episode_length=9)


AGENTS_PLAY: dict[str, Callable[[], Any]] = {
    "TradingVecEnv": trading_batch,
    "VecMonitor": lambda: VecMonitor(trading_batch()),
    "VecNormalize": lambda: VecNormalize(VecMonitor(trading_batch())),
    "TradingEnv": lambda: TradingEnv(table("nasdaq-1d"), features=features_of("nasdaq-1d"), episode_length=9),
    "BettingGame": lambda: GymVectorAdapter(BettingGame(2), seed=0),
    "BettingGame, normalised": lambda: VecNormalize(VecMonitor(GymVectorAdapter(BettingGame(2), seed=0))),
}


@pytest.mark.parametrize("make", AGENTS_PLAY)
def test_ppo_of_sb3_trains_on_it(make: str) -> None:
    model = PPO("MlpPolicy", AGENTS_PLAY[make](), n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu")
    before = torch.nn.utils.parameters_to_vector(model.policy.parameters()).detach().clone()
    model.learn(2 * 16 * model.n_envs)
    after = torch.nn.utils.parameters_to_vector(model.policy.parameters()).detach()
    assert model.num_timesteps == 2 * 16 * model.n_envs
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)
    if "Betting" not in make or "normalised" in make:  # the others know no episode statistics without a monitor
        assert {"r", "l"} <= set(model.ep_info_buffer[0])


# The account.


@every_fill
@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("nasdaq-1d", {}),
        ("nasdaq-1d", {"long_only": True, "sizing": "pre_cost", "slippage": 0.001}),
        ("nasdaq-1d", {"leverage": 2.0, "band": 0.3, "borrow_rate": 0.05, "loan_rate": 0.08, "cash_rate": 0.02}),
        ("btcusd-1h", {"impact": 1.0, "participation": 0.05, "cash": 1e5}),
        ("stocks", {"leverage": 1.5, "half_spread": 0.0005}),
        ("btcusd-1h", {"leverage": 3.0, "bankruptcy": 0.6}),
    ],
)
def test_the_account_is_that_of_simulate_on_the_same_weights(name: str, rules: dict[str, Any], fill: str) -> None:
    bars, rules = table(name), {"bankruptcy": 0.05, "fill": fill, "fee": 0.001, **rules}
    leverage, assets = rules.get("leverage", 1.0), assets_of(bars)
    actions = np.random.default_rng(2).uniform(-1.0, 1.0, (len(bars), assets)) / assets  # never above the gross limit
    weights = leverage * (0.5 * (actions + 1.0) if rules.get("long_only") else actions)

    env = TradingEnv(bars, features=row_numbers(bars), **rules)
    _, info = env.reset(seed=0)
    equities, terminated, truncated = [info["equity"]], False, False
    while not (terminated or truncated):
        _, _, terminated, truncated, info = env.step(actions[info["row"]])
        equities.append(info["equity"])

    weights[info["row"] :] = np.nan  # the last observation is not acted on
    result = simulate(bars, weights, **{key: value for key, value in rules.items() if key not in ("leverage", "long_only")})
    expected = result.equity.copy()
    if fill == "close":  # the environment looks at a close before it trades there, `simulate` after it has
        expected[: info["row"]] += result.costs[: info["row"]]
    assert equities == pytest.approx(expected[: info["row"] + 1], rel=1e-11)
    assert len(equities) > 50
    assert terminated == (rules["bankruptcy"] == 0.6)
    assert result.ruined_at == (info["row"] if terminated else None)


@pytest.mark.parametrize("case", ["next open", "close", "next close", "three assets", "every cost", "ruin", "ruin by margin"])
def test_rewards_add_up_to_the_log_of_the_growth_of_equity(case: str) -> None:
    name, settings = CASES[case]
    env = TradingEnv(table(name), features=features_of(name), **settings)
    ends = set()
    for seed in range(12):
        _, info = env.reset(seed=seed)
        first, total, over = info["equity"], 0.0, False
        while not over:
            _, reward, terminated, truncated, info = env.step(env.action_space.sample())
            total += reward
            over = terminated or truncated
        ends.add((terminated, truncated))
        assert total == pytest.approx(math.log(info["equity"] / first), abs=1e-12)
    assert ends == ({(True, False), (False, True)} if case == "ruin" else ends)
    assert (True, True) not in ends


def test_the_episode_in_info_is_what_was_played() -> None:
    env = TradingVecEnv(table("btcusd-1h"), n_envs=6, seed=0, features=features_of("btcusd-1h"), **CASES["ruin"][1])
    env.reset()
    returns, lengths, kinds = np.zeros(6), np.zeros(6, int), set()
    for action in random_actions(150, 6):
        _, rewards, dones, infos = env.step(action)
        returns += rewards
        lengths += 1
        for index in np.flatnonzero(dones):
            assert infos[index]["episode"]["r"] == pytest.approx(returns[index], abs=1e-12)
            assert infos[index]["episode"]["l"] == lengths[index]
            kinds.add((infos[index]["TimeLimit.truncated"], lengths[index] == 50))
            returns[index], lengths[index] = 0.0, 0
    assert {(True, True), (False, False)} <= kinds <= {(True, True), (False, False), (False, True)}


# Ends of episodes.


def test_ruin_inside_a_bar_terminates_with_what_the_liquidation_left() -> None:
    fee = 0.01
    env = hand_made_env(still(100.0), (100.0, 110.0, 20.0, 105.0), still(105.0), leverage=2.0, fee=fee)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step([1.0])
    equity = 1.0 / (1.0 + 2.0 * fee)  # bought 2 x what is left after the fee
    units, loan = 2.0 * equity / 100.0, equity
    price = (loan + 0.05) / units  # where the equity meets 5 % of the start
    left = 0.05 - fee * units * price
    assert (terminated, truncated) == (True, False)
    assert info["equity"] == pytest.approx(left, rel=1e-12)
    assert reward == pytest.approx(math.log(left), rel=1e-12)


def test_ruin_by_a_gap_is_paid_at_the_open_and_leaves_a_millionth_at_least() -> None:
    env = hand_made_env(still(100.0), still(100.0), still(45.0), still(45.0), leverage=2.0, cash=1000.0)
    env.reset(seed=0)
    env.step([1.0])
    _, reward, terminated, _, info = env.step([1.0])
    assert terminated
    assert info["equity"] == pytest.approx(1000.0 * 1e-6, rel=1e-12)
    assert reward == pytest.approx(math.log(1e-6), rel=1e-12)
    assert not info["units"].any()


@every_fill
def test_ruin_at_the_last_bar_terminates_and_does_not_truncate(fill: str) -> None:
    env = hand_made_env(still(100.0), still(100.0), (100.0, 100.0, 10.0, 100.0), leverage=2.0, fill=fill)
    env.reset(seed=0)
    assert env.step([1.0])[2:4] == (False, False)
    assert env.step([1.0])[2:4] == (True, False)


@every_fill
@pytest.mark.parametrize("target", [0.0, -1.0])
def test_costs_that_eat_the_rest_of_an_account_ruin_it(fill: str, target: float) -> None:
    """Three times long into a fall of 31.5 %: leaving the position costs more than the account still has."""
    fall = (100.0, 100.0, 68.5, 68.5)
    env = hand_made_env(*[still(100.0)] * 2, fall, *[still(68.5)] * 3, leverage=3.0, fee=0.03, bankruptcy=0.0, fill=fill)
    env.reset(seed=0)
    rewards, terminated, truncated = [], False, False
    for action in (1.0, 1.0, target, target, target):
        obs, reward, terminated, truncated, info = env.step([action])
        rewards.append(reward)
        assert np.isfinite(obs).all()
        assert math.isfinite(reward)
        if terminated or truncated:
            break
    assert terminated
    assert info["equity"] > 0.0
    assert sum(rewards) == pytest.approx(math.log(info["equity"]), abs=1e-12)


@every_fill
def test_the_end_of_the_data_truncates_and_shows_what_an_uncut_environment_would(fill: str) -> None:
    settings = {"features": features_of("nasdaq-1d"), "fill": fill, "random_start": False}
    cut, uncut = TradingEnv(table("nasdaq-1d"), span=(0, 100), **settings), TradingEnv(table("nasdaq-1d"), **settings)
    batch = TradingVecEnv(table("nasdaq-1d"), n_envs=1, seed=0, span=(0, 100), **settings)
    cut.reset(seed=0), uncut.reset(seed=0), batch.reset()
    actions = random_actions(100 - 1 - 63, 1)
    for number, action in enumerate(actions):
        obs, reward, terminated, truncated, _ = cut.step(action[0])
        full_obs, full_reward, *_ = uncut.step(action[0])
        step = batch.step_arrays(action)
        assert obs.tobytes() == full_obs.tobytes()
        assert reward == full_reward
        assert not terminated
        assert truncated == bool(step.truncated[0]) == (number == len(actions) - 1)
    assert step.final_obs.tobytes() == full_obs.tobytes()
    assert step.obs.tobytes() != full_obs.tobytes()


@pytest.mark.parametrize("length", [1, 7])
def test_an_episode_has_its_length(length: int) -> None:
    env = TradingEnv(table("nasdaq-1d"), features=features_of("nasdaq-1d"), episode_length=length)
    _, start = env.reset(seed=3)
    flags = [env.step([0.1])[2:] for _ in range(length)]
    assert [truncated for _, truncated, _ in flags] == [False] * (length - 1) + [True]
    assert flags[-1][2]["row"] == start["row"] + length


def test_the_span_is_never_left() -> None:
    env = TradingVecEnv(
        table("btcusd-1h"), n_envs=50, seed=0, features=row_numbers(table("btcusd-1h")), span=(200, 230), episode_length=9
    )
    rows = [env.reset()[:, 0]]
    for action in random_actions(40, 50):
        step = env.step_arrays(action)
        rows += [step.obs[:, 0], step.final_obs[:, 0]]
    assert (np.concatenate(rows).min(), np.concatenate(rows).max()) == (200, 229)


# Several spans.


def start_by_hand(seed: int, episode: int, choices: int) -> int:
    """The start that episode k of a seed draws: SplitMix64 of SplitMix64(seed) xor k, in whole numbers of Python."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    return mix(mix(seed) ^ episode) % choices


def spans_env(span: Any, **settings: Any) -> TradingEnv:
    bars = table("btcusd-1h")
    return TradingEnv(bars, features=row_numbers(bars), span=span, **settings)


@pytest.mark.parametrize("span", [(200, 300), [(200, 300)], ((200, 300),), [200, 300], (np.int64(200), np.int64(300))])
def test_one_span_draws_the_starts_that_it_always_drew(span: Any) -> None:
    env = spans_env(span, episode_length=10)
    for seed in (0, 5, 2**63):
        starts = [env.reset(seed=seed)[1]["row"]] + [env.reset()[1]["row"] for _ in range(20)]
        assert starts == [200 + start_by_hand(seed, episode, 90) for episode in range(21)]


def test_an_episode_stays_inside_one_of_several_spans() -> None:
    spans = [(100, 120), (300, 310), (500, 545)]
    bars = table("btcusd-1h")
    env = TradingVecEnv(bars, n_envs=60, seed=0, features=row_numbers(bars), span=spans, episode_length=7)
    rows = env.reset()[:, 0]
    visited = {span: set() for span in spans}
    for action in random_actions(100, 60):
        before = [next(span for span in spans if span[0] <= row < span[1]) for row in rows]
        step = env.step_arrays(action)
        arrived = step.obs[:, 0].copy()
        arrived[step.ended] = step.final_obs[:, 0]
        for span, row in zip(before, arrived, strict=True):
            assert span[0] < row < span[1]
            visited[span].add(int(row))
        rows = step.obs[:, 0]
    for (first, stop), seen in visited.items():
        assert seen == set(range(first + 1, stop))


def test_every_start_of_every_span_is_drawn_equally_often() -> None:
    spans, length = [(10, 30), (100, 112), (60, 90)], 8
    fits = [row for first, stop in spans for row in range(first, stop - length)]
    env = spans_env(spans, episode_length=length)
    env.reset(seed=1)
    rows = [env.reset()[1]["row"] for _ in range(4000)]
    assert set(rows) == set(fits)
    assert chisquare([rows.count(row) for row in fits]).pvalue > 1e-3


def test_without_a_length_an_episode_lasts_to_the_end_of_its_span() -> None:
    env = spans_env([(10, 15), (100, 103)])
    ends = set()
    for seed in range(20):
        first, steps, truncated = env.reset(seed=seed)[1]["row"], 0, False
        while not truncated:
            *_, truncated, info = env.step([0.1])
            steps += 1
        ends.add((first, info["row"], steps))
    assert ends == {(10, 14, 4), (100, 102, 2)}


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 100), (300, 250)], r"span must be rows .* got \(300, 250\)"),
        ([(0, 100), (300, 1001)], r"span must be rows .* got \(300, 1001\)"),
        ([(0, 100), (300, 305)], "not enough bars"),
    ],
)
def test_one_bad_span_of_several_is_refused(spans: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spans_env(spans, episode_length=10)


@pytest.mark.parametrize("end", ["data", "length", "ruin"])
def test_an_ended_environment_refuses_to_go_on(end: str) -> None:
    second = (100.0, 100.0, 10.0, 100.0) if end == "ruin" else still(100.0)
    env = hand_made_env(still(100.0), second, *[still(100.0)] * 4, leverage=2.0, episode_length=3 if end == "length" else None)
    env.reset(seed=0)
    over = False
    while not over:
        _, _, terminated, truncated, _ = env.step([1.0])
        over = terminated or truncated
    with pytest.raises(ValueError, match="reset"):
        env.step([1.0])


def test_stepping_before_the_first_reset_is_refused() -> None:
    with pytest.raises(ValueError, match="reset"):
        hand_made_env(*[still(100.0)] * 4).step([0.0])
    bars = hand_made(*[still(100.0)] * 4)
    with pytest.raises(ValueError, match="reset"):
        TradingVecEnv(bars, n_envs=2, features=row_numbers(bars)).step(np.zeros((2, 1)))


# Actions.


def weights_after(action: list[float], assets: int = 1, **settings: Any) -> list[float]:
    """The weights held after one step of still prices without costs: the targets themselves."""
    bars = hand_made(*[still(100.0)] * 3)
    bars = bars if assets == 1 else align_bars({f"asset {index}": bars for index in range(assets)})
    env = TradingEnv(bars, features=row_numbers(bars), fee=0.0, **settings)
    env.reset(seed=0)
    return env.step(action)[4]["weights"].tolist()


@pytest.mark.parametrize(
    ("action", "long_short", "long_only"),
    [
        (-1.0, -2.0, 0.0),
        (-0.5, -1.0, 0.5),
        (0.0, 0.0, 1.0),
        (0.25, 0.5, 1.25),
        (1.0, 2.0, 2.0),
        (7.0, 2.0, 2.0),
        (-9.0, -2.0, 0.0),
    ],
)
def test_actions_map_affinely_onto_the_weights_and_are_cut_to_the_box(
    action: float, long_short: float, long_only: float
) -> None:
    assert weights_after([action], leverage=2.0) == pytest.approx([long_short], abs=1e-15)
    assert weights_after([action], leverage=2.0, long_only=True) == pytest.approx([long_only], abs=1e-15)


@pytest.mark.parametrize(
    ("action", "settings", "weights"),
    [
        ([1.0, 1.0, 1.0], {}, [1 / 3, 1 / 3, 1 / 3]),
        ([1.0, -1.0, 0.0], {}, [0.5, -0.5, 0.0]),
        ([1.0, -0.5, 0.5], {"leverage": 3.0}, [1.5, -0.75, 0.75]),
        ([0.2, -0.3, 0.1], {}, [0.2, -0.3, 0.1]),  # below the limit nothing is scaled
        ([1.0, -1.0, -1.0], {"long_only": True}, [1.0, 0.0, 0.0]),
        ([0.0, 0.0, 0.0], {"long_only": True}, [1 / 3, 1 / 3, 1 / 3]),
        ([5.0, 5.0, 5.0], {"leverage": 0.6}, [0.2, 0.2, 0.2]),
    ],
)
def test_several_assets_are_scaled_to_the_gross_limit(
    action: list[float], settings: dict[str, Any], weights: list[float]
) -> None:
    assert weights_after(action, assets=3, **settings) == pytest.approx(weights, abs=1e-12)


def test_an_action_that_is_not_finite_is_refused_and_moves_nobody() -> None:
    settings = {"n_envs": 3, "seed": 0, "features": features_of("nasdaq-1d"), "episode_length": 10}
    env, twin = TradingVecEnv(table("nasdaq-1d"), **settings), TradingVecEnv(table("nasdaq-1d"), **settings)
    env.reset(), twin.reset()
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=r"^the action of env 1 is not finite"):
            env.step(np.array([[0.5], [bad], [0.5]]))
    for action in random_actions(15, 3):
        assert np.array_equal(env.step(action)[0], twin.step(action)[0])


# An agent that steers a part of the account.

STEERED = {
    "long-short": (1, {"core": (0.4,)}),
    "long only": (1, {"core": (0.4,), "long_only": True}),
    "leverage": (1, {"core": (1.5,), "leverage": 2.0}),
    "leverage, long only": (1, {"core": (1.5,), "leverage": 2.0, "long_only": True}),
    "cash": (1, {}),
    "cash, long only": (1, {"long_only": True}),
    "three assets": (3, {"core": (0.2, -0.3, 0.4)}),
    "three assets, long only": (3, {"core": (0.2, 0.3, 0.4), "long_only": True, "leverage": 1.5}),
}


@pytest.mark.parametrize("active", [0.0, 0.25, 0.9, 1.0])
@pytest.mark.parametrize("case", STEERED)
def test_the_target_is_the_core_and_the_agent_in_their_shares(case: str, active: float) -> None:
    assets, settings = STEERED[case]
    core = np.array(settings.get("core", [0.0] * assets))
    for action in np.random.default_rng(0).uniform(-1.5, 1.5, (20, assets)):
        alone = weights_after(action.tolist(), assets, **settings)
        expected = (1.0 - active) * core + active * np.array(alone)
        together = {**settings, "active": active}
        assert weights_after(action.tolist(), assets, **together) == pytest.approx(expected, abs=1e-12)
        targets = target_weights(action, TradingSettings(fee=0.0, **together))
        assert targets == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scale_core", [True, False])
def test_volatility_scales_the_agent_and_if_asked_to_the_core(scale_core: bool) -> None:
    bars, steering = table("nasdaq-1d"), {"core": (0.4,), "active": 0.5, "volatility_power": 2.0, "scale_core": scale_core}
    settings = TradingSettings(**steering, random_start=False)
    env = TradingVecEnv(bars, n_envs=2, seed=0, features=row_numbers(bars), **settings.model_dump())
    env.reset()
    actions, scale = np.array([[0.8], [-0.3]]), exposure_scale(bars, 2.0)
    assert np.ptp(scale) > 0.0
    for _ in range(120):
        row = int(env.batch.rows[0])
        env.step(actions)
        info = [env.batch.info(index) for index in range(2)]
        expected = (scale[row] if scale_core else 1.0) * 0.5 * 0.4 + scale[row] * 0.5 * actions
        assert target_weights(actions, settings, scale[[row, row]]) == pytest.approx(expected, abs=1e-12)
        # Filled at the open, the weight drifts until the close.
        drifted = bars["close"].iloc[row + 1] / bars["open"].iloc[row + 1]
        for index in range(2):
            weight = float(expected[index, 0])
            at_close = weight * drifted / (1.0 + weight * (drifted - 1.0))
            assert float(info[index]["weights"][0]) == pytest.approx(at_close, rel=1e-6)


@pytest.mark.parametrize("active", [0.25, 1.0])
@pytest.mark.parametrize("gain", [0.5, 3.0])
@pytest.mark.parametrize("case", STEERED)
def test_a_gain_enlarges_what_the_agent_asks_for_as_far_as_the_leverage_allows(case: str, gain: float, active: float) -> None:
    assets, settings = STEERED[case]
    core, leverage = np.array(settings.get("core", [0.0] * assets)), settings.get("leverage", 1.0)
    limited = 0
    for action in np.random.default_rng(0).uniform(-1.5, 1.5, (20, assets)):
        enlarged = gain * np.array(weights_after(action.tolist(), assets, **settings))
        limited += np.abs(enlarged).sum() > leverage
        expected = (1.0 - active) * core + active * enlarged * leverage / max(leverage, np.abs(enlarged).sum())
        together = {**settings, "active": active, "gain": gain}
        assert weights_after(action.tolist(), assets, **together) == pytest.approx(expected, abs=1e-12)
        assert target_weights(action, TradingSettings(fee=0.0, **together)) == pytest.approx(expected, abs=1e-12)
    assert (limited > 0) == (gain > 1.0)


@every_fill
@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("nasdaq-1d", {"core": (0.7,)}),
        ("nasdaq-1d", {"core": (0.7,), "long_only": True, "band": 0.02}),
        ("btcusd-1h", {"core": (1.4,), "leverage": 2.0, "loan_rate": 0.08}),
        ("stocks", {"core": (0.5, -0.2, 0.3)}),
        ("nasdaq-1d", {}),
    ],
)
def test_an_agent_that_steers_nothing_holds_the_core_as_simulate_does(name: str, rules: dict[str, Any], fill: str) -> None:
    bars = table(name)
    env = TradingEnv(bars, features=row_numbers(bars), fill=fill, bankruptcy=0.05, fee=0.001, active=0.0, **rules)
    _, info = env.reset(seed=0)
    equities, truncated = [info["equity"]], False
    rng = np.random.default_rng(0)
    while not truncated:
        *_, truncated, info = env.step(rng.uniform(-1.0, 1.0, assets_of(bars)))
        equities.append(info["equity"])
    weights = np.tile(rules.get("core", (0.0,)), (len(bars), 1)).astype(float)
    weights[-1] = np.nan  # the last observation is not acted on
    costs = {key: value for key, value in rules.items() if key in ("band", "loan_rate")}
    result = simulate(bars, weights, fee=0.001, fill=fill, bankruptcy=0.05, **costs)
    expected = result.equity + (result.costs if fill == "close" else 0.0)  # see above: it looks at a close before it trades
    assert equities == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("active", [0.0, 0.5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_action_that_is_not_finite_is_refused_whatever_is_steered(active: float, bad: float) -> None:
    bars = table("nasdaq-1d")
    env = TradingVecEnv(bars, n_envs=3, seed=0, features=row_numbers(bars), active=active, core=(0.5,), gain=2.0)
    env.reset()
    with pytest.raises(ValueError, match=r"^the action of env 1 is not finite"):
        env.step(np.array([[0.5], [bad], [0.5]]))


# What the account shows of itself.


def own_state(obs: np.ndarray) -> list[float]:
    """Weight, unrealised gain and drawdown."""
    return obs[1:].tolist()


def test_own_state_follows_a_hand_computed_account() -> None:
    path = [still(100.0), (100.0, 110.0, 100.0, 110.0), (110.0, 110.0, 88.0, 88.0), still(88.0), (88.0, 99.0, 88.0, 99.0)]
    bars = hand_made(*path)
    env = TradingEnv(bars, features=row_numbers(bars), fee=0.0, no_trade=[False, True, False, False, False])
    obs, info = env.reset(seed=0)
    assert obs.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert info["row"] == 0

    obs, reward, *_ = env.step([0.5])  # buys 0.005 units at 100, which rise to 110
    assert reward == pytest.approx(math.log(1.05), rel=1e-12)
    assert own_state(obs) == pytest.approx([0.55 / 1.05, 0.05 / 1.05, 0.0], abs=1e-6)

    obs, reward, _, _, info = env.step([-1.0])  # may not trade: the position drifts to 88
    assert reward == pytest.approx(math.log(0.94 / 1.05), rel=1e-12)
    assert own_state(obs) == pytest.approx([0.44 / 0.94, -0.06 / 0.94, 0.94 / 1.05 - 1.0], abs=1e-6)
    assert info["units"].tolist() == pytest.approx([0.005], rel=1e-12)

    obs, reward, _, _, info = env.step([0.25])  # sells a part at 88; the rest was still bought at 100
    units = 0.25 * 0.94 / 88.0
    assert reward == pytest.approx(0.0, abs=1e-12)
    assert own_state(obs) == pytest.approx([0.25, units * -12.0 / 0.94, 0.94 / 1.05 - 1.0], abs=1e-6)

    obs, reward, _, truncated, info = env.step([-0.5])  # goes short at 88, which rise to 99
    short = 0.47 / 88.0
    equity = 0.94 - short * 11.0
    assert truncated
    assert info["equity"] == pytest.approx(equity, rel=1e-12)
    assert own_state(obs) == pytest.approx([-short * 99.0 / equity, -short * 11.0 / equity, equity / 1.05 - 1.0], abs=1e-6)


def test_adding_to_a_position_averages_its_entry_price() -> None:
    env = hand_made_env(still(100.0), still(100.0), still(200.0), still(200.0), leverage=2.0)
    env.reset(seed=0)
    env.step([0.25])  # 0.005 units at 100
    obs, *_ = env.step([0.5])  # equity 1.5 at 200: 0.0075 units, of which 0.0025 at 200
    assert own_state(obs) == pytest.approx([1.0, 0.5 / 1.5, 0.0], abs=1e-6)


def test_own_state_of_several_assets_comes_as_weights_then_gains_then_drawdown() -> None:
    one, two = hand_made(still(100.0), (100.0, 120.0, 100.0, 120.0)), hand_made(still(10.0), (10.0, 10.0, 9.0, 9.0))
    bars = align_bars({"one": one, "two": two})
    env = TradingEnv(bars, features=row_numbers(bars), fee=0.0)
    env.reset(seed=0)
    obs, *_ = env.step([0.5, -0.5])
    equity = 1.0 + 0.1 + 0.05
    assert obs == pytest.approx([1.0, 0.6 / equity, -0.45 / equity, 0.1 / equity, 0.05 / equity, 0.0], abs=1e-6)


def test_a_position_inside_the_band_drifts_and_one_outside_is_traded() -> None:
    path = (still(100.0), (100.0, 110.0, 100.0, 110.0), (110.0, 150.0, 110.0, 150.0), still(150.0))
    env = hand_made_env(*path, band=0.05)
    env.reset(seed=0)
    bought = env.step([0.5])[4]["units"][0]
    assert env.step([0.5])[4]["units"][0] == bought  # a weight of 0.524 is near enough to 0.5
    assert env.step([0.5])[4]["units"][0] < bought


def test_no_trade_gives_the_sample_weight_zero_and_leaves_the_units_alone() -> None:
    bars, closed = table("nasdaq-1d"), np.arange(400) % 4 == 0
    settings = {"features": row_numbers(bars), "no_trade": closed, "episode_length": 30}
    env = TradingEnv(bars, **settings)
    _, info = env.reset(seed=0)
    for action in np.random.default_rng(0).uniform(-1.0, 1.0, (30, 1)):
        before, shut = info, closed[info["row"]]
        *_, info = env.step(action)
        assert ("no_trade" in info) == ("sample_weight" in info) == shut
        assert info.get("sample_weight", 1.0) == (0.0 if shut else 1.0)
        assert np.array_equal(info["units"], before["units"]) == shut
        assert (info["fees"] == 0.0) == shut

    batch, twin = (TradingVecEnv(bars, n_envs=3, seed=0, **settings) for _ in range(2))
    rows = batch.reset()[:, 0].astype(int)
    twin.reset()
    for action in random_actions(70, 3):
        step, infos = batch.step_arrays(action), twin.step(action)[3]
        open_weights = np.where(closed[rows], 0.0, 1.0)
        assert np.array_equal(np.ones(3) if step.sample_weights is None else step.sample_weights, open_weights)
        assert [info.get("sample_weight", 1.0) for info in infos] == open_weights.tolist()
        rows = step.obs[:, 0].astype(int)


def test_a_missing_bar_is_told_and_marked_at_the_last_price() -> None:
    bars = hand_made(*[still(100.0)] * 2, still(120.0), still(130.0), still(140.0))
    bars.iloc[3] = np.nan
    env = TradingEnv(bars, features=row_numbers(bars), fee=0.0)
    env.reset(seed=0)
    infos = [env.step([1.0])[4] for _ in range(4)]
    assert [info["missing_bar"] for info in infos] == [False, False, True, False]
    assert [info["equity"] for info in infos] == pytest.approx([1.0, 1.2, 1.2, 1.4], rel=1e-12)


def test_what_cannot_be_sold_is_no_reason_for_a_loan() -> None:
    bars = hand_made(*[still(100.0)] * 4)
    bars = align_bars({"closed": bars.drop(bars.index[2]), "open": bars})
    env = TradingEnv(bars, features=row_numbers(bars), fee=0.0, long_only=True)
    env.reset(seed=0)
    infos = [env.step(action)[4] for action in ([1.0, -1.0], [-1.0, 1.0], [-1.0, 1.0])]
    assert [info["weights"].tolist() for info in infos] == [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    assert [info["cash"] for info in infos] == [0.0, 0.0, 0.0]


@every_fill
@pytest.mark.parametrize("assets", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"band": 0.2}, {"participation": 0.1}, {"participation": 0.1, "long_only": True}])
def test_there_is_nothing_to_gain_from_still_prices(fill: str, assets: int, settings: dict[str, Any]) -> None:
    """Without costs the equity stays, for any actions, unfilled orders and missing bars."""
    rng = np.random.default_rng(0)
    still_bars = hand_made(*[still(100.0)] * 200)
    symbols = {f"asset {index}": still_bars.assign(volume=rng.uniform(0.0, 1000.0, 200)) for index in range(assets)}
    symbols = {name: bars[(rng.random(200) > 0.1) | (np.arange(200) == 0)] for name, bars in symbols.items()}
    bars = align_bars(symbols)
    env = TradingEnv(bars, features=row_numbers(bars), fill=fill, fee=0.0, leverage=3.0, cash=1e4, **settings)
    env.reset(seed=0)
    for action in random_actions(len(bars) - 1, 1, assets)[:, 0]:
        info = env.step(action)[4]
        assert info["equity"] == pytest.approx(1e4, rel=1e-12)


@every_fill
@pytest.mark.parametrize("band", [0.0, 0.1])
@pytest.mark.parametrize("sizing", ["cost_aware", "pre_cost"])
def test_long_only_without_leverage_never_borrows(fill: str, band: float, sizing: str) -> None:
    env = TradingEnv(
        table("stocks"), features=row_numbers(table("stocks")), long_only=True, fill=fill, band=band, sizing=sizing
    )
    env.reset(seed=0)
    for action in random_actions(399, 1, 3)[:, 0]:
        info = env.step(action)[4]
        assert info["cash"] >= 0.0
        assert info["weights"].sum() <= 1.0 + 1e-9


def test_impact_with_a_symbol_that_starts_late_is_fine() -> None:
    early, late = random_walk(120, seed=0), random_walk(120, seed=1).iloc[60:]
    bars = align_bars({"early": early, "late": late})
    env = TradingEnv(bars, features=row_numbers(bars), impact=1.0, cash=1e4)
    env.reset(seed=0)
    for action in random_actions(100, 1, 2)[:, 0]:
        obs, reward, *_ = env.step(action)
        assert np.isfinite(obs).all()
        assert math.isfinite(reward)


# Memory.


def test_features_are_shared_and_never_copied() -> None:
    features = features_of("btcusd-1h")
    envs = [TradingVecEnv(table("btcusd-1h"), n_envs=n_envs, features=features) for n_envs in (1, 1000)]
    single = TradingEnv(table("btcusd-1h"), features=features)
    for env in (*envs, single):
        assert np.shares_memory(env.batch.features.values, features.values)
    small, large = (len(pickle.dumps(env)) for env in envs)
    assert small > features.values.nbytes  # the features are in there, once
    assert large - small < 1000 * 300


def test_what_is_returned_may_be_overwritten_and_kept() -> None:
    settings = {"n_envs": 4, "seed": 0, "features": features_of("btcusd-1h"), **CASES["ruin"][1]}
    settings["no_trade"] = np.arange(1000) % 5 == 0
    env, vandalised = (TradingVecEnv(table("btcusd-1h"), **settings) for _ in range(2))
    kept = [(obs, obs.copy()) for obs in [env.reset()]]
    vandalised.reset().fill(9.0)
    for action in random_actions(80, 4):
        step, infos = env.step_arrays(action), None
        arrays = [array for array in step if array is not None]
        kept += [(array, array.copy()) for array in arrays]
        obs, rewards, dones, infos = vandalised.step(action.copy())
        assert np.array_equal(obs, step.obs)
        assert np.array_equal(rewards, step.rewards)
        for array in (obs, rewards):
            array.fill(9.0)
        dones.fill(True)
        for info in infos:
            info.pop("terminal_observation", np.empty(0)).fill(9.0)
    for array, copy in kept:
        assert np.array_equal(array, copy)


def test_what_a_single_environment_returns_may_be_overwritten() -> None:
    env, vandalised = (TradingEnv(table("nasdaq-1d"), features=features_of("nasdaq-1d"), episode_length=30) for _ in range(2))
    env.reset(seed=0)
    obs, info = vandalised.reset(seed=0)
    for action in random_actions(30, 1)[:, 0]:
        obs.fill(9.0)
        info["units"].fill(9.0)
        info["weights"].fill(9.0)
        obs, _, _, _, info = vandalised.step(action)
        assert np.array_equal(obs, env.step(action)[0])


# Refusals.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"episode_length": 0}, "episode_length is 0: must be greater than or equal to 1"),
        ({"episode_length": 337}, "not enough bars"),
        ({"span": (0, 64)}, "not enough bars"),
        ({"span": (100, 50)}, "span must be rows"),
        ({"span": (-5, 200)}, "span must be rows"),
        ({"span": (0, 401)}, "span must be rows"),
        ({"features": "too few"}, "features have 399 rows, the bars 400"),
        ({"no_trade": [True] * 3}, r"no_trade must have the shape \(400,\)"),
        ({"commission": 0.1}, "commission: unknown key; known are active, assets, band, "),
        ({"fill": "yesterday"}, "fill is 'yesterday': must be 'next_open', 'close' or 'next_close'"),
        ({"leverage": 0.0}, "leverage is 0.0: must be greater than 0"),
        ({"fee": math.nan}, "fee is nan: must be "),
        ({"fee": 0.5, "leverage": 2.0}, "cannot carry a gross exposure of 2"),
        ({"active": 1.1}, "active is 1.1: must be less than or equal to 1"),
        ({"active": -0.1}, "active is -0.1: must be greater than or equal to 0"),
        ({"core": (1.1,)}, r"core is \(1.1,\), but it must be at least -1 each, at most 1 together"),
        ({"core": (-0.1,), "long_only": True}, r"core is \(-0.1,\), but it must be at least 0 each"),
        ({"core": (math.nan,)}, "core"),
        ({"core": (0.1, 0.1)}, r"trading.core is \(0.1, 0.1\), but it must be empty or one weight for each of 1 assets"),
    ],
)
@pytest.mark.parametrize("make", [TradingEnv, TradingVecEnv])
def test_impossible_settings_are_refused_in_one_clear_line(make: Any, settings: dict[str, Any], message: str) -> None:
    features = features_of("nasdaq-1d")
    arguments = {"features": features, **settings} | ({"features": features[1:]} if "features" in settings else {})
    with pytest.raises(ValueError, match=message) as error:
        make(table("nasdaq-1d"), **arguments)
    assert "\n" not in str(error.value)


def test_the_largest_episode_and_the_smallest_span_do_fit() -> None:
    features = features_of("nasdaq-1d")
    assert TradingEnv(table("nasdaq-1d"), features=features, episode_length=336).reset(seed=0)[1]["row"] == 63
    assert TradingEnv(table("nasdaq-1d"), features=features, span=(0, 65)).reset(seed=0)[1]["row"] == 63


def test_too_few_bars_are_refused_in_one_clear_line() -> None:
    with pytest.raises(ValueError, match=r"not enough bars: .* warm-up of 63") as error:
        TradingEnv(table("nasdaq-1d").iloc[:64])
    assert "\n" not in str(error.value)
    assert TradingEnv(table("nasdaq-1d").iloc[:65]).reset(seed=0)[1]["row"] == 63


def test_features_of_other_times_are_refused() -> None:
    bars = load_dataset("nasdaq-1d").iloc[:401]
    ahead = build_features(bars)[1:]  # as many rows as the bars below, each one bar ahead
    with pytest.raises(ValueError, match="time"):
        TradingEnv(bars.iloc[:-1], features=ahead)


def test_no_environments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        TradingVecEnv(table("nasdaq-1d"), n_envs=0)


@pytest.mark.parametrize("shape", [(2,), (3, 1), (2, 2), (1, 2)])
def test_actions_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    env = trading_batch()
    env.reset()
    with pytest.raises(ValueError, match=r"actions must have the shape \(2, 1\)"):
        env.step(np.zeros(shape))
    single = TradingEnv(table("stocks"), features=features_of("stocks"))
    single.reset(seed=0)
    with pytest.raises(ValueError, match=r"actions must have the shape \(1, 3\)"):
        single.step(np.zeros(shape[-1]))
