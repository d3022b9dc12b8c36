"""Any learner as a Trainable of Ray Tune, for those who live there: ``pip install "tailguard[ray]"``.

Tune's own schedulers replace the configuration of a trial and restore the checkpoint of another, in which the old settings lie.
Here what is restored is adopted: the state is the other's, the settings are the trial's own, and so is the randomness.
"""

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailguard.io import checkpoint
from tailguard.population.config import Value
from tailguard.population.learner import Learner, LearnerFactory

FILE, KIND = "member.safetensors", "tune trial"


def trainable(
    factory: LearnerFactory, interval: int, hyperparams: Sequence[str], *, metric: str = "score", seed: int = 0
) -> Any:
    """A class for ``ray.tune.Tuner``.

    :param factory: makes the learner of a trial.
    :param interval: steps of one iteration of Tune, in the unit of the learner's ``train``.
    :param hyperparams: the keys of Tune's configuration that the learner is to have.
    :param metric: the name under which the mean score is reported; NaN where there is none.
    :param seed: of all trials together.
    """
    tune = _tune()

    class Trial(tune.Trainable):  # type: ignore[misc, name-defined]
        """A learner in the hands of Tune."""

        learner: Learner

        def setup(self, config: dict[str, Any]) -> None:
            """Make the learner with the trial's settings."""
            self._generation = 0
            self.learner = factory(0, self._settings(), self._seed())

        def step(self) -> dict[str, Any]:
            """Train and be scored."""
            self.learner.train(interval)
            scores = self.learner.score()
            values = np.asarray([] if scores is None else scores, np.float64).ravel()
            return {metric: float(values.mean()) if len(values) else float("nan")}

        def save_checkpoint(self, checkpoint_dir: str) -> str:
            """The learner's state, and whose it is."""
            tree = {
                "state": self.learner.save(),
                "trial": self.trial_id,
                "generation": self._generation,
                "hyperparams": self._settings(),
            }
            checkpoint.save(Path(checkpoint_dir) / FILE, tree, kind=KIND)
            return checkpoint_dir

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            """One's own state comes back as it was; another's, or one with other settings, is adopted."""
            tree = checkpoint.load(Path(checkpoint_dir) / FILE, kind=KIND)
            settings = self._settings()
            if tree["trial"] == self.trial_id and tree["hyperparams"] == settings:
                self._generation = tree["generation"]
                self.learner.load(tree["state"])
            else:
                self._generation = max(self._generation, tree["generation"]) + 1
                self.learner.adopt(tree["state"], settings, self._seed())

        def _settings(self) -> dict[str, Value]:
            return {name: self.config[name] for name in hyperparams}

        def _seed(self) -> int:
            """Of this trial at this generation: no two alike."""
            text = f"{seed}/{self.trial_id}/{self._generation}".encode()
            return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")

    return Trial


def _tune() -> Any:
    try:
        return importlib.import_module("ray.tune")
    except ModuleNotFoundError as error:
        raise ImportError('Tune needs Ray: pip install "tailguard[ray]"') from error
