"""A trained agent on bars that it has not seen: what it decides there, what its critic expects, and what that is worth."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Self

import numpy as np
import pandas as pd

from tailguard.config import Config, dump_config
from tailguard.evaluate.agent import play
from tailguard.evaluate.assessment import Context, Effort, assess
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.calibration import calibrate
from tailguard.evaluate.record import Calibration, Evaluation, Floats, Provenance
from tailguard.evaluate.verdict import VerdictRules
from tailguard.evaluate.walkforward import Fold
from tailguard.experiments.run import fingerprint
from tailguard.experiments.training import Market
from tailguard.market.rules import TradingSettings
from tailguard.ppo.algorithm import DistributionalPPO

LIBRARIES = ("tailguard", "torch", "numpy", "pandas", "numba", "scipy", "stable-baselines3", "gymnasium")


@dataclass(frozen=True, eq=False)
class Decisions:
    """What an agent did over the n test bars of a fold.

    :param targets: ``[n, assets]`` weights that it asked for at the close before each bar.
    :param rewards: ``[n]`` changes of log equity of the account that it watched.
    :param quantiles: ``[n, M]`` that its critic predicted of the discounted rewards to come; M is 0 if it knows the mean only.
    :param levels: ``[M]`` of the quantiles.
    """

    targets: Floats
    rewards: Floats
    quantiles: Floats
    levels: Floats

    def tree(self) -> dict[str, Any]:
        """As values for a checkpoint."""
        return dict(vars(self))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """What :meth:`tree` gave."""
        return cls(**{name: np.array(tree[name]) for name in cls.__dataclass_fields__})


def decide(model: DistributionalPPO, market: Market, trading: TradingSettings, span: tuple[int, int], warmup: int) -> Decisions:
    """Play the agent over a span after a warm-up, and ask its critic along the way.

    :param model: the agent.
    :param market: with its features.
    :param trading: the rules.
    :param span: the row of the first decision, and the last row plus one.
    :param warmup: rows before it over which memory is filled.
    """
    watched = model.gamma if model.risk.return_augmented else None
    played = play(model, "agent", market.bars, market.features, trading, span, watched, warmup)
    levels = model.policy.return_levels()
    n, lived = len(played.targets), len(played.rewards) - played.warmup
    rewards = np.zeros(n)
    rewards[:lived] = played.rewards[played.warmup :]
    if levels is None:
        return Decisions(played.targets, rewards, np.zeros((n, 0)), np.zeros(0))
    quantiles = np.full((n, len(levels)), np.nan)  # a ruined account has nothing to expect
    quantiles[:lived] = model.policy.predict_return_atoms(played.observations, played.starts)[played.warmup :]
    return Decisions(played.targets, rewards, quantiles, levels.double().numpy())


def calibration_of(window: BacktestWindow, decisions: Sequence[Decisions], gamma: float) -> Calibration | None:
    """The critic of one seed against what came, all folds in a row; None if it knows the mean only or outcomes are too few.

    :param venue: with the times of all folds.
    :param decisions: one per fold.
    :param gamma: discount of the agent.
    """
    if not len(decisions[0].levels):
        return None
    rewards = np.concatenate([each.rewards for each in decisions])
    quantiles = np.concatenate([each.quantiles for each in decisions])
    rows = [len(each.rewards) for each in decisions]
    return calibrate(window.times, rewards, quantiles, decisions[0].levels, gamma, rows)


def evaluate_agent(
    model: DistributionalPPO,
    market: Market,
    config: Config,
    *,
    source: str,
    title: str = "",
    training: pd.DataFrame | None = None,
    warnings: Sequence[str] = (),
    warmup: int = 64,
    trials: int = 1,
    lineage: list[dict[str, Any]] | None = None,
    attack: pd.DataFrame | None = None,
    rules: VerdictRules | None = None,
    effort: Effort | None = None,
) -> Evaluation:
    """Judge one trained agent on the test rows of its market: one fold, one seed.

    :param model: the agent.
    :param market: with its split; the first decision is taken at the close before the first test row.
    :param config: that it was trained with.
    :param source: name of the data.
    :param title: one line; empty makes one.
    :param training: curves with the column `step`.
    :param warnings: of the training, as sentences.
    :param warmup: rows before the test over which memory is filled.
    :param trials: agents that there were to choose from by looking at these test rows.
    :param lineage: of the population that it comes from.
    :param attack: table of attacks.
    :param rules: of the verdict.
    :param effort: of the computation.
    """
    split = market.split
    fold = Fold(0, split.train, split.test)
    decisions = decide(model, market, config.trading, fold.span, warmup)
    window = BacktestWindow(market.bars, config.trading, fold.span)
    seed = config.training.seed
    curves = pd.DataFrame({"step": []}) if training is None else training.drop(columns=["fold", "seed"], errors="ignore")
    curves = pd.concat([pd.DataFrame({"fold": 0, "seed": seed}, index=curves.index), curves], axis=1)
    context = Context(
        title=title or f"{source}, one seed",
        source=source,
        folds=fold_table([fold], market.bars),
        training=curves,
        provenance=provenance(config, market.bars, (seed,), trials),
        warnings=list(warnings),
        calibration=calibration_of(window, [decisions], model.gamma),
        lineage=lineage,
        attack=attack,
    )
    return assess(window, {f"seed {seed}": decisions.targets}, [len(decisions.targets)], context, rules, effort)


def fold_table(folds: Sequence[Fold], bars: pd.DataFrame) -> pd.DataFrame:
    """Rows and times of folds, as :class:`tailguard.evaluate.record.Evaluation` describes them."""
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
    """Where the figures come from, today."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    date = datetime.now(UTC).date().isoformat()
    return Provenance(dump_config(config), fingerprint(bars), versions, seeds, trials, date)
