"""Quotes for the tail of the wealth: the dynamic program against closed forms, against play, and against its limits."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from tailguard.envs import MarketMaking
from tailguard.envs.market_making_tail import TailQuotes, TailTable

SMALL: dict[str, Any] = {"steps": 20, "horizon": 0.2, "arrival_rate": 70.0, "volatility": 6.0, "inventory_limit": 2}
ALPHA = 0.1


@pytest.fixture(scope="module")
def table() -> TailTable:
    return MarketMaking(**SMALL, inventory_aversion=0.0).solve_tail()


def worst(totals: np.ndarray, alpha: float) -> tuple[float, float]:
    """Return the average of the worst share of totals, and its standard error (Rockafellar and Uryasev's terms)."""
    cap = np.quantile(totals, alpha)
    terms = cap + np.minimum(totals - cap, 0.0) / alpha
    return float(terms.mean()), float(terms.std() / np.sqrt(len(totals)))


def play(env: MarketMaking, act: Any) -> np.ndarray:
    env.reset(seed=7)
    total = np.zeros(env.num_envs)
    for step in range(env.steps):
        total += env.step(env.action(act(env.inventory, step, total)))[1]
    return total


def test_in_one_step_no_pair_of_quotes_is_better() -> None:
    """Brute force over all pairs, with the four outcomes of a step and E[min(x + s X, 0)] of a normal X written out."""
    env = MarketMaking(
        steps=1,
        horizon=0.01,
        arrival_rate=70.0,
        volatility=6.0,
        inventory_limit=1,
        liquidation_cost=0.3,
        inventory_aversion=5.0,
    )
    found = env.solve_tail(points=20)
    distances = found.spacing * np.arange(21)
    fill = env.arrival_rate * env.dt * np.exp(-env.fill_decay * distances)
    spread, held = env.volatility * np.sqrt(env.dt), env.liquidation_cost + env.inventory_aversion * env.dt

    def short_of(x: np.ndarray, inventory: int) -> np.ndarray:
        if inventory == 0:
            return np.minimum(x, 0.0)
        z = (x - held) / spread
        return spread * (z * norm.cdf(-z) - norm.pdf(z))

    a, sold, b, bought = distances[:, None], fill[:, None], distances, fill
    for point, value in enumerate(found.values):
        y = found.least + found.spacing * point
        all_pairs = (
            sold * bought * short_of(y + a + b, 0)
            + sold * (1.0 - bought) * short_of(y + a, -1)
            + (1.0 - sold) * bought * short_of(y + b, 1)
            + (1.0 - sold) * (1.0 - bought) * short_of(np.array(y), 0)
        )
        # At the end values have a kink, which few nodes and points see to a fraction of the move of the price.
        assert value == pytest.approx(all_pairs.max(), abs=0.02 * spread)


def test_the_whole_distribution_is_the_mean(table: TailTable) -> None:
    env = MarketMaking(**SMALL, inventory_aversion=0.0)
    assert table.quotes(1.0).objective == pytest.approx(env.evaluate(env.solve()).value, rel=0.005)


def test_play_has_the_tail_that_was_computed_and_no_rival_has_a_better_one(table: TailTable) -> None:
    env, best = MarketMaking(20_000, **SMALL, inventory_aversion=0.0), table.quotes(ALPHA)
    reached, error = worst(play(env, best.at), ALPHA)
    assert reached == pytest.approx(best.objective, abs=4.0 * error)
    for aversion in (0.0, 3.0, 10.0, 30.0):
        rival = MarketMaking(**SMALL, inventory_aversion=aversion).solve()
        tail, rivals_error = worst(play(env, lambda q, step, total, rival=rival: rival.at(q, step)), ALPHA)
        assert tail < best.objective + 4.0 * rivals_error


def test_a_smaller_tail_holds_less(table: TailTable) -> None:
    env = MarketMaking(5_000, **SMALL, inventory_aversion=0.0)

    def holdings(quotes: TailQuotes) -> float:
        held: list[float] = []

        def act(inventory: np.ndarray, step: int, total: np.ndarray) -> np.ndarray:
            held.append(float(np.abs(inventory).mean()))
            return quotes.at(inventory, step, total)

        play(env, act)
        return float(np.mean(held))

    shown = [holdings(table.quotes(alpha)) for alpha in (0.05, 0.3, 1.0)]
    assert shown[0] < shown[1] < shown[2]
    assert table.quotes(0.05).objective < table.quotes(0.3).objective < table.quotes(1.0).objective


def test_impossible_questions_are_refused(table: TailTable) -> None:
    with pytest.raises(ValueError, match="alpha"):
        table.quotes(0.0)
    with pytest.raises(ValueError, match="points"):
        MarketMaking(**SMALL).solve_tail(points=1)
