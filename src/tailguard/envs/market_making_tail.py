"""The best quotes of a market maker for the CVaR of its final wealth, by dynamic programming.

With a cap C on what counts, CVaR_a(R) = max_C { C + E[min(R - C, 0)] / a } (Rockafellar and Uryasev 2000). The state of the
inner problem is (step, inventory, y) with y the rewards so far less C, and

    F_N(q, y) = min(y, 0),    F_t(q, y) = max_{a, b} E[F_{t+1}(q', y + reward)].

It does not depend on C otherwise: one table answers for every cap, hence for every alpha, with F_0(0, -C) in place of the
expectation above. On the table y and the quotes are multiples of one spacing, so that income of a trade moves by whole points;
moves of the mid price are Gauss-Hermite nodes with linear interpolation between points.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailguard.jit import decorators
from tailguard.validation import require

Floats = NDArray[np.float64]

compiled, inlined = decorators()

NODES = 9  # of the normal distribution of a move of the price
TURNS = 3  # of the search for the best pair of quotes: ask for a given bid, and the other way round


@dataclass(frozen=True, eq=False)
class TailQuotes:
    """The best quotes for the CVaR of the sum of rewards; they depend on the sum so far.

    :param objective: the CVaR that they reach.
    :param cap: the sum of rewards beyond which nothing counts, the VaR.
    :param spacing: of quotes and sums on the grid.
    :param least: the first sum of the grid, less the cap.
    :param ask: ``[N, 2 Q + 1, points]`` distance above the mid price, in spacings.
    :param bid: the same below it.
    """

    objective: float
    cap: float
    spacing: float
    least: float
    ask: NDArray[np.int16]
    bid: NDArray[np.int16]

    def at(self, inventory: ArrayLike, played: ArrayLike, total: ArrayLike) -> Floats:
        """Return the distances (ask, bid), ``[..., 2]``.

        :param inventory: from -Q to Q.
        :param played: the number of steps played, below N.
        :param total: the sum of the rewards of the episode so far.
        """
        points = np.rint((np.asarray(total, np.float64) - self.cap - self.least) / self.spacing)
        point = np.clip(points, 0, self.ask.shape[2] - 1).astype(np.int64)
        row, column = np.asarray(played, np.int64), np.asarray(inventory, np.int64) + self.ask.shape[1] // 2
        return self.spacing * np.stack((self.ask[row, column, point], self.bid[row, column, point]), axis=-1)


@dataclass(frozen=True, eq=False)
class TailTable:
    """The dynamic program for every cap.

    :param spacing: of quotes and sums.
    :param least: the first sum.
    :param values: ``[points]``, the most that E[min(y + R, 0)] can be from the start of an episode.
    :param ask: ``[N, 2 Q + 1, points]`` in spacings.
    :param bid: the same.
    """

    spacing: float
    least: float
    values: Floats
    ask: NDArray[np.int16]
    bid: NDArray[np.int16]

    def quotes(self, alpha: float) -> TailQuotes:
        """Return the best quotes for a tail.

        :param alpha: the share of the worst episodes that counts.
        """
        require(0.0 < alpha <= 1.0, "alpha", alpha, "above 0 and at most 1")
        caps = -(self.least + self.spacing * np.arange(len(self.values)))
        reached = caps + self.values / alpha
        best = int(reached.argmax())
        return TailQuotes(float(reached[best]), float(caps[best]), self.spacing, self.least, self.ask, self.bid)


def solve_table(
    steps: int,
    arrival: float,
    k: float,
    noise: float,
    income: float,
    holding: Floats,
    closing: Floats,
    spacing: float,
    most: int,
) -> TailTable:
    """Return the table of the best quotes; time and storage grow with the square of 1 / spacing.

    :param steps: N.
    :param arrival: probability of an arrival at the mid price in one step.
    :param k: decay of the fills with the distance.
    :param noise: standard deviation of the mid price in one step.
    :param income: more than an episode can be expected to earn.
    :param holding: ``[2 Q + 1]``, price of each inventory in one step.
    :param closing: ``[2 Q + 1]``, price of each inventory at the end.
    :param spacing: of quotes and sums.
    :param most: the farthest quote, in spacings.
    """
    # Beyond the ends everything counts, or nothing: the whole income, and the risk of the largest inventory held throughout.
    reach = len(holding) // 2 * noise * math.sqrt(steps) + most * spacing
    below, above = math.ceil((income + reach) / spacing), math.ceil(reach / spacing)
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    start, ask, bid = plan_tail(
        steps, arrival, k, noise / spacing, holding / spacing, closing / spacing, below, above, most, spacing,
        nodes, weights / weights.sum(),
    )  # fmt: skip
    return TailTable(spacing, -below * spacing, start * spacing, ask, bid)


@inlined
def _between(row: Floats, place: float) -> float:
    """Return the value at a place between the points; below them it is linear, above them constant."""
    last = len(row) - 1
    if place <= 0.0:
        return float(row[0] + place)
    if place >= last:
        return float(row[last])
    point = int(place)
    share = place - point
    return float(row[point] * (1.0 - share) + row[point + 1] * share)


@compiled
def plan_tail(
    steps: int,
    arrival: float,
    k: float,
    noise: float,
    holding: Floats,
    closing: Floats,
    below: int,
    above: int,
    most: int,
    spacing: float,
    nodes: Floats,
    weights: Floats,
) -> tuple[Floats, NDArray[np.int16], NDArray[np.int16]]:
    """Return the values of the start ``[points]``, and the best asks and bids ``[N, 2 Q + 1, points]``, all in spacings.

    :param below: points below a sum of 0.
    :param above: points above it.
    """
    width, points = len(holding), below + above + 1
    fills = arrival * np.exp(-k * spacing * np.arange(most + 1))
    value, kept = np.empty((width, points)), np.empty((width, points + 2 * most))
    ask, bid = np.zeros((steps, width, points), np.int16), np.zeros((steps, width, points), np.int16)
    for q in range(width):
        for point in range(points):
            value[q, point] = min(point - below - closing[q], 0.0)
    for step in range(steps - 1, -1, -1):
        for q in range(width):  # after the trades: hold q over the move of the price
            for point in range(points + 2 * most):
                kept[q, point] = 0.0
                for node in range(len(nodes)):
                    move = (q - width // 2) * noise * nodes[node] - holding[q]
                    kept[q, point] += weights[node] * _between(value[q], point + move)
        for q in range(width):
            sells, buys = q > 0, q < width - 1
            less, more = kept[max(q - 1, 0)], kept[min(q + 1, width - 1)]
            stay = kept[q]
            for point in range(points):
                a = b = 0
                for turn in range(TURNS):
                    if sells:
                        bought = fills[b] if buys and turn else 0.0
                        highest = -np.inf
                        for d in range(most + 1):
                            gain = less[point + d] - stay[point]
                            gain += bought * (stay[point + d + b] - more[point + b] - gain)
                            if fills[d] * gain > highest:
                                highest, a = fills[d] * gain, d
                    if buys:
                        sold = fills[a] if sells else 0.0
                        highest = -np.inf
                        for d in range(most + 1):
                            gain = more[point + d] - stay[point]
                            gain += sold * (stay[point + d + a] - less[point + a] - gain)
                            if fills[d] * gain > highest:
                                highest, b = fills[d] * gain, d
                sold, bought = fills[a] if sells else 0.0, fills[b] if buys else 0.0
                ask[step, q, point], bid[step, q, point] = a, b
                value[q, point] = (
                    (1.0 - sold) * (1.0 - bought) * stay[point]
                    + sold * (1.0 - bought) * less[point + a]
                    + bought * (1.0 - sold) * more[point + b]
                    + sold * bought * stay[point + a + b]
                )
    return value[width // 2].copy(), ask, bid
