"""Population-based bandits (Parker-Holder et al. 2020): hyperparameters proposed by a Gaussian process that forgets.

The gain of an interval of training per step is regressed on its time, the score it started from, and the hyperparameters used.
A member that copies another then takes the hyperparameters with the highest upper confidence bound, mean
plus kappa standard deviations. Members that are still running and earlier proposals of the same round count as observed at
their predicted gain: that leaves the mean alone and removes the uncertainty around them, so that no two members try the same.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
from sklearn.gaussian_process import GaussianProcessRegressor  # type: ignore[import-untyped]
from sklearn.gaussian_process.kernels import (  # type: ignore[import-untyped]
    ConstantKernel,
    Hyperparameter,
    Kernel,
    WhiteKernel,
)

from tailguard.population.config import HyperparamConfig, PBTConfig, Value
from tailguard.population.member import PopulationMember

Array = NDArray[np.float64]
MAX_OBSERVATIONS = 200  # the latest; older ones hardly count, and the cost of a fit grows with the third power
LARGEST_GAIN = 2.0  # standard deviations: one lucky interval must not dominate the fit
CANDIDATES = 256  # at random, and as many around the best of them
NEARBY = 0.05  # standard deviation of the latter, as a share of the range


class ForgettingRBF(Kernel):  # type: ignore[misc]
    """The kernel exp(-|x - x'|^2 / (2 length^2)) (1 - forgetting)^(|t - t'| / 2), with t in the first column.

    :param length: distance over which gains change, as a share of the ranges.
    :param forgetting: share of the correlation that is lost over two rounds, in (0, 1).
    """

    def __init__(self, length: float = 0.5, forgetting: float = 0.1) -> None:
        self.length = length
        self.forgetting = forgetting

    @property
    def hyperparameter_forgetting(self) -> Any:
        """The forgetting rate, fitted within these bounds."""
        return Hyperparameter("forgetting", "numeric", (1e-3, 0.5))

    @property
    def hyperparameter_length(self) -> Any:
        """The length scale, fitted within these bounds."""
        return Hyperparameter("length", "numeric", (0.05, 5.0))

    def __call__(self, X: Array, Y: Array | None = None, eval_gradient: bool = False) -> Any:
        """Return the covariances ``[N, M]``, and for ``eval_gradient`` their derivatives in the log parameters."""
        other = X if Y is None else Y
        squared = ((X[:, None, 1:] - other[None, :, 1:]) ** 2).sum(-1)
        rounds = np.abs(X[:, None, 0] - other[None, :, 0])
        K = np.exp(-0.5 * squared / self.length**2) * (1.0 - self.forgetting) ** (0.5 * rounds)
        if not eval_gradient:
            return K
        by_forgetting = -0.5 * rounds * self.forgetting / (1.0 - self.forgetting) * K
        return K, np.stack([by_forgetting, squared / self.length**2 * K], axis=-1)  # sorted by name, as sklearn does

    def diag(self, X: Array) -> Array:
        """Return the variances."""
        return np.ones(len(X))

    def is_stationary(self) -> bool:
        """Return True: only differences of inputs count."""
        return True


class Surrogate:
    """A Gaussian process fitted to the gains so far, which predicts those of other hyperparameters.

    :param inputs: ``[N, 2 + D]``: time in rounds, score at the start, hyperparameters in [0, 1].
    :param gains: ``[N]``, per step.
    """

    def __init__(self, inputs: Array, gains: Array) -> None:
        self._low, span = inputs[:, 1].min(), np.ptp(inputs[:, 1])
        self._span = span if span > 0.0 else 1.0
        spread = gains.std()
        self._gains = np.clip((gains - gains.mean()) / (spread if spread > 0.0 else 1.0), -LARGEST_GAIN, LARGEST_GAIN)
        self._inputs = self._scaled(inputs)
        kernel = ConstantKernel(1.0, (0.1, 10.0)) * ForgettingRBF() + WhiteKernel(0.1, (1e-3, 1.0))
        self._process = GaussianProcessRegressor(kernel)
        with warnings.catch_warnings():  # a parameter at its bound is a legal fit
            warnings.simplefilter("ignore", ConvergenceWarning)
            self._process.fit(self._inputs, self._gains)
        self._with_pending = self._process  # the process with the pending points, for uncertainties
        # beta_t of the paper's authors; the bound uses its root.
        self.kappa = math.sqrt(0.2 + max(0.0, math.log(0.4 * len(gains))))

    def expect(self, pending: Array) -> None:
        """Count points ``[M, 2 + D]`` as observed at their predicted gain."""
        if len(pending) == 0:
            return
        points = self._scaled(pending)
        predicted = self._process.predict(points)
        self._with_pending = GaussianProcessRegressor(self._process.kernel_, optimizer=None)
        self._with_pending.fit(np.vstack([self._inputs, points]), np.concatenate([self._gains, predicted]))

    def upper_bound(self, points: Array) -> Array:
        """Return the mean plus kappa standard deviations of the gain at ``points[M, 2 + D]``, without observation noise."""
        points = self._scaled(points)
        mean: Array = self._process.predict(points)
        std: Array = self._with_pending.predict(points, return_std=True)[1]
        noise: float = self._process.kernel_.k2.noise_level
        bound: Array = mean + self.kappa * np.sqrt(np.maximum(std**2 - noise, 0.0))
        return bound

    def _scaled(self, points: Array) -> Array:
        scaled = points.copy()
        scaled[:, 1] = (points[:, 1] - self._low) / self._span
        return scaled


def propose(
    config: PBTConfig, members: Sequence[PopulationMember], sources: Mapping[int, int], rng: np.random.Generator
) -> dict[int, dict[str, Value]]:
    """Propose new values for the ranges among the hyperparameters of each target. Before the first observation they are
    uniform.

    :param config: the settings; choices are not proposed here.
    :param members: the population before the copies.
    :param sources: target -> source.
    :param rng: the only source of randomness.
    """
    if not sources:
        return {}
    ranges = [hyperparam for hyperparam in config.hyperparams if hyperparam.values is None]
    inputs, gains = observations(config, ranges, members)
    surrogate = Surrogate(inputs, gains) if len(gains) > 0 else None
    running = [member for member in members if member.member_id not in sources and member.performance is not None]
    pending = [_point(config, member.step, member.performance, _units(ranges, member.hyperparams)) for member in running]
    result: dict[int, dict[str, Value]] = {}
    for target, source in sources.items():
        start = _point(config, members[target].step, members[source].performance, np.zeros(0))
        units = rng.random((CANDIDATES, len(ranges)))
        if surrogate is not None:
            surrogate.expect(np.array(pending))
            best = _best(surrogate, start, units)
            around = np.clip(best + NEARBY * rng.standard_normal(units.shape), 0.0, 1.0)
            units = _best(surrogate, start, np.vstack([best, around]))[None]
        pending.append(np.concatenate([start, units[0]]))
        values = zip(ranges, units[0], strict=True)
        result[target] = {hyperparam.name: hyperparam.from_unit(float(unit)) for hyperparam, unit in values}
    return result


def observations(
    config: PBTConfig, ranges: Sequence[HyperparamConfig], members: Sequence[PopulationMember]
) -> tuple[Array, Array]:
    """Return the inputs ``[N, 2 + D]`` and gains ``[N]`` of the latest intervals that started and ended with a finite score."""
    sign = 1.0 if config.metric_mode == "max" else -1.0
    rows: list[tuple[int, Array, float]] = []
    for member in members:
        for entry in member.history:
            if entry["performance"] is None or entry["baseline"] is None or entry["step"] == entry["since"]:
                continue
            gain = sign * (entry["performance"] - entry["baseline"]) / (entry["step"] - entry["since"])
            rows.append(
                (entry["since"], _point(config, entry["since"], entry["baseline"], _units(ranges, entry["hyperparams"])), gain)
            )
    rows = sorted(rows, key=lambda row: row[0])[-MAX_OBSERVATIONS:]
    return np.array([point for _, point, _ in rows]), np.array([gain for _, _, gain in rows])


def _best(surrogate: Surrogate, start: Array, units: Array) -> Array:
    points = np.hstack([np.tile(start, (len(units), 1)), units])
    best: Array = units[int(np.argmax(surrogate.upper_bound(points)))]
    return best


def _units(ranges: Sequence[HyperparamConfig], values: Mapping[str, Value]) -> Array:
    return np.array([hyperparam.to_unit(float(values[hyperparam.name])) for hyperparam in ranges])


def _point(config: PBTConfig, step: int, performance: float | None, units: Array) -> Array:
    if performance is None:
        raise RuntimeError("a point of the process needs a finite performance")
    return np.concatenate([[step / config.perturbation_interval, performance], units])
