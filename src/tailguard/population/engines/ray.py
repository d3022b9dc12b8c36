"""The Ray engine: every member an actor of a Ray cluster: ``pip install "tailguard[ray]"``.

States move from the object store of one machine to that of another, never through the driver. The states of a lost machine are
read from the checkpoints, which are on any file system that fsspec knows.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import LogRecord
from typing import Any, cast

from tailguard.population.engines.driver import Engine
from tailguard.population.member import LearnerFactory
from tailguard.population.scheduler import PBTScheduler, Round
from tailguard.population.store import Store
from tailguard.population.worker import (
    CopyFrom,
    Crashed,
    Create,
    Done,
    Failed,
    IOFailed,
    JobResult,
    Lost,
    Restore,
    Train,
    Worker,
    WorkerJob,
    collect_logs,
    forward_logs,
)
from tailguard.validation import require

POLL_SECONDS = 0.5  # between looks at the clock while an actor waits for its resources


@dataclass
class _ActorHandle:
    """An actor and its present jobs.

    :param placed: reference to its machine, which resolves when the actor has started.
    :param waiting_since: time at which its resources were requested; None once it has them.
    :param result: reference to the result of its jobs; None while it is idle.
    :param state: reference to the state after its jobs, which stays on the actor's machine.
    :param saved_as: the name of that state.
    """

    actor: Any
    placed: Any
    waiting_since: float | None
    result: Any = None
    state: Any = None
    saved_as: str | None = None


@dataclass
class _ObjectStore:
    """The store of an actor: states whose references it was given come from Ray's object store, all others from the files."""

    files: Store
    references: Mapping[str, Any] = field(default_factory=dict)
    written: Any = None

    def write(self, name: str, state: Any) -> None:
        """Write a state to the files, and keep it for the object store."""
        self.files.write(name, state)
        self.written = state

    def read(self, name: str) -> Any:
        """Return a state, from the files if the machine that held it is gone."""
        ray = _ray()
        if name in self.references:
            try:
                return ray.get(self.references[name])
            except (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError):
                return self.files.read(name)
        return self.files.read(name)


class _MemberActor:
    """The class of an actor: a worker and its store."""

    def __init__(self, member_id: int, factory: LearnerFactory, store: Store) -> None:
        self._store = _ObjectStore(store)
        self._worker = Worker(member_id, factory, self._store)

    def placed(self) -> str:
        """Return the machine of the actor, once it has started."""
        return str(_ray().get_runtime_context().get_node_id())

    def perform(
        self, jobs: Sequence[WorkerJob], references: Mapping[str, Any]
    ) -> tuple[tuple[Done | Failed | IOFailed, list[LogRecord]], Any]:
        """Do the jobs; return the result with the log records, and the state after a training."""
        self._store.references, self._store.written = references, None
        with collect_logs() as records:
            return (self._worker.perform(jobs), records), self._store.written


class RayExecutor:
    """Runs members as actors.

    :param factory: makes learners.
    :param store: holds the states of all members.
    :param resources: options of an actor, such as ``{"num_cpus": 1, "num_gpus": 0.25, "resources": {"fast": 1}}``.
    :param placement_seconds: seconds that a member may wait for its resources before it counts as lost.
    """

    def __init__(self, factory: LearnerFactory, store: Store, resources: Mapping[str, Any], placement_seconds: float) -> None:
        self._ray = _ray()
        self._factory = self._ray.put(factory)  # once per cluster, not once per member
        self._store = store
        self._placement_seconds = placement_seconds
        # The driver itself creates lost members again, from their checkpoints. Ray gives an actor as many threads as cores.
        self._class = self._ray.remote(_MemberActor).options(max_restarts=0, max_task_retries=0, **resources)
        self._handles: dict[int, _ActorHandle] = {}
        self._references: dict[str, Any] = {}  # to states in the object store, by name

    def submit(self, member_id: int, jobs: Sequence[WorkerJob]) -> None:
        """Send the jobs with references to the states that they need."""
        if isinstance(jobs[0], Create):
            self._start_actor(member_id)
        handle = self._handles[member_id]
        needed = {job.checkpoint for job in jobs if isinstance(job, CopyFrom | Restore)}
        references = {name: self._references[name] for name in needed if name in self._references}
        handle.result, handle.state = handle.actor.perform.options(num_returns=2).remote(list(jobs), references)
        handle.saved_as = jobs[-1].checkpoint if isinstance(jobs[-1], Train) else None

    def wait(self, timeout: float | None) -> list[tuple[int, JobResult]]:
        """Return results, and losses: an actor that died, a machine that is gone, resources that never came."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            results = self._arrived(end) + self._unplaced()
            for member_id, _ in results:
                self._handles[member_id].result = None
            if results or (end is not None and time.monotonic() >= end):
                return sorted(results, key=lambda result: result[0])

    def nodes(self) -> dict[int, str]:
        """Return the machine of every member."""
        return {member_id: self._ray.get(handle.placed) for member_id, handle in self._handles.items()}

    def keep_only(self, names: set[str]) -> None:
        """Release the states in the object store except these."""
        self._references = {name: reference for name, reference in self._references.items() if name in names}

    def close(self) -> None:
        """Stop the actors."""
        for handle in self._handles.values():
            self._ray.kill(handle.actor)
        self._handles.clear()
        self._references.clear()

    def _start_actor(self, member_id: int) -> None:
        old = self._handles.pop(member_id, None)
        if old is not None:
            self._ray.kill(old.actor)
        actor = self._class.remote(member_id, self._factory, self._store)
        self._handles[member_id] = _ActorHandle(actor, actor.placed.remote(), time.monotonic())

    def _arrived(self, end: float | None) -> list[tuple[int, JobResult]]:
        busy = {handle.result: member_id for member_id, handle in self._handles.items() if handle.result is not None}
        left = POLL_SECONDS if any(self._handles[member_id].waiting_since is not None for member_id in busy.values()) else None
        if end is not None:
            rest = max(end - time.monotonic(), 0.0)
            left = rest if left is None else min(left, rest)
        done, _ = self._ray.wait(list(busy), num_returns=1, timeout=left)
        more, _ = self._ray.wait(list(busy), num_returns=len(busy), timeout=0)
        return [(busy[ref], self._result(busy[ref])) for ref in dict.fromkeys([*done, *more])]

    def _result(self, member_id: int) -> JobResult:
        handle = self._handles[member_id]
        errors = self._ray.exceptions
        try:
            result, records = self._ray.get(handle.result)
        except errors.RayTaskError as error:
            return Crashed(str(error))
        except errors.RayError as error:  # actor, worker, machine, memory or object: twenty subclasses for a loss
            if isinstance(error, errors.RayActorError) and error.actor_init_failed:
                return Crashed(str(error))
            return Lost(type(error).__name__)
        if handle.saved_as is not None:
            self._references[handle.saved_as] = handle.state
        forward_logs(records)
        return cast(JobResult, result)

    def _unplaced(self) -> list[tuple[int, JobResult]]:
        """Return the losses of members that have waited too long for their resources."""
        lost: list[tuple[int, JobResult]] = []
        for member_id, handle in self._handles.items():
            if handle.waiting_since is None or handle.result is None:
                continue
            if self._ray.wait([handle.placed], timeout=0)[0]:
                handle.waiting_since = None
            elif time.monotonic() - handle.waiting_since > self._placement_seconds:
                lost.append((member_id, Lost(f"no resources in the cluster within {self._placement_seconds:g} s")))
        return lost


class RayEngine(Engine):
    """Trains a population on a Ray cluster, every member an actor.

    Join a cluster first, with :func:`connect`; without it Ray starts on this machine.

    :param scheduler: decides.
    :param factory: makes the learner of a member, on its machine.
    :param store: holds the states, for all machines: usually a :class:`~tailguard.population.store.FileStore` on ``s3://``.
    :param resources: options of a member's actor; one core by default. A member holds them as long as it lives, so the
        cluster must have enough for all of them: a fraction of a core lets several members share one.
    :param placement_seconds: seconds that a member may wait for its resources before it counts as lost.
    :param max_losses: see :class:`~tailguard.population.engines.driver.Engine`.
    :param patience: see there.
    :param on_round: see there.
    """

    executor: RayExecutor

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
        needed, available = len(scheduler.members) * resources["num_cpus"], ray.cluster_resources().get("CPU", 0.0)
        legal = f"at most {available / len(scheduler.members):g}: {len(scheduler.members)} members share {available:g} cores"
        require(needed <= available, "num_cpus of a member", resources["num_cpus"], legal)
        executor = RayExecutor(factory, store, resources, placement_seconds)
        super().__init__(scheduler, executor, store, max_losses=max_losses, patience=patience, on_round=on_round)

    def _save_population(self) -> None:
        super()._save_population()
        self.executor.keep_only(self._needed())


def connect(address: str | None = None) -> None:
    """Join a cluster, if this process has not joined one already.

    :param address: address of the cluster; None starts one on this machine.
    """
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ImportError('the Ray engine needs Ray: pip install "tailguard[ray]"') from error
