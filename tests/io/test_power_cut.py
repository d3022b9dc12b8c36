"""What a power cut leaves: every call that changes the disk is a place where it may happen."""

import math
from contextlib import suppress

import pytest

from power_cut import Disk, PowerCut
from tailguard.io import checkpoint
from tailguard.io.atomic import UNFINISHED
from tailguard.io.checkpoint_folder import BEST, Checkpoints
from tailguard.io.journal import Journal
from tailguard.io.sealed import read_sealed, write_sealed
from tailguard.population import lineage

WORLDS = (False, True)
PERFORMANCES = (1.0, 3.0, 2.0, 5.0, math.nan, 4.0)


def saves(folder, done):
    """Save one checkpoint after the other, and note which are safe."""
    files = Checkpoints(folder, "test", keep=2, identity="run")
    for step, performance in enumerate(PERFORMANCES):
        files.save(step, {"step": step}, performance)
        done.append(step)


def count_calls(tmp_path, monkeypatch, work):
    root = tmp_path / "counted"
    root.mkdir()
    with Disk(root).attached(monkeypatch) as disk:
        work(root, [])
    return disk.calls


def cuts(tmp_path, monkeypatch, work):
    """Yield, for a cut at every call and for both worlds, a name of the case, what is left, and what was safe."""
    for cut_at in range(count_calls(tmp_path, monkeypatch, work)):
        root, done = tmp_path / f"{cut_at}", []
        root.mkdir()
        with Disk(root, cut_at).attached(monkeypatch) as disk, suppress(PowerCut):
            work(root, done)
        for world in WORLDS:
            yield (cut_at, world), disk.after_the_cut(tmp_path / f"{cut_at}-{world}", world), done


def best_of(steps):
    known = [PERFORMANCES[step] for step in steps if not math.isnan(PERFORMANCES[step])]
    return max(known, default=-math.inf)


def test_checkpoints_survive_a_cut_at_every_call(tmp_path, monkeypatch):
    cases = 0
    for case, folder, done in cuts(tmp_path, monkeypatch, lambda root, done: saves(root / "run" / "checkpoints", done)):
        cases += 1
        left = Checkpoints(folder / "run" / "checkpoints", "test", 2, identity="run")
        found = left.newest(lambda tree: tree["step"])
        assert found in ({done[-1], done[-1] + 1} if done else {None, 0}), case
        # The best of what is safe is there, or a better one that was being saved.
        performance = left._best_performance()
        assert performance in (best_of(done), best_of(range(len(done) + 1))), case
        if done:
            assert PERFORMANCES[checkpoint.load(left.folder / BEST, kind="test")["step"]] == performance
        resume_and_finish(left, found)
    assert cases > 100


def resume_and_finish(files, found):
    """Go on from what is left: the end is that without the cut."""
    for step in range(0 if found is None else found + 1, len(PERFORMANCES)):
        files.save(step, {"step": step}, PERFORMANCES[step])
    assert files.newest(lambda tree: tree["step"]) == len(PERFORMANCES) - 1
    assert files._best_performance() == best_of(range(len(PERFORMANCES)))
    assert not list(files.folder.glob(f".*{UNFINISHED}"))


@pytest.mark.parametrize("broken", ["file", "folder"])
def test_a_skipped_fsync_loses_a_checkpoint(tmp_path, monkeypatch, broken):
    """The disk of these tests tells them apart: without either of the two, something that was saved is lost."""
    root, done = tmp_path / "root", []
    root.mkdir()
    with Disk(root, broken=(broken,)).attached(monkeypatch) as disk:
        saves(root / "checkpoints", done)
    found = []
    for world in WORLDS:
        left = Checkpoints(disk.after_the_cut(tmp_path / f"{world}", world) / "checkpoints", "test", identity="run")
        try:
            found.append(left.newest(lambda tree: tree["step"]))
        except checkpoint.CheckpointError:
            found.append(None)
    assert found != [done[-1], done[-1]]


def test_sealed_files_are_old_or_new(tmp_path, monkeypatch):
    def work(root, done):
        for version in range(3):
            write_sealed(root / "run" / "run.json", {"version": version})
            done.append(version)

    for case, folder, done in cuts(tmp_path, monkeypatch, work):
        path = folder / "run" / "run.json"
        if done or path.exists():
            assert read_sealed(path)["version"] in (len(done) - 1, len(done)), case


def test_a_new_journal_stays_with_its_records(tmp_path, monkeypatch):
    root, record = tmp_path / "root", {"order": 1}
    root.mkdir()
    with Disk(root).attached(monkeypatch) as disk:
        journal = Journal(root / "paper" / "account" / "ledger.jsonl")
        journal.append(record)
        journal.close()
    for world in WORLDS:
        left = Journal(disk.after_the_cut(tmp_path / f"{world}", world) / "paper" / "account" / "ledger.jsonl")
        assert list(left) == [record]
        left.close()


def test_events_that_were_recorded_stay(tmp_path, monkeypatch):
    def work(root, done):
        record = lineage.Lineage(root / "population" / "lineage.jsonl")
        done.append(None)
        for number in range(3):
            record({"event": "abandoned", "number": number})
            done.append(number)

    for case, folder, done in cuts(tmp_path, monkeypatch, work):
        path = folder / "population" / "lineage.jsonl"
        known = [event["number"] for event in lineage.read(path)] if path.exists() else []
        assert path.exists() or not done, case
        assert known in (list(range(max(len(done) - 1, 0))), list(range(len(done)))), case
