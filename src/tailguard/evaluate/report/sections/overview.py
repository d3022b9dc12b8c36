"""The verdict and the key figures: what a reader needs who reads nothing else."""

import re

from tailguard.evaluate.record import Evaluation, Figure
from tailguard.evaluate.report.formatting import MINUS, capital, day, duration, interval, plain, say, years
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.markup import Html, join, tag
from tailguard.evaluate.report.series import title_of

KEY_FIGURES = ("sharpe", "cagr", "max_drawdown", "cvar_5", "turnover", "exposure")
MEANINGS = {
    "evidence of skill": "The agent earned more than luck, the market and its hurdles explain. Past data cannot promise more.",
    "no evidence of skill": "What the agent earned can be explained without any skill. Do not trade it in the hope of more.",
    "worse than": "Something simpler did better, by more than chance explains. Prefer the simpler thing.",
    "too little data to tell": "The test is too short to tell skill from luck. Neither a good nor a bad result means much yet.",
}
MARKS = {"evidence of skill": "yes", "no evidence of skill": "no", "worse than": "no", "too little data to tell": "open"}
GAUGE = 150.0


def overview(evaluation: Evaluation) -> Html:
    """The top of the page."""
    verdict, times = evaluation.verdict, evaluation.agent.times
    span = f"{day(times[0])} to {day(times[-1])}"
    where = f"{evaluation.source} · {span} · {len(times):,} unseen bars · {_trainings(evaluation)}"
    headline = capital(in_words(evaluation, verdict.headline))
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
        tag("p", where, class_="where"),
        key_figures(evaluation),
        _reasons([in_words(evaluation, reason) for reason in verdict.reasons]),
        class_="top",
        id="verdict",
    )


def key_figures(evaluation: Evaluation) -> Html:
    """Six numbers with their intervals, each beside the market's."""
    agent, market = evaluation.statistics[evaluation.agent.name], evaluation.statistics[evaluation.market]
    market_name = title_of(evaluation.market)
    cards = [_card(key, agent[key], market.get(key), market_name) for key in KEY_FIGURES if key in agent]
    return tag("dl", *cards, class_="figures")


def _trainings(evaluation: Evaluation) -> str:
    seeds, folds = len(evaluation.seeds), len(evaluation.folds)
    return f"{folds} {'fold' if folds == 1 else 'folds'}, {seeds} training {'seed' if seeds == 1 else 'seeds'}"


def _story(evaluation: Evaluation) -> str:
    agent, market = evaluation.agent, evaluation.track(evaluation.market)
    fall = evaluation.statistics[agent.name]["max_drawdown"].value
    length = duration(years(agent.times)) if len(agent.times) > 1 else "one bar"
    return (
        f"Over {length} that it had never seen, the agent turned 1.00 into {say(agent.equity[-1])} after all costs; "
        f"{title_of(market.name)} turned it into {say(market.equity[-1])}. "
        f"On the way the agent lost up to {say(fall, 'percent')} from a peak."
    )


def _card(key: str, figure: Figure, market: Figure | None, market_name: str) -> Html:
    words = term(key)
    ends = interval(figure, words.kind)
    against = "" if market is None else f"{capital(market_name)}: {say(market.value, words.kind)}"
    sure = tag("span", "95% interval ", tag("b", ends)) if ends else tag("span", "A count, not an estimate: no interval")
    return tag(
        "div",
        tag("dt", words.label),
        tag("dd", say(figure.value, words.kind), class_="value", data_statistic=key),
        tag("dd", _gauge(figure, market), sure, class_="ends"),
        tag("dd", against, class_="against"),
        tag("dd", words.meaning, class_="meaning"),
    )


def _gauge(figure: Figure, market: Figure | None) -> Html:
    """The interval as a bar with the value on it, zero and the market as marks: for the eye only, the words say it all."""
    if figure.low is None or figure.high is None:
        return Html("")
    shown = [figure.low, figure.high, figure.value, 0.0] + ([] if market is None else [market.value])
    low, high = min(shown), max(shown)
    if not high - low < float("inf") or high == low:
        return Html("")

    def at(value: float) -> str:
        return f"{4.0 + (GAUGE - 8.0) * (value - low) / (high - low):.1f}"

    marks = [tag("line", x1=at(0.0), x2=at(0.0), y1="1", y2="15", class_="gauge-zero")]
    marks.append(tag("line", x1=at(figure.low), x2=at(figure.high), y1="8", y2="8", class_="range c-agent"))
    if market is not None:
        marks.append(tag("line", x1=at(market.value), x2=at(market.value), y1="3", y2="13", class_="gauge-market"))
    marks.append(tag("circle", cx=at(figure.value), cy="8", r="4", class_="dot c-agent"))
    return tag("svg", *marks, viewBox=f"0 0 {GAUGE:g} 16", class_="gauge", aria_hidden="true")


def in_words(evaluation: Evaluation, sentence: str) -> str:
    """A sentence of the verdict with the page's names of the accounts and true minus signs."""
    for name in sorted((track.name for track in evaluation.tracks), key=len, reverse=True):
        if name != plain(name):
            sentence = sentence.replace(name, title_of(name))
    return re.sub(r"(?<![\w.])-(?=\d)", MINUS, sentence)


def _reasons(reasons: list[str]) -> Html:
    items = join(*(tag("li", reason) for reason in reasons))
    return tag("div", tag("h2", "Why"), tag("ol", items), class_="why")
