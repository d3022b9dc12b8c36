"""The calendar, the drawdowns and the trades of the page, against pandas, empyrical and the definition."""

from dataclasses import replace

import empyrical
import numpy as np
import pandas as pd
import pytest
from evaluation_examples import example_evaluation
from page_reader import Page

from tailguard.evaluate.record import load_record, save_record
from tailguard.evaluate.report.report import report_html
from tailguard.evaluate.report.sections.history import MOST_TRADES, monthly_returns, trades_section, worst_drawdowns
from tailguard.evaluate.stats.performance import max_drawdown
from tailguard.evaluate.stats.series import equity_of

TRADE = {
    "symbol": "x",
    "side": "long",
    "entry": pd.Timestamp("2020-01-02"),
    "exit": pd.NaT,
    "bars": 3,
    "gain": 0.02,
    "cost": 0.005,
}


@pytest.fixture(scope="module")
def record():
    return example_evaluation(bars=600, seeds=1, full=False)


def test_months_are_those_of_empyrical(record):
    agent = record.agent
    ours = monthly_returns(agent.times, agent.returns)
    theirs = empyrical.aggregate_returns(pd.Series(agent.returns, agent.times), "monthly")
    for (year, month), value in theirs.items():
        assert ours.loc[year, month] == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert int(ours.notna().sum().sum()) == len(theirs)
    assert np.prod(1.0 + np.nan_to_num(ours.to_numpy())) == pytest.approx(agent.equity[-1])


def test_a_year_without_bars_is_empty():
    times = pd.DatetimeIndex(["2019-12-30", "2021-02-01", "2021-02-02"])
    table = monthly_returns(times, np.array([0.1, 0.1, 0.1]))
    assert list(table.index) == [2019, 2020, 2021]
    assert table.loc[2020].isna().all()
    assert table.loc[2021, 2] == pytest.approx(0.21)


def test_drawdowns_by_hand():
    times = pd.date_range("2024-01-01", periods=8)
    equity = np.array([1.0, 0.9, 1.0, 2.0, 1.5, 1.0, 2.0, 3.0, 2.7])
    first, second, third = worst_drawdowns(times, equity)
    assert first == (0.5, times[2], times[4], times[5], 3)
    assert (round(second.depth, 9), second.peak, second.low, second.recovered, second.bars) == (
        0.1,
        times[0],
        times[0],
        times[1],
        2,
    )
    assert (round(third.depth, 9), third.peak, third.recovered, third.bars) == (0.1, times[6], None, 1)
    assert worst_drawdowns(times, np.arange(1.0, 10.0)) == []


def test_the_deepest_drawdown_is_the_maximum(record):
    falls = worst_drawdowns(record.agent.times, record.agent.equity)
    assert falls[0].depth == max_drawdown(record.agent.equity)
    assert [fall.depth for fall in falls] == sorted((fall.depth for fall in falls), reverse=True)
    gloom = equity_of(np.full(20, -0.01))
    (only,) = worst_drawdowns(pd.date_range("2024-01-01", periods=20), gloom)
    assert (only.recovered, only.bars) == (None, 20)


def test_the_page_shows_months_drawdowns_and_trades(record):
    page = Page(report_html(replace(record, trades=pd.DataFrame([TRADE, TRADE | {"gain": -0.01}]))))
    assert page.mistakes == []
    for text in ("Calendar", "Worst drawdowns", "2 trades, 50.0% of them with a gain", "open", "trades.csv"):
        assert text in page.text
    assert page.data["files"]["trades"]["text"].splitlines()[0] == "symbol,side,entry,exit,bars,gain,cost"
    assert len(page.data["files"]["trades"]["text"].splitlines()) == 3
    without = Page(report_html(record))
    assert "trades" not in without.data["files"]


def test_many_trades_are_listed_from_both_ends(record):
    trades = pd.DataFrame([TRADE | {"gain": 0.001 * k} for k in range(100)])
    section = trades_section(replace(record, trades=trades))
    panes = section.blocks[0].panes
    assert list(panes) == ["Worst", "Best"]
    assert all(pane[0].count("<tr>") == MOST_TRADES // 2 + 1 for pane in panes.values())
    assert "+9.40%" in panes["Best"][0]
    assert trades_section(replace(record, trades=trades.iloc[:0])) is None


def test_trades_survive_the_disk(record, tmp_path):
    trades = pd.DataFrame([TRADE | {"exit": pd.Timestamp("2020-01-05")}, TRADE])
    save_record(replace(record, trades=trades), tmp_path)
    pd.testing.assert_frame_equal(load_record(tmp_path).trades, trades, check_dtype=False)
    save_record(record, tmp_path)
    assert load_record(tmp_path).trades is None
