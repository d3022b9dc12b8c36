"""Bars that arrive as lines of text: CSV with a heading, or a JSON object per line; from a pipe, or a file that grows.

A JSON object holds ``time`` and either the fields of a bar or, for a portfolio, one such object per symbol::

    {"time": "2024-01-02", "open": 10, "high": 11, "low": 9.5, "close": 10.5, "volume": 1000}
    {"time": "2024-01-02", "AAPL": {"open": 185, ...}, "MSFT": {"open": 373, ...}}
"""

import io
import json
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import pandas as pd

from tailguard.market.data import DataError, load_bars

POLL_SECONDS = 0.2


def bar_chunks(stream: TextIO, follow: bool = False) -> Iterator[pd.DataFrame]:
    """Tables of the bars that have arrived, as soon as there is one.

    :param stream: text, line by line.
    :param follow: wait for more at the end, as for a file that grows; else the end of the stream is the end.
    :raises DataError: naming the line that is no bar.
    """
    heading: str | None = None
    for lines in _batches(stream, follow):
        if heading is None and not lines[0].lstrip().startswith("{"):
            heading, lines = lines[0], lines[1:]
        if lines:
            yield _table(heading, lines)


def _table(heading: str | None, lines: list[str]) -> pd.DataFrame:
    if heading is not None:
        return load_bars(pd.read_csv(io.StringIO("".join([heading, *lines]))))
    rows = [_parsed(line) for line in lines]
    symbols = sorted({key for row in rows for key, value in row.items() if isinstance(value, dict)})
    if not symbols:
        return load_bars(pd.DataFrame(rows))
    tables = {one: pd.DataFrame([{"time": row.get("time"), **row[one]} for row in rows if one in row]) for one in symbols}
    return load_bars(tables)


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"not a bar in JSON: {line.strip()!r} ({error.msg})") from None
    if not isinstance(row, dict) or "time" not in row:
        raise DataError(f"a bar must be a JSON object with a time, got {line.strip()!r}")
    return row


def _batches(stream: TextIO, follow: bool) -> Iterator[list[str]]:
    """Whole lines that are not empty, as many at a time as have arrived."""
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
