"""One policy for many instruments: each account trades one of them exactly as if there were no others."""

import numpy as np
import pandas as pd
import pytest

from tailguard.config import load_config
from tailguard.evaluate.assessment import Effort
from tailguard.evaluate.folds import WalkforwardConfig
from tailguard.evaluate.record import load_record
from tailguard.evaluate.report.report import report_html
from tailguard.experiments.decisions import trade_market
from tailguard.experiments.prepared_market import Split, prepare_market
from tailguard.experiments.training import build_model
from tailguard.experiments.walkforward import walkforward
from tailguard.market import TradingVecEnv, random_walk, simulate
from tailguard.market.env import AccountBatch
from tailguard.market.features import FeatureConfig, FeatureScaler, build_features, build_pooled_features
from tailguard.market.relevance import t_statistics
from tailguard.market.rules import TradingSettings

SYMBOLS = ("A", "B", "C")
ROWS = 500
TINY = [
    "training.pooled=true",
    "training.steps=128",
    "training.n_envs=4",
    "training.n_steps=16",
    "training.n_epochs=1",
    "training.tensorboard=null",
    "training.policy=MlpPolicy",
    "selection.blocks=2",
    "selection.seeds=1",
    "selection.stops=[1.0]",
    "trading.fee=0.001",
]


@pytest.fixture(scope="module")
def bars():
    return pd.concat({symbol: random_walk(ROWS, seed=seed) for seed, symbol in enumerate(SYMBOLS)}, axis=1)


def test_the_features_of_a_pool_are_those_of_each_symbol_alone(bars):
    pool = build_pooled_features(bars)
    assert (pool.instruments, len(pool), pool.values.shape[0]) == (3, ROWS, 3 * ROWS)
    for values, symbol in zip(pool.by_instrument(), SYMBOLS, strict=True):
        alone = build_features(bars[symbol])
        assert pool.names == alone.names
        np.testing.assert_array_equal(values[pool.warmup :], alone.values[pool.warmup :])
    part = pool[100:300]
    np.testing.assert_array_equal(part.by_instrument(), pool.by_instrument()[:, 100:300])
    assert part.warmup == 0


def test_instruments_are_scaled_by_their_own_past(bars):
    pool = build_pooled_features(bars)
    scaler = FeatureScaler(bars.index[0], bars.index[300]).fit(pool[:300])
    scaled = scaler.transform(pool).by_instrument()
    for values, symbol in zip(scaled, SYMBOLS, strict=True):
        alone = build_features(bars[symbol])
        own = FeatureScaler(bars.index[0], bars.index[300]).fit(alone[:300]).transform(alone)
        np.testing.assert_allclose(values[pool.warmup :], own.values[pool.warmup :], atol=1e-6)
    again = FeatureScaler.from_state_dict(scaler.state_dict())
    np.testing.assert_array_equal(again.transform(pool).values, scaler.transform(pool).values)
    with pytest.raises(ValueError, match="3 instruments, asked to transform 1"):
        scaler.transform(build_features(bars["A"]))


def test_the_products_of_one_time_count_as_one_observation():
    """Copies of an instrument add nothing: the statistic of ten copies is that of one."""
    rng = np.random.default_rng(0)
    values, returns = rng.standard_normal((400, 3)), rng.standard_normal(400)
    single = t_statistics(values[None], returns[:, None])
    many = t_statistics(np.repeat(values[None], 10, axis=0), np.repeat(returns[:, None], 10, axis=1))
    np.testing.assert_allclose(many, single, rtol=1e-12)


def test_accounts_trade_one_symbol_exactly_as_alone(bars):
    pool = build_pooled_features(bars)
    rules = TradingSettings(fee=0.001)
    batch = AccountBatch(bars, rules, 3, pool)
    first, last = 100, 140
    starts = np.array([first + k * ROWS for k in range(3)])
    obs = np.empty((3, batch.observation_size), np.float32)
    batch.start_at(np.arange(3), starts, starts + last - first, obs)
    actions = np.random.default_rng(1).uniform(-1.0, 1.0, (last - first, 3))
    earned = np.stack([batch.step(step[:, None]).rewards for step in actions])
    for k, symbol in enumerate(SYMBOLS):
        targets = np.append(actions[:, k], np.nan)
        alone = simulate(bars[symbol].iloc[first : last + 1], targets, fee=0.001)
        np.testing.assert_allclose(np.exp(earned[:, k].cumsum()), alone.equity[1:], rtol=1e-12)


def test_episodes_visit_all_symbols_and_never_leave_one(bars):
    env = TradingVecEnv(
        bars, n_envs=64, seed=0, features=build_pooled_features(bars), span=[(80, 200), (300, 450)], episode_length=20
    )
    env.reset()
    seen = set()
    for _ in range(60):
        env.step_arrays(np.zeros((64, 1)))
        begin, end = env.batch.clock[1], env.batch.clock[2]
        inside = [
            (b % ROWS >= 80 and e % ROWS < 200) or (b % ROWS >= 300 and e % ROWS < 450) for b, e in zip(begin, end, strict=True)
        ]
        assert all(inside)
        assert (begin // ROWS == end // ROWS).all()
        seen |= set((begin // ROWS).tolist())
    assert seen == {0, 1, 2}


def test_features_of_other_symbols_are_refused(bars):
    with pytest.raises(ValueError, match="features of 3 instruments, bars of 2"):
        AccountBatch(bars[["A", "B"]], TradingSettings(), 1, build_pooled_features(bars))


def test_a_portfolio_gives_each_instrument_the_same_share(bars):
    config = load_config(None, [*TINY, "selection=null"])
    market = prepare_market(bars, config, Split((0, 350), (350, ROWS)))
    model = build_model(market, config.training)
    ((targets, accounts),) = trade_market(model, market, [(349, ROWS)], warmup=10)
    assert targets.shape == (ROWS - 350, 3)
    assert len(accounts) == 3
    for k, account in enumerate(accounts):
        np.testing.assert_array_equal(targets[:, k], account.targets[:, 0] / 3.0)


def test_a_pool_walks_forward_with_a_record_per_instrument(bars, tmp_path):
    config = load_config(None, TINY)
    walk = WalkforwardConfig(folds=1, seeds=1, warmup=10, jobs=1)
    record = walkforward(bars, config, walk, tmp_path, source="pool", effort=Effort(draws=50, permutations=9))
    assert record.instruments["symbol"].tolist() == list(SYMBOLS)
    assert np.isfinite(record.instruments.drop(columns="symbol").to_numpy()).all()
    assert len(record.prices.columns) == 3
    loaded = load_record(tmp_path / "evaluation")
    pd.testing.assert_frame_equal(loaded.instruments, record.instruments)
    page = report_html(record)
    assert "One policy trades all instruments" in page
    # The portfolio of the record is the sum of a third of each instrument's targets, under one account.
    assert record.selection["chosen"].sum() == 1


def test_one_instrument_alone_is_no_pool(bars):
    config = FeatureConfig()
    np.testing.assert_array_equal(build_pooled_features(bars[["A"]], config).values, build_features(bars["A"], config).values)
