"""What a chart shows, as data: marks on panels under one title. ``assets/`` draws it.

A title says what is to be seen, a summary says it to those who cannot see it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from tailguard.evaluate.record import Figure
from tailguard.evaluate.report.formatting import Kind, with_interval

Color = Literal["agent", "market", "third", "fourth", "other", "seed"]
Json = dict[str, Any]
DIGITS = 6


@dataclass(frozen=True)
class Axis:
    """How numbers become places.

    :param format: of the numbers.
    :param kind: of the scale; ``time`` takes seconds since 1970.
    :param label: words below the axis.
    :param tip: words before the number where the cursor is.
    :param include: values that must be on it.
    :param tight: no air beyond 0.
    """

    format: Kind = "number"
    kind: Literal["linear", "log", "time"] = "linear"
    label: str = ""
    tip: str = ""
    include: tuple[float, ...] = ()
    tight: bool = False

    def data(self) -> Json:
        """For the page."""
        known = {"format": self.format, "kind": self.kind, "label": self.label, "tip": self.tip, "include": list(self.include)}
        return known | {"log": self.kind == "log", "tight": self.tight}


@dataclass(frozen=True)
class Mark:
    """Something drawn: a line, an area, a band, bars, dots or links.

    :param type: which of them.
    :param x: places; bars take the n + 1 edges of their n bins.
    :param columns: numbers by name: ``y``, or ``low`` and ``high`` of a band, or ``from`` and ``to`` of links.
    :param name: in the legend and under the cursor; a mark without a name is scenery.
    :param color: its role.
    :param label: whether the name is written at the line's end where there is room.
    :param options: ``dash``, ``thin``, ``step``, ``hollow``, ``size``, ``keep`` (never faded), ``legend``
        (False leaves it out).
    """

    type: Literal["line", "area", "band", "bars", "dots", "links"]
    x: ArrayLike
    columns: dict[str, ArrayLike]
    name: str = ""
    color: Color = "agent"
    label: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def data(self) -> Json:
        """For the page."""
        known: Json = {"type": self.type, "x": numbers(self.x), "name": self.name, "color": self.color, "label": self.label}
        return known | {key: numbers(values) for key, values in self.columns.items()} | self.options


@dataclass(frozen=True)
class Rule:
    """A reference line, vertical at `x` or horizontal at `y`, with its words."""

    label: str
    x: float | None = None
    y: float | None = None

    def data(self) -> Json:
        """For the page."""
        return {"label": self.label} | ({"x": self.x} if self.x is not None else {"y": self.y})


@dataclass(frozen=True)
class Panel:
    """Marks on two axes.

    :param title: what is measured, with its unit.
    :param marks: drawn in this order.
    :param x: horizontal axis.
    :param y: vertical axis.
    :param height: in pixels on a wide screen.
    :param rules: reference lines.
    :param hide_x: leave the horizontal axis to the panel below.
    """

    title: str
    marks: Sequence[Mark]
    x: Axis
    y: Axis
    height: int = 300
    rules: Sequence[Rule] = ()
    hide_x: bool = False

    def data(self) -> Json:
        """For the page."""
        drawn = {"marks": [mark.data() for mark in self.marks], "rules": [rule.data() for rule in self.rules]}
        axes = {"x": self.x.data(), "y": self.y.data(), "hideX": self.hide_x}
        return {"title": self.title, "height": self.height} | axes | drawn


@dataclass(frozen=True)
class Dot:
    """One of several values in a row."""

    name: str
    value: float
    color: Color
    hollow: bool = False


@dataclass(frozen=True)
class Row:
    """A value with its interval, and others beside it.

    :param name: of the row.
    :param text: the numbers in words, at the row's end.
    :param value: None where there are only dots.
    :param low: lower end of the interval; None without one.
    :param high: upper end, likewise.
    :param color: its role.
    :param dots: further values.
    :param label: what the value is, under the cursor.
    """

    name: str
    text: str
    value: float | None
    low: float | None = None
    high: float | None = None
    color: Color = "agent"
    dots: Sequence[Dot] = ()
    label: str = "value"


@dataclass(frozen=True)
class Rows:
    """A panel of rows.

    :param title: what is measured, with its unit.
    :param rows: from top to bottom.
    :param format: of the numbers.
    :param include: values that must be on the axis.
    :param rules: vertical reference lines.
    """

    title: str
    rows: Sequence[Row]
    format: Kind = "number"
    include: tuple[float, ...] = (0.0,)
    rules: Sequence[Rule] = ()

    def data(self) -> Json:
        """For the page; what is not finite cannot be drawn and is left out."""
        shown = [
            {
                "name": row.name,
                "text": row.text,
                "value": finite(row.value),
                "low": finite(row.low),
                "high": finite(row.high),
                "color": row.color,
                "label": row.label,
                "dots": [vars(dot) for dot in row.dots if math.isfinite(dot.value)],
            }
            for row in self.rows
        ]
        key = {dot.name.split(",")[0]: dot for row in self.rows for dot in row.dots}
        values = {row.label: row for row in self.rows if row.value is not None and row.dots}
        legend: list[Json] = [{"type": "dot", "name": name, "color": one.color} for name, one in values.items()]
        legend += [{"type": "dot", "name": name, "color": dot.color, "hollow": dot.hollow} for name, dot in key.items()]
        rules = [rule.data() for rule in self.rules]
        head = {"title": self.title, "format": self.format, "include": list(self.include), "rules": rules}
        return head | {"rows": shown, "key": legend}


@dataclass(frozen=True)
class Chart:
    """Panels under one title.

    :param id: unique on the page.
    :param title: what is to be seen, as a sentence.
    :param summary: the same for those who cannot see it, with the numbers.
    :param panels: at least one.
    :param note: how it was made and how to read it.
    :param columns: 1 stacks the panels, more sets them side by side where there is room.
    :param shared: one cursor for all panels.
    :param choose: whether a click in the legend brings a series forward.
    """

    id: str
    title: str
    summary: str
    panels: Sequence[Panel | Rows]
    note: str = ""
    columns: int = 1
    shared: bool = False
    choose: bool = False

    def data(self) -> Json:
        """For the page."""
        drawn = {"title": self.title, "summary": self.summary, "panels": [panel.data() for panel in self.panels]}
        return drawn | {"columns": self.columns, "shared": self.shared, "choose": self.choose}


def figure_row(name: str, figure: Figure, kind: Kind, color: Color, label: str) -> Row:
    """A row for a statistic of the record."""
    return Row(name, with_interval(figure, kind), figure.value, figure.low, figure.high, color, label=label)


def numbers(values: ArrayLike) -> list[float | int | None]:
    """As JSON: six digits, whole numbers without a point, None for what is not finite."""
    return [_short(value) for value in np.asarray(values, dtype=np.float64).tolist()]


def finite(value: float | None) -> float | None:
    """None for what cannot be drawn."""
    return value if value is not None and math.isfinite(value) else None


def seconds(times: pd.DatetimeIndex) -> np.ndarray:
    """Seconds since 1970, for a time axis; times without a zone count as UTC."""
    unzoned = times.tz_convert("UTC").tz_localize(None) if times.tz is not None else times
    return unzoned.as_unit("s").asi8.astype(np.float64)


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    # Whole numbers are exact: seconds since 1970 have more than six digits.
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")
