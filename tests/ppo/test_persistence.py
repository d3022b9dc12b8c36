"""Everything a model is survives a file, and training goes on from it as if nothing had happened."""

import random

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from tailguard import DistributionalPPO, TradingVecEnv, checkpoint
from tailguard.market import BettingGame, GuardedMaze, SignalMarket
from tailguard.market.crash_market import CrashMarket
from tailguard.market.synthetic import random_walk
from tailguard.vec_env import GymVectorAdapter

T, B = 16, 4
EVERYTHING = {
    "optimizer": {"name": "adaptive_upgd", "sigma": 0.01},
    "vgs": {"warmup_steps": 2},
    "entropy": {"initial": 0.01, "final": 0.001, "decay_steps": 5, "plateau_window": 2, "plateau_tolerance": 100.0},
    "kl": {"mode": "penalty", "penalty_rule": "pid"},
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
        return missing + [one for key in set(a) & set(b) for one in differences(a[key], b[key], f"{name}.{key}")]
    equal = checkpoint.to_bytes({"x": a}, kind="test") == checkpoint.to_bytes({"x": b}, kind="test")
    return [] if equal else [name]


def interrupted(tmp_path, env, policy="MlpLstmPolicy", **settings):
    """A training of 5 updates, and one that goes on from the file that the first wrote after 2."""
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
            assert {k: v for k, v in rows[step].items()} == pytest.approx(row, rel=0, abs=0, nan_ok=True)


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
