"""Live trading: bars arrive, and after each the agent says what to hold.

The agent trades a paper account under the rules it was trained with, since its own position is part of what it sees. Every step
is one of :class:`tailguard.evaluate.play.AgentSession`, so a decision at the close of a bar is exactly the one that the same
agent takes in an evaluation over the same bars.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tailguard.evaluate.play import AgentSession, return_rule_of, target_weights
from tailguard.evaluate.stats.series import Floats
from tailguard.experiments.ensemble import TradingAgent
from tailguard.experiments.prepared_market import scaled_features
from tailguard.market.account_tail import account_tail, quantile_at, tail_mean
from tailguard.market.bars import DataError, symbols_of, timeframe, timeframe_text
from tailguard.market.env import AccountBatch
from tailguard.market.features import FeatureConfig, FeatureScaler
from tailguard.market.guard import GuardCache, guard
from tailguard.market.kernel import END, NOW
from tailguard.market.rules import TradingSettings
from tailguard.market.tail_forecast import PredictionCache, observe_market
from tailguard.parallel.threads import one_thread
from tailguard.periods import Period

# Bars are of another timeframe than those of the training if the usual time between them differs by more than this factor.
OTHER_TIMEFRAME = 1.5


def require_timeframe(times: pd.DatetimeIndex, trained_on: pd.Timedelta | None) -> None:
    """Raise for bars of another length than those that an agent has learnt from.

    :param times: of the bars.
    :param trained_on: time between the bars of its training; None if it is not known.
    """
    if trained_on is None:
        return
    step = timeframe(times)
    if max(step / trained_on, trained_on / step) > OTHER_TIMEFRAME:
        raise DataError(
            f"bars of {timeframe_text(step)}, but the agent was trained on bars of {timeframe_text(trained_on)}: give it those"
        )


class PredictedTail(NamedTuple):
    """The predicted return of an account over the rest of a period, calibrated by its own past.

    :param period: in words, such as ``month``.
    :param bars_to_go: expected to the end of the period.
    :param to_date: return of the period so far.
    :param expected: mean return of the rest.
    :param var_5: its 5 % quantile (value at risk).
    :param cvar_5: average of its worst 5 %.
    """

    period: str
    bars_to_go: int
    to_date: float
    expected: float
    var_5: float
    cvar_5: float


class Decision(NamedTuple):
    """A decision: the weights to hold from the next fill on.

    :param time: of the bar at whose close it was taken.
    :param weights: ``[assets]`` shares of equity, negative for short positions.
    :param equity: of the paper account, which is not guarded.
    :param tail: of the account that trades the weights, for the rest of the period; None before there is a forecast.
    :param guard: why the guard holds less than the agent asked for; empty if it does not.
    """

    time: pd.Timestamp
    weights: Floats
    equity: float
    tail: PredictedTail | None = None
    guard: str = ""


class Trader:
    """An agent that decides at the close of every bar.

    :param model: the agent.
    :param scaler: of its features, as fitted in its training.
    :param features: what is computed from the bars.
    :param trading: the rules it was trained under.
    :param trained_on: time between the bars of its training; None does not check that of new bars.
    """

    def __init__(
        self,
        model: TradingAgent,
        scaler: FeatureScaler,
        features: FeatureConfig,
        trading: TradingSettings,
        trained_on: pd.Timedelta | None = None,
    ) -> None:
        if scaler.mean.ndim > 1:
            raise ValueError("this agent was trained on a pool of instruments; trading a pool live is not supported yet")
        self.trained_on = trained_on
        self.scaler, self.features = scaler, features
        self.trading = trading.model_copy(update={"episode_length": None, "random_start": False})
        self.bars: pd.DataFrame | None = None
        self._session = AgentSession(model, 1, return_rule_of(model))
        self._account: dict[str, Any] | None = None
        self.ruined = False
        self._decided: list[Decision] = []  # by the agent, before any guard
        self._predictor = LivePredictor(self.trading)

    @one_thread()
    def add(self, bars: pd.DataFrame) -> list[Decision]:
        """Take the bars that follow those before, and decide at the close of each for which there is enough history.

        When the paper account is liquidated, :attr:`ruined` is true and there are no more decisions.

        :param bars: a table from :func:`tailguard.market.load_bars`; many at once are faster and give the same decisions.
        """
        known = self.bars
        if known is not None and not bars.index[0] > known.index[-1]:
            raise ValueError(f"the bar of {bars.index[0]} comes after that of {known.index[-1]}: bars must come in order")
        self.bars = bars if known is None else pd.concat([known, bars])
        features = scaled_features(self.bars, self.features, self.scaler)
        last = len(self.bars) - 1
        if self.ruined or features.warmup >= last:
            return []
        require_timeframe(pd.DatetimeIndex(self.bars.index), self.trained_on)
        accounts, decisions = AccountBatch(self.bars, self.trading, 1, features), []
        self._session.set_calendar(accounts.decision_periods)
        if self._account is None:
            obs = np.empty((1, accounts.observation_size), np.float32)
            accounts.restart(np.zeros(1, np.intp), obs)
            self._session.act(obs, np.array([True]), accounts.rows)
            decisions.append(self._decision(accounts))
        else:
            accounts.load_state_dict(self._account)
            accounts.clock[END] = last
        while int(accounts.clock[NOW, 0]) < last and not self.ruined:
            step = self._session.step(accounts)
            self.ruined = bool(step.terminated[0])
            if not self.ruined:
                self._session.act(step.obs, np.array([False]), accounts.rows)
                decisions.append(self._decision(accounts))
        self._account = accounts.state_dict()
        self._decided += decisions
        return self._with_tails(len(decisions))

    def _decision(self, accounts: AccountBatch) -> Decision:
        info = accounts.info(0)
        (weights,) = target_weights(self._session.actions, self.trading, accounts.present_scale)
        return Decision(info["time"], weights, info["equity"])

    def _with_tails(self, count: int) -> list[Decision]:
        """Return the last decisions with the guard applied and with their tails."""
        if not count:
            return []
        assert self.bars is not None
        times = [decision.time for decision in self._decided]
        weights = np.array([decision.weights for decision in self._decided])
        live = self._predictor.predict(self.bars, int(self.bars.index.searchsorted(times[0])), weights, count)
        return [
            decision._replace(weights=row, tail=tail, guard=reason)
            for decision, row, tail, reason in zip(self._decided[-count:], *live, strict=True)
        ]


class LivePrediction(NamedTuple):
    """The last n decisions as they are traded.

    :param weights: ``[n, assets]`` after the guard.
    :param tails: n predictions, None where there is none.
    :param reasons: n reasons of the guard, empty where it does nothing.
    """

    weights: Floats
    tails: list[PredictedTail | None]
    reasons: list[str]


class LivePredictor:
    """Applies the guard to the decisions of a live account and predicts its tail, as an evaluation over the same bars does.

    Guard and forecast depend on bars and decisions up to a row only, so they are made of the whole past. What was predicted at
    past closes is kept: a bar more costs one prediction, and passes over the bars that take microseconds a bar.

    :param trading: with the guard, if any.
    """

    def __init__(self, trading: TradingSettings) -> None:
        self.trading = trading
        self._tail, self._guard = PredictionCache(), GuardCache(PredictionCache(), PredictionCache())

    def predict(self, bars: pd.DataFrame, first: int, decided: Floats, count: int) -> LivePrediction:
        """Return the last decisions with their tails.

        :param bars: a table from :func:`tailguard.market.load_bars`.
        :param first: row of the first decision.
        :param decided: ``[m, assets]`` weights that the agent asked for from there on.
        :param count: n, of the last decisions.
        """
        trading, times = self.trading, pd.DatetimeIndex(bars.index)
        targets = np.full((len(bars), decided.shape[1]), np.nan)
        targets[:first], targets[first : first + len(decided)] = 0.0, decided
        newest = slice(first + len(decided) - count, first + len(decided))
        reasons, costs, period = [""] * count, trading.costs_per_side(symbols_of(bars)), trading.shown_period(times)
        rows = period.rows(times, first)
        longest = int(rows.to_go.max())
        if trading.guard is not None and (limited := Period.parse(trading.guard.period)) != period:
            longest = max(longest, int(limited.rows(times, first).to_go.max()))
        market = observe_market(bars, longest)
        if trading.guard is not None:
            limit = trading.guard.model_dump()
            guarded = guard(targets, bars, **limit, fee=costs, first=first, market=market, cache=self._guard)
            targets, reasons = guarded.weights, [guarded.reason(row) for row in range(newest.start, newest.stop)]
        tail = account_tail(
            bars, targets, period, fee=costs, first=first, since=newest.start, market=market, rows=rows, cache=self._tail
        )
        quantiles = tail.quantiles[newest]
        columns = (tail_mean(quantiles, 1.0), quantile_at(quantiles, 0.05), tail_mean(quantiles, 0.05))
        tails = [
            PredictedTail(period.words, int(to_go), *map(float, rest)) if np.isfinite(rest[-1]) else None
            for to_go, *rest in zip(tail.rows.to_go[newest], tail.to_date[newest], *columns, strict=True)
        ]
        return LivePrediction(targets[newest], tails, reasons)
