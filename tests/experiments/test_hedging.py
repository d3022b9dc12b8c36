"""A hedger learns, meets the paths of its rivals, and knows nothing of the bars that it is tested on."""

import json

import numpy as np
import pytest

from tailguard.cli import main
from tailguard.envs import BandHedging, OptionHedging
from tailguard.envs.desk_config import HedgeSettings
from tailguard.envs.hedging_rivals import delta_hedge, play_hedge
from tailguard.experiments.hedging import hedge_bars, play_hedger, train_hedger

QUICK = {"steps": 3_000, "paths": 1_000, "dates": 5}


def test_a_short_training_beats_the_delta_where_costs_are_high():
    settings = {"cost": 0.01, "dates": 10}
    model = train_hedger(BandHedging(256, **settings), steps=120_000, seed=3)
    agent = play_hedger(model, BandHedging(10_000, **settings), seed=5)
    delta = play_hedge(OptionHedging(10_000, **settings), delta_hedge, seed=5)
    assert agent.cvar() < 0.95 * delta.cvar()
    assert agent.costs.mean() < 0.8 * delta.costs.mean()
    assert np.corrcoef(agent.pnl + agent.costs, delta.pnl + delta.costs)[0, 1] > 0.5  # on the same paths


def test_an_alpha_conditioned_agent_needs_its_alpha():
    env = BandHedging(64, dates=5, cost=0.005)
    model = train_hedger(env, alpha=(0.05, 0.5), steps=1_000)
    assert play_hedger(model, BandHedging(100, dates=5, cost=0.005), seed=0, alpha=0.1).pnl.shape == (100,)
    with pytest.raises(ValueError, match="alpha"):
        play_hedger(model, env, seed=0)


def test_the_agent_does_not_depend_on_the_test_bars(nasdaq):
    settings = HedgeSettings(**QUICK)
    bars = nasdaq.iloc[-1000:]
    other = bars.copy()
    other.iloc[750:] *= np.linspace(1.0, 2.0, 250)[:, None]
    one, two = (hedge_bars(table, settings) for table in (bars, other))
    for name, weights in one[0].policy.state_dict().items():
        np.testing.assert_array_equal(weights.numpy(), two[0].policy.state_dict()[name].numpy())
    assert one[1].premium == two[1].premium
    assert not np.array_equal(one[1].results["agent"].pnl, two[1].results["agent"].pnl)


def test_paths_of_a_calibrated_heston(nasdaq):
    _, comparison = hedge_bars(nasdaq, HedgeSettings(**QUICK, process="heston"))
    assert "Heston on training bars" in comparison.facts["paths"]
    assert comparison.results["no hedge"].cvar() > comparison.results["Black-Scholes delta"].cvar()


def test_the_command_writes_agent_figures_and_report(tmp_path, capsys):
    options = ["--steps", "3000", "--paths", "1000", "--expiry", "5", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main(["hedge", "--data", "nasdaq-1d", *options])
    assert ended.value.code == 0
    figures = json.loads((tmp_path / "out" / "hedging.json").read_text())
    assert list(figures["statistics"]) == ["agent", "Black-Scholes delta", "Leland", "Whalley-Wilmott band", "no hedge"]
    assert figures["headline"] in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Distribution of the hedge error" in page
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"agent.safetensors", "hedging.json", "report.html"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--alpha", "2"], "alpha"),
        (["--kind", "digital"], "kind"),
        (["--data", "ibm-1d+nasdaq-1d"], "one underlying"),
        (["--strike", "1.5", "--expiry", "1"], "premium"),
        (["--set", "hedging.knock_out=1.0"], "hedging.knock_out"),
        (["--set", "hedging.legs=[{kind: swap}]"], "hedging.legs"),
    ],
)
def test_mistakes_end_with_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["hedge", *(["--data", "nasdaq-1d"] if "--data" not in options else []), *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


BOOK = """
data: [nasdaq-1d]
hedging:
  kind: put
  legs: [{kind: put, strike: 0.95, quantity: 1}]
  fixed_cost: 0.0002
  rate: 0.03
  dates: 5
  steps: 3000
  paths: 1000
"""


def test_a_book_may_stand_in_the_configuration_and_options_come_before_it(tmp_path):
    (tmp_path / "book.yaml").write_text(BOOK)
    arguments = ["hedge", str(tmp_path / "book.yaml"), "--cost", "0.004", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    figures = json.loads((tmp_path / "out" / "hedging.json").read_text())
    assert figures["title"].startswith("A sold put at 100% of the spot and a bought put at 95% of the spot, 5 bars")
    assert figures["facts"]["cost"] == "0.400% of the value traded, and 0.020% of the spot per trade"
    assert figures["premium"] > float(figures["facts"]["premium"].split()[0])  # of both options, not the difference


def test_options_that_pay_for_each_other_have_a_unit(nasdaq):
    """A bought and a sold option of the same kind and strike: nothing is received, and nothing is left to hedge."""
    legs = ({"kind": "call", "quantity": 1.0},)
    _, comparison = hedge_bars(nasdaq, HedgeSettings(**QUICK, legs=legs))
    assert comparison.premium > 1.0
    np.testing.assert_allclose(comparison.results["Black-Scholes delta"].pnl, 0.0, atol=1e-9)


def test_barriers_are_hedged(nasdaq):
    _, comparison = hedge_bars(nasdaq, HedgeSettings(**QUICK, kind="put", knock_out=0.97))
    assert "void at 97%" in comparison.title
    assert comparison.results["no hedge"].cvar() > 0.0
