"""Exploration that lasts: what the environment gets, what is stored, and that a training goes on with it."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_algorithm import B, Script, T, collect, make, mlp_and_lstm, weights

from tailguard import DistributionalPPO
from tailguard.market import SignalMarket
from tailguard.ppo.lasting_noise import LastingNoise

MEMORY = 0.8


class Recorded(Script):
    """Notes the actions that it is given."""

    def step_arrays(self, actions):
        self.given = [*getattr(self, "given", []), np.array(actions)]
        return super().step_arrays(actions)


@mlp_and_lstm
def test_the_environment_gets_what_is_left_of_the_noise_of_its_episode(kind):
    """Written out: a_t + sum over earlier steps k of the episode of memory^(t - k) (a_k - m_k)."""
    env = Recorded(action_space=spaces.Box(-50.0, 50.0, (2,)))
    model = make(kind, env, exploration_memory=MEMORY)
    for _ in range(2):  # it goes on from rollout to rollout
        env.given, first = [], env.t
        before = model.lasting_noise.drift.copy()
        collect(model)
        actions, means = model.rollout_buffer.actions.numpy(), model.rollout_buffer.outputs.numpy()[..., :2]
        for b in range(B):
            left, begun = before[b], 0
            for t in range(T):
                lasting = sum(MEMORY ** (t - k) * (actions[k, b] - means[k, b]) for k in range(begun, t))
                np.testing.assert_allclose(env.given[t][b], actions[t, b] + lasting + MEMORY ** (t - begun) * left, atol=1e-4)
                if env.dones[first + t, b]:
                    left, begun = 0.0, t + 1


def test_its_law_is_that_of_an_autoregression():
    """Independent noise of deviation 1 becomes one of deviation 1 / sqrt(1 - memory^2) whose neighbours correlate by memory."""
    rng, noise = np.random.default_rng(0), LastingNoise(4000, 1, MEMORY)
    means = rng.normal(size=(4000, 2)).astype(np.float32)
    given = []
    for _ in range(60):
        actions = means[:, :1] + rng.normal(size=(4000, 1)).astype(np.float32)
        given.append(noise.carry(actions, means) - means[:, :1])
    last, before = given[-1][:, 0], given[-2][:, 0]
    assert last.std() == pytest.approx(1.0 / np.sqrt(1.0 - MEMORY**2), rel=0.05)
    assert np.corrcoef(last, before)[0, 1] == pytest.approx(MEMORY, abs=0.02)


@mlp_and_lstm
def test_what_is_stored_is_what_a_policy_without_it_would_store(kind):
    """The wind belongs to the environment, which here does not care: the same actions, the same weights."""
    plain, lasting = (make(kind, Script(), exploration_memory=memory).learn(3 * T * B) for memory in (0.0, MEMORY))
    assert torch.equal(weights(plain.policy), weights(lasting.policy))
    assert lasting.lasting_noise.drift.any()
    assert not plain.lasting_noise.drift.any()


def test_a_loaded_training_goes_on_with_it_bit_for_bit(tmp_path):
    def agent():
        return DistributionalPPO(
            "MlpPolicy", SignalMarket(4, episode_length=50, seed=1), n_steps=16, seed=0, exploration_memory=0.9
        )

    whole = agent().learn(4 * 64)
    half = agent()
    half.learn(2 * 64)
    half.save(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model", env=SignalMarket(4, episode_length=50, seed=7), force_reset=False)
    assert loaded.exploration_memory == 0.9
    assert loaded.lasting_noise.drift.any()
    loaded.learn(2 * 64, reset_num_timesteps=False)
    assert torch.equal(weights(whole.policy), weights(loaded.policy))


@pytest.mark.parametrize("memory", [-0.1, 1.0, float("nan")])
def test_memories_that_make_no_sense_are_refused(memory):
    with pytest.raises(ValueError, match="exploration_memory"):
        make(exploration_memory=memory)


def test_choices_have_no_noise_to_carry_on():
    with pytest.raises(ValueError, match=r"exploration_memory is 0\.5, but it must be 0"):
        make(env=Script(action_space=spaces.Discrete(3)), exploration_memory=0.5)
