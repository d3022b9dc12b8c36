"""From decisions to a record: trade them, compare them, judge them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from tailguard.evaluate import sanity
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.evidence import AGENT
from tailguard.evaluate.record import AccountHistory, Calibration, Evaluation, Figure, Floats, Provenance, Sanity
from tailguard.evaluate.stats import performance
from tailguard.evaluate.stats.bootstrap import METRICS, Bootstrap, bootstrap
from tailguard.evaluate.stats.overfitting import overfitting
from tailguard.evaluate.stats.regression import AlphaBeta, alpha_beta
from tailguard.evaluate.stats.series import ROUNDING
from tailguard.evaluate.stats.significance import deflated_sharpe, minimum_track_record, probabilistic_sharpe
from tailguard.evaluate.verdict import Verdict, VerdictRules, judge
from tailguard.validation import require


@dataclass(frozen=True)
class Effort:
    """How much is computed; the defaults are right for a verdict, smaller numbers for tests.

    :param draws: resamples of the bootstrap.
    :param permutations: of the agent's positions.
    :param seed: of both.
    """

    draws: int = 5000
    permutations: int = 499
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Context:
    """What a record holds that does not follow from the decisions.

    :param title: one line.
    :param source: name of the data.
    :param folds: table of folds; see :class:`tailguard.evaluate.record.Evaluation`, as for all that follow.
    :param training: curves.
    :param provenance: config, data, versions, seeds, trials, date.
    :param warnings: of the trainings.
    :param calibration: of the critic.
    :param attack: table of attacks.
    :param lineage: of a population.
    :param trial_returns: ``[n, N]`` returns of all trials, for the probability of backtest overfitting; None leaves it out.
    """

    title: str
    source: str
    folds: pd.DataFrame
    training: pd.DataFrame
    provenance: Provenance
    warnings: list[str] = field(default_factory=list)
    calibration: Calibration | None = None
    attack: pd.DataFrame | None = None
    lineage: list[dict[str, Any]] | None = None
    trial_returns: Floats | None = None


def assess(
    window: BacktestWindow,
    targets: Mapping[str, ArrayLike],
    fold_rows: Sequence[int],
    context: Context,
    rules: VerdictRules | None = None,
    effort: Effort | None = None,
) -> Evaluation:
    """Judge an agent by the decisions of its training seeds.

    :param venue: the out-of-sample bars and the rules of trading.
    :param targets: from the name of a seed to the weights ``[n, assets]`` that it asked for, all folds in a row.
    :param fold_rows: ``[F]`` bars of each fold, n in all.
    :param context: the rest of the record.
    :param rules: of the verdict.
    :param effort: of the computation.
    """
    effort = effort or Effort()
    require(len(targets) >= 1, "targets", dict(targets), "those of at least one seed")
    wanted = {name: np.asarray(each, dtype=np.float64) for name, each in targets.items()}
    ensemble = np.mean(list(wanted.values()), axis=0)
    agent = window.trade(AGENT, ensemble)
    seeds = [window.trade(name, each) for name, each in wanted.items()]
    permuted_sharpes, permuted = sanity.permutations(window, ensemble, effort.permutations, effort.seed)
    others = sanity.baselines(window, agent, permuted, effort.seed)
    market = next(track for track in others if track.name == sanity.MARKET)
    periods, trials = window.periods_per_year, context.provenance.trials
    everyone = [agent, *seeds, *others]
    resamples = bootstrap({track.name: track.returns for track in everyone}, periods, draws=effort.draws, seed=effort.seed)
    verdict = _verdict(agent, seeds, others, permuted_sharpes, resamples, periods, context, rules, effort)
    reached = float((permuted_sharpes >= performance.sharpe(agent.returns, periods)).sum())
    return Evaluation(
        title=context.title,
        source=context.source,
        periods_per_year=periods,
        prices=window.prices,
        agent=agent,
        seeds=seeds,
        baselines=others,
        market=sanity.MARKET,
        statistics={track.name: figures(track, market, periods, trials, resamples) for track in everyone},
        verdict=verdict,
        sanity=Sanity(
            cost_curve=sanity.cost_curve(window, ensemble),
            break_even_cost=sanity.break_even_cost(window, ensemble),
            delay=sanity.delayed(window, ensemble, agent),
            regimes=sanity.regimes(window, agent, market),
            dispersion=sanity.dispersion(seeds, fold_rows, periods),
            permutation_p=(1.0 + reached) / (len(permuted_sharpes) + 1.0),
            permutation_block=sanity.permutation_block(len(ensemble)),
        ),
        calibration=context.calibration,
        folds=context.folds,
        training=context.training,
        provenance=context.provenance,
        warnings=context.warnings,
        attack=context.attack,
        lineage=context.lineage,
    )


def figures(
    track: AccountHistory, market: AccountHistory, periods: float, trials: int, resamples: Bootstrap
) -> dict[str, Figure]:
    """All statistics of one track.

    :param track: the account.
    :param market: that of holding the market.
    :param periods: bars per year.
    :param trials: for the deflated Sharpe ratio.
    :param resamples: with this track, the agent and the market among them.
    """
    intervals = {metric: resamples.interval(metric, track.name) for metric in METRICS}
    table = {metric: Figure(each.estimate, each.low, each.high) for metric, each in intervals.items()}
    equity, paid = track.equity, float((track.costs * track.equity[:-1]).sum())
    moves = float(np.std(track.returns)) > ROUNDING
    relation = _relation(track, market, periods)
    table |= {
        "total_return": Figure(float(equity[-1]) - 1.0),
        "lo_sharpe": Figure(performance.lo_sharpe(track.returns, periods)),
        "cdar_5": Figure(performance.cdar(equity, 0.05)),
        "turnover": Figure(performance.turnover(track.turnover, periods)),
        "exposure": Figure(performance.exposure(track.weights)),
        "net_exposure": Figure(performance.net_exposure(track.weights)),
        "hit_rate": Figure(performance.hit_rate(track.returns)),
        "costs": Figure(paid),
        "cost_share": Figure(performance.cost_share(float(equity[-1]) - 1.0, paid)),
        "alpha": Figure(relation.alpha if relation else math.nan),
        "alpha_t": Figure(relation.alpha_t if relation else math.nan),
        "beta": Figure(relation.beta if relation else math.nan),
        "probabilistic_sharpe": Figure(probabilistic_sharpe(track.returns) if moves else math.nan),
        "deflated_sharpe": Figure(deflated_sharpe(track.returns, trials) if moves else math.nan),
        "minimum_track_record": Figure(minimum_track_record(track.returns) if moves else math.nan),
    }
    if track.name != AGENT:
        lead = resamples.difference("sharpe", AGENT, track.name)
        table["agent_lead"] = Figure(lead.estimate, lead.low, lead.high)
    return table


def _verdict(
    agent: AccountHistory,
    seeds: Sequence[AccountHistory],
    others: Sequence[AccountHistory],
    permuted_sharpes: Floats,
    resamples: Bootstrap,
    periods: float,
    context: Context,
    rules: VerdictRules | None,
    effort: Effort,
) -> Verdict:
    market = next(track for track in others if track.name == sanity.MARKET)
    trials = context.trial_returns
    return judge(
        agent.returns,
        {track.name: track.returns for track in others},
        periods,
        market=sanity.MARKET,
        rules=rules,
        trials=context.provenance.trials,
        pbo=None if trials is None or trials.shape[1] < 2 else overfitting(trials).probability,
        seed_edges=[_hedged_sharpe(track, market, periods) for track in seeds],
        permuted_sharpes=permuted_sharpes,
        draws=effort.draws,
        block=resamples.block,  # and the same seed: the same resamples, so the verdict has the intervals of the table
        seed=effort.seed,
    )


def _relation(track: AccountHistory, market: AccountHistory, periods: float) -> AlphaBeta | None:
    """None where the market does not move: there is no beta then."""
    return alpha_beta(track.returns, market.returns, periods) if float(np.std(market.returns)) > ROUNDING else None


def _hedged_sharpe(track: AccountHistory, market: AccountHistory, periods: float) -> float:
    """Annual Sharpe ratio of what the market does not explain, as the verdict measures the lead over it."""
    relation = _relation(track, market, periods)
    return 0.0 if relation is None else relation.alpha_t * math.sqrt(periods / len(track.returns))
