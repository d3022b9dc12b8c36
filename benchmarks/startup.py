"""How long a start takes: imports, first calls with an empty and a filled cache of compiled code, and with `--demo` what
`make demo` runs: ``python benchmarks/startup.py``.

Every line is a process of its own, with the processes that it starts. `cold` has an empty folder for compiled code, `warm` the
one that the line above has filled. Seconds of time, and of processor time, which others on the machine do not add to; the
fastest of `--rounds`. One thread per process.
"""

import argparse
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PART = "from tailguard.experiments.warm import PARTS; PARTS[{!r}]()"
COMMAND = [sys.executable, "-m", "tailguard"]
# Name, command, whether it compiles anything.
STARTS = (
    ("import tailguard", [sys.executable, "-c", "import tailguard"], False),
    ("tailguard --help", [*COMMAND, "--help"], False),
    ("import DistributionalPPO", [sys.executable, "-c", "from tailguard import DistributionalPPO"], False),
    ("first trainings", [sys.executable, "-c", PART.format("trainings")], True),
    ("first backtest, verdict and report", [sys.executable, "-c", PART.format("markets and verdicts")], True),
    ("tailguard warm", [*COMMAND, "warm"], True),
)
GOAL = 75.0  # seconds of `make demo` on a quiet machine of two cores


def demo():
    """The commands of `make demo`, from the Makefile, in the folder in which they are run."""
    _, _, recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndemo: ")
    lines = [line.removeprefix("\t$(BIN)/tailguard ") for line in recipe.partition("\n\n")[0].splitlines()[1:]]
    return [[*COMMAND, *shlex.split(line.replace("configs/", f"{ROOT}/configs/"))] for line in lines]


def seconds(commands, cache, folder):
    """Time and processor time of some commands, one after the other."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for command in commands:
        subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(commands, rounds, cold):
    """The fastest of some rounds with an empty cache, or with one that a first run has filled."""
    with tempfile.TemporaryDirectory() as kept:
        if not cold:
            seconds(commands, kept, Path(tempfile.mkdtemp(dir=kept)))
        runs = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as empty:
                runs.append(seconds(commands, Path(empty) / "cache" if cold else kept, empty))
        return tuple(map(min, zip(*runs, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--demo", action="store_true", help="also what `make demo` runs after the installation")
    options = parser.parse_args()
    starts = [(name, [command], compiles) for name, command, compiles in STARTS]
    if options.demo:
        starts.append((f"make demo (warm: <= {GOAL:g} s)", demo(), True))
    print("| start | compiled code | time, s | processor time, s |\n|---|---|---|---|")
    for name, commands, compiles in starts:
        if options.only in name:
            for cold in (True, False) if compiles else (False,):
                took, worked = measured(commands, options.rounds, cold)
                state = ("cold" if cold else "warm") if compiles else ""
                print(f"| {name} | {state} | {took:.2f} | {worked:.2f} |", flush=True)


if __name__ == "__main__":
    main()
