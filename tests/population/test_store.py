"""The stores: on a disk, on any other file system, and in memory."""

import os
import pickle

import numpy as np
import pytest

from tailguard.population.member import MemberFailed
from tailguard.population.store import FileStore, MemoryStore


@pytest.fixture(params=["memory", "disk", "remote"])
def store(request, tmp_path):
    if request.param == "memory":
        yield MemoryStore()
    elif request.param == "disk":
        yield FileStore(tmp_path / "states")
    else:  # fsspec's file system in memory stands for every one that is not a disk
        remote = FileStore(f"memory://{tmp_path.name}")
        yield remote
        remote._fs.rm(remote._folder, recursive=True)


def test_what_was_written_is_read(store):
    store.write("member_0_step_5", {"a": np.arange(3), "b": [1, None, 2.5]})
    store.write("member_0_step_5", {"a": np.arange(4), "b": [1, None, 2.5]})
    state = store.read("member_0_step_5")
    assert state["a"].tolist() == [0, 1, 2, 3]
    assert state["b"] == [1, None, 2.5]


def test_only_what_is_needed_stays(store):
    first, needed, third = (f"member_{number}_step_5" for number in range(3))
    for name in (first, needed, third):
        store.write(name, {"name": name})
    store.write_population({"events": 3})
    store.keep_only({needed})
    assert store.read(needed) == {"name": needed}
    assert store.read_population() == {"events": 3}
    for name in (first, third):
        with pytest.raises(MemberFailed):
            store.read(name)


def test_files_of_others_in_the_folder_stay(tmp_path):
    store = FileStore(tmp_path)
    others = [tmp_path / name for name in ("my-model.safetensors", "member_0.safetensors", "token.txt")]
    for path in others:
        path.write_bytes(b"precious")
    store.keep_only(set())
    assert all(path.read_bytes() == b"precious" for path in others)


def test_what_is_no_file_or_too_large_is_no_state(tmp_path, monkeypatch):
    store = FileStore(tmp_path)
    os.mkfifo(tmp_path / "member_0_step_5.safetensors")  # to open it would wait for somebody who writes
    os.mkfifo(tmp_path / "population.json")
    with pytest.raises(MemberFailed, match="is not a regular file"):
        store.read("member_0_step_5")
    with pytest.raises(ValueError, match="is not a regular file"):
        store.read_population()
    monkeypatch.setenv("TAILGUARD_LARGEST_FILE_MIB", "1")
    remote = FileStore(f"memory://{tmp_path.name}")
    remote.write("member_0_step_5", {"a": np.zeros(2**18)})
    with pytest.raises(MemberFailed, match=r"bytes, more than the 1,048,576 that are read"):
        remote.read("member_0_step_5")


def test_the_population_is_remembered_once(store):
    assert store.read_population() is None
    for events in (1, 2):
        store.write_population({"events": events})
    assert store.read_population() == {"events": 2}


def test_a_damaged_state_is_no_state(tmp_path):
    store = FileStore(tmp_path)
    store.write("a", {"x": np.arange(100)})
    path = tmp_path / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"\0" * 8)
    with pytest.raises(MemberFailed, match=r"a\.safetensors cannot be read"):
        store.read("a")


def test_parts_of_the_history_stay_as_they_were(store):
    for part in range(3):
        store.write_history(part, {"entries": [part]})
    store.keep_only(set())
    assert [store.read_history(part)["entries"] for part in range(3)] == [[0], [1], [2]]


def test_a_missing_part_of_the_history_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"history_000000\.json.*cannot be resumed"):
        FileStore(tmp_path).read_history(0)


def test_a_damaged_population_is_named(tmp_path):
    FileStore(tmp_path).write_population({"a": 1})
    (tmp_path / "population.json").write_text('{"a": ')
    with pytest.raises(ValueError, match=r"population\.json is damaged"):
        FileStore(tmp_path).read_population()


def test_another_process_opens_the_same_folder(tmp_path):
    store = FileStore(tmp_path)
    store.write("a", {"x": 1})
    assert pickle.loads(pickle.dumps(store)).read("a") == {"x": 1}
