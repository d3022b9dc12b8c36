"""The top of the page: the verdict, its reasons and the key statistics."""

import re

from tailguard.evaluate.record import Estimate, Evaluation
from tailguard.evaluate.report.charts import title_of
from tailguard.evaluate.report.formatting import MINUS, capital, day, duration, interval, readable, say, years
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.page import Html, join, tag

KEY_STATISTICS = ("sharpe", "cagr", "max_drawdown", "cvar_5", "turnover", "exposure")
MEANINGS = {
    "evidence of skill": "Luck and the market do not explain the return. That is no promise for the future.",
    "no evidence of skill": "Luck, the market or average exposure can explain the return: no reason to trade it.",
    "worse than": "A simpler strategy did significantly better. Prefer the simpler one.",
    "too little data to tell": "The test is too short to separate skill from luck, whether the result is good or bad.",
}
# The rule behind each verdict, in the order in which the rules are tried, with the names of the thresholds.
RULES = {
    "too little data to tell": "The rule: the test has fewer than {fewest_bars:,} bars, or it would have found a Sharpe ratio "
    "lead of {worthwhile:g} with a probability below {power:.3g}% and the data do not rule such a lead out.",
    "worse than": "The rule: the Sharpe ratio of a baseline is higher by more than 0.05 and luck, in a test over all of "
    "them (stepwise, {half:.3g}% chance of error). Baselines that are draws of luck themselves do not count.",
    "evidence of skill": "The rule: every test below is passed, each with a chance of error of at most {size:.3g}%.",
    "no evidence of skill": "The rule: at least one test below is not passed, and the data were enough to find a Sharpe ratio "
    'lead of {worthwhile:g}, or to rule it out. Being behind single baselines does not make it "worse than": that needs a test '
    "over all.",
}
MARKS = {"evidence of skill": "yes", "no evidence of skill": "no", "worse than": "no", "too little data to tell": "open"}
GAUGE = 150.0


def overview(evaluation: Evaluation) -> Html:
    """Return the top of the page."""
    verdict, times = evaluation.verdict, evaluation.agent.times
    span = f"{day(times[0])} to {day(times[-1])}"
    parts = [evaluation.source, span, f"{len(times):,} test bars", _trainings(evaluation)]
    where = " · ".join(part for part in parts if part)
    headline = capital(with_page_names(evaluation, verdict.headline))
    return tag(
        "header",
        tag("p", "Tailguard", tag("span", evaluation.title), class_="masthead"),
        tag(
            "div",
            tag("p", "The verdict", class_="kicker"),
            tag("h1", f"{headline}."),
            class_=f"verdict {MARKS[verdict.outcome]}",
        ),
        tag("p", MEANINGS[verdict.outcome], class_="standfirst"),
        tag("p", _story(evaluation), class_="story"),
        tag("p", rule(evaluation), class_="rule"),
        tag("p", where, class_="where"),
        key_statistics(evaluation),
        _reasons([with_page_names(evaluation, reason) for reason in verdict.reasons]),
        class_="top",
        id="verdict",
    )


def rule(evaluation: Evaluation) -> str:
    """Return the rule behind the verdict, with the thresholds that it was reached with."""
    rules = evaluation.rules
    percentages = {"power": 100.0 * rules.power, "size": 100.0 * rules.size, "half": 50.0 * rules.size}
    return RULES[evaluation.verdict.outcome].format(**rules.model_dump() | percentages)


def key_statistics(evaluation: Evaluation) -> Html:
    """Return six statistics with their intervals, each beside that of the market."""
    agent, market = evaluation.statistics[evaluation.agent.name], evaluation.statistics[evaluation.market]
    market_name = title_of(evaluation.market)
    cards = [_card(key, agent[key], market.get(key), market_name) for key in KEY_STATISTICS if key in agent]
    return tag("dl", *cards, class_="figures")


def _trainings(evaluation: Evaluation) -> str:
    seeds, folds = len(evaluation.seeds), len(evaluation.folds)
    if not folds:
        return ""
    return f"{folds} {'fold' if folds == 1 else 'folds'}, {seeds} training {'seed' if seeds == 1 else 'seeds'}"


def _story(evaluation: Evaluation) -> str:
    agent, market = evaluation.agent, evaluation.history(evaluation.market)
    fall = evaluation.statistics[agent.name]["max_drawdown"].value
    length = duration(years(agent.times)) if len(agent.times) > 1 else "one bar"
    data = "data that it was not trained on" if len(evaluation.folds) else "data"
    costs = "after all costs" if agent.traded else "as its returns say"
    return (
        f"Over {length} of {data}, the {evaluation.subject} turned 1.00 into {say(agent.equity[-1])} {costs}; "
        f"{title_of(market.name)} turned it into {say(market.equity[-1])}. The {evaluation.subject}'s maximum drawdown was "
        f"{say(fall, 'percent')}."
    )


def _card(key: str, estimate: Estimate, market: Estimate | None, market_name: str) -> Html:
    words = term(key)
    ends = interval(estimate, words.kind)
    against = "" if market is None else f"{capital(market_name)}: {say(market.value, words.kind)}"
    sure = tag("span", "95% interval ", tag("b", ends)) if ends else tag("span", "Measured, not estimated: no interval")
    return tag(
        "div",
        tag("dt", words.label),
        tag("dd", say(estimate.value, words.kind), class_="value", data_statistic=key),
        tag("dd", _gauge(estimate, market), sure, class_="ends"),
        tag("dd", against, class_="against"),
        tag("dd", words.meaning, class_="meaning"),
    )


def _gauge(estimate: Estimate, market: Estimate | None) -> Html:
    """Draw the interval with the value, zero and the market; the text beside it states the same numbers."""
    if estimate.low is None or estimate.high is None:
        return Html("")
    shown = [estimate.low, estimate.high, estimate.value, 0.0] + ([] if market is None else [market.value])
    low, high = min(shown), max(shown)
    if not high - low < float("inf") or high == low:
        return Html("")

    def at(value: float) -> str:
        return f"{4.0 + (GAUGE - 8.0) * (value - low) / (high - low):.1f}"

    marks = [tag("line", x1=at(0.0), x2=at(0.0), y1="1", y2="15", class_="gauge-zero")]
    marks.append(tag("line", x1=at(estimate.low), x2=at(estimate.high), y1="8", y2="8", class_="range c-agent"))
    if market is not None:
        marks.append(tag("line", x1=at(market.value), x2=at(market.value), y1="3", y2="13", class_="gauge-market"))
    marks.append(tag("circle", cx=at(estimate.value), cy="8", r="4", class_="dot c-agent"))
    return tag("svg", *marks, viewBox=f"0 0 {GAUGE:g} 16", class_="gauge", aria_hidden="true")


def with_page_names(evaluation: Evaluation, sentence: str) -> str:
    """Return a sentence of the verdict with the names of the accounts for people, and true minus signs."""
    sentence = re.sub(r"\bagent\b", evaluation.subject, sentence)
    for name in sorted((history.name for history in evaluation.histories), key=len, reverse=True):
        if name != readable(name):
            sentence = sentence.replace(name, title_of(name))
    return re.sub(r"(?<![\w.])-(?=\d)", MINUS, sentence)


def _reasons(reasons: list[str]) -> Html:
    items = join(*(tag("li", reason) for reason in reasons))
    return tag("div", tag("h2", "Reasons"), tag("ol", items), class_="why")
