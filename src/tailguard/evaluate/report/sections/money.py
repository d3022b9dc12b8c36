"""Equity and drawdown against the baselines."""

import numpy as np

from tailguard.evaluate import statistics
from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Block, Section, Tabs
from tailguard.evaluate.report.figures import Axis, Chart, Mark, Panel, seconds
from tailguard.evaluate.report.formatting import capital, say, with_interval
from tailguard.evaluate.report.series import OWN_MIX, TIME, behind_first, line, title_of, value_axis

BAND = (0.05, 0.95)
DRAWS = 1000  # enough for a band on a screen
FEWEST = 8  # bars that a bootstrap needs


def money(evaluation: Evaluation) -> Section:
    """What became of the account, and of the same money elsewhere."""
    panes: dict[str, list[Block]] = {"Against the baselines": [_equity_chart(evaluation)]}
    if len(evaluation.seeds) > 1:
        panes["Each training seed"] = [_seed_chart(evaluation)]
    better = [track for track in evaluation.baselines if track.equity[-1] > evaluation.agent.equity[-1]]
    count = f"{len(better)} of {len(evaluation.baselines)} baselines"
    headline = f"{capital(count)} ended with more" if better else "No baseline ended with more"
    lead = "All accounts trade the same bars under the same costs, so what differs is the decisions."
    if any(track.name == OWN_MIX for track in evaluation.baselines):
        lead += " The constant mix always holds the agent's own mean exposure: only timing can beat it."
    return Section("money", "Money", headline, lead, [Tabs("money-tabs", "Which accounts", panes)])


def _equity_chart(evaluation: Evaluation) -> Chart:
    tracks = behind_first(evaluation, [evaluation.agent, *evaluation.baselines])
    agent, market = evaluation.agent, evaluation.track(evaluation.market)
    band = _band(evaluation)
    lines = [line(evaluation, track, track.equity) for track in tracks]
    falls = [line(evaluation, track, -statistics.drawdowns(track.equity)) for track in tracks]
    fall = evaluation.statistics[agent.name]["max_drawdown"]
    summary = (
        f"The agent ends at {say(agent.equity[-1])} times its start, {title_of(market.name)} at "
        f"{say(market.equity[-1])}; the agent's deepest fall is {with_interval(fall, 'percent')}."
    )
    note = (
        "Shaded: nine in ten resampled histories of the agent (stationary block bootstrap). Click a name to bring it forward."
    )
    panels = [
        Panel("Value of 1 invested", [*band, *lines], TIME, value_axis([*lines]), 360, hide_x=True),
        Panel("Fall from the last peak", falls, TIME, Axis("percent", tight=True, include=(0.0,)), 190),
    ]
    return Chart("equity", _equity_title(evaluation), summary, panels, note, shared=True, choose=True)


def _equity_title(evaluation: Evaluation) -> str:
    agent, market = evaluation.agent.equity[-1], evaluation.track(evaluation.market).equity[-1]
    name = title_of(evaluation.market)
    return f"1.00 became {say(agent)} with the agent and {say(market)} with {name}"


def _band(evaluation: Evaluation) -> list[Mark]:
    agent = evaluation.agent
    if len(agent.returns) < FEWEST or not np.ptp(agent.returns) > 0.0:
        return []
    at, bands = statistics.equity_bands(agent.returns, BAND, points=160, draws=DRAWS)
    times = seconds(agent.times)[np.maximum(at - 1, 0)]
    return [
        Mark(
            "band",
            times,
            {"low": bands[0], "high": bands[1]},
            "agent, 90% band",
            "agent",
            options={"keep": True},
        )
    ]


def _seed_chart(evaluation: Evaluation) -> Chart:
    tracks = [*evaluation.seeds, evaluation.agent]
    lines = [line(evaluation, track, track.equity) for track in tracks]
    ends = sorted(float(track.equity[-1]) for track in evaluation.seeds)
    spread = f"from {say(ends[0])} to {say(ends[-1])}"
    own = say(evaluation.agent.equity[-1])
    summary = f"The {len(ends)} training seeds end {spread}; the agent, their mean position, ends at {own}."
    panel = Panel("Value of 1 invested", lines, TIME, value_axis(lines), 360)
    note = "Seeds differ in nothing but their random numbers. Their spread is how much of the result is chance in training."
    return Chart("seed-equity", f"The training seeds end {spread}", summary, [panel], note, choose=True)
