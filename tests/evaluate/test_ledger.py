"""The ledger: what is written is read again, near copies count once, and the best of many coins is no skill."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tailguard
from tailguard.evaluate.assessment import Effort
from tailguard.evaluate.ledger import Ledger, Trial, correlations, count_trials, data_key, shared_returns, user_ledger
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
    both = shared_returns([one, late])
    np.testing.assert_array_equal(both, np.stack([one.excess[100:], late.excess], axis=1))
    assert shared_returns([one]) is None
    assert shared_returns([one, trial(1, first=290, n=10)]) is None


def test_the_key_of_the_data_stays_when_bars_are_added_or_adjusted():
    bars = random_walk(400, seed=0)
    key = data_key(bars.index, bars["close"])
    assert data_key(bars.index[:250], bars["close"].iloc[:250]) == key
    assert data_key(bars.index, 0.5 * bars["close"]) == key
    assert data_key(bars.index, random_walk(400, seed=1)["close"]) != key
    assert data_key(bars.index) != key
    assert data_key(bars.index[1:], bars["close"].iloc[1:]) != key


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


def _write(place, seeds):
    for seed in seeds:
        Ledger(place).append(trial(seed))
    return os.getpid()


def test_processes_do_not_tear_each_others_lines(tmp_path):
    path = tmp_path / "trials.jsonl"
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        for _ in pool.map(_write, [path] * 3, [range(start, start + 10) for start in (0, 10, 20)]):
            pass
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


def test_a_ledger_that_cannot_be_written_does_not_stop_the_verdict(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TAILGUARD_LEDGER", str(tmp_path / "file" / "trials.jsonl"))
    bars = random_walk(1000, seed=3)
    with pytest.warns(UserWarning, match="the trial could not be recorded"):
        judged = tailguard.judge(weights=coins(bars, 1)[0], bars=bars, effort=QUICK)
    assert judged.evaluation.provenance.trials == 1
