"""Commands that evaluate: one agent, a method fold by fold, an agent under attack, runs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailguard.cli.settings import Settings, single_source, takes_settings
from tailguard.cli.terminal import (
    DataOption,
    Format,
    QuietOption,
    RunArgument,
    console,
    free_folder,
    print_rows,
    print_table,
    progress_bar,
    say,
)

if TYPE_CHECKING:
    from tailguard.evaluate.record import Evaluation
    from tailguard.experiments.run import Run

REPORT = "report.html"


def run_evaluate(run: RunArgument) -> None:
    """Evaluate a trained agent on the bars that it has not seen: a verdict, the reasons for it, and a report."""
    from tailguard.experiments.run import Run

    _evaluate(Run.open(run))


@takes_settings(argument=True)
def run_walkforward(
    settings: Settings,
    data: DataOption = None,
    folder: Annotated[Path | None, typer.Option("--run", "-r", help="Folder; an existing one is resumed.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Train and test fold by fold and seed by seed, and evaluate the method: a verdict, the reasons for it, and a report."""
    from tailguard.experiments.prepared_market import load_source_of
    from tailguard.experiments.walkforward import walkforward

    tree = settings.load()
    source = single_source(data, tree.data)
    bars, folder = load_source_of(tree, source), folder or free_folder("walkforward", source)
    say(f"walk-forward: {folder} (after a stop, --run {folder} resumes it)", stderr=True)
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
    rows = [
        [f"{attack} {epsilon:g}" if epsilon else str(attack), *(f"{value:.3f}" for value in row)]
        for (attack, epsilon), row in zip(pivoted.index, pivoted.to_numpy(), strict=True)
    ]
    print_table("", ["attack", *map(str, pivoted.columns)], rows, numbers=True)
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
    say(f"page: {write_page(compare(evaluations, names), output)}")


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
    say(evaluation.verdict.headline, style="bold")
    for reason in evaluation.verdict.reasons:
        say(f"  - {reason}")
    say(f"report: {path}")
