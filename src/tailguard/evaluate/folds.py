"""Walk-forward folds: each trains on the past and is tested on the bars after it. Pure functions of row counts."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tailguard.market.features import FeatureConfig
from tailguard.validation import require

Mode = Literal["expanding", "rolling"]
FEWEST_ROWS = 2


class WalkforwardConfig(BaseModel):
    """The settings of a walk-forward test.

    :param folds: trainings along the time axis; each is tested on the bars up to the next. 4 to 10 are usual; with more folds
        the agent is retrained more often, which takes proportionally longer.
    :param seeds: trainings per fold that differ only in their random seed; fewer than 5 say little about their spread.
    :param mode: ``expanding`` trains on everything before, ``rolling`` on a window as long as that of the first fold.
    :param train_share: share of the usable bars before the first test, embargo included. The rest is tested.
    :param embargo: rows left out between training and test; None takes the smallest legal number, the longest
        look-back of the features plus the warm-up: with less, features of test bars would contain training bars.
    :param warmup: rows before a test over which the recurrent state is built up; their rewards do not count.
    :param jobs: processes that run at the same time; None takes one per core.
    :param trials: agents that could have been chosen by looking at the same test bars, such as configurations tried before
        this one. The more trials, the higher the Sharpe ratio that counts as evidence. The ledger of trials may know of more.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    folds: Annotated[int, Field(ge=1, le=1000)] = 5
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5
    mode: Mode = "expanding"
    train_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    embargo: Annotated[int, Field(ge=1)] | None = None
    warmup: Annotated[int, Field(ge=0)] = 64
    jobs: Annotated[int, Field(ge=1)] | None = None
    trials: Annotated[int, Field(ge=1)] = 1


@dataclass(frozen=True)
class Fold:
    """A training span and its test span, in rows, the last one excluded.

    :param number: from 0.
    :param train: rows of the training.
    :param test: rows over which returns are earned. The first decision is taken one row earlier, at the close before.
    """

    number: int
    train: tuple[int, int]
    test: tuple[int, int]

    @property
    def embargo(self) -> int:
        """Rows between training and test."""
        return self.test[0] - self.train[1]

    @property
    def span(self) -> tuple[int, int]:
        """Rows that are traded: the test with the row of the first decision."""
        return self.test[0] - 1, self.test[1]


def least_embargo(lookback: int, warmup: int) -> int:
    """Return the rows after which neither features nor the recurrent state of a test depend on training rows.

    :param lookback: longest look-back of the features, in rows.
    :param warmup: rows over which the recurrent state is built up before the test.
    """
    return max(lookback + warmup, 1)  # the row of the first decision is never a training row


def longest_lookback(features: FeatureConfig) -> int:
    """Return the longest look-back of the features, in rows; exponential averages reach further, with vanishing weights."""
    windows = (features.volatility_window, features.slow_window, features.drawdown_window, features.rsi, features.atr)
    oscillators = (features.bollinger, features.cci, features.macd[1] + features.macd[2])
    longest = max(*features.horizons, *windows, *oscillators, features.lags + 1, *features.functions.values())
    return longest + 1  # returns need one price more than their window


def cut_into_blocks(rows: tuple[int, int], number: int, key: str) -> list[tuple[int, int]]:
    """Cut rows into contiguous blocks of (nearly) the same length, at least three rows each.

    :param rows: first and last-plus-one row.
    :param number: of blocks.
    :param key: the setting that says how many, for the error.
    :raises ValueError: if there are too few rows.
    """
    first, last = rows
    require(last - first >= 3 * number, key, number, f"at most {(last - first) // 3}: three bars each")
    edges = [first + round((last - first) * k / number) for k in range(number + 1)]
    return list(pairwise(edges))


def make_folds(rows: int, unusable: int, lookback: int, config: WalkforwardConfig) -> list[Fold]:
    """Split the rows into folds whose tests are contiguous and end with the data.

    :param rows: of the data.
    :param unusable: rows at the start that lack features.
    :param lookback: longest look-back of the features, at least `unusable`.
    :param config: number of folds and their shape.
    :raises ValueError: if the rows are too few, with what they leave.
    """
    least = least_embargo(lookback, config.warmup)
    embargo = least if config.embargo is None else config.embargo
    require(
        embargo >= least, "walkforward.embargo", embargo, f"at least {least}: look-back {lookback} and warm-up {config.warmup}"
    )
    first_test = unusable + round((rows - unusable) * config.train_share)
    trained = first_test - embargo - unusable  # rows of the first training that have features
    tested = rows - first_test
    enough = trained >= FEWEST_ROWS and tested >= FEWEST_ROWS * config.folds
    legal = f"more: look-backs and an embargo of {embargo} leave {trained} to train on and {tested} for {config.folds} tests"
    require(enough, "the number of bars", rows, legal)
    edges = [first_test + round(tested * k / config.folds) for k in range(config.folds + 1)]
    folds = []
    for k in range(config.folds):
        last = edges[k] - embargo
        begin = 0 if config.mode == "expanding" else edges[k] - first_test
        folds.append(Fold(k, (begin, last), (edges[k], edges[k + 1])))
    return folds
