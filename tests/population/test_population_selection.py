"""The choice of sources: sizes, ranks, the t-test, and one draw per member."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from tailguard.population import PBTConfig, PopulationMember
from tailguard.population.operators import choose_sources, truncation_size, welch_p_value


def member(member_id, performance, scores=None, alive=True):
    entry = {"generation": 0, "scores": scores if scores is not None else [performance]}
    return PopulationMember(member_id, {}, performance=performance, history=[entry], alive=alive, step=1)


def chosen(config, members, seed=0):
    contenders = [m for m in members if m.alive and m.performance is not None]
    return choose_sources(config, members, contenders, np.random.default_rng(seed))


class TestTruncation:
    @given(members=st.integers(2, 200), hundredths=st.integers(1, 50))
    def test_size_is_the_share_rounded_up_but_at_most_half(self, members, hundredths):
        exact = math.ceil(Fraction(hundredths, 100) * members)
        assert truncation_size(members, hundredths / 100) == min(max(1, exact), members // 2)

    def test_a_share_that_floats_overstate_is_not_rounded_up(self):
        assert 100 * 0.07 > 7.0
        assert truncation_size(100, 0.07) == 7

    def test_small_populations_exploit_too(self):
        assert [truncation_size(n, 0.2) for n in range(2, 11)] == [1, 1, 1, 1, 2, 2, 2, 2, 2]

    @pytest.mark.parametrize("mode", ["max", "min"])
    def test_worst_copy_best(self, mode):
        members = [member(i, float(score)) for i, score in enumerate([5, 1, 9, 3, 7, 0, 8, 2, 6, 4])]
        config = PBTConfig(metric_mode=mode)
        high, low = {2, 6}, {1, 5}  # 9, 8 and 1, 0
        best, worst = (high, low) if mode == "max" else (low, high)
        seen = set()
        for seed in range(20):
            sources = chosen(config, members, seed)
            assert set(sources) == worst
            assert set(sources.values()) <= best
            seen |= set(sources.items())
        assert len(seen) == 4  # every pair happens

    def test_broken_members_are_the_worst_and_never_a_source(self):
        members = [member(0, None), member(1, 2.0), member(2, 9.0, alive=False), member(3, 1.0), member(4, 3.0), member(5, 4.0)]
        sources = chosen(PBTConfig(population_size=6), members)  # a fifth of six: two are replaced, two copied
        assert set(sources) == {0, 2}
        assert set(sources.values()) <= {4, 5}

    def test_one_healthy_member_saves_all(self):
        members = [member(0, None), member(1, None), member(2, -1e9), member(3, None)]
        assert chosen(PBTConfig(population_size=4), members) == {0: 2, 1: 2, 3: 2}

    def test_nobody_to_copy(self):
        assert chosen(PBTConfig(population_size=2), [member(0, None), member(1, None)]) == {}


class TestTournament:
    def test_one_draw_is_opponent_and_source(self):
        members = [member(i, float(score)) for i, score in enumerate([3, 1, 4, 1, 5])]
        config = PBTConfig(population_size=5, exploit_method="binary_tournament")
        for seed in range(50):
            twin, expected = np.random.default_rng(seed), {}
            for me in members:
                others = [other for other in members if other is not me]
                opponent = others[int(twin.integers(4))]
                if opponent.performance > me.performance:
                    expected[me.member_id] = opponent.member_id
            rng = np.random.default_rng(seed)
            assert choose_sources(config, members, members, rng) == expected
            assert rng.bit_generator.state == twin.bit_generator.state

    def test_equals_do_not_copy(self):
        config = PBTConfig(population_size=3, exploit_method="binary_tournament")
        assert all(chosen(config, [member(i, 1.0) for i in range(3)], seed) == {} for seed in range(20))

    @pytest.mark.parametrize("method", ["binary_tournament", "t_test"])
    def test_broken_members_copy_any_healthy_one(self, method):
        members = [member(0, None), member(1, 5.0, alive=False), member(2, 1.0), member(3, 1.0)]
        config = PBTConfig(population_size=4, exploit_method=method)
        seen = [chosen(config, members, seed) for seed in range(40)]
        assert all(set(sources) == {0, 1} for sources in seen)
        assert {sources[0] for sources in seen} == {sources[1] for sources in seen} == {2, 3}


class TestWelch:
    @given(
        first=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12),
        second=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12),
    )
    @settings(max_examples=200)
    def test_equals_scipy(self, first, second):
        if min(np.std(first), np.std(second)) < 1e-6:
            return  # scipy warns about lost precision
        expected = ttest_ind(first, second, equal_var=False, alternative="greater").pvalue
        assert welch_p_value(first, second) == pytest.approx(expected, rel=1e-9, abs=1e-12)

    def test_without_spread(self):
        assert welch_p_value([2.0, 2.0], [1.0, 1.0]) == 0.0
        assert welch_p_value([1.0, 1.0], [1.0, 1.0]) == welch_p_value([0.0, 0.0], [1.0, 1.0]) == 1.0

    @pytest.mark.parametrize("scale", [1e-300, 1e-92, 1e92, 1e307])
    def test_the_unit_of_the_score_does_not_matter(self, scale):
        first, second = [0.0, 3.0, 1.0], [0.0, -1.0]
        expected = welch_p_value(first, second)
        assert welch_p_value([scale * x for x in first], [scale * x for x in second]) == pytest.approx(expected)
        assert 0.0 < welch_p_value([0.0, scale], [0.0, 0.0]) < 1.0

    def test_needs_two_evaluations(self):
        with pytest.raises(ValueError, match="at least 2"):
            welch_p_value([1.0], [1.0, 2.0])

    def test_wrong_copies_are_as_rare_as_the_level(self):
        """Equal members: each is copied by mistake with the probability of the level, a tournament errs half of the time."""
        rng = np.random.default_rng(0)
        wrong = {"t_test": 0, "binary_tournament": 0}
        trials = 1000
        for _ in range(trials):
            samples = rng.standard_normal((2, 10))
            members = [member(i, float(row.mean()), row.tolist()) for i, row in enumerate(samples)]
            for method in wrong:
                config = PBTConfig(population_size=2, exploit_method=method, t_test_level=0.05)
                wrong[method] += len(chosen(config, members))
        assert wrong["binary_tournament"] == trials  # one of the two always
        assert abs(wrong["t_test"] - 2 * 0.05 * trials) < 4.0 * math.sqrt(trials * 0.1 * 0.9)

    @pytest.mark.parametrize("mode", ["max", "min"])
    def test_clear_leads_are_copied(self, mode):
        members = [member(0, 2.0, [1.0, 2.0, 3.0]), member(1, 12.0, [11.0, 12.0, 13.0])]
        config = PBTConfig(population_size=2, exploit_method="t_test", metric_mode=mode)
        assert chosen(config, members) == ({0: 1} if mode == "max" else {1: 0})

    def test_only_the_window_and_only_since_the_last_copy(self):
        veteran, rival = member(0, 1.0), member(1, 1.0, [0.9, 1.0, 1.1] * 3)
        config = PBTConfig(population_size=2, exploit_method="t_test", t_test_window=3)
        old, new = [9.0, 9.1, 9.2], [5.0, 5.1, 5.2]
        veteran.history = [{"generation": 0, "scores": old}, {"generation": 0, "scores": [None, 0.0, 0.1, 0.2]}]
        assert chosen(config, [veteran, rival]) == {0: 1}  # its old 9 has left the window
        veteran.history = [{"generation": 0, "scores": old}, {"generation": 1, "scores": new}]
        veteran.generation = 1
        assert chosen(config, [veteran, rival]) == {1: 0}
        veteran.history[1]["scores"] = [5.0]
        assert chosen(config, [veteran, rival]) == {}  # one evaluation proves nothing
