"""Repair of files whose errors have one plain remedy. Every change is listed, and nothing is filled in."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.io.atomic import atomic
from tailguard.market.bars import PRICES, DataError
from tailguard.market.checks import out_of_range
from tailguard.market.columns import Part
from tailguard.market.data import findings_of, read_bars
from tailguard.market.files import FileConfig


@dataclass(frozen=True, eq=False)
class Repaired:
    """A table that :func:`tailguard.market.load_bars` accepts.

    :param parts: bars by symbol; the empty string for the only one.
    :param understood: what was recognised about the file, in one line.
    :param changes: one line each, in the order of the file.
    """

    parts: dict[str, pd.DataFrame]
    understood: str
    changes: tuple[str, ...]


def repair(source: Path, config: FileConfig | None = None) -> Repaired:
    """Drop bars that are unreadable, impossible or repeated, sort them, and widen ranges that exclude their open or close.

    :param source: the file.
    :param config: what is known about it.
    :raises DataError: when it is not a table of bars, or when nothing is left.
    """
    config = config or FileConfig()
    reading = read_bars(source, config)
    parts, changes = {}, []
    for symbol, part in reading.parts.items():
        bars, own = _repaired(part)
        if len(bars) == 0:
            raise DataError(f"{source}: no bar is left after the repair")
        errors = [finding for finding in findings_of(Part(bars, None), config) if finding.level == "error"]
        if errors:
            raise DataError(f"{source}: cannot be repaired: {errors[0]}")
        parts[symbol] = bars
        changes += [f"{symbol}: {change}" if symbol else change for change in own]
    return Repaired(parts, reading.summary(), (*reading.remarks, *changes))


def write_bars(parts: dict[str, pd.DataFrame], path: Path) -> None:
    """Write bars as CSV, CSV.gz or Parquet, by the ending of the name; several symbols get a column ``symbol``.

    :raises DataError: when the file exists or has another ending.
    """
    if path.exists():
        raise DataError(f"{path} exists already: name another file")
    endings = (".csv", ".csv.gz", ".parquet")
    if not path.name.endswith(endings):
        raise DataError(f"{path}: the name of the file to write must end in {', '.join(endings)}")
    tables = [table if not symbol else table.assign(symbol=symbol) for symbol, table in parts.items()]
    table = pd.concat(tables)
    with atomic(path) as file:
        if path.name.endswith(".parquet"):
            table.to_parquet(file)
        else:
            table.to_csv(file, compression="gzip" if path.name.endswith(".gz") else None)


def _repaired(part: Part) -> tuple[pd.DataFrame, list[str]]:
    bars = part.bars.copy()
    lines = np.arange(len(bars)) if part.lines is None else part.lines
    changes: list[tuple[int, str]] = []

    def drop(rows: NDArray[np.bool_], reasons: dict[int, str] | str) -> None:
        nonlocal bars, lines
        for row in np.flatnonzero(rows).tolist():
            reason = reasons if isinstance(reasons, str) else reasons[row]
            changes.append((int(lines[row]), f"{_place(bars, lines, part, row)}: {reason}: dropped"))
        bars, lines = bars[~rows], lines[~rows]

    unreadable = {problem.row: problem.reason for problem in reversed(part.problems)}
    drop(np.isin(np.arange(len(bars)), list(unreadable)), unreadable)
    prices = bars[list(PRICES)].to_numpy()
    drop(~(np.isfinite(prices) & (prices > 0)).all(axis=1), "a price is missing or not positive")

    steps = np.diff(bars.index.to_numpy().astype(np.int64))
    if (steps < 0).any():
        changes.append((0, f"{int((steps < 0).sum())} bars came before the one above: sorted by time"))
        order = np.argsort(bars.index.to_numpy(), kind="stable")
        bars, lines = bars.iloc[order], lines[order]
    repeated = bars.index.duplicated(keep="last")
    drop(np.asarray(repeated), "its time comes again later in the file, and that bar is kept")

    outside = out_of_range(bars)
    for row in np.flatnonzero(outside).tolist():
        low, high = bars.iloc[row][list(PRICES)].min(), bars.iloc[row][list(PRICES)].max()
        old = f"[{bars['low'].iloc[row]:g}, {bars['high'].iloc[row]:g}]"
        changes.append((int(lines[row]), f"{_place(bars, lines, part, row)}: range {old} became [{low:g}, {high:g}]"))
    prices = bars[list(PRICES)].to_numpy()
    bars = bars.assign(
        high=np.where(outside, prices.max(axis=1), bars["high"]), low=np.where(outside, prices.min(axis=1), bars["low"])
    )
    negative = bars["volume"].to_numpy() < 0
    for row in np.flatnonzero(negative).tolist():
        volume = bars["volume"].iloc[row]
        changes.append((int(lines[row]), f"{_place(bars, lines, part, row)}: volume {volume:g} became 0"))
    bars = bars.assign(volume=np.maximum(bars["volume"], 0.0))
    return bars, [text for _, text in sorted(changes)]


def _place(bars: pd.DataFrame, lines: NDArray[np.int64], part: Part, row: int) -> str:
    time = bars.index[row]
    what = "row" if part.lines is None else "line"
    return f"{what} {lines[row]}" + ("" if pd.isna(time) else f" ({time})")
