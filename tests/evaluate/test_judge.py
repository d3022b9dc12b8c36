"""Anybody's strategy: the same verdict as an agent's, from weights, from returns, and from a function."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest

import tailguard
from tailguard.evaluate import inputs, statistics
from tailguard.evaluate.assessment import Effort
from tailguard.evaluate.judge import LookAheadError, require_causal
from tailguard.evaluate.record import load_record
from tailguard.evaluate.report.report import report_html
from tailguard.evaluate.verdict import VerdictRules
from tailguard.market import TradingRules, ar1_returns, load_bars, load_dataset, random_walk, simulate
from tailguard.market.baselines import STRATEGIES
from tailguard.market.data import DataError

QUICK = Effort(draws=200, permutations=79)
FREE = {"fee": 0.0}


@pytest.fixture(scope="module")
def bars():
    """Returns that are correlated in time, which trading with the last move can use."""
    return ar1_returns(1500, rho=0.35, overnight_share=0.1, seed=1)


def follow(bars):
    return np.sign(bars["close"].pct_change().fillna(0.0)).to_numpy()


@pytest.fixture(scope="module")
def judged(bars):
    return tailguard.judge(weights=pd.Series(follow(bars), bars.index), bars=bars, trading=FREE, effort=QUICK)


def test_weights_are_traded_again_under_our_accounting(bars, judged):
    result = simulate(bars, follow(bars), fee=0.0)
    agent = judged.evaluation.agent
    np.testing.assert_allclose(agent.returns, result.equity[1:] / result.equity[:-1] - 1.0, rtol=0, atol=1e-14)
    assert judged.verdict.outcome == "evidence of skill"
    assert judged.statistics["agent"]["sharpe"].value == statistics.sharpe(agent.returns, judged.evaluation.periods_per_year)
    assert judged.evaluation.seeds == []
    assert {"buy_and_hold", "cash", "own_mix", "own_permuted"} <= set(judged.statistics)


def test_the_record_and_the_report_are_those_of_an_evaluation(judged, tmp_path):
    path = judged.save(tmp_path / "out")
    assert path == tmp_path / "out" / "report.html"
    metrics = json.loads((tmp_path / "out" / "evaluation" / "metrics.json").read_text())
    assert metrics["statistics"]["agent"]["sharpe"]["value"] == judged.statistics["agent"]["sharpe"].value
    assert (metrics["verdict"]["outcome"], metrics["bars"]) == ("evidence of skill", 1499)
    # A strategy that knows the future beats every tail that is predicted for its positions: the prediction fails its test.
    assert (metrics["calibration"]["period"], metrics["calibration"]["holds"]) == ("month", False)
    back = load_record(tmp_path / "out" / "evaluation")
    np.testing.assert_array_equal(back.agent.returns, judged.evaluation.agent.returns)
    assert back.subject == "strategy"
    page = path.read_text()
    assert "The strategy&#x27;s maximum drawdown" in page
    assert "the agent" not in page.split("<script")[0]
    assert "Evidence of skill." in judged._repr_html_()
    assert "Sharpe ratio" in judged._repr_html_()


def test_weights_at_some_bars_are_held_until_the_next(bars):
    every = pd.Series(np.where(np.arange(40) % 2 == 0, 1.0, 0.2), bars.index[100:900:20])
    agent = tailguard.judge(weights=every, bars=bars, trading=FREE, effort=QUICK).evaluation.agent
    targets = np.full(len(bars), np.nan)
    targets[100:900:20] = every
    equity = simulate(bars, targets, fee=0.0).equity
    assert (agent.times[0], agent.times[-1]) == (bars.index[101], bars.index[881])
    np.testing.assert_allclose(agent.returns, (equity[1:] / equity[:-1] - 1.0)[100:881], rtol=0, atol=1e-12)
    # Decided between two bars: known at the second of them.
    late = every.set_axis(every.index - pd.Timedelta(hours=3))
    same = tailguard.judge(weights=late, bars=bars, trading=FREE, effort=QUICK).evaluation.agent
    np.testing.assert_array_equal(same.returns, agent.returns)


def test_returns_have_the_statistics_of_the_same_account(bars, judged):
    """What needs weights is left out, what does not is the same to the last digit."""
    agent = judged.evaluation.agent
    found = tailguard.judge(pd.Series(agent.returns, agent.times), benchmark=bars, effort=QUICK)
    both = set(found.statistics["agent"]) & set(judged.statistics["agent"])
    assert set(judged.statistics["agent"]) - both == {"turnover", "exposure", "net_exposure", "costs", "cost_share"}
    periods = statistics.sharpe(agent.returns, 1.0) / statistics.sharpe(agent.returns, found.evaluation.periods_per_year)
    market = bars["close"].pct_change().iloc[1:].to_numpy()
    relation = statistics.alpha_beta(agent.returns, market, found.evaluation.periods_per_year)
    assert periods < 1.0
    assert found.statistics["agent"]["alpha_t"].value == pytest.approx(relation.alpha_t)
    assert found.statistics["agent"]["max_drawdown"].value == judged.statistics["agent"]["max_drawdown"].value
    assert found.verdict.outcome == "evidence of skill"
    assert [history.name for history in found.evaluation.baselines] == ["benchmark", "cash"]


def test_the_report_of_returns_says_what_is_missing(bars, judged, tmp_path):
    agent = judged.evaluation.agent
    found = tailguard.judge(pd.Series(agent.returns, agent.times), effort=QUICK)
    page = found.save(tmp_path).read_text().split("<script")[0]
    assert "What returns alone cannot show" in page
    for check in ("Timing", "Costs", "Positions and trades", "Look-ahead", "Alpha"):
        assert f">{check}</th>" in page
    assert 'id="position"' not in page
    assert 'id="costs"' not in page
    back = load_record(tmp_path / "evaluation")
    assert back.sanity.delay is None
    assert not back.agent.traded


def drifting(seed, sharpe=0.5, years=20):
    n = 252 * years
    moves = np.random.default_rng(seed).normal(sharpe * 0.01 / np.sqrt(252), 0.01, n)
    return pd.Series(moves, pd.bdate_range("2000-01-03", periods=n))


def test_a_market_without_a_benchmark_is_hardly_ever_skill():
    """Buy and hold with a Sharpe ratio of 0.5 for 20 years beats cash nearly always, and proves nothing."""
    outcomes = [tailguard.judge(drifting(seed), effort=Effort(draws=50)).verdict.outcome for seed in range(20)]
    assert outcomes.count("evidence of skill") <= 3  # 5 % are expected: more than 3 of 20 happen once in 60 times
    found = tailguard.judge(drifting(0), effort=Effort(draws=50))
    assert found.statistics["agent"]["deflated_sharpe"].value > 0.95
    assert any("There is no benchmark to measure alpha over" in reason for reason in found.verdict.reasons)
    strong = tailguard.judge(drifting(0, sharpe=2.0, years=10), effort=Effort(draws=50))
    assert strong.verdict.outcome == "evidence of skill"


def test_the_benchmark_in_disguise_has_no_skill():
    market = drifting(0, sharpe=1.0)
    found = tailguard.judge(0.7 * market, benchmark=market, effort=Effort(draws=50))
    assert found.verdict.outcome == "no evidence of skill"
    assert found.statistics["agent"]["beta"].value == pytest.approx(0.7)
    assert found.statistics["agent"]["alpha"].value == pytest.approx(0.0, abs=1e-10)


def test_the_benchmark_may_have_other_bars():
    """Weekly returns against daily prices: each week is compared with the same week of the market."""
    market = drifting(1, years=4)
    levels = (1.0 + market).cumprod()
    weekly = levels.resample("W-FRI").last().pct_change().dropna()
    found = tailguard.judge(weekly, benchmark=levels, effort=Effort(draws=50)).evaluation
    np.testing.assert_allclose(found.history("benchmark").returns, found.agent.returns, rtol=0, atol=1e-12)
    assert found.periods_per_year == pytest.approx(52.18, abs=0.02)
    part = tailguard.judge(market, benchmark=market.iloc[302:702], effort=Effort(draws=50)).evaluation
    assert (part.agent.times[0], part.agent.times[-1]) == (market.index[302], market.index[701])
    with pytest.raises(DataError, match="0 bars inside the benchmark; at least 8 are needed"):
        tailguard.judge(market.iloc[:100], benchmark=market.iloc[300:])


def test_the_benchmark_may_be_a_shipped_set():
    market = load_dataset("nasdaq-1d")["close"].iloc[-400:]
    found = tailguard.judge(market.pct_change().iloc[1:], benchmark="nasdaq-1d", effort=Effort(draws=50))
    assert found.statistics["agent"]["beta"].value == pytest.approx(1.0)


def test_a_benchmark_belongs_to_its_day_whatever_its_time_of_day():
    market = drifting(1, years=4)
    closes = (1.0 + market).cumprod()
    afternoon = closes.set_axis(closes.index + pd.Timedelta(hours=16)).tz_localize("America/New_York")
    found = tailguard.judge(market.iloc[1:], benchmark=afternoon, effort=Effort(draws=50)).evaluation
    np.testing.assert_allclose(found.history("benchmark").returns, market.iloc[1:], rtol=0, atol=1e-12)
    monthly = closes.resample("MS").last().pct_change().iloc[1:]  # labelled by its first day; the last is not over
    found = tailguard.judge(monthly, benchmark=closes, effort=Effort(draws=50)).evaluation
    np.testing.assert_allclose(found.history("benchmark").returns, monthly.iloc[:-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("shift", "when"), [(1, "before"), (-1, "after")])
def test_a_benchmark_whose_times_are_shifted_is_refused(shift, when):
    market = drifting(1, years=4)
    with pytest.raises(DataError, match=rf"the benchmark's of the bar {when} \(correlation 1\.00, .* move them by a bar"):
        tailguard.judge(market.shift(shift).dropna(), benchmark=market)
    hourly = pd.Series(market.to_numpy()[:500], pd.date_range("2020-01-01", periods=500, freq="h"))
    days = pd.Series(100.0, pd.date_range("2019-12-01", periods=90))
    with pytest.raises(DataError, match="benchmark: a value per 1 day, and bars of 1 hour; give a benchmark with as many"):
        tailguard.judge(hourly, benchmark=days)


def test_minutes_and_single_gains_can_be_judged():
    """Figures per year of a few minutes are infinite, and no error; one gain after nothing is no cumulated return."""
    minutes = pd.date_range("2020-01-01 09:30", periods=400, freq="min")
    found = tailguard.judge(pd.Series(drifting(0).to_numpy()[:400] + 0.002, minutes), effort=Effort(draws=50))
    assert found.statistics["agent"]["cagr"].value == found.statistics["agent"]["calmar"].value == np.inf
    assert found.verdict.outcome == "evidence of skill"
    last = pd.Series(np.r_[np.zeros(399), 0.9], drifting(0).index[:400])
    assert tailguard.judge(last, effort=Effort(draws=50)).verdict.outcome != "evidence of skill"


def test_percentages_that_could_be_returns_get_a_word():
    small = 100.0 * drifting(0, years=4).clip(-0.009, 0.009)
    assert "A volatility of 1" in tailguard.judge(small, effort=Effort(draws=50)).verdict.reasons[-1]
    calm = 0.06 / 0.01 * drifting(0, years=4)  # percentages of a fund of bonds
    assert "A volatility of 9" in tailguard.judge(calm, effort=Effort(draws=50)).verdict.reasons[-1]
    usual = tailguard.judge(4.0 * drifting(0, years=4), effort=Effort(draws=50)).verdict.reasons
    assert not any("A volatility" in reason for reason in usual)


def test_weights_of_a_day_are_known_at_its_end():
    """Daily weights on hourly bars may be made of the whole day; those with a time of day are known at it."""
    bars = random_walk(24 * 40, seed=2).set_index(pd.date_range("2020-01-01", periods=24 * 40, freq="h"))
    weights = pd.Series(np.arange(30) / 30.0, pd.date_range("2020-01-03", periods=30))
    agent = tailguard.judge(weights=weights, bars=bars, trading=FREE, effort=QUICK).evaluation.agent
    assert agent.times[0] == pd.Timestamp("2020-01-04 00:00")  # decided at 23:00 on the third
    timed = weights.set_axis(weights.index + pd.Timedelta(hours=9, minutes=30))
    agent = tailguard.judge(weights=timed, bars=bars, trading=FREE, effort=QUICK).evaluation.agent
    assert agent.times[0] == pd.Timestamp("2020-01-03 11:00")
    daily = random_walk(600, seed=2)
    late = pd.Series(1.0, daily.index[100:500] + pd.Timedelta(hours=16))
    found = tailguard.judge(weights=late, bars=daily, effort=QUICK)
    assert found.verdict.reasons[-1].startswith("400 weights lie after the bar of their day")
    assert found.evaluation.agent.times[0] == daily.index[102]


HOURS = pd.date_range("2020-01-01", periods=24 * 60, freq="h")
HOURLY = random_walk(len(HOURS), seed=4).set_index(HOURS.rename("time"))


def test_times_of_which_only_some_name_a_zone_are_refused(tmp_path):
    """Weights that follow the last move of a random walk would have earned the moves of the next nine hours."""
    weights = pd.Series(np.sign(HOURLY["close"].diff(8).fillna(0.0)), HOURS, name="weight")
    path, bars = tmp_path / "weights.csv", tmp_path / "bars.csv"
    weights.tz_localize("Asia/Tokyo").to_csv(path, index_label="time")
    HOURLY.to_csv(bars)
    refusal = "the times of the weights name their zone and those of the bars do not; .* --timezone"
    for given in (path, weights.tz_localize("Asia/Tokyo")):
        for traded in (str(bars), HOURLY):
            with pytest.raises(DataError, match=refusal):
                tailguard.judge(weights=given, bars=traded, trading=FREE, effort=QUICK)
    right = tailguard.judge(weights=path, bars=str(bars), trading=FREE, effort=QUICK, timezone="Asia/Tokyo")
    assert right.verdict.outcome != "evidence of skill"
    same = tailguard.judge(weights=weights, bars=HOURLY, trading=FREE, effort=QUICK)
    np.testing.assert_array_equal(right.evaluation.agent.returns, same.evaluation.agent.returns)
    weights.to_csv(path, index_label="time")
    HOURLY.tz_localize("Asia/Tokyo").to_csv(bars)
    with pytest.raises(DataError, match="the times of the bars name their zone and those of the weights do not"):
        tailguard.judge(weights=path, bars=str(bars), trading=FREE, effort=QUICK)
    loaded = load_bars(bars)  # in UTC, without saying so: weights are made of it
    made = tailguard.judge(weights=weights.set_axis(loaded.index), bars=loaded, trading=FREE, effort=QUICK)
    np.testing.assert_array_equal(made.evaluation.agent.returns, same.evaluation.agent.returns)
    returns = HOURLY["close"].pct_change().iloc[1:]
    with pytest.raises(DataError, match="the times of the returns name their zone and those of the benchmark do not"):
        tailguard.judge(returns.tz_localize("Etc/GMT+5"), benchmark=HOURLY)


def test_skill_by_times_that_name_no_zone_comes_with_a_caution():
    """Nobody can see that these weights, written in another zone than the bars, use the next five hours."""
    weights = pd.Series(np.sign(HOURLY["close"].diff(5).shift(-5).fillna(0.0)), HOURS)
    found = tailguard.judge(weights=weights, bars=HOURLY, trading=FREE, effort=QUICK)
    assert found.verdict.outcome == "evidence of skill"
    assert found.verdict.reasons[-1].startswith("The times of weights and bars name no zone and are taken to be on one clock")
    zoned = tailguard.judge(weights=weights, bars=HOURLY, trading=FREE, effort=QUICK, timezone="UTC")
    assert "zone" not in " ".join(zoned.verdict.reasons)
    edge = ar1_returns(1500, rho=0.6, overnight_share=0.1, seed=1)
    edge = edge.set_index(pd.date_range("2020-01-01", periods=1500, freq="h", name="time"))
    decided = tailguard.judge_strategy(follow, edge, trading=FREE, effort=QUICK)
    assert decided.verdict.outcome == "evidence of skill"
    assert "zone" not in " ".join(decided.verdict.reasons)


def test_skill_that_is_gone_a_bar_later_comes_with_a_caution(bars):
    """Weights that stand a bar too early know the next move of a random walk; nothing but the delay shows it."""
    walk = random_walk(1000, seed=5)
    ahead = pd.Series(np.sign(walk["close"].diff().shift(-1).fillna(0.0)), walk.index)
    found = tailguard.judge(weights=ahead, bars=walk, trading=FREE, effort=QUICK)
    assert found.verdict.outcome == "evidence of skill"
    assert found.verdict.reasons[-1].startswith("Traded one bar later, the Sharpe ratio is ")
    slow = ar1_returns(1500, rho=0.35, overnight_share=0.1, seed=1)
    decided = tailguard.judge_strategy(follow, slow, trading=FREE, effort=QUICK)
    assert not any("one bar later" in reason for reason in decided.verdict.reasons)


def test_symbols_whose_times_name_no_zone_may_be_on_different_clocks():
    """One symbol is the other, written in a zone three hours ahead: following it is look-ahead, and no function shows that."""
    early = HOURLY.set_index(HOURS - pd.Timedelta(hours=3)).iloc[3:]
    table = {"a": HOURLY.iloc[:-3], "b": early}
    assert table["a"].index.equals(early.index.rename("time"))

    def lead(bars):
        moves = np.sign(bars["b"]["close"].diff(3).fillna(0.0)).to_numpy()
        return np.stack([moves, np.zeros(len(moves))], axis=1)

    found = tailguard.judge_strategy(lead, table, trading=FREE, effort=QUICK)
    assert found.verdict.outcome == "evidence of skill"
    assert found.verdict.reasons[-1].startswith("The times of bars and bars of the other symbols name no zone")
    zoned = {name: bars.tz_localize("UTC") for name, bars in table.items()}
    assert "zone" not in " ".join(tailguard.judge_strategy(lead, zoned, trading=FREE, effort=QUICK).verdict.reasons)


@pytest.mark.parametrize("hours", [5, -9, 5.5])
def test_a_benchmark_in_another_time_zone_is_refused(hours):
    half = pd.date_range("2020-01-01", periods=2000, freq="30min")
    market = pd.Series(drifting(2).to_numpy()[:2000], half)
    mine = 0.5 * market + 0.005 * np.random.default_rng(3).standard_normal(2000)
    moved = mine.set_axis(half + pd.Timedelta(hours=hours))
    when = "before" if hours > 0 else "after"
    with pytest.raises(
        DataError, match=rf"the benchmark's of {abs(hours):g} hours {when} .* move them by {abs(hours):g} hours"
    ):
        tailguard.judge(moved, benchmark=market)
    faint = 0.3 * market + 0.01 * np.random.default_rng(3).standard_normal(2000)
    found = tailguard.judge(faint.set_axis(moved.index), benchmark=market, effort=Effort(draws=50))
    assert any(f"move more with the benchmark's of {abs(hours):g} hours {when}" in reason for reason in found.verdict.reasons)
    assert not any("move more" in reason for reason in tailguard.judge(mine, benchmark=market, effort=QUICK).verdict.reasons)


def test_days_of_weights_end_where_their_zone_ends():
    """A weight of a day in New York may be made of bars up to five in the morning in UTC."""
    bars = HOURLY.tz_localize("UTC")
    weights = pd.Series(np.arange(40) / 40.0, pd.date_range("2020-01-03", periods=40))
    found = tailguard.judge(weights=weights, bars=bars, trading=FREE, effort=QUICK)
    assert found.evaluation.agent.times[0] == pd.Timestamp("2020-01-04 00:00")
    assert found.verdict.reasons[-1].startswith("The weights have days and no times of day: their days are taken to end at")
    there = tailguard.judge(weights=weights, bars=bars, trading=FREE, effort=QUICK, timezone="America/New_York")
    assert there.evaluation.agent.times[0] == pd.Timestamp(
        "2020-01-04 05:00"
    )  # decided at four, the last before midnight there
    assert not any("their days" in reason or "after the bar of their day" in reason for reason in there.verdict.reasons)


def test_closes_can_be_traded_at_the_next_close(tmp_path):
    table = {name: random_walk(400, seed=seed) for seed, name in enumerate("AB")}
    closes = pd.DataFrame({name: bars["close"] for name, bars in table.items()})
    weights = pd.DataFrame({"A": np.tile([1.0, 0.0], 200), "B": 0.0}, closes.index)
    closes.to_csv(tmp_path / "closes.csv")
    for given in (closes, str(tmp_path / "closes.csv"), tmp_path / "closes.csv"):
        found = tailguard.judge(weights=weights, bars=given, trading=FREE, effort=QUICK)
        expected = simulate(load_bars(table), weights.to_numpy(), fee=0.0, fill="next_close").equity
        np.testing.assert_allclose(found.evaluation.agent.returns, expected[1:] / expected[:-1] - 1.0, rtol=0, atol=1e-12)
        assert found.verdict.reasons[-1].startswith("The bars have closes only, without opens: orders are filled at the next")
    single = tailguard.judge(weights=weights["A"], bars=closes["A"], trading=FREE, effort=QUICK)
    np.testing.assert_allclose(single.evaluation.agent.returns, found.evaluation.agent.returns, atol=1e-12)
    strategy = tailguard.judge_strategy(follow, closes["A"], trading=FREE | {"fill": "close"}, effort=QUICK)
    assert "closes only" not in " ".join(strategy.verdict.reasons)
    for wrong, message in (
        (closes["A"].pct_change().iloc[1:], "not positive"),
        (pd.DataFrame(table["A"][["open", "close"]]), "no column for high, low"),
    ):
        with pytest.raises(DataError, match=message):
            tailguard.judge(weights=weights["A"], bars=wrong, trading=FREE, effort=QUICK)


def test_a_benchmark_beside_weights_has_to_be_beaten(bars):
    weights = pd.Series(follow(bars), bars.index)
    found = tailguard.judge(weights=weights, bars=bars, benchmark=bars, trading=FREE, effort=QUICK)
    assert any(reason.startswith("Better than benchmark") for reason in found.verdict.reasons)
    np.testing.assert_allclose(found.evaluation.history("benchmark").returns, bars["close"].pct_change().iloc[1:], atol=1e-15)


@pytest.mark.parametrize("rate", [0.03, pd.Series([0.03, 0.03], pd.to_datetime(["1990-01-01", "2005-01-01"]))])
def test_interest_is_taken_out_of_returns_too(rate):
    """Cash that earns its rate has no Sharpe ratio, whether the rate is a number or a table."""
    days = pd.bdate_range("2000-01-03", periods=600)
    calendar = np.diff(days, prepend=days[0] - pd.Timedelta(days=1)) / np.timedelta64(1, "D") / 365.25
    found = tailguard.judge(pd.Series(0.03 * calendar, days), cash_rate=rate, effort=Effort(draws=50))
    assert found.statistics["agent"]["sharpe"].value == found.statistics["cash"]["sharpe"].value == 0.0
    assert found.verdict.outcome == "no evidence of skill"
    assert "did not trade" in " ".join(found.verdict.reasons)


def test_bars_before_the_first_rate_are_left_out():
    """As those before a benchmark are: a table of rates often begins with the returns, which are earned from the day before."""
    market = drifting(1, years=4)
    rates = pd.Series(np.linspace(0.0, 0.05, len(market)), market.index, name="rate")
    found = tailguard.judge(market, cash_rate=rates, effort=Effort(draws=50))
    assert found.evaluation.agent.times[0] == market.index[1]
    assert "left out" not in " ".join(found.verdict.reasons)
    found = tailguard.judge(market, cash_rate=rates.iloc[99:], effort=Effort(draws=50))
    assert "100 bars of the returns lie before the first cash rate, and are left out." in found.verdict.reasons
    with pytest.raises(DataError, match="3 bars inside the cash rate; at least 8 are needed"):
        tailguard.judge(market.iloc[:100], cash_rate=rates.iloc[96:])


def test_rates_of_a_file_of_factors_get_a_word(caplog, tmp_path, monkeypatch):
    market = drifting(1, years=4)
    path = tmp_path / "factors.csv"
    pd.Series(0.019, market.index, name="RF").to_csv(path)
    monkeypatch.setattr(inputs.logger, "handlers", [caplog.handler])  # the command line may have taken it over
    monkeypatch.setattr(inputs.logger, "propagate", False)
    with caplog.at_level("INFO", inputs.logger.name):
        found = tailguard.judge(market, cash_rate=path, effort=Effort(draws=50))
    assert "interest rates (1.90% per year in the middle)" in caplog.messages[-1]
    assert found.verdict.reasons[-1].startswith("The cash rate in column RF is taken to be per year, 1.90% in the middle")


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, int])
def test_a_rate_may_be_any_number(kind):
    rate = kind(0) if kind in (int, np.int64) else kind(0.03125)
    found = tailguard.judge(drifting(1, years=4), cash_rate=rate, effort=Effort(draws=50)).evaluation
    assert found.agent.riskless[1] == pytest.approx(float(rate) / 365.25)


def test_a_table_of_rates_is_paid_on_idle_cash(bars):
    rates = pd.Series([0.02, 0.05], bars.index[[0, 700]])
    idle = pd.Series(0.0, bars.index)
    found = tailguard.judge(weights=idle, bars=bars, cash_rate=rates, effort=QUICK).evaluation
    years = np.diff(bars.index) / np.timedelta64(1, "D") / 365.25
    np.testing.assert_allclose(found.agent.returns, np.where(np.arange(1499) < 700, 0.02, 0.05) * years, atol=1e-15)
    assert found.statistics["cash"]["sharpe"].value == 0.0


def test_an_idle_account_is_not_worse_than_luck():
    """Twenty idle accounts: random positions that happened to win are no strategy to prefer."""
    for seed in range(20):
        bars = random_walk(600, seed=seed)
        found = tailguard.judge(weights=pd.Series(0.0, bars.index), bars=bars, effort=Effort(draws=100, permutations=9))
        assert not set(found.verdict.worse_than) & {"random_positions", "own_permuted"}


def test_a_function_that_does_not_look_ahead_is_judged(bars, judged):
    found = tailguard.judge_strategy(follow, bars, trading=FREE, effort=QUICK)
    np.testing.assert_allclose(found.evaluation.agent.returns, judged.evaluation.agent.returns[1:], rtol=0, atol=1e-12)
    assert found.evaluation.title == "follow"


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_baselines_do_not_look_ahead(name):
    bars = load_bars({"a": random_walk(400, seed=1), "b": random_walk(400, seed=2)})
    assert require_causal(STRATEGIES[name], bars).shape == (400, 2)


def tomorrow(bars):
    return np.sign(bars["close"].shift(-1) - bars["close"]).fillna(0.0).to_numpy()


def standardised(bars):
    """A mean over the whole series is a look ahead that is easily overlooked."""
    moves = bars["close"].pct_change().fillna(0.0)
    return np.clip((moves - moves.mean()) / moves.std(), -1.0, 1.0).to_numpy()


def best_of(bars):
    """The better of two rules, chosen by the last price."""
    return np.full(len(bars), 1.0 if bars["close"].iloc[-1] > bars["close"].iloc[0] else -1.0)


def centred(bars):
    close = bars["close"]
    return np.sign(close.rolling(5, center=True, min_periods=1).mean() - close).to_numpy()


def filled_back(bars):
    """Month ends, known from the first of the month on."""
    close = bars["close"]
    months = close.resample("ME").last().pct_change().reindex(close.index, method="bfill")
    return np.sign(months.fillna(0.0)).to_numpy()


def fitted(bars):
    """A regression over all bars, used on all of them."""
    moves = bars["close"].pct_change().fillna(0.0).to_numpy()
    slope = np.polyfit(moves[:-1], moves[1:], 1)[0]
    return np.clip(100.0 * slope * moves, -1.0, 1.0)


def seldom(bars):
    """In the market for one bar in fifty, when the next one rises much."""
    rise = bars["close"].pct_change().shift(-1)
    return (rise > 0.02).astype(float).to_numpy()


def next_open(bars):
    return np.sign(bars["open"].shift(-1) - bars["close"]).fillna(0.0).to_numpy()


AHEAD = [tomorrow, standardised, best_of, centred, filled_back, fitted, seldom, next_open]


@pytest.mark.parametrize("function", AHEAD)
def test_a_function_that_looks_ahead_is_refused(bars, function):
    with pytest.raises(LookAheadError, match=r"the strategy looks ahead: its weights of 20\d\d-\d\d-\d\d .* are replaced"):
        tailguard.judge_strategy(function, bars)


def test_a_function_that_was_given_its_decisions_says_that_nothing_was_tested(bars):
    known = tomorrow(bars)
    found = tailguard.judge_strategy(lambda table: known, bars, trading=FREE, effort=QUICK)
    assert found.verdict.reasons[-1].endswith("so the test for look-ahead shows nothing.")
    held = tailguard.judge_strategy(lambda table: np.ones(len(table)), bars, trading=FREE, effort=QUICK)
    assert "look-ahead" not in " ".join(held.verdict.reasons)


def test_a_random_function_is_refused(bars):
    generator = np.random.default_rng(0)
    with pytest.raises(ValueError, match="deterministic: give its random numbers a seed"):
        tailguard.judge_strategy(lambda table: generator.random(len(table)), bars)
    with pytest.raises(ValueError, match=r"shape of the weights is \(3, 1\)"):
        tailguard.judge_strategy(lambda table: np.zeros(3), bars)


def test_what_cannot_be_judged_gets_one_line(bars):
    weights = pd.Series(1.0, bars.index)
    for arguments, message in (
        ({}, "either returns or weights"),
        ({"returns": weights, "weights": weights}, "either returns or weights"),
        ({"weights": weights}, "bars is None"),
        ({"returns": weights * 0.01, "bars": bars}, "left out beside returns"),
        ({"weights": weights.iloc[:3], "bars": bars}, "the weights cover 3 bars"),
        ({"weights": weights.set_axis(weights.index + pd.Timedelta(days=9000)), "bars": bars}, "not inside the bars"),
        ({"returns": drifting(0).iloc[:5]}, "5 bars; at least 8 are needed"),
        ({"weights": 60.0 * weights, "bars": bars}, "they sum to 60, and shares of equity are meant, 0.5 for half of it"),
        ({"weights": weights, "bars": bars, "trading": {"fees": 1}}, "fees: unknown key"),
        ({"returns": drifting(0), "trials": 0}, "trials is 0"),
        ({"returns": drifting(0), "cash_rate": 3}, "cash_rate is 3, but it must be a fraction per year: 0.03 is 3 %"),
        ({"returns": drifting(0), "cash_rate": -5}, "cash_rate is -5, but it must be a fraction per year"),
        ({"returns": drifting(0), "cash_rate": 0.0 * drifting(0) - 0.05}, "a rate of -0.05 per year"),
        ({"weights": weights, "bars": bars, "cash_rate": 3.0}, "cash_rate is 3.0, but it must be a fraction"),
        (
            {"returns": drifting(0), "cash_rate": drifting(0).iloc[:1]},
            "cash_rate: holds one row; give a single rate as a number",
        ),
        ({"returns": drifting(0).iloc[:1]}, "returns: holds one row; at least two are needed"),
        ({"returns": drifting(0), "benchmark": "nasdaq"}, "nasdaq: no such file"),
        ({"returns": drifting(0), "benchmark": 0.0 * drifting(0) + 100.0}, "benchmark: does not move from"),
        (
            {"returns": 0.0 * drifting(0) + 0.0001},
            "returns: each is 0.0001, without any risk .* name its rate with --cash-rate",
        ),
    ):
        with pytest.raises(ValueError, match=message) as error:
            tailguard.judge(**arguments)
        assert "\n" not in str(error.value)


def test_rules_of_the_verdict_are_those_of_the_report():
    found = tailguard.judge(drifting(0, years=4), rules=VerdictRules(fewest_bars=2000), effort=Effort(draws=50))
    assert found.evaluation.rules.fewest_bars == 2000
    assert "the test has fewer than 2,000 bars" in report_html(found.evaluation)


def test_rules_of_trading_may_be_given_as_they_are(bars):
    with warnings.catch_warnings():
        found = tailguard.judge(weights=pd.Series(1.0, bars.index), bars=bars, trading=TradingRules(fee=0.01), effort=QUICK)
    assert found.evaluation.agent.costs[0] == pytest.approx(0.01, rel=0.02)
