"""Hedging a book of options at discrete dates, with costs of trading.

Somebody has sold options and trades the underlying to offset them. Without costs and with enough dates the Black-Scholes delta
does it; with costs it trades far too often, and the best hedge is not known in general. What matters is the tail of the final
profit and loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from tailguard.envs import option_kernel as kernel
from tailguard.envs.barrier import knock_out_price
from tailguard.envs.batched import StepOutcome
from tailguard.envs.hedging_optimum import HedgingSolution, HedgingTree, solve_tree
from tailguard.envs.hedging_state import Floats, HedgingState
from tailguard.envs.heston import Heston, heston_price
from tailguard.envs.single import SingleEnv
from tailguard.envs.streams import StreamedEnv, fill_uniforms
from tailguard.validation import require

FARTHEST = 10.0  # observations are clipped to this
FEWEST_RETURNS = 20
FINEST, STRAIGHT = 0.05, 1e-3  # derivatives of a band's edges at 0: the least, and what is not told from 1
WIDEST_MOVE = 3.0  # standard deviations until the expiry, of the profits and losses that a dynamic program looks at


@dataclass(frozen=True)
class Option:
    """A leg of a book: European calls or puts, settled in cash; a spread is two legs.

    :param kind: ``call`` or ``put``.
    :param strike: its strike.
    :param quantity: how many, negative if sold.
    :param expiry: the date at which it expires, from 1; None is the last date of the environment.
    :param knock_out: the option is void once the spot is at or beyond this level at a date; None is an option without barrier.
        Below the first spot it is a down-and-out, above it an up-and-out.
    """

    kind: Literal["call", "put"] = "call"
    strike: float = 100.0
    quantity: float = -1.0
    expiry: int | None = None
    knock_out: float | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        require(self.kind in ("call", "put"), "kind", self.kind, "call or put")
        require(0.0 < self.strike < np.inf, "strike", self.strike, "positive and finite")
        require(0.0 < abs(self.quantity) < np.inf, "quantity", self.quantity, "finite and not 0")


@dataclass(frozen=True)
class GeometricBrownianMotion:
    """Black and Scholes's price process.

    :param volatility: per square root of a year; 0.2 is an equity index.
    :param drift: of the price, per year; None is the rate, under which hedging neither earns nor costs a risk premium.
    :param shocks: ``normal``, or ``trinomial``: moves of 0 and of sqrt(3) standard deviations up and down with probabilities 4,
        1 and 1 sixths. That has the normal's first five moments, and its paths form a tree on which the best hedge can be
        computed.
    """

    volatility: float = 0.2
    drift: float | None = None
    shocks: Literal["normal", "trinomial"] = "normal"

    def __post_init__(self) -> None:
        """Check the fields."""
        require(0.0 < self.volatility < np.inf, "volatility", self.volatility, "positive and finite")
        require(self.shocks in ("normal", "trinomial"), "shocks", self.shocks, "normal or trinomial")


@dataclass(frozen=True, eq=False)
class BlockBootstrap:
    """Paths made of blocks of observed returns (the stationary bootstrap of Politis and Romano), one return per date.

    :param returns: log returns, one per bar; a hedging date is a bar. Their mean is replaced by the drift.
    :param mean_block: mean length of a block in bars; longer keeps more of the clusters of volatility, 1 keeps none.
    :param volatility: at which options are valued, per square root of a year; None is that of the returns.
    :param drift: as in :class:`GeometricBrownianMotion`.
    """

    returns: ArrayLike
    mean_block: float = 20.0
    volatility: float | None = None
    drift: float | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        returns = np.asarray(self.returns, np.float64)
        enough = returns.ndim == 1 and len(returns) >= FEWEST_RETURNS and bool(np.isfinite(returns).all())
        require(enough, "returns", returns.shape, f"at least {FEWEST_RETURNS} finite numbers in one dimension")
        require(bool(returns.std() > 0.0), "the standard deviation of returns", returns.std(), "positive")
        require(self.mean_block >= 1.0, "mean_block", self.mean_block, "at least 1")
        require(self.volatility is None or 0.0 < self.volatility < np.inf, "volatility", self.volatility, "positive and finite")


Process = GeometricBrownianMotion | Heston | BlockBootstrap


class OptionHedging(StreamedEnv):
    """Hedging as an environment: at each date choose how many units of the underlying to hold until the next.

    An episode is the life of the book, from date 0 without a holding to date `dates`, where the holding is sold. The reward of
    a date is the change of the hedged value, discounted to date 0, less the costs of the trade at its beginning,

        d_{t+1} V_{t+1} - d_t V_t + h_t (d_{t+1} S_{t+1} - d_t S_t) - d_t c(h_t - h_{t-1}),      d_t = exp(-rate t),

    with c(u) = cost |u| S + fixed_cost (u != 0). V_t is the value of the book: options that were sold count negative, and those
    that have expired with their payoff. The value at date 0 is the premium, so the undiscounted sum of the rewards is exactly
    the final profit and loss: premium received, less payoffs, plus gains of the hedge, less costs, in money of date 0. It is 0
    for a perfect hedge at a fair premium without costs. Values between the first and the last date are Black-Scholes values;
    they distribute the profit and loss over the dates and do not change its sum.

    The action is the hedge ratio in [-1, 1]: the units to hold / limit. For one option these are units. The observation has the
    columns

    - time left, from 1 to 0,
    - holding / limit,
    - minus the Black-Scholes delta of the book / limit: the holding that a delta hedger would choose,
    - gamma S sigma sqrt(dt) / limit: the change of that delta in a usual move until the next date,
    - under Heston's process, sqrt(variance / long-run variance),
    - for each leg log(S / strike) / (sigma sqrt(life)), and, if it has a barrier, 1 until it is knocked out, then 0.

    Under Heston's process sigma^2 is the expected average variance until expiry, given the present one. Barriers are monitored
    at the dates; between the first and the last their values are those of Reiner and Rubinstein with Broadie, Glasserman and
    Kou's shift of the barrier.

    Copy i of a batch with seed s is the same, bit for bit, as a single environment with seed s + i.

    :param num_envs: the number of copies.
    :param book: the options.
    :param process: of the price: :class:`GeometricBrownianMotion`, :class:`~tailguard.envs.heston.Heston` or
        :class:`BlockBootstrap`.
    :param spot: the price at date 0.
    :param maturity: life of the book in years.
    :param dates: the number of hedging dates, evenly spaced.
    :param rate: interest rate, continuously compounded, per year.
    :param cost: cost of a trade as a fraction of its value; 0.001 is 0.1 %.
    :param fixed_cost: cost of a trade of any size, in money.
    :param final_cost: True if the sale of the last holding has costs as well.
    :param limit: the largest holding, long or short; None is the sum of the sizes of the legs.
    :param premium: value of the book at date 0, negative for options that were sold; None is its Black-Scholes value, under
        Heston's process Heston's. Barriers are valued by quadrature from date to date, under Heston's process at the average
        variance that is expected.
    :param seed: random seed.
    """

    state_arrays = ("_streams", "_accounts", "_clocks", "_alive")

    def __init__(
        self,
        num_envs: int = 1,
        *,
        book: Sequence[Option] = (Option(),),
        process: Process = GeometricBrownianMotion(),  # noqa: B008 (frozen)
        spot: float = 100.0,
        maturity: float = 1.0 / 12.0,
        dates: int = 21,
        rate: float = 0.0,
        cost: float = 0.0,
        fixed_cost: float = 0.0,
        final_cost: bool = True,
        limit: float | None = None,
        premium: float | None = None,
        seed: int | None = None,
    ) -> None:
        """Check the parameters, which the class explains."""
        require(len(book) >= 1, "book", book, "at least one option")
        require(0.0 < spot < np.inf, "spot", spot, "positive and finite")
        require(0.0 < maturity < np.inf, "maturity", maturity, "positive and finite, in years")
        require(dates >= 1, "dates", dates, "at least 1")
        require(abs(rate) < np.inf, "rate", rate, "finite")
        require(0.0 <= cost < 1.0, "cost", cost, "at least 0 and below 1, as a fraction of the value traded")
        require(0.0 <= fixed_cost < np.inf, "fixed_cost", fixed_cost, "at least 0 and finite")
        self.book, self.process, self.spot, self.maturity, self.dates = tuple(book), process, spot, maturity, dates
        self.rate, self.cost, self.fixed_cost, self.final_cost = rate, cost, fixed_cost, final_cost
        self.limit = float(sum(abs(leg.quantity) for leg in book)) if limit is None else float(limit)
        require(0.0 < self.limit < np.inf, "limit", limit, "positive and finite")
        self._terms = np.array([maturity / dates, dates, rate, cost, fixed_cost, float(final_cost)])
        self._legs = np.array([_leg_row(leg, spot, dates) for leg in book])
        self._process, self._returns = _process_row(process, rate, maturity / dates)
        variance = process.variance if isinstance(process, Heston) else float(self._process[kernel.VOLATILITY]) ** 2
        self._start = np.array([spot, variance, 0.0])
        super().__init__(num_envs, self._observations_of_a_copy(), self._actions_of_a_copy(), seed)
        self._accounts = np.zeros((num_envs, kernel.ACCOUNT_FIELDS))
        self._clocks = np.zeros((num_envs, 2), np.int64)
        self._alive = np.ones((num_envs, len(book)), np.bool_)
        self.finished_costs, self.finished_turnover = np.zeros(num_envs), np.zeros(num_envs)
        self.premium = self._fair_premium() if premium is None else float(premium)
        require(abs(self.premium) < np.inf, "premium", premium, "finite")
        self._start[2] = self.premium

    @property
    def state(self) -> HedgingState:
        """The present state of all copies, copied."""
        accounts = self._accounts
        columns = (kernel.SPOT, kernel.VARIANCE, kernel.HOLDING, kernel.HEDGE, kernel.GAMMA, kernel.PNL)
        spot, variance, holding, hedge, gamma, pnl = (accounts[:, column].copy() for column in columns)
        return HedgingState(self._clocks[:, kernel.DATE].copy(), spot, variance, holding, hedge, gamma, pnl, self._alive.copy())

    def greeks(self, state: HedgingState, added_variance: ArrayLike = 0.0) -> tuple[Floats, Floats, Floats]:
        """Return Black-Scholes value, delta and gamma of the book.

        :param state: in which they are computed; its own greeks are not looked at.
        :param added_variance: added to the squared volatility, a number or ``[B]``.
        """
        filled = np.empty((len(state.spot), 3))
        added = np.broadcast_to(np.asarray(added_variance, np.float64), state.spot.shape).copy()
        kernel.book_greeks(
            self._legs, state.alive, self._process, self._terms, state.date, state.spot, state.variance, added, filled
        )
        return filled[:, 0], filled[:, 1], filled[:, 2]

    def solve(
        self,
        criterion: Literal["quadratic", "cvar"],
        alpha: float = 0.05,
        *,
        n_holdings: int = 61,
        n_wealth: int = 601,
        worst: float | None = None,
    ) -> HedgingSolution:
        """Return the best hedge on a trinomial tree, by dynamic programming (``hedging_optimum.py``).

        The process must be ``GeometricBrownianMotion(shocks="trinomial")``, and the options without barriers and with one
        expiry. Time and storage grow with the square of the dates: up to ten take seconds.

        :param criterion: ``quadratic`` minimises E[W^2] of the final profit and loss W, ``cvar`` its CVaR.
        :param alpha: level of the CVaR.
        :param n_holdings: points of the grid of holdings, from 0 to the limit on the side of the hedge.
        :param n_wealth: points of the grid of the running profit and loss.
        :param worst: the largest loss and gain that are looked at first; the grid is then narrowed to those that occur. None
            takes what the options without a hedge lose in a move of three standard deviations, and more for costs and for a
            premium that is not fair.
        """
        require(criterion in ("quadratic", "cvar"), "criterion", criterion, "quadratic or cvar")
        require(0.0 < alpha <= 1.0, "alpha", alpha, "above 0 and at most 1")
        spots = self._tree_prices()
        discounts = np.exp(-self.rate * self.maturity / self.dates * np.arange(self.dates + 1))
        sides = [-leg.quantity if leg.kind == "call" else leg.quantity for leg in self.book]
        worst = self._profit_scale() if worst is None else worst
        require(0.0 < worst < np.inf, "worst", worst, "positive and finite")
        require(n_holdings % 2 == 1, "n_holdings", n_holdings, "odd, so that holding nothing is on the grid")
        tree = HedgingTree(
            spots=spots,
            marks=self._tree_marks(spots, discounts),
            discounts=discounts,
            holdings=np.linspace(-self.limit * (min(sides) < 0.0), self.limit * (max(sides) > 0.0), n_holdings),
            wealth=np.linspace(-worst, worst, n_wealth),
            costs=np.array([self.cost, self.fixed_cost]),
            final_cost=self.final_cost,
        )
        return solve_tree(tree, criterion, alpha)

    def _profit_scale(self) -> float:
        """Return a profit or loss that a sensible hedge hardly exceeds: the premium alone says little about an option far out
        of the money, and is mostly intrinsic value for one in the money."""
        spread = self._process[kernel.VOLATILITY] * np.sqrt(self.maturity)
        units = sum(abs(leg.quantity) for leg in self.book)
        trades = units * self.spot * (WIDEST_MOVE * spread + 2.0 * self.cost) + self.dates * self.fixed_cost
        return float(trades + abs(self.premium - self._fair_premium()))

    def _tree_prices(self) -> tuple[Floats, ...]:
        """Return the prices of the trinomial tree at each date, rising."""
        process = self.process
        on_a_tree = isinstance(process, GeometricBrownianMotion) and process.shocks == "trinomial"
        require(on_a_tree, "process", process, "GeometricBrownianMotion(shocks='trinomial')")
        spread = self._process[kernel.VOLATILITY] * np.sqrt(self._terms[kernel.STEP])
        outer = spread * kernel.GAUSS_HERMITE
        growth = self._process[kernel.DRIFT] * self._terms[kernel.STEP] - np.log((2.0 + np.cosh(outer)) / 3.0)
        return tuple(self.spot * np.exp(growth * t + outer * np.arange(-t, t + 1)) for t in range(self.dates + 1))

    def _tree_marks(self, spots: Sequence[Floats], discounts: Floats) -> tuple[Floats, ...]:
        """Return the discounted value of the book at the nodes of each date, as the environment marks it."""
        legs = self._legs
        simple = bool((legs[:, kernel.EXPIRY] == self.dates).all() and (legs[:, kernel.SIDE] == 0.0).all())
        require(simple, "book", self.book, "options without barriers that expire at the last date: a tree has no past")
        marks = [np.array([self.premium])]
        for t in range(1, self.dates):
            state = self._state_at(t, spots[t], np.ones((len(spots[t]), len(legs)), np.bool_))
            marks.append(discounts[t] * self.greeks(state)[0])
        payoffs = np.maximum(legs[:, kernel.SIGN] * (spots[-1][:, None] - legs[:, kernel.STRIKE]), 0.0)
        return (*marks, discounts[-1] * payoffs @ legs[:, kernel.QUANTITY])

    def _state_at(self, date: int, spots: Floats, alive: NDArray[np.bool_]) -> HedgingState:
        """Return a state without a holding, at the first variance, whose greeks are not computed."""
        unknown = np.zeros(len(spots))
        variance = np.full(len(spots), self._start[1])
        return HedgingState(np.full(len(spots), date), spots, variance, unknown, unknown, unknown, unknown, alive)

    def _actions_of_a_copy(self) -> Box:
        return Box(-1.0, 1.0, (1,))

    def _observations_of_a_copy(self) -> Box:
        low, high = [0.0, -1.0, -FARTHEST, -FARTHEST], [1.0, 1.0, FARTHEST, FARTHEST]
        if isinstance(self.process, Heston):
            low, high = [*low, 0.0], [*high, FARTHEST]
        for leg in self.book:
            low, high = [*low, -FARTHEST], [*high, FARTHEST]
            if leg.knock_out is not None:
                low, high = [*low, 0.0], [*high, 1.0]
        return Box(np.array(low, np.float32), np.array(high, np.float32))

    def _targets(self, actions: Floats) -> Floats:
        """Return the units to hold ``[B]``."""
        return self.limit * actions[:, 0]

    def _fair_premium(self) -> float:
        value = 0.0
        step = self.maturity / self.dates
        for k, leg in enumerate(self.book):
            expiry = int(self._legs[k, kernel.EXPIRY])
            if leg.knock_out is not None:
                flat = float(self._process[kernel.VOLATILITY])
                sigma = self.process.mean_volatility(expiry * step) if isinstance(self.process, Heston) else flat
                terms: dict[str, Any] = {"step": step, "dates": expiry, "volatility": sigma, "rate": self.rate}
                value += leg.quantity * knock_out_price(leg.kind, self.spot, leg.strike, leg.knock_out, **terms)
            elif isinstance(self.process, Heston):
                value += leg.quantity * heston_price(leg.kind, self.spot, leg.strike, expiry * step, self.process, self.rate)
            else:
                only = np.arange(len(self.book)) == k
                value += float(self.greeks(self._state_at(0, np.array([self.spot]), only[None]))[0][0])
        return value

    def _begin(self, rows: NDArray[np.bool_]) -> None:
        self.finished_costs = np.where(rows, self._accounts[:, kernel.COST], self.finished_costs)
        self.finished_turnover = np.where(rows, self._accounts[:, kernel.TURNOVER], self.finished_turnover)
        cursors = np.zeros(self.num_envs, np.int64)
        if len(self._returns):
            cursors[rows] = (self._uniforms_of(rows, 1)[:, 0] * len(self._returns)).astype(np.int64)
        fixed = (self._legs, self._process, self._terms, self._start)
        kernel.begin(rows, *fixed, cursors, self._accounts, self._clocks, self._alive)

    def _observe(self) -> NDArray[np.float32]:
        shape = self.single_observation_space.shape
        assert shape is not None
        observations = np.empty((self.num_envs, *shape), np.float32)
        fixed = (self._legs, self._process, self._terms, self._start, self.limit)
        kernel.observe(*fixed, self._accounts, self._clocks, self._alive, FARTHEST, observations)
        return observations

    def _advance(self, actions: Floats) -> StepOutcome:
        rewards, ended, uniforms = np.empty(self.num_envs), np.empty(self.num_envs, np.bool_), np.empty((self.num_envs, 3))
        fill_uniforms(self._streams, uniforms)
        fixed = (self._legs, self._process, self._terms, self._returns)
        kernel.advance(self._targets(actions), *fixed, uniforms, self._accounts, self._clocks, self._alive, rewards, ended)
        return rewards, ended, np.zeros(self.num_envs, np.bool_)


class BandHedging(OptionHedging):
    """Hedging in which the action is a no-trade band around the Black-Scholes delta.

    With proportional costs the best hedge lets the holding drift inside a band and trades to the nearest edge outside of it
    (Davis, Panas and Zariphopoulou 1993). Here the action, in [-1, 1]^2, is that band: its edges are

        hedge + reach f(action[0])    and    hedge + reach f(action[1]),    f(a) = sinh(k a) / sinh(k),

    in units of `limit`, around the holding of a delta hedger; a lower edge above the upper one makes both their middle. Equal
    edges are a target, so every hedge can be expressed. An agent begins near the delta hedge, and its exploration costs
    little, because a small change of an edge that is not reached trades nothing.

    For a book at the money f(a) = a. Where the delta is expected to change by less, far out of or in the money, small actions
    mean smaller steps: the slope of f at 0 is the sum of |quantity| exp(-d^2 / 2) over the legs, divided by `limit` and at most
    1, with d the distance of the strike from the forward price in standard deviations until the expiry.

    :param num_envs: the number of copies.
    :param reach: largest distance of an edge from the delta, as a share of `limit`.
    :param settings: parameters of :class:`OptionHedging`.
    """

    def __init__(self, num_envs: int = 1, *, reach: float = 1.0, **settings: Any) -> None:
        """Check the parameters, which the class explains."""
        require(0.0 < reach < np.inf, "reach", reach, "positive and finite")
        self.reach = reach
        super().__init__(num_envs, **settings)
        self._stretch = _stretch(min(max(self._delta_scale(), FINEST), 1.0))

    def action(self, edges: ArrayLike) -> Floats:
        """Return the actions of bands, the inverse of what a step does.

        :param edges: ``[B, 2]``, lower and upper edge less the holding of a delta hedger, in units; clipped to the reach.
        """
        shares = np.clip(np.asarray(edges, np.float64) / (self.reach * self.limit), -1.0, 1.0)
        return np.arcsinh(shares * math.sinh(self._stretch)) / self._stretch if self._stretch else shares

    def _delta_scale(self) -> float:
        """Return how much the delta is expected to change until the expiry, as a share of the limit; at the money 1."""
        step, total = self.maturity / self.dates, 0.0
        for leg, row in zip(self.book, self._legs, strict=True):
            years = step * float(row[kernel.EXPIRY])
            flat = float(self._process[kernel.VOLATILITY])
            sigma = self.process.mean_volatility(years) if isinstance(self.process, Heston) else flat
            distance = (math.log(self.spot / leg.strike) + self.rate * years) / (sigma * math.sqrt(years))
            total += abs(leg.quantity) * math.exp(-0.5 * distance**2)
        return total / self.limit

    def _actions_of_a_copy(self) -> Box:
        return Box(-1.0, 1.0, (2,))

    def _targets(self, actions: Floats) -> Floats:
        lower, upper = np.sinh(self._stretch * actions.T) / math.sinh(self._stretch) if self._stretch else actions.T
        crossed = lower > upper
        if crossed.any():
            middle = 0.5 * (lower + upper)
            lower, upper = np.where(crossed, middle, lower), np.where(crossed, middle, upper)
        hedge, units = self._accounts[:, kernel.HEDGE], self.reach * self.limit
        held = self._accounts[:, kernel.HOLDING]
        target = np.minimum(np.maximum(held, hedge + units * lower), hedge + units * upper)
        return np.asarray(np.minimum(np.maximum(target, -self.limit), self.limit))


def _stretch(slope: float) -> float:
    """Return the k of sinh(k a) / sinh(k) with a slope in (0, 1] at 0; 0 is a straight line."""
    if slope > 1.0 - STRAIGHT:
        return 0.0
    return float(brentq(lambda k: k / math.sinh(k) - slope, 1e-3, 20.0))


def single_option_hedging(**settings: Any) -> gym.Env[Any, Any]:
    """Return one hedging environment, registered as ``tailguard/OptionHedging-v0``.

    :param settings: parameters of :class:`OptionHedging`.
    """
    return SingleEnv(OptionHedging(1, **settings))


def single_band_hedging(**settings: Any) -> gym.Env[Any, Any]:
    """Return one hedging environment whose action is a band, registered as ``tailguard/BandHedging-v0``.

    :param settings: parameters of :class:`BandHedging`.
    """
    return SingleEnv(BandHedging(1, **settings))


def _leg_row(leg: Option, spot: float, dates: int) -> list[float]:
    """Return a leg as a row for the kernel."""
    expiry = dates if leg.expiry is None else leg.expiry
    require(1 <= expiry <= dates, "expiry", leg.expiry, f"a date from 1 to {dates}")
    level, side = 0.0, 0.0
    if leg.knock_out is not None:
        require(0.0 < leg.knock_out < np.inf, "knock_out", leg.knock_out, "positive and finite")
        require(leg.knock_out != spot, "knock_out", leg.knock_out, f"not the spot {spot}: the option would be void at once")
        level, side = leg.knock_out, 1.0 if leg.knock_out < spot else -1.0
    return [1.0 if leg.kind == "call" else -1.0, leg.quantity, leg.strike, float(expiry), level, side]


def _process_row(process: Process, rate: float, step: float) -> tuple[Floats, Floats]:
    """Return a process as a row for the kernel, and the returns that it draws from."""
    row, returns = np.zeros(kernel.PROCESS_FIELDS), np.empty(0)
    row[kernel.DRIFT] = rate if process.drift is None else process.drift
    if isinstance(process, GeometricBrownianMotion):
        row[kernel.KIND] = kernel.TRINOMIAL_SHOCKS if process.shocks == "trinomial" else kernel.NORMAL_SHOCKS
        row[kernel.VOLATILITY] = process.volatility
    elif isinstance(process, Heston):
        row[kernel.KIND] = kernel.HESTON
        row[kernel.LONG_RUN], row[kernel.REVERSION] = process.long_run_variance, process.mean_reversion
        row[kernel.VOL_OF_VARIANCE], row[kernel.CORRELATION] = process.vol_of_variance, process.correlation
    else:
        row[kernel.KIND], row[kernel.BLOCK] = kernel.BOOTSTRAP, process.mean_block
        observed = np.asarray(process.returns, np.float64)
        row[kernel.VOLATILITY] = observed.std() / np.sqrt(step) if process.volatility is None else process.volatility
        # Shifted so that a price grows by the drift on average.
        returns = observed - np.log(np.exp(observed).mean()) + row[kernel.DRIFT] * step
    return row, returns
