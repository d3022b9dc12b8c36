"""Paper trading: bars arrive, the agent decides, a broker carries it out, and a ledger remembers everything.

Each bar goes through the same steps: the broker settles it, the account is reconciled with the ledger, the agent decides, the
order is written to the ledger and, when it is on the disk, sent. A process may be killed between any two of them. The next one
reads the ledger, lets the agent decide again over its bars, which restores the recurrent state and checks that it is the same
agent, and sends the last order again: a broker ignores an order that it has. So no order is lost and none is carried out twice.

    FOLDER/ledger.jsonl    bars, accounts, orders, kills; see :mod:`tailguard.io.journal`
    FOLDER/broker.jsonl    the account of the paper broker
    FOLDER/KILL            the kill switch: trading ends when this file exists
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from tailguard.evaluate.judge import Judgement, judge
from tailguard.evaluate.play import AgentSession, return_rule_of, target_weights
from tailguard.evaluate.stats.series import Floats
from tailguard.experiments.broker import Broker, Order, Settlement
from tailguard.experiments.prepared_market import scaled_features
from tailguard.experiments.run import Run
from tailguard.experiments.trader import LivePrediction, LivePredictor, require_timeframe
from tailguard.io.journal import Journal
from tailguard.io.reading import UnusableFile, refusing
from tailguard.market.accounting import bar_array, empty_accounts, kernel_rules
from tailguard.market.bars import DataError, symbols_of
from tailguard.market.env import AccountBatch
from tailguard.market.kernel import CASH, EQUITY, MARK, PEAK, TRADE_FIELDS, UNITS, WORK_ROWS, observe_account, trade_bar
from tailguard.market.rules import TradingRules
from tailguard.market.volatility import exposure_scale
from tailguard.parallel.threads import one_thread

LEDGER, BROKER, KILL = "ledger.jsonl", "broker.jsonl", "KILL"
# Cash and positions of broker and ledger may differ by this share of equity: rounding.
TOLERANCE = 1e-9
# A decision that is made again may differ by this much: networks are float32, and another CPU rounds otherwise.
SAME_DECISION = 1e-5


class Status(NamedTuple):
    """The account after a bar, and the order that follows.

    :param time: of the bar.
    :param equity: at its close.
    :param gain: since the ledger began, as a share.
    :param weights: ``[assets]`` that were ordered.
    :param fills: number of fills in the bar.
    :param unfilled: True if the market did not take the whole order.
    """

    time: pd.Timestamp
    equity: float
    gain: float
    weights: Floats
    fills: int
    unfilled: bool


class PaperTrading:
    """An agent that trades with a broker, and its ledger. What is in the ledger already is not done again.

    :param run: of the agent.
    :param folder: of the ledger.
    :param broker: who carries out the orders.
    :param bars: a table from :func:`tailguard.market.load_bars`; as much as there is, more can be added.
    :param since: no decision is taken before; None is the end of the training. A ledger that has begun keeps its own.
    :param max_loss: share of the equity at the start that may be lost before the kill switch is thrown; None has no limit.
    :param rearm: trade again after the kill switch was thrown; losses count from here.
    :param tolerance: see :data:`TOLERANCE`; a live account needs more, for dust.
    :param switch: returns why trading is to end, beside the file and the loss; empty to continue. None has no other reasons.
    :param report: called after each bar that was traded.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        broker: Broker,
        bars: pd.DataFrame,
        *,
        since: pd.Timestamp | None = None,
        max_loss: float | None = None,
        rearm: bool = False,
        tolerance: float = TOLERANCE,
        switch: Callable[[], str] | None = None,
        report: Callable[[Status], None] | None = None,
    ) -> None:
        if run.config.training.pooled:
            raise ValueError("this agent was trained on a pool of instruments; trading a pool live is not supported yet")
        agent = run.agent()
        self.run, self.folder, self.broker = run, folder, broker
        self.max_loss, self.tolerance, self.switch, self.report = max_loss, tolerance, switch, report
        self.trading = run.config.trading.model_copy(update={"episode_length": None, "random_start": False})
        self.history: list[Status] = []
        self.killed = ""
        self._session = AgentSession(agent, 1, return_rule_of(agent))
        self._row = -1  # of the last bar that was settled
        self._settled: Settlement | None = None  # of that bar
        self._account: Floats = np.empty(0)  # after it, as the kernel lays it out
        self._seen: Floats = np.empty(0)  # the same as the agent sees it: the account that it would have without a guard
        self._decided: list[Floats] = []  # by the agent at each bar, before any limit
        self._predictor = LivePredictor(self.trading)
        self._base = math.nan  # equity from which losses count
        self._known_fills: set[str] = set()  # their ids
        self._number = 0  # of the last order
        self._deciding = False  # True between a bar and its order
        self.journal = Journal(folder / LEDGER)
        try:
            self._begin(bars, since, rearm)
            self.resumed = len(self.history)  # bars that the ledger had
            self.add(bars)
        except BaseException:
            self.journal.close()
            raise

    @property
    def remedy(self) -> str:
        """The way to trade again after a kill, in words; the file KILL would stop a rearmed account as well."""
        file = self.folder / KILL
        return f"delete {file}, and --rearm trades again" if file.exists() else "--rearm trades again"

    @property
    def finished(self) -> bool:
        """True if there is nothing left to do: the account was liquidated, or killed and sold out."""
        if self._settled is None:
            return bool(self.killed)
        return self._settled.liquidated or (bool(self.killed) and not self._settled.account.units.any())

    @one_thread()
    def add(self, bars: pd.DataFrame) -> list[Status]:
        """Take bars, settle and decide at the close of each.

        :param bars: more of them. Bars that the ledger has already must be the same.
        :returns: the account after each bar that was traded.
        """
        new = self._unknown(bars)
        if len(new):
            self._set_bars(pd.concat([self.bars, new]) if len(self.bars) else new)  # refuses bars that do not fit
            times = pd.DatetimeIndex(new.index)
            rows = [[None if math.isnan(value) else value for value in row] for row in new.to_numpy(np.float64).tolist()]
            self.journal.append({"kind": "bars", "unit": times.unit, "times": times.asi8.tolist(), "rows": rows})
        known = len(self.history)
        if self._deciding:
            self._order([])
        for row in range(max(self._first, self._row + 1), len(self.bars)):
            if self.finished:
                break
            self._next(row)
            if self.report is not None:
                self.report(self.history[-1])
        return self.history[known:]

    def check(self) -> None:
        """Throw the kill switch between two bars, if it is asked for: everything is sold at the next opportunity."""
        reason = self._reason() if self._settled is not None and not self.finished else ""
        if reason and not self.killed:
            self._send(None, [self._kill(reason)])

    def judged(self) -> Judgement:
        """Judge what was ordered, traded again over the same bars.

        :raises ValueError: if there are too few bars yet.
        """
        names = [symbol or "weight" for symbol in self._symbols]
        weights = pd.DataFrame([status.weights for status in self.history], columns=names)
        weights.index = pd.DatetimeIndex([status.time for status in self.history])
        rules = TradingRules(**self.trading.model_dump(include=set(TradingRules.model_fields)))
        if rules.guard is not None:  # what was ordered is guarded already
            rules = rules.model_copy(update={"guard": None, "tail_period": rules.tail_period or rules.guard.period})
        title = f"{self.run.path.name} on paper since {self.history[0].time:%Y-%m-%d}"
        return judge(weights=weights, bars=self.bars, trading=rules, title=title, source=self.run.info["data"], ledger=None)

    # ---------------------------------------------------------------------------------------------------- one bar

    def _next(self, row: int) -> None:
        """Take one bar: settle, reconcile, decide, order."""
        if self._settled is None:
            account = self.broker.account()
            settled, kind = Settlement((), np.zeros_like(account.units), 0.0, account, liquidated=False), "begin"
        else:
            settled, kind = self.broker.settle(self.bars, row), "bar"
            settled = settled._replace(fills=tuple(fill for fill in settled.fills if fill.id not in self._known_fills))
            self._reconcile(self._settled, settled, row)
        self._see(row, settled)
        records = [{"kind": kind, "time": self.bars.index[row].isoformat(), **settled.record()}]
        if settled.liquidated:
            self.journal.append(*records)
            self._note(np.zeros_like(settled.account.units))
        else:
            self._order(records)

    def _order(self, records: list[dict[str, Any]]) -> None:
        """Decide at the close of the last bar, and order.

        :param records: that belong in the ledger before the order.
        """
        reason = self._reason()
        if reason and not self.killed:
            records = [*records, self._kill(reason)]
        self._note(self._send(self._decide(), records))

    def _limited(self, decided: Floats) -> Floats:
        """Return the weights that are ordered: what the agent decided, within the limits of the account."""
        if self.killed:
            return np.zeros_like(decided)
        if self.trading.guard is None:
            return decided
        return np.asarray(self.predicted().weights[0])

    def predicted(self) -> LivePrediction:
        """Return the last decision after the guard, with the tail of the rest of the period."""
        known = self.bars.iloc[: self._row + 1]
        return self._predictor.predict(known, len(known) - len(self._decided), np.array(self._decided), 1)

    def _send(self, decided: Floats | None, records: Sequence[dict[str, Any]]) -> Floats:
        """Write an order to the ledger, then send it: after a crash in between the next process sends it.

        :param decided: weights that the agent asks for; None sells everything.
        :param records: that belong in the ledger before it.
        """
        weights = np.zeros(len(self._symbols)) if decided is None else self._limited(decided)
        order = Order(self._number + 1, self.bars.index[self._row], weights)
        record = {
            "kind": "order",
            "number": order.number,
            "time": order.time.isoformat(),
            "decided": None if decided is None else decided.tolist(),
            "weights": weights.tolist(),
        }
        self.journal.append(*records, record)
        self._take_order(order)
        self.broker.submit(order)
        return weights

    def _take_order(self, order: Order) -> None:
        """Remember an order as the last."""
        self._number, self._deciding = order.number, False
        if self.history and self.history[-1].time == order.time:  # in place of one that waited for the next bar
            self.history[-1] = self.history[-1]._replace(weights=order.weights)

    def _kill(self, reason: str) -> dict[str, Any]:
        """Throw the kill switch, and return its record."""
        self.killed = reason
        return {"kind": "kill", "time": self.bars.index[self._row].isoformat(), "reason": reason}

    def _see(self, row: int, settled: Settlement) -> None:
        """Take over the account after a bar: what the agent sees of it, and what it has earned."""
        assets, equity = len(self._symbols), settled.account.cash
        for units, mark in zip(settled.account.units.tolist(), self._array[row, :, MARK].tolist(), strict=True):
            equity += units * mark  # one after another, as the kernel adds them
        account = empty_accounts(1, assets)
        account[0, CASH], account[0, EQUITY], account[0, PEAK] = settled.account.cash, equity, equity
        account[0, UNITS : UNITS + assets], account[0, UNITS + assets :] = settled.account.units, settled.account.entries
        if self._settled is None:
            self._base = equity
        else:
            account[0, PEAK] = max(equity, self._account[0, PEAK])
        seen = account if self.trading.guard is None else self._without_guard(row)
        if self._settled is not None:
            self._session.add_rewards(np.array([math.log(seen[0, EQUITY] / self._seen[0, EQUITY])]))
        self._seen = seen
        self._known_fills.update(fill.id for fill in settled.fills)
        self._row, self._settled, self._account, self._deciding = row, settled, account, not settled.liquidated

    def _without_guard(self, row: int) -> Floats:
        """Return the account after a bar as it would be if everything that the agent decided had been ordered.

        An evaluation guards what an agent decides and shows it the account without the guard, as in its training; so does this.
        """
        assets, cash = len(self._symbols), self.trading.cash
        if self._settled is None:
            account = empty_accounts(1, assets)
            account[0, [CASH, EQUITY, PEAK]] = cash
            return account
        account, work = self._seen.copy(), np.zeros((WORK_ROWS, assets))
        field = TRADE_FIELDS[self.trading.fill]
        trade_bar(account, self._array, row, field, self._decided[-1], kernel_rules(self.trading, assets), cash, work)
        return account

    def _reconcile(self, before: Settlement, after: Settlement, row: int) -> None:
        """Raise if the broker's account is not what the ledger and the fills since then add up to."""
        cash, units = before.account.cash - after.carry, before.account.units.copy()
        for fill in after.fills:
            cash -= fill.units * fill.price + fill.fee
            units[self._symbols.index(fill.symbol)] += fill.units
        marks = self._array[row, :, MARK]
        booked, stated = np.append(units * marks, cash), np.append(after.account.units * marks, after.account.cash)
        allowed = self.tolerance * max(float(self._account[0, EQUITY]), float(np.abs(stated).max()))
        # A liquidated account keeps a little cash for the sake of its logarithm, whatever the sale has brought.
        if not after.liquidated and (np.abs(stated - booked) > allowed).any():
            worst = int(np.argmax(np.abs(stated - booked)))
            what = [*(symbol or "the asset" for symbol in self._symbols), "cash"][worst]
            raise ValueError(
                f"the broker has {stated[worst]:.10g} in {what}, by {self.folder / LEDGER} it should be {booked[worst]:.10g}: "
                "nothing was ordered; find out why, and begin another --ledger"
            )

    def _decide(self) -> Floats:
        """Return the weights that the agent asks for at the close of the last bar."""
        if not self.history:
            self._warm_up()
        obs = np.empty((1, self._features.values.shape[1] + 2 * len(self._symbols) + 1), np.float32)
        rules = kernel_rules(self.trading, len(self._symbols))
        observe_account(obs, self._features.values, self._seen, self._array, self._row, rules)
        self._session.act(obs, np.array([False]), np.array([self._row]))
        scale = None if self._scale is None else self._scale[self._row]
        self._decided.append(target_weights(self._session.actions[0], self.trading, scale))
        return self._decided[-1]

    def _warm_up(self) -> None:
        """Fill the recurrent state over the bars before the first decision, with an account that nobody counts."""
        begin, starts = max(self._row - self.run.config.walkforward.warmup, self._features.warmup), np.array([True])
        if begin < self._row:
            accounts = AccountBatch(self.bars, self.trading, 1, self._features)
            obs = np.empty((1, accounts.observation_size), np.float32)
            for row in range(begin, self._row):
                if starts[0]:
                    accounts.start_at(np.zeros(1, np.intp), np.array([row]), np.array([self._row]), obs)
                self._session.act(obs, starts, accounts.rows)
                step = self._session.step(accounts)
                obs, starts = step.obs, step.terminated
        self._session.restart_returns(np.array([True]), np.array([self._row]))

    def _note(self, weights: Floats) -> None:
        """Remember the account after the last bar, and the weights that were ordered."""
        assert self._settled is not None
        equity = float(self._account[0, EQUITY])
        gain = equity / self.history[0].equity - 1.0 if self.history else 0.0
        unfilled = bool((self._settled.unfilled != 0.0).any())
        self.history.append(Status(self.bars.index[self._row], equity, gain, weights, len(self._settled.fills), unfilled))

    def _reason(self) -> str:
        """Return why the kill switch is to be thrown; empty if it is not."""
        if (self.folder / KILL).exists():
            return f"the file {self.folder / KILL} exists"
        equity = float(self._account[0, EQUITY])
        if self.max_loss is not None and equity < (1.0 - self.max_loss) * self._base:
            return f"{1.0 - equity / self._base:.2%} were lost, more than the limit of {self.max_loss:.2%}"
        return "" if self.switch is None else self.switch()

    # ------------------------------------------------------------------------------------------------- the ledger

    def _begin(self, bars: pd.DataFrame, since: pd.Timestamp | None, rearm: bool) -> None:
        """Begin a ledger, or read it."""
        known, begun, self.since = 0, False, self.run.scaler.end
        with refusing(self.folder / LEDGER):
            for record in self.journal:
                known, begun = known + 1, begun or record["kind"] == "begin"
                self.since = pd.Timestamp(record["since"]) if record["kind"] in ("start", "since") else self.since
        if begun and since not in (None, self.since):
            raise ValueError(f"{self.folder / LEDGER} trades since {self.since}: leave --since out, or begin another --ledger")
        self.since = self.since if since is None else since
        if not known:
            self._set_bars(bars.iloc[:0])
            columns = [list(column) if isinstance(column, tuple) else [column] for column in bars.columns]
            self.journal.append({"kind": "start", "columns": columns, "since": self.since.isoformat()})
            return
        if not begun:
            self.journal.append({"kind": "since", "since": self.since.isoformat()}, sync=False)
        with refusing(self.folder / LEDGER):
            traded = _bars_of(self.journal)
        self._set_bars(traded)
        self._resume(rearm)

    def _set_bars(self, bars: pd.DataFrame) -> None:
        """Take over all bars that are known, and compute what is needed of them."""
        self.bars, self._symbols, self._first = bars, symbols_of(bars), len(bars)
        if len(bars):
            self._features = scaled_features(bars, self.run.config.features, self.run.scaler)
            self._array = bar_array(bars, self.trading)
            self._scale = exposure_scale(bars, self.trading.volatility_power)
            self._session.set_calendar(lambda period: period.decisions(pd.DatetimeIndex(bars.index)))
            self._first = max(self._features.warmup, int(bars.index.searchsorted(self.since)))
        if self._first < len(bars) and len(bars) > 1:
            require_timeframe(pd.DatetimeIndex(bars.index), self.run.timeframe)

    def _unknown(self, bars: pd.DataFrame) -> pd.DataFrame:
        """Return the bars that the ledger does not have; those that it has must be the same."""
        if set(bars.columns) - set(self.bars.columns):
            legal = f"the columns {list(self.bars.columns)}, as in {self.folder / LEDGER}"
            raise DataError(f"bars with the columns {list(bars.columns)}, but they must have {legal}")
        bars = bars.reindex(columns=self.bars.columns)
        if not len(self.bars):
            return bars
        last = self.bars.index[-1]
        seen = bars[bars.index <= last]
        traded = self.bars[self.bars.index >= seen.index[0]] if len(seen) else seen
        if not (seen.index.equals(traded.index) and np.array_equal(seen.to_numpy(), traded.to_numpy(), equal_nan=True)):
            raise DataError(
                f"the bars up to {last} are not those that {self.folder / LEDGER} was traded on: restore them, or give only "
                "those that follow"
            )
        return cast(pd.DataFrame, bars[bars.index > last])

    def _resume(self, rearm: bool) -> None:
        """Decide again over the bars of the ledger, and bring the broker up to date."""
        last = None
        with refusing(self.folder / LEDGER):
            for record in self.journal:
                last = self._replay(record) or last
        if last is not None:
            if self._row > self._first:
                self.broker.settle(self.bars, self._row)  # a power cut may have taken it from the broker's disk
            self.broker.submit(last)
        if rearm and self.killed:
            record = {"kind": "rearm", "time": self.bars.index[self._row].isoformat()}
            self.journal.append(record)
            self._replay(record)
        if self.finished:
            why = f"the kill switch was thrown because {self.killed}" if self.killed else "the account was liquidated"
            raise ValueError(f"{self.folder}: {why}; {self.remedy}, another --ledger begins anew")

    def _replay(self, record: dict[str, Any]) -> Order | None:
        """Do again what a record of the ledger says, and return the order if it is one."""
        kind = record["kind"]
        if kind in ("begin", "bar"):
            settled = Settlement.from_record(record)
            self._see(int(self.bars.index.searchsorted(pd.Timestamp(record["time"]))), settled)
            if settled.liquidated:
                self._note(np.zeros_like(settled.account.units))
        elif kind == "kill":
            self.killed = record["reason"]
        elif kind == "rearm":
            self.killed, self._base = "", float(self._account[0, EQUITY])
        elif kind == "order":
            order = Order(record["number"], pd.Timestamp(record["time"]), np.array(record["weights"]))
            if record["decided"] is not None:
                self._require_same(self._decide(), record)
                self._note(order.weights)
            self._take_order(order)
            return order
        return None

    def _require_same(self, decided: Floats, record: dict[str, Any]) -> None:
        """Raise if the agent does not decide as it did."""
        if not np.allclose(decided, record["decided"], 0.0, SAME_DECISION):
            raise UnusableFile(
                f"{self.folder / LEDGER}: at {record['time']} this agent decides otherwise than the one that traded: restore "
                "the run, or begin another --ledger"
            )


def require_tradable(run: Run, bars: pd.DataFrame) -> None:
    """Raise for bars that the agent of a run cannot trade: of other symbols, without its columns, or of another length.

    :param run: of the agent.
    :param bars: a table from :func:`tailguard.market.load_bars`.
    """
    scaled_features(bars, run.config.features, run.scaler)
    if len(bars) > 1:
        require_timeframe(pd.DatetimeIndex(bars.index), run.timeframe)


def _bars_of(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return the bars of a ledger."""
    columns: pd.Index[Any] = pd.Index([])
    tables = []
    for record in records:
        if record["kind"] == "start":
            names = [tuple(column) if len(column) > 1 else column[0] for column in record["columns"]]
            columns = pd.MultiIndex.from_tuples(names) if isinstance(names[0], tuple) else pd.Index(names)
        elif record["kind"] == "bars":
            times = pd.DatetimeIndex(np.array(record["times"], f"datetime64[{record['unit']}]"), name="time")
            tables.append(pd.DataFrame(np.array(record["rows"], np.float64), times, columns))
    return pd.concat(tables) if tables else pd.DataFrame(columns=columns, index=pd.DatetimeIndex([]), dtype=np.float64)
