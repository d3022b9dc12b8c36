"""An hour of training under random faults: `python benchmarks/soak.py --minutes 60 [--seed 0] [--output FILE]`. Linux only.

In rounds: a walk-forward, paper trading, a training or a population is run without any fault through the command line, then the
same again with faults at random moments, each followed by a resumption, until it has come to its end. The end must be the same
to the last bit: the last checkpoint and every figure of a training, the winner and the lineage of a population, every
selection, agent and decision of a walk-forward, every order and account on paper. The faults, and what is expected after each,
stand in soak_faults.py. Now and then a population meets faults after which something else is learnt (a member that sees
NaN, a member whose state is lost): it must come to its end.

Beside that one training runs from the first minute to the last under a clock that jumps; its memory is read every two seconds.

One thread per process; the faults are drawn with the seed, their moments depend on the machine.
"""

import argparse
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from soak_faults import ENDED, INTERRUPTED, PATIENCE, Finding, Tormentor
from soak_subjects import (
    CHILDREN,
    POPULATION,
    TRAINING,
    UPDATE,
    VARIANTS,
    WALKFORWARD,
    Child,
    Paper,
    Population,
    Subject,
    Training,
    Walkforward,
    train_paper_agent,
)

ENDLESS = 10**12  # steps
LONGEST = 3600.0  # seconds for a run without faults; far more than it takes
BLOCKS = 12
KINDS = (Walkforward, Paper, Training, Population)
MIB = 2**20
LINE = 240


@dataclass(frozen=True)
class Round:
    """One subject from its beginning to its end.

    :param what: which subject, with which settings.
    :param findings: of its faults.
    :param same: whether it ended as the one without faults; None where that is not asked for.
    :param ended: whether it came to its end at all.
    """

    what: str
    findings: list[Finding]
    same: bool | None
    ended: bool


@dataclass
class Memory:
    """Resident memory of a process over time.

    :param seconds: when it was read.
    :param mebibytes: how much there was.
    """

    seconds: list[float] = field(default_factory=list)
    mebibytes: list[float] = field(default_factory=list)

    def watch(self, child: Child, over: threading.Event) -> None:
        begun = time.monotonic()
        while not over.wait(2.0):
            try:
                self.mebibytes.append(child.resident() / MIB)
            except OSError:
                return
            self.seconds.append(time.monotonic() - begun)

    def slope(self) -> tuple[float, float]:
        """MiB per hour and half the width of its 95 % interval; the first tenth, in which everything is loaded, is left out.

        Readings that follow each other are alike, so the line goes through the means of blocks, which are nearly independent.
        """
        first = len(self.seconds) // 10
        if len(self.seconds) - first < 2 * BLOCKS:
            return float("nan"), float("nan")
        blocks = [np.array_split(np.array(values[first:]), BLOCKS) for values in (self.seconds, self.mebibytes)]
        times, levels = ([block.mean() for block in part] for part in blocks)
        line = stats.linregress(np.array(times) / 3600.0, levels)
        return float(line.slope), float(line.stderr * stats.t.ppf(0.975, BLOCKS - 2))


def draw_subject(folder: Path, rng: np.random.Generator, size: float, number: int) -> tuple[str, Subject, Subject]:
    """Draw the settings of the next kind of subject, for the run without faults and for the one with them."""
    seed, kind = int(rng.integers(1000)), KINDS[number % len(KINDS)]
    if kind is Walkforward:
        settings = [*WALKFORWARD, f"training.seed={seed}"]
        return "walk-forward", Walkforward(folder / "whole", settings), Walkforward(folder / "faulty", settings)
    if kind is Paper:
        agent = train_paper_agent(folder)
        return "paper", Paper(folder / "whole", *agent), Paper(folder / "faulty", *agent)
    if kind is Population:
        settings = [*POPULATION, f"training.seed={seed}", f"population.seed={seed}"]
        return "population", Population(folder / "whole", settings), Population(folder / "faulty", settings)
    variant = list(VARIANTS)[int(rng.integers(len(VARIANTS)))]
    steps = UPDATE * round(size * (150 if "everything" in variant else 400))
    settings = [*TRAINING, *VARIANTS[variant], f"training.seed={seed}", f"training.steps={steps}"]
    return variant, Training(folder / "whole", settings), Training(folder / "faulty", settings)


def play(folder: Path, rng: np.random.Generator, size: float, number: int, until: float) -> Round:
    """One round; after `until` no more faults happen in it."""
    what, whole, faulty = draw_subject(folder, rng, size, number)
    harmless = not isinstance(faulty, Population) or number // len(KINDS) % 2 == 0
    if harmless and whole.start().code(LONGEST) != ENDED:
        return Round(what, [Finding("none", whole.name, "did not come to its end", False)], None, False)
    sys.stderr.write(f"{_clock()} {what}: {'as it should end is known' if harmless else 'will be harmed'}\n")
    tormentor, findings = Tormentor(faulty, rng), []
    faults = tormentor.faults(harmless)
    order: list[int] = []
    while time.monotonic() < until and len(findings) < 2 * len(faults):
        order = order or rng.permutation(len(faults)).tolist()  # all of them before any comes again
        child = tormentor.begin()
        if child.code(0.0) is not None:
            break
        findings.append(faults[order.pop()](child))
        sys.stderr.write(f"  {_clock()} {findings[-1]}\n")
        if not findings[-1].expected:
            sys.stderr.write("".join(f"    | {line}\n" for line in child.said()[-30:]))
    last = faulty.start()
    ended = last.code(LONGEST) == ENDED
    if not ended:
        sys.stderr.write("".join(f"    | {line}\n" for line in last.said()[-30:]))
    same = whole.result() == faulty.result() if harmless and ended else None
    return Round(what if harmless else f"{what}, harmed", findings, same, ended)


def report(minutes: float, seed: int, rounds: list[Round], memory: Memory, stopped: int | None) -> str:
    """Return the findings as markdown."""
    findings = [finding for one in rounds for finding in one.findings]
    wrong = [finding for finding in findings if not finding.expected]
    compared = [one for one in rounds if one.same is not None]
    slope, width = memory.slope()
    levels = memory.mebibytes or [float("nan")]
    lines = [
        f"{minutes:.0f} minutes, seed {seed}; {platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}, numpy {np.__version__} (`benchmarks/soak.py`).",
        "",
        f"- {len(findings)} faults in {len(rounds)} rounds, {len(findings) - len(wrong)} with the outcome that was promised.",
        f"- {sum(one.ended for one in rounds)} of {len(rounds)} came to their end; of the {len(compared)} whose faults are "
        f"harmless, {sum(bool(one.same) for one in compared)} ended exactly as without faults, to the last bit.",
        f"- Resident size of a training that ran all the time: from {levels[0]:.0f} MiB at its start to {levels[-1]:.0f} MiB, "
        f"trend {slope:+.2f} +- {width:.2f} MiB/h (95 %, {len(levels)} readings without the first tenth). Asked to stop, "
        f"it ended with exit code {stopped}.",
        "",
        "| fault | subject | times | as promised | outcome | most that was lost | for example |",
        "|---|---|---|---|---|---|---|",
    ]
    groups = Counter((finding.fault, finding.subject) for finding in findings)
    for (fault, subject), times in sorted(groups.items()):
        alike = [finding for finding in findings if (finding.fault, finding.subject) == (fault, subject)]
        outcomes = ", ".join(sorted({finding.outcome for finding in alike}))
        words = next((finding.words for finding in alike if finding.words), "")
        unit = next(kind.unit for kind in KINDS if kind.name == subject)
        lines.append(
            f"| {fault} | {subject} | {times} | {sum(finding.expected for finding in alike)} | {outcomes} | "
            f"{max(finding.lost for finding in alike):,} {unit} | {_example(words)} |"
        )
    lines += ["", "| round | faults | ended | exactly as without faults |", "|---|---|---|---|"]
    for one in rounds:
        same = {None: "not asked", True: "yes", False: "**no**"}[one.same]
        lines.append(f"| {one.what} | {len(one.findings)} | {'yes' if one.ended else '**no**'} | {same} |")
    return "\n".join(lines) + "\n"


def _example(words: str) -> str:
    short = words.replace("|", "/").replace("`", "'")
    return f"`{short if len(short) <= LINE else short[:LINE] + ' ...'}`" if short else ""


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=float, default=1.0, help="of a training: 1 is some 200,000 steps")
    parser.add_argument("--output", type=Path, help="write the report here, too")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # children must not outlive this
    rng, begun = np.random.default_rng(arguments.seed), time.monotonic()
    until = begun + 60.0 * arguments.minutes
    rounds: list[Round] = []
    memory, over = Memory(), threading.Event()
    with tempfile.TemporaryDirectory() as name:
        long = Training(Path(name) / "long", [*TRAINING, f"training.steps={ENDLESS}"]).start(clock=arguments.seed)
        watcher = threading.Thread(target=memory.watch, args=(long, over), daemon=True)
        watcher.start()
        try:
            while time.monotonic() < until:
                folder = Path(name) / f"round-{len(rounds)}"
                folder.mkdir()
                rounds.append(play(folder, rng, arguments.size, len(rounds), until))
                shutil.rmtree(folder, ignore_errors=True)  # a member that outlived its driver may still write
                sys.stderr.write(f"{_clock()} round {len(rounds)}: {rounds[-1].what}, same: {rounds[-1].same}\n")
        finally:
            long.process.send_signal(signal.SIGTERM)
            stopped = long.code(PATIENCE)
            over.set()
            watcher.join()
            text = report((time.monotonic() - begun) / 60.0, arguments.seed, rounds, memory, stopped)
            sys.stdout.write(text)
            if arguments.output is not None:
                arguments.output.write_text(text, encoding="utf-8")
            for child in CHILDREN:
                child.kill()
    good = stopped == INTERRUPTED and all(
        one.ended and one.same is not False and all(finding.expected for finding in one.findings) for one in rounds
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
