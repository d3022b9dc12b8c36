"""What a population needs from those who train."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tailguard.population.config import Value

Scores = float | Sequence[float] | None


class MemberFailed(RuntimeError):
    """Raised by a learner that cannot go on, or that refuses a copy. The population continues without it and replaces it."""


class Learner(Protocol):
    """Something that trains, is scored, and whose whole state can be moved.

    Any method may raise :class:`MemberFailed`; every other exception is a bug and ends the run.
    """

    def train(self, steps: int) -> None:
        """Train on.

        :param steps: how far, in the unit of ``perturbation_interval``.
        """

    def score(self) -> Scores:
        """Evaluate: one number, or one per evaluation (episode, seed, span), which the t-test can use. None if there is none.

        For a fair race evaluate all members on the same data, and never on what the final verdict is measured on.
        """

    def save(self) -> Any:
        """The whole state, detached from the learner; or where it was written."""

    def load(self, state: Any) -> None:
        """Be exactly what :meth:`save` saw, random numbers included: a run that resumes equals one that never stopped."""

    def adopt(self, state: Any, hyperparams: Mapping[str, Value], seed: int) -> None:
        """Become a copy of another member with hyperparameters and randomness of one's own. All or nothing: a failure leaves
        everything as it was.

        :param state: what the source's :meth:`save` returned.
        :param hyperparams: in force from now on.
        :param seed: of the copy's own randomness, in [0, 2^32).
        """


# Makes the learner of a member: (member_id, hyperparams, seed).
LearnerFactory = Callable[[int, Mapping[str, Value], int], Learner]
