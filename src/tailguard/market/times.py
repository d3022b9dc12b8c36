"""Times as files have them: recognised as a whole column, never value by value, and never guessed.

A format is taken only if it explains the whole column. Where two explain it (01/02/2003), that is an error that names both.
"""

import re
from calendar import day_abbr, day_name, month_abbr, month_name
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.market.bars import DataError

# Epoch times tell their unit by their size: seconds stay below 1e11 until the year 5138.
EPOCH_FIRST = 1e8
EPOCH_UNITS: tuple[tuple[float, Literal["s", "ms", "us", "ns"]], ...] = (
    (1e11, "s"),
    (1e14, "ms"),
    (1e17, "us"),
    (1e20, "ns"),
)
# Spreadsheets count days from 1899-12-30: numbers of 1970 to 2100. They are taken as such only on request.
SPREADSHEET = "excel"
SPREADSHEET_DAYS = (25569, 73051)
COMPACT = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
# Dates whose order is plain from their form; those of three numbers with the year last are told apart by their values.
DATES = (
    *("%Y%m%d", "%Y.%m.%d", "%Y/%m/%d", "%Y-%m-%d"),
    *("%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%d %b %Y", "%d %B %Y", "%d %b %y"),
    *("%d-%b-%Y", "%d-%b-%y", "%d/%b/%Y", "%b-%d-%Y", "%d. %B %Y", "%d-%B-%Y", "%d%b%Y", "%b %Y", "%B %Y"),
    *("%Y.%m.%d.", "%Y年%m月%d日"),
    *("%a %b %d %Y", "%a, %b %d, %Y", "%a, %d %b %Y", "%a %d %b %Y", "%A, %B %d, %Y"),
)
CLOCKS = (
    *("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %H%M", " %H%M%S", "T%H:%M:%S", "T%H:%M:%S.%f", "T%H:%M", "-%H:%M:%S"),
    *(" %I:%M %p", " %I:%M:%S %p", " %I:%M%p", " %I-%p", ", %H:%M", ", %H:%M:%S", ", %I:%M %p", "T%H%M%S", ":%H:%M:%S"),
)
YEAR_LAST = re.compile(r"^(\d{1,2})([/.\-])(\d{1,2})\2(\d{4}|\d{2})(?!\d)", re.MULTILINE)
# A zone by name, as a word for UTC, or as an offset, which only a time of day can have: 13-05-2013 ends in a year.
ZONE = re.compile(r"\s*([A-Za-z]+(?:/[A-Za-z_]+)+)$|(?<=\d)\s*(Z|UTC|GMT)$|(?<=:\d\d)(?:\.\d+)?\s*([+-]\d{2}:?\d{2})$")
# A zone by letters, such as EST: others use the same ones for other zones.
LETTERS = re.compile(r"(?<=:\d\d)\s*(?!AM$|PM$|UTC$|GMT$)[A-Z]{2,5}$")
GMT_OFFSET = r"\s*(?:GMT|UTC)(?=[+-]\d{2}:?\d{2}$)"  # as Dukascopy writes it: GMT+0200
OFFSET = re.compile(r"(?<=:\d\d)\s*[+-]\d{2}:?\d{2}$")
MIDNIGHT = re.compile(r"\b00:00(?::00)?(?:\.0+)?\s*[+-]\d{2}:?\d{2}$")
CLOCK = re.compile(r"^\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?(\s*[AaPp][Mm])?$")
SAMPLE = 60
ENGLISH = {name.lower() for names in (month_name, month_abbr, day_name, day_abbr) for name in names}


class AmbiguousTimes(DataError):
    """Raised for dates that can be read in two ways, such as 01/02/2003; what they may be stands before the semicolon."""


class Times(NamedTuple):
    """Times that were understood.

    :param values: ``[T]`` without a zone, in UTC or, for local dates, as they stand; NaT where a value is not a time.
    :param form: the format, in the notation of ``strptime`` or in words.
    :param local: true if they are dates of a zone that is not UTC.
    :param in_utc: true for times of day whose zone is known, so that they were brought to UTC.
    """

    values: pd.DatetimeIndex
    form: str
    local: bool = False
    in_utc: bool = False


class Zone(NamedTuple):
    """Facts about the clock of a column of times.

    :param name: of times that name no zone, such as ``America/New_York``; None takes them as they are.
    :param after: the last time before them, from which a time that a clock shows twice is told.
    :param daily: whether they are times of bars of a day or more; None lets the times tell.
    """

    name: str | None = None
    after: pd.Timestamp | None = None
    daily: bool | None = None


def parse_times(values: pd.Series, time_format: str | None = None, zone: Zone = Zone()) -> Times:  # noqa: B008
    """Read a column of times.

    Bars of a day or more belong to a date: where all are at midnight of their zone, that date is kept. In UTC those of Berlin
    would be bars of the day before, and those of New York and of Berlin would have no time in common.

    :param values: numbers, text or times.
    :param time_format: in the notation of ``strptime``; None recognises it.
    :param zone: what is known about their clock.
    :raises DataError: when no format explains the column, or when two do.
    """
    if pd.api.types.is_datetime64_any_dtype(values):
        return _times(pd.DatetimeIndex(values), "times", zone)
    if time_format == SPREADSHEET:
        days = pd.to_numeric(values, errors="coerce")
        moments = pd.to_datetime(days, unit="D", origin="1899-12-30", errors="coerce").dt.round("ms")
        return _times(pd.DatetimeIndex(moments), "days of a spreadsheet", zone)
    if time_format is not None:
        return _parse_given(values, time_format, zone)
    if pd.api.types.is_numeric_dtype(values):
        return _parse_numbers(values, zone)
    return _parse_text(as_text(values), zone)


def are_clocks(values: pd.Series) -> bool:
    """Return true for a column of times of day, such as 09:30 or 093000, which belongs to a column of dates."""
    if pd.api.types.is_numeric_dtype(values):
        numbers = values.to_numpy(dtype=np.float64)
        return bool(((numbers >= 0) & (numbers <= 235959) & (numbers % 100 < 60)).all())
    return all(CLOCK.match(value) for value in as_text(values).iloc[_sampled(len(values))])


def join_clocks(dates: pd.Series, clocks: pd.Series, digits: int | None = None) -> pd.Series:
    """Return dates and times of day as one column of text.

    :param dates: in any form.
    :param clocks: times of day, as text or as numbers.
    :param digits: of numbers, see :func:`clock_digits`; None tells them by their size.
    """
    if pd.api.types.is_numeric_dtype(clocks):  # 093000 was read as 93000
        digits = digits or clock_digits(clocks) or 0
        clocks = clocks.astype(np.int64).astype(str).str.zfill(digits) + (":00" if digits == 2 else "")
    return as_text(dates) + " " + as_text(clocks)


def clock_digits(clocks: pd.Series, hours: bool = False) -> int | None:
    """Return the digits of numbers that are times of day: 6 for 093000, 4 for 0930, 2 for hours; None for text.

    :param clocks: the column.
    :param hours: whether its name says that it holds hours.
    :raises DataError: for numbers up to 24 in a column of another name: 9 may be nine o'clock or nine minutes after midnight.
    """
    if not pd.api.types.is_numeric_dtype(clocks):
        return None
    latest = float(clocks.max())
    if hours and latest <= 24:
        return 2
    if 0 < latest <= 24:
        raise DataError(f"times of day up to {latest:g} may be hours or minutes; write them as 09:00, or name the column Hour")
    return 6 if latest > 2359 or latest == 0 else 4


def _parse_given(values: pd.Series, time_format: str, zone: Zone) -> Times:
    """Read times in a format that somebody named; zones that the format leaves out may stand behind them."""
    text = as_text(values)
    if pd.api.types.is_numeric_dtype(values):  # 050513 was read as 50513
        text = text.str.zfill(len(re.sub("%.", "00", time_format.replace("%Y", "0000"))))
    try:
        form = _with_clock(text, time_format)
        moments, wall = _read(text, form, "%z" in form)
        times = _times(moments, form, zone, wall) if moments.notna().any() else _parse_text(text, zone, time_format)
    except DataError:
        raise
    except ValueError as error:  # of pandas, about the format itself
        raise DataError(f"--time-format {time_format!r}: {error}; %Y, %m, %d, %H and %M are such parts") from None
    if times.values.isna().all():
        raise DataError(f"no time fits the format {time_format!r}; the first is {values.iloc[0]!r}")
    return times


def _parse_numbers(values: pd.Series, zone: Zone) -> Times:
    numbers = values.to_numpy(dtype=np.float64)
    known = numbers[np.isfinite(numbers)]
    if not len(known):
        raise DataError("the time column is empty; name another with --columns time=NAME")
    for digits, form in COMPACT.items():
        if known.min() >= 19 * 10.0 ** (digits - 2) and known.max() < 21 * 10.0 ** (digits - 2):
            text = pd.Series(pd.array(numbers, dtype="Int64")).astype(str)
            parsed = pd.to_datetime(text, format=form, errors="coerce")
            if parsed.notna().mean() > 0.5:
                return _times(pd.DatetimeIndex(parsed), form, zone)
    unit = _unit(known.max())
    if unit is None or not known.min() > EPOCH_FIRST:
        days = (SPREADSHEET_DAYS[0] <= known.min()) and (known.max() < SPREADSHEET_DAYS[1])
        remedy = f"--time-format {SPREADSHEET} if it is a day of a spreadsheet" if days else "others need --time-format"
        raise DataError(
            f"{values.iloc[0]} is not a time: numbers must be 20130513 or seconds (ms, us, ns) since 1970; {remedy}"
        )
    exact = (values if pd.api.types.is_integer_dtype(values) else pd.Series(numbers)).to_numpy()
    moments, form = pd.DatetimeIndex(pd.to_datetime(exact, unit=unit)).as_unit("ns"), f"epoch {unit}"
    if _unit(known.min()) != unit:  # monthly files of Binance that are joined change from ms to us in 2025
        each, units = _of_each_unit(exact)
        if each.max() < _tomorrow():  # else the times of one unit begin so early that they look like another
            moments, form = each, f"epoch {' and '.join(units)}"
    return Times(moments, form, in_utc=not are_days(moments))


def _unit(number: float) -> Literal["s", "ms", "us", "ns"] | None:
    return next((unit for limit, unit in EPOCH_UNITS if number < limit), None)


def _of_each_unit(numbers: NDArray[Any]) -> tuple[pd.DatetimeIndex, list[str]]:
    """Return times since 1970, each in the unit that its own size tells, and these units."""
    moments, units = np.full(len(numbers), np.datetime64("NaT", "ns")), list[str]()
    lowest = 0.0
    for limit, unit in EPOCH_UNITS:
        rows = (numbers >= lowest) & (numbers < limit)
        if rows.any():
            moments[rows] = pd.to_datetime(numbers[rows], unit=unit).as_unit("ns")
            units.append(unit)
        lowest = limit
    return pd.DatetimeIndex(moments), units


def _tomorrow() -> pd.Timestamp:
    """Return a time that no bar has reached, in whatever zone it is."""
    return pd.Timestamp.now("UTC").tz_localize(None) + pd.Timedelta(days=1)


def _parse_text(text: pd.Series, zone: Zone, time_format: str | None = None) -> Times:
    rows = _sampled(len(text))
    sample = text.iloc[rows]
    if time_format is None and sample.str.fullmatch(r"\d{8,19}(\.0*)?").all():
        return _parse_numbers(pd.to_numeric(text, errors="coerce"), zone)
    if sample.str.contains(GMT_OFFSET, regex=True).all():
        text = text.str.replace(GMT_OFFSET, "", regex=True)
        sample = text.iloc[rows]
    if sample.str.contains(LETTERS).all():
        if zone.name is None:
            raise DataError(f"{sample.iloc[0]!r} has a zone in letters; say which with --timezone, such as America/New_York")
        text = text.str.replace(LETTERS, "", regex=True)
        sample = text.iloc[rows]
    named = ZONE.search(sample.iloc[0])
    if named is not None and named.group(1):  # 20230103 09:30:00 US/Eastern
        zone = zone._replace(name=named.group(1))
        text = text.str.replace(ZONE, "", regex=True)
        sample = text.iloc[rows]
        named = None
    zoned = named is not None
    if time_format is None and sample.str.match(r"\d{4}-\d{2}").all():
        utc = text.str.replace(r"\s*(?:UTC|GMT)$", "Z", regex=True)
        moments, wall = _read(utc, "ISO8601", True)
        if np.mean(moments[rows].notna()) > 0.5:
            return _times(moments if zoned else moments.tz_localize(None), "ISO 8601", zone, wall)
    if text.str.contains("  ", regex=False).any():
        text = text.str.replace(r"\s+", " ", regex=True)
    bare = text.str.replace(r"\s*(?:Z|UTC|GMT)$", "", regex=True) if named is not None and named.group(2) else text
    form = _recognised(text, named) if time_format is None else _with_clock(bare, time_format)
    moments, wall = _read(bare, form, zoned)
    return _times(moments, form, zone, wall)


def _recognised(text: pd.Series, zone: re.Match[str] | None) -> str:
    """Return the only format that explains a column of text."""
    suffix = "%z" if zone is not None and zone.group(3) else ""
    sample = text.iloc[_sampled(len(text))].str.replace(r"\s*(?:Z|UTC|GMT)$", "", regex=True)
    dates = (_year_last(text),) if sample.str.match(YEAR_LAST).mean() > 0.5 else DATES  # a footer may stand below
    candidates = [
        date + clock + between + suffix for date in dates for clock in CLOCKS for between in ((" ", "") if suffix else ("",))
    ]
    shares = {}
    for form in candidates:
        share = float(pd.to_datetime(sample, format=form, errors="coerce", utc=True).notna().mean())
        if share == 1.0:
            return form
        shares[form] = share
    best = max(shares, key=lambda form: shares[form])
    if shares[best] > 0.5:
        return best
    raise DataError(f"{sample.iloc[0]!r} is not a time in any known format; {_remedy(sample.iloc[0])}")


def _remedy(text: str) -> str:
    if re.fullmatch(r"\d[.,]\d*[eE]\+?\d+", text):
        return "a spreadsheet has rounded it: export the times once more, as whole numbers"
    words = {word.lower() for word in re.findall(r"[^\W\d_]{3,}", text)}
    if re.search(r"\d", text) and not words <= ENGLISH:
        return "months must be numbers or in English, such as 13/05/2013 or 13 May 2013: write them so"
    return "give it with --time-format, such as %d/%m/%Y"


def _year_last(text: pd.Series) -> str:
    """Return the format of dates such as 13/05/2013: day or month first, as the numbers of the whole column say."""
    found = YEAR_LAST.findall("\n".join(text.to_numpy(dtype=object)))
    first, second = (np.array([part[k] for part in found], dtype=np.int64) for k in (0, 2))
    mark, year = found[0][1], "%Y" if len(found[0][3]) == 4 else "%y"
    if year == "%y":
        _require_years_last(found)
    day_first, month_first = f"%d{mark}%m{mark}{year}", f"%m{mark}%d{mark}{year}"
    days_in_front, days_behind = bool((first > 12).any()), bool((second > 12).any())
    if days_in_front and days_behind:
        both = ["".join(found[int(np.argmax(part > 12))][k] for k in (0, 1, 2, 1, 3)) for part in (first, second)]
        raise DataError(f"dates are mixed: {both[0]!r} has the day first, {both[1]!r} the month")
    if not days_in_front and not days_behind and mark != ".":  # nobody writes the month before a point
        date = "".join(found[0][k] for k in (0, 1, 2, 1, 3))
        readings = [pd.to_datetime(date, format=form) for form in (day_first, month_first)]
        raise AmbiguousTimes(
            f"{date!r} is {readings[0]:%-d %B %Y} or {readings[1]:%-d %B %Y}; "
            f"say which with --time-format {day_first} or {month_first}"
        )
    return month_first if days_behind else day_first


def _require_years_last(dates: list[tuple[str, str, str, str]]) -> None:
    """Refuse 13.05.14 if the last number changes from most days to the next: then it may be the day, and the year in front."""
    numbers = np.array([(first, second, last) for first, _, second, last in dates], dtype=np.int64)
    changed = (numbers[1:] != numbers[:-1])[(numbers[1:] != numbers[:-1]).any(axis=1)]
    if not len(changed) or changed[:, 2].mean() <= 0.5 or (numbers[:, 1] > 12).any() or (numbers[:, 2] > 31).any():
        return
    mark, row = dates[0][1], int(np.argmax(numbers[:, 0] != numbers[:, 2]))
    forms = [form.replace("/", mark) for form in ("%d/%m/%y", "%y/%m/%d")]
    raise AmbiguousTimes(
        f"in {mark.join(dates[row][k] for k in (0, 2, 3))!r} the year may be first or last; "
        f"say which with --time-format {forms[1]} or {forms[0]}"
    )


def _with_clock(text: pd.Series, time_format: str) -> str:
    """Return a format that names only the date with that of the times of day behind it, if there are some."""
    sample = text.iloc[_sampled(len(text))]
    forms = [time_format + clock for clock in CLOCKS]
    return next(
        (form for form in forms if pd.to_datetime(sample, format=form, errors="coerce", utc=True).notna().all()), time_format
    )


def as_text(values: pd.Series) -> pd.Series:
    """Return the values as stripped text, empty where one is missing; whole numbers read as floats lose their point."""
    if pd.api.types.is_float_dtype(values) and bool((values.dropna() % 1 == 0).all()):
        values = values.astype("Int64")
    return cast(pd.Series, values.astype(object).where(values.notna(), "").astype(str).str.strip())


def _sampled(length: int) -> list[int]:
    """Return rows from the start, the middle and the end."""
    return sorted({row for row in np.linspace(0, length - 1, min(length, SAMPLE)).round().astype(int).tolist()})


def _read(text: pd.Series, form: str, zoned: bool) -> tuple[pd.DatetimeIndex, pd.DatetimeIndex | None]:
    """Return times, in UTC if they name a zone, and those of its clocks where all may be at midnight."""
    moments = _parsed(text, form, zoned)
    if not zoned or not text.iloc[_sampled(len(text))].str.contains(MIDNIGHT).all():
        return moments, None
    bare = text.str.replace(OFFSET, "", regex=True)
    return moments, _parsed(bare, form.replace(" %z", "").replace("%z", ""), False)


def _parsed(text: pd.Series, form: str, zoned: bool) -> pd.DatetimeIndex:
    times = pd.DatetimeIndex(pd.to_datetime(text, format=form, errors="coerce", utc=zoned))
    if "%y" not in form:
        return times
    future = times > (_tomorrow().tz_localize("UTC") if zoned else _tomorrow())  # 62 was read as 2062
    return times.where(~future, times - pd.DateOffset(years=100)) if future.any() else times


def _times(moments: pd.DatetimeIndex, form: str, zone: Zone, wall: pd.DatetimeIndex | None = None) -> Times:
    """Return times in UTC; dates of bars of a day or more stay as they stand.

    :param moments: with or without a zone.
    :param form: their format.
    :param zone: of those without one, and what else is known.
    :param wall: what the clocks of their zones show; None if `moments` say so themselves.
    """
    if moments.tz is None and zone.name is None:
        return Times(moments, form)
    if moments.tz is None:
        require_zone(zone.name)
    if wall is None:
        wall = moments.tz_localize(None)
    if _are_dates(wall, zone.daily):
        local = moments.tz is None or bool((moments.tz_convert("UTC").tz_localize(None) != wall)[wall.notna()].any())
        return Times(wall, form, local)
    zoned = localize(moments, zone) if moments.tz is None else moments
    return Times(zoned.tz_convert("UTC").tz_localize(None), form, in_utc=True)


def _are_dates(wall: pd.DatetimeIndex, daily: bool | None) -> bool:
    """Return whether all times are midnights, of more than one day unless it is known that bars are so long."""
    if daily is False or not are_days(wall):
        return False
    return bool(daily) or wall.nunique() > 1


def are_days(index: pd.DatetimeIndex) -> bool:
    """Return true for dates without a time of day, which mean the same day in every zone."""
    known = index[index.notna()]
    return bool((known == known.normalize()).all())


def require_zone(name: str | None) -> None:
    """Refuse a time zone that does not exist."""
    localize(pd.DatetimeIndex([]), Zone(name))


def localize(index: pd.DatetimeIndex, zone: Zone) -> pd.DatetimeIndex:
    """Return times of a zone; of those that its clocks show twice, the first that comes after the time before.

    :param index: times that name no zone.
    :raises DataError: for a zone that is not known, and for times that it does not have.
    """
    try:
        early, late = (index.tz_localize(zone.name, ambiguous=np.full(len(index), summer)) for summer in (True, False))
        twice = early.asi8 != late.asi8
        if not twice.any():
            return early
        ordered = _in_order(early, late, twice, zone.after)
        return index.tz_localize(zone.name, ambiguous="infer") if ordered is None else ordered
    except (ValueError, KeyError) as error:  # pandas' errors about zones and clock changes are ValueErrors
        raise DataError(f"times cannot be read in the time zone {zone.name!r} ({error})") from None


def _in_order(
    early: pd.DatetimeIndex, late: pd.DatetimeIndex, twice: NDArray[np.bool_], after: pd.Timestamp | None
) -> pd.DatetimeIndex | None:
    """Return the early or late reading of each time, so that they increase; None if none does, or the first may be both."""
    newest_first = bool(early[0] > early[-1])
    if newest_first:
        early, late, twice = early[::-1], late[::-1], twice[::-1]
    if twice[0] and after is None:
        return None
    choice = twice.copy()  # true for late readings
    before = early[0] if after is None else after.tz_localize("UTC")
    for row in np.flatnonzero(twice).tolist():
        last = before if row == 0 else (late if choice[row - 1] else early)[row - 1]
        choice[row] = not early[row] > last
    chosen = early.where(~choice, late)
    if not (chosen[1:] > chosen[:-1]).all():
        return None
    return chosen[::-1] if newest_first else chosen
