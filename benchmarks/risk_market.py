"""Agents for the mean and for tails on a shipped market, and what the tail costs in training: a part of risk.py."""

import time
from collections.abc import Callable

import numpy as np

from tailguard import DistributionalPPO, ReturnObserver, TradingVecEnv
from tailguard.market import load_dataset
from tailguard.market.kernel import NOW

WEEK, SEEDS, RESAMPLES = 168, 5, 2000


def market_model(alpha: float, seed: int) -> DistributionalPPO:
    bars = load_dataset("btcusd-1h")
    risk = {"objective": "neutral"} if alpha == 1.0 else {"objective": "cvar", "alpha": alpha}
    env = TradingVecEnv(bars, n_envs=64, episode_length=WEEK, fee=0.0005, span=(0, int(0.8 * len(bars))), seed=seed)
    settings = {"n_steps": 64, "batch_size": 1024, "n_epochs": 4, "gamma": 1.0, "learning_rate": 3e-4}
    return DistributionalPPO("MlpPolicy", env, seed=seed, risk=risk, normalize_obs=True, **settings)


def market_weeks(alpha: float, seed: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-returns in percent of 512 weeks of the validation span, the same for every agent, and the week each begins in."""
    model, bars = market_model(alpha, seed).learn(steps), load_dataset("btcusd-1h")
    span = (int(0.8 * len(bars)), len(bars))
    test = TradingVecEnv(bars, n_envs=512, episode_length=WEEK, fee=0.0005, span=span, seed=1000)
    env = ReturnObserver(test, 1.0) if model.risk_config.return_augmented else test
    obs, total, open_ = env.reset(), np.zeros(512), np.ones(512, bool)
    begins = (test.batch.clock[NOW] - span[0]) // WEEK
    for _ in range(WEEK):
        obs, rewards, dones, _ = env.step(model.predict(obs, deterministic=True)[0])
        total += np.where(open_, rewards, 0.0)
        open_ &= ~dones
    return 100.0 * total, begins


def even_tail(values: np.ndarray) -> float:
    return tail_mean(np.sort(values, axis=None), np.full(values.size, 1.0 / values.size), 0.05)


def with_interval(measure: Callable[[np.ndarray], float], totals: np.ndarray, begins: np.ndarray) -> str:
    """The measure over all seeds and weeks, and where 95 % of it lie when seeds and calendar weeks are drawn anew."""
    draws, weeks = np.random.default_rng(0), [np.flatnonzero(begins == week) for week in np.unique(begins)]
    found = []
    for _ in range(RESAMPLES):
        columns = np.concatenate([weeks[i] for i in draws.integers(len(weeks), size=len(weeks))])
        rows = draws.integers(len(totals), size=len(totals))
        found.append(measure(totals[rows][:, columns]))
    low, high = np.quantile(found, (0.025, 0.975))
    return f"{measure(totals):.2f} [{low:.2f}, {high:.2f}]"


def tail_mean(values: np.ndarray, mass: np.ndarray, alpha: float) -> float:
    below = np.cumsum(mass) - mass
    return float(np.clip(alpha - below, 0.0, mass) @ values / alpha)


def training_cost(seed: int, steps: int) -> float:
    """CPU time of training for a tail over that of training for the mean: turn by turn in one process, medians."""
    models = [market_model(alpha, seed).learn(64 * 64) for alpha in (1.0, 0.05)]  # compiled on first use, which is no cost
    times: list[list[float]] = [[], []]
    for _ in range(9):
        for model, seconds in zip(models, times, strict=True):
            start = time.process_time()
            model.learn(steps)
            seconds.append(time.process_time() - start)
    return float(np.median(times[1]) / np.median(times[0]))
