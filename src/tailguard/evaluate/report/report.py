"""The HTML report of an evaluation."""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from tailguard.evaluate.record import Evaluation, metrics_text, without_folders
from tailguard.evaluate.report.formatting import capital, day, say, with_interval
from tailguard.evaluate.report.glossary import term
from tailguard.evaluate.report.page import Html, ReportSection, Tabs, join, page, table, tag
from tailguard.evaluate.report.sections.accounts import equity_section, positions_section, statistics_section
from tailguard.evaluate.report.sections.history import calendar_section, trades_csv, trades_section
from tailguard.evaluate.report.sections.overview import KEY_STATISTICS, overview, with_page_names
from tailguard.evaluate.report.sections.robustness import attack_section, costs_section
from tailguard.evaluate.report.sections.selection import selection_section
from tailguard.evaluate.report.sections.stability import folds_section, instruments_section, time_section
from tailguard.evaluate.report.sections.tail import tail_section
from tailguard.evaluate.report.sections.training_curves import population_section, training_section
from tailguard.evaluate.sanity import CASH
from tailguard.io.atomic import atomic


def write_report(evaluation: Evaluation, path: str | Path) -> Path:
    """Write the report of an evaluation.

    :param evaluation: the record.
    :param path: of the file, usually ``report.html``; folders are created, an older file is replaced.
    :return: the path.
    """
    return write_page(report_html(evaluation), path)


def report_html(evaluation: Evaluation) -> str:
    """Return the report as HTML."""
    evaluation = without_folders(evaluation)
    sections = [section for section in (make(evaluation) for make in SECTIONS) if section is not None]
    title = f"{evaluation.title}: {with_page_names(evaluation, evaluation.verdict.headline)}"
    return page(title, overview(evaluation), sections, _files(evaluation), intraday=is_intraday(evaluation.agent.times))


def summary_html(evaluation: Evaluation) -> str:
    """Return the verdict, its reasons and the key statistics as a piece of HTML, for notebooks."""
    verdict = evaluation.verdict
    estimates = evaluation.statistics[evaluation.agent.name]
    rows = [[term(key).label, with_interval(estimates[key], term(key).kind)] for key in KEY_STATISTICS if key in estimates]
    reasons = join(*(tag("li", with_page_names(evaluation, reason)) for reason in verdict.reasons))
    headline = f"{capital(with_page_names(evaluation, verdict.headline))}."
    return tag("div", tag("h3", headline), tag("ol", reasons), table(["statistic", "value"], rows, "Key statistics."))


def write_page(html: str, path: str | Path) -> Path:
    """Write a page atomically, so that nobody opens half of it.

    :param html: the whole page.
    :param path: of the file; folders are created.
    :return: the path.
    """
    with atomic(path) as file:
        file.write(html.encode())
    return Path(path)


def is_intraday(times: pd.DatetimeIndex) -> bool:
    """Return whether the time of day matters: some bar ends at another time of day than the first."""
    return bool(((times - times.normalize()) != (times[0] - times[0].normalize())).any())


def metrics_csv(evaluation: Evaluation) -> str:
    """Return every statistic of every account as CSV, one per line."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["track", "statistic", "value", "low", "high"])  # "track" is the name of the account
    for name, estimates in evaluation.statistics.items():
        writer.writerows(
            [name, key, *("" if number is None else repr(float(number)) for number in estimate)]
            for key, estimate in estimates.items()
        )
    return file.getvalue()


def _files(evaluation: Evaluation) -> dict[str, dict[str, str]]:
    files = {
        "json": {"name": "metrics.json", "type": "application/json", "text": metrics_text(evaluation)},
        "csv": {"name": "metrics.csv", "type": "text/csv", "text": metrics_csv(evaluation)},
        "config": {"name": "config.yaml", "type": "text/yaml", "text": evaluation.provenance.config},
    }
    if evaluation.trades is not None:
        files["trades"] = {"name": "trades.csv", "type": "text/csv", "text": trades_csv(evaluation.trades)}
    return files


def provenance_section(evaluation: Evaluation) -> ReportSection:
    """Show configuration, data, versions and seeds, and offer the downloads."""
    source = evaluation.provenance
    versions = [[name, version] for name, version in source.versions.items()]
    config = tag("pre", tag("code", source.config), tabindex=0, role="region", aria_label="Configuration")
    panes = Tabs(
        "provenance-tabs",
        "Details",
        {
            "Data and seeds": [_facts(evaluation)],
            "Configuration": [config],
            "Versions": [table(["package", "version"], versions, "Versions of the software.", 2)],
        },
    )
    lead = "The same data, configuration, versions and seeds give the same numbers."
    return ReportSection(
        "provenance", "Provenance", "How to reproduce these numbers", lead, [panes, _downloads(_files(evaluation))]
    )


def _facts(evaluation: Evaluation) -> Html:
    source, times = evaluation.provenance, evaluation.agent.times
    several = evaluation.prices.shape[1] > 1
    facts = {
        "Data": evaluation.source,
        "Fingerprint": source.fingerprint,
        "Test": f"{day(times[0])} to {day(times[-1])}, {len(times):,} bars, {say(evaluation.periods_per_year)} per year",
        "Assets": ", ".join(str(name) for name in evaluation.prices.columns) if several else "",
        "Training seeds": ", ".join(str(seed) for seed in source.seeds),
        "Trials": f"{source.trials:,} ({source.ledger or 'strategies that could have been chosen by looking at these bars'})",
        "Cash": _cash(evaluation),
        "Evaluated on": source.date,
    }
    facts = {name: fact for name, fact in facts.items() if fact}
    return tag("dl", join(*(join(tag("dt", name), tag("dd", value)) for name, value in facts.items())), class_="facts")


def _cash(evaluation: Evaluation) -> str:
    """Say what idle cash earned, which is taken out of every ratio."""
    riskless = evaluation.agent.riskless
    if not riskless.any():
        return "earns nothing"
    rate = float(np.log1p(riskless).mean()) * evaluation.periods_per_year
    return f"earns {say(math.expm1(rate), 'percent')} per year, which is taken out of every ratio and test"


def limits_section(evaluation: Evaluation) -> ReportSection | None:
    """Say which tests were left out because only returns are known; None where nothing was."""
    if evaluation.agent.traded:
        return None
    missing = [
        ("Timing", "Are the positions better than the same positions in shuffled order?", "weights and bars"),
        ("Costs", "What is left at higher costs, and one bar later?", "weights and bars"),
        ("Positions and trades", "What was held, and for how long?", "weights and bars"),
        ("Look-ahead", "Do decisions change when future bars are replaced?", "a function, with judge_strategy"),
    ]
    if evaluation.market == CASH:
        missing.insert(0, ("Alpha", "Is the return more than that of the market?", "a benchmark"))
    rows = [list(entry) for entry in missing]
    lead = "Returns alone do not show how they were made. These checks could not run."
    block = table(["check", "question", "needs"], rows, "Checks that were left out.", numbers_from=3)
    return ReportSection("limits", "Not tested", "What returns alone cannot show", lead, [block])


def _downloads(files: dict[str, dict[str, str]]) -> Html:
    """Return buttons for the files, which are inside the page: neither a network nor a second file is needed."""
    buttons = [tag("button", file["name"], type="button", class_="download", data_download=key) for key, file in files.items()]
    return tag("p", tag("span", "Download: "), *buttons, class_="downloads")


# The sections in their order; one that has nothing to show returns None. A new section is a function from the record.
SECTIONS: tuple[Callable[[Evaluation], ReportSection | None], ...] = (
    equity_section,
    statistics_section,
    limits_section,
    positions_section,
    trades_section,
    tail_section,
    time_section,
    calendar_section,
    costs_section,
    folds_section,
    instruments_section,
    attack_section,
    selection_section,
    population_section,
    training_section,
    provenance_section,
)
