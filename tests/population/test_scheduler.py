"""The scheduler's decisions over whole lives of random populations, and each of its rules alone."""

import json
import logging
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from forge_records import forged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from population_strategies import populations, scores

from tailguard.io.reading import UnusableFile, refusing
from tailguard.population import HyperparamConfig, PBTConfig, PBTScheduler, PopulationMember
from tailguard.population.lineage import replay
from tailguard.population.member import member_seed
from tailguard.population.operators import truncation_size

NAN = float("nan")
# A whole life is a large example; how long it takes to draw says more about the load of the machine than about the code.
LIVES = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
X = HyperparamConfig(name="x", min_value=0.1, max_value=1.0)


def through_json(state):
    """Return a state as a file would give it back; a value that JSON cannot hold is an error."""
    text = json.dumps(state, allow_nan=False)
    assert json.loads(text) == state
    return json.loads(text)


def population(size=4, *, initial=None, **settings):
    config = PBTConfig(population_size=size, perturbation_interval=1, hyperparams=(X,), **settings)
    return PBTScheduler(config, initial)


def told(scheduler, values):
    """Let every member report its score after one more step; None stays silent."""
    for member_id, value in values.items():
        scheduler.report(member_id, scheduler.members[member_id].step + 1, value)
    return scheduler


def finish(scheduler, decided):
    for exploit in decided.exploits:
        scheduler.commit(exploit)


class Bookkeeping:
    """A model of the members, kept apart from the scheduler."""

    def __init__(self, config):
        self.config = config
        self.latest = [None] * config.population_size  # evaluations; None: nothing usable
        self.fresh = [False] * config.population_size
        self.alive = [True] * config.population_size

    def hear(self, messages):
        for i, message in enumerate(messages):
            if not isinstance(message, str):
                values = np.asarray([] if message is None else message, dtype=float).ravel()
                self.latest[i] = values if len(values) > 0 and np.isfinite(values).all() else None
                self.fresh[i] = self.alive[i] = True
            elif message == "dead":
                self.alive[i] = False

    def close(self, decided):
        for i in decided.considered:
            self.fresh[i] = False
        for exploit in decided.exploits:
            self.latest[exploit.target], self.alive[exploit.target] = None, True

    def healthy(self, i):
        return self.alive[i] and self.latest[i] is not None

    def able(self):
        return {i for i in range(len(self.alive)) if self.healthy(i) and (self.fresh[i] or not self.config.synchronous)}

    def merit(self, i):
        mean = sum(self.latest[i].tolist()) / len(self.latest[i])  # in the scheduler's order: ties must be ties
        return mean if self.config.metric_mode == "max" else -mean


@st.composite
def lives(draw):
    """A population and what its members report, round by round: scores, or "dead", or "silent"."""
    config = draw(populations())
    one = st.one_of(scores, scores, scores, st.sampled_from(["dead", "silent"]))
    rounds = draw(st.lists(st.lists(one, min_size=config.population_size, max_size=config.population_size), max_size=6))
    return config, rounds


def live(scheduler, messages, order=None):
    """Send one round of reports and return the decision."""
    interval = scheduler.config.perturbation_interval
    for member_id in order if order is not None else range(len(messages)):
        message = messages[member_id]
        if isinstance(message, str):
            if message == "dead":
                scheduler.mark_dead(member_id)
        else:
            scheduler.report(member_id, scheduler.members[member_id].step + interval, message)
    return scheduler.decide()


class TestWholeLives:
    @given(life=lives())
    @settings(LIVES, max_examples=300)
    def test_rules_of_every_round(self, life):
        config, rounds = life
        scheduler, model = PBTScheduler(config), Bookkeeping(config)
        protected = dict(scheduler.members[0].hyperparams)
        for messages in rounds:
            before = [dict(member.hyperparams) for member in scheduler.members]
            decided = live(scheduler, messages)
            model.hear(messages)
            able = model.able()
            targets = [exploit.target for exploit in decided.exploits]
            assert targets == sorted(set(targets) & set(decided.considered))
            for exploit in decided.exploits:
                target, source = exploit.target, exploit.source
                assert source != target
                assert source in able
                assert exploit.source_performance == pytest.approx(float(np.mean(model.latest[source])))
                if model.healthy(target):
                    assert not (config.protect_first_member and target == 0)
                    assert config.exploit_method == "t_test" or model.merit(source) >= model.merit(target)
                for hyperparam in config.hyperparams:
                    hyperparam.require_legal(exploit.hyperparams[hyperparam.name])
            if decided.number > 0 and able:
                assert {i for i in decided.considered if not model.healthy(i)} <= set(targets)
            assert [member.hyperparams for member in scheduler.members] == before  # nothing before the commit
            finish(scheduler, decided)
            model.close(decided)
            changed = {i for i, member in enumerate(scheduler.members) if member.hyperparams != before[i]}
            assert changed <= {e.target for e in decided.exploits if e.explored or config.inherit_hyperparams}
            assert all(scheduler.members[target].performance is None for target in targets)
        if config.protect_first_member:
            assert scheduler.members[0].hyperparams == protected

    @given(life=lives())
    @settings(LIVES, max_examples=200)
    def test_truncation_ranks(self, life):
        """Sources are among the best of those who took part, targets among the worst, by counting ranks."""
        config, rounds = life
        config = config.model_copy(update={"exploit_method": "truncation", "synchronous": True, "ready_percentage": 0.01})
        scheduler, model = PBTScheduler(config), Bookkeeping(config)
        for messages in rounds:
            decided = live(scheduler, messages)
            model.hear(messages)
            standing = {i: model.merit(i) if model.healthy(i) else -math.inf for i in decided.considered}
            ahead = {i: sum((standing[j], -j) > (standing[i], -i) for j in standing) for i in standing}
            size = truncation_size(len(standing), config.truncation_ratio)
            healthy = [i for i in standing if standing[i] > -math.inf]
            expected = {i for i in standing if standing[i] == -math.inf or ahead[i] >= len(standing) - size}
            if config.protect_first_member and 0 in healthy:
                expected -= {0}
            assert {e.target for e in decided.exploits} == (expected if healthy else set())
            assert all(ahead[e.source] < size for e in decided.exploits)
            finish(scheduler, decided)
            model.close(decided)

    @given(life=lives(), cut=st.integers(0, 6), seed=st.integers(0, 99))
    @settings(LIVES, max_examples=150)
    def test_a_restored_scheduler_decides_the_same(self, life, cut, seed):
        config, rounds = life
        scheduler, twin = PBTScheduler(config), PBTScheduler(config)
        shuffle = np.random.default_rng(seed)
        for number, messages in enumerate(rounds):
            if number == cut:
                state = through_json(twin.state_dict())
                twin = PBTScheduler(config.model_copy(update={"seed": 12345}))  # nothing of its own may survive
                twin.load_state_dict(state)
                twin.config = config
            decided = live(scheduler, messages)
            assert live(twin, messages, shuffle.permutation(len(messages)).tolist()) == decided
            finish(scheduler, decided)
            finish(twin, decided)
        assert twin.state_dict() == scheduler.state_dict()

    @given(life=lives())
    @settings(LIVES, max_examples=150)
    def test_the_events_replayed_give_the_same_population(self, life):
        config, rounds = life
        events = []
        scheduler = PBTScheduler(config, record=lambda event: events.append(json.dumps(event, allow_nan=False)))
        for number, messages in enumerate(rounds):
            decided = live(scheduler, messages)
            for exploit in decided.exploits:
                (scheduler.abandon if number % 3 == 2 else scheduler.commit)(exploit)
            assert replay(map(json.loads, events)) == scheduler.members
        assert len(events) == scheduler.events
        counts = [json.loads(event)["event"] for event in events].count("exploit")
        assert counts == scheduler.exploitation_count == sum(member.generation for member in scheduler.members)


class TestExploits:
    def test_a_copy_starts_from_its_source(self):
        scheduler = population(3, explore_method="none", initial=[{"x": 0.2}, {"x": 0.3}, {"x": 0.4}])
        for member_id, value in ((0, 5.0), (1, 1.0), (2, 3.0)):
            scheduler.report(
                member_id, 1, value, checkpoint_path=f"{member_id}.zip", vecnormalize_stats_path=f"{member_id}.pkl"
            )
        (exploit,) = scheduler.decide().exploits
        assert (exploit.target, exploit.source, exploit.hyperparams, exploit.explored) == (1, 0, {"x": 0.2}, False)
        assert (exploit.source_performance, exploit.checkpoint_path, exploit.vecnormalize_stats_path) == (5.0, "0.zip", "0.pkl")
        scheduler.commit(exploit)
        copy = scheduler.members[1]
        assert (copy.hyperparams, copy.parent, copy.generation, copy.performance) == ({"x": 0.2}, 0, 1, None)
        assert (copy.baseline, copy.checkpoint_path, copy.vecnormalize_stats_path) == (5.0, "0.zip", "0.pkl")
        assert exploit.seed == scheduler.seed_of(1) == member_seed(0, 1, 1) != member_seed(0, 1, 0)
        assert (scheduler.exploitation_count, scheduler.exploration_count) == (1, 0)
        assert scheduler.best is scheduler.members[0]

    def test_exploration_starts_from_the_source_or_from_oneself(self):
        for inherit, base in ((True, 0.2), (False, 0.8)):
            scheduler = population(2, explore_method="perturb", inherit_hyperparams=inherit, initial=[{"x": 0.2}, {"x": 0.8}])
            (exploit,) = told(scheduler, {0: 1.0, 1: 0.0}).decide().exploits
            assert any(exploit.hyperparams["x"] == pytest.approx(x) for x in (base * 1.2, base / 1.2))
            assert exploit.explored

    def test_an_abandoned_exploit_changes_nothing(self):
        scheduler = told(population(2), {0: 1.0, 1: 0.0})
        decided = scheduler.decide()
        before = scheduler.members[1].to_dict()
        scheduler.abandon(decided.exploits[0])
        assert scheduler.members[1].to_dict() == before
        assert scheduler.exploitation_count == 0
        with pytest.raises(ValueError, match="not closed yet"):
            scheduler.commit(decided.exploits[0])
        decided = told(scheduler, {0: 1.0, 1: 0.0}).decide()
        finish(scheduler, decided)
        assert scheduler.members[1].generation == 1

    def test_open_exploits_survive_a_restart_and_keep_their_target_out(self):
        scheduler = told(population(3, synchronous=False, ready_percentage=0.1), {0: 3.0, 1: 2.0, 2: 1.0})
        (exploit,) = scheduler.decide().exploits
        with pytest.raises(ValueError, match="committed or abandoned"):
            scheduler.report(2, 2, 9.0)
        twin = population(3, synchronous=False, ready_percentage=0.1)
        twin.load_state_dict(through_json(scheduler.state_dict()))
        assert twin.open_exploits == {2: exploit}
        told(twin, {1: NAN})
        twin.commit(exploit)
        assert twin.members[2].hyperparams == exploit.hyperparams

    def test_a_member_about_to_be_replaced_is_not_copied(self):
        scheduler = told(population(2, synchronous=False), {0: 5.0, 1: 4.0})
        (exploit,) = scheduler.decide().exploits
        assert exploit.target == 1
        decided = told(scheduler, {0: NAN}).decide()
        assert (decided.considered, decided.exploits) == ((0,), ())  # the 4 of member 1 is about to be gone

    @pytest.mark.parametrize("synchronous", [True, False])
    def test_a_dead_member_is_replaced_once(self, synchronous):
        scheduler = population(3, synchronous=synchronous)
        scheduler.mark_dead(2)
        decided = told(scheduler, {0: 1.0, 1: 1.0}).decide()
        assert [exploit.target for exploit in decided.exploits] == [2]
        decided = told(scheduler, {0: 1.0, 1: 1.0}).decide()
        assert decided.considered == (0, 1)
        assert 2 not in [exploit.target for exploit in decided.exploits]

    def test_the_protected_member_is_copied_but_keeps_its_hyperparameters(self):
        scheduler = population(2, protect_first_member=True, explore_method="perturb", initial=[{"x": 0.5}, {"x": 0.9}])
        assert told(scheduler, {0: 0.0, 1: 1.0}).decide().exploits == ()
        decided = told(scheduler, {0: 2.0, 1: 1.0}).decide()
        assert [(e.target, e.source) for e in decided.exploits] == [(1, 0)]
        finish(scheduler, decided)
        (rescue,) = told(scheduler, {0: NAN, 1: 1.0}).decide().exploits
        assert (rescue.target, rescue.source, rescue.hyperparams, rescue.explored) == (0, 1, {"x": 0.5}, False)

    @pytest.mark.parametrize("value", [None, NAN, math.inf, -math.inf, [], [1.0, NAN], [1e308, 1e308]])
    def test_members_without_a_finite_score_are_replaced(self, value, caplog):
        scheduler = told(population(3), {0: value, 1: -5.0, 2: -6.0})
        assert "Member 0: no finite mean_reward at step 1" in caplog.text
        assert scheduler.members[0].performance is None
        assert [(e.target, e.source) for e in scheduler.decide().exploits] == [(0, 1)]

    def test_dead_members_are_replaced_without_waiting(self):
        scheduler = population(4)
        scheduler.mark_dead(3)
        decided = told(scheduler, {0: 1.0, 1: 2.0, 2: 3.0}).decide()
        assert decided.considered == (0, 1, 2, 3)
        assert [(e.target, e.source) for e in decided.exploits] == [(3, 2)]
        finish(scheduler, decided)
        assert scheduler.members[3].alive

    def test_a_dead_member_that_reports_lives(self):
        scheduler = population(2)
        scheduler.mark_dead(0)
        told(scheduler, {0: 1.0, 1: 0.0})
        assert [(e.target, e.source) for e in scheduler.decide().exploits] == [(1, 0)]

    def test_nobody_to_copy(self, caplog):
        decided = told(population(2), {0: NAN, 1: None}).decide()
        assert (decided.considered, decided.exploits) == ((0, 1), ())
        assert "no member has a finite mean_reward" in caplog.text

    @pytest.mark.parametrize("size", [2, 4])
    def test_small_populations_exploit(self, size):
        scheduler = told(population(size), {i: float(i) for i in range(size)})
        assert [(e.target, e.source) for e in scheduler.decide().exploits] == [(0, size - 1)]

    def test_evaluations_are_averaged_and_kept(self):
        scheduler = population(2)
        scheduler.report(0, 1, [1.0, 2.0, 6.0])
        scheduler.report(1, 1, np.float32(0.5))
        assert scheduler.members[0].performance == 3.0
        assert scheduler.members[0].history[0]["scores"] == [1.0, 2.0, 6.0]
        assert through_json(scheduler.state_dict())["members"][1]["performance"] == 0.5


def test_broken_means_dead_or_trained_without_a_score():
    assert not PopulationMember(0, {}).broken
    assert PopulationMember(0, {}, alive=False).broken
    assert PopulationMember(0, {}, step=5, decided_step=4).broken
    assert not PopulationMember(0, {}, step=5, decided_step=5).broken  # a copy that has not trained yet
    assert not PopulationMember(0, {}, performance=0.0, step=5).broken


class TestReadiness:
    def test_a_silent_member_holds_the_others_up_for_ten_checks(self, caplog):
        """R084: one of four is missing; R085: the lines and the metric."""
        caplog.set_level(logging.INFO)
        scheduler = told(population(4), {0: 1.0, 1: 2.0, 2: 3.0})
        for check in range(1, 10):
            decided = scheduler.decide()
            assert (decided.number, decided.considered) == (0, ())
            assert scheduler.metrics()["pbt/failed_ready_checks"] == check
            assert scheduler.metrics()["pbt/ready_members"] == 3
        lines = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert lines == [
            ("INFO", "PBT: 3 of 4 required members are ready (failed ready check 1)"),
            ("WARNING", "PBT: 3 of 4 required members are ready (failed ready check 5)"),
        ]
        caplog.clear()
        decided = scheduler.decide()
        assert (decided.number, decided.considered) == (1, (0, 1, 2))
        assert [(e.target, e.source) for e in decided.exploits] == [(0, 2)]
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "deadlock prevention: 10 failed ready checks" in record.getMessage()
        assert scheduler.metrics()["pbt/failed_ready_checks"] == 0

    def test_too_few_members_wait_on(self):
        scheduler = told(population(4), {0: 1.0})
        assert all(scheduler.decide().considered == () for _ in range(30))
        assert scheduler.failed_ready_checks == 30

    def test_the_counter_starts_again_when_members_arrive(self, caplog):
        caplog.set_level(logging.INFO)
        scheduler = told(population(4), {0: 1.0, 1: 2.0, 2: 3.0})
        for _ in range(9):
            scheduler.decide()
        assert told(scheduler, {3: 4.0}).decide().considered == (0, 1, 2, 3)
        assert "ready again after 9 failed ready checks" in caplog.text
        assert scheduler.failed_ready_checks == 0

    @given(size=st.integers(2, 12), percent=st.integers(1, 100))
    def test_the_share_is_reached_and_not_rounded_down(self, size, percent):
        for ready in range(size + 1):
            scheduler = population(size, ready_percentage=percent / 100)
            told(scheduler, {i: 0.0 for i in range(ready)})
            assert (scheduler.decide().number == 1) == (100 * ready >= percent * size)

    def test_a_share_that_floats_overstate_is_not_rounded_up(self):
        assert 25 * 0.28 > 7.0
        assert told(population(25, ready_percentage=0.28), {i: 0.0 for i in range(7)}).decide().number == 1

    def test_stale_scores_do_not_count(self):
        scheduler = told(population(4), {i: float(i) for i in range(4)})
        finish(scheduler, scheduler.decide())
        assert scheduler.decide().considered == ()
        told(scheduler, {1: 0.0, 2: 1.0})
        assert scheduler.decide().considered == ()

    def test_nobody_is_due_before_the_interval(self):
        config = PBTConfig(population_size=2, perturbation_interval=5, hyperparams=(X,))
        scheduler = PBTScheduler(config)
        for step in range(1, 5):
            scheduler.report(0, step, 1.0)
            scheduler.report(1, step, 0.0)
            assert scheduler.decide().considered == ()
        scheduler.report(0, 5, 1.0)
        scheduler.report(1, 7, 0.0)
        decided = scheduler.decide()
        assert decided.considered == (0, 1)
        finish(scheduler, decided)
        scheduler.report(0, 9, 1.0)
        scheduler.report(1, 12, 0.0)
        assert scheduler.decide().considered == ()
        scheduler.report(0, 10, 1.0)
        assert scheduler.decide().considered == (0, 1)


class TestAsynchronous:
    def test_each_member_is_decided_about_when_it_arrives(self):
        scheduler = population(4, synchronous=False, explore_method="none")
        for member_id, value in enumerate([1.0, 2.0, 3.0]):
            decided = told(scheduler, {member_id: value}).decide()
            assert (decided.number, decided.considered, decided.exploits) == (0, (member_id,), ())  # too few scores yet
        decided = told(scheduler, {3: 4.0}).decide()
        assert (decided.considered, decided.exploits) == ((3,), ())
        decided = told(scheduler, {0: 1.5}).decide()
        assert [(e.target, e.source) for e in decided.exploits] == [(0, 3)]
        finish(scheduler, decided)
        # The copy has no score: not a source, not a target, until it reports.
        decided = told(scheduler, {1: 0.5}).decide()
        assert [(e.target, e.source) for e in decided.exploits] == [(1, 3)]
        assert scheduler.decide() == scheduler.decide()
        assert scheduler.decide().considered == ()

    def test_the_dead_are_replaced_from_known_scores(self):
        scheduler = population(3, synchronous=False)
        for member_id in range(3):
            finish(scheduler, told(scheduler, {member_id: float(member_id)}).decide())
        scheduler.mark_dead(2)
        decided = scheduler.decide()
        assert decided.considered == (2,)
        assert [(e.target, e.source) for e in decided.exploits] == [(2, 1)]


class TestStart:
    def test_members_are_drawn_from_the_seed(self):
        first, second, other = population(5), population(5), population(5, seed=1)
        values = [member.hyperparams["x"] for member in first.members]
        assert values == [member.hyperparams["x"] for member in second.members]
        assert values != [member.hyperparams["x"] for member in other.members]
        assert len(set(values)) == 5
        assert [member.member_id for member in first.members] == list(range(5))
        assert all(member.vecnormalize_stats_path is None for member in first.members)

    def test_the_global_generators_are_left_alone(self):
        state = np.random.get_state()[1].tolist()  # noqa: NPY002
        scheduler = told(population(4), {i: float(i) for i in range(4)})
        finish(scheduler, scheduler.decide())
        assert np.random.get_state()[1].tolist() == state  # noqa: NPY002

    @pytest.mark.parametrize(
        ("initial", "message"),
        [
            ([{"x": 0.5}], "number of members is 1"),
            ([{"x": 0.5}, {"x": 2.0}], "within 0.1 and 1.0"),
            ([{"x": 0.5}, {"y": 0.5}], "exactly"),
            ([{"x": 0.5}, {"x": 0.5, "y": 0.5}], "exactly"),
        ],
    )
    def test_impossible_starts_are_refused(self, initial, message):
        with pytest.raises(ValueError, match=message):
            population(2, initial=initial)

    def test_impossible_reports_are_refused(self):
        scheduler = population(2)
        scheduler.report(0, 5, 1.0)
        with pytest.raises(ValueError, match="at least 5"):
            scheduler.report(0, 4, 1.0)
        for member_id in (-1, 2):
            with pytest.raises(ValueError, match="0 to 1"):
                scheduler.report(member_id, 6, 1.0)

    def test_a_state_of_another_population_is_refused(self):
        with pytest.raises(ValueError, match="number of members is 3"):
            population(2).load_state_dict(population(3).state_dict())
        with pytest.raises(ValueError, match="keys"):
            population(2).load_state_dict({"members": []})

    def test_metrics(self):
        scheduler = told(population(4), {0: 1.0, 1: 2.0, 2: 3.0, 3: 6.0})
        finish(scheduler, scheduler.decide())
        metrics = scheduler.metrics()
        known = [2.0, 3.0, 6.0]  # member 0 has become a copy
        assert metrics == {
            "pbt/population_size": 4.0,
            "pbt/ready_members": 0.0,
            "pbt/exploitation_count": 1.0,
            "pbt/exploration_count": 1.0,
            "pbt/failed_ready_checks": 0.0,
            "pbt/mean_performance": pytest.approx(np.mean(known)),
            "pbt/std_performance": pytest.approx(np.std(known)),
            "pbt/min_performance": 2.0,
            "pbt/max_performance": 6.0,
        }
        assert "pbt/mean_performance" not in population(2).metrics()
        glossary = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
        assert [key for key in metrics if f"`{key}`" not in glossary] == []


def test_a_forged_state_is_refused_or_taken_as_it_is():
    scheduler = told(population(3), {0: 1.0, 1: 2.0, 2: 3.0})
    finish(scheduler, scheduler.decide())
    outcomes = Counter()
    for what, state in forged(through_json(told(scheduler, {0: 1.0}).state_dict()), 150, np.random.default_rng(0)):
        twin = population(3)
        try:
            with refusing("the state"):
                twin.load_state_dict(state)
        except UnusableFile:
            outcomes["refused"] += 1
        else:
            assert twin.state_dict() == state, what
            twin.decide()
            outcomes["taken"] += 1
    assert outcomes["refused"] > 50
    assert outcomes["taken"] > 0
