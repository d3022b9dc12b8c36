"""The agent's account beside those of the baselines: equity and drawdown, statistics with intervals, positions."""

import numpy as np

from tailguard.evaluate import statistics
from tailguard.evaluate.record import AccountHistory, Evaluation
from tailguard.evaluate.report.charts import (
    LOG_FROM,
    TIME,
    Axis,
    Chart,
    Color,
    Mark,
    Panel,
    RowPanel,
    account_line,
    account_name,
    color_of,
    downsample,
    drawing_order,
    envelope,
    estimate_row,
    seconds,
    title_of,
    value_axis,
)
from tailguard.evaluate.report.formatting import capital, say, with_interval
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.page import Block, Html, ReportSection, Tabs, table
from tailguard.evaluate.sanity import CASH
from tailguard.evaluate.stats.series import Floats

# By name: the rule, and what a comparison with it shows. {who} is the account that was evaluated.
BASELINES = {
    "buy_and_hold": ("Buys at the start, in equal parts, and never trades again.", "What merely being in the market earned."),
    "benchmark": ("The series that was given as the benchmark.", "What the market of the {who} earned."),
    "own_mix": (
        "Always holds the average weights of the {who}, rebalanced at every bar.",
        "The same average exposure without timing: the {who} can beat it only by timing.",
    ),
    "own_permuted": (
        "Takes the positions of the {who} in shuffled order, in blocks: the median of all shuffles by Sharpe ratio.",
        "The same positions and trading costs at other times; one draw of luck.",
    ),
    "random_positions": (
        "Is long or short at random, trading as much as the {who}.",
        "What the turnover costs without any skill; one draw of luck.",
    ),
    "moving_average": (
        "Invested while the 50-bar average of the price is above the 200-bar one.",
        "A trend rule that is known.",
    ),
    "momentum": (
        "Long after a rise of the last 252 bars without the last 21, short after a fall.",
        "A trend rule that is known.",
    ),
    "volatility_target": ("Holds less when volatility is high, for 10% per year.", "What controlling risk alone earned."),
    "equal_weight": ("Fully invested in equal parts, restored every 21 bars.", "What diversification alone earned."),
    "cash": ("Stays in cash, at the cash rate.", "Doing nothing: its Sharpe ratio is 0."),
}
BAND = (0.05, 0.95)
DRAWS = 1000  # enough for a band on a screen
FEWEST = 8  # bars that a bootstrap needs
LEAD = "agent_lead"
COMPARED = ("sharpe", "cagr", "max_drawdown", "cvar_5")
PRICE_COLORS: tuple[Color, ...] = ("market", "third", "fourth", "other")
IDLE, CONSTANT = 0.01, 0.02  # below these an agent is called idle, or its position constant


def equity_section(evaluation: Evaluation) -> ReportSection:
    """Show equity and drawdown of the agent, the baselines and the training seeds."""
    panes: dict[str, list[Block]] = {f"{capital(evaluation.subject)} and baselines": [_equity_chart(evaluation)]}
    if len(evaluation.seeds) > 1:
        panes["Training seeds"] = [_seed_chart(evaluation)]
    better = [history for history in evaluation.baselines if history.equity[-1] > evaluation.agent.equity[-1]]
    count = f"{len(better)} of {len(evaluation.baselines)} baselines"
    headline = f"{count if better else 'No baseline'} ended with more than the {evaluation.subject}"
    lead = (
        "All accounts trade the same bars at the same costs." if evaluation.agent.traded else "All accounts on the same bars."
    )
    panes["What the baselines are"] = [_baselines_table(evaluation)]
    return ReportSection("money", "Equity", headline, lead, [Tabs("money-tabs", "Accounts", panes)])


def _baselines_table(evaluation: Evaluation) -> Html:
    who = evaluation.subject
    rows = []
    for history in evaluation.baselines:
        rule, comparison = BASELINES.get(history.name, ("As its name says.", ""))
        role = " The market of the verdict: alpha is measured over it." if history.name == evaluation.market != CASH else ""
        rows.append([title_of(history.name), rule.format(who=who), comparison.format(who=who) + role])
    return table(["baseline", "what it does", "what it shows"], rows, "The baselines, and why they are here.", numbers_from=3)


def _equity_chart(evaluation: Evaluation) -> Chart:
    histories = drawing_order(evaluation, [evaluation.agent, *evaluation.baselines])
    agent, market = evaluation.agent, evaluation.history(evaluation.market)
    lines = [account_line(evaluation, history, history.equity) for history in histories]
    falls = [account_line(evaluation, history, -statistics.drawdowns(history.equity)) for history in histories]
    drawdown = evaluation.statistics[agent.name]["max_drawdown"]
    who = evaluation.subject
    title = f"1.00 became {say(agent.equity[-1])} with the {who} and {say(market.equity[-1])} with {title_of(market.name)}"
    summary = (
        f"The {who} ends at {say(agent.equity[-1])} times its start, {title_of(market.name)} at "
        f"{say(market.equity[-1])}. The {who}'s maximum drawdown is {with_interval(drawdown, 'percent')}."
    )
    note = f"Shaded: 90% band of the {who}'s equity (stationary block bootstrap). Click a name to highlight its line."
    panels = [
        Panel("Value of 1 invested", [*_band(evaluation), *lines], TIME, value_axis(lines), 360, hide_x=True),
        Panel("Drawdown", falls, TIME, Axis("percent", tight=True, include=(0.0,)), 190),
    ]
    return Chart("equity", title, summary, panels, note, shared=True, choose=True)


def _band(evaluation: Evaluation) -> list[Mark]:
    agent = evaluation.agent
    if len(agent.returns) < FEWEST or not np.ptp(agent.returns) > 0.0:
        return []
    at, bands = statistics.equity_bands(agent.returns, BAND, points=160, draws=DRAWS)
    times = seconds(agent.times)[np.maximum(at - 1, 0)]
    columns = {"low": bands[0], "high": bands[1]}
    return [Mark("band", times, columns, f"{evaluation.subject}, 90% band", "agent", options={"keep": True})]


def _seed_chart(evaluation: Evaluation) -> Chart:
    lines = [account_line(evaluation, history, history.equity) for history in [*evaluation.seeds, evaluation.agent]]
    ends = sorted(float(history.equity[-1]) for history in evaluation.seeds)
    spread = f"between {say(ends[0])} and {say(ends[-1])}"
    own = say(evaluation.agent.equity[-1])
    summary = f"The {len(ends)} training seeds end {spread}. The agent, which trades their average position, ends at {own}."
    panel = Panel("Value of 1 invested", lines, TIME, value_axis(lines), 360)
    note = "Seeds differ only in their random numbers. Their spread shows how much of the result is chance in training."
    return Chart("seed-equity", f"The training seeds end {spread}", summary, [panel], note, choose=True)


def statistics_section(evaluation: Evaluation) -> ReportSection:
    """Show the statistics of all accounts, with their intervals."""
    lead_chart = _lead_chart(evaluation)
    panes: dict[str, list[Block]] = {} if lead_chart is None else {"Lead over the baselines": [lead_chart]}
    panes |= {term(key).label: [_rows_chart(evaluation, key)] for key in COMPARED}
    panes["All statistics"] = [_accounts_table(evaluation), _agent_table(evaluation)]
    accounts = len(evaluation.baselines) + 1
    headline = f"By Sharpe ratio, the {evaluation.subject} is number {_rank(evaluation)} of {accounts} accounts"
    lead = "Bars are 95% confidence intervals. Where two of them overlap widely, the order of the accounts may be luck."
    return ReportSection("comparison", "Statistics", headline, lead, [Tabs("comparison-tabs", "Statistic", panes)])


def _rank(evaluation: Evaluation) -> int:
    own = evaluation.statistics[evaluation.agent.name]["sharpe"].value
    return 1 + sum(evaluation.statistics[history.name]["sharpe"].value > own for history in evaluation.baselines)


def _lead_chart(evaluation: Evaluation) -> Chart | None:
    """Chart the agent minus each baseline on the same resampled bars, so that what the market did to both cancels."""
    leads = {history.name: evaluation.statistics[history.name].get(LEAD) for history in evaluation.baselines}
    known = {name: lead for name, lead in leads.items() if lead is not None}
    if not known:
        return None
    order = sorted(known, key=lambda name: known[name].value)
    rows = [estimate_row(title_of(name), known[name], "number", color_of(evaluation, name), "lead") for name in order]
    ahead = [name for name in order if (known[name].low or 0.0) > 0.0]
    behind = [name for name in order if known[name].high is not None and (known[name].high or 0.0) < 0.0]
    who = evaluation.subject
    title = f"Taken one by one: interval above 0 for {len(ahead)} and below 0 for {len(behind)} of {len(known)} baselines"
    summary = f"The {who}'s Sharpe ratio minus that of each baseline ranges from {with_interval(known[order[0]])} for "
    summary += f"{title_of(order[0])} to {with_interval(known[order[-1]])} for {title_of(order[-1])}."
    panel = RowPanel(f"Sharpe ratio of the {who} minus that of the baseline, with 95% intervals", rows)
    note = (
        "An interval that contains 0 leaves open which account is better. Both accounts are resampled together, so the "
        "interval of their difference is narrower than the intervals of the two Sharpe ratios suggest. Each interval is for "
        'its baseline alone, and of many baselines some lead by luck: the verdict says "worse than" only where a test over all '
        "of them (stepwise, 2.5%) finds it."
    )
    if evaluation.agent.traded:
        note += " Random positions and own permuted do not count there, being luck themselves."
    return Chart("leads", title, summary, [panel], note)


def _rows_chart(evaluation: Evaluation, key: str) -> Chart:
    words = term(key)
    histories = [evaluation.agent, *evaluation.baselines]
    estimates = {history.name: evaluation.statistics[history.name][key] for history in histories}
    order = sorted(estimates, key=lambda name: estimates[name].value, reverse=words.more_is_better is not False)
    rows = [
        estimate_row(account_name(evaluation, name), estimates[name], words.kind, color_of(evaluation, name), words.label)
        for name in order
    ]
    own, (best, worst) = estimates[evaluation.agent.name], (order[0], order[-1])
    ends = [f"{account_name(evaluation, name)}, {say(estimates[name].value, words.kind)}" for name in (best, worst)]
    summary = (
        f"{words.label}: {with_interval(own, words.kind)} for the {evaluation.subject}. Best: {ends[0]}. Worst: {ends[1]}."
    )
    panel = RowPanel(f"{words.label}, best first, with 95% intervals", rows, words.kind)
    title = f"{words.label}: {say(own.value, words.kind)} for the {evaluation.subject}"
    return Chart(f"rows-{key}", title, summary, [panel], words.meaning)


def _accounts_table(evaluation: Evaluation) -> Html:
    keys = [key for key in evaluation.statistics[evaluation.market] if key in evaluation.statistics[evaluation.agent.name]]
    histories: list[AccountHistory] = [evaluation.agent, *evaluation.baselines, *evaluation.seeds]
    rows = [
        [account_name(evaluation, history.name), *(_cell(evaluation, history.name, key) for key in keys)]
        for history in histories
        if history.name in evaluation.statistics
    ]
    return table(["account", *(term(key).label for key in keys)], rows, "All statistics, with 95% intervals in brackets.")


def _cell(evaluation: Evaluation, name: str, key: str) -> str:
    estimates = evaluation.statistics[name]
    return with_interval(estimates[key], term(key).kind) if key in estimates else "none"


def _agent_table(evaluation: Evaluation) -> Html:
    estimates = evaluation.statistics[evaluation.agent.name]
    rows = [
        [term(key).label, with_interval(estimate, term(key).kind), term(key).meaning] for key, estimate in estimates.items()
    ]
    who = evaluation.subject
    return table(["statistic", who, "meaning"], rows, f"The {who}'s statistics and their meaning.", numbers_from=3)


def positions_section(evaluation: Evaluation) -> ReportSection | None:
    """Show prices, positions and turnover over time; None where only returns are known."""
    if not evaluation.agent.traded:
        return None
    who = evaluation.subject
    weights = evaluation.agent.weights
    net, gross = weights.sum(axis=1), np.abs(weights).sum(axis=1)
    lead = "A position is a share of the account: 100% is fully invested, below zero is short. Who hardly changes the position "
    lead += "holds no more than a constant mix."
    summary = f"The {who}'s net position ranges from {say(net.min(), 'percent')} to {say(net.max(), 'percent')}, on average "
    summary += f"{say(net.mean(), 'percent')}. Its average exposure, long or short, is {say(gross.mean(), 'percent')}."
    panels = [_price_panel(evaluation), _position_panel(evaluation, net, gross), _turnover_panel(evaluation)]
    note = "Lines are averages over a few bars; the shaded range goes from the lowest to the highest value."
    title = f"Net position between {say(net.min(), 'percent')} and {say(net.max(), 'percent')}"
    chart = Chart("position", title, summary, panels, note, shared=True)
    return ReportSection("position", "Positions", _positions_headline(who, net, gross), lead, [chart])


def _positions_headline(who: str, net: Floats, gross: Floats) -> str:
    if gross.mean() < IDLE:
        return f"The {who} hardly ever held a position"
    if net.std() < CONSTANT:
        return f"The {who} held a position of {say(net.mean(), 'percent')} almost all the time"
    long, short = float((net > CONSTANT).mean()), float((net < -CONSTANT).mean())
    return f"Long in {long:.0%} of the bars, short in {short:.0%}, average exposure {gross.mean():.0%}"


def _price_panel(evaluation: Evaluation) -> Panel:
    prices = evaluation.prices.to_numpy(dtype=np.float64)
    names = [str(name) for name in evaluation.prices.columns]
    times = seconds(evaluation.agent.times)
    several = len(names) > 1
    shown = prices / prices[0] if several else prices
    marks = []
    for i, name in enumerate(names):
        at = downsample(shown[:, i])
        label = name if several else evaluation.source
        color = PRICE_COLORS[min(i, len(PRICE_COLORS) - 1)]
        marks.append(Mark("line", times[at], {"y": shown[at, i]}, label, color, several))
    wide = bool(shown.max() / shown.min() > LOG_FROM)
    title = "Closing prices, each starting at 1" if several else "Closing price"
    return Panel(title, marks, TIME, Axis("multiple" if several else "price", "log" if wide else "linear"), 230, hide_x=True)


def _position_panel(evaluation: Evaluation, net: Floats, gross: Floats) -> Panel:
    times = seconds(evaluation.agent.times)
    at, mean, low, high = envelope(net)
    marks = [
        Mark("band", times[at], {"low": low, "high": high}, "lowest to highest", "agent", options={"legend": False}),
        Mark("area", times[at], {"y": mean}, "net position", "agent"),
    ]
    if not np.allclose(net, gross):
        at, mean, _, _ = envelope(gross)
        marks.append(Mark("line", times[at], {"y": mean}, "exposure, long or short", "fourth", options={"thin": True}))
    return Panel("Position, share of the account", marks, TIME, Axis("percent", include=(0.0,)), 190, hide_x=True)


def _turnover_panel(evaluation: Evaluation) -> Panel:
    agent = evaluation.agent
    at, mean, _, _ = envelope(agent.turnover, 120)
    columns = {"y": mean * evaluation.periods_per_year}
    mark = Mark("area", seconds(agent.times)[at], columns, "annual turnover", "fourth")
    axis = Axis("multiple", include=(0.0,), tight=True)
    return Panel("Annual turnover, multiples of the account's value", [mark], TIME, axis, 130)
