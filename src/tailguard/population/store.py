"""Where the states of members lie: what a place for them must offer, and one in memory. Files are in `files.py`."""

import json
from collections.abc import Collection
from typing import Any, Protocol

from tailguard.population.learner import MemberFailed


class States(Protocol):
    """What a member needs: one state per name."""

    def write(self, name: str, state: Any) -> None:
        """Keep a state. Either all of it is there afterwards or what was there before."""

    def read(self, name: str) -> Any:
        """A state as it was written.

        :raises MemberFailed: when it is gone or damaged.
        """


class Store(States, Protocol):
    """Holds the states of members, and what the population itself has to remember."""

    def keep_only(self, names: Collection[str]) -> None:
        """Delete every state but these."""

    def write_population(self, record: dict[str, Any]) -> None:
        """Keep what the population remembers, in plain JSON, in the place of what it remembered before."""

    def read_population(self) -> dict[str, Any] | None:
        """What :meth:`write_population` was given last; None before the first time."""


class MemoryStore:
    """In this process, and gone with it."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._population: str | None = None

    def write(self, name: str, state: Any) -> None:
        """Keep a state."""
        self._states[name] = state

    def read(self, name: str) -> Any:
        """A state as it was written."""
        if name not in self._states:
            raise MemberFailed(f"there is no state {name}")
        return self._states[name]

    def keep_only(self, names: Collection[str]) -> None:
        """Delete every state but these."""
        self._states = {name: state for name, state in self._states.items() if name in names}

    def write_population(self, record: dict[str, Any]) -> None:
        """Keep what the population remembers."""
        self._population = json.dumps(record, allow_nan=False)

    def read_population(self) -> dict[str, Any] | None:
        """What the population remembered last."""
        return None if self._population is None else json.loads(self._population)
