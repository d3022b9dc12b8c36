"""What happens to the agent when somebody tampers with what it sees, or bars come late, broken or not at all."""

import numpy as np
import pandas as pd

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Block, Section, Tabs
from tailguard.evaluate.report.figures import Axis, Chart, Mark, Panel
from tailguard.evaluate.report.formatting import capital, plain, say, slug
from tailguard.evaluate.report.glossary import term

CLEAN = "clean"
FIRST = "sharpe"  # the statistic that is shown first
TITLES = {
    "random": "Random moves",
    "fgsm": "FGSM",
    "pgd": "PGD",
    "pgd_kl": "PGD against the policy",
    "critic": "Against the critic",
    "action": "Against the action",
    "worst": "Worst of the attacks",
    "stale": "Stale bars",
    "dropped": "Missing bars",
    "noisy": "Noisy features",
}
DEVIATIONS = "strength, in standard deviations"
STRENGTHS = {"stale": "delay, in bars", "dropped": "share of bars that is missing"}


def attack(evaluation: Evaluation) -> Section | None:
    """Statistics under attacks of growing strength; nothing where none ran."""
    table = evaluation.attack
    if table is None or not len(table):
        return None
    statistics = sorted(dict.fromkeys(map(str, table["statistic"])), key=lambda name: name != FIRST)
    charts: dict[str, list[Block]] = {term(name).label: [_chart(name, _of(table, name))] for name in statistics}
    lead = (
        "An attack moves what the agent observes by a little, in the direction that hurts it most; the market stays as it is. "
    )
    lead += "An agent that breaks at once has learnt something brittle."
    blocks: list[Block] = [Tabs("attack-tabs", "Which figure", charts)] if len(charts) > 1 else next(iter(charts.values()))
    return Section("attack", "Under attack", _headline(statistics[0], _of(table, statistics[0])), lead, blocks)


def _of(table: pd.DataFrame, statistic: str) -> pd.DataFrame:
    return table[table["statistic"] == statistic]


def _ends(statistic: str, rows: pd.DataFrame) -> tuple[float, pd.Series]:
    """The figure without any attack, and the row with the worst one."""
    values = rows["value"].to_numpy(dtype=float)
    worst = np.nanargmax(values) if term(statistic).more_is_better is False else np.nanargmin(values)
    return float(rows["value"].iloc[int(rows["epsilon"].argmin())]), rows.iloc[int(worst)]


def _headline(statistic: str, rows: pd.DataFrame) -> str:
    clean, worst = _ends(statistic, rows)
    words = term(statistic)
    if float(worst["value"]) == clean:
        return f"No attack made the {words.label} worse"
    return f"{words.label} {say(clean, words.kind)} without an attack, {say(float(worst['value']), words.kind)} under the worst"


def _chart(statistic: str, rows: pd.DataFrame) -> Chart:
    """One panel per kind, all from the clean agent and on the same scale."""
    words = term(statistic)
    reach = rows[["value", "low", "high"]].to_numpy(dtype=float)
    axis = Axis(words.kind, include=(0.0, float(np.nanmin(reach)), float(np.nanmax(reach))))
    clean = rows[rows["attack"] == CLEAN]
    kinds = [(str(kind), part) for kind, part in rows.groupby("attack", sort=False) if kind != CLEAN]
    panels = [_panel(kind, pd.concat([clean, part]).sort_values("epsilon"), axis) for kind, part in kinds]
    before, worst = _ends(statistic, rows)
    change = f"from {say(before, words.kind)} to {say(float(worst['value']), words.kind)}"
    summary = f"{words.label} goes {change} ({_title(str(worst['attack']))}, strength {worst['epsilon']:g})."
    note = f"{words.meaning} Shaded: 95% intervals. Every panel starts with the agent left alone."
    title = f"{words.label} by kind and strength of the attack"
    return Chart(f"attack-{slug(statistic)}", title, summary, panels, note, columns=min(len(panels), 3))


def _title(kind: str) -> str:
    return TITLES.get(kind, capital(plain(kind)))


def _panel(kind: str, rows: pd.DataFrame, axis: Axis) -> Panel:
    strength, value, low, high = (rows[name].to_numpy(dtype=float) for name in ("epsilon", "value", "low", "high"))
    marks = [
        Mark("band", strength, {"low": low, "high": high}, "95% interval"),
        Mark("line", strength, {"y": value}, "under attack"),
        Mark("dots", strength, {"y": value}),
    ]
    return Panel(_title(kind), marks, Axis("free", label=STRENGTHS.get(kind, DEVIATIONS), tip="strength"), axis, 230)
