"""The driver of all engines: it starts members, reports to the scheduler, and carries out its decisions.

Engines differ in their executor alone: how the jobs of a member are run. In a synchronous population reports are made in the
order of the members and after all have arrived, whoever was first, so that every executor gives the same lineage.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from tailguard.io.reading import refusing
from tailguard.parallel.outcomes import Crashed, Lost, count_losses
from tailguard.population.member import PopulationMember
from tailguard.population.scheduler import Exploit, PBTScheduler, Round
from tailguard.population.store import Store
from tailguard.population.worker import CopyFrom, Create, Done, IOFailed, JobResult, Restore, Train, WorkerJob
from tailguard.validation import require

logger = logging.getLogger(__name__)
STORE_VERSION = 2


class Extinct(RuntimeError):
    """Raised when every member is dead: there is none left to copy."""


class Executor(Protocol):
    """Runs the jobs of members.

    :param keeps_learners: True if the learner of a member stays where it is between its jobs; if not, every submission begins
        with :class:`Create`.
    """

    keeps_learners: bool

    def submit(self, member_id: int, jobs: Sequence[WorkerJob]) -> None:
        """Run jobs of a member. If the first one is :class:`Create`, start a new process for it, where processes are used."""

    def wait(self, timeout: float | None) -> list[tuple[int, JobResult]]:
        """Return the results that have arrived, one per submission; wait for at least one.

        :param timeout: seconds after which to return without any; None waits without limit.
        """

    def alive(self, machine: str) -> bool:
        """Return False for a machine that is gone."""

    def close(self) -> None:
        """Stop all workers."""


@dataclass(frozen=True)
class _Task:
    """The present task of a member.

    :param job: the last of its jobs.
    :param losses: of the member during it.
    """

    job: Train | CopyFrom
    losses: tuple[Lost, ...]


class Engine:
    """Trains a population and carries out its exploits. Close it when done, or use it in a ``with`` statement.

    A member that is lost is created again from its last checkpoint and repeats its interval, so that nothing but time is lost.
    A member that is lost too often, or that raises :class:`MemberFailed`, is dead: the scheduler replaces it with a copy of
    another.

    :param scheduler: decides.
    :param executor: runs the jobs of members.
    :param store: holds the states. After every decision it has all that :meth:`resume` needs.
    :param max_losses: losses over one interval that a member survives; with one more it counts as dead. Losses with the same
        machine count once. 0 never tries again.
    :param patience: seconds without an arrival after which a synchronous population checks whether it is ready to decide
        without the missing members (``ready_percentage``, ``ready_check_max_wait``). None waits for all of them: with a number
        the lineage depends on how fast the members are.
    :param on_round: called after every decision that was carried out.
    """

    def __init__(
        self,
        scheduler: PBTScheduler,
        executor: Executor,
        store: Store,
        *,
        max_losses: int = 2,
        patience: float | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        require(max_losses >= 0, "max_losses", max_losses, "at least 0")
        require(patience is None or patience > 0.0, "patience", patience, "above 0, or None")
        self.scheduler = scheduler
        self.executor = executor
        self.store = store
        self.on_round = on_round
        self._max_losses = max_losses
        self._patience = patience
        self._created: set[int] = set()  # members that have a learner in the state of their record
        self._busy: dict[int, _Task] = {}
        self._parts = 0  # of the histories that are stored
        self._stored = [0] * len(scheduler.members)  # entries of each member in them
        self._backlog: list[tuple[int, JobResult]] = []  # arrived while the driver was waiting for something else

    def run(self, intervals: int) -> None:
        """Train until the population has done this many intervals since its start.

        :param intervals: at least 0, including those that are done already. Asynchronously every living member does as many.
        :raises Extinct: when every member is dead.
        :raises RuntimeError: when a learner has a bug.
        :raises OSError: when the disk of a member fails. The population can be resumed.
        """
        require(intervals >= 0, "intervals", intervals, "at least 0")
        until = intervals * self.scheduler.config.perturbation_interval
        self._save_population()
        if self.scheduler.config.synchronous:
            self._run_synchronously(until)
        else:
            self._run_asynchronously(until)

    def resume(self) -> None:
        """Resume the population in the store after its last decision, with the same decisions as without the interruption.

        :raises ValueError: when there is nothing to resume.
        """
        record = self.store.read_population()
        if record is None:
            raise ValueError("the store holds no population that could be resumed")
        with refusing("the stored population"):
            legal = f"at most {STORE_VERSION}: a newer version of Tailguard has written it"
            require(record["version"] <= STORE_VERSION, "version", record["version"], legal)
            state = record["scheduler"]
            self._parts = record.get("history_parts", 0)  # version 1 has the histories in the record itself
            for part in range(self._parts):
                for member, entries in zip(state["members"], self.store.read_history(part)["entries"], strict=True):
                    member.setdefault("history", []).extend(entries)
            for member in state["members"]:
                member.setdefault("history", [])
            self.scheduler.load_state_dict(state)
        self._stored = [len(member.history) if self._parts else 0 for member in self.scheduler.members]
        self._created.clear()

    def close(self) -> None:
        """Stop all workers."""
        self.executor.close()

    def __enter__(self) -> Self:
        """Enter a ``with`` statement."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop all workers."""
        self.close()

    # ------------------------------------------------------------------------------------------ synchronous and asynchronous

    def _run_synchronously(self, until: int) -> None:
        while max(member.step for member in self.scheduler.members) < until:
            self._train_idle(until)
            arrived: dict[int, JobResult] = {}
            while self._busy or self._backlog:
                results = self._next(self._patience)
                if not results:
                    break
                arrived.update(results)
            for member_id in sorted(arrived):
                self._report(member_id, arrived[member_id])
            self._decide()
        while self._busy or self._backlog:  # late arrivals count, and the next run decides about them
            for member_id, result in self._next(None):
                self._report(member_id, result)
                self._save_population()

    def _run_asynchronously(self, until: int) -> None:
        while True:
            self._train_idle(until)
            if not self._busy and not self._backlog:
                return
            for member_id, result in self._next(None):
                self._report(member_id, result)
                self._decide()

    def _next(self, timeout: float | None) -> list[tuple[int, JobResult]]:
        """Return the results that have arrived already, or else wait for the next ones."""
        results, self._backlog = self._backlog or self._final_results(timeout), []
        return results

    def _train_idle(self, until: int) -> None:
        waiting = {member_id for member_id, _ in self._backlog}
        idle = [
            member
            for member in self.scheduler.members
            if member.alive
            and member.step < until
            and member.step == member.decided_step
            and member.member_id not in self._busy
            and member.member_id not in waiting
        ]
        interval = self.scheduler.config.perturbation_interval
        for member in sorted(idle, key=lambda member: (member.step, member.member_id)):
            self._submit(member.member_id, Train(interval, checkpoint_name(member.member_id, member.step + interval)))

    # ------------------------------------------------------------------------------------------------- decisions and exploits

    def _report(self, member_id: int, result: JobResult) -> None:
        if isinstance(result, Done):
            step = self.scheduler.members[member_id].step + self.scheduler.config.perturbation_interval
            self.scheduler.report(member_id, step, result.scores, checkpoint_name(member_id, step))
        else:
            self._mark_dead(member_id, result)

    def _mark_dead(self, member_id: int, result: JobResult) -> None:
        logger.warning("Member %d: %s", member_id, result)
        self._created.discard(member_id)
        self.scheduler.mark_dead(member_id)

    def _decide(self) -> None:
        decided = self.scheduler.decide()
        self._carry_out(decided.exploits)
        self._save_population()
        if not any(member.alive for member in self.scheduler.members):
            raise Extinct("every member of the population has died, so there is none left to copy")
        if decided.number > 0 and self.on_round is not None:
            self.on_round(decided)

    def _carry_out(self, exploits: Sequence[Exploit]) -> None:
        """Make all copies at once. Sources were saved before, so a source may be a target of the same round."""
        for exploit in exploits:
            self._submit(exploit.target, _copy_from(exploit.checkpoint_path, exploit.hyperparams, exploit.seed))
        results: dict[int, JobResult] = {}
        targets = {exploit.target for exploit in exploits}
        while len(results) < len(targets):
            for member_id, result in self._final_results(None):
                if member_id in targets:
                    results[member_id] = result
                else:
                    self._backlog.append((member_id, result))
        for exploit in exploits:
            self._finish_exploit(exploit, results[exploit.target])

    def _finish_exploit(self, exploit: Exploit, result: JobResult) -> None:
        if isinstance(result, Done):
            self.scheduler.commit(exploit)
            return
        logger.warning("Member %d: %s", exploit.target, result)
        self._created.discard(exploit.target)  # its learner may be half a copy: it is created again from its record
        self.scheduler.abandon(exploit)
        if isinstance(result, Lost) and self.scheduler.members[exploit.target].alive:
            self._mark_dead(exploit.target, result)

    def _save_population(self) -> None:
        """Store what has been decided. Histories only grow: what is new of them is stored, and nothing is written again."""
        state = self.scheduler.state_dict()
        histories = [member.pop("history") for member in state["members"]]
        if any(len(history) > stored for history, stored in zip(histories, self._stored, strict=True)):
            entries = [history[stored:] for history, stored in zip(histories, self._stored, strict=True)]
            self.store.write_history(self._parts, {"entries": entries})
            self._parts, self._stored = self._parts + 1, [len(history) for history in histories]
        # The record counts the parts: one that was written before a crash and is not counted will be written again.
        self.store.write_population({"version": STORE_VERSION, "history_parts": self._parts, "scheduler": state})
        self.store.keep_only(self._needed())

    def _needed(self) -> set[str]:
        """Return the names of the states from which members can be created again."""
        return {member.checkpoint_path for member in self.scheduler.members if member.checkpoint_path is not None}

    # -------------------------------------------------------------------------------------------------------- jobs of a member

    def _submit(self, member_id: int, job: Train | CopyFrom, losses: tuple[Lost, ...] = ()) -> None:
        missing = member_id not in self._created
        jobs: list[WorkerJob] = [*self._creation(member_id, job), job] if missing else [job]
        if self.executor.keeps_learners:
            self._created.add(member_id)
        self._busy[member_id] = _Task(job, losses)
        self.executor.submit(member_id, jobs)

    def _creation(self, member_id: int, job: Train | CopyFrom) -> list[WorkerJob]:
        """Return the jobs that create a member in the state of its record; before a copy the state is not needed."""
        member = self.scheduler.members[member_id]
        seed = self.scheduler.seed_of(member_id)
        create = Create(dict(member.hyperparams), seed)
        if isinstance(job, CopyFrom) or member.checkpoint_path is None:
            return [create]
        if is_fresh_copy(member):
            return [create, _copy_from(member.checkpoint_path, member.hyperparams, seed)]
        return [create, Restore(member.checkpoint_path)]

    def _final_results(self, timeout: float | None) -> list[tuple[int, JobResult]]:
        """Return results that are final; none only after the timeout."""
        while True:
            results = self.executor.wait(timeout)
            final = [(member_id, result) for member_id, result in results if self._is_final(member_id, result)]
            if final or not results:
                return final

    def _is_final(self, member_id: int, result: JobResult) -> bool:
        """Return False for a member that was lost and is submitted again.

        :raises RuntimeError: when the learner has a bug.
        :raises OSError: when the disk of the member fails.
        """
        task = self._busy.pop(member_id)
        if isinstance(result, Crashed):
            raise RuntimeError(f"the learner of member {member_id} has a bug:\n{result.trace}")
        if isinstance(result, IOFailed):
            raise OSError(f"member {member_id} cannot continue: {result.reason}; nothing that was decided is lost")
        if not isinstance(result, Lost):
            return True
        self._created.discard(member_id)
        losses = (*task.losses, result)
        if count_losses(losses, self.executor.alive) > self._max_losses:
            return True
        logger.warning("Member %d: lost (%s); created again from its last checkpoint", member_id, result.reason)
        self._submit(member_id, task.job, losses)
        return False


def checkpoint_name(member_id: int, step: int) -> str:
    """Return the name of a member's state after this many steps."""
    return f"member_{member_id}_step_{step}"


def is_fresh_copy(member: PopulationMember) -> bool:
    """Return True if a member has not reported since its last copy, so that its checkpoint is its source's."""
    known = member.history[-1]["generation"] if member.history else 0
    return bool(member.generation > known)


def _copy_from(checkpoint: str | None, hyperparams: dict[str, Any], seed: int) -> CopyFrom:
    if checkpoint is None:
        raise RuntimeError("a member without a checkpoint was chosen as a source")
    return CopyFrom(checkpoint, dict(hyperparams), seed)
