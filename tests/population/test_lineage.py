"""The file of events: it grows, is replayed, and is cut where a run resumes."""

import json
import os

import pytest

from tailguard.population import HyperparamConfig, PBTConfig, PBTScheduler
from tailguard.population.lineage import Lineage, read, replay

CONFIG = PBTConfig(
    population_size=3,
    perturbation_interval=1,
    hyperparams=(
        HyperparamConfig(name="lr", min_value=1e-5, max_value=1e-2, is_log_scale=True),
        HyperparamConfig(name="epochs", min_value=1, max_value=9, is_integer=True),
        HyperparamConfig(name="net", values=("small", "large")),
    ),
)


def live(scheduler, rounds):
    for number in rounds:
        for member_id in range(3):
            scheduler.report(member_id, number + 1, float((7 * number + 3 * member_id) % 5), checkpoint_path=f"{member_id}")
        for exploit in scheduler.decide().exploits:
            scheduler.commit(exploit)


def test_a_file_is_replayed_to_the_same_population(tmp_path):
    path = tmp_path / "deep" / "lineage.jsonl"
    scheduler = PBTScheduler(CONFIG, record=Lineage(path))
    live(scheduler, range(8))
    assert scheduler.exploitation_count == 8
    assert replay(read(path)) == scheduler.members
    lines = path.read_text().splitlines()
    assert len(lines) == scheduler.events == 1 + 8 * (3 + 1 + 1)
    start, exploit = json.loads(lines[0]), json.loads(lines[5])
    assert PBTConfig(**start["config"]) == CONFIG
    assert (exploit["event"], exploit["round"], exploit["target"], exploit["source"]) == ("exploit", 1, 0, 1)  # scores 0, 3, 1


def test_a_resumed_run_writes_the_same_file(tmp_path):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    live(PBTScheduler(CONFIG, record=Lineage(whole)), range(8))

    scheduler = PBTScheduler(CONFIG, record=Lineage(broken))
    live(scheduler, range(4))
    state = scheduler.state_dict()
    live(scheduler, range(4, 6))  # happens, but is not in the saved state
    with broken.open("a") as file:
        file.write('{"event": "repo')  # and here the process died

    assert replay(read(broken)) == scheduler.members
    resumed = PBTScheduler(CONFIG)
    resumed.load_state_dict(state)
    resumed.record = Lineage(broken, keep=resumed.events)
    live(resumed, range(4, 8))
    assert broken.read_bytes() == whole.read_bytes()


def test_files_are_never_overwritten_and_never_too_short(tmp_path):
    path = tmp_path / "lineage.jsonl"
    live(PBTScheduler(CONFIG, record=Lineage(path)), range(1))
    with pytest.raises(FileExistsError):
        Lineage(path)
    with pytest.raises(ValueError, match="has 6 events, but the state to resume from has seen 7"):
        Lineage(path, keep=7)
    with path.open("a") as file:
        file.write('{"event": "repo')
    with pytest.raises(ValueError, match="has 6 events"):
        Lineage(path, keep=7)
    assert len(read(path)) == 6


def test_strange_events_are_refused():
    with pytest.raises(ValueError, match="'party' is not an event"):
        replay([{"event": "party"}])
    with pytest.raises(ValueError, match="version 99"):
        replay([{"event": "start", "version": 99, "config": {}, "hyperparams": []}])


def test_an_event_is_on_the_disk_before_anything_else_happens(tmp_path, monkeypatch):
    """A state that was synced must never know more events than the file has after a power cut."""
    lineage, synced = Lineage(tmp_path / "lineage.jsonl"), []
    honest = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (honest(file), synced.append((os.fstat(file).st_ino, os.fstat(file).st_size)))
    )
    lineage({"event": "dead", "member": 0})
    assert synced == [(lineage.path.stat().st_ino, lineage.path.stat().st_size)]


def test_a_full_disk_is_told_with_the_name_of_the_lineage(tmp_path, full_disk):
    lineage = Lineage(tmp_path / "lineage.jsonl")
    with full_disk(10), pytest.raises(OSError, match=r"File too large: .*lineage\.jsonl"):
        lineage({"event": "dead", "member": 0})
    assert read(lineage.path) == []
