"""Learners with planned faults, for any process, and the files that a population leaves behind.

Nothing here needs PyTorch, so that a process starts in a moment.
"""

import json
import math
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from population_toys import MovingOptimum

from tailguard.population import PBTConfig, PBTScheduler
from tailguard.population.lineage import Lineage
from tailguard.population.member import MemberFailed

INTERVAL = 10


@dataclass(frozen=True)
class JsonStore:
    """A store of states as JSON files in a folder."""

    folder: Path

    def write(self, name, state):
        unfinished = self.folder / f"{name}.{os.getpid()}"
        unfinished.write_text(json.dumps(state))
        unfinished.replace(self.folder / f"{name}.json")

    def read(self, name):
        path = self.folder / f"{name}.json"
        if not path.exists():
            raise MemberFailed(f"{path} is gone")
        return json.loads(path.read_text())

    def keep_only(self, names):
        for path in self.folder.glob("member_*.json"):
            if path.stem not in names:
                path.unlink()

    def write_population(self, record):
        self.write("population", record)

    def write_history(self, part, record):
        self.write(f"history_{part}", record)

    def read_history(self, part):
        return self.read(f"history_{part}")

    def read_population(self):
        return self.read("population") if (self.folder / "population.json").exists() else None


class Mortal(MovingOptimum):
    """A moving optimum with a planned fault at a certain age."""

    def __init__(self, member_id, hyperparams, seed, fates):
        super().__init__(member_id, hyperparams, seed)
        self.member_id, self.fates, self.broken = member_id, fates, False

    def train(self, steps):
        self.broken = False
        self.fates.meet(self)
        super().train(steps)

    def score(self):
        return math.nan if self.broken else super().score()


@dataclass(frozen=True)
class Fates:
    """A factory of learners with planned faults: {(member, age): fault}. Each happens once, ``cursed`` always.

    :param folder: where it is remembered, across processes, what has happened; ``hold`` waits for the file ``go`` in it.
    """

    folder: Path
    plan: dict[tuple[int, int], str] = field(default_factory=dict)

    def __call__(self, member_id, hyperparams, seed):
        return Mortal(member_id, hyperparams, seed, self)

    def meet(self, learner):
        what = self.plan.get((learner.member_id, learner.age))
        if what == "cursed":
            os.kill(os.getpid(), signal.SIGKILL)
        done = self.folder / f"{learner.member_id}-{learner.age}"
        if what is None or done.exists():
            return
        done.touch()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hang":
            time.sleep(1000.0)
        elif what == "hold":
            while not (self.folder / "go").exists():
                time.sleep(0.02)
        elif what == "bug":
            raise ZeroDivisionError("by intent")
        elif what == "disk":
            raise OSError(28, "No space left on device", "its file")
        elif what == "fail":
            raise MemberFailed("by intent")
        learner.broken = what == "nan"


def population(folder, **settings):
    """Return a scheduler that writes its lineage into the folder, and a store beside it."""
    common = {"population_size": 3, "perturbation_interval": INTERVAL, "hyperparams": MovingOptimum.search, "seed": 5}
    config = PBTConfig(**{**common, **settings})
    (folder / "states").mkdir(parents=True)
    return PBTScheduler(config, record=Lineage(folder / "lineage.jsonl")), JsonStore(folder / "states")


def left_behind(folder):
    """Return the lineage and every state that was kept."""
    states = {path.stem: json.loads(path.read_text()) for path in sorted((folder / "states").glob("member_*.json"))}
    return (folder / "lineage.jsonl").read_text(), states
