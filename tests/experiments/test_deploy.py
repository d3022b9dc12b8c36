"""The agent of a walk-forward: an ensemble of its seeds, which every command takes as it takes a training."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tailguard.config import load_config
from tailguard.evaluate.attack import AttackPlan
from tailguard.evaluate.play import play, target_weights
from tailguard.experiments import Interrupted, deploy
from tailguard.experiments.deploy import Refit, deploy_last_fold, deploy_refit, open_walkforward
from tailguard.experiments.engines import SERIAL, Engine
from tailguard.experiments.ensemble import Ensemble
from tailguard.experiments.evaluation import attack_run, evaluate_run
from tailguard.experiments.export import export
from tailguard.experiments.prepared_market import Split, prepare_market
from tailguard.experiments.run import Run, train
from tailguard.experiments.selection import load_selection
from tailguard.experiments.trader import Trader
from tailguard.experiments.training import build_model
from tailguard.experiments.trials import Trial
from tailguard.experiments.walkforward import walkforward
from tailguard.market import load_bars, random_walk
from tailguard.ppo.algorithm import DistributionalPPO

TINY = [
    "training.steps=128",
    "training.n_envs=4",
    "training.n_steps=16",
    "training.n_epochs=1",
    "selection={blocks: 2, seeds: 1, stops: [1.0], doubt: -4}",
    "training.policy=MlpLstmPolicy",
    "training.lstm_hidden_size=8",
    "training.tensorboard=null",
    "features.drawdown_window=21",
    "features.slow_window=21",
    "features.horizons=[1, 5]",
    "walkforward={folds: 2, seeds: 2, warmup: 16, jobs: 1}",
]


def silent(done, total, line):
    """Report to nobody."""


@pytest.fixture(scope="module")
def config():
    return load_config(None, TINY)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("walkforward")
    file = folder / "bars.csv"
    random_walk(620, seed=0).iloc[:600].to_csv(file)
    bars = load_bars(file)
    walkforward(bars, config, config.walkforward, folder / "wf", source=str(file))
    return open_walkforward(folder / "wf")


@pytest.fixture(scope="module")
def deployed(finished, tmp_path_factory):
    return deploy_last_fold(finished, tmp_path_factory.mktemp("deployed") / "run")


def test_the_members_are_the_agents_of_the_last_fold(finished, deployed):
    members = deployed.agent().members
    assert len(members) == len(finished.seeds) == 2
    for seed, member in zip(finished.seeds, members, strict=True):
        trained = DistributionalPPO.load(finished.folder / "agents" / f"fold-1-seed-{seed}.safetensors")
        for mine, theirs in zip(member.policy.parameters(), trained.policy.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    assert deployed.split == Split(finished.last.train, finished.last.test)
    assert deployed.config.trading.active == deployed.selection.active


@pytest.mark.parametrize("gain", [1.0, 4.0])
@pytest.mark.parametrize("long_only", [True, False])
def test_an_ensemble_asks_for_the_mean_of_the_weights_that_its_members_ask_for(long_only, gain):
    bars = load_bars({"a": random_walk(300, seed=0), "b": random_walk(300, seed=1)})
    rules = {"long_only": long_only, "leverage": 1.5, "core": (0.4, 0.1), "active": 0.7, "gain": gain}
    config = load_config(
        None, [*TINY, "selection=null", *(f"trading.{key}={json.dumps(value)}" for key, value in rules.items())]
    )
    market = prepare_market(bars, config, Split((0, 250), (250, 300)))
    models = [build_model(market, config.training.model_copy(update={"seed": seed})) for seed in range(3)]
    ensemble = Ensemble(models, config.trading)
    generator = np.random.default_rng(0)
    states, state = [None] * 3, None
    for step in range(5):
        obs = generator.normal(0.0, 5.0, (4, models[0].policy.obs_size)).astype(np.float32)
        starts = np.array([step == 0, step == 0, True, step == 3])
        answers = [model.predict(obs, own, starts, True) for model, own in zip(models, states, strict=True)]
        states = [after for _, after in answers]
        action, state = ensemble.predict(obs, state, starts, True)
        expected = np.mean([target_weights(action, config.trading) for action, _ in answers], axis=0)
        np.testing.assert_allclose(target_weights(action, config.trading), expected, atol=1e-12)
        for mine, theirs in zip(state, (part for own in states for part in own), strict=True):
            assert np.array_equal(mine, theirs)


def test_every_command_takes_it(deployed, tmp_path):
    market, agent = deployed.market(), deployed.agent()
    evaluation = evaluate_run(deployed)
    first, last = deployed.split.span
    (played,) = play(agent, market.bars, market.features, market.trading, [(first, last)], warmup=16)
    assert len(evaluation.agent.returns) == last - 1 - first
    attacked = attack_run(deployed, AttackPlan(epsilons=(0.1,), attacks=("fgsm",), stale=(), dropped=(), noisy=(), draws=20))
    assert set(attacked["attack"]) == {"clean", "fgsm", "worst"}
    trader = Trader(agent, deployed.scaler, deployed.config.features, deployed.config.trading, deployed.timeframe)
    decisions = trader.add(market.bars.iloc[first - 16 - market.features.warmup : last])
    assert decisions[-1].time == market.bars.index[-1]
    assert all(abs(decision.weights).sum() <= 1.0 + 1e-12 for decision in decisions)
    assert np.isfinite(played.targets).all()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("gain", [1.0, 40.0])
def test_the_graph_of_an_ensemble_acts_as_it_does(deployed, tmp_path, gain):
    agent = Ensemble(deployed.agent().members, deployed.config.trading.model_copy(update={"gain": gain}))
    module = torch.jit.load(str(export(agent.policy, tmp_path / "agent", "torchscript")))
    policy = agent.members[0].policy
    memory = [part.repeat(2, 1, 1) for part in policy.initial_state(3)]
    state, generator = None, np.random.default_rng(0)
    for _ in range(4):
        obs = generator.normal(size=(3, policy.obs_size)).astype(np.float32)
        action, *memory = module(torch.from_numpy(obs), *memory)
        expected, state = agent.predict(obs, state, None, True)
        np.testing.assert_allclose(action.numpy(), expected, atol=1e-5)
    for k, part in enumerate(memory):  # hidden, then cell states of the two members
        np.testing.assert_allclose(part.numpy(), np.concatenate([state[k], state[2 + k]]), atol=1e-5)


def test_a_refit_learns_from_all_bars_and_from_those_that_have_come(finished, tmp_path):
    grown = tmp_path / "grown.csv"
    random_walk(620, seed=0).to_csv(grown)
    more = open_walkforward(finished.folder, str(grown))
    assert len(more.bars) == 620
    with pytest.raises(ValueError, match="20 bars more than the walk-forward"):
        deploy_last_fold(more, tmp_path / "run")
    run = deploy_refit(more, tmp_path / "run", silent)
    assert run.split.train == (0, 620)
    assert [path.name for path in run.members] == ["seed-0.safetensors", "seed-1.safetensors"]
    # The same as training with the chosen settings by hand.
    config = run.selection.applied(finished.config)
    market = prepare_market(more.bars, config, run.split)
    by_hand = build_model(market, config.training.model_copy(update={"seed": 1})).learn(config.training.steps)
    for mine, theirs in zip(run.agent().members[1].policy.parameters(), by_hand.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for refused in (evaluate_run, lambda run: attack_run(run, AttackPlan())):
        with pytest.raises(ValueError, match="trained on all bars"):
            refused(run)


def test_an_agent_in_the_place_of_another_is_refused(deployed, tmp_path):
    shutil.copytree(deployed.path, tmp_path / "run")
    first, second = Run.open(tmp_path / "run").members
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=r"seed-1\.safetensors is not the agent that was deployed"):
        Run.open(tmp_path / "run").agent()


def agents(run):
    return [path.read_bytes() for path in run.members]


def test_a_refit_in_processes_is_the_same(finished, tmp_path):
    runs = [
        deploy_refit(finished, tmp_path / engine.name, silent, engine) for engine in (SERIAL, Engine("process", processes=2))
    ]
    assert agents(runs[0]) == agents(runs[1])
    assert runs[0].selection == runs[1].selection


@pytest.mark.parametrize("stopped_at", [Trial, Refit])
def test_a_refit_that_was_stopped_continues(finished, tmp_path, monkeypatch, stopped_at):
    whole, done = deploy_refit(finished, tmp_path / "whole", silent), []

    def work(task, shared, reached):
        if task.name not in done and type(task) is stopped_at and any(type(other) is stopped_at for other in done):
            raise Interrupted("stopped")
        done.append(task)
        return (honest[type(task)])(task, shared, reached)

    honest = {Trial: Trial.work, Refit: Refit.work}
    with monkeypatch.context() as patch:
        for kind in honest:
            patch.setattr(kind, "work", work)
        with pytest.raises(Interrupted):
            deploy_refit(finished, tmp_path / "run", silent)
    assert not (tmp_path / "run").exists()
    before = list(done)
    for kind in honest:
        monkeypatch.setattr(kind, "work", lambda task, *rest: done.append(task) or honest[type(task)](task, *rest))
    run = deploy_refit(finished, tmp_path / "run", silent)
    assert not set(before) & set(done[len(before) :])  # nothing is done twice
    assert agents(run) == agents(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "whole"]


def test_what_a_refit_has_finished_is_not_used_for_other_bars(finished, tmp_path, monkeypatch, caplog):
    def stop(task, shared, reached):
        raise Interrupted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Refit, "work", stop)
        with pytest.raises(Interrupted):
            deploy_refit(finished, tmp_path / "run", silent)
    grown = tmp_path / "grown.csv"
    random_walk(620, seed=0).to_csv(grown)
    more = open_walkforward(finished.folder, str(grown))
    assert agents(deploy_refit(more, tmp_path / "run", silent)) == agents(deploy_refit(more, tmp_path / "again", silent))
    # Other loggers may have something to say as well, such as how a file was read.
    refused = [record.getMessage() for record in caplog.records if record.name == "tailguard.experiments.trials"]
    assert all("is about something else; that is done again" in line for line in refused)
    assert refused


def test_a_refit_is_trained_with_the_schedules_it_was_chosen_with(finished, tmp_path, monkeypatch):
    horizons = []
    monkeypatch.setattr(deploy, "select", lambda *given, **more: replace(finished_selection(finished), steps=64, horizon=128))
    honest = deploy.train_model
    monkeypatch.setattr(
        deploy, "train_model", lambda *given, **more: horizons.append(more["horizon"]) or honest(*given, **more)
    )
    run = deploy_refit(finished, tmp_path / "run", silent)
    assert horizons == [128, 128]
    assert [member.num_timesteps for member in run.agent().members] == [64, 64]


def finished_selection(finished):
    selection = load_selection(finished.folder / "selection" / "fold-1.json")
    early = tuple(replace(candidate, steps=64) for candidate in selection.candidates)
    return replace(selection, candidates=early)


def test_a_second_process_does_not_disturb_the_first(finished, tmp_path, monkeypatch):
    copied = []

    def copy(path):
        if not copied:
            copied.append(path)
            with pytest.raises(ValueError, match="by another process"):
                deploy_last_fold(finished, tmp_path / "run")
        return honest(path)

    honest = deploy.atomic
    monkeypatch.setattr(deploy, "atomic", copy)
    (tmp_path / ".run.unfinished" / "run" / "agents").mkdir(parents=True)  # left by a process that was killed
    (tmp_path / ".run.unfinished" / "run" / "config.yaml").write_text("half")
    run = deploy_last_fold(finished, tmp_path / "run")
    assert all(path.is_file() for path in run.members)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_deployed_is_refused_and_leaves_nothing(finished, deployed, tmp_path):
    with pytest.raises(ValueError, match="no finished walk-forward"):
        open_walkforward(tmp_path)
    other = tmp_path / "other.csv"
    random_walk(600, seed=1).to_csv(other)
    with pytest.raises(ValueError, match="is not what"):
        open_walkforward(finished.folder, str(other))
    with pytest.raises(ValueError, match="not empty"):
        deploy_last_fold(finished, deployed.path)
    agent = finished.folder / "agents" / "fold-1-seed-1.safetensors"
    content = agent.read_bytes()
    for damage in (agent.unlink, lambda: agent.write_bytes(content[:-1])):
        damage()
        with pytest.raises(ValueError, match=r"seed-1\.safetensors: .*: delete .*, and resume the walk-forward"):
            deploy_last_fold(finished, tmp_path / "run")
    agent.write_bytes(content)
    with pytest.raises(ValueError, match="nothing to train"):
        train(Run.open(deployed.path), silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.csv"]
