"""Two threads for one agent: compiled passes release Python's lock, so two of them run side by side.

What runs side by side writes to different arrays, and each number is computed in one thread, in the same order of operations
as with a single thread: so the number of threads changes no bit of a result.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Threads:
    """Runs two tasks side by side, or one after the other.

    :param count: 1 or 2.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def run(self, here: Callable[[], Any], beside: Callable[[], Any]) -> tuple[Any, Any]:
        """Return what both tasks return; no task may call this itself."""
        if self.count == 1:
            return here(), beside()
        if self._pool is None or self._process != os.getpid():  # a process that was forked off has no threads
            self._pool, self._process = ThreadPoolExecutor(1), os.getpid()
        second = self._pool.submit(beside)
        try:
            first = here()
        finally:
            done = second.result()
        return first, done

    def split(self, size: int, task: Callable[[int, int], Any]) -> None:
        """Call ``task(first, last)`` for halves of `size` items side by side, or once for all of them."""
        half = size // 2
        if self.count == 1 or half == 0:
            task(0, size)
        else:
            self.run(lambda: task(0, half), lambda: task(half, size))
