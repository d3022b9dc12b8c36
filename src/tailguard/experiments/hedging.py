"""Train an agent that hedges options, and play it on the paths of its rivals."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from tailguard.envs.desk_config import HedgeSettings, OptionSettings
from tailguard.envs.hedging_rivals import (
    HedgingResult,
    delta_hedge,
    leland,
    no_hedge,
    play_hedge,
    tune_whalley_wilmott,
    whalley_wilmott,
)
from tailguard.envs.heston import Heston, calibrate_heston
from tailguard.envs.option_hedging import BandHedging, BlockBootstrap, Option, OptionHedging, Process
from tailguard.envs.return_observer import ReturnObserver
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.evaluate.report.hedging import HedgeComparison
from tailguard.market.bars import periods_per_year, symbols_of
from tailguard.parallel.threads import one_thread
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.schedules import LinearSchedule
from tailguard.validation import require

ENVS = 512
ROLLOUT = 10  # dates per copy and rollout: as many whole episodes as fit, one at least
MINIBATCHES = 8
# Paths of tests and of tuning are drawn from other seeds than those of training, which begin at the agent's seed.
TEST_SEED, TUNING_SEED = 10_000_000, 20_000_000
SPOT = 100.0
WORTHLESS = 1e-4  # a premium that is too small to be a unit


def train_hedger(
    env: BandHedging, *, alpha: float | tuple[float, float] = 0.05, steps: int = 2_000_000, seed: int = 0
) -> DistributionalPPO:
    """Return an agent that minimises the CVaR of the hedge error.

    :param env: with some 512 copies.
    :param alpha: the share of worst paths that counts, or a range for an alpha-conditioned agent.
    :param steps: hedging decisions to learn from; 2,000,000 take about 15 seconds of one core.
    :param seed: of the agent and its paths.
    """
    n_steps = env.dates * max(ROLLOUT // env.dates, 1)
    model = DistributionalPPO(
        "MlpPolicy",
        env,
        learning_rate=LinearSchedule(2e-3, 1e-4),
        n_steps=n_steps,
        batch_size=max(n_steps * env.num_envs // MINIBATCHES, 1),
        n_epochs=4,
        gamma=1.0,
        ent_coef=0.0,
        policy_kwargs={"log_std_init": -2.0, "net_arch": [32, 32]},
        risk={"objective": "cvar", "alpha": alpha, "window": 4000},
        critic={"twin": False},
        normalize_obs=True,
        seed=seed,
    )
    return model.learn(steps)


def play_hedger(model: DistributionalPPO, env: BandHedging, seed: int, alpha: float | None = None) -> HedgingResult:
    """Play one episode in every copy with the most likely actions of an agent.

    :param model: from :func:`train_hedger`.
    :param env: with as many copies as paths.
    :param seed: of the paths; with the same seed rivals meet the same paths.
    :param alpha: the tail that an alpha-conditioned agent serves.
    """
    conditioned = model.risk_config.alpha_conditioned
    require((alpha is not None) == conditioned, "alpha", alpha, "a number for an alpha-conditioned agent, None for others")
    observed = ReturnObserver(GymVectorAdapter(env, seed), 1.0, [alpha] if alpha is not None else None)
    obs, pnl = observed.reset(), np.zeros(env.num_envs)
    for _ in range(env.dates):
        assert isinstance(obs, np.ndarray), "a box of observations"
        obs, rewards, _, _ = observed.step(model.predict(obs, deterministic=True)[0])
        pnl += rewards
    return HedgingResult(pnl, env.finished_costs, env.finished_turnover)


@one_thread()
def hedge_bars(bars: pd.DataFrame, settings: HedgeSettings, source: str = "bars") -> tuple[DistributionalPPO, HedgeComparison]:
    """Train a hedger on the first bars, and compare it with its rivals on paths made of the last ones.

    Bootstrapped paths are hedged at the volatility of the training bars. Heston's model is calibrated to training and test bars
    apart, and the option is sold at its price. Whalley and Wilmott's risk aversion is tuned on training paths.

    :param bars: one symbol, from :func:`tailguard.market.load_bars`.
    :param settings: of the option and the comparison.
    :param source: of the bars, for the report.
    """
    require(symbols_of(bars) == [""], "the symbols", symbols_of(bars), "one: an option has one underlying")
    returns = np.diff(np.log(bars["close"].to_numpy(np.float64)))
    first_test = round((1.0 - settings.test_share) * len(returns))
    per_year = periods_per_year(pd.DatetimeIndex(bars.index))
    known, unknown = returns[:first_test], returns[first_test:]
    volatility = float(known.std() * np.sqrt(per_year))
    book = tuple(_option(leg) for leg in settings.book)
    years = settings.dates / per_year
    option: dict[str, Any] = {"book": book, "dates": settings.dates, "maturity": years, "rate": settings.rate, "spot": SPOT}
    option |= {"cost": settings.cost, "fixed_cost": SPOT * settings.fixed_cost}
    processes: list[Process] = [BlockBootstrap(span, settings.mean_block, volatility) for span in (known, unknown)]
    if settings.process == "heston":
        processes = [calibrate_heston(span, 1.0 / per_year) for span in (known, unknown)]
    train, test = ({**option, "process": process} for process in processes)
    tuning, paths = OptionHedging(settings.paths, **train), OptionHedging(settings.paths, **test)
    unit = sum(abs(OptionHedging(**test | {"book": (leg,)}).premium) for leg in book)  # what is bought may pay for what is sold
    legal = f"above {WORTHLESS}: choose a strike nearer to the spot or more dates"
    require(unit > WORTHLESS, f"the premium for a spot of {SPOT:g}", unit, legal)
    model = train_hedger(BandHedging(ENVS, **train), alpha=settings.alpha, steps=settings.steps, seed=settings.seed)
    aversion, _ = tune_whalley_wilmott(tuning, settings.alpha, TUNING_SEED + settings.seed)
    rivals = {
        "Black-Scholes delta": delta_hedge,
        "Leland": leland(paths),
        "Whalley-Wilmott band": whalley_wilmott(paths, aversion),
        "no hedge": no_hedge,
    }
    seed = TEST_SEED + settings.seed
    results = {"agent": play_hedger(model, BandHedging(settings.paths, **test), seed)}
    results |= {name: play_hedge(paths, hedge, seed) for name, hedge in rivals.items()}
    facts = {
        "data": f"{source}, {len(bars):,} bars",
        "training": f"returns 1 to {first_test:,}; {settings.steps:,} decisions; seed {settings.seed}",
        "test": f"returns {first_test + 1:,} to {len(returns):,}; {settings.paths:,} paths",
        "paths": _process_in_words(settings, processes),
        "premium": _premium_in_words(settings, paths.premium, unit),
        "volatility": f"{volatility:.1%} a year in training, {unknown.std() * np.sqrt(per_year):.1%} in the test",
        "cost": _cost_in_words(settings),
        "risk aversion of the band": f"{aversion:.3g}, tuned on training paths",
    }
    title = f"{_book_in_words(settings.book)}, {settings.dates} bars, {source}"
    return model, HedgeComparison(title, results, settings.alpha, unit, facts)


def _option(leg: OptionSettings) -> Option:
    return Option(leg.kind, SPOT * leg.strike, leg.quantity, knock_out=None if leg.knock_out is None else SPOT * leg.knock_out)


def _book_in_words(book: Sequence[OptionSettings]) -> str:
    words = []
    for leg in book:
        many = "" if abs(leg.quantity) == 1.0 else f" ({abs(leg.quantity):g} times)"
        barrier = "" if leg.knock_out is None else f", void at {100.0 * leg.knock_out:.4g}%"
        words.append(
            f"a {'sold' if leg.quantity < 0.0 else 'bought'} {leg.kind}{many} at {100.0 * leg.strike:.4g}% of the spot{barrier}"
        )
    text = " and ".join(words)
    return text[0].upper() + text[1:]


def _cost_in_words(settings: HedgeSettings) -> str:
    fixed = f", and {settings.fixed_cost:.3%} of the spot per trade" if settings.fixed_cost else ""
    return f"{settings.cost:.3%} of the value traded{fixed}"


def _premium_in_words(settings: HedgeSettings, premium: float, unit: float) -> str:
    model = (
        "Black-Scholes at the volatility of the training bars" if settings.process == "bootstrap" else "Heston of the test bars"
    )
    flow = "received" if premium <= 0.0 else "paid"
    several = f"; figures are in parts of {unit:.2f}, the premiums of all options" if settings.legs else ""
    drift = "what the test bars move less or more is in the mean of every hedge"
    return f"{abs(premium):.2f} {flow} for a spot of {SPOT:g} ({model}){several}; {drift}"


def _process_in_words(settings: HedgeSettings, processes: Sequence[Process]) -> str:
    train, test = processes
    if not isinstance(train, Heston) or not isinstance(test, Heston):
        return f"stationary bootstrap, blocks of {settings.mean_block:g} bars on average"
    return "; ".join(
        f"Heston on {name} bars: volatility {math.sqrt(process.long_run_variance):.1%}, "
        f"mean reversion {process.mean_reversion:.2g}, volatility of variance {process.vol_of_variance:.2g}, "
        f"correlation {process.correlation:.2f}"
        for name, process in (("training", train), ("test", test))
    )
