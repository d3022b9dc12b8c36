"""Bars: OHLCV tables that have been checked, with nothing guessed and nothing filled in.

A table of bars is a :class:`pandas.DataFrame` indexed by ``time`` (UTC, increasing, unique) with float64 columns
``open, high, low, close, volume``, and ``funding`` where the file has it (what a long position pays per unit of value, for
perpetual futures). Several symbols are one table on the union of their times with a first column
level for the symbol; a bar that a symbol does not have is a row of ``NaN``.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal, cast

import numpy as np
import pandas as pd

PRICES = ("open", "high", "low", "close")
COLUMNS = (*PRICES, "volume")
OPTIONAL = ("funding",)
TIME_NAMES = ("time", "date", "datetime", "timestamp")
SUFFIXES = (".csv", ".csv.gz", ".parquet")

# Shares of one share that splits are usually made of, as ratios of prices before and after.
SPLIT_RATIOS = np.array([1.5, 2, 3, 4, 5, 6, 7, 8, 10, 15, 20, 25, 30, 50])
SPLIT_TOLERANCE = 0.03
SPLIT_RETURN = 0.4
STALE_OPEN_SHARE = 0.2
GAP_FACTOR = 1.5
YEAR = pd.Timedelta(days=365.25)
# Prices adjusted for splits and dividends are products rounded to a few digits: an open may leave its range by that much.
RANGE_TOLERANCE = 1e-8

# Epoch times tell their unit by their size: seconds stay below 1e11 until the year 5138.
EPOCH_FIRST = 1e7
EPOCH_UNITS: tuple[tuple[float, Literal["s", "ms", "us", "ns"]], ...] = (
    (1e11, "s"),
    (1e14, "ms"),
    (1e17, "us"),
    (1e20, "ns"),
)

Source = str | Path | pd.DataFrame


class DataError(ValueError):
    """Raised for a table that cannot be used; the message names the row, the reason and the remedy."""


class DataWarning(UserWarning):
    """A warning about a table that can be used, but whose results may mislead."""


@dataclass(frozen=True)
class Finding:
    """A finding of the validator about a table.

    :param level: ``error`` (unusable), ``warning`` (usable, but results may mislead) or ``note``.
    :param row: position of the row, counted from 0 as in ``frame.iloc``; None when it is about the whole table.
    :param time: the time of that row, as text.
    :param reason: what is wrong, in one sentence.
    """

    level: Literal["error", "warning", "note"]
    reason: str
    row: int | None = None
    time: str | None = None

    def __str__(self) -> str:
        """Return one line: the row, then the reason."""
        return self.reason if self.row is None else f"row {self.row} ({self.time}): {self.reason}"


def load_bars(source: Source | Mapping[str, Source]) -> pd.DataFrame:
    """Read and check bars from a CSV, CSV.gz or Parquet file or a DataFrame, or one table from several of them.

    :param source: a path, a DataFrame (times in a ``time`` column or a DatetimeIndex), or a mapping from symbol to
        either; a mapping gives one aligned table with columns ``(symbol, field)``.
    :raises DataError: naming the first bad row and the reason. Nothing is repaired silently.
    """
    if isinstance(source, Mapping):
        return align_bars({symbol: load_bars(table) for symbol, table in source.items()})
    name = "table" if isinstance(source, pd.DataFrame) else str(source)
    frame = source if isinstance(source, pd.DataFrame) else _read(Path(source))
    if isinstance(frame.columns, pd.MultiIndex):
        return align_bars({symbol: load_bars(bars_of(frame, symbol).dropna(how="all")) for symbol in symbols_of(frame)})
    bars = _standard_form(frame, name)
    findings = check_bars(bars)
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise DataError(f"{name}: {errors[0]}{more}")
    for finding in findings:
        if finding.level == "warning":
            warnings.warn(f"{name}: {finding}", DataWarning, stacklevel=2)
    return bars


def align_bars(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Put several symbols on the union of their times; a bar that a symbol lacks becomes a row of NaN.

    :param tables: bars of each symbol, from :func:`load_bars`; at least one.
    """
    if not tables:
        raise DataError("no symbols given: pass at least one")
    return pd.concat({str(symbol): table for symbol, table in tables.items()}, axis=1, sort=True)


def symbols_of(bars: pd.DataFrame) -> list[str]:
    """Return the symbols of a table of bars; a single unnamed symbol is the empty string."""
    if isinstance(bars.columns, pd.MultiIndex):
        return [str(symbol) for symbol in bars.columns.get_level_values(0).unique()]
    return [""]


def bars_of(bars: pd.DataFrame, symbol: str) -> pd.DataFrame:
    """Return the columns of one symbol; the empty string stands for the only one."""
    return cast(pd.DataFrame, bars[symbol]) if symbol else bars


def iterate_symbols(bars: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each symbol with its own columns, on the table's times.

    :raises DataError: when the table is not in the form that :func:`load_bars` returns.
    """
    if not isinstance(bars.index, pd.DatetimeIndex):
        raise DataError("bars need a DatetimeIndex; pass the table through tailguard.market.load_bars first")
    if not (bars.index.is_monotonic_increasing and bars.index.is_unique):
        raise DataError("bars need increasing, unique times; pass the table through tailguard.market.load_bars first")
    for symbol in symbols_of(bars):
        table = bars_of(bars, symbol)
        missing = [column for column in COLUMNS if column not in table.columns]
        if missing:
            where = f" of {symbol}" if symbol else ""
            raise DataError(f"bars lack the columns {missing}{where}; tailguard.market.load_bars makes the right form")
        yield symbol, table


def check_bars(bars: pd.DataFrame) -> list[Finding]:
    """Return the findings about a table in standard form, errors first; an empty list means a clean table.

    :param bars: a table from :func:`load_bars`.
    """
    checks = (_check_times, _check_prices, _check_ranges, _check_splits, _check_opens, _check_gaps)
    findings = [finding for check in checks for finding in check(bars)]
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.level))


def check_source(source: Source) -> list[Finding]:
    """Return the findings about a file or a table in any form; a table that cannot be read is one error."""
    try:
        frame = source if isinstance(source, pd.DataFrame) else _read(Path(source))
        return check_bars(_standard_form(frame, "table" if isinstance(source, pd.DataFrame) else str(source)))
    except DataError as error:
        return [Finding("error", str(error))]


def periods_per_year(index: pd.DatetimeIndex) -> float:
    """Return the number of bars per calendar year, counted over the whole table.

    :param index: times of the bars, at least 2.
    """
    if len(index) < 2:
        raise DataError(f"bars per year need at least 2 bars, got {len(index)}")
    return float((len(index) - 1) / ((index[-1] - index[0]) / YEAR))


@dataclass(frozen=True)
class DatasetInfo:
    """The provenance of a shipped data set.

    :param name: its name for :func:`load_dataset`.
    :param title: its content.
    :param source: package, version and licence that it was read from.
    :param note: limitations to know before trusting a result.
    """

    name: str
    title: str
    source: str
    note: str


def list_datasets() -> list[DatasetInfo]:
    """Return the data sets shipped with the package."""
    index = json.loads(_dataset_folder().joinpath("index.json").read_text(encoding="utf-8"))
    return [DatasetInfo(**entry) for entry in index]


def load_dataset(name: str | Sequence[str]) -> pd.DataFrame:
    """Load a shipped data set, or several on one table of aligned times.

    Warnings about the shipped sets are not repeated on every load; ``tailguard data describe`` shows them.

    :param name: one of :func:`list_datasets`, or a sequence of them.
    """
    if not isinstance(name, str):
        return align_bars({part: load_dataset(part) for part in name})
    known = [info.name for info in list_datasets()]
    if name not in known:
        raise DataError(f"no data set named {name!r}; shipped are {', '.join(known)}")
    with resources.as_file(_dataset_folder().joinpath(f"{name}.csv.gz")) as path, warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        return load_bars(path)


def load_source(source: str) -> pd.DataFrame:
    """Load the bars of a shipped set or a file; several joined by ``+`` give one aligned table."""
    parts = source.split("+")
    if len(parts) > 1:
        symbols = [Path(part).name.split(".")[0] for part in parts]
        repeated = [symbol for symbol in symbols if symbols.count(symbol) > 1]
        if repeated:
            raise DataError(f"{source}: {repeated[0]!r} appears twice; the parts of a portfolio need different names")
        return load_bars({symbol: load_source(part) for symbol, part in zip(symbols, parts, strict=True)})
    known = [info.name for info in list_datasets()]
    if source in known:
        return load_dataset(source)
    if not Path(source).exists():
        raise DataError(f"{source}: no such file, and no shipped set of that name (shipped are {', '.join(known)})")
    return load_bars(source)


def _dataset_folder() -> Traversable:
    return resources.files("tailguard.market").joinpath("datasets")


def _read(path: Path) -> pd.DataFrame:
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give a file ending in {', '.join(SUFFIXES)}")
    try:
        if path.name.endswith(".parquet"):
            return pd.read_parquet(path)
        if path.name.endswith((".csv", ".csv.gz")):
            return pd.read_csv(path)
    except (ValueError, OSError, EOFError) as error:  # pandas' parser and decoder errors are ValueErrors
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
    raise DataError(f"{path}: unknown file type; give a file ending in {', '.join(SUFFIXES)}")


def _standard_form(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return a table with lower-case columns, float64 values, and a DatetimeIndex named time in UTC without a time zone."""
    if len(frame) == 0:
        raise DataError(f"{name}: no rows")
    table = frame.rename(columns=lambda column: str(column).strip().lower())
    repeated = table.columns[table.columns.duplicated()]
    if len(repeated):
        raise DataError(f"{name}: column {repeated[0]!r} appears twice (names are compared in lower case)")
    if not isinstance(table.index, pd.DatetimeIndex):
        candidates = [column for column in TIME_NAMES if column in table.columns]
        if not candidates:
            raise DataError(f"{name}: no time column; name one of the columns time, or pass a DatetimeIndex")
        table = table.set_index(_parse_times(table[candidates[0]], name))
    missing = [column for column in PRICES if column not in table.columns]
    if missing:
        raise DataError(f"{name}: missing columns {', '.join(missing)}; needed are {', '.join(PRICES)}")
    if "volume" not in table.columns:
        table = table.assign(volume=0.0)
    index = cast(pd.DatetimeIndex, table.index)
    index = index.tz_convert("UTC").tz_localize(None) if index.tz is not None else index
    kept = (*COLUMNS, *(column for column in OPTIONAL if column in table.columns))
    values = {column: _parse_numbers(table[column], index, name) for column in kept}
    return pd.DataFrame(values, index=index.as_unit("ns").rename("time"))


def _parse_times(column: pd.Series, name: str) -> pd.DatetimeIndex:
    if pd.api.types.is_numeric_dtype(column):
        largest = float(column.abs().max())
        unit = next((unit for limit, unit in EPOCH_UNITS if largest < limit), None)
        if unit is None or not float(column.min()) > EPOCH_FIRST:
            raise DataError(f"{name}: numeric times must be seconds (or ms, us, ns) since 1970, got {column.iloc[0]}")
        return pd.DatetimeIndex(pd.to_datetime(column, unit=unit, utc=True))
    parsed = pd.to_datetime(column, errors="coerce", utc=True, format="ISO8601")
    bad = np.flatnonzero(parsed.isna())
    if len(bad):
        raise DataError(f"{name}: row {bad[0]}: {column.iloc[bad[0]]!r} is not a time (ISO 8601, e.g. 2020-12-31 16:00)")
    return pd.DatetimeIndex(parsed)


def _parse_numbers(column: pd.Series, index: pd.DatetimeIndex, name: str) -> np.ndarray:
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64)
    bad = np.flatnonzero(np.isnan(numbers) & ~column.isna().to_numpy())
    if len(bad):
        value = column.iloc[bad[0]]
        raise DataError(f"{name}: row {bad[0]} ({index[bad[0]]}): {column.name} {value!r} is not a number")
    return numbers


def _at(bars: pd.DataFrame, rows: np.ndarray, reasons: Sequence[str], level: Literal["error", "warning"]) -> list[Finding]:
    return [Finding(level, reason, int(row), str(bars.index[row])) for row, reason in zip(rows, reasons, strict=True)]


def _check_times(bars: pd.DataFrame) -> list[Finding]:
    steps = np.diff(bars.index.to_numpy().astype(np.int64))
    repeated, backwards = np.flatnonzero(steps == 0) + 1, np.flatnonzero(steps < 0) + 1
    return [
        *_at(bars, repeated, ["its time repeats the row before; drop one of them"] * len(repeated), "error"),
        *_at(bars, backwards, ["its time is before the row above; sort the table by time"] * len(backwards), "error"),
    ]


def _check_prices(bars: pd.DataFrame) -> list[Finding]:
    findings = []
    for column in bars.columns:
        values = bars[column].to_numpy()
        lowest = "negative" if column == "volume" else "not positive"
        broken = np.flatnonzero(~np.isfinite(values))
        low = np.flatnonzero(values < 0 if column == "volume" else (values <= 0) & (column in PRICES))
        findings += _at(bars, broken, [f"{column} is {values[row]}; drop the bar or repair it" for row in broken], "error")
        findings += _at(bars, low, [f"{column} {values[row]:g} is {lowest}" for row in low], "error")
    return findings


def _check_ranges(bars: pd.DataFrame) -> list[Finding]:
    high, low = bars["high"].to_numpy(), bars["low"].to_numpy()
    slack = RANGE_TOLERANCE * np.abs(high)
    crossed = high < low - slack
    rows = np.flatnonzero(crossed)
    findings = _at(bars, rows, [f"high {high[row]:g} is below low {low[row]:g}" for row in rows], "error")
    for column in ("open", "close"):
        values = bars[column].to_numpy()
        rows = np.flatnonzero(((values > high + slack) | (values < low - slack)) & ~crossed)
        reasons = [f"{column} {values[row]:g} is outside [low {low[row]:g}, high {high[row]:g}]" for row in rows]
        findings += _at(bars, rows, reasons, "error")
    return findings


def _check_splits(bars: pd.DataFrame) -> list[Finding]:
    close = bars["close"].to_numpy()
    with np.errstate(all="ignore"):  # the other checks report prices that make no ratio
        ratio = close[1:] / close[:-1]
        larger = np.maximum(ratio, 1.0 / ratio)
        near = np.abs(larger[:, None] / SPLIT_RATIOS - 1.0).min(axis=1, initial=np.inf) < SPLIT_TOLERANCE
        rows = np.flatnonzero((np.abs(ratio - 1.0) > SPLIT_RETURN) & near) + 1
    reasons = [
        f"close moves by {ratio[row - 1] - 1:+.1%}, about 1:{larger[row - 1]:.2g}: an unadjusted split? "
        "adjust the prices before trading on them"
        for row in rows
    ]
    return _at(bars, rows, reasons, "warning")


def _check_opens(bars: pd.DataFrame) -> list[Finding]:
    if len(bars) < 2:
        return []
    share = float(np.mean(bars["open"].to_numpy()[1:] == bars["close"].to_numpy()[:-1]))
    if share <= STALE_OPEN_SHARE:
        return []
    reason = f"{share:.1%} of the opens repeat the previous close: fills at the next open are fills at the same close"
    return [Finding("warning", reason)]


def _check_gaps(bars: pd.DataFrame) -> list[Finding]:
    if len(bars) < 3:
        return []
    steps = np.diff(bars.index.to_numpy())
    usual = np.median(steps)
    gaps = np.flatnonzero(steps > GAP_FACTOR * usual)
    if len(gaps) == 0:
        return []
    widest = int(gaps[np.argmax(steps[gaps])])
    reason = (
        f"{len(gaps)} gaps longer than {GAP_FACTOR:g} x the usual {pd.Timedelta(usual)}; "
        f"the widest, {pd.Timedelta(steps[widest])}, ends here. Gaps stay gaps: nothing is filled in"
    )
    return [Finding("note", reason, widest + 1, str(bars.index[widest + 1]))]
