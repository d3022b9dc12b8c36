"""A record that is written and read again is the same record."""

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from evaluation_examples import example_evaluation

from power_cut import Disk, PowerCut
from tailguard.evaluate.record import CHECKSUMS, LARGEST_TABLE, AccountHistory, Estimate, load_record, save_record
from tailguard.evaluate.report.sections.overview import MARKS, rule
from tailguard.evaluate.verdict import Verdict, VerdictRules
from tailguard.io.sealed import read_sealed, write_sealed

FIXTURE = Path(__file__).parents[1] / "fixtures" / "record-v1"


def assert_same(one, other, place="record"):
    """Every field of every part, series to the last bit."""
    if isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other, check_exact=True, check_freq=False, check_index_type=False, obj=place)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, place
        np.testing.assert_array_equal(one, other, err_msg=place)
    elif isinstance(one, pd.DatetimeIndex):
        assert one.equals(other), place
    elif dataclasses.is_dataclass(one):
        assert type(one) is type(other), place
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name), f"{place}.{field.name}")
    elif isinstance(one, dict):
        assert list(one) == list(other), place
        for key in one:
            assert_same(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert type(one) is type(other), place
        assert len(one) == len(other), place
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{place}[{i}]")
    else:
        assert one == other or (one != one and other != other), place


@pytest.mark.parametrize("assets", [1, 3])
@pytest.mark.parametrize("full", [True, False])
def test_reading_gives_what_was_written(tmp_path, assets, full):
    written = example_evaluation(assets=assets, full=full)
    save_record(written, tmp_path / "run")
    assert_same(written, load_record(tmp_path / "run"))


def assert_within(old, new, place):
    """Everything of the old file is in the new one, which may hold more."""
    if isinstance(old, dict):
        for key in old:
            assert_within(old[key], new[key], f"{place}.{key}")
    else:
        assert old == new, place


def test_a_record_of_an_earlier_version_is_read_and_nothing_of_it_is_lost(tmp_path):
    """The fixture was written before accounts were called histories, and before they had a riskless return."""
    record = load_record(FIXTURE)
    assert [history.name for history in record.seeds] == ["seed 0", "seed 1"]
    assert record.history("buy_and_hold").returns.shape == (40,)
    assert not record.history("agent").riskless.any()
    save_record(record, tmp_path)
    for file in FIXTURE.iterdir():
        new = tmp_path / file.name
        if file.suffix == ".csv":
            table = pd.read_csv(file, dtype=str, keep_default_na=False)
            pd.testing.assert_frame_equal(pd.read_csv(new, dtype=str, keep_default_na=False)[list(table.columns)], table)
        elif file.suffix == ".json":
            assert_within(json.loads(file.read_text()), json.loads(new.read_text()), file.name)
        else:
            assert new.read_text() == file.read_text(), file.name


def test_a_record_names_no_folder_of_whoever_made_it(tmp_path):
    record = example_evaluation()
    provenance = dataclasses.replace(record.provenance, config="data: [/home/me/a.csv, /srv/b.csv]\n")
    named = dataclasses.replace(record, source="/home/me/a.csv+/srv/b.csv", provenance=provenance)
    save_record(named, tmp_path)
    assert load_record(tmp_path).source == "a.csv+b.csv"
    assert load_record(tmp_path).provenance.config == "data: [a.csv, b.csv]\n"
    for path in tmp_path.iterdir():
        assert "/home" not in path.read_text()
        assert "/srv" not in path.read_text()


def test_the_rules_of_the_verdict_are_kept(tmp_path):
    rules = VerdictRules(fewest_bars=2000, worthwhile=1.5, size=0.1, power=0.9)
    written = dataclasses.replace(example_evaluation(), rules=rules)
    save_record(written, tmp_path)
    read = load_record(tmp_path)
    assert read.rules == rules
    said = {outcome: rule(dataclasses.replace(read, verdict=Verdict(outcome, "", ()))) for outcome in MARKS}
    few = "The rule: the test has fewer than 2,000 bars, or it would have found a Sharpe ratio lead of 1.5 with a probability "
    assert said["too little data to tell"].startswith(f"{few}below 90%")
    assert "(stepwise, 5% chance of error)" in said["worse than"]
    assert "a chance of error of at most 10%" in said["evidence of skill"]
    assert "to find a Sharpe ratio lead of 1.5," in said["no evidence of skill"]


def test_bars_of_an_hour_keep_their_times(tmp_path):
    written = example_evaluation()
    times = pd.date_range("2024-03-01 00:30", periods=len(written.agent.times), freq="h")
    histories = [dataclasses.replace(history, times=times) for history in written.histories]
    seeds, prices = len(written.seeds), written.prices.set_index(times)
    hourly = dataclasses.replace(
        written,
        agent=histories[0],
        seeds=histories[1 : seeds + 1],
        baselines=histories[seeds + 1 :],
        prices=prices,
    )
    save_record(hourly, tmp_path)
    assert_same(hourly, load_record(tmp_path))


def test_numbers_that_json_lacks_survive_and_the_file_is_json(tmp_path):
    written = example_evaluation()
    figures = {"inf": Estimate(math.inf, -math.inf, None), "nan": Estimate(math.nan)}
    odd = dataclasses.replace(written, statistics={**written.statistics, "agent": figures})
    save_record(odd, tmp_path)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.json").read_text(), parse_constant=refuse)
    assert_same(odd, load_record(tmp_path))


def test_an_older_record_leaves_nothing_behind(tmp_path):
    save_record(example_evaluation(full=True), tmp_path)
    later = example_evaluation(full=False, seed=1)
    save_record(later, tmp_path)
    assert_same(later, load_record(tmp_path))


def test_nothing_is_written_through_links_and_pipes_in_its_folder(tmp_path):
    written, precious = example_evaluation(assets=1, full=True), tmp_path / "precious"
    save_record(written, tmp_path / "first")
    precious.write_text("not to be lost")
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert len(names) > 8
    for trap in (lambda path: path.symlink_to(precious), os.mkfifo):
        folder = tmp_path / f"run-{trap.__name__}"
        folder.mkdir()
        for name in names:
            trap(folder / name)
        save_record(written, folder)
        assert_same(written, load_record(folder))
        assert precious.read_text() == "not to be lost"


def test_a_power_cut_leaves_the_record_or_none(tmp_path, monkeypatch):
    written, cut_at, done = example_evaluation(assets=1, full=True), 0, False
    while not done:
        for world in (False, True):
            root = tmp_path / f"{cut_at}-{world}"
            root.mkdir()
            with Disk(root, cut_at).attached(monkeypatch) as disk:
                try:
                    save_record(written, root / "run")
                    done = True
                except PowerCut:
                    pass
            left = disk.after_the_cut(tmp_path / f"{cut_at}-{world}-left", world) / "run"
            complete = (left / "metrics.json").exists()
            assert complete or not done
            if complete:
                assert_same(written, load_record(left))
        cut_at += 4
    assert cut_at > 40


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no evaluation"):
        load_record(tmp_path)
    (tmp_path / "metrics.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        load_record(tmp_path)


def test_what_does_not_fit_together_is_refused():
    record = example_evaluation()
    with pytest.raises(ValueError, match="names of the accounts"):
        dataclasses.replace(record, seeds=[record.agent])
    with pytest.raises(ValueError, match="market is 'agent'"):
        dataclasses.replace(record, market="agent")
    short = record.seeds[0]
    columns = (short.returns, short.weights, short.turnover, short.costs, short.riskless)
    cut = AccountHistory(short.name, short.times[1:], *(column[1:] for column in columns))
    with pytest.raises(ValueError, match="times of seed 0"):
        dataclasses.replace(record, seeds=[cut])
    with pytest.raises(ValueError, match="shape of costs"):
        dataclasses.replace(record.agent, costs=record.agent.costs[1:])
    with pytest.raises(ValueError, match="it must be one of agent"):
        record.history("nobody")
    assert record.history("momentum").name == "momentum"


@pytest.mark.parametrize("name", ["../big", "big.bin"])
def test_checksums_make_nobody_read_what_is_no_part_of_the_record(tmp_path, name):
    folder = save_record(example_evaluation(full=False), tmp_path / "run")
    with (folder / name).open("wb") as file:
        file.truncate(LARGEST_TABLE + 1)
    write_sealed(folder / CHECKSUMS, {**read_sealed(folder / CHECKSUMS), name: "0" * 64})
    with pytest.raises(ValueError, match=r"must be the name of a file beside it|more than the"):
        load_record(folder)
