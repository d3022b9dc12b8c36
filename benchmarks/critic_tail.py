"""A Markov chain whose returns have a known distribution, and the error of a critic's tail there: a part of risk.py."""

import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from scipy.stats import gamma as gamma_distribution
from scipy.stats import norm

from tailguard import DistributionalPPO
from tailguard.envs.batched import BatchedEnv
from tailguard.ppo.critic import quantile_levels
from tailguard.ppo.quantiles import cvar
from tailguard.ppo.schedules import LinearSchedule

EVEN: dict[str, Any] = {"num_quantiles": 51, "tail_quantiles": 0}
CRITICS: dict[str, dict[str, Any]] = {f"{n} quantiles, 5 in the tail": {"num_quantiles": n} for n in (21, 32, 51, 101)}
CRITICS |= {f"{n} quantiles, even": {**EVEN, "num_quantiles": n} for n in (21, 32, 51, 101)}
CRITICS["51 categorical"] = {"num_quantiles": 51, "law": "categorical"}
CRITICS["51 even, Huber loss with kappa 1"] = {**EVEN, "huber_kappa": 1.0}
CRITICS["51 even, a lambda-return as target"] = {**EVEN, "target": "lambda_return"}
CRITICS["51 even, both"] = {**EVEN, "huber_kappa": 1.0, "target": "lambda_return"}


class Chain(BatchedEnv):
    """Eight steps that pay random amounts of mean 0, whatever is done: the distribution of the return is known in every state.

    :param num_envs: copies.
    :param skewed: amounts are 1 less an exponential one, with a heavy lower tail, instead of normal.
    """

    LENGTH = 8

    def __init__(self, num_envs: int, skewed: bool) -> None:
        super().__init__(num_envs, Box(0.0, 1.0, (self.LENGTH,)), Discrete(2), None)
        self.skewed, self._at = skewed, np.zeros(num_envs, int)

    def cvar(self, left: int, alpha: float) -> float:
        """Return the CVaR of the sum of `left` amounts; of a gamma distribution by E[G; G > g] = n P(G_{n+1} > g)."""
        if not self.skewed:
            return -math.sqrt(left) * norm.pdf(norm.ppf(alpha)) / alpha
        return left - left * gamma_distribution.sf(gamma_distribution.isf(alpha, left), left + 1) / alpha

    def _begin(self, rows: Any) -> None:
        self._at[rows] = 0

    def _observe(self) -> Any:
        return np.eye(self.LENGTH, dtype=np.float32)[np.minimum(self._at, self.LENGTH - 1)]

    def _advance(self, actions: Any) -> Any:
        draws = self.np_random
        self._at += 1
        rewards = 1.0 - draws.exponential(size=self.num_envs) if self.skewed else draws.standard_normal(self.num_envs)
        return rewards, self._at == self.LENGTH, np.zeros(self.num_envs, bool)


def tail_error(critic: dict[str, Any], skewed: bool, seed: int, steps: int) -> float:
    """Mean over the states of (predicted - true) / |true| CVaR .05."""
    env = Chain(128, skewed)
    settings = {"n_steps": 32, "batch_size": 1024, "n_epochs": 4, "gamma": 1.0, "learning_rate": LinearSchedule(2e-3, 0.0)}
    model = DistributionalPPO("MlpPolicy", env, seed=seed, critic={"twin": False, **critic}, vf_coef=1.0, **settings)
    model.learn(steps)
    with torch.no_grad():
        atoms = model.policy.raw_atoms(model.policy.inputs(torch.eye(Chain.LENGTH)))[0]
        predicted = cvar(atoms, 0.05, quantile_levels(model.critic_config)).tolist()
    true = [env.cvar(Chain.LENGTH - i, 0.05) for i in range(Chain.LENGTH)]
    return float(np.mean([(a - b) / abs(b) for a, b in zip(predicted, true, strict=True)]))
