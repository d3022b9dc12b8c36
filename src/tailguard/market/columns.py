"""The roles of the columns of a file: names in use, formats known by name, and numbers as people write them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.market.bars import COLUMNS, IN_UTC, OPTIONAL, PRICES, DataError, timeframe, timeframe_text
from tailguard.market.files import (
    APOSTROPHES,
    CODES,
    FEWEST_COLUMNS,
    NUMBER,
    SCALE,
    SCALES,
    SIGNS,
    SPACES,
    FileConfig,
    RawTable,
)
from tailguard.market.times import Zone, are_clocks, as_text, clock_digits, join_clocks, parse_times

# Names in use, best first, in lower case without punctuation.
NAMES: dict[str, tuple[str, ...]] = {
    "time": (
        *(
            "time",
            "datetime",
            "date",
            "timestamp",
            "time stamp",
            "date time",
            "gmt time",
            "local time",
            "open time",
            "time open",
        ),
        *("window start", "unix", "unix timestamp", "t", "ts", "ts event", "begins at", "start", "start time", "trade date"),
        *("dates", "dtyyyymmdd", "time period start", "data", "datum", "fecha", "日期", "时间", "日付", "날짜", "дата"),
    ),
    "open": (
        *("open", "o", "open price", "opening price", "first", "otwarcie", "erster", "eröffnung", "eröffn", "apertura"),
        *("abertura", "ouverture", "ouv", "openen", "öppningskurs", "开盘", "开盘价", "始値", "시가", "открытие"),
        *("px open", "price open"),
    ),
    "high": (
        *("high", "h", "high price", "max", "najwyzszy", "najwyższy", "hoch", "máximo", "máxima", "massimo", "plus haut"),
        *("hoog", "högstakurs", "最高", "最高价", "高値", "고가", "максимум", "px high", "price high"),
    ),
    "low": (
        *("low", "l", "low price", "min", "najnizszy", "najniższy", "tief", "mínimo", "mínima", "minimo", "plus bas"),
        *("laag", "lägstakurs", "最低", "最低价", "安値", "저가", "минимум", "px low", "price low"),
    ),
    "close": (
        *("close", "c", "close price", "closing price", "last", "close last", "price", "settle", "zamkniecie", "zamknięcie"),
        *("schlusskurs", "schluss", "zuletzt", "cierre", "último", "ultimo", "chiusura", "clôture", "dernier"),
        *("fechamento", "slot", "stängningskurs", "收盘", "收盘价", "終値", "종가", "закрытие", "px last", "price close"),
    ),
    "volume": (
        *("volume", "vol", "v", "real volume", "base volume", "volume base", "wolumen", "volumen", "stuecke", "stücke"),
        *("total volume", "volume traded", "px volume", "volym", "tickvol", "tick volume", "tickvolume"),
        *("成交量", "出来高", "거래량", "объем", "объём"),
    ),
    "funding": ("funding", "funding rate"),
    "adjusted": ("adj close", "adjclose", "adjusted close", "close adjusted", "closeadj", "adjusted"),
    "symbol": ("symbol", "ticker", "tic", "ts code", "instrument", "code", "name", "pair"),
}
# Of columns with hours beside one of dates.
HOURS = ("hour", "hours", "stunde", "godzina", "hora", "heure")
# Formats known by name, by what only they have: the normal names of their columns.
FORMATS: dict[str, frozenset[str]] = {
    "MetaTrader 5": frozenset({"tickvol", "spread"}),
    "MetaTrader 5, from Python": frozenset({"tick volume", "spread", "real volume"}),
    "Stooq": frozenset({"ticker", "per", "openint"}),
    "Stooq, in Polish": frozenset({"otwarcie", "zamkniecie"}),
    "yfinance": frozenset({"dividends", "stock splits"}),
    "Yahoo": frozenset({"adj close", "open", "date"}),
    "Binance": frozenset({"open time", "close time", "open"}),
    "Alpaca": frozenset({"trade count", "vwap"}),
    "Interactive Brokers": frozenset({"average", "bar count"}),
    "Polygon": frozenset({"window start", "transactions"}),
    "Polygon, from its API": frozenset({"t", "o", "c", "v", "n", "vw"}),
}
# Files without a header, by the number of columns after the time: their names.
HEADERLESS: dict[str, tuple[str, ...]] = {
    "CCXT": (*COLUMNS,),
    "Kraken": (*COLUMNS, "trades"),
    "Kraken, from its API": (*PRICES, "vwap", "volume", "count"),
    "Binance": (*COLUMNS, "close time", "quote volume", "trades", "taker volume", "taker quote volume", "ignore"),
}
# Names of columns that hold a symbol as well: ('Close', 'SPY'), SPY.Close, Close_SPY, BTC-USD/close.
FIELD = r"(?P<field>(?i:adj(?:usted)?[ ._]close|open|high|low|close|adjusted|volume))"
FIELD_AND_TICKER = (
    re.compile(r"\('(?P<field>[^']+)', '(?P<ticker>[^']*)'\)"),
    re.compile(r"(?P<ticker>[^._ ]+)[._ ](?P<field>.+)"),
    re.compile(r"(?P<field>[^._]+)[._](?P<ticker>.+)"),
    re.compile(rf"(?P<ticker>.+?)[ ._:/|-]+{FIELD}"),
    re.compile(rf"{FIELD}[ ._:/|-]+(?P<ticker>.+)"),
)
# What such a name may hold instead: both sides of one market's quotes.
SIDES = {"bid", "ask", "mid", "offer"}
MISSING = frozenset({"", "-", "--", "n/a", "na", "nan", "null", "none", "#n/a", "."})
# Numbers of one text, a line each, in which a mark can only be the decimal one, or can be either.
DECIMAL_POINT = re.compile(r"^-?(?:\d[\d,]*,\d+\.\d*|\d+,\d+,[\d,]+|\d*\.(?!\d{3}$)\d*)$", re.MULTILINE)
DECIMAL_COMMA = re.compile(r"^-?(?:\d[\d.]*\.\d+,\d*|\d+\.\d+\.[\d.]+|\d*,(?!\d{3}$)\d*)$", re.MULTILINE)
EITHER = re.compile(r"^-?\d{1,3},\d{3}$", re.MULTILINE)
DECORATION = {ord(character): None for character in f"\t\r{SPACES}{APOSTROPHES}{SIGNS}"}
DECORATED = re.compile(r"[^\d.,\n-]")
CODED = re.compile(CODES)
WORDS = re.compile(r"[A-Za-z][A-Za-zł$.]")
SCALED = re.compile(rf"^(-?\d[\d.]*)({SCALE})$", re.MULTILINE)
SCALE_BEHIND = re.compile(rf"(?<=[\d.]){SCALE}$", re.MULTILINE)
# Prices of bonds in points and 32nds of them: 112'16, or 112'165 for a half more.
THIRTYSECONDS = re.compile(r"\d{1,3}'(?:[0-2]\d|3[01])[0257+]?")


@dataclass(frozen=True)
class Problem:
    """A cell that is not what its column says.

    :param row: of the table, from 0.
    :param reason: in one sentence.
    """

    row: int
    reason: str


@dataclass(frozen=True, eq=False)
class Part:
    """The bars of one symbol, as read: not yet checked.

    :param bars: in standard form, but for times and prices that may be wrong.
    :param lines: lines of the file, or None.
    :param problems: cells that could not be read; their rows hold NaN or NaT.
    """

    bars: pd.DataFrame
    lines: NDArray[np.int64] | None
    problems: tuple[Problem, ...] = ()


class AmbiguousNumbers(DataError):
    """Raised for prices that can be read in two ways, such as 1,234."""


@dataclass(frozen=True)
class Context:
    """The form of a stream, as its first part showed it: later parts, often a single bar, are read alike.

    :param columns: position of each role; None finds them.
    :param separator: between the columns.
    :param time_format: of the times, if it is one of ``strptime``; others tell themselves.
    :param clock: digits of times of day that are numbers.
    :param decimal: mark of the numbers, once one had decimals.
    :param last: the last time.
    :param step: time between bars, where somebody knows it; it tells dates from moments at midnight.
    :param newest_first: true if the times descend.
    """

    columns: Mapping[str, int] | None = None
    separator: str | None = None
    time_format: str | None = None
    clock: int | None = None
    decimal: Literal[".", ","] | None = None
    last: pd.Timestamp | None = None
    step: pd.Timedelta | None = None
    newest_first: bool = False

    @property
    def daily(self) -> bool | None:
        """True if bars are of a day or more, None where that is not known."""
        return None if self.step is None else self.step >= pd.Timedelta(days=1)

    def complete(self, config: FileConfig) -> FileConfig:
        """Return what is known about a file, with what was recognised where nothing was said."""
        found = {"separator": self.separator, "time_format": self.time_format, "decimal": self.decimal}
        return config.model_copy(update={key: value for key, value in found.items() if getattr(config, key) is None})


@dataclass(frozen=True, eq=False)
class Reading:
    """Bars as they were read, and what was understood.

    :param parts: by symbol; the empty string for the only one.
    :param facts: what was recognised, in words.
    :param ignored: columns that were not used.
    :param remarks: what was changed, in sentences, for the user to know.
    :param context: for the bars that follow.
    """

    parts: dict[str, Part]
    facts: tuple[str, ...]
    ignored: tuple[str, ...]
    remarks: tuple[str, ...]
    context: Context = Context()

    def summary(self) -> str:
        """Return what was understood, in one line."""
        bars = next(iter(self.parts.values())).bars
        index = pd.DatetimeIndex(bars.index)
        total = sum(len(part.bars) for part in self.parts.values())
        count = f"{total:,} bar{'s' if total > 1 else ''}"
        if len(self.parts) > 1:
            count += (
                f" of {len(self.parts)} symbols ({', '.join(list(self.parts)[:4])}{', ...' if len(self.parts) > 4 else ''})"
            )
        pieces = [count]
        if len(index) > 1 and index.notna().all():
            pieces[0] += f" of {timeframe_text(abs(timeframe(index)))}, {index[0]} to {index[-1]}"
        pieces += [", ".join(self.facts)] if self.facts else []
        pieces += [f"not used: {', '.join(self.ignored)}"] if self.ignored else []
        return "; ".join([*pieces, *self.remarks])


def understand(
    table: RawTable,
    config: FileConfig,
    keep: Sequence[str] = (),
    context: Context = Context(),  # noqa: B008
) -> Reading:
    """Find the columns of a file, and read its times and numbers.

    :param table: from :mod:`tailguard.market.files`.
    :param config: what the user says about it.
    :param keep: further columns to read, by their names in the file.
    :param context: of the bars before, for a part of a stream.
    :raises DataError: when a column is missing, or when something can be read in two ways.
    """
    if len(table.cells) == 0:
        raise DataError("no rows")
    table, empty = _without_empty_rows(table)
    wide = _tickers(table.headers)
    if wide is not None and len(set(wide[1]) - {""}) > 1 and {normal(ticker) for ticker in wide[1]} <= {"", *SIDES}:
        _require_side(table, config, wide)
        wide = None
    if wide is not None:
        reading = _understand_wide(table, config, keep, wide, context)
        return replace(reading, remarks=(*reading.remarks, *empty))
    config = context.complete(config)
    table = _with_names(table)
    positions, ignored, facts = _roles(table, config, keep) if context.columns is None else (context.columns, (), ())
    named = {role: table.cells.iloc[:, k] for role, k in positions.items()}
    clock = _clock(named) if context.clock is None else context.clock
    times = parse_times(
        join_clocks(named["time"], named["clock"], clock) if "clock" in named else named["time"],
        config.time_format,
        Zone(config.timezone, context.last, context.daily),
    )
    absent = named["time"].isna().to_numpy()
    problems = [
        Problem(int(row), "the time is missing" if absent[row] else f"{_shown(named['time'].iloc[row])} is not a time")
        for row in np.flatnonzero(times.values.isna())
    ]
    if len(problems) > 0.5 * len(times.values):
        raise DataError(f"{problems[0].reason}; give the format with --time-format, or the column with --columns time=NAME")
    values, more, decimal = _numbers(named, config, keep)
    problems += more
    facts = (*facts, *(() if times.form == "times" else (f"times {times.form}",)))
    facts = (*facts, *(("local dates",) if times.local else ()), *(("decimal comma",) if decimal == "," else ()))
    values, remarks = _completed(values, config.adjusted)
    frame = pd.DataFrame(values, index=times.values.as_unit("ns").rename("time"))
    frame.attrs[IN_UTC] = times.in_utc
    if "adjusted" in named and not config.adjusted:
        ignored = (*ignored, "the adjusted close (--adjusted uses it)")
    parts = dict(_split(frame, table.lines, sorted(problems, key=lambda problem: problem.row), named.get("symbol")))
    newest_first = any(_descending(part.bars.index) for part in parts.values())
    if newest_first:
        facts = (*facts, "newest first")
        parts = {symbol: _ascending(part) for symbol, part in parts.items()}
    later = Context(
        columns=None if table.lines is None else positions,  # objects in JSON name theirs, in any order
        separator=table.separator,
        time_format=times.form if times.form.startswith("%") else None,
        clock=clock,
        decimal=decimal,
        last=times.values.max(),
        step=context.step,
        newest_first=newest_first,
    )
    return Reading(parts, facts, ignored, (*remarks, *empty), later)


def _without_empty_rows(table: RawTable) -> tuple[RawTable, tuple[str, ...]]:
    """Leave out rows of separators and nothing between them, as spreadsheets write below a table, and say so."""
    empty = table.cells.iloc[:, 0].isna().to_numpy()
    empty = table.cells.isna().all(axis=1).to_numpy() if empty.any() else empty
    if not empty.any() or empty.all():
        return table, ()
    lines = None if table.lines is None else table.lines[~empty]
    rows = f"{int(empty.sum())} empty row{'s' if empty.sum() > 1 else ''} left out"
    return replace(table, cells=table.cells[~empty].reset_index(drop=True), lines=lines), (rows,)


def _with_names(table: RawTable) -> RawTable:
    """Name the columns by the header row with most of the names in use; above it may be a title, and below it units."""
    known = {alias for aliases in NAMES.values() for alias in aliases}
    if len(table.headers) < 2:
        return table
    names = max(reversed(table.headers), key=lambda row: len({normal(name) for name in row} & known))
    return replace(table, cells=table.cells.set_axis(list(names), axis=1), headers=(names,))


def _require_side(table: RawTable, config: FileConfig, wide: tuple[list[str], list[str]]) -> None:
    """Refuse bid and ask prices, which look like two symbols, unless the user names those that are meant."""
    fields, sides = wide
    side = next(filter(None, sides))
    columns = {normal(field): name for field, name, of in zip(fields, table.cells.columns, sides, strict=True) if of == side}
    if not set(PRICES) <= set(config.columns):
        said = ",".join(f"{price}={columns[price]}" for price in PRICES)
        raise DataError(f"prices of {' and '.join(dict.fromkeys(filter(None, sides)))}; say which with --columns {said}")


def normal(name: str) -> str:
    """Return a column's name in lower case, without punctuation, numbering and what stands in parentheses."""
    text = re.sub(r"\(.*?\)|[<>\"'*]|(?<=[a-z])(?=[A-Z])", " ", str(name)).lower()
    return " ".join(re.sub(r"^\s*\d+[.)]\s*|[_./\-:]+", " ", text).split())


def _roles(table: RawTable, config: FileConfig, keep: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...], tuple[str, ...]]:
    """Return the positions of the roles, the names of the columns that were not used, and the format if it has a name."""
    cells, facts = table.cells, table.facts
    names = list(cells.columns)
    positions: dict[str, int] = {}
    if not table.headers and not config.columns:
        names, known = _headerless(cells)
        facts = (known, *facts)
    normalised = [normal(name) for name in names]
    if table.headers:
        facts = (*_known(normalised), *facts)
    for role, column in config.columns.items():
        if role not in NAMES:
            raise DataError(f"--columns {role}={column}: {role!r} is no role of a column; they are {', '.join(NAMES)}")
        positions[role] = _position(role, column, names)
    for role, aliases in NAMES.items():
        if role not in positions:
            found = [
                k for alias in aliases for k, name in enumerate(normalised) if name == alias and k not in positions.values()
            ]
            if role == "volume":  # in coins and in dollars: the first of them
                found += [k for k, name in enumerate(normalised) if name.startswith("volume ") and k not in found]
            elif len({normalised[k] for k in found}) < len(found):
                raise DataError(f"two columns are named {names[found[0]]!r}: say which with --columns {role}=NUMBER")
            if found:
                positions[role] = _livelier(cells, found) if role == "volume" else found[0]
    _find_time(cells, names, normalised, positions)
    missing = [role for role in ("time", *PRICES) if role not in positions]
    if missing:
        among = ", ".join(filter(None, names)) or f"{len(names)} without names"
        raise DataError(f"no column for {', '.join(missing)} among {among}; {_remedy(table, missing, positions)}")
    clock = _clock_column(cells, normalised, positions)
    used = set(positions.values()) | ({clock} if clock is not None else set())
    for column in keep:
        positions[column] = _position("features.columns", column, names)
    if clock is not None:
        positions["clock"] = clock
    ignored = [names[k] for k in range(len(names)) if k not in used and names[k] and names[k] not in keep]
    return positions, tuple(ignored), facts


def _remedy(table: RawTable, missing: Sequence[str], positions: Mapping[str, int]) -> str:
    """Return what to do about columns that were not found: name them, or take one price where each column is a symbol's."""
    others = [k for k in range(table.cells.shape[1]) if k not in positions.values()]
    if list(missing) == list(PRICES) and not _in_order(table.cells.iloc[:, others[: len(PRICES)]]):
        first = str(table.cells.columns[others[0]])
        same = ",".join(f"{price}={first}" for price in PRICES)
        return f"if each column is the price of a symbol, give each a file, or --columns {same} trades one at that price"
    encoding = ", or save the file as UTF-8" if "cp1252" in table.facts else ""
    return f"name them with --columns {missing[0]}=NAME{encoding}"


def _in_order(cells: pd.DataFrame) -> bool:
    """Return whether four columns are open, high, low, close, by their sizes."""
    prices = cells.apply(lambda values: pd.to_numeric(_cleaned(values, None), errors="coerce")).to_numpy()
    if prices.shape[1] < len(PRICES):
        return False
    with np.errstate(invalid="ignore"):
        in_order = (prices[:, 1] >= np.fmax.reduce(prices, axis=1)) & (prices[:, 2] <= np.fmin.reduce(prices, axis=1))
    return float(np.mean(in_order)) >= 0.9


def _known(names: Sequence[str]) -> tuple[str, ...]:
    return next(((form,) for form, columns in FORMATS.items() if columns <= set(names)), ())


def _position(role: str, column: str | int, names: Sequence[str]) -> int:
    """Return the position of a column that the user named, or counted from 1."""
    if str(column) in names:
        return list(names).index(str(column))
    matches = [k for k, name in enumerate(names) if name and normal(name) == normal(str(column))]
    if len(matches) == 1:
        return matches[0]
    if str(column).isdigit() and 1 <= int(column) <= len(names):
        return int(column) - 1
    raise DataError(
        f"no column {column!r} for {role}; the file has {', '.join(filter(None, names)) or f'{len(names)} columns'}"
    )


def _headerless(cells: pd.DataFrame) -> tuple[list[str], str]:
    """Return the names of the columns of a file without a header, and its format."""
    names = [""] * cells.shape[1]
    column = 0
    if cells.shape[1] > FEWEST_COLUMNS + 1 and not _is_time(cells.iloc[:, 0]) and cells.iloc[:, 0].nunique() < len(cells):
        names[0], column = "symbol", 1
    names[column], form = "time", ""
    beside = cells.iloc[:, column + 1]
    if not pd.api.types.is_numeric_dtype(beside) and are_clocks(beside):  # 1650 may be a price
        names[column], names[column + 1] = "date", "time"
        form = "MetaTrader 4" if re.match(r"\d{4}\.", str(cells.iloc[0, column])) else ""
        column += 1
    rest = cells.shape[1] - column - 1
    epoch = column == 0 and _is_epoch(cells.iloc[:, 0])
    known = next((form for form, columns in HEADERLESS.items() if len(columns) == rest and epoch), "")
    columns = HEADERLESS.get(known, COLUMNS)[:rest]
    names[column + 1 : column + 1 + len(columns)] = columns
    first = column + 1
    if not _in_order(cells.iloc[:, first : first + len(PRICES)]):
        raise DataError(
            f"no header, and columns {first + 1} to {first + 4} are not open, high, low, close; "
            "name them with --columns time=1,open=2,..."
        )
    return names, known or form or "unnamed columns"


def _is_epoch(values: pd.Series) -> bool:
    """Return true for seconds, or parts of them, since 1970; 20130513 is a date."""
    return pd.api.types.is_numeric_dtype(values) and parse_times(values.iloc[:50]).form.startswith("epoch")


def _is_time(values: pd.Series) -> bool:
    try:
        return float(np.mean(parse_times(values.iloc[:50]).values.notna())) > 0.5
    except DataError as error:
        return "--time-format %" in str(error)  # ambiguous dates are times


def _find_time(cells: pd.DataFrame, names: Sequence[str], normalised: Sequence[str], positions: dict[str, int]) -> None:
    """Take an unnamed first column, or the only one whose values are times, where no name says so."""
    if "time" in positions:
        return
    candidates = [k for k, name in enumerate(normalised) if name in ("", "index") or name.startswith("unnamed")]
    candidates += [k for k in range(len(names)) if k not in candidates and k not in positions.values()]
    for k in candidates:
        if not pd.api.types.is_float_dtype(cells.iloc[:, k]) and _is_time(cells.iloc[:, k]):
            positions["time"] = k
            return


def _clock_column(cells: pd.DataFrame, normalised: Sequence[str], positions: dict[str, int]) -> int | None:
    """Return the column of times of day beside one of dates, and let ``time`` be the dates."""
    dates = [k for k, name in enumerate(normalised) if name in ("date", "data", "datum", "day", "dtyyyymmdd")]
    clocks = [k for k, name in enumerate(normalised) if name in ("time", "czas", "uhrzeit", *HOURS)]
    if dates and clocks and dates[0] != clocks[0] and are_clocks(cells.iloc[:, clocks[0]]):
        positions["time"] = dates[0]
        return clocks[0]
    return None


def _clock(named: Mapping[str, pd.Series]) -> int | None:
    """Return the digits of times of day that are numbers."""
    return clock_digits(named["clock"], normal(str(named["clock"].name)) in HOURS) if "clock" in named else None


def _livelier(cells: pd.DataFrame, found: Sequence[int]) -> int:
    """Return the first column that is not all zeros: forex files have ticks where others have a volume."""
    for k in found:
        values = pd.to_numeric(cells.iloc[:, k], errors="coerce").fillna(1.0)
        if bool((values != 0).any()):
            return k
    return found[0]


def _numbers(
    named: Mapping[str, pd.Series], config: FileConfig, keep: Sequence[str]
) -> tuple[dict[str, NDArray[np.float64]], list[Problem], Literal[".", ","] | None]:
    """Return the columns as numbers, the cells that are none, and the decimal mark if there are decimals."""
    columns = [column for column in (*COLUMNS, *OPTIONAL, "adjusted", *keep) if column in named]
    decimal = config.decimal or decimal_mark({column: named[column] for column in columns})
    values, problems = {}, []
    for column in columns:
        if column in PRICES:
            _require_decimals(named[column])
        text = _cleaned(named[column], decimal)
        numbers = pd.to_numeric(text, errors="coerce").to_numpy(dtype=np.float64)
        bad = np.isnan(numbers)
        bad = bad & ~_missing(named[column]) if bad.any() else bad
        problems += [
            Problem(int(row), f"{column} {_shown(named[column].iloc[row])} is not a number") for row in np.flatnonzero(bad)
        ]
        values[column] = numbers
    decimals = any(bool((numbers % 1 != 0)[np.isfinite(numbers)].any()) for numbers in values.values())
    return values, problems, "," if decimal == "," else "." if decimals else None


def _require_decimals(prices: pd.Series) -> None:
    """Refuse prices in 32nds of a point, in which an apostrophe is no thousands mark."""
    if not pd.api.types.is_numeric_dtype(prices) and all(THIRTYSECONDS.fullmatch(cell) for cell in as_text(prices)):
        raise DataError(f"prices such as {_shown(prices.iloc[0])} are in 32nds of a point; write them as decimals")


def as_numbers(values: pd.Series) -> NDArray[np.float64]:
    """Return a column as numbers, NaN where a cell is none.

    Currencies, thousands marks, decimal commas, K, M, B, percent signs and negative numbers in brackets are understood.

    :param values: numbers or text.
    """
    if pd.api.types.is_numeric_dtype(values):
        return values.to_numpy(dtype=np.float64)
    text = as_text(values).str.replace("\N{MINUS SIGN}", "-").str.replace(r"^\((.*)\)$", r"-\1", regex=True)
    text = text.str.replace(r"^\+", "", regex=True).where(lambda cells: cells.str.fullmatch(NUMBER.pattern), "")
    return np.asarray(pd.to_numeric(_cleaned(text, None), errors="coerce"), dtype=np.float64)


def decimal_mark(columns: Mapping[str, pd.Series]) -> str:
    """Return the decimal mark that the columns of a file use.

    :raises AmbiguousNumbers: when prices such as 1,234 can be read in two ways, and nothing in the file says which.
    """
    point = comma = False
    doubtful = ""
    for name, values in columns.items():
        if pd.api.types.is_numeric_dtype(values):
            point = point or bool((values.dropna() % 1 != 0).any())
            continue
        text = SCALE_BEHIND.sub("", _stripped(values))
        point = point or DECIMAL_POINT.search(text) is not None
        comma = comma or DECIMAL_COMMA.search(text) is not None
        found = EITHER.search(text) if name in PRICES else None
        doubtful = doubtful or (found.group() if found else "")
    if point and comma:
        raise DataError("numbers have both points and commas as decimal marks; say which it is with --decimal")
    if doubtful and not point and not comma:
        whole, thousandths = doubtful.replace(",", ""), doubtful.replace(",", ".")
        raise AmbiguousNumbers(f"{doubtful!r} is {whole} or {thousandths}; say which with --decimal . or --decimal ,")
    return "," if comma else "."


def _stripped(values: pd.Series) -> str:
    """Return the cells as lines of one text, without spaces, currencies and apostrophes: searching that is fast."""
    cells = as_text(values).to_numpy(dtype=object)
    text = "\n".join(cells)
    if text.count("\n") >= len(cells):  # a quoted cell may span lines
        text = "\n".join(cell.replace("\n", " ") for cell in cells)
    if not DECORATED.search(text):
        return text
    text = CODED.sub("", text) if WORDS.search(text) else text
    return text.translate(DECORATION)


def _cleaned(values: pd.Series, decimal: str | None) -> pd.Series:
    """Return numbers that ``pandas.to_numeric`` understands: without currency, thousands marks and K, M, B."""
    if pd.api.types.is_numeric_dtype(values):
        return values
    decimal = decimal or decimal_mark({"volume": values})
    text = _stripped(values)
    text = text.replace(".", "").replace(",", ".") if decimal == "," else text.replace(",", "")
    if SCALED.search(text):
        text = SCALED.sub(lambda found: str(float(found.group(1)) * SCALES[found.group(2).lower().rstrip(".")]), text)
    return pd.Series(text.split("\n"), dtype=object)


def _missing(values: pd.Series) -> NDArray[np.bool_]:
    if pd.api.types.is_numeric_dtype(values):
        return values.isna().to_numpy()
    return as_text(values).str.lower().isin(MISSING).to_numpy(dtype=bool)


def _completed(
    values: dict[str, NDArray[np.float64]], adjusted: bool
) -> tuple[dict[str, NDArray[np.float64]], tuple[str, ...]]:
    """Return the columns of bars, with the volume that is missing and the prices that are asked for."""
    remarks: list[str] = []
    if "volume" not in values:
        values["volume"] = np.zeros(len(values["close"]))
        remarks.append("no volume: it counts as 0")
    elif np.isnan(values["volume"]).any():
        missing = int(np.isnan(values["volume"]).sum())
        remarks.append(f"{missing} missing volume{'s count' if missing > 1 else ' counts'} as 0")
        values["volume"] = np.nan_to_num(values["volume"])
    if adjusted:
        if "adjusted" not in values:
            raise DataError(
                "adjusted prices are asked for and no column holds them; leave --adjusted out, or --columns adjusted=NAME"
            )
        factor = values["adjusted"] / values["close"]
        values |= {column: values[column] * factor for column in PRICES}
        remarks.append("prices adjusted for dividends")
    return {column: values[column] for column in values if column != "adjusted"}, tuple(remarks)


def _shown(value: object) -> str:
    return repr(value if isinstance(value, str) else str(value))


def _split(
    frame: pd.DataFrame, lines: NDArray[np.int64] | None, problems: Sequence[Problem], symbols: pd.Series | None
) -> Iterator[tuple[str, Part]]:
    """Yield the bars of each symbol of a long table."""
    of_row = np.array([""]) if symbols is None else as_text(symbols).to_numpy()
    distinct = [symbol for symbol in dict.fromkeys(of_row) if symbol]
    if len(distinct) <= 1:
        yield "", Part(frame, lines, tuple(problems))
        return
    if "" in of_row:
        row = int(np.argmax(of_row == ""))
        where = f"row {row}" if lines is None else f"line {lines[row]}"
        raise DataError(f"{where}: the symbol is missing; delete the line, or write its symbol")
    for symbol in distinct:
        rows = np.flatnonzero(of_row == symbol)
        moved = {int(row): k for k, row in enumerate(rows)}
        own = tuple(replace(problem, row=moved[problem.row]) for problem in problems if problem.row in moved)
        yield symbol, Part(frame.iloc[rows], None if lines is None else lines[rows], own)


def _descending(index: pd.Index) -> bool:
    known = index[index.notna()]
    return len(known) > 1 and known.is_monotonic_decreasing and not known.is_monotonic_increasing


def _ascending(part: Part) -> Part:
    last = len(part.bars) - 1
    problems = tuple(replace(problem, row=last - problem.row) for problem in reversed(part.problems))
    return Part(part.bars.iloc[::-1], None if part.lines is None else part.lines[::-1], problems)


def _tickers(headers: Sequence[Sequence[str]]) -> tuple[list[str], list[str]] | None:
    """Return fields and tickers of the columns where two header rows name them, as yfinance writes them, or every name both."""
    if len(headers) == 1:
        return next(filter(None, (_split_names(headers[0], pattern) for pattern in FIELD_AND_TICKER)), None)
    for fields in headers:
        prices = {normal(name) for name in fields}
        others = [row for row in headers if row is not fields]
        if len(headers) > 1 and set(PRICES) <= prices:
            labels = [row for row in others if any(row[1:]) and _complete(fields[1:], row[1:])]
            if labels or not any(any(row[1:]) for row in others):
                return list(fields), list(labels[0]) if labels else [""] * len(fields)
    return None


def _complete(fields: Sequence[str], tickers: Sequence[str]) -> bool:
    """Return whether each ticker has all prices."""
    of_ticker: dict[str, set[str]] = {}
    for field, ticker in zip(fields, tickers, strict=True):
        of_ticker.setdefault(ticker, set()).add(normal(field))
    return all(set(PRICES) <= known for ticker, known in of_ticker.items() if ticker)


def _split_names(names: Sequence[str], pattern: re.Pattern[str]) -> tuple[list[str], list[str]] | None:
    """Return fields and tickers of names such as SPY.Open; None unless all but the first are so, with all prices of each."""
    found = [pattern.fullmatch(name) for name in names[1:]]
    if not found or not all(found):
        return None
    fields, tickers = ([str(match[part]) for match in found if match] for part in ("field", "ticker"))
    return (["", *fields], ["", *tickers]) if _complete(fields, tickers) else None


def _understand_wide(
    table: RawTable, config: FileConfig, keep: Sequence[str], wide: tuple[list[str], list[str]], context: Context
) -> Reading:
    """Read the columns of each ticker; the first column is the time. A ticker without prices is left out, and named."""
    fields, tickers = wide
    distinct = list(dict.fromkeys(ticker for ticker in tickers[1:] if ticker))
    facts: tuple[str, ...] = ("yfinance", *table.facts) if len(table.headers) > 1 else table.facts
    readings: dict[str, Reading] = {}
    without: tuple[str, ...] = ()
    for ticker in distinct or [""]:
        columns = [0, *(k for k in range(1, len(fields)) if tickers[k] == ticker)]
        cells = table.cells.iloc[:, columns].set_axis(["time", *(fields[k] for k in columns[1:])], axis=1)
        there = cells.iloc[:, 1:].notna().any(axis=1).to_numpy()
        if not there.any():  # yfinance could not download it
            without = (*without, f"no bars of {ticker}: it is left out")
            continue
        lines = None if table.lines is None else table.lines[there]
        part = RawTable(cells[there].reset_index(drop=True), lines, (tuple(cells.columns),), (), table.separator)
        readings[ticker if len(distinct) > 1 else ""] = understand(part, config, keep, context)
    if not readings:
        raise DataError(f"no bars of {', '.join(distinct) or 'anything'}: all cells are empty")
    first = next(iter(readings.values()))
    parts = {symbol: reading.parts[""] for symbol, reading in readings.items()}
    later = tuple(fact for fact in first.facts if fact not in FORMATS)
    last = max((reading.context.last for reading in readings.values() if reading.context.last is not None), default=None)
    told = replace(first.context, columns=None, last=last)
    return Reading(parts, (*facts, *later), first.ignored, (*first.remarks, *without), told)
