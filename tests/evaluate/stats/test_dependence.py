"""Block length and Newey-West regression against arch and statsmodels."""

import math

import arch.bootstrap
import numpy as np
import pytest
import statsmodels.api as sm
from scipy.signal import lfilter
from statsmodels.tsa.stattools import acovf

from tailguard.evaluate import statistics
from tailguard.evaluate.stats.dependence import autocovariances


def ar1(n, rho, seed):
    return lfilter([1.0], [1.0, -rho], np.random.default_rng(seed).standard_normal(n))


@pytest.mark.parametrize("n", [8, 100, 257, 3000])
@pytest.mark.parametrize("rho", [0.0, 0.1, 0.6, -0.4])
def test_block_length_is_that_of_arch(n, rho):
    series = ar1(n, rho, seed=n) * 0.01 + 0.002
    if n == 8:  # too short for arch, which would ask for lags beyond the end
        assert 1.0 <= statistics.optimal_block_length(series) <= 3.0
        return
    theirs = arch.bootstrap.optimal_block_length(series)["stationary"].iloc[0]
    assert statistics.optimal_block_length(series) == pytest.approx(max(theirs, 1.0), rel=1e-9)


def test_block_length_grows_with_memory_and_stays_within_its_bounds():
    lengths = [statistics.optimal_block_length(ar1(2000, rho, seed=1)) for rho in (0.0, 0.5, 0.95)]
    assert 1.0 <= lengths[0] < lengths[1] < lengths[2] <= math.ceil(3.0 * math.sqrt(2000))
    assert statistics.optimal_block_length(np.full(50, 0.01)) == 1.0
    # What swings to and fro has next to no spectrum at frequency 0, and the formula divides by it: 3 sqrt(400) is the end.
    assert statistics.optimal_block_length(np.sin(np.arange(400) * np.pi / 6.0 + 0.3)) == 60.0


def test_autocovariances_are_those_of_statsmodels():
    series = ar1(501, 0.3, seed=2) + 5.0
    np.testing.assert_allclose(autocovariances(series, 500), acovf(series, fft=False), atol=1e-12)


@pytest.mark.parametrize("lags", [None, 0, 1, 12])
def test_alpha_and_beta_are_those_of_statsmodels(lags):
    rng = np.random.default_rng(3)
    market = 0.01 * ar1(1500, 0.2, seed=4) + 0.05  # far from 0, where a careless solution loses digits
    account = 0.0003 + 0.6 * market + 0.005 * ar1(1500, 0.3, seed=5) * (1.0 + 20.0 * np.abs(market - 0.05))
    account += 1e-4 * rng.standard_normal(1500)
    ours = statistics.alpha_beta(account, market, 252, lags)
    used = statistics.newey_west_lags(1500) if lags is None else lags
    fit = sm.OLS(account, sm.add_constant(market)).fit()
    theirs = fit.get_robustcov_results("HAC", maxlags=used, use_correction=False, use_t=False)
    assert ours.lags == used
    assert ours.alpha == pytest.approx(theirs.params[0] * 252, rel=1e-9)
    assert ours.beta == pytest.approx(theirs.params[1], rel=1e-9)
    assert ours.alpha_t == pytest.approx(theirs.tvalues[0], rel=1e-9)
    assert ours.beta_t == pytest.approx(theirs.tvalues[1], rel=1e-9)
    assert ours.alpha_p == pytest.approx(theirs.pvalues[0], rel=1e-8)
    assert ours.r_squared == pytest.approx(fit.rsquared, rel=1e-9)


def test_a_constant_mix_is_all_beta():
    market = 0.01 * ar1(500, 0.0, seed=6)
    mix = statistics.alpha_beta(0.4 * market, market, 252)
    assert mix.beta == pytest.approx(0.4, rel=1e-12)
    assert mix.alpha == pytest.approx(0.0, abs=1e-12)
    assert (mix.alpha_t, mix.alpha_p, mix.beta_t) == (0.0, 1.0, math.inf)
    assert mix.r_squared == pytest.approx(1.0)
    idle = statistics.alpha_beta(np.zeros(500), market, 252)
    assert (idle.alpha, idle.beta, idle.alpha_t, idle.r_squared) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("rho", [0.5, 0.0, -0.4])
def test_inflation_is_the_newey_west_variance_of_the_mean_over_the_plain_one(rho):
    from statsmodels.regression.linear_model import OLS

    returns = 0.01 * ar1(1500, rho, (9, 1))
    lags = statistics.newey_west_lags(1500)
    robust = OLS(returns, np.ones(1500)).fit(cov_type="HAC", cov_kwds={"maxlags": lags, "use_correction": False})
    ratio = float(robust.bse[0] ** 2) / (returns.var() / 1500)
    assert statistics.variance_inflation(returns) == pytest.approx(max(ratio, 1.0), rel=1e-9)
    assert statistics.variance_inflation(np.full(10, 0.01)) == 1.0


def test_newey_west_t_values_hold_their_size_where_plain_ones_do_not():
    """Residuals with AR(1) 0.5 make the mean's variance 3 times as large: |t| > 1.96 happens with P(|Z| > 1.13) = 26 %."""
    rejected = {0: 0, 12: 0}
    for seed in range(400):
        market = 0.01 * np.random.default_rng((7, seed)).standard_normal(1000)
        account = 0.5 * market + 0.01 * ar1(1000, 0.5, (8, seed))
        for lags in rejected:
            rejected[lags] += statistics.alpha_beta(account, market, 252, lags).alpha_p < 0.05
    assert 0.20 < rejected[0] / 400 < 0.33
    assert 0.02 < rejected[12] / 400 < 0.10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.alpha_beta([0.1, 0.2, 0.3], [0.1, 0.1, 0.1], 252), "the deviation of benchmark"),
        (lambda: statistics.alpha_beta([0.1, 0.2, 0.3], [0.1, 0.2], 252), r"benchmark is \(2,\)"),
        (lambda: statistics.alpha_beta([0.1, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4], 252), "the length of benchmark is 4"),
        (lambda: statistics.alpha_beta([0.1, 0.2, 0.3], [0.1, 0.2, math.nan], 252), r"benchmark\[2\] is nan"),
        (lambda: statistics.alpha_beta([0.1, 0.2, 0.3], [0.1, 0.2, 0.1], 252, 3), "lags is 3"),
        (lambda: statistics.optimal_block_length(np.zeros(7)), r"returns is \(7,\)"),
        (lambda: statistics.variance_ratio([0.1, 0.2], 0), "horizon is 0"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
