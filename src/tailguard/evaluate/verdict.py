"""The verdict on an agent: the evidence in numbers, and what it allows to be said in words. Sharpe ratios here are per year."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt
from scipy.special import ndtr, ndtri

from tailguard.evaluate.stats.bootstrap import Bootstrap, Difference, Interval, bootstrap, return_block_length
from tailguard.evaluate.stats.dependence import variance_inflation
from tailguard.evaluate.stats.performance import AlphaBeta, alpha_beta, sharpe
from tailguard.evaluate.stats.series import ROUNDING, Floats, as_series
from tailguard.evaluate.stats.significance import deflated_sharpe, expected_max_sharpe, probabilistic_sharpe
from tailguard.evaluate.stats.superiority import step_down
from tailguard.validation import require

AGENT = "agent"


@dataclass(frozen=True)
class Edge:
    """The agent compared with a baseline.

    :param baseline: name of the baseline.
    :param difference: Sharpe ratio of the agent minus that of the baseline.
    :param p_value: one-sided, of "not better", corrected for the number of trials.
    :param hurdle: True if skill requires the agent to beat this baseline.
    """

    baseline: str
    difference: Difference
    p_value: float
    hurdle: bool


@dataclass(frozen=True)
class Timing:
    """The agent compared with block permutations of its own positions: the same exposure and trading at other times.

    :param lead: Sharpe ratio of the agent minus the mean of the permutations.
    :param error: standard deviation of the permutations; 0 for an agent that never changes its position.
    :param luck: lead that the best of the trials is expected to have by chance.
    :param p_value: share of permutations with such a lead, corrected for the number of trials.
    """

    lead: float
    error: float
    luck: float
    p_value: float


@dataclass(frozen=True)
class Evidence:
    """The numbers that :func:`decide` needs.

    :param bars: length of the test.
    :param periods: bars per year.
    :param sharpe: of the agent, with its interval.
    :param error: standard error of that Sharpe ratio.
    :param deflated: deflated Sharpe ratio, a confidence in [0, 1]; None if the agent's account never moved.
    :param trials: number of agents that there were to choose from.
    :param chance: Sharpe ratio that the best of as many trials without skill is expected to reach.
    :param market: name of the baseline that merely holds the market; None where no market is known.
    :param alpha: regression of the agent's returns on the market's; None without a market.
    :param edges: one per baseline.
    :param better: rivals whose Sharpe ratio is significantly higher than the agent's (stepwise test over all of them).
    :param beyond_market: without a market: confidence that the Sharpe ratio exceeds that of a typical market, and luck; None
        with a market, and for an account that never moved.
    :param pbo: probability of backtest overfitting, if it was measured.
    :param seed_edges: lead of each training seed, if there were several.
    :param timing: comparison with permutations of the agent's own positions, if there are any.
    """

    bars: int
    periods: float
    sharpe: Interval
    error: float
    deflated: float | None
    trials: int
    chance: float
    market: str | None
    alpha: AlphaBeta | None
    edges: tuple[Edge, ...]
    better: tuple[str, ...] = ()
    beyond_market: float | None = None
    pbo: float | None = None
    seed_edges: tuple[float, ...] = ()
    timing: Timing | None = None


def gather_evidence(
    agent: ArrayLike,
    baselines: Mapping[str, ArrayLike],
    periods: float,
    *,
    market: str | None,
    market_sharpe: float = 0.5,
    hurdles: Collection[str] = (),
    rivals: Collection[str] | None = None,
    trials: int = 1,
    trial_deviation: float | None = None,
    pbo: float | None = None,
    seed_edges: Sequence[float] = (),
    permuted_sharpes: ArrayLike | None = None,
    size: float = 0.025,
    draws: int = 5000,
    block: float | None = None,
    seed: int = 0,
    resamples: Bootstrap | None = None,
) -> Evidence:
    """Compare an agent with its baselines on the same test bars.

    :param agent: simple returns ``[T]`` after all costs, at least 8; in excess of the riskless rate if idle cash earns it.
    :param baselines: returns ``[T]`` by name, under the same accounting and likewise in excess.
    :param periods: bars per year.
    :param market: the baseline that merely holds the market, such as buy-and-hold. What it explains, at any exposure, is not
        skill: a constant mix at the agent's own exposure has an alpha of 0. None if it is not known; then the Sharpe ratio has
        to exceed `market_sharpe`.
    :param market_sharpe: annual Sharpe ratio of a typical market, for an agent whose market is not known.
    :param hurdles: baselines whose Sharpe ratio a skilled agent has to beat.
    :param rivals: baselines that the agent may be called worse than; None takes all. A single draw of chance, such as random
        positions, is no strategy that anybody could have preferred.
    :param trials: agents that this one was chosen from by looking at these bars; 1 if it was fixed before.
    :param trial_deviation: standard deviation of the trials' Sharpe ratios per bar; None takes that of trials without skill.
    :param pbo: probability of backtest overfitting, from :func:`tailguard.evaluate.stats.significance.overfitting`.
    :param seed_edges: lead of each training seed in Sharpe ratio per year, such as over the market.
    :param permuted_sharpes: Sharpe ratios per year ``[P]`` of block permutations of the agent's positions under the same
        accounting; a skilled agent then has to beat them.
    :param size: chance of error of the (one-sided) test for baselines that are better than the agent.
    :param draws: resamples.
    :param block: expected block length; None takes :func:`tailguard.evaluate.stats.bootstrap.return_block_length`.
    :param seed: of the draws.
    :param resamples: of accounts that include the agent, under the name ``agent``, and all baselines; `draws`, `block` and
        `seed` are then not used. None draws them.
    """
    values = as_series("agent", agent, 2)
    require(len(baselines) >= 1, "baselines", dict(baselines), "at least one")
    require(AGENT not in baselines, "a baseline's name", AGENT, f"any other than {AGENT!r}")
    require(market is None or market in baselines, "market", market, f"one of {', '.join(baselines)}")
    for name, chosen in (("hurdles", hurdles), ("rivals", rivals or ())):
        unknown = sorted(set(chosen) - set(baselines))
        require(not unknown, name, unknown, f"some of {', '.join(baselines)}")
    returns = {AGENT: values, **baselines}
    if resamples is None:
        block = return_block_length(returns) if block is None else block
        resamples = bootstrap(returns, periods, draws=draws, block=block, seed=seed)
    resamples = resamples.only(list(returns))
    inflation = variance_inflation(values)
    spread = math.sqrt(inflation / (len(values) - 1)) if trial_deviation is None else trial_deviation
    moves = float(np.std(values)) > ROUNDING
    luck = expected_max_sharpe(trials, spread)
    unknown_market = market is None and moves
    return Evidence(
        bars=len(values),
        periods=periods,
        sharpe=resamples.interval("sharpe", AGENT),
        error=float(resamples.draws["sharpe"][:, 0].std(ddof=1)),
        deflated=deflated_sharpe(values, trials, trial_deviation, inflation) if moves else None,
        trials=trials,
        chance=luck * math.sqrt(periods),
        market=market,
        alpha=None if market is None else alpha_beta(values, baselines[market], periods),
        edges=tuple(_edge(resamples, name, trials, name in hurdles) for name in baselines),
        better=_better_baselines(resamples, list(baselines) if rivals is None else list(rivals), size),
        beyond_market=probabilistic_sharpe(values, market_sharpe / math.sqrt(periods) + luck, inflation)
        if unknown_market
        else None,
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


def _better_baselines(resamples: Bootstrap, rivals: Sequence[str], size: float) -> tuple[str, ...]:
    if not rivals:
        return ()
    resamples = resamples.only([AGENT, *rivals])
    estimates, draws = resamples.estimates["sharpe"], resamples.draws["sharpe"]
    # Accounts that are nearly the same differ by next to nothing, and by that for sure.
    leads, resampled = estimates[1:] - estimates[0] - NEGLIGIBLE, draws[:, 1:] - draws[:, :1] - NEGLIGIBLE
    significant = step_down(leads, resampled, size)
    return tuple(name for name, is_better in zip(resamples.names[1:], significant, strict=True) if is_better)


VerdictOutcome = Literal["evidence of skill", "no evidence of skill", "worse than", "too little data to tell"]

TOO_GOOD = 3.0  # annual Sharpe ratios above this are more often a bug than a strategy
HIGHEST_PBO = 0.2
NEGLIGIBLE = 0.05  # lead in annual Sharpe ratio below which nobody is called worse
MANY_YEARS = 100.0


class VerdictRules(BaseModel):
    """The thresholds of the verdict.

    :param size: chance of claiming skill, or inferiority, for an agent that has neither; half of it for each, as with a 95 %
        interval for 0.05, the usual value. The deflated Sharpe ratio has to exceed 1 - size.
    :param worthwhile: annual Sharpe ratio that would be worth having, of the agent and of its lead. If the test was too short
        to find it, the verdict is "too little data to tell" instead of "no evidence of skill".
    :param power: chance with which the test should find such a lead; 0.8 is usual. More power needs more data.
    :param fewest_bars: below this no verdict is given at all: the tests hold for long series only.
    :param market_sharpe: annual Sharpe ratio that counts as the market's where returns come without a benchmark. Stock markets
        had 0.3 to 0.5 over decades; a strategy whose market is not known has to exceed it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    size: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.05
    worthwhile: PositiveFloat = 1.0
    power: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.8
    fewest_bars: PositiveInt = 100
    market_sharpe: Annotated[float, Field(ge=0.0)] = 0.5


@dataclass(frozen=True)
class Verdict:
    """The verdict on an agent.

    :param outcome: one of four.
    :param headline: the outcome in one line, with names and numbers.
    :param reasons: sentences, the most important first.
    :param worse_than: baselines that are better than the agent.
    :param years_needed: length of a test that would find a worthwhile lead; None unless there is too little data.
    """

    outcome: VerdictOutcome
    headline: str
    reasons: tuple[str, ...]
    worse_than: tuple[str, ...] = ()
    years_needed: float | None = None


@dataclass(frozen=True)
class _Gate:
    """A test that a skilled agent passes.

    :param passed: True if the agent passed.
    :param reason: what was found, as a sentence.
    :param lead: the annual Sharpe ratio that is tested.
    :param error: its standard error.
    :param luck: lead that the best of the trials is expected to have by chance.
    :param size: chance to pass without skill.
    """

    passed: bool
    reason: str
    lead: float
    error: float
    luck: float
    size: float

    @property
    def critical(self) -> float:
        """The smallest lead that passes."""
        return self.luck - float(ndtri(self.size)) * self.error


def judge(
    agent: ArrayLike,
    baselines: Mapping[str, ArrayLike],
    periods: float,
    *,
    market: str | None,
    rules: VerdictRules | None = None,
    **evidence: Any,
) -> Verdict:
    """Return the verdict on an agent from its returns and those of its baselines.

    :param agent: simple returns ``[T]`` after all costs.
    :param baselines: returns ``[T]`` by name, under the same accounting.
    :param periods: bars per year.
    :param market: the baseline that merely holds the market; None if it is not known.
    :param rules: thresholds; None takes the defaults.
    :param evidence: any other parameter of :func:`gather_evidence`, such as `hurdles`, `trials`, `draws` or `seed`.
    """
    rules = rules or VerdictRules()
    evidence |= {"size": rules.size / 2.0, "market_sharpe": rules.market_sharpe}
    return decide(gather_evidence(agent, baselines, periods, market=market, **evidence), rules)


def decide(evidence: Evidence, rules: VerdictRules | None = None) -> Verdict:
    """Return the verdict that the evidence allows.

    Skill requires a Sharpe ratio above what the best of all trials reaches by chance, a return that the market does not
    explain, a lead over every hurdle and over permutations of the agent's positions, and training seeds that agree. All have to
    hold, so the chance of error is at most that of a single test.

    :param evidence: from :func:`gather_evidence`.
    :param rules: thresholds; None takes the defaults.
    """
    rules = rules or VerdictRules()
    gates = [_luck_gate(evidence, rules), _market_gate(evidence, rules)]
    gates += [_hurdle_gate(edge, evidence.trials, rules) for edge in evidence.edges if edge.hurdle]
    gates += [_timing_gate(evidence.timing, rules)] if evidence.timing is not None else []
    seeds_agree, about_seeds = _seeds(evidence)
    failed = [gate.reason for gate in gates if not gate.passed] + ([] if seeds_agree else about_seeds)
    passed = [gate.reason for gate in gates if gate.passed] + (about_seeds if seeds_agree else [])
    findings, remarks = [*failed, *passed], [*_other_leads(evidence), *_cautions(evidence)]
    length = f"The test has {evidence.bars:,} bars ({_years(evidence.bars / evidence.periods)})."
    power = min(_power(gate, rules) for gate in gates)
    detection = f"It would have detected a true Sharpe ratio lead of {rules.worthwhile:g} with a probability of {power:.0%}."

    if evidence.bars < rules.fewest_bars:
        length = f"{length} No statistical test is reliable below {rules.fewest_bars} bars."
        return _too_little(evidence, gates, rules, length, findings + remarks)
    if evidence.better:
        names = _and(evidence.better)
        reason = f"The Sharpe ratio is more than {NEGLIGIBLE} below that of {names}, with a chance of error of at most "
        reason += f"{rules.size / 2.0:.1%}."
        return Verdict("worse than", f"worse than {names}", (reason, *findings, length, *remarks), evidence.better)
    if not failed:
        return Verdict("evidence of skill", "evidence of skill", (*findings, length, *remarks))
    if power < rules.power and not _excluded(gates, rules):
        return _too_little(evidence, gates, rules, f"{length} {detection}", findings + remarks)
    if power < rules.power:
        detection = f"That is short, but enough to rule out a Sharpe ratio lead of {rules.worthwhile:g}."
    reasons = (*findings, f"{length} {detection}", *_if_real(evidence, gates), *remarks)
    return Verdict("no evidence of skill", "no evidence of skill", reasons)


def _luck_gate(evidence: Evidence, rules: VerdictRules) -> _Gate:
    if evidence.deflated is None:
        idle = "The account never moved: the agent did not trade."
        return _Gate(False, idle, 0.0, evidence.error, evidence.chance, rules.size)
    sharpe, passed = evidence.sharpe, evidence.deflated > 1.0 - rules.size
    claim = "more than luck can explain" if passed else "not more than luck can explain"
    best = f" for {evidence.trials:,} trials, the best of which reaches {evidence.chance:.2f} by luck"
    best = "" if evidence.trials == 1 else best
    confidence = f"deflated Sharpe ratio {evidence.deflated:.3f}{best}; above {1.0 - rules.size:.2f} passes"
    reason = f"Sharpe {sharpe.estimate:.2f} per year [{sharpe.low:.2f}, {sharpe.high:.2f}]: {claim} ({confidence})."
    return _Gate(passed, reason, sharpe.estimate, evidence.error, evidence.chance, rules.size)


def _market_gate(evidence: Evidence, rules: VerdictRules) -> _Gate:
    """Test alpha: over the residual volatility it is the Sharpe ratio of the agent hedged against the market."""
    if evidence.alpha is None:
        return _unknown_market_gate(evidence, rules)
    alpha, error = evidence.alpha, math.sqrt(evidence.periods / evidence.bars)
    luck = expected_max_sharpe(evidence.trials, 1.0)
    passed = bool(ndtr(luck - alpha.alpha_t) < rules.size / 2.0)
    claim = "Significant positive alpha" if passed else "No significant positive alpha"
    numbers = f"{alpha.alpha:+.2%} per year (t = {alpha.alpha_t:.2f}), beta {alpha.beta:.2f}"
    reason = f"{claim} over {evidence.market}: {numbers}."
    return _Gate(passed, reason, alpha.alpha_t * error, error, luck * error, rules.size / 2.0)


def _unknown_market_gate(evidence: Evidence, rules: VerdictRules) -> _Gate:
    """Test the Sharpe ratio against that of a typical market, which the returns may come from."""
    confidence, lead = evidence.beyond_market or 0.0, evidence.sharpe.estimate - rules.market_sharpe
    passed = confidence > 1.0 - rules.size
    claim = "more than a good market earns" if passed else "not more than a good market earns"
    numbers = f"confidence {confidence:.3f} that it exceeds {rules.market_sharpe:g}; above {1.0 - rules.size:.2f} passes"
    reason = f"There is no benchmark to measure alpha over. The Sharpe ratio is {claim} ({numbers})."
    return _Gate(passed, reason, lead, evidence.error, evidence.chance, rules.size)


def _hurdle_gate(edge: Edge, trials: int, rules: VerdictRules) -> _Gate:
    passed = edge.p_value < rules.size / 2.0
    claim = "Better" if passed else "Not shown to be better"
    reason = f"{claim} than {edge.baseline}: Sharpe ratio lead {_lead(edge)}, p = {edge.p_value:.3f}."
    error = edge.difference.error
    return _Gate(passed, reason, edge.difference.estimate, error, expected_max_sharpe(trials, error), rules.size / 2.0)


def _timing_gate(timing: Timing, rules: VerdictRules) -> _Gate:
    passed = timing.p_value < rules.size / 2.0
    claim = "The timing is more than chance" if passed else "The timing may be chance"
    numbers = f"Sharpe ratio lead {timing.lead:+.2f} over the same positions in shuffled order, p = {timing.p_value:.3f}"
    return _Gate(passed, f"{claim}: {numbers}.", timing.lead, timing.error, timing.luck, rules.size / 2.0)


def _seeds(evidence: Evidence) -> tuple[bool, list[str]]:
    """Return whether the training seeds agree: their interquartile range is at most their median lead, which is positive."""
    if len(evidence.seed_edges) < 2:
        return True, []
    low, middle, high = np.quantile(evidence.seed_edges, [0.25, 0.5, 0.75])
    agree = bool(middle > 0.0 and high - low <= middle)
    claim = "agree on a lead" if agree else "do not agree on a lead"
    spread = f"median lead {middle:+.2f} in Sharpe ratio, interquartile range {low:+.2f} to {high:+.2f}"
    return agree, [f"The {len(evidence.seed_edges)} training seeds {claim}: {spread}."]


def _too_little(evidence: Evidence, gates: list[_Gate], rules: VerdictRules, length: str, findings: list[str]) -> Verdict:
    """Return the verdict for too short a test; errors and luck fall as 1 / sqrt(T), which gives the length that is needed."""
    largest = max(gate.critical + float(ndtri(rules.power)) * gate.error for gate in gates)
    bars = max(math.ceil(evidence.bars * (largest / rules.worthwhile) ** 2), rules.fewest_bars)
    years = bars / evidence.periods
    lead = f"a true Sharpe ratio lead of {rules.worthwhile:g} with a probability of {rules.power:.0%}"
    demand = f"To detect {lead}, about {_years(years)} ({bars:,} bars) of test data are needed."
    headline = f"too little data to tell: about {_years(years)} of test data are needed"
    return Verdict("too little data to tell", headline, (length, demand, *findings), years_needed=years)


def _other_leads(evidence: Evidence) -> list[str]:
    rest = [f"{edge.baseline} {_lead(edge)}" for edge in evidence.edges if not edge.hurdle]
    other = "the other baselines" if len(rest) < len(evidence.edges) else "the baselines"
    return [f"Sharpe ratio lead over {other}: {', '.join(rest)}."] if rest else []


def _cautions(evidence: Evidence) -> list[str]:
    cautions = []
    if evidence.sharpe.estimate > TOO_GOOD:
        cautions.append(f"A Sharpe ratio above {TOO_GOOD:g} is more often a bug (look-ahead, missing costs) than a strategy.")
    if evidence.pbo is not None and evidence.pbo > HIGHEST_PBO:
        figure = f"PBO {evidence.pbo:.2f}, should be below {HIGHEST_PBO}"
        cautions.append(f"Overfitting: the best trial in one half of the data is often poor in the other ({figure}).")
    return cautions


def _power(gate: _Gate, rules: VerdictRules) -> float:
    """Return the probability that a worthwhile lead passes the test."""
    if gate.error == 0.0:
        return 1.0
    return float(ndtr((rules.worthwhile - gate.critical) / gate.error))


def _excluded(gates: list[_Gate], rules: VerdictRules) -> bool:
    """Return whether some test shows that the lead is smaller than a worthwhile one, despite too little data."""
    return any(gate.lead - float(ndtri(gate.size)) * gate.error < rules.worthwhile for gate in gates)


def _if_real(evidence: Evidence, gates: list[_Gate]) -> list[str]:
    """Return how long a test would have to be if the observed leads are the true ones; nothing if some lead is not above 0."""
    closed = [gate for gate in gates if not gate.passed]
    if not closed or min(gate.lead for gate in closed) <= 0.0:
        return []
    factor = max(gate.critical / gate.lead for gate in closed)
    years = evidence.bars / evidence.periods * factor**2
    length = f"more than {MANY_YEARS:g} years" if years > MANY_YEARS else f"about {_years(years)}"
    return [f"If the observed leads are real, {length} of test data would be needed to show it."]


def _lead(edge: Edge) -> str:
    return f"{edge.difference.estimate:+.2f} [{edge.difference.low:+.2f}, {edge.difference.high:+.2f}]"


def _years(years: float) -> str:
    return f"{years:.1f} years" if years >= 1.0 else f"{years * 12.0:.1f} months"


def _and(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
