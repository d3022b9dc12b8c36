"""Every member as an actor of a Ray cluster: ``pip install "tailguard[ray]"``.

States move from the object store of one machine to that of another, never through the driver. What a lost machine takes with it
is read from the checkpoints, which lie on any file system that fsspec knows.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import LogRecord
from typing import Any, cast

from tailguard.population.engines.driver import Engine
from tailguard.population.learner import LearnerFactory
from tailguard.population.log_forwarding import collected, relay
from tailguard.population.scheduler import PBTScheduler, Round
from tailguard.population.store import Store
from tailguard.population.worker import Adopt, Answer, Crashed, Done, Failed, Hindered, Job, Lost, Make, Restore, Train, Worker
from tailguard.validation import require

POLL_SECONDS = 0.5  # between looks at the clock while an actor waits for its place


@dataclass
class _ProcessHandle:
    """An actor, and what it is doing.

    :param placed: resolves when the actor has started.
    :param waiting_since: when its place was asked for; None once it has one.
    :param answer: the answer to come; None while it is idle.
    :param state: the state to come, which stays where it was made.
    :param saved_as: the name of that state.
    """

    actor: Any
    placed: Any
    waiting_since: float | None
    answer: Any = None
    state: Any = None
    saved_as: str | None = None


@dataclass
class _Nearby:
    """The store of an actor: states that came along are taken from the object store, all others from the files."""

    files: Store
    parcels: Mapping[str, Any] = field(default_factory=dict)
    written: Any = None

    def write(self, name: str, state: Any) -> None:
        """To the files, and to be taken along."""
        self.files.write(name, state)
        self.written = state

    def read(self, name: str) -> Any:
        """What came along, unless its machine is gone meanwhile."""
        ray = _ray()
        if name in self.parcels:
            try:
                return ray.get(self.parcels[name])
            except (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError):
                return self.files.read(name)
        return self.files.read(name)


class _Member:
    """What an actor is."""

    def __init__(self, member_id: int, factory: LearnerFactory, store: Store) -> None:
        self._store = _Nearby(store)
        self._seat = Worker(member_id, factory, self._store)

    def placed(self) -> str:
        """The machine that it sits on; the answer comes once it does."""
        return str(_ray().get_runtime_context().get_node_id())

    def perform(
        self, jobs: Sequence[Job], parcels: Mapping[str, Any]
    ) -> tuple[tuple[Done | Failed | Hindered, list[LogRecord]], Any]:
        """Do the jobs; the answer comes with what was logged, the second value is the state after a training."""
        self._store.parcels, self._store.written = parcels, None
        with collected() as records:
            return (self._seat.perform(jobs), records), self._store.written


class RayExecutor:
    """Members as actors.

    :param factory: makes learners.
    :param store: of all members.
    :param resources: options of an actor, such as ``{"num_cpus": 1, "num_gpus": 0.25, "resources": {"fast": 1}}``.
    :param placement_seconds: how long a member may wait for its resources before it counts as lost.
    """

    def __init__(self, factory: LearnerFactory, store: Store, resources: Mapping[str, Any], placement_seconds: float) -> None:
        self._ray = _ray()
        self._factory = self._ray.put(factory)  # once per cluster, not once per member
        self._store = store
        self._placement_seconds = placement_seconds
        # The driver itself makes lost members again, from their checkpoints. Ray gives an actor as many threads as cores.
        self._class = self._ray.remote(_Member).options(max_restarts=0, max_task_retries=0, **resources)
        self._desks: dict[int, _ProcessHandle] = {}
        self._parcels: dict[str, Any] = {}

    def submit(self, member_id: int, jobs: Sequence[Job]) -> None:
        """Send the jobs, and with them where the states lie that they need."""
        if isinstance(jobs[0], Make):
            self._seat(member_id)
        desk = self._desks[member_id]
        needed = {job.checkpoint for job in jobs if isinstance(job, Adopt | Restore)}
        parcels = {name: self._parcels[name] for name in needed if name in self._parcels}
        desk.answer, desk.state = desk.actor.perform.options(num_returns=2).remote(list(jobs), parcels)
        desk.saved_as = jobs[-1].checkpoint if isinstance(jobs[-1], Train) else None

    def wait(self, timeout: float | None) -> list[tuple[int, Answer]]:
        """Answers, and losses: an actor that died, a machine that is gone, a place that never came."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            answers = self._arrived(end) + self._displaced()
            for member_id, _ in answers:
                self._desks[member_id].answer = None
            if answers or (end is not None and time.monotonic() >= end):
                return sorted(answers, key=lambda answer: answer[0])

    def places(self) -> dict[int, str]:
        """The machine of every member."""
        return {member_id: self._ray.get(desk.placed) for member_id, desk in self._desks.items()}

    def forget(self, names: set[str]) -> None:
        """Let go of all states but these."""
        self._parcels = {name: parcel for name, parcel in self._parcels.items() if name in names}

    def close(self) -> None:
        """End the actors."""
        for desk in self._desks.values():
            self._ray.kill(desk.actor)
        self._desks.clear()
        self._parcels.clear()

    def _seat(self, member_id: int) -> None:
        old = self._desks.pop(member_id, None)
        if old is not None:
            self._ray.kill(old.actor)
        actor = self._class.remote(member_id, self._factory, self._store)
        self._desks[member_id] = _ProcessHandle(actor, actor.placed.remote(), time.monotonic())

    def _arrived(self, end: float | None) -> list[tuple[int, Answer]]:
        busy = {desk.answer: member_id for member_id, desk in self._desks.items() if desk.answer is not None}
        left = POLL_SECONDS if any(self._desks[member_id].waiting_since is not None for member_id in busy.values()) else None
        if end is not None:
            rest = max(end - time.monotonic(), 0.0)
            left = rest if left is None else min(left, rest)
        done, _ = self._ray.wait(list(busy), num_returns=1, timeout=left)
        more, _ = self._ray.wait(list(busy), num_returns=len(busy), timeout=0)
        return [(busy[ref], self._answer(busy[ref])) for ref in dict.fromkeys([*done, *more])]

    def _answer(self, member_id: int) -> Answer:
        desk = self._desks[member_id]
        errors = self._ray.exceptions
        try:
            answer, records = self._ray.get(desk.answer)
        except errors.RayTaskError as error:
            return Crashed(str(error))
        except errors.RayError as error:  # actor, worker, machine, memory or object: there are twenty names for being gone
            if isinstance(error, errors.RayActorError) and error.actor_init_failed:
                return Crashed(str(error))
            return Lost(type(error).__name__)
        if desk.saved_as is not None:
            self._parcels[desk.saved_as] = desk.state
        relay(records)
        return cast(Answer, answer)

    def _displaced(self) -> list[tuple[int, Answer]]:
        """Members that have waited too long for their resources."""
        lost: list[tuple[int, Answer]] = []
        for member_id, desk in self._desks.items():
            if desk.waiting_since is None or desk.answer is None:
                continue
            if self._ray.wait([desk.placed], timeout=0)[0]:
                desk.waiting_since = None
            elif time.monotonic() - desk.waiting_since > self._placement_seconds:
                lost.append((member_id, Lost(f"no place in the cluster within {self._placement_seconds:g} s")))
        return lost


class RayEngine(Engine):
    """Trains a population on a Ray cluster, every member an actor.

    Join a cluster first, with :func:`connect`; without it Ray starts on this machine.

    :param scheduler: decides.
    :param factory: makes the learner of a member, on its machine.
    :param store: where states lie, for all machines: usually a :class:`~tailguard.population.files.FileStore` on ``s3://``.
    :param resources: options of a member's actor; one core by default. A member holds them as long as it lives, so the
        cluster must have enough for all of them: a fraction of a core lets several members share one.
    :param placement_seconds: how long a member may wait for its resources before it counts as lost.
    :param max_losses: see :class:`~tailguard.population.engines.driver.Engine`, as are the rest.
    :param patience: as there.
    :param on_round: as there.
    """

    crew: RayExecutor

    def __init__(
        self,
        scheduler: PBTScheduler,
        factory: LearnerFactory,
        store: Store,
        *,
        resources: Mapping[str, Any] | None = None,
        placement_seconds: float = 120.0,
        max_losses: int = 2,
        patience: float | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        require(placement_seconds > 0.0, "placement_seconds", placement_seconds, "above 0")
        ray = _ray()
        resources = {"num_cpus": 1, **(resources or {})}
        connect()
        needed, there = len(scheduler.members) * resources["num_cpus"], ray.cluster_resources().get("CPU", 0.0)
        legal = f"at most {there / len(scheduler.members):g}: {len(scheduler.members)} members share {there:g} cores"
        require(needed <= there, "num_cpus of a member", resources["num_cpus"], legal)
        crew = RayExecutor(factory, store, resources, placement_seconds)
        super().__init__(scheduler, crew, store, max_losses=max_losses, patience=patience, on_round=on_round)

    def _remember(self) -> None:
        super()._remember()
        self.crew.forget(self._needed())


def connect(address: str | None = None) -> None:
    """Join a cluster, if this process has not joined one already.

    :param address: of the cluster; None starts one on this machine.
    """
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ImportError('the Ray engine needs Ray: pip install "tailguard[ray]"') from error
