"""The one driver of all engines: it starts members, tells the scheduler, and carries out what is decided.

An engine differs from another in its crew alone: how a member is called. In a synchronous population reports are made in the
order of the members and after all have arrived, whoever was first, so that every crew gives the same lineage.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from tailguard.population.member import PopulationMember
from tailguard.population.scheduler import Exploit, PBTScheduler, Round
from tailguard.population.store import Store
from tailguard.population.worker import Adopt, Answer, Crashed, Done, Hindered, Job, Lost, Make, Restore, Train
from tailguard.validation import require

logger = logging.getLogger(__name__)
VERSION = 1


class Extinct(RuntimeError):
    """Nobody is left to copy."""


class Executor(Protocol):
    """A way to call members."""

    def submit(self, member_id: int, jobs: Sequence[Job]) -> None:
        """Have a member do these jobs. If the first one is :class:`Make`, give it a new process first, if it has one at all."""

    def wait(self, timeout: float | None) -> list[tuple[int, Answer]]:
        """The answers that have come, one per submission; waits for at least one.

        :param timeout: seconds after which to return without any; None waits for ever.
        """

    def close(self) -> None:
        """Send everybody home."""


@dataclass(frozen=True)
class _Task:
    """What a member is doing.

    :param job: the last of its jobs.
    :param losses: how often the member was lost over it.
    """

    job: Train | Adopt
    losses: int


class Engine:
    """Trains a population and carries out its exploits. Close it when done, or use it in a ``with`` statement.

    A member that is lost is made again from its last checkpoint and repeats its interval, so that nothing but time is lost. One
    that is lost too often, or that says itself that it cannot go on, is dead: the scheduler replaces it with a copy of another.

    :param scheduler: decides.
    :param crew: how members are called.
    :param store: where states lie. After every decision it has all that :meth:`resume` needs.
    :param max_losses: losses over one interval after which a member counts as dead. 0 never tries again.
    :param patience: seconds without an arrival after which a synchronous population checks whether it is ready to decide
        without those who are missing (``ready_percentage``, ``ready_check_max_wait``). None waits for everybody: with a number
        the lineage depends on how fast the members are.
    :param on_round: called after every decision that was carried out.
    """

    def __init__(
        self,
        scheduler: PBTScheduler,
        crew: Executor,
        store: Store,
        *,
        max_losses: int = 2,
        patience: float | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        require(max_losses >= 0, "max_losses", max_losses, "at least 0")
        require(patience is None or patience > 0.0, "patience", patience, "above 0, or None")
        self.scheduler = scheduler
        self.crew = crew
        self.store = store
        self.on_round = on_round
        self._max_losses = max_losses
        self._patience = patience
        self._present: set[int] = set()  # members that sit somewhere, as their record says
        self._busy: dict[int, _Task] = {}
        self._backlog: list[tuple[int, Answer]] = []  # came while the driver was waiting for something else

    def run(self, intervals: int) -> None:
        """Train until the population has done this many intervals since its start.

        :param intervals: at least 0; those that are done already count. Asynchronously every living member does as many.
        :raises Extinct: when every member is dead.
        :raises RuntimeError: when a learner has a bug.
        :raises OSError: when the disk of a member fails. The population can be resumed.
        """
        require(intervals >= 0, "intervals", intervals, "at least 0")
        until = intervals * self.scheduler.config.perturbation_interval
        self._remember()
        if self.scheduler.config.synchronous:
            self._run_together(until)
        else:
            self._run_apart(until)

    def resume(self) -> None:
        """Go on where the population in the store was after its last decision: with the same decisions as if nothing had been.

        :raises ValueError: when there is nothing to go on from.
        """
        record = self.store.read_population()
        if record is None:
            raise ValueError("the store holds no population that could be resumed")
        require(record["version"] == VERSION, "version of the stored population", record["version"], str(VERSION))
        self.scheduler.load_state_dict(record["scheduler"])
        self._present.clear()

    def close(self) -> None:
        """Send everybody home."""
        self.crew.close()

    def __enter__(self) -> Self:
        """For ``with``."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close."""
        self.close()

    # ------------------------------------------------------------------------------------------------- the two ways to wait

    def _run_together(self, until: int) -> None:
        while max(member.step for member in self.scheduler.members) < until:
            self._train_idle(until)
            arrived: dict[int, Answer] = {}
            while self._busy or self._backlog:
                settled = self._next(self._patience)
                if not settled:
                    break
                arrived.update(settled)
            for member_id in sorted(arrived):
                self._report(member_id, arrived[member_id])
            self._decide()
        while self._busy or self._backlog:  # for these nobody has waited: their work counts, and the next run decides about it
            for member_id, answer in self._next(None):
                self._report(member_id, answer)
                self._remember()

    def _run_apart(self, until: int) -> None:
        while True:
            self._train_idle(until)
            if not self._busy and not self._backlog:
                return
            for member_id, answer in self._next(None):
                self._report(member_id, answer)
                self._decide()

    def _next(self, timeout: float | None) -> list[tuple[int, Answer]]:
        """Answers that have come already, or else those to come."""
        settled, self._backlog = self._backlog or self._settled(timeout), []
        return settled

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

    # ----------------------------------------------------------------------------------------------------- deciding, copying

    def _report(self, member_id: int, answer: Answer) -> None:
        if isinstance(answer, Done):
            step = self.scheduler.members[member_id].step + self.scheduler.config.perturbation_interval
            self.scheduler.report(member_id, step, answer.scores, checkpoint_name(member_id, step))
        else:
            self._bury(member_id, answer)

    def _bury(self, member_id: int, answer: Answer) -> None:
        logger.warning("Member %d: %s", member_id, answer)
        self._present.discard(member_id)
        self.scheduler.mark_dead(member_id)

    def _decide(self) -> None:
        decided = self.scheduler.decide()
        self._carry_out(decided.exploits)
        self._remember()
        if not any(member.alive for member in self.scheduler.members):
            raise Extinct("every member of the population has died, so there is nobody left to copy")
        if decided.number > 0 and self.on_round is not None:
            self.on_round(decided)

    def _carry_out(self, exploits: Sequence[Exploit]) -> None:
        """All copies at once. Sources have saved themselves before, so a source may be a target of the same round."""
        for exploit in exploits:
            self._submit(exploit.target, _adopt(exploit.checkpoint_path, exploit.hyperparams, exploit.seed))
        answers: dict[int, Answer] = {}
        targets = {exploit.target for exploit in exploits}
        while len(answers) < len(targets):
            for member_id, answer in self._settled(None):
                if member_id in targets:
                    answers[member_id] = answer
                else:
                    self._backlog.append((member_id, answer))
        for exploit in exploits:
            self._close(exploit, answers[exploit.target])

    def _close(self, exploit: Exploit, answer: Answer) -> None:
        if isinstance(answer, Done):
            self.scheduler.commit(exploit)
            return
        logger.warning("Member %d: %s", exploit.target, answer)
        self._present.discard(exploit.target)  # whatever sits there now, it is made again from its record
        self.scheduler.abandon(exploit)
        if isinstance(answer, Lost) and self.scheduler.members[exploit.target].alive:
            self._bury(exploit.target, answer)

    def _remember(self) -> None:
        self.store.write_population({"version": VERSION, "scheduler": self.scheduler.state_dict()})
        self.store.keep_only(self._needed())

    def _needed(self) -> set[str]:
        """The states from which members can be made again."""
        return {member.checkpoint_path for member in self.scheduler.members if member.checkpoint_path is not None}

    # ------------------------------------------------------------------------------------------------------ calling a member

    def _submit(self, member_id: int, job: Train | Adopt, losses: int = 0) -> None:
        anew = member_id not in self._present
        jobs: list[Job] = [*self._birth(member_id, job), job] if anew else [job]
        self._present.add(member_id)
        self._busy[member_id] = _Task(job, losses)
        self.crew.submit(member_id, jobs)

    def _birth(self, member_id: int, job: Train | Adopt) -> list[Job]:
        """What makes a member what its record says. One that is about to become a copy need not become itself before."""
        member = self.scheduler.members[member_id]
        seed = self.scheduler.seed_of(member_id)
        made = Make(dict(member.hyperparams), seed)
        if isinstance(job, Adopt) or member.checkpoint_path is None:
            return [made]
        if is_fresh_copy(member):
            return [made, _adopt(member.checkpoint_path, member.hyperparams, seed)]
        return [made, Restore(member.checkpoint_path)]

    def _settled(self, timeout: float | None) -> list[tuple[int, Answer]]:
        """Answers that count; none only after the timeout."""
        while True:
            answers = self.crew.wait(timeout)
            settled = [(member_id, answer) for member_id, answer in answers if self._counts(member_id, answer)]
            if settled or not answers:
                return settled

    def _counts(self, member_id: int, answer: Answer) -> bool:
        """Whether this was the last word: who was lost tries again as long as it may."""
        task = self._busy.pop(member_id)
        if isinstance(answer, Crashed):
            raise RuntimeError(f"the learner of member {member_id} has a bug:\n{answer.trace}")
        if isinstance(answer, Hindered):
            raise OSError(f"member {member_id} cannot go on: {answer.reason}; nothing that was decided is lost")
        if not isinstance(answer, Lost):
            return True
        self._present.discard(member_id)
        if task.losses >= self._max_losses:
            return True
        logger.warning("Member %d: lost (%s); made again from its last checkpoint", member_id, answer.reason)
        self._submit(member_id, task.job, task.losses + 1)
        return False


def checkpoint_name(member_id: int, step: int) -> str:
    """The name of a member's state after so many steps."""
    return f"member_{member_id}_step_{step}"


def is_fresh_copy(member: PopulationMember) -> bool:
    """Whether the last thing that happened to a member was a copy, so that its checkpoint is its source's."""
    known = member.history[-1]["generation"] if member.history else 0
    return bool(member.generation > known)


def _adopt(checkpoint: str | None, hyperparams: dict[str, Any], seed: int) -> Adopt:
    if checkpoint is None:
        raise RuntimeError("a member without a checkpoint was chosen as a source")
    return Adopt(checkpoint, dict(hyperparams), seed)
