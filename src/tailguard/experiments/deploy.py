"""Make a run of a walk-forward: an agent that can be deployed.

A walk-forward judges a method: select inside the training bars, train several seeds, trade the mean of their decisions. The
agent that follows from it is an ensemble of seeds: that of the last fold, which was tested on the newest bars, or a refit, the
same method on all bars, as the fold after the last would have it.
"""

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tailguard.bounded_yaml import parse_yaml
from tailguard.config import Config
from tailguard.evaluate.folds import Fold
from tailguard.evaluate.play import ReportProgress
from tailguard.evaluate.record import RECORD_FOLDER, load_record
from tailguard.experiments import stopped_at_once
from tailguard.experiments.callbacks import ShowProgress
from tailguard.experiments.engines import SERIAL, Engine
from tailguard.experiments.prepared_market import Market, Split, fingerprint, load_source_of, market_features, prepare_market
from tailguard.experiments.run import SELECTION, Run, require_free
from tailguard.experiments.selection import Selection, save_selection, select
from tailguard.experiments.training import build_model, train_model
from tailguard.experiments.trials import Kept
from tailguard.experiments.walkforward import IDENTITY, Pair, WalkforwardRun, agent_hash, identity_of, load_result, source_of
from tailguard.io.atomic import UNFINISHED, atomic, make_folder, sync_folder
from tailguard.io.checkpoint import CheckpointError, largest_file
from tailguard.io.lock import locked
from tailguard.io.reading import read_regular
from tailguard.io.sealed import digest, sealed
from tailguard.parallel.tasks import run_tasks
from tailguard.parallel.threads import one_thread
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.validation import build

KEPT = "finished"  # trainings of a refit that was stopped


@dataclass(frozen=True, eq=False)
class FinishedWalkforward:
    """A walk-forward that has been evaluated, and its bars.

    :param folder: of the walk-forward.
    :param config: of its trainings.
    :param seeds: of its trainings.
    :param last: its last fold.
    :param source: of the bars.
    :param bars: those of the walk-forward, and any that have come since.
    :param n_bars: those of the walk-forward.
    """

    folder: Path
    config: Config
    seeds: tuple[int, ...]
    last: Fold
    source: str
    bars: pd.DataFrame
    n_bars: int


def open_walkforward(folder: Path, data: str | None = None) -> FinishedWalkforward:
    """Read a finished walk-forward and its bars.

    :param folder: of the walk-forward.
    :param data: where the bars are, if they have moved.
    :raises ValueError: if there is none, or if the bars are others.
    """
    if not (folder / IDENTITY).is_file() or not (folder / RECORD_FOLDER).is_dir():
        raise ValueError(f"{folder} is no finished walk-forward; `tailguard walkforward --run FOLDER` makes or resumes one")
    record = load_record(folder / RECORD_FOLDER)
    config = build(Config, parse_yaml(record.provenance.config))
    row = record.folds.iloc[-1]
    last = Fold(int(row["fold"]), *((int(row[f"{part}_first"]), int(row[f"{part}_last"])) for part in ("train", "test")))
    # A record names no folders, since it may be shown to others.
    source, n_bars = data or source_of(folder) or record.source, last.test[1]
    bars = load_source_of(config, source)
    if fingerprint(bars.iloc[:n_bars]) != record.provenance.fingerprint:
        raise ValueError(f"{source} is not what {folder} was made with: restore it, or name the bars with --data")
    return FinishedWalkforward(folder, config, record.provenance.seeds, last, source, bars, n_bars)


@one_thread()
def deploy_last_fold(walkforward: FinishedWalkforward, path: Path) -> Run:
    """Make a run of the agents of the last fold.

    :param walkforward: whose agents they are.
    :param path: of the new run.
    """
    done = walkforward
    if len(done.bars) != done.n_bars:
        raise ValueError(
            f"{done.source} has {len(done.bars) - done.n_bars} bars more than the walk-forward: deploy with --refit to learn "
            "from them, or restore the file"
        )
    warmup = done.config.walkforward.warmup
    trained = WalkforwardRun(done.bars, done.config, warmup, done.folder, identity=identity_of(done.folder))
    selection = trained.selection(done.last)
    files = {seed: trained.agent_file(Pair(done.last, seed)) for seed in done.seeds}
    market = prepare_market(done.bars, _applied(done.config, selection), Split(done.last.train, done.last.test))
    for seed, file in files.items():
        # A missing or damaged agent is better found before there is a run, and so is another one in its place.
        tested = trained.decisions_file(Pair(done.last, seed))
        advice = f"delete {tested}, and resume the walk-forward"
        try:
            model = DistributionalPPO.load(file)
        except CheckpointError as error:
            raise ValueError(f"{error}: {advice}") from None
        if (
            agent_hash(model, market.scaler.state_dict(), selection)
            != load_result(tested, trained.label(done.last, seed)).agent_hash
        ):
            raise ValueError(f"{file} is not the agent that was tested: {advice}")
    with _new_run(path) as folder:
        run = _create(done, folder, market, selection, "last fold")
        for seed, file in files.items():
            with atomic(folder / _member(seed)) as member:
                member.write(read_regular(file, largest_file()))
        run.note_agents()
    return Run.open(path)


class Refit(NamedTuple):
    """The task to train one seed on all bars."""

    seed: int

    @property
    def name(self) -> str:
        """The name in messages and of files."""
        return f"seed-{self.seed}"

    def work(self, shared: "RefitMarket", reached: Callable[[float], None]) -> bytes:
        """Return the content of the file of the agent."""
        training = shared.config.training.model_copy(update={"seed": self.seed})
        model = build_model(shared.market, training)
        progress = ShowProgress(lambda done, total, _: reached(done / total))
        train_model(model, training.steps, [progress], horizon=shared.horizon, minutes=training.minutes)
        agent = io.BytesIO()
        model.save(agent)
        return agent.getvalue()


class RefitMarket(NamedTuple):
    """Inputs that the trainings of a refit share.

    :param market: of all bars.
    :param config: with what was chosen.
    :param horizon: steps at which schedules end; None is the end of the training.
    """

    market: Market
    config: Config
    horizon: int | None


@one_thread()
def deploy_refit(walkforward: FinishedWalkforward, path: Path, report: ReportProgress, engine: Engine = SERIAL) -> Run:
    """Select and train as the walk-forward did, on all bars, and make a run of the agents.

    :param walkforward: whose method is applied.
    :param path: of the new run.
    :param report: called with the steps done, the steps in all, and a line.
    :param engine: where candidates and agents are trained; they are the same everywhere.
    """
    done = walkforward
    n, window = len(done.bars), done.last.train[1] - done.last.train[0]
    first = n - window if done.config.walkforward.mode == "rolling" else 0
    split = Split((first, n), (n, n))
    facts = {"settings": done.config.model_dump(mode="json"), "data": fingerprint(done.bars), "rows": [first, n]}
    again = "nothing was deployed; the same command continues with what is finished"
    with stopped_at_once(again), _new_run(path) as folder:
        kept = Kept(folder.parent / KEPT, digest(sealed(facts)))
        features, chosen = market_features(done.bars, done.config), None
        if done.config.selects:
            chosen = select(done.bars, done.config, split, features, report, engine=engine, kept=kept)
        config = _applied(done.config, chosen)
        market = prepare_market(done.bars, config, split, features)
        run = _create(done, folder, market, chosen, "refit")
        shared = RefitMarket(market, config, None if chosen is None else chosen.horizon)
        for seed, agent in _refitted(shared, done.seeds, kept, report, engine).items():
            with atomic(folder / _member(seed)) as file:
                file.write(agent)
        run.note_agents()
    return Run.open(path)


def _refitted(
    shared: RefitMarket, seeds: tuple[int, ...], kept: Kept, report: ReportProgress, engine: Engine
) -> dict[int, bytes]:
    """Return the files of the agents by seed; only those are trained that no earlier process has finished."""
    known = {seed: kept.load(Refit(seed).name, lambda agent: bytes(agent.tobytes())) for seed in seeds}
    agents = {seed: agent for seed, agent in known.items() if agent is not None}
    shares = {Refit(seed).name: float(seed in agents) for seed in seeds}

    def keep(task: Any, agent: bytes) -> list[Refit]:
        kept.save(task.name, np.frombuffer(agent, np.uint8))
        agents[task.seed] = agent
        reached(task.name, 1.0)
        return []

    def reached(name: str, share: float) -> None:
        shares[name] = max(shares[name], share)
        report(round(100.0 * sum(shares.values())), 100 * len(shares), f"training {name}")

    waiting = [Refit(seed) for seed in seeds if seed not in agents]
    if waiting:
        run_tasks(waiting, engine.executor(shared), keep, reached)
    return agents


def _applied(config: Config, selection: Selection | None) -> Config:
    return config if selection is None else selection.applied(config)


def _member(seed: int) -> str:
    return f"agents/seed-{seed}.safetensors"


def _create(done: FinishedWalkforward, folder: Path, market: Market, selection: Selection | None, kind: str) -> Run:
    """Make a run in a folder that lacks only the agents."""
    facts = {
        "ensemble": [_member(seed) for seed in done.seeds],
        "deployed": {"walkforward": str(done.folder.resolve()), "kind": kind},
    }
    run = Run.create(folder, done.config, done.source, market, facts)
    make_folder(folder / "agents")
    if selection is not None:
        save_selection(selection, folder / SELECTION, run.label)
    return run


@contextmanager
def _new_run(path: Path) -> Iterator[Path]:
    """Yield a folder that becomes the run when everything is in it; no other process makes the same run meanwhile.

    What is kept beside it stays after a stop, for the next process; without any, nothing stays.
    """
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    with locked(unfinished):
        deployed = False
        try:
            require_free(path, "another --run makes a new one")
            folder = unfinished / path.name
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            yield folder
            if path.exists():
                path.rmdir()  # empty, or it would have been refused
            folder.rename(path)
            sync_folder(path.parent)
            deployed = True
        finally:
            if deployed or not (unfinished / KEPT).exists():
                shutil.rmtree(unfinished, ignore_errors=True)
