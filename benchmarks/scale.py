"""How time and memory grow with the size of a problem: `make bench-scale`.

Every point is a process of its own. Printed are the CPU time of the work (after a first call that compiles), the steps of all
environments per second of it, the peak memory above that of the smallest point, and the exponent of the growth over the larger
half of the points: 1 is linear, and what exceeds it needs a reason (REASONS). One thread, seed 0. `--axes hidden bars:features`
and `--most 100000` do a part.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STEPS = 128


def hidden(n):
    return training(lstm_hidden_size=n, n_envs=64)


def envs(n):
    return training(lstm_hidden_size=64, n_envs=n)


def quantiles(n):
    return training(lstm_hidden_size=64, n_envs=64, critic={"num_quantiles": n})


def training(lstm_hidden_size, n_envs, critic=None):
    """One rollout and its update, separate LSTMs, on the work of benchmarks/speed.py."""
    import torch
    from work import WorkEnv

    from tailguard import DistributionalPPO

    torch.set_num_threads(1)
    network = {"lstm_hidden_size": lstm_hidden_size, "net_arch": {"pi": [64], "vf": [64]}}
    settings = {"n_steps": STEPS, "critic": critic, "policy_kwargs": network, "seed": 0}
    model = DistributionalPPO("MlpLstmPolicy", WorkEnv(n_envs), **settings)
    return lambda: model.learn(STEPS * n_envs, reset_num_timesteps=False)


def assets(n):
    """A portfolio of n assets: 128 steps of 16 accounts."""
    from tailguard import TradingVecEnv

    env = TradingVecEnv(portfolio(n, 1_000), n_envs=16, episode_length=256, seed=0)
    env.reset()
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (STEPS, 16, n)).astype(np.float32)
    return lambda: [env.step_arrays(action) for action in actions]


def assets_features(n):
    from tailguard.market import build_features

    bars = portfolio(n, 1_000)
    return lambda: build_features(bars)


def features(n):
    from tailguard.market import build_features

    bars = walk(n)
    return lambda: build_features(bars)


def read(n):
    from tailguard.market import load_bars

    folder = tempfile.mkdtemp()
    file = Path(folder) / "bars.csv"
    walk(n).to_csv(file)
    return lambda: load_bars(file)


def backtest(n):
    from tailguard.market import simulate

    bars = walk(n)
    weights = np.sign(np.random.default_rng(0).standard_normal(n))
    return lambda: simulate(bars, weights, fee=0.0005)


def environment(n):
    """128 steps of 64 accounts: the number of bars should not matter."""
    from tailguard import TradingVecEnv

    env = TradingVecEnv(walk(n), n_envs=64, episode_length=256, seed=0)
    env.reset()
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (STEPS, 64, 1)).astype(np.float32)
    return lambda: [env.step_arrays(action) for action in actions]


def judge(n):
    """The verdict on a file of returns, with its report: bootstraps included."""
    import pandas as pd

    from tailguard import judge as judged

    returns = pd.Series(0.01 * np.random.default_rng(0).standard_normal(n), pd.bdate_range("1900-01-01", periods=n, tz="UTC"))
    folder = Path(tempfile.mkdtemp())
    return lambda: judged(returns=returns, ledger=None).write_report(folder / "report.html")


def bootstrap(n):
    """Intervals of all statistics from 1,000 resamples of n returns."""
    from tailguard.evaluate.stats.bootstrap import bootstrap as resampled

    returns = {"strategy": 0.01 * np.random.default_rng(0).standard_normal(n)}
    return lambda: resampled(returns, 252.0, draws=1_000)


# Steps of all environments in one call, for the axes that are about steps.
ENV_STEPS = {
    "hidden": lambda n: STEPS * 64,
    "envs": lambda n: STEPS * n,
    "quantiles": lambda n: STEPS * 64,
    "assets:step": lambda n: STEPS * 16,
    "bars:environment": lambda n: STEPS * 64,
}
AXES = {
    "hidden": (hidden, [16, 32, 64, 128, 256, 512]),
    "envs": (envs, [1, 4, 16, 64, 256, 1024]),
    "quantiles": (quantiles, [1, 8, 32, 128, 512]),
    "assets:step": (assets, [1, 5, 20, 100, 500]),
    "assets:features": (assets_features, [1, 5, 20, 100, 500]),
    "bars:read": (read, [1_000, 10_000, 100_000, 1_000_000]),
    "bars:features": (features, [1_000, 10_000, 100_000, 1_000_000]),
    "bars:backtest": (backtest, [1_000, 10_000, 100_000, 1_000_000]),
    "bars:environment": (environment, [1_000, 10_000, 100_000, 1_000_000]),
    "bars:bootstrap": (bootstrap, [250, 1_000, 4_000, 16_000]),
    "bars:judge": (judge, [250, 1_000, 4_000, 16_000]),
}
# Why an exponent is above 1.
REASONS = {"hidden": "an LSTM of size H has 4 H (H + inputs) weights: the exponent tends to 2"}


def walk(n):
    from tailguard.market import random_walk

    return random_walk(n, seed=0, freq="1min")


def portfolio(n, bars):
    from tailguard.market import align_bars, random_walk

    return align_bars({f"asset-{i}": random_walk(bars, seed=i) for i in range(n)})


def point(axis, n):
    """Return CPU seconds of one call and peak memory in MB, in this process."""
    work = AXES[axis][0](n)
    work()  # compiles
    seconds, began = [], time.perf_counter()
    while len(seconds) < 3 or (time.perf_counter() - began < 1.0 and len(seconds) < 50):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
        if seconds[-1] > 20.0:
            break
    return {"seconds": float(np.median(seconds)), "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def exponent(sizes, seconds):
    """Return the slope of log(seconds) over log(size) through the larger half of the points, at least two of them."""
    half = min(len(sizes) // 2, len(sizes) - 2)
    return float(np.polyfit(np.log(sizes[half:]), np.log(seconds[half:]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=AXES)
    parser.add_argument("--most", type=float, default=float("inf"), help="leave out larger points")
    parser.add_argument("--point", type=int, help="measure one point of one axis, and print it as JSON")
    options = parser.parse_args()
    if options.point is not None:
        print(json.dumps(point(options.axes[0], options.point)))
        return
    for axis in options.axes:
        sizes = [size for size in AXES[axis][1] if size <= options.most]
        found = []
        for size in sizes:
            command = [sys.executable, __file__, "--axes", axis, "--point", str(size)]
            found.append(
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            )
        seconds = [result["seconds"] for result in found]
        steps = ENV_STEPS.get(axis)
        print(f"\n## {axis}\n\n| size | CPU seconds | per unit of size, us | steps/s | memory above the first, MB |")
        print("|---|---|---|---|---|")
        for size, result in zip(sizes, found, strict=True):
            above = result["mb"] - found[0]["mb"]
            per_unit, rate = 1e6 * result["seconds"] / size, f"{steps(size) / result['seconds']:,.0f}" if steps else ""
            print(f"| {size:,} | {result['seconds']:.4g} | {per_unit:.4g} | {rate} | {above:.0f} |")
        print(f"\nexponent {exponent(np.array(sizes), np.array(seconds)):.2f}. {REASONS.get(axis, '')}", flush=True)


if __name__ == "__main__":
    main()
