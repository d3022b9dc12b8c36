"""A risk-averse objective on held-out bars: what it makes of an account's returns, and how sure that is.

An agent that was trained for the tail of its periods is chosen by that tail. The sum of log returns over every window of as
many bars as a period has is one sample x. Windows overlap: of a hundred months five are in the tail, and all windows together
tell more of it than those five. Each sample contributes, with C the VaR of all samples (Rockafellar and Uryasev 2000),

    cvar          phi(x) = C + min(x - C, 0) / alpha
    mean_cvar     (1 - weight) x + weight phi(x)
    constrained   x, and while the CVaR is below the limit MISSED (phi(x) - limit) besides,

and the objective is the mean of the contributions. So the difference between two accounts has a standard error, that of the
mean of their differences with as many independent samples as there are periods.

The first two are homogeneous: an account of half the size has half the objective. If that is below 0, the best size is none,
and the agent that holds least would win, whatever it does with it. So they say when to hold less and not how much to hold:
accounts are compared at equal mean exposure, and one in cash, of which nothing can be said, comes last.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pandas as pd

from tailguard.evaluate.stats.series import Floats
from tailguard.ppo.config import RiskConfig
from tailguard.validation import require

# What a constraint that is missed by a unit of the return costs, in units of the mean.
MISSED = 10.0
# An account that holds less than this on average is in cash.
SMALLEST_EXPOSURE = 1e-3
# Periods that a block must have at least: fewer have no tail to speak of.
FEWEST_PERIODS = 2


class HeldOutAccount(NamedTuple):
    """An account as it is compared with others.

    :param sums: samples; of a homogeneous objective at a mean exposure of 1.
    :param idle: True for an account in cash under such an objective: it has no such samples, and comes last.
    """

    sums: Floats
    idle: bool


class HeldOutRisk(NamedTuple):
    """A risk-averse objective with the length of its periods.

    :param risk: the objective.
    :param bars: of a period.
    """

    risk: RiskConfig
    bars: int

    @property
    def words(self) -> str:
        """The objective in words."""
        tail = f"the average of the worst {self.alpha:.0%} of returns over {self.bars} bars"
        if self.risk.objective == "constrained":
            return f"the mean, with a limit to {tail}"
        name = tail if self.risk.objective == "cvar" else f"the mean mixed with {self.weight:.0%} of {tail}"
        return f"{name}, at equal mean exposure"

    @property
    def homogeneous(self) -> bool:
        """True if an account of half the size has half the objective."""
        return self.risk.objective != "constrained"

    @property
    def weight(self) -> float:
        """Weight of the CVaR against the mean; 0 for a constraint, which leaves the mean alone as long as it is met."""
        return {"cvar": 1.0, "mean_cvar": self.risk.weight}.get(self.risk.objective, 0.0)

    def least_sharpe(self, bars_per_year: float) -> float:
        """Return the Sharpe ratio per year below which cash is better than an account of normal returns.

        Their CVaR is mean - std phi(z) / alpha with z the quantile of alpha, so that the objective of a position is above 0 if
        mean / std of a period is above weight phi(z) / alpha, which is 2.06 times the weight at 5 %.

        :param bars_per_year: of the market.
        """
        normal = NormalDist()
        of_period = self.weight * normal.pdf(normal.inv_cdf(self.alpha)) / self.alpha if self.alpha < 1.0 else 0.0
        return of_period * float(np.sqrt(bars_per_year / self.bars))

    @property
    def alpha(self) -> float:
        """The tail; of a range the smallest, which is the most careful."""
        return float(self.risk.alphas()[0])

    def sums(self, log_returns: Floats) -> Floats:
        """Return the log return of every window of a period's length inside one block."""
        upto = np.concatenate(([0.0], np.cumsum(log_returns)))
        return np.asarray(upto[self.bars :] - upto[: -self.bars])

    def contributions(self, sums: Floats) -> Floats:
        """Return what every sample contributes to the objective; their mean is the objective."""
        var = float(np.quantile(sums, self.alpha, method="inverted_cdf"))
        tail = var + np.minimum(sums - var, 0.0) / self.alpha
        if self.risk.objective == "cvar":
            return tail
        if self.risk.objective == "mean_cvar":
            return (1.0 - self.risk.weight) * sums + self.risk.weight * tail
        assert self.risk.limit is not None
        missed = float(tail.mean()) < self.risk.limit
        return np.asarray(sums + MISSED * (tail - self.risk.limit) if missed else sums)

    def value(self, sums: Floats) -> float:
        """Return the objective of samples."""
        return float(self.contributions(sums).mean())

    def lead(self, sums: Floats, other: Floats) -> float:
        """Return the t-statistic of the difference between two accounts over the same bars.

        :param sums: of one account, over all blocks.
        :param other: of another.
        """
        difference = self.contributions(sums) - self.contributions(other)
        spread = float(difference.std())
        return float(difference.mean()) / spread * (len(sums) / self.bars) ** 0.5 if spread > 1e-12 else 0.0

    def account(self, sums: Floats, targets: Floats) -> HeldOutAccount:
        """Return an account as it is compared with others: at a mean exposure of 1, where only its shape is.

        :param sums: of the account.
        :param targets: ``[n, assets]`` its weights.
        """
        exposure = float(np.abs(targets).sum(axis=1).mean())
        if not self.homogeneous:
            return HeldOutAccount(sums, False)
        return HeldOutAccount(sums / exposure, False) if exposure > SMALLEST_EXPOSURE else HeldOutAccount(sums, True)

    def lead_at_equal_exposure(self, account: HeldOutAccount, other: HeldOutAccount) -> float:
        """Return the t-statistic of the difference between two accounts; infinite where one of them is in cash."""
        if account.idle != other.idle:
            return math.inf if other.idle else -math.inf
        return self.lead(account.sums, other.sums)

    def best_exposure(self, returns: Floats, largest: float) -> float:
        """Return the constant exposure with the best objective, never short; 0 is cash.

        :param returns: simple returns per bar of the market.
        :param largest: exposure that is allowed.
        """
        exposures = np.linspace(0.0, largest, 21)
        values = [self.value(self.sums(np.log1p(np.maximum(exposure * returns, -0.99)))) for exposure in exposures]
        return float(exposures[int(np.argmax(values))])


def held_out_risk(risk: RiskConfig, times: pd.DatetimeIndex, shortest: int) -> HeldOutRisk | None:
    """Return how held-out bars are scored for an objective; None where growth decides: for the mean, and without a period.

    :param risk: the objective.
    :param times: of the training bars.
    :param shortest: bars of the shortest block.
    """
    period = risk.counted_over
    if period is None:
        return None
    bars = period.usual_bars(times)
    legal = f"{shortest // FEWEST_PERIODS} bars or less, half of a held-out block, or fewer selection.blocks"
    require(FEWEST_PERIODS * bars <= shortest, "training.risk.period", risk.period, legal)
    return HeldOutRisk(risk, bars)
