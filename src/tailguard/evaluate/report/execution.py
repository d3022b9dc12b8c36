"""The report about ways to sell one order: how their costs are distributed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.evaluate.record import Estimate
from tailguard.evaluate.report.charts import Axis, Chart, Color, Mark, Panel, RowPanel, estimate_row
from tailguard.evaluate.report.formatting import difference, with_interval
from tailguard.evaluate.report.page import ReportSection, page, table, tag

Floats = NDArray[np.float64]

COLORS: tuple[Color, ...] = ("agent", "market", "third", "fourth", "other")
SMALLEST = 0.01  # bps: differences below it are not worth a word
BINS = 80
TAIL_SHOWN = 0.001  # share of the paths beyond either end of the drawing


@dataclass(frozen=True, eq=False)
class ExecutionComparison:
    """Ways to sell the same order on the same paths.

    :param title: the order and the data, in words.
    :param costs: ``[paths]`` in bps of the order, by name; the agent comes first.
    :param alpha: the share of worst paths that counts.
    :param facts: how the comparison was made, by name.
    """

    title: str
    costs: Mapping[str, Floats]
    alpha: float
    facts: Mapping[str, str]

    def statistics(self) -> dict[str, dict[str, Estimate]]:
        """Return mean, standard deviation and CVaR of the cost by name, in bps, with 95 % intervals over the paths."""
        return {
            name: {
                "mean": _mean(costs),
                "standard deviation": Estimate(float(costs.std())),
                f"CVaR {self.alpha:g}": _mean(tail_terms(costs, self.alpha)),
            }
            for name, costs in self.costs.items()
        }

    def savings(self) -> dict[str, Estimate]:
        """Return how much smaller the agent's CVaR is than that of each rival, in bps, with intervals of the difference."""
        (_, agent), *rivals = ((name, tail_terms(costs, self.alpha)) for name, costs in self.costs.items())
        return {name: _mean(terms - agent) for name, terms in rivals}

    def headline(self) -> str:
        """Return the finding: whether the agent has a smaller tail than its best rival, beyond the interval."""
        savings = self.savings()
        best = min(savings, key=lambda name: savings[name].value)
        found = savings[best]
        assert found.low is not None, "an interval comes with every saving"
        assert found.high is not None, "an interval comes with every saving"
        change = "less than" if found.low > SMALLEST else "more than" if found.high < -SMALLEST else "about as much as"
        worst = f"In the worst {100.0 * self.alpha:g}% of the paths the agent pays {change} its best rival ({best})"
        return f"{worst}: {difference(found)} bps."

    def to_json(self) -> dict[str, Any]:
        """Return everything but the paths, as plain values."""
        statistics = {
            name: {key: estimate._asdict() for key, estimate in figures.items()} for name, figures in self.statistics().items()
        }
        savings = {name: estimate._asdict() for name, estimate in self.savings().items()}
        head = {"title": self.title, "headline": self.headline(), "alpha": self.alpha}
        return head | {"facts": dict(self.facts), "statistics": statistics, "saved_bps": savings}

    def html(self) -> str:
        """Return the report as a page."""
        masthead = tag("p", "Tailguard", tag("span", "execution"), class_="masthead")
        standfirst = tag("p", self.headline(), class_="standfirst")
        top = tag("header", masthead, tag("h1", self.title), standfirst, class_="top", id="verdict")
        return page(self.title, top, [self._distribution(), self._figures(), self._facts()], {})

    def _distribution(self) -> ReportSection:
        low = min(float(np.quantile(costs, TAIL_SHOWN)) for costs in self.costs.values())
        high = max(float(np.quantile(costs, 1.0 - TAIL_SHOWN)) for costs in self.costs.values())
        edges = np.linspace(low, high, BINS + 1)
        marks = [
            Mark(
                "line",
                0.5 * (edges[1:] + edges[:-1]),
                {"y": np.histogram(costs, edges)[0] / len(costs)},
                name=name,
                color=COLORS[i % len(COLORS)],
            )
            for i, (name, costs) in enumerate(self.costs.items())
        ]
        panel = Panel("share of the paths", marks, Axis(label="cost of the order, bps"), Axis(format="percent", tight=True))
        note = "The same paths for everybody. The right end is what the CVaR is about."
        summary = self.headline()
        chart = Chart("costs", "Distribution of the cost", summary, [panel], note=note, choose=True)
        return ReportSection("costs", "Cost", "How the cost of the order is distributed", summary, [chart])

    def _figures(self) -> ReportSection:
        statistics = self.statistics()
        keys = list(next(iter(statistics.values())))
        rows = [[name, *(with_interval(figures[key]) for key in keys)] for name, figures in statistics.items()]
        savings = [
            estimate_row(f"against {name}", estimate, "number", "agent", "saving") for name, estimate in self.savings().items()
        ]
        panel = RowPanel("CVaR of the rival less that of the agent, bps", savings, format="number")
        chart = Chart("savings", "How much less the agent pays in the worst paths", self.headline(), [panel])
        figures = table(["", *keys], rows, "In bps of the order; 95 % intervals over the paths.")
        return ReportSection("figures", "Figures", "Mean and tail", "", [figures, chart])

    def _facts(self) -> ReportSection:
        rows = [[name, value] for name, value in self.facts.items()]
        lead = "Intervals are over resampled paths. The bars behind the paths are one history: another may differ by more."
        facts = table(["", ""], rows, "How the comparison was made.", numbers_from=2)
        return ReportSection("facts", "Method", "How this was made", lead, [facts])


def tail_terms(costs: Floats, alpha: float) -> Floats:
    """Return ``[paths]`` numbers whose mean is the average of the worst share `alpha` of costs (Rockafellar and Uryasev)."""
    value_at_risk = float(np.quantile(costs, 1.0 - alpha))
    return value_at_risk + np.maximum(costs - value_at_risk, 0.0) / alpha


def _mean(values: Floats) -> Estimate:
    mean, error = float(values.mean()), 1.96 * float(values.std()) / float(np.sqrt(len(values)))
    return Estimate(mean, mean - error, mean + error)
