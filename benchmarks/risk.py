"""Risk objectives, compared with exact optima: `python benchmarks/risk.py`.

Every seed is reported, and every optimum is computed here (dynamic programming or a closed form). One thread per process.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from critic_tail import CRITICS, tail_error
from risk_caps import shares
from risk_market import SEEDS, even_tail, market_weeks, tail_mean, training_cost, with_interval
from stable_baselines3.common.callbacks import BaseCallback

from tailguard import DistributionalPPO, ReturnObserver
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.market import BettingGame, CrashMarket, GuardedMaze
from tailguard.parallel.reaper import reaped
from tailguard.ppo.schedules import LinearSchedule

Row = list[str]
PICTURE = Path(__file__).parents[1] / "docs" / "risk-frontier.svg"
GAMES = [{}, {"win_probability": 0.7}, {"win_probability": 0.8}, {"win_probability": 0.95}, {"chips": 8}, {"chips": 32}]
BETTING_STEPS = 1_800_000
ALPHAS = (0.05, 0.1, 0.2, 0.4, 0.8)


def share_of(steps: int, quick: bool) -> int:
    return steps // 10 if quick else steps


class Watch(BaseCallback):
    """Remembers which of the logged names appeared."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.seen |= set(self.logger.name_to_value)


# ------------------------------------------------------------------------------------------------ betting game


def betting_settings(rollouts: int) -> dict[str, Any]:
    """One set of settings for every game and every tail."""
    return {
        "n_steps": 24,
        "batch_size": 3072,
        "n_epochs": 4,
        "gamma": 1.0,
        "gae_lambda": 0.98,
        "learning_rate": LinearSchedule(4e-3, 0.0),
        "entropy": {"initial": 0.08, "final": 0.0, "decay_steps": max(int(0.9 * rollouts), 1)},
        "normalize_obs": True,
        "critic": {"twin": False},
    }


def play_betting(risk: dict[str, Any], game: dict[str, Any], seed: int, steps: int, watch: Watch | None = None):
    env = BettingGame(256, **game)
    model = DistributionalPPO("MlpPolicy", env, seed=seed, risk=risk, **betting_settings(steps // (24 * 256)))
    return model.learn(steps, callback=watch)


def result_distribution(model: DistributionalPPO, game: BettingGame, alpha: float | None = None):
    """Return the exact distribution of the result under the most likely actions: results in rising order, and probabilities.

    Chips and round are all that the player's state is, so that equal amounts are one node of the tree.
    """
    chips, mass, p = np.array([float(game.chips)]), np.ones(1), game.win_probability
    for played in range(game.rounds):
        columns = [chips / game.cap, np.full(len(chips), played / game.rounds)]
        if model.risk_config.return_augmented:
            columns += [chips - game.chips, np.ones(len(chips))]
        if model.risk_config.alpha_conditioned:
            columns.append(np.full(len(chips), alpha))
        bets = model.predict(np.column_stack(columns).astype(np.float32), deterministic=True)[0]
        won, lost = game.outcomes(chips, bets)  # nobody can bet with no chips or with all of them: ended games stay as they are
        chips, node = np.unique(np.concatenate((won, lost)), return_inverse=True)
        mass = np.bincount(node, np.concatenate((p * mass, (1.0 - p) * mass)), len(chips))
    return chips - game.chips, mass


def betting_cvar(risk: dict[str, Any], game: dict[str, Any], alpha: float, seed: int, steps: int) -> float:
    return tail_mean(*result_distribution(play_betting(risk, game, seed, steps), BettingGame(**game)), alpha)


def table_betting(run: "Runner") -> None:
    betting_rows(run, "Betting game", GAMES[:1])


def table_games(run: "Runner") -> None:
    betting_rows(run, "Other betting games, the same settings", GAMES[1:])


def betting_rows(run: "Runner", title: str, games: list[dict[str, Any]]) -> None:
    head = ("game", "alpha", "optimum", "goal", "share, median", "CVaR, each seed")
    run.head(f"{title}: CVaR of the most likely actions, exact", *head)
    for game in games:
        for alpha, goal in ((0.2, 0.85), (0.05, 0.7)):
            best = BettingGame(**game).solve(alpha).objective
            risk = {"objective": "cvar", "alpha": alpha}
            reached = run.seeds(betting_cvar, risk, game, alpha, steps=share_of(BETTING_STEPS, run.quick))
            share = f"{np.median(reached) / best:.3f}" if best > 0.0 else "-"
            run.row(named(game), alpha, f"{best:.2f}", f">= {goal}", share, each(reached))


def table_caps(run: "Runner") -> None:
    head = ("game", "alpha", "optimum", "cap follows the VaR", "cap is searched")
    run.head("Betting games with a perfect player: share of the optimum that the cap leaves", *head)
    for game in GAMES:
        for alpha in (0.2, 0.05):
            if BettingGame(**game).solve(alpha).objective > 0.0:
                run.row(named(game), alpha, *(f"{share:.2f}" for share in shares(game, alpha)))


def named(game: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in game.items()) or "win_probability 0.88, chips 16"


# ------------------------------------------------------------------------------------------------ guarded maze


def maze_way(risk: dict[str, Any], seed: int, steps: int) -> tuple[float, float]:
    """Return 1 if the most likely actions meet the guard, 0 if they walk round it; and 1 if they arrive."""
    settings = {"n_steps": 128, "batch_size": 2048, "n_epochs": 4, "gamma": 1.0, "learning_rate": LinearSchedule(1e-3, 0.0)}
    entropy = {"initial": 0.03, "final": 0.0, "decay_steps": max(int(0.9 * steps / (128 * 64)), 1)}
    model = DistributionalPPO(
        "MlpPolicy", GuardedMaze(64), seed=seed, risk=risk, entropy=entropy, critic={"twin": False}, **settings
    )
    model.learn(steps)
    maze = GuardedMaze(500)
    env = GymVectorAdapter(maze, seed + 1000)
    env = ReturnObserver(env, 1.0) if model.risk_config.return_augmented else env
    obs, total, arrived, open_ = env.reset(), np.zeros(500), np.zeros(500, bool), np.ones(500, bool)
    for _ in range(maze.max_steps):
        obs, rewards, dones, infos = env.step(model.predict(obs, deterministic=True)[0])
        total += np.where(open_, rewards, 0.0)
        arrived |= open_ & dones & ~np.array([info.get("TimeLimit.truncated", False) for info in infos])
        open_ &= ~dones
    return float(total.std() > 1.0), float(arrived.mean())


def table_maze(run: "Runner") -> None:
    run.head("Guarded maze", "objective", "optimum", "meets the guard, each seed", "arrives, each seed")
    for alpha in (1.0, 0.5, 0.2):
        risk = {"objective": "neutral"} if alpha == 1.0 else {"objective": "cvar", "alpha": alpha}
        ways = run.seeds(maze_way, risk, steps=share_of(600_000, run.quick))
        best = "meets the guard" if GuardedMaze().solve(alpha).passes_guard else "walks round"
        run.row(
            "neutral" if alpha == 1.0 else f"CVaR {alpha}", best, each([way for way, _ in ways]), each([a for _, a in ways])
        )


# -------------------------------------------------------------------------------------------------- constraint


def constrained(limit: float, seed: int, steps: int) -> tuple[float, float, float, float, float]:
    """CVaR while exploring, which is what the limit is held against, and at work; mean; multiplier; whether it was reported."""
    watch = Watch()
    risk = {"objective": "constrained", "alpha": 0.2, "limit": limit}
    model = play_betting(risk, {}, seed, steps, watch)
    values, mass = result_distribution(model, BettingGame())
    infeasible = float("warn/cvar_limit_infeasible" in watch.seen)
    _, exploring = model.objective.returns[0].tail(0.2, model.policy.return_dist.masses.double().numpy())
    return exploring, tail_mean(values, mass, 0.2), float(mass @ values), model.objective.multiplier, infeasible


def table_constrained(run: "Runner") -> None:
    best = BettingGame().solve(0.2).objective
    head = ("limit", "CVaR while exploring", "CVaR at work, each seed", "mean, each seed", "multiplier", "reported infeasible")
    run.head(f"Betting game, mean subject to CVaR .2 >= limit; the highest CVaR is {best:.2f}", *head)
    for limit in (15.0, 40.0):
        results = run.seeds(constrained, limit, steps=share_of(BETTING_STEPS, run.quick))
        run.row(limit, *(each(column) for column in zip(*results, strict=True)))


# -------------------------------------------------------------------------------------------------------- alpha-conditioned


def conditioned_frontier(seed: int, steps: int) -> list[tuple[float, float]]:
    """Mean and CVaR of one agent at each of the tails."""
    risk = {"objective": "cvar", "alpha": (min(ALPHAS), max(ALPHAS)), "levels": len(ALPHAS)}
    model, game = play_betting(risk, {}, seed, steps), BettingGame()
    results = [result_distribution(model, game, alpha) for alpha in ALPHAS]
    return [
        (float(mass @ values), tail_mean(values, mass, alpha)) for alpha, (values, mass) in zip(ALPHAS, results, strict=True)
    ]


def table_conditioned(run: "Runner") -> None:
    run.head(
        "Betting game, one agent for all tails against one each",
        "alpha",
        "optimum",
        "one for all",
        "one each",
        "ratio of medians",
    )
    frontiers = run.seeds(
        conditioned_frontier, steps=share_of(len(ALPHAS) * BETTING_STEPS, run.quick)
    )  # as many as the others together
    for i, alpha in enumerate(ALPHAS):
        risk = {"objective": "cvar", "alpha": alpha}
        separate = run.seeds(betting_cvar, risk, {}, alpha, steps=share_of(BETTING_STEPS, run.quick))
        shared = [frontier[i][1] for frontier in frontiers]
        best = BettingGame().solve(alpha).objective
        run.row(alpha, f"{best:.2f}", each(shared), each(separate), f"{np.median(shared) / np.median(separate):.3f}")
    if not run.quick:
        draw_frontier(frontiers)


def draw_frontier(frontiers: list[list[tuple[float, float]]]) -> None:
    """Mean against CVaR .2 is not one picture: every tail has its own CVaR, so each is drawn against its own optimum."""
    try:
        import matplotlib
    except ImportError:
        print(f"\nmatplotlib is not installed: {PICTURE.name} is not drawn")
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    alphas = np.geomspace(0.03, 1.0, 40)
    solutions = [BettingGame().solve(alpha) for alpha in alphas]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.plot(
        [s.objective for s in solutions], [s.mean for s in solutions], "k-", lw=1, label="best policy for each tail, exact"
    )
    for seed, frontier in enumerate(frontiers):
        axes.plot(
            [c for _, c in frontier], [m for m, _ in frontier], "o--", ms=4, label=f"alpha-conditioned agent, seed {seed}"
        )
    for alpha in ALPHAS:
        best = BettingGame().solve(alpha)
        axes.annotate(f"{alpha:g}", (best.objective, best.mean), textcoords="offset points", xytext=(4, -10))
    axes.set_xlabel("CVaR at the tail that the policy serves")
    axes.set_ylabel("mean of the result")
    axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None})
    print(f"\ndocs/{PICTURE.name} shows the frontier")


# ------------------------------------------------------------------------------------------------ crash market


def crash_position(alpha: float, seed: int, steps: int) -> float:
    risk = {"objective": "neutral"} if alpha == 1.0 else {"objective": "cvar", "alpha": alpha}
    env = CrashMarket(512)
    # 2,048 episodes a rollout: with four times as many the position was still on its way when the search for the cap ended.
    settings = {"n_steps": 4, "batch_size": 1024, "n_epochs": 4, "gamma": 1.0, "learning_rate": LinearSchedule(2e-3, 1e-4)}
    model = DistributionalPPO(
        "MlpPolicy", env, seed=seed, risk=risk, critic={"twin": False}, policy_kwargs={"log_std_init": -1.5}, **settings
    )
    model.learn(steps)
    obs = np.ones((1, 1)) if alpha == 1.0 else np.array([[1.0, 0.0, 1.0]])
    return float(np.clip(model.predict(obs.astype(np.float32), deterministic=True)[0].item(), -1.0, 1.0) + 1.0) / 2.0


def table_crash(run: "Runner") -> None:
    run.head("Crash market", "tail", "best position", "positions, each seed", "goal", "share of the optimum, each seed")
    market = CrashMarket()
    for alpha in (1.0, 0.5, 0.2):
        best = market.solve(alpha)
        positions = run.seeds(crash_position, alpha, steps=share_of(1_000_000, run.quick))
        shares = [market.cvar(position, alpha) / best.objective for position in positions]
        run.row("mean" if alpha == 1.0 else alpha, f"{best.position:.3f}", each(positions), ">= 0.95", each(shares))


# ----------------------------------------------------------------------------------------------- critic's tail


def table_critic(run: "Runner") -> None:
    run.head(
        "Critic's tail: error of CVaR .05, mean of the states",
        "critic",
        "normal rewards, each seed",
        "skewed rewards, each seed",
    )
    for name, critic in CRITICS.items():
        errors = [run.seeds(tail_error, critic, skewed, steps=share_of(400_000, run.quick)) for skewed in (False, True)]
        run.row(name, *(", ".join(f"{error:+.1%}" for error in column) for column in errors))


# ---------------------------------------------------------------------------------------------- shipped market


def table_market(run: "Runner") -> None:
    head = ("objective", "mean % [95 %]", "each seed", "CVaR .05 % [95 %]", "each seed")
    title = "btcusd-1h, weeks of the last fifth of the bars, after training on the others"
    run.head(f"{title}; intervals over calendar weeks and seeds 0 to {SEEDS - 1}", *head)
    for alpha in (1.0, 0.5, 0.2, 0.05):
        results = run.seeds(market_weeks, alpha, steps=share_of(300_000, run.quick), n=SEEDS)
        totals, begins = np.stack([total for total, _ in results]), results[0][1]
        cells = [(with_interval(f, totals, begins), each(map(f, totals))) for f in (np.mean, even_tail)]
        run.row("neutral" if alpha == 1.0 else f"CVaR {alpha}", *cells[0], *cells[1])


def table_cost(run: "Runner") -> None:
    run.head("btcusd-1h, CPU time of training for CVaR .05 over that for the mean", "goal", "ratio, each seed")
    run.row("<= 1.1", each(run.seeds(training_cost, steps=share_of(40_960, run.quick))))


# ----------------------------------------------------------------------------------------------------- running


def each(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def alone(function: Callable[..., Any], arguments: tuple[Any, ...], seed: int, steps: int) -> Any:
    torch.set_num_threads(1)
    return function(*arguments, seed=seed, steps=steps)


class Runner:
    """Runs the seeds of a row, side by side where there are several workers, and prints tables.

    :param n_seeds: seeds.
    :param first: the first of them.
    :param quick: a tenth of the steps: whether everything runs, not what it reaches.
    :param workers: processes.
    """

    def __init__(self, n_seeds: int, first: int, quick: bool, workers: int) -> None:
        self.n_seeds, self.first, self.quick = n_seeds, first, quick
        self.pool = ProcessPoolExecutor(workers, mp_context=get_context("forkserver"))
        self.known: dict[str, list[Any]] = {}

    def seeds(self, function: Callable[..., Any], *arguments: Any, steps: int, n: int | None = None) -> list[Any]:
        """Return the result of the function for each seed; the same call is made once."""
        question = f"{function.__name__} {arguments} {steps}"
        if question not in self.known:
            seeds = range(self.first, self.first + (n or self.n_seeds))
            waiting = [self.pool.submit(alone, function, arguments, seed, steps) for seed in seeds]
            self.known[question] = [one.result() for one in waiting]
        return self.known[question]

    def head(self, title: str, *columns: str) -> None:
        print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def row(self, *cells: Any) -> None:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


TABLES = {
    "betting": table_betting,
    "games": table_games,
    "caps": table_caps,
    "maze": table_maze,
    "constrained": table_constrained,
    "crash": table_crash,
    "critic": table_critic,
    "conditioned": table_conditioned,
    "market": table_market,
    "cost": table_cost,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed; settings were chosen on 10 to 12")
    parser.add_argument("--only", default="", help=f"tables whose name contains one of these, of {', '.join(TABLES)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    run = Runner(options.seeds, options.first, options.quick, options.workers)
    quick = ", a tenth of the steps" if options.quick else ""
    print(f"torch {torch.__version__}, seeds from {options.first}, one thread each{quick}")
    for name, table in TABLES.items():
        if any(part in name for part in options.only.split(",")):
            table(run)


if __name__ == "__main__":
    with reaped():  # whatever ends this process, those of its pool end, too
        main()
