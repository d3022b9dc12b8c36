"""Excess returns everywhere: with interest on cash, every figure of a record is that of the returns minus those of cash."""

import numpy as np
import pandas as pd
import pytest
from test_assessment import CONTEXT, QUICK, momentum

from tailguard.evaluate import sanity, statistics
from tailguard.evaluate.assessment import assess
from tailguard.evaluate.backtest import backtest_row
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.market import TradingRules, ar1_returns, random_walk
from tailguard.market.bars import YEAR

RATE = 0.03
SPAN = (300, 1800)
N = SPAN[1] - SPAN[0] - 1
ZERO = (
    "sharpe", "sortino", "calmar", "lo_sharpe", "volatility", "hit_rate", "alpha", "alpha_t", "beta", "max_drawdown", "ulcer",
    "cdar_5", "turnover", "exposure", "net_exposure", "costs", "cost_share",
)  # fmt: skip
UNDEFINED = ("probabilistic_sharpe", "deflated_sharpe", "minimum_track_record")


def business_days(bars):
    """Put bars on business days, whose interest over a weekend is that of three days."""
    return bars.set_index(pd.bdate_range("2010-01-01", periods=len(bars), unit="ns", name="time"))


def assessed(bars, targets, rate=RATE, fee=0.0, **window):
    rules = TradingRules(fee=fee, cash_rate=rate)
    return assess(BacktestWindow(bars, rules, SPAN, **window), {"seed 0": targets}, [N], CONTEXT, effort=QUICK)


@pytest.fixture(scope="module")
def bars():
    return business_days(ar1_returns(1800, rho=0.25, overnight_share=0.0, seed=1))


@pytest.fixture(scope="module")
def record(bars):
    return assessed(bars, momentum(bars, noise=0.1)[SPAN[0] : SPAN[1] - 1] * 0.6)


def test_cash_earns_its_rate_and_has_no_sharpe_ratio(bars, record):
    cash = record.history("cash")
    years = np.diff(bars.index[SPAN[0] : SPAN[1]]) / YEAR.to_timedelta64()
    np.testing.assert_allclose(cash.returns, RATE * years, rtol=0, atol=1e-15)
    assert record.statistics["cash"]["cagr"].value == pytest.approx(RATE, rel=0.03)
    require_figures_of_cash(record, "cash")


def require_figures_of_cash(record, name):
    """Every statistic of an account that holds cash: no ratio, no risk, no trade, and the interest as its return."""
    account, figures = record.history(name), {key: figure.value for key, figure in record.statistics[name].items()}
    interest = np.prod(1.0 + account.riskless) - 1.0
    years = N / record.periods_per_year
    expected = dict.fromkeys(ZERO, 0.0) | dict.fromkeys(UNDEFINED, np.nan)
    expected |= {"total_return": interest, "cagr": (1.0 + interest) ** (1.0 / years) - 1.0}
    expected |= {f"cvar_{percent}": statistics.cvar(account.riskless, percent / 100.0) for percent in (1, 5)}
    figures.pop("agent_lead", None)  # compares it with another
    assert set(figures) == set(expected)
    for key, value in figures.items():
        assert value == pytest.approx(expected[key], abs=1e-9, nan_ok=True), key


@pytest.mark.parametrize("by_bar", [False, True])
def test_every_statistic_of_cash_is_that_of_cash_whatever_its_rate(bars, by_bar):
    """An agent that stays idle while the rate rises from 0 to 5 %, as it did: interest is no gain over interest."""
    window = {"cash_rates": np.linspace(0.0, 0.05, N)} if by_bar else {}
    record = assessed(bars, np.zeros((N, 1)), rate=0.0 if by_bar else RATE, **window)
    assert np.ptp(record.agent.riskless) > 1e-4 * by_bar
    for name in ("agent", "cash"):
        require_figures_of_cash(record, name)
    assert record.verdict.outcome == "no evidence of skill"


def test_every_statistic_is_that_of_the_excess_returns(record):
    agent, market, periods = record.agent, record.history("buy_and_hold"), record.periods_per_year
    excess, relation = agent.excess, statistics.alpha_beta(agent.excess, market.excess, record.periods_per_year)
    assert agent.riskless.min() > 0.0
    inflation = statistics.variance_inflation(excess)
    expected = {
        "sharpe": statistics.sharpe(excess, periods),
        "sortino": statistics.sortino(excess, periods),
        "lo_sharpe": statistics.lo_sharpe(excess, periods),
        "volatility": statistics.volatility(excess, periods),
        "calmar": statistics.calmar(agent.equity, periods, agent.riskless),
        "hit_rate": (excess > 0.0).sum() / (np.abs(excess) > 1e-14).sum(),
        "alpha": relation.alpha,
        "alpha_t": relation.alpha_t,
        "beta": relation.beta,
        "probabilistic_sharpe": statistics.probabilistic_sharpe(excess, inflation=inflation),
        "deflated_sharpe": statistics.deflated_sharpe(excess, 1, inflation=inflation),
        "minimum_track_record": statistics.minimum_track_record(excess, inflation=inflation),
        "cost_share": 0.0,
        "total_return": np.prod(1.0 + agent.returns) - 1.0,  # these five are of the account as it is
        "cagr": statistics.cagr(agent.equity, periods),
        "max_drawdown": statistics.max_drawdown(agent.equity),
        "cvar_5": statistics.cvar(agent.returns, 0.05),
        "ulcer": statistics.ulcer(agent.equity),
    }
    for name, value in expected.items():
        assert record.statistics["agent"][name].value == pytest.approx(value, rel=1e-9), name
    lead = record.statistics["buy_and_hold"]["agent_lead"]
    assert lead.value == pytest.approx(expected["sharpe"] - statistics.sharpe(market.excess, periods))


def test_every_check_is_of_the_excess_returns(bars, record):
    window = BacktestWindow(bars, TradingRules(fee=0.0, cash_rate=RATE), SPAN)
    targets, periods = momentum(bars, noise=0.1)[SPAN[0] : SPAN[1] - 1] * 0.6, window.periods_per_year
    own = statistics.sharpe(record.agent.excess, periods)
    assert {point.sharpe for point in record.sanity.cost_curve if point.multiple == 1.0} == {own}
    assert record.sanity.delay.sharpe_before == own
    growth = np.log(record.agent.equity[-1] / record.history("cash").equity[-1]) / N
    assert record.sanity.break_even_cost == pytest.approx(growth / record.agent.turnover.mean())
    years = record.sanity.regimes.query("kind == 'year'")
    first = record.agent.times.year == int(years["regime"].iloc[0])
    assert years["agent_sharpe"].iloc[0] == statistics.sharpe(record.agent.excess[first], periods)
    sharpes, median = sanity.permutations(window, targets, 9)
    assert np.median(sharpes) == statistics.sharpe(median.excess, periods)
    spread = sanity.dispersion([record.agent, record.history("cash")], [N], periods)
    assert (spread.worst, spread.best) == (0.0, own)
    row = backtest_row(window, "agent", targets)
    assert (row.sharpe, row.volatility) == (own, record.statistics["agent"]["volatility"].value)


def test_a_large_alpha_keeps_its_verdict(bars, record):
    without = assessed(bars, momentum(bars, noise=0.1)[SPAN[0] : SPAN[1] - 1] * 0.6, rate=0.0)
    assert record.verdict.outcome == without.verdict.outcome == "evidence of skill"
    assert record.statistics["agent"]["sharpe"].value == pytest.approx(without.statistics["agent"]["sharpe"].value, abs=0.05)


def test_an_account_that_is_all_but_idle_has_no_skill():
    bars = business_days(random_walk(1800, seed=3))
    weights = np.random.default_rng(0).choice([0.0, 0.001], (N, 1))
    record = assessed(bars, weights, fee=0.0005)
    assert record.statistics["agent"]["cagr"].value > 0.9 * RATE
    assert record.verdict.outcome != "evidence of skill"
    assert abs(record.statistics["agent"]["sharpe"].value) < 2.0


def test_rates_by_bar_are_paid_as_one_rate_is():
    bars = business_days(random_walk(1800, seed=3))
    weights = np.random.default_rng(0).uniform(-0.5, 1.0, (N, 1))
    one = BacktestWindow(bars, TradingRules(fee=0.0005, cash_rate=RATE), SPAN)
    many = BacktestWindow(bars, TradingRules(fee=0.0005), SPAN, np.full(N, RATE))
    np.testing.assert_array_equal(one.riskless, many.riskless)
    # The kernel pays before it trades at the open, so its position is larger by the interest: a share of a share.
    np.testing.assert_allclose(one.trade("a", weights).returns, many.trade("a", weights).returns, rtol=0, atol=1e-5)
    assert one.riskless.mean() > 1e-4
    rates = np.where(np.arange(N) < 700, 0.0, 0.05)
    steps = BacktestWindow(bars, TradingRules(fee=0.0), SPAN, rates)
    np.testing.assert_allclose(steps.trade("cash", np.zeros(N)).excess, 0.0, atol=1e-15)
    assert not steps.riskless[:700].any()
    with pytest.raises(ValueError, match="shape of cash_rates"):
        BacktestWindow(bars, TradingRules(), SPAN, rates[1:])
    with pytest.raises(ValueError, match="0 beside rates by bar"):
        BacktestWindow(bars, TradingRules(cash_rate=RATE), SPAN, rates)


@pytest.mark.parametrize("by_bar", [False, True])
def test_a_loan_costs_what_cash_earns(bars, by_bar):
    """Twice the market has twice its excess return, and no alpha: a loan for nothing would be one."""
    rules = TradingRules(fee=0.0, fill="close", cash_rate=0.0 if by_bar else RATE)
    window = BacktestWindow(bars, rules, SPAN, np.full(N, RATE) if by_bar else None)
    twice = window.trade("twice", np.full(N, 2.0))
    np.testing.assert_allclose(twice.excess, 2.0 * (window.moves[:, 0] - window.riskless), rtol=0, atol=1e-12)
    dear = BacktestWindow(bars, rules.model_copy(update={"loan_rate": 0.08}), SPAN, window.cash_rates)
    spread = twice.returns - dear.trade("twice", np.full(N, 2.0)).returns
    np.testing.assert_allclose(spread, window.riskless * 0.05 / RATE, rtol=1e-9)
