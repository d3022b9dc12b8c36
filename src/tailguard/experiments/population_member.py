"""A member of a population that trades: it learns on the training rows and is scored on rows that come after them.

The rows of the final test play no part in it. The second half of the file is the table of hyperparameters that may change while
a member trains.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from stable_baselines3.common.utils import FloatSchedule

from tailguard.config import Config
from tailguard.evaluate.folds import cut_into_blocks
from tailguard.evaluate.play import play, return_rule_of
from tailguard.evaluate.stats.series import Floats
from tailguard.experiments.callbacks import BetweenUpdates
from tailguard.experiments.prepared_market import Market
from tailguard.experiments.training import build_model, train_model
from tailguard.io.state import IsolatedRandomState
from tailguard.market.bars import periods_per_year
from tailguard.market.env import Rows
from tailguard.parallel.threads import one_thread
from tailguard.population.config import PopulationConfig, Value
from tailguard.population.exploit import LEARNING_RATE, CopySettings, exploit, load_member_state, member_state
from tailguard.population.member import MemberFailed
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.rollout import NotFinite
from tailguard.ppo.schedules import EntropySchedule
from tailguard.validation import require

SMALLEST_EQUITY = 1e-9  # a ruined account counts as having lost this much, not infinitely much


def population_of(config: Config) -> PopulationConfig:
    """Return the section ``population``, which must be there."""
    if config.population is None:
        raise ValueError("the configuration has no section population: it says which hyperparameters are searched, and how")
    return config.population


class MarketLearner:
    """An agent that trains on a market, one update at a time, and is scored on separate blocks of unseen rows.

    :param market: with the training rows of the population.
    :param validation: rows to be scored on.
    :param config: everything else.
    :param member_id: its number, for the log.
    :param hyperparams: ``learning_rate`` and names of :data:`ACCESSORS`.
    :param seed: of everything that is random.
    """

    @one_thread()
    def __init__(
        self, market: Market, validation: Rows, config: Config, member_id: int, hyperparams: Mapping[str, Value], seed: int
    ) -> None:
        self.member_id = member_id
        self.hyperparams = dict(hyperparams)
        self._population = population_of(config)
        self._market = market
        self._blocks = validation_blocks(validation, self._population)
        self._randomness = IsolatedRandomState()
        training = config.training.model_copy(update={"seed": seed, "tensorboard": None})
        with self._randomness.active():
            self.model = build_model(market, training)
        tunables = {name: value for name, value in hyperparams.items() if name != LEARNING_RATE}
        self._tunables = TunableHyperparameters(self.model, tuple(tunables))
        self._tunables.apply(tunables)
        if LEARNING_RATE in hyperparams:
            self.model.lr.set(float(hyperparams[LEARNING_RATE]))

    @one_thread()
    def train(self, steps: int) -> None:
        """Train for some updates; schedules see the whole training of the population.

        :param steps: updates.
        :raises MemberFailed: when the weights, or something that the environments return, are not finite.
        """
        samples = int(self.model.n_steps * self.model.n_envs)  # environment steps per update
        horizon = self._population.intervals * self._population.perturbation_interval * samples
        with self._randomness.active():
            try:
                train_model(self.model, self.model.num_timesteps + steps * samples, [RequireFiniteWeights()], horizon=horizon)
            except NotFinite as error:
                raise MemberFailed(str(error)) from error

    @one_thread()
    def score(self) -> list[float]:
        """Return one number per block of the validation rows, the same rows for all members."""
        paths = equity_paths(self.model, self._market, self._blocks)
        if self._population.score == "growth":
            return [log_growth(path) for path in paths]
        per_year = periods_per_year(cast(pd.DatetimeIndex, self._market.bars.index))
        return [log_sharpe(path) * math.sqrt(per_year) for path in paths]

    def save(self) -> dict[str, Any]:
        """Return model, random numbers and hyperparameters."""
        with self._randomness.active():
            return {"member": member_state(self.model), "hyperparams": dict(self.hyperparams)}

    def model_tree(self) -> dict[str, Any]:
        """Return the model as a run saves it, with the random numbers of this member and not those of the process."""
        with self._randomness.active():
            return self.model.state_tree()

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`save` returned."""
        with self._randomness.active():
            self.hyperparams = dict(state["hyperparams"])
            self._tunables.apply({name: value for name, value in self.hyperparams.items() if name != LEARNING_RATE})
            load_member_state(self.model, state["member"])

    def copy_from(self, state: Mapping[str, Any], hyperparams: Mapping[str, Value], seed: int) -> None:
        """Become a copy of another member, or stay as before; see :func:`tailguard.population.exploit.exploit`."""
        settings = CopySettings(self.member_id, hyperparams, seed, self._population.optimizer_exploit_strategy)
        with self._randomness.active():
            try:
                exploit(self.model, state["member"], settings, self._tunables)
            except ValueError as error:
                raise MemberFailed(str(error)) from error
        self.hyperparams = dict(hyperparams)


class RequireFiniteWeights(BetweenUpdates):
    """Stop the training of a member that has diverged."""

    def between_updates(self) -> None:
        """Raise :class:`MemberFailed` when a weight is not finite."""
        if not cast(DistributionalPPO, self.model).flat.tensor.isfinite().all():
            raise MemberFailed(f"the weights are not finite after {self.num_timesteps} steps")


@dataclass(frozen=True)
class MarketFactory:
    """A factory of the learners of a population, for any process.

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
        """Return the learner of a member."""
        return MarketLearner(self.market, self.validation, self.config, member_id, hyperparams, seed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for another process, without the features if they are in a file."""
        if self.features is None:
            return MarketFactory, (self.market, self.validation, self.config)
        bare = replace(self.market.features, values=np.empty((0, 0), np.float32))
        return _mapped, (replace(self.market, features=bare), self.validation, self.config, self.features)


def _mapped(market: Market, validation: Rows, config: Config, path: Path) -> MarketFactory:
    features = replace(market.features, values=np.load(path, mmap_mode="r"))
    return MarketFactory(replace(market, features=features), validation, config, path)


def validation_blocks(rows: Rows, config: PopulationConfig) -> list[Rows]:
    """Return the blocks of rows that members are scored on."""
    return cut_into_blocks(rows, config.validation_blocks, "population.validation_blocks")


def equity_paths(model: DistributionalPPO, market: Market, spans: Sequence[Rows]) -> list[Floats]:
    """Return the equity of the agent bar by bar, when it starts in cash at each span."""
    trajectories = play(model, market.bars, market.features, market.trading, spans, returns=return_rule_of(model))
    return [account.equity for account in trajectories]


def log_growth(equity: Floats) -> float:
    """Return the logarithm of the final over the first equity."""
    return math.log(max(equity[-1], SMALLEST_EQUITY) / equity[0])


def log_sharpe(equity: Floats) -> float:
    """Return mean over standard deviation of the log returns per bar; 0 where nothing was risked."""
    returns = np.diff(np.log(np.maximum(equity, SMALLEST_EQUITY)))
    spread = float(returns.std(ddof=1))
    return float(returns.mean()) / spread if spread > 0.0 else 0.0


# Hyperparameters that may change while a model trains, by the names under which a population knows them.

Getter = Callable[[DistributionalPPO], Value]
Setter = Callable[[DistributionalPPO, Any], None]


def _attribute(name: str) -> tuple[Getter, Setter]:
    return lambda model: getattr(model, name), lambda model, value: setattr(model, name, value)


def _set_gamma(model: DistributionalPPO, value: float) -> None:
    model.gamma = value
    model.episode_returns.gamma = model.return_gamma


def _set_entropy(model: DistributionalPPO, value: float) -> None:
    schedule = EntropySchedule(model.entropy.config.model_copy(update={"initial": value}))
    schedule.load_state_dict(model.entropy.state_dict())
    model.entropy = schedule


def _set_kl_target(model: DistributionalPPO, value: float) -> None:
    model.kl.config = model.kl.config.model_copy(update={"target": value})


def _of_adversary(field: str) -> tuple[Getter, Setter]:
    """Return getter and setter of a setting of the adversary, which its search reads, too."""

    def read(model: DistributionalPPO) -> Value:
        return cast(Value, getattr(_adversary(model).config, field))

    def write(model: DistributionalPPO, value: float) -> None:
        adversary = _adversary(model)
        adversary.config = adversary.perturbation.config = adversary.config.model_copy(update={field: value})

    return read, write


def _adversary(model: DistributionalPPO) -> Adversary:
    if model.adversary is None:
        raise ValueError("a hyperparameter of the adversary is searched, but the model has none: set training.adversary")
    return model.adversary


ACCESSORS: dict[str, tuple[Getter, Setter]] = {
    **{name: _attribute(name) for name in ("gae_lambda", "max_grad_norm", "n_epochs", "vf_coef")},
    "clip_range": (lambda model: FloatSchedule(model.clip_range)(1.0), _attribute("clip_range")[1]),
    "gamma": (lambda model: model.gamma, _set_gamma),
    "entropy_coef": (lambda model: model.entropy.config.initial, _set_entropy),
    "kl_target": (lambda model: model.kl.config.target, _set_kl_target),
    "adversarial_epsilon": _of_adversary("epsilon"),
    "adversarial_ratio": _of_adversary("adversarial_ratio"),
    "robust_kl_coef": _of_adversary("coefficient"),
}


class TunableHyperparameters:
    """Some hyperparameters of a model, to read and to set. The learning rate is not among them: ``model.lr`` sets it.

    :param model: the model.
    :param names: keys of :data:`ACCESSORS`.
    """

    def __init__(self, model: DistributionalPPO, names: Sequence[str]) -> None:
        for name in names:
            require(name in ACCESSORS, "hyperparameter", name, f"{LEARNING_RATE} or one of {sorted(ACCESSORS)}")
        moved = "gamma" in names and model.risk_config.return_augmented
        require(not moved, "hyperparameter", "gamma", "left alone where the objective looks at the return of an episode")
        self._model = model
        self._names = tuple(names)
        self.read()  # refuses what this model does not have

    def read(self) -> dict[str, Value]:
        """Return the active values."""
        return {name: ACCESSORS[name][0](self._model) for name in self._names}

    def apply(self, values: Mapping[str, Value]) -> None:
        """Set values; those that are not named stay."""
        unknown = set(values) - set(self._names)
        require(not unknown, "hyperparameters", sorted(unknown), f"among {sorted(self._names)}")
        for name, value in values.items():
            ACCESSORS[name][1](self._model, value)
