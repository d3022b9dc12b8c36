"""Members on a Ray cluster of two machines, one of which goes away in the middle."""

import time
from dataclasses import dataclass

import pytest
from faults import INTERVAL, Fates, JsonStore, left_behind, population

from ray_cluster import WARNINGS, joined_cluster, lose, machine_with_its_own_disk, machines, ray
from tailguard.population.engines.ray import RayEngine, require_common
from tailguard.population.engines.serial import SerialEngine
from tailguard.population.lineage import read, replay

pytestmark = WARNINGS
INTERVALS = 5


@pytest.fixture(scope="module")
def cluster():
    with joined_cluster() as cluster:
        yield cluster


def serial(folder, **settings):
    scheduler, store = population(folder, **settings)
    SerialEngine(scheduler, Fates(folder), store).run(INTERVALS)
    return left_behind(folder)


def test_same_population_as_in_one_process_though_a_machine_is_lost(cluster, tmp_path, monkeypatch, caplog):
    """Four members on two machines. One machine is killed during the third interval: nothing but time is lost.

    Its loss counts once for each of its members: none is allowed a second one.
    """
    ours = tmp_path / "ray"
    scheduler, store = population(ours, population_size=4)
    third, go = {(member, 2 * INTERVAL): "hold" for member in range(4)}, ours / "go"
    spread = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}

    def wait_for_the_loss(timeout):
        while not go.exists():
            busy = [machine for machine in engine.executor.calls.machines().values() if machine is not None]
            if len(busy) == 4:
                lose(cluster, busy[0])
                go.touch()
            time.sleep(0.05)
        return wait(timeout)

    with (
        machines(cluster, 2, cores=2),
        RayEngine(scheduler, Fates(ours, third), store, resources=spread, max_losses=1) as engine,
        monkeypatch.context() as patch,
    ):
        engine.run(2)
        wait = engine.executor.wait
        patch.setattr(engine.executor, "wait", wait_for_the_loss)
        engine.run(INTERVALS)
    assert sum("created again from its last checkpoint" in line for line in caplog.messages) == 2
    assert left_behind(ours) == serial(tmp_path / "serial", population_size=4)


def test_apart_everybody_trains_to_the_end(cluster, tmp_path):
    scheduler, store = population(tmp_path, synchronous=False)
    fates = Fates(tmp_path, {(1, 20): "kill", (0, 20): "nan"})
    with machines(cluster, 1, cores=2), RayEngine(scheduler, fates, store, resources={"num_cpus": 0.5}) as engine:
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
    scheduler, store = population(tmp_path)
    with machines(cluster, 1, cores=1):
        with pytest.raises(ValueError, match=r"machine \S+ does not share the store of the population: give --store"):
            RayEngine(scheduler, Fates(tmp_path), OwnDisks(store.folder))
        require_common(store)


def test_a_machine_that_sees_another_disk_is_refused_before_anything_is_trained(cluster, tmp_path):
    scheduler, store = population(tmp_path)
    with machine_with_its_own_disk(cluster, tmp_path), pytest.raises(ValueError, match="does not share the store") as refused:
        RayEngine(scheduler, Fates(tmp_path), store)
    assert "such as s3://bucket/run" in str(refused.value)


def test_too_small_a_cluster_is_refused(cluster, tmp_path):
    scheduler, store = population(tmp_path)
    with machines(cluster, 1, cores=1), pytest.raises(ValueError, match="num_cpus of a call"):
        RayEngine(scheduler, Fates(tmp_path), store, resources={"num_cpus": 64})
