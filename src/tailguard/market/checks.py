"""Checks of a table of bars: what makes it unusable, and what may make its results mislead."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.market.bars import PRICES, DataError, timeframe, timeframe_text

# Shares of one share that splits are usually made of, as ratios of prices before and after.
SPLIT_RATIOS = np.array([1.5, 2, 3, 4, 5, 6, 7, 8, 10, 15, 20, 25, 30, 50])
SPLIT_TOLERANCE = 0.03
SPLIT_RETURN = 0.4
STALE_OPEN_SHARE = 0.2
GAP_FACTOR = 1.5
# Prices adjusted for splits and dividends are products rounded to a few digits: an open may leave its range by that much.
RANGE_TOLERANCE = 1e-8
# A break in trading is regular if one as long occurs on this share of the days; holidays make it longer by whole days.
REGULAR_SHARE = 0.1
LONGEST_CLOSURE = pd.Timedelta(days=5)
CLOCK_CHANGE = pd.Timedelta(hours=1)
# A market with this share of its bars on Saturdays (a seventh is usual) trades around the clock.
SATURDAYS = 0.05
# A table has mixed timeframes if the usual step of one stretch is this many times that of another.
MIXED_FACTOR = 4
STRETCHES = 20
DAY = pd.Timedelta(days=1)


@dataclass(frozen=True)
class Finding:
    """A finding of the validator about a table.

    :param level: ``error`` (unusable), ``warning`` (usable, but results may mislead) or ``note``.
    :param reason: what is wrong, in one sentence.
    :param row: position of the row, counted from 0 as in ``frame.iloc``; None when it is about the whole table.
    :param time: the time of that row, as text.
    :param line: its line in the file, counted from 1; None for tables that come from no text file.
    """

    level: Literal["error", "warning", "note"]
    reason: str
    row: int | None = None
    time: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        """Return one line: the line of the file, or the row of a table, then the reason."""
        if self.row is None:
            return self.reason
        where = f"row {self.row}" if self.line is None else f"line {self.line}"
        return f"{where}{f' ({self.time})' if self.time else ''}: {self.reason}"


def check_bars(bars: pd.DataFrame, lines: NDArray[np.int64] | None = None, calendar: str | None = None) -> list[Finding]:
    """Return the findings about a table in standard form, errors first; an empty list means a clean table.

    :param bars: one symbol, from :func:`tailguard.market.load_bars`.
    :param lines: ``[T]`` lines of the file that the rows stand in.
    :param calendar: code of an exchange, see :class:`tailguard.market.files.FileConfig`.
    """
    checks = (_check_times, _check_prices, _check_ranges, _check_splits, _check_opens)
    findings = [finding for check in checks for finding in check(bars)]
    if not any(finding.level == "error" for finding in findings):
        findings += _check_timeframe(bars)
        findings += _check_gaps(bars) if calendar is None else _check_sessions(bars, calendar)
    if lines is not None:
        findings = [_with_line(finding, lines) for finding in findings]
    levels = ("error", "warning", "note")
    return sorted(findings, key=lambda finding: (levels.index(finding.level), -1 if finding.row is None else finding.row))


def _with_line(finding: Finding, lines: NDArray[np.int64]) -> Finding:
    if finding.row is None:
        return finding
    return Finding(finding.level, finding.reason, finding.row, finding.time, int(lines[finding.row]))


def _at(
    bars: pd.DataFrame, rows: np.ndarray, reasons: Sequence[str], level: Literal["error", "warning", "note"]
) -> list[Finding]:
    return [Finding(level, reason, int(row), str(bars.index[row])) for row, reason in zip(rows, reasons, strict=True)]


def _check_times(bars: pd.DataFrame) -> list[Finding]:
    index = pd.DatetimeIndex(bars.index)
    steps = np.diff(index.to_numpy())
    zero = np.timedelta64(0)
    rows = np.flatnonzero(steps <= zero) + 1
    reasons = []
    for row in rows.tolist():
        step, time = steps[row - 1], index[row]
        reason = "its time repeats that of the bar before" if step == zero else "its time is before that of the bar above"
        # Clocks are set back by an hour in the night to a Sunday.
        set_back = -step < CLOCK_CHANGE.to_timedelta64() and time.day_of_week == 6 and 0 < time.hour <= 3
        reasons.append(reason + (": clocks were set back? --timezone names the zone" if set_back else ""))
    return _at(bars, rows, reasons, "error") + _check_future(bars)


def _check_future(bars: pd.DataFrame) -> list[Finding]:
    """Warn of times to come; only a simulation has them."""
    late = np.flatnonzero(bars.index > pd.Timestamp.now("UTC").tz_localize(None) + DAY)
    reason = f"{len(late)} bars are in the future, from here on: are the times read right? --time-format says how"
    return _at(bars, late[:1], [reason][: len(late)], "warning")


def _check_prices(bars: pd.DataFrame) -> list[Finding]:
    columns = [column for column in bars.columns if column in (*PRICES, "volume", "funding")]  # a feature may be missing
    missing = bars[columns].isna().to_numpy()
    rows = np.flatnonzero(missing.any(axis=1))
    names = [[column for column, is_missing in zip(columns, missing[row], strict=True) if is_missing] for row in rows]
    reasons = [f"{', '.join(absent)} {'are' if len(absent) > 1 else 'is'} missing" for absent in names]
    findings = _at(bars, rows, reasons, "error")
    for column in columns:
        values = bars[column].to_numpy()
        lowest = "negative" if column == "volume" else "not positive"
        broken = np.flatnonzero(np.isinf(values))
        low = np.flatnonzero(values < 0 if column == "volume" else (values <= 0) & (column in PRICES))
        findings += _at(bars, broken, [f"{column} is {values[row]}" for row in broken], "error")
        findings += _at(bars, low, [f"{column} {values[row]:g} is {lowest}" for row in low], "error")
    return findings


def out_of_range(bars: pd.DataFrame) -> NDArray[np.bool_]:
    """Return ``[T]`` true where open, high, low and close contradict each other by more than rounding."""
    opens, high, low, close = (bars[column].to_numpy() for column in PRICES)
    slack = RANGE_TOLERANCE * np.abs(high)
    return np.asarray(
        (np.maximum(opens, close) > high + slack) | (np.minimum(opens, close) < low - slack) | (high < low - slack)
    )


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


def _check_timeframe(bars: pd.DataFrame) -> list[Finding]:
    """Warn of bars of different length in one table: their returns, volatilities and costs are not comparable."""
    steps = np.diff(bars.index.to_numpy())
    length = max(len(steps) // STRETCHES, 8)
    usual = []
    for first in range(0, len(steps) - length + 1, length):
        stretch = steps[first : first + length]
        step = np.sort(stretch)[len(stretch) // 2]
        if np.mean(stretch == step) > 0.5:
            usual.append((step, first))
    if not usual:
        return []
    (shortest, early), (longest, late) = min(usual), max(usual)
    if longest < MIXED_FACTOR * shortest:
        return []
    row = max(early, late)
    reason = (
        f"mixed timeframes: bars of {timeframe_text(pd.Timedelta(longest))} and of {timeframe_text(pd.Timedelta(shortest))} "
        "in one table; use one of them"
    )
    return _at(bars, np.array([row]), [reason], "warning")


def _check_gaps(bars: pd.DataFrame) -> list[Finding]:
    """Note times without bars that are neither the market's usual breaks nor holidays, as far as their length tells."""
    if len(bars) < 3:
        return []
    index = pd.DatetimeIndex(bars.index)
    steps, usual = np.diff(index.to_numpy()), timeframe(index)
    long = steps > GAP_FACTOR * usual.to_timedelta64()
    if usual <= DAY and float(np.mean(index.day_of_week == 5)) < SATURDAYS:
        long &= ~_regular_breaks(steps, usual, index)
    return _gap_note(bars, steps, np.flatnonzero(long), f"longer than {GAP_FACTOR:g} x the usual {timeframe_text(usual)}")


def _regular_breaks(steps: np.ndarray, usual: pd.Timedelta, index: pd.DatetimeIndex) -> NDArray[np.bool_]:
    """Return ``[T - 1]`` true for steps that are a usual one, or a usual one and whole days of weekend or holiday."""
    rounded = (steps / np.timedelta64(1, "m")).round()
    lengths, counts = np.unique(rounded, return_counts=True)
    days = max(index.normalize().nunique(), 1)
    frequent = np.append(lengths[counts >= REGULAR_SHARE * days], usual / pd.Timedelta(minutes=1))
    day, change = DAY / pd.Timedelta(minutes=1), CLOCK_CHANGE / pd.Timedelta(minutes=1)
    beyond = rounded[:, None] - frequent
    remainder = np.abs(beyond - day * np.round(beyond / day))
    regular = ((remainder <= change) & (beyond >= -change)).any(axis=1)
    return np.asarray(regular & (steps <= LONGEST_CLOSURE.to_timedelta64()))


def _gap_note(bars: pd.DataFrame, steps: np.ndarray, gaps: np.ndarray, what: str) -> list[Finding]:
    if len(gaps) == 0:
        return []
    widest = int(gaps[np.argmax(steps[gaps])])
    reason = (
        f"{len(gaps)} gap{'s' if len(gaps) > 1 else ''} {what}; "
        f"the widest, {pd.Timedelta(steps[widest])}, ends here. Gaps stay gaps: nothing is filled in"
    )
    return [Finding("note", reason, widest + 1, str(bars.index[widest + 1]))]


def _check_sessions(bars: pd.DataFrame, calendar: str) -> list[Finding]:
    """Note sessions of an exchange without bars, and bars on days without a session."""
    index = pd.DatetimeIndex(bars.index)
    expected = sessions(calendar, index[0], index[-1])
    days = index.normalize()
    missing = expected.difference(days)
    outside = np.flatnonzero(~days.isin(expected))
    findings = []
    if len(missing):
        reason = f"{len(missing)} of {len(expected)} sessions of {calendar} have no bars, the first {missing[0]:%Y-%m-%d}"
        findings.append(Finding("note", reason))
    if len(outside):
        reason = f"{len(outside)} bars on days without a session of {calendar}, the first here"
        findings += _at(bars, outside[:1], [reason], "note")
    steps = np.diff(index.to_numpy())
    usual = timeframe(index) if len(index) > 1 else DAY
    inside = (steps > GAP_FACTOR * usual.to_timedelta64()) & (days[1:] == days[:-1])
    return findings + _gap_note(bars, steps, np.flatnonzero(inside), "inside sessions")


def sessions(calendar: str, first: pd.Timestamp, last: pd.Timestamp) -> pd.DatetimeIndex:
    """Return the days on which an exchange trades, both ends included.

    :param calendar: its code, such as ``XNYS``.
    :raises DataError: when there is no such calendar, or the package that knows them is not installed.
    """
    try:
        import exchange_calendars
        from exchange_calendars.errors import InvalidCalendarName
    except ModuleNotFoundError:
        raise DataError("calendars of exchanges need a package: pip install 'tailguard[calendars]'") from None
    start, end = first.normalize(), last.normalize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own use of pandas, which no caller can change
            known = exchange_calendars.get_calendar(calendar, start=start - 7 * DAY, end=end + 7 * DAY)
    except InvalidCalendarName:
        raise DataError(f"no calendar named {calendar!r}; examples are XNYS, XNAS, XLON, XETR, XTKS, CMES and 24/7") from None
    except ValueError as error:
        raise DataError(f"calendar {calendar}: {' '.join(str(error).split())}") from None
    return pd.DatetimeIndex(known.sessions_in_range(start, end))
