"""Trading environments: one batch of accounts on the accounting kernel, seen as a Gymnasium env or an SB3 VecEnv.

At step t the agent sees the bars up to the close of t and its own account, and names target weights. They are filled by
the rules (by default at the open of t + 1), the account is taken to the close of t + 1, and the reward is the change of the
log of its equity, so that the rewards of an episode add up to ln(V_end / V_start) exactly. Ruin terminates an episode; its
length and the end of the data truncate it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pandas as pd
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from tailguard.envs.return_observer import OnCalendar
from tailguard.envs.vec_env import ArrayVecEnv, Stateful, StepArrays
from tailguard.market.accounting import bar_array, empty_accounts, kernel_rules
from tailguard.market.bars import symbols_of
from tailguard.market.features import FeatureSet, build_features
from tailguard.market.kernel import (
    BEGIN,
    CARRY,
    CASH,
    CLOSE,
    EFFECTIVE,
    END,
    EQUITY,
    FEES,
    MARK,
    NOW,
    PEAK,
    SLIPPAGE,
    TERMINATED,
    TRADE_FIELDS,
    TRUNCATED,
    TURNOVER,
    UNITS,
    WORK_ROWS,
    step_accounts,
)
from tailguard.market.rules import TradingSettings
from tailguard.market.volatility import exposure_scale
from tailguard.periods import DecisionPeriods, Period
from tailguard.validation import build, require


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit integers by SplitMix64, a bijection whose outputs pass tests of randomness."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# First row and last row plus one.
Rows = tuple[int, int]
# The attributes that are the state of a batch.
STATE_ARRAYS = ("seeds", "episodes", "clock", "accounts")


def _pairs(span: Rows | Sequence[Rows]) -> Sequence[Rows]:
    """Return a list of spans, whether one was given or several."""
    return [span] if isinstance(span[0], int | np.integer) else span  # type: ignore[list-item, return-value]


class BatchStep(NamedTuple):
    """The effect of one bar on B accounts.

    :param obs: ``[B, D]`` observations after it, before any restart.
    :param rewards: ``[B]`` changes of log equity.
    :param terminated: ``[B]`` ruined.
    :param truncated: ``[B]`` at the end of the episode or of the data.
    :param effective: ``[B]`` false where trading was not allowed.
    :param endings: number of episodes that ended.
    :param idle: number of accounts that were not allowed to trade.
    """

    obs: NDArray[np.float32]
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    effective: NDArray[np.bool_]
    endings: int
    idle: int


class AccountBatch:
    """B accounts that trade the same bars in episodes of their own. Features and bars are shared, never copied.

    The start of episode k of an account is a hash of (its seed, k): there is no generator to save, and an account behaves the
    same alone and in a batch.

    `scale` is the share of what is asked for that is held after each close, ``[rows, assets]``, or None for all.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param settings: rules and episode shape.
    :param size: number of accounts B.
    :param features: features of the market in the observation; by default :func:`build_features` of the bars. With those of a
        pool each account trades one of the symbols, drawn with the start of its episode. Rows then count on from one symbol to
        the next, while `span` and `no_trade` name rows of the table.
    :param no_trade: ``[T]`` true where a decision at the close of that bar may not trade: the action is ignored and the
        sample gets weight 0.
    :param span: first and last-plus-one row that episodes may use, or several such pairs: an episode stays inside one of them.
        Earlier rows still serve as history.
    """

    def __init__(
        self,
        bars: pd.DataFrame,
        settings: TradingSettings,
        size: int,
        features: FeatureSet | None = None,
        no_trade: Sequence[bool] | NDArray[np.bool_] | None = None,
        span: Rows | Sequence[Rows] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"the number of envs must be at least 1, got {size}")
        self.settings, self.size = settings, size
        self.features = build_features(bars) if features is None else features
        if len(self.features) != len(bars):
            raise ValueError(f"features have {len(self.features)} rows, the bars {len(bars)}: build them from these bars")
        instruments = self.features.instruments
        if instruments > 1 and instruments != len(symbols_of(bars)):
            raise ValueError(
                f"features of {instruments} instruments, bars of {len(symbols_of(bars))}: build them from these bars"
            )
        if not self.features.time.equals(bars.index):
            raise ValueError("the times of the features are not those of the bars: build them from these bars")
        self.no_trade = np.zeros(len(bars), bool) if no_trade is None else np.asarray(no_trade, bool)
        if self.no_trade.shape != (len(bars),):
            raise ValueError(f"no_trade must have the shape {(len(bars),)} of the bars, got {self.no_trade.shape}")
        self.bars = bar_array(bars, settings)
        self.scale = exposure_scale(bars, settings.volatility_power)
        if instruments > 1:  # one after another, as the features are
            self.bars = np.ascontiguousarray(self.bars.swapaxes(0, 1)).reshape(-1, 1, self.bars.shape[2])
            self.no_trade = np.tile(self.no_trade, instruments)
            self.scale = None if self.scale is None else self.scale.T.reshape(-1, 1)
        self.assets = self.bars.shape[1]
        legal = f"empty or one weight for each of {self.assets} assets"
        require(len(settings.core) in (0, self.assets), "trading.core", settings.core, legal)
        self.observation_size = self.features.values.shape[1] + 2 * self.assets + 1
        self.starts, self.ends = self._starts(len(bars), span)
        self.seeds: NDArray[np.uint64] = np.zeros(size, np.uint64)
        self.episodes: NDArray[np.uint64] = np.zeros(size, np.uint64)
        self.clock = np.zeros((3, size), np.int64)
        self.accounts = empty_accounts(size, self.assets)
        self._work = np.empty((WORK_ROWS, self.assets))
        self._constants = (
            settings.lowest_weight, settings.leverage, settings.fill == "close",
            TRADE_FIELDS[settings.fill], self.no_trade, self.bars, self.features.values,
            kernel_rules(settings, self.assets), settings.cash,
        )  # fmt: skip

    def _starts(self, rows: int, span: Rows | Sequence[Rows] | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return every row that an episode may begin at, and the last row of its span for each."""
        starts, ends = [], []
        for begin, stop in _pairs((0, rows) if span is None else span):
            if not 0 <= begin < stop <= rows:
                raise ValueError(f"span must be rows (first, last + 1) within (0, {rows}), got {(begin, stop)}")
            first, last = max(begin, self.features.warmup), stop - 1
            length = self.settings.episode_length
            steps = length or 1
            if last - first < steps:
                raise ValueError(
                    f"not enough bars: episodes of {steps} steps need {steps + 1} rows, and rows {first} to {last} "
                    f"remain after a warm-up of {self.features.warmup}; use more bars, shorter look-backs or shorter episodes"
                )
            last_start = last - length if length is not None and self.settings.random_start else first
            for offset in range(0, rows * self.features.instruments, rows):
                starts.append(offset + np.arange(first, last_start + 1))
                ends.append(np.full(len(starts[-1]), offset + last))
        return np.concatenate(starts), np.concatenate(ends)

    def reseed(self, index: int, seed: int) -> None:
        """Give account `index` a seed; its episodes count from 0 again."""
        self.seeds[index] = np.uint64(seed % 2**64)
        self.episodes[index] = 0

    def restart(self, which: NDArray[np.intp], obs: NDArray[np.float32]) -> None:
        """Begin a new episode in the accounts `which` and write their observations into rows of `obs`."""
        draws = _mix(_mix(self.seeds[which]) ^ self.episodes[which])
        self.episodes[which] += np.uint64(1)
        chosen = (draws % np.uint64(len(self.starts))).astype(np.int64)
        begin, last = self.starts[chosen], self.ends[chosen]
        length = self.settings.episode_length
        end = last if length is None else np.minimum(begin + length, last)
        self.start_at(which, begin, end, obs)

    def start_at(
        self, which: NDArray[np.intp], begin: NDArray[np.int64], end: NDArray[np.int64], obs: NDArray[np.float32]
    ) -> None:
        """Begin an episode in the accounts `which`, in cash, and write their observations into rows of `obs`.

        :param begin: row of the first decision of each.
        :param end: row at which each episode is truncated.
        """
        self.clock[NOW, which], self.clock[BEGIN, which], self.clock[END, which] = begin, begin, end
        self.accounts[which] = 0.0
        for column in (CASH, EQUITY, PEAK):
            self.accounts[which, column] = self.settings.cash
        width = self.features.values.shape[1]
        obs[which, :width] = self.features.values[begin]
        obs[which, width:] = 0.0

    def step(self, actions: NDArray[Any]) -> BatchStep:
        """Trade one bar in every account; nothing is restarted."""
        actions = np.asarray(actions, dtype=np.float64)
        if actions.shape != (self.size, self.assets):
            raise ValueError(f"actions must have the shape {(self.size, self.assets)}, got {actions.shape}")
        actions = self.settings.steered(actions, self.present_scale)
        obs, rewards = np.empty((self.size, self.observation_size), np.float32), np.empty(self.size)
        flags = np.empty((3, self.size), np.bool_)
        bad, endings, idle = step_accounts(
            actions, *self._constants, self.accounts, self.clock, self._work, obs, rewards, flags
        )  # fmt: skip
        if bad >= 0:
            raise ValueError(f"the action of env {bad} is not finite: {actions[bad]}")
        return BatchStep(obs, rewards, flags[TERMINATED], flags[TRUNCATED], flags[EFFECTIVE], endings, idle)

    def progress(self, which: NDArray[np.intp]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the sum of rewards and the number of steps since the episodes of `which` began."""
        returns = np.log(self.accounts[which, EQUITY] / self.settings.cash)
        return returns, self.clock[NOW, which] - self.clock[BEGIN, which]

    @property
    def rows(self) -> NDArray[np.int64]:
        """``[B]`` the row at whose close each account stands; those of a pool count on from one symbol to the next."""
        rows: NDArray[np.int64] = self.clock[NOW]
        return rows

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """``[B]`` the row of the first decision of each running episode."""
        rows: NDArray[np.int64] = self.clock[BEGIN]
        return rows

    @property
    def present_scale(self) -> NDArray[np.float64] | None:
        """``[B, assets]`` the share of what each account asks for that is held now; None is all."""
        return None if self.scale is None else self.scale[self.rows]

    def decision_periods(self, period: Period) -> DecisionPeriods:
        """Return the periods of the decisions at the close of every row, symbol after symbol."""
        periods, symbols = period.decisions(self.features.time), self.features.instruments
        offsets = np.repeat(len(self.features) * np.arange(symbols), len(self.features))
        begun = np.tile(periods.begun, symbols)
        begun = np.where(begun >= 0, begun + offsets, -1)
        return DecisionPeriods(np.tile(periods.number, symbols), np.tile(periods.left, symbols), begun)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes from step to step."""
        return {name: getattr(self, name).copy() for name in STATE_ARRAYS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on the same bars.

        :raises ValueError: for accounts of another number, or that stand where there are no bars; the kernel would read there.
        """
        for name in STATE_ARRAYS:
            saved, present = state[name], getattr(self, name)
            require(saved.shape == present.shape, f"the saved {name}", saved.shape, f"an array of shape {present.shape}")
        now, begin, end = (state["clock"][row] for row in (NOW, BEGIN, END))
        ordered = bool(((begin >= 0) & (begin <= now) & (now <= end) & (end < len(self.features.values))).all())
        require(ordered, "the saved clock", state["clock"].tolist(), f"rows in order, below {len(self.features.values)}")
        for name in STATE_ARRAYS:
            getattr(self, name)[:] = state[name]

    def info(self, index: int) -> dict[str, Any]:
        """Return the state of one account and the costs of its last bar."""
        row, account = int(self.clock[NOW, index]), self.accounts[index]
        units = account[UNITS : UNITS + self.assets].copy()
        return {
            "time": self.features.time[row % len(self.features)],
            "row": row,
            "equity": float(account[EQUITY]),
            "cash": float(account[CASH]),
            "units": units,
            "weights": units * self.bars[row, :, MARK] / account[EQUITY],
            "fees": float(account[FEES]),
            "slippage": float(account[SLIPPAGE]),
            "carry": float(account[CARRY]),
            "turnover": float(account[TURNOVER]),
            "missing_bar": bool(np.isnan(self.bars[row, :, CLOSE]).any()),
        }

    def observation_space(self) -> spaces.Box:
        """Return the space of features, then weights, unrealised gains and drawdown of the account."""
        largest = float(np.finfo(np.float32).max)  # environment checkers warn about infinite bounds
        return spaces.Box(-largest, largest, (self.observation_size,), np.float32)

    def action_space(self) -> spaces.Box:
        """Return [-1, 1] per asset, which is mapped onto the whole range of weights that the rules allow."""
        return spaces.Box(-1.0, 1.0, (self.assets,), np.float32)


class _TradesOnCalendar(OnCalendar):
    """The place of a batch of accounts in the calendar."""

    batch: AccountBatch

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows at whose close the accounts stand, ``[B]``."""
        return self.batch.rows

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """The row of the first decision of each running episode, ``[B]``."""
        return self.batch.first_rows

    def decision_periods(self, period: Period) -> DecisionPeriods:
        """Return the periods of the decisions at the close of every row."""
        return self.batch.decision_periods(period)


class TradingVecEnv(ArrayVecEnv, _TradesOnCalendar, Stateful):
    """Many accounts on the same bars as one SB3 ``VecEnv``.

    Besides the SB3 interface, :meth:`step_arrays` returns terminations, truncations and final observations as arrays.
    Environment i of a batch with seed s is the :class:`TradingEnv` with seed s + i, bit for bit.

    :param bars: a table from :func:`tailguard.market.load_bars`, one symbol or several with shared cash.
    :param n_envs: number of accounts.
    :param seed: seed of the first account; the others count on from it.
    :param features: see :class:`AccountBatch`.
    :param no_trade: see :class:`AccountBatch`.
    :param span: see :class:`AccountBatch`.
    :param settings: fields of :class:`TradingSettings`: ``episode_length``, ``fee``, ``slippage``, ``fill`` and so on.
    """

    def __init__(
        self,
        bars: pd.DataFrame,
        *,
        n_envs: int = 1,
        seed: int | None = None,
        features: FeatureSet | None = None,
        no_trade: Sequence[bool] | NDArray[np.bool_] | None = None,
        span: Rows | Sequence[Rows] | None = None,
        **settings: Any,
    ) -> None:
        self.batch = AccountBatch(bars, build(TradingSettings, settings), n_envs, features, no_trade, span)
        self._episode_returns, self._episode_lengths = np.zeros(n_envs), np.zeros(n_envs, np.int64)
        super().__init__(n_envs, self.batch.observation_space(), self.batch.action_space())
        self._begun = False
        self._everyone = np.arange(n_envs)
        self._none_ended = np.empty(0, np.intp)
        self._no_obs = np.empty((0, self.batch.observation_size), np.float32)
        self.seed(int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed)

    def reset(self) -> VecEnvObs:
        """Start a new episode everywhere; the first one after :meth:`seed` is always the same."""
        for index, seed in enumerate(self._seeds):
            if seed is not None:
                self.batch.reseed(index, seed)
        self._reset_seeds()
        self._begun = True
        obs = np.empty((self.num_envs, self.batch.observation_size), np.float32)
        self.batch.restart(self._everyone, obs)
        return obs

    def step_arrays(self, actions: NDArray[Any]) -> StepArrays:
        """Step all accounts; those whose episode ends begin a new one."""
        if not self._begun:
            raise ValueError("call reset() before step()")
        obs, rewards, terminated, truncated, effective, endings, idle = self.batch.step(actions)
        ended, final_obs = self._none_ended, self._no_obs
        if endings:
            ended = np.flatnonzero(terminated | truncated)
            final_obs = obs[ended]
            self._episode_returns[ended], self._episode_lengths[ended] = self.batch.progress(ended)
            self.batch.restart(ended, obs)
        weights = effective.astype(np.float32) if idle else None
        return StepArrays(obs, rewards, terminated, truncated, ended, final_obs, weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the row, the money and the episode of every account."""
        return {"begun": self._begun, **self.batch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on the same bars."""
        self.batch.load_state_dict(state)
        self._begun = state["begun"]
        self._reset_seeds()  # a seed that waits for a reset would start the episodes anew

    def episode_info(self, index: int) -> dict[str, Any]:
        """Return the return and the length of the episode that has just ended, under SB3's keys."""
        return {"episode": {"r": float(self._episode_returns[index]), "l": int(self._episode_lengths[index])}}


class TradingEnv(gym.Env[NDArray[Any], NDArray[Any]], _TradesOnCalendar):
    """One account as a Gymnasium environment, registered as ``tailguard/Trading-v0``.

    :param bars: a table from :func:`tailguard.market.load_bars`, one symbol or several with shared cash.
    :param features: see :class:`AccountBatch`.
    :param no_trade: see :class:`AccountBatch`.
    :param span: see :class:`AccountBatch`.
    :param settings: fields of :class:`TradingSettings`: ``episode_length``, ``fee``, ``slippage``, ``fill`` and so on.
    """

    def __init__(
        self,
        bars: pd.DataFrame,
        *,
        features: FeatureSet | None = None,
        no_trade: Sequence[bool] | NDArray[np.bool_] | None = None,
        span: Rows | Sequence[Rows] | None = None,
        **settings: Any,
    ) -> None:
        self.batch = AccountBatch(bars, build(TradingSettings, settings), 1, features, no_trade, span)
        self.observation_space: spaces.Space[NDArray[Any]] = self.batch.observation_space()
        self.action_space: spaces.Space[NDArray[Any]] = self.batch.action_space()
        self._seeded, self._over = False, False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode. With a seed this and all episodes after it are determined by the seed."""
        require(not options, "options", options, "None, since no options exist")
        super().reset(seed=seed)
        if seed is not None:
            self.batch.reseed(0, seed)
        elif not self._seeded:
            self.batch.reseed(0, int(self.np_random.integers(2**63)))
        self._seeded, self._over = True, False
        obs = np.empty((1, self.batch.observation_size), np.float32)
        self.batch.restart(np.zeros(1, np.intp), obs)
        return obs[0], self.batch.info(0)

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Trade one bar; `info` describes the account after it."""
        if not self._seeded:
            raise ValueError("call reset() before step()")
        if self._over:
            raise ValueError("the episode is over: call reset()")
        step = self.batch.step(np.atleast_2d(action))
        self._over = step.endings > 0
        info = self.batch.info(0)
        if step.idle:
            info |= {"no_trade": True, "sample_weight": 0.0}
        return step.obs[0], float(step.rewards[0]), bool(step.terminated[0]), bool(step.truncated[0]), info
