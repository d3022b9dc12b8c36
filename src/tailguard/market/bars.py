"""The form of a table of bars, and the errors about tables that are not in it.

A table of bars is a :class:`pandas.DataFrame` indexed by ``time`` (UTC, or as written where its source names no zone;
increasing, unique) with float64 columns
``open, high, low, close, volume``, and ``funding`` where the file has it (what a long position pays per unit of value, for
perpetual futures). Several symbols are one table on the union of their times with a first column
level for the symbol; a bar that a symbol does not have is a row of ``NaN``.
"""

from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np
import pandas as pd

PRICES = ("open", "high", "low", "close")
COLUMNS = (*PRICES, "volume")
OPTIONAL = ("funding",)
IN_UTC = "in_utc"  # key in the attributes of a table of bars
ZONE_REMEDY = (
    "they may be hours apart: say with --timezone (timezone=) which zone the times that name none are in, such as UTC or "
    "America/New_York"
)
YEAR = pd.Timedelta(days=365.25)


class DataError(ValueError):
    """Raised for a table that cannot be used; the message names the line, the reason and the remedy."""


class DataWarning(UserWarning):
    """A warning about a table that can be used, but whose results may mislead."""


def align_bars(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Put several symbols on the union of their times; a bar that a symbol lacks becomes a row of NaN.

    :param tables: bars of each symbol, from :func:`tailguard.market.load_bars`; at least one.
    """
    if not tables:
        raise DataError("no symbols given: pass at least one")
    return pd.concat({str(symbol): table for symbol, table in tables.items()}, axis=1, sort=True)


def in_utc(bars: pd.DataFrame) -> bool:
    """Return whether the source of the bars named the zone of its times of day, so that they are known to be in UTC."""
    return bool(bars.attrs.get(IN_UTC, False))


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

    :raises DataError: when the table is not in the form that :func:`tailguard.market.load_bars` returns.
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


def periods_per_year(index: pd.DatetimeIndex) -> float:
    """Return the number of bars per calendar year, counted over the whole table.

    :param index: times of the bars, at least 2.
    """
    if len(index) < 2:
        raise DataError(f"bars per year need at least 2 bars, got {len(index)}")
    return float((len(index) - 1) / ((index[-1] - index[0]) / YEAR))


def timeframe(index: pd.DatetimeIndex) -> pd.Timedelta:
    """Return the usual time between two bars: the median, so that nights, weekends and holidays do not count.

    :param index: times of the bars, at least 2.
    """
    if len(index) < 2:
        raise DataError(f"the time between bars needs at least 2 bars, got {len(index)}")
    steps = np.diff(index.as_unit("ns").to_numpy()).astype(np.int64)
    return pd.Timedelta(int(np.percentile(steps, 50, method="lower")), unit="ns")


def timeframe_text(step: pd.Timedelta) -> str:
    """Return a timeframe as people write it: ``1 day``, ``15 minutes``; a month has 29 to 31 days."""
    seconds = step.total_seconds()
    if pd.Timedelta(days=28) < step <= pd.Timedelta(days=31):
        return "1 month"
    for unit, size in (("week", 604800), ("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= size and seconds % size == 0:
            number = int(seconds // size)
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return f"{seconds:g} seconds"
