"""The decisions of an agent over a span of its market: everything that is said about it out of sample rests on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from tailguard.evaluate.play import Trajectory, play, return_rule_of
from tailguard.evaluate.stats.series import Floats
from tailguard.experiments.ensemble import TradingAgent
from tailguard.experiments.prepared_market import Market
from tailguard.market.env import Rows


@dataclass(frozen=True, eq=False)
class Decisions:
    """The decisions of an agent over the n test bars of a fold.

    :param targets: ``[n, assets]`` weights that it asked for at the close before each bar.
    :param rewards: ``[n]`` changes of log equity of the account that it traded.
    :param quantiles: ``[n, M]`` of the discounted rewards to come, as its critic predicted them; M is 0 for a mean only, and
        all are NaN where the account is not the one that the critic has learnt.
    :param levels: ``[M]`` of the quantiles.
    """

    targets: Floats
    rewards: Floats
    quantiles: Floats
    levels: Floats

    def tree(self) -> dict[str, Any]:
        """Return the arrays by name, for a checkpoint."""
        return dict(vars(self))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """Restore what :meth:`tree` returned."""
        return cls(**{name: np.array(tree[name]) for name in cls.__dataclass_fields__})


def trade_market(
    model: TradingAgent, market: Market, spans: Sequence[Rows], warmup: int
) -> list[tuple[Floats, list[Trajectory]]]:
    """Play an agent over spans of its market.

    :param model: the agent.
    :param market: with its features and rules.
    :param spans: first and last-plus-one row of each.
    :param warmup: rows before a span over which the recurrent state is filled.
    :returns: for each span the target weights ``[n, assets]`` of the portfolio, and the trajectory of every account: one, or
        one per instrument of a pool, each of which has an equal share of the portfolio.
    """
    n, rows = market.features.instruments, len(market.bars)
    everywhere = [(first + k * rows, last + k * rows) for first, last in spans for k in range(n)]
    rule = return_rule_of(model)
    played = play(model, market.bars, market.features, market.trading, everywhere, returns=rule, warmup=warmup)
    groups = [played[i : i + n] for i in range(0, len(played), n)]
    return [(np.concatenate([account.targets for account in group], axis=1) / n, group) for group in groups]


def out_of_sample_decisions(model: TradingAgent, market: Market, span: Rows, warmup: int) -> Decisions:
    """Play the agent over a span after a warm-up, and ask its critic along the way.

    Everything that is said about an agent out of sample rests on this call: the table after a training, an evaluation, and a
    fold of a walk-forward.

    :param model: the agent.
    :param market: with its features and rules.
    :param span: the row of the first decision, and the last row plus one.
    :param warmup: rows before it over which the recurrent state is filled.
    """
    ((targets, accounts),) = trade_market(model, market, [span], warmup)
    n = len(targets)
    levels = model.policy.return_levels()
    if len(accounts) > 1 or levels is None:
        # The critic of a pool predicts the return of one instrument, which is not that of the portfolio.
        mean = np.mean([_rewards(account, n) for account in accounts], axis=0)
        return Decisions(targets, mean, np.zeros((n, 0)), np.zeros(0))
    (account,) = accounts
    predicted = model.policy.predict_return_atoms(account.observations, account.starts)[account.warmup :]
    quantiles = np.full((n, len(levels)), np.nan)  # a ruined account has nothing to expect
    if market.trading.gain == 1.0:  # or else the account holds more than the one that the critic knows
        quantiles[: len(predicted)] = predicted
    return Decisions(targets, _rewards(account, n), quantiles, levels.double().numpy())


def _rewards(account: Trajectory, n: int) -> Floats:
    """Return the rewards of the n bars after the warm-up, 0 after a ruin."""
    rewards = np.zeros(n)
    earned = account.rewards[account.warmup :]
    rewards[: len(earned)] = earned
    return rewards
