"""The random numbers of this process: torch's, numpy's and Python's own, as data."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Where the three global generators stand."""
    kind, words, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 (SB3 and its environments use it)
    py_version, py_words, py_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), words, int(position), int(has_gauss), float(gauss)],
        "python": [py_version, np.array(py_words, np.uint64), py_gauss],
    }


def load_random_state(state: Mapping[str, Any]) -> None:
    """Go on where :func:`random_state` was taken."""
    py_version, py_words, py_gauss = state["python"]
    torch.set_rng_state(state["torch"])
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    random.setstate((py_version, tuple(py_words.tolist()), py_gauss))


class OwnRandomness:
    """Random numbers of one's own where several share a process: each goes on with its own, and the process with its own."""

    def __init__(self) -> None:
        self._state = random_state()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """The global generators are this one's; afterwards they are what they were."""
        outside = random_state()
        load_random_state(self._state)
        try:
            yield
        finally:
            self._state = random_state()
            load_random_state(outside)
