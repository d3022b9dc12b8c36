"""Any learner as a Trainable of Ray Tune: ``pip install "tailguard[ray]"``.

Tune's own schedulers replace the configuration of a trial and restore the checkpoint of another, which holds the old settings.
Here the restored state is copied: weights and statistics are the other trial's, hyperparameters and random numbers are the
trial's own.
"""

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailguard.io import checkpoint
from tailguard.population.config import Value
from tailguard.population.member import Learner, LearnerFactory

FILE, KIND = "member.safetensors", "tune trial"


def trainable(
    factory: LearnerFactory, interval: int, hyperparams: Sequence[str], *, metric: str = "score", seed: int = 0
) -> Any:
    """Return a class for ``ray.tune.Tuner``.

    :param factory: makes the learner of a trial.
    :param interval: steps of one iteration of Tune, in the unit of the learner's ``train``.
    :param hyperparams: the keys of Tune's configuration that are given to the learner.
    :param metric: the name under which the mean score is reported; NaN where there is none.
    :param seed: random seed, combined with each trial's id.
    """
    tune = _tune()

    class Trial(tune.Trainable):  # type: ignore[misc, name-defined]
        """A learner trained by Tune."""

        learner: Learner

        def setup(self, config: dict[str, Any]) -> None:
            """Make the learner with the trial's hyperparameters."""
            self._generation = 0
            self.learner = factory(0, self._hyperparams(), self._seed())

        def step(self) -> dict[str, Any]:
            """Train and return the score."""
            self.learner.train(interval)
            scores = self.learner.score()
            values = np.asarray([] if scores is None else scores, np.float64).ravel()
            return {metric: float(values.mean()) if len(values) else float("nan")}

        def save_checkpoint(self, checkpoint_dir: str) -> str:
            """Save the learner's state with the trial that it belongs to."""
            tree = {
                "state": self.learner.save(),
                "trial": self.trial_id,
                "generation": self._generation,
                "hyperparams": self._hyperparams(),
            }
            checkpoint.save(Path(checkpoint_dir) / FILE, tree, kind=KIND)
            return checkpoint_dir

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            """Restore this trial's own state; copy from the state of another trial, or of other hyperparameters."""
            tree = checkpoint.load(Path(checkpoint_dir) / FILE, kind=KIND)
            own = self._hyperparams()
            if tree["trial"] == self.trial_id and tree["hyperparams"] == own:
                self._generation = tree["generation"]
                self.learner.load(tree["state"])
            else:
                self._generation = max(self._generation, tree["generation"]) + 1
                self.learner.copy_from(tree["state"], own, self._seed())

        def _hyperparams(self) -> dict[str, Value]:
            return {name: self.config[name] for name in hyperparams}

        def _seed(self) -> int:
            """Return the random seed of this trial at this generation."""
            text = f"{seed}/{self.trial_id}/{self._generation}".encode()
            return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")

    return Trial


def _tune() -> Any:
    try:
        return importlib.import_module("ray.tune")
    except ModuleNotFoundError as error:
        raise ImportError('Tune needs Ray: pip install "tailguard[ray]"') from error
