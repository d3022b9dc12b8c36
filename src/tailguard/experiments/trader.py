"""Live trading: bars arrive as lines of text, and after each the agent says what to hold.

The agent trades a paper account under the rules it was trained with, since its own position is part of what it sees. Every step
is one of :class:`tailguard.evaluate.play.AgentSession`, so a decision at the close of a bar is exactly the one that the same
agent takes in an evaluation over the same bars.

Lines are CSV with a heading, or a JSON object each; they come from a pipe, or from a file that grows. A JSON object holds
``time`` and either the fields of a bar or, for a portfolio, one such object per symbol::

    {"time": "2024-01-02", "open": 10, "high": 11, "low": 9.5, "close": 10.5, "volume": 1000}
    {"time": "2024-01-02", "AAPL": {"open": 185, ...}, "MSFT": {"open": 373, ...}}
"""

import io
import json
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

import numpy as np
import pandas as pd

from tailguard.evaluate.play import AgentSession, return_gamma_of, target_weights
from tailguard.evaluate.stats.series import Floats
from tailguard.experiments.prepared_market import scaled_features
from tailguard.market.bars import DataError
from tailguard.market.data import load_bars
from tailguard.market.env import AccountBatch
from tailguard.market.features import FeatureConfig, FeatureScaler
from tailguard.market.kernel import END, NOW
from tailguard.market.rules import TradingSettings
from tailguard.ppo.algorithm import DistributionalPPO

POLL_SECONDS = 0.2


class Decision(NamedTuple):
    """A decision: the weights to hold from the next fill on.

    :param time: of the bar at whose close it was taken.
    :param weights: ``[assets]`` shares of equity, negative for short positions.
    :param equity: of the paper account.
    """

    time: pd.Timestamp
    weights: Floats
    equity: float


class Trader:
    """An agent that decides at the close of every bar.

    :param model: the agent.
    :param scaler: of its features, as fitted in its training.
    :param features: what is computed from the bars.
    :param trading: the rules it was trained under.
    """

    def __init__(
        self, model: DistributionalPPO, scaler: FeatureScaler, features: FeatureConfig, trading: TradingSettings
    ) -> None:
        self.scaler, self.features = scaler, features
        self.trading = trading.model_copy(update={"episode_length": None, "random_start": False})
        self.bars: pd.DataFrame | None = None
        self._session = AgentSession(model, 1, return_gamma_of(model))
        self._account: dict[str, Any] | None = None
        self.ruined = False

    def add(self, bars: pd.DataFrame) -> list[Decision]:
        """Take the bars that follow those before, and decide at the close of each for which there is enough history.

        When the paper account is liquidated, :attr:`ruined` is true and there are no more decisions.

        :param bars: a table from :func:`tailguard.market.load_bars`; many at once are faster and give the same decisions.
        """
        known = self.bars
        if known is not None and not bars.index[0] > known.index[-1]:
            raise ValueError(f"the bar of {bars.index[0]} comes after that of {known.index[-1]}: bars must come in order")
        self.bars = bars if known is None else pd.concat([known, bars])
        features = scaled_features(self.bars, self.features, self.scaler)
        last = len(self.bars) - 1
        if self.ruined or features.warmup >= last:
            return []
        accounts, decisions = AccountBatch(self.bars, self.trading, 1, features), []
        if self._account is None:
            obs = np.empty((1, accounts.observation_size), np.float32)
            accounts.restart(np.zeros(1, np.intp), obs)
            self._session.act(obs, np.array([True]))
            decisions.append(self._decision(accounts))
        else:
            accounts.load_state_dict(self._account)
            accounts.clock[END] = last
        while int(accounts.clock[NOW, 0]) < last and not self.ruined:
            step = self._session.step(accounts)
            self.ruined = bool(step.terminated[0])
            if not self.ruined:
                self._session.act(step.obs, np.array([False]))
                decisions.append(self._decision(accounts))
        self._account = accounts.state_dict()
        return decisions

    def _decision(self, accounts: AccountBatch) -> Decision:
        info = accounts.info(0)
        return Decision(info["time"], target_weights(self._session.actions[0], self.trading), info["equity"])


def bar_chunks(stream: TextIO, follow: bool = False) -> Iterator[pd.DataFrame]:
    """Yield tables of the bars that have arrived, as soon as there is one.

    :param stream: text, line by line.
    :param follow: wait for more at the end, as for a file that grows; else the end of the stream is the end.
    :raises DataError: with the line that is not a bar.
    """
    heading: str | None = None
    for lines in _batches(stream, follow):
        if heading is None and not lines[0].lstrip().startswith("{"):
            heading, lines = lines[0], lines[1:]
        if lines:
            yield _table(heading, lines)


def _table(heading: str | None, lines: list[str]) -> pd.DataFrame:
    if heading is not None:
        try:
            table = pd.read_csv(io.StringIO("".join([heading, *lines])))
        except pd.errors.ParserError as error:
            raise DataError(f"not bars in CSV under the heading {heading.strip()!r} ({error})") from None
        return load_bars(table)
    rows = [_parsed(line) for line in lines]
    symbols = sorted({key for row in rows for key, value in row.items() if isinstance(value, dict)})
    if not symbols:
        return load_bars(pd.DataFrame(rows))
    return load_bars(
        {
            symbol: pd.DataFrame([{"time": row.get("time"), **row[symbol]} for row in rows if symbol in row])
            for symbol in symbols
        }
    )


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"not a bar in JSON: {line.strip()!r} ({error.msg})") from None
    if not isinstance(row, dict) or "time" not in row:
        raise DataError(f"a bar must be a JSON object with a time, got {line.strip()!r}")
    return row


def _batches(stream: TextIO, follow: bool) -> Iterator[list[str]]:
    """Yield whole lines that are not empty, as many at a time as have arrived."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(stream, follow, lines), daemon=True).start()
    while True:
        batch = [lines.get()]
        while not lines.empty():
            batch.append(lines.get())
        text = [line for line in batch if line is not None and line.strip()]
        if text:
            yield text
        if batch[-1] is None:
            return


def _read(stream: TextIO, follow: bool, lines: "queue.Queue[str | None]") -> None:
    unfinished = ""
    while True:
        part = stream.readline()
        if part.endswith("\n") or (not part and unfinished and not follow):
            lines.put(unfinished + part)
            unfinished = ""
        elif part:
            unfinished += part
        elif follow:
            time.sleep(POLL_SECONDS)
        else:
            lines.put(None)
            return
