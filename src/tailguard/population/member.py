"""Members of a population: the record that the scheduler keeps of each, and the learner that trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from tailguard.population.config import Value

Scores = float | Sequence[float] | None


class MemberFailed(RuntimeError):
    """Raised by a learner that cannot continue, or that refuses a copy. The population continues without it and replaces it."""


class Learner(Protocol):
    """The part of a member that trains, is scored, saves and loads.

    Any method may raise :class:`MemberFailed`; every other exception is a bug and ends the run.
    """

    def train(self, steps: int) -> None:
        """Train on from the present state.

        :param steps: number of steps, in the unit of ``perturbation_interval``.
        """

    def score(self) -> Scores:
        """Evaluate: return one number, or one per evaluation (episode, seed, span), which the t-test can use. None if there is
        none.

        For a fair comparison evaluate all members on the same data, and never on the data of the final test.
        """

    def save(self) -> Any:
        """Return the whole state, detached from the learner; or the path at which it was written."""

    def load(self, state: Any) -> None:
        """Restore what :meth:`save` returned, random numbers included: a resumed run equals one that never stopped."""

    def copy_from(self, state: Any, hyperparams: Mapping[str, Value], seed: int) -> None:
        """Become a copy of another member (PBT's exploit) with other hyperparameters and random numbers.

        All or nothing: a failure leaves everything as it was.

        :param state: the state that the source's :meth:`save` returned.
        :param hyperparams: the copy's hyperparameters.
        :param seed: random seed of the copy, in [0, 2^32).
        """


# Makes the learner of a member: (member_id, hyperparams, seed).
LearnerFactory = Callable[[int, Mapping[str, Value], int], Learner]


@dataclass
class PopulationMember:
    """The record of a member. Plain numbers, strings, lists and dicts throughout.

    :param member_id: its number, from 0.
    :param hyperparams: its present hyperparameters.
    :param performance: mean of the latest evaluations; None before the first, after a copy until the next, and where one of the
        evaluations was not finite.
    :param step: training steps of this member number, copies included.
    :param checkpoint_path: the file that holds its state: its own since the last report, the source's after a copy.
    :param vecnormalize_stats_path: the file that holds the statistics of its ``VecNormalize``, if it has one.
    :param history: one entry per report: ``step``, ``scores``, ``performance``, ``since`` (step of the report before),
        ``baseline`` (performance at that step), ``hyperparams`` and ``generation``.
    :param generation: number of times it has copied another member.
    :param parent: the member that it copied last.
    :param alive: False after :meth:`PBTScheduler.mark_dead` until it is replaced or reports again.
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
        """True if any other member is better: dead, or trained since the last decision without a finite score."""
        return not self.alive or (self.performance is None and self.step > self.decided_step)

    def to_dict(self) -> dict[str, Any]:
        """Return a copy in plain types, for JSON."""
        return asdict(self)


def recent_scores(member: PopulationMember, window: int) -> list[float]:
    """Return the latest finite evaluations of a member since its last copy.

    :param window: at most this many.
    """
    own = [entry["scores"] for entry in member.history if entry["generation"] == member.generation]
    return [score for scores in own for score in scores if score is not None][-window:]


def member_seed(population_seed: int, member_id: int, generation: int) -> int:
    """Return the random seed of a member, in [0, 2^32). It changes with each copy: copies must not repeat their source."""
    return int(np.random.SeedSequence([population_seed, member_id, generation]).generate_state(1)[0])
