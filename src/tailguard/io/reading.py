"""Read whole files that anybody may have written: regular files only, and none that is larger than it may be."""

import os
import stat
from pathlib import Path


def read_regular(path: str | Path, most: int) -> bytes:
    """Return the content of a file; a pipe or a device, which may never end, is not read.

    :param path: the file, or a link to one.
    :param most: the most bytes that it may have.
    :raises ValueError: for a file that is larger, or that is no regular file.
    :raises OSError: when the system cannot open or read it.
    """
    # Without O_NONBLOCK opening a named pipe waits for somebody who writes to it.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: is not a regular file")
        if status.st_size > most:
            raise ValueError(f"{path}: has {status.st_size:,} bytes, more than the {most:,} that are read")
        return file.read(most)
