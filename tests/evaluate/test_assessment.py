"""From decisions to a record: every figure against the function that it comes from, and verdicts on markets that are known."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from test_record import assert_same

from tailguard.evaluate import statistics
from tailguard.evaluate.assessment import Context, Effort, assess
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.folds import Fold
from tailguard.evaluate.record import Provenance, load_record, save_record
from tailguard.experiments.evaluation import fold_table
from tailguard.market import TradingRules, ar1_returns, random_walk

QUICK = Effort(draws=300, permutations=99)
CONTEXT = Context(
    title="a test",
    source="synthetic",
    folds=fold_table([Fold(0, (0, 200), (301, 1800))], random_walk(1800, seed=0)),
    training=pd.DataFrame({"fold": [0], "seed": [0], "step": [1]}),
    provenance=Provenance("", "sha256:0", {}, (0, 1), 1, "2026-01-01"),
)


def momentum(bars, seed=0, noise=0.0):
    """Trade with the last move, which pays where returns are correlated; some decisions are tossed instead."""
    generator = np.random.default_rng(seed)
    side = np.sign(np.diff(bars["close"].to_numpy(), prepend=bars["close"].iloc[0]))
    return np.where(generator.random(len(bars)) < noise, generator.choice([-1.0, 1.0], len(bars)), side)[:, None]


def assessed(bars, decide, span=(300, 1800), fee=0.0, context=CONTEXT, seeds=3, effort=QUICK):
    window = BacktestWindow(bars, TradingRules(fee=fee), span)
    targets = {f"seed {i}": decide(bars, i)[span[0] : span[1] - 1] for i in range(seeds)}
    n = span[1] - span[0] - 1
    return assess(window, targets, [n // 2, n - n // 2], context, effort=effort)


@pytest.fixture(scope="module")
def skilled():
    bars = ar1_returns(1800, rho=0.25, overnight_share=0.0, seed=1)
    return assessed(bars, lambda table, i: momentum(table, i, noise=0.1))


def test_skill_is_seen_where_it_is(skilled):
    assert skilled.verdict.outcome == "evidence of skill"
    assert any(reason.startswith("The timing is more than chance") for reason in skilled.verdict.reasons)
    assert skilled.sanity.permutation_p == pytest.approx(1.0 / 100.0)
    assert skilled.sanity.delay.sharpe < 0.5 * skilled.sanity.delay.sharpe_before


def test_skill_is_hardly_ever_seen_where_it_is_not():
    """At most one claim in forty is promised: more than two in ten would happen by chance once in 500 times."""
    cheap = Effort(draws=100, permutations=99)
    outcomes = [
        assessed(random_walk(800, seed=seed), momentum, span=(300, 800), seeds=2, effort=cheap).verdict.outcome
        for seed in range(10)
    ]
    assert outcomes.count("evidence of skill") <= 2
    assert set(outcomes) - {"evidence of skill"}


def test_buy_and_hold_in_disguise_has_no_skill():
    """A market that rises a lot and an agent that is always in it: a fine Sharpe ratio, and nothing of it is its own."""
    bars = random_walk(1800, drift=0.5 / 365.0, seed=4)
    record = assessed(bars, lambda table, i: np.full((len(table), 1), 0.9))
    assert record.statistics["agent"]["sharpe"].low > 0.5
    assert record.verdict.outcome == "no evidence of skill"
    assert "The timing may be chance" in " ".join(record.verdict.reasons)
    assert record.sanity.permutation_p == 1.0


def test_the_agent_is_the_mean_of_its_seeds():
    bars = random_walk(900, seed=0)
    sides = {"seed 0": 1.0, "seed 1": -0.5}
    window = BacktestWindow(bars, TradingRules(fee=0.001), (300, 900))
    record = assess(window, {name: np.full((599, 1), side) for name, side in sides.items()}, [599], CONTEXT, effort=QUICK)
    np.testing.assert_array_equal(record.agent.returns, window.trade("x", np.full((599, 1), 0.25)).returns)
    assert [history.name for history in record.seeds] == list(sides)
    np.testing.assert_array_equal(record.seeds[1].returns, window.trade("x", np.full((599, 1), -0.5)).returns)


def test_every_figure_comes_from_its_function(skilled):
    periods, agent, market = skilled.periods_per_year, skilled.agent, skilled.history("buy_and_hold")
    table = skilled.statistics["agent"]
    relation = statistics.alpha_beta(agent.returns, market.returns, periods)
    inflation = statistics.variance_inflation(agent.returns)
    expected = {
        "sharpe": statistics.sharpe(agent.returns, periods),
        "sortino": statistics.sortino(agent.returns, periods),
        "calmar": statistics.calmar(agent.equity, periods),
        "max_drawdown": statistics.max_drawdown(agent.equity),
        "cvar_1": statistics.cvar(agent.returns, 0.01),
        "total_return": agent.equity[-1] - 1.0,
        "lo_sharpe": statistics.lo_sharpe(agent.returns, periods),
        "cdar_5": statistics.cdar(agent.equity, 0.05),
        "turnover": agent.turnover.mean() * periods,
        "exposure": np.abs(agent.weights).mean(),
        "net_exposure": agent.weights.mean(),
        "hit_rate": (agent.returns > 0.0).mean(),
        "costs": 0.0,
        "cost_share": 0.0,
        "alpha": relation.alpha,
        "alpha_t": relation.alpha_t,
        "beta": relation.beta,
        "probabilistic_sharpe": statistics.probabilistic_sharpe(agent.returns, inflation=inflation),
        "deflated_sharpe": statistics.deflated_sharpe(agent.returns, 1, inflation=inflation),
        "minimum_track_record": statistics.minimum_track_record(agent.returns, inflation=inflation),
    }
    for name, value in expected.items():
        assert table[name].value == pytest.approx(value, rel=1e-9), name
    assert set(expected) | set(statistics.METRICS) == set(table)
    assert table["sharpe"].low < table["sharpe"].value < table["sharpe"].high
    lead = skilled.statistics["momentum"]["agent_lead"]
    assert lead.value == pytest.approx(table["sharpe"].value - skilled.statistics["momentum"]["sharpe"].value)
    assert lead.low < lead.value < lead.high
    assert set(skilled.statistics) == {history.name for history in skilled.histories}


def test_the_verdict_says_what_the_table_says(skilled):
    sharpe, lead = skilled.statistics["agent"]["sharpe"], skilled.statistics["momentum"]["agent_lead"]
    text = " ".join(skilled.verdict.reasons)
    assert f"Sharpe {sharpe.value:.2f} per year [{sharpe.low:.2f}, {sharpe.high:.2f}]" in text
    assert f"momentum {lead.value:+.2f} [{lead.low:+.2f}, {lead.high:+.2f}]" in text


def test_trials_raise_the_bar():
    bars = ar1_returns(1800, rho=0.12, overnight_share=0.0, seed=3)
    once = assessed(bars, momentum)
    many = assessed(bars, momentum, context=replace(CONTEXT, provenance=replace(CONTEXT.provenance, trials=10_000)))
    assert many.statistics["agent"]["deflated_sharpe"].value < once.statistics["agent"]["deflated_sharpe"].value
    assert "10,000 trials" in " ".join(many.verdict.reasons)


def test_trials_that_were_chosen_among_are_asked_for_overfitting():
    generator = np.random.default_rng(0)
    context = replace(CONTEXT, trial_returns=generator.normal(0.0, 0.01, (1499, 20)))
    record = assessed(random_walk(1800, seed=0), momentum, context=context)
    assert any("PBO" in reason for reason in record.verdict.reasons)


def test_an_agent_that_never_trades_is_judged_too():
    record = assessed(random_walk(1800, seed=0), lambda table, i: np.zeros((len(table), 1)))
    assert "The account never moved: the agent did not trade." in record.verdict.reasons
    assert np.isnan(record.statistics["agent"]["deflated_sharpe"].value)
    assert record.sanity.break_even_cost is None


def test_a_ruined_agent_is_judged_too():
    """Fees of 2 % on full turns every other bar leave nothing within a few hundred bars."""
    record = assessed(random_walk(1800, seed=0), momentum, fee=0.02)
    assert record.agent.equity[-1] < 0.06
    assert record.verdict.outcome == "worse than"
    assert "cash" in record.verdict.worse_than


def test_the_record_survives_the_disk(skilled, tmp_path):
    save_record(skilled, tmp_path)
    back = load_record(tmp_path)
    assert_same(skilled.agent, back.agent)
    assert_same(skilled.baselines, back.baselines)
    assert_same(skilled.verdict, back.verdict)
    assert_same(skilled.statistics, back.statistics)
    assert_same(skilled.sanity, back.sanity)
    assert_same(skilled.prices, back.prices)


def test_no_seed_is_refused():
    window = BacktestWindow(random_walk(900, seed=0), TradingRules(), (300, 900))
    with pytest.raises(ValueError, match="at least one seed"):
        assess(window, {}, [599], CONTEXT)
