"""The serial engine on real learners: the paper's toy, resumption, failures, and copies of the state before the round."""

import math

import numpy as np
import pytest
from population_toys import MovingOptimum, PaperToy

from tailguard.population import PBTConfig, PBTScheduler
from tailguard.population.engines.serial import SerialEngine
from tailguard.population.lineage import replay
from tailguard.population.member import MemberFailed
from tailguard.population.store import FileStore
from tailguard.population.worker import Train

ROUNDS, INTERVAL = 20, 10  # 200 steps, as in the paper


def toy(seed=0, **settings):
    config = PBTConfig(population_size=2, perturbation_interval=INTERVAL, hyperparams=PaperToy.search, seed=seed, **settings)
    engine = SerialEngine(PBTScheduler(config, PaperToy.initial), PaperToy)
    engine.run(ROUNDS)
    return max(learner.score() for learner in engine.learners)


def moving(record=None, factory=MovingOptimum, store=None, **settings):
    config = PBTConfig(population_size=5, perturbation_interval=10, hyperparams=MovingOptimum.search, **settings)
    return SerialEngine(PBTScheduler(config, record=record), factory, store)


class TestPaperToy:
    """Each step on a coordinate that a member sees multiplies it by 1 - 2 * 0.01."""

    def test_alone_a_member_sees_one_coordinate(self):
        learners = [PaperToy(i, hyperparams, 0) for i, hyperparams in enumerate(PaperToy.initial)]
        for learner in learners:
            learner.train(ROUNDS * INTERVAL)
            assert learner.score() == pytest.approx(1.2 - 0.81 * (1.0 + 0.98**400), rel=1e-12)
            assert round(learner.score(), 4) == 0.3897

    def test_exploits_alone_share_the_work(self):
        """The two take turns, so that each coordinate gets half of the steps: no way of copying can do better."""
        best = toy(explore_method="none", inherit_hyperparams=False)
        assert best == pytest.approx(1.2 - 2.0 * 0.81 * 0.98**200, rel=1e-12)

    @pytest.mark.parametrize(("renewed", "expected"), [(True, 1.1647), (False, 1.1664)])
    def test_members_that_compare_old_scores_lose_steps(self, renewed, expected):
        """Why others report less for exploits alone: there a member publishes its score after each step and compares what is
        published, its own last one included. `renewed`: it is evaluated again after a copy."""
        learners = [PaperToy(i, hyperparams, 0) for i, hyperparams in enumerate(PaperToy.initial)]
        published = [(0.0, learner.save()) for learner in learners]
        for step in range(ROUNDS * INTERVAL):
            for i, learner in enumerate(learners):
                learner.train(1)
                score = learner.score()
                best = 0 if published[0][0] >= published[1][0] else 1
                if step % INTERVAL == 0 and best != i:
                    learner.copy_from(published[best][1], learner.hyperparams, 0)
                    score = learner.score() if renewed else score
                published[i] = (score, learner.save())
        result = max(learner.score() for learner in learners)
        assert round(result, 4) == expected
        assert result < toy(explore_method="none", inherit_hyperparams=False)

    def test_exploration_finds_what_neither_knew(self):
        """Weights are copied and hyperparameters kept, as in the paper's figure."""
        results = [toy(seed, explore_method="perturb", inherit_hyperparams=False) for seed in range(200)]
        assert np.median(results) >= 1.15
        assert np.quantile(results, 0.05) >= 1.09
        assert max(results) < 1.2


class TestResumption:
    @pytest.mark.parametrize("synchronous", [True, False])
    @pytest.mark.parametrize("method", ["truncation", "binary_tournament", "t_test"])
    def test_a_restored_engine_goes_on_as_if_nothing_had_happened(self, synchronous, method, tmp_path):
        settings = {"synchronous": synchronous, "exploit_method": method, "seed": 3}
        straight = moving(**settings)
        straight.run(12)
        store = FileStore(tmp_path)
        moving(store=store, **settings).run(5)
        second = moving(store=store, **settings)
        second.resume()
        second.run(12)
        assert second.scheduler.state_dict() == straight.scheduler.state_dict()
        assert [learner.save() for learner in second.learners] == [learner.save() for learner in straight.learners]
        assert straight.scheduler.exploitation_count > 0

    def test_only_states_that_somebody_needs_are_kept(self, tmp_path):
        engine = moving(store=FileStore(tmp_path))
        for intervals in range(1, 5):
            engine.run(intervals)
            needed = {member.checkpoint_path for member in engine.scheduler.members}
            assert {path.stem for path in tmp_path.glob("*.safetensors")} == needed
        assert not list(tmp_path.glob(".*"))

    def test_there_must_be_something_to_resume(self, tmp_path):
        with pytest.raises(ValueError, match="no population"):
            moving(store=FileStore(tmp_path)).resume()

    @pytest.mark.parametrize("synchronous", [True, False])
    def test_the_learners_have_what_the_lineage_says(self, synchronous):
        events = []
        engine = moving(events.append, synchronous=synchronous)
        engine.run(10)
        assert engine.scheduler.exploitation_count > 3
        for member, learner in zip(replay(events), engine.learners, strict=True):
            assert learner.hyperparams == member.hyperparams
            assert member.step == 100
            assert learner.age == 100 or not synchronous  # a copy by turns may be of a younger member


class Chain:
    """A learner that scores its own name; a copy takes the name over."""

    def __init__(self, member_id, hyperparams, seed):
        self.names, self.seed = [member_id], seed

    def train(self, steps):
        pass

    def score(self):
        return float(self.names[-1])

    def save(self):
        return list(self.names)

    def load(self, state):
        self.names = list(state)

    def copy_from(self, state, hyperparams, seed):
        self.names, self.seed = list(state), seed


def test_copies_are_of_the_state_before_the_round():
    """In a tournament a source may be a target itself. Its copies still get its state before the round."""
    chained = 0
    for seed in range(20):
        config = PBTConfig(population_size=4, perturbation_interval=1, exploit_method="binary_tournament", seed=seed)
        events = []
        engine = SerialEngine(PBTScheduler(config, record=events.append), Chain)
        engine.run(1)
        sources = {event["target"]: event["source"] for event in events if event["event"] == "exploit"}
        chained += any(source in sources for source in sources.values())
        assert [learner.names for learner in engine.learners] == [[sources.get(i, i)] for i in range(4)]
        assert all(engine.learners[i].seed == engine.scheduler.seed_of(i) for i in range(4))
    assert chained > 0


class Fragile(Chain):
    """A learner that fails once, by a map from members to methods."""

    plan: dict[int, str]
    made: list[int]

    def __init__(self, member_id, hyperparams, seed):
        super().__init__(member_id, hyperparams, seed)
        self.member_id = member_id
        self.made.append(member_id)

    def _maybe(self, method):
        if self.plan.get(self.member_id) == method:
            del self.plan[self.member_id]
            raise MemberFailed(method)

    def train(self, steps):
        self._maybe("train")

    def score(self):
        self._maybe("score")
        return math.nan if self.plan.get(self.member_id) == "nan" else super().score()

    def save(self):
        self._maybe("save")
        return super().save()

    def copy_from(self, state, hyperparams, seed):
        self._maybe("copy_from")
        super().copy_from(state, hyperparams, seed)


def fragile(**plan):
    class Planned(Fragile):
        pass

    Planned.plan = {int(key[1:]): method for key, method in plan.items()}
    Planned.made = []
    config = PBTConfig(population_size=4, perturbation_interval=1)
    return SerialEngine(PBTScheduler(config), Planned)


class TestFailures:
    @pytest.mark.parametrize("method", ["train", "score"])
    def test_a_member_that_dies_is_made_anew_from_the_best(self, method):
        engine = fragile(m2=method)
        engine.run(1)
        assert [learner.names for learner in engine.learners] == [[0], [1], [3], [3]]
        assert engine.learners[2].made == [0, 1, 2, 3, 2]
        engine.run(2)
        assert [member.performance for member in engine.scheduler.members] == [None, 1.0, 3.0, 3.0]  # member 0 is now a copy

    def test_a_member_without_a_finite_score_is_replaced(self):
        engine = fragile(m2="nan")
        engine.run(1)
        assert [learner.names for learner in engine.learners] == [[0], [1], [3], [3]]
        assert engine.learners[0].made == [0, 1, 2, 3]

    def test_a_copy_that_fails_leaves_the_target_as_it_was(self):
        engine = fragile(m0="copy_from")
        engine.run(1)
        assert [learner.names for learner in engine.learners] == [[0], [1], [2], [3]]
        assert engine.scheduler.members[0].generation == 0
        engine.run(2)
        assert engine.learners[0].names == [3]

    def test_a_dead_member_whose_copy_fails_stays_dead_until_the_next_round(self):
        engine = fragile(m0="train", m1="copy_from")
        engine.scheduler.mark_dead(1)
        engine.run(1)
        assert [member.alive for member in engine.scheduler.members] == [True, False, True, True]
        assert engine.learners[0].names == [3]
        engine.run(2)
        assert [learner.names for learner in engine.learners] == [[3], [3], [2], [3]]

    def test_a_member_that_cannot_be_saved_is_dead_and_no_source(self):
        engine = fragile(m3="save")
        engine.run(1)
        assert engine.scheduler.open_exploits == {}
        assert [learner.names for learner in engine.learners] == [[0], [1], [2], [2]]

    def test_nobody_left(self):
        engine = fragile(m0="train", m1="train", m2="train", m3="train")
        with pytest.raises(RuntimeError, match="every member of the population has died"):
            engine.run(1)

    def test_other_exceptions_are_bugs_and_are_not_hidden(self):
        class Buggy(Chain):
            def train(self, steps):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            SerialEngine(PBTScheduler(PBTConfig(population_size=2)), Buggy).run(1)


class Late:
    """An executor in which one member's training takes several waits; without a timeout it is waited for."""

    keeps_learners = True

    def __init__(self, executor, member_id, waits):
        self.executor, self.member_id, self.waits, self.held = executor, member_id, waits, None

    def submit(self, member_id, jobs):
        if member_id == self.member_id and isinstance(jobs[-1], Train):
            self.held, self.left = jobs, self.waits
        else:
            self.executor.submit(member_id, jobs)

    def wait(self, timeout):
        if self.held is not None:
            self.left -= 1
            alone = not self.executor._queue
            if alone and timeout is not None and self.left > 0:
                return []
            if alone or self.left <= 0:
                jobs, self.held = self.held, None
                self.executor._queue.appendleft((self.member_id, jobs))  # it arrives now, before whatever is waited for
        return self.executor.wait(timeout)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("waits", [1, 4, 5, 6, 7, 8, 11])
def test_nobody_is_forgotten_who_arrives_while_copies_are_made(synchronous, waits):
    events = []
    engine = moving(events.append, synchronous=synchronous, ready_percentage=0.5, exploit_method="binary_tournament")
    engine.executor, engine._patience = Late(engine.executor, 2, waits), 1.0
    engine.run(4)
    steps = [member.step for member in engine.scheduler.members]
    assert [steps[i] for i in (0, 1, 3, 4)] == [40] * 4
    assert steps[2] == 40 or (synchronous and steps[2] >= 10)
    assert not engine._busy
    assert not engine._backlog
    assert [member.to_dict() for member in replay(events)] == [member.to_dict() for member in engine.scheduler.members]


def test_a_synchronous_population_continues_without_missing_members(caplog):
    """R084: after the checks that may fail, with the members that there are."""
    events = []
    engine = moving(events.append, ready_percentage=1.0, ready_check_max_wait=3)
    engine.executor, engine._patience = Late(engine.executor, 2, 100), 1.0
    engine.run(3)
    assert "PBT deadlock prevention: 3 failed ready checks in a row; continuing with 4 ready members" in caplog.text
    assert [member.step for member in engine.scheduler.members if member.member_id != 2] == [30] * 4
    rounds = [event["considered"] for event in events if event["event"] == "round"]
    assert rounds[0] == [0, 1, 3, 4]
