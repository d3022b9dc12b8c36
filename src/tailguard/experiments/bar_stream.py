"""Bars as they arrive: whole files of any kind, and lines of text from a pipe or a file that grows.

Lines are CSV, in any form that :func:`tailguard.market.load_bars` recognises, or a JSON object each. A JSON object holds
``time`` and either the fields of a bar or, for a portfolio, one such object per symbol::

    {"time": "2024-01-02", "open": 10, "high": 11, "low": 9.5, "close": 10.5, "volume": 1000}
    {"time": "2024-01-02", "AAPL": {"open": 185, ...}, "MSFT": {"open": 373, ...}}
"""

import json
import queue
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd

from tailguard.market.bars import DataError, DataWarning
from tailguard.market.columns import AmbiguousNumbers, Context
from tailguard.market.data import load_part, load_source, source_parts
from tailguard.market.files import FOREIGN, UNPACKERS, FileConfig, decode, recognise_layout
from tailguard.market.times import AmbiguousTimes

POLL_SECONDS = 0.2
# First bytes of files that cannot be read line by line: compressed, zip, Parquet, UTF-16, what other programs write.
WHOLE = (*UNPACKERS, b"PK\x03\x04", b"PAR1", b"\xff\xfe", b"\xfe\xff", *FOREIGN)
# Seconds in which the first lines arrive together, so that a file in a pipe is recognised by more than its first bar.
SETTLE_SECONDS = 0.2
# Limits of what is read from somebody's pipe: a line, the lines before the first bar, lines that wait, a file without lines.
LONGEST_LINE, MOST_HEADING, MOST_WAITING, LARGEST_WHOLE = 2**20, 10_000, 10_000, 2**28
LONGEST_SHOWN = 200  # characters of a line in an error


def file_chunks(
    source: str, config: FileConfig, keep: Sequence[str] = (), follow: bool = False, step: pd.Timedelta | None = None
) -> Iterator[pd.DataFrame]:
    """Yield tables of the bars of a source; at once, unless it is a file that grows.

    :param source: see :func:`tailguard.market.data.load_source`.
    :param config: what is known about it.
    :param keep: further columns to keep.
    :param follow: wait for more at its end.
    :param step: time between the bars, if it is known.
    """
    path = Path(source)
    if not follow:
        if path.is_file() and not path.read_bytes().strip():
            return
        yield load_source(source, config, keep, Context(step=step))
        return
    if len(source_parts(source)) > 1:
        raise DataError(f"{source}: several files cannot be followed; leave --follow out, or give one with a column of symbols")
    with path.open("rb") as stream:
        if stream.peek(4)[:4].startswith(WHOLE):
            raise DataError(f"{path}: a compressed or binary file cannot grow line by line; leave --follow out")
        yield from bar_chunks(stream, config, keep, follow=True, step=step)


def bar_chunks(
    stream: BinaryIO,
    config: FileConfig | None = None,
    keep: Sequence[str] = (),
    follow: bool = False,
    step: pd.Timedelta | None = None,
) -> Iterator[pd.DataFrame]:
    """Yield tables of the bars that have arrived, as soon as there is one.

    What the first bars tell about columns, times and numbers holds for all. While they can be read in two ways, such as
    01/02/2003, they wait for others that tell. Bars with the newest first are read when all are there.

    :param stream: a pipe or a file.
    :param config: what is known about it.
    :param keep: further columns to keep.
    :param follow: wait for more at the end, as for a file that grows; else the end of the stream is the end.
    :param step: time between the bars, if it is known.
    :raises DataError: with the line that is not a bar.
    """
    config, context = config or FileConfig(), Context(step=step)
    heading: list[str] | None = None
    waiting: list[str] = []
    newest_first = False
    for lines in _batches(stream, follow):
        if isinstance(lines, bytes):
            yield load_part(lines, config, keep, context)[0]
            continue
        waiting += lines
        if newest_first:
            continue
        if heading is None and not _is_object(waiting):
            heading = _heading(waiting, config)
            if heading is None and len(waiting) > MOST_HEADING:
                raise DataError(f"no bar in the first {MOST_HEADING:,} lines")
            if heading is None:
                continue
            waiting = waiting[len(heading) :]
        try:
            bars, later = load_part(_source(heading, waiting), config, keep, context)
        except (AmbiguousTimes, AmbiguousNumbers) as error:
            if len(waiting) > MOST_HEADING:
                raise
            warnings.warn(f"{error}; waiting for bars that tell", DataWarning, stacklevel=2)
            continue
        newest_first = context.last is None and later.newest_first
        if newest_first and follow:
            raise DataError("the newest bars come first, but a file grows at its end; leave --follow out")
        if not newest_first:
            context, waiting = later, []
            yield bars
    if len(waiting) > 1 or (waiting and (heading is not None or _is_object(waiting))):
        yield load_part(_source(heading, waiting), config, keep, context)[0]  # or say what is wrong with it


def polled(chunks: Iterator[pd.DataFrame], seconds: float = POLL_SECONDS) -> Iterator[pd.DataFrame | None]:
    """Yield the chunks as they arrive, and None every so often while there is none.

    :param chunks: may block; they are read in a thread.
    :param seconds: between two that are None.
    """
    arrived: queue.Queue[pd.DataFrame | Exception | None] = queue.Queue()

    def read() -> None:
        try:
            for chunk in chunks:
                arrived.put(chunk)
            arrived.put(None)
        except Exception as error:  # noqa: BLE001 (raised again where somebody waits, who would wait forever)
            arrived.put(error)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            entry = arrived.get(timeout=seconds)
        except queue.Empty:
            yield None
            continue
        if entry is None:
            return
        if isinstance(entry, Exception):
            raise entry
        yield entry


def _heading(lines: Sequence[str], config: FileConfig) -> list[str] | None:
    """Return the lines before the first bar, or None while there is no bar yet."""
    try:
        return list(lines[: recognise_layout("".join(lines), config).first])
    except DataError:
        return None


def _is_object(lines: Sequence[str]) -> bool:
    return lines[0].lstrip().startswith("{")


def _source(heading: Sequence[str] | None, lines: Sequence[str]) -> bytes | pd.DataFrame | dict[str, pd.DataFrame]:
    """Return lines as a source of bars; objects in JSON become a table, or one of each symbol."""
    if heading is not None or not _is_object(lines):
        return "".join([*(heading or ()), *lines]).encode()
    rows = [_parsed(line) for line in lines]
    symbols = sorted({key for row in rows for key, value in row.items() if isinstance(value, dict)})
    if not symbols:
        return pd.DataFrame(rows)
    return {
        symbol: pd.DataFrame([{"time": row.get("time"), **row[symbol]} for row in rows if symbol in row]) for symbol in symbols
    }


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a bar in JSON: {_shown(line)} ({error})") from None
    if not isinstance(row, dict) or "time" not in row:
        raise DataError(f"a bar must be a JSON object with a time, got {_shown(line)}")
    return row


def _shown(line: str) -> str:
    """Return the beginning of a line, for errors."""
    return repr(line.strip()[:LONGEST_SHOWN])


def _batches(stream: BinaryIO, follow: bool) -> Iterator[list[str] | bytes]:
    """Yield whole lines that are not empty, as many at a time as have arrived; or the bytes of a file that has no lines."""
    arrived: queue.Queue[bytes | OSError | DataError | None] = queue.Queue(MOST_WAITING)
    threading.Thread(target=_read, args=(stream, follow, arrived), daemon=True).start()
    first = True
    while True:
        batch = [arrived.get()]
        if first:
            time.sleep(SETTLE_SECONDS)
        while not arrived.empty() and len(batch) < MOST_WAITING:
            batch.append(arrived.get())
        for entry in batch:
            if isinstance(entry, OSError | DataError):
                raise entry
        content = [entry for entry in batch if isinstance(entry, bytes)]
        if first and content and content[0].startswith(WHOLE):
            size = sum(map(len, content))
            while batch[-1] is not None and size <= LARGEST_WHOLE:
                entry = arrived.get()
                if isinstance(entry, OSError | DataError):
                    raise entry
                batch.append(entry)
                size += len(entry or b"")
            if size > LARGEST_WHOLE:
                raise DataError(f"more than {LARGEST_WHOLE:,} bytes without an end: give a file with --bars")
            yield b"".join(entry for entry in batch if isinstance(entry, bytes))
            return
        text = [line for line in (decode(entry)[0] for entry in content) if line.strip()]
        if text:
            first = False
            yield text
        if batch[-1] is None:
            return


def _read(stream: BinaryIO, follow: bool, arrived: "queue.Queue[bytes | OSError | DataError | None]") -> None:
    unfinished, whole = b"", None
    while True:
        try:
            part = stream.readline(LONGEST_LINE)
        except OSError as error:  # the reader of the queue raises it: here nobody would see it
            arrived.put(error)
            return
        if whole is None and part:
            whole = part.startswith(WHOLE)
        if part.endswith(b"\n") or (part and whole) or (not part and unfinished and not follow):
            arrived.put(unfinished + part)
            unfinished = b""
        elif part:
            unfinished += part
            if len(unfinished) >= LONGEST_LINE:
                arrived.put(DataError(f"a line of more than {LONGEST_LINE:,} bytes is not a bar"))
                return
        elif follow:
            time.sleep(POLL_SECONDS)
        else:
            arrived.put(None)
            return
