"""All members in this process, one after the other. The reference for every other engine."""

from collections.abc import Mapping
from typing import Any

from tailguard.population.learner import Learner, LearnerFactory, MemberFailed
from tailguard.population.scheduler import Exploit, PBTScheduler, Round
from tailguard.validation import require


class SerialEngine:
    """Trains a population round by round and carries out its exploits.

    In a synchronous population everybody trains, then all copies are made from the states before the round. In an
    asynchronous one members take turns, and each is decided about at the end of its turn.

    :param scheduler: decides.
    :param factory: makes the learner of a member; also the new one for a member that has died.
    """

    def __init__(self, scheduler: PBTScheduler, factory: LearnerFactory) -> None:
        self.scheduler = scheduler
        self._factory = factory
        self.learners: list[Learner] = [self._made(member.member_id) for member in scheduler.members]

    def run(self, rounds: int) -> None:
        """Let every member train this many intervals.

        :param rounds: at least 0.
        :raises RuntimeError: when every member is dead.
        """
        require(rounds >= 0, "rounds", rounds, "at least 0")
        for _ in range(rounds):
            if self.scheduler.config.synchronous:
                for member_id in range(len(self.learners)):
                    self._train(member_id)
                self._carry_out(self.scheduler.decide())
            else:
                for member_id in range(len(self.learners)):
                    self._train(member_id)
                    self._carry_out(self.scheduler.decide())
            if not any(member.alive for member in self.scheduler.members):
                raise RuntimeError("every member of the population has died, so there is nobody left to copy")

    def state_dict(self) -> dict[str, Any]:
        """The scheduler and every learner that lives. Take it between runs."""
        states = [
            learner.save() if member.alive else None
            for learner, member in zip(self.learners, self.scheduler.members, strict=True)
        ]
        return {"scheduler": self.scheduler.state_dict(), "learners": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, as if nothing had happened."""
        self.scheduler.load_state_dict(state["scheduler"])
        self.learners = [self._made(member.member_id) for member in self.scheduler.members]
        for learner, saved in zip(self.learners, state["learners"], strict=True):
            if saved is not None:
                learner.load(saved)

    def _made(self, member_id: int) -> Learner:
        hyperparams = self.scheduler.members[member_id].hyperparams
        return self._factory(member_id, hyperparams, self.scheduler.seed_of(member_id))

    def _train(self, member_id: int) -> None:
        member, interval = self.scheduler.members[member_id], self.scheduler.config.perturbation_interval
        if not member.alive:
            return
        try:
            self.learners[member_id].train(interval)
            scores = self.learners[member_id].score()
        except MemberFailed:
            self.scheduler.mark_dead(member_id)
        else:
            self.scheduler.report(member_id, member.step + interval, scores)

    def _carry_out(self, decided: Round) -> None:
        # Saved before anything is copied: a source may be a target of the same round.
        states: dict[int, Any] = {}
        for source in sorted({exploit.source for exploit in decided.exploits}):
            try:
                states[source] = self.learners[source].save()
            except MemberFailed:
                self.scheduler.mark_dead(source)
        for exploit in decided.exploits:
            if exploit.source in states:
                self._copy(exploit, states[exploit.source])
            else:
                self.scheduler.abandon(exploit)

    def _copy(self, exploit: Exploit, state: Any) -> None:
        target = exploit.target
        try:
            learner = self.learners[target] if self.scheduler.members[target].alive else self._made(target)
            learner.adopt(state, exploit.hyperparams, exploit.seed)
        except MemberFailed:
            self.scheduler.abandon(exploit)
        else:
            self.learners[target] = learner
            self.scheduler.commit(exploit)
