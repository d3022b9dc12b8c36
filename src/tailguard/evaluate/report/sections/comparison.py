"""The statistics of every account, with their intervals."""

from tailguard.evaluate.record import AccountHistory, Evaluation
from tailguard.evaluate.report.blocks import Block, Section, Tabs
from tailguard.evaluate.report.figures import Chart, Rows, figure_row
from tailguard.evaluate.report.formatting import say, with_interval
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.markup import Html, table
from tailguard.evaluate.report.series import color_of, title_of

LEAD = "agent_lead"
COMPARED = ("sharpe", "cagr", "max_drawdown", "cvar_5")


def comparison(evaluation: Evaluation) -> Section:
    """The statistics of all accounts, with their intervals."""
    lead_chart = _lead_chart(evaluation)
    panes: dict[str, list[Block]] = {} if lead_chart is None else {"Lead over each": [lead_chart]}
    panes |= {term(key).label: [_rows_chart(evaluation, key)] for key in COMPARED}
    panes["All figures"] = [_table(evaluation), _agent_table(evaluation)]
    headline = f"By Sharpe ratio the agent is number {_rank(evaluation)} of {len(evaluation.baselines) + 1}"
    lead = "A bar covers the true figure with a confidence of 95%. Where bars overlap by much, the order may be luck."
    return Section("comparison", "Comparison", headline, lead, [Tabs("comparison-tabs", "Which figure", panes)])


def _rank(evaluation: Evaluation) -> int:
    own = evaluation.statistics[evaluation.agent.name]["sharpe"].value
    return 1 + sum(evaluation.statistics[track.name]["sharpe"].value > own for track in evaluation.baselines)


def _lead_chart(evaluation: Evaluation) -> Chart | None:
    """The agent minus each baseline, on the same resampled bars: what the market did to both cancels."""
    leads = {track.name: evaluation.statistics[track.name].get(LEAD) for track in evaluation.baselines}
    known = {name: lead for name, lead in leads.items() if lead is not None}
    if not known:
        return None
    order = sorted(known, key=lambda name: known[name].value)
    rows = [figure_row(title_of(name), known[name], "number", color_of(evaluation, name), "lead") for name in order]
    sure = [name for name in order if (known[name].low or 0.0) > 0.0]
    behind = [name for name in order if known[name].high is not None and (known[name].high or 0.0) < 0.0]
    title = f"Clearly ahead of {len(sure)} and clearly behind {len(behind)} of {len(known)} baselines"
    summary = f"The agent's Sharpe ratio minus that of each baseline runs from {with_interval(known[order[0]])} over "
    summary += f"{title_of(order[0])} to {with_interval(known[order[-1]])} over {title_of(order[-1])}."
    panel = Rows("Sharpe ratio of the agent minus that of the baseline, with 95% intervals", rows)
    note = (
        "A bar that crosses 0 leaves open who is better. Both accounts are resampled together, so that these bars are narrower "
    )
    return Chart("leads", title, summary, [panel], note + "than those of two accounts alone.")


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
    tracks: list[AccountHistory] = [evaluation.agent, *evaluation.baselines, *evaluation.seeds]
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
