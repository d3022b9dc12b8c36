"""Attacked policies and the grid over a market."""

import csv
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch

from tailguard import DistributionalPPO, TradingVecEnv
from tailguard.evaluate import statistics
from tailguard.evaluate.attack import FIGURES, AttackPlan, attack_market
from tailguard.evaluate.attacked import DELIBERATE, NATURAL, AttackedPolicy
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.play import play, return_rule_of
from tailguard.market import build_features, random_walk
from tailguard.market.bars import periods_per_year
from tailguard.market.features import FeatureScaler, market_columns
from tailguard.market.rules import TradingSettings
from tailguard.robust import PerturbationConfig

SPLIT = 300
RULES = TradingSettings(fee=0.001, episode_length=64)
POLICIES = ("MlpPolicy", "MlpLstmPolicy")


@pytest.fixture(scope="module")
def market():
    bars = random_walk(400, seed=0)
    features = build_features(bars)
    scaler = FeatureScaler(bars.index[0], bars.index[SPLIT]).fit(features[:SPLIT])
    split = SimpleNamespace(train=(0, SPLIT), span=(SPLIT - 1, len(bars)))
    return SimpleNamespace(bars=bars, features=scaler.transform(features), trading=RULES, split=split)


def agent(market, policy="MlpPolicy", seed=0, **settings):
    """An untrained agent with a policy that is far from constant."""
    env = TradingVecEnv(
        market.bars, n_envs=4, seed=seed, features=market.features, span=market.split.train, **RULES.model_dump()
    )
    small = {"net_arch": [16]} | ({"lstm_hidden_size": 8} if policy == "MlpLstmPolicy" else {})
    model = DistributionalPPO(policy, env, n_steps=16, seed=seed, policy_kwargs=small, **settings)
    model.policy.actor[-1].weight.data *= 50.0
    return model


def observations(market, n, rows):
    """Rows of features with an empty account, ``[rows, n, obs_size]``."""
    features = market.features.values[SPLIT : SPLIT + rows * n].reshape(rows, n, -1)
    return np.concatenate((features, np.zeros((rows, n, 3), np.float32)), axis=2)


def attacked(model, kind, strength, market, **search):
    columns = market_columns(market.features.names)
    config = PerturbationConfig(perturbable=columns, **{"steps": 20, "restarts": 2, **search})
    return AttackedPolicy(model.policy, kind, np.asarray(strength, float), config, seed=0)


def seen_by(model, policy, observation, starts):
    """What the networks see when `policy` acts."""
    met = []
    act = model.policy.act

    def watch(inputs, state):
        met.append(inputs.detach().clone())
        return act(inputs, state)

    model.policy.act = watch
    try:
        policy.act(observation, starts)
    finally:
        del model.policy.act
    return met[-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_without_strength_every_kind_acts_like_the_clean_policy(market, policy):
    model = agent(market, policy)
    for kind in ("clean", *DELIBERATE, *NATURAL):
        victim, state, starts = attacked(model, kind, [0.0] * 3, market, steps=2), None, np.ones(3, bool)
        for obs in observations(market, 3, 5):
            expected, state = model.predict(obs, state, starts, deterministic=True)
            np.testing.assert_array_equal(victim.act(obs, starts), expected)
            starts = np.zeros(3, bool)


def test_sampled_actions_follow_the_distribution_and_leave_the_random_numbers_of_the_process_alone(market):
    model = agent(market)
    config, obs = PerturbationConfig(), np.repeat(observations(market, 1, 1)[0], 4000, axis=0)
    drawn, before = [], torch.get_rng_state()
    for _ in range(2):
        victim = AttackedPolicy(model.policy, "clean", np.zeros(4000), config, seed=3, deterministic=False)
        drawn.append([victim.act(obs, np.ones(4000, bool)) for _ in range(2)])
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0][0], drawn[0][1])
    with torch.no_grad():
        mean, log_std = model.policy.dist_params(torch.as_tensor(obs[:1]))[0].tolist()
    inside = scipy.stats.norm(mean, np.exp(log_std))
    actions = np.array(drawn[0]).reshape(-1)  # clipped to the box
    for level in (-0.5, 0.0, 0.5):
        assert (actions <= level).mean() == pytest.approx(inside.cdf(level), abs=4.0 * 0.5 / np.sqrt(len(actions)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", DELIBERATE)
def test_attacks_stay_in_the_ball_and_leave_calendar_and_account_alone(market, policy, kind):
    model = agent(market, policy)
    victim = attacked(model, kind, [0.1, 0.3], market)
    columns = list(market_columns(market.features.names))
    for obs in observations(market, 2, 3):
        moves = seen_by(model, victim, obs, np.zeros(2, bool)) - torch.as_tensor(obs)
        assert (moves.abs().amax(1) <= torch.tensor([0.1, 0.3]) + 1e-5).all()
        assert moves[:, columns].any(1).all()
        moves[:, columns] = 0.0
        assert not moves.any()
    assert all(parameter.requires_grad for parameter in model.policy.parameters())


@pytest.mark.parametrize("policy", POLICIES)
def test_many_gradients_move_a_policy_further_than_one_and_one_further_than_none(market, policy):
    model = agent(market, policy)
    obs, starts = observations(market, 20, 1)[0], np.ones(20, bool)
    state = model.policy.initial_state(20)
    with torch.no_grad():
        clean = model.policy.act(torch.as_tensor(obs), state)[0]
        moved = {}
        for kind in ("random", "fgsm", "pgd_kl"):
            seen = seen_by(model, attacked(model, kind, [0.3] * 20, market), obs, starts)
            moved[kind] = model.policy.action_dist.kl(clean, model.policy.act(seen, state)[0])
    assert (moved["pgd_kl"] >= moved["fgsm"] - 1e-5).float().mean() > 0.9
    assert moved["pgd_kl"].mean() > moved["random"].mean()
    assert moved["fgsm"].mean() > 2.0 * moved["random"].mean()


def test_the_action_attack_drives_towards_the_far_end_of_the_box(market):
    model = agent(market)
    obs, starts = observations(market, 20, 1)[0], np.ones(20, bool)
    seen = seen_by(model, attacked(model, "action", [0.3] * 20, market), obs, starts)
    with torch.no_grad():
        clean, moved = (model.policy.dist_params(inputs)[:, 0] for inputs in (torch.as_tensor(obs), seen))
    assert ((moved - clean) * clean.sign() < 0.0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_critic_attack_lowers_what_the_critics_expect(market, policy):
    model = agent(market, policy)
    obs, starts = observations(market, 10, 1)[0], np.ones(10, bool)
    seen = seen_by(model, attacked(model, "critic", [0.3] * 10, market), obs, starts)

    def expected(inputs):
        features, trunk = inputs, model.policy.critic_trunk
        if trunk is not None:
            features, _ = trunk.step(inputs, trunk.initial_state(10))
        return model.policy.raw_atoms(features).mean((0, 2))

    with torch.no_grad():
        assert (expected(seen) < expected(torch.as_tensor(obs))).all()


def test_memory_lives_on_what_was_seen(market):
    """Under attack the memory is that of the perturbed observations, and an episode's start wipes it."""
    model = agent(market, "MlpLstmPolicy")
    victim = attacked(model, "pgd_kl", [0.3] * 2, market)
    state = model.policy.initial_state(2)
    for k, obs in enumerate(observations(market, 2, 4)):
        starts = np.array([k == 0, k in (0, 2)])
        seen = seen_by(model, victim, obs, starts)
        keep = torch.as_tensor(~starts).float().reshape(1, 2, 1)
        with torch.no_grad():
            _, state = model.policy.act(seen, (state[0] * keep, state[1] * keep))
        assert torch.equal(victim.state[0], state[0])


def test_stale_dropped_and_noisy_columns(market):
    model = agent(market)
    columns = list(market_columns(market.features.names))
    rows = observations(market, 3, 6)
    late = attacked(model, "stale", [0, 1, 4], market)
    starts = np.ones(3, bool)
    for t, obs in enumerate(rows):
        seen = seen_by(model, late, obs, starts).numpy()
        for env, delay in enumerate((0, 1, 4)):
            np.testing.assert_array_equal(seen[env, columns], rows[max(t - delay, 0)][env, columns])
        others = np.delete(np.arange(obs.shape[1]), columns)
        np.testing.assert_array_equal(seen[:, others], obs[:, others])
        starts = np.zeros(3, bool)
    always = attacked(model, "dropped", [0.0, 0.999999, 0.5], market)
    starts, kept = np.ones(3, bool), []
    for t, obs in enumerate(rows):
        seen = seen_by(model, always, obs, starts).numpy()
        np.testing.assert_array_equal(seen[0], obs[0])
        np.testing.assert_array_equal(seen[1, columns], rows[0][1, columns])
        kept.append(next(k for k in range(t, -1, -1) if np.array_equal(seen[2, columns], rows[k][2, columns])))
        starts = np.zeros(3, bool)
    assert kept == sorted(kept)
    noisy = attacked(model, "noisy", [0.0, 0.5, 1.0], market)
    noise = np.stack([seen_by(model, noisy, rows[0], starts).numpy() - rows[0] for _ in range(300)])[..., columns]
    np.testing.assert_allclose(noise.std((0, 2)), [0.0, 0.5, 1.0], rtol=0.03)
    with pytest.raises(ValueError, match="whole steps"):
        attacked(model, "stale", [0.5], market)


def history(model, market):
    """The account of an agent in an evaluation: with a warm-up of 64 bars, from the close before the first test row on."""
    span = market.split.span
    (played,) = play(model, market.bars, market.features, RULES, [span], returns=return_rule_of(model), warmup=64)
    return BacktestWindow(market.bars, RULES, span).trade("agent", played.targets)


SMALL = AttackPlan(epsilons=(0.1, 0.5), stale=(2,), dropped=(0.3,), noisy=(0.5,), steps=3, restarts=1, draws=50)


@pytest.fixture(scope="module")
def report(market):
    calls = []
    agents = [agent(market, seed=seed) for seed in (0, 1)]
    made = attack_market(agents, market, SMALL, lambda *call: calls.append(call))
    return made, calls, agents


def test_the_grid_is_complete_and_the_clean_row_is_the_backtest(market, report):
    made, calls, agents = report
    cells = [(row.kind, row.strength) for row in made.rows]
    expected = [("clean", 0.0)] + [(kind, e) for kind in DELIBERATE for e in (0.1, 0.5)]
    assert cells == [*expected, ("stale", 2.0), ("dropped", 0.3), ("noisy", 0.5), ("worst", 0.1), ("worst", 0.5)]
    histories = [history(model, market) for model in agents]
    clean = made.rows[0]
    periods = periods_per_year(market.bars.index[SPLIT - 1 :])
    returns = [each.returns for each in histories]
    equity = [each.equity for each in histories]
    oracle = {
        "cagr": [statistics.cagr(one, periods) for one in equity],
        "sharpe": [statistics.sharpe(one, periods) for one in returns],
        "cvar_5": [statistics.cvar(one, 0.05) for one in returns],
        "max_drawdown": [statistics.max_drawdown(one) for one in equity],
        "turnover": [each.turnover.mean() * periods for each in histories],
    }
    assert clean.total_return == pytest.approx(np.mean([one[-1] / one[0] - 1.0 for one in equity]))
    for figure, values in oracle.items():
        assert clean.figures[figure].estimate == pytest.approx(np.mean(values)), figure
    assert all(change.estimate == change.low == change.high == 0.0 for change in clean.against_clean.values())
    assert calls[-1][0] == calls[-1][1]
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


def test_the_worst_is_worse_than_every_attack_and_intervals_are_ordered(report):
    made, _, _ = report
    returns = {(row.kind, row.strength): row.total_return for row in made.rows}
    for epsilon in (0.1, 0.5):
        assert returns["worst", epsilon] <= min(returns[kind, epsilon] for kind in DELIBERATE) + 1e-12
    for row in made.rows:
        for figure in FIGURES:
            assert row.figures[figure].low <= row.figures[figure].high
    strengths, curve = made.curve("pgd_kl", "turnover")
    assert strengths.tolist() == [0.0, 0.1, 0.5]
    assert curve[0] == made.rows[0].figures["turnover"]


def test_a_report_is_written_and_read(report, tmp_path):
    made, _, _ = report
    made.write(tmp_path / "attack.json")
    tree = json.loads((tmp_path / "attack.json").read_text(encoding="utf-8"))
    assert tree["agents"] == 2
    assert tree["plan"]["epsilons"] == [0.1, 0.5]
    assert tree["rows"][1]["figures"]["sharpe"]["estimate"] == pytest.approx(made.rows[1].figures["sharpe"].estimate)
    made.write(tmp_path / "attack.csv")
    with (tmp_path / "attack.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(made.rows)
    assert float(table[3]["cvar_5_low"]) == made.rows[3].figures["cvar_5"].low
    assert not any(name.startswith(("hour", "weekday", "yearday")) for name in made.perturbed)
    with pytest.raises(ValueError, match=r"\.json or \.csv"):
        made.write(tmp_path / "attack.txt")


def test_agents_of_a_tail_are_attacked_with_what_they_have_earned(market):
    plan = AttackPlan(epsilons=(0.2,), attacks=("pgd_kl",), stale=(), dropped=(), noisy=(), steps=2, draws=10)
    for risk in ({"objective": "cvar", "alpha": 0.2, "period": "1W"}, {"objective": "cvar", "alpha": (0.1, 0.9)}):
        model = agent(market, "MlpLstmPolicy", risk=risk, gamma=0.95)
        made = attack_market(model, market, plan)
        assert made.rows[0].total_return == pytest.approx(history(model, market).equity[-1] - 1.0)
        assert math.isfinite(made.rows[1].total_return)


def test_features_are_chosen_by_name():
    names = ("A:return_1", "A:rsi", "hour_sin", "hour_cos", "monday")
    assert market_columns(names) == (0, 1)
    assert market_columns(names, ("*rsi", "hour_*")) == (1, 2, 3)
    with pytest.raises(ValueError, match="feature is 'volume'"):
        market_columns(names, ("volume",))
