"""Two problems with known answers that take milliseconds: for tests and benchmarks, and as examples of a learner."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tailguard.population.config import HyperparamConfig, Value


class PaperToy:
    """The toy of Jaderberg et al. 2017, figure 2: maximise Q = 1.2 - |theta|^2 by gradient steps on 1.2 - sum h theta^2.

    With h = (1, 0) and h = (0, 1) each member sees one coordinate only, so that neither can solve it alone.

    :param member_id: not used.
    :param hyperparams: ``h0`` and ``h1``.
    :param seed: not used: nothing is random.
    """

    start, learning_rate = 0.9, 0.01
    search = tuple(HyperparamConfig(name=name, min_value=0.0, max_value=1.0, perturbation_noise=0.1) for name in ("h0", "h1"))
    initial = ({"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0})

    def __init__(self, member_id: int, hyperparams: Mapping[str, Value], seed: int) -> None:
        self.theta = np.full(2, self.start)
        self.hyperparams = dict(hyperparams)

    def train(self, steps: int) -> None:
        """Gradient ascent on the surrogate."""
        h = np.array([float(self.hyperparams["h0"]), float(self.hyperparams["h1"])])
        for _ in range(steps):
            self.theta -= self.learning_rate * 2.0 * h * self.theta

    def score(self) -> float:
        """Q."""
        return 1.2 - float((self.theta**2).sum())

    def save(self) -> dict[str, Any]:
        """Parameters and hyperparameters."""
        return {"theta": self.theta.tolist(), "hyperparams": dict(self.hyperparams)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Be what was saved."""
        self.copy_from(state, state["hyperparams"], 0)

    def copy_from(self, state: Mapping[str, Any], hyperparams: Mapping[str, Value], seed: int) -> None:
        """Take the parameters of another member."""
        self.theta = np.array(state["theta"])
        self.hyperparams = dict(hyperparams)


class MovingOptimum:
    """Training whose best hyperparameter changes: a step with h gains 1 - ((h - c(t)) / width)^2, at least -1.

    The optimum c(t) goes from 0.1 to 0.9 of the range over ``horizon`` steps, so that the best possible total is ``horizon``.

    :param member_id: not used.
    :param hyperparams: ``h``.
    :param seed: of the noise.
    """

    horizon, width, noise = 120, 0.25, 0.5
    search = (HyperparamConfig(name="h", min_value=0.01, max_value=1.0),)

    def __init__(self, member_id: int, hyperparams: Mapping[str, Value], seed: int) -> None:
        self.total, self.age = 0.0, 0
        self.hyperparams = dict(hyperparams)
        self._rng = np.random.default_rng(seed)

    def train(self, steps: int) -> None:
        """Collect the gains of the present hyperparameter."""
        for _ in range(steps):
            optimum = 0.1 + 0.8 * min(self.age / self.horizon, 1.0)
            gain = 1.0 - ((float(self.hyperparams["h"]) - optimum) / self.width) ** 2
            self.total += max(gain, -1.0)
            self.age += 1

    def score(self) -> float:
        """The total, seen through noise."""
        return self.total + self.noise * float(self._rng.standard_normal())

    def save(self) -> dict[str, Any]:
        """Everything, the noise to come included."""
        return {
            "total": self.total,
            "age": self.age,
            "hyperparams": dict(self.hyperparams),
            "rng": self._rng.bit_generator.state,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Be what was saved."""
        self.total, self.age, self.hyperparams = state["total"], state["age"], dict(state["hyperparams"])
        self._rng.bit_generator.state = state["rng"]

    def copy_from(self, state: Mapping[str, Any], hyperparams: Mapping[str, Value], seed: int) -> None:
        """Take the total of another member, with one's own noise."""
        self.total, self.age, self.hyperparams = state["total"], state["age"], dict(hyperparams)
        self._rng = np.random.default_rng(seed)
