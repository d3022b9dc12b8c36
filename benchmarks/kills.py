"""Kill everything at random: `python benchmarks/kills.py --kills 100 [--subjects training paper] [--seed 0]`. Linux only.

Each subject (a training, a walk-forward, a population in processes and on Ray, paper trading) is run without a fault through
the command line, and again by processes that are killed with SIGKILL at random moments, the driver or one of its workers, and
started again with the same command. The variables that set the numbers of threads are unset. Printed: kills, how many of
the ends are the same to the last bit, and how many processes were left behind after each kill of a driver. They may be none.
One subject, the start of Ray, has no end: its drivers are killed while their cluster starts.
"""

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from soak_subjects import (
    CHILDREN,
    POPULATION,
    TRAINING,
    UPDATE,
    WALKFORWARD,
    Child,
    Paper,
    Population,
    RayPopulation,
    RayWalkforward,
    Subject,
    Training,
    Walkforward,
    train_paper_agent,
)

LONGEST = 3600.0  # seconds for a run; far more than it takes
GRACE = 60.0  # seconds in which everything must end after its driver has, on a machine that others use as well
MARK = "TAILGUARD_KILLS"  # in the environment of every process that this script has started, directly or not
STARTS = "start of Ray"
SUBJECTS = ("training", "walk-forward", "population", "paper", "population on Ray", "walk-forward on Ray", STARTS)


@dataclass
class Tally:
    """What became of one subject.

    :param kills: of drivers, and of workers.
    :param ends: how often it came to its end.
    :param same: how often that was the end of the one without faults.
    :param left: processes that were still there after their driver.
    :param seconds: of a run without faults; the shortest known.
    :param slowest: seconds after which the last process had ended, at most.
    """

    drivers: int = 0
    workers: int = 0
    ends: int = 0
    same: int = 0
    left: int = 0
    seconds: float = 0.0
    slowest: float = 0.0

    @property
    def good(self) -> bool:
        return self.ends == self.same and self.left == 0

    def row(self, name: str) -> str:
        same = f"{self.same} of {self.ends}"
        cells = (name, f"{self.seconds:.0f} s", self.drivers, self.workers, same, self.left, f"{self.slowest:.1f} s")
        return f"| {' | '.join(map(str, cells))} |"


def make(name: str, folder: Path, which: str) -> Subject:
    """Return a subject by its name, in a folder of its own."""
    place = folder / f"{name} {which}".replace(" ", "-")
    if name == "training":
        return Training(place, [*TRAINING, f"training.steps={UPDATE * 150}", "selection=null", "training.policy=MlpLstmPolicy"])
    if name == "paper":
        return Paper(place, folder / "agent", folder / "bars.csv")
    kinds = {"walk-forward": Walkforward, "walk-forward on Ray": RayWalkforward}
    if name in kinds:
        return kinds[name](place, WALKFORWARD)
    return {"population": Population, "population on Ray": RayPopulation}[name](place, POPULATION)


def marked() -> list[int]:
    """Return the processes that this script has started, directly or not, and that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if f"{MARK}={os.environ[MARK]}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def count_left(tally: Tally) -> None:
    """Count the processes that there still are after the time in which they must have ended; end those."""
    begun = time.monotonic()
    while marked() and time.monotonic() < begun + GRACE:
        time.sleep(0.1)
    tally.slowest = max(tally.slowest, time.monotonic() - begun)
    left = marked()
    tally.left += len(left)
    for pid in left:
        try:
            sys.stderr.write(f"left: {(Path('/proc') / str(pid) / 'cmdline').read_bytes().replace(bytes(1), b' ')[:200]!r}\n")
            os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue


def kill_one(subject: Subject, rng: np.random.Generator, tally: Tally) -> Child | None:
    """Start the subject and kill it or one of its workers; return it if it still runs, None if it has to be started again."""
    begun, child = time.monotonic(), subject.start()
    if child.code(float(rng.uniform(0.1, 0.8)) * tally.seconds) is not None:
        # The first one compiled what the others find compiled, or the machine was busier.
        tally.seconds = min(tally.seconds, time.monotonic() - begun)
        return child
    workers = child.members()
    if workers and rng.random() < 0.4:
        os.kill(int(rng.choice(workers)), signal.SIGKILL)
        tally.workers += 1
        return child
    child.kill()
    tally.drivers += 1
    count_left(tally)
    return None


def torment(name: str, folder: Path, kills: int, seconds: float, rng: np.random.Generator, tally: Tally) -> None:
    """Run a subject to its end, without faults and with so many kills, or as many as there is time for."""
    whole, faulty = make(name, folder, "whole"), make(name, folder, "killed")
    begun = time.monotonic()
    child = whole.start()
    if child.code(LONGEST) != 0:
        raise SystemExit(f"{name} without faults did not come to its end: {child.said()[-3:]}")
    tally.seconds = time.monotonic() - begun
    until = time.monotonic() + seconds
    while tally.drivers + tally.workers < kills and time.monotonic() < until:
        left = kill_one(faulty, rng, tally)
        if left is not None:
            if left.code(LONGEST) != 0:
                raise SystemExit(f"{name} did not come to its end after a worker was killed: {left.said()[-3:]}")
            if tally.drivers + tally.workers < kills:  # it was through: once more from the beginning
                compare(whole, faulty, tally)
                faulty = make(name, folder, f"killed-{tally.drivers + tally.workers}")
        sys.stderr.write(f"{name}: {tally.drivers} drivers and {tally.workers} workers killed, {tally.left} left\n")
    last = faulty.start()
    if last.code(LONGEST) != 0:
        raise SystemExit(f"{name} was not resumed: {last.said()[-3:]}")
    count_left(tally)
    compare(whole, faulty, tally)


def kill_starts(kills: int, rng: np.random.Generator, tally: Tally) -> None:
    """Kill drivers when their Ray cluster has some of its processes, or all."""
    script = "from tailguard.parallel.ray import connect\nprint(flush=True)\nconnect()\nimport time\ntime.sleep(3600)"
    while tally.drivers < kills:
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver:
            assert driver.stdout is not None
            driver.stdout.readline()
            enough, until = int(rng.integers(2, 10)), time.monotonic() + 2.0 * GRACE
            while len(marked()) < enough and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(float(rng.uniform(0.0, 0.5)))
            driver.kill()
        tally.drivers += 1
        count_left(tally)
        sys.stderr.write(f"{STARTS}: {tally.drivers} drivers killed, {tally.left} left\n")


def compare(whole: Subject, faulty: Subject, tally: Tally) -> None:
    tally.ends += 1
    tally.same += whole.result() == faulty.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in all, the same number for each subject")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of killing in all; runs without faults come on top")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rng, each = np.random.default_rng(arguments.seed), -(-arguments.kills // len(arguments.subjects))
    good = True
    with tempfile.TemporaryDirectory() as name:
        if "paper" in arguments.subjects:
            train_paper_agent(Path(name))
        os.environ[MARK] = uuid.uuid4().hex
        print(f"seed {arguments.seed}, {os.cpu_count()} cores, thread variables unset")
        head = "subject", "without faults", "drivers killed", "workers killed", "the same bits", "left", "the last ended after"
        print(f"| {' | '.join(head)} |")
        print("|---|---|---|---|---|---|---|")
        for subject in arguments.subjects:
            tally = Tally()
            try:
                if subject == STARTS:
                    kill_starts(each, rng, tally)
                else:
                    torment(subject, Path(name), each, 60.0 * arguments.minutes / len(arguments.subjects), rng, tally)
            finally:  # also when it is asked to stop: what was found so far
                print(tally.row(subject), flush=True)
                for child in CHILDREN:
                    child.kill()
            good = good and tally.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
