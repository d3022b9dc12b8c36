"""A run is what its files say, and files that somebody has changed, or that belong to another run, are not taken for it."""

import json
import os
import shutil

import numpy as np
import pytest
import yaml
from forge_records import Record, forged, open_run, outcome
from test_run import create, nobody

from tailguard.config import changed_settings, load_config
from tailguard.experiments.run import Run, train
from tailguard.io.checkpoint import CheckpointError
from tailguard.io.sealed import read_sealed, sealed, unsealed, write_sealed
from tailguard.market import random_walk

SHORT = ("training.policy=MlpPolicy", "training.steps=512")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "bars.csv"
    random_walk(600, seed=0).to_csv(path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    run = create(tmp_path_factory.mktemp("trained") / "run", data, *SHORT)
    train(run, nobody)
    return run.path


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def edit(path, *keys, value):
    """Change one value of a YAML or JSON file by hand."""
    tree = yaml.safe_load(path.read_text())
    node = tree
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    path.write_text(json.dumps(tree, indent=2) if path.suffix == ".json" else yaml.safe_dump(tree, sort_keys=False))


def test_an_edited_mean_is_refused(folder):
    edit(folder / "run.json", "features", "mean", 0, value=0.5)
    with pytest.raises(ValueError, match=r"run.json was changed since Tailguard wrote it; it is a record, not an input"):
        Run.open(folder)


def test_a_checksum_that_was_taken_out_is_missed(folder):
    """Files of earlier versions have none; but then their checkpoints have no identity either."""
    info = json.loads((folder / "run.json").read_text())
    for key in ("checksum", "run_id", "config"):
        del info[key]
    (folder / "run.json").write_text(json.dumps(info))
    with pytest.raises(CheckpointError, match="belongs to another run"):
        Run.open(folder).trained_model()


def test_a_run_of_an_earlier_version_is_opened_and_trained_on(tmp_path, data):
    run = create(tmp_path / "run", data, *SHORT)
    for key in ("run_id", "config"):
        del run.info[key]
    (run.path / "run.json").write_text(json.dumps(run.info, indent=2))
    old = Run.open(run.path)
    assert train(old, nobody).num_timesteps == 512
    assert Run.open(run.path).trained_model().num_timesteps == 512


def test_a_forged_record_is_refused_in_one_line_or_taken_as_it_is(folder):
    """With the right checksum; `benchmarks/forge_records.py` does so with every file."""
    record = Record("run", "run.json", open_run)
    outcomes = []
    for what, tree in forged(record.read(folder), 60, np.random.default_rng(0)):
        record.write(folder, tree)
        found, words = outcome(open_run, folder)
        assert found in ("refused", "taken"), f"{what}: {found} {words}"
        outcomes.append(found)
    assert outcomes.count("refused") > 20
    assert "taken" in outcomes


def test_a_checkpoint_of_another_run_is_not_resumed(folder, tmp_path, data, caplog):
    other = create(tmp_path / "other", data, *SHORT, "training.seed=5")
    train(other, nobody)
    run = Run.open(folder)
    newest = run.checkpoints.paths()[-1]
    shutil.copy(other.checkpoints.paths()[-1], newest)
    kept = run.trained_model()
    assert "belongs to another run; going back to the one before" in caplog.text
    assert kept.num_timesteps < 512
    for path in run.checkpoints.paths():
        shutil.copy(other.checkpoints.paths()[-1], path)
    with pytest.raises(CheckpointError, match=r"none of the .* checkpoints can be used; the oldest: .* belongs to another run"):
        run.trained_model()


def test_equal_runs_have_equal_checkpoints(trained, tmp_path, data):
    again = create(tmp_path / "again", data, *SHORT)
    train(again, nobody)
    assert again.checkpoints.paths()[-1].read_bytes() == Run.open(trained).checkpoints.paths()[-1].read_bytes()


class TestEditedConfig:
    def test_comments_and_order_may_change(self, folder):
        path = folder / "config.yaml"
        path.write_text("# mine\n" + yaml.safe_dump(yaml.safe_load(path.read_text()), sort_keys=True))
        assert Run.open(folder).changed == {}

    def test_an_edit_is_refused_with_what_changed(self, folder):
        edit(folder / "config.yaml", "training", "learning_rate", value=0.01)
        edit(folder / "config.yaml", "trading", "fee", value=0.02)
        told = "is a record of this run, not an input, and was edited: trading.fee: 0.001 -> 0.02, training.learning_rate: "
        with pytest.raises(ValueError, match=told + r"0.0003 -> 0.01; .*--allow-config-change") as error:
            Run.open(folder)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("key", [("training", "seed"), ("training", "gamma"), ("training", "n_envs")])
    def test_what_cannot_change_is_refused_even_if_allowed(self, folder, key):
        edit(folder / "config.yaml", *key, value=1)
        with pytest.raises(ValueError, match=f"{'.'.join(key)} cannot change in a run that has begun"):
            Run.open(folder, allow_config_change=True)

    def test_allowed_changes_take_effect_and_become_part_of_the_record(self, folder):
        edit(folder / "config.yaml", "training", "learning_rate", value=0.01)
        edit(folder / "config.yaml", "training", "steps", value=1024)
        run = Run.open(folder, allow_config_change=True)
        assert set(run.changed) == {"training.learning_rate", "training.steps"}
        model = train(run, nobody)
        assert (model.num_timesteps, model.learning_rate, model.lr.base_at(0.0)) == (1024, 0.01, 0.01)
        again = Run.open(folder)
        assert again.info["config_changes"] == [{"step": 512, "settings": ["training.steps", "training.learning_rate"]}]
        assert again.trained_model().lr.base_at(0.0) == 0.01

    def test_a_change_survives_a_kill_before_the_next_checkpoint(self, folder):
        edit(folder / "config.yaml", "training", "learning_rate", value=0.01)
        run = Run.open(folder, allow_config_change=True)
        run.accept_changes(512)
        again = Run.open(folder)
        env = again.market().training_env(again.config.training.n_envs, 0)
        model = again.resumed_model(env)
        assert model is not None
        assert model.lr.base_at(1.0) == 0.01


def test_changed_settings_name_sections_that_appear():
    before, after = load_config(None), load_config(None, ["training.vgs={}", "data=[x]"])
    changed = changed_settings(before, after)
    assert changed["data"] == ([], ["x"])
    assert changed["training.vgs.enabled"] == (None, True)


class TestSealed:
    def test_values_come_back(self, tmp_path):
        values = {"a": [1, 2.5, None], "b": {"c": "d"}, "e": (1, 2)}
        write_sealed(tmp_path / "x.json", values)
        assert read_sealed(tmp_path / "x.json") == {**values, "e": [1, 2]}

    def test_every_changed_byte_is_noticed_or_harmless(self):
        values = {"a": [1, 2.5, None], "b": {"c": "text"}}
        data, rng = sealed(values), np.random.default_rng(0)
        refused = 0
        for _ in range(300):
            broken = bytearray(data)
            broken[rng.integers(len(broken))] ^= 1 << rng.integers(7)
            try:
                found = unsealed(bytes(broken), "x")
            except ValueError:
                refused += 1
            else:  # a changed space, or a changed name of the checksum itself: that of an earlier version
                assert {key: found[key] for key in values} == values or "checksum" not in json.loads(broken)
        assert refused > 200

    @pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000, '{"a": '])
    def test_other_content_is_refused(self, text):
        with pytest.raises(ValueError, match="x is damaged"):
            unsealed(text.encode(), "x")


def test_damaged_features_of_a_population_are_written_again(tmp_path, caplog):
    from tailguard.experiments.population_run import _holds

    path = tmp_path / "features.npy"
    assert not _holds(path, b"values")
    assert caplog.messages == []
    path.write_bytes(b"values")
    assert _holds(path, b"values")
    for damaged in (b"Values", b"value", b"values and more"):
        path.write_bytes(damaged)
        assert not _holds(path, b"values")
    path.unlink()
    os.mkfifo(path)  # to open it would wait for somebody who writes
    assert not _holds(path, b"values")
    assert caplog.messages == [f"{path} is damaged; it is written again"] * 4
