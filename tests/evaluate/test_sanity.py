"""Sanity checks, each on an agent for which the answer is known."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tailguard.evaluate import sanity
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.record import AccountHistory
from tailguard.evaluate.stats import performance
from tailguard.market import TradingRules, load_bars, random_walk

RULES = TradingRules(fee=0.0005)


@pytest.fixture(scope="module")
def window():
    return BacktestWindow(random_walk(900, seed=5), RULES, (300, 900))


@pytest.fixture(scope="module")
def prophet(window):
    """Knows over which bars the price rises from open to open, which is what a trade at the open earns."""
    opens = window.bars["open"].to_numpy()
    rises = np.append(np.diff(opens), 0.0)[301:900]  # decided at row t, bought at the open of t + 1
    return np.sign(rises)[:, None]


@pytest.fixture(scope="module")
def coin():
    return np.random.default_rng(1).choice([-1.0, 1.0], (60, 1)).repeat(10, axis=0)[:599]


@given(n=st.integers(1, 300), block=st.integers(1, 300), seed=st.integers(0, 1000))
def test_orders_keep_every_row_and_nearly_every_neighbour(n, block, seed):
    block = min(block, n)
    (order,) = sanity.block_orders(n, block, 1, seed)
    assert sorted(order) == list(range(n))
    apart = int(((order[1:] - order[:-1]) % n != 1).sum()) if n > 1 else 0
    assert apart <= -(-n // block) - 1


def test_every_row_gets_everywhere():
    """Over many orders the position of a row is uniform, also where blocks do not divide the rows."""
    places = np.array([np.flatnonzero(order == 3)[0] for order in sanity.block_orders(7, 3, 14_000, seed=0)])
    assert stats.chisquare(np.bincount(places, minlength=7)).pvalue > 0.001


def test_timing_is_found_where_it_is_and_not_where_it_is_not(window, prophet, coin):
    periods = window.periods_per_year

    def p_value(targets):
        sharpes, history = sanity.permutations(window, targets, count=99)
        assert performance.sharpe(history.returns, periods) == pytest.approx(np.median(sharpes))
        own = performance.sharpe(window.trade("agent", targets).returns, periods)
        return (1.0 + (sharpes >= own).sum()) / 100.0

    assert p_value(prophet) == 0.01
    assert p_value(coin) > 0.05
    constant, _ = sanity.permutations(window, np.full((599, 1), 0.5), count=9)
    assert np.ptp(constant) == 0.0


def test_what_is_held_stays_held_in_every_order(window):
    """Bought once and held: no order of the blocks changes that, and none leaves the account in cash."""
    held = np.full((599, 1), np.nan)
    held[0] = 1.0
    sharpes, history = sanity.permutations(window, held, count=9)
    own = window.trade("agent", held)
    np.testing.assert_allclose(sharpes, performance.sharpe(own.returns, window.periods_per_year), rtol=1e-9)
    np.testing.assert_allclose(history.weights, 1.0)


def test_costs_as_tested_are_one_times_the_costs(window, coin):
    curve = sanity.cost_curve(window, coin)
    own = window.trade("agent", coin)
    at = {point.multiple: point for point in curve}
    assert at[1.0].total_return == own.total_return
    assert at[1.0].sharpe == performance.sharpe(own.returns, window.periods_per_year)
    assert [point.multiple for point in curve] == [0.0, 0.5, 1.0, 2.0, 3.0, 5.0]
    returns = [point.total_return for point in curve]
    assert returns == sorted(returns, reverse=True)
    free = replace(window, rules=TradingRules(fee=0.0)).trade("agent", coin)
    assert at[0.0].total_return == free.total_return


def test_at_the_break_even_cost_nothing_is_left(window, prophet):
    fee = sanity.break_even_cost(window, prophet)
    at_that = replace(window, rules=TradingRules(fee=fee)).trade("agent", prophet)
    gross = replace(window, rules=TradingRules(fee=0.0)).trade("agent", prophet)
    assert math.log(gross.equity[-1]) > 3.0
    # Turnover is measured with the costs off; with them on, the account is smaller when it trades. Second order in the fee.
    assert abs(math.log(at_that.equity[-1])) < 0.02 * math.log(gross.equity[-1])
    assert sanity.break_even_cost(window, -prophet) < 0.0
    assert sanity.break_even_cost(window, np.zeros((599, 1))) is None


def test_a_prophet_who_is_late_is_none(window, prophet):
    agent = window.trade("agent", prophet)
    delay = sanity.delayed(window, prophet, agent)
    assert delay.sharpe_before > 10.0
    assert abs(delay.sharpe) < 3.0
    assert (delay.bars, delay.total_return_before) == (1, agent.total_return)
    by_hand = np.roll(prophet, 2, axis=0)
    by_hand[:2] = 0.0
    two = sanity.delayed(window, prophet, agent, bars=2)
    assert two.total_return == window.trade("x", by_hand).total_return
    with pytest.raises(ValueError, match="bars is 0"):
        sanity.delayed(window, prophet, agent, bars=0)


def test_years_make_up_the_whole(window, coin):
    agent, market = window.trade("agent", coin), window.trade("market", np.ones((599, 1)))
    table = sanity.regimes(window.moves.mean(axis=1), agent, market, window.periods_per_year)
    years = table[table["kind"] == "year"]
    assert years["bars"].sum() == 599
    assert (years["bars"] >= sanity.FEWEST_REGIME_BARS).all()
    assert np.prod(1.0 + years["agent_return"]) == pytest.approx(agent.equity[-1])
    assert years["regime"].tolist() == sorted({str(time.year) for time in agent.times})
    np.testing.assert_allclose(table["exposure"], 1.0, atol=0.01)
    one = table[table["regime"] == years["regime"].iloc[0]].iloc[0]
    inside = agent.times.year == int(one["regime"])
    assert one["agent_sharpe"] == performance.sharpe(agent.returns[inside], window.periods_per_year)


def test_volatility_regimes_know_only_the_past():
    """A calm first half and a wild second one: the thirds must follow, one bar behind."""
    bars = random_walk(900, seed=2)
    close = bars["close"].to_numpy()
    growth = np.diff(np.log(close), prepend=np.log(close[0])) * np.where(np.arange(900) < 600, 1.0, 5.0)
    wild = bars.copy()
    wild[["open", "high", "low", "close"]] = (
        bars[["open", "high", "low", "close"]].to_numpy() * (np.exp(np.cumsum(growth)) * close[0] / close)[:, None]
    )
    window = BacktestWindow(wild, RULES, (300, 900))
    weights = np.where(np.arange(599) < 321, 0.0, 1.0)[:, None]  # in the market while it is wild, a month later
    agent = window.trade("agent", weights)
    table = sanity.regimes(window.moves.mean(axis=1), agent, agent, window.periods_per_year).set_index("regime")
    assert table.loc["stormy", "exposure"] > 0.9
    assert table.loc["calm", "exposure"] == 0.0
    assert table.loc[["calm", "usual", "stormy"], "bars"].sum() == 599 - 21


def test_interquartile_mean_of_a_multiple_of_four_is_the_trimmed_mean():
    values = np.random.default_rng(0).normal(size=40)
    assert sanity.interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25))
    # The middle half of three is all of the second and a quarter of each of the others: (1/12 + 2/3 + 6/12) / (1/2).
    assert sanity.interquartile_mean([6.0, 1.0, 2.0]) == pytest.approx(2.5)
    assert sanity.interquartile_mean([3.0]) == 3.0


def history(name, returns):
    n = len(returns)
    times = random_walk(n, seed=0).index
    return AccountHistory(name, times, np.asarray(returns), np.zeros((n, 1)), *np.zeros((3, n)))


def test_dispersion_by_hand():
    generator = np.random.default_rng(0)
    histories = [history(f"seed {i}", generator.normal(0.001 * i, 0.01, 400)) for i in range(5)]
    spread = sanity.dispersion(histories, [100, 300], 252.0)
    sharpes = sorted(performance.sharpe(each.returns, 252.0) for each in histories)
    assert (spread.worst, spread.low, spread.median, spread.high, spread.best) == pytest.approx(tuple(sharpes))
    table = [performance.sharpe(each.returns[a:b], 252.0) for each in histories for a, b in ((0, 100), (100, 400))]
    assert spread.interquartile_mean == pytest.approx(sanity.interquartile_mean(table))
    assert spread.interquartile_low < spread.interquartile_mean < spread.interquartile_high
    twins = sanity.dispersion([histories[0], replace(histories[0], name="twin")], [400], 252.0)
    assert twins.interquartile_low == pytest.approx(twins.interquartile_high)
    assert sanity.dispersion(histories[:1], [400], 252.0) is None
    with pytest.raises(ValueError, match="fold_rows"):
        sanity.dispersion(histories, [100, 200], 252.0)


@pytest.mark.parametrize("assets", [1, 2])
def test_there_are_enough_baselines_and_they_trade_as_they_should(assets):
    bars = random_walk(900, seed=1)
    bars = bars if assets == 1 else load_bars({"a": bars, "b": random_walk(900, seed=2)})
    window = BacktestWindow(bars, RULES, (400, 900))
    targets = np.random.default_rng(0).uniform(0.0, 1.0 / assets, (499, assets))
    agent = window.trade("agent", targets)
    _, permuted = sanity.permutations(window, targets, count=9)
    histories = {each.name: each for each in sanity.baselines(window, agent, permuted)}
    assert len(histories) >= 7
    assert {"buy_and_hold", "own_mix", "own_permuted", "random_positions", "cash"} <= set(histories)
    np.testing.assert_allclose(histories["own_mix"].weights.mean(axis=0), agent.weights.mean(axis=0), rtol=0.02)
    assert histories["own_mix"].turnover.mean() < 0.1 * agent.turnover.mean()
    assert histories["own_permuted"].weights.mean() == pytest.approx(agent.weights.mean(), rel=0.01)
    assert histories["own_permuted"].turnover.mean() == pytest.approx(agent.turnover.mean(), rel=0.1)
    assert histories["random_positions"].turnover.mean() == pytest.approx(agent.turnover.mean(), rel=0.35)
    assert (histories["cash"].returns == 0.0).all()
