"""The events of a population as the lives of its members: scores, hyperparameters, and who became a copy of whom."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Life:
    """What happened to one place in the population, report by report.

    :param steps: of its reports.
    :param scores: at those steps; NaN where one was not finite.
    :param values: hyperparameters in force at those steps.
    """

    steps: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Copy:
    """One member has become a copy of another, after `step` of its own steps."""

    step: float
    source: int
    target: int


@dataclass(frozen=True)
class History:
    """A population from its start to its end.

    :param lives: by member, those that never reported left out.
    :param copies: in order.
    :param metric: what the score is.
    :param more_is_better: False where a low score is good.
    """

    lives: dict[int, Life]
    copies: list[Copy]
    metric: str
    more_is_better: bool

    @property
    def best(self) -> int:
        """The member with the best last score; one without a finite score is never best if another has one."""

        def merit(member: int) -> float:
            score = self.lives[member].scores[-1]
            return -math.inf if math.isnan(score) else score if self.more_is_better else -score

        return max(self.lives, key=merit)

    def score_at(self, member: int, step: float) -> float | None:
        """The last finite score of a member up to a step; None before its first."""
        life = self.lives.get(member, Life())
        known = [score for at, score in zip(life.steps, life.scores, strict=True) if at <= step and math.isfinite(score)]
        return known[-1] if known else None

    def ancestors(self, member: int) -> list[tuple[int, int]]:
        """The reports that a member's end goes back to, in order of time, as (member, position of the report)."""
        found: list[tuple[int, int]] = []
        until = math.inf
        for copy in reversed(self.copies):
            if copy.target == member and copy.step < until:
                found += [(member, i) for i, step in enumerate(self.lives[member].steps) if copy.step < step <= until]
                member, until = copy.source, copy.step
        found += [(member, i) for i, step in enumerate(self.lives[member].steps) if step <= until]
        return sorted(found, key=lambda report: self.lives[report[0]].steps[report[1]])


def read_lineage(events: Sequence[dict[str, Any]]) -> History:
    """From the entries of a ``lineage.jsonl``; entries that say nothing about scores or copies are passed over."""
    lives: dict[int, Life] = {}
    now: dict[int, dict[str, Any]] = {}
    copies: list[Copy] = []
    settings: dict[str, Any] = {}
    for event in events:
        if event["event"] == "start":
            settings = event["config"]
            now = {member: dict(values) for member, values in enumerate(event["hyperparams"])}
        elif event["event"] == "report":
            life = lives.setdefault(event["member"], Life())
            life.steps.append(float(event["step"]))
            life.scores.append(_mean(event["scores"]))
            life.values.append(dict(now.get(event["member"], {})))
        elif event["event"] == "exploit" and event.get("target") in lives and event["source"] in lives:
            target = event["target"]
            now[target] = dict(event["hyperparams"])
            copies.append(Copy(lives[target].steps[-1], event["source"], target))
    more = settings.get("metric_mode", "max") == "max"
    return History(lives, copies, str(settings.get("metric_name", "score")), more)


def _mean(scores: Sequence[float | None]) -> float:
    known = [score for score in scores if score is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(scores) else math.nan
