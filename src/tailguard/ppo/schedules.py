"""Schedules and controllers of an update: the entropy coefficient, the KL control and the learning rate.

Nobody but :class:`LearningRate` writes the learning rate of an optimizer. The states are plain numbers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule
from stable_baselines3.common.utils import LinearSchedule as Sb3LinearSchedule
from torch.optim import Optimizer

from tailguard.ppo.config import EntropyConfig, KLConfig
from tailguard.validation import require

Schedule = Callable[[float], float]


class EntropySchedule:
    """The entropy coefficient: constant, then linear, raised while the critic is bad. :attr:`value` is the active one.

    To change the settings in the middle of training, make a new schedule and load the state of the old one.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self.config = config
        self.updates = 0
        self.decay_start: int | None = 0 if config.plateau_window == 0 else None
        self.boost = 1.0
        self._bad_updates = 0
        self._window: list[tuple[int, float]] = []

    @property
    def scheduled(self) -> float:
        """Decayed coefficient, before any boost."""
        config = self.config
        if self.decay_start is None or config.final is None or config.decay_steps == 0:
            return config.initial
        progress = min((self.updates - self.decay_start) / config.decay_steps, 1.0)
        # This form of the line ends exactly at final.
        return max((1.0 - progress) * config.initial + progress * config.final, config.min_coefficient)

    @property
    def value(self) -> float:
        """Coefficient of the next update."""
        return max(self.scheduled * self.boost, self.config.min_coefficient)

    @property
    def slope(self) -> float | None:
        """Least-squares slope of performance per update; None while the window is not full."""
        size = len(self._window)
        if size == 0 or size < self.config.plateau_window:
            return None
        update_mean = sum(update for update, _ in self._window) / size
        covariance = sum((update - update_mean) * performance for update, performance in self._window)
        return covariance / sum((update - update_mean) ** 2 for update, _ in self._window)

    def step(self, performance: float | None, explained_variance: float | None) -> float:
        """Close an update: start the decay on a plateau of performance, boost while the critic is bad.

        :param performance: mean episode return, or the policy's mean entropy, in which a plateau is looked for. None if it was
            not measured.
        :param explained_variance: explained variance of the critic on this rollout, at most 1. None if it is undefined, as for
            constant returns; it then neither ends nor prolongs a bad phase.
        :returns: the coefficient of the next update.
        """
        for name, value in (("performance", performance), ("explained_variance", explained_variance)):
            require(value is None or math.isfinite(value), name, value, "finite, or None if there is none")
        self.updates += 1
        if performance is not None and self.decay_start is None:  # a plateau starts the decay and has no other effect
            self._find_plateau(performance)
        if explained_variance is not None:
            if explained_variance >= self.config.bad_explained_threshold:
                self._bad_updates, self.boost = 0, 1.0
            else:
                self._bad_updates += 1
                if self._bad_updates > self.config.bad_explained_patience:
                    self.boost = min(self.boost * self.config.boost_factor, self.config.max_boost)
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the settings, in plain numbers."""
        return {
            "updates": self.updates,
            "decay_start": self.decay_start,
            "boost": self.boost,
            "bad_updates": self._bad_updates,
            "window": [list(point) for point in self._window],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        _require_keys("the entropy schedule's state", state, self.state_dict())
        self.updates = state["updates"]
        self.decay_start = state["decay_start"]
        self.boost = state["boost"]
        self._bad_updates = state["bad_updates"]
        self._window = [(update, performance) for update, performance in state["window"]]
        if self.config.plateau_window == 0 and self.decay_start is None:  # the old settings waited for a plateau, these do not
            self.decay_start = self.updates

    def _find_plateau(self, performance: float) -> None:
        config = self.config
        self._window = [*self._window, (self.updates, performance)][-config.plateau_window :]
        slope = self.slope
        plateau = slope is not None and abs(slope) <= config.plateau_tolerance and self.updates >= config.plateau_min_updates
        if plateau and self.scheduled > config.min_coefficient:  # at the floor there is nothing to decay
            self.decay_start = self.updates
            self._window = []


DOUBLING_BAND = 1.5  # Schulman et al. 2017
LR_BAND, LR_STEP = 2.0, 1.5  # rsl_rl


class KLControl:
    """One of three ways to keep the KL near its target; the other two stay neutral.

    Ask :meth:`should_stop` before every optimizer step; call :meth:`update` once per ``train()`` with the mean KL (in mode
    ``adaptive_lr`` also after every minibatch, as rsl_rl does). Use :attr:`coefficient` in the loss, on the differentiable KL
    between the two distributions, and give :attr:`lr_factor` to :meth:`LearningRate.apply`.
    """

    def __init__(self, config: KLConfig) -> None:
        self.config = config
        self.lr_factor = 1.0  # of the base learning rate; changes in mode adaptive_lr only
        self._beta = config.penalty_initial

    @property
    def coefficient(self) -> float:
        """Factor of the KL in the loss; 0 unless the mode is ``penalty``."""
        return self._beta if self.config.mode == "penalty" else 0.0

    def should_stop(self, kl: float) -> bool:
        """Return True to leave the update now, without the optimizer step that is due; False unless the mode is ``early_stop``.

        :param kl: estimate on the present minibatch.
        """
        require(math.isfinite(kl), "kl", kl, "finite")
        return self.config.mode == "early_stop" and kl > self.config.stop_factor * self.config.target

    def update(self, kl: float, base_lr: float) -> None:
        """Adapt the penalty or the learning rate's factor to the update that has just ended.

        :param kl: mean KL of the update. Estimates may fall below 0; they count as far below the target for the penalty, and as
            no information for the learning rate.
        :param base_lr: the learning rate without the factor, at least 0: :meth:`LearningRate.base_at`.
        """
        require(math.isfinite(kl), "kl", kl, "finite")
        _require_lr("base_lr", base_lr)
        if self.config.mode == "penalty":
            self._beta = self._doubled(kl)
        elif self.config.mode == "adaptive_lr" and base_lr > 0.0:  # a schedule that has ended at 0 leaves nothing to adapt
            self.lr_factor = self._adapted_factor(kl, base_lr)

    @property
    def kl_penalty_state(self) -> dict[str, float]:
        """State of the penalty: its coefficient."""
        return {"beta": self._beta}

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the settings, in plain numbers; the same keys in every mode."""
        return {"kl_penalty_state": self.kl_penalty_state, "lr_factor": self.lr_factor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        _require_keys("the KL control's state", state, self.state_dict())
        penalty = state["kl_penalty_state"]  # members of populations of earlier versions hold more than the coefficient
        require("beta" in penalty, "kl_penalty_state", f"a mapping of {sorted(penalty)}", "a mapping with beta")
        self._beta = penalty["beta"]
        self.lr_factor = state["lr_factor"]

    def _doubled(self, kl: float) -> float:
        config = self.config
        if kl > config.target * DOUBLING_BAND:
            return min(self._beta * 2.0, config.penalty_max)
        if kl < config.target / DOUBLING_BAND:
            return max(self._beta / 2.0, config.penalty_min)
        return self._beta

    def _adapted_factor(self, kl: float, base_lr: float) -> float:
        # A base that lies outside the bounds already is not pulled back: the bounds limit the adaptation, not the schedule.
        config = self.config
        if kl > config.target * LR_BAND:
            return max(self.lr_factor / LR_STEP, min(config.lr_min / base_lr, self.lr_factor))
        if 0.0 < kl < config.target / LR_BAND:
            return min(self.lr_factor * LR_STEP, max(config.lr_max / base_lr, self.lr_factor))
        return self.lr_factor


@dataclass(frozen=True)
class LinearSchedule:
    """A value that goes linearly from ``initial`` at progress_remaining 1 to ``final`` at 0."""

    initial: float
    final: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be a learning rate."""
        _require_lr("initial", self.initial)
        _require_lr("final", self.final)

    def __call__(self, progress_remaining: float) -> float:
        """Return the value at that progress, exactly ``initial`` and ``final`` at the ends."""
        if self.initial == self.final:  # also in between
            return self.initial
        return progress_remaining * self.initial + (1.0 - progress_remaining) * self.final


def as_numbers(schedule: Schedule) -> Schedule:
    """Return SB3's constant and linear schedules as a :class:`LinearSchedule`, which files can hold; others as they are."""
    if isinstance(schedule, FloatSchedule):
        schedule = schedule.value_schedule
    if isinstance(schedule, ConstantSchedule):
        return LinearSchedule(schedule.val, schedule.val)
    if isinstance(schedule, Sb3LinearSchedule) and schedule.end_fraction == 1.0:
        return LinearSchedule(schedule.start, schedule.end)
    return schedule


class LearningRate:
    """The learning rate: a base, times the KL control's factor, times each parameter group's optional ``lr_scale``.

    :param base: a constant, a :class:`LinearSchedule`, or a function of progress_remaining (1 at the start, 0 at the end). A
        function of the user's is not part of the state: it must be given again before the state is loaded.
    """

    def __init__(self, base: float | Schedule) -> None:
        self._base: Schedule = as_numbers(base) if callable(base) else LinearSchedule(base, base)

    def set(self, value: float) -> None:
        """Replace the base by a constant, for good: no schedule given before comes back.

        :param value: finite and at least 0.
        """
        self._base = LinearSchedule(value, value)

    def base_at(self, progress_remaining: float) -> float:
        """Return the base at a point of the training.

        :param progress_remaining: at most 1. Below 0 counts as 0: the last rollout may end after the planned number of steps.
        """
        require(-math.inf < progress_remaining <= 1.0, "progress_remaining", progress_remaining, "finite and at most 1")
        base = float(self._base(max(progress_remaining, 0.0)))
        _require_lr(f"the learning rate at progress_remaining {progress_remaining:g}", base)
        return base

    def apply(self, optimizer: Optimizer, progress_remaining: float, factor: float) -> float:
        """Write the learning rate of every parameter group.

        :param optimizer: its groups may hold ``lr_scale``, a multiple of the common value; without it a group gets 1.
        :param progress_remaining: as in :meth:`base_at`.
        :param factor: :attr:`KLControl.lr_factor`; 1 without KL control.
        :returns: the common value, before any ``lr_scale``.
        """
        require(0.0 < factor < math.inf, "factor", factor, "finite and above 0")
        value = self.base_at(progress_remaining) * factor
        for group in optimizer.param_groups:
            scale = group.get("lr_scale", 1.0)
            _require_lr("lr_scale", scale)
            group["lr"] = value * scale
        return value

    def state_dict(self) -> dict[str, float | None]:
        """Return the base in plain numbers; None stands for a function of the user's."""
        if isinstance(self._base, LinearSchedule):
            return {"initial": self._base.initial, "final": self._base.final}
        return {"initial": None, "final": None}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Continue where :meth:`state_dict` was taken.

        :raises ValueError: when the state was taken from a function of the user's and none is given here.
        """
        _require_keys("the learning rate's state", state, self.state_dict())
        initial, final = state["initial"], state["final"]
        if initial is not None and final is not None:
            self._base = LinearSchedule(initial, final)
        elif isinstance(self._base, LinearSchedule):
            raise ValueError(
                "learning_rate was a function when this state was saved, and functions are not saved: "
                f"give that function again instead of {self._base}"
            )


def _require_lr(name: str, value: float) -> None:
    require(0.0 <= value < math.inf, name, value, "finite and at least 0")


def _require_keys(name: str, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    require(set(state) == set(expected), name, f"a mapping of {sorted(state)}", f"a mapping of {sorted(expected)}")
