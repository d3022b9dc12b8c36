"""The guarded maze's optimum, against known numbers, a dynamic program and play."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tailguard.envs.guarded_maze import DEFAULT_LAYOUT, MOVES, RETURN_SCALE, GuardedMaze

RIGHT, DOWN, LEFT, UP = range(4)
SHORT = [RIGHT] * 5 + [UP]
LONG = [UP] * 5 + [RIGHT] * 5 + [DOWN] * 4
ENCLOSED = ("#####", "#S.##", "#..X#", "###G#", "#####")
RING = ("#######", "#.....#", "#.###.#", "#S.X.G#", "#######")
UNREACHABLE = ("######", "#S.#G#", "#.X###", "######")


def walk(env: GuardedMaze, moves: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rewards [steps, copies] of a fixed walk and whether each copy terminated at its last step."""
    env.reset()
    rewards = np.zeros((len(moves), env.num_envs))
    for step, move in enumerate(moves):
        _, rewards[step], terminated, *_ = env.step(np.full(env.num_envs, move))
    return rewards, terminated


def walls_of(layout: tuple[str, ...]) -> dict[tuple[int, int], str]:
    return {(i, j): mark for i, row in enumerate(layout) for j, mark in enumerate(row)}


def best_mean(env: GuardedMaze) -> float:
    """Return the best mean by backward induction over cell and time, which knows nothing of shortest paths."""
    marks = walls_of(env.layout)
    value = dict.fromkeys(marks, 0.0)
    for elapsed in reversed(range(env.max_steps)):
        step = -env.step_cost if elapsed < env.deduction_limit else 0.0
        new = dict.fromkeys(marks, 0.0)
        for cell, mark in marks.items():
            if mark in "#G":
                continue
            options = []
            for row, column in MOVES:
                there = (cell[0] + row, cell[1] + column)
                there = cell if marks[there] == "#" else there
                guard = env.guard_mean if marks[there] == "X" and there != cell else 0.0
                options.append(step + guard + (env.goal_reward if marks[there] == "G" else value[there]))
            new[cell] = max(options)
        value = new
    return value[next(cell for cell, mark in marks.items() if mark == "S")]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"guard_mean": -7.5},
        {"guard_mean": -8.5},
        {"step_cost": 0.25, "goal_reward": 3.0, "guard_mean": -1.0},
        {"deduction_limit": 10},
        {"deduction_limit": 3, "guard_mean": -0.5},
        {"deduction_limit": 0},
        {"goal_reward": -5.0},
        {"goal_reward": -40.0},
        {"max_steps": 6},
        {"max_steps": 5},
        {"max_steps": 13, "guard_mean": -40.0},
        {"max_steps": 14, "guard_mean": -40.0},
        {"layout": ENCLOSED, "guard_mean": -3.0},
        {"layout": ENCLOSED, "guard_mean": -50.0},
        {"layout": UNREACHABLE},
    ],
)
def test_backward_induction_finds_the_same_mean(settings: dict[str, Any]) -> None:
    env = GuardedMaze(**{"max_steps": 60} | settings)
    solution = env.solve()
    assert solution.objective == solution.mean == pytest.approx(best_mean(env), abs=1e-12)


def best_cvar(env: GuardedMaze, alpha: float) -> float:
    """Return the best CVaR of policies that see cell, time and running return, and may visit the guard at will.

    For each b, backward induction maximises E[min(return, b)]. Returns lie on a grid of spacing h, which makes the
    CVaR of a density f too high by up to h^2 f(b) / (12 alpha): 0.0046 for the narrowest guard below.
    """
    h = 0.25
    marks = {cell: mark for cell, mark in walls_of(env.layout).items() if mark != "#"}
    start, goal, guard = (next(cell for cell in marks if marks[cell] == mark) for mark in "SGX")
    y, b = np.arange(-60.0, 60.0 + h, h), np.arange(-20.0, 20.0 + h, h)
    noise = np.exp(-0.5 * ((y - y[:, None] - env.guard_mean) / env.guard_std) ** 2)
    noise /= noise.sum(axis=1, keepdims=True)

    def moved(value: np.ndarray, reward: float) -> np.ndarray:
        return value[np.clip(np.arange(len(y)) + round(reward / h), 0, len(y) - 1)]

    end = np.minimum(y[:, None], b)
    value = dict.fromkeys(marks, end)
    for elapsed in reversed(range(env.max_steps)):
        step = -env.step_cost if elapsed < env.deduction_limit else 0.0
        entered = {cell: moved(value[cell], step) for cell in marks}
        entered[goal] = moved(end, step + env.goal_reward)
        entered[guard] = moved(noise @ value[guard], step)
        stayed = {cell: moved(value[cell], step) for cell in marks}
        neighbours = {cell: [(cell[0] + row, cell[1] + column) for row, column in MOVES] for cell in marks}
        value = {cell: np.max([entered.get(there, stayed[cell]) for there in neighbours[cell]], axis=0) for cell in marks}
    return float(((value[start][len(y) // 2] - (1.0 - alpha) * b) / alpha).max())


@pytest.mark.parametrize("settings", [{}, {"guard_mean": -1.0}, {"guard_std": 2.0}, {"goal_reward": 0.0}])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8, 0.95])
def test_no_policy_that_adapts_to_the_guard_does_better(settings: dict[str, Any], alpha: float) -> None:
    ring: dict[str, Any] = {"layout": RING, "guard_std": 8.0, "max_steps": 12}
    env = GuardedMaze(**ring | settings)
    assert env.solve(alpha).objective == pytest.approx(best_cvar(env, alpha), abs=5e-3)


def test_the_default_numbers() -> None:
    env = GuardedMaze()
    short = env.solve()
    assert (short.objective, short.mean, short.std, short.passes_guard) == (4.0, 4.0, 30.0, True)
    assert short.path == [(6, 1), (6, 2), (6, 3), (6, 4), (6, 5), (6, 6), (5, 6)]
    for alpha in (0.05, 0.2, 0.8549):
        around = env.solve(alpha)
        assert (around.objective, around.mean, around.std, around.passes_guard) == (-4.0, -4.0, 0.0, False)
        assert len(around.path) == 15
        assert (around.path[0], around.path[-1]) == ((6, 1), (5, 6))
        assert (6, 5) not in around.path
    assert env.solve(0.855).passes_guard
    assert env.break_even_alpha() == pytest.approx(0.8549, abs=5e-5)


@pytest.mark.parametrize(("alpha", "cvar"), [(0.2, -37.99), (0.05, -57.88)])
def test_the_cvar_of_the_short_way(alpha: float, cvar: float) -> None:
    """Only the short way is left when the goal pays so much that one must arrive within six steps."""
    solution = GuardedMaze(max_steps=6, goal_reward=1010.0).solve(alpha)
    assert solution.passes_guard
    assert solution.objective - 1000.0 == pytest.approx(cvar, abs=5e-3)


@pytest.mark.parametrize(
    ("moves", "settings", "mean", "std"),
    [(SHORT, {"max_steps": 6, "goal_reward": 1010.0}, 1004.0, 30.0), (LONG, {}, -4.0, 0.0)],
)
def test_both_ways_earn_in_play_what_they_should(moves: list[int], settings: dict[str, Any], mean: float, std: float) -> None:
    n = 50_000
    env = GuardedMaze(n, seed=1, **settings)
    rewards, terminated = walk(env, moves)
    assert terminated.all()
    returns = rewards.sum(axis=0)
    assert abs(returns.mean() - mean) <= 4.0 * std / math.sqrt(n)
    assert abs(returns.std() - std) <= 4.0 * std / math.sqrt(2 * n)
    for alpha in (0.2, 0.05):
        quantile = np.quantile(returns, alpha)
        shortfall = np.minimum(returns - quantile, 0.0) / alpha
        error = shortfall.std() / math.sqrt(n)
        assert abs(quantile + shortfall.mean() - env.solve(alpha).objective) <= 4.0 * error


@pytest.mark.parametrize("settings", [{}, {"guard_std": 3.0}, {"guard_mean": -5.0}, {"goal_reward": 50.0}])
@pytest.mark.parametrize("alpha", [None, 0.3, 0.9])
def test_the_best_path_can_be_walked(settings: dict[str, Any], alpha: float | None) -> None:
    n = 20_000
    solution = GuardedMaze(**settings).solve(alpha)
    steps = itertools.pairwise(solution.path)
    moves = [MOVES.index((there[0] - here[0], there[1] - here[1])) for here, there in steps]
    rewards, terminated = walk(GuardedMaze(n, seed=2, **settings), moves)
    assert terminated.all()
    assert abs(rewards.sum(axis=0).mean() - solution.mean) <= 4.0 * solution.std / math.sqrt(n) + 1e-9


def test_the_break_even_is_where_the_best_way_changes() -> None:
    for settings in ({}, {"guard_std": 5.0}, {"guard_mean": -3.0}, {"layout": ENCLOSED}):
        env = GuardedMaze(**settings)
        alpha = env.break_even_alpha()
        assert 0.0 < alpha < 1.0
        assert env.solve(alpha + 1e-6).passes_guard
        assert not env.solve(alpha - 1e-6).passes_guard
        assert env.solve(alpha).objective == pytest.approx(env.solve(alpha - 1e-6).objective, abs=1e-6)
    assert GuardedMaze(guard_std=0.0).break_even_alpha() == 0.0
    assert GuardedMaze(guard_mean=-8.0).break_even_alpha() == 1.0
    assert GuardedMaze(layout=UNREACHABLE).break_even_alpha() == 1.0


def test_never_to_arrive_can_be_best() -> None:
    for settings in ({"layout": UNREACHABLE}, {"layout": ENCLOSED, "guard_mean": -60.0}, {"goal_reward": -40.0}):
        solution = GuardedMaze(**settings).solve(0.2)
        assert solution.objective == -32.0
        assert solution.path == [solution.path[0]]
    assert GuardedMaze(layout=UNREACHABLE, max_steps=7).solve().objective == -7.0


def test_walls_stop_and_free_cells_do_not() -> None:
    marks = walls_of(DEFAULT_LAYOUT)
    routes: dict[tuple[int, int], list[int]] = {(6, 1): []}
    reached = [(6, 1)]
    for here in reached:
        for move, (row, column) in enumerate(MOVES):
            there = (here[0] + row, here[1] + column)
            if marks[there] in ".X" and there not in routes:
                routes[there] = [*routes[here], move]
                reached.append(there)  # the list grows while it is read, until all cells are in it
    assert len(routes) == 28
    for cell, route in routes.items():
        for move, (row, column) in enumerate(MOVES):
            env = GuardedMaze(guard_std=0.0)
            obs, _ = env.reset()
            for action in [*route, move]:
                obs, _, terminated, _, info = env.step(np.array([action]))
            there = (cell[0] + row, cell[1] + column)
            expected = cell if marks[there] == "#" else there
            shown = info["final_obs"] if terminated[0] else obs
            assert np.flatnonzero(shown[0, :-1]).tolist() == [expected[0] * 8 + expected[1]]
            assert terminated[0] == (marks[there] == "G")


def test_the_guard_asks_at_every_entrance_but_not_for_staying() -> None:
    env = GuardedMaze(200, seed=0)
    moves = [RIGHT, RIGHT, RIGHT, RIGHT, DOWN, DOWN, RIGHT, LEFT, LEFT, RIGHT]
    rewards, _ = walk(env, moves)
    asked = np.array([3, 7, 9])
    assert (np.abs(rewards[asked] + 1.0) > 0.0).all()
    assert rewards[asked].std() > 25.0
    assert (np.delete(rewards, asked, axis=0) == -1.0).all()
    correlation = np.corrcoef(rewards[asked])
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 4.0 / math.sqrt(200)


def test_costs_end_at_the_limit_and_episodes_at_theirs() -> None:
    env = GuardedMaze(3, deduction_limit=4, max_steps=6)
    env.reset()
    for episode in range(2):
        for step in range(1, 7):
            obs, rewards, terminated, truncated, info = env.step(np.full(3, LEFT))
            assert (rewards == (-1.0 if step <= 4 else 0.0)).all(), (episode, step)
            assert not terminated.any()
            assert (truncated == (step == 6)).all()
            shown = info["final_obs"] if step == 6 else obs
            np.testing.assert_allclose(shown[:, -1], -min(step, 4) / RETURN_SCALE)
    assert (obs[:, -1] == 0.0).all()


def test_arriving_at_the_last_step_terminates() -> None:
    env = GuardedMaze(max_steps=6)
    env.reset()
    for move in SHORT:
        _, _, terminated, truncated, info = env.step(np.array([move]))
    assert (terminated[0], truncated[0]) == (True, False)
    assert info["final_obs"][0, 5 * 8 + 6] == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guard_std", -1.0),
        ("guard_mean", 0.5),
        ("step_cost", -1.0),
        ("goal_reward", math.inf),
        ("deduction_limit", -1),
        ("max_steps", 0),
    ],
)
def test_impossible_parameters_are_named(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}, but it must be"):
        GuardedMaze(**settings)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ((), "one width"),
        (("####", "#SG#", "###"), "one width"),
        (("#####", "#S.X#", "#####"), "exactly one 'G'"),
        (("#####", "#SGX#", "#S..#", "#####"), "exactly one 'S'"),
        (("#####", "#SGX#", "#?..#", "#####"), "made of"),
        (("#####", "#SGX.", "#####"), "walled"),
    ],
)
def test_impossible_layouts_are_refused(layout: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        GuardedMaze(layout=layout)


def test_impossible_tails_are_refused() -> None:
    for alpha in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="alpha is"):
            GuardedMaze().solve(alpha)
