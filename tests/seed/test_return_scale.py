"""The audit reports' tests of the return scale (R001 to R013), on a real model: statistics, snapshot, and their changes."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import ArrayVecEnv, StepArrays

T, B = 8, 3


class Paying(ArrayVecEnv):
    """Rewards of mean 5 and standard deviation 2, times `unit` from the second rollout on."""

    def __init__(self, unit=1.0):
        super().__init__(B, spaces.Box(-10.0, 10.0, (2,)), spaces.Discrete(2))
        self.unit, self.rng, self.t = unit, np.random.default_rng(0), 0

    def reset(self):
        return self.rng.normal(size=(B, 2)).astype(np.float32)

    def step_arrays(self, actions):
        self.t += 1
        rewards = (5.0 + 2.0 * self.rng.normal(size=B)) * (self.unit if self.t > T else 1.0)
        ended = np.full(B, self.t % 5 == 0)
        obs = self.reset()
        return StepArrays(obs, rewards, np.zeros(B, np.bool_), ended, np.flatnonzero(ended), self.reset()[ended])


class Watching(BaseCallback):
    """Keeps the scale at every step."""

    def __init__(self, model):
        super().__init__()
        self.seen = []
        self.init_callback(model)

    def _on_step(self):
        self.seen.append(scale(self.model))
        return True


class Recorder(DistributionalPPO):
    """Writes down when the statistics are finalised and the snapshot activated, and what was active then."""

    events = ()

    def _finalize_return_stats(self, *args):
        self.events = (*self.events, ("finalise", scale(self)[2:]))
        super()._finalize_return_stats(*args)

    def _activate_return_scale_snapshot(self):
        self.events = (*self.events, ("activate", scale(self)[2:]))
        super()._activate_return_scale_snapshot()


def scale(model):
    return model._ret_mean_value, model._ret_std_value, model._ret_mean_snapshot, model._ret_std_snapshot


def make(policy="MlpPolicy", unit=1.0, kind=DistributionalPPO, **kwargs):
    lstm = {"lstm_hidden_size": 4} if policy == "MlpLstmPolicy" else {}
    model = kind(
        policy,
        Paying(unit),
        n_steps=T,
        critic={"num_quantiles": 4},
        policy_kwargs={"net_arch": [6], **lstm},
        seed=0,
        **kwargs,
    )
    model._setup_learn(10_000)
    return model


def collect(model):
    watching = Watching(model)
    assert model.collect_rollouts(model.env, watching, model.rollout_buffer, T)
    return watching.seen


def raw_quantiles(model):
    obs = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.policy.raw_atoms(obs)


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_return_scale_snapshot_timing(policy):
    """Seed 000: an update changes the statistics and the snapshot with them, and the next rollout uses that snapshot."""
    model = make(policy)
    assert scale(model) == (0.0, 1.0, 0.0, 1.0)
    collect(model)
    model.train()
    assert model._ret_mean_value != 0.0
    assert model._ret_mean_snapshot == model._ret_mean_value
    assert model._ret_std_snapshot == model._ret_std_value

    after_update = scale(model)
    assert collect(model) == [after_update] * T
    normalised = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    expected = normalised * model._ret_std_value + model._ret_mean_value
    torch.testing.assert_close(model.policy.return_scale.decode(normalised), expected)


def test_return_scale_snapshot_timing_fix():
    """Seed 001: after train() the snapshot is what train() has just measured."""
    model = make()
    collect(model)
    for _ in range(3):
        initial_mean = model._ret_mean_value
        model.train()
        assert model._ret_mean_snapshot == model._ret_mean_value
        assert model._ret_std_snapshot == model._ret_std_value
        assert model._ret_mean_value != initial_mean
        collect(model)


def test_return_snapshot_freshness():
    """Seed 002, read as §17-1 says: the snapshot is refreshed by every cycle of collect and train."""
    model = make()
    seen = {model._ret_mean_snapshot}
    for _ in range(3):
        collect(model)
        model.train()
        seen.add(model._ret_mean_snapshot)
    assert len(seen) == 4


def test_training_finalises_then_activates_exactly_once():
    """R001, R002: and nothing is activated before the statistics are final."""
    model = make(kind=Recorder)
    for update in range(3):
        collect(model)
        during_rollout = scale(model)[2:]
        model.events = ()
        model.train()
        (first, at_finalise), (second, _) = model.events
        assert (first, second) == ("finalise", "activate")
        if update > 0:  # the very first rollout also gives the untrained critics their first units
            assert at_finalise == during_rollout


def test_a_rollout_begins_with_the_latest_statistics():
    """R003, R004: statistics that came from elsewhere since the last update are active from the first step on."""
    model = make()
    collect(model)
    model.train()
    before = raw_quantiles(model)
    model.policy.return_scale.update(torch.linspace(-50.0, 90.0, 100))
    new_mean, new_std, *_ = scale(model)
    assert new_mean != model._ret_mean_snapshot
    assert collect(model) == [(new_mean, new_std, new_mean, new_std)] * T
    torch.testing.assert_close(raw_quantiles(model), before, rtol=1e-4, atol=1e-4)


def test_the_scale_of_the_next_rollout_knows_the_returns_of_this_one():
    """R005: two runs that differ in the second rollout's rewards only differ after the second update, and not before."""
    after_one, in_third_rollout = [], []
    for unit in (1.0, 1.1):
        model = make(unit=unit)
        collect(model)
        model.train()
        after_one.append(scale(model))
        collect(model)
        model.train()
        in_third_rollout.append(collect(model)[0])
    assert after_one[0] == after_one[1]
    assert in_third_rollout[0][2] < in_third_rollout[1][2]


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_statistics_and_snapshot_stay_the_same_during_a_rollout(policy):
    """R008: bit for bit, from the first to the last step."""
    model = make(policy)
    for _ in range(3):
        before = scale(model)
        assert collect(model) == [before] * T
        assert scale(model) == before
        model.train()


@pytest.mark.parametrize("unit", [1e6, 1e-6])
def test_one_wild_rollout_moves_the_scale_by_one_step_at_most(unit):
    """R009: the default step is a half."""
    model = make(unit=unit)
    collect(model)
    model.train()
    mean, std, *_ = scale(model)
    collect(model)
    model.train()
    assert abs(model._ret_mean_value - mean) <= 0.5 * std * (1.0 + 1e-9)
    assert (1.0 - 1e-9) / 1.5 <= model._ret_std_value / std <= 1.5 * (1.0 + 1e-9)


def test_decoding_undoes_encoding():
    """R010."""
    model = make()
    collect(model)
    model.train()
    raw = torch.linspace(-30.0, 80.0, 50, dtype=torch.float64)
    return_scale = model.policy.return_scale
    torch.testing.assert_close(return_scale.decode(return_scale.encode(raw)), raw)
    torch.testing.assert_close(return_scale.encode(raw), (raw - model._ret_mean_snapshot) / model._ret_std_snapshot)


@pytest.mark.parametrize("unit", [1.0, 100.0, 0.01])
def test_a_new_scale_moves_no_prediction_of_either_critic(unit):
    """Without learning, an update changes the scale and nothing that the critics say (§20-1)."""
    model = make(unit=unit)
    collect(model)
    model.train()
    model.lr.set(0.0)
    before, old_scale = raw_quantiles(model), scale(model)
    collect(model)
    model.train()
    assert scale(model) != old_scale
    size = before.abs().max().item()
    assert (raw_quantiles(model) - before).abs().amax((1, 2)).max() <= 1e-5 * max(size, model._ret_std_snapshot)
