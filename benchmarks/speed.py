"""Environment steps per second, end to end, against Stable-Baselines3 and JAX on the same work in one run: `make bench-speed`.

Work (work.py): 64 envs x 128 steps, 4 epochs, minibatches of 1,024 samples, LSTM 64 and one layer of 64 per head (or two of
64 without memory), Adam, one thread. Equal networks, samples and gradient steps. The engines take turns; medians of rounds.
"torch": networks and autograd are torch's (``compiled=False``). "compiled": the compiled update and acting step. On a machine
that others use as well, ``--clock cpu`` counts processor time instead of time. ``--isa native avx2`` prints a table for each
instruction set (tools/isa.py). The product bound is the time that all matrix products take at the speed of the fastest ones
here, whether ours, OpenBLAS's or torch's.
rsl_rl and sbx (peers.py) take part where they are installed. ``--defaults`` is CartPole with sb3-contrib's defaults.
``--spaces`` measures images and Dicts instead, through SB3's feature extractors: 8 envs x 64 steps, 4 epochs, batches of 128.
"""

import argparse
import platform
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import stable_baselines3
import torch
from peers import RslPPO, sbx_ppo
from products import contestants, fastest
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from work import SPACES, WorkEnv, frames_env

from tailguard import DistributionalPPO
from tailguard.ppo.diagnostics import StageProfile

HAS = {package: find_spec(package) is not None for package in ("jax", "sbx", "rsl_rl")}
if HAS["jax"]:
    from jax_peer import JaxPPO

STEPS, ENVS = 128, 64
SCALAR = {"num_quantiles": 1, "twin": False, "target": "lambda_return"}
HEADS = {"pi": [64], "vf": [64]}
DEEP = {"pi": [64, 64], "vf": [64, 64]}


TORCH, KERNEL = {"compiled": False}, {"compiled": True}
FULL = {"optimizer": {"name": "adaptive_upgd"}, "vgs": {"enabled": True}}
ISA = Path(__file__).parent.parent / "tools" / "isa.py"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LSTM = {"lstm_hidden_size": 64, "net_arch": HEADS}
SHARED = {**LSTM, "shared_lstm": True}


def ours(policy, critic, options=None, **policy_kwargs):
    settings = {"n_steps": STEPS, "batch_size": 1024, "n_epochs": 4, "critic": critic, "seed": 0, **(options or {})}
    return DistributionalPPO(policy, WorkEnv(ENVS), **settings, policy_kwargs=policy_kwargs)


def theirs(algorithm, policy, **policy_kwargs):
    return algorithm(
        policy, WorkEnv(ENVS), n_steps=STEPS, batch_size=1024, n_epochs=4, seed=0, device="cpu", policy_kwargs=policy_kwargs
    )


CONTRIB, JAX, RSL, SBX = "sb3-contrib RecurrentPPO", "JAX PPO", "rsl_rl PPO", "sbx PPO"
NEEDS = {JAX: "jax", RSL: "rsl_rl", SBX: "sbx"}
ENGINES = {
    f"{CONTRIB}, separate LSTMs": lambda: theirs(RecurrentPPO, "MlpLstmPolicy", **LSTM),
    f"{CONTRIB}, shared LSTM": lambda: theirs(RecurrentPPO, "MlpLstmPolicy", **SHARED, enable_critic_lstm=False),
    "Tailguard, separate LSTMs, torch": lambda: ours("MlpLstmPolicy", SCALAR, **LSTM, **TORCH),
    "Tailguard, separate LSTMs, compiled": lambda: ours("MlpLstmPolicy", SCALAR, **LSTM, **KERNEL),
    "Tailguard, separate LSTMs, compiled, twin critics of 32 quantiles": lambda: ours("MlpLstmPolicy", {}, **LSTM, **KERNEL),
    "Tailguard, separate LSTMs, compiled, the same with VGS and AdaptiveUPGD": lambda: ours(
        "MlpLstmPolicy", {}, FULL, **LSTM, **KERNEL
    ),
    "Tailguard, shared LSTM, torch": lambda: ours("MlpLstmPolicy", SCALAR, **SHARED, **TORCH),
    "Tailguard, shared LSTM, compiled": lambda: ours("MlpLstmPolicy", SCALAR, **SHARED, **KERNEL),
    "Stable-Baselines3 PPO, MLP": lambda: theirs(PPO, "MlpPolicy", net_arch=DEEP),
    "Tailguard, MLP, torch": lambda: ours("MlpPolicy", SCALAR, net_arch=DEEP, **TORCH),
    "Tailguard, MLP, compiled": lambda: ours("MlpPolicy", SCALAR, net_arch=DEEP),
    "Tailguard, MLP, compiled, twin critics of 32 quantiles": lambda: ours("MlpPolicy", {}, net_arch=DEEP),
    f"{JAX}, compiled end to end, shared LSTM": lambda: JaxPPO(ENVS, STEPS),
    f"{JAX}, the same with autodiff through its shared LSTM": lambda: JaxPPO(ENVS, STEPS, autodiff=True),
    f"{RSL}, separate LSTMs": lambda: RslPPO(ENVS, STEPS, HEADS["pi"], 64),
    f"{RSL}, MLP": lambda: RslPPO(ENVS, STEPS, DEEP["pi"]),
    f"{SBX}, MLP": lambda: sbx_ppo(ENVS, STEPS, DEEP["pi"]),
}
# With --adversary: state-adversarial training, three gradients per search.
ADVERSARY = {"epsilon": 0.05, "steps": 3, "warmup_updates": 0}
ATTACKED = {
    "Tailguard, separate LSTMs, compiled": ("MlpLstmPolicy", {**LSTM, **KERNEL}),
    "Tailguard, shared LSTM, compiled": ("MlpLstmPolicy", {**SHARED, **KERNEL}),
    "Tailguard, MLP, compiled": ("MlpPolicy", {"net_arch": DEEP}),
}
# The share of each minibatch that is attacked, or of the environments.
SHARES = {
    "adversary": {"adversarial_ratio": 0.5},
    "adversary on a quarter": {"adversarial_ratio": 0.25},
    "attacked rollouts": {"rollouts": 0.625, "coefficient": 0.0},
}


def attacked(name, share):
    """One of :data:`ATTACKED`, with an adversary."""
    policy, networks = ATTACKED[name]
    return ours(policy, SCALAR, {"adversary": {**ADVERSARY, **share}}, **networks)


# With --defaults: eight environments of CartPole; two LSTMs of 256, minibatches of one sequence, ten epochs.
AS_CONTRIB = {"n_steps": 128, "batch_size": 128, "n_epochs": 10}
LARGE = {"lstm_hidden_size": 256, "net_arch": DEEP}


def cartpole(algorithm, **options):
    return algorithm("MlpLstmPolicy", make_vec_env("CartPole-v1", n_envs=8, seed=0), seed=0, device="cpu", **options)


DEFAULTS = {
    f"{CONTRIB}, its defaults": lambda: cartpole(RecurrentPPO),
    "Tailguard, sb3-contrib's defaults, torch": lambda: cartpole(
        DistributionalPPO, **AS_CONTRIB, critic=SCALAR, policy_kwargs={**LARGE, **TORCH}
    ),
    "Tailguard, sb3-contrib's defaults, compiled": lambda: cartpole(
        DistributionalPPO, **AS_CONTRIB, critic=SCALAR, policy_kwargs={**LARGE, **KERNEL}
    ),
}

# With --spaces: policies with a feature extractor, all in torch.
SPACES_STEPS, SPACES_ENVS = 64, 8


def with_extractor(name, algorithm, **settings):
    """An algorithm on observations of one of :data:`work.SPACES`."""
    policy = "CnnPolicy" if name == "images" else "MultiInputPolicy"
    env = frames_env(name, SPACES_ENVS)
    return algorithm(policy, env, n_steps=SPACES_STEPS, batch_size=128, n_epochs=4, seed=0, device="cpu", **settings)


EXTRACTORS = {
    f"{engine}, {name}": partial(with_extractor, name, *given, **settings)
    for name in SPACES
    for engine, given, settings in (
        ("Stable-Baselines3 PPO", (PPO,), {}),
        ("Tailguard", (DistributionalPPO,), {"critic": SCALAR}),
        ("Tailguard, twin critics of 32 quantiles", (DistributionalPPO,), {}),
    )
}

SEPARATE, SHARED_LSTM, MLP = (f"Tailguard, {networks}, compiled" for networks in ("separate LSTMs", "shared LSTM", "MLP"))
RATIOS = [
    ("Tailguard, separate LSTMs, torch", f"{CONTRIB}, separate LSTMs", ">= 12"),
    (SEPARATE, f"{CONTRIB}, separate LSTMs", ">= 30"),
    (SEPARATE, f"{RSL}, separate LSTMs", ">= 1"),
    ("Tailguard, shared LSTM, torch", f"{JAX}, the same with autodiff through its shared LSTM", ">= 0.75"),
    (SHARED_LSTM, f"{JAX}, the same with autodiff through its shared LSTM", ">= 1.5"),
    (SHARED_LSTM, f"{JAX}, compiled end to end, shared LSTM", ">= 1.1"),
    (SEPARATE, f"{SEPARATE}, twin critics of 32 quantiles", ""),
    (SEPARATE, f"{SEPARATE}, the same with VGS and AdaptiveUPGD", "<= 1.5"),
    ("Tailguard, MLP, torch", "Stable-Baselines3 PPO, MLP", ""),
    (MLP, "Stable-Baselines3 PPO, MLP", ">= 3.5"),
    (MLP, f"{RSL}, MLP", ">= 1"),
    (MLP, f"{SBX}, MLP", ">= 1"),
    (MLP, f"{MLP}, twin critics of 32 quantiles", ""),
    ("Tailguard, sb3-contrib's defaults, torch", f"{CONTRIB}, its defaults", ""),
    ("Tailguard, sb3-contrib's defaults, compiled", f"{CONTRIB}, its defaults", ">= 10"),
    *((name, f"{name}, {what}", "<= 2.5") for name in ATTACKED for what in SHARES),
    *((f"Tailguard, {name}", f"Stable-Baselines3 PPO, {name}", ">= 1") for name in SPACES),
    *((f"Tailguard, twin critics of 32 quantiles, {name}", f"Stable-Baselines3 PPO, {name}", "") for name in SPACES),
]


def product_speeds(now) -> dict[str, float]:
    """Multiply-adds x 2 per second of each library's products, the best of a minibatch and of a recurrent step."""
    best = dict.fromkeys(("ours", "OpenBLAS", "torch"), 0.0)
    for m, k, n in ((1024, 96, 256), (64, 64, 256)):
        flops = 2 * m * k * n
        for name, product in zip(best, contestants(m, k, n), strict=True):
            best[name] = max(best[name], flops / fastest(50, product, 1_000_000_000 // flops, now))
    return best


def share_of_products(model, samples, stages, flops_per_second):
    """Return the time of the matrix products alone at full speed, as a share of each stage; None for other people's engines.

    A sample costs 2 operations per weight forwards and 4 more backwards: once forwards for acting (the actor) and preparing
    (the critics), and `n_epochs` times both ways in the update.
    """
    weights = {name: p.numel() for name, p in model.policy.named_parameters() if p.dim() == 2}
    actor = sum(n for name, n in weights.items() if name.startswith("actor"))
    everything = sum(weights.values())
    update = 6 * everything * samples * model.n_epochs / flops_per_second / stages["time/update_seconds"]
    return 2 * actor * samples / flops_per_second / stages["time/act_seconds"], update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="run the engines whose name contains this")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--adversary", action="store_true", help="only what state-adversarial training costs")
    which.add_argument("--defaults", action="store_true", help="only CartPole with sb3-contrib's defaults")
    which.add_argument("--spaces", action="store_true", help="only images and Dicts")
    parser.add_argument(
        "--isa", nargs="+", choices=["native", "avx2"], default=[], help="run once for each, in its own process"
    )
    options = parser.parse_args()
    if options.isa:
        given = [f"--rounds={options.rounds}", f"--only={options.only}", f"--clock={options.clock}"]
        for isa in options.isa:
            print(f"\n## {isa}\n", flush=True)
            words = [*given, *(f"--{name}" for name in ("adversary", "defaults", "spaces") if vars(options)[name])]
            subprocess.run([sys.executable, ISA, isa, sys.executable, __file__, *words], check=True)
        return
    now = CLOCKS[options.clock]
    torch.set_num_threads(1)
    pairs = {f"{name}, {what}": partial(attacked, name, share) for name in ATTACKED for what, share in SHARES.items()}
    chosen, samples = ENGINES, STEPS * ENVS
    if options.adversary:
        chosen = {name: ENGINES[name] for name in ATTACKED} | pairs
    elif options.defaults:
        chosen, samples = DEFAULTS, 128 * 8
    elif options.spaces:
        chosen, samples = EXTRACTORS, SPACES_STEPS * SPACES_ENVS
    engines = {name: make for name, make in chosen.items() if options.only in name}
    for peer, package in NEEDS.items():
        if not HAS[package] and any(name.startswith(peer) for name in engines):
            print(f"{package} is not installed: without {peer}\n")
            engines = {name: make for name, make in engines.items() if not name.startswith(peer)}
    models = {name: make() for name, make in engines.items()}
    for model in models.values():
        if isinstance(model, DistributionalPPO):
            model.profile = StageProfile(now)
        model.learn(samples)
    times = {name: [] for name in models}
    stages = {name: [] for name in models if name.startswith("Tailguard")}
    for _ in range(options.rounds):
        for name, model in models.items():
            start = now()
            model.learn(samples, reset_num_timesteps=False)
            times[name].append(now() - start)
            if name in stages:
                stages[name].append(model.profile.last)

    speeds = product_speeds(now)
    peak = max(speeds.values())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, SB3 {stable_baselines3.__version__}"
    print(f"{platform.machine()}, {versions},")
    print(f"one thread, {options.clock} clock, {options.rounds} rounds of {samples} steps, seed 0;")
    print(f"products, GFLOP/s: {', '.join(f'{name} {speed / 1e9:.0f}' for name, speed in speeds.items())}\n")
    print("| engine | steps/s, median | min .. max | rollout, ms | update, ms | share of products: acting, update |")
    print("|---|---|---|---|---|---|")
    for name, seconds in times.items():
        rate = samples / float(np.median(seconds))
        row = f"| {name} | {rate:,.0f} | {samples / max(seconds):,.0f} .. {samples / min(seconds):,.0f} "
        if name in stages:
            median = {key: float(np.median([one[key] for one in stages[name]])) for key in stages[name][0]}
            rollout = 1e3 * (median["time/act_seconds"] + median["time/env_seconds"])
            update_ms = 1e3 * (median["time/prepare_seconds"] + median["time/update_seconds"])
            shares = "" if options.spaces else "{:.0%}, {:.0%}".format(*share_of_products(models[name], samples, median, peak))
            row += f"| {rollout:.0f} | {update_ms:.0f} | {shares} "
        else:
            row += "| | | "
        print(row + "|")
    print("\n| ratio | median | min .. max | goal |\n|---|---|---|---|")
    for fast, slow, goal in RATIOS:
        if fast in times and slow in times:
            ratio = np.array(times[slow]) / np.array(times[fast])
            print(f"| {fast} / {slow} | {np.median(ratio):.2f} | {ratio.min():.2f} .. {ratio.max():.2f} | {goal} |")


if __name__ == "__main__":
    main()
