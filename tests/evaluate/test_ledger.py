"""The ledger: what is written is read again, near copies count once, and the best of many coins is no skill."""

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tailguard
from tailguard.evaluate.assessment import Effort
from tailguard.evaluate.ledger import (
    Ledger,
    Trial,
    correlations,
    count_each,
    count_trials,
    data_key,
    shared_returns,
    user_ledger,
)
from tailguard.evaluate.stats.significance import overfitting
from tailguard.market import random_walk

DAYS = pd.bdate_range("2020-01-01", periods=300, unit="ns")
QUICK = Effort(draws=100, permutations=39)


def trial(seed, n=300, first=0, like=None, noise=1.0, **changes):
    excess = np.random.default_rng(seed).normal(0.0, 0.01, n)
    excess = excess if like is None else like.excess + noise * excess
    base = Trial("key", "sha", f"config {seed}", "a title", "data", "2026-01-01", 0.5, DAYS[first : first + n], excess)
    return replace(base, **changes)


def test_what_is_written_is_read_again(tmp_path):
    ledger = Ledger(tmp_path / "folder" / "trials.jsonl")
    assert ledger.trials() == []
    first, second = trial(0), trial(1, first=100, n=50, data="other", title="naïve ½")
    ledger.append(first)
    ledger.append(second)
    back = ledger.trials()
    for written, read in zip((first, second), back, strict=True):
        assert read.times.equals(written.times)
        np.testing.assert_allclose(read.excess, written.excess, rtol=1e-6)
        for name in ("data", "fingerprint", "config", "title", "source", "date", "sharpe"):
            assert getattr(read, name) == getattr(written, name)
    assert [each.config for each in ledger.trials("other")] == ["config 1"]


def test_the_same_evaluation_again_is_not_another_trial(tmp_path):
    ledger = Ledger(tmp_path / "trials.jsonl")
    for _ in range(3):
        ledger.append(trial(0))
    assert len(ledger.trials()) == 1


def test_only_trials_on_the_same_bars_of_the_same_data_are_related(tmp_path):
    ledger = Ledger(tmp_path / "trials.jsonl")
    same, half, little, other = trial(1), trial(2, first=150, n=150), trial(3, first=260, n=40), trial(4, data="other")
    for each in (same, half, little, other):
        ledger.append(each)
    own = trial(0, n=280)
    assert [each.config for each in ledger.related(own)] == ["config 1", "config 2", "config 3"]  # 20 of 40 are shared
    assert [each.config for each in ledger.related(trial(0, n=279))] == ["config 1", "config 2"]


def test_near_copies_are_one_trial():
    one = trial(0)
    copies = [trial(seed, like=one, noise=0.05) for seed in range(1, 6)]
    cousins = [trial(seed, like=one, noise=1.0) for seed in range(6, 9)]  # correlated by 0.7 with the first
    opposite = replace(one, excess=-one.excess)
    assert count_trials([]) == 0
    assert count_trials([one]) == 1
    assert count_trials([one, *copies]) == 1
    assert count_trials([one, *copies, *cousins]) == 4
    assert count_trials([one, opposite]) == 2
    assert count_trials([trial(seed) for seed in range(50)]) == 50


def test_correlations_are_over_the_bars_that_two_trials_share():
    one, late, idle = trial(0), trial(1, first=100, n=200), replace(trial(2), excess=np.zeros(300))
    table = correlations([one, late, idle])
    assert table[0, 1] == pytest.approx(np.corrcoef(one.excess[100:], late.excess)[0, 1])
    assert (table[2, :2] == 0.0).all()


def test_overfitting_is_of_choosing_among_different_trials_over_the_same_bars():
    one, late, idle = trial(0), trial(1, first=100, n=200), replace(trial(2), excess=np.zeros(300))
    near, another, copy = trial(3, first=20, n=280), trial(4), trial(5, like=one, noise=0.01)
    found = shared_returns(one, [late, near, copy, idle, another])  # the late one covers two thirds only
    expected = [one.excess[20:], near.excess, idle.excess[20:], another.excess[20:]]
    np.testing.assert_array_equal(found, np.stack(expected, axis=1))
    assert shared_returns(one, [near, idle, copy]) is None
    few = [trial(seed, first=290, n=10) for seed in range(1, 6)]
    assert shared_returns(few[0], few[1:]) is None


def test_the_key_of_the_data_stays_when_bars_are_added_or_adjusted():
    bars = random_walk(400, seed=0)
    key = data_key(bars.index, bars["close"])
    assert data_key(bars.index[:250], bars["close"].iloc[:250]) == key
    assert data_key(bars.index, 0.5 * bars["close"]) == key
    assert data_key(bars.index, random_walk(400, seed=1)["close"]) != key
    assert data_key(bars.index[1:], bars["close"].iloc[1:]) != key


@pytest.mark.parametrize("later", [0, 37])
def test_the_data_are_known_again_wherever_the_bars_begin(tmp_path, later):
    bars, ledger = random_walk(1000, seed=0), Ledger(tmp_path / "trials.jsonl")
    generator = np.random.default_rng(0)
    for k in range(4):
        weights = pd.Series(generator.choice([-1.0, 1.0], 500), bars.index[-500:])
        given = bars.iloc[later * k :] * [1.0 + k, 1.0 + k, 1.0 + k, 1.0 + k, 1.0]
        judged = tailguard.judge(weights=weights, bars=given, ledger=ledger, effort=QUICK)
    assert judged.evaluation.provenance.trials == 4
    assert count_each(ledger.trials()) == [4, 4, 4, 4]
    other = random_walk(1000, seed=1)
    judged = tailguard.judge(weights=weights, bars=other, ledger=ledger, effort=QUICK)
    assert judged.evaluation.provenance.trials == 1
    assert count_each(ledger.trials()) == [4, 4, 4, 4, 1]


def test_days_are_the_same_whatever_time_of_day_they_have(tmp_path):
    ledger = Ledger(tmp_path / "trials.jsonl")
    returns = pd.Series(trial(0).excess, DAYS)
    tailguard.judge(returns, ledger=ledger, effort=QUICK)
    closes = -returns.set_axis(DAYS + pd.Timedelta(hours=16))
    assert tailguard.judge(closes, ledger=ledger, effort=QUICK).evaluation.provenance.trials == 2
    hours = pd.date_range("2020-01-01", periods=300, freq="h")
    assert trial(0, times=hours).times.equals(hours.as_unit("s"))


def test_where_the_ledger_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TAILGUARD_LEDGER", "off")
    assert user_ledger() is None
    monkeypatch.setenv("TAILGUARD_LEDGER", str(tmp_path / "mine.jsonl"))
    assert user_ledger() == Ledger(tmp_path / "mine.jsonl")
    monkeypatch.delenv("TAILGUARD_LEDGER")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert user_ledger() == Ledger(tmp_path / "tailguard" / "trials.jsonl")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert user_ledger() == Ledger(Path.home() / ".local" / "share" / "tailguard" / "trials.jsonl")


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"format": 99, "data": "key"}', "[]"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "trials.jsonl"
    Ledger(path).append(trial(0))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"line 2 is no trial .*; delete the line, or set TAILGUARD_LEDGER to another file"):
        Ledger(path).trials()


def test_what_is_left_of_a_line_is_no_trial_and_is_removed(tmp_path):
    """A process that died while writing leaves a part of a line."""
    path = tmp_path / "trials.jsonl"
    ledger = Ledger(path)
    ledger.append(trial(0))
    whole = path.read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        assert [each.config for each in ledger.trials()] == ["config 0"]
        assert [each.config for each in ledger.append(trial(1))] == ["config 0"]
        assert [each.config for each in ledger.trials()] == ["config 0", "config 1"]
        assert path.read_bytes().startswith(whole + b"{")


def test_each_trial_is_counted_among_those_over_its_bars():
    early, copy, late = trial(0, n=100), trial(1, n=100, like=trial(0, n=100), noise=0.01), trial(2, first=200, n=100)
    assert count_each([early, copy, late, trial(3), trial(4, data="other")]) == [2, 2, 2, 3, 1]


def _write(place, seeds):
    return [len(Ledger(place).append(trial(seed))) for seed in seeds]


def test_processes_do_not_tear_each_others_lines(tmp_path):
    path = tmp_path / "trials.jsonl"
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        counts = list(pool.map(_write, [path] * 3, [range(start, start + 10) for start in (0, 10, 20)]))
    assert sorted(np.ravel(counts)) == list(range(30))  # nobody is missed, however they took turns
    assert sorted(each.config for each in Ledger(path).trials()) == sorted(f"config {seed}" for seed in range(30))
    assert all(json.loads(line) for line in path.read_text().splitlines())


def coins(bars, count):
    generator = np.random.default_rng(7)
    return [pd.Series(generator.choice([-1.0, 1.0], 60).repeat(10), index=bars.index[-600:]) for _ in range(count)]


def test_every_judgement_is_a_trial_and_raises_the_bar(tmp_path, monkeypatch):
    monkeypatch.setenv("TAILGUARD_LEDGER", str(tmp_path / "trials.jsonl"))
    bars = random_walk(1000, seed=3)
    judged = [tailguard.judge(weights=weights, bars=bars, effort=QUICK) for weights in coins(bars, 4)]
    assert [each.evaluation.provenance.trials for each in judged] == [1, 2, 3, 4]
    last = judged[-1]
    alone = tailguard.judge(weights=coins(bars, 4)[-1], bars=bars, effort=QUICK, ledger=None)
    name = "deflated_sharpe"
    assert last.statistics["agent"][name].value < alone.statistics["agent"][name].value
    assert last.evaluation.provenance.ledger.startswith("The ledger counts 4 different trials")
    assert "The ledger of trials was off: 1 is the number that was stated." in alone.verdict.reasons
    assert not any("ledger" in reason for reason in last.verdict.reasons)
    again = tailguard.judge(weights=coins(bars, 4)[-1], bars=bars, effort=QUICK)
    assert again.evaluation.provenance.trials == 4
    assert again.statistics["agent"][name] == last.statistics["agent"][name]
    more = tailguard.judge(weights=coins(bars, 4)[-1], bars=bars, effort=QUICK, trials=9)
    assert more.evaluation.provenance.trials == 9


def test_returns_that_begin_at_other_times_are_trials_too(tmp_path, monkeypatch):
    """Rules with longer look-backs begin later: they were tried on the same bars all the same."""
    monkeypatch.setenv("TAILGUARD_LEDGER", str(tmp_path / "trials.jsonl"))
    returns = [pd.Series(trial(seed).excess, DAYS).iloc[10 * seed :] for seed in range(4)]
    judged = [tailguard.judge(each, effort=QUICK).evaluation for each in returns]
    assert [each.provenance.trials for each in judged] == [1, 2, 3, 4]
    assert judged[-1].provenance.ledger.startswith("The ledger counts 4 different trials over these times")
    assert "pbo" not in judged[0].statistics["agent"]
    columns = np.stack([each.loc[judged[-1].agent.times].to_numpy(np.float32) for each in returns], axis=1).astype(np.float64)
    columns[:, 3] = returns[3]
    assert judged[-1].statistics["agent"]["pbo"].value == overfitting(columns[:, [3, 0, 1, 2]]).probability
    apart = pd.Series(trial(9).excess, DAYS + pd.Timedelta(days=4000))
    assert tailguard.judge(apart, effort=QUICK).evaluation.provenance.trials == 1


def test_a_ledger_that_cannot_be_written_does_not_stop_the_verdict(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TAILGUARD_LEDGER", str(tmp_path / "file" / "trials.jsonl"))
    bars = random_walk(1000, seed=3)
    with pytest.warns(UserWarning, match="the trial could not be recorded"):
        judged = tailguard.judge(weights=coins(bars, 1)[0], bars=bars, effort=QUICK)
    assert judged.evaluation.provenance.trials == 1
    assert judged.evaluation.provenance.ledger.startswith("The ledger counts 1 trial on these data, this one included")
