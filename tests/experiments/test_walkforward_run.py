"""Whole walk-forwards with tiny agents: what they may know, that they can be stopped, that processes do not matter."""

import hashlib
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from tailguard.config import CriticConfig, RiskConfig, load_config
from tailguard.evaluate.assessment import Effort
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.folds import WalkforwardConfig, longest_lookback, make_folds
from tailguard.evaluate.record import load_record
from tailguard.evaluate.report.report import report_html
from tailguard.experiments.evaluation import out_of_sample_decisions, warnings_of
from tailguard.experiments.prepared_market import Split, market_features, prepare_market
from tailguard.experiments.selection import select, selection_table
from tailguard.experiments.walkforward import (
    CHOICE_EFFORT,
    Choice,
    Pair,
    Progress,
    Training,
    WalkforwardRun,
    _warn_of_other_machines,
    identity_of,
    load_result,
    train_all,
    walkforward,
)
from tailguard.io.lock import locked
from tailguard.io.sealed import read_sealed, write_sealed
from tailguard.market import random_walk
from tailguard.ppo.algorithm import DistributionalPPO

TINY = [
    "training.steps=128",
    "training.n_envs=4",
    "training.n_steps=16",
    "training.n_epochs=1",
    "selection=null",
    "training.policy=MlpLstmPolicy",
    "training.lstm_hidden_size=8",
    "training.gamma=0.5",
    "features.drawdown_window=21",
    "features.slow_window=21",
    "features.horizons=[1, 5]",
]
WALK = WalkforwardConfig(folds=2, seeds=2, warmup=16, jobs=1)
QUICK = Effort(draws=50, permutations=9)


@pytest.fixture(scope="module")
def bars():
    return random_walk(700, seed=0)


@pytest.fixture(scope="module")
def config():
    return load_config(None, TINY)


@pytest.fixture(scope="module")
def folds(bars, config):
    return make_folds(len(bars), 35, longest_lookback(config.features), WALK)


@pytest.fixture(scope="module")
def finished(bars, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    reports = []
    record = walkforward(bars, config, WALK, folder, source="walk", report=lambda *said: reports.append(said), effort=QUICK)
    return folder, record, reports


@pytest.fixture(scope="module")
def selecting():
    return load_config(None, [*TINY, "training.policy=auto", "selection={blocks: 2, seeds: 1, stops: [0.5, 1.0], doubt: -10}"])


@pytest.fixture(scope="module")
def selected(bars, selecting, tmp_path_factory):
    """A walk-forward with a selection in every fold."""
    folder, reports = tmp_path_factory.mktemp("selected"), []
    record = walkforward(bars, selecting, WALK, folder, source="walk", report=lambda *said: reports.append(said), effort=QUICK)
    return folder, record, reports


def trained(bars, config, pair, folder):
    run = WalkforwardRun(bars, config, WALK.warmup, folder)
    chosen = None if config.selection is None else Choice(pair.fold).work(run, lambda share: None)
    result = Training(pair, chosen).work(run, lambda share: None)
    folder.mkdir(exist_ok=True)
    (folder / "decisions").write_bytes(result.decisions)
    return load_result(folder / "decisions", run.label(*pair))


def silent(done, total, line):
    pass


@pytest.mark.parametrize("with_selection", [False, True])
def test_what_comes_after_the_training_does_not_change_the_agent(bars, folds, tmp_path, request, with_selection):
    """Not its selection, nor weights, optimizer, or any statistic of observations, returns, features: the checksum has all."""
    config, pair = request.getfixturevalue("selecting" if with_selection else "config"), Pair(folds[0], 0)
    first_unseen = folds[0].train[1]
    changed = bars.copy()
    changed.iloc[first_unseen:, :4] *= np.linspace(1.0, 3.0, len(bars) - first_unseen)[:, None]
    changed.iloc[first_unseen:, 4] *= 7.0
    one, other = (trained(table, config, pair, tmp_path / str(i)) for i, table in enumerate((bars, changed)))
    assert one.agent_hash == other.agent_hash
    assert (one.decisions.targets != other.decisions.targets).any()
    seen = bars.copy()
    seen.iloc[first_unseen - 5 : first_unseen, :4] *= 1.1
    assert trained(seen, config, pair, tmp_path / "seen").agent_hash != one.agent_hash


def test_a_record_comes_out_and_is_on_disk(finished, bars, folds):
    folder, record, reports = finished
    assert len(record.agent.times) == folds[-1].test[1] - folds[0].test[0]
    assert record.agent.times.equals(pd.DatetimeIndex(bars.index[folds[0].test[0] :]))
    assert [history.name for history in record.seeds] == ["seed 0", "seed 1"]
    assert len(record.baselines) >= 7
    assert load_record(folder / "evaluation").verdict == record.verdict
    assert record.folds["embargo"].tolist() == [fold.embargo for fold in folds]
    assert set(zip(record.training["fold"], record.training["seed"], strict=True)) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert record.training["step"].max() == 128
    assert record.provenance.seeds == (0, 1)
    assert record.critic_calibration is not None
    assert record.calibration is None  # 11 months are too few outcomes
    assert record.critic_calibration.horizon == 5  # 0.5^5 < 0.05
    assert reports[-1][:2] == (100, 100)
    assert reports[-1][2].startswith("4 of 4 done")
    assert record.selection is None
    assert all(one[0] <= other[0] for one, other in pairwise(reports))


def test_seeds_differ_and_folds_are_chained(finished, config, bars, folds):
    folder, record, _ = finished
    run = WalkforwardRun(bars, config, WALK.warmup, folder)
    parts = [load_result(run.decisions_file(Pair(fold, 1))).decisions.targets for fold in folds]
    window = BacktestWindow(bars, config.trading, (folds[0].span[0], folds[-1].span[1]))
    chained = window.trade("seed 1", np.concatenate(parts))
    np.testing.assert_array_equal(chained.returns, record.history("seed 1").returns)
    assert (record.history("seed 0").returns != record.history("seed 1").returns).any()


def test_agents_are_kept_and_decide_the_same_again(finished, bars, config, folds):
    folder, _, _ = finished
    pair = Pair(folds[1], 0)
    run = WalkforwardRun(bars, config, WALK.warmup, folder)
    model = DistributionalPPO.load(run.agent_file(pair))
    market = prepare_market(bars, config, Split(pair.fold.train, pair.fold.test))
    again = out_of_sample_decisions(model, market, pair.fold.span, WALK.warmup)
    kept = load_result(run.decisions_file(pair)).decisions
    np.testing.assert_array_equal(again.targets, kept.targets)
    np.testing.assert_array_equal(again.quantiles, kept.quantiles)


def test_a_finished_run_is_not_trained_again_and_a_lost_pair_is(finished, bars, config, folds):
    folder, record, _ = finished
    run = WalkforwardRun(bars, config, WALK.warmup, folder)
    files = [run.decisions_file(Pair(fold, seed)) for fold in folds for seed in (0, 1)]
    before = {file.name: (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files}
    files[2].unlink()
    again = walkforward(bars, config, WALK, folder, source="walk", effort=QUICK)
    after = {file.name: (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files}
    assert {name for name in before if before[name] != after[name]} <= {files[2].name}
    assert before[files[2].name][1] == after[files[2].name][1]  # trained again, it decides as it did
    np.testing.assert_array_equal(again.agent.returns, record.agent.returns)


def test_a_benchmark_stands_beside_the_baselines_of_a_record_and_its_report(finished, bars, config, folds, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    other = random_walk(700, seed=5).set_axis(bars.index)
    other.to_csv(tmp_path / "index.csv")
    compared = config.model_copy(update={"benchmark": str(tmp_path / "index.csv")})
    walkforward(bars, compared, WALK, folder, source="walk", effort=QUICK, report=silent)  # nothing is trained again
    record = load_record(folder / "evaluation")
    account = next(history for history in record.baselines if history.name == "benchmark")
    assert account.times.equals(record.agent.times)
    held = other["close"].iloc[[folds[0].span[0], folds[-1].span[1] - 1]].to_numpy()
    assert account.total_return == pytest.approx(held[1] / held[0] - 1.0)
    assert "The series that was given as the benchmark." in report_html(record)
    other.iloc[-5:].to_csv(tmp_path / "index.csv")
    with pytest.raises(ValueError, match=r"index.csv: benchmark begins at .*: it needs earlier bars"):
        walkforward(bars, compared, WALK, tmp_path / "new", source="walk", effort=QUICK)
    assert not (tmp_path / "new").exists()


class Stop(Exception):
    pass


def test_a_run_that_is_stopped_goes_on(finished, bars, config, tmp_path):
    """Stopped in the middle of the second training; what was finished is not done again, and the end is the same."""
    _, record, _ = finished

    def stop(done, total, line):
        if done > 25 + 6:  # percent
            raise Stop

    with pytest.raises(Stop):
        walkforward(bars, config, WALK, tmp_path, source="walk", report=stop, effort=QUICK)
    kept = sorted(file.name for file in (tmp_path / "decisions").iterdir())
    assert kept == ["fold-0-seed-0.safetensors"]
    assert not (tmp_path / "evaluation").exists()
    goes_on = []
    again = walkforward(bars, config, WALK, tmp_path, source="walk", report=lambda *said: goes_on.append(said[0]), effort=QUICK)
    assert goes_on[0] == 25
    np.testing.assert_array_equal(again.agent.returns, record.agent.returns)


def test_processes_side_by_side_give_the_same_and_an_error_in_one_ends_the_run(selected, bars, selecting, folds, tmp_path):
    folder, _, _ = selected
    pairs, run, reports = [Pair(fold, 0) for fold in folds], WalkforwardRun(bars, selecting, WALK.warmup, tmp_path), []
    in_the_way = run.agent_file(pairs[1])
    (in_the_way / "something").mkdir(parents=True)
    with pytest.raises(OSError, match="fold-1-seed-0"):
        train_all(run, folds, pairs, 2, lambda *said: reports.append(said[:2]))
    assert not run.decisions_file(pairs[1]).exists()
    (in_the_way / "something").rmdir()
    in_the_way.rmdir()
    train_all(run, folds, pairs, 2, lambda *said: reports.append(said[:2]))
    assert reports[-1] == (100, 100)
    for pair in pairs:
        alone, beside = (
            load_result(WalkforwardRun(bars, selecting, 16, place).decisions_file(pair)) for place in (folder, tmp_path)
        )
        assert alone.agent_hash == beside.agent_hash
        np.testing.assert_array_equal(alone.decisions.targets, beside.decisions.targets)


# Selection.


def test_nothing_is_chosen_without_a_selection(finished, bars, config, folds):
    folder, _, _ = finished
    assert not (folder / "selection").exists()
    for fold in folds:
        model = DistributionalPPO.load(WalkforwardRun(bars, config, WALK.warmup, folder).agent_file(Pair(fold, 0)))
        assert (model.num_timesteps, model.policy.recurrent) == (128, True)


def test_every_fold_is_selected_inside_its_own_training_and_every_seed_trained_so(selected, bars, selecting, folds):
    folder, record, reports = selected
    run = WalkforwardRun(bars, selecting, WALK.warmup, folder, identity=identity_of(folder))
    features = market_features(bars, selecting)
    chosen = {fold.number: select(bars, selecting, Split(fold.train, fold.test), features) for fold in folds}
    pd.testing.assert_frame_equal(record.selection, selection_table(chosen))
    for fold in folds:
        assert run.selection(fold) == chosen[fold.number]
        config = chosen[fold.number].applied(selecting)
        for seed in range(WALK.seeds):
            model = DistributionalPPO.load(run.agent_file(Pair(fold, seed)))
            assert model.num_timesteps == chosen[fold.number].steps
            assert model.policy.recurrent == (chosen[fold.number].policy == "MlpLstmPolicy")
        market = prepare_market(bars, config, Split(fold.train, fold.test))
        again = out_of_sample_decisions(model, market, fold.span, WALK.warmup)
        np.testing.assert_array_equal(again.targets, load_result(run.decisions_file(Pair(fold, seed))).decisions.targets)
    pd.testing.assert_frame_equal(load_record(folder / "evaluation").selection, record.selection, check_exact=True)
    assert reports[-1] == (100, 100, "6 of 6 done, at fold-1-seed-1")
    assert [line for _, _, line in reports if "done, at selection" in line][-1] == "2 of 6 done, at selection of fold-1"


def test_a_selection_that_is_there_is_not_made_again(selected, bars, selecting, folds, tmp_path):
    """Stopped in the choice for the second fold: the first is kept, and the end is the same."""
    folder, record, _ = selected

    def stop(done, total, line):
        if line.startswith("1 of 6 done, at selection of fold-1"):
            raise Stop

    with pytest.raises(Stop):
        walkforward(bars, selecting, WALK, tmp_path, source="walk", report=stop, effort=QUICK)
    kept = tmp_path / "selection" / "fold-0.json"
    assert list((tmp_path / "selection").iterdir()) == [kept]
    assert not (tmp_path / "decisions").exists()
    before = kept.stat().st_mtime_ns
    again = walkforward(bars, selecting, WALK, tmp_path, source="walk", effort=QUICK)
    assert kept.stat().st_mtime_ns == before
    pd.testing.assert_frame_equal(again.selection, record.selection)
    np.testing.assert_array_equal(again.agent.returns, record.agent.returns)
    for fold in folds:
        name = f"selection/fold-{fold.number}.json"
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_a_damaged_or_exchanged_selection_is_named_and_made_again(selected, bars, selecting, folds, tmp_path, caplog):
    folder, _, _ = selected
    run = WalkforwardRun(bars, selecting, WALK.warmup, tmp_path, identity=identity_of(folder))
    right = [(folder / f"selection/fold-{fold.number}.json").read_bytes() for fold in folds]
    (tmp_path / "selection").mkdir()
    for content, complaint in ((b"{", "is damaged"), (right[1], "not about")):
        run.selection_file(folds[0]).write_bytes(content)
        train_all(run, folds[:1], [], 1, silent)
        assert run.selection_file(folds[0]).read_bytes() == right[0]
        assert complaint in caplog.records[-1].getMessage()
        assert str(run.selection_file(folds[0])) in caplog.records[-1].getMessage()
    assert len(caplog.records) == 2


def test_a_folder_with_another_selection_is_refused(selected, bars, selecting):
    folder, _, _ = selected
    for changed in (None, selecting.selection.model_copy(update={"doubt": 2.0})):
        other = selecting.model_copy(update={"selection": changed})
        with pytest.raises(ValueError, match="other data or another configuration"):
            walkforward(bars, other, WALK, folder, source="walk", effort=QUICK)


def test_a_folder_of_something_else_is_refused(finished, bars, config):
    folder, _, _ = finished
    other = config.model_copy(update={"training": config.training.model_copy(update={"gamma": 0.9})})
    with pytest.raises(ValueError, match="other data or another configuration"):
        walkforward(bars, other, WALK, folder, source="walk", effort=QUICK)
    with pytest.raises(ValueError, match="other data or another configuration"):
        walkforward(bars * 1.01, config, WALK, folder, source="walk", effort=QUICK)


def test_a_damaged_or_exchanged_file_is_named_and_its_pair_trained_again(finished, bars, config, folds, tmp_path, caplog):
    """Half a file; the decisions of another seed, of another fold and of another walk-forward in the place of a pair's."""
    folder, _, _ = finished
    run, pair = WalkforwardRun(bars, config, WALK.warmup, tmp_path, identity=identity_of(folder)), Pair(folds[0], 0)
    there = replace(run, folder=folder)
    elsewhere = Training(pair, None).work(replace(run, identity="other"), lambda share: None).decisions
    others = [there.decisions_file(Pair(folds[0], 1)).read_bytes(), there.decisions_file(Pair(folds[1], 0)).read_bytes()]
    run.decisions_file(pair).parent.mkdir()
    for content, complaint in (
        (b"half of it", "is not a whole Tailguard file"),
        (others[0], "is about fold 0, seed 1"),
        (others[1], "is about fold 1, seed 0"),
        (elsewhere, "of the walk-forward other, not about"),
    ):
        run.decisions_file(pair).write_bytes(content)
        train_all(run, folds, [pair], 1, silent)
        assert run.decisions_file(pair).read_bytes() == there.decisions_file(pair).read_bytes()
        assert complaint in caplog.records[-1].getMessage()
        assert caplog.records[-1].getMessage().endswith("fold-0-seed-0 is trained again")
    run.agent_file(pair).unlink()
    train_all(run, folds, [pair], 1, silent)
    assert run.agent_file(pair).read_bytes() == there.agent_file(pair).read_bytes()
    assert caplog.records[-1].getMessage() == f"{run.agent_file(pair)} is missing; fold-0-seed-0 is trained again"
    assert len(caplog.records) == 5


def test_a_second_process_is_refused(finished, bars, config):
    folder, _, _ = finished
    with locked(folder), pytest.raises(ValueError, match="is being trained by another process"):
        walkforward(bars, config, WALK, folder, source="walk", effort=QUICK)


def test_other_conditions_are_named_in_one_line(finished, bars, config, folds, tmp_path, caplog):
    folder, _, _ = finished
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    kept = read_sealed(tmp_path / "walkforward.json")
    write_sealed(tmp_path / "walkforward.json", kept | {"conditions": kept["conditions"] | {"CPU": "abacus"}})
    walkforward(bars, config, WALK, tmp_path, source="walk", effort=QUICK)
    (line,) = caplog.messages
    assert f"began under other conditions (CPU: abacus -> {kept['conditions']['CPU']})" in line


def test_pairs_of_different_machines_are_named_in_one_line(finished, bars, config, folds, caplog):
    folder, _, _ = finished
    run = WalkforwardRun(bars, config, WALK.warmup, folder)
    result = load_result(run.decisions_file(Pair(folds[0], 0)))
    _warn_of_other_machines([result, result])
    assert caplog.messages == []
    _warn_of_other_machines([result, replace(result, conditions=result.conditions | {"torch": "1.0"})])
    assert f"different conditions (torch: {result.conditions['torch']} -> 1.0)" in caplog.messages[0]


def test_agents_that_watch_their_return_walk_too(bars, config, folds, tmp_path):
    risky = config.model_copy(
        update={"training": config.training.model_copy(update={"risk": RiskConfig(objective="cvar", alpha=0.2, period=9)})}
    )
    result = trained(bars, risky, Pair(folds[0], 0), tmp_path)
    assert np.isfinite(result.decisions.quantiles).all()
    assert len(result.decisions.targets) == folds[0].test[1] - folds[0].test[0]


def test_agents_without_memory_or_quantiles_walk_too(bars, config, folds, tmp_path):
    update = {"policy": "MlpPolicy", "critic": CriticConfig(num_quantiles=1)}
    plain = config.model_copy(update={"training": config.training.model_copy(update=update)})
    result = trained(bars, plain, Pair(folds[0], 0), tmp_path)
    assert result.decisions.quantiles.shape == (len(result.decisions.targets), 0)


def test_progress_adds_up_and_never_falls(folds):
    said = []
    progress = Progress([Pair(folds[0], 0), Pair(folds[0], 1)], lambda *line: said.append(line))
    for name, share in (("fold-0-seed-0", 0.4), ("fold-0-seed-1", 0.5), ("fold-0-seed-0", 1.2)):
        progress.reached(name, share)
    progress.finished("fold-0-seed-0")
    progress.reached("fold-0-seed-0", 0.9)  # late
    assert [line[:2] for line in said] == [(20, 100), (45, 100), (75, 100), (75, 100), (75, 100)]
    assert said[-1][2] == "1 of 2 done, at fold-0-seed-0"


def test_a_choice_counts_for_as_much_as_the_trainings_that_it_takes(folds):
    said = []
    choice, pair = Choice(folds[0]), Pair(folds[0], 0)
    progress = Progress([choice, pair], lambda *line: said.append(line[0]))
    progress.reached(choice.name, 0.5)
    progress.finished(choice.name)
    progress.finished(pair.name)
    whole = CHOICE_EFFORT + 1.0
    assert said == [round(50.0 * CHOICE_EFFORT / whole), round(100.0 * CHOICE_EFFORT / whole), 100]


def test_warnings_become_sentences():
    curves = pd.DataFrame(
        {"step": [1, 2, 3], "warn/non_finite_gradient": [np.nan, 1.0, 1.0], "warn/empty_epoch": [0.0, 0.0, 0.0]}
    )
    assert warnings_of(curves, "fold 0, seed 1") == ["fold 0, seed 1: non finite gradient in 2 of 3 updates"]
