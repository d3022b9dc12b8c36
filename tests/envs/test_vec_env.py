"""Batches as SB3 sees them: the contract of `ArrayVecEnv` and the adapter around Gymnasium's vector environments."""

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecMonitor

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import RUNNING, ArrayVecEnv, GymVectorAdapter, StepArrays, action_masks, has_action_masks
from tailguard.io.state import env_state, load_env_state
from tailguard.market import BettingGame, SignalMarket, TradingVecEnv, random_walk

T, F = True, False


class Scripted(ArrayVecEnv):
    """Three environments whose every step is the same, written down beforehand."""

    def __init__(self, terminated: list[bool], truncated: list[bool], weights: list[float] | None = None) -> None:
        super().__init__(3, Box(-1.0, 1.0, (1,)), Box(-1.0, 1.0, (1,)))
        self.terminated, self.truncated = np.array(terminated), np.array(truncated)
        self.weights = None if weights is None else np.array(weights, np.float32)

    def reset(self) -> np.ndarray:
        return np.zeros((3, 1), np.float32)

    def step_arrays(self, actions: np.ndarray) -> StepArrays:
        ended = np.flatnonzero(self.terminated | self.truncated)
        final_obs = (10.0 + ended[:, None]).astype(np.float32)
        return StepArrays(self.reset(), actions[:, 0], self.terminated, self.truncated, ended, final_obs, self.weights)

    def episode_info(self, index: int) -> dict[str, Any]:
        return {"episode": {"r": float(index), "l": 1}}

    def double(self, number: float, plus: float = 0.0) -> float:
        return 2.0 * number + plus


def cart_poles(mode: AutoresetMode = AutoresetMode.SAME_STEP, max_steps: int = 15) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=max_steps)] * 3, autoreset_mode=mode)


# ArrayVecEnv.


def test_ends_of_episodes_become_the_dictionaries_of_sb3() -> None:
    env = Scripted([F, T, F], [F, F, T])
    obs, rewards, dones, infos = env.step(np.array([[1.0], [2.0], [3.0]]))
    assert obs.shape == (3, 1)
    assert rewards.tolist() == [1.0, 2.0, 3.0]
    assert dones.tolist() == [F, T, T]
    assert infos == [
        {},
        {"terminal_observation": np.float32([11.0]), "TimeLimit.truncated": False, "episode": {"r": 1.0, "l": 1}},
        {"terminal_observation": np.float32([12.0]), "TimeLimit.truncated": True, "episode": {"r": 2.0, "l": 1}},
    ]


def test_an_episode_that_terminates_as_it_is_cut_is_not_bootstrapped() -> None:
    infos = Scripted([T, F, F], [T, F, F]).step(np.zeros((3, 1)))[3]
    assert infos[0]["TimeLimit.truncated"] is False


def test_steps_without_effect_carry_the_sample_weight_zero() -> None:
    infos = Scripted([F, T, F], [F, F, F], weights=[1.0, 0.0, 0.0]).step(np.zeros((3, 1)))[3]
    assert ["sample_weight" in info for info in infos] == [F, T, T]
    assert infos[1]["sample_weight"] == infos[2]["sample_weight"] == 0.0
    assert infos[1]["episode"] == {"r": 1.0, "l": 1}
    assert Scripted([F, F, F], [F, F, F], weights=[1.0, 1.0, 1.0]).step(np.zeros((3, 1)))[3] == [{}, {}, {}]


def test_infos_are_not_shared_between_environments_or_steps() -> None:
    env = Scripted([F, F, F], [F, F, F])
    infos = env.step(np.zeros((3, 1)))[3]
    infos[0]["mine"] = 1
    assert infos[1] == {}
    assert env.step(np.zeros((3, 1)))[3][0] == {}


@pytest.mark.parametrize(("indices", "count"), [(None, 3), (1, 1), ([0, 2], 2)])
def test_attributes_and_methods_come_once_for_each_environment_asked_for(indices: Any, count: int) -> None:
    env = Scripted([F, F, F], [F, F, F])
    assert env.get_attr("num_envs", indices) == [3] * count
    assert env.env_method("double", 4.0, plus=0.5, indices=indices) == [8.5] * count
    assert env.env_is_wrapped(Monitor, indices) == [False] * count


def test_what_a_batch_does_not_have_is_said() -> None:
    env = Scripted([F, F, F], [F, F, F])
    assert env.get_attr("render_mode") == [None] * 3
    assert env.get_images() == [None] * 3
    with pytest.raises(AttributeError, match="colour"):
        env.get_attr("colour")
    with pytest.raises(AttributeError, match="jump"):
        env.env_method("jump")
    with pytest.raises(NotImplementedError, match="num_envs"):
        env.set_attr("num_envs", 4)
    assert env.num_envs == 3
    env.close()


# GymVectorAdapter over our own games.

GAMES: dict[str, Callable[[], VectorEnv]] = {
    "betting game": lambda: BettingGame(4),
    "signal market": lambda: SignalMarket(4, episode_length=7),
    "hidden signal": lambda: SignalMarket(4, hidden=True, episode_length=7),
}


@pytest.mark.parametrize("game", GAMES)
def test_the_adapter_shows_what_the_game_shows(game: str) -> None:
    direct, adapted = GAMES[game](), GymVectorAdapter(GAMES[game](), seed=5)
    assert adapted.observation_space == direct.single_observation_space
    assert adapted.action_space == direct.single_action_space
    assert adapted.num_envs == 4
    assert np.array_equal(adapted.reset(), direct.reset(seed=5)[0])
    direct.action_space.seed(0)
    endings = 0
    for _ in range(40):
        actions = direct.action_space.sample()
        obs, rewards, terminated, truncated, info = direct.step(actions)
        got_obs, got_rewards, dones, infos = adapted.step(actions)
        assert np.array_equal(got_obs, obs)
        assert np.array_equal(got_rewards, rewards)
        assert got_rewards.dtype == np.float64
        assert np.array_equal(dones, terminated | truncated)
        for index in range(4):
            assert ("terminal_observation" in infos[index]) == dones[index]
            if dones[index]:
                endings += 1
                assert np.array_equal(infos[index]["terminal_observation"], info["final_obs"][index])
                assert infos[index]["TimeLimit.truncated"] is bool(truncated[index])
    assert endings >= 8


def test_the_arrays_of_the_adapter_name_who_ended() -> None:
    env = GymVectorAdapter(BettingGame(6), seed=0)
    env.reset()
    counts = []
    for _ in range(20):
        step = env.step_arrays(np.full(6, 8))
        assert np.array_equal(step.ended, np.flatnonzero(step.terminated | step.truncated))
        assert step.final_obs.shape == (len(step.ended), 2)
        assert step.final_obs.dtype == step.obs.dtype == np.float32
        assert step.sample_weights is None
        counts.append(len(step.ended))
    assert min(counts) == 0 < max(counts)


def test_the_adapter_reports_episodes_as_a_monitor_does_and_keeps_their_count() -> None:
    monitored, env = (
        VecMonitor(GymVectorAdapter(BettingGame(5, rounds=4), seed=0)),
        GymVectorAdapter(BettingGame(5, rounds=4), 0),
    )
    monitored.reset(), env.reset()
    rng, episodes = np.random.default_rng(0), 0
    for step in range(30):
        actions = rng.integers(0, 9, 5)
        seen, own = monitored.step(actions)[3], env.step(actions)[3]
        for expected, info in zip(seen, own, strict=True):
            assert ("episode" in info) == ("episode" in expected)
            if "episode" in info:
                episodes += 1
                assert info["episode"]["r"] == pytest.approx(expected["episode"]["r"], abs=1e-5)
                assert info["episode"]["l"] == expected["episode"]["l"]
        if step == 13:  # in the middle of episodes: another one continues
            saved, env = env_state(env), GymVectorAdapter(BettingGame(5, rounds=4), seed=1)
            assert saved is not None
            load_env_state(env, saved)
    assert episodes > 10
    del saved["layers"][0]["state"][RUNNING]  # as earlier versions wrote it
    load_env_state(env, saved)


def test_the_adapter_gives_the_attributes_and_methods_of_the_game() -> None:
    env = GymVectorAdapter(BettingGame(2, rounds=3))
    assert env.get_attr("rounds") == [3, 3]
    best = env.env_method("solve", 1.0, indices=0)[0]
    assert best.objective == BettingGame(2, rounds=3).solve(1.0).objective


def test_the_adapter_refuses_to_set_attributes() -> None:
    with pytest.raises(NotImplementedError, match="rounds"):
        GymVectorAdapter(BettingGame(2)).set_attr("rounds", 2)


# GymVectorAdapter over Gymnasium's own environments.


def test_adapted_cart_poles_are_single_cart_poles() -> None:
    adapted = GymVectorAdapter(cart_poles(), seed=3)
    singles = [gym.make("CartPole-v1", max_episode_steps=15) for _ in range(3)]
    obs = adapted.reset()
    assert np.array_equal(obs, [env.reset(seed=3 + index)[0] for index, env in enumerate(singles)])
    rng, ends = np.random.default_rng(0), set()
    for _ in range(200):
        actions = rng.integers(2, size=3)
        obs, rewards, dones, infos = adapted.step(actions)
        for index, env in enumerate(singles):
            expected, reward, terminated, truncated, _ = env.step(actions[index])
            assert rewards[index] == reward
            assert dones[index] == (terminated or truncated)
            if dones[index]:
                assert np.array_equal(infos[index]["terminal_observation"], expected)
                assert infos[index]["TimeLimit.truncated"] is (truncated and not terminated)
                ends.add((terminated, truncated))
                expected, _ = env.reset()
            else:
                assert infos[index] == {}
            assert np.array_equal(obs[index], expected)
    assert {(T, F), (F, T)} <= ends


def test_seeding_the_adapter_works_at_the_next_reset_and_once() -> None:
    env = GymVectorAdapter(cart_poles(), seed=3)
    first, second = env.reset(), env.reset()
    assert not np.array_equal(first, second)
    assert env.seed(3) == [3, 4, 5]
    assert np.array_equal(env.reset(), first)
    assert np.array_equal(env.reset(), second)
    assert np.array_equal(GymVectorAdapter(cart_poles(), seed=3).reset(), first)
    assert not np.array_equal(GymVectorAdapter(cart_poles(), seed=4).reset(), first)


def test_the_adapter_hands_on_the_options_of_a_reset() -> None:
    env = GymVectorAdapter(cart_poles(), seed=0)
    env.set_options({"low": 0.01, "high": 0.011})
    obs = env.reset()
    assert ((obs >= 0.01) & (obs <= 0.011)).all()
    assert (env.reset() < 0.01).any()  # options count for one reset


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_other_ways_to_reset_are_refused(mode: AutoresetMode) -> None:
    with pytest.raises(ValueError, match="must reset in the same step"):
        GymVectorAdapter(cart_poles(mode))


def test_an_environment_that_does_not_say_how_it_resets_is_refused() -> None:
    env = cart_poles()
    del env.metadata["autoreset_mode"]
    with pytest.raises(ValueError, match="but has None"):
        GymVectorAdapter(env)


def test_what_the_adapter_returned_is_never_changed_by_a_later_step() -> None:
    for env, actions in (
        (GymVectorAdapter(cart_poles(), seed=0), [0, 1, 0]),
        (GymVectorAdapter(BettingGame(3), seed=0), [8, 4, 1]),
    ):
        kept = [(obs, obs.copy()) for obs in [env.reset()]]
        for _ in range(30):
            step = env.step_arrays(np.array(actions))
            kept += [(array, array.copy()) for array in step if array is not None]
        assert all(np.array_equal(array, copy) for array, copy in kept)


class Corridor(gym.Env[Any, Any]):
    """A walk of three steps that is watched by a Dict; only the door that it names may be taken, and it says how it ended."""

    def __init__(self, first_door: int = 0) -> None:
        self.observation_space = Dict({"place": Box(0.0, 9.0, (1,)), "door": Discrete(3)})
        self.action_space, self.first_door = Discrete(3), first_door

    def _observed(self) -> dict[str, Any]:
        return {"place": np.float32([self.place]), "door": self.door}

    @property
    def door(self) -> int:
        return (self.first_door + self.place) % 3

    def action_masks(self) -> np.ndarray:
        return np.arange(3) == self.door

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return self._observed(), {"fresh": True}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        assert action == self.door, "another door than the open one"
        self.place += 1
        over = self.place == 3 + self.first_door
        info = {"is_success": self.first_door == 1} if over else {"seen": {"place": self.place}}
        return self._observed(), 1.0, over, False, info


def corridors(kind: type[SyncVectorEnv] | type[AsyncVectorEnv]) -> VectorEnv:
    return kind([lambda: Corridor(0), lambda: Corridor(1)], autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_the_adapter_hands_on_dicts_masks_and_infos_of_separate_environments(kind: Any) -> None:
    env = GymVectorAdapter(corridors(kind), seed=0)
    try:
        obs = env.reset()
        assert isinstance(obs, dict)
        assert obs["door"].tolist() == [0, 1]
        assert has_action_masks(env)
        assert not env.has_attr("colour")
        with pytest.raises(AttributeError, match="colour"):
            env.get_attr("colour")
        assert env.get_attr("first_door", indices=1) == [1]
        with pytest.raises(ValueError, match="only be called in all environments"):
            env.env_method("action_masks", indices=1)
        seen = []
        for _ in range(4):
            masks = action_masks(env)
            assert masks.shape == (2, 3)
            obs, _, dones, infos = env.step(masks.argmax(1))
            seen.append([{**info, "done": bool(done)} for info, done in zip(infos, dones, strict=True)])
        assert seen[0] == [{"seen": {"place": 1}, "done": False}] * 2
        end = {"done": True, "TimeLimit.truncated": False}
        assert seen[2][0].pop("terminal_observation") == {"place": [3.0], "door": 0}
        assert seen[2][0] == {**end, "is_success": False, "episode": {"r": 3.0, "l": 3}}
        assert seen[2][1] == {"seen": {"place": 3}, "done": False}
        assert seen[3][1].pop("terminal_observation") == {"place": [4.0], "door": 2}
        assert seen[3][1] == {**end, "is_success": True, "episode": {"r": 4.0, "l": 4}}
        assert obs["place"].tolist() == [[1.0], [0.0]]
    finally:
        env.close()


@pytest.mark.parametrize("policy", ["MultiInputPolicy", "MultiInputLstmPolicy"])
def test_an_agent_learns_in_separate_environments_with_masks_and_says_who_succeeded(policy: str) -> None:
    model = DistributionalPPO(policy, corridors(SyncVectorEnv), n_steps=14, seed=0).learn(2 * 14)
    assert sorted(model.ep_success_buffer) == [False] * 4 + [True] * 3  # 14 steps of 3, and of 4


def test_closing_the_adapter_closes_the_environment() -> None:
    poles = cart_poles()
    GymVectorAdapter(poles).close()
    assert poles.closed


# SB3 evaluates on them.


class Always:
    """A policy that knows one action."""

    def __init__(self, action: Any) -> None:
        self.action = np.asarray(action)

    def predict(
        self, obs: np.ndarray, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, Any]:
        return np.stack([self.action] * len(obs)), state


def test_sb3_evaluates_a_policy_on_the_adapter() -> None:
    env = VecMonitor(GymVectorAdapter(BettingGame(3, rounds=5), seed=0))
    returns, lengths = evaluate_policy(Always(0), env, n_eval_episodes=6, return_episode_rewards=True)
    assert returns == [0.0] * 6
    assert lengths == [5] * 6
    returns, _ = evaluate_policy(Always(8), env, n_eval_episodes=6, return_episode_rewards=True)
    assert set(returns) <= {-16.0, 240.0}  # all or nothing: 16 chips become 0 or 256


def test_sb3_evaluates_a_policy_on_a_trading_batch() -> None:
    bars = random_walk(100, seed=0)
    env = TradingVecEnv(bars, n_envs=2, seed=0, fee=0.0, long_only=True)
    mean, std = evaluate_policy(Always([1.0]), env, n_eval_episodes=4, warn=False)
    assert mean == pytest.approx(math.log(bars["close"].iloc[-1] / bars["open"].iloc[64]), rel=1e-5)
    assert std == pytest.approx(0.0, abs=1e-6)


def test_sb3_trains_and_evaluates_an_agent_on_adapted_cart_poles() -> None:
    env = VecMonitor(GymVectorAdapter(cart_poles(max_steps=20), seed=0))
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu").learn(2 * 3 * 32)
    returns, lengths = evaluate_policy(model, env, n_eval_episodes=5, return_episode_rewards=True)
    assert returns == lengths  # a pole that stands earns 1 a step
    assert max(lengths) <= 20
