"""Option hedging: agents against the hedges of the literature and an exact optimum: `python benchmarks/desk_hedging.py`.

All hedges meet the same test paths, which no agent was trained on. Whalley and Wilmott's risk aversion is tuned on the test
paths themselves, an advantage for the rival. Intervals are bootstrapped over paths and seeds. Every agent is trained on one
thread by ``tailguard.experiments.hedging``, whose settings were chosen on seed 100. Finished agents are kept in a folder, so a
run that was stopped continues where it was.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from desk_execution import fingerprint

from tailguard.envs import BandHedging, BlockBootstrap, GeometricBrownianMotion, Heston, Option, OptionHedging
from tailguard.envs.hedging_rivals import (
    HedgingResult,
    delta_hedge,
    expected_shortfall,
    leland,
    no_hedge,
    play_hedge,
    tune_whalley_wilmott,
)
from tailguard.envs.streams import SEED_SPACING
from tailguard.experiments.hedging import ENVS, TEST_SEED, play_hedger, train_hedger

ALPHA = 0.05
STEPS = 2_000_000
TREE = GeometricBrownianMotion(shocks="trinomial")
FRONTIER = (0.05, 0.1, 0.2, 0.4, 0.8)
CASES: dict[str, dict[str, Any]] = {
    "no costs": {},
    "costs 0.1 %": {"cost": 0.001},
    "costs 0.5 %": {"cost": 0.005},
    "costs 1 %": {"cost": 0.01},
    "Heston": {"process": Heston()},
    "Heston, costs 0.1 %": {"process": Heston(), "cost": 0.001},
    "60 dates, 3 months, costs 0.5 %": {"cost": 0.005, "dates": 60, "maturity": 0.25},
    "put spread 95/90, costs 0.5 %": {"cost": 0.005, "book": (Option("put", 95.0), Option("put", 90.0, 1.0)), "limit": 1.0},
    "down-and-out put 100/92, costs 0.5 %": {"cost": 0.005, "book": (Option("put", knock_out=92.0),)},
    "fixed cost 0.05, costs 0.1 %": {"cost": 0.001, "fixed_cost": 0.05},
    "bootstrapped returns with fat tails, costs 0.5 %": {
        "cost": 0.005,
        "process": BlockBootstrap(np.random.default_rng(0).standard_t(3, 2000) * 0.2 / np.sqrt(3.0 * 252.0)),
    },
}
SMALL: dict[str, dict[str, Any]] = {
    f"5 dates on a tree, costs {100.0 * cost:g} %": {"process": TREE, "dates": 5, "cost": cost} for cost in (0.0, 0.005, 0.01)
}


class Bench:
    """Trains agents, once each, and prints tables.

    :param options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder: Path = options.folder
        self.cases = tuple(options.cases.split(";"))
        self.resamples = 20 if options.quick else 300
        self.seeds = range(options.first, options.first + options.seeds)
        self.steps = options.steps // 20 if options.quick else options.steps
        self.paths = 5_000 if options.quick else 20_000

    def chosen(self, cases: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        return [(name, settings) for name, settings in cases.items() if name.startswith(self.cases)]

    def agent(
        self, case: str, settings: dict[str, Any], seed: int, alpha: Any, tails: tuple[float | None, ...]
    ) -> dict[str, Any]:
        """Return the results of an agent on the test paths at each of its tails, and its time of training."""
        question = fingerprint(train_hedger, settings, alpha, tails, self.steps, self.paths)
        name = "".join(c if c.isalnum() else "-" for c in f"{case} {alpha} {seed}")
        path = self.folder / f"{name}-{question}.npz"
        if not path.exists():
            start = time.perf_counter(), time.process_time()
            model = train_hedger(BandHedging(ENVS, **settings), alpha=alpha, steps=self.steps, seed=SEED_SPACING * seed)
            seconds = [time.perf_counter() - start[0], time.process_time() - start[1]]
            results = [play_hedger(model, BandHedging(self.paths, **settings), TEST_SEED, tail) for tail in tails]
            self.folder.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(path, results=np.array(results, np.float32), seconds=seconds)
        kept = np.load(path)
        results = [HedgingResult(*result) for result in kept["results"].astype(np.float64)]
        return {"results": results, "seconds": kept["seconds"]}

    def agents(
        self, case: str, settings: dict[str, Any], alpha: Any = ALPHA, tails: tuple[float | None, ...] = (None,)
    ) -> list[Any]:
        return [self.agent(case, settings, seed, alpha, tails) for seed in self.seeds]


def cvar_ratio(bench: Bench, agents: list[np.ndarray], rival: np.ndarray, alpha: float) -> tuple[float, float, float]:
    """Return the mean over seeds of the ratio of CVaRs, and the ends of its 95 % interval over paths and seeds."""
    draws = np.random.default_rng(0)

    def ratio(paths: Any, seeds: Any) -> float:
        tail = expected_shortfall(rival[paths], alpha)
        return float(np.mean([expected_shortfall(agents[seed][paths], alpha) for seed in seeds]) / tail)

    found = [
        ratio(draws.integers(len(rival), size=len(rival)), draws.integers(len(agents), size=len(agents)))
        for _ in range(bench.resamples)
    ]
    return ratio(slice(None), range(len(agents))), *np.quantile(found, (0.025, 0.975))


def head(title: str, *columns: str) -> None:
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def row(*cells: Any) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def each(values: Any) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def table_speed(bench: Bench) -> None:
    head("Steps per second of CPU time at 64 environments, one thread, random actions", "process", "median of 9", "goal")
    processes = {"geometric Brownian motion": {}, "Heston": {"process": Heston()}, "bootstrap": CASES[list(CASES)[-1]]}
    for name, settings in processes.items():
        env = OptionHedging(64, seed=0, **settings)
        env.reset()
        actions = np.random.default_rng(0).uniform(-1.0, 1.0, (1000, 64, 1)).astype(np.float32)
        rates = []
        for _ in range(9):
            start = time.process_time()
            for action in actions:
                env.step(action)
            rates.append(64 * len(actions) / (time.process_time() - start))
        row(name, f"{np.median(rates):,.0f}", "> 1,000,000")


def table_small(bench: Bench) -> None:
    columns = ("case", "delta", "Whalley-Wilmott", "optimum", "agent, each seed", "agent / optimum, mean", "worst", "goal")
    head(f"Small instance: CVaR {ALPHA} of the hedge error against dynamic programming", *columns)
    for case, settings in bench.chosen(SMALL):
        env = OptionHedging(bench.paths, **settings)
        best = env.solve("cvar", ALPHA, n_holdings=61, n_wealth=601)
        optimum = play_hedge(env, best.hedge, TEST_SEED).cvar(ALPHA)
        delta = play_hedge(env, delta_hedge, TEST_SEED).cvar(ALPHA)
        band = tune_whalley_wilmott(env, ALPHA, TEST_SEED)[1].cvar(ALPHA) if env.cost else delta
        reached = np.array([agent["results"][0].cvar(ALPHA) for agent in bench.agents(case, settings)])
        cells = (f"{best.objective:.3f}, played {optimum:.3f}", each(reached))
        row(
            case,
            f"{delta:.3f}",
            f"{band:.3f}",
            *cells,
            f"{(reached / optimum).mean():.3f}",
            f"{(reached / optimum).max():.3f}",
            "<= 1.05",
        )


def table_rivals(bench: Bench) -> None:
    columns = (
        "case",
        "no hedge",
        "delta",
        "Leland",
        "band",
        "agent, each seed",
        "agent / band [95 %]",
        "agent / delta [95 %]",
        "seconds",
    )
    head(
        f"CVaR {ALPHA} of the hedge error; band: Whalley-Wilmott, tuned on the test paths; goals: <= 1.00, with Heston < delta",
        *columns,
    )
    for case, settings in bench.chosen(CASES):
        env = OptionHedging(bench.paths, **settings)
        rivals = [play_hedge(env, hedge, TEST_SEED) for hedge in (no_hedge, delta_hedge, leland(env))]
        band = tune_whalley_wilmott(env, ALPHA, TEST_SEED)[1] if env.cost else rivals[1]
        agents = bench.agents(case, settings)
        pnls = [agent["results"][0].pnl for agent in agents]
        ratios = [cvar_ratio(bench, pnls, rival.pnl, ALPHA) for rival in (band, rivals[1])]
        cells = [f"{middle:.3f} [{low:.3f}, {high:.3f}]" for middle, low, high in ratios]
        seconds = np.mean([agent["seconds"] for agent in agents], axis=0)
        tails = [f"{result.cvar(ALPHA):.3f}" for result in (*rivals, band)]
        row(
            case,
            *tails,
            each(expected_shortfall(pnl, ALPHA) for pnl in pnls),
            *cells,
            f"{seconds[0]:.0f} ({seconds[1]:.0f} CPU)",
        )


def table_frontier(bench: Bench) -> None:
    columns = (
        "alpha",
        "agent: mean",
        "costs",
        "units traded",
        "CVaR",
        "CVaR .05",
        "band: mean",
        "costs",
        "CVaR",
        "agent / band [95 %]",
    )
    head("One alpha-conditioned agent, costs 0.5 %; the band is tuned to each alpha; means over seeds", *columns)
    settings = CASES["costs 0.5 %"]
    env = OptionHedging(bench.paths, **settings)
    agents = bench.agents("frontier", settings, (FRONTIER[0], FRONTIER[-1]), FRONTIER)
    for i, alpha in enumerate(FRONTIER):
        results = [agent["results"][i] for agent in agents]
        band = tune_whalley_wilmott(env, alpha, TEST_SEED)[1]
        middle, low, high = cvar_ratio(bench, [result.pnl for result in results], band.pnl, alpha)
        means = [np.mean([f(result) for result in results]) for f in FIGURES]
        shown = [
            f"{value:.3f}"
            for value in (*means, np.mean([r.cvar(alpha) for r in results]), np.mean([r.cvar() for r in results]))
        ]
        row(
            alpha,
            *shown,
            f"{band.pnl.mean():.3f}",
            f"{band.costs.mean():.3f}",
            f"{band.cvar(alpha):.3f}",
            f"{middle:.3f} [{low:.3f}, {high:.3f}]",
        )


FIGURES: tuple[Callable[[HedgingResult], float], ...] = (
    lambda result: result.pnl.mean(),
    lambda result: result.costs.mean(),
    lambda result: result.turnover.mean(),
)
TABLES = {"speed": table_speed, "small": table_small, "rivals": table_rivals, "frontier": table_frontier}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed; settings were chosen on 100")
    parser.add_argument("--only", default="", help=f"tables whose name contains one of these, of {', '.join(TABLES)}")
    parser.add_argument("--cases", default="", help="cases whose name begins with one of these, separated by ;")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the steps: whether it runs, not what it reaches")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training, per agent")
    parser.add_argument("--folder", type=Path, default=Path("artifacts/hedging"), help="where finished agents are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "numpy": np.__version__, "Python": platform.python_version()}
    print(f"{json.dumps(versions)}, seeds {options.first} to {options.first + options.seeds - 1}, one thread")
    bench = Bench(options)
    for name, table in TABLES.items():
        if any(part in name for part in options.only.split(",")):
            table(bench)


if __name__ == "__main__":
    main()
