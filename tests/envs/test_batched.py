"""The interface that the games with a known optimum share."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from tailguard.envs.batched import BatchedEnv
from tailguard.envs.betting_game import BettingGame
from tailguard.envs.guarded_maze import GuardedMaze
from tailguard.envs.market_making import MarketMaking
from tailguard.envs.optimal_execution import OptimalExecution
from tailguard.envs.signal_market import SignalMarket

Make = Callable[..., BatchedEnv]


def hidden_market(num_envs: int = 1, **settings: Any) -> SignalMarket:
    return SignalMarket(num_envs, hidden=True, episode_length=7, **settings)


def short_maze(num_envs: int = 1, **settings: Any) -> GuardedMaze:
    return GuardedMaze(num_envs, max_steps=9, **settings)


every_env = pytest.mark.parametrize(
    "make", [SignalMarket, hidden_market, BettingGame, GuardedMaze, short_maze, OptimalExecution, MarketMaking]
)


def play(env: BatchedEnv, steps: int, actions_seed: int = 0, **reset: Any) -> list[Any]:
    """Return everything that an episode shows under random actions."""
    env.action_space.seed(actions_seed)
    shown: list[Any] = [env.reset(**reset)[0]]
    for _ in range(steps):
        obs, rewards, terminated, truncated, info = env.step(env.action_space.sample())
        shown += [obs, rewards, terminated, truncated, *info.values()]
    return shown


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@every_env
def test_shapes_types_and_spaces(make: Make) -> None:
    env = make(5, seed=0)
    assert isinstance(env, VectorEnv)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    obs, info = env.reset()
    assert obs.shape == env.observation_space.shape
    assert obs.dtype == np.float32
    assert info == {}
    for _ in range(40):
        obs, rewards, terminated, truncated, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(obs)
        assert env.single_observation_space.contains(obs[0])
        assert obs.dtype == np.float32
        assert rewards.dtype == np.float64
        assert terminated.dtype == truncated.dtype == np.bool_
        assert rewards.shape == terminated.shape == truncated.shape == (5,)


@every_env
def test_a_seed_repeats_the_trajectory_and_no_seed_continues_it(make: Make) -> None:
    first = play(make(6), 300, seed=3)
    assert same(first, play(make(6), 300, seed=3))
    assert same(first, play(make(6, seed=3), 300))
    assert not same(first, play(make(6), 300, seed=4))
    env = make(6)
    assert same(first, play(env, 300, seed=3))
    assert not same(first, play(env, 300))
    assert same(first, play(env, 300, seed=3))


@every_env
def test_an_ended_copy_shows_its_last_and_its_next_first_observation(make: Make) -> None:
    env = make(4, seed=1)
    env.action_space.seed(1)
    start, _ = env.reset()
    ends = 0
    for _ in range(600):
        obs, _, terminated, truncated, info = env.step(env.action_space.sample())
        ended = terminated | truncated
        if not ended.any():
            assert info == {}
            continue
        ends += 1
        assert set(info) == {"final_obs", "_final_obs"}
        assert np.array_equal(info["_final_obs"], ended)
        assert info["final_obs"].shape == obs.shape
        assert info["final_obs"].dtype == np.float32
        # Copies that continue show the same either way; of those that start a new episode, the non-random part is the start's.
        assert np.array_equal(info["final_obs"][~ended], obs[~ended])
        known = slice(1, None) if isinstance(env, SignalMarket) else slice(None)
        assert np.array_equal(obs[ended][:, known], start[ended][:, known])
        assert not np.array_equal(info["final_obs"][ended], obs[ended])
    assert ends > 0


@every_env
def test_returned_arrays_are_never_written_again(make: Make) -> None:
    env = make(4, seed=2)
    env.action_space.seed(2)
    kept: list[Any] = [env.reset()[0]]
    copies = [kept[0].copy()]
    for _ in range(300):
        obs, rewards, terminated, truncated, info = env.step(env.action_space.sample())
        kept += [obs, rewards, terminated, truncated, *info.values()]
        copies += [array.copy() for array in (obs, rewards, terminated, truncated, *info.values())]
    assert same(kept, copies)


@every_env
def test_copies_are_independent(make: Make) -> None:
    env = make(64, seed=5)
    env.reset()
    # To the right leads past the guard; for the others it is no position and no bet, then a full and a small one.
    rewards = [env.step(np.full_like(env.action_space.sample(), action))[1] for action in (0, 0, 0, 0, 1)]
    assert np.ptp(np.sum(rewards, axis=0)) > 0.0


@every_env
def test_wrong_actions_are_refused_with_what_was_expected(make: Make) -> None:
    env = make(3, seed=0)
    env.reset()
    good = env.action_space.sample()
    with pytest.raises(ValueError, match=r"actions.shape is \(2,.*must be \(3,"):
        env.step(good[:2])
    if isinstance(env.single_action_space, Box):
        for bad in (np.nan, np.inf):
            with pytest.raises(ValueError, match="must be finite"):
                env.step(np.full_like(good, bad))
    if isinstance(env.single_action_space, Discrete):
        with pytest.raises(ValueError, match="between 0 and"):
            env.step(np.full_like(good, env.single_action_space.n))
        with pytest.raises(ValueError, match="between 0 and"):
            env.step(np.full_like(good, -1))
        with pytest.raises(ValueError, match="integer"):
            env.step(good.astype(float))


@every_env
def test_misuse_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="num_envs is 0"):
        make(0)
    env = make(2)
    with pytest.raises(ResetNeeded):
        env.step(env.action_space.sample())
    with pytest.raises(ValueError, match="options"):
        env.reset(options={"level": 3})


@every_env
def test_gymnasium_counts_the_episodes(make: Make) -> None:
    env = RecordEpisodeStatistics(make(3, seed=0))
    env.reset()
    env.action_space.seed(0)
    running, finished = np.zeros(3), 0
    for _ in range(600):
        _, rewards, terminated, truncated, info = env.step(env.action_space.sample())
        running += rewards
        ended = terminated | truncated
        if ended.any():
            np.testing.assert_allclose(info["episode"]["r"][ended], running[ended], rtol=1e-5, atol=1e-5)
            finished += int(ended.sum())
        running[ended] = 0.0
    assert finished > 0
