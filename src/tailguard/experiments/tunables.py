"""The hyperparameters of a model that may change while it trains, by the names under which a population knows them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tailguard.population.config import Value
from tailguard.population.exploit import LEARNING_RATE
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.schedules import EntropySchedule
from tailguard.validation import require

Read = Callable[[DistributionalPPO], Value]
Turn = Callable[[DistributionalPPO, Any], None]


def _attribute(name: str) -> tuple[Read, Turn]:
    return lambda model: getattr(model, name), lambda model, value: setattr(model, name, value)


def _turn_gamma(model: DistributionalPPO, value: float) -> None:
    model.gamma = model.episode_returns.gamma = value


def _turn_entropy(model: DistributionalPPO, value: float) -> None:
    schedule = EntropySchedule(model.entropy.config.model_copy(update={"initial": value}))
    schedule.load_state_dict(model.entropy.state_dict())
    model.entropy = schedule


def _turn_kl_target(model: DistributionalPPO, value: float) -> None:
    model.kl.config = model.kl.config.model_copy(update={"target": value})


def _threat(field: str) -> tuple[Read, Turn]:
    """A setting of the adversary, which its search reads, too."""

    def read(model: DistributionalPPO) -> Value:
        return cast(Value, getattr(_adversary(model).config, field))

    def turn(model: DistributionalPPO, value: float) -> None:
        adversary = _adversary(model)
        adversary.config = adversary.perturbation.config = adversary.config.model_copy(update={field: value})

    return read, turn


def _adversary(model: DistributionalPPO) -> Adversary:
    if model.adversary is None:
        raise ValueError("a hyperparameter of the adversary is searched, but the model has none: set training.adversary")
    return model.adversary


DIALS: dict[str, tuple[Read, Turn]] = {
    **{name: _attribute(name) for name in ("clip_range", "gae_lambda", "max_grad_norm", "n_epochs", "vf_coef")},
    "gamma": (lambda model: model.gamma, _turn_gamma),
    "entropy_coef": (lambda model: model.entropy.config.initial, _turn_entropy),
    "kl_target": (lambda model: model.kl.config.target, _turn_kl_target),
    "adversarial_epsilon": _threat("epsilon"),
    "adversarial_ratio": _threat("adversarial_ratio"),
    "robust_kl_coef": _threat("coefficient"),
}


class ModelDials:
    """Reads and sets some of them. The learning rate is not among them: it has a writer of its own.

    :param model: whose.
    :param names: which.
    """

    def __init__(self, model: DistributionalPPO, names: Sequence[str]) -> None:
        for name in names:
            require(name in DIALS, "hyperparameter", name, f"{LEARNING_RATE} or one of {sorted(DIALS)}")
        moved = "gamma" in names and model.risk.return_augmented
        require(not moved, "hyperparameter", "gamma", "left alone where the objective looks at the return of an episode")
        self._model = model
        self._names = tuple(names)
        self.read()  # refuses what this model does not have

    def read(self) -> dict[str, Value]:
        """The values in force."""
        return {name: DIALS[name][0](self._model) for name in self._names}

    def turn(self, values: Mapping[str, Value]) -> None:
        """Put values in force; those that are not named stay."""
        unknown = set(values) - set(self._names)
        require(not unknown, "hyperparameters", sorted(unknown), f"among {sorted(self._names)}")
        for name, value in values.items():
            DIALS[name][1](self._model, value)
