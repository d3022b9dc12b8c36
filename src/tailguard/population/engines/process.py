"""Every member in a process of its own on this machine, with one thread each."""

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
from tailguard.population.learner import LearnerFactory
from tailguard.population.log_forwarding import collected, relay
from tailguard.population.scheduler import PBTScheduler, Round
from tailguard.population.store import Store
from tailguard.population.worker import Adopt, Answer, Crashed, Job, Lost, Make, Worker
from tailguard.validation import require

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
GRACE_SECONDS = 5.0  # between asking a process to end and making it
POLL_SECONDS = 0.5  # between looks at the clock while a time limit runs


@dataclass
class _ProcessHandle:
    """A process and the line to it.

    :param since: when it began what it is doing; None while it has not.
    """

    process: SpawnProcess
    line: Connection
    since: float | None = None


class ProcessExecutor:
    """Members in processes. They are started afresh, never forked: a fork would copy the threads' locks of its parent.

    :param factory: makes learners; it is pickled, so it must be found by its name.
    :param store: of all members; it is pickled, too.
    :param parallel: members that work at the same time; None takes one per core.
    :param time_limit: seconds for one submission, after which a member counts as hanging and is lost; the start of its process
        does not count. None: no limit.
    """

    def __init__(self, factory: LearnerFactory, store: Store, parallel: int | None, time_limit: float | None) -> None:
        parallel = _cores() if parallel is None else parallel
        require(parallel >= 1, "parallel", parallel, "at least 1")
        require(time_limit is None or time_limit > 0.0, "time_limit", time_limit, "above 0, or None")
        self._factory = factory
        self._store = store
        self._parallel = parallel
        self._time_limit = time_limit
        self._desks: dict[int, _ProcessHandle] = {}
        self._queue: deque[tuple[int, Sequence[Job]]] = deque()
        self._running: set[int] = set()
        self._context = multiprocessing.get_context("spawn")

    def submit(self, member_id: int, jobs: Sequence[Job]) -> None:
        """Queue up until a core is free; a copy, which takes no time and is waited for, begins at once."""
        if isinstance(jobs[-1], Adopt):
            self._start(member_id, jobs)
        else:
            self._queue.append((member_id, jobs))
            self._feed()

    def wait(self, timeout: float | None) -> list[tuple[int, Answer]]:
        """Answers, and losses: a line that breaks, or a member that hangs."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._feed()
            lines = {self._desks[member_id].line: member_id for member_id in self._running}
            arrived = [(lines[line], self._heard(lines[line])) for line in self._arrived(list(lines), end)]
            answers = [(member_id, answer) for member_id, answer in arrived if answer is not None]
            self._running.difference_update(member_id for member_id, _ in answers)
            answers += self._hanging()
            if answers or (end is not None and time.monotonic() >= end):
                return sorted(answers, key=lambda answer: answer[0])

    def pid(self, member_id: int) -> int | None:
        """The process of a member; None if it has none."""
        desk = self._desks.get(member_id)
        return None if desk is None else desk.process.pid

    def close(self) -> None:
        """Hang up; a process that does not go is made to."""
        for member_id, desk in self._desks.items():
            desk.line.close()
            if member_id in self._running:  # in the middle of something that nobody waits for any more
                desk.process.kill()
        for desk in self._desks.values():
            _end(desk.process)
        self._desks.clear()
        self._running.clear()
        self._queue.clear()

    def _feed(self) -> None:
        while self._queue and len(self._running) < self._parallel:
            self._start(*self._queue.popleft())

    def _start(self, member_id: int, jobs: Sequence[Job]) -> None:
        if isinstance(jobs[0], Make):
            self._seat(member_id)
        desk = self._desks[member_id]
        desk.since = None
        self._running.add(member_id)
        # One that died while nobody was looking cannot be told; its line says so when it is asked for an answer.
        with suppress(BrokenPipeError, ConnectionResetError):
            desk.line.send(list(jobs))

    def _seat(self, member_id: int) -> None:
        old = self._desks.pop(member_id, None)
        if old is not None:
            old.line.close()
            _end(old.process)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, member_id, self._factory, self._store), daemon=True)
        with _one_thread():
            process.start()
        theirs.close()  # or the line would never break
        self._desks[member_id] = _ProcessHandle(process, ours)

    def _arrived(self, lines: list[Connection], end: float | None) -> list[Connection]:
        left = None if end is None else max(end - time.monotonic(), 0.0)
        if self._time_limit is not None:
            left = POLL_SECONDS if left is None else min(left, POLL_SECONDS)
        return [line for line in wait_for(lines, left) if isinstance(line, Connection)]

    def _heard(self, member_id: int) -> Answer | None:
        """The answer of a member; None if it says that it begins."""
        desk = self._desks[member_id]
        try:
            message: tuple[Answer, list[LogRecord]] | None = desk.line.recv()
        except (EOFError, ConnectionResetError):
            desk.process.join()
            return Lost(f"its process ended with exit code {desk.process.exitcode}")
        if message is None:
            desk.since = time.monotonic()
            return None
        answer, records = message
        relay(records)
        return answer

    def _hanging(self) -> list[tuple[int, Answer]]:
        if self._time_limit is None:
            return []
        begun = {member_id: self._desks[member_id].since for member_id in self._running}
        end = time.monotonic() - self._time_limit
        late = [member_id for member_id, since in begun.items() if since is not None and since < end]
        for member_id in late:
            self._desks[member_id].process.kill()
            self._running.remove(member_id)
        return [(member_id, Lost(f"no answer within {self._time_limit:g} s")) for member_id in late]


class ProcessEngine(Engine):
    """Trains a population on this machine, every member in a process of its own.

    :param scheduler: decides.
    :param factory: makes the learner of a member, in its process; it is pickled, so it must be found by its name.
    :param store: where states lie, for all processes: usually a :class:`~tailguard.population.files.FileStore`.
    :param parallel: members that train at the same time; None takes one per core.
    :param time_limit: seconds for one interval, after which a member counts as hanging and is made again. None: no limit.
    :param max_losses: see :class:`~tailguard.population.engines.driver.Engine`, as are the rest.
    :param patience: as there.
    :param on_round: as there.
    """

    crew: ProcessExecutor

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
        crew = ProcessExecutor(factory, store, parallel, time_limit)
        super().__init__(scheduler, crew, store, max_losses=max_losses, patience=patience, on_round=on_round)


def _serve(line: Connection, member_id: int, factory: LearnerFactory, store: Store) -> None:
    """The life of a member's process: it ends when the driver hangs up or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver decides what follows from it
    seat = Worker(member_id, factory, store)
    while True:
        try:
            jobs = line.recv()
            line.send(None)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return
        with collected() as records:
            try:
                answer: Answer = seat.perform(jobs)
            except Exception:
                line.send((Crashed(traceback.format_exc()), records))
                raise
        try:
            line.send((answer, records))
        except BrokenPipeError:
            return


def _cores() -> int:
    """The cores that this process may use, where the system can say."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _end(process: SpawnProcess) -> None:
    process.join(GRACE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Libraries read these when they are loaded, so a child must find them in its environment."""
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
