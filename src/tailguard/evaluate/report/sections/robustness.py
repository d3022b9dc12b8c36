"""Robustness of the result: other costs, a delay, shuffled positions, and perturbed observations."""

import math

import numpy as np
import pandas as pd

from tailguard.evaluate.record import Delay, Evaluation
from tailguard.evaluate.report.charts import Axis, Chart, Mark, Panel, Rule
from tailguard.evaluate.report.formatting import TIMES, capital, chance, readable, say, signed, slug
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.page import Block, Html, ReportSection, Tabs, table

BASIS_POINTS = 1e4  # in 1
CLEAN = "clean"
FIRST = "sharpe"  # the statistic that is shown first
ATTACK_TITLES = {
    "random": "Random perturbation",
    "fgsm": "FGSM",
    "pgd": "PGD",
    "pgd_kl": "PGD against the policy",
    "critic": "PGD against the critic",
    "action": "PGD towards the least likely action",
    "worst": "Worst attack per agent",
    "stale": "Delayed bars",
    "dropped": "Missing bars",
    "noisy": "Noisy features",
}
DEVIATIONS = "strength, in standard deviations"
STRENGTHS = {"stale": "delay, in bars", "dropped": "share of missing bars"}


def costs_section(evaluation: Evaluation) -> ReportSection | None:
    """Show the agent's decisions at other costs, delayed, and in shuffled order; None where nothing can be traded again."""
    if evaluation.sanity.delay is None:
        return None
    lead = "The same decisions, traded again. Real costs are never known exactly: do not rely on an edge that is gone when "
    lead += "costs double."
    blocks: list[Block] = [_cost_chart(evaluation), _checks(evaluation, evaluation.sanity.delay)]
    return ReportSection("costs", "Costs and delay", _costs_headline(evaluation), lead, blocks)


def _costs_headline(evaluation: Evaluation) -> str:
    who, cost, paid = evaluation.subject, evaluation.sanity.break_even_cost, paid_cost(evaluation)
    if cost is None or paid is None:
        return f"The {who} never traded"
    if cost <= 0.0:
        return f"The {who} gained nothing over cash even without costs"
    said = f"costs of {_basis_points(cost)} of the traded value would take the whole gain over cash"
    return f"{capital(said)}; it was tested at {_basis_points(paid)}"


def _basis_points(cost: float) -> str:
    return f"{say(cost * BASIS_POINTS)} basis points"


def paid_cost(evaluation: Evaluation) -> float | None:
    """Return the costs as tested, per unit of traded notional; None if the agent never traded."""
    traded = float(evaluation.agent.turnover.sum())
    return float(evaluation.agent.costs.sum()) / traded if traded > 0.0 else None


def break_even_multiple(evaluation: Evaluation) -> float | None:
    """Return the break-even cost in multiples of the tested one; None where either is missing."""
    paid, cost = paid_cost(evaluation), evaluation.sanity.break_even_cost
    return cost / paid if paid and cost is not None else None


def _cost_chart(evaluation: Evaluation) -> Chart:
    curve = sorted(evaluation.sanity.cost_curve)
    multiples = np.array([point.multiple for point in curve])
    even = break_even_multiple(evaluation)
    rules = [Rule("as tested", x=1.0)]
    if even is not None and multiples[0] < even <= multiples[-1]:
        rules.append(Rule("break-even", x=even))
    x = Axis("multiple", label="costs, in multiples of the tested ones", tip="costs")
    sharpes, returns = [point.sharpe for point in curve], [point.total_return for point in curve]
    panels = [
        _cost_panel("Sharpe ratio", multiples, sharpes, x, Axis("number", include=(0.0,)), rules),
        _cost_panel("Total return", multiples, returns, x, Axis("percent", include=(0.0,)), rules),
    ]
    first, last = curve[0], curve[-1]
    summary = f"When costs go from {first.multiple:g}{TIMES} to {last.multiple:g}{TIMES} the tested ones, the Sharpe ratio "
    summary += (
        f"goes from {say(first.sharpe)} to {say(last.sharpe)} and the total return from {say(first.total_return, 'percent')} "
    )
    summary += f"to {say(last.total_return, 'percent')}."
    title = f"Sharpe ratio {say(first.sharpe)} without costs, {say(last.sharpe)} at {last.multiple:g}{TIMES} the costs"
    return Chart("costs-curve", title, summary, panels, _cost_note(evaluation, even), columns=2)


def _cost_panel(title: str, multiples: np.ndarray, values: list[float], x: Axis, y: Axis, rules: list[Rule]) -> Panel:
    line = Mark("line", multiples, {"y": values}, title, "agent", options={"legend": False})
    dots = Mark("dots", multiples, {"y": values}, "", "agent")
    return Panel(title, [line, dots], x, y, 260, rules)


def _cost_note(evaluation: Evaluation, even: float | None) -> str:
    paid = paid_cost(evaluation)
    if paid is None:
        return f"The {evaluation.subject} never traded."
    tested = f"Tested at {_basis_points(paid)} of the traded value."
    if even is None or not 0.0 < even < math.inf:
        return tested
    left = "" if even > 1.0 else ": costs took more than the gain"
    return f"{tested} Break-even with cash at {say(even, 'multiple')} of that{left}."


def _checks(evaluation: Evaluation, delay: Delay) -> Html:
    sanity = evaluation.sanity
    rows = [
        [
            f"Trades {delay.bars} {'bar' if delay.bars == 1 else 'bars'} later",
            f"Sharpe ratio {say(delay.sharpe_before)} becomes {say(delay.sharpe)}, total return "
            f"{signed(delay.total_return_before, 'percent')} becomes {signed(delay.total_return, 'percent')}",
            "A real edge fades slowly with a delay. One that vanishes depended on the very next price.",
        ],
        [
            "Shuffled positions",
            "none" if sanity.permutation_p is None else chance(sanity.permutation_p),
            f"Share of shuffled orders of the positions (in blocks of {sanity.permutation_block} bars) that reach its "
            "Sharpe ratio. The smaller, the more the timing mattered.",
        ],
    ]
    share = evaluation.statistics[evaluation.agent.name].get("cost_share")
    if share is not None:
        rows.append(["Cost share", say(share.value, "percent"), term("cost_share").meaning])
    return table(["check", "result", "meaning"], rows, "Further checks of the same decisions.", numbers_from=3)


def attack_section(evaluation: Evaluation) -> ReportSection | None:
    """Show the statistics under perturbed observations of growing strength; None where no attack ran."""
    rows = evaluation.attack
    if rows is None or not len(rows):
        return None
    statistics = sorted(dict.fromkeys(map(str, rows["statistic"])), key=lambda name: name != FIRST)
    charts: dict[str, list[Block]] = {
        term(name).label: [_attack_chart(name, _statistic_rows(rows, name))] for name in statistics
    }
    lead = "An adversarial attack shifts the agent's observations slightly in the direction that hurts it most; prices and "
    lead += "fills stay the same. An agent whose result collapses under small shifts depends on details that will not repeat."
    blocks: list[Block] = [Tabs("attack-tabs", "Statistic", charts)] if len(charts) > 1 else next(iter(charts.values()))
    headline = _attack_headline(statistics[0], _statistic_rows(rows, statistics[0]))
    return ReportSection("attack", "Adversarial attacks", headline, lead, blocks)


def _statistic_rows(rows: pd.DataFrame, statistic: str) -> pd.DataFrame:
    return rows[rows["statistic"] == statistic]


def _clean_and_worst(statistic: str, rows: pd.DataFrame) -> tuple[float, pd.Series]:
    """Return the statistic without an attack, and the row of the worst attack."""
    values = rows["value"].to_numpy(dtype=float)
    worst = np.nanargmax(values) if term(statistic).more_is_better is False else np.nanargmin(values)
    return float(rows["value"].iloc[int(rows["epsilon"].argmin())]), rows.iloc[int(worst)]


def _attack_headline(statistic: str, rows: pd.DataFrame) -> str:
    clean, worst = _clean_and_worst(statistic, rows)
    words = term(statistic)
    if float(worst["value"]) == clean:
        return f"{words.label}: no attack made it worse"
    attacked = say(float(worst["value"]), words.kind)
    return f"{words.label} {say(clean, words.kind)} without an attack, {attacked} under the worst attack"


def _attack_chart(statistic: str, rows: pd.DataFrame) -> Chart:
    """Chart one panel per attack, all starting from the clean agent and on the same scale."""
    words = term(statistic)
    reach = rows[["value", "low", "high"]].to_numpy(dtype=float)
    axis = Axis(words.kind, include=(0.0, float(np.nanmin(reach)), float(np.nanmax(reach))))
    clean = rows[rows["attack"] == CLEAN]
    kinds = [(str(kind), part) for kind, part in rows.groupby("attack", sort=False) if kind != CLEAN]
    panels = [_attack_panel(kind, pd.concat([clean, part]).sort_values("epsilon"), axis) for kind, part in kinds]
    before, worst = _clean_and_worst(statistic, rows)
    attacked, name = say(float(worst["value"]), words.kind), _attack_title(str(worst["attack"]))
    summary = f"{words.label} {say(before, words.kind)} without an attack, at worst {attacked} "
    summary += f"({name}, strength {worst['epsilon']:g})."
    note = f"{words.meaning} Shaded: 95% intervals. Strength 0 is the agent without an attack."
    title = f"{words.label} by attack and strength"
    return Chart(f"attack-{slug(statistic)}", title, summary, panels, note, columns=min(len(panels), 3))


def _attack_title(kind: str) -> str:
    return ATTACK_TITLES.get(kind, capital(readable(kind)))


def _attack_panel(kind: str, rows: pd.DataFrame, axis: Axis) -> Panel:
    strength, value, low, high = (rows[name].to_numpy(dtype=float) for name in ("epsilon", "value", "low", "high"))
    marks = [
        Mark("band", strength, {"low": low, "high": high}, "95% interval"),
        Mark("line", strength, {"y": value}, "under attack"),
        Mark("dots", strength, {"y": value}),
    ]
    return Panel(_attack_title(kind), marks, Axis("free", label=STRENGTHS.get(kind, DEVIATIONS), tip="strength"), axis, 230)
