"""Agents that sell a large order, against closed forms and dynamic programs: `python benchmarks/desk_execution.py`.

Costs of fixed schedules are exact. Where a policy reacts to prices or regimes, it is played on the same 100,000 episodes as its
rivals, and the interval is that of the paired difference. One thread per process. Agents are trained by
``tailguard.experiments.execution``, whose settings were chosen on seeds 10 and 11.
"""

import argparse
import inspect
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from risk import Runner, alone, each, share_of
from scipy.stats import norm

from tailguard import ReturnObserver
from tailguard.envs import OptimalExecution
from tailguard.envs.optimal_execution import Schedule
from tailguard.envs.streams import SEED_SPACING
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.evaluate.report.execution import tail_terms
from tailguard.experiments.execution import (
    ENVS,
    TEST_SEED,
    agent_schedules,
    schedule_actions,
    schedule_for_tail,
    train_seller,
)
from tailguard.parallel.reaper import reaped

Arrays = dict[str, np.ndarray]

PICTURE = Path(__file__).parents[1] / "docs" / "execution-frontier.svg"
AVERSIONS = (1e-4, 1e-1)  # per bps
ALPHAS = (0.05, 0.1, 0.2, 0.4, 0.8)
EPISODES = 100_000
# The default; the example of Almgren and Chriss in bps (a million shares at 50 $, five days); a thin market.
EXAMPLE = {"volatility": 190.0, "temporary_impact": 500.0, "permanent_impact": 50.0, "half_spread": 12.5}
MARKETS: dict[str, dict[str, Any]] = {
    "default": {},
    "Almgren and Chriss's example": {"steps": 5, "horizon": 5.0, **EXAMPLE},
    "thin market": {"steps": 10, "horizon": 0.5, "volatility": 150.0, "temporary_impact": 60.0, "permanent_impact": 40.0},
}
CHAIN = [[0.8, 0.15, 0.05], [0.1, 0.8, 0.1], [0.05, 0.15, 0.8]]
SIGNALS: dict[str, dict[str, Any]] = {
    "liquidity": {"transition": CHAIN, "impact_factors": [0.4, 1.0, 2.5]},
    "drift": {"transition": CHAIN, "drifts": [-200.0, 0.0, 200.0]},
    "liquidity and drift": {"transition": CHAIN, "impact_factors": [0.4, 1.0, 2.5], "drifts": [-60.0, 0.0, 60.0]},
}
SIGNAL_AVERSION = 0.003
FRONTIER_ENVS = 128  # without noise, small batches are enough
STEPS, SIGNAL_STEPS, TAIL_STEPS = 600_000, 3_000_000, 3_000_000


# ------------------------------------------------------------------------------------------------------------ frontier


def frontier(market: dict[str, Any], aversions: tuple[float, ...], seed: int, steps: int) -> Arrays:
    """The trades of one agent at several risk aversions, and the CPU seconds of its training."""
    env = OptimalExecution(FRONTIER_ENVS, risk_aversion=AVERSIONS, expected_rewards=True, **market)
    start = time.process_time()
    model = train_seller(env, alpha=None, steps=steps, seed=SEED_SPACING * seed)
    seconds = time.process_time() - start
    schedules = agent_schedules(model, env, aversions)
    return {"trades": np.stack([schedule.trades for schedule in schedules]), "seconds": np.array(seconds)}


def table_frontier(run: Runner) -> None:
    aversions = tuple(np.geomspace(*AVERSIONS, 7).tolist())
    head = ("market", "risk aversion", "Almgren-Chriss, bps", "TWAP", "goal", "agent over Almgren-Chriss, each seed")
    run.head("Mean + risk aversion times variance of the cost; one agent for all risk aversions, exact", *head)
    seconds = []
    for name, market in MARKETS.items():
        env = OptimalExecution(**market)
        found = run.seeds(frontier, market, aversions, steps=share_of(STEPS, run.quick))
        agents = [[env.schedule(trades) for trades in agent["trades"]] for agent in found]
        seconds += [float(agent["seconds"]) for agent in found]
        for i, aversion in enumerate(aversions):
            best = env.almgren_chriss(aversion).objective(aversion)
            ratios = [schedules[i].objective(aversion) / best for schedules in agents]
            shown = ", ".join(f"{ratio:.4f}" for ratio in ratios)
            run.row(name, f"{aversion:.1e}", f"{best:.2f}", f"{env.twap().objective(aversion) / best:.3f}", "<= 1.02", shown)
        if name == "default" and not run.quick:
            draw(env, agents)
    print(f"\ntraining: {min(seconds):.0f} to {max(seconds):.0f} s of CPU per agent")


def draw(env: OptimalExecution, agents: list[list[Schedule]]) -> None:
    """Draw expected cost against risk, and three schedules, of the closed form and of the agents."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    aversions = np.geomspace(*AVERSIONS, 7)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    curve = env.frontier(np.geomspace(1e-5, 0.3, 200).tolist())
    risks = [np.sqrt(point.variance) for point in curve]
    left.plot(risks, [point.expected_cost for point in curve], "k-", lw=1, label="Almgren-Chriss, closed form")
    for seed, schedules in enumerate(agents):
        label = "one agent, three decades of risk aversion" if seed == 0 else None
        costs = [schedule.expected_cost for schedule in schedules]
        left.plot([np.sqrt(schedule.variance) for schedule in schedules], costs, "o", color="tab:orange", ms=5, label=label)
    twap = env.twap()
    left.plot(np.sqrt(twap.variance), twap.expected_cost, "s", color="tab:blue", label="TWAP")
    left.set(xlabel="standard deviation of the cost, bps", ylabel="expected cost, bps", title="Efficient frontier of execution")
    left.legend()
    times = np.arange(env.steps + 1) / env.steps * env.horizon
    for i in (0, 3, 4, 6):
        best = env.almgren_chriss(aversions[i])
        right.plot(times, np.append(1.0, 1.0 - np.cumsum(best.trades)), "k-", lw=1)
        right.plot(times, np.append(1.0, 1.0 - np.cumsum(agents[0][i].trades)), "o", color="tab:orange", ms=3)
        right.annotate(f"{aversions[i]:.0e}", (times[6], 1.0 - np.cumsum(best.trades)[5]))
    right.set(xlabel="days", ylabel="share of the order left", title="Schedules: Almgren-Chriss (line), agent (dots)")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    print(f"\ndocs/{PICTURE.name} shows the frontier")


# ---------------------------------------------------------------------------------------------------------------- play


def costs_of(env: OptimalExecution, act: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """Return the cost of one episode of every copy, in bps, under actions of (observation, step)."""
    return -returns_of(GymVectorAdapter(env, seed=TEST_SEED), env.steps, act)


def returns_of(env: Any, steps: int, act: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """Return the sum of rewards of one episode of every copy."""
    obs, total, running = env.reset(), np.zeros(env.num_envs), np.ones(env.num_envs, bool)
    for step in range(steps):
        obs, rewards, dones, _ = env.step(act(obs, step))
        total += np.where(running, rewards, 0.0)
        running &= ~dones
    return total


def signal_costs(signal: dict[str, Any], seed: int, steps: int) -> Arrays:
    """Costs of an agent on the common episodes."""
    market = OptimalExecution(ENVS, risk_aversion=SIGNAL_AVERSION, **signal)
    model = train_seller(market, alpha=None, steps=steps, seed=SEED_SPACING * seed)
    env = OptimalExecution(EPISODES, risk_aversion=SIGNAL_AVERSION, **signal)
    return {"costs": costs_of(env, lambda obs, step: model.predict(obs, deterministic=True)[0])}


def table_signal(run: Runner) -> None:
    head = (
        "signal",
        "dynamic program, bps",
        "Almgren-Chriss",
        "TWAP",
        "goal",
        "agent over the program, each seed [95 %]",
        "ahead of A-C",
    )
    run.head(f"A signal of three regimes, risk aversion {SIGNAL_AVERSION}", *head)
    for name, signal in SIGNALS.items():
        env = OptimalExecution(EPISODES, risk_aversion=SIGNAL_AVERSION, **signal)
        solution, chriss = env.solve(), env.almgren_chriss(SIGNAL_AVERSION)
        best = solution.objective

        def solved(obs: np.ndarray, step: int, env: OptimalExecution = env, solution: Any = solution) -> np.ndarray:
            left = env.left
            share = solution.trade(left, step, env.regime) / np.maximum(left, 1e-300)
            return env.action(np.clip(share, 0.0, 1.0), step)[:, None]

        perfect, rival = costs_of(env, solved), costs_of(env, schedule_actions(env, chriss))
        cells, leads = [], []
        for agent in run.seeds(signal_costs, signal, steps=share_of(SIGNAL_STEPS, run.quick)):
            excess, lead = agent["costs"] - perfect, rival - agent["costs"]
            width = 1.96 * excess.std() / np.sqrt(EPISODES) / best
            cells.append(f"{1.0 + excess.mean() / best:.4f} ± {width:.4f}")
            leads.append(f"{lead.mean():.2f} ± {1.96 * lead.std() / np.sqrt(EPISODES):.2f} bps")
        ratios = (f"{schedule.objective(SIGNAL_AVERSION) / best:.3f}" for schedule in (chriss, env.twap()))
        run.row(name, f"{best:.2f}", *ratios, "<= 1.05", ", ".join(cells), ", ".join(leads))


# ---------------------------------------------------------------------------------------------------------------- CVaR


def normal_tail(schedule: Schedule, alpha: float) -> float:
    """The average of the worst share of the costs of a fixed schedule, which are normal."""
    return schedule.expected_cost + float(norm.pdf(norm.ppf(alpha)) / alpha) * schedule.variance**0.5


def tail_of(costs: np.ndarray, alpha: float) -> tuple[float, float]:
    """The average of the worst share of costs, and half of its interval of 95 %."""
    terms = tail_terms(costs, alpha)
    return float(terms.mean()), float(1.96 * terms.std() / np.sqrt(len(costs)))


def tail_costs(seed: int, steps: int) -> Arrays:
    """Costs of one alpha-conditioned agent on the common episodes, at each of the tails."""
    market = OptimalExecution(ENVS, risk_aversion=0.0)
    model = train_seller(market, alpha=(min(ALPHAS), max(ALPHAS)), steps=steps, seed=SEED_SPACING * seed)
    costs = []
    for alpha in ALPHAS:
        model.set_risk(alpha)
        env = ReturnObserver(GymVectorAdapter(OptimalExecution(EPISODES, risk_aversion=0.0), seed=TEST_SEED), 1.0)
        costs.append(-returns_of(env, 20, lambda obs, step: model.predict(obs, deterministic=True)[0]))
    return {"costs": np.stack(costs)}


def table_tail(run: Runner) -> None:
    head = (
        "alpha",
        "best fixed schedule, bps",
        "TWAP",
        "agent over the best schedule, each seed [95 %]",
        "its mean cost, each seed",
    )
    run.head("Average of the worst share alpha of costs (CVaR), one alpha-conditioned agent; it may react to prices", *head)
    env = OptimalExecution(risk_aversion=0.0)
    agents = [agent["costs"] for agent in run.seeds(tail_costs, steps=share_of(TAIL_STEPS, run.quick))]
    for i, alpha in enumerate(ALPHAS):
        best, twap = normal_tail(schedule_for_tail(env, alpha), alpha), normal_tail(env.twap(), alpha)
        tails = [tail_of(costs[i], alpha) for costs in agents]
        cells = ", ".join(f"{tail / best:.3f} ± {width / best:.3f}" for tail, width in tails)
        run.row(alpha, f"{best:.1f}", f"{twap / best:.3f}", cells, each(costs[i].mean() for costs in agents))


# --------------------------------------------------------------------------------------------------------------- speed


def table_speed(run: Runner) -> None:
    run.head(
        "Speed at 64 environments, one thread", "environment", "goal", "million steps per second of CPU time, best of five"
    )
    for name, settings in {"default": {}, "with a signal": SIGNALS["liquidity and drift"]}.items():
        env = OptimalExecution(64, seed=0, **settings)
        env.reset()
        actions = np.random.default_rng(0).uniform(-1.0, 1.0, (256, 64, 1)).astype(np.float32)
        run.row(f"OptimalExecution, {name}", "> 1", f"{steps_per_second(env, actions) / 1e6:.2f}")


def steps_per_second(env: Any, actions: np.ndarray) -> float:
    best = 0.0
    for _ in range(6):  # the first one compiles
        start = time.process_time()
        for batch in actions:
            env.step(batch)
        best = max(best, len(actions) * env.num_envs / (time.process_time() - start))
    return best


def fingerprint(trainer: Callable[..., Any], *question: Any) -> str:
    """Return a digest of a question and of the file that answers it, so that other settings do not answer for the present."""
    return f"{zlib.crc32(repr(question).encode(), zlib.crc32(inspect.getsource(inspect.getmodule(trainer)).encode())):08x}"


class KeptRunner(Runner):
    """A runner that keeps the result of every agent in a folder, and trains only those that are missing.

    :param n_seeds: seeds.
    :param first: the first of them.
    :param quick: a tenth of the steps.
    :param workers: processes.
    :param folder: where results are kept; None keeps nothing.
    :param trainer: the function that trains the agents.
    """

    def __init__(
        self, n_seeds: int, first: int, quick: bool, workers: int, folder: Path | None, trainer: Callable[..., Any]
    ) -> None:
        super().__init__(n_seeds, first, quick, workers)
        self.folder, self.trainer = folder, trainer

    def seeds(self, function: Callable[..., Arrays], *arguments: Any, steps: int, n: int | None = None) -> list[Arrays]:
        """Return the result of the function for each seed."""
        if self.folder is None:
            return super().seeds(function, *arguments, steps=steps, n=n)
        self.folder.mkdir(parents=True, exist_ok=True)
        question = fingerprint(self.trainer, arguments, steps)
        seeds = range(self.first, self.first + (n or self.n_seeds))
        paths = [self.folder / f"{function.__name__}-{question}-{seed}.npz" for seed in seeds]
        missing = [(path, seed) for path, seed in zip(paths, seeds, strict=True) if not path.exists()]
        waiting = [self.pool.submit(keep, path, function, arguments, seed, steps) for path, seed in missing]
        for work in waiting:
            work.result()
        return [dict(np.load(path)) for path in paths]


def keep(path: Path, function: Callable[..., Arrays], arguments: tuple[Any, ...], seed: int, steps: int) -> None:
    np.savez_compressed(path, **alone(function, arguments, seed, steps))


TABLES = {"speed": table_speed, "frontier": table_frontier, "signal": table_signal, "tail": table_tail}


def main(tables: dict[str, Callable[[Runner], None]], about: str | None, trainer: Callable[..., Any]) -> None:
    """Run the tables that the command line asks for."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed; settings were chosen on 10 and 11")
    parser.add_argument("--only", default="", help=f"tables whose name contains one of these, of {', '.join(tables)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: whether everything runs")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--folder", type=Path, help="keeps what each agent reached, so that an interrupted run can continue")
    options = parser.parse_args()
    run = KeptRunner(options.seeds, options.first, options.quick, options.workers, options.folder, trainer)
    quick = ", a tenth of the steps" if options.quick else ""
    print(f"torch {torch.__version__}, {options.seeds} seeds from {options.first}, one thread each{quick}")
    for name, table in tables.items():
        if any(part in name for part in options.only.split(",")):
            table(run)
    run.pool.shutdown()


if __name__ == "__main__":
    with reaped():  # whatever ends this process, those of its pool end, too
        main(TABLES, __doc__, train_seller)
