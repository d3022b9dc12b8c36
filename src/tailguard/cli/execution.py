"""The command that sells an order on the user's bars."""

from pathlib import Path
from typing import Annotated

import typer

from tailguard.cli.settings import Settings, takes_settings
from tailguard.cli.terminal import DataOption, console, free_folder


@takes_settings(argument=True)
def run_execute(
    settings: Settings,
    data: DataOption = None,
    bars: Annotated[
        int | None, typer.Option(help="Bars in which the order is sold, a trade in each.", show_default="10")
    ] = None,
    order: Annotated[
        float | None,
        typer.Option(help="Size of the order, as a multiple of a mean day's volume.", show_default="a tenth of what is traded"),
    ] = None,
    impact: Annotated[
        float | None,
        typer.Option(help="Temporary impact of a day's volume sold within a day, in daily volatilities.", show_default="1.0"),
    ] = None,
    permanent: Annotated[float | None, typer.Option(help="Permanent impact of the same.", show_default="0.3")] = None,
    half_spread: Annotated[float | None, typer.Option(help="Basis points that every share pays.", show_default="1.0")] = None,
    alpha: Annotated[float | None, typer.Option(help="Share of the worst paths that counts.", show_default="0.05")] = None,
    steps: Annotated[int | None, typer.Option(help="Decisions that the agent learns from.", show_default="2000000")] = None,
    paths: Annotated[int | None, typer.Option(help="Paths of the comparison.", show_default="50000")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the agent and the paths.", show_default="0")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder; by default artifacts/orders/NAME-N.")] = None,
) -> None:
    """Train an agent to sell a large order on your bars, and compare it with VWAP, TWAP and Almgren-Chriss on later bars.

    The section `execution` of the configuration has more. Options come before it.
    """
    from tailguard.cli.comparisons import overridden, print_comparison, write_comparison
    from tailguard.cli.settings import single_source
    from tailguard.evaluate.record import source_name
    from tailguard.market.data import load_source

    tree = settings.load()
    options = {"bars": bars, "order": order, "impact": impact, "permanent": permanent, "half_spread": half_spread}
    chosen = overridden(tree.execution, "execution", options | {"alpha": alpha, "steps": steps, "paths": paths, "seed": seed})
    source = single_source(data, tree.data)
    table = load_source(source, tree.files)
    folder = output or free_folder("orders", source)
    from tailguard.experiments.execution import execute_bars

    with console(stderr=True).status("training and comparing"):
        model, comparison = execute_bars(table, chosen, source_name(source))
        write_comparison(model.save, comparison, folder, "execution.json")
    print_comparison(comparison, folder, "cost in bps", 2)
