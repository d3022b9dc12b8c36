"""Evaluate a trained agent on bars that it has not seen: its decisions, its critic's predictions, and what they are worth."""

import platform
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tailguard.config import Config, dump_config
from tailguard.evaluate import statistics
from tailguard.evaluate.assessment import Context, Effort, assess
from tailguard.evaluate.attack import AttackPlan, AttackReport, attack_market
from tailguard.evaluate.backtest import BacktestRow, backtest_row, benchmark_history, benchmark_row
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.critic_calibration import calibrate
from tailguard.evaluate.folds import Fold
from tailguard.evaluate.ledger import Ledger
from tailguard.evaluate.play import ReportProgress
from tailguard.evaluate.record import AccountHistory, Calibration, Evaluation, Provenance
from tailguard.evaluate.sanity import matched_random_positions
from tailguard.evaluate.stats.series import Floats
from tailguard.evaluate.verdict import VerdictRules
from tailguard.experiments.decisions import Decisions, out_of_sample_decisions
from tailguard.experiments.ensemble import Ensemble, TradingAgent
from tailguard.experiments.population_run import FOLDER, LINEAGE
from tailguard.experiments.prepared_market import Market, fingerprint
from tailguard.experiments.run import Run
from tailguard.experiments.selection import selection_table
from tailguard.io.atomic import atomic
from tailguard.io.reading import require_readable
from tailguard.io.sealed import LARGEST
from tailguard.market.bars import iterate_symbols
from tailguard.market.baselines import STRATEGIES, strategy
from tailguard.market.data import load_source
from tailguard.parallel.threads import one_thread
from tailguard.population.lineage import read as read_lineage
from tailguard.ppo.config import RiskConfig

LIBRARIES = ("tailguard", "torch", "numpy", "pandas", "numba", "scipy", "stable-baselines3", "gymnasium")
BENCHMARK = "benchmark"  # name of its account
ATTACK_TABLE, ATTACK_GRID = "attack.csv", "attack.json"


@one_thread()
def backtest_agent(
    model: TradingAgent, market: Market, warmup: int, benchmark: pd.DataFrame | None = None
) -> list[BacktestRow]:
    """Trade the agent and the baselines over the test rows; the figures are those of :func:`evaluate_agent`.

    :param model: the agent.
    :param market: with its split.
    :param warmup: rows before the test over which the recurrent state is filled.
    :param benchmark: bars that are held in a further row.
    :returns: one row for the agent, then one for each baseline.
    """
    decisions = out_of_sample_decisions(model, market, market.split.span, warmup)
    window = BacktestWindow(market.bars, market.trading, market.split.span)
    strategies = {name: strategy(name) for name in STRATEGIES}
    strategies["random_positions"] = matched_random_positions(window.trade("agent", window.guarded(decisions.targets)))
    targets = {name: window.targets_of(rule) for name, rule in strategies.items()}
    everybody = {"agent": decisions.targets} | targets
    rows = [backtest_row(window, name, window.guarded(weights)) for name, weights in everybody.items()]
    return rows if benchmark is None else [*rows, benchmark_row(window, BENCHMARK, benchmark)]


def benchmark_bars(config: Config) -> pd.DataFrame | None:
    """Return the bars of the benchmark of a configuration, or None.

    :param config: its key ``benchmark``, and its section ``files``.
    """
    return None if config.benchmark is None else load_source(config.benchmark, config.files)


def benchmark_accounts(config: Config, window: BacktestWindow) -> list[AccountHistory]:
    """Return the account that holds the benchmark of a configuration over a window, if there is one.

    :param config: see :func:`benchmark_bars`.
    :param window: the out-of-sample bars.
    :raises ValueError: if the benchmark has no prices there.
    """
    bars = benchmark_bars(config)
    if bars is None:
        return []
    try:
        return [benchmark_history(window, BENCHMARK, bars)]
    except ValueError as error:
        raise ValueError(f"{config.benchmark}: {error}") from None


@one_thread()
def evaluate_agent(
    model: TradingAgent,
    market: Market,
    config: Config,
    *,
    source: str,
    title: str = "",
    training: pd.DataFrame | None = None,
    warnings: Sequence[str] = (),
    trials: int = 1,
    lineage: list[dict[str, Any]] | None = None,
    attack: pd.DataFrame | None = None,
    selection: pd.DataFrame | None = None,
    rules: VerdictRules | None = None,
    effort: Effort | None = None,
    ledger: Ledger | None = None,
) -> Evaluation:
    """Evaluate one trained agent, or one ensemble, on the test rows of its market: one fold.

    :param model: the agent.
    :param market: with its split; the first decision is taken at the close before the first test row.
    :param config: that it was trained with; ``walkforward.warmup`` rows before the test fill the recurrent state.
    :param source: name of the data.
    :param title: one line; empty makes one.
    :param training: curves with the column `step`.
    :param warnings: of the training, as sentences.
    :param trials: number of agents that there were to choose from by looking at these test rows.
    :param lineage: events of the population that it comes from.
    :param attack: table of attacks.
    :param selection: table of the candidates that it was selected from.
    :param rules: of the verdict.
    :param effort: of the computation.
    :param ledger: of trials; None keeps none.
    """
    fold, seed = market.split.fold, config.training.seed
    name = "ensemble" if isinstance(model, Ensemble) else f"seed {seed}"
    decisions = out_of_sample_decisions(model, market, fold.span, config.walkforward.warmup)
    window = BacktestWindow(market.bars, market.trading, fold.span)
    curves = pd.DataFrame({"step": []}) if training is None else training.drop(columns=["fold", "seed"], errors="ignore")
    context = Context(
        title=title or f"{source}, {name}",
        source=source,
        folds=fold_table([fold], market.bars),
        training=labelled_curves(curves, 0, seed),
        provenance=provenance(config, market.bars, (seed,), trials),
        warnings=list(warnings),
        critic_calibration=calibration_of(window, [decisions], model.gamma, model.risk_config),
        lineage=lineage,
        attack=attack,
        selection=selection,
        baselines=benchmark_accounts(config, window),
    )
    return assess(window, {name: decisions.targets}, [len(decisions.targets)], context, rules, effort, ledger)


def evaluate_run(run: Run, ledger: Ledger | None = None) -> Evaluation:
    """Evaluate the agent of a run, with its training curves, its population and its attacks where there are any.

    :param run: with a trained model.
    :param ledger: of trials; None keeps none.
    """
    _require_unseen(run)
    metrics = run.metrics()
    attack, lineage = run.path / ATTACK_TABLE, run.path / FOLDER / LINEAGE
    return evaluate_agent(
        run.agent(),
        run.market(),
        run.config,
        source=run.info["data"],
        title=run.path.name,
        training=None if metrics.empty else metrics,
        warnings=warnings_of(metrics, "training"),
        trials=run.info.get("trials", 1),
        lineage=read_lineage(lineage) if lineage.exists() else None,
        attack=_read_attack(attack),
        selection=selection_table({0: run.selection}),
        ledger=ledger,
    )


@one_thread()
def attack_run(run: Run, plan: AttackPlan, report: ReportProgress | None = None) -> pd.DataFrame:
    """Attack the agent of a run on its test rows, and keep the results in the run.

    :param run: with a trained model.
    :param plan: the grid of attacks.
    :param report: called with the bars done, the bars in all, and a line.
    :returns: a row per kind, strength and statistic, which :func:`evaluate_run` makes part of the report.
    """
    _require_unseen(run)
    agent = run.agent()
    # Members of an ensemble are attacked one by one, each in an account of its own; the figures are their means.
    attacked = agent.members if isinstance(agent, Ensemble) else agent
    result = attack_market(attacked, run.market(), plan, report, run.config.walkforward.warmup)
    table = attack_table(result)
    with atomic(run.path / ATTACK_TABLE) as file:
        file.write(table.to_csv(index=False).encode())
    result.write(run.path / ATTACK_GRID)
    return table


def _read_attack(path: Path) -> pd.DataFrame | None:
    """Return the results of attacks on a run; None if it was not attacked."""
    if not path.exists():
        return None
    require_readable(path, LARGEST)
    return pd.read_csv(path)


def _require_unseen(run: Run) -> None:
    """Raise for an agent that was trained on all bars."""
    first, last = run.split.test
    if first == last:
        raise ValueError(
            f"{run.path} was trained on all bars, so that none is left to test it on: the walk-forward has judged its method; "
            "`tailguard deploy` without --refit gives an ensemble that can be tested"
        )


def attack_table(report: AttackReport) -> pd.DataFrame:
    """Return one line per kind, strength and statistic, as an evaluation keeps it."""
    return pd.DataFrame(
        {
            "attack": row.kind,
            "epsilon": row.strength,
            "statistic": name,
            "value": interval.estimate,
            "low": interval.low,
            "high": interval.high,
        }
        for row in report.rows
        for name, interval in row.figures.items()
    )


def calibration_of(
    window: BacktestWindow, decisions: Sequence[Decisions], gamma: float, risk: RiskConfig
) -> Calibration | None:
    """Compare the predictions of one seed's critic with what came, all folds in a row.

    :param window: with the times of all folds.
    :param decisions: one per fold.
    :param gamma: discount of the agent.
    :param risk: its objective: the critics of a risk-averse agent may predict the return of a period.
    :returns: None if the critic predicts the mean only, or if there are too few outcomes.
    """
    if not len(decisions[0].levels):
        return None
    rewards = np.concatenate([fold.rewards for fold in decisions])
    quantiles = np.concatenate([fold.quantiles for fold in decisions])
    rows = [len(fold.rewards) for fold in decisions]
    return calibrate(window.times, rewards, quantiles, decisions[0].levels, gamma, rows, risk.counted_over)


def instrument_table(window: BacktestWindow, targets: Floats) -> pd.DataFrame:
    """Return the results of each instrument of a pool, traded alone, as an evaluation keeps them.

    :param window: with the bars of all instruments.
    :param targets: ``[n, N]`` weights in the portfolio, in which each instrument has an equal share.
    """
    rows = []
    for weights, (symbol, bars) in zip(targets.T, iterate_symbols(window.bars), strict=True):
        alone = replace(window, bars=bars)
        history = alone.trade(symbol, weights * targets.shape[1])
        market = alone.trade(symbol, np.ones(len(weights)))
        periods = window.periods_per_year
        rows.append(
            {
                "symbol": symbol,
                "sharpe": statistics.sharpe(history.returns, periods),
                "growth": float(np.log1p(history.returns).mean()) * periods,
                "turnover": float(history.turnover.mean()) * periods,
                "market_sharpe": statistics.sharpe(market.returns, periods),
            }
        )
    return pd.DataFrame(rows)


def warnings_of(curves: pd.DataFrame, who: str) -> list[str]:
    """Return one sentence per warning of a training.

    :param curves: one row per update.
    :param who: how the sentence begins.
    """
    lines = []
    for column in curves.columns:
        if str(column).startswith("warn/"):
            count = int((curves[column].fillna(0.0) > 0.0).sum())
            what = str(column).removeprefix("warn/").replace("_", " ")
            lines += [f"{who}: {what} in {count} of {len(curves)} updates"] if count else []
    return lines


def labelled_curves(curves: pd.DataFrame, fold: int, seed: int) -> pd.DataFrame:
    """Return training curves with the columns `fold` and `seed` in front."""
    return pd.concat([pd.DataFrame({"fold": fold, "seed": seed}, index=curves.index), curves], axis=1)


def fold_table(folds: Sequence[Fold], bars: pd.DataFrame) -> pd.DataFrame:
    """Return rows and times of folds, as :class:`tailguard.evaluate.record.Evaluation` describes them."""
    times = pd.DatetimeIndex(bars.index)
    rows = [
        {
            "fold": fold.number,
            "train_first": fold.train[0],
            "train_last": fold.train[1],
            "embargo": fold.embargo,
            "test_first": fold.test[0],
            "test_last": fold.test[1],
            "train_from": times[fold.train[0]],
            "train_to": times[fold.train[1] - 1],
            "test_from": times[fold.test[0]],
            "test_to": times[fold.test[1] - 1],
        }
        for fold in folds
    ]
    return pd.DataFrame(rows)


def provenance(config: Config, bars: pd.DataFrame, seeds: tuple[int, ...], trials: int) -> Provenance:
    """Return where the figures come from, as of today."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    date = datetime.now(UTC).date().isoformat()
    return Provenance(dump_config(config), fingerprint(bars), versions, seeds, trials, date)
