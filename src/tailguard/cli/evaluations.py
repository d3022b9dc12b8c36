"""Commands that evaluate: one agent, a method fold by fold, an agent under attack, runs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailguard.cli.terminal import (
    ConfigArgument,
    DataOption,
    Format,
    QuietOption,
    RunArgument,
    SetOption,
    console,
    free_folder,
    print_rows,
    progress_bar,
    single_source,
)
from tailguard.config import load_config
from tailguard.market.data import load_source

if TYPE_CHECKING:
    from tailguard.evaluate.record import Evaluation
    from tailguard.experiments.run import Run

REPORT = "report.html"


def run_evaluate(run: RunArgument) -> None:
    """Evaluate a trained agent on the bars that it has not seen: a verdict, the reasons for it, and a report."""
    from tailguard.experiments.run import Run

    _evaluate(Run.open(run))


def run_walkforward(
    config: ConfigArgument = None,
    data: DataOption = None,
    folder: Annotated[Path | None, typer.Option("--run", "-r", help="Folder; an existing one is resumed.")] = None,
    settings: SetOption = None,
    quiet: QuietOption = False,
) -> None:
    """Train and test fold by fold and seed by seed, and evaluate the method: a verdict, the reasons for it, and a report."""
    from tailguard.experiments.walkforward import walkforward

    tree = load_config(config, settings or [])
    source = single_source(data, tree)
    bars, folder = load_source(source), folder or free_folder("walkforward", source)
    console(stderr=True).print(f"walk-forward: {folder} (after a stop, --run {folder} resumes it)", highlight=False)
    with progress_bar("walk-forward", quiet) as report_progress:
        evaluation = walkforward(bars, tree, tree.walkforward, folder, source=source, report=report_progress)
    _show(evaluation, folder)


def run_attack(
    run: RunArgument,
    epsilon: Annotated[
        list[float] | None,
        typer.Option("--epsilon", help="Radius of attacks, in standard deviations of a feature; may be given several times."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Gradient steps per attack.")] = 20,
    quiet: QuietOption = False,
) -> None:
    """Trade the unseen bars with observations that are attacked, stale, missing or noisy, and evaluate the agent again."""
    from tailguard.evaluate.attack import AttackPlan
    from tailguard.experiments.evaluation import attack_run
    from tailguard.experiments.run import Run
    from tailguard.validation import build

    opened = Run.open(run)
    plan = build(AttackPlan, {"steps": steps} | ({"epsilons": tuple(epsilon)} if epsilon else {}))
    with progress_bar("attacks", quiet) as report_progress:
        table = attack_run(opened, plan, report_progress)
    pivoted = table.pivot_table(index=["attack", "epsilon"], columns="statistic", values="value", sort=False)
    console().print(pivoted.to_string(float_format=lambda value: f"{value:+.4f}"), highlight=False, soft_wrap=True)
    _evaluate(opened)


def run_compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of evaluated runs or walk-forwards.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("comparison.html"),
) -> None:
    """Put evaluated runs side by side in one page."""
    from tailguard.evaluate.record import RECORD_FOLDER, load_record
    from tailguard.evaluate.report.compare import compare, comparison_rows
    from tailguard.evaluate.report.report import write_page

    names, evaluations = [str(run) for run in runs], [load_record(run / RECORD_FOLDER) for run in runs]
    print_rows("", comparison_rows(evaluations, names), Format.TABLE)
    console().print(f"page: {write_page(compare(evaluations, names), output)}", highlight=False, soft_wrap=True)


def _evaluate(run: "Run") -> None:
    """Evaluate the agent of a run, save the record and show it."""
    from tailguard.evaluate.record import RECORD_FOLDER, save_record
    from tailguard.experiments.evaluation import evaluate_run

    with console(stderr=True).status("evaluating"):
        evaluation = evaluate_run(run)
        save_record(evaluation, run.path / RECORD_FOLDER)
    _show(evaluation, run.path)


def _show(evaluation: "Evaluation", folder: Path) -> None:
    """Write the report and print the verdict with its reasons."""
    from tailguard.evaluate.report.report import write_report

    path = write_report(evaluation, folder / REPORT)
    terminal, verdict = console(), evaluation.verdict
    terminal.print(f"[bold]{verdict.headline}[/bold]", highlight=False, soft_wrap=True)
    for reason in verdict.reasons:
        terminal.print(f"  - {reason}", highlight=False, markup=False, soft_wrap=True)
    terminal.print(f"report: {path}", highlight=False, soft_wrap=True)
