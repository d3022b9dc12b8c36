"""Calibration: right predictions look right, wrong ones wrong, and every episode is compared with its own prediction."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from scipy import stats

from tailguard import DistributionalPPO
from tailguard.coverage import kupiec_p_value
from tailguard.ppo.diagnostics import Calibration, EpisodeEnd, pinball_score

M = 200
LEVELS = (np.arange(M) + 0.5) / M


def played(predicted, n=4000, seed=0):
    """Episodes of one step whose return is normal, each predicted to have the quantiles of `predicted`."""
    returns = np.random.default_rng(seed).standard_normal(n)
    calibration = Calibration(1, n, 0.05)
    atoms = torch.tensor(predicted.ppf(LEVELS), dtype=torch.float32).expand(n, M)
    ends = [EpisodeEnd(step, 0, float(value)) for step, value in enumerate(returns)]
    calibration.update(torch.ones(n, 1, dtype=torch.bool), ends, atoms, torch.full((M,), 1.0 / M))
    return calibration


def test_the_true_distribution_is_uniform_and_not_rejected():
    calibration = played(stats.norm())
    assert stats.kstest(list(calibration.transforms), "uniform").pvalue > 0.01
    metrics = calibration.metrics()
    assert metrics["calibration/pit_mean"] == pytest.approx(0.5, abs=0.02)
    assert metrics["calibration/breaches"] == pytest.approx(0.05, abs=0.01)
    assert metrics["calibration/kupiec_p"] > 0.01
    assert metrics["calibration/pinball"] == pytest.approx(1.0 / np.sqrt(np.pi), rel=0.03)  # the score of N(0, 1) for itself


@pytest.mark.parametrize("predicted", [stats.norm(scale=0.415), stats.norm(loc=1.0), stats.norm(scale=2.0)])
def test_wrong_predictions_are_found_out_and_score_worse(predicted):
    wrong, right = played(predicted).metrics(), played(stats.norm()).metrics()
    assert wrong["calibration/kupiec_p"] < 1e-6
    assert wrong["calibration/pinball"] > 1.02 * right["calibration/pinball"]


def test_every_episode_is_compared_with_what_was_predicted_at_its_own_start():
    calibration, mass = Calibration(2, 10, 0.05), torch.ones(1)
    # Env 0 ends at steps 1 and 3; env 1 runs through. The first rollout begins an episode in both.
    starts = torch.zeros(4, 2, dtype=torch.bool)
    starts[0] = starts[2, 0] = True
    ends = [EpisodeEnd(1, 0, 5.0), EpisodeEnd(3, 0, None)]
    calibration.update(starts, ends, torch.tensor([[4.0], [9.0], [7.0]]), mass)
    assert list(calibration.transforms) == [1.0]  # 4 was predicted, 5 came
    # In the next rollout env 0 begins anew and env 1 ends what it began in the first, where 9 was predicted.
    starts = torch.tensor([[True, False], [False, False]])
    calibration.update(starts, [EpisodeEnd(1, 0, 2.0), EpisodeEnd(1, 1, 9.0)], torch.tensor([[3.0]]), mass)
    assert list(calibration.transforms) == [1.0, 0.0, 0.5]


def test_state_survives_and_forgotten_episodes_are_not_compared():
    calibration, mass = Calibration(2, 10, 0.05), torch.ones(1)
    calibration.update(torch.ones(1, 2, dtype=torch.bool), [], torch.tensor([[1.0], [2.0]]), mass)
    copy = Calibration(2, 10, 0.05)
    copy.load_state_dict(calibration.state_dict())
    copy.forget(np.array([True, False]))
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    copy.update(nothing, [EpisodeEnd(0, 0, 0.0), EpisodeEnd(0, 1, 0.0)], torch.empty(0, 1), mass)
    assert list(copy.transforms) == [0.0]


@pytest.mark.parametrize("seed", range(3))
def test_the_score_is_its_definition(seed):
    generator = np.random.default_rng(seed)
    atoms, masses = np.sort(generator.standard_normal(7)), generator.dirichlet(np.ones(7))
    for y in (-0.3, 2.0):
        expected = masses @ np.abs(atoms - y) - 0.5 * masses @ np.abs(atoms[:, None] - atoms) @ masses
        assert pinball_score(atoms, masses, y) == pytest.approx(expected, rel=1e-9)


def test_kupiec_by_hand_and_its_size():
    n, x, p = 250, 20, 0.05
    ratio = 2 * (x * np.log(x / n) + (n - x) * np.log(1 - x / n) - x * np.log(p) - (n - x) * np.log(1 - p))
    assert kupiec_p_value(x, n, p) == pytest.approx(stats.chi2.sf(ratio, 1))
    assert kupiec_p_value(0, 100, 0.05) < 0.01
    draws = np.random.default_rng(0).binomial(1000, p, 2000)
    assert np.mean([kupiec_p_value(int(k), 1000, p) < 0.05 for k in draws]) == pytest.approx(0.05, abs=0.02)


class NormalReward(gym.vector.VectorEnv):
    """Two steps, a standard normal reward each: the return from the start is N(0, 2) for gamma = 1."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, n):
        self.num_envs = n
        self.single_observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, n)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, n)

    def reset(self, *, seed=None, options=None):
        self.generator, self.age = np.random.default_rng(seed), 0
        return self._obs(), {}

    def _obs(self):
        return np.full((self.num_envs, 1), float(self.age), np.float32)

    def step(self, actions):
        self.age += 1
        done = np.full(self.num_envs, self.age == 2)
        info = {"final_obs": self._obs()} if done[0] else {}
        self.age %= 2
        rewards = self.generator.standard_normal(self.num_envs)
        return self._obs(), rewards, done, np.zeros(self.num_envs, bool), info


def test_the_critics_learn_a_known_distribution_and_calibration_says_so():
    model = DistributionalPPO("MlpPolicy", NormalReward(64), n_steps=16, n_epochs=6, gamma=1.0, learning_rate=1e-3, seed=0)
    model.learn(64 * 16 * 60)
    start = model.policy.raw_atoms(torch.zeros(1, 1)).mean(0).sort(-1).values.detach().flatten()
    masses = model.policy.return_dist.masses
    variance = (start - start @ masses).square() @ masses
    assert variance.sqrt().item() == pytest.approx(np.sqrt(2.0), rel=0.12)
    metrics = model.calibration.metrics()
    assert metrics["calibration/pit_mean"] == pytest.approx(0.5, abs=0.06)
    assert metrics["calibration/breaches"] == pytest.approx(0.05, abs=0.03)
