"""Walk-forward: train an agent for every fold and seed, in parallel processes, and evaluate their decisions out of sample.

The folder holds one file per (fold, seed) in `decisions/`, which appears when the pair is finished, and its agent in `agents/`.
A walk-forward that was stopped continues with the pairs that have no file yet.
"""

import hashlib
import io
import json
import multiprocessing
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
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
from tailguard.evaluate.play import ReportProgress
from tailguard.evaluate.record import RECORD_FOLDER, Evaluation, save_record
from tailguard.evaluate.verdict import VerdictRules
from tailguard.experiments.callbacks import ShowProgress
from tailguard.experiments.evaluation import (
    Decisions,
    calibration_of,
    fold_table,
    labelled_curves,
    out_of_sample_decisions,
    provenance,
    warnings_of,
)
from tailguard.experiments.prepared_market import Split, fingerprint, prepare_market
from tailguard.experiments.run import require_free
from tailguard.experiments.training import build_model, train_model
from tailguard.io import checkpoint
from tailguard.io.atomic import atomic
from tailguard.market.features import FeatureSet, build_features
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.validation import build

KIND = "decisions"
IDENTITY = "walkforward.json"
POLL_SECONDS = 0.2


class Pair(NamedTuple):
    """One training: a fold and a seed."""

    fold: Fold
    seed: int

    @property
    def name(self) -> str:
        """The name in messages and of files."""
        return f"fold-{self.fold.number}-seed-{self.seed}"


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
    :raises ValueError: if the settings do not fit the data, or if the folder holds anything else than this walk-forward.
    """
    features = build_features(bars, config.features)
    unusable = features.warmup
    folds = make_folds(len(bars), unusable, max(longest_lookback(config.features), unusable), settings)
    seeds = tuple(config.training.seed + i for i in range(settings.seeds))
    pairs = [Pair(fold, seed) for fold in folds for seed in seeds]
    # Settings that do not fit the data are refused while there is no folder yet; the first fold has the fewest rows.
    build_model(prepare_market(bars, config, Split(folds[0].train, folds[0].test), features), config.training)
    _claim(folder, config, settings, bars)
    run = WalkforwardRun(bars, config, settings.warmup, folder, features)
    train_pairs(run, pairs, settings.jobs or os.cpu_count() or 1, report or _silent)
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
        calibration=calibration_of(window, by_seed[seeds[0]], config.training.gamma),
    )
    targets = {f"seed {seed}": np.concatenate([part.targets for part in parts]) for seed, parts in by_seed.items()}
    evaluation = assess(window, targets, fold_rows, context, rules, effort)
    save_record(evaluation, folder / RECORD_FOLDER)
    return evaluation


def train_pairs(run: WalkforwardRun, pairs: Sequence[Pair], jobs: int, report: ReportProgress) -> None:
    """Train the pairs that are not finished.

    :param run: what they have in common.
    :param pairs: all of them.
    :param jobs: processes; 1 stays in this one.
    :param report: see :func:`walkforward`.
    """
    progress = PairProgress(pairs, run.config.training.steps, report)
    waiting = []
    for pair in pairs:
        if run.decisions_file(pair).exists():
            load_result(run.decisions_file(pair))  # a damaged file is better found now than after hours
            progress.finished(pair.name)
        else:
            waiting.append(pair)
    if jobs == 1 or len(waiting) <= 1:
        for pair in waiting:
            train_pair(run, pair, progress.reached)
            progress.finished(pair.name)
        return
    context = multiprocessing.get_context("spawn")  # forking a process that has started threads may lock up
    messages: Queue[tuple[str, int]] = context.Queue()
    processes = min(jobs, len(waiting))
    with ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(run, messages)) as pool:
        running: dict[Future[str], Pair] = {pool.submit(_work, pair): pair for pair in waiting}
        try:
            _wait_for_all(running, messages, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # trainings that run already are finished and kept
            raise


def train_pair(run: WalkforwardRun, pair: Pair, reached: Callable[[str, int], None]) -> None:
    """Train on the rows of a fold with a seed, play the test, and keep the agent and its decisions.

    :param run: what all pairs have in common.
    :param pair: the fold and the seed.
    :param reached: called with the name of the pair and its steps so far.
    """
    torch.set_num_threads(1)  # small networks are slower on more, and the pairs share the cores
    training = run.config.training.model_copy(update={"seed": pair.seed})
    market = prepare_market(run.bars, run.config, Split(pair.fold.train, pair.fold.test), run.features)
    model = build_model(market, training)
    curves = Curves()
    model.set_logger(Logger(None, [curves]))
    progress = ShowProgress(lambda done, _, __: reached(pair.name, done))
    train_model(model, training.steps, [progress], minutes=training.minutes)
    model.logger.dump(model.num_timesteps)  # of the last update
    decisions = out_of_sample_decisions(model, market, pair.fold.span, run.warmup)
    run.agent_file(pair).parent.mkdir(parents=True, exist_ok=True)
    model.save(run.agent_file(pair))
    digest = agent_hash(model, market.scaler.state_dict())
    tree = {"decisions": decisions.tree(), "curves": curves.table().to_csv(index=False), "agent_hash": digest}
    checkpoint.save(run.decisions_file(pair), tree, kind=KIND)


def load_result(path: Path) -> PairResult:
    """Read a finished pair.

    :raises ValueError: if the file is damaged; delete it to have the pair trained again.
    """
    tree = checkpoint.load(path, kind=KIND)
    curves = pd.read_csv(io.StringIO(tree["curves"]))
    return PairResult(Decisions.from_tree(tree["decisions"]), curves, tree["agent_hash"])


def agent_hash(model: DistributionalPPO, scaler: Mapping[str, Any]) -> str:
    """Return a checksum of all that an agent has learnt: weights, optimizer, statistics of observations, returns, features."""
    return hashlib.sha256(checkpoint.to_bytes({"agent": model.agent_state(), "scaler": scaler}, kind=KIND)).hexdigest()


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


class PairProgress:
    """The sum of the steps of all pairs.

    :param pairs: all of them, finished ones included.
    :param steps: of each training.
    :param report: called with the sum, the steps of all trainings, and a line.
    """

    def __init__(self, pairs: Sequence[Pair], steps: int, report: ReportProgress) -> None:
        self.done = {pair.name: 0 for pair in pairs}
        self.steps, self.report, self.complete = steps, report, 0

    def reached(self, name: str, done: int) -> None:
        """Record the steps of a pair."""
        self.done[name] = max(min(done, self.steps), self.done[name])  # messages of a finished pair may come late
        self._report(name)

    def finished(self, name: str) -> None:
        """Record that a pair is on disk."""
        self.complete += 1
        self.done[name] = self.steps
        self._report(name)

    def _report(self, name: str) -> None:
        line = f"{self.complete} of {len(self.done)} trainings done, at {name}"
        self.report(sum(self.done.values()), self.steps * len(self.done), line)


# Given to a worker process once, so that it does not travel with every pair.
_shared: list[tuple[WalkforwardRun, "Queue[tuple[str, int]]"]] = []


def _start_worker(run: WalkforwardRun, messages: "Queue[tuple[str, int]]") -> None:
    _shared[:] = [(run, messages)]


def _work(pair: Pair) -> str:
    run, messages = _shared[0]
    train_pair(run, pair, lambda name, done: messages.put((name, done)))
    return pair.name


def _wait_for_all(running: dict[Future[str], Pair], messages: "Queue[tuple[str, int]]", progress: PairProgress) -> None:
    """Pass progress on until all are done; the first error ends it."""
    while running:
        done, _ = wait(running, timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
        for name, steps in _drained(messages):
            progress.reached(name, steps)
        for future in done:
            running.pop(future)
            progress.finished(future.result())


def _drained(messages: "Queue[tuple[str, int]]") -> Iterator[tuple[str, int]]:
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
    trained = config.model_dump(mode="json", include={"trading", "features", "training"})
    return {"config": trained, "walkforward": shape, "data": data}


def _silent(done: int, total: int, line: str) -> None:
    """Report to nobody."""
