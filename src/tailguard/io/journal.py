"""An append-only file of records that survives a crash at any moment.

A line is a JSON object whose last entry, ``sum``, is a checksum of the line and of the sum of the line before, so that changed,
missing and exchanged lines are found. An unfinished line was never acknowledged: it is cut off when the file is opened.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tailguard.io.atomic import make_folder, named, sync_folder
from tailguard.io.reading import refusing, require_writable

SUM = "sum"
# Hexadecimal digits of a checksum.
DIGITS = 16


class Journal:
    """A journal that one process at a time may write.

    :param path: of the file; its folder is made if it does not exist.
    :raises ValueError: if another process has it open, or if a line is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        require_writable(path)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise ValueError(f"{path} is in use by another process: stop that one first") from None
        sync_folder(path.parent)  # or a power cut takes the name of a new file, and all records with it
        self._last = ""
        try:
            os.ftruncate(self._file, self._whole())
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes have it."""
        os.close(self._file)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the records, the oldest first."""
        with self.path.open("rb") as lines:
            for line in lines:
                with refusing(self.path):
                    record = json.loads(line)
                    del record[SUM]
                yield record

    def append(self, *records: Mapping[str, Any], sync: bool = True) -> None:
        """Write records at the end.

        :param records: JSON values.
        :param sync: return when they are on the disk. False leaves that to a later call: a process that is killed loses nothing
            all the same, a power cut may.
        """
        text = ""
        for record in records:
            body = json.dumps(record, allow_nan=False, separators=(",", ":"))
            self._last = _digest(self._last, body)
            text += f'{body[:-1]},"{SUM}":"{self._last}"}}\n'
        with named(self.path):
            data = text.encode()
            while data:
                data = data[os.write(self._file, data) :]
            if sync:
                os.fsync(self._file)

    def _whole(self) -> int:
        """Check all lines, and return the size of those that are finished."""
        size = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                self._last = self._checked(number, line)
                size += len(line)
        return size

    def _checked(self, number: int, line: bytes) -> str:
        """Return the checksum of a line that fits it and the lines before."""
        text = line.decode("utf-8", "replace")
        body, _, stated = text.rpartition(f',"{SUM}":"')
        expected = _digest(self._last, body + "}")
        if stated != f'{expected}"}}\n':
            raise ValueError(f"{self.path}: line {number} is damaged, or lines before it are missing; restore the file")
        return expected


def _digest(before: str, body: str) -> str:
    return hashlib.sha256((before + body).encode()).hexdigest()[:DIGITS]
