"""Files as users have them: each is read right, or refused with one line that names the remedy."""

import bz2
import gzip
import io
import json
import lzma
import zipfile

import numpy as np
import pandas as pd
import pytest

from tailguard.market import DataError, DataWarning, FileConfig, load_bars, load_dataset
from tailguard.market.bars import symbols_of
from tailguard.market.data import load_source, read_bars

# Forty business days, prices with two decimals above a thousand, volumes in whole units.
DAYS = pd.bdate_range("2013-05-13", periods=40)
RNG = np.random.default_rng(0)
CLOSE = (1650 * np.exp(np.cumsum(RNG.normal(0, 0.01, 40)))).round(2)
OPEN = (CLOSE * np.exp(RNG.normal(0, 0.003, 40))).round(2)
HIGH = (np.maximum(OPEN, CLOSE) + RNG.uniform(0.5, 5, 40)).round(2)
LOW = (np.minimum(OPEN, CLOSE) - RNG.uniform(0.5, 5, 40)).round(2)
VOLUME = RNG.integers(1_000_000, 9_000_000, 40)
BARS = list(zip(DAYS, OPEN, HIGH, LOW, CLOSE, VOLUME, strict=True))
MINUTES = pd.date_range("2013-05-13 09:30", periods=40, freq="min")


def lines(row, header="", newest_first=False, times=DAYS, end="\n"):
    """The bars as text: `row` is a format string with t, o, h, l, c and v, or a function of them."""
    rows = [dict(zip("tohlcv", (t, *bar[1:]), strict=True)) for t, bar in zip(times, BARS, strict=True)]
    texts = [row(**fields) if callable(row) else row.format(**fields) for fields in rows]
    return "".join(f"{line}{end}" for line in [*header.splitlines(), *(reversed(texts) if newest_first else texts)])


def german(number, decimals=2):
    return f"{number:,.{decimals}f}".translate(str.maketrans(",.", ".,"))


PLAIN = "{o},{h},{l},{c},{v}"
OHLCV = "Open,High,Low,Close,Volume"
EPOCH = [int(day.timestamp()) for day in DAYS]


def binance(t, o, h, l, c, v):
    ms = int(t.timestamp() * 1000)
    return f"{ms},{o:.8f},{h:.8f},{l:.8f},{c:.8f},{v:.8f},{ms + 86399999},{v * c:.8f},{v % 999},{v / 2:.8f},{v * c / 2:.8f},0"


def zipped(text, name="bars.csv", also=None):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, text)
        if also is not None:
            archive.writestr(also, b"\x00\x05\x16\x07")
    return buffer.getvalue()


def parquet(frame):
    buffer = io.BytesIO()
    frame.to_parquet(buffer)
    return buffer.getvalue()


FRAME = pd.DataFrame({"Open": OPEN, "High": HIGH, "Low": LOW, "Close": CLOSE, "Volume": VOLUME}, index=DAYS.rename("Date"))
YFINANCE = "Price,Close,High,Low,Open,Volume\nTicker,SPY,SPY,SPY,SPY,SPY\nDate,,,,,"
YAHOO_ROW = "{t:%Y-%m-%d},{o:.6f},{h:.6f},{l:.6f},{c:.6f},{x:.6f},{v}"
TZ = pd.DatetimeIndex(DAYS).tz_localize("America/New_York")
BERLIN = pd.DatetimeIndex(DAYS).tz_localize("Europe/Berlin")
BID_AND_ASK = "time,bid_open,bid_high,bid_low,bid_close,volume,ask_open,ask_high,ask_low,ask_close"
SERIAL = lines(lambda t, **f: f"{(t - pd.Timestamp('1899-12-30')).days}," + PLAIN.format(**f), "Date," + OHLCV)
HISTDATA = "{t:%Y%m%d} {t:%H%M%S};{o};{h};{l};{c};{v}"

# name: (content, settings, words of the summary)
DAILY = {
    "plain": (lines("{t:%Y-%m-%d}," + PLAIN, "time,open,high,low,close,volume"), {}, "separated by commas"),
    "semicolon": (lines("{t:%Y-%m-%d};{o};{h};{l};{c};{v}", OHLCV.replace(",", ";").replace("Open", "Date;Open", 1)), {}, "semicolons"),
    "tab": (lines("{t:%Y-%m-%d}\t{o}\t{h}\t{l}\t{c}\t{v}", "Date\tOpen\tHigh\tLow\tClose\tVolume"), {}, "tabs"),
    "pipe": (lines("{t:%Y-%m-%d}|{o}|{h}|{l}|{c}|{v}", "Date|Open|High|Low|Close|Volume"), {}, "bars"),
    "spaces": (lines("{t:%Y-%m-%d}   {o}  {h}  {l}  {c}  {v}", "Date Open High Low Close Volume"), {}, "spaces"),
    "windows line ends": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV, end="\r\n"), {}, "commas"),
    "byte order mark": (b"\xef\xbb\xbf" + lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV).encode(), {}, "commas"),
    "utf-16": (lines("{t:%Y-%m-%d}\t{o}\t{h}\t{l}\t{c}\t{v}", "Date\tOpen\tHigh\tLow\tClose\tVolume").encode("utf-16"), {}, "utf-16"),
    "latin letters": (lines("{t:%Y-%m-%d}," + PLAIN + ",caf\u00e9", "Date," + OHLCV + ",Note").encode("cp1252"), {}, "cp1252"),
    "gzip": (gzip.compress(lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV).encode()), {}, "commas"),
    "bzip2": (bz2.compress(lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV).encode()), {}, "commas"),
    "xz": (lzma.compress(lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV).encode()), {}, "commas"),
    "zip": (zipped(lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV)), {}, "commas"),
    "parquet with an index": (parquet(FRAME), {}, "Parquet"),
    "parquet with a column": (parquet(FRAME.reset_index()), {}, "Parquet"),
    "yfinance, one ticker": (lines("{t:%Y-%m-%d},{c},{h},{l},{o},{v}", YFINANCE), {}, "yfinance"),
    "yfinance, Ticker.history": (
        "Date," + OHLCV + ",Dividends,Stock Splits\n"
        + "".join(f"{z},{o},{h},{l},{c},{v},0.0,0.0\n" for z, (_, o, h, l, c, v) in zip(DAYS, BARS, strict=True)),
        {},
        "yfinance",
    ),
    "Yahoo": (
        lines(lambda **f: YAHOO_ROW.format(x=f["c"] / 2, **f), "Date,Open,High,Low,Close,Adj Close,Volume"),
        {},
        "not used: the adjusted close (--adjusted uses it)",
    ),
    "unnamed index": (lines("{t:%Y-%m-%d}," + PLAIN, "," + OHLCV), {}, "commas"),
    "numbered rows": (
        "," + "date," + OHLCV + "\n" + "".join(f"{k},{line}\n" for k, line in enumerate(lines("{t:%Y-%m-%d}," + PLAIN).splitlines())),
        {},
        "commas",
    ),
    "Stooq": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV), {}, "commas"),
    "Stooq, bulk": (
        lines("SPY.US,D,{t:%Y%m%d},000000," + PLAIN + ",0", "<TICKER>,<PER>,<DATE>,<TIME>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<VOL>,<OPENINT>"),
        {},
        "Stooq",
    ),
    "Stooq, in Polish": (lines("{t:%Y-%m-%d}," + PLAIN, "Data,Otwarcie,Najwyzszy,Najnizszy,Zamkniecie,Wolumen"), {}, "Polish"),
    "Binance klines": (lines(binance), {}, "Binance, separated by commas, no header, times epoch ms"),
    "Binance klines in microseconds": (
        lines(lambda t, **f: binance(t, **f).replace(f"{int(t.timestamp()) * 1000}", f"{int(t.timestamp()) * 10**6}", 1)),
        {},
        "epoch us",
    ),
    "Binance, header of python-binance": (
        lines(
            lambda **f: ",".join(binance(**f).split(",")),
            "Open time,Open,High,Low,Close,Volume,Close time,Quote asset volume,Number of trades,Taker buy base,Taker buy quote,Ignore",
        ),
        {},
        "Binance",
    ),
    "Kraken": (lines(lambda t, **f: f"{int(t.timestamp())}," + (PLAIN + ",{n}").format(n=f["v"] % 99, **f)), {}, "Kraken"),
    "Kraken, from its API": (
        json.dumps({"error": [], "result": {"XXBTZUSD": [[t, str(o), str(h), str(l), str(c), str(c), str(v), 7] for t, (_, o, h, l, c, v) in zip(EPOCH, BARS, strict=True)], "last": 1}}, default=float),
        {},
        "Kraken",
    ),
    "CCXT as CSV": (lines(lambda t, **f: f"{int(t.timestamp() * 1000)}," + PLAIN.format(**f)), {}, "CCXT"),
    "CCXT as JSON": (
        json.dumps([[t * 1000, o, h, l, c, float(v)] for t, (_, o, h, l, c, v) in zip(EPOCH, BARS, strict=True)]), {}, "CCXT, JSON"
    ),
    "MetaTrader 4": (lines("{t:%Y.%m.%d},00:00," + PLAIN), {}, "MetaTrader 4"),
    "MetaTrader 5, daily": (
        lines("{t:%Y.%m.%d}\t{o}\t{h}\t{l}\t{c}\t{v}\t0\t12", "<DATE>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<TICKVOL>\t<VOL>\t<SPREAD>"),
        {},
        "MetaTrader 5",
    ),
    "Alpaca": (
        lines("SPY,{t:%Y-%m-%d} 00:00:00+00:00," + PLAIN + ",8123,{c}", "symbol,timestamp,open,high,low,close,volume,trade_count,vwap"),
        {},
        "Alpaca",
    ),
    "Alpaca, from its API": (
        json.dumps({"bars": [{"t": f"{t:%Y-%m-%dT00:00:00Z}", "o": o, "h": h, "l": l, "c": c, "v": int(v), "n": 5, "vw": c} for t, o, h, l, c, v in BARS]}),
        {},
        "JSON",
    ),
    "Interactive Brokers": (
        lines("{t:%Y%m%d}," + PLAIN + ",{c},100", "date,open,high,low,close,volume,average,barCount"), {}, "Interactive Brokers"
    ),
    "Polygon, from its API": (
        json.dumps({"ticker": "SPY", "results": [{"v": int(v), "vw": c, "o": o, "c": c, "h": h, "l": l, "t": t * 1000, "n": 9} for t, (_, o, h, l, c, v) in zip(EPOCH, BARS, strict=True)]}),
        {},
        "Polygon",
    ),
    "Polygon, flat file": (
        lines(lambda t, o, h, l, c, v: f"SPY,{v},{o},{c},{h},{l},{int(t.timestamp())}000000000,55", "ticker,volume,open,close,high,low,window_start,transactions"),
        {},
        "Polygon",
    ),
    "Dukascopy": (lines("{t:%d.%m.%Y} 00:00:00.000," + PLAIN, "Gmt time," + OHLCV), {}, "times %d.%m.%Y %H:%M:%S.%f"),
    "CryptoDataDownload": (
        lines(
            lambda t, **f: f"{int(t.timestamp())},{t:%Y-%m-%d 00:00:00},BTC/USD," + (PLAIN + ",{u}").format(u=f["v"] * 2, **f),
            "https://www.CryptoDataDownload.com\nunix,date,symbol,open,high,low,close,Volume BTC,Volume USD",
            newest_first=True,
        ),
        {},
        "newest first",
    ),
    "Investing.com": (
        lines(
            lambda t, o, h, l, c, v: f'"{t:%m/%d/%Y}","{c:,}","{o:,}","{h:,}","{l:,}","{v / 1000}K","-0.50%"',
            '"Date","Price","Open","High","Low","Vol.","Change %"',
            newest_first=True,
        ),
        {},
        "times %m/%d/%Y, newest first",
    ),
    "Nasdaq.com": (
        lines("{t:%m/%d/%Y},${c},{v},${o},${h},${l}", "Date,Close/Last,Volume,Open,High,Low", newest_first=True), {}, "newest first"
    ),
    "CoinMarketCap": (
        lines('"{t:%b %d, %Y}","{o:,}","{h:,}","{l:,}","{c:,}","{v:,}","1,234,567"', "Date,Open*,High,Low,Close**,Volume,Market Cap", True),
        {},
        "times %b %d, %Y",
    ),
    "Tiingo": (
        lines("{t:%Y-%m-%d}T00:00:00.000Z,{c},{h},{l},{o},{v},1,1,1,1,1,0.0,1.0", "date,close,high,low,open,volume,adjClose,adjHigh,adjLow,adjOpen,adjVolume,divCash,splitFactor"),
        {},
        "ISO 8601",
    ),
    "Alpha Vantage": (lines("{t:%Y-%m-%d}," + PLAIN, "timestamp,1. open,2. high,3. low,4. close,5. volume", newest_first=True), {}, "newest"),
    "TradingView": (lines(lambda t, **f: f"{int(t.timestamp())}," + (PLAIN + ",{v}").format(**f), "time,open,high,low,close,Volume,Volume MA"), {}, "epoch s"),
    "German bank": (
        lines(
            lambda t, o, h, l, c, v: f"{t:%d.%m.%Y};{german(o)};{german(h)};{german(l)};{german(c)};{german(v, 0)}",
            "Datum;Erster;Hoch;Tief;Schlusskurs;Stuecke",
        ).encode("cp1252"),
        {},
        "decimal comma",
    ),
    "French spreadsheet": (
        lines(
            lambda t, o, h, l, c, v: f"{t:%d/%m/%Y};" + ";".join(f"{x:,}".replace(",", "\u00a0").replace(".", ",") for x in (o, h, l, c, v)),
            "date;ouverture;plus haut;plus bas;cl\u00f4ture;volume",
        ),
        {},
        "times %d/%m/%Y, decimal comma",
    ),
    "dates without marks": (lines("{t:%Y%m%d}," + PLAIN, "Date," + OHLCV), {}, "times %Y%m%d"),
    "day first": (lines("{t:%d/%m/%Y}," + PLAIN, "Date," + OHLCV), {}, "times %d/%m/%Y"),
    "dashes": (lines("{t:%d-%m-%Y}," + PLAIN, "Date," + OHLCV), {}, "times %d-%m-%Y"),
    "month first, two digits": (lines("{t:%m/%d/%y}, {o}, {h}, {l}, {c}, {v}", "Date, Open, High, Low, Close, Volume"), {}, "%m/%d/%y"),
    "English month": (lines("{t:%d-%b-%y}," + PLAIN, "Date," + OHLCV), {}, "times %d-%b-%y"),
    "long English dates": (lines('"{t:%A, %B %d, %Y}",' + PLAIN, "Date," + OHLCV), {}, "times %A, %B %d, %Y"),
    "twelve-hour clock": (lines("{t:%m/%d/%Y} 12:00 AM," + PLAIN, "Date," + OHLCV), {}, "times %m/%d/%Y %I:%M %p"),
    "epoch seconds as decimals": (lines(lambda t, **f: f"{t.timestamp()}," + PLAIN.format(**f), "timestamp," + OHLCV), {}, "epoch s"),
    "newest first": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV, newest_first=True), {}, "newest first"),
    "separator at the end of each line": (lines("{t:%Y-%m-%d};{o};{h};{l};{c};{v};", "Date;Open;High;Low;Close;Volume"), {}, "semicolons"),
    "names in capitals with spaces": (lines("{t:%Y-%m-%d}," + PLAIN, " DATE , OPEN , HIGH , LOW , CLOSE , VOLUME "), {}, "commas"),
    "title and empty lines above": (lines("{t:%Y-%m-%d}," + PLAIN, "SPDR S&P 500\nprices in USD\n\nDate," + OHLCV), {}, "commas"),
    "no header": (lines("{t:%Y-%m-%d}," + PLAIN), {}, "no header"),
    "JSON lines": ("".join(json.dumps({"time": f"{t:%Y-%m-%d}", "open": o, "high": h, "low": l, "close": c, "volume": int(v)}) + "\n" for t, o, h, l, c, v in BARS), {}, "JSON"),
    "pandas to_json": (FRAME.to_json(date_format="iso"), {}, "JSON"),
    "pandas to_json by rows": (FRAME.to_json(orient="index", date_format="iso"), {}, "JSON"),
    "pandas to_json, split": (FRAME.to_json(orient="split", date_format="iso"), {}, "JSON"),
    "Alpha Vantage, from its API": (
        json.dumps({
            "Meta Data": {"1. Information": "Daily", "2. Symbol": "SPY"},
            "Time Series (Daily)": {f"{t:%Y-%m-%d}": {"1. open": str(o), "2. high": str(h), "3. low": str(l), "4. close": str(c), "5. volume": str(v)} for t, o, h, l, c, v in reversed(BARS)},
        }),
        {},
        "JSON, times ISO 8601, newest first",
    ),
    "Finnhub, from its API": (
        json.dumps({"c": list(CLOSE), "h": list(HIGH), "l": list(LOW), "o": list(OPEN), "s": "ok", "t": EPOCH, "v": VOLUME.tolist()}), {}, "JSON"
    ),
    "OKX, from its API": (
        json.dumps({"code": "0", "data": [[f"{t}000", str(o), str(h), str(l), str(c), str(v), str(v), "1", "1"] for t, (_, o, h, l, c, v) in reversed(list(zip(EPOCH, BARS, strict=True)))]}),
        {},
        "times epoch ms, newest first",
    ),
    "R, quantmod": (lines("{t:%Y-%m-%d}," + PLAIN + ",{c}", "Index,SPY.Open,SPY.High,SPY.Low,SPY.Close,SPY.Volume,SPY.Adjusted"), {}, "commas"),
    "yfinance, flattened names": (
        lines("{t:%Y-%m-%d},{c},{h},{l},{o},{v}", "Date," + ",".join(f"\"('{name}', 'SPY')\"" for name in ("Close", "High", "Low", "Open", "Volume"))),
        {},
        "commas",
    ),
    "yfinance, joined names": (lines("{t:%Y-%m-%d},{c},{h},{l},{o},{v}", "Date,Close_SPY,High_SPY,Low_SPY,Open_SPY,Volume_SPY"), {}, "commas"),
    "Tushare": (
        lines("000001.SZ,{t:%Y%m%d},{o},{h},{l},{c},1,1,0.1,{v},5", "ts_code,trade_date,open,high,low,close,pre_close,change,pct_chg,vol,amount", True),
        {},
        "newest first",
    ),
    "AkShare": (lines("{t:%Y-%m-%d},{o},{c},{h},{l},{v}", "\u65e5\u671f,\u5f00\u76d8,\u6536\u76d8,\u6700\u9ad8,\u6700\u4f4e,\u6210\u4ea4\u91cf"), {}, "commas"),
    "Investing.com, in German": (
        lines(
            lambda t, o, h, l, c, v: f'"{t:%d.%m.%Y}","{german(c)}","{german(o)}","{german(h)}","{german(l)}","{german(v / 1000, 3)}K","-0,50%"',
            '"Datum","Zuletzt","Er\u00f6ffn.","Hoch","Tief","Vol.","+/- %"',
            newest_first=True,
        ),
        {},
        "decimal comma",
    ),
    "Sharadar": (
        lines("SPY,{t:%Y-%m-%d}," + PLAIN + ",{c},{c},{t:%Y-%m-%d}", "ticker,date,open,high,low,close,volume,closeadj,closeunadj,lastupdated"),
        {},
        "the adjusted close (--adjusted uses it)",
    ),
    "Bybit": (
        lines(lambda t, **f: f"{int(t.timestamp())}000," + (PLAIN + ",1").format(**f), "startTime,openPrice,highPrice,lowPrice,closePrice,volume,turnover"), {}, "epoch ms"
    ),
    "MetaTrader 5, from Python": (
        lines(lambda t, **f: f"{int(t.timestamp())}," + (PLAIN + ",2,0").format(**f), "time,open,high,low,close,tick_volume,spread,real_volume"), {}, "MetaTrader 5"
    ),
    "NinjaTrader": (lines("{t:%Y%m%d};{o};{h};{l};{c};{v}"), {}, "unnamed columns, separated by semicolons, no header, times %Y%m%d"),
    "spreadsheet that names its separator": (lines("{t:%d.%m.%Y};{o};{h};{l};{c};{v}", "sep=;\nDate;Open;High;Low;Close;Volume"), {}, "semicolons"),
    "old Mac line ends": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV, end="\r"), {}, "commas"),
    "Bloomberg": (lines("{t:%m/%d/%Y}," + PLAIN, "Dates,PX_OPEN,PX_HIGH,PX_LOW,PX_LAST,PX_VOLUME"), {}, "commas"),
    "CoinAPI": (
        lines("{t:%Y-%m-%d}T00:00:00.0000000Z,{t:%Y-%m-%d}T23:59:59.0000000Z," + PLAIN + ",5", "time_period_start,time_period_end,price_open,price_high,price_low,price_close,volume_traded,trades_count"),
        {},
        "ISO 8601",
    ),
    "Nasdaq Nordic": (
        lines(
            lambda t, **f: f"{t:%Y-%m-%d};;;" + "{o};{h};{l};{c};1;{v};5;".format(**f).replace(".", ","),
            "sep=;\nDate;Bid;Ask;Opening price;High price;Low price;Closing price;Average price;Total volume;Turnover;",
            newest_first=True,
        ),
        {},
        "decimal comma, newest first",
    ),
    "Bombay Stock Exchange": (lines("{t:%d-%B-%Y}," + PLAIN, "Date,Open Price,High Price,Low Price,Close Price,Volume", True), {}, "%d-%B-%Y"),
    "National Stock Exchange of India": (
        lines('{t:%d-%b-%Y},EQ,"{o:,}","{h:,}","{l:,}","{c:,}","{v:,}"', '"Date ","series ","OPEN ","HIGH ","LOW ","close ","VOLUME "', True),
        {},
        "not used: series",
    ),
    "R, write.table": (lines('"{t:%Y-%m-%d}" {o} {h} {l} {c} {v}', '"Open" "High" "Low" "Close" "Volume"'), {}, "spaces"),
    "in Japanese": (lines("{t:%Y\u5e74%m\u6708%d\u65e5}," + PLAIN, "\u65e5\u4ed8,\u59cb\u5024,\u9ad8\u5024,\u5b89\u5024,\u7d42\u5024,\u51fa\u6765\u9ad8"), {}, "commas"),
    "in Swedish": (
        lines(
            lambda t, o, h, l, c, v: f"{t:%Y-%m-%d};" + ";".join(f"{x:,}".replace(",", " ").replace(".", ",") for x in (o, h, l, c, v)),
            "Datum;\u00d6ppningskurs;H\u00f6gstakurs;L\u00e4gstakurs;St\u00e4ngningskurs;Volym",
        ),
        {},
        "decimal comma",
    ),
    "in Swiss francs": (
        lines(
            lambda t, o, h, l, c, v: f"{t:%d.%m.%Y};" + ";".join(f"CHF {x:,}".replace(",", "\u2019") for x in (o, h, l, c)) + f";{v}",
            "Datum;Er\u00f6ffnung;Hoch;Tief;Schluss;Volumen",
        ),
        {},
        "times %d.%m.%Y",
    ),
    "in Brazilian reais": (
        lines(lambda t, o, h, l, c, v: f"{t:%d/%m/%Y};" + ";".join(f"R$ {german(x)}" for x in (o, h, l, c)) + f";{german(v, 0)}", "Data;Abertura;M\u00e1xima;M\u00ednima;Fechamento;Volume"),
        {},
        "decimal comma",
    ),
    "currencies behind the numbers": (lines("{t:%Y-%m-%d},{o} USD,{h} USD,{l} USD,{c} USD,{v}", "Date," + OHLCV), {}, "commas"),
    "formulas of a spreadsheet": (lines('="{t:%Y-%m-%d}",="{o}",="{h}",="{l}",="{c}",="{v}"', "Date," + OHLCV), {}, "commas"),
    "empty rows of a spreadsheet below": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV) + ",,,,,\n,,,,,\n", {}, "2 empty rows left out"),
    "a remark with as many commas above": (lines("{t:%Y-%m-%d}," + PLAIN, "# prices, in USD, of SPY, by, us, 2013\nDate," + OHLCV), {}, "commas"),
    "cells with a name and a value above": (lines("{t:%Y-%m-%d}," + PLAIN, "Symbol,SPY,,,,\nCurrency,USD,,,,\nDate," + OHLCV), {}, "commas"),
    "units below the header": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV + "\n,USD,USD,USD,USD,shares"), {}, "commas"),
    "zip of a Mac": (zipped(lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV), also="__MACOSX/._bars.csv"), {}, "commas"),
    "utf-16 without a mark": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV).encode("utf-16-be"), {}, "utf-16"),
    "volumes in millions, in lower case": (lines(lambda t, **f: "{t:%Y-%m-%d},{o},{h},{l},{c},{m:.6f}m".format(t=t, m=f["v"] / 1e6, **f), "Date," + OHLCV), {}, "commas"),
    "year, month and day without a century": (lines("{t:%y.%m.%d}," + PLAIN, "Date," + OHLCV), {"time_format": "%y.%m.%d"}, "%y.%m.%d"),
    "six digits": (lines("{t:%y%m%d}," + PLAIN, "Date," + OHLCV), {"time_format": "%y%m%d"}, "%y%m%d"),
    "days of a spreadsheet": (SERIAL, {"time_format": "excel"}, "days of a spreadsheet"),
    "Coinbase, from its API": (
        json.dumps([[t, l, h, o, c, float(v)] for t, (_, o, h, l, c, v) in reversed(list(zip(EPOCH, BARS, strict=True)))]),
        {"columns": {"time": 1, "low": 2, "high": 3, "open": 4, "close": 5, "volume": 6}},
        "newest first",
    ),
    "OANDA, from its API": (
        json.dumps({"candles": [{"time": f"{t:%Y-%m-%dT00:00:00}.000000000Z", "volume": int(v), "mid": {"o": str(o), "h": str(h), "l": str(l), "c": str(c)}} for t, o, h, l, c, v in BARS]}),
        {"columns": {"open": "mid.o", "high": "mid.h", "low": "mid.l", "close": "mid.c"}},
        "JSON",
    ),
    "bid and ask, one of them named": (
        lines("{t:%Y-%m-%d}," + PLAIN + ",1,2,1,2", BID_AND_ASK),
        {"columns": {"open": "bid_open", "high": "bid_high", "low": "bid_low", "close": "bid_close"}},
        "not used: ask_open",
    ),
    "columns named by the user": (
        lines("{t:%Y-%m-%d},{o},{h},{l},{c},{v}", "when,a,b,c,d,e"),
        {"columns": {"time": "when", "open": "a", "high": "b", "low": "c", "close": "d", "volume": "e"}},
        "commas",
    ),
    "columns counted by the user": (
        lines("{v},{c},{l},{h},{o},{t:%Y-%m-%d}"),
        {"columns": {"time": 6, "open": 5, "high": 4, "low": 3, "close": 2, "volume": 1}},
        "no header",
    ),
    "yfinance, Ticker.history in Berlin": (
        "Date," + OHLCV + ",Dividends,Stock Splits\n"
        + "".join(f"{z},{o},{h},{l},{c},{v},0.0,0.0\n" for z, (_, o, h, l, c, v) in zip(BERLIN, BARS, strict=True)),
        {},
        "times ISO 8601, local dates",
    ),
    "midnights with an offset behind": (lines("{t:%d.%m.%Y %H:%M} +0200," + PLAIN, "Date," + OHLCV), {}, "local dates"),
    "parquet of a zone": (parquet(FRAME.set_axis(BERLIN.rename("Date"))), {}, "local dates"),
    "dates of a zone that the user names": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV), {"timezone": "Asia/Tokyo"}, "local dates"),
    "Binance, months joined over the change to microseconds": (
        lines(lambda t, **f: binance(t, **f).replace(f"{int(t.timestamp())}000,", f"{int(t.timestamp())}000000,", 1 if t.month > 5 else 0)),
        {},
        "times epoch ms and us",
    ),
    "volumes in millions, in German": (
        lines(lambda t, o, h, l, c, v: f"{t:%d.%m.%Y};{german(o)};{german(h)};{german(l)};{german(c)};{german(v / 1e6, 6)} Mio", "Datum;Erster;Hoch;Tief;Schlusskurs;Stuecke"),
        {},
        "decimal comma",
    ),
    "volumes in billions": (lines(lambda t, **f: "{t:%Y-%m-%d},{o},{h},{l},{c},{m:.9f}bn".format(t=t, m=f["v"] / 1e9, **f), "Date," + OHLCV), {}, "commas"),
    "volumes in trillions": (lines(lambda t, **f: "{t:%Y-%m-%d},{o},{h},{l},{c},{m:.12f}T".format(t=t, m=f["v"] / 1e12, **f), "Date," + OHLCV), {}, "commas"),
    "format given by the user": (lines("{t:%y|%d|%m};" + "{o};{h};{l};{c};{v}", "Date;Open;High;Low;Close;Volume"), {"time_format": "%y|%d|%m"}, "%y|%d|%m"),
    "separator given by the user": (lines("{t:%Y-%m-%d}:{o}:{h}:{l}:{c}:{v}", "Date:Open:High:Low:Close:Volume"), {"separator": ":"}, "':'"),
}  # fmt: skip


def bytes_of(content):
    return content if isinstance(content, bytes) else content.encode()


@pytest.mark.parametrize(("content", "settings", "words"), DAILY.values(), ids=DAILY)
def test_daily_files_are_read_right(content, settings, words, tmp_path):
    path = tmp_path / "bars.txt"
    path.write_bytes(bytes_of(content))
    bars = load_bars(path, FileConfig(**settings))
    assert list(bars.index) == list(DAYS)
    expected = np.stack([OPEN, HIGH, LOW, CLOSE, VOLUME], axis=1)
    np.testing.assert_allclose(bars[["open", "high", "low", "close", "volume"]].to_numpy(), expected, rtol=1e-12)
    summary = read_bars(path, FileConfig(**settings)).summary()
    assert summary.startswith("40 bars of 1 day, 2013-05-13")
    assert words in summary
    assert "\n" not in summary


INTRADAY = {
    "HistData": (lines(HISTDATA, times=MINUTES), {}),
    "MetaTrader 4": (lines("{t:%Y.%m.%d},{t:%H:%M}," + PLAIN, times=MINUTES), {}),
    "MetaTrader 5": (
        lines("{t:%Y.%m.%d}\t{t:%H:%M:%S}\t{o}\t{h}\t{l}\t{c}\t{v}\t0\t3", "<DATE>\t<TIME>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<TICKVOL>\t<VOL>\t<SPREAD>", times=MINUTES),
        {},
    ),
    "Stooq": (
        lines("EURUSD,1,{t:%Y%m%d},{t:%H%M%S}," + PLAIN + ",0", "<TICKER>,<PER>,<DATE>,<TIME>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<VOL>,<OPENINT>", times=MINUTES),
        {},
    ),
    "date and time of day as numbers": (lines("{t:%Y%m%d},{t:%H%M}," + PLAIN, "date,time," + OHLCV, times=MINUTES), {}),
    "Interactive Brokers": (
        lines("{t:%Y%m%d  %H:%M:%S}," + PLAIN + ",1,1", "date,open,high,low,close,volume,average,barCount", times=MINUTES),
        {},
    ),
    "Interactive Brokers with a zone": (
        lines("{t:%Y%m%d %H:%M:%S} US/Eastern," + PLAIN, "date," + OHLCV, times=MINUTES - pd.Timedelta(hours=4)),
        {},
    ),
    "time zone given by the user": (
        lines("{t:%Y-%m-%d %H:%M}," + PLAIN, "Datetime," + OHLCV, times=MINUTES - pd.Timedelta(hours=4)),
        {"timezone": "America/New_York"},
    ),
    "offsets": (lines("{t:%Y-%m-%dT%H:%M:%S}+02:00," + PLAIN, "time," + OHLCV, times=MINUTES + pd.Timedelta(hours=2)), {}),
    "Dukascopy in local time": (
        lines("{t:%d.%m.%Y %H:%M:%S}.000 GMT+0200," + PLAIN, "Local time," + OHLCV, times=MINUTES + pd.Timedelta(hours=2)),
        {},
    ),
    "a date format given by the user": (
        lines("{t:%d/%m/%Y %I:%M:%S %p}," + PLAIN, "time," + OHLCV, times=MINUTES), {"time_format": "%d/%m/%Y"}
    ),
    "offsets that change with the season": (
        lines(lambda t, **f: f"{t:%d.%m.%Y %H:%M} {'+0100' if t.minute % 2 else '+0200'}," + PLAIN.format(**f), "time," + OHLCV,
              times=[t + pd.Timedelta(hours=1 if t.minute % 2 else 2) for t in MINUTES]),
        {},
    ),
    "UTC in words": (lines("{t:%Y-%m-%d %H:%M:%S} UTC," + PLAIN, "time," + OHLCV, times=MINUTES), {}),
    "ForexTester": (
        lines("EURUSD,{t:%Y%m%d},{t:%H%M%S}," + PLAIN, "<TICKER>,<DTYYYYMMDD>,<TIME>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<VOL>", times=MINUTES),
        {},
    ),
    "Finam": (
        lines("SBER;1;{t:%d/%m/%y};{t:%H:%M};{o};{h};{l};{c};{v}", "<TICKER>;<PER>;<DATE>;<TIME>;<OPEN>;<HIGH>;<LOW>;<CLOSE>;<VOL>", times=MINUTES),
        {},
    ),
    "Sierra Chart": (
        lines("{t:%Y/%m/%d}, {t:%H:%M:%S}.0, {o}, {h}, {l}, {c}, {v}, 3, 1, 2", "Date, Time, Open, High, Low, Last, Volume, NumberOfTrades, BidVolume, AskVolume", times=MINUTES),
        {},
    ),
    "SAS": (lines("{t:%d%b%Y:%H:%M:%S}," + PLAIN, "Date," + OHLCV, times=MINUTES), {}),
    "ISO 8601 without marks": (lines("{t:%Y%m%dT%H%M%S}," + PLAIN, "Date," + OHLCV, times=MINUTES), {}),
    "a zone in letters, named by the user": (
        lines("{t:%Y-%m-%d %H:%M:%S} EDT," + PLAIN, "Date," + OHLCV, times=MINUTES - pd.Timedelta(hours=4)), {"timezone": "America/New_York"}
    ),
    "days of a spreadsheet with their time": (
        lines(lambda t, **f: f"{(t - pd.Timestamp('1899-12-30')) / pd.Timedelta(days=1):.10f}," + PLAIN.format(**f), "Date," + OHLCV, times=MINUTES),
        {"time_format": "excel"},
    ),
    "midnights of another zone among other times": (
        lines("{t:%Y-%m-%dT%H:%M:%S}+09:30," + PLAIN, "time," + OHLCV, times=MINUTES + pd.Timedelta(hours=9.5)), {}
    ),
    "FirstRate": (lines("{t:%Y-%m-%d %H:%M:%S}," + PLAIN, times=MINUTES), {}),
    "fourteen digits": (lines("{t:%Y%m%d%H%M%S}," + PLAIN, "time," + OHLCV, times=MINUTES), {}),
    "twelve digits": (lines("{t:%Y%m%d%H%M}," + PLAIN, "time," + OHLCV, times=MINUTES), {}),
}  # fmt: skip


@pytest.mark.parametrize(("content", "settings"), INTRADAY.values(), ids=INTRADAY)
def test_minute_files_are_read_right(content, settings, tmp_path):
    path = tmp_path / "bars.csv"
    path.write_bytes(bytes_of(content))
    bars = load_bars(path, FileConfig(**settings))
    assert list(bars.index) == list(MINUTES)
    np.testing.assert_allclose(
        bars[["open", "close", "volume"]].to_numpy(), np.stack([OPEN, CLOSE, VOLUME], axis=1), rtol=1e-12
    )


AMBIGUOUS = "Date," + OHLCV + "\n01/02/2003,1,2,1,1.5,5\n02/02/2003,1,2,1,1.5,5\n03/02/2003,1,2,1,1.5,5\n"
REFUSED = {
    "days or months": (AMBIGUOUS, "'01/02/2003' is 1 February 2003 or 2 January 2003; say which with --time-format %d/%m/%Y or %m/%d/%Y"),
    "both days and months": (AMBIGUOUS.replace("02/02", "13/02").replace("03/02", "03/14"), "dates are mixed: '13/02/2003' has the day first"),
    "thousands or decimals": (
        "Date;Open;High;Low;Close\n" + "".join(f"2003-01-0{k};1,234;1,235;1,233;1,234\n" for k in range(1, 6)),
        "'1,234' is 1234 or 1.234; say which with --decimal . or --decimal ,",
    ),
    "points and commas": (
        "Date;Open;High;Low;Close\n" + "".join(f"2003-01-0{k};1,5;1,75;1.25;1,5\n" for k in range(1, 6)),
        "both points and commas as decimal marks; say which it is with --decimal",
    ),
    "months in another language": (lines('"{t:%d} maj {t:%Y}",' + PLAIN, "Date," + OHLCV), "'13 maj 2013' is not a time in any known format; months must be numbers or in English"),
    "times that a spreadsheet has rounded": (lines(lambda t, **f: f"{t.timestamp() * 1000:.6E}," + PLAIN.format(**f), "time," + OHLCV), "'1.368403E+12' is not a time in any known format; a spreadsheet has rounded it"),
    "hours or minutes": (lines(lambda t, **f: f"{t:%Y-%m-%d},{9 + t.day % 8}," + PLAIN.format(**f), "Date,Time," + OHLCV), "times of day up to 16 may be hours or minutes; write them as 09:00, or name the column Hour"),
    "a footer below years at the end": (lines("{t:%d/%m/%Y}," + PLAIN, "Date," + OHLCV) + "Source: my broker,,,,,\n", "line 42: 'Source: my broker' is not a time; `tailguard data repair`"),
    "closes of several symbols": (lines("{t:%Y-%m-%d},{c},{o},{v},{h}", "Date,AAPL,msft,Goog,IBM"), "if each column is the price of a symbol, give each a file, or --columns open=AAPL,high=AAPL,low=AAPL,close=AAPL trades one"),
    "Feather": (b"ARROW1\0\0" + bytes(range(64)), "is a Feather file; save it as Parquet or CSV"),
    "an array of NumPy": (b"\x93NUMPY\x01\x00" + bytes(128), "is an array of NumPy, whose columns have no names; save it as CSV"),
    "arrays of NumPy": (zipped(b"\x93NUMPY", "close.npy", also="open.npy"), "holds arrays of NumPy (close.npy, open.npy)"),
    "yfinance without any prices": (
        "Price,Close,High,Low,Open,Volume,Close,High,Low,Open,Volume\nTicker,A,A,A,A,A,B,B,B,B,B\nDate,,,,,,,,,,\n2013-05-13,,,,,,,,,,\n2013-05-14,,,,,,,,,,\n",
        "no rows",
    ),
    "days of a spreadsheet": (SERIAL, "41407 is not a time: numbers must be 20130513 or seconds (ms, us, ns) since 1970; --time-format excel"),
    "six digits": (lines("{t:%y%m%d}," + PLAIN, "Date," + OHLCV), "130513 is not a time: numbers must be 20130513 or seconds (ms, us, ns) since 1970; others need --time-format"),
    "years in front or behind": (lines("{t:%y.%m.%d}," + PLAIN, "Date," + OHLCV), "in '13.05.14' the year may be first or last; say which with --time-format %y.%m.%d or %d.%m.%y"),
    "a zone in letters": (lines("{t:%Y-%m-%d %H:%M} EST," + PLAIN, "Date," + OHLCV), "'2013-05-13 00:00 EST' has a zone in letters; say which with --timezone"),
    "bonds in 32nds": (lines(lambda t, v, **f: f"{t:%Y-%m-%d},112'16,112'317,112'010,112'20,{v}", "Date," + OHLCV), "\"112'16\" are in 32nds of a point; write them as decimals"),
    "bid and ask": (lines("{t:%Y-%m-%d}," + PLAIN + ",1,2,1,2", BID_AND_ASK.replace("volume", "bid_volume")), "prices of bid and ask; say which with --columns open=bid_open,high=bid_high,low=bid_low,close=bid_close"),
    "a row of no symbol": (lines("A,{t:%Y-%m-%d}," + PLAIN + "\nB,{t:%Y-%m-%d}," + PLAIN, "symbol,date," + OHLCV).replace("B,2013-05-20", ",2013-05-20"), "line 13: the symbol is missing"),
    "Cyrillic in a code page": (lines("{t:%d.%m.%Y};{o};{h};{l};{c};{v}", "\u0414\u0430\u0442\u0430;\u041e;\u041c;\u041c;\u0417;\u041e").encode("cp1251"), "--columns open=NAME, or save the file as UTF-8"),
    "a tar archive": (b"bars.csv".ljust(257, b"\0") + b"ustar\0", "is a tar archive; unpack it"),
    "an old workbook": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "is an Excel workbook; save the sheet as CSV"),
    "no close": (lines("{t:%Y-%m-%d},{o},{h},{l},{v}", "Date,Open,High,Low,Volume"), "no column for close among Date, Open, High, Low, Volume; name them with --columns close=NAME"),
    "only closes": (lines("{t:%Y-%m-%d},{c}", "Date,Close"), "fewer than four prices; bars need open, high, low and close: --columns time=Date,open=Close,high=Close"),
    "only times": (lines("{t:%Y-%m-%d}", "Date"), "no rows of a time and four prices found"),
    "prices that are missing": (
        lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV).replace(f"{OPEN[7]},{HIGH[7]},{LOW[7]},{CLOSE[7]}", "null,null,null,null"),
        "line 9 (2013-05-22 00:00:00): open, high, low, close are missing; `tailguard data repair`",
    ),
    "no header, another order": (lines("{t:%Y-%m-%d},{v},{c},{l},{h},{o}"), "no header, and columns 2 to 5 are not open, high, low, close; name them with --columns time=1,open=2"),
    "names that nobody knows": (lines("{t:%Y-%m-%d}," + PLAIN, "x,a,b,c1,d,e"), "no column for open, high, low, close among x, a, b, c1, d, e"),
    "two closes": (lines("{t:%Y-%m-%d},{o},{h},{l},{c},{c}", "Date,Open,High,Low,Close,close"), "two columns are named 'Close': say which with --columns close=NUMBER"),
    "a missing cell among numbers with marks": (
        lines('{t:%Y-%m-%d},"{o:,}","{h:,}","{l:,}","{c:,}",{v}', "Date," + OHLCV).replace(f'"{OPEN[7]:,}"', ""),
        "line 9 (2013-05-22 00:00:00): open is missing",
    ),
    "a missing time": (lines("{t:%d.%m.%Y}," + PLAIN, "Date," + OHLCV).replace("22.05.2013", ""), "line 9: the time is missing; `tailguard"),
    "a cell over two lines": (
        lines('{t:%Y-%m-%d},"{o:,}","{h:,}","{l:,}","{c:,}",{v}', "Date," + OHLCV).replace(f'"{OPEN[7]:,}"', '"some\nthing"'),
        "is not a number",
    ),
    "jumbled": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV, times=[*DAYS[:5], DAYS[20], *DAYS[5:20], *DAYS[21:]]), "line 8 (2013-05-20 00:00:00): its time is before that of the bar above"),
    "a line twice": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV, times=[*DAYS[:5], DAYS[4], *DAYS[6:]]), "line 7 (2013-05-17 00:00:00): its time repeats"),
    "one bad bar": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV).replace(f"{LOW[7]}", "0"), "line 9 (2013-05-22 00:00:00): low 0 is not positive; `tailguard data repair`"),
    "a word among the prices": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV).replace(f"{LOW[7]}", "halt"), "line 9 (2013-05-22 00:00:00): low 'halt' is not a number"),
    "a footer": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV) + "Source: somebody\n", "line 42: 'Source: somebody' is not a time; `tailguard data repair`"),
    "ragged": (lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV) + "2013-07-08,1,2,3,4,5,6,7,8\n", "Expected 6 fields in line 42, saw 9"),
    "a page of the web": ("<!DOCTYPE html>\n<html><body>Too many requests</body></html>\n", "no rows of a time and four prices found"),
    "a binary file": (bytes(range(256)) * 4, "is no table"),
    "a workbook": (zipped("x", "xl/workbook.xml"), "is an Excel workbook; save the sheet as CSV"),
    "half of a gzip": (gzip.compress(lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV).encode())[:-20], "cannot be read"),
    "JSON of something else": ('{"message": "limit exceeded"}', "holds no list of bars"),
    "broken JSON": ('[[1, 2, 3', "is neither JSON nor an object per line"),
    "empty": ("", "is empty"),
    "blank": ("\n \n", "is empty"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_other_files_are_refused_with_one_line_that_names_the_remedy(content, message, tmp_path):
    path = tmp_path / "bars.csv"
    path.write_bytes(bytes_of(content))
    with pytest.raises(DataError) as error:
        load_bars(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "header",
    [
        '"Datum","Zuletzt","Er\u00f6ffn.","Hoch","Tief","Vol.","+/- %"',
        '"Date","Dernier","Ouv."," Plus Haut","Plus Bas","Vol.","Variation %"',
        '"Fecha","\u00daltimo","Apertura","M\u00e1ximo","M\u00ednimo","Vol.","% var."',
        '"Data","Ultimo","Apertura","Massimo","Minimo","Vol.","Var. %"',
        '"Data","\u00daltimo","Abertura","M\u00e1xima","M\u00ednima","Vol.","Var%"',
    ],
)
def test_the_names_of_other_languages_are_known(header, tmp_path):
    path = tmp_path / "bars.csv"
    row = '"{t:%d.%m.%Y}","{c}","{o}","{h}","{l}","1,5M","-0,50%"'
    path.write_text(lines(lambda **f: row.format(**{k: german(x) if k in "ohlc" else x for k, x in f.items()}), header, True))
    bars = load_bars(path)
    np.testing.assert_allclose(bars[["open", "high", "low", "close"]], np.stack([OPEN, HIGH, LOW, CLOSE], axis=1))
    assert (bars["volume"] == 1_500_000).all()


def test_whole_prices_without_a_header_are_no_clocks(tmp_path):
    path = tmp_path / "bars.csv"
    path.write_text("".join(f"2013-05-{day},12,14,11,13,{day}00\n" for day in range(13, 25)))
    assert load_bars(path)["open"].tolist() == [12.0] * 12
    with pytest.raises(DataError, match="'shut' is no role of a column; they are time, open, high"):
        load_bars(path, FileConfig(columns={"shut": 5}))


def test_clocks_that_are_set_back_need_a_zone(tmp_path):
    path = tmp_path / "bars.csv"
    times = pd.date_range("2023-11-05 03:00", periods=40, freq="30min", tz="UTC")
    path.write_text(lines("{t:%Y-%m-%d %H:%M}," + PLAIN, "time," + OHLCV, times=times.tz_convert("America/New_York")))
    with pytest.raises(
        DataError, match=r"line 8 .2023-11-05 01:00:00.: its time is before .*clocks were set back\? --timezone"
    ):
        load_bars(path)
    assert list(load_bars(path, FileConfig(timezone="America/New_York")).index) == list(times.tz_localize(None))


def test_a_time_that_clocks_show_once_is_the_first_after_the_bar_before(tmp_path):
    path = tmp_path / "bars.csv"
    hours = pd.date_range("2023-11-05 01:00", periods=40, freq="4h")  # 21:00 and 01:00 in New York, where 01:00 comes twice
    path.write_text(
        lines("{t:%Y-%m-%d %H:%M}," + PLAIN, "time," + OHLCV, times=hours.tz_localize("UTC").tz_convert("America/New_York"))
    )
    assert list(load_bars(path, FileConfig(timezone="America/New_York")).index) == list(hours)


def test_hours_that_are_named_so_are_hours(tmp_path):
    path = tmp_path / "bars.csv"
    hours = pd.date_range("2013-05-13", periods=40, freq="h")
    path.write_text(lines("{t:%Y-%m-%d},{t.hour}," + PLAIN, "Date,Hour," + OHLCV, times=hours))
    assert list(load_bars(path).index) == list(hours)


def test_years_of_two_digits_are_never_in_the_future(tmp_path):
    path = tmp_path / "bars.csv"
    days = pd.bdate_range("1962-01-15", periods=40)
    path.write_text(lines("{t:%m/%d/%y}," + PLAIN, "Date," + OHLCV, times=days))
    assert list(load_bars(path).index) == list(days)
    path.write_text(lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV, times=days + pd.DateOffset(years=200)))
    with pytest.warns(DataWarning, match=r"line 2 .2162-01-15 00:00:00.: 40 bars are in the future.* --time-format"):
        load_bars(path)


def test_a_file_that_says_nothing_with_a_wrong_format_is_told_what_a_format_is(tmp_path):
    path = tmp_path / "bars.csv"
    path.write_text(lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV))
    with pytest.raises(DataError, match=r"--time-format '%Q': .*bad directive"):
        load_bars(path, FileConfig(time_format="%Q"))


def test_daily_bars_of_two_zones_share_their_dates(tmp_path):
    for name, zone in (("us", TZ), ("eu", BERLIN)):
        (tmp_path / f"{name}.csv").write_text("Date," + OHLCV + "\n" + "".join(f"{z},1,2,1,2,3\n" for z in zone))
    bars = load_source(f"{tmp_path}/us.csv+{tmp_path}/eu.csv")
    assert list(bars.index) == list(DAYS)
    assert bars.notna().all().all()
    (tmp_path / "later.csv").write_text("Date," + OHLCV + "\n" + "".join(f"{t} 07:00,1,2,1,2,3\n" for t in DAYS.date))
    with pytest.warns(DataWarning, match="us has 39 bars where the others have some, and 0 of them at the same time"):
        load_source(f"{tmp_path}/us.csv+{tmp_path}/later.csv")


def test_an_ambiguity_is_resolved_by_the_user(tmp_path):
    path = tmp_path / "bars.csv"
    path.write_text(AMBIGUOUS)
    assert list(load_bars(path, FileConfig(time_format="%d/%m/%Y")).index.day) == [1, 2, 3]
    assert list(load_bars(path, FileConfig(time_format="%m/%d/%Y")).index.month) == [1, 2, 3]
    path.write_text("Date;Open;High;Low;Close\n" + "".join(f"2003-01-0{k};1,233;1,235;1,233;1,234\n" for k in range(1, 6)))
    assert load_bars(path, FileConfig(decimal=","))["close"].iloc[0] == 1.234
    assert load_bars(path, FileConfig(decimal="."))["close"].iloc[0] == 1234.0


@pytest.mark.parametrize(("row", "header"), [("{t:%Y-%m-%d},{c}", "Date,Close"), ("{t:%Y-%m-%d};{c};{v}", "Date;Close;Volume")])
def test_one_price_a_day_is_traded_at_that_price_on_request(row, header, tmp_path):
    path = tmp_path / "fund.csv"
    path.write_text(lines(row, header))
    bars = load_bars(
        path, FileConfig(columns={"time": "Date", "open": "Close", "high": "Close", "low": "Close", "close": "Close"})
    )
    assert list(bars.index) == list(DAYS)
    np.testing.assert_array_equal(bars[["open", "high", "low", "close"]], np.stack([CLOSE] * 4, axis=1))


def test_several_symbols_in_one_file_are_a_portfolio(tmp_path):
    long, wide = tmp_path / "long.csv", tmp_path / "wide.csv"
    other = "\n".join(line.replace("SPY", "QQQ") for line in lines("SPY,{t:%Y-%m-%d}," + PLAIN).splitlines())
    long.write_text(lines("SPY,{t:%Y-%m-%d}," + PLAIN, "symbol,date," + OHLCV) + other + "\n")
    header = "Price,Close,Close,High,High,Low,Low,Open,Open,Volume,Volume\nTicker,QQQ,SPY,QQQ,SPY,QQQ,SPY,QQQ,SPY,QQQ,SPY\nDate,,,,,,,,,,"
    wide.write_text(lines("{t:%Y-%m-%d},{c},{c},{h},{h},{l},{l},{o},{o},{v},{v}", header))
    flat = tmp_path / "flat.csv"
    names = [f"{ticker}_{field}" for ticker in ("QQQ", "SPY") for field in OHLCV.split(",")]
    flat.write_text(lines("{t:%Y-%m-%d}," + PLAIN + "," + PLAIN, ",".join(["Date", *names])))
    slashed = tmp_path / "slashed.csv"
    slashed.write_text(flat.read_text().replace("_", "/").replace("SPY", "BTC-USD").replace("QQQ", "BRK.B"))
    indexed = tmp_path / "indexed.parquet"
    pd.concat({"SPY": FRAME, "QQQ": FRAME}, names=["symbol", "date"]).to_parquet(indexed)
    assert set(symbols_of(load_bars(slashed))) == {"BTC-USD", "BRK.B"}
    rows = [{"t": f"{t:%Y-%m-%dT00:00:00Z}", "o": o, "h": h, "l": l, "c": c, "v": int(v)} for t, o, h, l, c, v in BARS]
    alpaca, ccxt = tmp_path / "alpaca.json", tmp_path / "ccxt.json"
    alpaca.write_text(json.dumps({"bars": {"SPY": rows, "QQQ": rows}, "next_page_token": None}))
    listed = [[t * 1000, o, h, l, c, float(v)] for t, (_, o, h, l, c, v) in zip(EPOCH, BARS, strict=True)]
    ccxt.write_text(json.dumps({"SPY": listed, "QQQ": listed}))
    for path in (long, wide, flat, indexed, alpaca, ccxt):
        bars = load_bars(path)
        assert set(symbols_of(bars)) == {"SPY", "QQQ"}
        np.testing.assert_array_equal(bars["SPY"]["close"], CLOSE)
        np.testing.assert_array_equal(bars["QQQ"]["low"], LOW)


def test_a_ticker_that_could_not_be_downloaded_is_named_and_left_out(tmp_path):
    path = tmp_path / "wide.csv"
    header = "Price,Close,Close,High,High,Low,Low,Open,Open,Volume,Volume\nTicker,FAIL,SPY,FAIL,SPY,FAIL,SPY,FAIL,SPY,FAIL,SPY\nDate,,,,,,,,,,"
    path.write_text(lines("{t:%Y-%m-%d},,{c},,{h},,{l},,{o},,{v}", header))
    assert symbols_of(load_bars(path)) == ["SPY"]
    assert read_bars(path).summary().endswith("no bars of FAIL: it is left out")


def test_a_table_of_yfinance_with_fields_above_tickers_is_read():
    columns = pd.MultiIndex.from_product([FRAME.columns, ["SPY"]])
    bars = load_bars(FRAME.set_axis(columns, axis=1))
    np.testing.assert_array_equal(bars["SPY"]["close"], CLOSE)


def test_adjusted_prices_are_used_on_request(tmp_path):
    path = tmp_path / "bars.csv"
    path.write_text(lines(lambda **f: YAHOO_ROW.format(x=f["c"] / 2, **f), "Date,Open,High,Low,Close,Adj Close,Volume"))
    bars = load_bars(path, FileConfig(adjusted=True))
    np.testing.assert_allclose(bars["close"], CLOSE / 2, rtol=1e-8)
    np.testing.assert_allclose(bars["open"], OPEN / 2, rtol=1e-8)
    assert "prices adjusted" in read_bars(path, FileConfig(adjusted=True)).summary()
    with pytest.raises(DataError, match="no column holds them"):
        load_bars(FRAME, FileConfig(adjusted=True))


def test_columns_that_are_not_used_are_named_and_kept_on_request(tmp_path):
    path = tmp_path / "bars.csv"
    path.write_text(lines("{t:%Y-%m-%d}," + PLAIN + ",1.5,up", "Date," + OHLCV + ",sentiment,flag"))
    assert "not used: sentiment, flag" in read_bars(path).summary()
    assert (load_bars(path, keep=["sentiment"])["sentiment"] == 1.5).all()
    with pytest.raises(DataError, match=r"no column 'mood' for features\.columns; the file has Date, Open"):
        load_bars(path, keep=["mood"])
    with pytest.raises(DataError, match="flag 'up' is not a number"):
        load_bars(path, keep=["flag"])


def test_missing_volumes_count_as_nothing_and_are_said_aloud(tmp_path):
    path = tmp_path / "bars.csv"
    path.write_text(lines("{t:%Y-%m-%d}," + PLAIN, "Date," + OHLCV).replace(f"{VOLUME[3]}", "").replace(f"{VOLUME[4]}", "null"))
    bars = load_bars(path)
    assert list(bars["volume"].iloc[3:6]) == [0, 0, VOLUME[5]]
    assert "2 missing volumes count as 0" in read_bars(path).summary()


@pytest.mark.filterwarnings("ignore::tailguard.market.DataWarning")
@pytest.mark.parametrize("name", ["nasdaq-1d", "eurusd-1h"])
def test_every_format_of_times_gives_the_shipped_bars(name, tmp_path):
    bars = load_dataset(name)
    path = tmp_path / "bars.csv"
    for form in ("%d/%m/%Y %H:%M", "%m-%d-%Y %H:%M:%S", "%Y.%m.%d %H:%M", "%b %d, %Y, %I:%M %p", "%Y%m%d %H%M%S"):
        bars.set_axis(bars.index.strftime(form)).rename_axis("time").to_csv(path, sep=";")
        pd.testing.assert_frame_equal(load_bars(path), bars, check_freq=False)
