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

    def __post_init__(self) -> None:
        """Keep the times to the second, as the ledger does."""
        object.__setattr__(self, "times", self.times.as_unit("s"))

    def line(self) -> str:
        """Return the trial as a line of the ledger; returns are kept to seven digits."""
        entry = {
            "format": FORMAT,
            **{name: getattr(self, name) for name in TEXTS},
            "times": _packed(np.diff(self.times.asi8, prepend=0)),
            "excess": _packed(self.excess.astype(np.float32)),
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
        return cls(**values, times=times, excess=_unpacked(entry["excess"], np.float32).astype(np.float64))


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
        if not self.path.exists():
            return []
        trials = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                entry = json.loads(line)
                if data is None or entry["data"] == data:
                    trials.append(Trial.from_entry(entry))
            except (ValueError, KeyError, TypeError, zlib.error) as error:
                remedy = f"delete the line, or set {VARIABLE} to another file"
                raise ValueError(f"{self.path}: line {number} is no trial ({error}); {remedy}") from None
        return trials

    def related(self, trial: Trial) -> list[Trial]:
        """Return the trials of the same data that share at least half of their bars with this one."""
        return [other for other in self.trials(trial.data) if _overlap(other, trial)]

    def append(self, trial: Trial) -> None:
        """Add a trial, unless the same one is there already; processes wait for one another."""
        if any(_equal(other, trial) for other in self.related(trial)):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(trial.line())


def user_ledger() -> Ledger | None:
    """Return the ledger of the user; None if it is switched off."""
    place = os.environ.get(VARIABLE, "")
    if place == OFF:
        return None
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Ledger(Path(place) if place else data / "tailguard" / "trials.jsonl")


def data_key(times: pd.DatetimeIndex, prices: ArrayLike | None = None) -> str:
    """Return a key of the data that stays when bars are added at the end or prices are adjusted by a factor.

    :param times: of all bars.
    :param prices: ``[T]`` or ``[T, A]``; None where only the returns of a strategy are known.
    """
    digest = hashlib.sha256(times[:KEY_BARS].as_unit("s").asi8.tobytes())
    if prices is not None:
        first = np.asarray(prices, dtype=np.float64)[:KEY_BARS]
        digest.update(np.round(first[1:] / first[:-1], 6).tobytes())
    return digest.hexdigest()[:16]


def count_trials(trials: Sequence[Trial]) -> int:
    """Return the number of different trials: those whose returns are all correlated by more than :data:`SAME` are one."""
    return count_different(correlations(trials)) if trials else 0


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
    if all(trial.times.equals(trials[0].times) and float(trial.excess.std()) > ROUNDING for trial in trials):
        return np.atleast_2d(np.corrcoef([trial.excess for trial in trials]))
    table = np.eye(len(trials))
    for i, trial in enumerate(trials):
        for j in range(i):
            columns = _shared([trial, trials[j]])
            if len(columns) >= FEWEST_SHARED and float(columns.std(axis=0).min()) > ROUNDING:
                table[i, j] = table[j, i] = float(np.atleast_2d(np.corrcoef(columns.T))[0, 1])
    return table


def shared_returns(trials: Sequence[Trial]) -> Floats | None:
    """Return the excess returns ``[n, N]`` over the bars that all trials share; None if there are too few bars or trials."""
    if len(trials) < 2:
        return None
    columns = _shared(trials)
    return columns if len(columns) >= FEWEST_SHARED else None


def _shared(trials: Sequence[Trial]) -> Floats:
    if all(trial.times.equals(trials[0].times) for trial in trials):
        return np.stack([trial.excess for trial in trials], axis=1)
    series = [pd.Series(trial.excess, trial.times) for trial in trials]
    return pd.concat(series, axis=1, join="inner").to_numpy(dtype=np.float64)


def _overlap(trial: Trial, other: Trial) -> bool:
    return 2 * len(trial.times.intersection(other.times)) >= min(len(trial.times), len(other.times))


def _equal(trial: Trial, other: Trial) -> bool:
    return trial.times.equals(other.times) and np.array_equal(trial.excess.astype(np.float32), other.excess.astype(np.float32))


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes())).decode()


def _unpacked(text: str, kind: type) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=kind)
