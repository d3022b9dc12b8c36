"""Workers: the jobs of a member, their results, and the class that does them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tailguard.parallel.outcomes import Crashed, Lost
from tailguard.population.config import Value
from tailguard.population.member import Learner, LearnerFactory, MemberFailed, Scores
from tailguard.population.store import StateStore


@dataclass(frozen=True)
class Create:
    """The job to create a new learner."""

    hyperparams: dict[str, Value]
    seed: int


@dataclass(frozen=True)
class Restore:
    """The job to load the state that was saved under this name."""

    checkpoint: str


@dataclass(frozen=True)
class CopyFrom:
    """The job to become a copy of the state that was saved under this name."""

    checkpoint: str
    hyperparams: dict[str, Value]
    seed: int


@dataclass(frozen=True)
class Train:
    """The job to train, to be scored, and to save the result under this name."""

    steps: int
    checkpoint: str


WorkerJob = Create | Restore | CopyFrom | Train


@dataclass(frozen=True)
class Done:
    """The result of jobs that were all done; the scores are those of the last job, if it has any."""

    scores: Scores = None


@dataclass(frozen=True)
class Failed:
    """The result when the learner raised :class:`MemberFailed`."""

    reason: str


@dataclass(frozen=True)
class IOFailed:
    """The result of an error of the operating system, such as a full disk. The learner is not at fault."""

    reason: str


JobResult = Done | Failed | IOFailed | Lost | Crashed


class Worker:
    """Does the jobs of one member.

    :param member_id: number of the member.
    :param factory: makes its learner.
    :param store: holds the states of all members.
    """

    def __init__(self, member_id: int, factory: LearnerFactory, store: StateStore) -> None:
        self.member_id = member_id
        self._factory = factory
        self._store = store
        self.learner: Learner | None = None

    def perform(self, jobs: Sequence[WorkerJob]) -> Done | Failed | IOFailed:
        """Do the jobs in order until one of them fails."""
        scores: Scores = None
        try:
            for job in jobs:
                scores = self._do(job)
        except MemberFailed as error:
            return Failed(str(error))
        except OSError as error:
            return IOFailed(str(error))
        return Done(scores)

    def _do(self, job: WorkerJob) -> Scores:
        if isinstance(job, Create):
            self.learner = self._factory(self.member_id, job.hyperparams, job.seed)
            return None
        if self.learner is None:
            raise RuntimeError(f"member {self.member_id} must be created before it can do {job}")
        if isinstance(job, Restore):
            self.learner.load(self._store.read(job.checkpoint))
        elif isinstance(job, CopyFrom):
            self.learner.copy_from(self._store.read(job.checkpoint), job.hyperparams, job.seed)
        else:
            self.learner.train(job.steps)
            scores = self.learner.score()
            self._store.write(job.checkpoint, self.learner.save())
            return scores
        return None
