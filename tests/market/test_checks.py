"""Findings about tables: regular breaks are no gaps, exchanges have calendars, timeframes are not mixed."""

import numpy as np
import pandas as pd
import pytest

from tailguard.market import DataError, DataWarning, check_bars, load_bars, load_dataset, random_walk
from tailguard.market.checks import sessions


def on(index):
    """A random walk at given times."""
    return random_walk(len(index), seed=0, volatility=0.001).set_axis(pd.DatetimeIndex(index).as_unit("ns").rename("time"))


def us_minutes(days, step="30min"):
    """Bars of the New York session of each day, in UTC."""
    parts = [pd.date_range(f"{day:%Y-%m-%d} 09:30", f"{day:%Y-%m-%d} 15:59", freq=step, tz="America/New_York") for day in days]
    return pd.DatetimeIndex(np.concatenate([part.tz_convert("UTC").tz_localize(None) for part in parts]))


def forex_hours():
    """Hours from Sunday 22:00 to Friday 21:00."""
    hours = pd.date_range("2020-01-05 22:00", "2020-03-27 20:00", freq="h")
    of_week = 24 * hours.day_of_week + hours.hour
    return hours[(of_week < 4 * 24 + 21) | (of_week >= 6 * 24 + 22)]


HOLIDAYS = pd.DatetimeIndex(["2020-01-20", "2020-02-17", "2020-04-10", "2020-05-25", "2020-07-03", "2020-09-07"])
WEEKDAYS = pd.bdate_range("2020-01-02", "2020-11-20").difference(HOLIDAYS)


@pytest.mark.parametrize(
    "index",
    [
        WEEKDAYS,
        pd.date_range("2020-01-01", periods=300, freq="D"),
        pd.date_range("2020-01-01", periods=2000, freq="h"),
        us_minutes(WEEKDAYS),
        forex_hours(),
        pd.date_range("2010-01-01", periods=200, freq="W-FRI"),
        pd.date_range("2010-01-31", periods=100, freq="ME"),
    ],
    ids=["daily", "daily, every day", "hourly, every hour", "New York, half hours", "forex, hourly", "weekly", "monthly"],
)  # fmt: skip
def test_a_good_table_has_no_findings(index):
    assert check_bars(on(index)) == []


@pytest.mark.parametrize("name", ["aapl-1d", "ibm-1d", "msft-1d", "nasdaq-1d"])
def test_the_one_long_closure_of_twenty_years_is_noted_and_a_calendar_knows_it(name):
    (finding,) = check_bars(load_dataset(name))
    assert finding.time == "2001-09-17 00:00:00"
    assert check_bars(load_dataset(name), calendar="XNYS") == []


@pytest.mark.parametrize(
    ("index", "dropped"),
    [
        (WEEKDAYS, slice(50, 56)),
        (pd.date_range("2020-01-01", periods=300, freq="D"), slice(50, 51)),
        (pd.date_range("2020-01-01", periods=2000, freq="h"), slice(50, 53)),
        (us_minutes(WEEKDAYS), slice(130, 134)),
    ],
    ids=["a week of days", "a day of every day", "hours of every hour", "an hour of a session"],
)
def test_a_real_gap_is_noted_with_its_end(index, dropped):
    kept = index.delete(range(dropped.start, dropped.stop))
    (finding,) = check_bars(on(kept))
    assert finding.level == "note"
    assert finding.row == dropped.start
    assert "1 gap longer than" in finding.reason


class TestCalendar:
    DAYS = sessions("XNYS", pd.Timestamp("2013-01-01"), pd.Timestamp("2013-12-31"))

    def test_sessions_are_those_of_the_exchange(self):
        assert len(self.DAYS) == 252
        assert pd.Timestamp("2013-07-04") not in self.DAYS
        assert check_bars(on(self.DAYS), calendar="XNYS") == []

    def test_a_missing_session_and_a_bar_on_a_holiday_are_told_apart(self):
        days = self.DAYS.delete(100).append(pd.DatetimeIndex(["2013-07-04"])).sort_values()
        missing, outside = check_bars(on(days), calendar="XNYS")
        assert missing.reason == f"1 of 252 sessions of XNYS have no bars, the first {self.DAYS[100]:%Y-%m-%d}"
        assert outside.time == "2013-07-04 00:00:00"
        assert check_bars(on(days)) == []  # nothing but a calendar knows

    def test_bars_missing_inside_a_session_are_noted(self):
        index = us_minutes(self.DAYS[:30])
        (finding,) = check_bars(on(index.delete(range(70, 74))), calendar="XNYS")
        assert "1 gap inside sessions" in finding.reason

    def test_an_unknown_calendar_is_refused(self):
        with pytest.raises(DataError, match="no calendar named 'NYSEE'; examples are XNYS"):
            check_bars(on(self.DAYS), calendar="NYSEE")


class TestTimeframes:
    def test_daily_bars_before_hourly_ones_are_warned_of(self):
        index = pd.date_range("2020-01-01", periods=100, freq="D").append(pd.date_range("2020-04-10", periods=300, freq="h"))
        findings = [finding for finding in check_bars(on(index)) if finding.level == "warning"]
        assert findings[0].reason.startswith("mixed timeframes: bars of 1 day and of 1 hour in one table")

    def test_minutes_without_trades_are_no_other_timeframe(self):
        minutes = pd.date_range("2020-01-01", periods=5000, freq="min")
        kept = minutes[np.random.default_rng(0).random(5000) < 0.3]
        assert not [finding for finding in check_bars(on(kept)) if finding.level == "warning"]

    def test_a_portfolio_of_different_timeframes_is_warned_of(self):
        hourly, daily = (
            on(pd.date_range("2020-01-01", periods=300, freq="h")),
            on(pd.date_range("2020-01-01", periods=30, freq="D")),
        )
        with pytest.warns(DataWarning, match="mixed timeframes: bars of 1 day in b and of 1 hour in a; a portfolio needs one"):
            load_bars({"a": hourly, "b": daily})
