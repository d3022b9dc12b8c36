"""A run survives everything that ends a process, and says what is wrong when something is."""

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tailguard.config import load_config
from tailguard.experiments import Interrupted
from tailguard.experiments import run as run_module
from tailguard.experiments.evaluation import backtest_agent, evaluate_run
from tailguard.experiments.prepared_market import default_split, prepare_market
from tailguard.experiments.run import Run, train
from tailguard.experiments.selection import save_selection
from tailguard.experiments.training import build_model, train_model
from tailguard.experiments.trials import Trial
from tailguard.io.checkpoint import CheckpointError
from tailguard.market import random_walk, simulate
from tailguard.market.env import TradingVecEnv

TINY = [
    "training.steps=2048",
    "training.n_envs=4",
    "training.n_steps=32",
    "selection=null",
    "training.policy=MlpLstmPolicy",
    "training.lstm_hidden_size=8",
    "training.tensorboard=null",
    "checkpoints.every_seconds=0",
]
EVERYTHING = [
    "training.risk={objective: cvar, alpha: 0.2, period: 1W}",
    "training.vgs={}",
    "training.optimizer={name: adaptive_upgd, sigma: 0.01}",
]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "bars.csv"
    random_walk(600, seed=0).to_csv(path)
    return path


def create(path, data, *settings):
    from tailguard.market.data import load_source

    config, bars = load_config(None, [*TINY, *settings]), load_source(str(data))
    return Run.create(path, config, str(data), prepare_market(bars, config, default_split(len(bars), config.training)))


def nobody(done, total, text):
    """Listens to no report."""


def content(run):
    """Everything that a training leaves: the last checkpoint, bit for bit, and every figure."""
    return run.checkpoints.paths()[-1].read_bytes(), (run.path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("settings", [["training.policy=MlpPolicy"], EVERYTHING], ids=["mlp", "lstm-everything"])
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(tmp_path, data, settings):
    whole = create(tmp_path / "whole", data, *settings)
    train(whole, nobody)
    killed = create(tmp_path / "killed", data, *settings)
    rng = np.random.default_rng(1)
    for _ in range(3):
        # In itself, so that it is killed in the middle of its work however busy the machine is: 512 steps are all there are.
        moment = str(rng.integers(60, 170))
        command = [sys.executable, str(Path(__file__).with_name("killed_training.py")), str(killed.path), moment]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert killed.checkpoints.paths()[-1].name != whole.checkpoints.paths()[-1].name
    train(killed, nobody)
    assert content(killed) == content(whole)
    assert [row["step"] for row in map(json.loads, content(whole)[1].splitlines())] == list(range(128, 2049, 128))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(tmp_path, data, number):
    run = create(tmp_path / "run", data, "checkpoints.every_seconds=1000000")

    def interrupt(done, total, text):
        if done == 512:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match="stopped and saved at step 512; `tailguard resume"):
        train(run, interrupt)
    assert [path.name for path in run.checkpoints.paths()] == ["step-000000000512.safetensors"]
    train(run, nobody)
    whole = create(tmp_path / "whole", data, "checkpoints.every_seconds=1000000")
    train(whole, nobody)
    assert content(run) == content(whole)


@pytest.mark.parametrize(
    "left", [(".lock",), (".config.yaml.7.unfinished",), ("config.yaml",), ("config.yaml", ".run.json.7.unfinished")]
)
def test_a_run_that_was_killed_while_its_folder_was_made_is_begun_again(tmp_path, data, left):
    whole = create(tmp_path / "whole", data)
    folder = tmp_path / "run"
    folder.mkdir()
    for name in left:
        (folder / name).write_bytes((whole.path / "config.yaml").read_bytes())
    assert create(folder, data).info == whole.info
    assert Run.open(folder).config == whole.config


def test_settings_that_somebody_has_put_there_are_not_overwritten(tmp_path, data):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("training: {gamma: 0.5}\n")
    with pytest.raises(ValueError, match="is not empty"):
        create(tmp_path / "run", data)
    assert (tmp_path / "run" / "config.yaml").read_text() == "training: {gamma: 0.5}\n"


@pytest.mark.parametrize("most", [1_000, 30_000])  # too little for the figures, too little for a checkpoint
def test_a_full_disk_stops_it_and_costs_nothing(tmp_path, data, full_disk, most):
    whole, run = (create(tmp_path / name, data) for name in ("whole", "run"))
    train(whole, nobody)
    with pytest.raises(Interrupted):
        train(run, lambda done, total, text: os.kill(os.getpid(), signal.SIGTERM) if done == 512 else None)
    before = content(run)
    assert 1_000 < len(before[1]) < 30_000 < len(before[0])
    with (
        full_disk(most),
        pytest.raises(ValueError, match=r"File too large: .*; safe up to step 512, `tailguard resume .*/run`"),
    ):
        train(run, nobody)
    assert content(run)[0] == before[0]
    assert content(run)[1].startswith(before[1])
    assert [path.name for path in run.path.iterdir() if "unfinished" in path.name] == []
    train(run, nobody)
    assert content(run) == content(whole)


def test_an_environment_that_says_nan_stops_it_and_costs_an_interval(tmp_path, data, monkeypatch):
    whole, run = (create(tmp_path / name, data) for name in ("whole", "run"))
    train(whole, nobody)
    honest, calls = TradingVecEnv.step_arrays, itertools.count()

    def step_arrays(self, actions):
        step = honest(self, actions)
        if next(calls) == 5 * 32 + 3:  # in the sixth rollout
            step.rewards[1] = np.nan
        return step

    with monkeypatch.context() as patched:
        patched.setattr(TradingVecEnv, "step_arrays", step_arrays)
        with pytest.raises(
            ValueError, match="reward of env 1 at step 3 of the rollout is not finite: nan; safe up to step 640"
        ):
            train(run, nobody)
    train(run, nobody)
    assert content(run) == content(whole)


def test_a_damaged_checkpoint_costs_an_interval(tmp_path, data, caplog):
    whole, run = (create(tmp_path / name, data, "checkpoints.every_steps=512") for name in ("whole", "run"))
    train(whole, nobody)
    train(run, nobody)
    newest = run.checkpoints.paths()[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    train(run, nobody)
    assert "going back to the one before" in caplog.text
    assert content(run) == content(whole)
    for path in run.checkpoints.paths():
        path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints"):
        train(run, nobody)


def test_a_run_is_not_overwritten_and_not_trained_twice_at_once(tmp_path, data):
    run = create(tmp_path / "run", data)
    with pytest.raises(ValueError, match="is not empty: `tailguard resume"):
        create(tmp_path / "run", data)
    with run.locked(), pytest.raises(ValueError, match="being trained by another process"):
        train(Run.open(run.path), nobody)


def test_data_that_has_changed_is_noticed(tmp_path, data):
    run = create(tmp_path / "run", data)
    changed = random_walk(600, seed=0)
    changed.iloc[100, -1] += 1.0
    changed.to_csv(data)
    with pytest.raises(ValueError, match="is not what it was"):
        Run.open(run.path).market()


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a run"):
        Run.open(tmp_path)
    with pytest.raises(ValueError, match="is not a run"):
        Run.open(tmp_path / "nowhere")


def test_half_a_line_of_figures_is_left_out(tmp_path, data):
    run = create(tmp_path / "run", data)
    (run.path / "metrics.jsonl").write_text('{"step": 128}\n{"step": 256}\n{"st')
    assert run.metrics()["step"].tolist() == [128, 256]


def test_an_untrained_run_has_no_model(tmp_path, data):
    run = create(tmp_path / "run", data)
    assert run.metrics().empty
    with pytest.raises(ValueError, match="holds no model yet"):
        run.trained_model()


def test_what_is_learnt_does_not_depend_on_what_is_unseen(tmp_path, data):
    run = create(tmp_path / "a", data)
    other = tmp_path / "other.csv"
    changed = random_walk(600, seed=0)
    changed.iloc[run.split.test[0] :, :4] *= 1.1
    changed.to_csv(other)
    again = create(tmp_path / "b", other)
    assert np.array_equal(run.scaler.mean, again.scaler.mean)
    weights = [train(one, nobody).flat.tensor for one in (run, again)]
    assert torch.equal(*weights)
    assert run.metrics()["step"].tolist() == again.metrics()["step"].tolist()


# Selection.

SELECTING = [
    "training.policy=auto",
    "training.steps=512",
    "training.n_epochs=1",
    "selection={blocks: 2, seeds: 1, stops: [0.5, 1.0]}",
]


class Stop(Exception):
    pass


@pytest.fixture
def selected(tmp_path, data):
    """A run that was selected and trained without a pause."""
    run = create(tmp_path / "selected", data, *SELECTING)
    return run, train(run, nobody)


def test_a_run_is_trained_as_it_was_selected_and_opened_with_what_was_chosen(selected, data):
    run, model = selected
    selection = run.selection
    assert model.num_timesteps == run.config.training.steps == selection.steps
    assert model.policy.recurrent == (selection.policy == "MlpLstmPolicy")
    assert run.config.selection is None
    assert (run.market().trading.core, run.market().trading.active) == (selection.core, selection.active)
    again = Run.open(run.path)
    assert (again.selection, again.config) == (selection, run.config)
    assert again.market().trading == run.market().trading
    asked = load_config(run.path / "config.yaml")
    assert (asked.training.policy, asked.training.steps, asked.selection.blocks) == ("auto", 512, 2)
    assert selection.applied(asked) == run.config


def test_a_run_that_was_stopped_after_its_selection_chooses_no_more(selected, tmp_path, data, monkeypatch):
    whole, _ = selected
    create(tmp_path / "run", data, *SELECTING).select(nobody)
    calls = []
    monkeypatch.setattr(run_module, "select", lambda *inputs: calls.append(inputs))
    resumed = Run.open(tmp_path / "run")
    train(resumed, nobody)
    assert calls == []
    assert resumed.selection == whole.selection
    assert content(resumed) == content(whole)


def test_a_selection_that_was_stopped_is_made_again(selected, tmp_path, data):
    whole, _ = selected
    run = create(tmp_path / "run", data, *SELECTING)

    def stop(done, total, text):
        assert text.startswith("choosing: ")
        raise Stop

    with pytest.raises(Stop):
        train(run, stop)
    assert not (run.path / "selection.json").exists()
    train(run, nobody)
    assert run.selection == whole.selection
    assert content(run) == content(whole)


def test_an_early_stop_is_trained_as_it_was_scored_in_the_middle_of_its_schedules(tmp_path, data):
    """The selection looked at agents after half of a training whose schedules end with the whole."""
    run = create(tmp_path / "run", data, *SELECTING)
    run.select(nobody)
    assert run.selection.horizon == 512
    save_selection(replace(run.selection, policy="MlpPolicy", steps=256), run.path / "selection.json")
    again = Run.open(run.path)
    model = train(again, nobody)
    assert model.num_timesteps == 256
    assert model._current_progress_remaining == pytest.approx(0.5)
    scored = build_model(again.market(), again.config.training)
    train_model(scored, 256, horizon=512)
    assert torch.equal(scored.flat.tensor, model.flat.tensor)


def test_a_damaged_selection_is_named(selected):
    run, _ = selected
    (run.path / "selection.json").write_text('{"policy": "MlpPolicy"')
    with pytest.raises(ValueError, match=r"selection\.json is damaged .*: delete it"):
        Run.open(run.path)


def test_an_agent_does_not_trade_without_what_was_chosen_for_it(selected):
    """Which is how far it is trusted: alone it would steer the whole account."""
    run, model = selected
    chosen = (run.path / "selection.json").read_bytes()
    (run.path / "selection.json").unlink()
    with pytest.raises(ValueError, match=r"selection\.json is missing, .* `tailguard resume .*` choose again"):
        Run.open(run.path).agent()
    again = train(Run.open(run.path), nobody)
    assert torch.equal(again.flat.tensor, model.flat.tensor)
    assert (run.path / "selection.json").read_bytes() == chosen
    Run.open(run.path).agent()


def test_the_selection_of_another_run_is_refused(selected, tmp_path, data):
    run, _ = selected
    other = create(tmp_path / "other", data, *SELECTING, "trading.fee=0.01")
    other.select(nobody)
    (run.path / "selection.json").write_bytes((other.path / "selection.json").read_bytes())
    with pytest.raises(ValueError, match="it is about"):
        Run.open(run.path)


def test_trainings_of_a_choice_are_kept_until_it_is_made(selected, tmp_path, data, monkeypatch):
    whole, _ = selected
    run, trained, work = create(tmp_path / "run", data, *SELECTING), [], Trial.work

    def stop(done, total, text):
        if done >= 2 * 2:
            raise Stop

    with pytest.raises(Stop):
        train(run, stop)
    kept = {path.stem for path in (run.path / "trials").iterdir()}
    assert len(kept) == 2
    monkeypatch.setattr(Trial, "work", lambda *arguments: trained.append(arguments[0].name) or work(*arguments))
    resumed = Run.open(run.path)
    train(resumed, nobody)
    assert trained
    assert not kept & set(trained)
    assert content(resumed) == content(whole)
    assert not (run.path / "trials").exists()


def test_a_selection_does_not_depend_on_what_is_unseen(selected, tmp_path, data):
    run, model = selected
    changed = random_walk(600, seed=0)
    changed.iloc[run.split.test[0] :, :4] *= 1.1
    changed.to_csv(tmp_path / "other.csv")
    again = create(tmp_path / "again", tmp_path / "other.csv", *SELECTING)
    assert torch.equal(train(again, nobody).flat.tensor, model.flat.tensor)
    assert again.selection == run.selection


def test_an_agent_that_is_not_believed_holds_the_mix(tmp_path, data):
    """To the last cent what holding the constant mix over the unseen bars leaves."""
    run = create(tmp_path / "run", data, *SELECTING, "selection.doubt=100")
    model = train(run, nobody)
    market = run.market()
    assert market.trading.active == 0.0
    (weight,) = run.selection.core
    bars = market.bars.iloc[slice(*market.split.span)]
    targets = np.append(np.full(len(bars) - 1, weight), np.nan)
    expected = simulate(bars, targets, fee=run.config.trading.fee).equity[-1] - 1.0
    assert backtest_agent(model, market, 0)[0].total_return == pytest.approx(expected, abs=1e-12)


def test_the_record_of_a_run_has_its_candidates(selected):
    run, _ = selected
    table = evaluate_run(run).selection
    assert set(table["fold"]) == {0}
    assert [(row.policy, row.steps) for row in table[table["chosen"]].itertuples()] == [
        (run.selection.policy, run.selection.steps)
    ]
    assert table["sharpe"].tolist() == [candidate.sharpe for candidate in run.selection.candidates]
