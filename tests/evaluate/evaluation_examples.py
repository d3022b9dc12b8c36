"""A small record with realistic numbers, for tests of whatever reads one. Its tracks are simulated, its statistics are real."""

from itertools import pairwise

import numpy as np
import pandas as pd

from tailguard.evaluate import statistics
from tailguard.evaluate.record import (
    AccountHistory,
    Calibration,
    CostPoint,
    Delay,
    Dispersion,
    Estimate,
    Evaluation,
    Provenance,
    Sanity,
)

PERIODS = 252.0


def example_evaluation(bars=600, assets=1, seeds=3, seed=0, full=True):
    """An agent that times a GARCH-like market a little, in three folds.

    :param full: with calibration, attacks, lineage and warnings; without, they are None or empty.
    """
    generator = np.random.default_rng(seed)
    times = pd.bdate_range("2020-01-01", periods=bars)
    volatility = 0.01 * np.exp(0.5 * np.sin(np.arange(bars) / 40.0))
    moves = volatility[:, None] * generator.standard_t(5, (bars, assets)) + 0.0003
    prices = pd.DataFrame(100.0 * np.cumprod(1.0 + moves, axis=0), times, [f"asset{i}" for i in range(assets)])

    seed_weights = [np.clip(0.5 + generator.normal(0.0, 0.3, (bars, assets)).cumsum(0) * 0.05, -1.0, 1.0) for _ in range(seeds)]
    agent = _history("agent", times, moves, np.mean(seed_weights, axis=0))
    members = [_history(f"seed {i}", times, moves, weights) for i, weights in enumerate(seed_weights)]
    baselines = {
        "buy_and_hold": np.ones((bars, assets)),
        "own_mix": np.broadcast_to(agent.weights.mean(axis=0), (bars, assets)),
        "equal_weight": np.ones((bars, assets)),
        "moving_average": (np.sin(np.arange(bars) / 30.0)[:, None] > 0.0) * np.ones((bars, assets)),
        "momentum": np.sign(np.sin(np.arange(bars) / 50.0 + 1.0))[:, None] * np.ones((bars, assets)),
        "volatility_target": np.minimum(0.006 / volatility, 1.0)[:, None] * np.ones((bars, assets)),
        "random_positions": generator.choice([-1.0, 1.0], (bars, assets)),
        "own_shuffled": np.roll(agent.weights, bars // 3, axis=0),
    }
    histories = [_history(name, times, moves, np.asarray(weights) / assets) for name, weights in baselines.items()]
    return Evaluation(
        title="An example",
        source="example-1d",
        periods_per_year=PERIODS,
        prices=prices,
        agent=agent,
        seeds=members,
        baselines=histories,
        market="buy_and_hold",
        statistics=_statistics([agent, *members, *histories]),
        verdict=statistics.judge(
            agent.returns, {history.name: history.returns for history in histories}, PERIODS, market="buy_and_hold", draws=200
        ),
        sanity=_sanity(agent, members, histories[0]),
        calibration=_calibration(agent, generator) if full else None,
        critic_calibration=None,
        folds=_folds(times),
        training=_training(seeds),
        provenance=Provenance(
            "trading:\n  fee: 0.0005\n", "sha256:0123abcd", {"tailguard": "0.1.0"}, (0, 1, 2), 4, "2026-01-31"
        ),
        warnings=["fold 1, seed 2: the KL divergence left its bounds in 12 % of the updates"] if full else [],
        attack=_attack() if full else None,
        lineage=[{"event": "exploit", "step": 1000, "member": 1, "parent": 0, "score": 0.25}] if full else None,
    )


def _history(name, times, moves, weights):
    traded = np.abs(np.diff(weights, axis=0, prepend=np.zeros((1, weights.shape[1])))).sum(axis=1)
    costs, riskless = 0.0005 * traded, np.zeros(len(times))
    return AccountHistory(name, times, (weights * moves).sum(axis=1) - costs, np.array(weights), traded, costs, riskless)


def _statistics(histories):
    resamples = statistics.bootstrap({history.name: history.returns for history in histories}, PERIODS, draws=200)
    table = {}
    for history in histories:
        intervals = {metric: resamples.interval(metric, history.name) for metric in statistics.METRICS}
        table[history.name] = {metric: Estimate(each.estimate, each.low, each.high) for metric, each in intervals.items()}
        table[history.name] |= {
            "turnover": Estimate(statistics.turnover(history.turnover, PERIODS)),
            "exposure": Estimate(statistics.exposure(history.weights)),
            "hit_rate": Estimate(statistics.hit_rate(history.returns)),
        }
    table["agent"]["cost_share"] = Estimate(np.inf)  # no gross gain: readers have to cope with it
    return table


def _sanity(agent, members, market):
    sharpes = [statistics.sharpe(history.returns, PERIODS) for history in members]
    total, sharpe = agent.equity[-1] - 1.0, statistics.sharpe(agent.returns, PERIODS)
    gross = agent.returns + agent.costs
    curve = [
        CostPoint(k, statistics.sharpe(gross - k * agent.costs, PERIODS), float(np.prod(1.0 + gross - k * agent.costs)) - 1.0)
        for k in (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)
    ]
    regimes = [
        {
            "kind": kind, "regime": regime, "bars": int(where.sum()),
            "agent_return": float(np.prod(1.0 + agent.returns[where]) - 1.0),
            "agent_sharpe": statistics.sharpe(agent.returns[where], PERIODS),
            "market_return": float(np.prod(1.0 + market.returns[where]) - 1.0),
            "market_sharpe": statistics.sharpe(market.returns[where], PERIODS),
            "agent_max_drawdown": 0.1, "exposure": statistics.exposure(agent.weights[where]),
        }
        for kind, regime, where in _regimes(agent)
    ]  # fmt: skip
    low, middle, high = np.quantile(sharpes, [0.25, 0.5, 0.75])
    spread = Dispersion(middle, low, high, min(sharpes), max(sharpes), middle, low, high) if len(members) > 1 else None
    delay = Delay(1, sharpe - 0.1, total - 0.02, sharpe, float(total))
    return Sanity(curve, float(gross.mean() / agent.turnover.mean()), delay, pd.DataFrame(regimes), spread, 0.21, 20)


def _regimes(agent):
    years = agent.times.year.to_numpy()
    for year in np.unique(years):
        yield "year", str(year), years == year
    order = np.argsort(np.argsort(np.abs(agent.returns)))
    for i, name in enumerate(("calm", "usual", "stormy")):
        yield "volatility", name, order * 3 // len(order) == i


def _calibration(agent, generator):
    levels = (np.arange(16) + 0.5) / 16
    outcomes = agent.returns
    spread = outcomes.std() * (1.0 + 0.2 * generator.random(len(outcomes)))
    quantiles = spread[:, None] * np.quantile(outcomes / outcomes.std(), levels)
    transforms = statistics.probability_transform(outcomes, quantiles, levels)
    tails = (0.05, 0.1)
    return Calibration(
        horizon=1,
        levels=levels,
        times=agent.times,
        outcomes=outcomes,
        quantiles=quantiles,
        transforms=transforms,
        realised=statistics.realised_levels(outcomes, quantiles, levels),
        coverage={tail: statistics.kupiec(outcomes, np.quantile(quantiles, tail, axis=1), tail) for tail in tails},
        shortfall={tail: statistics.acerbi_szekely(outcomes, quantiles, levels, tail, draws=200) for tail in tails},
        uniformity=statistics.uniformity(transforms),
    )


def _folds(times):
    edges = np.linspace(0, len(times), 4).astype(int)
    rows = [
        {
            "fold": k, "train_first": 0, "train_last": 1000 + first, "embargo": 300,
            "test_first": 1300 + first, "test_last": 1300 + last,
            "train_from": pd.Timestamp("2014-01-01"), "train_to": times[first] - pd.Timedelta(days=400),
            "test_from": times[first], "test_to": times[last - 1],
        }
        for k, (first, last) in enumerate(pairwise(edges))
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _training(seeds):
    rows = [
        {
            "fold": fold, "seed": seed, "step": 1000 * k,
            "rollout/ep_rew_mean": 0.1 * (1.0 - np.exp(-k / 10.0)) - 0.01 * seed,
            "train/explained_variance": 0.5 * (1.0 - np.exp(-k / 5.0)) if k else np.nan,
        }
        for fold in range(3) for seed in range(seeds) for k in range(20)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _attack():
    rows = [
        {"attack": attack, "epsilon": epsilon, "statistic": "sharpe", "value": 0.4 - slope * epsilon,
         "low": -0.3 - slope * epsilon, "high": 1.0 - slope * epsilon}
        for attack, slope in (("noise", 1.0), ("pgd", 4.0)) for epsilon in (0.0, 0.05, 0.1)
    ]  # fmt: skip
    return pd.DataFrame(rows)
