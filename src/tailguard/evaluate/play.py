"""The one loop that plays an agent: accounts side by side, each over a span of bars, with the agent's most likely actions.

Training tables, evaluations, attacks and the scores of a population come from :func:`play`. An agent that trades live gets its
bars one by one and cannot be played in a loop, but takes every step with the same :class:`AgentSession`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.envs.return_observer import ReturnRule, RunningReturn
from tailguard.evaluate.stats.series import Floats
from tailguard.market.env import AccountBatch, BatchStep
from tailguard.market.features import FeatureSet
from tailguard.market.kernel import EQUITY
from tailguard.market.rules import TradingSettings, capped
from tailguard.periods import DecisionPeriods, Period
from tailguard.ppo.config import RiskConfig
from tailguard.validation import require

# How progress is reported everywhere: what is done, how much there is in all, and a line about it.
ReportProgress = Callable[[int, int, str], None]
# Bars between two reports of a loop.
REPORT_INTERVAL = 100


class Agent(Protocol):
    """Anything that acts as a Stable-Baselines3 model does."""

    def predict(  # noqa: D102
        self,
        observation: NDArray[Any],
        state: tuple[NDArray[Any], ...] | None,
        episode_start: NDArray[Any] | None,
        deterministic: bool,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]: ...


class Trajectory(NamedTuple):
    """An agent's pass over the n bars of a span, after w bars of warm-up.

    :param targets: ``[n, assets]`` weights that the agent asked for at the close before each bar; 0 after a ruin.
    :param observations: ``[w + n, D]`` that it decided by, warm-up included.
    :param rewards: ``[w + n]`` changes of the log equity of the account that it traded, which has run since the warm-up.
    :param equity: ``[w + n + 1]`` of that account, the cash that it started with first.
    :param starts: ``[w + n]`` true where the recurrent state was reset.
    :param warmup: w.
    :param ruined: true if the account was liquidated. Observations, rewards and equity end there.
    """

    targets: Floats
    observations: NDArray[np.float32]
    rewards: Floats
    equity: Floats
    starts: NDArray[np.bool_]
    warmup: int
    ruined: bool


class AgentSession:
    """An agent at work in B accounts: it carries the recurrent state and the running returns from bar to bar.

    :param agent: the model.
    :param n_accounts: B. Agents that must decide alike to the last bit must be played with the same B, since the rounding of a
        matrix product may depend on its number of rows.
    :param returns: see :func:`play`.
    """

    def __init__(self, agent: Agent, n_accounts: int, returns: ReturnRule | None) -> None:
        self.agent = agent
        self._running = None if returns is None else RunningReturn(n_accounts, returns)
        self._state: tuple[NDArray[Any], ...] | None = None
        self.actions: NDArray[Any] = np.empty(0)

    def set_calendar(self, periods_of: Callable[[Period], DecisionPeriods]) -> None:
        """Take over the calendar of a market, or of the same one with more bars; only returns by the calendar need it.

        :param periods_of: returns the periods of the decisions at the close of every row.
        """
        period = None if self._running is None else self._running.rule.period
        if self._running is not None and period is not None and period.unit:
            self._running.calendar = periods_of(period)

    def restart_returns(self, which: NDArray[np.bool_], rows: NDArray[np.int64]) -> None:
        """Count the running return from here on in some accounts.

        :param which: ``[B]`` true for these.
        :param rows: ``[B]`` at whose close the accounts stand.
        """
        if self._running is not None:
            self._running.begin(which, rows)

    def act(self, obs: NDArray[np.float32], starts: NDArray[np.bool_], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Choose the actions of the next step, and return the observations ``[B, D]`` that they were chosen by.

        :param obs: ``[B, d]`` of the accounts, without the running return.
        :param starts: ``[B]`` true where recurrent state and running return start anew.
        :param rows: ``[B]`` at whose close the accounts stand.
        """
        self.restart_returns(starts, rows)
        observed = obs if self._running is None else np.concatenate((obs, self._running.columns()), axis=1)
        self.actions, self._state = self.agent.predict(observed, self._state, starts, True)
        return observed

    def step(self, accounts: AccountBatch) -> BatchStep:
        """Trade the chosen actions over one bar."""
        step = accounts.step(self.actions)
        self.add_rewards(step.rewards)
        return step

    def add_rewards(self, rewards: Floats) -> None:
        """Add what the accounts ``[B]`` have earned over one bar to their running returns."""
        if self._running is not None:
            self._running.add(rewards)


class LearntAgent(Protocol):
    """An agent that was trained by :class:`DistributionalPPO`, alone or as part of an ensemble."""

    @property
    def gamma(self) -> float: ...  # noqa: D102
    @property
    def risk_config(self) -> RiskConfig: ...  # noqa: D102


def return_rule_of(model: LearntAgent) -> ReturnRule | None:
    """Return how the running return is counted that a return-augmented agent must see; None for all others."""
    risk = model.risk_config
    return ReturnRule(float(model.gamma), risk.counted_over) if risk.return_augmented else None


def play(
    agent: Agent,
    bars: pd.DataFrame,
    features: FeatureSet,
    settings: TradingSettings,
    spans: Sequence[tuple[int, int]],
    *,
    returns: ReturnRule | None = None,
    warmup: int = 0,
    report: Callable[[int], None] | None = None,
) -> list[Trajectory]:
    """Trade one account over each span, all at the same time.

    Through the warm-up the agent trades an account that nobody counts, so that its recurrent state and what it sees of itself
    are those of an agent at work. The running return is counted from the first row of the span, where a period that is a number
    of bars begins.

    :param agent: the model.
    :param bars: the whole table; rows before a span serve as history for features.
    :param features: what the agent observes.
    :param settings: the rules it was trained under.
    :param spans: B times first and last-plus-one row; the first decision is taken at the close of the first.
    :param returns: for return-augmented agents: how their running return is counted, see :func:`return_rule_of`.
    :param warmup: rows before a span over which the recurrent state is filled; as many as there are features for. 64 is usual.
    :param report: called now and then with the bars done.
    """
    require(warmup >= 0, "warmup", warmup, "at least 0")
    first, last = (np.array(rows, np.int64) for rows in zip(*spans, strict=True))
    usable = first // len(bars) * len(bars) + features.warmup  # of the instrument that a row belongs to
    too_early = first[first < usable]
    require(not len(too_early), "the first row of span", too_early[:1], f"at least {features.warmup}, where features begin")
    inside = bool((last - first >= 2).all() and (last <= len(bars) * (1 + first // len(bars))).all())
    inside &= bool((last <= len(features.values)).all())
    require(inside, "spans", list(spans), f"at least two rows each, within {len(bars)} bars")
    n, begin = len(spans), np.maximum(first - warmup, usable)
    rules = settings.model_copy(update={"episode_length": None, "random_start": False})
    accounts, session = AccountBatch(bars, rules, n, features), AgentSession(agent, n, returns)
    session.set_calendar(accounts.decision_periods)
    obs = np.empty((n, accounts.observation_size), np.float32)
    accounts.start_at(np.arange(n), begin, last - 1, obs)
    row, starts, playing, ruined = begin.copy(), np.ones(n, np.bool_), np.ones(n, np.bool_), np.zeros(n, np.bool_)
    steps: list[_Step] = []
    while playing.any():
        session.restart_returns(row == first, accounts.rows)
        observed = session.act(obs, starts, accounts.rows)
        scale = accounts.present_scale
        step = session.step(accounts)
        steps.append(
            _Step(
                observed,
                starts,
                target_weights(session.actions, rules, scale),
                step.rewards,
                accounts.accounts[:, EQUITY].copy(),
                playing.copy(),
            )
        )
        ruined |= playing & step.terminated & (row >= first)
        playing &= ~(ruined | step.truncated)
        row += 1
        obs, starts = step.obs, step.terminated | step.truncated
        if starts.any():
            # A ruin in the warm-up is forgotten: another account. Accounts that are done start over, and nobody counts them.
            which = np.flatnonzero(starts)
            accounts.start_at(which, np.where(playing, row, begin)[which], last[which] - 1, obs)
        if report is not None and (len(steps) % REPORT_INTERVAL == 0 or not playing.any()):
            report(len(steps))
    lengths = np.sum([step.playing for step in steps], axis=0)
    columns = _Step(*(np.stack(column) for column in zip(*steps, strict=True)))
    return [
        _trajectory(columns, i, int(lengths[i]), int(first[i] - begin[i]), int(last[i] - 1 - first[i]), rules, bool(ruined[i]))
        for i in range(n)
    ]


class _Step(NamedTuple):
    """One step of all accounts, ``[B, ...]``; or all steps, ``[T, B, ...]``."""

    observations: NDArray[np.float32]
    starts: NDArray[np.bool_]
    weights: Floats
    rewards: Floats
    equity: Floats
    playing: NDArray[np.bool_]


def _trajectory(
    columns: _Step, account: int, length: int, warmup: int, bars: int, settings: TradingSettings, ruined: bool
) -> Trajectory:
    """Return the pass of one account.

    :param length: steps until it was done.
    :param warmup: steps that are not counted.
    :param bars: of its span.
    """
    weights = columns.weights[warmup:length, account]
    targets = np.zeros((bars, weights.shape[1]))
    targets[: len(weights)] = weights
    return Trajectory(
        targets=targets,
        observations=columns.observations[:length, account],
        rewards=columns.rewards[:length, account],
        equity=np.append(settings.cash, columns.equity[:length, account]),
        starts=columns.starts[:length, account],
        warmup=warmup,
        ruined=ruined,
    )


def target_weights(actions: NDArray[Any], settings: TradingSettings, scale: Floats | None = None) -> Floats:
    """Return the weights that actions in [-1, 1] per asset ask for, as the environment understands them.

    :param actions: ``[..., assets]``.
    :param settings: with `leverage`, `long_only`, `core` and `active`.
    :param scale: ``[..., assets]`` share that is held after the same closes, see :attr:`AccountBatch.scale`; None is all.
    """
    low, high = settings.lowest_weight, settings.leverage
    steered = settings.steered(np.asarray(actions, np.float64), scale)
    weights = low + 0.5 * (np.clip(steered, -1.0, 1.0) + 1.0) * (high - low)
    return capped(weights, high)
