"""A walk-forward from the command line whose worker is killed, and which is stopped: the end is the same."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailguard.config import load_config
from tailguard.evaluate.assessment import Effort
from tailguard.experiments.walkforward import walkforward
from tailguard.market import load_bars, random_walk

SETTINGS = [
    *("training.steps=1024", "training.n_envs=4", "training.n_steps=16", "training.n_epochs=1", "training.lstm_hidden_size=8"),
    *("training.policy=MlpLstmPolicy", "selection=null", "training.tensorboard=null"),
    *("features.drawdown_window=21", "features.slow_window=21", "features.horizons=[1, 5]"),
    "walkforward={folds: 2, seeds: 2, warmup: 16, jobs: 2}",
]
PATIENCE = 200.0


def start(folder, file):
    command = [sys.executable, "-m", "tailguard", "walkforward", "--data", str(file), "--run", str(folder), "--no-ledger", "-q"]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    return subprocess.Popen(
        [*command, *(word for setting in SETTINGS for word in ("--set", setting))],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(condition, process):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    return found


def workers(process):
    """Return its worker processes, and not the one with which multiprocessing cleans up."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in pids if b"spawn_main" in command_line(pid)]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def results(folder):
    return {path.name: path.read_bytes() for kind in ("decisions", "agents") for path in sorted((folder / kind).iterdir())}


def finish(file, folder):
    """Train what is missing in this process."""
    config = load_config(None, SETTINGS)
    settings = config.walkforward.model_copy(update={"jobs": 1})
    walkforward(load_bars(file), config, settings, folder, source="bars", effort=Effort(50, 9))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    random_walk(500, seed=0).to_csv(folder / "bars.csv")
    finish(folder / "bars.csv", folder / "run")
    return folder / "bars.csv", results(folder / "run")


def test_killed_workers_and_stops_cost_a_line_each_and_nothing_else(undisturbed, tmp_path):
    file, expected = undisturbed
    folder = tmp_path / "run"
    first = start(folder, file)
    victim, other = until(lambda: len(found := workers(first)) == 2 and found, first)
    os.kill(other, signal.SIGSTOP)  # and so the command cannot end by itself before it is stopped
    os.kill(victim, signal.SIGKILL)  # while it loads its libraries, or trains
    until(lambda: (folder / "decisions").exists() and any((folder / "decisions").glob("fold*")), first)
    busy = workers(first)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=PATIENCE)[1].splitlines()
    assert first.returncode == 143
    assert sum("lost (its process ended with exit code -9); it starts again" in line for line in said) == 1
    assert [line for line in said if line.startswith("stopped; ")] == said[-1:]
    assert "Traceback" not in "".join(said)
    assert not any(runs(pid) for pid in busy)
    assert not (folder / "evaluation").exists()

    finish(file, folder)
    assert results(folder) == expected
    assert not list(folder.rglob("*.unfinished"))
