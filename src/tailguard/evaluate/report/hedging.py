"""The report about hedges of one option: how their errors are distributed, and what they cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailguard.envs.hedging_rivals import HedgingResult, expected_shortfall
from tailguard.envs.hedging_state import Floats
from tailguard.evaluate.record import Estimate
from tailguard.evaluate.report.charts import Axis, Chart, Color, Mark, Panel, RowPanel, estimate_row
from tailguard.evaluate.report.formatting import difference, say, with_interval
from tailguard.evaluate.report.page import Html, ReportSection, page, table, tag
from tailguard.validation import require

COLORS: tuple[Color, ...] = ("agent", "market", "third", "fourth", "other")
RESAMPLES = 300
BINS = 80
TAIL_SHOWN = 0.001  # share of paths beyond either end of the drawing


@dataclass(frozen=True, eq=False)
class HedgeComparison:
    """Hedges of the same option on the same paths.

    :param title: the option and the data, in words.
    :param results: by name of the hedge; the agent comes first.
    :param alpha: level of the CVaR.
    :param premium: received for the option; the unit of the relative figures.
    :param facts: how the comparison was made, by name.
    """

    title: str
    results: Mapping[str, HedgingResult]
    alpha: float
    premium: float
    facts: Mapping[str, str]

    def __post_init__(self) -> None:
        """Check the unit of the relative figures."""
        require(0.0 < self.premium < np.inf, "premium", self.premium, "positive and finite: figures are in parts of it")

    def statistics(self) -> dict[str, dict[str, Estimate]]:
        """Return mean, standard deviation, CVaR, costs and turnover by hedge, with intervals over the paths."""
        return {name: _statistics(result, self.alpha) for name, result in self.results.items()}

    def savings(self) -> dict[str, Estimate]:
        """Return how much smaller the agent's CVaR is than that of each rival, in parts of the premium, with intervals.

        The paths are the same for both, so the interval is that of the difference.
        """
        agent, *rivals = self.results
        return {name: self._saving(self.results[agent].pnl, self.results[name].pnl) for name in rivals}

    def headline(self) -> str:
        """Return the finding: whether the agent has a smaller tail than its best rival, beyond the interval."""
        savings = self.savings()
        best = min(savings, key=lambda name: savings[name].value)
        found = savings[best]
        assert found.low is not None, "an interval comes with every saving"
        assert found.high is not None, "an interval comes with every saving"
        change = "less than" if found.low > 0.0 else "more than" if found.high < 0.0 else "about as much as"
        worst = f"In the worst {100.0 * self.alpha:g}% of the paths the agent loses {change} its best rival ({best})"
        return f"{worst}: {difference(found, 'percent')} of the premium."

    def to_json(self) -> dict[str, Any]:
        """Return everything but the paths, as plain values."""
        statistics = {
            name: {key: estimate._asdict() for key, estimate in figures.items()} for name, figures in self.statistics().items()
        }
        savings = {name: estimate._asdict() for name, estimate in self.savings().items()}
        head = {"title": self.title, "headline": self.headline(), "alpha": self.alpha, "premium": self.premium}
        return head | {"facts": dict(self.facts), "statistics": statistics, "saved_share_of_premium": savings}

    def html(self) -> str:
        """Return the report as a page."""
        top = tag(
            "header",
            tag("p", "Tailguard", tag("span", "hedging"), class_="masthead"),
            tag("h1", self.title),
            tag("p", self.headline(), class_="standfirst"),
            class_="top",
            id="verdict",
        )
        return page(self.title, top, [self._distribution(), self._figures(), self._facts()], {})

    def _saving(self, agent: Floats, rival: Floats) -> Estimate:
        def saving(paths: Any) -> float:
            return (expected_shortfall(rival[paths], self.alpha) - expected_shortfall(agent[paths], self.alpha)) / self.premium

        return _resampled(saving, len(agent))

    def _distribution(self) -> ReportSection:
        pnls = [result.pnl / self.premium for result in self.results.values()]
        low = min(float(np.quantile(pnl, TAIL_SHOWN)) for pnl in pnls)
        high = max(float(np.quantile(pnl, 1.0 - TAIL_SHOWN)) for pnl in pnls)
        edges = np.linspace(low, high, BINS + 1)
        middles = 0.5 * (edges[1:] + edges[:-1])
        marks = [
            Mark("line", middles, {"y": np.histogram(pnl, edges)[0] / len(pnl)}, name=name, color=COLORS[i % len(COLORS)])
            for i, (name, pnl) in enumerate(zip(self.results, pnls, strict=True))
        ]
        panel = Panel(
            "share of the paths",
            marks,
            Axis(format="percent", label="final profit and loss, in parts of the premium"),
            Axis(format="percent", tight=True),
        )
        shares = {name: result.cvar(self.alpha) / self.premium for name, result in self.results.items()}
        worst = ", ".join(f"{name} {say(share, 'percent')}" for name, share in shares.items())
        summary = f"Average loss in the worst {100.0 * self.alpha:g}% of the paths, in parts of the premium: {worst}."
        note = "The same paths for every hedge. The left end is what the CVaR is about."
        chart = Chart("errors", "Distribution of the hedge error", summary, [panel], note=note, choose=True)
        return ReportSection("errors", "Hedge error", "How the final profit and loss is distributed", summary, [chart])

    def _figures(self) -> ReportSection:
        statistics = self.statistics()
        keys = list(next(iter(statistics.values())))
        rows = [[name, *(with_interval(figures[key]) for key in keys)] for name, figures in statistics.items()]
        savings = [
            estimate_row(f"against {name}", estimate, "percent", "agent", "saving") for name, estimate in self.savings().items()
        ]
        chart = Chart(
            "savings",
            "How much less the agent loses in the worst paths",
            self.headline(),
            [RowPanel("CVaR of the rival less that of the agent, in parts of the premium", savings, format="percent")],
        )
        figures = table(["hedge", *keys], rows, "In money, for a spot of 100; 95 % intervals over the paths.")
        return ReportSection("figures", "Figures", "Tail, costs and turnover", "", [figures, chart])

    def _facts(self) -> ReportSection:
        rows = [[name, value] for name, value in self.facts.items()]
        facts: Html = table(["", ""], rows, "How the comparison was made.", numbers_from=2)
        lead = "Intervals are over resampled paths. The bars behind the paths are one history: another may differ by more."
        return ReportSection("facts", "Method", "How this was made", lead, [facts])


def _statistics(result: HedgingResult, alpha: float) -> dict[str, Estimate]:
    root = np.sqrt(len(result.pnl))

    def mean(values: Floats) -> Estimate:
        error = 1.96 * float(values.std()) / root
        return Estimate(float(values.mean()), float(values.mean()) - error, float(values.mean()) + error)

    spread = float(result.pnl.std())
    return {
        "mean": mean(result.pnl),
        "standard deviation": Estimate(spread),
        f"CVaR {alpha:g}": _resampled(lambda paths: expected_shortfall(result.pnl[paths], alpha), len(result.pnl)),
        "costs": mean(result.costs),
        "units traded": mean(result.turnover),
    }


def _resampled(statistic: Callable[[Any], float], n: int) -> Estimate:
    """Return a statistic of paths with its 95 % interval by the bootstrap."""
    draws = np.random.default_rng(0)
    low, high = np.quantile([statistic(draws.integers(n, size=n)) for _ in range(RESAMPLES)], (0.025, 0.975))
    return Estimate(float(statistic(slice(None))), float(low), float(high))
