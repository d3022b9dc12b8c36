"""How sure is a figure? The stationary block bootstrap, with all strategies drawn together.

Blocks keep what neighbouring bars have to do with one another. All strategies of a resample see the same bars, so that the
difference of two of them is free of what the market did to both.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailguard.evaluate.stats import performance
from tailguard.evaluate.stats.dependence import FEWEST_BARS, optimal_block_length
from tailguard.evaluate.stats.resampling import (
    DOWNSIDE,
    FIRST_TAIL,
    LOG_GROWTH,
    MAX_DRAWDOWN,
    SQUARES,
    SUM,
    ULCER_SQUARES,
    resample_indices,
    resample_metrics,
    resample_paths,
)
from tailguard.evaluate.stats.series import ROUNDING, Floats, as_columns, as_series, equity_of, require_periods, require_solvent
from tailguard.validation import require

TAILS = (0.01, 0.05)
OF_RETURN = ("sharpe", "sortino", "cagr")
OF_RISK = ("volatility", "max_drawdown", "calmar", "ulcer", "cvar_1", "cvar_5")
METRICS = OF_RETURN + OF_RISK


@dataclass(frozen=True)
class Interval:
    """A figure with its percentile interval.

    :param estimate: the figure of the data.
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
    """A strategy's figure minus another's.

    :param error: standard deviation of the resampled differences.
    :param p_higher: one-sided p-value of "the first is not higher": how often resamples, moved so that there is no
        difference, reach the observed one.
    :param p_lower: likewise of "the first is not lower".
    """

    error: float
    p_higher: float
    p_lower: float


@dataclass(frozen=True)
class Bootstrap:
    """Resampled figures of several strategies.

    :param names: of the strategies, S of them.
    :param estimates: the figures of the data, ``[S]`` for each of :data:`METRICS`; positive is good except for volatility,
        drawdown and ulcer. `cvar_1` and `cvar_5` are returns per bar, the rest is per year.
    :param draws: the same of each resample, ``[B, S]``.
    :param block: expected length of a block, in bars, for the figures of return.
    :param risk_block: the same for the figures of risk.
    :param seed: of the draws.
    """

    names: tuple[str, ...]
    estimates: Mapping[str, Floats]
    draws: Mapping[str, Floats]
    block: float
    risk_block: float
    seed: int

    def interval(self, metric: str, name: str, level: float = 0.95) -> Interval:
        """A figure of one strategy.

        :param metric: one of :data:`METRICS`.
        :param name: of the strategy.
        :param level: in (0, 1).
        """
        column = self._column(metric, name)
        low, high = _percentiles(self.draws[metric][:, column], level)
        return Interval(float(self.estimates[metric][column]), low, high, level)

    def difference(self, metric: str, name: str, against: str, level: float = 0.95) -> Difference:
        """How far a strategy is above another, resample by resample.

        :param metric: one of :data:`METRICS`.
        :param name: of the strategy.
        :param against: of the other.
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

    def _column(self, metric: str, name: str) -> int:
        require(metric in METRICS, "metric", metric, f"one of {', '.join(METRICS)}")
        require(name in self.names, "the strategy", name, f"one of {', '.join(self.names)}")
        return self.names.index(name)


def bootstrap(
    returns: Mapping[str, ArrayLike], periods: float, *, draws: int = 5000, block: float | None = None, seed: int = 0
) -> Bootstrap:
    """Resample several strategies together and measure each of :data:`METRICS` every time.

    :param returns: from names to simple returns ``[T]`` over the same bars, at least 8, each above -1.
    :param periods: bars per year.
    :param draws: resamples; 5,000 give the ends of a 95 % interval to about 3 % of its width.
    :param block: expected length of a block for all figures. None takes :func:`return_block_length` for the figures of return
        and :func:`risk_block_length` for those of risk, which costs a second run.
    :param seed: of the draws; the same seed, data and block give the same resamples.
    """
    require_periods(periods)
    columns = as_columns("returns", returns, FEWEST_BARS)
    require_solvent("returns", columns)
    rows = np.ascontiguousarray(columns.T)  # [S, T]
    estimates = [_measured(row, periods) for row in rows]
    short = return_block_length(returns) if block is None else block
    long = risk_block_length(returns) if block is None else block
    resampled = _resampled(rows, periods, draws, short, seed)
    if long != short:
        of_risk = _resampled(rows, periods, draws, long, seed)
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
    """The longest block that any of the strategies asks for (Politis and White).

    :param returns: from names to returns ``[T]``, at least 8 bars.
    """
    columns = as_columns("returns", returns, FEWEST_BARS)
    return max(optimal_block_length(column) for column in columns.T)


def risk_block_length(returns: Mapping[str, ArrayLike]) -> float:
    """The longest block that any of the strategies asks for, for its returns or for their squares.

    Returns hardly remember, but their size does (volatility clusters). Blocks as short as the returns ask for break the
    clusters and make volatility, CVaR and drawdown look far too certain; blocks as long as the squares ask for would make
    the figures of return look too certain, because few of them fit in the data.

    :param returns: from names to returns ``[T]``, at least 8 bars.
    """
    columns = as_columns("returns", returns, FEWEST_BARS)
    return max(optimal_block_length(series) for column in columns.T for series in (column, (column - column.mean()) ** 2))


def stationary_indices(n: int, draws: int, block: float, seed: int = 0) -> NDArray[np.int64]:
    """The bars of each resample, ``[draws, n]``, for statistics of your own; those that :func:`bootstrap` uses.

    :param n: bars of the data.
    :param draws: resamples.
    :param block: expected length of a block, from 1 (independent bars) to n.
    :param seed: of the draws.
    """
    require(n >= 1, "n", n, "at least 1")
    out = np.empty((_checked_draws(draws), n), dtype=np.int64)
    resample_indices(out, _restart(block, n), np.random.default_rng(seed))
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
    """Percentiles of what the equity might have become, for the band around an equity curve that starts at 1.

    :param returns: ``[T]``, simple, at least 8, each above -1.
    :param levels: ``[L]``, percentiles in (0, 1).
    :param points: bars at which the band is given, the first and the last included; at most T + 1 are used.
    :param draws: resamples.
    :param block: expected length of a block; None takes :func:`risk_block_length`.
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
    resample_paths(np.log1p(values), _restart(block, len(values)), np.random.default_rng(seed), at, paths)
    return at, np.exp(np.quantile(paths, shares, axis=0))


def _restart(block: float, n: int) -> float:
    require(1.0 <= block <= n, "block", block, f"from 1 to the number of bars, {n}")
    return 1.0 / block


def _checked_draws(draws: int) -> int:
    require(draws >= 2, "draws", draws, "at least 2")
    return draws


def _resampled(rows: Floats, periods: float, draws: int, block: float, seed: int) -> dict[str, Floats]:
    centres = rows.mean(axis=1)
    out = np.empty((_checked_draws(draws), len(rows), FIRST_TAIL + len(TAILS)))
    restart, generator = _restart(block, rows.shape[1]), np.random.default_rng(seed)
    resample_metrics(rows, centres, np.argsort(rows, axis=1), np.array(TAILS), restart, generator, out)
    return _from_sums(out, centres, rows.shape[1], periods)


def _measured(row: Floats, periods: float) -> dict[str, float]:
    equity = equity_of(row)
    return {
        "sharpe": performance.sharpe(row, periods),
        "sortino": performance.sortino(row, periods),
        "cagr": performance.cagr(equity, periods),
        "volatility": performance.volatility(row, periods),
        "max_drawdown": performance.max_drawdown(equity),
        "calmar": performance.calmar(equity, periods),
        "ulcer": performance.ulcer(equity),
        "cvar_1": performance.cvar(row, TAILS[0]),
        "cvar_5": performance.cvar(row, TAILS[1]),
    }


def _from_sums(sums: Floats, centres: Floats, n: int, periods: float) -> dict[str, Floats]:
    """The metrics ``[B, S]`` from the kernel's sums ``[B, S, FIRST_TAIL + A]``."""
    shift = sums[..., SUM] / n
    mean = centres + shift
    variance = (sums[..., SQUARES] - sums[..., SUM] * shift) / (n - 1)
    deviation = np.sqrt(np.where(variance > ROUNDING**2, variance, 0.0))
    downside = np.sqrt(sums[..., DOWNSIDE] / n)
    growth = np.expm1(sums[..., LOG_GROWTH] * periods / n)
    year = math.sqrt(periods)
    return {
        "sharpe": _ratios(mean, deviation) * year,
        "sortino": _ratios(mean, downside) * year,
        "cagr": growth,
        "volatility": deviation * year,
        "max_drawdown": sums[..., MAX_DRAWDOWN],
        "calmar": _ratios(growth, sums[..., MAX_DRAWDOWN]),
        "ulcer": np.sqrt(sums[..., ULCER_SQUARES] / (n + 1)),  # the start counts as a bar without drawdown
        "cvar_1": sums[..., FIRST_TAIL],
        "cvar_5": sums[..., FIRST_TAIL + 1],
    }


def _ratios(gain: Floats, risk: Floats) -> Floats:
    """0 where nothing moved, infinite where a gain had no risk: the rule of :mod:`tailguard.evaluate.stats.performance`."""
    riskless = np.where(np.abs(gain) <= ROUNDING, 0.0, np.copysign(np.inf, gain))
    return np.where(risk > 0.0, gain / np.where(risk > 0.0, risk, 1.0), riskless)


def _minus(first: Floats, second: Floats) -> Floats:
    """The difference, 0 where both are infinite alike."""
    same = first == second
    return np.where(same, 0.0, np.where(same, 0.0, first) - np.where(same, 0.0, second))


def _percentiles(draws: Floats, level: float) -> tuple[float, float]:
    require(0.0 < level < 1.0, "level", level, "in (0, 1)")
    # Order statistics instead of interpolation, which would make NaN of infinities.
    low, high = np.quantile(draws, [(1.0 - level) / 2.0, (1.0 + level) / 2.0], method="inverted_cdf")
    return float(low), float(high)


def _share(happened: NDArray[np.bool_]) -> float:
    """A p-value that is never 0: the data count as one more resample."""
    return (1.0 + float(happened.sum())) / (len(happened) + 1.0)
