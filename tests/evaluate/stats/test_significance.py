"""PSR, DSR, track records and PBO against ffn, scipy, numerical integration and simulation."""

import math

import ffn
import numpy as np
import pandas as pd
import pytest
from scipy import integrate, stats
from scipy.signal import lfilter

from tailguard.evaluate import statistics


@pytest.fixture(scope="module")
def returns():
    return stats.skewnorm(-4).rvs(1000, random_state=0) * 0.01 + 0.0080


def test_psr_is_the_formula_with_the_moments_of_scipy(returns):
    ratio = returns.mean() / returns.std(ddof=1)
    spread = 1.0 - stats.skew(returns) * ratio + (stats.kurtosis(returns, fisher=False) - 1.0) / 4.0 * ratio**2
    for hurdle in (0.0, 0.02, 0.1):
        expected = stats.norm.cdf((ratio - hurdle) * math.sqrt(999) / math.sqrt(spread))
        assert statistics.probabilistic_sharpe(returns, hurdle) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("trials", [2, 40, 1000])
def test_dsr_agrees_with_ffn(returns, trials):
    """ffn corrects the moments for bias, which changes the fifth digit at 1000 bars."""
    ratios = np.random.default_rng(1).standard_normal(trials) * 0.02
    theirs = ffn.core.calc_deflated_sharpe_ratio(pd.Series(returns), ratios, nperiods=252, annualized_trials=False)
    ours = statistics.deflated_sharpe(returns, trials, float(np.std(ratios, ddof=1)))
    assert 0.01 < theirs < 0.99
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_dsr_of_one_trial_is_the_psr_and_more_trials_deflate(returns):
    assert statistics.deflated_sharpe(returns, 1) == statistics.probabilistic_sharpe(returns)
    assert statistics.deflated_sharpe(returns, 1, 0.5) == statistics.probabilistic_sharpe(returns)
    deflated = [statistics.deflated_sharpe(returns, trials) for trials in (1, 2, 10, 1000)]
    assert deflated == sorted(deflated, reverse=True)
    assert statistics.deflated_sharpe(returns, 10) == statistics.deflated_sharpe(returns, 10, 1.0 / math.sqrt(999))


@pytest.mark.parametrize("trials", [10, 100, 10_000])
def test_expected_maximum_of_normals(trials):
    """E[max] = integral of x N phi(x) Phi(x)^(N-1); the formula is an approximation good to a few per cent."""
    exact, _ = integrate.quad(
        lambda x: x * trials * stats.norm.pdf(x) * stats.norm.cdf(x) ** (trials - 1), -10, 10, points=[3.0]
    )
    assert statistics.expected_max_sharpe(trials, 0.5) == pytest.approx(0.5 * exact, rel=0.03)
    assert statistics.expected_max_sharpe(trials, 0.5) >= 0.5 * exact
    years = statistics.minimum_backtest_years(trials, 1.5)
    assert 0.5 * 2.0 * math.log(trials) / 1.5**2 < years < 2.0 * math.log(trials) / 1.5**2


def test_after_the_minimum_track_record_the_psr_is_the_confidence(returns):
    """The sample repeated has the same moments (but for n - 1 in the deviation) and more bars."""
    bars = statistics.minimum_track_record(returns, 0.02, 0.9)
    assert bars == pytest.approx(len(returns) * 2.0, rel=0.99)  # the same order as the sample, so that the test means something
    ratio = returns.mean() / returns.std(ddof=1)
    spread = 1.0 - stats.skew(returns) * ratio + (stats.kurtosis(returns, fisher=False) - 1.0) / 4.0 * ratio**2
    assert stats.norm.cdf((ratio - 0.02) * math.sqrt(bars - 1.0) / math.sqrt(spread)) == pytest.approx(0.9, rel=1e-12)
    assert statistics.minimum_track_record(returns, hurdle=ratio) == math.inf
    assert statistics.minimum_track_record(-returns) == math.inf


@pytest.mark.parametrize("distribution", ["normal", "student"])
def test_psr_holds_its_size_without_skill(distribution):
    rng = np.random.default_rng(2)
    draws = rng.standard_normal((3000, 500)) if distribution == "normal" else rng.standard_t(4, (3000, 500))
    rejected = np.mean([statistics.probabilistic_sharpe(row) > 0.95 for row in draws])
    assert 0.038 < rejected < 0.063  # three standard errors of 3000 tosses of 5 %


def test_psr_holds_its_size_at_a_hurdle_for_skewed_returns():
    """The true Sharpe ratio of 1 + 0.2 (Exp - 1) is known: what the closed form of the error is for."""
    rng = np.random.default_rng(3)
    draws = rng.standard_exponential((2000, 1000)) - 1.0 + 0.1
    rejected = np.mean([statistics.probabilistic_sharpe(row, 0.1) > 0.95 for row in draws])
    assert 0.035 < rejected < 0.066


def test_psr_and_dsr_hold_their_size_for_smoothed_returns_when_told_of_it():
    """AR(1) 0.5 triples the variance of the mean: PSR > .95 happens with P(Z > .95) = 17 %, of the best of 10 nearly always."""
    rng, trials, n = np.random.default_rng(8), 10, 1000
    plain = aware = best_plain = best_aware = 0
    for _ in range(200):
        returns = lfilter([1.0], [1.0, -0.5], rng.standard_normal((trials, n + 50)))[:, 50:] * 0.01
        first, best = returns[0], returns[(returns.mean(axis=1) / returns.std(axis=1)).argmax()]
        plain += statistics.probabilistic_sharpe(first) > 0.95
        aware += statistics.probabilistic_sharpe(first, inflation=statistics.variance_inflation(first)) > 0.95
        best_plain += statistics.deflated_sharpe(best, trials) > 0.95
        best_aware += statistics.deflated_sharpe(best, trials, inflation=statistics.variance_inflation(best)) > 0.95
    assert plain / 200 > 0.11
    assert aware / 200 < 0.10
    assert best_plain / 200 > 0.2
    assert best_aware / 200 < 0.05
    returns = returns[0]
    bars = statistics.minimum_track_record(np.abs(returns), inflation=3.0)
    assert bars - 1.0 == pytest.approx(3.0 * (statistics.minimum_track_record(np.abs(returns)) - 1.0))
    with pytest.raises(ValueError, match=r"inflation is 0\.5"):
        statistics.deflated_sharpe(returns, 2, inflation=0.5)


def test_the_best_of_many_noise_strategies_passes_the_psr_and_not_the_dsr():
    """Best of 40: P(PSR > .95) = 1 - .95^40 = 87 %; P(DSR > .95) = 1 - Phi(E[max] + 1.645)^40 = 0.4 %."""
    rng, trials = np.random.default_rng(4), 40
    plain = deflated = 0
    for _ in range(300):
        returns = rng.standard_normal((trials, 400)) * 0.01
        ratios = returns.mean(axis=1) / returns.std(axis=1, ddof=1)
        best = returns[ratios.argmax()]
        plain += statistics.probabilistic_sharpe(best) > 0.95
        deflated += statistics.deflated_sharpe(best, trials, float(ratios.std(ddof=1))) > 0.95
    assert 0.80 < plain / 300 < 0.94
    assert deflated / 300 <= 0.02


def test_dsr_finds_real_skill_among_many():
    rng, found = np.random.default_rng(5), 0
    for _ in range(100):
        skilled = rng.standard_normal(2000) * 0.01 + 0.0015  # Sharpe 0.15 per bar, 6.7 standard errors
        found += statistics.deflated_sharpe(skilled, 40) > 0.95
    assert found / 100 > 0.95


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.probabilistic_sharpe([0.1, 0.2]), r"returns is \(2,\)"),
        (lambda: statistics.probabilistic_sharpe([0.1, 0.2, math.nan]), r"returns\[2\] is nan"),
        (lambda: statistics.probabilistic_sharpe(np.zeros(10)), "the deviation of returns is 0.0"),
        (lambda: statistics.deflated_sharpe(np.full(10, 0.001), 3), "the deviation of returns"),
        (lambda: statistics.minimum_track_record(np.full(10, 0.001)), "the deviation of returns"),
        (lambda: statistics.probabilistic_sharpe([0.1, 0.2, 0.3], math.nan), "hurdle is nan"),
        (lambda: statistics.minimum_track_record([0.1, 0.2, 0.3], math.inf), "hurdle is inf"),
        (lambda: statistics.minimum_track_record([0.1, 0.2, 0.3], 0.0, 0.5), "confidence is 0.5"),
        (lambda: statistics.expected_max_sharpe(0, 1.0), "trials is 0"),
        (lambda: statistics.expected_max_sharpe(2, -1.0), "deviation is -1.0"),
        (lambda: statistics.minimum_backtest_years(2, 0.0), "annual_sharpe is 0.0"),
    ],
)
def test_what_has_no_sharpe_ratio_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("bars", "trials", "blocks"), [(160, 10, 8), (200, 5, 10), (64, 2, 2)])
def test_logits_agree_with_ffn_halving_by_halving(bars, trials, blocks):
    returns = np.random.default_rng(bars).standard_normal((bars, trials)) * 0.01 + 0.02
    theirs = ffn.core.calc_prob_backtest_overfitting(pd.DataFrame(returns), blocks, full_output=True)
    ours = statistics.overfitting(returns, blocks)
    np.testing.assert_allclose(ours.logits, theirs["logits"], atol=1e-12)
    assert ours.probability == theirs["pbo"]


def test_blocks_of_unequal_length_slope_and_loss_by_hand():
    """Five bars a block but for one of four, and every halving computed from the returns themselves."""
    returns = np.random.default_rng(0).standard_normal((19, 6))
    pieces = np.array_split(np.arange(19), 4)
    before, after, losses = [], [], 0
    for first in range(4):
        for second in range(first + 1, 4):
            inside = np.concatenate([pieces[first], pieces[second]])
            outside = np.setdiff1d(np.arange(19), inside)
            ratios = [returns[half].mean(axis=0) / returns[half].std(axis=0, ddof=1) for half in (inside, outside)]
            before.append(ratios[0].max())
            after.append(ratios[1][ratios[0].argmax()])
            losses += after[-1] <= 0.0
    ours = statistics.overfitting(returns, 4)
    assert ours.slope == pytest.approx(np.polyfit(before, after, 1)[0])
    assert ours.loss == losses / 6


def test_noise_is_overfitted_in_half_of_the_halvings():
    rng = np.random.default_rng(1)
    measured = [statistics.overfitting(rng.standard_normal((400, 20)), 10) for _ in range(80)]
    assert np.mean([result.probability for result in measured]) == pytest.approx(0.5, abs=0.07)
    assert np.mean([result.loss for result in measured]) == pytest.approx(0.5, abs=0.1)
    # Halves share one mean: what the winner gained in one half is missing in the other.
    assert np.mean([result.slope for result in measured]) < -0.3


def test_one_trial_that_is_better_is_found_and_thousands_of_halvings_take_moments():
    returns = np.random.default_rng(2).standard_normal((2000, 30)) * 0.01
    returns[:, 7] += 0.0015
    ours = statistics.overfitting(returns)
    assert len(ours.logits) == 12_870
    assert ours.probability < 0.02
    assert ours.loss < 0.02


def test_trials_that_never_move_share_their_rank():
    """All ratios are 0: the winner has the middle rank, whose logit is 0."""
    ours = statistics.overfitting(np.zeros((32, 3)), 4)
    assert (ours.probability, ours.loss, ours.slope) == (1.0, 1.0, 0.0)
    np.testing.assert_array_equal(ours.logits, 0.0)


@pytest.mark.parametrize(
    ("returns", "blocks", "message"),
    [
        (np.zeros(32), 4, r"returns is \(32,\)"),
        (np.zeros((32, 1)), 4, r"returns is \(32, 1\)"),
        (np.full((32, 2), np.nan), 4, r"returns\[0, 0\] is nan"),
        (np.zeros((32, 2)), 5, "blocks is 5"),
        (np.zeros((32, 2)), 22, "blocks is 22"),
        (np.zeros((31, 2)), 16, "the number of bars is 31"),
    ],
)
def test_what_cannot_be_halved_is_refused(returns, blocks, message):
    with pytest.raises(ValueError, match=message):
        statistics.overfitting(returns, blocks)
