"""Statistics against closed forms and against empyrical."""

import math

import empyrical
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.evaluate import statistics


@pytest.fixture(scope="module")
def returns():
    return np.random.default_rng(0).standard_t(4, 5000) * 0.01


def test_sharpe_volatility_drawdown_and_growth_agree_with_empyrical(returns):
    equity = np.concatenate([[1.0], np.cumprod(1.0 + returns)])
    assert statistics.sharpe(returns, 252) == pytest.approx(empyrical.sharpe_ratio(returns), rel=1e-12)
    assert statistics.volatility(returns, 252) == pytest.approx(empyrical.annual_volatility(returns), rel=1e-12)
    assert statistics.max_drawdown(equity) == pytest.approx(-empyrical.max_drawdown(returns), rel=1e-12)
    assert statistics.cagr(equity, 252) == pytest.approx(empyrical.cagr(returns), rel=1e-10)
    np.testing.assert_allclose(statistics.returns_of(equity), returns, atol=1e-14)


@given(
    sample=st.lists(st.floats(-1.0, 1.0, allow_subnormal=False), min_size=1, max_size=60),
    alpha=st.floats(0.01, 1.0),
)
@settings(deadline=None, derandomize=True)
def test_cvar_is_the_rockafellar_uryasev_optimum(sample, alpha):
    """CVaR = max_b b - E(b - X)+ / alpha, and the maximum stands at one of the sample's points."""
    values = np.array(sample)
    best = max(b - np.maximum(b - values, 0.0).mean() / alpha for b in values)
    assert statistics.cvar(values, alpha) == pytest.approx(best, abs=1e-12)


def test_cvar_of_many_gaussian_returns_is_the_closed_form():
    values = np.random.default_rng(1).standard_normal(1_000_000)
    for alpha, exact in ((0.01, -2.665214), (0.05, -2.062713), (0.25, -1.271106), (1.0, 0.0)):
        assert statistics.cvar(values, alpha) == pytest.approx(exact, abs=0.01)


def test_an_account_that_never_moves_has_no_sharpe():
    assert statistics.sharpe(np.zeros(10), 252) == 0.0
    assert statistics.max_drawdown(np.ones(10)) == 0.0


def test_growth_of_a_doubling_per_year():
    equity = 2.0 ** (np.arange(253) / 252)
    assert statistics.cagr(equity, 252) == pytest.approx(1.0, rel=1e-12)
    assert statistics.volatility(statistics.returns_of(equity), 252) < 1e-12
    assert math.isclose(statistics.drawdowns([1.0, 2.0, 1.0])[-1], 0.5)


@pytest.mark.parametrize("equity", [[1.0], [1.0, 0.0], [[1.0, 2.0]], [1.0, -2.0], [1.0, float("nan")]])
def test_impossible_equity_is_refused(equity):
    with pytest.raises(ValueError, match="equity is"):
        statistics.returns_of(equity)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, float("nan")])
def test_impossible_alpha_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha is"):
        statistics.cvar([0.1], alpha)
