"""Records with everything that a report can show: a population that really ran, many training curves, several attacks."""

from dataclasses import replace

import numpy as np
import pandas as pd
from evaluation_examples import example_evaluation
from population_toys import MovingOptimum

from tailguard.evaluate.record import Estimate
from tailguard.population.config import HyperparamConfig, PBTConfig
from tailguard.population.engines.serial import SerialEngine
from tailguard.population.scheduler import PBTScheduler


class Slow(MovingOptimum):
    """The toy with a learning rate beside its hyperparameter, so that there is more than one to draw."""

    search = (
        HyperparamConfig(name="h", min_value=0.01, max_value=1.0),
        HyperparamConfig(name="learning_rate", min_value=1e-5, max_value=1e-2, is_log_scale=True),
    )


def lineage(members=6, rounds=12):
    """The events of a small population."""
    events = []
    config = PBTConfig(population_size=members, hyperparams=Slow.search, perturbation_interval=10, seed=3)
    scheduler = PBTScheduler(config, record=events.append)
    SerialEngine(scheduler, Slow).run(rounds)
    return events


def rich_evaluation(bars=900, assets=1, seeds=5, seed=0):
    """A full record."""
    record = example_evaluation(bars=bars, assets=assets, seeds=seeds, seed=seed)
    figures = {name: dict(known) for name, known in record.statistics.items()}
    for history in record.baselines:
        gap = figures["agent"]["sharpe"].value - figures[history.name]["sharpe"].value
        figures[history.name]["agent_lead"] = Estimate(gap, gap - 0.6, gap + 0.6)
    return replace(record, lineage=lineage(), training=_training(seeds), attack=_attack(), statistics=figures)


def _training(seeds):
    generator = np.random.default_rng(1)
    rows = []
    for fold in range(3):
        for seed in range(seeds):
            noise = generator.normal(0.0, 1.0, (60, 4))
            rows += [
                {
                    "fold": fold, "seed": seed, "step": 2048 * k,
                    "rollout/ep_rew_mean": 0.2 * (1.0 - np.exp(-k / 15.0)) + 0.02 * noise[k, 0] if k > 2 else np.nan,
                    "train/explained_variance": 0.6 * (1.0 - np.exp(-k / 8.0)) + 0.05 * noise[k, 1],
                    "train/entropy": 1.4 - 0.01 * k + 0.02 * noise[k, 2],
                    "train/approx_kl": 0.006 + 0.001 * abs(noise[k, 3]),
                    "train/learning_rate": 3e-4 * (1.0 - k / 60.0),
                    "train/n_updates": 4,
                    "time/fps": 20000 + k,
                }
                for k in range(60)
            ]  # fmt: skip
    return pd.DataFrame(rows)


def _attack():
    rows = [
        {"attack": attack, "epsilon": epsilon, "statistic": statistic, "value": start - slope * epsilon * scale,
         "low": start - 0.5 * abs(scale) - slope * epsilon * scale, "high": start + 0.5 * abs(scale) - slope * epsilon * scale}
        for attack, slope, epsilons in (
            ("clean", 0.0, (0.0,)), ("fgsm", 2.5, (0.05, 0.1)), ("worst", 4.0, (0.05, 0.1)), ("stale", 0.05, (1.0, 3.0))
        )
        for epsilon in epsilons
        for statistic, start, scale in (("cagr", 0.2, 0.5), ("sharpe", 0.4, 1.0), ("max_drawdown", 0.2, -0.3))
    ]  # fmt: skip
    return pd.DataFrame(rows)
