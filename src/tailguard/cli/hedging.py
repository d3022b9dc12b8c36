"""The command that hedges options on the user's bars."""

from pathlib import Path
from typing import Annotated

import typer

from tailguard.cli.settings import Settings, takes_settings
from tailguard.cli.terminal import DataOption, console, free_folder


@takes_settings(argument=True)
def run_hedge(
    settings: Settings,
    data: DataOption = None,
    kind: Annotated[str | None, typer.Option(help="call or put; it is sold.", show_default="call")] = None,
    strike: Annotated[
        float | None, typer.Option(help="As a multiple of the spot; 1 is at the money.", show_default="1.0")
    ] = None,
    expiry: Annotated[
        int | None, typer.Option(help="Bars until the option expires; it is hedged at each.", show_default="21")
    ] = None,
    cost: Annotated[
        float | None, typer.Option(help="Of a trade, as a fraction of its value; 0.001 is 0.1 %.", show_default="0.001")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Share of the worst paths that counts.", show_default="0.05")] = None,
    process: Annotated[
        str | None,
        typer.Option(help="bootstrap or heston: paths from blocks of your returns or a model.", show_default="bootstrap"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Hedging decisions that the agent learns from.", show_default="2000000")
    ] = None,
    paths: Annotated[int | None, typer.Option(help="Paths of the comparison.", show_default="50000")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the agent and the paths.", show_default="0")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder; by default artifacts/hedges/NAME-N.")] = None,
) -> None:
    """Train an agent to hedge options on your bars, and compare it with delta, Leland and Whalley-Wilmott on later bars.

    The section `hedging` of the configuration has more: spreads, barriers, fixed costs. Options come before it.
    """
    from tailguard.cli.comparisons import overridden, print_comparison, write_comparison
    from tailguard.cli.settings import single_source
    from tailguard.evaluate.record import source_name
    from tailguard.market.data import load_source

    tree = settings.load()
    options = {"kind": kind, "strike": strike, "dates": expiry, "cost": cost, "alpha": alpha, "process": process}
    chosen = overridden(tree.hedging, "hedging", options | {"steps": steps, "paths": paths, "seed": seed})
    source = single_source(data, tree.data)
    bars = load_source(source, tree.files)
    folder = output or free_folder("hedges", source)
    from tailguard.experiments.hedging import hedge_bars

    with console(stderr=True).status("training and comparing"):
        model, comparison = hedge_bars(bars, chosen, source_name(source))
        write_comparison(model.save, comparison, folder, "hedging.json")
    print_comparison(comparison, folder, "hedge", 3)
