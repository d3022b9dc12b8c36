"""Performance measures against empyrical, ffn, statsmodels, the accounting kernel and closed forms."""

import math

import empyrical
import ffn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter
from statsmodels.tsa.stattools import acf

from tailguard.evaluate import statistics
from tailguard.market import simulate
from tailguard.market.synthetic import random_walk

HOURLY = 24 * 365.2425


@pytest.fixture(scope="module")
def returns():
    return np.random.default_rng(0).standard_t(4, 3000) * 0.01 + 0.0004


@pytest.fixture(scope="module")
def equity(returns):
    return statistics.equity_of(returns)


@pytest.mark.parametrize("periods", [12, 252, HOURLY])
def test_ratios_agree_with_empyrical_at_any_number_of_bars_per_year(returns, equity, periods):
    year = {"annualization": periods}
    assert statistics.sharpe(returns, periods) == pytest.approx(empyrical.sharpe_ratio(returns, **year), rel=1e-12)
    assert statistics.sortino(returns, periods) == pytest.approx(empyrical.sortino_ratio(returns, **year), rel=1e-12)
    assert statistics.calmar(equity, periods) == pytest.approx(empyrical.calmar_ratio(returns, **year), rel=1e-9)
    assert statistics.cagr(equity, periods) == pytest.approx(empyrical.cagr(returns, **year), rel=1e-9)
    assert statistics.volatility(returns, periods) == pytest.approx(empyrical.annual_volatility(returns, **year), rel=1e-12)


def test_a_riskless_rate_and_a_target_are_subtracted_bar_by_bar(returns):
    rate = np.random.default_rng(1).random(len(returns)) * 1e-4
    assert statistics.sharpe(returns, 252, rate) == pytest.approx(empyrical.sharpe_ratio(returns, rate), rel=1e-12)
    assert statistics.sharpe(returns, 252, 1e-4) == pytest.approx(empyrical.sharpe_ratio(returns, 1e-4), rel=1e-12)
    assert statistics.sortino(returns, 252, 1e-4) == pytest.approx(empyrical.sortino_ratio(returns, 1e-4), rel=1e-12)
    assert statistics.volatility(returns, 252, rate) == pytest.approx(empyrical.annual_volatility(returns - rate), rel=1e-12)
    assert statistics.lo_sharpe(returns, 252, riskless=rate) == statistics.lo_sharpe(returns - rate, 252)


def test_calmar_counts_the_growth_in_units_of_cash(returns, equity):
    rate = np.random.default_rng(1).random(len(returns)) * 1e-4
    growth = (equity[-1] / np.prod(1.0 + rate)) ** (252 / len(returns)) - 1.0
    assert statistics.calmar(equity, 252, rate) == pytest.approx(growth / statistics.max_drawdown(equity), rel=1e-12)
    assert statistics.calmar(equity, 252, 0.0) == statistics.calmar(equity, 252)
    with pytest.raises(ValueError, match="shape of the reference return"):
        statistics.calmar(equity, 252, rate[:-1])


def test_ulcer_agrees_with_ffn_and_drawdown_counts_from_the_start(equity):
    assert statistics.ulcer(equity) == pytest.approx(ffn.core.to_ulcer_index(equity) / 100.0, rel=1e-12)
    assert statistics.max_drawdown([1.0, 0.75, 0.9]) == 0.25
    assert statistics.ulcer([2.0, 1.0, 2.0, 2.0]) == pytest.approx(math.sqrt(0.25 / 4))


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.3, 1.0])
def test_cdar_is_the_rockafellar_uryasev_optimum_of_the_drawdowns(equity, alpha):
    """CDaR = min_c c + E(D - c)+ / alpha, and the minimum stands at one of the drawdowns."""
    depth = statistics.drawdowns(equity)
    best = (depth + np.maximum(depth[None, :] - depth[:, None], 0.0).mean(axis=1) / alpha).min()
    assert statistics.cdar(equity, alpha) == pytest.approx(best, rel=1e-9)


@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=40), st.floats(0.01, 1.0))
@settings(deadline=None, derandomize=True)
def test_cdar_lies_between_the_mean_and_the_largest_drawdown(moves, alpha):
    equity = statistics.equity_of(moves)
    mean, largest = float(statistics.drawdowns(equity).mean()), statistics.max_drawdown(equity)
    assert mean - 1e-12 <= statistics.cdar(equity, alpha) <= largest + 1e-12


@pytest.mark.parametrize("horizon", [1, 2, 12, 252])
def test_lo_sharpe_is_lo_s_formula_with_the_autocorrelations_of_statsmodels(returns, horizon):
    rho = acf(returns, nlags=horizon, fft=False)
    eta = horizon / math.sqrt(horizon + 2.0 * sum((horizon - k) * rho[k] for k in range(1, horizon)))
    per_bar = statistics.sharpe(returns, 1.0)
    expected = eta * per_bar * math.sqrt(252 / horizon)
    assert statistics.lo_sharpe(returns, 252, horizon) == pytest.approx(expected, rel=1e-9)


def test_lo_sharpe_of_trending_returns_is_the_closed_form():
    """AR(1): the variance of a q-sum over q is 1 + 2 sum (1 - k/q) rho^k, for long sums (1 + rho) / (1 - rho)."""
    rng, rho, n = np.random.default_rng(2), 0.3, 200_000
    returns = 0.01 * lfilter([1.0], [1.0, -rho], rng.standard_normal(n)) + 0.001
    expected = 1.0 + 2.0 * sum((1.0 - k / 20) * rho**k for k in range(1, 20))
    assert statistics.variance_ratio(returns, 20) == pytest.approx(expected, rel=0.03)
    ratio = statistics.sharpe(returns, 252) / statistics.lo_sharpe(returns, 252)
    assert ratio == pytest.approx(math.sqrt((1 + rho) / (1 - rho)), rel=0.03)
    assert statistics.newey_west_lags(n) == 21


def test_rolling_returns_compound(returns):
    expected = [np.prod(1.0 + returns[t : t + 20]) - 1.0 for t in range(len(returns) - 19)]
    np.testing.assert_allclose(statistics.rolling_returns(returns, 20), expected, atol=1e-12)
    np.testing.assert_allclose(statistics.rolling_returns(returns, 1), returns, atol=1e-14)


def test_traded_shares_are_those_of_the_accounting_kernel():
    bars = random_walk(300, seed=3)
    targets = np.random.default_rng(4).uniform(-1.0, 1.0, len(bars))
    targets[::3] = np.nan  # a position that only drifts is not traded
    account = simulate(bars, targets, fee=0.0, fill="close")
    moves = statistics.returns_of(bars["close"])
    np.testing.assert_allclose(statistics.traded(account.weights, moves), account.turnover, atol=1e-12)
    np.testing.assert_allclose(account.turnover[3::3], 0.0, atol=1e-12)
    assert statistics.turnover(account.turnover, 252) == pytest.approx(account.turnover.mean() * 252)


def test_traded_shares_of_several_assets():
    """Half in each of two assets; one doubles, so that it is 2/3 of the account and 1/6 is traded on each side."""
    np.testing.assert_allclose(statistics.traded([[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0]]), [1.0, 1.0 / 3.0])


def test_exposure_is_gross_and_net():
    weights = [[0.5, -0.5], [1.0, 0.0]]
    assert statistics.exposure(weights) == 1.0
    assert statistics.net_exposure(weights) == 0.5
    assert statistics.exposure([-0.4, 0.2]) == pytest.approx(0.3)
    assert statistics.net_exposure([-0.4, 0.2]) == pytest.approx(-0.1)


def test_hit_rate_leaves_out_the_bars_without_a_move():
    assert statistics.hit_rate([0.1, -0.1, 0.0, 0.2]) == pytest.approx(2 / 3)
    assert statistics.hit_rate([0.0, 0.0]) == 0.0


def test_cost_share():
    assert statistics.cost_share(30.0, 10.0) == 0.25
    assert statistics.cost_share(-5.0, 10.0) == 2.0
    assert statistics.cost_share(-10.0, 10.0) == math.inf
    assert statistics.cost_share(-10.0, 0.0) == 0.0


@pytest.mark.parametrize("value", [0.0, 0.001, -0.001])
def test_constant_returns(value):
    """An account that never moves has ratios of 0, a gain without risk is infinitely good, a loss without risk is not."""
    returns = np.full(300, value)
    equity = statistics.equity_of(returns)
    sign = math.copysign(math.inf, value) if value else 0.0
    assert statistics.sharpe(returns, 252) == sign
    assert statistics.lo_sharpe(returns, 252) == sign
    # The same through equity: rounding alone must not become a volatility.
    assert statistics.sharpe(statistics.returns_of(equity), 252) == sign
    assert statistics.volatility(statistics.returns_of(equity), 252) == 0.0
    assert statistics.sortino(returns, 252) == (pytest.approx(-math.sqrt(252)) if value < 0 else sign)
    assert statistics.max_drawdown(equity) == pytest.approx(1.0 - 0.999**300 if value < 0 else 0.0, abs=1e-12)
    assert statistics.calmar(equity, 252) == (pytest.approx((0.999**252 - 1) / (1 - 0.999**300)) if value < 0 else sign)
    assert statistics.cagr(equity, 252) == pytest.approx((1.0 + value) ** 252 - 1.0, abs=1e-12)
    assert statistics.hit_rate(returns) == (1.0 if value > 0 else 0.0)


def test_one_observation():
    assert statistics.cvar([-0.1], 0.05) == pytest.approx(-0.1)
    assert statistics.sortino([-0.1], 1.0) == pytest.approx(-1.0)
    assert statistics.max_drawdown([1.0, 0.9]) == pytest.approx(0.1)
    for undefined in (statistics.sharpe, statistics.volatility, statistics.lo_sharpe):
        with pytest.raises(ValueError, match="returns is"):
            undefined([0.1], 252)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_that_are_none_are_named_with_their_place(wrong):
    returns = [0.1, wrong, 0.2]
    for measure in (statistics.sharpe, statistics.sortino, statistics.volatility, statistics.lo_sharpe):
        with pytest.raises(ValueError, match=r"returns\[1\] is (nan|inf), but it must be finite"):
            measure(returns, 252)
    for measure in (statistics.hit_rate, statistics.equity_of, lambda x: statistics.cvar(x, 0.05)):
        with pytest.raises(ValueError, match=r"returns\[1\] is"):
            measure(returns)
    with pytest.raises(ValueError, match=r"weights\[1\] is"):
        statistics.exposure(returns)


@pytest.mark.parametrize("equity", [[1.0, -0.5], [1.0, 0.0], [1.0, math.nan], [1.0, math.inf], [1.0]])
def test_equity_that_is_not_positive_is_refused(equity):
    for measure in (statistics.drawdowns, statistics.max_drawdown, statistics.ulcer, statistics.returns_of):
        with pytest.raises(ValueError, match="equity is"):
            measure(equity)
    for measure in (statistics.cagr, statistics.calmar):
        with pytest.raises(ValueError, match="equity is"):
            measure(equity, 252)


@pytest.mark.parametrize("periods", [0.0, -252.0, math.nan, math.inf])
def test_impossible_bars_per_year_are_refused(periods):
    for measure in (statistics.sharpe, statistics.sortino, statistics.volatility, statistics.lo_sharpe):
        with pytest.raises(ValueError, match="periods is"):
            measure([0.1, 0.2], periods)
    with pytest.raises(ValueError, match="periods is"):
        statistics.cagr([1.0, 2.0], periods)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.equity_of([0.1, -1.0]), "the lowest of returns is -1.0"),
        (lambda: statistics.rolling_returns([0.1, 0.2], 3), "bars is 3"),
        (lambda: statistics.lo_sharpe([0.1, 0.2], 252, 3), "horizon is 3"),
        (lambda: statistics.sharpe([0.1, 0.2], 252, [0.1]), "the shape of the reference return"),
        (lambda: statistics.traded([0.5, 0.5], [0.1, 0.1]), "the shape of asset_returns"),
        (lambda: statistics.traded([1.0, 1.0], [-1.0]), "the lowest growth of the account is 0.0"),
        (lambda: statistics.turnover([-0.1], 252), "shares is -0.1"),
        (lambda: statistics.cost_share(1.0, -1.0), "costs is -1.0"),
        (lambda: statistics.cost_share(math.nan, 1.0), "gain is nan"),
        (lambda: statistics.exposure(np.zeros((2, 2, 2))), r"weights is \(2, 2, 2\)"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_growth_that_no_float_can_hold_is_infinite():
    assert statistics.cagr([1.0, 2.0], 525_960) == math.inf
    assert statistics.cagr([2.0, 1.0], 525_960) == -1.0
