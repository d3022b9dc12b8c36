"""A member of a population as the scheduler knows it: data only. What trains is a learner (`learner.py`)."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tailguard.population.config import Value


@dataclass
class PopulationMember:
    """The record of one place in the population. Plain numbers, strings, lists and dicts throughout.

    :param member_id: its place, from 0.
    :param hyperparams: in force now.
    :param performance: mean of the latest evaluations; None before the first, after a copy until the next, and where one of the
        evaluations was not finite.
    :param step: training steps of this place, copies included.
    :param checkpoint_path: the files that hold its state: its own since the last report, the source's after a copy.
    :param vecnormalize_stats_path: the same for the statistics of a ``VecNormalize``.
    :param history: one entry per report: ``step``, ``scores``, ``performance``, ``since`` (step of the report before),
        ``baseline`` (performance at that step), ``hyperparams`` and ``generation``.
    :param generation: how often it has copied another member.
    :param parent: whom it copied last.
    :param alive: False from the engine's word that it died until it is replaced or reports again.
    :param decided_step: its step at the last decision about it.
    :param baseline: performance from which the present interval started: its own, or the source's after a copy.
    """

    member_id: int
    hyperparams: dict[str, Value]
    performance: float | None = None
    step: int = 0
    checkpoint_path: str | None = None
    vecnormalize_stats_path: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    generation: int = 0
    parent: int | None = None
    alive: bool = True
    decided_step: int = 0
    baseline: float | None = None

    @property
    def broken(self) -> bool:
        """Whether anything else is better: dead, or trained on since the last decision and without a finite score."""
        return not self.alive or (self.performance is None and self.step > self.decided_step)

    def to_dict(self) -> dict[str, Any]:
        """A copy in plain types, for JSON."""
        return asdict(self)


def recent_scores(member: PopulationMember, window: int) -> list[float]:
    """The latest finite evaluations of what the member is now: none from before its last copy.

    :param window: how many at most.
    """
    own = [entry["scores"] for entry in member.history if entry["generation"] == member.generation]
    return [score for scores in own for score in scores if score is not None][-window:]


def member_seed(population_seed: int, member_id: int, generation: int) -> int:
    """The seed of a member's own randomness, in [0, 2^32). Another one after each copy: copies must not repeat their source."""
    return int(np.random.SeedSequence([population_seed, member_id, generation]).generate_state(1)[0])
