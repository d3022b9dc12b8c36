"""Trade an agent with perturbed observations: a grid of attacks and natural mishaps over unseen bars.

Every cell of the grid trades the bars of an evaluation under its rules, so cells are compared bar by bar, and the clean
cell is the agent of the evaluation. Intervals come from blocks of bars drawn with replacement, all cells together, and from
drawing the agents (seeds of a training) with replacement as well.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

from tailguard.evaluate.attacked import DELIBERATE, AttackedPolicy, Deliberate, Kind
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.play import ReportProgress, play, return_rule_of
from tailguard.evaluate.record import AccountHistory
from tailguard.evaluate.stats import performance
from tailguard.evaluate.stats.bootstrap import Interval, bootstrap, stationary_indices
from tailguard.evaluate.stats.series import Floats
from tailguard.io.atomic import atomic
from tailguard.market.features import FeatureSet, market_columns
from tailguard.market.rules import TradingSettings
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.robust.config import PerturbationConfig
from tailguard.validation import require

FIGURES = ("cagr", "sharpe", "cvar_5", "max_drawdown", "turnover")
WORST = "worst"


class AttackPlan(BaseModel):
    """The grid.

    :param epsilons: radii of the deliberate attacks, in standard deviations of the features.
    :param attacks: deliberate ones, see :class:`~tailguard.evaluate.attacked.AttackedPolicy`.
    :param stale: delays of the market's columns, in bars.
    :param dropped: probabilities that a bar does not arrive.
    :param noisy: standard deviations of noise, in those of the features.
    :param steps: gradients per attack; 20 or more for an evaluation.
    :param restarts: random starts of each, the best of which counts.
    :param perturbable: names or patterns of features that are perturbed; None is all but the calendar. The account never is.
    :param draws: resamples.
    :param level: of the intervals.
    :param seed: of everything random.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epsilons: tuple[NonNegativeFloat, ...] = (0.05, 0.1, 0.2)
    attacks: tuple[Deliberate, ...] = DELIBERATE
    stale: tuple[PositiveInt, ...] = (1, 3)
    dropped: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...] = (0.1, 0.3)
    noisy: tuple[NonNegativeFloat, ...] = (0.1, 0.3)
    steps: PositiveInt = 20
    restarts: PositiveInt = 2
    perturbable: tuple[str, ...] | None = None
    draws: Annotated[int, Field(ge=2)] = 1000
    level: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    seed: Annotated[int, Field(ge=0)] = 0

    def cells(self) -> dict[Kind, tuple[float, ...]]:
        """Return the strengths of each kind, the clean cell first."""
        cells: dict[Kind, tuple[float, ...]] = {"clean": (0.0,)}
        cells |= {kind: self.epsilons for kind in self.attacks if self.epsilons}
        natural: dict[Kind, tuple[float, ...]] = {"stale": self.stale, "dropped": self.dropped, "noisy": self.noisy}
        return cells | {kind: tuple(map(float, strengths)) for kind, strengths in natural.items() if strengths}


@dataclass(frozen=True)
class AttackRow:
    """One cell of the grid.

    :param kind: of the perturbation; ``worst`` is, for each agent, the deliberate attack that cost it most.
    :param strength: epsilon, bars, probability or standard deviation.
    :param total_return: gain over the whole span, mean of the agents.
    :param figures: of each of :data:`FIGURES`, its mean over the agents with its interval; growth, Sharpe and turnover are
        per year, `cvar_5` per bar.
    :param against_clean: the same figures minus those of the clean agents, drawn together.
    """

    kind: str
    strength: float
    total_return: float
    figures: dict[str, Interval]
    against_clean: dict[str, Interval]


@dataclass(frozen=True)
class AttackReport:
    """The whole grid.

    :param rows: one for each kind and strength, the clean one first.
    :param agents: how many agents were attacked.
    :param bars: number of bars that each cell traded.
    :param first: time of the first of them.
    :param last: time of the last.
    :param perturbed: names of the features that were perturbed.
    :param plan: the settings.
    """

    rows: tuple[AttackRow, ...]
    agents: int
    bars: int
    first: str
    last: str
    perturbed: tuple[str, ...]
    plan: AttackPlan

    def curve(self, kind: str, figure: str) -> tuple[Floats, list[Interval]]:
        """Return a degradation curve: strengths from 0, which is the clean cell, and the figure at each."""
        chosen = [self.rows[0], *sorted((row for row in self.rows if row.kind == kind), key=lambda row: row.strength)]
        return np.array([row.strength for row in chosen]), [row.figures[figure] for row in chosen]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; what is infinite or undefined becomes null."""
        tree = asdict(self) | {"plan": self.plan.model_dump(mode="json")}
        cleaned: dict[str, Any] = _finite(tree)
        return cleaned

    def write(self, path: Path) -> None:
        """Write ``.json``, or ``.csv`` with one line for each cell.

        :param path: the ending says which.
        """
        require(path.suffix in (".json", ".csv"), "path", str(path), "a name that ends in .json or .csv")
        if path.suffix == ".json":
            text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        else:
            text = self._table().to_csv(index=False)
        with atomic(path) as file:
            file.write(text.encode())

    def _table(self) -> pd.DataFrame:
        rows = []
        for row in self.rows:
            cell: dict[str, Any] = {"kind": row.kind, "strength": row.strength, "total_return": row.total_return}
            for figure in FIGURES:
                interval, change = row.figures[figure], row.against_clean[figure].estimate
                cell[figure], cell[f"{figure}_low"], cell[f"{figure}_high"] = interval.estimate, interval.low, interval.high
                cell[f"{figure}_change"] = change
            rows.append(cell)
        return pd.DataFrame(rows)


class UnseenRows(Protocol):
    """Rows that no training has seen."""

    @property
    def span(self) -> tuple[int, int]: ...  # noqa: D102


class TradedMarket(Protocol):
    """A market to trade, such as :class:`tailguard.experiments.prepared_market.Market`."""

    @property
    def bars(self) -> pd.DataFrame: ...  # noqa: D102
    @property
    def features(self) -> FeatureSet: ...  # noqa: D102
    @property
    def trading(self) -> TradingSettings: ...  # noqa: D102
    @property
    def split(self) -> UnseenRows: ...  # noqa: D102


# The accounts of the agents in each cell, by kind and strength.
Cells = dict[tuple[str, float], list[AccountHistory]]


def attack_market(
    models: DistributionalPPO | Sequence[DistributionalPPO],
    market: TradedMarket,
    plan: AttackPlan | None = None,
    report: ReportProgress | None = None,
    warmup: int = 64,
) -> AttackReport:
    """Trade agents over the unseen bars of a market, clean and under every perturbation of a plan.

    :param models: an agent, or several trained alike with different seeds.
    :param market: bars, features, rules, and which rows are unseen.
    :param plan: the grid; None takes the defaults.
    :param report: called with the bars done, the bars in all, and a line.
    :param warmup: rows before the test over which the recurrent state is filled, under attack as well.
    """
    plan = plan or AttackPlan()
    agents = [models] if isinstance(models, DistributionalPPO) else list(models)
    require(len(agents) >= 1, "models", agents, "at least one")
    columns = market_columns(market.features.names, plan.perturbable)
    search = PerturbationConfig(steps=plan.steps, restarts=plan.restarts, perturbable=columns)
    window, kinds = BacktestWindow(market.bars, market.trading, market.split.span), plan.cells()
    first, last = window.span
    bars = last - 1 - max(first - warmup, market.features.warmup)  # of each pass, warm-up included
    passes = [(number, agent, kind) for number, agent in enumerate(agents) for kind in kinds]
    cells: Cells = {}
    for done, (number, agent, kind) in enumerate(passes):

        def tell(bar: int, before: int = done * bars, text: str = f"{kind}, agent {number + 1} of {len(agents)}") -> None:
            if report is not None:
                report(before + bar, len(passes) * bars, text)

        victim = AttackedPolicy(agent.policy, kind, np.asarray(kinds[kind]), search, plan.seed)
        trajectories = play(
            victim, market.bars, market.features, market.trading, [window.span] * len(kinds[kind]),
            returns=return_rule_of(agent), warmup=warmup, report=tell,
        )  # fmt: skip
        for strength, account in zip(kinds[kind], trajectories, strict=True):
            cells.setdefault((kind, strength), []).append(window.trade(kind, account.targets))
    cells |= _worst(cells, plan)
    names = tuple(market.features.names[column] for column in columns)
    rows = _rows(cells, window.periods_per_year, plan)
    times = window.times
    return AttackReport(rows, len(agents), len(times), str(times[0]), str(times[-1]), names, plan)


def _worst(cells: Cells, plan: AttackPlan) -> Cells:
    """Return, for each radius and agent, the deliberate attack that left the least."""
    if not plan.attacks:
        return {}

    def growth(history: AccountHistory) -> float:
        return float(np.log1p(history.returns).sum())

    agents = range(len(cells["clean", 0.0]))
    return {
        (WORST, epsilon): [min((cells[kind, epsilon][k] for kind in plan.attacks), key=growth) for k in agents]
        for epsilon in plan.epsilons
    }


def _rows(cells: Cells, periods: float, plan: AttackPlan) -> tuple[AttackRow, ...]:
    """Return the figures of all cells from the same resamples of bars and of agents."""
    histories = {
        f"{kind}|{strength}|{k}": history for (kind, strength), agents in cells.items() for k, history in enumerate(agents)
    }
    returns = {name: history.returns for name, history in histories.items()}
    riskless = next(iter(histories.values())).riskless  # all accounts are on the same bars
    resampled = bootstrap(returns, periods, riskless=riskless, draws=plan.draws, seed=plan.seed)
    turnover = np.stack([history.turnover for history in histories.values()], axis=1) * periods  # [T, cells x agents]
    bars = stationary_indices(len(turnover), plan.draws, resampled.block, plan.seed)
    estimates = {
        **resampled.estimates,
        "turnover": np.array([performance.turnover(history.turnover, periods) for history in histories.values()]),
    }
    draws = {**resampled.draws, "turnover": np.stack([turnover[rows].mean(0) for rows in bars])}
    n = len(cells["clean", 0.0])
    chosen = np.random.default_rng(plan.seed).integers(n, size=(plan.draws, n))  # agents of each resample

    def of(figure: str, cell: int) -> tuple[float, Floats]:
        part = slice(cell * n, (cell + 1) * n)
        return float(estimates[figure][part].mean()), np.take_along_axis(draws[figure][:, part], chosen, axis=1).mean(1)

    clean = {figure: of(figure, 0) for figure in FIGURES}
    rows = []
    for cell, ((kind, strength), agents) in enumerate(cells.items()):
        here = {figure: of(figure, cell) for figure in FIGURES}
        gains = [math.expm1(float(np.log1p(history.returns).sum())) for history in agents]
        figures = {figure: _interval(value, drawn, plan.level) for figure, (value, drawn) in here.items()}
        change = {
            figure: _interval(value - clean[figure][0], drawn - clean[figure][1], plan.level)
            for figure, (value, drawn) in here.items()
        }
        rows.append(AttackRow(kind, strength, float(np.mean(gains)), figures, change))
    return tuple(rows)


def _interval(estimate: float, draws: Floats, level: float) -> Interval:
    low, high = np.nanquantile(draws, [(1.0 - level) / 2.0, (1.0 + level) / 2.0], method="inverted_cdf")
    return Interval(estimate, float(low), float(high), level)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
