"""Subclasses of SB3's ActorCriticPolicy, trained as they are."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecNormalize
from test_observations import SPACES, Drawing
from test_sb3_contract import Copying

from tailguard import DistributionalPPO

T, B, GAMMA, LAMBDA = 10, 2, 0.9, 0.8  # an episode of `Copying` has ten steps


class Constant(ActorCriticPolicy):
    """A policy with a value of the user's choice."""

    value = 0.0

    def forward(self, obs, deterministic=False):
        actions, values, log_prob = super().forward(obs, deterministic)
        return actions, torch.full_like(values, self.value), log_prob


class Checking(BaseCallback):
    """Compares the buffer with advantages computed from the values by hand."""

    checked = 0

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        buffer, value = self.model.rollout_buffer, self.model.policy.value
        rewards, advantage = buffer.rewards.numpy().astype(np.float64), np.zeros(B)
        for t in reversed(range(T)):  # the last step of a rollout is truncated: it bootstraps from the value
            advantage = rewards[t] + GAMMA * value - value + GAMMA * LAMBDA * advantage
            np.testing.assert_allclose(buffer.advantages[t], advantage, atol=1e-5)
            np.testing.assert_allclose(buffer.returns[t], advantage + value, atol=1e-5)
            self.checked += 1


def test_its_value_is_what_the_policy_says():
    model = DistributionalPPO(Constant, make_vec_env(Copying, B, seed=0), n_steps=T, gamma=GAMMA, gae_lambda=LAMBDA, seed=0)
    assert isinstance(model.policy, Constant)
    for value in (0.0, 1.5):
        model.policy.value = value
        checking = Checking()
        if value == 0.0:
            with pytest.warns(UserWarning, match=r"never learn: .*inner.value_net.weight"):
                model.learn(T * B, callback=checking)
        else:
            model.learn(T * B, callback=checking)
        assert checking.checked == T


@pytest.mark.parametrize(
    "actions", [spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3), spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])], ids=str
)
def test_its_distribution_is_the_policys(actions):
    model = DistributionalPPO(ActorCriticPolicy, make_vec_env(lambda: Copying(actions), B, seed=0), n_steps=T, seed=0).learn(
        T * B
    )
    rollout = model.rollout_buffer
    obs = rollout.obs[:-1].flatten(0, 1)
    model.learn(1, reset_num_timesteps=False)
    chosen = rollout.actions.flatten(0, 1)
    with torch.no_grad():
        dist_params = model.actor_critic.dist_params(obs)
        expected = model.policy.get_distribution(obs).log_prob(
            chosen.squeeze(-1) if isinstance(actions, spaces.Discrete) else chosen
        )
    torch.testing.assert_close(model.actor_critic.action_dist.log_prob(dist_params, chosen), expected, atol=1e-5, rtol=1e-5)


def test_it_learns():
    model = DistributionalPPO(
        ActorCriticPolicy, make_vec_env("CartPole-v1", 4, seed=0), 1e-3, n_epochs=10, batch_size=64, seed=0
    )
    assert evaluate_policy(model.learn(15_000), make_vec_env("CartPole-v1", 1, seed=9), n_eval_episodes=5)[0] > 150.0


def test_it_sees_images_and_integers_as_they_are():
    for name in ("image", "discrete"):
        model = DistributionalPPO(
            ActorCriticPolicy, make_vec_env(lambda name=name: Drawing(SPACES[name]), B), n_steps=T, seed=0
        )
        model.learn(T * B)


def test_its_rewards_are_scaled_by_vec_normalize_since_nothing_else_scales_them():
    """Its value is in the units of the rewards, so that PopArt cannot follow them."""
    env = VecNormalize(make_vec_env(Copying, B, seed=0), norm_reward=True, gamma=GAMMA)
    model = DistributionalPPO(ActorCriticPolicy, env, n_steps=T, seed=0).learn(3 * T * B)
    np.testing.assert_allclose(model.rollout_buffer.rewards[-1], env.normalize_reward(env.get_original_reward()), rtol=1e-6)
    assert env.ret_rms.count > T * B
    model.set_env(env)
    assert env.norm_reward


def test_it_is_saved_and_needs_its_class_to_be_loaded(tmp_path):
    env = make_vec_env(Copying, B, seed=0)
    model = DistributionalPPO(ActorCriticPolicy, env, n_steps=T, policy_kwargs={"net_arch": [8]}, seed=0).learn(T * B)
    model.save(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model", env, policy=ActorCriticPolicy)
    obs = np.random.default_rng(0).uniform(-1.0, 1.0, (4, 3)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(obs, deterministic=True)[0], model.predict(obs, deterministic=True)[0])
    loaded.learn(T * B)


@pytest.mark.parametrize("option", [{"critic": {"num_quantiles": 8}}, {"risk": {"objective": "cvar"}}, {"use_sde": True}])
def test_what_needs_a_distribution_of_the_return_is_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}"):
        DistributionalPPO(ActorCriticPolicy, make_vec_env(Copying, B), **option)


def test_recurrent_policies_of_sb3_contrib_are_refused():
    class Recurrent(ActorCriticPolicy):
        """Takes states as sb3-contrib's do."""

        def forward(self, obs, lstm_states, episode_starts, deterministic=False):
            raise NotImplementedError

    with pytest.raises(ValueError, match="subclass RecurrentDistributionalPolicy instead"):
        DistributionalPPO(Recurrent, make_vec_env(Copying, B))
