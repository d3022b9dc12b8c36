"""The verdict in plain words: what the evidence allows to be said about an agent, and why."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt
from scipy.special import ndtr, ndtri

from tailguard.evaluate.evidence import Edge, Evidence, Timing, gather_evidence
from tailguard.evaluate.stats.significance import expected_max_sharpe

Outcome = Literal["evidence of skill", "no evidence of skill", "worse than", "too little data to tell"]

TOO_GOOD = 3.0  # annual Sharpe ratios above this are more often a bug than a strategy
WANTED_PBO = 0.2
MANY_YEARS = 100.0


class VerdictRules(BaseModel):
    """When to say what.

    :param size: chance of a claim, good or bad, about an agent that deserves neither; half of it goes to each side, as with
        the 95 % interval that belongs to 0.05, the usual value. The deflated Sharpe ratio has to exceed 1 - size.
    :param worthwhile: annual Sharpe ratio that would be worth having, of the agent and of its lead. If the test was too short
        to find it, the verdict is "too little data to tell" instead of "no evidence of skill".
    :param power: chance with which the test should find such a lead; 0.8 is usual. More power needs more data.
    :param fewest_bars: below this no verdict is given at all: the tests hold for long series only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    size: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.05
    worthwhile: PositiveFloat = 1.0
    power: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.8
    fewest_bars: PositiveInt = 100


@dataclass(frozen=True)
class Verdict:
    """What can be said about an agent.

    :param outcome: one of four.
    :param headline: the outcome in one line, with names and amounts.
    :param reasons: sentences, the most important first.
    :param worse_than: baselines that are better than the agent.
    :param years_needed: length of a test that would find a worthwhile lead; None unless data are too few.
    """

    outcome: Outcome
    headline: str
    reasons: tuple[str, ...]
    worse_than: tuple[str, ...] = ()
    years_needed: float | None = None


@dataclass(frozen=True)
class _Gate:
    """A test on the way to skill.

    :param passed: whether the agent got through.
    :param reason: what was found, as a sentence.
    :param lead: the annual Sharpe ratio in question.
    :param error: its standard error.
    :param luck: lead that the choice among trials gives by chance.
    :param size: chance to get through without skill.
    """

    passed: bool
    reason: str
    lead: float
    error: float
    luck: float
    size: float

    @property
    def critical(self) -> float:
        """The lead that just gets through."""
        return self.luck - float(ndtri(self.size)) * self.error


def judge(
    agent: ArrayLike,
    baselines: Mapping[str, ArrayLike],
    periods: float,
    *,
    market: str,
    rules: VerdictRules | None = None,
    **evidence: Any,
) -> Verdict:
    """From returns to a verdict.

    :param agent: simple returns ``[T]`` after all costs.
    :param baselines: from names to returns ``[T]`` under the same accounting.
    :param periods: bars per year.
    :param market: the baseline that merely holds the market.
    :param rules: when to say what; None takes the defaults.
    :param evidence: any other parameter of :func:`gather_evidence`, such as `hurdles`, `trials`, `draws` or `seed`.
    """
    rules = rules or VerdictRules()
    return decide(gather_evidence(agent, baselines, periods, market=market, size=rules.size / 2.0, **evidence), rules)


def decide(evidence: Evidence, rules: VerdictRules | None = None) -> Verdict:
    """Weigh the evidence.

    Skill needs a Sharpe ratio above what the best of all trials reaches by chance, a return that the market does not explain,
    a lead over every hurdle and over its own positions at other times, and training seeds that agree. All have to hold, so that
    the chance of error is at most that of one of them.

    :param evidence: from :func:`gather_evidence`.
    :param rules: when to say what; None takes the defaults.
    """
    rules = rules or VerdictRules()
    gates = [_luck_gate(evidence, rules), _market_gate(evidence, rules)]
    gates += [_hurdle_gate(edge, evidence.trials, rules) for edge in evidence.edges if edge.hurdle]
    gates += [_timing_gate(evidence.timing, rules)] if evidence.timing is not None else []
    seeds_agree, about_seeds = _seeds(evidence)
    failed = [gate.reason for gate in gates if not gate.passed] + ([] if seeds_agree else about_seeds)
    passed = [gate.reason for gate in gates if gate.passed] + (about_seeds if seeds_agree else [])
    findings, remarks = [*failed, *passed], [*_others(evidence), *_cautions(evidence)]
    length = f"The test has {evidence.bars:,} bars ({_years(evidence.bars / evidence.periods)})."
    power = min(_power(gate, rules) for gate in gates)
    found = f"A real lead of Sharpe {rules.worthwhile:g} would have been found with a chance of {power:.0%}."

    if evidence.bars < rules.fewest_bars:
        length = f"{length} Below {rules.fewest_bars} bars no test is reliable."
        return _too_little(evidence, gates, rules, length, findings + remarks)
    if evidence.better:
        names = _and(evidence.better)
        reason = (
            f"The Sharpe ratio of {names} is higher than the agent's, with a chance of error of at most {rules.size / 2.0:.1%}."
        )
        return Verdict("worse than", f"worse than {names}", (reason, *findings, length, *remarks), evidence.better)
    if not failed:
        return Verdict("evidence of skill", "evidence of skill", (*findings, length, *remarks))
    if power < rules.power and not _excluded(gates, rules):
        return _too_little(evidence, gates, rules, f"{length} {found}", findings + remarks)
    if power < rules.power:
        found = f"It is too short to find every lead of Sharpe {rules.worthwhile:g}, but shows that this one is smaller."
    reasons = (*findings, f"{length} {found}", *_if_real(evidence, gates), *remarks)
    return Verdict("no evidence of skill", "no evidence of skill", reasons)


def _luck_gate(evidence: Evidence, rules: VerdictRules) -> _Gate:
    if evidence.deflated is None:
        idle = "The account never moved: the agent did not trade."
        return _Gate(False, idle, 0.0, evidence.error, evidence.chance, rules.size)
    sharpe, passed = evidence.sharpe, evidence.deflated > 1.0 - rules.size
    said = "more than luck" if passed else "it may be luck"
    best = "" if evidence.trials == 1 else f" after {evidence.trials:,} trials, whose best has {evidence.chance:.2f} by luck"
    confidence = f"deflated Sharpe {evidence.deflated:.3f}{best}; {1.0 - rules.size:.2f} is needed"
    reason = f"Sharpe {sharpe.estimate:.2f} per year [{sharpe.low:.2f}, {sharpe.high:.2f}]: {said} ({confidence})."
    return _Gate(passed, reason, sharpe.estimate, evidence.error, evidence.chance, rules.size)


def _market_gate(evidence: Evidence, rules: VerdictRules) -> _Gate:
    """alpha / residual volatility per year is a Sharpe ratio too: that of the agent hedged against the market."""
    alpha, error = evidence.alpha, math.sqrt(evidence.periods / evidence.bars)
    luck = expected_max_sharpe(evidence.trials, 1.0)
    passed = bool(ndtr(luck - alpha.alpha_t) < rules.size / 2.0)
    said = "More than the market" if passed else "Not shown to be more than the market"
    numbers = f"alpha {alpha.alpha:+.2%} per year (t = {alpha.alpha_t:.2f}), beta {alpha.beta:.2f}"
    reason = f"{said}: over {evidence.market} {numbers}."
    return _Gate(passed, reason, alpha.alpha_t * error, error, luck * error, rules.size / 2.0)


def _hurdle_gate(edge: Edge, trials: int, rules: VerdictRules) -> _Gate:
    passed = edge.p_value < rules.size / 2.0
    said = "Better" if passed else "Not shown to be better"
    reason = f"{said} than {edge.baseline}: Sharpe {_lead(edge)}, p = {edge.p_value:.3f}."
    error = edge.difference.error
    return _Gate(passed, reason, edge.difference.estimate, error, expected_max_sharpe(trials, error), rules.size / 2.0)


def _timing_gate(timing: Timing, rules: VerdictRules) -> _Gate:
    passed = timing.p_value < rules.size / 2.0
    said = "Its timing is more than chance" if passed else "Its timing may be chance"
    numbers = f"Sharpe {timing.lead:+.2f} over its own positions permuted in blocks, p = {timing.p_value:.3f}"
    return _Gate(passed, f"{said}: {numbers}.", timing.lead, timing.error, timing.luck, rules.size / 2.0)


def _seeds(evidence: Evidence) -> tuple[bool, list[str]]:
    """Training seeds that differ by more than the lead itself are no result."""
    if len(evidence.seed_edges) < 2:
        return True, []
    low, middle, high = np.quantile(evidence.seed_edges, [0.25, 0.5, 0.75])
    agree = bool(middle > 0.0 and high - low <= middle)
    said = "agree" if agree else "disagree"
    spread = f"median lead {middle:+.2f}, the middle half from {low:+.2f} to {high:+.2f}"
    return agree, [f"The {len(evidence.seed_edges)} training seeds {said}: {spread}."]


def _too_little(evidence: Evidence, gates: list[_Gate], rules: VerdictRules, length: str, findings: list[str]) -> Verdict:
    """Errors and luck fall as 1 / sqrt(T): the years after which all gates let a worthwhile lead through with the power."""
    largest = max(gate.critical + float(ndtri(rules.power)) * gate.error for gate in gates)
    bars = max(math.ceil(evidence.bars * (largest / rules.worthwhile) ** 2), rules.fewest_bars)
    years = bars / evidence.periods
    lead = f"a lead of Sharpe {rules.worthwhile:g} with a chance of {rules.power:.0%}"
    demand = f"To find {lead}, about {_years(years)} ({bars:,} bars) are needed."
    headline = f"too little data to tell: about {_years(years)} of test data are needed"
    return Verdict("too little data to tell", headline, (length, demand, *findings), years_needed=years)


def _others(evidence: Evidence) -> list[str]:
    rest = [f"{edge.baseline} {_lead(edge)}" for edge in evidence.edges if not edge.hurdle]
    return [f"Sharpe ratio minus that of the other baselines: {', '.join(rest)}."] if rest else []


def _cautions(evidence: Evidence) -> list[str]:
    cautions = []
    if evidence.sharpe.estimate > TOO_GOOD:
        cautions.append(f"A Sharpe ratio above {TOO_GOOD:g} is more often a bug (look-ahead, missing costs) than a strategy.")
    if evidence.pbo is not None and evidence.pbo > WANTED_PBO:
        figure = f"PBO {evidence.pbo:.2f}, wanted below {WANTED_PBO}"
        cautions.append(f"The best trial of one half of the data was often not good in the other half: {figure}.")
    return cautions


def _power(gate: _Gate, rules: VerdictRules) -> float:
    """Chance that the gate lets a worthwhile lead through."""
    if gate.error == 0.0:
        return 1.0
    return float(ndtr((rules.worthwhile - gate.critical) / gate.error))


def _excluded(gates: list[_Gate], rules: VerdictRules) -> bool:
    """Whether some gate shows that the lead is smaller than a worthwhile one, however little data there are."""
    return any(gate.lead - float(ndtri(gate.size)) * gate.error < rules.worthwhile for gate in gates)


def _if_real(evidence: Evidence, gates: list[_Gate]) -> list[str]:
    """How long a test would have to be if the observed leads are the true ones; nothing if some lead is not above 0."""
    closed = [gate for gate in gates if not gate.passed]
    if not closed or min(gate.lead for gate in closed) <= 0.0:
        return []
    factor = max(gate.critical / gate.lead for gate in closed)
    years = evidence.bars / evidence.periods * factor**2
    length = f"more than {MANY_YEARS:g} years" if years > MANY_YEARS else f"about {_years(years)}"
    return [f"If what was observed is real, {length} of test data would show it."]


def _lead(edge: Edge) -> str:
    return f"{edge.difference.estimate:+.2f} [{edge.difference.low:+.2f}, {edge.difference.high:+.2f}]"


def _years(years: float) -> str:
    return f"{years:.1f} years" if years >= 1.0 else f"{years * 12.0:.1f} months"


def _and(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
