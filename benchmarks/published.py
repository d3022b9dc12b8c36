"""Published tables, run again: ours and the peer side by side, with the settings of rl-baselines3-zoo as they are.

    make bench-published                        # everything that is missing, one process per core; many hours
    python benchmarks/published.py --rows cartpole-novel acrobot --seeds 3 --minutes 60
    python benchmarks/published.py --table      # print what is finished, without running anything

A run is a row, an engine and a seed, and a file in the folder once it is finished: whatever stops this script, it continues
where it was. A run's score is the mean return of 50 episodes after the training, with the most likely actions; a row has
the interquartile mean over seeds with a 95 % bootstrap interval. Runs that are missing are listed as not run.
"""

import argparse
import json
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from scipy.stats import trim_mean
from stable_baselines3.common.evaluation import evaluate_policy
from zoo import PEERS, zoo_settings

from tailguard import DistributionalPPO

EPISODES, TEST_ENVS = 50, 5
RESAMPLES = 10_000


@dataclass(frozen=True)
class Row:
    """A row of a published table.

    :param algorithm: of the zoo.
    :param env_id: environment that is run here.
    :param published: its figure, with the version that it is for where that is another one.
    :param entry: name of the settings in the zoo's file, where that is another one.
    """

    algorithm: str
    env_id: str
    published: str
    entry: str | None = None


ROWS = {
    "cartpole-novel": Row("ppo_lstm", "CartPoleNoVel-v1", "500 ± 0"),
    "pendulum-novel": Row("ppo_lstm", "PendulumNoVel-v1", "-217.9 ± 140"),
    "mountaincar-novel": Row("ppo_lstm", "MountainCarContinuousNoVel-v0", "91.5 ± 1.8"),
    "acrobot": Row("ppo", "Acrobot-v1", "-73.5"),
    "lunarlander": Row("ppo", "LunarLander-v3", "242 (v2)"),
    "hopper": Row("ppo", "Hopper-v5", "2410 (v3); CleanRL 2383 ± 272 (v4); Tianshou 2609 ± 701", "Hopper-v4"),
    "walker2d": Row("ppo", "Walker2d-v5", "3479 (v3); CleanRL 2288 ± 572 (v4); Tianshou 3589 ± 757", "Walker2d-v4"),
    "halfcheetah": Row("ppo", "HalfCheetah-v5", "5819 (v3); CleanRL 1443 ± 46 (v4); Tianshou 5784 ± 1244", "HalfCheetah-v4"),
}
# Tables that have no settings in the zoo; scripts of their own, or nobody, run them.
ELSEWHERE = {
    "betting game, CVaR .2 (return capping, ICML 2025)": "about 2.9 (a curve); benchmarks/risk.py has the exact optimum",
    "noisy LunarLander-v3, CVaR .2 (return capping)": "about 262, read from a curve; not run",
    "Hopper under attack, eps .075 (SA-PPO, ATLA)": "PPO 636, SA-PPO 1076, ATLA-LSTM-SA 1772; not run",
    "Walker2d under attack, eps .05 (SA-PPO, ATLA)": "PPO 1086, SA-PPO 2908, ATLA-LSTM-SA 3663; not run",
}
ENGINES = ("tailguard", "peer")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--folder", type=Path, default=Path("artifacts/published"))
    parser.add_argument("--table", action="store_true", help="print what is finished")
    options = parser.parse_args()
    if not options.table:
        options.folder.mkdir(parents=True, exist_ok=True)
        # Seeds last, so that a script that was stopped has something to say about every row.
        tasks = [(row, engine, seed) for seed in range(options.seeds) for row in options.rows for engine in options.engines]
        waiting = [task for task in tasks if not file_of(options.folder, *task).exists()]
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            deadline = time.time() + 60.0 * options.minutes
            list(pool.map(finish, waiting, [options.folder] * len(waiting), [deadline] * len(waiting)))
    print(table(options.folder))


def file_of(folder, row, engine, seed):
    return folder / f"{row}-{engine}-{seed}.json"


def finish(task, folder, deadline):
    """Run one task and keep its result, unless the time is over."""
    if time.time() > deadline:
        return
    path = file_of(folder, *task)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(run(*task)), encoding="utf-8")
    unfinished.replace(path)
    print(path.stem, path.read_text(encoding="utf-8"), flush=True)


def run(row, engine, seed):
    """Train and test once; return the score, and what else belongs to it."""
    torch.set_num_threads(1)
    source = ROWS[row]
    settings = zoo_settings(source.algorithm, source.env_id, source.entry)
    algorithm = DistributionalPPO if engine == "tailguard" else PEERS[source.algorithm]
    if engine == "tailguard" and settings.normalize is not None:
        settings.normalize["norm_reward"] = False  # PopArt has this part
    env = settings.environment(seed)
    started = time.process_time()
    model = algorithm(env=env, seed=seed, device="cpu", **settings.arguments).learn(settings.steps)
    seconds = time.process_time() - started
    test = settings.test_environment(env, TEST_ENVS, seed=seed + 1000)
    mean, std = evaluate_policy(model, test, EPISODES, deterministic=True)
    return {"score": float(mean), "spread": float(std), "steps": settings.steps, "cpu_seconds": seconds}


def interquartile_mean(scores):
    """Return the interquartile mean and its 95 % percentile-bootstrap interval over runs (Agarwal et al. 2021)."""
    scores = np.asarray(scores)
    draws = np.random.default_rng(0).choice(scores, (RESAMPLES, len(scores)))
    low, high = np.percentile(trim_mean(draws, 0.25, axis=1), [2.5, 97.5])
    return float(trim_mean(scores, 0.25)), float(low), float(high)


def table(folder):
    lines = [
        "| environment | published | ours: interquartile mean [95 %] (all seeds) | peer: the same | CPU time, ours / peer |",
        "|---|---|---|---|---|",
    ]
    for name, row in ROWS.items():
        found = {engine: results(folder, name, engine) for engine in ENGINES}
        seconds = [
            np.median([result["cpu_seconds"] for result in found[engine]]) if found[engine] else None for engine in ENGINES
        ]
        cost = f"{seconds[0] / seconds[1]:.2f}" if None not in seconds else ""
        cells = [row.env_id, row.published, *(cell(found[engine]) for engine in ENGINES), cost]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {name} | {published} | | | |" for name, published in ELSEWHERE.items()]
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "stable-baselines3", "sb3-contrib", "gymnasium"))
    lines += [
        "",
        f"{EPISODES} episodes per run; {libraries}; {platform.processor() or platform.machine()}, one thread per run.",
    ]
    return "\n".join(lines)


def results(folder, row, engine):
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{row}-{engine}-*.json"))]


def cell(runs):
    if not runs:
        return "not run"
    scores = [result["score"] for result in runs]
    mean, low, high = interquartile_mean(scores)
    return f"{mean:.1f} [{low:.1f}, {high:.1f}] ({', '.join(f'{score:.0f}' for score in scores)})"


if __name__ == "__main__":
    main()
