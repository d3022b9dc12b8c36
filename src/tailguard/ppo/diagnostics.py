"""What is measured and warned about while training. ``docs/metrics.md`` explains every key."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.envs.vec_env import StepArrays
from tailguard.optim.kernels import sum_of_squares
from tailguard.ppo.calibration import ENOUGH_EPISODES, EpisodeEnd
from tailguard.ppo.critic import CriticConfig
from tailguard.ppo.experience import Experience
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.quantiles import cvar, cvar_categorical
from tailguard.ppo.trunk import State

# A critic whose gradient is smaller than this has stopped learning; a ratio beyond the limits means that one of them has.
VANISHED = 1e-8
RATIO_LIMITS = (0.01, 100.0)

Metrics = dict[str, float]


class _Stage:
    """Counts the time inside towards its name; made once and entered at every step."""

    def __init__(self, name: str, seconds: dict[str, float]) -> None:
        self._name, self._seconds, self._start = name, seconds, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._start


class StageProfile:
    """How the time of an iteration is spent; always on, since it costs a few microseconds."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.last: Metrics = {}
        self._stages: dict[str, _Stage] = {}

    def stage(self, name: str) -> _Stage:
        """Count the time inside ``with`` towards `name`."""
        if name not in self._stages:
            self._stages[name] = _Stage(name, self.seconds)
        return self._stages[name]

    def take(self) -> Metrics:
        """Seconds per stage since the last call."""
        self.last = {f"time/{name}_seconds": seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return self.last


class EpisodeReturns:
    """Discounted returns of finished episodes, from their start: what the critics' prediction at the start is about.

    :param n_envs: B.
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
        ended = outcome.ended
        if len(ended):
            earned = self.running[ended].tolist()
            self.finished.extend(earned)
            for env, value, known in zip(ended.tolist(), earned, outcome.terminated[ended].tolist(), strict=True):
                self.ends.append(EpisodeEnd(step, env, value if known else None))
            self.running[ended], self.discount[ended] = 0.0, 1.0

    def state_dict(self) -> dict[str, Any]:
        """Everything but the settings and the rollout's own list."""
        return {"running": self.running.copy(), "discount": self.discount.copy(), "finished": list(self.finished)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.running, self.discount = state["running"].copy(), state["discount"].copy()
        self.finished = deque(state["finished"], maxlen=self.finished.maxlen)


def gradient_norms(gradient: Tensor, spans: Sequence[slice]) -> list[float]:
    """The L2 norm of each critic's own part of the flat gradient, and of all of it, K + 1 numbers."""
    return [gradient_norm(part) for part in (*(gradient[span] for span in spans), gradient)]


def gradient_norm(gradient: Tensor) -> float:
    """The L2 norm of a flat float32 gradient, rounded as one of its numbers."""
    return float(np.float32(math.sqrt(sum_of_squares(gradient.cpu().numpy()))))


def explained_variance(values: Tensor, returns: Tensor, weights: Tensor) -> float | None:
    """1 - Var(return - value) / Var(return) over weighted samples; None where the returns do not vary."""
    share = weights / weights.sum().clamp(min=1e-8)

    def variance(numbers: Tensor) -> float:
        return (share * (numbers - (share * numbers).sum()).square()).sum().item()

    total = variance(returns)
    return 1.0 - variance(returns - values) / total if total > 0.0 else None


def value_metrics(experience: Experience) -> dict[str, float | None]:
    """How well the critics knew the returns before the update: together, and each alone."""
    values = {"train/explained_variance": experience.values}
    values |= {f"train/explained_variance_critic{i}": one for i, one in enumerate(experience.per_critic, start=1)}
    return {name: explained_variance(one, experience.returns, experience.weights) for name, one in values.items()}


def reserve_metrics(policy: DistributionalPolicy, critic: CriticConfig, experience: Experience) -> dict[str, float | None]:
    """How well the critics know the same returns after the update; training never sees this."""
    if not experience.weights.any():
        return {"warn/ev_reserve_all_masked": 1.0}
    with torch.no_grad():
        _, features = experience.batch.features(policy)
        means = critic.aggregate_values(policy.raw_atoms(features) @ policy.law.masses)
    return {"train/ev/reserve": explained_variance(experience.at_steps(means), experience.returns, experience.weights)}


def twin_metrics(norms: list[float]) -> Metrics:
    """Gradient norms of the critics, and warnings when one has died or they have drifted far apart."""
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


def memory_metrics(actor: State, critic: State) -> Metrics:
    """Size and spread of the memory, per layer; exploding, vanishing and saturated states show here.

    ``lstm/h_*`` is the hidden state of the actor. The two older names for the critics' memory are kept as aliases; there 0 is
    the hidden and 1 the cell state.
    """
    metrics: Metrics = {}
    for layer, hidden in enumerate(actor[0]):
        for name, value in _summary(hidden).items():
            metrics[f"lstm/h_{name}_layer{layer}"] = value
    for i, state in enumerate(critic):
        for name, value in _summary(state).items():
            metrics[f"lstm/critic_hidden_layer{i}_{name}"] = metrics[f"lstm/critic_layer{i}_{name}"] = value
    return metrics


Moments = tuple[NDArray[np.float64], NDArray[np.float64]]


def moments_drift(before: Moments, after: Moments) -> tuple[float, float]:
    """How far mean and standard deviation have moved, in standard deviations, root mean square over columns."""
    mean = (after[0] - before[0]) / before[1]
    std = after[1] / before[1] - 1.0
    return float(np.sqrt(np.mean(mean**2))), float(np.sqrt(np.mean(std**2)))


def tail_metrics(start_atoms: Tensor, masses: Tensor, returns: EpisodeReturns, alpha: float) -> Metrics:
    """The predicted tail of the return at the start of episodes beside the realised one.

    :param start_atoms: raw atoms ``[K, M, N]`` at the M episode starts of a rollout.
    :param masses: ``[N]`` their masses.
    """
    metrics: Metrics = {}
    if start_atoms.shape[1]:
        metrics["risk/predicted_cvar"] = cvar_categorical(masses.expand_as(start_atoms), start_atoms, alpha).mean().item()
    if len(returns.finished) >= ENOUGH_EPISODES:
        realised = torch.tensor(list(returns.finished), dtype=torch.float64)
        metrics["risk/realised_cvar"] = cvar(realised, alpha).item()
    return metrics


def _summary(values: Tensor) -> Metrics:
    norm = values.flatten(0, -2).norm(dim=-1).mean()
    return {"norm": norm.item(), "mean": values.mean().item(), "std": values.std(correction=0).item()}
