"""End what a process leaves behind: everything that it has started, directly or not, when it is gone, however it ended.

Workers of Tailguard follow their parent by themselves (worker.py). The processes of a Ray cluster do so only once they have
begun to watch each other: a driver that is killed while its cluster starts leaves some of them. So a small process beside the
driver waits for its end, and ends whatever carries its mark then. The mark is a variable of the environment, which every
process inherits from the one that starts it, also when that one has gone. A process that writes a title over its environment,
as Ray's do, is known as the child of one that carries the mark: so it looks at them while the driver lives.

This file is also the program of that process: it imports the standard library only, so that it is there in an instant.
"""

import os
import select
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

MARK = "TAILGUARD_LEFT_BY"
GRACE_SECONDS = 5.0  # in which processes may end by themselves
QUIET_SECONDS = 3.0  # without any of them, after which none can be starting others
LOOK_SECONDS = 2.0  # between two looks at the processes of a driver that lives


@contextmanager
def reaped() -> Iterator[None]:
    """Mark the processes that are started inside this context: they are ended when this process is gone. Linux only."""
    if sys.platform != "linux" or MARK in os.environ:  # inside of a marked process they carry the mark of that one
        yield
        return
    mark = uuid.uuid4().hex
    # Only the end of this process closes the pipe: nobody else has this end of it. In a session of its own, the other process
    # is out of reach of Ctrl-C. It says nothing, and whoever reads what this one says must not wait for it.
    theirs, _ = os.pipe()
    command = [sys.executable, "-I", "-S", __file__, mark]
    silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    files = [(os.POSIX_SPAWN_DUP2, theirs, 0), *silent]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=files, setsid=True)
    os.close(theirs)
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]


def family(mark: str, known: Mapping[int, int] = MappingProxyType({})) -> dict[int, int]:
    """Return the processes that carry a mark, those that were known before, and all of their children, that still run.

    :param known: the result of the last call: when each began, since numbers of processes are used again.
    """
    parents, found = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                state, parent, *fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                pid, began = int(folder.name), int(fields[17])
                if state not in (b"Z", b"X"):
                    parents[pid] = int(parent), began
                    if known.get(pid) == began or _carries(folder, mark):
                        found[pid] = began
    while children := {pid: began for pid, (parent, began) in parents.items() if parent in found and pid not in found}:
        found |= children
    return found


def _carries(folder: Path, mark: str) -> bool:
    with suppress(OSError):  # it has ended meanwhile, or belongs to somebody else
        return f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
    return False


def reap(mark: str) -> None:
    """Wait for the end of the standard input; give the family of a mark time to end, and kill it after that."""
    known = family(mark)
    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        known = family(mark, known)
    now = time.monotonic()
    patience, quiet = now + GRACE_SECONDS, now + QUIET_SECONDS
    while now < quiet:
        known = family(mark, known)
        for pid in known if now > patience else ():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        now = time.monotonic()
        quiet = now + QUIET_SECONDS if known else quiet


if __name__ == "__main__":
    reap(sys.argv[1])
