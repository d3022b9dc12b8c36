"""The history of an account: the calendar of monthly returns, the worst drawdowns with their dates, and the list of trades."""

import io
from typing import NamedTuple

import numpy as np
import pandas as pd

from tailguard.evaluate import statistics
from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.formatting import day, moment, say, signed
from tailguard.evaluate.report.page import Block, Html, ReportSection, Tabs, table, tag
from tailguard.evaluate.stats.series import Floats

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
DRAWDOWNS = 5
MOST_TRADES = 20  # listed in the page; the file has all


def calendar_section(evaluation: Evaluation) -> ReportSection:
    """Show the returns of every month and year, and the worst drawdowns with their dates."""
    falls = worst_drawdowns(evaluation.agent.times, evaluation.agent.equity)
    months = monthly_returns(evaluation.agent.times, evaluation.agent.returns)
    values = months.to_numpy(dtype=np.float64)
    known = values[np.isfinite(values)]
    headline = (
        f"{int((known > 0.0).sum())} of {len(known)} months gained; the best {signed(known.max(), 'percent')}, the worst "
    )
    headline += signed(known.min(), "percent")
    panes: dict[str, list[Block]] = {"Monthly returns": [_calendar(evaluation.subject, months)]}
    if falls:
        panes["Worst drawdowns"] = [_drawdowns(falls)]
    lead = "The first and the last month may be incomplete."
    return ReportSection("calendar", "Calendar", headline, lead, [Tabs("calendar-tabs", "History", panes)])


def monthly_returns(times: pd.DatetimeIndex, returns: Floats) -> pd.DataFrame:
    """Return the compounded return of every calendar month, a row per year and a column per month from 1; NaN without bars.

    :param times: ``[n]`` at which the returns were earned.
    :param returns: ``[n]``.
    """
    growth = pd.Series(np.log1p(returns)).groupby([times.year.to_numpy(), times.month.to_numpy()]).sum()
    table = growth.unstack().reindex(columns=range(1, 13)).map(np.expm1)
    return table.reindex(range(int(times[0].year), int(times[-1].year) + 1))


class Drawdown(NamedTuple):
    """A fall of the equity from a peak, until the peak is reached again.

    :param depth: as a positive share of the peak.
    :param peak: time of the peak.
    :param low: time of the lowest equity.
    :param recovered: time at which the peak was reached again; None if it never was.
    :param bars: from the peak to the recovery, or to the end.
    """

    depth: float
    peak: pd.Timestamp
    low: pd.Timestamp
    recovered: pd.Timestamp | None
    bars: int


def worst_drawdowns(times: pd.DatetimeIndex, equity: Floats) -> list[Drawdown]:
    """Return the deepest drawdowns, the deepest first.

    :param times: ``[n]`` of the bars.
    :param equity: ``[n + 1]``, from the start on, which counts as the time of the first bar.
    """
    depth = statistics.drawdowns(equity)
    below = np.concatenate([[False], depth[1:] > 0.0, [False]])
    edges = np.flatnonzero(np.diff(below.astype(np.int8)))
    found = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):  # the peak, and the last bar below it
        low = first + 1 + int(depth[first + 1 : last + 1].argmax())
        recovered = times[last] if last + 1 < len(equity) else None
        bars = int(min(last + 1, len(equity) - 1) - first)
        found.append(Drawdown(float(depth[low]), times[max(first - 1, 0)], times[low - 1], recovered, bars))
    return sorted(found, key=lambda fall: -fall.depth)[:DRAWDOWNS]


def _calendar(who: str, months: pd.DataFrame) -> Html:
    rows = []
    for year, row in months.iterrows():
        values = row.to_numpy(dtype=np.float64)
        whole = float(np.prod(1.0 + np.nan_to_num(values)) - 1.0)
        rows.append([str(year), *(_percent(value) for value in (whole, *values))])
    block = table(["", "year", *MONTHS], rows, f"Returns of the {who} by calendar year and month, in percent.")
    return tag("div", block, class_="calendar")


def _percent(value: float) -> str:
    """Return a share in percent without the sign of percent, which a narrow column has no space for."""
    return "" if np.isnan(value) else say(100.0 * value, "tenth")


def _drawdowns(falls: list[Drawdown]) -> Html:
    rows = [
        [
            say(fall.depth, "percent"),
            day(fall.peak),
            day(fall.low),
            "not yet" if fall.recovered is None else day(fall.recovered),
            say(fall.bars, "count"),
        ]
        for fall in falls
    ]
    return table(["depth", "from", "lowest", "recovered", "bars"], rows, "The deepest drawdowns.", numbers_from=4)


def trades_section(evaluation: Evaluation) -> ReportSection | None:
    """Show the round trips of the account; None where they are not known."""
    trades = evaluation.trades
    if trades is None or not len(trades):
        return None
    net = trades["gain"] - trades["cost"]
    won = float((net > 0.0).mean())
    count = "1 trade" if len(trades) == 1 else f"{len(trades):,} trades"
    headline = (
        f"{count}, {say(won, 'percent')} of them with a gain, held for {say(float(trades['bars'].mean()))} bars on average"
    )
    lead = (
        "A trade lasts from flat to flat, or to the other side. Gains are before costs; both are shares of the starting value. "
    )
    lead += "Interest and funding are left out."
    order = net.sort_values().index
    shown = [order[: MOST_TRADES // 2], order[::-1][: MOST_TRADES // 2]] if len(trades) > MOST_TRADES else [order]
    titles = ["Worst", "Best"] if len(shown) > 1 else ["All"]
    panes: dict[str, list[Block]] = {
        title: [_trades(trades.loc[rows], f"{title} trades by gain after costs; the file has all of them.")]
        for title, rows in zip(titles, shown, strict=True)
    }
    return ReportSection("trades", "Trades", headline, lead, [Tabs("trades-tabs", "Trades", panes)])


def trades_csv(trades: pd.DataFrame) -> str:
    """Return the trades as CSV."""
    file = io.StringIO()
    trades.to_csv(file, index=False, lineterminator="\n")
    return file.getvalue()


def _trades(trades: pd.DataFrame, caption: str) -> Html:
    rows = [
        [
            str(trade["symbol"]),
            str(trade["side"]),
            moment(trade["entry"]),
            "open" if pd.isna(trade["exit"]) else moment(trade["exit"]),
            say(float(trade["bars"]), "count"),
            signed(float(trade["gain"]), "percent"),
            say(float(trade["cost"]), "percent"),
            signed(float(trade["gain"] - trade["cost"]), "percent"),
        ]
        for trade in trades.to_dict("records")
    ]
    head = ["symbol", "side", "entry", "exit", "bars", "gain", "cost", "after costs"]
    return table(head, rows, caption, numbers_from=4)
