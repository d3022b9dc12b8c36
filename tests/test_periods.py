"""Periods against the calendar that the times themselves show, and without a look at later bars."""

import numpy as np
import pandas as pd
import pytest

from tailguard.periods import Period


def weekdays(n: int, start: str = "2019-01-01") -> pd.DatetimeIndex:
    return pd.bdate_range(start, periods=n, tz="UTC")


def true_bars_to_go(own: np.ndarray) -> np.ndarray:
    """Count the bars of the period of the next bar, from it on."""
    n = len(own)
    return np.array([np.sum(own[t + 1 :] == own[t + 1]) for t in range(n - 1)])


@pytest.mark.parametrize(
    ("text", "words"), [("1M", "month"), ("M", "month"), ("2w", "2 weeks"), (21, "21 bars"), ("5", "5 bars")]
)
def test_settings_are_read(text: object, words: str) -> None:
    assert Period.parse(text).words == words
    assert Period.parse(str(Period.parse(text))) == Period.parse(text)


@pytest.mark.parametrize("value", [0, -1, "0M", "month", "1X", 2.5, True, None, "", "1.5W"])
def test_impossible_periods_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="period is"):
        Period.parse(value)


def test_a_number_of_bars_counts_from_its_first_row() -> None:
    rows = Period.parse(3).rows(weekdays(7), first=1)
    np.testing.assert_array_equal(rows.own, [-1, 0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(rows.restarts, [True, False, False, True, False, False, True])
    np.testing.assert_array_equal(rows.to_go, [3, 2, 1, 3, 2, 1, 3])


@pytest.mark.parametrize("unit", ["1W", "1M", "1Q", "2W"])
@pytest.mark.parametrize(
    "times",
    [
        weekdays(900),
        pd.date_range("2019-01-01", periods=900, freq="D", tz="UTC"),
        pd.date_range("2019-01-01", periods=3000, freq="h"),
        pd.date_range("2019-01-01", periods=3000, freq="4h", tz="America/New_York"),
    ],
    ids=["weekdays", "every day", "hours", "four hours"],
)
def test_the_calendar_is_known_where_no_holiday_disturbs_it(unit: str, times: pd.DatetimeIndex) -> None:
    rows = Period.parse(unit).rows(times)
    assert np.all(np.diff(rows.own) >= 0)
    settled = slice(300, -1)  # time enough to learn the days without bars
    np.testing.assert_array_equal(rows.next[:-1][300:], rows.own[1:][300:])
    last = rows.own[-1]
    complete = rows.next[settled] < last
    np.testing.assert_array_equal(rows.to_go[settled][complete], true_bars_to_go(rows.own)[300:][complete])


def fx_hours(weeks: int) -> pd.DatetimeIndex:
    """Return the hours from Sunday 22:00 to Friday 22:00."""
    times = pd.date_range("2020-01-05 22:00", periods=168 * weeks, freq="h")
    hour, day = times.hour, times.day_of_week
    return times[~((day == 5) | ((day == 4) & (hour >= 22)) | ((day == 6) & (hour < 22)))]


def session_minutes(days: int) -> pd.DatetimeIndex:
    """Return the minutes of sessions of six and a half hours."""
    opens = pd.bdate_range("2024-01-01", periods=days) + pd.Timedelta(minutes=870)
    return pd.DatetimeIndex(np.add.outer(opens.to_numpy(), pd.to_timedelta(np.arange(390), "min").to_numpy()).ravel())


@pytest.mark.parametrize("unit", ["1D", "1W", "1M"])
@pytest.mark.parametrize(
    "times",
    [fx_hours(40), pd.date_range("2024-01-01", periods=1440 * 40, freq="min"), session_minutes(50)],
    ids=["hours of FX", "all minutes", "minutes of sessions"],
)
def test_days_of_many_or_unequal_bars_end_once(unit: str, times: pd.DatetimeIndex) -> None:
    """A Sunday of two hours, and days that are longer than the bars that are looked back at."""
    rows = Period.parse(unit).rows(times)
    settled = slice(int(np.searchsorted(times, times[0] + pd.Timedelta(days=22))), -1)
    np.testing.assert_array_equal(rows.next[:-1][settled], rows.own[1:][settled])
    complete = rows.next[settled] < rows.own[-1]
    np.testing.assert_array_equal(rows.to_go[settled][complete], true_bars_to_go(rows.own)[settled][complete[:-1]])


def test_months_begin_on_their_first_day() -> None:
    times = weekdays(600)
    rows = Period.parse("1M").rows(times)
    months = times.tz_convert(None).to_period("M")
    np.testing.assert_array_equal(np.diff(rows.own) > 0, (months[1:] != months[:-1]))


def test_opening_hours_and_holidays_cost_little_precision() -> None:
    days = weekdays(400)
    open_days = days[np.random.default_rng(0).random(len(days)) > 0.03]
    times = pd.DatetimeIndex([day + pd.Timedelta(hours=14 + hour) for day in open_days for hour in range(7)])
    rows = Period.parse("1M").rows(times)
    right = rows.next[:-1] == rows.own[1:]  # not on the eve of a month that begins with, or ends in, a holiday
    assert np.mean(right[500:]) > 0.99
    wrong_by = (rows.to_go[:-1] - true_bars_to_go(rows.own))[500:-200][right[500:-200]]
    assert np.abs(wrong_by).max() <= 28  # holidays of one month
    assert np.abs(np.mean(wrong_by)) < 3.0


@pytest.mark.parametrize("unit", [5, "1W", "1M"])
def test_later_bars_change_nothing(unit: object) -> None:
    rng = np.random.default_rng(1)
    times = weekdays(700)[np.sort(rng.choice(700, 600, replace=False))]
    whole = Period.parse(unit).rows(times)
    for n in (1, 2, 10, 250, 251, 599):
        for known, part in zip(whole, Period.parse(unit).rows(times[:n]), strict=True):
            np.testing.assert_array_equal(known[:n], part)
