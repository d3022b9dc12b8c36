"""The loss of an agent under attack, with and without robust training: `python benchmarks/robustness.py [--quick]`.

CartPole-v1 and Pendulum-v1, with and without memory, three seeds each. Two agents per seed, alike but for the adversary:
"attacked" plays most of its environments on attacked observations (`rollouts`); a third (`--agents PPO attacked SA`) has the
penalty of SA-PPO instead. Each is then played clean and under attacks of growing radius: random moves, FGSM and PGD on the KL
(MAD), PGD on the critics, PGD towards the action that the policy likes least; PGD takes 20 steps and 2 restarts. The strongest
counts: for each agent and radius, the attack with the lowest mean return. With memory the adversary moves the present
observation and memory carries its earlier moves.

CartPole is played raw: epsilon is metres, radians and their rates alike. On Pendulum it is in standard deviations of the
observations, those of the plain agent for both agents: each has a normaliser of its own, and the attack must be the same in the
units of the environment. Rewards are the environment's own. What an agent keeps is (attacked - floor) / (clean - floor), the
floor being random actions. How the settings were chosen: docs/experiments.md, Robustness.

The last part trades a shipped market: the degradation of growth, Sharpe ratio and turnover with and without an adversary.
"""

import argparse
import platform
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from tailguard import DistributionalPPO
from tailguard.config import AdversaryConfig, load_config
from tailguard.evaluate.attack import AttackPlan, attack_market
from tailguard.evaluate.attacked import AttackedPolicy
from tailguard.experiments.prepared_market import default_split, prepare_market
from tailguard.experiments.training import build_model
from tailguard.market import load_dataset
from tailguard.ppo.scaling import ObservationNormalizer
from tailguard.ppo.schedules import LinearSchedule
from tailguard.robust import PerturbationConfig

ATTACKS = ("random", "fgsm", "pgd_kl", "critic", "action")
SEARCH = PerturbationConfig(steps=20, restarts=2)


@dataclass(frozen=True)
class Task:
    """An environment and a policy, how to train, and the adversaries.

    :param settings: of the agent.
    :param radius: what the adversary of the training grows to.
    :param attacked: what the adversary of the agent "attacked" is told.
    :param penalty: coefficient of the agent "SA".
    :param radii: of the attacks at the end.
    """

    env: str
    policy: str
    n_envs: int
    steps: int
    settings: dict
    radius: float
    attacked: dict
    penalty: float
    radii: tuple

    def adversary(self, agent):
        """From 0 to the radius in the first part of the training, and on with it."""
        growing = {"schedule": "linear", "epsilon": 0.0, "epsilon_final": self.radius, "schedule_share": 0.6}
        common = {**growing, "steps": 3, "warmup_updates": 5}
        rollouts = {"coefficient": 0.0, "keep_best": True, **self.attacked}
        return {"PPO": None, "SA": {**common, "coefficient": self.penalty}, "attacked": {**common, **rollouts}}[agent]

    def train(self, agent, seed, steps):
        env = make_vec_env(self.env, self.n_envs, seed=seed)
        return DistributionalPPO(self.policy, env, seed=seed, adversary=self.adversary(agent), **self.settings).learn(steps)


COMMON = {"n_epochs": 10, "learning_rate": LinearSchedule(1e-3, 1e-4), "critic": {"num_quantiles": 8}}
MLP = {**COMMON, "policy_kwargs": {"net_arch": [64, 64]}}
LSTM = {**COMMON, "policy_kwargs": {"lstm_hidden_size": 32, "net_arch": [32]}}
PENDULUM = {"n_steps": 64, "batch_size": 1024, "gamma": 0.9, "normalize_obs": True}
TASKS = {
    "cartpole-mlp": Task(
        env="CartPole-v1",
        policy="MlpPolicy",
        n_envs=16,
        steps=500_000,
        # gamma and lambda are those of SB3's zoo.
        settings={**MLP, "n_steps": 128, "batch_size": 512, "gamma": 0.98, "gae_lambda": 0.8},
        radius=0.07,
        attacked={"rollouts": 0.75, "rollout_presence": "mixed"},
        penalty=0.2,
        radii=(0.05, 0.06, 0.07),
    ),
    "cartpole-lstm": Task(
        env="CartPole-v1",
        policy="MlpLstmPolicy",
        n_envs=8,
        steps=200_000,
        settings={**LSTM, "n_steps": 128, "batch_size": 256},
        radius=0.1,
        attacked={"rollouts": 0.75, "rollout_presence": "mixed"},
        penalty=0.2,
        radii=(0.08, 0.1, 0.12),
    ),
    "pendulum-mlp": Task(
        env="Pendulum-v1",
        policy="MlpPolicy",
        n_envs=32,
        steps=1_000_000,
        settings={**MLP, **PENDULUM},
        radius=0.3,
        attacked={"rollouts": 0.9, "rollout_presence": "mixed"},
        penalty=0.003,
        radii=(0.3, 0.35, 0.4),
    ),
    "pendulum-lstm": Task(
        env="Pendulum-v1",
        policy="MlpLstmPolicy",
        n_envs=32,
        steps=1_000_000,
        settings={**LSTM, **PENDULUM},
        radius=0.3,
        attacked={"rollouts": 0.9},
        penalty=0.003,
        radii=(0.3, 0.35, 0.4),
    ),
}


def mean_returns(task, episodes, act, repeats=1):
    """Return the mean first-episode return of `episodes` environments, for `repeats` groups that start alike; ``[repeats]``."""
    env = DummyVecEnv([lambda: gym.make(task.env) for _ in range(episodes * repeats)])
    env._seeds = [10_000 + k % episodes for k in range(env.num_envs)]  # SB3 knows only one seed and counts on from it
    obs, starts = env.reset(), np.ones(env.num_envs, bool)
    total, running = np.zeros(env.num_envs), np.ones(env.num_envs, bool)
    while running.any():
        obs, rewards, starts, _ = env.step(act(env, obs, starts))
        total += np.where(running, rewards, 0.0)
        running &= ~starts
    return total.reshape(repeats, episodes).mean(1)


def floor(task):
    """Return the mean return of uniformly random actions."""
    task_space = gym.make(task.env).action_space
    task_space.seed(0)
    return mean_returns(task, 100, lambda env, obs, starts: np.stack([task_space.sample() for _ in obs]))[0]


def deviations(model):
    """Return the standard deviations of the observations, from the agent's normaliser; 1 for an agent that sees them raw."""
    normalizer = model.policy.normalizer
    return normalizer.var.sqrt().numpy() if isinstance(normalizer, ObservationNormalizer) else np.ones(model.policy.own_size)


def attacked_returns(task, model, kind, radii, units, episodes, deterministic=True):
    """Under one attack, for each radius; `units` are the deviations in which it is meant."""
    search = SEARCH.model_copy(update={"feature_scale": tuple((units / deviations(model)).tolist())})
    victim = AttackedPolicy(model.policy, kind, np.repeat(radii, episodes), search, 0, deterministic)
    return mean_returns(task, episodes, lambda env, obs, starts: victim.act(obs, starts), len(radii))


def measure(name, seed, options):
    """Returns of each agent: clean, and under the strongest attack by radius."""
    task, found, units = TASKS[name], [], None
    for agent in options.agents:
        start = time.process_time()
        model = task.train(agent, seed, task.steps // (10 if options.quick else 1))
        seconds = time.process_time() - start
        units = deviations(model) if units is None else units
        (clean,) = attacked_returns(task, model, "clean", [0.0], units, options.episodes)
        under = {kind: attacked_returns(task, model, kind, task.radii, units, options.episodes) for kind in ATTACKS}
        text = ", ".join(f"{kind} {' '.join(f'{value:.0f}' for value in values)}" for kind, values in under.items())
        print(f"  {name} seed {seed} {agent} ({seconds:.0f} s): clean {clean:.0f}, {text}", flush=True)
        found.append((clean, np.min(list(under.values()), axis=0)))
    return found


def environments(options):
    """A table with a line for each task, radius and seed, and the means of the seeds."""
    lines = []
    for name in options.tasks:
        task = TASKS[name]
        lowest = floor(task)
        print(f"  {name}: random actions {lowest:.0f}; radii {' '.join(map(str, task.radii))}", flush=True)
        rows = [measure(name, seed, options) for seed in options.seeds]
        clean = np.array([[agent[0] for agent in row] for row in rows]) - lowest  # [seeds, agents]
        kept = (np.array([[agent[1] for agent in row] for row in rows]) - lowest) / clean[..., None]  # [seeds, agents, radii]
        clean, kept = (np.concatenate((one, one.mean(0, keepdims=True))) for one in (clean, kept))
        for k, radius in enumerate(task.radii):
            for row, seed in enumerate([*options.seeds, "mean"]):
                pairs = [(f"{a + lowest:.0f}", f"{b:.0%}") for a, b in zip(clean[row], kept[row, :, k], strict=True)]
                cells = (name, radius, seed, *(cell for pair in pairs for cell in pair))
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    head = ("task", "epsilon", "seed", *(f"{one}, {what}" for one in options.agents for what in ("clean", "keeps")))
    print("\n| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    print("\n".join(lines), flush=True)


def market(options):
    """Degradation on unseen bars of a shipped market."""
    steps = options.market_steps
    config = load_config(None, [f"training.steps={steps}", "training.tensorboard=null", "training.learning_rate=0.001"])
    bars = load_dataset("nasdaq-1d")
    plan = AttackPlan(epsilons=(0.1, 0.3), stale=(1,), dropped=(0.3,), noisy=(0.3,), draws=500)
    reports = {}
    threats = {
        "PPO": None,
        "SA-PPO": AdversaryConfig(epsilon=0.3, coefficient=0.3),
        "attacked": AdversaryConfig(epsilon=0.3, rollouts=0.625, coefficient=0.0, keep_best=True),
    }
    for name, adversary in threats.items():
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
    print("|---|---|" + "---|" * len(shown) * len(reports))
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
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--agents", nargs="*", default=["PPO", "attacked"], choices=["PPO", "SA", "attacked"], help="PPO first")
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
