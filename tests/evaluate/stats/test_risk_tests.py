"""Tests of predicted tails against published tables, scipy and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from tailguard.evaluate import statistics

LEVELS = (np.arange(51) + 0.5) / 51


def outcomes_with(exceptions, n):
    """n outcomes, so many of them below -1."""
    return np.where(np.arange(n) < exceptions, -2.0, 0.0)


@pytest.mark.parametrize(
    ("n", "alpha", "low", "high"),
    [
        (255, 0.01, 0, 7), (255, 0.025, 2, 12), (255, 0.05, 6, 21),
        (510, 0.01, 1, 11), (510, 0.025, 6, 21), (510, 0.05, 16, 36),
        (1000, 0.01, 4, 17), (1000, 0.025, 15, 36), (1000, 0.05, 37, 65),
    ],
)  # fmt: skip
def test_kupiec_accepts_what_his_table_accepts(n, alpha, low, high):
    """Kupiec (1995), table 3: at a confidence of 95 % the model stands if low < exceptions < high.

    The table names no lower end for 255 bars and 1 %; without exceptions the ratio is -510 ln 0.99 = 5.1, above 3.84.
    """
    accepted = [x for x in range(n // 5) if statistics.kupiec(outcomes_with(x, n), -1.0, alpha).p_value > 0.05]
    assert accepted == list(range(low + 1, high))


@pytest.mark.parametrize("exceptions", [0, 3, 20, 100])
def test_kupiec_is_the_likelihood_ratio_of_scipy(exceptions):
    found = statistics.kupiec(outcomes_with(exceptions, 100), np.full(100, -1.0), 0.05)
    likely, predicted = stats.binom(100, exceptions / 100), stats.binom(100, 0.05)
    ratio = 2.0 * (likely.logpmf(exceptions) - predicted.logpmf(exceptions))
    assert found.statistic == pytest.approx(ratio, rel=1e-9)
    assert found.p_value == pytest.approx(stats.chi2(1).sf(ratio), rel=1e-9)
    assert (found.bars, found.exceptions, found.expected) == (100, exceptions, 5.0)


@pytest.mark.parametrize(("n", "alpha"), [(50, 0.01), (250, 0.01), (250, 0.05), (1000, 0.05)])
def test_the_exact_p_value_holds_its_size_where_the_limit_distribution_does_not(n, alpha):
    """The probability of rejection is summed over all counts, so nothing is left to chance."""
    tests = [statistics.kupiec(outcomes_with(x, n), -1.0, alpha) for x in range(n + 1)]
    chances = stats.binom(n, alpha).pmf(np.arange(n + 1))
    assert chances[[test.exact_p_value <= 0.05 for test in tests]].sum() <= 0.05
    assert sum(chances) == pytest.approx(1.0)
    assert max(test.exact_p_value for test in tests) == pytest.approx(1.0)
    if (n, alpha) == (250, 0.01):
        assert chances[[test.p_value <= 0.05 for test in tests]].sum() > 0.09


def test_an_outcome_at_the_predicted_quantile_is_no_exception():
    assert statistics.kupiec([-1.0, -1.1], -1.0, 0.5).exceptions == 1


def normal_tail(alpha):
    limit = stats.norm.ppf(alpha)
    return limit, -stats.norm.pdf(limit) / alpha


def test_z2_has_the_critical_value_of_the_paper():
    """Acerbi and Szekely (2014), table 6: for a normal distribution, T = 250 and alpha = 2.5 %, 5 % of Z2 are below -0.70."""
    rng, (limit, shortfall) = np.random.default_rng(0), normal_tail(0.025)
    values = [statistics.shortfall_statistic(row, limit, shortfall, 0.025) for row in rng.standard_normal((20_000, 250))]
    assert np.mean(values) == pytest.approx(0.0, abs=0.01)
    assert np.quantile(values, 0.05) == pytest.approx(-0.70, abs=0.02)


def test_z2_by_hand_and_for_losses_that_are_twice_as_large():
    outcomes, limits, shortfalls = [-3.0, -2.0, -1.0, 1.0], [-2.0] * 4, [-2.5] * 4  # only the first is beyond its limit
    assert statistics.shortfall_statistic(outcomes, limits, shortfalls, 0.25) == pytest.approx(1.0 - (3.0 / 2.5) / (4 * 0.25))
    limit, shortfall = normal_tail(0.05)
    outcomes = 2.0 * np.random.default_rng(1).standard_normal(200_000)
    beyond = stats.norm.cdf(limit / 2.0)  # share of the outcomes below the limit
    mean_beyond = 2.0 * -stats.norm.pdf(limit / 2.0)  # E[r; r < limit]
    assert beyond > 0.05
    assert statistics.shortfall_statistic(outcomes, limit, shortfall, 0.05) == pytest.approx(
        1.0 - mean_beyond / (0.05 * shortfall), abs=0.05
    )


def predictions(scales, levels=LEVELS):
    return scales[:, None] * stats.norm.ppf(levels)


def draw(generator, scales, levels=LEVELS):
    """Outcomes of the predicted distribution itself, linear between its levels."""
    return scales * np.interp(generator.random(len(scales)), levels, stats.norm.ppf(levels))


def test_acerbi_szekely_holds_its_size_and_sees_twice_the_risk():
    rng = np.random.default_rng(2)
    scales = rng.uniform(0.5, 2.0, 250)
    predicted = predictions(scales)
    right = [
        statistics.acerbi_szekely(draw(rng, scales), predicted, LEVELS, 0.05, draws=400, seed=k).p_value for k in range(400)
    ]
    assert 0.02 < np.mean(np.array(right) < 0.05) < 0.09
    assert np.mean(right) == pytest.approx(0.5, abs=0.06)
    wrong = [statistics.acerbi_szekely(draw(rng, 2 * scales), predicted, LEVELS, 0.05, draws=400).p_value for _ in range(40)]
    assert np.mean(np.array(wrong) < 0.05) > 0.9
    timid = [statistics.acerbi_szekely(draw(rng, scales / 2), predicted, LEVELS, 0.05, draws=400) for _ in range(20)]
    assert min(test.p_value for test in timid) > 0.5
    assert min(test.statistic for test in timid) > 0.0


def test_acerbi_szekely_uses_the_tail_of_the_predicted_distribution():
    """Var and shortfall by numerical integration of the interpolated quantile function, shuffled columns and all."""
    rng = np.random.default_rng(3)
    scales = rng.uniform(0.5, 2.0, 60)
    outcomes, fine = draw(rng, 1.5 * scales), (np.arange(200_000) + 0.5) / 200_000
    quantile_function = np.interp(fine, LEVELS, stats.norm.ppf(LEVELS))
    limit, shortfall = np.interp(0.1, LEVELS, stats.norm.ppf(LEVELS)), quantile_function[fine < 0.1].mean()
    expected = statistics.shortfall_statistic(outcomes, limit * scales, shortfall * scales, 0.1)
    order = rng.permutation(51)  # crossed outputs of a network
    predicted = predictions(scales)[:, order]
    assert statistics.acerbi_szekely(outcomes, predicted, LEVELS, 0.1, draws=10).statistic == pytest.approx(expected, rel=1e-6)
    coarse = statistics.acerbi_szekely(outcomes, -np.ones((60, 1)), [0.05], 0.1, draws=10)  # a single quantile
    assert coarse.statistic == pytest.approx(statistics.shortfall_statistic(outcomes, -1.0, -1.0, 0.1))


def test_transforms_of_a_right_prediction_are_uniform_however_coarse_it_is():
    rng, levels = np.random.default_rng(4), np.array([0.02, 0.1, 0.5, 0.6, 0.97])
    p_values = []
    for k in range(300):
        scales = rng.uniform(0.5, 2.0, 200)
        outcomes = scales * rng.standard_normal(200)
        places = statistics.probability_transform(outcomes, predictions(scales, levels), levels, seed=k)
        p_values.append(statistics.uniformity(places).p_value)
    assert 0.02 < np.mean(np.array(p_values) < 0.05) < 0.085
    outcomes = 2.0 * rng.standard_normal(500)
    places = statistics.probability_transform(outcomes, predictions(np.ones(500), levels), levels)
    assert statistics.uniformity(places).p_value < 1e-3


def test_transforms_lie_between_the_levels_around_the_outcome_and_spread_over_point_masses():
    quantiles, levels = np.tile([-1.0, 0.0, 0.0, 2.0], (4000, 1)), [0.1, 0.3, 0.7, 0.9]
    for outcome, low, high in ((-5.0, 0.0, 0.1), (-0.5, 0.1, 0.3), (0.0, 0.1, 0.9), (1.0, 0.7, 0.9), (9.0, 0.9, 1.0)):
        places = statistics.probability_transform(np.full(4000, outcome), quantiles, levels)
        assert low <= places.min() < low + 0.01
        assert high - 0.01 < places.max() <= high
    again = statistics.probability_transform(np.zeros(4000), quantiles, levels, seed=0)
    np.testing.assert_array_equal(again, statistics.probability_transform(np.zeros(4000), quantiles, levels))


@pytest.mark.parametrize("n", [5, 40, 2000])
def test_uniformity_is_the_test_of_scipy(n):
    for seed in range(20):
        places = np.random.default_rng(seed).random(n) ** (1.0 + seed / 40)
        theirs = stats.kstest(places, "uniform")
        ours = statistics.uniformity(places)
        assert ours.statistic == pytest.approx(theirs.statistic, abs=1e-12)
        assert ours.p_value == pytest.approx(theirs.pvalue, abs=0.025 if theirs.pvalue > 0.1 else 0.002)


def test_realised_levels_and_pinball_loss():
    rng = np.random.default_rng(5)
    outcomes = rng.standard_normal(40_000)
    quantiles = np.tile(stats.norm.ppf(LEVELS), (40_000, 1))
    np.testing.assert_allclose(statistics.realised_levels(outcomes, quantiles, LEVELS), LEVELS, atol=0.01)
    right = statistics.pinball_loss(outcomes, quantiles, LEVELS)
    # For the right quantile of a standard normal the expected loss is its density there.
    np.testing.assert_allclose(right, stats.norm.pdf(stats.norm.ppf(LEVELS)), atol=0.01)
    assert (statistics.pinball_loss(outcomes, quantiles + 0.3, LEVELS) > right).all()
    np.testing.assert_allclose(statistics.pinball_loss([1.0, -1.0], [[0.0], [0.0]], [0.9]), [(0.9 * 1.0 + 0.1 * 1.0) / 2])


GOOD = ([0.0, 1.0], np.zeros((2, 2)), [0.1, 0.9])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.kupiec([], -1.0, 0.05), r"outcomes is \(0,\)"),
        (lambda: statistics.kupiec([0.1, math.nan], -1.0, 0.05), r"outcomes\[1\] is nan"),
        (lambda: statistics.kupiec([0.1, 0.1], math.nan, 0.05), r"value_at_risk\[0\] is nan"),
        (lambda: statistics.kupiec([0.1, 0.1], [0.1], 0.05), "the shape of value_at_risk"),
        (lambda: statistics.kupiec([0.1], -1.0, 1.0), "alpha is 1.0"),
        (lambda: statistics.shortfall_statistic([0.1], -1.0, 0.0, 0.05), "expected_shortfall is 0.0"),
        (lambda: statistics.shortfall_statistic([0.1], -1.0, -1.0, 0.0), "alpha is 0.0"),
        (lambda: statistics.acerbi_szekely(*GOOD, 0.1), "alpha is 0.1"),
        (lambda: statistics.acerbi_szekely(*GOOD, 0.2, draws=1), "draws is 1"),
        (lambda: statistics.acerbi_szekely(*GOOD, 0.2), "expected_shortfall is 0.0"),
        (lambda: statistics.probability_transform([0.0], np.zeros((2, 2)), [0.1, 0.9]), "the shape of quantiles"),
        (lambda: statistics.probability_transform([0.0], [[0.0, math.nan]], [0.1, 0.9]), r"quantiles\[0, 1\] is nan"),
        (lambda: statistics.realised_levels([0.0], [[0.0, 1.0]], [0.9, 0.1]), "levels is"),
        (lambda: statistics.pinball_loss([0.0], [[0.0, 1.0]], [0.0, 0.1]), "levels is"),
        (lambda: statistics.uniformity([0.5, 1.1]), "transforms is"),
    ],
)
def test_what_cannot_be_tested_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
