"""Market making: the dynamic program against brute force, the linear system as its limit, and both against play."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from single_and_batch import assert_equal_to_the_bit
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from tailguard.envs import MarketMaking
from tailguard.envs.market_making import Quotes

SMALL: dict[str, Any] = {"steps": 6, "horizon": 0.1, "arrival_rate": 50.0, "inventory_limit": 2}
MARKETS: list[dict[str, Any]] = [
    SMALL,
    {**SMALL, "inventory_aversion": 30.0, "liquidation_cost": 0.2},
    {**SMALL, "fill_decay": 0.7, "inventory_aversion": 0.0, "max_distance": 1.2},
]


def returns_of(env: MarketMaking, quotes: Quotes, seed: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of rewards of one episode of every copy, and the inventory before its last step."""
    env.reset(seed=seed)
    total = np.zeros(env.num_envs)
    for step in range(env.steps):
        inventory = env.inventory
        _, rewards, terminated, truncated, _ = env.step(env.action(quotes.at(inventory, step)))
        total += rewards
        assert not truncated.any()
        assert terminated.all() == (step == env.steps - 1)
    return total, inventory


@pytest.mark.parametrize("settings", MARKETS)
def test_no_pair_of_quotes_is_better_in_any_step_and_inventory(settings: dict[str, Any]) -> None:
    """Brute force over a grid of pairs, with the four outcomes of a step written out."""
    env = MarketMaking(**settings)
    solved, limit = env.solve(), env.inventory_limit
    inventories = np.arange(-limit, limit + 1)
    distances = np.linspace(0.0, env.max_distance, 301)
    fill = env.arrival_rate * env.dt * np.exp(-env.fill_decay * distances)

    def worth(value: np.ndarray, q: int) -> float:
        return value[q + limit] - env.inventory_aversion * q**2 * env.dt if abs(q) <= limit else 0.0

    def one_step(value: np.ndarray, q: int, a: Any, b: Any, sold: Any, bought: Any) -> Any:
        sold, bought = sold * (q > -limit), bought * (q < limit)
        return (
            sold * bought * (a + b + worth(value, q))
            + sold * (1.0 - bought) * (a + worth(value, q - 1))
            + (1.0 - sold) * bought * (b + worth(value, q + 1))
            + (1.0 - sold) * (1.0 - bought) * worth(value, q)
        )

    value = -env.liquidation_cost * np.abs(inventories)
    for step in range(env.steps - 1, -1, -1):
        now = np.empty(len(inventories))
        for q in inventories:
            a, b = solved.at(q, step)
            now[q + limit] = one_step(value, q, a, b, *(env.arrival_rate * env.dt * np.exp(-env.fill_decay * np.array([a, b]))))
            brute = one_step(value, q, distances[:, None], distances, fill[:, None], fill).max()
            assert now[q + limit] >= brute - 1e-12
            assert now[q + limit] == pytest.approx(brute, abs=1e-4)
        value = now
    assert env.evaluate(solved).value == pytest.approx(value[limit], abs=1e-10)


def test_with_many_steps_the_optimum_solves_the_linear_system() -> None:
    errors, values = [], []
    for steps in (500, 5000):
        gentle = {"inventory_aversion": 0.5, "liquidation_cost": 0.3, "inventory_limit": 3}  # no quote reaches the mid price
        env = MarketMaking(steps=steps, arrival_rate=50.0, max_distance=20.0, **gentle)
        best, limit = env.solve(), env.linear_system()
        assert limit.ask.min() > 0.0
        errors.append(np.abs(best.ask - limit.ask)[:, 1:].max())
        values.append(env.evaluate(limit).value / env.evaluate(best).value)
    assert errors[1] < errors[0] / 7.0  # of first order in dt
    assert errors[1] < 0.01
    assert 1.0 - 1e-4 < values[1] <= 1.0


def test_little_risk_aversion_makes_exponential_utility_a_running_penalty() -> None:
    """For gamma to 0 the two linear systems agree, with inventory_aversion = gamma sigma^2 / 2."""
    gamma = 1e-4
    env = MarketMaking(inventory_aversion=gamma * 2.0**2 / 2.0)
    utility, penalty = env.exponential_utility(gamma), env.linear_system()
    np.testing.assert_allclose(utility.ask, penalty.ask, atol=1e-4)
    np.testing.assert_allclose(utility.bid, penalty.bid, atol=1e-4)


def test_exponential_utility_is_highest_for_its_own_quotes() -> None:
    env = MarketMaking(20_000, steps=100, inventory_aversion=0.0, arrival_rate=80.0, inventory_limit=3)
    gamma = 0.5
    base = env.exponential_utility(gamma)
    utility = {}
    for name, quotes in (("best", base), ("wider", Quotes(base.ask + 0.4, base.bid + 0.4)), ("neutral", env.linear_system())):
        wealth, _ = returns_of(env, Quotes(np.minimum(quotes.ask, env.max_distance), np.minimum(quotes.bid, env.max_distance)))
        utility[name] = -np.log(np.mean(np.exp(-gamma * (wealth - 20.0)))) / gamma
    assert utility["best"] > utility["wider"]
    assert utility["best"] > utility["neutral"]


def test_quotes_are_mirrored_and_lean_against_the_inventory() -> None:
    env = MarketMaking()
    for quotes in (env.solve(), env.linear_system(), env.exponential_utility(0.3), env.avellaneda_stoikov(0.3)):
        np.testing.assert_allclose(quotes.ask[:, 1:], quotes.bid[:, ::-1][:, 1:], atol=1e-9)
        assert (np.diff(quotes.ask[:, 1:], axis=1) <= 1e-12).all()  # the more is held, the cheaper it is sold


@pytest.mark.parametrize("kind", ["solve", "fixed"])
def test_play_has_the_value_and_the_inventory_that_were_computed(kind: str) -> None:
    env = MarketMaking(10_000, steps=60, arrival_rate=40.0)
    quotes = env.solve() if kind == "solve" else env.fixed(0.5)
    exact = env.evaluate(quotes)
    returns, inventory = returns_of(env, quotes)
    assert returns.mean() == pytest.approx(exact.value, abs=4.0 * returns.std() / 100.0)
    shares = np.bincount(inventory + env.inventory_limit, minlength=11) / env.num_envs
    assert shares == pytest.approx(exact.inventory[-2], abs=4.0 * 0.5 / 100.0)
    assert exact.inventory.sum(axis=1) == pytest.approx(1.0)


def test_expected_rewards_have_the_same_mean_and_less_noise() -> None:
    market = {"steps": 60, "arrival_rate": 40.0, "volatility": 6.0}
    env = MarketMaking(10_000, **market, expected_rewards=True)
    returns = returns_of(env, env.solve())[0]
    assert returns.mean() == pytest.approx(env.evaluate(env.solve()).value, abs=4.0 * returns.std() / 100.0)
    assert returns.std() < 0.7 * returns_of(MarketMaking(10_000, **market), env.solve())[0].std()


def test_the_best_fixed_quotes_are_the_best_of_many_and_worse_than_the_optimum() -> None:
    env = MarketMaking()
    best = env.evaluate(env.best_fixed()).value
    assert best >= max(env.evaluate(env.fixed(distance)).value for distance in np.linspace(0.0, env.max_distance, 50)) - 1e-6
    assert best < 0.8 * env.evaluate(env.solve()).value


def test_observations_and_actions_of_a_policy_are_its_quotes() -> None:
    env = MarketMaking(1, **SMALL)
    quotes = env.solve()
    again = env.quotes_of_actions(env.action(np.stack((quotes.ask, quotes.bid), axis=-1)))
    np.testing.assert_allclose(again.ask, quotes.ask, atol=1e-12)
    table, obs = env.observations(), env.reset(seed=0)[0]
    for step in range(env.steps):
        assert np.array_equal(obs[0], table[step, env.inventory[0] + env.inventory_limit])
        obs = env.step(np.full((1, 2), -1.0))[0]


def test_a_copy_in_a_batch_and_alone_are_equal_to_the_bit() -> None:
    assert_equal_to_the_bit(MarketMaking, "tailguard/MarketMaking-v0", SMALL)


def test_the_environment_is_checked_by_gymnasium_and_by_sb3() -> None:
    single = gym.make("tailguard/MarketMaking-v0")
    check_env(single.unwrapped, skip_render_check=True)
    check_env_sb3(single.unwrapped)
    assert isinstance(gym.make_vec("tailguard/MarketMaking-v0", num_envs=3), MarketMaking)


def test_the_inventory_stays_within_its_limits() -> None:
    env = MarketMaking(200, steps=100, arrival_rate=60.0, inventory_limit=2)
    env.reset(seed=0)
    seen = set()
    for _ in range(99):
        env.step(np.full((200, 2), -1.0))
        seen |= set(env.inventory.tolist())
    assert seen == {-2, -1, 0, 1, 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("horizon", np.nan),
        ("volatility", -1.0),
        ("arrival_rate", 201.0),
        ("fill_decay", 0.0),
        ("inventory_limit", 0),
        ("inventory_aversion", -1.0),
        ("liquidation_cost", np.inf),
        ("max_distance", 0.0),
    ],
)
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        MarketMaking(**{name: value})


def test_impossible_questions_are_refused() -> None:
    env = MarketMaking(**SMALL)
    with pytest.raises(ValueError, match="distance"):
        env.fixed(-0.1)
    with pytest.raises(ValueError, match="risk_aversion"):
        env.exponential_utility(0.0)
    with pytest.raises(ValueError, match="shape"):
        env.evaluate(MarketMaking().solve())
