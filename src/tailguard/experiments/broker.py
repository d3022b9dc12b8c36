"""Brokers: who carries out an agent's orders. One here fills on paper, with the accounting of the environments.

An order names target weights, and the broker sizes it: on paper the whole order is filled at the open after the decision, as in
:func:`tailguard.market.simulate`. A live adapter implements :class:`Broker`; ``ccxt_broker.py`` is one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import pandas as pd

from tailguard.evaluate.stats.series import Floats
from tailguard.io.journal import Journal
from tailguard.io.reading import refusing
from tailguard.market.accounting import bar_array, empty_accounts, kernel_rules
from tailguard.market.kernel import (
    BOUGHT,
    CARRY,
    CASH,
    EQUITY,
    FEE,
    NO_TRADE,
    PAID,
    PEAK,
    RECEIVED,
    SOLD,
    TRADE_FIELDS,
    UNITS,
    WORK_ROWS,
    trade_bar,
)
from tailguard.market.rules import TradingRules


class Order(NamedTuple):
    """An order: bring the account to these weights. It replaces what is left of the order before.

    :param number: counts from 1; a broker that has seen it ignores it.
    :param time: of the bar at whose close it was decided.
    :param weights: ``[assets]`` shares of equity, negative for short positions.
    """

    number: int
    time: pd.Timestamp
    weights: Floats


class Fill(NamedTuple):
    """A part of an order that was carried out.

    :param id: no other fill of the account has it.
    :param symbol: of the asset; empty where there is one without a name.
    :param units: bought, or sold where negative.
    :param price: average, slippage included.
    :param fee: paid.
    """

    id: str
    symbol: str
    units: float
    price: float
    fee: float


class Account(NamedTuple):
    """The account as the broker knows it.

    :param cash: in the money of the prices.
    :param units: ``[assets]`` held, negative where short.
    :param entries: ``[assets]`` average prices at which they were entered; 0 where nothing is held.
    """

    cash: float
    units: Floats
    entries: Floats


class Settlement(NamedTuple):
    """The events up to the close of a bar.

    :param fills: since the bar before. A broker may name fills again that it has named before: their ids tell.
    :param unfilled: ``[assets]`` units of the order that the market did not take.
    :param carry: interest, borrow and funding paid since the bar before, minus interest earned.
    :param account: after all of it.
    :param liquidated: True if the broker has closed the account.
    """

    fills: tuple[Fill, ...]
    unfilled: Floats
    carry: float
    account: Account
    liquidated: bool

    def record(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "fills": [list(fill) for fill in self.fills],
            "unfilled": self.unfilled.tolist(),
            "carry": self.carry,
            "cash": self.account.cash,
            "units": self.account.units.tolist(),
            "entries": self.account.entries.tolist(),
            "liquidated": self.liquidated,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Read what :meth:`record` returned."""
        account = Account(record["cash"], np.array(record["units"]), np.array(record["entries"]))
        fills = tuple(Fill(*fill) for fill in record["fills"])
        return cls(fills, np.array(record["unfilled"]), record["carry"], account, record["liquidated"])


class Broker(Protocol):
    """A broker: three methods, each of which may be called again after a crash without harm."""

    def account(self) -> Account:
        """Return the account as it is now."""
        ...

    def submit(self, order: Order) -> None:
        """Take an order in place of the one before; ignore one that was taken already."""
        ...

    def settle(self, bars: pd.DataFrame, row: int) -> Settlement:
        """Return what has happened up to the close of a bar.

        :param bars: all known.
        :param row: of the bar that has just closed, or of the one before once more.
        """
        ...


class Books:
    """The journal of a broker: orders and settled bars. After a crash it answers as before.

    :param path: of the journal.
    :param opening: what the account is; a journal of another one is refused.
    """

    def __init__(self, path: Path, opening: dict[str, Any]) -> None:
        self.journal = Journal(path)
        self.order: dict[str, Any] = {"number": 0}  # the last one
        self.waiting = False  # True if no bar was settled since then
        self.last: dict[str, Any] | None = None  # the last bar
        # The last two bars: after a crash the one before the last may be asked for again.
        self._settled: dict[pd.Timestamp, Settlement] = {}
        records = iter(self.journal)
        first = next(records, None)
        if first is None:
            self.journal.append({"kind": "open", **opening})
        elif first != {"kind": "open", **opening}:
            self.journal.close()
            raise ValueError(f"{path} is the account of other symbols or rules: name another --ledger")
        with refusing(path):
            for record in records:
                self._take(record)

    def add_order(self, number: int, **facts: Any) -> None:
        """Write an order down; it is on the disk when this returns."""
        record = {"kind": "order", "number": number, **facts}
        self.journal.append(record)
        self._take(record)

    def add_bar(self, time: pd.Timestamp, settlement: Settlement, sync: bool, **facts: Any) -> None:
        """Write a settled bar down.

        :param sync: see :meth:`tailguard.io.journal.Journal.append`.
        """
        record = {"kind": "bar", "time": time.isoformat(), **settlement.record(), **facts}
        self.journal.append(record, sync=sync)
        self._take(record)

    def settled(self, time: pd.Timestamp) -> Settlement | None:
        """Return what a bar was settled with; None if it was not yet.

        :raises ValueError: for a bar long before the last.
        """
        if self._settled and time < min(self._settled):
            raise ValueError(f"{self.journal.path} has settled bars after {time} already: it is the account of another ledger")
        return self._settled.get(time)

    def _take(self, record: dict[str, Any]) -> None:
        if record["kind"] == "order":
            self.order, self.waiting = record, True
            return
        self.last, self.waiting = record, False
        self._settled[pd.Timestamp(record["time"])] = Settlement.from_record(record)
        if len(self._settled) > 2:
            del self._settled[min(self._settled)]


class PaperBroker:
    """An account on paper, kept in a journal of its own as a broker would keep it on his side.

    :param path: of the journal.
    :param symbols: of the assets, in order.
    :param rules: costs, fills and limits, and the starting cash.
    :raises ValueError: if the journal belongs to another account, or for fills at a close that is past already.
    """

    def __init__(self, path: Path, symbols: Sequence[str], rules: TradingRules) -> None:
        if rules.fill == "close":
            raise ValueError(
                "trading.fill is close, but the close at which an order is decided is past: next_open can be traded"
            )
        self.symbols, self.rules = tuple(symbols), rules
        self.books = Books(path, {"symbols": list(symbols), "rules": rules.model_dump(mode="json")})
        self._row = empty_accounts(1, len(symbols))
        self._row[0, [CASH, EQUITY, PEAK]] = rules.cash
        if self.books.last is not None:
            self._row[0] = self.books.last["row"]
        self._bars: pd.DataFrame | None = None
        self._array: Floats = np.empty(0)

    def account(self) -> Account:
        """Return cash, units and entry prices."""
        assets = len(self.symbols)
        units, entries = self._row[0, UNITS : UNITS + assets].copy(), self._row[0, UNITS + assets :].copy()
        return Account(float(self._row[0, CASH]), units, entries)

    def submit(self, order: Order) -> None:
        """Take an order, for the bar that comes; it is on the disk when this returns."""
        if order.number > self.books.order["number"]:
            self.books.add_order(order.number, time=order.time.isoformat(), weights=order.weights.tolist())

    def settle(self, bars: pd.DataFrame, row: int) -> Settlement:
        """Trade the waiting order in a bar, and return its fills; a bar that was settled already is not traded twice."""
        time = bars.index[row]
        known = self.books.settled(time)
        if known is not None:
            return known
        if bars is not self._bars:
            self._bars, self._array = bars, bar_array(bars, self.rules)
        rules, before = kernel_rules(self.rules, len(self.symbols)), self._row.copy()
        liquidated, work = self._trade(self._row, row, rules)
        units = self._row[0, UNITS : UNITS + len(self.symbols)]
        unfilled = np.zeros(len(self.symbols))
        if self.rules.participation is not None and not liquidated:
            self._trade(before, row, rules._replace(participation=np.inf))
            unfilled = before[0, UNITS : UNITS + len(self.symbols)] - units
        carry = float(self._row[0, CARRY])
        settlement = Settlement(self._fills(work, row), unfilled, carry, self.account(), liquidated)
        # Not synced: it is made again from the order if a power cut loses it.
        self.books.add_bar(time, settlement, sync=False, row=self._row[0].tolist())
        return settlement

    def _trade(self, account: Floats, row: int, rules: Any) -> tuple[bool, Floats]:
        """Take an account through a bar; return whether it was liquidated, and the scratch space with its fills."""
        work = np.zeros((WORK_ROWS, len(self.symbols)))
        field = TRADE_FIELDS[self.rules.fill] if self.books.waiting else NO_TRADE
        weights = np.array(self.books.order["weights"] if self.books.waiting else [np.nan] * len(self.symbols))
        ruined = trade_bar(account, self._array, row, field, weights, rules, self.rules.cash, work)
        return bool(ruined), work

    def _fills(self, work: Floats, row: int) -> tuple[Fill, ...]:
        fills = []
        for a, symbol in enumerate(self.symbols):
            for side, traded, money in ((1.0, BOUGHT, PAID), (-1.0, SOLD, RECEIVED)):
                units, value = float(work[traded, a]), float(work[money, a])
                if units > 0.0:
                    fee = float(self._array[row, a, FEE]) * value
                    name = f"{self.books.order['number']}-{a}-{'buy' if side > 0.0 else 'sell'}"
                    fills.append(Fill(name, symbol, side * units, value / units, fee))
        return tuple(fills)
