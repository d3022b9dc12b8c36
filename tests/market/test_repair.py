"""Repair: every change is listed, what is right stays as it is, and nothing is filled in."""

import pandas as pd
import pytest

from tailguard.market import DataError, load_bars, random_walk
from tailguard.market.repair import repair, write_bars

GOOD = random_walk(30, seed=2).round(4)


def lines():
    return GOOD.to_csv().splitlines()


def repaired(tmp_path, changed):
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("\n".join(changed) + "\n")
    result = repair(source)
    write_bars(result.parts, output)
    return result.changes, load_bars(output)


def test_a_good_file_is_copied_without_a_change(tmp_path):
    changes, bars = repaired(tmp_path, lines())
    assert changes == ()
    pd.testing.assert_frame_equal(bars, GOOD, check_freq=False)


@pytest.mark.parametrize(
    ("line", "text", "change"),
    [
        (5, "2000-01-05,,101,99,100,5", "line 6 (2000-01-05 00:00:00): a price is missing or not positive: dropped"),
        (5, "2000-01-05,100,101,0,100,5", "line 6 (2000-01-05 00:00:00): a price is missing or not positive: dropped"),
        (5, "2000-01-05,100,halt,99,100,5", "line 6 (2000-01-05 00:00:00): high 'halt' is not a number: dropped"),
        (5, "holiday,,,,,5", "line 6: 'holiday' is not a time: dropped"),
        (31, "Source: somebody,,,,,5", "line 32: 'Source: somebody' is not a time: dropped"),
    ],
)
def test_an_impossible_bar_is_dropped(tmp_path, line, text, change):
    changed = lines() if line <= 30 else [*lines(), ""]
    changed[line] = text
    changes, bars = repaired(tmp_path, changed)
    assert changes == (change,)
    expected = GOOD.drop(GOOD.index[line - 1]) if line <= 30 else GOOD
    pd.testing.assert_frame_equal(bars, expected, check_freq=False)


def test_a_range_is_widened_and_a_negative_volume_is_none(tmp_path):
    changed = lines()
    changed[3] = "2000-01-03,100,99,98,101,-7"
    changes, bars = repaired(tmp_path, changed)
    assert changes == (
        "line 4 (2000-01-03 00:00:00): range [98, 99] became [98, 101]",
        "line 4 (2000-01-03 00:00:00): volume -7 became 0",
    )
    assert bars.iloc[2].tolist() == [100, 101, 98, 101, 0]


def test_bars_are_sorted_and_of_repeated_ones_the_last_is_kept(tmp_path):
    changed = lines()
    changed[3], changed[4] = changed[4], changed[3]
    changed.insert(11, changed[10].replace(",", ",9", 1).split(",")[0] + ",100,101,99,100,1")
    changes, bars = repaired(tmp_path, changed)
    assert changes == (
        "1 bars came before the one above: sorted by time",
        "line 11 (2000-01-10 00:00:00): its time comes again later in the file, and that bar is kept: dropped",
    )
    assert bars["close"].iloc[9] == 100.0
    assert len(bars) == 30


def test_nothing_is_written_over_a_file_nor_under_a_strange_name(tmp_path):
    (tmp_path / "out.csv").write_text("mine")
    with pytest.raises(DataError, match="exists already"):
        write_bars({"": GOOD}, tmp_path / "out.csv")
    with pytest.raises(DataError, match="must end in"):
        write_bars({"": GOOD}, tmp_path / "out.xlsx")
    assert (tmp_path / "out.csv").read_text() == "mine"


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "parquet"])
def test_several_symbols_survive(tmp_path, ending):
    both = pd.concat([GOOD.assign(symbol="A"), GOOD.assign(symbol="B")])
    both.to_csv(tmp_path / "in.csv")
    write_bars(repair(tmp_path / "in.csv").parts, tmp_path / f"out.{ending}")
    bars = load_bars(tmp_path / f"out.{ending}")
    for symbol in "AB":
        pd.testing.assert_frame_equal(bars[symbol], GOOD, check_freq=False)


def test_a_file_without_a_good_bar_is_refused(tmp_path):
    (tmp_path / "in.csv").write_text("time,open,high,low,close\n" + "".join(f"2020-01-0{k},0,0,0,0\n" for k in range(1, 6)))
    with pytest.raises(DataError, match="no bar is left"):
        repair(tmp_path / "in.csv")
