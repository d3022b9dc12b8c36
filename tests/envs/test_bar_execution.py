"""Execution on resampled bars: what is drawn, what is shown and what is paid."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from tailguard.envs.bar_execution import LEAST_VOLUME, BarExecution, VolumeForecast
from tailguard.envs.single import SingleEnv


@pytest.fixture
def bars():
    rng = np.random.default_rng(0)
    return {"returns": rng.normal(0.001, 0.02, 300), "volumes": rng.lognormal(0.0, 0.5, 300)}


def test_the_cost_of_a_step_is_that_of_the_bar_that_was_drawn(bars):
    env = BarExecution(6, steps=4, mean_block=3.0, risk_aversion=0.0, bars_per_day=2.0, **bars)
    assert env.horizon == 2.0
    assert env.volatility == pytest.approx(1e4 * bars["returns"].std() * np.sqrt(2.0))
    env.reset(seed=3)
    left, rewards = env.left, env.step(np.full((6, 1), 0.3))[1]
    trade = left - env.left
    drawn = env.state_dict()["arrays"]["_bar"]
    move = 1e4 * (bars["returns"] - bars["returns"].mean())[drawn] - env.permanent_impact * trade
    paid = trade * (env.half_spread + env.temporary_impact / 0.5 * trade / (bars["volumes"] / bars["volumes"].mean())[drawn])
    np.testing.assert_allclose(rewards, env.left * move - paid, rtol=1e-12)


def test_blocks_have_the_mean_length_that_was_asked_for_and_every_bar_is_as_likely(bars):
    env = BarExecution(2000, steps=50, mean_block=5.0, **bars)
    env.reset(seed=0)
    bar, continued, seen = env.state_dict()["arrays"]["_bar"], [], []
    for _ in range(49):
        env.step(np.full((2000, 1), -1.0))
        following = env.state_dict()["arrays"]["_bar"]
        continued.append(np.mean(following == (bar + 1) % 300))
        seen.append(following)
        bar = following
    assert 1.0 - np.mean(continued) == pytest.approx(1.0 / 5.0, abs=0.01)
    counts = np.bincount(np.concatenate(seen), minlength=300)
    assert counts.min() > 0.5 * counts.mean()


def test_the_volume_of_the_bar_before_is_shown(bars):
    env = BarExecution(5, risk_aversion=(1e-3, 1e-1), **bars)
    obs, _ = env.reset(seed=0)
    assert obs.shape == (5, 5)
    for _ in range(3):
        bar = env.state_dict()["arrays"]["_bar"]
        np.testing.assert_allclose(obs[:, -2], np.log(bars["volumes"] / bars["volumes"].mean())[bar], rtol=1e-5)
        np.testing.assert_allclose(obs[:, -1], np.log(env.vwap_share() * np.round(obs[:, 1] * 20.0)), rtol=1e-4, atol=1e-6)
        obs = env.step(np.zeros((5, 1)))[0]


def test_a_copy_in_a_batch_and_alone_are_equal_to_the_bit(bars):
    batch = BarExecution(3, steps=5, **bars)
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (20, 3, 1))
    batch.reset(seed=4)
    together = [batch.step(action) for action in actions]
    single = SingleEnv(BarExecution(1, steps=5, **bars))
    single.reset(seed=6)
    for action, (obs, rewards, *_) in zip(actions, together, strict=True):
        shown, reward, ended, _, _ = single.step(action[2])
        assert reward == rewards[2]
        assert np.array_equal(single.reset()[0] if ended else shown, obs[2])


def test_the_environment_is_checked_by_gymnasium(bars):
    check_env(SingleEnv(BarExecution(1, **bars)), skip_render_check=True)


def test_what_cannot_be_is_refused(bars):
    with pytest.raises(ValueError, match="returns"):
        BarExecution(returns=[0.1], volumes=[1.0])
    with pytest.raises(ValueError, match="volumes"):
        BarExecution(returns=bars["returns"], volumes=np.zeros(300))
    with pytest.raises(ValueError, match="volatility"):
        BarExecution(volatility=100.0, **bars)
    with pytest.raises(NotImplementedError, match="not known"):
        BarExecution(**bars).solve()


def day_of_five(days=400):
    """Volumes with a profile of five times of day, and deviations from it that last."""
    rng, profile = np.random.default_rng(1), np.array([2.0, 0.8, 0.4, 0.7, 1.6])
    deviation, logs = 0.0, []
    for bar in range(5 * days):
        deviation = 0.6 * deviation + rng.normal(0.0, 0.3)
        logs.append(np.log(profile[bar % 5]) + deviation)
    return profile, np.exp(logs), np.arange(5 * days) % 5


def test_a_forecast_finds_the_profile_of_the_day_and_how_long_deviations_last():
    profile, volumes, times = day_of_five()
    forecast = VolumeForecast.fit(volumes, times)
    np.testing.assert_allclose(forecast.profile, profile, rtol=0.15)
    assert forecast.persistence == pytest.approx(0.6, abs=0.05)
    # Three bars from the second time of the day on, twice the usual volume now.
    ahead = VolumeForecast(profile, 0.5).ahead(np.array([2.0 * profile[1]]), np.array([1]), 4)[0]
    np.testing.assert_allclose(ahead, profile[[2, 3, 4, 0]] * 2.0 ** np.array([0.5, 0.25, 0.125, 0.0625]))


def test_a_path_keeps_the_time_of_day_and_draws_all_bars_of_it():
    _, volumes, times = day_of_five(40)
    returns = np.random.default_rng(0).normal(0.0, 0.01, len(volumes))
    env = BarExecution(500, steps=60, mean_block=2.0, returns=returns, volumes=volumes, times=times, bars_per_day=5.0)
    env.reset(seed=0)
    bar, seen, jumps = env.state_dict()["arrays"]["_bar"], [], []
    for _ in range(59):
        env.step(np.full((500, 1), -1.0))
        following = env.state_dict()["arrays"]["_bar"]
        assert np.array_equal(times[following], (times[bar] + 1) % 5)
        jumps.append(np.mean(following != (bar + 1) % len(times)))
        bar = following
        seen.append(bar)
    assert np.mean(jumps) == pytest.approx(0.5, abs=0.03)
    counts = np.bincount(np.concatenate(seen), minlength=len(times))
    assert counts.min() > 0.5 * counts.mean()


def test_vwap_sells_in_proportion_to_the_volume_that_is_expected():
    profile, volumes, times = day_of_five(40)
    returns = np.random.default_rng(0).normal(0.0, 0.01, len(volumes))
    known = VolumeForecast(profile, 0.0)
    env = BarExecution(7, steps=5, returns=returns, volumes=volumes, times=times, bars_per_day=5.0, forecast=known)
    env.reset(seed=0)
    now, sold = times[env.state_dict()["arrays"]["_bar"]], []
    for step in range(5):
        left = env.left
        share = env.vwap_share()
        env.step(env.action(share, step)[:, None])
        sold.append(left * share)
    for copy in range(7):  # any five bars are a whole day
        np.testing.assert_allclose(np.array(sold)[:, copy], profile[(now[copy] + 1 + np.arange(5)) % 5] / profile.sum())


def test_a_bar_without_much_volume_does_not_cost_without_limit(bars):
    bars["volumes"][::2] = 1e-9
    env = BarExecution(4, **bars)
    assert env.volumes.min() == LEAST_VOLUME
    with pytest.raises(ValueError, match="times"):
        BarExecution(times=[0, 1], **bars)
    with pytest.raises(ValueError, match="below 1"):
        BarExecution(times=np.arange(300) % 2, forecast=VolumeForecast(np.ones(1), 0.5), **bars)
