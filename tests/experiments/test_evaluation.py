"""A trained agent on unseen rows: what its critics say, step by step, and a record of one fold and one seed."""

import numpy as np
import pandas as pd
import pytest
import torch

from tailguard.config import load_config
from tailguard.evaluate.assessment import Effort
from tailguard.experiments.evaluation import backtest_agent, benchmark_bars, evaluate_agent
from tailguard.experiments.prepared_market import default_split, fingerprint, prepare_market
from tailguard.experiments.training import build_model
from tailguard.market import random_walk
from tailguard.ppo.critic import quantile_levels

TINY = [
    "training.steps=128",
    "training.n_envs=4",
    "training.n_steps=16",
    "training.policy=MlpLstmPolicy",
    "training.lstm_hidden_size=8",
    "training.gamma=0.5",
]


@pytest.fixture(scope="module")
def bars():
    return random_walk(600, seed=0)


def made(bars, *settings):
    config = load_config(None, [*TINY, *settings])
    market = prepare_market(bars, config, default_split(len(bars), config.training))
    return build_model(market, config.training), market, config


@pytest.mark.parametrize(
    "settings", [(), ("training.critic={law: categorical, num_quantiles: 11}",), ("training.policy=MlpPolicy",)]
)
def test_laws_are_those_of_a_walk_step_by_step(bars, settings):
    model, _, _ = made(bars, *settings)
    policy = model.policy
    generator = np.random.default_rng(0)
    observations = generator.normal(size=(30, policy.obs_size)).astype(np.float32)
    starts = np.zeros(30, bool)
    starts[[0, 12]] = True
    laws, state = policy.predict_return_atoms(observations, starts), None
    for t in range(30):
        with torch.no_grad():
            features = policy.inputs(torch.from_numpy(observations[t : t + 1]))
            if policy.critic_trunk is not None:
                state = policy.critic_trunk.initial_state(1) if starts[t] else state
                features, state = policy.critic_trunk.step(features, state)
            atoms = policy.raw_atoms(features).sort(-1).values.mean(0)[0]
        np.testing.assert_allclose(laws[t], atoms.numpy(), rtol=1e-4, atol=1e-6)
    assert (np.diff(laws, axis=1) >= 0.0).all()
    levels = policy.return_levels()
    assert len(levels) == laws.shape[1]
    np.testing.assert_allclose(levels, quantile_levels(model.critic_config), rtol=1e-5)


def test_levels_of_a_tail_are_its_own_and_a_mean_has_none(bars):
    model, _, _ = made(bars, "training.critic={num_quantiles: 8, tail_quantiles: 4, tail_alpha: 0.1}")
    levels = model.policy.return_levels()
    assert (levels < 0.1).sum() == 4
    model, _, _ = made(bars, "training.critic={num_quantiles: 1}")
    assert model.policy.return_levels() is None


def test_one_agent_is_judged_on_the_rows_it_has_not_seen(bars):
    model, market, config = made(bars, "walkforward.warmup=16")
    record = evaluate_agent(
        model, market, config, source="walk", trials=7, training=pd.DataFrame({"step": [128], "train/kl": [0.1]}),
        warnings=["something"], effort=Effort(draws=50, permutations=9),
    )  # fmt: skip
    first, last = market.split.test
    assert record.agent.times.equals(pd.DatetimeIndex(bars.index[first:last]))
    np.testing.assert_array_equal(record.agent.returns, record.seeds[0].returns)
    assert record.provenance.trials == 7
    assert record.sanity.dispersion is None
    assert record.critic_calibration.horizon == 5
    assert record.training.to_dict("records") == [{"fold": 0, "seed": 0, "step": 128, "train/kl": 0.1}]
    assert record.warnings == ["something"]
    assert record.provenance.fingerprint == fingerprint(bars)


@pytest.mark.parametrize("settings", [(), ("training.risk={objective: cvar, alpha: 0.2, period: 9}", "trading.fill=close")])
def test_the_table_after_a_training_is_that_of_the_evaluation(bars, settings):
    """To the last digit, for the agent and for every baseline that both know."""
    model, market, config = made(bars, *settings)
    record = evaluate_agent(model, market, config, source="walk", effort=Effort(draws=50, permutations=9))
    rows = {row.strategy: row for row in backtest_agent(model, market, config.walkforward.warmup)}
    both = set(rows) & set(record.statistics)
    assert both == {"agent", "buy_and_hold", "moving_average", "momentum", "volatility_target", "random_positions"}
    for name in both:
        for figure in ("total_return", "cagr", "sharpe", "max_drawdown", "cvar_5", "turnover", "costs"):
            assert getattr(rows[name], figure) == record.statistics[name][figure].value, (name, figure)


def test_a_benchmark_of_the_configuration_is_held_over_the_same_bars(bars, tmp_path):
    other = random_walk(len(bars), seed=8).set_axis(bars.index)
    other.to_csv(tmp_path / "index.csv")
    model, market, config = made(bars, f"benchmark={tmp_path / 'index.csv'}")
    record = evaluate_agent(model, market, config, source="walk", effort=Effort(draws=50, permutations=9))
    account = next(history for history in record.baselines if history.name == "benchmark")
    first, last = market.split.test
    assert account.times.equals(record.agent.times)
    expected = other["close"].iloc[first - 1 : last].pct_change().iloc[1:]
    np.testing.assert_allclose(account.returns, expected, rtol=1e-12)
    (row,) = (
        row
        for row in backtest_agent(model, market, config.walkforward.warmup, benchmark_bars(config))
        if row.strategy == "benchmark"
    )
    for figure in ("total_return", "cagr", "sharpe", "max_drawdown", "cvar_5"):
        assert getattr(row, figure) == record.statistics["benchmark"][figure].value, figure


@pytest.mark.parametrize(("rows", "message"), [(slice(-5, None), "benchmark begins at"), (slice(0, 5), "benchmark ends at")])
def test_a_benchmark_without_prices_in_the_test_is_refused(rows, message, bars, tmp_path):
    bars.iloc[rows].to_csv(tmp_path / "index.csv")
    model, market, config = made(bars, f"benchmark={tmp_path / 'index.csv'}")
    with pytest.raises(ValueError, match=rf"index.csv: {message}"):
        evaluate_agent(model, market, config, source="walk", effort=Effort(draws=50, permutations=9))
