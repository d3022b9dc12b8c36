"""Commands about one agent: train it, resume its training, export it, let it trade."""

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from tailguard.cli.settings import Settings, single_source, takes_settings
from tailguard.cli.terminal import (
    AddressOption,
    DataOption,
    Format,
    FormatOption,
    ParallelOption,
    Place,
    QuietOption,
    RunArgument,
    console,
    free_folder,
    print_backtests,
    print_rows,
    progress_bar,
    say,
    status_line,
)

if TYPE_CHECKING:
    import pandas as pd

    from tailguard.experiments.engines import Engine
    from tailguard.experiments.paper import PaperTrading, Status
    from tailguard.experiments.run import Run
    from tailguard.experiments.tail_check import TailCheck
    from tailguard.market.files import FileConfig

EngineOption = Annotated[
    Place, typer.Option(help="Train what is compared in this process, in processes here, or on a Ray cluster.")
]
BARS_HELP = "File with bars (a+b is a portfolio), or - for standard input."


class ExportFormat(StrEnum):
    """Formats of an exported agent."""

    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"


@takes_settings(argument=True)
def run_train(
    settings: Settings,
    data: DataOption = None,
    folder: Annotated[
        Path | None, typer.Option("--run", "-r", help="New folder for the run; by default artifacts/runs/DATA-N.")
    ] = None,
    engine: EngineOption = Place.SERIAL,
    address: AddressOption = None,
    parallel: ParallelOption = None,
    output: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Train an agent on the first part of a series, and compare it with baselines on the rest, which it has not seen."""
    from tailguard.evaluate.backtest_window import BacktestWindow
    from tailguard.experiments.evaluation import benchmark_accounts
    from tailguard.experiments.prepared_market import load_market  # PyTorch is loaded only when it is needed
    from tailguard.experiments.run import Run

    tree, place = settings.load(), _place(engine, address, parallel)
    source = single_source(data, tree.data)
    market = load_market(source, tree)
    benchmark_accounts(tree, BacktestWindow(market.bars, market.trading, market.split.span))  # refused before the training
    run = Run.create(folder or free_folder("runs", source), tree, source, market)
    _train(run, place, output, quiet)


def run_resume(
    run: RunArgument,
    allow_config_change: Annotated[
        bool, typer.Option("--allow-config-change", help="Train on with what was edited in RUN/config.yaml; it is listed.")
    ] = False,
    engine: EngineOption = Place.SERIAL,
    address: AddressOption = None,
    parallel: ParallelOption = None,
    output: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Resume a training that was stopped or killed; the result is the same as without the stop."""
    from tailguard.experiments.run import Run

    place = _place(engine, address, parallel)
    opened = Run.open(run, allow_config_change=allow_config_change)
    if opened.changed:
        say(f"changed settings: {opened.change_text()}", stderr=True)
    _train(opened, place, output, quiet)


def _place(engine: Place, address: str | None, parallel: int | None) -> "Engine":
    from tailguard.experiments.engines import Engine

    return Engine(engine.value, address, parallel)


def _train(run: "Run", engine: "Engine", output: Format, quiet: bool) -> None:
    """Train a run to its end, and show its agent beside the baselines with the figures that `tailguard evaluate` reports."""
    import pandas as pd

    from tailguard.experiments.evaluation import backtest_agent, benchmark_bars
    from tailguard.experiments.run import train

    say(f"run: {run.path}", stderr=True)
    with progress_bar("training", quiet) as report_progress:
        model = train(run, report_progress, engine)
    market = run.market()
    rows = backtest_agent(model, market, run.config.walkforward.warmup, benchmark_bars(run.config))
    dictionaries = [{"data": run.info["data"], **asdict(row)} for row in rows]
    if output is not Format.TABLE:
        print_rows("", dictionaries, output)
        return
    unseen = pd.DatetimeIndex(market.bars.index[slice(*market.split.test)])
    print_backtests(f"{run.info['data']} (unseen bars)", unseen, market.trading, dictionaries)
    advice = f"`tailguard evaluate {run.path}` gives a verdict and a report; `tailguard walkforward` evaluates the method."
    say(f"One split and one seed are no evidence. {advice}", style="dim")


def run_deploy(
    walkforward: Annotated[Path, typer.Argument(metavar="WALKFORWARD", help="Folder of a finished walk-forward.")],
    folder: Annotated[
        Path | None, typer.Option("--run", "-r", help="New folder for the run; by default artifacts/runs/DATA-N.")
    ] = None,
    refit: Annotated[
        bool, typer.Option("--refit", help="Select and train again on all bars, instead of taking the agents of the last fold.")
    ] = False,
    data: Annotated[str | None, typer.Option("--data", "-d", help="The bars, if they have moved or if more have come.")] = None,
    engine: EngineOption = Place.SERIAL,
    address: AddressOption = None,
    parallel: ParallelOption = None,
    quiet: QuietOption = False,
) -> None:
    """Make an agent of a walk-forward: the ensemble of its seeds, as a run that act, paper, export and evaluate take."""
    from tailguard.experiments.deploy import deploy_last_fold, deploy_refit, open_walkforward

    place = _place(engine, address, parallel)
    done = open_walkforward(walkforward, data)
    path = folder or free_folder("runs", done.source)
    if refit:
        with progress_bar("refit", quiet) as report_progress:
            run = deploy_refit(done, path, report_progress, place)
    else:
        run = deploy_last_fold(done, path)
    first, last = (done.bars.index[row] for row in (run.split.train[0], run.split.train[1] - 1))
    say(f"run: {run.path}, {len(done.seeds)} agents that act as one, trained on {first:%Y-%m-%d} to {last:%Y-%m-%d}")
    if run.selection is not None:
        say(f"  - {run.selection.reason}")


def run_export(
    run: RunArgument,
    form: Annotated[
        ExportFormat | None,
        typer.Option(
            "--format", "-f", help="Of the file, by default as its ending says, else torchscript; onnx needs tailguard[onnx]."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; by default RUN/agent with the ending of the format.")
    ] = None,
) -> None:
    """Write an agent as a graph for other programs: features and account in, action and recurrent state out."""
    from tailguard.experiments.export import export, format_of, observation_names
    from tailguard.experiments.run import Run

    opened = Run.open(run)
    policy, scaler = opened.agent().policy, opened.scaler
    columns = observation_names(policy, scaler.names)
    file, chosen = output or opened.path / "agent", form.value if form else format_of(output)
    path = export(policy, file, chosen, scaler, columns, opened.config.trading)
    say(f"wrote {path}")


@takes_settings(config=False)
def run_act(
    settings: Settings,
    run: RunArgument,
    bars: Annotated[str, typer.Option("--bars", "--data", "-b", help=BARS_HELP)] = "-",
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more bars at the end of the file.")] = False,
    since: Annotated[str | None, typer.Option("--since", help="Print only decisions from this time on.")] = None,
) -> None:
    """Read bars (any file that `train` reads, or lines from a pipe) and print the target weights after each, as JSON."""
    import pandas as pd

    from tailguard.experiments.run import Run
    from tailguard.experiments.tail_check import recorded_check
    from tailguard.experiments.trader import Trader
    from tailguard.market.bars import symbols_of

    opened = Run.open(run)
    config, check = opened.config, recorded_check(opened)
    trader = Trader(opened.agent(), opened.scaler, config.features, config.trading, opened.timeframe)
    first = pd.Timestamp.min if since is None else _parse_time("--since", since)
    last, printed = None, False
    for chunk in _chunks(opened, bars, settings.files(config.files), follow):
        for decision in trader.add(chunk):
            last = decision.time
            if decision.time >= first:
                printed = True
                names = [symbol or "weight" for symbol in symbols_of(chunk)]
                weights = dict(zip(names, decision.weights.tolist(), strict=True))
                line = {"time": decision.time.isoformat(), **weights, "equity": decision.equity}
                line |= {"tail": None if decision.tail is None else decision.tail._asdict()}
                predicted = None if decision.tail is None else decision.tail.period
                line |= {"calibration": check._asdict() if check is not None and check.period == predicted else None}
                line |= {"guard": decision.guard} if config.trading.guard is not None else {}
                sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        if trader.ruined:
            raise ValueError("the paper account of the agent was liquidated: there is nothing left to trade with")
    if last is not None and not printed:
        raise ValueError(f"no decision from {first} on: the last bar is of {last}; --since must be a time that bars reach")
    if last is None:
        n_bars = 0 if trader.bars is None else len(trader.bars)
        raise ValueError(
            f"no decision: {n_bars} bars are too few for the look-backs of the features; give earlier bars as well"
        )


@takes_settings(config=False)
def run_paper(
    settings: Settings,
    run: RunArgument,
    bars: Annotated[str, typer.Option("--bars", "--data", "-b", help=BARS_HELP)] = "-",
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more bars at the end of the file.")] = False,
    ledger: Annotated[
        Path | None, typer.Option("--ledger", help="Folder of the account; an existing one is resumed. By default RUN/paper.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Trade from this time on; by default from the end of the training.")
    ] = None,
    cash: Annotated[float | None, typer.Option("--cash", min=0.0, help="Starting cash; by default that of the run.")] = None,
    max_loss: Annotated[
        float | None,
        typer.Option("--max-loss", min=0.0, max=1.0, help="Sell everything and stop once this share of the start is lost."),
    ] = None,
    rearm: Annotated[bool, typer.Option("--rearm", help="Trade again after the kill switch was thrown.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Trade bars on paper, with a ledger that survives a kill at any moment; FOLDER/KILL, SIGUSR1 and --max-loss stop it."""
    from tailguard.experiments import Interrupted, stopped_at_once
    from tailguard.experiments.bar_stream import polled
    from tailguard.experiments.broker import PaperBroker
    from tailguard.experiments.paper import BROKER, PaperTrading, require_tradable
    from tailguard.experiments.run import Run
    from tailguard.experiments.tail_check import recorded_check
    from tailguard.market.bars import symbols_of
    from tailguard.market.rules import TradingSettings
    from tailguard.validation import build

    opened, asked = Run.open(run), []
    folder, config = ledger or opened.path / "paper", opened.config
    if max_loss == 0.0:
        raise ValueError("--max-loss is 0, but it must be above 0: the first fee would stop the account")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, but --ledger must name a folder")
    rules = config.trading if cash is None else build(TradingSettings, config.trading.model_dump() | {"cash": cash}, "trading")
    opened.config = config.model_copy(update={"trading": rules})
    begin = None if since is None else _parse_time("--since", since)
    check = recorded_check(opened)  # before anything is traded: the record may be refused
    stream = _chunks(opened, bars, settings.files(config.files), follow)
    signal.signal(signal.SIGUSR1, lambda *_: asked.append("SIGUSR1 came"))
    trading, again, number = None, "", int(signal.SIGINT)
    try:
        with stopped_at_once(f"the same command resumes the ledger in {folder}"), status_line("paper", quiet) as show:
            for chunk in polled(stream):
                if trading is None and chunk is not None:
                    require_tradable(opened, chunk)  # while nothing is written
                    trading = PaperTrading(
                        opened,
                        folder,
                        PaperBroker(folder / BROKER, symbols_of(chunk), rules),
                        chunk,
                        since=begin,
                        max_loss=max_loss,
                        rearm=rearm,
                        switch=lambda: "".join(asked[:1]),
                        report=lambda status: show(_status_text(status)),
                    )
                elif trading is not None and chunk is not None:
                    trading.add(chunk)
                elif trading is not None:
                    trading.check()
                if trading is not None and trading.finished:
                    break
    except Interrupted as stopped:
        again, number = str(stopped), stopped.number
    if trading is not None and trading.history:
        _show_paper(trading, check)
        if trading.killed:
            again = f"the kill switch was thrown because {trading.killed}; {trading.remedy}"
    elif trading is not None:
        say(f"nothing was traded yet: no bars from {trading.since} on with enough bars before them; --since sets another time")
    elif not again:
        raise ValueError(f"no bars in {'the standard input' if bars == '-' else bars}: nothing was traded")
    if again:
        raise Interrupted(again, number)


def _status_text(status: "Status") -> str:
    weights = " ".join(f"{weight:.2f}" for weight in status.weights)
    partial = ", partly" if status.unfilled else ""
    return f"{status.time} equity {status.equity:.6g} ({status.gain:+.2%}), weights {weights}, {status.fills} fills{partial}"


def _show_paper(trading: "PaperTrading", check: "TailCheck | None") -> None:
    """Print the account, and write its report.

    :param check: what the record of the agent says about its predicted tail.
    """
    from tailguard.evaluate.judge import FEWEST_BARS
    from tailguard.experiments.tail_check import UNCHECKED

    say(_status_text(trading.history[-1]))
    (tail,), (reason,) = trading.predicted()[1:]
    if tail is not None:
        say(
            f"this {tail.period} so far {tail.to_date:+.2%}, the rest ({tail.bars_to_go} bars) {tail.expected:+.2%} on average "
            f"and {tail.cvar_5:+.2%} in the worst 5% (CVaR)"
        )
        say(f"this prediction: {UNCHECKED if check is None or check.period != tail.period else check.sentence}")
    if reason:
        say(f"guard: {reason}")
    if len(trading.history) == trading.resumed:
        say("no bars have come since")
        return
    if len(trading.history) <= FEWEST_BARS:
        say(f"no report yet: {len(trading.history)} bars are too few")
        return
    with console(stderr=True).status("evaluating"):
        path = trading.judged().write_report(trading.folder / "report.html")
    say(f"report: {path}")


def _chunks(run: "Run", bars: str, files: "FileConfig", follow: bool) -> "Iterator[pd.DataFrame]":
    """Yield the bars for an agent as they arrive.

    :param run: of the agent.
    :param bars: their source; ``-`` is the standard input.
    :param files: what is known about them.
    :param follow: wait for more at the end of a file.
    """
    from tailguard.experiments.bar_stream import bar_chunks, file_chunks

    keep = run.config.features.columns
    if bars == "-":
        return bar_chunks(_standard_input(), files, keep, step=run.timeframe)
    return file_chunks(bars, files, keep, follow, step=run.timeframe)


def _standard_input() -> BinaryIO:
    """Return the standard input as a file of its own.

    A thread reads it that may still wait when the command ends, and Python aborts at its exit if that holds the lock of
    ``sys.stdin``.
    """
    return open(sys.stdin.fileno(), "rb", closefd=False)


def _parse_time(name: str, text: str) -> "pd.Timestamp":
    """Return a time as bars have it: in UTC, without a time zone."""
    import pandas as pd

    try:
        time = pd.Timestamp(datetime.fromisoformat(text))
    except ValueError:
        raise ValueError(f"{name} is {text!r}, but it must be a time in ISO 8601, such as 2020-12-31T16:00") from None
    return time if time.tzinfo is None else time.tz_convert("UTC").tz_localize(None)
