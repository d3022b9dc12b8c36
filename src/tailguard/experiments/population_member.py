"""A member of a population that trades: it learns on the training rows and is scored on rows that come after them.

The rows of the final test play no part in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from tailguard.config import Config
from tailguard.envs.return_observer import ReturnAugmentedEnv
from tailguard.experiments.training import Market, Rows, Split, build_model
from tailguard.experiments.tunables import ModelDials
from tailguard.io.random_state import OwnRandomness
from tailguard.market.data import periods_per_year
from tailguard.market.env import TradingEnv
from tailguard.population.config import PopulationConfig, Value
from tailguard.population.exploit import LEARNING_RATE, Orders, exploit, load_member_state, member_state
from tailguard.population.learner import MemberFailed
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.rollout import NotFinite, Rollout
from tailguard.validation import require

SMALLEST_EQUITY = 1e-9  # a ruined account counts as having lost this much, not infinitely much


def population_of(config: Config) -> PopulationConfig:
    """The section ``population``, which must be there."""
    if config.population is None:
        raise ValueError("the configuration has no section population: it says what is searched and how")
    return config.population


def with_validation(split: Split, share: float) -> tuple[Split, Rows]:
    """Take the last part of the training rows away, to score members on.

    :param split: training and test.
    :param share: of the training rows.
    :returns: the split with fewer training rows and the same test, and the rows between.
    """
    first, last = split.train
    cut = last - round(share * (last - first))
    require(first < cut < last, "validation_share", share, f"one that leaves rows on both sides: there are {last - first}")
    return Split((first, cut), split.test), (cut, last)


def blocks(rows: Rows, number: int) -> list[Rows]:
    """Rows in so many parts of (nearly) the same length."""
    edges = np.linspace(rows[0], rows[1], number + 1).round().astype(int).tolist()
    require(min(np.diff(edges)) >= 3, "validation_blocks", number, f"at most {(rows[1] - rows[0]) // 3}: three bars each")
    return list(pairwise(edges))


class MarketLearner:
    """Trains on a market, one update at a time; its scores are those of separate blocks of unseen rows.

    :param market: with the training rows of the population.
    :param validation: rows to be scored on.
    :param config: everything else.
    :param member_id: who it is, for the log.
    :param hyperparams: ``learning_rate`` and the names of :data:`tailguard.experiments.tunables.DIALS`.
    :param seed: of everything that is random.
    """

    def __init__(
        self, market: Market, validation: Rows, config: Config, member_id: int, hyperparams: Mapping[str, Value], seed: int
    ) -> None:
        torch.set_num_threads(1)  # members share the machine; and one process must compute what another does
        self.member_id = member_id
        self.hyperparams = dict(hyperparams)
        self._population = population_of(config)
        self._market = market
        self._blocks = blocks(validation, self._population.validation_blocks)
        self._randomness = OwnRandomness()
        training = config.training.model_copy(update={"seed": seed, "tensorboard": None})
        with self._randomness.in_force():
            self.model = build_model(market, training)
        others = {name: value for name, value in hyperparams.items() if name != LEARNING_RATE}
        self._dials = ModelDials(self.model, tuple(others))
        self._dials.turn(others)
        if LEARNING_RATE in hyperparams:
            self.model.lr.set(float(hyperparams[LEARNING_RATE]))
        self._horizon = self._population.intervals * self._population.perturbation_interval * self._samples

    @property
    def _samples(self) -> int:
        """Steps of the environments per update."""
        return int(self.model.n_steps * self.model.n_envs)

    def train(self, steps: int) -> None:
        """As ``learn()`` does, but only a part of the way: schedules see the whole of it.

        :param steps: updates.
        :raises MemberFailed: when the weights are no numbers any more, or something that the environments say is none.
        """
        model = self.model
        with self._randomness.in_force():
            to_go = max(self._horizon - model.num_timesteps, steps * self._samples)
            total, callback = model._setup_learn(to_go, None, reset_num_timesteps=False)
            for _ in range(steps):
                env, rollout = cast(VecEnv, model.env), cast(Rollout, model.rollout_buffer)
                try:
                    model.collect_rollouts(env, callback, rollout, model.n_steps)
                except NotFinite as error:
                    raise MemberFailed(str(error)) from error
                model._update_current_progress_remaining(model.num_timesteps, total)
                model.train()
                if not model.flat.tensor.isfinite().all():
                    raise MemberFailed(f"the weights are not finite after {model.num_timesteps} steps")

    def score(self) -> list[float]:
        """One number per block of the validation rows, the same rows for all members."""
        paths = equity_paths(self.model, self._market, self._blocks)
        return [growth(path) for path in paths] if self._population.score == "growth" else self._sharpes(paths)

    def save(self) -> dict[str, Any]:
        """Model, random numbers and hyperparameters."""
        with self._randomness.in_force():
            return {"member": member_state(self.model), "hyperparams": dict(self.hyperparams)}

    def model_tree(self) -> dict[str, Any]:
        """The model as a run saves it, with the random numbers of this member and not those of the process."""
        with self._randomness.in_force():
            return self.model.state_tree()

    def load(self, state: Mapping[str, Any]) -> None:
        """Be what was saved."""
        with self._randomness.in_force():
            self.hyperparams = dict(state["hyperparams"])
            self._dials.turn({name: value for name, value in self.hyperparams.items() if name != LEARNING_RATE})
            load_member_state(self.model, state["member"])

    def adopt(self, state: Mapping[str, Any], hyperparams: Mapping[str, Value], seed: int) -> None:
        """Become a copy, or stay as before; see :func:`tailguard.population.exploit.exploit`."""
        orders = Orders(self.member_id, hyperparams, seed, self._population.optimizer_exploit_strategy)
        with self._randomness.in_force():
            try:
                exploit(self.model, state["member"], orders, self._dials)
            except ValueError as error:
                raise MemberFailed(str(error)) from error
        self.hyperparams = dict(hyperparams)

    def _sharpes(self, paths: list[NDArray[np.float64]]) -> list[float]:
        per_year = periods_per_year(cast(pd.DatetimeIndex, self._market.bars.index))
        return [sharpe(path) * math.sqrt(per_year) for path in paths]


@dataclass(frozen=True)
class MarketFactory:
    """Makes the learners of a population, in any process.

    :param market: with the training rows of the population.
    :param validation: rows to be scored on.
    :param config: everything else.
    :param features: a file with the features, which other processes on this machine map into their memory instead of getting a
        copy each; None sends them a copy.
    """

    market: Market
    validation: Rows
    config: Config
    features: Path | None = None

    def __call__(self, member_id: int, hyperparams: Mapping[str, Value], seed: int) -> MarketLearner:
        """The learner of a member."""
        return MarketLearner(self.market, self.validation, self.config, member_id, hyperparams, seed)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process."""
        if self.features is None:
            return MarketFactory, (self.market, self.validation, self.config)
        bare = replace(self.market.features, values=np.empty((0, 0), np.float32))
        return _mapped, (replace(self.market, features=bare), self.validation, self.config, self.features)


def equity_paths(model: DistributionalPPO, market: Market, spans: list[Rows]) -> list[NDArray[np.float64]]:
    """What the agent's account is worth bar by bar, when it trades each span anew with its most likely actions."""
    rules = market.trading.model_dump() | {"episode_length": None, "random_start": False}
    envs: list[Any] = [TradingEnv(market.bars, features=market.features, span=span, **rules) for span in spans]
    if model.risk.return_augmented:
        envs = [ReturnAugmentedEnv(env, model.gamma) for env in envs]
    first = [env.reset(seed=0) for env in envs]
    obs, paths = np.stack([o for o, _ in first]), [[info["equity"]] for _, info in first]
    live, state, start = set(range(len(envs))), None, np.ones(len(envs), np.bool_)
    while live:
        actions, state = model.predict(obs, state, start, deterministic=True)
        start = np.zeros(len(envs), np.bool_)
        for i in sorted(live):
            obs[i], _, ruined, truncated, info = envs[i].step(actions[i])
            paths[i].append(info["equity"])
            if ruined or truncated:
                live.discard(i)
    return [np.array(path) for path in paths]


def growth(equity: NDArray[np.float64]) -> float:
    """Logarithm of the final over the first equity."""
    return math.log(max(equity[-1], SMALLEST_EQUITY) / equity[0])


def sharpe(equity: NDArray[np.float64]) -> float:
    """Mean over standard deviation of the log returns per bar; 0 where nothing was risked."""
    returns = np.diff(np.log(np.maximum(equity, SMALLEST_EQUITY)))
    spread = float(returns.std(ddof=1))
    return float(returns.mean()) / spread if spread > 0.0 else 0.0


def _mapped(market: Market, validation: Rows, config: Config, path: Path) -> MarketFactory:
    features = replace(market.features, values=np.load(path, mmap_mode="r"))
    return MarketFactory(replace(market, features=features), validation, config, path)
