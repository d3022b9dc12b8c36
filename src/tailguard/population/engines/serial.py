"""The serial engine: all members in this process, one after the other. The reference for every other engine."""

from collections import deque
from collections.abc import Callable, Sequence

from tailguard.population.engines.driver import Engine
from tailguard.population.member import Learner, LearnerFactory
from tailguard.population.scheduler import PBTScheduler, Round
from tailguard.population.store import MemoryStore, Store
from tailguard.population.worker import CopyFrom, JobResult, Worker, WorkerJob


class SerialExecutor:
    """Runs jobs in this process, in the order of their submission.

    :param members: size of the population.
    :param factory: makes learners.
    :param store: holds the states of all members.
    """

    keeps_learners = True

    def __init__(self, members: int, factory: LearnerFactory, store: Store) -> None:
        self.workers = [Worker(member_id, factory, store) for member_id in range(members)]
        self._queue: deque[tuple[int, Sequence[WorkerJob]]] = deque()

    def submit(self, member_id: int, jobs: Sequence[WorkerJob]) -> None:
        """Queue jobs; a copy, which takes no time and is waited for, goes first."""
        if isinstance(jobs[-1], CopyFrom):
            self._queue.appendleft((member_id, jobs))
        else:
            self._queue.append((member_id, jobs))

    def wait(self, timeout: float | None) -> list[tuple[int, JobResult]]:
        """Run the first jobs of the queue and return their result."""
        member_id, jobs = self._queue.popleft()
        return [(member_id, self.workers[member_id].perform(jobs))]

    def alive(self, machine: str) -> bool:
        """Return True: there is one machine."""
        return True

    def close(self) -> None:
        """Do nothing: there are no processes to stop."""


class SerialEngine(Engine):
    """Trains a population in this process.

    :param scheduler: decides.
    :param factory: makes the learner of a member, and again after it has died.
    :param store: holds the states; None keeps them in memory.
    :param on_round: called after every decision that was carried out.
    """

    def __init__(
        self,
        scheduler: PBTScheduler,
        factory: LearnerFactory,
        store: Store | None = None,
        *,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        store = MemoryStore() if store is None else store
        executor = SerialExecutor(len(scheduler.members), factory, store)
        super().__init__(scheduler, executor, store, on_round=on_round)
        self._workers = executor.workers

    @property
    def learners(self) -> list[Learner | None]:
        """The learner of each member; None for a member that has not started."""
        return [worker.learner for worker in self._workers]
