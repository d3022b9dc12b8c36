"""Locks on folders: one process works in a folder at a time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailguard.io.atomic import make_folder
from tailguard.io.reading import require_writable

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from working in a folder; the lock ends with this process, however it ends.

    :param folder: made if it is missing.
    :raises ValueError: when another process has it.
    """
    make_folder(folder)
    require_writable(folder / LOCK)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being trained by another process") from None
        yield
