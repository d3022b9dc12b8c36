"""Output to the terminal (tables, progress), and the options that commands share."""

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
from tailguard.market.rules import TradingRules

Item = TypeVar("Item")
# Wide enough for every table when nobody's terminal sets the width.
PIPE_WIDTH = 160


class Format(StrEnum):
    """Formats of a table."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file with settings; `tailguard init` writes one.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. trading.fee=0.0005.")
]
FormatOption = Annotated[Format, typer.Option("--format", "-f", help="Format of the result.")]
DataOption = Annotated[
    str | None, typer.Option("--data", "-d", help="Shipped data set or file; a+b trades both as a portfolio.")
]
ConfigArgument = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="YAML file with settings; `tailguard init` writes one.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, as `tailguard train` makes it.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only the result.")]


def console(stderr: bool = False) -> Console:
    """Return the terminal; a pipe gets lines wide enough for every table."""
    terminal = Console(stderr=stderr)
    return terminal if terminal.is_terminal else Console(stderr=stderr, width=PIPE_WIDTH)


def show_progress(items: Sequence[Item], what: str, quiet: bool) -> Iterator[Item]:
    """Yield the items; show a bar on the terminal's error stream unless it is a pipe or `quiet`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with _bar(columns, quiet) as shown:
        yield from shown.track(items, description=what)


@contextmanager
def progress_bar(what: str, quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function to call with what is done, how much there is in all, and a line about it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with _bar(columns, quiet) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total, text: shown.update(task, completed=done, total=total, description=text)


def _bar(columns: Sequence[ProgressColumn], quiet: bool) -> Progress:
    terminal = console(stderr=True)
    return Progress(*columns, console=terminal, transient=True, disable=quiet or not terminal.is_terminal)


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], output: Format) -> None:
    """Print a table for people, or CSV or JSON for programs."""
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


def backtest_table(source: str, times: pd.DatetimeIndex, rules: TradingRules, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of strategies side by side over the same bars."""
    title = (
        f"{source}: {len(times):,} bars, {times[0]:%Y-%m-%d} to {times[-1]:%Y-%m-%d}; "
        f"fee {rules.fee:.3%} per side, fill at {rules.fill.replace('_', ' ')}"
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
    """Return the first folder ``artifacts/KIND/NAME-N`` that does not exist; NAME is made of the names of the data."""
    short = "+".join(Path(part).name.split(".")[0] for part in name.split("+"))
    return next(path for n in count(1) if not (path := Path("artifacts") / kind / f"{short}-{n}").exists())


def single_source(data: str | None, config: Config) -> str:
    """Return the one series that a command is about: what was named, or the only one of the configuration."""
    named = (data,) if data is not None else config.data
    if len(named) != 1:
        what = "no data" if not named else f"{len(named)} data sets"
        raise ValueError(
            f"{what}: name a shipped set or a file with --data (a+b is a portfolio), or set data in the configuration"
        )
    return named[0]
