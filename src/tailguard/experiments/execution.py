"""Train an agent that sells an order on the user's bars, and play it on the paths of its rivals."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from tailguard.envs.bar_execution import FEWEST_BARS, BarExecution, VolumeForecast
from tailguard.envs.desk_config import ExecutionSettings
from tailguard.envs.optimal_execution import Floats, OptimalExecution, Schedule
from tailguard.envs.return_observer import ReturnObserver
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.evaluate.report.execution import ExecutionComparison, tail_terms
from tailguard.experiments.minibatches import minibatch_size
from tailguard.market.bars import symbols_of
from tailguard.parallel.threads import one_thread
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.schedules import LinearSchedule
from tailguard.validation import require

ENVS = 512
MINIBATCHES = 4
LARGEST_BATCH = 10  # for the mean, per copy
LEVELS = 5  # of an alpha-conditioned agent
# Paths of tests and of tuning are drawn from other seeds than those of training, which begin at the agent's seed.
TEST_SEED, TUNING_SEED = 10_000_000, 20_000_000
USUAL_PARTICIPATION = 0.1  # of the volume that is traded meanwhile, for an order of no given size
# Candidates for kappa T of Almgren and Chriss, which says how unevenly they sell; 0 is TWAP.
HASTES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0, 20.0)
AVERSIONS = (-8.0, 2.0)  # where the best schedule for a tail is searched, log10 per bps

Act = Callable[[NDArray[Any], int], NDArray[Any]]


def train_seller(
    env: OptimalExecution, *, alpha: float | tuple[float, float] | None = 0.05, steps: int = 2_000_000, seed: int = 0
) -> DistributionalPPO:
    """Return an agent that sells an order for the least cost, by one set of settings for every market and every objective.

    :param env: the market. For a tail with some 512 copies and a risk_aversion of 0. For the mean of the rewards with some 128
        and ``expected_rewards=True``, since the noise of the price is most of what there is to learn from otherwise; where its
        `risk_aversion` is a range, the agent learns the whole frontier, from relative rewards.
    :param alpha: the share of worst paths that counts, or a range for an alpha-conditioned agent; None is the mean.
    :param steps: decisions to learn from; 2,000,000 take about 30 seconds of one core.
    :param seed: of the agent.
    """
    rollout = 2 * env.steps
    # A mean is known from few samples: long episodes need no fewer updates than short ones.
    samples = rollout * env.num_envs
    most = samples // MINIBATCHES if alpha is not None else min(samples // MINIBATCHES, LARGEST_BATCH * env.num_envs)
    risk: dict[str, Any] = {"objective": "neutral"}
    if alpha is not None:
        risk = {"objective": "cvar", "alpha": alpha, "levels": LEVELS, "window": 4000}
    model = DistributionalPPO(
        "MlpPolicy",
        env,
        learning_rate=LinearSchedule(3e-3, 0.0),
        n_steps=rollout,
        batch_size=minibatch_size(samples, most),
        n_epochs=4,
        gamma=1.0,
        ent_coef=0.0,
        policy_kwargs={"log_std_init": -1.5, "net_arch": [32, 32]},
        risk=risk,
        critic={"twin": False},
        seed=seed,
    )
    low, high = env.aversion_range
    given, env.relative_rewards = env.relative_rewards, env.relative_rewards or (alpha is None and low < high)
    try:
        return model.learn(steps)
    finally:
        env.relative_rewards = given


def agent_schedules(model: DistributionalPPO, env: OptimalExecution, risk_aversions: ArrayLike) -> list[Schedule]:
    """Return what an agent sells at each of several risk aversions, with the exact mean and variance of its cost.

    Without regimes nothing that the agent sees is random, so its most likely actions are a schedule.

    :param model: from :func:`train_seller` with `alpha` None, on a market with a range of risk aversions.
    :param env: that market.
    :param risk_aversions: per bps, within the range.
    """
    low, high = env.aversion_range
    aversions = np.asarray(risk_aversions, np.float64)
    require(low < high and env.regimes == 1, "env", env.aversion_range, "a market with a range of risk aversions, one regime")
    inside = bool(((aversions >= low * (1.0 - 1e-9)) & (aversions <= high * (1.0 + 1e-9))).all())
    require(inside, "risk_aversions", risk_aversions, f"from {low} to {high}")
    place = np.clip(2.0 * np.log(aversions / low) / math.log(high / low) - 1.0, -1.0, 1.0)
    left, trades = np.ones(len(aversions)), []
    for step in range(env.steps):
        obs = np.column_stack((left, np.full(len(left), 1.0 - step / env.steps), place)).astype(np.float32)
        shares = env.share(model.predict(obs, deterministic=True)[0][:, 0], step)
        trades.append(left * shares)
        left = left - trades[-1]
    return [env.schedule(row) for row in np.stack(trades, axis=1)]


def schedule_for_tail(env: OptimalExecution, alpha: float) -> Schedule:
    """Return the schedule of Almgren and Chriss with the least CVaR of the cost, if costs were normal.

    :param env: the market; its averages count.
    :param alpha: the share of worst paths that counts.
    """
    weight = float(norm.pdf(norm.ppf(alpha)) / alpha)

    def cvar(log_aversion: float) -> float:
        schedule = env.almgren_chriss(10.0**log_aversion)
        return schedule.expected_cost + weight * math.sqrt(schedule.variance)

    return env.almgren_chriss(10.0 ** float(minimize_scalar(cvar, bounds=AVERSIONS, method="bounded").x))


def tune_almgren_chriss(env: OptimalExecution, paths: OptimalExecution, alpha: float, seed: int) -> Schedule:
    """Return the schedule of Almgren and Chriss with the least CVaR of the cost on paths of another market.

    :param env: the market that the closed form is about.
    :param paths: the market whose paths are played, with as many copies as paths.
    :param alpha: the share of worst paths that counts.
    :param seed: of the paths, the same for all candidates.
    """
    scale = 2.0 * env.haste_cost / (env.volatility * env.tau) ** 2
    schedules = [env.almgren_chriss(scale * (math.cosh(haste / env.steps) - 1.0)) for haste in HASTES]
    return min(schedules, key=lambda chosen: tail_terms(play_costs(paths, schedule_actions(paths, chosen), seed), alpha).mean())


def play_costs(env: OptimalExecution, act: Act, seed: int) -> Floats:
    """Return the cost of one order in every copy, in bps.

    :param env: with as many copies as paths and risk_aversion 0.
    :param act: actions ``[B, 1]`` for return-augmented observations and the number of steps played.
    :param seed: of the paths; with the same seed rivals meet the same paths.
    """
    observed = ReturnObserver(GymVectorAdapter(env, seed), 1.0)
    obs, total, running = observed.reset(), np.zeros(env.num_envs), np.ones(env.num_envs, np.bool_)
    for step in range(env.steps):
        assert isinstance(obs, np.ndarray), "a box of observations"
        obs, rewards, dones, _ = observed.step(act(obs, step))
        total -= np.where(running, rewards, 0.0)
        running &= ~dones
    return total


def schedule_actions(env: OptimalExecution, schedule: Schedule) -> Act:
    """Return the actions of a schedule.

    :param env: the market.
    :param schedule: what to sell in each step.
    """
    before = np.append(1.0, 1.0 - np.cumsum(schedule.trades))
    shares = np.clip(schedule.trades / np.maximum(before[:-1], np.finfo(np.float64).tiny), 0.0, 1.0)
    actions = env.action(shares, np.arange(env.steps))
    return lambda obs, step: np.full((len(obs), 1), actions[step])


def times_of_day(times: pd.DatetimeIndex) -> NDArray[np.int64]:
    """Return which bar of the day each bar is, from 0 on; zeros where a day has one bar, or bars at no regular times.

    :param times: of the bars.
    """
    seconds = ((times - times.normalize()) // pd.Timedelta(seconds=1)).to_numpy(np.int64)
    several, places = np.unique(seconds, return_inverse=True)
    days = times.normalize().nunique()
    regular = (
        1 < len(several) <= 2.0 * len(times) / days and len(times) > 1.5 * days and len(times) >= FEWEST_BARS * len(several)
    )
    return np.asarray(places, np.int64) if regular else np.zeros(len(times), np.int64)


@one_thread()
def execute_bars(
    bars: pd.DataFrame, settings: ExecutionSettings, source: str = "bars"
) -> tuple[DistributionalPPO, ExecutionComparison]:
    """Train a seller on the first bars, and compare it with schedules on paths made of the last ones.

    Paths are blocks of observed bars (the stationary bootstrap). Impact and schedules are calibrated on the training bars.

    :param bars: one symbol with volumes, from :func:`tailguard.market.load_bars`.
    :param settings: of the order and the comparison.
    :param source: of the bars, for the report.
    """
    require(symbols_of(bars) == [""], "the symbols", symbols_of(bars), "one: an order is for one instrument")
    require("volume" in bars.columns, "the columns", list(bars.columns), "with volume: impact depends on it")
    traded = bars[bars["volume"] > 0.0]
    returns = np.diff(np.log(traded["close"].to_numpy(np.float64)))
    volumes = traded["volume"].to_numpy(np.float64)[1:]
    times = times_of_day(pd.DatetimeIndex(traded.index))[1:]
    first_test = round((1.0 - settings.test_share) * len(returns))
    per_day = len(bars) / pd.DatetimeIndex(bars.index).normalize().nunique()
    volatility = 1e4 * float(returns[:first_test].std()) * per_day**0.5
    order = USUAL_PARTICIPATION * settings.bars / per_day if settings.order is None else settings.order
    forecast = VolumeForecast.fit(volumes[:first_test] / volumes[:first_test].mean(), times[:first_test])
    market: dict[str, Any] = {
        "steps": settings.bars,
        "bars_per_day": per_day,
        "mean_block": settings.mean_block,
        "temporary_impact": settings.impact * volatility * order,
        "permanent_impact": settings.permanent * volatility * order,
        "half_spread": settings.half_spread,
        "risk_aversion": 0.0,
        "forecast": forecast,
    }
    known = {"returns": returns[:first_test], "volumes": volumes[:first_test], "times": times[:first_test]}
    unknown = {"returns": returns[first_test:], "volumes": volumes[first_test:], "times": times[first_test:]}
    env = BarExecution(ENVS, seed=settings.seed, **market, **known)
    model = train_seller(env, alpha=settings.alpha, steps=settings.steps, seed=settings.seed)
    test = BarExecution(settings.paths, **market, **unknown)
    at_once = env.schedule(np.eye(settings.bars)[0])
    seed = TEST_SEED + settings.seed
    costs = {"agent": play_costs(test, lambda obs, step: model.predict(obs, deterministic=True)[0], seed)}
    # What a share pays on average at an even pace: bars of little volume cost more than those of much volume save.
    paid = {name: market[name] for name in ("steps", "permanent_impact", "half_spread", "risk_aversion")}
    paid["temporary_impact"] = market["temporary_impact"] * float((1.0 / env.volumes).mean())
    tuning = BarExecution(settings.paths, **market, **known)
    average = OptimalExecution(horizon=env.horizon, volatility=env.volatility, **paid)
    schedules = {
        "Almgren-Chriss": tune_almgren_chriss(average, tuning, settings.alpha, TUNING_SEED + settings.seed),
        "TWAP": env.twap(),
        "at once": at_once,
    }
    acts = {name: schedule_actions(env, schedule) for name, schedule in schedules.items()}
    acts["VWAP"] = lambda obs, step: test.action(test.vwap_share(), step)[:, None]
    costs |= {name: play_costs(test, acts[name], seed) for name in ("Almgren-Chriss", "VWAP", "TWAP", "at once")}
    participation = order * per_day / settings.bars
    facts = {
        "data": f"{source}, {len(bars):,} bars, {per_day:.3g} a day",
        "order": f"{order:.3g} of a mean day's volume, sold within {settings.bars} bars: {participation:.1%} of what is traded",
        "training": f"returns 1 to {first_test:,}; {settings.steps:,} decisions; seed {settings.seed}",
        "test": f"returns {first_test + 1:,} to {len(returns):,}; {settings.paths:,} paths",
        "paths": f"stationary bootstrap, blocks of {settings.mean_block:g} bars on average, mean return removed",
        "volatility": f"{volatility:.0f} bps a day in training, {test.volatility:.0f} in the test",
        "volume": _volume_in_words(forecast),
        "temporary impact": f"{market['temporary_impact']:.3g} bps for the order within one day, divided by the bar's volume",
        "permanent impact": f"{market['permanent_impact']:.3g} bps for the whole order",
    }
    size = "a day's volume" if order == 1.0 else f"{order:.3g} times a day's volume"
    title = f"Selling {size} within {settings.bars} bars, {source}"
    return model, ExecutionComparison(title, costs, settings.alpha, facts)


def _volume_in_words(forecast: VolumeForecast) -> str:
    profile = forecast.profile
    several = f"{len(profile)} times of day, the usual volume is from {profile.min():.2g} to {profile.max():.2g} of the mean; "
    daily = several if len(profile) > 1 else ""
    return f"{daily}{forecast.persistence:.0%} of a deviation are left a bar later (VWAP follows this forecast)"
