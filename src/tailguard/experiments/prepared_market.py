"""The one place where a market is built: bars, features scaled by what the training rows say, and the split into rows."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tailguard.config import Config, TrainingConfig
from tailguard.evaluate.folds import Fold, longest_lookback
from tailguard.market.bars import iterate_symbols, symbols_of
from tailguard.market.data import load_source
from tailguard.market.env import Rows, TradingVecEnv
from tailguard.market.features import FeatureConfig, FeatureScaler, FeatureSet, build_features, build_pooled_features
from tailguard.market.plugins import require_causal_function
from tailguard.market.relevance import fill_returns, volatility_scaled
from tailguard.market.rules import TradingSettings
from tailguard.validation import require

LONGEST_EPISODE = 128


@dataclass(frozen=True)
class Split:
    """The rows that an agent learns from and the rows that it is tested on.

    :param train: rows of the training.
    :param test: rows over which returns are earned in a test; nothing about the agent has seen them. Empty for an agent that is
        trained on everything.
    """

    train: Rows
    test: Rows

    def __post_init__(self) -> None:
        """Refuse rows that overlap, or none to train on."""
        ordered = 0 <= self.train[0] < self.train[1] <= self.test[0] <= self.test[1]
        if not ordered:
            raise ValueError(f"the test must come after the training, which must not be empty, got {self}")

    @property
    def fold(self) -> Fold:
        """The split as the only fold of a walk-forward."""
        return Fold(0, self.train, self.test)

    @property
    def span(self) -> Rows:
        """Rows that are played in a test: the row of the first decision, at its close, and the test rows."""
        return self.fold.span


def default_split(n_rows: int, config: TrainingConfig) -> Split:
    """Return the split of a training: the last rows are the test, as many as ``test_share`` says."""
    first_unseen = round(n_rows * (1.0 - config.test_share))
    require(
        0 < first_unseen < n_rows, "training.test_share", config.test_share, f"one that leaves bars on both sides of {n_rows}"
    )
    return Split((0, first_unseen), (first_unseen, n_rows))


def split_off_validation(split: Split, share: float) -> tuple[Split, Rows]:
    """Take the last part of the training rows away, to score the members of a population on.

    :param split: training and test.
    :param share: of the training rows, in (0, 1).
    :returns: the split with fewer training rows and the same test, and the rows between.
    """
    first, last = split.train
    cut = last - round(share * (last - first))
    require(
        first < cut < last,
        "population.validation_share",
        share,
        f"one that leaves rows on both sides: there are {last - first}",
    )
    return Split((first, cut), split.test), (cut, last)


@dataclass(frozen=True)
class Market:
    """A market as an agent sees it: bars, scaled features, rules, and the split into training and test.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param features: of all bars, standardised and weighted by what the training rows say.
    :param scaler: these means, standard deviations and weights; they are part of the agent.
    :param trading: the rules, with the length of a training episode.
    :param split: rows of training and test.
    :param spans: the parts of the training rows that episodes use: all of them, or what a held-out block leaves.
    """

    bars: pd.DataFrame
    features: FeatureSet
    scaler: FeatureScaler
    trading: TradingSettings
    split: Split
    spans: tuple[Rows, ...]

    def training_env(self, n_envs: int, seed: int) -> TradingVecEnv:
        """Return accounts that trade the training rows side by side, with what the agent asks for and no gain on it."""
        trading = self.trading.model_copy(update={"gain": 1.0}).model_dump()
        return TradingVecEnv(self.bars, n_envs=n_envs, seed=seed, features=self.features, span=self.spans, **trading)


def load_market(source: str, config: Config) -> Market:
    """Read bars and prepare them for a training with the default split.

    :param source: as :func:`tailguard.market.data.load_source` understands it.
    :param config: every setting.
    """
    bars = load_source_of(config, source)
    return prepare_market(bars, config, default_split(len(bars), config.training))


def load_source_of(config: Config, source: str) -> pd.DataFrame:
    """Read the bars that a configuration describes.

    :param config: its sections ``files`` and ``features``.
    :param source: as :func:`tailguard.market.data.load_source` understands it.
    """
    return load_source(source, config.files, config.features.columns)


def prepare_market(
    bars: pd.DataFrame, config: Config, split: Split, features: FeatureSet | None = None, held_out: Rows | None = None
) -> Market:
    """Compute the features, fit their scale on the training rows and on nothing else, and choose the length of episodes.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param config: its sections ``features`` and ``trading``.
    :param split: rows of training and test.
    :param features: of the bars, not yet scaled, if they were computed before.
    :param held_out: rows inside the training that are left out of it. So are the rows after them whose features still look back
        at them.
    :raises ValueError: if nothing is left to train on.
    """
    features = market_features(bars, config) if features is None else features
    first, last = split.train
    usable = max(first, features.warmup)
    spans = [(usable, last)]
    if held_out is not None:
        spans = [(usable, held_out[0]), (held_out[1] + longest_lookback(config.features), last)]
    longest = max(stop - start for start, stop in spans) - 1
    # Two periods of the risk objective: one that begins anywhere in a month has a whole month after that.
    period = config.training.risk.counted_over
    two_periods = 0 if period is None else 2 * period.usual_bars(pd.DatetimeIndex(bars.index[first:last]))
    usual = max(min(LONGEST_EPISODE, longest // 2), min(two_periods, longest), 1)
    length = config.trading.episode_length or usual
    # A part that is too short for an episode is not used, unless it is all that there is: then the environments say so.
    spans = [span for span in spans if span[1] - span[0] > length] or spans[:1]
    scaler = _fit_scaler(bars, config, features, (first, last), spans)
    trading = config.trading.model_copy(update={"episode_length": length})
    return Market(bars, scaler.transform(features), scaler, trading, split, tuple(spans))


def _fit_scaler(bars: pd.DataFrame, config: Config, features: FeatureSet, train: Rows, spans: Sequence[Rows]) -> FeatureScaler:
    """Fit scale and relevance of the features on spans of the training rows; returns do not reach beyond their span.

    Directions are looked for in returns in units of their volatility, sizes in the returns themselves.
    What says nothing about the direction of returns may say a lot about their size. An agent that maximises growth is better
    off without it, and one that is averse to the tail of its periods has nothing else to go by.
    """
    first, last = train
    end = bars.index[last] if last < len(bars) else bars.index[-1] + pd.Timedelta(1)
    left_out = np.ones(last - first, bool)
    earned = np.full((last - first, len(symbols_of(bars))), np.nan)
    sizes = np.full_like(earned, np.nan) if config.training.risk.counted_over is not None else None
    for start, stop in spans:
        rows, part = slice(start - first, stop - first), bars.iloc[start:stop]
        left_out[rows] = False
        earned[rows] = volatility_scaled(part, config.trading.fill)
        if sizes is not None:
            sizes[rows] = fill_returns(part, config.trading.fill)
    scaler = FeatureScaler(bars.index[first], end)
    if sizes is not None:
        sizes = np.abs(sizes - np.nanmean(sizes, axis=0))
    return scaler.fit(features[first:last], earned, config.features.relevance, left_out, sizes)


def market_features(bars: pd.DataFrame, config: Config) -> FeatureSet:
    """Compute the features of a market, not yet scaled: those of a portfolio, or of a pool. Functions are tested to be causal.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param config: with ``features`` and ``training.pooled``.
    """
    for function in config.features.functions:
        for _, table in iterate_symbols(bars):
            require_causal_function(table, function)
    build = build_pooled_features if config.training.pooled else build_features
    return build(bars, config.features)


def scaled_features(bars: pd.DataFrame, config: FeatureConfig, scaler: FeatureScaler) -> FeatureSet:
    """Compute the features that an agent sees of bars, with the scale of its training."""
    return scaler.transform(build_features(bars, config))


def fingerprint(bars: pd.DataFrame) -> str:
    """Return a hash of every time, name and number of a table."""
    digest = hashlib.sha256(repr(list(bars.columns)).encode())
    digest.update(pd.util.hash_pandas_object(bars, index=True).to_numpy().tobytes())
    return digest.hexdigest()
