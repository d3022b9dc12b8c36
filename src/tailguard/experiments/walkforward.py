"""Walk-forward: train an agent for every fold and seed, in parallel processes, and evaluate their decisions out of sample.

First an agent is selected for each fold, inside its training bars; then every seed trains it. The folder holds one file per
fold in `selection/` and one per (fold, seed) in `decisions/`, which appear when they are finished, and agents in `agents/`. A
walk-forward that was stopped continues with what has no file yet. Selections and trainings are tasks
(:mod:`tailguard.parallel.tasks`), which only compute; this process alone writes to the folder, and each file names what it is.
"""

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from stable_baselines3.common.logger import KVWriter, Logger

from tailguard.config import Config
from tailguard.evaluate.assessment import Context, Effort, assess
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.folds import Fold, WalkforwardConfig, longest_lookback, make_folds
from tailguard.evaluate.ledger import Ledger
from tailguard.evaluate.play import ReportProgress
from tailguard.evaluate.record import RECORD_FOLDER, Evaluation, save_record
from tailguard.evaluate.verdict import VerdictRules
from tailguard.experiments import stopped_at_once
from tailguard.experiments.callbacks import ShowProgress
from tailguard.experiments.decisions import Decisions, out_of_sample_decisions
from tailguard.experiments.engines import SERIAL, Engine
from tailguard.experiments.evaluation import (
    benchmark_accounts,
    calibration_of,
    fold_table,
    instrument_table,
    labelled_curves,
    provenance,
    warnings_of,
)
from tailguard.experiments.prepared_market import Split, fingerprint, market_features, prepare_market
from tailguard.experiments.run import require_free
from tailguard.experiments.selection import Selection, load_selection, save_selection, select, selection_table
from tailguard.experiments.training import build_model, train_model
from tailguard.io import checkpoint
from tailguard.io.atomic import atomic, clear_unfinished
from tailguard.io.lock import locked
from tailguard.io.reading import refusing
from tailguard.io.sealed import digest, read_sealed, sealed, write_sealed
from tailguard.market.features import FeatureSet
from tailguard.parallel.tasks import TaskExecutor, run_tasks
from tailguard.parallel.threads import conditions, differences, one_thread, warn_of_differences
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.validation import build

logger = logging.getLogger(__name__)
KIND = "decisions"
IDENTITY = "walkforward.json"
EngineName = Literal["process", "ray"]
# Of a selection, in trainings: for the bar of progress.
CHOICE_EFFORT = 16.0


class Pair(NamedTuple):
    """One training: a fold and a seed."""

    fold: Fold
    seed: int

    @property
    def name(self) -> str:
        """The name in messages and of files."""
        return f"fold-{self.fold.number}-seed-{self.seed}"


class Choice(NamedTuple):
    """The task to select the agent of one fold."""

    fold: Fold

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"selection of fold-{self.fold.number}"

    def work(self, run: "WalkforwardRun", reached: Callable[[float], None]) -> Selection:
        """Choose inside the training rows."""
        features = run.features if run.features is not None else market_features(run.bars, run.config)
        split = Split(self.fold.train, self.fold.test)
        return select(run.bars, run.config, split, features, lambda done, total, _: reached(done / total))


class Training(NamedTuple):
    """The task to train a pair.

    :param selection: what was chosen for its fold; None if nothing is to be chosen.
    """

    pair: Pair
    selection: Selection | None

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.pair.name

    def work(self, run: "WalkforwardRun", reached: Callable[[float], None]) -> "TrainedPair":
        """Train on the rows of the fold with the seed, and play the test."""
        pair, selection = self.pair, self.selection
        config = run.config if selection is None else selection.applied(run.config)
        training = config.training.model_copy(update={"seed": pair.seed})
        market = prepare_market(run.bars, config, Split(pair.fold.train, pair.fold.test), run.features)
        model = build_model(market, training)
        curves = Curves()
        model.set_logger(Logger(None, [curves]))
        progress = ShowProgress(lambda done, total, _: reached(done / total))
        horizon = None if selection is None else selection.horizon
        train_model(model, training.steps, [progress], horizon=horizon, minutes=training.minutes)
        model.logger.dump(model.num_timesteps)  # of the last update
        decisions = out_of_sample_decisions(model, market, pair.fold.span, run.warmup)
        agent = io.BytesIO()
        model.save(agent)
        tree = {
            "of": run.label(pair.fold, pair.seed),
            "conditions": conditions(),
            "decisions": decisions.tree(),
            "curves": curves.table().to_csv(index=False),
            "agent_hash": agent_hash(model, market.scaler.state_dict(), selection),
        }
        return TrainedPair(agent.getvalue(), checkpoint.to_bytes(tree, kind=KIND))


class TrainedPair(NamedTuple):
    """The contents of the two files of a pair."""

    agent: bytes
    decisions: bytes


@dataclass(frozen=True, eq=False)
class PairResult:
    """The result of a finished pair.

    :param decisions: over the test bars of the fold.
    :param curves: of the training, one row per update, with the column `step`.
    :param agent_hash: checksum of everything that the agent has learnt, the scale of its features included.
    :param conditions: of the machine that trained it.
    """

    decisions: Decisions
    curves: pd.DataFrame
    agent_hash: str
    conditions: dict[str, str]


@dataclass(frozen=True, eq=False)
class WalkforwardRun:
    """The data, settings and folder that all trainings of a walk-forward share.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param config: of the trainings.
    :param warmup: rows over which the recurrent state is filled before a test.
    :param folder: of the walk-forward.
    :param features: of the bars, not scaled; None lets every pair compute them.
    :param identity: checksum of the settings and the data.
    """

    bars: pd.DataFrame
    config: Config
    warmup: int
    folder: Path
    features: FeatureSet | None = None
    identity: str = ""

    def label(self, fold: Fold, seed: int | None = None) -> dict[str, Any]:
        """Return what a file of this walk-forward is about: settings, data, fold and seed."""
        return {"walkforward": self.identity, "fold": fold.number, "rows": [*fold.train, *fold.test], "seed": seed}

    def selection_file(self, fold: Fold) -> Path:
        """Return the file with what was chosen for a fold."""
        return self.folder / "selection" / f"fold-{fold.number}.json"

    def selection(self, fold: Fold) -> Selection | None:
        """Return what was chosen for a fold; None if nothing is to be chosen."""
        return load_selection(self.selection_file(fold), self.label(fold)) if self.config.selects else None

    def decisions_file(self, pair: Pair) -> Path:
        """Return the file of a finished pair."""
        return self.folder / "decisions" / f"{pair.name}.safetensors"

    def agent_file(self, pair: Pair) -> Path:
        """Return the file of its agent."""
        return self.folder / "agents" / f"{pair.name}.safetensors"


@one_thread()
def walkforward(
    bars: pd.DataFrame,
    config: Config,
    settings: WalkforwardConfig,
    folder: Path,
    *,
    source: str,
    title: str = "",
    report: ReportProgress | None = None,
    rules: VerdictRules | None = None,
    effort: Effort | None = None,
    ledger: Ledger | None = None,
    engine: EngineName = "process",
    address: str | None = None,
) -> Evaluation:
    """Train and test fold by fold and seed by seed, evaluate the ensemble of the seeds, and write the record.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param config: of the trainings; seeds count on from ``config.training.seed``.
    :param settings: folds, seeds, embargo, processes.
    :param folder: of the walk-forward. Finished pairs in it are not trained again; the record goes to `evaluation/` in it.
    :param source: name of the data.
    :param title: one line; empty makes one.
    :param report: called with the steps done, the steps in all, and a line.
    :param rules: of the verdict.
    :param effort: of the computation.
    :param ledger: of trials; None keeps none.
    :param engine: ``process`` trains in processes of this machine, ``ray`` on a cluster, with the same results.
    :param address: of a Ray cluster; None starts one on this machine.
    :raises ValueError: if the settings do not fit the data, or if the folder holds anything else than this walk-forward.
    :raises Interrupted: when a signal stopped it; what is finished is kept.
    """
    features = market_features(bars, config)
    unusable = features.warmup
    folds = make_folds(len(bars), unusable, max(longest_lookback(config.features), unusable), settings)
    seeds = tuple(config.training.seed + i for i in range(settings.seeds))
    pairs = [Pair(fold, seed) for fold in folds for seed in seeds]
    # Settings that do not fit the data are refused while there is no folder yet; the first fold has the fewest rows.
    build_model(prepare_market(bars, config, Split(folds[0].train, folds[0].test), features), config.training)
    benchmark_accounts(config, _tested_window(bars, config, folds))  # one that does not fit is refused as well
    identity = _identity(config, settings, fingerprint(bars))
    run = WalkforwardRun(bars, config, settings.warmup, folder, features, digest(sealed(identity)))
    if not (folder / IDENTITY).exists():
        require_free(folder, "it holds no walk-forward that could be resumed; choose another folder")
    with locked(folder), stopped_at_once(f"`tailguard walkforward` with the same arguments and --run {folder} resumes it"):
        clear_unfinished(folder)
        _claim(folder, identity, source)
        train_all(run, folds, pairs, settings.jobs, report or _silent, engine, address)
        return _evaluated(run, settings, folds, seeds, source, title, rules, effort, ledger)


def _tested_window(bars: pd.DataFrame, config: Config, folds: Sequence[Fold]) -> BacktestWindow:
    """Return the tests of all folds, one after another."""
    return BacktestWindow(bars, config.trading, (folds[0].span[0], folds[-1].span[1]))


def _evaluated(
    run: WalkforwardRun,
    settings: WalkforwardConfig,
    folds: Sequence[Fold],
    seeds: tuple[int, ...],
    source: str,
    title: str,
    rules: VerdictRules | None,
    effort: Effort | None,
    ledger: Ledger | None,
) -> Evaluation:
    """Evaluate the ensemble of the seeds, all folds in a row, and write the record."""
    bars, config = run.bars, run.config
    selections = {fold.number: run.selection(fold) for fold in folds}
    pairs = [Pair(fold, seed) for fold in folds for seed in seeds]
    results = {(pair.fold.number, pair.seed): load_result(run.decisions_file(pair), run.label(*pair)) for pair in pairs}
    _warn_of_other_machines(results.values())
    by_seed = {seed: [results[fold.number, seed].decisions for fold in folds] for seed in seeds}
    window = _tested_window(bars, config, folds)
    fold_rows = [fold.test[1] - fold.test[0] for fold in folds]
    context = Context(
        title=title or f"{source}: {len(folds)} folds, {len(seeds)} seeds",
        source=source,
        folds=fold_table(folds, bars),
        training=pd.concat([labelled_curves(results[key].curves, *key) for key in results], ignore_index=True),
        provenance=provenance(config, bars, seeds, settings.trials),
        warnings=[line for key in results for line in warnings_of(results[key].curves, f"fold {key[0]}, seed {key[1]}")],
        critic_calibration=calibration_of(window, by_seed[seeds[0]], config.training.gamma, config.training.risk),
        selection=selection_table(selections),
        baselines=benchmark_accounts(config, window),
    )
    targets = {f"seed {seed}": np.concatenate([part.targets for part in parts]) for seed, parts in by_seed.items()}
    if config.training.pooled:
        context = replace(context, instruments=instrument_table(window, np.mean(list(targets.values()), axis=0)))
    evaluation = assess(window, targets, fold_rows, context, rules, effort, ledger)
    save_record(evaluation, run.folder / RECORD_FOLDER)
    return evaluation


def train_all(
    run: WalkforwardRun,
    folds: Sequence[Fold],
    pairs: Sequence[Pair],
    jobs: int | None,
    report: ReportProgress,
    engine: EngineName = "process",
    address: str | None = None,
) -> None:
    """Select an agent for each fold and train the pairs, as far as that is not done. No other process may do so.

    :param run: what they have in common.
    :param folds: all of them.
    :param pairs: all of them.
    :param jobs: processes on this machine; 1 stays in this one, None takes one per core.
    :param report: see :func:`walkforward`.
    :param engine: see :func:`walkforward`.
    :param address: see :func:`walkforward`.
    """
    choices = [Choice(fold) for fold in folds if run.config.selects]
    progress = Progress([*choices, *pairs], report)
    chosen: dict[int, Selection | None] = {fold.number: _kept_selection(run, fold) for fold in folds}
    kept = {pair.name for pair in pairs if _is_kept(run, pair)}
    missing = [pair for pair in pairs if pair.name not in kept]
    for name in [choice.name for choice in choices if chosen[choice.fold.number] is not None] + sorted(kept):
        progress.finished(name)

    def trainings(fold: Fold) -> list[Training]:
        return [Training(pair, chosen[fold.number]) for pair in missing if pair.fold == fold]

    def keep(task: Any, result: Any) -> list[Training]:
        """Write the result of a task; return the tasks that it makes possible."""
        if isinstance(task, Choice):
            save_selection(result, run.selection_file(task.fold), run.label(task.fold))
            chosen[task.fold.number] = result
        else:
            for path, content in zip((run.agent_file(task.pair), run.decisions_file(task.pair)), result, strict=True):
                with atomic(path) as file:
                    file.write(content)
        progress.finished(task.name)
        return trainings(task.fold) if isinstance(task, Choice) else []

    # Pairs need what was chosen for their fold.
    waiting: list[Choice | Training] = [choice for choice in choices if chosen[choice.fold.number] is None]
    ready = [fold for fold in folds if chosen[fold.number] is not None or not run.config.selects]
    waiting += [training for fold in ready for training in trainings(fold)]
    if waiting:
        run_tasks(waiting, _executor(run, engine, address, jobs, len(waiting)), keep, progress.reached)


def _executor(run: WalkforwardRun, engine: EngineName, address: str | None, jobs: int | None, tasks: int) -> TaskExecutor:
    if engine == "ray":
        return Engine("ray", address).executor(run)
    alone = tasks == 1 and not run.config.selects
    return (SERIAL if alone else Engine("process", processes=jobs)).executor(run)


def _kept_selection(run: WalkforwardRun, fold: Fold) -> Selection | None:
    """Return what was chosen for a fold, if that is in its file; one that cannot be used is made again, with a warning."""
    if not run.config.selects or not run.selection_file(fold).exists():
        return None
    try:
        return run.selection(fold)
    except ValueError as error:
        logger.warning("%s; that is done now", error)
        return None


def _is_kept(run: WalkforwardRun, pair: Pair) -> bool:
    """Return True if the files of a pair are there and sound; if they cannot be used, it is trained again, with a warning."""
    if not run.decisions_file(pair).exists():
        return False
    try:
        load_result(run.decisions_file(pair), run.label(*pair))
        if not run.agent_file(pair).exists():
            raise ValueError(f"{run.agent_file(pair)} is missing")
    except ValueError as error:
        logger.warning("%s; %s is trained again", error, pair.name)
        return False
    return True


def load_result(path: Path, label: Mapping[str, Any] | None = None) -> PairResult:
    """Read a finished pair.

    :param label: what the file must be about, see :meth:`WalkforwardRun.label`; None takes any.
    :raises ValueError: if the file is damaged, or is about something else.
    """
    tree = checkpoint.load(path, kind=KIND)
    with checkpoint.refusing(str(path)):
        found = tree.get("of")
        if label is not None and found != label:
            told = "does not say what it is about" if found is None else f"is about {_text(found)}"
            raise ValueError(f"{told}, not about {_text(label)}")
        curves = pd.read_csv(io.StringIO(tree["curves"]))
        return PairResult(Decisions.from_tree(tree["decisions"]), curves, tree["agent_hash"], dict(tree.get("conditions", {})))


def _text(label: Mapping[str, Any]) -> str:
    """Return the label of a file in a few words."""
    return f"fold {label['fold']}, seed {label['seed']} of the walk-forward {label['walkforward'][:8]}"


def _warn_of_other_machines(results: Iterable[PairResult]) -> None:
    """Log one line if pairs were trained under different conditions: trained elsewhere, their bits would differ."""
    first, *others = [result.conditions for result in results]
    other = next((found for found in others if found != first), None)
    if other is not None:
        logger.warning(
            "pairs were trained under different conditions (%s): on one kind of machine they would end with other bits",
            differences(first, other),
        )


def agent_hash(model: DistributionalPPO, scaler: Mapping[str, Any], selection: Selection | None) -> str:
    """Return a checksum of all that an agent has learnt: weights, statistics, the scale of its features, and its selection."""
    chosen = None if selection is None else json.dumps(selection.tree())
    tree = {"agent": model.agent_state(), "scaler": scaler, "selection": chosen}
    return hashlib.sha256(checkpoint.to_bytes(tree, kind=KIND)).hexdigest()


class Curves(KVWriter):
    """The numbers that a model logs, one row per update."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Append a row; called by the logger."""
        numbers = {key: float(value) for key, value in key_values.items() if isinstance(value, int | float)}
        self.rows.append({"step": step, **{key: value for key, value in numbers.items() if not key.startswith("time/")}})

    def close(self) -> None:
        """Do nothing: no file is open."""

    def table(self) -> pd.DataFrame:
        """Return one row per update, one column per metric."""
        return pd.DataFrame(self.rows) if self.rows else pd.DataFrame({"step": []})


class Progress:
    """The progress of all choices and trainings.

    :param tasks: all of them, finished ones included.
    :param report: called with the percent that is done, 100, and a line.
    """

    def __init__(self, tasks: Sequence[Choice | Pair], report: ReportProgress) -> None:
        self.done = {task.name: 0.0 for task in tasks}
        # A choice trains many agents, a pair one.
        self.effort = {task.name: CHOICE_EFFORT if isinstance(task, Choice) else 1.0 for task in tasks}
        self.report, self.complete = report, 0

    def reached(self, name: str, share: float) -> None:
        """Record how much of a task is done."""
        self.done[name] = max(min(share, 1.0), self.done[name])  # messages of a finished task may come late
        self._report(name)

    def finished(self, name: str) -> None:
        """Record that a task is on disk."""
        self.complete += 1
        self.done[name] = 1.0
        self._report(name)

    def _report(self, name: str) -> None:
        total = sum(self.effort.values())
        done = sum(self.effort[task] * share for task, share in self.done.items())
        self.report(round(100.0 * done / total), 100, f"{self.complete} of {len(self.done)} done, at {name}")


def _claim(folder: Path, identity: Mapping[str, Any], source: str) -> None:
    """Refuse a folder with results of something else; mark an empty one, and note where the data are for what follows."""
    path = folder / IDENTITY
    if not path.exists():
        write_sealed(path, {**identity, "conditions": conditions(), "source": source})
        return
    if identity_of(folder) != digest(sealed(identity)):
        raise ValueError(f"{folder} holds a walk-forward of other data or another configuration; choose another folder")
    warn_of_differences(str(folder), read_sealed(path).get("conditions"))


def identity_of(folder: Path) -> str:
    """Return the checksum of the settings and the data of the walk-forward in a folder."""
    kept = read_sealed(folder / IDENTITY)
    with refusing(folder / IDENTITY):
        # Read as a configuration, since a folder of an older version lacks settings that have been added since.
        known = _identity(build(Config, kept["config"]), build(WalkforwardConfig, kept["walkforward"]), kept["data"])
    return digest(sealed(known))


def source_of(folder: Path) -> str | None:
    """Return where the data of the walk-forward in a folder were; None if an earlier version made it."""
    source = read_sealed(folder / IDENTITY).get("source")
    return None if source is None else str(source)


def _identity(config: Config, settings: WalkforwardConfig, data: str) -> dict[str, Any]:
    """Return everything that the decisions of a pair depend on."""
    # More seeds may join a walk-forward, and a pair does not depend on the others.
    shape = settings.model_dump(mode="json", exclude={"jobs", "trials", "seeds"})
    # The guard and the period that is shown come after the agent's decisions.
    outside = {"trading": {"guard", "tail_period"}}
    trained = config.model_dump(mode="json", include={"trading", "features", "training", "selection"}, exclude=outside)
    return {"config": trained, "walkforward": shape, "data": data}


def _silent(done: int, total: int, line: str) -> None:
    """Report to nobody."""
