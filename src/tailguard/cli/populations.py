"""The command that trains a population."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Table

from tailguard.cli.terminal import ConfigArgument, DataOption, QuietOption, SetOption, console, free_folder, one_source
from tailguard.config import load_config

if TYPE_CHECKING:
    from tailguard.experiments.population import Standing


class EngineName(StrEnum):
    """Who trains the members."""

    SERIAL = "serial"
    PROCESS = "process"
    RAY = "ray"


def run_population(
    config: ConfigArgument = None,
    data: DataOption = None,
    folder: Annotated[Path | None, typer.Option("--run", "-r", help="Folder; one that was begun before goes on.")] = None,
    engine: Annotated[
        EngineName, typer.Option(help="Who trains: this process, processes here, or a Ray cluster.")
    ] = EngineName.PROCESS,
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster; without it one is started here.")] = None,
    parallel: Annotated[int | None, typer.Option(help="Processes at the same time; by default one per core.")] = None,
    store: Annotated[str | None, typer.Option(help="Where members' states lie, a folder or URL; by default the run.")] = None,
    settings: SetOption = None,
    quiet: QuietOption = False,
) -> None:
    """Train a population whose members copy each other and change their settings; the winner is an ordinary run."""
    from tailguard.experiments.population import PopulationRun

    if folder is not None and folder.exists():
        population = PopulationRun.open(folder)
    else:
        tree = load_config(config, settings or [])
        source = one_source(data, tree)
        population = PopulationRun.create(folder or free_folder("populations", source), tree, source)
    path, terminal = population.run.path, console(stderr=True)
    terminal.print(f"population: {path} (give it to --run to go on after a stop)", highlight=False)
    with Live(console=terminal, transient=True, auto_refresh=not quiet) as live:
        shown = None if quiet or not terminal.is_terminal else lambda standing: live.update(_table(standing), refresh=True)
        population.train(engine.value, shown, address=address, parallel=parallel, store=store)
    console().print(_table(population.standing()))
    winner = population.run.info["winner"]
    console().print(
        f"member {winner['member']} wins; `tailguard evaluate {path}` judges it on bars that nobody has seen", highlight=False
    )


def _table(standing: "Standing") -> Table:
    done, total = standing.intervals
    table = Table(title=f"interval {done} of {total}, decision {standing.round}", title_justify="left")
    names = list(standing.rows[0].hyperparams)
    copied = dict(standing.copies)
    for heading in ("member", "score", *names, "copies made", "copied now"):
        table.add_column(heading, justify="right")
    for row in standing.rows:
        score = "dead" if not row.alive else "" if row.performance is None else f"{row.performance:.4g}"
        settings = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.hyperparams.values()]
        source = f"from {copied[row.member_id]}" if row.member_id in copied else ""
        table.add_row(str(row.member_id), score, *settings, str(row.generation), source)
    return table
