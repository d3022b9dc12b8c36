"""Bars: what is read, what is refused, and in which words."""

import gzip
import warnings

import numpy as np
import pandas as pd
import pytest

from tailguard.market import DataError, DataWarning, align_bars, check_bars, list_datasets, load_bars, load_dataset, random_walk
from tailguard.market.bars import in_utc, iterate_symbols, periods_per_year, symbols_of
from tailguard.market.data import check_source
from tailguard.market.files import FileConfig

GOOD = """time,open,high,low,close,volume
2020-01-01,10,12,9,11,100
2020-01-02,11.5,13,11,12,110
2020-01-03,12.2,12.5,11,11.5,90
2020-01-06,11.4,12,11,11.9,95
"""


@pytest.fixture
def good_frame():
    return random_walk(60, seed=0)


def broken(line, replacement):
    """The good file with one line, counted from 1 for the first bar, replaced."""
    lines = GOOD.splitlines()
    lines[line] = replacement
    return "\n".join(lines) + "\n"


BROKEN_FILES = {
    "empty file": ("", "is empty"),
    "header only": ("time,open,high,low,close,volume\n", "no rows of a time and four prices"),
    "no time column": (GOOD.replace("time", "when").replace("2020-01-0", "a"), "no column for time among"),
    "no close column": (
        GOOD.replace("close", "end"),
        "no column for close among time, open, high, low, end, volume; name them with --columns close=NAME",
    ),
    "column twice": (GOOD.replace("volume", "Close"), "two columns are named 'close': say which with --columns close=NUMBER"),
    "bad time": (broken(2, "yesterday,11,13,11,12,110"), "line 3: 'yesterday' is not a time"),
    "time as tiny numbers": (GOOD.replace("2020-01-0", ""), "1 is not a time: numbers must be 20130513 or seconds"),
    "text for a price": (
        broken(2, "2020-01-02,11,n.a.x,11,12,110"),
        "line 3 (2020-01-02 00:00:00): high 'n.a.x' is not a number",
    ),
    "repeated time": (broken(3, "2020-01-02,12,12.5,11,11.5,90"), "line 4 (2020-01-02 00:00:00): its time repeats"),
    "unsorted times": (broken(3, "2019-01-02,12,12.5,11,11.5,90"), "line 4 (2019-01-02 00:00:00): its time is before"),
    "missing price": (broken(1, "2020-01-01,,12,9,11,100"), "line 2 (2020-01-01 00:00:00): open is missing"),
    "infinite price": (broken(1, "2020-01-01,10,inf,9,11,100"), "high is inf"),
    "zero price": (broken(1, "2020-01-01,10,12,0,11,100"), "low 0 is not positive"),
    "negative price": (broken(1, "2020-01-01,10,12,-9,11,100"), "low -9 is not positive"),
    "negative volume": (broken(1, "2020-01-01,10,12,9,11,-1"), "volume -1 is negative"),
    "high below low": (broken(2, "2020-01-02,11.5,11,13,12,110"), "line 3 (2020-01-02 00:00:00): high 11 is below low 13"),
    "open above high": (broken(2, "2020-01-02,14,13,11,12,110"), "open 14 is outside [low 11, high 13]"),
    "close below low": (broken(2, "2020-01-02,11.5,13,11,10,110"), "close 10 is outside [low 11, high 13]"),
    "not a table": ("\x00\x01\x02", "broken.csv: "),
    "ragged rows": (GOOD + "2020-01-07,1,2,3,4,5,6,7,8\n", "cannot be read"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_broken_file_gives_one_line_that_names_row_and_reason(tmp_path, text, message):
    path = tmp_path / "broken.csv"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        load_bars(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert any(
        finding.level == "error" and message.removeprefix("broken.csv: ") in str(finding) for finding in check_source(path)
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.csv", None, "no such file"),
        ("bars.xlsx", b"x", "no rows of a time and four prices"),
        ("folder.csv", "folder", "is a folder"),
        ("bad.csv.gz", b"not gzip", "no rows of a time and four prices"),
        ("bad.parquet", b"PAR1 but nothing more", "cannot be read"),
        ("cut.csv.gz", gzip.compress(GOOD.encode(), mtime=0)[:-20], "cannot be read"),
        ("latin.csv", GOOD.encode() + b"\xff\xfe", "line 6: .* is not a time"),
    ],
)
def test_unreadable_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_bars(path)


def test_all_formats_give_the_same_bars(tmp_path, good_frame):
    good_frame.to_csv(tmp_path / "bars.csv")
    good_frame.to_csv(tmp_path / "bars.csv.gz")
    good_frame.to_parquet(tmp_path / "bars.parquet")
    expected = load_bars(good_frame)
    for name in ("bars.csv", "bars.csv.gz", "bars.parquet"):
        pd.testing.assert_frame_equal(load_bars(tmp_path / name), expected, check_freq=False, rtol=1e-15)
    pd.testing.assert_frame_equal(load_bars(good_frame.reset_index()), expected, check_freq=False)


@pytest.mark.parametrize(("unit", "divisor"), [("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1)])
def test_epoch_times_are_read_in_any_unit(good_frame, unit, divisor):
    nanoseconds = good_frame.index.as_unit("ns").astype(np.int64)
    frame = good_frame.reset_index(drop=True).assign(time=nanoseconds // divisor)
    assert (load_bars(frame).index == good_frame.index).all()


def test_zoned_times_become_utc(good_frame):
    zoned = good_frame.tz_localize("UTC").tz_convert("America/New_York")
    assert (load_bars(zoned).index == good_frame.index).all()


def test_days_keep_their_date_in_every_zone_and_times_of_day_know_that_they_are_in_utc(good_frame, tmp_path):
    for zone in ("Asia/Tokyo", "America/New_York"):
        zoned = good_frame.tz_localize(zone)
        zoned.to_csv(tmp_path / "bars.csv")
        for source in (zoned, tmp_path / "bars.csv"):
            assert (load_bars(source).index == good_frame.index).all()
            assert not in_utc(load_bars(source))
        assert (load_bars(good_frame, FileConfig(timezone=zone)).index == good_frame.index).all()
    clocked = good_frame.set_index(good_frame.index + pd.Timedelta(hours=16))
    clocked.tz_localize("Asia/Tokyo").to_csv(tmp_path / "bars.csv")
    for zoned in (load_bars(tmp_path / "bars.csv"), load_bars(clocked, FileConfig(timezone="Asia/Tokyo"))):
        assert in_utc(zoned)
        assert in_utc(load_bars(zoned, FileConfig(timezone="Asia/Tokyo")))
        assert (load_bars(zoned, FileConfig(timezone="Asia/Tokyo")).index == good_frame.index + pd.Timedelta(hours=7)).all()
    assert not in_utc(load_bars(clocked))
    with pytest.raises(DataError, match=r"the times of a name their zone and those of b do not; .* --timezone"):
        load_bars({"a": clocked.tz_localize("UTC"), "b": clocked})


def test_a_missing_volume_column_counts_as_no_volume(good_frame):
    assert (load_bars(good_frame.drop(columns="volume"))["volume"] == 0).all()


def test_a_funding_column_is_kept_and_checked(good_frame):
    funded = good_frame.assign(funding=1e-4)
    assert (load_bars(funded)["funding"] == 1e-4).all()
    funded.iloc[7, -1] = np.inf
    with pytest.raises(DataError, match=r"row 7 .*funding is inf"):
        load_bars(funded)


def test_symbols_of_any_type_become_text(good_frame):
    assert symbols_of(align_bars({1: good_frame, 2: good_frame})) == ["1", "2"]


def test_loading_does_not_change_what_it_was_given(good_frame):
    before = good_frame.copy()
    load_bars(good_frame)
    pd.testing.assert_frame_equal(good_frame, before)


@pytest.mark.parametrize("ratio", [1 / 2, 1 / 3, 1 / 10, 2, 4])
def test_an_unadjusted_split_is_suspected(good_frame, ratio):
    split = good_frame.copy()
    split.iloc[30:, :4] *= ratio
    with pytest.warns(DataWarning, match=r"row 30 .* unadjusted split"):
        load_bars(split)


def test_a_crash_that_is_no_round_fraction_is_not_called_a_split(good_frame):
    crashed = good_frame.copy()
    crashed.iloc[30:, :4] *= 0.44
    assert load_bars(crashed) is not None


def test_opens_that_repeat_the_close_are_warned_about_with_their_share(good_frame):
    stale = good_frame.copy()
    stale["open"] = stale["close"].shift(1).fillna(stale["open"])
    stale["high"] = stale[["open", "high"]].max(axis=1)
    stale["low"] = stale[["open", "low"]].min(axis=1)
    with pytest.warns(DataWarning, match=r"100\.0% of the opens repeat the previous close"):
        load_bars(stale)


def test_gaps_are_reported_and_never_filled(good_frame):
    gappy = good_frame.drop(good_frame.index[20:25])
    bars = load_bars(gappy)
    assert len(bars) == 55
    notes = [finding for finding in check_bars(bars) if finding.level == "note"]
    assert len(notes) == 1
    assert notes[0].row == 20
    assert "6 days" in notes[0].reason


def test_symbols_align_on_the_union_of_times_with_explicit_missing_bars(good_frame):
    early, late = good_frame.iloc[:40], good_frame.iloc[[10, 11, *range(13, 60)]]
    bars = load_bars({"early": early, "late": late})
    assert len(bars) == 60
    assert symbols_of(bars) == ["early", "late"]
    assert bars["early"].iloc[40:].isna().all(axis=None)
    assert bars["late"].iloc[:10].isna().all(axis=None)
    assert bars["late"].iloc[12].isna().all()
    pd.testing.assert_frame_equal(load_bars(bars), bars)


def test_each_symbol_of_a_table_is_checked(good_frame):
    bad = good_frame.copy()
    bad.iloc[3, 1] = 0.0
    with pytest.raises(DataError, match=r"row 3 .*high 0 is not positive"):
        load_bars(align_bars({"good": good_frame, "bad": bad}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda frame: frame.reset_index(drop=True), "DatetimeIndex"),
        (lambda frame: frame.iloc[::-1], "increasing"),
        (lambda frame: frame.drop(columns="low"), r"lack the columns \['low'\]"),
    ],
)
def test_tables_that_were_never_loaded_are_refused_with_the_remedy(good_frame, spoil, message):
    with pytest.raises(DataError, match=message) as error:
        list(iterate_symbols(spoil(good_frame)))
    assert "load_bars" in str(error.value)


@pytest.mark.parametrize("info", list_datasets(), ids=lambda info: info.name)
def test_shipped_sets_load_without_errors_or_warnings(info):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bars = load_dataset(info.name)
    assert not [finding for finding in check_bars(bars) if finding.level == "error"]
    assert list(bars.columns) == ["open", "high", "low", "close", "volume"]
    assert (bars.dtypes == np.float64).all()


def test_shipped_sets_have_the_documented_sizes():
    sizes = {info.name: len(load_dataset(info.name)) for info in list_datasets()}
    stocks = dict.fromkeys(("aapl-1d", "ibm-1d", "msft-1d"), 3270)
    assert sizes == {"nasdaq-1d": 5031, "btcusd-1h": 20111, "eurusd-1h": 6225, **stocks}


def test_unknown_set_lists_the_known_ones():
    with pytest.raises(DataError, match="shipped are nasdaq-1d"):
        load_dataset("dow-1d")


def test_bars_per_year():
    assert periods_per_year(pd.date_range("2000-01-01", periods=8767, freq="1h")) == pytest.approx(8766.0)
    assert 250 < periods_per_year(load_dataset("nasdaq-1d").index) < 253
