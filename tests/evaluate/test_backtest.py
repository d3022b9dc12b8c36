"""Backtests of strategies and agents: the same accounting, the same figures."""

import numpy as np
import pytest

from tailguard.evaluate import backtest
from tailguard.evaluate.backtest import backtest_row, benchmark_row
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.play import play
from tailguard.market import TradingRules, TradingSettings, build_features, load_dataset, simulate
from tailguard.market.baselines import STRATEGIES, strategy


class Stubborn:
    """An agent with one action for everything."""

    def __init__(self, action):
        self.action = action

    def predict(self, observation, state, episode_start, deterministic):
        return np.full((len(observation), 1), self.action), state


def test_an_agent_that_always_wants_one_weight_is_the_constant_mix(nasdaq):
    settings, span = TradingSettings(fee=0.002, slippage=0.001), (3000, 3500)
    (played,) = play(Stubborn(0.3), nasdaq, build_features(nasdaq), settings, [span])
    agent = backtest_row(BacktestWindow(nasdaq, settings, span), "same", played.targets)
    mix = backtest(nasdaq, "same", strategy("constant_mix", weight=0.3), settings, span)
    for figure in ("total_return", "cagr", "volatility", "sharpe", "max_drawdown", "cvar_5", "costs", "turnover"):
        assert getattr(agent, figure) == pytest.approx(getattr(mix, figure), rel=1e-9), figure


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_span_trades_what_the_strategy_stands_for_at_its_start(name, nasdaq):
    row = backtest(nasdaq, name, strategy(name), TradingRules(fee=0.0), (2000, 2600))
    assert row.turnover > 0.0


def test_a_span_of_buy_and_hold_follows_the_price(nasdaq):
    row = backtest(nasdaq, "hold", strategy("buy_and_hold"), TradingRules(fee=0.0), (1000, 1500))
    assert row.total_return == pytest.approx(nasdaq["close"].iloc[1499] / nasdaq["open"].iloc[1001] - 1.0)


def test_figures_of_a_whole_series_come_from_simulate(nasdaq):
    rules = TradingRules(fee=0.001)
    row = backtest(nasdaq, "trend", strategy("moving_average"), rules)
    result = simulate(nasdaq, strategy("moving_average")(nasdaq), fee=0.001, bankruptcy=rules.bankruptcy)
    assert row.total_return == pytest.approx(result.equity[-1] - 1.0, rel=1e-9)
    assert row.costs == pytest.approx(result.costs.sum(), rel=1e-9)
    assert not row.ruined


def test_a_ruined_account_is_reported():
    bars = load_dataset("btcusd-1h")
    assert backtest(bars, "random", strategy("random_positions"), TradingRules(fee=0.01)).ruined


def test_a_benchmark_is_bought_and_held_without_costs(nasdaq):
    window = BacktestWindow(nasdaq, TradingRules(), (100, 600))
    row = benchmark_row(window, "index", nasdaq.iloc[:700:2])  # every second bar: the last known close counts
    free = benchmark_row(window, "index", nasdaq)
    close = nasdaq["close"].to_numpy()
    assert free.total_return == pytest.approx(close[599] / close[100] - 1.0)
    assert row.total_return == pytest.approx(close[598] / close[100] - 1.0)
    with pytest.raises(ValueError, match="it needs earlier bars"):
        benchmark_row(window, "index", nasdaq.iloc[200:])


def test_figures_per_year_follow_the_bars_per_year_of_the_rules(nasdaq):
    counted, said = (
        backtest(nasdaq, "", strategy("buy_and_hold"), TradingRules(**more)) for more in ({}, {"bars_per_year": 1008})
    )
    assert said.volatility == pytest.approx(counted.volatility * (1008 / 251.55) ** 0.5, rel=1e-3)
