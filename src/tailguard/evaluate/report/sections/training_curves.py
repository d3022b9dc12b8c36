"""Training: the learning curves of every run, the warnings, and the population that the agent came from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.charts import Axis, Chart, Mark, Panel
from tailguard.evaluate.report.formatting import capital, readable, say
from tailguard.evaluate.report.page import Block, ReportSection, join, tag
from tailguard.evaluate.stats.series import Floats

STEPS = Axis("count", label="training steps", tip="step")
KEYS = ("fold", "seed", "step")
POINTS = 120
MOST_METRICS, MOST_HYPERPARAMETERS = 12, 9
WIDE = 5.0  # hyperparameters whose range exceeds this factor have a logarithmic axis
# The most informative metrics come first, the others in the order of the record.
FIRST_METRICS = (
    "rollout/ep_rew_mean", "train/explained_variance", "train/entropy", "train/approx_kl", "train/clip_fraction",
    "train/value_loss", "train/policy_gradient_loss", "train/grad_norm", "train/learning_rate",
)  # fmt: skip
METRIC_TITLES = {
    "rollout/ep_rew_mean": "Mean episode return",
    "train/explained_variance": "Explained variance of the critics",
    "train/entropy": "Entropy of the policy",
    "train/approx_kl": "KL divergence per update",
    "train/clip_fraction": "Fraction of clipped samples",
    "train/value_loss": "Quantile loss of the critics",
    "train/policy_gradient_loss": "Policy gradient loss",
    "train/grad_norm": "Gradient norm",
    "train/learning_rate": "Learning rate",
}


def training_section(evaluation: Evaluation) -> ReportSection | None:
    """Show the learning curves and the warnings."""
    metrics = _varying_metrics(evaluation.training)
    if not metrics and not evaluation.warnings:
        return None
    runs = evaluation.training.groupby(["fold", "seed"]).ngroups if metrics else 0
    blocks: list[Block] = [_warnings(evaluation.warnings)] if evaluation.warnings else []
    if metrics:
        blocks.append(_curves_chart(evaluation.training, metrics, runs))
    count = len(evaluation.warnings)
    headline = f"Training raised {count or 'no'} {'warnings' if count > 1 else 'warning'}"
    lead = "Learning curves are no evidence of skill, but a training that failed explains a poor agent."
    return ReportSection("training", "Training", headline, lead, blocks)


def _varying_metrics(table: pd.DataFrame) -> list[str]:
    """Return the numeric columns that vary, the most informative first."""
    numeric = [str(name) for name in table.columns if name not in KEYS and pd.api.types.is_numeric_dtype(table[name])]
    varying = [name for name in numeric if table[name].nunique(dropna=True) > 1 and not name.startswith("time/")]
    return [name for name in FIRST_METRICS if name in varying] + [name for name in varying if name not in FIRST_METRICS]


def _curves_chart(table: pd.DataFrame, metrics: list[str], runs: int) -> Chart:
    panels = [_metric_panel(table, name) for name in metrics[:MOST_METRICS]]
    first = metrics[0]
    ends = table.sort_values("step").groupby(["fold", "seed"])[first].last()
    reach = f"between {say(float(ends.min()), 'free')} and {say(float(ends.max()), 'free')}"
    title = f"{_metric_title(first)} ends {reach} in {runs} training {'run' if runs == 1 else 'runs'}"
    left = len(metrics) - MOST_METRICS
    more = f" {left} more {'metric is' if left == 1 else 'metrics are'} in the files of the run." if left > 0 else ""
    note = f"Grey: each fold and seed. Bold: the median of the runs that reached the step.{more}"
    return Chart("training-curves", title, f"{title}.", panels, note, columns=3)


def _metric_title(name: str) -> str:
    return METRIC_TITLES.get(name, capital(readable(name.rsplit("/", 1)[-1])))


def _metric_panel(table: pd.DataFrame, name: str) -> Panel:
    marks: list[Mark] = []
    for (fold, seed), rows in table.groupby(["fold", "seed"]):
        known = rows.dropna(subset=[name]).sort_values("step").drop_duplicates("step", keep="last")
        if len(known):
            at = _evenly_spaced(len(known))
            steps, values = known["step"].to_numpy(float)[at], known[name].to_numpy(float)[at]
            marks.append(_curve(steps, values, f"fold {fold}, seed {seed}", False))
    if len(marks) > 1:
        middle = table.groupby("step")[name].median().dropna()
        at = _evenly_spaced(len(middle))
        marks.append(_curve(middle.index.to_numpy(float)[at], middle.to_numpy(float)[at], "median", True))
    elif marks:
        marks = [Mark("line", marks[0].x, marks[0].columns, marks[0].name, "agent")]
    return Panel(_metric_title(name), marks, STEPS, Axis("free"), 190)


def _evenly_spaced(n: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, POINTS)).round().astype(int))


def _curve(steps: Floats, values: Floats, name: str, strong: bool) -> Mark:
    options = {"legend": False} if strong else {"thin": True, "legend": False}
    return Mark("line", steps, {"y": values}, name, "agent" if strong else "other", options=options)


def _warnings(warnings: list[str]) -> Block:
    return tag("ul", join(*(tag("li", warning) for warning in warnings)), class_="warnings")


@dataclass
class MemberHistory:
    """The reports of one population member.

    :param steps: of its reports.
    :param scores: at those steps; NaN where one was not finite.
    :param values: hyperparameters at those steps.
    """

    steps: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class MemberCopy:
    """A member's replacement by a copy of another (an exploit), after `step` of its own steps."""

    step: float
    source: int
    target: int


@dataclass(frozen=True)
class PopulationHistory:
    """A population from its start to its end.

    :param members: history of each member that ever reported.
    :param copies: in order of time.
    :param metric: name of the score.
    :param more_is_better: False where a low score is good.
    """

    members: dict[int, MemberHistory]
    copies: list[MemberCopy]
    metric: str
    more_is_better: bool

    @property
    def best(self) -> int:
        """The member with the best last score; one without a finite score is never best if another has one."""

        def merit(member: int) -> float:
            score = self.members[member].scores[-1]
            return -math.inf if math.isnan(score) else score if self.more_is_better else -score

        return max(self.members, key=merit)

    def score_at(self, member: int, step: float) -> float | None:
        """Return the last finite score of a member up to a step; None before its first."""
        history = self.members.get(member, MemberHistory())
        known = [score for at, score in zip(history.steps, history.scores, strict=True) if at <= step and math.isfinite(score)]
        return known[-1] if known else None

    def ancestors(self, member: int) -> list[tuple[int, int]]:
        """Return the reports that led to a member's final state, in order of time, as (member, position of the report)."""
        reports: list[tuple[int, int]] = []
        until = math.inf
        for copy in reversed(self.copies):
            if copy.target == member and copy.step < until:
                reports += [(member, i) for i, step in enumerate(self.members[member].steps) if copy.step < step <= until]
                member, until = copy.source, copy.step
        reports += [(member, i) for i, step in enumerate(self.members[member].steps) if step <= until]
        return sorted(reports, key=lambda report: self.members[report[0]].steps[report[1]])


def read_lineage(events: Sequence[dict[str, Any]]) -> PopulationHistory:
    """Return the history of a population from the entries of a ``lineage.jsonl``, of which scores and exploits count."""
    members: dict[int, MemberHistory] = {}
    now: dict[int, dict[str, Any]] = {}
    copies: list[MemberCopy] = []
    settings: dict[str, Any] = {}
    for event in events:
        if event["event"] == "start":
            settings = event["config"]
            now = {member: dict(values) for member, values in enumerate(event["hyperparams"])}
        elif event["event"] == "report":
            history = members.setdefault(event["member"], MemberHistory())
            history.steps.append(float(event["step"]))
            history.scores.append(_mean_score(event["scores"]))
            history.values.append(dict(now.get(event["member"], {})))
        elif event["event"] == "exploit" and event.get("target") in members and event["source"] in members:
            target = event["target"]
            now[target] = dict(event["hyperparams"])
            copies.append(MemberCopy(members[target].steps[-1], event["source"], target))
    more = settings.get("metric_mode", "max") == "max"
    return PopulationHistory(members, copies, str(settings.get("metric_name", "score")), more)


def _mean_score(scores: Sequence[float | None]) -> float:
    known = [score for score in scores if score is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(scores) else math.nan


def population_section(evaluation: Evaluation) -> ReportSection | None:
    """Show the scores, the copies and the hyperparameters of a population; None without one."""
    if not evaluation.lineage:
        return None
    history = read_lineage(evaluation.lineage)
    lead = "Population-based training: members train side by side, and from time to time a poor one is replaced by a copy of a "
    lead += "good one with changed hyperparameters. The number of trials counts all members."
    if not history.members:
        remark = tag("p", "The lineage holds no scores, so there is nothing to draw.", class_="remark")
        return ReportSection("population", "Population", "A population without scores", lead, [remark])
    blocks: list[Block] = [_scores_chart(history)]
    hyperparameters = _hyperparameters_chart(history)
    if hyperparameters is not None:
        blocks.append(hyperparameters)
    copies = len(history.copies)
    headline = f"{len(history.members)} members, {copies} {'copy' if copies == 1 else 'copies'}"
    return ReportSection("population", "Population", headline, lead, blocks)


def _scores_chart(history: PopulationHistory) -> Chart:
    marks = _member_lines(history, {member: known.scores for member, known in history.members.items()})
    marks.insert(-1, _links(history))
    first = [known.scores[0] for known in history.members.values()]
    last = say(history.members[history.best].scores[-1])
    summary = f"Scores start between {say(np.nanmin(first))} and {say(np.nanmax(first))}. The best member, number "
    summary += f"{history.best}, ends at {last} after {len(history.copies)} copies in the population."
    panel = Panel(f"{capital(readable(history.metric))} of each member", marks, STEPS, Axis("free"), 320)
    note = "Grey: members. Curved links: a member is replaced by a copy of another. Bold: ancestors of the best final member."
    return Chart("lineage", f"The best member ends at {last}", summary, [panel], note)


def _links(history: PopulationHistory) -> Mark:
    """Draw each copy from the score of the source to that of the target, where both are known."""
    ends = [
        (copy.step, source, target)
        for copy in history.copies
        if (source := history.score_at(copy.source, copy.step)) is not None
        and (target := history.score_at(copy.target, copy.step)) is not None
    ]
    steps, sources, targets = np.array(ends).reshape(-1, 3).T
    return Mark("links", steps, {"from": sources, "to": targets}, "", "market")


def _member_lines(history: PopulationHistory, values: Mapping[int, Sequence[float]]) -> list[Mark]:
    """Draw every member in grey, and the ancestors of the best member on top."""
    look = {"thin": True, "legend": False}
    marks = [
        Mark("line", history.members[member].steps, {"y": np.array(column)}, f"member {member}", "other", options=look)
        for member, column in values.items()
    ]
    line = history.ancestors(history.best)
    steps = [history.members[member].steps[i] for member, i in line]
    marks.append(Mark("line", steps, {"y": np.array([values[member][i] for member, i in line])}, "ancestors of the best"))
    return marks


def _hyperparameters_chart(history: PopulationHistory) -> Chart | None:
    """Chart every numeric hyperparameter that changes or differs between members."""
    names = dict.fromkeys(name for known in history.members.values() for values in known.values for name in values)
    panels = [panel for name in names if (panel := _hyperparameter_panel(history, name)) is not None][:MOST_HYPERPARAMETERS]
    if not panels:
        return None
    last = history.members[history.best].values[-1]
    values = {readable(name): _as_number(value) for name, value in last.items()}
    ends = [f"{name} {say(value, 'free')}" for name, value in values.items() if math.isfinite(value)]
    summary = f"The best member ends with {', '.join(ends)}."
    note = "Bold: ancestors of the best final member."
    return Chart("hyperparameters", "Hyperparameters of the members", summary, panels, note, columns=3)


def _hyperparameter_panel(history: PopulationHistory, name: str) -> Panel | None:
    columns = {member: [_as_number(values.get(name)) for values in known.values] for member, known in history.members.items()}
    flat = np.array([value for column in columns.values() for value in column])
    if not np.isfinite(flat).all() or np.ptp(flat) == 0.0:
        return None
    log = bool(flat.min() > 0.0 and flat.max() / flat.min() > WIDE)
    lines = _member_lines(history, columns)
    return Panel(capital(readable(name)), lines, STEPS, Axis("free", "log" if log else "linear"), 200)


def _as_number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
