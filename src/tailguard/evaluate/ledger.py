"""The ledger of trials: what has been evaluated on which data, so that the best of many tries is not taken for skill.

One file per user, one line of JSON per evaluation. It is :data:`VARIABLE` that says where it is, or ``off``; by default it is
``tailguard/trials.jsonl`` in the user's data folder. Each line holds the returns of the trial, so that trials that are nearly
the same can be counted as one and the probability of backtest overfitting can be computed.
"""

import base64
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from tailguard.evaluate.stats.series import ROUNDING, Floats

VARIABLE, OFF = "TAILGUARD_LEDGER", "off"
FORMAT = 1
KEY_BARS = 100  # bars that identify the data; a file that has grown since has the same key
SAME = 0.95  # trials whose returns are correlated by more than this count as one
TEXTS = ("data", "fingerprint", "config", "title", "source", "date", "sharpe")
FEWEST_SHARED = 32  # bars over which a correlation, or the probability of overfitting, is worth computing
# Of two tables of the same bars, this share of the moves are equal, to the digits that the ledger keeps; dividends change some.
SAME_MOVES, SAME_MOVE = 0.9, 1e-6
# The probability of overfitting is that of choosing among different trials that cover this share of a trial's bars.
COVERED, FEWEST_TRIALS = 0.9, 4
RETURNS = "returns"  # key of all trials of which only the returns are known: nobody knows what they traded


@dataclass(frozen=True, eq=False)
class Trial:
    """One evaluation of a strategy on some data.

    :param data: key of the data, from :func:`data_key`.
    :param fingerprint: checksum of the data as they were.
    :param config: checksum of the settings, or of the strategy itself where it came as a table.
    :param title: one line.
    :param source: name of the data.
    :param date: of the evaluation, as YYYY-MM-DD.
    :param sharpe: annual Sharpe ratio of the excess returns.
    :param times: ``[n]`` of the test bars.
    :param excess: ``[n]`` returns in excess of cash.
    :param market: ``[n]`` mean moves of what was traded, by which the data are known again wherever their bars begin; None
        where only the returns are known.
    """

    data: str
    fingerprint: str
    config: str
    title: str
    source: str
    date: str
    sharpe: float
    times: pd.DatetimeIndex
    excess: Floats
    market: Floats | None = None

    def __post_init__(self) -> None:
        """Keep the times to the second, as the ledger does, and of daily bars the day: some stamp midnight, some the close."""
        times = self.times.as_unit("s")
        days = times.normalize()
        object.__setattr__(self, "times", times if days.has_duplicates else days)

    def line(self) -> str:
        """Return the trial as a line of the ledger; returns are kept to seven digits."""
        entry = {
            "format": FORMAT,
            **{name: getattr(self, name) for name in TEXTS},
            "times": _packed(np.diff(self.times.asi8, prepend=0)),
            "excess": _packed(self.excess.astype(np.float32)),
            **({} if self.market is None else {"market": _packed(self.market.astype(np.float32))}),
        }
        return json.dumps(entry, allow_nan=False) + "\n"

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Self:
        """Read what :meth:`line` wrote, parsed as JSON."""
        if entry["format"] != FORMAT:
            raise ValueError(f"format {entry['format']} of another version of Tailguard")
        values = {name: entry[name] for name in TEXTS}
        seconds = np.cumsum(_unpacked(entry["times"], np.int64))
        times = pd.DatetimeIndex(pd.to_datetime(seconds, unit="s"))
        excess = _unpacked(entry["excess"], np.float32).astype(np.float64)
        market = _unpacked(entry["market"], np.float32).astype(np.float64) if "market" in entry else None
        return cls(**values, times=times, excess=excess, market=market)


@dataclass(frozen=True)
class Ledger:
    """A file of trials.

    :param path: of the file; it and its folders are created by the first trial.
    """

    path: Path

    def trials(self, data: str | None = None) -> list[Trial]:
        """Return the trials, the oldest first.

        :param data: key of the data; None returns the trials of all data.
        :raises ValueError: naming the line that cannot be read.
        """
        return _parsed(self.path.read_bytes(), self.path, data) if self.path.exists() else []

    def related(self, trial: Trial) -> list[Trial]:
        """Return the other trials of the same data that share at least half of their bars with this one."""
        return _related(self.trials(), trial)

    def append(self, trial: Trial) -> list[Trial]:
        """Add a trial, unless the same one is there already; processes wait for one another.

        What a process that died left of a line is removed.

        :return: the other trials that were there before, as :meth:`related` returns them: of two processes, one counts the
            other.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            content = file.read()
            known = _parsed(content, self.path, None)
            if not any(_equal(other, trial) and _same_data(other, trial) for other in known):
                file.truncate(len(content) - len(_torn(content)))
                file.write(trial.line().encode())
            return _related(known, trial)


def _parsed(content: bytes, path: Path, data: str | None) -> list[Trial]:
    """Return the trials of a file, of some data or of all; an unfinished last line is none."""
    trials = []
    for number, line in enumerate(content[: len(content) - len(_torn(content))].splitlines(), start=1):
        try:
            entry = json.loads(line)
            if data is None or entry["data"] == data:
                trials.append(Trial.from_entry(entry))
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            remedy = f"delete the line, or set {VARIABLE} to another file"
            raise ValueError(f"{path}: line {number} is no trial ({error}); {remedy}") from None
    return trials


def _torn(content: bytes) -> bytes:
    """Return what stands after the last end of a line: a trial that is being written, or never was to its end."""
    return content[content.rfind(b"\n") + 1 :]


def _related(trials: Sequence[Trial], trial: Trial) -> list[Trial]:
    return [other for other in trials if _same_data(other, trial) and _overlap(other, trial) and not _equal(other, trial)]


def user_ledger() -> Ledger | None:
    """Return the ledger of the user; None if it is switched off."""
    place = os.environ.get(VARIABLE, "")
    if place == OFF:
        return None
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Ledger(Path(place) if place else data / "tailguard" / "trials.jsonl")


def data_key(times: pd.DatetimeIndex, prices: ArrayLike) -> str:
    """Return a key of the data that stays when bars are added at the end or prices are adjusted by a factor.

    :param times: of all bars.
    :param prices: ``[T]`` or ``[T, A]``.
    """
    digest = hashlib.sha256(times[:KEY_BARS].as_unit("s").asi8.tobytes())
    first = np.asarray(prices, dtype=np.float64)[:KEY_BARS]
    digest.update(np.round(first[1:] / first[:-1], 6).tobytes())
    return digest.hexdigest()[:16]


def count_trials(trials: Sequence[Trial]) -> int:
    """Return the number of different trials: those whose returns are all correlated by more than :data:`SAME` are one."""
    return count_different(correlations(trials)) if trials else 0


def count_each(trials: Sequence[Trial]) -> list[int]:
    """Return, for each trial, the number of different ones among itself and those of the same data over its bars."""
    counts = [0] * len(trials)
    for table in _tables(trials):
        found = correlations([trials[i] for i in table])
        for i in table:
            rows = [place for place, k in enumerate(table) if _overlap(trials[k], trials[i])]
            counts[i] = count_different(found[np.ix_(rows, rows)])
    return counts


def count_different(table: Floats) -> int:
    """Return the number of clusters in which all correlations exceed :data:`SAME` (complete linkage).

    :param table: correlations ``[N, N]``.
    """
    if len(table) < 2:
        return len(table)
    labels = fcluster(linkage(squareform(1.0 - table, checks=False), "complete"), 1.0 - SAME, "distance")
    return len(np.unique(labels))


def correlations(trials: Sequence[Trial]) -> Floats:
    """Return the correlations ``[N, N]`` of the trials' returns, each over the bars that two trials share.

    Trials that share too few bars, or of which one does not move, count as uncorrelated.
    """
    moving = [pd.Series(trial.excess, trial.times) for trial in trials if float(trial.excess.std()) > ROUNDING]
    places = np.array([i for i, trial in enumerate(trials) if float(trial.excess.std()) > ROUNDING], dtype=np.intp)
    table = np.eye(len(trials))
    if len(moving) > 1:
        shared = pd.concat(moving, axis=1, sort=True).corr(min_periods=FEWEST_SHARED).fillna(0.0)
        table[np.ix_(places, places)] = np.where(np.eye(len(places), dtype=bool), 1.0, shared)
    return table


def shared_returns(trial: Trial, others: Sequence[Trial]) -> Floats | None:
    """Return the excess returns ``[n, N]`` of a trial and of different ones over its bars; None if there are too few of either.

    :param trial: in the first column.
    :param others: those that cover less than :data:`COVERED` of its bars are left out, and near copies of one another.
    """
    covering = [other for other in others if len(trial.times.intersection(other.times)) >= COVERED * len(trial.times)]
    series = [pd.Series(each.excess, each.times) for each in (trial, *covering)]
    columns = pd.concat(series, axis=1, join="inner").to_numpy(dtype=np.float64)
    if len(columns) < FEWEST_SHARED:
        return None
    close, kept = correlations([trial, *covering]) > SAME, [0]
    for column in range(1, len(close)):
        kept += [] if close[column, kept].any() else [column]
    return columns[:, kept] if len(kept) >= FEWEST_TRIALS else None


def _tables(trials: Sequence[Trial]) -> list[list[int]]:
    """Return the trials, by their places, that are of the same data."""
    tables: list[list[int]] = []
    for i, trial in enumerate(trials):
        keyed = [table for table in tables if any(trials[k].data == trial.data for k in table)]
        same = keyed or [table for table in tables if any(_same_data(trials[k], trial) for k in table)]
        tables = [table for table in tables if table not in same] + [[*chain.from_iterable(same), i]]
    return tables


def _same_data(trial: Trial, other: Trial) -> bool:
    """Return whether two trials are of the same data: their keys are equal, or else what was traded moved alike."""
    if trial.data == other.data:
        return True
    if trial.market is None or other.market is None:
        return False
    _, own, its = np.intersect1d(trial.times.asi8, other.times.asi8, assume_unique=True, return_indices=True)
    moves = np.stack([trial.market[own], other.market[its]])
    moves = moves[:, (moves != 0.0).any(axis=0)]  # two markets that stand still are not yet one
    return moves.size > 0 and float((np.abs(moves[0] - moves[1]) <= SAME_MOVE).mean()) >= SAME_MOVES


def _overlap(trial: Trial, other: Trial) -> bool:
    return 2 * len(trial.times.intersection(other.times)) >= min(len(trial.times), len(other.times))


def _equal(trial: Trial, other: Trial) -> bool:
    return trial.times.equals(other.times) and np.array_equal(trial.excess.astype(np.float32), other.excess.astype(np.float32))


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes())).decode()


def _unpacked(text: str, kind: type) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=kind)
