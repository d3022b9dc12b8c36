"""Hedges from the literature, and a function that plays them.

A hedge is a function of the state that returns the units to hold. Those that know only one option do the same for a book,
with its delta and gamma.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailguard.envs.hedging_state import Floats, HedgingState
from tailguard.envs.option_hedging import OptionHedging
from tailguard.validation import require

Hedge = Callable[[HedgingState], Floats]


class HedgingResult(NamedTuple):
    """The episodes of a hedge, one per path.

    :param pnl: ``[N]`` final profit and loss: the sum of the rewards.
    :param costs: ``[N]`` costs paid, discounted.
    :param turnover: ``[N]`` units of the underlying traded, bought and sold.
    """

    pnl: Floats
    costs: Floats
    turnover: Floats

    def cvar(self, alpha: float = 0.05) -> float:
        """Return the CVaR of the hedge error: the mean loss in the worst share `alpha` of the paths, positive for a loss.

        :param alpha: the share.
        """
        return expected_shortfall(self.pnl, alpha)


def expected_shortfall(pnl: Floats, alpha: float) -> float:
    """Return the mean loss in the worst share `alpha` of equally likely results.

    :param pnl: ``[N]`` results.
    :param alpha: the share, above 0 and at most 1; 1 is the mean.
    """
    require(0.0 < alpha <= 1.0, "alpha", alpha, "above 0 and at most 1")
    count = alpha * len(pnl)
    whole = min(math.ceil(count), len(pnl))
    worst = np.sort(np.partition(pnl, whole - 1)[:whole])
    return -float(worst.sum() - (whole - count) * worst[-1]) / count


def play_hedge(env: OptionHedging, hedge: Hedge, seed: int) -> HedgingResult:
    """Play one episode in every copy.

    :param env: an :class:`OptionHedging`, with as many copies as paths.
    :param hedge: the policy.
    :param seed: of the paths; the same seed gives every hedge the same paths.
    """
    env.reset(seed=seed)
    pnl = np.zeros(env.num_envs)
    for _ in range(env.dates):
        pnl += env.step(hedge(env.state)[:, None] / env.limit)[1]
    return HedgingResult(pnl, env.finished_costs, env.finished_turnover)


def no_hedge(state: HedgingState) -> Floats:
    """Hold nothing.

    :param state: of the copies.
    """
    return np.zeros_like(state.spot)


def delta_hedge(state: HedgingState) -> Floats:
    """Hold the Black-Scholes delta at every date.

    :param state: of the copies.
    """
    return state.hedge


def leland(env: OptionHedging) -> Hedge:
    """Return Leland's (1985) hedge: the delta at a variance that pays for the expected costs of hedging it.

    sigma_L^2 = sigma^2 (1 + sqrt(8 / pi) cost / (sigma sqrt(dt))) for options that were sold, with minus for bought ones: there
    costs make the option worth less. Leland's own constant is sqrt(2 / pi), for the cost of a purchase and a sale together. A
    book counts as sold where its gamma is negative.

    :param env: its costs, dates and book.
    """
    step = env.maturity / env.dates

    def hedge(state: HedgingState) -> Floats:
        extra = math.sqrt(8.0 / math.pi) * env.cost / math.sqrt(step) * np.sqrt(state.variance)
        # A bought book at high costs would have a negative variance, where Leland's equation has no solution.
        added = np.where(state.gamma <= 0.0, extra, np.maximum(-extra, -0.99 * state.variance))
        return -env.greeks(state, added)[1]

    return hedge


def whalley_wilmott(env: OptionHedging, risk_aversion: float) -> Hedge:
    """Return Whalley and Wilmott's (1997) hedge: a no-trade band around the delta, the limit of best hedges for small costs.

    Outside of the band delta +- width the holding is moved to its nearest edge,

        width = (3 / 2 exp(-rate (T - t)) cost S gamma^2 / risk_aversion)^(1/3).

    :param env: its costs, dates and book.
    :param risk_aversion: of an exponential utility, per unit of money; tune it to the tail that counts. Infinite is the delta.
    """
    require(risk_aversion > 0.0, "risk_aversion", risk_aversion, "positive")

    def hedge(state: HedgingState) -> Floats:
        width = band_width(env, state, risk_aversion)
        return np.minimum(np.maximum(state.holding, state.hedge - width), state.hedge + width)

    return hedge


def band_width(env: OptionHedging, state: HedgingState, risk_aversion: float) -> Floats:
    """Return half the width of Whalley and Wilmott's band.

    :param env: its costs and dates.
    :param state: of the copies.
    :param risk_aversion: as in :func:`whalley_wilmott`.
    """
    years_left = env.maturity * (1.0 - state.date / env.dates)
    discount = np.exp(-env.rate * years_left)
    return np.cbrt(1.5 * discount * env.cost * state.spot * state.gamma**2 / risk_aversion)


def tune_whalley_wilmott(
    env: OptionHedging, alpha: float, seed: int, candidates: NDArray[np.float64] | None = None
) -> tuple[float, HedgingResult]:
    """Return the risk aversion with the lowest CVaR of the hedge error, and its episodes.

    :param env: an :class:`OptionHedging`, with as many copies as paths.
    :param alpha: level of the CVaR.
    :param seed: of the paths, the same for all candidates.
    :param candidates: risk aversions to try; None tries 61, from 0.01 to 10,000 per unit of premium, evenly in logarithms.
    """
    if candidates is None:
        candidates = np.geomspace(0.01, 1e4, 61) / max(abs(env.premium), 1e-9)
    results = {float(value): play_hedge(env, whalley_wilmott(env, float(value)), seed) for value in candidates}
    best = min(results, key=lambda value: results[value].cvar(alpha))
    return best, results[best]
