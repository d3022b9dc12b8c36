"""The population that the agent came from: scores, who copied whom, and how hyperparameters moved."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Section
from tailguard.evaluate.report.figures import Axis, Chart, Mark, Panel
from tailguard.evaluate.report.markup import tag
from tailguard.evaluate.report.words import capital, plain, say

STEPS = Axis("count", label="training steps", tip="step")
MOST_PANELS = 9


@dataclass
class Life:
    """What happened to one place in the population.

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


def population(evaluation: Evaluation) -> Section | None:
    """Lineage and trajectories; nothing without a population."""
    if not evaluation.lineage:
        return None
    lives, copies = read_lineage(evaluation.lineage)
    lives = {member: life for member, life in lives.items() if life.steps}
    lead = "Members train side by side; now and then a poor one becomes a copy of a good one and tries other hyperparameters. "
    lead += "All of them count as trials when luck is estimated."
    if not lives:
        text = tag(
            "p",
            f"The lineage has {len(evaluation.lineage)} entries and no scores, so there is nothing to draw.",
            class_="remark",
        )
        return Section("population", "Population", "A population without scores", lead, [text])
    blocks = [_scores(lives, copies)]
    hyperparameters = _trajectories(lives, copies)
    if hyperparameters is not None:
        blocks.append(hyperparameters)
    headline = f"{len(lives)} members, {len(copies)} {'copy' if len(copies) == 1 else 'copies'}"
    return Section("population", "Population", headline, lead, blocks)


def read_lineage(events: list[dict[str, Any]]) -> tuple[dict[int, Life], list[Copy]]:
    """Lives by member and all copies, from the events of a ``lineage.jsonl``; other events are passed over."""
    lives: dict[int, Life] = {}
    now: dict[int, dict[str, Any]] = {}
    copies: list[Copy] = []
    for event in events:
        if event["event"] == "start":
            now = {member: dict(values) for member, values in enumerate(event["hyperparams"])}
            lives = {member: Life() for member in now}
        elif event["event"] == "report":
            scores = [score for score in event["scores"] if score is not None]
            life = lives.setdefault(event["member"], Life())
            life.steps.append(float(event["step"]))
            life.scores.append(float(np.mean(scores)) if scores and len(scores) == len(event["scores"]) else float("nan"))
            life.values.append(dict(now.get(event["member"], {})))
        elif event["event"] == "exploit" and "target" in event:
            target = event["target"]
            now[target] = dict(event["hyperparams"])
            last = lives[target].steps[-1] if target in lives and lives[target].steps else 0.0
            copies.append(Copy(last, event["source"], target))
    return lives, copies


def ancestry(lives: dict[int, Life], copies: list[Copy], last: int) -> set[tuple[int, int]]:
    """The reports that the final member `last` goes back to, as (member, position of the report)."""
    found: set[tuple[int, int]] = set()
    member, until = last, float("inf")
    for copy in sorted(copies, key=lambda one: one.step, reverse=True):
        if copy.target != member or copy.step >= until:
            continue
        found |= {(member, i) for i, step in enumerate(lives[member].steps) if copy.step < step <= until}
        member, until = copy.source, copy.step
    return found | {(member, i) for i, step in enumerate(lives[member].steps) if step <= until}


def _best(lives: dict[int, Life]) -> int:
    return max(
        lives, key=lambda member: (np.isfinite(lives[member].scores[-1]), np.nan_to_num(lives[member].scores[-1], nan=-np.inf))
    )


def _scores(lives: dict[int, Life], copies: list[Copy]) -> Chart:
    best = _best(lives)
    marks = [_member_line(lives, member, np.array(life.scores)) for member, life in lives.items()]
    known = [
        copy
        for copy in copies
        if _score_at(lives, copy.source, copy.step) is not None and _score_at(lives, copy.target, copy.step) is not None
    ]
    if known:
        ends = {
            "from": [_score_at(lives, copy.source, copy.step) or 0.0 for copy in known],
            "to": [_score_at(lives, copy.target, copy.step) or 0.0 for copy in known],
        }
        marks.append(
            Mark("links", [copy.step for copy in known], {key: np.array(value) for key, value in ends.items()}, "", "market")
        )
    marks.append(_ancestor_line(lives, copies, best, [life.scores for life in lives.values()], list(lives)))
    first = [life.scores[0] for life in lives.values()]
    last = lives[best].scores[-1]
    summary = (
        f"Scores start between {say(min(first))} and {say(max(first))}; the best member, {best}, ends at {say(last)} after "
    )
    summary += f"{len(copies)} copies in the population."
    panel = Panel("Score of each member", marks, STEPS, Axis("free"), 320)
    note = (
        "Grey: members. Curved links: one takes over the state of another. Bold: the ancestors of the best member at the end."
    )
    return Chart("lineage", f"The best member ends at {say(last)}", summary, [panel], note)


def _score_at(lives: dict[int, Life], member: int, step: float) -> float | None:
    if member not in lives:
        return None
    known = [
        score for at, score in zip(lives[member].steps, lives[member].scores, strict=True) if at <= step and np.isfinite(score)
    ]
    return known[-1] if known else None


def _member_line(lives: dict[int, Life], member: int, values: np.ndarray) -> Mark:
    return Mark(
        "line", lives[member].steps, {"y": values}, f"member {member}", "other", options={"thin": True, "legend": False}
    )


def _ancestor_line(
    lives: dict[int, Life], copies: list[Copy], best: int, values: list[list[float]], members: list[int]
) -> Mark:
    by_member = dict(zip(members, values, strict=True))
    points = sorted((lives[member].steps[i], by_member[member][i]) for member, i in ancestry(lives, copies, best))
    return Mark(
        "line", [step for step, _ in points], {"y": np.array([value for _, value in points])}, "ancestors of the best", "agent"
    )


def _trajectories(lives: dict[int, Life], copies: list[Copy]) -> Chart | None:
    """Small multiples of every hyperparameter that is a number and ever changes or differs."""
    best = _best(lives)
    names = dict.fromkeys(name for life in lives.values() for values in life.values for name in values)
    panels = []
    for name in names:
        columns = [[_number(values.get(name)) for values in life.values] for life in lives.values()]
        flat = np.array([value for column in columns for value in column])
        if not np.isfinite(flat).all() or np.ptp(flat) == 0.0:
            continue
        marks = [_member_line(lives, member, np.array(column)) for member, column in zip(lives, columns, strict=True)]
        marks.append(_ancestor_line(lives, copies, best, columns, list(lives)))
        log = bool(flat.min() > 0.0 and flat.max() / flat.min() > 5.0)
        panels.append(Panel(capital(plain(name)), marks, STEPS, Axis("free", "log" if log else "linear"), 200))
    if not panels:
        return None
    panels = panels[:MOST_PANELS]
    ends = ", ".join(
        f"{plain(name)} {say(_number(value), 'free')}"
        for name, value in lives[best].values[-1].items()
        if np.isfinite(_number(value))
    )
    summary = f"The best member ends with {ends}." if ends else "How the hyperparameters of the members moved."
    return Chart(
        "hyperparameters", "How hyperparameters moved", summary, panels, "Bold: the ancestors of the best member.", columns=3
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
