"""Walk-forward: train an agent for every fold and seed, in parallel processes, and evaluate their decisions out of sample.

First an agent is selected for each fold, inside its training bars; then every seed trains it. The folder holds one file per
fold in `selection/` and one per (fold, seed) in `decisions/`, which appear when they are finished, and agents in `agents/`. A
walk-forward that was stopped continues with what has no file yet.
"""

import hashlib
import io
import json
import multiprocessing
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from stable_baselines3.common.logger import KVWriter, Logger

from tailguard.config import Config
from tailguard.evaluate.assessment import Context, Effort, assess
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.folds import Fold, WalkforwardConfig, longest_lookback, make_folds
from tailguard.evaluate.ledger import Ledger
from tailguard.evaluate.play import ReportProgress
from tailguard.evaluate.record import RECORD_FOLDER, Evaluation, save_record
from tailguard.evaluate.verdict import VerdictRules
from tailguard.experiments.callbacks import ShowProgress
from tailguard.experiments.decisions import Decisions, out_of_sample_decisions
from tailguard.experiments.evaluation import (
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
from tailguard.io.atomic import atomic
from tailguard.market.features import FeatureSet
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.validation import build

KIND = "decisions"
IDENTITY = "walkforward.json"
POLL_SECONDS = 0.2
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

    def file(self, run: "WalkforwardRun") -> Path:
        """Return the file that appears when it is finished."""
        return run.decisions_file(self)

    def work(self, run: "WalkforwardRun", reached: Callable[[str, float], None]) -> None:
        """Train; see :func:`train_pair`."""
        train_pair(run, self, reached)


class Choice(NamedTuple):
    """The selection of the agent of one fold."""

    fold: Fold

    @property
    def name(self) -> str:
        """The name in messages and of files."""
        return f"selection of fold-{self.fold.number}"

    def file(self, run: "WalkforwardRun") -> Path:
        """Return the file that appears when it is finished."""
        return run.selection_file(self.fold)

    def work(self, run: "WalkforwardRun", reached: Callable[[str, float], None]) -> None:
        """Choose; see :func:`select_for_fold`."""
        select_for_fold(run, self.fold, reached)


@dataclass(frozen=True, eq=False)
class PairResult:
    """The result of a finished pair.

    :param decisions: over the test bars of the fold.
    :param curves: of the training, one row per update, with the column `step`.
    :param agent_hash: checksum of everything that the agent has learnt, the scale of its features included.
    """

    decisions: Decisions
    curves: pd.DataFrame
    agent_hash: str


@dataclass(frozen=True, eq=False)
class WalkforwardRun:
    """The data, settings and folder that all trainings of a walk-forward share.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param config: of the trainings.
    :param warmup: rows over which the recurrent state is filled before a test.
    :param folder: of the walk-forward.
    :param features: of the bars, not scaled; None lets every pair compute them.
    """

    bars: pd.DataFrame
    config: Config
    warmup: int
    folder: Path
    features: FeatureSet | None = None

    def selection_file(self, fold: Fold) -> Path:
        """Return the file with what was chosen for a fold."""
        return self.folder / "selection" / f"fold-{fold.number}.json"

    def selection(self, fold: Fold) -> Selection | None:
        """Return what was chosen for a fold; None if nothing is to be chosen."""
        return load_selection(self.selection_file(fold)) if self.config.selects else None

    def decisions_file(self, pair: Pair) -> Path:
        """Return the file of a finished pair."""
        return self.folder / "decisions" / f"{pair.name}.safetensors"

    def agent_file(self, pair: Pair) -> Path:
        """Return the file of its agent."""
        return self.folder / "agents" / f"{pair.name}.safetensors"


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
    :raises ValueError: if the settings do not fit the data, or if the folder holds anything else than this walk-forward.
    """
    features = market_features(bars, config)
    unusable = features.warmup
    folds = make_folds(len(bars), unusable, max(longest_lookback(config.features), unusable), settings)
    seeds = tuple(config.training.seed + i for i in range(settings.seeds))
    pairs = [Pair(fold, seed) for fold in folds for seed in seeds]
    # Settings that do not fit the data are refused while there is no folder yet; the first fold has the fewest rows.
    build_model(prepare_market(bars, config, Split(folds[0].train, folds[0].test), features), config.training)
    _claim(folder, config, settings, bars)
    run = WalkforwardRun(bars, config, settings.warmup, folder, features)
    train_all(run, folds, pairs, settings.jobs or os.cpu_count() or 1, report or _silent)
    selections = {fold.number: run.selection(fold) for fold in folds}
    results = {(pair.fold.number, pair.seed): load_result(run.decisions_file(pair)) for pair in pairs}
    by_seed = {seed: [results[fold.number, seed].decisions for fold in folds] for seed in seeds}
    window = BacktestWindow(bars, config.trading, (folds[0].span[0], folds[-1].span[1]))
    fold_rows = [fold.test[1] - fold.test[0] for fold in folds]
    context = Context(
        title=title or f"{source}: {len(folds)} folds, {len(seeds)} seeds",
        source=source,
        folds=fold_table(folds, bars),
        training=pd.concat([labelled_curves(results[key].curves, *key) for key in results], ignore_index=True),
        provenance=provenance(config, bars, seeds, settings.trials),
        warnings=[line for key in results for line in warnings_of(results[key].curves, f"fold {key[0]}, seed {key[1]}")],
        critic_calibration=calibration_of(window, by_seed[seeds[0]], config.training.gamma),
        selection=selection_table(selections),
    )
    targets = {f"seed {seed}": np.concatenate([part.targets for part in parts]) for seed, parts in by_seed.items()}
    if config.training.pooled:
        context = replace(context, instruments=instrument_table(window, np.mean(list(targets.values()), axis=0)))
    evaluation = assess(window, targets, fold_rows, context, rules, effort, ledger)
    save_record(evaluation, folder / RECORD_FOLDER)
    return evaluation


def train_all(run: WalkforwardRun, folds: Sequence[Fold], pairs: Sequence[Pair], jobs: int, report: ReportProgress) -> None:
    """Select an agent for each fold and train the pairs, as far as that is not done.

    :param run: what they have in common.
    :param folds: all of them.
    :param pairs: all of them.
    :param jobs: processes; 1 stays in this one.
    :param report: see :func:`walkforward`.
    """
    choosing = [Choice(fold) for fold in folds] if run.config.selects else []
    tasks: list[Choice | Pair] = [*choosing, *pairs]
    progress = Progress(tasks, report)
    for path in [run.decisions_file(pair) for pair in pairs]:
        if path.exists():
            load_result(path)  # a damaged file is better found now than after hours
    waiting = [task for task in tasks if not task.file(run).exists()]
    for task in tasks:
        if task not in waiting:
            progress.finished(task.name)
    if jobs == 1 or len(waiting) <= 1:
        for task in waiting:
            task.work(run, progress.reached)
            progress.finished(task.name)
        return
    context = multiprocessing.get_context("spawn")  # forking a process that has started threads may lock up
    messages: Queue[tuple[str, float]] = context.Queue()
    processes = min(jobs, len(waiting))
    with ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(run, messages)) as pool:
        try:
            # Pairs need what was chosen for their fold, so that all choices come first.
            for kind in (Choice, Pair):
                running = {pool.submit(_work, task): task for task in waiting if isinstance(task, kind)}
                _wait_for_all(running, messages, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # trainings that run already are finished and kept
            raise


def select_for_fold(run: WalkforwardRun, fold: Fold, reached: Callable[[str, float], None]) -> None:
    """Choose an agent inside the training rows of a fold, and keep the choice.

    :param run: what all folds have in common.
    :param fold: its training rows.
    :param reached: called with the name of the choice and the share of it that is done.
    """
    torch.set_num_threads(1)
    features = run.features if run.features is not None else market_features(run.bars, run.config)
    name = Choice(fold).name
    chosen = select(
        run.bars, run.config, Split(fold.train, fold.test), features, lambda done, total, _: reached(name, done / total)
    )
    save_selection(chosen, run.selection_file(fold))


def train_pair(run: WalkforwardRun, pair: Pair, reached: Callable[[str, float], None]) -> None:
    """Train on the rows of a fold with a seed, play the test, and keep the agent and its decisions.

    :param run: what all pairs have in common.
    :param pair: the fold and the seed.
    :param reached: called with the name of the pair and the share of it that is done.
    """
    torch.set_num_threads(1)  # small networks are slower on more, and the pairs share the cores
    selection = run.selection(pair.fold)
    config = run.config if selection is None else selection.applied(run.config)
    training = config.training.model_copy(update={"seed": pair.seed})
    market = prepare_market(run.bars, config, Split(pair.fold.train, pair.fold.test), run.features)
    model = build_model(market, training)
    curves = Curves()
    model.set_logger(Logger(None, [curves]))
    progress = ShowProgress(lambda done, total, _: reached(pair.name, done / total))
    train_model(model, training.steps, [progress], minutes=training.minutes)
    model.logger.dump(model.num_timesteps)  # of the last update
    decisions = out_of_sample_decisions(model, market, pair.fold.span, run.warmup)
    run.agent_file(pair).parent.mkdir(parents=True, exist_ok=True)
    model.save(run.agent_file(pair))
    digest = agent_hash(model, market.scaler.state_dict(), selection)
    tree = {"decisions": decisions.tree(), "curves": curves.table().to_csv(index=False), "agent_hash": digest}
    checkpoint.save(run.decisions_file(pair), tree, kind=KIND)


def load_result(path: Path) -> PairResult:
    """Read a finished pair.

    :raises ValueError: if the file is damaged; delete it to have the pair trained again.
    """
    tree = checkpoint.load(path, kind=KIND)
    curves = pd.read_csv(io.StringIO(tree["curves"]))
    return PairResult(Decisions.from_tree(tree["decisions"]), curves, tree["agent_hash"])


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

    def __init__(self, tasks: Sequence["Choice | Pair"], report: ReportProgress) -> None:
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


# Given to a worker process once, so that it does not travel with every pair.
_shared: list[tuple[WalkforwardRun, "Queue[tuple[str, float]]"]] = []


def _start_worker(run: WalkforwardRun, messages: "Queue[tuple[str, float]]") -> None:
    _shared[:] = [(run, messages)]


def _work(task: "Choice | Pair") -> str:
    run, messages = _shared[0]
    task.work(run, lambda name, share: messages.put((name, share)))
    return task.name


def _wait_for_all(
    running: dict[Future[str], "Choice | Pair"], messages: "Queue[tuple[str, float]]", progress: Progress
) -> None:
    """Pass progress on until all are done; the first error ends it."""
    while running:
        done, _ = wait(running, timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
        for name, share in _drained(messages):
            progress.reached(name, share)
        for future in done:
            running.pop(future)
            progress.finished(future.result())


def _drained(messages: "Queue[tuple[str, float]]") -> Iterator[tuple[str, float]]:
    while True:
        try:
            yield messages.get_nowait()
        except queue.Empty:
            return


def _claim(folder: Path, config: Config, settings: WalkforwardConfig, bars: pd.DataFrame) -> None:
    """Refuse a folder with results of something else; mark an empty one."""
    path, identity = folder / IDENTITY, _identity(config, settings, fingerprint(bars))
    if not path.exists():
        require_free(folder, "it holds no walk-forward that could be resumed; choose another folder")
        with atomic(path) as file:
            file.write(json.dumps(identity, indent=2).encode())
        return
    kept = json.loads(path.read_text(encoding="utf-8"))
    # Read as a configuration, since a folder of an older version lacks settings that have been added since.
    known = _identity(build(Config, kept["config"]), build(WalkforwardConfig, kept["walkforward"]), kept["data"])
    if known != identity:
        raise ValueError(f"{folder} holds a walk-forward of other data or another configuration; choose another folder")


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
