"""Independent tasks, run by an executor: in this process, in processes of this machine, or on a Ray cluster.

A task that is lost with its process or machine is started again, a bounded number of times. Executors differ in where they run
tasks, never in what comes out: tasks get everything as arguments, return everything as their result, and touch no file.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any, Protocol

from tailguard.parallel.outcomes import Crashed, Lost, count_losses
from tailguard.parallel.threads import one_thread
from tailguard.parallel.worker import Handler, Returned, Tell, Told, WorkerProcess
from tailguard.validation import require

logger = logging.getLogger(__name__)
MAX_LOSSES = 2
Reached = Callable[[str, float], None]


class Task(Protocol):
    """A piece of work; it is pickled."""

    @property
    def name(self) -> str:
        """Return the name in messages; no two tasks may have the same."""

    def work(self, shared: Any, reached: Callable[[float], None]) -> Any:
        """Return the result.

        :param shared: what all tasks have in common.
        :param reached: called now and then with the share of the work that is done.
        :raises ValueError: for what the user has to change. An :class:`OSError` counts as such; others are bugs.
        """


@dataclass(frozen=True)
class Done:
    """The result of a task."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """A task has raised an error that the user can do something about."""

    reason: str


Outcome = Done | Failed | Lost | Crashed


class TaskExecutor(Protocol):
    """Runs tasks, several at a time."""

    def capacity(self) -> int:
        """Return how many tasks can run now."""

    def start(self, task: Task) -> None:
        """Start a task; at most :meth:`capacity` are started at a time."""

    def wait(self, reached: Reached) -> list[tuple[str, Outcome]]:
        """Return names and outcomes of tasks that have ended; wait a moment if there are none.

        :param reached: called with the names of running tasks, and the share that is done.
        """

    def alive(self, machine: str) -> bool:
        """Return False for a machine that is gone."""

    def close(self) -> None:
        """Stop everything that runs."""


def run_tasks(
    tasks: Iterable[Task],
    executor: TaskExecutor,
    finished: Callable[[Task, Any], Iterable[Task]],
    reached: Reached,
    max_losses: int = MAX_LOSSES,
) -> None:
    """Run tasks until all are done; then, and also after an error or a signal, nothing runs any more.

    After a failure no other task is started, but those that run are finished.

    :param tasks: all that can be started at once, in this order.
    :param executor: closed at the end.
    :param finished: called with each task and its result, in the order in which they end; returns tasks that can start now.
    :param reached: called with the name of a task and the share of it that is done.
    :param max_losses: how often a task may be lost. Losses with the same machine count once.
    :raises ValueError: when a task failed, or was lost too often.
    :raises RuntimeError: when a task has a bug.
    """
    require(max_losses >= 0, "max_losses", max_losses, "at least 0")
    waiting: deque[Task] = deque(tasks)
    running: dict[str, Task] = {}
    losses: dict[str, list[Lost]] = {}
    failure: Exception | None = None
    try:
        while running or (waiting and failure is None):
            while waiting and failure is None and len(running) < executor.capacity():
                task = waiting.popleft()
                running[task.name] = task
                executor.start(task)
            for name, outcome in executor.wait(reached):
                task = running.pop(name)
                if isinstance(outcome, Done):
                    try:
                        waiting.extend(finished(task, outcome.value))
                    except OSError as error:  # its result cannot be kept
                        failure = error
                elif isinstance(outcome, Lost):
                    lost = losses.setdefault(name, [])
                    lost.append(outcome)
                    if count_losses(lost, executor.alive) > max_losses:
                        failure = ValueError(_lost_too_often(name, lost))
                    else:
                        logger.warning("%s: lost (%s); it starts again", name, outcome.reason)
                        waiting.appendleft(task)
                else:
                    failure = _error(name, outcome)
    finally:
        executor.close()
    if failure is not None:
        raise failure


def _lost_too_often(name: str, losses: list[Lost]) -> str:
    return (
        f"{name}: lost {len(losses)} times, at last {losses[-1].reason}; what is finished is kept, and the same command "
        "resumes. Exit code -9 is often a lack of RAM: fewer at the same time need less"
    )


def _error(name: str, outcome: Failed | Crashed) -> Exception:
    if isinstance(outcome, Failed):
        return ValueError(f"{name}: {outcome.reason}")
    return RuntimeError(f"{name} has a bug:\n{outcome.trace}")


def perform(task: Task, shared: Any, reached: Callable[[float], None]) -> Done | Failed:
    """Do a task where it was sent, with one thread."""
    try:
        with one_thread():
            return Done(task.work(shared, reached))
    except (ValueError, OSError) as error:
        return Failed(str(error))
    except MemoryError:
        return Failed("out of memory: fewer tasks at the same time need less, and so do smaller networks and data")


class SerialTasks:
    """Runs tasks in this process, one after the other.

    :param shared: what all tasks have in common.
    """

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._tasks: deque[Task] = deque()

    def capacity(self) -> int:
        """Return 1."""
        return 1

    def start(self, task: Task) -> None:
        """Queue a task."""
        self._tasks.append(task)

    def wait(self, reached: Reached) -> list[tuple[str, Outcome]]:
        """Do the task."""
        task = self._tasks.popleft()
        return [(task.name, perform(task, self._shared, lambda share: reached(task.name, share)))]

    def alive(self, machine: str) -> bool:
        """Return True: there is one machine."""
        return True

    def close(self) -> None:
        """Do nothing: nothing runs between two calls."""


class ProcessTasks:
    """Runs tasks in processes of this machine, which are started when they are needed.

    :param shared: what all tasks have in common; sent to each process once.
    :param processes: at the same time; at least 1.
    """

    def __init__(self, shared: Any, processes: int) -> None:
        require(processes >= 1, "processes", processes, "at least 1")
        self._shared, self._processes = shared, processes
        self._idle: list[WorkerProcess] = []
        self._busy: dict[str, WorkerProcess] = {}

    def capacity(self) -> int:
        """Return the number of processes."""
        return self._processes

    def start(self, task: Task) -> None:
        """Send a task to a process that has nothing to do, or to a new one."""
        worker = self._idle.pop() if self._idle else WorkerProcess(_task_handler, (self._shared,))
        self._busy[task.name] = worker
        worker.send(task)

    def wait(self, reached: Reached) -> list[tuple[str, Outcome]]:
        """Return outcomes; a connection that breaks is a loss."""
        names = {worker.connection: name for name, worker in self._busy.items()}
        outcomes: list[tuple[str, Outcome]] = []
        for connection in wait_for(list(names)):
            assert isinstance(connection, Connection)
            name = names[connection]
            message = self._busy[name].receive()
            if isinstance(message, Told):
                reached(name, message.value)
            elif isinstance(message, Returned):
                outcomes.append((name, message.value))
                self._idle.append(self._busy.pop(name))
            elif isinstance(message, Lost | Crashed):
                outcomes.append((name, message))
                self._busy.pop(name).close()
        return outcomes

    def alive(self, machine: str) -> bool:
        """Return True: there is one machine."""
        return True

    def pids(self) -> list[int | None]:
        """Return the process ids of the running tasks."""
        return [worker.pid for worker in self._busy.values()]

    def close(self) -> None:
        """End all processes; what they compute is not needed any more."""
        for worker in self._busy.values():
            worker.kill()
        for worker in [*self._busy.values(), *self._idle]:
            worker.close()
        self._busy.clear()
        self._idle.clear()


def _task_handler(shared: Any) -> Handler:
    def handle(task: Task, tell: Tell) -> Done | Failed:
        return perform(task, shared, tell)

    return handle
