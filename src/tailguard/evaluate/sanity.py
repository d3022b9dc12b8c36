"""Sanity checks of an agent's decisions: baselines, other costs, a delay, block permutations, regimes, training seeds."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.record import AccountHistory, CostPoint, Delay, Dispersion
from tailguard.evaluate.stats import performance
from tailguard.evaluate.stats.series import Floats, equity_of
from tailguard.market.baselines import Strategy, strategy
from tailguard.validation import require

COST_MULTIPLES = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)
VOLATILITY_WINDOW = 21
FEWEST_REGIME_BARS = 8
MARKET, CASH = "buy_and_hold", "cash"
RANDOM, PERMUTED = "random_positions", "own_permuted"
CHANCE = (RANDOM, PERMUTED)  # one draw of luck each: baselines that nobody could have preferred
REGIME_COLUMNS = (
    "kind", "regime", "bars", "agent_return", "agent_sharpe", "market_return", "market_sharpe", "agent_max_drawdown",
    "exposure",
)  # fmt: skip


def baselines(window: BacktestWindow, agent: AccountHistory, permuted: AccountHistory, seed: int = 0) -> list[AccountHistory]:
    """Return the accounts that the agent is compared with, under the same accounting.

    Standard rules; random positions that trade as much as the agent; and two made of the agent itself: the constant mix with
    its mean weights (`own_mix`), and its positions permuted in blocks (`own_permuted`).

    :param window: where all trade.
    :param agent: account of the agent, for mean weights and turnover.
    :param permuted: account of its permuted positions, from :func:`permutations`.
    :param seed: of the random positions.
    """
    n, assets = agent.weights.shape
    names = ["moving_average", "momentum", "volatility_target"] + (["equal_weight"] if assets > 1 else [])
    histories = [window.trade_strategy(name, strategy(name)) for name in (MARKET, *names)]
    histories.append(window.trade_strategy(RANDOM, matched_random_positions(agent, seed)))
    mix = np.broadcast_to(agent.weights.mean(axis=0), (n, assets))
    return [*histories, window.trade("own_mix", mix), window.trade(CASH, np.zeros((n, assets))), permuted]


def matched_random_positions(agent: AccountHistory, seed: int = 0) -> Strategy:
    """Return random positions that trade as much as the agent.

    :param agent: its account, for the turnover.
    :param seed: of the draws.
    """
    turnover = float(np.clip(agent.turnover.mean(), 1.0 / len(agent.turnover), 1.0))
    return strategy(RANDOM, turnover=turnover, seed=seed)


def block_orders(n: int, block: int, count: int, seed: int) -> Iterator[NDArray[np.intp]]:
    """Yield random permutations of n rows in which blocks stay together.

    The rows are rotated by a random number before they are cut, so that no row is always at the edge of a block.

    :param n: rows.
    :param block: rows per block, the last one may be shorter.
    :param count: permutations.
    :param seed: of the draws.
    """
    require(1 <= block <= n, "block", block, f"from 1 to the number of rows, {n}")
    generator = np.random.default_rng(seed)
    for _ in range(count):
        rotated = (np.arange(n) + generator.integers(n)) % n
        blocks = [rotated[first : first + block] for first in range(0, n, block)]
        yield np.concatenate([blocks[i] for i in generator.permutation(len(blocks))])


def permutation_block(n: int) -> int:
    """Return the rows per block, about sqrt(n): blocks and their number both grow with the data."""
    return max(round(math.sqrt(n)), 1)


def permutations(window: BacktestWindow, targets: ArrayLike, count: int = 499, seed: int = 0) -> tuple[Floats, AccountHistory]:
    """Trade block permutations of the agent's decisions: the same exposure and nearly the same trading, other timing.

    :param window: where they are traded.
    :param targets: ``[n, assets]`` of the agent.
    :param count: permutations; with 499 the lowest p-value is 0.002.
    :param seed: of the permutations.
    :return: annual Sharpe ratios ``[count]``, and the account of the permutation with the median one.
    """
    weights, periods = np.asarray(targets, dtype=np.float64), window.periods_per_year
    standing = pd.DataFrame(weights).ffill().to_numpy(dtype=np.float64)

    def permuted(order: NDArray[np.intp]) -> AccountHistory:
        rows, starts = weights[order], np.flatnonzero(np.diff(order, prepend=-2) != 1)
        rows[starts] = standing[
            order[starts]
        ]  # a block that begins by holding holds what it held, not what came before it here
        return window.trade(PERMUTED, rows)

    orders = list(block_orders(len(weights), permutation_block(len(weights)), count, seed))
    sharpes = np.array([performance.sharpe(permuted(order).excess, periods) for order in orders])
    return sharpes, permuted(orders[int(np.argsort(sharpes, kind="stable")[count // 2])])


def cost_curve(window: BacktestWindow, targets: ArrayLike, multiples: Sequence[float] = COST_MULTIPLES) -> list[CostPoint]:
    """Trade the agent's decisions at other costs.

    :param window: with the costs as tested.
    :param targets: ``[n, assets]`` of the agent.
    :param multiples: of fee, spread, slippage and impact.
    """
    points = []
    for multiple in multiples:
        history = window.at_costs(multiple).trade("agent", targets)
        points.append(CostPoint(multiple, performance.sharpe(history.excess, window.periods_per_year), history.total_return))
    return points


def break_even_cost(window: BacktestWindow, targets: ArrayLike) -> float | None:
    """Compute the cost per traded notional at which the account ends where cash does.

    That is the growth over cash without costs, in logarithms, over the turnover; costs of c take about c times the turnover.

    :return: a share of the traded notional, None if nothing is ever traded.
    """
    free = window.at_costs(0.0).trade("agent", targets)
    turnover = float(free.turnover.mean())
    growth = float((np.log1p(free.returns) - np.log1p(free.riskless)).mean())
    return growth / turnover if turnover > 0.0 else None


def delayed(window: BacktestWindow, targets: ArrayLike, agent: AccountHistory, bars: int = 1) -> Delay:
    """Trade the agent's decisions some bars later, in cash until the first arrives.

    :param window: where they are traded.
    :param targets: ``[n, assets]`` of the agent.
    :param agent: account of the agent as tested.
    :param bars: of delay, at least 1.
    """
    weights = np.asarray(targets, dtype=np.float64)
    require(1 <= bars < len(weights), "bars", bars, f"from 1 to {len(weights) - 1}")
    late = window.trade("agent", np.concatenate([np.zeros_like(weights[:bars]), weights[:-bars]]))
    periods = window.periods_per_year
    sharpes = [performance.sharpe(history.excess, periods) for history in (late, agent)]
    return Delay(bars, sharpes[0], late.total_return, sharpes[1], agent.total_return)


def regimes(moves: Floats, agent: AccountHistory, market: AccountHistory, periods: float) -> pd.DataFrame:
    """Return the agent's results by regime: each calendar year, and bars of low, usual and high volatility.

    The volatility of a bar is that of the market over the month before it; the regimes are its terciles over the test (calm,
    usual, stormy). They describe and cannot be traded: the terciles are known only at the end.

    :param moves: ``[n]`` returns of the market; where it does not move there are no regimes of volatility.
    :param agent: account of the agent.
    :param market: account that holds the market.
    :param periods: bars per year.
    :return: see :class:`tailguard.evaluate.record.Sanity`.
    """
    years = agent.times.year.to_numpy()
    parts = [("year", str(year), years == year) for year in np.unique(years)]
    recent = pd.Series(moves).rolling(VOLATILITY_WINDOW).std().shift(1).to_numpy(dtype=np.float64)
    known = np.isfinite(recent)
    if known.any() and market.name != CASH:
        low, high = np.quantile(recent[known], [1.0 / 3.0, 2.0 / 3.0])
        parts += [
            ("volatility", "calm", known & (recent <= low)),
            ("volatility", "usual", known & (recent > low) & (recent <= high)),
            ("volatility", "stormy", known & (recent > high)),
        ]
    rows = [_regime(kind, name, where, agent, market, periods) for kind, name, where in parts]
    return pd.DataFrame(rows, columns=list(REGIME_COLUMNS))


def dispersion(
    seeds: Sequence[AccountHistory], fold_rows: Sequence[int], periods: float, draws: int = 2000
) -> Dispersion | None:
    """Compute the dispersion of the training seeds; None with fewer than two.

    The interquartile mean over all (fold, seed) pairs is that of Agarwal et al. (2021); its interval comes from resampling the
    seeds within each fold.

    :param seeds: accounts, one per seed.
    :param fold_rows: ``[F]`` bars of each fold.
    :param periods: bars per year.
    :param draws: resamples.
    """
    if len(seeds) < 2:
        return None
    sharpes = np.array([performance.sharpe(history.excess, periods) for history in seeds])
    edges = np.cumsum([0, *fold_rows])
    require(edges[-1] == len(seeds[0].returns), "the sum of fold_rows", edges[-1], "the number of bars")
    folds = list(pairwise(edges))
    table = np.array([[performance.sharpe(history.excess[a:b], periods) for history in seeds] for a, b in folds])  # [F, S]
    chosen = np.random.default_rng(0).integers(len(seeds), size=(draws, *table.shape))
    resampled = np.take_along_axis(np.broadcast_to(table, chosen.shape), chosen, axis=2).reshape(draws, -1)
    low, high = np.quantile([interquartile_mean(values) for values in resampled], [0.025, 0.975])
    quartiles = np.quantile(sharpes, [0.5, 0.25, 0.75])
    middle = interquartile_mean(table.ravel())
    return Dispersion(*map(float, (*quartiles, sharpes.min(), sharpes.max(), middle, low, high)))


def interquartile_mean(values: ArrayLike) -> float:
    """Compute the mean of the middle half; values at its edges count by the share of them that lies inside."""
    ordered = np.sort(np.asarray(values, dtype=np.float64).ravel())
    n = len(ordered)
    ends = np.arange(n + 1) / n
    weights = np.clip(np.minimum(ends[1:], 0.75) - np.maximum(ends[:-1], 0.25), 0.0, None)
    return float(ordered @ weights / weights.sum())


def _regime(
    kind: str, name: str, where: NDArray[np.bool_], agent: AccountHistory, market: AccountHistory, periods: float
) -> dict[str, object]:
    bars = int(where.sum())

    def figures(history: AccountHistory) -> tuple[float, float, float]:
        if bars < FEWEST_REGIME_BARS:
            return math.nan, math.nan, math.nan
        equity = equity_of(history.returns[where])
        return float(equity[-1] - 1.0), performance.sharpe(history.excess[where], periods), performance.max_drawdown(equity)

    own, held = figures(agent), figures(market)
    exposure = performance.exposure(agent.weights[where]) if bars and agent.traded else math.nan
    return dict(zip(REGIME_COLUMNS, (kind, name, bars, own[0], own[1], held[0], held[1], own[2], exposure), strict=True))
