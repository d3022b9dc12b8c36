"""The positive control: plant edges of known strength into the user's own bars, train, judge, and see which are found."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from tailguard.config import Config
from tailguard.evaluate.assessment import Effort
from tailguard.evaluate.judge import judge
from tailguard.evaluate.play import ReportProgress
from tailguard.evaluate.record import Estimate
from tailguard.evaluate.verdict import VerdictOutcome
from tailguard.experiments.walkforward import walkforward
from tailguard.io.atomic import atomic
from tailguard.market.planting import plant_edge
from tailguard.market.rules import TradingRules
from tailguard.validation import require

RESULT = "control.json"
LEARNT = 0.5  # share of the oracle's Sharpe ratio from which on an edge counts as learnt


@dataclass(frozen=True)
class ControlRow:
    """An edge that was planted, and what became of it.

    :param planted: annual Sharpe ratio of the oracle after costs, on average.
    :param oracle_sharpe: what the oracle reached on the test bars.
    :param oracle_outcome: the verdict on the oracle: the most that the length of the test allows.
    :param sharpe: of the agent, with its interval.
    :param outcome: the verdict on the agent.
    """

    planted: float
    oracle_sharpe: float
    oracle_outcome: VerdictOutcome
    sharpe: Estimate
    outcome: VerdictOutcome

    @property
    def learnt(self) -> bool:
        """True if the agent earns at least half of what the oracle does, and more than luck: its interval is above 0."""
        return self.sharpe.value >= LEARNT * self.oracle_sharpe and (self.sharpe.low or 0.0) > 0.0


@dataclass(frozen=True)
class Control:
    """The result of a positive control.

    :param rows: by strength of the edge.
    """

    rows: tuple[ControlRow, ...]

    @property
    def smallest_learnt(self) -> float | None:
        """The weakest planted edge from which on the agent learnt every one; None if it did not learn the strongest."""
        return self._from_on([row.learnt for row in self.rows])

    @property
    def smallest_found(self) -> float | None:
        """The weakest planted edge from which on the verdict on the agent is evidence of skill; None if there is none."""
        return self._from_on([row.outcome == "evidence of skill" for row in self.rows])

    @property
    def smallest_visible(self) -> float | None:
        """The weakest planted edge from which on the verdict finds what is known perfectly; None if there is none."""
        return self._from_on([row.oracle_outcome == "evidence of skill" for row in self.rows])

    def _from_on(self, passed: Sequence[bool]) -> float | None:
        """Return the weakest planted edge that passed together with every stronger one."""
        edges = sorted((row.planted, ok) for row, ok in zip(self.rows, passed, strict=True) if row.planted > 0.0)
        missed = max((planted for planted, ok in edges if not ok), default=0.0)
        return min((planted for planted, _ in edges if planted > missed), default=None)

    def sentences(self) -> list[str]:
        """Return what the control shows; an edge counts from where every stronger one is seen, too."""
        told = {
            "Somebody who knows the edge is found from a Sharpe ratio of": self.smallest_visible,
            "The agent learns an edge from": self.smallest_learnt,
            "The verdict finds the agent from": self.smallest_found,
        }
        lines = [f"{text} {'none of those planted' if value is None else f'{value:g} on'}." for text, value in told.items()]
        false = [row for row in self.rows if row.planted == 0.0 and row.outcome == "evidence of skill"]
        return lines + (["Without an edge the verdict claims skill all the same: by chance, or by a mistake."] if false else [])


def run_control(
    bars: pd.DataFrame,
    config: Config,
    sharpes: Sequence[float],
    folder: Path,
    *,
    source: str,
    seed: int = 0,
    report: ReportProgress | None = None,
    effort: Effort | None = None,
) -> Control:
    """Plant edges, train and judge walk-forward on each, and write ``control.json``.

    :param bars: one symbol, from :func:`tailguard.market.load_bars`.
    :param config: of the trainings and of trading; its costs are what the oracle pays.
    :param sharpes: annual Sharpe ratios to plant; 0 is the negative control.
    :param folder: of the control, with a walk-forward per edge. Finished trainings in it are not repeated.
    :param source: name of the data.
    :param seed: of the permutations.
    :param report: called with the steps done, the steps in all, and a line that names the edge.
    :param effort: of the computation.
    """
    require(len(sharpes) >= 1, "sharpes", tuple(sharpes), "at least one Sharpe ratio to plant")
    trading = config.trading
    fee = trading.fee + trading.half_spread + trading.slippage
    costs = trading.model_dump(include=set(TradingRules.model_fields))
    planted = {sharpe: plant_edge(bars, sharpe, fee=fee, seed=seed) for sharpe in sorted(set(sharpes))}
    rows = []
    for done, (sharpe, market) in enumerate(planted.items()):
        name = f"{source}, planted Sharpe ratio {sharpe:g}"
        record = walkforward(
            market.bars,
            config,
            config.walkforward,
            folder / f"edge-{sharpe:g}",
            source=name,
            report=_share_of(report, done, len(planted), sharpe),
            effort=effort,
        )
        first, last = (int(bars.index.searchsorted(time)) for time in (record.agent.times[0], record.agent.times[-1]))
        oracle = pd.DataFrame(market.oracle, index=bars.index).iloc[first - 1 : last]  # decided at the closes before
        best = judge(
            weights=oracle, bars=market.bars, trading=costs, trials=record.provenance.trials, effort=effort, ledger=None
        )
        rows.append(
            ControlRow(
                planted=sharpe,
                oracle_sharpe=best.statistics["agent"]["sharpe"].value,
                oracle_outcome=best.verdict.outcome,
                sharpe=record.statistics["agent"]["sharpe"],
                outcome=record.verdict.outcome,
            )
        )
    control = Control(tuple(rows))
    with atomic(folder / RESULT) as file:
        file.write(json.dumps([asdict(row) | {"learnt": row.learnt} for row in rows], indent=2).encode())
    return control


def _share_of(report: ReportProgress | None, done: int, edges: int, sharpe: float) -> ReportProgress | None:
    """Return a report of one walk-forward as a share of that of all edges."""
    if report is None:
        return None
    return lambda step, total, text: report(done * total + step, edges * total, f"Sharpe ratio {sharpe:g}, {text}")
