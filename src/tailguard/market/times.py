"""Times as files have them: recognised as a whole column, never value by value, and never guessed.

A format is taken only if it explains the whole column. Where two explain it (01/02/2003), that is an error that names both.
"""

import re
from typing import Literal, NamedTuple, cast

import numpy as np
import pandas as pd

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
OFFSET = re.compile(r"(?<=:\d\d)(?:\.\d+)?\s*[+-]\d{2}:?\d{2}$")
MIDNIGHT = re.compile(r"[T ]00:00(?::00(?:\.0+)?)?\s*[+-]\d{2}:?\d{2}$")
GMT_OFFSET = r"\s*(?:GMT|UTC)(?=[+-]\d{2}:?\d{2}$)"  # as Dukascopy writes it: GMT+0200
CLOCK = re.compile(r"^\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?(\s*[AaPp][Mm])?$")
SAMPLE = 60


class AmbiguousTimes(DataError):
    """Raised for dates that can be read in two ways, such as 01/02/2003; what they may be stands before the semicolon."""


class Times(NamedTuple):
    """Times that were understood.

    :param values: ``[T]`` without a zone; NaT where a value is not a time. Days keep their date whatever their zone.
    :param form: the format, in the notation of ``strptime`` or in words.
    :param in_utc: True for times of day whose zone is known; they were brought to UTC.
    """

    values: pd.DatetimeIndex
    form: str
    in_utc: bool = False


def parse_times(values: pd.Series, time_format: str | None = None, timezone: str | None = None) -> Times:
    """Read a column of times.

    :param values: numbers, text or times.
    :param time_format: in the notation of ``strptime``; None recognises it.
    :param timezone: of times that name none, such as ``America/New_York``; None takes them as they are.
    :raises DataError: when no format explains the column, or when two do.
    """
    if pd.api.types.is_datetime64_any_dtype(values):
        return _in_utc(pd.DatetimeIndex(values), "times", timezone)
    if time_format == SPREADSHEET:
        days = pd.to_numeric(values, errors="coerce")
        moments = pd.to_datetime(days, unit="D", origin="1899-12-30", errors="coerce").dt.round("ms")
        return _in_utc(pd.DatetimeIndex(moments), "days of a spreadsheet", timezone)
    if time_format is not None:
        text = as_text(values)
        if pd.api.types.is_numeric_dtype(values):  # 050513 was read as 50513
            text = text.str.zfill(len(re.sub("%.", "00", time_format.replace("%Y", "0000"))))
        form = _with_clock(text, time_format)
        parsed = pd.to_datetime(text, format=form, errors="coerce", utc="%z" in form)
        if parsed.isna().all():
            raise DataError(f"no time fits the format {time_format!r}; the first is {values.iloc[0]!r}")
        return _in_utc(pd.DatetimeIndex(parsed), form, timezone)
    if pd.api.types.is_numeric_dtype(values):
        return _parse_numbers(values, timezone)
    return _parse_text(as_text(values), timezone)


def are_clocks(values: pd.Series) -> bool:
    """Return true for a column of times of day, such as 09:30 or 093000, which belongs to a column of dates."""
    if pd.api.types.is_numeric_dtype(values):
        numbers = values.to_numpy(dtype=np.float64)
        return bool(((numbers >= 0) & (numbers <= 235959) & (numbers % 100 < 60)).all())
    return all(CLOCK.match(value) for value in as_text(values).iloc[_sampled(len(values))])


def join_clocks(dates: pd.Series, clocks: pd.Series) -> pd.Series:
    """Return dates and times of day as one column of text."""
    if pd.api.types.is_numeric_dtype(clocks):  # 093000 was read as 93000
        digits = 6 if float(clocks.max()) > 2359 or float(clocks.max()) == 0 else 4
        clocks = clocks.astype(np.int64).astype(str).str.zfill(digits)
    return as_text(dates) + " " + as_text(clocks)


def _parse_numbers(values: pd.Series, timezone: str | None) -> Times:
    numbers = values.to_numpy(dtype=np.float64)
    known = numbers[np.isfinite(numbers)]
    if not len(known):
        raise DataError("the time column is empty; name another with --columns time=NAME")
    for digits, form in COMPACT.items():
        if known.min() >= 19 * 10.0 ** (digits - 2) and known.max() < 21 * 10.0 ** (digits - 2):
            text = pd.Series(pd.array(numbers, dtype="Int64")).astype(str)
            parsed = pd.to_datetime(text, format=form, errors="coerce")
            if parsed.notna().mean() > 0.5:
                return _in_utc(pd.DatetimeIndex(parsed), form, timezone)
    unit = next((unit for limit, unit in EPOCH_UNITS if known.max() < limit), None)
    if unit is None or not known.min() > EPOCH_FIRST:
        days = (SPREADSHEET_DAYS[0] <= known.min()) and (known.max() < SPREADSHEET_DAYS[1])
        remedy = f"--time-format {SPREADSHEET} if it is a day of a spreadsheet" if days else "others need --time-format"
        raise DataError(
            f"{values.iloc[0]} is not a time: numbers must be 20130513 or seconds (ms, us, ns) since 1970; {remedy}"
        )
    exact = values if pd.api.types.is_integer_dtype(values) else pd.Series(numbers)
    moments = pd.to_datetime(exact.to_numpy(), unit=unit, utc=True)
    return _in_utc(pd.DatetimeIndex(moments), f"epoch {unit}", None)


def _parse_text(text: pd.Series, timezone: str | None) -> Times:
    rows = _sampled(len(text))
    sample = text.iloc[rows]
    if sample.str.fullmatch(r"\d{8,19}(\.0*)?").all():
        return _parse_numbers(pd.to_numeric(text, errors="coerce"), timezone)
    if sample.str.contains(GMT_OFFSET, regex=True).all():
        text = text.str.replace(GMT_OFFSET, "", regex=True)
        sample = text.iloc[rows]
    if sample.str.contains(LETTERS).all():
        if timezone is None:
            raise DataError(f"{sample.iloc[0]!r} has a zone in letters; say which with --timezone, such as America/New_York")
        text = text.str.replace(LETTERS, "", regex=True)
        sample = text.iloc[rows]
    if sample.str.contains(MIDNIGHT).all():
        days = _parse_text(text.str.replace(OFFSET, "", regex=True), None)
        if are_days(days.values):
            return days
    zone = ZONE.search(sample.iloc[0])
    if zone is not None and zone.group(1):  # 20230103 09:30:00 US/Eastern
        timezone = zone.group(1)
        text = text.str.replace(ZONE, "", regex=True)
        sample = text.iloc[rows]
        zone = None
    if sample.str.match(r"\d{4}-\d{2}").all():
        parsed = pd.to_datetime(
            text.str.replace(r"\s*(?:UTC|GMT)$", "Z", regex=True), errors="coerce", utc=True, format="ISO8601"
        )
        if parsed.iloc[rows].notna().mean() > 0.5:
            moments = pd.DatetimeIndex(parsed)  # read as UTC: so they are if they named a zone
            return _in_utc(moments if zone is not None else moments.tz_localize(None), "ISO 8601", timezone)
    if text.str.contains("  ", regex=False).any():
        text = text.str.replace(r"\s+", " ", regex=True)
    form = _recognised(text, zone)
    bare = text.str.replace(r"\s*(?:Z|UTC|GMT)$", "", regex=True) if zone is not None and zone.group(2) else text
    parsed = pd.to_datetime(bare, format=form, errors="coerce", utc=zone is not None)
    return _in_utc(pd.DatetimeIndex(parsed), form, timezone)


def _recognised(text: pd.Series, zone: re.Match[str] | None) -> str:
    """Return the only format that explains a column of text."""
    suffix = "%z" if zone is not None and zone.group(3) else ""
    sample = text.iloc[_sampled(len(text))].str.replace(r"\s*(?:Z|UTC|GMT)$", "", regex=True)
    dates = (_year_last(text),) if YEAR_LAST.match(sample.iloc[-1]) else DATES
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
    raise DataError(f"{sample.iloc[0]!r} is not a time in any known format; give it with --time-format, such as %d/%m/%Y")


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


def are_days(index: pd.DatetimeIndex) -> bool:
    """Return true for dates without a time of day, which mean the same day in every zone."""
    known = index[index.notna()]
    return bool((known == known.normalize()).all())


def localize(index: pd.DatetimeIndex, timezone: str) -> pd.DatetimeIndex:
    """Return times that name no zone as those of `timezone`.

    :raises DataError: for a zone that is not known, and for times that it does not have.
    """
    try:
        return index.tz_localize(timezone, ambiguous="infer")
    except (ValueError, KeyError) as error:  # pandas' errors about zones and clock changes are ValueErrors
        raise DataError(f"times cannot be read in the time zone {timezone!r} ({error})") from None


def require_zone(timezone: str | None) -> None:
    """Refuse a time zone that is not known, where no time has to be read in it."""
    if timezone is not None:
        localize(pd.DatetimeIndex(["2000-01-01 12:00"]), timezone)


def _in_utc(index: pd.DatetimeIndex, form: str, timezone: str | None) -> Times:
    """Bring times of day to UTC if their zone is known; days keep their date."""
    if are_days(index):
        require_zone(timezone)
        return Times(index.tz_localize(None), form)
    zoned = localize(index, timezone) if index.tz is None and timezone is not None else index
    return Times(index, form) if zoned.tz is None else Times(zoned.tz_convert("UTC").tz_localize(None), form, True)
