"""Measure copying and exploring on problems with known answers, and print markdown tables.

The paper's toy (Jaderberg et al. 2017, figure 2): two members, 200 steps, a decision every 10; the best attainable Q is 1.1995,
with h = (1, 1) at every step. The moving optimum: four members, a hyperparameter whose best value
crosses the range; the best attainable total is the horizon. Agents: see `population_agents.py`.

    python benchmarks/population.py [toys] [search] [throughput] [pause] [spike] [--ray]
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
from population_toys import MovingOptimum, PaperToy

from tailguard.parallel.reaper import reaped
from tailguard.population import PBTConfig, PBTScheduler
from tailguard.population.engines.serial import SerialEngine
from tailguard.population.operators import explore

ROUNDS, INTERVAL = 20, 10


def toy(seed: int, **settings) -> float:
    """The best Q of a population."""
    config = PBTConfig(population_size=2, perturbation_interval=INTERVAL, hyperparams=PaperToy.search, seed=seed, **settings)
    engine = SerialEngine(PBTScheduler(config, PaperToy.initial), PaperToy)
    engine.run(ROUNDS)
    return max(learner.score() for learner in engine.learners)


def loners(seed: int, exploring: bool) -> float:
    """The best Q of two that never copy; if exploring, they perturb after every interval."""
    rng, best = np.random.default_rng(seed), []
    for member_id, hyperparams in enumerate(PaperToy.initial):
        learner = PaperToy(member_id, hyperparams, 0)
        for _ in range(ROUNDS):
            learner.train(INTERVAL)
            if exploring:
                learner.hyperparams = explore(PaperToy.search, learner.hyperparams, "perturb", rng)
        best.append(learner.score())
    return max(best)


def moving(seed: int, method: str) -> float:
    """The best true total of a population."""
    config = PBTConfig(
        population_size=4, perturbation_interval=INTERVAL, hyperparams=MovingOptimum.search, explore_method=method, seed=seed
    )
    engine = SerialEngine(PBTScheduler(config), MovingOptimum)
    engine.run(MovingOptimum.horizon // INTERVAL)
    return max(learner.total for learner in engine.learners)


def row(name: str, run: Callable[[int], float], seeds: int) -> str:
    start = time.thread_time()
    results = np.array([run(seed) for seed in range(seeds)])
    ms = 1e3 * (time.thread_time() - start) / seeds
    low, median, high = np.quantile(results, [0.05, 0.5, 0.95])
    return f"| {name} | {median:.4f} | {low:.4f} | {high:.4f} | {ms:.1f} |"


def toys(seeds: int) -> None:
    columns = f"median of {seeds} seeds | 5 % | 95 % | CPU ms per run |\n|---|---|---|---|---|"
    print(f"Paper's toy, best Q\n\n| | {columns}")
    own = {"inherit_hyperparams": False}
    print(row("grid search", lambda seed: loners(seed, False), seeds))
    print(row("explore only", lambda seed: loners(seed, True), seeds))
    print(row("exploit only", lambda seed: toy(seed, explore_method="none", **own), seeds))
    print(row("PBT, own hyperparameters kept", lambda seed: toy(seed, explore_method="perturb", **own), seeds))
    print(row("PBT, hyperparameters copied", lambda seed: toy(seed, explore_method="perturb"), seeds))
    print(row("PB2", lambda seed: toy(seed, explore_method="pb2"), seeds))
    print(f"\nMoving optimum, best total of {MovingOptimum.horizon}\n\n| | {columns}")
    for method in ("none", "perturb", "resample", "both", "pb2"):
        print(row(method, lambda seed, method=method: moving(seed, method), seeds))


PARTS = ("toys", "search", "throughput", "pause", "spike")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--seeds", type=int, default=200, help="of the toys")
    parser.add_argument("--agent-seeds", type=int, default=5)
    parser.add_argument("--horizon", type=int, default=180, help="updates of an agent in the search")
    parser.add_argument("--only", help="of the search: the ways whose name has this in it")
    parser.add_argument("--updates", type=int, default=40, help="updates of an interval whose throughput is measured")
    parser.add_argument("--ray", action="store_true", help="measure Ray, too")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}")
    parts = set(args.parts or PARTS)
    if "toys" in parts:
        toys(args.seeds)
    if parts == {"toys"}:
        return
    import population_agents as agents

    if "pause" in parts:
        agents.pause()
    if "throughput" in parts:
        agents.idle_round(args.ray)
        agents.throughput(args.updates, args.ray)
    if "spike" in parts:
        agents.spike(args.agent_seeds)
    if "search" in parts:
        agents.search(args.agent_seeds, args.horizon, args.only)


if __name__ == "__main__":
    with reaped():  # whatever ends this process, those of its pool end, too
        main()
