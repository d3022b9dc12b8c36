"""A population of trading agents in a folder: trained by any engine, stopped, killed and resumed. Its winner is a run.

RUN/...                       an ordinary run, see run.py; its model is the best member
RUN/population/lineage.jsonl  everything that happened, an event per line
RUN/population/states/        the state of every member, and of the population
"""

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from stable_baselines3.common.logger import Logger, configure

from tailguard.config import Config
from tailguard.experiments import stopped_at_once
from tailguard.experiments.population_member import MarketFactory, population_of, validation_blocks
from tailguard.experiments.prepared_market import default_split, load_source_of, prepare_market, split_off_validation
from tailguard.experiments.run import INFO, Run
from tailguard.io.atomic import atomic, clear_unfinished, make_folder
from tailguard.io.form import COUNT, TEXT, Maybe, require_form
from tailguard.io.reading import read_regular, refusing, require_writable
from tailguard.parallel.threads import one_thread, warn_of_differences
from tailguard.population import PBTScheduler
from tailguard.population.config import Value
from tailguard.population.engines.driver import Engine, Extinct
from tailguard.population.engines.process import ProcessEngine
from tailguard.population.engines.serial import SerialEngine
from tailguard.population.lineage import Lineage, read
from tailguard.population.scheduler import Round
from tailguard.population.store import POPULATION, FileStore

logger = logging.getLogger(__name__)
FOLDER, LINEAGE, STATES, FEATURES, LOG = "population", "lineage.jsonl", "states", "features.npy", "log.txt"
STORE = "store"  # entry of run.json: where the states are, if not in the run
FORM = {"validation": (COUNT, COUNT), STORE: Maybe(TEXT)}  # of what a population adds to run.json
EngineName = Literal["serial", "process", "ray"]


@dataclass(frozen=True)
class MemberRow:
    """One member, for a table.

    :param member_id: its number.
    :param step: updates done.
    :param performance: its score; None where it has none.
    :param hyperparams: active now.
    :param generation: how often it has copied another member.
    :param parent: the member that it copied last.
    :param alive: false after it has failed.
    """

    member_id: int
    step: int
    performance: float | None
    hyperparams: dict[str, Value]
    generation: int
    parent: int | None
    alive: bool


@dataclass(frozen=True)
class Standing:
    """The population after a decision.

    :param round: number of the decision.
    :param intervals: how many are done, of how many.
    :param rows: the members.
    :param copies: who copied whom in this round: pairs of target and source.
    :param metrics: the figures ``pbt/*``.
    """

    round: int
    intervals: tuple[int, int]
    rows: tuple[MemberRow, ...]
    copies: tuple[tuple[int, int], ...]
    metrics: dict[str, float]


ReportStanding = Callable[[Standing], None]


class PopulationRun:
    """The folder of a population.

    :param run: the ordinary run that it also is.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = population_of(run.config)
        self.folder = run.path / FOLDER
        self.scheduler = PBTScheduler(self.config)

    @classmethod
    def create(cls, path: str | Path, config: Config, source: str) -> Self:
        """Make the folder of a new population.

        :param path: nothing may be there yet.
        :param config: with a section ``population``. ``training.steps`` follows from it.
        :param source: the data, as :func:`tailguard.market.data.load_source` understands it.
        """
        population, config = population_of(config), _with_steps(config)
        bars = load_source_of(config, source)
        split, validation = split_off_validation(default_split(len(bars), config.training), population.validation_share)
        validation_blocks(validation, population)  # refuses more than there are bars for: no folder yet
        # At once: a process that is killed in here leaves no run of one agent.
        return cls(Run.create(path, config, source, prepare_market(bars, config, split), {"validation": list(validation)}))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the population in a folder.

        :raises ValueError: when there is none.
        """
        run = Run.open(path)
        if "validation" not in run.info:
            raise ValueError(f"{path} is a run of one agent, not one of a population")
        with refusing(run.path / INFO):
            require_form({name: run.info.get(name) for name in FORM}, FORM, "")
        return cls(run)

    def require_same(self, config: Config) -> None:
        """Raise a :class:`ValueError` if the population was created with other settings than these."""
        if _with_steps(config) != self.run.config:
            raise ValueError(f"{self.run.path} holds a population of other settings: name none to resume it, or another --run")

    @property
    def lineage(self) -> Path:
        """The file of events."""
        return self.folder / LINEAGE

    @property
    def trials(self) -> int:
        """Number of settings that were tried, by which the Sharpe ratio of the winner has to be deflated."""
        return self.config.population_size + self.scheduler.exploration_count

    @one_thread()
    def train(
        self,
        engine: EngineName = "serial",
        report: ReportStanding | None = None,
        *,
        address: str | None = None,
        parallel: int | None = None,
        store: str | None = None,
    ) -> Run:
        """Train the population to its end, from wherever it stands, and make the winner the model of the run.

        :param engine: ``serial``, ``process`` or ``ray``; a population may be resumed with another one.
        :param report: called after every decision.
        :param address: of a Ray cluster; None starts one on this machine.
        :param parallel: processes that train at the same time; None takes one per core.
        :param store: folder or URL for the states of the members; None is where they are, or the folder of the run. A cluster
            without a common disk needs a URL such as ``s3://bucket/run``.
        :raises ValueError: when every member has died, or none has a finite score.
        """
        again = f"`tailguard population --run {self.run.path}` resumes it"
        with self.run.locked(), _logged_to(self.folder / LOG), stopped_at_once(again):
            clear_unfinished(self.run.path)
            warn_of_differences(str(self.run.path), self.run.info.get("conditions"))
            factory = self._factory()
            place = self._store(store)
            with self._engine(engine, factory, FileStore(place), address, parallel) as running:
                if store is not None:
                    self.run.note({STORE: place})  # now that everybody has reached it
                self._begin_or_resume(running)
                tensorboard = self._tensorboard()
                running.on_round = lambda decided: self._report(decided, tensorboard, report)
                try:
                    running.run(self.config.intervals)
                except Extinct as error:
                    raise ValueError(f"{error}; {self.folder / LOG} says why they died") from error
                self._select_winner(factory, running)
        return self.run

    def standing(self, decided: Round | None = None) -> Standing:
        """Return the population as it is now."""
        done = max(member.step for member in self.scheduler.members) // self.config.perturbation_interval
        keys = ("member_id", "step", "performance", "hyperparams", "generation", "parent", "alive")
        return Standing(
            round=self.scheduler.rounds,
            intervals=(done, self.config.intervals),
            rows=tuple(MemberRow(**{key: member.to_dict()[key] for key in keys}) for member in self.scheduler.members),
            copies=() if decided is None else tuple((exploit.target, exploit.source) for exploit in decided.exploits),
            metrics=self.scheduler.metrics(),
        )

    def _factory(self) -> MarketFactory:
        market, path = self.run.market(), self.folder / FEATURES
        content = io.BytesIO()
        np.save(content, market.features.values)
        if not _holds(path, content.getvalue()):
            with atomic(path) as file:
                file.write(content.getvalue())
        first, last = self.run.info["validation"]
        return MarketFactory(market, (first, last), self.run.config, path)

    def _engine(
        self, name: EngineName, factory: MarketFactory, store: FileStore, address: str | None, parallel: int | None
    ) -> Engine:
        if name == "serial":
            return SerialEngine(self.scheduler, factory, store)
        if name == "process":
            return ProcessEngine(self.scheduler, factory, store, parallel=parallel)
        from tailguard.parallel.ray import connect
        from tailguard.population.engines.ray import RayEngine

        connect(address)
        factory = MarketFactory(factory.market, factory.validation, factory.config)  # other machines lack the mapped file
        return RayEngine(self.scheduler, factory, store, resources={"num_cpus": self.config.cpus_per_member})

    def _store(self, asked: str | None) -> str:
        """Return where the states are, or shall be; a population is not continued without them.

        :param asked: where they shall be; None leaves them where they are.
        """
        known = self.run.info.get(STORE)
        place = None if asked is None else asked if "://" in asked else str(Path(asked).resolve())
        if known is not None and place not in (None, known):
            raise ValueError(f"the states of {self.run.path} are in {known}: leave out --store, or move them there")
        if known is None and place is not None and (self.folder / STATES / POPULATION).exists():
            raise ValueError(f"the states of {self.run.path} are in its own folder: leave out --store")
        return known or place or str(self.folder / STATES)

    def _begin_or_resume(self, engine: Engine) -> None:
        if engine.store.read_population() is not None:
            engine.resume()
            self.scheduler.record = Lineage(self.lineage, keep=self.scheduler.events)
            return
        events = [event["event"] for event in read(self.lineage)] if self.lineage.exists() else []
        if "report" in events:
            raise ValueError(
                f"{self._store(None)} holds no population, but {self.lineage} has {len(events)} events: restore the states, or "
                "start a new population with another --run"
            )
        self.lineage.unlink(missing_ok=True)  # of a process that died before its first decision was written down
        self.scheduler = engine.scheduler = PBTScheduler(self.config, record=Lineage(self.lineage))

    def _tensorboard(self) -> Logger | None:
        if self.run.config.training.tensorboard is None:
            return None
        return configure(str(Path(self.run.config.training.tensorboard) / self.run.path.name), ["tensorboard"])

    def _report(self, decided: Round, tensorboard: Logger | None, report: ReportStanding | None) -> None:
        standing = self.standing(decided)
        if tensorboard is not None:
            for name, value in standing.metrics.items():
                tensorboard.record(name, value)
            for row in standing.rows:
                if row.performance is not None:
                    tensorboard.record(f"pbt/member_{row.member_id}/performance", row.performance)
                for name, setting in row.hyperparams.items():
                    if isinstance(setting, int | float):
                        tensorboard.record(f"pbt/member_{row.member_id}/{name}", setting)
            tensorboard.dump(standing.intervals[0])
        if report is not None:
            report(standing)

    def _select_winner(self, factory: MarketFactory, engine: Engine) -> None:
        """Make the best member the model of the run, and write down how many were tried to find it."""
        best = self.scheduler.best
        if best is None or best.checkpoint_path is None or best.performance is None:
            raise ValueError(f"no member has a finite score, so there is no winner; {self.folder / LOG} says what happened")
        learner = factory(best.member_id, best.hyperparams, self.scheduler.seed_of(best.member_id))
        learner.load(engine.store.read(best.checkpoint_path))
        self.run.checkpoints.save(learner.model.num_timesteps, learner.model_tree(), best.performance)
        winner = {"member": best.member_id, "score": best.performance, "hyperparams": dict(best.hyperparams)}
        self.run.note({"trials": self.trials, "winner": winner})
        logger.info("Member %d wins with %s %.6g", best.member_id, self.config.metric_name, best.performance)


def _holds(path: Path, content: bytes) -> bool:
    """Return True if a file holds exactly these features; one that was damaged is written again."""
    if not path.exists():
        return False
    try:
        same = read_regular(path, len(content)) == content
    except (ValueError, OSError):
        same = False
    if not same:
        logger.warning("%s is damaged; it is written again", path)
    return same


def _with_steps(config: Config) -> Config:
    """Return the configuration with ``training.steps`` as they follow from the section ``population``."""
    population, training = population_of(config), config.training
    updates = population.intervals * population.perturbation_interval
    steps = updates * training.n_steps * training.n_envs
    return config.model_copy(update={"training": training.model_copy(update={"steps": steps})})


@contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Append what Tailguard logs, from INFO on, to a file."""
    make_folder(path.parent)
    require_writable(path)
    package, handler = logging.getLogger("tailguard"), logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = package.level
    package.addHandler(handler)
    package.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        package.setLevel(before)
        package.removeHandler(handler)
        handler.close()
