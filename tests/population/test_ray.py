"""Members on a Ray cluster of two machines, one of which goes away in the middle."""

import logging
import os
import sys
import threading
import time
from dataclasses import dataclass

import pytest
from faults import INTERVAL, Fates, JsonStore, left_behind, population

from tailguard.population.engines.serial import SerialEngine
from tailguard.population.lineage import read, replay

ray = pytest.importorskip("ray", reason='needs Ray: pip install "tailguard[ray]"')
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
INTERVALS = 5
SMALL = {"object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **SMALL})
    cluster.worker = cluster.add_node(num_cpus=2, resources={"far": 2.0}, **SMALL)
    path = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # of the learners in faults.py
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=path)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def serial(folder, **settings):
    scheduler, store = population(folder, **settings)
    SerialEngine(scheduler, Fates(folder), store).run(INTERVALS)
    return left_behind(folder)


def test_same_population_as_in_one_process_though_a_machine_is_lost(cluster, tmp_path, caplog):
    """Four members on two machines. One machine is killed during the third interval: nothing but time is lost.

    Its loss counts once for each of its members: none is allowed a second one.
    """
    from tailguard.population.engines.ray import RayEngine

    ours = tmp_path / "ray"
    scheduler, store = population(ours, population_size=4)
    spread = {"num_cpus": 0.5, "scheduling_strategy": "SPREAD"}
    seen = []

    def kill():
        while len(set(seen) - {None}) < 2:  # both machines train members of the third interval
            time.sleep(0.05)
            seen.extend(engine.executor.calls.machines().values())
        cluster.remove_node(cluster.worker)

    with RayEngine(scheduler, Fates(ours, pause=1.0), store, resources=spread, max_losses=1) as engine:
        engine.run(2)
        killer = threading.Thread(target=kill)
        killer.start()
        engine.run(INTERVALS)
        killer.join()
    assert "created again from its last checkpoint" in caplog.text
    assert left_behind(ours) == serial(tmp_path / "serial", population_size=4)


def test_apart_everybody_trains_to_the_end(cluster, tmp_path):
    from tailguard.population.engines.ray import RayEngine

    scheduler, store = population(tmp_path, synchronous=False)
    fates = Fates(tmp_path, {(1, 20): "kill", (0, 20): "nan"})
    with RayEngine(scheduler, fates, store, resources={"num_cpus": 0.5}) as engine:
        engine.run(INTERVALS)
    assert [member.step for member in scheduler.members] == [INTERVALS * INTERVAL] * 3
    assert [m.to_dict() for m in replay(read(tmp_path / "lineage.jsonl"))] == [m.to_dict() for m in scheduler.members]


@dataclass(frozen=True)
class OwnDisks(JsonStore):
    """A store on the disk of each machine, which no other machine sees."""

    def own(self):
        folder = self.folder / ray.get_runtime_context().get_node_id()
        folder.mkdir(exist_ok=True)
        return JsonStore(folder)

    def write(self, name, state):
        self.own().write(name, state)

    def read(self, name):
        return self.own().read(name)


def test_machines_without_a_common_disk_are_refused_before_anything_is_trained(cluster, tmp_path):
    from tailguard.population.engines.ray import RayEngine, require_common

    other = cluster.add_node(num_cpus=1, **SMALL)
    scheduler, store = population(tmp_path)
    with pytest.raises(ValueError, match=r"machine \S+ does not share the store of the population: give --store"):
        RayEngine(scheduler, Fates(tmp_path), OwnDisks(store.folder))
    require_common(store)
    cluster.remove_node(other)


def test_too_small_a_cluster_is_refused(cluster, tmp_path):
    from tailguard.population.engines.ray import RayEngine

    scheduler, store = population(tmp_path)
    with pytest.raises(ValueError, match="num_cpus of a call"):
        RayEngine(scheduler, Fates(tmp_path), store, resources={"num_cpus": 64})
