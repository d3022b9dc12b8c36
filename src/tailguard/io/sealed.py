"""JSON files with a checksum of their content: what was changed or damaged since it was written is not taken for a fact."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailguard.io.atomic import atomic
from tailguard.io.reading import read_regular

CHECKSUM = "checksum"
LARGEST = 64 * 2**20


def sealed(values: Mapping[str, Any]) -> bytes:
    """Return values as JSON, with a checksum as the last of them."""
    return json.dumps({**values, CHECKSUM: _checksum(values)}, indent=2, allow_nan=False).encode()


def unsealed(data: bytes, name: str) -> dict[str, Any]:
    """Return the values that :func:`sealed` was given. Files of earlier versions have no checksum, and are not checked.

    :param name: of the file, for errors.
    :raises ValueError: for content that is no JSON object, or that has changed since it was written.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is damaged ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name} is damaged (it holds a {type(values).__name__})")
    expected = values.pop(CHECKSUM, None)
    if expected is not None and expected != _checksum(values):
        raise ValueError(f"{name} was changed since Tailguard wrote it; it is a record, not an input: restore it")
    return values


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Write values with a checksum, whole or not at all."""
    with atomic(path) as file:
        file.write(sealed(values))


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what :func:`write_sealed` wrote; see :func:`unsealed`.

    :raises OSError: when the system cannot read it.
    """
    return unsealed(read_regular(path, LARGEST), str(path))


def digest(data: bytes) -> str:
    """Return the checksum of bytes."""
    return hashlib.sha256(data).hexdigest()


def _checksum(values: Mapping[str, Any]) -> str:
    # As read back: JSON turns tuples into lists, and keys into text.
    return digest(json.dumps(json.loads(json.dumps(values, allow_nan=False)), sort_keys=True).encode())
