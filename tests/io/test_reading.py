"""Folders may hold what somebody else has put there: only regular files are read and written in them."""

import os

import pytest

from tailguard.io.atomic import UNFINISHED, atomic
from tailguard.io.journal import Journal
from tailguard.io.lock import LOCK, locked
from tailguard.io.reading import read_regular, require_readable, require_writable
from tailguard.population import lineage


def lock(folder):
    with locked(folder):
        pass


def write(folder):
    with atomic(folder / "file") as file:
        file.write(b"new")


# What is opened for writing, and who does it.
WRITERS = {
    LOCK: lock,
    f".file.{os.getpid()}{UNFINISHED}": write,
    "ledger.jsonl": lambda folder: Journal(folder / "ledger.jsonl"),
    "lineage.jsonl": lambda folder: lineage.Lineage(folder / "lineage.jsonl", keep=1),
}
IDS = ["lock", "atomic", "ledger", "lineage"]  # the same in every process of a test run, unlike a process id


@pytest.mark.parametrize("name", WRITERS, ids=IDS)
def test_nothing_is_written_through_a_link(tmp_path, name):
    folder, precious = tmp_path / "run", tmp_path / "precious"
    folder.mkdir()
    precious.write_bytes(b"not to be lost")
    (folder / name).symlink_to(precious)
    with pytest.raises(ValueError, match="is not a regular file: nothing is written to it"):
        WRITERS[name](folder)
    assert precious.read_bytes() == b"not to be lost"


@pytest.mark.parametrize("name", WRITERS, ids=IDS)
def test_nobody_waits_for_a_reader_of_a_pipe(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="is not a regular file"):
        WRITERS[name](tmp_path)


def test_what_is_missing_or_regular_is_written(tmp_path):
    require_writable(tmp_path / "missing")
    for writer in (lock, write):
        for _ in range(2):
            writer(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"new"


def test_only_regular_files_of_a_known_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for refuse in (read_regular, require_readable):
        for name in ("pipe", "device"):
            with pytest.raises(ValueError, match="is not a regular file"):
                refuse(tmp_path / name, 10)
        with pytest.raises(ValueError, match="has 5 bytes, more than the 4 that are read"):
            refuse(tmp_path / "link", 4)
        with pytest.raises(FileNotFoundError):
            refuse(tmp_path / "missing", 4)
    assert read_regular(tmp_path / "link", 5) == b"12345"
    require_readable(tmp_path / "link", 5)
