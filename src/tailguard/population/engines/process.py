"""The process engine: every member in a process of its own on this machine, with one thread each."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from logging import LogRecord
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import SpawnProcess

from tailguard.population.engines.driver import Engine
from tailguard.population.member import LearnerFactory
from tailguard.population.scheduler import PBTScheduler, Round
from tailguard.population.store import Store
from tailguard.population.worker import (
    CopyFrom,
    Crashed,
    Create,
    JobResult,
    Lost,
    Worker,
    WorkerJob,
    collect_logs,
    forward_logs,
)
from tailguard.validation import require

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
GRACE_SECONDS = 5.0  # between asking a process to end and killing it
POLL_SECONDS = 0.5  # between looks at the clock while a time limit runs


@dataclass
class _ProcessHandle:
    """A process and the connection to it.

    :param since: time at which it started its present jobs; None before.
    """

    process: SpawnProcess
    connection: Connection
    since: float | None = None


class ProcessExecutor:
    """Runs members in processes. They are spawned, never forked: a fork would copy the locks of its parent's threads.

    :param factory: makes learners; it is pickled, so it must be importable by name.
    :param store: holds the states of all members; it is pickled, too.
    :param parallel: members that work at the same time; None takes one per core.
    :param time_limit: seconds for one submission, after which a member counts as hanging and is lost; the start of its process
        is not included. None: no limit.
    """

    def __init__(self, factory: LearnerFactory, store: Store, parallel: int | None, time_limit: float | None) -> None:
        parallel = _cores() if parallel is None else parallel
        require(parallel >= 1, "parallel", parallel, "at least 1")
        require(time_limit is None or time_limit > 0.0, "time_limit", time_limit, "above 0, or None")
        self._factory = factory
        self._store = store
        self._parallel = parallel
        self._time_limit = time_limit
        self._handles: dict[int, _ProcessHandle] = {}
        self._queue: deque[tuple[int, Sequence[WorkerJob]]] = deque()
        self._running: set[int] = set()
        self._context = multiprocessing.get_context("spawn")

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
            members = {self._handles[member_id].connection: member_id for member_id in self._running}
            readable = [members[connection] for connection in self._readable(list(members), end)]
            received = [(member_id, self._receive(member_id)) for member_id in readable]
            results = [(member_id, result) for member_id, result in received if result is not None]
            self._running.difference_update(member_id for member_id, _ in results)
            results += self._kill_hanging()
            if results or (end is not None and time.monotonic() >= end):
                return sorted(results, key=lambda result: result[0])

    def pid(self, member_id: int) -> int | None:
        """Return the process id of a member; None if it has no process."""
        handle = self._handles.get(member_id)
        return None if handle is None else handle.process.pid

    def close(self) -> None:
        """Close the connections; kill processes that do not end by themselves."""
        for member_id, handle in self._handles.items():
            handle.connection.close()
            if member_id in self._running:  # its result is not needed any more
                handle.process.kill()
        for handle in self._handles.values():
            _end(handle.process)
        self._handles.clear()
        self._running.clear()
        self._queue.clear()

    def _start_queued(self) -> None:
        while self._queue and len(self._running) < self._parallel:
            self._start(*self._queue.popleft())

    def _start(self, member_id: int, jobs: Sequence[WorkerJob]) -> None:
        if isinstance(jobs[0], Create):
            self._start_process(member_id)
        handle = self._handles[member_id]
        handle.since = None
        self._running.add(member_id)
        # A process that has died meanwhile cannot be sent anything; receiving its result will report the loss.
        with suppress(BrokenPipeError, ConnectionResetError):
            handle.connection.send(list(jobs))

    def _start_process(self, member_id: int) -> None:
        old = self._handles.pop(member_id, None)
        if old is not None:
            old.connection.close()
            _end(old.process)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, member_id, self._factory, self._store), daemon=True)
        with _one_thread():
            process.start()
        theirs.close()  # or the end of the process would not break the connection
        self._handles[member_id] = _ProcessHandle(process, ours)

    def _readable(self, connections: list[Connection], end: float | None) -> list[Connection]:
        left = None if end is None else max(end - time.monotonic(), 0.0)
        if self._time_limit is not None:
            left = POLL_SECONDS if left is None else min(left, POLL_SECONDS)
        return [connection for connection in wait_for(connections, left) if isinstance(connection, Connection)]

    def _receive(self, member_id: int) -> JobResult | None:
        """Return the result of a member; None for the message that it has started."""
        handle = self._handles[member_id]
        try:
            message: tuple[JobResult, list[LogRecord]] | None = handle.connection.recv()
        except (EOFError, ConnectionResetError):
            handle.process.join()
            return Lost(f"its process ended with exit code {handle.process.exitcode}")
        if message is None:
            handle.since = time.monotonic()
            return None
        result, records = message
        forward_logs(records)
        return result

    def _kill_hanging(self) -> list[tuple[int, JobResult]]:
        """Kill the members that exceed the time limit and return their losses."""
        if self._time_limit is None:
            return []
        started = {member_id: self._handles[member_id].since for member_id in self._running}
        end = time.monotonic() - self._time_limit
        late = [member_id for member_id, since in started.items() if since is not None and since < end]
        for member_id in late:
            self._handles[member_id].process.kill()
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


def _serve(connection: Connection, member_id: int, factory: LearnerFactory, store: Store) -> None:
    """Run a member's process until the driver closes the connection or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver handles it
    worker = Worker(member_id, factory, store)
    while True:
        try:
            jobs = connection.recv()
            connection.send(None)  # started
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return
        with collect_logs() as records:
            try:
                result: JobResult = worker.perform(jobs)
            except Exception:
                connection.send((Crashed(traceback.format_exc()), records))
                raise
        try:
            connection.send((result, records))
        except BrokenPipeError:
            return


def _cores() -> int:
    """Return the number of cores that this process may use, or else of the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _end(process: SpawnProcess) -> None:
    process.join(GRACE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Set one thread in the environment of a child: libraries read it when they are loaded."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
