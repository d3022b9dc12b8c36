"""The rules of trading: what a fill costs, what holding costs, how much may be held. Every default stands here."""

from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailguard.validation import require

Fill = Literal["next_open", "close", "next_close"]
Sizing = Literal["cost_aware", "pre_cost"]
FILLS = get_args(Fill)

Fraction = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=-1.0, le=10.0, allow_inf_nan=False)]


class TradingRules(BaseModel):
    """How orders are filled and charged. Costs are fractions of the amount traded, rates are per year.

    :param fee: commission per side; 0.001 is 10 basis points.
    :param half_spread: half of the bid-ask spread, paid on every fill.
    :param slippage: further adverse move of the price on every fill.
    :param impact: Y of the square-root law Y sigma sqrt(Q / volume); 0 is off, the literature finds about 1.
    :param impact_window: bars over which sigma and volume are averaged, all before the fill.
    :param participation: largest share of a bar's volume that one order may take; the rest stays unfilled.
    :param borrow_rate: paid per year on the value of short positions.
    :param cash_rate: earned per year on positive cash.
    :param loan_rate: paid per year on negative cash.
    :param fill: ``next_open`` (default), ``close`` (market on close of the bar just seen) or ``next_close``.
    :param sizing: ``cost_aware``: the weight holds after costs; ``pre_cost``: a share of equity before costs.
    :param band: a target closer than this to the present weight is not traded.
    :param bankruptcy: an account that falls to this share of its starting cash is liquidated.
    :param maintenance_margin: liquidated too when equity falls below this share of gross exposure.
    :param cash: what an account starts with; in units of the price, which matters for impact and participation.
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
    bankruptcy: Fraction = 0.05
    maintenance_margin: Fraction = 0.0
    cash: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0

    @model_validator(mode="after")
    def _sales_earn_something(self) -> Self:
        spread = self.half_spread + self.slippage
        require(spread < 1.0, "half_spread + slippage", spread, "below 1, or a sale would earn less than nothing")
        return self

    def require_affordable(self, gross: float) -> None:
        """Refuse exposures whose costs alone would eat the account: no post-cost weight would exist."""
        spread = self.half_spread + self.slippage
        cost = spread + self.fee * (1.0 + spread)
        if cost * gross >= 1.0:
            raise ValueError(
                f"fee + half_spread + slippage of {cost:g} per side cannot carry a gross exposure of {gross:g}: "
                "their product must stay below 1"
            )


class TradingSettings(TradingRules):
    """The rules of trading, what an agent may hold, and the shape of an episode.

    :param leverage: largest gross exposure as a multiple of equity.
    :param long_only: weights in [0, leverage] instead of [-leverage, leverage].
    :param episode_length: steps per episode; None plays from the first usable bar to the end of the data.
    :param random_start: start episodes at random bars (drawn from the seed) instead of at the first usable one.
    """

    leverage: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    long_only: bool = False
    episode_length: Annotated[int, Field(ge=1)] | None = None
    random_start: bool = True

    @model_validator(mode="after")
    def _affordable(self) -> Self:
        self.require_affordable(self.leverage)
        return self
