"""The stationary block bootstrap of Politis and Romano (1994), with all strategies resampled together.

A resample consists of blocks of geometric length that start anywhere and wrap around the end; blocks keep the serial dependence
of neighbouring bars. All strategies of a resample see the same bars, so that what the market did to two of them cancels in
their difference. Everything that numba compiles stays in this file, because its cache looks no further.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailguard.evaluate.stats import performance
from tailguard.evaluate.stats.dependence import FEWEST_BARS, optimal_block_length
from tailguard.evaluate.stats.series import ROUNDING, Floats, as_columns, as_series, equity_of, require_periods, require_solvent
from tailguard.jit import REORDER_SUMS, kept
from tailguard.validation import require

TAILS = (0.01, 0.05)
OF_RETURN = ("sharpe", "sortino", "cagr")
OF_RISK = ("volatility", "max_drawdown", "calmar", "ulcer", "cvar_1", "cvar_5")
METRICS = OF_RETURN + OF_RISK
# Columns of the sums that `resample_metrics` returns.
SUM, SQUARES, DOWNSIDE, LOG_GROWTH, RISKLESS_GROWTH, MAX_DRAWDOWN, ULCER_SQUARES, FIRST_TAIL = range(8)


def _draw_bars(indices: NDArray[Any], restart: float, generator: np.random.Generator) -> None:
    """Fill ``indices[n]`` with the bars of a resample; at each bar a new block begins with probability `restart`."""
    n = len(indices)
    at = np.int64(generator.random() * n)
    for t in range(n):
        if t > 0:
            # One uniform number decides both: below `restart` it is uniform again after division.
            u = generator.random()
            at = np.int64(u / restart * n) if u < restart else at + 1
            if at >= n:
                at -= n
        indices[t] = at


_draw_compiled = kept(_draw_bars)


def _indices(out: NDArray[Any], restart: float, generator: np.random.Generator) -> None:
    """Fill ``out[B, n]`` with the bars of B resamples."""
    for b in range(len(out)):
        _draw_compiled(out[b], restart, generator)


def _means(values: NDArray[Any], restart: float, generator: np.random.Generator, out: NDArray[Any]) -> None:
    """Fill ``out[B, K]`` with the means of resamples of ``values[n, K]``."""
    n, columns = values.shape
    indices = np.empty(n, np.int64)
    for b in range(len(out)):
        _draw_compiled(indices, restart, generator)
        out[b] = 0.0
        for t in range(n):
            row = values[indices[t]]
            for k in range(columns):
                out[b, k] += row[k]
        for k in range(columns):
            out[b, k] /= n


def _metrics(
    returns: NDArray[Any],
    riskless: NDArray[Any],
    centres: NDArray[Any],
    order: NDArray[Any],
    tails: NDArray[Any],
    restart: float,
    generator: np.random.Generator,
    out: NDArray[Any],
) -> None:
    """Fill ``out[B, S, FIRST_TAIL + A]`` with the sums of each resample and strategy.

    :param returns: ``[S, n]``.
    :param riskless: ``[n]``; sums, squares and downside are of the returns in excess of it.
    :param centres: ``[S]`` means of the excess returns, subtracted before squaring so that no digits cancel.
    :param order: ``[S, n]``, the bars of each strategy from its worst return to its best.
    :param tails: ``[A]``, tail shares; the tail mean is found from how often each bar was drawn, without sorting again.
    """
    strategies, n = returns.shape
    indices, counts = np.empty(n, np.int64), np.empty(n, np.int64)
    logs, riskless_logs = np.log1p(returns), np.log1p(riskless)
    for b in range(len(out)):
        _draw_compiled(indices, restart, generator)
        counts[:] = 0
        for t in range(n):
            counts[indices[t]] += 1
        riskless_growth = 0.0
        for i in range(n):
            riskless_growth += counts[i] * riskless_logs[i]
        for s in range(strategies):
            total, squares, downside, growth = 0.0, 0.0, 0.0, 0.0
            below_peak, deepest, ulcer = 1.0, 1.0, 0.0  # equity over its highest so far
            for t in range(n):
                r = returns[s, indices[t]]
                below_peak = min(below_peak * (1.0 + r), 1.0)
                deepest = min(deepest, below_peak)
                ulcer += (1.0 - below_peak) ** 2
            for i in range(n):  # what does not depend on the order is summed over the bars in theirs
                c, excess = counts[i], returns[s, i] - riskless[i]
                x = excess - centres[s]
                total += c * x
                squares += c * x * x
                growth += c * logs[s, i]
                low = min(excess, 0.0)
                downside += c * low * low
            out[b, s, SUM], out[b, s, SQUARES], out[b, s, DOWNSIDE] = total, squares, downside
            out[b, s, LOG_GROWTH], out[b, s, RISKLESS_GROWTH] = growth, riskless_growth
            out[b, s, MAX_DRAWDOWN], out[b, s, ULCER_SQUARES] = 1.0 - deepest, ulcer
            for a in range(len(tails)):
                mass, left, tail = tails[a] * n, tails[a] * n, 0.0
                for i in range(n):
                    bar = order[s, i]
                    taken = min(float(counts[bar]), left)
                    tail += taken * returns[s, bar]
                    left -= taken
                    if left <= 0.0:
                        break
                out[b, s, FIRST_TAIL + a] = tail / mass


def _paths(logs: NDArray[Any], restart: float, generator: np.random.Generator, at: NDArray[Any], out: NDArray[Any]) -> None:
    """Fill ``out[B, P]`` with the log equity of resamples of ``logs[n]`` after ``at[P]`` bars each, increasing."""
    n = len(logs)
    indices = np.empty(n, np.int64)
    for b in range(len(out)):
        _draw_compiled(indices, restart, generator)
        total, t = 0.0, 0
        for p in range(len(at)):
            while t < at[p]:
                total += logs[indices[t]]
                t += 1
            out[b, p] = total


# Sums may be reordered, which vector code needs.
resample_indices = kept(_indices)
resample_means = kept(_means, fastmath=set(REORDER_SUMS))
resample_metrics = kept(_metrics, fastmath=set(REORDER_SUMS))
resample_paths = kept(_paths)


@dataclass(frozen=True)
class Interval:
    """A statistic with its percentile interval.

    :param estimate: the statistic of the data.
    :param low: lower end.
    :param high: upper end.
    :param level: share of the resamples between the two.
    """

    estimate: float
    low: float
    high: float
    level: float


@dataclass(frozen=True)
class Difference(Interval):
    """A statistic of one strategy minus that of another.

    :param error: standard deviation of the resampled differences.
    :param p_higher: one-sided p-value of "the first is not higher": the share of resamples that reach the observed difference
        after centring at no difference.
    :param p_lower: one-sided p-value of "the first is not lower".
    """

    error: float
    p_higher: float
    p_lower: float


@dataclass(frozen=True)
class Bootstrap:
    """Resampled statistics of several strategies.

    :param names: of the strategies, S of them.
    :param estimates: statistics of the data, ``[S]`` for each of :data:`METRICS`; positive is good except for volatility,
        drawdown and ulcer. `cvar_1` and `cvar_5` are returns per bar, the rest is per year.
    :param draws: statistics of each resample, ``[B, S]`` for each of :data:`METRICS`.
    :param block: expected block length in bars for the statistics of return.
    :param risk_block: expected block length in bars for the statistics of risk.
    :param seed: of the draws.
    """

    names: tuple[str, ...]
    estimates: Mapping[str, Floats]
    draws: Mapping[str, Floats]
    block: float
    risk_block: float
    seed: int

    def interval(self, metric: str, name: str, level: float = 0.95) -> Interval:
        """Return a statistic of a strategy with its percentile interval.

        :param metric: one of :data:`METRICS`.
        :param name: of the strategy.
        :param level: in (0, 1).
        """
        column = self._column(metric, name)
        low, high = _percentiles(self.draws[metric][:, column], level)
        return Interval(float(self.estimates[metric][column]), low, high, level)

    def difference(self, metric: str, name: str, against: str, level: float = 0.95) -> Difference:
        """Return the difference of two strategies with its percentile interval, paired resample by resample.

        :param metric: one of :data:`METRICS`.
        :param name: of the strategy.
        :param against: name of the other.
        :param level: in (0, 1).
        """
        first, second = self._column(metric, name), self._column(metric, against)
        estimate = float(_minus(self.estimates[metric][first], self.estimates[metric][second]))
        draws = _minus(self.draws[metric][:, first], self.draws[metric][:, second])
        finite = bool(np.isfinite(draws).all()) and math.isfinite(estimate)
        require(finite, f"the difference of {metric}", estimate, "finite in every resample: there is no risk to divide by")
        low, high = _percentiles(draws, level)
        chance = draws - estimate
        return Difference(
            estimate, low, high, level, float(draws.std(ddof=1)), _share(chance >= estimate), _share(chance <= estimate)
        )

    def only(self, names: Sequence[str]) -> "Bootstrap":
        """Return the same resamples restricted to some strategies.

        :param names: of the strategies, in the order that the result is to have.
        """
        columns = [self._column(METRICS[0], name) for name in names]
        estimates = {metric: values[columns] for metric, values in self.estimates.items()}
        draws = {metric: values[:, columns] for metric, values in self.draws.items()}
        return replace(self, names=tuple(names), estimates=estimates, draws=draws)

    def _column(self, metric: str, name: str) -> int:
        require(metric in METRICS, "metric", metric, f"one of {', '.join(METRICS)}")
        require(name in self.names, "the strategy", name, f"one of {', '.join(self.names)}")
        return self.names.index(name)


def bootstrap(
    returns: Mapping[str, ArrayLike],
    periods: float,
    *,
    riskless: ArrayLike = 0.0,
    draws: int = 5000,
    block: float | None = None,
    seed: int = 0,
) -> Bootstrap:
    """Resample several strategies together and compute each of :data:`METRICS` for every resample.

    :param returns: from names to simple returns ``[T]`` over the same bars, at least 8, each above -1.
    :param periods: bars per year.
    :param riskless: return of the riskless asset per bar, one number or ``[T]``. Ratios and volatility are of the excess
        returns; growth, drawdowns and CVaR are of the account itself.
    :param draws: resamples; 5,000 give the ends of a 95 % interval to about 3 % of its width.
    :param block: expected block length for all statistics. None takes :func:`return_block_length` for the statistics of return
        and :func:`risk_block_length` for those of risk, which takes twice as long.
    :param seed: of the draws; the same seed, data and block give the same resamples.
    """
    require_periods(periods)
    columns = as_columns("returns", returns, FEWEST_BARS)
    require_solvent("returns", columns)
    rows = np.ascontiguousarray(columns.T)  # [S, T]
    excess = {name: performance.excess_returns(row, riskless) for name, row in zip(returns, rows, strict=True)}
    cash = np.array(np.broadcast_to(np.asarray(riskless, dtype=np.float64), rows.shape[1]))
    require_solvent("riskless", cash)
    estimates = [_measured(row, periods, cash) for row in rows]
    short = return_block_length(excess) if block is None else block
    long = risk_block_length(excess) if block is None else block
    resampled = _resampled(rows, cash, periods, draws, short, seed)
    if long != short:
        of_risk = _resampled(rows, cash, periods, draws, long, seed)
        resampled |= {metric: of_risk[metric] for metric in OF_RISK}
    return Bootstrap(
        names=tuple(returns),
        estimates={metric: np.array([row[metric] for row in estimates]) for metric in METRICS},
        draws=resampled,
        block=float(short),
        risk_block=float(long),
        seed=seed,
    )


def return_block_length(returns: Mapping[str, ArrayLike]) -> float:
    """Return the longest of the strategies' optimal block lengths (Politis and White).

    :param returns: from names to returns ``[T]``, at least 8 bars.
    """
    columns = as_columns("returns", returns, FEWEST_BARS)
    return max(optimal_block_length(column) for column in columns.T)


def risk_block_length(returns: Mapping[str, ArrayLike]) -> float:
    """Return the longest of the optimal block lengths of the strategies' returns and squared returns.

    Returns are hardly autocorrelated, but their squares are (volatility clusters). Blocks that suit the returns break the
    clusters and make the intervals of volatility, CVaR and drawdown far too narrow; blocks that suit the squares would make the
    intervals of the statistics of return too narrow, because few of them fit in the data.

    :param returns: from names to returns ``[T]``, at least 8 bars.
    """
    columns = as_columns("returns", returns, FEWEST_BARS)
    return max(optimal_block_length(series) for column in columns.T for series in (column, (column - column.mean()) ** 2))


def stationary_indices(n: int, draws: int, block: float, seed: int = 0) -> NDArray[np.int64]:
    """Return the bars of each resample, ``[draws, n]``, as :func:`bootstrap` draws them, for statistics of your own.

    :param n: bars of the data.
    :param draws: resamples.
    :param block: expected block length, from 1 (independent bars) to n.
    :param seed: of the draws.
    """
    require(n >= 1, "n", n, "at least 1")
    out = np.empty((_checked_draws(draws), n), dtype=np.int64)
    resample_indices(out, _restart_probability(block, n), np.random.default_rng(seed))
    return out


def equity_bands(
    returns: ArrayLike,
    levels: ArrayLike = (0.05, 0.5, 0.95),
    *,
    points: int = 200,
    draws: int = 2000,
    block: float | None = None,
    seed: int = 0,
) -> tuple[NDArray[np.int64], Floats]:
    """Return percentiles of resampled equity curves that start at 1, for a band around the observed one.

    :param returns: ``[T]``, simple, at least 8, each above -1.
    :param levels: ``[L]``, percentiles in (0, 1).
    :param points: bars at which the band is given, the first and the last included; at most T + 1 are used.
    :param draws: resamples.
    :param block: expected block length; None takes :func:`risk_block_length`.
    :param seed: of the draws.
    :return: the bars ``[P]``, 0 the start and T the end, and the band ``[L, P]``.
    """
    values = as_series("returns", returns, FEWEST_BARS)
    require_solvent("returns", values)
    shares = np.atleast_1d(np.asarray(levels, dtype=np.float64))
    require(bool(((shares > 0.0) & (shares < 1.0)).all()), "levels", shares.tolist(), "inside (0, 1)")
    require(points >= 2, "points", points, "at least 2")
    block = risk_block_length({"returns": values}) if block is None else block
    at = np.unique(np.linspace(0, len(values), min(points, len(values) + 1)).round().astype(np.int64))
    paths = np.empty((_checked_draws(draws), len(at)))
    resample_paths(np.log1p(values), _restart_probability(block, len(values)), np.random.default_rng(seed), at, paths)
    return at, np.exp(np.quantile(paths, shares, axis=0))


def _restart_probability(block: float, n: int) -> float:
    require(1.0 <= block <= n, "block", block, f"from 1 to the number of bars, {n}")
    return 1.0 / block


def _checked_draws(draws: int) -> int:
    require(draws >= 2, "draws", draws, "at least 2")
    return draws


def _resampled(rows: Floats, riskless: Floats, periods: float, draws: int, block: float, seed: int) -> dict[str, Floats]:
    centres = (rows - riskless).mean(axis=1)
    out = np.empty((_checked_draws(draws), len(rows), FIRST_TAIL + len(TAILS)))
    restart, generator = _restart_probability(block, rows.shape[1]), np.random.default_rng(seed)
    resample_metrics(rows, riskless, centres, np.argsort(rows, axis=1), np.array(TAILS), restart, generator, out)
    return _metrics_from_sums(out, centres, rows.shape[1], periods)


def _measured(row: Floats, periods: float, riskless: Floats) -> dict[str, float]:
    equity = equity_of(row)
    return {
        "sharpe": performance.sharpe(row, periods, riskless),
        "sortino": performance.sortino(row, periods, riskless),
        "cagr": performance.cagr(equity, periods),
        "volatility": performance.volatility(row, periods, riskless),
        "max_drawdown": performance.max_drawdown(equity),
        "calmar": performance.calmar(equity, periods, riskless),
        "ulcer": performance.ulcer(equity),
        "cvar_1": performance.cvar(row, TAILS[0]),
        "cvar_5": performance.cvar(row, TAILS[1]),
    }


def _metrics_from_sums(sums: Floats, centres: Floats, n: int, periods: float) -> dict[str, Floats]:
    """Return the metrics ``[B, S]`` from the sums ``[B, S, FIRST_TAIL + A]`` of the compiled loop."""
    shift = sums[..., SUM] / n
    mean = centres + shift
    variance = (sums[..., SQUARES] - sums[..., SUM] * shift) / (n - 1)
    deviation = np.sqrt(np.where(variance > ROUNDING**2, variance, 0.0))
    downside = np.sqrt(sums[..., DOWNSIDE] / n)
    downside = np.where(downside > ROUNDING, downside, 0.0)
    excess_growth = (sums[..., LOG_GROWTH] - sums[..., RISKLESS_GROWTH]) / n
    with np.errstate(over="ignore"):  # a few minutes of gains, taken as a year's, are infinite
        growth = np.expm1(sums[..., LOG_GROWTH] * periods / n)
        excess_growth = np.where(np.abs(excess_growth) > ROUNDING, np.expm1(excess_growth * periods), 0.0)
    year = math.sqrt(periods)
    return {
        "sharpe": _ratios(mean, deviation) * year,
        "sortino": _ratios(mean, downside) * year,
        "cagr": growth,
        "volatility": deviation * year,
        "max_drawdown": sums[..., MAX_DRAWDOWN],
        "calmar": _ratios(excess_growth, sums[..., MAX_DRAWDOWN]),
        "ulcer": np.sqrt(sums[..., ULCER_SQUARES] / (n + 1)),  # the start counts as a bar without drawdown
        "cvar_1": sums[..., FIRST_TAIL],
        "cvar_5": sums[..., FIRST_TAIL + 1],
    }


def _ratios(gain: Floats, risk: Floats) -> Floats:
    """Divide by the rule of :mod:`tailguard.evaluate.stats.performance`: 0 where nothing moved, infinite without risk."""
    riskless = np.where(np.abs(gain) <= ROUNDING, 0.0, np.copysign(np.inf, gain))
    return np.where(risk > 0.0, gain / np.where(risk > 0.0, risk, 1.0), riskless)


def _minus(first: Floats, second: Floats) -> Floats:
    """Subtract; the difference of equal infinities is 0."""
    same = first == second
    return np.where(same, 0.0, np.where(same, 0.0, first) - np.where(same, 0.0, second))


def _percentiles(draws: Floats, level: float) -> tuple[float, float]:
    require(0.0 < level < 1.0, "level", level, "in (0, 1)")
    # Order statistics instead of interpolation, which would make NaN of infinities.
    low, high = np.quantile(draws, [(1.0 - level) / 2.0, (1.0 + level) / 2.0], method="inverted_cdf")
    return float(low), float(high)


def _share(happened: NDArray[np.bool_]) -> float:
    """Return a p-value that is never 0: the data count as one more resample."""
    return (1.0 + float(happened.sum())) / (len(happened) + 1.0)
