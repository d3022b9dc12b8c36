"""Build the record of an evaluation from the decisions of an agent: trade them, compare them, reach a verdict."""

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from tailguard.evaluate import sanity
from tailguard.evaluate.backtest_window import BacktestWindow, closes
from tailguard.evaluate.ledger import RETURNS, Ledger, Trial, count_trials, data_key, shared_returns
from tailguard.evaluate.record import AccountHistory, Calibration, Dispersion, Estimate, Evaluation, Provenance, Sanity
from tailguard.evaluate.stats import performance
from tailguard.evaluate.stats.bootstrap import METRICS, Bootstrap, bootstrap
from tailguard.evaluate.stats.dependence import variance_inflation
from tailguard.evaluate.stats.performance import AlphaBeta, alpha_beta
from tailguard.evaluate.stats.series import ROUNDING, Floats
from tailguard.evaluate.stats.significance import deflated_sharpe, minimum_track_record, overfitting, probabilistic_sharpe
from tailguard.evaluate.tail_calibration import calibrate_tail
from tailguard.evaluate.verdict import AGENT, Verdict, VerdictRules, judge
from tailguard.parallel.threads import one_thread
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
    :param critic_calibration: of the critic.
    :param attack: table of attacks.
    :param lineage: of a population.
    :param selection: table of the candidates that agents were selected from.
    :param instruments: table of the instruments of a pool.
    :param trial_returns: ``[n, N]`` returns of all trials, for the probability of backtest overfitting; None takes those of the
        ledger, if there is one.
    :param baselines: further accounts to compare with, which the agent has to beat, such as a benchmark.
    :param subject: what the report calls the account that is evaluated.
    """

    title: str
    source: str
    folds: pd.DataFrame
    training: pd.DataFrame
    provenance: Provenance
    warnings: list[str] = field(default_factory=list)
    critic_calibration: Calibration | None = None
    attack: pd.DataFrame | None = None
    lineage: list[dict[str, Any]] | None = None
    selection: pd.DataFrame | None = None
    instruments: pd.DataFrame | None = None
    trial_returns: Floats | None = None
    baselines: list[AccountHistory] = field(default_factory=list)
    subject: str = AGENT


@one_thread()
def assess(
    window: BacktestWindow,
    targets: Mapping[str, ArrayLike],
    fold_rows: Sequence[int],
    context: Context,
    rules: VerdictRules | None = None,
    effort: Effort | None = None,
    ledger: Ledger | None = None,
) -> Evaluation:
    """Evaluate an agent by the decisions of its training seeds.

    :param window: the out-of-sample bars and the rules of trading.
    :param targets: target weights ``[n, assets]`` of each seed by name, all folds one after another. A single one is the agent.
    :param fold_rows: ``[F]`` bars of each fold, n in all.
    :param context: the rest of the record.
    :param rules: of the verdict.
    :param effort: of the computation.
    :param ledger: counts the trials on these data and remembers this one; None takes the stated number of trials.
    """
    effort = effort or Effort()
    require(len(targets) >= 1, "targets", dict(targets), "those of at least one seed")
    weights = {name: np.asarray(target, dtype=np.float64) for name, target in targets.items()}
    ensemble = window.guarded(np.mean(list(weights.values()), axis=0))
    result = window.simulate(ensemble)
    agent = window.history(AGENT, result)
    seeds = [] if list(weights) == [AGENT] else [window.trade(name, window.guarded(target)) for name, target in weights.items()]
    permuted_sharpes, permuted = sanity.permutations(window, ensemble, effort.permutations, effort.seed)
    baselines = [*sanity.baselines(window, agent, permuted, effort.seed), *context.baselines]
    market = next(history for history in baselines if history.name == sanity.MARKET)
    periods = window.periods_per_year
    accounts = Accounts(agent, seeds, baselines, market)
    key = data_key(pd.DatetimeIndex(window.bars.index), closes(window.bars))
    context, verdict, figures = _tested(
        accounts,
        periods,
        context,
        rules,
        effort,
        (ledger, key, window.moves.mean(axis=1)),
        hurdles=[history.name for history in context.baselines],
        seed_edges=[_hedged_sharpe(history, market, periods) for history in seeds],
        permuted_sharpes=permuted_sharpes,
    )
    spread = sanity.dispersion(seeds, fold_rows, periods)
    checks = _sanity(window, ensemble, agent, market, spread, permuted_sharpes)
    record = _record(accounts, periods, window.prices, context, verdict, figures, checks, rules)
    return replace(record, trades=window.round_trips(result), calibration=calibrate_tail(window, ensemble))


@one_thread()
def assess_returns(
    agent: AccountHistory,
    benchmark: AccountHistory | None,
    periods: float,
    context: Context,
    rules: VerdictRules | None = None,
    effort: Effort | None = None,
    ledger: Ledger | None = None,
) -> Evaluation:
    """Evaluate a strategy of which only the returns are known: nothing is traded again, and its timing cannot be tested.

    :param agent: account of the strategy, without weights.
    :param benchmark: account that holds the market, over the same bars; None if there is none to compare with.
    :param periods: bars per year.
    :param context: the rest of the record.
    :param rules: of the verdict.
    :param effort: of the computation.
    :param ledger: counts the trials over these times and remembers this one; None takes the stated number of trials.
    """
    cash = replace(agent, name=sanity.CASH, returns=agent.riskless)
    market = cash if benchmark is None else benchmark
    accounts = Accounts(agent, [], [cash] if benchmark is None else [benchmark, cash], market)
    context, verdict, figures = _tested(accounts, periods, context, rules, effort or Effort(), (ledger, RETURNS, None))
    checks = Sanity([], None, None, sanity.regimes(market.returns, agent, market, periods), None, None, None)
    prices = pd.DataFrame(index=agent.times)
    return _record(accounts, periods, prices, context, verdict, figures, checks, rules)


class Accounts(NamedTuple):
    """The accounts of an evaluation.

    :param agent: the one that the verdict is about.
    :param seeds: of the training seeds alone.
    :param baselines: that it is compared with.
    :param market: the baseline that merely holds the market; the one in cash if no market is known.
    """

    agent: AccountHistory
    seeds: list[AccountHistory]
    baselines: list[AccountHistory]
    market: AccountHistory


def _tested(
    accounts: Accounts,
    periods: float,
    context: Context,
    rules: VerdictRules | None,
    effort: Effort,
    ledger: tuple[Ledger | None, str, Floats | None],
    **evidence: Any,
) -> tuple[Context, Verdict, dict[str, dict[str, Estimate]]]:
    """Reach the verdict and compute the statistics; the context comes back with the number of trials that was counted."""
    agent, seeds, baselines, market = accounts
    context = _with_counted_trials(agent, periods, context, *ledger)
    provenance = context.provenance
    histories = [agent, *seeds, *baselines]
    resamples = bootstrap(
        {history.name: history.returns for history in histories},
        periods,
        riskless=agent.riskless,
        draws=effort.draws,
        seed=effort.seed,
    )
    returns = context.trial_returns
    pbo = None if returns is None or returns.shape[1] < 2 else overfitting(returns).probability
    verdict = judge(
        agent.excess,
        {history.name: history.excess for history in baselines},
        periods,
        market=None if market.name == sanity.CASH else market.name,
        rules=rules,
        trials=provenance.trials,
        pbo=pbo,
        rivals=[history.name for history in baselines if history.name not in sanity.CHANCE],
        resamples=resamples,
        **evidence,
    )
    if ledger[0] is None:
        verdict = replace(verdict, reasons=(*verdict.reasons, f"{provenance.ledger}."))
    figures = {
        history.name: account_statistics(history, market, periods, provenance.trials, resamples) for history in histories
    }
    if pbo is not None:
        figures[AGENT]["pbo"] = Estimate(pbo)
    return context, verdict, figures


def _with_counted_trials(
    agent: AccountHistory, periods: float, context: Context, ledger: Ledger | None, key: str, moves: Floats | None
) -> Context:
    """Return the context with the trials of the ledger, at least as many as were stated, and add this one to the ledger."""
    provenance = context.provenance
    if ledger is None:
        said = f"The ledger of trials was off: {provenance.trials:,} is the number that was stated"
        return replace(context, provenance=replace(provenance, ledger=said))
    config = hashlib.sha256(provenance.config.encode()).hexdigest()[:16]
    own = Trial(
        data=key,
        fingerprint=provenance.fingerprint,
        config=config,
        title=context.title,
        source=context.source,
        date=provenance.date,
        sharpe=performance.sharpe(agent.excess, periods),
        times=agent.times,
        excess=agent.excess,
        market=moves,
    )
    try:
        others = ledger.append(own)
    except OSError as error:  # hours of training are not lost for it
        warnings.warn(f"{ledger.path}: the trial could not be recorded ({error.strerror})", UserWarning, stacklevel=2)
        others = ledger.related(own)
    counted = count_trials([*others, own])
    where = "over these times" if key == RETURNS else "on these data"
    trials = f"{counted:,} different trials" if counted > 1 else "1 trial"
    said = f"The ledger counts {trials} {where}, this one included; {provenance.trials:,} stated"
    returns = context.trial_returns if context.trial_returns is not None else shared_returns(own, others)
    provenance = replace(provenance, trials=max(counted, provenance.trials), ledger=said)
    return replace(context, provenance=provenance, trial_returns=returns)


def _record(
    accounts: Accounts,
    periods: float,
    prices: pd.DataFrame,
    context: Context,
    verdict: Verdict,
    figures: dict[str, dict[str, Estimate]],
    checks: Sanity,
    rules: VerdictRules | None,
) -> Evaluation:
    return Evaluation(
        title=context.title,
        source=context.source,
        periods_per_year=periods,
        prices=prices,
        agent=accounts.agent,
        seeds=accounts.seeds,
        baselines=accounts.baselines,
        market=accounts.market.name,
        statistics=figures,
        verdict=verdict,
        sanity=checks,
        calibration=None,
        critic_calibration=context.critic_calibration,
        folds=context.folds,
        training=context.training,
        provenance=context.provenance,
        warnings=context.warnings,
        attack=context.attack,
        lineage=context.lineage,
        selection=context.selection,
        instruments=context.instruments,
        subject=context.subject,
        rules=rules or VerdictRules(),
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
        regimes=sanity.regimes(window.moves.mean(axis=1), agent, market, window.periods_per_year),
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
    moves, inflation = float(np.std(excess)) > ROUNDING, variance_inflation(excess)
    relation = _relation(history, market, periods)
    table |= {
        "total_return": Estimate(history.total_return),
        "lo_sharpe": Estimate(performance.lo_sharpe(excess, periods)),
        "cdar_5": Estimate(performance.cdar(history.equity, 0.05)),
        **_trading_statistics(history, periods),
        "hit_rate": Estimate(performance.hit_rate(excess)),
        "alpha": Estimate(relation.alpha if relation else math.nan),
        "alpha_t": Estimate(relation.alpha_t if relation else math.nan),
        "beta": Estimate(relation.beta if relation else math.nan),
        "probabilistic_sharpe": Estimate(probabilistic_sharpe(excess, inflation=inflation) if moves else math.nan),
        "deflated_sharpe": Estimate(deflated_sharpe(excess, trials, inflation=inflation) if moves else math.nan),
        "minimum_track_record": Estimate(minimum_track_record(excess, inflation=inflation) if moves else math.nan),
    }
    if history.name != AGENT:
        lead = resamples.difference("sharpe", AGENT, history.name)
        table["agent_lead"] = Estimate(lead.estimate, lead.low, lead.high)
    return table


def _trading_statistics(history: AccountHistory, periods: float) -> dict[str, Estimate]:
    """Compute what the weights and costs of an account tell; nothing where only its returns are known."""
    if not history.traded:
        return {}
    return {
        "turnover": Estimate(performance.turnover(history.turnover, periods)),
        "exposure": Estimate(performance.exposure(history.weights)),
        "net_exposure": Estimate(performance.net_exposure(history.weights)),
        "costs": Estimate(history.total_costs),
        "cost_share": Estimate(performance.cost_share(history.excess_return, history.total_costs)),
    }


def _relation(history: AccountHistory, market: AccountHistory, periods: float) -> AlphaBeta | None:
    """Regress an account on the market; None where the market does not move and there is no beta."""
    return alpha_beta(history.excess, market.excess, periods) if float(np.std(market.excess)) > ROUNDING else None


def _hedged_sharpe(history: AccountHistory, market: AccountHistory, periods: float) -> float:
    """Compute the annual Sharpe ratio of the account hedged against the market, which is how the verdict measures its lead."""
    relation = _relation(history, market, periods)
    return 0.0 if relation is None else relation.alpha_t * math.sqrt(periods / len(history.returns))
