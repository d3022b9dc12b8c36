"""Commands about market data, and about baselines that trade it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailguard.cli.settings import Settings, takes_settings
from tailguard.cli.terminal import (
    Format,
    FormatOption,
    QuietOption,
    print_backtests,
    print_rows,
    print_table,
    say,
    show_progress,
)
from tailguard.market.shipped import list_datasets

if TYPE_CHECKING:
    from tailguard.market.baselines import Strategy
    from tailguard.market.checks import Finding
    from tailguard.market.files import FileConfig

USER_ERROR = 2
# Named here, because help should not wait for the code of the baselines: a test holds them equal.
BASELINES = (
    *("buy_and_hold", "constant_mix", "equal_weight", "moving_average", "momentum", "volatility_target", "random_positions"),
)
SOURCE_HELP = "A shipped data set or a file."
data_app = typer.Typer(help="Look at market data: the shipped data sets and your own files.")


@data_app.command("list")
def data_list(output: FormatOption = Format.TABLE) -> None:
    """List the data sets that come with Tailguard."""
    print_rows("Shipped data", [asdict(info) for info in list_datasets()], output)


@data_app.command("describe")
@takes_settings(config=False)
def data_describe(source: Annotated[str, typer.Argument(help=SOURCE_HELP)], settings: Settings) -> None:
    """Show what a data set holds, and what to be careful about."""
    import pandas as pd

    from tailguard.market.bars import bars_of, periods_per_year, symbols_of
    from tailguard.market.data import load_source

    files = settings.files()
    bars = load_source(source, files)
    index = pd.DatetimeIndex(bars.index)
    say(f"{source}: {len(bars):,} bars from {index[0]} to {index[-1]}", style="bold")
    say(f"about {periods_per_year(index):,.0f} bars per year")
    for symbol in symbols_of(bars):
        statistics = bars_of(bars, symbol).describe()
        rows = [
            [str(name), *(f"{value:,.6g}" for value in row)]
            for name, row in zip(statistics.index, statistics.to_numpy(), strict=True)
        ]
        print_table(symbol, ["", *(str(column) for column in statistics.columns)], rows, numbers=True)
    for info in list_datasets():
        if info.name == source:
            say(f"{info.title}\nsource: {info.source}\nnote: {info.note}")
    _print_findings(_findings(source, files))


@data_app.command("plant")
def data_plant(
    output: Annotated[Path, typer.Argument(help="CSV file to write.")],
    family: Annotated[
        str,
        typer.Option(
            help="What predicts the next return: ar, lag, volume, reversion, drift, volatility, weekday, ending, none."
        ),
    ] = "ar",
    sharpe: Annotated[float, typer.Option(help="Annual Sharpe ratio of the oracle after costs; 0 has no edge.")] = 1.0,
    bars: Annotated[int, typer.Option(help="Number of daily bars.")] = 5000,
    fee: Annotated[float, typer.Option(help="Fee per side that the oracle pays.")] = 0.0005,
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another market.")] = 0,
) -> None:
    """Write a market with a planted edge, to see what an agent makes of it."""
    from tailguard.io.atomic import atomic
    from tailguard.market.planted import FAMILIES, planted_market

    single = [name for name in FAMILIES if name != "lead_lag"]  # the one family with two symbols
    known = next((name for name in single if name == family), None)
    if known is None:
        raise ValueError(f"--family {family}: must be one of {', '.join(single)}")
    market = planted_market(known, bars, sharpe=sharpe, fee=fee, seed=seed)
    with atomic(output) as file:
        file.write(market.bars.to_csv().encode())
    say(f"{output}: {bars:,} daily bars, family {family}, oracle's Sharpe ratio {sharpe:g} after a fee of {fee:.2%}")


@data_app.command("check")
@takes_settings(config=False)
def data_check(source: Annotated[str, typer.Argument(help=SOURCE_HELP)], settings: Settings) -> None:
    """Check a file bar by bar, and say what was understood about it; exit code 2 when it cannot be used."""
    findings = _findings(source, settings.files())
    _print_findings(findings)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(USER_ERROR)


@data_app.command("repair")
@takes_settings(config=False)
def data_repair(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file with bars that cannot be used.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A new file: .csv, .csv.gz or .parquet.")],
    settings: Settings,
) -> None:
    """Write a file without unreadable, impossible and repeated bars, and list every change; gaps are not filled."""
    from tailguard.market.repair import repair, write_bars

    repaired = repair(source, settings.files())
    write_bars(repaired.parts, output)
    say(f"read {source}: {repaired.understood}")
    for change in repaired.changes:
        say(f"  {change}")
    bars = sum(len(table) for table in repaired.parts.values())
    say(f"wrote {output}: {bars:,} bars, {len(repaired.changes)} change{'s' if len(repaired.changes) != 1 else ''}")


@takes_settings(argument=True)
def run_backtest(
    settings: Settings,
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="Shipped data set or file; a+b trades both as a portfolio.")
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help=f"all, or one of {', '.join(BASELINES)}; parameters as name:key=value,..."),
    ] = None,
    benchmark: Annotated[
        str | None, typer.Option("--benchmark", help="Shipped set or file to compare with, held without costs.")
    ] = None,
    output: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Trade baselines over whole series, all costs included, and print one table per series."""
    import pandas as pd

    from tailguard.evaluate.backtest import backtest, benchmark_row
    from tailguard.evaluate.backtest_window import BacktestWindow
    from tailguard.market.data import load_source

    tree = settings.load()
    sources = tuple(dict.fromkeys(data or tree.data))  # a data set that is named twice is run once
    if not sources:
        raise ValueError("no data: name a shipped set or a file with --data (`tailguard data list` shows the sets)")
    chosen = _strategies(strategies or tree.strategies or ("all",))
    tables = [(source, load_source(source, tree.files)) for source in sources]
    runs = [(source, bars, name, rule) for source, bars in tables for name, rule in chosen]
    rows = [
        {"data": source, **asdict(backtest(bars, name, rule, tree.trading))}
        for source, bars, name, rule in show_progress(runs, "backtests", quiet)
    ]
    benchmark = benchmark or tree.benchmark
    if benchmark is not None:
        held = load_source(benchmark, tree.files)
        rows += [
            {"data": source, **asdict(benchmark_row(BacktestWindow(bars, tree.trading, (0, len(bars))), benchmark, held))}
            for source, bars in tables
        ]
    if output is not Format.TABLE:
        print_rows("", rows, output)
        return
    for source, bars in tables:
        print_backtests(source, pd.DatetimeIndex(bars.index), tree.trading, [row for row in rows if row["data"] == source])


def _findings(source: str, files: "FileConfig") -> "list[Finding]":
    """Return the findings of the validator about each part of `source`, and say what was understood about it."""
    from tailguard.market.bars import DataError
    from tailguard.market.checks import Finding
    from tailguard.market.data import findings_of, load_dataset, logger, read_bars, source_parts

    shipped = {info.name for info in list_datasets()}
    findings = []
    for part in source_parts(source):
        try:
            reading = read_bars(load_dataset(part) if part in shipped and not Path(part).exists() else part, files)
        except DataError as error:
            findings.append(Finding("error", str(error)))
            continue
        logger.info("%s: %s", part, reading.summary())
        findings += [finding for table in reading.parts.values() for finding in findings_of(table, files)]
    return findings


def _strategies(specifications: Sequence[str]) -> "list[tuple[str, Strategy]]":
    """Parse ``name`` and ``name:key=value,...``; ``all`` is every baseline with its defaults."""
    from tailguard.market.baselines import strategy

    chosen: list[tuple[str, Strategy]] = []
    for text in specifications:
        name, _, rest = text.partition(":")
        if name == "all":
            chosen += [(known, strategy(known)) for known in BASELINES]
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


def _print_findings(findings: "Sequence[Finding]") -> None:
    if not any(finding.level != "note" for finding in findings):
        say("OK: the data is clean" if not findings else "OK: the data can be used")
    for finding in findings:
        say(f"{finding.level}: {finding}")
