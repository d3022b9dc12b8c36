"""The best hedge on a trinomial tree, by dynamic programming.

The state is the date t, the node k of the tree, the holding h and the running profit and loss w. For a utility U of the final
profit and loss

    Q_t(k, h', w) = E[ J_{t+1}(k', h', w + reward without cost) ],     J_t(k, h, w) = max over h' of Q_t(k, h', w - c(h' - h)),

with J at the last date U(w - cost of selling h). U is -w^2 for the quadratic criterion. For the CVaR it is min(w, b): by
Rockafellar and Uryasev (2000) CVaR_alpha = max over b of (E[min(W, b)] - (1 - alpha) b) / alpha, a concave function of b.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tailguard.envs import option_kernel as kernel
from tailguard.envs.option_hedging import GeometricBrownianMotion, HedgingState, OptionHedging
from tailguard.envs.option_kernel import Floats
from tailguard.jit import decorators
from tailguard.validation import require

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
PROBABILITIES = np.array([1.0, 4.0, 1.0]) / 6.0  # of the tree's moves down, none, up
TARGET_TOLERANCE = 1e-3  # of b, as a share of the width of the grid of profits and losses

compiled, inlined = decorators()


@dataclass(frozen=True, eq=False)
class HedgingSolution:
    """The best hedge.

    :param criterion: ``quadratic`` or ``cvar``.
    :param objective: the least E[W^2], or the least CVaR of the hedge error as a positive loss.
    :param target: b of the CVaR, the value at risk of the best hedge; NaN for the quadratic criterion.
    :param spots: for each date the prices of the tree, rising.
    :param holdings: ``[H]`` the grid of holdings.
    :param wealth: ``[W]`` the grid of the running profit and loss.
    :param choices: for each date ``[2 t + 1, H, W]``, the index of the best holding.
    """

    criterion: str
    objective: float
    target: float
    spots: tuple[Floats, ...]
    holdings: Floats
    wealth: Floats
    choices: tuple[NDArray[np.int16], ...]

    def hedge(self, state: HedgingState) -> Floats:
        """Return the units to hold; a policy for :func:`tailguard.envs.hedging_rivals.play_hedge`.

        :param state: of copies on the tree, all at one date; the nearest points of the grids are taken.
        """
        date = int(state.date[0])
        require(bool((state.date == date).all()), "date", state.date, "the same in all copies")
        node = _nearest(np.log(self.spots[date]), np.log(state.spot))
        held, wealth = _nearest(self.holdings, state.holding), _nearest(self.wealth, state.pnl)
        return self.holdings[self.choices[date][node, held, wealth]]


def solve_hedging(
    env: OptionHedging,
    criterion: Literal["quadratic", "cvar"],
    alpha: float = 0.05,
    *,
    n_holdings: int = 41,
    n_wealth: int = 301,
    worst: float | None = None,
) -> HedgingSolution:
    """Return the best hedge of a book without barriers on a trinomial tree.

    Holdings are restricted to a grid; the profit and loss is interpolated linearly. Twice as many points of both change the
    objective by less than 1 % in the tests' instance.

    :param env: with ``GeometricBrownianMotion(shocks="trinomial")``; time and storage grow with the square of its dates.
    :param criterion: ``quadratic`` minimises E[W^2], ``cvar`` the CVaR of the loss.
    :param alpha: level of the CVaR.
    :param n_holdings: points of the grid of holdings, from 0 to the limit on the side of the delta.
    :param n_wealth: points of the grid of the running profit and loss.
    :param worst: the largest loss and gain on that grid; None takes three times the premium.
    """
    on_a_tree = isinstance(env.process, GeometricBrownianMotion) and env.process.shocks == "trinomial"
    require(on_a_tree, "process", env.process, "GeometricBrownianMotion(shocks='trinomial')")
    require(all(leg.knock_out is None for leg in env.book), "book", env.book, "without barriers: a tree does not know its past")
    require(criterion in ("quadratic", "cvar"), "criterion", criterion, "quadratic or cvar")
    require(0.0 < alpha <= 1.0, "alpha", alpha, "above 0 and at most 1")
    tree = _Tree(env, n_holdings, n_wealth, 3.0 * abs(env.premium) if worst is None else worst)
    if criterion == "quadratic":
        value, choices = tree.plan(-(tree.wealth**2))
        return HedgingSolution(criterion, -value, math.nan, tree.spots, tree.holdings, tree.wealth, choices)

    def cvar(target: float) -> float:
        return (tree.plan(np.minimum(tree.wealth, target))[0] - (1.0 - alpha) * target) / alpha

    target = _highest(cvar, tree.wealth[0], tree.wealth[-1])
    choices = tree.plan(np.minimum(tree.wealth, target))[1]
    return HedgingSolution(criterion, -cvar(target), target, tree.spots, tree.holdings, tree.wealth, choices)


class _Tree:
    """The tree of prices with the values of the book on it, and the grids.

    :param env: the environment.
    :param n_holdings: points of the grid of holdings.
    :param n_wealth: points of the grid of the running profit and loss.
    :param worst: its largest loss and gain.
    """

    def __init__(self, env: OptionHedging, n_holdings: int, n_wealth: int, worst: float) -> None:
        assert isinstance(env.process, GeometricBrownianMotion)
        step = env.maturity / env.dates
        spread = env.process.volatility * math.sqrt(step)
        drift = env.rate if env.process.drift is None else env.process.drift
        growth = drift * step - math.log((2.0 + math.cosh(spread * kernel.GAUSS_HERMITE)) / 3.0)
        self.spots = tuple(
            env.spot * np.exp(growth * t + spread * kernel.GAUSS_HERMITE * np.arange(-t, t + 1)) for t in range(env.dates + 1)
        )
        sides = [-leg.quantity if leg.kind == "call" else leg.quantity for leg in env.book]
        self.holdings = np.linspace(-env.limit * (min(sides) < 0.0), env.limit * (max(sides) > 0.0), n_holdings)
        self.wealth = np.linspace(-worst, worst, n_wealth)
        self.discounts = np.exp(-env.rate * step * np.arange(env.dates + 1))
        self.marks = self._marks(env)
        self.costs = np.array([env.cost, env.fixed_cost])
        self.final_cost = env.final_cost

    def _marks(self, env: OptionHedging) -> list[Floats]:
        """Return the discounted value of the book at the nodes of each date, as the environment marks it."""
        marks = [np.array([env.premium])]
        expiries = np.array([env.dates if leg.expiry is None else leg.expiry for leg in env.book])
        require(bool((expiries == env.dates).all()), "expiry", expiries, "the last date: a tree does not know past payoffs")
        for t in range(1, env.dates):
            n = 2 * t + 1
            zeros, alive = np.zeros(n), np.ones((n, len(env.book)), np.bool_)
            state = HedgingState(np.full(n, t), self.spots[t], zeros, zeros, zeros, zeros, zeros, alive)
            marks.append(self.discounts[t] * env.greeks(state)[0])
        payoff = np.zeros(2 * env.dates + 1)
        for leg in env.book:
            sign = 1.0 if leg.kind == "call" else -1.0
            payoff += leg.quantity * np.maximum(sign * (self.spots[-1] - leg.strike), 0.0)
        return [*marks, self.discounts[-1] * payoff]

    def plan(self, utility: Floats) -> tuple[float, tuple[NDArray[np.int16], ...]]:
        """Return the highest expected utility from the start without a holding, and the best holdings.

        :param utility: ``[W]`` of the final profit and loss, on the grid.
        """
        dates = len(self.spots) - 1
        shape = (len(self.holdings), len(self.wealth))
        value = np.empty((2 * dates + 1, *shape))
        _final_values(self.spots[-1], self.holdings, self.wealth, self.costs * self.discounts[-1] * self.final_cost, utility, value)
        choices: list[NDArray[np.int16]] = []
        for t in reversed(range(dates)):
            nodes = 2 * t + 1
            held, best, choice = np.empty((nodes, *shape)), np.empty((nodes, *shape)), np.empty((nodes, *shape), np.int16)
            prices = self.discounts[t] * self.spots[t], self.discounts[t + 1] * self.spots[t + 1]
            _expect(*prices, self.marks[t], self.marks[t + 1], self.holdings, self.wealth, PROBABILITIES, value, held)
            _trade(self.spots[t], self.holdings, self.wealth, self.costs * self.discounts[t], held, best, choice)
            value = best
            choices.append(choice)
        start = value[0, np.abs(self.holdings).argmin()]
        return float(np.interp(0.0, self.wealth, start)), tuple(reversed(choices))


@inlined
def _at(values: Floats, wealth: float, first: float, step: float) -> float:
    """Interpolate linearly on an even grid; beyond its ends the first and the last line continue."""
    place = (wealth - first) / step
    below = min(max(int(math.floor(place)), 0), len(values) - 2)
    return values[below] + (place - below) * (values[below + 1] - values[below])


@compiled
def _final_values(spots: Floats, holdings: Floats, wealth: Floats, costs: Floats, utility: Floats, value: Floats) -> None:
    """Fill `value` ``[K, H, W]`` with the utility after the sale of the holding."""
    first, step = wealth[0], wealth[1] - wealth[0]
    for k in range(len(spots)):
        for h in range(len(holdings)):
            cost = costs[0] * abs(holdings[h]) * spots[k] + (costs[1] if holdings[h] != 0.0 else 0.0)
            for i in range(len(wealth)):
                value[k, h, i] = _at(utility, wealth[i] - cost, first, step)


@compiled
def _expect(
    spots: Floats,
    next_spots: Floats,
    marks: Floats,
    next_marks: Floats,
    holdings: Floats,
    wealth: Floats,
    probabilities: Floats,
    value: Floats,
    held: Floats,
) -> None:
    """Fill `held` ``[K, H, W]`` with the expected value of holding through the next move; prices are discounted."""
    first, step = wealth[0], wealth[1] - wealth[0]
    for k in range(len(spots)):
        for h in range(len(holdings)):
            held[k, h] = 0.0
            for move in range(3):
                to = k + move
                gain = next_marks[to] - marks[k] + holdings[h] * (next_spots[to] - spots[k])
                for i in range(len(wealth)):
                    held[k, h, i] += probabilities[move] * _at(value[to, h], wealth[i] + gain, first, step)


@compiled
def _trade(
    spots: Floats, holdings: Floats, wealth: Floats, costs: Floats, held: Floats, best: Floats, choice: NDArray[np.int16]
) -> None:
    """Fill `best` and `choice` ``[K, H, W]`` with the value and the index of the best holding after a trade."""
    first, step = wealth[0], wealth[1] - wealth[0]
    for k in range(len(spots)):
        for h in range(len(holdings)):
            best[k, h] = held[k, h]
            choice[k, h] = h
            for new in range(len(holdings)):
                if new == h:
                    continue
                cost = costs[0] * abs(holdings[new] - holdings[h]) * spots[k] + costs[1]
                for i in range(len(wealth)):
                    after = _at(held[k, new], wealth[i] - cost, first, step)
                    if after > best[k, h, i]:
                        best[k, h, i] = after
                        choice[k, h, i] = new


def _highest(function, low: float, high: float) -> float:  # type: ignore[no-untyped-def]
    """Return the maximum of a concave function by golden-section search."""
    tolerance = TARGET_TOLERANCE * (high - low)
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > tolerance:
        if at_left >= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = function(right)
    return float(0.5 * (low + high))


def _nearest(grid: Floats, values: Floats) -> NDArray[np.int64]:
    """Return the indices of the nearest points of a rising grid."""
    if len(grid) == 1:
        return np.zeros(len(values), np.int64)
    return np.searchsorted(0.5 * (grid[1:] + grid[:-1]), values)
