"""The Ray engine: every interval of a member is a call on some machine of a Ray cluster: ``pip install "tailguard[ray]"``.

States move from the object store of one machine to that of another, never through the driver. The states of a lost machine are
read from the checkpoints, which are on any file system that fsspec knows, and that all machines must be able to reach.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailguard.parallel.ray import PLACEMENT_SECONDS, RayCalls, connect, on_every_machine, ray
from tailguard.parallel.worker import Returned, Tell
from tailguard.population.engines.driver import Engine
from tailguard.population.member import LearnerFactory, MemberFailed
from tailguard.population.scheduler import PBTScheduler, Round
from tailguard.population.store import Store
from tailguard.population.worker import CopyFrom, JobResult, Restore, Train, Worker, WorkerJob

TOKEN = "token"


@dataclass
class _ObjectStore:
    """The store of a call: states whose references it was given come from Ray's object store, all others from the files."""

    files: Store
    references: Mapping[str, Any] = field(default_factory=dict)
    written: Any = None

    def write(self, name: str, state: Any) -> None:
        """Write a state to the files, and keep it for the object store."""
        self.files.write(name, state)
        self.written = state

    def read(self, name: str) -> Any:
        """Return a state, from the files if the machine that held it is gone."""
        if name in self.references:
            try:
                return ray().get(self.references[name])
            except ray().exceptions.RayError:  # its object, its owner or its machine
                return self.files.read(name)
        return self.files.read(name)


def _perform(
    member_id: int, factory: LearnerFactory, store: Store, jobs: Sequence[WorkerJob], references: Mapping[str, Any], tell: Tell
) -> tuple[JobResult, Any]:
    """Do the jobs of a member, from its creation on; return the result, and the state after a training."""
    objects = _ObjectStore(store, references)
    return Worker(member_id, factory, objects).perform(jobs), objects.written


class RayExecutor:
    """Runs the jobs of members as calls, each of which creates its member again from its last state.

    :param factory: makes learners.
    :param store: holds the states of all members.
    :param resources: of a call, such as ``{"num_cpus": 1, "num_gpus": 0.25, "resources": {"fast": 1}}``.
    :param placement_seconds: seconds without any machine that has them, after which a member counts as lost.
    """

    keeps_learners = False

    def __init__(self, factory: LearnerFactory, store: Store, resources: Mapping[str, Any], placement_seconds: float) -> None:
        self.calls = RayCalls(_perform, resources, placement_seconds)
        self._factory = ray().put(factory)  # once per cluster, not once per member
        self._store = store
        self._saved_as: dict[int, str | None] = {}  # the name of the state after the present jobs of a member
        self._references: dict[str, Any] = {}  # to states in the object store, by name

    def submit(self, member_id: int, jobs: Sequence[WorkerJob]) -> None:
        """Send the jobs with references to the states that they need."""
        needed = {job.checkpoint for job in jobs if isinstance(job, CopyFrom | Restore)}
        references = {name: self._references[name] for name in needed if name in self._references}
        self._saved_as[member_id] = jobs[-1].checkpoint if isinstance(jobs[-1], Train) else None
        self.calls.start(member_id, member_id, self._factory, self._store, list(jobs), references)

    def wait(self, timeout: float | None) -> list[tuple[int, JobResult]]:
        """Return results, and losses: a process that died, a machine that is gone, resources that never came."""
        results: list[tuple[int, JobResult]] = []
        for member_id, outcome, state in self.calls.wait(timeout):
            name = self._saved_as.pop(member_id)
            if isinstance(outcome, Returned) and name is not None:
                self._references[name] = state
            results.append((member_id, outcome.value if isinstance(outcome, Returned) else outcome))
        return sorted(results, key=lambda result: result[0])

    def keep_only(self, names: set[str]) -> None:
        """Release the states in the object store except these."""
        self._references = {name: reference for name, reference in self._references.items() if name in names}

    def alive(self, machine: str) -> bool:
        """Return False for a machine that is gone."""
        return self.calls.alive(machine)

    def close(self) -> None:
        """End all calls."""
        self.calls.close()
        self._references.clear()


class RayEngine(Engine):
    """Trains a population on a Ray cluster. A member holds cores while it trains, so that any number can share few of them.

    Join a cluster first, with :func:`tailguard.parallel.ray.connect`; without it Ray starts on this machine.

    :param scheduler: decides.
    :param factory: makes the learner of a member, on some machine.
    :param store: holds the states, for all machines: usually a :class:`~tailguard.population.store.FileStore` on ``s3://``.
    :param resources: of a member while it trains; one core by default.
    :param placement_seconds: seconds without any machine that has them, after which a member counts as lost.
    :param max_losses: see :class:`~tailguard.population.engines.driver.Engine`.
    :param patience: see there.
    :param on_round: see there.
    :raises ValueError: if a machine cannot reach the store, or if none has the resources.
    """

    executor: RayExecutor

    def __init__(
        self,
        scheduler: PBTScheduler,
        factory: LearnerFactory,
        store: Store,
        *,
        resources: Mapping[str, Any] | None = None,
        placement_seconds: float = PLACEMENT_SECONDS,
        max_losses: int = 2,
        patience: float | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        connect()
        executor = RayExecutor(factory, store, resources or {}, placement_seconds)
        require_common(store)
        super().__init__(scheduler, executor, store, max_losses=max_losses, patience=patience, on_round=on_round)

    def _save_population(self) -> None:
        super()._save_population()
        self.executor.keep_only(self._needed())


def require_common(store: Store) -> None:
    """Raise if a machine of the cluster cannot read what the driver writes, or the driver what a machine writes.

    :param store: of the population.
    """
    word = uuid.uuid4().hex
    store.write(TOKEN, {"word": word})

    def answer(machine: str) -> bool:
        try:
            seen = bool(store.read(TOKEN) == {"word": word})
            store.write(f"{TOKEN}_{machine}", {"word": word})
        except (MemberFailed, OSError):
            return False
        return seen

    for machine, address, seen in on_every_machine(answer):
        try:
            common = seen and store.read(f"{TOKEN}_{machine}") == {"word": word}
        except MemberFailed:
            common = False
        if not common:
            raise ValueError(
                f"the machine {address} does not share the store of the population: give --store a folder that all machines "
                "mount, or a URL such as s3://bucket/run"
            )
