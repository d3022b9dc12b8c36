"""Engines for the tasks of an experiment: this process, processes of this machine, or a Ray cluster.

Engines differ in where they run tasks, never in what comes out.
"""

from dataclasses import dataclass
from typing import Any, Literal

from tailguard.experiments.warm import warm_up
from tailguard.parallel.tasks import ProcessTasks, SerialTasks, TaskExecutor
from tailguard.parallel.worker import cores
from tailguard.validation import require

EngineName = Literal["serial", "process", "ray"]


@dataclass(frozen=True)
class Engine:
    """A place for tasks.

    :param name: ``serial`` is this process, ``process`` stands for processes of this machine, ``ray`` for a cluster.
    :param address: of a Ray cluster; None starts one on this machine.
    :param processes: of ``process`` at the same time; None takes one per core.
    """

    name: EngineName = "serial"
    address: str | None = None
    processes: int | None = None

    def __post_init__(self) -> None:
        """Refuse what the engine has no use for."""
        require(self.address is None or self.name == "ray", "address", self.address, "left out: only the engine ray has one")
        require(
            self.processes is None or (self.name == "process" and self.processes >= 1),
            "the number of processes",
            self.processes,
            "at least 1, with the engine process",
        )

    def executor(self, shared: Any) -> TaskExecutor:
        """Return what runs tasks.

        :param shared: what all of them have in common.
        """
        if self.name == "ray":
            from tailguard.parallel.ray import RayTasks

            return RayTasks(shared, self.address)
        processes = 1 if self.name == "serial" else self.processes or cores()
        if processes == 1:
            return SerialTasks(shared)
        warm_up()  # otherwise each process would compile the same functions
        return ProcessTasks(shared, processes)


SERIAL = Engine()
