"""The best hedge on a trinomial tree, by dynamic programming.

The state is the date t, the node k of the tree, the holding h and the running profit and loss w. For a utility U of the final
profit and loss

    Q_t(k, h', w) = E[ J_{t+1}(k', h', w + reward without cost) ],     J_t(k, h, w) = max over h' of Q_t(k, h', w - c(h' - h)),

with J at the last date U(w - cost of selling h). U is -w^2 for the quadratic criterion. For the CVaR it is min(w, b): by
Rockafellar and Uryasev (2000) CVaR_alpha = max over b of (E[min(W, b)] - (1 - alpha) b) / alpha. With proportional costs W is
concave in the holdings, so the best value is concave in b. With fixed costs it need not be, so b is first looked for on a grid.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailguard.envs.hedging_state import Floats, HedgingState
from tailguard.jit import decorators
from tailguard.validation import require

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
PROBABILITIES = np.array([1.0, 4.0, 1.0]) / 6.0  # of the tree's moves down, none, up
TARGET_TOLERANCE = 1e-3  # of b, as a share of the width of the grid of profits and losses
TARGETS = 33  # values of b that are tried before the best is refined
DEVIATIONS = 3.0  # of the hedge error, at least, that a grid of profits and losses must hold
WALKS = 20_000  # down the tree, to see which profits and losses occur
MARGIN = 0.25  # beyond them, as a share of their range

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


class HedgingTree(NamedTuple):
    """A trinomial tree of prices with the values of a book on it, and the grids of the dynamic program.

    :param spots: for each date t the ``2 t + 1`` prices, rising.
    :param marks: for each date the discounted values of the book at these prices.
    :param discounts: of each date.
    :param holdings: ``[H]`` rising; 0 is among them.
    :param wealth: ``[W]`` of the running profit and loss, evenly spaced.
    :param costs: ``[2]`` proportional and fixed cost of a trade.
    :param final_cost: True if the sale of the last holding has costs.
    """

    spots: tuple[Floats, ...]
    marks: tuple[Floats, ...]
    discounts: Floats
    holdings: Floats
    wealth: Floats
    costs: Floats
    final_cost: bool

    def plan(self, utility: Floats) -> tuple[float, tuple[NDArray[np.int16], ...]]:
        """Return the highest expected utility from the start without a holding, and the best holdings.

        :param utility: ``[W]`` of the final profit and loss, on the grid.
        """
        dates = len(self.spots) - 1
        shape = (len(self.holdings), len(self.wealth))
        value = np.empty((2 * dates + 1, *shape))
        sale = self.costs * self.discounts[-1] * self.final_cost
        _final_values(self.spots[-1], self.holdings, self.wealth, sale, utility, value)
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

    def narrowed(self, choices: tuple[NDArray[np.int16], ...], low: float, high: float) -> "HedgingTree":
        """Return the tree with all points between the profits and losses that a policy meets, and a margin beyond them.

        :param choices: of the policy, as :meth:`plan` returns them.
        :param low: kept on the grid, whatever the policy meets.
        :param high: likewise.
        """
        draws = np.random.default_rng(0)
        prices = [discount * spots for discount, spots in zip(self.discounts, self.spots, strict=True)]
        node: NDArray[np.int64] = np.zeros(WALKS, np.int64)
        held: NDArray[np.int64] = np.full(WALKS, np.abs(self.holdings).argmin(), np.int64)
        wealth, lowest, highest = np.zeros(WALKS), min(low, 0.0), max(high, 0.0)
        for t, choice in enumerate(choices):
            new = choice[node, held, _nearest(self.wealth, wealth)].astype(np.int64)
            paid = self.costs[0] * np.abs(self.holdings[new] - self.holdings[held]) * prices[t][node]
            to = node + draws.choice(3, WALKS, p=PROBABILITIES)
            gains = self.marks[t + 1][to] - self.marks[t][node] + self.holdings[new] * (prices[t + 1][to] - prices[t][node])
            wealth = wealth + gains - paid - self.costs[1] * self.discounts[t] * (new != held)
            node, held = to, new
            lowest, highest = min(lowest, wealth.min()), max(highest, wealth.max())
        margin = MARGIN * (highest - lowest)
        return self._replace(wealth=np.linspace(lowest - margin, highest + margin, len(self.wealth)))


def solve_tree(tree: HedgingTree, criterion: Literal["quadratic", "cvar"], alpha: float) -> HedgingSolution:
    """Return the best hedge on a tree.

    :param tree: with its grids. Holdings are restricted to theirs; the profit and loss is interpolated linearly, which
        understates a concave value: the objective comes down to its limit as the grids become finer. That of profits and losses
        is narrowed, with as many points, to what a first solution meets.
    :param criterion: ``quadratic`` minimises E[W^2], ``cvar`` the CVaR of the loss.
    :param alpha: level of the CVaR.
    :raises ValueError: if the grid of profits and losses is too narrow to hold the answer.
    """
    worst, wider = tree.wealth[-1], "a wider grid of profits and losses"
    if criterion == "quadratic":
        value, choices = tree.plan(-(tree.wealth**2))
        error = math.sqrt(max(-value, 0.0))
        require(error < worst / DEVIATIONS, "worst", worst, f"{wider}: the hedge error has a standard deviation of {error:.3g}")
        tree = tree.narrowed(choices, -DEVIATIONS * error, DEVIATIONS * error)
        value, choices = tree.plan(-(tree.wealth**2))
        return HedgingSolution(criterion, -value, math.nan, tree.spots, tree.holdings, tree.wealth, choices)

    def cvar(tree: HedgingTree, target: float) -> float:
        return (tree.plan(np.minimum(tree.wealth, target))[0] - (1.0 - alpha) * target) / alpha

    tried = np.linspace(tree.wealth[0], tree.wealth[-1], TARGETS)
    best = int(np.argmax([cvar(tree, target) for target in tried]))
    inside = 0 < best < TARGETS - 1
    require(inside, "worst", worst, f"{wider}: the best hedge's value at risk {tried[best]:.3g} lies at its edge")
    low, high = tried[best - 1], tried[best + 1]
    tree = tree.narrowed(tree.plan(np.minimum(tree.wealth, tried[best]))[1], low, high)
    target = _highest(lambda target: cvar(tree, target), low, high, TARGET_TOLERANCE * (tree.wealth[-1] - tree.wealth[0]))
    choices = tree.plan(np.minimum(tree.wealth, target))[1]
    return HedgingSolution(criterion, -cvar(tree, target), target, tree.spots, tree.holdings, tree.wealth, choices)


@inlined
def _at(values: Floats, wealth: float, first: float, step: float) -> float:
    """Interpolate linearly on an even grid; beyond its ends the first and the last line continue."""
    place = (wealth - first) / step
    below = min(max(math.floor(place), 0), len(values) - 2)
    return float(values[below] + (place - below) * (values[below + 1] - values[below]))


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


def _highest(function: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Return the maximum of a function that rises and then falls, by golden-section search."""
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
