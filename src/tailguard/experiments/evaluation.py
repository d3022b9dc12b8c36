"""What the commands that judge a run need: its agent, its figures and its past, brought together for one evaluation."""

import json
from typing import Any

import pandas as pd

from tailguard.evaluate.attack import AttackReport
from tailguard.evaluate.record import Evaluation
from tailguard.experiments.out_of_sample import evaluate_agent
from tailguard.experiments.population import FOLDER, LINEAGE
from tailguard.experiments.run import Run
from tailguard.experiments.walkforward import warnings_of

ATTACK = "attack.csv"


def evaluate_run(run: Run) -> Evaluation:
    """Judge the agent of a run on the rows that it has never seen, with whatever is known of its training and of attacks."""
    metrics = run.metrics()
    attack, lineage = run.path / ATTACK, run.path / FOLDER / LINEAGE
    return evaluate_agent(
        run.trained_model(),
        run.market(),
        run.config,
        source=run.info["data"],
        title=run.path.name,
        training=None if metrics.empty else metrics,
        warnings=warnings_of(metrics, "training"),
        trials=run.info.get("trials", 1),
        lineage=_events(lineage.read_text(encoding="utf-8")) if lineage.exists() else None,
        attack=pd.read_csv(attack) if attack.exists() else None,
    )


def attack_table(report: AttackReport) -> pd.DataFrame:
    """One line per kind, strength and statistic, as an evaluation keeps it."""
    return pd.DataFrame(
        {
            "attack": row.kind,
            "epsilon": row.strength,
            "statistic": name,
            "value": one.estimate,
            "low": one.low,
            "high": one.high,
        }
        for row in report.rows
        for name, one in row.figures.items()
    )


def _events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]
