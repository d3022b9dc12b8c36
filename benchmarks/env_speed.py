"""Environment steps per second, against gym-anytrading and Gym-Trading-Env in the same run: `make bench-env`.

Every line is one process with one thread, random actions, 23 features per bar. The engines take turns for several rounds,
so that a busy machine slows all of them; the median of the rounds and their spread are printed, and ratios of medians.
"""

import argparse
import contextlib
import io
import platform
import resource
import time
import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd

from tailguard.market import build_features, load_dataset
from tailguard.market.env import TradingVecEnv

BATCHES = (1, 8, 64, 256, 1024)
FEE = 0.0005


def tailguard_steps(bars, features, n_envs, arrays):
    env = TradingVecEnv(bars, n_envs=n_envs, episode_length=512, fee=FEE, features=features, seed=0)
    env.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (256, n_envs, 1)).astype(np.float32)
    step = env.step_arrays if arrays else env.step

    def play(seconds: float) -> float:
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for batch in actions:
                step(batch)
            steps += len(actions) * n_envs
        return steps / (time.perf_counter() - start)

    return play


def gymnasium_steps(env):
    """Steps per second of one Gymnasium env with random discrete actions, resets included."""
    actions = np.random.default_rng(0).integers(0, env.action_space.n, 256).tolist()
    env.reset(seed=0)

    def play(seconds: float) -> float:
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for action in actions:
                _, _, terminated, truncated, _ = env.step(action)
                steps += 1
                if terminated or truncated:
                    with contextlib.redirect_stdout(io.StringIO()):
                        env.reset()
        return steps / (time.perf_counter() - start)

    return play


def peers(bars: pd.DataFrame, features: np.ndarray) -> dict[str, Callable[[float], float]]:
    """The peers on the same bars, with the same number of features where they take features at all."""
    found = {}
    with contextlib.suppress(ImportError):
        import gym_anytrading  # noqa: F401
        from gym_anytrading.envs import StocksEnv

        frame = bars.rename(columns=str.capitalize)
        found["gym-anytrading StocksEnv, window 10, 2 features"] = gymnasium_steps(StocksEnv(frame, 10, (10, len(frame))))
    with contextlib.suppress(ImportError):
        with warnings.catch_warnings():  # importing it turns all warnings of the process into errors
            from gym_trading_env.environments import TradingEnv as PeerEnv

        frame = bars.copy()
        for column in range(features.shape[1]):
            frame[f"feature_{column}"] = features[:, column]
        peer = PeerEnv(frame, positions=[-1, 0, 1], trading_fees=FEE, max_episode_duration=512, verbose=0)
        found[f"Gym-Trading-Env, {features.shape[1]} features"] = gymnasium_steps(peer)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="per engine and round")
    options = parser.parse_args()

    bars = load_dataset("nasdaq-1d")
    features = build_features(bars)
    engines: dict[str, Callable[[float], float]] = {}
    for n_envs in BATCHES:
        engines[f"Tailguard arrays, {n_envs} envs"] = tailguard_steps(bars, features, n_envs, arrays=True)
        engines[f"Tailguard as SB3 VecEnv, {n_envs} envs"] = tailguard_steps(bars, features, n_envs, arrays=False)
    engines |= peers(bars, features.values)
    for play in engines.values():
        play(0.05)  # compile and warm up
    rates = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, play in engines.items():
            rates[name].append(play(options.seconds))

    medians = {name: float(np.median(values)) for name, values in rates.items()}
    names = list(medians)
    anytrading = next((medians[name] for name in names if name.startswith("gym-anytrading")), np.nan)
    trading_env = next((medians[name] for name in names if name.startswith("Gym-Trading-Env")), np.nan)
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, one thread"
    )
    print(f"{len(bars)} bars, {features.values.shape[1]} features, {options.rounds} rounds of {options.seconds} s, seed 0\n")
    print("| environment | env-steps/s, median | min .. max | x gym-anytrading | x Gym-Trading-Env |")
    print("|---|---|---|---|---|")
    for name, values in rates.items():
        rate = medians[name]
        spread = f"{min(values):,.0f} .. {max(values):,.0f}"
        print(f"| {name} | {rate:,.0f} | {spread} | {rate / anytrading:.1f} | {rate / trading_env:.1f} |")
    print()
    print_memory(bars, features)


def print_memory(bars, features) -> None:
    """Peak memory must not grow with copies of the features: they are shared."""
    size = features.values.nbytes / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    env = TradingVecEnv(bars, n_envs=4096, episode_length=512, fee=FEE, features=features, seed=0)
    env.reset()
    for _ in range(100):
        env.step_arrays(np.zeros((4096, 1)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    print(f"memory: 4096 envs add {grown:.1f} MiB; the features, held once, take {size:.1f} MiB")


if __name__ == "__main__":
    main()
