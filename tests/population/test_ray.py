"""Members on a Ray cluster of two machines, one of which goes away in the middle."""

import logging
import os
import sys
import threading
import time

import pytest
from faults import INTERVAL, Fates, left_behind, population

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
    """Four members on two machines. One machine is killed during the third interval: nothing but time is lost."""
    from tailguard.population.engines.ray import RayEngine

    ours = tmp_path / "ray"
    scheduler, store = population(ours, population_size=4)
    engine = RayEngine(scheduler, Fates(ours, pause=0.3), store, resources={"num_cpus": 0.5, "scheduling_strategy": "SPREAD"})
    with engine:
        engine.run(2)
        machines = set(engine.executor.nodes().values())
        killer = threading.Thread(target=lambda: (time.sleep(0.1), cluster.remove_node(cluster.worker)))
        killer.start()
        engine.run(INTERVALS)
        killer.join()
    assert len(machines) == 2
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


def test_too_small_a_cluster_is_refused(cluster, tmp_path):
    from tailguard.population.engines.ray import RayEngine

    scheduler, store = population(tmp_path)
    with pytest.raises(ValueError, match="num_cpus of a member"):
        RayEngine(scheduler, Fates(tmp_path), store, resources={"num_cpus": 64})
