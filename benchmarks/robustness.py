"""What an adversary costs an agent, and what training against one saves: `python benchmarks/robustness.py [--quick]`.

CartPole-v1 and Pendulum-v1, with and without memory, three seeds each. Two agents per seed, alike but for the adversary. Each
is then played clean and under attacks of the same radius: random moves, FGSM, PGD on the KL (MAD) and PGD on the critics, both
with 20 steps and 2 restarts. The worst counts: for each agent, the attack with the lowest mean return. A stronger threat has a
column of its own, PGD towards the action that the policy likes least: it always knows which way hurts. With memory the
adversary moves the present observation and memory carries its earlier moves.

Epsilon is in standard deviations of the observations, those of the plain agent for both agents: each has a normaliser of its
own, and the attack must be the same in the units of the environment. Rewards are the environment's own. What an agent keeps is
(attacked - floor) / (clean - floor), the floor being random actions. Settings were chosen on seeds 100 and above, never on the
seeds reported.

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

ATTACKS = ("random", "fgsm", "pgd_kl", "critic")
ALL = (*ATTACKS, "action")
POLICIES = {"MlpPolicy": {"net_arch": [64, 64]}, "MlpLstmPolicy": {"lstm_hidden_size": 32, "net_arch": [32]}}
SEARCH = PerturbationConfig(steps=20, restarts=2)
SETTINGS = {
    "n_steps": 64,
    "learning_rate": LinearSchedule(1e-3, 1e-4),
    "critic": {"num_quantiles": 8},
    "normalize_obs": True,
}
ENVS = 16


@dataclass(frozen=True)
class Task:
    """An environment, how to train on it, and the radius in question and the weight of the penalty, by policy."""

    env: str
    steps: int
    radius: dict
    coefficient: dict
    settings: dict

    def adversary(self, policy):
        """From 0 to the radius in the first part of the training, and on with it."""
        growing = {"schedule": "linear", "epsilon": 0.0, "epsilon_final": self.radius[policy], "schedule_share": 0.6}
        return {**growing, "steps": 3, "coefficient": self.coefficient[policy], "warmup_updates": 5}


TASKS = {
    "CartPole-v1": Task(
        "CartPole-v1",
        150_000,
        {"MlpPolicy": 0.4, "MlpLstmPolicy": 0.4},
        {"MlpPolicy": 0.1, "MlpLstmPolicy": 0.1},
        {**SETTINGS, "batch_size": 256, "n_epochs": 6},
    ),
    "Pendulum-v1": Task(
        "Pendulum-v1",
        120_000,
        {"MlpPolicy": 0.2, "MlpLstmPolicy": 0.2},
        {"MlpPolicy": 0.02, "MlpLstmPolicy": 0.02},
        {**SETTINGS, "batch_size": 512, "n_epochs": 10, "gamma": 0.9},
    ),
}


def train(task, policy, seed, robust, steps):
    env = make_vec_env(task.env, ENVS, seed=seed)
    adversary = task.adversary(policy) if robust else None
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


def deviations(model):
    """Of the observations, as the agent's normaliser has them."""
    return model.policy.normalizer.var.sqrt().numpy()


def attacked_return(task, model, kind, epsilon, units, episodes):
    """Under one attack; `units` are the deviations in which its radius is meant."""
    search = SEARCH.model_copy(update={"feature_scale": tuple((units / deviations(model)).tolist())})
    victim = AttackedPolicy(model.policy, kind, np.full(episodes, epsilon), search, seed=0)
    return mean_return(task, episodes, lambda env, obs, starts: victim.act(obs, starts))


def measure(task, policy, seed, options):
    """Returns of the plain and the robust agent: clean, and under each attack."""
    found, units = {}, None
    for robust in (False, True):
        start = time.process_time()
        model = train(task, policy, seed, robust, task.steps // (10 if options.quick else 1))
        seconds = time.process_time() - start
        units = deviations(model) if units is None else units
        attack = (task.radius[policy], units, options.episodes)
        returns = {kind: attacked_return(task, model, kind, *attack) for kind in ("clean", *ALL)}
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
                row = [task.env, policy, task.radius[policy], seed]
                for one in found.values():
                    worst = min(one[kind] for kind in ATTACKS)
                    kept = (worst - lowest) / max(one["clean"] - lowest, 1e-9)
                    row += [f"{one['clean']:.0f}", f"{worst:.0f}", f"{kept:.0%}", f"{one['action']:.0f}"]
                clean = [one["clean"] - lowest for one in found.values()]
                lines.append("| " + " | ".join(map(str, (*row, f"{clean[1] / clean[0] - 1.0:+.0%}"))) + " |")
        print(f"  {task.env}: random actions {lowest:.0f}", flush=True)
    columns = ("clean", "worst", "keeps", "action")
    head = ("environment", "policy", "epsilon", "seed", *(f"{who}, {what}" for who in ("PPO", "SA") for what in columns))
    print("\n| " + " | ".join((*head, "SA clean against PPO clean")) + " |")
    print("|---" * 13 + "|")
    print("\n".join(lines), flush=True)


def market(options):
    """Degradation on unseen bars of a shipped market."""
    steps = options.market_steps
    config = load_config(None, [f"training.steps={steps}", "training.tensorboard=null", "training.learning_rate=0.001"])
    bars = load_dataset("nasdaq-1d")
    plan = AttackPlan(epsilons=(0.1, 0.3), stale=(1,), dropped=(0.3,), noisy=(0.3,), draws=500)
    reports = {}
    for name, adversary in (("PPO", None), ("SA-PPO", {"epsilon": 0.3, "coefficient": 0.3})):
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
