"""Training on the first part of the data must know nothing of the rest."""

import numpy as np
import pytest
import torch

from tailguard.config import load_config
from tailguard.market import random_walk
from tailguard.training import train_and_test

TINY = ["training.steps=512", "training.n_envs=4", "training.n_steps=32", "training.lstm_hidden_size=8"]


@pytest.fixture
def bars():
    return random_walk(600, seed=0)


def weights_after_training(bars, monkeypatch):
    """The parameters of the model that train_and_test makes, read where it plays it."""
    import tailguard.training

    seen = {}
    play = tailguard.training.play

    def look(agent, *arguments):
        seen["weights"] = agent.flat.tensor.detach().clone()
        return play(agent, *arguments)

    monkeypatch.setattr(tailguard.training, "play", look)
    rows, first = train_and_test(bars, load_config(None, TINY), lambda done, text: None)
    return seen["weights"], rows, first


def test_what_is_unseen_has_no_influence_on_what_is_learnt(bars, monkeypatch):
    weights, rows, first = weights_after_training(bars, monkeypatch)
    changed = bars.copy()
    changed.iloc[first:, :4] *= np.linspace(1.0, 3.0, len(bars) - first)[:, None]
    other_weights, other_rows, _ = weights_after_training(changed, monkeypatch)
    assert torch.equal(weights, other_weights)
    assert rows[0].total_return != other_rows[0].total_return


def test_the_same_seed_gives_the_same_table(bars, monkeypatch):
    _, rows, first = weights_after_training(bars, monkeypatch)
    _, again, _ = weights_after_training(bars, monkeypatch)
    assert rows == again
    assert first == 420
    assert [row.strategy for row in rows][:2] == ["agent", "buy_and_hold"]


def test_an_agent_trained_on_a_tail_is_played_with_what_it_has_earned(bars):
    settings = [*TINY, "training.risk={objective: cvar, alpha: 0.2}", "training.vgs={}", "training.optimizer={name: upgdw}"]
    rows, _ = train_and_test(bars, load_config(None, settings), lambda done, text: None)
    neutral, _ = train_and_test(bars, load_config(None, TINY), lambda done, text: None)
    assert rows[0].total_return != neutral[0].total_return
    assert rows[1:] == neutral[1:]


def test_progress_is_reported(bars):
    reports = []
    train_and_test(bars, load_config(None, TINY), lambda done, text: reports.append((done, text)))
    assert [done for done, _ in reports] == [128, 256, 384, 512]
