"""The report about hedges of one option: how their errors are distributed, and what they cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailguard.envs.hedging_rivals import HedgingResult, expected_shortfall
from tailguard.envs.hedging_state import Floats
from tailguard.evaluate.record import Estimate
from tailguard.evaluate.report.charts import Axis, Chart, Color, Mark, Panel, RowPanel, estimate_row
from tailguard.evaluate.report.formatting import say, with_interval
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

    def statistics(self) -> dict[str, dict[str, Estimate]]:
        """Return mean, standard deviation, CVaR, costs and turnover by hedge, with intervals over the paths."""
        return {name: _statistics(result, self.alpha) for name, result in self.results.items()}

    def cvar_ratios(self) -> dict[str, Estimate]:
        """Return the agent's CVaR over that of each rival, with an interval over the paths, which are the same for both."""
        agent, *rivals = self.results
        return {name: _ratio(self.results[agent].pnl, self.results[name].pnl, self.alpha) for name in rivals}

    def headline(self) -> str:
        """Return the finding: whether the agent has a smaller tail than its best rival, beyond the interval."""
        agent = next(iter(self.results))
        ratios = self.cvar_ratios()
        best = max(ratios, key=lambda name: ratios[name].value)
        found = ratios[best]
        assert found.low is not None
        assert found.high is not None
        change = f"{say(abs(1.0 - found.value), 'percent')} ({with_interval(found)} of it)"
        if found.high < 1.0:
            return f"The {agent}'s worst paths cost less than those of the best rival, {best}, by {change}."
        if found.low > 1.0:
            return f"The {agent}'s worst paths cost more than those of the best rival, {best}, by {change}."
        return f"The {agent}'s worst paths cost about as much as those of the best rival, {best}: {with_interval(found)} of it."

    def to_json(self) -> dict[str, Any]:
        """Return everything but the paths, as plain values."""
        statistics = {
            name: {key: estimate._asdict() for key, estimate in figures.items()} for name, figures in self.statistics().items()
        }
        ratios = {name: estimate._asdict() for name, estimate in self.cvar_ratios().items()}
        head = {"title": self.title, "headline": self.headline(), "alpha": self.alpha, "premium": self.premium}
        return head | {"facts": dict(self.facts), "statistics": statistics, "cvar_ratio_of_the_agent_to": ratios}

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
        summary = f"Average loss in the worst {say(self.alpha, 'percent')} of the paths, in parts of the premium: {worst}."
        note = "The same paths for every hedge. The left end is what the CVaR is about."
        chart = Chart("errors", "Distribution of the hedge error", summary, [panel], note=note, choose=True)
        return ReportSection("errors", "Hedge error", "How the final profit and loss is distributed", summary, [chart])

    def _figures(self) -> ReportSection:
        statistics = self.statistics()
        keys = list(next(iter(statistics.values())))
        rows = [[name, *(with_interval(figures[key]) for key in keys)] for name, figures in statistics.items()]
        ratios = [
            estimate_row(f"agent / {name}", estimate, "number", "agent", "ratio of CVaRs")
            for name, estimate in self.cvar_ratios().items()
        ]
        chart = Chart(
            "ratios",
            "Below 1 the agent's worst paths cost less",
            self.headline(),
            [RowPanel("CVaR of the agent over that of the rival", ratios, include=(1.0,))],
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


def _ratio(agent: Floats, rival: Floats, alpha: float) -> Estimate:
    require(len(agent) == len(rival), "paths", (len(agent), len(rival)), "the same for both hedges")

    def ratio(paths: Any) -> float:
        return expected_shortfall(agent[paths], alpha) / expected_shortfall(rival[paths], alpha)

    return _resampled(ratio, len(agent))


def _resampled(statistic: Callable[[Any], float], n: int) -> Estimate:
    """Return a statistic of paths with its 95 % interval by the bootstrap."""
    draws = np.random.default_rng(0)
    low, high = np.quantile([statistic(draws.integers(n, size=n)) for _ in range(RESAMPLES)], (0.025, 0.975))
    return Estimate(float(statistic(slice(None))), float(low), float(high))
