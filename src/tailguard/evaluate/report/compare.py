"""Several evaluations side by side, under the conventions of the report."""

from collections.abc import Sequence

import numpy as np
import yaml

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Block, Section, Tabs
from tailguard.evaluate.report.downsample import keep
from tailguard.evaluate.report.figures import Axis, Chart, Color, Mark, Panel, Rows, figure_row, seconds
from tailguard.evaluate.report.formatting import capital, day, say, with_interval
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.markup import Html, table, tag
from tailguard.evaluate.report.page import page
from tailguard.evaluate.report.report import is_intraday
from tailguard.evaluate.report.sections.overview import MARKS, in_words
from tailguard.evaluate.report.series import LOG_FROM, TIME
from tailguard.validation import require

STATISTICS = ("sharpe", "cagr", "max_drawdown", "cvar_5", "turnover", "exposure")
DRAWN = ("sharpe", "cagr", "max_drawdown", "cvar_5")
COLORS: tuple[Color, ...] = ("agent", "market", "third", "fourth", "other")


def compare(evaluations: Sequence[Evaluation], names: Sequence[str] | None = None) -> str:
    """A page with several runs side by side.

    :param evaluations: at least 2; they may be about different data, which the page then says.
    :param names: what to call them, all different; None takes their titles, numbered where titles repeat.
    """
    names = _names(evaluations, names)
    sections = [
        _verdicts(evaluations, names),
        _equities(evaluations, names),
        _figures(evaluations, names),
        _settings(evaluations, names),
    ]
    top = tag(
        "header",
        tag("p", "Tailguard", tag("span", "comparison"), class_="masthead"),
        tag("h1", f"{len(evaluations)} runs side by side"),
        tag("p", _caution(evaluations), class_="standfirst"),
        class_="top",
        id="verdict",
    )
    intraday = any(is_intraday(one.agent.times) for one in evaluations)
    return page(f"Comparison of {len(evaluations)} runs", top, sections, {}, intraday=intraday)


def comparison_rows(evaluations: Sequence[Evaluation], names: Sequence[str] | None = None) -> list[dict[str, str]]:
    """The same for the terminal: one row per run, from headings to words.

    :param evaluations: at least 2.
    :param names: as for :func:`compare`.
    """
    rows = []
    for name, one in zip(_names(evaluations, names), evaluations, strict=True):
        figures = one.statistics[one.agent.name]
        known = {term(key).label: with_interval(figures[key], term(key).kind) for key in STATISTICS if key in figures}
        market = one.statistics[one.market]["sharpe"].value
        head = {
            "run": name,
            "data": one.source,
            "bars": f"{len(one.agent.times):,}",
            "verdict": in_words(one, one.verdict.headline),
        }
        rows.append(head | known | {"Market's Sharpe": say(market)})
    return rows


def _names(evaluations: Sequence[Evaluation], names: Sequence[str] | None) -> list[str]:
    require(len(evaluations) >= 2, "evaluations", len(evaluations), "at least 2 to compare")
    chosen = [one.title for one in evaluations] if names is None else list(names)
    require(len(chosen) == len(evaluations), "names", chosen, f"one for each of {len(evaluations)} evaluations")
    if names is None:
        return [name if chosen.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(chosen)]
    require(len(set(chosen)) == len(chosen), "names", chosen, "all different")
    return chosen


def _caution(evaluations: Sequence[Evaluation]) -> str:
    prints = {one.provenance.fingerprint for one in evaluations}
    spans = {(one.agent.times[0], one.agent.times[-1]) for one in evaluations}
    if len(prints) > 1:
        return "The runs saw different data: their figures can be read side by side, but not as a contest."
    if len(spans) > 1:
        return "The runs were tested on different stretches of the same data: a lead may come from the stretch."
    return "The runs were tested on the same bars. Choosing the best of them is one more trial; luck grows with every look."


def _verdicts(evaluations: Sequence[Evaluation], names: list[str]) -> Section:
    cards = [
        tag(
            "article",
            tag("p", name, class_="kicker"),
            tag("h3", f"{capital(in_words(one, one.verdict.headline))}."),
            tag("p", in_words(one, one.verdict.reasons[0]) if one.verdict.reasons else ""),
            tag("p", f"{one.source} · {day(one.agent.times[0])} to {day(one.agent.times[-1])}", class_="where"),
            class_=f"verdict {MARKS[one.verdict.outcome]}",
        )
        for name, one in zip(names, evaluations, strict=True)
    ]
    skilled = sum(one.verdict.outcome == "evidence of skill" for one in evaluations)
    headline = f"{skilled} of {len(evaluations)} runs show evidence of skill"
    return Section(
        "verdicts", "Verdicts", headline, "Each run with the first of its reasons.", [tag("div", *cards, class_="cards")]
    )


def _equities(evaluations: Sequence[Evaluation], names: list[str]) -> Section:
    marks = [_line(one, name, i) for i, (name, one) in enumerate(zip(names, evaluations, strict=True))]
    reach = np.concatenate([np.asarray(mark.columns["y"]) for mark in marks])
    wide = float(reach.max() / reach.min()) > LOG_FROM
    ends = ", ".join(f"{name} {say(one.agent.equity[-1])}" for name, one in zip(names, evaluations, strict=True))
    panel = Panel("Value of 1 invested", marks, TIME, Axis("multiple", "log" if wide else "linear", include=(1.0,)), 380)
    best = max(range(len(names)), key=lambda i: float(evaluations[i].agent.equity[-1]))
    title = f"{capital(names[best])} ends highest, at {say(evaluations[best].agent.equity[-1])}"
    chart = Chart("equities", title, f"1 invested became: {ends}.", [panel], "After all costs.", choose=True)
    return Section("equities", "Money", "What 1 invested became", "", [chart])


def _line(evaluation: Evaluation, name: str, i: int) -> Mark:
    values = evaluation.agent.equity[1:]
    at = keep(values)
    return Mark("line", seconds(evaluation.agent.times)[at], {"y": values[at]}, name, COLORS[min(i, len(COLORS) - 1)], True)


def _figures(evaluations: Sequence[Evaluation], names: list[str]) -> Section:
    panes: dict[str, list[Block]] = {}
    for key in DRAWN:
        words = term(key)
        figures = [one.statistics[one.agent.name][key] for one in evaluations]
        rows = [
            figure_row(name, figure, words.kind, COLORS[min(i, len(COLORS) - 1)], words.label)
            for i, (name, figure) in enumerate(zip(names, figures, strict=True))
        ]
        said = "; ".join(f"{row.name} {row.text}" for row in rows)
        panel = Rows(f"{words.label} with 95% intervals", rows, words.kind)
        panes[words.label] = [Chart(f"compare-{key}", f"{words.label} of the runs", f"{said}.", [panel], words.meaning)]
    panes["All figures"] = [_table(evaluations, names)]
    return Section(
        "figures",
        "Figures",
        "The same figures for every run",
        "Where bars overlap by much, the order may be luck.",
        [Tabs("figures-tabs", "Which figure", panes)],
    )


def _table(evaluations: Sequence[Evaluation], names: list[str]) -> Html:
    keys = list(dict.fromkeys(key for one in evaluations for key in one.statistics[one.agent.name]))
    rows = []
    for key in keys:
        cells = [one.statistics[one.agent.name].get(key) for one in evaluations]
        rows.append([term(key).label, *("none" if cell is None else with_interval(cell, term(key).kind) for cell in cells)])
    for key in ("sharpe", "cagr"):
        holding = [one.statistics[one.market][key] for one in evaluations]
        rows.append([f"The market: {term(key).label}", *(with_interval(figure, term(key).kind) for figure in holding)])
    return table(["agent's figure", *names], rows, "Every figure of every run, with 95% intervals in brackets.")


def _settings(evaluations: Sequence[Evaluation], names: list[str]) -> Section:
    facts = [
        ["Data", *(one.source for one in evaluations)],
        ["Fingerprint", *(one.provenance.fingerprint for one in evaluations)],
        ["Tested", *(f"{day(one.agent.times[0])} to {day(one.agent.times[-1])}" for one in evaluations)],
        ["Seeds", *(", ".join(map(str, one.provenance.seeds)) for one in evaluations)],
        ["Trials", *(f"{one.provenance.trials:,}" for one in evaluations)],
        ["Evaluated on", *(one.provenance.date for one in evaluations)],
    ]
    facts += _differing_lines(evaluations)
    caption = "What the runs were made from; below, the lines of the configurations that are not in all of them."
    block = table(["", *names], facts, caption, numbers_from=len(names) + 1)
    return Section("settings", "Provenance", "Where the runs differ", "", [block])


def _differing_lines(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """Settings that are not the same everywhere, by their indented path in the YAML."""
    trees = [_settings_of(one.provenance.config) for one in evaluations]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return [[key, *(tree.get(key, "none") for tree in trees)] for key in keys if len({tree.get(key) for tree in trees}) > 1]


def _settings_of(config: str) -> dict[str, str]:
    """From dotted keys to values."""
    found: dict[str, str] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        else:
            found[path] = str(value)

    walk(yaml.safe_load(config), "")
    return found
