"""Periods that returns are counted over: a number of bars, or weeks and months of the calendar.

A decision at the close of bar t is about bar t + 1 and those after it. So it belongs to the period in which the next bar is
expected, and the end of a month is known at the close of its last bar. Nothing here looks at later bars: the time of the next
bar and the number of bars to go are expected from the times so far, and agree with those of the same bars followed by others.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.validation import require

Ints = NDArray[np.int64]
Times = NDArray[Any]  # datetime64

# Bars that the usual time between bars is taken from; days without bars are those of as many bars, or of as many days if
# these have more.
RECENT_BARS, RECENT_DAYS = 250, 30
# Days of each weekday that their usual number of bars is taken from.
RECENT_WEEKS = 5
# Weekdays are taken to have bars until this many days have been seen.
ENOUGH_DAYS = 14
DAY = np.timedelta64(1, "D")
# Units of the calendar in months or in hours.
MONTHS = {"M": 1, "Q": 3, "Y": 12}
HOURS = {"H": 1, "D": 24, "W": 168}
# 1970-01-05 was a Monday, on which weeks begin.
MONDAY = np.datetime64("1970-01-05", "D")
FORM = re.compile(r"(\d{0,4})([HDWMQY])")


class PeriodRows(NamedTuple):
    """The periods of n bars, and of the decisions at their closes.

    :param own: ``[n]`` number of the period that each bar belongs to, rising.
    :param next: ``[n]`` number of the period in which the bar after it is expected.
    :param to_go: ``[n]`` bars that are expected from the next one to the end of its period, at least 1.
    """

    own: Ints
    next: Ints
    to_go: Ints

    @property
    def restarts(self) -> NDArray[np.bool_]:
        """``[n]``, true where the decision at the close is the first of a period: nothing has been earned in it yet."""
        return np.asarray(self.own != self.next)


class DecisionPeriods(NamedTuple):
    """The periods of the decisions at the closes of n bars. What a decision earns belongs to its period.

    :param number: ``[n]`` of the period in which the next bar is expected, never falling.
    :param left: ``[n]`` share of the period that is left, in (0, 1]; 1 at its first decision.
    :param begun: ``[n]`` row of the first decision of the period; -1 in a first period that the bars begin inside.
    """

    number: Ints
    left: NDArray[np.float64]
    begun: Ints


@dataclass(frozen=True)
class Period:
    """A number of bars, or of units of the calendar (UTC; weeks begin on Monday).

    :param count: of bars or units, at least 1.
    :param unit: ``H``, ``D``, ``W``, ``M``, ``Q`` or ``Y``; empty for bars.
    """

    count: int
    unit: str = ""

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Return the period that a setting stands for: a number of bars, or ``1W``, ``1M``, ``2W``, ``1Q``.

        :raises ValueError: if it is none.
        """
        legal = "a number of bars, at least 1, or a time such as 1D, 1W, 1M or 1Q"
        if isinstance(value, int) and not isinstance(value, bool):
            require(value >= 1, "period", value, legal)
            return cls(value)
        form = FORM.fullmatch(value.strip().upper()) if isinstance(value, str) else None
        if form is None:
            require(isinstance(value, str) and value.strip().isdigit() and int(value) >= 1, "period", value, legal)
            return cls(int(value))
        count = int(form[1] or 1)
        require(count >= 1, "period", value, legal)
        return cls(count, form[2])

    def __str__(self) -> str:
        """Return the form that :meth:`parse` reads."""
        return f"{self.count}{self.unit}"

    @property
    def words(self) -> str:
        """The period in words: ``21 bars``, ``month``, ``2 weeks``."""
        names = {"": "bar", "H": "hour", "D": "day", "W": "week", "M": "month", "Q": "quarter", "Y": "year"}
        name = names[self.unit]
        return name if self.count == 1 else f"{self.count} {name}s"

    def rows(self, times: pd.DatetimeIndex, first: int = 0) -> PeriodRows:
        """Return the periods of bars.

        :param times: of the bars, increasing; naive ones are taken as UTC.
        :param first: for a number of bars: row of the first bar of a period. The calendar needs none.
        """
        if not self.unit:
            since = np.arange(len(times), dtype=np.int64) - first
            return PeriodRows(since // self.count, (since + 1) // self.count, self.count - (since + 1) % self.count)
        naive = times.tz_convert("UTC").tz_localize(None) if times.tz is not None else times
        stamps = naive.as_unit("s").to_numpy().astype("datetime64[s]")
        calendar = _Calendar(stamps)
        expected = calendar.next_times()
        following = self._number(expected)
        own = self._number(stamps)
        # A bar may come in a later period than it was expected in, never in an earlier one than the bar before.
        following = np.maximum(following, own)
        return PeriodRows(own, following, calendar.bars_until(expected, self._start(following + 1)))

    def usual_bars(self, times: pd.DatetimeIndex) -> int:
        """Return the bars of a period, on average over bars at these times."""
        return self.count if not self.unit else max(round(len(times) / len(np.unique(self.rows(times).own))), 1)

    def decisions(self, times: pd.DatetimeIndex) -> DecisionPeriods:
        """Return the periods of the decisions at the closes of bars.

        A bar that comes later than expected still belongs to the period that the decision before it was about: nobody knew
        better when it was taken. So the periods of decisions differ a little from those of bars after a gap in the data.

        :param times: of the bars, increasing; naive ones are taken as UTC.
        """
        rows = self.rows(times)
        number = np.maximum.accumulate(rows.next)
        first = np.append(True, number[1:] != number[:-1])[: len(number)]
        begun = np.maximum.accumulate(np.where(first, np.arange(len(number)), 0))
        left = np.minimum(rows.to_go / rows.to_go[begun], 1.0)
        seen = rows.restarts[begun] | (begun > 0)
        return DecisionPeriods(number, left, np.where(seen, begun, -1))

    def _number(self, stamps: Times) -> Ints:
        """Return the number of the period that each time belongs to."""
        if self.unit in MONTHS:
            months = stamps.astype("datetime64[M]").astype(np.int64)
            return np.asarray(months // (MONTHS[self.unit] * self.count))
        hours = (stamps - MONDAY.astype("datetime64[s]")).astype("timedelta64[h]").astype(np.int64)
        return np.asarray(hours // (HOURS[self.unit] * self.count))

    def _start(self, numbers: Ints) -> Times:
        """Return the time at which each period begins."""
        if self.unit in MONTHS:
            months = (numbers * MONTHS[self.unit] * self.count).astype("datetime64[M]")
            return np.asarray(months.astype("datetime64[s]"))
        hours = (numbers * HOURS[self.unit] * self.count).astype("timedelta64[h]")
        return np.asarray(MONDAY.astype("datetime64[s]") + hours.astype("timedelta64[s]"))


class _Calendar:
    """The bars to expect after each of n bars, from the times up to it.

    :param stamps: ``[n]``, increasing, in seconds.
    """

    def __init__(self, stamps: Times) -> None:
        self.stamps, n = stamps, len(stamps)
        seconds = np.diff(stamps).astype(np.int64)
        usual = pd.Series(seconds).rolling(RECENT_BARS, min_periods=1).median().to_numpy()
        # The usual time between bars; of a first bar nothing is known, and a day is as good as anything.
        self.step = np.concatenate(([86400.0], usual)).astype("timedelta64[s]")
        self.days = days = stamps.astype("datetime64[D]")
        rows = np.arange(n)
        # Bars of minutes need more of them, for a few weeks to be seen.
        oldest = np.minimum(np.maximum(rows - RECENT_BARS + 1, 0), np.searchsorted(days, days - RECENT_DAYS * DAY))
        # [n, 7], true for weekdays that have had bars recently, and for all of them until enough days have been seen.
        seen = np.cumsum(_weekday(days)[:, None] == np.arange(7), axis=0)
        before = np.where(oldest[:, None] > 0, seen[np.maximum(oldest - 1, 0)], 0)
        span = (days - days[oldest]).astype(np.int64) + 1
        self.active = (seen > before) | (span < ENOUGH_DAYS)[:, None]
        new_day = np.append(True, days[1:] != days[:-1])[:n]
        today = np.maximum.accumulate(np.where(new_day, rows, 0))  # row of the first bar of the same day
        self.in_day = rows - today + 1  # bars of the same day so far
        self.first_day = today == 0
        self.per_day = self._bars_per_weekday(new_day)
        # Share of those weekdays that did have bars: holidays make it a little less than 1.
        day = np.cumsum(new_day)
        possible = self._on_active_days(self.active.astype(np.float64), days[oldest], days)
        self.open = np.where(possible > 0.0, np.minimum((day - day[oldest]) / np.maximum(possible, 1.0), 1.0), 1.0)

    def _bars_per_weekday(self, new_day: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the bars ``[n, 7]`` of a usual day with bars, by weekday, as known on the day of each bar.

        That is the median of the last few such days; of a weekday without bars so far, that of all days, and on the first
        day the bars so far.
        """
        begins = np.flatnonzero(new_day)
        counts, weekday = np.diff(begins).astype(np.float64), _weekday(self.days[begins[:-1]])
        usual = np.full((len(begins), 7), np.nan)  # before each day
        for k in range(7):
            own = np.flatnonzero(weekday == k)
            usual[own + 1, k] = pd.Series(counts[own]).rolling(RECENT_WEEKS, min_periods=1).median().to_numpy()
        overall = np.append(np.nan, pd.Series(counts).rolling(7 * RECENT_WEEKS, min_periods=1).median().to_numpy())
        usual = pd.DataFrame(usual).ffill().to_numpy()
        usual = np.where(np.isnan(usual), overall[: len(usual), None], usual)
        by_row = usual[np.cumsum(new_day) - 1]
        return np.asarray(np.where(np.isnan(by_row), self.in_day[:, None], by_row))

    def _of_day(self, days: Times) -> NDArray[np.float64]:
        """Return the bars ``[n]`` that a day of each row is expected to have."""
        return np.asarray(self.per_day[np.arange(len(days)), _weekday(days)])

    def next_times(self) -> Times:
        """Return the time at which the bar after each is expected: nights and days without bars are skipped."""
        expected = self.stamps + self.step
        tomorrow = (self.days + DAY).astype("datetime64[s]")
        over = (self.in_day >= np.rint(self._of_day(self.days))) & ~self.first_day
        expected = np.where(over, np.maximum(expected, tomorrow), expected)
        rows = np.arange(len(expected))
        for _ in range(6):
            has_bars = self.active[rows, _weekday(expected.astype("datetime64[D]"))]
            expected = np.where(has_bars, expected, expected + DAY)
        return np.asarray(expected)

    def bars_until(self, expected: Times, end: Times) -> Ints:
        """Return the number of bars that are expected from the next one, at `expected`, to a time after it."""
        day = expected.astype("datetime64[D]")
        tonight = np.minimum((day + DAY).astype("datetime64[s]"), end)
        rest_of_day = np.ceil((tonight - expected).astype(np.float64) / self.step.astype(np.float64)) - 1.0
        # Days with opening hours end before midnight.
        so_far = np.where(day == self.days, self.in_day + 1, 1)
        rest_of_day = np.clip(rest_of_day, 0.0, np.maximum(self._of_day(day) - so_far, 0.0))
        later = self._on_active_days(np.where(self.active, self.per_day, 0.0), day + DAY, end.astype("datetime64[D]"))
        return np.asarray(1 + np.rint(rest_of_day + self.open * later), np.int64)

    def _on_active_days(self, by_weekday: NDArray[np.float64], start: Times, end: Times) -> NDArray[np.float64]:
        """Add up what each weekday counts for ``[n, 7]`` over the days from `start` to before `end`."""
        days = np.maximum((end - start).astype(np.int64), 0)
        later = (_weekday(start)[:, None] + np.arange(7)) % 7
        in_rest = np.arange(7) < (days % 7)[:, None]
        rest = np.where(in_rest, np.take_along_axis(by_weekday, later, axis=1), 0.0)
        return np.asarray(days // 7 * by_weekday.sum(axis=1) + rest.sum(axis=1))


def _weekday(days: Times) -> Ints:
    """Return the weekdays of days, 0 for Monday."""
    return np.asarray((days - MONDAY).astype(np.int64) % 7)
