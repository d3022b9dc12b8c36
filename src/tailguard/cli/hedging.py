"""The command that hedges an option on the user's bars."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tailguard.cli.terminal import DataOption, console, free_folder, print_table, say

REPORT, FIGURES, AGENT = "report.html", "hedging.json", "agent"


def run_hedge(
    data: DataOption = None,
    kind: Annotated[str, typer.Option("--kind", help="call or put; it is sold.")] = "call",
    strike: Annotated[float, typer.Option("--strike", help="As a multiple of the spot; 1 is at the money.")] = 1.0,
    expiry: Annotated[int, typer.Option("--expiry", help="Bars until the option expires; it is hedged at each.")] = 21,
    cost: Annotated[float, typer.Option("--cost", help="Of a trade, as a fraction of its value; 0.001 is 0.1 %.")] = 0.001,
    alpha: Annotated[float, typer.Option("--alpha", help="Share of the worst paths that counts.")] = 0.05,
    process: Annotated[
        str, typer.Option("--process", help="bootstrap or heston: paths from blocks of your returns or a model.")
    ] = "bootstrap",
    steps: Annotated[int, typer.Option("--steps", help="Hedging decisions that the agent learns from.")] = 2_000_000,
    paths: Annotated[int, typer.Option("--paths", help="Paths of the comparison.")] = 50_000,
    seed: Annotated[int, typer.Option("--seed", help="Of the agent and the paths.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder; by default artifacts/hedges/NAME-N.")] = None,
) -> None:
    """Train an agent to hedge an option on your bars, and compare it with delta, Leland and Whalley-Wilmott on later bars."""
    from tailguard.cli.settings import single_source
    from tailguard.evaluate.record import source_name
    from tailguard.evaluate.report.report import write_page
    from tailguard.experiments.hedging import HedgeSettings, hedge_bars
    from tailguard.io.atomic import atomic, make_folder
    from tailguard.market.data import load_source
    from tailguard.validation import build

    values: dict[str, Any] = {"kind": kind, "strike": strike, "dates": expiry, "cost": cost, "alpha": alpha, "process": process}
    settings = build(HedgeSettings, values | {"steps": steps, "paths": paths, "seed": seed})
    source = single_source(data, ())
    bars = load_source(source)
    folder = output or free_folder("hedges", source)
    with console(stderr=True).status("training and comparing"):
        model, comparison = hedge_bars(bars, settings, source_name(source))
        make_folder(folder)
        model.save(folder / AGENT)
        with atomic(folder / FIGURES) as file:
            file.write(json.dumps(comparison.to_json(), indent=2).encode())
        path = write_page(comparison.html(), folder / REPORT)
    statistics = comparison.statistics()
    keys = list(next(iter(statistics.values())))
    rows = [[name, *(f"{figures[key].value:.3f}" for key in keys)] for name, figures in statistics.items()]
    print_table(comparison.title, ["hedge", *keys], rows, numbers=True)
    say(comparison.headline(), style="bold")
    say(f"report: {path}")
