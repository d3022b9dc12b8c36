"""The running return in observations: the same numbers along every way through SB3, and those of a loop."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from test_vec_env import Scripted

from tailguard import ReturnAugmentedEnv, ReturnObserver
from tailguard.envs.return_observer import ReturnRule, RunningReturn
from tailguard.envs.vec_env import StepArrays, step_with_arrays

GAMMA, STEPS = 0.9, 60


class Diary(Scripted):
    """Three environments with observations, rewards and ends of all kinds, written down beforehand."""

    def __init__(self, seed=0):
        super().__init__([False] * 3, [False] * 3)
        rng = np.random.default_rng(seed)
        self.obs, self.finals = rng.uniform(-1.0, 1.0, (2, STEPS + 1, 3, 1)).astype(np.float32)
        self.rewards = rng.normal(size=(STEPS, 3))
        self.ends = rng.choice(3, size=(STEPS, 3), p=[0.7, 0.15, 0.15])  # 1 terminates, 2 truncates
        self.t = 0

    def reset(self):
        self.t = 0
        return self.obs[0]

    def step_arrays(self, actions):
        t, self.t = self.t, self.t + 1
        terminated, truncated = self.ends[t] == 1, self.ends[t] == 2
        ended = np.flatnonzero(self.ends[t])
        return StepArrays(self.obs[t + 1], self.rewards[t], terminated, truncated, ended, self.finals[t, ended])


ACTIONS = np.zeros((3, 1))


def through_arrays(env):
    """Return the observations of a walk, and the final ones by step and environment."""
    seen, finals = [env.reset()], {}
    for t in range(STEPS):
        step, _ = step_with_arrays(env, ACTIONS)
        seen.append(step.obs)
        finals |= {(t, int(i)): final for i, final in zip(step.ended, step.final_obs, strict=True)}
    return np.stack(seen), finals


def through_sb3(env):
    seen, finals = [env.reset()], {}
    for t in range(STEPS):
        obs, _, dones, infos = env.step(ACTIONS)
        seen.append(obs)
        finals |= {(t, int(i)): infos[i]["terminal_observation"] for i in np.flatnonzero(dones)}
    return np.stack(seen), finals


def expected_columns(diary):
    """A loop over every environment by itself."""
    seen, finals = np.zeros((STEPS + 1, 3, 2)), {}
    seen[0, :, 1] = 1.0
    for i in range(3):
        rewards = []
        for t in range(STEPS):
            rewards.append(diary.rewards[t, i])
            now = (sum(GAMMA**k * r for k, r in enumerate(rewards)), GAMMA ** len(rewards))
            if diary.ends[t, i]:
                finals[t, i], rewards, now = now, [], (0.0, 1.0)
            seen[t + 1, i] = now
    return seen, finals


def same(one, other):
    np.testing.assert_array_equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for key, final in one[1].items():
        np.testing.assert_array_equal(final, other[1][key])


@pytest.mark.parametrize("walk", [through_arrays, through_sb3])
def test_the_columns_are_the_discounted_sum_and_the_next_discount(walk):
    diary = Diary()
    seen, finals = walk(ReturnObserver(diary, GAMMA))
    columns, final_columns = expected_columns(diary)
    assert seen.dtype == np.float32
    np.testing.assert_array_equal(seen[..., :1], diary.obs)
    np.testing.assert_allclose(seen[..., 1:], columns, rtol=1e-6, atol=1e-6)
    assert finals.keys() == final_columns.keys()
    assert {diary.ends[key] for key in finals} == {1, 2}
    for (t, i), final in finals.items():
        np.testing.assert_array_equal(final[:1], diary.finals[t, i])
        np.testing.assert_allclose(final[1:], final_columns[t, i], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alphas", [None, [0.1, 0.2, 0.5]], ids=["one tail", "tails"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda env, watch: watch(env),
        lambda env, watch: watch(VecMonitor(env)),
        lambda env, watch: VecMonitor(watch(env)),
        lambda env, watch: VecMonitor(watch(VecMonitor(env))),
    ],
    ids=["bare", "monitor inside", "monitor outside", "both"],
)
def test_every_way_through_gives_the_same_numbers(wrap, alphas):
    def watch(env):
        return ReturnObserver(env, GAMMA, alphas, seed=4)

    bare = through_arrays(watch(Diary()))
    same(through_arrays(wrap(Diary(), watch)), bare)
    same(through_sb3(wrap(Diary(), watch)), bare)


@pytest.mark.parametrize("walk", [through_arrays, through_sb3])
def test_inside_the_observer_a_normalised_observation_leaves_the_return_as_it_is(walk):
    diary = Diary()
    seen, finals = walk(ReturnObserver(VecNormalize(diary, norm_reward=False), GAMMA))
    columns, final_columns = expected_columns(diary)
    np.testing.assert_allclose(seen[..., 1:], columns, rtol=1e-6, atol=1e-6)
    for key, final in finals.items():
        np.testing.assert_allclose(final[1:], final_columns[key], rtol=1e-6, atol=1e-6)
    assert not np.allclose(seen[1:, :, 0], diary.obs[1:, :, 0])


def test_rewards_and_ends_pass_through():
    diary, env = Diary(), ReturnObserver(Diary(), GAMMA)
    env.reset()
    for t in range(STEPS):
        step, infos = step_with_arrays(env, ACTIONS)
        np.testing.assert_array_equal(step.rewards, diary.rewards[t])
        np.testing.assert_array_equal(step.terminated, diary.ends[t] == 1)
        np.testing.assert_array_equal(step.truncated, diary.ends[t] == 2)
        assert [info.get("TimeLimit.truncated") for info in infos] == [None if e == 0 else e == 2 for e in diary.ends[t]]


def test_a_reset_begins_all_episodes_anew():
    env = ReturnObserver(Diary(), GAMMA)
    first = env.reset()
    for _ in range(7):
        env.step(ACTIONS)
    np.testing.assert_array_equal(env.reset(), first)


def test_dictionaries_of_the_wrapped_environment_are_not_changed():
    class Keeping(Diary):
        def infos_of(self, step):
            self.kept = list(infos := super().infos_of(step))
            return infos

    inner = Keeping()
    env = ReturnObserver(inner, GAMMA)
    env.reset()
    for _ in range(STEPS):
        _, _, dones, infos = env.step(ACTIONS)
        for i in np.flatnonzero(dones):
            assert inner.kept[i]["terminal_observation"].shape == (1,)
            assert infos[i]["terminal_observation"].shape == (3,)


# Tails.


def test_a_tail_is_drawn_for_each_episode_and_stays_to_its_end():
    alphas = [0.1, 0.25, 0.5]
    diary = Diary()
    seen, finals = through_arrays(ReturnObserver(diary, GAMMA, alphas, seed=0))
    tails = seen[..., 3]
    assert set(np.unique(tails)) == set(np.float32(alphas))
    changed = tails[1:] != tails[:-1]
    assert not changed[diary.ends == 0].any()
    assert changed[diary.ends > 0].mean() > 0.4  # two thirds, since one of three tails is drawn again
    for (t, i), final in finals.items():
        assert final[3] == tails[t, i]


def test_tails_are_drawn_evenly_and_by_the_seed():
    walks = [through_arrays(ReturnObserver(Diary(), GAMMA, [0.1, 0.5], seed=seed))[0][..., 3] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(walks[0], walks[1])
    assert (walks[0] != walks[2]).any()
    env = ReturnObserver(Diary(), GAMMA, [0.1, 0.5], seed=0)
    drawn = np.concatenate([env.reset()[:, 3] for _ in range(1000)])
    assert abs((drawn == np.float32(0.1)).mean() - 0.5) < 4.0 * 0.5 / np.sqrt(3000)


def test_new_tails_count_at_once():
    env = ReturnObserver(Diary(), GAMMA, [0.1, 0.5], seed=0)
    env.reset()
    env.set_alphas([0.3])
    assert (env.step(ACTIONS)[0][:, 3] == np.float32(0.3)).all()


# Spaces, refusals, single environments.


def test_the_space_contains_what_comes_out():
    env = ReturnObserver(Diary(), GAMMA, [0.1, 1.0], seed=0)
    seen, finals = through_sb3(env)
    assert env.observation_space.shape == (4,)
    assert all(env.observation_space.contains(row) for row in seen.reshape(-1, 4))
    assert all(env.observation_space.contains(np.asarray(final)) for final in finals.values())


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(0.0, 1.0, (2, 2))], ids=str)
def test_other_observations_are_refused(space):
    diary = Diary()
    diary.observation_space = space
    with pytest.raises(ValueError, match="one-dimensional Box"):
        ReturnObserver(diary, GAMMA)


@pytest.mark.parametrize("gamma", [0.0, -0.1, 1.1, float("nan")])
def test_impossible_discounts_are_refused(gamma):
    with pytest.raises(ValueError, match="gamma"):
        RunningReturn(2, ReturnRule(gamma))
    with pytest.raises(ValueError, match="gamma"):
        ReturnObserver(Diary(), gamma)


def test_without_a_discount_the_return_is_the_plain_sum():
    running = RunningReturn(2, ReturnRule(1.0))
    for _ in range(1000):
        running.add(np.array([1.0, -0.5]))
    np.testing.assert_array_equal(running.columns(), [[1000.0, 1.0], [-500.0, 1.0]])


def test_very_long_episodes_keep_a_discount_that_can_be_divided_by():
    running = RunningReturn(1, ReturnRule(0.5))
    for _ in range(5000):
        running.add(np.ones(1))
    total, discount = running.columns()[0]
    assert total == pytest.approx(2.0)
    assert discount > 0.0
    assert np.isfinite(np.float32(1.0) / discount)


class Countdown(gym.Env):
    """Pays the number of steps that are left; ends at zero or is cut."""

    observation_space, action_space = spaces.Box(0.0, 10.0, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 4
        return np.array([4.0], np.float32), {"begun": True}

    def step(self, action):
        self.left -= 1
        return np.array([self.left], np.float32), float(self.left), self.left == 0, False, {}


def test_a_single_environment_sees_the_same_as_one_of_many():
    single, many = ReturnAugmentedEnv(Countdown(), GAMMA), ReturnObserver(DummyVecEnv([lambda: Monitor(Countdown())]), GAMMA)
    for _ in range(2):
        obs, info = single.reset(seed=0)
        assert info == {"begun": True}
        np.testing.assert_array_equal(obs, many.reset()[0])
        done = False
        while not done:
            obs, _, done, _, _ = single.step(0)
            vector_obs, _, _, infos = many.step([0])
            np.testing.assert_array_equal(obs, infos[0]["terminal_observation"] if done else vector_obs[0])
            assert single.observation_space.contains(obs)
        # 3 + 0.9 * 2 + 0.81 * 1 + 0.729 * 0
        np.testing.assert_allclose(obs, [0.0, 5.61, 0.9**4], rtol=1e-6)
    assert single.observation_space == many.observation_space


def test_a_single_environment_with_other_observations_is_refused():
    env = Countdown()
    env.observation_space = spaces.Box(0.0, 1.0, (2, 2))
    with pytest.raises(ValueError, match="one-dimensional Box"):
        ReturnAugmentedEnv(env, GAMMA)


def test_cart_poles_count_their_steps():
    """Reward 1 a step: with gamma = 1 the return so far is the length so far."""
    env = ReturnObserver(make_vec_env("CartPole-v1", 2, seed=0), 1.0)
    env.reset()
    lengths = np.zeros(2)
    for _ in range(100):
        obs, _, dones, infos = env.step(np.zeros(2, np.int64))
        lengths += 1.0
        for i in np.flatnonzero(dones):
            assert infos[i]["terminal_observation"][4] == lengths[i] == infos[i]["episode"]["l"]
        lengths[dones] = 0.0
        np.testing.assert_array_equal(obs[:, 4], lengths)
