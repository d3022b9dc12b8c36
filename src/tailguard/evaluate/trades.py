"""Round trips of an account: from flat to flat, or to the other side, with gain and cost of each."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.evaluate.stats.series import Floats

TRADE_COLUMNS = ("symbol", "side", "entry", "exit", "bars", "gain", "cost")
FLAT = 1e-12  # share of the starting cash below which a position is rounding


class Fills(NamedTuple):
    """The positions and payments of an account, row by row; ``[T, A]`` but for the costs.

    :param units: held after any trade of the row.
    :param marks: closes, the last known one where a bar is missing.
    :param fills: prices at which the trades of the row were made.
    :param costs: ``[T]`` fees and slippage of the row, in money.
    :param cash: that the account started with.
    """

    units: Floats
    marks: Floats
    fills: Floats
    costs: Floats
    cash: float


def round_trips(times: pd.DatetimeIndex, symbols: list[str], account: Fills) -> pd.DataFrame:
    """Return one row per round trip, in the order of their entries.

    Gains are before costs and, as costs, shares of the starting cash: summed up they are the gain of the account, but for
    interest and funding.

    :param times: ``[T]`` of the rows.
    :param symbols: ``[A]``.
    :param account: what was held and paid.
    :return: the columns `symbol`, `side` (long or short), `entry`, `exit` (times; NaT while it is open), `bars` (held),
        `gain` and `cost`.
    """
    units = np.where(np.abs(account.units * account.marks) > FLAT * account.cash, account.units, 0.0)
    before = np.concatenate([np.zeros((1, units.shape[1])), units[:-1]])
    traded = np.abs(units - before) * account.fills
    total = traded.sum(axis=1, keepdims=True)
    costs = account.costs[:, None] * np.divide(traded, total, out=np.zeros_like(traded), where=total > 0.0)
    rows: list[dict[str, Any]] = []
    for a, symbol in enumerate(symbols):
        rows += _trips(symbol, times, units[:, a], account.marks[:, a], account.fills[:, a], costs[:, a], account.cash)
    table = pd.DataFrame(rows, columns=list(TRADE_COLUMNS))
    return table.sort_values("entry", kind="stable", ignore_index=True)


def _trips(
    symbol: str, times: pd.DatetimeIndex, units: Floats, marks: Floats, fills: Floats, costs: Floats, cash: float
) -> list[dict[str, Any]]:
    n = len(units)
    held_before = np.concatenate([[0.0], units[:-1]])
    last_marks = np.concatenate([marks[:1], marks[:-1]])
    carried = _sums(held_before * (fills - last_marks))  # from the last close to the fill, by what was held
    earned = _sums(units * (marks - fills))  # from the fill to the close, by what is held now
    paid = _sums(costs)
    opens, closes = _edges(units)
    rows = []
    for first, last in zip(opens, closes, strict=True):
        end = min(last, n - 1)
        gain = earned[last] - earned[first] + carried[end + 1] - carried[first + 1]
        # A trade through zero pays for the end of one trip and for the start of the next, in proportion.
        cost = paid[last] - paid[first] - costs[first] * _share(held_before[first], units[first])
        cost += costs[last] * _share(held_before[last], units[last]) if last < n else 0.0
        rows.append(
            {
                "symbol": symbol,
                "side": "long" if units[first] > 0.0 else "short",
                "entry": times[first],
                "exit": times[last] if last < n else pd.NaT,
                "bars": last - first,
                "gain": gain / cash,
                "cost": cost / cash,
            }
        )
    return rows


def _edges(units: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows where trips begin, and the rows where they end; the number of rows for one that is open."""
    sides = np.sign(units)
    changes = np.flatnonzero(np.diff(sides, prepend=0.0) != 0.0)
    ends = np.append(changes[1:], len(units))
    inside = sides[changes] != 0.0
    return changes[inside], ends[inside]


def _share(before: float, after: float) -> float:
    """Return the share of a trade that ends what was held before: all of it unless it goes through zero or begins there."""
    if before * after > 0.0 or before == 0.0:
        return 0.0
    return abs(before) / (abs(before) + abs(after))


def _sums(values: Floats) -> Floats:
    """Return running sums that begin with 0, ``[T + 1]``."""
    return np.concatenate([[0.0], np.cumsum(values)])
