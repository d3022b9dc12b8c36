"""The synthetic prices have the distribution that their docstrings promise."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.market.synthetic import ar1_returns, random_walk

N = 200_000
MINUTE = "1min"


def log_returns(bars: pd.DataFrame, start: float = 100.0) -> np.ndarray:
    return np.diff(np.log(bars["close"].to_numpy()), prepend=np.log(start))


def near(sample: np.ndarray, expected: float) -> bool:
    """Return True if a mean lies within four standard errors of its expectation."""
    return bool(abs(sample.mean() - expected) < 4.0 * sample.std() / np.sqrt(len(sample)))


@settings(max_examples=60, deadline=None)
@given(
    n_bars=st.integers(1, 200),
    rho=st.floats(-0.99, 0.99),
    volatility=st.floats(0.0, 0.2),
    drift=st.floats(-0.05, 0.05),
    overnight_share=st.floats(0.0, 1.0),
    start=st.floats(1e-3, 1e6),
    seed=st.integers(0, 2**32),
)
def test_every_frame_is_a_table_of_bars(
    n_bars: int, rho: float, volatility: float, drift: float, overnight_share: float, start: float, seed: int
) -> None:
    bars = ar1_returns(
        n_bars, rho=rho, volatility=volatility, drift=drift, overnight_share=overnight_share, start=start, seed=seed
    )
    assert list(bars.columns) == ["open", "high", "low", "close", "volume"]
    assert isinstance(bars.index, pd.DatetimeIndex)
    assert bars.index.name == "time"
    assert bars.index.is_monotonic_increasing
    assert bars.index.is_unique
    assert len(bars) == n_bars
    assert (bars.dtypes == np.float64).all()
    assert np.isfinite(bars.to_numpy()).all()
    assert (bars.to_numpy() > 0.0).all()
    assert (bars["high"] >= bars[["open", "close"]].max(axis=1)).all()
    assert (bars["low"] <= bars[["open", "close"]].min(axis=1)).all()


@pytest.mark.parametrize("drift", [0.0, 0.002, -0.001])
def test_the_expected_price_ratio_is_the_exponential_of_the_drift(drift: float) -> None:
    returns = log_returns(random_walk(N, volatility=0.02, drift=drift, freq=MINUTE, seed=1))
    assert near(np.exp(returns), np.exp(drift))
    assert near(returns, drift - 0.02**2 / 2.0)
    assert near((returns - drift) ** 2, 0.02**2)


def test_a_random_walk_forgets() -> None:
    returns = log_returns(random_walk(N, freq=MINUTE, seed=2))
    standard = (returns - returns.mean()) / returns.std()
    for lag in (1, 2, 5):
        assert near(standard[lag:] * standard[:-lag], 0.0)
        assert near((standard[lag:] ** 2 - 1.0) * (standard[:-lag] ** 2 - 1.0), 0.0)


@pytest.mark.parametrize("rho", [-0.6, 0.1, 0.9])
def test_ar1_returns_have_their_memory_and_their_volatility(rho: float) -> None:
    returns = log_returns(ar1_returns(N, rho=rho, volatility=0.005, freq=MINUTE, seed=3))
    deviations = (returns + 0.005**2 / 2.0) / 0.005
    surprises = deviations[1:] - rho * deviations[:-1]
    assert near(surprises, 0.0)
    assert near(surprises**2, 1.0 - rho**2)
    assert near(surprises * deviations[:-1], 0.0)
    assert near(surprises[1:] * surprises[:-1], 0.0)


def test_ar1_begins_in_its_stationary_law() -> None:
    first = np.array([log_returns(ar1_returns(2, rho=0.95, volatility=1.0, seed=seed)) for seed in range(2000)])
    assert near((first[:, 0] + 0.5) ** 2, 1.0)
    assert near((first[:, 1] + 0.5) ** 2, 1.0)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_gap_takes_its_share_of_the_variance(share: float) -> None:
    bars = random_walk(N, overnight_share=share, volatility=0.01, freq=MINUTE, seed=4)
    gap = np.log(bars["open"].to_numpy()[1:] / bars["close"].to_numpy()[:-1])
    session = np.log(bars["close"].to_numpy() / bars["open"].to_numpy())[1:]
    assert (gap != 0.0).all()
    assert near(gap**2, share * 0.01**2)
    assert near(session**2, (1.0 - share) * 0.01**2)
    assert near(gap * session, share * (1.0 - share) * (0.01**2 / 2.0) ** 2)


def test_high_and_low_are_the_extremes_of_a_brownian_motion() -> None:
    volatility = 0.01
    bars = random_walk(N, volatility=volatility, drift=volatility**2 / 2.0, overnight_share=0.3, freq=MINUTE, seed=5)
    rise = np.log((bars["high"] / bars["open"]).to_numpy())
    fall = np.log((bars["open"] / bars["low"]).to_numpy())
    session_std = volatility * np.sqrt(0.7)
    # The maximum of a Brownian motion is distributed as its absolute value at the end.
    for extreme in (rise, fall):
        assert near(extreme, session_std * np.sqrt(2.0 / np.pi))
        assert near(extreme**2, session_std**2)


def test_seed_start_and_frequency_are_obeyed() -> None:
    bars = random_walk(100, start=7.0, freq="1h", seed=6)
    pd.testing.assert_frame_equal(bars, random_walk(100, start=7.0, freq="1h", seed=6))
    assert not bars["close"].equals(random_walk(100, start=7.0, freq="1h", seed=7)["close"])
    assert bars.index[1] - bars.index[0] == pd.Timedelta(hours=1)
    assert abs(bars["close"].iloc[0] / 7.0 - 1.0) < 0.1
    flat = random_walk(3, volatility=0.0, start=7.0, seed=0)
    np.testing.assert_allclose(flat[["open", "high", "low", "close"]], 7.0, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_bars", 0),
        ("rho", 1.0),
        ("rho", np.nan),
        ("volatility", -0.1),
        ("drift", np.inf),
        ("overnight_share", 1.5),
        ("start", 0.0),
    ],
)
def test_impossible_parameters_are_named(name: str, value: float) -> None:
    settings: dict[str, Any] = {"n_bars": 10, "rho": 0.1, name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}, but it must be"):
        ar1_returns(**settings, seed=0)


def test_prices_beyond_the_floats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"log price.*below 700"):
        random_walk(1000, volatility=2.0, seed=0)
