"""From bars to a trained agent and its first day out of sample."""

from collections.abc import Callable

import pandas as pd
import torch
from stable_baselines3.common.callbacks import BaseCallback

from tailguard.config import Config
from tailguard.evaluate.agent import play
from tailguard.evaluate.backtest import BacktestRow, backtest
from tailguard.market.baselines import STRATEGIES, strategy
from tailguard.market.env import TradingVecEnv
from tailguard.market.features import FeatureScaler, build_features
from tailguard.ppo.algorithm import DistributionalPPO

Report = Callable[[int, str], None]


def train_and_test(bars: pd.DataFrame, config: Config, report: Report) -> tuple[list[BacktestRow], int]:
    """Train on the first part of the bars; trade the agent and all baselines over the rest.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param config: everything else.
    :param report: called with the steps done and a line about them.
    :returns: a row for the agent and one for each baseline, and the first row of the unseen part.
    """
    torch.set_num_threads(1)  # small networks are slower on more
    training = config.training
    features = build_features(bars, config.features)
    first_unseen = round(len(bars) * (1.0 - training.test_share))
    scaler = FeatureScaler(bars.index[0], bars.index[first_unseen]).fit(features[:first_unseen])
    features = scaler.transform(features)
    settings = config.trading.model_dump()
    if settings["episode_length"] is None:
        settings["episode_length"] = min(256, max((first_unseen - features.warmup) // 2, 1))
    env = TradingVecEnv(bars, n_envs=training.n_envs, seed=training.seed, features=features, span=(0, first_unseen), **settings)
    memory = {"lstm_hidden_size": training.lstm_hidden_size} if training.policy == "MlpLstmPolicy" else {}
    model = DistributionalPPO(
        training.policy,
        env,
        learning_rate=training.learning_rate,
        n_steps=training.n_steps,
        n_epochs=training.n_epochs,
        gamma=training.gamma,
        risk=training.risk,
        critic=training.critic,
        optimizer=training.optimizer,
        vgs=training.vgs,
        policy_kwargs=memory,
        seed=training.seed,
    )
    model.learn(training.steps, callback=_Progress(report))
    span = (first_unseen, len(bars))
    watched = training.gamma if model.risk.watches_return else None
    rows = [play(model, "agent", bars, features, config.trading, span, watched)]
    return rows + [backtest(bars, name, strategy(name), config.trading, span) for name in STRATEGIES], first_unseen


class _Progress(BaseCallback):
    """Tell the caller how far the training is, once per rollout."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        finished = [episode["r"] for episode in self.model.ep_info_buffer or []]
        mean = sum(finished) / len(finished) if finished else float("nan")
        self.report(self.num_timesteps, f"training, log growth per episode {mean:+.4f}")
