"""The positive control: what is planted is judged, and the summary names the weakest edge of each kind."""

import json

import pytest

from tailguard.config import load_config
from tailguard.evaluate.assessment import Effort
from tailguard.evaluate.record import Estimate
from tailguard.experiments.control import Control, ControlRow, run_control
from tailguard.market import load_dataset

SMALL = [
    "training.steps=512", "training.n_envs=4", "training.n_steps=32", "training.policy=MlpPolicy", "trading.fee=0.0002",
    "walkforward.folds=1", "walkforward.seeds=1", "walkforward.jobs=1",
]  # fmt: skip


def row(planted, oracle, agent, low, outcome="no evidence of skill", oracle_outcome="evidence of skill"):
    return ControlRow(planted, oracle, oracle_outcome, Estimate(agent, low, agent + 1.0), outcome)


def test_the_summary_names_the_weakest_edges():
    rows = (
        row(0.0, 0.1, 0.5, 0.1),
        row(1.0, 1.2, 0.3, -0.5),
        row(2.0, 2.1, 1.2, 0.2),
        row(3.0, 3.1, 2.2, 1.1, outcome="evidence of skill"),
    )
    control = Control(rows)
    assert (control.smallest_visible, control.smallest_learnt, control.smallest_found) == (1.0, 2.0, 3.0)
    assert "The verdict finds the agent from 3 on." in control.sentences()
    assert len(control.sentences()) == 3
    nothing = Control(rows[:1])
    assert (nothing.smallest_visible, nothing.smallest_learnt, nothing.smallest_found) == (None, None, None)
    assert "The agent learns an edge from none of those planted." in nothing.sentences()
    lucky = Control((row(1.0, 1.2, 1.0, 0.1, outcome="evidence of skill"), row(2.0, 2.0, 0.1, -0.5), row(3.0, 3.0, 0.2, -0.5)))
    assert (lucky.smallest_visible, lucky.smallest_learnt, lucky.smallest_found) == (1.0, None, None)
    assert "The verdict finds the agent from none of those planted." in lucky.sentences()
    false = Control((row(0.0, 0.1, 2.0, 1.0, outcome="evidence of skill"),))
    assert "by chance, or by a mistake" in false.sentences()[-1]


def test_half_of_the_oracle_and_more_than_luck_is_learnt():
    assert row(2.0, 2.0, 1.0, 0.1).learnt
    assert not row(2.0, 2.0, 0.9, 0.1).learnt
    assert not row(2.0, 2.0, 1.5, -0.1).learnt


@pytest.mark.timeout(600)
def test_every_edge_is_planted_trained_and_judged(tmp_path):
    bars = load_dataset("nasdaq-1d").iloc[-1400:]
    effort = Effort(draws=100, permutations=79)
    said = []
    config = load_config(None, SMALL)
    control = run_control(
        bars, config, (4.0, 0.0), tmp_path, source="nasdaq", effort=effort, report=lambda *line: said.append(line)
    )
    shares = [step / total for step, total, _ in said]
    assert shares == sorted(shares)  # one measure for all edges together
    assert max(shares) <= 1.0
    assert {text.partition(",")[0] for _, _, text in said} == {"Sharpe ratio 0", "Sharpe ratio 4"}
    none, strong = control.rows
    assert (none.planted, strong.planted) == (0.0, 4.0)
    assert none.oracle_sharpe == 0.0
    assert strong.oracle_sharpe == pytest.approx(4.0, abs=2.0)
    assert strong.oracle_outcome == "evidence of skill"
    assert none.outcome != "evidence of skill"
    saved = json.loads((tmp_path / "control.json").read_text())
    assert [entry["planted"] for entry in saved] == [0.0, 4.0]
    assert saved[1]["oracle_sharpe"] == strong.oracle_sharpe
    assert (tmp_path / "edge-4" / "evaluation" / "metrics.json").exists()
    many = load_config(None, [*SMALL, "walkforward.trials=100000"])
    (chosen,) = run_control(bars, many, (4.0,), tmp_path, source="nasdaq", effort=effort).rows  # nothing is trained again
    assert chosen.oracle_sharpe == strong.oracle_sharpe
    assert chosen.oracle_outcome != "evidence of skill"
    with pytest.raises(ValueError, match="at least one Sharpe ratio to plant"):
        run_control(bars, load_config(None, SMALL), (), tmp_path / "x", source="nasdaq")
