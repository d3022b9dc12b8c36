"""A market maker learns, and its quotes are worth what its episodes earn."""

import numpy as np
import pytest

from tailguard.envs import MarketMaking
from tailguard.experiments.making import agent_quotes, train_maker

MARKET = {"steps": 20, "horizon": 0.1, "inventory_limit": 3, "inventory_aversion": 20.0}


def test_a_short_training_beats_fixed_quotes_and_is_worth_what_it_earns():
    env = MarketMaking(4_000, **MARKET)
    model = train_maker(MarketMaking(32, seed=0, expected_rewards=True, **MARKET), steps=32_000, seed=0)
    value = env.evaluate(agent_quotes(model, env)).value
    assert env.evaluate(env.best_fixed()).value < value <= env.evaluate(env.solve()).value
    obs, _ = env.reset(seed=1)
    total = np.zeros(env.num_envs)
    for _ in range(env.steps):
        obs, rewards, *_ = env.step(model.predict(obs, deterministic=True)[0])
        total += rewards
    assert total.mean() == pytest.approx(value, abs=4.0 * total.std() / env.num_envs**0.5)


def test_an_alpha_conditioned_maker_serves_every_tail():
    env = MarketMaking(64, seed=0, **MARKET)
    model = train_maker(env, alpha=(0.1, 1.0), steps=3_840)
    assert model.risk_config.alpha_conditioned
    model.set_risk(0.3)
