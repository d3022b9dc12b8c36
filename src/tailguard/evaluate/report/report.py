"""From the record of an evaluation to a page that answers: does it work, and why do we say so?"""

import csv
import io
from pathlib import Path

import pandas as pd

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.record_files import metrics_text
from tailguard.evaluate.report.page import page
from tailguard.evaluate.report.sections.attack import attack
from tailguard.evaluate.report.sections.comparison import comparison
from tailguard.evaluate.report.sections.costs import costs
from tailguard.evaluate.report.sections.folds import folds
from tailguard.evaluate.report.sections.money import money
from tailguard.evaluate.report.sections.overview import in_words, overview
from tailguard.evaluate.report.sections.population import population
from tailguard.evaluate.report.sections.position import position
from tailguard.evaluate.report.sections.provenance import provenance
from tailguard.evaluate.report.sections.tail import tail
from tailguard.evaluate.report.sections.time import steadiness
from tailguard.evaluate.report.sections.training import training
from tailguard.io.atomic import atomic

SECTIONS = (money, comparison, position, tail, steadiness, costs, folds, attack, population, training, provenance)


def write_report(evaluation: Evaluation, path: str | Path) -> Path:
    """Write the report of an evaluation.

    :param evaluation: the record.
    :param path: of the file, usually ``report.html``; folders are made, an older file is replaced as a whole.
    :return: the path.
    """
    return write_page(report(evaluation), path)


def report(evaluation: Evaluation) -> str:
    """The report as HTML."""
    sections = [section for section in (make(evaluation) for make in SECTIONS) if section is not None]
    title = f"{evaluation.title}: {in_words(evaluation, evaluation.verdict.headline)}"
    return page(title, overview(evaluation), sections, _files(evaluation), intraday=is_intraday(evaluation.agent.times))


def write_page(html: str, path: str | Path) -> Path:
    """Write a page, whole or not at all, so that nobody opens half of it.

    :param html: all of it.
    :param path: of the file; folders are made.
    :return: the same path.
    """
    with atomic(path) as file:
        file.write(html.encode())
    return Path(path)


def is_intraday(times: pd.DatetimeIndex) -> bool:
    """Whether the clock matters: some bar does not end when the first one does."""
    return bool(((times - times.normalize()) != (times[0] - times[0].normalize())).any())


def metrics_csv(evaluation: Evaluation) -> str:
    """Every statistic of every account, one per line."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["track", "statistic", "value", "low", "high"])
    for name, figures in evaluation.statistics.items():
        writer.writerows(
            [name, key, *("" if number is None else repr(float(number)) for number in figure)]
            for key, figure in figures.items()
        )
    return file.getvalue()


def _files(evaluation: Evaluation) -> dict[str, dict[str, str]]:
    return {
        "json": {"name": "metrics.json", "type": "application/json", "text": metrics_text(evaluation)},
        "csv": {"name": "metrics.csv", "type": "text/csv", "text": metrics_csv(evaluation)},
        "config": {"name": "config.yaml", "type": "text/yaml", "text": evaluation.provenance.config},
    }
