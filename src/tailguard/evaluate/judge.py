"""Judge anybody's strategy: weights or returns in, the verdict, the statistics and the report of an evaluation out."""

import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from tailguard.evaluate.assessment import Context, Effort, assess, assess_returns
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.inputs import (
    LEAST_RATE,
    MOST_RATE,
    TableSource,
    first_start,
    rate_doubts,
    rates_at,
    read_closes,
    read_levels,
    read_rates,
    read_returns,
    read_weights,
    require_one_clock,
    usual_step,
    without_zone,
)
from tailguard.evaluate.ledger import Ledger, user_ledger
from tailguard.evaluate.record import RECORD_FOLDER, AccountHistory, Estimate, Evaluation, Provenance, save_record
from tailguard.evaluate.report.report import summary_html, write_report
from tailguard.evaluate.stats.series import ROUNDING, Floats
from tailguard.evaluate.verdict import AGENT, Verdict, VerdictRules
from tailguard.market.bars import YEAR, DataError, in_utc, iterate_symbols, periods_per_year, symbols_of, timeframe_text
from tailguard.market.baselines import Strategy
from tailguard.market.data import load_bars, load_dataset, load_source
from tailguard.market.files import FileConfig
from tailguard.market.plugins import LookAheadError, replace_bars
from tailguard.market.rules import TradingRules
from tailguard.market.shipped import list_datasets
from tailguard.market.times import Zone, are_days, localize
from tailguard.validation import build, require

REPORT_FILE = "report.html"
BENCHMARK, SUBJECT = "benchmark", "strategy"
LIBRARIES = ("tailguard", "numpy", "pandas", "numba", "scipy")
FEWEST_BARS = 8  # that a bootstrap needs
CUTS = 8  # times at which the future is replaced, to see whether a strategy looks ahead, and as many at which it trades
SAME_WEIGHT = 1e-9
COARSER = 1.9  # times as long as the bars of the returns may those of the benchmark be
SHIFTED = 0.5  # correlation with the bar before or after the same one of a benchmark, from which on its times are shifted
FEWEST_SHIFTED = 40
SOMEWHAT_SHIFTED, SURELY = 0.2, 6.0  # a correlation, and as many of its standard errors, that deserve a caution
ZONE_STEP, FARTHEST_ZONE = pd.Timedelta(minutes=30), pd.Timedelta(days=1)  # differences of time zones that are tried
KEPT = 0.5  # share of the Sharpe ratio that should be left one bar later
DECIDED_ON_BARS = "decided_on_bars"  # key in the attributes of weights that are on the bars' clock, whichever it is
LATEST_ZONE = "Etc/GMT+12"  # where days end last
MOST_VOLATILITY = 0.8  # per year; higher ones may be percentages of a calm strategy
MOST_EXPOSURE = 20.0  # gross; larger weights are percentages, or units
# Nothing was trained: the tables of a record that are about training are empty.
NO_FOLDS = pd.DataFrame({name: [] for name in ("fold", "train_from", "train_to", "test_from", "test_to")})
NO_TRAINING = pd.DataFrame({name: [] for name in ("fold", "seed", "step")})


@dataclass(frozen=True, eq=False)
class Judgement:
    """The verdict on a strategy, with everything that it rests on.

    :param evaluation: the whole record.
    """

    evaluation: Evaluation

    @property
    def verdict(self) -> Verdict:
        """The outcome, in one line, and its reasons."""
        return self.evaluation.verdict

    @property
    def statistics(self) -> dict[str, dict[str, Estimate]]:
        """Estimates by name of the account and name of the statistic; the strategy is the account ``agent``."""
        return self.evaluation.statistics

    def write_report(self, path: str | Path) -> Path:
        """Write the report, one HTML file.

        :param path: of the file; folders are created.
        """
        return write_report(self.evaluation, path)

    def save(self, folder: str | Path) -> Path:
        """Write the record to ``evaluation/`` in a folder, as `tailguard compare` reads it, and the report beside it.

        :param folder: created if it does not exist.
        :return: the path of the report.
        """
        save_record(self.evaluation, Path(folder) / RECORD_FOLDER)
        return self.write_report(Path(folder) / REPORT_FILE)

    def _repr_html_(self) -> str:
        """Return the verdict with its reasons and the key statistics, for notebooks."""
        return summary_html(self.evaluation)


def judge(
    returns: TableSource | None = None,
    weights: TableSource | None = None,
    bars: TableSource | Mapping[str, Any] | None = None,
    benchmark: TableSource | None = None,
    trials: int = 1,
    *,
    cash_rate: float | TableSource | None = None,
    trading: TradingRules | Mapping[str, Any] | None = None,
    column: str | None = None,
    timezone: str | None = None,
    files: FileConfig | None = None,
    title: str = "",
    source: str = "",
    rules: VerdictRules | None = None,
    effort: Effort | None = None,
    ledger: Ledger | Literal["user"] | None = "user",
) -> Judgement:
    """Judge a strategy by its weights, which are traded again on the bars, or by its returns.

    A table is a CSV, CSV.gz or Parquet file, a Series or a DataFrame; see :mod:`tailguard.evaluate.inputs`.

    :param returns: simple returns per bar after all costs, or an equity curve; either these or `weights`.
    :param weights: target weights by symbol, as shares of equity, at the close of the bar when they were decided; they are
        traded as `trading` says, at the next open by default. Where a bar has no row, the position is held.
    :param bars: what the weights trade: the name of a shipped set, or anything that :func:`tailguard.market.load_bars` takes;
        or closes alone, a column per symbol, at which orders are filled a bar later: there is no open to fill them at.
    :param benchmark: returns or prices of the market, or the name of a shipped set. With `returns` it is what alpha is measured
        over; with `weights` it is a further baseline that has to be beaten.
    :param trials: strategies that this one was chosen from by looking at these bars; the ledger may know of more.
    :param cash_rate: interest per year that idle cash earns, a number or a table of rates; it is taken out of every ratio. None
        takes that of `trading`, which is 0 by default.
    :param trading: costs and fills, for `weights`; fields of :class:`tailguard.market.TradingRules`.
    :param column: of `returns`, where its name is not a usual one.
    :param timezone: of times of day that name no zone, in all tables, and of days of weights on intraday bars; such as
        ``America/New_York``. None takes that of `files`.
    :param files: what is known about the files of `bars`.
    :param title: one line; empty makes one.
    :param source: name of the data; empty makes one.
    :param rules: of the verdict.
    :param effort: of the computation.
    :param ledger: of trials: ``"user"`` is that of the user; None keeps none, and the verdict says so.
    """
    given = [name for name, table in (("returns", returns), ("weights", weights)) if table is not None]
    require(len(given) == 1, "what is judged", given or None, "either returns or weights")
    costs = trading if isinstance(trading, TradingRules) else build(TradingRules, dict(trading or {}))
    timezone = timezone or (files.timezone if files else None)
    known_ledger = user_ledger() if ledger == "user" else ledger
    if returns is not None:
        require(bars is None, "bars", "given", "left out beside returns: only weights can be traded again")
        rate = _rate(costs.cash_rate if cash_rate is None else cash_rate, timezone)
        agent, market, clocks, notes = _accounts(returns, benchmark, rate, column, timezone)
        settings: dict[str, Any] = {"cash_rate": "a table of rates" if isinstance(rate, pd.Series) else rate}
        provenance = _provenance(trials, agent.returns, settings, agent.times.to_series())
        context = Context(title or "A strategy", source or _name(returns) or "returns", NO_FOLDS, NO_TRAINING, provenance)
        context = replace(context, subject=SUBJECT)
        periods = periods_per_year(agent.times)
        judgement = Judgement(assess_returns(agent, market, periods, context, rules, effort, known_ledger))
        volatility = judgement.statistics[AGENT]["volatility"].value
        if volatility > MOST_VOLATILITY:
            notes.append(
                f"A volatility of {volatility:.0%} per year is rare: if the returns are percentages, divide them by 100."
            )
        return _cautioned(judgement, [*notes, *_clock_doubts(judgement, clocks)])
    require(bars is not None, "bars", None, "given beside weights: they are what is traded")
    table = _bars(bars, timezone, files)
    given_weights = read_weights(cast(TableSource, weights), table, timezone=timezone)
    levels = None if benchmark is None else _levels(benchmark, timezone)
    rate = _rate(costs.cash_rate if cash_rate is None else cash_rate, timezone)
    clocks = _clocks({"weights": given_weights, "bars": table, "benchmark": levels, "cash_rate": rate})
    in_memory = isinstance(bars, pd.DataFrame) and not isinstance(weights, str | Path)
    if in_utc(table) and not (in_memory and clocks["weights"].tz is None):  # which are made of such bars: they do not say so
        clocks["bars"] = clocks["bars"].tz_localize("UTC")
    require_one_clock(clocks)
    targets, span, notes = _aligned(given_weights, table, timezone if in_utc(table) else None)
    notes += rate_doubts(rate)
    if costs.fill == "next_open" and _only_closes(table):
        notes.append("The bars have closes only, without opens: orders are filled at the next close, a bar after the decision.")
    window = _window(table, costs, span, rate)
    provenance = _provenance(trials, targets, {"trading": window.rules.model_dump(mode="json")}, table)
    market = None
    if levels is not None:
        levels = _fitting(without_zone(levels), window.times)
        market = _benchmark(levels, window.times, table.index[span[0]], window.riskless)
    context = Context(title or "A strategy", source or _name(bars) or "bars", NO_FOLDS, NO_TRAINING, provenance)
    context = replace(context, subject=SUBJECT, baselines=[] if market is None else [market])
    judgement = Judgement(assess(window, {AGENT: targets}, [len(targets)], context, rules, effort, known_ledger))
    if len(symbols_of(table)) > 1 and not in_utc(table):
        clocks["bars of the other symbols"] = clocks["bars"]
    if isinstance(weights, pd.DataFrame) and weights.attrs.get(DECIDED_ON_BARS):
        del clocks["weights"]
    else:
        notes += _delay_doubts(judgement)
    return _cautioned(judgement, [*notes, *_clock_doubts(judgement, clocks)])


def judge_strategy(function: Strategy, bars: TableSource | Mapping[str, Any], *, start: int = 1, **options: Any) -> Judgement:
    """Judge a strategy that is a function from bars to weights, after a test that it does not look ahead.

    :param function: from a table of bars to target weights ``[T]`` or ``[T, assets]``, NaN to hold; row t is decided at the
        close of bar t. It must be deterministic: seed its random numbers.
    :param bars: see :func:`judge`.
    :param start: first bar at whose close a decision counts; the ones before are history.
    :param options: all other parameters of :func:`judge`.
    :raises LookAheadError: if decisions change when the bars after them are replaced.
    """
    table = _bars(bars, options.get("timezone"), options.get("files"))
    decided = require_causal(function, table)
    require(1 <= start <= len(table) - FEWEST_BARS, "start", start, f"from 1 to {len(table) - FEWEST_BARS}")
    times = pd.DatetimeIndex(table.index).tz_localize("UTC" if in_utc(table) else None)
    weights = pd.DataFrame(decided, index=times, columns=[symbol or "weight" for symbol in symbols_of(table)])
    weights.attrs[DECIDED_ON_BARS] = True
    weights.iloc[start] = weights.iloc[: start + 1].ffill().iloc[-1]  # what it would have held already
    options.setdefault("source", _name(bars))
    options.setdefault("title", getattr(function, "__name__", ""))
    judgement = judge(weights=weights.iloc[start:], bars=table, **options)
    if _uses_bars(function, table, decided):
        return judgement
    untested = "The decisions stay the same whatever bars the function is given, so the test for look-ahead shows nothing."
    return _cautioned(judgement, [untested])


def require_causal(function: Strategy, bars: pd.DataFrame, cuts: int = CUTS, seed: int = 0) -> Floats:
    """Return the decisions of a strategy ``[T, assets]``, after a test that none depends on bars that come after it.

    :param function: see :func:`judge_strategy`.
    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param cuts: times at which all later bars are replaced by others; as many further ones are times at which it trades.
    :param seed: of the times and of the other bars.
    """
    decided = _decisions(function, bars)
    require(
        _same(decided, _decisions(function, bars)), "the strategy", "random", "deterministic: give its random numbers a seed"
    )
    generator = np.random.default_rng(seed)
    for cut in _cuts(decided, cuts, generator):
        other = replace_bars(bars, cut + 1, generator)
        changed = _decisions(function, other)
        moved = np.flatnonzero(
            ~np.isclose(decided[: cut + 1], changed[: cut + 1], 0.0, SAME_WEIGHT, equal_nan=True).all(axis=1)
        )
        if len(moved):
            when, known = bars.index[moved[-1]], bars.index[cut]
            raise LookAheadError(
                f"the strategy looks ahead: its weights of {when} change when only the bars after {known} are replaced; "
                "let every decision use bars up to its own only"
            )
    return decided


def _cuts(decided: Floats, count: int, generator: np.random.Generator) -> list[int]:
    """Return rows after which the bars are replaced: some at random, and some at which the decisions change.

    A strategy that trades rarely looks ahead only where it trades.
    """
    rows = len(decided)
    anywhere = generator.integers(rows // 4, rows - 1, count)
    same = np.isclose(decided[1:-1], decided[:-2], 0.0, SAME_WEIGHT, equal_nan=True).all(axis=1)
    trades = np.flatnonzero(~same) + 1
    return sorted({*anywhere.tolist(), *generator.permutation(trades)[:count].tolist()})


def _uses_bars(function: Strategy, bars: pd.DataFrame, decided: Floats) -> bool:
    """Return whether the decisions depend on the bars that the function is given, or are constant anyway."""
    constant = bool((decided == decided[:1]).all())
    return constant or not _same(decided, _decisions(function, replace_bars(bars, 0, np.random.default_rng(0))))


def _cautioned(judgement: Judgement, sentences: Sequence[str]) -> Judgement:
    """Return the judgement with further sentences at the end of its reasons."""
    verdict = judgement.verdict
    return Judgement(replace(judgement.evaluation, verdict=replace(verdict, reasons=(*verdict.reasons, *sentences))))


def _clock_doubts(judgement: Judgement, times: Mapping[str, pd.DatetimeIndex]) -> list[str]:
    """Return what to check before skill is believed that rests on times of day of tables that name no zone."""
    bare = [name for name, index in times.items() if index.tz is None and not are_days(index)]
    if len(bare) < 2 or judgement.verdict.outcome != "evidence of skill":
        return []
    return [
        f"The times of {bare[0]} and {bare[1]} name no zone and are taken to be on one clock: if they are not, the skill may "
        "be look-ahead; --timezone (timezone=) says which zone they are in."
    ]


def _decisions(function: Strategy, bars: pd.DataFrame) -> Floats:
    weights = np.asarray(function(bars.copy()), dtype=np.float64)
    weights = weights[:, None] if weights.ndim == 1 else weights
    shape = (len(bars), len(symbols_of(bars)))
    require(weights.shape == shape, "the shape of the weights", weights.shape, f"{shape}, one row per bar")
    return weights


def _same(weights: Floats, other: Floats) -> bool:
    return bool(np.isclose(weights, other, 0.0, SAME_WEIGHT, equal_nan=True).all())


def _delay_doubts(judgement: Judgement) -> list[str]:
    """Return what to check before skill is believed that is gone one bar later: the weights may stand a bar too early."""
    delay = judgement.evaluation.sanity.delay
    if delay is None or judgement.verdict.outcome != "evidence of skill" or delay.sharpe > KEPT * delay.sharpe_before:
        return []
    return [
        f"Traded one bar later, the Sharpe ratio is {delay.sharpe:.2f} instead of {delay.sharpe_before:.2f}. If the times of "
        "the weights are the starts of bars, or a bar too early, that is look-ahead; judge_strategy tests a function for it."
    ]


def _bars(bars: Any, timezone: str | None, files: FileConfig | None) -> pd.DataFrame:
    """Return a table of bars; for one of closes, bars of which all prices are the close."""
    files = (files or FileConfig()).model_copy(update={} if timezone is None else {"timezone": timezone})
    if isinstance(bars, pd.Series):
        bars = bars.to_frame()
    try:
        return load_source(bars, files) if isinstance(bars, str) else load_bars(bars, files)
    except DataError:
        table = isinstance(bars, pd.DataFrame) or (isinstance(bars, str | Path) and Path(bars).is_file())
        closes = read_closes(bars, timezone=timezone) if table else None
        if closes is None:
            raise
    return load_bars(closes if len(closes) > 1 else next(iter(closes.values())))


def _only_closes(bars: pd.DataFrame) -> bool:
    return all(table["open"].equals(table["close"]) for _, table in iterate_symbols(bars))


def _name(table: Any) -> str:
    """Return a name for a table: that of its file, or of the Series."""
    if isinstance(table, str | Path):
        return str(table)
    return str(table.name) if isinstance(table, pd.Series) and table.name is not None else ""


def _rate(rate: Any, timezone: str | None) -> float | pd.Series:
    if isinstance(rate, Real):
        require(
            LEAST_RATE <= float(rate) < MOST_RATE,
            "cash_rate",
            rate,
            f"a fraction per year: 0.03 is 3 %, and {LEAST_RATE:g} the least",
        )
        return float(rate)
    return read_rates(rate, timezone=timezone)


def _accounts(
    returns: TableSource, benchmark: TableSource | None, rate: float | pd.Series, column: str | None, timezone: str | None
) -> tuple[AccountHistory, AccountHistory | None, dict[str, pd.DatetimeIndex], list[str]]:
    """Return the accounts of a strategy and of its benchmark over the bars of both, the times as given, and cautions."""
    series = read_returns(returns, column, timezone=timezone)
    levels = None if benchmark is None else _levels(benchmark, timezone)
    clocks = _clocks({"returns": series, "benchmark": levels, "cash_rate": rate})
    require_one_clock(clocks)
    series = without_zone(series)
    times = pd.DatetimeIndex(series.index)
    starts = times[:-1].insert(0, first_start(times))
    notes, given = rate_doubts(rate), len(times)
    if isinstance(rate, pd.Series):
        known = np.asarray(starts >= without_zone(rate).index[0])
        series, times, starts = series[known], times[known], starts[known]
        if given - len(times) > 1:
            notes.append(f"{given - len(times):,} bars of the returns lie before the first cash rate, and are left out.")
        given = len(times)
    if levels is not None:
        levels = _fitting(without_zone(levels), times)
        known = np.asarray((starts >= levels.index[0]) & (times < levels.index[-1] + usual_step(levels.index)))
        series, times, starts = series[known], times[known], starts[known]
    if len(times) < FEWEST_BARS:
        inside = [name for name, table in (("cash rate", rate), ("benchmark", levels)) if isinstance(table, pd.Series)]
        which = f" inside the {' and the '.join(inside)}" if inside else ""
        raise DataError(f"returns: {len(times)} bars{which}; at least {FEWEST_BARS} are needed")
    riskless = rates_at(rate, starts) * ((times - starts) / YEAR).to_numpy()
    agent = _untraded(AGENT, times, series.to_numpy(dtype=np.float64), riskless)
    if float(agent.excess.std()) <= ROUNDING < abs(float(agent.excess.mean())):
        remedy = "such interest is cash: name its rate with --cash-rate (cash_rate=)"
        raise DataError(f"returns: each is {agent.returns[0]:g}, without any risk that they could be held against; {remedy}")
    market = None if levels is None else _benchmark(levels, times, starts[0], riskless)
    if market is not None and float(market.excess.std()) <= ROUNDING:
        raise DataError(f"benchmark: does not move from {times[0]} to {times[-1]}; give that of the market, or none")
    if given - len(times) > 1:  # prices have one value more than returns
        said = f"{given - len(times):,} bars of the returns lie outside of the benchmark's times, and are left out."
        notes.append(said)
    if levels is not None:
        notes += _require_unshifted(agent.returns, levels, times, starts[0])
    return agent, market, clocks, notes


def _levels(benchmark: TableSource, timezone: str | None) -> pd.Series:
    """Return the values of a benchmark, which may be a shipped set."""
    names = {info.name for info in list_datasets()}
    shipped = isinstance(benchmark, str) and benchmark in names and not Path(benchmark).exists()
    return read_levels(load_dataset(str(benchmark)) if shipped else benchmark, timezone=timezone)


def _fitting(levels: pd.Series, times: pd.DatetimeIndex) -> pd.Series:
    """Return the values of a benchmark for bars that end at these times; where those are days, each value belongs to its day.

    :raises DataError: if the benchmark has fewer values than there are bars.
    """
    if are_days(times):  # the close of a day, whatever time of day its value has
        levels = levels.groupby(pd.DatetimeIndex(levels.index).normalize()).last()
    own, other = usual_step(times), usual_step(levels.index)
    if other > COARSER * own:
        remedy = "give a benchmark with as many values, or returns over as long bars"
        raise DataError(f"benchmark: a value per {timeframe_text(other)}, and bars of {timeframe_text(own)}; {remedy}")
    return levels


def _require_unshifted(returns: Floats, levels: pd.Series, times: pd.DatetimeIndex, start: pd.Timestamp) -> list[str]:
    """Refuse returns that move with other bars of the benchmark than their own: alpha and beta would mean nothing.

    Neighbouring bars are tried, and within a day all differences of time zones.

    :param returns: ``[n]``.
    :param levels: of the benchmark.
    :param times: ``[n]`` ends of the bars.
    :param start: of the first bar.
    :return: a caution if they move somewhat with other bars.
    """
    edges = times.insert(0, start)
    market = _changes(levels, edges)
    same = abs(_correlation(returns, market))
    found = {
        "the bar before": _correlation(returns[1:], market[:-1]),
        "the bar after": _correlation(returns[:-1], market[1:]),
    }
    if usual_step(times) < pd.Timedelta(days=1):
        for lag in pd.timedelta_range(ZONE_STEP, FARTHEST_ZONE, freq=ZONE_STEP):
            found[f"{_hours(lag)} before"] = _correlation(returns, _changes(levels, edges - lag))
            found[f"{_hours(lag)} after"] = _correlation(returns, _changes(levels, edges + lag))
    where = max(found, key=lambda name: abs(found[name]))
    most = abs(found[where])
    numbers = f"correlation {found[where]:.2f}, and {same:.2f} in the same bar"
    if most >= SHIFTED and most > 2.0 * same:
        far = "a bar" if where.startswith("the bar") else where.rpartition(" ")[0]
        raise DataError(
            f"the returns move with the benchmark's of {where} ({numbers}): the times of one of the two are shifted; move them "
            f"by {far}"
        )
    if most >= SOMEWHAT_SHIFTED and most > 2.0 * same and most * math.sqrt(len(returns)) > SURELY:
        return [
            f"The returns move more with the benchmark's of {where} ({numbers}): if its times are shifted, alpha means nothing."
        ]
    return []


def _changes(levels: pd.Series, edges: pd.DatetimeIndex) -> Floats:
    """Return the changes ``[n]`` of a benchmark between these times; NaN where it has not begun or is over."""
    known = np.searchsorted(levels.index.to_numpy(), edges.to_numpy(), side="right") - 1
    over = edges.to_numpy() > (levels.index[-1] + usual_step(levels.index)).to_numpy()
    values = np.where((known < 0) | over, np.nan, levels.to_numpy(dtype=np.float64)[known])
    return values[1:] / values[:-1] - 1.0


def _correlation(first: Floats, second: Floats) -> float:
    """Return the correlation over what both have; 0 where that is too little, or does not move."""
    both = np.isfinite(first) & np.isfinite(second)
    first, second = first[both], second[both]
    if len(first) < FEWEST_SHIFTED or min(float(first.std()), float(second.std())) <= ROUNDING:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _hours(lag: pd.Timedelta) -> str:
    hours = lag / pd.Timedelta(hours=1)
    return f"{hours:g} hour{'s' if hours != 1.0 else ''}"


def _clocks(tables: Mapping[str, Any]) -> dict[str, pd.DatetimeIndex]:
    """Return the times of those that are tables over time."""
    return {
        name: pd.DatetimeIndex(table.index) for name, table in tables.items() if isinstance(table, pd.Series | pd.DataFrame)
    }


def _benchmark(levels: pd.Series, times: pd.DatetimeIndex, start: pd.Timestamp, riskless: Floats) -> AccountHistory:
    """Return the account that holds the benchmark over these bars: at each time, its last known value.

    :param levels: of the benchmark.
    :param times: ``[n]`` ends of the bars.
    :param start: of the first bar.
    :param riskless: ``[n]``.
    """
    known = np.searchsorted(levels.index.to_numpy(), times.insert(0, start).to_numpy(), side="right") - 1
    if known[0] < 0:
        raise DataError(f"benchmark: begins at {levels.index[0]}, after the first bar, {start}; give earlier values as well")
    values = levels.to_numpy(dtype=np.float64)[known]
    return _untraded(BENCHMARK, times, values[1:] / values[:-1] - 1.0, riskless)


def _untraded(name: str, times: pd.DatetimeIndex, returns: Floats, riskless: Floats) -> AccountHistory:
    """Return an account of which only the returns are known."""
    n = len(times)
    return AccountHistory(name, times, returns, np.zeros((n, 0)), np.zeros(n), np.zeros(n), riskless)


def _aligned(weights: pd.DataFrame, bars: pd.DataFrame, timezone: str | None) -> tuple[Floats, tuple[int, int], list[str]]:
    """Return target weights ``[n, assets]``, the rows that they trade, and cautions about their times.

    Bars without a weight hold; of the weights before the first bar the last counts. The span ends with the bar after the last.

    :param weights: by time.
    :param bars: what is traded.
    :param timezone: of weights that have a day and no time of day, beside bars in UTC.
    """
    weights = without_zone(weights.dropna(how="all"))
    times, closes = pd.DatetimeIndex(weights.index), pd.DatetimeIndex(bars.index)
    gross = weights.abs().sum(axis=1).to_numpy(dtype=np.float64)
    usual = float(np.median(gross[gross > 0.0])) if (gross > 0.0).any() else 0.0
    if usual > MOST_EXPOSURE:
        remedy = "divide percentages by 100, and units by equity over price"
        raise DataError(f"weights: they sum to {usual:g}, and shares of equity are meant, 0.5 for half of it; {remedy}")
    rows, latest = _known_at(times, closes, timezone), _known_at(times, closes, LATEST_ZONE)
    inside = rows < len(bars) - 1  # nothing is earned after the last bar
    if inside.sum() < 1 or weights.index[-1] < bars.index[0] - usual_step(bars.index):
        spans = f"weights from {weights.index[0]} to {weights.index[-1]}, bars from {bars.index[0]} to {bars.index[-1]}"
        raise DataError(f"the weights are not inside the bars: {spans}")
    rows, values = rows[inside], weights.to_numpy(dtype=np.float64)[inside]
    first, last = int(rows[0]), int(rows[-1])
    if last + 1 - first < FEWEST_BARS:
        raise DataError(f"the weights cover {last + 1 - first} bars; at least {FEWEST_BARS} are needed")
    targets = np.full((last + 1 - first, values.shape[1]), np.nan)
    targets[rows - first] = values
    targets[0] = np.nan_to_num(targets[0])  # what is not held at the start is cash
    notes = []
    later = int((times[inside].normalize() != closes[rows].normalize()).sum())
    if later and not (timezone and are_days(times)):
        said = f"{later:,} weights lie after the bar of their day, or on a day without one: they are traded at the next bar."
        notes.append(said)
    if timezone is None and are_days(times) and not are_days(closes) and (latest[inside] > rows).any():
        notes.append(
            "The weights have days and no times of day: their days are taken to end at midnight on the clock of the bars"
            f"{' (UTC)' if in_utc(bars) else ''}. If they end later, the strategy looks ahead; --timezone (timezone=) says "
            "where they end."
        )
    return targets, (first, last + 2), notes


def _known_at(times: pd.DatetimeIndex, bars: pd.DatetimeIndex, timezone: str | None) -> NDArray[np.intp]:
    """Return the bar at whose close each weight is known: the first that is not before it.

    A weight that has a day and no time of day is known at the last bar of that day: it may be made of all of them.

    :param times: of the weights.
    :param bars: ends of the bars.
    :param timezone: of days; None takes those of the bars' times as they are.
    """
    if not are_days(times):
        return np.searchsorted(bars.to_numpy(), times.to_numpy())
    starts, ends = (_instants(days, timezone).to_numpy() for days in (times, times + pd.Timedelta(days=1)))
    rows = np.searchsorted(bars.to_numpy(), starts)
    if usual_step(bars) >= pd.Timedelta(days=1):
        return rows
    return np.maximum(rows, np.searchsorted(bars.to_numpy(), ends) - 1)


def _instants(days: pd.DatetimeIndex, timezone: str | None) -> pd.DatetimeIndex:
    """Return when days begin in a time zone, in UTC; None takes them as they are."""
    return days if timezone is None else localize(days, Zone(timezone)).tz_convert("UTC").tz_localize(None)


def _window(bars: pd.DataFrame, costs: TradingRules, span: tuple[int, int], rate: float | pd.Series) -> BacktestWindow:
    if not isinstance(rate, pd.Series):
        return BacktestWindow(bars, build(TradingRules, _fields(costs) | {"cash_rate": rate}), span)
    starts = pd.DatetimeIndex(bars.index[span[0] : span[1] - 1])
    free = build(TradingRules, _fields(costs) | {"cash_rate": 0.0})
    return BacktestWindow(bars, free, span, rates_at(rate, starts))


def _fields(costs: TradingRules) -> dict[str, Any]:
    return costs.model_dump(include=set(TradingRules.model_fields))


def _provenance(trials: int, strategy: Floats, settings: dict[str, Any], data: pd.DataFrame | pd.Series) -> Provenance:
    """Return where the figures come from, as of today; the strategy itself is part of the settings, as a checksum."""
    checksum = f"sha256:{hashlib.sha256(np.ascontiguousarray(strategy).tobytes()).hexdigest()}"
    content = pd.util.hash_pandas_object(data).to_numpy().tobytes()
    return Provenance(
        config=yaml.safe_dump({"strategy": checksum} | settings, sort_keys=False),
        fingerprint=hashlib.sha256(content).hexdigest(),
        versions={"python": platform.python_version()} | {library: version(library) for library in LIBRARIES},
        seeds=(),
        trials=trials,
        date=datetime.now(UTC).date().isoformat(),
    )
