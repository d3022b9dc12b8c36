"""Optimal execution: the closed form against a quadratic program, the dynamic program against both, and all against play."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from single_and_batch import assert_equal_to_the_bit
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from tailguard.envs import OptimalExecution
from tailguard.envs.optimal_execution import ExecutionSolution, Schedule

REGIMES = {
    "transition": [[0.8, 0.15, 0.05], [0.1, 0.8, 0.1], [0.05, 0.15, 0.8]],
    "impact_factors": [0.4, 1.0, 2.5],
    "drifts": [-60.0, 0.0, 60.0],
}
MARKETS: list[dict[str, Any]] = [
    {},
    {"steps": 7, "horizon": 5.0, "volatility": 190.0, "temporary_impact": 500.0, "permanent_impact": 50.0, "half_spread": 12.5},
    {"steps": 12, "permanent_impact": 0.0, "half_spread": 0.0, "horizon": 0.5},
]
LAMBDAS = [0.0, 1e-4, 1e-2, 1e-1, 10.0]


def best_trades(env: OptimalExecution, risk_aversion: float) -> np.ndarray:
    """Return the trades of the least mean + risk_aversion variance by the conditions of the quadratic program itself.

    What is left is 1 - L n, with L the lower triangle of ones.
    """
    n = env.steps
    tril = np.tril(np.ones((n, n)))
    # cost(n) = half_spread sum n + n' D n + permanent n'(1 - L n) + aversion volatility^2 tau |1 - L n|^2
    scale = risk_aversion * env.volatility**2 * env.tau
    quadratic = np.diag(env.impact[:, 0]) - env.permanent_impact * tril + scale * tril.T @ tril
    linear = (env.half_spread + env.permanent_impact) * np.ones(n) - 2.0 * scale * tril.T @ np.ones(n)
    system = np.block([[quadratic + quadratic.T, np.ones((n, 1))], [np.ones((1, n)), np.zeros((1, 1))]])
    return np.linalg.solve(system, np.append(-linear, 1.0))[:n]


def costs_of(env: OptimalExecution, policy: Any, seed: int = 5) -> np.ndarray:
    """Return the sum of rewards of one episode of every copy, with its sign reversed, under trades(left, step, regime)."""
    env.reset(seed=seed)
    total, running = np.zeros(env.num_envs), np.ones(env.num_envs, bool)
    for step in range(env.steps):
        left = env.left
        share = np.where(running, policy(left, step, env.regime) / np.maximum(left, 1e-300), 0.0)
        actions = env.action(np.clip(share, 0.0, 1.0), np.full(env.num_envs, step))
        _, rewards, terminated, truncated, _ = env.step(actions[:, None])
        total += np.where(running, rewards, 0.0)
        running &= ~terminated
        assert not truncated.any()
    assert not running.any()
    return -total


def play(env: OptimalExecution, rival: Schedule | ExecutionSolution) -> np.ndarray:
    if isinstance(rival, ExecutionSolution):
        return costs_of(env, rival.trade)
    left_after = np.append(1.0 - np.cumsum(rival.trades), 0.0)
    return costs_of(env, lambda left, step, regime: np.clip(left - left_after[step], 0.0, None))


@pytest.mark.parametrize("risk_aversion", LAMBDAS)
@pytest.mark.parametrize("market", MARKETS)
def test_the_closed_form_solves_the_quadratic_program(market: dict[str, Any], risk_aversion: float) -> None:
    env = OptimalExecution(**market)
    np.testing.assert_allclose(env.almgren_chriss(risk_aversion).trades, best_trades(env, risk_aversion), atol=1e-9)


def test_no_risk_aversion_is_even_selling_and_much_of_it_sells_at_once() -> None:
    env = OptimalExecution()
    np.testing.assert_allclose(env.almgren_chriss(0.0).trades, env.twap().trades, atol=1e-12)
    assert env.almgren_chriss(1e6).trades[0] > 0.99
    frontier = env.frontier(np.geomspace(1e-5, 1e2, 30).tolist())
    assert np.all(np.diff([point.expected_cost for point in frontier]) > 0.0)
    assert np.all(np.diff([point.variance for point in frontier]) < 0.0)


def test_vwap_is_best_where_volume_is_uneven_and_risk_does_not_count() -> None:
    volumes = 1.0 + np.cos(np.linspace(0.0, 2.0 * np.pi, 20)) / 2.0
    env = OptimalExecution(volume_profile=3.0 * volumes, permanent_impact=0.0)
    np.testing.assert_allclose(env.vwap().trades, best_trades(env, 0.0), atol=1e-12)
    assert env.vwap().expected_cost < env.twap().expected_cost
    assert OptimalExecution().vwap().trades == pytest.approx(OptimalExecution().twap().trades)


@pytest.mark.parametrize("market", [*MARKETS, {"volume_profile": np.linspace(2.0, 0.5, 20)}])
def test_the_dynamic_program_finds_the_quadratic_program_without_a_signal(market: dict[str, Any]) -> None:
    env = OptimalExecution(**market)
    for risk_aversion in (0.0, 1e-3, 3e-2):
        best = env.schedule(np.maximum(best_trades(env, risk_aversion), 0.0)).objective(risk_aversion)
        found = env.solve(risk_aversion).objective
        assert best - 1e-9 <= found <= best + env.steps * env.impact.max() / 1000.0**2


def test_with_liquidity_alone_the_best_share_of_what_is_left_is_a_recursion() -> None:
    """The value is A x^2 + half_spread x: another way to solve it, for which no grid is needed."""
    env = OptimalExecution(transition=REGIMES["transition"], impact_factors=REGIMES["impact_factors"], risk_aversion=0.02)
    risk = env.aversion_range[0] * env.volatility**2 * env.tau
    curvature = env.impact[-1].copy()
    for step in range(env.steps - 2, -1, -1):
        later = risk + env.transition @ curvature - env.permanent_impact / 2.0
        now = env.impact[step] - env.permanent_impact / 2.0
        curvature = now * later / (now + later) + env.permanent_impact / 2.0
    exact = float(env.stationary @ curvature) + env.half_spread
    assert exact <= env.solve().objective <= exact + env.steps * env.impact.max() / 1000.0**2


def test_play_has_the_mean_and_the_variance_of_a_schedule() -> None:
    env = OptimalExecution(40_000, risk_aversion=0.0, seed=0)
    for schedule in (env.twap(), env.almgren_chriss(0.02)):
        costs = play(env, schedule)
        assert costs.mean() == pytest.approx(schedule.expected_cost, abs=4.0 * costs.std() / 200.0)
        assert costs.var() == pytest.approx(schedule.variance, rel=4.0 * np.sqrt(2.0 / 40_000))
        assert np.mean((costs - costs.mean()) ** 3) / costs.std() ** 3 == pytest.approx(0.0, abs=4.0 * np.sqrt(6.0 / 40_000))


def test_expected_rewards_are_the_objective_of_a_schedule_without_noise() -> None:
    env = OptimalExecution(5, risk_aversion=0.01, expected_rewards=True)
    for schedule in (env.twap(), env.almgren_chriss(0.01)):
        np.testing.assert_allclose(play(env, schedule), schedule.objective(0.01), rtol=1e-9)


def test_relative_rewards_are_parts_of_what_almgren_and_chriss_pay() -> None:
    market: dict[str, Any] = {"risk_aversion": (1e-3, 1.0), "expected_rewards": True, "drifts": [30.0]}
    env, relative = OptimalExecution(50, **market), OptimalExecution(50, relative_rewards=True, **market)
    env.reset(seed=2)
    relative.reset(seed=2)
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (50, 1))
    ratios = env.step(actions)[1] / relative.step(actions)[1]
    driftless = OptimalExecution(risk_aversion=0.0)
    paid = [(driftless.almgren_chriss(a).objective(a), driftless.twap().objective(a)) for a in env.risk_aversion]
    np.testing.assert_allclose(ratios, [max(best, 0.1 * even) for best, even in paid], rtol=1e-3)
    sold_at_once = OptimalExecution(
        temporary_impact=0.1, permanent_impact=50.0, relative_rewards=True, risk_aversion=(1e-3, 1.0)
    )
    assert sold_at_once.haste_cost < 0.0  # no closed form
    sold_at_once.reset(seed=0)
    assert np.isfinite(sold_at_once.step(np.zeros((1, 1)))[1]).all()


def test_the_price_of_risk_is_part_of_the_reward() -> None:
    env, plain = (OptimalExecution(50, risk_aversion=aversion) for aversion in (0.03, 0.0))
    schedule = env.almgren_chriss(0.03)
    np.testing.assert_allclose(play(env, schedule) - play(plain, schedule), 0.03 * schedule.variance, rtol=1e-9)


def test_play_of_the_solved_policy_costs_what_was_computed_and_less_than_any_schedule() -> None:
    env = OptimalExecution(20_000, risk_aversion=0.003, **REGIMES)
    solution = env.solve()
    solved = play(env, solution)
    assert solved.mean() == pytest.approx(solution.objective, abs=4.0 * solved.std() / np.sqrt(len(solved)))
    for rival in (env.twap(), env.almgren_chriss(0.003)):
        lead = play(env, rival) - solved  # the same prices
        assert lead.mean() > 4.0 * lead.std() / np.sqrt(len(lead))
        assert play(env, rival).mean() == pytest.approx(rival.objective(0.003), abs=4.0 * solved.std() / np.sqrt(len(solved)))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.999, 1.0])
def test_an_action_sells_the_share_that_it_was_made_for(share: float) -> None:
    env = OptimalExecution(3, steps=6)
    env.reset(seed=0)
    env.step(env.action([0.3, 0.4, 0.5], np.zeros(3))[:, None])
    before = env.left
    env.step(env.action(np.full(3, share), np.ones(3))[:, None])
    expected = np.where(share == 1.0, 1.0, before * (1.0 - share))  # a sold order is followed by a new one
    np.testing.assert_allclose(env.left, expected, atol=1e-12)
    np.testing.assert_allclose(env.share(env.action(share, 1), 1), share, atol=1e-12)


def test_all_that_is_left_is_sold_in_the_last_step() -> None:
    env = OptimalExecution(2, steps=3, volatility=0.0, risk_aversion=0.0)
    env.reset(seed=0)
    for _ in range(2):
        _, rewards, terminated, _, _ = env.step(np.full((2, 1), -1.0))
        assert not terminated.any()
        assert rewards == pytest.approx(0.0)
    _, rewards, terminated, _, info = env.step(np.full((2, 1), -1.0))
    assert terminated.all()
    assert rewards == pytest.approx(-(1.0 + 20.0 * 3.0))
    assert info["final_obs"] == pytest.approx(np.zeros((2, 2)))


def test_a_range_of_risk_aversions_is_drawn_evenly_in_the_logarithm_and_shown() -> None:
    env = OptimalExecution(4000, risk_aversion=(1e-4, 1e-1), **REGIMES)
    obs, _ = env.reset(seed=3)
    assert obs.shape == (4000, 6)
    assert obs[:, 2] == pytest.approx(2.0 * np.log(env.risk_aversion / 1e-4) / np.log(1e3) - 1.0, abs=1e-6)
    assert obs[:, 2].mean() == pytest.approx(0.0, abs=4.0 / np.sqrt(3.0 * 4000))
    assert obs[:, 2].std() == pytest.approx(1.0 / np.sqrt(3.0), rel=0.05)
    shares = obs[:, 3:].mean(axis=0)
    assert shares == pytest.approx(env.stationary, abs=4.0 * 0.5 / np.sqrt(4000))
    assert env.stationary @ env.transition == pytest.approx(env.stationary)


@pytest.mark.parametrize("settings", [{}, {"risk_aversion": (1e-3, 1e-1), "steps": 4, **REGIMES}])
def test_a_copy_in_a_batch_and_alone_are_equal_to_the_bit(settings: dict[str, Any]) -> None:
    assert_equal_to_the_bit(OptimalExecution, "tailguard/OptimalExecution-v0", settings)


def test_the_environment_is_checked_by_gymnasium_and_by_sb3() -> None:
    single = gym.make("tailguard/OptimalExecution-v0", risk_aversion=(1e-3, 1e-1), **REGIMES)
    check_env(single.unwrapped, skip_render_check=True)
    check_env_sb3(single.unwrapped)
    batch = gym.make_vec("tailguard/OptimalExecution-v0", num_envs=3, steps=5)
    assert isinstance(batch, OptimalExecution)
    assert batch.num_envs == 3


def test_a_saved_state_continues_as_if_nothing_had_happened() -> None:
    env, other = OptimalExecution(4, **REGIMES), OptimalExecution(4, **REGIMES)
    env.reset(seed=1)
    other.reset(seed=2)
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (40, 4, 1))
    for action in actions[:13]:
        env.step(action)
    other.load_state_dict(env.state_dict())
    for action in actions[13:]:
        mine, its = env.step(action), other.step(action)
        assert all(np.array_equal(a, b) for a, b in zip(mine[:4], its[:4], strict=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("horizon", 0.0),
        ("volatility", -1.0),
        ("temporary_impact", 0.0),
        ("permanent_impact", np.nan),
        ("half_spread", -1.0),
        ("risk_aversion", -0.1),
        ("risk_aversion", (0.1, 0.01)),
        ("volume_profile", [1.0, 2.0]),
        ("transition", [[0.5, 0.4], [0.5, 0.5]]),
        ("impact_factors", [1.0, 2.0]),
        ("impact_factors", [0.0]),
        ("drifts", [np.inf]),
    ],
)
def test_impossible_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        OptimalExecution(**{name: value})


def test_impossible_questions_are_refused() -> None:
    env = OptimalExecution(risk_aversion=(0.01, 0.1))
    with pytest.raises(ValueError, match="risk_aversion"):
        env.solve()
    with pytest.raises(ValueError, match="trades"):
        env.schedule(np.ones(20))
    with pytest.raises(ValueError, match="temporary_impact"):
        OptimalExecution(temporary_impact=0.1).almgren_chriss(0.1)
