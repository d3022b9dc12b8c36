"""A member of a population that trades a signal whose meaning reverses now and then: for `population.py`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.experiments.population_member import TunableHyperparameters
from tailguard.io.state import IsolatedRandomState
from tailguard.market import SignalMarket
from tailguard.population import HyperparamConfig
from tailguard.population.exploit import LEARNING_RATE, CopySettings, exploit, load_member_state, member_state

N_ENVS, N_STEPS = 16, 64
DEFAULTS = {"learning_rate": 3e-4, "entropy_coef": 1e-3, "gae_lambda": 0.95}
SEARCH = (
    HyperparamConfig(name="learning_rate", min_value=3e-5, max_value=1e-2, is_log_scale=True, perturbation_factor=1.5),
    HyperparamConfig(name="entropy_coef", min_value=1e-5, max_value=1e-2, is_log_scale=True, perturbation_factor=1.5),
    HyperparamConfig(name="gae_lambda", min_value=0.6, max_value=0.99),
)


@dataclass(frozen=True)
class SignalFactory:
    """Makes them.

    :param horizon: updates of the whole training; it is cut into `regimes`, and beta changes its sign from each to the next.
    :param score_steps: steps of an evaluation, on each of 256 copies of the market.
    """

    horizon: int
    regimes: int = 3
    score_steps: int = 150
    optimizer: str = "reset"

    def __call__(self, member_id: int, hyperparams: Mapping, seed: int) -> "SignalLearner":
        return SignalLearner(self, member_id, hyperparams, seed)

    def sign(self, update: int) -> float:
        """Return the sign of beta during this update."""
        return 1.0 if (update * self.regimes // self.horizon) % 2 == 0 else -1.0


class SignalLearner:
    """Trains on the market as it is at its age; is scored by what it would earn in it, as a share of the optimum."""

    def __init__(self, factory: SignalFactory, member_id: int, hyperparams: Mapping, seed: int) -> None:
        torch.set_num_threads(1)
        self.factory, self.member_id, self.hyperparams, self.age = factory, member_id, dict(hyperparams), 0
        self.market = SignalMarket(N_ENVS, episode_length=256)
        self.optimum = self.market.solve().average_reward
        self._randomness = IsolatedRandomState()
        with self._randomness.active():
            self.model = DistributionalPPO(
                "MlpPolicy",
                GymVectorAdapter(self.market, seed),
                n_steps=N_STEPS,
                gamma=0.95,
                seed=seed,
                critic={"num_quantiles": 11},
            )
        self.tunables = TunableHyperparameters(self.model, [name for name in hyperparams if name != LEARNING_RATE])
        self._apply()

    def _apply(self) -> None:
        self.tunables.apply({name: value for name, value in self.hyperparams.items() if name != LEARNING_RATE})
        self.model.lr.set(self.hyperparams[LEARNING_RATE])

    def train(self, steps: int) -> None:
        model = self.model
        with self._randomness.active():
            for _ in range(steps):
                self.market.beta = self.factory.sign(self.age) * abs(self.market.beta)
                _, callback = model._setup_learn(N_ENVS * N_STEPS, None, reset_num_timesteps=False)
                model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
                model.train()
                self.age += 1

    def score(self, seed: int = 12345) -> list[float]:
        """The expected reward per step of the most likely actions, by groups of copies of the market."""
        market = SignalMarket(256, episode_length=100_000)
        market.beta *= self.factory.sign(self.age - 1)
        env = GymVectorAdapter(market, seed)
        obs, position, earned = env.reset(), np.zeros(256), np.zeros(256)
        for _ in range(self.factory.score_steps):
            signal = market.signal
            actions, _ = self.model.predict(obs, deterministic=True)
            target = np.clip(actions[:, 0], -1.0, 1.0)
            earned += target * market.beta * signal - market.cost * np.abs(target - position)
            obs, _, _, _ = env.step(actions)
            position = target
        return (earned.reshape(16, 16).mean(1) / self.factory.score_steps / self.optimum).tolist()

    def save(self) -> dict:
        with self._randomness.active():
            return {"member": member_state(self.model), "hyperparams": dict(self.hyperparams), "age": self.age}

    def load(self, state: Mapping) -> None:
        with self._randomness.active():
            self.hyperparams, self.age = dict(state["hyperparams"]), state["age"]
            self._apply()
            load_member_state(self.model, state["member"])

    def copy_from(self, state: Mapping, hyperparams: Mapping, seed: int) -> None:
        with self._randomness.active():
            settings = CopySettings(self.member_id, hyperparams, seed, self.factory.optimizer)
            exploit(self.model, state["member"], settings, self.tunables)
        self.hyperparams, self.age = dict(hyperparams), state["age"]
