"""All members in this process, one after the other. The reference for every other engine."""

from collections import deque
from collections.abc import Callable, Sequence

from tailguard.population.engines.driver import Engine
from tailguard.population.learner import Learner, LearnerFactory
from tailguard.population.scheduler import PBTScheduler, Round
from tailguard.population.store import MemoryStore, Store
from tailguard.population.worker import Adopt, Answer, Job, Worker


class SerialExecutor:
    """Members who wait for their turn."""

    def __init__(self, members: int, factory: LearnerFactory, store: Store) -> None:
        self.seats = [Worker(member_id, factory, store) for member_id in range(members)]
        self._queue: deque[tuple[int, Sequence[Job]]] = deque()

    def submit(self, member_id: int, jobs: Sequence[Job]) -> None:
        """Queue up; a copy, which takes no time and is waited for, goes first."""
        if isinstance(jobs[-1], Adopt):
            self._queue.appendleft((member_id, jobs))
        else:
            self._queue.append((member_id, jobs))

    def wait(self, timeout: float | None) -> list[tuple[int, Answer]]:
        """Whose turn it is does its jobs now."""
        member_id, jobs = self._queue.popleft()
        return [(member_id, self.seats[member_id].perform(jobs))]

    def close(self) -> None:
        """Nothing is open."""


class SerialEngine(Engine):
    """Trains a population in this process.

    :param scheduler: decides.
    :param factory: makes the learner of a member; also the new one for a member that has died.
    :param store: where states lie; None keeps them in memory.
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
        crew = SerialExecutor(len(scheduler.members), factory, store)
        super().__init__(scheduler, crew, store, on_round=on_round)
        self._seats = crew.seats

    @property
    def learners(self) -> list[Learner | None]:
        """The learner of each member; None for one that has not begun."""
        return [seat.learner for seat in self._seats]
