"""The trainings of a selection: a policy without a block of the training bars, which it then trades at every stop.

They are independent tasks (:mod:`tailguard.parallel.tasks`). Those that are finished can be kept in a folder, so that a
selection that was stopped or killed continues with what is missing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tailguard.config import Config
from tailguard.evaluate.stats.series import Floats
from tailguard.experiments.callbacks import BetweenUpdates
from tailguard.experiments.decisions import trade_market
from tailguard.experiments.prepared_market import Market
from tailguard.experiments.training import build_model, train_model
from tailguard.io import checkpoint
from tailguard.io.form import array_like, require_form
from tailguard.market.env import Rows

logger = logging.getLogger(__name__)
KIND = "trial"
Made = TypeVar("Made")


class Play(NamedTuple):
    """The targets of one agent in a block that it had not seen, and in one that it had."""

    held_out: Floats
    in_sample: Floats


@dataclass(frozen=True, eq=False)
class HeldOutMarkets:
    """Inputs that the trials of a selection share.

    :param markets: by block, prepared without it.
    :param spans: by block, the rows in which it is traded.
    :param config: of the trainings.
    :param stops: steps at which an agent trades.
    """

    markets: Sequence[Market]
    spans: Sequence[Rows]
    config: Config
    stops: Sequence[int]


class Trial(NamedTuple):
    """The task to train a policy without a block.

    :param policy: its name.
    :param block: number of the block.
    :param seed: number of the seed.
    """

    policy: str
    block: int
    seed: int

    @property
    def name(self) -> str:
        """The name in messages and of files."""
        return f"{self.policy}-block-{self.block}-seed-{self.seed}"

    def work(self, shared: HeldOutMarkets, reached: Callable[[float], None]) -> dict[int, Play]:
        """Train without the block, and trade it and the block before it; return by stop what was asked for."""
        market, training = shared.markets[self.block], shared.config.training
        # Seeds that no training of a walk-forward uses, since those count on from the first.
        drawn = int(np.random.SeedSequence([training.seed, self.block, self.seed]).generate_state(1)[0])
        changed = {"policy": self.policy, "steps": shared.stops[-1], "seed": drawn, "tensorboard": None}
        model = build_model(market, training.model_copy(update=changed))
        spans = [shared.spans[self.block], shared.spans[self.block - 1]]
        plays: dict[int, Play] = {}

        def trade() -> None:
            (unseen, _), (seen, _) = trade_market(model, market, spans, shared.config.walkforward.warmup)
            plays[model.num_timesteps] = Play(unseen, seen)

        train_model(model, shared.stops[-1], [_AtStops(shared.stops, trade)])
        return plays


class Kept:
    """Results that are finished, a file for each: those of other settings or data are not used.

    :param folder: of the files; made when the first is written.
    :param identity: of settings and data.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder, self.identity = folder, identity

    def load(self, name: str, make: Callable[[Any], Made]) -> Made | None:
        """Return `make` of what was kept under a name; None if there is nothing that can be used."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            tree = checkpoint.load(path, kind=KIND)
            with checkpoint.refusing(str(path)):
                if tree["of"] != {"identity": self.identity, "name": name}:
                    raise ValueError("is about something else")
                return make(tree["result"])
        except ValueError as error:
            logger.warning("%s; that is done again", error)
            return None

    def save(self, name: str, result: Any) -> None:
        """Keep a result under its name."""
        checkpoint.save(self._path(name), {"of": {"identity": self.identity, "name": name}, "result": result}, kind=KIND)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def plays_to_tree(plays: Mapping[int, Play]) -> dict[str, Any]:
    """Return what a trial has returned as arrays and plain values."""
    return {str(stop): play._asdict() for stop, play in plays.items()}


def plays_from_tree(tree: Mapping[str, Any], stops: Sequence[int], forms: Play) -> dict[int, Play]:
    """Restore what :func:`plays_to_tree` returned.

    :param stops: of the trial.
    :param forms: arrays like those of every play.
    :raises ValueError: for something else than such plays.
    """
    form = {name: array_like(example) for name, example in forms._asdict().items()}
    require_form(tree, {str(stop): form for stop in stops}, "plays")
    return {stop: Play(**tree[str(stop)]) for stop in stops}


class _AtStops(BetweenUpdates):
    """Call a function at some stops of a training."""

    def __init__(self, stops: Sequence[int], function: Callable[[], None]) -> None:
        super().__init__()
        self.waiting, self.function = set(stops), function

    def between_updates(self) -> None:
        if self.num_timesteps in self.waiting:
            self.waiting.remove(self.num_timesteps)
            self.function()
