"""What the data say about an agent, in the numbers that a verdict needs. Sharpe ratios here are per year."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tailguard.evaluate.stats.bootstrap import Bootstrap, Difference, Interval, bootstrap, return_block_length
from tailguard.evaluate.stats.performance import sharpe
from tailguard.evaluate.stats.regression import AlphaBeta, alpha_beta
from tailguard.evaluate.stats.series import ROUNDING, Floats, as_series
from tailguard.evaluate.stats.significance import deflated_sharpe, expected_max_sharpe
from tailguard.evaluate.stats.superiority import step_down
from tailguard.validation import require

AGENT = "agent"


@dataclass(frozen=True)
class Edge:
    """The agent against one baseline.

    :param baseline: its name.
    :param difference: Sharpe ratio of the agent minus that of the baseline.
    :param p_value: one-sided, of "not better", with as many trials to choose from as there were.
    :param hurdle: whether skill means to beat this one.
    """

    baseline: str
    difference: Difference
    p_value: float
    hurdle: bool


@dataclass(frozen=True)
class Timing:
    """The agent against its own positions in another order: the same exposure, the same trading, another time.

    :param lead: Sharpe ratio of the agent minus the mean of the permuted ones.
    :param error: standard deviation of the permuted ones; 0 for an agent that never changes its position.
    :param luck: lead that the choice among trials gives by chance.
    :param p_value: how often a permutation leads by as much, with as many trials to choose from as there were.
    """

    lead: float
    error: float
    luck: float
    p_value: float


@dataclass(frozen=True)
class Evidence:
    """Everything that :func:`tailguard.evaluate.verdict.decide` looks at.

    :param bars: length of the test.
    :param periods: bars per year.
    :param sharpe: of the agent, with its interval.
    :param error: standard error of that Sharpe ratio.
    :param deflated: deflated Sharpe ratio, a confidence in [0, 1]; None if the agent's account never moved.
    :param trials: how many agents there were to choose from.
    :param chance: Sharpe ratio that the best of as many trials without skill reaches on average.
    :param market: name of the baseline that merely holds the market.
    :param alpha: what is left of the agent's return after the market's part.
    :param edges: one per baseline.
    :param better: baselines whose Sharpe ratio is higher than the agent's, together at the size of the test.
    :param pbo: probability of backtest overfitting, if it was measured.
    :param seed_edges: lead of each training seed, if there were several.
    :param timing: against the agent's own positions permuted, if that was tried.
    """

    bars: int
    periods: float
    sharpe: Interval
    error: float
    deflated: float | None
    trials: int
    chance: float
    market: str
    alpha: AlphaBeta
    edges: tuple[Edge, ...]
    better: tuple[str, ...] = ()
    pbo: float | None = None
    seed_edges: tuple[float, ...] = ()
    timing: Timing | None = None


def gather_evidence(
    agent: ArrayLike,
    baselines: Mapping[str, ArrayLike],
    periods: float,
    *,
    market: str,
    hurdles: Collection[str] = (),
    trials: int = 1,
    trial_deviation: float | None = None,
    pbo: float | None = None,
    seed_edges: Sequence[float] = (),
    permuted_sharpes: ArrayLike | None = None,
    size: float = 0.025,
    draws: int = 5000,
    block: float | None = None,
    seed: int = 0,
) -> Evidence:
    """Compare an agent with its baselines on the same test bars.

    :param agent: simple returns ``[T]`` after all costs, at least 8; in excess of the riskless rate if idle cash earns it.
    :param baselines: from names to returns ``[T]`` under the same accounting, likewise.
    :param periods: bars per year.
    :param market: the baseline that merely holds the market, such as buy-and-hold. What it explains, at any exposure, is no
        skill; a constant mix at the agent's own exposure has an alpha of 0.
    :param hurdles: baselines that skill means to beat in Sharpe ratio, such as the agent's own positions in another order.
    :param trials: how many agents there were to choose this one from by looking at these bars; 1 if it was fixed before.
    :param trial_deviation: standard deviation of the trials' Sharpe ratios per bar; None takes that of trials without skill.
    :param pbo: probability of backtest overfitting, from :func:`tailguard.evaluate.stats.overfitting.overfitting`.
    :param seed_edges: per training seed, its lead in Sharpe ratio per year, such as over the market.
    :param permuted_sharpes: Sharpe ratios per year ``[P]`` of the agent's own positions permuted in blocks and traded under the
        same accounting; skill then means to lead them.
    :param size: chance of error of the (one-sided) test for baselines that are better than the agent.
    :param draws: resamples.
    :param block: expected length of a block; None takes :func:`tailguard.evaluate.stats.bootstrap.return_block_length`.
    :param seed: of the draws.
    """
    values = as_series("agent", agent, 2)
    require(len(baselines) >= 1, "baselines", dict(baselines), "at least one")
    require(AGENT not in baselines, "a baseline's name", AGENT, f"any other than {AGENT!r}")
    require(market in baselines, "market", market, f"one of {', '.join(baselines)}")
    unknown = sorted(set(hurdles) - set(baselines))
    require(not unknown, "hurdles", unknown, f"some of {', '.join(baselines)}")
    everyone = {AGENT: values, **baselines}
    block = return_block_length(everyone) if block is None else block
    resamples = bootstrap(everyone, periods, draws=draws, block=block, seed=seed)
    spread = 1.0 / math.sqrt(len(values) - 1) if trial_deviation is None else trial_deviation
    moves = float(np.std(values)) > ROUNDING
    return Evidence(
        bars=len(values),
        periods=periods,
        sharpe=resamples.interval("sharpe", AGENT),
        error=float(resamples.draws["sharpe"][:, 0].std(ddof=1)),
        deflated=deflated_sharpe(values, trials, trial_deviation) if moves else None,
        trials=trials,
        chance=expected_max_sharpe(trials, spread) * math.sqrt(periods),
        market=market,
        alpha=alpha_beta(values, baselines[market], periods),
        edges=tuple(_edge(resamples, name, trials, name in hurdles) for name in baselines),
        better=_better(resamples, size),
        pbo=pbo,
        seed_edges=tuple(float(edge) for edge in seed_edges),
        timing=None if permuted_sharpes is None else _timing(values, permuted_sharpes, periods, trials),
    )


def _timing(agent: Floats, permuted_sharpes: ArrayLike, periods: float, trials: int) -> Timing:
    permuted = as_series("permuted_sharpes", permuted_sharpes, 2)
    error = float(permuted.std(ddof=1))
    error = error if error > ROUNDING * math.sqrt(periods) else 0.0
    noise, luck = permuted - permuted.mean(), expected_max_sharpe(trials, error)
    lead = sharpe(agent, periods) - float(permuted.mean())
    reached = noise >= lead - luck if error > 0.0 else np.ones(len(noise), np.bool_)
    return Timing(lead, error, luck, (1.0 + float(reached.sum())) / (len(noise) + 1.0))


def _edge(resamples: Bootstrap, baseline: str, trials: int, hurdle: bool) -> Edge:
    difference = resamples.difference("sharpe", AGENT, baseline)
    draws = resamples.draws["sharpe"]
    noise = draws[:, 0] - draws[:, resamples.names.index(baseline)] - difference.estimate
    # The best of several trials leads by chance: its lead has to exceed that one too, as in the deflated Sharpe ratio.
    luck = expected_max_sharpe(trials, difference.error)
    p_value = (1.0 + float((noise >= difference.estimate - luck).sum())) / (len(noise) + 1.0)
    return Edge(baseline, difference, p_value, hurdle)


def _better(resamples: Bootstrap, size: float) -> tuple[str, ...]:
    estimates, draws = resamples.estimates["sharpe"], resamples.draws["sharpe"]
    found = step_down(estimates[1:] - estimates[0], draws[:, 1:] - draws[:, :1], size)
    return tuple(name for name, is_better in zip(resamples.names[1:], found, strict=True) if is_better)
