"""Worker processes: the one place where Tailguard starts processes of its own.

They are spawned, never forked (a fork would copy the locks of its parent's threads), compute with one thread, leave Ctrl-C to
their parent, and end when it ends, however it ends.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from logging import LogRecord
from multiprocessing.connection import Connection, wait
from typing import Any

from tailguard.parallel.logs import collect_logs, forward_logs
from tailguard.parallel.outcomes import Crashed, Lost
from tailguard.parallel.threads import one_thread_in_children

GRACE_SECONDS = 5.0  # between asking a process to end and killing it
# Answers a request; may tell the parent about its progress meanwhile.
Tell = Callable[[Any], None]
Handler = Callable[[Any, Tell], Any]


@dataclass(frozen=True)
class Started:
    """The worker has begun to answer a request."""


@dataclass(frozen=True)
class Told:
    """The worker tells something while it works."""

    value: Any


@dataclass(frozen=True)
class Returned:
    """The answer to a request."""

    value: Any
    logs: list[LogRecord] = field(default_factory=list)


Message = Started | Told | Returned | Crashed


class WorkerProcess:
    """A process that answers requests one after the other.

    :param make_handler: called in the process with the arguments; returns what answers requests. It is pickled, so it must be
        importable by name.
    :param arguments: pickled, too.
    """

    def __init__(self, make_handler: Callable[..., Handler], arguments: tuple[Any, ...]) -> None:
        self._has_started = False
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with one_thread_in_children():
            self.process.start()
        theirs.close()  # or the end of the process would not break the connection
        # Not as arguments of the process: multiprocessing sends those through a pipe of which it holds both ends, and waits
        # forever for a process that dies before it reads them. And so the process can follow its parent before it imports much.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send((make_handler, arguments))

    @property
    def pid(self) -> int | None:
        """The process id."""
        return self.process.pid

    def send(self, request: Any) -> None:
        """Send a request. If the process has died, receiving the answer will say so."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(request)

    def receive(self) -> Message | Lost:
        """Return the next message; logs that come with it are logged here."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):  # it has ended, perhaps in the middle of a message
            self.process.join()
            return Lost(f"its process ended with exit code {self.process.exitcode}{self._advice()}")
        self._has_started = True
        if isinstance(message, Returned):
            forward_logs(message.logs)
        return message

    def _advice(self) -> str:
        """Return what to do about a process that has ended with an error before it began: it imports the script of the user."""
        failed = not self._has_started and self.process.exitcode == 1
        return ' before it began: a script needs `if __name__ == "__main__":` around what it calls' if failed else ""

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def close(self) -> None:
        """Close the connection, which ends a process that waits for requests; one that does not end is killed."""
        self.connection.close()
        self.process.join(GRACE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def cores() -> int:
    """Return the number of cores that this process may use, or else of the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _serve(connection: Connection) -> None:
    """Answer requests until the parent closes the connection or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        make_handler, arguments = connection.recv()
    except (EOFError, OSError):  # the parent has ended, perhaps in the middle of a message
        return
    handle = make_handler(*arguments)
    while True:
        try:
            request = connection.recv()
            connection.send(Started())
        except (EOFError, OSError):
            return
        with collect_logs() as logs:
            try:
                answer: Message = Returned(handle(request, lambda value: connection.send(Told(value))), logs)
            except (BrokenPipeError, ConnectionResetError):  # nobody to tell
                return
            except Exception:
                connection.send(Crashed(traceback.format_exc()))
                raise
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def _end_with_parent() -> None:
    """End this process when its parent ends, also by SIGKILL: nobody is left to take what it computes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
