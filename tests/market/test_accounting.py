"""The accounting of `simulate`: identities, closed forms, and what it must refuse.

h are units, C cash, p the fill price, P the close, V = C + sum(h P) equity, k the cost of a trade per unit of notional.
"""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tailguard.market import TradingRules, align_bars, random_walk, simulate

FILLS = ["next_open", "close", "next_close"]
SIZINGS = ["cost_aware", "pre_cost"]
NAN = np.nan
quick = settings(max_examples=40, deadline=None, derandomize=True)


# Tables


def table(opens, closes=None, *, highs=None, lows=None, volume=1e6, times=None, **more):
    """Bars from their opens; by default they close where they open and span no more than that."""
    opens = np.asarray(opens, dtype=float)
    closes = opens if closes is None else np.asarray(closes, dtype=float)
    index = pd.date_range("2024-01-01", periods=len(opens), freq="1D") if times is None else pd.DatetimeIndex(times)
    columns = {
        "open": opens,
        "high": np.maximum(opens, closes) if highs is None else np.asarray(highs, dtype=float),
        "low": np.minimum(opens, closes) if lows is None else np.asarray(lows, dtype=float),
        "close": closes,
        "volume": np.broadcast_to(np.asarray(volume, dtype=float), opens.shape),
    }
    return pd.DataFrame({**columns, **more}, index=index.rename("time"))


def field(bars, name):
    """One column of every symbol, as [T, A]; 0 where a bar is missing."""
    columns = bars.xs(name, axis=1, level=1) if bars.columns.nlevels > 1 else bars[[name]]
    return columns.fillna(0.0).to_numpy()


def fill_prices(bars, fill):
    return field(bars, "open" if fill == "next_open" else "close")


def previous(rows, first=0.0):
    return np.concatenate([np.full_like(rows[:1], first), rows[:-1]])


# Random markets, targets and rules


@st.composite
def markets(draw, min_bars=2, max_assets=3, volatility=(0.001, 0.02, 0.1)):
    """One to three random walks at prices from 1e-9 to 1e9."""
    n_bars = draw(st.integers(min_bars, 30))
    tables = {}
    for symbol in "abc"[: draw(st.integers(1, max_assets))]:
        tables[symbol] = random_walk(
            n_bars,
            volatility=draw(st.sampled_from(volatility)),
            start=10.0 ** draw(st.floats(-9.0, 9.0)),
            seed=draw(st.integers(0, 2**32)),
        )
    return align_bars(tables)


def random_targets(bars, seed, *, gross=1.0, long_only=False, row_holds=0.0, cell_holds=0.0):
    """Weights whose absolute values add up to at most `gross`, often to exactly that or to 0."""
    rng = np.random.default_rng(seed)
    shape = (len(bars), len(bars.columns.unique(0)))
    weights = rng.uniform(0.0 if long_only else -1.0, 1.0, shape)
    weights *= gross * rng.choice([0.0, 0.5, 1.0, 1.0], (shape[0], 1)) / np.abs(weights).sum(axis=1, keepdims=True)
    weights[rng.random(shape[0]) < row_holds] = NAN
    weights[rng.random(shape) < cell_holds] = NAN
    return weights


seeds = st.integers(0, 2**32)
fees = st.sampled_from([0.0, 0.0005, 0.001, 0.05])
costs = st.fixed_dictionaries(
    {"fee": fees, "half_spread": st.sampled_from([0.0, 0.0003]), "slippage": st.sampled_from([0.0, 0.0008, 0.01])}
)
execution = st.fixed_dictionaries({"fill": st.sampled_from(FILLS), "sizing": st.sampled_from(SIZINGS)})
amounts = st.floats(-9.0, 9.0).map(lambda exponent: 10.0**exponent)


# The reference


def cash_after_trades(bars, result, fill, *, fee, half_spread, slippage):
    """I1: what each bar's change of units must leave of the cash of the bar before, trade by trade."""
    prices, units, expected = fill_prices(bars, fill), result.units, result.cash.copy()
    for t in range(1, len(bars)):
        expected[t] = result.cash[t - 1]
        for price, before, after in zip(prices[t], units[t - 1], units[t], strict=True):
            bought = after - before
            paid = bought * price * (1.0 + np.sign(bought) * (half_spread + slippage))
            expected[t] -= paid + fee * abs(paid)
    return expected


def turned_over(bars, result, fill):
    """Everything that the rounding of a bar can be a share of: equity, what is held and what is traded."""
    prices = fill_prices(bars, fill)
    traded = np.abs(result.units - previous(result.units)) * prices
    return np.abs(result.equity) + (np.abs(previous(result.units)) * prices + traded).sum(axis=1) + np.abs(result.cash)


def alive(result):
    """The bars before an account is liquidated."""
    return slice(0, result.ruined_at)


# Identities I1 to I10


@pytest.mark.parametrize("leverage", [1.0, 5.0])
@quick
@given(bars=markets(), seed=seeds, costs=costs, execution=execution, cash=amounts)
def test_every_trade_is_paid_from_the_cash(leverage, bars, seed, costs, execution, cash):
    weights = random_targets(bars, seed, gross=leverage, cell_holds=0.2)
    result = simulate(bars, weights, cash=cash, **costs, **execution)
    error = np.abs(result.cash - cash_after_trades(bars, result, execution["fill"], **costs))
    assert (error <= 1e-12 * turned_over(bars, result, execution["fill"]))[alive(result)].all()
    value = result.cash + (result.units * field(bars, "close")).sum(axis=1)
    np.testing.assert_allclose(result.equity, value, rtol=1e-12)


@pytest.mark.parametrize("leverage", [1.0, 3.0])
@quick
@given(bars=markets(), seed=seeds, costs=costs, sizing=st.sampled_from(SIZINGS), rates=st.tuples(*[st.floats(0, 0.3)] * 3))
def test_the_change_of_equity_is_gains_minus_fees_slippage_and_carry(leverage, bars, seed, costs, sizing, rates):
    opens, closes = field(bars, "open"), field(bars, "close")
    weights = random_targets(bars, seed, gross=leverage, row_holds=0.3)
    carry = dict(zip(["borrow_rate", "cash_rate", "loan_rate"], rates, strict=True))
    result = simulate(bars, weights, sizing=sizing, **carry, **costs)
    held, last = previous(result.units), previous(closes)
    gains = (held * (opens - last) + result.units * (closes - opens)).sum(axis=1)
    expected = previous(result.equity, first=1.0) + gains - result.fees - result.slippage - result.carry
    error = np.abs(result.equity - expected)
    assert (error <= 1e-12 * turned_over(bars, result, "next_open"))[alive(result)].all()
    np.testing.assert_array_equal(result.costs, result.fees + result.slippage)


@quick
@given(bars=markets(max_assets=1), seed=seeds, fee=fees)
def test_close_fills_follow_the_return_form(bars, seed, fee):
    weights = 0.8 * random_targets(bars, seed)  # leaves cash for the fees: a full investment would be cut to the cash
    result = simulate(bars, weights, fee=fee, fill="close", sizing="pre_cost")
    returns = np.diff(field(bars, "close")[:, 0]) / field(bars, "close")[:-1, 0]
    held = result.weights[:-1, 0]
    drifted = held * (1.0 + returns) / (1.0 + held * returns)
    charge = 1.0 - fee * np.abs(weights[1:, 0] - drifted)
    np.testing.assert_allclose(result.equity[1:], result.equity[:-1] * (1.0 + held * returns) * charge, rtol=1e-10)
    np.testing.assert_allclose(result.weights[1:, 0], weights[1:, 0] / charge, rtol=1e-10, atol=1e-12)


@quick
@given(bars=markets(max_assets=1), seed=seeds, costs=costs)
def test_cost_aware_trades_have_the_closed_form(bars, seed, costs):
    weights = random_targets(bars, seed)
    result = simulate(bars, weights, fill="close", **costs)
    prices = field(bars, "close")[:, 0]
    held = previous(result.units[:, 0]) * prices
    equity = previous(result.cash, first=1.0) + held
    spread = costs["half_spread"] + costs["slippage"]
    gap = weights[:, 0] * equity - held
    side = np.sign(gap)
    cost = spread + costs["fee"] * (1.0 + side * spread)
    trade = gap / (1.0 + side * weights[:, 0] * cost)
    np.testing.assert_allclose(result.units[:, 0] * prices - held, trade, rtol=1e-9, atol=1e-12 * equity.max())


@quick
@given(bars=markets(), seed=seeds, price=amounts, execution=execution)
def test_without_costs_no_trading_on_a_flat_price_changes_equity(bars, seed, price, execution):
    flat = bars * 0.0 + price
    result = simulate(flat, random_targets(bars, seed, gross=5.0, cell_holds=0.2), fee=0.0, **execution)
    np.testing.assert_allclose(result.equity, 1.0, rtol=1e-12)


@quick
@given(price=amounts, weight=st.floats(-0.9, 0.9), costs=costs, fill=st.sampled_from(FILLS))
def test_a_round_trip_at_a_constant_price_costs_both_sides(price, weight, costs, fill):
    result = simulate(table(np.full(6, price)), [weight, NAN, 0.0, NAN, NAN, NAN], fill=fill, sizing="pre_cost", **costs)
    fee, spread = costs["fee"], costs["half_spread"] + costs["slippage"]
    one_way = spread + fee
    assert 1.0 - result.equity[-1] == pytest.approx(2.0 * abs(weight) * one_way, abs=1e-14)  # the fee * spread terms cancel
    assert result.units[-1] == 0.0
    assert result.costs.sum() == pytest.approx(1.0 - result.equity[-1], abs=1e-14)


@quick
@given(bars=markets(max_assets=1), seed=seeds, costs=costs, sizing=st.sampled_from(SIZINGS))
def test_returns_computed_from_the_books_compound_to_the_final_equity(bars, seed, costs, sizing):
    opens, closes = field(bars, "open")[:, 0], field(bars, "close")[:, 0]
    result = simulate(bars, random_targets(bars, seed), sizing=sizing, **costs)
    assume(result.ruined_at is None)
    units, held = result.units[:, 0], previous(result.units[:, 0])
    gains = held * (opens - previous(closes)) + units * (closes - opens) - result.costs
    rewards = np.log1p(gains / previous(result.equity, first=1.0))
    assert np.exp(rewards.sum()) == pytest.approx(result.equity[-1], rel=1e-10)


@quick
@given(bars=markets(), rate=st.floats(-0.5, 0.5), execution=execution, costs=costs)
def test_an_account_that_never_invests_is_a_cash_account(bars, rate, execution, costs):
    result = simulate(bars, np.zeros((len(bars), len(bars.columns.unique(0)))), cash_rate=rate, **costs, **execution)
    day = rate / 365.25
    np.testing.assert_allclose(result.equity, (1.0 + day) ** np.arange(len(bars)), rtol=1e-12)
    assert (result.turnover == 0.0).all()


@quick
@given(bars=markets(max_assets=1), costs=costs, execution=execution, cash=amounts)
def test_full_investment_from_the_start_is_buy_and_hold_minus_one_entry(bars, costs, execution, cash):
    result = simulate(bars, np.ones((len(bars), 1)), cash=cash, **costs, **execution)
    first = 0 if execution["fill"] == "close" else 1
    spread = costs["half_spread"] + costs["slippage"]
    entry = fill_prices(bars, execution["fill"])[first, 0] * (1.0 + spread) * (1.0 + costs["fee"])
    np.testing.assert_allclose(result.equity[first:], cash / entry * field(bars, "close")[first:, 0], rtol=1e-11)
    assert result.turnover[first + 1 :].sum() < 1e-12


@quick
@given(bars=markets(), seed=seeds, costs=costs, execution=execution, bankruptcy=st.sampled_from([0.0, 0.3]))
def test_doubling_the_cash_doubles_everything(bars, seed, costs, execution, bankruptcy):
    weights = random_targets(bars, seed, gross=3.0, cell_holds=0.2)
    one, two = (simulate(bars, weights, cash=cash, bankruptcy=bankruptcy, **costs, **execution) for cash in (0.7, 1.4))
    for name in ("equity", "cash", "units", "costs"):
        np.testing.assert_allclose(getattr(two, name), 2.0 * getattr(one, name), rtol=1e-12)
    np.testing.assert_allclose(two.turnover, one.turnover, rtol=1e-12)
    assert one.ruined_at == two.ruined_at


@quick
@given(bars=markets(), seed=seeds, costs=costs, execution=execution, long_only=st.booleans())
def test_the_order_of_the_assets_does_not_matter(bars, seed, costs, execution, long_only):
    weights = random_targets(bars, seed, cell_holds=0.2, long_only=long_only)
    symbols = list(bars.columns.unique(0))
    straight = simulate(bars, weights, **costs, **execution)
    turned = simulate(bars[symbols[::-1]], weights[:, ::-1], **costs, **execution)
    np.testing.assert_allclose(turned.equity, straight.equity, rtol=1e-9)
    value = np.abs(turned.units[:, ::-1] - straight.units) * field(bars, "close")
    assert (value <= 1e-9 * straight.equity[:, None]).all()


# Sizing


@pytest.mark.parametrize("leverage", [1.0, 5.0])
@pytest.mark.parametrize("fill", FILLS)
@quick
@given(bars=markets(volatility=(0.001, 0.01)), seed=seeds, costs=costs, long_only=st.booleans(), cash=amounts)
def test_cost_aware_weights_hold_after_costs(leverage, fill, bars, seed, costs, long_only, cash):
    weights = random_targets(bars, seed, gross=leverage, long_only=long_only)
    result = simulate(bars, weights, fill=fill, cash=cash, **costs)
    assume(result.ruined_at is None)
    value = result.units * fill_prices(bars, fill)
    reached = value / (result.cash + value.sum(axis=1))[:, None]
    asked = weights if fill == "close" else previous(weights)
    np.testing.assert_allclose(reached, asked, rtol=0.0, atol=1e-12)


@quick
@given(bars=markets(volatility=(0.01,)), seed=seeds, costs=costs, cash=amounts)
def test_cost_aware_weights_hold_beside_positions_that_are_held(bars, seed, costs, cash):
    weights = 0.2 * random_targets(bars, seed, cell_holds=0.5)
    result = simulate(bars, weights, fill="close", cash=cash, **costs)
    asked = ~np.isnan(weights)
    np.testing.assert_allclose(result.weights[asked], weights[asked], rtol=0.0, atol=1e-12)
    np.testing.assert_array_equal(result.units[~asked], previous(result.units)[~asked])


@quick
@given(bars=markets(volatility=(0.01,)), seed=seeds, costs=costs, cash=amounts)
def test_pre_cost_targets_are_shares_of_equity_before_the_trade(bars, seed, costs, cash):
    weights = 0.5 * random_targets(bars, seed)
    result = simulate(bars, weights, fill="close", sizing="pre_cost", cash=cash, **costs)
    prices = field(bars, "close")
    before = previous(result.cash, first=cash) + (previous(result.units) * prices).sum(axis=1)
    error = result.units * prices - weights * before[:, None]
    assert (np.abs(error) <= 1e-12 * before[:, None]).all()


@quick
@given(bars=markets(), seed=seeds, fill=st.sampled_from(FILLS))
def test_without_costs_both_sizings_are_one(bars, seed, fill):
    weights = random_targets(bars, seed, gross=2.0, cell_holds=0.2)
    aware, before = (simulate(bars, weights, fee=0.0, fill=fill, sizing=sizing) for sizing in SIZINGS)
    np.testing.assert_allclose(aware.equity, before.equity, rtol=1e-10)


@pytest.mark.parametrize("sizing", SIZINGS)
@pytest.mark.parametrize("fill", FILLS)
@quick
@given(
    bars=markets(volatility=(0.02, 0.5)),
    seed=seeds,
    costs=costs,
    cash=amounts,
    impact=st.sampled_from([0.0, 1.0, 10.0]),
    participation=st.sampled_from([None, 0.1]),
    volume=st.sampled_from([1.0, 1e6]),
)
def test_long_only_accounts_never_borrow_and_never_go_short(
    sizing, fill, bars, seed, costs, cash, impact, participation, volume
):
    for symbol in bars.columns.unique(0):
        bars[(symbol, "volume")] *= volume / 1e6
    result = simulate(
        bars, random_targets(bars, seed, long_only=True), fill=fill, sizing=sizing, cash=cash,
        impact=impact, participation=participation, **costs,
    )  # fmt: skip
    assert (result.cash >= 0.0).all()
    assert (result.units >= 0.0).all()
    assert result.ruined_at is None


def test_long_only_accounts_do_not_borrow_beside_a_position_that_is_held():
    bars = align_bars({"a": table([1, 1, 4, 4]), "b": table([1, 1, 1, 1])})
    result = simulate(bars, [[0.5, 0.0], [NAN, 0.6], [NAN, NAN], [NAN, NAN]], fee=0.0)
    assert (result.cash >= 0.0).all()


def test_long_only_accounts_do_not_borrow_beside_a_bar_that_is_missing():
    bars = align_bars({"a": table([1, 1, 4, 4], closes=[1, 4, 4, 4]), "b": table([1, 1, 1, 1])})
    bars.loc[bars.index[2], "a"] = NAN
    result = simulate(bars, [[0.5, 0.0], [0.5, 0.5], [NAN, NAN], [NAN, NAN]], fee=0.0)
    assert (result.cash >= 0.0).all()


def test_long_only_accounts_do_not_borrow_because_of_the_band():
    bars = align_bars({"a": table([1, 1, 1.2, 1.2]), "b": table([1, 1, 1, 1])})
    result = simulate(bars, [[0.5, 0.0], [0.5, 0.5], [NAN, NAN], [NAN, NAN]], fee=0.0, band=0.1)
    assert (result.cash >= 0.0).all()


# Loans


@pytest.mark.parametrize("fill", FILLS)
def test_paying_a_loan_back_costs_its_fee(fill):
    result = simulate(table(np.ones(5)), [2.0, NAN, 1.0, NAN, NAN], fee=0.01, fill=fill, sizing="pre_cost")
    assert result.equity[-1] == pytest.approx(1.0 - result.fees.sum(), rel=1e-12)
    assert result.fees.sum() == pytest.approx(0.01 * 2.0 + 0.01 * (2.0 - 0.98), rel=1e-12)


def test_a_loan_that_cannot_be_paid_back_for_lack_of_volume_stays():
    bars = table(np.ones(5), volume=[1e6, 1e6, 0.1, 0.1, 0.1])
    result = simulate(bars, [2.0, 0.5, 0.5, NAN, NAN], fee=0.0, participation=1.0)
    np.testing.assert_allclose(result.equity, 1.0, rtol=1e-12)
    np.testing.assert_allclose(result.cash, [1.0, -1.0, -0.9, -0.8, -0.8], rtol=1e-12)


def test_funding_that_has_made_cash_negative_is_still_owed_after_a_trade():
    bars = table(np.ones(5), volume=[1e6, 1e6, 0.0, 0.0, 0.0], funding=[0.0, 0.0, 0.01, 0.01, 0.01])
    result = simulate(bars, np.ones(5), fee=0.0, participation=1.0)
    np.testing.assert_allclose(result.equity, [1.0, 1.0, 0.99, 0.98, 0.97], rtol=1e-12)


# Turnover


@quick
@given(bars=markets(), seed=seeds, costs=costs, execution=execution)
def test_on_a_flat_price_an_account_loses_exactly_its_costs(bars, seed, costs, execution):
    result = simulate(bars * 0.0 + 7.0, random_targets(bars, seed), **costs, **execution)
    np.testing.assert_allclose(result.equity, 1.0 - np.cumsum(result.costs), rtol=1e-11)


@pytest.mark.parametrize("leverage", [1.0, 5.0])
def test_flipping_every_bar_on_a_flat_price_has_a_closed_form(leverage):
    fee, spread, flips = 0.001, 0.002, 50
    result = simulate(
        table(np.full(flips + 1, 3.0)), leverage * (-1.0) ** np.arange(flips + 1), fee=fee, slippage=spread, fill="close",
    )  # fmt: skip
    buy, sell = spread + fee * (1.0 + spread), spread + fee * (1.0 - spread)
    expected = [1.0 / (1.0 + leverage * buy)]
    for flip in range(flips):  # V' + k L (V + V') = V
        cost = leverage * (sell if flip % 2 == 0 else buy)
        expected.append(expected[-1] * (1.0 - cost) / (1.0 + cost))
    np.testing.assert_allclose(result.equity, expected, rtol=1e-11)


@quick
@given(bars=markets(min_bars=3), weight=st.floats(-0.3, 0.3), costs=costs, execution=execution)
def test_holding_trades_nothing(bars, weight, costs, execution):
    weights = np.full((len(bars), len(bars.columns.unique(0))), NAN)
    weights[0] = weight
    result = simulate(bars, weights, **costs, **execution)
    first = 0 if execution["fill"] == "close" else 1
    assert (result.turnover[first + 1 :] == 0.0).all()
    assert (result.costs[first + 1 :] == 0.0).all()
    assert (result.units[first:] == result.units[first]).all()


@quick
@given(bars=markets(), seed=seeds, costs=costs, sizing=st.sampled_from(SIZINGS))
def test_turnover_is_the_traded_share_of_equity_before_the_trade(bars, seed, costs, sizing):
    result = simulate(bars, random_targets(bars, seed), fill="close", sizing=sizing, **costs)
    traded = (np.abs(result.units - previous(result.units)) * field(bars, "close")).sum(axis=1)
    np.testing.assert_allclose(result.turnover, traded / (result.equity + result.costs), rtol=1e-9, atol=1e-12)


def test_inside_the_band_nothing_is_traded_and_outside_of_it_all_is():
    bars = table(np.ones(6))
    result = simulate(bars, [0.5, 0.55, 0.59, 0.61, 0.52, 0.0], fee=0.0, fill="close", band=0.1)
    np.testing.assert_allclose(result.weights, [0.5, 0.5, 0.5, 0.61, 0.61, 0.0], rtol=1e-12)


def test_the_band_is_measured_from_the_weight_that_has_drifted():
    bars = table([1.0, 1.0, 3.0, 3.0])
    result = simulate(bars, [0.5, 0.5, 0.7, 0.7], fee=0.0, fill="close", band=0.2)
    np.testing.assert_allclose(result.weights, [0.5, 0.5, 0.75, 0.75], rtol=1e-12)


# Carry

WEEKEND = ["2024-01-04", "2024-01-05", "2024-01-08", "2024-01-09"]  # Thursday to Tuesday
YEARS = np.array([1.0, 3.0, 1.0]) / 365.25


def test_interest_compounds_over_the_time_that_has_passed():
    result = simulate(table(np.ones(4), times=WEEKEND), np.zeros(4), fee=0.0, cash_rate=0.1)
    np.testing.assert_allclose(result.equity, np.cumprod([1.0, *(1.0 + 0.1 * YEARS)]), rtol=1e-14)
    np.testing.assert_allclose(result.carry, -np.diff(result.equity, prepend=1.0), atol=1e-15)


def test_shorts_pay_borrow_on_their_value_at_the_bar_before():
    closes = np.array([1.0, 1.1, 1.3, 1.2])
    result = simulate(table(closes, times=WEEKEND), [-0.5, NAN, NAN, NAN], fee=0.0, fill="close", borrow_rate=0.2)
    paid = 0.2 * 0.5 * closes[:-1] * YEARS
    np.testing.assert_allclose(result.carry, [0.0, *paid], rtol=1e-14)
    np.testing.assert_allclose(result.equity, 1.0 + 0.5 - 0.5 * closes - np.cumsum([0.0, *paid]), rtol=1e-14)


def test_longs_pay_no_borrow_and_the_proceeds_of_a_short_earn_interest():
    bars = align_bars({"a": table(np.ones(4), times=WEEKEND), "b": table(np.ones(4), times=WEEKEND)})
    weights = np.full((4, 2), NAN)
    weights[0] = [0.5, -0.5]
    result = simulate(bars, weights, fee=0.0, fill="close", borrow_rate=0.2, cash_rate=0.1)
    cash = [1.0]
    for years in YEARS:
        cash.append(cash[-1] * (1.0 + 0.1 * years) - 0.2 * 0.5 * years)
    np.testing.assert_allclose(result.cash, cash, rtol=1e-14)


def test_loans_compound_at_the_loan_rate():
    result = simulate(
        table(np.ones(4), times=WEEKEND),
        [2.0, NAN, NAN, NAN],
        fee=0.0,
        fill="close",
        loan_rate=0.3,
        cash_rate=0.1,
    )
    np.testing.assert_allclose(result.cash, -np.cumprod([1.0, *(1.0 + 0.3 * YEARS)]), rtol=1e-14)


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_longs_pay_and_shorts_earn_funding_at_the_bars_that_have_it(side):
    closes, funding = np.array([1.0, 1.5, 2.0, 1.0]), np.array([0.5, 0.0, 0.01, -0.02])
    result = simulate(table(closes, funding=funding), [0.5 * side, NAN, NAN, NAN], fee=0.0, fill="close")
    np.testing.assert_allclose(result.carry, 0.5 * side * np.array([0.0, 0.0, 0.01 * 1.5, -0.02 * 2.0]), rtol=1e-14)


def test_carry_is_paid_before_the_trade_of_the_bar():
    result = simulate(table(np.ones(3), times=WEEKEND[:3]), [-1.0, 0.0, 0.0], fee=0.0, borrow_rate=0.2)
    np.testing.assert_allclose(result.carry, [0.0, 0.0, 0.2 * YEARS[1]], rtol=1e-14)
    assert result.units[-1] == 0.0


# Volume: the participation cap and the impact


def test_what_the_volume_cannot_fill_is_filled_later_only_if_asked_again():
    bars = table(np.ones(7), volume=[1.0, 1.0, 0.0, 2.0, 1.0, 1.0, 1.0])
    result = simulate(bars, [1.0, 1.0, NAN, 1.0, NAN, -1.0, NAN], fee=0.0, participation=0.25)
    np.testing.assert_allclose(result.units, [0.0, 0.25, 0.25, 0.25, 0.5, 0.5, 0.25], rtol=1e-14)
    np.testing.assert_allclose(result.equity, 1.0, rtol=1e-14)


@quick
@given(bars=markets(), seed=seeds, costs=costs, execution=execution, cash=st.floats(1e3, 1e12), share=st.floats(0.01, 1.0))
def test_no_trade_takes_more_than_its_share_of_the_volume(bars, seed, costs, execution, cash, share):
    result = simulate(bars, random_targets(bars, seed), cash=cash, participation=share, **costs, **execution)
    traded = np.abs(result.units - previous(result.units))
    assert (traded <= share * field(bars, "volume") * (1.0 + 1e-12))[alive(result)].all()


def impact_by_hand(bars, t, units, coefficient, window):
    """Y sigma sqrt(Q / V), sigma and V from the bars before t."""
    closes = bars["close"].to_numpy()[max(0, t - window - 1) : t]
    volume = bars["volume"].to_numpy()[max(0, t - window) : t].mean()
    return coefficient * np.diff(np.log(closes)).std(ddof=1) * np.sqrt(units / volume)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("window", [2, 5, 50])
@pytest.mark.parametrize("weight", [0.8, -0.8])
def test_impact_is_the_square_root_law(fill, window, weight):
    bars = random_walk(30, seed=3)
    weights = np.full(30, NAN)
    weights[12] = weight
    result = simulate(
        bars, weights, fee=0.002, slippage=0.001, fill=fill, sizing="pre_cost", cash=1e7, impact=1.3, impact_window=window
    )
    t = 12 if fill == "close" else 13
    price = bars["open" if fill == "next_open" else "close"].iloc[t]
    units = abs(result.units[t])
    adverse = 0.001 + impact_by_hand(bars, t, units, 1.3, window)
    assert units * price == pytest.approx(0.8e7, rel=1e-12)
    assert result.slippage[t] == pytest.approx(units * price * adverse, rel=1e-9)
    assert result.fees[t] == pytest.approx(0.002 * units * price * (1.0 + np.sign(weight) * adverse), rel=1e-9)


def test_impact_costs_grow_faster_than_the_trade():
    bars, weights = random_walk(30, seed=3), np.full(30, NAN)
    weights[12], weights[20] = 0.5, 0.0
    small, large = (
        simulate(bars, weights, fee=0.0, sizing="pre_cost", cash=cash, impact=1.0).slippage.sum() for cash in (1e6, 4e6)
    )
    assert large == pytest.approx(small * 4.0**1.5, rel=1e-12)


@quick
@given(bars=markets(min_bars=5, volatility=(0.01,)), seed=seeds, costs=costs, impact=st.floats(0.1, 3.0))
def test_cost_aware_weights_hold_after_impact(bars, seed, costs, impact):
    weights = random_targets(bars, seed)
    cash = 1e5 * field(bars, "close").min()
    result = simulate(bars, weights, fill="close", impact=impact, cash=cash, **costs)
    np.testing.assert_allclose(result.weights, weights, rtol=0.0, atol=1e-12)


def test_cost_aware_weights_hold_however_strong_the_impact_is():
    bars = table([1.0, 1.1, 1.0, 1.1, 1.0, 1.0, 1.0], volume=0.1)
    result = simulate(bars, [NAN, NAN, NAN, NAN, 1.0, 0.5, NAN], fee=0.0, fill="close", impact=1.0, cash=100.0)
    assert result.weights[4] == pytest.approx(1.0, abs=1e-9)
    assert result.weights[5] == pytest.approx(0.5, abs=1e-9)


def test_a_long_only_account_is_neither_short_nor_ruined_however_strong_the_impact_is():
    walk = [1.0, 1.5, 1.0, 1.5, 1.0, 1.0, 1.0]
    bars = align_bars({"a": table(walk, volume=0.02), "b": table(walk, volume=6.0)})
    weights = np.full((7, 2), NAN)
    weights[3:6] = [[0.5, 0.1], [0.9, 0.1], [0.75, 0.25]]
    result = simulate(bars, weights, fee=0.0, fill="close", impact=1.0)
    assert (result.units >= 0.0).all()
    assert result.ruined_at is None


@pytest.mark.parametrize("volume", [0.0, NAN])
def test_impact_without_volumes_is_refused(volume):
    with pytest.raises(ValueError, match="impact needs volumes"):
        simulate(table(np.ones(5), volume=volume), np.ones(5), fee=0.0, impact=1.0)


def test_impact_names_the_symbol_that_has_no_volumes():
    bars = align_bars({"liquid": table(np.ones(5)), "silent": table(np.ones(5), volume=0.0)})
    with pytest.raises(ValueError, match="impact needs volumes and silent has none"):
        simulate(bars, np.full((5, 2), 0.5), fee=0.0, impact=1.0)


def test_impact_works_for_a_symbol_that_is_listed_later():
    walk = random_walk(20, seed=1)
    bars = align_bars({"old": walk, "new": random_walk(20, seed=2).iloc[8:]})
    result = simulate(bars, np.full((20, 2), 0.4), fee=0.0, impact=1.0, cash=1e6)
    assert (result.units[:8, 1] == 0.0).all()
    assert (result.units[8:, 1] > 0.0).all()
    assert result.slippage[12:].sum() > 0.0


# Ruin


def test_a_gap_through_the_ruin_level_is_filled_at_the_open():
    bars = table([1.0, 1.0, 0.6, 0.6], closes=[1.0, 1.0, 0.9, 0.9], lows=[1.0, 1.0, 0.5, 0.6])
    result = simulate(bars, np.full(4, 2.0), fee=0.001, bankruptcy=0.25)
    units = 2.0 / 1.002  # bought at 1 with k = 0.001: V' = 1 / (1 + 2 k)
    cash = 1.0 - units * 1.001
    assert result.ruined_at == 2
    assert result.equity[2] == pytest.approx(cash + units * 0.6 * 0.999, rel=1e-12)


@pytest.mark.parametrize(("weight", "extreme"), [(2.0, "low"), (-2.0, "high")])
def test_inside_a_bar_the_account_is_sold_out_where_equity_meets_the_ruin_level(weight, extreme):
    fee, level = 0.001, 0.25
    prices = {"low": [1.0, 1.0, 0.3, 1.0], "high": [1.0, 1.0, 1.9, 1.0]}
    bars = table(np.ones(4), lows=prices["low"], highs=prices["high"])
    result = simulate(bars, np.full(4, weight), fee=fee, bankruptcy=level)
    units = weight / (1.0 + 2.0 * fee)
    cash = 1.0 - units - fee * abs(units)
    trigger = (level - cash) / units
    assert bars["low"].iloc[2] < trigger < bars["high"].iloc[2]
    assert result.ruined_at == 2
    assert result.equity[2] == pytest.approx(level - fee * abs(units) * trigger, rel=1e-12)
    assert result.fees[2] == pytest.approx(fee * abs(units) * trigger, rel=1e-12)


@pytest.mark.parametrize(("weight", "extreme"), [(2.0, 0.3), (-2.0, 1.9)])
def test_inside_a_bar_the_account_is_sold_out_where_the_maintenance_margin_breaks(weight, extreme):
    fee, margin = 0.001, 0.3
    bars = table(np.ones(4), lows=np.minimum(1.0, [1, 1, extreme, 1]), highs=np.maximum(1.0, [1, 1, extreme, 1]))
    result = simulate(bars, np.full(4, weight), fee=fee, maintenance_margin=margin)
    units = weight / (1.0 + 2.0 * fee)
    cash = 1.0 - units - fee * abs(units)
    trigger = -cash / (units - margin * abs(units))  # C + h p = m |h| p
    assert result.ruined_at == 2
    assert result.equity[2] == pytest.approx((margin - fee) * abs(units) * trigger, rel=1e-12)


def test_a_gap_through_the_maintenance_margin_is_filled_at_the_open():
    bars = table([1.0, 1.0, 0.65, 1.0])
    result = simulate(bars, [2.0, NAN, NAN, NAN], fee=0.0, maintenance_margin=0.3)
    assert result.ruined_at == 2
    assert result.equity[2] == pytest.approx(2.0 * 0.65 - 1.0, rel=1e-12)


def test_the_bar_of_the_purchase_can_ruin_too():
    bars = table(np.ones(3), lows=[1.0, 0.4, 1.0])
    result = simulate(bars, np.full(3, 2.0), fee=0.0)
    assert result.ruined_at == 1


def test_the_fall_before_a_fill_at_the_close_does_not_touch_the_account():
    bars = table(np.ones(3), lows=[1.0, 0.4, 1.0])
    result = simulate(bars, np.full(3, 2.0), fee=0.0, fill="next_close")
    assert result.ruined_at is None


def test_after_ruin_nothing_trades_and_some_equity_is_left():
    bars = table([1.0, 1.0, 0.2, 5.0, 0.1, 9.0])
    result = simulate(bars, np.full(6, 2.0), fee=0.01, cash=300.0)
    assert result.ruined_at == 2
    assert (result.units[2:] == 0.0).all()
    assert (result.costs[3:] == 0.0).all()
    assert (result.turnover[3:] == 0.0).all()
    assert (result.equity[2:] == result.equity[2]).all()
    assert 0.0 < result.equity[2] < 0.01 * 300.0


@pytest.mark.parametrize(("sizing", "price"), [("cost_aware", 0.83), ("pre_cost", 0.9)])
@pytest.mark.parametrize("target", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("fill", FILLS)
def test_costs_that_take_the_rest_of_an_account_ruin_it(fill, target, sizing, price):
    # Bought five times its equity at k = 6 %; after the fall, trading costs more than is left.
    bars = table([1.0, 1.0, price, price, price])
    weights = [NAN, 5.0, target, NAN, NAN] if fill == "close" else [5.0, target, NAN, NAN, NAN]
    result = simulate(bars, weights, fee=0.06, fill=fill, sizing=sizing)
    assert (result.equity > 0.0).all()
    assert result.ruined_at is not None
    assert result.equity[-1] < 0.01


def test_an_account_that_costs_bring_to_the_ruin_level_is_ruined_even_without_positions():
    result = simulate(table([1.0, 1.0, 0.06, 0.06]), [1.0, 0.0, 0.0, 0.0], fee=0.05, bankruptcy=0.056)
    assert result.equity[2] < 0.056
    assert result.ruined_at == 2


def test_simulate_ruins_by_default_only_when_equity_is_gone():
    assert TradingRules().bankruptcy == 0.05
    fallen = simulate(table([1.0, 1.0, 1e-4, 1.0]), np.ones(4), fee=0.0)
    assert fallen.ruined_at is None
    assert fallen.equity[-1] == pytest.approx(1.0, rel=1e-12)
    assert simulate(table([1.0, 1.0, 0.5 + 1e-9, 1.0]), [2.0, NAN, NAN, NAN], fee=0.0).ruined_at is None
    assert simulate(table([1.0, 1.0, 0.5 - 1e-9, 1.0]), [2.0, NAN, NAN, NAN], fee=0.0).ruined_at == 2


# Missing bars


def with_a_missing_bar():
    """Symbol a trades all six days and falls, symbol b rises and misses days 2 and 3."""
    bars = align_bars({"a": table([4, 4, 4, 2, 2, 2]), "b": table([1, 1, 2, 3, 4, 5])})
    bars.loc[bars.index[2:4], "b"] = NAN
    return bars


def test_a_missing_bar_is_marked_at_the_last_price_and_does_not_trade():
    result = simulate(with_a_missing_bar(), [[0.5, 0.5], [0.5, 0.0], [NAN, NAN], [NAN, NAN], [NAN, NAN], [NAN, NAN]], fee=0.0)
    np.testing.assert_allclose(result.units[:, 1], [0.0, 0.5, 0.5, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(result.units[:, 0], [0.0, 0.125, 0.125, 0.125, 0.125, 0.125])
    np.testing.assert_allclose(result.equity, [1.0, 1.0, 1.0, 0.75, 0.25 + 0.5 * 4, 0.25 + 0.5 * 5])


def test_a_target_for_a_missing_bar_is_never_executed_and_a_later_one_is():
    weights = np.full((6, 2), NAN)
    weights[1] = [NAN, 0.5]  # would fill on day 2, which is missing
    weights[4] = [NAN, 0.25]
    result = simulate(with_a_missing_bar(), weights, fee=0.0)
    np.testing.assert_allclose(result.units[:, 1], [0.0, 0.0, 0.0, 0.0, 0.0, 0.05])


def test_the_other_assets_trade_while_one_bar_is_missing():
    weights = np.full((6, 2), NAN)
    weights[0], weights[1] = [0.0, 0.5], [0.25, 0.25]
    result = simulate(with_a_missing_bar(), weights, fee=0.0)
    np.testing.assert_allclose(result.units[2], [0.0625, 0.5])


def test_an_asset_that_is_not_listed_yet_does_not_trade():
    bars = align_bars({"a": table(np.ones(4)), "b": table(np.ones(4)).iloc[2:]})
    result = simulate(bars, np.full((4, 2), 0.5), fee=0.0, fill="close")
    np.testing.assert_allclose(result.units, [[0.5, 0.0], [0.5, 0.0], [0.5, 0.5], [0.5, 0.5]])


# Causality


@pytest.mark.parametrize("fill", FILLS)
@quick
@given(
    bars=markets(min_bars=4),
    seed=seeds,
    costs=costs,
    sizing=st.sampled_from(SIZINGS),
    impact=st.sampled_from([0.0, 1.0]),
    participation=st.sampled_from([None, 0.1]),
    factor=st.sampled_from([0.1, 10.0, NAN]),
    cut=st.integers(1, 3),
)
def test_the_future_does_not_change_the_past(fill, bars, seed, costs, sizing, impact, participation, factor, cut):
    weights = random_targets(bars, seed)
    rules = {"fill": fill, "sizing": sizing, "impact": impact, "participation": participation, "cash": 1e6, **costs}
    garbage, wild = bars.copy(), weights.copy()
    garbage.iloc[cut:] *= factor
    wild[cut:] *= -1.0
    one, other = simulate(bars, weights, **rules), simulate(garbage, wild, **rules)
    for name in ("equity", "cash", "units", "costs", "carry", "turnover"):
        np.testing.assert_array_equal(getattr(one, name)[:cut], getattr(other, name)[:cut])


@pytest.mark.parametrize("fill", FILLS)
def test_knowing_the_next_return_makes_rich_and_knowing_the_last_one_does_not(fill):
    bars = random_walk(2000, seed=5)
    closes = bars["close"].to_numpy()
    bases = {
        "next_open": bars["open"].to_numpy(),
        "close": previous(closes, closes[0]),
        "next_close": previous(closes, closes[0]),
    }
    known = np.sign(closes - bases[fill])  # of each bar's own move, from the first price at which it can be traded
    ahead = 2 if fill == "next_close" else 1
    oracle = np.concatenate([known[ahead:], np.zeros(ahead)])
    delayed = np.concatenate([np.zeros(1), oracle[:-1]])
    assert simulate(bars, oracle, fee=0.0, fill=fill).equity[-1] > 1e4
    assert 0.1 < simulate(bars, delayed, fee=0.0, fill=fill).equity[-1] < 10.0


# Attempts to break it


@quick
@given(
    bars=markets(min_bars=1, volatility=(0.0, 0.02, 0.5)),
    seed=seeds,
    costs=costs,
    execution=execution,
    cash=amounts,
    leverage=st.sampled_from([1.0, 5.0]),
    impact=st.sampled_from([0.0, 1.0]),
    participation=st.sampled_from([None, 0.1]),
    bankruptcy=st.sampled_from([0.0, 0.05]),
    silent=st.booleans(),
)
def test_equity_is_always_positive_and_money_comes_from_nowhere(
    bars, seed, costs, execution, cash, leverage, impact, participation, bankruptcy, silent
):
    if silent:
        for symbol in bars.columns.unique(0):
            bars.loc[bars.index[1::2], (symbol, "volume")] = 0.0
    weights = random_targets(bars, seed, gross=leverage, row_holds=0.2, cell_holds=0.1)
    result = simulate(
        bars, weights, cash=cash, impact=impact, participation=participation, bankruptcy=bankruptcy,
        **costs, **execution,
    )  # fmt: skip
    assert all(np.isfinite(values).all() for values in result[:-1])
    assert (result.equity > 0.0).all()
    assert (result.fees >= 0.0).all()
    assert (result.slippage >= 0.0).all()
    bought = (result.units - previous(result.units)) * fill_prices(bars, execution["fill"])
    expected = previous(result.cash, first=cash) - bought.sum(axis=1) - result.costs
    error = np.abs(result.cash - expected)
    assert (error <= 1e-12 * turned_over(bars, result, execution["fill"]))[alive(result)].all()


@pytest.mark.parametrize("price", [1e-9, 1e9])
@pytest.mark.parametrize("cash", [1e-9, 1e9])
@pytest.mark.parametrize("fee", [0.001, 0.05])
def test_alternating_with_leverage_five_ends_flat_without_a_speck(price, cash, fee):
    bars = random_walk(41, start=price, volatility=0.001, seed=7)
    weights = 5.0 * (-1.0) ** np.arange(41)
    weights[-1] = 0.0
    result = simulate(bars, weights, fee=fee, fill="close", cash=cash)
    np.testing.assert_allclose(result.weights, weights, atol=1e-10)
    assert result.units[-1] == 0.0
    assert result.cash[-1] == result.equity[-1] > 0.0


@pytest.mark.parametrize("fill", FILLS)
def test_one_bar_is_enough(fill):
    result = simulate(table([2.0]), [0.5], fee=0.0, fill=fill)
    assert result.equity.tolist() == [1.0]
    assert result.units.tolist() == ([0.25] if fill == "close" else [0.0])


def test_tiny_differences_between_huge_positions_survive():
    bars = align_bars({"a": table(np.full(4, 1e9)), "b": table(np.full(4, 1e-9))})
    weights = np.array([[2.5, -2.5], [2.5 + 1e-9, -2.5], [2.5, -2.5 - 1e-9], [0.0, 0.0]])
    result = simulate(bars, weights, fee=0.0, fill="close")
    np.testing.assert_allclose(result.weights, weights, atol=1e-14)
    np.testing.assert_allclose(result.equity, 1.0, rtol=1e-12)


# Shapes and bad input


def test_one_symbol_may_be_given_as_a_vector_or_as_a_column():
    bars, weights = random_walk(20, seed=1), np.linspace(-1.0, 1.0, 20)
    vector, column = simulate(bars, weights, fee=0.001), simulate(bars, weights[:, None], fee=0.001)
    assert vector.units.shape == vector.weights.shape == (20,)
    assert column.units.shape == column.weights.shape == (20, 1)
    np.testing.assert_array_equal(vector.units, column.units[:, 0])
    np.testing.assert_array_equal(vector.equity, column.equity)


def test_the_inputs_are_left_as_they_were():
    bars, weights = random_walk(20, seed=1), np.linspace(-1.0, 1.0, 20)
    simulate(bars, weights, fee=0.001, impact=1.0, participation=0.1)
    pd.testing.assert_frame_equal(bars, random_walk(20, seed=1))
    np.testing.assert_array_equal(weights, np.linspace(-1.0, 1.0, 20))


@pytest.mark.parametrize(
    ("weights", "rules", "named"),
    [
        (np.ones(4), {}, "target_weights"),
        (np.ones((5, 2)), {}, "target_weights"),
        (np.ones((1, 5)), {}, "target_weights"),
        (0.5, {}, "target_weights"),
        ([0.0, np.inf, 0.0, 0.0, 0.0], {}, "target_weights"),
        ([0.0, -np.inf, 0.0, 0.0, 0.0], {}, "target_weights"),
        (np.ones(5), {"fee": -0.001}, "fee"),
        (np.ones(5), {"fee": 1.0}, "fee"),
        (np.ones(5), {"fee": NAN}, "fee"),
        (np.full(5, 20.0), {"fee": 0.05}, "fee"),
        (np.ones(5), {"half_spread": 0.5, "slippage": 0.5}, "half_spread"),
        (np.full(5, 0.5), {"half_spread": 0.6, "slippage": 0.6}, "half_spread"),
        (np.ones(5), {"slippage": -0.1}, "slippage"),
        (np.ones(5), {"fill": "open"}, "fill"),
        (np.ones(5), {"sizing": "exact"}, "sizing"),
        (np.ones(5), {"fees": 0.001}, "fees"),
        (np.ones(5), {"cash": 0.0}, "cash"),
        (np.ones(5), {"cash": np.inf}, "cash"),
        (np.ones(5), {"participation": 0.0}, "participation"),
        (np.ones(5), {"participation": 1.1}, "participation"),
        (np.ones(5), {"impact": -1.0}, "impact"),
        (np.ones(5), {"impact_window": 1}, "impact_window"),
        (np.ones(5), {"band": -0.1}, "band"),
        (np.ones(5), {"bankruptcy": 1.0}, "bankruptcy"),
        (np.ones(5), {"maintenance_margin": -0.1}, "maintenance_margin"),
        (np.ones(5), {"borrow_rate": NAN}, "borrow_rate"),
        (np.ones(5), {"leverage": 2.0}, "leverage"),  # limits of an agent, which simulate does not apply
        (np.ones(5), {"long_only": True}, "long_only"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_that_names_it(weights, rules, named):
    with pytest.raises(ValueError, match=named) as error:
        simulate(table(np.ones(5)), weights, **{"fee": 0.0, **rules})
    assert "\n" not in str(error.value)


def test_the_rules_themselves_refuse_the_same_in_their_own_validation():
    for wrong in ({"fee": -0.001}, {"fill": "open"}, {"fees": 0.001}, {"cash": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TradingRules(**wrong)


def test_a_table_without_rows_is_refused():
    """In a process of its own: a kernel that runs on no bars writes to memory that is not its own."""
    program = """
import numpy as np
from tailguard.market import random_walk, simulate
try:
    simulate(random_walk(1, seed=0).iloc[:0], np.empty(0), fee=0.0)
except ValueError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n")


def test_a_table_that_is_not_bars_is_refused():
    bars = table(np.ones(3))
    for broken in (bars.drop(columns="open"), bars.reset_index(drop=True), bars.iloc[::-1]):
        with pytest.raises(ValueError, match="load_bars"):
            simulate(broken, np.ones(3), fee=0.0)


def test_a_participation_cap_needs_volumes():
    with pytest.raises(ValueError, match="participation needs volumes"):
        simulate(table(np.ones(5), volume=0.0), np.ones(5), fee=0.0, participation=0.1)


def test_infinite_funding_is_refused():
    with pytest.raises(ValueError, match="funding is inf"):
        simulate(table(np.ones(5)).assign(funding=np.inf), np.ones(5), fee=0.0)
