"""Play a trained agent over a span of bars it has not been trained on."""

from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.envs.return_observer import RunningReturn
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.record import AccountHistory, Floats
from tailguard.market.env import TradingEnv
from tailguard.market.features import FeatureSet
from tailguard.market.rules import TradingSettings
from tailguard.validation import require


class Agent(Protocol):
    """Anything that acts as a Stable-Baselines3 model does."""

    def predict(  # noqa: D102
        self,
        observation: NDArray[Any],
        state: tuple[NDArray[Any], ...] | None,
        episode_start: NDArray[Any] | None,
        deterministic: bool,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]: ...


class Played(NamedTuple):
    """What an agent did over n bars, after w bars of warm-up.

    :param track: the account, which starts in cash with the first decision that counts.
    :param targets: ``[n, assets]`` weights that the agent asked for at the close before each bar.
    :param observations: ``[w + n, D]`` what it saw when it asked, warm-up included.
    :param rewards: ``[w + n]`` changes of the log equity of the account that it watched, which has run since the warm-up.
    :param starts: ``[w + n]`` true where its memory began anew.
    :param warmup: w.
    :param ruined: whether the account was liquidated. After that nothing is held, and there are no observations and rewards.
    """

    track: AccountHistory
    targets: Floats
    observations: NDArray[np.float32]
    rewards: Floats
    starts: NDArray[np.bool_]
    warmup: int
    ruined: bool


def play(
    agent: Agent,
    name: str,
    bars: pd.DataFrame,
    features: FeatureSet,
    settings: TradingSettings,
    span: tuple[int, int],
    return_gamma: float | None = None,
    warmup: int = 0,
) -> Played:
    """One pass over the rows of `span` with the agent's most likely actions.

    Through the warm-up the agent trades an account that nobody counts, so that its memory and what it sees of itself are those
    of an agent at work. What it has earned is counted, for agents that watch it, from the first row of the span.

    :param agent: the model.
    :param name: of the track.
    :param bars: the whole table; rows before the span serve as history for features.
    :param features: what the agent observes.
    :param settings: the rules it was trained under.
    :param span: first and last-plus-one row; the first decision is taken at the close of the first.
    :param return_gamma: for agents that must see what they have earned: the discount that they were trained with.
    :param warmup: rows before the span over which memory is filled; as many as there are features for.
    """
    first, last = span
    require(warmup >= 0, "warmup", warmup, "at least 0")
    require(first >= features.warmup, "the first row of span", first, f"at least {features.warmup}, where features begin")
    window = BacktestWindow(bars, settings, span)
    begin = max(first - warmup, features.warmup)
    running = None if return_gamma is None else RunningReturn(1, return_gamma)
    rules = settings.model_dump() | {"episode_length": None, "random_start": False}
    steps: list[_Step] = []
    state, env, ruined = None, None, False
    for row in range(begin, last - 1):
        start = env is None
        if env is None:  # at the beginning, and after a ruin in the warm-up: another account, another memory
            env = TradingEnv(bars, features=features, span=(row, last), **rules)
            obs, _ = env.reset(seed=0)
        if running is not None and (start or row == first):
            running.begin(slice(None))
        seen = obs if running is None else np.concatenate((obs, running.columns()[0])).astype(np.float32)
        action, state = agent.predict(seen[None], state, np.array([start]), True)
        obs, reward, ruined, _, _ = env.step(action[0])
        steps.append(_Step(seen, start, reward, target_weights(action[0], settings)))
        if running is not None:
            running.add(np.array([reward], np.float64))
        if ruined and row >= first:
            break
        env = None if ruined else env
    counted = steps[first - begin :]
    targets = np.zeros((last - 1 - first, len(counted[0].target)))
    targets[: len(counted)] = [step.target for step in counted]
    return Played(
        track=window.trade(name, targets),
        targets=targets,
        observations=np.stack([step.observation for step in steps]),
        rewards=np.array([step.reward for step in steps], np.float64),
        starts=np.array([step.start for step in steps], np.bool_),
        warmup=first - begin,
        ruined=ruined,
    )


class _Step(NamedTuple):
    observation: NDArray[np.float32]
    start: bool
    reward: float
    target: Floats


def target_weights(action: NDArray[Any], settings: TradingSettings) -> Floats:
    """The weights that an action in [-1, 1] per asset asks for, as the environment understands it.

    :param action: ``[assets]``.
    :param settings: with `leverage` and `long_only`.
    """
    high = settings.leverage
    low = 0.0 if settings.long_only else -high
    weights = low + 0.5 * (np.clip(np.asarray(action, np.float64), -1.0, 1.0) + 1.0) * (high - low)
    gross = float(np.abs(weights).sum())
    return weights * (high / gross) if gross > high else weights
