"""Output to the terminal (tables, progress, messages), and the options that commands share."""

import csv
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import typer

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.progress import ProgressColumn

    from tailguard.market.rules import TradingRules

Item = TypeVar("Item")
# Wide enough for every table when nobody's terminal sets the width.
PIPE_WIDTH = 160
# Seconds between two lines about the progress where there is no terminal to draw a bar in.
LINE_SECONDS = 10.0
# Say what was understood about a file.
READING = (logging.getLogger("tailguard.market.data"), logging.getLogger("tailguard.evaluate.inputs"))


class Format(StrEnum):
    """Formats of a table."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def _set_quiet(quiet: bool) -> bool:
    if quiet:
        for logger in READING:
            logger.setLevel(logging.WARNING)
    return quiet


class Place(StrEnum):
    """Places where the parts of long work are done."""

    SERIAL = "serial"
    PROCESS = "process"
    RAY = "ray"


FormatOption = Annotated[Format, typer.Option("--format", "-f", help="Format of the result.")]
DataOption = Annotated[
    list[str] | None, typer.Option("--data", "-d", help="Shipped data set or file; a+b trades both as a portfolio.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, as `tailguard train` makes it.")]
AddressOption = Annotated[str | None, typer.Option(help="Address of a Ray cluster; by default one is started here.")]
ParallelOption = Annotated[int | None, typer.Option(min=1, help="Processes at the same time; by default one per core.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", callback=_set_quiet, help="Show no progress, only the result.")]


class Messages(logging.Handler):
    """Write warnings and what was understood about files to the error stream, each text once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Write what was logged about a file."""
        self.write(f"read {record.getMessage()}")

    def show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Write a warning, in place of :func:`warnings.showwarning`."""
        self.write(f"warning: {message}")

    def write(self, text: str) -> None:
        """Write a line, unless it was written before."""
        if text not in self._seen:
            self._seen.add(text)
            sys.stderr.write(f"{text}\n")

    def install(self) -> None:
        """Take over warnings and the log of files that are read."""
        warnings.showwarning = self.show_warning
        warnings.simplefilter("always", UserWarning)
        for logger in READING:
            logger.handlers, logger.propagate = [self], False
            logger.setLevel(logging.INFO)


def open_closed_streams() -> None:
    """Connect standard streams that were closed to nothing, as a service or ``2>&-`` closes them.

    Otherwise the first files that are opened would get their numbers, and whatever a library prints.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def console(stderr: bool = False) -> "Console":
    """Return the terminal; a pipe gets lines wide enough for every table."""
    from rich.console import Console

    terminal = Console(stderr=stderr)
    return terminal if terminal.is_terminal else Console(stderr=stderr, width=PIPE_WIDTH)


def say(text: str, stderr: bool = False, style: str | None = None) -> None:
    """Print a line as it stands; the terminal wraps it."""
    console(stderr).print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def show_progress(items: Sequence[Item], what: str, quiet: bool) -> Iterator[Item]:
    """Yield the items, and show how many are done."""
    with progress_bar(what, quiet) as report:
        for done, item in enumerate(items):
            report(done, len(items), what)
            yield item


@contextmanager
def progress_bar(what: str, quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function to call with what is done, how much there is in all, and a line about it.

    It draws a bar on a terminal, and writes a line from time to time where there is none.
    """
    terminal = console(stderr=True)
    if quiet or not terminal.is_terminal:
        yield _no_report if quiet else _Lines(what)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    shown: Progress
    with Progress(*columns, console=terminal, transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total, text: shown.update(task, completed=done, total=total, description=text)


@contextmanager
def status_line(what: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with a line about how things stand.

    It takes the place of the line before on a terminal, and is written from time to time where there is none.
    """
    terminal = console(stderr=True)
    if quiet or not terminal.is_terminal:
        lines = _Lines(what)
        yield (lambda _: None) if quiet else lines.write
        return
    with terminal.status(what) as shown:
        yield lambda text: shown.update(text)


def _no_report(done: int, total: int, text: str) -> None:
    """Report nothing."""


class _Lines:
    """Report progress in lines, not more than one every :data:`LINE_SECONDS`."""

    def __init__(self, what: str) -> None:
        self.what, self.began = what, time.monotonic()
        self.written = self.began

    def __call__(self, done: int, total: int, text: str) -> None:
        about = "" if text == self.what else f", {text}"
        self.write(f"{done / max(total, 1):.0%} after {time.monotonic() - self.began:.0f} s{about}")

    def write(self, text: str) -> None:
        """Write a line, unless one was written a moment ago."""
        now = time.monotonic()
        if now - self.written >= LINE_SECONDS:
            self.written = now
            sys.stderr.write(f"{self.what}: {text}\n")
            sys.stderr.flush()


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], output: Format) -> None:
    """Print a table for people, or CSV or JSON for programs."""
    if output is Format.JSON:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    elif output is Format.CSV:
        writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    else:
        print_table(title, list(rows[0]), [[str(value) for value in row.values()] for row in rows])


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> None:
    """Print a table; where the terminal is too narrow for it, a record per row instead.

    :param title: a line above it, if not empty.
    :param headings: of the columns.
    :param rows: text of the cells.
    :param numbers: align all columns but the first to the right.
    """
    from rich import box
    from rich.table import Table

    terminal = console()
    if title:
        say(title)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for k, heading in enumerate(headings):
        table.add_column(heading, justify="right" if numbers and k else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    unlimited = terminal.options.update(max_width=10 * PIPE_WIDTH)
    if terminal.measure(table, options=unlimited).maximum <= terminal.width:
        terminal.print(table)
        return
    label = max(len(heading) for heading in headings[1:])
    for first, *others in rows:
        say(first, style="bold")
        for heading, cell in zip(headings[1:], others, strict=True):
            terminal.print(f"  {heading:<{label}}  {cell}", highlight=False, markup=False)


def print_backtests(source: str, times: "pd.DatetimeIndex", rules: "TradingRules", rows: Sequence[Mapping[str, Any]]) -> None:
    """Print strategies side by side over the same bars."""
    title = (
        f"{source}: {len(times):,} bars, {times[0]:%Y-%m-%d} to {times[-1]:%Y-%m-%d}; "
        f"fee {rules.fee:.3%} per side, fill at {rules.fill.replace('_', ' ')}"
    )
    headings = ("strategy", "return", "per year", "vol.", "Sharpe", "max DD", "CVaR 5%", "turnover", "costs")
    cells = [
        (
            row["strategy"] + (" !" if row["ruined"] else ""),
            f"{row['total_return']:+.1%}",
            f"{row['cagr']:+.1%}" if abs(row["cagr"]) < 1e4 else f"{row['cagr']:+.1e}",
            f"{row['volatility']:.1%}",
            f"{row['sharpe']:.2f}",
            f"{row['max_drawdown']:.1%}",
            f"{row['cvar_5']:.2%}",
            f"{row['turnover']:.1f}x",
            f"{row['costs']:.1%}",
        )
        for row in rows
    ]
    print_table(title, headings, cells, numbers=True)
    if any(row["ruined"] for row in rows):
        say("! ruined: the account was liquidated")


def free_folder(kind: str, name: str) -> Path:
    """Return the first folder ``artifacts/KIND/NAME-N`` that does not exist; NAME is made of the names of the data."""
    from tailguard.market.data import source_parts

    short = "+".join(Path(part).name.split(".")[0] for part in source_parts(name))
    return next(path for n in count(1) if not (path := Path("artifacts") / kind / f"{short}-{n}").exists())
