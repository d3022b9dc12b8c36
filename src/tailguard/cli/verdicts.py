"""Commands that judge: one agent, a method fold by fold, an agent under attack, runs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailguard.cli.terminal import (
    ConfigArgument,
    DataOption,
    QuietOption,
    RunArgument,
    SetOption,
    console,
    free_folder,
    one_source,
    progress_of,
)
from tailguard.config import load_config
from tailguard.market.data import load_source

if TYPE_CHECKING:
    from tailguard.evaluate.record import Evaluation

REPORT = "report.html"


def run_evaluate(run: RunArgument) -> None:
    """Judge a trained agent on the bars that it has never seen: a verdict, its reasons, and a report to look at."""
    from tailguard.evaluate.record_files import RECORD, save
    from tailguard.experiments.evaluation import evaluate_run
    from tailguard.experiments.run import Run

    opened = Run.open(run)
    with console(stderr=True).status("judging"):
        evaluation = evaluate_run(opened)
        save(evaluation, opened.path / RECORD)
    _show(evaluation, opened.path)


def run_walkforward(
    config: ConfigArgument = None,
    data: DataOption = None,
    folder: Annotated[Path | None, typer.Option("--run", "-r", help="Folder; one that was begun before goes on.")] = None,
    settings: SetOption = None,
    quiet: QuietOption = False,
) -> None:
    """Train and test fold by fold and seed by seed, and judge the method: a verdict, its reasons, and a report."""
    from tailguard.experiments.walkforward import walkforward

    tree = load_config(config, settings or [])
    source = one_source(data, tree)
    bars, folder = load_source(source), folder or free_folder("walkforward", source)
    console(stderr=True).print(f"walk-forward: {folder} (give it to --run to go on after a stop)", highlight=False)
    with progress_of("walk-forward", quiet) as shown:
        evaluation = walkforward(bars, tree, tree.walkforward, folder, source=source, report=shown)
    _show(evaluation, folder)


def run_attack(
    run: RunArgument,
    epsilon: Annotated[list[float] | None, typer.Option("--epsilon", help="Radius of attacks, in standard deviations.")] = None,
    steps: Annotated[int, typer.Option(help="Gradients per attack.")] = 20,
    quiet: QuietOption = False,
) -> None:
    """Trade the unseen bars with observations that are attacked, stale, missing or noisy, and compare."""
    from tailguard.evaluate.attack import AttackPlan, attack_market
    from tailguard.experiments.evaluation import ATTACK, attack_table
    from tailguard.experiments.run import Run
    from tailguard.validation import build

    opened = Run.open(run)
    plan = build(AttackPlan, {"steps": steps} | ({"epsilons": tuple(epsilon)} if epsilon else {}))
    with progress_of("attacks", quiet) as shown:
        result = attack_market(opened.trained_model(), opened.market(), plan, shown)
    table = attack_table(result)
    table.to_csv(opened.path / ATTACK, index=False)
    result.write(opened.path / "attack.json")
    wide = table.pivot_table(index=["attack", "epsilon"], columns="statistic", values="value", sort=False)
    console().print(wide.to_string(float_format=lambda value: f"{value:+.4f}"), highlight=False, soft_wrap=True)
    run_evaluate(run)


def run_compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Folders of evaluated runs or walk-forwards.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("comparison.html"),
) -> None:
    """Put evaluated runs side by side."""
    from tailguard.cli.terminal import Format, print_rows
    from tailguard.evaluate.record_files import RECORD, load
    from tailguard.evaluate.report.compare import compare, comparison_rows
    from tailguard.evaluate.report.report import write_page

    names, evaluations = [str(run) for run in runs], [load(run / RECORD) for run in runs]
    print_rows("", comparison_rows(evaluations, names), Format.TABLE)
    console().print(f"page: {write_page(compare(evaluations, names), output)}", highlight=False, soft_wrap=True)


def _show(evaluation: "Evaluation", folder: Path) -> None:
    from tailguard.evaluate.report.report import write_report

    path = write_report(evaluation, folder / REPORT)
    terminal, verdict = console(), evaluation.verdict
    terminal.print(f"[bold]{verdict.headline}[/bold]", highlight=False, soft_wrap=True)
    for reason in verdict.reasons:
        terminal.print(f"  - {reason}", highlight=False, markup=False, soft_wrap=True)
    terminal.print(f"report: {path}", highlight=False, soft_wrap=True)
