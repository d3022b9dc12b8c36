"""Runs side by side: the same figures as in their own records, whatever they are called."""

from dataclasses import replace

import pandas as pd
import pytest
from evaluation_examples import example_evaluation
from page_reader import Page
from test_report_page import HOSTILE

import tailguard
from tailguard.cli import main
from tailguard.evaluate.assessment import Effort
from tailguard.evaluate.comparison import compare_runs
from tailguard.evaluate.record import RECORD_FOLDER, save_record
from tailguard.evaluate.report import compare, comparison_rows
from tailguard.evaluate.report.compare import comparison_sentences, difference_rows, ranking_rows
from tailguard.evaluate.report.formatting import with_interval


@pytest.fixture(scope="module")
def records():
    return [example_evaluation(bars=300, seeds=2, seed=seed, full=False) for seed in range(2)]


def with_provenance(record, **changes):
    return replace(record, provenance=replace(record.provenance, **changes))


def test_rows_for_the_terminal(records):
    rows = comparison_rows(records, ["a", "b"])
    assert [row["run"] for row in rows] == ["a", "b"]
    assert len({tuple(row) for row in rows}) == 1
    for row, record in zip(rows, records, strict=True):
        assert row["Sharpe ratio"] == with_interval(record.statistics["agent"]["sharpe"])
        assert row["Annual return (CAGR)"] == with_interval(record.statistics["agent"]["cagr"], "percent")
        assert row["data"] == record.source


def test_the_terminal_has_the_paired_differences_of_the_page(records, tmp_path, capsys):
    for name, record in zip("ab", records, strict=True):
        save_record(record, tmp_path / name / RECORD_FOLDER)
    with pytest.raises(SystemExit) as stopped:
        main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "page.html")])
    assert stopped.value.code == 0
    (row,) = difference_rows(compare_runs(records, ["a", "b"]))
    assert row["pair"] in ("a minus b", "b minus a")
    printed, page = " ".join(capsys.readouterr().out.split()), (tmp_path / "page.html").read_text()
    for text in row.values():
        assert text in printed
        assert text in page


def test_a_strategy_of_which_only_returns_are_known_is_compared_with_one_that_trades(records):
    agent = records[0].agent
    judged = tailguard.judge(pd.Series(agent.returns, agent.times), effort=Effort(draws=50), ledger=None).evaluation
    rows = comparison_rows([records[0], judged], ["traded", "returns"])
    assert len({tuple(row) for row in rows}) == 1
    assert rows[1]["Annual turnover"] == "not known"
    assert Page(compare([records[0], judged], ["traded", "returns"])).mistakes == []


def test_page_holds_every_run(records):
    page = Page(compare(records, ["first", "second"]))
    assert page.mistakes == []
    figures = page.data["figures"]
    assert set(figures) == {"equities", "compare-sharpe", "compare-cagr", "compare-max_drawdown", "compare-cvar_5"}
    assert [mark["name"] for mark in figures["equities"]["panels"][0]["marks"]] == ["first", "second"]
    for row, record in zip(figures["compare-sharpe"]["panels"][0]["rows"], records, strict=True):
        assert (row["value"], row["low"], row["high"]) == tuple(record.statistics["agent"]["sharpe"])
    ids = [known["id"] for _, known in page.elements if "id" in known]
    assert len(ids) == len(set(ids))


def test_says_what_may_not_be_compared(records):
    assert "tested on the same bars" in Page(compare(records)).text
    other = with_provenance(records[1], fingerprint="sha256:other")
    assert "used different data" in Page(compare([records[0], other])).text
    longer = example_evaluation(bars=400, seeds=1, full=False)
    assert "different periods" in Page(compare([records[0], longer])).text


def test_shows_settings_that_differ_and_no_others(records):
    first = with_provenance(records[0], config="trading:\n  fee: 0.0005\n  fill: next_open\n")
    second = with_provenance(records[1], config="trading:\n  fee: 0.001\n  fill: next_open\n  slippage: 0.1\n")
    text = Page(compare([first, second])).text
    assert "trading.fee" in text
    assert "trading.slippage" in text
    assert "trading.fill" not in text


def test_the_ranking_is_on_the_page_and_says_how_certain_it_is(records):
    comparison = compare_runs(records, ["first", "second"])
    page = Page(compare(records, ["first", "second"]))
    for line in comparison_sentences(comparison):
        assert line in page.text
    for row in ranking_rows(comparison):
        assert row["rank, 90% range"] == "1 to 2"
        assert row["Sharpe ratio"] in page.text
    assert "SPA" in page.text
    assert "PBO" in page.text
    later = example_evaluation(bars=30, seeds=1, full=False)
    assert "The runs are not ranked" in Page(compare([records[0], later])).text


def test_titles_that_repeat_are_numbered(records):
    assert [row["run"] for row in comparison_rows(records)] == ["An example (1)", "An example (2)"]


@pytest.mark.parametrize(
    ("count", "names", "message"), [(1, None, "at least 2"), (2, ["a"], "one for each"), (2, ["a", "a"], "all different")]
)
def test_refuses_what_cannot_be_compared(records, count, names, message):
    with pytest.raises(ValueError, match=message):
        compare(records[:count], names)


def test_hostile_names_stay_text(records):
    page = Page(compare(records, [HOSTILE, f"{HOSTILE}2"]))
    assert page.mistakes == []
    assert len(page.find("script")) == 2
    assert page.find("img") == []
