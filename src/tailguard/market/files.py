"""Files as they are: compression, encoding, separator and header rows are recognised; the cells stay as they stand.

:mod:`tailguard.market.columns` then says which column is what.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from tailguard.market.bars import PRICES, DataError

SUFFIXES = (".csv", ".txt", ".tsv", ".json", ".jsonl", ".parquet", "any of them with .gz, .bz2, .xz or .zip")
UNPACKERS = {b"\x1f\x8b": gzip.decompress, b"BZh": bz2.decompress, b"\xfd7zXZ": lzma.decompress}
# First bytes of what other programs write, and what to do.
FOREIGN = {
    b"\xd0\xcf\x11\xe0": "an Excel workbook; save the sheet as CSV",
    b"ARROW1": "a Feather file; save it as Parquet or CSV",
    b"FEA1": "a Feather file; save it as Parquet or CSV",
    b"\x93NUMPY": "an array of NumPy, whose columns have no names; save it as CSV",
    b"\x89HDF": "an HDF5 file; save the table as Parquet or CSV",
    b"\x80\x04\x95": "a pickle, which is not read because it can run code; save the table as Parquet or CSV",
    b"\x80\x05\x95": "a pickle, which is not read because it can run code; save the table as Parquet or CSV",
}
# In this order, because a comma may also be a decimal mark, and a space may be anywhere.
SEPARATORS = {"\t": "tabs", ";": "semicolons", "|": "bars", ",": "commas", " ": "spaces"}
SAMPLE_LINES = 200
FEWEST_COLUMNS = 5
FEWEST_NUMBERS = 4
UNREADABLE = (ValueError, OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile)  # pandas' errors of parsers are ValueErrors
# Of currencies: codes in letters, of which dollars have one before their sign, and signs; they stand before or behind a number.
CODES = r"(?:(?:US|HK|[RAC])(?=\$)|kr\.?|zł|Fr\.|USDT|USDC|USD|EUR|GBP|CHF|JPY|CNY|INR|BRL|CAD|AUD|HKD|SEK|NOK|DKK|PLN)"
SIGNS = "$€£¥₹₽₩"
# Of large numbers, in any case: 1.5K, 1.1bn, 1,1 Mrd.
SCALES = {
    **{"k": 1e3, "tsd": 1e3, "m": 1e6, "mn": 1e6, "mm": 1e6, "mio": 1e6, "mln": 1e6},
    **{"b": 1e9, "bn": 1e9, "bln": 1e9, "mrd": 1e9, "mld": 1e9, "t": 1e12, "tn": 1e12, "%": 0.01},
}
SCALE = rf"(?i:{'|'.join(sorted(SCALES, key=len, reverse=True))})\.?"
SPACES = " \u00a0\u202f"
APOSTROPHES = "'\u2019"
NUMBER = re.compile(
    rf"[-+]?\s*{CODES}?[{SIGNS}]?\s*-?[\d.,{APOSTROPHES}{SPACES}]*\d[\d.,]*(?:[eE][-+]?\d+)?"
    rf"\s*(?:{SCALE}|{CODES})?[{SIGNS}]?"
)
# As spreadsheets write large numbers, of which they keep a few digits: 1.673827E+12.
EXPONENT = re.compile(r"\d(?:[.,]\d+)?[eE]\+?(?:09|1\d)")
DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{8}")
# Where the rows are in the JSON of those who nest them.
JSON_LISTS = ("results", "bars", "data", "candles", "result", "values")


class FileConfig(BaseModel):
    """The form of the files of ``data``. It is recognised; these keys say what cannot be, or what was taken wrongly.

    :param columns: which column of the file is what, such as ``{time: "Gmt time", close: Last}``; a number counts columns from
        1, for files without a header.
    :param separator: between the columns: a character, or ``tab``. None recognises commas, semicolons, tabs, bars and spaces.
    :param decimal: decimal mark, ``.`` or ``,``. None recognises it.
    :param time_format: of the times, as in ``strptime``: ``%d/%m/%Y %H:%M``; ``excel`` for the days that spreadsheets count.
        None recognises it, unless it is ambiguous.
    :param timezone: of times that name none, such as ``America/New_York``. None takes them as they are.
    :param adjusted: trade prices adjusted for dividends: open, high, low and close are multiplied by adjusted close over close.
        Needs such a column.
    :param calendar: code of an exchange, such as ``XNYS`` or ``XLON``, whose holidays are then told from missing bars. Needs
        ``tailguard[calendars]``. None knows weekends and short holidays only by their regularity.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    columns: dict[str, str | int] = {}
    separator: Annotated[str, Field(min_length=1, max_length=3)] | None = None
    decimal: Literal[".", ","] | None = None
    time_format: Annotated[str, Field(min_length=2)] | None = None
    timezone: Annotated[str, Field(min_length=1)] | None = None
    adjusted: bool = False
    calendar: Annotated[str, Field(min_length=1)] | None = None


@dataclass(frozen=True, eq=False)
class RawTable:
    """The cells of a file.

    :param cells: numbers where whole columns are plain numbers, else text; unnamed columns have empty names.
    :param lines: ``[T]`` line of the file that each row stands in, counted from 1; None for files without lines.
    :param headers: the header rows, from the top; none for a file without a header.
    :param facts: what was recognised, in words.
    :param separator: between the cells of a text; None for files without one.
    """

    cells: pd.DataFrame
    lines: NDArray[np.int64] | None
    headers: tuple[tuple[str, ...], ...]
    facts: tuple[str, ...]
    separator: str | None = None


def read_file(path: Path, config: FileConfig) -> RawTable:
    """Read the cells of a file.

    :raises DataError: naming the file, when it is not a table.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give a file ending in {', '.join(SUFFIXES)}")
    try:
        return read_bytes(path.read_bytes(), config)
    except UNREADABLE as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: {reason if isinstance(error, DataError) else f'cannot be read ({reason})'}") from error


def read_bytes(content: bytes, config: FileConfig) -> RawTable:
    """Read the cells of what a file holds; compression and kind are told by its first bytes."""
    content = unpacked(content)
    if content.startswith(b"PAR1"):
        return _read_parquet(content)
    if content[257:262] == b"ustar":
        raise DataError("is a tar archive; unpack it")
    foreign = next((words for start, words in FOREIGN.items() if content.startswith(start)), None)
    if foreign is not None:
        raise DataError(f"is {foreign}")
    text, encoding = decode(content)
    if not text.strip():
        raise DataError("is empty")
    if text.count("\x00") or sum(character < " " and character not in "\t\r\n" for character in text[:1000]) > 10:
        raise DataError(f"is no table; give a file ending in {', '.join(SUFFIXES)}")
    facts = () if encoding == "utf-8" else (encoding,)
    if text.lstrip()[0] in "{[":
        return _read_json(text, facts)
    return _read_text(text, config, facts)


def unpacked(content: bytes) -> bytes:
    """Return what is compressed inside of a file, or the file as it is."""
    unpack = next((unpack for start, unpack in UNPACKERS.items() if content.startswith(start)), None)
    if unpack is not None:
        return unpacked(unpack(content))
    return unpacked(_only_member(content)) if content.startswith(b"PK\x03\x04") else content


def decode(content: bytes) -> tuple[str, str]:
    """Return the text of bytes, and its encoding: by its byte order mark, else UTF-8, else Windows-1252."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16"), "utf-16"
    if b"\x00" in content[1:200:2]:
        return content.decode("utf-16-le"), "utf-16"
    if len(content) > 1 and not any(content[:200:2]):
        return content.decode("utf-16-be"), "utf-16"
    try:
        return content.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace"), "cp1252"


def _only_member(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        # macOS adds what its file system knows about a file.
        names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
        if any(name.startswith("xl/") for name in names):
            raise DataError("is an Excel workbook; save the sheet as CSV")
        if names and all(name.endswith(".npy") for name in names):
            raise DataError(f"holds arrays of NumPy ({', '.join(names)}), whose columns have no names; save a table as CSV")
        if len(names) != 1:
            raise DataError(f"holds {len(names)} files, but a zip must hold one; unpack it")
        return archive.read(names[0])


def _read_parquet(content: bytes) -> RawTable:
    frame = pd.read_parquet(io.BytesIO(content))
    return from_frame(frame, ("Parquet",))


def from_frame(frame: pd.DataFrame, facts: tuple[str, ...] = ()) -> RawTable:
    """Return a DataFrame as cells; an index that is more than row numbers becomes its first column."""
    if isinstance(frame.index, pd.MultiIndex):  # of symbol and time
        frame = frame.reset_index(names=[str(name or "") for name in frame.index.names], allow_duplicates=True)
    elif not isinstance(frame.index, pd.RangeIndex):
        name = "time" if isinstance(frame.index, pd.DatetimeIndex) else str(frame.index.name or "")
        index = frame.index.to_series(index=pd.RangeIndex(len(frame)))
        frame = frame.reset_index(drop=True)
        frame.insert(0, name, index, allow_duplicates=True)
    names = tuple(str(column) for column in frame.columns)
    return RawTable(frame.set_axis(list(names), axis=1), None, (names,), facts)


def _read_json(text: str, facts: tuple[str, ...]) -> RawTable:
    """Read a list of bars, each an object or a list; such a list under one of the usual keys; or an object per line."""
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError:
        try:
            value = [json.loads(line) for line in text.splitlines() if line.strip()]
        except json.JSONDecodeError as error:
            raise DataError(f"is neither JSON nor an object per line ({error.msg})") from None
    while isinstance(value, dict):
        table = _json_columns(value)
        if table is not None:
            return from_frame(table, (*facts, "JSON"))
        symbols = _json_symbols(value)
        if symbols is not None:
            value = symbols
            break
        inner = [value[key] for key in JSON_LISTS if key in value] or [
            entry for entry in value.values() if isinstance(entry, list | dict) and entry
        ]
        if not inner:
            raise DataError(f"holds no list of bars under {', '.join(JSON_LISTS)}")
        value = inner[-1] if isinstance(inner[0], dict) else inner[0]  # what describes the bars comes before them
    if not value:
        raise DataError("holds no bars")
    if all(isinstance(row, list) for row in value):
        cells = pd.DataFrame(value)
        for k in cells.columns:
            if _numeric(cells[k]):
                cells[k] = pd.to_numeric(cells[k])
        return RawTable(cells.set_axis([""] * cells.shape[1], axis=1), None, (), (*facts, "JSON"))
    if not all(isinstance(row, dict) for row in value):
        raise DataError("is a list of neither objects nor lists")
    nested = any(isinstance(entry, dict) for entry in value[0].values())
    cells = pd.json_normalize(value) if nested else pd.DataFrame(value)
    return RawTable(cells, None, (tuple(map(str, cells.columns)),), (*facts, "JSON"))


def _json_symbols(value: dict[str, Any]) -> list[Any] | None:
    """Return the bars of several symbols as rows that name theirs, where each has a list of its own, as Alpaca writes them."""
    lists = {symbol: rows for symbol, rows in value.items() if symbol not in JSON_LISTS and isinstance(rows, list) and rows}
    if len(lists) < 2 or len(lists) < len([entry for entry in value.values() if entry]):
        return None
    if all(isinstance(row, dict) and len(row) >= FEWEST_COLUMNS for rows in lists.values() for row in rows):
        return [{"symbol": symbol, **row} for symbol, rows in lists.items() for row in rows]
    if all(isinstance(row, list) and len(row) >= FEWEST_COLUMNS for rows in lists.values() for row in rows):
        return [[symbol, *row] for symbol, rows in lists.items() for row in rows]
    return None


def _json_columns(value: dict[str, Any]) -> pd.DataFrame | None:
    """Return a table that is written by columns, or by times, as pandas and Alpha Vantage do; None if it is something else."""
    entries = list(value.values())
    if {"columns", "index", "data"} <= set(value):  # pandas, orient="split"
        return pd.DataFrame(value["data"], index=pd.Index(value["index"]).rename("time"), columns=value["columns"])
    lists = {name: entry for name, entry in value.items() if isinstance(entry, list)}
    if len(lists) >= FEWEST_COLUMNS and len({len(entry) for entry in lists.values()}) == 1:
        return pd.DataFrame(lists)
    if len(entries) >= FEWEST_COLUMNS and all(isinstance(entry, dict) for entry in entries):
        by_time = len(entries[0]) < len(entries) and not isinstance(next(iter(entries[0].values()), None), dict)
        table = pd.DataFrame.from_dict(value, orient="index") if by_time else pd.DataFrame(value)
        numbers = {name: pd.to_numeric(column) if _numeric(column) else column for name, column in table.items()}
        return pd.DataFrame(numbers).rename_axis("time")
    return None


def _numeric(column: pd.Series) -> bool:
    return bool(pd.to_numeric(column, errors="coerce").notna().all())


class Layout(NamedTuple):
    """The layout of a text file.

    :param separator: between the cells.
    :param first: lines before the first row of bars.
    :param headers: the header rows among them.
    """

    separator: str
    first: int
    headers: tuple[tuple[str, ...], ...]


def recognise_layout(text: str, config: FileConfig) -> Layout:
    """Find the separator, the lines before the bars, and the header rows among them."""
    # A row has four prices, unless one column was named as several of them.
    named = {config.columns[role] for role in PRICES if role in config.columns}
    numbers = len(named) if set(PRICES) <= set(config.columns) else FEWEST_NUMBERS
    separator = config.separator
    lines = [line.removesuffix("\r") for line in text.split("\n", SAMPLE_LINES)[:SAMPLE_LINES]]
    separator = {"tab": "\t", "\\t": "\t"}.get(separator or "", separator)
    candidates = [separator] if separator else list(SEPARATORS)
    for candidate in candidates:
        rows = [_cells(line, candidate) for line in lines]
        width = Counter(len(row) for row in rows if len(row) > numbers).most_common(1)
        filled = sum(bool(line.strip()) for line in lines)
        if not width or (separator is None and width[0][1] < 0.5 * filled):
            continue
        first = next((k for k, row in enumerate(rows) if len(row) == width[0][0] and _is_data(row, numbers)), None)
        if first is None:
            continue
        header_rows = [_padded(row, rows[first]) for row in rows[:first] if 0 <= width[0][0] - len(row) <= 1 and any(row)]
        return Layout(candidate, first, tuple(tuple(row) for row in header_rows[-3:]))
    if any(_is_narrow(line, candidate) for candidate in candidates for line in filter(str.strip, lines[-2:])):
        remedy = "--columns time=Date,open=Close,high=Close,low=Close,close=Close trades at the one price that is known"
        raise DataError(f"each row has a time and fewer than four prices; bars need open, high, low and close: {remedy}")
    tried = f"separated by {separator!r}" if separator else f"with {', '.join(SEPARATORS.values())} between them"
    raise DataError(f"no rows of a time and four prices found, {tried}; name the separator with --separator")


def _cells(line: str, separator: str) -> list[str]:
    if separator == " ":
        return line.split()
    return [cell.strip() for cell in next(csv.reader([line], delimiter=separator), [])]


def _is_narrow(line: str, separator: str) -> bool:
    """Return true for a date and one to three numbers."""
    date, *numbers = _cells(line, separator) or [""]
    return bool(DATE.match(date)) and 1 <= len(numbers) < FEWEST_COLUMNS - 1 and all(NUMBER.fullmatch(cell) for cell in numbers)


def _padded(header: list[str], row: list[str]) -> list[str]:
    """Return a header as long as its rows: one cell short, it leaves out an index, or a separator at the end of each line."""
    missing = [""] * (len(row) - len(header))
    return [*header, *missing] if not row[-1] else [*missing, *header]


def _is_data(row: list[str], numbers: int) -> bool:
    """Return true for a row with at least so many numbers."""
    return sum(bool(NUMBER.fullmatch(cell)) for cell in row) >= numbers


def _read_text(text: str, config: FileConfig, facts: tuple[str, ...]) -> RawTable:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if '="' in text:  # ="2013-05-13", so that spreadsheets leave it as it is
        text = re.sub(r'="([^"\n]*)"', r'"\1"', text)
    layout = recognise_layout(text, config)
    # 1.234 is a number of another size where the decimal mark is a comma: if one may be, no cell is a number yet.
    commas = config.decimal == "," or (config.decimal is None and layout.separator != "," and re.search(r"\d,\d", text))
    content = text.encode()  # pandas would hold text in four bytes per character
    first_row = _cells(text.split("\n", layout.first + 1)[layout.first], layout.separator)
    # Times cannot be rounded: such columns stay as they stand.
    rounded = [k for k, cell in enumerate(first_row) if EXPONENT.fullmatch(cell)]
    cells = _parsed(content, layout, str if commas else dict.fromkeys(rounded, str))
    lines = _filled_lines(content)
    lines = lines[lines > layout.first]
    if len(lines) != len(cells):
        lines = np.arange(layout.first + 1, layout.first + 1 + len(cells))  # a quoted cell spans lines
    names = list(layout.headers[-1]) if layout.headers else [""] * cells.shape[1]
    words = SEPARATORS.get(layout.separator, repr(layout.separator))
    facts = (*facts, f"separated by {words}", *(() if layout.headers else ("no header",)))
    return RawTable(cells.set_axis(names, axis=1), lines, layout.headers, facts, layout.separator)


def _filled_lines(content: bytes) -> NDArray[np.int64]:
    """Return the numbers of the lines with more than spaces, counted from 1."""
    characters = np.frombuffer(content, np.uint8)
    ends = np.append(np.flatnonzero(characters == ord("\n")), len(content))
    starts = np.append(0, ends[:-1] + 1)
    filled = starts < len(content)
    for line in np.flatnonzero(characters[starts[filled]] <= ord(" ")).tolist():
        filled[line] = bool(content[starts[line] : ends[line]].strip())
    return np.asarray(np.flatnonzero(filled) + 1, dtype=np.int64)


def _parsed(content: bytes, layout: Layout, types: type[str] | dict[int, type[str]]) -> pd.DataFrame:
    try:
        return pd.read_csv(
            io.BytesIO(content),
            sep=r"\s+" if layout.separator == " " else layout.separator,
            header=None,
            skiprows=layout.first,
            skipinitialspace=True,
            dtype=types,
            index_col=False,
            low_memory=False,
        )
    except pd.errors.ParserError as error:
        raise DataError(f"cannot be read ({' '.join(str(error).split())})") from None
