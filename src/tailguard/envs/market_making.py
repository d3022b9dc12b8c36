"""Quoting both sides of a market: Avellaneda and Stoikov (2008) in discrete time, with limits on the inventory.

The mid price is a Brownian motion with the volatility sigma. In each of N steps of length dt the market maker quotes an ask at
the distance a above the mid price and a bid at the distance b below it. A buyer takes the ask with probability
arrival_rate dt e^(-k a), a seller the bid with probability arrival_rate dt e^(-k b), independently, one unit each. At the
limits +-Q of the inventory q the side that would exceed them is not quoted. Each step pays

    a [ask is taken] + b [bid is taken] + q' (change of the mid price) - inventory_aversion q'^2 dt,

with the inventory q' after the trades, and the last one - liquidation_cost |q'| besides. So with W(q') the value of q' after
the trades, the best quotes maximise

    E[a [ask] + b [bid] + W(q')],    W(q) = V_next(q) - inventory_aversion q^2 dt.

As a function of the ask alone this is p (a + G) with p proportional to e^(-k a), which is highest at a = 1 / k - G; G is the
expected change of W by selling a unit. Both sides together need a few turns, since both may trade in one step.

In continuous time the best quotes solve a linear system (Gueant, Lehalle and Fernandez-Tapia 2013; Cartea, Jaimungal and
Penalva 2015): with h(t, q) the value and w = e^(k h),

    -dw/dt = M w,    M diagonal -k inventory_aversion q^2, beside it arrival_rate / e,    w(T, q) = e^(-k liquidation_cost |q|),

    a = 1 / k + h(q) - h(q - 1),    b = 1 / k + h(q) - h(q + 1).

For a maker with the utility -e^(-gamma wealth) the same holds with k gamma sigma^2 / 2 q^2 on the diagonal, the factor
(1 + gamma / k)^(-1 - k / gamma) in place of 1 / e, and log(1 + gamma / k) / gamma in place of 1 / k.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import expm
from scipy.optimize import minimize_scalar

from tailguard.envs.batched import StepOutcome
from tailguard.envs.market_making_tail import TailTable, solve_table
from tailguard.envs.single import SingleEnv
from tailguard.envs.streams import StreamedEnv
from tailguard.jit import decorators
from tailguard.validation import require

Floats = NDArray[np.float64]

compiled, inlined = decorators()

FARTHEST = 4.0  # distance of the farthest quote by default, in 1 / k: one in e^4 arrivals reaches it
MOST_TURNS, SETTLED = 1000, 1e-13  # of the search for the best pair of quotes


@dataclass(frozen=True)
class Quotes:
    """Quotes for every step and inventory, each row from the inventory -Q to Q.

    :param ask: ``[N, 2 Q + 1]``, distance above the mid price.
    :param bid: ``[N, 2 Q + 1]``, distance below the mid price.
    """

    ask: Floats
    bid: Floats

    def at(self, inventory: ArrayLike, played: ArrayLike) -> Floats:
        """Return the distances (ask, bid), ``[..., 2]``.

        :param inventory: from -Q to Q.
        :param played: the number of steps played, below N.
        """
        column = np.asarray(inventory, np.int64) + self.ask.shape[1] // 2
        row = np.asarray(played, np.int64)
        return np.stack((self.ask[row, column], self.bid[row, column]), axis=-1)


@dataclass(frozen=True)
class QuotesValue:
    """The exact value of quotes.

    :param value: the mean of the sum of rewards, from an empty inventory.
    :param spread_income: the mean of the distances earned by trades.
    :param inventory: ``[N + 1, 2 Q + 1]``, probabilities of the inventory before each step and at the end.
    """

    value: float
    spread_income: float
    inventory: Floats


class MarketMaking(StreamedEnv):
    """The market maker as an environment; an episode has N steps and begins with an empty inventory.

    The action is (x, y) in [-1, 1]^2: the ask is at the distance max_distance (x + 1) / 2 above the mid price, the bid at
    max_distance (y + 1) / 2 below it. The reward is as above: the change of wealth with the inventory valued at the mid price,
    less inventory_aversion q'^2 dt, and at the end less liquidation_cost |q'|. The observation is (q / Q, steps left / N).

    :param num_envs: the number of copies.
    :param steps: N.
    :param horizon: T, in the unit of time of the rates; dt = T / N.
    :param volatility: of the mid price, per square root of that unit.
    :param arrival_rate: arrivals at the mid price per unit of time on each side, at most 1 / dt.
    :param fill_decay: k, by which arrivals fall with the distance: at 1 / k there are 37 % of them left.
    :param inventory_limit: Q.
    :param inventory_aversion: price of holding one unit for one unit of time; it grows with the square of the inventory. 0 pays
        for the mean wealth alone.
    :param liquidation_cost: price of closing one unit at the end, such as half a spread.
    :param max_distance: of a quote; ``None`` is 4 / k.
    :param expected_rewards: pay the mean over the move of the mid price, which is 0, instead of the inventory times the move.
        Every policy has the same mean reward as before, with less noise, so an agent for the mean learns from fewer steps. The
        rewards then no longer add up to the wealth, so it is not for tails.
    :param seed: random seed of the first copy; the others count on from it.
    """

    state_arrays = (*StreamedEnv.state_arrays, "_inventory", "_played")

    def __init__(
        self,
        num_envs: int = 1,
        *,
        steps: int = 200,
        horizon: float = 1.0,
        volatility: float = 2.0,
        arrival_rate: float = 140.0,
        fill_decay: float = 1.5,
        inventory_limit: int = 5,
        inventory_aversion: float = 2.0,
        liquidation_cost: float = 1.0,
        max_distance: float | None = None,
        expected_rewards: bool = False,
        seed: int | None = None,
    ) -> None:
        """Check the parameters, which the class explains."""
        require(steps >= 1, "steps", steps, "at least 1")
        require(0.0 < horizon < math.inf, "horizon", horizon, "positive and finite")
        require(0.0 <= volatility < math.inf, "volatility", volatility, "finite and not negative")
        self.steps, self.horizon, self.dt = steps, horizon, horizon / steps
        most = 1.0 / self.dt
        legal = f"above 0 and at most 1 / dt = {most:.6g}: an arrival per step; take more steps for more arrivals"
        require(0.0 < arrival_rate <= most * (1.0 + 1e-12), "arrival_rate", arrival_rate, legal)
        require(0.0 < fill_decay < math.inf, "fill_decay", fill_decay, "positive and finite")
        require(inventory_limit >= 1, "inventory_limit", inventory_limit, "at least 1")
        require(0.0 <= inventory_aversion < math.inf, "inventory_aversion", inventory_aversion, "finite and not negative")
        require(0.0 <= liquidation_cost < math.inf, "liquidation_cost", liquidation_cost, "finite and not negative")
        self.max_distance = FARTHEST / fill_decay if max_distance is None else max_distance
        require(0.0 < self.max_distance < math.inf, "max_distance", max_distance, "positive and finite")
        self.volatility, self.arrival_rate, self.fill_decay = volatility, arrival_rate, fill_decay
        self.inventory_limit, self.inventory_aversion = inventory_limit, inventory_aversion
        self.liquidation_cost, self.expected_rewards = liquidation_cost, expected_rewards
        low = np.array([-1.0, 0.0], np.float32)
        super().__init__(num_envs, Box(low, np.ones(2, np.float32)), Box(-1.0, 1.0, (2,)), seed)
        self._inventory = np.zeros(num_envs, dtype=np.int64)
        self._played = np.zeros(num_envs, dtype=np.int64)
        inventories = np.arange(-inventory_limit, inventory_limit + 1, dtype=np.float64)
        self._holding: Floats = inventory_aversion * self.dt * inventories**2  # of each inventory, in one step
        self._closing: Floats = liquidation_cost * np.abs(inventories)
        self._arrival = arrival_rate * self.dt
        self._market: tuple[int, float, float, float, float, Floats, Floats] = (
            steps, self._arrival, fill_decay, self.max_distance, volatility * math.sqrt(self.dt),
            self._holding, self._closing,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ optima and rivals

    def solve(self) -> Quotes:
        """Return the best quotes of this environment, exactly, by dynamic programming over step and inventory."""
        ask, bid = plan(self.steps, self._arrival, self.fill_decay, self.max_distance, self._holding, self._closing)
        return Quotes(ask, bid)

    def solve_tail(self, points: int = 32) -> TailTable:
        """Return the best quotes for the CVaR of the sum of rewards, of every tail, by dynamic programming.

        They depend on the sum so far as well (``market_making_tail.py``). ``solve_tail().quotes(0.05)`` are those for the worst
        5 % of the episodes; their ``objective`` is a bar that no policy can pass, up to the error of the grid.

        :param points: quotes are multiples of max_distance / points; time and storage grow with its square.
        """
        require(points >= 2, "points", points, "at least 2")
        income = 2.0 * self.steps * self._arrival / (math.e * self.fill_decay)  # of the quotes that earn most, 1 / k each
        noise, spacing = self.volatility * math.sqrt(self.dt), self.max_distance / points
        market = (self.steps, self._arrival, self.fill_decay, noise, income, self._holding, self._closing)
        return solve_table(*market, spacing, points)

    def linear_system(self) -> Quotes:
        """Return the best quotes in continuous time, at the beginning of each step: the limit of many steps."""
        k = self.fill_decay
        values = self._flow(k * self.inventory_aversion, self.arrival_rate / math.e)
        return self._limited(*_quotes_of(values, k, 1.0 / k))

    def exponential_utility(self, risk_aversion: float) -> Quotes:
        """Return the quotes with the highest mean of -exp(-risk_aversion wealth) in continuous time.

        :param risk_aversion: gamma, per unit of wealth, above 0. `inventory_aversion` plays no part.
        """
        require(0.0 < risk_aversion < math.inf, "risk_aversion", risk_aversion, "positive and finite")
        k, gamma = self.fill_decay, risk_aversion
        coupling = self.arrival_rate * (1.0 + gamma / k) ** (-1.0 - k / gamma)
        values = self._flow(k * gamma * self.volatility**2 / 2.0, coupling)
        return self._limited(*_quotes_of(values, k, math.log1p(gamma / k) / gamma))

    def avellaneda_stoikov(self, risk_aversion: float) -> Quotes:
        """Return the approximate quotes of Avellaneda and Stoikov: a spread around a reservation price.

        :param risk_aversion: gamma, per unit of wealth, above 0.
        """
        require(0.0 < risk_aversion < math.inf, "risk_aversion", risk_aversion, "positive and finite")
        inventory = np.arange(-self.inventory_limit, self.inventory_limit + 1)
        time_left = self.horizon - self.dt * np.arange(self.steps)[:, None]
        variance = risk_aversion * self.volatility**2 * time_left
        half = variance / 2.0 + math.log1p(risk_aversion / self.fill_decay) / risk_aversion
        return self._limited(half - variance * inventory, half + variance * inventory)

    def fixed(self, distance: float) -> Quotes:
        """Return quotes at one distance on both sides.

        :param distance: from the mid price, at most `max_distance`.
        """
        require(0.0 <= distance <= self.max_distance, "distance", distance, f"from 0 to {self.max_distance:.6g}")
        quotes = np.full((self.steps, 2 * self.inventory_limit + 1), distance)
        return Quotes(quotes, quotes)

    def best_fixed(self) -> Quotes:
        """Return the quotes at the one distance with the highest value, searched exactly."""
        search = minimize_scalar(
            lambda distance: -self.evaluate(self.fixed(distance)).value, bounds=(0.0, self.max_distance), method="bounded"
        )
        return self.fixed(float(search.x))

    def evaluate(self, quotes: Quotes) -> QuotesValue:
        """Return the exact value of quotes, without simulation.

        :param quotes: distances from 0 to `max_distance` for every step and inventory.
        """
        shape = (self.steps, 2 * self.inventory_limit + 1)
        for name, distances in (("quotes.ask", quotes.ask), ("quotes.bid", quotes.bid)):
            require(distances.shape == shape, f"{name}.shape", distances.shape, f"{shape}")
            legal = bool(((distances >= 0.0) & (distances <= self.max_distance)).all())
            require(legal, name, distances, f"from 0 to max_distance, which is {self.max_distance:.6g}")
        occupied = np.zeros((self.steps + 1, shape[1]))
        occupied[0, self.inventory_limit] = 1.0
        income = spread(quotes.ask, quotes.bid, self._arrival, self.fill_decay, occupied)
        holding = float((occupied[1:] @ self._holding).sum() + occupied[-1] @ self._closing)
        return QuotesValue(income - holding, income, occupied)

    def action(self, distances: ArrayLike) -> Floats:
        """Return the action that quotes at these distances, the inverse of what a step does.

        :param distances: ``[..., 2]``, ask and bid, from 0 to `max_distance`.
        """
        return 2.0 * np.asarray(distances, np.float64) / self.max_distance - 1.0

    def quotes_of_actions(self, actions: ArrayLike) -> Quotes:
        """Return the quotes of a policy that looks at step and inventory alone.

        :param actions: ``[N, 2 Q + 1, 2]``, its actions for each step and each inventory from -Q to Q; clipped to the box.
        """
        distances = (np.clip(np.asarray(actions, np.float64), -1.0, 1.0) + 1.0) / 2.0 * self.max_distance
        return Quotes(distances[..., 0], distances[..., 1])

    def observations(self) -> NDArray[np.float32]:
        """Return the observation of each step and each inventory from -Q to Q, ``[N, 2 Q + 1, 2]``."""
        inventory = np.arange(-self.inventory_limit, self.inventory_limit + 1) / self.inventory_limit
        left = (self.steps - np.arange(self.steps)) / self.steps
        return np.stack(np.broadcast_arrays(inventory, left[:, None]), axis=-1).astype(np.float32)

    def _flow(self, aversion: float, coupling: float) -> Floats:
        """Return log w at the beginning of each step, ``[N, 2 Q + 1]``, for -dw/dt = M w."""
        inventory = np.arange(-self.inventory_limit, self.inventory_limit + 1)
        beside = np.full(2 * self.inventory_limit, coupling)
        step = expm(self.dt * (np.diag(-aversion * inventory**2.0) + np.diag(beside, 1) + np.diag(beside, -1)))
        w, scale = np.exp(-self.fill_decay * self._closing), 0.0
        logs = np.empty((self.steps, len(inventory)))
        for row in range(self.steps - 1, -1, -1):
            w = step @ w
            scale, w = scale + math.log(w.max()), w / w.max()  # it grows without bound; only ratios matter
            logs[row] = np.log(w) + scale
        return logs

    def _limited(self, ask: Floats, bid: Floats) -> Quotes:
        return Quotes(np.clip(ask, 0.0, self.max_distance), np.clip(bid, 0.0, self.max_distance))

    # ------------------------------------------------------------------------------------------------------ environment

    @property
    def inventory(self) -> NDArray[np.int64]:
        """The inventory of every copy."""
        return self._inventory.copy()

    def _begin(self, rows: NDArray[np.bool_]) -> None:
        self._inventory[rows] = 0
        self._played[rows] = 0

    def _observe(self) -> NDArray[np.float32]:
        obs = np.empty((self.num_envs, 2), np.float32)
        show_makers(self.steps, self.inventory_limit, self._inventory, self._played, obs)
        return obs

    def _advance(self, actions: Floats) -> StepOutcome:
        rewards, terminated = np.empty(self.num_envs), np.empty(self.num_envs, np.bool_)
        normals, uniforms = self._draws(2)
        if self.expected_rewards:
            normals = np.zeros(self.num_envs)
        step_makers(actions, normals, uniforms, *self._market, self._inventory, self._played, rewards, terminated)
        return rewards, terminated, np.zeros(self.num_envs, np.bool_)


def single_maker(**settings: Any) -> SingleEnv:
    """Return one market maker as a Gymnasium environment.

    :param settings: parameters of :class:`MarketMaking`.
    """
    return SingleEnv(MarketMaking(1, **settings))


def _quotes_of(logs: Floats, k: float, offset: float) -> tuple[Floats, Floats]:
    """Return the distances of ask and bid from log w, ``[N, 2 Q + 1]``; the sides that the limits forbid repeat the next."""
    ask, bid = np.empty_like(logs), np.empty_like(logs)
    ask[:, 1:] = offset + np.diff(logs, axis=1) / k
    bid[:, :-1] = offset - np.diff(logs, axis=1) / k
    ask[:, 0], bid[:, -1] = ask[:, 1], bid[:, -2]
    return ask, bid


@compiled
def show_makers(
    steps: int, limit: int, inventory: NDArray[np.int64], played: NDArray[np.int64], obs: NDArray[np.float32]
) -> None:
    """Fill `obs` ``[B, 2]`` with the observations of B market makers."""
    for copy in range(len(inventory)):
        obs[copy, 0], obs[copy, 1] = inventory[copy] / limit, (steps - played[copy]) / steps


@compiled
def step_makers(
    actions: Floats,
    normals: Floats,
    uniforms: Floats,
    steps: int,
    arrival: float,
    k: float,
    max_distance: float,
    noise: float,
    holding: Floats,
    closing: Floats,
    inventory: NDArray[np.int64],
    played: NDArray[np.int64],
    rewards: Floats,
    terminated: NDArray[np.bool_],
) -> None:
    """Take one step with B market makers.

    :param actions: ``[B, 2]`` in [-1, 1].
    :param normals: ``[B]``, the moves of the mid price in standard deviations.
    :param uniforms: ``[B, 2]``, which draw the trades at ask and bid.
    :param arrival: probability of an arrival at the mid price in one step.
    :param noise: standard deviation of the mid price in one step.
    :param holding: ``[2 Q + 1]``, price of each inventory in one step.
    :param closing: ``[2 Q + 1]``, price of each inventory at the end.
    """
    limit = len(holding) // 2
    for copy in range(len(actions)):
        ask, bid = (actions[copy, 0] + 1.0) / 2.0 * max_distance, (actions[copy, 1] + 1.0) / 2.0 * max_distance
        sold = inventory[copy] > -limit and uniforms[copy, 0] < arrival * math.exp(-k * ask)
        bought = inventory[copy] < limit and uniforms[copy, 1] < arrival * math.exp(-k * bid)
        reward = 0.0
        if sold:
            inventory[copy] -= 1
            reward += ask
        if bought:
            inventory[copy] += 1
            reward += bid
        held = inventory[copy]
        reward += held * noise * normals[copy] - holding[held + limit]
        played[copy] += 1
        terminated[copy] = played[copy] == steps
        rewards[copy] = reward - closing[held + limit] if terminated[copy] else reward


@compiled
def plan(steps: int, arrival: float, k: float, max_distance: float, holding: Floats, closing: Floats) -> tuple[Floats, Floats]:
    """Return the best distances of ask and bid, ``[N, 2 Q + 1]`` each."""
    width = len(holding)
    ask, bid = np.empty((steps, width)), np.empty((steps, width))
    following, value = -closing, np.empty(width)
    for step in range(steps - 1, -1, -1):
        worth = following - holding
        for q in range(width):
            # The change of W by a sale and by a purchase, and what a sale and a purchase in the same step save.
            sale = worth[q - 1] - worth[q] if q > 0 else 0.0
            purchase = worth[q + 1] - worth[q] if q < width - 1 else 0.0
            both = -sale - purchase if 0 < q < width - 1 else 0.0
            a, b = 1.0 / k, 1.0 / k
            for _ in range(MOST_TURNS):
                bought = arrival * math.exp(-k * b) if q < width - 1 else 0.0
                next_a = min(max(1.0 / k - sale - bought * both, 0.0), max_distance)
                sold = arrival * math.exp(-k * next_a) if q > 0 else 0.0
                next_b = min(max(1.0 / k - purchase - sold * both, 0.0), max_distance)
                moved = abs(next_a - a) + abs(next_b - b)
                a, b = next_a, next_b
                if moved < SETTLED:
                    break
            sold = arrival * math.exp(-k * a) if q > 0 else 0.0
            bought = arrival * math.exp(-k * b) if q < width - 1 else 0.0
            value[q] = worth[q] + sold * (a + sale) + bought * (b + purchase) + sold * bought * both
            ask[step, q], bid[step, q] = a, b
        following = value.copy()
    return ask, bid


@compiled
def spread(ask: Floats, bid: Floats, arrival: float, k: float, occupied: Floats) -> float:
    """Return the mean of the distances earned, and fill `occupied` ``[N + 1, 2 Q + 1]`` with probabilities of the inventory.

    :param occupied: its first row holds those before the first step, the others zeros.
    """
    steps, width = ask.shape
    income = 0.0
    for step in range(steps):
        for q in range(width):
            sold = arrival * math.exp(-k * ask[step, q]) if q > 0 else 0.0
            bought = arrival * math.exp(-k * bid[step, q]) if q < width - 1 else 0.0
            here = occupied[step, q]
            income += here * (sold * ask[step, q] + bought * bid[step, q])
            occupied[step + 1, q] += here * (sold * bought + (1.0 - sold) * (1.0 - bought))
            if q > 0:
                occupied[step + 1, q - 1] += here * sold * (1.0 - bought)
            if q < width - 1:
                occupied[step + 1, q + 1] += here * bought * (1.0 - sold)
    return income
