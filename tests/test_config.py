"""The configuration: one tree, one file, and errors that name the key."""

import pytest

from tailguard.config import Config, dump_config, load_config

BAD_SETTINGS = {
    "trading.fee=-0.1": "trading.fee: Input should be greater than or equal to 0",
    "trading.fee=1.5": "trading.fee: Input should be less than 1",
    "trading.fee=.nan": "trading.fee: ",
    "trading.fee=free": "trading.fee: Input should be a valid number",
    "trading.fees=0.1": "trading.fees: unknown key; known are band",
    "trading.fill=yesterday": "trading.fill: Input should be 'next_open', 'close' or 'next_close'",
    "trading.sizing=big": "trading.sizing: Input should be 'cost_aware' or 'pre_cost'",
    "trading.leverage=0": "trading.leverage: Input should be greater than 0",
    "trading.leverage=.inf": "trading.leverage: Input should be a finite number",
    "trading.participation=2": "trading.participation: Input should be less than or equal to 1",
    "trading.impact_window=1": "trading.impact_window: Input should be greater than or equal to 2",
    "trading.cash=0": "trading.cash: Input should be greater than 0",
    "trading.episode_length=0": "trading.episode_length: Input should be greater than or equal to 1",
    "trading.episode_length=2.5": "trading.episode_length: Input should be a valid integer",
    "trading.long_only=perhaps": "trading.long_only: Input should be a valid boolean",
    "trading={fee: 0.5, leverage: 3}": "cannot carry a gross exposure of 3",
    "features.horizons=[]": "features.horizons: horizons must be different numbers",
    "features.horizons=[1, 1]": "features.horizons: horizons must be different numbers",
    "features.horizons=[0]": "features.horizons.0: Input should be greater than or equal to 1",
    "features.macd=[26, 12, 9]": "features.macd: macd is (fast, slow, signal) with fast < slow",
    "features.rsi=1": "features.rsi: Input should be greater than or equal to 2",
    "features.clip=0": "features.clip: Input should be greater than 0",
    "feature.rsi=14": "feature: unknown key; known are checkpoints, data, features",
    "trading=5": "trading: Input should be",
    "trading.fee": "must look like section.key=value",
    "=5": "must look like section.key=value",
    "trading..fee=1": "must look like section.key=value",
    "trading.fee=[1": "is not a YAML value",
}


@pytest.mark.parametrize(("setting", "message"), BAD_SETTINGS.items(), ids=BAD_SETTINGS)
def test_bad_setting_gives_one_line_with_the_key_and_what_is_legal(setting, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is checked below)
        load_config(None, [setting])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trading: [1, 2", "is not YAML"),
        ("just text", "must hold keys and values"),
        ("trading:\n  fee: -1\n", "trading.fee: Input should be greater than or equal to 0 (got -1)"),
        ("tradings:\n  fee: 1\n", "tradings: unknown key"),
    ],
)
def test_bad_file_is_named(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_config(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.yaml: cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_tree_survives_the_trip_through_yaml(tmp_path):
    config = load_config(
        None, ["trading.fee=0.0005", "features.horizons=[1, 3]", "data=[nasdaq-1d]", "trading.episode_length=9"]
    )
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert load_config(path) != Config()


def test_overrides_win_over_the_file_and_leave_the_rest(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("trading:\n  fee: 0.002\n  slippage: 0.001\n")
    config = load_config(path, ["trading.fee=0.003"])
    assert (config.trading.fee, config.trading.slippage) == (0.003, 0.001)


def test_an_empty_file_is_the_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("")
    assert load_config(path) == Config()
