"""Tables as other programs write them: returns, equity curves, weights, rates. Read as they are, or refused with one line.

A table is a CSV, CSV.gz or Parquet file, a pandas Series or a DataFrame, with its times in the index or in a column. Which
column holds what is told by its name, and whether it holds returns or an equity curve by its numbers.
"""

import gzip
import math
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from tailguard.evaluate.stats.series import Floats
from tailguard.market.bars import DataError, symbols_of
from tailguard.market.times import parse_times

TableSource = str | Path | pd.Series | pd.DataFrame
SUFFIXES = (".csv", ".csv.gz", ".txt", ".parquet")
# In lower case, the likelier ones first. A name decides which column is meant; its numbers decide what they are.
TIME_NAMES = ("time", "date", "datetime", "timestamp")
RETURN_NAMES = (
    "returns", "return", "strategy_returns", "strategy_return", "daily_returns", "daily_return", "algorithm_returns", "ret",
    "rets",
)  # fmt: skip
LEVEL_NAMES = (
    "equity", "portfolio_value", "account_value", "total_value", "value", "nav", "balance", "adj close", "adj_close", "close",
    "price",
)  # fmt: skip
WEIGHT_NAMES = ("weight", "weights", "target", "target_weight", "position", "positions", "exposure")
RATE_NAMES = ("rate", "cash_rate", "risk_free", "riskfree", "rf", "yield")
LEVEL_FROM = 0.5  # numbers that are all positive are an equity curve if they are larger than any usual return
MOST_RATE = 1.0
MOST_GROSS = 1.5  # rows of positions that sum to more are amounts of money if there is a column of cash


def read_returns(source: TableSource, column: str | None = None, what: str = "returns") -> pd.Series:
    """Return simple returns per bar, indexed by the time at which each was earned.

    :param source: returns, or an equity curve or prices, whose changes are taken.
    :param column: name of the column; None finds it by the names that are usual.
    :param what: name of the table in errors.
    :raises DataError: naming the row or the column, and what to do.
    """
    values = _pick(_table(source, what), column, (*RETURN_NAMES, *LEVEL_NAMES), what)
    name = str(values.name).lower()
    kind = _kind(values.to_numpy(dtype=np.float64), name)
    returns = values.pct_change(fill_method=None).iloc[1:] if kind == "levels" else values
    lowest = float(returns.min()) if len(returns) else 0.0
    if lowest <= -1.0:
        remedy = "divide percentages by 100, or give an equity curve instead of profits in money"
        raise DataError(f"{what}: {values.name} falls to {lowest:g}, and a return of -1 loses everything; {remedy}")
    return returns.rename(what)


def read_levels(source: TableSource, column: str | None = None, what: str = "benchmark") -> pd.Series:
    """Return prices, or an index that earns the returns of a table and begins one bar before them.

    :param source: see :func:`read_returns`.
    :param column: see :func:`read_returns`.
    :param what: name of the table in errors.
    """
    values = _pick(_table(source, what), column, (*LEVEL_NAMES, *RETURN_NAMES), what)
    if _kind(values.to_numpy(dtype=np.float64), str(values.name).lower()) == "levels":
        levels: pd.Series = values.rename(what)
        return levels
    returns = read_returns(values.to_frame(), None, what)
    start = pd.Series([1.0], index=[returns.index[0] - usual_step(returns.index)])
    index: pd.Series = pd.concat([start, (1.0 + returns).cumprod()]).rename(what)
    return index


def read_weights(source: TableSource, bars: pd.DataFrame, what: str = "weights") -> pd.DataFrame:
    """Return target weights, one column per symbol of the bars; NaN holds.

    :param source: weights by symbol; or positions in money beside a column `cash`, which are divided by their sum.
    :param bars: what is traded.
    :param what: name of the table in errors.
    :raises DataError: naming the symbol that is missing or not known.
    """
    table = _table(source, what, holes=True)
    named = {str(column).lower(): column for column in table.columns}
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


def read_rates(source: TableSource, what: str = "cash_rate") -> pd.Series:
    """Return interest rates per year by time, as fractions.

    :param source: rates, such as 0.03 for 3 %.
    :param what: name of the table in errors.
    """
    rates = _pick(_table(source, what), None, RATE_NAMES, what)
    largest = float(rates.abs().max())
    if largest >= MOST_RATE:
        raise DataError(f"{what}: a rate of {largest:g} per year; rates are fractions, 0.03 is 3 %: divide percentages by 100")
    return rates


def rates_at(rates: float | pd.Series, starts: pd.DatetimeIndex) -> Floats:
    """Return the rate that was known at the start of each bar, ``[n]``.

    :param rates: one number, or rates by time.
    :param starts: ``[n]``.
    """
    if not isinstance(rates, pd.Series):
        return np.full(len(starts), float(rates))
    known = np.searchsorted(rates.index.to_numpy(), starts.to_numpy(), side="right") - 1
    if known[0] < 0:
        raise DataError(f"cash_rate: begins at {rates.index[0]}, after the first bar, {starts[0]}; give earlier rates as well")
    return rates.to_numpy(dtype=np.float64)[known]


def usual_step(index: pd.Index) -> pd.Timedelta:
    """Return the usual time between two bars."""
    return pd.Timedelta(np.median(np.diff(index.to_numpy())))


def _table(source: TableSource, what: str, holes: bool = False) -> pd.DataFrame:
    """Return the numeric columns of a table, indexed by increasing, unique times without a zone.

    :param holes: True leaves NaN where it is; False lets :func:`_pick` refuse it.
    """
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
    if not isinstance(frame.index, pd.DatetimeIndex):
        frame = _with_times(frame, what)
    index = _without_zone(pd.DatetimeIndex(frame.index))
    steps = np.diff(index.to_numpy().astype(np.int64))
    wrong = np.flatnonzero(steps <= 0)
    if len(wrong):
        row = int(wrong[0]) + 1
        remedy = "drop one of them" if steps[wrong[0]] == 0 else "sort the table by time"
        raise DataError(f"{what}: row {row} ({index[row]}) is not after the row before; {remedy}")
    numbers = {name: pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=np.float64) for name in frame.columns}
    kept = {name: values for name, values in numbers.items() if np.isfinite(values).any()}
    if not kept or len(index) < 2:
        raise DataError(f"{what}: holds no numbers over time; needed are times and a column of numbers")
    table = pd.DataFrame(kept, index=index.rename("time"))
    return table if holes else table.replace([np.inf, -np.inf], np.nan)


def _read(path: Path) -> pd.DataFrame:
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if not path.name.endswith(SUFFIXES):
        legal = f"give a file ending in {', '.join(SUFFIXES)}"
        advice = "pickles may run code when they are read; save it with .to_csv() or .to_parquet()"
        raise DataError(f"{path}: {advice if path.suffix in ('.pkl', '.pickle') else f'unknown file type; {legal}'}")
    try:
        if path.name.endswith(".parquet"):
            return pd.read_parquet(path)
        with gzip.open(path, "rt") if path.name.endswith(".gz") else path.open() as file:
            line = file.readline()
        separator = next((mark for mark in (";", "\t") if mark in line), ",")
        cells = line.strip().split(separator)
        headless = _is_time(cells[0]) and _is_number(cells[-1])  # as a Series is saved without a header
        return pd.read_csv(path, sep=separator, header=None if headless else "infer")
    except (ValueError, OSError, EOFError) as error:  # pandas' parser and decoder errors are ValueErrors
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None


def _with_times(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """Index a table by its times: a column that is named so, the index, or else the first column that reads as times."""
    counter = [name for name in frame.columns if name.lower().startswith("unnamed") and _counts(frame[name])]
    frame = frame.drop(columns=counter)  # the numbers of the rows, as pandas saves them
    lower = {name.strip().lower(): name for name in frame.columns}
    for name in [lower[name] for name in TIME_NAMES if name in lower]:
        times = _times(frame[name])
        if times is None:
            raise DataError(f"{what}: column {name!r} does not hold times (ISO 8601, such as 2020-12-31 16:00)")
        return frame.drop(columns=name).set_index(times)
    if not pd.api.types.is_numeric_dtype(frame.index.dtype) and (times := _times(frame.index.to_series())) is not None:
        return frame.set_index(times)
    for name in frame.columns:
        if not pd.api.types.is_numeric_dtype(frame[name]) and (times := _times(frame[name])) is not None:
            return frame.drop(columns=name).set_index(times)
    raise DataError(f"{what}: no times; name a column time or date, or pass a DatetimeIndex")


def _counts(column: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(column) and np.array_equal(column, np.arange(len(column))))


def _times(column: pd.Series) -> pd.DatetimeIndex | None:
    """Return a column as times; None if it does not hold any."""
    if pd.api.types.is_datetime64_any_dtype(column):
        return pd.DatetimeIndex(column)
    if pd.api.types.is_numeric_dtype(column):
        try:
            return parse_times(column).values
        except DataError:
            return None
    text = column.astype(str).str.strip()
    local = pd.to_datetime(text.str.replace(r"(Z|[+-]\d\d:?\d\d)$", "", regex=True), errors="coerce", format="mixed")
    if local.isna().any():
        return None
    # Days keep their date whatever the zone; other times are brought to UTC.
    if bool((local == local.dt.normalize()).all()):
        return pd.DatetimeIndex(local)
    return pd.DatetimeIndex(pd.to_datetime(text, utc=True, format="mixed"))


def _is_time(text: str) -> bool:
    return text[:1].isdigit() and not _is_number(text) and not pd.isna(pd.to_datetime(text, errors="coerce"))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _without_zone(index: pd.DatetimeIndex) -> pd.DatetimeIndex:
    if index.tz is not None:
        local = index.tz_localize(None)
        index = local if bool((local == local.normalize()).all()) else index.tz_convert("UTC").tz_localize(None)
    return index.as_unit("ns")


def _pick(table: pd.DataFrame, column: str | None, names: tuple[str, ...], what: str, holes: bool = False) -> pd.Series:
    """Return the column that is meant, without the missing values at its start.

    :param holes: False refuses values that are missing further on.
    """
    lower = {str(name).strip().lower(): name for name in table.columns}
    if column is not None:
        if column not in table.columns:
            raise DataError(f"{what}: no column {column!r} with numbers; there are {', '.join(map(str, table.columns))}")
        chosen = column
    else:
        known = [lower[name] for name in names if name in lower]
        if not known and len(table.columns) > 1:
            listed = ", ".join(map(str, table.columns))
            raise DataError(f"{what}: several columns ({listed}) and none with a usual name; name one with column=")
        chosen = known[0] if known else table.columns[0]
    values = table[chosen]
    values = values.loc[values.first_valid_index() :]
    empty = np.flatnonzero(values.isna().to_numpy())
    if len(empty) and not holes:
        raise DataError(f"{what}: {chosen} is missing at {values.index[empty[0]]}; drop the row or fill it in")
    return values


def _kind(values: Floats, name: str) -> Literal["levels", "returns"]:
    """Tell an equity curve from returns: it is positive, and larger than any usual return."""
    if not bool((values > 0.0).all()):
        return "returns"
    if name in RETURN_NAMES:
        return "returns"
    return "levels" if name in LEVEL_NAMES or float(np.median(values)) >= LEVEL_FROM else "returns"
