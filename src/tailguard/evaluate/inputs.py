"""Tables as other programs write them: returns, equity curves, weights, rates. Read as they are, or refused with one line.

A table is a CSV or Parquet file, which may be compressed, a pandas Series or a DataFrame, with its times in the index or in a
column, in any order. Which column holds what is told by its name, and whether it holds returns or an equity curve by its
numbers.
"""

import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar, cast

import numpy as np
import pandas as pd

from tailguard.evaluate.stats.series import Floats
from tailguard.market.bars import PRICES, ZONE_REMEDY, DataError, symbols_of, timeframe_text
from tailguard.market.columns import as_numbers
from tailguard.market.files import DATE, SAMPLE_LINES, SEPARATORS, UNREADABLE, decode, unpacked
from tailguard.market.times import (
    SPREADSHEET_DAYS,
    AmbiguousTimes,
    Zone,
    are_clocks,
    are_days,
    as_text,
    join_clocks,
    localize,
    parse_times,
    require_zone,
)

logger = logging.getLogger(__name__)
Table = TypeVar("Table", pd.Series, pd.DataFrame)
TableSource = str | Path | pd.Series | pd.DataFrame
SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".gz", ".zip")
# As :func:`_plain` writes them, the likelier ones first. A name decides which column is meant; numbers decide what they are.
TIME_NAMES = ("time", "date", "datetime", "timestamp", "month")
RETURN_NAMES = (
    "returns", "return", "strategy_returns", "strategy_return", "daily_returns", "daily_return", "monthly_returns",
    "monthly_return", "portfolio_returns", "portfolio_return", "algorithm_returns", "ret", "rets", "strategy", "portfolio",
    "log_returns", "log_return", "log_ret",
)  # fmt: skip
LEVEL_NAMES = (
    "equity", "portfolio_value", "account_value", "total_value", "value", "nav", "balance", "adj_close", "close", "price",
)  # fmt: skip
BENCHMARK_NAMES = ("benchmark", "benchmark_returns", "benchmark_return", "market", "market_returns", "market_return")
WEIGHT_NAMES = ("weight", "weights", "target", "target_weight", "position", "positions", "exposure")
SYMBOL_NAMES = ("symbol", "ticker", "asset", "instrument", "sid", "tic")
RATE_NAMES = ("rate", "cash_rate", "risk_free", "riskfree", "rf", "yield")
# Rates as FRED publishes them under these names, in percent: bills of one and three months, and money overnight.
PERCENT_RATES = (
    "dtb3",
    "dtb4wk",
    "tb3ms",
    "dgs1mo",
    "dgs3mo",
    "gs1m",
    "gs3m",
    "fedfunds",
    "dff",
    "effr",
    "sofr",
    "ecbestrvolwgttrmdmnrt",
)
MONTH_FORMATS = ("%Y%m", "%Y-%m", "%Y/%m", "%b %Y", "%B %Y", "%b-%Y", "%b-%y")
LEVEL_FROM = 0.5  # numbers that are larger are an equity curve: no strategy gains as much on the usual bar
# Cumulated returns are close to the value before, begin near 0, and move; interest, which is as smooth, hardly moves.
FEWEST_CUMULATED, CUMULATED_CORRELATION, CUMULATED_MOVE = 32, 0.9, 1e-4
# An equity curve is close to its value before; factors, which are around 1, and percentages are not. So many values show it.
FEWEST_LEVELS, FACTOR_RANGE, LEVEL_CORRELATION = 32, 0.1, 0.3
BAR_NAMES = {"open", "high", "low", "volume"}
LEAST_RATE, MOST_RATE = -0.02, 1.0  # interest per year: lower than any that was ever paid on cash, and percentages
PER_BAR_RATES = ("rf", "risk_free", "riskfree")  # names that files of factors give to the interest of a day or a month
MOST_GROSS = 1.5  # rows of positions that sum to more are amounts of money if there is a column of cash


def read_returns(
    source: TableSource, column: str | None = None, what: str = "returns", timezone: str | None = None
) -> pd.Series:
    """Return simple returns per bar, indexed by the time at which each was earned.

    As in all tables of this module, times of day are in UTC, and say so, if their zone is known; else they are as written. Days
    keep their date.

    :param source: returns, or an equity curve or prices, whose changes are taken.
    :param column: name of the column; None finds it by the names that are usual.
    :param what: name of the table in errors.
    :param timezone: of times of day that name none.
    :raises DataError: naming the row or the column, and what to do.
    """
    table = _table(source, what, timezone)
    values = _pick(table, column, (*RETURN_NAMES, *LEVEL_NAMES), what)
    _say_understood(source, values, table, _kind(values))
    values = values.set_axis(_month_ends(pd.DatetimeIndex(values.index)))
    _require_uncumulated(values, what)
    _require_true_levels(values, what)
    if _kind(values) == "equity curve":
        return values.pct_change(fill_method=None).iloc[1:].rename(what)
    if _kind(values) == "log returns":
        values = np.expm1(values)
    _require_returns(values, what)
    return values.rename(what)


def read_levels(
    source: TableSource, column: str | None = None, what: str = "benchmark", timezone: str | None = None
) -> pd.Series:
    """Return prices, or an index that earns the returns of a table and begins one bar before them.

    :param source: see :func:`read_returns`.
    :param column: see :func:`read_returns`.
    :param what: name of the table in errors.
    :param timezone: of times of day that name none.
    """
    table = _table(source, what, timezone)
    values = _pick(table, column, (*BENCHMARK_NAMES, *LEVEL_NAMES, *RETURN_NAMES), what)
    _say_understood(source, values, table, _kind(values).replace("equity curve", "prices"))
    if _kind(values) == "equity curve":
        _require_uncumulated(values, what)
        _require_true_levels(values, what)
        levels: pd.Series = values.rename(what).set_axis(_month_ends(pd.DatetimeIndex(values.index)))
        return levels
    returns = read_returns(values.to_frame(), None, what)
    start = pd.Series([1.0], index=[first_start(pd.DatetimeIndex(returns.index))])
    index: pd.Series = pd.concat([start, (1.0 + returns).cumprod()]).rename(what)
    return index


def read_weights(source: TableSource, bars: pd.DataFrame, what: str = "weights", timezone: str | None = None) -> pd.DataFrame:
    """Return target weights, one column per symbol of the bars; NaN holds.

    :param source: weights, a column per symbol, or a row per time and symbol; or positions in money beside a column `cash`,
        which are divided by their sum.
    :param bars: what is traded.
    :param what: name of the table in errors.
    :param timezone: of times of day that name none.
    :raises DataError: naming the symbol that is missing or not known.
    """
    table = _table(_by_symbol(_frame(source, what), what), what, timezone, holes=True)
    named = {str(column).strip().lower(): column for column in table.columns}
    symbols = symbols_of(bars)
    if symbols == [""]:
        values = _pick(table.drop(columns=[named["cash"]] if "cash" in named else []), None, WEIGHT_NAMES, what, holes=True)
        chosen = values.to_frame()
    else:
        missing = [symbol for symbol in symbols if symbol.lower() not in named]
        unknown = [column for name, column in named.items() if name not in {"cash", *(symbol.lower() for symbol in symbols)}]
        if missing or unknown:
            wrong = f"no column for {missing[0]!r}" if missing else f"column {unknown[0]!r} is no symbol of the bars"
            raise DataError(f"{what}: {wrong}; needed is one column per symbol: {', '.join(symbols)}")
        chosen = table[[named[symbol.lower()] for symbol in symbols]]
    if "cash" in named:
        total = chosen.sum(axis=1) + table[named["cash"]]
        if float(total.abs().median()) > MOST_GROSS:  # shares of equity sum to 1, amounts of money to the equity
            chosen = chosen.div(total, axis=0)
    return chosen.set_axis(symbols, axis=1)


def read_closes(source: TableSource, what: str = "bars", timezone: str | None = None) -> dict[str, pd.DataFrame] | None:
    """Return bars of closes alone, by symbol, the only one unnamed; None for a table that holds more prices of a bar.

    :param source: closes, one column per symbol.
    :param what: name of the table in errors.
    :param timezone: of times of day that name none.
    """
    if isinstance(source, pd.DataFrame) and isinstance(source.columns, pd.MultiIndex):
        return None
    table = _table(source, what, timezone, holes=True)
    if {_plain(name) for name in table.columns} & BAR_NAMES:
        return None
    symbols = [""] if len(table.columns) == 1 else [str(name) for name in table.columns]
    closes = {symbol: table[name].dropna() for symbol, name in zip(symbols, table.columns, strict=True)}
    for symbol, prices in closes.items():
        named = f"{what}: {symbol}" if symbol else what
        _require_uncumulated(prices, named)
        _require_true_levels(prices, named)
    return {
        symbol: pd.DataFrame({**dict.fromkeys(PRICES, prices), "volume": 0.0}, index=prices.index)
        for symbol, prices in closes.items()
    }


def read_rates(source: TableSource, what: str = "cash_rate", timezone: str | None = None) -> pd.Series:
    """Return interest rates per year by time, as fractions; where one is missing, that before it holds.

    :param source: rates, such as 0.03 for 3 %; those of FRED, which are told by their names, in percent.
    :param what: name of the table in errors.
    :param timezone: of times of day that name none.
    """
    table = _table(source, what, timezone)
    rates = _pick(table, None, (*RATE_NAMES, *PERCENT_RATES), what, holes=True).dropna()
    percent = _plain(rates.name) in PERCENT_RATES
    kind = "interest rates in percent" if percent else "interest rates"
    rates = rates / 100.0 if percent else rates
    _say_understood(source, rates, table, f"{kind} ({rates.median():.2%} per year in the middle)")
    wrong = rates[(rates >= MOST_RATE) | (rates < LEAST_RATE)]
    if len(wrong):
        remedy = "rates are fractions, 0.03 is 3 %: divide percentages by 100"
        raise DataError(f"{what}: a rate of {wrong.iloc[0]:g} per year; {remedy}")
    return rates


def rate_doubts(rates: float | pd.Series) -> list[str]:
    """Return what to check about interest rates whose name is that of rates per bar in other files."""
    if not isinstance(rates, pd.Series) or _plain(rates.name) not in PER_BAR_RATES:
        return []
    return [
        f"The cash rate in column {rates.name} is taken to be per year, {rates.median():.2%} in the middle: files of factors "
        "hold rates per day or month under this name; those have to be converted."
    ]


def rates_at(rates: float | pd.Series, starts: pd.DatetimeIndex) -> Floats:
    """Return the rate that was known at the start of each bar, ``[n]``.

    :param rates: one number, or rates by time.
    :param starts: ``[n]``.
    """
    if not isinstance(rates, pd.Series):
        return np.full(len(starts), float(rates))
    rates = without_zone(rates)
    known = np.searchsorted(rates.index.to_numpy(), starts.to_numpy(), side="right") - 1
    if known[0] < 0:
        raise DataError(f"cash_rate: begins at {rates.index[0]}, after the first bar, {starts[0]}; give earlier rates as well")
    return rates.to_numpy(dtype=np.float64)[known]


def first_start(times: pd.DatetimeIndex) -> pd.Timestamp:
    """Return when the first bar began: the end of the month before where bars end with months, else the usual step before."""
    ends = bool(times.is_month_end.all()) and len(times) > 2
    return times[0] - pd.offsets.MonthEnd(1) if ends else times[0] - usual_step(times)


def usual_step(index: pd.Index) -> pd.Timedelta:
    """Return the usual time between two bars."""
    return pd.Timedelta(np.median(np.diff(pd.DatetimeIndex(index).tz_localize(None).to_numpy())))


def require_one_clock(times: Mapping[str, pd.DatetimeIndex]) -> None:
    """Refuse times of day of which some name their zone and others do not: signals may stand before what they are made of.

    :param times: of the tables that are to be compared, by their names.
    """
    clocked = {what: index for what, index in times.items() if not are_days(index)}
    zoned, bare = ([what for what, index in clocked.items() if (index.tz is not None) is kind] for kind in (True, False))
    if zoned and bare:
        raise DataError(f"the times of the {zoned[0]} name their zone and those of the {bare[0]} do not; {ZONE_REMEDY}")


def without_zone(table: Table) -> Table:
    """Return a table without the zone of its times."""
    return table.tz_localize(None) if cast(pd.DatetimeIndex, table.index).tz is not None else table


def _table(source: TableSource, what: str, timezone: str | None = None, holes: bool = False) -> pd.DataFrame:
    """Return the numeric columns of a table, sorted by their times, which are unique, and in UTC if their zone is known.

    :param timezone: of times of day that name none.
    :param holes: True leaves NaN where it is; False lets :func:`_pick` refuse it.
    """
    frame = _frame(source, what)
    index = _on_clock(pd.DatetimeIndex(frame.index), timezone)
    if index.has_duplicates:
        repeated = index[index.duplicated()][0]
        raise DataError(f"{what}: the time {repeated} is there more than once; drop all rows of it but one")
    numbers = {name: _fractions(frame[name]) for name in frame.columns}
    kept = {name: values for name, values in numbers.items() if np.isfinite(values).any()}
    if len(index) == 1:
        remedy = "give a single rate as a number, such as 0.03" if what == "cash_rate" else "at least two are needed"
        raise DataError(f"{what}: holds one row; {remedy}")
    if not kept:
        raise DataError(f"{what}: holds no numbers over time; needed are times and a column of numbers")
    table = pd.DataFrame(kept, index=index.rename("time")).sort_index()
    return table if holes else table.replace([np.inf, -np.inf], np.nan)


def _frame(source: TableSource, what: str) -> pd.DataFrame:
    """Return a table as it stands, indexed by its times."""
    if isinstance(source, pd.Series):
        frame = source.to_frame()
    elif isinstance(source, pd.DataFrame):
        frame = source
    elif isinstance(source, str | Path):
        frame = _read(Path(source))
    else:
        raise DataError(f"{what}: is a {type(source).__name__}; give a file, a pandas Series or a DataFrame, with times")
    if isinstance(frame.columns, pd.MultiIndex):
        raise DataError(f"{what}: has several levels of columns; choose those that hold the numbers")
    frame = frame.rename(columns=str)
    if not len(frame):
        raise DataError(f"{what}: holds no rows; needed are times and a column of numbers")
    return frame if isinstance(frame.index, pd.DatetimeIndex) else _with_times(frame, what)


def _by_symbol(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """Return a column per symbol for a table with a row per time and symbol; others come back as they are.

    A symbol that has no row at a time is not held from then on; a row without a number holds.
    """
    plain = {_plain(name): name for name in frame.columns}
    symbol = next((plain[name] for name in SYMBOL_NAMES if name in plain), None)
    weight = next((plain[name] for name in WEIGHT_NAMES if name in plain), None)
    if symbol is None or weight is None or frame[symbol].nunique() < 2:
        return frame
    time = pd.DatetimeIndex(frame.index).rename("time")
    long = pd.DataFrame({"time": time, "symbol": frame[symbol].to_numpy(), "weight": _fractions(frame[weight])})
    twice = long.duplicated(["time", "symbol"]).to_numpy()
    if twice.any():
        first = long[twice].iloc[0]
        raise DataError(f"{what}: {first['symbol']} at {first['time']} is there more than once; drop all rows of it but one")
    wide = long.set_index(["time", "symbol"])["weight"].unstack(fill_value=0).rename(columns=str)
    absent = wide.size - len(long)
    if absent:
        logger.info("%s: a row per time and symbol; %s pairs without a row are weights of 0", what, f"{absent:,}")
    return wide


def _fractions(column: pd.Series) -> Floats:
    """Return a column as numbers; where its name has a percent sign and its cells have none, they are percentages."""
    values = as_numbers(column)
    marked = not pd.api.types.is_numeric_dtype(column) and bool(as_text(column).str.contains("%", regex=False).any())
    return values / 100.0 if "%" in str(column.name) and not marked else values


def _read(path: Path) -> pd.DataFrame:
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give a file ending in {', '.join(SUFFIXES)}")
    if not path.stat().st_size:
        raise DataError(f"{path}: is empty")
    if not path.name.endswith(SUFFIXES):
        legal = f"give a file ending in {', '.join(SUFFIXES)}"
        advice = "pickles may run code when they are read; save it with .to_csv() or .to_parquet()"
        raise DataError(f"{path}: {advice if path.suffix in ('.pkl', '.pickle') else f'unknown file type; {legal}'}")
    try:
        content = unpacked(path.read_bytes())
        if content.startswith(b"PAR1") or path.name.endswith(".parquet"):
            return pd.read_parquet(io.BytesIO(content))
        text, _ = decode(content)
        if text.lstrip()[:1] in ("{", "["):
            raise DataError(f"is JSON; give a file ending in {', '.join(SUFFIXES)}")
        separator, above, headless = _layout(text)
        table = pd.read_csv(
            io.StringIO(text),
            sep=r"\s+" if separator == " " else separator,
            skiprows=above,
            skipinitialspace=True,
            header=None if headless else "infer",
        )
        return table.dropna(how="all")  # spreadsheets write empty rows below a table
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None


def _layout(text: str) -> tuple[str, int, bool]:
    """Return the separator, the number of lines above the table, and whether it has no header, as a Series may be saved.

    The first row is the first one with a date, and the header stands above it; without dates, the first line is the header.
    """
    lines = text.splitlines()[:SAMPLE_LINES]
    filled = [line for line in lines if line.strip()]
    often = [mark for mark in SEPARATORS if sum(mark in line.strip() for line in filled) > 0.5 * len(filled)]
    separator = often[0] if often else ","
    rows = [line.split(separator) if separator != " " else line.split() for line in lines]
    first = next((k for k, row in enumerate(rows) if any(DATE.match(cell.strip(' "')) for cell in row[:2])), None)
    if first is None:
        return separator, 0, False
    header = next((k for k in range(first - 1, -1, -1) if lines[k].strip()), None)
    return separator, first if header is None else header, header is None


def _with_times(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """Index a table by its times: a column that is named so, the index, or else the first column that reads as times."""
    counter = [name for name in frame.columns if name.lower().startswith("unnamed") and _counts(frame[name])]
    frame = frame.drop(columns=counter)  # the numbers of the rows, as pandas saves them
    plain = {_plain(name): name for name in frame.columns}
    if "date" in plain and "time" in plain and are_clocks(frame[plain["time"]]):
        joined = join_clocks(frame[plain["date"]], frame[plain["time"]])
        frame = frame.drop(columns=plain.pop("time")).assign(**{plain["date"]: joined})
    for name in [plain[name] for name in TIME_NAMES if name in plain]:
        times = _times(frame[name], what)
        if times is None:
            raise DataError(f"{what}: column {name!r} does not hold times{_not_a_time(frame[name])}, such as 2020-12-31 16:00")
        return frame.drop(columns=name).set_index(times)
    if not pd.api.types.is_numeric_dtype(frame.index.dtype) and (times := _times(frame.index.to_series(), what)) is not None:
        return frame.set_index(times)
    for name in frame.columns:
        if not pd.api.types.is_numeric_dtype(frame[name]) and (times := _times(frame[name], what)) is not None:
            return frame.drop(columns=name).set_index(times)
    raise DataError(f"{what}: no times; name a column time or date, or pass a DatetimeIndex")


def _not_a_time(column: pd.Series) -> str:
    """Return which cell is no time, where the others are times, or how the numbers of a spreadsheet become times."""
    if pd.api.types.is_numeric_dtype(column) and bool(column.between(*SPREADSHEET_DAYS).all()):
        return f": {column.iloc[0]:g} is a day as spreadsheets count them; format the column as dates there"
    try:
        absent = parse_times(column).values.isna()
    except DataError:
        return ""
    return f": row {int(np.argmax(absent)) + 1} has {column.iloc[int(np.argmax(absent))]!r}" if absent.any() else ""


def _counts(column: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(column) and np.array_equal(column, np.arange(len(column))))


def _times(column: pd.Series, what: str) -> pd.DatetimeIndex | None:
    """Return a column as times; None if it does not hold any.

    :raises DataError: if it holds dates that can be read in two ways.
    """
    if pd.api.types.is_datetime64_any_dtype(column):
        return pd.DatetimeIndex(column)
    months = _months(column)
    if months is not None:
        return months
    try:
        times = parse_times(column if pd.api.types.is_numeric_dtype(column) else as_text(column))
    except AmbiguousTimes as error:
        raise DataError(f"{what}: {str(error).partition(';')[0]}; write dates as 2020-12-31") from None
    except DataError:
        return None
    if times.values.isna().any():
        return None
    return times.values.tz_localize("UTC") if times.in_utc else times.values


def _months(column: pd.Series) -> pd.DatetimeIndex | None:
    """Return the ends of the months that a column names, such as 202012 or Dec 2020; None if it does not name months."""
    text = as_text(column)
    for form in MONTH_FORMATS:
        if not pd.isna(pd.to_datetime(text.iloc[0], format=form, errors="coerce")):
            months = pd.to_datetime(text, format=form, errors="coerce")
            return None if bool(months.isna().any()) else pd.DatetimeIndex(months) + pd.offsets.MonthEnd(0)
    return None


def _month_ends(times: pd.DatetimeIndex) -> pd.DatetimeIndex:
    """Return the ends of months for times that are all first days of months, month by month: a return of 1 January is that of
    January, as pandas and Yahoo label it.
    """
    steps = np.diff(times.year * 12 + times.month)
    monthly = len(times) > 2 and bool((times.day == 1).all()) and bool((times == times.normalize()).all())
    return times + pd.offsets.MonthEnd(0) if monthly and float(np.median(steps)) == 1.0 else times


def _plain(name: object) -> str:
    """Return a name in lower case with one underscore for whatever is neither letter nor digit."""
    return re.sub(r"[^a-z0-9]+", "_", str(name).lower()).strip("_")


def _on_clock(index: pd.DatetimeIndex, timezone: str | None) -> pd.DatetimeIndex:
    """Return days without a zone, times of day in UTC if their zone is known, and else as they are."""
    if are_days(index):
        require_zone(timezone)
        return index.tz_localize(None).as_unit("ns")
    if index.tz is None and timezone is not None:
        index = localize(index, Zone(timezone))
    return (index if index.tz is None else index.tz_convert("UTC")).as_unit("ns")


def _pick(table: pd.DataFrame, column: str | None, names: tuple[str, ...], what: str, holes: bool = False) -> pd.Series:
    """Return the column that is meant, without the missing values at its start.

    :param holes: False refuses values that are missing further on.
    """
    if column is not None:
        if column not in table.columns:
            raise DataError(f"{what}: no column {column!r} with numbers; there are {', '.join(map(str, table.columns))}")
        chosen = column
    else:
        plain = {_plain(name): name for name in table.columns}
        known = [plain[name] for name in names if name in plain]
        others = [name for name in table.columns if _plain(name) not in BENCHMARK_NAMES]
        if not known and len(table.columns) > 1 and len(others) != 1:
            listed = ", ".join(map(str, table.columns))
            raise DataError(f"{what}: several columns ({listed}) and none with a usual name; {_remedy(what)}")
        chosen = known[0] if known else others[0] if others else table.columns[0]
    values = table[chosen]
    values = values.loc[values.first_valid_index() :]
    empty = np.flatnonzero(values.isna().to_numpy())
    if len(empty) and not holes:
        raise DataError(f"{what}: {chosen} is missing at {values.index[empty[0]]}; drop the row or fill it in")
    return values


def _remedy(what: str) -> str:
    return "name one with --column (column=)" if what == "returns" else f"keep one, or call it {what.removesuffix('s')}"


def _kind(values: pd.Series) -> Literal["equity curve", "log returns", "returns"]:
    """Tell an equity curve from returns: it is positive, and larger than any usual return. Log returns are called so."""
    name = _plain(values.name)
    if bool((values > 0.0).all()) and (float(values.median()) >= LEVEL_FROM or name in LEVEL_NAMES):
        return "equity curve"
    return "log returns" if "log" in name.split("_") else "returns"


def _say_understood(source: TableSource, values: pd.Series, table: pd.DataFrame, kind: str) -> None:
    """Log in one line what was understood about a file."""
    if not isinstance(source, str | Path):
        return
    index = pd.DatetimeIndex(values.index)
    column = "" if len(table.columns) == 1 else f" in column {values.name!r}"
    others = [str(name) for name in table.columns if name != values.name]
    unused = f"; not used: {', '.join(others)}" if others else ""
    step = f" of {timeframe_text(usual_step(index))}" if len(index) > 1 else ""
    logger.info("%s: %s%s, %s bars%s, %s to %s%s", source, kind, column, f"{len(index):,}", step, index[0], index[-1], unused)


def _require_returns(values: pd.Series, what: str) -> None:
    """Refuse numbers that are no returns per bar, and say what they seem to be."""
    if not len(values):
        raise DataError(f"{what}: {values.name} holds no numbers")
    lowest = float(values.min())
    if lowest <= -1.0:
        remedy = "divide percentages by 100, or give an equity curve instead of profits in money"
        raise DataError(f"{what}: {values.name} falls to {lowest:g}, and a return of -1 loses everything; {remedy}")
    if float(values.median()) >= LEVEL_FROM:
        remedy = "end it before the account is gone, or give returns per bar"
        raise DataError(
            f"{what}: {values.name} looks like an equity curve that falls to {lowest:g} at {values.idxmin()}; {remedy}"
        )


def _require_uncumulated(values: pd.Series, what: str) -> None:
    """Refuse returns that are summed or multiplied up from the start: they are no equity curve, which would begin at 1."""
    if _cumulated(values.to_numpy(dtype=np.float64)):
        remedy = "give returns per bar, or an equity curve: the same plus 1"
        raise DataError(f"{what}: {values.name} looks like returns cumulated from the start, not returns per bar; {remedy}")


def _require_true_levels(values: pd.Series, what: str) -> None:
    """Refuse what is as large as an equity curve and is none: 1.01, or 1, for a return of 1 %."""
    numbers = values.to_numpy(dtype=np.float64)
    if len(numbers) < FEWEST_LEVELS or _kind(values) != "equity curve":
        return
    centred = numbers - numbers.mean()
    if float(centred[1:] @ centred[:-1]) >= LEVEL_CORRELATION * float(centred @ centred):
        return
    if abs(float(np.median(numbers)) - 1.0) < FACTOR_RANGE and float(numbers.std()) < FACTOR_RANGE:
        raise DataError(f"{what}: {values.name} looks like factors, 1.01 for a return of 1 %, not like returns; subtract 1")
    remedy = "divide percentages by 100"
    raise DataError(f"{what}: {values.name} is as large as an equity curve, but hardly depends on its value before; {remedy}")


def _cumulated(values: Floats) -> bool:
    if len(values) < FEWEST_CUMULATED:
        return False
    move = float(np.diff(values[:FEWEST_CUMULATED]).std())  # the early moves: those of a price that has grown are larger
    if move <= CUMULATED_MOVE or abs(float(values[0])) > 6.0 * move:
        return False
    centred = values - values.mean()
    return float(centred[1:] @ centred[:-1]) > CUMULATED_CORRELATION * float(centred @ centred)
