"""The betting game's optimum, against known numbers, enumeration and play."""

import itertools
from typing import Any

import numpy as np
import pytest

from tailguard.envs.betting_game import BettingGame, BettingSolution, _Tree


def cvar_of(results: list[tuple[float, float]], alpha: float) -> float:
    """Return the CVaR of (result, probability) pairs by collecting the worst until their mass is alpha."""
    missing, total = alpha, 0.0
    for result, probability in sorted(results):
        taken = min(missing, probability)
        total, missing = total + taken * result, missing - taken
    return total / alpha


def enumerate_policies(game: BettingGame) -> list[list[tuple[float, float]]]:
    """Return the distribution of the result under every deterministic policy, each free to depend on the whole past."""

    def distributions(chips: float, rounds_left: int) -> list[list[tuple[float, float]]]:
        if rounds_left == 0:
            return [[(chips - game.chips, 1.0)]]
        found = []
        for k in range(game.fractions + 1):
            bet = min(chips * k / game.fractions, game.cap - chips)
            after_win, after_loss = distributions(chips + bet, rounds_left - 1), distributions(chips - bet, rounds_left - 1)
            for won, lost in itertools.product(after_win, after_loss):
                p = game.win_probability
                found.append([(r, p * q) for r, q in won] + [(r, (1.0 - p) * q) for r, q in lost])
        return found

    return distributions(float(game.chips), game.rounds)


@pytest.mark.parametrize(
    "settings",
    [
        {"rounds": 2, "fractions": 2},
        {"rounds": 2, "fractions": 3, "chips": 10, "cap": 17, "win_probability": 0.7},
        {"rounds": 2, "fractions": 6, "chips": 4, "cap": 9, "win_probability": 0.6},
        {"rounds": 3, "fractions": 2, "chips": 5, "cap": 13, "win_probability": 0.8},
        {"rounds": 3, "fractions": 1, "win_probability": 0.95},
        {"rounds": 2, "fractions": 4, "win_probability": 0.3},
    ],
)
def test_no_policy_beats_the_solution(settings: dict[str, Any]) -> None:
    game = BettingGame(**settings)
    distributions = enumerate_policies(game)
    for alpha in (0.03, 0.05, 0.2, 0.35, 0.5, 0.9, 1.0):
        expected = max(cvar_of(distribution, alpha) for distribution in distributions)
        solution = game.solve(alpha)
        assert solution.objective == pytest.approx(expected, abs=1e-8)
        assert solution.cvar() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("alpha", "objective", "mean", "first_bet"),
    [(None, 151.523, 151.523, 4), (0.2, 23.883, 33.02, 4), (0.05, 6.778, 12.09, 2)],
)
def test_the_default_optima(alpha: float | None, objective: float, mean: float, first_bet: int) -> None:
    solution = BettingGame().solve(alpha)
    assert solution.objective == pytest.approx(objective, abs=5e-4)
    assert solution.mean == pytest.approx(mean, abs=6e-3)
    assert solution.first_bet == first_bet


def test_the_best_mean_ruins_the_tail() -> None:
    bold = BettingGame().solve()
    assert bold.cvar(0.2) == pytest.approx(-16.0, abs=1e-12)
    assert bold.value_at_risk(0.2) == -16.0
    assert bold.cvar(1.0) == pytest.approx(bold.mean)


@pytest.mark.parametrize("settings", [{}, {"fractions": 5}, {"fractions": 3, "rounds": 7, "win_probability": 0.75}])
@pytest.mark.parametrize("alpha", [None, 0.01, 0.05, 0.2, 0.5, 0.8])
def test_the_distribution_of_the_result_agrees_with_the_dynamic_program(settings: dict[str, Any], alpha: float | None) -> None:
    solution = BettingGame(**settings).solve(alpha)
    assert solution.cvar() == pytest.approx(solution.objective, abs=1e-9)
    assert solution.probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    assert (solution.probabilities > 0.0).all()
    assert (np.diff(solution.values) > 0.0).all()
    tail = cvar_of(list(zip(solution.values, solution.probabilities, strict=True)), 0.3)
    assert solution.cvar(0.3) == pytest.approx(tail, abs=1e-9)


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.3, 0.6])
def test_the_search_misses_no_target(alpha: float) -> None:
    game = BettingGame(rounds=4, win_probability=0.8)
    tree = _Tree(game)
    exhaustive = max((tree.plan(b)[0] - (1.0 - alpha) * b) / alpha for b in tree.results)
    assert game.solve(alpha).objective == pytest.approx(exhaustive, abs=1e-9)


def test_the_optimum_rises_with_alpha_to_the_best_mean() -> None:
    game = BettingGame()
    optima = [game.solve(alpha).objective for alpha in (0.01, 0.05, 0.2, 0.5, 0.8, 0.999999)]
    assert all(a < b for a, b in itertools.pairwise(optima))
    assert optima[-1] == pytest.approx(game.solve().objective, abs=1e-3)
    assert game.solve(1.0).objective == game.solve().objective


def test_value_at_risk_is_the_lower_quantile() -> None:
    solution = BettingSolution(0.25, 0.0, (), (), np.array([-2.0, 1.0, 5.0]), np.array([0.25, 0.5, 0.25]))
    assert [solution.value_at_risk(alpha) for alpha in (0.1, 0.25, 0.26, 0.75, 0.76, 1.0)] == [-2, -2, 1, 1, 5, 5]
    assert solution.cvar() == -2.0
    assert solution.cvar(0.5) == pytest.approx(-0.5)
    assert solution.mean == pytest.approx(1.25)


def play(game: BettingGame, solution: BettingSolution) -> np.ndarray:
    """Return the result of the first episode of every copy, played from the observations alone."""
    obs, _ = game.reset()
    result, playing = np.zeros(game.num_envs), np.ones(game.num_envs, dtype=bool)
    for _ in range(game.rounds):
        k = solution.policy(obs[:, 0].astype(np.float64) * game.cap, np.rint(obs[:, 1] * game.rounds))
        obs, rewards, terminated, truncated, _ = game.step(k)
        assert not truncated.any()
        result += np.where(playing, rewards, 0.0)
        playing &= ~terminated
    assert not playing.any()
    return result


@pytest.mark.parametrize("settings", [{}, {"fractions": 5, "win_probability": 0.7}])
@pytest.mark.parametrize("alpha", [None, 0.2, 0.05])
def test_the_policy_has_its_distribution_in_play(settings: dict[str, Any], alpha: float | None) -> None:
    n = 40_000
    game = BettingGame(n, seed=1, **settings)
    solution = game.solve(alpha)
    results = play(game, solution)
    cell = np.abs(results[:, None] - solution.values).argmin(axis=1)
    np.testing.assert_allclose(results, solution.values[cell], atol=1e-6)
    frequencies = np.bincount(cell, minlength=len(solution.values)) / n
    p = solution.probabilities
    assert (np.abs(frequencies - p) < 4.5 * np.sqrt(p * (1.0 - p) / n) + 1.0 / n).all()
    assert abs(results.mean() - solution.mean) <= 4.0 * results.std() / np.sqrt(n)


def test_bets_follow_the_rules() -> None:
    game = BettingGame(1000, chips=10, cap=16, rounds=3, fractions=4, seed=0)
    obs, _ = game.reset()
    np.testing.assert_allclose(obs, np.tile([10 / 16, 0.0], (1000, 1)))
    obs, rewards, terminated, *_ = game.step(np.full(1000, 2))
    assert set(rewards) == {-5.0, 5.0}
    assert 0.84 < (rewards > 0).mean() < 0.92
    assert not terminated.any()
    np.testing.assert_allclose(obs, np.column_stack([(10 + rewards) / 16, np.full(1000, 1 / 3)]), rtol=1e-6)
    _, second, terminated, _, info = game.step(np.full(1000, 4))
    # With 15 chips only the one missing to the cap can be bet.
    assert set(second[rewards > 0]) == {-1.0, 1.0}
    assert set(second[rewards < 0]) == {-5.0, 5.0}
    chips = 10 + rewards + second
    np.testing.assert_array_equal(terminated, (chips == 0) | (chips == 16))
    np.testing.assert_allclose(info["final_obs"][:, 0], chips / 16)
    obs, third, terminated, *_ = game.step(np.zeros(1000, dtype=int))
    assert (third == 0.0).all()
    np.testing.assert_array_equal(terminated, info["final_obs"][:, 0] % 1.0 != 0.0)


def test_the_cap_is_met_exactly_whatever_the_fractions() -> None:
    game = BettingGame(2000, chips=10, cap=37, rounds=12, fractions=7, win_probability=0.9, seed=0)
    game.reset()
    game.action_space.seed(0)
    for _ in range(60):
        _, _, terminated, _, info = game.step(game.action_space.sample())
        if terminated.any():
            last = info["final_obs"][terminated]
            assert ((last[:, 1] == 1.0) | (last[:, 0] == 0.0) | (last[:, 0] == 1.0)).all()
            assert (last[:, 0] <= 1.0).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("win_probability", 1.1),
        ("win_probability", float("nan")),
        ("chips", 0),
        ("chips", 2.5),
        ("cap", 16),
        ("rounds", 0),
        ("fractions", 0),
    ],
)
def test_impossible_parameters_are_named(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}, but it must be"):
        BettingGame(**settings)


def test_impossible_questions_are_refused() -> None:
    game = BettingGame(rounds=2)
    for alpha in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="alpha is"):
            game.solve(alpha)
    solution = game.solve(0.2)
    with pytest.raises(ValueError, match="alpha is"):
        solution.cvar(0.0)
    with pytest.raises(ValueError, match="rounds_played"):
        solution.policy(16.0, 2)
