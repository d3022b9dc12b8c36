"""SPA and StepM against arch, and their size and power by simulation.

arch 8.0.0 accepts `studentize` and then compares plain means (its variance only finds the hopeless strategies). It is an oracle
for the studentised test all the same, if it is given differences that have been divided by their errors.
"""

import math

import arch.bootstrap
import numpy as np
import pytest

from tailguard.evaluate import statistics

BLOCK = 5


def field(seed, leads, n=500):
    """A benchmark and strategies around it whose noise grows from one to the next."""
    rng = np.random.default_rng(seed)
    benchmark = rng.standard_normal(n)
    return benchmark, {f"s{k}": 0.5 * benchmark + (1 + k) * rng.standard_normal(n) + lead for k, lead in enumerate(leads)}


def error_by_arch(differences):
    """The stationary bootstrap's error of each mean, as arch computes it for its threshold."""
    test = arch.bootstrap.SPA(np.zeros(len(differences)), -differences, block_size=BLOCK, reps=2, seed=0)
    test.compute()
    return np.sqrt(test._loss_diff_var)


@pytest.mark.parametrize(
    "leads", [(0.0, 0.0, 0.0, 0.0), (-0.6, 0.2, 0.3, -2.0), (0.2, 0.4, 0.1, 0.2), (-0.1, -0.2, -0.5, -0.3)]
)
def test_p_values_agree_with_arch(leads):
    benchmark, strategies = field(1, leads)
    differences = np.stack(list(strategies.values()), axis=1) - benchmark[:, None]
    scaled = differences / error_by_arch(differences)
    theirs = arch.bootstrap.SPA(np.zeros(len(scaled)), -scaled, block_size=BLOCK, reps=2000, seed=2)
    theirs.compute()
    ours = statistics.superior_ability(benchmark, strategies, draws=5000, block=BLOCK)
    lead = math.sqrt(len(scaled)) * scaled.mean(axis=0)
    assert ours.statistic == pytest.approx(max(lead.max(), 0.0), rel=1e-9)
    assert ours.best == f"s{lead.argmax()}"
    if ours.statistic > 0.0:  # Hansen's statistic ends at 0, that of arch does not
        noise = 4.0 * math.sqrt(0.25 / 2000)
        assert ours.p_value == pytest.approx(theirs.pvalues["consistent"], abs=noise)
        assert ours.p_lower == pytest.approx(theirs.pvalues["lower"], abs=noise)
        assert ours.p_upper == pytest.approx(theirs.pvalues["upper"], abs=noise)
    else:
        assert ours.p_value == ours.p_lower == ours.p_upper == 1.0
    step = arch.bootstrap.StepM(np.zeros(len(scaled)), -scaled, block_size=BLOCK, reps=2000, seed=2)
    step.compute()
    assert statistics.superior_strategies(benchmark, strategies, block=BLOCK) == [f"s{k}" for k in step.superior_models]


def test_the_three_p_values_are_ordered_and_differ_where_bad_strategies_are_among_the_good():
    benchmark, strategies = field(3, (0.12, -0.1, -0.5, -3.0))
    found = statistics.superior_ability(benchmark, strategies)
    assert found.p_lower < found.p_value < found.p_upper
    assert found.block == max(statistics.optimal_block_length(returns - benchmark) for returns in strategies.values())


def rejections(runs, strategies, lead=0.0, n=250):
    rng, spa, stepped = np.random.default_rng(4), 0, 0
    for _ in range(runs):
        benchmark = rng.standard_normal(n)
        others = {str(k): 0.5 * benchmark + (1.0 + k % 3) * rng.standard_normal(n) for k in range(strategies)}
        others["0"] = others["0"] + lead
        spa += statistics.superior_ability(benchmark, others, draws=300, block=1.0).p_value < 0.05
        stepped += bool(statistics.superior_strategies(benchmark, others, draws=300, block=1.0))
    return spa / runs, stepped / runs


def test_size_without_skill_among_eight():
    """Eight tests at 5 % each would find something in 34 %."""
    for found in rejections(600, 8):
        assert 0.025 < found < 0.08


def test_power_with_one_that_is_better():
    """A lead of 0.25 with a deviation of sqrt(1.25) over 250 bars is 3.5 standard errors."""
    for found in rejections(60, 8, lead=0.25):
        assert found > 0.75


def test_step_down_holds_its_size_and_finds_what_is_there():
    rng, false, missed = np.random.default_rng(5), 0, 0
    for _ in range(600):
        data = rng.standard_normal((100, 6)) + np.array([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
        bars = statistics.stationary_indices(100, 300, 1.0, seed=int(rng.integers(1 << 30)))
        found = statistics.step_down(data.mean(axis=0), data[bars].mean(axis=1))
        false += found[:4].any()
        missed += not found[4:].all()
    assert 0.03 < false / 600 < 0.08  # of the four that are not; the two that are do not use up the size
    assert missed == 0


def test_a_lead_without_any_doubt_counts_and_a_copy_does_not():
    benchmark = np.random.default_rng(6).standard_normal(50)
    strategies = {"copy": benchmark, "more": benchmark + 0.1, "less": benchmark - 0.1}
    assert statistics.superior_strategies(benchmark, strategies, draws=100) == ["more"]
    found = statistics.superior_ability(benchmark, strategies, draws=100)
    assert (found.best, found.p_value) == ("more", 1 / 101)
    alone = statistics.superior_ability(benchmark, {"copy": benchmark}, draws=100)
    assert (alone.statistic, alone.p_value) == (0.0, 1.0)
    np.testing.assert_array_equal(statistics.step_down([1.0, 0.0], [[1.0, 0.0], [1.0, 0.0]]), [True, False])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.superior_ability(np.zeros(7), {"a": np.zeros(7)}), r"benchmark is \(7,\)"),
        (lambda: statistics.superior_ability(np.zeros(8), {}), "strategies is {}"),
        (lambda: statistics.superior_ability(np.zeros(8), {"a": np.zeros(9)}), "the length of strategies is 9"),
        (lambda: statistics.superior_ability([0.0] * 8, {"a": [math.nan] * 8}), r"strategies\['a'\]\[0\] is nan"),
        (lambda: statistics.superior_ability(np.zeros(8), {"a": np.zeros(8)}, block=0.0), "block is 0.0"),
        (lambda: statistics.superior_ability(np.zeros(8), {"a": np.zeros(8)}, draws=1), "draws is 1"),
        (lambda: statistics.superior_strategies(np.zeros(8), {"a": np.zeros(8)}, size=0.0), "size is 0.0"),
        (lambda: statistics.step_down([1.0], np.zeros((5, 2))), r"draws is \(5, 2\)"),
        (lambda: statistics.step_down([math.nan], np.zeros((5, 1))), r"estimates\[0\] is nan"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
