"""The features of the market in an observation: scale-free, causal, float32.

No column contains a price level: multiplying all prices by a constant changes nothing. Row t is a function of the bars up
to and including t, which the tests check by replacing everything after t with garbage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Self

import numpy as np
import pandas as pd
import talib
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator

from tailguard.market.bars import COLUMNS, PRICES, iterate_symbols
from tailguard.market.plugins import function_features
from tailguard.market.relevance import relevance_weights
from tailguard.validation import require

Floats = NDArray[np.float64]
Window = Annotated[int, Field(ge=2, le=10_000)]
# Below this a volatility or a range is that of a price that does not move.
SMALLEST = 1e-8
A_MONDAY = pd.Timestamp("1970-01-05")


class FeatureConfig(BaseModel):
    """Look-backs of the features, in bars.

    :param horizons: look-backs of the returns, each divided by the volatility that is usual over it. Each adds a column; the
        longest of all look-backs is what a series loses at its start.
    :param volatility_window: look-back of the volatilities; 21 daily bars are a month. Shorter ones react faster, with more
        noise.
    :param slow_window: look-back of the scale of returns, the volume z-score and the volatility ratio; 63 daily bars are a
        quarter.
    :param lags: number of earlier single-bar returns, each a column: what a feed-forward policy knows of the last bars. 0 is
        off; 10 daily bars are two weeks.
    :param drawdown_window: look-back of the high that the drawdown is measured from. As for all look-backs, a long one costs
        training bars: between training and test as many are left out.
    :param rsi: look-back of the relative strength index; 14 is usual, shorter ones swing more.
    :param macd: fast, slow and signal look-backs of the moving average convergence divergence; 12, 26 and 9 are usual.
    :param atr: look-back of the average true range; 14 is usual.
    :param bollinger: look-back of the Bollinger bands; 20 is usual.
    :param cci: look-back of the commodity channel index; 20 is usual.
    :param calendar: add the hour as a point on a circle and a column for each day of the week. There is no day of the year: a
        few years hold too few of each to learn from, and agents use it to learn the past by heart.
    :param relevance: t-statistic from which on a column speaks up: columns that covary less than this with the next return in
        the training rows reach the agent at a tenth of their size, the others at 1 - (relevance / t)^2. 2 to 3 are usual; less
        lets more noise in; 0 gives all columns the same size.
    :param exclude: features to leave out: names, or patterns such as ``[rsi, volatility_*]``; ``["*"]`` leaves only `columns`.
    :param timeframes: longer bars whose features are added, such as ``[1W]`` or ``[4h, 1D]``, made of the same bars. A long bar
        counts once the next one has begun. Their look-backs are in long bars, so that they cost a long start of the series.
    :param columns: further columns of the file that are features as they stand, such as ``[sentiment, vix]``; the training rows
        give their scale. A value must be known at the close of its bar; a missing one keeps the last known.
    :param functions: features by functions of installed packages, see :mod:`tailguard.market.plugins`: their names and their
        look-backs in bars, such as ``{my_momentum: 20}``. The training rows give their scale.
    :param clip: features are cut to [-clip, clip]; 10 keeps all but errors in the data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    horizons: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = (1, 2, 5, 10, 21, 63)
    volatility_window: Window = 21
    slow_window: Window = 63
    lags: Annotated[int, Field(ge=0, le=1000)] = 10
    drawdown_window: Window = 63
    rsi: Window = 14
    macd: tuple[Window, Window, Window] = (12, 26, 9)
    atr: Window = 14
    bollinger: Window = 20
    cci: Window = 20
    calendar: bool = True
    relevance: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 2.5
    exclude: tuple[str, ...] = ()
    timeframes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    functions: dict[str, Annotated[int, Field(ge=1, le=10_000)]] = {}
    clip: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 10.0

    @field_validator("horizons")
    @classmethod
    def _different(cls, horizons: tuple[int, ...]) -> tuple[int, ...]:
        if not horizons or len(set(horizons)) != len(horizons):
            raise ValueError(f"horizons must be different numbers, at least one; got {list(horizons)}")
        return horizons

    @field_validator("columns")
    @classmethod
    def _not_of_the_bar(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        for column in columns:
            require(
                column.lower() not in COLUMNS, "columns", column, f"none of {', '.join(COLUMNS)}: they are in every feature"
            )
        return columns

    @field_validator("timeframes")
    @classmethod
    def _lengths_of_time(cls, timeframes: tuple[str, ...]) -> tuple[str, ...]:
        for timeframe in timeframes:
            try:
                positive = pd.Timedelta(timeframe) > pd.Timedelta(0)
            except ValueError:
                positive = False
            require(positive, "timeframes", timeframe, "lengths of time, such as 4h, 1D or 1W")
        return timeframes

    @field_validator("macd")
    @classmethod
    def _fast_before_slow(cls, macd: tuple[int, int, int]) -> tuple[int, int, int]:
        if macd[0] >= macd[1]:
            raise ValueError(f"macd is (fast, slow, signal) with fast < slow; got {list(macd)}")
        return macd


@dataclass(frozen=True)
class FeatureSet:
    """A matrix of features with the times and names of its rows and columns.

    :param values: float32 ``[T, F]``; the first `warmup` rows are 0 where a look-back was not full.
    :param names: names of the columns; with several symbols each starts with its symbol.
    :param time: times of the rows.
    :param warmup: rows at the start that lack history and must not be acted on.
    :param instruments: N of a pool: `values` are those of N instruments over the same times, one after another, ``[N * T, F]``.
    """

    values: NDArray[np.float32]
    names: tuple[str, ...]
    time: pd.DatetimeIndex
    warmup: int
    instruments: int = 1

    def __len__(self) -> int:
        """The number of times, T."""
        return len(self.time)

    def __getitem__(self, rows: slice) -> "FeatureSet":
        """A contiguous part of the times."""
        start, _, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"features are sliced with step 1, got {step}")
        time = self.time[rows]
        values = self.by_instrument()[:, rows].reshape(-1, len(self.names))
        return replace(self, values=values, time=time, warmup=min(max(self.warmup - start, 0), len(time)))

    def by_instrument(self) -> NDArray[np.float32]:
        """Return the values as ``[N, T, F]``."""
        return self.values.reshape(self.instruments, len(self), -1)


class FeatureScaler:
    """Mean, standard deviation and relevance of features, learnt from the training span and from nothing else.

    The instruments of a pool have means and standard deviations of their own, ``[N, F]``, and the relevance in common.

    :param start: first time of the training span.
    :param end: the time before which it ends.
    """

    def __init__(self, start: pd.Timestamp | str, end: pd.Timestamp | str) -> None:
        self.start, self.end = _naive_utc(start), _naive_utc(end)
        if not self.start < self.end:
            raise ValueError(f"the training span must start before it ends, got {self.start} to {self.end}")
        self.names: tuple[str, ...] = ()
        self.mean: Floats = np.empty(0)
        self.std: Floats = np.empty(0)
        self.weight: Floats = np.empty(0)

    @property
    def factor(self) -> Floats:
        """The factor of each column, after its mean was subtracted."""
        return self.weight / self.std

    def fit(
        self,
        features: FeatureSet,
        earned: Floats | None = None,
        relevance: float = 0.0,
        held_out: NDArray[np.bool_] | None = None,
        sizes: Floats | None = None,
    ) -> Self:
        """Fit to rows that must all lie inside the training span.

        :param features: the rows.
        :param earned: ``[rows, assets]`` returns that follow each, see :func:`tailguard.market.relevance.fill_returns`.
        :param relevance: as in :class:`FeatureConfig`; 0 gives all columns the same weight.
        :param held_out: ``[rows]``, true for rows to leave out.
        :param sizes: ``[rows, assets]`` sizes of these returns, for an agent that is averse to tails: a column matters if it
            says something about either.
        :raises ValueError: when a row lies outside, or when the scaler has been fitted before.
        """
        if self.names:
            raise ValueError("this scaler is fitted already; make a new one for new data")
        outside = (features.time < self.start) | (features.time >= self.end)
        if outside.any():
            raise ValueError(
                f"refusing to fit on {int(outside.sum())} rows outside the training span [{self.start}, {self.end}), "
                f"the first at {features.time[outside][0]}"
            )
        used = np.arange(len(features)) >= features.warmup
        used &= True if held_out is None else ~held_out
        if used.sum() < 2:
            raise ValueError(
                f"{len(features.values)} bars to train on are too few: the look-backs take the first {features.warmup}; "
                "give more bars, or shorten those of features.*"
            )
        rows = features.by_instrument()[:, used].astype(np.float64)  # [N, n, F]
        mean, std = rows.mean(axis=1, keepdims=True), rows.std(axis=1, keepdims=True)
        std = np.where(std > SMALLEST, std, 1.0)  # a constant column stays constant, at 0
        self.names = features.names
        self.mean, self.std = (part[0, 0] if len(part) == 1 else part[:, 0] for part in (mean, std))
        self.weight = np.ones(len(self.names))
        if earned is not None and relevance > 0.0:
            followed = [earned] if sizes is None else [earned, sizes]
            self.weight = np.max([relevance_weights((rows - mean) / std, part[used], relevance) for part in followed], axis=0)
        return self

    def transform(self, features: FeatureSet) -> FeatureSet:
        """Standardise the columns and weight them; warm-up rows stay 0."""
        if features.names != self.names:
            raise ValueError(_difference(self.names, features.names))
        known = self.mean.size // len(self.names)
        if features.instruments != known:
            raise ValueError(f"fitted on {known} instruments, asked to transform {features.instruments}")
        mean, factor = (part.reshape(known, 1, -1) for part in (self.mean, self.factor))
        values = ((features.by_instrument() - mean) * factor).astype(np.float32)
        values[:, : features.warmup] = 0.0
        return replace(features, values=values.reshape(features.values.shape))

    def state_dict(self) -> dict[str, Any]:
        """Return the span, names, means, standard deviations and weights, as JSON values."""
        return {
            "start": self.start.isoformat(),
            "end": self.end.isoformat(),
            "names": list(self.names),
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "weight": self.weight.tolist(),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """Build the scaler that returned `state`."""
        scaler = cls(state["start"], state["end"])
        scaler.names = tuple(state["names"])
        scaler.mean, scaler.std = np.array(state["mean"]), np.array(state["std"])
        scaler.weight = np.array(state.get("weight", np.ones_like(scaler.std)))  # files of earlier versions have none
        return scaler


def _difference(fitted: Sequence[str], given: Sequence[str]) -> str:
    """Return in a sentence how the features of some bars differ from those that a scale was fitted on."""
    known, other = (list(dict.fromkeys(name.partition(":")[0] for name in names if ":" in name)) for names in (fitted, given))
    if known != other:
        unnamed = ["a single symbol"]
        symbols, these = ", ".join(known or unnamed), ", ".join(other or unnamed)
        return f"fitted on bars of {symbols}, but these are of {these}: give the same symbols"
    missing, extra = [name for name in fitted if name not in given], [name for name in given if name not in fitted]
    return f"fitted on other features: of these bars {missing or 'none'} are missing and {extra or 'none'} are new"


def _naive_utc(time: pd.Timestamp | str) -> pd.Timestamp:
    stamp = pd.Timestamp(time)
    return stamp if stamp.tzinfo is None else stamp.tz_convert("UTC").tz_localize(None)


def build_features(bars: pd.DataFrame, config: FeatureConfig | None = None) -> FeatureSet:
    """Compute the features of every bar.

    A symbol's features are computed on the bars that it has and carried forward over the bars that it lacks.

    :param bars: a table from :func:`tailguard.market.load_bars`, one symbol or several.
    :param config: look-backs; the defaults suit daily and hourly bars.
    """
    config = config or FeatureConfig()
    index = pd.DatetimeIndex(bars.index)
    parts = []
    for symbol, table in iterate_symbols(bars):
        prices = table[list(PRICES)].to_numpy(dtype=np.float64)
        there = (np.isfinite(prices) & (prices > 0)).all(axis=1)
        columns = _all_features(table[there], config).reindex(index).ffill()
        parts.append(columns.add_prefix(f"{symbol}:") if symbol else columns)
    if config.calendar:
        parts.append(_calendar(index))
    table = pd.concat(parts, axis=1)
    if not table.shape[1]:
        raise ValueError(f"features.exclude {list(config.exclude)} leaves no feature; take out a pattern, or name columns")
    # Column by column: a copy of the whole table would be most of the memory that a long series needs.
    finite = np.ones(len(table), bool)
    for name in table.columns:
        finite &= np.isfinite(table[name].to_numpy())
    warmup = int(np.argmax(finite)) if finite.any() else len(table)
    broken = np.flatnonzero(~finite[warmup:])
    if len(broken):
        row = table.iloc[warmup + broken[0]]
        raise ValueError(f"feature {row.index[~np.isfinite(row)][0]!r} is not finite at {row.name}")
    values = np.zeros(table.shape, np.float32)
    for k, name in enumerate(table.columns):
        known = table[name].to_numpy()[warmup:]
        plain = str(name).rpartition(":")[2]
        own = plain in config.columns or plain.partition(".")[0] in config.functions  # their scale is not known yet
        values[warmup:, k] = known if own else known.clip(-config.clip, config.clip)
    return FeatureSet(values, tuple(table.columns), index, warmup)


def build_pooled_features(bars: pd.DataFrame, config: FeatureConfig | None = None) -> FeatureSet:
    """Compute the features of each symbol as if there were no others, for a policy that trades any one of them.

    :param bars: a table from :func:`tailguard.market.load_bars`, with several symbols.
    :param config: look-backs.
    :returns: a pool; its warm-up is that of the symbol that starts last.
    """
    parts = [build_features(table, config) for _, table in iterate_symbols(bars)]
    warmup = max(part.warmup for part in parts)
    values = np.stack([part.values for part in parts])
    values[:, :warmup] = 0.0
    return replace(parts[0], values=values.reshape(-1, values.shape[2]), warmup=warmup, instruments=len(parts))


def _all_features(bars: pd.DataFrame, config: FeatureConfig) -> pd.DataFrame:
    """Return the features of one symbol's own bars, of longer bars made of them, and of further columns of its file."""
    columns = _symbol_features(bars, config)
    for timeframe in config.timeframes:
        longer, bucket = _longer_bars(bars, pd.Timedelta(timeframe))
        known = _symbol_features(longer, config).shift(1).reindex(bucket).set_axis(bars.index)
        columns = columns.join(known.add_prefix(f"{timeframe} "))
    names = [str(name) for name in columns.columns]
    for pattern in config.exclude:
        require(any(fnmatchcase(name, pattern) for name in names), "features.exclude", pattern, f"one of {', '.join(names)}")
    columns = columns[[name for name in names if not any(fnmatchcase(name, pattern) for pattern in config.exclude)]]
    for function in config.functions:
        computed = function_features(bars, function)
        taken = [str(name) for name in computed.columns if name in columns]
        require(not taken, "features.functions", function, f"another name: a feature {taken[:1]} exists")
        columns = columns.join(computed)
    for column in config.columns:
        require(column in bars.columns, "features.columns", column, f"one of the columns {', '.join(bars.columns)} of the bars")
        require(column not in columns, "features.columns", column, "another name: a feature of that name exists")
        columns = columns.assign(**{column: bars[column].astype(np.float64).replace([np.inf, -np.inf], np.nan).ffill()})
    return columns


def _longer_bars(bars: pd.DataFrame, length: pd.Timedelta) -> tuple[pd.DataFrame, pd.DatetimeIndex]:
    """Return bars of a given length, counted from a Monday, and for every bar the start of the long one that it is part of.

    The first long bar is left out, since it may have begun before the series: features must not depend on where that starts.
    """
    index = pd.DatetimeIndex(bars.index)
    shortest = (index[1:] - index[:-1]).min() if len(index) > 1 else pd.Timedelta(0)
    require(length > shortest, "features.timeframes", str(length), f"longer than the bars, which are {shortest}")
    bucket = A_MONDAY + ((index - A_MONDAY) // length) * length
    whole = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
    return bars.groupby(bucket).agg(whole).iloc[1:], pd.DatetimeIndex(bucket)


def _symbol_features(bars: pd.DataFrame, config: FeatureConfig) -> pd.DataFrame:
    """Return the features of one symbol's own bars; rows whose look-backs are not full are NaN."""
    opens, high, low, close = (bars[column].astype(np.float64) for column in PRICES)
    log_close = _log(close)
    returns = log_close.diff()
    scale = returns.rolling(config.slow_window).std().clip(lower=SMALLEST)
    columns = {f"return_{h}": log_close.diff(h) / (scale * np.sqrt(h)) for h in config.horizons}
    columns |= {f"lag_{k}": returns.shift(k) / scale for k in range(1, config.lags + 1)}

    window = config.volatility_window
    close_close = returns.rolling(window).std()
    columns["volatility_close"] = _log_volatility(close_close)
    columns["volatility_parkinson"] = _log_volatility(parkinson(high, low, window))
    columns["volatility_yang_zhang"] = _log_volatility(yang_zhang(opens, high, low, close, window))
    columns["volatility_ratio"] = _log_volatility(close_close) - _log_volatility(scale)
    columns |= _indicators(bars, config)
    bands = log_close.rolling(config.bollinger)
    columns["bollinger"] = (log_close - bands.mean()) / (2.0 * bands.std(ddof=0).clip(lower=SMALLEST))

    log_volume = _log(1.0 + bars["volume"].fillna(0.0))
    usual = log_volume.rolling(config.slow_window)
    columns["volume"] = (log_volume - usual.mean()) / usual.std().clip(lower=SMALLEST)
    columns["drawdown"] = log_close - _log(close.rolling(config.drawdown_window, min_periods=1).max())
    return pd.DataFrame(columns)


def _indicators(bars: pd.DataFrame, config: FeatureConfig) -> dict[str, pd.Series]:
    """Return RSI, MACD, ATR and CCI from TA-Lib, scaled to be scale-free and about 1 in size."""
    if len(bars) < 2:  # TA-Lib refuses arrays this short
        return dict.fromkeys(("rsi", "macd", "atr", "cci"), pd.Series(np.nan, index=bars.index))
    high, low, close = (np.asarray(bars[column], dtype=np.float64) for column in ("high", "low", "close"))
    fast, slow, signal = config.macd
    average_range = np.maximum(talib.ATR(high, low, close, timeperiod=config.atr), SMALLEST * close)
    _, _, histogram = talib.MACD(close, fastperiod=fast, slowperiod=slow, signalperiod=signal)
    columns = {
        "rsi": talib.CMO(close, timeperiod=config.rsi) / 100.0,  # RSI / 50 - 1, but 0 for a price that stands still
        "macd": histogram / average_range,
        "atr": np.log(average_range / close),
        "cci": talib.CCI(high, low, close, timeperiod=config.cci) / 200.0,
    }
    return {name: pd.Series(values, index=bars.index) for name, values in columns.items()}


def parkinson(high: pd.Series, low: pd.Series, window: int) -> pd.Series:
    """Return the volatility per bar from the range, sqrt(mean(ln(H/L)^2) / (4 ln 2)) (Parkinson 1980)."""
    mean_square = (_log(high / low) ** 2).rolling(window).mean()
    return _apply(np.sqrt, mean_square / (4.0 * np.log(2.0)))


def yang_zhang(opens: pd.Series, high: pd.Series, low: pd.Series, close: pd.Series, window: int) -> pd.Series:
    """Return the volatility per bar, free of drift and aware of gaps between bars (Yang and Zhang 2000).

    Variance = overnight + k open-to-close + (1 - k) Rogers-Satchell, with k = 0.34 / (1.34 + (n + 1) / (n - 1)).
    """
    overnight, day = _log(opens / close.shift(1)), _log(close / opens)
    up, down = _log(high / opens), _log(low / opens)
    rogers_satchell = (up * (up - day) + down * (down - day)).rolling(window).mean()
    k = 0.34 / (1.34 + (window + 1) / (window - 1))
    variance = overnight.rolling(window).var() + k * day.rolling(window).var() + (1.0 - k) * rogers_satchell
    return _apply(np.sqrt, variance.clip(lower=0.0))


def _apply(function: Callable[[Floats], Floats], values: pd.Series) -> pd.Series:
    return pd.Series(function(values.to_numpy(dtype=np.float64)), index=values.index)


def _log(values: pd.Series) -> pd.Series:
    return _apply(np.log, values)


def _log_volatility(values: pd.Series) -> pd.Series:
    return _log(values.clip(lower=SMALLEST))


def market_columns(names: Sequence[str], selected: Sequence[str] | None = None) -> tuple[int, ...]:
    """Return the columns of an observation that come from the market, and can therefore be late, noisy or wrong.

    The calendar is known for certain. So is the account, whose columns follow those of the features and have no names here.

    :param names: names of the features, see :class:`FeatureSet`.
    :param selected: names, or patterns such as ``return_*``; None is everything but the calendar.
    :raises ValueError: for a name that no feature has.
    """
    if selected is None:
        known = _calendar(pd.DatetimeIndex([])).columns
        return tuple(k for k, name in enumerate(names) if name not in known)
    for pattern in selected:
        require(any(fnmatchcase(name, pattern) for name in names), "feature", pattern, f"one of {', '.join(names)}")
    return tuple(k for k, name in enumerate(names) if any(fnmatchcase(name, pattern) for pattern in selected))


def _calendar(index: pd.DatetimeIndex) -> pd.DataFrame:
    """Return the hour on a circle, and one indicator per day of the week: days need not be alike their neighbours."""
    angle = 2.0 * np.pi * np.asarray(index.hour + index.minute / 60.0, dtype=np.float64) / 24.0
    columns = {"hour_sin": np.sin(angle), "hour_cos": np.cos(angle)}
    columns |= {name: np.asarray(index.day_of_week == day, dtype=np.float64) for day, name in enumerate(WEEKDAYS)}
    return pd.DataFrame(columns, index=index)


WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
