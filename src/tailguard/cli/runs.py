"""Commands about one agent: train it, go on training it, take it elsewhere, let it trade."""

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pandas as pd
import typer

from tailguard.cli.terminal import (
    ConfigOption,
    Format,
    FormatOption,
    QuietOption,
    RunArgument,
    SetOption,
    backtest_table,
    console,
    free_folder,
    print_rows,
    progress_of,
)
from tailguard.config import load_config
from tailguard.market.data import load_source

if TYPE_CHECKING:
    from tailguard.experiments.run import Run


class ExportFormat(StrEnum):
    """What an agent is exported as."""

    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"


def run_train(
    data: Annotated[str, typer.Option("--data", "-d", help="Shipped set or file; a+b is a portfolio.")],
    folder: Annotated[Path | None, typer.Option("--run", "-r", help="Folder of the run; by default a new one.")] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    output: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Train an agent on the first part of a series and compare it with the baselines on the rest, which it has never seen."""
    from tailguard.experiments.run import Run  # PyTorch is loaded only when it is needed
    from tailguard.experiments.training import default_split, prepare_market

    tree = load_config(config, settings or [])
    bars = load_source(data)
    market = prepare_market(bars, tree, default_split(len(bars), tree.training))
    _train(Run.create(folder or free_folder("runs", data), tree, data, market), output, quiet)


def run_resume(run: RunArgument, output: FormatOption = Format.TABLE, quiet: QuietOption = False) -> None:
    """Go on with a training that was stopped or killed, as if nothing had happened."""
    from tailguard.experiments.run import Run

    _train(Run.open(run), output, quiet)


def _train(run: "Run", output: Format, quiet: bool) -> None:
    """Train a run to its end and show its agent beside the baselines."""
    from tailguard.experiments.run import train
    from tailguard.experiments.training import test

    console(stderr=True).print(f"run: {run.path}", highlight=False)
    steps = run.config.training.steps
    with progress_of("training", quiet) as shown:
        model = train(run, lambda done, text: shown(done, steps, text))
    market = run.market()
    dictionaries = [{"data": run.info["data"], **asdict(row)} for row in test(model, market, run.config)]
    if output is not Format.TABLE:
        print_rows("", dictionaries, output)
        return
    unseen = market.bars.iloc[slice(*market.split.test)]
    console().print(backtest_table(f"{run.info['data']} (unseen part)", unseen, run.config, dictionaries))
    advice = f"`tailguard evaluate {run.path}` gives a verdict and a report; `tailguard walkforward` judges the method."
    console().print(f"One split, one seed: this shows that the machinery works. {advice}", style="dim", highlight=False)


def run_export(
    run: RunArgument,
    form: Annotated[ExportFormat, typer.Option("--format", "-f", help="What to write.")] = ExportFormat.ONNX,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; by default RUN/agent.")] = None,
) -> None:
    """Write an agent as a graph that other programs run: features and account in, target position and memory out."""
    from tailguard.experiments.export import export, observation_names
    from tailguard.experiments.run import Run

    opened = Run.open(run)
    model, scaler = opened.trained_model(), opened.scaler
    columns = observation_names(model.policy, scaler.names)
    path = export(model.policy, output or opened.path / "agent", form.value, scaler, columns)
    console().print(f"wrote {path}", highlight=False, soft_wrap=True)


def run_act(
    run: RunArgument,
    bars: Annotated[Path | None, typer.Option("--bars", "-b", help="File with bars; by default stdin.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more bars at the end of the file.")] = False,
    since: Annotated[str | None, typer.Option("--since", help="Print decisions from this time on only.")] = None,
) -> None:
    """Read bars (CSV or JSON lines), print what to hold after each: one JSON object per line."""
    from tailguard.experiments.acting import Trader
    from tailguard.experiments.bar_stream import bar_chunks
    from tailguard.experiments.run import Run
    from tailguard.market.data import symbols_of

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
