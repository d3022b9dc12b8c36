"""The report about hedges: its finding, its numbers, and its page."""

import numpy as np
import pytest
from page_reader import Page

from tailguard.envs.hedging_rivals import HedgingResult
from tailguard.evaluate.report.hedging import HedgeComparison

HOSTILE = "<script>alert(1)</script>"


def comparison(agent: np.ndarray, rival: np.ndarray) -> HedgeComparison:
    results = {name: HedgingResult(pnl, abs(pnl), abs(pnl)) for name, pnl in (("agent", agent), (f"rival {HOSTILE}", rival))}
    return HedgeComparison("A sold call", results, 0.05, 2.0, {"data": f"made up {HOSTILE}"})


@pytest.fixture(scope="module")
def pnl():
    return np.random.default_rng(0).normal(0.0, 1.0, 4000)


def test_finds_a_difference_beyond_its_interval(pnl):
    better = comparison(pnl, 2.0 * pnl)
    (saving,) = better.savings().values()
    # CVaR .05 of a standard normal is 2.063; the rival's is twice that, and the premium is 2.
    assert saving.value == pytest.approx(1.03, abs=0.06)
    assert saving.low < saving.value < saving.high
    assert "less than" in better.headline()
    assert "more than" in comparison(2.0 * pnl, pnl).headline()
    assert "about as much" in comparison(pnl, np.random.default_rng(1).permutation(pnl)).headline()


def test_a_premium_of_nothing_is_refused(pnl):
    with pytest.raises(ValueError, match="premium"):
        HedgeComparison("A sold call", {"agent": HedgingResult(pnl, pnl, pnl)}, 0.05, 0.0, {})


def test_the_page_is_whole_and_escapes_names(pnl):
    html = comparison(pnl, 2.0 * pnl).html()
    page = Page(html)
    assert page.mistakes == []
    assert set(page.data["figures"]) == {"errors", "savings"}
    assert sorted(known["data-figure"] for known in page.find("div", class_="chart")) == ["errors", "savings"]
    assert len(page.find("h1")) == 1
    assert "made up <script>" in page.text
    assert len(page.find("script")) == 2
    for mark in page.data["figures"]["errors"]["panels"][0]["marks"]:
        assert sum(mark["y"]) == pytest.approx(1.0, abs=0.01)
        assert len(mark["x"]) == len(mark["y"])
