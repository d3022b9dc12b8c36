"""The command that sells an order on the user's bars."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tailguard.cli.terminal import DataOption, console, free_folder, print_table, say

REPORT, FIGURES, AGENT = "report.html", "execution.json", "agent"


def run_execute(
    data: DataOption = None,
    bars: Annotated[int, typer.Option("--bars", help="Bars in which the order is sold, a trade in each.")] = 10,
    order: Annotated[float, typer.Option("--order", help="Size of the order, as a multiple of a mean day's volume.")] = 1.0,
    impact: Annotated[
        float, typer.Option("--impact", help="Temporary impact of a day's volume sold within a day, in daily volatilities.")
    ] = 1.0,
    permanent: Annotated[float, typer.Option("--permanent", help="Permanent impact of the same.")] = 0.3,
    half_spread: Annotated[float, typer.Option("--half-spread", help="Basis points that every share pays.")] = 1.0,
    alpha: Annotated[float, typer.Option("--alpha", help="Share of the worst paths that counts.")] = 0.05,
    steps: Annotated[int, typer.Option("--steps", help="Decisions that the agent learns from.")] = 2_000_000,
    paths: Annotated[int, typer.Option("--paths", help="Paths of the comparison.")] = 50_000,
    seed: Annotated[int, typer.Option("--seed", help="Of the agent and the paths.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder; by default artifacts/orders/NAME-N.")] = None,
) -> None:
    """Train an agent to sell a large order on your bars, and compare it with TWAP and Almgren-Chriss on later bars."""
    from tailguard.cli.settings import single_source
    from tailguard.evaluate.record import source_name
    from tailguard.evaluate.report.report import write_page
    from tailguard.experiments.execution import ExecutionSettings, execute_bars
    from tailguard.io.atomic import atomic, make_folder
    from tailguard.market.data import load_source
    from tailguard.validation import build

    values: dict[str, Any] = {"bars": bars, "order": order, "impact": impact, "permanent": permanent, "alpha": alpha}
    values |= {"half_spread": half_spread, "steps": steps, "paths": paths, "seed": seed}
    settings = build(ExecutionSettings, values)
    source = single_source(data, ())
    table = load_source(source)
    folder = output or free_folder("orders", source)
    with console(stderr=True).status("training and comparing"):
        model, comparison = execute_bars(table, settings, source_name(source))
        make_folder(folder)
        model.save(folder / AGENT)
        with atomic(folder / FIGURES) as file:
            file.write(json.dumps(comparison.to_json(), indent=2).encode())
        path = write_page(comparison.html(), folder / REPORT)
    statistics = comparison.statistics()
    keys = list(next(iter(statistics.values())))
    rows = [[name, *(f"{figures[key].value:.2f}" for key in keys)] for name, figures in statistics.items()]
    print_table(comparison.title, ["cost in bps", *keys], rows, numbers=True)
    say(comparison.headline(), style="bold")
    say(f"report: {path}")
