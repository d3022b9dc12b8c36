"""How training went: curves of every run, and what was warned about."""

import numpy as np
import pandas as pd

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Block, Section
from tailguard.evaluate.report.figures import Axis, Chart, Mark, Panel
from tailguard.evaluate.report.formatting import capital, plain, say
from tailguard.evaluate.report.markup import join, tag
from tailguard.evaluate.stats.series import Floats

STEPS = Axis("count", label="training steps", tip="step")
KEYS = ("fold", "seed", "step")
POINTS = 120
MOST = 12
# What tells most comes first; other metrics follow as they stand in the record.
FIRST = (
    "rollout/ep_rew_mean", "train/explained_variance", "train/entropy", "train/approx_kl", "train/clip_fraction",
    "train/value_loss", "train/policy_gradient_loss", "train/grad_norm", "train/learning_rate",
)  # fmt: skip
TITLES = {
    "rollout/ep_rew_mean": "Mean episode return",
    "train/explained_variance": "Explained variance of the critics",
    "train/entropy": "Entropy of the policy",
    "train/approx_kl": "KL per update",
    "train/clip_fraction": "Share of clipped samples",
    "train/value_loss": "Quantile loss of the critics",
    "train/policy_gradient_loss": "Policy loss",
    "train/grad_norm": "Norm of the gradient",
    "train/learning_rate": "Learning rate",
}


def training(evaluation: Evaluation) -> Section | None:
    """Small multiples of the training curves, and the warnings."""
    metrics = _metrics(evaluation.training)
    if not metrics and not evaluation.warnings:
        return None
    runs = evaluation.training.groupby(["fold", "seed"]).ngroups if metrics else 0
    blocks: list[Block] = [_warnings(evaluation.warnings)] if evaluation.warnings else []
    if metrics:
        blocks.append(_chart(evaluation.training, metrics, runs))
    count = len(evaluation.warnings)
    headline = (
        "Training raised no warning" if count == 0 else f"Training raised {count} {'warning' if count == 1 else 'warnings'}"
    )
    lead = "Training says nothing about skill, but a training that went wrong explains a poor agent."
    return Section("training", "Training", headline, lead, blocks)


def _metrics(table: pd.DataFrame) -> list[str]:
    """Numeric columns that vary, the telling ones first."""
    numeric = [str(name) for name in table.columns if name not in KEYS and pd.api.types.is_numeric_dtype(table[name])]
    moving = [name for name in numeric if table[name].nunique(dropna=True) > 1 and not name.startswith("time/")]
    return [name for name in FIRST if name in moving] + [name for name in moving if name not in FIRST]


def _chart(table: pd.DataFrame, metrics: list[str], runs: int) -> Chart:
    panels = [_panel(table, name) for name in metrics[:MOST]]
    first = metrics[0]
    ends = table.sort_values("step").groupby(["fold", "seed"])[first].last()
    title = _title(first)
    reach = f"between {say(float(ends.min()), 'free')} and {say(float(ends.max()), 'free')}"
    said = f"{title} ends {reach} in {runs} {'training' if runs == 1 else 'trainings'}"
    left = f" {len(metrics) - MOST} more metrics are in the run's own files." if len(metrics) > MOST else ""
    note = f"Grey: every fold and seed. Bold: the median of those that had got that far.{left}"
    return Chart("training-curves", said, f"{said}.", panels, note, columns=3)


def _title(name: str) -> str:
    return TITLES.get(name, capital(plain(name.rsplit("/", 1)[-1])))


def _panel(table: pd.DataFrame, name: str) -> Panel:
    marks: list[Mark] = []
    for (fold, seed), rows in table.groupby(["fold", "seed"]):
        known = rows.dropna(subset=[name]).sort_values("step").drop_duplicates("step", keep="last")
        at = (
            np.unique(np.linspace(0, len(known) - 1, min(len(known), POINTS)).round().astype(int))
            if len(known)
            else np.array([], dtype=int)
        )
        if len(at):
            marks.append(
                _line(known["step"].to_numpy(float)[at], known[name].to_numpy(float)[at], f"fold {fold}, seed {seed}", False)
            )
    if len(marks) > 1:
        middle = table.groupby("step")[name].median().dropna()
        at = np.unique(np.linspace(0, len(middle) - 1, min(len(middle), POINTS)).round().astype(int))
        marks.append(_line(middle.index.to_numpy(float)[at], middle.to_numpy(float)[at], "median", True))
    elif marks:
        marks = [Mark("line", marks[0].x, marks[0].columns, marks[0].name, "agent")]
    return Panel(_title(name), marks, STEPS, Axis("free"), 190)


def _line(steps: Floats, values: Floats, name: str, strong: bool) -> Mark:
    options = {"legend": False} if strong else {"thin": True, "legend": False}
    return Mark("line", steps, {"y": values}, name, "agent" if strong else "other", options=options)


def _warnings(warnings: list[str]) -> Block:
    return tag("ul", join(*(tag("li", warning) for warning in warnings)), class_="warnings")
