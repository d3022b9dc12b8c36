"""What is left when trading costs more, or comes a bar later."""

import math

import numpy as np

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Section
from tailguard.evaluate.report.figures import Axis, Chart, Mark, Panel, Rule
from tailguard.evaluate.report.formatting import TIMES, chance, say, signed
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.markup import Html, table

POINT = 1e4  # basis points of 1


def costs(evaluation: Evaluation) -> Section:
    """The agent's own decisions under other costs, delayed, and permuted."""
    lead = (
        "The same decisions, replayed. Costs are never known to a digit; an edge that dies when they double was hardly there."
    )
    return Section("costs", "Costs and delay", _headline(evaluation), lead, [_curve(evaluation), _checks(evaluation)])


def _headline(evaluation: Evaluation) -> str:
    edge = evaluation.sanity.break_even_cost
    if edge is None:
        return "The agent never traded"
    if edge <= 0.0:
        return "There was no gain before costs to lose"
    return f"The gain is gone at costs of {_points(edge)} per trade"


def _points(cost: float) -> str:
    return f"{say(cost * POINT)} basis points"


def paid_cost(evaluation: Evaluation) -> float | None:
    """Costs as tested, per unit of traded notional; None if the agent never traded."""
    traded = float(evaluation.agent.turnover.sum())
    return float(evaluation.agent.costs.sum()) / traded if traded > 0.0 else None


def break_even_multiple(evaluation: Evaluation) -> float | None:
    """The break-even cost in multiples of the tested one; None where either is not there."""
    paid, edge = paid_cost(evaluation), evaluation.sanity.break_even_cost
    return edge / paid if paid and edge is not None else None


def _curve(evaluation: Evaluation) -> Chart:
    curve = sorted(evaluation.sanity.cost_curve)
    multiples = np.array([point.multiple for point in curve])
    even = break_even_multiple(evaluation)
    rules = [Rule("as tested", x=1.0)]
    if even is not None and multiples[0] < even <= multiples[-1]:
        rules.append(Rule("break-even", x=even))
    x = Axis("multiple", label="costs, in multiples of the tested ones", tip="costs")
    panels = []
    for title, values, form in (
        ("Sharpe ratio per year", [point.sharpe for point in curve], "number"),
        ("Total return", [point.total_return for point in curve], "percent"),
    ):
        line = Mark("line", multiples, {"y": values}, title, "agent", options={"legend": False})
        dots = Mark("dots", multiples, {"y": values}, "", "agent")
        axis = Axis("percent" if form == "percent" else "number", include=(0.0,))
        panels.append(Panel(title, [line, dots], x, axis, 260, rules))
    first, last = curve[0], curve[-1]
    returns = f"from {say(first.total_return, 'percent')} to {say(last.total_return, 'percent')}"
    sharpes = f"from {say(first.sharpe)} to {say(last.sharpe)}"
    summary = (
        f"From {first.multiple:g}{TIMES} to {last.multiple:g}{TIMES} the costs, the Sharpe ratio goes {sharpes} and the total "
    )
    summary += f"return {returns}."
    title = f"Sharpe {say(first.sharpe)} without costs, {say(last.sharpe)} at {last.multiple:g}{TIMES}"
    return Chart("costs-curve", title, summary, panels, _note(evaluation, even), columns=2)


def _note(evaluation: Evaluation, even: float | None) -> str:
    paid = paid_cost(evaluation)
    if paid is None:
        return "The agent never traded."
    said = f"Tested at {_points(paid)} per unit traded."
    return said if even is None or not math.isfinite(even) else f"{said} Break-even at {say(even, 'multiple')} of that."


def _checks(evaluation: Evaluation) -> Html:
    sanity = evaluation.sanity
    delay = sanity.delay
    extra = f"{delay.bars} extra {'bar' if delay.bars == 1 else 'bars'} of delay"
    rows = [
        [
            extra,
            f"Sharpe {say(delay.sharpe_before)} becomes {say(delay.sharpe)}, return "
            f"{signed(delay.total_return_before, 'percent')} becomes {signed(delay.total_return, 'percent')}",
            "A real edge fades slowly; one that vanishes hung on the very next price.",
        ],
        [
            "own positions, permuted",
            chance(sanity.permutation_p),
            f"How often the same positions in another order (blocks of {sanity.permutation_block} bars) do as well: the "
            "smaller, the more the timing mattered.",
        ],
    ]
    share = evaluation.statistics[evaluation.agent.name].get("cost_share")
    if share is not None:
        rows.append(["cost share", say(share.value, "percent"), term("cost_share").meaning])
    return table(["check", "found", "what it means"], rows, "What else a sceptic would try.", numbers_from=3)
