"""Walk-forward: train on the past, test on what follows, move on. Pure functions of row counts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tailguard.market.features import FeatureConfig
from tailguard.validation import require

Mode = Literal["expanding", "rolling"]
FEWEST_ROWS = 2


class WalkforwardConfig(BaseModel):
    """How an agent is tested on what it has not seen.

    :param folds: trainings along the time axis; each is tested on the bars up to the next. 4 to 10 are usual; more folds follow
        the market more closely and take as many times longer.
    :param seeds: trainings per fold that differ by chance alone; below 5 their spread is hardly known.
    :param mode: ``expanding`` trains on everything before, ``rolling`` on a window as long as that of the first fold.
    :param train_share: share of the usable bars before the first test, embargo included. The rest is tested.
    :param embargo: rows left out between training and test; None takes the least, which is the longest look-back of the
        features plus the warm-up. More is legal, less would let test bars and training bars share a window.
    :param warmup: rows before a test over which memory is filled, without a reward being counted.
    :param jobs: processes at work at the same time; None takes one per core.
    :param trials: agents that there were to choose from by looking at the same test bars, such as configurations tried before
        this one. More trials need a higher Sharpe ratio to convince.
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
    """One training and its test, in rows, the last one excluded.

    :param number: from 0.
    :param train: rows of the training.
    :param test: rows over which returns are earned. The first decision is taken one row earlier, at the close before.
    """

    number: int
    train: tuple[int, int]
    test: tuple[int, int]

    @property
    def embargo(self) -> int:
        """Rows between the two."""
        return self.test[0] - self.train[1]

    @property
    def span(self) -> tuple[int, int]:
        """Rows that are played: the test with the row of the first decision."""
        return self.test[0] - 1, self.test[1]


def least_embargo(lookback: int, warmup: int) -> int:
    """Rows after which neither a feature nor the memory of the agent reaches back from the test into the training.

    :param lookback: longest look-back of the features, in rows.
    :param warmup: rows over which memory is filled before the test.
    """
    return max(lookback + warmup, 1)  # the row of the first decision is never one of the training


def longest_lookback(features: FeatureConfig) -> int:
    """Rows that the features of one bar look back on; exponential averages reach further, with weights that fade."""
    windows = (features.volatility_window, features.slow_window, features.drawdown_window, features.rsi, features.atr)
    oscillators = (features.bollinger, features.cci, features.macd[1] + features.macd[2])
    return max(*features.horizons, *windows, *oscillators) + 1  # returns need one price more than their window


def make_folds(rows: int, unusable: int, lookback: int, config: WalkforwardConfig) -> list[Fold]:
    """Cut the rows into folds whose tests follow one another without a gap and end with the data.

    :param rows: of the data.
    :param unusable: rows at the start that lack features.
    :param lookback: longest look-back of the features, at least `unusable`.
    :param config: number of folds and their shape.
    :raises ValueError: if the rows are too few, with what they leave.
    """
    least = least_embargo(lookback, config.warmup)
    embargo = least if config.embargo is None else config.embargo
    require(embargo >= least, "embargo", embargo, f"at least {least}: look-back {lookback} and warm-up {config.warmup}")
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
