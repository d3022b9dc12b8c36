"""Everything a model is survives a file, and training continues from it as if nothing had happened."""

import io
import json
import random
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from torch import nn

from tailguard import DistributionalPPO, TradingVecEnv
from tailguard.envs.crash_market import CrashMarket
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.io import checkpoint
from tailguard.io.checkpoint import CheckpointError
from tailguard.io.state import load_normalization, random_state, save_normalization
from tailguard.market import BettingGame, GuardedMaze, SignalMarket
from tailguard.market.synthetic import random_walk

T, B = 16, 4
EVERYTHING = {
    "optimizer": {"name": "adaptive_upgd", "sigma": 0.01},
    "vgs": {"warmup_steps": 2},
    "entropy": {"initial": 0.01, "final": 0.001, "decay_steps": 5, "plateau_window": 2, "plateau_tolerance": 100.0},
    "kl": {"mode": "penalty"},
    "normalize_obs": True,
}


def trading(seed=3):
    bars = random_walk(600, seed=1)
    return TradingVecEnv(bars, n_envs=B, seed=seed, episode_length=30, fee=0.001)


MARKETS = {
    "trading": trading,
    "signal": lambda: SignalMarket(B, episode_length=10, seed=1),
    "betting": lambda: BettingGame(B, seed=1),
    "maze": lambda: GuardedMaze(B, seed=1),
    "crash": lambda: CrashMarket(B, seed=1),
    "normalised": lambda: VecNormalize(trading(), norm_reward=False),
    "monitored": lambda: VecMonitor(GymVectorAdapter(SignalMarket(B, episode_length=10), 1)),
}


def make(env, policy="MlpLstmPolicy", **settings):
    network = {"net_arch": [8]} | ({"lstm_hidden_size": 8} if policy == "MlpLstmPolicy" else {})
    return DistributionalPPO(policy, env, n_steps=T, n_epochs=2, seed=0, policy_kwargs=network, **settings)


class Saver(BaseCallback):
    """Saves before a given rollout, as the command line does."""

    def __init__(self, path, rollout):
        super().__init__()
        self.path, self.rollout, self.begun = path, rollout, 0

    def _on_rollout_start(self):
        if self.begun == self.rollout:
            self.model.save(self.path)
        self.begun += 1

    def _on_step(self):
        return True


class Journal(BaseCallback):
    """Everything that was logged by an update and does not measure time."""

    def __init__(self):
        super().__init__()
        self.rows = {}

    def _on_rollout_start(self):
        values = self.model.logger.name_to_value
        self.rows[self.num_timesteps] = {k: v for k, v in values.items() if not k.startswith(("time/", "profile/"))}

    def _on_step(self):
        return True


def differences(a, b, name=""):
    """Where two trees of values are not equal bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{name}.{key}" for key in set(a) ^ set(b)]
        return missing + [found for key in set(a) & set(b) for found in differences(a[key], b[key], f"{name}.{key}")]
    equal = checkpoint.to_bytes({"x": a}, kind="test") == checkpoint.to_bytes({"x": b}, kind="test")
    return [] if equal else [name]


def interrupted(tmp_path, env, policy="MlpLstmPolicy", **settings):
    """A training of 5 updates, and one that continues from the file that the first wrote after 2."""
    whole, rows = make(env(), policy, **settings), Journal()
    whole.learn(5 * T * B, callback=[Saver(tmp_path / "model", 2), rows])
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    torch.manual_seed(99)
    resumed, rows_after = DistributionalPPO.load(tmp_path / "model", env=env(), force_reset=False), Journal()
    assert resumed.num_timesteps == 2 * T * B
    resumed.learn(3 * T * B, callback=rows_after, reset_num_timesteps=False)
    return whole, resumed, rows.rows, rows_after.rows


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
@pytest.mark.parametrize("market", MARKETS)
def test_resumed_equals_uninterrupted(tmp_path, market, policy):
    whole, resumed, rows, rows_after = interrupted(tmp_path, MARKETS[market], policy)
    assert not differences(whole.state_tree(), resumed.state_tree())
    for step, row in rows_after.items():
        if step > 2 * T * B:
            assert rows[step] == pytest.approx(row, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize(
    "risk",
    [
        {},
        {"objective": "cvar", "alpha": 0.2},
        {"objective": "cvar", "alpha": (0.1, 1.0)},
        {"objective": "constrained", "alpha": 0.1, "limit": -0.1},
    ],
)
def test_resumed_equals_uninterrupted_with_everything_on(tmp_path, risk):
    whole, resumed, *_ = interrupted(tmp_path, trading, risk=risk, **EVERYTHING)
    assert not differences(whole.state_tree(), resumed.state_tree())


FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6])
def test_a_model_of_an_older_version_acts_as_it_did_and_trains_on(version):
    """R125: no change of the format costs anybody a training. The files were written by the versions that they name."""
    facts = json.loads((FIXTURES / f"model-v{version}.json").read_text())
    path = FIXTURES / f"model-v{version}.safetensors"
    model, state = DistributionalPPO.load(path), None
    observation = np.array(facts["observation"], np.float32)
    for expected in facts["actions"]:
        actions, state = model.predict(observation, state, None, True)
        np.testing.assert_allclose(actions, expected, atol=1e-6)
    trained = DistributionalPPO.load(path, env=SignalMarket(4, episode_length=10, seed=1), force_reset=False)
    assert trained.num_timesteps == facts["num_timesteps"]
    trained.learn(64, reset_num_timesteps=False)


def poles():
    return VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2), norm_reward=False)


def test_statistics_of_a_users_wrapper_come_back_with_the_model_and_alone(tmp_path):
    env = poles()
    model = make(env).learn(256)
    model.save(tmp_path / "model")
    fresh = poles()
    DistributionalPPO.load(tmp_path / "model", env=fresh)
    assert np.array_equal(fresh.obs_rms.mean, env.obs_rms.mean)
    assert fresh.obs_rms.count == env.obs_rms.count
    save_normalization(env, tmp_path / "statistics")
    other = poles()
    load_normalization(other, tmp_path / "statistics")
    assert np.array_equal(other.obs_rms.var, env.obs_rms.var)
    with pytest.raises(ValueError, match="do not fit"):
        load_normalization(VecNormalize(trading(), norm_reward=False), tmp_path / "statistics")


def test_loading_leaves_the_random_numbers_of_the_process_alone(tmp_path):
    make(trading()).save(tmp_path / "model")
    before = random_state()
    DistributionalPPO.load(tmp_path / "model")
    assert not differences(random_state(), before)


def test_a_loaded_training_that_begins_anew_does_not_repeat_its_first_episodes(tmp_path):
    model = make(trading())
    first = trading().reset()
    model.learn(2 * T * B).save(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model", env=trading())
    loaded.learn(T * B, reset_num_timesteps=False)
    assert loaded.num_timesteps == 3 * T * B
    assert not np.array_equal(loaded.rollout_buffer.obs[0].numpy()[:, : first.shape[1]], first)


class TestErrors:
    def test_a_zip_of_another_algorithm_is_refused_with_advice(self, tmp_path):
        PPO("MlpPolicy", "CartPole-v1").save(tmp_path / "ppo")
        with pytest.raises(CheckpointError, match=r"zip of Stable-Baselines3.*load it with the class that saved it"):
            DistributionalPPO.load(tmp_path / "ppo.zip")

    def test_other_environments_are_refused(self, tmp_path):
        make(trading()).save(tmp_path / "model")
        with pytest.raises(ValueError, match="the observation space of env"):
            DistributionalPPO.load(tmp_path / "model", env=SignalMarket(4))

    def test_an_unknown_setting_is_named(self, tmp_path):
        make(trading()).save(tmp_path / "model")
        with pytest.raises(ValueError, match="n_stepz"):
            DistributionalPPO.load(tmp_path / "model", n_stepz=3)

    def test_weights_of_another_network_are_refused_before_any_is_copied(self):
        small, large = make(trading()), make(trading(), "MlpPolicy")
        before = small.agent_state()
        with pytest.raises(ValueError, match="the weights do not fit this network"):
            small.set_parameters(large.get_parameters())
        assert not differences(small.agent_state(), before)

    def test_parts_cannot_be_left_out_of_a_file(self, tmp_path):
        with pytest.raises(ValueError, match=r"exclude is \['policy'\].*without others it cannot be loaded"):
            make(trading()).save(tmp_path / "model", exclude=["policy"])


def test_a_function_is_not_saved_and_that_is_said(tmp_path):
    model = make(trading(), learning_rate=lambda progress: 1e-3 * progress).learn(2 * T * B)
    model.save(tmp_path / "model")
    with pytest.warns(UserWarning, match="learning_rate was a function"):
        DistributionalPPO.load(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model", env=trading(), learning_rate=lambda progress: 2e-3)
    loaded.learn(T * B)
    assert loaded.policy.optimizer.param_groups[0]["lr"] == 2e-3


class OwnActivation(nn.Tanh):
    """A class that only this file knows."""


def test_classes_of_the_users_own_have_to_be_given_again(tmp_path):
    network = {"net_arch": [8], "activation_fn": OwnActivation}
    model = DistributionalPPO("MlpPolicy", trading(), n_steps=T, seed=0, policy_kwargs=network)
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"OwnActivation, which is not torch's"):
        DistributionalPPO.load(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model", policy_kwargs=network)
    assert isinstance(loaded.policy.actor[1], OwnActivation)
    for known in (nn.ReLU, nn.Tanh, nn.ELU):
        DistributionalPPO("MlpPolicy", trading(), n_steps=T, policy_kwargs={"activation_fn": known}).save(tmp_path / "known")
        assert isinstance(DistributionalPPO.load(tmp_path / "known").policy.actor[1], known)


def test_files_and_streams_hold_the_same(tmp_path):
    model = make(trading()).learn(T * B)
    model.save(tmp_path / "model")
    stream = io.BytesIO()
    model.save(stream)
    assert stream.getvalue() == (tmp_path / "model.safetensors").read_bytes()
    stream.seek(0)
    assert not differences(DistributionalPPO.load(stream).agent_state(), model.agent_state())
