"""What an adversary costs an agent, and what training against one saves: `python benchmarks/robustness.py [--quick]`.

CartPole-v1 and Pendulum-v1, with and without memory, three seeds each. Two agents per seed, alike but for the adversary. Each
is then played clean and under attacks of the same radius: random moves, FGSM, PGD on the KL (MAD), PGD on the critics and PGD
towards the least wanted action, the last three with 20 steps and 2 restarts. The worst counts: for each agent, the attack
with the lowest mean return. With memory the adversary moves the present observation and memory carries its earlier moves.

Observations are raw (no normalisation), so that epsilon is in the environment's own units and the same for all agents; rewards
are the environment's own. What an agent keeps is (attacked - floor) / (clean - floor), the floor being random actions.
Settings were chosen on seeds 100 and above, never on the seeds reported.

The last part trades a shipped market: the degradation of growth, Sharpe ratio and turnover with and without an adversary.
"""

import argparse
import platform
import time
from dataclasses import dataclass

import numpy as np
import torch
from stable_baselines3.common.env_util import make_vec_env

from tailguard import DistributionalPPO
from tailguard.config import load_config
from tailguard.evaluate.attack import AttackPlan, attack_market
from tailguard.evaluate.attacked import AttackedPolicy
from tailguard.market import load_dataset
from tailguard.ppo.controls import LinearSchedule
from tailguard.robust import PerturbationConfig
from tailguard.training import build_model, default_split, prepare_market

ATTACKS = ("random", "fgsm", "pgd_kl", "critic", "action")
POLICIES = {"MlpPolicy": {"net_arch": [64, 64]}, "MlpLstmPolicy": {"lstm_hidden_size": 32, "net_arch": [32]}}
SEARCH = PerturbationConfig(steps=20, restarts=2)
LEARNING_RATE = LinearSchedule(1e-3, 1e-4)


@dataclass(frozen=True)
class Task:
    """An environment, how to train on it, and the radius in question."""

    env: str
    steps: int
    epsilon: float
    coefficient: float
    settings: dict

    def adversary(self):
        """From 0 to the radius in the first part of the training, and on with it."""
        growing = {"schedule": "linear", "epsilon": 0.0, "epsilon_final": self.epsilon, "schedule_share": 0.6}
        return {**growing, "steps": 3, "coefficient": self.coefficient, "warmup_updates": 5}


SHARED = {"n_steps": 128, "batch_size": 256, "critic": {"num_quantiles": 16}, "learning_rate": LEARNING_RATE}
TASKS = {
    "CartPole-v1": Task("CartPole-v1", 100_000, 0.1, 0.1, {**SHARED, "n_epochs": 6}),
    "Pendulum-v1": Task("Pendulum-v1", 150_000, 0.2, 0.1, {**SHARED, "n_epochs": 10, "gamma": 0.9}),
}


def train(task, policy, seed, robust, steps):
    env = make_vec_env(task.env, 8, seed=seed)
    adversary = task.adversary() if robust else None
    kwargs = {"policy_kwargs": POLICIES[policy], **task.settings}
    return DistributionalPPO(policy, env, seed=seed, adversary=adversary, **kwargs).learn(steps)


def mean_return(task, episodes, act):
    """Of the first episode of as many environments, given what acts in them."""
    env = make_vec_env(task.env, episodes, seed=10_000)
    env.action_space.seed(0)
    obs, starts = env.reset(), np.ones(episodes, bool)
    total, running = np.zeros(episodes), np.ones(episodes, bool)
    while running.any():
        obs, rewards, starts, _ = env.step(act(env, obs, starts))
        total += np.where(running, rewards, 0.0)
        running &= ~starts
    return float(total.mean())


def floor(task):
    """What uniformly random actions get."""
    return mean_return(task, 100, lambda env, obs, starts: np.stack([env.action_space.sample() for _ in obs]))


def attacked_return(task, model, kind, epsilon, episodes):
    victim = AttackedPolicy(model.policy, kind, np.full(episodes, epsilon), SEARCH, seed=0)
    return mean_return(task, episodes, lambda env, obs, starts: victim.act(obs, starts))


def measure(task, policy, seed, options):
    """Returns of the plain and the robust agent: clean, and under each attack."""
    found = {}
    for robust in (False, True):
        start = time.process_time()
        model = train(task, policy, seed, robust, task.steps // (10 if options.quick else 1))
        seconds = time.process_time() - start
        returns = {kind: attacked_return(task, model, kind, task.epsilon, options.episodes) for kind in ("clean", *ATTACKS)}
        print(
            f"  {task.env} {policy} seed {seed} {'SA-PPO' if robust else 'PPO'} ({seconds:.0f} s): "
            + ", ".join(f"{kind} {value:.0f}" for kind, value in returns.items()),
            flush=True,
        )
        found[robust] = returns
    return found


def environments(options):
    lines = []
    for task in (TASKS[name] for name in options.tasks):
        lowest = floor(task)
        for policy in options.policies:
            for seed in options.seeds:
                found = measure(task, policy, seed, options)
                plain, robust = ((one["clean"] - lowest, min(one[kind] for kind in ATTACKS) - lowest) for one in found.values())
                kept = [f"{100.0 * worst / max(clean, 1e-9):.0f} %" for clean, worst in (plain, robust)]
                row = [task.env, policy, task.epsilon, seed, *(f"{lowest + x:.0f}" for x in (*plain, *robust)), *kept]
                lines.append("| " + " | ".join(map(str, (*row, f"{100.0 * (robust[0] / plain[0] - 1.0):+.0f} %"))) + " |")
        print(f"  {task.env}: random actions {lowest:.0f}", flush=True)
    head = (
        "environment",
        "policy",
        "epsilon",
        "seed",
        *(f"{who} {what}" for who in ("PPO", "SA") for what in ("clean", "worst")),
    )
    print("\n| " + " | ".join((*head, "PPO keeps", "SA keeps", "SA clean against PPO clean")) + " |")
    print("|---" * 11 + "|")
    print("\n".join(lines), flush=True)


def market(options):
    """Degradation on unseen bars of a shipped market."""
    steps = options.market_steps
    config = load_config(None, [f"training.steps={steps}", "training.tensorboard=null", "training.learning_rate=0.001"])
    bars = load_dataset("nasdaq-1d")
    plan = AttackPlan(epsilons=(0.1, 0.3), stale=(1,), dropped=(0.3,), noisy=(0.3,), draws=500)
    reports = {}
    for name, adversary in (("PPO", None), ("SA-PPO", {"epsilon": 0.3, "coefficient": 1.0})):
        models = []
        for seed in options.seeds:
            training = config.training.model_copy(update={"seed": seed, "adversary": adversary})
            traded = prepare_market(bars, config, default_split(len(bars), training))
            models.append(build_model(traded, training).learn(steps))
        reports[name] = attack_market(models, traded, plan)
    first = reports["PPO"]
    print(f"\nnasdaq-1d, {first.bars} unseen bars from {first.first[:10]}, {first.agents} agents each, {steps:,} steps each\n")
    shown = ("growth", "Sharpe", "turnover")
    print("| perturbation | strength | " + " | ".join(f"{name}, {what}" for name in reports for what in shown) + " |")
    print("|---|---|" + "---|" * 6)
    for rows in zip(*(report.rows for report in reports.values()), strict=True):
        cells = [rows[0].kind, f"{rows[0].strength:g}"]
        for row in rows:
            for figure in ("cagr", "sharpe", "turnover"):
                one = row.figures[figure]
                cells.append(f"{one.estimate:.2f} [{one.low:.2f}, {one.high:.2f}]")
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed and a tenth of the training: does it run?")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--market-steps", type=int, default=100_000, help="0 leaves the market out")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.episodes = options.seeds[:1], 3
        options.market_steps = min(options.market_steps, 5_000)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread\n")
    if options.tasks:
        environments(options)
    if options.market_steps:
        market(options)


if __name__ == "__main__":
    main()
