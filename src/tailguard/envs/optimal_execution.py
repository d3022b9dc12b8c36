"""Selling a large order step by step: the market of Almgren and Chriss (2000), whose best schedule is known in closed form.

Everything is measured in shares of the order and in basis points (bps) of the price at which the decision was made. The order
is sold in N steps of length tau. In step k the trade n_k leaves x_{k+1} = x_k - n_k of the order and is paid

    S_k - half_spread - temporary_impact n_k / (tau v_k),    S_{k+1} = S_k - permanent_impact n_k + volatility sqrt(tau) xi_k,

with the relative volume v_k of the step and normal xi_k. Temporary impact is paid for haste, permanent impact moves the price
for everybody, and what is not sold yet carries the risk of the price. The cost of the order (implementation shortfall) is what
was received less than the first price. For a schedule that is fixed beforehand it is normal, with

    mean      sum_k  half_spread n_k + temporary_impact n_k^2 / (tau v_k) + permanent_impact n_k x_{k+1}
    variance  volatility^2 tau sum_k x_{k+1}^2.

The least mean + risk_aversion variance is reached, for even volume, by

    x_j / x_0 = sinh(kappa (T - t_j)) / sinh(kappa T),    cosh(kappa tau) = 1 + risk_aversion volatility^2 tau^2 / (2 eta),

where T = N tau and eta = temporary_impact - permanent_impact tau / 2. Without risk aversion it is even selling (TWAP).

In the market with a signal, a Markov chain of regimes that the trader sees multiplies the temporary impact (liquidity) and
gives the price a drift. Then no fixed schedule is best: the best policy is a dynamic program over step, shares left and regime.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import ArrayLike, NDArray

from tailguard.envs.batched import StepOutcome
from tailguard.envs.single import SingleEnv
from tailguard.envs.streams import StreamedEnv
from tailguard.jit import decorators
from tailguard.validation import require

Floats = NDArray[np.float64]

compiled, inlined = decorators()

RELATIVE_GRID = 65  # risk aversions at which costs are known exactly
WORST_BEGINNER = 0.1  # of the cost of TWAP, which rewards are relative to at least
TINY = np.finfo(np.float64).tiny
ROUNDING = 1e-9  # how far the sum of shares or of probabilities may be from 1


@dataclass(frozen=True)
class Schedule:
    """Trades that are fixed beforehand, with the exact mean and risk of their cost.

    :param trades: ``[N]``, the share of the order that each step sells; they add up to 1.
    :param expected_cost: bps.
    :param variance: of the cost by the moves of the price, bps squared; of the whole cost where there is one regime.
    """

    trades: Floats
    expected_cost: float
    variance: float

    def objective(self, risk_aversion: float) -> float:
        """Return expected cost + risk_aversion variance, in bps.

        :param risk_aversion: per bps.
        """
        return self.expected_cost + risk_aversion * self.variance


@dataclass(frozen=True)
class ExecutionSolution:
    """The best policy, on a grid of shares left.

    :param risk_aversion: per bps.
    :param objective: the least E[cost + risk_aversion volatility^2 tau sum x^2], in bps.
    :param left_after: ``[N, M, points]``, the best share left after the step, for each step, regime and share left before it
        (an even grid from 0 to 1).
    """

    risk_aversion: float
    objective: float
    left_after: Floats

    def trade(self, left: ArrayLike, played: ArrayLike, regime: ArrayLike = 0) -> Floats:
        """Return the best trade, as a share of the order.

        :param left: the share of the order that is left; the nearest point of the grid is taken.
        :param played: the number of steps played.
        :param regime: the present regime.
        """
        left = np.asarray(left, np.float64)
        points = self.left_after.shape[2] - 1
        nearest = np.rint(left * points).astype(np.int64)
        trade = nearest / points - self.left_after[np.asarray(played), np.asarray(regime), nearest]
        legal: Floats = np.clip(trade, 0.0, left)
        return legal


class OptimalExecution(StreamedEnv):
    """The sale of an order as an environment: N steps, or fewer if the order is sold before.

    The action a in [-1, 1] says how fast to sell. With m steps left, h = 1 / m of what is left is the even pace: -1 waits, 0
    sells the share h, 1 sells everything; between them the share is h (1 + a) below 0, and h^(1 - a) above. The last step
    sells all that is left.

    The reward of a step is, in bps of the whole order, what the account gains when the unsold part is valued at the mid price,
    less the price of risk:

        - n_k (half_spread + impact_k n_k) + x_{k+1} (S_{k+1} - S_k) - risk_aversion volatility^2 tau x_{k+1}^2.

    The rewards of an episode with risk_aversion 0 add up to minus the cost of the order. In general their mean is minus
    E[cost + risk_aversion volatility^2 tau sum x^2], for fixed schedules minus (mean + risk_aversion variance).

    The observation is (share left, steps left / N); then, where `risk_aversion` is a range, its logarithm scaled to [-1, 1];
    then, where there are several regimes, one indicator for each. Buying is the same with the sign of the price reversed.

    :param num_envs: the number of copies.
    :param steps: N, the number of times at which one can sell.
    :param horizon: T, in days.
    :param volatility: of the price, bps per square root of a day.
    :param temporary_impact: bps that the whole order would pay if it were sold evenly in one day.
    :param permanent_impact: bps by which the sale of the whole order lowers the price for good.
    :param half_spread: bps that every share pays.
    :param risk_aversion: price of risk in the reward, per bps: 0 is the mean cost. With a pair (low, high) each episode draws
        its own, evenly in the logarithm, so that one agent learns the whole frontier.
    :param volume_profile: relative volume of each step, ``[N]``, positive; ``None`` is even. Scaled to a mean of 1.
    :param transition: ``[M, M]``, probabilities from each regime (row) to each regime; ``None`` is one regime. Episodes
        begin in its stationary distribution.
    :param impact_factors: ``[M]``, multiples of the temporary impact; ``None`` are ones.
    :param drifts: ``[M]``, drift of the price, bps per day; ``None`` are zeros.
    :param expected_rewards: pay the mean over the random move of the price instead of the move. Every policy has the same mean
        reward as before, with a small part of the noise, so an agent for the mean learns from far fewer steps. The rewards then
        no longer add up to the cost of the order, so it is not for tails.
    :param relative_rewards: divide the rewards of an episode by what Almgren and Chriss pay at its risk aversion (by a tenth of
        what TWAP pays, if that is more), so that an agent for a range of them takes one percent as seriously where an order
        costs 30 bps as where it costs 3000.
    :param seed: random seed of the first copy; the others count on from it.
    """

    state_arrays = (*StreamedEnv.state_arrays, "_left", "_played", "_regime", "_aversion")

    def __init__(
        self,
        num_envs: int = 1,
        *,
        steps: int = 20,
        horizon: float = 1.0,
        volatility: float = 100.0,
        temporary_impact: float = 20.0,
        permanent_impact: float = 10.0,
        half_spread: float = 1.0,
        risk_aversion: float | tuple[float, float] = 0.01,
        volume_profile: ArrayLike | None = None,
        transition: ArrayLike | None = None,
        impact_factors: ArrayLike | None = None,
        drifts: ArrayLike | None = None,
        expected_rewards: bool = False,
        relative_rewards: bool = False,
        seed: int | None = None,
    ) -> None:
        """Check the parameters, which the class explains."""
        require(steps >= 1, "steps", steps, "at least 1")
        require(0.0 < horizon < math.inf, "horizon", horizon, "positive and finite")
        require(0.0 <= volatility < math.inf, "volatility", volatility, "finite and not negative")
        require(0.0 < temporary_impact < math.inf, "temporary_impact", temporary_impact, "positive and finite")
        require(0.0 <= permanent_impact < math.inf, "permanent_impact", permanent_impact, "finite and not negative")
        require(0.0 <= half_spread < math.inf, "half_spread", half_spread, "finite and not negative")
        self.steps, self.horizon, self.tau = steps, horizon, horizon / steps
        self.volatility, self.temporary_impact = volatility, temporary_impact
        self.permanent_impact, self.half_spread = permanent_impact, half_spread
        self.expected_rewards, self.relative_rewards = expected_rewards, relative_rewards
        self.aversion_range = _aversion_range(risk_aversion)
        self.volume_profile = _volumes(volume_profile, steps)
        self.transition = _transition(transition)
        self.regimes = len(self.transition)
        self.stationary = _stationary(self.transition)
        self.impact_factors = _by_regime("impact_factors", impact_factors, self.regimes, 1.0)
        require(bool((self.impact_factors > 0.0).all()), "impact_factors", impact_factors, "positive")
        self.drifts = _by_regime("drifts", drifts, self.regimes, 0.0)
        # Cost of a trade n: impact n^2, by step and regime, [N, M].
        self.impact = temporary_impact / self.tau * self.impact_factors / self.volume_profile[:, None]

        super().__init__(num_envs, self._observation_box(), Box(-1.0, 1.0, (1,)), seed)
        self._left = np.ones(num_envs)
        self._played = np.zeros(num_envs, dtype=np.int64)
        self._regime = np.zeros(num_envs, dtype=np.int64)
        self._aversion = np.full(num_envs, self.aversion_range[0])
        self._usual: tuple[Floats, Floats] | None = None  # logarithms of risk aversions and of what they cost
        self._noise = volatility * math.sqrt(self.tau)  # of the price in one step
        self._market: tuple[Floats, Floats, Floats, float, float, float] = (
            self.impact, self.drifts * self.tau, np.cumsum(self.transition, axis=1),
            half_spread, permanent_impact, self._noise**2,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ optima and rivals

    def schedule(self, trades: ArrayLike) -> Schedule:
        """Return the exact mean and risk of trades that are fixed beforehand.

        :param trades: ``[N]``, shares of the order, not negative, which add up to 1.
        """
        trades = np.asarray(trades, np.float64)
        whole = trades.shape == (self.steps,) and (trades >= 0.0).all() and abs(trades.sum() - 1.0) < ROUNDING
        require(bool(whole), "trades", trades, f"{self.steps} shares of the order, which add up to 1")
        left = 1.0 - np.cumsum(trades)
        haste = self.half_spread * trades + self.impact @ self.stationary * trades**2
        drift = float(self.drifts @ self.stationary) * self.tau
        mean = haste + self.permanent_impact * trades * left - drift * left
        return Schedule(trades, float(mean.sum()), float(self.volatility**2 * self.tau * (left**2).sum()))

    def twap(self) -> Schedule:
        """Return the schedule that sells the same in every step."""
        return self.schedule(np.full(self.steps, 1.0 / self.steps))

    def vwap(self) -> Schedule:
        """Return the schedule that sells in proportion to the volume."""
        return self.schedule(self.volume_profile / self.steps)

    def almgren_chriss(self, risk_aversion: float) -> Schedule:
        """Return the schedule of Almgren and Chriss: the best one for even volume and one regime, in closed form.

        In other markets it is what a trader does who knows their averages only.

        :param risk_aversion: per bps, not negative.
        """
        require(0.0 <= risk_aversion < math.inf, "risk_aversion", risk_aversion, "finite and not negative")
        tau, eta = self.tau, self.haste_cost
        least = self.permanent_impact * tau / 2.0
        legal = f"above permanent_impact tau / 2 = {least:.6g} on average, or it pays to sell at once"
        require(eta > 0.0, "temporary_impact", eta + least, legal)
        kappa = math.acosh(1.0 + risk_aversion * (self.volatility * tau) ** 2 / (2.0 * eta)) / tau
        time_left = self.horizon - tau * np.arange(self.steps + 1)
        if kappa * self.horizon < ROUNDING:
            return self.twap()
        # sinh a / sinh b = e^(a - b) (1 - e^(-2 a)) / (1 - e^(-2 b)), which does not overflow.
        decay = np.exp(kappa * (time_left - self.horizon))
        left = decay * np.expm1(-2.0 * kappa * time_left) / math.expm1(-2.0 * kappa * self.horizon)
        left[-1] = 0.0
        return self.schedule(-np.diff(left))

    @property
    def haste_cost(self) -> float:
        """The eta of the closed form: average temporary impact less what haste saves of the permanent one."""
        return self.temporary_impact * float(self.impact_factors @ self.stationary) - self.permanent_impact * self.tau / 2.0

    def frontier(self, risk_aversions: Sequence[float]) -> list[Schedule]:
        """Return the schedules of Almgren and Chriss for several risk aversions: the efficient frontier of cost and risk.

        :param risk_aversions: per bps, not negative.
        """
        return [self.almgren_chriss(risk_aversion) for risk_aversion in risk_aversions]

    def solve(self, risk_aversion: float | None = None, points: int = 1000) -> ExecutionSolution:
        """Return the best policy, by a dynamic program over step, shares left and regime.

        :param risk_aversion: per bps; ``None`` takes the environment's own.
        :param points: the shares left are multiples of 1 / points. The objective is then at most about N impact / points^2 too
            high; time grows with its square.
        """
        low, high = self.aversion_range
        require(risk_aversion is not None or low == high, "risk_aversion", risk_aversion, f"a number from {low} to {high}")
        aversion = low if risk_aversion is None else risk_aversion
        require(0.0 <= aversion < math.inf, "risk_aversion", aversion, "finite and not negative")
        require(points >= self.steps, "points", points, f"at least steps, which is {self.steps}")
        impact, drift, _, half_spread, permanent, variance = self._market
        values, best = plan(impact, drift, self.transition, half_spread, permanent, aversion * variance, points)
        return ExecutionSolution(aversion, -float(self.stationary @ values), best / points)

    def action(self, share: ArrayLike, played: ArrayLike) -> Floats:
        """Return the action that sells a share of what is left, the inverse of what a step does.

        :param share: of what is left, in [0, 1].
        :param played: the number of steps played, below N.
        """
        share, even = np.asarray(share, np.float64), 1.0 / (self.steps - np.asarray(played))
        legal = bool(((share >= 0.0) & (share <= 1.0)).all())
        require(legal, "share", share, "between 0 and 1")
        last = even == 1.0
        logs = np.log(np.maximum(share, np.finfo(np.float64).tiny)) / np.log(np.where(last, 0.5, even))
        return np.where(last, 0.0, np.where(share <= even, share / even - 1.0, 1.0 - logs))

    def share(self, actions: ArrayLike, played: int) -> Floats:
        """Return the share of what is left that actions sell, the inverse of :meth:`action`.

        :param actions: of the box, and clipped to it.
        :param played: the number of steps played, below N.
        """
        clipped, even = np.clip(np.asarray(actions, np.float64), -1.0, 1.0), 1.0 / (self.steps - played)
        if even == 1.0:
            return np.ones_like(clipped)
        return np.where(clipped < 0.0, even * (1.0 + clipped), even ** (1.0 - clipped))

    # ------------------------------------------------------------------------------------------------------ environment

    @property
    def left(self) -> Floats:
        """The share of the order that is left, of every copy."""
        return self._left.copy()

    @property
    def regime(self) -> NDArray[np.int64]:
        """The present regime of every copy."""
        return self._regime.copy()

    @property
    def risk_aversion(self) -> Floats:
        """The risk aversion of the present episode, of every copy."""
        return self._aversion.copy()

    def _usual_costs(self, aversions: Floats) -> Floats:
        """Return what Almgren and Chriss pay at each risk aversion, in bps of the objective, or a tenth of what TWAP pays.

        The tenth is for risk aversions at which a beginner pays a hundred times as much, and nobody else would be heard.
        """
        if self._usual is None:
            grid = np.geomspace(*self.aversion_range, RELATIVE_GRID) if self.aversion_range[0] > 0.0 else np.zeros(1)
            even = np.array([self._without_drift(self.twap(), float(aversion)) for aversion in grid])
            costs = WORST_BEGINNER * even
            if self.haste_cost > 0.0:
                best = [self._without_drift(self.almgren_chriss(float(aversion)), float(aversion)) for aversion in grid]
                costs = np.maximum(best, costs)
            self._usual = np.log(np.maximum(grid, TINY)), np.log(costs if (costs > 0.0).all() else np.ones(len(costs)))
        usual: Floats = np.exp(np.interp(np.log(np.maximum(aversions, TINY)), *self._usual))
        return usual

    def _without_drift(self, schedule: Schedule, aversion: float) -> float:
        drift = float(self.drifts @ self.stationary) * self.tau
        return schedule.objective(aversion) + drift * float((1.0 - np.cumsum(schedule.trades)).sum())

    def _observation_box(self) -> Box:
        several_aversions = self.aversion_range[0] < self.aversion_range[1]
        low = [0.0, 0.0, *([-1.0] if several_aversions else []), *([0.0] * self.regimes if self.regimes > 1 else [])]
        return Box(np.array(low, np.float32), np.ones(len(low), np.float32))

    def _begin(self, rows: NDArray[np.bool_]) -> None:
        draws = self._uniforms_of(rows, 2)
        low, high = self.aversion_range
        self._left[rows] = 1.0
        self._played[rows] = 0
        self._regime[rows] = np.minimum(np.searchsorted(np.cumsum(self.stationary), draws[:, 0]), self.regimes - 1)
        self._aversion[rows] = low if low == high else low * (high / low) ** draws[:, 1]

    def _observe(self) -> NDArray[np.float32]:
        low, high = self.aversion_range
        columns = 2 + int(low < high) + (self.regimes if self.regimes > 1 else 0)
        obs = np.empty((self.num_envs, columns), np.float32)
        show_orders(self.steps, low, high, self._left, self._played, self._regime, self._aversion, obs)
        return obs

    def _advance(self, actions: Floats) -> StepOutcome:
        normals, uniforms = self._draws(1)
        return self._trade(actions, self._noise * normals, np.ones(self.num_envs), uniforms[:, 0])

    def _trade(self, actions: Floats, moves: Floats, volumes: Floats, uniforms: Floats) -> StepOutcome:
        """Take one step, given random moves of the price, relative volumes and draws of the next regimes, ``[B]`` each."""
        rewards, terminated = np.empty(self.num_envs), np.empty(self.num_envs, np.bool_)
        if self.expected_rewards:
            moves = np.zeros(self.num_envs)
        state = (self._left, self._played, self._regime, self._aversion)
        step_orders(actions[:, 0], moves, volumes, uniforms, *self._market, *state, rewards, terminated)
        if self.relative_rewards:
            rewards /= self._usual_costs(self._aversion)
        return rewards, terminated, np.zeros(self.num_envs, np.bool_)


def single_order(**settings: Any) -> SingleEnv:
    """Return the sale of one order as a Gymnasium environment.

    :param settings: parameters of :class:`OptimalExecution`.
    """
    return SingleEnv(OptimalExecution(1, **settings))


def _aversion_range(risk_aversion: float | tuple[float, float]) -> tuple[float, float]:
    """Return the least and the largest risk aversion."""
    if isinstance(risk_aversion, int | float):
        require(0.0 <= risk_aversion < math.inf, "risk_aversion", risk_aversion, "finite and not negative, or a pair")
        return risk_aversion, risk_aversion
    low, high = risk_aversion
    require(0.0 < low < high < math.inf, "risk_aversion", risk_aversion, "a pair (low, high) with 0 < low < high")
    return low, high


def _volumes(profile: ArrayLike | None, steps: int) -> Floats:
    volumes = np.ones(steps) if profile is None else np.asarray(profile, np.float64)
    legal = volumes.shape == (steps,) and bool((volumes > 0.0).all() and np.isfinite(volumes).all())
    require(legal, "volume_profile", profile, f"{steps} positive numbers")
    scaled: Floats = volumes / volumes.mean()
    return scaled


def _transition(transition: ArrayLike | None) -> Floats:
    matrix = np.ones((1, 1)) if transition is None else np.asarray(transition, np.float64)
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] >= 1
    legal = square and bool((matrix >= 0.0).all() and (np.abs(matrix.sum(axis=1) - 1.0) < ROUNDING).all())
    require(legal, "transition", transition, "a square matrix of probabilities whose rows add up to 1")
    return matrix


def _stationary(transition: Floats) -> Floats:
    """Return p with p = p transition and sum p = 1, by least squares."""
    size = len(transition)
    system = np.vstack((transition.T - np.eye(size), np.ones(size)))
    probabilities: Floats = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0))[0]
    return np.clip(probabilities, 0.0, 1.0)


def _by_regime(name: str, values: ArrayLike | None, regimes: int, default: float) -> Floats:
    array = np.full(regimes, default) if values is None else np.asarray(values, np.float64)
    legal = array.shape == (regimes,) and bool(np.isfinite(array).all())
    require(legal, name, values, f"one finite number for each of {regimes} regimes")
    return array


@compiled
def show_orders(
    steps: int,
    low: float,
    high: float,
    left: Floats,
    played: NDArray[np.int64],
    regime: NDArray[np.int64],
    aversion: Floats,
    obs: NDArray[np.float32],
) -> None:
    """Fill `obs` ``[B, D]`` with the observations of B orders."""
    for copy in range(len(left)):
        obs[copy, 0], obs[copy, 1] = left[copy], (steps - played[copy]) / steps
        column = 2
        if low < high:
            obs[copy, 2] = min(max(2.0 * math.log(aversion[copy] / low) / math.log(high / low) - 1.0, -1.0), 1.0)
            column = 3
        if obs.shape[1] > column:
            obs[copy, column:] = 0.0
            obs[copy, column + regime[copy]] = 1.0


@compiled
def step_orders(
    actions: Floats,
    moves: Floats,
    volumes: Floats,
    uniforms: Floats,
    impact: Floats,
    drift: Floats,
    cumulative: Floats,
    half_spread: float,
    permanent_impact: float,
    variance: float,
    left: Floats,
    played: NDArray[np.int64],
    regime: NDArray[np.int64],
    aversion: Floats,
    rewards: Floats,
    terminated: NDArray[np.bool_],
) -> None:
    """Take one step with B orders.

    :param actions: ``[B]`` in [-1, 1].
    :param moves: ``[B]``, the random moves of the price.
    :param volumes: ``[B]``, relative volumes that divide the impact, besides that of the step.
    :param uniforms: ``[B]``, which draw the next regimes.
    :param impact: ``[N, M]``, cost of a trade over its square.
    :param drift: ``[M]``, of the price in one step.
    :param cumulative: ``[M, M]``, cumulative sums of the transition's rows.
    :param variance: of the price in one step.
    """
    steps, regimes = impact.shape
    for copy in range(len(actions)):
        now, even = regime[copy], 1.0 / (steps - played[copy])
        action = actions[copy]
        share = even * (1.0 + action) if action < 0.0 else even ** (1.0 - action)
        trade = left[copy] if even == 1.0 else left[copy] * share
        after = left[copy] - trade
        price_move = drift[now] - permanent_impact * trade + moves[copy]
        paid = trade * (half_spread + impact[played[copy], now] / volumes[copy] * trade)
        rewards[copy] = after * price_move - paid - aversion[copy] * variance * after * after
        left[copy] = after
        played[copy] += 1
        regime[copy] = 0
        while regime[copy] < regimes - 1 and uniforms[copy] > cumulative[now, regime[copy]]:
            regime[copy] += 1
        terminated[copy] = played[copy] == steps or after == 0.0


@compiled
def plan(
    impact: Floats,
    drift: Floats,
    transition: Floats,
    half_spread: float,
    permanent_impact: float,
    price_of_risk: float,
    points: int,
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the values of a whole order by regime, ``[M]``, and the best points left after each step, ``[N, M, points + 1]``.

    :param price_of_risk: risk aversion times the variance of the price in one step.
    """
    steps, regimes = impact.shape
    best = np.zeros((steps, regimes, points + 1), np.int64)
    value, following = np.zeros((regimes, points + 1)), np.zeros((regimes, points + 1))
    for step in range(steps - 1, -1, -1):
        for now in range(regimes):
            # What is left after the step is worth this, but for the permanent impact of the trade.
            kept = np.zeros(points + 1)
            for after in range(points + 1):
                x = after / points
                kept[after] = x * drift[now] - price_of_risk * x * x
                for then in range(regimes):
                    kept[after] += transition[now, then] * following[then, after]
            for before in range(points + 1):
                highest = -np.inf
                for after in range(before + 1 if step < steps - 1 else 1):
                    trade, x = (before - after) / points, after / points
                    worth = kept[after] - trade * (half_spread + impact[step, now] * trade + permanent_impact * x)
                    if worth > highest:
                        highest, best[step, now, before] = worth, after
                value[now, before] = highest
        following[:] = value
    return value[:, points].copy(), best
