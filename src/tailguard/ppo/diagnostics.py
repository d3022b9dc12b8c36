"""Measurements and warnings of training, and the check of the predicted tail. ``docs/metrics.md`` explains every key.

Predicted and realised returns of episodes are compared by the probability integral transform (PIT): the mass that was predicted
at or below a return is uniform on [0, 1] when the prediction is right. A mean above 1/2 is pessimism; more than a share a below
a is a lower tail that is worse than predicted. Kupiec's test says whether the count of returns below the predicted 5 % quantile
can be chance.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.coverage import kupiec_p_value
from tailguard.envs.vec_env import StepArrays
from tailguard.ppo.config import ENOUGH_EPISODES, CriticConfig
from tailguard.ppo.critic import aggregate_values
from tailguard.ppo.networks import State
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.quantiles import cvar, cvar_categorical
from tailguard.ppo.rollout import Experience

# A critic whose gradient is smaller than this has stopped learning; a ratio beyond the limits means that one of them has.
VANISHED = 1e-8
RATIO_LIMITS = (0.01, 100.0)
# The tail whose predicted and realised mean are logged.
TAIL = 0.05
# Episodes whose predicted and realised returns are compared.
CALIBRATION_WINDOW = 500

Metrics = dict[str, float]
Moments = tuple[NDArray[np.float64], NDArray[np.float64]]


# ---------------------------------------------------------------------------------------------------------------- time


class _Stage:
    """A timer that counts the time inside ``with`` towards its name; made once and entered at every step."""

    def __init__(self, name: str, seconds: dict[str, float], clock: Callable[[], float]) -> None:
        self._name, self._seconds, self._clock, self._start = name, seconds, clock, 0.0

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += self._clock() - self._start


class StageProfile:
    """The time that each stage of an iteration takes; always on, since it costs a few microseconds.

    :param clock: what to measure, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.last: Metrics = {}
        self._stages: dict[str, _Stage] = {}

    def stage(self, name: str) -> _Stage:
        """Count the time inside ``with`` towards `name`."""
        if name not in self._stages:
            self._stages[name] = _Stage(name, self.seconds, self._clock)
        return self._stages[name]

    def take(self) -> Metrics:
        """Return the seconds per stage since the last call."""
        self.last = {f"time/{name}_seconds": seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return self.last


# ------------------------------------------------------------------------------------------- returns of whole episodes


class EpisodeEnd(NamedTuple):
    """An episode that ended in a rollout.

    :param step: step of the rollout.
    :param env: index of the environment.
    :param discounted_return: of the episode; None when it was truncated, since the return is then not known.
    """

    step: int
    env: int
    discounted_return: float | None


class EpisodeReturns:
    """Returns of finished episodes, or whole periods, from their start, which is what the critics predict there.

    :param n_envs: number of environments, B.
    :param gamma: discount.
    :param window: episodes to remember.
    """

    def __init__(self, n_envs: int, gamma: float, window: int) -> None:
        self.gamma = gamma
        self.running, self.discount = np.zeros(n_envs), np.ones(n_envs)
        self.finished: deque[float] = deque(maxlen=window)
        self.ends: list[EpisodeEnd] = []  # of the rollout

    def begin(self, starts: NDArray[np.bool_]) -> None:
        """Begin a rollout; start counting anew where `starts` is true: what was running there is no whole episode."""
        self.running[starts], self.discount[starts] = 0.0, 1.0
        self.ends = []

    def add(self, step: int, outcome: StepArrays) -> None:
        """Count one step of the rollout."""
        self.running += self.discount * outcome.rewards
        self.discount *= self.gamma
        ended, over = outcome.ended, outcome.terminated
        if outcome.period_ended is not None:
            over = outcome.terminated | outcome.period_ended
            ended = np.flatnonzero(over | outcome.truncated)
        if len(ended):
            returns, ends = self.running[ended].tolist(), over[ended].tolist()
            whole = ended if outcome.part_period is None else ended[~outcome.part_period[ended]]
            self.finished.extend(self.running[whole].tolist())
            for env, episode_return, known in zip(ended.tolist(), returns, ends, strict=True):
                self.ends.append(EpisodeEnd(step, env, episode_return if known else None))
            self.running[ended], self.discount[ended] = 0.0, 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the settings and the rollout's own list."""
        return {"running": self.running.copy(), "discount": self.discount.copy(), "finished": list(self.finished)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self.running, self.discount = state["running"].copy(), state["discount"].copy()
        self.finished = deque(state["finished"], maxlen=self.finished.maxlen)


class Calibration:
    """Predictions at the start of running episodes, compared with the return when the episode terminates.

    Truncated episodes are left out: their return is not known.

    :param n_envs: number of environments, B.
    :param window: comparisons to remember.
    :param tail: level of the tail whose breaches are counted.
    """

    def __init__(self, n_envs: int, window: int, tail: float) -> None:
        self.tail = tail
        self.pending: list[NDArray[np.float32] | None] = [None] * n_envs
        self.transforms: deque[float] = deque(maxlen=window)
        self.scores: deque[float] = deque(maxlen=window)

    def update(self, starts: Tensor, ends: Sequence[EpisodeEnd], atoms: Tensor, masses: Tensor) -> None:
        """Compare the episodes that ended in a rollout, and keep the predictions of those that are still running.

        :param starts: ``[T, B]`` true where an episode starts with the step.
        :param ends: the episodes that ended.
        :param atoms: ``[S, M]`` sorted atoms that were predicted at each of the S starts, in the order of the steps.
        :param masses: ``[M]`` probabilities of the atoms.
        """
        weights, predicted = masses.numpy(), atoms.numpy()
        events = [(step, 0, i, env) for i, (step, env) in enumerate(starts.nonzero().tolist())]
        events += [(end.step, 1, i, end.env) for i, end in enumerate(ends)]
        for _, is_end, i, env in sorted(events):  # an episode starts before its first step and ends after its last
            prediction, outcome = self.pending[env], ends[i].discounted_return if is_end else None
            self.pending[env] = None if is_end else predicted[i]
            if prediction is not None and outcome is not None:
                # An atom that is hit counts half: predictions and returns may both be discrete.
                below, hit = weights[prediction < outcome].sum(), weights[prediction == outcome].sum()
                self.transforms.append(float(below + 0.5 * hit))
                self.scores.append(pinball_score(prediction, weights, outcome))

    def forget(self, envs: NDArray[np.bool_]) -> None:
        """Drop the predictions of these environments: they belong to episodes that are no longer running."""
        self.pending = [None if gone else atoms for gone, atoms in zip(envs.tolist(), self.pending, strict=True)]

    def metrics(self) -> Metrics:
        """Return the metrics to log; none before there are enough episodes."""
        n = len(self.transforms)
        if n < ENOUGH_EPISODES:
            return {}
        transforms = np.array(self.transforms)
        breaches = int((transforms < self.tail).sum())
        return {
            "calibration/pit_mean": float(transforms.mean()),
            "calibration/breaches": breaches / n,
            "calibration/kupiec_p": kupiec_p_value(breaches, n, self.tail),
            "calibration/pinball": float(np.mean(self.scores)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the settings, in plain numbers."""
        pending = [None if atoms is None else atoms.tolist() for atoms in self.pending]
        return {"pending": pending, "transforms": list(self.transforms), "scores": list(self.scores)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self.pending = [None if atoms is None else np.array(atoms, np.float32) for atoms in state["pending"]]
        self.transforms = deque(state["transforms"], maxlen=self.transforms.maxlen)
        self.scores = deque(state["scores"], maxlen=self.scores.maxlen)


def pinball_score(atoms: NDArray[np.float32], masses: NDArray[np.float32], outcome: float) -> float:
    """Return the continuous ranked probability score E|X - y| - E|X - X'| / 2; it is least for the true distribution.

    Twice the pinball loss averaged over all levels.

    :param atoms: ``[M]``, sorted.
    :param masses: ``[M]`` probabilities of the atoms.
    :param outcome: the return that was realised, y.
    """
    upto = np.cumsum(masses) - 0.5 * masses
    spread = 2.0 * float(masses @ ((2.0 * upto - 1.0) * atoms))  # E|X - X'| from sorted atoms
    return float(masses @ np.abs(atoms - outcome)) - 0.5 * spread


# ------------------------------------------------------------------------------------------------------------- metrics


def explained_variance(values: Tensor, returns: Tensor, weights: Tensor) -> float | None:
    """Return 1 - Var(return - value) / Var(return) over weighted samples; None where the returns do not vary."""
    share = weights / weights.sum().clamp(min=1e-8)

    def variance(numbers: Tensor) -> float:
        return (share * (numbers - (share * numbers).sum()).square()).sum().item()

    total = variance(returns)
    return 1.0 - variance(returns - values) / total if total > 0.0 else None


def reserve_metrics(policy: DistributionalPolicy, critic: CriticConfig, experience: Experience) -> dict[str, float | None]:
    """Return how well the critics know the same returns after the update; training never sees this."""
    if not experience.weights.any():
        return {"warn/ev_reserve_all_masked": 1.0}
    with torch.no_grad():
        _, features = experience.batch.features(policy)
        means = aggregate_values(critic, policy.raw_atoms(features) @ policy.return_dist.masses.cpu())
    return {"train/ev/reserve": explained_variance(experience.at_steps(means), experience.returns, experience.weights)}


def twin_metrics(norms: list[float]) -> Metrics:
    """Return the gradient norms of the critics, and warnings when one vanishes or they are far apart."""
    metrics = {f"train/critic{i}_grad_norm": norm for i, norm in enumerate(norms, start=1)}
    for i, norm in enumerate(norms, start=1):
        if norm < VANISHED:
            metrics[f"warn/critic{i}_vanishing_gradients"] = 1.0
    if len(norms) == 2 and min(norms) > VANISHED:
        ratio = norms[0] / norms[1]
        metrics["train/critics_grad_ratio"] = ratio
        if not RATIO_LIMITS[0] <= ratio <= RATIO_LIMITS[1]:
            metrics["warn/twin_critics_gradient_imbalance"] = 1.0
    return metrics


def recurrent_state_metrics(actor: State, critic: State) -> Metrics:
    """Return the size and spread of the recurrent state, per layer; exploding, vanishing and saturated states show here.

    ``lstm/h_*`` is the hidden state of the actor. The two older names for the critics' state are kept as aliases; there 0 is
    the hidden and 1 the cell state.
    """
    metrics: Metrics = {}
    states = [(hidden, [f"h_{{}}_layer{layer}"]) for layer, hidden in enumerate(actor[0])]
    states += [(state, [f"critic_hidden_layer{i}_{{}}", f"critic_layer{i}_{{}}"]) for i, state in enumerate(critic)]
    for values, names in states:
        norm = values.flatten(0, -2).norm(dim=-1).mean()
        for name in names:
            metrics["lstm/" + name.format("norm")] = norm.item()
            metrics["lstm/" + name.format("mean")] = values.mean().item()
            metrics["lstm/" + name.format("std")] = values.std(correction=0).item()
    return metrics


def tail_metrics(start_atoms: Tensor, masses: Tensor, returns: EpisodeReturns, alpha: float) -> Metrics:
    """Return the predicted tail of the return at the start of episodes beside the realised one.

    :param start_atoms: raw atoms ``[K, M, N]`` at the M starts of episodes, or of whole periods, in a rollout.
    :param masses: ``[N]`` probabilities of the atoms.
    """
    metrics: Metrics = {}
    if start_atoms.shape[1]:
        metrics["risk/predicted_cvar"] = cvar_categorical(masses.expand_as(start_atoms), start_atoms, alpha).mean().item()
    if len(returns.finished) >= ENOUGH_EPISODES:
        realised = torch.tensor(list(returns.finished), dtype=torch.float64)
        metrics["risk/realised_cvar"] = cvar(realised, alpha).item()
    return metrics


def moments_drift(before: Moments, after: Moments) -> tuple[float, float]:
    """Return how far mean and standard deviation have moved, in standard deviations, root mean square over columns."""
    mean = (after[0] - before[0]) / before[1]
    std = after[1] / before[1] - 1.0
    return float(np.sqrt(np.mean(mean**2))), float(np.sqrt(np.mean(std**2)))


def drift_metrics(mean: float, std: float) -> Metrics:
    """Return how far the moments that normalise observations have moved, by the audit reports' names."""
    return {"debug/vecnormalize_mean_drift": mean, "debug/vecnormalize_std_drift": std}
