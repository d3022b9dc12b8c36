"""Stops, lots, limits and fees of single assets, worked out by hand."""

import numpy as np
import pandas as pd
import pytest

from tailguard.market import TradingEnv, TradingRules, align_bars, random_walk, simulate

HOLD = np.nan


def bars_of(*rows):
    """Bars from rows of open, high, low, close."""
    index = pd.date_range("2020-01-01", periods=len(rows), freq="D", unit="ns", name="time")
    return pd.DataFrame(np.array(rows, float), index=index, columns=["open", "high", "low", "close"]).assign(volume=1e9)


FLAT = (100, 100, 100, 100)
# After a decision at the first close, a position is entered at 100, the open of the second bar.
STOPPED = {
    "long, at the stop": (1.0, [FLAT, FLAT, (99, 100, 94, 96), FLAT], 95.0),
    "long, in the bar of the entry": (1.0, [FLAT, (100, 101, 90, 97), FLAT, FLAT], 95.0),
    "long, gap below the stop": (1.0, [FLAT, FLAT, (90, 96, 89, 95.5), FLAT], 90.0),
    "long, at the goal": (1.0, [FLAT, FLAT, (101, 112, 99, 105), FLAT], 110.0),
    "long, gap above the goal": (1.0, [FLAT, FLAT, (115, 116, 114, 115), FLAT], 115.0),
    "long, both in one bar": (1.0, [FLAT, FLAT, (100, 120, 80, 118), FLAT], 95.0),
    "long, exactly at the stop": (1.0, [FLAT, FLAT, (99, 100, 95, 96), FLAT], 95.0),
    "long, just not": (1.0, [FLAT, FLAT, (99, 109.9, 95.1, 96), (96, 97, 95.5, 96)], None),
    "short, at the stop": (-1.0, [FLAT, FLAT, (101, 106, 100, 104), FLAT], 105.0),
    "short, gap above the stop": (-1.0, [FLAT, FLAT, (108, 109, 104, 105), FLAT], 108.0),
    "short, at the goal": (-1.0, [FLAT, FLAT, (99, 100, 88, 95), FLAT], 90.0),
    "short, gap below the goal": (-1.0, [FLAT, FLAT, (85, 86, 84, 85), FLAT], 85.0),
}


@pytest.mark.parametrize(("weight", "rows", "price"), STOPPED.values(), ids=STOPPED)
def test_a_position_is_closed_at_the_stop_or_at_the_gap(weight, rows, price):
    bars = bars_of(*rows)
    result = simulate(bars, [weight, HOLD, HOLD, HOLD], fee=0.0, cash=1000.0, stop_loss=0.05, take_profit=0.1)
    units = weight * 10.0
    if price is None:
        assert (result.units[1:] == units).all()
        return
    assert result.units[-1] == 0.0
    assert result.equity[-1] == pytest.approx(1000.0 + units * (price - 100.0), rel=1e-12)


def test_the_costs_of_a_stop_are_those_of_a_sale_at_its_price():
    bars = bars_of(FLAT, FLAT, (99, 100, 90, 91), FLAT)
    result = simulate(bars, [0.5, HOLD, HOLD, HOLD], fee=0.01, slippage=0.02, cash=1000.0, stop_loss=0.05, sizing="pre_cost")
    sold = 5.0 * 95.0 * 0.98
    assert result.fees[2] == pytest.approx(0.01 * sold, rel=1e-12)
    assert result.slippage[2] == pytest.approx(5.0 * 95.0 * 0.02, rel=1e-12)
    assert result.cash[2] == pytest.approx(1000.0 - 500.0 * 1.02 * 1.01 + sold * 0.99, rel=1e-12)
    assert result.turnover[2] == pytest.approx(5.0 * 95.0 / (result.cash[1] + 5.0 * 99.0), rel=1e-12)


def test_the_next_decision_enters_again():
    bars = bars_of(FLAT, FLAT, (99, 100, 94, 96), (96, 97, 95.5, 96), (96, 97, 95.5, 96))
    result = simulate(bars, np.ones(5), fee=0.0, cash=1000.0, stop_loss=0.05)
    assert result.units[2] == 0.0
    assert result.units[3] == pytest.approx(950.0 / 96.0)


def test_a_stop_saves_an_account_from_ruin():
    rows = [FLAT, FLAT, (99, 99, 40, 41), FLAT]
    ruined = simulate(bars_of(*rows), [2.0, HOLD, HOLD, HOLD], fee=0.0, bankruptcy=0.05)
    saved = simulate(bars_of(*rows), [2.0, HOLD, HOLD, HOLD], fee=0.0, bankruptcy=0.05, stop_loss=0.05)
    assert ruined.ruined_at == 2
    assert saved.ruined_at is None
    assert saved.equity[-1] == pytest.approx(0.9)


def test_a_missing_bar_triggers_no_stop():
    bars = align_bars(
        {"a": bars_of(FLAT, FLAT, FLAT, FLAT), "b": bars_of(FLAT, FLAT, FLAT, (90, 91, 89, 90)).drop(index="2020-01-03")}
    )
    weights = np.full((4, 2), HOLD)
    weights[0] = 0.5
    result = simulate(bars, weights, fee=0.0, cash=1000.0, stop_loss=0.05)
    assert result.units[2, 1] == 5.0
    assert result.units[3, 1] == 0.0
    assert result.cash[3] == pytest.approx(450.0)


def test_without_stops_nothing_changes_and_far_ones_never_trigger():
    bars, weights = random_walk(300, seed=0), np.random.default_rng(0).uniform(-1, 1, 300)
    plain = simulate(bars, weights, fee=0.001)
    far = simulate(bars, weights, fee=0.001, stop_loss=0.99, take_profit=99.0)
    np.testing.assert_array_equal(plain.equity, far.equity)


def test_only_whole_lots_are_traded_and_sold_out_without_a_rest():
    bars = random_walk(200, seed=1, start=37.0)
    weights = np.random.default_rng(1).choice([0.0, 0.3, 1.0, -0.5], 200)
    result = simulate(bars, weights, fee=0.001, cash=10_000.0, lot=10.0)
    np.testing.assert_allclose(result.units / 10.0, np.rint(result.units / 10.0), atol=1e-9)
    assert (result.units[1:][weights[:-1] == 0.0] == 0.0).all()
    assert (result.cash >= 0.0).all() or (weights < 0).any()
    free = simulate(bars, weights, fee=0.001, cash=10_000.0)
    assert np.abs(free.weights - result.weights)[1:].max() < 10.0 * 60.0 / 5_000.0


def test_trades_below_the_minimum_wait_but_a_position_can_be_closed():
    bars = bars_of(*[FLAT] * 6)
    weights = [0.5, 0.52, 0.56, 0.02, 0.0, HOLD]
    result = simulate(bars, weights, fee=0.0, cash=1000.0, min_trade=50.0)
    np.testing.assert_allclose(result.units[1:], [5.0, 5.0, 5.6, 0.2, 0.0])


def test_an_asset_has_its_own_fee_limits_lots_and_borrow_rate():
    bars = align_bars({"a": bars_of(*[FLAT] * 3), "b": bars_of(*[FLAT] * 3)})
    weights = np.tile([0.6, -0.6], (3, 1))
    assets = {"b": {"fee": 0.02, "min_weight": -0.25, "lot": 2.0, "borrow_rate": 0.1}}
    result = simulate(bars, weights, fee=0.001, cash=1000.0, sizing="pre_cost", assets=assets)
    np.testing.assert_allclose(result.units[1], [6.0, -2.0])
    assert result.fees[1] == pytest.approx(0.001 * 600.0 + 0.02 * 200.0)
    assert result.carry[2] == pytest.approx(0.1 * 200.0 / 365.25)
    bound = simulate(bars, weights, fee=0.001, cash=1000.0, assets={"a": {"max_weight": 0.1}, "b": {"min_weight": 0.0}})
    np.testing.assert_allclose(bound.weights[1], [0.1, 0.0], rtol=1e-9)


def test_the_environment_trades_under_the_same_rules():
    bars = random_walk(400, seed=3)
    rules = {"fee": 0.001, "stop_loss": 0.01, "take_profit": 0.02, "lot": 1.0, "min_trade": 10.0, "cash": 100_000.0}
    env = TradingEnv(bars, random_start=False, **rules)
    env.reset(seed=0)
    first = int(env.batch.starts[0])
    actions = np.random.default_rng(0).uniform(-1, 1, len(bars))
    equity = [env.step(np.array([actions[t]], np.float32))[4]["equity"] for t in range(first, len(bars) - 1)]
    weights = np.full(len(bars), HOLD)
    weights[first:] = actions.astype(np.float32)[first:]
    expected = simulate(bars, weights, **rules, bankruptcy=0.05)
    np.testing.assert_allclose(equity, expected.equity[first + 1 :], rtol=1e-12)


def test_rules_of_assets_that_are_not_there_are_refused():
    bars = align_bars({"a": bars_of(*[FLAT] * 3), "b": bars_of(*[FLAT] * 3)})
    with pytest.raises(ValueError, match=r"trading\.assets is 'c', but it must be one of a, b"):
        simulate(bars, np.zeros((3, 2)), fee=0.0, assets={"c": {"fee": 0.1}})
    with pytest.raises(ValueError, match="the bars are of one symbol without a name"):
        simulate(bars["a"], np.zeros(3), fee=0.0, assets={"a": {"fee": 0.1}})
    with pytest.raises(ValueError, match=r"min_weight is 0\.5, but it must be at most max_weight"):
        TradingRules(assets={"a": {"min_weight": 0.5, "max_weight": 0.1}})


def test_costs_are_multiplied_for_every_asset():
    rules = TradingRules(fee=0.001, assets={"a": {"fee": 0.002, "lot": 1.0}}).at_costs(3.0)
    assert (rules.fee, rules.assets["a"].fee, rules.assets["a"].lot) == (0.003, 0.006, 1.0)
