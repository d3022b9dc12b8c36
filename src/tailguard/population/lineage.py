"""The lineage of a population: a log of events, one line of JSON each.

The scheduler changes its members through :func:`apply_event` and in no other way, so that the events of a run, replayed, give
the same population. Events are plain JSON; a score that is not finite is null.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tailguard.io.atomic import make_folder, named, sync_folder
from tailguard.io.reading import read_regular, refusing, require_writable
from tailguard.population.member import PopulationMember

LINEAGE_VERSION = 1
LARGEST = 2**30  # bytes
Event = Mapping[str, Any]


class Lineage:
    """A file that grows by one line per event. Each line is complete on disk before the call returns.

    :param path: the file; missing folders are made.
    :param keep: number of events at its start to keep, for a run that resumes; later ones, which its saved state does not know,
        are cut off, since they will be recorded again. 0 starts a new file and refuses to overwrite one.
    """

    def __init__(self, path: str | Path, keep: int = 0) -> None:
        self.path = Path(path)
        require_writable(self.path)
        if keep == 0:
            make_folder(self.path.parent)
            self.path.open("x", encoding="utf-8").close()
            sync_folder(self.path.parent)
            return
        with self.path.open("r+b") as file:
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
            if len(lines) < keep:
                raise ValueError(f"{self.path} has {len(lines)} events, but the state to resume from has seen {keep}")
            file.truncate(sum(map(len, lines[:keep])))

    def __call__(self, event: Event) -> None:
        """Append an event."""
        with named(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())  # the stored population counts on it, and is on disk itself


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of a file. A last line without its end was never finished and is left out."""
    lines = read_regular(path, LARGEST).splitlines(keepends=True)
    with refusing(path):
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        replay(events)
    return events


def replay(events: Iterable[Event]) -> list[PopulationMember]:
    """Return the population after some events; the first event must be its start."""
    members: list[PopulationMember] = []
    for event in events:
        apply_event(members, event)
    return members


def apply_event(members: list[PopulationMember], event: Event) -> None:
    """Change the members by an event.

    ``start``: the members are created. ``report``: a member has trained and was scored. ``dead``: a member has died. ``round``:
    it was decided about some members. ``exploit``: a member has become a copy of another. ``abandoned``: a copy failed and
    nothing has changed.
    """
    kind = event["event"]
    if kind == "start":
        if event["version"] != LINEAGE_VERSION:
            raise ValueError(f"the lineage has version {event['version']}, but only {LINEAGE_VERSION} can be read")
        members[:] = [PopulationMember(i, dict(values)) for i, values in enumerate(event["hyperparams"])]
    elif kind == "report":
        _report(members[event["member"]], event)
    elif kind == "dead":
        members[event["member"]].alive = False
    elif kind == "round":
        for member_id in event["considered"]:
            members[member_id].decided_step = members[member_id].step
    elif kind == "exploit":
        _exploit(members[event["target"]], event)
    elif kind != "abandoned":
        raise ValueError(f"{kind!r} is not an event of a population")


def mean_score(scores: Sequence[float | None]) -> float | None:
    """Return the mean of evaluations: None if there are none, or if one of them or their sum is not finite."""
    finite = [score for score in scores if score is not None]
    if not finite or len(finite) < len(scores) or not math.isfinite(sum(finite)):
        return None
    return sum(finite) / len(finite)


def _report(member: PopulationMember, event: Event) -> None:
    scores = list(event["scores"])
    performance = mean_score(scores)
    member.history.append(
        {
            "step": event["step"],
            "scores": scores,
            "performance": performance,
            "since": member.step,
            "baseline": member.baseline,
            "hyperparams": dict(member.hyperparams),
            "generation": member.generation,
        }
    )
    member.step = event["step"]
    member.performance = member.baseline = performance
    member.alive = True
    member.checkpoint_path = event["checkpoint_path"]
    member.vecnormalize_stats_path = event["vecnormalize_stats_path"]


def _exploit(target: PopulationMember, event: Event) -> None:
    target.hyperparams = dict(event["hyperparams"])
    target.performance = None
    target.baseline = event["source_performance"]
    target.parent = event["source"]
    target.generation += 1
    target.alive = True
    target.checkpoint_path = event["checkpoint_path"]
    target.vecnormalize_stats_path = event["vecnormalize_stats_path"]
