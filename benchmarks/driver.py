"""The driver of a large walk-forward: `python benchmarks/driver.py [--pairs 1000] [--machines 100] [--lost 10]`.

A simulated cluster, with a clock of its own and work that is made up, runs the tasks of a walk-forward under the supervisor
that all engines share. Machines are lost on the way with everything that runs on them. Results have the size of real ones, and
are written to a disk. Printed: what the driver itself takes, in seconds of its CPU and in RAM, beside the simulated hours of
the cluster; no task may be lost or done twice.
"""

import argparse
import heapq
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tailguard.io.atomic import atomic
from tailguard.parallel.outcomes import Lost
from tailguard.parallel.tasks import Done, Outcome, Reached, Task, run_tasks

MINUTES = 10.0  # of a pair, on average
AGENT_BYTES, DECISIONS_BYTES = 150_000, 250_000
MIB = 2**20


@dataclass(frozen=True)
class Fake:
    """A task that only the simulation does."""

    number: int

    @property
    def name(self) -> str:
        return f"pair {self.number}"

    def work(self, shared: object, reached: object) -> None:
        raise NotImplementedError


class SimulatedCluster:
    """An executor whose machines exist on paper only.

    :param machines: how many.
    :param lost: how many of them are lost, at random times in the first hour.
    :param rng: draws how long tasks take, and what is lost when.
    """

    def __init__(self, machines: int, lost: int, rng: np.random.Generator) -> None:
        self.rng, self.now = rng, 0.0
        self.free = {str(k) for k in range(machines)}
        self.living = set(self.free)
        self.busy: dict[str, Task] = {}  # by machine
        self.events: list[tuple[float, int, str, str]] = []  # time, order, what happens, machine
        for machine in rng.choice(machines, size=lost, replace=False):
            self._at(float(rng.uniform(0.0, 60.0)), "lost", str(machine))

    def _at(self, when: float, what: str, machine: str) -> None:
        heapq.heappush(self.events, (when, len(self.events), what, machine))

    def capacity(self) -> int:
        return len(self.living)

    def start(self, task: Task) -> None:
        machine = self.free.pop()
        self.busy[machine] = task
        end = self.now + MINUTES * float(self.rng.gamma(4.0, 0.25))
        for share in (0.25, 0.5, 0.75):
            self._at(self.now + share * (end - self.now), "tells", machine)
        self._at(end, f"done {task.name}", machine)

    def wait(self, reached: Reached) -> list[tuple[str, Outcome]]:
        self.now, _, what, machine = heapq.heappop(self.events)
        task = self.busy.get(machine)
        if machine not in self.living:
            return []
        if what == "lost":
            self.living.discard(machine)
            self.free.discard(machine)
            self.busy.pop(machine, None)
            return [] if task is None else [(task.name, Lost("NodeDiedError", machine))]
        if task is not None and what == "tells":
            reached(task.name, 0.5)
        if task is not None and what == f"done {task.name}":
            self.free.add(machine)
            del self.busy[machine]
            return [(task.name, Done((self.rng.bytes(AGENT_BYTES), self.rng.bytes(DECISIONS_BYTES))))]
        return []

    def alive(self, machine: str) -> bool:
        return machine in self.living

    def close(self) -> None:
        self.busy.clear()


def peak() -> float:
    """Return the most RAM that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--machines", type=int, default=100)
    parser.add_argument("--lost", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cluster = SimulatedCluster(arguments.machines, arguments.lost, np.random.default_rng(arguments.seed))
    kept, told = Counter(), 0
    before, begun, wall = peak(), time.process_time(), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:

        def keep(task: Task, result: tuple[bytes, bytes]) -> list[Task]:
            for part, content in zip(("agent", "decisions"), result, strict=True):
                with atomic(Path(name) / part / f"{task.name}.safetensors") as file:
                    file.write(content)
            kept[task.name] += 1
            return []

        def reached(task: str, share: float) -> None:
            nonlocal told
            told += 1

        run_tasks([Fake(number) for number in range(arguments.pairs)], cluster, keep, reached)
    seconds, elapsed = time.process_time() - begun, time.perf_counter() - wall
    print(f"seed {arguments.seed}: {arguments.pairs} pairs of {MINUTES:g} minutes on {arguments.machines} machines")
    print("| machines lost | hours of the cluster | messages | CPU of the driver | with its disk | RAM, peak | added to it |")
    print("|---|---|---|---|---|---|---|")
    row = (
        str(arguments.machines - len(cluster.living)),
        f"{cluster.now / 60.0:.1f}",
        str(told),
        *(f"{value:.1f} s" for value in (seconds, elapsed)),
        *(f"{value:.0f} MiB" for value in (peak(), peak() - before)),
    )
    print(f"| {' | '.join(row)} |")
    exact = len(kept) == arguments.pairs and set(kept.values()) == {1}
    print(f"every pair kept exactly once: {'yes' if exact else 'NO'}")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
