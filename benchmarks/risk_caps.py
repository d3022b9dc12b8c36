"""The search for the cap with a perfect player for every cap, in the betting game: a part of risk.py.

What is lost here is lost by the search for the cap; what is lost beyond it, by learning. Nothing is random.
"""

from typing import Any

import numpy as np
import torch
from risk_market import tail_mean

from tailguard.envs.betting_game import _Tree
from tailguard.market import BettingGame
from tailguard.ppo.config import RiskConfig
from tailguard.ppo.risk import Budget, FinishedReturns, RiskObjective

ROLLOUTS, EPISODES = 150, 1000
LEVELS = (np.arange(EPISODES) + 0.5) / EPISODES


class PerfectPlayer:
    """Plays best for any cap.

    :param game: fields of the game.
    """

    def __init__(self, game: dict[str, Any]) -> None:
        self.tree = _Tree(BettingGame(**game))
        self._known: dict[float, np.ndarray] = {}

    def result_distribution(self, cap: float) -> np.ndarray:
        cap = round(min(cap, float(self.tree.results[-1])), 1)
        if cap not in self._known:
            self._known[cap] = self.tree.distribution(self.tree.plan(cap)[1])
        return self._known[cap]

    def returns(self, cap: float) -> np.ndarray:
        """Draw as many results as the window holds, in the proportions of their distribution."""
        upto = np.cumsum(self.result_distribution(cap))
        return self.tree.results[np.minimum(np.searchsorted(upto, LEVELS), len(upto) - 1)]

    def cvar(self, cap: float, alpha: float) -> float:
        return tail_mean(self.tree.results, self.result_distribution(cap), alpha)


def searched(player: PerfectPlayer, alpha: float) -> float:
    """The CVaR with the cap that the objective has after training; it begins with that of the mean."""
    config = RiskConfig(objective="cvar", alpha=alpha, window=EPISODES, anneal_from=1.0)
    objective = RiskObjective(config, Budget(config))
    for rollout in range(ROLLOUTS):
        returns = player.returns(objective.budget.caps.item())
        objective.remember(FinishedReturns(returns, np.empty((0, 1)), np.ones(EPISODES), np.empty(0)))
        objective.adapt(rollout / ROLLOUTS, np.ones(1))
    return player.cvar(objective.budget.caps.item(), alpha)


def followed(player: PerfectPlayer, alpha: float) -> float:
    """Return the CVaR reached with a cap that only follows the VaR, while alpha shrinks from 1 to its target."""
    config = RiskConfig(objective="cvar", alpha=alpha)
    cap = float(player.tree.results[-1])
    for rollout in range(ROLLOUTS):
        share = min(rollout / ROLLOUTS / config.anneal, 1.0)
        var = float(np.quantile(player.returns(cap), alpha**share, method="inverted_cdf"))
        cap += config.cap_step * (var - cap)
    return player.cvar(cap, alpha)


def shares(game: dict[str, Any], alpha: float) -> tuple[float, float, float]:
    """The optimum, and the shares of it that a followed and a searched cap leave to a perfect player."""
    torch.set_num_threads(1)
    player, best = PerfectPlayer(game), BettingGame(**game).solve(alpha).objective
    return best, followed(player, alpha) / best, searched(player, alpha) / best
