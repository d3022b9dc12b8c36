"""Every logged key is explained in docs/metrics.md."""

import re
from pathlib import Path

import pytest
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecNormalize

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.market import BettingGame

GLOSSARY = Path(__file__).parents[2] / "docs" / "metrics.md"


class Recorder(Logger):
    """SB3's logger, which also remembers the names of everything it was given."""

    def __init__(self):
        super().__init__(None, [])
        self.keys = set()

    def record(self, key, value, exclude=None):
        self.keys.add(key)
        super().record(key, value, exclude)


def logged_by(model, steps):
    """The names of everything that a short training logs."""
    recorder = Recorder()
    model.set_logger(recorder)
    model.learn(steps)
    return recorder.keys


def explained(key, patterns):
    return any(re.fullmatch(pattern, key) for pattern in patterns)


VGS = {"vgs": {"warmup_steps": 2}, "optimizer": {"name": "adaptive_upgd"}, "microbatch_size": 16}
SETTINGS = {
    "plain": {},
    "vgs": VGS,
    "alpha_conditioned": {"risk": {"objective": "cvar", "alpha": (0.1, 0.9)}, "critic": {"ev_reserve": True}},
    "adversary": {"adversary": {"epsilon": 0.1, "warmup_updates": 1, "rollouts": 0.5}},
    "constrained": {"risk": {"objective": "constrained", "alpha": 0.2, "limit": 1e6, "multiplier_rate": 1e3}, "gamma": 1.0},
}


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_logged_key_is_explained(policy, settings):
    names = re.findall(r"`([a-z_]+/[^`]+)`", GLOSSARY.read_text(encoding="utf-8"))
    patterns = [re.sub(r"\\\{[a-z]+\\\}", r"[\\w.]+", re.escape(name)) for name in names]
    model = DistributionalPPO(policy, BettingGame(8), n_steps=16, normalize_obs=True, seed=0, **settings)
    keys = logged_by(model, 8 * 16 * 6)
    assert len(keys) > 20
    assert [key for key in sorted(keys) if not explained(key, patterns)] == []


def test_drift_of_a_users_normaliser_is_logged():
    env = VecNormalize(GymVectorAdapter(BettingGame(8), 0), norm_reward=False)
    keys = logged_by(DistributionalPPO("MlpPolicy", env, n_steps=16, seed=0), 8 * 16)
    assert {"debug/vecnormalize_mean_drift", "debug/vecnormalize_std_drift"} <= keys
