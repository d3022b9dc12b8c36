"""Callbacks of a training: progress, metrics, warnings, checkpoints, and stopping between two updates."""

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from tailguard.config import CheckpointConfig
from tailguard.evaluate.play import ReportProgress
from tailguard.experiments import Interrupted, handling_signals
from tailguard.io.atomic import atomic, named
from tailguard.io.checkpoint_folder import Checkpoints
from tailguard.io.reading import read_regular
from tailguard.ppo.algorithm import DistributionalPPO

logger = logging.getLogger(__name__)
PATIENCE = 5
# How long something took differs from run to run, so these metrics are for the terminal and TensorBoard only.
WALL_CLOCK = ("time/", "profile/")
LARGEST_METRICS = 2**30  # bytes


class BetweenUpdates(BaseCallback):
    """A callback that acts after every update, when nothing is under way."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self.num_timesteps > 0:
            self.between_updates()

    def _on_training_end(self) -> None:
        if self.num_timesteps >= self.model._total_timesteps:  # else it was stopped in the middle of a rollout
            self.between_updates()

    def between_updates(self) -> None:
        """Act; called after every update, and once more when a training is resumed."""
        raise NotImplementedError


class ShowProgress(BetweenUpdates):
    """Tell the caller how far the training is.

    :param report: called with the steps done, the steps in all, and a line.
    """

    def __init__(self, report: ReportProgress) -> None:
        super().__init__()
        self.report = report

    def between_updates(self) -> None:
        """Report the steps and the mean return of an episode, which is the growth of the log equity."""
        text = f"training, log growth per episode {mean_return(self.model):+.4f}"
        self.report(self.num_timesteps, self.model._total_timesteps, text)


class WriteMetrics(BetweenUpdates):
    """Append the metrics of every update to a file, a line of JSON each.

    :param path: the file. Lines of updates that the model has not seen yet, left by a process that was killed, are dropped.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.written = path, -1.0

    def _init_callback(self) -> None:
        kept = [line for line in metric_lines(self.path) if _step_of(line) <= self.model.num_timesteps]
        self.written = max((_step_of(line) for line in kept), default=-1.0)
        with atomic(self.path) as file:  # what was measured before must survive whatever happens now
            file.write(b"".join(line.rstrip(b"\n") + b"\n" for line in kept))

    def between_updates(self) -> None:
        """Write a line, unless the file has it already."""
        if self.num_timesteps <= self.written:
            return
        values = {name: value for name, value in self.logger.name_to_value.items() if not name.startswith(WALL_CLOCK)}
        values["rollout/ep_rew_mean"] = mean_return(self.model)
        numbers = {name: _plain(value) for name, value in sorted(values.items())}
        with named(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.num_timesteps, **numbers}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.written = self.num_timesteps


class LogLastingWarnings(BetweenUpdates):
    """Log a warning that does not go away: one update may be an accident, :data:`PATIENCE` in a row are not."""

    def __init__(self) -> None:
        super().__init__()
        self.streaks: dict[str, int] = {}

    def between_updates(self) -> None:
        """Count updates in a row, and log once per streak."""
        present = [name for name in self.logger.name_to_value if name.startswith("warn/")]
        self.streaks = {name: self.streaks.get(name, 0) + 1 for name in present}
        for name, length in self.streaks.items():
            if length == PATIENCE:
                logger.warning("%s in %d updates in a row, at step %d: see docs/metrics.md", name, length, self.num_timesteps)


class SaveCheckpoints(BetweenUpdates):
    """Save the model at intervals, at the end, and when the process is asked to stop.

    :param checkpoints: the folder.
    :param config: the intervals.
    """

    def __init__(self, checkpoints: Checkpoints, config: CheckpointConfig) -> None:
        super().__init__()
        self.checkpoints, self.config = checkpoints, config
        self.saved_step, self.saved_time = 0, time.monotonic()
        self.stop_requested = 0  # the signal that has asked for it

    def _init_callback(self) -> None:
        self.saved_step = self.model.num_timesteps

    def between_updates(self) -> None:
        """Save if it is time.

        :raises Interrupted: when a stop was requested; what there is has been saved.
        """
        ended = self.num_timesteps >= self.model._total_timesteps
        due_steps = self.config.every_steps is not None and self.num_timesteps - self.saved_step >= self.config.every_steps
        due_time = time.monotonic() - self.saved_time >= self.config.every_seconds
        if ended or due_steps or due_time or self.stop_requested:
            self.save()
        if self.stop_requested:
            raise Interrupted(f"stopped and saved at step {self.saved_step:,}", self.stop_requested)

    def save(self) -> None:
        """Save what there is, unless it is saved already."""
        if self.num_timesteps == self.saved_step:
            return
        tree = cast(DistributionalPPO, self.model).state_tree()
        self.checkpoints.save(self.num_timesteps, tree, performance=mean_return(self.model))
        self.saved_step, self.saved_time = self.num_timesteps, time.monotonic()


class StopTraining(Exception):
    """A training has gone as far as it should for now."""


class StopAt(BetweenUpdates):
    """Stop after the update that reaches a number of steps, before anything of the next one happens.

    :param steps: environment steps in all.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def between_updates(self) -> None:
        """Raise :class:`StopTraining` when the steps are done."""
        if self.num_timesteps >= self.steps:
            raise StopTraining


class StopAfter(BetweenUpdates):
    """Stop after the update in which a time limit is reached.

    :param minutes: of wall time, from the first call on.
    """

    def __init__(self, minutes: float) -> None:
        super().__init__()
        self.minutes, self.began = minutes, math.nan

    def _on_training_start(self) -> None:
        self.began = time.monotonic()

    def between_updates(self) -> None:
        """Raise :class:`StopTraining` when the time is over."""
        if time.monotonic() - self.began >= 60.0 * self.minutes:
            raise StopTraining


@contextmanager
def stopped_by_signals(saving: SaveCheckpoints) -> Iterator[None]:
    """On SIGINT and SIGTERM finish the present update, save, and stop; a second signal stops at once."""

    def request(number: int, _: FrameType | None) -> None:
        if saving.stop_requested:
            raise KeyboardInterrupt
        saving.stop_requested = number

    with handling_signals(request):
        yield


def mean_return(model: Any) -> float:
    """Return the mean return of the last episodes; NaN before the first has ended."""
    finished = [episode["r"] for episode in model.ep_info_buffer or []]
    return float(np.mean(finished)) if finished else math.nan


def metric_lines(path: Path) -> list[bytes]:
    """Return the lines of a file of metrics, with their ends; none if there is no file."""
    return read_regular(path, LARGEST_METRICS).splitlines(keepends=True) if path.exists() else []


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return math.inf  # a line that a killed process did not finish


def _plain(value: Any) -> float | str | None:
    if isinstance(value, str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
