"""Models of Stable-Baselines3 as files: weights and settings are taken over, and no code in them is run."""

import base64
import io
import json
import pickle
import zipfile

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv
from test_observations import SPACES, Drawing, drawn
from test_sb3_contract import Copying
from torch import nn

from tailguard import DistributionalPPO

KINDS = {
    "box": ("MlpPolicy", lambda: Copying(), {}),
    "discrete": ("MlpPolicy", lambda: Copying(spaces.Discrete(3)), {"net_arch": {"pi": [8], "vf": [8, 4]}}),
    "multi binary": ("MlpPolicy", lambda: Copying(spaces.MultiBinary(3)), {"activation_fn": nn.ReLU, "net_arch": []}),
    "gSDE": ("MlpPolicy", lambda: Copying(), {"log_std_init": -1.5}),
    "image": ("CnnPolicy", lambda: Drawing(SPACES["image"]), {"features_extractor_kwargs": {"features_dim": 16}}),
    "two images": ("CnnPolicy", lambda: Drawing(SPACES["image"]), {"share_features_extractor": False, "net_arch": [4]}),
    "dict": ("MultiInputPolicy", lambda: Drawing(SPACES["dict"]), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_model_acts_and_values_as_it_did(kind, tmp_path):
    policy, make_env, network = KINDS[kind]
    options = {"use_sde": True} if kind == "gSDE" else {}
    theirs = PPO(
        policy, make_env(), 1e-3, 16, 8, 2, gamma=0.9, clip_range=0.1, ent_coef=0.01, seed=0, policy_kwargs=network, **options
    )
    theirs.learn(16).save(tmp_path / "ppo")
    model = DistributionalPPO.from_sb3(tmp_path / "ppo.zip", make_env())
    observations = drawn(model.observation_space)
    expected = theirs.predict(observations, deterministic=True)[0]
    np.testing.assert_allclose(model.predict(observations, deterministic=True)[0], expected, atol=1e-5)
    tensors, _ = theirs.policy.obs_to_tensor(observations)
    with torch.no_grad():
        values = theirs.policy.predict_values(tensors)
        torch.testing.assert_close(model.policy.predict_values(tensors), values, atol=1e-5, rtol=1e-5)
    found = (model.learning_rate, model.n_steps, model.batch_size, model.n_epochs, model.gamma, model.ent_coef, model.seed)
    assert found == (1e-3, 16, 8, 2, 0.9, 0.01, 0)
    assert model.clip_range(1.0) == 0.1
    assert model.normalize_advantage_per_mini_batch
    model.learn(16)  # and is trained on: what the critic knew is kept when the scale of returns changes
    assert model.policy.return_scale.mass > 0.0


BOXES = {"a": spaces.Box(-1.0, 1.0, (2,)), "e": spaces.Box(np.float32([0.0, -1.25, 2.0]), np.float32([1.0, np.inf, 3.0]))}
DESCRIBED = {
    "box": (spaces.Box(np.float32([-1.5, -np.inf, -3.3]), np.float32([1.0, np.inf, 2.2])), spaces.Box(-2.0, 2.0, (2,))),
    "image": (spaces.Box(0, 255, (3, 36, 36), np.uint8), spaces.Discrete(3)),
    "numbers": (spaces.Discrete(4), spaces.MultiDiscrete([2, 3])),
    "several": (spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)),
    "bits": (spaces.MultiBinary(3), spaces.Discrete(5)),
    "dict": (
        spaces.Dict(
            {**BOXES, "b": spaces.Discrete(3), "c": spaces.Box(0, 255, (3, 36, 36), np.uint8), "d": spaces.MultiBinary(2)}
        ),
        spaces.Discrete(2),
    ),
}


class Sampled(gym.Env):
    """Draws its observations from a space."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}


@pytest.mark.parametrize("kind", DESCRIBED)
def test_without_an_environment_the_spaces_are_read_from_the_text_in_the_file(kind, tmp_path):
    env = Sampled(*DESCRIBED[kind])
    policy = {"image": "CnnPolicy", "dict": "MultiInputPolicy"}.get(kind, "MlpPolicy")
    theirs = PPO(policy, env, n_steps=8, batch_size=8, seed=0, device="cpu")
    theirs.save(tmp_path / "ppo")
    model = DistributionalPPO.from_sb3(tmp_path / "ppo.zip")
    assert (model.observation_space, model.action_space) == (env.observation_space, env.action_space)
    observation = env.observation_space.sample()
    expected = theirs.predict(observation, deterministic=True)[0]
    np.testing.assert_allclose(model.predict(observation, deterministic=True)[0], expected, atol=1e-5)
    model.set_env(DummyVecEnv([lambda: env]))


def test_a_space_that_the_text_does_not_describe_is_asked_for(tmp_path):
    low = np.arange(2_000, dtype=np.float32)  # shortened by numpy
    env = Sampled(spaces.Box(low, low + 1.0), spaces.Discrete(2))
    PPO("MlpPolicy", env, n_steps=8, batch_size=8, policy_kwargs={"net_arch": [2]}).save(tmp_path / "ppo")
    with pytest.raises(ValueError, match=r"observation_space cannot be read .*: give env"):
        DistributionalPPO.from_sb3(tmp_path / "ppo")
    DistributionalPPO.from_sb3(tmp_path / "ppo", env)


def test_linear_schedules_are_taken_over_and_functions_asked_for(tmp_path):
    rates = {"learning_rate": LinearSchedule(1e-3, 1e-4, 0.5), "clip_range": LinearSchedule(0.3, 0.0, 1.0)}
    PPO("MlpPolicy", Copying(), n_steps=16, batch_size=16, clip_range_vf=0.4, **rates).save(tmp_path / "ppo")
    model = DistributionalPPO.from_sb3(tmp_path / "ppo")
    for progress in (1.0, 0.75, 0.25, 0.0):
        assert model.lr_schedule(progress) == pytest.approx(rates["learning_rate"](progress))
        assert model.clip_range(progress) == pytest.approx(rates["clip_range"](progress))
        assert model.clip_range_vf(progress) == 0.4
    PPO("MlpPolicy", Copying(), learning_rate=lambda left: 1e-2 * left, n_steps=16, batch_size=16).save(tmp_path / "function")
    with pytest.warns(UserWarning, match=r"learning_rate was a function.*from_sb3\(learning_rate=\.\.\.\)"):
        DistributionalPPO.from_sb3(tmp_path / "function")


def contrib_zip(path, hidden=5, critic="lstm_critic"):
    """Write the parts of sb3-contrib's file that are read, with random weights of its names and shapes."""
    torch.manual_seed(0)
    parts = {
        "mlp_extractor.policy_net.0": nn.Linear(hidden, 4),
        "mlp_extractor.value_net.0": nn.Linear(hidden, 6),
        "action_net": nn.Linear(4, 2),
        "value_net": nn.Linear(6, 1),
        "lstm_actor": nn.LSTM(4, hidden, 2),
        **({"lstm_critic": nn.LSTM(4, hidden, 2)} if critic == "lstm_critic" else {"critic": nn.Linear(4, hidden)}),
    }
    weights = {f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.state_dict().items()}
    kwargs = {"lstm_hidden_size": hidden, "n_lstm_layers": 2, "enable_critic_lstm": critic == "lstm_critic"}
    content = io.BytesIO()
    torch.save(weights, content)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", json.dumps({"policy_kwargs": kwargs, "n_steps": 16, "gamma": 0.95}))
        archive.writestr("policy.pth", content.getvalue())
    return parts


@pytest.mark.parametrize("critic", ["lstm_critic", "critic"])
def test_a_recurrent_model_is_imported(tmp_path, critic):
    parts = contrib_zip(tmp_path / "recurrent.zip", critic=critic)
    model = DistributionalPPO.from_sb3(tmp_path / "recurrent", "CartPole-v1")
    obs, state = torch.randn(6, 3, 4), None
    with torch.no_grad():
        hidden, _ = parts["lstm_actor"](obs)
        logits = parts["action_net"](torch.tanh(parts["mlp_extractor.policy_net.0"](hidden)))
        latent = parts["lstm_critic"](obs)[0] if critic == "lstm_critic" else parts["critic"](obs)
        values = parts["value_net"](torch.tanh(parts["mlp_extractor.value_net.0"](latent)))
    for step, row in enumerate(obs):
        actions, state = model.predict(row.numpy(), state=state, deterministic=True)
        np.testing.assert_array_equal(actions, logits[step].argmax(-1))
    sequences = (model.policy.initial_state(3), model.policy.initial_critic_state(3)), torch.zeros(18)
    found = model.policy.evaluate_actions(obs.transpose(0, 1).reshape(18, 4), torch.zeros(18), *sequences)[0]
    torch.testing.assert_close(found.reshape(3, 6).T, values.squeeze(-1), atol=1e-5, rtol=1e-5)
    model.learn(16)


class Trap:
    """A pickle of this runs code when it is opened."""

    def __reduce__(self):
        return exec, ("raise SystemExit('the code in the file was run')",)


def test_code_in_a_file_is_not_run(tmp_path):
    PPO("MlpPolicy", Copying(), n_steps=16, batch_size=16, seed=0).save(tmp_path / "ppo")
    with zipfile.ZipFile(tmp_path / "ppo.zip") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    data, trap = json.loads(parts["data"]), base64.b64encode(pickle.dumps(Trap())).decode()
    for name, value in data.items():
        if isinstance(value, dict) and ":serialized:" in value:
            data[name] = value | {":serialized:": trap}
    parts["data"] = json.dumps(data).encode()
    write_zip(tmp_path / "trap.zip", parts)
    with pytest.raises(SystemExit):  # SB3 opens it
        PPO.load(tmp_path / "trap.zip")
    DistributionalPPO.from_sb3(tmp_path / "trap.zip", Copying()).predict(np.zeros(3, np.float32))
    write_zip(tmp_path / "weights.zip", parts | {"policy.pth": saved_by_torch({"log_std": Trap()})})
    with pytest.raises(ValueError, match="weights"):
        DistributionalPPO.from_sb3(tmp_path / "weights.zip", Copying())


def write_zip(path, parts):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def saved_by_torch(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_what_cannot_be_taken_over_is_said(tmp_path):
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(ValueError, match=r"text.zip is not a model of Stable-Baselines3"):
        DistributionalPPO.from_sb3(tmp_path / "text.zip", Copying())
    PPO("MlpPolicy", Copying(), n_steps=16, batch_size=16).save(tmp_path / "ppo")
    with pytest.raises(ValueError, match=r"critic.twin is True"):
        DistributionalPPO.from_sb3(tmp_path / "ppo.zip", Copying(), critic={"twin": True})
    with pytest.raises(ValueError, match="do not fit this network"):
        DistributionalPPO.from_sb3(tmp_path / "ppo.zip", "CartPole-v1")
    scalar = DistributionalPPO.from_sb3(
        tmp_path / "ppo", make_vec_env(Copying, 2), critic={"num_quantiles": 1, "twin": False}, learning_rate=1e-4
    )
    assert scalar.learning_rate == 1e-4
    assert scalar.policy.critics[0][-1].out_features == 1


def test_an_imported_model_learns_on(tmp_path):
    PPO("MlpPolicy", "CartPole-v1", n_steps=64, seed=0).learn(64).save(tmp_path / "ppo")
    model = DistributionalPPO.from_sb3(
        tmp_path / "ppo.zip", make_vec_env("CartPole-v1", 4, seed=0), n_steps=128, learning_rate=1e-3
    )
    model.learn(20_000)
    assert np.mean([episode["r"] for episode in model.ep_info_buffer]) > 100.0
