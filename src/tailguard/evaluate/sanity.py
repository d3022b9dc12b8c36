"""What a sceptic tries on the agent's decisions: other costs, a delay, another order, parts of the time, other seeds."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.record import AccountHistory, CostPoint, Delay, Dispersion, Floats
from tailguard.evaluate.stats import performance
from tailguard.market.baselines import strategy
from tailguard.validation import require

COST_MULTIPLES = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)
VOLATILITY_WINDOW = 21
FEWEST_REGIME_BARS = 8
MARKET = "buy_and_hold"
PERMUTED = "own_permuted"
REGIME_COLUMNS = (
    "kind", "regime", "bars", "agent_return", "agent_sharpe", "market_return", "market_sharpe", "agent_max_drawdown",
    "exposure",
)  # fmt: skip


def baselines(window: BacktestWindow, agent: AccountHistory, permuted: AccountHistory, seed: int = 0) -> list[AccountHistory]:
    """What the agent has to beat, under the same accounting.

    The rules that everybody knows; random positions that trade as much as the agent; and two made of the agent itself: the
    constant mix with its mean weights (`own_mix`), and its positions permuted in blocks (`own_permuted`).

    :param venue: where all trade.
    :param agent: its track, for mean weights and turnover.
    :param permuted: the track of its positions in another order, from :func:`permutations`.
    :param seed: of the random positions.
    """
    n, assets = agent.weights.shape
    turnover = float(np.clip(agent.turnover.mean(), 1.0 / n, 1.0))
    names = ["moving_average", "momentum", "volatility_target"] + (["equal_weight"] if assets > 1 else [])
    tracks = [window.follow(name, strategy(name)) for name in (MARKET, *names)]
    tracks.append(window.follow("random_positions", strategy("random_positions", turnover=turnover, seed=seed)))
    mix = np.broadcast_to(agent.weights.mean(axis=0), (n, assets))
    return [*tracks, window.trade("own_mix", mix), window.trade("cash", np.zeros((n, assets))), permuted]


def block_orders(n: int, block: int, count: int, seed: int) -> Iterator[NDArray[np.intp]]:
    """Orders of n rows in which blocks stay together.

    The rows are closed to a ring and turned by chance before they are cut, so that no row is always at the edge of a block.

    :param n: rows.
    :param block: rows per block, the last one may be shorter.
    :param count: orders.
    :param seed: of the draws.
    """
    require(1 <= block <= n, "block", block, f"from 1 to the number of rows, {n}")
    generator = np.random.default_rng(seed)
    for _ in range(count):
        ring = (np.arange(n) + generator.integers(n)) % n
        pieces = [ring[first : first + block] for first in range(0, n, block)]
        yield np.concatenate([pieces[i] for i in generator.permutation(len(pieces))])


def permutation_block(n: int) -> int:
    """Rows per block: about sqrt(n), which lets both the blocks and their number grow with the data."""
    return max(round(math.sqrt(n)), 1)


def permutations(window: BacktestWindow, targets: ArrayLike, count: int = 499, seed: int = 0) -> tuple[Floats, AccountHistory]:
    """The agent's own decisions in another order: the same exposure and nearly the same trading, without its timing.

    :param venue: where they are traded.
    :param targets: ``[n, assets]`` the agent's.
    :param count: permutations; 499 make the least p-value 0.002.
    :param seed: of the orders.
    :return: annual Sharpe ratios ``[count]``, and the track of the permutation in their middle.
    """
    wanted, periods = np.asarray(targets, dtype=np.float64), window.periods_per_year
    orders = list(block_orders(len(wanted), permutation_block(len(wanted)), count, seed))
    sharpes = np.array([performance.sharpe(window.trade(PERMUTED, wanted[order]).returns, periods) for order in orders])
    middle = int(np.argsort(sharpes, kind="stable")[count // 2])
    return sharpes, window.trade(PERMUTED, wanted[orders[middle]])


def cost_curve(window: BacktestWindow, targets: ArrayLike, multiples: Sequence[float] = COST_MULTIPLES) -> list[CostPoint]:
    """The same decisions at other costs.

    :param venue: with the costs as tested.
    :param targets: ``[n, assets]`` the agent's.
    :param multiples: of fee, spread, slippage and impact.
    """
    points = []
    for multiple in multiples:
        track = window.at_costs(multiple).trade("agent", targets)
        points.append(CostPoint(multiple, performance.sharpe(track.returns, window.periods_per_year), total_return(track)))
    return points


def break_even_cost(window: BacktestWindow, targets: ArrayLike) -> float | None:
    """Mean return without costs over mean turnover, both per bar: what a trade may cost before nothing is left.

    :return: a share of the traded notional, None if nothing is ever traded.
    """
    free = window.at_costs(0.0).trade("agent", targets)
    turnover = float(free.turnover.mean())
    return float(free.returns.mean()) / turnover if turnover > 0.0 else None


def delayed(window: BacktestWindow, targets: ArrayLike, agent: AccountHistory, bars: int = 1) -> Delay:
    """The same decisions, each traded some bars later; in cash until the first arrives.

    :param venue: where they are traded.
    :param targets: ``[n, assets]`` the agent's.
    :param agent: its track as tested.
    :param bars: of delay, at least 1.
    """
    wanted = np.asarray(targets, dtype=np.float64)
    require(1 <= bars < len(wanted), "bars", bars, f"from 1 to {len(wanted) - 1}")
    late = window.trade("agent", np.concatenate([np.zeros_like(wanted[:bars]), wanted[:-bars]]))
    periods = window.periods_per_year
    sharpes = [performance.sharpe(track.returns, periods) for track in (late, agent)]
    return Delay(bars, sharpes[0], total_return(late), sharpes[1], total_return(agent))


def regimes(window: BacktestWindow, agent: AccountHistory, market: AccountHistory) -> pd.DataFrame:
    """How the agent did in parts of the test: each calendar year, and calm, usual and stormy bars.

    A bar is stormy when the volatility of the market over the month before it was in the upper third of the test. The parts are
    for reading, not for trading: the thirds are known only at the end.

    :param venue: for the market's returns.
    :param agent: its track.
    :param market: the track of holding the market.
    :return: see :class:`tailguard.evaluate.record.Sanity`.
    """
    years = agent.times.year.to_numpy()
    parts = [("year", str(year), years == year) for year in np.unique(years)]
    moves = pd.Series(window.moves.mean(axis=1))
    recent = moves.rolling(VOLATILITY_WINDOW).std().shift(1).to_numpy(dtype=np.float64)
    known = np.isfinite(recent)
    if known.any():
        low, high = np.quantile(recent[known], [1.0 / 3.0, 2.0 / 3.0])
        parts += [
            ("volatility", "calm", known & (recent <= low)),
            ("volatility", "usual", known & (recent > low) & (recent <= high)),
            ("volatility", "stormy", known & (recent > high)),
        ]
    rows = [_regime(kind, name, where, agent, market, window.periods_per_year) for kind, name, where in parts]
    return pd.DataFrame(rows, columns=list(REGIME_COLUMNS))


def dispersion(
    seeds: Sequence[AccountHistory], fold_rows: Sequence[int], periods: float, draws: int = 2000
) -> Dispersion | None:
    """How far training seeds are apart; None with fewer than two.

    The interquartile mean is that of Agarwal et al. (2021): of all (fold, seed) pairs the middle half counts; its interval
    comes from drawing seeds anew within each fold.

    :param seeds: tracks, one per seed.
    :param fold_rows: ``[F]`` bars of each fold.
    :param periods: bars per year.
    :param draws: resamples.
    """
    if len(seeds) < 2:
        return None
    sharpes = np.array([performance.sharpe(track.returns, periods) for track in seeds])
    edges = np.cumsum([0, *fold_rows])
    require(edges[-1] == len(seeds[0].returns), "the sum of fold_rows", edges[-1], "the number of bars")
    folds = list(pairwise(edges))
    table = np.array([[performance.sharpe(track.returns[a:b], periods) for track in seeds] for a, b in folds])  # [F, S]
    chosen = np.random.default_rng(0).integers(len(seeds), size=(draws, *table.shape))
    resampled = np.take_along_axis(np.broadcast_to(table, chosen.shape), chosen, axis=2).reshape(draws, -1)
    low, high = np.quantile([interquartile_mean(values) for values in resampled], [0.025, 0.975])
    quartiles = np.quantile(sharpes, [0.5, 0.25, 0.75])
    middle = interquartile_mean(table.ravel())
    return Dispersion(*map(float, (*quartiles, sharpes.min(), sharpes.max(), middle, low, high)))


def interquartile_mean(values: ArrayLike) -> float:
    """Mean of the middle half; values at its edges count by the share of them that lies inside."""
    ordered = np.sort(np.asarray(values, dtype=np.float64).ravel())
    n = len(ordered)
    ends = np.arange(n + 1) / n
    weights = np.clip(np.minimum(ends[1:], 0.75) - np.maximum(ends[:-1], 0.25), 0.0, None)
    return float(ordered @ weights / weights.sum())


def total_return(track: AccountHistory) -> float:
    """Gain over the whole track, as a share of the start."""
    return float(track.equity[-1]) - 1.0


def _regime(
    kind: str, name: str, where: NDArray[np.bool_], agent: AccountHistory, market: AccountHistory, periods: float
) -> dict[str, object]:
    bars = int(where.sum())

    def figures(track: AccountHistory) -> tuple[float, float, float]:
        returns = track.returns[where]
        if bars < FEWEST_REGIME_BARS:
            return math.nan, math.nan, math.nan
        equity = np.concatenate([[1.0], np.cumprod(1.0 + returns)])
        return float(equity[-1] - 1.0), performance.sharpe(returns, periods), performance.max_drawdown(equity)

    own, held = figures(agent), figures(market)
    exposure = performance.exposure(agent.weights[where]) if bars else math.nan
    return dict(zip(REGIME_COLUMNS, (kind, name, bars, own[0], own[1], held[0], held[1], own[2], exposure), strict=True))
