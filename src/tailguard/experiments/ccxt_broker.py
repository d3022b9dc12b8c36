"""A live broker: spot accounts of the exchanges that ccxt knows (the extra ``tailguard[ccxt]``).

The account must be the agent's own: every trade in its symbols counts as the agent's. Orders are market orders in whole steps
of the exchange, sales first. Each has a client order id made of the order's number, so that one that the exchange has is not
sent again after a crash. Fees in a third currency (exchange tokens) are not seen.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from tailguard.evaluate.stats.series import Floats
from tailguard.experiments.broker import Account, Books, Fill, Order, Settlement

# Client order ids begin with it. Exchanges allow letters and digits, 32 and more of them.
PREFIX = "tailguard"


class CcxtBroker:
    """A spot account at an exchange.

    :param exchange: of ccxt, with credentials; its markets are loaded here.
    :param symbols: of the exchange, such as ``BTC/USDT``, all against the same currency, in the order of the bars.
    :param path: of the journal.
    :param max_age: orders whose bar began longer ago are not sent: after a standstill the bars in between are over. Usually a
        little more than the length of a bar.
    """

    def __init__(self, exchange: Any, symbols: Sequence[str], path: Path, *, max_age: pd.Timedelta) -> None:
        self.exchange, self.symbols, self.max_age = exchange, tuple(symbols), max_age
        markets = exchange.load_markets()
        unknown = [symbol for symbol in symbols if symbol not in markets]
        if unknown:
            raise ValueError(f"{exchange.id} has no market {unknown[0]}")
        self.markets = [markets[symbol] for symbol in symbols]
        self.quote: str = self.markets[0]["quote"]
        if any(market["quote"] != self.quote or not market["spot"] for market in self.markets):
            raise ValueError(f"{', '.join(symbols)} must be spot markets against the same currency")
        self.books = Books(path, {"exchange": exchange.id, "symbols": list(symbols)})

    @classmethod
    def connect(
        cls, name: str, symbols: Sequence[str], path: Path, *, max_age: pd.Timedelta, sandbox: bool = True, **settings: Any
    ) -> Self:
        """Connect to an exchange.

        :param name: of the exchange in ccxt, such as ``binance``.
        :param symbols: see the class.
        :param path: see the class.
        :param max_age: see the class.
        :param sandbox: trade play money. False trades real money.
        :param settings: of the exchange: ``apiKey``, ``secret`` and so on.
        """
        try:
            import ccxt
        except ModuleNotFoundError:
            raise ValueError("a live exchange needs the package ccxt: pip install 'tailguard[ccxt]'") from None
        if name not in ccxt.exchanges:
            raise ValueError(f"ccxt knows no exchange {name!r}")
        exchange = getattr(ccxt, name)({"enableRateLimit": True, **settings})
        exchange.set_sandbox_mode(sandbox)
        return cls(exchange, symbols, path, max_age=max_age)

    def account(self) -> Account:
        """Return the balances, and the entry prices that the trades add up to."""
        total = self.exchange.fetch_balance()["total"]
        units = np.array([float(total.get(market["base"]) or 0.0) for market in self.markets])
        entries = np.zeros(len(self.symbols)) if self.books.last is None else np.array(self.books.last["entries"])
        return Account(float(total.get(self.quote) or 0.0), units, entries)

    def submit(self, order: Order) -> None:
        """Send an order in place of the one before; parts of it that the exchange has are not sent again."""
        if order.number < self.books.order["number"]:
            return
        own = self._client_id(order.number, "")
        for symbol in self.symbols:
            for left in self.exchange.fetch_open_orders(symbol):
                if str(left["clientOrderId"]).startswith(PREFIX) and not str(left["clientOrderId"]).startswith(own):
                    self.exchange.cancel_order(left["id"], symbol)
        now = self.exchange.milliseconds()
        late = pd.Timestamp(now, unit="ms") - order.time > self.max_age
        parts = self.books.order.get("parts", [])
        if order.number > self.books.order["number"]:
            parts = [] if late else self._parts(order.weights)
            # Written before it is sent: a crash in between leaves something to look for at the exchange.
            self.books.add_order(order.number, time=order.time.isoformat(), sent=now, parts=parts)
        else:
            parts = [] if late else [part for part in parts if not self._has(part[0], order.number)]
        for symbol, side, amount in parts:
            self.exchange.create_order(
                symbol, "market", side, amount, None, {"clientOrderId": self._client_id(order.number, symbol)}
            )

    def settle(self, bars: pd.DataFrame, row: int) -> Settlement:
        """Return the trades since the bar before, and the balances."""
        time = bars.index[row]
        known = self.books.settled(time)
        if known is not None:
            return known
        last, account = self.books.last, self.account()
        since, seen = (self.books.order["sent"], []) if last is None else (last["since"], last["seen"])
        trades = [(a, trade) for a, symbol in enumerate(self.symbols) for trade in self.exchange.fetch_my_trades(symbol, since)]
        fills = [(a, self._fill(a, trade)) for a, trade in trades if self._fill_id(a, trade) not in seen]
        entries = account.entries.copy()
        for a in range(len(self.symbols)):
            entries[a] = _entry(entries[a], account.units[a], [fill for asset, fill in fills if asset == a])
        newest = max([since, *(trade["timestamp"] for _, trade in trades)])
        settlement = Settlement(
            fills=tuple(fill for _, fill in fills),
            unfilled=np.array([self._unfilled(symbol) for symbol in self.symbols]),
            carry=0.0,
            account=account._replace(entries=entries),
            liquidated=False,
        )
        latest = [self._fill_id(a, trade) for a, trade in trades if trade["timestamp"] >= newest]
        self.books.add_bar(time, settlement, sync=True, since=newest, seen=latest)
        return settlement

    def _parts(self, weights: Floats) -> list[tuple[str, str, float]]:
        """Return the market orders that lead to some weights, sales first: symbol, side and amount."""
        if (weights < 0.0).any() or weights.sum() > 1.0 + 1e-9:
            raise ValueError("a spot account cannot be short or borrow: train with trading.long_only=true and leverage 1")
        account = self.account()
        prices = np.array([float(self.exchange.fetch_ticker(symbol)["last"]) for symbol in self.symbols])
        fees = np.array([float(market["taker"] or 0.0) for market in self.markets])
        changes = weights * (account.cash + account.units @ prices) / prices - account.units
        sold, bought = np.minimum(changes, 0.0) * prices, np.maximum(changes, 0.0) * prices
        budget, asked = account.cash - (sold * (1.0 - fees)).sum(), (bought * (1.0 + fees)).sum()
        changes = np.where(changes > 0.0, changes * min(1.0, budget / max(asked, 1e-300)), changes)
        parts = []
        for a in np.argsort(changes * prices):
            limits, amount = self.markets[a]["limits"], abs(float(changes[a]))
            if amount >= (limits["amount"]["min"] or 0.0) and amount * prices[a] >= max(limits["cost"]["min"] or 0.0, 1e-300):
                whole = float(self.exchange.amount_to_precision(self.symbols[a], amount))
                parts.append((self.symbols[a], "buy" if changes[a] > 0.0 else "sell", whole))
        return parts

    def _fill(self, a: int, trade: dict[str, Any]) -> Fill:
        """Return a trade as a fill: a fee in the asset itself leaves fewer units, one in cash costs cash."""
        side, fee = (1.0 if trade["side"] == "buy" else -1.0), trade["fee"] or {"currency": None, "cost": 0.0}
        units, price = side * float(trade["amount"]), float(trade["price"])
        paid = float(fee["cost"] or 0.0)
        if fee["currency"] == self.markets[a]["base"]:
            # The cash flow stays amount x price, for fewer units.
            price, units = units * price / (units - paid), units - paid
        return Fill(self._fill_id(a, trade), self.symbols[a], units, price, paid if fee["currency"] == self.quote else 0.0)

    def _fill_id(self, a: int, trade: dict[str, Any]) -> str:
        return f"{self.symbols[a]} {trade['id']}"

    def _unfilled(self, symbol: str) -> float:
        """Return the units of the agent's orders that wait, negative for sales."""
        waiting = [order for order in self.exchange.fetch_open_orders(symbol) if str(order["clientOrderId"]).startswith(PREFIX)]
        return float(sum((1.0 if order["side"] == "buy" else -1.0) * order["remaining"] for order in waiting))

    def _has(self, symbol: str, number: int) -> bool:
        """Return True if the exchange has the part of an order that is for a symbol."""
        since, expected = self.books.order["sent"], self._client_id(number, symbol)
        orders = [*self.exchange.fetch_open_orders(symbol), *self.exchange.fetch_closed_orders(symbol, since)]
        return any(order["clientOrderId"] == expected for order in orders)

    @staticmethod
    def _client_id(number: int, symbol: str) -> str:
        """Return what the exchange calls an order: with one order per symbol and number it is unique in the account."""
        return f"{PREFIX}{number:08d}{''.join(filter(str.isalnum, symbol))}"


def _entry(entry: float, units: float, fills: Sequence[Fill]) -> float:
    """Return the average entry price of a position after some fills.

    :param entry: before them.
    :param units: held after them.
    :param fills: of this asset.
    """
    held = units - sum(fill.units for fill in fills)
    for fill in fills:
        if fill.units > 0.0:
            entry = (entry * max(held, 0.0) + fill.price * fill.units) / (max(held, 0.0) + fill.units)
        held += fill.units
    return float(entry) if units > 0.0 else 0.0
