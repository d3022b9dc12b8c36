"""Outcomes of work that was given to another process or machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lost:
    """The process or the machine that did the work is gone. The work is not at fault, and may be tried again.

    :param machine: where it was done; None on this machine.
    """

    reason: str
    machine: str | None = None


@dataclass(frozen=True)
class Crashed:
    """The work raised an exception that nobody expected: a bug."""

    trace: str


def count_losses(losses: Sequence[Lost], alive: Callable[[str], bool]) -> int:
    """Return how often work was lost. A machine that is gone is one loss, however often work was sent to it meanwhile.

    :param losses: of one piece of work.
    :param alive: returns False for a machine that is gone.
    """
    gone = {loss.machine for loss in losses if loss.machine is not None and not alive(loss.machine)}
    return len(gone) + sum(loss.machine not in gone for loss in losses)
