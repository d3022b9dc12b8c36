"""The rules of trading: the costs of fills and of holding, and limits of what may be held, with every default."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tailguard.market.bars import timeframe
from tailguard.periods import Period
from tailguard.validation import require

Fill = Literal["next_open", "close", "next_close"]
Sizing = Literal["cost_aware", "pre_cost"]

PRICE_COSTS = ("fee", "half_spread", "slippage", "impact")

Fraction = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=-1.0, le=10.0, allow_inf_nan=False)]


Weight = Annotated[float, Field(allow_inf_nan=False)]
Lot = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class AssetConfig(BaseModel):
    """The rules of one asset of a portfolio where they differ from those of all.

    :param fee: commission per side; None is that of all.
    :param borrow_rate: paid per year on the value of short positions; None is that of all.
    :param lot: smallest tradable number of units; None is that of all.
    :param min_weight: smallest share of equity that may be held: 0 forbids short positions. None is no limit of its own.
    :param max_weight: largest share of equity that may be held. None is no limit of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fee: Fraction | None = None
    borrow_rate: Rate | None = None
    lot: Lot | None = None
    min_weight: Weight | None = None
    max_weight: Weight | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_weight is not None and self.max_weight is not None:
            require(self.min_weight <= self.max_weight, "min_weight", self.min_weight, f"at most max_weight {self.max_weight}")
        return self


class GuardConfig(BaseModel):
    """A loss limit: the average of the worst share `level` of periods (CVaR) loses no more than `max_loss`.

    :param max_loss: as a share of equity: 0.05 is 5 %. Less holds less.
    :param period: over which a loss counts: ``1M``, ``1W``, ``1Q``, or a number of bars.
    :param level: share of periods that counts as worst, in (0, 1). 0.05 is typical.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_loss: Annotated[float, Field(gt=0.0, lt=1.0)]
    period: int | str = "1M"
    level: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05

    @field_validator("period")
    @classmethod
    def _legal(cls, period: int | str) -> int | str:
        Period.parse(period)
        return period


class AssetRules(NamedTuple):
    """The rules of one asset, as numbers: see :class:`AssetConfig`."""

    fee: float
    borrow_rate: float
    lot: float
    min_weight: float
    max_weight: float


class TradingRules(BaseModel):
    """Fills and their charges. Costs are fractions of the amount traded, rates are per year.

    :param fee: commission per side; 0.001 is 10 basis points, usual for crypto; 0.0001 suits large US stocks. Higher fees make
        trading rarer, and an agent that was trained with too low ones loses money by trading.
    :param half_spread: half of the bid-ask spread, paid on every fill. 0.0001 to 0.0005 are usual for liquid markets.
    :param slippage: further adverse move of the price on every fill. Raise it to see how much of a result it eats.
    :param impact: Y of the square-root price impact Y sigma sqrt(Q / volume); 0 is off, the literature finds about 1. Needs
        volumes, and `cash` in real units.
    :param impact_window: bars over which sigma and volume are averaged, all before the fill. 20 is typical; fewer are noisier.
    :param participation: largest share of a bar's volume that one order may take; the rest stays unfilled. 0.01 to 0.1 are
        usual; None fills everything.
    :param borrow_rate: paid per year on the value of short positions. 0.003 to 0.01 for large stocks, far more for scarce ones.
    :param cash_rate: earned per year on positive cash. It is taken out of every ratio and test: cash has a Sharpe ratio of 0.
    :param loan_rate: paid per year on negative cash, that is, with `leverage` above 1. `cash_rate` is the least that is paid.
    :param fill: when an order is filled. ``next_open`` decides at the close and fills at the next open; ``close`` fills at the
        close that was just seen, which is optimistic; ``next_close`` a whole bar later.
    :param sizing: ``cost_aware``: the weight holds after costs; ``pre_cost``: a share of equity before costs, so that leverage
        may end a little above its limit.
    :param band: a target closer than this to the present weight is not traded. 0 trades every change; 0.02 to 0.1 save costs.
    :param min_trade: smallest amount that is traded, in the same money as `cash`; a position can always be closed. 0 is none.
    :param lot: smallest tradable number of units: 1 for whole shares, 0 for any fraction. Needs `cash` in real units.
    :param stop_loss: a position is closed inside a bar when it has lost this share of its entry price: at that price, or at the
        open if that is beyond it. The next decision may enter again. None is off; 0.02 to 0.1 are usual.
    :param take_profit: the same for a gain. Where a bar touches both, the loss is taken to come first.
    :param assets: rules of single assets by the names of their symbols, such as ``{BTC: {fee: 0.002, max_weight: 0.5}}``.
    :param bars_per_year: bars per year that figures per year are made with; None counts them. 252 for daily bars of stocks.
    :param bankruptcy: an account that falls to this share of its starting cash is liquidated and the episode ends.
    :param maintenance_margin: an account is liquidated too when its equity falls below this share of its gross exposure. 0 is
        off, brokers ask for 0.25 or more.
    :param cash: starting cash of an account, in units of the price; it matters for `impact`,
        `participation`, `lot` and `min_trade` only.
    :param guard: a loss limit per period, such as ``{max_loss: 0.05, period: 1M}``: the weights of every account that is
        evaluated or traded are scaled down to it, after the agent has decided; training is not. None has no limit.
    :param tail_period: period whose predicted tail is shown, ``1M``, ``1W`` or a number of bars. None is that of the guard;
        without one a month for bars of a day or longer, a week for bars of an hour or longer, and a day for shorter ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fee: Fraction = 0.001
    half_spread: Fraction = 0.0
    slippage: Fraction = 0.0
    impact: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    impact_window: Annotated[int, Field(ge=2)] = 20
    participation: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    borrow_rate: Rate = 0.0
    cash_rate: Rate = 0.0
    loan_rate: Rate = 0.0
    fill: Fill = "next_open"
    sizing: Sizing = "cost_aware"
    band: Fraction = 0.0
    min_trade: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    lot: Lot = 0.0
    stop_loss: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    take_profit: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    assets: dict[str, AssetConfig] = {}
    bars_per_year: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    bankruptcy: Fraction = 0.05
    maintenance_margin: Fraction = 0.0
    cash: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    guard: GuardConfig | None = None
    tail_period: int | str | None = None

    @field_validator("tail_period")
    @classmethod
    def _legal(cls, period: int | str | None) -> int | str | None:
        if period is not None:
            Period.parse(period)
        return period

    @model_validator(mode="after")
    def _sales_earn_something(self) -> Self:
        spread = self.half_spread + self.slippage
        require(spread < 1.0, "half_spread + slippage", spread, "below 1, or a sale would earn less than nothing")
        return self

    def of_asset(self, symbol: str) -> AssetRules:
        """Return the rules of one asset: its own, else those of all."""
        own = self.assets.get(symbol, AssetConfig())
        return AssetRules(
            fee=self.fee if own.fee is None else own.fee,
            borrow_rate=self.borrow_rate if own.borrow_rate is None else own.borrow_rate,
            lot=self.lot if own.lot is None else own.lot,
            min_weight=-math.inf if own.min_weight is None else own.min_weight,
            max_weight=math.inf if own.max_weight is None else own.max_weight,
        )

    def costs_per_side(self, symbols: Sequence[str]) -> NDArray[np.float64]:
        """Return the share of the amount traded that an asset costs, ``[assets]``: fee, spread, slippage, but no impact."""
        return np.array([self.of_asset(symbol).fee for symbol in symbols]) + self.half_spread + self.slippage

    def shown_period(self, times: pd.DatetimeIndex) -> Period:
        """Return the period whose tail is shown for bars at these times, at least 2."""
        if self.tail_period is not None:
            return Period.parse(self.tail_period)
        if self.guard is not None:
            return Period.parse(self.guard.period)
        step = timeframe(times)
        return Period.parse("1M" if step >= pd.Timedelta(days=1) else "1W" if step >= pd.Timedelta(hours=1) else "1D")

    def require_assets(self, symbols: Sequence[str]) -> None:
        """Raise for rules of an asset that is not there."""
        for name in self.assets:
            known = ", ".join(filter(None, symbols)) or "left out: the bars are of one symbol without a name"
            require(name in symbols, "trading.assets", name, f"one of {known}" if any(symbols) else known)

    def at_costs(self, multiple: float) -> "TradingRules":
        """Return the same rules with fees, spread, slippage and impact multiplied."""
        values = {name: getattr(self, name) for name in TradingRules.model_fields}
        values |= {name: multiple * values[name] for name in PRICE_COSTS}
        values["assets"] = {
            name: asset if asset.fee is None else asset.model_copy(update={"fee": multiple * asset.fee})
            for name, asset in self.assets.items()
        }
        return TradingRules(**values)

    def require_affordable(self, gross: float) -> None:
        """Raise for exposures whose costs alone would use up the account: no post-cost weight would exist."""
        spread = self.half_spread + self.slippage
        highest = max([self.fee, *(asset.fee for asset in self.assets.values() if asset.fee is not None)])
        cost = spread + highest * (1.0 + spread)
        if cost * gross >= 1.0:
            raise ValueError(
                f"fee + half_spread + slippage of {cost:g} per side cannot carry a gross exposure of {gross:g}: "
                "their product must stay below 1"
            )


class TradingSettings(TradingRules):
    """The rules of trading, what an agent may hold, and the shape of an episode.

    :param leverage: largest gross exposure as a multiple of equity. 1 borrows nothing; more multiplies gains, losses and costs.
    :param long_only: weights in [0, leverage] instead of [-leverage, leverage]: no short positions.
    :param core: one weight per asset that is held whatever the agent says, for the part of the account that it does not steer;
        empty is cash.
    :param active: share of the account that the agent steers, in [0, 1]: the target is (1 - active) core + active agent. A
        training that selects its agent (``selection``) chooses core and share by what held-out bars support.
    :param gain: factor of the weights that the agent asks for, before they are limited by the leverage; above 0. A short
        training learns which way to trade before it learns to ask for much. Agents are trained with a factor of 1, and a
        training that selects its agent chooses the factor.
    :param volatility_power: what core and agent ask for is multiplied by min(1, (median of the past / forecast) ** this) of the
        volatility of each asset, in training and in play: less is held where more is to be feared. 0 is off; 1 keeps the risk
        of a position even; 2 is right where the mean return does not depend on volatility. None is 0, but a ``selection`` takes
        1, and chooses for a ``risk`` with a period.
    :param scale_core: False multiplies what the agent asks for alone, and leaves the core as it is. A ``selection`` decides:
        True for a ``risk`` with a period only.
    :param episode_length: steps per episode. None plays to the end of the data; in a training it takes 128, or half of the
        training bars if that is less, and at least two periods of a ``risk`` that has one. Without a period, the return and its
        tail are those of an episode.
    :param random_start: start episodes at random bars (drawn from the seed) instead of at the first usable one. False shows the
        agent the same bars in every episode.
    """

    leverage: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    long_only: bool = False
    core: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = ()
    active: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    gain: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    volatility_power: Annotated[float, Field(ge=0.0, le=10.0)] | None = None
    scale_core: bool = True
    episode_length: Annotated[int, Field(ge=1)] | None = None
    random_start: bool = True

    @property
    def lowest_weight(self) -> float:
        """The smallest weight of an asset."""
        return 0.0 if self.long_only else -self.leverage

    @model_validator(mode="after")
    def _affordable(self) -> Self:
        self.require_affordable(self.leverage)
        gross = sum(map(abs, self.core))
        legal = f"at least {self.lowest_weight:g} each, at most {self.leverage:g} together"
        require(
            gross <= self.leverage * (1.0 + 1e-9) and all(weight >= self.lowest_weight for weight in self.core),
            "core",
            self.core,
            legal,
        )
        return self

    def steered(self, actions: NDArray[np.float64], scale: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Return the actions ``[..., assets]`` in [-1, 1] that are carried out: the agent's, and the core's for the rest.

        :param actions: of the agent.
        :param scale: ``[..., assets]`` share of it that is held (:func:`tailguard.market.volatility.exposure_scale`); None is
            all.
        """
        if self.active == 1.0 and self.gain == 1.0 and scale is None:
            return actions
        low, high = self.lowest_weight, self.leverage
        # An action that is not finite becomes NaN, for the check of the accounts; 0 times infinity would warn.
        chosen = np.where(np.isfinite(actions), np.clip(actions, -1.0, 1.0), np.nan)
        agent = capped(self.gain * capped(low + 0.5 * (chosen + 1.0) * (high - low), high), high)
        core = np.array(self.core or (0.0,))
        if scale is not None:
            agent, core = scale * agent, scale * core if self.scale_core else core
        target = (1.0 - self.active) * core + self.active * agent
        steered: NDArray[np.float64] = 2.0 * (target - low) / (high - low) - 1.0
        return steered


def capped(weights: NDArray[np.float64], leverage: float) -> NDArray[np.float64]:
    """Return weights ``[..., assets]``, scaled down where their gross exposure exceeds the leverage."""
    gross = np.abs(weights).sum(axis=-1, keepdims=True)
    scaled: NDArray[np.float64] = weights * (leverage / np.maximum(gross, leverage))
    return scaled
