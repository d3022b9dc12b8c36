"""Stores of the members' states: in memory, or in files on any file system that fsspec knows.

The checkpoint format needs PyTorch, which takes a second to load: it is imported where a file is read or written, so that a
worker without files starts at once.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import fsspec  # type: ignore[import-untyped]

from tailguard.io.atomic import atomic, make_folder
from tailguard.io.reading import UnusableFile, read_regular
from tailguard.io.sealed import LARGEST, sealed, unsealed
from tailguard.population.member import MemberFailed

SUFFIX = ".safetensors"
POPULATION, HISTORY = "population.json", "history"
KIND = "population member"
# Names of files that a population makes in its store, and deletes; the folder may hold others.
OURS = re.compile(r"(member_\d+_step_\d+|token(_\w+)?)\.safetensors")


class StateStore(Protocol):
    """A store as a member sees it: one state per name."""

    def write(self, name: str, state: Any) -> None:
        """Store a state, atomically: a failure leaves the state that was there before."""

    def read(self, name: str) -> Any:
        """Return a state as it was written.

        :raises MemberFailed: when it is gone or damaged.
        """


class Store(StateStore, Protocol):
    """A store of the states of members and of the record of the population."""

    def keep_only(self, names: Collection[str]) -> None:
        """Delete every state but these."""

    def write_population(self, record: dict[str, Any]) -> None:
        """Store the record of the population, in plain JSON, in place of the last one."""

    def read_population(self) -> dict[str, Any] | None:
        """Return the record that was written last; None before the first."""

    def write_history(self, part: int, record: dict[str, Any]) -> None:
        """Store a part of the history of the population, in plain JSON; parts that were stored before stay as they are."""

    def read_history(self, part: int) -> dict[str, Any]:
        """Return a part of the history.

        :raises ValueError: when it is gone or damaged.
        """


class MemoryStore:
    """A store in this process, gone with it."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._population: str | None = None
        self._history: dict[int, str] = {}

    def write(self, name: str, state: Any) -> None:
        """Store a state."""
        self._states[name] = state

    def read(self, name: str) -> Any:
        """Return a state as it was written."""
        if name not in self._states:
            raise MemberFailed(f"there is no state {name}")
        return self._states[name]

    def keep_only(self, names: Collection[str]) -> None:
        """Delete every state but these."""
        self._states = {name: state for name, state in self._states.items() if name in names}

    def write_population(self, record: dict[str, Any]) -> None:
        """Store the record of the population."""
        self._population = json.dumps(record, allow_nan=False)

    def read_population(self) -> dict[str, Any] | None:
        """Return the record of the population."""
        return None if self._population is None else json.loads(self._population)

    def write_history(self, part: int, record: dict[str, Any]) -> None:
        """Store a part of the history."""
        self._history[part] = json.dumps(record, allow_nan=False)

    def read_history(self, part: int) -> dict[str, Any]:
        """Return a part of the history."""
        result: dict[str, Any] = json.loads(self._history[part])
        return result


class FileStore:
    """A store of one checkpoint file per state, in a folder that all members can reach.

    :param root: a path, or a URL of fsspec such as ``s3://bucket/run``: nodes then need no common disk. A state is a tree of
        tensors, arrays and JSON values, see :mod:`tailguard.io.checkpoint`.
    :raises ValueError: when the package for that kind of URL is not installed.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = str(root)
        try:
            self._fs, self._folder = fsspec.core.url_to_fs(self.root)
        except ImportError as error:  # each kind of URL has a package of its own
            raise ValueError(f"{self.root} cannot be opened: {error}") from None
        if "file" in self._fs.protocol:
            make_folder(Path(self._folder))
        else:
            self._fs.makedirs(self._folder, exist_ok=True)

    def __reduce__(self) -> tuple[type["FileStore"], tuple[str]]:
        """Pickle the path alone: another process opens the folder itself."""
        return FileStore, (self.root,)

    def path(self, name: str) -> str:
        """Return the file of a state."""
        return f"{self._folder}/{name}{SUFFIX}"

    def write(self, name: str, state: Any) -> None:
        """Write the file of a state."""
        from tailguard.io import checkpoint

        self._publish(checkpoint.to_bytes(state, kind=KIND), self.path(name))

    def read(self, name: str) -> Any:
        """Read the file of a state."""
        from tailguard.io import checkpoint

        path = self.path(name)
        try:
            return checkpoint.from_bytes(self._content(path, checkpoint.largest_file()), kind=KIND, name=path)
        except (FileNotFoundError, ValueError) as error:
            raise MemberFailed(f"{path} cannot be read: {error}") from error

    def keep_only(self, names: Collection[str]) -> None:
        """Delete the files of all other states."""
        kept = {self.path(name).rpartition("/")[2] for name in names}
        for path in self._fs.ls(self._folder, detail=False):
            file = str(path).rstrip("/").rpartition("/")[2]
            if OURS.fullmatch(file) and file not in kept:
                self._fs.rm_file(path)

    def write_population(self, record: dict[str, Any]) -> None:
        """Write the file of the population."""
        self._publish(sealed(record), f"{self._folder}/{POPULATION}")

    def read_population(self) -> dict[str, Any] | None:
        """Read the file of the population."""
        path = f"{self._folder}/{POPULATION}"
        return self._read(path) if self._fs.exists(path) else None

    def write_history(self, part: int, record: dict[str, Any]) -> None:
        """Write the file of a part of the history."""
        self._publish(sealed(record), self._history_path(part))

    def read_history(self, part: int) -> dict[str, Any]:
        """Read the file of a part of the history."""
        return self._read(self._history_path(part))

    def _history_path(self, part: int) -> str:
        return f"{self._folder}/{HISTORY}_{part:06d}.json"

    def _read(self, path: str) -> dict[str, Any]:
        try:
            return unsealed(self._content(path, LARGEST), path)
        except (FileNotFoundError, ValueError) as error:
            raise UnusableFile(f"{error}; without it the population cannot be resumed") from None

    def _content(self, path: str, most: int) -> bytes:
        """Return what a file holds.

        :raises ValueError: for one with more bytes than that, or that is no regular file.
        """
        if "file" in self._fs.protocol:
            return read_regular(path, most)
        size = int(self._fs.size(path))
        if size > most:
            raise ValueError(f"{path}: has {size:,} bytes, more than the {most:,} that are read")
        content: bytes = self._fs.cat_file(path)
        return content

    def _publish(self, data: bytes, path: str) -> None:
        """Write atomically: a file on disk is renamed when it is complete, object stores do the same by themselves."""
        if "file" in self._fs.protocol:
            with atomic(path) as file:
                file.write(data)
        else:
            self._fs.pipe_file(path, data)
