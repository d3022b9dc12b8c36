"""Tasks and drivers for the tests of parallel/, importable by worker processes: ``python parallel_tasks.py FOLDER [ray]``."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tailguard.experiments import Interrupted, stopped_at_once
from tailguard.parallel.ray import RayTasks
from tailguard.parallel.tasks import ProcessTasks, Task, run_tasks


@dataclass(frozen=True)
class Square:
    """Return the square of a number plus what all tasks share.

    :param fault: what happens first, once: ``kill``, ``hang``, ``bug``, ``refuse``; ``always`` kills every time.
    :param folder: where it is remembered, across processes, that it has happened.
    """

    number: int
    fault: str = ""
    folder: Path | None = None

    @property
    def name(self):
        return f"square of {self.number}"

    def work(self, shared, reached):
        reached(0.5)
        if self.fault == "always":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault and not (self.folder / str(self.number)).exists():
            (self.folder / str(self.number)).write_text(str(os.getpid()))
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault == "hang":
                time.sleep(1000.0)
            elif self.fault == "bug":
                raise ZeroDivisionError("by intent")
            elif self.fault == "refuse":
                raise ValueError("the number is too square")
        return self.number**2 + shared


@dataclass(frozen=True)
class Held:
    """A task that does not begin before a file is there."""

    task: Task
    file: Path

    @property
    def name(self):
        return self.task.name

    def work(self, shared, reached):
        while not self.file.exists():
            time.sleep(0.02)
        return self.task.work(shared, reached)


@dataclass(frozen=True)
class Echo:
    """Return what all tasks share."""

    name = "echo"

    def work(self, shared, reached):
        return shared


def runs(pid):
    """Return False for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in its background ignores it
    tasks = [Square(number, "hang", Path(sys.argv[1])) for number in range(2)]
    try:
        with stopped_at_once("nothing is lost"):
            executor = RayTasks(0) if sys.argv[2:] == ["ray"] else ProcessTasks(0, 2)
            run_tasks(tasks, executor, lambda task, result: [], lambda name, share: None)
    except Interrupted as stopped:
        sys.stderr.write(f"{stopped}\n")
        sys.exit(stopped.exit_code)
