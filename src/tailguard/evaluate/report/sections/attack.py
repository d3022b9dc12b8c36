"""What happens to the agent when somebody tampers with what it sees."""

import pandas as pd

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Section
from tailguard.evaluate.report.figures import Axis, Chart, Color, Mark, Panel
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.words import capital, plain, say

COLORS: tuple[Color, ...] = ("agent", "market", "third", "fourth", "other")


def attack(evaluation: Evaluation) -> Section | None:
    """Statistics under attacks of growing strength; nothing where none ran."""
    table = evaluation.attack
    if table is None or not len(table):
        return None
    panels = [_panel(str(key), rows) for key, rows in table.groupby("statistic", sort=False)]
    first = str(table["statistic"].iloc[0])
    kind = term(first).kind
    rows = table[table["statistic"] == first]
    worst = rows.loc[rows["value"].idxmin()]
    quiet = rows.loc[rows["epsilon"].idxmin()]
    name = term(first).label
    said = f"from {say(quiet['value'], kind)} to {say(worst['value'], kind)} under {plain(str(worst['attack']))} of strength {worst['epsilon']:g}"
    summary = f"{name} goes {said}."
    chart = Chart(
        "attack",
        f"{name} goes {said}",
        summary,
        panels,
        "Strength is how far each observed feature may be moved, in its own standard deviations. Shaded: 95% intervals.",
        columns=min(len(panels), 2),
    )
    lead = "An attack moves what the agent observes by a little, in the direction that hurts it most; the market itself stays as it is. An "
    lead += "agent that breaks at once has learnt something brittle."
    return Section("attack", "Under attack", capital(f"{name.lower()} under attack: {said}"), lead, [chart])


def _panel(statistic: str, table: pd.DataFrame) -> Panel:
    marks = []
    for i, (name, unordered) in enumerate(table.groupby("attack", sort=False)):
        rows = unordered.sort_values("epsilon")
        color = COLORS[min(i, len(COLORS) - 1)]
        x = rows["epsilon"].to_numpy()
        marks.append(Mark("band", x, {"low": rows["low"].to_numpy(), "high": rows["high"].to_numpy()}, "", color))
        marks.append(Mark("line", x, {"y": rows["value"].to_numpy()}, plain(str(name)), color, True))
    words = term(statistic)
    x_axis = Axis(label="strength of the attack", tip="strength")
    return Panel(words.label, marks, x_axis, Axis(words.kind, include=(0.0,)), 300)
