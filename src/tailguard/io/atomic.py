"""Atomic files: each appears whole or not at all, and survives a power cut."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tailguard.io.reading import require_writable

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
    make_folder(path.parent)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    require_writable(unfinished)
    try:
        with named(path), unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder with all above it, so that their names survive a power cut."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for part in missing:
        sync_folder(part.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk: what was created, renamed or deleted in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_unfinished(folder: Path) -> None:
    """Delete what processes that were killed while they wrote have left in a folder and below; nobody may be writing there."""
    for unfinished in folder.rglob(f".*{UNFINISHED}"):
        unfinished.unlink(missing_ok=True)
