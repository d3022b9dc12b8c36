"""Build the record of an evaluation from the decisions of an agent: trade them, compare them, reach a verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from tailguard.evaluate import sanity
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.record import AccountHistory, CriticCalibration, Dispersion, Estimate, Evaluation, Provenance, Sanity
from tailguard.evaluate.stats import performance
from tailguard.evaluate.stats.bootstrap import METRICS, Bootstrap, bootstrap
from tailguard.evaluate.stats.performance import AlphaBeta, alpha_beta
from tailguard.evaluate.stats.series import ROUNDING, Floats
from tailguard.evaluate.stats.significance import deflated_sharpe, minimum_track_record, overfitting, probabilistic_sharpe
from tailguard.evaluate.verdict import AGENT, VerdictRules, judge
from tailguard.validation import require


@dataclass(frozen=True)
class Effort:
    """The amount of computation; the defaults suit a verdict, smaller numbers suit tests.

    :param draws: resamples of the bootstrap.
    :param permutations: of the agent's positions.
    :param seed: of the resamples and the permutations.
    """

    draws: int = 5000
    permutations: int = 499
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Context:
    """The parts of a record that are not computed from the decisions.

    :param title: one line.
    :param source: name of the data.
    :param folds: table of folds; see :class:`tailguard.evaluate.record.Evaluation` for this and the fields below.
    :param training: table of training curves.
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
    calibration: CriticCalibration | None = None
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
    """Evaluate an agent by the decisions of its training seeds.

    :param window: the out-of-sample bars and the rules of trading.
    :param targets: target weights ``[n, assets]`` of each seed by name, all folds one after another.
    :param fold_rows: ``[F]`` bars of each fold, n in all.
    :param context: the rest of the record.
    :param rules: of the verdict.
    :param effort: of the computation.
    """
    effort = effort or Effort()
    require(len(targets) >= 1, "targets", dict(targets), "those of at least one seed")
    weights = {name: np.asarray(target, dtype=np.float64) for name, target in targets.items()}
    ensemble = np.mean(list(weights.values()), axis=0)
    agent = window.trade(AGENT, ensemble)
    seeds = [window.trade(name, target) for name, target in weights.items()]
    permuted_sharpes, permuted = sanity.permutations(window, ensemble, effort.permutations, effort.seed)
    baselines = sanity.baselines(window, agent, permuted, effort.seed)
    market = next(history for history in baselines if history.name == sanity.MARKET)
    periods, trials = window.periods_per_year, context.provenance.trials
    accounts = [agent, *seeds, *baselines]
    resamples = bootstrap(
        {history.name: history.returns for history in accounts},
        periods,
        riskless=window.riskless,
        draws=effort.draws,
        seed=effort.seed,
    )
    returns = context.trial_returns
    verdict = judge(
        agent.excess,
        {history.name: history.excess for history in baselines},
        periods,
        market=sanity.MARKET,
        rules=rules,
        trials=trials,
        pbo=None if returns is None or returns.shape[1] < 2 else overfitting(returns).probability,
        seed_edges=[_hedged_sharpe(history, market, periods) for history in seeds],
        permuted_sharpes=permuted_sharpes,
        resamples=resamples,
    )
    return Evaluation(
        title=context.title,
        source=context.source,
        periods_per_year=periods,
        prices=window.prices,
        agent=agent,
        seeds=seeds,
        baselines=baselines,
        market=sanity.MARKET,
        statistics={history.name: account_statistics(history, market, periods, trials, resamples) for history in accounts},
        verdict=verdict,
        sanity=_sanity(window, ensemble, agent, market, sanity.dispersion(seeds, fold_rows, periods), permuted_sharpes),
        calibration=context.calibration,
        folds=context.folds,
        training=context.training,
        provenance=context.provenance,
        warnings=context.warnings,
        attack=context.attack,
        lineage=context.lineage,
    )


def _sanity(
    window: BacktestWindow,
    targets: Floats,
    agent: AccountHistory,
    market: AccountHistory,
    dispersion: Dispersion | None,
    permuted_sharpes: Floats,
) -> Sanity:
    """Run the sanity checks of the agent's target weights."""
    reached = float((permuted_sharpes >= performance.sharpe(agent.excess, window.periods_per_year)).sum())
    return Sanity(
        cost_curve=sanity.cost_curve(window, targets),
        break_even_cost=sanity.break_even_cost(window, targets),
        delay=sanity.delayed(window, targets, agent),
        regimes=sanity.regimes(window, agent, market),
        dispersion=dispersion,
        permutation_p=(1.0 + reached) / (len(permuted_sharpes) + 1.0),
        permutation_block=sanity.permutation_block(len(targets)),
    )


def account_statistics(
    history: AccountHistory, market: AccountHistory, periods: float, trials: int, resamples: Bootstrap
) -> dict[str, Estimate]:
    """Compute all statistics of an account.

    :param history: of the account.
    :param market: history of the account that holds the market.
    :param periods: bars per year.
    :param trials: number of trials, for the deflated Sharpe ratio.
    :param resamples: of accounts that include this one and the agent.
    """
    intervals = {metric: resamples.interval(metric, history.name) for metric in METRICS}
    table = {metric: Estimate(interval.estimate, interval.low, interval.high) for metric, interval in intervals.items()}
    excess = history.excess
    moves = float(np.std(excess)) > ROUNDING
    relation = _relation(history, market, periods)
    table |= {
        "total_return": Estimate(history.total_return),
        "lo_sharpe": Estimate(performance.lo_sharpe(excess, periods)),
        "cdar_5": Estimate(performance.cdar(history.equity, 0.05)),
        "turnover": Estimate(performance.turnover(history.turnover, periods)),
        "exposure": Estimate(performance.exposure(history.weights)),
        "net_exposure": Estimate(performance.net_exposure(history.weights)),
        "hit_rate": Estimate(performance.hit_rate(excess)),
        "costs": Estimate(history.total_costs),
        "cost_share": Estimate(performance.cost_share(history.excess_return, history.total_costs)),
        "alpha": Estimate(relation.alpha if relation else math.nan),
        "alpha_t": Estimate(relation.alpha_t if relation else math.nan),
        "beta": Estimate(relation.beta if relation else math.nan),
        "probabilistic_sharpe": Estimate(probabilistic_sharpe(excess) if moves else math.nan),
        "deflated_sharpe": Estimate(deflated_sharpe(excess, trials) if moves else math.nan),
        "minimum_track_record": Estimate(minimum_track_record(excess) if moves else math.nan),
    }
    if history.name != AGENT:
        lead = resamples.difference("sharpe", AGENT, history.name)
        table["agent_lead"] = Estimate(lead.estimate, lead.low, lead.high)
    return table


def _relation(history: AccountHistory, market: AccountHistory, periods: float) -> AlphaBeta | None:
    """Regress an account on the market; None where the market does not move and there is no beta."""
    return alpha_beta(history.excess, market.excess, periods) if float(np.std(market.excess)) > ROUNDING else None


def _hedged_sharpe(history: AccountHistory, market: AccountHistory, periods: float) -> float:
    """Compute the annual Sharpe ratio of the account hedged against the market, which is how the verdict measures its lead."""
    relation = _relation(history, market, periods)
    return 0.0 if relation is None else relation.alpha_t * math.sqrt(periods / len(history.returns))
