"""A market with rows held out: nothing of them is trained on, nor anything that still looks back at them."""

import numpy as np
import pandas as pd
import pytest

from tailguard.config import load_config
from tailguard.envs.return_observer import ReturnRule, with_running_return
from tailguard.evaluate.folds import longest_lookback
from tailguard.experiments.prepared_market import LONGEST_EPISODE, Split, market_features, prepare_market
from tailguard.experiments.training import build_model
from tailguard.market import load_bars, random_walk
from tailguard.market.features import FeatureScaler
from tailguard.market.relevance import fill_returns
from tailguard.periods import Period

TRAIN, HELD_OUT = (0, 1000), (400, 600)
# Exponential averages this short have forgotten everything after the longest look-back.
SHORT = ["features.relevance=1", "features.rsi=2", "features.atr=2", "features.macd=[2, 3, 2]"]


@pytest.fixture(scope="module")
def bars():
    return random_walk(1200, seed=0)


def prepared(bars, held_out=HELD_OUT, *settings, train=TRAIN):
    config = load_config(None, settings)
    return prepare_market(bars, config, Split(train, (1000, len(bars))), None, held_out)


def test_without_a_block_all_training_rows_are_one_span(bars):
    market = prepared(bars, None)
    assert market.spans == ((63, 1000),)
    assert market.trading.episode_length == LONGEST_EPISODE


def test_a_block_leaves_what_comes_before_it_and_what_no_longer_looks_back_at_it(bars):
    lookback = longest_lookback(load_config(None).features)
    assert prepared(bars).spans == ((63, 400), (600 + lookback, 1000))
    assert prepared(bars, (63, 300)).spans == ((300 + lookback, 1000),)
    assert prepared(bars, (800, 1000)).spans == ((63, 800),)


def test_a_part_too_short_for_an_episode_is_not_used(bars):
    assert prepared(bars, (700, 900)).spans == ((63, 700),)  # 36 rows are left after it
    assert prepared(bars, (700, 900), "trading.episode_length=20").spans == ((63, 700), (964, 1000))


@pytest.mark.parametrize("length", [None, 50])
def test_episodes_visit_neither_the_block_nor_the_rows_that_look_back_at_it(bars, length):
    market = prepared(bars, HELD_OUT, f"trading.episode_length={'null' if length is None else length}")
    env = market.training_env(64, 0)
    env.reset()
    visited = set(env.batch.clock[0].tolist())
    for _ in range(300):
        env.step_arrays(np.zeros((64, 1)))
        visited |= set(env.batch.clock[0].tolist())
    allowed = {row for first, last in market.spans for row in range(first, last)}
    assert visited <= allowed
    assert len(visited) > 0.9 * len(allowed)


def test_an_episode_has_two_periods_of_the_risk_objective_and_one_ends_in_a_training(bars):
    settings = ["training.risk={objective: cvar, alpha: 0.2, period: 200}", "selection=null"]
    market = prepared(bars, None, *settings)
    assert market.trading.episode_length == 400 > LONGEST_EPISODE
    env = with_running_return(market.training_env(8, 0), ReturnRule(1.0, Period(200)), None, 0)
    env.reset()
    ended = [env.step_with_arrays(np.zeros((8, 1)))[0].period_ended.any() for _ in range(400)]
    assert np.flatnonzero(ended).tolist() == [199, 399]
    months = prepared(bars, None, "training.risk={objective: cvar, alpha: 0.2, period: 1Y}")
    assert months.trading.episode_length == 2 * Period.parse("1Y").usual_bars(bars.index[:1000])


@pytest.mark.parametrize(
    ("period", "longest"), [("50", "at most 40 bars, for episodes of 40"), ("2M", "at most 20 bars, for episodes of 40")]
)
def test_a_period_that_never_ends_in_an_episode_is_refused(bars, period, longest):
    settings = [f"training.risk={{objective: cvar, alpha: 0.2, period: {period}}}", "trading.episode_length=40"]
    market = prepared(bars, None, *settings)
    with pytest.raises(ValueError, match=f"^training.risk.period is '?{period}'?, but it must be {longest}"):
        build_model(market, load_config(None, settings).training)


def test_scale_and_relevance_come_from_the_spans_alone(bars):
    market = prepared(bars)
    raw = market_features(bars, load_config(None))
    rows = np.concatenate([np.arange(*span) for span in market.spans])
    expected = raw.values[rows].astype(np.float64)
    constant = expected.std(axis=0) < 1e-8
    assert market.scaler.mean == pytest.approx(expected.mean(axis=0), rel=1e-9, abs=1e-12)
    assert market.scaler.std[~constant] == pytest.approx(expected.std(axis=0)[~constant], rel=1e-9)
    # The last decision of a span is paid outside of it, so its return is not known.
    earned = np.concatenate([fill_returns(bars.iloc[slice(*span)], "next_open") for span in market.spans])
    assert np.isnan(earned).sum() == 4
    scaler = FeatureScaler(bars.index[0], bars.index[1000])
    held_out = np.ones(1000, bool)
    held_out[rows] = False
    paid = np.full((1000, 1), np.nan)
    paid[rows] = earned
    assert market.scaler.state_dict() == scaler.fit(raw[:1000], paid, 2.5, held_out).state_dict()


def test_an_agent_that_is_averse_to_tails_sees_what_says_something_about_the_size_of_returns():
    """Volatility comes in clusters and says nothing about the direction."""
    rng, n = np.random.default_rng(0), 1200
    std = np.where(np.arange(n) // 60 % 2, 0.002, 0.02)
    close = 100.0 * np.exp(np.cumsum(std * rng.normal(size=n)))
    opened = np.append(100.0, close[:-1]) * np.exp(0.0001 * rng.normal(size=n))
    table = {"open": opened, "high": np.maximum(opened, close), "low": np.minimum(opened, close), "close": close, "volume": 1.0}
    bars = load_bars(pd.DataFrame(table, index=pd.date_range("2010-01-01", periods=n, name="time")))
    neutral, averse = (
        dict(zip(market.scaler.names, market.scaler.weight, strict=True))
        for market in (prepared(bars, None), prepared(bars, None, "training.risk={objective: cvar, period: 21}"))
    )
    assert neutral["volatility_close"] < 0.5 < averse["volatility_close"]
    assert all(averse[name] >= weight for name, weight in neutral.items())


def test_what_agents_learn_from_does_not_depend_on_the_block(bars):
    """Features of the spans, and their scale; to single precision, since running sums keep their roundings."""
    changed = bars.copy()
    changed.iloc[400:600] = random_walk(1200, seed=9).iloc[400:600].to_numpy()
    one, other = (prepared(table, HELD_OUT, *SHORT) for table in (bars, changed))
    assert one.spans == other.spans
    for first, last in one.spans:
        np.testing.assert_allclose(one.features.values[first:last], other.features.values[first:last], atol=2e-4)
    np.testing.assert_allclose(one.scaler.weight, other.scaler.weight, atol=1e-3)
    assert not np.allclose(one.features.values[400:600], other.features.values[400:600], atol=0.1)
    whole = [prepared(table, None, *SHORT).scaler.weight for table in (bars, changed)]
    assert not np.allclose(*whole, atol=1e-3)


def test_bars_that_leave_nothing_to_train_on_are_refused_in_one_line(bars):
    with pytest.raises(ValueError, match="bars to train on are too few") as error:
        prepared(bars, (63, 990))
    assert "\n" not in str(error.value)
