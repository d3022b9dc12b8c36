"""Training on the first part of the data must know nothing of the rest."""

import numpy as np
import pytest
import torch

from tailguard.config import load_config
from tailguard.experiments.evaluation import backtest_agent
from tailguard.experiments.prepared_market import Split, default_split, prepare_market
from tailguard.experiments.training import build_model, train_model
from tailguard.market import random_walk

TINY = [
    "training.steps=512",
    "training.n_envs=4",
    "training.n_steps=32",
    "training.policy=MlpLstmPolicy",
    "training.lstm_hidden_size=8",
    "training.tensorboard=null",
]


@pytest.fixture
def bars():
    return random_walk(600, seed=0)


def trained(bars, *settings):
    """The model, the rows of its table and the first unseen row."""
    config = load_config(None, [*TINY, *settings])
    market = prepare_market(bars, config, default_split(len(bars), config.training))
    model = build_model(market, config.training)
    train_model(model, config.training.steps)
    return model, backtest_agent(model, market, config.walkforward.warmup), market.split.test[0]


def test_what_is_unseen_has_no_influence_on_what_is_learnt(bars):
    model, rows, first = trained(bars)
    changed = bars.copy()
    changed.iloc[first:, :4] *= np.linspace(1.0, 3.0, len(bars) - first)[:, None]
    other, other_rows, _ = trained(changed)
    assert torch.equal(model.flat.tensor, other.flat.tensor)
    assert rows[0].total_return != other_rows[0].total_return


def test_the_same_seed_gives_the_same_table(bars):
    _, rows, first = trained(bars)
    assert trained(bars)[1] == rows
    assert first == 420
    assert [row.strategy for row in rows][:2] == ["agent", "buy_and_hold"]


def test_an_agent_trained_on_a_tail_is_played_with_what_it_has_earned(bars):
    settings = ("training.risk={objective: cvar, alpha: 0.2, period: 9}", "training.vgs={}", "training.optimizer={name: upgdw}")
    rows, neutral = trained(bars, *settings)[1], trained(bars)[1]
    assert rows[0].total_return != neutral[0].total_return
    assert rows[1:] == neutral[1:]


def test_a_tail_that_the_discount_has_taken_away_is_warned_of(bars):
    config = load_config(None, [*TINY, "training.risk={objective: cvar, alpha: 0.2}"])
    with pytest.warns(UserWarning, match=r"set training\.risk\.period"):
        build_model(prepare_market(bars, config, default_split(len(bars), config.training)), config.training)


@pytest.mark.parametrize(("train", "test"), [((0, 0), (0, 5)), ((5, 9), (8, 12)), ((-1, 3), (3, 5)), ((0, 5), (5, 4))])
def test_a_split_that_is_none_is_refused(train, test):
    with pytest.raises(ValueError, match="the test must come after the training"):
        Split(train, test)


def test_a_time_limit_ends_a_training_after_an_update(bars):
    config = load_config(None, [*TINY, "training.steps=1000000"])
    model = build_model(prepare_market(bars, config, default_split(len(bars), config.training)), config.training)
    train_model(model, config.training.steps, minutes=1e-9)
    assert model.num_timesteps == 4 * 32
