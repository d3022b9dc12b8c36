"""From bars to a market that an agent can learn in, to the agent, and to its first day out of sample."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from stable_baselines3.common.vec_env import VecEnv

from tailguard.config import Config, TrainingConfig
from tailguard.evaluate.agent import play
from tailguard.evaluate.backtest import BacktestRow, backtest, row_of
from tailguard.market.baselines import STRATEGIES, strategy
from tailguard.market.data import periods_per_year
from tailguard.market.env import TradingVecEnv
from tailguard.market.features import FeatureScaler, FeatureSet, build_features, market_columns
from tailguard.market.rules import TradingSettings
from tailguard.ppo.algorithm import DistributionalPPO

Rows = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """Which rows an agent learns from and which it is judged on, each as first and last-plus-one.

    :param train: rows of the training.
    :param test: rows that nothing about the agent has seen.
    """

    train: Rows
    test: Rows

    def __post_init__(self) -> None:
        """Refuse spans that are empty or overlap."""
        ordered = 0 <= self.train[0] < self.train[1] <= self.test[0] < self.test[1]
        if not ordered:
            raise ValueError(f"the test must come after the training and neither be empty, got {self}")


def default_split(n_rows: int, config: TrainingConfig) -> Split:
    """The last part of the rows for the test, as large as the settings say."""
    first_unseen = round(n_rows * (1.0 - config.test_share))
    return Split((0, first_unseen), (first_unseen, n_rows))


@dataclass(frozen=True)
class Market:
    """What is traded, as an agent sees it.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param features: of all bars, standardised with what the training rows say.
    :param scaler: that did it; fitted features are part of the agent.
    :param trading: the rules, with the length of a training episode.
    :param split: which rows are for what.
    """

    bars: pd.DataFrame
    features: FeatureSet
    scaler: FeatureScaler
    trading: TradingSettings
    split: Split

    def training_env(self, n_envs: int, seed: int) -> TradingVecEnv:
        """Accounts that trade the training rows side by side."""
        return TradingVecEnv(
            self.bars, n_envs=n_envs, seed=seed, features=self.features, span=self.split.train, **self.trading.model_dump()
        )


def prepare_market(bars: pd.DataFrame, config: Config, split: Split) -> Market:
    """Compute the features, fit their scale on the training rows and on nothing else, and settle the length of episodes."""
    features = build_features(bars, config.features)
    first, last = split.train
    end = bars.index[last] if last < len(bars) else bars.index[-1] + pd.Timedelta(1)
    scaler = FeatureScaler(bars.index[first], end).fit(features[first:last])
    trading = config.trading
    if trading.episode_length is None:
        usable = last - max(first, features.warmup)
        trading = trading.model_copy(update={"episode_length": min(256, max(usable // 2, 1))})
    return Market(bars, scaler.transform(features), scaler, trading, split)


def build_model(market: Market, training: TrainingConfig, env: VecEnv | None = None) -> DistributionalPPO:
    """An untrained agent in the training environments of a market.

    :param env: these environments, if they exist already.
    """
    memory = {"lstm_hidden_size": training.lstm_hidden_size} if training.policy == "MlpLstmPolicy" else {}
    return DistributionalPPO(
        training.policy,
        market.training_env(training.n_envs, training.seed) if env is None else env,
        learning_rate=training.learning_rate,
        n_steps=training.n_steps,
        n_epochs=training.n_epochs,
        gamma=training.gamma,
        risk=training.risk,
        critic=training.critic,
        optimizer=training.optimizer,
        vgs=training.vgs,
        adversary=_adversary(training.adversary, market.features.names),
        policy_kwargs=memory,
        seed=training.seed,
        tensorboard_log=training.tensorboard,
    )


def _adversary(settings: dict[str, Any] | None, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The settings with the columns that it may perturb; the calendar and the account are known for certain."""
    if settings is None:
        return None
    wanted = settings.get("perturbable")
    if wanted is not None and all(isinstance(column, int) for column in wanted):
        return settings
    return settings | {"perturbable": market_columns(names, wanted)}


def test(model: DistributionalPPO, market: Market, config: Config) -> list[BacktestRow]:
    """Trade the agent and all baselines over the unseen rows; one line for each."""
    span = market.split.test
    watched = model.gamma if model.risk.return_augmented else None
    played = play(model, "agent", market.bars, market.features, config.trading, span, watched)
    rows = [row_of(played.track, periods_per_year(pd.DatetimeIndex(market.bars.index[slice(*span)])), played.ruined)]
    return rows + [backtest(market.bars, name, strategy(name), config.trading, span) for name in STRATEGIES]
