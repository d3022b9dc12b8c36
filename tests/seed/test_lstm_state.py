"""The audit reports' rows on LSTM states (R028 to R042), on a real model: resets, isolation, shapes, metrics."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnvWrapper

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import ArrayVecEnv, StepArrays

T, B, H = 12, 4, 5


class Script(ArrayVecEnv):
    """Observations, rewards and ends written down beforehand; env 0 never ends, env 1 terminates, env 2 is cut, env 3 both."""

    def __init__(self, ends=True):
        super().__init__(B, spaces.Box(-10.0, 10.0, (2,)), spaces.Discrete(2))
        rng = np.random.default_rng(0)
        steps = 4 * T
        self.obs = rng.normal(size=(steps + 1, B, 2)).astype(np.float32)
        self.rewards = rng.normal(size=(steps, B))
        self.terminated, self.truncated = np.zeros((2, steps, B), np.bool_)
        if ends:
            self.terminated[[2, 7], 1] = self.terminated[4, 3] = True
            self.truncated[[3, T - 1], 2] = self.truncated[9, 3] = True
        self.t = 0

    def reset(self):
        self.t = 0
        return self.obs[0]

    def step_arrays(self, actions):
        t, self.t = self.t, self.t + 1
        ended = np.flatnonzero(self.terminated[t] | self.truncated[t])
        return StepArrays(
            self.obs[t + 1], self.rewards[t], self.terminated[t], self.truncated[t], ended, self.obs[t + 1, ended] + 1.0
        )


class Watching(BaseCallback):
    """Keeps the actor's recurrent state after every step."""

    def __init__(self):
        super().__init__()
        self.states = []

    def _on_step(self):
        self.states.append(tuple(part.clone() for part in self.model._actor_state))
        return True


def make(env=None, **policy_kwargs):
    return DistributionalPPO(
        "MlpLstmPolicy",
        env if env is not None else Script(),
        n_steps=T,
        critic={"num_quantiles": 4},
        policy_kwargs={"net_arch": [6], "lstm_hidden_size": H, **policy_kwargs},
        seed=0,
    )


def collect(model):
    watching = Watching()
    _, callback = model._setup_learn(10_000, callback=watching)
    assert model.collect_rollouts(model.env, callback, model.rollout_buffer, T)
    return watching.states


def update(model):
    """One collect and one train(), and what the latter logged."""
    collect(model)
    model.train()
    return dict(model.logger.name_to_value)


# Resets.


@pytest.mark.parametrize("n_layers", [1, 2])
def test_finished_environments_are_reset_and_no_others(n_layers):
    """R028, R035: terminated and truncated slots are the initial state; the others are what the LSTM made of them."""
    env = Script()
    model = make(env, n_lstm_layers=n_layers)
    states = collect(model)
    previous, initial = model.policy.initial_state(B), model.policy.initial_state(1)
    for t, state in enumerate(states):
        with torch.no_grad():
            _, carried = model.policy.act(torch.from_numpy(env.obs[t]), previous)
        done = env.terminated[t] | env.truncated[t]
        for i in range(B):
            expected = initial if done[i] else tuple(part[:, i : i + 1] for part in carried)
            for got, wanted in zip(state, expected, strict=True):
                torch.testing.assert_close(got[:, i : i + 1], wanted, atol=1e-6, rtol=0.0)
        previous = state
    assert (states[-1][0][:, 0] != 0.0).all()


def test_one_environment_never_changes_the_state_of_another():
    """R034: bit for bit, with other observations and another end in env 1."""
    plain, other = Script(), Script()
    other.obs[:, 1] += 3.0
    other.terminated[6, 1] = True
    runs = [collect(make(env)) for env in (plain, other)]
    for first, second in zip(*runs, strict=True):
        for part, changed in zip(first, second, strict=True):
            assert torch.equal(part[:, [0, 2, 3]], changed[:, [0, 2, 3]])
    assert not torch.equal(runs[0][-1][0][:, 1], runs[1][-1][0][:, 1])


@pytest.mark.parametrize("shared", [True, False])
def test_changing_a_state_in_place_does_not_touch_the_initial_state(shared):
    """R029: the initial state is cloned, never lent."""
    model = make(shared_lstm=shared)
    for state in (model._actor_state, model._critic_state):
        for part in state:
            part += 7.0
    assert all((part == 0.0).all() for part in model.policy.initial_state(B))
    model.reset_lstm_states_to_initial()
    assert all((part == 0.0).all() for state in (model._actor_state, model._critic_state) for part in state)


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_reset_to_initial_keeps_the_shape_of_many_environments(shared, n_layers):
    """R030, §17-11: every slot is the initial state, and training continues."""
    model = make(shared_lstm=shared, n_lstm_layers=n_layers)
    update(model)
    assert model._actor_state[0].abs().max() > 0.0
    assert model._critic_state[0].abs().max() > 0.0
    model.reset_lstm_states_to_initial()
    for state in (model._actor_state, model._critic_state):
        assert [part.shape for part in state] == [(n_layers, B, H)] * 2
        assert all((part == 0.0).all() for part in state)
    model.learn(T * B, reset_num_timesteps=False)


def test_a_reset_between_rollouts_makes_the_next_one_begin_anew():
    model = make(Script(ends=False))
    update(model)
    model.reset_lstm_states_to_initial()
    obs = model._last_obs
    states = Watching()
    states.init_callback(model)
    model.collect_rollouts(model.env, states, model.rollout_buffer, T)
    with torch.no_grad():
        _, expected = model.policy.act(torch.from_numpy(obs), model.policy.initial_state(B))
    torch.testing.assert_close(states.states[0], expected, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("shape", [(B, 1), (B - 1,), (1, B)], ids=str)
def test_dones_shape_mismatch(shape):
    """R036, R037: the message names the shape that came and the one expected."""

    class Wrong(VecEnvWrapper):
        def reset(self):
            return self.venv.reset()

        def step_wait(self):
            obs, rewards, _, infos = self.venv.step_wait()
            return obs, rewards, np.zeros(shape, np.bool_), infos

    with pytest.raises(ValueError, match="dones") as error:
        collect(make(Wrong(Script())))
    assert str(shape) in str(error.value)
    assert str((B,)) in str(error.value)


# Metrics.

KINDS = ("norm", "mean", "std")


@pytest.mark.parametrize("n_layers", [1, 2])
def test_lstm_metrics_are_logged_under_the_names_of_all_seeds(n_layers):
    """R038, R039, R040; in the older names 0 is the hidden and 1 the cell state of the critics (§17-7)."""
    model = make(Script(ends=False), n_lstm_layers=n_layers)
    logged = update(model)
    for layer, hidden in enumerate(model._actor_state[0]):
        assert logged[f"lstm/h_mean_layer{layer}"] == pytest.approx(hidden.mean().item(), abs=1e-6)
        assert logged[f"lstm/h_std_layer{layer}"] == pytest.approx(hidden.std(correction=0).item(), abs=1e-6)
        assert logged[f"lstm/h_norm_layer{layer}"] == pytest.approx(hidden.norm(dim=-1).mean().item(), abs=1e-6)
    assert f"lstm/h_norm_layer{n_layers}" not in logged
    for i, part in enumerate(model._critic_state):
        for name, value in (("mean", part.mean()), ("std", part.std(correction=0)), ("norm", part.norm(dim=-1).mean())):
            assert logged[f"lstm/critic_hidden_layer{i}_{name}"] == pytest.approx(value.item(), abs=1e-6)
            assert logged[f"lstm/critic_layer{i}_{name}"] == logged[f"lstm/critic_hidden_layer{i}_{name}"]


def test_a_model_without_a_recurrent_state_logs_none():
    model = DistributionalPPO("MlpPolicy", Script(), n_steps=T, seed=0)
    assert not [name for name in update(model) if name.startswith("lstm/")]


def saturate(trunk):
    """Open all gates wide: the cell grows by one a step, and the hidden state sticks at 1."""
    with torch.no_grad():
        trunk.lstm.bias_ih_l0.fill_(30.0)


def kill(trunk):
    """Shut the output gate: nothing of the cell is ever shown."""
    with torch.no_grad():
        trunk.lstm.bias_ih_l0[3 * H :] = -30.0


def test_a_saturated_state_is_visible():
    """R042."""
    healthy, sick = make(Script(ends=False)), make(Script(ends=False))
    saturate(sick.policy.actor_trunk)
    saturate(sick.policy.critic_trunk)
    normal, logged = update(healthy), update(sick)
    assert logged["lstm/h_mean_layer0"] > 0.99
    assert logged["lstm/h_std_layer0"] < 0.01
    assert logged["lstm/h_norm_layer0"] == pytest.approx(H**0.5, rel=1e-3)
    assert logged["lstm/critic_hidden_layer1_mean"] == pytest.approx(T, rel=1e-3)  # the cell explodes
    assert normal["lstm/h_norm_layer0"] < 1.0
    assert normal["lstm/critic_hidden_layer1_norm"] < 0.1 * logged["lstm/critic_hidden_layer1_norm"]


def test_a_vanished_state_is_visible():
    """R042."""
    model = make(Script(ends=False))
    kill(model.policy.actor_trunk)
    assert update(model)["lstm/h_norm_layer0"] < 1e-6


def test_a_saturated_state_is_visible_when_every_episode_ends_with_the_rollout():
    """R042: measured after the reset, every state would look empty."""
    env = Script(ends=False)
    env.truncated[T - 1] = True
    model = make(env)
    saturate(model.policy.actor_trunk)
    saturate(model.policy.critic_trunk)
    logged = update(model)
    assert logged["lstm/h_mean_layer0"] > 0.9
    assert logged["lstm/critic_hidden_layer0_mean"] > 0.9
