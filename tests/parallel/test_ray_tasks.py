"""Tasks on a Ray cluster of two machines, one of which goes away: the results of this machine, to the last bit."""

import logging
import os
import sys
import threading
import time
from dataclasses import dataclass

import pytest
from parallel_tasks import Square

from tailguard.config import load_config
from tailguard.evaluate.folds import make_folds
from tailguard.experiments import walkforward
from tailguard.experiments.walkforward import Pair, WalkforwardRun, train_all
from tailguard.market import random_walk
from tailguard.parallel.tasks import run_tasks

ray = pytest.importorskip("ray", reason='needs Ray: pip install "tailguard[ray]"')
NodeAffinitySchedulingStrategy = pytest.importorskip("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SMALL = {"object_store_memory": 100 * 2**20}
TINY = [
    *("training.steps=128", "training.n_envs=4", "training.n_steps=16", "training.n_epochs=1", "training.lstm_hidden_size=8"),
    *("training.policy=MlpLstmPolicy", "selection={blocks: 2, seeds: 1, stops: [1.0], doubt: -10}"),
    *("features.drawdown_window=21", "features.slow_window=21", "features.horizons=[1, 5]"),
    "walkforward={folds: 1, seeds: 2, warmup: 16}",
]


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **SMALL})
    path = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=path)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def add_machine(cluster, cores):
    """Add a machine whose processes have begun: Ray gives a task that waits to whoever is free first."""
    machine = cluster.add_node(num_cpus=cores, **SMALL)
    there = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
    start = ray.remote(lambda seconds: time.sleep(seconds)).options(num_cpus=1, scheduling_strategy=there)
    ray.get([start.remote(0.5) for _ in range(cores)])
    return machine


def test_a_walk_forward_that_loses_a_machine_is_the_same_as_in_this_process(cluster, tmp_path, monkeypatch, caplog):
    """The second of two machines is killed as soon as it works.

    The machines need no common disk: nothing but this process writes.
    """
    bars, config = random_walk(500, seed=0), load_config(None, TINY)
    folds = make_folds(len(bars), 35, 35, config.walkforward)
    pairs, reports, start = [Pair(folds[0], seed) for seed in (0, 1)], [], walkforward._executor
    worker, killers = add_machine(cluster, 1), []

    def watched_executor(*arguments):
        executor = start(*arguments)

        def kill():
            while worker.node_id not in executor._calls.machines().values():
                time.sleep(0.02)
            cluster.remove_node(worker, allow_graceful=False)

        killers.append(threading.Thread(target=kill, daemon=True))
        killers[0].start()
        return executor

    local, spread = (WalkforwardRun(bars, config, 16, tmp_path / engine, identity="same") for engine in ("process", "ray"))
    train_all(local, folds, pairs, 1, lambda *said: None)
    with monkeypatch.context() as patched:
        patched.setattr(walkforward, "_executor", watched_executor)
        train_all(spread, folds, pairs, 1, lambda *said: reports.append(said), "ray")
    killers[0].join()
    (line,) = caplog.messages
    assert line.endswith("; it starts again")
    assert reports[-1] == (100, 100, reports[-1][2])
    files = [sorted(path for path in (tmp_path / engine).rglob("*") if path.is_file()) for engine in ("process", "ray")]
    assert [path.relative_to(tmp_path / "process") for path in files[0]] == [
        path.relative_to(tmp_path / "ray") for path in files[1]
    ]
    assert len(files[0]) == 1 + 2 + 2
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


@dataclass(frozen=True)
class Slow(Square):
    """A square that takes a second."""

    def work(self, shared, reached):
        time.sleep(1.0)
        return super().work(shared, reached)


def test_a_machine_that_is_lost_costs_each_of_its_tasks_one_loss(cluster, caplog):
    from tailguard.parallel.ray import RayTasks

    worker = add_machine(cluster, 2)
    executor, results, seen = RayTasks(7), {}, set()

    def kill():
        while len(seen - {None}) < 2:
            time.sleep(0.05)
            seen.update(executor._calls.machines().values())
        cluster.remove_node(worker)

    killer = threading.Thread(target=kill)
    deadline = time.monotonic() + 60.0
    while executor.capacity() != 3 and time.monotonic() < deadline:  # a machine of an earlier test may not be missed yet
        time.sleep(0.2)
    assert executor.capacity() == 3
    killer.start()
    run_tasks(
        [Slow(number) for number in range(8)],
        executor,
        lambda task, result: results.update({task.number: result}) or [],
        lambda name, share: None,
        max_losses=1,
    )
    killer.join()
    assert results == {number: number**2 + 7 for number in range(8)}
    assert 1 <= len(caplog.messages) <= 2
    assert all("; it starts again" in line for line in caplog.messages)
