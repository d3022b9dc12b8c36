"""The population that the agent came from: scores, who copied whom, and how hyperparameters moved."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Block, Section
from tailguard.evaluate.report.figures import Axis, Chart, Mark, Panel
from tailguard.evaluate.report.formatting import capital, plain, say
from tailguard.evaluate.report.lineage import History, read_lineage
from tailguard.evaluate.report.markup import tag

STEPS = Axis("count", label="training steps", tip="step")
MOST_PANELS = 9
WIDE = 5.0  # a range beyond this factor is drawn on a logarithmic axis


def population(evaluation: Evaluation) -> Section | None:
    """Lineage and trajectories; nothing without a population."""
    if not evaluation.lineage:
        return None
    history = read_lineage(evaluation.lineage)
    lead = "Members train side by side; now and then a poor one becomes a copy of a good one and tries other hyperparameters. "
    lead += "All of them count as trials when luck is estimated."
    if not history.lives:
        remark = tag("p", "The lineage holds no scores, so that there is nothing to draw.", class_="remark")
        return Section("population", "Population", "A population without scores", lead, [remark])
    blocks: list[Block] = [_scores(history)]
    trajectories = _trajectories(history)
    if trajectories is not None:
        blocks.append(trajectories)
    copies = len(history.copies)
    headline = f"{len(history.lives)} members, {copies} {'copy' if copies == 1 else 'copies'}"
    return Section("population", "Population", headline, lead, blocks)


def _scores(history: History) -> Chart:
    marks = _lines(history, {member: life.scores for member, life in history.lives.items()})
    marks.insert(-1, _links(history))
    first = [life.scores[0] for life in history.lives.values()]
    last = say(history.lives[history.best].scores[-1])
    summary = (
        f"Scores start between {say(np.nanmin(first))} and {say(np.nanmax(first))}; the best member, number {history.best}, "
    )
    summary += f"ends at {last} after {len(history.copies)} copies in the population."
    panel = Panel(f"{capital(plain(history.metric))} of each member", marks, STEPS, Axis("free"), 320)
    note = (
        "Grey: members. Curved links: one takes over the state of another. Bold: the ancestors of the best member at the end."
    )
    return Chart("lineage", f"The best member ends at {last}", summary, [panel], note)


def _links(history: History) -> Mark:
    """From the score of the source to that of the target, where both are known."""
    ends = [
        (copy.step, source, target)
        for copy in history.copies
        if (source := history.score_at(copy.source, copy.step)) is not None
        and (target := history.score_at(copy.target, copy.step)) is not None
    ]
    steps, sources, targets = np.array(ends).reshape(-1, 3).T
    return Mark("links", steps, {"from": sources, "to": targets}, "", "market")


def _lines(history: History, values: Mapping[int, Sequence[float]]) -> list[Mark]:
    """Every member in grey, and on top the line of ancestors of the best."""
    look = {"thin": True, "legend": False}
    marks = [
        Mark("line", history.lives[member].steps, {"y": np.array(column)}, f"member {member}", "other", options=look)
        for member, column in values.items()
    ]
    line = history.ancestors(history.best)
    steps = [history.lives[member].steps[i] for member, i in line]
    marks.append(Mark("line", steps, {"y": np.array([values[member][i] for member, i in line])}, "ancestors of the best"))
    return marks


def _trajectories(history: History) -> Chart | None:
    """Small multiples of every hyperparameter that is a number and moves or differs."""
    names = dict.fromkeys(name for life in history.lives.values() for values in life.values for name in values)
    panels = [panel for name in names if (panel := _trajectory(history, name)) is not None][:MOST_PANELS]
    if not panels:
        return None
    last = history.lives[history.best].values[-1]
    ends = [f"{plain(name)} {say(_number(value), 'free')}" for name, value in last.items() if math.isfinite(_number(value))]
    summary = f"The best member ends with {', '.join(ends)}."
    note = "Bold: the ancestors of the best member."
    return Chart("hyperparameters", "How hyperparameters moved", summary, panels, note, columns=3)


def _trajectory(history: History, name: str) -> Panel | None:
    columns = {member: [_number(values.get(name)) for values in life.values] for member, life in history.lives.items()}
    flat = np.array([value for column in columns.values() for value in column])
    if not np.isfinite(flat).all() or np.ptp(flat) == 0.0:
        return None
    log = bool(flat.min() > 0.0 and flat.max() / flat.min() > WIDE)
    return Panel(capital(plain(name)), _lines(history, columns), STEPS, Axis("free", "log" if log else "linear"), 200)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
