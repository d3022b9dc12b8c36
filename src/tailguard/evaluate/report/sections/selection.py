"""Selection: how the agent was chosen inside the training bars, and what it earned in sample, held out and out of sample."""

import numpy as np
import pandas as pd

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.charts import Axis, Chart, Mark, Panel
from tailguard.evaluate.report.formatting import say
from tailguard.evaluate.report.page import Block, Html, ReportSection, join, table, tag
from tailguard.evaluate.report.sections.stability import fold_sharpe

STEPS = Axis("count", label="training steps", tip="step")
# An agent that earns this many times more on bars that it has seen, and this much more, has learnt some of them by heart.
MEMORISED_RATIO, MEMORISED_LEAD = 2.0, 1.0


def selection_section(evaluation: Evaluation) -> ReportSection | None:
    """Show in-sample, held-out and out-of-sample results side by side, and the learning curves on held-out blocks."""
    candidates = evaluation.selection
    if candidates is None or not len(candidates):
        return None
    chosen = candidates[candidates["chosen"]]
    held_out, seen = float(chosen["sharpe"].mean()), float(chosen["in_sample_sharpe"].mean())
    outside = evaluation.statistics[evaluation.agent.name]["sharpe"].value
    headline = f"Sharpe ratio {say(seen)} in sample, {say(held_out)} held out, {say(outside)} out of sample"
    lead = (
        "Policy, length of training and trust were chosen inside the training bars, on blocks held out in time; the test had "
    )
    lead += "no part in it. In-sample figures show what an agent can learn by heart, held-out ones what it has understood."
    blocks: list[Block] = [_fold_table(evaluation, chosen), _curves(candidates)]
    warning = memorisation(chosen)
    if warning:
        blocks.insert(0, tag("ul", tag("li", warning), class_="warnings"))
    blocks.append(tag("ul", join(*(tag("li", f"Fold {row['fold']}: {row['reason']}.") for row in chosen.to_dict("records")))))
    return ReportSection("selection", "Selection", headline, lead, blocks)


def memorisation(chosen: pd.DataFrame) -> str:
    """Return a warning if agents earn much more on bars that they have seen than on bars held out; else nothing.

    :param chosen: the chosen candidates.
    """
    seen, held_out = chosen["in_sample_sharpe"].to_numpy(float), chosen["sharpe"].to_numpy(float)
    learnt = (seen > MEMORISED_RATIO * np.maximum(held_out, 0.0)) & (seen > held_out + MEMORISED_LEAD)
    if not learnt.any():
        return ""
    return (
        f"The training bars are explained too well in {int(learnt.sum())} of {len(chosen)} folds: in-sample Sharpe ratios far "
        "above those on held-out blocks show bars learnt by heart, not skill."
    )


def _fold_table(evaluation: Evaluation, chosen: pd.DataFrame) -> Html:
    folds = evaluation.folds.set_index("fold")
    rows = []
    for row in chosen.to_dict("records"):
        outside = fold_sharpe(evaluation, evaluation.agent, folds.loc[row["fold"]])
        ratios = [say(row["in_sample_sharpe"]), say(row["sharpe"]), say(outside), say(row["t_statistic"])]
        who = [f"fold {row['fold']}", str(row["policy"]), say(row["steps"], "count")]
        rows.append([*who, *ratios, say(row["active"], "percent")])
    evidence = "t of timing" if "objective" in chosen else "t of alpha"
    head = ["fold", "policy", "steps", "in sample", "held out", "out of sample", evidence, "steered"]
    caption = (
        "Sharpe ratios of what was chosen: on blocks it had trained on, on blocks held out, and of the agents in the test."
    )
    return table(head, rows, caption, 2)


def _curves(candidates: pd.DataFrame) -> Chart:
    panels = []
    for policy, rows in candidates.groupby("policy", sort=False):
        curve = rows.groupby("steps")[["in_sample_sharpe", "sharpe"]].mean()
        steps = curve.index.to_numpy(float)
        marks = [
            Mark("line", steps, {"y": curve["in_sample_sharpe"].to_numpy()}, "in sample", "market", True),
            Mark("line", steps, {"y": curve["sharpe"].to_numpy()}, "held out", "agent", True),
        ]
        panels.append(Panel(f"{policy}: Sharpe ratio, mean of the folds", marks, STEPS, Axis(include=(0.0,)), 240))
    means = candidates.groupby(["policy", "steps"], as_index=False)["sharpe"].mean()
    best = means.loc[means["sharpe"].idxmax()]
    title = f"On held-out blocks {best['policy']} after {say(best['steps'], 'count')} steps has the highest Sharpe ratio, "
    title += say(best["sharpe"])
    decides = "The agent's own objective" if "objective" in candidates else "Growth"
    note = (
        f"Where the upper line rises and the lower one falls, training learns the bars by heart. {decides} decides, not Sharpe."
    )
    return Chart("held-out-curves", title, f"{title}.", panels, note, columns=min(len(panels), 2))
