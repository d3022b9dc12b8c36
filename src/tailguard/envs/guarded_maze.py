"""A maze with a short path past a guard and a long safe one; which is best depends on the level of the CVaR.

Every step costs a little, the goal pays, and each time the guard's cell is entered a normal random amount is added to the
return. Its mean is 0: the best mean takes the short path, the best CVaR the long one.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from tailguard.envs.batched import BatchedEnv, StepOutcome
from tailguard.validation import require

DEFAULT_LAYOUT = (
    "########",
    "#......#",
    "#.####.#",
    "#....#.#",
    "#....#.#",
    "#....#G#",
    "#S...X.#",
    "########",
)
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))  # rows and columns to the right, down, left, up
RETURN_SCALE = 32.0

Cell = tuple[int, int]


@dataclass(frozen=True)
class MazeSolution:
    """The best path through the maze, and the distribution of its return.

    :param objective: the best reachable CVaR.
    :param mean: the mean of the return.
    :param std: the standard deviation of the return.
    :param passes_guard: True if the path leads past the guard.
    :param path: the cells (row, column) from the start to the goal; the start alone if it is best never to arrive.
    """

    objective: float
    mean: float
    std: float
    passes_guard: bool
    path: list[Cell]


class GuardedMaze(BatchedEnv):
    """The maze as an environment.

    The actions are 0 right, 1 down, 2 left, 3 up; a step into a wall stays where it is, and staying on the guard's
    cell is not entering it. An episode terminates at the goal and is truncated after `max_steps` steps. The
    observation is the cell, one-hot over rows times columns, and last the running return divided by 32. The return
    belongs to it because the CVaR of an episode depends on what was collected so far.

    :param num_envs: the number of copies.
    :param guard_std: the standard deviation of the guard's amount.
    :param guard_mean: its mean; not positive, or visits to the guard would pay.
    :param step_cost: the cost of one step.
    :param goal_reward: the reward of the goal.
    :param deduction_limit: the number of steps, from the first, that cost anything.
    :param max_steps: the number of steps after which an episode is cut.
    :param layout: rows of '#' wall, '.' free and one 'S' start, 'G' goal and 'X' guard each, with walls around.
    :param seed: random seed.
    """

    state_arrays = ("_cell", "_elapsed", "_return")

    def __init__(
        self,
        num_envs: int = 1,
        *,
        guard_std: float = 30.0,
        guard_mean: float = 0.0,
        step_cost: float = 1.0,
        goal_reward: float = 10.0,
        deduction_limit: int = 32,
        max_steps: int = 500,
        layout: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> None:
        """Check the parameters, which the class explains."""
        require(0.0 <= guard_std < math.inf, "guard_std", guard_std, "finite and not negative")
        require(-math.inf < guard_mean <= 0.0, "guard_mean", guard_mean, "finite and not positive")
        require(0.0 <= step_cost < math.inf, "step_cost", step_cost, "finite and not negative")
        require(math.isfinite(goal_reward), "goal_reward", goal_reward, "finite")
        require(deduction_limit >= 0, "deduction_limit", deduction_limit, "not negative")
        require(max_steps >= 1, "max_steps", max_steps, "at least 1")
        self.layout = tuple(DEFAULT_LAYOUT if layout is None else layout)
        _check_layout(self.layout)
        self._columns = len(self.layout[0])
        cells = "".join(self.layout)
        limits = np.ones(len(cells) + 1, dtype=np.float32)
        limits[-1] = np.inf
        super().__init__(num_envs, Box(np.where(limits == 1.0, 0.0, -limits), limits), Discrete(len(MOVES)), seed)

        self.guard_std, self.guard_mean = guard_std, guard_mean
        self.step_cost, self.goal_reward = step_cost, goal_reward
        self.deduction_limit, self.max_steps = deduction_limit, max_steps
        self._start, self._goal, self._guard = (cells.index(mark) for mark in "SGX")
        self._one_hot = np.eye(len(cells), dtype=np.float32)
        # The cell after each move from each cell; the walls around the maze keep the sums inside it.
        here = np.arange(len(cells))[:, None]
        there = np.clip(here + [row * self._columns + column for row, column in MOVES], 0, len(cells) - 1)
        self._moves = np.where(np.array(list(cells))[there] == "#", here, there)

        self._cell = np.zeros(num_envs, dtype=np.int64)
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._return = np.zeros(num_envs)

    def solve(self, alpha: float | None = None) -> MazeSolution:
        """Return the best of three: the shortest path, the shortest path without the guard, and never to arrive.

        The guard adds independent noise with a mean of at most 0, which never raises the CVaR, so that he is passed
        only to save steps and hence at most once, on a shortest path. The rewards after him are certain: no policy gains by
        reacting to his amount, and a choice among fixed paths needs no mixing, since CVaR is a maximum over b of
        b - E[(b - R)+] / alpha, which for the best b is linear in the probabilities of the mix.

        :param alpha: the share of worst returns that counts; ``None`` or 1 is the mean.
        """
        return max(self._candidates(1.0 if alpha is None else alpha), key=lambda solution: solution.objective)

    def break_even_alpha(self) -> float:
        """Return the alpha above which the path past the guard is the best one.

        It is 0 where it always is, and 1 where it never is.
        """
        if not self.solve(1.0).passes_guard:
            return 1.0
        if self.guard_std == 0.0:
            return 0.0
        # The CVaR of the certain paths does not depend on alpha, and that of the other rises with it.
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2.0
            low, high = (low, middle) if self.solve(middle).passes_guard else (middle, high)
        return high

    def _candidates(self, alpha: float) -> list[MazeSolution]:
        """Return the paths that may be best; where they are equally good, the first of them is taken."""
        require(0.0 < alpha <= 1.0, "alpha", alpha, "above 0 and at most 1")
        stay = -self.step_cost * min(self.max_steps, self.deduction_limit)
        candidates = [MazeSolution(stay, stay, 0.0, False, [self._row_column(self._start)])]
        safe, shortest = self._shortest_path(avoid=self._guard), self._shortest_path(avoid=None)
        if safe is not None:
            candidates.insert(0, self._evaluate(safe, alpha))
        if shortest is not None and (safe is None or len(shortest) < len(safe)):
            candidates.append(self._evaluate(shortest, alpha))
        return candidates

    def _evaluate(self, path: list[int], alpha: float) -> MazeSolution:
        """Return the normal distribution of a path's return and its CVaR, mean - std pdf(cdf^-1(alpha)) / alpha."""
        passes_guard = self._guard in path
        steps = len(path) - 1
        mean = self.goal_reward - self.step_cost * min(steps, self.deduction_limit)
        mean += self.guard_mean if passes_guard else 0.0
        std = self.guard_std if passes_guard else 0.0
        normal = NormalDist()
        tail = normal.pdf(normal.inv_cdf(alpha)) / alpha if alpha < 1.0 else 0.0
        return MazeSolution(mean - std * tail, mean, std, passes_guard, [self._row_column(cell) for cell in path])

    def _shortest_path(self, avoid: int | None) -> list[int] | None:
        """Return the cells of a shortest path that arrives in time, or None; breadth first, so the first is it."""
        paths = deque([[self._start]])
        seen = {self._start, avoid}
        while paths:
            path = paths.popleft()
            if path[-1] == self._goal:
                return path
            if len(path) > self.max_steps:
                return None
            for cell in self._moves[path[-1]].tolist():
                if cell not in seen:
                    seen.add(cell)
                    paths.append([*path, cell])
        return None

    def _row_column(self, cell: int) -> Cell:
        return divmod(cell, self._columns)

    def _begin(self, rows: NDArray[np.bool_]) -> None:
        self._cell[rows] = self._start
        self._elapsed[rows] = 0
        self._return[rows] = 0.0

    def _observe(self) -> NDArray[np.float32]:
        return np.column_stack([self._one_hot[self._cell], (self._return / RETURN_SCALE).astype(np.float32)])

    def _advance(self, actions: NDArray[np.int64]) -> StepOutcome:
        cell = self._moves[self._cell, actions]
        meets_guard = (cell == self._guard) & (self._cell != self._guard)
        arrives = cell == self._goal
        guard_rewards = self.guard_mean + self.guard_std * self.np_random.standard_normal(self.num_envs)
        rewards = np.where(self._elapsed < self.deduction_limit, -self.step_cost, 0.0)
        rewards = rewards + np.where(meets_guard, guard_rewards, 0.0) + np.where(arrives, self.goal_reward, 0.0)
        self._cell = cell
        self._elapsed += 1
        self._return += rewards
        return rewards, arrives, ~arrives & (self._elapsed >= self.max_steps)


def _check_layout(layout: tuple[str, ...]) -> None:
    text = "\n".join(layout)
    widths = {len(row) for row in layout}
    require(len(widths) == 1 and min(widths) > 0, "layout", text, "rows of one width")
    for mark in "SGX":
        require(text.count(mark) == 1, "layout", text, f"a maze with exactly one {mark!r}")
    require(set(text) <= set("#.SGX\n"), "layout", text, "made of '#', '.', 'S', 'G' and 'X'")
    border = layout[0] + layout[-1] + "".join(row[0] + row[-1] for row in layout)
    require(set(border) == {"#"}, "layout", text, "walled on all sides")
