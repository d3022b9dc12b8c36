"""Files of other packages, made by those packages, are judged as they are."""

import warnings

import numpy as np
import pandas as pd
import pytest

import tailguard
from tailguard.evaluate.assessment import Effort
from tailguard.evaluate.inputs import read_returns
from tailguard.market import load_bars, load_dataset

QUICK = Effort(draws=50, permutations=19)


@pytest.fixture(scope="module")
def bars():
    return load_dataset("nasdaq-1d").iloc[-500:]


@pytest.fixture(scope="module")
def close(bars):
    return bars["close"]


def foreign(name):
    """Import a package whose own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def quantstats_returns(bars):
    returns = foreign("quantstats").utils.to_returns(bars["close"])  # a Series named close, the first value missing
    return returns, returns.iloc[1:]


def quantstats_prices(bars):
    returns = bars["close"].pct_change().iloc[1:]
    return foreign("quantstats").utils.to_prices(returns), returns.iloc[1:]


def empyrical_cumulated(bars):
    returns = bars["close"].pct_change().iloc[1:]
    return foreign("empyrical").cum_returns(returns, starting_value=100.0), returns.iloc[1:]


def ffn_rebased(bars):
    return foreign("ffn").rebase(bars[["close"]].set_axis(["fund"], axis=1)), bars["close"].pct_change().iloc[1:]


def vectorbt_portfolio(bars):
    close = bars["close"]
    above = close > close.rolling(20).mean()
    return foreign("vectorbt").Portfolio.from_signals(close, above, ~above, fees=0.001, freq="1D")


def vectorbt_returns(bars):
    returns = vectorbt_portfolio(bars).returns()
    return returns, returns


def vectorbt_value(bars):
    portfolio = vectorbt_portfolio(bars)
    return portfolio.value(), portfolio.returns().iloc[1:]


def backtesting_equity(bars):
    backtesting = foreign("backtesting")

    class Trend(backtesting.Strategy):
        def init(self):
            self.mean = self.I(lambda close: pd.Series(close).rolling(20).mean(), self.data.Close)

        def next(self):
            if self.data.Close[-1] > self.mean[-1] and not self.position:
                self.buy()
            elif self.data.Close[-1] < self.mean[-1]:
                self.position.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = backtesting.Backtest(bars.rename(columns=str.capitalize), Trend, cash=1e7, commission=0.001).run()
    return table["_equity_curve"], table["_equity_curve"]["Equity"].pct_change().iloc[1:]


def zipline_performance(bars):
    """The table that zipline's run_algorithm returns, from its documented columns; days are midnights in UTC."""
    returns = bars["close"].pct_change().fillna(0.0)
    days = bars.index.tz_localize("UTC")
    return pd.DataFrame(
        {
            "period_open": [f"{day:%Y-%m-%d} 14:31:00+00:00" for day in days],
            "period_close": [f"{day:%Y-%m-%d} 21:00:00+00:00" for day in days],
            "returns": returns.to_numpy(),
            "portfolio_value": 1e6 * np.cumprod(1.0 + returns.to_numpy()),
            "ending_cash": np.full(len(days), 5e5),
            "positions": [[{"sid": "A", "amount": 1e4, "last_sale_price": float(price)}] for price in bars["close"]],
            "transactions": [[] for _ in days],
            "gross_leverage": 1.0,
        },
        index=days.rename(None),
    ), returns


def pyfolio_returns(bars):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        returns, _, _ = foreign("pyfolio").utils.extract_rets_pos_txn_from_zipline(zipline_performance(bars)[0])
    return returns, bars["close"].pct_change().fillna(0.0)


def bt_prices(bars):
    result = bt_result(bars)
    return result.prices, result.prices["s"].pct_change().iloc[1:]


def bt_result(bars):
    bt = foreign("bt")
    prices = pd.DataFrame({"a": bars["close"], "b": bars["close"].to_numpy()[::-1]})
    algos = [bt.algos.RunMonthly(), bt.algos.SelectAll(), bt.algos.WeighEqually(), bt.algos.Rebalance()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bt.run(bt.Backtest(bt.Strategy("s", algos), prices), progress_bar=False)


MAKERS = [
    quantstats_returns, quantstats_prices, empyrical_cumulated, ffn_rebased, vectorbt_returns, vectorbt_value,
    backtesting_equity, zipline_performance, pyfolio_returns, bt_prices,
]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_file_of_another_package_is_judged_as_it_is(make, bars, tmp_path):
    table, returns = make(bars)
    path = tmp_path / "theirs.csv"
    table.to_csv(path)
    ours = read_returns(path)
    np.testing.assert_allclose(ours.to_numpy(), returns.to_numpy(), rtol=0, atol=1e-9)
    assert [f"{day:%Y-%m-%d}" for day in ours.index] == [f"{day:%Y-%m-%d}" for day in returns.index]
    judged = tailguard.judge(path, benchmark=bars, effort=QUICK)
    covered = pd.Series(ours.to_numpy(), ours.index)[judged.evaluation.agent.times]
    np.testing.assert_array_equal(judged.evaluation.agent.returns, covered)
    assert len(covered) >= len(ours) - 2  # the benchmark begins with the bars


def test_weights_of_another_package_are_traded_again(bars, tmp_path):
    result = bt_result(bars)
    path = tmp_path / "weights.csv"
    result.get_security_weights().to_csv(path)
    table = load_bars({"a": bars, "b": bars.set_index(bars.index).iloc[::-1].set_index(bars.index)})
    judged = tailguard.judge(weights=path, bars=table, trading={"fee": 0.0, "fill": "close"}, effort=QUICK)
    theirs = result.prices["s"].pct_change().loc[judged.evaluation.agent.times]
    # Theirs buys whole units of a month's weights and lets them drift; ours restores the drifted weights at every close.
    assert np.corrcoef(judged.evaluation.agent.returns, theirs)[0, 1] > 0.995


def test_positions_in_money_are_divided_by_their_sum(bars, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, positions, _ = foreign("pyfolio").utils.extract_rets_pos_txn_from_zipline(zipline_performance(bars)[0])
    path = tmp_path / "positions.csv"
    positions.to_csv(path)
    judged = tailguard.judge(weights=path, bars=bars, trading={"fee": 0.0, "fill": "close"}, effort=QUICK)
    money = 1e4 * bars["close"].to_numpy()
    np.testing.assert_allclose(judged.evaluation.agent.weights[:, 0], (money / (money + 5e5))[:-1], rtol=1e-6)
