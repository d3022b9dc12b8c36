"""The reference of all settings: complete, in words, and the same on the page and in the terminal."""

import config_reference
import pytest

from tailguard.config import Config, CriticConfig
from tailguard.config_help import explain_key, plain, sections

TREE = {section.key: section for section in sections()}
SETTINGS = {setting.key: setting for section in TREE.values() for setting in section.settings}


def test_the_page_is_current():
    assert config_reference.PAGE.read_text(encoding="utf-8") == config_reference.page(), "run python tools/config_reference.py"
    assert config_reference.main(["--check"]) == 0


def test_every_section_and_key_is_on_it():
    assert set(TREE) >= {
        "",
        "trading",
        "features",
        "training",
        "training.risk",
        "training.critic.scale",
        "population.hyperparams[]",
    }
    page = config_reference.page()
    for section in TREE.values():
        assert section.summary
        assert f"`{section.key}`" in page or not section.key
    for name in Config.model_fields:
        assert name in SETTINGS
    for name in CriticConfig.model_fields:
        assert f"training.critic.{name}" in SETTINGS


@pytest.mark.parametrize("key", SETTINGS)
def test_every_key_says_what_it_means(key):
    setting = SETTINGS[key]
    assert setting.type
    assert setting.default or "section" in setting.type
    assert setting.meaning.endswith((".", "?"))
    assert "None" not in setting.meaning
    assert "``" not in setting.meaning
    assert ":class:" not in setting.meaning


@pytest.mark.parametrize(
    ("key", "type_in_words", "default"),
    [
        ("trading.fee", "number in [0, 1)", "`0.001`"),
        ("trading.participation", "number in (0, 1] or null", "`null`"),
        ("trading.fill", "`next_open`, `close` or `next_close`", '`"next_open"`'),
        ("features.macd", "list of 3 integers in [2, 10000]", "`[12, 26, 9]`"),
        ("training.n_steps", "integer >= 2", "`64`"),
        ("training.risk.alpha", "number in (0, 1] or list of 2 numbers in (0, 1]", "`0.05`"),
        ("training.risk.limit", "number or null", "`null`"),
        ("training.critic.num_quantiles", "integer in [1, 1000]", "`32`"),
        ("training.entropy.bad_explained_threshold", "number <= 1", "`0.0`"),
        ("training.network.net_arch", "section, list of integers > 0 or null", "`[16]`"),
        ("training.network.lstm_hidden_size", "integer > 0", "`16`"),
        ("training.adversary.perturbable", "list of (integers >= 0 or text) or null", "`null`"),
        ("training.optimizer.gate", "`minmax`, `reference`, `none` or null", "`null`"),
        ("training.optimizer.adaptive_noise", "true, false or null", "`null`"),
        ("training.vgs", "section or null", "`null`"),
        ("training.risk", "section", ""),
        ("population.hyperparams", "list of sections", "`[]`"),
        ("population.hyperparams[].name", "text", "required"),
    ],
)
def test_types_ranges_and_defaults_in_words(key, type_in_words, default):
    assert (SETTINGS[key].type, SETTINGS[key].default) == (type_in_words, default)


def test_an_older_name_is_mentioned():
    assert SETTINGS["training.critic.distribution"].meaning.endswith("Older name: `law`.")


def test_the_end_of_a_path_is_enough():
    assert explain_key("risk.alpha") == explain_key("training.risk.alpha")
    assert "training.vgs.beta" in explain_key("beta")
    assert "training.critic.scale.beta" in explain_key("beta")
    assert "population.hyperparams[].is_log_scale" in explain_key("population.hyperparams")


def test_docstrings_become_plain_text():
    assert plain("see :meth:`tailguard.DistributionalPPO.set_risk`,\n    or ``{}``") == "see `set_risk`, or `{}`"
