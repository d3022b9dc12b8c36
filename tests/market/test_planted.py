"""Planted edges: what the market says it will do is what it does, and nothing else in it can be predicted."""

import numpy as np
import pytest

from tailguard.market import check_bars, simulate
from tailguard.market.planted import (
    FAMILIES,
    best_threshold,
    net_sharpe,
    open_returns,
    oracle_weights,
    planted_market,
)

FEE = 0.0005
LONG = 40_000
EDGES = [family for family in FAMILIES if family not in ("none", "ending")]


@pytest.fixture(scope="module", params=EDGES)
def market(request):
    return planted_market(request.param, LONG, sharpe=2.0, fee=FEE, seed=11)


def errors_of(market):
    """Expected returns, and what came minus what was expected; the last two decisions have not been paid."""
    earned = np.expm1(open_returns(market.bars))
    return market.expected[:-2], (earned - market.expected)[:-2]


def test_the_expected_return_is_the_conditional_mean(market):
    """Errors are 0 on average and uncorrelated with the expectation, with its square and with the last return."""
    expected, errors = errors_of(market)
    last = np.diff(
        np.log(market.bars.xs("close", axis=1, level=-1) if market.family == "lead_lag" else market.bars[["close"]]), axis=0
    )
    past = last[: len(errors) - 1]
    for asset in range(expected.shape[1]):
        for regressor in (np.ones(len(errors)), expected[:, asset], expected[:, asset] ** 2):
            product = regressor * errors[:, asset]
            assert abs(product.mean()) <= 4.5 * product.std() / np.sqrt(len(product))
        for other in range(past.shape[1]):
            product = past[:, other] * errors[1:, asset]
            assert abs(product.mean()) <= 4.5 * product.std() / np.sqrt(len(product))


def test_the_oracle_earns_the_sharpe_ratio_that_was_asked_for(market):
    """Within four standard errors of a Sharpe ratio over 159 years, sqrt((1 + s^2 / 2) / years)."""
    earned = open_returns(market.bars)
    weights = oracle_weights(market.expected, best_threshold(market.expected, earned, FEE))
    reached = net_sharpe(weights, earned, FEE)
    assert reached == pytest.approx(2.0, abs=4.0 * np.sqrt(2.0 * 1.01 / (LONG / 252.0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_bars_are_bars_and_the_draw_is_the_seeds(family):
    one, same, other = (planted_market(family, 800, sharpe=1.0, seed=seed) for seed in (3, 3, 4))
    assert one.bars.equals(same.bars)
    assert not one.bars.equals(other.bars)
    tables = [one.bars[symbol] for symbol in "AB"] if family == "lead_lag" else [one.bars]
    for table in tables:
        assert check_bars(table) == []  # weekends are no gaps
    assert one.expected.shape == (800, len(tables))


def test_the_simulator_of_the_environments_agrees_with_the_quick_one():
    market = planted_market("reversion", 3000, sharpe=2.0, fee=FEE, seed=1)
    earned = open_returns(market.bars)
    weights = oracle_weights(market.expected, best_threshold(market.expected, earned, FEE))
    equity = simulate(market.bars, weights[:, 0], fee=FEE).equity
    returns = np.diff(equity) / equity[:-1]
    sharpe = returns.mean() / returns.std() * np.sqrt(252.0)
    assert sharpe == pytest.approx(net_sharpe(weights, earned, FEE), abs=0.15)


def test_without_an_edge_nothing_is_expected_and_an_ending_one_ends():
    nothing = planted_market("none", 500, sharpe=2.0, drift=0.05, seed=0)
    np.testing.assert_allclose(nothing.expected, 0.05 / 252.0)
    ending = planted_market("ending", 1000, sharpe=2.0, seed=0)
    assert np.abs(ending.expected[:700]).min() > 0.0
    assert not ending.expected[700:].any()


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="family is 'trend'"):
        planted_market("trend", 1000, seed=0)
    with pytest.raises(ValueError, match="sharpe"):
        planted_market("ar", 1000, sharpe=-1.0, seed=0)
