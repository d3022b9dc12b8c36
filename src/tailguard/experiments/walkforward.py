"""Walk-forward with trainings: every fold and seed an agent of its own, side by side, each finished once and for all.

The folder of a run holds one file per (fold, seed) in `decisions/`, which appears when the pair is finished, and its agent in
`agents/`. A run that was stopped goes on with the pairs that have no file yet.
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

import pandas as pd
import torch
from stable_baselines3.common.logger import KVWriter, Logger

from tailguard.config import Config
from tailguard.evaluate.assessment import Context, Effort, assess
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.record_files import RECORD, save
from tailguard.evaluate.verdict import VerdictRules
from tailguard.evaluate.walkforward import Fold, WalkforwardConfig, longest_lookback, make_folds
from tailguard.experiments.callbacks import Progress
from tailguard.experiments.out_of_sample import Decisions, calibration_of, decide, fold_table, provenance
from tailguard.experiments.run import fingerprint
from tailguard.experiments.training import Split, build_model, prepare_market
from tailguard.io import checkpoint
from tailguard.io.atomic import atomic
from tailguard.market.features import build_features
from tailguard.ppo.algorithm import DistributionalPPO

KIND = "decisions"
IDENTITY = "walkforward.json"
POLL_SECONDS = 0.2

Report = Callable[[int, int, str], None]


class Pair(NamedTuple):
    """One training: a fold and a seed."""

    fold: Fold
    seed: int

    @property
    def name(self) -> str:
        """For people and files."""
        return f"fold-{self.fold.number}-seed-{self.seed}"


@dataclass(frozen=True, eq=False)
class Outcome:
    """What is kept of a finished pair.

    :param decisions: over the test bars of the fold.
    :param curves: of the training, one row per update, with the column `step`.
    :param agent_hash: checksum of everything that the agent has learnt, the scale of its features included.
    """

    decisions: Decisions
    curves: pd.DataFrame
    agent_hash: str


@dataclass(frozen=True, eq=False)
class Job:
    """What every process needs to run any pair.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param config: of the trainings.
    :param warmup: rows over which memory is filled before a test.
    :param folder: of the run.
    """

    bars: pd.DataFrame
    config: Config
    warmup: int
    folder: Path

    def decisions_file(self, pair: Pair) -> Path:
        """Where a finished pair is kept."""
        return self.folder / "decisions" / f"{pair.name}.safetensors"

    def agent_file(self, pair: Pair) -> Path:
        """Where its agent is kept."""
        return self.folder / "agents" / f"{pair.name}.safetensors"


def walkforward(
    bars: pd.DataFrame,
    config: Config,
    settings: WalkforwardConfig,
    folder: Path,
    *,
    source: str,
    title: str = "",
    report: Report | None = None,
    rules: VerdictRules | None = None,
    effort: Effort | None = None,
    lineage: list[dict[str, Any]] | None = None,
    attack: pd.DataFrame | None = None,
) -> Evaluation:
    """Train and test fold by fold and seed by seed, judge the ensemble of the seeds, and write the record.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param config: of the trainings; seeds count on from ``config.training.seed``.
    :param settings: folds, seeds, embargo, processes.
    :param folder: of the run. What is finished there already is not trained again; the record goes to `evaluation/` in it.
    :param source: name of the data.
    :param title: one line; empty makes one.
    :param report: called with the steps done, the steps in all, and a line.
    :param rules: of the verdict.
    :param effort: of the computation.
    :param lineage: of a population.
    :param attack: table of attacks.
    :raises ValueError: if the folder holds a run of other data or another configuration.
    """
    unusable = build_features(bars, config.features).warmup
    folds = make_folds(len(bars), unusable, max(longest_lookback(config.features), unusable), settings)
    seeds = tuple(config.training.seed + i for i in range(settings.seeds))
    pairs = [Pair(fold, seed) for fold in folds for seed in seeds]
    _claim(folder, config, settings, bars)
    job = Job(bars, config, settings.warmup, folder)
    run_pairs(job, pairs, settings.jobs or os.cpu_count() or 1, report or _silent)
    outcomes = {(pair.fold.number, pair.seed): load_outcome(job.decisions_file(pair)) for pair in pairs}
    by_seed = {seed: [outcomes[fold.number, seed].decisions for fold in folds] for seed in seeds}
    window = BacktestWindow(bars, config.trading, (folds[0].span[0], folds[-1].span[1]))
    fold_rows = [fold.test[1] - fold.test[0] for fold in folds]
    context = Context(
        title=title or f"{source}: {len(folds)} folds, {len(seeds)} seeds",
        source=source,
        folds=fold_table(folds, bars),
        training=pd.concat([_labelled(outcomes[key].curves, *key) for key in outcomes], ignore_index=True),
        provenance=provenance(config, bars, seeds, settings.trials),
        warnings=[line for key in outcomes for line in warnings_of(outcomes[key].curves, f"fold {key[0]}, seed {key[1]}")],
        calibration=calibration_of(window, by_seed[seeds[0]], config.training.gamma),
        lineage=lineage,
        attack=attack,
    )
    targets = {f"seed {seed}": _chained(parts) for seed, parts in by_seed.items()}
    evaluation = assess(window, targets, fold_rows, context, rules, effort)
    save(evaluation, folder / RECORD)
    return evaluation


def run_pairs(job: Job, pairs: Sequence[Pair], jobs: int, report: Report) -> None:
    """Run the pairs that are not finished.

    :param job: what they have in common.
    :param pairs: all of them.
    :param jobs: processes; 1 stays in this one.
    :param report: see :func:`walkforward`.
    """
    tally = Tally(pairs, job.config.training.steps, report)
    waiting = []
    for pair in pairs:
        if job.decisions_file(pair).exists():
            load_outcome(job.decisions_file(pair))  # a damaged file is better found now than after hours
            tally.finished(pair.name)
        else:
            waiting.append(pair)
    if jobs == 1 or len(waiting) <= 1:
        for pair in waiting:
            run_pair(job, pair, tally.reached)
            tally.finished(pair.name)
        return
    context = multiprocessing.get_context("spawn")  # forking a process that has started threads may lock up
    messages: Queue[tuple[str, int]] = context.Queue()
    processes = min(jobs, len(waiting))
    with ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(job, messages)) as pool:
        running: dict[Future[str], Pair] = {pool.submit(_work, pair): pair for pair in waiting}
        try:
            _follow(running, messages, tally)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # trainings that run already are finished and kept
            raise


def run_pair(job: Job, pair: Pair, reached: Callable[[str, int], None]) -> None:
    """Train on the rows of a fold with a seed, play the test, keep the agent and what it did.

    :param job: what all pairs have in common.
    :param pair: the fold and the seed.
    :param reached: called with the name of the pair and its steps so far.
    """
    torch.set_num_threads(1)  # small networks are slower on more, and the pairs share the cores
    training = job.config.training.model_copy(update={"seed": pair.seed})
    market = prepare_market(job.bars, job.config, Split(pair.fold.train, pair.fold.test))
    model = build_model(market, training)
    curves = Curves()
    model.set_logger(Logger(None, [curves]))
    model.learn(training.steps, callback=Progress(lambda done, _: reached(pair.name, done)))
    model.logger.dump(model.num_timesteps)  # of the last update
    decisions = decide(model, market, job.config.trading, pair.fold.span, job.warmup)
    job.agent_file(pair).parent.mkdir(parents=True, exist_ok=True)
    model.save(job.agent_file(pair))
    digest = agent_hash(model, market.scaler.state_dict())
    tree = {"decisions": decisions.tree(), "curves": curves.table().to_csv(index=False), "agent_hash": digest}
    checkpoint.save(job.decisions_file(pair), tree, kind=KIND)


def load_outcome(path: Path) -> Outcome:
    """Read a finished pair.

    :raises ValueError: if the file is damaged; delete it to have the pair trained again.
    """
    tree = checkpoint.load(path, kind=KIND)
    curves = pd.read_csv(io.StringIO(tree["curves"]))
    return Outcome(Decisions.from_tree(tree["decisions"]), curves, tree["agent_hash"])


def agent_hash(model: DistributionalPPO, scaler: Mapping[str, Any]) -> str:
    """Checksum of all that an agent has learnt: weights, optimizer, statistics of observations, returns and features."""
    return hashlib.sha256(checkpoint.to_bytes({"agent": model.agent_state(), "scaler": scaler}, kind=KIND)).hexdigest()


def warnings_of(curves: pd.DataFrame, who: str) -> list[str]:
    """One sentence per warning of a training.

    :param curves: one row per update.
    :param who: how the sentence begins.
    """
    lines = []
    for column in curves.columns:
        if str(column).startswith("warn/"):
            count = int((curves[column].fillna(0.0) > 0.0).sum())
            what = str(column).removeprefix("warn/").replace("_", " ")
            lines += [f"{who}: {what} in {count} of {len(curves)} updates"] if count else []
    return lines


class Curves(KVWriter):
    """Keeps what a model logs, number by number."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """One row, called by the logger."""
        numbers = {key: float(value) for key, value in key_values.items() if isinstance(value, int | float)}
        self.rows.append({"step": step, **{key: value for key, value in numbers.items() if not key.startswith("time/")}})

    def close(self) -> None:
        """Nothing is open."""

    def table(self) -> pd.DataFrame:
        """One row per update, one column per metric."""
        return pd.DataFrame(self.rows) if self.rows else pd.DataFrame({"step": []})


class Tally:
    """Adds up the steps of all pairs for the report.

    :param pairs: all of them, finished ones included.
    :param steps: of each training.
    :param report: who is told.
    """

    def __init__(self, pairs: Sequence[Pair], steps: int, report: Report) -> None:
        self.done = {pair.name: 0 for pair in pairs}
        self.steps, self.report, self.complete = steps, report, 0

    def reached(self, name: str, done: int) -> None:
        """A pair has come this far."""
        self.done[name] = max(min(done, self.steps), self.done[name])  # messages of a finished pair may come late
        self._tell(name)

    def finished(self, name: str) -> None:
        """A pair is on disk."""
        self.complete += 1
        self.done[name] = self.steps
        self._tell(name)

    def _tell(self, name: str) -> None:
        line = f"{self.complete} of {len(self.done)} trainings done, at {name}"
        self.report(sum(self.done.values()), self.steps * len(self.done), line)


# What a worker process has been given once, so that it does not travel with every pair.
_given: list[tuple[Job, "Queue[tuple[str, int]]"]] = []


def _start_worker(job: Job, messages: "Queue[tuple[str, int]]") -> None:
    _given[:] = [(job, messages)]


def _work(pair: Pair) -> str:
    job, messages = _given[0]
    run_pair(job, pair, lambda name, done: messages.put((name, done)))
    return pair.name


def _follow(running: dict[Future[str], Pair], messages: "Queue[tuple[str, int]]", tally: Tally) -> None:
    """Pass progress on until all are done; the first error ends it."""
    while running:
        done, _ = wait(running, timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
        for name, steps in _drained(messages):
            tally.reached(name, steps)
        for future in done:
            running.pop(future)
            tally.finished(future.result())


def _drained(messages: "Queue[tuple[str, int]]") -> Iterator[tuple[str, int]]:
    while True:
        try:
            yield messages.get_nowait()
        except queue.Empty:
            return


def _claim(folder: Path, config: Config, settings: WalkforwardConfig, bars: pd.DataFrame) -> None:
    """Refuse a folder with results of something else; mark an empty one."""
    shape = settings.model_dump(exclude={"jobs", "trials", "seeds"})  # more seeds may join a run, and none of these matters
    trained = config.model_dump(mode="json", include={"trading", "features", "training"})
    text = json.dumps({"config": trained, "walkforward": shape, "data": fingerprint(bars)}, indent=2)
    path = folder / IDENTITY
    if path.exists():
        if path.read_text(encoding="utf-8") != text:
            raise ValueError(f"{folder} holds a walk-forward of other data or another configuration; give it another folder")
        return
    with atomic(path) as file:
        file.write(text.encode())


def _chained(parts: Sequence[Decisions]) -> Any:
    return pd.concat([pd.DataFrame(part.targets) for part in parts], ignore_index=True).to_numpy()


def _labelled(curves: pd.DataFrame, fold: int, seed: int) -> pd.DataFrame:
    return pd.concat([pd.DataFrame({"fold": fold, "seed": seed}, index=curves.index), curves], axis=1)


def _silent(done: int, total: int, line: str) -> None:
    """Tell nobody."""
