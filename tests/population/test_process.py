"""Members in processes: the same population as in one process, whatever happens to the processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import INTERVAL, Fates, left_behind, population

from tailguard.population.engines.process import ProcessEngine
from tailguard.population.engines.serial import SerialEngine
from tailguard.population.lineage import Lineage, read, replay

INTERVALS = 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the lineage and the states after six intervals in one process."""
    folder = tmp_path_factory.mktemp("serial")
    scheduler, store = population(folder)
    SerialEngine(scheduler, Fates(folder), store).run(INTERVALS)
    assert scheduler.exploitation_count > 2
    return left_behind(folder)


def run(folder, plan=None, intervals=INTERVALS, settings=None, **options):
    scheduler, store = population(folder, **(settings or {}))
    with ProcessEngine(scheduler, Fates(folder, plan or {}), store, **options) as engine:
        engine.run(intervals)
    return scheduler


def events(folder, kind):
    return [event for event in read(folder / "lineage.jsonl") if event["event"] == kind]


def test_same_lineage_and_states_as_in_one_process(tmp_path, undisturbed):
    before = os.environ.get("MKL_NUM_THREADS")
    scheduler, store = population(tmp_path)
    with ProcessEngine(scheduler, Fates(tmp_path), store) as engine:
        engine.run(INTERVALS)
        environment = Path(f"/proc/{engine.executor.pid(0)}/environ").read_bytes().split(b"\0")
    assert left_behind(tmp_path) == undisturbed
    assert {b"OMP_NUM_THREADS=1", b"MKL_NUM_THREADS=1", b"NUMBA_NUM_THREADS=1"} <= set(environment)
    assert os.environ.get("MKL_NUM_THREADS") == before


def test_the_history_is_appended_and_never_written_again(tmp_path):
    """The record of the population does not grow with its age, and an interrupted one has its whole history again."""
    scheduler, store = population(tmp_path)
    engine = SerialEngine(scheduler, Fates(tmp_path), store)
    engine.run(1)
    record, first = tmp_path / "states" / "population.json", tmp_path / "states" / "history_0.json"
    size, before = record.stat().st_size, (first.stat().st_mtime_ns, first.read_bytes())
    engine.run(30)
    assert record.stat().st_size < 2 * size
    assert (first.stat().st_mtime_ns, first.read_bytes()) == before
    other = SerialEngine(population(tmp_path / "other")[0], Fates(tmp_path), store)
    other.resume()
    assert other.scheduler.state_dict() == scheduler.state_dict()
    assert all(len(member.history) == 30 for member in other.scheduler.members)


def test_a_population_of_an_earlier_version_is_resumed(tmp_path):
    scheduler, store = population(tmp_path)
    SerialEngine(scheduler, Fates(tmp_path), store).run(3)
    store.write_population({"version": 1, "scheduler": scheduler.state_dict()})
    for part in (tmp_path / "states").glob("history_*"):
        part.unlink()
    other = SerialEngine(population(tmp_path / "other")[0], Fates(tmp_path), store)
    other.resume()
    other.run(4)
    again = SerialEngine(population(tmp_path / "third")[0], Fates(tmp_path), store)
    again.resume()
    assert again.scheduler.state_dict() == other.scheduler.state_dict()
    assert [len(member.history) for member in again.scheduler.members] == [4, 4, 4]


def test_a_killed_member_costs_time_and_nothing_else(tmp_path, undisturbed):
    """SIGKILL in the middle of an interval: one right after the start, one that has a checkpoint, one that is a fresh copy."""
    copied = next(event for event in map(json.loads, undisturbed[0].splitlines()) if event["event"] == "exploit")
    age = copied["round"] * INTERVAL
    run(tmp_path, {(0, 0): "kill", (1, 20): "kill", (copied["target"], age): "kill"})
    assert sum("-" in path.name for path in tmp_path.iterdir()) == len({(0, 0), (1, 20), (copied["target"], age)})
    assert left_behind(tmp_path) == undisturbed


def test_a_member_that_always_dies_is_replaced_and_the_others_continue(tmp_path, caplog):
    scheduler = run(tmp_path, {(1, 20): "cursed"}, intervals=4, max_losses=1)
    assert events(tmp_path, "dead")[0]["member"] == 1
    assert any(event["target"] == 1 for event in events(tmp_path, "exploit"))
    assert [scheduler.members[i].step for i in (0, 2)] == [40, 40]
    assert "Member 1: lost (its process ended with exit code -9); created again from its last checkpoint" in caplog.messages
    assert [m.to_dict() for m in replay(read(tmp_path / "lineage.jsonl"))] == [m.to_dict() for m in scheduler.members]


def test_without_a_finite_score_or_by_its_own_word_a_member_is_replaced(tmp_path):
    scheduler = run(tmp_path, {(0, 10): "nan", (2, 10): "fail"}, intervals=3)
    second = [event for event in events(tmp_path, "exploit") if event["round"] == 2]
    assert [(event["target"], event["source"]) for event in second] == [(0, 1), (2, 1)]
    assert [event["member"] for event in events(tmp_path, "dead")] == [2]
    assert [member.alive for member in scheduler.members] == [True] * 3


def test_apart_everybody_trains_to_the_end(tmp_path):
    scheduler = run(tmp_path, {(1, 20): "kill"}, settings={"synchronous": False})
    assert [member.step for member in scheduler.members] == [INTERVALS * INTERVAL] * 3
    assert [m.to_dict() for m in replay(read(tmp_path / "lineage.jsonl"))] == [m.to_dict() for m in scheduler.members]


def test_a_member_that_hangs_is_created_again(tmp_path, undisturbed, caplog):
    run(tmp_path, {(2, 20): "hang"}, time_limit=5.0)
    assert "Member 2: lost (no result within 5 s); created again from its last checkpoint" in caplog.messages
    assert left_behind(tmp_path) == undisturbed


def test_a_bug_ends_the_run_and_shows_its_trace(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)member 1 has a bug.*by intent"):
        run(tmp_path, {(1, 10): "bug"})


def test_a_full_disk_of_a_member_ends_the_run_and_is_no_bug(tmp_path):
    with pytest.raises(OSError, match=r"member 1 cannot continue: \[Errno 28\] No space left on device: 'its file'"):
        run(tmp_path / "processes", {(1, 10): "disk"})


def test_a_killed_driver_resumes_with_the_same_decisions(tmp_path, undisturbed):
    command = [sys.executable, str(Path(__file__).with_name("drive.py")), str(tmp_path), str(INTERVALS)]
    driver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    lineage = tmp_path / "lineage.jsonl"
    try:
        deadline = time.monotonic() + 200.0
        while not (lineage.exists() and len(read(lineage)) >= 9):
            assert time.monotonic() < deadline
            assert driver.poll() is None
            time.sleep(0.01)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert lineage.read_text() != undisturbed[0]
    scheduler, store = population(tmp_path / "other")
    store = type(store)(tmp_path / "states")
    with ProcessEngine(scheduler, Fates(tmp_path), store) as engine:
        engine.resume()
        scheduler.record = Lineage(lineage, keep=scheduler.events)
        engine.run(INTERVALS)
    assert left_behind(tmp_path) == undisturbed
