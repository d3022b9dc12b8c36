"""Tables in every form that people have them in, and one clear line for those that cannot be read."""

import io
import zipfile

import numpy as np
import pandas as pd
import pytest

from tailguard.evaluate import inputs
from tailguard.evaluate.inputs import rates_at, read_levels, read_rates, read_returns, read_weights
from tailguard.market import load_bars, random_walk
from tailguard.market.data import DataError

DAYS = pd.bdate_range("2020-01-01", periods=40, unit="ns")
RETURNS = pd.Series(np.random.default_rng(0).normal(0.0, 0.01, 40), DAYS)
LONGER = pd.Series(np.random.default_rng(0).normal(0.0, 0.01, 250), pd.bdate_range("2020-01-01", periods=250))
EQUITY = 1000.0 * (1.0 + RETURNS).cumprod()


def same(found, expected=RETURNS):
    np.testing.assert_allclose(found.to_numpy(), expected.to_numpy(), rtol=0, atol=1e-12)
    assert found.index.equals(expected.index)


@pytest.mark.parametrize(
    "frame",
    [
        RETURNS,
        RETURNS.to_frame("x"),
        RETURNS.rename_axis("Date").reset_index(name="ret"),
        RETURNS.set_axis(DAYS.strftime("%Y-%m-%d")),
        RETURNS.tz_localize("Asia/Tokyo"),
        pd.DataFrame({"returns": RETURNS, "equity": EQUITY, "other": 1.0}),
        pd.DataFrame({"timestamp": DAYS.asi8 // 10**6, "daily_return": RETURNS.to_numpy()}),
        RETURNS.iloc[::-1],
        RETURNS.sample(frac=1.0, random_state=0),
        pd.DataFrame({"Fund": RETURNS, "Benchmark": 0.01}),
        RETURNS.map(lambda value: f"{100.0 * value:+.15f}%"),
        pd.DataFrame({"Daily Return [%]": 100.0 * RETURNS, "id": 1.0}),
        RETURNS.map(lambda value: f"{100.0 * value:.15f}%").rename("Return %"),
        RETURNS.set_axis(DAYS.strftime("%d.%m.%Y")),
        RETURNS.set_axis(DAYS.strftime("%m/%d/%Y")),
        RETURNS.map(lambda value: f"{value:.15f}" if value > 0.0 else f"({-value:.15f})"),
    ],
    ids=[
        *("series", "frame", "column", "text", "zone", "several", "epoch", "newest first", "any order", "with a benchmark"),
        *("percent signs", "percent in the name", "percent in both", "day first", "month first", "brackets"),
    ],
)
def test_returns_in_memory(frame):
    same(read_returns(frame))


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.parquet", "a.txt"])
@pytest.mark.parametrize("header", [True, False])
def test_returns_in_files(tmp_path, name, header):
    path = tmp_path / name
    if name.endswith("parquet"):
        RETURNS.to_frame("returns").to_parquet(path)
    else:
        RETURNS.to_csv(path, header=header, sep=";" if name == "a.txt" else ",")
    same(read_returns(path))


def written(header="date,returns", row="{day:%Y-%m-%d},{value!r}", above="", below=""):
    rows = [row.format(day=day, value=value) for day, value in zip(DAYS, RETURNS.tolist(), strict=True)]
    return "\n".join([*above.splitlines(), *([header] if header else []), *rows]) + "\n" + below


def zipped(text):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("returns.csv", text)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("title.csv", written(above="Performance of a fund\n\n")),
        ("remark.csv", written(above="# made on 2021-01-01\n")),
        ("spaces.txt", written("date returns", "{day:%Y-%m-%d}   {value!r}")),
        ("bars.txt", written("date|returns", "{day:%Y-%m-%d}|{value!r}")),
        ("tabs.tsv", written("date\treturns", "{day:%Y-%m-%d}\t{value!r}")),
        ("empty_rows.csv", written(below=",\n,\n")),
        ("decimal_commas.csv", RETURNS.to_csv(sep=";", decimal=",", date_format="%d.%m.%Y", header=False)),
        ("two_columns.csv", written("Date,Time,returns", "{day:%Y-%m-%d},00:00,{value!r}")),
        ("zipped.zip", zipped(written())),
    ],
)
def test_returns_in_files_as_people_write_them(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    same(read_returns(path))


@pytest.mark.parametrize("style", ["{:,.12f}", "${:,.12f}", "{:.12f} €"])
def test_an_equity_curve_may_have_thousands_marks_and_currencies(style):
    same(read_returns(EQUITY.map(style.format)), RETURNS.iloc[1:])


def test_an_equity_curve_that_begins_at_1_is_not_taken_for_factors():
    for seed in range(50):
        returns = LONGER.iloc[:32].sample(frac=1.0, random_state=seed).to_numpy()
        curve = pd.Series(np.cumprod(1.0 + returns), LONGER.index[:32])
        np.testing.assert_allclose(read_returns(curve), returns[1:], atol=1e-12)


def test_a_european_file_has_decimal_commas_and_days_first(tmp_path):
    path = tmp_path / "a.csv"
    RETURNS.rename("Return").set_axis(DAYS.strftime("%d.%m.%Y")).to_csv(path, sep=";", decimal=",", index_label="Datum")
    same(read_returns(path))
    path.write_bytes(path.read_text().encode("utf-16"))
    same(read_returns(path))


MONTHS = pd.date_range("2015-01-31", periods=40, freq="ME", unit="ns")


@pytest.mark.parametrize("form", ["%Y%m", "%Y-%m", "%b %Y", "%Y-%m-01", "%Y-%m-%d"])
def test_a_month_is_known_at_its_end(tmp_path, form):
    path = tmp_path / "a.csv"
    RETURNS.rename("ret").set_axis(MONTHS.strftime(form)).to_csv(path, index_label="month")
    same(read_returns(path), RETURNS.set_axis(MONTHS))
    EQUITY.rename("close").set_axis(MONTHS.strftime(form)).to_csv(path, index_label="month")
    same(read_levels(path), EQUITY.set_axis(MONTHS))
    first = pd.Series(1.0, pd.date_range("2015-01-01", periods=40, freq="MS"))
    assert read_weights(first, random_walk(40, seed=1)).index.equals(first.index.as_unit("ns"))  # decided on that day


def test_interest_is_as_smooth_as_cumulated_returns_and_is_not_taken_for_them():
    interest = pd.Series(np.linspace(0.0, 0.0002, 40), DAYS)
    same(read_returns(interest), interest)


def test_an_equity_curve_is_told_by_its_numbers_and_then_by_its_name():
    same(read_returns((EQUITY / EQUITY.iloc[0]).rename("returns")), RETURNS.iloc[1:])
    same(read_returns(EQUITY), RETURNS.iloc[1:])
    same(
        read_returns(EQUITY.rename("returns") / EQUITY.iloc[0] * 0.01, column="returns"),
        EQUITY.rename("x") / EQUITY.iloc[0] * 0.01,
    )
    same(read_returns(RETURNS.rename("close")))  # some packages keep the name of the prices
    same(read_returns(RETURNS.abs().rename("returns")), RETURNS.abs())
    same(read_returns(EQUITY.rename("close") * 1e-6), RETURNS.iloc[1:])  # a coin that costs almost nothing


def test_log_returns_are_told_by_their_name():
    same(read_returns(np.log1p(RETURNS).rename("log_returns")))
    same(read_levels(np.log1p(RETURNS).rename("Log Return")).pct_change().iloc[1:])


def test_a_price_that_has_grown_a_thousandfold_is_no_cumulated_return():
    days = pd.bdate_range("2010-07-01", periods=2000, unit="ns")
    price = pd.Series(0.06 * np.exp(np.cumsum(np.random.default_rng(0).normal(0.006, 0.05, 2000))), days, name="Close")
    assert price.iloc[-1] > 60.0
    same(read_returns(price), price.pct_change().iloc[1:])


def test_what_was_understood_about_a_file_is_logged_in_one_line(tmp_path, caplog, monkeypatch):
    path = tmp_path / "a.csv"
    pd.DataFrame({"strategy": RETURNS, "Benchmark": 0.01}).to_csv(path)
    monkeypatch.setattr(inputs.logger, "handlers", [caplog.handler])  # the command line may have taken it over
    monkeypatch.setattr(inputs.logger, "propagate", False)
    with caplog.at_level("INFO", inputs.logger.name):
        read_returns(path)
        read_returns(EQUITY)
    (message,) = caplog.messages
    assert message == (
        f"{path}: returns in column 'strategy', 40 bars of 1 day, 2020-01-01 00:00:00 to 2020-02-25 00:00:00; "
        "not used: Benchmark"
    )


def test_days_keep_their_date_and_hours_are_brought_to_utc(tmp_path):
    hours = pd.date_range("2020-03-01 09:30", periods=40, freq="h", tz="America/New_York")
    path = tmp_path / "a.csv"
    RETURNS.set_axis(hours).to_csv(path)
    assert read_returns(path).index.equals(hours.tz_convert("UTC").as_unit("ns"))
    bare = RETURNS.set_axis(hours.tz_localize(None))
    assert read_returns(bare).index.equals(hours.tz_localize(None).as_unit("ns"))
    assert read_returns(bare, timezone="America/New_York").index.equals(hours.tz_convert("UTC").as_unit("ns"))
    for table in (bare, RETURNS):
        with pytest.raises(DataError, match="cannot be read in the time zone 'Mars/Base'"):
            read_returns(table, timezone="Mars/Base")
    RETURNS.tz_localize("America/New_York").to_csv(path)  # midnights there: the offset changes with the season
    same(read_returns(path))


def test_levels_begin_one_bar_before_the_returns():
    levels = read_levels(RETURNS)
    assert levels.index[0] == DAYS[0] - pd.Timedelta(days=1)
    np.testing.assert_allclose(levels.pct_change().iloc[1:], RETURNS)
    assert read_levels(pd.DataFrame({"Close": EQUITY, "Volume": 1.0})).equals(EQUITY.rename("benchmark"))


def test_weights_go_to_their_symbols():
    bars = load_bars({"AA": random_walk(40, seed=1), "bb": random_walk(40, seed=2)})
    weights = pd.DataFrame({"BB": 0.25, "aa": 0.5}, index=bars.index)
    assert read_weights(weights, bars).iloc[0].to_dict() == {"AA": 0.5, "bb": 0.25}
    money = pd.DataFrame({"bb": 250.0, "aa": 500.0, "cash": 250.0}, index=bars.index)
    assert read_weights(money, bars).iloc[0].to_dict() == {"AA": 0.5, "bb": 0.25}
    shares = pd.DataFrame({"bb": 0.25, "aa": 0.5, "cash": 0.25}, index=bars.index)
    assert read_weights(shares, bars).iloc[0].to_dict() == {"AA": 0.5, "bb": 0.25}
    single = read_weights(pd.Series([np.nan, 1.0, np.nan], index=DAYS[:3]), random_walk(40, seed=1))
    np.testing.assert_array_equal(single[""], [1.0, np.nan])  # it begins with its first number
    long = weights.rename_axis("time").reset_index().melt("time", var_name="symbol", value_name="weight")
    pd.testing.assert_frame_equal(read_weights(long, bars), read_weights(weights, bars), check_freq=False, check_names=False)
    with pytest.raises(DataError, match="BB at 2000-01-01 00:00:00 is there more than once"):
        read_weights(pd.concat([long, long.iloc[:1]]), bars)
    with pytest.raises(DataError, match="no column for 'AA'; needed is one column per symbol: AA, bb"):
        read_weights(weights[["BB"]], bars)
    with pytest.raises(DataError, match="column 'cc' is no symbol"):
        read_weights(weights.assign(cc=1.0), bars)


def test_a_symbol_without_a_row_is_sold_and_one_without_a_number_is_held():
    bars = load_bars({symbol: random_walk(40, seed=seed) for seed, symbol in enumerate("ABC")})
    rows = [(bars.index[k], "ABC"[k % 3], 1.0) for k in range(6)]
    rows += [(bars.index[6], "A", np.nan), (bars.index[6], "B", 0.5)]
    found = read_weights(pd.DataFrame(rows, columns=["date", "ticker", "target_weight"]), bars)
    np.testing.assert_array_equal(found.iloc[:6], np.tile(np.eye(3), (2, 1)))
    np.testing.assert_array_equal(found.iloc[6], [np.nan, 0.5, 0.0])


def test_rates_hold_until_the_next():
    rates = read_rates(pd.Series([0.01, 0.02], index=DAYS[[0, 10]]))
    np.testing.assert_array_equal(rates_at(rates, DAYS), np.where(np.arange(40) < 10, 0.01, 0.02))
    np.testing.assert_array_equal(rates_at(0.03, DAYS), np.full(40, 0.03))
    with pytest.raises(DataError, match="after the first bar"):
        rates_at(rates.iloc[1:], DAYS)
    fred = read_rates(pd.Series(["1.50", ".", "3.00"], index=DAYS[[0, 5, 10]], name="DTB3"))  # missing on holidays
    np.testing.assert_allclose(rates_at(fred, DAYS), np.where(np.arange(40) < 10, 0.015, 0.03))
    with pytest.raises(DataError, match="divide percentages by 100"):
        read_rates(pd.Series([1.0, 2.0], index=DAYS[[0, 10]]))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (RETURNS.to_numpy(), "is a ndarray; give a file, a pandas Series or a DataFrame"),
        (RETURNS.reset_index(drop=True), "no times; name a column time or date"),
        (pd.DataFrame({"a": RETURNS, "b": RETURNS}), "several columns (a, b) and none with a usual name; name one"),
        (100.0 * RETURNS, "divide percentages by 100"),
        (RETURNS.where(RETURNS.index != DAYS[7]), f"0 is missing at {DAYS[7]}; drop the row or fill it in"),
        (pd.concat([RETURNS.iloc[:5], RETURNS.iloc[4:]]), "the time 2020-01-07 00:00:00 is there more than once; drop all"),
        (EQUITY.where(EQUITY.index != DAYS[-1], 0.0).rename("equity"), "equity curve that falls to 0 at 2020-02-25"),
        ((1.0 + RETURNS).cumprod() - 1.0, "returns cumulated from the start, not returns per bar; give returns per bar"),
        ((1.05 + RETURNS).cumprod() - 1.0, "returns cumulated from the start"),  # all positive, as an equity curve is
        (RETURNS.iloc[:9].set_axis([f"0{day}/01/2020" for day in range(1, 10)]), "or 1 January 2020; write dates as"),
        (pd.DataFrame({"date": ["x"] * 40, "returns": RETURNS.to_numpy()}), "column 'date' does not hold times"),
        (pd.Series("x", DAYS), "holds no numbers over time"),
        (1.0 + LONGER, "looks like factors, 1.01 for a return of 1 %, not like returns; subtract 1"),
        (pd.DataFrame({"date": range(43831, 43871), "returns": RETURNS.to_numpy()}), "43831 is a day as spreadsheets"),
        (0.75 + 20.0 * RETURNS, "as large as an equity curve, but hardly depends on its value before; divide percent"),
        ((1.0 + 20.0 * RETURNS).rename("nav"), "hardly depends on its value before"),
        (pd.DataFrame({"date": [*DAYS.strftime("%Y-%m-%d"), "Total"], "returns": [*RETURNS, 0.1]}), "row 41 has 'Total'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_gets_one_line(table, message):
    with pytest.raises(DataError) as error:
        read_returns(table)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pkl", b"x", "pickles may run code when they are read; save it with .to_csv()"),
        ("a.xlsx", b"x", "unknown file type; give a file ending in .csv"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"time,returns\n", "holds no rows"),
        ("a.csv", b"\xff\xfe\x00", "cannot be read"),
        ("a.parquet", b"x", "cannot be read"),
        ("a.csv", b'{"data": [1, 2]}', "is JSON; give a file ending in .csv"),
    ],
)
def test_what_is_no_table_gets_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_returns(path)
    assert message in str(error.value)
    with pytest.raises(DataError, match="is a folder"):
        read_returns(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        read_returns(tmp_path / "absent.csv")
    with pytest.raises(DataError, match="no column 'y' with numbers; there are x"):
        read_returns(RETURNS.to_frame("x"), column="y")
