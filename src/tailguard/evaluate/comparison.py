"""Several evaluations on the same bars: which is better than the market or than another, given that one can choose."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from tailguard.evaluate.ledger import count_different
from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.stats.bootstrap import Difference, Interval, bootstrap
from tailguard.evaluate.stats.dependence import variance_inflation
from tailguard.evaluate.stats.series import ROUNDING, Floats
from tailguard.evaluate.stats.significance import deflated_sharpe, overfitting
from tailguard.evaluate.stats.superiority import SuperiorAbility, superior_ability, superior_strategies

FEWEST_BARS = 40
ALIKE = 1.5  # times as many bars per year that runs may have whose bars are compared one by one
RANKS = (0.05, 0.95)


@dataclass(frozen=True)
class Ranked:
    """A run among others.

    :param name: of the run.
    :param sharpe: annual Sharpe ratio over the bars that all runs share.
    :param best: share of the resamples in which no other run has a higher Sharpe ratio.
    :param low_rank: its rank in the best 5 % of the resamples; 1 is the best.
    :param high_rank: its rank in the worst 5 %.
    :param beats_market: True if it beats its market by the stepwise test over all runs (StepM, 5 %).
    """

    name: str
    sharpe: Interval
    best: float
    low_rank: int
    high_rank: int
    beats_market: bool


@dataclass(frozen=True)
class Comparison:
    """Runs compared over the bars that they share.

    :param first: time of the first bar.
    :param last: time of the last bar.
    :param bars: number of them.
    :param ranking: the runs, the highest Sharpe ratio first.
    :param differences: of the Sharpe ratios, for each pair in the order of the ranking.
    :param different: number of runs, where those with nearly the same returns count as one.
    :param trials: number of trials that the best run is corrected for: at least those of every record.
    :param deflated: deflated Sharpe ratio of the best run, a confidence; None if its account never moved.
    :param superior: test that no run beats its market, given how many there are (SPA), at equal volatility.
    :param pbo: probability of backtest overfitting of choosing the best run.
    """

    first: pd.Timestamp
    last: pd.Timestamp
    bars: int
    ranking: tuple[Ranked, ...]
    differences: tuple[tuple[str, str, Difference], ...]
    different: int
    trials: int
    deflated: float | None
    superior: SuperiorAbility
    pbo: float


def compare_runs(
    evaluations: Sequence[Evaluation], names: Sequence[str], *, draws: int = 5000, seed: int = 0
) -> Comparison | None:
    """Compare runs over the bars that they share.

    :param evaluations: at least 2.
    :param names: of the runs, all different.
    :param draws: resamples.
    :param seed: of the resamples.
    :return: None if they share too few bars, or if their bars are of different length.
    """
    lengths = [record.periods_per_year for record in evaluations]
    if max(lengths) > ALIKE * min(lengths):
        return None
    agents = [pd.Series(record.agent.excess, record.agent.times) for record in evaluations]
    markets = [pd.Series(record.history(record.market).excess, record.agent.times) for record in evaluations]
    table = pd.concat([*agents, *markets], axis=1, join="inner")
    if len(table) < FEWEST_BARS:
        return None
    values = table.to_numpy(dtype=np.float64)
    excess, market = values[:, : len(agents)], values[:, len(agents) :]
    resamples = bootstrap(dict(zip(names, excess.T, strict=True)), evaluations[0].periods_per_year, draws=draws, seed=seed)
    order = sorted(names, key=lambda name: -resamples.interval("sharpe", name).estimate)
    leads = {name: _at_volatility(excess[:, i], market[:, i]) for i, name in enumerate(names)}
    winners = superior_strategies(np.zeros(len(table)), leads, draws=draws, seed=seed)
    ranks = (-resamples.draws["sharpe"]).argsort(axis=1, kind="stable").argsort(axis=1) + 1  # [B, S]
    ranking = []
    for name in order:
        own = ranks[:, list(names).index(name)]
        low, high = np.quantile(own, RANKS, method="inverted_cdf")
        sharpe = resamples.interval("sharpe", name)
        ranking.append(Ranked(name, sharpe, float((own == 1).mean()), int(low), int(high), name in winners))
    best = list(names).index(order[0])
    different = count_different(_correlations(excess))
    trials = max(different, *(record.provenance.trials for record in evaluations))  # the later ones know of more
    moves = float(excess[:, best].std()) > ROUNDING
    return Comparison(
        first=table.index[0],
        last=table.index[-1],
        bars=len(table),
        ranking=tuple(ranking),
        differences=tuple(
            (first, second, resamples.difference("sharpe", first, second)) for first, second in combinations(order, 2)
        ),
        different=different,
        trials=trials,
        deflated=deflated_sharpe(excess[:, best], trials, inflation=variance_inflation(excess[:, best])) if moves else None,
        superior=superior_ability(np.zeros(len(table)), leads, draws=draws, seed=seed),
        pbo=overfitting(excess).probability,
    )


def _at_volatility(returns: Floats, market: Floats) -> Floats:
    """Return the lead over the market, with the run scaled to the market's volatility; an idle run stays idle."""
    own, other = float(returns.std()), float(market.std())
    return (returns * (other / own) if own > ROUNDING and other > ROUNDING else returns) - market


def _correlations(columns: Floats) -> Floats:
    """Return the correlations ``[S, S]``, 0 with an account that never moves."""
    moves = columns.std(axis=0) > ROUNDING
    table = np.eye(columns.shape[1])
    if moves.any():
        table[np.ix_(moves, moves)] = np.corrcoef(columns[:, moves], rowvar=False)
    return table
