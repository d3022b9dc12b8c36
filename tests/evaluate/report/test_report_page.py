"""The page as a document: valid, complete, self-contained, and deaf to what names try to smuggle in."""

import csv
import io
import json
import re
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from evaluation_examples import example_evaluation
from page_reader import Page
from report_examples import rich_evaluation

from tailguard.evaluate.record import metrics_text, save_record
from tailguard.evaluate.report import write_report
from tailguard.evaluate.report.formatting import say
from tailguard.evaluate.report.report import is_intraday, metrics_csv, report_html

ATTACKS = {"attack-sharpe", "attack-cagr", "attack-max_drawdown"}
OPTIONAL = {"leads", "fan", "calibration", "lineage", "hyperparameters"} | ATTACKS
ALWAYS = {
    "equity", "seed-equity", "rows-sharpe", "rows-cagr", "rows-max_drawdown", "rows-cvar_5", "position", "distribution",
    "rolling",
    "regimes-year", "regimes-volatility", "costs-curve", "fold-rows", "seed-rows", "training-curves",
}  # fmt: skip
HOSTILE = '<script>document.title="broken"</script>"\'&<img src=x onerror=alert(1)></script><!--'


@pytest.fixture(scope="module")
def record():
    return rich_evaluation()


@pytest.fixture(scope="module")
def page(record):
    return Page(report_html(record))


def marks_of(page):
    for chart in page.data["figures"].values():
        for panel in chart["panels"]:
            yield from panel.get("marks", [])


def test_is_valid_html(page):
    assert page.mistakes == []
    ids = [known["id"] for _, known in page.elements if "id" in known]
    assert len(ids) == len(set(ids))
    assert page.find("html", lang="en")
    assert len(page.find("h1")) == 1
    named = set(ids)
    for _, known in page.elements:
        for key in ("aria-labelledby", "aria-describedby", "aria-controls"):
            assert known.get(key, "verdict") in named
        if known.get("href", "").startswith("#"):
            assert known["href"][1:] in named


def test_every_chart_is_there_with_data_title_and_words(page):
    figures = page.data["figures"]
    assert set(figures) == ALWAYS | OPTIONAL
    hosts = [known["data-figure"] for known in page.find("div", class_="chart")]
    assert sorted(hosts) == sorted(figures)
    for name, chart in figures.items():
        assert chart["title"], name
        assert chart["summary"].endswith("."), name
        assert chart["title"] in page.text
        assert chart["summary"] in page.text
        for panel in chart["panels"]:
            assert panel["title"], name
            assert any(finite(panel)), (name, panel["title"])


def finite(panel):
    """Numbers that the panel draws."""
    if "rows" in panel:
        return [row for row in panel["rows"] if row["value"] is not None or row["dots"]]
    columns = [mark[key] for mark in panel["marks"] for key in ("y", "low", "high", "to") if key in mark]
    return [value for column in columns for value in column if value is not None]


def test_columns_of_a_mark_are_as_long_as_its_places(page):
    for mark in marks_of(page):
        expected = len(mark["x"]) - (mark["type"] == "bars")
        assert {len(mark[key]) for key in ("y", "low", "high", "from", "to") if key in mark} == {expected}
        if mark["type"] in ("line", "area", "band"):
            assert mark["x"] == sorted(mark["x"])


def test_loads_nothing_from_anywhere(record, page):
    for _, known in page.elements:
        assert not {"src", "srcset", "action", "poster", "data"} & set(known)
        assert known.get("href", "#").startswith("#")
        assert not [key for key in known if key.startswith("on")]
    html = report_html(record)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = page.find("meta", http_equiv="Content-Security-Policy")[0]["content"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_names_cannot_break_out(record):
    baselines = [replace(history, name=f"{HOSTILE}{i}" if i else history.name) for i, history in enumerate(record.baselines)]
    names = dict(zip([history.name for history in record.baselines], [history.name for history in baselines], strict=True))
    hostile = replace(
        record,
        title=HOSTILE,
        source=HOSTILE,
        baselines=baselines,
        statistics={names.get(name, name): figures for name, figures in record.statistics.items()},
        verdict=replace(record.verdict, headline=HOSTILE, reasons=(HOSTILE,)),
        prices=record.prices.set_axis([HOSTILE], axis=1),
        warnings=[HOSTILE],
        provenance=replace(record.provenance, config=f"a: {HOSTILE!r}", fingerprint=HOSTILE, versions={HOSTILE: HOSTILE}),
        training=record.training.rename(columns={"train/entropy": HOSTILE}),
        attack=record.attack.assign(attack=HOSTILE, statistic=HOSTILE),
        lineage=[json.loads(json.dumps(event).replace("learning_rate", "<script>x</script>")) for event in record.lineage],
    )
    page, clean = Page(report_html(hostile)), Page(report_html(record))
    assert page.mistakes == []
    assert len(page.find("script")) == 2
    assert page.find("img") == []
    assert [attributes for attributes, _ in page.scripts] == [attributes for attributes, _ in clean.scripts]
    assert page.scripts[1][1] == clean.scripts[1][1]
    assert not [known["id"] for _, known in page.elements if re.search(r"[^A-Za-z0-9_-]", known.get("id", ""))]
    assert page.text.count('<script>document.title="broken"</script>') > 5
    assert page.data["figures"]["position"]["panels"][0]["marks"][0]["name"] == HOSTILE


def test_figures_of_the_page_are_those_of_the_record(record, page):
    figures = record.statistics["agent"]
    shown = {known["data-statistic"] for known in page.find("dd", class_="value")}
    assert shown == {"sharpe", "cagr", "max_drawdown", "cvar_5", "turnover", "exposure"}
    for key, kind in (("sharpe", "number"), ("cagr", "percent"), ("max_drawdown", "percent"), ("cvar_5", "percent")):
        one = figures[key]
        assert f"{say(one.value, kind)} [{say(one.low, kind)} to {say(one.high, kind)}]" in page.text
        row = next(row for row in page.data["figures"][f"rows-{key}"]["panels"][0]["rows"] if row["name"] == "agent")
        assert (row["value"], row["low"], row["high"]) == tuple(one)
    curve = page.data["figures"]["costs-curve"]["panels"][0]["marks"][0]
    np.testing.assert_allclose(curve["y"], [point.sharpe for point in record.sanity.cost_curve], rtol=1e-5)


def test_lines_end_where_the_accounts_end_and_keep_their_extremes(record, page):
    top, bottom = page.data["figures"]["equity"]["panels"]
    lines = {mark["name"]: mark for mark in top["marks"] if mark["type"] == "line"}
    assert len(lines) == 1 + len(record.baselines)
    for name, history in (("agent", record.agent), ("buy and hold", record.history("buy_and_hold"))):
        equity = history.equity[1:]
        np.testing.assert_allclose(lines[name]["y"][-1], equity[-1], rtol=1e-5)
        np.testing.assert_allclose([min(lines[name]["y"]), max(lines[name]["y"])], [equity.min(), equity.max()], rtol=1e-5)
    fall = next(mark for mark in bottom["marks"] if mark["name"] == "agent")
    np.testing.assert_allclose(-min(fall["y"]), record.statistics["agent"]["max_drawdown"].value, rtol=1e-5)
    last = pd.Timestamp(lines["agent"]["x"][-1], unit="s")
    assert last == record.agent.times[-1]


def test_downloads_hold_the_numbers(record, page, tmp_path):
    files = page.data["files"]
    assert files["json"]["text"] == metrics_text(record) == (save_record(record, tmp_path) / "metrics.json").read_text()
    assert (
        json.loads(files["json"]["text"])["statistics"]["agent"]["sharpe"]["value"]
        == record.statistics["agent"]["sharpe"].value
    )
    rows = list(csv.DictReader(io.StringIO(files["csv"]["text"])))
    assert len(rows) == sum(map(len, record.statistics.values()))
    found = {(row["track"], row["statistic"]): row for row in rows}
    for name, figures in record.statistics.items():
        for key, figure in figures.items():
            row = found[name, key]
            assert float(row["value"]) == figure.value or np.isnan(figure.value)
            assert row["low"] == ("" if figure.low is None else repr(float(figure.low)))
    assert files["config"]["text"] == record.provenance.config
    assert {known["data-download"] for known in page.find("button", class_="download")} == set(files)


def test_optional_parts_may_be_missing():
    record = example_evaluation(bars=300, seeds=1, full=False)
    page = Page(report_html(record))
    assert page.mistakes == []
    assert set(page.data["figures"]) == ALWAYS - {"seed-equity", "seed-rows"}
    assert {"attack", "population"} & {known.get("id") for known in page.find("section")} == set()
    assert "Training raised no warning" in page.text


def test_almost_nothing_is_enough():
    record = example_evaluation(bars=30, seeds=1, full=False)
    none = record.sanity.regimes.iloc[:0]
    sanity = replace(record.sanity, break_even_cost=None, regimes=none)
    empty = replace(record, sanity=sanity, folds=record.folds.iloc[:0], training=record.training.iloc[:0])
    page = Page(report_html(empty))
    assert page.mistakes == []
    assert {known["id"] for known in page.find("section")} == {
        "money", "comparison", "position", "tail", "calendar", "costs", "provenance",
    }  # fmt: skip
    assert "The agent never traded" in page.text


def test_an_account_that_never_moved_can_be_shown():
    record = example_evaluation(bars=200, seeds=1, full=False)
    still = replace(
        record.agent, returns=np.zeros(200), weights=np.zeros((200, 1)), turnover=np.zeros(200), costs=np.zeros(200)
    )
    page = Page(report_html(replace(record, agent=still)))
    assert "The agent hardly ever held a position" in page.text


def test_portfolios_show_every_asset():
    record = example_evaluation(bars=300, assets=3, seeds=2, full=False)
    prices = Page(report_html(record)).data["figures"]["position"]["panels"][0]
    assert [mark["name"] for mark in prices["marks"]] == ["asset0", "asset1", "asset2"]
    assert all(mark["y"][0] == 1 for mark in prices["marks"])


def test_verdict_comes_first_and_in_plain_words(record, page):
    told = page.text
    names = [history.name for history in record.baselines if "_" in history.name]
    top = told[told.index("The verdict") : told.index("Contents") if "Contents" in told else told.index("Equity")]
    assert top.index("No evidence of skill.") < top.index("Sharpe ratio") < top.index("Reasons")
    assert not [name for name in names if name in top]
    assert not re.search(r"[\s\[]-\d", top)
    assert len(page.find("li")) >= len(record.verdict.reasons)


def test_tabs_are_reachable_by_keys(page):
    tabs, panes = page.find("button", role="tab"), page.find("div", role="tabpanel")
    assert len(tabs) == len(panes) > 10
    assert [tab["aria-controls"] for tab in tabs] == [pane["id"] for pane in panes]
    assert all(known["aria-label"] for known in page.find("div", role="tablist"))


def test_scrolling_tables_have_captions_and_can_be_reached(page):
    regions = page.find("div", class_="scroll") + page.find("div", class_="scroll screen")
    assert len(regions) == len(page.find("table")) == len(page.find("caption")) > 5
    assert all(region["tabindex"] == "0" and region["aria-label"].endswith(".") for region in regions)


def test_long_runs_stay_small_and_quick(tmp_path):
    record = rich_evaluation(bars=10_000)
    start = time.process_time()
    path = write_report(record, tmp_path / "deep" / "report.html")
    assert time.process_time() - start < 20.0
    assert path.stat().st_size < 2_000_000
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    longest = max(len(mark["x"]) for mark in marks_of(Page(path.read_text(encoding="utf-8"))))
    assert longest <= 1202


def test_the_clock_is_shown_only_where_it_matters():
    assert not is_intraday(pd.bdate_range("2020-01-01", periods=9))
    assert not is_intraday(pd.date_range("2020-01-01 16:00", periods=9, freq="D", tz="UTC"))
    assert is_intraday(pd.date_range("2020-01-01", periods=9, freq="h"))


def test_csv_of_strange_names_is_quoted():
    record = example_evaluation(bars=60, seeds=1, full=False)
    record.statistics['a,"b'] = record.statistics["agent"]
    rows = list(csv.reader(io.StringIO(metrics_csv(record))))
    assert {len(row) for row in rows} == {5}
    assert rows[-1][0] == 'a,"b'
