"""Commands about market data, and about baselines that trade it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from rich.console import Console

from tailguard.cli.terminal import (
    ConfigOption,
    Format,
    FormatOption,
    QuietOption,
    SetOption,
    backtest_table,
    console,
    print_rows,
    show_progress,
)
from tailguard.config import load_config
from tailguard.evaluate.backtest import backtest
from tailguard.market.baselines import STRATEGIES, Strategy, strategy
from tailguard.market.data import Finding, check_source, list_datasets, load_dataset, load_source, periods_per_year

USER_ERROR = 2
data_app = typer.Typer(help="Look at market data: the shipped data sets and your own files.")


@data_app.command("list")
def data_list(output: FormatOption = Format.TABLE) -> None:
    """List the data sets that come with Tailguard."""
    rows = [asdict(info) for info in list_datasets()]
    print_rows("Shipped data", rows, output)


@data_app.command("describe")
def data_describe(source: Annotated[str, typer.Argument(help="A shipped data set or a file.")]) -> None:
    """Show what a data set holds, and what to be careful about."""
    bars = load_source(source)
    index = pd.DatetimeIndex(bars.index)
    terminal = console()
    terminal.print(f"[bold]{source}[/bold]: {len(bars):,} bars from {index[0]} to {index[-1]}", highlight=False)
    terminal.print(f"about {periods_per_year(index):,.0f} bars per year", highlight=False)
    terminal.print(bars.describe().to_string(float_format=lambda value: f"{value:,.6g}"), highlight=False, soft_wrap=True)
    for info in list_datasets():
        if info.name == source:
            terminal.print(f"{info.title}\nsource: {info.source}\nnote: {info.note}", highlight=False, soft_wrap=True)
    _print_findings(_findings(source), terminal)


@data_app.command("check")
def data_check(source: Annotated[str, typer.Argument(help="A shipped data set or a file.")]) -> None:
    """Check a file bar by bar; exit code 2 when it cannot be used."""
    findings = _findings(source)
    _print_findings(findings, console())
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(USER_ERROR)


def run_backtest(
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="Shipped data set or file; a+b trades both as a portfolio.")
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help=f"all, or one of {', '.join(STRATEGIES)}; parameters as name:key=value,..."),
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    output: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Trade baselines over whole series, all costs included, and print one table per series."""
    tree = load_config(config, settings or [])
    sources = tuple(dict.fromkeys(data or tree.data))  # a data set that is named twice is run once
    if not sources:
        raise ValueError("no data: name a shipped set or a file with --data (`tailguard data list` shows the sets)")
    chosen = _strategies(strategies or tree.strategies or ("all",))
    tables = [(source, load_source(source)) for source in sources]
    runs = [(source, bars, name, rule) for source, bars in tables for name, rule in chosen]
    rows = [
        {"data": source, **asdict(backtest(bars, name, rule, tree.trading))}
        for source, bars, name, rule in show_progress(runs, "backtests", quiet)
    ]
    if output is not Format.TABLE:
        print_rows("", rows, output)
        return
    for source, bars in tables:
        traded = [row for row in rows if row["data"] == source]
        console().print(backtest_table(source, pd.DatetimeIndex(bars.index), tree.trading, traded))
        console().print()


def _findings(source: str) -> list[Finding]:
    """Return the findings of the validator about each part of `source`."""
    shipped = {info.name for info in list_datasets()}
    return [
        finding for part in source.split("+") for finding in check_source(load_dataset(part) if part in shipped else Path(part))
    ]


def _strategies(specifications: Sequence[str]) -> list[tuple[str, Strategy]]:
    """Parse ``name`` and ``name:key=value,...``; ``all`` is every baseline with its defaults."""
    chosen: list[tuple[str, Strategy]] = []
    for text in specifications:
        name, _, rest = text.partition(":")
        if name == "all":
            chosen += [(known, strategy(known)) for known in STRATEGIES]
            continue
        parameters: dict[str, float] = {}
        for assignment in filter(None, rest.split(",")):
            key, _, value = assignment.partition("=")
            try:
                parameters[key.strip()] = int(value) if value.strip().lstrip("-").isdigit() else float(value)
            except ValueError:
                raise ValueError(f"strategy {text!r}: {assignment!r} must look like key=number") from None
        chosen.append((text, strategy(name, **parameters)))
    return chosen


def _print_findings(findings: Sequence[Finding], terminal: Console) -> None:
    if not findings:
        terminal.print("no findings: the data is clean", highlight=False)
    for finding in findings:
        terminal.print(f"{finding.level}: {finding}", highlight=False, markup=False, soft_wrap=True)
