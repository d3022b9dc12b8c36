"""The folder of the checkpoints of one training: the last few and the best; reading takes the newest that is not damaged."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tailguard.io import checkpoint
from tailguard.io.atomic import atomic, clear_unfinished
from tailguard.io.checkpoint import CheckpointError, Migrations
from tailguard.io.reading import read_regular
from tailguard.validation import require

logger = logging.getLogger(__name__)
Loaded = TypeVar("Loaded")

PREFIX, SUFFIX = "step-", ".safetensors"
BEST, BEST_SCORE = "best.safetensors", "best.json"
LARGEST_SCORE = 4096  # bytes
IDENTITY, PERFORMANCE = "identity", "performance"  # of the training and of the model, in the tree of a file


class Checkpoints:
    """Files ``step-N.safetensors`` in a folder.

    :param folder: the folder; made when the first file is written.
    :param kind: kind of the files.
    :param keep: number of the newest files to keep; 2 or more, so that a damaged one costs an interval and not the run.
    :param migrations: see :func:`tailguard.io.checkpoint.load`.
    :param identity: of the training. It is part of every file, and files of another one are not used; None has none.
    """

    def __init__(
        self, folder: Path, kind: str, keep: int = 3, migrations: Migrations | None = None, identity: str | None = None
    ) -> None:
        require(keep >= 2, "keep", keep, "at least 2")
        self.folder, self.kind, self.keep, self.migrations = folder, kind, keep, migrations
        self.identity = identity

    def save(self, step: int, tree: Mapping[str, Any], performance: float = math.nan) -> Path:
        """Write a checkpoint, whole or not at all; then delete the oldest.

        :param performance: performance of this model; if it is the highest so far, a copy is kept until a better one comes.
        """
        facts: dict[str, Any] = {} if self.identity is None else {IDENTITY: self.identity}
        facts |= {} if math.isnan(performance) else {PERFORMANCE: performance}
        data = checkpoint.to_bytes({**tree, **facts}, kind=self.kind)
        # The copy first: a training that is killed in between comes to this step again, but never to one that has its file.
        if performance > self._best_performance():
            _write(self.folder / BEST, data)
            _write(self.folder / BEST_SCORE, json.dumps({"step": step, "performance": performance}).encode())
        path = self.folder / f"{PREFIX}{step:012d}{SUFFIX}"
        _write(path, data)
        for old in self.paths()[: -self.keep]:
            old.unlink()
        clear_unfinished(self.folder)
        return path

    def _best_performance(self) -> float:
        """Return the performance of the best model, from its own file: one that stands beside it may be older or newer."""
        try:
            best = checkpoint.load(self.folder / BEST, kind=self.kind)
            if best.get(IDENTITY) != self.identity:
                return -math.inf
            if PERFORMANCE in best:
                return float(best[PERFORMANCE])
            score = json.loads(read_regular(self.folder / BEST_SCORE, LARGEST_SCORE))  # of an earlier version
            return float(score["performance"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return -math.inf

    def paths(self) -> list[Path]:
        """Return all files but the copy of the best, the oldest first."""
        return sorted(self.folder.glob(f"{PREFIX}*{SUFFIX}"))

    def newest(self, make: Callable[[dict[str, Any]], Loaded]) -> Loaded | None:
        """Return `make` of the newest checkpoint that is not damaged; None when there is none at all.

        :raises CheckpointError: when there are some and none can be used.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                tree = checkpoint.load(path, kind=self.kind, migrations=self.migrations)
                tree.pop(PERFORMANCE, None)
                if tree.pop(IDENTITY, None) != self.identity:
                    raise CheckpointError(f"{path}: belongs to another run")
                with checkpoint.refusing(str(path)):
                    return make(tree)
            except CheckpointError as error:
                logger.warning("%s; going back to the one before", error)
                reason = error
        if paths:
            raise CheckpointError(f"{self.folder}: none of the {len(paths)} checkpoints can be used; the oldest: {reason}")
        return None


def _write(path: Path, data: bytes) -> None:
    with atomic(path) as file:
        file.write(data)
