"""A population whose machine loses its power at any call that changes the disk: it ends as if nothing had happened."""

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from faults import INTERVAL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from population_toys import MovingOptimum

from power_cut import Disk, PowerCut
from tailguard.population import PBTConfig, PBTScheduler
from tailguard.population.engines.serial import SerialEngine
from tailguard.population.lineage import Lineage
from tailguard.population.store import FileStore

CONFIG = PBTConfig(population_size=3, perturbation_interval=INTERVAL, hyperparams=MovingOptimum.search, seed=5)
INTERVALS = 4
STATES, LINEAGE = "states", "lineage.jsonl"


def train(folder, done=None):
    """Train to the end, from wherever the folder stands, as a run of a population does; note each decision that is safe."""
    store, scheduler = FileStore(folder / STATES), PBTScheduler(CONFIG)
    engine = SerialEngine(scheduler, MovingOptimum, store)
    if store.read_population() is None:
        (folder / LINEAGE).unlink(missing_ok=True)
        engine.scheduler = scheduler = PBTScheduler(CONFIG, record=Lineage(folder / LINEAGE))
    else:
        engine.resume()
        scheduler.record = Lineage(folder / LINEAGE, keep=scheduler.events)
    engine.on_round = lambda decided: None if done is None else done.append(decided.number)
    engine.run(INTERVALS)


def left(folder):
    return (folder / LINEAGE).read_bytes(), {path.name: path.read_bytes() for path in (folder / STATES).glob("member*")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder)
    assert b'"exploit"' in (folder / LINEAGE).read_bytes()
    return left(folder)


def lose_power(root, target, cut_at, names_written):
    """Train until the power goes; return what is left of the disk, which has every decision that was made, and the disk."""
    done = []
    with pytest.MonkeyPatch.context() as patch, Disk(root, cut_at).attached(patch) as disk, suppress(PowerCut):
        train(root / "run", done)
    remains = disk.after_the_cut(target, names_written)
    if done:
        assert FileStore(remains / "run" / STATES).read_population()["scheduler"]["rounds"] >= done[-1]
    return remains, disk


def test_a_cut_at_every_call_costs_nothing(undisturbed, tmp_path):
    cut_at, disk = 0, None
    while disk is None or disk.dead:
        for world in (False, True):
            root = tmp_path / f"{cut_at}-{world}"
            (root / "before").mkdir(parents=True)
            remains, disk = lose_power(root / "before", root / "after", cut_at, world)
            train(remains / "run")
            assert left(remains / "run") == undisturbed, (cut_at, world)
        cut_at += 1
    assert cut_at > 100


@given(cuts=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=2, max_size=8))
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_cuts_one_after_the_other_cost_nothing(undisturbed, cuts):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "0"
        root.mkdir()
        for number, (cut_at, world) in enumerate(cuts, 1):
            root, _ = lose_power(root, Path(name) / f"{number}", cut_at, world)
        train(root / "run")
        assert left(root / "run") == undisturbed


@pytest.mark.parametrize("broken", ["file", "folder"])
def test_a_skipped_fsync_would_be_noticed(undisturbed, tmp_path, broken):
    """Without either of the two, something of a finished population is lost: the disk of these tests tells."""
    root = tmp_path / "root"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch, Disk(root, broken=(broken,)).attached(patch) as disk:
        train(root / "run")
    found = []
    for world in (False, True):
        remains = disk.after_the_cut(tmp_path / f"{world}", world) / "run"
        found.append(left(remains) if (remains / LINEAGE).exists() else None)
    assert found != [undisturbed, undisturbed]
