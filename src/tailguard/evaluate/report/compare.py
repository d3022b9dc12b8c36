"""Comparison of several evaluations, as an HTML page and as rows for the terminal."""

from collections.abc import Sequence

import numpy as np

from tailguard.bounded_yaml import parse_yaml
from tailguard.evaluate.comparison import Comparison, compare_runs
from tailguard.evaluate.record import Evaluation, without_folders
from tailguard.evaluate.report.charts import (
    LOG_FROM,
    TIME,
    Axis,
    Chart,
    Color,
    Mark,
    Panel,
    RowPanel,
    downsample,
    estimate_row,
    seconds,
)
from tailguard.evaluate.report.formatting import capital, chance, day, say, with_interval
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.page import Block, Html, ReportSection, Tabs, page, table, tag
from tailguard.evaluate.report.report import is_intraday
from tailguard.evaluate.report.sections.overview import MARKS, with_page_names
from tailguard.validation import require

NOT_KNOWN = "not known"  # what returns alone do not tell
STATISTICS = ("sharpe", "cagr", "max_drawdown", "cvar_5", "turnover", "exposure")
DRAWN = ("sharpe", "cagr", "max_drawdown", "cvar_5")
SIZE = 0.05
COLORS: tuple[Color, ...] = ("agent", "market", "third", "fourth", "other")


def compare(evaluations: Sequence[Evaluation], names: Sequence[str] | None = None) -> str:
    """Return a page that compares several runs.

    :param evaluations: at least 2; if their data differ, the page says so.
    :param names: of the runs, all different; None takes their titles, numbered where titles repeat.
    """
    names = _names(evaluations, names)
    evaluations = [without_folders(evaluation) for evaluation in evaluations]
    comparison = compare_runs(evaluations, names)
    sections = [
        _verdicts(evaluations, names),
        _unranked() if comparison is None else _ranking(comparison),
        _equities(evaluations, names),
        _statistics(evaluations, names),
        _provenance(evaluations, names),
    ]
    top = tag(
        "header",
        tag("p", "Tailguard", tag("span", "comparison"), class_="masthead"),
        tag("h1", f"Comparison of {len(evaluations)} runs"),
        tag("p", _caution(evaluations), class_="standfirst"),
        class_="top",
        id="verdict",
    )
    intraday = any(is_intraday(evaluation.agent.times) for evaluation in evaluations)
    return page(f"Comparison of {len(evaluations)} runs", top, sections, {}, intraday=intraday)


def comparison_rows(evaluations: Sequence[Evaluation], names: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Return the comparison for the terminal: one row per run, text by heading.

    :param evaluations: at least 2.
    :param names: as for :func:`compare`.
    """
    rows = []
    for name, evaluation in zip(_names(evaluations, names), map(without_folders, evaluations), strict=True):
        estimates = evaluation.statistics[evaluation.agent.name]
        known = {
            term(key).label: with_interval(estimates[key], term(key).kind) if key in estimates else NOT_KNOWN
            for key in STATISTICS
        }
        market = evaluation.statistics[evaluation.market]["sharpe"].value
        head = {
            "run": name,
            "data": evaluation.source,
            "bars": f"{len(evaluation.agent.times):,}",
            "verdict": with_page_names(evaluation, evaluation.verdict.headline),
        }
        rows.append(head | known | {"Market's Sharpe ratio": say(market)})
    return rows


def _names(evaluations: Sequence[Evaluation], names: Sequence[str] | None) -> list[str]:
    require(len(evaluations) >= 2, "evaluations", len(evaluations), "at least 2 to compare")
    chosen = [evaluation.title for evaluation in evaluations] if names is None else list(names)
    require(len(chosen) == len(evaluations), "names", chosen, f"one for each of {len(evaluations)} evaluations")
    if names is None:
        return [name if chosen.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(chosen)]
    require(len(set(chosen)) == len(chosen), "names", chosen, "all different")
    return chosen


def _caution(evaluations: Sequence[Evaluation]) -> str:
    prints = {evaluation.provenance.fingerprint for evaluation in evaluations}
    spans = {(evaluation.agent.times[0], evaluation.agent.times[-1]) for evaluation in evaluations}
    if len(prints) > 1:
        return "The runs used different data, so a better number does not make a better strategy."
    if len(spans) > 1:
        return "The runs were tested on different periods of the same data, so a lead may come from the period."
    same = "The runs were tested on the same bars. Each run that you choose from counts as a trial: the more trials, the "
    return same + "better the best of them looks by luck."


def _verdicts(evaluations: Sequence[Evaluation], names: list[str]) -> ReportSection:
    cards = [
        tag(
            "article",
            tag("p", name, class_="kicker"),
            tag("h3", f"{capital(with_page_names(evaluation, evaluation.verdict.headline))}."),
            tag("p", with_page_names(evaluation, evaluation.verdict.reasons[0]) if evaluation.verdict.reasons else ""),
            tag(
                "p",
                f"{evaluation.source} · {day(evaluation.agent.times[0])} to {day(evaluation.agent.times[-1])}",
                class_="where",
            ),
            class_=f"verdict {MARKS[evaluation.verdict.outcome]}",
        )
        for name, evaluation in zip(names, evaluations, strict=True)
    ]
    skilled = sum(evaluation.verdict.outcome == "evidence of skill" for evaluation in evaluations)
    headline = f"{skilled} of {len(evaluations)} runs show evidence of skill"
    return ReportSection(
        "verdicts", "Verdicts", headline, "Each run with the first of its reasons.", [tag("div", *cards, class_="cards")]
    )


def comparison_sentences(comparison: Comparison) -> list[str]:
    """Return what the comparison allows to be said about the best run and about choosing it."""
    best, superior = comparison.ranking[0], comparison.superior
    count = f"{len(comparison.ranking)} runs" + (
        f" ({comparison.different} different ones)" if comparison.different < len(comparison.ranking) else ""
    )
    winners = [run.name for run in comparison.ranking if run.beats_market]
    found = f"the test over all of them names {', '.join(winners)}" if winners else "the test over all of them names none"
    market = "Some run beats its market" if superior.p_value < SIZE else "No run is shown to beat its market"
    share = say(best.best, "percent")
    lines = [
        f"{market}, given {count} (SPA, {chance(superior.p_value)}); {found} (StepM, 5%).",
        f"The run {best.name} has the highest Sharpe ratio, and is the best in {share} of the resamples.",
    ]
    if comparison.deflated is not None:
        passed = "above" if comparison.deflated > 1.0 - SIZE else "not above"
        deflated = f"its deflated Sharpe ratio is {comparison.deflated:.3f}, {passed} 0.95"
        lines.append(f"Chosen as the best of {comparison.trials:,} trials, {deflated}.")
    share = say(comparison.pbo, "percent")
    lines.append(f"The best run in one half of the bars is no better than the median in the other in {share} of splits (PBO).")
    return lines


def ranking_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Return the ranking with its own uncertainty: one row per run, text by heading."""
    return [
        {
            "run": run.name,
            "Sharpe ratio": f"{say(run.sharpe.estimate)} [{say(run.sharpe.low)} to {say(run.sharpe.high)}]",
            "best in": say(run.best, "percent"),
            "rank, 90% range": f"{run.low_rank} to {run.high_rank}",
            "beats its market": "yes" if run.beats_market else "not shown",
        }
        for run in comparison.ranking
    ]


def difference_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Return the paired differences with their intervals: one row per pair of runs, text by heading."""
    return [
        {
            "pair": f"{first} minus {second}",
            "difference in Sharpe ratio": f"{say(lead.estimate)} [{say(lead.low)} to {say(lead.high)}]",
            "two-sided": chance(min(2.0 * min(lead.p_higher, lead.p_lower), 1.0)),
        }
        for first, second, lead in comparison.differences
    ]


def _ranking(comparison: Comparison) -> ReportSection:
    rows, pairs = ranking_rows(comparison), difference_rows(comparison)
    span = f"{day(comparison.first)} to {day(comparison.last)}"
    lead = f"Over the {comparison.bars:,} bars that all runs share, {span}, resampled together."
    blocks: list[Block] = [
        tag("ul", *(tag("li", line) for line in comparison_sentences(comparison))),
        table(list(rows[0]), [list(row.values()) for row in rows], "The ranking, and how certain it is."),
        table(list(pairs[0]), [list(row.values()) for row in pairs], PAIRED),
    ]
    best = comparison.ranking[0]
    headline = f"The run {best.name} ranks first, in {say(best.best, 'percent')} of the resamples"
    return ReportSection("ranking", "Ranking", headline, lead, blocks)


PAIRED = "Paired differences with 95% intervals, pair by pair."
NOT_RANKED = "The runs share too few bars, or bars of different length: no test between them."


def _unranked() -> ReportSection:
    return ReportSection("ranking", "Ranking", "The runs are not ranked", NOT_RANKED, [])


def _test_span(evaluation: Evaluation) -> str:
    return f"{day(evaluation.agent.times[0])} to {day(evaluation.agent.times[-1])}"


def _equities(evaluations: Sequence[Evaluation], names: list[str]) -> ReportSection:
    marks = [_equity_line(evaluation, name, i) for i, (name, evaluation) in enumerate(zip(names, evaluations, strict=True))]
    reach = np.concatenate([np.asarray(mark.columns["y"]) for mark in marks])
    wide = float(reach.max() / reach.min()) > LOG_FROM
    ends = ", ".join(f"{name} {say(evaluation.agent.equity[-1])}" for name, evaluation in zip(names, evaluations, strict=True))
    panel = Panel("Value of 1 invested", marks, TIME, Axis("multiple", "log" if wide else "linear", include=(1.0,)), 380)
    best = max(range(len(names)), key=lambda i: float(evaluations[i].agent.equity[-1]))
    title = f"The run {names[best]} ends highest, at {say(evaluations[best].agent.equity[-1])}"
    chart = Chart("equities", title, f"1 invested became: {ends}.", [panel], "After all costs.", choose=True)
    return ReportSection("equities", "Equity", "Value of 1 invested", "", [chart])


def _equity_line(evaluation: Evaluation, name: str, i: int) -> Mark:
    values = evaluation.agent.equity[1:]
    at = downsample(values)
    return Mark("line", seconds(evaluation.agent.times)[at], {"y": values[at]}, name, COLORS[min(i, len(COLORS) - 1)], True)


def _statistics(evaluations: Sequence[Evaluation], names: list[str]) -> ReportSection:
    panes: dict[str, list[Block]] = {}
    for key in DRAWN:
        words = term(key)
        estimates = [evaluation.statistics[evaluation.agent.name][key] for evaluation in evaluations]
        rows = [
            estimate_row(name, estimate, words.kind, COLORS[min(i, len(COLORS) - 1)], words.label)
            for i, (name, estimate) in enumerate(zip(names, estimates, strict=True))
        ]
        summary = "; ".join(f"{row.name} {row.text}" for row in rows)
        panel = RowPanel(f"{words.label} with 95% intervals", rows, words.kind)
        panes[words.label] = [Chart(f"compare-{key}", f"{words.label} of the runs", f"{summary}.", [panel], words.meaning)]
    panes["All statistics"] = [_statistics_table(evaluations, names)]
    return ReportSection(
        "figures",
        "Statistics",
        "Statistics of every run",
        "Bars are 95% confidence intervals. Where they overlap widely, the order of the runs may be luck.",
        [Tabs("figures-tabs", "Statistic", panes)],
    )


def _statistics_table(evaluations: Sequence[Evaluation], names: list[str]) -> Html:
    keys = list(dict.fromkeys(key for evaluation in evaluations for key in evaluation.statistics[evaluation.agent.name]))
    rows = []
    for key in keys:
        cells = [evaluation.statistics[evaluation.agent.name].get(key) for evaluation in evaluations]
        rows.append([term(key).label, *("none" if cell is None else with_interval(cell, term(key).kind) for cell in cells)])
    for key in ("sharpe", "cagr"):
        holding = [evaluation.statistics[evaluation.market][key] for evaluation in evaluations]
        rows.append([f"Market: {term(key).label}", *(with_interval(estimate, term(key).kind) for estimate in holding)])
    return table(["statistic", *names], rows, "All statistics of every run, with 95% intervals in brackets.")


def _provenance(evaluations: Sequence[Evaluation], names: list[str]) -> ReportSection:
    facts = [
        ["Data", *(evaluation.source for evaluation in evaluations)],
        ["Fingerprint", *(evaluation.provenance.fingerprint for evaluation in evaluations)],
        ["Test", *map(_test_span, evaluations)],
        ["Seeds", *(", ".join(map(str, evaluation.provenance.seeds)) for evaluation in evaluations)],
        ["Trials", *(f"{evaluation.provenance.trials:,}" for evaluation in evaluations)],
        ["Evaluated on", *(evaluation.provenance.date for evaluation in evaluations)],
    ]
    facts += _differing_settings(evaluations)
    caption = "Origin of the runs, and the settings in which they differ."
    block = table(["", *names], facts, caption, numbers_from=len(names) + 1)
    return ReportSection("settings", "Provenance", "Differences between the runs", "", [block])


def _differing_settings(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """Return the settings that differ between the runs, by their dotted path in the YAML."""
    trees = [_settings_of(evaluation.provenance.config) for evaluation in evaluations]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return [[key, *(tree.get(key, "none") for tree in trees)] for key in keys if len({tree.get(key) for tree in trees}) > 1]


def _settings_of(config: str) -> dict[str, str]:
    """Return the settings of a YAML text by dotted path."""
    settings: dict[str, str] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        else:
            settings[path] = str(value)

    walk(parse_yaml(config), "")
    return settings
