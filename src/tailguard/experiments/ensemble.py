"""Several agents as one: the seeds of a walk-forward's last fold, or of a refit, which is what the verdict is about.

Members decide at the same close, each by its own recurrent state, and the ensemble asks for the mean of their target weights.
The account is one: every member sees what the ensemble holds, what it has gained and its drawdown, since that is the account
that exists. (A walk-forward tests its seeds apart, so that there each sees the account of its own decisions.)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tailguard.evaluate.play import target_weights
from tailguard.market.rules import TradingSettings
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.policy import DistributionalPolicy


class EnsemblePolicy:
    """The networks of an ensemble.

    :param members: policies of the same shape.
    :param trading: rules that the agents were trained under.
    """

    def __init__(self, members: Sequence[DistributionalPolicy], trading: TradingSettings) -> None:
        self.members = tuple(members)
        # What the agents themselves ask for: core and active share are applied to the mean of it, by the account. The gain is
        # limited for each by itself, as in a walk-forward, and taken out again, since the account applies it as well.
        self.trading = trading.model_copy(update={"core": (), "active": 1.0})

    def mean_action(self, actions: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
        """Return the action ``[B, assets]`` that asks for the mean of the weights that the members' actions ask for."""
        weights = np.mean([target_weights(action, self.trading) for action in actions], axis=0) / self.trading.gain
        low, high = self.trading.lowest_weight, self.trading.leverage
        action: NDArray[np.float64] = 2.0 * (weights - low) / (high - low) - 1.0
        return action

    def return_levels(self) -> Tensor | None:
        """Return the levels of the predicted quantiles, which all members have in common."""
        return self.members[0].return_levels()

    def predict_return_atoms(self, observations: NDArray[Any], starts: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return the mean of the members' predicted quantiles; see :meth:`DistributionalPolicy.predict_return_atoms`."""
        predicted = [member.predict_return_atoms(observations, starts) for member in self.members]
        mean: NDArray[np.float32] = np.mean(predicted, axis=0)
        return mean


class Ensemble:
    """Agents that trade one account together, as an :class:`tailguard.evaluate.play.Agent`.

    :param members: agents that were trained alike with different seeds.
    :param trading: rules that they were trained under.
    """

    def __init__(self, members: Sequence[DistributionalPPO], trading: TradingSettings) -> None:
        self.members = tuple(members)
        self.gamma, self.risk_config = members[0].gamma, members[0].risk_config
        self.policy = EnsemblePolicy([member.policy for member in members], trading)

    def predict(
        self,
        observation: NDArray[Any],
        state: tuple[NDArray[Any], ...] | None,
        episode_start: NDArray[Any] | None,
        deterministic: bool,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """Return the mean action, and the recurrent states of all members one after another."""
        parts = 0 if state is None else len(state) // len(self.members)
        actions: list[NDArray[Any]] = []
        states: list[NDArray[Any]] = []
        for k, member in enumerate(self.members):
            own = None if state is None else state[k * parts : (k + 1) * parts]
            action, after = member.predict(observation, own, episode_start, deterministic)
            actions.append(action)
            states += [] if after is None else after
        return self.policy.mean_action(actions), tuple(states) or None


# What a run holds: one agent, or several that act as one.
TradingAgent = DistributionalPPO | Ensemble
