"""All benchmarks in one go: `make bench` (about half an hour on two cores), `make bench-quick` (three minutes).

Every benchmark is a process of its own, told by its own options to do as much as fits into the time. Those that measure time
run alone, one after the other; those that measure what is learnt run side by side, as many as there are cores. One that fails
or takes longer than its limit (a machine that others use as well) is noted as such, and the others continue; what it printed
until then is kept.

`make bench` writes docs/benchmarks.md, `make bench-quick` artifacts/benchmarks-quick.md: the machine, versions, seeds, and the
tables as the benchmarks printed them. The quick one tells whether everything runs, not what it reaches.
"""

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
FULL, QUICK = HERE.parent / "docs" / "benchmarks.md", Path("artifacts") / "benchmarks-quick.md"
LIBRARIES = ("tailguard", "torch", "numpy", "numba", "stable-baselines3", "sb3-contrib", "gymnasium", "jax")
PEERS = ("rsl-rl-lib", "sbx-rl", "gym-anytrading", "gym-trading-env")
TAIL = 15  # last lines that are shown of one that did not come to its end


@dataclass(frozen=True)
class Job:
    """One benchmark.

    :param section: what it is about; jobs of one section stand together in the document.
    :param command: script and options.
    :param minutes: limit.
    :param cores: processes that it keeps busy; 0 for one that measures time and must be alone.
    """

    section: str
    command: str
    minutes: float
    cores: int = 1


@dataclass
class Outcome:
    """The outcome of a job.

    :param job: which.
    :param printed: all of it.
    :param errors: what it wrote on stderr.
    :param state: ``done``, ``failed (exit code N)`` or ``stopped after N min``.
    :param seconds: how long it took.
    """

    job: Job
    printed: str
    errors: str
    state: str
    seconds: float


BARS = "bars:read bars:features bars:backtest bars:environment bars:bootstrap bars:judge"
# Seeds are the first ones of each benchmark, from 0. Two of them where training takes long: every seed is in the tables.
BENCH = (
    Job("Environment speed", "env_speed.py", 2.0, 0),
    Job("Training speed", "speed.py --isa native avx2 --rounds 4", 8.0, 0),
    Job("Training speed", "speed.py --defaults --rounds 2", 3.0, 0),
    Job("Training speed", "threads.py", 3.0, 0),
    Job("Training speed", "products.py", 2.0, 0),
    Job("Training speed", "lstm_sizes.py --rounds 5 --sizes 16 64 256 --sequences 1 8 64", 3.0, 0),
    Job("Scale", "scale.py --axes hidden envs quantiles assets:step assets:features --most 10000", 8.0, 0),
    Job("Scale", f"scale.py --axes {BARS} --most 10000", 5.0, 0),
    Job("Start", "startup.py --rounds 1", 4.0, 0),
    Job("Optimizer speed", "optim.py --only speed", 2.0, 0),
    Job("Cost of the tail objective", "risk.py --only cost --seeds 2 --workers 1", 2.0, 0),
    Job("Population engines", "population.py pause throughput", 3.0, 0),
    Job("Learning", "learning.py --seeds 2 --only CartPole", 4.0, 2),
    Job("Learning", "learning.py --seeds 2 --only Acrobot", 4.0, 2),
    Job("Learning", "learning.py --seeds 2 --only Pendulum", 4.0, 2),
    Job("Learning", "learning.py --seeds 2 --only 'SignalMarket, 1M'", 4.0, 2),
    Job("Learning", "learning.py --seeds 2 --only BettingGame", 2.0, 2),
    Job("Risk", "risk.py --seeds 2 --workers 2 --only betting,crash", 6.0, 2),
    Job("Execution", "desk_execution.py --seeds 2 --workers 2 --only speed,frontier,signal", 10.0, 2),
    Job("Market making", "desk_making.py", 10.0, 2),
    Job("Hedging", "desk_hedging.py --seeds 2 --only speed,small --cases '5 dates on a tree, costs 0.5'", 4.0),
    Job("Risk per period", "tail_agents.py --reduced --seeds 0 --agents 'neutral,mean-CVaR .1'", 8.0),
    Job("Robustness", "robustness.py --tasks cartpole-mlp --seeds 0 --episodes 5 --market-steps 0", 8.0),
    Job("Optimizers", "optim.py --only gradients", 1.0),
    Job("Optimizers", "optim.py --only quadratic", 1.0),
    Job("Optimizers", "optim.py --only digits --seeds 1", 5.0),
    Job("Population", "population.py toys --seeds 50", 4.0),
    Job("Population", "population.py search --agent-seeds 2 --horizon 60", 6.0, 2),
    Job("Verdict", "verdict.py speed", 4.0, 0),
    Job("Verdict", "verdict.py walks nulls returns ledger power --walks 20", 10.0),
    Job("Driver of a large walk-forward", "driver.py", 2.0),
)
CHECK = (
    Job("Environment speed", "env_speed.py --rounds 2 --seconds 0.1", 5.0, 0),
    Job("Training speed", "speed.py --rounds 1 --only MLP", 5.0, 0),
    Job("Training speed", "products.py --repetitions 3", 5.0, 0),
    Job("Training speed", "lstm_sizes.py --rounds 1 --sizes 16 --sequences 1 8", 5.0, 0),
    Job("Scale", "scale.py --axes assets:step bars:backtest --most 1000", 5.0, 0),
    Job("Start", "startup.py --rounds 1 --only import", 5.0, 0),
    Job("Optimizer speed", "optim.py --only speed --rounds 3", 5.0, 0),
    Job("Learning", "learning.py --seeds 1 --only BettingGame", 5.0),
    Job("Risk", "risk.py --quick --seeds 1 --workers 1 --only crash", 5.0),
    Job("Execution", "desk_execution.py --quick --seeds 1 --workers 1 --only speed", 5.0),
    Job("Hedging", "desk_hedging.py --quick --seeds 1 --only small --cases '5 dates on a tree, costs 0.5'", 5.0),
    Job("Robustness", "robustness.py --quick --tasks cartpole-mlp --agents PPO --market-steps 0", 5.0),
    Job("Optimizers", "optim.py --only gradients --seeds 1", 5.0),
    Job("Population", "population.py toys --seeds 3", 5.0),
    Job("Verdict", "verdict.py nulls --walks 2 --draws 100", 5.0),
    Job("Driver of a large walk-forward", "driver.py --pairs 50 --machines 10 --lost 2", 5.0),
)


class Running:
    """A job at work.

    :param job: which.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.begun = job, time.monotonic()
        self._folder = tempfile.TemporaryDirectory()
        self._paths = [Path(self._folder.name) / name for name in ("out", "err")]
        script, *options = shlex.split(job.command)
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / script), *options],
                stdout=out,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # its workers end with it
            )

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.begun

    def outcome(self) -> Outcome | None:
        """Return the outcome; None while the job runs within its limit."""
        code = self._process.poll()
        if code is None and self.seconds < 60.0 * self.job.minutes:
            return None
        state = "done" if code == 0 else f"failed (exit code {code})"
        if code is None:
            self.stop()
            state = f"stopped after {self.job.minutes:g} min"
        printed, errors = (path.read_text(encoding="utf-8", errors="replace") for path in self._paths)
        self._folder.cleanup()
        return Outcome(self.job, printed, errors, state, self.seconds)

    def stop(self) -> None:
        """End it, with everything that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def fits(job: Job, busy: Sequence[Job], cores: int) -> bool:
    """Return whether a job may start beside those that run."""
    if not busy:
        return True
    if job.cores == 0 or any(one.cores == 0 for one in busy):
        return False
    return job.cores + sum(one.cores for one in busy) <= cores


def run(jobs: Sequence[Job], cores: int, outcomes: list[Outcome]) -> None:
    """Run jobs in their order, side by side where they fit; `outcomes` grows as they end."""
    waiting, running = list(jobs), []
    begun = time.monotonic()
    try:
        while waiting or running:
            while waiting and fits(waiting[0], [one.job for one in running], cores):
                running.append(Running(waiting.pop(0)))
                _say(begun, len(outcomes), len(jobs), f"{running[-1].job.command} ...")
            ended = [(one, outcome) for one in running if (outcome := one.outcome()) is not None]
            for one, outcome in ended:
                running.remove(one)
                outcomes.append(outcome)
                _say(begun, len(outcomes), len(jobs), f"{outcome.job.command}: {outcome.state}, {outcome.seconds:.0f} s")
            if not ended:
                time.sleep(0.1)
    finally:
        for one in running:
            one.stop()


def _say(begun: float, done: int, total: int, text: str) -> None:
    minutes, seconds = divmod(int(time.monotonic() - begun), 60)
    sys.stderr.write(f"[{minutes:02d}:{seconds:02d}, {done} of {total} done] {text}\n")


def machine(cores: int) -> list[str]:
    """Describe the machine and the versions, as lines."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in _lines(info) if line.startswith("model name")]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = ", ".join(f"{name} {found}" for name in (*LIBRARIES, *PEERS) if (found := _version(name)) is not None)
    absent = [name for name in (*LIBRARIES, *PEERS) if _version(name) is None]
    return [
        f"- Machine: {names[0] if names else platform.processor() or platform.machine()}, {cores} cores, {platform.system()}.",
        f"- Python {platform.python_version()}, {versions}.",
        f"- Not installed, so not compared with: {', '.join(absent) if absent else 'nothing'}.",
        f"- Load of the machine when it began: {load}. One thread per process.",
        f"- Commit {commit()}, {time.strftime('%Y-%m-%d', time.gmtime())}.",
    ]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit that is checked out, and whether something has been changed."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def shown(printed: str) -> str:
    """Return what a benchmark printed, without the indented lines about its progress."""
    lines = [line.rstrip() for line in printed.splitlines() if not line.startswith("  ")]
    return "\n".join(lines).strip()


def document(about: Sequence[str], outcomes: Sequence[Outcome], quick: bool) -> str:
    """Return the whole page."""
    command = "make bench-quick" if quick else "make bench"
    warning = ["", "**Quick: this shows that everything runs. It is no measurement.**"] if quick else []
    lines = [
        "# Benchmarks",
        "",
        f"Written by `{command}` (`benchmarks/all.py`); every table is as its script printed it.",
        *warning,
        "",
        *about,
        "",
        "| benchmark | command | | seconds |",
        "|---|---|---|---|",
    ]
    ordered = sorted(outcomes, key=lambda outcome: [job.section for job in _plan(quick)].index(outcome.job.section))
    lines += [f"| {o.job.section} | `{o.job.command}` | {o.state} | {o.seconds:.0f} |" for o in ordered]
    section = None
    for outcome in ordered:
        if outcome.job.section != section:
            section = outcome.job.section
            lines += ["", f"## {section}"]
        lines += ["", f"`python benchmarks/{outcome.job.command}`"]
        if outcome.state != "done":
            lines += ["", f"**{outcome.state}**; its tables until then, and its last lines:"]
        lines += ["", shown(outcome.printed) or "(no table)"]
        last = outcome.errors if outcome.state.startswith("failed") else outcome.printed
        if outcome.state != "done" and last.strip():
            lines += ["", "```", *last.rstrip().splitlines()[-TAIL:], "```"]
    return "\n".join(lines) + "\n"


def _plan(quick: bool) -> tuple[Job, ...]:
    return CHECK if quick else BENCH


def main() -> int:
    """Run the benchmarks, write the page, and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three minutes: does everything run?")
    parser.add_argument("--output", type=Path, help=f"file to write; by default {FULL.relative_to(HERE.parent)} or {QUICK}")
    parser.add_argument("--only", default="", help="sections whose name contains this")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    jobs = [job for job in _plan(arguments.quick) if arguments.only in job.section]
    about, outcomes = machine(cores), []
    try:
        run(jobs, cores, outcomes)
    finally:
        path = arguments.output or (QUICK if arguments.quick else FULL)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document(about, outcomes, arguments.quick), encoding="utf-8")
        bad = [f"{outcome.job.command}: {outcome.state}" for outcome in outcomes if outcome.state != "done"]
        sys.stderr.write("".join(f"{line}\n" for line in bad) + f"wrote {path}\n")
    return 1 if bad or len(outcomes) < len(jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
