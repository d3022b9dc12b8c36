"""Charts as data: marks on panels under one title, downsampled to what a screen can show. ``assets/`` draws them.

A title states what is to be seen; a summary states it, with numbers, for readers who cannot see it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from tailguard.evaluate.record import AccountHistory, Estimate, Evaluation
from tailguard.evaluate.report.formatting import NumberFormat, readable, with_interval
from tailguard.evaluate.stats.series import Floats
from tailguard.validation import require

Color = Literal["agent", "market", "third", "fourth", "other", "seed"]
Json = dict[str, Any]
DIGITS = 6
BUCKETS = 600  # up to twice as many points are drawn: one per pixel of a chart, and some for zooming
LOG_FROM = 3.0  # a range beyond this factor is drawn on a logarithmic axis
OWN_MIX = "own_mix"  # the baseline that separates timing from exposure


@dataclass(frozen=True)
class Axis:
    """A scale.

    :param format: of the numbers.
    :param kind: of the scale; ``time`` takes seconds since 1970.
    :param label: text below the axis.
    :param tip: text before the number at the cursor.
    :param include: values that the axis must contain.
    :param tight: True leaves no margin beyond 0.
    """

    format: NumberFormat = "number"
    kind: Literal["linear", "log", "time"] = "linear"
    label: str = ""
    tip: str = ""
    include: tuple[float, ...] = ()
    tight: bool = False

    def data(self) -> Json:
        """Return the data for the page."""
        known = {"format": self.format, "kind": self.kind, "label": self.label, "tip": self.tip, "include": list(self.include)}
        return known | {"log": self.kind == "log", "tight": self.tight}


TIME = Axis(kind="time")


@dataclass(frozen=True)
class Mark:
    """A drawn shape: a line, an area, a band, bars, dots or links.

    :param type: of the shape.
    :param x: horizontal coordinates; bars take the n + 1 edges of their n bins.
    :param columns: numbers by name: ``y``, or ``low`` and ``high`` of a band, or ``from`` and ``to`` of links.
    :param name: in the legend and at the cursor; a mark without a name is background.
    :param color: role of the mark.
    :param label: True writes the name at the end of the line where there is space.
    :param options: ``dash``, ``thin``, ``step``, ``hollow``, ``size``, ``keep`` (never faded), ``legend``
        (False leaves it out).
    """

    type: Literal["line", "area", "band", "bars", "dots", "links"]
    x: ArrayLike
    columns: Mapping[str, ArrayLike]
    name: str = ""
    color: Color = "agent"
    label: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def data(self) -> Json:
        """Return the data for the page."""
        known: Json = {"type": self.type, "x": numbers(self.x), "name": self.name, "color": self.color, "label": self.label}
        return known | {key: numbers(values) for key, values in self.columns.items()} | self.options


@dataclass(frozen=True)
class Rule:
    """A labelled reference line, vertical at `x` or horizontal at `y`."""

    label: str
    x: float | None = None
    y: float | None = None

    def data(self) -> Json:
        """Return the data for the page."""
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
    :param hide_x: True leaves the horizontal axis to the panel below.
    """

    title: str
    marks: Sequence[Mark]
    x: Axis
    y: Axis
    height: int = 300
    rules: Sequence[Rule] = ()
    hide_x: bool = False

    def data(self) -> Json:
        """Return the data for the page."""
        drawn = {"marks": [mark.data() for mark in self.marks], "rules": [rule.data() for rule in self.rules]}
        axes = {"x": self.x.data(), "y": self.y.data(), "hideX": self.hide_x}
        return {"title": self.title, "height": self.height} | axes | drawn


@dataclass(frozen=True)
class Dot:
    """A further value in a row."""

    name: str
    value: float
    color: Color
    hollow: bool = False


@dataclass(frozen=True)
class ChartRow:
    """A value with its interval, and further values beside it.

    :param name: of the row.
    :param text: the numbers as text, at the end of the row.
    :param value: None where there are only dots.
    :param low: lower end of the interval; None without one.
    :param high: upper end of the interval; None without one.
    :param color: role of the value.
    :param dots: further values.
    :param label: name of the value at the cursor.
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
class RowPanel:
    """A panel of rows.

    :param title: what is measured, with its unit.
    :param rows: from top to bottom.
    :param format: of the numbers.
    :param include: values that must be on the axis.
    :param rules: vertical reference lines.
    """

    title: str
    rows: Sequence[ChartRow]
    format: NumberFormat = "number"
    include: tuple[float, ...] = (0.0,)
    rules: Sequence[Rule] = ()

    def data(self) -> Json:
        """Return the data for the page, without values that are not finite."""
        shown = [
            {
                "name": row.name,
                "text": row.text,
                "value": finite_or_none(row.value),
                "low": finite_or_none(row.low),
                "high": finite_or_none(row.high),
                "color": row.color,
                "label": row.label,
                "dots": [vars(dot) for dot in row.dots if math.isfinite(dot.value)],
            }
            for row in self.rows
        ]
        key = {dot.name.split(",")[0]: dot for row in self.rows for dot in row.dots}
        values = {row.label: row for row in self.rows if row.value is not None and row.dots}
        legend: list[Json] = [{"type": "dot", "name": name, "color": row.color} for name, row in values.items()]
        legend += [{"type": "dot", "name": name, "color": dot.color, "hollow": dot.hollow} for name, dot in key.items()]
        rules = [rule.data() for rule in self.rules]
        head = {"title": self.title, "format": self.format, "include": list(self.include), "rules": rules}
        return head | {"rows": shown, "key": legend}


@dataclass(frozen=True)
class Chart:
    """Panels under one title.

    :param id: unique on the page.
    :param title: the finding, as a sentence.
    :param summary: the finding with numbers, for readers who cannot see the chart.
    :param panels: at least one.
    :param note: how it was made and how to read it.
    :param columns: 1 stacks the panels, more sets them side by side where they fit.
    :param shared: True shows one cursor in all panels.
    :param choose: True lets a click in the legend highlight a series.
    """

    id: str
    title: str
    summary: str
    panels: Sequence[Panel | RowPanel]
    note: str = ""
    columns: int = 1
    shared: bool = False
    choose: bool = False

    def data(self) -> Json:
        """Return the data for the page."""
        drawn = {"title": self.title, "summary": self.summary, "panels": [panel.data() for panel in self.panels]}
        return drawn | {"columns": self.columns, "shared": self.shared, "choose": self.choose}


def estimate_row(name: str, estimate: Estimate, kind: NumberFormat, color: Color, label: str) -> ChartRow:
    """Return the row of a statistic with its interval."""
    return ChartRow(name, with_interval(estimate, kind), estimate.value, estimate.low, estimate.high, color, label=label)


def numbers(values: ArrayLike) -> list[float | int | None]:
    """Return numbers for JSON: six digits, whole numbers without a point, None for what is not finite."""
    return [_short(value) for value in np.asarray(values, dtype=np.float64).tolist()]


def finite_or_none(value: float | None) -> float | None:
    """Return the value, None if it is not finite and cannot be drawn."""
    return value if value is not None and math.isfinite(value) else None


def seconds(times: pd.DatetimeIndex) -> np.ndarray:
    """Return seconds since 1970, for a time axis; times without a zone count as UTC."""
    unzoned = times.tz_convert("UTC").tz_localize(None) if times.tz is not None else times
    return unzoned.as_unit("s").asi8.astype(np.float64)


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    # Whole numbers are exact: seconds since 1970 have more than six digits.
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")


def downsample(values: Floats, buckets: int = BUCKETS) -> NDArray[np.int64]:
    """Return the positions to draw, in order: the first, the last, and the lowest and highest of each bucket.

    :param values: ``[n]``; NaN is never the lowest or highest.
    :param buckets: windows of about equal length, at least 1.
    """
    require(buckets >= 1, "buckets", buckets, "at least 1")
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n)
    edges = np.linspace(0, n, buckets + 1).astype(np.int64)
    starts, widths = edges[:-1], np.diff(edges)
    # Buckets differ by one in length: the shorter ones repeat their last entry to make a rectangle.
    inside = starts[:, None] + np.minimum(np.arange(widths.max()), widths[:, None] - 1)
    block = values[inside]
    lows = np.where(np.isnan(block), np.inf, block).argmin(axis=1)
    highs = np.where(np.isnan(block), -np.inf, block).argmax(axis=1)
    rows = np.arange(buckets)
    return np.unique(np.concatenate([[0, n - 1], inside[rows, lows], inside[rows, highs]]))


def envelope(values: Floats, buckets: int = BUCKETS) -> tuple[NDArray[np.int64], Floats, Floats, Floats]:
    """Return the middle position, mean, lowest and highest of each bucket, for series that jump, such as positions.

    :param values: ``[n]``, finite.
    :param buckets: their number; at most as many as there are values are used.
    """
    require(buckets >= 1, "buckets", buckets, "at least 1")
    edges = np.linspace(0, len(values), min(buckets, len(values)) + 1).astype(np.int64)
    starts = edges[:-1]
    means = np.add.reduceat(values, starts) / np.diff(edges)
    return (starts + edges[1:] - 1) // 2, means, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def color_of(evaluation: Evaluation, name: str) -> Color:
    """Return the color of an account: few colors, each with one meaning on the whole page."""
    if name == evaluation.agent.name:
        return "agent"
    if name == evaluation.market:
        return "market"
    if name == OWN_MIX:
        return "third"
    return "seed" if name in {history.name for history in evaluation.seeds} else "other"


def title_of(name: str) -> str:
    """Return the name of a baseline or a seed for people; the record's name with spaces, the same everywhere."""
    return readable(name)


def account_name(evaluation: Evaluation, name: str) -> str:
    """Return the name of any account for people; the one that was evaluated is called an agent or a strategy."""
    return evaluation.subject if name == evaluation.agent.name else title_of(name)


def account_line(evaluation: Evaluation, history: AccountHistory, values: Floats) -> Mark:
    """Return the line of a series with one number per bar of an account, downsampled.

    :param values: ``[n]``, or ``[n + 1]`` with the start, which is drawn at the first time.
    """
    color = color_of(evaluation, history.name)
    values = values[-len(history.times) :]
    at = downsample(values)
    options = {"keep": True} if color == "agent" else {"thin": True} if color in ("other", "seed") else {}
    shown = color in ("agent", "market", "third")
    name = account_name(evaluation, history.name)
    return Mark("line", seconds(history.times)[at], {"y": values[at]}, name, color, shown, options)


def value_axis(lines: list[Mark]) -> Axis:
    """Return an axis for multiples of the starting equity, logarithmic where they differ by much."""
    reach = np.concatenate([np.asarray(line.columns["y"], dtype=np.float64) for line in lines])
    wide = float(reach.max() / reach.min()) > LOG_FROM
    return Axis("multiple", "log" if wide else "linear", include=(1.0,))


def drawing_order(evaluation: Evaluation, histories: list[AccountHistory]) -> list[AccountHistory]:
    """Return the accounts in drawing order: the background first, the agent last."""
    order = ("other", "seed", "third", "market", "agent")
    return sorted(histories, key=lambda history: order.index(color_of(evaluation, history.name)))
