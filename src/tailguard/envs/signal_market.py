"""A market with one signal and a cost of trading, with a known best average reward.

The signal is a Gaussian AR(1) with unit variance, x_{t+1} = phi x_t + sqrt(1 - phi^2) eps, and it moves the next
return, r_{t+1} = beta x_t + sigma eta. Moving from the position p to the position a, both in [-1, 1], earns

    a r_{t+1} - cost |a - p|.

The cost makes the previous position matter: a weak signal is worth trading only if it is expected to last.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import ArrayLike, NDArray

from tailguard.envs.batched import BatchedEnv, StepOutcome
from tailguard.validation import require

FARTHEST_THRESHOLD = 10.0  # standard deviations: a signal beyond it has probability 1e-23


@dataclass(frozen=True)
class SignalFilter:
    """The Kalman filter of a hidden signal from past returns, in its steady state.

    The belief m_t = E[x_t | r_t, r_{t-1}, ...] has an error of constant variance P and moves by

        m_{t+1} = phi m_t + gain (r_{t+1} - beta m_t),    gain = phi beta P / (beta^2 P + sigma^2).

    :param phi: the autocorrelation of the signal.
    :param beta: the return per unit of signal.
    :param sigma: the standard deviation of the return given the signal.
    """

    phi: float
    beta: float
    sigma: float

    @property
    def error_variance(self) -> float:
        """P, the positive root of P = 1 - phi^2 + phi^2 P sigma^2 / (beta^2 P + sigma^2)."""
        a = self.beta**2
        b = (1.0 - self.phi**2) * (self.sigma**2 - self.beta**2)
        c = (1.0 - self.phi**2) * self.sigma**2
        root = math.sqrt(b * b + 4.0 * a * c)
        # Two ways to write the same root of a P^2 + b P = c; each is used where it subtracts nothing.
        return 2.0 * c / (b + root) if b >= 0.0 else (root - b) / (2.0 * a)

    @property
    def gain(self) -> float:
        """The weight of an unexpected return."""
        variance = self.error_variance
        return self.phi * self.beta * variance / (self.beta**2 * variance + self.sigma**2)

    @property
    def belief_std(self) -> float:
        """The standard deviation of the belief: the signal's unit variance less the error's."""
        return math.sqrt(max(0.0, 1.0 - self.error_variance))

    def step(self, belief: ArrayLike, observed_return: ArrayLike) -> NDArray[np.float64]:
        """Return the next belief.

        :param belief: the belief before the return was seen; 0 at the start of an episode.
        :param observed_return: the return that was seen.
        """
        belief, observed_return = np.asarray(belief, np.float64), np.asarray(observed_return, np.float64)
        return self.phi * belief + self.gain * (observed_return - self.beta * belief)


@dataclass(frozen=True)
class SignalSolution:
    """The best way to trade the signal.

    :param average_reward: the best reachable long-run reward per step.
    :param threshold: trade to +1 above it and to -1 below its negative; infinite where trading never pays.
    """

    average_reward: float
    threshold: float

    def policy(self, signal: ArrayLike, position: ArrayLike) -> NDArray[np.float64]:
        """Return the best next position.

        :param signal: the signal, or the belief about it where it is hidden.
        :param position: the present position.
        """
        signal, position = np.asarray(signal, np.float64), np.asarray(position, np.float64)
        return np.where(np.abs(signal) > self.threshold, np.sign(signal), position)


class SignalMarket(BatchedEnv):
    """The market as an environment; episodes never terminate, they are cut after `episode_length` steps.

    The observation is (x_t, p), or (r_t, p) where the signal is hidden. An episode begins without a position and in
    the stationary distribution: the return r_0 shown at its start belongs to a signal one step before it.

    :param num_envs: the number of copies.
    :param phi: the autocorrelation of the signal.
    :param beta: the expected return per unit of signal.
    :param sigma: the standard deviation of the return given the signal.
    :param cost: the price of changing the position by 1.
    :param hidden: show the last return instead of the signal.
    :param episode_length: the number of steps of an episode.
    :param seed: random seed.
    """

    state_arrays = ("_signal", "_last_return", "_position", "_elapsed")

    def __init__(
        self,
        num_envs: int = 1,
        *,
        phi: float = 0.95,
        beta: float = 0.1,
        sigma: float = 1.0,
        cost: float = 0.15,
        hidden: bool = False,
        episode_length: int = 256,
        seed: int | None = None,
    ) -> None:
        """Check the parameters, which the class explains."""
        require(0.0 <= phi < 1.0, "phi", phi, "at least 0 and below 1")
        require(0.0 <= beta < math.inf, "beta", beta, "finite and not negative")
        require(0.0 < sigma < math.inf, "sigma", sigma, "finite and positive")
        require(0.0 <= cost < math.inf, "cost", cost, "finite and not negative")
        require(episode_length >= 1, "episode_length", episode_length, "at least 1")
        limits = np.array([np.inf, 1.0], dtype=np.float32)
        super().__init__(num_envs, Box(-limits, limits), Box(-1.0, 1.0, (1,)), seed)
        self.phi, self.beta, self.sigma, self.cost = phi, beta, sigma, cost
        self.hidden, self.episode_length = hidden, episode_length
        self._signal = np.zeros(num_envs)
        self._last_return = np.zeros(num_envs)
        self._position = np.zeros(num_envs)
        self._elapsed = np.zeros(num_envs, dtype=np.int64)

    @property
    def signal(self) -> NDArray[np.float64]:
        """The present signal of each copy, shown or hidden: for measuring agents, not for feeding them."""
        return self._signal.copy()

    @property
    def filter(self) -> SignalFilter:
        """The filter that turns the shown returns into the belief that the hidden policy needs."""
        return SignalFilter(self.phi, self.beta, self.sigma)

    def solve(self) -> SignalSolution:
        """Return the optimum: exact but for quadrature errors below 1e-9, where hidden in the filter's steady state.

        A hidden signal is replaced by the belief m_t. It is a sufficient statistic of the past returns, the next return is
        expected to be beta m_t, and it is an AR(1) with the same phi: a signal like the other, only smaller.
        """
        std = self.filter.belief_std if self.hidden else 1.0
        threshold, average_reward = _solve_unit_signal(self.phi, self.beta * std, self.cost)
        # A belief that never moves (std = 0) leaves the threshold infinite; infinity times zero would be no number.
        return SignalSolution(average_reward, threshold * std if std > 0.0 else threshold)

    def _begin(self, rows: NDArray[np.bool_]) -> None:
        before, eta, eps = self.np_random.standard_normal((3, int(rows.sum())))
        self._last_return[rows] = self.beta * before + self.sigma * eta
        self._signal[rows] = self._next_signal(before, eps)
        self._position[rows] = 0.0
        self._elapsed[rows] = 0

    def _observe(self) -> NDArray[np.float32]:
        visible = self._last_return if self.hidden else self._signal
        return np.column_stack([visible, self._position]).astype(np.float32)

    def _advance(self, actions: NDArray[np.float64]) -> StepOutcome:
        eta, eps = self.np_random.standard_normal((2, self.num_envs))
        target = actions[:, 0]
        self._last_return = self.beta * self._signal + self.sigma * eta
        rewards = target * self._last_return - self.cost * np.abs(target - self._position)
        self._signal = self._next_signal(self._signal, eps)
        self._position = target
        self._elapsed += 1
        return rewards, np.zeros(self.num_envs, dtype=np.bool_), self._elapsed >= self.episode_length

    def _next_signal(self, signal: NDArray[np.float64], eps: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.phi * signal + math.sqrt(1.0 - self.phi**2) * eps


def _solve_unit_signal(phi: float, beta: float, cost: float) -> tuple[float, float]:
    """Return the threshold and the best average reward for a signal of unit variance.

    The reward is linear in a but for the cost, hence the value is linear in the position, V(x, p) = v0(x) + p v1(x).
    One unit of position taken now is worth s(x) = beta x + E[v1(x') | x] from here on, and

        max over a of  a s(x) - cost |a - p|  =  p clip(s(x), -cost, cost) + max(0, |s(x)| - cost):

    trade to the end of the range where |s| > cost, else hold. So v1 = clip(s, -cost, cost), and the part without p is
    what a step earns: the average reward is E[max(0, |s(x)| - cost)] over the stationary distribution.

    Since s is odd and rising, v1 is s within a threshold b and +-cost beyond it. Given b, that is a linear integral
    equation on [-b, b] with a smooth kernel, which Gauss-Legendre points solve to nearly machine precision because no
    kink of v1 lies inside. The right b is where the two parts meet, s(b) = cost; bisection finds it.

    :param phi: the autocorrelation of the signal.
    :param beta: the expected return per unit of signal.
    :param cost: the price of changing the position by 1.
    """
    if beta == 0.0:
        return math.inf, 0.0
    noise = math.sqrt(1.0 - phi**2)

    def holding_worth(b: float) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        """Return the function s that belongs to the threshold b."""
        # Enough points to see the kernel, whose width is `noise`.
        points, weights = _quadrature(-b, b, 40 + math.ceil(5.0 * b / noise))

        def beyond(x: NDArray[np.float64]) -> NDArray[np.float64]:
            return cost * (_normal_cdf((phi * x - b) / noise) - _normal_cdf((-phi * x - b) / noise))

        def within(x: NDArray[np.float64]) -> NDArray[np.float64]:
            return weights * _normal_pdf((points - phi * x[:, None]) / noise) / noise

        v1 = np.linalg.solve(np.eye(len(points)) - within(points), beta * points + beyond(points))
        return lambda x: beta * x + beyond(x) + within(x) @ v1

    def excess(b: float) -> float:
        return float(holding_worth(b)(np.array([b]))[0]) - cost

    low, high = 0.0, noise
    while excess(high) < 0.0:
        low, high = high, 2.0 * high
        if low > FARTHEST_THRESHOLD:
            return math.inf, 0.0
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if excess(middle) < 0.0 else (low, middle)

    # The two signs of the signal earn the same. The points crowd at the threshold, where s bends on the scale `noise`.
    x, weights = _quadrature(high, high + FARTHEST_THRESHOLD, math.ceil(100.0 / math.sqrt(noise)))
    return high, float(2.0 * weights @ ((holding_worth(high)(x) - cost) * _normal_pdf(x)))


def _quadrature(low: float, high: float, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the Gauss-Legendre points and weights on [low, high]."""
    points, weights = np.polynomial.legendre.leggauss(count)
    return (low + high) / 2.0 + (high - low) / 2.0 * points, (high - low) / 2.0 * weights


def _normal_pdf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _normal_cdf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in x])
