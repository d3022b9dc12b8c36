"""Files: what is written comes back, and nothing else is taken for it."""

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import (
    array_shapes,
    arrays,
    boolean_dtypes,
    floating_dtypes,
    integer_dtypes,
    unsigned_integer_dtypes,
)
from safetensors.torch import save as safetensors_bytes

import tailguard
from tailguard.io import checkpoint
from tailguard.io.atomic import UNFINISHED, atomic
from tailguard.io.checkpoint import CheckpointError
from tailguard.io.checkpoint_folder import Checkpoints

TREE = {
    "weights": torch.arange(12.0).reshape(3, 4),
    "numbers": [1, 2.5, None, True, "text", -(2**127), float("inf"), (1, (2,))],
    "arrays": {"a": np.arange(5, dtype=np.uint64), "b": np.zeros((0, 3)), "c": np.array(3.5), "d": np.array([True, False])},
    "by number": {0: {"step": torch.tensor(2.0)}, 7: {}},
    "empty": {},
    "a.b": torch.tensor(1.0),
    "a": {"b": torch.tensor(2.0)},
    "__metadata__": torch.tensor(3.0),
}


def equal(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return type(a) is type(b) and (a == b or a != a)


def test_a_tree_comes_back_as_it_was(tmp_path):
    checkpoint.save(tmp_path / "x", TREE, kind="test")
    assert equal(checkpoint.load(tmp_path / "x", kind="test"), TREE)
    assert os.listdir(tmp_path) == ["x"]


numbers = boolean_dtypes() | integer_dtypes() | unsigned_integer_dtypes() | floating_dtypes()
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | arrays(numbers, array_shapes(min_side=0))
keys = st.text().filter(lambda key: not key.startswith("$"))
trees = st.dictionaries(keys, st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=6))


@settings(max_examples=150, deadline=None)
@given(trees)
def test_any_tree_comes_back_as_it_was(tree):
    data = checkpoint.to_bytes(tree, kind="test")
    assert checkpoint.to_bytes(tree, kind="test") == data
    back = checkpoint.from_bytes(data, kind="test", name="x")
    assert equal(back, tree)


@pytest.mark.parametrize("bad", [{"x": object()}, {1.5: 2}, {"$tensor": 1}, {"x": np.array(["a"])}, {"x": {1, 2}}])
def test_what_is_not_data_is_not_written(bad, tmp_path):
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path / "x", bad, kind="test")
    assert not (tmp_path / "x").exists()


def test_1000_cuts_and_flips_are_noticed_or_harmless():
    rng, data = np.random.default_rng(0), checkpoint.to_bytes(TREE, kind="test")
    messages = []
    for _ in range(1000):
        broken = bytearray(data)
        if rng.random() < 0.5:
            del broken[rng.integers(len(broken)) :]
        else:
            for place in rng.integers(len(broken), size=rng.integers(1, 4)):
                broken[place] ^= 1 << rng.integers(8)
        try:
            tree = checkpoint.from_bytes(bytes(broken), kind="test", name="x")
        except CheckpointError as error:
            messages.append(str(error))
        else:
            assert equal(tree, TREE)
    assert len(messages) > 900
    assert all(message.startswith("x: ") for message in messages)


class Evil:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return os.putenv, ("TAILGUARD_OWNED", "1")


def test_a_pickle_is_never_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(pickle, "loads", None)
    pickled = pickle.dumps(Evil())
    for content in (
        pickled,
        b"PK\x03\x04" + pickled,
        len(pickled).to_bytes(8, "little") + pickled,
        bytes(safetensors_bytes({"x": torch.frombuffer(bytearray(pickled), dtype=torch.uint8)}, {"tailguard": "0 {}"})),
    ):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path / "x", kind="model")


def test_no_line_of_the_product_unpickles():
    """Weights of other libraries are read by torch's loader of plain tensors, in one place."""
    for path in Path(tailguard.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"pickle\.loads?\(|Unpickler\(|weights_only=False", text), path
        loads = re.findall(r"torch\.load\(.*", text)
        assert not loads or (path.name == "sb3_import.py" and all("weights_only=True" in call for call in loads)), path


def test_errors_name_the_file_and_the_part(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(CheckpointError, match=r"x: cannot be read \(No such file"):
        checkpoint.load(path, kind="test")
    checkpoint.save(path, TREE, kind="test")
    with pytest.raises(CheckpointError, match="holds a test, expected a model"):
        checkpoint.load(path, kind="model")
    data = bytearray(path.read_bytes())
    data[data.rindex(torch.arange(12.0).numpy().tobytes()) + 20] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="x: is damaged: weights does not fit its checksum"):
        checkpoint.load(path, kind="test")
    path.write_bytes(b"PK\x03\x04 something")
    with pytest.raises(CheckpointError, match="zip of Stable-Baselines3"):
        checkpoint.load(path, kind="test")
    path.write_bytes(bytes(safetensors_bytes({"x": torch.zeros(1)})))
    with pytest.raises(CheckpointError, match="not written by Tailguard"):
        checkpoint.load(path, kind="test")


def test_a_newer_version_asks_for_an_update(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", checkpoint.VERSION + 1)
    checkpoint.save(tmp_path / "x", TREE, kind="test")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="update Tailguard"):
        checkpoint.load(tmp_path / "x", kind="test")


def test_a_failure_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    checkpoint.save(path, TREE, kind="test")
    before = path.read_bytes()

    def fill_the_disk():
        with atomic(path) as file:
            file.write(b"half of")
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        fill_the_disk()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path, full_disk):
    path = tmp_path / "x"
    checkpoint.save(path, TREE, kind="test")
    before = path.read_bytes()
    with full_disk(100), pytest.raises(OSError, match=rf"File too large: '{path}'"):
        checkpoint.save(path, TREE, kind="test")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


class TestCheckpoints:
    def test_the_last_and_the_best_stay(self, tmp_path):
        files = Checkpoints(tmp_path, "test", keep=2)
        for step, performance in enumerate([1.0, 3.0, 2.0, float("nan"), 0.0]):
            files.save(step, {"step": step}, performance)
        assert [path.name for path in files.paths()] == ["step-000000000003.safetensors", "step-000000000004.safetensors"]
        assert checkpoint.load(tmp_path / "best.safetensors", kind="test") == {"step": 1, "performance": 3.0}
        assert files.newest(lambda tree: tree) == {"step": 4}

    def test_a_damaged_one_costs_an_interval_and_is_named(self, tmp_path, caplog):
        files = Checkpoints(tmp_path, "test")
        for step in range(3):
            files.save(step, {"step": step})
        newest = files.paths()[-1]
        newest.write_bytes(newest.read_bytes()[:-3])
        assert files.newest(lambda tree: tree) == {"step": 1}
        assert newest.name in caplog.text
        assert "going back to the one before" in caplog.text
        for path in files.paths():
            path.write_bytes(b"")
        with pytest.raises(CheckpointError, match="none of the 3"):
            files.newest(lambda tree: tree)

    def test_what_a_killed_process_left_is_cleared_away(self, tmp_path):
        files = Checkpoints(tmp_path, "test")
        (tmp_path / f".step-1.safetensors.77{UNFINISHED}").write_bytes(b"half")
        assert files.newest(lambda tree: tree) is None
        files.save(2, {})
        assert len(os.listdir(tmp_path)) == 1

    def test_the_best_of_an_earlier_version_has_its_performance_beside_it(self, tmp_path):
        checkpoint.save(tmp_path / "best.safetensors", {"step": 1}, kind="test")
        (tmp_path / "best.json").write_text('{"step": 1, "performance": 3.0}')
        files = Checkpoints(tmp_path, "test")
        files.save(2, {"step": 2}, 2.0)
        assert checkpoint.load(tmp_path / "best.safetensors", kind="test")["step"] == 1
        files.save(3, {"step": 3}, 4.0)
        assert checkpoint.load(tmp_path / "best.safetensors", kind="test")["step"] == 3
