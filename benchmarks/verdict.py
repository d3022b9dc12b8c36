"""The verdict's speed, its false claims of skill, and its power.

    python benchmarks/verdict.py [speed] [walks] [trained] [cores] [--walks 200] [--draws 1000]

`speed` is the time of one paired bootstrap. `walks` counts verdicts on synthetic markets whose truth is known: driftless random
walks, and AR(1) returns that a momentum policy can use, traded without costs and taken through the whole assessment, baselines
and permutations included. A share p of N walks has a standard error of sqrt(p (1 - p) / N): 1.1 % for 2.5 % of 200. `trained`
counts verdicts on agents that were trained on random walks, walk-forward. `cores` compares walk-forward on two processes with
one. Without a name all of them run, which takes about a quarter of an hour on one core that has nothing else to do.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import numpy as np
import pandas as pd

from tailguard.config import load_config
from tailguard.evaluate import statistics
from tailguard.evaluate.assessment import Context, Effort, assess
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.folds import WalkforwardConfig, longest_lookback, make_folds
from tailguard.evaluate.record import Provenance
from tailguard.experiments.walkforward import Pair, WalkforwardRun, train_pairs, walkforward
from tailguard.market.baselines import strategy
from tailguard.market.rules import TradingRules
from tailguard.market.synthetic import ar1_returns, random_walk

OUTCOMES = ("evidence of skill", "no evidence of skill", "too little data to tell", "worse than")
BARS_PER_YEAR = 252
HISTORY = 252  # bars before the test, for the look-backs of the baselines
PERMUTATIONS = 99
TRAINED_AGENTS = 20
SHORT_TRAINING = ["training.steps=20000", "trading.fee=0.0005"]
EMPTY = Context("", "", pd.DataFrame(), pd.DataFrame(), Provenance("", "", {}, (0,), 1, ""))


def main():
    parts = {"speed": speed, "walks": walks, "trained": trained, "cores": cores}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=list(parts), help="what to measure")
    parser.add_argument("--walks", type=int, default=200, help="markets per row of `walks`")
    parser.add_argument("--draws", type=int, default=1000, help="resamples per verdict")
    options = parser.parse_args()
    for name in options.parts:
        parts[name](options)


def speed(options, draws=10_000, bars=5_000, strategies=8):
    rng = np.random.default_rng(0)
    returns = {str(k): rng.standard_t(4, bars) * 0.01 for k in range(strategies)}
    statistics.bootstrap(returns, BARS_PER_YEAR, draws=2)  # compiles
    metrics = len(statistics.METRICS)
    print(f"{draws:,} resamples x {bars:,} bars x {strategies} strategies, {metrics} metrics, one thread, CPU time")
    for block in (1.0, 10.0, 50.0):
        start = time.process_time()
        statistics.bootstrap(returns, BARS_PER_YEAR, draws=draws, block=block)
        print(f"  blocks of {block:>4.0f} bars: {time.process_time() - start:6.2f} s")
    start = time.process_time()
    statistics.superior_ability(np.zeros(bars), returns, draws=draws)
    print(f"  SPA:               {time.process_time() - start:6.2f} s")
    start = time.process_time()
    statistics.overfitting(rng.standard_normal((bars, 100)))
    print(f"  PBO of 100 trials: {time.process_time() - start:6.2f} s", flush=True)


def walks(options):
    print(f"\n{options.walks} markets per row\n{'market':<14}{'policy':<10}{'bars':>6}", *(f"{name:>24}" for name in OUTCOMES))
    for n in (500, 2500):
        for policy in ("coin", "momentum"):
            tell("random walk", policy, n, options, lambda seed, n=n: random_walk(HISTORY + n, seed=seed))
    for n in (250, 500, 1250, 2500):
        edge = {"rho": 0.1, "overnight_share": 0.0}
        tell("AR(1) 0.1", "momentum", n, options, lambda seed, n=n, edge=edge: ar1_returns(HISTORY + n, **edge, seed=seed))


def tell(market, policy, n, options, make_bars):
    counts = Counter(judged(make_bars(seed), policy, seed, options.draws) for seed in range(options.walks))
    print_row(f"{market:<14}{policy:<10}{n:>6}", counts)


def print_row(label, counts):
    total = sum(counts.values())
    print(label, *(f"{counts[outcome] / total:>24.1%}" for outcome in OUTCOMES), flush=True)


def judged(bars, policy, seed, draws):
    if policy == "coin":
        weights = strategy("random_positions", turnover=0.1, seed=seed)(bars)
    else:
        weights = np.sign(np.diff(bars["close"].to_numpy(), prepend=bars["close"].iloc[0]))
    window = BacktestWindow(bars, TradingRules(fee=0.0), (HISTORY, len(bars)))
    targets = weights[HISTORY:-1, None]
    effort = Effort(draws=draws, permutations=PERMUTATIONS, seed=seed)
    return assess(window, {"seed 0": targets}, [len(targets)], EMPTY, effort=effort).verdict.outcome


def trained(options):
    config, walk = load_config(None, SHORT_TRAINING), WalkforwardConfig(folds=2, seeds=2, jobs=1)
    settings = ", ".join(SHORT_TRAINING)
    print(
        f"\n{TRAINED_AGENTS} agents trained on random walks of 1,500 bars: {walk.folds} folds x {walk.seeds} seeds, {settings}"
    )
    counts, start = Counter(), time.process_time()
    for seed in range(TRAINED_AGENTS):
        effort = Effort(draws=options.draws, permutations=PERMUTATIONS, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            bars = random_walk(1500, seed=seed)
            record = walkforward(bars, config, walk, Path(folder), source=f"walk {seed}", effort=effort)
        counts[record.verdict.outcome] += 1
    print(" " * 30, *(f"{name:>24}" for name in OUTCOMES))
    print_row(f"{'random walk':<14}{'trained':<10}{len(record.agent.times):>6}", counts)
    print(f"  {time.process_time() - start:.0f} s of CPU time")


def cores(options, pairs=8):
    config = load_config()
    bars = random_walk(3000, seed=0)
    walk = WalkforwardConfig(folds=1, seeds=pairs)
    (fold,) = make_folds(len(bars), 63, longest_lookback(config.features), walk)
    seconds, cpu = {}, {}
    for jobs in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            start, busy = time.perf_counter(), cpu_seconds()
            todo = [Pair(fold, seed) for seed in range(pairs)]
            train_pairs(WalkforwardRun(bars, config, walk.warmup, Path(folder)), todo, jobs, lambda *said: None)
            seconds[jobs], cpu[jobs] = time.perf_counter() - start, cpu_seconds() - busy
    print(f"\nwalk-forward, {pairs} trainings of {config.training.steps:,} steps, one process against two")
    print(f"  wall clock: {seconds[1]:.1f} s and {seconds[2]:.1f} s, {seconds[1] / seconds[2]:.2f} times as fast")
    print(f"  CPU time:   {cpu[1]:.1f} s and {cpu[2]:.1f} s: {2.0 * cpu[1] / cpu[2]:.2f} times on two cores that are free")


def cpu_seconds():
    """Return the CPU time of this process and of those it has waited for."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


if __name__ == "__main__":
    main()
