"""The small parts of the report, each against what it promises."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from evaluation_examples import example_evaluation
from hypothesis import given
from hypothesis import strategies as st
from page_reader import Page
from report_examples import lineage, rich_evaluation

from tailguard.evaluate import statistics
from tailguard.evaluate.record import Estimate, source_name
from tailguard.evaluate.report.charts import Mark, downsample, envelope, numbers, seconds
from tailguard.evaluate.report.formatting import (
    MINUS,
    TIMES,
    chance,
    duration,
    readable,
    say,
    signed,
    with_interval,
)
from tailguard.evaluate.report.page import Html, charts_of, join, table, tag
from tailguard.evaluate.report.report import report_html
from tailguard.evaluate.report.sections.robustness import attack_section, break_even_multiple
from tailguard.evaluate.report.sections.stability import rolling, window_of
from tailguard.evaluate.report.sections.tail import mixture_quantiles, tail_section
from tailguard.evaluate.report.sections.training_curves import MemberCopy, MemberHistory, PopulationHistory, read_lineage
from tailguard.evaluate.verdict import Verdict
from tailguard.population.lineage import replay

series = st.lists(st.floats(-100.0, 100.0), min_size=1, max_size=400).map(np.array)


@given(series, st.integers(1, 60))
def test_downsampling_keeps_order_ends_and_extremes(values, buckets):
    at = downsample(values, buckets)
    assert list(at) == sorted(set(at.tolist()))
    assert at[0] == 0
    assert at[-1] == len(values) - 1
    assert values[at].min() == values.min()
    assert values[at].max() == values.max()
    assert len(at) <= max(2 * buckets + 2, 1)


def test_downsampling_keeps_the_extremes_of_every_bucket():
    values = np.random.default_rng(0).normal(size=1000)
    at = set(downsample(values, 10).tolist())
    for first in range(0, 1000, 100):
        part = values[first : first + 100]
        assert {first + int(part.argmin()), first + int(part.argmax())} <= at


def test_downsampling_looks_past_missing_values():
    values = np.full(100, np.nan)
    values[37], values[61] = -1.0, 2.0
    assert {37, 61} <= set(downsample(values, 3).tolist())


@given(series, st.integers(1, 60))
def test_envelope_is_that_of_a_loop(values, buckets):
    at, means, lows, highs = envelope(values, buckets)
    edges = np.linspace(0, len(values), min(buckets, len(values)) + 1).astype(int)
    parts = [values[a:b] for a, b in pairwise(edges)]
    np.testing.assert_allclose(means, [part.mean() for part in parts], atol=1e-9)
    np.testing.assert_array_equal(lows, [part.min() for part in parts])
    np.testing.assert_array_equal(highs, [part.max() for part in parts])
    assert all(a <= place < b for place, a, b in zip(at, edges[:-1], edges[1:], strict=True))


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (0.1234, "percent", "12.3%"), (-0.01234, "percent", f"{MINUS}1.23%"), (0.0, "percent", "0%"), (1.0, "percent", "100%"),
        (0.0696, "number", "0.07"), (-0.001, "number", "0.00"), (1234.5, "number", "1,234"), (-2.0, "number", f"{MINUS}2.00"),
        (1.5, "multiple", f"1.50{TIMES}"), (12345.0, "count", "12,345"), (3.14159, "price", "3.1416"),
        (27000.4, "price", "27,000"),
        (0.00012, "free", f"1.20e{MINUS}04"), (0.168, "free", "0.168"), (0.0291, "free", "0.0291"),
        (math.inf, "percent", "infinite"), (-math.inf, "number", f"{MINUS}infinite"), (math.nan, "number", "none"),
        (None, "number", "none"),
    ],
)  # fmt: skip
def test_numbers_are_said_as_people_read_them(value, kind, said):
    assert say(value, kind) == said


def test_words():
    assert signed(0.25, "percent") == "+25.0%"
    assert signed(-0.25, "percent") == f"{MINUS}25.0%"
    assert with_interval(Estimate(0.5, -1.0, 2.0)) == f"0.50 [{MINUS}1.00 to 2.00]"
    assert with_interval(Estimate(0.5)) == "0.50"
    assert readable("buy_and_hold") == "buy and hold"
    assert (chance(0.0004), chance(0.04)) == ("p < 0.001", "p = 0.040")
    assert (duration(2.0), duration(5.71), duration(0.5)) == ("2 years", "5.7 years", "6 months")


def test_markup_escapes_whatever_is_not_markup():
    assert tag("p", "<b>&", title='"x"', hidden=True, id=None) == '<p title="&quot;x&quot;" hidden>&lt;b&gt;&amp;</p>'
    assert tag("p", tag("b", "x"), " < y") == "<p><b>x</b> &lt; y</p>"
    assert join("<", Html("<br>")) == "&lt;<br>"
    assert tag("meta", name="a", http_equiv="b") == '<meta name="a" http-equiv="b">'
    cells = Page(table(["a", "b"], [["<i>", "2"]], "Caption.")).find()
    assert [known.get("scope") for known in cells].count("row") == 1
    assert "<i>" not in table(["a", "b"], [["<i>", "2"]], "Caption.")


def test_numbers_for_the_page_are_short_and_finite():
    assert numbers([1 / 3, 2.0, np.nan, np.inf, 1577836800.0]) == [0.333333, 2, None, None, 1577836800]
    assert Mark("line", [1, 2], {"y": [3.0, 4.5]}).data()["y"] == [3, 4.5]


def test_seconds_do_not_depend_on_the_unit_or_the_zone():
    times = example_evaluation(bars=60, full=False).agent.times
    expected = [time.timestamp() for time in times]
    for same in (
        times,
        times.as_unit("s"),
        times.as_unit("ns"),
        times.tz_localize("UTC"),
        times.tz_localize("UTC").tz_convert("Asia/Tokyo"),
    ):
        np.testing.assert_array_equal(seconds(same), expected)


def test_rolling_figures_are_those_of_a_loop():
    values = np.random.default_rng(0).normal(size=200)
    means, deviations = rolling(values, 30)
    stretches = [values[i : i + 30] for i in range(171)]
    np.testing.assert_allclose(means, [part.mean() for part in stretches])
    np.testing.assert_allclose(deviations, [part.std(ddof=1) for part in stretches])
    assert (window_of(2520, 252.0), window_of(100, 252.0), window_of(40, 8760.0)) == (126, 25, 10)


def test_rolling_chart_against_the_statistics(tmp_path):
    record = example_evaluation(bars=600, full=False)
    chart = Page(report_html(record)).data["figures"]["rolling"]
    lines = [{mark["name"]: mark for mark in panel["marks"] if mark["type"] == "line"} for panel in chart["panels"]]
    last = slice(-126, None)
    agent, market = record.agent.returns[last], record.history("buy_and_hold").returns[last]
    assert lines[0]["agent"]["y"][-1] == pytest.approx(statistics.sharpe(agent, 252.0), rel=1e-4)
    assert lines[0]["buy and hold"]["y"][-1] == pytest.approx(statistics.sharpe(market, 252.0), rel=1e-4)
    assert lines[1]["agent"]["y"][-1] == pytest.approx(statistics.volatility(agent, 252.0), rel=1e-4)
    assert lines[2]["agent"]["y"][-1] == pytest.approx(statistics.alpha_beta(agent, market, 252.0).beta, rel=1e-4)


def test_quantiles_of_a_mixture_are_those_of_a_large_sample():
    levels = np.array([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98])
    generator = np.random.default_rng(0)
    places, widths = generator.normal(size=300), generator.uniform(0.5, 2.0, 300)
    fine = (np.arange(199) + 0.5) / 199
    normal = np.sort(np.random.default_rng(1).normal(size=200_000))
    quantiles = places[:, None] + widths[:, None] * np.quantile(normal, fine)
    sample = (places[:, None] + widths[:, None] * generator.normal(size=(300, 3000))).ravel()
    found = np.interp(levels, fine, mixture_quantiles(quantiles, fine))
    np.testing.assert_allclose(found, np.quantile(sample, levels), atol=0.06)


def test_a_mixture_of_equal_distributions_is_that_distribution_at_uneven_levels_too():
    levels = np.array([0.005, 0.015, 0.03, 0.52, 0.9])
    quantiles = np.array([-3.0, -2.0, -1.0, 5.0, 6.0])
    np.testing.assert_allclose(mixture_quantiles(np.tile(quantiles, (2500, 1)), levels), quantiles, atol=0.02)


@pytest.mark.parametrize(
    ("change", "headline"),
    [
        (lambda q: 3.0 * q, "too wide a range of returns"),
        (lambda q: 0.3 * q, "too narrow a range of returns"),
        (lambda q: q + 0.02, "higher returns than were realised"),
        (lambda q: q - 0.02, "lower returns than were realised"),
    ],
)
def test_tail_headline_says_how_the_forecast_was_wrong(change, headline):
    record = example_evaluation()
    right = record.calibration
    quantiles = change(right.quantiles)
    transforms = statistics.probability_transform(right.outcomes, quantiles, right.levels)
    wrong = replace(right, quantiles=quantiles, uniformity=statistics.uniformity(transforms))
    assert wrong.uniformity.p_value < 0.05
    assert tail_section(replace(record, calibration=wrong)).headline == f"The forecast predicted {headline}"


@pytest.mark.parametrize(("exceptions", "said"), [(60, "more often"), (5, "less often"), (30, "about as often")])
def test_tail_headline_counts_exceptions(exceptions, said):
    record = example_evaluation()
    outcomes = np.concatenate([np.full(exceptions, -1.0), np.zeros(600 - exceptions)])
    test = statistics.kupiec(outcomes, -0.5, 0.05)
    calm = replace(record.calibration.uniformity, p_value=0.5)
    section = tail_section(replace(record, calibration=replace(record.calibration, coverage={0.05: test}, uniformity=calm)))
    assert said in section.headline


def test_break_even_in_multiples_of_what_was_paid():
    record = example_evaluation(full=False)  # pays 5 basis points
    assert break_even_multiple(record) == pytest.approx(record.sanity.break_even_cost / 0.0005)
    assert break_even_multiple(replace(record, sanity=replace(record.sanity, break_even_cost=None))) is None


@pytest.mark.parametrize(
    ("outcome", "headline", "mark"),
    [
        ("evidence of skill", "Evidence of skill.", "verdict yes"),
        ("worse than", "Worse than buy and hold.", "verdict no"),
        ("too little data to tell", "Too little data to tell: about 9.1 years.", "verdict open"),
    ],
)
def test_every_outcome_has_its_words_and_its_mark(outcome, headline, mark):
    raw = {"worse than": "worse than buy_and_hold", "too little data to tell": "too little data to tell: about 9.1 years"}
    verdict = Verdict(outcome, raw.get(outcome, outcome), ("Lead over own_mix -0.50 [-1.00, +0.10], rank 1-2.",))
    page = Page(report_html(replace(example_evaluation(bars=60, seeds=1, full=False), verdict=verdict)))
    assert headline in page.text
    assert page.find("div", class_=mark)
    assert f"Lead over own mix {MINUS}0.50 [{MINUS}1.00, +0.10], rank 1-2." in page.text


def test_lineage_is_read_as_the_population_itself_replays_it():
    events = lineage()
    history, members = read_lineage(events), replay(events)
    assert sorted(history.members) == [member.member_id for member in members]
    for member in members:
        life = history.members[member.member_id]
        assert life.steps == [entry["step"] for entry in member.history]
        assert life.scores == [entry["performance"] for entry in member.history]
        assert life.values == [entry["hyperparams"] for entry in member.history]
    assert len(history.copies) == sum(member.generation for member in members)
    assert history.copies[-1].source == members[history.copies[-1].target].parent


def test_ancestors_follow_copies_back():
    lives = {i: MemberHistory([10.0, 20.0, 30.0], [float(i), float(i + 1), float(i + 2)], [{}, {}, {}]) for i in range(3)}
    history = PopulationHistory(lives, [MemberCopy(10.0, 1, 0), MemberCopy(20.0, 0, 2)], "score", True)
    assert history.best == 2
    # The third member was the first from step 20 back to 10, and that one was the second before.
    assert history.ancestors(2) == [(1, 0), (0, 1), (2, 2)]
    assert history.ancestors(1) == [(1, 0), (1, 1), (1, 2)]
    assert replace(history, more_is_better=False).best == 0
    assert history.score_at(2, 25.0) == 3.0
    assert history.score_at(2, 5.0) is None


def test_scores_that_are_not_finite_leave_a_gap():
    events = [
        {"event": "start", "config": {"metric_mode": "min", "metric_name": "loss"}, "hyperparams": [{"a": 1.0}, {"a": 2.0}]},
        {"event": "report", "member": 0, "step": 5, "scores": [None]},
        {"event": "report", "member": 1, "step": 5, "scores": [1.0, 3.0]},
        {"event": "abandoned", "target": 0, "source": 1},
    ]
    history = read_lineage(events)
    assert math.isnan(history.members[0].scores[0])
    assert history.members[1].scores == [2.0]
    assert (history.best, history.metric, history.more_is_better) == (1, "loss", False)


def test_a_population_without_scores_is_said_to_be_one():
    record = example_evaluation(bars=60, full=False)
    page = Page(report_html(replace(record, lineage=[{"event": "round", "number": 1, "considered": []}])))
    assert "A population without scores" in page.text


def test_folds_show_the_sharpe_ratio_of_their_own_bars():
    record = rich_evaluation(bars=600)
    rows = Page(report_html(record)).data["figures"]["fold-rows"]["panels"][0]["rows"]
    assert len(rows) == 3
    for row, part in zip(rows, np.split(record.agent.returns, 3), strict=True):
        assert row["value"] == pytest.approx(statistics.sharpe(part, 252.0))
    assert [len(row["dots"]) for row in rows] == [6, 6, 6]


def test_attacks_start_from_the_agent_left_alone():
    record = rich_evaluation(bars=200)
    section = attack_section(record)
    assert section.title == "Adversarial attacks"
    assert section.headline == f"Sharpe ratio 0.40 without an attack, {say(0.4 - 4.0 * 0.1)} under the worst attack"
    charts = {chart.id: chart for chart in charts_of(section.blocks)}
    assert list(charts) == ["attack-sharpe", "attack-cagr", "attack-max_drawdown"]
    for panel, slope in zip(charts["attack-sharpe"].panels, (2.5, 4.0, 0.05), strict=True):
        line = panel.marks[1]
        np.testing.assert_allclose(line.columns["y"], 0.4 - slope * np.asarray(line.x))
        assert line.x[0] == 0.0
    # Of a drawdown more is worse.
    assert say(0.2 + 0.3 * 4.0 * 0.1, "percent") in charts["attack-max_drawdown"].summary


def test_attacks_that_do_no_harm_are_said_to_do_none():
    record = rich_evaluation(bars=200)
    harmless = record.attack.assign(value=0.3, low=0.1, high=0.5)
    assert attack_section(replace(record, attack=harmless)).headline == "Sharpe ratio: no attack made it worse"
    single = harmless[harmless["statistic"] == "cagr"]
    assert len(charts_of(attack_section(replace(record, attack=single)).blocks)) == 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("nasdaq-1d", "nasdaq-1d"),
        ("/home/me/a.csv", "a.csv"),
        ("/home/me/a.csv+/srv/b.csv", "a.csv+b.csv"),
        ("C:\\data\\a.csv", "a.csv"),
        ("data/a.csv", "data/a.csv"),
    ],
)
def test_absolute_paths_are_cut_to_names(source, name):
    assert source_name(source) == name
    record = example_evaluation(bars=60, seeds=1, full=False)
    config = f"data:\n- {source}\n"
    page = report_html(replace(record, source=source, provenance=replace(record.provenance, config=config)))
    assert name in page
    assert (source in page) == (source == name)
