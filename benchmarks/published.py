"""Published tables, run again: ours and the peer side by side, with the settings of rl-baselines3-zoo as they are.

    make bench-published                        # everything that is missing, one process per core; many hours
    python benchmarks/published.py --rows cartpole-novel acrobot --seeds 3 --minutes 60
    python benchmarks/published.py --table      # print what is finished, without running anything
    python benchmarks/published.py --out docs/published.md
    python benchmarks/published.py --engines tailguard --first-seed 10 --folder artifacts/scalar \
        --settings '{"critic": {"num_quantiles": 1, "twin": false}}'   # ablate, on seeds that are not reported

A run is a row, an engine and a seed, and a file in the folder once it is finished: whatever stops this script, it continues
where it was. The folder of the table is part of the repository: commit what is finished, and another machine continues. To
run something again, delete its file. A run's score is the mean return of 50 episodes after the training, with the most likely
actions; a row has the mean over seeds, from four seeds on the interquartile mean, with a 95 % bootstrap interval. Runs that
are missing are listed as not run.
"""

import argparse
import dataclasses
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from all import commit, machine
from scipy.stats import trim_mean
from stable_baselines3.common.evaluation import evaluate_policy
from zoo import PEERS, zoo_settings

from tailguard import DistributionalPPO
from tailguard.parallel.reaper import reaped

FOLDER = Path(__file__).with_name("published_runs")
ENOUGH_FOR_QUARTILES = 4
EPISODES, TEST_ENVS = 50, 5
RESAMPLES = 10_000


@dataclass(frozen=True)
class Row:
    """A row of a published table.

    :param algorithm: of the zoo.
    :param env_id: environment that is run here.
    :param published: its figure, with the version that it is for where that is another one.
    :param entry: name of the settings in the zoo's file, where that is another one.
    :param bar: least score that counts as the published one: its mean less its standard deviation, where both are known.
    :param steps: of the training, where they are not those of the zoo.
    """

    algorithm: str
    env_id: str
    published: str
    entry: str | None = None
    bar: float | None = None
    steps: int | None = None


ROWS = {
    "cartpole-novel": Row("ppo_lstm", "CartPoleNoVel-v1", "500 ± 0", bar=500.0),
    "pendulum-novel": Row("ppo_lstm", "PendulumNoVel-v1", "-217.9 ± 140", bar=-217.9 - 140.0),
    "mountaincar-novel": Row("ppo_lstm", "MountainCarContinuousNoVel-v0", "91.5 ± 1.8", bar=91.5 - 1.8),
    "acrobot": Row("ppo", "Acrobot-v1", "-73.5 ± 18.2", bar=-73.5 - 18.2),
    "lunarlander": Row("ppo", "LunarLander-v3", "242.1 ± 31.8 (v2)", bar=242.1 - 31.8),
    "hopper": Row("ppo", "Hopper-v5", "2410 ± 10 (v3); CleanRL 2383 ± 272 (v4); Tianshou 2609 ± 701", "Hopper-v4"),
    "hopper-200k": Row("ppo", "Hopper-v5", "none at 200,000 steps", "Hopper-v4", steps=200_000),
    "walker2d": Row("ppo", "Walker2d-v5", "3479 ± 822 (v3); CleanRL 2288 ± 572 (v4); Tianshou 3589 ± 757", "Walker2d-v4"),
    "halfcheetah": Row(
        "ppo", "HalfCheetah-v5", "5819 ± 664 (v3); CleanRL 1443 ± 46 (v4); Tianshou 5784 ± 1244", "HalfCheetah-v4"
    ),
}
# Tables that have no settings in the zoo; scripts of their own, or nobody, run them.
ELSEWHERE = {
    "betting game, CVaR .2 (return capping, ICML 2025)": "about 2.9 (a curve); benchmarks/risk.py has the exact optimum",
    "noisy LunarLander-v3, CVaR .2 (return capping)": "about 262, read from a curve; not run",
    "Hopper under attack, eps .075 (SA-PPO, ATLA)": "PPO 636, SA-PPO 1076, ATLA-LSTM-SA 1772; not run",
    "Walker2d under attack, eps .05 (SA-PPO, ATLA)": "PPO 1086, SA-PPO 2908, ATLA-LSTM-SA 3663; not run",
}
ENGINES = ("tailguard", "peer")
INTRODUCTION = f"""# Published tables

Written by `benchmarks/published.py --out docs/published.md`; `make bench-published` runs what is missing and continues where
it was stopped.

Tables of [rl-baselines3-zoo](https://github.com/DLR-RM/rl-baselines3-zoo) and others, run again with the zoo's tuned settings,
read from its files and not changed, for ours and for the class that they were tuned for (`PPO`, or sb3-contrib's
`RecurrentPPO`). What the files leave out has the peer's default. The one difference: `VecNormalize` scales observations as the
zoo says and leaves rewards alone, since [PopArt](concepts/popart.md) does this part.

A run's score is the mean return of {EPISODES} episodes after the training, with the most likely actions. A row has the
mean over seeds 0, 1, ..., from {ENOUGH_FOR_QUARTILES} seeds on the interquartile mean, with its 95 % bootstrap interval, and in
parentheses every seed with the standard deviation over its episodes, which is also what the zoo publishes, of one run.
*Reached*: the mean is not below the published mean less the published standard deviation. Runs that nobody has made are
listed as not run. Every run is a file in `benchmarks/published_runs`, with its commit, machine and versions.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--settings", type=json.loads, default={}, help="changes to ours, as JSON; needs a folder of its own")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--table", action="store_true", help="print what is finished")
    parser.add_argument("--out", type=Path, help="write what is finished into this page, and run nothing")
    options = parser.parse_args()
    if options.out:
        options.out.write_text(page(options.folder), encoding="utf-8")
        return
    if options.settings and options.folder == FOLDER:
        parser.error("--settings needs --folder: these runs are not those of the table")
    if not options.table:
        options.folder.mkdir(parents=True, exist_ok=True)
        # Seeds last, so that a script that was stopped has something to say about every row.
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        tasks = [(row, engine, seed) for seed in seeds for row in options.rows for engine in options.engines]
        waiting = [task for task in tasks if not file_of(options.folder, *task).exists()]
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            deadline = time.time() + 60.0 * options.minutes
            list(pool.map(partial(finish, folder=options.folder, deadline=deadline, changes=options.settings), waiting))
    print(table(options.folder))


def file_of(folder, row, engine, seed):
    return folder / f"{row}-{engine}-{seed}.json"


def finish(task, folder, deadline, changes):
    """Run one task and keep its result, unless the time is over."""
    if time.time() > deadline:
        return
    path = file_of(folder, *task)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(run(*task, changes)) + "\n", encoding="utf-8")
    unfinished.replace(path)
    print(path.stem, path.read_text(encoding="utf-8"), flush=True)


def run(row, engine, seed, changes):
    """Train and test once, with these changes of our settings; return the score, and what else belongs to it."""
    torch.set_num_threads(1)
    source = ROWS[row]
    settings = zoo_settings(source.algorithm, source.env_id, source.entry)
    if source.steps is not None:
        settings = dataclasses.replace(settings, steps=source.steps)
    algorithm = DistributionalPPO if engine == "tailguard" else PEERS[source.algorithm]
    if engine == "tailguard" and settings.normalize is not None:
        settings.normalize["norm_reward"] = False  # PopArt has this part
    env = settings.environment(seed)
    started = time.process_time()
    arguments = settings.arguments | (changes if engine == "tailguard" else {})
    model = algorithm(env=env, seed=seed, device="cpu", **arguments).learn(settings.steps)
    seconds = time.process_time() - started
    test = settings.test_environment(env, TEST_ENVS, seed=seed + 1000)
    mean, std = evaluate_policy(model, test, EPISODES, deterministic=True)
    found = {"score": float(mean), "spread": float(std), "steps": settings.steps, "cpu_seconds": seconds}
    where, versions = (line.removeprefix("- ") for line in machine(os.cpu_count() or 1)[:2])
    return found | {"commit": commit(), "machine": where, "versions": versions}


def central(scores):
    """Return the mean of runs and its 95 % percentile-bootstrap interval; the interquartile mean (Agarwal et al. 2021) where
    there are enough runs to leave a quarter out at either end."""
    scores = np.asarray(scores)
    cut = 0.25 if len(scores) >= ENOUGH_FOR_QUARTILES else 0.0
    draws = np.random.default_rng(0).choice(scores, (RESAMPLES, len(scores)))
    low, high = np.percentile(trim_mean(draws, cut, axis=1), [2.5, 97.5])
    return float(trim_mean(scores, cut)), float(low), float(high)


def page(folder):
    """Return the page of the documentation, as Markdown."""
    runs = [run for row in ROWS for engine in ENGINES for run in results(folder, row, engine)]
    about = [f"- {text}" for name in ("machine", "versions") for text in sorted({run[name] for run in runs})]
    peers = f"- Settings of rl_zoo3 {version('rl_zoo3')}. One thread per run."
    return "\n".join([INTRODUCTION, table(folder), "", *about, peers, ""])


def table(folder):
    columns = ("environment", "published", "ours: mean [95 %] (seeds)", "reached", "peer: the same")
    lines = [f"| {' | '.join(columns)} | CPU minutes per run: ours, peer |", "|---" * 6 + "|"]
    for name, row in ROWS.items():
        runs = {engine: results(folder, name, engine) for engine in ENGINES}
        minutes = [f"{np.median([run['cpu_seconds'] for run in of]) / 60.0:.1f}" if of else "-" for of in runs.values()]
        reached = ""
        if row.bar is not None and runs["tailguard"]:
            reached = "yes" if central([run["score"] for run in runs["tailguard"]])[0] >= row.bar else "no"
        title = row.env_id if row.steps is None else f"{row.env_id}, {row.steps:,} steps"
        cells = [title, row.published, cell(runs["tailguard"]), reached, cell(runs["peer"]), ", ".join(minutes)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {name} | {published} | | | | |" for name, published in ELSEWHERE.items()]
    return "\n".join(lines)


def results(folder, row, engine):
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{row}-{engine}-*.json"))]


def cell(runs):
    if not runs:
        return "not run"
    scores = [result["score"] for result in runs]
    mean, low, high = central(scores)
    interval = f" [{low:.1f}, {high:.1f}]" if len(runs) > 1 else ""
    return f"{mean:.1f}{interval} ({', '.join('{score:.0f} ± {spread:.0f}'.format(**run) for run in runs)})"


if __name__ == "__main__":
    with reaped():  # whatever ends this process, those of its pool end, too
        main()
