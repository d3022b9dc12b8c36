"""Files that anybody may have put there: only regular ones are read and written, and none that is larger than it may be."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What goes wrong with content that has the right checksums and is not what Tailguard writes.
UNUSABLE = (LookupError, TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError, AssertionError, MemoryError)


class UnusableFile(ValueError):
    """A file cannot be used; the message names it."""


@contextmanager
def refusing(name: str | Path, error: type[UnusableFile] = UnusableFile) -> Iterator[None]:
    """Turn errors about what a file holds into one of one line that names the file.

    :param name: of the file.
    :param error: what is raised.
    """
    try:
        yield
    except UnusableFile:
        raise
    except UNUSABLE as found:
        reason = " ".join(str(found).split())
        ours = type(found) is ValueError  # says in its own words what is wrong
        why = reason if ours else f"holds what Tailguard does not write ({type(found).__name__}: {reason[:300]})"
        raise error(f"{name}: {why}") from None


def read_regular(path: str | Path, most: int) -> bytes:
    """Return the content of a file; a pipe or a device, which may never end, is not read.

    :param path: the file, or a link to one.
    :param most: the most bytes that it may have.
    :raises ValueError: for a file that is larger, or that is no regular file.
    :raises OSError: when the system cannot open or read it.
    """
    # Without O_NONBLOCK opening a named pipe waits for somebody who writes to it.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _require_regular(os.fstat(file.fileno()), path, most)
        return file.read(most)


def require_readable(path: Path, most: int) -> None:
    """Refuse a file that another library is to open, for the same reasons as :func:`read_regular`.

    :param path: the file, or a link to one.
    :param most: the most bytes that it may have.
    :raises ValueError: for a file that is larger, or that is no regular file.
    :raises OSError: when there is none.
    """
    _require_regular(path.stat(), path, most)


def require_writable(path: Path) -> None:
    """Refuse to write to a link, which may lead out of the folder, or to a pipe, which waits for somebody who reads.

    :param path: of a file that is written in place; it may be missing.
    :raises ValueError: if something else than a regular file is there.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: is not a regular file: nothing is written to it")


def _require_regular(status: os.stat_result, path: str | Path, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: is not a regular file")
    if status.st_size > most:
        raise ValueError(f"{path}: has {status.st_size:,} bytes, more than the {most:,} that are read")
