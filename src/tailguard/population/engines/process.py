"""The process engine: every member in a process of its own on this machine, with one thread each."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for

from tailguard.parallel.outcomes import Crashed, Lost
from tailguard.parallel.worker import Handler, Returned, Started, Tell, WorkerProcess, cores
from tailguard.population.engines.driver import Engine
from tailguard.population.member import LearnerFactory
from tailguard.population.scheduler import PBTScheduler, Round
from tailguard.population.store import Store
from tailguard.population.worker import CopyFrom, Create, JobResult, Worker, WorkerJob
from tailguard.validation import require

POLL_SECONDS = 0.5  # between looks at the clock while a time limit runs


class ProcessExecutor:
    """Runs members in processes (:class:`tailguard.parallel.worker.WorkerProcess`).

    :param factory: makes learners; it is pickled, so it must be importable by name.
    :param store: holds the states of all members; it is pickled, too.
    :param parallel: members that work at the same time; None takes one per core.
    :param time_limit: seconds for one submission, after which a member counts as hanging and is lost; the start of its process
        is not included. None: no limit.
    """

    keeps_learners = True

    def __init__(self, factory: LearnerFactory, store: Store, parallel: int | None, time_limit: float | None) -> None:
        parallel = cores() if parallel is None else parallel
        require(parallel >= 1, "parallel", parallel, "at least 1")
        require(time_limit is None or time_limit > 0.0, "time_limit", time_limit, "above 0, or None")
        self._factory = factory
        self._store = store
        self._parallel = parallel
        self._time_limit = time_limit
        self._workers: dict[int, WorkerProcess] = {}
        self._since: dict[int, float] = {}  # when the running members have begun their present jobs
        self._queue: deque[tuple[int, Sequence[WorkerJob]]] = deque()
        self._running: set[int] = set()

    def submit(self, member_id: int, jobs: Sequence[WorkerJob]) -> None:
        """Queue jobs until a core is free; a copy, which takes no time and is waited for, starts at once."""
        if isinstance(jobs[-1], CopyFrom):
            self._start(member_id, jobs)
        else:
            self._queue.append((member_id, jobs))
            self._start_queued()

    def wait(self, timeout: float | None) -> list[tuple[int, JobResult]]:
        """Return results, and losses: a connection that breaks, or a member that hangs."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._start_queued()
            members = {self._workers[member_id].connection: member_id for member_id in self._running}
            readable = [members[connection] for connection in self._readable(list(members), end)]
            received = [(member_id, self._receive(member_id)) for member_id in readable]
            results = [(member_id, result) for member_id, result in received if result is not None]
            self._running.difference_update(member_id for member_id, _ in results)
            results += self._kill_hanging()
            if results or (end is not None and time.monotonic() >= end):
                return sorted(results, key=lambda result: result[0])

    def pid(self, member_id: int) -> int | None:
        """Return the process id of a member; None if it has no process."""
        worker = self._workers.get(member_id)
        return None if worker is None else worker.pid

    def alive(self, machine: str) -> bool:
        """Return True: there is one machine."""
        return True

    def close(self) -> None:
        """Close the connections; kill processes that do not end by themselves."""
        for member_id in self._running:  # its result is not needed any more
            self._workers[member_id].kill()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._running.clear()
        self._queue.clear()

    def _start_queued(self) -> None:
        while self._queue and len(self._running) < self._parallel:
            self._start(*self._queue.popleft())

    def _start(self, member_id: int, jobs: Sequence[WorkerJob]) -> None:
        if isinstance(jobs[0], Create):
            self._start_process(member_id)
        self._since.pop(member_id, None)
        self._running.add(member_id)
        self._workers[member_id].send(list(jobs))

    def _start_process(self, member_id: int) -> None:
        old = self._workers.pop(member_id, None)
        if old is not None:
            old.close()
        self._workers[member_id] = WorkerProcess(_member_handler, (member_id, self._factory, self._store))

    def _readable(self, connections: list[Connection], end: float | None) -> list[Connection]:
        left = None if end is None else max(end - time.monotonic(), 0.0)
        if self._time_limit is not None:
            left = POLL_SECONDS if left is None else min(left, POLL_SECONDS)
        return [connection for connection in wait_for(connections, left) if isinstance(connection, Connection)]

    def _receive(self, member_id: int) -> JobResult | None:
        """Return the result of a member; None for the message that it has started."""
        message = self._workers[member_id].receive()
        if isinstance(message, Started):
            self._since[member_id] = time.monotonic()
        if isinstance(message, Returned):
            result: JobResult = message.value
            return result
        return message if isinstance(message, Lost | Crashed) else None

    def _kill_hanging(self) -> list[tuple[int, JobResult]]:
        """Kill the members that exceed the time limit and return their losses."""
        if self._time_limit is None:
            return []
        end = time.monotonic() - self._time_limit
        late = [member_id for member_id in self._running if self._since.get(member_id, end) < end]
        for member_id in late:
            self._workers[member_id].kill()
            self._running.remove(member_id)
        return [(member_id, Lost(f"no result within {self._time_limit:g} s")) for member_id in late]


class ProcessEngine(Engine):
    """Trains a population on this machine, every member in a process of its own.

    :param scheduler: decides.
    :param factory: makes the learner of a member, in its process; it is pickled, so it must be importable by name.
    :param store: holds the states, for all processes: usually a :class:`~tailguard.population.store.FileStore`.
    :param parallel: members that train at the same time; None takes one per core.
    :param time_limit: seconds for one interval, after which a member counts as hanging and is created again. None: no limit.
    :param max_losses: see :class:`~tailguard.population.engines.driver.Engine`.
    :param patience: see there.
    :param on_round: see there.
    """

    executor: ProcessExecutor

    def __init__(
        self,
        scheduler: PBTScheduler,
        factory: LearnerFactory,
        store: Store,
        *,
        parallel: int | None = None,
        time_limit: float | None = None,
        max_losses: int = 2,
        patience: float | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        executor = ProcessExecutor(factory, store, parallel, time_limit)
        super().__init__(scheduler, executor, store, max_losses=max_losses, patience=patience, on_round=on_round)


def _member_handler(member_id: int, factory: LearnerFactory, store: Store) -> Handler:
    worker = Worker(member_id, factory, store)

    def perform(jobs: Sequence[WorkerJob], tell: Tell) -> JobResult:
        return worker.perform(jobs)

    return perform
