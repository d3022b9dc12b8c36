"""The checkpoint format of everything that has state: data, never code.

A file is a safetensors container, which any safetensors reader opens. Its metadata holds a manifest in JSON: the version of the
format, the kind of file, the libraries that wrote it, the tree of values with a reference in place of each array, and of each
array its type, shape and SHA-256. The manifest has a checksum of its own. So a file that was cut, changed or written by
another program is recognised before it is used, and loading it executes nothing.

Files appear whole or not at all: they are written under another name, flushed to the disk and renamed.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_from_bytes
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from tailguard.io import reading
from tailguard.io.atomic import atomic
from tailguard.validation import require

FORMAT = "tailguard"
VERSION = 7
LIBRARIES = ("tailguard", "torch", "numpy", "stable-baselines3", "gymnasium")

# By old version, a function from its tree to that of the next version. Each kind of file has its own.
Migrations = Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]

# Keys for values that JSON does not have. A key of the user's that begins like one is refused.
MARK = "$"
TENSOR, ARRAY, TUPLE, NUMBER, INTEGER_KEYS = "$tensor", "$array", "$tuple", "$number", "$integer_keys"

ZIP = b"PK"

# Limits of what is read: a stranger's file must not take all memory before it is refused. Models of 20 million weights fit.
LARGEST_FILE_MIB, LARGEST_VARIABLE = 256, "TAILGUARD_LARGEST_FILE_MIB"
LARGEST_MANIFEST = 32 * 2**20
MOST_CONTAINERS = 500_000


class CheckpointError(reading.UnusableFile):
    """Raised for a file that cannot be used, with the reason."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """Raised for a file that is not there."""


def refusing(name: str) -> AbstractContextManager[None]:
    """Turn errors about what a file holds into a :class:`CheckpointError` of one line that names the file.

    :param name: of the file.
    """
    return reading.refusing(name, CheckpointError)


def save(path: str | Path, tree: Mapping[str, Any], *, kind: str) -> None:
    """Write a tree of values, whole or not at all.

    :param path: the file.
    :param tree: dictionaries with keys of text (or all of integers), lists and tuples of tensors, arrays, numbers, text, None.
    :param kind: kind of file, such as ``model``; :func:`load` checks it.
    """
    with atomic(path) as file:
        file.write(to_bytes(tree, kind=kind))


def load(path: str | Path, *, kind: str, migrations: Migrations | None = None) -> dict[str, Any]:
    """Read what :func:`save` wrote; older versions are brought up to date.

    :param migrations: functions that update trees of this kind, by the version that they come from.
    :raises CheckpointError: naming the file and what is wrong with it.
    """
    try:
        data = reading.read_regular(path, largest_file())
    except OSError as error:
        kind_of_error = CheckpointNotFound if isinstance(error, FileNotFoundError) else CheckpointError
        raise kind_of_error(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{error}; {LARGEST_VARIABLE} sets the most, in MiB") from None
    return from_bytes(data, kind=kind, name=str(path), migrations=migrations)


def largest_file() -> int:
    """Return the most bytes that a file may have to be read.

    :raises ValueError: when the variable that sets it is no number.
    """
    mib = os.environ.get(LARGEST_VARIABLE, str(LARGEST_FILE_MIB))
    require(mib.isdecimal() and int(mib) > 0, LARGEST_VARIABLE, mib, "a whole number of MiB above 0")
    return int(mib) * 2**20


def from_bytes(data: bytes, *, kind: str, name: str, migrations: Migrations | None = None) -> dict[str, Any]:
    """Read the content of a file.

    :param name: name of the file in errors.
    :param migrations: see :func:`load`.
    """
    if data[: len(ZIP)] == ZIP:
        _refuse(
            name,
            "is a zip of Stable-Baselines3, which may run code when it is opened; import its weights with "
            "DistributionalPPO.from_sb3, or load it with the class that saved it",
        )
    length = int.from_bytes(data[:8], "little")
    if length > LARGEST_MANIFEST:
        _refuse(name, f"is not a whole Tailguard file (a manifest of {length:,} bytes, more than {LARGEST_MANIFEST:,})")
    header = data[8 : 8 + length]
    # Each takes a hundred bytes of memory and more, whatever it takes in the file.
    if header.count(b"{") + header.count(b"[") > MOST_CONTAINERS:
        _refuse(name, f"is not a whole Tailguard file (more than {MOST_CONTAINERS:,} lists and mappings)")
    with refusing(name):  # what safetensors reads and torch cannot hold, too: types that it lacks, sizes beyond its integers
        try:
            tensors = safetensors_from_bytes(data)
            metadata = json.loads(header).get("__metadata__", {})
        except (SafetensorError, UnicodeError, json.JSONDecodeError) as error:
            _refuse(name, f"is not a whole Tailguard file ({error})")
        version, tree = _read(name, metadata, tensors, kind)
        for number in range(version, VERSION):
            if migrations is not None and number in migrations:
                tree = migrations[number](tree)
    return tree


def to_bytes(tree: Mapping[str, Any], *, kind: str) -> bytes:
    """Return the content of a file; equal trees give equal bytes."""
    tensors: dict[str, Tensor] = {}
    encoded = _encode(tree, "", tensors)
    manifest = {
        "version": VERSION,
        "kind": kind,
        "libraries": libraries(),
        "tree": encoded,
        "tensors": {name: _description(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(manifest, allow_nan=False)
    # One entry: safetensors writes several in an order that changes from file to file.
    return bytes(safetensors_bytes(tensors, {FORMAT: f"{hashlib.sha256(text.encode()).hexdigest()} {text}"}))


@cache
def libraries() -> dict[str, str]:
    """Return the versions of Python and of the libraries that affect what is saved; finding them takes longer than to save."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in LIBRARIES}


def _refuse(name: str, why: str) -> NoReturn:
    raise CheckpointError(f"{name}: {why}")


def _read(name: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], kind: str) -> tuple[int, dict[str, Any]]:
    """Check every checksum; return the version and the tree of a file."""
    if FORMAT not in metadata:
        _refuse(name, "was not written by Tailguard: it has no manifest")
    checksum, _, text = metadata[FORMAT].partition(" ")
    if hashlib.sha256(text.encode()).hexdigest() != checksum:
        _refuse(name, "is damaged: its manifest does not fit its checksum")
    manifest = cast(dict[str, Any], json.loads(text))
    if not isinstance(manifest["version"], int) or not 1 <= manifest["version"] <= VERSION:
        _refuse(name, f"has version {manifest['version']}, this release reads up to {VERSION}: update Tailguard")
    if manifest["kind"] != kind:
        _refuse(name, f"holds a {manifest['kind']}, expected a {kind}")
    unknown = sorted(set(tensors) - set(manifest["tensors"]))
    if unknown:
        _refuse(name, f"is damaged: its manifest does not know {unknown[0]}")
    for part, expected in manifest["tensors"].items():
        if part not in tensors:
            _refuse(name, f"is damaged: {part} is missing")
        if _description(tensors[part]) != expected:
            _refuse(name, f"is damaged: {part} does not fit its checksum")
    tree = _decode(manifest["tree"], tensors)
    if not isinstance(tree, dict):
        _refuse(name, f"holds a {type(tree).__name__} in place of a tree of values")
    return manifest["version"], tree


def _description(tensor: Tensor) -> dict[str, Any]:
    raw: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "sha256": hashlib.sha256(raw).hexdigest()}


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return values as JSON; arrays move to `tensors` under their path in the tree."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        number = float(value)
        return number if np.isfinite(number) else {NUMBER: repr(number)}
    if isinstance(value, Tensor):
        # Views of one memory are refused by safetensors.
        return {TENSOR: _keep(value.detach().cpu().contiguous().clone(), name, tensors)}
    if isinstance(value, np.ndarray):
        return {ARRAY: [_keep(_as_tensor(value, name), name, tensors), value.dtype.str]}
    if isinstance(value, Mapping):
        if value and all(isinstance(key, int) for key in value):
            return {INTEGER_KEYS: {str(key): _encode(item, f"{name}.{key}", tensors) for key, item in value.items()}}
        for key in value:
            if not isinstance(key, str) or key.startswith(MARK):
                raise TypeError(f"{name or 'the tree'}: keys must be text that does not begin with {MARK}, got {key!r}")
        return {key: _encode(item, f"{name}.{key}" if name else key, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    raise TypeError(f"{name}: a {type(value).__name__} cannot be saved")


def _keep(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Add a tensor under its path in the tree; under another name where a key with a dot has led to the same path."""
    while name in tensors or name == "__metadata__":
        name += "'"
    tensors[name] = tensor
    return name


def _as_tensor(array: NDArray[Any], name: str) -> Tensor:
    if array.dtype == np.bool_:
        return torch.from_numpy(array.copy())
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name}: an array of {array.dtype} cannot be saved")
    # As bytes: torch lacks some of the types of numpy.
    contiguous = np.ascontiguousarray(array)
    return torch.from_numpy(contiguous.view(np.uint8).reshape(*array.shape, array.dtype.itemsize).copy())


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if ARRAY in value:
        name, dtype = value[ARRAY]
        raw = tensors[name].numpy()
        if raw.dtype == np.bool_:
            return raw
        kind = np.dtype(dtype)
        numbers = kind.kind in "iuf" and raw.dtype == np.uint8 and raw.shape[-1:] == (kind.itemsize,)
        require(numbers, f"the array {name}", dtype, "the bytes of numbers")
        return raw.view(kind)[..., 0]
    if NUMBER in value:
        return float(value[NUMBER])
    if TUPLE in value:
        return tuple(_decode(item, tensors) for item in value[TUPLE])
    if INTEGER_KEYS in value:
        return {int(key): _decode(item, tensors) for key, item in value[INTEGER_KEYS].items()}
    return {key: _decode(item, tensors) for key, item in value.items()}
