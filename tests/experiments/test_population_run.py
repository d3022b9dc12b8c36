"""Populations of trading agents: the same in every engine, resumable, blind to the test, and with a winner that is a run."""

import math
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tailguard.cli import main
from tailguard.config import SEARCHABLE, load_config
from tailguard.evaluate.folds import cut_into_blocks
from tailguard.experiments.evaluation import backtest_agent
from tailguard.experiments.population_member import (
    ACCESSORS,
    MarketFactory,
    TunableHyperparameters,
    equity_paths,
    log_growth,
    log_sharpe,
)
from tailguard.experiments.population_run import PopulationRun
from tailguard.experiments.prepared_market import Split, default_split, prepare_market, split_off_validation
from tailguard.experiments.run import Run
from tailguard.experiments.training import build_model
from tailguard.market import random_walk
from tailguard.market.data import load_source
from tailguard.market.env import TradingVecEnv
from tailguard.population.lineage import read
from tailguard.population.member import MemberFailed
from tailguard.population.store import FileStore

ROOT = Path(__file__).parents[2]
TINY = [
    "training.n_envs=2",
    "training.n_steps=16",
    "training.policy=MlpLstmPolicy",
    "training.lstm_hidden_size=4",
    "training.critic={num_quantiles: 5}",
    "training.network.net_arch=[64, 64]",
    "training.tensorboard=null",
    "population={population_size: 3, perturbation_interval: 2, intervals: 3, validation_blocks: 4, seed: 1, hyperparams: ["
    "{name: learning_rate, min_value: 1.0e-5, max_value: 1.0e-2, is_log_scale: true},"
    "{name: clip_range, min_value: 0.05, max_value: 0.4}]}",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "walk.csv"
    random_walk(600, seed=0).to_csv(path)
    return str(path)


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """A population that nothing happened to, and what it reported."""
    seen = []
    population = PopulationRun.create(tmp_path_factory.mktemp("straight"), load_config(None, TINY), data)
    population.train("serial", seen.append)
    return population, seen


def states(population):
    store = FileStore(population.folder / "states")
    paths = sorted((population.folder / "states").glob("*.safetensors"))
    return {path.stem: store.read(path.stem)["member"]["agent"]["policy"] for path in paths}


def assert_same(first, second):
    assert first.lineage.read_text() == second.lineage.read_text()
    ours, theirs = states(first), states(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        for key, tensor in ours[name].items():
            assert torch.equal(tensor, theirs[name][key]), (name, key)


def winner(population):
    """The file of the winner, bit for bit."""
    return population.run.checkpoints.paths()[-1].read_bytes()


def factory_of(data, *settings):
    config, bars = load_config(None, [*TINY, *settings]), load_source(data)
    split, validation = split_off_validation(default_split(len(bars), config.training), 0.25)
    return MarketFactory(prepare_market(bars, config, split), validation, config)


# The folder.


def test_the_winner_is_an_ordinary_run(straight):
    population, _ = straight
    run = Run.open(population.run.path)
    best = population.scheduler.best
    model, market = run.trained_model(), run.market()
    assert run.info["winner"] == {"member": best.member_id, "score": best.performance, "hyperparams": best.hyperparams}
    assert model.lr.base_at(1.0) == best.hyperparams["learning_rate"]
    assert model.clip_range(1.0) == best.hyperparams["clip_range"]
    assert model.num_timesteps == run.config.training.steps == 3 * 2 * 16 * 2
    paths = equity_paths(model, market, cut_into_blocks(tuple(run.info["validation"]), 4, "blocks"))
    assert np.mean([log_growth(path) for path in paths]) == pytest.approx(best.performance, abs=1e-12)
    assert backtest_agent(model, market, run.config.walkforward.warmup)[0].strategy == "agent"


def test_the_number_of_trials_is_recorded(straight):
    """Every member's first setting, and every one that was explored."""
    population, _ = straight
    explored = sum(event["explored"] for event in read(population.lineage) if event["event"] == "exploit")
    assert explored > 0
    assert population.run.info["trials"] == 3 + explored


def test_rows_of_the_test_are_never_seen(straight, data, tmp_path):
    """With other prices in the test the lineage and all weights are the same; with others in the validation they are not."""
    population, _ = straight
    split, validation = population.run.split, population.run.info["validation"]
    assert split.train[1] == validation[0]
    assert validation[1] == split.test[0] == 420
    for rows, equal in ((split.test, True), (validation, False)):
        bars = random_walk(600, seed=0)
        wave = 1.0 + 0.2 * np.sin(np.linspace(0.0, np.pi, rows[1] - rows[0]))  # ends where it began: no jump
        bars.iloc[rows[0] : rows[1], :4] *= wave[:, None]
        path = tmp_path / f"{rows[0]}.csv"
        bars.to_csv(path)
        other = PopulationRun.create(tmp_path / str(rows[0]), load_config(None, TINY), str(path))
        other.train()
        if equal:
            assert_same(population, other)
        else:
            assert other.lineage.read_text() != population.lineage.read_text()


def rates(population):
    """What the command of the guide finds in the log: the copies that were given a learning rate."""
    lines = (population.folder / "log.txt").read_text().splitlines()
    found = (re.search(r"Member (\d+): Using NEW learning rate from PBT: (\S+)$", line) for line in lines)
    return [match.groups() for match in found if match]


def test_every_copy_leaves_its_learning_rate_in_the_log(straight):
    """R079, R086, R087: the line of the guide, once per copy, with the rate of the lineage."""
    exploits = [event for event in read(straight[0].lineage) if event["event"] == "exploit"]
    assert rates(straight[0]) == [(str(one["target"]), f"{one['hyperparams']['learning_rate']:.2e}") for one in exploits]
    guide = (ROOT / "docs" / "populations.md").read_text(encoding="utf-8")
    assert 'grep "Using NEW learning rate from PBT"' in guide
    assert 'grep "learning_rate NOT found in hyperparams"' in guide


def test_processes_give_the_same_population(straight, data, tmp_path):
    """The same lineage and weights; and what the members log in their processes stands in the log of the population."""
    other = PopulationRun.create(tmp_path / "processes", load_config(None, TINY), data)
    other.train("process")
    assert_same(straight[0], other)
    assert winner(other) == winner(straight[0])
    assert rates(other) == rates(straight[0])


def test_a_population_that_was_stopped_goes_on_as_if_it_had_not_been(straight, data, tmp_path):
    def stop(standing):
        if standing.round == 2:
            raise KeyboardInterrupt

    path = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        PopulationRun.create(path, load_config(None, TINY), data).train("serial", stop)
    population = PopulationRun.open(path)
    population.train()
    assert_same(straight[0], population)
    population.train()  # finished: nothing more happens
    assert_same(straight[0], population)
    assert winner(population) == winner(straight[0])


def test_a_population_is_resumed_with_its_store_and_never_started_over(straight, data, tmp_path, monkeypatch):
    """The store is noted: without --store it is found again, with another one, or without its states, nothing is touched."""

    def stop(standing):
        raise KeyboardInterrupt

    population, place = PopulationRun.create(tmp_path / "run", load_config(None, TINY), data), tmp_path / "elsewhere"
    monkeypatch.setitem(sys.modules, "adlfs", None)  # not installed
    with pytest.raises(ValueError, match=r"abfs://states cannot be opened: .*adlfs"):
        population.train("serial", stop, store="abfs://states")
    with pytest.raises(KeyboardInterrupt):
        population.train("serial", stop, store=str(place))
    before = population.lineage.read_text()
    with pytest.raises(ValueError, match="leave out --store, or move them there"):
        PopulationRun.open(tmp_path / "run").train("serial", store=str(tmp_path / "other"))
    (place / "population.json").rename(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"elsewhere holds no population, but .* events: restore the states"):
        PopulationRun.open(tmp_path / "run").train("serial")
    assert population.lineage.read_text() == before
    (tmp_path / "kept").rename(place / "population.json")
    again = PopulationRun.open(tmp_path / "run")
    again.train("serial")
    assert again.lineage.read_text() == straight[0].lineage.read_text()
    assert winner(again) == winner(straight[0])
    assert not (again.folder / "states").exists()


def test_a_full_disk_stops_a_population_and_costs_nothing(straight, data, tmp_path, full_disk):
    population = PopulationRun.create(tmp_path / "full", load_config(None, TINY), data)
    market = population.run.market()
    most = market.features.values.nbytes + 1000  # enough for the features, too little for the state of a member
    assert most < min(path.stat().st_size for path in (straight[0].folder / "states").glob("*.safetensors"))
    with full_disk(most), pytest.raises(OSError, match=r"member 0 cannot continue: .*File too large: '.*member_0_step_2"):
        population.train()
    population = PopulationRun.open(population.run.path)
    population.train()
    assert_same(straight[0], population)


def test_a_population_of_which_nobody_is_left_says_so(data, tmp_path, monkeypatch):
    def step_arrays(self, actions):
        step = honest(self, actions)
        step.rewards[:] = np.nan
        return step

    honest = TradingVecEnv.step_arrays
    monkeypatch.setattr(TradingVecEnv, "step_arrays", step_arrays)
    population = PopulationRun.create(tmp_path / "dead", load_config(None, TINY), data)
    with pytest.raises(ValueError, match=r"every member of the population has died.*log\.txt says why"):
        population.train()
    assert "the reward of env 0 at step 0 of the rollout is not finite" in (population.folder / "log.txt").read_text()


def test_reports_show_members_and_copies(straight):
    population, seen = straight
    assert [standing.intervals for standing in seen] == [(1, 3), (2, 3), (3, 3)]
    exploits = [(event["target"], event["source"]) for event in read(population.lineage) if event["event"] == "exploit"]
    assert [copy for standing in seen for copy in standing.copies] == exploits
    assert all(len(standing.rows) == 3 for standing in seen)
    assert seen[-1].metrics["pbt/exploitation_count"] == len(exploits)


def test_a_population_that_was_killed_while_its_folder_was_made_is_begun_again(data, tmp_path, monkeypatch, capsys):
    def begun(population, *arguments, **options):
        raise ValueError(f"{population.run.path} has begun")

    monkeypatch.setattr(PopulationRun, "train", begun)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    settings = [word for setting in TINY for word in ("--set", setting)]
    for given in (["--data", data, *settings], []):  # and then it is resumed
        with pytest.raises(SystemExit):
            main(["population", "--run", str(folder), "--quiet", *given])
        assert f"{folder} has begun" in capsys.readouterr().err.replace("\n", "")


def test_what_is_no_population_is_refused(data, tmp_path):
    config = load_config(None, TINY[:-1])
    with pytest.raises(ValueError, match="no section population"):
        PopulationRun.create(tmp_path / "a", config, data)
    bars = load_source(data)
    Run.create(tmp_path / "b", config, data, prepare_market(bars, config, default_split(len(bars), config.training)))
    with pytest.raises(ValueError, match="not one of a population"):
        PopulationRun.open(tmp_path / "b")


def test_tensorboard_has_what_the_glossary_explains(data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    settings = [*TINY, f"training.tensorboard={board}", "population.intervals=1"]
    PopulationRun.create(tmp_path / "run", load_config(None, settings), data).train()
    events = EventAccumulator(str(board / "run")).Reload()
    tags = {re.sub(r"member_\d+", "member_{id}", tag) for tag in events.Tags()["scalars"]}
    assert {"pbt/max_performance", "pbt/member_{id}/performance", "pbt/member_{id}/learning_rate"} <= tags
    glossary = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    tags = {tag.replace("}/learning_rate", "}/{name}").replace("}/clip_range", "}/{name}") for tag in tags}
    assert [tag for tag in sorted(tags) if f"`{tag}`" not in glossary] == []


# A member.


def test_members_in_one_process_do_not_share_random_numbers(data):
    """Two that take turns learn what each learns alone."""
    factory = factory_of(data)
    setting = {"learning_rate": 1e-3, "clip_range": 0.2}
    alone, first, second = (factory(i, setting, seed) for i, seed in ((0, 7), (0, 7), (1, 8)))
    alone.train(2)
    for _ in range(2):
        first.train(1)
        second.train(1)
    assert torch.equal(alone.model.flat.tensor, first.model.flat.tensor)
    assert not torch.equal(first.model.flat.tensor, second.model.flat.tensor)


def test_schedules_see_the_whole_way(data):
    """A part of the training is not the whole of it: after one of three intervals two thirds remain."""
    learner = factory_of(data)(0, {"learning_rate": 1e-3, "clip_range": 0.2}, 0)
    learner.train(2)
    assert learner.model._current_progress_remaining == pytest.approx(2 / 3)


def test_a_member_that_diverges_says_so(data, monkeypatch):
    learner = factory_of(data)(0, {"learning_rate": 1e-3, "clip_range": 0.2}, 0)
    train = learner.model.train
    monkeypatch.setattr(learner.model, "train", lambda: (train(), learner.model.flat.tensor.data[3:4].fill_(math.inf)))
    with pytest.raises(MemberFailed, match="not finite after 32 steps"):
        learner.train(2)


def test_a_copy_of_another_build_fails_politely(data):
    learner = factory_of(data)(0, {"learning_rate": 1e-3, "clip_range": 0.2}, 0)
    other = factory_of(data, "training.lstm_hidden_size=5")(1, {"learning_rate": 1e-3, "clip_range": 0.2}, 0)
    with pytest.raises(MemberFailed, match="do not fit"):
        learner.copy_from(other.save(), {"learning_rate": 1e-4, "clip_range": 0.3}, 3)
    assert learner.hyperparams["clip_range"] == learner.model.clip_range == 0.2


def test_other_processes_map_the_features(data, tmp_path):
    factory = factory_of(data)
    path = tmp_path / "features.npy"
    np.save(path, factory.market.features.values)
    mapped = pickle.loads(pickle.dumps(MarketFactory(factory.market, factory.validation, factory.config, path)))
    values = mapped.market.features.values
    assert isinstance(values, np.memmap)
    np.testing.assert_array_equal(values, factory.market.features.values)
    assert np.shares_memory(mapped.market.training_env(2, 0).batch.features.values, values)
    assert len(pickle.dumps(mapped)) < len(pickle.dumps(factory)) - values.nbytes // 2


# Scores.


def test_blocks_and_spans():
    assert cut_into_blocks((10, 50), 4, "validation_blocks") == [(10, 20), (20, 30), (30, 40), (40, 50)]
    with pytest.raises(ValueError, match="validation_blocks"):
        cut_into_blocks((10, 50), 20, "validation_blocks")
    split, validation = split_off_validation(Split((0, 400), (400, 500)), 0.25)
    assert (split, validation) == (Split((0, 300), (400, 500)), (300, 400))
    with pytest.raises(ValueError, match="validation_share"):
        split_off_validation(Split((0, 2), (2, 3)), 0.1)


def test_scores_of_a_path():
    path = np.exp(np.cumsum([0.0, 0.1, 0.2, 0.0]))
    assert log_growth(path) == pytest.approx(0.3)
    assert log_sharpe(path) == pytest.approx(0.1 / np.std([0.1, 0.2, 0.0], ddof=1))
    assert log_sharpe(np.ones(4)) == 0.0
    assert math.isfinite(log_growth(np.array([1.0, 0.0])))


def test_the_sharpe_ratio_is_per_year(data):
    growths, sharpes = (
        factory_of(data, f"population.score={score}")(0, {"learning_rate": 1e-3, "clip_range": 0.2}, 0)
        for score in ("growth", "sharpe")
    )
    paths = equity_paths(growths.model, growths._market, growths._blocks)
    bars = growths._market.bars
    per_year = (len(bars) - 1) / ((bars.index[-1] - bars.index[0]).days / 365.25)
    assert growths.score() == [log_growth(path) for path in paths]
    np.testing.assert_allclose(sharpes.score(), [log_sharpe(path) * math.sqrt(per_year) for path in paths], rtol=2e-3)


# Tunable hyperparameters.


def test_every_hyperparameter_reads_what_it_was_set_to(data):
    factory = factory_of(data, "training.adversary={epsilon: 0.05, steps: 3}")
    model = build_model(factory.market, factory.config.training)
    assert set(ACCESSORS) | {"learning_rate"} == SEARCHABLE
    tunables = TunableHyperparameters(model, tuple(ACCESSORS))
    before = tunables.read()
    changed = {name: 3 if isinstance(value, int) else 0.5 * value + 0.01 for name, value in before.items()}
    tunables.apply(changed)
    assert tunables.read() == changed
    assert model.episode_returns.gamma == model.gamma == changed["gamma"]
    assert model._update_settings().policy.clip == changed["clip_range"]
    assert model._update_settings().policy.entropy == changed["entropy_coef"]
    assert model.kl.config.target == changed["kl_target"]
    assert model.adversary.perturbation.config is model.adversary.config
    assert model.adversary.config.epsilon == changed["adversarial_epsilon"]


def test_hyperparameters_that_do_not_exist_or_must_not_change(data):
    factory = factory_of(data)
    model = build_model(factory.market, factory.config.training)
    with pytest.raises(ValueError, match="hyperparameter"):
        TunableHyperparameters(model, ("batch_size",))
    with pytest.raises(ValueError, match="the model has none"):
        TunableHyperparameters(model, ("adversarial_epsilon",))
    with pytest.raises(ValueError, match="clip_range"):
        TunableHyperparameters(model, ("clip_range",)).apply({"gamma": 0.9})
    watching = factory_of(data, "training.risk={objective: cvar, alpha: 0.2, period: 9}")
    with pytest.raises(ValueError, match="gamma"):
        TunableHyperparameters(build_model(watching.market, watching.config.training), ("gamma",))


def test_the_shipped_population_trains_against_an_adversary(tmp_path, data):
    """PBT and SA-PPO together, from the shipped file, on less data and for less time."""
    less = ["training.n_envs=2", "training.n_steps=16", "population.population_size=2", "population.intervals=2"]
    less += ["population.perturbation_interval=1", "training.tensorboard=null", "training.adversary.warmup_updates=0"]
    config = load_config(ROOT / "configs" / "population_adversarial.yaml", less)
    assert config.training.adversary.epsilon == 0.05
    population = PopulationRun.create(tmp_path / "run", config, data)
    model = population.train().trained_model()
    winner = population.run.info["winner"]["hyperparams"]
    assert model.adversary.config.epsilon == winner["adversarial_epsilon"]
    assert model.adversary.config.coefficient == winner["robust_kl_coef"]
    assert model.entropy.config.initial == winner["entropy_coef"]
