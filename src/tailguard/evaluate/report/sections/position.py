"""What the agent held, over what the market did."""

import numpy as np

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Section
from tailguard.evaluate.report.downsample import envelope, keep
from tailguard.evaluate.report.figures import Axis, Chart, Color, Mark, Panel, seconds
from tailguard.evaluate.report.formatting import capital, say
from tailguard.evaluate.report.series import TIME
from tailguard.evaluate.stats.series import Floats

COLORS: tuple[Color, ...] = ("market", "third", "fourth", "other")
IDLE, STUCK = 0.01, 0.02  # below these an agent is called absent, or always in the same position


def position(evaluation: Evaluation) -> Section:
    """Positions and exposure over price."""
    weights = evaluation.agent.weights
    net, gross = weights.sum(axis=1), np.abs(weights).sum(axis=1)
    habit = _habit(net, gross)
    lead = "A position is a share of the account: 100% is all of it in the market, below zero is short. An agent that hardly "
    lead += "moves is a constant mix in disguise."
    summary = f"The agent's net position runs from {say(net.min(), 'percent')} to {say(net.max(), 'percent')} with a mean of "
    summary += f"{say(net.mean(), 'percent')}; its mean exposure is {say(gross.mean(), 'percent')}."
    panels = [_prices(evaluation), _held(evaluation, net, gross), _traded(evaluation)]
    note = "Lines are means over a few bars, the shade behind them goes from the lowest to the highest."
    chart = Chart(
        "position",
        f"Position between {say(net.min(), 'percent')} and {say(net.max(), 'percent')}",
        summary,
        panels,
        note,
        shared=True,
    )
    return Section("position", "Behaviour", habit, lead, [chart])


def _habit(net: Floats, gross: Floats) -> str:
    if gross.mean() < IDLE:
        return "The agent hardly ever held anything"
    if net.std() < STUCK:
        return f"The agent held {say(net.mean(), 'percent')} almost all the time"
    long, short = float((net > STUCK).mean()), float((net < -STUCK).mean())
    return f"Long in {long:.0%} of the bars, short in {short:.0%}, mean exposure {gross.mean():.0%}"


def _prices(evaluation: Evaluation) -> Panel:
    prices = evaluation.prices.to_numpy(dtype=np.float64)
    names = [str(name) for name in evaluation.prices.columns]
    times = seconds(evaluation.agent.times)
    several = len(names) > 1
    shown = prices / prices[0] if several else prices
    marks = []
    for i, name in enumerate(names):
        at = keep(shown[:, i])
        label = name if several else evaluation.source
        marks.append(Mark("line", times[at], {"y": shown[at, i]}, label, COLORS[min(i, len(COLORS) - 1)], several))
    wide = bool(shown.max() / shown.min() > 3.0)
    title = "Prices, each from 1" if several else "Price at the close"
    return Panel(title, marks, TIME, Axis("multiple" if several else "price", "log" if wide else "linear"), 230, hide_x=True)


def _held(evaluation: Evaluation, net: Floats, gross: Floats) -> Panel:
    times = seconds(evaluation.agent.times)
    at, mean, low, high = envelope(net)
    marks = [
        Mark("band", times[at], {"low": low, "high": high}, "lowest to highest", "agent", options={"legend": False}),
        Mark("area", times[at], {"y": mean}, "net position", "agent"),
    ]
    if not np.allclose(net, gross):
        at, mean, _, _ = envelope(gross)
        marks.append(Mark("line", times[at], {"y": mean}, "exposure, long and short", "fourth", options={"thin": True}))
    return Panel("Position, share of the account", marks, TIME, Axis("percent", include=(0.0,)), 190, hide_x=True)


def _traded(evaluation: Evaluation) -> Panel:
    """Turnover is the price of changing one's mind; summed over equal stretches of time it can be read at any length."""
    track = evaluation.agent
    periods = evaluation.periods_per_year
    at, mean, _, _ = envelope(track.turnover, 120)
    mark = Mark("area", seconds(track.times)[at], {"y": mean * periods}, "turnover per year", "fourth")
    return Panel(capital("turnover, accounts per year"), [mark], TIME, Axis("multiple", include=(0.0,), tight=True), 130)
