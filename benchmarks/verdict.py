"""How fast the bootstrap is, how often the verdict claims skill where there is none, and how often it finds what is there.

    python benchmarks/verdict.py [--walks 200] [--draws 1000]

The first table is the time of one paired bootstrap. The second counts verdicts on synthetic markets whose truth is known:
driftless random walks, and AR(1) returns that a momentum policy can use, both through the accounting without costs and
against four baselines. A share p of N walks has a standard error of sqrt(p (1 - p) / N): 1.1 % for 2.5 % of 200.
A run takes a few minutes on one core.
"""

import argparse
import time
from collections import Counter

import numpy as np
import pandas as pd

from tailguard.evaluate import statistics
from tailguard.market import simulate
from tailguard.market.baselines import strategy
from tailguard.market.synthetic import ar1_returns, random_walk

OUTCOMES = ("evidence of skill", "no evidence of skill", "too little data to tell", "worse than")
BARS_PER_YEAR = 252
BLOCK = 20  # bars of the agent's own positions that stay together when they are shuffled


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--walks", type=int, default=200, help="markets per row")
    parser.add_argument("--draws", type=int, default=1000, help="resamples per verdict")
    options = parser.parse_args()
    speed(draws=10_000, bars=5_000, strategies=8)
    print(f"\n{'market':<14}{'policy':<10}{'bars':>6}" + "".join(f"{outcome:>25}" for outcome in OUTCOMES))
    for n in (500, 1250, 2500):
        for policy in ("coin", "momentum"):
            report("random walk", policy, n, options, lambda seed, n=n: random_walk(n, seed=seed))
    for n in (250, 500, 1250, 2500):
        report("AR(1) 0.1", "momentum", n, options, lambda seed, n=n: ar1_returns(n, rho=0.1, overnight_share=0.0, seed=seed))


def speed(draws, bars, strategies):
    rng = np.random.default_rng(0)
    returns = {str(k): rng.standard_t(4, bars) * 0.01 for k in range(strategies)}
    statistics.bootstrap(returns, BARS_PER_YEAR, draws=2)  # compiles
    print(f"{draws:,} resamples x {bars:,} bars x {strategies} strategies, {len(statistics.METRICS)} metrics, one thread")
    for block in (1.0, 10.0, 50.0):
        start = time.perf_counter()
        statistics.bootstrap(returns, BARS_PER_YEAR, draws=draws, block=block)
        print(f"  blocks of {block:>4.0f} bars: {time.perf_counter() - start:6.2f} s")
    start = time.perf_counter()
    statistics.superior_ability(np.zeros(bars), returns, draws=draws)
    print(f"  SPA:               {time.perf_counter() - start:6.2f} s")
    start = time.perf_counter()
    statistics.overfitting(rng.standard_normal((bars, 100)))
    print(f"  PBO of 100 trials: {time.perf_counter() - start:6.2f} s")


def report(market, policy, n, options, make_bars):
    counts = Counter(judged(make_bars(seed), policy, seed, options.draws) for seed in range(options.walks))
    shares = "".join(f"{counts[outcome] / options.walks:>25.1%}" for outcome in OUTCOMES)
    print(f"{market:<14}{policy:<10}{n:>6}{shares}", flush=True)


def judged(bars: pd.DataFrame, policy: str, seed: int, draws: int) -> str:
    if policy == "coin":
        weights = strategy("random_positions", turnover=0.1, seed=seed)(bars)
    else:
        weights = np.sign(np.diff(bars["close"].to_numpy(), prepend=bars["close"].iloc[0]))
    order = np.random.default_rng(seed).permutation(len(bars) // BLOCK)
    blocks = np.concatenate([np.arange(BLOCK * k, BLOCK * (k + 1)) for k in order])
    targets = {
        "agent": weights,
        "hold": strategy("buy_and_hold")(bars),
        "mix": np.full(len(bars), weights.mean()),
        "shuffled": np.concatenate([weights[blocks], weights[len(blocks) :]]),
        "trend": strategy("moving_average")(bars),
    }
    returns = {name: statistics.returns_of(simulate(bars, target, fee=0.0).equity) for name, target in targets.items()}
    agent = returns.pop("agent")
    return statistics.judge(agent, returns, BARS_PER_YEAR, market="hold", draws=draws, seed=seed).outcome


if __name__ == "__main__":
    main()
