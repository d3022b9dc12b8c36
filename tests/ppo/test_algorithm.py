"""The algorithm on environments whose every number is known: states, values, time limits, gradients, weights, schedules."""

import dataclasses
import functools
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnvWrapper, VecMonitor, VecNormalize
from torch import distributions as td
from torch import nn

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import ArrayVecEnv, StepArrays
from tailguard.ppo.rollout import SequenceLayout, prepare

T, B, D = 16, 4, 3


class Script(ArrayVecEnv):
    """Environments whose observations, rewards and ends are written down beforehand and do not depend on the actions."""

    def __init__(self, seed=0, action_space=None, steps=4 * T, n_envs=B, ends=0.15):
        super().__init__(n_envs, spaces.Box(-10.0, 10.0, (D,)), action_space or spaces.Box(-1.0, 1.0, (2,)))
        rng = np.random.default_rng(seed)
        self.obs = rng.normal(size=(steps + 1, n_envs, D)).astype(np.float32)
        self.finals = rng.normal(size=(steps, n_envs, D)).astype(np.float32)
        self.rewards = rng.normal(size=(steps, n_envs))
        dones, cut = rng.random((2, steps, n_envs))
        self.terminated, self.truncated = (dones < ends) & (cut < 0.5), (dones < ends) & (cut >= 0.5)
        self.weights = None
        self.t = 0

    @property
    def dones(self):
        return self.terminated | self.truncated

    def reset(self):
        self.t = 0
        return self.obs[0]

    def step_arrays(self, actions):
        t, self.t = self.t, self.t + 1
        ended = np.flatnonzero(self.dones[t])
        weights = None if self.weights is None else self.weights[t]
        flags = (self.terminated[t], self.truncated[t])
        return StepArrays(self.obs[t + 1], self.rewards[t], *flags, ended, self.finals[t, ended], weights)


MODELS = {
    "mlp": ("MlpPolicy", {}),
    "lstm": ("MlpLstmPolicy", {}),
    "shared lstm": ("MlpLstmPolicy", {"shared_lstm": True}),
    "two layers": ("MlpLstmPolicy", {"n_lstm_layers": 2}),
}
every_model = pytest.mark.parametrize("kind", MODELS)
mlp_and_lstm = pytest.mark.parametrize("kind", ["mlp", "lstm"])


def make(kind="mlp", env=None, *, critic=None, policy_kwargs=None, **kwargs):
    policy, arch = MODELS[kind]
    lstm = {"lstm_hidden_size": 5} if policy == "MlpLstmPolicy" else {}
    return DistributionalPPO(
        policy,
        env if env is not None else Script(),
        critic={"num_quantiles": 6, **(critic or {})},
        policy_kwargs={"net_arch": [8], **lstm, **arch, **(policy_kwargs or {})},
        **{"n_steps": T, "seed": 0, "learning_rate": 1e-2, **kwargs},
    )


def collect(model):
    """One rollout, as learn() collects it."""
    if model._last_obs is None:
        model._setup_learn(10_000)
    assert model.collect_rollouts(model.env, _Silent(model), model.rollout_buffer, model.n_steps)


class _Silent(BaseCallback):
    def __init__(self, model):
        super().__init__()
        self.init_callback(model)

    def _on_step(self):
        return True


def prepared(model):
    """What train() makes of the rollout just collected."""
    return prepare(
        model.policy,
        model.rollout_buffer,
        *model._rollout_start,
        critic=model.critic_config,
        objective=model.objective,
        gamma=model.gamma,
        gae_lambda=model.gae_lambda,
        generator=torch.Generator().manual_seed(0),
    )


def weights(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def raw_quantiles(policy, obs):
    with torch.no_grad():
        return policy.return_scale.decode(policy.critic_outputs(torch.as_tensor(obs, dtype=torch.float32)))


def gradient(model):
    """The gradient of one full batch: no step is taken and nothing is clipped."""
    model.train()
    return torch.cat([parameter.grad.flatten() for parameter in model.policy.parameters()])


ONE_BATCH = {"learning_rate": 0.0, "n_epochs": 1, "batch_size": T * B, "max_grad_norm": 1e9}


# The first pass: what was stored is what is computed again.


@pytest.mark.parametrize("actions", [spaces.Box(-1.0, 1.0, (2,)), spaces.MultiDiscrete([3, 2])], ids=["box", "multi"])
@every_model
def test_on_the_first_pass_every_ratio_is_one_and_every_kl_zero(kind, actions):
    """Over three rollouts with updates between them, so that the state is carried; this catches every slip of it."""
    env = Script(action_space=actions)
    model = make(kind, env, normalize_obs=True)
    for k in range(3):
        collect(model)
        now = slice(k * T, (k + 1) * T)
        assert env.terminated[now].any()
        assert env.truncated[now].any()
        batch = prepared(model).batch
        with torch.no_grad():
            outputs = model.policy.dist_params(batch.features(model.policy)[0])
        real, distribution = batch.weights > 0.0, model.policy.action_dist
        then, now = (distribution.log_prob(x, batch.actions) for x in (batch.dist_params, outputs))
        ratio = (now - then).exp()[real]
        assert len(ratio) == T * B
        torch.testing.assert_close(ratio, torch.ones(T * B), atol=1e-5, rtol=0.0)
        torch.testing.assert_close(distribution.kl(batch.dist_params, outputs)[real], torch.zeros(T * B), atol=1e-5, rtol=0.0)
        model.train()


@every_model
def test_the_first_gradient_step_reports_no_kl_and_clips_nothing(kind):
    model = make(kind, **ONE_BATCH)
    collect(model)
    model.train()
    logged = model.logger.name_to_value
    assert logged["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert logged["train/clip_fraction"] == 0.0


def test_the_stored_action_is_the_sampled_one_and_the_environment_gets_it_clipped():
    sent = []

    class Listening(Script):
        def step_arrays(self, actions):
            sent.append(actions)
            return super().step_arrays(actions)

    model = make(env=Listening(), policy_kwargs={"log_std_init": 1.0})
    collect(model)
    stored = model.rollout_buffer.actions.numpy()
    assert np.abs(stored).max() > 1.0
    np.testing.assert_array_equal(np.stack(sent), np.clip(stored, -1.0, 1.0))
    batch = prepared(model).batch
    assert torch.equal(batch.actions.reshape(T, B, -1), model.rollout_buffer.actions)
    assert torch.equal(batch.dist_params.reshape(T, B, -1), model.rollout_buffer.dist_params)


# Values and bootstraps: one call over the sequences against a loop that carries the critic's own state.


class SlowCritic:
    """Walks through the script one step at a time, with a recurrent state of its own."""

    def __init__(self, model, env):
        self.model, self.env, self.t = model, env, 0
        self.trunk = model.policy.critic_trunk or model.policy.actor_trunk
        self.state = None if self.trunk is None else self.trunk.initial_state(B)

    def walk(self):
        """Values of T steps, and values and quantiles of the observations they led to."""
        now, after, quantiles = [], [], []
        with torch.no_grad():
            for t in range(self.t, self.t + T):
                done = torch.from_numpy(self.env.dones[t])
                led_to = np.where(self.env.dones[t][:, None], self.env.finals[t], self.env.obs[t + 1])
                value, _, state = self.value(self.env.obs[t], self.state)
                now.append(value)
                next_value, next_quantiles, _ = self.value(led_to, state)
                after.append(next_value)
                quantiles.append(next_quantiles)
                if state is not None:
                    self.state = tuple(torch.where(done.reshape(1, B, 1), torch.zeros_like(part), part) for part in state)
        self.t += T
        return torch.stack(now), torch.stack(after), torch.stack(quantiles, dim=1)

    def value(self, obs, state):
        features = self.model.policy.normalizer(torch.from_numpy(obs))
        if self.trunk is not None:
            features, state = self.trunk.step(features, state)
        quantiles = self.model.policy.return_scale.decode(self.model.policy.critic_outputs(features))
        means = quantiles.mean(-1)
        value = means.mean(0) if self.model.critic_config.aggregate == "mean" else means.min(0).values
        return value, quantiles.sort(-1).values, state


@every_model
@pytest.mark.parametrize("aggregate", ["mean", "min"])
def test_values_bootstraps_and_carried_states_are_those_of_a_slow_loop(kind, aggregate):
    env = Script()
    model = make(kind, env, gae_lambda=0.0, critic={"aggregate": aggregate}, normalize_obs=True)
    slow = SlowCritic(model, env)
    for k in range(2):
        collect(model)
        experience = prepared(model)
        now, after, _ = slow.walk()
        torch.testing.assert_close(experience.values, now, atol=1e-5, rtol=1e-5)
        # With lambda = 0 the return is the reward and the bootstrap.
        rewards = torch.from_numpy(env.rewards[k * T : (k + 1) * T]).float()
        alive = torch.from_numpy(~env.terminated[k * T : (k + 1) * T])
        torch.testing.assert_close(experience.returns, rewards + model.gamma * after * alive, atol=1e-5, rtol=1e-5)
        model.train()
        if slow.state is not None:
            torch.testing.assert_close(model._critic_state, slow.state, atol=1e-6, rtol=0.0)
    if slow.state is not None:
        assert slow.state[0].abs().max() > 0.0


@every_model
def test_target_atoms_are_the_rewards_and_what_each_critic_says_of_what_came_next(kind):
    """With lambda = 0, one step of the distributional Bellman equation."""
    env = Script()
    model = make(kind, env, critic={"value_lambda": 0.0})
    slow = SlowCritic(model, env)
    for k in range(2):
        collect(model)
        targets = prepared(model).batch.targets
        rewards = torch.from_numpy(env.rewards[k * T : (k + 1) * T]).float().unsqueeze(-1)
        alive = torch.from_numpy(~env.terminated[k * T : (k + 1) * T]).unsqueeze(-1)
        expected = rewards + model.gamma * alive * slow.walk()[2]
        torch.testing.assert_close(at_steps(model, targets), expected, atol=1e-5, rtol=1e-5)
        model.train()


@every_model
def test_on_the_first_pass_the_critics_say_what_they_said_of_the_rollout(kind):
    model = make(kind)
    for _ in range(2):
        collect(model)
        experience = prepared(model)
        with torch.no_grad():
            means = model.policy.raw_atoms(experience.batch.features(model.policy)[1]).mean(-1)
        torch.testing.assert_close(at_steps(model, means), experience.per_critic, atol=1e-5, rtol=1e-5)
        model.train()


def at_steps(model, rows):
    """From the layout of a batch, ``[K, L, B, ...]`` or ``[K, T B, ...]``, to ``[K, T, B, ...]``."""
    if not model.policy.recurrent:
        return rows.unflatten(1, (T, B))
    layout = SequenceLayout.of(model.rollout_buffer.terminated | model.rollout_buffer.truncated)
    return torch.stack([layout.gather(each) for each in rows])


def test_the_way_through_dictionaries_gives_the_same_rollout():
    """An SB3 wrapper hides the arrays of a batch; nothing may get lost."""
    found = []
    for wrap in (lambda env: env, VecMonitor):
        env = Script()
        env.weights = np.random.default_rng(3).choice([0.0, 0.5, 1.0, 3.0], size=env.rewards.shape).astype(np.float32)
        model = make(env=wrap(env))
        collect(model)
        rollout = model.rollout_buffer
        found.append((*rollout.sequence_layout()[1:], rollout.rewards, rollout.terminated, rollout.truncated, rollout.weights))
    assert found[0][2].any()
    assert found[0][3].any()
    for direct, wrapped in zip(*found, strict=True):
        assert torch.equal(direct, wrapped)


def test_returns_of_finished_episodes_are_discounted_from_their_start():
    env = Script()
    model = make(env=env)
    expected, running, discount = [], np.zeros(B), np.ones(B)
    for k in range(2):
        collect(model)
        model.train()
        for t in range(k * T, (k + 1) * T):
            running += discount * env.rewards[t]
            discount *= model.gamma
            for i in np.flatnonzero(env.dones[t]):
                expected.append(running[i])
                running[i], discount[i] = 0.0, 1.0
    assert len(expected) > B
    assert list(model.episode_returns.finished) == pytest.approx(expected)


@every_model
def test_a_truncated_episode_feels_its_final_observation_and_no_other_does(kind):
    where, env_id = 6, 1
    envs = [Script(ends=0.0) for _ in range(2)]
    for env in envs:
        env.truncated[where, env_id] = env.truncated[2, env_id] = env.truncated[where, 2] = True
    envs[1].finals[where, env_id] += 1.0
    returns = []
    for env in envs:
        model = make(kind, env)
        collect(model)
        returns.append(prepared(model).returns)
    changed = returns[0] != returns[1]
    expected = torch.zeros(T, B, dtype=torch.bool)
    expected[3 : where + 1, env_id] = True  # the steps of the episode that was cut there
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@every_model
def test_an_episode_never_feels_the_next_one(kind, end):
    where, env_id = 6, 1
    envs = [Script(ends=0.0) for _ in range(2)]
    for env in envs:
        getattr(env, end)[where, env_id] = True
    envs[1].obs[where + 1 :, env_id] += 1.0
    envs[1].rewards[where + 1 :, env_id] -= 5.0
    returns = []
    for env in envs:
        model = make(kind, env)
        collect(model)
        returns.append(prepared(model).returns)
    assert torch.equal(returns[0][: where + 1], returns[1][: where + 1])
    assert (returns[0][where + 1 :, env_id] != returns[1][where + 1 :, env_id]).all()


class OneState(ArrayVecEnv):
    """Reward 1 for ever, cut into episodes of 100 steps."""

    def __init__(self, terminal):
        super().__init__(2, spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2))
        self.terminal = terminal

    def reset(self):
        self.t = 0
        return np.zeros((2, 1), np.float32)

    def step_arrays(self, actions):
        self.t = (self.t + 1) % 100
        obs, ends, never = np.zeros((2, 1), np.float32), np.full(2, self.t == 0), np.zeros(2, np.bool_)
        flags = (ends, never) if self.terminal else (never, ends)
        return StepArrays(obs, np.ones(2), *flags, np.flatnonzero(ends), obs[ends])


@pytest.mark.parametrize(("terminal", "value"), [(False, 100.0), (True, 37.24)], ids=["time limit", "termination"])
def test_a_time_limit_costs_nothing_and_a_termination_does(terminal, value):
    """V = 1 / (1 - 0.99) = 100; a critic that takes the cut for an end learns mean_k (1 - 0.99^k) / 0.01 = 37.24."""
    model = make(
        env=OneState(terminal),
        n_steps=100,
        batch_size=200,
        n_epochs=10,
        gae_lambda=1.0,
        learning_rate=lambda progress: 1e-2 * progress,
        critic={"value_lambda": 1.0, "num_quantiles": 25, "scale": {"beta": 0.5}},
    )
    model.learn(25 * 200)
    mean = raw_quantiles(model.policy, [[0.0]]) @ model.policy.return_dist.masses
    assert mean.mean().item() == pytest.approx(value, rel=0.01)


# Critics.


@pytest.mark.parametrize("aggregate", ["mean", "min"])
@mlp_and_lstm
def test_the_value_is_the_mean_or_the_minimum_of_the_critics_means(kind, aggregate):
    model = make(kind, critic={"aggregate": aggregate})
    collect(model)
    experience = prepared(model)
    first, second = experience.per_critic
    assert (first - second).abs().min() > 0.0
    expected = (first + second) / 2.0 if aggregate == "mean" else torch.minimum(first, second)
    torch.testing.assert_close(experience.values, expected)


def test_a_single_critic_is_its_own_value():
    model = make(critic={"twin": False})
    collect(model)
    experience = prepared(model)
    assert torch.equal(experience.values, experience.per_critic[0])
    model.train()


@mlp_and_lstm
def test_both_critics_start_different_and_both_learn(kind):
    model = make(kind, learning_rate=1e-3)
    before = [weights(critic) for critic in model.policy.critics]
    assert not torch.equal(*before)
    collect(model)
    model.train()
    for critic, old in zip(model.policy.critics, before, strict=True):
        assert (weights(critic) != old).float().mean() > 0.9


@pytest.mark.parametrize("target", ["distribution", "lambda_return"])
def test_critics_learn_the_returns_in_their_own_units_whatever_the_scale(target):
    """Rewards a million times larger give the same normalised critics."""
    found = []
    for unit in (1.0, 1e6):
        env = Script()
        env.rewards *= unit
        model = make(env=env, critic={"target": target}, n_epochs=2)
        collect(model)
        model.train()
        found.append(raw_quantiles(model.policy, env.obs[0]) / unit)
    torch.testing.assert_close(found[0], found[1], atol=2e-3, rtol=2e-3)


@given(mean=st.floats(-1e3, 1e3), spread=st.floats(1e-2, 1e3), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_no_raw_prediction_moves_when_the_return_scale_does(mean, spread, seed):
    """PopArt, on a trained model and for any returns."""
    model, experience = trained()
    before = raw_quantiles(model.policy, Script().obs[0])
    noise = torch.randn(T, B, generator=torch.Generator().manual_seed(seed))
    model._finalize_return_stats(dataclasses.replace(experience, returns=mean + spread * noise))
    model._activate_return_scale_snapshot()
    after = raw_quantiles(model.policy, Script().obs[0])
    size = max(before.abs().max().item(), abs(model._ret_mean_snapshot), model._ret_std_snapshot)
    assert (after - before).abs().max() <= 1e-4 * size


@functools.cache
def trained():
    """A model after one update, and the experience it had; the same one for every example, ever further rescaled."""
    model = make()
    collect(model)
    experience = prepared(model)
    model.train()
    return model, experience


def test_the_first_scale_comes_from_the_rewards_alone():
    """Untrained critics guess numbers of order one; returns of order 1e-3 must not drown in them."""
    env = Script()
    env.rewards *= 1e-3
    model = make(env=env, learning_rate=0.0)
    collect(model)
    model.train()
    assert model._ret_std_snapshot < 5e-2


# Seeds.


@mlp_and_lstm
def test_the_same_seed_gives_the_same_weights_bit_for_bit(kind):
    first, second, other = (
        make(kind, make_vec_env("CartPole-v1", B, seed=seed), seed=seed).learn(3 * T * B) for seed in (0, 0, 1)
    )
    assert torch.equal(weights(first.policy), weights(second.policy))
    assert not torch.equal(weights(first.policy), weights(other.policy))


def test_without_a_seed_the_model_follows_torchs_generator_and_does_not_reseed_it():
    models, after = [], []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(make(seed=None))
        after.append(torch.rand(1))
    assert torch.equal(weights(models[0].policy), weights(models[1].policy))
    assert torch.equal(*after)


# Gradients.


def test_the_gradient_is_that_of_the_textbook_loss():
    """PPO's clipped surrogate, entropy and pinball loss, written out with torch.distributions on a policy that has moved."""
    env = Script()
    settings = {"clip_range": 0.1, "vf_coef": 0.7, "entropy": {"initial": 0.05}, "critic": {"target": "lambda_return"}}
    model = make(env=env, **ONE_BATCH, **settings)
    collect(model)
    model.train()  # the first update finds the scale of returns
    collect(model)
    move(model)
    obs, rollout = torch.from_numpy(env.obs[T : 2 * T]), model.rollout_buffer
    led_to = np.where(env.dones[T : 2 * T, :, None], env.finals[T : 2 * T], env.obs[T + 1 : 2 * T + 1])
    values, next_values = (raw_quantiles(model.policy, x).mean(-1).mean(0) for x in (obs, led_to))
    advantages, later = torch.zeros(T, B), torch.zeros(B)
    for t in reversed(range(T)):
        alive, going = torch.from_numpy(~env.terminated[T + t]), torch.from_numpy(~env.dones[T + t])
        delta = torch.from_numpy(env.rewards[T + t]) + model.gamma * alive * next_values[t] - values[t]
        later = advantages[t] = delta + model.gamma * model.gae_lambda * going * later
    returns = advantages + values
    advantages = (advantages - advantages.mean()) / advantages.std(correction=0)

    got = gradient(model)

    mean, log_std = model.policy.dist_params(obs).chunk(2, dim=-1)
    old_mean, old_log_std = rollout.dist_params.chunk(2, dim=-1)
    action_dist = td.Independent(td.Normal(mean, log_std.exp()), 1)
    old_action_dist = td.Independent(td.Normal(old_mean, old_log_std.exp()), 1)
    ratio = (action_dist.log_prob(rollout.actions) - old_action_dist.log_prob(rollout.actions)).exp()
    for outside in (ratio > 1.1, ratio < 0.9):
        assert (outside & (advantages > 0.0)).any()
        assert (outside & (advantages < 0.0)).any()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages).mean()
    error = model.policy.return_scale.encode(returns).unsqueeze(-1) - model.policy.critic_outputs(obs)
    pinball = torch.maximum(model.policy.return_dist.levels * error, (model.policy.return_dist.levels - 1.0) * error).mean()
    loss = -surrogate - 0.05 * action_dist.entropy().mean() + 0.7 * pinball
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.policy.parameters()))])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def move(model, size=0.3):
    """Change the actor a little, as an epoch would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.policy.actor.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("microbatch", [1, 2])
@pytest.mark.parametrize("kind", ["mlp", "lstm", "shared lstm"])
def test_microbatches_add_up_to_the_gradient_of_the_whole_batch(kind, microbatch):
    """With unequal weights, samples of weight 0, and one environment that counts for nothing at all."""
    found = []
    for size in (None, microbatch * T):
        env = Script()
        env.weights = np.random.default_rng(3).choice([0.0, 0.5, 1.0, 3.0], size=env.rewards.shape).astype(np.float32)
        env.weights[:, 2] = 0.0
        model = make(kind, env, **ONE_BATCH, microbatch_size=size)
        collect(model)
        move(model)
        found.append(gradient(model))
    assert found[0].norm() > 0.1
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)


@mlp_and_lstm
def test_a_sample_of_weight_two_counts_as_two_samples(kind):
    """Two copies of an environment, or one of weight 2."""
    twice, weighted = Script(), Script()
    for name in ("obs", "finals", "rewards", "terminated", "truncated"):
        for env in (twice, weighted):
            array = getattr(env, name)
            array[:, 1] = array[:, 0]
    weighted.weights = np.ones(weighted.rewards.shape, np.float32)
    weighted.weights[:, 0], weighted.weights[:, 1] = 2.0, 0.0
    found = []
    for env in (twice, weighted):
        model = make(kind, env, **ONE_BATCH, critic={"target": "lambda_return"})
        collect(model)
        model.rollout_buffer.actions[:, 1] = model.rollout_buffer.actions[:, 0]
        found.append(gradient(model))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)


def weightless(change=None, kind="mlp", after=None, **kwargs):
    """The gradient when the first step of an episode in env 1 and a step inside one in env 2 have weight 0."""
    return gradient(weightless_model(change, kind, after, **kwargs))


def weightless_model(change=None, kind="mlp", after=None, **kwargs):
    env = Script(ends=0.0)
    env.truncated[4, 1] = True
    env.weights = np.ones(env.rewards.shape, np.float32)
    env.weights[5, 1] = env.weights[9, 2] = 0.0
    if change is not None:
        change(env)
    model = make(kind, env, **ONE_BATCH, **kwargs)
    collect(model)
    if after is not None:
        after(model.rollout_buffer)
    return model


def spoil_rewards(env):
    env.rewards[5, 1] += 100.0
    env.rewards[9, 2] -= 100.0


def spoil_first_reward(env):
    env.rewards[5, 1] += 100.0


def spoil_actions(rollout):
    rollout.actions[5, 1] = 3.0
    rollout.actions[9, 2] = -3.0


@mlp_and_lstm
def test_the_action_of_a_sample_of_weight_zero_changes_nothing(kind):
    assert torch.equal(weightless(kind=kind), weightless(kind=kind, after=spoil_actions))


@mlp_and_lstm
def test_the_reward_of_a_sample_of_weight_zero_changes_nothing_by_itself(kind):
    alone = {"gamma": 0.0}  # then no step feels the reward of another
    assert torch.equal(weightless(kind=kind, **alone), weightless(spoil_rewards, kind=kind, **alone))
    # Nor does it when it is the first step of its episode, and nobody stands before it.
    assert torch.equal(weightless(kind=kind), weightless(spoil_first_reward, kind=kind))


def test_a_sample_of_weight_zero_has_no_part_in_the_explained_variance():
    """It steers the entropy coefficient."""
    logged = []
    for change in (None, spoil_first_reward):
        model = weightless_model(change)
        model.train()
        logged.append({name: value for name, value in model.logger.name_to_value.items() if "explained" in name})
    assert len(logged[0]) == 3
    assert logged[0] == pytest.approx(logged[1])


@mlp_and_lstm
def test_the_reward_of_a_sample_of_weight_zero_is_felt_by_the_steps_that_led_to_it(kind):
    assert not torch.equal(weightless(kind=kind), weightless(spoil_rewards, kind=kind))


@mlp_and_lstm
def test_a_minibatch_without_weight_is_harmless(kind):
    env = Script()
    env.weights = np.ones(env.rewards.shape, np.float32)
    env.weights[:, 1] = 0.0
    model = make(kind, env, batch_size=T)
    collect(model)
    model.train()
    assert weights(model.policy).isfinite().all()


@mlp_and_lstm
def test_a_rollout_without_weight_teaches_nothing(kind):
    """Nor does it count as an update, move the controls, or pass for the death of the critics."""
    env = Script()
    env.weights = np.ones(env.rewards.shape, np.float32)
    env.weights[T:] = 0.0
    model = make(kind, env, kl={"mode": "penalty"})
    collect(model)
    model.train()
    before, updates, coefficient = weights(model.policy), model._n_updates, model.kl.coefficient
    collect(model)
    model.train()
    assert torch.equal(weights(model.policy), before)
    assert model._n_updates == updates
    assert model.logger.name_to_value["warn/empty_epoch"] == 1.0
    assert model.kl.coefficient == coefficient
    assert not [name for name in model.logger.name_to_value if "vanishing" in name]


def test_a_training_may_begin_with_a_rollout_without_weight():
    env = Script()
    env.weights = np.ones(env.rewards.shape, np.float32)
    env.weights[:T] = 0.0
    model = make(env=env)
    before = weights(model.policy)
    collect(model)
    model.train()
    assert torch.equal(weights(model.policy), before)
    collect(model)
    model.train()
    assert not torch.equal(weights(model.policy), before)


def test_weights_between_zero_and_one_survive_the_way_through_infos():
    """An SB3 wrapper hides the arrays; then the weights travel as infos."""

    class Halved(VecEnvWrapper):
        def reset(self):
            return self.venv.reset()

        def step_wait(self):
            obs, rewards, dones, infos = self.venv.step_wait()
            return obs, rewards, dones, [{**info, "sample_weight": 0.5} for info in infos]

    model = make(env=Halved(Script()))
    collect(model)
    assert (model.rollout_buffer.weights == 0.5).all()


def test_many_precise_actions_do_not_overflow_in_rows_that_are_no_samples():
    """Reset steps and final observations have weight 0; a density of e^100 there must not turn the loss into NaN."""
    env = Script(action_space=spaces.Box(-1.0, 1.0, (40,)))
    model = make("lstm", env, policy_kwargs={"log_std_init": -4.0})
    before = weights(model.policy.actor)
    collect(model)
    model.train()
    assert weights(model.policy).isfinite().all()
    assert not torch.equal(weights(model.policy.actor), before)


def test_clearing_gradients_from_outside_does_not_stop_the_learning():
    """`policy.zero_grad()` and `optimizer.zero_grad()` are what every PyTorch user calls."""
    for clear in (lambda model: model.policy.zero_grad(), lambda model: model.policy.optimizer.zero_grad()):
        model = make()
        before = weights(model.policy.actor)
        clear(model)
        collect(model)
        model.train()
        assert not torch.equal(weights(model.policy.actor), before)


def test_a_gradient_is_never_longer_than_its_limit():
    model = make(**{**ONE_BATCH, "max_grad_norm": 0.01})
    collect(model)
    assert gradient(model).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert model.logger.name_to_value["train/grad_norm"] > 0.1  # what is logged is the length before


# KL.


@pytest.mark.parametrize("actions", [spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)], ids=["box", "discrete"])
def test_the_penalty_adds_the_gradient_of_the_true_kl(actions):
    found = []
    for kl in ({}, {"mode": "penalty", "penalty_initial": 2.0}):
        model = make(env=Script(action_space=actions), **ONE_BATCH, kl=kl)
        collect(model)
        move(model)
        found.append(gradient(model))
    obs, old = model.rollout_buffer.obs[:-1], model.rollout_buffer.dist_params
    action_dists = []
    for outputs in (old, model.policy.dist_params(obs)):
        if isinstance(actions, spaces.Box):
            mean, log_std = outputs.chunk(2, dim=-1)
            action_dists.append(td.Independent(td.Normal(mean, log_std.exp()), 1))
        else:
            action_dists.append(td.Categorical(logits=outputs))
    kl = td.kl_divergence(*action_dists).mean()
    assert kl > 1e-3
    parts = torch.autograd.grad(2.0 * kl, list(model.policy.parameters()), allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(found[1] - found[0], torch.cat([part.flatten() for part in parts]), atol=1e-5, rtol=1e-4)


def updated(kind="mlp", **kwargs):
    """The weights after one update of a new model."""
    model = make(kind, **kwargs)
    collect(model)
    model.train()
    return weights(model.policy)


@mlp_and_lstm
def test_an_early_stop_comes_before_the_step(kind):
    """The second pass finds a KL above its limit; so the weights are those after exactly one step."""
    stop = {"mode": "early_stop", "target": 1e-5}
    stopped = updated(kind, batch_size=T * B, n_epochs=5, kl=stop)
    assert torch.equal(stopped, updated(kind, batch_size=T * B, n_epochs=1))
    assert not torch.equal(stopped, updated(kind, batch_size=T * B, n_epochs=5))


def test_a_generous_early_stop_changes_nothing():
    assert torch.equal(updated(kl={"mode": "early_stop", "target": 1e3}), updated())


def test_the_adaptive_learning_rate_falls_after_a_large_kl_and_grows_after_a_small_one():
    rates = {}
    for name, target in (("large", 1e-6), ("small", 1e3)):
        model = make(kl={"mode": "adaptive_lr", "target": target}, learning_rate=1e-3)
        for _ in range(2):
            collect(model)
            model.train()
        rates[name] = model.policy.optimizer.param_groups[0]["lr"]
    assert rates["large"] == pytest.approx(1e-3 / 1.5)
    assert rates["small"] == pytest.approx(1e-3 * 1.5)


# Learning rate and entropy.


@pytest.mark.parametrize("given_rate", [1e-3, lambda progress: 1e-3 * progress], ids=["constant", "schedule"])
def test_a_learning_rate_that_is_set_survives_training(given_rate):
    model = make(learning_rate=given_rate)
    model.learn(T * B)
    model.lr.set(7e-5)
    model.learn(2 * T * B, reset_num_timesteps=False)
    assert [group["lr"] for group in model.policy.optimizer.param_groups] == [7e-5]
    assert model.logger.name_to_value["train/learning_rate"] == 7e-5


def test_a_schedule_follows_the_progress():
    seen = []

    class Listening(DistributionalPPO):
        def train(self):
            super().train()
            seen.append(self.policy.optimizer.param_groups[0]["lr"])

    Listening("MlpPolicy", Script(), n_steps=T, learning_rate=lambda progress: 1e-3 * progress, seed=0).learn(4 * T * B)
    assert seen == pytest.approx([7.5e-4, 5e-4, 2.5e-4, 0.0])


def test_the_entropy_coefficient_decays_over_updates():
    model = make(entropy={"initial": 0.1, "final": 0.02, "decay_steps": 4, "boost_factor": 1.0})
    model.learn(2 * T * B)
    assert model.entropy.value == pytest.approx(0.06)


def test_the_entropy_decay_starts_at_a_plateau_of_the_episode_returns():
    """Performance must reach the schedule, or a decay that waits for a plateau never starts."""
    plateau = {"plateau_window": 2, "plateau_tolerance": 1e9, "boost_factor": 1.0}
    model = make(env=VecMonitor(Script()), entropy={"initial": 0.1, "final": 0.0, "decay_steps": 2, **plateau})
    model.learn(4 * T * B)
    assert model.ep_info_buffer
    assert model.entropy.value < 0.1


# Recurrent state between rollouts.


def test_a_new_training_begins_with_the_initial_state():
    """learn() resets the environments, so what was remembered of the old episodes is stale."""
    starts = []

    class Watching(BaseCallback):
        def _on_rollout_start(self):
            starts.append([part.abs().max().item() for state in self.model._rollout_start for part in state])

        def _on_step(self):
            return True

    model = make("lstm", Script(ends=0.0))
    model.learn(2 * T * B, callback=Watching())
    model.learn(T * B, callback=Watching())
    assert starts[0] == [0.0] * 4
    assert min(starts[1]) > 0.0  # carried on within a training
    assert starts[2] == [0.0] * 4


class Stopping(BaseCallback):
    """Ends the training after so many steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def _on_step(self):
        return self.n_calls < self.steps


def stopped_and_resumed(env):
    """Stopped in the middle of the second rollout, and gone on with."""
    model = make("lstm", env, learning_rate=0.0)
    model.learn(3 * T * B, callback=Stopping(T + 6))
    model.learn(T * B, reset_num_timesteps=False)
    return model


def test_a_training_that_a_callback_stopped_continues_where_it_stopped():
    env = Script()
    model = stopped_and_resumed(env)
    np.testing.assert_array_equal(model.rollout_buffer.obs[0], env.obs[T + 6])
    np.testing.assert_array_equal(model.rollout_buffer.rewards[0], env.rewards[T + 6].astype(np.float32))


def test_an_episode_that_ended_in_a_stopped_rollout_is_forgotten():
    """Of actor and critics: another past in that episode must leave no trace in what begins after it."""
    starts = []
    for shift in (0.0, 2.0):
        env = Script(ends=0.0)
        env.terminated[T + 3, 1] = True
        env.obs[: T + 3, 1] += shift
        starts.append(stopped_and_resumed(env)._rollout_start)
    for first, second in zip(*starts, strict=True):
        for part, other in zip(first, second, strict=True):
            assert torch.equal(part[:, 1], other[:, 1])


def test_observations_are_normalised_by_statistics_that_stay_within_a_rollout():
    env = Script()
    env.obs += 5.0
    model = make(env=env, normalize_obs=True)
    collect(model)
    assert model.policy.normalizer.count == 0.0
    model.train()
    np.testing.assert_allclose(model.policy.normalizer.mean, env.obs[:T].reshape(-1, D).mean(0), rtol=1e-5)
    before = model.policy.normalizer.mean.clone()
    collect(model)
    assert torch.equal(model.policy.normalizer.mean, before)


# What is refused.


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("what", ["obs", "rewards"])
@mlp_and_lstm
def test_numbers_that_are_not_finite_are_refused_with_env_and_step(kind, what, bad):
    env = Script()
    getattr(env, what)[5, 2] = bad
    model = make(kind, env)
    with pytest.raises(ValueError, match="env 2 at step 5"):
        collect(model)


@pytest.mark.parametrize("what", ["obs", "rewards"])
def test_infinities_that_cancel_are_refused_too(what):
    env = Script()
    getattr(env, what)[5, 1] = -np.inf
    getattr(env, what)[5, 2] = np.inf
    with pytest.raises(ValueError, match="env 1 at step 5"):
        collect(make(env=env))


def test_the_observation_after_the_last_step_is_checked_as_well():
    env = Script()
    env.obs[T, 3] = np.nan
    with pytest.raises(ValueError, match=f"env 3 at step {T}"):
        collect(make(env=env))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@mlp_and_lstm
def test_a_final_observation_that_is_not_finite_is_refused_with_env_and_step(kind, bad):
    env = Script(ends=0.0)
    env.truncated[5, 2] = True
    env.finals[5, 2] = bad
    model = make(kind, env)
    with pytest.raises(ValueError, match="env 2 at step 5"):
        (collect(model), model.train())


@mlp_and_lstm
def test_the_final_observation_of_a_terminated_episode_may_be_anything(kind):
    """Nobody asks what comes after an end; a simulator that blew up there must not spoil the episodes that follow."""
    found = []
    for final in (0.0, np.nan):
        env = Script(ends=0.0)
        env.terminated[5, 2] = True
        env.finals[5, 2] = final
        found.append(updated(kind, env=env))
    torch.testing.assert_close(found[0], found[1])


def test_an_environment_may_hand_out_arrays_that_cannot_be_written():
    class Locked(Script):
        def step_arrays(self, actions):
            return super().step_arrays(actions)._replace(rewards=np.broadcast_to(np.float64(1.0), B))

    env = Locked()
    for array in (env.obs, env.finals, env.terminated, env.truncated):
        array.setflags(write=False)
    collect(make(env=env))


@pytest.mark.parametrize("shape", [(B, 1), (B + 1,), ()], ids=str)
def test_dones_of_a_wrong_shape_are_refused_with_both_shapes(shape):
    class Wrong(VecEnvWrapper):
        def reset(self):
            return self.venv.reset()

        def step_wait(self):
            obs, rewards, _, infos = self.venv.step_wait()
            return obs, rewards, np.zeros(shape, np.bool_), infos

    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is read below)
        collect(make(env=Wrong(Script())))
    assert "dones" in str(error.value)
    assert str(shape) in str(error.value)
    assert str((B,)) in str(error.value)


@pytest.mark.parametrize("shape", [(B, 1), (B + 1,), ()], ids=str)
@pytest.mark.parametrize("name", ["terminated", "truncated", "rewards"])
def test_arrays_of_a_wrong_shape_are_refused_by_name_with_both_shapes(name, shape):
    class Wrong(Script):
        def step_arrays(self, actions):
            return super().step_arrays(actions)._replace(**{name: np.zeros(shape, np.bool_)})

    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is read below)
        collect(make(env=Wrong(ends=0.0)))
    assert name in str(error.value)
    assert str(shape) in str(error.value)
    assert str((B,)) in str(error.value)


@pytest.mark.parametrize(
    ("kind", "name", "size", "nearest"),
    [
        ("mlp", "microbatch_size", 9, 8),
        ("mlp", "microbatch_size", 0, 1),
        ("lstm", "microbatch_size", 5, T),
    ],
)
def test_microbatches_that_do_not_fit_are_refused_with_the_nearest_that_does(kind, name, size, nearest):
    kwargs = {"batch_size": 2 * T, name: size}
    with pytest.raises(ValueError, match=f"{name} is {size}.* nearest is {nearest}$"):
        make(kind, **kwargs)


@pytest.mark.parametrize("size", [0, -3])
def test_a_batch_has_at_least_one_sample(size):
    with pytest.raises(ValueError, match=f"batch_size is {size}, but it must be at least 1"):
        make(batch_size=size)


@pytest.mark.parametrize(
    "kind_and_size", [("mlp", 7, 7, 1), ("mlp", 999, T * B, 0), ("lstm", T + 1, T, 0), ("lstm", 3 * T, 3 * T, T)]
)
def test_any_batch_size_is_taken_and_what_is_left_of_a_rollout_is_learnt_from_too(kind_and_size):
    kind, given, used, left = kind_and_size
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = make(kind, batch_size=given)
    assert model.batch_size == used
    assert [f"truncated mini-batch of size {left}" in str(warning.message) for warning in caught] == [True] * bool(left)
    collect(model)
    sizes = [batch.weights.sum().item() for batch in model._experience().batch.shuffled(model._sequences, model.shuffler)]
    assert sum(sizes) == T * B
    assert max(sizes) <= used


@pytest.mark.parametrize("n_envs", [1, 2, 3, 4, 6, 7])
@mlp_and_lstm
def test_the_default_batch_always_fits(kind, n_envs):
    model = make(kind, Script(n_envs=n_envs), n_steps=5)
    assert 5 * n_envs % model.batch_size == 0
    assert model.batch_size % (5 if kind == "lstm" else 1) == 0
    model.learn(5 * n_envs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_steps", 0),
        ("n_epochs", 0),
        ("gamma", 1.01),
        ("gamma", np.nan),
        ("gae_lambda", -0.1),
        ("clip_range", 0.0),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", np.nan),
        ("vf_coef", -1.0),
        ("vf_coef", np.inf),
        ("learning_rate", -1e-3),
        ("learning_rate", np.nan),
    ],
)
def test_impossible_numbers_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        make(**{name: value})


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        ("critic", {"num_quantiles": 0}, "num_quantiles"),
        ("critic", {"aggregate": "max"}, "aggregate"),
        ("critic", {"tail_quantiles": 6}, "tail_quantiles is 6, but it must be below num_quantiles 6"),
        ("critic", {"quantiles": 3}, "quantiles: unknown key; known are .*num_quantiles"),
        ("entropy", {"initial": -1.0}, "initial"),
        ("kl", {"mode": "maybe"}, "mode"),
        ("kl", {"target": 0.0}, "target"),
        ("normalize_obs", {"clip": -1.0}, "clip"),
    ],
)
def test_impossible_settings_are_refused_by_name(group, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**{group: settings})


def test_rewards_are_not_scaled_twice():
    scaled = VecNormalize(Script(), norm_reward=True)
    with pytest.warns(UserWarning, match="its norm_reward is now False"):
        model = make(env=scaled)
    assert not scaled.norm_reward
    collect(model)
    assert torch.equal(model.rollout_buffer.rewards, make_and_collect(VecNormalize(Script(), norm_reward=False)).rewards)
    with pytest.warns(UserWarning, match="norm_reward=True"):
        model.set_env(VecNormalize(Script(), norm_reward=True))


def make_and_collect(env):
    model = make(env=env)
    collect(model)
    return model.rollout_buffer


# Learning.


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_cart_pole_is_learnt_in_fifteen_thousand_steps(policy):
    """Of three seeds the middle one; a single one may be unlucky (benchmarks/learning.py trains long enough for all)."""
    lstm = {"lstm_hidden_size": 32} if policy == "MlpLstmPolicy" else {}
    means = []
    for seed in (1, 2, 3):
        env = make_vec_env("CartPole-v1", 8, seed=seed)
        model = DistributionalPPO(
            policy,
            env,
            n_steps=64,
            n_epochs=8,
            learning_rate=3e-3,
            critic={"num_quantiles": 8},
            policy_kwargs={"net_arch": [32], **lstm},
            seed=seed,
        )
        model.learn(15_000)
        means.append(evaluate_policy(model, env, n_eval_episodes=8)[0])
    assert np.median(means) > 150.0


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_a_gradient_that_is_not_finite_is_skipped_and_reported(kind):
    """The loss of the first step overflows in one layer; the weights stay finite and the other steps are taken."""
    model = make(kind)
    spoilt = iter([float("inf")])
    model.policy.actor[0].weight.register_hook(lambda gradient: gradient * next(spoilt, 1.0))
    before = weights(model.policy)
    collect(model)
    model.train()
    assert model.logger.name_to_value["warn/non_finite_gradient"] == 1.0
    assert weights(model.policy).isfinite().all()
    assert not torch.equal(weights(model.policy), before)


@pytest.mark.parametrize("what", ["obs", "rewards"])
@pytest.mark.parametrize("step", [0, T + 3])
def test_nan_from_an_environment_does_not_poison_the_vec_normalize_of_the_user(what, step):
    """VecNormalize sees the NaN first; its statistics go back to those at the start of the rollout."""
    script = Script()
    env = VecNormalize(script, norm_reward=False)
    getattr(script, what)[step, 1] = np.nan
    model = make(env=env)
    with pytest.raises(ValueError, match="is not finite"):
        model.learn(3 * T * B)
    assert np.isfinite(env.obs_rms.mean).all()
    assert np.isfinite(env.obs_rms.var).all()
    assert np.isfinite(env.ret_rms.mean)
    assert np.isfinite(env.returns).all()
    whole = Script()
    sound = VecNormalize(whole, norm_reward=False)
    if step:
        make(env=sound).learn(T * B)  # up to the rollout before
        assert np.array_equal(env.obs_rms.mean, sound.obs_rms.mean)
