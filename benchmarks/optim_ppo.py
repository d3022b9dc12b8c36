"""Do variance scaling and UPGD pay inside PPO? `make bench-optim_ppo`

CartPole-v1, `SignalMarket`, and a `SignalMarket` whose signal turns its sign every 240,000 steps, which is where optimizers for
continual learning should help. Five seeds, the same settings for all; the score of a run is the mean over its last third, as a
share of the best possible: in the market that turns, two whole regimes, the time of learning anew included. Intervals are
bootstrap percentiles of the mean over seeds, and of the difference to Adam seed by seed.
"""

import argparse
import os
import platform
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from tailguard import DistributionalPPO
from tailguard.market import SignalMarket
from tailguard.parallel.reaper import reaped

OPTIMIZERS = {
    "Adam": {},
    "Adam, VGS": {"vgs": {}},
    "AdaptiveUPGD": {"optimizer": {"name": "adaptive_upgd", "sigma": 0.0}},
    "AdaptiveUPGD, noise": {"optimizer": {"name": "adaptive_upgd", "sigma": 0.01, "adaptive_noise": True}},
    "AdaptiveUPGD, noise, VGS": {"optimizer": {"name": "adaptive_upgd", "sigma": 0.01, "adaptive_noise": True}, "vgs": {}},
}
ENVS, STEPS, TURN = 32, 64, 240_000


class TurningMarket(SignalMarket):
    """The signal means the opposite after every `TURN` steps of all copies together."""

    played = 0

    def _advance(self, actions):
        self.beta = abs(self.beta) if (self.played // TURN) % 2 == 0 else -abs(self.beta)
        self.played += self.num_envs
        return super()._advance(actions)


class Rewards(BaseCallback):
    """Collects the mean reward of every rollout."""

    def __init__(self):
        super().__init__()
        self.means = []

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        self.means.append(self.model.rollout_buffer.rewards.mean().item())


def market(make, steps, settings, seed, entropy=0.0):
    env = make(ENVS, episode_length=256, seed=seed)
    best = SignalMarket().solve().average_reward
    watch = Rewards()
    settings = {"entropy": {"initial": entropy, "final": entropy}, "learning_rate": 1e-3, "gamma": 0.95, **settings}
    DistributionalPPO("MlpPolicy", env, n_steps=STEPS, seed=seed, **settings).learn(steps, watch)
    return float(np.mean(watch.means[-len(watch.means) // 3 :])) / best


def pole(settings, seed):
    env = make_vec_env("CartPole-v1", 8, seed=seed)
    model = DistributionalPPO("MlpPolicy", env, n_steps=128, n_epochs=8, learning_rate=1e-3, seed=seed, **settings)
    lengths = []

    class Watch(BaseCallback):
        def _on_step(self):
            lengths.extend(info["episode"]["r"] for info in self.locals["infos"] if "episode" in info)
            return True

    model.learn(60_000, Watch())
    return float(np.mean(lengths[-len(lengths) // 3 :])) / 500.0


TASKS = {
    "SignalMarket, 240k": lambda settings, seed: market(SignalMarket, 240_000, settings, seed),
    # Without a bonus exploration dies out in the first regime, and no optimizer relearns anything.
    "SignalMarket that turns, 1.44M": lambda settings, seed: market(TurningMarket, 6 * TURN, settings, seed, 0.03),
    "CartPole-v1, 60k steps": pole,
}


def one(task, optimizer, seed):
    torch.set_num_threads(1)
    return TASKS[task](OPTIMIZERS[optimizer], seed)


def interval(values):
    draws = np.random.default_rng(0).choice(values, (4000, len(values))).mean(1)
    return np.percentile(draws, [2.5, 97.5])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, of one thread each")
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, seeds 0 to {arguments.seeds - 1}, one thread each")
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("forkserver")) as pool:
        for task in (task for task in TASKS if arguments.only in task):
            print(f"\n{task}\n\n| optimizer | share of the best, mean of seeds | 95 % interval | less Adam | each seed |")
            print("|---|---|---|---|---|", flush=True)
            scores = {}
            for name in OPTIMIZERS:  # Adam first
                own = scores[name] = np.array(list(pool.map(one, [task] * len(seeds), [name] * len(seeds), seeds)))
                low, high = interval(own)
                less, more = interval(own - scores["Adam"])
                each = ", ".join(f"{score:.3f}" for score in own)
                print(
                    f"| {name} | {own.mean():.3f} | {low:.3f} to {high:.3f} | {less:.3f} to {more:.3f} | {each} |", flush=True
                )


if __name__ == "__main__":
    with reaped():  # whatever ends this process, those of its pool end, too
        main()
