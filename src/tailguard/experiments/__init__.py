"""Experiments: training runs, evaluation, walk-forward, populations, export and live trading."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """Work was asked to stop and did so in good order; the message says how to continue.

    :param number: of the signal that has asked for it.
    """

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code of a process that a signal has ended, as shells report it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM; outside of the main thread, where Python handles no signals, do nothing.

    :param handler: called with the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def stopped_at_once(advice: str) -> Iterator[None]:
    """On SIGINT and SIGTERM raise :class:`Interrupted` wherever the work stands; files are never half written.

    :param advice: how to continue.
    """

    asked: list[Interrupted] = []

    def stop(number: int, _: FrameType | None) -> None:
        asked.append(Interrupted(f"stopped; {advice}", number))
        raise asked[-1]

    with handling_signals(stop):
        try:
            yield
        except (SystemError, KeyboardInterrupt):  # compiled code, such as Ray's, turns what a handler raises into these
            if asked:
                raise asked[0] from None
            raise
