"""The running return as part of the observation (return augmentation).

The action with the best CVaR depends on what has been earned already: an account that is ahead can take risks that one that is
behind cannot. So risk-averse (CVaR) agents see, beside the observation, what has been earned so far in the period that their
tail is about. That is either the episode, whose rewards are discounted, and the second column is the discount of the next one;
or a *period*, a number of steps or a time of the calendar, whose rewards are added up, and the second column is the share of it
that is left. Periods end inside of episodes: the return starts anew, and nothing else. Where one agent is conditioned on alpha,
a third column is the alpha of the episode.

An episode may begin inside a month. Its first return is that of a part of the month: a state to learn from like any other,
since trading may begin inside a month as well, but no sample of a month's return. Such steps are marked (`part_period`).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize, is_vecenv_wrapped
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from tailguard.envs.vec_env import ArrayStepper, Stateful, StepArrays, step_with_arrays
from tailguard.periods import DecisionPeriods, Period
from tailguard.validation import require


class ReturnRule(NamedTuple):
    """The way in which returns are counted.

    :param gamma: discount of an episode's rewards; those of a period are not discounted.
    :param period: what they are counted over; None is the episode.
    """

    gamma: float
    period: Period | None = None

    @classmethod
    def of(cls, gamma: float, period: int | str | None) -> Self:
        """Return the rule with a period as settings give it."""
        return cls(gamma, None if period is None else Period.parse(period))


class OnCalendar:
    """Environments whose steps are bars with times: they know where in the calendar they stand."""

    @property
    @abstractmethod
    def rows(self) -> NDArray[np.int64]:
        """``[B]`` the row of the table of bars at whose close each environment stands."""

    @property
    @abstractmethod
    def first_rows(self) -> NDArray[np.int64]:
        """``[B]`` the row of the first decision of each running episode."""

    @abstractmethod
    def decision_periods(self, period: Period) -> DecisionPeriods:
        """Return the periods of the decisions at the close of every row."""


class RunningReturn:
    """Returns of B environments since their episode or period began, and the discount or the share of the period to come.

    :param n_envs: B.
    :param rule: how returns are counted.
    :param calendar: periods of the rows of a market; only for a period of the calendar.
    """

    def __init__(self, n_envs: int, rule: ReturnRule, calendar: DecisionPeriods | None = None) -> None:
        require(0.0 < rule.gamma <= 1.0, "gamma", rule.gamma, "in (0, 1]")
        self.rule, self.calendar = rule, calendar
        self.total = np.zeros(n_envs)
        # The second column: discount of the next reward, or share of the period that is left.
        self.second = np.ones(n_envs)
        self.clock = np.zeros(n_envs, np.int64)  # steps since the period began, or rows of the market

    def add(self, rewards: NDArray[np.float64]) -> NDArray[np.bool_] | None:
        """Add the rewards of one step.

        :returns: ``[B]`` true where a period has ended with it, and a new one begun; None where returns have no period.
        """
        period, ended = self.rule.period, np.zeros(len(rewards), np.bool_)
        if period is None:
            self.total += self.second * rewards
            # Smaller discounts than this would leave the range of float32, in which observations travel.
            np.maximum(self.second * self.rule.gamma, 1e-30, out=self.second)
            return None
        self.total += rewards
        if self.calendar is None:
            self.clock += 1
            np.equal(self.clock, period.count, out=ended)
            self.clock[ended] = 0
            self.second = (period.count - self.clock) / period.count
        else:
            np.not_equal(self.calendar.number[self.clock + 1], self.calendar.number[self.clock], out=ended)
            self.clock += 1
            self.second = self.calendar.left[self.clock]
        self.total[ended] = 0.0
        return ended

    def begin(self, which: Any, rows: NDArray[np.int64] | None = None) -> None:
        """Count from here on in some environments.

        :param which: a mask or indices of them.
        :param rows: ``[B]`` of all environments; only for a period of the calendar.
        """
        self.total[which], self.second[which], self.clock[which] = 0.0, 1.0, 0
        if self.calendar is not None:
            assert rows is not None
            self.clock[which] = rows[which]
            self.second[which] = self.calendar.left[rows[which]]

    def part_periods(self, first_rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return ``[B]`` true where the present period of the calendar had begun before the episode.

        :param first_rows: ``[B]`` row of the first decision of each episode.
        """
        assert self.calendar is not None
        return np.asarray(first_rows > self.calendar.begun[self.clock])

    def columns(self) -> NDArray[np.float32]:
        """Return ``[B, 2]``: the return so far, and the discount or the share of the period that is left."""
        return np.column_stack((self.total, self.second)).astype(np.float32)


class ReturnObserver(VecEnvWrapper, ArrayStepper, Stateful):
    """A wrapper that appends the running return to the observations, and alpha where several are given.

    :param venv: the environments, with a one-dimensional Box of observations.
    :param gamma: discount of the agent; only the returns of episodes are discounted.
    :param alphas: levels of CVaR, one of which is drawn for each episode; None appends none.
    :param seed: random seed of these draws.
    :param period: what the return is counted over, as in the agent's settings: a number of steps, or, on a
        :class:`tailguard.TradingVecEnv`, a time of the calendar such as ``1M``. None is the episode.
    """

    def __init__(
        self,
        venv: VecEnv,
        gamma: float = 1.0,
        alphas: Sequence[float] | None = None,
        seed: int | None = None,
        period: int | str | None = None,
    ) -> None:
        super().__init__(venv, augmented_space(venv.observation_space, alphas is not None))
        rule = ReturnRule.of(gamma, period)
        self._market = _on_calendar(_innermost(venv), rule)
        calendar = None if self._market is None or rule.period is None else self._market.decision_periods(rule.period)
        self.running = RunningReturn(venv.num_envs, rule, calendar)
        self.generator = np.random.default_rng(seed)
        self.set_alphas(alphas)

    def set_alphas(self, alphas: Sequence[float] | None) -> None:
        """Draw the alphas of coming episodes from these, and new ones for the running episodes."""
        self.alphas = None if alphas is None else np.asarray(alphas, np.float64)
        self.alpha = self._draw(self.num_envs)

    def serves(self, rule: ReturnRule, alphas: Sequence[float] | None) -> bool:
        """Return True if the wrapper has these settings."""
        same = (self.alphas is None) == (alphas is None) and (alphas is None or np.array_equal(cast(Any, self.alphas), alphas))
        own = self.running.rule
        return own.period == rule.period and (own.gamma == rule.gamma or rule.period is not None) and bool(same)

    def reset(self) -> VecEnvObs:
        """Start all episodes."""
        obs = cast(NDArray[Any], self.venv.reset())
        self.running.begin(slice(None), self._rows())
        self.alpha = self._draw(self.num_envs)
        return self._with_running_return(obs, slice(None))

    def step_wait(self) -> VecEnvStepReturn:
        """Step as SB3 does, with final observations and the ends of periods in the dictionaries."""
        part = self._part_periods()
        obs, rewards, dones, infos = self.venv.step_wait()
        over = self.running.add(np.asarray(rewards, np.float64))
        for key, which in (("period_ended", over), ("part_period", part)):
            for i in () if which is None else np.flatnonzero(which):
                infos[i] = {**infos[i], key: True}
        ended = np.flatnonzero(dones)
        if len(ended):
            finals = self._with_running_return(np.stack([infos[i]["terminal_observation"] for i in ended]), ended)
            for i, final in zip(ended, finals, strict=True):
                infos[i] = {**infos[i], "terminal_observation": final}
            self._begin(ended)
        return self._with_running_return(np.asarray(obs), slice(None)), rewards, dones, infos

    def step_with_arrays(self, actions: NDArray[Any]) -> tuple[StepArrays, list[dict[str, Any]]]:
        """Step and return arrays, with the dictionaries of the wrapped environments."""
        part = self._part_periods()
        step, infos = step_with_arrays(self.venv, actions)
        step = step._replace(period_ended=self.running.add(step.rewards), part_period=part)
        if len(step.ended):
            step = step._replace(final_obs=self._with_running_return(step.final_obs, step.ended))
            self._begin(step.ended)
        return step._replace(obs=self._with_running_return(step.obs, slice(None))), infos

    def state_dict(self) -> dict[str, Any]:
        """Return the returns and alphas of the running episodes, and the state of the generator."""
        state: dict[str, Any] = {
            "total": self.running.total.copy(),
            "discount": self.running.second.copy(),
            "alpha": self.alpha.copy(),
            "random": self.generator.bit_generator.state,
        }
        return state if self.running.rule.period is None else state | {"clock": self.running.clock.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        running, calendar = self.running, self.running.calendar
        running.total, running.second = state["total"].copy(), state["discount"].copy()
        if running.rule.period is not None:
            limit = running.rule.period.count if calendar is None else len(calendar.number)
            inside = bool(((state["clock"] >= 0) & (state["clock"] < limit)).all())
            require(inside, "the saved clock of the periods", state["clock"].tolist(), f"at least 0 and below {limit}")
            running.clock = state["clock"].copy()
        self.alpha = state["alpha"].copy()
        self.generator.bit_generator.state = state["random"]

    def _begin(self, ended: NDArray[np.intp]) -> None:
        self.running.begin(ended, self._rows())
        self.alpha[ended] = self._draw(len(ended))

    def _part_periods(self) -> NDArray[np.bool_] | None:
        """Return where the coming step belongs to a part of a period; asked before the step, which may begin an episode."""
        return None if self._market is None else self.running.part_periods(self._market.first_rows)

    def _rows(self) -> NDArray[np.int64] | None:
        return None if self._market is None else self._market.rows

    def _draw(self, n: int) -> NDArray[np.float64]:
        return np.ones(n) if self.alphas is None else self.generator.choice(self.alphas, n)

    def _with_running_return(self, obs: NDArray[Any], which: Any) -> NDArray[np.float32]:
        own = obs.shape[1]
        augmented = np.empty((len(obs), *cast(tuple[int, ...], self.observation_space.shape)), np.float32)
        augmented[:, :own] = obs
        augmented[:, own], augmented[:, own + 1] = self.running.total[which], self.running.second[which]
        if self.alphas is not None:
            augmented[:, own + 2] = self.alpha[which]
        return augmented


class ReturnAugmentedEnv(gym.Wrapper[NDArray[Any], Any, NDArray[Any], Any]):
    """A single environment with its running return appended to the observation, as :class:`ReturnObserver` appends it.

    :param env: the environment.
    :param gamma: discount of the agent; only the returns of episodes are discounted.
    :param period: what the return is counted over, as in the agent's settings; None is the episode.
    """

    def __init__(self, env: gym.Env[NDArray[Any], Any], gamma: float = 1.0, period: int | str | None = None) -> None:
        super().__init__(env)
        self.observation_space = augmented_space(env.observation_space, False)
        rule = ReturnRule.of(gamma, period)
        self._market = _on_calendar(env.unwrapped, rule)
        calendar = None if self._market is None or rule.period is None else self._market.decision_periods(rule.period)
        self.running = RunningReturn(1, rule, calendar)

    def reset(self, **options: Any) -> tuple[NDArray[Any], dict[str, Any]]:
        """Start an episode."""
        obs, info = self.env.reset(**options)
        self.running.begin(slice(None), None if self._market is None else self._market.rows)
        return self._with_running_return(obs), info

    def step(self, action: Any) -> tuple[NDArray[Any], Any, bool, bool, dict[str, Any]]:
        """Take a step, and add its reward to the running return."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        over = self.running.add(np.array([reward], np.float64))
        if over is not None and over[0]:
            info = {**info, "period_ended": True}
        return self._with_running_return(obs), reward, terminated, truncated, info

    def _with_running_return(self, obs: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate((obs, self.running.columns()[0])).astype(np.float32)


def with_running_return(env: VecEnv, rule: ReturnRule, alphas: Sequence[float] | None, seed: int | None) -> VecEnv:
    """Wrap the environments in a :class:`ReturnObserver`, unless they have one with the same settings."""
    if not is_vecenv_wrapped(env, ReturnObserver):
        return ReturnObserver(env, rule.gamma, alphas, seed, None if rule.period is None else str(rule.period))
    inner, changed = env, False
    while not isinstance(inner, ReturnObserver):
        changed |= isinstance(inner, VecNormalize) and inner.norm_obs
        inner = cast(VecEnvWrapper, inner).venv
    if changed or not inner.serves(rule, alphas):
        raise ValueError(
            f"the environment brings its own ReturnObserver, which does not fit: it must have gamma = {rule.gamma}, "
            f"period = {rule.period} and alphas = {alphas}, and nothing may change its observations; leave it out, and the "
            "agent adds one"
        )
    return env


def augmented_space(space: spaces.Space[Any], with_alpha: bool) -> spaces.Box:
    """Return the observation space with the appended columns."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ValueError(f"the running return can be appended to a one-dimensional Box only, got {space}")
    low = [-np.inf, 0.0, 0.0][: 3 if with_alpha else 2]
    high = [np.inf, 1.0, 1.0][: 3 if with_alpha else 2]
    return spaces.Box(np.append(space.low, low).astype(np.float32), np.append(space.high, high).astype(np.float32))


def _innermost(env: VecEnv) -> VecEnv:
    while isinstance(env, VecEnvWrapper):
        env = env.venv
    return env


def _on_calendar(env: Any, rule: ReturnRule) -> OnCalendar | None:
    """Return the environments that know the calendar; None where the period needs none."""
    if rule.period is None or not rule.period.unit:
        return None
    legal = "a number of steps for this environment: a time of the calendar needs bars, as in TradingVecEnv"
    require(isinstance(env, OnCalendar), "period", str(rule.period), legal)
    return cast(OnCalendar, env)
