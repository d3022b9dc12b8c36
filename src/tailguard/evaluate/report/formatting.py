"""Numbers, dates and names as text. The charts format numbers by the same rules (``assets/scales.js``)."""

import math
import re
from typing import Literal

import pandas as pd

from tailguard.evaluate.record import Estimate

NumberFormat = Literal["percent", "number", "tenth", "free", "multiple", "count", "price"]
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
YEAR = pd.Timedelta(days=365.25)


def say(value: float | None, kind: NumberFormat = "number") -> str:
    """Return a number as text, with a true minus sign, and with a word where it is not finite.

    :param value: the number.
    :param kind: ``number`` has two decimals, as ratios are read, ``tenth`` one; ``free`` shows three digits of whatever size.
    """
    if value is None or math.isnan(value):
        return "none"
    if math.isinf(value):
        return "infinite" if value > 0.0 else f"{MINUS}infinite"
    if kind == "percent":
        whole = value in (0.0, 1.0)
        return f"{_fixed(value * 100.0, 0 if whole else 2 if abs(value) < 0.1 else 1)}%"
    if kind == "multiple":
        return f"{_fixed(value, 2)}{TIMES}"
    if kind in ("count", "tenth"):
        return _fixed(value, 0 if kind == "count" else 1)
    if kind == "price":
        return _fixed(value, 0 if abs(value) >= 1000.0 else 4 if abs(value) < 10.0 else 2)
    size = abs(value)
    if kind == "number":
        return _fixed(value, 2 if size < 100.0 else 0)
    if size != 0.0 and (size < 1e-3 or size >= 1e6):
        return f"{value:.2e}".replace("-", MINUS)
    return _fixed(value, 4 if 0.0 < size < 0.1 else 3 if size < 1.0 else 2 if size < 100.0 else 0)


def chance(p_value: float) -> str:
    """Return a p-value as text, with three decimals."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


def signed(value: float, kind: NumberFormat = "number") -> str:
    """Return a change as text, with a plus sign where it is not negative."""
    text = say(value, kind)
    return text if value < 0.0 or not math.isfinite(value) else f"+{text}"


def interval(estimate: Estimate, kind: NumberFormat = "number") -> str:
    """Return the ends of an interval as text, empty where there is none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{say(estimate.low, kind)} to {say(estimate.high, kind)}"


def with_interval(estimate: Estimate, kind: NumberFormat = "number") -> str:
    """Return a statistic with its interval in brackets."""
    ends = interval(estimate, kind)
    return f"{say(estimate.value, kind)} [{ends}]" if ends else say(estimate.value, kind)


def difference(saving: Estimate, kind: NumberFormat = "number") -> str:
    """Return a saving as words with its interval; one below 0 is named what it is, an excess."""
    if saving.value >= 0.0 or saving.low is None or saving.high is None:
        return f"the saving is {with_interval(saving, kind)}"
    return f"the excess is {with_interval(Estimate(-saving.value, -saving.high, -saving.low), kind)}"


def readable(name: str) -> str:
    """Return a name with spaces for underscores: ``buy_and_hold`` becomes buy and hold."""
    return name.replace("_", " ")


def slug(name: str) -> str:
    """Return a name as part of an HTML id: letters, digits, hyphens and underscores."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def capital(sentence: str) -> str:
    """Return a sentence with a capital first letter."""
    return sentence[:1].upper() + sentence[1:]


def years(times: pd.DatetimeIndex) -> float:
    """Return the time from the first to the last, in years."""
    return float((times[-1] - times[0]) / YEAR)


def duration(length: float) -> str:
    """Return a length in years as text, in months below one year."""
    number, unit = (length, "years") if length >= 1.0 else (length * 12.0, "months")
    return f"{f'{number:.1f}'.removesuffix('.0')} {unit}"


def day(time: pd.Timestamp) -> str:
    """Return a date without its time of day."""
    return f"{time.day} {time:%b %Y}"


def moment(time: pd.Timestamp) -> str:
    """Return a time as text, without the time of day at midnight."""
    return f"{time:%Y-%m-%d}" if time == time.normalize() else f"{time:%Y-%m-%d %H:%M}"


def _fixed(value: float, decimals: int) -> str:
    text = f"{abs(value):,.{decimals}f}"
    return text if value >= 0.0 or float(text.replace(",", "")) == 0.0 else MINUS + text
