"""The adapter for Ray Tune, with a real model: the optimizer uses the values that Tune perturbs."""

import pytest

from tailguard.config import load_config
from tailguard.experiments.population_member import MarketFactory
from tailguard.experiments.prepared_market import default_split, prepare_market, split_off_validation
from tailguard.market import random_walk

ray = pytest.importorskip("ray", reason='needs Ray: pip install "tailguard[ray]"')
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in (
        "ResourceWarning",
        "FutureWarning",
        "DeprecationWarning",
        "UserWarning",
        "pytest.PytestUnraisableExceptionWarning",
    )
]
TINY = [
    "training.n_envs=2",
    "training.n_steps=16",
    "training.policy=MlpLstmPolicy",
    "training.lstm_hidden_size=4",
    "training.critic={num_quantiles: 5}",
    "training.tensorboard=null",
    "population={validation_blocks: 2, intervals: 4, perturbation_interval: 1, optimizer_exploit_strategy: copy}",
]


@pytest.fixture(scope="module")
def trial():
    from tailguard.population.tune import trainable

    config, bars = load_config(None, TINY), random_walk(300, seed=0)
    split, validation = split_off_validation(default_split(len(bars), config.training), 0.25)
    return trainable(MarketFactory(prepare_market(bars, config, split), validation, config), 1, ["learning_rate"])


def groups(one):
    return [group["lr"] for group in one.learner.model.policy.optimizer.param_groups]


def test_a_perturbed_learning_rate_is_in_the_optimizer_after_a_restore(trial, tmp_path, monkeypatch):
    """Ray issue 62173: the checkpoint of another trial brings its learning rate along. And it survives the next update."""
    monkeypatch.setattr(trial, "trial_id", property(lambda self: self.config["name"]))
    donor, clone, back = (
        trial(config={"learning_rate": rate, "name": name}) for rate, name in ((1e-3, "a"), (3e-4, "b"), (1e-3, "a"))
    )
    donor.step()
    donor.save_checkpoint(str(tmp_path))
    assert groups(donor) == [1e-3]
    clone.load_checkpoint(str(tmp_path))
    assert groups(clone) == [3e-4]
    assert clone.learner.model.policy.optimizer.state_dict()["state"]
    clone.step()
    assert groups(clone) == [3e-4]
    back.load_checkpoint(str(tmp_path))
    assert back.step() == donor.step()
