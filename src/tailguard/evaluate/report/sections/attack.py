"""What happens to the agent when somebody tampers with what it sees."""

import numpy as np
import pandas as pd

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Section
from tailguard.evaluate.report.figures import Axis, Chart, Mark, Panel
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.words import capital, plain, say

SHORT = ("fgsm", "pgd", "mad")  # names that are abbreviations


def attack(evaluation: Evaluation) -> Section | None:
    """Statistics under attacks of growing strength; nothing where none ran."""
    table = evaluation.attack
    if table is None or not len(table):
        return None
    panels = [panel for key, rows in table.groupby("statistic", sort=False) for panel in _panels(str(key), rows)]
    first = str(table["statistic"].iloc[0])
    kind = term(first).kind
    rows = table[table["statistic"] == first]
    worst = rows.iloc[int(rows["value"].argmin())]
    quiet = rows.iloc[int(rows["epsilon"].argmin())]
    name = term(first).label
    change = f"from {say(quiet['value'], kind)} to {say(worst['value'], kind)}"
    said = f"{change} under {_name(str(worst['attack']))} of strength {worst['epsilon']:g}"
    chart = Chart(
        "attack",
        f"{name} by kind and strength of the attack",
        f"{name} goes {said}.",
        panels,
        "Strength is how far each observed feature may be moved, in its own standard deviations. Shaded: 95% intervals.",
        columns=min(len(panels), 3),
    )
    lead = (
        "An attack moves what the agent observes by a little, in the direction that hurts it most; the market stays as it is. "
    )
    lead += "An agent that breaks at once has learnt something brittle."
    return Section(
        "attack",
        "Under attack",
        f"{name} falls by {say(float(quiet['value'] - worst['value']), kind)} under the strongest attack",
        lead,
        [chart],
    )


def _name(attack: str) -> str:
    return attack.upper() if attack in SHORT else capital(plain(attack))


def _panels(statistic: str, table: pd.DataFrame) -> list[Panel]:
    """One panel per attack, all on the same scale."""
    words = term(statistic)
    reach = table[["value", "low", "high"]].to_numpy(dtype=float)
    axis = Axis(words.kind, include=(0.0, float(np.nanmin(reach)), float(np.nanmax(reach))))
    return [
        _panel(f"{_name(str(name))}: {words.label}", rows.sort_values("epsilon"), axis)
        for name, rows in table.groupby("attack", sort=False)
    ]


def _panel(title: str, rows: pd.DataFrame, axis: Axis) -> Panel:
    x = rows["epsilon"].to_numpy(dtype=float)
    marks = [
        Mark("band", x, {"low": rows["low"].to_numpy(dtype=float), "high": rows["high"].to_numpy(dtype=float)}, "95% interval"),
        Mark("line", x, {"y": rows["value"].to_numpy(dtype=float)}, "under attack"),
        Mark("dots", x, {"y": rows["value"].to_numpy(dtype=float)}, ""),
    ]
    return Panel(title, marks, Axis("free", label="strength", tip="strength"), axis, 240)
