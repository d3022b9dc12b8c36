"""Atomic files: each appears whole or not at all, and survives a power cut."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# The suffix of files that are being written; a killed process may leave some behind.
UNFINISHED = ".unfinished"


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Add the name of this file to errors of the disk: a write to a full disk fails without saying where."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its name when everything is on the disk; after an error nothing has changed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with named(path), unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, must survive a power cut
    finally:
        os.close(folder)
