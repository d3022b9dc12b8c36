"""What a member is told to do, and the one place where it does it, in whatever process that is."""

from collections.abc import Sequence
from dataclasses import dataclass

from tailguard.population.config import Value
from tailguard.population.learner import Learner, LearnerFactory, MemberFailed, Scores
from tailguard.population.store import States


@dataclass(frozen=True)
class Make:
    """Sit down a new learner."""

    hyperparams: dict[str, Value]
    seed: int


@dataclass(frozen=True)
class Restore:
    """Be what was saved under this name."""

    checkpoint: str


@dataclass(frozen=True)
class Adopt:
    """Become a copy of what was saved under this name."""

    checkpoint: str
    hyperparams: dict[str, Value]
    seed: int


@dataclass(frozen=True)
class Train:
    """Train, be scored, and save the result under this name."""

    steps: int
    checkpoint: str


Job = Make | Restore | Adopt | Train


@dataclass(frozen=True)
class Done:
    """All jobs were done; the scores are those of the last one, if it has any."""

    scores: Scores = None


@dataclass(frozen=True)
class Failed:
    """The learner could not do it and has said so."""

    reason: str


@dataclass(frozen=True)
class Lost:
    """The process or the machine of the member is gone."""

    reason: str


@dataclass(frozen=True)
class Hindered:
    """The machine has not let the learner do it: a full disk, a file that cannot be read. The learner is not to blame."""

    reason: str


@dataclass(frozen=True)
class Crashed:
    """The learner has run into a bug."""

    trace: str


Answer = Done | Failed | Hindered | Lost | Crashed


class Worker:
    """The learner of one member, and the store that its states come from and go to.

    :param member_id: whose.
    :param factory: makes learners.
    :param store: of all members.
    """

    def __init__(self, member_id: int, factory: LearnerFactory, store: States) -> None:
        self.member_id = member_id
        self._factory = factory
        self._store = store
        self.learner: Learner | None = None

    def perform(self, jobs: Sequence[Job]) -> Done | Failed | Hindered:
        """Do one job after the other, as far as the learner can."""
        scores: Scores = None
        try:
            for job in jobs:
                scores = self._do(job)
        except MemberFailed as error:
            return Failed(str(error))
        except OSError as error:
            return Hindered(str(error))
        return Done(scores)

    def _do(self, job: Job) -> Scores:
        if isinstance(job, Make):
            self.learner = self._factory(self.member_id, job.hyperparams, job.seed)
            return None
        if self.learner is None:
            raise RuntimeError(f"member {self.member_id} must be made before it can do {job}")
        if isinstance(job, Restore):
            self.learner.load(self._store.read(job.checkpoint))
        elif isinstance(job, Adopt):
            self.learner.adopt(self._store.read(job.checkpoint), job.hyperparams, job.seed)
        else:
            self.learner.train(job.steps)
            scores = self.learner.score()
            self._store.write(job.checkpoint, self.learner.save())
            return scores
        return None
