"""What users of SB3 do without thinking, and what must then happen."""

import io

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from tailguard import DistributionalPPO
from tailguard.io.state import normalization_state

SMALL = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 0}
LSTM = {"lstm_hidden_size": 8, "net_arch": [8]}
DICT = spaces.Dict({"place": spaces.Box(-1.0, 1.0, (3,)), "kind": spaces.MultiDiscrete([2, 3])})


class Noise(gym.Env):
    """Random observations of a space, seven steps an episode."""

    action_space = spaces.Discrete(3)

    def __init__(self, space):
        self.observation_space, self.t = space, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), float(action), False, self.t == 7, {}


class Scaled(BaseFeaturesExtractor):
    """One layer of the user's own."""

    def __init__(self, space, features_dim=6):
        super().__init__(space, features_dim)
        self.net = nn.Sequential(nn.Linear(space.shape[0], features_dim), nn.ReLU())

    def forward(self, observations):
        return self.net(observations)


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.policy.parameters()])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("batch_size", 8), ("target_kl", 1e-9), ("n_epochs", 3), ("gamma", 0.5), ("gae_lambda", 0.0)),
        *(("max_grad_norm", 0.01), ("vf_coef", 0.0), ("normalize_advantage", False)),
    ],
)
def test_settings_that_are_set_from_outside_count(name, value):
    trained = []
    for changed in (False, True):
        model = DistributionalPPO("MlpPolicy", "CartPole-v1", **SMALL).learn(32)
        if changed:
            setattr(model, name, value)
        model.learn(64, reset_num_timesteps=False)
        assert not changed or getattr(model, name) == value
        trained.append(weights_of(model))
    assert not torch.equal(*trained)


def test_target_kl_can_be_switched_off():
    model = DistributionalPPO("MlpPolicy", "CartPole-v1", target_kl=0.01, **SMALL)
    model.target_kl = None
    assert model.kl.config.mode == "none"


@pytest.mark.parametrize(("policy", "kwargs"), [("MultiInputPolicy", {}), ("MultiInputLstmPolicy", LSTM)])
def test_a_saved_model_of_dict_observations_meets_its_environment_again(policy, kwargs, tmp_path):
    model = DistributionalPPO(policy, Noise(DICT), policy_kwargs=kwargs, **SMALL).learn(16)
    model.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent", env=Noise(DICT))
    observation = DICT.sample()
    np.testing.assert_array_equal(*(each.predict(observation, deterministic=True)[0] for each in (model, loaded)))
    loaded.learn(16)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_several_integers_are_remembered(cell):
    env = Noise(spaces.MultiDiscrete([3, 4]))
    DistributionalPPO("MlpLstmPolicy", env, policy_kwargs=LSTM | {"recurrent_cell": cell}, **SMALL).learn(16)


@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("space", [spaces.Box(-1.0, 1.0, (3,)), spaces.Dict({"place": spaces.Box(-1.0, 1.0, (3,))})])
def test_statistics_of_vec_normalize_are_saved_in_all_its_forms(space, norm_obs, tmp_path):
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"

    def env():
        return VecNormalize(make_vec_env(lambda: Noise(space), 2, seed=0), norm_obs=norm_obs, norm_reward=False)

    model = DistributionalPPO(policy, env(), **SMALL).learn(64)
    model.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent", env=env())
    before, after = (normalization_state(each.get_vec_normalize_env()) for each in (model, loaded))
    assert before.keys() == after.keys()
    assert len(before) == 1 + norm_obs
    for name in before:
        np.testing.assert_array_equal(before[name]["mean"], after[name]["mean"])
        assert before[name]["count"] == after[name]["count"]


def test_a_missing_file_is_a_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        DistributionalPPO.load(tmp_path / "nothing")


def test_what_gymnasium_returns_at_a_reset_is_told_from_an_observation():
    model = DistributionalPPO("MlpPolicy", "CartPole-v1", **SMALL)
    with pytest.raises(ValueError, match=r"obs, info = env\.reset"):
        model.predict(gym.make("CartPole-v1").reset())


def test_another_default_dtype_is_refused_with_the_reason():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ValueError, match="default dtype"):
            DistributionalPPO("MlpPolicy", "CartPole-v1", **SMALL)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("shared", [True, False])
def test_features_and_extractors_have_sb3s_names(shared):
    kwargs = {"features_extractor_class": Scaled, "share_features_extractor": shared}
    policy = DistributionalPPO("MlpPolicy", "CartPole-v1", policy_kwargs=kwargs, **SMALL).policy
    observations = torch.randn(3, 4)
    features = policy.extract_features(observations)
    assert policy.pi_features_extractor is policy.features_extractor
    if shared:
        assert torch.equal(features, policy.features_extractor(observations))
        return
    assert torch.equal(features[0], policy.pi_features_extractor(observations))
    assert torch.equal(features[1], policy.vf_features_extractor(observations))
    assert torch.equal(features[1], policy.extract_features(observations, policy.vf_features_extractor))


def test_states_have_sb3_contribs_shape():
    kwargs = LSTM | {"n_lstm_layers": 2}
    policy = DistributionalPPO("MlpLstmPolicy", "CartPole-v1", policy_kwargs=kwargs, **SMALL).policy
    assert policy.lstm_hidden_state_shape == (2, 1, 8)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_policy_computes_and_does_not_repeat():
    policy = DistributionalPPO("MlpPolicy", "CartPole-v1", **SMALL).policy

    class Exported(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy = policy

        def forward(self, observation):
            return self.policy(observation, deterministic=True)

    with torch.no_grad():
        traced = torch.jit.trace(Exported(), torch.zeros(1, 4))
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        again = torch.jit.load(file)
        for _ in range(3):
            observation = torch.randn(1, 4)
            for found, expected in zip(again(observation), policy(observation, deterministic=True), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_zip_with_an_extractor_of_the_users_needs_its_class_only(tmp_path):
    ppo = PPO("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={"features_extractor_class": Scaled}, device="cpu")
    ppo.learn(16).save(tmp_path / "ppo")
    with pytest.raises(ValueError, match="features_extractor_class"):
        DistributionalPPO.from_sb3(tmp_path / "ppo.zip")
    model = DistributionalPPO.from_sb3(tmp_path / "ppo.zip", policy_kwargs={"features_extractor_class": Scaled})
    observations = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.testing.assert_array_equal(*(each.predict(observations, deterministic=True)[0] for each in (ppo, model)))


def test_a_zip_with_a_dict_of_vectors_is_imported_with_its_environment(tmp_path):
    ppo = PPO("MultiInputPolicy", Noise(DICT), **SMALL, device="cpu").learn(16)
    ppo.save(tmp_path / "ppo")
    model = DistributionalPPO.from_sb3(tmp_path / "ppo.zip", Noise(DICT))
    observation = DICT.sample()
    np.testing.assert_array_equal(*(each.predict(observation, deterministic=True)[0] for each in (ppo, model)))
    model.learn(16)


@pytest.mark.parametrize("kind", ["default", "own"])
def test_a_policy_can_be_taught_by_its_optimizer_before_the_training(kind):
    """Behaviour cloning, as notebooks do it: zero_grad, backward, clip, step."""
    kwargs = {"optimizer_class": torch.optim.RMSprop} if kind == "own" else {}
    model = DistributionalPPO("MlpPolicy", "CartPole-v1", learning_rate=1e-2, policy_kwargs=kwargs, **SMALL)
    observations = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    actions = (observations[:, 0] > 0.0).long()
    for after_training in (False, True):
        for _ in range(60):
            _, log_prob, _ = model.policy.evaluate_actions(observations, actions)
            model.policy.optimizer.zero_grad()
            (-log_prob.mean()).backward()
            nn.utils.clip_grad_norm_(model.policy.parameters(), 0.5)
            model.policy.optimizer.step()
        chosen = model.predict(observations.numpy(), deterministic=True)[0]
        assert (chosen == actions.numpy()).mean() > 0.95, f"after training: {after_training}"
        model.learn(32)


@pytest.mark.parametrize(("policy", "kwargs"), [("MlpPolicy", {}), ("MlpLstmPolicy", LSTM)])
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_bytes_that_are_no_image_are_numbers(policy, kwargs, shape):
    """As the RAM of an Atari game is."""
    env = Noise(spaces.Box(0, 255, shape, np.uint8))
    model = DistributionalPPO(policy, env, policy_kwargs=kwargs, **SMALL).learn(16)
    observation = env.observation_space.sample()
    assert model.predict(observation, deterministic=True)[0] in range(3)
