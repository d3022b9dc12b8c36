"""A betting game in which the best mean, and the best CVaR, are known exactly.

The player begins with `chips` and plays `rounds` rounds. In each one a fraction k / fractions of the chips is bet, but
never more than is missing to `cap`; it is won with `win_probability` and lost otherwise. With favourable odds the best
mean asks for bold bets that often lose everything, and the best CVaR for careful ones.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import ArrayLike, NDArray

from tailguard.envs.batched import BatchedEnv, StepOutcome
from tailguard.validation import require

# Amounts are kept to multiples of this. It is a power of two, so that amounts which are exact in floats stay so.
SMALLEST_AMOUNT = 2.0**-30
TIE = 1e-12


@dataclass(frozen=True)
class BettingSolution:
    """The best policy, and the exact distribution of the net result R (final chips less first chips) under it.

    :param alpha: the level of the CVaR that was optimised; 1 is the mean.
    :param objective: the best reachable CVaR at `alpha`, as the dynamic program found it.
    :param amounts: for each round, the reachable amounts of chips in rising order.
    :param bets: for each round, the best k for each of these amounts.
    :param values: the results that can happen, in rising order.
    :param probabilities: their probabilities.
    """

    alpha: float
    objective: float
    amounts: tuple[NDArray[np.float64], ...]
    bets: tuple[NDArray[np.int64], ...]
    values: NDArray[np.float64]
    probabilities: NDArray[np.float64]

    @property
    def first_bet(self) -> int:
        """The best k in the first round."""
        return int(self.bets[0][0])

    @property
    def mean(self) -> float:
        """The mean of the result."""
        return float(self.probabilities @ self.values)

    def cvar(self, alpha: float | None = None) -> float:
        """Return the CVaR: the mean of the worst share `alpha` of the results.

        :param alpha: the share; ``None`` takes the one that was optimised.
        """
        alpha = _legal_alpha(self.alpha if alpha is None else alpha)
        below = np.cumsum(self.probabilities) - self.probabilities
        in_tail = np.clip(alpha - below, 0.0, self.probabilities)
        return float(in_tail @ self.values) / alpha

    def value_at_risk(self, alpha: float | None = None) -> float:
        """Return the smallest result whose distribution function reaches `alpha`.

        :param alpha: the share; ``None`` takes the one that was optimised.
        """
        alpha = _legal_alpha(self.alpha if alpha is None else alpha)
        return float(self.values[np.argmax(np.cumsum(self.probabilities) >= alpha - TIE)])

    def policy(self, chips: ArrayLike, rounds_played: ArrayLike) -> NDArray[np.int64]:
        """Return the best k.

        :param chips: the present chips; the nearest reachable amount is taken, since observations are rounded.
        :param rounds_played: the number of rounds played, below `rounds`.
        """
        chips, rounds_played = np.broadcast_arrays(np.asarray(chips, np.float64), np.asarray(rounds_played))
        legal = np.isin(rounds_played, np.arange(len(self.bets))).all()
        require(bool(legal), "rounds_played", rounds_played, f"whole and from 0 to {len(self.bets) - 1}")
        best = np.zeros(chips.shape, dtype=np.int64)
        for played, bets in enumerate(self.bets):
            rows = rounds_played == played
            middles = (self.amounts[played][1:] + self.amounts[played][:-1]) / 2.0
            best[rows] = bets[np.searchsorted(middles, chips[rows])]
        return best


class BettingGame(BatchedEnv):
    """The game as an environment.

    The action is k in 0..fractions, the reward the change in chips. An episode terminates after `rounds` rounds, or
    when nothing or `cap` is reached. The observation is (chips / cap, rounds played / rounds).

    :param num_envs: the number of copies.
    :param win_probability: the probability to win a round.
    :param chips: the chips at the start.
    :param cap: the most chips that one can have.
    :param rounds: the number of rounds.
    :param fractions: the number of parts into which the chips are divided for a bet.
    :param seed: random seed.
    """

    state_arrays = ("_chips", "_played")

    def __init__(
        self,
        num_envs: int = 1,
        *,
        win_probability: float = 0.88,
        chips: int = 16,
        cap: int = 256,
        rounds: int = 6,
        fractions: int = 8,
        seed: int | None = None,
    ) -> None:
        """Check the parameters, which the class explains."""
        require(0.0 <= win_probability <= 1.0, "win_probability", win_probability, "between 0 and 1")
        require(chips >= 1 and chips == int(chips), "chips", chips, "a whole number of at least 1")
        require(cap > chips and cap == int(cap), "cap", cap, f"a whole number above chips, which is {chips}")
        require(rounds >= 1, "rounds", rounds, "at least 1")
        require(fractions >= 1, "fractions", fractions, "at least 1")
        super().__init__(num_envs, Box(0.0, 1.0, (2,)), Discrete(fractions + 1), seed)
        self.win_probability, self.chips, self.cap = win_probability, chips, cap
        self.rounds, self.fractions = rounds, fractions
        self._chips = np.zeros(num_envs)
        self._played = np.zeros(num_envs, dtype=np.int64)

    def solve(self, alpha: float | None = None) -> BettingSolution:
        """Return the policy with the highest CVaR of the net result, by dynamic programming over reachable amounts.

        CVaR_alpha(R) = max over b of b - E[(b - R)+] / alpha = max over b of (E[min(R, b)] - (1 - alpha) b) / alpha.
        For a given b the best policy maximises E[min(R, b)], which depends on the last chips alone, so that chips and
        round are all it has to know. Among equally good bets the smallest is taken.

        :param alpha: the share of worst results that counts; ``None`` or 1 is the mean.
        """
        alpha = _legal_alpha(1.0 if alpha is None else alpha)
        tree = _Tree(self)
        b = math.inf if alpha == 1.0 else _best_target(tree, alpha)
        best, bets = tree.plan(b)
        objective = best if alpha == 1.0 else (best - (1.0 - alpha) * b) / alpha
        probabilities = tree.distribution(bets)
        possible = probabilities > 0.0
        return BettingSolution(
            alpha, objective, tuple(tree.amounts), tuple(bets), tree.results[possible], probabilities[possible]
        )

    def outcomes(self, chips: NDArray[np.float64], k: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the chips after a won and after a lost bet.

        :param chips: the present chips.
        :param k: the bet, in parts of the chips.
        """
        bet = np.minimum(chips * k / self.fractions, self.cap - chips)
        return _whole_amounts(chips + bet), _whole_amounts(chips - bet)

    def _begin(self, rows: NDArray[np.bool_]) -> None:
        self._chips[rows] = self.chips
        self._played[rows] = 0

    def _observe(self) -> NDArray[np.float32]:
        return np.column_stack([self._chips / self.cap, self._played / self.rounds]).astype(np.float32)

    def _advance(self, actions: NDArray[np.int64]) -> StepOutcome:
        won, lost = self.outcomes(self._chips, actions)
        chips = np.where(self.np_random.random(self.num_envs) < self.win_probability, won, lost)
        rewards = chips - self._chips
        self._chips = chips
        self._played += 1
        terminated = (self._played == self.rounds) | (chips == 0.0) | (chips == self.cap)
        return rewards, terminated, np.zeros(self.num_envs, dtype=np.bool_)


class _Tree:
    """The tree of the game: the amounts that can be reached, round by round, and the result of each bet.

    An amount of 0 or `cap` allows no bet but zero, so that it stays what it is until the last round: the episodes that
    end early need no treatment of their own.

    :param game: the game.
    """

    def __init__(self, game: BettingGame) -> None:
        self.win_probability = game.win_probability
        self.amounts = [np.array([float(game.chips)])]
        self.after_win: list[NDArray[np.int64]] = []
        self.after_loss: list[NDArray[np.int64]] = []
        for _ in range(game.rounds):
            won, lost = game.outcomes(self.amounts[-1][:, None], np.arange(game.fractions + 1))
            reached = np.unique([won, lost])
            self.amounts.append(reached)
            self.after_win.append(np.searchsorted(reached, won))
            self.after_loss.append(np.searchsorted(reached, lost))
        self.results = self.amounts[-1] - game.chips

    def plan(self, b: float) -> tuple[float, list[NDArray[np.int64]]]:
        """Return the highest E[min(R, b)] and, for each round, the bets that reach it."""
        p = self.win_probability
        value = np.minimum(self.results, b)
        bets: list[NDArray[np.int64]] = []
        for after_win, after_loss in zip(reversed(self.after_win), reversed(self.after_loss), strict=True):
            by_bet = p * value[after_win] + (1.0 - p) * value[after_loss]
            value = by_bet.max(axis=1)
            # The first of the equally good ones; without a margin, rounding errors would choose among them.
            bets.insert(0, np.argmax(by_bet >= value[:, None] - TIE * (1.0 + np.abs(value[:, None])), axis=1))
        return float(value[0]), bets

    def distribution(self, bets: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        """Return the probability of each result under the bets."""
        p = self.win_probability
        mass = np.ones(1)
        for k, after_win, after_loss, reached in zip(bets, self.after_win, self.after_loss, self.amounts[1:], strict=True):
            rows, before, mass = np.arange(len(k)), mass, np.zeros(len(reached))
            np.add.at(mass, after_win[rows, k], p * before)
            np.add.at(mass, after_loss[rows, k], (1.0 - p) * before)
        return mass


def _best_target(tree: _Tree, alpha: float) -> float:
    """Return the b that maximises f(b) = (g(b) - (1 - alpha) b) / alpha with g(b) = max over policies of E[min(R, b)].

    Only possible results need to be tried: between two of them E[min(R, b)] is linear in b for every policy, so that f
    is a maximum of lines and highest at an end. Nor do all of them: g rises, by no more than b does, hence between
    l and h it lies below g(h) and below g(l) + b - l. The bound on f is highest where these two meet. The stretch
    with the highest bound is halved until no bound exceeds the best value found.

    :param tree: the reachable amounts.
    :param alpha: the share of worst results that counts.
    """
    b = tree.results

    def bounded(low: int, g_low: float, high: int, g_high: float) -> tuple[float, int, float, int, float]:
        bound = (g_high - (1.0 - alpha) * (b[low] + g_high - g_low)) / alpha
        return -bound, low, g_low, high, g_high  # negative, since the heap gives the smallest first

    last = len(b) - 1
    g_first, g_last = tree.plan(b[0])[0], tree.plan(b[last])[0]
    best, best_b = max(((g - (1.0 - alpha) * x) / alpha, float(x)) for x, g in ((b[0], g_first), (b[last], g_last)))
    stretches = [bounded(0, g_first, last, g_last)]
    while stretches:
        minus_bound, low, g_low, high, g_high = heapq.heappop(stretches)
        if -minus_bound <= best + TIE:
            break
        if high - low < 2:
            continue
        middle = int(np.clip(np.searchsorted(b, (b[low] + b[high]) / 2.0), low + 1, high - 1))
        g_middle = tree.plan(b[middle])[0]
        best, best_b = max((best, best_b), ((g_middle - (1.0 - alpha) * b[middle]) / alpha, float(b[middle])))
        heapq.heappush(stretches, bounded(low, g_low, middle, g_middle))
        heapq.heappush(stretches, bounded(middle, g_middle, high, g_high))
    return best_b


def _whole_amounts(amounts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the amounts without the rounding errors that would tell equal ones apart."""
    return np.asarray(np.round(amounts / SMALLEST_AMOUNT) * SMALLEST_AMOUNT)


def _legal_alpha(alpha: float) -> float:
    require(0.0 < alpha <= 1.0, "alpha", alpha, "above 0 and at most 1")
    return alpha
