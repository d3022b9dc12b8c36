"""Equity and drawdown against the baselines, and the statistics of every account."""

import numpy as np

from tailguard.evaluate import statistics
from tailguard.evaluate.record import Evaluation, Track
from tailguard.evaluate.report.blocks import Block, Section, Tabs
from tailguard.evaluate.report.figures import Axis, Chart, Mark, Panel, Rows, figure_row, seconds
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.markup import Html, table
from tailguard.evaluate.report.series import OWN_MIX, TIME, behind_first, color_of, line, title_of, value_axis
from tailguard.evaluate.report.words import capital, say, with_interval

BAND = (0.05, 0.95)
DRAWS = 1000  # enough for a band on a screen
FEWEST = 8  # bars that a bootstrap needs
COMPARED = ("sharpe", "cagr", "max_drawdown", "cvar_5")


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


def comparison(evaluation: Evaluation) -> Section:
    """The statistics of all accounts, with their intervals."""
    panes: dict[str, list[Block]] = {
        term(key).label: [_rows_chart(evaluation, key)]
        for key in COMPARED
        if key in evaluation.statistics[evaluation.agent.name]
    }
    panes["All figures"] = [_table(evaluation), _agent_table(evaluation)]
    rank = _rank(evaluation)
    headline = f"By Sharpe ratio the agent is number {rank} of {len(evaluation.baselines) + 1}"
    lead = "A bar covers the true figure with a confidence of 95%. Where bars overlap by much, the order may be luck."
    return Section("comparison", "Comparison", headline, lead, [Tabs("comparison-tabs", "Which figure", panes)])


def _rank(evaluation: Evaluation) -> int:
    own = evaluation.statistics[evaluation.agent.name]["sharpe"].value
    return 1 + sum(evaluation.statistics[track.name]["sharpe"].value > own for track in evaluation.baselines)


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
            "agent, 90% of resampled histories",
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


def _rows_chart(evaluation: Evaluation, key: str) -> Chart:
    words = term(key)
    figures = {track.name: evaluation.statistics[track.name][key] for track in [evaluation.agent, *evaluation.baselines]}
    downwards = words.more_is_better is not False
    order = sorted(figures, key=lambda name: figures[name].value, reverse=downwards)
    rows = [figure_row(title_of(name), figures[name], words.kind, color_of(evaluation, name), words.label) for name in order]
    own = figures[evaluation.agent.name]
    summary = f"{words.label} of the agent: {with_interval(own, words.kind)}. The best is {title_of(order[0])} with "
    summary += f"{say(figures[order[0]].value, words.kind)}, the worst {title_of(order[-1])} with "
    summary += f"{say(figures[order[-1]].value, words.kind)}."
    panel = Rows(f"{words.label}, best first, with 95% intervals", rows, words.kind)
    return Chart(f"rows-{key}", f"{words.label}: the agent has {say(own.value, words.kind)}", summary, [panel], words.meaning)


def _table(evaluation: Evaluation) -> Html:
    keys = [key for key in evaluation.statistics[evaluation.market] if key in evaluation.statistics[evaluation.agent.name]]
    tracks: list[Track] = [evaluation.agent, *evaluation.baselines, *evaluation.seeds]
    rows = [
        [title_of(track.name), *(_cell(evaluation, track.name, key) for key in keys)]
        for track in tracks
        if track.name in evaluation.statistics
    ]
    return table(
        ["", *(term(key).label for key in keys)], rows, "Every account and every figure, with 95% intervals in brackets."
    )


def _cell(evaluation: Evaluation, name: str, key: str) -> str:
    figures = evaluation.statistics[name]
    return with_interval(figures[key], term(key).kind) if key in figures else "none"


def _agent_table(evaluation: Evaluation) -> Html:
    figures = evaluation.statistics[evaluation.agent.name]
    rows = [[term(key).label, with_interval(figure, term(key).kind), term(key).meaning] for key, figure in figures.items()]
    return table(["figure", "agent", "what it means"], rows, "What the agent's figures mean.", numbers_from=3)
