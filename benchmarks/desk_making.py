"""Agents that quote both sides of a market, against the exact optimum: `python benchmarks/desk_making.py`.

The value of quotes that depend on step and inventory is exact. Tails are those of 20,000 episodes, the same for all rivals. One
thread per process. Agents are trained by ``tailguard.experiments.making``, whose settings were chosen on seed 10.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from desk_execution import Arrays, main, steps_per_second, tail_of
from risk import Runner, each, share_of

from tailguard import ReturnObserver
from tailguard.envs import MarketMaking
from tailguard.envs.market_making import Quotes
from tailguard.envs.market_making_tail import TailQuotes
from tailguard.envs.streams import SEED_SPACING
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.experiments.execution import TEST_SEED
from tailguard.experiments.making import ENVS, agent_quotes, train_maker
from tailguard.parallel.reaper import reaped

PICTURE = Path(__file__).parents[1] / "docs" / "market-making.svg"
ALPHAS = (0.05, 0.1, 0.2, 0.4, 0.8)
EPISODES = 20_000
MARKETS: dict[str, dict[str, Any]] = {
    "default": {},
    "little aversion, wide limits": {"inventory_aversion": 0.2, "inventory_limit": 10, "liquidation_cost": 0.0},
    "few arrivals, close quotes": {"steps": 100, "arrival_rate": 40.0, "fill_decay": 3.0, "inventory_aversion": 1.0},
}
# For tails, wealth alone is paid for: the tail itself has to teach the agent to hold little.
WEALTH = {"steps": 100, "arrival_rate": 70.0, "volatility": 6.0, "inventory_aversion": 0.0}
MEAN_ENVS = 64
STEPS, TAIL_STEPS = 3_000_000, 4_000_000


# --------------------------------------------------------------------------------------------------------------- value


def learnt_quotes(market: dict[str, Any], seed: int, steps: int) -> Arrays:
    """The most likely quotes for each step and inventory, and the CPU seconds of the training."""
    start, env = time.process_time(), MarketMaking(MEAN_ENVS, **market)
    quotes = agent_quotes(train_maker(env, steps=steps, seed=SEED_SPACING * seed), env)
    return {"ask": quotes.ask, "bid": quotes.bid, "seconds": np.array(time.process_time() - start)}


def table_value(run: Runner) -> None:
    rivals = ("best fixed", "Avellaneda-Stoikov", "linear system")
    run.head("Value, as a share of the optimum, exact", "market", "optimum", *rivals, "goal", "agent, each seed")
    seconds = []
    for name, market in MARKETS.items():
        env = MarketMaking(**market)
        gamma = 2.0 * env.inventory_aversion / env.volatility**2  # the utility with the same price of inventory
        quotes = (env.best_fixed(), env.avellaneda_stoikov(gamma), env.linear_system())
        best = env.evaluate(env.solve()).value
        found = run.seeds(learnt_quotes, market, steps=share_of(STEPS, run.quick))
        agents = [Quotes(agent["ask"], agent["bid"]) for agent in found]
        seconds += [float(agent["seconds"]) for agent in found]
        shares = (f"{env.evaluate(rival).value / best:.4f}" for rival in quotes)
        values = ", ".join(f"{env.evaluate(agent).value / best:.4f}" for agent in agents)
        run.row(name, f"{best:.2f}", *shares, ">= 0.97", values)
        if name == "default" and not run.quick:
            draw(env, market, agents[0])
    print(f"\ntraining: {min(seconds):.0f} to {max(seconds):.0f} s of CPU per agent")


def draw(env: MarketMaking, market: dict[str, Any], agent: Quotes) -> None:
    """Draw quotes against the inventory, and one episode of mid price, quotes and inventory."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2))
    held, middle, best = np.arange(-env.inventory_limit, env.inventory_limit + 1), env.steps // 2, env.solve()
    for name, quotes, style in (("optimum", best, "k-"), ("agent", agent, "o"), ("best fixed", env.best_fixed(), "k:")):
        colour = {"color": "tab:orange"} if name == "agent" else {}
        axes[0].plot(held[1:], quotes.ask[middle, 1:], style, label=name, lw=1, **colour)
        axes[0].plot(held[:-1], -quotes.bid[middle, :-1], style, lw=1, **colour)
    axes[0].set(xlabel="inventory", ylabel="distance from the mid price", title="Ask and bid at half time")
    axes[0].legend()
    times = np.arange(env.steps) * env.dt
    mids, inventories = episode(market, agent)
    quoted = agent.at(inventories, np.arange(env.steps))
    axes[1].plot(times, mids, "k-", lw=1, label="mid price")
    axes[1].fill_between(
        times, mids - quoted[:, 1], mids + quoted[:, 0], color="tab:orange", alpha=0.4, step="post", label="quotes"
    )
    axes[1].set(xlabel="time", ylabel="price", title="An episode of the agent")
    axes[1].legend()
    spread = [(env.evaluate(quotes).inventory, name) for quotes, name in ((agent, "agent"), (env.best_fixed(), "best fixed"))]
    axes[2].step(times, inventories, "k-", lw=1, where="post", label="inventory in this episode")
    for (occupied, name), colour in zip(spread, ("tab:orange", "tab:blue"), strict=True):
        deviation = np.sqrt(occupied[:-1] @ held**2)
        axes[2].fill_between(times, -deviation, deviation, color=colour, alpha=0.25, label=f"standard deviation, {name}")
    axes[2].set(xlabel="time", ylabel="inventory", title="Inventory")
    axes[2].legend(loc="lower left", fontsize="small")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    print(f"\ndocs/{PICTURE.name} shows the quotes")


def episode(market: dict[str, Any], quotes: Quotes) -> tuple[np.ndarray, np.ndarray]:
    """Inventory of one episode, and a mid price: it does not depend on the trades, so any path goes with them."""
    maker = MarketMaking(1, seed=3, **market)
    maker.reset()
    inventories = np.empty(maker.steps, np.int64)
    for step in range(maker.steps):
        inventories[step] = maker.inventory[0]
        maker.step(maker.action(quotes.at(maker.inventory, step)))
    shocks = np.random.default_rng(3).standard_normal(maker.steps) * maker.volatility * np.sqrt(maker.dt)
    return 100.0 + np.cumsum(shocks), inventories


# --------------------------------------------------------------------------------------------------------------- tails


def wealth_of(env: Any, maker: MarketMaking, act: Callable[[np.ndarray, int], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The sums of rewards of one episode of every copy, and the largest inventory in it."""
    obs, total, largest = env.reset(), np.zeros(maker.num_envs), np.zeros(maker.num_envs, np.int64)
    for step in range(maker.steps):
        np.maximum(largest, np.abs(maker.inventory), out=largest)
        obs, rewards, _, _ = env.step(act(obs, step))
        total += rewards
    return total, largest


def quoted_wealth(quotes: Quotes) -> tuple[np.ndarray, np.ndarray]:
    maker = MarketMaking(EPISODES, **WEALTH)
    return wealth_of(
        GymVectorAdapter(maker, TEST_SEED), maker, lambda obs, step: maker.action(quotes.at(maker.inventory, step))
    )


def tail_wealth(seed: int, steps: int) -> Arrays:
    """Wealth and largest inventory of one alpha-conditioned agent, at each of the tails."""
    model = train_maker(MarketMaking(ENVS, **WEALTH), alpha=(min(ALPHAS), max(ALPHAS)), steps=steps, seed=SEED_SPACING * seed)
    results = []
    for alpha in ALPHAS:
        model.set_risk(alpha)
        maker = MarketMaking(EPISODES, **WEALTH)
        env = ReturnObserver(GymVectorAdapter(maker, TEST_SEED), 1.0)
        results.append(wealth_of(env, maker, lambda obs, step: model.predict(obs, deterministic=True)[0]))
    return {"wealth": np.stack([wealth for wealth, _ in results]), "peak": np.stack([peak for _, peak in results])}


def best_wealth(quotes: TailQuotes) -> tuple[np.ndarray, np.ndarray]:
    """Wealth and largest inventory of the exact optimum for a tail."""
    maker, total, largest = MarketMaking(EPISODES, **WEALTH), np.zeros(EPISODES), np.zeros(EPISODES, np.int64)
    maker.reset(seed=TEST_SEED)
    for step in range(maker.steps):
        np.maximum(largest, np.abs(maker.inventory), out=largest)
        total += maker.step(maker.action(quotes.at(maker.inventory, step, total)))[1]
    return total, largest


def table_tail(run: Runner) -> None:
    head = (
        "alpha",
        "optimum",
        "optimum of the mean",
        "best fixed",
        "best inventory aversion",
        "agent, each seed [95 %]",
        "mean inventory peak of the optimum",
        "of the agents",
    )
    run.head("CVaR of the final wealth, one alpha-conditioned agent; the rivals' best of a grid for each alpha", *head)
    table = MarketMaking(**WEALTH).solve_tail()
    neutral = quoted_wealth(MarketMaking(**WEALTH).solve())[0]
    fixed = [quoted_wealth(MarketMaking(**WEALTH).fixed(d))[0] for d in np.linspace(0.2, 2.0, 10)]
    averse = ({**WEALTH, "inventory_aversion": float(aversion)} for aversion in np.geomspace(0.3, 300.0, 13))
    careful = [quoted_wealth(MarketMaking(**market).solve())[0] for market in averse]
    agents = run.seeds(tail_wealth, steps=share_of(TAIL_STEPS, run.quick))
    for i, alpha in enumerate(ALPHAS):
        best = table.quotes(alpha)
        wealth, peak = best_wealth(best)
        mean, constant, family = (max(-tail_of(-w, alpha)[0] for w in rivals) for rivals in ([neutral], fixed, careful))
        tails = [tail_of(-agent["wealth"][i], alpha) for agent in agents]
        cells = ", ".join(f"{-tail:.2f} ± {width:.2f}" for tail, width in tails)
        peaks = each(agent["peak"][i].mean() for agent in agents)
        shown = f"{best.objective:.2f}, played {-tail_of(-wealth, alpha)[0]:.2f}"
        run.row(alpha, shown, f"{mean:.2f}", f"{constant:.2f}", f"{family:.2f}", cells, f"{peak.mean():.2f}", peaks)


def table_speed(run: Runner) -> None:
    run.head(
        "Speed at 64 environments, one thread", "environment", "goal", "million steps per second of CPU time, best of five"
    )
    env = MarketMaking(64, seed=0)
    env.reset()
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (256, 64, 2)).astype(np.float32)
    run.row("MarketMaking", "> 1", f"{steps_per_second(env, actions) / 1e6:.2f}")


TABLES = {"speed": table_speed, "value": table_value, "tail": table_tail}

if __name__ == "__main__":
    with reaped():  # whatever ends this process, those of its pool end, too
        main(TABLES, __doc__, train_maker)
