"""Functions of installed packages as features: found by name, causal, scaled like the others, and kept out of the embargo."""

import sys

import numpy as np
import pandas as pd
import pytest

from tailguard.config import load_config
from tailguard.evaluate.folds import longest_lookback
from tailguard.experiments.prepared_market import Split, market_features, prepare_market
from tailguard.market import FeatureConfig, align_bars, build_features, random_walk
from tailguard.market.plugins import LookAheadError

CODE = """
import numpy as np
import pandas as pd

def momentum(bars):
    return 1000.0 * np.log(bars["close"]).diff(20)

def two(bars):
    return pd.DataFrame({"range": bars["high"] / bars["low"], "gap": bars["open"] / bars["close"].shift(1)})

def centred(bars):
    return bars["close"] / bars["close"].mean()

def tomorrow(bars):
    return bars["close"].shift(-1).ffill()

def noise(bars):
    return pd.Series(np.random.default_rng().random(len(bars)), bars.index)

def short(bars):
    return bars["close"].iloc[1:]

def text(bars):
    return "nothing"
"""
NAMES = ("momentum", "two", "centred", "tomorrow", "noise", "short", "text")


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package as pip would have installed it."""
    (tmp_path / "my_features.py").write_text(CODE)
    (tmp_path / "my_features-0.1.dist-info").mkdir()
    entries = "".join(f"{name} = my_features:{name}\n" for name in NAMES)
    (tmp_path / "my_features-0.1.dist-info" / "entry_points.txt").write_text(f"[tailguard.features]\n{entries}")
    (tmp_path / "my_features-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my-features\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_features", None)


def config(name, lookback=20):
    return load_config(None, [f"features.functions={{{name}: {lookback}}}"])


def test_a_function_gives_columns_that_the_training_rows_scale():
    bars = random_walk(300, seed=0)
    features = build_features(bars, config("momentum").features)
    column = features.values[:, features.names.index("momentum")]
    expected = 1000.0 * np.log(bars["close"]).diff(20).to_numpy()
    np.testing.assert_array_equal(column[features.warmup :], expected[features.warmup :].astype(np.float32))
    assert np.abs(column).max() > 10.0  # not cut to what other features are
    market = prepare_market(bars, config("momentum"), Split((0, 200), (200, 300)))
    scaled = market.features.values[features.warmup : 200, features.names.index("momentum")] / market.scaler.weight[-8]
    assert np.abs(scaled).max() < 10.0


def test_symbols_and_columns_have_names_of_their_own():
    bars = align_bars({"a": random_walk(300, seed=0), "b": random_walk(300, seed=1)})
    names = build_features(bars, FeatureConfig(functions={"two": 2})).names
    assert [name for name in names if "two" in name] == ["a:two.range", "a:two.gap", "b:two.range", "b:two.gap"]


def test_its_look_back_is_part_of_the_embargo():
    assert longest_lookback(config("momentum", 500).features) == 501


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("centred", LookAheadError, "the function centred looks ahead: its features up to .* change"),
        ("tomorrow", LookAheadError, "the function tomorrow looks ahead"),
        ("noise", ValueError, "the function noise is 'random', but it must be deterministic"),
        ("short", ValueError, "the index of the result of short is 299, but it must be that of the 300 bars"),
        ("text", ValueError, "the result of text is 'str', but it must be a DataFrame or a Series"),
        ("missing", ValueError, "features.functions is 'missing', but it must be one of centred, momentum"),
    ],
)
def test_what_cannot_be_a_feature_is_refused(name, error, message):
    with pytest.raises(error, match=message):
        market_features(random_walk(300, seed=0), config(name))


def test_a_module_that_is_not_declared_is_not_called():
    with pytest.raises(ValueError, match=r"features\.functions is 'os:system'"):
        market_features(random_walk(300, seed=0), load_config(None, ["features.functions={'os:system': 1}"]))


def test_causal_functions_pass(package):
    for name in ("momentum", "two"):
        assert isinstance(market_features(random_walk(300, seed=0), config(name)).time, pd.DatetimeIndex)
