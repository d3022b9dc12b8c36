"""Learning, compared with known optima and Stable-Baselines3 at equal samples: `make bench-learning`.

Every seed is reported. Optima come from dynamic programming (`solve()` of each market), never from a table. One thread per
process; the seeds of a task run side by side on the cores there are.
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor

from tailguard import DistributionalPPO, TradingVecEnv
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.market import BettingGame, SignalMarket, random_walk
from tailguard.parallel.reaper import reaped
from tailguard.ppo.schedules import LinearSchedule


class WithoutVelocities(gym.ObservationWrapper):
    """CartPole that shows positions only: velocities must be remembered."""

    def __init__(self, env):
        super().__init__(env)
        space = env.observation_space
        self.observation_space = gym.spaces.Box(space.low[[0, 2]], space.high[[0, 2]], dtype=np.float32)

    def observation(self, observation):
        return observation[[0, 2]]


def cart_pole_without_velocities():
    return WithoutVelocities(gym.make("CartPole-v1"))


def episodes(model, env, n=50):
    """Mean return of episodes with the most likely actions."""
    return float(evaluate_policy(model, env, n, deterministic=True)[0])


def gym_task(make, steps, n_envs, algorithm, policy, **settings):
    def run(seed):
        model = algorithm(policy, make_vec_env(make, n_envs, seed=seed), seed=seed, device="cpu", **settings)
        model.learn(steps)
        return episodes(model, make_vec_env(make, 5, seed=seed + 1000))

    return run


def share_of_best(model, market, seed, steps=2000, skip=100):
    """Return what the most likely actions earn per step, as a share of the optimum, after the start has been forgotten.

    The noise of a return is ten times the reward and more. So returns are replaced by their expectation given all that the
    agent could know, and the best policy trades beside it on the same signals: only where the two differ is there noise left.
    Two runs of the same agent then differ by 0.002; without, they would by 0.03.
    """
    env, best = GymVectorAdapter(market, seed), market.solve()
    obs, state, starts = env.reset(), None, np.ones(env.num_envs, bool)
    belief, held, ideal, lost = np.zeros(env.num_envs), np.zeros(env.num_envs), np.zeros(env.num_envs), 0.0
    for step in range(steps + skip):
        belief = market.filter.step(belief, obs[:, 0]) if market.hidden else market.signal
        actions, state = model.predict(obs, state, starts, deterministic=True)
        target, optimal = np.clip(actions[:, 0], -1.0, 1.0), best.policy(belief, ideal)
        paid = market.cost * (np.abs(target - held) - np.abs(optimal - ideal))
        lost += (market.beta * belief * (optimal - target) + paid).mean() if step >= skip else 0.0
        obs, _, starts, _ = env.step(actions)
        held, ideal = target, optimal
    return 1.0 - lost / steps / best.average_reward


def signal_task(steps, hidden, algorithm, policy, n_envs=64, **settings):
    def run(seed):
        env = VecMonitor(GymVectorAdapter(SignalMarket(n_envs, hidden=hidden, episode_length=1000), seed))
        model = algorithm(policy, env, seed=seed, device="cpu", **settings)
        model.learn(steps)
        test = SignalMarket(1024, hidden=hidden, episode_length=100_000)
        return share_of_best(model, test, seed + 1000)

    return run


def betting_task(steps, **settings):
    def run(seed):
        model = DistributionalPPO("MlpPolicy", BettingGame(256), seed=seed, **settings)
        model.learn(steps)
        env = VecMonitor(GymVectorAdapter(BettingGame(1000), seed + 1000))
        return episodes(model, env, 20_000) / BettingGame(1).solve().mean

    return run


def random_walk_task(steps, **settings):
    """Mean absolute weight that the agent holds on a driftless walk with fees; an agent that has understood holds none."""

    def run(seed):
        walk = random_walk(20_000, seed=seed)
        env = VecMonitor(TradingVecEnv(walk, n_envs=64, episode_length=256, fee=0.001, seed=seed))
        model = DistributionalPPO("MlpPolicy", env, seed=seed, **settings)
        model.learn(steps)
        fresh = TradingVecEnv(random_walk(20_000, seed=seed + 1000), n_envs=64, episode_length=256, fee=0.001, seed=seed)
        obs, traded = fresh.reset(), 0.0
        for _ in range(256):
            actions, _ = model.predict(obs, deterministic=True)
            obs, _, _, _ = fresh.step(actions)
            traded += fresh.batch.accounts[:, 6].mean()  # turnover
        return traded / 256

    return run


@dataclass(frozen=True)
class Task:
    """Something to learn, what is expected, and how to find out for one seed."""

    name: str
    goal: str
    run: Callable[[int], float]


CLASSIC = {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.98, "gae_lambda": 0.8}
NO_VELOCITY = {
    "n_steps": 128,
    "batch_size": 256,
    "n_epochs": 10,
    "learning_rate": 7e-4,
    "gae_lambda": 0.98,
    "max_grad_norm": 1.0,
}
LSTM = {"lstm_hidden_size": 64, "net_arch": {"pi": [], "vf": [64]}, "ortho_init": False}
PENDULUM = {"n_steps": 1024, "batch_size": 256, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.9, "gae_lambda": 0.95}
ACROBOT = {"n_steps": 256, "batch_size": 512, "n_epochs": 4, "gae_lambda": 0.94, "learning_rate": 5e-4}
SIGNAL = {
    "n_steps": 128,
    "batch_size": 512,
    "n_epochs": 4,
    "gamma": 0.98,
    "gae_lambda": 0.95,
    "learning_rate": LinearSchedule(6e-4, 3e-5),
    # Turning a position round pays only if it is done at once and by its whole length: small moves never show that.
    "policy_kwargs": {"log_std_init": 1.0},
}
# One step earns 0.0137 at best, and the noise of a return is 1: only large batches and many steps tell the two apart. A signal
# lasts for 20 steps and a position for 100: shorter horizons turn round too late. Explained variances near 0 are the nature of
# this task and no reason for more exploration; with an entropy coefficient of 0.001 one agent of three never traded.
HIDDEN = {
    "n_envs": 256,
    "n_steps": 128,
    "batch_size": 16_384,
    "n_epochs": 4,
    "gamma": 0.995,
    "gae_lambda": 0.98,
    "learning_rate": LinearSchedule(3e-3, 3e-5),
    "entropy": {"initial": 0.005, "boost_factor": 1.0},
    "policy_kwargs": {
        "lstm_hidden_size": 32,
        "net_arch": [32],
        "log_std_init": 0.3,
        "lstm_forget_bias": 1.0,
        "censored": True,
    },
}
MIN = {"critic": {"aggregate": "min"}}
BETTING = {"n_steps": 24, "batch_size": 1536, "n_epochs": 4, "gamma": 1.0, "gae_lambda": 0.95, "learning_rate": 1e-3}
WALK = {"n_steps": 128, "batch_size": 2048, "n_epochs": 4, "gamma": 0.95}

TASKS = [
    Task("CartPole-v1, 100k", ">= 475", gym_task("CartPole-v1", 100_000, 8, DistributionalPPO, "MlpPolicy", **CLASSIC)),
    Task("CartPole-v1, 100k, min", "", gym_task("CartPole-v1", 100_000, 8, DistributionalPPO, "MlpPolicy", **CLASSIC, **MIN)),
    Task("CartPole-v1, 100k, SB3 PPO", "", gym_task("CartPole-v1", 100_000, 8, PPO, "MlpPolicy", **CLASSIC)),
    Task(
        "CartPole without velocities, 50k, LSTM",
        ">= 450",
        gym_task(
            cart_pole_without_velocities, 50_000, 8, DistributionalPPO, "MlpLstmPolicy", **NO_VELOCITY,
            policy_kwargs=LSTM, normalize_obs=True,
        ),
    ),
    Task(
        "CartPole without velocities, 50k, MLP",
        "<= 100",
        gym_task(cart_pole_without_velocities, 50_000, 8, DistributionalPPO, "MlpPolicy", **NO_VELOCITY, normalize_obs=True),
    ),
    Task("Pendulum-v1, 200k", ">= SB3", gym_task("Pendulum-v1", 200_000, 4, DistributionalPPO, "MlpPolicy", **PENDULUM)),
    Task("Pendulum-v1, 200k, min", "", gym_task("Pendulum-v1", 200_000, 4, DistributionalPPO, "MlpPolicy", **PENDULUM, **MIN)),
    Task("Pendulum-v1, 200k, SB3 PPO", "", gym_task("Pendulum-v1", 200_000, 4, PPO, "MlpPolicy", **PENDULUM)),
    Task("Acrobot-v1, 200k", ">= SB3", gym_task("Acrobot-v1", 200_000, 16, DistributionalPPO, "MlpPolicy", **ACROBOT)),
    Task("Acrobot-v1, 200k, min", "", gym_task("Acrobot-v1", 200_000, 16, DistributionalPPO, "MlpPolicy", **ACROBOT, **MIN)),
    Task("Acrobot-v1, 200k, SB3 PPO", "", gym_task("Acrobot-v1", 200_000, 16, PPO, "MlpPolicy", **ACROBOT)),
    Task("SignalMarket, 1M, of optimum", ">= 0.98", signal_task(1_000_000, False, DistributionalPPO, "MlpPolicy", **SIGNAL)),
    Task("SignalMarket, 1M, min", "", signal_task(1_000_000, False, DistributionalPPO, "MlpPolicy", **SIGNAL, **MIN)),
    Task("SignalMarket, 1M, SB3 PPO, of optimum", "", signal_task(1_000_000, False, PPO, "MlpPolicy", **SIGNAL)),
    Task(
        "SignalMarket hidden, 16M, LSTM, share of the Kalman bound",
        ">= 0.90",
        signal_task(16_000_000, True, DistributionalPPO, "MlpLstmPolicy", **HIDDEN),
    ),
    Task("BettingGame p = .88, 500k, share of optimum", ">= 0.90", betting_task(500_000, **BETTING)),
    Task("Random walk with fees, 500k, turnover per bar", "about 0", random_walk_task(500_000, **WALK)),
]  # fmt: skip


def run_one(task: int, seed: int) -> float:
    torch.set_num_threads(1)
    return TASKS[task].run(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    options = parser.parse_args()
    chosen = [i for i, task in enumerate(TASKS) if options.only in task.name]
    print(f"torch {torch.__version__}, seeds 0 to {options.seeds - 1}, one thread each\n")
    print("| task | goal | median | every seed | seconds |\n|---|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        for i in chosen:
            start = time.perf_counter()
            results = list(pool.map(run_one, [i] * options.seeds, range(options.seeds)))
            seconds = time.perf_counter() - start
            each = ", ".join(f"{result:.3g}" for result in results)
            print(f"| {TASKS[i].name} | {TASKS[i].goal} | {np.median(results):.4g} | {each} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    with reaped():  # whatever ends this process, those of its pool end, too
        main()
