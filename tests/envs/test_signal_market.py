"""The signal market's optimum, against closed forms, brute force and play."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tailguard.envs.signal_market import SignalMarket, SignalSolution

MEAN_ABS_NORMAL = math.sqrt(2.0 / math.pi)


def steady_error_variance(phi: float, beta: float, sigma: float) -> float:
    """Iterate prediction and correction of the hidden signal until nothing changes."""
    variance = 1.0
    for _ in range(5000):
        corrected = variance - (beta * variance) ** 2 / (beta**2 * variance + sigma**2)
        variance = phi**2 * corrected + 1.0 - phi**2
    return variance


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.95, 0.999])
def test_without_cost_the_sign_of_the_signal_is_traded(phi: float) -> None:
    solution = SignalMarket(phi=phi, beta=0.1, cost=0.0).solve()
    assert solution.average_reward == pytest.approx(0.1 * MEAN_ABS_NORMAL, abs=1e-12)
    assert solution.threshold == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("phi", "beta", "sigma"), [(0.95, 0.1, 1.0), (0.9, 0.5, 0.1), (0.99, 2.0, 1.0)])
def test_without_cost_a_hidden_signal_is_worth_its_belief(phi: float, beta: float, sigma: float) -> None:
    market = SignalMarket(phi=phi, beta=beta, sigma=sigma, cost=0.0, hidden=True)
    variance = steady_error_variance(phi, beta, sigma)
    assert market.filter.error_variance == pytest.approx(variance, rel=1e-10)
    expected = beta * MEAN_ABS_NORMAL * math.sqrt(1.0 - variance)
    assert market.solve().average_reward == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3])
def test_without_autocorrelation_only_the_next_return_counts(cost: float) -> None:
    """With phi = 0 holding has no future, s(x) = beta x, and the optimum is an integral over the normal tail."""
    solution = SignalMarket(phi=0.0, beta=0.1, cost=cost).solve()
    z = cost / 0.1
    tail = 0.5 * math.erfc(z / math.sqrt(2.0))
    density = math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)
    assert solution.threshold == pytest.approx(z, abs=1e-10)
    assert solution.average_reward == pytest.approx(2.0 * (0.1 * density - cost * tail), abs=1e-12)


def brute_force(phi: float, beta: float, cost: float) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Relative value iteration over signal and position, which knows nothing of linear values or thresholds."""
    x, p = np.linspace(-6.0, 6.0, 201), np.linspace(-1.0, 1.0, 21)
    kernel = np.exp(-0.5 * (x - phi * x[:, None]) ** 2 / (1.0 - phi**2))
    kernel /= kernel.sum(axis=1, keepdims=True)
    reward = beta * x[:, None, None] * p - cost * np.abs(p - p[:, None])  # [signal, position, next position]
    value = np.zeros((len(x), len(p)))
    for _ in range(2000):
        by_action = reward + (kernel @ value)[:, None, :]
        new = by_action.max(axis=2)
        gain = new[100, 10] - value[100, 10]
        change = np.abs(new - value - gain).max()
        value = new - new[100, 10]
        if change < 1e-9:
            return float(gain), x, p, p[by_action.argmax(axis=2)]
    raise AssertionError("value iteration did not converge")


@pytest.mark.parametrize(("phi", "beta", "cost"), [(0.95, 0.1, 0.15), (0.8, 0.2, 0.3), (0.95, 0.1, 1.0)])
def test_brute_force_finds_the_same_optimum(phi: float, beta: float, cost: float) -> None:
    gain, x, p, actions = brute_force(phi, beta, cost)
    solution = SignalMarket(phi=phi, beta=beta, cost=cost).solve()
    assert solution.average_reward == pytest.approx(gain, abs=5e-5)
    clear = np.abs(np.abs(x) - solution.threshold) > 2.0 * (x[1] - x[0])
    expected = solution.policy(x[clear, None], p[None, :])
    np.testing.assert_allclose(actions[clear], expected, atol=1e-12)


def test_the_default_optimum() -> None:
    solution = SignalMarket().solve()
    assert solution.average_reward == pytest.approx(0.0663154, abs=1e-7)
    assert solution.threshold == pytest.approx(0.442981, abs=1e-6)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_higher_cost_is_worse_and_trades_less(hidden: bool) -> None:
    solutions = [SignalMarket(cost=cost, hidden=hidden).solve() for cost in (0.0, 0.05, 0.15, 0.5, 1.5, 4.0)]
    rewards = [solution.average_reward for solution in solutions]
    thresholds = [solution.threshold for solution in solutions]
    assert all(a > b for a, b in itertools.pairwise(rewards))
    assert all(a < b for a, b in itertools.pairwise(thresholds))


def test_where_nothing_can_be_earned_nothing_is_traded() -> None:
    for market in (
        SignalMarket(cost=100.0),
        SignalMarket(beta=0.0),
        SignalMarket(beta=0.0, hidden=True),
        SignalMarket(phi=0.0, hidden=True),
    ):
        solution = market.solve()
        assert (solution.average_reward, solution.threshold) == (0.0, math.inf)
        assert solution.policy(3.0, -0.4) == -0.4


def average_play(solution: SignalSolution, seed: int, num_envs: int = 8192, **settings: Any) -> tuple[float, float]:
    """Play the policy, let the start be forgotten, and return the average reward and its standard error."""
    env = SignalMarket(num_envs, episode_length=1000, seed=seed, **settings)
    obs, _ = env.reset()
    belief: np.ndarray = np.zeros(num_envs)
    total = np.zeros(num_envs)
    for step in range(550):
        belief = env.filter.step(belief, obs[:, 0]) if env.hidden else obs[:, 0]
        obs, rewards, *_ = env.step(solution.policy(belief, obs[:, 1])[:, None])
        total += rewards if step >= 150 else 0.0
    return float(total.mean() / 400), float(total.std() / 400 / math.sqrt(num_envs))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sigma": 0.05},
        {"phi": 0.8, "beta": 0.3, "cost": 0.2, "sigma": 0.1},
        {"hidden": True},
        {"hidden": True, "beta": 0.3, "sigma": 0.5},
        {"hidden": True, "phi": 0.9, "beta": 1.0, "sigma": 0.5, "cost": 1.0},
    ],
)
def test_the_policy_earns_its_optimum_in_play(settings: dict[str, Any]) -> None:
    solution = SignalMarket(**settings).solve()
    average, error = average_play(solution, seed=11, **settings)
    assert error < 0.06 * solution.average_reward  # or the comparison would say nothing
    assert abs(average - solution.average_reward) < 4.0 * error
    # On the same random numbers, no other threshold does better.
    for factor in (0.4, 2.0):
        other = SignalSolution(solution.average_reward, solution.threshold * factor)
        assert average_play(other, seed=11, **settings)[0] < average


def test_the_filter_errs_as_much_as_it_says() -> None:
    """Both variants draw the same market from one seed, so that the one shows what the other hides."""
    settings: dict[str, Any] = {"phi": 0.9, "beta": 0.5, "sigma": 0.5, "seed": 2}
    shown, hidden = SignalMarket(20_000, **settings), SignalMarket(20_000, hidden=True, **settings)
    (signals, _), (returns, _) = shown.reset(), hidden.reset()
    belief = np.zeros(20_000)
    for _ in range(60):
        belief = hidden.filter.step(belief, returns[:, 0])
        signal = signals[:, 0]
        still = np.zeros((20_000, 1))
        signals, returns = shown.step(still)[0], hidden.step(still)[0]
    squared = (signal - belief) ** 2
    error = 4.0 / math.sqrt(20_000)
    assert abs(squared.mean() - hidden.filter.error_variance) < error * squared.std()
    assert abs(np.mean((signal - belief) * belief)) < error * np.std((signal - belief) * belief)
    assert abs(np.mean(belief**2) - hidden.filter.belief_std**2) < error * np.std(belief**2)


def test_rewards_positions_and_observations_follow_the_rules() -> None:
    env = SignalMarket(1000, hidden=True, cost=0.2, seed=0)
    obs, _ = env.reset()
    assert (obs[:, 1] == 0.0).all()
    position = np.zeros(1000)
    for target in (0.5, -2.0, 1.0):
        obs, rewards, *_ = env.step(np.full((1000, 1), target))
        held = np.clip(target, -1.0, 1.0)
        np.testing.assert_allclose(rewards, held * obs[:, 0] - 0.2 * np.abs(held - position), atol=1e-6)
        np.testing.assert_allclose(obs[:, 1], held)
        position = np.full(1000, held)


def test_signal_and_returns_have_their_distribution_from_the_first_step() -> None:
    settings: dict[str, Any] = {"phi": 0.7, "beta": 0.5, "sigma": 0.8, "seed": 1}
    n, still = 200_000, np.zeros((200_000, 1))
    shown, hidden = SignalMarket(n, **settings), SignalMarket(n, hidden=True, **settings)
    x0, r0 = shown.reset()[0][:, 0], hidden.reset()[0][:, 0]
    x1, r1 = shown.step(still)[0][:, 0], hidden.step(still)[0][:, 0]
    error = 5.0 / math.sqrt(n)
    for x in (x0, x1):
        assert abs(x.mean()) < error
        assert abs(x.var() - 1.0) < 2.0 * error
    assert abs(np.mean(x0 * x1) - 0.7) < 2.0 * error
    for r in (r0, r1):
        assert abs(r.var() - (0.5**2 + 0.8**2)) < 2.0 * error
    assert abs(np.mean(x0 * r1) - 0.5) < 2.0 * error
    assert abs(np.mean(x0 * r0) - 0.7 * 0.5) < 2.0 * error
    assert abs(np.mean((r1 - 0.5 * x0) * x1)) < 2.0 * error


def test_episodes_are_only_truncated() -> None:
    env = SignalMarket(3, episode_length=4, seed=0)
    env.reset()
    for step in range(1, 13):
        obs, _, terminated, truncated, info = env.step(np.ones((3, 1)))
        assert not terminated.any()
        assert (truncated == (step % 4 == 0)).all()
        assert (obs[:, 1] == (0.0 if step % 4 == 0 else 1.0)).all()
        assert ("final_obs" in info) == (step % 4 == 0)
        if info:
            assert (info["final_obs"][:, 1] == 1.0).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("phi", 1.0), ("phi", -0.1), ("beta", -1.0), ("sigma", 0.0), ("cost", math.nan), ("episode_length", 0)],
)
def test_impossible_parameters_are_named(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}, but it must be"):
        SignalMarket(**settings)
