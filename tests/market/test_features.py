"""Features: right numbers, free of scale, honest about their warm-up, and a scaler that sees the training span only."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tailguard.market import FeatureConfig, FeatureScaler, FeatureSet, align_bars, build_features, load_bars, load_dataset
from tailguard.market.bars import PRICES
from tailguard.market.features import parkinson, yang_zhang
from tailguard.market.relevance import FLOOR, fill_returns, relevance_weights
from tailguard.market.synthetic import random_walk

SIGMA = 0.01
SHORT = {
    "horizons": (1,), "volatility_window": 2, "slow_window": 2, "lags": 0, "drawdown_window": 2, "rsi": 2, "macd": (2, 3, 2),
    "atr": 2, "bollinger": 2, "cci": 2, "calendar": False,
}  # fmt: skip
CALENDAR = ("hour_sin", "hour_cos", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def brownian_bars(n_bars: int = 20_000, overnight: float = 0.0, drift: float = 0.0, steps: int = 64) -> pd.DataFrame:
    """Bars of a Brownian log price: a jump overnight, then a path whose extremes between its points are drawn exactly."""
    rng = np.random.default_rng(0)
    variance = SIGMA**2 * (1.0 - overnight) / steps
    moves = drift / steps + math.sqrt(variance) * rng.standard_normal((n_bars, steps))
    ends = np.cumsum(moves, axis=1)
    middles = ends - moves / 2.0
    up, down = np.sqrt(moves**2 + 2.0 * variance * rng.standard_exponential((2, n_bars, steps))) / 2.0
    gaps = SIGMA * math.sqrt(overnight) * rng.standard_normal(n_bars)
    log_open = np.cumsum(gaps + np.concatenate([[0.0], ends[:-1, -1]]))
    logs = {
        "open": log_open,
        "high": log_open + (middles + up).max(axis=1),
        "low": log_open + (middles - down).min(axis=1),
        "close": log_open + ends[:, -1],
    }
    index = pd.date_range("2000-01-01", periods=n_bars, freq="1D", unit="ns", name="time")
    return pd.DataFrame({name: np.exp(values) for name, values in logs.items()}, index=index)


def flat_bars(n_bars: int, price: float = 100.1, volume: float = 0.0) -> pd.DataFrame:
    index = pd.date_range("2020-01-01", periods=n_bars, freq="1D", unit="ns", name="time")
    return pd.DataFrame({**dict.fromkeys(PRICES, price), "volume": volume}, index=index)


def column(features: FeatureSet, name: str) -> np.ndarray:
    return features.values[:, features.names.index(name)]


# Volatility estimators. The standard error of a variance from 20,000 bars is about 0.5 % for each of them.


@pytest.mark.parametrize("overnight", [0.0, 0.3])
def test_parkinson_is_unbiased_for_the_variance_of_the_session(overnight: float) -> None:
    bars = brownian_bars(overnight=overnight)
    variance = np.nanmean(parkinson(bars["high"], bars["low"], 21) ** 2)
    assert variance == pytest.approx(SIGMA**2 * (1.0 - overnight), rel=0.02)


@pytest.mark.parametrize("overnight", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("drift", [0.0, SIGMA])
def test_yang_zhang_is_unbiased_for_the_whole_variance_whatever_the_drift(overnight: float, drift: float) -> None:
    bars = brownian_bars(overnight=overnight, drift=drift)
    variance = np.nanmean(yang_zhang(*(bars[name] for name in PRICES), 21) ** 2)
    assert variance == pytest.approx(SIGMA**2, rel=0.02)


def test_parkinson_takes_drift_for_volatility() -> None:
    bars = brownian_bars(drift=SIGMA)
    assert np.nanmean(parkinson(bars["high"], bars["low"], 21) ** 2) > 1.2 * SIGMA**2


def test_yang_zhang_is_much_more_precise_than_closes() -> None:
    bars = brownian_bars(5_000)
    precise = yang_zhang(*(bars[name] for name in PRICES), 21).dropna() ** 2
    closes = np.log(bars["close"]).diff().rolling(21).var().dropna()
    assert precise.var() < closes.var() / 4.0


def test_parkinson_closed_form() -> None:
    low = pd.Series([10.0, 20.0, 15.0, 12.0])
    volatility = parkinson(low * math.e**0.03, low, 3)
    assert volatility.isna().tolist() == [True, True, False, False]
    assert volatility.to_numpy()[2:] == pytest.approx(0.03 / math.sqrt(4.0 * math.log(2.0)), rel=1e-12)


def test_yang_zhang_counts_overnight_jumps_alone_when_sessions_do_not_move() -> None:
    jumps = np.array([0.0, 0.01, -0.02, 0.03])
    price = pd.Series(np.exp(np.cumsum(jumps)))
    assert yang_zhang(price, price, price, price, 3).iloc[-1] == pytest.approx(np.std(jumps[1:], ddof=1), rel=1e-12)


def test_rogers_satchell_part_is_zero_for_bars_that_go_straight() -> None:
    low = pd.Series(np.exp(0.02 * np.arange(6.0)))
    high = low * math.e**0.02  # opens at the low, closes at the high, and the next bar opens there: nothing but drift
    assert yang_zhang(low, high, low, high, 4).iloc[-1] == pytest.approx(0.0, abs=1e-8)


# Every market feature against one slow reference, one row at a time.


def wilder(values: np.ndarray, window: int) -> float:
    """Wilder's average: the mean of the first `window` values, then 1 / window of every new one."""
    average = values[:window].mean()
    for value in values[window:]:
        average += (value - average) / window
    return float(average)


def exponential(values: np.ndarray, seed: float, window: int) -> np.ndarray:
    averages = [seed]
    for value in values:
        averages.append(averages[-1] + 2.0 / (window + 1.0) * (value - averages[-1]))
    return np.array(averages)


def reference_row(bars: pd.DataFrame, config: FeatureConfig) -> dict[str, float]:
    """The market features of the last bar, from the definitions."""
    opens, high, low, close, volume = (bars[name].to_numpy() for name in (*PRICES, "volume"))
    returns = np.diff(np.log(close))
    scale = returns[-config.slow_window :].std(ddof=1)
    row = {f"return_{h}": math.log(close[-1] / close[-1 - h]) / (scale * math.sqrt(h)) for h in config.horizons}
    row |= {f"lag_{k}": math.log(close[-1 - k] / close[-2 - k]) / scale for k in range(1, config.lags + 1)}

    n = config.volatility_window
    nights, days = np.log(opens[-n:] / close[-n - 1 : -1]), np.log(close[-n:] / opens[-n:])
    up, down = np.log(high[-n:] / opens[-n:]), np.log(low[-n:] / opens[-n:])
    k = 0.34 / (1.34 + (n + 1) / (n - 1))
    yz = nights.var(ddof=1) + k * days.var(ddof=1) + (1 - k) * np.mean(up * (up - days) + down * (down - days))
    row["volatility_close"] = math.log(returns[-n:].std(ddof=1))
    row["volatility_parkinson"] = math.log(math.sqrt(np.mean(np.log(high[-n:] / low[-n:]) ** 2) / (4.0 * math.log(2.0))))
    row["volatility_yang_zhang"] = math.log(math.sqrt(yz))
    row["volatility_ratio"] = math.log(returns[-n:].std(ddof=1) / scale)

    changes = np.diff(close)
    gain, loss = wilder(np.maximum(changes, 0.0), config.rsi), wilder(np.maximum(-changes, 0.0), config.rsi)
    row["rsi"] = (gain - loss) / (gain + loss)
    ranges = np.maximum(high[1:], close[:-1]) - np.minimum(low[1:], close[:-1])
    atr = wilder(ranges, config.atr)
    row["atr"] = math.log(atr / close[-1])
    fast, slow, signal = config.macd  # both averages begin at the bar where the slow one is full
    macd = exponential(close[slow:], close[slow - fast : slow].mean(), fast) - exponential(
        close[slow:], close[:slow].mean(), slow
    )
    row["macd"] = (macd[-1] - exponential(macd[signal:], macd[:signal].mean(), signal)[-1]) / atr
    typical = ((high + low + close) / 3.0)[-config.cci :]
    row["cci"] = (typical[-1] - typical.mean()) / (0.015 * np.abs(typical - typical.mean()).mean()) / 200.0

    logs = np.log(close[-config.bollinger :])
    row["bollinger"] = (logs[-1] - logs.mean()) / (2.0 * logs.std())
    amounts = np.log(1.0 + volume[-config.slow_window :])
    row["volume"] = (amounts[-1] - amounts.mean()) / amounts.std(ddof=1)
    row["drawdown"] = math.log(close[-1] / close[-config.drawdown_window :].max())
    return row


@pytest.mark.parametrize("name", ["nasdaq-1d", "btcusd-1h", "eurusd-1h"])
@pytest.mark.parametrize(
    "config", [FeatureConfig(), FeatureConfig(drawdown_window=40, lags=3, macd=(3, 10, 4), rsi=5, atr=9, cci=7)]
)
def test_every_market_feature_equals_its_definition(name: str, config: FeatureConfig) -> None:
    bars = load_dataset(name).iloc[1000:1400]
    features = build_features(bars, config)
    for t in (features.warmup, features.warmup + 1, 150, 399):
        expected = reference_row(bars.iloc[: t + 1], config)
        assert set(expected) == set(features.names) - set(CALENDAR)
        for feature, value in expected.items():
            clipped = min(max(value, -config.clip), config.clip)
            assert column(features, feature)[t] == pytest.approx(clipped, rel=1e-5, abs=1e-5), feature


def test_the_hour_is_a_point_on_a_circle_and_every_weekday_has_a_column() -> None:
    times = ["2023-12-29", "2023-12-30", "2023-12-31", "2024-01-01", "2024-01-01 06:00", "2024-01-02 12:30", "2024-07-07"]
    bars = flat_bars(len(times)).set_index(pd.DatetimeIndex(times, name="time"))
    features = build_features(bars, FeatureConfig(**SHORT | {"calendar": True}))
    assert features.warmup == 3
    assert features.names[-len(CALENDAR) :] == CALENDAR
    turns = np.array([0.0, 6.0, 12.5, 0.0]) / 24.0
    assert column(features, "hour_sin")[3:] == pytest.approx(np.sin(2.0 * np.pi * turns), abs=1e-6)
    assert column(features, "hour_cos")[3:] == pytest.approx(np.cos(2.0 * np.pi * turns), abs=1e-6)
    days = [column(features, day)[3:].tolist() for day in CALENDAR[2:]]
    assert days == [[1, 1, 0, 0], [0, 0, 1, 0], *[[0] * 4] * 4, [0, 0, 0, 1]]  # two Mondays, a Tuesday, a Sunday


def test_the_calendar_has_no_day_of_the_year() -> None:
    weeks = pd.date_range("2024-01-01", periods=400, freq="7D", unit="ns", name="time")
    features = build_features(random_walk(400, seed=0).set_index(weeks))
    for name in CALENDAR:
        assert np.ptp(column(features, name)[features.warmup :]) == 0.0, name


# Scale, size and form.


@pytest.mark.parametrize("factor", [1e-6, 0.37, 1e6])
@pytest.mark.parametrize("name", ["nasdaq-1d", "btcusd-1h"])
def test_multiplying_all_prices_changes_no_feature(name: str, factor: float) -> None:
    bars = load_dataset(name).iloc[:1500]
    scaled = bars.assign(**{price: bars[price] * factor for price in PRICES})
    assert build_features(scaled).values == pytest.approx(build_features(bars).values, rel=1e-5, abs=1e-5)


def test_at_least_20_features_by_default_as_float32() -> None:
    features = build_features(random_walk(100, seed=0))
    assert features.values.shape == (100, len(features.names))
    assert len(set(features.names)) == len(features.names) >= 20
    assert features.values.dtype == np.float32
    assert features.values.flags.c_contiguous


def test_features_are_cut_at_the_clip() -> None:
    bars = load_dataset("btcusd-1h").iloc[:2000]
    wide, narrow = build_features(bars), build_features(bars, FeatureConfig(clip=0.5))
    assert np.abs(wide.values).max() > 0.5
    assert np.array_equal(narrow.values, wide.values.clip(-0.5, 0.5))


# Warm-up.


@pytest.mark.parametrize(
    ("longest", "warmup"),
    [
        ({}, 3),  # MACD: 2 bars for the slow average, then 1 for the signal
        ({"horizons": (1, 40)}, 40),
        ({"volatility_window": 40}, 40),  # 40 returns need 41 bars
        ({"slow_window": 40}, 40),
        ({"lags": 40}, 41),  # the return of 40 bars ago needs the close before it
        ({"rsi": 40}, 40),
        ({"macd": (5, 40, 9)}, 39 + 8),
        ({"atr": 40}, 40),
        ({"bollinger": 40}, 39),
        ({"cci": 40}, 39),
        ({"drawdown_window": 40}, 3),  # the high so far is known from the first bar on
    ],
)
def test_warmup_is_exactly_the_longest_look_back(longest: dict[str, object], warmup: int) -> None:
    config = FeatureConfig(**SHORT | longest)
    bars = random_walk(120, seed=0)
    features = build_features(bars, config)
    assert features.warmup == warmup
    assert not features.values[:warmup].any()
    assert np.isfinite(features.values).all()
    assert features.values[warmup:].any(axis=1).all()
    assert build_features(bars.iloc[:warmup], config).warmup == warmup  # one row earlier nothing is usable
    assert build_features(bars.iloc[: warmup + 1], config).warmup == warmup


@pytest.mark.parametrize("n_bars", [1, 2, 3, 13, 14, 15, 33, 62, 63])
def test_fewer_bars_than_the_look_backs_are_all_warm_up(n_bars: int) -> None:
    features = build_features(random_walk(n_bars, seed=0))
    assert features.warmup == n_bars
    assert features.values.shape == (n_bars, 36)
    assert not features.values.any()


# Tables that are hard to divide by.


@pytest.mark.parametrize("price", [100.1, 7e-7])
@pytest.mark.parametrize("name", ["return_1", "return_63", "rsi", "macd", "cci", "bollinger", "volume", "drawdown"])
def test_a_price_that_never_moves_is_neutral(price: float, name: str) -> None:
    features = build_features(flat_bars(120, price))
    assert features.warmup == 63
    assert np.isfinite(features.values).all()
    assert column(features, name) == pytest.approx(np.zeros(120), abs=1e-6)


def test_a_price_that_stops_moving_gives_finite_features() -> None:
    bars = random_walk(100, seed=0)
    still = flat_bars(200, float(bars["close"].iloc[-1])).set_index(bars.index[-1] + pd.to_timedelta(np.arange(1, 201), "D"))
    features = build_features(pd.concat([bars, still]))
    assert np.isfinite(features.values).all()
    for name in ("return_1", "bollinger", "cci", "volume"):
        assert column(features, name)[-100:] == pytest.approx(np.zeros(100), abs=1e-3), name


def test_no_volume_column_is_the_same_as_zero_volume() -> None:
    bars = random_walk(150, seed=0)
    without = build_features(load_bars(bars.drop(columns="volume")))
    assert np.array_equal(without.values, build_features(bars.assign(volume=0.0)).values)
    assert not column(without, "volume").any()
    assert column(build_features(bars), "volume").any()


# Several symbols.


def test_symbols_prefix_their_features_and_share_the_calendar() -> None:
    one, two = random_walk(100, seed=1), random_walk(100, seed=2)
    features = build_features(align_bars({"one": one, "two": two}))
    single = build_features(one)
    market = single.names[: -len(CALENDAR)]
    assert single.names == (*market, *CALENDAR)
    assert features.names == (*(f"{symbol}:{name}" for symbol in ("one", "two") for name in market), *CALENDAR)
    for symbol, bars in (("one", one), ("two", two)):
        alone = build_features(bars)
        for name in market:
            assert np.array_equal(column(features, f"{symbol}:{name}"), column(alone, name))


def test_a_missing_bar_carries_the_last_features_forward() -> None:
    full, other = random_walk(200, seed=1), random_walk(200, seed=2)
    holey = other.drop(other.index[[100, 150, 151, 199]])
    features, own = build_features(align_bars({"full": full, "holey": holey})), build_features(holey)
    held = np.searchsorted(holey.index, full.index, side="right") - 1  # the last bar that the symbol had by then
    for name in ("return_1", "rsi", "volume", "volatility_yang_zhang"):
        assert np.array_equal(column(features, f"holey:{name}")[64:], column(own, name)[held[64:]])


def test_warmup_waits_for_the_symbol_that_starts_last() -> None:
    early, late = random_walk(200, seed=1), random_walk(200, seed=2).iloc[80:]
    features = build_features(align_bars({"early": early, "late": late}))
    assert features.warmup == 80 + 63
    assert not features.values[: features.warmup].any()


# Settings.


@pytest.mark.parametrize(
    "wrong",
    [
        {"horizons": ()}, {"horizons": (5, 5)}, {"horizons": (0,)}, {"horizons": (1, -2)}, {"horizons": (1.5,)},
        {"volatility_window": 1}, {"slow_window": 0}, {"drawdown_window": -1}, {"rsi": 1}, {"atr": 2.5}, {"cci": 10_001},
        {"bollinger": None}, {"macd": (26, 12, 9)}, {"macd": (12, 12, 9)}, {"macd": (12, 26)}, {"macd": (12, 26, 1)},
        {"clip": 0.0}, {"clip": -1.0}, {"clip": math.nan}, {"clip": math.inf}, {"calendar": "sometimes"}, {"window": 3},
        {"lags": -1}, {"lags": 1001}, {"lags": 1.5}, {"relevance": -0.1}, {"relevance": math.nan}, {"relevance": math.inf},
    ],
)  # fmt: skip
def test_config_rejects_nonsense_and_names_it(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        FeatureConfig(**wrong)


def test_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        FeatureConfig().rsi = 3


# Slices.

rows = st.one_of(st.none(), st.integers(-120, 120))


@settings(max_examples=60, deadline=None)
@given(start=rows, stop=rows)
def test_a_slice_keeps_rows_times_and_what_is_left_of_the_warmup(start: int | None, stop: int | None) -> None:
    features = build_features(random_walk(100, seed=0), FeatureConfig(**SHORT | {"slow_window": 30}))
    part = features[start:stop]
    assert np.array_equal(part.values, features.values[start:stop])
    assert part.time.equals(features.time[start:stop])
    assert part.names == features.names
    assert part.warmup == sum(row < features.warmup for row in range(100)[start:stop])
    assert len(part) == len(part.values)


@pytest.mark.parametrize("step", [-1, 2])
def test_slices_with_a_step_are_refused(step: int) -> None:
    with pytest.raises(ValueError, match="step 1"):
        build_features(random_walk(10, seed=0))[::step]


# The scaler.

TRAIN = slice(0, 200)


def train_scaler(bars: pd.DataFrame) -> FeatureScaler:
    return FeatureScaler(bars.index[0], bars.index[200]).fit(build_features(bars)[TRAIN])


def test_scaler_standardises_the_training_rows_and_leaves_the_warmup_at_zero() -> None:
    bars = random_walk(300, seed=0)
    features = build_features(bars)
    scaled = train_scaler(bars).transform(features)
    rows = scaled.values[features.warmup : 200].astype(np.float64)
    constant = np.ptp(features.values[features.warmup : 200], axis=0) == 0.0
    assert rows.mean(axis=0) == pytest.approx(np.zeros(len(features.names)), abs=1e-5)
    assert rows.std(axis=0) == pytest.approx(np.where(constant, 0.0, 1.0), abs=1e-5)
    assert not scaled.values[: features.warmup].any()
    assert scaled.values.dtype == np.float32
    assert (scaled.names, scaled.warmup) == (features.names, features.warmup)


@pytest.mark.parametrize("outside", [slice(0, 201), slice(199, 210), slice(250, 300)])
def test_scaler_refuses_rows_outside_its_span(outside: slice) -> None:
    bars = random_walk(300, seed=0)
    scaler = FeatureScaler(bars.index[0], bars.index[200])
    with pytest.raises(ValueError, match="outside the training span"):
        scaler.fit(build_features(bars)[outside])
    assert scaler.names == ()


def test_scaler_refuses_rows_before_its_span() -> None:
    bars = random_walk(300, seed=0)
    with pytest.raises(ValueError, match="refusing to fit on 1 rows"):
        FeatureScaler(bars.index[101], bars.index[200]).fit(build_features(bars)[100:200])


def test_scaler_refuses_a_second_fit_and_keeps_its_state() -> None:
    bars = random_walk(300, seed=0)
    scaler = train_scaler(bars)
    state = scaler.state_dict()
    with pytest.raises(ValueError, match="fitted already"):
        scaler.fit(build_features(bars)[100:200])
    assert scaler.state_dict() == state


def test_scaler_refuses_too_few_rows() -> None:
    bars = random_walk(300, seed=0)
    with pytest.raises(ValueError, match="64 bars to train on are too few: the look-backs take the first 63"):
        FeatureScaler(bars.index[0], bars.index[200]).fit(build_features(bars)[:64])


def test_scaler_refuses_an_empty_span() -> None:
    with pytest.raises(ValueError, match="start before it ends"):
        FeatureScaler("2020-01-02", "2020-01-02")


def test_scaler_refuses_other_columns_and_transforms_before_the_fit() -> None:
    bars = random_walk(300, seed=0)
    other = build_features(bars, FeatureConfig(horizons=(1, 3)))
    with pytest.raises(ValueError, match="return_3"):
        train_scaler(bars).transform(other)
    with pytest.raises(ValueError, match="fitted on"):
        FeatureScaler(bars.index[0], bars.index[200]).transform(other)


def test_scaler_survives_json_bit_for_bit() -> None:
    bars = random_walk(300, seed=0)
    scaler = train_scaler(bars)
    copy = FeatureScaler.from_state_dict(json.loads(json.dumps(scaler.state_dict())))
    features = build_features(bars)
    assert copy.state_dict() == scaler.state_dict()
    assert copy.transform(features).values.tobytes() == scaler.transform(features).values.tobytes()
    with pytest.raises(ValueError, match="fitted already"):
        copy.fit(features[TRAIN])


def test_scaler_state_depends_on_the_training_bars_and_on_no_later_ones() -> None:
    bars = random_walk(300, seed=0)
    later, within = bars.copy(), bars.copy()
    later.iloc[200:] *= 10.0
    within.iloc[199:] *= 10.0
    state = json.dumps(train_scaler(bars).state_dict())
    assert json.dumps(train_scaler(later).state_dict()) == state
    assert json.dumps(train_scaler(within).state_dict()) != state


def test_scaler_keeps_a_constant_column_finite_and_its_later_changes_visible() -> None:
    time = pd.date_range("2020-01-01", periods=6)
    features = FeatureSet(np.array([[3.0]] * 4 + [[5.0]] * 2, np.float32), ("x",), time, 0)
    scaled = FeatureScaler(time[0], time[4]).fit(features[:4]).transform(features)
    assert scaled.values[:, 0].tolist() == [0.0, 0.0, 0.0, 0.0, 2.0, 2.0]


# Relevance.


def weighted_scaler(bars: pd.DataFrame, held_out: np.ndarray | None = None, **changes: object) -> FeatureScaler:
    """A scaler of the first 200 rows with the weights of what their features say; `changes` replace its inputs."""
    inputs = {"features": build_features(bars)[TRAIN], "earned": fill_returns(bars.iloc[TRAIN], "close")} | changes
    return FeatureScaler(bars.index[0], bars.index[200]).fit(inputs["features"], inputs["earned"], 1.0, held_out)


def test_scaler_weights_the_standardised_columns_by_their_relevance() -> None:
    bars = random_walk(300, seed=0)
    features, plain, scaler = build_features(bars), train_scaler(bars), weighted_scaler(bars)
    rows = slice(features.warmup, 200)
    standardised = (features.values[rows].astype(np.float64) - plain.mean) / plain.std
    expected = relevance_weights(standardised[None], fill_returns(bars.iloc[TRAIN], "close")[rows], 1.0)
    assert scaler.weight == pytest.approx(expected, rel=1e-9)
    assert 0.0 < (scaler.weight > FLOOR).mean() < 1.0
    assert scaler.factor == pytest.approx(expected / plain.std, rel=1e-9)
    assert scaler.transform(features).values == pytest.approx(plain.transform(features).values * expected, abs=1e-5)
    assert plain.weight.tolist() == [1.0] * len(features.names)


@pytest.mark.parametrize("relevance", [0.0, None])
def test_scaler_without_relevance_only_standardises(relevance: float | None) -> None:
    bars = random_walk(300, seed=0)
    features, earned = build_features(bars)[TRAIN], fill_returns(bars.iloc[TRAIN], "close")
    scaler = FeatureScaler(bars.index[0], bars.index[200])
    scaler.fit(features, earned, relevance) if relevance is not None else scaler.fit(features, earned)
    assert scaler.state_dict() == train_scaler(bars).state_dict()


def test_scaler_learns_nothing_from_rows_that_are_held_out() -> None:
    bars = random_walk(300, seed=0)
    features, earned = build_features(bars)[TRAIN], fill_returns(bars.iloc[TRAIN], "close")
    held_out = (np.arange(200) >= 120) & (np.arange(200) < 160)
    garbage = features.values.copy()
    garbage[held_out] = 1e3 * np.random.default_rng(0).standard_normal(garbage[held_out].shape)
    changed = {"features": replace(features, values=garbage), "earned": np.where(held_out[:, None], 5.0, earned)}
    state = weighted_scaler(bars, held_out).state_dict()
    assert weighted_scaler(bars, held_out, **changed).state_dict() == state
    assert weighted_scaler(bars).state_dict() != state
    assert weighted_scaler(bars, **changed).state_dict() != state


def test_scaler_keeps_its_weights_and_reads_files_that_have_none() -> None:
    bars = random_walk(300, seed=0)
    scaler, features = weighted_scaler(bars), build_features(bars)
    state = json.loads(json.dumps(scaler.state_dict()))
    assert (
        FeatureScaler.from_state_dict(state).transform(features).values.tobytes() == scaler.transform(features).values.tobytes()
    )
    del state["weight"]  # as version 0.1 wrote it
    old = FeatureScaler.from_state_dict(state)
    assert old.transform(features).values.tobytes() == train_scaler(bars).transform(features).values.tobytes()


def test_scaler_weights_depend_on_the_training_bars_and_on_no_later_ones() -> None:
    bars = random_walk(300, seed=0)
    later, within = bars.copy(), bars.copy()
    later.iloc[200:, :4] *= 2.0
    within.iloc[199:, :4] *= 2.0
    weight = weighted_scaler(bars).weight.tolist()
    assert weighted_scaler(later).weight.tolist() == weight
    assert weighted_scaler(within).weight.tolist() != weight


def test_scaler_changes_nothing_in_what_it_transforms() -> None:
    bars = random_walk(300, seed=0)
    features = build_features(bars)
    before = features.values.copy()
    train_scaler(bars).transform(features)
    assert np.array_equal(features.values, before)


class TestOwnFeatures:
    BARS = random_walk(400, seed=5)
    QUICK = FeatureConfig(
        horizons=(1, 3), volatility_window=3, slow_window=4, drawdown_window=3, rsi=3, macd=(2, 4, 2), atr=3, bollinger=3, cci=3
    )

    def test_columns_of_the_file_are_features_as_they_stand_with_the_last_known_value(self) -> None:
        mood = np.linspace(-50.0, 50.0, 400)
        mood[[100, 101]] = np.nan
        config = self.QUICK.model_copy(update={"columns": ("mood",)})
        features = build_features(self.BARS.assign(mood=mood), config)
        column = features.values[:, features.names.index("mood")]
        np.testing.assert_array_equal(column[102:], mood[102:].astype(np.float32))
        np.testing.assert_array_equal(column[99:102], np.float32(mood[99]))
        scaled = FeatureScaler(self.BARS.index[0], self.BARS.index[200]).fit(features[:200]).transform(features)
        rows = column[features.warmup : 200].astype(np.float64)
        ours = scaled.values[300, features.names.index("mood")]
        np.testing.assert_allclose(ours, (mood[300] - rows.mean()) / rows.std(), rtol=1e-5)

    def test_features_are_left_out_by_name_and_by_pattern(self) -> None:
        names = build_features(self.BARS, self.QUICK).names
        config = self.QUICK.model_copy(update={"exclude": ("rsi", "volatility_*")})
        left = build_features(self.BARS, config).names
        assert left == tuple(name for name in names if name != "rsi" and not name.startswith("volatility"))
        only = self.QUICK.model_copy(update={"exclude": ("*",), "columns": ("mood",), "calendar": False})
        assert build_features(self.BARS.assign(mood=1.0), only).names == ("mood",)
        with pytest.raises(ValueError, match=r"features\.exclude is 'rsj', but it must be one of return_1"):
            build_features(self.BARS, self.QUICK.model_copy(update={"exclude": ("rsj",)}))
        with pytest.raises(ValueError, match="leaves no feature"):
            build_features(self.BARS, only.model_copy(update={"columns": ()}))

    def test_longer_bars_give_the_features_of_resampled_bars_once_they_are_finished(self) -> None:
        features = build_features(self.BARS, self.QUICK.model_copy(update={"timeframes": ("1W",)}))
        rules = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
        weeks = self.BARS.resample("W-SUN").agg(rules)  # named by the Sunday that ends them
        weekly = build_features(weeks.iloc[1:], self.QUICK)
        for row in (200, 201, 206, 207, 399):
            time = self.BARS.index[row]
            finished = weekly.time[weekly.time.normalize() < time - pd.Timedelta(days=time.day_of_week)][-1]
            expected = weekly.values[weekly.time.get_loc(finished)]
            for name in ("return_1", "rsi", "atr", "volume"):
                ours = features.values[row, features.names.index(f"1W {name}")]
                assert ours == pytest.approx(expected[weekly.names.index(name)], rel=1e-4, abs=1e-5), (row, name)

    @pytest.mark.parametrize("cut", [200, 203, 300])
    def test_longer_bars_never_look_ahead(self, cut: int) -> None:
        config = self.QUICK.model_copy(update={"timeframes": ("1W", "3D")})
        whole, part = build_features(self.BARS, config), build_features(self.BARS.iloc[:cut], config)
        np.testing.assert_array_equal(whole.values[:cut], part.values)

    @pytest.mark.parametrize("wrong", [{"columns": ("close",)}, {"timeframes": ("soon",)}, {"timeframes": ("-1D",)}])
    def test_nonsense_is_refused(self, wrong: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="must be"):
            FeatureConfig(**wrong)

    def test_a_timeframe_must_be_longer_than_the_bars(self) -> None:
        with pytest.raises(ValueError, match=r"features\.timeframes is '0 days 01:00:00', but it must be longer than the bars"):
            build_features(self.BARS, self.QUICK.model_copy(update={"timeframes": ("1h",)}))
