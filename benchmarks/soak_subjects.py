"""The subjects of soak.py and kills.py, each through the real command line in a folder of its own, threads as they come."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tailguard.config import load_config
from tailguard.experiments.prepared_market import load_market
from tailguard.experiments.run import Run, train
from tailguard.io.checkpoint import CheckpointError, load
from tailguard.population.lineage import read
from tailguard.ppo.serialization import KIND

HERE = Path(__file__).parent
DATA = "nasdaq-1d"
UPDATE = 8 * 64  # samples
INTERVAL = 20 * UPDATE  # steps between checkpoints
COMMON = ["training.tensorboard=null", "checkpoints.every_seconds=1e9", f"checkpoints.every_steps={INTERVAL}"]
TRAINING = [*COMMON, "training.n_envs=8", "training.n_steps=64"]
EVERYTHING = [
    "training.risk={objective: cvar, alpha: 0.2}",
    "training.vgs={}",
    "training.optimizer={name: adaptive_upgd, sigma: 0.01}",
    "training.adversary={epsilon: 0.05, steps: 2}",
]
VARIANTS = {"MLP": ["training.policy=MlpPolicy"], "LSTM": [], "LSTM, everything on": EVERYTHING}
POPULATION = [
    *COMMON,
    "training.n_envs=4",
    "training.n_steps=32",
    "population={population_size: 3, perturbation_interval: 10, intervals: 10, validation_blocks: 4, hyperparams: ["
    "{name: learning_rate, min_value: 1.0e-5, max_value: 1.0e-2, is_log_scale: true},"
    "{name: clip_range, min_value: 0.05, max_value: 0.4}]}",
]
WALKFORWARD = [
    *TRAINING,
    "training.steps=4096",
    "selection={blocks: 2, seeds: 1, stops: [1.0]}",
    "walkforward={folds: 2, seeds: 2, jobs: 2}",  # processes on any machine, also where there is one core
]
CHILDREN: "list[Child]" = []  # all that were ever started


class Subject:
    """Something that trains or trades in a folder.

    :param folder: of the run.
    :param settings: overrides of the configuration.
    """

    name = ""
    unit = "steps"  # of progress
    busy = "is being trained by another process"  # said to a second process in the folder

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self.folder, self.settings = folder, settings
        self.burst = folder.with_name(folder.name + ".burst")
        self.errors = folder.with_name(folder.name + ".stderr")

    def arguments(self) -> list[str]:
        """Return the arguments of the command that begins or resumes."""
        raise NotImplementedError

    def result(self) -> dict[str, bytes]:
        """Return what must not depend on faults."""
        raise NotImplementedError

    def progress(self) -> int:
        """Return the progress by its own record, in steps or decisions."""
        raise NotImplementedError

    def record(self) -> Path:
        """Return the file that records the progress; a resumed process first cuts it back to where it resumes."""
        raise NotImplementedError

    def safe(self) -> int:
        """Return the progress that would be left if it was killed now."""
        raise NotImplementedError

    allowance = 0  # how much of its progress a kill may cost

    def overrides(self) -> list[str]:
        return [word for setting in self.settings for word in ("--set", setting)]

    def start(self, clock: int | None = None) -> "Child":
        """Its process; with a clock that jumps if a seed is given."""
        return self.child(self.arguments(), clock, self.errors)

    def child(self, arguments: list[str], clock: int | None, errors: Path) -> "Child":
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        environment["SOAK_BURST"] = str(self.burst)
        if clock is not None:
            environment["SOAK_CLOCK"] = str(clock)
        return Child([sys.executable, str(HERE / "soak_child.py"), *arguments, "--quiet"], environment, errors)


class Training(Subject):
    """`tailguard train`, then `tailguard resume`."""

    name = "training"
    allowance = INTERVAL + UPDATE

    def arguments(self) -> list[str]:
        if (self.folder / "run.json").exists():
            return ["resume", str(self.folder)]
        return ["train", "--data", DATA, "--run", str(self.folder), *self.overrides()]

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-*.safetensors"))

    def result(self) -> dict[str, bytes]:
        files = {"last checkpoint": self.checkpoints()[-1], "figures": self.record()}
        return {what: path.read_bytes() for what, path in files.items()}

    def record(self) -> Path:
        return self.folder / "metrics.jsonl"

    def progress(self) -> int:
        lines = self.record().read_bytes().split(b"\n")[:-1] if self.record().exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def safe(self) -> int:
        for path in reversed(self.checkpoints()):
            try:
                load(path, kind=KIND)
            except CheckpointError:
                continue
            return int(path.stem.removeprefix("step-"))
        return 0


class Population(Subject):
    """`tailguard population` with members in processes of their own."""

    name = "population"
    unit = "decisions"
    allowance = 1

    def arguments(self) -> list[str]:
        if (self.folder / "run.json").exists():
            return ["population", "--run", str(self.folder)]
        return ["population", "--data", DATA, "--run", str(self.folder), "--parallel", "2", *self.overrides()]

    def states(self) -> list[Path]:
        return sorted((self.folder / "population" / "states").glob("member_*.safetensors"))

    def result(self) -> dict[str, bytes]:
        winner = sorted((self.folder / "checkpoints").glob("step-*.safetensors"))[-1]
        return {"winner": winner.read_bytes(), "lineage": self.record().read_bytes()}

    def record(self) -> Path:
        return self.folder / "population" / "lineage.jsonl"

    def progress(self) -> int:
        return sum(event["event"] == "round" for event in read(self.record())) if self.record().exists() else 0

    def safe(self) -> int:
        path = self.folder / "population" / "states" / "population.json"
        return json.loads(path.read_text())["scheduler"]["rounds"] if path.exists() else 0


class RayPopulation(Population):
    """`tailguard population` on a Ray cluster that is started on this machine."""

    name = "population on Ray"

    def arguments(self) -> list[str]:
        return [*super().arguments(), "--engine", "ray"]


class Walkforward(Subject):
    """`tailguard walkforward` with a selection per fold and pairs, in processes of their own."""

    name = "walk-forward"
    unit = "pairs"

    def pairs(self) -> list[Path]:
        return sorted(self.record().glob("fold*"))

    def arguments(self) -> list[str]:
        return ["walkforward", "--data", DATA, "--run", str(self.folder), "--no-ledger", *self.overrides()]

    def record(self) -> Path:
        return self.folder / "decisions"

    def result(self) -> dict[str, bytes]:
        kinds = ("selection", "decisions", "agents")
        return {f"{kind} {path.name}": path.read_bytes() for kind in kinds for path in sorted((self.folder / kind).iterdir())}

    def progress(self) -> int:
        return len(self.pairs())

    safe = progress


class RayWalkforward(Walkforward):
    """`tailguard walkforward` on a Ray cluster that is started on this machine."""

    name = "walk-forward on Ray"

    def arguments(self) -> list[str]:
        return [*super().arguments(), "--engine", "ray"]


class Paper(Subject):
    """`tailguard paper`: an agent that trades on paper, with a ledger.

    :param run: of the agent.
    :param bars: file that it trades.
    """

    name = "paper"
    unit = "orders"
    busy = "is in use by another process"

    def __init__(self, folder: Path, run: Path, bars: Path) -> None:
        super().__init__(folder, [])
        self.run, self.bars = run, bars

    def arguments(self) -> list[str]:
        return ["paper", str(self.run), "--bars", str(self.bars), "--ledger", str(self.folder)]

    def record(self) -> Path:
        return self.folder / "ledger.jsonl"

    def result(self) -> dict[str, bytes]:
        """Return what was settled and ordered; bars may come in other portions after a kill."""
        lines = [json.loads(line) for line in self.record().read_bytes().splitlines()]
        kept = [{key: line[key] for key in line if key != "sum"} for line in lines if line["kind"] in ("begin", "bar", "order")]
        return {"settled and ordered": json.dumps(kept).encode()}

    def progress(self) -> int:
        return self.record().read_bytes().count(b'"kind":"order"') if self.record().exists() else 0

    safe = progress


def train_paper_agent(folder: Path) -> tuple[Path, Path]:
    """Train an agent that trades on paper; return its run, and the file of its bars."""
    settings = [*TRAINING, "selection=null", "training.steps=4096", "trading.fee=0.001", "trading.stop_loss=0.03"]
    config = load_config(None, settings)
    run = Run.create(folder / "agent", config, DATA, load_market(DATA, config))
    train(run, lambda *_: None)
    run.market().bars.to_csv(folder / "bars.csv")
    return run.path, folder / "bars.csv"


class Child:
    """A process and what it says.

    :param command: its command line.
    :param environment: its environment.
    :param errors: where its stderr goes.
    """

    def __init__(self, command: list[str], environment: dict[str, str], errors: Path) -> None:
        self.errors, self.begun = errors, time.time()
        with errors.open("wb") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=file)
        self.pid = self.process.pid
        CHILDREN.append(self)

    def code(self, within: float) -> int | None:
        """Return its exit code; None if it still runs after so many seconds."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the process, if it still runs; members notice by themselves."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def said(self) -> list[str]:
        return [line for line in self.errors.read_text(errors="replace").splitlines() if line.strip()]

    def members(self) -> list[int]:
        """Return the processes that work for it."""
        return workers_of(self.pid)

    def resident(self) -> int:
        """Bytes of memory in use."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def workers_of(pid: int) -> list[int]:
    """Return the processes that work for a driver: those that it has spawned, and those that run a call on its Ray cluster."""
    found = [(child, _command_line(child)) for child in _descendants(pid)]
    return [child for child, line in found if b"spawn_main" in line or line.startswith(b"ray::_called")]


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    children: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):  # of each of its threads
        try:
            children += map(int, listed.read_text().split())
        except OSError:  # it has ended
            continue
    return children + [below for child in children for below in _descendants(child)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for_step(child: Child, subject: Subject, beyond: int, seconds: float) -> None:
    """Until this child has come further than that, has ended, or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and child.code(0.2) is None:
        record = subject.record()
        if record.exists() and record.stat().st_mtime > child.begun and subject.progress() > beyond:
            return
