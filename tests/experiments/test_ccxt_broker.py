"""The adapter of ccxt, against recorded responses of a spot account in ccxt's unified structures."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tailguard.experiments.broker import Order
from tailguard.experiments.ccxt_broker import CcxtBroker

SYMBOLS = ("BTC/USDT", "ETH/USDT")
RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "ccxt" / "spot_account.json").read_text())
HOURS = pd.date_range("2024-06-01", periods=4, freq="h")
BARS = pd.DataFrame({"close": 1.0}, index=HOURS)


class Recorded:
    """An exchange that answers with recorded responses, to the recorded calls and in their order."""

    id = "binance"

    def __init__(self, calls):
        self.calls = list(calls)

    def __getattr__(self, method):
        def call(*arguments):
            recorded = self.calls.pop(0)
            assert method == recorded["method"]
            for given, expected in zip(arguments, recorded["arguments"], strict=True):
                assert given == (pytest.approx(expected, rel=1e-9) if isinstance(expected, float) else expected), method
            return recorded["response"]

        return call


@pytest.fixture
def exchange():
    return Recorded(RECORDED)


def connected(exchange, path):
    return CcxtBroker(exchange, SYMBOLS, path, max_age=pd.Timedelta("2h"))


def booked(account, settled):
    """What an account and the fills since then add up to."""
    cash = account.cash - sum(fill.units * fill.price + fill.fee for fill in settled.fills)
    return [*(account.units[a] + sum(f.units for f in settled.fills if f.symbol == s) for a, s in enumerate(SYMBOLS)), cash]


def stated(account):
    return [*account.units, account.cash]


def test_orders_are_sized_sent_once_settled_and_replaced(exchange, tmp_path):
    broker = connected(exchange, tmp_path / "broker.jsonl")
    start = broker.account()
    assert stated(start) == [0.0, 0.0, 10000.0]
    broker.submit(Order(1, HOURS[0], np.array([0.5, 0.25])))
    first = broker.settle(BARS, 1)
    assert stated(first.account) == pytest.approx(booked(start, first), rel=1e-9)
    assert first.unfilled.tolist() == pytest.approx([0.0, 0.2648])
    assert [fill.id for fill in first.fills] == ["BTC/USDT 3600001", "BTC/USDT 3600002", "ETH/USDT 1440007"]
    paid = 67505.0 * 0.05 + 67514.0 * 0.02407
    assert first.account.entries.tolist() == pytest.approx([paid / first.account.units[0], 3760.4])
    broker.books.journal.close()  # the process is killed

    broker = connected(exchange, tmp_path / "broker.jsonl")
    again = broker.settle(BARS, 1)  # from the journal, without a call
    assert again.fills == first.fills
    broker.submit(Order(1, HOURS[0], np.array([0.5, 0.25])))  # no part is sent a second time
    broker.submit(Order(2, HOURS[1], np.array([0.0, 0.25])))
    second = broker.settle(BARS, 2)
    assert [fill.id for fill in second.fills] == ["BTC/USDT 3600400", "ETH/USDT 1440300"]
    assert stated(second.account) == pytest.approx(booked(first.account, second), rel=1e-9, abs=1e-12)
    broker.submit(Order(3, HOURS[2], np.array([1.0, 0.0])))  # it is hours late
    assert exchange.calls == []
    broker.books.journal.close()


def test_what_a_spot_account_cannot_do_is_refused(exchange, tmp_path):
    broker = connected(exchange, tmp_path / "broker.jsonl")
    broker.account()
    with pytest.raises(ValueError, match=r"train with trading\.long_only=true"):
        broker.submit(Order(1, HOURS[0], np.array([0.5, -0.25])))
    broker.books.journal.close()
    with pytest.raises(ValueError, match="binance has no market DOGE/USDT"):
        CcxtBroker(Recorded(RECORDED), ("DOGE/USDT",), tmp_path / "other", max_age=pd.Timedelta("2h"))
    mixed = Recorded([{**RECORDED[0], "response": {name: {**m, "quote": name} for name, m in RECORDED[0]["response"].items()}}])
    with pytest.raises(ValueError, match="against the same currency"):
        CcxtBroker(mixed, SYMBOLS, tmp_path / "other", max_age=pd.Timedelta("2h"))


def test_without_ccxt_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ccxt", None)
    with pytest.raises(ValueError, match=r"pip install 'tailguard\[ccxt\]'"):
        CcxtBroker.connect("binance", SYMBOLS, tmp_path / "broker.jsonl", max_age=pd.Timedelta("2h"))
