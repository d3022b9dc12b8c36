"""The states of members in files, on any file system that fsspec knows."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from tailguard.io import checkpoint
from tailguard.io.atomic import atomic
from tailguard.population.learner import MemberFailed

SUFFIX = ".safetensors"
POPULATION = "population.json"
KIND = "population member"


class FileStore:
    """One checkpoint file per state in a folder that all members reach.

    :param root: a path, or a URL of fsspec such as ``s3://bucket/run``: nodes then need no common disk. A state is a tree of
        tensors, arrays and JSON values, see :mod:`tailguard.io.checkpoint`.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = str(root)
        self._fs, self._folder = fsspec.core.url_to_fs(self.root)
        self._fs.makedirs(self._folder, exist_ok=True)

    def __reduce__(self) -> tuple[type["FileStore"], tuple[str]]:
        """Another process opens the same folder itself."""
        return FileStore, (self.root,)

    def path(self, name: str) -> str:
        """The file of a state."""
        return f"{self._folder}/{name}{SUFFIX}"

    def write(self, name: str, state: Any) -> None:
        """Write the file."""
        self._publish(checkpoint.to_bytes(state, kind=KIND), self.path(name))

    def read(self, name: str) -> Any:
        """Read the file."""
        path = self.path(name)
        try:
            return checkpoint.from_bytes(self._fs.cat_file(path), kind=KIND, name=path)
        except (FileNotFoundError, checkpoint.CheckpointError) as error:
            raise MemberFailed(f"{path} cannot be read: {error}") from error

    def keep_only(self, names: Collection[str]) -> None:
        """Delete the other files."""
        kept = {self.path(name).rpartition("/")[2] for name in names}
        for path in self._fs.ls(self._folder, detail=False):
            file = str(path).rstrip("/").rpartition("/")[2]
            if file.endswith(SUFFIX) and file not in kept:
                self._fs.rm_file(path)

    def write_population(self, record: dict[str, Any]) -> None:
        """Write the file."""
        self._publish(json.dumps(record, allow_nan=False).encode(), f"{self._folder}/{POPULATION}")

    def read_population(self) -> dict[str, Any] | None:
        """Read the file."""
        path = f"{self._folder}/{POPULATION}"
        if not self._fs.exists(path):
            return None
        try:
            record: dict[str, Any] = json.loads(self._fs.cat_file(path))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): without it the population cannot go on") from None
        return record

    def _publish(self, data: bytes, path: str) -> None:
        """Nobody ever reads half of a file: on a disk it is renamed when it is whole, object stores show it as a whole."""
        if "file" in self._fs.protocol:
            with atomic(path) as file:
                file.write(data)
        else:
            self._fs.pipe_file(path, data)
