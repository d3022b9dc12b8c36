"""Environment steps per second, end to end, against Stable-Baselines3 and JAX on the same work in one run: `make bench-speed`.

Work (work.py): 64 envs x 128 steps, 4 epochs, minibatches of 1,024 samples, LSTM 64 and one layer of 64 per head (or two of
64 without memory), Adam, one thread. Equal networks, samples and gradient steps. The engines take turns; medians of rounds.
"""

import argparse
import platform
import time

import numpy as np
import stable_baselines3
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from work import WorkEnv

from tailguard import DistributionalPPO

try:
    from jax_peer import JaxPPO
except ModuleNotFoundError as missing:
    if missing.name != "jax":
        raise
    JaxPPO = None

STEPS, ENVS = 128, 64
SCALAR = {"num_quantiles": 1, "twin": False, "target": "lambda_return"}
HEADS = {"pi": [64], "vf": [64]}
DEEP = {"pi": [64, 64], "vf": [64, 64]}


def ours(policy, critic, **policy_kwargs):
    return DistributionalPPO(
        policy, WorkEnv(ENVS), n_steps=STEPS, batch_size=1024, n_epochs=4, critic=critic, seed=0, policy_kwargs=policy_kwargs
    )


def theirs(algorithm, policy, **policy_kwargs):
    return algorithm(
        policy, WorkEnv(ENVS), n_steps=STEPS, batch_size=1024, n_epochs=4, seed=0, device="cpu", policy_kwargs=policy_kwargs
    )


ENGINES = {
    "sb3-contrib RecurrentPPO, separate LSTMs": lambda: theirs(
        RecurrentPPO, "MlpLstmPolicy", lstm_hidden_size=64, net_arch=HEADS
    ),
    "sb3-contrib RecurrentPPO, shared LSTM": lambda: theirs(
        RecurrentPPO, "MlpLstmPolicy", lstm_hidden_size=64, net_arch=HEADS, shared_lstm=True, enable_critic_lstm=False
    ),
    "Tailguard, separate LSTMs, scalar critic": lambda: ours("MlpLstmPolicy", SCALAR, lstm_hidden_size=64, net_arch=HEADS),
    "Tailguard, shared LSTM, scalar critic": lambda: ours(
        "MlpLstmPolicy", SCALAR, lstm_hidden_size=64, net_arch=HEADS, shared_lstm=True
    ),
    "Tailguard, separate LSTMs, twin critics of 32 quantiles": lambda: ours(
        "MlpLstmPolicy", {}, lstm_hidden_size=64, net_arch=HEADS
    ),
    "Stable-Baselines3 PPO, MLP": lambda: theirs(PPO, "MlpPolicy", net_arch=DEEP),
    "Tailguard, MLP, scalar critic": lambda: ours("MlpPolicy", SCALAR, net_arch=DEEP),
    "Tailguard, MLP, twin critics of 32 quantiles": lambda: ours("MlpPolicy", {}, net_arch=DEEP),
    "JAX PPO, compiled end to end, shared LSTM": lambda: JaxPPO(ENVS, STEPS),
    "JAX PPO, the same with autodiff through its shared LSTM": lambda: JaxPPO(ENVS, STEPS, autodiff=True),
}
RATIOS = [(2, 0, 12.0), (3, 1, None), (2, 4, None), (6, 5, 1.5), (3, 8, 0.75), (3, 9, None)]


def gemm_flops() -> float:
    """Multiply-adds x 2 per second of a matrix product of a minibatch's size."""
    a, b = torch.randn(1024, 96), torch.randn(96, 256)
    torch.mm(a, b)
    start, n = time.perf_counter(), 2000
    for _ in range(n):
        torch.mm(a, b)
    return n * 2 * 1024 * 96 * 256 / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="run the engines whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engines = {name: make for name, make in ENGINES.items() if options.only in name}
    if JaxPPO is None:
        print("JAX is not installed: without its rows\n")
        engines = {name: make for name, make in engines.items() if not name.startswith("JAX")}
    models = {name: make() for name, make in engines.items()}
    rollout = STEPS * ENVS
    for model in models.values():
        model.learn(rollout)
    times = {name: [] for name in models}
    for _ in range(options.rounds):
        for name, model in models.items():
            start = time.perf_counter()
            model.learn(rollout, reset_num_timesteps=False)
            times[name].append(time.perf_counter() - start)

    versions = f"Python {platform.python_version()}, torch {torch.__version__}, SB3 {stable_baselines3.__version__}"
    print(f"{platform.machine()}, {versions},")
    print(f"one thread, {options.rounds} rounds of {rollout} steps, seed 0; GEMM {gemm_flops() / 1e9:.0f} GFLOP/s\n")
    print("| engine | steps/s, median | min .. max |")
    print("|---|---|---|")
    rates = {}
    for name, seconds in times.items():
        rates[name] = rollout / float(np.median(seconds))
        print(f"| {name} | {rates[name]:,.0f} | {rollout / max(seconds):,.0f} .. {rollout / min(seconds):,.0f} |")
    print("\n| ratio | measured | goal |\n|---|---|---|")
    names = list(ENGINES)
    for fast, slow, goal in RATIOS:
        if names[fast] in rates and names[slow] in rates:
            ratio = np.median(np.array(times[names[slow]]) / np.array(times[names[fast]]))
            print(f"| {names[fast]} / {names[slow]} | {ratio:.2f} | {f'>= {goal}' if goal else ''} |")


if __name__ == "__main__":
    main()
