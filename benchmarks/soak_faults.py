"""The faults that soak.py injects into its subjects, and what it expects. A fault starts the process it acts on.

Every fault ends with a finding: what happened, whether that is what was promised, and the words of the child. Expected is that
it continues, or that it stops with an exit code that says so and one line that tells what is wrong; a traceback never is.
"""

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from soak_subjects import Child, Paper, Population, Subject, Training, Walkforward, wait_for_step

ENDED, USER_ERROR, INTERRUPTED = 0, 2, 128 + signal.SIGTERM
PATIENCE = 900.0  # seconds for anything that should happen soon, on a machine that others use as well


@dataclass(frozen=True)
class Finding:
    """The result of one fault.

    :param fault: its name.
    :param subject: what it happened to.
    :param outcome: in a few words.
    :param expected: whether it was as promised.
    :param words: the last line that the child said.
    :param lost: progress that has to be made again: steps, decisions, pairs or orders.
    """

    fault: str
    subject: str
    outcome: str
    expected: bool
    words: str = ""
    lost: int = 0


class Tormentor:
    """Injects random faults into one subject.

    :param subject: what is to be tormented.
    :param rng: decides what and when.
    """

    def __init__(self, subject: Subject, rng: np.random.Generator) -> None:
        self.subject, self.rng = subject, rng

    def begin(self) -> Child:
        """A child that has made progress, or has ended; its clock jumps in every other case."""
        clock = int(self.rng.integers(2**31)) if self.rng.random() < 0.5 else None
        before = self.subject.safe()
        child = self.subject.start(clock)
        wait_for_step(child, self.subject, before, PATIENCE)
        child.code(float(self.rng.uniform(0.0, 3.0)))
        return child

    def finding(self, fault: str, outcome: str, expected: bool, child: Child | None = None) -> Finding:
        """With what was lost, and the child's last words."""
        lost = max(self.subject.progress() - self.subject.safe(), 0)
        said = child.said() if child is not None else []
        clear = not any(line.startswith("Traceback") for line in said)
        words = next((line for line in reversed(said) if line.startswith("error:")), said[-1] if said else "")
        words = words.replace(str(self.subject.folder), "RUN")
        return Finding(fault, self.subject.name, outcome, expected and clear and lost <= self.subject.allowance, words, lost)

    def stopped(self, fault: str, child: Child, code: int, words: str) -> Finding:
        """It must stop by itself, with this code and these words; or come to its end before it notices anything."""
        ended = child.code(PATIENCE)
        if ended is None:
            child.kill()
            return self.finding(fault, f"still running after {PATIENCE:g} s", False, child)
        right = ended == ENDED or (ended == code and words in (child.said() or [""])[-1])
        return self.finding(fault, f"exit code {ended}", right, child)

    # -------------------------------------------------------------------------------------------------------- for all

    def kill(self, child: Child) -> Finding:
        child.kill()
        return self.finding("killed", "killed", True, child)

    def stall(self, child: Child) -> Finding:
        """Stop the process for a while: it must continue as if nothing had happened."""
        victims = [child.pid, *child.members()]
        for pid in victims:
            _send(pid, signal.SIGSTOP)
        time.sleep(self.rng.uniform(1.0, 4.0))
        for pid in victims:
            _send(pid, signal.SIGCONT)
        before = self.subject.progress()
        wait_for_step(child, self.subject, before, PATIENCE)
        continued = child.code(0.0) == ENDED or self.subject.progress() > before
        child.kill()
        return self.finding("stalled", "continued" if continued else "did not continue", continued, child)

    def full_disk(self, child: Child) -> Finding:
        """No file may grow beyond a size that the next record or the next checkpoint has; what is there must stay as it is."""
        members = child.members()
        pid = int(self.rng.choice([child.pid, *members]))
        most = int(self.rng.choice([5_000, self.subject.record().stat().st_size + 30_000]))
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        except ProcessLookupError:
            child.kill()
            return self.finding("full disk", "was over before it began", True, child)
        who = "a member's" if pid in members else "its"
        return self.stopped(f"full disk, {who} process", child, USER_ERROR, "File too large")

    def intruder(self, child: Child) -> Finding:
        """A second process in the same folder is refused, and the first continues."""
        second = self.subject.child(self.subject.arguments(), None, self.subject.errors.with_suffix(".second"))
        code = second.code(PATIENCE)
        refused = code == USER_ERROR and self.subject.busy in (second.said() or [""])[-1]
        over = child.code(0.0) == ENDED
        finding = self.finding("second process", f"exit code {code}", refused or over, second)
        second.kill()
        child.kill()
        return finding

    def terminate(self, child: Child) -> Finding:
        """It saves and stops; nothing at all is lost."""
        child.process.send_signal(signal.SIGTERM)
        finding = self.stopped("asked to stop", child, INTERRUPTED, "stopped")
        whole = self.subject.safe() == self.subject.progress()
        return finding if whole else self.finding("asked to stop", "did not save", False, child)

    # --------------------------------------------------------------------------------------------------- of a training

    def nan(self, child: Child) -> Finding:
        what = str(self.rng.choice(["reward", "observation"]))
        self.subject.burst.write_text(what)
        finding = self.stopped(f"NaN in the {what}", child, USER_ERROR, "not finite")
        self.subject.burst.unlink(missing_ok=True)
        return finding

    def damage(self, child: Child) -> Finding:
        """Damage the newest checkpoint: the one before is taken, which costs one interval more."""
        child.kill()
        assert isinstance(self.subject, Training)
        paths = self.subject.checkpoints()
        if len(paths) < 2:
            return self.finding("killed", "killed", True, child)
        before = self.subject.progress()
        how = _spoil(paths[-1], self.rng)
        lost = before - self.subject.safe()
        again = self.subject.start()
        wait_for_step(again, self.subject, self.subject.safe(), PATIENCE)
        said = " ".join(again.said())
        went_back = "going back to the one before" in said and again.code(0.0) in (None, ENDED)
        again.kill()
        finding = self.finding(f"checkpoint {how}", "the one before is taken" if went_back else "not noticed", went_back, again)
        allowed = lost <= self.subject.allowance + self.subject.allowance
        return Finding(finding.fault, finding.subject, finding.outcome, finding.expected and allowed, finding.words, lost)

    def damage_all(self, child: Child) -> Finding:
        """With no checkpoint left it stops and touches nothing. They are put back afterwards."""
        child.kill()
        assert isinstance(self.subject, Training)
        paths, spare = self.subject.checkpoints(), self.subject.folder.with_name("spare")
        if not paths:
            return self.finding("killed", "killed", True, child)
        shutil.copytree(paths[0].parent, spare, dirs_exist_ok=True)
        for path in paths:
            _spoil(path, self.rng)
        again = self.subject.start()
        ended = again.code(PATIENCE)
        right = ended == USER_ERROR and "can be used" in (again.said() or [""])[-1]
        again.kill()
        shutil.rmtree(paths[0].parent)
        shutil.move(spare, paths[0].parent)
        return self.finding("all checkpoints damaged", f"exit code {ended}", right, again)

    # ------------------------------------------------------------------------- of a walk-forward and of paper trading

    def damage_pair(self, child: Child) -> Finding:
        """The file of a finished pair is damaged: it is named, and the pair is trained again."""
        child.kill()
        assert isinstance(self.subject, Walkforward)
        pairs = self.subject.pairs()
        if not pairs:
            return self.finding("killed", "killed", True, child)
        victim = pairs[int(self.rng.integers(len(pairs)))]
        before, how = victim.read_bytes(), _spoil(victim, self.rng)
        again = self.subject.start()
        begun = time.monotonic()
        while victim.read_bytes() != before and again.code(0.2) is None and time.monotonic() < begun + PATIENCE:
            continue
        named = any(f"{victim.stem} is trained again" in line for line in again.said())
        right = named and victim.read_bytes() == before
        again.kill()
        return self.finding(f"finished pair {how}", "trained again" if right else "not noticed", right, again)

    def damage_ledger(self, child: Child) -> Finding:
        """A bit of the ledger is flipped: nothing is ordered on top of it. It is put back afterwards."""
        child.kill()
        assert isinstance(self.subject, Paper)
        ledger = self.subject.record()
        before = ledger.read_bytes()
        broken = bytearray(before)
        broken[int(self.rng.integers(len(before) // 2))] ^= 1 << int(self.rng.integers(8))
        ledger.write_bytes(broken)
        again = self.subject.start()
        ended = again.code(PATIENCE)
        right = ended == USER_ERROR and "is damaged" in (again.said() or [""])[-1] and ledger.read_bytes() == broken
        again.kill()
        ledger.write_bytes(before)
        return self.finding("ledger flipped", f"exit code {ended}", right, again)

    # ------------------------------------------------------------------------- of a population, and of a walk-forward

    def kill_member(self, child: Child) -> Finding:
        """It is made again and repeats its interval; nobody else notices."""
        members = child.members()
        if members:
            _send(int(self.rng.choice(members)), signal.SIGKILL)
        before = self.subject.progress()
        wait_for_step(child, self.subject, before, PATIENCE)  # one loss per interval: more would be a dead member
        continued = child.code(0.0) == ENDED or self.subject.progress() > before
        child.kill()
        return self.finding("member killed", "continued" if continued else "did not continue", continued, child)

    # ---------------------------------------------------------------------------------- that change what is learnt

    def member_nan(self, child: Child) -> Finding:
        """Let one member fail: the population continues without it."""
        self.subject.burst.write_text(str(self.rng.choice(["reward", "observation"])))
        before = self.subject.progress()
        wait_for_step(child, self.subject, before + 1, PATIENCE)
        continued = child.code(0.0) in (None, ENDED) and self.subject.progress() > before
        self.subject.burst.unlink(missing_ok=True)
        child.kill()
        return self.finding("NaN in one member", "continued" if continued else "did not continue", continued, child)

    def damage_member(self, child: Child) -> Finding:
        """Its state is gone, so it becomes a copy of another."""
        child.kill()
        assert isinstance(self.subject, Population)
        states = self.subject.states()
        if not states:
            return self.finding("killed", "killed", True, child)
        how = _spoil(states[int(self.rng.integers(len(states)))], self.rng)
        before = self.subject.safe()
        again = self.subject.start()
        wait_for_step(again, self.subject, before, PATIENCE)
        continued = again.code(0.0) in (None, ENDED) and self.subject.progress() > before
        again.kill()
        return self.finding(f"member's state {how}", "continued" if continued else "did not continue", continued, again)

    def faults(self, harmless: bool) -> list[Callable[[Child], Finding]]:
        """Those that may happen to this subject.

        :param harmless: those after which the same is learnt as without them; else the others.
        """
        if not harmless:
            return [self.member_nan, self.damage_member]
        common = [self.kill, self.stall, self.full_disk, self.intruder]
        if isinstance(self.subject, Training):
            return [*common, self.kill, self.terminate, self.nan, self.damage, self.damage_all]
        if isinstance(self.subject, Walkforward):
            return [*common, self.kill_member, self.terminate, self.damage_pair]
        if isinstance(self.subject, Paper):
            return [*common, self.kill, self.terminate, self.damage_ledger]
        return [*common, self.kill_member, self.kill_member]


def _spoil(path: Path, rng: np.random.Generator) -> str:
    data, how = bytearray(path.read_bytes()), str(rng.choice(["cut", "flipped", "emptied", "unreadable"]))
    if how == "unreadable" and os.geteuid() == 0:
        how = "overwritten"  # nothing is unreadable to root
    if how == "unreadable":
        path.chmod(0)
        return how
    if how == "flipped":
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    content = {
        "cut": data[: int(rng.integers(1, len(data)))],
        "flipped": data,
        "emptied": b"",
        "overwritten": rng.bytes(len(data)),
    }
    path.write_bytes(content[how])
    return how


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
