"""An agent at work: bars come in one after the other, target weights go out.

The agent trades a paper account under the rules it was trained with, since its own position is part of what it sees. A decision
at the close of a bar is exactly the one that the same agent takes in an evaluation over the same bars.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.envs.return_observer import RunningReturn
from tailguard.evaluate.agent import target_weights
from tailguard.market.env import AccountBatch
from tailguard.market.features import FeatureConfig, FeatureScaler, build_features
from tailguard.market.kernel import END, NOW
from tailguard.market.rules import TradingSettings
from tailguard.ppo.algorithm import DistributionalPPO


class Decision(NamedTuple):
    """What to hold from the next fill on.

    :param time: of the bar at whose close it was taken.
    :param weights: ``[assets]`` shares of equity, negative for short positions.
    :param equity: of the paper account.
    """

    time: pd.Timestamp
    weights: NDArray[np.float64]
    equity: float


class Trader:
    """Decides at the close of every bar.

    :param model: the agent.
    :param scaler: of its features, as fitted in its training.
    :param features: what is computed from the bars.
    :param trading: the rules it was trained under.
    """

    def __init__(
        self, model: DistributionalPPO, scaler: FeatureScaler, features: FeatureConfig, trading: TradingSettings
    ) -> None:
        self.model, self.scaler, self.features = model, scaler, features
        self.trading = trading.model_copy(update={"episode_length": None, "random_start": False})
        self.bars: pd.DataFrame | None = None
        self._account: dict[str, Any] | None = None
        self._action: NDArray[Any] | None = None
        self._memory: tuple[NDArray[Any], ...] | None = None
        self._running = RunningReturn(1, model.gamma) if model.risk.return_augmented else None
        self.ruined = False

    def add(self, bars: pd.DataFrame) -> list[Decision]:
        """Take the bars that follow those before, and decide at the close of each for which there is enough history.

        When the paper account is liquidated, :attr:`ruined` is true and there are no more decisions.

        :param bars: a table from :func:`tailguard.market.load_bars`; many at once are faster and give the same decisions.
        """
        known = self.bars
        if known is not None and not bars.index[0] > known.index[-1]:
            raise ValueError(f"the bar of {bars.index[0]} comes after that of {known.index[-1]}: bars must come in order")
        self.bars = bars if known is None else pd.concat([known, bars])
        features = self.scaler.transform(build_features(self.bars, self.features))
        last = len(self.bars) - 1
        if self.ruined or features.warmup >= last:
            return []
        batch = AccountBatch(self.bars, self.trading, 1, features)
        obs = np.empty((1, batch.observation_size), np.float32)
        if self._account is None:
            batch.restart(np.zeros(1, np.intp), obs)
            decisions = [self._decide(batch, obs)]
        else:
            batch.load_state_dict(self._account)
            batch.clock[END] = last
            decisions = []
        while int(batch.clock[NOW, 0]) < last and not self.ruined:
            step = batch.step(np.asarray(self._action))
            if self._running is not None:
                self._running.add(step.rewards)
            self.ruined = bool(step.terminated[0])
            if not self.ruined:
                decisions.append(self._decide(batch, step.obs))
        self._account = batch.state_dict()
        return decisions

    def _decide(self, batch: AccountBatch, obs: NDArray[np.float32]) -> Decision:
        seen = obs if self._running is None else np.concatenate((obs, self._running.columns()), axis=1)
        self._action, self._memory = self.model.predict(seen, self._memory, np.array([self._action is None]), True)
        info = batch.info(0)
        return Decision(info["time"], target_weights(self._action[0], self.trading), info["equity"])
