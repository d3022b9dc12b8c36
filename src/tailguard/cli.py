"""The command line: parse, call, print. Mistakes of the user end with one line and exit code 2."""

import csv
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import pandas as pd
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tailguard import __version__
from tailguard.config import Config, dump_config, load_config
from tailguard.evaluate.backtest import backtest
from tailguard.interruption import Interrupted
from tailguard.market.baselines import STRATEGIES, Strategy, strategy
from tailguard.market.data import (
    DataWarning,
    Finding,
    check_source,
    list_datasets,
    load_dataset,
    load_source,
    periods_per_year,
)

if TYPE_CHECKING:
    from tailguard.run import Run

Job = TypeVar("Job")

USER_ERROR, INTERRUPTED = 2, 130
# Wide enough for every table when nobody's terminal sets the width.
PIPE_WIDTH = 160

app = typer.Typer(add_completion=False, help="Trading agents that know their own tail risk.")
data_app = typer.Typer(help="Look at market data: shipped sets and your own files.")
app.add_typer(data_app, name="data")


class Format(StrEnum):
    """How tables are printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


class ExportFormat(StrEnum):
    """What an agent is exported as."""

    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"


ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; see `tailguard config`.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, e.g. trading.fee=0.0005.")]
FormatOption = Annotated[Format, typer.Option("--format", "-f", help="How to print the result.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]


@data_app.command("list")
def data_list(output: FormatOption = Format.TABLE) -> None:
    """List the data sets that come with Tailguard."""
    rows = [asdict(info) for info in list_datasets()]
    _print_rows("Shipped data", rows, output)


@data_app.command("describe")
def data_describe(source: Annotated[str, typer.Argument(help="A shipped set or a file.")]) -> None:
    """Show what a data set holds, and what to be careful about."""
    bars = load_source(source)
    index = pd.DatetimeIndex(bars.index)
    console = _console()
    console.print(f"[bold]{source}[/bold]: {len(bars):,} bars from {index[0]} to {index[-1]}", highlight=False)
    console.print(f"about {periods_per_year(index):,.0f} bars per year", highlight=False)
    console.print(bars.describe().to_string(float_format=lambda value: f"{value:,.6g}"), highlight=False, soft_wrap=True)
    for info in list_datasets():
        if info.name == source:
            console.print(f"{info.title}\nsource: {info.source}\nnote: {info.note}", highlight=False, soft_wrap=True)
    _print_findings(_findings(source), console)


@data_app.command("check")
def data_check(source: Annotated[str, typer.Argument(help="A shipped set or a file.")]) -> None:
    """Check a file bar by bar; exit code 2 when it cannot be used."""
    findings = _findings(source)
    _print_findings(findings, _console())
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(USER_ERROR)


@app.command("backtest")
def run_backtest(
    data: Annotated[list[str] | None, typer.Option("--data", "-d", help="Shipped set or file; a+b is a portfolio.")] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help=f"all, or one of {', '.join(STRATEGIES)}; parameters as name:key=value,..."),
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    output: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Trade baselines over whole series, every cost included, and print one table per series."""
    tree = load_config(config, settings or [])
    sources = tuple(dict.fromkeys(data or tree.data))  # a set named twice is run once
    if not sources:
        raise ValueError("no data: name a shipped set or a file with --data (`tailguard data list` shows the sets)")
    chosen = _strategies(strategies or tree.strategies or ("all",))
    tables = [(source, load_source(source)) for source in sources]
    jobs = [(source, bars, name, one) for source, bars in tables for name, one in chosen]
    rows = [
        {"data": source, **asdict(backtest(bars, name, one, tree.trading))}
        for source, bars, name, one in _progress(jobs, "backtests", quiet)
    ]
    if output is not Format.TABLE:
        _print_rows("", rows, output)
        return
    for source, bars in tables:
        _console().print(_backtest_table(source, bars, tree, [row for row in rows if row["data"] == source]))
        _console().print()


@app.command("train")
def run_train(
    data: Annotated[str, typer.Option("--data", "-d", help="Shipped set or file; a+b is a portfolio.")],
    folder: Annotated[Path | None, typer.Option("--run", "-r", help="Folder of the run; by default a new one.")] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    output: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Train an agent on the first part of a series and compare it with the baselines on the rest, which it has never seen."""
    from tailguard.run import Run  # PyTorch is loaded only when it is needed
    from tailguard.training import default_split, prepare_market

    tree = load_config(config, settings or [])
    bars = load_source(data)
    market = prepare_market(bars, tree, default_split(len(bars), tree.training))
    _train(Run.create(folder or _free_folder(data), tree, data, market), output, quiet)


@app.command("resume")
def run_resume(run: RunArgument, output: FormatOption = Format.TABLE, quiet: QuietOption = False) -> None:
    """Go on with a training that was stopped or killed, as if nothing had happened."""
    from tailguard.run import Run

    _train(Run.open(run), output, quiet)


def _train(run: "Run", output: Format, quiet: bool) -> None:
    """Train a run to its end and show its agent beside the baselines."""
    from tailguard.run import train
    from tailguard.training import test

    console = _console(stderr=True)
    console.print(f"run: {run.path}", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("training", total=run.config.training.steps)
        model = train(run, lambda done, text: progress.update(task, completed=done, description=text))
    market = run.market()
    dictionaries = [{"data": run.info["data"], **asdict(row)} for row in test(model, market, run.config)]
    if output is not Format.TABLE:
        _print_rows("", dictionaries, output)
        return
    console = _console()
    unseen = market.bars.iloc[slice(*market.split.test)]
    console.print(_backtest_table(f"{run.info['data']} (unseen part)", unseen, run.config, dictionaries))
    console.print(
        "One split, one seed: this shows that the machinery works, not that the agent has skill.", style="dim", highlight=False
    )


@app.command("export")
def run_export(
    run: RunArgument,
    form: Annotated[ExportFormat, typer.Option("--format", "-f", help="What to write.")] = ExportFormat.ONNX,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; by default RUN/agent.")] = None,
) -> None:
    """Write an agent as a graph that other programs run: features and account in, target position and memory out."""
    from tailguard.export import export
    from tailguard.run import Run

    opened = Run.open(run)
    model, scaler = opened.trained_model(), opened.scaler
    path = export(model.policy, output or opened.path / "agent", form.value, scaler, scaler.names)
    _console().print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command("act")
def run_act(
    run: RunArgument,
    bars: Annotated[Path | None, typer.Option("--bars", "-b", help="File with bars; by default stdin.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more bars at the end of the file.")] = False,
    since: Annotated[str | None, typer.Option("--since", help="Print decisions from this time on only.")] = None,
) -> None:
    """Read bars (CSV or JSON lines), print what to hold after each: one JSON object per line."""
    from tailguard.acting import Trader
    from tailguard.bar_stream import bar_chunks
    from tailguard.market.data import symbols_of
    from tailguard.run import Run

    opened = Run.open(run)
    trader = Trader(opened.trained_model(), opened.scaler, opened.config.features, opened.config.trading)
    first = pd.Timestamp.min if since is None else pd.Timestamp(since)
    with sys.stdin if bars is None else bars.open(encoding="utf-8") as stream:
        for chunk in bar_chunks(stream, follow):
            for decision in trader.add(chunk):
                if decision.time >= first:
                    names = [symbol or "weight" for symbol in symbols_of(chunk)]
                    weights = dict(zip(names, decision.weights.tolist(), strict=True))
                    line = {"time": decision.time.isoformat(), **weights, "equity": decision.equity}
                    sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            if trader.ruined:
                raise ValueError("the agent's paper account was liquidated: it has nothing left to trade with")


def _free_folder(data: str) -> Path:
    """The first folder ``artifacts/runs/NAME-N`` that does not exist."""
    name = "+".join(Path(part).name.split(".")[0] for part in data.split("+"))
    return next(path for n in count(1) if not (path := Path("artifacts/runs") / f"{name}-{n}").exists())


@app.command("config")
def show_config(config: ConfigOption = None, settings: SetOption = None) -> None:
    """Print the whole configuration as YAML: the defaults, your file, your overrides."""
    sys.stdout.write(dump_config(load_config(config, settings or [])))


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"tailguard {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Trading agents that know their own tail risk."""


def _findings(source: str) -> list[Finding]:
    """What the validator says about each part of `source`."""
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


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PIPE_WIDTH)


def _progress(jobs: Sequence[Job], what: str, quiet: bool) -> Iterator[Job]:
    """Yield the jobs; show a bar on the terminal's error stream unless it is a pipe or `quiet`."""
    console = _console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        yield from progress.track(jobs, description=what)


def _print_rows(title: str, rows: Sequence[Mapping[str, Any]], output: Format) -> None:
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
        _console().print(table)


def _backtest_table(source: str, bars: pd.DataFrame, config: Config, rows: Sequence[Mapping[str, Any]]) -> Table:
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


def _print_findings(findings: Sequence[Finding], console: Console) -> None:
    if not findings:
        console.print("no findings: the data is clean", highlight=False)
    for finding in findings:
        console.print(f"{finding.level}: {finding}", highlight=False, markup=False, soft_wrap=True)


def _one_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    return f"warning: {message}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; the user's mistakes become one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    warnings.formatwarning = _one_line
    warnings.simplefilter("always", DataWarning)
    try:
        code = app(arguments or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        _fail(f"{error.format_message()} (--help shows what is possible)")
    except (ValueError, OSError) as error:
        _fail(str(error))
    except Interrupted as stopped:
        sys.stderr.write(f"{stopped}\n")
        sys.exit(INTERRUPTED)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(USER_ERROR)
