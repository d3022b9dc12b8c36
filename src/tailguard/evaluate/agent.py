"""Play a trained agent over a span of bars it has not been trained on."""

from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.evaluate.backtest import BacktestRow, summarise
from tailguard.market.env import TradingEnv
from tailguard.market.features import FeatureSet
from tailguard.market.rules import TradingSettings
from tailguard.running_return import WatchedEnv


class Agent(Protocol):
    """Anything that acts as a Stable-Baselines3 model does."""

    def predict(  # noqa: D102
        self,
        observation: NDArray[Any],
        state: tuple[NDArray[Any], ...] | None,
        episode_start: NDArray[Any] | None,
        deterministic: bool,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]: ...


def play(
    agent: Agent,
    name: str,
    bars: pd.DataFrame,
    features: FeatureSet,
    settings: TradingSettings,
    span: tuple[int, int],
    watched_gamma: float | None = None,
) -> BacktestRow:
    """One pass over the rows of `span` with the agent's most likely actions.

    :param agent: the model.
    :param name: what to call the row.
    :param bars: the whole table; rows before the span serve as history for features.
    :param features: what the agent observes.
    :param settings: the rules it was trained under.
    :param span: first and last-plus-one row.
    :param watched_gamma: for agents that must see what they have earned: the discount that they were trained with.
    """
    rules = settings.model_dump() | {"episode_length": None, "random_start": False}
    env: gym.Env[Any, Any] = TradingEnv(bars, features=features, span=span, **rules)
    if watched_gamma is not None:
        env = WatchedEnv(env, watched_gamma)
    obs, info = env.reset(seed=0)
    equity, turnover, costs = [info["equity"]], 0.0, 0.0
    state, start, over, ruined = None, np.ones(1, bool), False, False
    while not over:
        action, state = agent.predict(obs[None], state, start, True)
        obs, _, ruined, truncated, info = env.step(action[0])
        start, over = np.zeros(1, bool), ruined or truncated
        equity.append(info["equity"])
        turnover += info["turnover"]
        costs += info["fees"] + info["slippage"]
    index = pd.DatetimeIndex(bars.index[span[0] : span[1]])
    return summarise(name, np.array(equity), turnover / (len(equity) - 1), costs, settings.cash, index, ruined)
