"""Bars from files, tables and shipped sets: read as they are, checked, with nothing filled in."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd

from tailguard.market.bars import (
    ZONE_REMEDY,
    DataError,
    DataWarning,
    align_bars,
    bars_of,
    in_utc,
    symbols_of,
    timeframe,
    timeframe_text,
)
from tailguard.market.checks import MIXED_FACTOR, Finding, check_bars
from tailguard.market.columns import Context, Part, Reading, understand
from tailguard.market.files import FileConfig, RawTable, from_frame, read_bytes, read_file
from tailguard.market.shipped import dataset_file, list_datasets
from tailguard.market.times import are_days

logger = logging.getLogger(__name__)
Source = str | Path | pd.DataFrame | bytes
# Symbols of one portfolio have at least this share of their times in common.
SHARED = 0.1


def load_bars(
    source: Source | Mapping[str, Source], config: FileConfig | None = None, keep: Sequence[str] = ()
) -> pd.DataFrame:
    """Read and check bars from a file or a DataFrame, or one table from several of them.

    Separator, header, encoding, decimal mark, format and order of the times are recognised; what was understood is logged.

    :param source: a path (CSV and the like, JSON, Parquet, also compressed), the bytes of such a file, a DataFrame (times in a
        column or a DatetimeIndex), or a mapping from symbol to one of these; a mapping gives one aligned table with columns
        ``(symbol, field)``.
    :param config: what is known about the file.
    :param keep: further columns to keep, by their names in the file.
    :raises DataError: naming the first bad line and the reason. Nothing is repaired silently.
    """
    return load_part(source, config or FileConfig(), keep, Context())[0]


def load_part(
    source: Source | Mapping[str, Source], config: FileConfig, keep: Sequence[str], context: Context
) -> tuple[pd.DataFrame, Context]:
    """Read and check a part of a stream of bars, as :func:`load_bars` does; what was understood is logged for the first.

    :param source: see :func:`load_bars`.
    :param config: what is known about the stream.
    :param keep: further columns to keep.
    :param context: of the parts before.
    :returns: the bars, and the context of the part that follows.
    """
    if isinstance(source, Mapping):
        parts = {symbol: load_part(table, config, keep, context) for symbol, table in source.items()}
        return _aligned({symbol: bars for symbol, (bars, _) in parts.items()}), next(iter(parts.values()))[1]
    name = _name(source)
    reading = read_bars(source, config, keep, context)
    if not isinstance(source, pd.DataFrame) and context.last is None:
        logger.info("%s: %s", name, reading.summary())
    for symbol, part in reading.parts.items():
        _require_usable(findings_of(part, config), f"{name}: {symbol}" if symbol else name)
    if list(reading.parts) == [""]:
        return reading.parts[""].bars, reading.context
    return _aligned({symbol: part.bars for symbol, part in reading.parts.items()}), reading.context


def read_bars(
    source: Source,
    config: FileConfig | None = None,
    keep: Sequence[str] = (),
    context: Context = Context(),  # noqa: B008
) -> Reading:
    """Read bars without checking them, and say what was understood.

    :param source: as in :func:`load_bars`.
    :param config: what is known about the file.
    :param keep: further columns to keep.
    :param context: of the bars before, for a part of a stream.
    :raises DataError: when the source is not a table of bars.
    """
    config = config or FileConfig()
    if isinstance(source, pd.DataFrame) and isinstance(source.columns, pd.MultiIndex):
        return _read_symbols(source, config, keep)
    if isinstance(source, pd.DataFrame) and in_utc(source) and cast(pd.DatetimeIndex, source.index).tz is None:
        source = source.tz_localize("UTC")  # read before
    with _naming(_name(source)):
        return understand(_raw(source, context.complete(config)), config, keep, context)


def findings_of(part: Part, config: FileConfig) -> list[Finding]:
    """Return the findings about bars as they were read: cells that could not be, else those of the checks.

    :param part: of a :class:`tailguard.market.columns.Reading`.
    :param config: with the calendar, if there is one.
    """
    if not part.problems:
        return check_bars(part.bars, part.lines, config.calendar)
    times = part.bars.index
    return [
        Finding(
            "error",
            problem.reason,
            problem.row,
            None if pd.isna(times[problem.row]) else str(times[problem.row]),
            None if part.lines is None else int(part.lines[problem.row]),
        )
        for problem in part.problems
    ]


def check_source(source: Source, config: FileConfig | None = None) -> list[Finding]:
    """Return the findings about a file or a table in any form; a table that cannot be read is one error."""
    config = config or FileConfig()
    try:
        reading = read_bars(source, config)
        return [finding for part in reading.parts.values() for finding in findings_of(part, config)]
    except DataError as error:
        return [Finding("error", str(error))]


def load_dataset(name: str | Sequence[str]) -> pd.DataFrame:
    """Load a shipped data set, or several on one table of aligned times.

    Warnings about the shipped sets are not repeated on every load; ``tailguard data describe`` shows them.

    :param name: one of :func:`tailguard.market.list_datasets`, or a sequence of them.
    """
    if not isinstance(name, str):
        return align_bars({part: load_dataset(part) for part in name})
    known = [info.name for info in list_datasets()]
    if name not in known:
        raise DataError(f"no data set named {name!r}; shipped are {', '.join(known)}")
    with resources.as_file(dataset_file(name)) as path:
        return read_bars(path).parts[""].bars


def load_source(
    source: str,
    config: FileConfig | None = None,
    keep: Sequence[str] = (),
    context: Context = Context(),  # noqa: B008
) -> pd.DataFrame:
    """Load the bars of a shipped set or a file; several joined by ``+`` give one aligned table.

    :param source: names joined by ``+``.
    :param config: what is known about the files.
    :param keep: further columns to keep.
    :param context: of the bars before, for those that follow.
    """
    parts = source_parts(source)
    if not all(part.strip() for part in parts):
        raise DataError(f"{source!r} lacks a name{' beside a +' if '+' in source else ''}: name a file or a shipped set")
    if len(parts) > 1:
        symbols = [Path(part).name.split(".")[0] for part in parts]
        repeated = [symbol for symbol in symbols if symbols.count(symbol) > 1]
        if repeated:
            raise DataError(f"{source}: {repeated[0]!r} appears twice; the parts of a portfolio need different names")
        return _aligned({symbol: load_source(part, config, keep, context) for symbol, part in zip(symbols, parts, strict=True)})
    known = [info.name for info in list_datasets()]
    if source in known and not Path(source).exists():
        if keep:
            raise DataError(f"{source}: a shipped set has no further columns, but {', '.join(keep)} are asked for")
        return load_dataset(source)
    if not Path(source).exists():
        raise DataError(f"{source}: no such file, and no shipped set of that name (shipped are {', '.join(known)})")
    return load_part(source, config or FileConfig(), keep, context)[0]


def source_parts(source: str) -> list[str]:
    """Return the names that ``+`` joins; a file whose own name holds a ``+`` is one."""
    pieces = source.split("+")
    for count in range(len(pieces), 1, -1):
        if Path("+".join(pieces[:count])).exists():
            rest = "+".join(pieces[count:])
            return ["+".join(pieces[:count]), *(source_parts(rest) if count < len(pieces) else [])]
    return pieces if len(pieces) == 1 else [pieces[0], *source_parts("+".join(pieces[1:]))]


def _name(source: Source) -> str:
    return str(source) if isinstance(source, (str, Path)) else "table" if isinstance(source, pd.DataFrame) else "input"


def _raw(source: Source, config: FileConfig) -> RawTable:
    if isinstance(source, pd.DataFrame):
        return from_frame(source)
    return read_bytes(source, config) if isinstance(source, bytes) else read_file(Path(source), config)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Let every error begin with the name of its table."""
    try:
        yield
    except DataError as error:
        raise type(error)(str(error) if str(error).startswith(f"{name}: ") else f"{name}: {error}") from None


def _read_symbols(table: pd.DataFrame, config: FileConfig, keep: Sequence[str]) -> Reading:
    """Read a table with two levels of columns: symbol and field, or field and symbol as yfinance has them."""
    if "close" in {str(name).lower() for name in table.columns.get_level_values(0)}:
        table = table.swaplevel(axis=1)
    readings = {symbol: read_bars(bars_of(table, symbol).dropna(how="all"), config, keep) for symbol in symbols_of(table)}
    first = next(iter(readings.values()))
    parts = {symbol: reading.parts[""] for symbol, reading in readings.items()}
    return Reading(parts, first.facts, first.ignored, first.remarks)


def _require_usable(findings: Sequence[Finding], name: str) -> None:
    """Raise for the first error; warn of what may mislead."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        named = errors[0].line is None or "--" in errors[0].reason  # the remedy is an option
        remedy = "" if named else "; `tailguard data repair` writes a file that is right"
        raise DataError(f"{name}: {errors[0]}{more}{remedy}")
    for finding in findings:
        if finding.level == "warning":
            warnings.warn(f"{name}: {finding}", DataWarning, stacklevel=3)


def _aligned(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Put several symbols on one table, and warn of bars of different length."""
    for symbol, table in tables.items():
        if isinstance(table.columns, pd.MultiIndex):
            raise DataError(f"{symbol}: holds several symbols already; give each a file, or this file alone")
    clocked = {symbol: in_utc(table) for symbol, table in tables.items() if not are_days(pd.DatetimeIndex(table.index))}
    if len(set(clocked.values())) > 1:
        zoned, bare = (next(symbol for symbol, known in clocked.items() if known is kind) for kind in (True, False))
        raise DataError(f"the times of {zoned} name their zone and those of {bare} do not; {ZONE_REMEDY}")
    lengths = {symbol: timeframe(pd.DatetimeIndex(table.index)) for symbol, table in tables.items() if len(table) > 1}
    if lengths:
        short, long = min(lengths, key=lambda name: lengths[name]), max(lengths, key=lambda name: lengths[name])
        if lengths[long] >= MIXED_FACTOR * lengths[short]:
            text = f"bars of {timeframe_text(lengths[long])} in {long} and of {timeframe_text(lengths[short])} in {short}"
            warnings.warn(f"mixed timeframes: {text}; a portfolio needs one", DataWarning, stacklevel=3)
        else:
            _warn_of_strangers({symbol: pd.DatetimeIndex(tables[symbol].index) for symbol in lengths})
    return align_bars(tables)


def _warn_of_strangers(times: Mapping[str, pd.DatetimeIndex]) -> None:
    """Warn of a symbol that shares almost no times with the others while all have bars."""
    first, last = max(index[0] for index in times.values()), min(index[-1] for index in times.values())
    inside = {symbol: index[(index >= first) & (index <= last)] for symbol, index in times.items()}
    for symbol, own in inside.items():
        others = [index for other, index in inside.items() if other != symbol]
        shared = int(own.isin(np.concatenate(others)).sum()) if others else len(own)
        if shared < SHARED * len(own):
            text = f"{symbol} has {len(own)} bars where the others have some, and {shared} of them at the same time"
            warnings.warn(f"{text}: are all in one time zone? --timezone names that of a file", DataWarning, stacklevel=4)
            return
