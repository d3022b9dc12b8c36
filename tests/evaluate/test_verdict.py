"""The verdict: each outcome from evidence made by hand, and the rate of false claims and of skill found on known markets."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tailguard.evaluate import statistics
from tailguard.evaluate.statistics import AlphaBeta, Difference, Edge, Evidence, Interval, Timing, VerdictRules
from tailguard.market import simulate
from tailguard.market.baselines import strategy
from tailguard.market.synthetic import ar1_returns, random_walk

OUTCOMES = {"evidence of skill", "no evidence of skill", "worse than", "too little data to tell"}


def evidence(sharpe=1.5, years=10.0, alpha_t=3.0, deflated=0.99, **changes):
    """A good agent over ten years of daily bars; the error of a Sharpe ratio is 1 / sqrt(years)."""
    error = 1.0 / math.sqrt(years)
    base = Evidence(
        bars=round(252 * years),
        periods=252.0,
        sharpe=Interval(sharpe, sharpe - 1.96 * error, sharpe + 1.96 * error, 0.95),
        error=error,
        deflated=deflated,
        trials=1,
        chance=0.0,
        market="hold",
        alpha=AlphaBeta(0.1, 0.2, alpha_t, 5.0, float(2 * stats.norm.sf(abs(alpha_t))), 0.1, 9),
        edges=(edge("hold", 0.5, error), edge("shuffled", 1.2, error)),
    )
    return replace(base, **changes)


def edge(name, lead, error, hurdle=False):
    p_value = float(stats.norm.sf(lead / error))
    interval = (lead, lead - 1.96 * error, lead + 1.96 * error, 0.95)
    return Edge(name, Difference(*interval, error, p_value, 1.0 - p_value), p_value, hurdle)


def test_everything_passed_is_skill():
    verdict = statistics.decide(evidence())
    assert verdict.outcome == verdict.headline == "evidence of skill"
    assert (verdict.worse_than, verdict.years_needed) == ((), None)
    text = " ".join(verdict.reasons)
    luck = "more than luck can explain (deflated Sharpe ratio 0.990; above 0.95 passes)"
    assert f"Sharpe 1.50 per year [0.88, 2.12]: {luck}." in text
    assert "Significant positive alpha over hold: +10.00% per year (t = 3.00), beta 0.20." in text
    assert "The test has 2,520 bars (10.0 years)." in text
    assert "hold +0.50 [-0.12, +1.12], shuffled +1.20 [+0.58, +1.82]" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"deflated": 0.94}, "not more than luck can explain (deflated Sharpe ratio 0.940; above 0.95 passes)"),
        ({"alpha_t": 1.9}, "No significant positive alpha over hold"),
        ({"alpha_t": -3.0}, "No significant positive alpha over hold"),
        (
            {"edges": (edge("shuffled", 0.5, 0.3, hurdle=True),)},
            "Not shown to be better than shuffled: Sharpe ratio lead +0.50 [-0.09, +1.09]",
        ),
        (
            {"seed_edges": (2.0, -0.5, 0.4, 1.9, -1.0)},
            "The 5 training seeds do not agree on a lead: median lead +0.40 in Sharpe ratio",
        ),
        (
            {"seed_edges": (0.1, 0.4, 0.7, 0.7, 0.1)},  # the interquartile range is 0.6
            "The 5 training seeds do not agree on a lead: median lead +0.40 in Sharpe ratio",
        ),
        (
            {"seed_edges": (-0.2, -0.1, -0.15)},  # they agree on a loss
            "The 3 training seeds do not agree on a lead: median lead -0.15 in Sharpe ratio",
        ),
        ({"timing": Timing(0.5, 0.3, 0.0, 0.048)}, "The timing may be chance: Sharpe ratio lead +0.50 over the same positions"),
        ({"deflated": None}, "The account never moved: the agent did not trade."),
    ],
)
def test_one_gate_that_stays_shut_is_no_skill(changes, reason):
    verdict = statistics.decide(evidence(**changes))
    assert verdict.outcome == "no evidence of skill"
    assert reason in verdict.reasons[0]
    assert "would have detected a true Sharpe ratio lead" in " ".join(verdict.reasons)


def test_gates_that_open_are_named_too():
    found = evidence(edges=(edge("shuffled", 0.9, 0.3, hurdle=True),), seed_edges=(1.0, 1.1, 1.2))
    verdict = statistics.decide(found)
    assert verdict.outcome == "evidence of skill"
    assert "Better than shuffled: Sharpe ratio lead +0.90 [+0.31, +1.49], p = 0.001." in verdict.reasons
    assert (
        "The 3 training seeds agree on a lead: median lead +1.10 in Sharpe ratio, interquartile range +1.05 to +1.15."
        in verdict.reasons
    )


def test_timing_is_a_gate_that_opens_too():
    verdict = statistics.decide(evidence(timing=Timing(1.2, 0.3, 0.0, 0.002)))
    assert verdict.outcome == "evidence of skill"
    assert (
        "The timing is more than chance: Sharpe ratio lead +1.20 over the same positions in shuffled order, p = 0.002."
        in verdict.reasons
    )


def test_timing_counts_the_permutations_that_lead_as_much():
    """By hand: 99 permuted ratios around 0.5 and an agent that is above all but four of them."""
    returns = np.random.default_rng(0).normal(0.001, 0.01, 500)
    own = statistics.sharpe(returns, 252)
    permuted = np.concatenate([np.full(95, own - 1.0), np.full(4, own + 1.0)])
    found = statistics.gather_evidence(
        returns, {"hold": returns[::-1]}, 252, market="hold", permuted_sharpes=permuted, draws=10
    ).timing
    mean = own + (4 - 95) / 99
    assert found.lead == pytest.approx(own - mean)
    assert found.error == pytest.approx(permuted.std(ddof=1))
    assert (found.luck, found.p_value) == (0.0, pytest.approx(5 / 100))
    many = statistics.gather_evidence(
        returns, {"hold": returns[::-1]}, 252, market="hold", permuted_sharpes=permuted, draws=10, trials=1000
    ).timing
    assert many.luck == pytest.approx(statistics.expected_max_sharpe(1000, found.error))
    noise = permuted - permuted.mean()
    assert many.p_value == pytest.approx((1 + (noise >= found.lead - many.luck).sum()) / 100)
    assert many.p_value > found.p_value


def test_an_agent_that_never_moves_its_position_has_no_timing():
    returns = np.random.default_rng(0).normal(0.001, 0.01, 500)
    own = statistics.sharpe(returns, 252)
    found = statistics.gather_evidence(
        returns, {"hold": 0.5 * returns}, 252, market="hold", permuted_sharpes=np.full(9, own), draws=10
    ).timing
    assert (found.error, found.p_value) == (0.0, 1.0)


def test_a_better_baseline_outranks_skill():
    verdict = statistics.decide(evidence(better=("momentum", "hold", "mix")))
    assert (verdict.outcome, verdict.headline) == ("worse than", "worse than momentum, hold and mix")
    assert verdict.worse_than == ("momentum", "hold", "mix")
    assert "chance of error of at most 2.5%" in verdict.reasons[0]


def test_many_trials_raise_the_bar():
    """The best of 100 leads by 2.5 errors on average: t = 3 is then no more than 0.5 errors above luck."""
    luck = statistics.expected_max_sharpe(100, 1.0)
    assert 2.4 < luck < 2.6
    found = evidence(trials=100, chance=luck / math.sqrt(10.0))
    verdict = statistics.decide(found)
    assert verdict.outcome != "evidence of skill"
    assert "for 100 trials, the best of which reaches 0.80 by luck" in " ".join(verdict.reasons)
    assert statistics.decide(replace(found, alpha=replace(found.alpha, alpha_t=luck + 1.97))).outcome == "evidence of skill"
    assert statistics.decide(replace(found, alpha=replace(found.alpha, alpha_t=luck + 1.95))).outcome != "evidence of skill"


def test_too_little_data_says_how_much_is_needed():
    """A lead of 1 needs (1.960 + 0.842)^2 = 7.85 years to be found with 80 % at a two-sided 5 %."""
    verdict = statistics.decide(evidence(sharpe=1.0, years=2.0, alpha_t=1.4, deflated=0.92))
    assert verdict.outcome == "too little data to tell"
    assert verdict.years_needed == pytest.approx((stats.norm.isf(0.025) + stats.norm.ppf(0.8)) ** 2, rel=1e-3)
    assert verdict.headline == "too little data to tell: about 7.8 years of test data are needed"
    # P(Z > 1.96 - sqrt(2)) = 29 %.
    assert "It would have detected a true Sharpe ratio lead of 1 with a probability of 29%." in verdict.reasons[0]
    assert "about 7.8 years (1,978 bars) of test data are needed" in verdict.reasons[1]


def test_the_power_that_is_promised_is_the_power_that_the_gates_have():
    """After the years that the verdict asks for, the same lead is no longer called too little data."""
    short = statistics.decide(evidence(sharpe=0.5, years=4.0, alpha_t=1.0, deflated=0.8))
    assert short.outcome == "too little data to tell"
    after = evidence(sharpe=0.5, years=short.years_needed * 1.001, alpha_t=1.0, deflated=0.8)
    assert statistics.decide(after).outcome == "no evidence of skill"
    before = evidence(sharpe=0.5, years=short.years_needed * 0.97, alpha_t=1.0, deflated=0.8)
    assert statistics.decide(before).outcome == "too little data to tell"


def test_a_short_test_can_still_exclude_a_worthwhile_lead():
    verdict = statistics.decide(evidence(sharpe=-1.5, years=2.0, alpha_t=-2.0, deflated=0.02))
    assert verdict.outcome == "no evidence of skill"
    assert "enough to rule out a Sharpe ratio lead of 1" in " ".join(verdict.reasons)


def test_few_bars_are_never_enough():
    verdict = statistics.decide(evidence(years=99 / 252, better=("hold",)))
    assert verdict.outcome == "too little data to tell"
    assert "99 bars (4.7 months). No statistical test is reliable below 100 bars." in verdict.reasons[0]
    assert statistics.decide(evidence(years=100 / 252), VerdictRules(worthwhile=20.0)).outcome == "evidence of skill"


def test_what_the_observed_lead_would_need():
    """t = 1.5 after ten years reaches 1.96 after 10 (1.96 / 1.5)^2 = 17 years."""
    verdict = statistics.decide(evidence(alpha_t=1.5))
    assert "If the observed leads are real, about 17.1 years of test data would be needed to show it." in verdict.reasons
    assert any("more than 100 years" in reason for reason in statistics.decide(evidence(alpha_t=0.1)).reasons)
    assert not any("If the observed" in reason for reason in statistics.decide(evidence(alpha_t=-0.1)).reasons)


def test_cautions():
    verdict = statistics.decide(evidence(sharpe=3.5, pbo=0.6))
    assert any("more often a bug" in reason for reason in verdict.reasons)
    assert any("PBO 0.60, should be below 0.2" in reason for reason in verdict.reasons)
    assert not any("PBO" in reason or "bug" in reason for reason in statistics.decide(evidence(pbo=0.1)).reasons)


def test_rules_are_checked():
    for wrong in ({"size": 0.0}, {"size": 0.5}, {"worthwhile": 0.0}, {"power": 0.5}, {"fewest_bars": 0}, {"unknown": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            VerdictRules(**wrong)


def test_gathered_evidence_is_what_the_functions_say():
    rng = np.random.default_rng(0)
    market = rng.standard_normal(600) * 0.01 + 0.0003
    agent = 0.5 * market + rng.standard_normal(600) * 0.005 + 0.0005
    baselines = {"hold": market, "other": rng.standard_normal(600) * 0.02}
    found = statistics.gather_evidence(
        agent, baselines, 252, market="hold", hurdles=["other"], trials=7, trial_deviation=0.03, pbo=0.3, draws=800, seed=3
    )
    drawn = statistics.bootstrap(
        {"agent": agent, **baselines},
        252,
        draws=800,
        seed=3,
        block=statistics.return_block_length({"agent": agent, **baselines}),
    )
    assert (found.bars, found.periods, found.trials, found.pbo, found.market) == (600, 252, 7, 0.3, "hold")
    assert found.sharpe == drawn.interval("sharpe", "agent")
    assert found.deflated == statistics.deflated_sharpe(agent, 7, 0.03, statistics.variance_inflation(agent))
    assert found.chance == pytest.approx(statistics.expected_max_sharpe(7, 0.03) * math.sqrt(252))
    assert found.alpha == statistics.alpha_beta(agent, market, 252)
    assert [(e.baseline, e.hurdle) for e in found.edges] == [("hold", False), ("other", True)]
    for e in found.edges:
        assert e.difference == drawn.difference("sharpe", "agent", e.baseline)
        luck = statistics.expected_max_sharpe(7, e.difference.error)
        assert e.p_value == pytest.approx(stats.norm.sf((e.difference.estimate - luck) / e.difference.error), abs=0.05)
    once = statistics.gather_evidence(agent, baselines, 252, market="hold", draws=800, seed=3)
    for e in once.edges:
        assert e.p_value == drawn.difference("sharpe", "agent", e.baseline).p_higher


def test_a_better_baseline_is_found_and_a_copy_is_not():
    rng = np.random.default_rng(1)
    agent = rng.standard_normal(1500) * 0.01
    rich = agent + np.abs(rng.standard_normal(1500)) * 0.002
    verdict = statistics.judge(agent, {"copy": agent, "half": 0.5 * agent, "rich": rich}, 252, market="copy", draws=300)
    assert (verdict.outcome, verdict.headline, verdict.worse_than) == ("worse than", "worse than rich", ("rich",))


def test_an_agent_that_does_nothing_has_no_skill():
    market = np.random.default_rng(2).standard_normal(2500) * 0.01
    verdict = statistics.judge(np.zeros(2500), {"hold": market}, 252, market="hold", draws=200)
    assert verdict.outcome == "no evidence of skill"
    assert verdict.reasons[0] == "The account never moved: the agent did not trade."


@pytest.mark.parametrize("exposure", [1.0, 0.3])
def test_a_constant_mix_in_a_bull_market_has_no_skill(exposure):
    market = np.random.default_rng(3).standard_normal(2520) * 0.01 + 0.001  # Sharpe 1.6
    verdict = statistics.judge(exposure * market, {"hold": market}, 252, market="hold", draws=200)
    assert verdict.outcome == "no evidence of skill"
    assert "No significant positive alpha" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"market": "cash"}, "market is 'cash'"),
        ({"hurdles": ["cash"]}, r"hurdles is \['cash'\]"),
        ({"baselines": {}}, "baselines is {}"),
        ({"baselines": {"hold": np.zeros(9), "agent": np.zeros(9)}}, "a baseline's name is 'agent'"),
        ({"baselines": {"hold": np.zeros(9)}}, "the deviation of benchmark"),
        ({"agent": [0.0, math.nan] * 10}, r"agent\[1\] is nan"),
        ({"agent": np.zeros(8)}, "the lengths of returns"),
        ({"trials": 0}, "trials is 0"),
    ],
)
def test_what_cannot_be_judged_is_refused(changes, message):
    usual = {"agent": np.arange(9) * 0.01, "baselines": {"hold": np.arange(9) * 0.01}, "periods": 252, "market": "hold"}
    with pytest.raises(ValueError, match=message):
        statistics.judge(**(usual | changes))


def judged(bars, weights, seed):
    """Weights through the accounting, against baselines under the same accounting."""
    target = np.asarray(weights)
    agent = statistics.returns_of(simulate(bars, target, fee=0.0).equity)
    order = np.random.default_rng(seed).permutation(len(bars) // 20)
    blocks = np.concatenate([np.arange(20 * k, 20 * k + 20) for k in order])
    shuffled = np.concatenate([target[blocks], target[len(blocks) :]])
    baselines = {
        "hold": strategy("buy_and_hold")(bars),
        "mix": np.full(len(bars), target.mean()),
        "shuffled": shuffled,
        "trend": strategy("moving_average")(bars),
    }
    others = {name: statistics.returns_of(simulate(bars, wanted, fee=0.0).equity) for name, wanted in baselines.items()}
    return statistics.judge(agent, others, 252, market="hold", draws=300, seed=seed).outcome


def momentum(bars):
    """Long after a rise, short after a fall."""
    return np.sign(np.diff(bars["close"].to_numpy(), prepend=bars["close"].iloc[0]))


def coin(bars, seed):
    return strategy("random_positions", turnover=0.1, seed=seed)(bars)


def test_random_walks_show_skill_in_at_most_five_per_cent():
    """200 driftless walks through accounting, baselines and verdict; the policy tosses coins or follows the last bar."""
    outcomes = Counter()
    for seed in range(200):
        bars = random_walk(1000, seed=seed)
        outcomes[judged(bars, coin(bars, seed) if seed % 2 else momentum(bars), seed)] += 1
    assert set(outcomes) <= OUTCOMES
    assert outcomes["evidence of skill"] <= 10
    assert outcomes["worse than"] <= 12  # expected are 5 or fewer; three standard errors more


def test_power_on_a_market_with_an_edge_rises_with_the_data():
    """AR(1) with rho = 0.1: momentum earns rho sqrt(2 / pi) = 0.08 deviations a bar before the fill costs it a night."""
    found = []
    for n in (500, 2500):
        runs = [
            judged(bars, momentum(bars), n)
            for bars in (ar1_returns(n, rho=0.1, overnight_share=0.0, seed=s) for s in range(30))
        ]
        found.append(runs.count("evidence of skill") / len(runs))
    assert found[0] < 0.6
    assert found[1] > 0.8


def test_resamples_of_more_accounts_give_the_same_evidence_as_new_ones():
    generator = np.random.default_rng(3)
    accounts = {name: generator.normal(0.0005, 0.01, 400) for name in ("agent", "seed", "hold", "cash")}
    agent, baselines = accounts["agent"], {name: accounts[name] for name in ("cash", "hold")}
    resamples = statistics.bootstrap(accounts, 252, draws=200, block=7.0, seed=5)
    drawn = statistics.gather_evidence(agent, baselines, 252, market="hold", draws=200, block=7.0, seed=5)
    assert statistics.gather_evidence(agent, baselines, 252, market="hold", resamples=resamples) == drawn
    assert resamples.only(["hold", "agent"]).difference("cagr", "hold", "agent") == resamples.difference(
        "cagr", "hold", "agent"
    )


def test_nearly_the_same_account_is_not_called_worse():
    """A lead of 0.01 that is there in every resample is certain, and nothing."""
    returns = np.random.default_rng(3).normal(0.0005, 0.01, 2000)
    almost = {"hold": returns + 0.00001 * np.sqrt(252) / 252, "much": returns + 0.0005}
    found = statistics.gather_evidence(returns, almost, 252, market="hold", draws=200)
    leads = {edge.baseline: edge.difference for edge in found.edges}
    assert -0.05 < leads["hold"].estimate < leads["hold"].high < 0.0
    assert found.better == ("much",)
    assert statistics.gather_evidence(returns, almost, 252, market="hold", rivals=["hold"], draws=200).better == ()


def test_without_a_market_the_sharpe_ratio_has_to_exceed_that_of_a_good_one():
    """Ten years with a Sharpe ratio of 1: far above 0, and 1.6 errors above 0.5, of which 1.645 are needed."""
    noise = np.random.default_rng(0).normal(0.0, 0.01, 2520)
    assert statistics.variance_inflation(noise) == 1.0  # independent bars, by luck a little mean-reverting
    returns = noise - noise.mean() + noise.std(ddof=1) / np.sqrt(252)
    found = statistics.gather_evidence(returns, {"cash": np.zeros(2520)}, 252, market=None, draws=100)
    assert found.beyond_market == pytest.approx(statistics.probabilistic_sharpe(returns, 0.5 / np.sqrt(252)))
    assert 0.93 < found.beyond_market < 0.95 < found.deflated
    verdict = statistics.decide(found)
    assert verdict.outcome == "no evidence of skill"
    assert "There is no benchmark to measure alpha over." in verdict.reasons[0]
    strict = statistics.judge(
        returns, {"cash": np.zeros(2520)}, 252, market=None, draws=100, rules=VerdictRules(market_sharpe=0.4)
    )
    assert strict.outcome == "evidence of skill"
    with pytest.raises(ValueError, match="rivals is"):
        statistics.gather_evidence(returns, {"cash": np.zeros(2520)}, 252, market=None, rivals=["x"])
