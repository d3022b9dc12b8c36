"""Commands that evaluate: one agent, a method fold by fold, an agent under attack, runs side by side."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailguard.cli.settings import Settings, single_source, takes_settings
from tailguard.cli.terminal import (
    AddressOption,
    DataOption,
    Format,
    FormatOption,
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


class WalkforwardEngine(StrEnum):
    """Engines that train the pairs of a walk-forward."""

    PROCESS = "process"
    RAY = "ray"


CONTROL_SHARPES = (0.0, 1.0, 2.0, 3.0)
LedgerOption = Annotated[
    bool, typer.Option("--ledger/--no-ledger", help="Count this evaluation as a trial, and the trials before it.")
]


def run_evaluate(run: RunArgument, ledger: LedgerOption = True) -> None:
    """Evaluate a trained agent on the bars that it has not seen: a verdict, the reasons for it, and a report."""
    from tailguard.experiments.run import Run

    _evaluate(Run.open(run), ledger)


@takes_settings(argument=True)
def run_walkforward(
    settings: Settings,
    data: DataOption = None,
    folder: Annotated[Path | None, typer.Option("--run", "-r", help="Folder; an existing one is resumed.")] = None,
    engine: Annotated[
        WalkforwardEngine, typer.Option(help="Train in processes on this machine, or on a Ray cluster; the results are equal.")
    ] = WalkforwardEngine.PROCESS,
    address: AddressOption = None,
    ledger: LedgerOption = True,
    quiet: QuietOption = False,
) -> None:
    """Train and test fold by fold and seed by seed, and evaluate the method: a verdict, the reasons for it, and a report."""
    from tailguard.evaluate.ledger import user_ledger
    from tailguard.experiments.prepared_market import load_source_of
    from tailguard.experiments.walkforward import walkforward

    tree = settings.load()
    source = single_source(data, tree.data)
    bars, folder = load_source_of(tree, source), folder or free_folder("walkforward", source)
    if not quiet:
        say(f"walk-forward: {folder} (after a stop, --run {folder} resumes it)", stderr=True)
    with progress_bar("walk-forward", quiet) as report_progress:
        evaluation = walkforward(
            bars,
            tree,
            tree.walkforward,
            folder,
            source=source,
            report=report_progress,
            ledger=user_ledger() if ledger else None,
            engine=engine.value,
            address=address,
        )
    _show(evaluation, folder)


def run_attack(
    run: RunArgument,
    epsilon: Annotated[
        list[float] | None,
        typer.Option("--epsilon", help="Radius of attacks, in standard deviations of a feature; may be given several times."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Gradient steps per attack.")] = 20,
    ledger: LedgerOption = True,
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
    _evaluate(opened, ledger)


def run_compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of evaluated runs or walk-forwards.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("comparison.html"),
) -> None:
    """Put evaluated runs side by side in one page, and test which is better, given that one can choose."""
    from tailguard.evaluate.comparison import compare_runs
    from tailguard.evaluate.record import RECORD_FOLDER, load_record
    from tailguard.evaluate.report.compare import (
        NOT_RANKED,
        PAIRED,
        compare,
        comparison_rows,
        comparison_sentences,
        difference_rows,
        ranking_rows,
    )
    from tailguard.evaluate.report.report import write_page

    short = [run.resolve().name for run in runs]
    names = [name if short.count(name) == 1 else str(run) for name, run in zip(short, runs, strict=True)]
    evaluations = [load_record(run / RECORD_FOLDER) for run in runs]
    print_rows("", comparison_rows(evaluations, names), Format.TABLE)
    comparison = compare_runs(evaluations, names)
    if comparison is None:
        say(NOT_RANKED)
    else:
        print_rows("Ranking over the bars that all runs share", ranking_rows(comparison), Format.TABLE)
        print_rows(PAIRED.removesuffix("."), difference_rows(comparison), Format.TABLE)
        for line in comparison_sentences(comparison):
            say(f"  - {line}")
    say(f"page: {write_page(compare(evaluations, names), output)}")


@takes_settings()
def run_judge(
    settings: Settings,
    returns: Annotated[
        Path | None, typer.Option("--returns", help="File with the returns of a strategy per bar, or its equity curve.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", help="File with target weights, one column per symbol; needs --bars.")
    ] = None,
    bars: Annotated[
        str | None, typer.Option("--bars", help="What the weights trade: shipped data set or file; a+b is a portfolio.")
    ] = None,
    benchmark: Annotated[
        str | None, typer.Option("--benchmark", help="Returns or prices of the market: a file, or a shipped data set.")
    ] = None,
    trials: Annotated[
        int, typer.Option("--trials", min=1, help="Strategies that this one was chosen from; the ledger may know of more.")
    ] = 1,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder; by default artifacts/judged/NAME-N.")] = None,
    column: Annotated[str | None, typer.Option("--column", help="Column of --returns, if its name is unusual.")] = None,
    cash_rate: Annotated[
        str | None, typer.Option("--cash-rate", help="Interest per year on idle cash: 0.03, 3%, or a file of rates.")
    ] = None,
    ledger: LedgerOption = True,
) -> None:
    """Judge anybody's strategy by its returns, or by its weights, which are traded again: a verdict, reasons, a report."""
    from tailguard.evaluate.judge import judge
    from tailguard.evaluate.record import RECORD_FOLDER, save_record
    from tailguard.market.rules import TradingRules

    given = returns or weights
    if given is None:
        raise ValueError("nothing to judge: give --returns FILE, or --weights FILE with --bars FILE")
    if weights is not None and bars is None:
        raise ValueError("--weights needs --bars: a file or a shipped data set that they trade")
    tree = settings.load()
    with console(stderr=True).status("evaluating"):
        judgement = judge(
            returns,
            weights,
            bars,
            benchmark,
            trials,
            cash_rate=_rate(cash_rate),
            trading=TradingRules(**tree.trading.model_dump(include=set(TradingRules.model_fields))),
            column=column,
            files=tree.files,
            title=given.name,
            source=bars or str(given),
            ledger="user" if ledger else None,
        )
        folder = output or free_folder("judged", str(given))
        save_record(judgement.evaluation, folder / RECORD_FOLDER)
    _show(judgement.evaluation, folder)


def _rate(text: str | None) -> float | Path | None:
    """Return a number, which may be in percent, or else the name of a file."""
    if text is None:
        return None
    try:
        return float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        return Path(text)


@takes_settings(argument=True)
def run_control(
    settings: Settings,
    data: DataOption = None,
    sharpe: Annotated[
        list[float] | None,
        typer.Option("--sharpe", help="Annual Sharpe ratio to plant; may be given several times. By default 0, 1, 2 and 3."),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--run", "-r", help="Folder; an existing one is resumed.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Plant edges of known strength into your own bars, train and judge: which edge does the agent learn, which is found?"""
    from tailguard.evaluate.record import source_name
    from tailguard.experiments import control
    from tailguard.experiments.prepared_market import load_source_of

    tree = settings.load()
    source = single_source(data, tree.data)
    folder = folder or free_folder("control", source)
    if not quiet:
        say(f"control: {folder} (after a stop, --run {folder} resumes it)", stderr=True)
    with progress_bar("control", quiet) as report_progress:
        found = control.run_control(
            load_source_of(tree, source), tree, sharpe or CONTROL_SHARPES, folder, source=source, report=report_progress
        )
    rows = [
        {
            "planted Sharpe ratio": f"{row.planted:g}",
            "oracle": f"{row.oracle_sharpe:.2f}",
            "verdict on the oracle": row.oracle_outcome,
            "agent": f"{row.sharpe.value:.2f} [{row.sharpe.low:.2f} to {row.sharpe.high:.2f}]",
            "learnt": "yes" if row.learnt else "no",
            "verdict on the agent": row.outcome,
        }
        for row in found.rows
    ]
    print_rows(f"{source_name(source)}: permuted bars with a planted edge", rows, Format.TABLE)
    for line in found.sentences():
        say(f"  - {line}")


def run_trials(
    path: Annotated[bool, typer.Option("--path", help="Print only where the ledger is.")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the ledger of trials: what was evaluated on which data, and how many different trials that makes."""
    from tailguard.evaluate.ledger import OFF, VARIABLE, count_each, user_ledger
    from tailguard.evaluate.record import source_name
    from tailguard.evaluate.report.formatting import moment

    ledger = user_ledger()
    if ledger is None:
        raise ValueError(f"the ledger is off: {VARIABLE} is set to {OFF!r}; unset it, or set it to a file")
    if path:
        say(str(ledger.path))
        return
    trials = ledger.trials()
    if not trials:
        say(f"no trials yet in {ledger.path}")
        return
    rows = [
        {
            "date": trial.date,
            "data": source_name(trial.source),
            "key": trial.data,
            "from": moment(trial.times[0]),
            "to": moment(trial.times[-1]),
            "bars": len(trial.times),
            "strategy": trial.title,
            "config": trial.config,
            "sharpe": round(trial.sharpe, 4),
            "different trials over its bars": different,
        }
        for trial, different in zip(trials, count_each(trials), strict=True)
    ]
    print_rows(f"{ledger.path} ({VARIABLE} moves it, or switches it off)", rows, output)


def _evaluate(run: "Run", ledger: bool) -> None:
    """Evaluate the agent of a run, save the record and show it."""
    from tailguard.evaluate.ledger import user_ledger
    from tailguard.evaluate.record import RECORD_FOLDER, save_record
    from tailguard.experiments.evaluation import evaluate_run

    with console(stderr=True).status("evaluating"):
        evaluation = evaluate_run(run, user_ledger() if ledger else None)
        save_record(evaluation, run.path / RECORD_FOLDER)
    _show(evaluation, run.path)


def _show(evaluation: "Evaluation", folder: Path) -> None:
    """Write the report and print the verdict with its reasons, both with the same names of the accounts."""
    from tailguard.evaluate.report.report import write_report
    from tailguard.evaluate.report.sections.overview import with_page_names

    path = write_report(evaluation, folder / REPORT)
    say(with_page_names(evaluation, evaluation.verdict.headline), style="bold")
    for reason in evaluation.verdict.reasons:
        say(f"  - {with_page_names(evaluation, reason)}")
    say(f"report: {path}")
