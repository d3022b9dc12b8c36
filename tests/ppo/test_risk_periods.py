"""Risk per period: what is learnt from periods that end inside of episodes, by a direct computation; and what carries over."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from stable_baselines3.common.vec_env import VecMonitor
from test_algorithm import B, D, Script, T, collect, make, mlp_and_lstm, weights
from test_algorithm import prepared as prepared_by_gamma
from test_risk_agents import check_ratios

from tailguard import DistributionalPPO, ReturnAugmentedEnv, ReturnObserver, TradingEnv, TradingVecEnv
from tailguard.envs.return_observer import ReturnRule, RunningReturn
from tailguard.envs.vec_env import step_with_arrays
from tailguard.market import random_walk
from tailguard.market.features import build_pooled_features
from tailguard.periods import Period

PERIOD = 5
RISK = {"objective": "cvar", "alpha": 0.2, "anneal": 0.0, "period": PERIOD}


def prepared(model):
    """The returns of periods are not discounted, whatever gamma is."""
    gamma, model.gamma = model.gamma, model.return_gamma
    experience = prepared_by_gamma(model)
    model.gamma = gamma
    return experience


def ends_of_periods(env):
    """``[T, B]`` true where a period ends: five steps after it or the episode began."""
    over, age = np.zeros((T, B), bool), np.zeros(B, int)
    for t in range(T):
        age += 1
        over[t] = age == PERIOD
        age[over[t] | env.dones[t]] = 0
    return over


@mlp_and_lstm
def test_targets_are_sums_to_the_end_of_the_period(kind):
    """With lambda = 1: rewards to the period's end, and nothing after it; what is cut counts with what the critics predict."""
    env = Script(ends=0.1)
    model = make(kind, env, risk=RISK, gamma=0.5, critic={"value_lambda": 1.0})
    collect(model)
    over = ends_of_periods(env)
    np.testing.assert_array_equal(model.rollout_buffer.period_ended.numpy(), over)
    experience = prepared(model)
    targets = (
        experience.batch.targets
        if kind == "mlp"
        else torch.stack([experience.layout.gather(each) for each in experience.batch.targets])
    )
    targets = targets.reshape(2, T, B, -1).numpy()
    kinds = set()
    for t, b in itertools.product(range(T), range(B)):
        total = 0.0
        for k in range(t, T):
            total += env.rewards[k, b]
            whole = over[k, b] or env.terminated[k, b]
            if whole or env.truncated[k, b]:
                break
        else:
            whole = False
        kinds.add((bool(over[k, b]), bool(env.terminated[k, b]), bool(env.truncated[k, b])))
        if whole:
            np.testing.assert_allclose(targets[:, t, b], total, rtol=1e-4, atol=1e-5)
        else:  # the spread is that of a prediction
            assert targets[:, t, b].std(axis=-1).min() > 0.0
    assert {(True, False, False), (False, True, False), (False, False, True), (False, False, False)} <= kinds


@mlp_and_lstm
def test_finished_periods_are_their_sums_and_cut_ones_distributions(kind):
    env = Script(ends=0.1)
    model = make(kind, env, risk=RISK, gamma=0.5)
    collect(model)
    finished, over, running = prepared(model).finished, ends_of_periods(env), np.zeros(B)
    totals, cut = [], 0
    for t in range(T):
        running += env.rewards[t]
        for b in np.flatnonzero(over[t] | env.dones[t]):
            if over[t, b] or env.terminated[t, b]:
                totals.append(running[b])
            else:
                cut += 1
            running[b] = 0.0
    np.testing.assert_allclose(finished.totals, totals, rtol=1e-5, atol=1e-6)
    assert len(finished.atoms) == cut > 0


class RecordedMarket(TradingVecEnv):
    """A market that remembers its steps: row before it, first row of the episode, reward, and whether it was cut."""

    def __init__(self, bars, **settings):
        super().__init__(bars, **settings)
        self.steps = []

    def step_arrays(self, actions):
        rows, first = self.batch.rows.copy(), self.batch.first_rows.copy()
        step = super().step_arrays(actions)
        self.steps.append((rows, first, step.rewards, step.truncated))
        return step


@pytest.mark.parametrize("wrap", [lambda env: env, VecMonitor], ids=["arrays", "dictionaries"])
@pytest.mark.parametrize("period", ["1M", 12])
def test_a_part_of_a_month_is_no_sample_of_a_month(period, wrap):
    """Episodes of 70 days begin anywhere in a month: what is left of it counts for learning, and not for the VaR."""
    bars = random_walk(400, seed=3)  # a bar every day
    market = RecordedMarket(bars, n_envs=B, seed=0, episode_length=70, fee=0.001)
    env = wrap(ReturnObserver(market, period=period))
    model = make("lstm", env, risk={**RISK, "period": period}, n_steps=40, gamma=0.9)
    totals, cut, parts = [], 0, 0
    months = bars.index.year * 12 + bars.index.month
    running = np.zeros(B)
    for _ in range(5):  # periods run through the ends of rollouts
        market.steps.clear()
        collect(model)
        found = prepared(model).finished
        totals.clear()
        cut = 0
        for rows, first, rewards, truncated in market.steps:
            running += rewards
            for b in range(B):
                bar = rows[b] + 1  # the reward is that of the next bar
                if isinstance(period, str):
                    over, part = months[bar + 1] != months[bar], months[first[b]] == months[bar]
                else:
                    over, part = (bar - first[b]) % period == 0, False
                if over or truncated[b]:
                    parts += part
                    if over and not part:
                        totals.append(running[b])
                    cut += bool(truncated[b] and not over and not part)
                    running[b] = 0.0
        np.testing.assert_allclose(found.totals, totals, rtol=1e-4, atol=1e-6)
        assert len(found.atoms) == cut
    assert (parts > 5) == isinstance(period, str)
    assert model.rollout_buffer.period_ended.any()


def test_the_var_of_months_is_not_that_of_parts_of_months():
    """Every day earns 1 %: every month earns 28 to 31 %, and none less, wherever episodes begin."""
    times = pd.date_range("2019-01-01", periods=800, tz="UTC")
    price = np.exp(0.01 * np.arange(801))
    columns = {"open": price[:-1], "high": price[1:], "low": price[:-1], "close": price[1:], "volume": 1.0}
    rules = {"episode_length": 80, "fee": 0.0, "n_envs": B, "fill": "close", "core": (1.0,), "active": 0.0}
    model = make("mlp", TradingVecEnv(pd.DataFrame(columns, times), seed=0, **rules), risk={**RISK, "period": "1M"}, n_steps=40)
    for _ in range(20):
        collect(model)
        model.train()
    (window,) = model.objective.returns
    assert len(window) > 100
    assert np.concatenate([totals for totals, _ in window.rollouts]).min() > 0.27
    assert min(model.episode_returns.finished, default=0.0) > 0.0


def test_symbols_of_a_pool_have_their_own_months():
    bars = pd.concat({name: random_walk(90, seed=3) for name in "ab"}, axis=1)
    periods = TradingVecEnv(bars, features=build_pooled_features(bars)).decision_periods(Period.parse("1M"))
    for k in range(2):
        begun = Period.parse("1M").decisions(bars.index).begun
        np.testing.assert_array_equal(periods.begun[90 * k : 90 * (k + 1)], np.where(begun < 0, -1, begun + 90 * k))


@pytest.mark.parametrize("kind", ["mlp", "lstm", "shared lstm"])
def test_on_the_first_pass_every_ratio_is_one_across_the_ends_of_periods(kind):
    """Recurrent states run through the end of a period: a reset there would show in the ratios."""
    model = make(kind, Script(ends=0.1), risk=RISK, normalize_obs=True)
    model.policy.budget.caps.fill_(0.5)
    for _ in range(3):
        collect(model)
        check_ratios(model)
        model.train()
    assert model.policy.budget.caps.isfinite().all()


def test_discount_and_period_have_nothing_to_do_with_each_other():
    """PPO's gamma changes nothing of an agent whose returns are those of periods."""
    models = [make("lstm", Script(), risk=RISK, gamma=gamma).learn(2 * T * B) for gamma in (0.5, 0.99)]
    torch.testing.assert_close(weights(models[0].policy), weights(models[1].policy), rtol=0.0, atol=0.0)
    assert models[0].return_gamma == 1.0


def test_a_neutral_agent_takes_no_notice_of_a_period():
    risks = ({}, {"objective": "neutral", "period": 5})
    neutral = [make("mlp", Script(), risk=risk).learn(2 * T * B) for risk in risks]
    torch.testing.assert_close(weights(neutral[0].policy), weights(neutral[1].policy), rtol=0.0, atol=0.0)


def test_torch_and_compiled_networks_learn_the_same_from_periods():
    settings = [{"policy_kwargs": {"compiled": compiled}} for compiled in (True, False)]
    models = [make("lstm", Script(ends=0.1), risk=RISK, **each).learn(2 * T * B) for each in settings]
    torch.testing.assert_close(weights(models[0].policy), weights(models[1].policy), atol=1e-4, rtol=1e-3)


# The observer.


class Counting(Script):
    """Pays 1 a step, and is cut after 12 steps."""

    def __init__(self):
        super().__init__(ends=0.0)
        self.rewards[:] = 1.0
        self.truncated[11::12] = True


@pytest.mark.parametrize("wrap", [lambda env: env, VecMonitor], ids=["arrays", "dictionaries"])
def test_the_running_return_restarts_with_each_period_and_each_episode(wrap):
    env = wrap(ReturnObserver(Counting(), period=PERIOD))
    obs, seen, ends = env.reset(), [], []
    for _ in range(24):
        seen.append(obs[0, D:].copy())
        step, _ = step_with_arrays(env, np.zeros((B, 2)))
        obs = step.obs
        ends.append(step.period_ended is not None and bool(step.period_ended[0]))
        if len(step.ended):
            np.testing.assert_allclose(step.final_obs[0, D:], [2.0, 3.0 / PERIOD], rtol=1e-6)
    ages = np.array([age for _ in range(2) for age in (*range(5), *range(5), *range(2))])
    np.testing.assert_allclose(np.array(seen), np.column_stack((ages, 1.0 - ages / PERIOD)), rtol=1e-6)
    np.testing.assert_array_equal(np.flatnonzero(ends), [4, 9, 16, 21])


@pytest.mark.parametrize("period", [7, "1W", "1M"])
def test_a_single_account_sees_what_one_of_many_sees(period):
    bars = random_walk(400, seed=3)
    rules = {"episode_length": 60, "fee": 0.001}
    many = ReturnObserver(TradingVecEnv(bars, n_envs=3, seed=5, **rules), period=period)
    rows = many.venv.batch.rows if isinstance(period, str) else None
    batched, singles = many.reset(), [ReturnAugmentedEnv(TradingEnv(bars, **rules), period=period) for _ in range(3)]
    for i, env in enumerate(singles):
        np.testing.assert_array_equal(env.reset(seed=5 + i)[0], batched[i])
    expected = None if rows is None else Period.parse(period).rows(bars.index)
    rng, restarts = np.random.default_rng(0), 0
    for _ in range(130):
        actions, before = rng.uniform(-1.0, 1.0, (3, 1)), many.venv.batch.rows.copy()
        step, _ = step_with_arrays(many, actions)
        for i, env in enumerate(singles):
            obs, _, terminated, truncated, info = env.step(actions[i])
            assert bool(step.period_ended[i]) == info.get("period_ended", False)
            if expected is not None:  # random_walk has a bar every day, so that every bar comes when it is expected
                assert bool(step.period_ended[i]) == bool(expected.restarts[before[i] + 1])
                if not (terminated or truncated):
                    left = expected.to_go[before[i] + 1]
                    assert (obs[-1] == 1.0) == bool(step.period_ended[i]) or left > 20
            restarts += bool(step.period_ended[i])
            obs = env.reset()[0] if terminated or truncated else obs
            np.testing.assert_array_equal(obs, step.obs[i])
    assert restarts > 3


def test_a_time_of_the_calendar_needs_an_environment_that_knows_it():
    with pytest.raises(ValueError, match="needs bars"):
        make(env=Script(), risk={**RISK, "period": "1M"})


def test_an_observer_with_another_period_is_refused():
    with pytest.raises(ValueError, match="period = 5"):
        make(env=ReturnObserver(Script(), period=4), risk=RISK)
    make(env=ReturnObserver(Script(), gamma=0.3, period=PERIOD), risk=RISK)  # the discount does not matter


def test_without_a_period_the_rule_is_that_of_the_episode():
    running = RunningReturn(2, ReturnRule(0.5))
    assert running.add(np.ones(2)) is None
    np.testing.assert_allclose(running.columns(), [[1.0, 0.5]] * 2)


# Saving.


@pytest.mark.parametrize("period", [9, "1W"])
def test_resumed_in_the_middle_of_a_period_equals_uninterrupted(tmp_path, period):
    def env():
        return TradingVecEnv(random_walk(300, seed=0), n_envs=B, seed=0, episode_length=40)

    risk = {**RISK, "period": period}
    whole = make("lstm", env(), risk=risk).learn(4 * T * B)
    first = make("lstm", env(), risk=risk)
    first._setup_learn(4 * T * B)
    for _ in range(2):
        collect(first)
        first._update_current_progress_remaining(first.num_timesteps, 4 * T * B)
        first.train()
    first.save(tmp_path / "half")
    resumed = DistributionalPPO.load(tmp_path / "half", env=env(), force_reset=False)
    resumed.learn(2 * T * B, reset_num_timesteps=False)
    torch.testing.assert_close(weights(resumed.policy), weights(whole.policy), rtol=0.0, atol=0.0)
    assert torch.equal(resumed.policy.budget.unit, whole.policy.budget.unit)
