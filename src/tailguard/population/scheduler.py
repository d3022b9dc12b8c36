"""The decisions of population-based training (Jaderberg et al. 2017): pure, seeded, resumable.

The scheduler is told scores and decides who copies whom with which hyperparameters; engines carry it out. It does not know
models, files or processes. The same reports and the same seed give the same decisions, whatever the order of the reports
between two rounds, and also across a save and a restore.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from tailguard.population.config import PBTConfig, Value
from tailguard.population.lineage import LINEAGE_VERSION, Event, apply_event, mean_score
from tailguard.population.member import PopulationMember, Scores, member_seed
from tailguard.population.operators import choose_sources, explore, merit, resample
from tailguard.validation import require

logger = logging.getLogger(__name__)
WARN_EVERY = 5  # failed ready checks
ROUNDING = 1e-9


@dataclass(frozen=True)
class Exploit:
    """The decision that `target` becomes a copy of `source`.

    :param round: number of the decision.
    :param target: the member that copies.
    :param source: the member that is copied, as it was when the decision was made.
    :param hyperparams: the copy's hyperparameters.
    :param explored: True if they were changed after copying.
    :param seed: random seed of the copy.
    :param source_performance: performance from which the copy starts.
    :param checkpoint_path: file with the source's state.
    :param vecnormalize_stats_path: file with the source's ``VecNormalize`` statistics.
    """

    round: int
    target: int
    source: int
    hyperparams: dict[str, Value]
    explored: bool
    seed: int
    source_performance: float
    checkpoint_path: str | None
    vecnormalize_stats_path: str | None


@dataclass(frozen=True)
class Round:
    """The decisions that were made together.

    :param number: from 1; 0 if the population was not ready.
    :param considered: members about which it was decided: they continue, those with an exploit after it. Empty: keep waiting.
    :param exploits: by target. A source may itself be a target: every copy is of the state before the round.
    """

    number: int
    considered: tuple[int, ...]
    exploits: tuple[Exploit, ...]


COUNTS = ("rounds", "events", "failed_ready_checks", "exploitation_count", "exploration_count")
# Of a saved state, which a file may hold that somebody else has written.
_FORM = TypeAdapter(tuple[list[PopulationMember], list[Exploit], int, int, int, int, int])


class PBTScheduler:
    """Decides who copies whom, and with which hyperparameters.

    The order of calls: :meth:`report` after each interval of a member, :meth:`decide`, and for each exploit :meth:`commit` when
    it has been carried out or :meth:`abandon` when it could not be.

    :param config: the settings.
    :param initial: hyperparameters of each member; None draws them, uniformly on the scale of the search.
    :param record: called with each event, in order; usually a :class:`~tailguard.population.lineage.Lineage`.
    """

    def __init__(
        self,
        config: PBTConfig,
        initial: Sequence[Mapping[str, Value]] | None = None,
        record: Callable[[Event], None] | None = None,
    ) -> None:
        if config.explore_method == "pb2":
            _load_pb2()  # fails here rather than after the first interval
        self.config = config
        self.record = record
        self.members: list[PopulationMember] = []
        self.open_exploits: dict[int, Exploit] = {}  # decided, neither committed nor abandoned; by target
        self.rounds = 0
        self.events = 0
        self.failed_ready_checks = 0
        self.exploitation_count = 0
        self.exploration_count = 0
        self._rng = np.random.default_rng(config.seed)
        hyperparams = self._drawn() if initial is None else self._checked(initial)
        self._record(
            {"event": "start", "version": LINEAGE_VERSION, "config": config.model_dump(mode="json"), "hyperparams": hyperparams}
        )

    def report(
        self,
        member_id: int,
        step: int,
        scores: Scores,
        checkpoint_path: str | None = None,
        vecnormalize_stats_path: str | None = None,
    ) -> None:
        """Record that a member has trained and was evaluated. If it was dead, it is alive again.

        :param member_id: number of the member.
        :param step: its total number of steps; never fewer than before.
        :param scores: one evaluation or several. None, an empty list, NaN and infinities mean that the member is broken.
        :param checkpoint_path: file with its state, for engines that copy through files.
        :param vecnormalize_stats_path: file with the statistics of its ``VecNormalize``.
        """
        member = self._member(member_id)
        require(member_id not in self.open_exploits, "member_id", member_id, "a member whose exploit is committed or abandoned")
        require(step >= member.step, f"step of member {member_id}", step, f"at least {member.step}, its last one")
        plain = _plain(scores)
        if mean_score(plain) is None:
            logger.warning("Member %d: no finite %s at step %d; it will be replaced", member_id, self.config.metric_name, step)
        self._record(
            {
                "event": "report",
                "member": member_id,
                "step": int(step),
                "scores": plain,
                "checkpoint_path": checkpoint_path,
                "vecnormalize_stats_path": vecnormalize_stats_path,
            }
        )

    def mark_dead(self, member_id: int) -> None:
        """Record that a member is gone. It is neither waited for nor copied, and the next decision replaces it."""
        self._member(member_id)
        logger.warning("Member %d: died; it will be replaced", member_id)
        self._record({"event": "dead", "member": member_id})

    def decide(self) -> Round:
        """Decide about the members that have arrived, and about the dead.

        Synchronous: about all of them, once enough are ready; before that nobody is considered, and each call counts as one
        failed check, so call it once per wait and not once per report. Asynchronous: about those that have reported since the
        last call; while the population is not ready they just continue.
        """
        arrived = [member for member in self.members if self._arrived(member)]
        dead = [member for member in self.members if not member.alive and member.member_id not in self.open_exploits]
        if not self.config.synchronous and not arrived and not dead:
            return Round(0, (), ())
        if not self._population_ready(arrived):
            waiting = () if self.config.synchronous else tuple(member.member_id for member in arrived)
            if waiting:
                self._record({"event": "round", "number": 0, "considered": list(waiting)})
            return Round(0, waiting, ())
        self.rounds += 1
        considered = sorted([*arrived, *dead], key=lambda member: member.member_id)
        exploits = self._exploits(considered, self._contenders(arrived))
        ids = tuple(member.member_id for member in considered)
        self._record({"event": "round", "number": self.rounds, "considered": list(ids)})
        self.open_exploits.update({exploit.target: exploit for exploit in exploits})
        return Round(self.rounds, ids, exploits)

    def commit(self, exploit: Exploit) -> None:
        """Record that an exploit was carried out: the target is now a copy with new hyperparameters, and has no score yet."""
        self._close(exploit)
        self.exploitation_count += 1
        self.exploration_count += exploit.explored
        self._record({"event": "exploit", **asdict(exploit)})

    def abandon(self, exploit: Exploit) -> None:
        """Record that an exploit could not be carried out: the target stays as it was."""
        self._close(exploit)
        logger.warning("Member %d: could not copy member %d and stays as it was", exploit.target, exploit.source)
        self._record({"event": "abandoned", "round": exploit.round, "target": exploit.target, "source": exploit.source})

    @property
    def best(self) -> PopulationMember | None:
        """The living member with the best known performance; None if there is none."""
        able = [member for member in self.members if member.alive and member.performance is not None]
        return max(able, key=lambda member: merit(self.config, member), default=None)

    def seed_of(self, member_id: int) -> int:
        """Return the random seed of a member at its present generation."""
        return member_seed(self.config.seed, member_id, self._member(member_id).generation)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the population, for a logger. Performances are left out where no member has one."""
        known = [member.performance for member in self.members if member.alive and member.performance is not None]
        result = {
            "pbt/population_size": float(len(self.members)),
            "pbt/ready_members": float(len(self._ready([member for member in self.members if self._arrived(member)]))),
            "pbt/exploitation_count": float(self.exploitation_count),
            "pbt/exploration_count": float(self.exploration_count),
            "pbt/failed_ready_checks": float(self.failed_ready_checks),
        }
        if known:
            for name, function in (("mean", np.mean), ("std", np.std), ("min", np.min), ("max", np.max)):
                result[f"pbt/{name}_performance"] = float(function(known))
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the settings, in plain numbers, strings, lists and dicts."""
        return {
            "members": [member.to_dict() for member in self.members],
            "open_exploits": [asdict(exploit) for exploit in self.open_exploits.values()],
            "rounds": self.rounds,
            "events": self.events,
            "failed_ready_checks": self.failed_ready_checks,
            "exploitation_count": self.exploitation_count,
            "exploration_count": self.exploration_count,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        expected = sorted(self.state_dict())
        require(sorted(state) == expected, "the keys of the scheduler's state", sorted(state), str(expected))
        known = [{**values, "history": []} for values in state["members"]]
        fields = set(PopulationMember.__dataclass_fields__)
        require(all(set(values) == fields for values in known), "a member", "a mapping", f"one of {sorted(fields)}")
        _FORM.validate_json(json.dumps([known, state["open_exploits"], *(state[name] for name in COUNTS)]), strict=True)
        members = [PopulationMember(**{**values, "history": list(values["history"])}) for values in state["members"]]
        self._checked([member.hyperparams for member in members])
        self.members = members
        self.open_exploits = {values["target"]: Exploit(**values) for values in state["open_exploits"]}
        self.rounds = state["rounds"]
        self.events = state["events"]
        self.failed_ready_checks = state["failed_ready_checks"]
        self.exploitation_count = state["exploitation_count"]
        self.exploration_count = state["exploration_count"]
        self._rng.bit_generator.state = state["rng"]

    def _record(self, event: Event) -> None:
        apply_event(self.members, event)
        self.events += 1
        if self.record is not None:
            self.record(event)

    def _member(self, member_id: int) -> PopulationMember:
        require(0 <= member_id < len(self.members), "member_id", member_id, f"0 to {len(self.members) - 1}")
        return self.members[member_id]

    def _close(self, exploit: Exploit) -> None:
        is_open = self.open_exploits.get(exploit.target) == exploit
        require(is_open, "exploit", exploit, "one that decide() returned and that was not closed yet")
        del self.open_exploits[exploit.target]

    def _drawn(self) -> list[dict[str, Value]]:
        size, configs = self.config.population_size, self.config.hyperparams
        return [{config.name: resample(config, self._rng) for config in configs} for _ in range(size)]

    def _checked(self, initial: Sequence[Mapping[str, Value]]) -> list[dict[str, Value]]:
        require(
            len(initial) == self.config.population_size, "number of members", len(initial), f"{self.config.population_size}"
        )
        names = {config.name for config in self.config.hyperparams}
        for values in initial:
            require(set(values) == names, "hyperparameters of a member", sorted(values), f"exactly {sorted(names)}")
            for config in self.config.hyperparams:
                config.require_legal(values[config.name])
        return [dict(values) for values in initial]

    def _arrived(self, member: PopulationMember) -> bool:
        due = member.step - member.decided_step >= self.config.perturbation_interval
        return member.alive and due and member.member_id not in self.open_exploits

    def _ready(self, arrived: Sequence[PopulationMember]) -> Sequence[PopulationMember]:
        """Return the members that take part: those that have arrived, or, asynchronously, that have ever been scored."""
        if self.config.synchronous:
            return arrived
        return [member for member in self.members if member.alive and member.history]

    def _contenders(self, arrived: Sequence[PopulationMember]) -> list[PopulationMember]:
        able = [member for member in self._ready(arrived) if member.performance is not None]
        return [member for member in able if member.member_id not in self.open_exploits]

    def _population_ready(self, arrived: Sequence[PopulationMember]) -> bool:
        config = self.config
        ready, alive = len(self._ready(arrived)), sum(member.alive for member in self.members)
        required = math.ceil(alive * config.ready_percentage - ROUNDING)
        if ready >= required:
            if self.failed_ready_checks > 0:
                logger.info("PBT: ready again after %d failed ready checks", self.failed_ready_checks)
            self.failed_ready_checks = 0
            return True
        self.failed_ready_checks += 1
        failed = self.failed_ready_checks
        if failed >= config.ready_check_max_wait and ready >= config.min_ready_members:
            logger.warning(
                "PBT deadlock prevention: %d failed ready checks in a row; continuing with %d ready members "
                "(min_ready_members %d, required %d). Members may have crashed: look after them or lower ready_percentage",
                failed,
                ready,
                config.min_ready_members,
                required,
            )
            self.failed_ready_checks = 0
            return True
        if failed == 1 or failed % WARN_EVERY == 0:
            level = logging.INFO if failed == 1 else logging.WARNING
            logger.log(level, "PBT: %d of %d required members are ready (failed ready check %d)", ready, required, failed)
        return False

    def _exploits(self, considered: Sequence[PopulationMember], contenders: Sequence[PopulationMember]) -> tuple[Exploit, ...]:
        targets = [member for member in considered if member.broken or not self._protected(member)]
        if not contenders and targets:
            logger.warning("PBT: no member has a finite %s, so none is copied", self.config.metric_name)
        sources = choose_sources(self.config, targets, contenders, self._rng)
        explored = self._explored(sources)
        return tuple(self._exploit(target, source, explored[target]) for target, source in sources.items())

    def _exploit(self, target: int, source: int, hyperparams: dict[str, Value]) -> Exploit:
        copied = self.members[source]
        if copied.performance is None:
            raise RuntimeError(f"member {source} without a performance was chosen as a source")
        return Exploit(
            round=self.rounds,
            target=target,
            source=source,
            hyperparams=hyperparams,
            explored=self.config.explore_method != "none" and not self._protected(self.members[target]),
            seed=member_seed(self.config.seed, target, self.members[target].generation + 1),
            source_performance=copied.performance,
            checkpoint_path=copied.checkpoint_path,
            vecnormalize_stats_path=copied.vecnormalize_stats_path,
        )

    def _explored(self, sources: Mapping[int, int]) -> dict[int, dict[str, Value]]:
        """Return the hyperparameters of each target after its copy."""
        config = self.config
        result: dict[int, dict[str, Value]] = {}
        for target, source in sources.items():
            own = self._protected(self.members[target]) or not config.inherit_hyperparams
            result[target] = dict(self.members[target if own else source].hyperparams)
        free = [target for target in sources if not self._protected(self.members[target])]
        if config.explore_method == "none":
            return result
        method = "both" if config.explore_method == "pb2" else config.explore_method
        for target in free:
            result[target] = explore(config.hyperparams, result[target], method, self._rng)
        if config.explore_method == "pb2":
            proposals = _load_pb2()(config, self.members, {target: sources[target] for target in free}, self._rng)
            for target, values in proposals.items():
                result[target].update(values)
        return result

    def _protected(self, member: PopulationMember) -> bool:
        return self.config.protect_first_member and member.member_id == 0


def _plain(scores: Scores) -> list[float | None]:
    values = np.asarray([] if scores is None else scores, dtype=np.float64).ravel()
    return [float(value) if math.isfinite(value) else None for value in values]


def _load_pb2() -> Callable[..., dict[int, dict[str, Value]]]:
    try:
        from tailguard.population.pb2 import propose
    except ModuleNotFoundError as error:
        raise ImportError('explore_method "pb2" needs scikit-learn: pip install "tailguard[pb2]"') from error
    return propose
