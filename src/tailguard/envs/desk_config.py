"""The settings of hedging and execution on the user's bars, without loading what carries them out."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailguard.validation import require


class OptionSettings(BaseModel):
    """A European option.

    :param kind: ``call`` or ``put``.
    :param strike: as a multiple of the spot at the sale; 1 is at the money.
    :param quantity: how many, negative if they were sold.
    :param knock_out: the option is void once a close is at or beyond this multiple of the spot; None is without a barrier.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["call", "put"] = "call"
    strike: Annotated[float, Field(gt=0.0)] = 1.0
    quantity: float = -1.0
    knock_out: Annotated[float, Field(gt=0.0)] | None = None

    @model_validator(mode="after")
    def _worth_something(self) -> Self:
        require(self.quantity != 0.0, "quantity", self.quantity, "not 0")
        require(self.knock_out != 1.0, "knock_out", self.knock_out, "not the spot: the option would be void at once")
        return self


class HedgeSettings(OptionSettings):
    """An option on the user's bars, and how its hedges are compared.

    :param legs: further options of the same book; ``[{kind: put, strike: 0.95, quantity: 1}]`` makes a sold put a spread.
    :param dates: bars from the sale to the expiry, at least 1; the book is hedged at each.
    :param cost: of a trade, as a fraction of its value; 0.001 is 0.1 %.
    :param fixed_cost: of a trade of any size, as a fraction of the spot at the sale.
    :param rate: interest per year, continuously compounded.
    :param alpha: the share of worst paths that counts.
    :param process: of the paths: ``bootstrap`` takes blocks of observed returns, ``heston`` calibrates Heston's model to them.
    :param mean_block: mean length of the blocks of the bootstrap, in bars, at least 1.
    :param test_share: share of the bars, the last ones, that only the comparison sees.
    :param steps: hedging decisions that the agent learns from, at least 1. 2,000,000 take about 15 seconds of one core.
    :param paths: in the comparison, at least 1000.
    :param seed: of the agent and the paths.
    """

    legs: tuple[OptionSettings, ...] = ()
    dates: Annotated[int, Field(ge=1)] = 21
    cost: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.001
    fixed_cost: Annotated[float, Field(ge=0.0)] = 0.0
    rate: float = 0.0
    alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    process: Literal["bootstrap", "heston"] = "bootstrap"
    mean_block: Annotated[float, Field(ge=1.0)] = 20.0
    test_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    steps: Annotated[int, Field(ge=1)] = 2_000_000
    paths: Annotated[int, Field(ge=1000)] = 50_000
    seed: Annotated[int, Field(ge=0)] = 0

    @property
    def book(self) -> tuple[OptionSettings, ...]:
        """All options."""
        return (self, *self.legs)


class ExecutionSettings(BaseModel):
    """An order on the user's bars, and how the ways to sell it are compared.

    :param bars: in which it is sold, a trade in each; at least 2.
    :param order: its size, as a multiple of the mean volume of a day; None is a tenth of the mean volume of those bars.
    :param impact: temporary impact of trading a whole day's volume within a day, in daily volatilities; 1 is usual.
    :param permanent: permanent impact of the same, in daily volatilities; 0.3 is usual.
    :param half_spread: bps that every share pays.
    :param alpha: the share of worst paths that counts.
    :param mean_block: mean length of the blocks of bars that paths are made of, at least 1.
    :param test_share: share of the bars, the last ones, that only the comparison sees.
    :param steps: decisions that the agent learns from, at least 1. 2,000,000 take about 30 seconds of one core.
    :param paths: in the comparison, at least 1000.
    :param seed: of the agent and the paths.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    bars: Annotated[int, Field(ge=2)] = 10
    order: Annotated[float, Field(gt=0.0)] | None = None
    impact: Annotated[float, Field(gt=0.0)] = 1.0
    permanent: Annotated[float, Field(ge=0.0)] = 0.3
    half_spread: Annotated[float, Field(ge=0.0)] = 1.0
    alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    mean_block: Annotated[float, Field(ge=1.0)] = 20.0
    test_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    steps: Annotated[int, Field(ge=1)] = 2_000_000
    paths: Annotated[int, Field(ge=1000)] = 50_000
    seed: Annotated[int, Field(ge=0)] = 0
