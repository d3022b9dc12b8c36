"""End what a process leaves behind: everything that it has started, directly or not, when it is gone, however it ended.

Workers of Tailguard follow their parent by themselves (worker.py). The processes of a Ray cluster do so only once they have
begun to watch each other: a driver that is killed while its cluster starts leaves some of them. So a small process beside the
driver waits for its end, and ends whatever carries its mark then. The mark is a variable of the environment, which every
process inherits from the one that starts it, also when that one has gone.

This file is also the program of that process: it imports the standard library only, so that it is there in an instant.
"""

import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "TAILGUARD_LEFT_BY"
GRACE_SECONDS = 5.0  # in which processes may end by themselves
QUIET_SECONDS = 3.0  # without any of them, after which none can be starting others


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


def marked(mark: str) -> list[int]:
    """Return the processes that carry a mark."""
    found, line = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile, or belongs to somebody else
                if line in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def reap(mark: str) -> None:
    """Wait for the end of the standard input; give what carries the mark time to end, and kill it after that."""
    sys.stdin.buffer.read()
    now = time.monotonic()
    patience, quiet = now + GRACE_SECONDS, now + QUIET_SECONDS
    while now < quiet:
        left = marked(mark)
        for pid in left if now > patience else []:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        now = time.monotonic()
        quiet = now + QUIET_SECONDS if left else quiet


if __name__ == "__main__":
    reap(sys.argv[1])
