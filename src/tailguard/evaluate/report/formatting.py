"""Numbers and names as people read them. The charts' own formats (``assets/scales.js``) follow the same rules."""

import math
import re
from collections.abc import Sequence
from typing import Literal

import pandas as pd

from tailguard.evaluate.record import Figure

Kind = Literal["percent", "number", "free", "multiple", "count", "price"]
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
YEAR = pd.Timedelta(days=365.25)


def say(value: float | None, kind: Kind = "number") -> str:
    """A figure in words: with a true minus, and with a word where there is no number.

    :param value: the figure.
    :param kind: ``number`` has two decimals, as ratios are read; ``free`` shows three digits of whatever size it is.
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
    if kind == "count":
        return _fixed(value, 0)
    if kind == "price":
        return _fixed(value, 0 if abs(value) >= 1000.0 else 4 if abs(value) < 10.0 else 2)
    size = abs(value)
    if kind == "number":
        return _fixed(value, 2 if size < 100.0 else 0)
    if size != 0.0 and (size < 1e-3 or size >= 1e6):
        return f"{value:.2e}".replace("-", MINUS)
    return _fixed(value, 4 if 0.0 < size < 0.1 else 3 if size < 1.0 else 2 if size < 100.0 else 0)


def chance(p_value: float) -> str:
    """A p-value: three decimals are all that anybody can use."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


def signed(value: float, kind: Kind = "number") -> str:
    """A change: a plus in front of what is not negative."""
    said = say(value, kind)
    return said if value < 0.0 or not math.isfinite(value) else f"+{said}"


def interval(figure: Figure, kind: Kind = "number") -> str:
    """The ends of a figure's interval; nothing where it has none."""
    if figure.low is None or figure.high is None:
        return ""
    return f"{say(figure.low, kind)} to {say(figure.high, kind)}"


def with_interval(figure: Figure, kind: Kind = "number") -> str:
    """A figure and, in brackets, its interval."""
    ends = interval(figure, kind)
    return f"{say(figure.value, kind)} [{ends}]" if ends else say(figure.value, kind)


def plain(name: str) -> str:
    """A name as words: ``buy_and_hold`` is buy and hold."""
    return name.replace("_", " ")


def slug(name: str) -> str:
    """A name as part of an id: letters, digits, hyphens and underscores."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def capital(sentence: str) -> str:
    """With a capital letter first; the rest is left alone."""
    return sentence[:1].upper() + sentence[1:]


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def years(times: pd.DatetimeIndex) -> float:
    """From the first time to the last, in years."""
    return float((times[-1] - times[0]) / YEAR)


def duration(length: float) -> str:
    """A length in years, in months where it is short."""
    number, unit = (length, "years") if length >= 1.0 else (length * 12.0, "months")
    return f"{f'{number:.1f}'.removesuffix('.0')} {unit}"


def day(time: pd.Timestamp) -> str:
    """A date without its clock."""
    return f"{time.day} {time:%b %Y}"


def _fixed(value: float, decimals: int) -> str:
    said = f"{abs(value):,.{decimals}f}"
    return said if value >= 0.0 or float(said.replace(",", "")) == 0.0 else MINUS + said
