"""The command that trains a population."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailguard.cli.settings import Settings, single_source, takes_settings
from tailguard.cli.terminal import (
    AddressOption,
    DataOption,
    ParallelOption,
    Place,
    QuietOption,
    console,
    free_folder,
    print_table,
    say,
)

if TYPE_CHECKING:
    from rich.table import Table

    from tailguard.experiments.population_run import Standing


@takes_settings(argument=True)
def run_population(
    settings: Settings,
    data: DataOption = None,
    folder: Annotated[Path | None, typer.Option("--run", "-r", help="Folder; an existing one is resumed.")] = None,
    engine: Annotated[
        Place, typer.Option(help="Train in this process, in processes on this machine, or on a Ray cluster.")
    ] = Place.PROCESS,
    address: AddressOption = None,
    parallel: ParallelOption = None,
    store: Annotated[str | None, typer.Option(help="Folder or URL for the states of members; by default the run.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Train a population whose members copy better ones and change their hyperparameters; the winner is an ordinary run."""
    from rich.live import Live

    from tailguard.experiments.population_run import PopulationRun
    from tailguard.experiments.run import INFO

    tree = settings.load()
    if folder is not None and (folder / INFO).exists():
        population = PopulationRun.open(folder)
        if settings.path is not None or settings.overrides:
            population.require_same(tree)
    else:
        source = single_source(data, tree.data)
        population = PopulationRun.create(folder or free_folder("populations", source), tree, source)
    path, terminal = population.run.path, console(stderr=True)
    say(f"population: {path} (after a stop, --run {path} resumes it)", stderr=True)
    with Live(console=terminal, transient=True, auto_refresh=not quiet) as live:
        report = (
            None if quiet or not terminal.is_terminal else lambda standing: live.update(_live_table(standing), refresh=True)
        )
        population.train(engine.value, report, address=address, parallel=parallel, store=store)
    standing = population.standing()
    print_table(_title(standing), *_cells(standing), numbers=True)
    winner = population.run.info["winner"]
    advice = f"`tailguard evaluate {path}` evaluates it on bars that no member has seen"
    say(f"member {winner['member']} wins; {advice}")


def _title(standing: "Standing") -> str:
    return "interval {} of {}, decision {}".format(*standing.intervals, standing.round)


def _cells(standing: "Standing") -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of a table of the members."""
    names, copied = list(standing.rows[0].hyperparams), dict(standing.copies)
    rows = []
    for row in standing.rows:
        score = "dead" if not row.alive else "" if row.performance is None else f"{row.performance:.4g}"
        settings = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.hyperparams.values()]
        source = f"from {copied[row.member_id]}" if row.member_id in copied else ""
        rows.append([str(row.member_id), score, *settings, str(row.generation), source])
    return ["member", "score", *names, "copies made", "copied now"], rows


def _live_table(standing: "Standing") -> "Table":
    from rich.table import Table

    headings, rows = _cells(standing)
    table = Table(title=_title(standing), title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
