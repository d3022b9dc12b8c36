"""Checkpoints under everything that may happen to them, in any order."""

import math
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from power_cut import Disk, PowerCut
from tailguard.io import checkpoint
from tailguard.io.atomic import UNFINISHED
from tailguard.io.checkpoint import CheckpointError
from tailguard.io.checkpoint_folder import BEST, Checkpoints

KEEP = 3
performances = st.floats(-1.0, 1.0) | st.just(math.nan)


class CheckpointFolder(RuleBasedStateMachine):
    """A training that saves, is killed, loses power, finds damaged and foreign files, and resumes.

    What must be true is kept beside it: by step, whether the file there is sound, and what it holds.
    """

    @initialize()
    def begin(self):
        self.root = Path(tempfile.mkdtemp())
        self.cuts, self.step, self.draws = 0, 0, 0
        self.sound: dict[int, int] = {}  # by step: the number that its file holds
        self.unsound: set[int] = set()
        self.open()

    def open(self):
        self.folder = self.root / "checkpoints"
        self.files = Checkpoints(self.folder, "test", KEEP, identity="mine")

    def path(self, step):
        return self.folder / f"step-{step:012d}.safetensors"

    def forget_the_oldest(self):
        for step in sorted({*self.sound, *self.unsound})[:-KEEP]:
            self.sound.pop(step, None)
            self.unsound.discard(step)

    @rule(performance=performances)
    def save(self, performance):
        self.step, self.draws = self.step + 1, self.draws + 1
        before = self.files._best_performance()
        self.files.save(self.step, {"number": self.draws}, performance)
        self.unsound.discard(self.step)
        self.sound[self.step] = self.draws
        self.forget_the_oldest()
        assert not list(self.folder.glob(f".*{UNFINISHED}"))
        assert self.files._best_performance() == max(before, -math.inf if math.isnan(performance) else performance)

    @rule(performance=performances, cut_at=st.integers(0, 25), names_written=st.booleans())
    def lose_power_while_saving(self, performance, cut_at, names_written):
        best, number = self.files._best_performance(), self.draws + 1
        with pytest.MonkeyPatch.context() as patch, Disk(self.root, cut_at).attached(patch) as disk, suppress(PowerCut):
            self.files.save(self.step + 1, {"number": number}, performance)
        self.cuts, self.draws = self.cuts + 1, number
        new = disk.after_the_cut(self.root.with_name(f"{self.root.name}-{self.cuts}"), names_written)
        shutil.rmtree(self.root)
        self.root = new
        self.open()
        assert self.files._best_performance() in (best, max(best, performance))
        try:
            saved = checkpoint.load(self.path(self.step + 1), kind="test")["number"] == number
        except CheckpointError:
            saved = False
        if saved:
            self.step += 1
            self.unsound.discard(self.step)
            self.sound[self.step] = number
        present = {int(path.stem.removeprefix("step-")) for path in self.files.paths()}
        kept = sorted({*self.sound, *self.unsound})[-KEEP:] if saved else sorted({*self.sound, *self.unsound})
        assert set(kept) <= present  # nothing but the oldest goes, and only when there is a newer one
        self.sound = {step: held for step, held in self.sound.items() if step in present}
        self.unsound &= present

    @rule()
    def kill_and_leave_a_half_written_file(self):
        self.folder.mkdir(exist_ok=True)
        (self.folder / f".step-{self.step + 1:012d}.safetensors.4711{UNFINISHED}").write_bytes(b"half")
        self.open()

    @precondition(lambda self: self.sound)
    @rule(data=st.data(), place=st.floats(0.0, 1.0, exclude_max=True), cut=st.booleans())
    def damage(self, data, place, cut):
        step = data.draw(st.sampled_from(sorted(self.sound)))
        broken = bytearray(self.path(step).read_bytes())
        if cut:
            del broken[int(place * len(broken)) :]
        else:
            broken[int(place * len(broken))] ^= 0xFF
        self.path(step).write_bytes(bytes(broken))
        del self.sound[step]
        self.unsound.add(step)

    @precondition(lambda self: self.sound)
    @rule(data=st.data())
    def put_a_foreign_checkpoint_in_its_place(self, data):
        step = data.draw(st.sampled_from(sorted(self.sound)))
        checkpoint.save(self.path(step), {"number": -1, "identity": "another"}, kind="test")
        del self.sound[step]
        self.unsound.add(step)

    @rule(performance=performances)
    def a_second_process_of_another_run_saves_elsewhere(self, performance):
        Checkpoints(self.root / "other", "test", KEEP, identity="another").save(self.step + 7, {"number": -2}, performance)

    @rule()
    def resume(self):
        self.open()
        newest = max(self.sound, default=None)
        if newest is None and self.unsound:
            with pytest.raises(CheckpointError, match="none of the"):
                self.files.newest(lambda tree: tree)
            shutil.rmtree(self.folder)  # the user starts over
            self.unsound, self.step = set(), 0
            return
        found = self.files.newest(lambda tree: tree)
        assert found == (None if newest is None else {"number": self.sound[newest]})
        self.step = newest or 0

    @invariant()
    def the_best_is_whole(self):
        if (self.folder / BEST).exists():
            assert checkpoint.load(self.folder / BEST, kind="test")["identity"] == "mine"

    def teardown(self):
        shutil.rmtree(self.root, ignore_errors=True)


TestCheckpointFolder = CheckpointFolder.TestCase
TestCheckpointFolder.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
