"""How an agent trades when its observations are spoilt: a grid of attacks and natural mishaps over unseen bars.

Every cell of the grid trades the same bars with the same rules, so cells are compared bar by bar. Intervals come from blocks of
bars drawn with replacement, all cells together, and from drawing the agents (seeds of a training) with replacement as well.
"""

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

from tailguard.envs.return_observer import RunningReturn
from tailguard.evaluate.attacked import DELIBERATE, AttackedPolicy, Deliberate, Kind
from tailguard.evaluate.stats.bootstrap import Interval, bootstrap, return_block_length, stationary_indices
from tailguard.evaluate.stats.series import Floats
from tailguard.market.data import periods_per_year
from tailguard.market.env import AccountBatch
from tailguard.market.features import FeatureSet, market_columns
from tailguard.market.kernel import TURNOVER
from tailguard.market.rules import TradingSettings
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.robust.config import PerturbationConfig
from tailguard.validation import require

# Bars done, bars in all, and what is being done.
Progress = Callable[[int, int, str], None]
FIGURES = ("cagr", "sharpe", "cvar_5", "max_drawdown", "turnover")
WORST = "worst"
# Bars between two calls of the progress.
OFTEN = 100


class AttackPlan(BaseModel):
    """The grid.

    :param epsilons: radii of the deliberate attacks, in standard deviations of the features.
    :param attacks: deliberate ones, see :class:`~tailguard.evaluate.attacked.AttackedPolicy`.
    :param stale: delays of the market's columns, in bars.
    :param dropped: probabilities that a bar does not arrive.
    :param noisy: standard deviations of noise, in those of the features.
    :param steps: gradients per attack; 20 or more for a judgement.
    :param restarts: random starts of each, the best of which counts.
    :param perturbable: names or patterns of features that are spoilt; None is all but the calendar. The account never is.
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
        """The strengths of each kind, the clean one first."""
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
    :param bars: that each cell traded.
    :param first: time of the first of them.
    :param last: time of the last.
    :param perturbed: names of the features that were spoilt.
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
        """A degradation curve: strengths from 0, the clean agents, and the figure at each."""
        chosen = [self.rows[0], *sorted((row for row in self.rows if row.kind == kind), key=lambda row: row.strength)]
        return np.array([row.strength for row in chosen]), [row.figures[figure] for row in chosen]

    def to_json(self) -> dict[str, Any]:
        """As JSON values; what is infinite or undefined becomes null."""
        tree = asdict(self) | {"plan": self.plan.model_dump(mode="json")}
        cleaned: dict[str, Any] = _finite(tree)
        return cleaned

    def write(self, path: Path) -> None:
        """Write ``.json``, or ``.csv`` with one line for each cell.

        :param path: the ending says which.
        """
        require(path.suffix in (".json", ".csv"), "path", str(path), "a name that ends in .json or .csv")
        if path.suffix == ".json":
            path.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            return
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            ends = [f"{figure}{end}" for figure in FIGURES for end in ("", "_low", "_high", "_change")]
            writer.writerow(["kind", "strength", "total_return", *ends])
            for row in self.rows:
                numbers = [
                    number
                    for figure in FIGURES
                    for interval in [row.figures[figure]]
                    for number in (interval.estimate, interval.low, interval.high, row.against_clean[figure].estimate)
                ]
                writer.writerow([row.kind, row.strength, row.total_return, *numbers])


class Span(Protocol):
    """Rows that no training has seen."""

    @property
    def test(self) -> tuple[int, int]: ...  # noqa: D102


class TradedMarket(Protocol):
    """What is traded, as :class:`tailguard.experiments.training.Market` describes it."""

    @property
    def bars(self) -> pd.DataFrame: ...  # noqa: D102
    @property
    def features(self) -> FeatureSet: ...  # noqa: D102
    @property
    def trading(self) -> TradingSettings: ...  # noqa: D102
    @property
    def split(self) -> Span: ...  # noqa: D102


@dataclass(frozen=True)
class _Trades:
    """Returns and turnover of accounts, ``[B, T]`` each."""

    returns: Floats
    turnover: Floats


def attack_market(
    models: DistributionalPPO | Sequence[DistributionalPPO],
    market: TradedMarket,
    plan: AttackPlan | None = None,
    progress: Progress | None = None,
) -> AttackReport:
    """Trade agents over the unseen bars of a market, clean and under every perturbation of a plan.

    :param models: an agent, or several trained alike with different seeds.
    :param market: bars, features, rules, and which rows are unseen.
    :param plan: the grid; None takes the defaults.
    :param progress: told how far it is.
    """
    plan = plan or AttackPlan()
    agents = [models] if isinstance(models, DistributionalPPO) else list(models)
    require(len(agents) >= 1, "models", agents, "at least one")
    columns = market_columns(market.features.names, plan.perturbable)
    cells = plan.cells()
    first, last = market.split.test
    total, done = (last - first - 1) * len(cells) * len(agents), 0
    cellwise: dict[tuple[str, float], list[_Trades]] = {}
    for number, agent in enumerate(agents):
        for kind, strengths in cells.items():
            text = f"{kind}, agent {number + 1} of {len(agents)}"

            def report(bar: int, before: int = done, text: str = text) -> None:
                if progress is not None:
                    progress(before + bar, total, text)

            played = _play(agent, market, kind, strengths, columns, plan, report)
            done += played.returns.shape[1]
            for k, strength in enumerate(strengths):
                one = _Trades(played.returns[k], played.turnover[k])
                cellwise.setdefault((kind, strength), []).append(one)
    cellwise |= _worst(cellwise, plan)
    times = market.bars.index[first:last]
    names = tuple(market.features.names[column] for column in columns)
    rows = _rows(cellwise, periods_per_year(pd.DatetimeIndex(times)), plan)
    bars = len(cellwise["clean", 0.0][0].returns)
    return AttackReport(rows, len(agents), bars, str(times[0]), str(times[-1]), names, plan)


def _play(
    agent: DistributionalPPO,
    market: TradedMarket,
    kind: Kind,
    strengths: tuple[float, ...],
    columns: tuple[int, ...],
    plan: AttackPlan,
    report: Callable[[int], None],
) -> _Trades:
    """One pass over the unseen bars, an account for each strength. A ruined account stays where it is."""
    n = len(strengths)
    rules = market.trading.model_copy(update={"episode_length": None, "random_start": False})
    accounts = AccountBatch(market.bars, rules, n, market.features, span=market.split.test)
    search = PerturbationConfig(steps=plan.steps, restarts=plan.restarts, perturbable=columns)
    policy = AttackedPolicy(agent.policy, kind, np.asarray(strengths), search, plan.seed)
    earned = RunningReturn(n, agent.gamma) if agent.risk.return_augmented else None
    obs = np.empty((n, accounts.observation_size), np.float32)
    accounts.restart(np.arange(n), obs)
    bars = accounts.last_row - accounts.first_start
    returns, turnover = np.zeros((n, bars)), np.zeros((n, bars))
    alive, starts = np.ones(n, bool), np.ones(n, bool)
    for bar in range(bars):
        step = accounts.step(policy.act(_observed(agent, obs, earned), starts))
        obs, starts = step.obs, np.zeros(n, bool)
        returns[:, bar] = np.where(alive, np.expm1(step.rewards), 0.0)
        turnover[:, bar] = np.where(alive, accounts.accounts[:, TURNOVER], 0.0)
        if earned is not None:
            earned.add(step.rewards)
        alive &= ~step.terminated
        if bar % OFTEN == OFTEN - 1 or bar == bars - 1:
            report(bar + 1)
    return _Trades(returns, turnover)


def _observed(agent: DistributionalPPO, obs: NDArray[np.float32], earned: RunningReturn | None) -> NDArray[np.float32]:
    """The observation with what the agent needs to know of its own: what it has earned, and the tail it looks at."""
    if earned is None:
        return obs
    parts = [obs, earned.columns()]
    if agent.risk.dial:
        parts.append(np.full((len(obs), 1), agent.policy.budget.alpha.item(), np.float32))
    return np.concatenate(parts, axis=1)


def _worst(cells: dict[tuple[str, float], list[_Trades]], plan: AttackPlan) -> dict[tuple[str, float], list[_Trades]]:
    """For each radius and agent, the deliberate attack that left the least."""
    if not plan.attacks:
        return {}

    def growth(trades: _Trades) -> float:
        return float(np.log1p(trades.returns).sum())

    agents = range(len(cells["clean", 0.0]))
    return {
        (WORST, epsilon): [min((cells[kind, epsilon][k] for kind in plan.attacks), key=growth) for k in agents]
        for epsilon in plan.epsilons
    }


def _rows(cells: dict[tuple[str, float], list[_Trades]], periods: float, plan: AttackPlan) -> tuple[AttackRow, ...]:
    """Figures of all cells from the same resamples: of bars, and of agents."""
    series = {f"{kind}|{strength}|{k}": one for (kind, strength), agents in cells.items() for k, one in enumerate(agents)}
    returns = {name: one.returns for name, one in series.items()}
    block = return_block_length(returns)
    resampled = bootstrap(returns, periods, draws=plan.draws, seed=plan.seed)
    turnover = np.stack([one.turnover for one in series.values()], axis=1) * periods  # [T, cells x agents]
    bars = stationary_indices(len(turnover), plan.draws, block, plan.seed)
    estimates = {**resampled.estimates, "turnover": turnover.mean(0)}
    draws = {**resampled.draws, "turnover": np.stack([turnover[rows].mean(0) for rows in bars])}
    n = len(cells["clean", 0.0])
    chosen = np.random.default_rng(plan.seed).integers(n, size=(plan.draws, n))  # agents of each resample

    def of(figure: str, cell: int) -> tuple[float, Floats]:
        part = slice(cell * n, (cell + 1) * n)
        return float(estimates[figure][part].mean()), np.take_along_axis(draws[figure][:, part], chosen, axis=1).mean(1)

    clean = {figure: of(figure, 0) for figure in FIGURES}
    rows = []
    for cell, ((kind, strength), trades) in enumerate(cells.items()):
        here = {figure: of(figure, cell) for figure in FIGURES}
        gains = [math.expm1(float(np.log1p(one.returns).sum())) for one in trades]
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
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
