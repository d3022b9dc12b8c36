"""Tasks on a Ray cluster of two machines, one of which goes away: the results of this machine, to the last bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from parallel_tasks import Held, Square, runs
from soak_subjects import workers_of

from ray_cluster import PATIENCE, WARNINGS, joined_cluster, lose, machine_with_its_own_disk, machines, ray
from tailguard.config import load_config
from tailguard.evaluate.folds import make_folds
from tailguard.experiments import Interrupted, stopped_at_once, walkforward
from tailguard.experiments.engines import Engine
from tailguard.experiments.prepared_market import default_split, market_features
from tailguard.experiments.selection import select
from tailguard.experiments.walkforward import Pair, WalkforwardRun, train_all
from tailguard.market import load_bars, random_walk
from tailguard.parallel.ray import RayTasks, connect
from tailguard.parallel.tasks import run_tasks

pytestmark = WARNINGS
TINY = [
    *("training.steps=128", "training.n_envs=4", "training.n_steps=16", "training.n_epochs=1", "training.lstm_hidden_size=8"),
    *("training.policy=MlpLstmPolicy", "selection={blocks: 2, seeds: 1, stops: [1.0], doubt: -10}"),
    *("features.drawdown_window=21", "features.slow_window=21", "features.horizons=[1, 5]"),
    "walkforward={folds: 1, seeds: 2, warmup: 16}",
]


@pytest.fixture(scope="module")
def cluster():
    with joined_cluster() as cluster:
        yield cluster


class LosesOne:
    """Runs tasks on a cluster that loses one of its machines when so many tasks have begun.

    No task is done before: each waits until the cluster knows that the machine is gone, however slow everything is.

    :param gone: file that says so.
    """

    def __init__(self, tasks, cluster, begun, gone):
        self.tasks, self.cluster, self.begun, self.gone = tasks, cluster, begun, gone

    def start(self, task):
        self.tasks.start(Held(task, self.gone))

    def wait(self, reached):
        busy = [machine for machine in self.tasks._calls.machines().values() if machine is not None]
        if len(busy) >= self.begun and not self.gone.exists():
            assert self.alive(busy[0])
            lose(self.cluster, busy[0])
            assert not self.alive(busy[0])  # and not as it was a moment ago
            self.gone.touch()
        return self.tasks.wait(reached)

    def capacity(self):
        return self.tasks.capacity()

    def alive(self, machine):
        return self.tasks.alive(machine)

    def close(self):
        self.tasks.close()


def test_a_walk_forward_that_loses_a_machine_is_the_same_as_in_this_process(cluster, tmp_path, monkeypatch, caplog):
    """Whichever of two machines begins to work is killed.

    The machines need no common disk: nothing but this process writes.
    """
    bars, config = random_walk(500, seed=0), load_config(None, TINY)
    folds = make_folds(len(bars), 35, 35, config.walkforward)
    pairs, reports, executor = [Pair(folds[0], seed) for seed in (0, 1)], [], walkforward._executor
    local, spread = (WalkforwardRun(bars, config, 16, tmp_path / engine, identity="same") for engine in ("process", "ray"))
    train_all(local, folds, pairs, 1, lambda *said: None)
    with machines(cluster, 2, cores=1), monkeypatch.context() as patch:
        patch.setattr(
            walkforward, "_executor", lambda *arguments: LosesOne(executor(*arguments), cluster, 1, tmp_path / "gone")
        )
        train_all(spread, folds, pairs, 1, lambda *said: reports.append(said), "ray")
    (line,) = caplog.messages
    assert line.endswith("; it starts again")
    assert reports[-1] == (100, 100, reports[-1][2])
    files = [sorted(path for path in (tmp_path / engine).rglob("*") if path.is_file()) for engine in ("process", "ray")]
    assert [path.relative_to(tmp_path / "process") for path in files[0]] == [
        path.relative_to(tmp_path / "ray") for path in files[1]
    ]
    assert len(files[0]) == 1 + 2 + 2
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_a_machine_without_a_common_disk_gives_the_same_pairs(cluster, tmp_path):
    bars, config = random_walk(500, seed=0), load_config(None, TINY)
    folds = make_folds(len(bars), 35, 35, config.walkforward)
    pairs = [Pair(folds[0], 0)]
    local, spread = (WalkforwardRun(bars, config, 16, tmp_path / engine, identity="same") for engine in ("process", "ray"))
    train_all(local, folds, pairs, 1, lambda *said: None)
    with machine_with_its_own_disk(cluster, tmp_path):
        assert ray.get(ray.remote(lambda: os.listdir(tmp_path)).remote()) == []  # the only machine that has a core
        train_all(spread, folds, pairs, 1, lambda *said: None, "ray")
    files = [
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "process", tmp_path / "ray")
    ]
    assert len(files[0]) == 1 + 1 + 1
    assert files[0] == files[1]


@pytest.mark.parametrize("pooled", [False, True])
def test_a_choice_whose_candidates_are_trained_by_two_machines_is_that_of_this_process(cluster, pooled):
    bars = load_bars({name: random_walk(300, seed=seed) for seed, name in enumerate("ab")})
    config = load_config(None, [*TINY, f"training.pooled={str(pooled).lower()}", "training.policy=auto"])
    common = bars, config, default_split(len(bars), config.training), market_features(bars, config)
    here = select(*common)
    with machines(cluster, 2, cores=1):
        assert select(*common, engine=Engine("ray")) == here


def test_a_machine_that_is_lost_costs_each_of_its_tasks_one_loss(cluster, tmp_path, caplog):
    results = {}
    with machines(cluster, 2, cores=2):
        tasks = RayTasks(7)
        assert tasks.capacity() == 4
        run_tasks(
            [Square(number) for number in range(8)],
            LosesOne(tasks, cluster, 4, tmp_path / "gone"),
            lambda task, result: results.update({task.number: result}) or [],
            lambda name, share: None,
            max_losses=1,
        )
    assert results == {number: number**2 + 7 for number in range(8)}
    assert len(caplog.messages) == 2
    assert all("; it starts again" in line for line in caplog.messages)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_one_line_and_leaves_nobody_behind(number, tmp_path):
    """On a cluster of its own, whatever other cluster the machine may have."""
    command = [sys.executable, str(Path(__file__).with_name("parallel_tasks.py")), str(tmp_path), "ray"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": "127.0.0.1:1"}
    driver = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    while not (workers := [int(path.read_text() or 0) for path in tmp_path.iterdir()]) or 0 in workers:
        assert time.monotonic() < deadline
        assert driver.poll() is None, driver.communicate()[1]
        time.sleep(0.02)
    assert set(workers) <= set(workers_of(driver.pid))  # those that benchmarks/kills.py kills
    driver.send_signal(number)
    said = driver.communicate(timeout=PATIENCE)[1]
    assert driver.returncode == 128 + number, said
    assert said.splitlines()[-1] == "stopped; nothing is lost"
    assert "Traceback" not in said
    while any(runs(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_signal_while_ray_starts_is_ours(monkeypatch):
    """Ray has put its handler in place of ours by then."""

    def start(**settings):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start)
    with pytest.raises(Interrupted, match=r"^stopped; nothing is lost$") as stopped, stopped_at_once("nothing is lost"):
        connect()
    assert stopped.value.number == signal.SIGTERM
