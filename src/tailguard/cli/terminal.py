"""How results reach the terminal: tables, progress, and the options that commands share."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pandas as pd
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from tailguard.config import Config

Job = TypeVar("Job")
# Wide enough for every table when nobody's terminal sets the width.
PIPE_WIDTH = 160


class Format(StrEnum):
    """How tables are printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; see `tailguard config`.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, e.g. trading.fee=0.0005.")]
FormatOption = Annotated[Format, typer.Option("--format", "-f", help="How to print the result.")]
DataOption = Annotated[str | None, typer.Option("--data", "-d", help="Shipped set or file; a+b is a portfolio.")]
ConfigArgument = Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file; see `tailguard config`.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]


def console(stderr: bool = False) -> Console:
    """The terminal; a pipe gets lines wide enough for every table."""
    terminal = Console(stderr=stderr)
    return terminal if terminal.is_terminal else Console(stderr=stderr, width=PIPE_WIDTH)


def progress(jobs: Sequence[Job], what: str, quiet: bool) -> Iterator[Job]:
    """Yield the jobs; show a bar on the terminal's error stream unless it is a pipe or `quiet`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with _bar(columns, quiet) as shown:
        yield from shown.track(jobs, description=what)


@contextmanager
def progress_of(what: str, quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A function to call with what is done, how much there is, and a line about it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with _bar(columns, quiet) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total, text: shown.update(task, completed=done, total=total, description=text)


def _bar(columns: Sequence[ProgressColumn], quiet: bool) -> Progress:
    terminal = console(stderr=True)
    return Progress(*columns, console=terminal, transient=True, disable=quiet or not terminal.is_terminal)


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], output: Format) -> None:
    """A table for people, or CSV or JSON for programs."""
    if output is Format.JSON:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    elif output is Format.CSV:
        writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    else:
        table = Table(title=title, title_justify="left")
        for column in rows[0]:
            table.add_column(column)
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        console().print(table)


def backtest_table(source: str, bars: pd.DataFrame, config: Config, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Strategies side by side over the same bars."""
    trading, index = config.trading, pd.DatetimeIndex(bars.index)
    title = (
        f"{source}: {len(bars):,} bars, {index[0]:%Y-%m-%d} to {index[-1]:%Y-%m-%d}; "
        f"fee {trading.fee:.3%} per side, fill at {trading.fill.replace('_', ' ')}"
    )
    table = Table(title=title, title_justify="left")
    headings = ("strategy", "return", "per year", "volatility", "Sharpe", "max drawdown", "CVaR 5 %/bar", "turnover/y", "costs")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for row in rows:
        table.add_row(
            row["strategy"] + (" (ruined)" if row["ruined"] else ""),
            f"{row['total_return']:+.1%}",
            f"{row['cagr']:+.1%}",
            f"{row['volatility']:.1%}",
            f"{row['sharpe']:.2f}",
            f"{row['max_drawdown']:.1%}",
            f"{row['cvar_5']:.2%}",
            f"{row['turnover']:.1f}x",
            f"{row['costs']:.1%}",
        )
    return table


def free_folder(kind: str, name: str) -> Path:
    """The first folder ``artifacts/KIND/NAME-N`` that does not exist; NAME is data, of which file names count."""
    short = "+".join(Path(part).name.split(".")[0] for part in name.split("+"))
    return next(path for n in count(1) if not (path := Path("artifacts") / kind / f"{short}-{n}").exists())


def one_source(data: str | None, config: Config) -> str:
    """The one series that a command is about: what was named, or the only one of the configuration."""
    named = (data,) if data is not None else config.data
    if len(named) != 1:
        what = "no data" if not named else f"{len(named)} data sets"
        raise ValueError(f"{what}: name a shipped set or a file with --data (a+b is a portfolio), or one in the configuration")
    return named[0]
