"""Choose an agent inside the training bars: by blocks that are held out in time, and by nothing else.

The training bars are cut into blocks. For each block, agents of every policy are trained on the others and trade the block at
several stops of their training, after costs. The policy and the stop with the best Sharpe ratio over all blocks win; a
recurrent policy is tried on half of the blocks first, and on the others only if it leads there. Then two t-statistics decide
how much the winner is trusted: that of its alpha, which is what it earns on held-out bars beyond what holding the market
explains, and what that would have been if returns had been as forecast (market/relevance.py):

    active = clip(t - doubt, 0, 1),    t = max(t_alpha, t_expected),
    t_expected = (kappa sum_t (w_t - mean w) sigma_t f_t - costs) / standard error of the alpha,

the share of the account that the agent will steer; the rest is held in a constant mix. f are forecasts of held-out returns in
units of their volatility sigma, and kappa is how far these were right. Ten years of an account say little about its alpha:
chance decides most of what it earned, and turbulent months most of that. Forecasts are judged on every bar, calm ones above
all, so that an agent that was unlucky there can be trusted; and costs are counted in full, so that one is not that trades on
what can be predicted and does not pay for it. An agent may know what no linear forecast says, hence the larger of the two.
Where nothing can be learnt, t_expected is below 0 by the costs, and the mix is all that is left. An agent is trained on all
training bars only after that.

After a few updates an agent knows which way to trade and still asks for little: its growth says how long it was trained, its
Sharpe ratio what it has learnt. So the ratio chooses, and small weights are multiplied (``trading.gain``) to a size that is
worth the trouble and far from the limits, where trades cost more than they earn. Where volatility is above its usual level an
agent holds less in proportion, in training and afterwards (``trading.volatility_power`` 1): turbulent bars would otherwise
decide both what it learns and what it earns. The mix stays as it is, since nothing is to be traded without need.

An agent that is averse to the tail of its periods (``training.risk`` with a period) is chosen by its own objective instead
(held_out_risk.py), which says when to hold less; how much is held follows from growth, as for everybody. Volatility says most
of when: first the power by which it scales every position (market/volatility.py) is chosen, for the mix on the held-out blocks,
and agents are trained and traded with that scale. So what is asked of them is to be better than volatility alone: t is that of
the difference to the scaled mix that holds as much on average, and nothing else. An agent that lost money is not trusted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd

from tailguard.config import Config, SelectionConfig, TrainingConfig
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.folds import cut_into_blocks
from tailguard.evaluate.play import ReportProgress
from tailguard.evaluate.record import AccountHistory
from tailguard.evaluate.stats.series import ROUNDING, Floats
from tailguard.experiments.engines import SERIAL, Engine
from tailguard.experiments.held_out_risk import HeldOutAccount, HeldOutRisk, held_out_risk
from tailguard.experiments.prepared_market import Split, prepare_market
from tailguard.experiments.trials import HeldOutMarkets, Kept, Play, Trial, plays_from_tree, plays_to_tree
from tailguard.io.sealed import read_sealed, write_sealed
from tailguard.market.bars import periods_per_year, symbols_of
from tailguard.market.env import Rows
from tailguard.market.features import FeatureSet
from tailguard.market.relevance import (
    FLOOR,
    HeldOutForecast,
    bar_volatility,
    calibrated,
    fill_returns,
    held_out_forecast,
    t_of_products,
    volatility_scaled,
)
from tailguard.market.rules import TradingSettings, capped
from tailguard.market.volatility import exposure_scale
from tailguard.parallel.tasks import run_tasks

# Sharpe ratio per year that holding a market usually earns, and how much markets differ: about what stock indices have paid.
PREMIUM, PREMIUM_SPREAD = 0.3, 0.2
# From the simplest on: a later one must be better by more than one standard error.
POLICIES = ("MlpPolicy", "MlpLstmPolicy")
# By which volatility may scale the positions of a risk-averse account, from the simplest on; and those of every other agent.
POWERS = (0.0, 1.0, 2.0)
EVEN_RISK = 1.0
# Mean gross exposure, as a share of the leverage, that an agent's weights are multiplied to, and the largest factor.
SIZE, LARGEST_GAIN = 0.2, 8.0


@dataclass(frozen=True)
class Candidate:
    """A policy at a stop of its training, and how it traded the held-out blocks.

    :param policy: its name.
    :param steps: environment steps at the stop.
    :param in_sample_sharpe: annual Sharpe ratio after costs on blocks that it had trained on, as many bars as were held out.
    :param sharpe: annual Sharpe ratio after costs on the held-out blocks.
    :param growth: log growth per year on the held-out blocks.
    :param turnover: amount traded per year on them, as a multiple of equity.
    :param t_statistic: of its alpha over the market on the held-out blocks.
    :param blocks: held-out blocks that it traded; fewer than all if it fell behind on the first ones.
    :param gain: factor of its weights with which it traded them.
    :param objective: of a risk-averse agent on the held-out blocks, in log returns per period, at a mean exposure of 1 if its
        objective says when to hold and not how much; None for growth. Then `t_statistic` is that of the difference to the mix
        that is scaled by volatility, with the agent's mean weights.
    :param expected_t: what `t_statistic` had been if returns had been as forecast; None for a risk-averse agent, and in the
        files of earlier versions.
    """

    policy: str
    steps: int
    in_sample_sharpe: float
    sharpe: float
    growth: float
    turnover: float
    t_statistic: float
    blocks: int
    gain: float = 1.0
    objective: float | None = None
    expected_t: float | None = None


@dataclass(frozen=True)
class Selection:
    """The result of a selection.

    :param policy: chosen policy.
    :param steps: chosen length of training, in environment steps.
    :param core: weights of the constant mix, from all training bars.
    :param active: share of the account that the agent steers.
    :param forecast_t: t-statistic of a linear forecast of the returns in the held-out blocks; for a risk-averse agent of their
        sizes.
    :param mix_growth: log growth per year of the constant mix on the held-out blocks.
    :param candidates: all that were compared.
    :param features: weights of the features that say something about the next return in the training bars, the largest first.
    :param criterion: what a risk-averse agent was chosen by, in words; empty for growth.
    :param mix_objective: the same of the mix on the held-out blocks, scaled by volatility; None for growth.
    :param volatility_power: by which volatility scales what is held; None, in files of earlier versions, leaves it as it is
        configured.
    :param scale_core: whether it scales the core as well as the agent.
    :param horizon: steps at which the schedules of the training end, which may be after its last step; None in the files of
        earlier versions, where they end with it.
    """

    policy: str
    steps: int
    core: tuple[float, ...]
    active: float
    forecast_t: float
    mix_growth: float
    candidates: tuple[Candidate, ...]
    features: dict[str, float]
    criterion: str = ""
    mix_objective: float | None = None
    volatility_power: float | None = None
    scale_core: bool = True
    horizon: int | None = None

    @property
    def chosen(self) -> Candidate:
        """The candidate that won."""
        return next(
            candidate for candidate in self.candidates if (candidate.policy, candidate.steps) == (self.policy, self.steps)
        )

    @property
    def reason(self) -> str:
        """The choice in a sentence."""
        winner = self.chosen
        believed = {0.0: "so it steers nothing", 1.0: "so it steers the whole account"}
        steers = believed.get(self.active, f"so it steers {self.active:.0%} of the account")
        if winner.objective is not None:
            return (
                f"{self.policy} after {self.steps:,} steps had the best objective on held-out blocks, {self.criterion} "
                f"({winner.objective:+.2%}, the mix {self.mix_objective:+.2%}); it grew {winner.growth:+.1%} a year, and its "
                f"lead over the mix that holds as much on average has a t-statistic of {winner.t_statistic:.1f}, {steers}; "
                f"{self._scaling}"
            )
        return (
            f"{self.policy} after {self.steps:,} steps, with {winner.gain:g} times the weights that it asked for, had the best "
            f"Sharpe ratio on held-out blocks, {winner.sharpe:.2f} (it grew {winner.growth:+.1%} a year, the constant mix "
            f"{self.mix_growth:+.1%}); its alpha there has a t-statistic of {winner.t_statistic:.1f}"
            f"{self._expectation}, {steers}{self._held_back}"
        )

    @property
    def _expectation(self) -> str:
        """The alpha that forecasts expect, in words."""
        forecasts = f"linear forecasts of the returns, which have one of {self.forecast_t:.1f}"
        expected = self.chosen.expected_t
        return f" ({forecasts})" if expected is None else f", and of {expected:.1f} by {forecasts}"

    @property
    def _held_back(self) -> str:
        """The scale of the agent's positions by volatility, in words."""
        power = self.volatility_power
        return f"; it holds less where volatility is above its usual level, by its power of {-power:g}" if power else ""

    @property
    def _scaling(self) -> str:
        """The mix and its scale in words."""
        mix = " + ".join(f"{weight:.2f}" for weight in self.core)
        held = f"agent and mix ({mix})" if self.active else f"the account is the mix ({mix})"
        if not self.volatility_power:
            return f"{held}, not scaled by volatility" if not self.active else f"{held} are not scaled by volatility"
        power = f"volatility to the power of {-self.volatility_power:g} where it is above its usual level"
        return f"{held}, scaled by {power}" if not self.active else f"{held} are scaled by {power}"

    def steered(self, trading: TradingSettings) -> TradingSettings:
        """Return rules of trading with what was chosen: core, share and gain of the agent, and the scale of core and agent."""
        power = trading.volatility_power if self.volatility_power is None else self.volatility_power
        scale_core = trading.scale_core if self.volatility_power is None else self.scale_core
        account = {"core": self.core, "active": self.active, "gain": self.chosen.gain}
        return trading.model_copy(update={**account, "volatility_power": power, "scale_core": scale_core})

    def applied(self, config: Config) -> Config:
        """Return the configuration of the training that follows: nothing is left to choose."""
        training = config.training.model_copy(update={"policy": self.policy, "steps": self.steps})
        return config.model_copy(update={"training": training, "trading": self.steered(config.trading), "selection": None})

    def table(self) -> pd.DataFrame:
        """Return a row per candidate; the column `chosen` marks the winner."""
        rows = pd.DataFrame([asdict(candidate) for candidate in self.candidates])
        rows = rows.drop(columns=[name for name in ("objective", "expected_t") if rows[name].isna().all()])
        return rows.assign(chosen=(rows["policy"] == self.policy) & (rows["steps"] == self.steps))

    def tree(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Self:
        """Restore what :meth:`tree` returned."""
        candidates = tuple(Candidate(**row) for row in tree["candidates"])
        # Files of earlier versions have no forecast: alpha alone decided.
        forecast_t = tree.get("forecast_t", 0.0)
        return cls(**{**tree, "core": tuple(tree["core"]), "candidates": candidates, "forecast_t": forecast_t})


def select(
    bars: pd.DataFrame,
    config: Config,
    split: Split,
    features: FeatureSet,
    report: ReportProgress | None = None,
    *,
    engine: Engine = SERIAL,
    kept: Kept | None = None,
) -> Selection:
    """Choose policy, length of training, and how much of the account the agent steers.

    :param bars: a table from :func:`tailguard.market.load_bars`; rows after the training are not looked at.
    :param config: of the training, with a section ``selection``.
    :param split: its training rows are cut into blocks.
    :param features: of the bars, not yet scaled.
    :param report: called with the steps done, the steps in all, and a line.
    :param engine: where the candidates are trained; the choice is the same everywhere.
    :param kept: finished trainings of a selection that was stopped; None keeps none.
    :raises ValueError: if a training fails, or is lost too often.
    """
    settings = config.selection
    assert settings is not None
    whole_account = config.trading.model_copy(update={"core": (), "active": 1.0, "gain": 1.0})  # while agents are compared
    config = config.model_copy(update={"trading": whole_account})
    known = split.train[1]  # beyond this row nothing is known
    bars, features = bars.iloc[:known], features[:known]
    blocks = cut_into_blocks((max(split.train[0], features.warmup), known), settings.blocks, "selection.blocks")
    trials = _Trials(bars, config, split, features, blocks, report, engine, kept)
    best, *challengers = POLICIES if config.training.policy == "auto" else (config.training.policy,)
    everywhere, half, seeds = range(len(blocks)), range(0, len(blocks), 2), range(settings.seeds)
    first_looks = [trial for policy in challengers for trial in _each(policy, half, seeds[:1])]
    trials.run([*_each(best, everywhere, seeds), *first_looks])
    for policy in challengers:
        if trials.lead(policy, best, half) > 0.0:
            trials.run(_each(policy, everywhere, seeds))
            best = policy if trials.lead(policy, best, everywhere) > 1.0 else best
    winner = trials.best_stop(best, everywhere)
    candidates = [trials.score(policy, stop) for policy in trials.policies for stop in trials.stops]
    whole = prepare_market(bars, config, split, features)
    forecast_t = trials.forecast_t()
    risk, believed = trials.risk, winner.candidate.t_statistic
    mix = constant_mix(bars, whole.spans, config.trading, risk, trials.scale)
    weights = sorted(zip(whole.scaler.names, whole.scaler.weight.tolist(), strict=True), key=lambda pair: -pair[1])
    return Selection(
        policy=winner.candidate.policy,
        steps=winner.candidate.steps,
        core=_core(mix, config.training.pooled),
        # A risk-averse agent that loses has a worse mean and a worse tail than cash. That volatility can be forecast is no
        # evidence for one: the scale of the mix uses it already.
        active=(
            trust(believed, winner.candidate.expected_t, settings.doubt)
            if risk is None or winner.candidate.sharpe > 0.0
            else 0.0
        ),
        forecast_t=forecast_t,
        mix_growth=float(np.concatenate(trials.mixes).mean()) * trials.periods,
        candidates=tuple(score.candidate for score in candidates),
        features={name: weight for name, weight in weights if weight > FLOOR},
        criterion="" if risk is None else risk.words,
        mix_objective=None if risk is None else risk.value(trials.scaled_mix(trials.power).sums),
        volatility_power=trials.power,
        scale_core=trials.scale_core,
        horizon=trials.stops[-1],
    )


def trust(alpha_t: float, expected_t: float | None, doubt: float) -> float:
    """Return the share of the account that an agent may steer.

    :param alpha_t: t-statistic of its alpha on held-out bars, or of its advantage over a constant account.
    :param expected_t: what the first would have been if returns had been as forecast; None is unknown.
    :param doubt: t-statistic up to which nothing is believed.
    """
    evidence = alpha_t if expected_t is None else max(alpha_t, expected_t)
    return float(np.clip(evidence - doubt, 0.0, 1.0))


def stops_of(training: TrainingConfig, settings: SelectionConfig) -> list[int]:
    """Return the steps at which agents are scored: whole updates, the last one being the end of the training."""
    rollout = training.n_steps * training.n_envs
    last = -(-training.steps // rollout)
    return sorted({rollout * max(round(share * last), 1) for share in settings.stops})


def constant_mix(
    bars: pd.DataFrame,
    spans: Sequence[Rows],
    trading: TradingSettings,
    risk: HeldOutRisk | None = None,
    scale: Floats | None = None,
) -> tuple[float, ...]:
    """Return equal weights of all assets, scaled to the exposure that grows most as far as anybody can know; never short.

    Without costs a constant exposure w to a return with mean m and variance v grows by w m - w^2 v / 2, so that w = m / v is
    best. Ten years say little about a mean, so the Sharpe ratio s that was seen is combined with what markets usually pay, a
    normal prior with mean :data:`PREMIUM` and deviation :data:`PREMIUM_SPREAD`:

        posterior s = (PREMIUM / PREMIUM_SPREAD^2 + years s) / (1 / PREMIUM_SPREAD^2 + years),    w = s / volatility.

    With a limit to the tail, the exposure is the best for that objective, with returns of that Sharpe ratio. CVaR itself says
    all or nothing, whatever is best: twice the position has twice the CVaR.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param spans: rows that may be looked at.
    :param trading: with the largest exposure.
    :param risk: a risk-averse objective; None is growth.
    :param scale: ``[T, assets]`` share of the weights that is held after each close; None is all.
    """
    parts = [np.expm1(fill_returns(bars.iloc[start:stop], trading.fill)) for start, stop in spans]
    if scale is not None:
        parts = [part * scale[start:stop] for part, (start, stop) in zip(parts, spans, strict=True)]
    returns = np.concatenate(parts)
    assets = len(symbols_of(bars))
    together = returns[np.isfinite(returns).all(axis=1)].mean(axis=1)
    periods = trading.bars_per_year or periods_per_year(pd.DatetimeIndex(bars.index))
    volatility = float(together.std()) * periods**0.5 if len(together) > 1 else 0.0
    if volatility <= ROUNDING:
        return tuple([0.0] * assets)
    years, seen = len(together) / periods, float(together.mean()) * periods / volatility
    prior = 1.0 / PREMIUM_SPREAD**2
    expected = (prior * PREMIUM + years * seen) / (prior + years)
    exposure = min(max(expected / volatility, 0.0), trading.leverage)
    if risk is not None and not risk.homogeneous:
        likely = together - together.mean() + expected * volatility / periods
        exposure = risk.best_exposure(likely, trading.leverage)
    return tuple([exposure / assets] * assets)


def _core(mix: tuple[float, ...], pooled: bool) -> tuple[float, ...]:
    """Return the core of an account: the mix, or for the accounts of a pool, which trade one instrument each, its exposure."""
    return (sum(mix),) if pooled else mix


def _each(policy: str, blocks: Sequence[int], seeds: Sequence[int]) -> list[Trial]:
    return [Trial(policy, block, seed) for block in blocks for seed in seeds]


class _Score(NamedTuple):
    """A candidate with its log returns per held-out bar."""

    candidate: Candidate
    returns: Floats
    account: HeldOutAccount | None  # for a risk-averse objective


class _Trials:
    """The trainings of a selection: every policy without every block, and how they trade.

    :param bars: up to the end of the training rows.
    :param config: of the training.
    :param split: its training rows.
    :param features: of the bars, not yet scaled.
    :param blocks: of the training rows, each to be held out.
    :param report: see :func:`select`.
    :param engine: see :func:`select`.
    :param kept: see :func:`select`.
    """

    def __init__(
        self,
        bars: pd.DataFrame,
        config: Config,
        split: Split,
        features: FeatureSet,
        blocks: Sequence[Rows],
        report: ReportProgress | None,
        engine: Engine = SERIAL,
        kept: Kept | None = None,
    ) -> None:
        assert config.selection is not None
        self.config, self.blocks, self.report, self.engine, self.kept = config, blocks, report, engine, kept
        self.stops = stops_of(config.training, config.selection)
        self.periods = config.trading.bars_per_year or periods_per_year(pd.DatetimeIndex(bars.index))
        times = pd.DatetimeIndex(bars.index)
        self.risk = held_out_risk(config.training.risk, times, min(last - first for first, last in blocks))
        self.markets = [prepare_market(bars, config, split, features, block) for block in blocks]
        # The first decision of a block is taken at the close before it.
        self.spans = [(max(first - 1, features.warmup), last) for first, last in blocks]
        self.windows = [BacktestWindow(bars, config.trading, span) for span in self.spans]
        self.bars, asked = bars, config.trading.volatility_power
        if asked is not None:
            self.power, self.scale_core = asked, config.trading.scale_core
        elif self.risk is None:
            self.power, self.scale_core = EVEN_RISK, False
        else:
            self.power, self.scale_core = self._best_power(), True
        scaled = {"volatility_power": self.power, "scale_core": self.scale_core}
        self.markets = [replace(market, trading=market.trading.model_copy(update=scaled)) for market in self.markets]
        self.agent_scale = exposure_scale(bars, self.power)
        self.scale = self.agent_scale if self.scale_core else None  # of the mix
        mixes = [self._held(number, self._mix(number, self.scale), self.scale) for number in range(len(blocks))]
        self.mixes = [np.log1p(account.returns) for account in mixes]
        equal = np.full(len(symbols_of(bars)), 1.0 / len(symbols_of(bars)))
        # Simple returns in excess of cash: of these a constant share of the market is exactly a share. The market is scaled as
        # agents are: to hold less when volatility is high is no merit of theirs.
        self.market_excess = [self._held(number, equal, self.agent_scale).excess for number in range(len(blocks))]
        self.plays: dict[tuple[str, int, int, int], Play] = {}  # by policy, stop, block and seed

    @property
    def policies(self) -> list[str]:
        """The policies that were tried, in order."""
        return list(dict.fromkeys(policy for policy, *_ in self.plays))

    def run(self, trials: Sequence[Trial]) -> None:
        """Train policies without blocks, as far as that is not done."""
        missing = [trial for trial in trials if (trial.policy, self.stops[-1], trial.block, trial.seed) not in self.plays]
        results = {trial: self._kept_plays(trial) for trial in missing}

        def keep(trial: Any, plays: dict[int, Play]) -> list[Trial]:
            if self.kept is not None:
                self.kept.save(trial.name, plays_to_tree(plays))
            results[trial] = plays
            done = len(self.plays) + len(self.stops) * sum(result is not None for result in results.values())
            self._tell(done, trial)
            return []

        waiting = [trial for trial in missing if results[trial] is None]
        if waiting:
            shared = HeldOutMarkets(self.markets, self.spans, self.config, self.stops)
            run_tasks(waiting, self.engine.executor(shared), keep, lambda name, share: None)
        for trial in missing:  # in this order, whatever ended first: sums depend on it
            for stop, play in (results[trial] or {}).items():
                self.plays[trial.policy, stop, trial.block, trial.seed] = play

    def _kept_plays(self, trial: Trial) -> dict[int, Play] | None:
        """Return what a trial returned before the selection was stopped; None if it has to be done."""
        if self.kept is None:
            return None
        assets = len(symbols_of(self.bars))
        forms = Play(*(np.zeros((len(self.windows[number].times), assets)) for number in (trial.block, trial.block - 1)))
        return self.kept.load(trial.name, lambda tree: plays_from_tree(tree, self.stops, forms))

    def _tell(self, done: int, trial: Trial) -> None:
        if self.report is not None:
            block = f"block {trial.block + 1} of {len(self.markets)}"
            self.report(done, self._most_plays(), f"choosing: {trial.policy}, {block}")

    def best_stop(self, policy: str, blocks: Sequence[int]) -> _Score:
        """Return the stop of a policy that is best over some blocks; of equals the earliest."""
        scores = [self.score(policy, stop, blocks) for stop in self.stops]
        return max(scores, key=self._rank)

    def lead(self, policy: str, other: str, blocks: Sequence[int]) -> float:
        """Return the t-statistic of the difference between two policies on some blocks, each at its best stop and scale."""
        first, second = self.best_stop(policy, blocks), self.best_stop(other, blocks)
        if self.risk is None or first.account is None or second.account is None:
            return t_statistic(at_unit_volatility(first.returns) - at_unit_volatility(second.returns))
        return self.risk.lead_at_equal_exposure(first.account, second.account)

    def _rank(self, score: _Score) -> tuple[bool, float]:
        """Return what scores are compared by. Cash is last: at no exposure there is nothing to say about when to hold less."""
        if self.risk is None or score.account is None:
            return True, score.candidate.sharpe
        return not score.account.idle, self.risk.value(score.account.sums)

    def score(self, policy: str, stop: int, blocks: Sequence[int] | None = None) -> _Score:
        """Trade the mean of the seeds' decisions block by block; the account starts anew in each.

        :param blocks: numbers of blocks; None is all that the policy has traded.
        """
        tried = sorted({number for name, _, number, _ in self.plays if name == policy})
        gain = self._gain(policy, stop)
        unseen, seen, alphas, turnover, expected = [], [], [], 0.0, 0.0
        sums: list[Floats] = []
        constant: list[Floats] = []  # the same of the mix, scaled by volatility, with the agent's mean weights
        held: list[Floats] = []
        for number in tried if blocks is None else blocks:
            plays = [play for (*key, _), play in self.plays.items() if key == [policy, stop, number]]
            targets = self._amplified(np.mean([play.held_out for play in plays], axis=0), gain, number)
            history = self.windows[number].trade(policy, targets)
            in_sample = self._amplified(np.mean([play.in_sample for play in plays], axis=0), gain, number - 1)
            trained = self.windows[number - 1].trade(policy, in_sample)
            unseen.append(history)
            alphas.append(beyond(history.excess, self.market_excess[number]))
            seen.append(trained.excess)
            turnover += float(history.turnover.sum())
            if self.risk is None:
                timing = targets - targets.mean(axis=0)  # what is always held is no forecast
                expected += float((timing * self._expected_returns[number]).sum() - history.costs.sum())
            else:
                held.append(targets)
                sums.append(self.risk.sums(np.log1p(history.returns)))
                usual = self._targets(number, np.ones(targets.shape[1]), self.scale).mean(axis=0)
                weights = np.divide(targets.mean(axis=0), usual, out=np.zeros_like(usual), where=usual > 0.0)
                constant.append(self.risk.sums(np.log1p(self._held(number, weights, self.scale).returns)))
        returns = np.concatenate([np.log1p(history.returns) for history in unseen])
        excess = np.concatenate([history.excess for history in unseen])
        known, alpha = np.concatenate(seen), np.concatenate(alphas)
        error = float(alpha.std()) * len(alpha) ** 0.5
        candidate = Candidate(
            policy=policy,
            steps=stop,
            in_sample_sharpe=t_statistic(known) * float(np.sqrt(self.periods / len(known))),
            sharpe=t_statistic(excess) * float(np.sqrt(self.periods / len(returns))),
            growth=float(returns.mean()) * self.periods,
            turnover=turnover * self.periods / len(returns),
            t_statistic=t_statistic(alpha),
            blocks=len(unseen),
            gain=gain,
            expected_t=None if self.risk is not None else expected / error if error > ROUNDING else 0.0,
        )
        if self.risk is None:
            return _Score(candidate, returns, None)
        samples = np.concatenate(sums)
        account = self.risk.account(samples, np.concatenate(held))
        lead = self.risk.lead(samples, np.concatenate(constant))
        return _Score(replace(candidate, objective=self.risk.value(account.sums), t_statistic=lead), returns, account)

    def scaled_mix(self, power: float) -> HeldOutAccount:
        """Return the mix on all held-out blocks, scaled by volatility, as a risk-averse objective sees it."""
        assert self.risk is not None
        scale, blocks = exposure_scale(self.bars, power), range(len(self.windows))
        targets = [self._targets(number, self._mix(number, scale), scale) for number in blocks]
        accounts = [self.windows[number].trade("mix", targets[number]) for number in blocks]
        sums = [self.risk.sums(np.log1p(account.returns)) for account in accounts]
        return self.risk.account(np.concatenate(sums), np.concatenate(targets))

    def _best_power(self) -> float:
        """Return the power by which volatility should scale the mix: a higher one must lead by more than a standard error."""
        assert self.risk is not None
        best, *others = POWERS
        leader = self.scaled_mix(best)
        for power in others:
            account = self.scaled_mix(power)
            if self.risk.lead_at_equal_exposure(account, leader) > 1.0:
                best, leader = power, account
        return best

    def forecast_t(self) -> float:
        """Return the t-statistic of linear forecasts, each fitted without the block that it forecasts.

        They are forecasts of returns in units of their volatility; for a risk-averse agent, of the sizes of returns.
        """
        return t_of_products(np.concatenate([forecast.products for forecast in self._forecasts]))

    @cached_property
    def _forecasts(self) -> list[HeldOutForecast]:
        """By block: a forecast at every decision."""
        forecasts = []
        returns_of = volatility_scaled if self.risk is None else fill_returns
        for market, (first, last) in zip(self.markets, self.spans, strict=True):
            columns, fill = market.features.by_instrument().astype(np.float64), self.config.trading.fill
            seen = np.concatenate([np.arange(*span) for span in market.spans])
            earned = np.concatenate([returns_of(market.bars.iloc[slice(*span)], fill) for span in market.spans])
            unseen_earned = returns_of(market.bars.iloc[first:last], fill)[:-1]  # there is no decision at the last close
            if self.risk is not None:
                usual = np.nanmean(earned, axis=0)
                earned, unseen_earned = np.abs(earned - usual), np.abs(unseen_earned - usual)
            forecasts.append(held_out_forecast(columns[:, seen], earned, columns[:, first : last - 1], unseen_earned))
        return forecasts

    @cached_property
    def _expected_returns(self) -> list[Floats]:
        """By block: the returns after each decision, ``[n, assets]``, as forecast, beyond their mean."""
        right = calibrated(self._forecasts)
        return [
            right * forecast.forecast * forecast.scale * bar_volatility(self.bars.iloc[first:last])[:-1]
            for forecast, (first, last) in zip(self._forecasts, self.spans, strict=True)
        ]

    def _gain(self, policy: str, stop: int) -> float:
        """Return the factor that brings the weights on the held-out blocks to :data:`SIZE`; never below 1.

        Risk-averse agents are compared at equal exposure, and their objective says how much to hold.
        """
        if self.risk is not None:
            return 1.0
        plays = [play.held_out for (name, when, *_), play in self.plays.items() if (name, when) == (policy, stop)]
        exposure = float(np.mean([np.abs(targets).sum(axis=1).mean() for targets in plays])) / self.config.trading.leverage
        return float(np.clip(SIZE / max(exposure, ROUNDING), 1.0, LARGEST_GAIN))

    def _amplified(self, targets: Floats, gain: float, number: int) -> Floats:
        """Return the weights ``[n, assets]`` of a portfolio on a block times a gain, each account within the leverage.

        In a pool every instrument has an account of its own, with an equal share of the portfolio. What is limited is what was
        asked for, before volatility scaled it.
        """
        accounts = targets.shape[1] if self.config.training.pooled else 1
        scale = self._targets(number, np.ones(targets.shape[1]), self.agent_scale)
        asked = np.divide(targets * accounts, scale, out=np.zeros_like(targets), where=scale > 0.0)
        held = capped(gain * asked.reshape(len(targets), accounts, -1), self.config.trading.leverage)
        return scale * held.reshape(targets.shape) / accounts

    def _mix(self, number: int, scale: Floats | None) -> Floats:
        """Return the constant mix that the other blocks support."""
        market = self.markets[number]
        return np.array(constant_mix(market.bars, market.spans, self.config.trading, self.risk, scale))

    def _targets(self, number: int, weights: Floats, scale: Floats | None) -> Floats:
        """Return what constant weights ask for on a block, ``[n, assets]``."""
        first, n = self.spans[number][0], len(self.windows[number].times)
        return np.tile(weights, (n, 1)) if scale is None else weights * scale[first : first + n]

    def _held(self, number: int, weights: Floats, scale: Floats | None) -> AccountHistory:
        """Return the account of constant weights on a block, scaled by volatility."""
        return self.windows[number].trade("mix", self._targets(number, weights, scale))

    def _most_plays(self) -> int:
        """Return the plays of a selection in which every policy is tried on every block."""
        assert self.config.selection is not None
        policies = len(POLICIES) if self.config.training.policy == "auto" else 1
        return policies * len(self.stops) * len(self.markets) * self.config.selection.seeds


def beyond(returns: Floats, market: Floats) -> Floats:
    """Return what an account earned beyond its beta times the market, per bar; their mean is its alpha.

    Every block has a beta of its own: what an agent holds on average is not timing, and it differs from block to block, since
    each agent was trained without its block.
    """
    variance = float(market.var())
    beta = float(((market - market.mean()) * returns).mean()) / variance if variance > ROUNDING**2 else 0.0
    return returns - beta * market


def at_unit_volatility(returns: Floats) -> Floats:
    """Return returns per standard deviation; those that do not move stay as they are."""
    spread = float(returns.std())
    return returns / spread if spread > ROUNDING else returns


def t_statistic(returns: Floats) -> float:
    """Return mean over standard error; 0 for returns that do not move."""
    spread = float(returns.std())
    return float(returns.mean()) / spread * len(returns) ** 0.5 if spread > 1e-12 else 0.0


def save_selection(selection: Selection, path: Path, label: Mapping[str, Any] | None = None) -> None:
    """Write a selection as JSON, with a checksum.

    :param label: JSON values that say what the selection is about.
    """
    write_sealed(path, selection.tree() | ({} if label is None else {"of": label}))


def load_selection(path: Path, label: Mapping[str, Any] | None = None, *, unlabelled: bool = False) -> Selection:
    """Read what :func:`save_selection` wrote.

    :param label: what the selection must be about; None takes any.
    :param unlabelled: take one that does not say what it is about, too.
    :raises ValueError: if the file is damaged or about something else; delete it to have the selection made again.
    """
    try:
        tree = read_sealed(path)
        found = tree.pop("of", None)
        if label is not None and found != label and not (unlabelled and found is None):
            raise ValueError(f"it is about {found}, not about {dict(label)}")
        return Selection.from_tree(tree)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: resume what it belongs to, which makes the selection again") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it to have the selection made again") from None


def selection_table(selections: Mapping[int, Selection | None]) -> pd.DataFrame | None:
    """Return the candidates of all folds, as :class:`tailguard.evaluate.record.Evaluation` keeps them; None without any.

    :param selections: by fold.
    """
    tables = [
        selection.table().assign(
            fold=fold,
            active=selection.active,
            forecast_t=selection.forecast_t,
            mix_growth=selection.mix_growth,
            reason=selection.reason,
        )
        for fold, selection in selections.items()
        if selection is not None
    ]
    return pd.concat(tables, ignore_index=True) if tables else None
